"""softmax and log_softmax: references, launches, implementations, public functions, registration with torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from accelerant.ops import _launch
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import RowTile, accesses, ceil_div, eviction, multiprocessors, next_power_of_2
from accelerant.ops._library import checked_dim, refuses_triton_kernel
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, case_of
from accelerant.runtime.dispatch.race import Tuned

__all__ = ["log_softmax", "softmax"]


def softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    """Return exp(x) over its sum, with the maximum subtracted from the exponents; the tests' oracle in float64."""
    if x.numel() == 0:
        return x.clone()
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def log_softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    """Return x minus its maximum, minus the logarithm of the sum of exponentials."""
    if x.numel() == 0:
        return x.clone()
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


_WIDTHS = {
    "fwd": (3, 4), "fwd_wide": (2, 3), "fwd_part": (2, 3), "fwd_join": (3, 4), "fwd_inner": (3,),
    "bwd": (4, 5), "bwd_wide": (3, 4), "bwd_part": (3, 4), "bwd_join": (4, 5), "bwd_inner": (4,),
}  # fmt: skip
KERNELS = {
    name: TritonKernel("accelerant.ops.softmax.triton_kernels", f"softmax_{name}", widths=widths)
    for name, widths in _WIDTHS.items()
}

WIDE_FROM = 16384  # maximum columns of a row in registers

WIDE = RowTile(rows=1, block_n=4096, num_warps=8)
INNER_COLUMNS = 64  # 128 bytes of bfloat16, a whole line

NARROW = 8  # with at most this many columns, a long dimension is moved to the end: copies cost less than idle lanes


@functools.cache
def row_plan(N: int, backward: bool = False) -> RowTile:
    """Return the default plan of softmax_fwd or softmax_bwd: the fastest measured on an H200 for 4096 columns."""
    if (block_n := max(16, next_power_of_2(N))) <= 2048:
        return RowTile(rows=4096 // block_n, block_n=block_n, num_warps=4)
    if backward:
        return RowTile(rows=1, block_n=block_n, num_warps=16)
    return RowTile(rows=1, block_n=block_n, num_warps=4 if block_n == 4096 else 8 if block_n <= 8192 else 16)


TUNED: dict[tuple[str, bool], Tuned[RowTile]] = {
    (way, log): Tuned(
        f"{'log_' if log else ''}softmax_{way}",
        default=lambda M, N, backward=way == "bwd": row_plan(N, backward),
        candidates=lambda M, N: _launch.whole_rows(max(16, next_power_of_2(N))),
    )
    for way in ("fwd", "bwd")
    for log in (False, True)
}
"""The plans of softmax_fwd and softmax_bwd by direction and whether the logarithm is taken."""


def constants(plan: RowTile, N: int, log: bool, eviction: str) -> dict[str, int | bool | str]:
    """Return the compile-time arguments of softmax_fwd and softmax_bwd."""
    return {"LOG": log, "ROWS": plan.rows, "BLOCK_N": plan.block_n, "EXACT": plan.block_n == N, "EVICTION": eviction}


@functools.cache
def inner_plan(N: int) -> RowTile:
    """Return the plan of one step of the _inner kernels: a tile of INNER_COLUMNS columns."""
    return RowTile(rows=1, block_n=min(64, max(2, next_power_of_2(N))), num_warps=4)


def launch(way: str, log: bool, inputs: tuple[Tensor, ...], dim: int, plan: RowTile | None = None) -> Tensor:
    """Return softmax or its logarithm ("fwd", of x), or dx ("bwd", of dy and y), contiguous; dim counts from 0."""
    x = inputs[-1]
    inner = x.shape[dim + 1 :].numel()
    if dim < x.dim() - 1 and x.shape[dim] > WIDE_FROM and inner <= NARROW:
        moved = tuple([each.movedim(dim, -1).contiguous() for each in inputs])
        return launch(way, log, moved, x.dim() - 1).movedim(-1, dim).contiguous()
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return result
    N = x.shape[dim]
    if dim < x.dim() - 1:
        tile = inner_plan(N)
        grid = (x.shape[:dim].numel() * ceil_div(inner, INNER_COLUMNS),)
        tiled = {"LOG": log, "BLOCK_N": tile.block_n, "BLOCK_I": INNER_COLUMNS}
        dense = [each.contiguous() for each in inputs]
        KERNELS[f"{way}_inner"].launch(grid, (*dense, result, N, inner), tiled, num_warps=tile.num_warps)
        return result
    M = x.numel() // N
    rows, stride = _launch.as_rows(inputs[0], N)
    sources = (rows,) if way == "fwd" else (rows, x.contiguous())
    if plan is None and N > WIDE_FROM:
        named: dict[str, object] = {"LOG": log}
        sums = (2 if way == "fwd" else 1, torch.float32)
        in_parts = {} if way == "fwd" else named
        _launch.launch_wide_rows(KERNELS, f"{way}_", sources, (result,), stride, WIDE, sums, named, in_parts)
        return result
    if plan is None:
        plan = TUNED[way, log](x.device, x.dtype, (M, N), lambda plan: launch(way, log, inputs, dim, plan))
    fixed = constants(plan, N, log, eviction(x, len(inputs) + 1))
    grid = (ceil_div(M, plan.rows),)
    KERNELS[way].launch(grid, (*sources, result, M, N, stride), fixed, num_warps=plan.num_warps)
    return result


# Cases in which torch is faster, measured on an H200 in bfloat16.
_SHORT = 8  # rows of at most so many elements are left to torch, by 3 to 4 times: ours uses 16 lanes a row

_FEW_WIDE = 2
"""Wide rows, of which a program takes one where a multiprocessor has one or more, are torch's up to so many a
multiprocessor, but for the gradient of softmax. Fewer are shared among programs."""

_STEPS = 4
"""A dimension before at most NARROW columns, with fewer programs than multiprocessors, is torch's where a program takes
more steps than these along it: below, a launch is what takes the time."""


def _refuses(few_wide: int, case: Case) -> str | None:
    """Return why torch runs, or is preferred; few_wide is _FEW_WIDE, or 0 where it does not hold."""
    if (why := refuses_triton_kernel(case)) is not None:
        return why
    n = math.prod(case.shape)
    if case.device.type != "cuda" or not n:
        return None
    dim = int(case.options[0].removeprefix("dim ")) if case.options else len(case.shape) - 1
    N, inner = case.shape[dim], math.prod(case.shape[dim + 1 :])
    M = n // (N * inner)
    if dim < len(case.shape) - 1:
        programs, steps = M * ceil_div(inner, INNER_COLUMNS), ceil_div(N, inner_plan(N).block_n)
        if inner <= NARROW and N <= WIDE_FROM and steps > _STEPS and programs < multiprocessors(case.device):
            return f"{programs} programs for {inner} columns {N} long: torch shares each among threads, faster"
        return None
    if N <= _SHORT:
        return f"rows of {N} elements: torch packs more of them into a warp, faster"
    if N > WIDE_FROM and (processors := multiprocessors(case.device)) <= M <= few_wide * processors:
        return f"{M} rows of {N} elements, one a program, are few to hide each other's waiting: torch is faster"
    return None


_softmax_cpu, _log_softmax_cpu = (
    CpuFastPath(
        lambda x, dim=-1, *, axis=None, function=function: function(x, dim if axis is None else axis),
        bind=lambda x, *dim, function=function, **named: (
            None if "axis" in named else function if dim or named else partial(function, dim=-1)
        ),
        serves=lambda x, *_, **__: x.dim() > 0,
        small=lambda x, *_, **__: x.dim() > 0,
    )
    for function in (torch.softmax, torch.log_softmax)
)


@_softmax_cpu
def softmax(x: Tensor, dim: int = -1, *, axis: int | None = None) -> Tensor:
    """Divide the exponentials of x by their sum along a dimension.

    y = exp(x - max(x)) / sum(exp(x - max(x))), maximum and sum over `dim`

    Args:
        x: any shape, float16, bfloat16, float32 or float64; fastest along a contiguous last dimension.
        dim: the dimension to sum over; negative counts from the end. NumPy's name `axis` is accepted too.

    Returns:
        shape and dtype of x, contiguous. Computed in float32 (float64 for float64) whatever x is, so that autocast has
        nothing to widen: the dtype of x is kept under autocast too. A row of -inf alone gives NaN.
        Differentiable twice.

    Raises:
        ShapeError: x has no such dimension.
        UnsupportedDtype: dtype not listed above.

    Source: Bridle 1990, "Training stochastic model recognition algorithms as networks", section 3.
    """
    dim = checked_dim("softmax", x, dim, axis)
    if x.dim() == 0:
        return softmax(x.reshape(1), 0).reshape(())
    return _softmax(x, dim)


@_log_softmax_cpu
def log_softmax(x: Tensor, dim: int = -1, *, axis: int | None = None) -> Tensor:
    """Return the logarithm of softmax, exact where softmax would underflow.

    y = x - max(x) - log(sum(exp(x - max(x)))), maximum and sum over `dim`

    Args:
        x, dim, axis: as for softmax.

    Returns:
        shape and dtype of x, contiguous; computed in float32 (float64 for float64) and rounded once, under autocast
        too. An element of -inf stays -inf, a row of -inf alone gives NaN. The backward pass starts from y as it was
        rounded. Differentiable twice.

    Raises:
        ShapeError: x has no such dimension.
        UnsupportedDtype: dtype not listed above.

    Source: Bridle 1990, "Training stochastic model recognition algorithms as networks", section 3.
    """
    dim = checked_dim("log_softmax", x, dim, axis)
    if x.dim() == 0:
        return log_softmax(x.reshape(1), 0).reshape(())
    return _log_softmax(x, dim)


def _case(x: Tensor, dim: int) -> Case:
    """Return the case of x; its option is the dimension, unless it is the last."""
    return case_of((x.device, x.dtype, x.shape, () if dim == x.dim() - 1 else (f"dim {dim}",)))


def _op(
    name: str, log: bool, torch_forward: Callable[..., Tensor], torch_gradient: Callable[..., Tensor], cpu: CpuFastPath
) -> DifferentiableOp:
    """Return softmax or log_softmax, from our kernels and from torch's functions."""

    def composite(x: Tensor, dim: int) -> Tensor:
        return torch_forward(x.contiguous(), dim)

    def torch_backward(dy: Tensor, y: Tensor, dim: int) -> Tensor:
        return torch_gradient(dy, y, dim, y.dtype)

    fwd = _launch.triton_operation(
        f"{name}_fwd",
        lambda x, dim: launch("fwd", log, (x,), dim),
        composite,
        cost=accesses(2, 5),
        refuses=partial(_refuses, _FEW_WIDE),
        differentiable=True,
    )
    bwd = _launch.triton_operation(
        f"{name}_bwd",
        lambda dy, y, dim: launch("bwd", log, (dy, y), dim),
        torch_backward,
        cost=accesses(3, 4),
        refuses=partial(_refuses, _FEW_WIDE if log else 0),
    )
    return DifferentiableOp(
        f"{name}(Tensor x, int dim) -> (Tensor y)",
        operation=fwd,
        case=_case,
        backward=lambda dy, y, dim, needs: (bwd(_case(y, dim), dy, y, dim),),
        saves=("y",),
        gradients={"x": "y"},
        composite=composite,
        composite_backward=lambda dy, y, dim, needs: (torch_backward(dy, y, dim),),
        fake=lambda x, dim: x.new_empty(x.shape),
        cpu=cpu,
    )


_softmax: Callable[..., Tensor] = _op("softmax", False, torch.softmax, torch._softmax_backward_data, _softmax_cpu)
_log_softmax: Callable[..., Tensor] = _op(
    "log_softmax", True, torch.log_softmax, torch._log_softmax_backward_data, _log_softmax_cpu
)
