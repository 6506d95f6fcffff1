"""Multi-scalar multiplication on the CPU: buckets of signed digits, filled by affine additions with shared inversions.

A task is a window (digit) of all scalars: its points are sorted by bucket, each bucket is summed in rounds of
independent additions (llvm_kernels.py), and the buckets are weighted by running sums; Horner's rule combines the
windows. Source: Pippenger's method as in eprint 2012/549; shared inversions as in eprint 2022/1400.
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

from accelerant.algebra.curve import launch as curve_launch
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.llvm_kernels import host_form, packed_field
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.msm.llvm_kernels import PACKS, SIGN, SIZES, WorkerMemory, kernel_source
from accelerant.errors import OutOfMemory, ShapeError, UnsupportedCase
from accelerant.runtime.host import usable_cores
from accelerant.runtime.ledger import launch
from accelerant.runtime.time_limit import check_time, is_limited

U64 = npt.NDArray[np.uint64]

_TASK_POINTS = 1 << 20
"""Largest number of points of a task, whose memory is about 50 bytes a point on BN254 G1."""

_GROUP_POINTS = 1 << 14
"""Largest number of points times windows of a task with several windows: more are no faster and take more memory."""

_RANGE_POINTS = 256
"""Smallest range of points that is split off to occupy a core."""

_MULTIPLES_SHARE = 0.125
"""Largest share of the free memory that multiples take."""

_SCRATCH_SHARE, _SMALL_SCRATCH_BYTES = 0.5, 1 << 26
"""Largest share of the free memory that the scratch of a sum takes; smaller scratch is allocated without asking."""

_WINDOWS = range(4, 19)
"""Bits of a digit. A pack has eight buckets, so 2^(c-1) >= 8; larger sets of buckets do not stay in the cache."""

_ADDITION, _WEIGHTING = 6, 26
"""Products of coordinates per point and window, and per bucket."""

_ENTRIES_BETWEEN_CHECKS = 1 << 20
"""Points times windows that workers sum between two checks of a time limit, a tenth of a second on eight cores."""

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class CpuMsmPlan:
    """Digits of `bits` bits, tasks of `parts` ranges of points and `group` windows; `shared`: one set of buckets."""

    bits: int
    windows: int
    parts: int
    group: int = 1
    shared: bool = False

    @property
    def shift(self) -> int:
        """The sum of 2^(c-1) 2^(c j); added to a scalar, it turns the signed digits into unsigned ones."""
        return sum(1 << self.bits * j + self.bits - 1 for j in range(self.windows))

    @property
    def partials(self) -> int:
        """Sets of buckets of all tasks."""
        return self.parts * (1 if self.shared else self.windows)

    @property
    def rows(self) -> int:
        """Stored multiples per point."""
        return self.windows if self.shared else 1

    def tasks(self, n: int) -> npt.NDArray[np.int64]:
        """Return the tasks (tasks, TASK) of llvm_kernels.py; partial sums go by window from the highest, then range."""
        bounds = [n * i // self.parts for i in range(self.parts + 1)]
        rows = []
        for first in range(0, self.windows, self.windows if self.shared else self.group):
            stop = self.windows if self.shared else min(self.windows, first + self.group)
            for part, points in enumerate(itertools.pairwise(bounds)):
                top = 0 if self.shared else self.windows - 1 - first
                sets = 1 if self.shared else stop - first
                rows.append((first, stop, *points, sets, top * self.parts + part, -self.parts))
        return np.array(rows, np.int64)

    def products(self, n: int) -> int:
        """Return the number of products of coordinates for n points."""
        return _ADDITION * n * self.windows + _WEIGHTING * self.partials * (1 << self.bits - 1)

    def explain(self) -> str:
        """Describe the plan."""
        text = (
            f"{self.windows} windows of {self.bits} bits, signed, {1 << self.bits - 1} buckets each, "
            f"{self.parts} range{'s' * (self.parts != 1)} of points"
        )
        if self.shared:
            text += f"; with multiples 2^({self.bits} j) P of each point P, so that windows share buckets"
        return text


@functools.lru_cache(maxsize=4096)
def cpu_plan(order: int, n: int, workers: int, shared: bool = False) -> CpuMsmPlan:
    """Return the plan of the fewest products for n points and scalars below the order."""

    def candidate(bits: int) -> CpuMsmPlan:
        windows = -(-order.bit_length() // bits)
        while order - 1 + CpuMsmPlan(bits, windows, 1).shift >> bits * windows:
            windows += 1
        sets = 1 if shared else windows
        parts = max(1, -(-n * windows // sets // _TASK_POINTS), -(-min(workers, n // _RANGE_POINTS) // sets))
        group = max(1, min(_GROUP_POINTS * parts // max(1, n), windows * parts // workers))
        return CpuMsmPlan(bits, windows, parts, 1 if shared else group, shared)

    return min(map(candidate, _WINDOWS), key=lambda plan: plan.products(n))


def shared_cpu_plan(curve: Curve[Any], n: int) -> CpuMsmPlan | None:
    """Return the plan with multiples of n points; None where they do not fit."""
    plan = cpu_plan(curve.order, n, usable_cores(), shared=True)
    size = plan.windows * n * 2 * curve.coordinates.degree * curve.coordinates.base.size_bytes
    room = _MULTIPLES_SHARE * _free_bytes()
    return plan if 0 < n * plan.windows < SIGN and size <= room else None


@dataclass(frozen=True, slots=True)
class _Tasks:
    """The tasks of a plan (its `tasks`), the distance between sets of buckets, and a worker's offsets and bytes."""

    plan: CpuMsmPlan
    rows: npt.NDArray[np.int64]
    step: int
    offsets: npt.NDArray[np.int64]
    scratch: int


class CpuBases:
    """The n points of a curve in the form of the CPU kernels, with their multiples by the plan `shared`, if any."""

    def __init__(self, curve: Curve[Any], points: U64, form: str = "", shared: CpuMsmPlan | None = None) -> None:
        """Convert affine points, Montgomery form x R, not checked; UnsupportedCase for 2^31 or more with multiples."""
        self.curve, self.n, self.shared = curve, len(points), shared
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
                    multiples = curve_launch.add(HOST, curve, multiples, multiples)
            self._enter(multiples, self._points[row * self.n : (row + 1) * self.n])

    @classmethod
    def of_chunks(cls, curve: Curve[Any], chunks: Iterable[U64], limit: int) -> CpuBases:
        """Convert at most `limit` points chunk by chunk, so that they are not in memory twice."""
        width = math.prod(curve.shape)
        bases = cls(curve, np.empty((0, width), np.uint64))
        storage = _aligned(8 * limit * width).view(np.uint64).reshape(limit, width)
        for chunk in chunks:
            stop = bases.n + len(chunk)
            if stop > limit or limit >= SIGN:
                raise ShapeError(f"wanted {limit:,} points at most, and fewer than {SIGN:,}; got {stop:,}")
            bases._enter(chunk, storage[bases.n : stop])
            bases.n = stop
        bases._points = storage[: bases.n]
        return bases

    def explain(self) -> str:
        """Describe how sums are computed."""
        plan = self.shared or cpu_plan(self.curve.order, self.n, usable_cores())
        return f"{plan.explain()}, {self._points.nbytes / 1e6:,.1f} MB"

    def msm(self, scalars: U64, plan: CpuMsmPlan | None = None) -> U64:
        """Return the sum of scalars (n, 4), below the order, times points, x R; OutOfMemory if no worker fits."""
        workers = usable_cores()
        plan = plan or self.shared or cpu_plan(self.curve.order, self.n, workers)
        columns = np.empty((6, self.n), np.uint64)
        shift = np.array([plan.shift >> 64 * i & 2**64 - 1 for i in range(5)], np.uint64)
        self._launch("msm_recode", self.n, (scalars, columns, shift), self.n)
        tasks, workers = self._fit_memory(plan, workers)
        plan = tasks.plan
        numbers = {
            "tasks": len(tasks.rows),
            "n": self.n,
            "bits": plan.bits,
            "buckets": 1 << plan.bits - 1,
            "step": 0 if plan.shared else tasks.step,
            "stride": self.n if plan.shared else 0,
            "scratch": tasks.scratch,
        }
        sizes = np.array([numbers[name] for name in SIZES], np.int64)
        next_task, memory = np.zeros(1, np.int64), _aligned(workers * tasks.scratch)
        partials = np.empty((plan.partials, 3 * self._points.shape[1] // 2), np.uint64)
        arrays = (self._points, columns, tasks.rows, next_task, memory, tasks.offsets, partials, sizes)
        total = len(tasks.rows)
        step = max(workers, total * _ENTRIES_BETWEEN_CHECKS // max(1, self.n * plan.windows)) if is_limited() else total
        for first in range(0, total, step):
            if first:
                check_time(f"after {first} of {total} tasks of {self.n:,} points")
            next_task[0], sizes[0] = first, min(total, first + step)
            self._launch("msm_sum", workers, arrays)
        z = np.empty(self._points.shape[1:], np.uint64)
        counts = doublings(1 if plan.shared else plan.windows, plan.parts, plan.bits)
        self._launch("msm_finish", 1, (partials, counts, z), len(partials))
        return z

    def _fit_memory(self, plan: CpuMsmPlan, workers: int) -> tuple[_Tasks, int]:
        """Return tasks and workers that fit the free memory: with more ranges of points, then with fewer workers."""
        tasks = self._tasks(plan)
        workers = min(workers, len(tasks.rows))
        if workers * tasks.scratch <= _SMALL_SCRATCH_BYTES:
            return tasks, workers
        room = int(_SCRATCH_SHARE * _free_bytes())
        while workers * tasks.scratch > room:
            halves = self._tasks(replace(tasks.plan, parts=2 * tasks.plan.parts))
            if 4 * halves.scratch > 3 * tasks.scratch:  # most of it is for buckets, which do not get fewer
                break
            tasks = halves
        if tasks.scratch > room:
            raise OutOfMemory(
                f"a sum of multiples of {self.n:,} points takes {tasks.scratch:,} bytes of scratch at least; "
                f"{room:,} may be taken, {_SCRATCH_SHARE:.0%} of the free memory: sum fewer points at once"
            )
        return tasks, min(workers, room // tasks.scratch)

    def _tasks(self, plan: CpuMsmPlan) -> _Tasks:
        return _tasks_of(self.curve, self.n, plan, self._form)

    def _enter(self, points: U64, out: U64) -> None:
        self._launch("msm_enter", len(points), (points, out), len(points))

    def _launch(self, entry: str, indices: int, arrays: Sequence[Any], *scalars: int) -> None:
        if indices:
            launch(HOST, kernel_source(self.curve.name, entry, self._form), entry, indices, 1, arrays, *scalars)


def scratch_bytes(curve: Curve[Any], n: int) -> int:
    """Return what a sum of n points allocates, at least: two copies of the points, digits, and the workers' memory."""
    workers = usable_cores()
    tasks = _tasks_of(curve, n, cpu_plan(curve.order, n, workers), host_form(curve.coordinates.base))
    points = 8 * n * math.prod(curve.shape)
    return 2 * points + 8 * 6 * n + min(workers, len(tasks.rows)) * tasks.scratch


def _tasks_of(curve: Curve[Any], n: int, plan: CpuMsmPlan, form: str) -> _Tasks:
    rows = plan.tasks(n)
    entries = int(((rows[:, 1] - rows[:, 0]) * (rows[:, 3] - rows[:, 2])).max())
    step = (1 << plan.bits - 1) + 1
    return _Tasks(plan, rows, step, *_layout(curve, form, entries, int(rows[:, 4].max()) * step))


@functools.lru_cache(maxsize=256)
def doublings(windows: int, parts: int, bits: int) -> npt.NDArray[np.int64]:
    """Return the doublings of the running total before each partial sum, highest window first; shared, read-only."""
    counts = np.zeros((windows, parts), np.int64)
    counts[1:, 0] = bits
    return counts.reshape(-1)


def _free_bytes() -> int:
    """Return the host's free memory; sys.maxsize where the system does not report it."""
    memory = HOST.provider.memory()
    return memory.free_bytes if memory.total_bytes else sys.maxsize


def _layout(curve: Curve[Any], kind: str, entries: int, buckets: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return the offsets of a worker's arrays (WorkerMemory, then the scratch of batch additions) and their size."""
    base, degree = curve.coordinates.base, curve.coordinates.degree
    form = packed_field(base, kind)
    pack = base.size_bytes if form.lanes == 1 else (form.radix.bit_length() - 1) // 52 * 64
    pairs = (entries + buckets) // 2 + 1
    sizes = dict.fromkeys(WorkerMemory._fields, 4 * pairs)
    sizes |= dict.fromkeys(("ends", "slots", "left", "single", "single_slot"), 4 * buckets)
    sizes |= {"entries": 4 * entries, "points": 2 * degree * base.size_bytes * (pairs + 1)}
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in (*sizes.values(), PACKS * (2 * degree * pack + 1))]
    starts = np.cumsum([0, *rounded])
    return starts[:-1].astype(np.int64), int(starts[-1])


def _aligned(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory aligned to a cache line, as vectors need it."""
    storage = np.empty(size_bytes + _ALIGNMENT, np.uint8)
    start = -storage.ctypes.data % _ALIGNMENT
    return storage[start : start + size_bytes]
