"""Launches of the elementwise kernels, and the plans of their programs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.ops._launch import (
    SHORT,
    STREAM,
    Elementwise,
    StreamKernel,
    ceil_div,
    eviction,
    multiprocessors,
    next_power_of_2,
)
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch.tuning import Tuned

_MODULE = "accelerant.ops.elementwise.triton_kernels"
_OPS = ("relu", "sigmoid", "tanh", "silu", "mul")
STREAM_KERNELS = {
    name: StreamKernel(_MODULE, name, usual)
    for name, usual in {
        **{f"{op}_fwd": STREAM for op in _OPS},
        **{f"{op}_bwd": SHORT for op in _OPS},
        "add_fwd": SHORT,
        "tanh_fwd": Elementwise(block=1024, num_warps=2),  # 7% less time than with STREAM
    }.items()
}
_ROW_WIDTHS = {"add_row_fwd": (4,), "add_row_bwd": (3,), "mul_row_fwd": (4,), "mul_row_bwd": (6,)}
KERNELS: dict[str, TritonKernel] = {
    **STREAM_KERNELS,
    **{name: TritonKernel(_MODULE, name, widths=widths) for name, widths in _ROW_WIDTHS.items()},
}

TILE = 1024  # elements a program of the _row_fwd kernels
ROW_WARPS = 4
_FEW_ROWS = 256  # summed in one go: a second launch would cost more than it gains


@dataclass(frozen=True, slots=True)
class SumPlan:
    """The work of one program of a _row_bwd kernel, in steps of a tile.

    Attributes:
        programs: approximate number of programs per multiprocessor; the rows are split into as many parts.
        stages: number of steps whose loads are in flight.
    """

    rows: int
    block_n: int
    num_warps: int
    programs: int = 4
    stages: int = 3

    def constants(self) -> dict[str, int]:
        """Return the compile-time arguments."""
        return {"ROWS": self.rows, "BLOCK_N": self.block_n, "STAGES": self.stages}

    def parts(self, M: int, N: int, device: torch.device) -> tuple[int, int]:
        """Return the number of parts that M rows are split into, and the rows of a part."""
        if M <= _FEW_ROWS:
            return 1, max(self.rows, ceil_div(M, self.rows) * self.rows)
        wanted = max(1, self.programs * multiprocessors(device) // ceil_div(N, self.block_n))
        part_rows = max(4, ceil_div(ceil_div(M, wanted), self.rows)) * self.rows
        return ceil_div(M, part_rows), part_rows


@functools.cache
def row_tile(N: int) -> tuple[int, int]:
    """Return the rows and columns of a program of a _row_fwd kernel."""
    block_n = min(TILE, next_power_of_2(N))
    return TILE // block_n, block_n


@functools.cache
def sum_plan(N: int) -> SumPlan:
    """Return the default plan of a _row_bwd kernel: 2048 elements per step, 16 per thread."""
    block_n = min(512, next_power_of_2(N))
    return SumPlan(rows=2048 // block_n, block_n=block_n, num_warps=4)


_SUMS = (  # elements, columns, warps, programs, stages
    (2048, 512, 4, 4, 3), (2048, 512, 4, 8, 3), (4096, 512, 4, 4, 2), (4096, 512, 8, 4, 3), (2048, 256, 4, 4, 3),
    (2048, 256, 4, 8, 3), (2048, 1024, 4, 4, 3),
)  # fmt: skip


@functools.cache
def sum_plans(N: int) -> tuple[SumPlan, ...]:
    """Return the tuning candidates of the _row_bwd kernels."""
    cut = [(elements, min(columns, next_power_of_2(N)), *rest) for elements, columns, *rest in _SUMS]
    return tuple(dict.fromkeys(SumPlan(elements // block_n, block_n, *rest) for elements, block_n, *rest in cut))


TUNED: dict[str, Tuned[SumPlan]] = {
    name: Tuned(name, default=lambda M, N: sum_plan(N), candidates=lambda M, N: sum_plans(N))
    for name in ("add_row_bwd", "mul_row_bwd")
}


def is_row(a: Tensor, b: Tensor) -> bool:
    """Return whether b is a row of a: its shape, without leading ones, is the end of that of a."""
    shape = b.shape
    while shape and shape[0] == 1:
        shape = shape[1:]
    return 0 < len(shape) <= b.dim() <= a.dim() and a.shape[-len(shape) :] == shape


def launch_binary(op: str, a: Tensor, b: Tensor, plan: Elementwise | None = None) -> Tensor:
    """Apply "add" or "mul": to two dense tensors of one layout, or to contiguous rows a and a contiguous row b."""
    y = torch.empty_like(a)
    n = a.numel()
    if not n:
        return y
    if a.shape == b.shape:
        kernel = STREAM_KERNELS[f"{op}_fwd"]
        if plan is None:
            plan = kernel.plan(a.device, a.dtype, (n,), lambda plan: launch_binary(op, a, b, plan))
        fixed = {"BLOCK": plan.block, "EVICTION": eviction(a, 3)}
        kernel.launch(plan.grid(n), (a, b, y, n), fixed, num_warps=plan.num_warps)
        return y
    N = b.numel()
    rows, block_n = row_tile(N)
    M = n // N
    grid = (ceil_div(M, rows) * ceil_div(N, block_n),)
    KERNELS[f"{op}_row_fwd"].launch(grid, (a, b, y, M, N), {"ROWS": rows, "BLOCK_N": block_n}, num_warps=ROW_WARPS)
    return y


def mul_backward(
    dy: Tensor, a: Tensor, b: Tensor, needs: Sequence[bool], plan: Elementwise | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Return da and db, in the layout of a and b."""
    if dy.stride() != a.stride():
        dy = torch.empty_like(a).copy_(dy)
    if not (needs[0] and needs[1]):
        other = launch_binary("mul", dy, b if needs[0] else a)
        return (other, None) if needs[0] else (None, other)
    da, db = torch.empty_like(a), torch.empty_like(b)
    n = a.numel()
    if n:
        kernel = STREAM_KERNELS["mul_bwd"]
        if plan is None:
            plan = kernel.plan(a.device, a.dtype, (n,), lambda plan: mul_backward(dy, a, b, needs, plan))
        kernel.launch(plan.grid(n), (dy, a, b, da, db, n), {"BLOCK": plan.block}, num_warps=plan.num_warps)
    return da, db


def add_row_backward(dy: Tensor, b: Tensor, plan: SumPlan | None = None) -> Tensor:
    """Return db: dy summed over the rows."""
    dy, db = dy.contiguous(), torch.empty_like(b)
    if not dy.numel():
        return db.zero_()
    if plan is None:
        sizes = (dy.numel() // b.numel(), b.numel())
        plan = TUNED["add_row_bwd"](dy.device, dy.dtype, sizes, lambda plan: add_row_backward(dy, b, plan))
    return _sum_rows(dy, db, plan)


def mul_row_backward(
    dy: Tensor, a: Tensor, b: Tensor, needs: Sequence[bool], plan: SumPlan | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Return da = dy b, and db: dy a summed over the rows."""
    dy = dy.contiguous()
    if not needs[1]:
        return launch_binary("mul", dy, b), None
    da = torch.empty_like(a) if needs[0] else None
    db = torch.empty_like(b)
    if not a.numel():
        return da, db.zero_()
    N = b.numel()
    M = a.numel() // N
    if plan is None:
        plan = TUNED["mul_row_bwd"](a.device, a.dtype, (M, N), lambda plan: mul_row_backward(dy, a, b, needs, plan))
    parts, part_rows = plan.parts(M, N, a.device)
    out = db if parts == 1 else torch.empty((parts, N), dtype=torch.float32, device=a.device)
    grid = (parts * ceil_div(N, plan.block_n),)
    args = (dy, a, b, da, out, M, N, part_rows)
    KERNELS["mul_row_bwd"].launch(grid, args, plan.constants(), num_warps=plan.num_warps)
    return da, db if parts == 1 else _sum_rows(out, db, plan)


def _sum_rows(x: Tensor, y: Tensor, plan: SumPlan) -> Tensor:
    """Sum contiguous rows into y, in two steps if there are many."""
    N = y.numel()
    M = x.numel() // N
    parts, part_rows = plan.parts(M, N, x.device)
    out = y if parts == 1 else torch.empty((parts, N), dtype=torch.float32, device=x.device)
    grid = (parts * ceil_div(N, plan.block_n),)
    KERNELS["add_row_bwd"].launch(grid, (x, out, M, N, part_rows), plan.constants(), num_warps=plan.num_warps)
    return y if parts == 1 else _sum_rows(out, y, plan)
