"""A sum of multiples on a device with C kernels, by buckets; sort.c, affine.c, accumulate.c and fold.c say how.

The host launches, and at the end adds up the sums of windows (horner.py); in between it need not wait (Started). How a
sum is cut up is a plan (device_plan.py). Points that many sums share are kept with their multiples by 2^(c w)
(DeviceBases): then all windows fill one set of buckets, and there is but one sum to add up.

Time and memory accesses depend on the scalars and the points.

Source: Bernstein et al., eprint 2012/549, after Pippenger, for the buckets; Brickell et al., EUROCRYPT 1992, for the
multiples; Botrel and El Housni, eprint 2022/1400, for signed digits and XYZZ coordinates in buckets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.memory_space import MemorySpace
from accelerant.errors import OutOfMemory
from accelerant.runtime.recorded_launch import launch
from accelerant.zk.msm.device_plan import MOST_INDICES, DevicePlan, coordinate_words, device_plan
from accelerant.zk.msm.horner import horner
from accelerant.zk.msm.program import MULTIPLES_BLOCK, TOGETHER, multiples_source
from accelerant.zk.msm.steps import Piece, Step, shapes, steps

__all__ = ["STREAMED_BYTES", "DeviceBases", "Started", "device_msm", "start_msm"]

U64 = npt.NDArray[np.uint64]
Words = Any
Load = Callable[[npt.NDArray[Any]], Words]

_U64 = np.dtype(np.uint64)
_MEMORY_SHARE = 0.8
"""Of the free memory, what the scratch of a sum takes at most."""

_MULTIPLES_SHARE = 0.5
"""Of the free memory, what the multiples of fixed points take at most."""

_ANY, _NOT_ASKED_BYTES = 1 << 62, 1 << 31
"""Scratch below so many bytes is taken without asking how much is free, which takes up to a millisecond."""

_fitted: set[tuple[MemorySpace, int]] = set()
"""(place, bytes) that had room when it was asked: so much is taken without asking again."""

STREAMED_BYTES = 1 << 28
"""Points on the host go to the device in pieces of at most so many bytes."""


class Started:
    """A sum under way on a device.

    Attributes:
        results: words at the place that kernels give: of each piece the sums of windows.
    """

    def __init__(self, place: MemorySpace, curve: Curve[Any], window: int, results: Sequence[Words]) -> None:
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
        return horner(self._curve, self._window, np.stack(stored))


def device_msm(place: MemorySpace, curve: Curve[Any], scalars: Words, points: Words, **options: Any) -> U64:
    """The sum of scalars[i] points[i]: start_msm, and the end of it.

    Returns:
        (2 degree limbs,) words: the sum, affine in Montgomery form.
    """
    return start_msm(place, curve, scalars, points, **options).finish()


def start_msm(
    place: MemorySpace,
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

    def smaller(free: int) -> DevicePlan:
        return device_plan(curve, n, free, **options)

    return _where_it_fits(place, curve, plan, smaller, lambda work: work.start(scalars, points, n), load)


class DeviceBases:
    """Points that many sums share, at a place, with their multiples by 2^(c w) for all windows w where those have room.

    Attributes:
        n: how many.
        plan: how a sum is cut up where the memory is as free as it was; None of no points.
    """

    def __init__(
        self,
        place: MemorySpace,
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
            self._work.reserve()
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

        def start(work: _Work) -> Started:
            return work.start(scalars, self._points, self.n)

        if self._work:
            return start(self._work)
        return _where_it_fits(self._place, self._curve, self.plan, self._smaller, start)

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


def _multiples(place: MemorySpace, curve: Curve[Any], points: Words, n: int, plan: DevicePlan) -> Words:
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

    def __init__(self, place: MemorySpace, curve: Curve[Any], plan: DevicePlan, load: Load | None = None) -> None:
        self.place, self.curve, self.plan = place, curve, plan
        self.load = load or place.load
        self._shapes = shapes(curve.name, plan)
        self._arrays: dict[str, Words] = {}

    def reserve(self) -> None:
        """Take the memory now, not when a kernel first needs it."""
        for name in self._shapes:
            self.array(name)

    def array(self, name: str) -> Words:
        """Scratch, by its name in steps.shapes; taken when it is first asked for: the first kernels need not wait."""
        found = self._arrays.get(name)
        if found is None:
            found = self._arrays[name] = self.place.empty(*self._shapes[name])
        return found

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
        results = self.place.empty((self.plan.sets, 3 * coordinate_words(self.curve)), _U64)
        piece = Piece(count, n, at_scalars, at_points)
        given = {"scalars": scalars, "points": points, "results": results}
        self.run(steps(self.place, self.curve.name, self.plan, piece), given)
        return results

    def run(self, launches: Iterable[Step], given: Mapping[str, Words]) -> None:
        """Launch steps on scratch and what is given by name."""
        launch, pointer = self.place.provider.launch, self.place.pointer
        pointers = {name: pointer(words) for name, words in given.items()}
        for kernel, grid, block, names, numbers in launches:
            for name in names:
                if name not in pointers:
                    pointers[name] = pointer(self.array(name))
            launch(kernel, grid, block, (*[pointers[name] for name in names], *numbers))


# --- parts -----------------------------------------------------------------------------------------------------------


def _where_it_fits(
    place: MemorySpace,
    curve: Curve[Any],
    plan: DevicePlan,
    smaller: Callable[[int], DevicePlan],
    start: Callable[[_Work], Started],
    load: Load | None = None,
) -> Started:
    """A sum started on the plan's scratch, or on that of `smaller`, given the free bytes, where it has no room."""
    size = plan.size_bytes(curve)
    if size <= _NOT_ASKED_BYTES or (place, size) in _fitted:
        with contextlib.suppress(OutOfMemory):
            return start(_Work(place, curve, plan, load))
    free = _free(place, _MEMORY_SHARE)
    if size > free:
        return start(_Work(place, curve, smaller(free), load))
    _fitted.add((place, size))
    return start(_Work(place, curve, plan, load))


def _free(place: MemorySpace, share: float) -> int:
    """That share of what is free, with what the process's pool holds unused."""
    memory = place.provider.memory(place.index)
    return int(share * (memory.free_bytes + max(0, memory.reserved_bytes - memory.allocated_bytes)))
