"""Launches of the norms' kernels, and the plans of their programs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accelerant.config import choice_overrides
from accelerant.errors import UnsupportedCase
from accelerant.ops import _launch
from accelerant.ops._launch import RowTile, as_rows, ceil_div, eviction, multiprocessors, next_power_of_2
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch.choice_store import rounded
from accelerant.runtime.dispatch.plan import torch_wants_determinism
from accelerant.runtime.dispatch.race import Tuned
from accelerant.runtime.memory.limits import predictions

if TYPE_CHECKING:
    from accelerant.runtime.providers.cuda_launch import PreparedLaunch

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
    """Return y, contiguous, in `dtype` or that of x; with a residual s = x + residual; and the statistics.

    Those of each row, if asked for, are float32: (M, 2), mean and 1 / standard deviation, or without centring (M, 1), 1
    / root mean square.
    """
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
            repeated = _LAUNCHES.get(key)
            if repeated is not None:
                repeated.start(pointers)
                return (y, kept) if s is None else (y, s, kept)
        wide = plan is None and N > WIDE_FORWARD
        if wide:
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
