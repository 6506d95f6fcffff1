"""What is launched for a piece of a sum, worked out once: kernels, grids, numbers, and the names of arrays.

So a sum of the same size is launched without thinking again: until the first kernel starts the device waits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.memory_space import MemorySpace
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.zk.msm import affine
from accelerant.zk.msm.device_plan import DevicePlan, coordinate_words
from accelerant.zk.msm.program import (
    ACCUMULATE_BLOCK,
    COUNTERS,
    EACH,
    SORT_BLOCK,
    Launch,
    accumulate_source,
    fold_source,
    reduce_block,
    sort_source,
)

__all__ = ["Piece", "Shape", "Step", "prepared", "shapes", "sort_launches", "steps"]

Shape = tuple[tuple[int, ...], np.dtype[Any]]

_U32, _U64 = np.dtype(np.uint32), np.dtype(np.uint64)
_COMBINE_GROUPS = 1024
_REMEMBERED = 256
"""Pieces, and plans, whose steps are kept."""


class Piece(NamedTuple):
    """Of a sum the points that are summed at once.

    Attributes:
        size: how many.
        n: of all points, by which the multiples of two windows differ.
        scalars, points: the rows of the first, in the arrays that are given.
    """

    size: int
    n: int
    scalars: int
    points: int


class Step(NamedTuple):
    """A launch: arrays by their names, then numbers."""

    kernel: Kernel
    grid: tuple[int]
    block: tuple[int]
    arrays: tuple[str, ...]
    numbers: tuple[int, ...]


@functools.lru_cache(maxsize=_REMEMBERED)
def shapes(curve: str, plan: DevicePlan) -> Mapping[str, Shape]:
    """Scratch arrays, by name; all steps but "scalars", "points" and "results" are about these.

    Args:
        curve: its name.
        plan: how a sum is cut up.
    """
    width = 4 * coordinate_words(curve_of(curve))
    pairs = (plan.sets * plan.blocks(reduce_block(curve_of(curve))), width)
    return {
        "digits": ((plan.entries,), _U32),
        "ranks": ((plan.entries,), _U32),
        "places": ((plan.places,), _U32),
        "counts": ((plan.keys + COUNTERS,), _U32),
        "tiles": ((plan.tiles,), _U32),
        "segments": ((plan.segments, 3), _U32),
        "heavy": ((max(1, plan.heavy), 3), _U32),
        "sums": ((plan.sums, width), _U64),
        "plain": (pairs, _U64),
        "weighted": (pairs, _U64),
        **affine.shapes(curve_of(curve), plan),
    }


@functools.lru_cache(maxsize=_REMEMBERED)
def steps(place: MemorySpace, curve: str, plan: DevicePlan, piece: Piece) -> tuple[Step, ...]:
    """From scalars and points to the sums of windows, "results". Compiles what is not compiled.

    Args:
        place: not the host.
        curve: its name.
        plan: how a sum is cut up; without its multiples' windows the points are those given.
        piece: of the sum.
    """
    found = curve_of(curve)
    return prepared(place, (*sort_launches(found, plan, piece), *_sum_launches(found, plan, piece.points)))


def prepared(place: MemorySpace, launches: Iterable[Launch]) -> tuple[Step, ...]:
    """Launches with their kernels."""
    return tuple(
        Step(_compiled(place, each), (each.grid,), (each.block,), each.arrays, each.numbers) for each in launches
    )


def sort_launches(curve: Curve[Any], p: DevicePlan, piece: Piece) -> Iterator[Launch]:
    """What sort.c makes of "scalars": "places", "counts", "segments" and "heavy"."""
    source, n = sort_source(), piece.size
    scalar_blocks, blocks = -(-n // SORT_BLOCK), -(-n // (SORT_BLOCK * EACH))
    spread, stride = (0, piece.n) if p.shared else (p.buckets, 0)

    def run(entry: str, grid: int, arrays: tuple[str, ...], *numbers: int) -> Launch:
        return Launch(source, entry, grid, SORT_BLOCK, arrays, numbers)

    cut = (piece.scalars, n, p.window, p.windows, p.keys + COUNTERS, scalar_blocks * SORT_BLOCK)
    yield run("msm_digits", scalar_blocks, ("scalars", "digits", "counts"), *cut)
    counted = ("digits", "ranks", "counts")
    yield run("msm_rank", p.windows * blocks, counted, n, blocks, spread)
    yield run("msm_tiles", p.tiles, ("counts", "tiles"), p.keys, p.segment, p.rounds)
    yield run("msm_scan", 1, ("counts", "tiles"), p.keys, p.tiles, p.segment)
    lists = ("counts", "tiles", "segments", "heavy", "sums", "places")
    yield run("msm_segments", p.tiles, lists, p.keys, p.segment, 4 * coordinate_words(curve), p.rounds)
    yield run("msm_scatter", p.windows * blocks, (*counted, "places"), n, blocks, spread, stride)


# --- parts -----------------------------------------------------------------------------------------------------------

_kernels: dict[tuple[str, str, MemorySpace], Kernel] = {}
"""(program, entry, place) -> compiled; a program's name says all that it depends on."""


def _compiled(place: MemorySpace, what: Launch) -> Kernel:
    key = (what.source.name, what.entry, place)
    if key not in _kernels:
        _kernels[key] = place.provider.compile(what.source, entry=what.entry, device=place.index)
    return _kernels[key]


def _sum_launches(curve: Curve[Any], p: DevicePlan, first: int) -> Iterator[Launch]:
    """The sums of segments, then of windows; whatever fills "sums" from "places" and "segments" may stand here."""
    rows = "points"
    if p.rounds:
        yield from affine.launches(curve, p, first)
        rows, first = affine.last_rows(p), 0
    source = accumulate_source(curve, p.written_out, p.resident, p.rounds > 0)
    blocks = -(-p.segments // ACCUMULATE_BLOCK)
    lists = (rows, "places", "segments", "counts", "sums")
    yield Launch(source, "msm_accumulate", blocks, ACCUMULATE_BLOCK, lists, (p.keys, first))
    yield from _fold_launches(curve, p)


def _fold_launches(curve: Curve[Any], p: DevicePlan) -> Iterator[Launch]:
    source, threads = fold_source(curve, p.fold_written_out), reduce_block(curve)
    groups, blocks = min(_COMBINE_GROUPS, p.heavy), p.blocks(threads)
    if groups:
        yield Launch(source, "msm_combine", groups, threads, ("heavy", "counts", "sums"), (p.keys, groups))
    alone = int(blocks == 1)
    arrays = ("sums", "sums", "results" if alone else "plain", "weighted")
    yield Launch(source, "msm_reduce", p.sets * blocks, threads, arrays, (p.buckets, blocks, p.per_thread, 0, alone))
    if not alone:
        each = ((blocks - 1) // threads).bit_length()
        cut = (blocks, 1, each, p.per_thread + threads.bit_length() - 1, 1)
        yield Launch(source, "msm_reduce", p.sets, threads, ("plain", "weighted", "results", "weighted"), cut)
