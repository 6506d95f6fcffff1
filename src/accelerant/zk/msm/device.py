"""A sum of multiples on a device with C kernels, by buckets; sort.c, accumulate.c and fold.c say how.

The host launches, and at the end adds up the sums of windows by Horner's rule, with a CPU kernel; in between it need
not wait (Started). How a sum is cut up is a plan (device_plan.py). Points that many sums share are kept with their
multiples by 2^(c w) (DeviceBases): then all windows fill one set of buckets, and Horner's rule falls away.

Time and memory accesses depend on the scalars and the points.

Source: Bernstein et al., eprint 2012/549, after Pippenger, for the buckets; Brickell et al., EUROCRYPT 1992, for the
multiples; Botrel and El Housni, eprint 2022/1400, for signed digits and XYZZ coordinates in buckets.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.places import HOST, Place
from accelerant.errors import OutOfMemory
from accelerant.runtime.kernel import Kernel
from accelerant.zk.launching import launch
from accelerant.zk.msm.device_plan import MOST_INDICES, DevicePlan, coordinate_words, device_plan
from accelerant.zk.msm.llvm_kernels import kernel_source as llvm_source
from accelerant.zk.msm.program import (
    ACCUMULATE_BLOCK,
    COUNTERS,
    EACH,
    MULTIPLES_BLOCK,
    SORT_BLOCK,
    TOGETHER,
    accumulate_source,
    fold_source,
    multiples_source,
    reduce_block,
    sort_source,
)

__all__ = ["STREAMED_BYTES", "DeviceBases", "Started", "device_msm", "start_msm"]

U64 = npt.NDArray[np.uint64]
Words = Any
Load = Callable[[npt.NDArray[Any]], Words]

_U32, _U64 = np.dtype(np.uint32), np.dtype(np.uint64)
_MEMORY_SHARE = 0.8
"""Of the free memory, what the scratch of a sum takes at most."""

_MULTIPLES_SHARE = 0.5
"""Of the free memory, what the multiples of fixed points take at most."""

_ANY, _NOT_ASKED_BYTES = 1 << 62, 1 << 31
"""Scratch below so many bytes is taken without asking how much is free, which takes up to a millisecond."""

_COMBINE_GROUPS = 1024
STREAMED_BYTES = 1 << 28
"""Points on the host go to the device in pieces of at most so many bytes."""


class Started:
    """A sum under way on a device.

    Attributes:
        results: words at the place that kernels give: of each piece the sums of windows.
    """

    def __init__(self, place: Place, curve: Curve[Any], window: int, results: Sequence[Words]) -> None:
        self.results = tuple(results)
        self._place, self._curve, self._window = place, curve, window

    def finish(self, stored: Sequence[npt.NDArray[Any]] | None = None) -> U64:
        """The sum: (2 degree limbs,) words, affine in Montgomery form.

        Args:
            stored: the results on the host, in their shapes; if not given they are fetched, in order with what is
                launched on the stream that is current now.
        """
        if not self.results:
            return np.zeros(2 * coordinate_words(self._curve), np.uint64)
        stored = [self._place.store(words) for words in self.results] if stored is None else stored
        return _horner(self._curve, self._window, np.stack(stored))


def device_msm(place: Place, curve: Curve[Any], scalars: Words, points: Words, **options: Any) -> U64:
    """The sum of scalars[i] points[i]: start_msm, and the end of it.

    Returns:
        (2 degree limbs,) words: the sum, affine in Montgomery form.
    """
    return start_msm(place, curve, scalars, points, **options).finish()


def start_msm(
    place: Place,
    curve: Curve[Any],
    scalars: Words,
    points: Words,
    *,
    free_bytes: int | None = None,
    load: Load | None = None,
    **options: Any,
) -> Started:
    """Launch a sum of scalars[i] points[i].

    Args:
        place: with C kernels; not the host.
        curve: of the points.
        scalars: (n, 4) canonical words, below the order of the subgroup; a NumPy array, or words of the place.
        points: (n, ...) words, affine in Montgomery form, all zeros at infinity, on the curve; likewise. What is on
            the host goes to the device in pieces.
        free_bytes: memory that the scratch may take; by default 0.8 of what is free.
        load: what brings pieces there, in order with launches; the place's own by default, for which the host waits.
        options: of device_plan.

    Raises:
        As device_plan.
    """
    n = int(scalars.shape[0])
    if not n:
        return Started(place, curve, 0, ())
    if isinstance(points, np.ndarray):
        options["piece"] = min(options.get("piece", n), STREAMED_BYTES // (16 * coordinate_words(curve)))
    if free_bytes is not None:
        return _Work(place, curve, device_plan(curve, n, free_bytes, **options), load).start(scalars, points, n)
    plan = device_plan(curve, n, _ANY, **options)
    work = _work_where_it_fits(place, curve, plan, lambda free: device_plan(curve, n, free, **options), load)
    return work.start(scalars, points, n)


class DeviceBases:
    """Points that many sums share, at a place, with their multiples by 2^(c w) for all windows w where those have room.

    Attributes:
        n: how many.
        plan: how a sum is cut up where the memory is as free as it was; None of no points.
    """

    def __init__(
        self,
        place: Place,
        curve: Curve[Any],
        points: Words,
        *,
        free_bytes: int | None = None,
        keep_scratch: bool = False,
        **options: Any,
    ) -> None:
        """Bring points to the place, and compute their multiples.

        Args:
            place, curve, points, options: as start_msm.
            free_bytes: what the multiples may take, by default half of what is free.
            keep_scratch: keep the memory of a sum from one to the next. Sums must be started in order then, on one
                stream.

        Returns when all is there, so that sums may be asked for on any stream.

        Raises:
            As device_plan.
        """
        self.n = int(points.shape[0])
        self._place, self._curve = place, curve
        self._work: _Work | None = None
        self.plan: DevicePlan | None = None
        words = 2 * coordinate_words(curve)
        self._points = place.load(points) if isinstance(points, np.ndarray) else points
        if not self.n:
            return
        free_bytes = _free(place, _MULTIPLES_SHARE) if free_bytes is None else free_bytes
        scratch = _free(place, _MULTIPLES_SHARE)
        plan = device_plan(curve, self.n, scratch, shared=True, **options)
        count = self.n * plan.windows
        if 8 * words * count <= free_bytes and count <= MOST_INDICES:
            self._points = _multiples(place, curve, self._points, self.n, plan)
        else:
            plan = device_plan(curve, self.n, scratch, **options)
        self.plan = plan
        self._options = {**options, "shared": True, "window": plan.window} if plan.shared else options
        if keep_scratch:
            self._work = _Work(place, curve, plan)
        place.provider.synchronize(place.index)  # launches are ordered on the stream that is current here alone

    def msm(self, scalars: Words) -> U64:
        """The sum of scalars[i] times point i; scalars and result as device_msm has them.

        Raises:
            OutOfMemory: not even a piece of 1024 points has room now.
        """
        return self.start(scalars).finish()

    def start(self, scalars: Words) -> Started:
        """Launch what msm does.

        Raises:
            OutOfMemory: as msm.
        """
        if self.plan is None:
            return Started(self._place, self._curve, 0, ())
        work = self._work or _work_where_it_fits(self._place, self._curve, self.plan, self._smaller)
        return work.start(scalars, self._points, self.n)

    @property
    def size_bytes(self) -> int:
        """Memory of the device that is held: points, their multiples, and the scratch that is kept."""
        if self.plan is None:
            return 0
        rows = self.plan.windows if self.plan.shared else 1
        scratch = self.plan.size_bytes(self._curve) if self._work else 0
        return 16 * coordinate_words(self._curve) * self.n * rows + scratch

    def _smaller(self, free_bytes: int) -> DevicePlan:
        """The plan with smaller pieces, since others have taken the memory; multiples fix the windows."""
        points = self.n if self.plan is None else self.plan.points
        return device_plan(self._curve, self.n, free_bytes, **{**self._options, "piece": points})

    def explain(self) -> str:
        """In words."""
        if self.plan is None:
            return "no points"
        kept = f"the points' multiples for {self.plan.windows} windows kept; " * self.plan.shared
        return kept + self.plan.explain(self._curve)


def _multiples(place: Place, curve: Curve[Any], points: Words, n: int, plan: DevicePlan) -> Words:
    """(windows n, words): of window w the points times 2^(c w)."""
    table = place.empty((plan.windows * n, 2 * coordinate_words(curve)), _U64)
    grid = -(-n // (MULTIPLES_BLOCK * TOGETHER))
    for w in range(plan.windows):
        source, at = (table, (w - 1) * n) if w else (points, 0)
        arrays = (source, table)
        cut = (n, at, w * n, plan.window if w else 0)
        launch(place, multiples_source(curve), "msm_multiples", grid, MULTIPLES_BLOCK, arrays, *cut)
    return table


class _Work:
    """The scratch memory of a plan, and what is launched on it."""

    def __init__(self, place: Place, curve: Curve[Any], plan: DevicePlan, load: Load | None = None) -> None:
        self.place, self.curve, self.plan = place, curve, plan
        self.load = load or place.load
        self.blocks = plan.blocks(reduce_block(curve))
        self.digits, self.ranks, self.places = (place.empty((plan.entries,), _U32) for _ in range(3))
        self.counts = place.empty((plan.keys + COUNTERS,), _U32)
        self.tiles = place.empty((plan.tiles,), _U32)
        self.segments = place.empty((plan.segments, 3), _U32)
        self.heavy = place.empty((max(1, plan.heavy), 3), _U32)
        width = 4 * coordinate_words(curve)
        self.sums = place.empty((plan.sums, width), _U64)
        self.plain, self.weighted = (place.empty((plan.sets * self.blocks, width), _U64) for _ in range(2))

    def start(self, scalars: Words, points: Words, n: int) -> Started:
        """The sum of n points; where the plan shares buckets, `points` are the multiples."""
        step = self.plan.points
        pieces = [self._piece(scalars, points, n, first, min(step, n - first)) for first in range(0, n, step)]
        return Started(self.place, self.curve, self.plan.window, pieces)

    def _piece(self, scalars: Words, points: Words, n: int, first: int, count: int) -> Words:
        """The sums of windows of `count` points from the first on, projective, the lowest window first."""
        at_scalars, at_points = first, first
        if isinstance(scalars, np.ndarray):
            scalars, at_scalars = self.load(scalars[first : first + count]), 0
        if isinstance(points, np.ndarray):
            points, at_points = self.load(points[first : first + count]), 0
        self._sort(scalars, at_scalars, count, n)
        self._accumulate(points, at_points)
        results = self.place.empty((self.plan.sets, 3 * coordinate_words(self.curve)), _U64)
        self._fold(results)
        return results

    def _sort(self, scalars: Words, first: int, n: int, stride: int) -> None:
        p, run = self.plan, functools.partial(launch, self.place, sort_source())
        scalar_blocks, blocks = -(-n // SORT_BLOCK), -(-n // (SORT_BLOCK * EACH))
        spread, stride = (0, stride) if p.shared else (p.buckets, 0)
        cut = (first, n, p.window, p.windows, p.keys + COUNTERS, scalar_blocks * SORT_BLOCK)
        run("msm_digits", scalar_blocks, SORT_BLOCK, (scalars, self.digits, self.counts), *cut)
        counted = (self.digits, self.ranks, self.counts)
        run("msm_rank", p.windows * blocks, SORT_BLOCK, counted, n, blocks, spread)
        run("msm_tiles", p.tiles, SORT_BLOCK, (self.counts, self.tiles), p.keys, p.segment)
        run("msm_scan", 1, SORT_BLOCK, (self.counts, self.tiles), p.keys, p.tiles, p.segment)
        lists = (self.counts, self.tiles, self.segments, self.heavy, self.sums)
        run("msm_segments", p.tiles, SORT_BLOCK, lists, p.keys, p.segment, 4 * coordinate_words(self.curve))
        run("msm_scatter", p.windows * blocks, SORT_BLOCK, (*counted, self.places), n, blocks, spread, stride)

    def _accumulate(self, points: Words, first: int) -> None:
        """The sums of the segments; whatever fills self.sums from self.places and self.segments may stand here."""
        source = accumulate_source(self.curve, self.plan.written_out, self.plan.resident)
        blocks = -(-self.plan.segments // ACCUMULATE_BLOCK)
        lists = (points, self.places, self.segments, self.counts, self.sums)
        launch(self.place, source, "msm_accumulate", blocks, ACCUMULATE_BLOCK, lists, self.plan.keys, first)

    def _fold(self, results: Words) -> None:
        p, threads = self.plan, reduce_block(self.curve)
        run = functools.partial(launch, self.place, fold_source(self.curve, p.fold_written_out))
        groups = min(_COMBINE_GROUPS, p.heavy)
        if groups:
            run("msm_combine", groups, threads, (self.heavy, self.counts, self.sums), p.keys, groups)
        alone = int(self.blocks == 1)
        once = (results if alone else self.plain, self.weighted)
        cut = (p.buckets, self.blocks, p.per_thread, 0, alone)
        run("msm_reduce", p.sets * self.blocks, threads, (self.sums, self.sums, *once), *cut)
        if not alone:
            each = ((self.blocks - 1) // threads).bit_length()
            cut = (self.blocks, 1, each, p.per_thread + threads.bit_length() - 1, 1)
            run("msm_reduce", p.sets, threads, (self.plain, self.weighted, results, self.weighted), *cut)


# --- parts -----------------------------------------------------------------------------------------------------------


def _work_where_it_fits(
    place: Place, curve: Curve[Any], plan: DevicePlan, smaller: Callable[[int], DevicePlan], load: Load | None = None
) -> _Work:
    """The plan's scratch, or that of `smaller`, given the free bytes, where it has no room."""
    if plan.size_bytes(curve) <= _NOT_ASKED_BYTES:
        with contextlib.suppress(OutOfMemory):
            return _Work(place, curve, plan, load)
    free = _free(place, _MEMORY_SHARE)
    return _Work(place, curve, plan if plan.size_bytes(curve) <= free else smaller(free), load)


def _free(place: Place, share: float) -> int:
    """That share of what is free, with what the process's pool holds unused."""
    memory = place.provider.memory(place.index)
    return int(share * (memory.free_bytes + max(0, memory.reserved_bytes - memory.allocated_bytes)))


def _horner(curve: Curve[Any], window: int, sums: U64) -> U64:
    """The sum over windows w and pieces of 2^(window w) times a window's sum; one core takes 0.1 ms for 254 bits.

    On the device the doublings, one after the other, would take longer than all sums of 2^16 points.

    Args:
        curve: of the points.
        window: bits of a digit.
        sums: (pieces, windows, 3 coordinates), projective, Montgomery form, the lowest window first.
    """
    pieces, windows = sums.shape[:2]
    partials = np.ascontiguousarray(sums[:, ::-1].swapaxes(0, 1))
    doublings = np.where(np.arange(windows * pieces) % pieces == 0, window, 0).astype(np.int64)
    z = np.empty(2 * coordinate_words(curve), np.uint64)
    arrays = (HOST.pointer(partials), HOST.pointer(doublings))
    HOST.provider.launch(_finish(curve), (1,), (1,), (*arrays, windows * pieces, HOST.pointer(z)))
    return z


@functools.cache
def _finish(curve: Curve[Any]) -> Kernel:
    """Of the scalar form, which keeps elements as the C kernels do."""
    return HOST.provider.compile(llvm_source(curve.name, "msm_finish", "scalar"))
