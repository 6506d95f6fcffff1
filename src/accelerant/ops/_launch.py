"""Launch parameters of elementwise and row-wise Triton kernels: tiles, grids, layouts and cache hints."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelerant.config import choice_overrides
from accelerant.ops._library import refuses_triton_kernel
from accelerant.runtime.compilation.background import is_missing
from accelerant.runtime.compilation.triton import TritonKernel, recorders
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.dispatch.plan import rules, torch_wants_determinism
from accelerant.runtime.dispatch.race import Tuned
from accelerant.runtime.memory.limits import has_fakes, predictions

if TYPE_CHECKING:
    from accelerant.runtime.providers.cuda_launch import PreparedLaunch

_KNOWN_LIMIT = 4096
_INTERPRETED_MULTIPROCESSORS = 2  # so that persistent loops run more than once in the interpreter, too


def ceil_div(a: int, b: int) -> int:
    """Return the least integer that is at least a / b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n, n at least 1."""
    return 1 << (n - 1).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def accesses(count: int, flops: int) -> Callable[[Case], Cost]:
    """Return the cost function of an op with `count` memory accesses and `flops` operations per element."""

    def cost(case: Case) -> Cost:
        n = math.prod(case.shape)
        return Cost(count * n * case.dtype.itemsize, flops * n)

    return cost


def product_cost(case: Case, results: int = 1, operations: int = 0) -> Cost:
    """Return the cost of a product, a case (M, N, K), of `results` M x N tensors and `operations` per element."""
    M, N, K = case.shape
    return Cost((M * K + K * N + results * M * N) * case.dtype.itemsize, 2 * M * N * K + operations * M * N)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of CUDA matrices to `out`, of a wider dtype, in the product's epilogue."""
    if predictions and has_fakes(out):  # torch 2.11 takes the dtype for beta in a fake addmm, and 2.13 runs a kernel
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    else:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)


def eviction(x: Tensor, accesses: int) -> str:
    """Return the L2 eviction policy for loads of data that a kernel reads once: "evict_last", or "" for the default."""
    return "evict_last" if x.numel() * x.element_size() * accesses > _l2_bytes(x.device) else ""


@functools.cache
def _l2_bytes(device: torch.device) -> float:
    """Return the L2 size on sm_90, where the policy was measured; infinity elsewhere, so that it is not used."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return math.inf
    return float(torch.cuda.get_device_properties(device).L2_cache_size)


# --- repeated launches -----------------------------------------------------------------------------------------------
class Repeats:
    """The launches of calls that differ from an earlier one in their pointers alone, by all else that they depend on.

    A call that finds its launches here skips plans, constants and the kernels' own look-ups. They are dropped with
    `plans`.

    >>> pointers = [x.data_ptr() for x in (x, y)]  # of all tensors, and their alignment in the key
    >>> if not repeats.start(key, pointers):
    ...     with repeats.recorded(key, pointers):
    ...         KERNEL.launch(...)
    """

    def __init__(self, *plans: Tuned[Any]) -> None:
        self._known: dict[Hashable, tuple[tuple[PreparedLaunch, tuple[int, ...]], ...]] = {}
        for each in plans:
            each.plans.add_dependent(self._known)

    def start(self, key: Hashable, pointers: Sequence[int]) -> bool:
        """Launch what a key stands for on other pointers; False where that is not known."""
        if (known := self._known.get(key)) is None:
            return False
        _start(known, pointers)
        return True

    def bound(self, key: Hashable) -> Callable[[Sequence[int]], None] | None:
        """Return `start` of a key, or None where that is not known; plans that change later do not change it."""
        return None if (known := self._known.get(key)) is None else functools.partial(_start, known)

    @contextlib.contextmanager
    def recorded(self, key: Hashable, pointers: Sequence[int]) -> Iterator[None]:
        """Keep the block's launches, unless one has another pointer, two tensors share one, or plans are timed."""
        if key is None or rules().tune:
            yield
            return
        thread = threading.get_ident()
        found = recorders[thread] = []
        try:
            yield
        finally:
            del recorders[thread]
        positions = {pointer: at for at, pointer in enumerate(pointers)}
        if is_missing():
            return
        if found and len(positions) == len(pointers) and all(positions.keys() >= set(used) for _, used in found):
            if len(self._known) >= _KNOWN_LIMIT:
                self._known.clear()
            self._known[key] = tuple((prepared, tuple(map(positions.__getitem__, used))) for prepared, used in found)


def _start(known: Sequence[tuple[PreparedLaunch, tuple[int, ...]]], pointers: Sequence[int]) -> None:
    for prepared, positions in known:
        prepared.start([*map(pointers.__getitem__, positions)])


def are_repeatable() -> bool:
    """Return whether launches may be repeated: nothing is predicted, no setting that plans depend on is overridden."""
    return not predictions and not choice_overrides and not torch_wants_determinism()


@dataclass(frozen=True, slots=True)
class RowTile:
    """The tile of one program of a row-wise kernel over an (M, N) problem: `rows` by `block_n` columns at a time.

    `block_n` is a power of two, at least N unless the kernel loops over columns, and a kernel may hold several `chunks`
    of it side by side. With `programs` per multiprocessor each program loops over rows; 0: one program per group of
    rows. `stages` loop steps have their loads in flight.
    """

    rows: int
    block_n: int
    num_warps: int
    programs: int = 0
    stages: int = 1
    chunks: int = 1

    def grid(self, M: int, device: torch.device) -> int:
        """Return the number of programs for M rows, M at least 1."""
        groups = ceil_div(M, self.rows)
        return min(groups, self.programs * multiprocessors(device)) if self.programs else groups


@functools.cache
def whole_rows(block_n: int) -> tuple[RowTile, ...]:
    """Return tuning candidates for a kernel that holds whole rows: 1024 to 8192 elements, 8 to 32 per thread."""
    tiles = [(max(1, elements // block_n), each) for elements in (1024, 2048, 4096, 8192) for each in (8, 16, 32)]
    most = 16 if block_n <= 8192 else 32
    plans = [RowTile(rows, block_n, min(most, max(1, rows * block_n // (32 * each)))) for rows, each in tiles]
    return tuple(dict.fromkeys(plans))


def as_rows(x: Tensor, N: int) -> tuple[Tensor, int]:
    """Return x as rows of N contiguous elements, and their stride; copies only where a view does not suffice."""
    if x.is_contiguous():
        return x, N
    rows = x.reshape(-1, N)
    if N > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


_SPLIT = 4  # approximate number of programs per multiprocessor that few long rows are split among


def split_rows(M: int, N: int, block_n: int, device: torch.device) -> tuple[int, int]:
    """Return the parts of each of M rows, one where M rows fill the device, and a part's columns: whole blocks."""
    blocks, processors = ceil_div(N, block_n), multiprocessors(device)
    if processors <= M:
        return 1, blocks * block_n
    span = ceil_div(blocks, min(blocks, ceil_div(_SPLIT * processors, M)))
    return ceil_div(blocks, span), span * block_n


def launch_wide_rows(
    kernels: Mapping[str, TritonKernel], way: str, inputs: Sequence[Tensor], results: Sequence[Tensor], stride: int,
    plan: RowTile, sums: tuple[int, torch.dtype], constants: Mapping[str, object], in_parts: Mapping[str, object],
) -> None:  # fmt: skip
    """Launch for rows that exceed the registers: one program each (`way`wide), or where they are few, several.

    These reduce their parts of a row first (`way`part, whose constants are `in_parts`), each to as many numbers of a
    dtype as `sums` has, and then write them (`way`join). Results are contiguous; `stride` is the first input's.
    """
    result = results[0]
    N = result.shape[-1]
    M, fixed = result.numel() // N, {"BLOCK_N": plan.block_n}
    parts, span = split_rows(M, N, plan.block_n, result.device)
    if parts == 1:
        whole = {**fixed, **constants}
        kernels[f"{way}wide"].launch((M,), (*inputs, *results, N, stride), whole, num_warps=plan.num_warps)
        return
    reduced = torch.empty((M, sums[0], parts), dtype=sums[1], device=result.device)
    grid, sizes = (parts, M), (N, stride, span)
    kernels[f"{way}part"].launch(grid, (*inputs, reduced, *sizes), {**fixed, **in_parts}, num_warps=plan.num_warps)
    joined = {**fixed, **constants, "PARTS": next_power_of_2(parts)}
    kernels[f"{way}join"].launch(grid, (*inputs, reduced, *results, *sizes), joined, num_warps=plan.num_warps)


@functools.cache
def quantizing_plan(N: int) -> RowTile:
    """Return the default plan of kernels that scale and round whole rows: about 4096 elements, 16 or 32 per thread."""
    if (block_n := max(16, next_power_of_2(N))) <= 2048:
        return RowTile(rows=min(64, 4096 // block_n), block_n=block_n, num_warps=4)
    return RowTile(rows=1, block_n=block_n, num_warps=8 if block_n <= 8192 else 16)


def row_constants(plan: RowTile, N: int) -> dict[str, int | bool]:
    """Return the compile-time arguments of these kernels."""
    return {"EXACT": plan.block_n == N, "ROWS": plan.rows, "BLOCK_N": plan.block_n}


# --- elementwise -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Elementwise:
    """Elements and warps per program."""

    block: int
    num_warps: int

    def grid(self, n: int) -> tuple[int]:
        """Return the grid for n elements."""
        return (-(-n // self.block),)


# 8 elements a thread, one 16-byte load of bfloat16 for each tensor: the fastest measured on an H200, by 5% over 16.
STREAM = Elementwise(block=1024, num_warps=4)

SHORT = Elementwise(block=512, num_warps=2)
"""The fastest, by half a per cent, for kernels over three tensors or more; over two tensors it loses 20%."""

STREAMS = (SHORT, Elementwise(1024, 2), STREAM, Elementwise(2048, 4), Elementwise(2048, 8))
"""Tuning candidates for an elementwise kernel."""


class StreamKernel(TritonKernel):
    """A kernel over n elements; `usual` is the plan where nothing was measured."""

    def __init__(self, module: str, name: str, usual: Elementwise = STREAM, widths: Sequence[int] = ()) -> None:
        super().__init__(module, name, widths=widths)
        self.usual = usual
        self.plan: Tuned[Elementwise] = Tuned(name, default=lambda n: usual, candidates=lambda n: STREAMS)
        # Launches that lack only their pointers, by everything else; dropped with the plans.
        self.known: dict[tuple[object, ...], PreparedLaunch] = {}
        self.plan.plans.add_dependent(self.known)


def launch_map(
    kernel: StreamKernel, x: Tensor, constants: Mapping[str, object], plan: Elementwise | None = None,
    dy: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run kernel([dy_ptr,] x_ptr, y_ptr, n, *constants, BLOCK, EVICTION); return the result in the layout of x."""
    y, n = torch.empty_like(x), x.numel()
    if not n:
        return y
    key: tuple[object, ...] = ()
    aligned = False
    if y.stride() != x.stride():  # empty_like keeps the strides of dense memory, permuted or not, and only those
        x = torch.empty_like(y).copy_(x)
    if dy is not None and dy.stride() != x.stride():
        dy = torch.empty_like(x).copy_(dy)
    if plan is None and not predictions and not choice_overrides and not torch_wants_determinism():
        pointers = (x.data_ptr(), y.data_ptr()) if dy is None else (dy.data_ptr(), x.data_ptr(), y.data_ptr())
        aligned = not (pointers[0] | pointers[1] | pointers[-1]) & 15
        key = (n, x.dtype, x.get_device(), None if dy is None else dy.dtype, *constants.values())
        known = kernel.known.get(key) if aligned else None
        if known is not None:
            known.start(pointers)
            return y
    if plan is None:
        plan = kernel.plan(x.device, x.dtype, (n,), lambda plan: launch_map(kernel, x, constants, plan, dy))
    inputs = (x,) if dy is None else (dy, x)
    fixed = {**constants, "BLOCK": plan.block, "EVICTION": eviction(x, len(inputs) + 1)}
    launched = kernel.launch(plan.grid(n), (*inputs, y, n), fixed, num_warps=plan.num_warps)
    if launched and key and aligned:
        if len(kernel.known) >= _KNOWN_LIMIT:
            kernel.known.clear()
        kernel.known[key] = launched
    return y


def triton_operation(
    name: str, kernel: Callable[..., Any], torch_function: Callable[..., Any], *, cost: Callable[[Case], Cost],
    refuses: Callable[[Case], str | None] = refuses_triton_kernel, mutates: bool = False, differentiable: bool = False,
) -> Operation:  # fmt: skip
    """Return an Operation of a Triton kernel and torch's function, which take its arguments after the Case."""
    own = Implementation("triton", kernel, refuses=refuses, own=True, mutates=mutates)
    library = Implementation("torch", torch_function, mutates=mutates, differentiable=differentiable)
    return Operation(name, (own, library), cost=cost)
