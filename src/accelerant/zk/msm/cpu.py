"""Multi-scalar multiplication on the CPU: buckets of signed digits, filled by affine additions that share inversions.

A digit (window) of all scalars is a task for one core: its points are sorted by bucket, and each bucket added up in
rounds of independent additions (llvm_buckets.py), 5M + 1S each; then the buckets, weighed by running sums; last
Horner's rule over the digits. Of few points a task has several digits, so that rounds stay long; with more cores than
digits, beyond 2^20 points, and where memory is short, digits are split into ranges of points. Source: Pippenger's
method as in Bernstein et al., eprint 2012/549; additions by shared inversions as in eprint 2022/1400.

Times depend on the scalars and points.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.llvm_kernels import host_form, packed_field
from accelerant.algebra.field.llvm_packed import PackedField
from accelerant.algebra.field.memory_space import HOST
from accelerant.errors import OutOfMemory, ShapeError, UnsupportedCase
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.host import usable_cores
from accelerant.zk.msm.llvm_buckets import SIGN, Work
from accelerant.zk.msm.llvm_kernels import PACKS, SIZES, kernel_source

__all__ = ["Bases", "Plan", "cpu_msm", "plan", "shared_plan"]

U64 = npt.NDArray[np.uint64]

_MOST_POINTS = 1 << 20
"""Of a task: its memory is about 50 bytes a point on BN254 G1."""

_GROUP_POINTS = 1 << 14
"""Of a task with several windows: rounds of few additions wait for their inversion, some 20 us. Four times as many are
not quicker, and take four times the memory."""

_FEW_POINTS = 256
"""Of a range: fewer are not split off to keep a core busy."""

_MULTIPLES_SHARE = 0.125
"""Of the free memory, what multiples take at most."""

_SCRATCH_SHARE, _NOT_ASKED_BYTES = 0.5, 1 << 26
"""Of the free memory, what the scratch of a sum takes at most; scratch below so many bytes is taken unasked."""

_WINDOWS = range(4, 19)
"""Bits of a digit. A pack has eight buckets, so 2^(c-1) >= 8; above, buckets do not stay in the cache."""

_ADDITION, _WEIGHING = 6, 26
"""Multiplications of coordinates for a point, in each window, and for a bucket."""

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """How a sum is divided.

    Attributes:
        bits: of a digit, c.
        windows: digits of a scalar.
        parts: ranges of points, of each digit.
        group: windows of a task.
        shared: whether the multiples 2^(c j) P of the points are there, so that all digits share one set of buckets,
            and a task is a range of points with all its digits.
    """

    bits: int
    windows: int
    parts: int
    group: int = 1
    shared: bool = False

    @property
    def shift(self) -> int:
        """The sum of 2^(c-1) 2^(c j): added to a scalar, it makes its signed digits plain ones."""
        return sum(1 << self.bits * j + self.bits - 1 for j in range(self.windows))

    @property
    def partials(self) -> int:
        """Sets of buckets, of all tasks."""
        return self.parts * (1 if self.shared else self.windows)

    @property
    def rows(self) -> int:
        """Points that are kept of each point."""
        return self.windows if self.shared else 1

    def tasks(self, n: int) -> npt.NDArray[np.int64]:
        """(tasks, TASK), as llvm_kernels.py has them; partial sums by window from the highest, then by range."""
        bounds = [n * i // self.parts for i in range(self.parts + 1)]
        rows = []
        for first in range(0, self.windows, self.windows if self.shared else self.group):
            stop = self.windows if self.shared else min(self.windows, first + self.group)
            for part, points in enumerate(itertools.pairwise(bounds)):
                top = 0 if self.shared else self.windows - 1 - first
                sets = 1 if self.shared else stop - first
                rows.append((first, stop, *points, sets, top * self.parts + part, -self.parts))
        return np.array(rows, np.int64)

    def doublings(self) -> npt.NDArray[np.int64]:
        """How often what there is is doubled before a partial sum is added, for each of these."""
        counts = np.zeros((1 if self.shared else self.windows, self.parts), np.int64)
        counts[1:, 0] = self.bits
        return counts.reshape(-1)

    def products(self, n: int) -> int:
        """Multiplications of coordinates for n points."""
        return _ADDITION * n * self.windows + _WEIGHING * self.partials * (1 << self.bits - 1)

    def explain(self) -> str:
        """In words."""
        text = (
            f"{self.windows} windows of {self.bits} bits, signed, {1 << self.bits - 1} buckets each, "
            f"{self.parts} range{'s' * (self.parts != 1)} of points"
        )
        if self.shared:
            text += f"; with multiples 2^({self.bits} j) P of each point P, so that windows share buckets"
        return text


@functools.lru_cache(maxsize=4096)
def plan(order: int, n: int, workers: int, shared: bool = False) -> Plan:
    """The digits of the fewest multiplications for n points and scalars below the order."""

    def of(bits: int) -> Plan:
        windows = -(-order.bit_length() // bits)
        while order - 1 + Plan(bits, windows, 1).shift >> bits * windows:
            windows += 1
        sets = 1 if shared else windows
        parts = max(1, -(-n * windows // sets // _MOST_POINTS), -(-min(workers, n // _FEW_POINTS) // sets))
        group = max(1, min(_GROUP_POINTS * parts // max(1, n), windows * parts // workers))
        return Plan(bits, windows, parts, 1 if shared else group, shared)

    return min(map(of, _WINDOWS), key=lambda found: found.products(n))


def shared_plan(curve: Curve[Any], n: int) -> Plan | None:
    """The plan with multiples of n points; None where they have no room."""
    found = plan(curve.order, n, usable_cores(), shared=True)
    size = found.windows * n * 2 * curve.coordinates.degree * curve.coordinates.base.size_bytes
    room = _MULTIPLES_SHARE * _free_bytes()
    return found if 0 < n * found.windows < SIGN and size <= room else None


@dataclass(frozen=True, slots=True)
class _Cut:
    """A plan for a number of points, and what it takes.

    Attributes:
        plan: see there.
        tasks: its tasks.
        step: numbers of a set of buckets, bucket 0 too.
        offsets: of a worker's arrays.
        scratch: a worker's memory, bytes.
    """

    plan: Plan
    tasks: npt.NDArray[np.int64]
    step: int
    offsets: npt.NDArray[np.int64]
    scratch: int


class Bases:
    """Points kept as the kernels take them.

    Attributes:
        curve: whose.
        n: how many.
        shared: the plan that the multiples kept are for; None where there are none.
    """

    def __init__(self, curve: Curve[Any], points: U64, form: str = "", shared: Plan | None = None) -> None:
        """Bring points to the kernels' form, and compute their multiples.

        Args:
            curve: of the points.
            points: affine, x R, (n, ...) words; not checked.
            form: "scalar" or "vector", or what is best here.
            shared: a plan with multiples.

        Raises:
            UnsupportedCase: 2^31 points or more.
        """
        self.curve = curve
        self.n = len(points)
        self.shared = shared
        self._form = form or host_form(curve.coordinates.base)
        rows = shared.rows if shared else 1
        if rows * self.n >= SIGN:
            raise UnsupportedCase(f"a sum of multiples is of fewer than {SIGN:,} points, multiples too; got {self.n:,}")
        shape = (rows * self.n, math.prod(curve.shape))
        self._points = _aligned(8 * math.prod(shape)).view(np.uint64).reshape(shape)
        multiples = points
        for row in range(rows):
            if row and shared:
                for _ in range(shared.bits):
                    multiples = launch.add(HOST, curve, multiples, multiples)
            kept = self._points[row * self.n : (row + 1) * self.n]
            _launch(self._kernel("msm_enter"), self.n, (multiples, kept, self.n))

    @classmethod
    def of_chunks(cls, curve: Curve[Any], chunks: Iterable[U64], most: int) -> Bases:
        """Points that come a part at a time, so that they are not in memory twice.

        Args:
            curve: of the points.
            chunks: affine, x R, (n, words of a point) each.
            most: points in all, at most; for fewer less memory is touched.

        Raises:
            ShapeError: more points than `most`, or 2^31 or more.
        """
        width = math.prod(curve.shape)
        found = cls(curve, np.empty((0, width), np.uint64))
        storage = _aligned(8 * most * width).view(np.uint64).reshape(most, width)
        for chunk in chunks:
            stop = found.n + len(chunk)
            if stop > most or most >= SIGN:
                raise ShapeError(f"wanted {most:,} points at most, and fewer than {SIGN:,}; got {stop:,}")
            _launch(found._kernel("msm_enter"), len(chunk), (chunk, storage[found.n : stop], len(chunk)))
            found.n = stop
        found._points = storage[: found.n]
        return found

    def explain(self) -> str:
        """How sums are made, in words."""
        found = self.shared or plan(self.curve.order, self.n, usable_cores())
        return f"{found.explain()}, {self._points.nbytes / 1e6:,.1f} MB"

    def msm(self, scalars: U64, chosen: Plan | None = None) -> U64:
        """The sum of scalars[i] points[i], affine, x R.

        Args:
            scalars: (n, 4), below the curve's order.
            chosen: how to divide the work, into more ranges of points where that has no room; what is best if not
                given.

        Raises:
            OutOfMemory: not even one worker's scratch has room.
        """
        workers = usable_cores()
        p = chosen or self.shared or plan(self.curve.order, self.n, workers)
        columns = np.empty((6, self.n), np.uint64)
        shift = np.array([p.shift >> 64 * i & 2**64 - 1 for i in range(5)], np.uint64)
        _launch(self._kernel("msm_recode"), self.n, (scalars, columns, shift, self.n))
        cut, workers = self._in_memory(p, workers)
        partials = self._sums(cut, columns, workers)
        z = np.empty(self._points.shape[1:], np.uint64)
        _launch(self._kernel("msm_finish"), 1, (partials, cut.plan.doublings(), len(partials), z))
        return z

    def _in_memory(self, p: Plan, workers: int) -> tuple[_Cut, int]:
        """What has room: more ranges of points where the plan's do not, then fewer workers."""
        cut = self._cut(p)
        workers = min(workers, len(cut.tasks))
        if workers * cut.scratch <= _NOT_ASKED_BYTES:
            return cut, workers
        room = int(_SCRATCH_SHARE * _free_bytes())
        while workers * cut.scratch > room:
            halves = self._cut(replace(cut.plan, parts=2 * cut.plan.parts))
            if 4 * halves.scratch > 3 * cut.scratch:  # most of it is for buckets, which each range has anew
                break
            cut = halves
        if cut.scratch > room:
            raise OutOfMemory(
                f"a sum of multiples of {self.n:,} points takes {cut.scratch:,} bytes of scratch at least; "
                f"{room:,} may be taken, {_SCRATCH_SHARE:.0%} of the free memory: sum fewer points at once"
            )
        return cut, min(workers, room // cut.scratch)

    def _cut(self, p: Plan) -> _Cut:
        tasks = p.tasks(self.n)
        entries = int(((tasks[:, 1] - tasks[:, 0]) * (tasks[:, 3] - tasks[:, 2])).max())
        step = (1 << p.bits - 1) + 1
        return _Cut(p, tasks, step, *_layout(self.curve, self._form, entries, int(tasks[:, 4].max()) * step))

    def _sums(self, cut: _Cut, columns: U64, workers: int) -> U64:
        """Each task's sum, projective and as kernels keep elements."""
        p, tasks = cut.plan, cut.tasks
        numbers = {
            "tasks": len(tasks),
            "n": self.n,
            "bits": p.bits,
            "buckets": 1 << p.bits - 1,
            "step": 0 if p.shared else cut.step,
            "stride": self.n if p.shared else 0,
            "scratch": cut.scratch,
        }
        memory = _aligned(workers * cut.scratch)
        partials = np.empty((p.partials, 3 * self._points.shape[1] // 2), np.uint64)
        sizes = np.array([numbers[name] for name in SIZES], np.int64)
        taken = np.zeros(1, np.int64)
        arrays = (self._points, columns, tasks, taken, memory, cut.offsets, partials, sizes)
        _launch(self._kernel("msm_sum"), workers, arrays)
        return partials

    def _kernel(self, entry: str) -> Kernel:
        return _kernel(self.curve.name, entry, self._form)


def cpu_msm(curve: Curve[Any], scalars: U64, points: U64) -> U64:
    """The sum of scalars[i] points[i].

    Args:
        curve: of the points.
        scalars: (n, 4), below the curve's order.
        points: (n, 2 degree limbs), affine, Montgomery form x R, on the curve and in its subgroup; contiguous.

    Returns:
        The words of one point, the same way.
    """
    return Bases(curve, points).msm(scalars)


@functools.cache
def _kernel(curve: str, entry: str, form: str) -> Kernel:
    return registry.create("cpu").compile(kernel_source(curve, entry, form))


def _launch(kernel: Kernel, indices: int, args: Sequence[Any]) -> None:
    if not indices:
        return
    values = [HOST.pointer(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    registry.create("cpu").launch(kernel, (indices,), (1,), values)


def _free_bytes() -> int:
    """Of the host's memory; any number of them where the system does not say."""
    memory = registry.create("cpu").memory()
    return memory.free_bytes if memory.total_bytes else sys.maxsize


def _layout(curve: Curve[Any], kind: str, entries: int, buckets: int) -> tuple[npt.NDArray[np.int64], int]:
    """Offsets in bytes of a worker's arrays (Work, then what a batch of additions needs), and the size of all."""
    base, degree = curve.coordinates.base, curve.coordinates.degree
    form: PackedField = packed_field(base, kind)
    pack = base.size_bytes if form.lanes == 1 else (form.radix.bit_length() - 1) // 52 * 64
    pairs = (entries + buckets) // 2 + 1
    sizes = dict.fromkeys(Work.names(), 4 * pairs)
    sizes |= dict.fromkeys(("ends", "slots", "left", "single", "place"), 4 * buckets)
    sizes |= {"entries": 4 * entries, "points": 2 * degree * base.size_bytes * (pairs + 1)}
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in (*sizes.values(), PACKS * (2 * degree * pack + 1))]
    starts = np.cumsum([0, *rounded])
    return starts[:-1].astype(np.int64), int(starts[-1])


def _aligned(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory whose address is a multiple of a cache line, as vectors need it."""
    storage = np.empty(size_bytes + _ALIGNMENT, np.uint8)
    start = -storage.ctypes.data % _ALIGNMENT
    return storage[start : start + size_bytes]
