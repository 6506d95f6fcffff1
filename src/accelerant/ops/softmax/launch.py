"""Launches of softmax's kernels: what a program takes of the rows."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from accelerant.ops._rows import RowPlan, as_rows, ceil_div, next_power_of_2
from accelerant.runtime.triton import TritonKernel

__all__ = ["KERNELS", "WIDE_FROM", "constants", "launch_backward", "launch_forward", "row_plan"]

_NAMES = ("fwd", "bwd", "fwd_wide", "bwd_wide", "fwd_inner", "bwd_inner")
KERNELS = {name: TritonKernel("accelerant.ops.softmax.triton_kernels", f"softmax_{name}") for name in _NAMES}

WIDE_FROM = 16384
"""Above this many columns a row does not stay in registers."""

WIDE = RowPlan(rows=1, block_n=4096, num_warps=8)
INNER_COLUMNS = 64  # 128 bytes of bfloat16, a whole line


@functools.cache
def row_plan(N: int) -> RowPlan:
    """What a program of softmax_fwd and of softmax_bwd takes: about 4096 elements, 16 or 32 a thread."""
    block_n = max(16, next_power_of_2(N))
    if block_n <= 2048:
        return RowPlan(rows=4096 // block_n, block_n=block_n, num_warps=4)
    return RowPlan(rows=1, block_n=block_n, num_warps=8 if block_n <= 8192 else 16)


def constants(plan: RowPlan, N: int) -> dict[str, int | bool]:
    """The compile-time arguments of softmax_fwd and softmax_bwd."""
    return {"ROWS": plan.rows, "BLOCK_N": plan.block_n, "EXACT": plan.block_n == N, "STAGES": plan.stages}


@functools.cache
def inner_plan(N: int) -> RowPlan:
    """What a step of the _inner kernels takes: a tile of INNER_COLUMNS columns."""
    return RowPlan(rows=1, block_n=min(64, max(2, next_power_of_2(N))), num_warps=4)


def launch_forward(x: Tensor, dim: int, plan: RowPlan | None = None) -> Tensor:
    """Apply softmax: y, contiguous; dim counts from 0."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    N = x.shape[dim]
    if dim < x.dim() - 1:
        outer, inner = _around(x, dim)
        tile = inner_plan(N)
        grid = (outer * ceil_div(inner, INNER_COLUMNS),)
        fixed = {"BLOCK_N": tile.block_n, "BLOCK_I": INNER_COLUMNS}
        KERNELS["fwd_inner"].launch(grid, (x.contiguous(), y, N, inner), fixed, num_warps=tile.num_warps)
        return y
    M = x.numel() // N
    rows, stride = as_rows(x, N)
    if plan is None and N > WIDE_FROM:
        fixed = {"BLOCK_N": WIDE.block_n}
        KERNELS["fwd_wide"].launch((M,), (rows, y, N, stride), fixed, num_warps=WIDE.num_warps)
        return y
    plan = plan or row_plan(N)
    grid = (plan.grid(M, x.device),)
    KERNELS["fwd"].launch(grid, (rows, y, M, N, stride), constants(plan, N), num_warps=plan.num_warps)
    return y


def launch_backward(dy: Tensor, y: Tensor, dim: int, plan: RowPlan | None = None) -> Tensor:
    """Find dx, contiguous; dim counts from 0."""
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if not y.numel():
        return dx
    N = y.shape[dim]
    y = y.contiguous()
    if dim < y.dim() - 1:
        outer, inner = _around(y, dim)
        tile = inner_plan(N)
        grid = (outer * ceil_div(inner, INNER_COLUMNS),)
        fixed = {"BLOCK_N": tile.block_n, "BLOCK_I": INNER_COLUMNS}
        KERNELS["bwd_inner"].launch(grid, (dy.contiguous(), y, dx, N, inner), fixed, num_warps=tile.num_warps)
        return dx
    M = y.numel() // N
    rows, stride = as_rows(dy, N)
    if plan is None and N > WIDE_FROM:
        fixed = {"BLOCK_N": WIDE.block_n}
        KERNELS["bwd_wide"].launch((M,), (rows, y, dx, N, stride), fixed, num_warps=WIDE.num_warps)
        return dx
    plan = plan or row_plan(N)
    grid = (plan.grid(M, y.device),)
    KERNELS["bwd"].launch(grid, (rows, y, dx, M, N, stride), constants(plan, N), num_warps=plan.num_warps)
    return dx


def _around(x: Tensor, dim: int) -> tuple[int, int]:
    """How many elements there are before and after a dimension."""
    return x.shape[:dim].numel(), x.shape[dim + 1 :].numel()
