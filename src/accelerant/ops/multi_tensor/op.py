"""Multi-tensor updates: AdamW, SGD, the gradients' norm and their clipping; launches of their kernels, and Operations.

They change their arguments and have no gradient, so they are not registered with torch: the optimizers of
accelerant.nn.optim call the Operations directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from accelerant.errors import AccelerantError, CompileError, LaunchError
from accelerant.ops._launch import triton_operation
from accelerant.ops._refusals import refuses_float64
from accelerant.ops.multi_tensor.tables import AdamWGroup, Bucket, SGDGroup, Table, Tensors, Update, Workspace, check
from accelerant.ops.multi_tensor.torch_steps import torch_adamw, torch_clip, torch_norm, torch_sgd
from accelerant.runtime.compilation.triton import TritonKernel, refuses_triton
from accelerant.runtime.dispatch import Case, Cost

__all__ = [
    "KERNELS", "KINDS", "PLANS", "SMALL", "AdamWGroup", "ChunkPlan", "SGDGroup", "Tensors", "Update", "Workspace",
    "adamw_step", "case_of", "check", "clip_step", "global_norm", "launch_clip", "launch_norm", "launch_update",
    "sgd_step",
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


def launch_norm(grads: Sequence[Tensor], table: Table, max_norm: float) -> Tensor:
    """Return the norm of the gradients and the clipping coefficient, two float32."""
    out = torch.empty(2, dtype=torch.float32, device=grads[0].device)
    partials = _launch_partials(table)
    args = (partials, partials.numel(), out, max_norm)
    KERNELS["total"].launch((1,), args, {"BLOCK_P": SMALL["BLOCK_P"]}, num_warps=_SMALL_WARPS)
    return out


def launch_clip(grads: Sequence[Tensor], table: Table, scale: Tensor) -> None:
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


# --- operations ------------------------------------------------------------------------------------------------------


def _buckets(case: Case) -> list[Bucket]:
    return [option for option in case.options if isinstance(option, Bucket)]


def _refuses(case: Case) -> str | None:
    for bucket in _buckets(case):
        if torch.float64 in (bucket.param, bucket.grad, bucket.state):
            return refuses_float64(torch.float64)
        if bucket.layout == "strided":
            return "tensors with gaps, or parameters whose layout differs from their gradients and state"
    return refuses_triton(case.device)


def _update_cost(case: Case) -> Cost:
    """Return the cost of reading and writing parameters and state, and of reading gradients, twice with the norm."""
    states = 2 if "sgd" not in case.options else 1
    reads = 2 if "clipped" in case.options else 1
    total = 0
    for bucket in _buckets(case):
        moved = reads * bucket.grad.itemsize
        if bucket.param is not None:
            moved += bucket.param.itemsize + (8 if bucket.master else bucket.param.itemsize)
        if bucket.state is not None:
            moved += 2 * states * bucket.state.itemsize
        total += bucket.elements * moved
    return Cost(total, (15 if states == 2 else 6) * case.shape[1])


def _gradients_cost(passes: int, case: Case) -> Cost:
    return Cost(passes * sum(bucket.elements * bucket.grad.itemsize for bucket in _buckets(case)), 2 * case.shape[1])


adamw_step, sgd_step = (
    triton_operation(
        f"{name}_step", partial(launch_update, name), torch_step, cost=_update_cost, refuses=_refuses, mutates=True
    )
    for name, torch_step in (("adamw", torch_adamw), ("sgd", torch_sgd))
)
global_norm = triton_operation(
    "global_norm",
    launch_norm,
    lambda grads, table, max_norm: torch_norm(grads, max_norm),
    cost=partial(_gradients_cost, 1),
    refuses=_refuses,
)
clip_step = triton_operation(
    "clip_step",
    launch_clip,
    lambda grads, table, scale: torch_clip(grads, scale),
    cost=partial(_gradients_cost, 2),
    refuses=_refuses,
    mutates=True,
)


def case_of(table: Table, device: torch.device, *options: str) -> Case:
    """Return the case of a table: its buckets, the largest first, and the options."""
    largest = table.buckets[0]
    return Case(device, largest.param or largest.grad, table.shape, (*table.buckets, *options))
