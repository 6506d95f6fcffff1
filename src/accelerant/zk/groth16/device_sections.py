"""Points of a key's sections on a device: what is kept there, and the sums of one section."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.parameters import Field
from accelerant.runtime.recorded_launch import RecordedLaunch
from accelerant.zk.groth16.device_rows import gathered
from accelerant.zk.groth16.lanes import Lanes, Mark
from accelerant.zk.msm import device
from accelerant.zk.msm.device import DeviceBases, Started, start_msm
from accelerant.zk.msm.device_plan import coordinate_words, device_plan
from accelerant.zk.msm.op import msm_record

__all__ = ["Budgets", "Points", "Section", "Spans", "budgets"]

U64 = npt.NDArray[np.uint64]
Words = Any
Spans = dict[str, tuple[Mark, Mark]]

_KEPT_FIRST = ("H", "A", "C", "B1", "B2")
"""Where not all points have room. A sum over G2 takes longer for its bytes, so it hides the copy of its points best."""

_PIECES = 3
"""Of streamed points on the device at once: one in use, two on the way."""

_ANY = 1 << 62


class Points:
    """Points of a section without those at infinity, on the host.

    Attributes:
        curve: theirs.
        words: (n, words of a point), as they lie in the file or copied.
        which: of the values that may multiply them, those that do; None for all.
    """

    def __init__(self, curve: Curve[Any], words: U64, first: int = 0, part: tuple[int, int] = (0, 1)) -> None:
        """Look at points.

        Args:
            curve: theirs.
            words: (n, words of a point), as they lie in the file.
            first: the value that multiplies the first of them.
            part: (i, n): the i-th of n parts.
        """
        self.curve = curve
        index, count = part
        start, stop = (len(words) * i // count for i in (index, index + 1))
        words, first = words[start:stop], first + start
        finite = words.any(axis=1)
        whole = bool(finite.all())
        self.words = words if whole else words[finite]
        self.which = None if whole and not first and count == 1 else (first + np.flatnonzero(finite)).astype(np.uint32)

    def scratch_bytes(self, most: int, rounds: int | None = 0) -> int:
        """Memory of a sum in pieces of so many points, with so many affine rounds; None for as many as pay."""
        n = min(len(self.words), most)
        return device_plan(self.curve, n, _ANY, rounds=rounds).size_bytes(self.curve) if n else 0

    @property
    def multiples_bytes(self) -> int:
        """Memory of the points with their multiples."""
        n = len(self.words)
        return self.words.nbytes * device_plan(self.curve, n, _ANY, shared=True).windows if n else 0

    @property
    def piece(self) -> int:
        """Points that are streamed at once, at most."""
        return device.STREAMED_BYTES // (16 * coordinate_words(self.curve))


class Budgets(NamedTuple):
    """What sections may take of a device's memory.

    Attributes:
        points: section -> bytes for its points with their multiples; None where it is streamed.
        scratch: bytes for any sum; None where all sections have theirs, from one sum to the next.
        rounds: of sums over points that are kept, 0 or as many as pay.
    """

    points: Mapping[str, int | None]
    scratch: int | None
    rounds: int | None = 0


def budgets(points: Mapping[str, Points], room: int) -> Budgets:
    """Points with their multiples where those have room, plain ones where they have, and else as many as have.

    Affine rounds are the last to get room, since their scratch is some eight times as much: multiples save more.

    Args:
        points: section -> points.
        room: bytes.
    """
    plain = {name: each.words.nbytes for name, each in points.items()}
    with_rounds = sum(each.scratch_bytes(len(each.words), None) + each.multiples_bytes for each in points.values())
    rounds = None if with_rounds <= room else 0
    left = room - sum(plain.values()) - sum(each.scratch_bytes(len(each.words), rounds) for each in points.values())
    if left >= 0:
        total = max(1, sum(plain.values()))
        return Budgets({name: size + left * size // total for name, size in plain.items()}, None, rounds)
    scratch = max(each.scratch_bytes(each.piece) for each in points.values())
    room -= scratch + _PIECES * device.STREAMED_BYTES
    kept: dict[str, int | None] = {}
    for name in _KEPT_FIRST:
        kept[name] = 0 if plain[name] <= room else None
        room -= plain[name] if plain[name] <= room else 0
    return Budgets(kept, scratch)


class Section:
    """Points of a section, and a lane for their sums."""

    def __init__(self, lanes: Lanes, lane: int, field: Field, points: Points, allowed: Budgets, name: str) -> None:
        """Bring points to the device, or keep them on the host where they have no room.

        Args:
            lanes, lane: where sums are made.
            field: of the scalars.
            points: what is kept of them is copied.
            allowed: the budgets of all.
            name: of this one.
        """
        self._lanes, self._lane, self._field, self._name = lanes, lane, field, name
        self._curve, self._n, self._scratch = points.curve, len(points.words), allowed.scratch
        self._which = None if points.which is None else lanes.load(lane, points.which)
        self._kept: DeviceBases | None = None
        self._streamed = np.empty((0, 0), np.uint64)
        free_bytes = allowed.points[name]
        if free_bytes is None:
            self._streamed = np.array(points.words, np.uint64)  # its own: the file may be closed
            return
        with lanes.lane(lane):
            words = lanes.load(lane, points.words)
            keep = allowed.scratch is None
            self._kept = DeviceBases(
                lanes.place, points.curve, words, free_bytes=free_bytes, keep_scratch=keep, rounds=allowed.rounds
            )

    def begin(self, values: Words, after: Mark, spans: Spans) -> Callable[[], U64]:
        """Launch a sum; what is returned ends it: words of one point, affine in Montgomery form.

        Args:
            values: that may multiply points; to be held until the end.
            after: of the lane that makes the values.
            spans: gets the marks of this sum's beginning and end.
        """
        lanes, place, lane = self._lanes, self._lanes.place, self._lane
        lanes.wait(lane, after)
        with lanes.lane(lane):
            first = lanes.mark(lane)
            record = msm_record(place, self._curve, self._n, 1)
            with RecordedLaunch(record, place.provider, place.index):
                if self._which is not None:
                    values = gathered(place, self._field, values, self._which, self._n)
                started = self._start(values)
            fetched = [lanes.fetch(lane, words) for words in started.results]
            spans[f"sum {self._name}"] = first, lanes.mark(lane)
        return lambda: started.finish([fetch() for fetch in fetched])

    def _start(self, scalars: Words) -> Started:
        if self._kept is not None:
            return self._kept.start(scalars)
        load = functools.partial(self._lanes.load, self._lane)
        place, curve = self._lanes.place, self._curve
        return start_msm(place, curve, scalars, self._streamed, free_bytes=self._scratch, load=load)

    def explain(self) -> str:
        """In words."""
        there = self._lanes.place.label
        if self._kept is None:
            return f"{self._n} points of {self._curve.name}, streamed to {there} for each sum"
        return f"{self._n} points of {self._curve.name} on {there}; {self._kept.explain()}"
