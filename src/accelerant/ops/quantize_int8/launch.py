"""Launches of quantize_int8's Triton kernels."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from accelerant.ops._launch import RowPlan, as_rows, ceil_div, next_power_of_2, split_rows
from accelerant.runtime.compilation.triton import TritonKernel

__all__ = ["KERNELS", "PLANS", "WIDE", "WIDE_FROM", "constants", "launch", "row_plan"]

KERNELS = {
    name: TritonKernel("accelerant.ops.quantize_int8.triton_kernels", f"quantize_int8_{name}", widths=widths)
    for name, widths in {"fwd": (4, 5), "wide": (3, 4), "part": (2, 3), "join": (4, 5)}.items()
}

WIDE_FROM = 16384
"""Longer rows do not stay in registers."""

WIDE = RowPlan(rows=1, block_n=4096, num_warps=8)

PLANS = {4096: tuple(RowPlan(rows, 4096, warps) for rows, warps in ((1, 4), (1, 8), (1, 16), (2, 8), (2, 16)))}
"""Candidates of quantize_int8_fwd by columns."""


@functools.cache
def row_plan(N: int) -> RowPlan:
    """Return the default plan of quantize_int8_fwd: about 4096 elements per program, 16 or 32 per thread."""
    block_n = max(16, next_power_of_2(N))
    if block_n <= 2048:
        return RowPlan(rows=min(64, 4096 // block_n), block_n=block_n, num_warps=4)
    return RowPlan(rows=1, block_n=block_n, num_warps=8 if block_n <= 8192 else 16)


def constants(plan: RowPlan, N: int) -> dict[str, int | bool]:
    """Return the compile-time arguments of quantize_int8_fwd."""
    return {"EXACT": plan.block_n == N, "ROWS": plan.rows, "BLOCK_N": plan.block_n}


def launch(x: Tensor, dim: int, plan: RowPlan | None = None) -> tuple[Tensor, Tensor]:
    """Return q, contiguous, and scale; dim counts from 0, x has at least one dimension."""
    last = dim == x.dim() - 1
    rows = x if last else x.movedim(dim, -1)
    N = rows.shape[-1]
    q = torch.empty(rows.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(rows.shape[:-1], dtype=torch.float32, device=x.device)
    M = scale.numel()
    if not M or not N:
        scale.fill_(1.0)
        return (q if last else q.movedim(-1, dim).contiguous()), scale
    lines, stride = as_rows(rows, N)
    if plan is None and N > WIDE_FROM:
        _launch_wide(lines, q, scale, stride)
    else:
        plan = plan or row_plan(N)
        args = (lines, q, scale, M, N, stride)
        KERNELS["fwd"].launch((ceil_div(M, plan.rows),), args, constants(plan, N), num_warps=plan.num_warps)
    return (q if last else q.movedim(-1, dim).contiguous()), scale


def _launch_wide(lines: Tensor, q: Tensor, scale: Tensor, stride: int) -> None:
    """Launch the kernels for rows that do not stay in registers; few rows are split among programs."""
    M, N = scale.numel(), q.shape[-1]
    fixed = {"BLOCK_N": WIDE.block_n}
    parts, span = split_rows(M, N, WIDE.block_n, q.device)
    if parts == 1:
        KERNELS["wide"].launch((M,), (lines, q, scale, N, stride), fixed, num_warps=WIDE.num_warps)
        return
    peaks = torch.empty((M, parts), dtype=torch.int32, device=q.device)
    KERNELS["part"].launch((parts, M), (lines, peaks, N, stride, span), fixed, num_warps=WIDE.num_warps)
    args = (lines, peaks, q, scale, N, stride, span)
    KERNELS["join"].launch((parts, M), args, fixed | {"PARTS": next_power_of_2(parts)}, num_warps=WIDE.num_warps)
