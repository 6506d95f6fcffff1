"""Launches of layer_norm's kernels: what a program takes of the rows."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from accelerant.ops._rows import RowPlan, as_rows, ceil_div, multiprocessors, next_power_of_2
from accelerant.runtime.triton import TritonKernel

__all__ = [
    "KERNELS",
    "WIDE_BACKWARD",
    "WIDE_FORWARD",
    "backward_constants",
    "backward_plan",
    "forward_constants",
    "forward_plan",
    "launch_backward",
    "launch_forward",
    "reduce_plan",
]

_NAMES = ("fwd", "bwd", "bwd_reduce", "fwd_wide", "bwd_wide", "bwd_columns")
KERNELS = {name: TritonKernel("accelerant.ops.layer_norm.triton_kernels", f"layer_norm_{name}") for name in _NAMES}

WIDE_FORWARD = 16384
"""Above this many columns a row does not stay in registers, forward: 64 float32 values a thread of 8 warps."""

WIDE_BACKWARD = 8192
"""The same, backward, where x, dy, the weight and two running sums stand side by side."""

WIDE = RowPlan(rows=1, block_n=4096, num_warps=8)
COLUMNS = RowPlan(rows=16, block_n=128, num_warps=4, programs=4)


# The plans below are the fastest of 14 to 20 measured on an H200 at 16384x4096 and 65536x768 in bfloat16.


@functools.cache
def forward_plan(N: int) -> RowPlan:
    """What a program of layer_norm_fwd takes: at least 2048 elements, 16 or 32 a thread."""
    block_n = max(16, next_power_of_2(N))
    if block_n <= 1024:
        return RowPlan(rows=2048 // block_n, block_n=block_n, num_warps=2)
    return RowPlan(rows=1, block_n=block_n, num_warps=min(16, block_n // 512))


@functools.cache
def backward_plan(N: int) -> RowPlan:
    """What a program of layer_norm_bwd takes; three stages of x and dy in 96 KiB of shared memory at most."""
    block_n = max(16, next_power_of_2(N))
    stages = 3 if block_n <= 4096 else 1
    if block_n <= 2048:
        return RowPlan(rows=4096 // block_n, block_n=block_n, num_warps=4, programs=3, stages=stages)
    return RowPlan(rows=1, block_n=block_n, num_warps=8 if block_n <= 4096 else 16, programs=2, stages=stages)


@functools.cache
def reduce_plan(N: int) -> RowPlan:
    """What a program of layer_norm_bwd_reduce takes: few columns, so that a narrow sum still fills the device."""
    return RowPlan(rows=128, block_n=8 if N <= 4096 else 64, num_warps=4)


def forward_constants(plan: RowPlan, N: int) -> dict[str, int | bool]:
    """The compile-time arguments of layer_norm_fwd."""
    return {"ROWS": plan.rows, "BLOCK_N": plan.block_n, "EXACT": plan.block_n == N}


def backward_constants(plan: RowPlan, N: int) -> dict[str, int | bool]:
    """The compile-time arguments of layer_norm_bwd."""
    warps_along_rows = plan.block_n < 256 * plan.num_warps  # a warp reads 256 elements of a row: 16 bytes a thread
    kept = plan.rows if warps_along_rows else 1
    return {**forward_constants(plan, N), "STAGES": plan.stages, "KEPT": kept}


def launch_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    statistics: bool = True,
    plan: RowPlan | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Normalise: y, contiguous, and if asked each row's mean and 1 / standard deviation in float32."""
    N = x.shape[-1]
    M = x.numel() // N if N else x.shape[:-1].numel()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean = torch.empty(M, dtype=torch.float32, device=x.device) if statistics else None
    rstd = torch.empty_like(mean) if mean is not None else None
    if not M or not N:
        return y, None if mean is None else mean.zero_(), None if rstd is None else rstd.zero_()
    rows, stride = as_rows(x, N)
    weight, bias = _dense(weight), _dense(bias)
    if plan is None and N > WIDE_FORWARD:
        constants = {"BLOCK_N": WIDE.block_n}
        args = (rows, weight, bias, y, mean, rstd, N, stride, eps)
        KERNELS["fwd_wide"].launch((M,), args, constants, num_warps=WIDE.num_warps)
        return y, mean, rstd
    plan = plan or forward_plan(N)
    args_rows = (rows, weight, bias, y, mean, rstd, M, N, stride, eps)
    grid = (ceil_div(M, plan.rows),)
    KERNELS["fwd"].launch(grid, args_rows, forward_constants(plan, N), num_warps=plan.num_warps)
    return y, mean, rstd


def launch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
    plan: RowPlan | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Find dx, contiguous, and the gradients of weight and bias where a dtype is given for them."""
    N = x.shape[-1]
    M = x.numel() // N if N else 0
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight = None if dweight_dtype is None else torch.empty(N, dtype=dweight_dtype, device=x.device)
    dbias = None if dbias_dtype is None else torch.empty(N, dtype=dbias_dtype, device=x.device)
    if not M:
        return dx, None if dweight is None else dweight.zero_(), None if dbias is None else dbias.zero_()
    rows, stride = as_rows(x, N)
    dy_rows, dy_stride = as_rows(dy, N)
    weight = _dense(weight)

    def part(programs: int, wanted: Tensor | None) -> Tensor | None:
        return None if wanted is None else torch.empty((programs, N), dtype=torch.float32, device=x.device)

    if plan is None and N > WIDE_BACKWARD:
        args = (dy_rows, rows, weight, mean, rstd, dx, N, dy_stride, stride)
        KERNELS["bwd_wide"].launch((M,), args, {"BLOCK_N": WIDE.block_n}, num_warps=WIDE.num_warps)
        if dweight is None and dbias is None:
            return dx, None, None
        strips = ceil_div(N, COLUMNS.block_n)
        programs = min(ceil_div(M, COLUMNS.rows), max(1, COLUMNS.programs * multiprocessors(x.device) // strips))
        dweights, dbiases = part(programs, dweight), part(programs, dbias)
        args_columns = (dy_rows, rows, mean, rstd, dweights, dbiases, M, N, dy_stride, stride)
        constants = {"ROWS": COLUMNS.rows, "BLOCK_N": COLUMNS.block_n}
        KERNELS["bwd_columns"].launch((strips, programs), args_columns, constants, num_warps=COLUMNS.num_warps)
    else:
        plan = plan or backward_plan(N)
        programs = plan.grid(M, x.device)
        dweights, dbiases = part(programs, dweight), part(programs, dbias)
        args_rows = (dy_rows, rows, weight, mean, rstd, dx, dweights, dbiases, M, N, dy_stride, stride)
        KERNELS["bwd"].launch((programs,), args_rows, backward_constants(plan, N), num_warps=plan.num_warps)
    if dweights is not None or dbiases is not None:
        args_reduce = (dweights, dbiases, dweight, dbias, programs, N)
        reduce = reduce_plan(N)
        constants = {"BLOCK_P": reduce.rows, "BLOCK_N": reduce.block_n}
        grid = (ceil_div(N, reduce.block_n),)
        KERNELS["bwd_reduce"].launch(grid, args_reduce, constants, num_warps=reduce.num_warps)
    return dx, dweight, dbias


def _dense(vector: Tensor | None) -> Tensor | None:
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()
