"""Launches of the kernels of softmax and log_softmax: what a program takes of the rows."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from accelerant.ops._rows import RowPlan, as_rows, ceil_div, next_power_of_2
from accelerant.runtime.triton import TritonKernel

__all__ = ["KERNELS", "PLANS", "WIDE_FROM", "constants", "launch_backward", "launch_forward", "row_plan"]

_NAMES = ("fwd", "bwd", "fwd_wide", "bwd_wide", "fwd_inner", "bwd_inner")
KERNELS = {name: TritonKernel("accelerant.ops.softmax.triton_kernels", f"softmax_{name}") for name in _NAMES}

WIDE_FROM = 16384
"""Above this many columns a row does not stay in registers."""

WIDE = RowPlan(rows=1, block_n=4096, num_warps=8)
INNER_COLUMNS = 64  # 128 bytes of bfloat16, a whole line

PLANS = {
    4096: (
        *(RowPlan(1, 4096, warps) for warps in (4, 8, 16)),
        *(RowPlan(2, 4096, warps) for warps in (8, 16)),
    )
}
"""Columns -> what is worth timing for softmax_fwd and softmax_bwd."""


@functools.cache
def row_plan(N: int) -> RowPlan:
    """What a program of softmax_fwd and of softmax_bwd takes: about 4096 elements, 16 or 32 a thread."""
    block_n = max(16, next_power_of_2(N))
    if block_n <= 2048:
        return RowPlan(rows=4096 // block_n, block_n=block_n, num_warps=4)
    return RowPlan(rows=1, block_n=block_n, num_warps=8 if block_n <= 8192 else 16)


def constants(plan: RowPlan, N: int, log: bool) -> dict[str, int | bool]:
    """The compile-time arguments of softmax_fwd and softmax_bwd."""
    return {"LOG": log, "ROWS": plan.rows, "BLOCK_N": plan.block_n, "EXACT": plan.block_n == N}


@functools.cache
def inner_plan(N: int) -> RowPlan:
    """What a step of the _inner kernels takes: a tile of INNER_COLUMNS columns."""
    return RowPlan(rows=1, block_n=min(64, max(2, next_power_of_2(N))), num_warps=4)


@functools.cache
def _for_rows(suffix: str, N: int, log: bool) -> tuple[TritonKernel, RowPlan, dict[str, int | bool]]:
    """The kernel for rows of N elements, ready to launch."""
    if N > WIDE_FROM:
        return KERNELS[f"{suffix}_wide"], WIDE, {"LOG": log, "BLOCK_N": WIDE.block_n}
    plan = row_plan(N)
    return KERNELS[suffix], plan, constants(plan, N, log)


def launch_forward(log: bool, x: Tensor, dim: int, plan: RowPlan | None = None) -> Tensor:
    """Apply softmax, or its logarithm: y, contiguous; dim counts from 0."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return y
    N = x.shape[dim]
    if dim < x.dim() - 1:
        _launch_inner("fwd_inner", log, (x.contiguous(), y), dim)
        return y
    M = x.numel() // N
    rows, stride = as_rows(x, N)
    kernel, chosen, fixed = _for_rows("fwd", N, log)
    if plan is not None:
        kernel, chosen, fixed = KERNELS["fwd"], plan, constants(plan, N, log)
    sizes = (N, stride) if N > WIDE_FROM else (M, N, stride)
    kernel.launch((ceil_div(M, chosen.rows),), (rows, y, *sizes), fixed, num_warps=chosen.num_warps)
    return y


def launch_backward(log: bool, dy: Tensor, y: Tensor, dim: int, plan: RowPlan | None = None) -> Tensor:
    """Find dx, contiguous; dim counts from 0."""
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if not y.numel():
        return dx
    N = y.shape[dim]
    y = y.contiguous()
    if dim < y.dim() - 1:
        _launch_inner("bwd_inner", log, (dy.contiguous(), y, dx), dim)
        return dx
    M = y.numel() // N
    rows, stride = as_rows(dy, N)
    kernel, chosen, fixed = _for_rows("bwd", N, log)
    if plan is not None:
        kernel, chosen, fixed = KERNELS["bwd"], plan, constants(plan, N, log)
    sizes = (N, stride) if N > WIDE_FROM else (M, N, stride)
    kernel.launch((ceil_div(M, chosen.rows),), (rows, y, dx, *sizes), fixed, num_warps=chosen.num_warps)
    return dx


def _launch_inner(name: str, log: bool, tensors: tuple[Tensor, ...], dim: int) -> None:
    """Run over a dimension that is not the last, of dense tensors."""
    N = tensors[0].shape[dim]
    outer, inner = _around(tensors[0], dim)
    tile = inner_plan(N)
    grid = (outer * ceil_div(inner, INNER_COLUMNS),)
    fixed = {"LOG": log, "BLOCK_N": tile.block_n, "BLOCK_I": INNER_COLUMNS}
    KERNELS[name].launch(grid, (*tensors, N, inner), fixed, num_warps=tile.num_warps)


def _around(x: Tensor, dim: int) -> tuple[int, int]:
    """How many elements there are before and after a dimension."""
    return x.shape[:dim].numel(), x.shape[dim + 1 :].numel()
