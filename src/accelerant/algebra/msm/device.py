"""Multi-scalar multiplication on a device with C kernels, by buckets: sort.c, bins.c, affine.c, accumulate.c, fold.c.

device_plan.py divides a sum. Points of many sums are stored with their multiples by 2^(c w) (DeviceBases): then all
windows fill one set of buckets. Sums of windows are combined by the CPU's kernel, or, for the first few of a process,
by Python, which loads nothing.

Source: Bernstein et al., eprint 2012/549, after Pippenger, for the buckets; Brickell et al., EUROCRYPT 1992, for the
multiples; Botrel and El Housni, eprint 2022/1400, for signed digits and XYZZ coordinates in buckets.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import weierstrass
from accelerant.algebra.curve.weierstrass import Curve, Jacobian, decode_points, encode_points
from accelerant.algebra.field.memory_space import HOST, MemorySpace
from accelerant.algebra.field.program import montgomery_radix
from accelerant.algebra.msm import device_plan as plans
from accelerant.algebra.msm.cpu import doublings, kernel_source
from accelerant.algebra.msm.device_plan import DeviceMsmPlan, device_plan
from accelerant.errors import OutOfMemory
from accelerant.runtime.ledger import launch
from accelerant.runtime.time_limit import check_time

U64 = npt.NDArray[np.uint64]
Words = Any
Load = Callable[[npt.NDArray[Any]], Words]

STREAMED_BYTES = 1 << 28  # Largest chunk of points that is copied from the host at once
_MEMORY_SHARE = 0.8  # Largest share of the free memory that the scratch of a sum takes
_MULTIPLES_SHARE = 0.5  # Largest share of the free memory that the multiples of fixed points take
_SMALL_BYTES = 1 << 31  # scratch that is allocated without asking for the free memory

_NO_LIMIT = 1 << 62
_U64 = np.dtype(np.uint64)

_sizes_that_fit: set[tuple[MemorySpace, int]] = set()  # that fitted before: not asked again


class PendingMsm(NamedTuple):
    """A sum that a device is computing; `results` are device arrays, for each chunk the sums of windows."""

    space: MemorySpace
    curve: Curve[Any]
    window: int
    results: Sequence[Words] = ()

    def finish(self, stored: Sequence[npt.NDArray[Any]] | None = None) -> U64:
        """Return the sum, (2 degree limbs,) words, affine, Montgomery form; `stored` are the results, if fetched."""
        if not self.results:
            return np.zeros(2 * plans.coordinate_words(self.curve), np.uint64)
        stored = [self.space.store(words) for words in self.results] if stored is None else stored
        return reduce_windows(self.curve, self.window, np.stack(stored))


def start_msm(
    space: MemorySpace, curve: Curve[Any], scalars: Words, points: Words, *, free_bytes: int | None = None,
    load: Load | None = None, **options: Any,
) -> PendingMsm:  # fmt: skip
    """Launch the sum of scalars[i] points[i]: canonical words (n, 4) below the order, affine points, Montgomery form.

    Host arrays are copied in chunks by `load`. The scratch takes at most free_bytes, by default 0.8 of the free memory.
    `options` and errors are those of device_plan.
    """
    if not (n := int(scalars.shape[0])):
        return PendingMsm(space, curve, 0)
    options.setdefault("bins_fit", _bins_fit(space))
    if isinstance(points, np.ndarray):
        options["chunk"] = min(options.get("chunk", n), STREAMED_BYTES // (16 * plans.coordinate_words(curve)))
    if free_bytes is not None:
        return MsmRunner(space, curve, device_plan(curve, n, free_bytes, **options), load).start(scalars, points, n)
    plan = device_plan(curve, n, _NO_LIMIT, **options)
    return _start_where_it_fits(space, curve, plan, options, (scalars, points, n), load)


class DeviceBases:
    """Points of many sums on a device, with their multiples if they fit; `plan` is for the memory at construction."""

    def __init__(
        self, space: MemorySpace, curve: Curve[Any], points: Words, *, free_bytes: int | None = None,
        keep_scratch: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        """Copy points to the device and compute their multiples; synchronizes, so that sums may use any stream.

        The multiples take at most free_bytes, by default half of the free memory. With keep_scratch sums must be
        started in order, on one stream.
        """
        self.n = int(points.shape[0])
        self._space, self._curve = space, curve
        self._runner: MsmRunner | None = None
        self.plan: DeviceMsmPlan | None = None
        words = 2 * plans.coordinate_words(curve)
        self._points = space.load(points) if isinstance(points, np.ndarray) else points
        if not self.n:
            return
        options.setdefault("bins_fit", _bins_fit(space))
        free_bytes = _free_bytes(space, _MULTIPLES_SHARE) if free_bytes is None else free_bytes
        scratch = _free_bytes(space, _MULTIPLES_SHARE)
        plan = device_plan(curve, self.n, scratch, shared=True, **options)
        count = self.n * plan.windows
        if 8 * words * count <= free_bytes and count <= plans.MAX_INDICES:
            self._points = _multiples(space, curve, self._points, self.n, plan)
        else:
            plan = device_plan(curve, self.n, scratch, **options)
        self.plan = plan
        # Stored multiples determine the window of plans for less free memory
        self._options = {**options, "shared": True, "window": plan.window} if plan.shared else options
        if keep_scratch:
            self._runner = MsmRunner(space, curve, plan)
            self._runner.allocate()
        space.provider.synchronize(space.index)  # launches are ordered on the current stream only

    def msm(self, scalars: Words) -> U64:
        """Return the sum of scalars[i] times point i, affine Montgomery words; OutOfMemory where no chunk fits."""
        return self.start(scalars).finish()

    def start(self, scalars: Words) -> PendingMsm:
        """Launch the sum of scalars[i] times point i; errors as msm."""
        if self.plan is None:
            return PendingMsm(self._space, self._curve, 0)
        if self._runner:
            return self._runner.start(scalars, self._points, self.n)
        options = self._options | {"chunk": self.plan.points}
        return _start_where_it_fits(self._space, self._curve, self.plan, options, (scalars, self._points, self.n))

    @property
    def size_bytes(self) -> int:
        """Device memory held: points, their multiples, and kept scratch."""
        if self.plan is None:
            return 0
        rows = self.plan.windows if self.plan.shared else 1
        scratch = self.plan.size_bytes(self._curve) if self._runner else 0
        return 16 * plans.coordinate_words(self._curve) * self.n * rows + scratch

    def explain(self) -> str:
        """Describe the stored points and the plan."""
        if self.plan is None:
            return "no points"
        multiples = f"the points' multiples for {self.plan.windows} windows kept; " * self.plan.shared
        return multiples + self.plan.explain(self._curve)


def _multiples(space: MemorySpace, curve: Curve[Any], points: Words, n: int, plan: DeviceMsmPlan) -> Words:
    """Return the points times 2^(c w) for each window w, (windows n, words)."""
    table = space.empty((plan.windows * n, 2 * plans.coordinate_words(curve)), _U64)
    grid = -(-n // (plans.MULTIPLES_BLOCK * plans.POINTS_PER_INVERSION))
    for w in range(plan.windows):
        source, first = (table, (w - 1) * n) if w else (points, 0)
        numbers = (n, first, w * n, plan.window if w else 0)
        launch(
            space,
            plans.multiples_source(curve),
            "msm_multiples",
            grid,
            plans.MULTIPLES_BLOCK,
            (source, table),
            *numbers,
        )
    return table


class MsmRunner:
    """The scratch memory of a plan, and the launches that use it."""

    def __init__(self, space: MemorySpace, curve: Curve[Any], plan: DeviceMsmPlan, load: Load | None = None) -> None:
        self.space, self.curve, self.plan = space, curve, plan
        self.load = load or space.load
        self._shapes = plans.scratch_shapes(curve.name, plan)
        self._arrays: dict[str, Words] = {}

    def allocate(self) -> None:
        """Allocate all scratch now instead of when a kernel first needs it."""
        for name in self._shapes:
            self.array(name)

    def array(self, name: str) -> Words:
        """Return a scratch array, allocated at first use so that the first kernels start earlier."""
        if (array := self._arrays.get(name)) is None:
            array = self._arrays[name] = self.space.empty(*self._shapes[name])
        return array

    def start(self, scalars: Words, points: Words, n: int) -> PendingMsm:
        """Launch the sum of n points; a shared plan takes their multiples."""
        step, results = self.plan.points, []
        for first in range(0, n, step):
            if first:
                wait = functools.partial(self.space.provider.synchronize, self.space.index)
                check_time(f"after {first:,} of {n:,} points", wait)
            results.append(self._chunk(scalars, points, n, first, min(step, n - first)))
        return PendingMsm(self.space, self.curve, self.plan.window, results)

    def _chunk(self, scalars: Words, points: Words, n: int, first: int, count: int) -> Words:
        """Launch the sums of windows of `count` points, projective, the lowest window first."""
        first_scalar, first_point = first, first
        if isinstance(scalars, np.ndarray):
            scalars, first_scalar = self.load(scalars[first : first + count]), 0
        if isinstance(points, np.ndarray):
            points, first_point = self.load(points[first : first + count]), 0
        results = self.space.empty((self.plan.sets, 3 * plans.coordinate_words(self.curve)), _U64)
        chunk = plans.MsmChunk(count, n, first_scalar, first_point)
        arrays = {"scalars": scalars, "points": points, "results": results}
        self.run(plans.prepared_sum(self.space, self.curve.name, self.plan, chunk), arrays)
        return results

    def run(self, launches: Iterable[plans.PreparedLaunch], arrays: Mapping[str, Words]) -> None:
        """Launch kernels on scratch and the given arrays."""
        launch, pointer = self.space.provider.launch, self.space.pointer
        pointers = {name: pointer(words) for name, words in arrays.items()}
        for kernel, (_, _, grid, block, names, numbers) in launches:
            for name in names:
                if name not in pointers:
                    pointers[name] = pointer(self.array(name))
            launch(kernel, (grid,), (block,), (*[pointers[name] for name in names], *numbers))


def _start_where_it_fits(
    space: MemorySpace, curve: Curve[Any], plan: DeviceMsmPlan, options: Mapping[str, Any],
    arguments: tuple[Words, Words, int], load: Load | None = None,
) -> PendingMsm:  # fmt: skip
    """Start a sum, of arguments for MsmRunner.start, by a plan, or with these options by one whose scratch fits."""
    size = plan.size_bytes(curve)
    if size <= _SMALL_BYTES or (space, size) in _sizes_that_fit:
        with contextlib.suppress(OutOfMemory):
            return MsmRunner(space, curve, plan, load).start(*arguments)
    free = _free_bytes(space, _MEMORY_SHARE)
    if size > free:
        plan = device_plan(curve, arguments[-1], free, **options)
    else:
        _sizes_that_fit.add((space, size))
    return MsmRunner(space, curve, plan, load).start(*arguments)


@functools.cache
def _bins_fit(space: MemorySpace) -> bool:
    """Return whether a block of bins.c fits the device's local memory."""
    held = space.provider.devices()[space.index].properties.get("shared_bytes_per_block")
    return not held or held >= plans.BINS_LOCAL_BYTES


def _free_bytes(space: MemorySpace, share: float) -> int:
    """Return a share of the free memory, including what the process's pool holds unused."""
    memory = space.provider.memory(space.index)
    return int(share * (memory.free_bytes + max(0, memory.reserved_bytes - memory.allocated_bytes)))


# --- the last step on the host ----------------------------------------------------------------------------------------
_PYTHON_SUMS = 4  # sums per curve that Python reduces before the kernel is loaded

_sums_so_far: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


def reduce_windows(curve: Curve[Any], window: int, sums: U64) -> U64:
    """Return the sum of 2^(window w) times projective sums (chunks, windows, 3 coordinates), as affine words."""
    no_doublings = sums.shape[1] == 1
    by_python = no_doublings or next(_sums_so_far[curve.name]) < _PYTHON_SUMS
    return (reduce_by_python if by_python else reduce_by_kernel)(curve, window, sums)


def reduce_by_python(curve: Curve[Any], window: int, sums: U64) -> U64:
    """reduce_windows on Python integers; R is a common factor of coordinates, so only the result is scaled."""
    k, (chunks, windows) = curve.coordinates, sums.shape[:2]
    size, data = k.base.size_bytes, sums.astype("<u8").tobytes()
    values = [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]
    elements = [k.join(values[i : i + k.degree]) for i in range(0, len(values), k.degree)]
    total = weierstrass.jacobian_from_affine(curve, None)
    for w in reversed(range(windows)):
        total = _doubled(curve, total, window if w < windows - 1 else 0)
        for chunk in range(chunks):
            x, y, z = elements[3 * (chunk * windows + w) :][:3]
            total = weierstrass.jacobian_add(curve, total, (k.mul(x, z), k.mul(y, k.square(z)), z))
    return _scaled(curve, [weierstrass.jacobian_to_affine(curve, total)], montgomery_radix(k.base)).reshape(-1)


def _doubled(curve: Curve[Any], point: Jacobian[Any], times: int) -> Jacobian[Any]:
    """Return 2^times P by jacobian_double; over Fq without calls of methods, which take a third of its time."""
    if curve.coordinates.degree > 1:
        for _ in range(times):
            point = weierstrass.jacobian_double(curve, point)
        return point
    (x, y, z), p = point, curve.coordinates.base.modulus
    for _ in range(times):
        b, e, z = y * y % p, 3 * x * x % p, 2 * y * z % p
        d = 4 * x * b % p
        x = (e * e - 2 * d) % p
        y = (e * (d - x) - 8 * b * b) % p
    return x, y, z


def reduce_by_kernel(curve: Curve[Any], window: int, sums: U64) -> U64:
    """reduce_windows by the CPU kernel msm_finish, in the scalar form, whose layout is that of the C kernels."""
    chunks, windows = sums.shape[:2]
    partials = np.ascontiguousarray(sums[:, ::-1].swapaxes(0, 1))
    z = np.empty(2 * sums.shape[2] // 3, np.uint64)
    arrays, source = (
        (partials, doublings(windows, chunks, window), z),
        kernel_source(curve.name, "msm_finish", "scalar"),
    )
    launch(HOST, source, "msm_finish", 1, 1, arrays, windows * chunks)
    return z


def canonical(curve: Curve[Any], points: U64) -> U64:
    """Return the canonical words of points (n, *shape) in Montgomery form, by Python integers."""
    base = curve.coordinates.base
    return _scaled(curve, decode_points(curve, points), pow(montgomery_radix(base), -1, base.modulus))


def _scaled(curve: Curve[Any], points: Iterable[weierstrass.Affine[Any]], factor: int) -> U64:
    times, factor = curve.coordinates.times, factor % curve.coordinates.base.modulus
    return encode_points(curve, [p if p is None else (times(p[0], factor), times(p[1], factor)) for p in points])
