"""The norms: references, public functions, implementations, registration with torch and autograd."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from accelerant.config import choice_overrides
from accelerant.errors import ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.ops import _launch
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import (
    RowTile,
    as_rows,
    ceil_div,
    eviction,
    multiprocessors,
    next_power_of_2,
    triton_operation,
)
from accelerant.ops._library import FLOATING, check_dtype, check_or_float32, name_of, not_a_tensor
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, Cost, Operation, case_of
from accelerant.runtime.dispatch.plan import torch_wants_determinism
from accelerant.runtime.dispatch.race import Tuned, rounded
from accelerant.runtime.memory.limits import predictions

if TYPE_CHECKING:
    from accelerant.runtime.providers.cuda_launch import PreparedLaunch


__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]

_WIDTHS = {
    "fwd": (8, 9, 10), "bwd": (8, 9, 10, 11), "bwd_reduce": (5,),
    "fwd_wide": (8, 9, 10), "bwd_wide": (6, 7, 8, 9), "bwd_columns": (5, 6, 7),
}  # fmt: skip
KERNELS = {
    name: TritonKernel("accelerant.ops.norm.triton_kernels", f"norm_{name}", widths=widths)
    for name, widths in _WIDTHS.items()
}

WIDE_FORWARD = 16384  # maximum columns of a row in registers, forward: 64 float32 values per thread of 8 warps
WIDE_BACKWARD = 8192  # the same, backward, where x, dy, the weight and two running sums share the registers

WIDE = RowTile(rows=1, block_n=4096, num_warps=8)
COLUMNS = RowTile(rows=16, block_n=128, num_warps=4, programs=4)
Constants = dict[str, int | bool | str]

# The rules are the fastest of 8 to 20 plans measured on an H200 at 16384x4096 and 65536x768 in bfloat16.


@functools.cache
def forward_plan(N: int, centre: bool = True, adds: bool = False) -> RowTile:
    """Return the default plan of norm_fwd: at least 2048 elements, 16 to 48 per thread; centre for layer_norm."""
    block_n = max(16, next_power_of_2(N))
    if N == 768 and not adds:
        return RowTile(rows=4, block_n=256, num_warps=4, chunks=3)
    if N in (1280, 1536, 1792):  # chunks of one warp's width: no idle lanes
        return RowTile(rows=4, block_n=256, num_warps=4, chunks=N // 256)
    if block_n <= 1024 and adds and centre:
        return RowTile(rows=4096 // block_n, block_n=block_n, num_warps=4)
    if block_n <= 1024:
        return RowTile(rows=2048 // block_n, block_n=block_n, num_warps=2)
    if N == 4096 and adds:
        return RowTile(rows=1, block_n=2048, num_warps=8, chunks=2)
    if N in (3072, 4096) and not centre and not adds:
        return RowTile(rows=1, block_n=1024, num_warps=4, chunks=N // 1024)
    if block_n == 4096 and not adds:
        return RowTile(rows=2, block_n=block_n, num_warps=8)
    return RowTile(rows=1, block_n=block_n, num_warps=min(16, block_n // 512))


@functools.cache
def forward_plans(N: int) -> tuple[RowTile, ...]:
    """Return the tuning candidates of norm_fwd."""
    plans = list(_launch.whole_rows(max(16, next_power_of_2(N))))
    if N in (768, 1280, 1536, 1792):
        plans += [RowTile(r, 256, warps, chunks=N // 256) for r, warps in ((2, 1), (4, 2), (4, 4), (8, 4))]
    if N % 1024 == 0 and 2048 < N <= 8192:
        plans += [RowTile(r, 1024, warps, chunks=N // 1024) for r, warps in ((1, 4), (2, 8))]
    if N % 2048 == 0 and 2048 < N <= 8192:
        plans.append(RowTile(1, 2048, 8, chunks=N // 2048))
    return tuple(plans)


@functools.cache
def backward_plan(N: int, adds: bool = False, centre: bool = True) -> RowTile:
    """Return the default plan of norm_bwd, whose stages of dy, x and ds take up to 96 KiB of shared memory."""
    block_n = max(16, next_power_of_2(N))
    stages = 3 if block_n <= 4096 else 1
    if block_n <= 1024 and not adds and not centre:
        return RowTile(rows=2048 // block_n, block_n=block_n, num_warps=4, programs=3, stages=4)
    if block_n <= 2048:
        programs = 2 if adds else 3
        return RowTile(rows=4096 // block_n, block_n=block_n, num_warps=4, programs=programs, stages=stages)
    return RowTile(rows=1, block_n=block_n, num_warps=8 if block_n <= 4096 else 16, programs=2, stages=stages)


_TILES = {  # columns up to which -> elements, warps, programs, stages
    2048: ((4096, 4, 2, 3), (4096, 4, 3, 3), (2048, 4, 4, 3), (2048, 4, 3, 4), (2048, 2, 6, 3), (1024, 4, 4, 4)),
    4096: ((4096, 8, 2, 3), (4096, 8, 3, 3), (4096, 16, 2, 3), (4096, 4, 2, 3), (4096, 8, 2, 4), (4096, 8, 3, 2)),
    8192: ((8192, 16, 2, 1), (8192, 16, 1, 2), (8192, 8, 2, 1), (8192, 16, 1, 1)),
}


@functools.cache
def backward_plans(N: int, adds: bool = False) -> tuple[RowTile, ...]:
    """Return the tuning candidates of norm_bwd that fit in 96 KiB of shared memory in float32."""
    block_n = max(16, next_power_of_2(N))
    tiles = next((tiles for limit, tiles in _TILES.items() if block_n <= limit), ())
    return tuple(
        RowTile(max(1, elements // block_n), block_n, warps, programs, stages)
        for elements, warps, programs, stages in tiles
        if max(elements, block_n) * 4 * (2 + adds) * (stages - 1) <= 96 * 1024
    )


def _bucket(M: int, N: int) -> tuple[int | str, ...]:
    """Return the bucket of sizes; a plan in chunks holds for its own N alone."""
    return (*rounded((M,)), N if N % 256 == 0 else f"<{next_power_of_2(N)}")


def _tuned(way: str, centre: bool, adds: bool) -> Tuned[RowTile]:
    forward = way == "fwd"
    return Tuned(
        f"{'add_' if adds else ''}{'layer' if centre else 'rms'}_norm_{way}",
        default=lambda M, N: forward_plan(N, centre, adds) if forward else backward_plan(N, adds, centre),
        candidates=lambda M, N: forward_plans(N) if forward else backward_plans(N, adds),
        bucket=_bucket,
    )


_BOTH = (False, True)
TUNED = {(way, centre, adds): _tuned(way, centre, adds) for way in ("fwd", "bwd") for centre in _BOTH for adds in _BOTH}
"""The plans of norm_fwd and norm_bwd by direction, whether it is layer_norm, and whether there is a residual."""


_LAUNCHES_LIMIT = 4096
_LAUNCHES: dict[tuple[object, ...], PreparedLaunch] = {}
"""Launches of launch_forward that lack only their pointers, by everything else that they depend on. A call that finds
its launch here skips plan, constants and the kernel's own look-up; dropped with the plans that they were made with."""

for _way, _centre, _adds in TUNED:
    if _way == "fwd":
        TUNED[_way, _centre, _adds].plans.add_dependent(_LAUNCHES)

_BACKWARD = _launch.Repeats(*[plans for (way, _, _), plans in TUNED.items() if way == "bwd"])


@functools.cache
def reduce_plan(N: int) -> RowTile:
    """Return the plan of norm_bwd_reduce: few columns, so that a narrow sum still fills the device."""
    return RowTile(rows=128, block_n=8 if N <= 4096 else 64, num_warps=4)


def forward_constants(plan: RowTile, N: int, centre: bool, eviction: str) -> Constants:
    """Return the compile-time arguments of norm_fwd."""
    exact = plan.block_n * plan.chunks == N
    tile = {"ROWS": plan.rows, "BLOCK_N": plan.block_n, "CHUNKS": plan.chunks}
    return {"CENTRE": centre, **tile, "EXACT": exact, "EVICTION": eviction}


def backward_constants(
    plan: RowTile, N: int, centre: bool, dweight: bool, dbias: bool, dxsum: bool = False, apart: bool = False
) -> Constants:
    """Return the compile-time arguments of norm_bwd."""
    warps_along_rows = plan.block_n < 256 * plan.num_warps  # a warp reads 256 elements of a row: 16 bytes a thread
    return {
        "CENTRE": centre, "DWEIGHT": dweight, "DBIAS": dbias, "DXSUM": dxsum, "ROWS": plan.rows,
        "BLOCK_N": plan.block_n, "EXACT": plan.block_n == N, "STAGES": plan.stages,
        "KEPT": plan.rows if warps_along_rows else 1, "APART": apart,
    }  # fmt: skip


def launch_forward(
    centre: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, statistics: bool = True,
    residual: Tensor | None = None, dtype: torch.dtype | None = None, plan: RowTile | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return y, contiguous, in `dtype` or that of x; with a residual s = x + residual; and the statistics."""
    N = x.shape[-1]
    M = x.numel() // N if N else x.shape[:-1].numel()
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    s = None if residual is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    kept = torch.empty((M, 1 + centre), dtype=torch.float32, device=x.device) if statistics else None
    if M and N:
        key, pointers = None, []
        if plan is None and not predictions and not choice_overrides and not torch_wants_determinism():
            described: list[object] = [centre, eps, statistics, x.get_device(), x.shape]
            for tensor in (x, residual, weight, bias, y, s, kept):
                if tensor is None:
                    described.append(None)
                else:
                    pointer = tensor.data_ptr()
                    pointers.append(pointer)
                    described += (tensor.dtype, tensor.stride(), pointer & 15)
            key = tuple(described)
            if (repeated := _LAUNCHES.get(key)) is not None:
                repeated.start(pointers)
                return (y, kept) if s is None else (y, s, kept)
        if wide := plan is None and N > WIDE_FORWARD:
            plan = WIDE
        elif plan is None:
            plan = TUNED["fwd", centre, residual is not None](
                x.device,
                x.dtype,
                (M, N),
                lambda plan: launch_forward(centre, x, weight, bias, eps, statistics, residual, dtype, plan),
            )
        rows, stride = as_rows(x, N)
        others, residual_stride = (None, stride) if residual is None else as_rows(residual, N)
        constants: Constants = {"CENTRE": centre, "BLOCK_N": plan.block_n}
        if not wide:
            constants = forward_constants(plan, N, centre, eviction(x, 2 if residual is None else 4))
        tensors = (rows, others, _dense(weight), _dense(bias), y, s, kept)
        launched = KERNELS["fwd_wide" if wide else "fwd"].launch(
            (ceil_div(M, plan.rows),),
            (*tensors, M, N, stride, residual_stride, eps),
            constants,
            num_warps=plan.num_warps,
        )
        if launched and key and pointers == [t.data_ptr() for t in tensors if t is not None]:  # nothing was copied
            if len(_LAUNCHES) >= _LAUNCHES_LIMIT:
                _LAUNCHES.clear()
            _LAUNCHES[key] = launched
    elif kept is not None:
        kept.zero_()
    return (y, kept) if s is None else (y, s, kept)


def launch_backward(
    centre: bool, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, eps: float,
    needs: Sequence[bool], ds: Tensor | None = None, plan: RowTile | None = None, dxsum: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute dx, contiguous, and the gradients of weight and bias (its dtype alone matters) where needed.

    `statistics` are launch_forward's, which include eps; `ds` is added to dx; `dxsum` (N,), if given, receives the sum
    of dx over the rows, the gradient of a bias that was added to x.
    """
    N = x.shape[-1]
    M = x.numel() // N if N else 0
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight = torch.empty(N, dtype=weight.dtype, device=x.device) if needs[1] and weight is not None else None
    dbias = torch.empty(N, dtype=bias.dtype, device=x.device) if needs[2] and bias is not None else None
    if not M:
        if dxsum is not None:
            dxsum.zero_()
        return dx, None if dweight is None else dweight.zero_(), None if dbias is None else dbias.zero_()
    rows, stride = as_rows(x, N)
    dy, dy_stride = as_rows(dy, N)
    ds_rows, ds_stride = (None, dy_stride) if ds is None else as_rows(ds, N)
    weight = _dense(weight)
    sums = (dweight is not None) + (dbias is not None)
    key: tuple[object, ...] | None = None
    pointers: list[int] = []
    wanted = {"CENTRE": centre, "DWEIGHT": dweight is not None, "DBIAS": dbias is not None}
    parts: Tensor | None = None
    if plan is None and N > WIDE_BACKWARD:
        wide = (dy, ds_rows, rows, weight, statistics, dx, N, dy_stride, ds_stride, stride)
        constants: Constants = {"CENTRE": centre, "BLOCK_N": WIDE.block_n}
        KERNELS["bwd_wide"].launch((M,), wide, constants, num_warps=WIDE.num_warps)
        if dxsum is not None:
            dxsum.copy_(dx.view(M, N).sum(0, dtype=torch.float32))
            dxsum = None
        if not sums:
            return dx, None, None
        strips = ceil_div(N, COLUMNS.block_n)
        programs = min(ceil_div(M, COLUMNS.rows), max(1, COLUMNS.programs * multiprocessors(x.device) // strips))
        parts = torch.empty((sums, programs, N), dtype=torch.float32, device=x.device)
        columns = (dy, rows, statistics, parts, M, N, dy_stride, stride)
        constants = {**wanted, "ROWS": COLUMNS.rows, "BLOCK_N": COLUMNS.block_n}
        KERNELS["bwd_columns"].launch((strips, programs), columns, constants, num_warps=COLUMNS.num_warps)
    else:
        if plan is None:
            plan = TUNED["bwd", centre, ds is not None](
                x.device,
                x.dtype,
                (M, N),
                lambda plan: launch_backward(centre, dy, x, weight, bias, statistics, eps, needs, ds, plan),
            )
        programs = plan.grid(M, x.device)
        sums += dxsum is not None
        parts = torch.empty((sums, programs, N), dtype=torch.float32, device=x.device) if sums else None
        if _launch.are_repeatable():
            described: list[object] = [centre, plan, M, N, stride, dy_stride, ds_stride, x.get_device()]
            for tensor in (dy, ds_rows, rows, weight, statistics, dx, parts, dweight, dbias, dxsum):
                if tensor is None:
                    described.append(None)
                else:
                    pointer = tensor.data_ptr()
                    pointers.append(pointer)
                    described += (tensor.dtype, pointer & 15)
            key = tuple(described)
            if _BACKWARD.start(key, pointers):
                return dx, dweight, dbias
        args = (dy, ds_rows, rows, weight, statistics, dx, parts, M, N, dy_stride, ds_stride, stride, M, 1)
        constants = backward_constants(plan, N, centre, wanted["DWEIGHT"], wanted["DBIAS"], dxsum is not None)
        with _BACKWARD.recorded(key, pointers):
            KERNELS["bwd"].launch((programs,), args, constants, num_warps=plan.num_warps)
            _reduce(parts, dweight, dbias, dxsum, programs, N)
        return dx, dweight, dbias
    _reduce(parts, dweight, dbias, dxsum, programs, N)
    return dx, dweight, dbias


def _reduce(
    parts: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, dxsum: Tensor | None, programs: int, N: int
) -> None:
    """Add up the parts of the sums over rows, if there are any."""
    if parts is not None:
        reduce = reduce_plan(N)
        constants = {"BLOCK_P": reduce.rows, "BLOCK_N": reduce.block_n}
        grid = (ceil_div(N, reduce.block_n),)
        summed = (parts, dweight, dbias, dxsum, programs, N)
        KERNELS["bwd_reduce"].launch(grid, summed, constants, num_warps=reduce.num_warps)


def launch_backward_each(
    dy: Tensor, x: Tensor, weight: Tensor | None, statistics: Tensor, examples: int, wanted: tuple[bool, bool, bool],
    ds: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute dx, and sums over the rows of each example, which are contiguous: (examples, N) in float32, or None.

    `wanted`: whether to return those that are the gradients of weight, of bias, and of a vector added to x.
    UnsupportedCase: more columns than a program holds, WIDE_BACKWARD.
    """
    N, centre = x.shape[-1], statistics.shape[1] == 2
    if N > WIDE_BACKWARD:
        raise UnsupportedCase(f"sums by example are computed for at most {WIDE_BACKWARD} columns, got {N}")
    M, dx = x.numel() // N, torch.empty_like(x, memory_format=torch.contiguous_format)
    span = M // examples
    rows, stride = as_rows(x, N)
    dy, dy_stride = as_rows(dy, N)
    ds_rows, ds_stride = (None, dy_stride) if ds is None else as_rows(ds, N)
    plan = backward_plan(N, ds is not None, centre)
    splits = max(1, min(ceil_div(span, plan.rows), plan.grid(M, x.device) // examples))  # one wave, not a bit more
    parts = torch.empty((sum(wanted), examples, splits, N), dtype=torch.float32, device=x.device)
    KERNELS["bwd"].launch(
        (examples * splits,),
        (dy, ds_rows, rows, _dense(weight), statistics, dx, parts, M, N, dy_stride, ds_stride, stride, span, splits),
        backward_constants(plan, N, centre, *wanted, apart=True),
        num_warps=plan.num_warps,
    )
    sums = iter(parts.sum(2) if splits > 1 else parts.flatten(1, 2))
    return dx, *(next(sums) if want else None for want in wanted)  # type: ignore[return-value]  # three of them


def _dense(vector: Tensor | None) -> Tensor | None:
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


def torch_forward(
    centre: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, statistics: bool = True,
    residual: Tensor | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Normalize as launch_forward does; statistics may be returned unasked, where torch computes them anyway."""
    same = dtype in (None, x.dtype) and x.is_cuda and {x.dtype}.issuperset(_dtypes(weight, bias, residual))
    if not statistics and (x.is_cpu or (same and (centre or bias is None))):
        s = x if residual is None else x + residual
        # The gradients of weight and bias are sums over the rows, which torch computes in the dtype of x.
        learns = (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
        if not x.is_cpu:
            y = (
                torch.layer_norm(s, s.shape[-1:], weight, bias, eps)
                if centre
                else torch.rms_norm(s, s.shape[-1:], weight, eps)
            )
        elif centre and x.dtype in (torch.float16, torch.bfloat16) and not (learns and torch.is_grad_enabled()):
            _, inner, w, b = _widened(s, centre, weight, bias)
            y = torch.layer_norm(inner, x.shape[-1:], w, b, eps)
        else:
            y = torch_composite(centre, s, weight, bias, eps)
        y = y if y.is_contiguous() else y.contiguous()
        return (y,) if residual is None else (y, s.contiguous())
    dtype = x.dtype if dtype is None else dtype
    if residual is not None:
        x = x + residual
    wide, inner, weight, bias = _widened(x, centre, weight, bias)
    if centre:
        y, mean, rstd = torch.native_layer_norm(inner, x.shape[-1:], weight, bias, eps)
        kept = torch.stack((mean.reshape(-1), rstd.reshape(-1)), 1)
    else:
        y, rstd = torch.ops.aten._fused_rms_norm(inner, x.shape[-1:], weight, eps)
        kept = rstd.reshape(-1, 1)
        if bias is not None:
            y = y + bias
    y = y.to(dtype).contiguous()
    kept = kept.to(wide)
    return (y, kept) if residual is None else (y, x.contiguous(), kept)


def torch_backward(
    centre: bool, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, eps: float,
    needs: Sequence[bool], ds: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute the gradients as launch_backward does."""
    wants_weight, wants_bias = needs[1] and weight is not None, needs[2] and bias is not None
    dtypes = (None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x_wide, dy_wide = x.to(wide), dy.to(wide)
    shape = (*x.shape[:-1], 1)
    columns = statistics.t().contiguous()  # torch's backward pass takes them for dense
    rstd = columns[-1].reshape(shape)
    mean = columns[0].reshape(shape) if centre else torch.zeros_like(rstd)
    # torch returns dbias only together with dweight, and neither without a weight.
    scale = torch.ones(x.shape[-1:], dtype=wide, device=x.device) if weight is None and wants_bias else weight
    scale = None if scale is None else scale.to(wide)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy_wide, x_wide, x.shape[-1:], mean, rstd, scale, scale, [True, wants_weight or wants_bias, wants_bias]
    )
    if not centre:  # with a mean of 0 its dx lacks rstd mean(dy w), which it took for the gradient through the mean
        N = max(x.shape[-1], 1)
        g = dy_wide.mean(-1) if scale is None else torch.matmul(dy_wide, scale).div_(N)
        dx = dx.addcmul_(g.unsqueeze(-1), rstd)
    if ds is not None:
        dx = dx.add_(ds)
    return (
        dx.to(x.dtype).contiguous(),
        dweight.to(dtypes[0]) if wants_weight else None,
        dbias.to(dtypes[1]) if wants_bias else None,
    )


def _dtypes(*tensors: Tensor | None) -> set[torch.dtype]:
    return {x.dtype for x in tensors if x is not None}


def torch_composite(centre: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return y, differentiable in every way that torch supports; computed wide and rounded once."""
    dtype = x.dtype
    if _uniform(x, weight, bias):  # four calls of `to` without effect cost as much as a small layer_norm
        if centre:
            return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)
        y = torch.rms_norm(x, x.shape[-1:], weight, eps)
        return y if bias is None else y + bias
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias = (None if vector is None else vector.to(wide) for vector in (weight, bias))
    return torch_composite(centre, x.to(wide), weight, bias, eps).to(dtype)


def _uniform(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    dtype = x.dtype
    return (
        dtype in (torch.float32, torch.float64)
        and (weight is None or weight.dtype == dtype)
        and (bias is None or bias.dtype == dtype)
    )


def _widened(
    x: Tensor, centre: bool, weight: Tensor | None, bias: Tensor | None
) -> tuple[torch.dtype, Tensor, Tensor | None, Tensor | None]:
    """Return the dtype to compute in, and x and the vectors as torch computes in it."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    mixed = centre and x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16)
    if mixed and weight is None:
        weight = torch.ones(x.shape[-1:], dtype=wide, device=x.device)
    inner = x if mixed else x.to(wide)
    return wide, inner, None if weight is None else weight.to(wide), None if bias is None else bias.to(wide)


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalize rows to mean 0 and variance 1, scale by weight, shift by bias."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def rms_norm_reference(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Normalize rows to mean square 1, scale by weight."""
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return layer_norm of the sum, and the sum."""
    s = x + residual
    return layer_norm_reference(s, weight, bias, eps=eps), s


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return rms_norm of the sum, and the sum."""
    s = x + residual
    return rms_norm_reference(s, weight, eps=eps), s


# --- torch's functions, for the CPU fast path ------------------------------------------------------------------------
def _torch_layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _bound_layer_norm(x: Tensor, *_: object, **__: object) -> Callable[..., Tensor]:
    shape = x.shape[-1:]
    return lambda x, weight=None, bias=None, eps=1e-5: torch.layer_norm(x, shape, weight, bias, eps)


def _torch_rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return torch.rms_norm(x, x.shape[-1:], weight, eps)


def _torch_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    s = x + residual
    return torch.layer_norm(s, s.shape[-1:], weight, bias, eps), s


def _torch_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    s = x + residual
    return torch.rms_norm(s, s.shape[-1:], weight, eps), s


def _one_dtype(*args: Any, **options: Any) -> bool:
    """Return whether all tensors have one dtype: torch's kernels for a GPU compute in float32 then, as ours do."""
    return len({x.dtype for x in (*args, *options.values()) if isinstance(x, Tensor)}) == 1


def _rounds_once(*args: Any, **options: Any) -> bool:
    """Return whether torch's function gives the same on a CPU: one dtype, a wide one where gradients are recorded.

    Torch sums the gradients of weight and bias over the rows in their dtype.
    """
    tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    wide = not recorded or tensors[0].dtype in (torch.float32, torch.float64)
    return wide and _one_dtype(*args, **options)


_layer_norm_cpu, _rms_norm_cpu, _add_layer_norm_cpu, _add_rms_norm_cpu = (
    CpuFastPath(function, bind=bind, serves=_rounds_once, small=_one_dtype, args=(False,))
    for function, bind in (
        (_torch_layer_norm, _bound_layer_norm),
        (_torch_rms_norm, None),
        (_torch_add_layer_norm, None),
        (_torch_add_rms_norm, None),
    )
)


@_layer_norm_cpu
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Centre each row of x, scale it to unit variance, then scale by weight and shift by bias.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, means over the last dimension

    Args:
        x: (..., N), float16, bfloat16, float32 or float64.
        weight: (N,), dtype of x or float32 (float32 master weights with bfloat16 activations); None for ones.
        bias: (N,), as weight; None for zeros.
        eps: added to the variance; dimensionless.

    Returns:
        (..., N), dtype of x, contiguous. Computed in float32 (float64 for float64), whatever x and weight are, so that
        autocast has nothing to widen: the dtype of x is kept under autocast too. Differentiable twice.

    Raises:
        ShapeError: x is a scalar, weight or bias is not (N,), or they are on several devices.
        UnsupportedDtype: a dtype not listed above.
        TypeError: x, weight or bias is not a tensor.
        ConfigError: eps is not a number.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, equations 3 and 4.
    """
    _check("layer_norm", x, weight, bias, eps)
    y: Tensor = _layer_norm(x, weight, bias, eps)
    return y


@_rms_norm_cpu
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Scale each row of x to unit root mean square, then by weight.

    y = x / sqrt(mean(x^2) + eps) * weight, the mean over the last dimension

    Args:
        x: (..., N), float16, bfloat16, float32 or float64.
        weight: (N,), dtype of x or float32; None for ones.
        eps: added to the mean square; dimensionless.

    Returns:
        (..., N), dtype of x, contiguous. Computed in float32 as layer_norm is, rounded once. Differentiable twice.

    Raises:
        ShapeError: x is a scalar, weight is not (N,), or they are on several devices.
        UnsupportedDtype: a dtype not listed above.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """
    _check("rms_norm", x, weight, None, eps)
    y: Tensor = _rms_norm(x, weight, None, eps)
    return y


@_add_layer_norm_cpu
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and normalize the sum as layer_norm does, in one pass over memory.

    s = x + residual        y = layer_norm(s, weight, bias)

    Args:
        x: (..., N), float16, bfloat16, float32 or float64.
        residual: shape and dtype of x.
        weight, bias, eps: as for layer_norm.

    Returns:
        y and s, shape and dtype of x, contiguous. s is rounded to that dtype, and y is computed from the rounded s, as
        torch does unfused. The gradients of x and of residual are one and the same tensor, made by one kernel. Either
        result may be unused. Differentiable twice.

    Raises:
        ShapeError: x is a scalar, residual has another shape, weight or bias is not (N,), or they are on several
            devices.
        UnsupportedDtype: a dtype not listed above, or residual is not of x's.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, equations 3 and 4.
    """
    _check("add_layer_norm", x, weight, bias, eps, residual)
    y, s = _add_layer_norm(x, residual, weight, bias, eps)
    return y, s


@_add_rms_norm_cpu
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and normalize the sum as rms_norm does, in one pass over memory.

    s = x + residual        y = rms_norm(s, weight)

    Args:
        x: (..., N), float16, bfloat16, float32 or float64.
        residual: shape and dtype of x.
        weight, eps: as for rms_norm.

    Returns:
        y and s, shape and dtype of x, contiguous; rounding and gradients as add_layer_norm's.

    Raises:
        ShapeError: x is a scalar, residual has another shape, weight is not (N,), or they are on several devices.
        UnsupportedDtype: a dtype not listed above, or residual is not of x's.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """
    _check("add_rms_norm", x, weight, None, eps, residual)
    y, s = _add_rms_norm(x, residual, weight, None, eps)
    return y, s


def _check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *residuals: Tensor) -> None:
    try:
        if x.dtype not in FLOATING:
            check_dtype(op, x)
        if x.dim() == 0:
            raise ShapeError(f"{op} takes (..., N), got a scalar")
        for name, vector in (("weight", weight), ("bias", bias)):
            if vector is None:
                continue
            if vector.dim() != 1 or vector.shape[0] != x.shape[-1]:
                raise ShapeError(f"{name} must be ({x.shape[-1]},), got {tuple(vector.shape)}")
            if vector.dtype is not x.dtype or vector.device != x.device:
                check_or_float32(name, vector, x)
        for residual in residuals:
            if residual.dim() != x.dim() or residual.shape != x.shape:
                raise ShapeError(f"residual must be {tuple(x.shape)} as x is, got {tuple(residual.shape)}")
            if residual.dtype != x.dtype:
                raise UnsupportedDtype(f"residual must be {name_of(x.dtype)} as x is, got {name_of(residual.dtype)}")
            if residual.device != x.device:
                raise ShapeError(f"residual must be on {x.device}, where x is; it is on {residual.device}")
    except AttributeError:
        vectors = [(name, each) for name, each in (("weight", weight), ("bias", bias)) if each is not None]
        for name, tensor in (("x", x), *(("residual", each) for each in residuals), *vectors):
            if not isinstance(tensor, Tensor):
                raise not_a_tensor(op, name, tensor) from None
        raise
    if type(eps) is not float and not isinstance(cast(object, eps), Real):
        raise ConfigError(f"{op}: eps must be a number, got {type(eps).__name__}")


def _cost(accesses: int, flops: int, case: Case) -> Cost:
    n = math.prod(case.shape)
    width = case.shape[-1]
    vectors = sum(width * 4 for option in case.options if str(option).startswith(("weight", "bias")))
    statistics = 8 * (n // width if width else 0)
    return Cost(accesses * n * case.dtype.itemsize + vectors + statistics, flops * n)


_OPTIONS: dict[tuple[torch.dtype | None, torch.dtype | None], tuple[str, ...]] = {}


def _case(x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: object) -> Case:
    """Return the case of x; its options are the dtypes of the vectors: ("weight float32", "bias float32")."""
    key = (None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    if (options := _OPTIONS.get(key)) is None:
        pairs = zip(("weight", "bias"), key, strict=True)
        options = _OPTIONS[key] = tuple(f"{name} {name_of(dtype)}" for name, dtype in pairs if dtype is not None)
    return case_of((x.device, x.dtype, x.shape, options))


def _operations(
    name: str, accesses: tuple[int, int], forward: Sequence[Callable[..., Any]], backward: Sequence[Callable[..., Any]]
) -> tuple[Operation, Operation]:
    """Return the forward and the backward Operation, each from our kernel and torch's function."""
    fwd_cost, bwd_cost = partial(_cost, accesses[0], 9), partial(_cost, accesses[1], 18)
    return (
        triton_operation(f"{name}_fwd", *forward, cost=fwd_cost, differentiable=True),
        triton_operation(f"{name}_bwd", *backward, cost=bwd_cost),
    )


def _fake(centre: bool, x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape), x.new_empty((x.shape[:-1].numel(), 1 + centre), dtype=wide)


class _Norm(DifferentiableOp):
    def infer(self, *args: Any) -> Any:
        """Compute no statistics."""
        return self._cut(self._operation(self._case(*args), *args, False))


class _AddNorm(_Norm):
    public = 2
    differentiable = 2


def _norm(name: str, centre: bool, cpu: CpuFastPath) -> DifferentiableOp:
    """Return an op on x alone; rms_norm's bias is always None."""
    fwd, bwd = _operations(
        name,
        (2, 3),
        (partial(launch_forward, centre), partial(torch_forward, centre)),
        (partial(launch_backward, centre), partial(torch_backward, centre)),
    )
    return _Norm(
        f"{name}(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor statistics)",
        operation=fwd,
        case=_case,
        backward=lambda dy, x, weight, bias, *rest: bwd(_case(x, weight, bias), dy, x, weight, bias, *rest),
        saves=("x", "weight", "bias", "statistics"),
        gradients={"x": "x", "weight": "weight", "bias": "bias"},
        composite=partial(torch_composite, centre),
        fake=partial(_fake, centre),
        cpu=cpu,
    )


def _add_norm(name: str, centre: bool, norm: DifferentiableOp, cpu: CpuFastPath) -> DifferentiableOp:
    """Return an op on x + residual; `norm` is the same without the residual."""

    def with_residual(
        kernel: Callable[..., Any], x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
        statistics: bool = True, dtype: torch.dtype | None = None,
    ) -> Any:  # fmt: skip
        return kernel(centre, x, weight, bias, eps, statistics, residual, dtype)

    def with_ds(kernel: Callable[..., Any], dy: Tensor | None, ds: Tensor | None, s: Tensor, *args: Any) -> Any:
        if dy is not None:
            return kernel(centre, dy, s, *args, ds)
        assert ds is not None  # for the type checker: autograd calls with at least one gradient to start from
        return ds.contiguous(), *_zeros(args[0], args[1], args[-1])

    fwd, bwd = _operations(
        name,
        (4, 4),
        (partial(with_residual, launch_forward), partial(with_residual, torch_forward)),
        (partial(with_ds, launch_backward), partial(with_ds, torch_backward)),
    )

    def composite(x: Tensor, residual: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        s = x + residual
        return torch_composite(centre, s, *args), s

    def composite_backward(dy: Tensor | None, ds: Tensor | None, s: Tensor, *args: Any) -> Any:
        if dy is None:
            assert ds is not None  # for the type checker: as in with_ds
            return ds.clone(), *_zeros(args[0], args[1], args[-1])
        dx, dweight, dbias = norm.composite_backward(dy, s, *args)
        return dx if ds is None or dx is None else dx + ds, dweight, dbias

    def fake(x: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
        y, statistics = _fake(centre, x)
        return y, torch.empty_like(y), statistics

    return _AddNorm(
        f"{name}(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) "
        "-> (Tensor y, Tensor s, Tensor statistics)",
        operation=fwd,
        case=lambda x, residual, weight, bias, *_: _case(x, weight, bias),
        backward=lambda dy, ds, s, weight, bias, *rest: bwd(_case(s, weight, bias), dy, ds, s, weight, bias, *rest),
        saves=("s", "weight", "bias", "statistics"),
        gradients={"x": "s", "residual": "x", "weight": "weight", "bias": "bias"},
        composite=composite,
        composite_backward=composite_backward,
        fake=fake,
        cpu=cpu,
    )


def _zeros(weight: Tensor | None, bias: Tensor | None, needs: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias where nothing depends on y."""
    return (
        torch.zeros_like(weight) if needs[1] and weight is not None else None,
        torch.zeros_like(bias) if needs[2] and bias is not None else None,
    )


_layer_norm = _norm("layer_norm", True, _layer_norm_cpu)
_rms_norm = _norm("rms_norm", False, _rms_norm_cpu)
_add_layer_norm = _add_norm("add_layer_norm", True, _layer_norm, _add_layer_norm_cpu)
_add_rms_norm = _add_norm("add_rms_norm", False, _rms_norm, _add_rms_norm_cpu)
