"""Launches of embedding's Triton kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.ops._launch import ceil_div, next_power_of_2
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch.tuning import Tuned

__all__ = [
    "AT_ONCE", "CHUNK", "CHUNKS", "FEW", "KERNELS", "TUNED", "TUNED_CHUNK", "EmbeddingPlan", "constants",
    "embedding_plan", "embedding_plans", "launch_backward_atomic", "launch_backward_sorted", "launch_forward",
]  # fmt: skip

_WIDTHS = {"fwd": (5, 6), "bwd": (7,), "bwd_atomic": (5,), "bwd_few": (5,), "bwd_join": (5,)}
KERNELS = {
    name: TritonKernel("accelerant.ops.embedding.triton_kernels", f"embedding_{name}", widths=widths)
    for name, widths in _WIDTHS.items()
}

CHUNK = 32
"""Tokens per program of the sorted backward pass."""

AT_ONCE = 8
"""Partial sums of an index that the sorted backward pass adds per step: 64 registers per thread for 256 columns."""

FEW = 32
"""Up to this many tokens are not sorted; each compares itself with all. The sorted pass of 3 tokens into 1000003 x 65
took an H200 at least 0.155 ms, host time included, torch's own 0.045; bwd_few was not measured."""

CHUNKS = (16, 32, 64, 128)
"""Candidates for CHUNK."""


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """The work of one program: `rows` tokens of `block_d` columns, powers of two."""

    rows: int
    block_d: int
    num_warps: int


@functools.cache
def embedding_plan(D: int) -> EmbeddingPlan:
    """Return the default plan: 1024 elements, 8 per thread, in blocks of at most 256 columns."""
    block_d = min(256, max(8, next_power_of_2(D)))
    return EmbeddingPlan(1024 // block_d, block_d, 4)


@functools.cache
def embedding_plans(D: int) -> tuple[EmbeddingPlan, ...]:
    """Return the candidates for D columns."""
    widest = max(8, next_power_of_2(D))
    tiles = ((512, 256, 2), (1024, 256, 4), (1024, 256, 2), (2048, 256, 4), (2048, 256, 8), (1024, 512, 4))
    sizes = [(elements, min(block_d, widest), warps) for elements, block_d, warps in tiles]
    return tuple(
        dict.fromkeys(EmbeddingPlan(elements // block_d, block_d, warps) for elements, block_d, warps in sizes)
    )


TUNED: dict[str, Tuned[EmbeddingPlan]] = {
    name: Tuned(f"embedding_{name}", default=lambda T, D: embedding_plan(D), candidates=lambda T, D: embedding_plans(D))
    for name in ("fwd", "bwd_atomic")
}
"""Tuned plans of embedding_fwd and embedding_bwd_atomic, keyed by tokens and columns."""

TUNED_CHUNK: Tuned[int] = Tuned("embedding_bwd", default=lambda T, D: CHUNK, candidates=lambda T, D: CHUNKS)
"""Tuned tokens per program of the sorted backward pass."""


def constants(plan: EmbeddingPlan, D: int) -> dict[str, int | bool]:
    """Return the compile-time arguments of embedding_fwd and embedding_bwd_atomic."""
    return {"ROWS": plan.rows, "BLOCK_D": plan.block_d, "EXACT": D % plan.block_d == 0}


def launch_forward(indices: Tensor, weight: Tensor, padding_idx: int, plan: EmbeddingPlan | None = None) -> Tensor:
    """Return the rows of weight, (*indices.shape, D), contiguous."""
    V, D = weight.shape
    y = torch.empty((*indices.shape, D), dtype=weight.dtype, device=weight.device)
    if y.numel():
        T = indices.numel()
        if plan is None:
            plan = TUNED["fwd"](
                weight.device, weight.dtype, (T, D), lambda plan: launch_forward(indices, weight, padding_idx, plan)
            )
        rows = weight if weight.stride(1) == 1 else weight.contiguous()
        KERNELS["fwd"].launch(
            (ceil_div(T, plan.rows), ceil_div(D, plan.block_d)),
            (indices.contiguous(), rows, y, T, V, D, rows.stride(0)),
            constants(plan, D),
            num_warps=plan.num_warps,
        )
    return y


def launch_backward_atomic(
    dy: Tensor, indices: Tensor, weight: Tensor, padding_idx: int, needs: Sequence[bool],
    plan: EmbeddingPlan | None = None,
) -> tuple[Tensor]:  # fmt: skip
    """Sum the gradients of each row by atomic additions in float32; not deterministic."""
    V, D = weight.shape
    sums = torch.zeros((V, D), dtype=torch.float32, device=weight.device)
    if dy.numel():
        T = indices.numel()
        if plan is None:
            plan = TUNED["bwd_atomic"](
                weight.device, weight.dtype, (T, D),
                lambda plan: launch_backward_atomic(dy, indices, weight, padding_idx, needs, plan),
            )  # fmt: skip
        KERNELS["bwd_atomic"].launch(
            (ceil_div(T, plan.rows), ceil_div(D, plan.block_d)),
            (dy.contiguous(), indices.contiguous(), sums, T, V, D, padding_idx),
            constants(plan, D),
            num_warps=plan.num_warps,
        )
    return (sums.to(weight.dtype),)


def launch_backward_sorted(
    dy: Tensor, indices: Tensor, weight: Tensor, padding_idx: int, needs: Sequence[bool], chunk: int | None = None
) -> tuple[Tensor]:
    """Sum the gradients of each row in a fixed order, after torch's sort of the indices; few tokens are not sorted."""
    V, D = weight.shape
    dweight = torch.zeros((V, D), dtype=weight.dtype, device=weight.device)
    if not dy.numel():
        return (dweight,)
    T = indices.numel()
    block_d = min(256, max(32, next_power_of_2(D)))
    blocks = ceil_div(D, block_d)
    dy = dy.contiguous()
    if chunk is None and T <= FEW:
        few = (dy, indices.contiguous(), dweight, T, V, D, padding_idx)
        KERNELS["bwd_few"].launch((T, blocks), few, {"FEW": FEW, "BLOCK_D": block_d}, num_warps=4)
        return (dweight,)
    if chunk is None:
        chunk = TUNED_CHUNK(
            weight.device, weight.dtype, (T, D),
            lambda chunk: launch_backward_sorted(dy, indices, weight, padding_idx, needs, chunk),
        )  # fmt: skip
    numbers, order = torch.sort(indices.reshape(-1), stable=True)
    chunks = ceil_div(T, chunk)
    parts = torch.empty((chunks, 2, D), dtype=torch.float32, device=weight.device)
    fixed, warps = {"CHUNK": chunk, "BLOCK_D": block_d}, 1  # 16 bytes per thread
    args = (dy, numbers, order, dweight, parts, T, V, D, padding_idx)
    KERNELS["bwd"].launch((chunks, blocks), args, fixed, num_warps=warps)
    if chunks > 1:
        join = (numbers, dweight, parts, T, V, D, padding_idx)
        KERNELS["bwd_join"].launch((chunks - 1, blocks), join, fixed | {"AT_ONCE": AT_ONCE}, num_warps=warps)
    return (dweight,)
