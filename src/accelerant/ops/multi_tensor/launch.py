"""Launches of the multi-tensor kernels, and the arguments of an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from accelerant.errors import AccelerantError, CompileError, LaunchError
from accelerant.ops.multi_tensor.tables import Table, Tensors, Workspace
from accelerant.runtime.compilation.triton import TritonKernel

__all__ = [
    "KERNELS", "KINDS", "PLANS", "SMALL", "AdamWGroup", "ChunkPlan", "SGDGroup", "Update", "launch_clip",
    "launch_norm", "launch_update",
]  # fmt: skip

_NAMES = ("norm", "total", "scale", "adamw_prepare", "adamw", "sgd_prepare", "sgd")
KERNELS = {name: TritonKernel("accelerant.ops.multi_tensor.triton_kernels", f"multi_tensor_{name}") for name in _NAMES}
KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The work of a program: `chunk` elements in steps of `block`, powers of two of at least 16, by num_warps warps."""

    chunk: int
    block: int
    num_warps: int


PLANS = {
    "norm": ChunkPlan(16384, 4096, 8), "scale": ChunkPlan(4096, 4096, 8),
    "adamw": ChunkPlan(1024, 1024, 4), "sgd": ChunkPlan(1024, 1024, 4),
}  # fmt: skip
"""By kernel; tests and measurements replace entries."""

SMALL = {"BLOCK_T": 256, "BLOCK_P": 8192}
_SMALL_WARPS = 16


class AdamWGroup(NamedTuple):
    """AdamW's hyperparameters of a parameter group; lr is a number, or a float32 scalar on the device."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool

    def row(self) -> tuple[float, ...]:
        """Return the values in the kernels' order: seven numbers, and the address of lr or 0."""
        lr, address = _rate(self.lr)
        return lr, self.beta1, self.beta2, self.eps, self.weight_decay, -1.0 if self.maximize else 1.0, 0.0, address


class SGDGroup(NamedTuple):
    """SGD's hyperparameters of a parameter group; lr is a number, or a float32 scalar on the device."""

    lr: float | Tensor
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    maximize: bool

    def row(self) -> tuple[float, ...]:
        """Return the values in the kernels' order: seven numbers, and the address of lr or 0."""
        lr, address = _rate(self.lr)
        sign = -1.0 if self.maximize else 1.0
        return lr, self.momentum, self.dampening, float(self.nesterov), self.weight_decay, sign, 0.0, address


def _rate(lr: float | Tensor) -> tuple[float, int]:
    return (0.0, lr.data_ptr()) if isinstance(lr, Tensor) else (lr, 0)


@dataclass(slots=True)
class Update:
    """The arguments of adamw_step and of sgd_step.

    Attributes:
        tensors: parameters, gradients and state.
        groups: hyperparameters of the parameter groups.
        workspace: the device's.
        table: the tensors' table; None if no Triton kernel runs.
        max_norm: clip the gradients to this norm on the fly, without changing them; the norm goes to workspace.norm.
        grad_scale: factor by which the gradients are too large (a loss scale).
        found_inf: not 0 if the step is to change nothing.
    """

    tensors: Tensors
    groups: Sequence[AdamWGroup | SGDGroup]
    workspace: Workspace
    table: Table | None = None
    max_norm: float | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


def launch_norm(table: Table, out: Tensor, max_norm: float = 1.0) -> None:
    """Write the norm of the gradients and the clipping coefficient into out, two float32."""
    partials = _launch_partials(table)
    args = (partials, partials.numel(), out, max_norm)
    KERNELS["total"].launch((1,), args, {"BLOCK_P": SMALL["BLOCK_P"]}, num_warps=_SMALL_WARPS)


def launch_clip(table: Table, scale: Tensor) -> None:
    """Multiply the gradients in place; a scale of 1 costs a launch and no traffic."""
    _launch_buckets("scale", table, [{"GRAD": KINDS[bucket.grad]} for bucket in table.buckets], scale)


def launch_update(name: str, update: Update) -> None:
    """Launch the norm if max_norm is set, the coefficients, and the update of "adamw" or "sgd"."""
    table = update.table
    if table is None:
        raise AccelerantError(f"{name}: a launch without a table")
    values = update.workspace.values.refresh(tuple([group.row() for group in update.groups]))
    partials = None if update.max_norm is None else _launch_partials(table)
    norm = (None, 0, None) if partials is None else (partials, partials.numel(), update.workspace.norm)
    KERNELS[f"{name}_prepare"].launch(
        (1,),
        (
            table.rows(), values, table.coefficients(), len(table.numels), *norm, update.max_norm or 0.0,
            update.grad_scale, update.found_inf,
        ),
        {**SMALL, "CLIP": partials is not None},
        num_warps=_SMALL_WARPS,
    )  # fmt: skip
    constants: list[dict[str, object]] = []
    for bucket in table.buckets:
        param, state = KINDS[bucket.param or torch.float32], KINDS[bucket.state or torch.float32]
        buffer = {"BUFFER": bucket.state is not None} if name == "sgd" else {}
        constants.append(
            {"PARAM": param, "GRAD": KINDS[bucket.grad], "STATE": state, **buffer, "MASTER": bucket.master}
        )
    _launch_buckets(name, table, constants, table.coefficients())


def _launch_buckets(name: str, table: Table, constants: Sequence[Mapping[str, object]], last: Tensor) -> None:
    """Launch a kernel that changes tensors, once per bucket.

    Raises:
        CompileError, LaunchError: before anything was changed, so that another implementation can start over.
        AccelerantError: after something was changed.
    """
    plan = PLANS[name]
    maps = [table.chunks(i, plan.chunk) for i in range(len(table.buckets))]  # all allocations before the first launch
    for i, (bucket, chunks) in enumerate(zip(table.buckets, maps, strict=True)):
        try:
            fixed = {**constants[i], **_sizes(plan, bucket.layout)}
            args = (chunks, table.rows(), last)
            KERNELS[name].launch((chunks.numel(),), args, fixed, num_warps=plan.num_warps)
        except (CompileError, LaunchError) as error:
            if not i:
                raise
            raise AccelerantError(f"{name}: {i} of {len(maps)} launches ran, then: {error}") from error


def _launch_partials(table: Table) -> Tensor:
    """Return the sums of squares, one per chunk."""
    plan = PLANS["norm"]
    maps = [table.chunks(i, plan.chunk) for i in range(len(table.buckets))]
    partials = table.partials(sum(chunks.numel() for chunks in maps), SMALL["BLOCK_P"])
    first = 0
    for bucket, chunks in zip(table.buckets, maps, strict=True):
        fixed = {"GRAD": KINDS[bucket.grad], **_sizes(plan, bucket.layout)}
        args = (chunks, table.rows(), partials, first)
        KERNELS["norm"].launch((chunks.numel(),), args, fixed, num_warps=plan.num_warps)
        first += chunks.numel()
    return partials


def _sizes(plan: ChunkPlan, layout: str) -> dict[str, int | bool]:
    return {"CHUNK": plan.chunk, "BLOCK": plan.block, "ALIGNED": layout == "aligned"}
