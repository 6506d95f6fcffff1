"""Launches of the elementwise kernels: what a program takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.ops._elementwise import STREAM, Elementwise
from accelerant.ops._rows import ceil_div, multiprocessors, next_power_of_2
from accelerant.runtime.triton import TritonKernel

__all__ = [
    "KERNELS",
    "SumPlan",
    "add_row_backward",
    "is_row",
    "launch_binary",
    "mul_backward",
    "mul_row_backward",
    "row_tile",
    "sum_plan",
]

_NAMES = (
    *(f"{op}_{way}" for op in ("relu", "sigmoid", "tanh", "silu", "mul") for way in ("fwd", "bwd")),
    "add_fwd",
    *(f"{op}_row_{way}" for op in ("add", "mul") for way in ("fwd", "bwd")),
)
KERNELS = {name: TritonKernel("accelerant.ops.elementwise.triton_kernels", name) for name in _NAMES}

TILE = 1024  # elements a program of the _row_fwd kernels
ROW_WARPS = 4
_FEW_ROWS = 256  # summed in one go: a second launch would cost more than it gains


@dataclass(frozen=True, slots=True)
class SumPlan:
    """What a program of a _row_bwd kernel takes.

    Attributes:
        rows, block_n: the tile of one step.
        num_warps: warps a program.
        programs: programs a multiprocessor, about; the rows are cut into so many parts.
        stages: loads of this many steps in flight.
    """

    rows: int
    block_n: int
    num_warps: int
    programs: int = 4
    stages: int = 3

    def constants(self) -> dict[str, int]:
        """The compile-time arguments."""
        return {"ROWS": self.rows, "BLOCK_N": self.block_n, "STAGES": self.stages}

    def parts(self, M: int, N: int, device: torch.device) -> tuple[int, int]:
        """Into how many parts M rows are cut, and how many rows each has."""
        if M <= _FEW_ROWS:
            return 1, max(self.rows, ceil_div(M, self.rows) * self.rows)
        wanted = max(1, self.programs * multiprocessors(device) // ceil_div(N, self.block_n))
        part_rows = max(4, ceil_div(ceil_div(M, wanted), self.rows)) * self.rows
        return ceil_div(M, part_rows), part_rows


@functools.cache
def row_tile(N: int) -> tuple[int, int]:
    """Rows and columns of a program of a _row_fwd kernel."""
    block_n = min(TILE, next_power_of_2(N))
    return TILE // block_n, block_n


@functools.cache
def sum_plan(N: int) -> SumPlan:
    """What a program of a _row_bwd kernel takes: 2048 elements a step, 16 a thread."""
    block_n = min(512, next_power_of_2(N))
    return SumPlan(rows=2048 // block_n, block_n=block_n, num_warps=4)


def is_row(a: Tensor, b: Tensor) -> bool:
    """Whether b is one row against rows of a: its shape, without leading ones, is the end of that of a."""
    shape = b.shape
    while shape and shape[0] == 1:
        shape = shape[1:]
    return 0 < len(shape) <= b.dim() <= a.dim() and a.shape[-len(shape) :] == shape


def launch_binary(op: str, a: Tensor, b: Tensor, plan: Elementwise = STREAM) -> Tensor:
    """Apply "add" or "mul": to two dense tensors of one layout, or to contiguous rows a and a contiguous row b."""
    y = torch.empty_like(a)
    n = a.numel()
    if not n:
        return y
    if a.shape == b.shape:
        KERNELS[f"{op}_fwd"].launch(plan.grid(n), (a, b, y, n), {"BLOCK": plan.block}, num_warps=plan.num_warps)
        return y
    N = b.numel()
    rows, block_n = row_tile(N)
    M = n // N
    grid = (ceil_div(M, rows) * ceil_div(N, block_n),)
    KERNELS[f"{op}_row_fwd"].launch(grid, (a, b, y, M, N), {"ROWS": rows, "BLOCK_N": block_n}, num_warps=ROW_WARPS)
    return y


def mul_backward(dy: Tensor, a: Tensor, b: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Find da and db, in the layout of a and b."""
    if dy.stride() != a.stride():
        dy = torch.empty_like(a).copy_(dy)
    if not (needs[0] and needs[1]):
        other = launch_binary("mul", dy, b if needs[0] else a)
        return (other, None) if needs[0] else (None, other)
    da, db = torch.empty_like(a), torch.empty_like(b)
    n = a.numel()
    if n:
        KERNELS["mul_bwd"].launch(
            STREAM.grid(n), (dy, a, b, da, db, n), {"BLOCK": STREAM.block}, num_warps=STREAM.num_warps
        )
    return da, db


def add_row_backward(dy: Tensor, b: Tensor, plan: SumPlan | None = None) -> Tensor:
    """Find db: dy summed over the rows."""
    return _sum_rows(dy.contiguous(), torch.empty_like(b), plan or sum_plan(b.numel()))


def mul_row_backward(
    dy: Tensor, a: Tensor, b: Tensor, needs: Sequence[bool], plan: SumPlan | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Find da = dy b, and db: dy a summed over the rows."""
    dy = dy.contiguous()
    if not needs[1]:
        return launch_binary("mul", dy, b), None
    da = torch.empty_like(a) if needs[0] else None
    db = torch.empty_like(b)
    if not a.numel():
        return da, db.zero_()
    N = b.numel()
    M = a.numel() // N
    plan = plan or sum_plan(N)
    parts, part_rows = plan.parts(M, N, a.device)
    out = db if parts == 1 else torch.empty((parts, N), dtype=torch.float32, device=a.device)
    grid = (parts * ceil_div(N, plan.block_n),)
    args = (dy, a, b, da, out, M, N, part_rows)
    KERNELS["mul_row_bwd"].launch(grid, args, plan.constants(), num_warps=plan.num_warps)
    return da, db if parts == 1 else _sum_rows(out, db, plan)


def _sum_rows(x: Tensor, y: Tensor, plan: SumPlan) -> Tensor:
    """Sum contiguous rows into y, in two steps if there are many."""
    if not x.numel():
        return y.zero_()
    N = y.numel()
    M = x.numel() // N
    parts, part_rows = plan.parts(M, N, x.device)
    out = y if parts == 1 else torch.empty((parts, N), dtype=torch.float32, device=x.device)
    grid = (parts * ceil_div(N, plan.block_n),)
    KERNELS["add_row_bwd"].launch(grid, (x, out, M, N, part_rows), plan.constants(), num_warps=plan.num_warps)
    return y if parts == 1 else _sum_rows(out, y, plan)
