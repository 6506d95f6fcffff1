"""Launches of the kernels of softmax and log_softmax, and the plans of their programs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from accelerant.ops._launch import RowPlan, as_rows, ceil_div, eviction, next_power_of_2, split_rows, whole_rows
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch.tuning import Tuned

__all__ = ["KERNELS", "TUNED", "WIDE_FROM", "constants", "launch_backward", "launch_forward", "row_plan"]

_WIDTHS = {
    "fwd": (3, 4),
    "fwd_wide": (2, 3),
    "fwd_part": (2, 3),
    "fwd_join": (3, 4),
    "fwd_inner": (3,),
    "bwd": (4, 5),
    "bwd_wide": (3, 4),
    "bwd_part": (3, 4),
    "bwd_join": (4, 5),
    "bwd_inner": (4,),
}
KERNELS = {
    name: TritonKernel("accelerant.ops.softmax.triton_kernels", f"softmax_{name}", widths=widths)
    for name, widths in _WIDTHS.items()
}

WIDE_FROM = 16384
"""Maximum columns of a row in registers."""

WIDE = RowPlan(rows=1, block_n=4096, num_warps=8)
INNER_COLUMNS = 64  # 128 bytes of bfloat16, a whole line

NARROW = 8
"""With at most this many columns, a long dimension is moved to the end: the copies cost less than a program with idle
lanes, which took 2.9 ms for 1x70001x3 on an H200. The moved one was not measured."""


@functools.cache
def row_plan(N: int, backward: bool = False) -> RowPlan:
    """Return the default plan of softmax_fwd or softmax_bwd: the fastest measured on an H200 for 4096 columns."""
    block_n = max(16, next_power_of_2(N))
    if block_n <= 2048:
        return RowPlan(rows=4096 // block_n, block_n=block_n, num_warps=4)
    if backward:
        return RowPlan(rows=1, block_n=block_n, num_warps=16)
    return RowPlan(rows=1, block_n=block_n, num_warps=4 if block_n == 4096 else 8 if block_n <= 8192 else 16)


def _tuned(way: str, log: bool) -> Tuned[RowPlan]:
    return Tuned(
        f"{'log_' if log else ''}softmax_{way}",
        default=lambda M, N: row_plan(N, way == "bwd"),
        candidates=lambda M, N: whole_rows(max(16, next_power_of_2(N))),
    )


TUNED = {(way, log): _tuned(way, log) for way in ("fwd", "bwd") for log in (False, True)}
"""The plans of softmax_fwd and softmax_bwd by direction and whether the logarithm is taken."""


def constants(plan: RowPlan, N: int, log: bool, eviction: str) -> dict[str, int | bool | str]:
    """Return the compile-time arguments of softmax_fwd and softmax_bwd."""
    return {"LOG": log, "ROWS": plan.rows, "BLOCK_N": plan.block_n, "EXACT": plan.block_n == N, "EVICTION": eviction}


@functools.cache
def inner_plan(N: int) -> RowPlan:
    """Return the plan of one step of the _inner kernels: a tile of INNER_COLUMNS columns."""
    return RowPlan(rows=1, block_n=min(64, max(2, next_power_of_2(N))), num_warps=4)


def launch_forward(log: bool, x: Tensor, dim: int, plan: RowPlan | None = None) -> Tensor:
    """Return softmax or its logarithm, contiguous; dim counts from 0."""
    if _moves_to_end(x, dim):
        return launch_forward(log, x.movedim(dim, -1).contiguous(), x.dim() - 1).movedim(-1, dim).contiguous()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return y
    N = x.shape[dim]
    if dim < x.dim() - 1:
        _launch_inner("fwd_inner", log, (x.contiguous(), y), dim)
        return y
    M = x.numel() // N
    rows, stride = as_rows(x, N)
    if plan is None and N > WIDE_FROM:
        _launch_wide("fwd", log, (rows,), y, stride)
        return y
    if plan is None:
        plan = TUNED["fwd", log](x.device, x.dtype, (M, N), lambda plan: launch_forward(log, x, dim, plan))
    args = (rows, y, M, N, stride)
    named = constants(plan, N, log, eviction(x, 2))
    KERNELS["fwd"].launch((ceil_div(M, plan.rows),), args, named, num_warps=plan.num_warps)
    return y


def launch_backward(log: bool, dy: Tensor, y: Tensor, dim: int, plan: RowPlan | None = None) -> Tensor:
    """Return dx, contiguous; dim counts from 0."""
    if _moves_to_end(y, dim):
        dy, y = (each.movedim(dim, -1).contiguous() for each in (dy, y))
        return launch_backward(log, dy, y, y.dim() - 1).movedim(-1, dim).contiguous()
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
    if plan is None and N > WIDE_FROM:
        _launch_wide("bwd", log, (rows, y), dx, stride)
        return dx
    if plan is None:
        plan = TUNED["bwd", log](y.device, y.dtype, (M, N), lambda plan: launch_backward(log, dy, y, dim, plan))
    args = (rows, y, dx, M, N, stride)
    named = constants(plan, N, log, eviction(y, 3))
    KERNELS["bwd"].launch((ceil_div(M, plan.rows),), args, named, num_warps=plan.num_warps)
    return dx


def _launch_wide(way: str, log: bool, inputs: tuple[Tensor, ...], result: Tensor, stride: int) -> None:
    """Launch for rows that exceed the registers, split among programs where they are few; stride of the first input."""
    N = result.shape[-1]
    M, fixed = result.numel() // N, {"BLOCK_N": WIDE.block_n}
    whole = {**fixed, "LOG": log}
    parts, span = split_rows(M, N, WIDE.block_n, result.device)
    if parts == 1:
        KERNELS[f"{way}_wide"].launch((M,), (*inputs, result, N, stride), whole, num_warps=WIDE.num_warps)
        return
    sums = torch.empty((M, 2 if way == "fwd" else 1, parts), dtype=torch.float32, device=result.device)
    grid, sizes = (parts, M), (N, stride, span)
    summed = fixed if way == "fwd" else whole
    KERNELS[f"{way}_part"].launch(grid, (*inputs, sums, *sizes), summed, num_warps=WIDE.num_warps)
    joined = whole | {"PARTS": next_power_of_2(parts)}
    KERNELS[f"{way}_join"].launch(grid, (*inputs, sums, result, *sizes), joined, num_warps=WIDE.num_warps)


def _launch_inner(name: str, log: bool, tensors: tuple[Tensor, ...], dim: int) -> None:
    """Launch over a dimension of dense tensors that is not the last."""
    N = tensors[0].shape[dim]
    outer, inner = _around(tensors[0], dim)
    tile = inner_plan(N)
    grid = (outer * ceil_div(inner, INNER_COLUMNS),)
    fixed = {"LOG": log, "BLOCK_N": tile.block_n, "BLOCK_I": INNER_COLUMNS}
    KERNELS[name].launch(grid, (*tensors, N, inner), fixed, num_warps=tile.num_warps)


def _moves_to_end(x: Tensor, dim: int) -> bool:
    """Return whether a dimension is long and has few columns; see NARROW."""
    return dim < x.dim() - 1 and x.shape[dim] > WIDE_FROM and _around(x, dim)[1] <= NARROW


def _around(x: Tensor, dim: int) -> tuple[int, int]:
    """Return the number of elements before and after a dimension."""
    return x.shape[:dim].numel(), x.shape[dim + 1 :].numel()
