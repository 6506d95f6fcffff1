"""The passes on the CPU's kernels: how points are divided, which form of arithmetic, what a launch takes.

----

The passes on devices with kernels in C: how points are divided among passes and threads.

----

Transforms of words at a place: plans, kept with their twiddles, and the ledger.

Words are what algebra/field/places.py keeps, every element below the modulus, canonical or in Montgomery form: a
transform is a sum of products with constants, so it leaves either form as it is.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accelerant.algebra.counted import counted
from accelerant.algebra.field.llvm_kernels import host_form, packed_field
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.places import HOST, Place
from accelerant.algebra.field.words import dtype_of, element_shape
from accelerant.algebra.ntt.llvm_kernels import POINTERS, SCALARS, PassKernel
from accelerant.algebra.ntt.llvm_packs import by_limbs
from accelerant.algebra.ntt.plan import Pass, Variant, make_passes
from accelerant.algebra.ntt.program import Tile, kernel_source
from accelerant.algebra.ntt.tables import device_tables, limbs_of_52_bits, pass_tables
from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.ledger import OpRecord, ledger

__all__ = ["LOG_MOST", "DevicePasses", "Division", "HostPasses", "division_of", "scalars", "transform"]

_LOG_ROWS = 10
"""Of a pass, at most: 320 KiB on the stack where eight elements are five registers; a core's cache has more."""

_LOG_TABLE = 20
"""Of a table of twiddles, at most: above, a second product is quicker than reading the table from memory."""


def _logs(log_n: int, lanes: int, batch: int) -> tuple[int, ...]:
    """Log2 of the rows of each pass: one pass where its columns fill the lanes, or where there are too few points."""
    log_lanes = lanes.bit_length() - 1
    if log_n < 2 * log_lanes or (log_n <= _LOG_ROWS and batch % lanes == 0):
        return (log_n,)
    passes = max(2, -(-log_n // _LOG_ROWS))
    return tuple((log_n + m) // passes for m in reversed(range(passes)))


@functools.cache
def _host_kernel(field: Field, variant: Variant, kind: str) -> Kernel:
    name = f"ntt_{field.name}_{kind}"
    e = f"*u{field.word_bits}"
    entries = {"ntt_pass": (e,) * len(POINTERS) + ("i64",) * len(SCALARS)}
    source = KernelSource(name=name, dialects={"llvm": PassKernel(field.name, variant, kind)}, entries=entries)
    return HOST.provider.compile(source)


@functools.cache
def _best(field: Field) -> str:
    return host_form(field)


class HostPasses:
    """The passes of transforms of one kind on the CPU.

    Attributes:
        field: of the elements.
        passes: in order.
        size_bytes: of the tables.
        given_up: whether it is kept no more.
    """

    def __init__(
        self, field: Field, log_n: int, batch: int, *, inverse: bool, coset: int, order: str, kind: str = ""
    ) -> None:
        self.field = field
        self.given_up = False
        kind = kind or _best(field)
        if not self._fills(field, kind, log_n, batch):
            kind = "scalar"
        form = packed_field(field, kind)
        logs = _logs(log_n, form.lanes, batch)
        self.passes = make_passes(field, logs, inverse=inverse, coset=coset, order=order, log_table=_LOG_TABLE)
        self._kernels = [_host_kernel(field, step.variant, kind) for step in self.passes]
        self._tables: list[list[Any]] = []
        self.size_bytes = 0
        for step in self.passes:
            tables = pass_tables(field, step, form.radix)
            single = [tables.roots, tables.before, tables.after, tables.high]
            if by_limbs(form):
                single = [table if table is None else limbs_of_52_bits(field, table) for table in single]
            self.size_bytes += sum(table.nbytes for table in (*single, tables.low) if table is not None)
            roots, before, after, high = (single[0] if table is None else table for table in single)
            low = roots if tables.low is None else tables.low
            self._tables.append([roots, before, after, low, high])

    @staticmethod
    def _fills(field: Field, kind: str, log_n: int, batch: int) -> bool:
        """Whether all passes have as many columns, and rows where those are neighbours, as a pack has lanes."""
        lanes = packed_field(field, kind).lanes
        return lanes**2 <= 1 << log_n or (batch % lanes == 0 and lanes <= 1 << log_n)

    def launch(self, number: int, x: Any, z: Any, elements: int) -> None:
        """One pass of so many elements, from x to z."""
        step, kernel = self.passes[number], self._kernels[number]
        pointers = map(HOST.pointer, (x, z, *self._tables[number]))
        HOST.provider.launch(kernel, (elements,), (1,), (*pointers, *scalars(step, elements)))

    def give_up(self) -> None:
        """Nothing reads the tables when a launch has returned, and memory lives as long as who holds the plan."""
        self.given_up = True


def scalars(step: Pass, elements: int) -> Sequence[int]:
    """What llvm_kernels.SCALARS names."""
    reads, writes = step.reads, step.writes
    return (
        elements >> step.log_rows,
        step.log_rows,
        step.log_low,
        *step.digits,
        *reads.column,
        reads.row,
        *writes.column,
        writes.row,
    )


_THREADS = 8
"""Log2 of the threads of a block, at most: what every device has."""


_SIZES_LIMIT = 256
"""Numbers of elements, times passes, whose launches a plan keeps."""


@dataclass(frozen=True, slots=True)
class Division:
    """How work is divided; all but `resident` are log2.

    Attributes:
        rows: of a pass, at most, where three passes are enough; else of a third of the points.
        tile: elements of a block, and of a transform of one pass.
        radix: elements of a thread; at most 4.
        table: elements of a table of twiddles, at most; above, a twiddle is the product of two.
        resident: see Tile.
        resident_along: the same of passes along the rows on both sides, if it differs.
    """

    rows: int
    tile: int
    radix: int
    table: int
    resident: int = 0
    resident_along: int | None = None

    def logs(self, log_n: int) -> tuple[int, ...]:
        """Rows of each pass, the larger first: one pass of points that fit in a block, else two or three."""
        if log_n <= self.tile:
            return (log_n,)
        passes = min(3, max(2, -(-log_n // self.rows)))
        return tuple((log_n + m) // passes for m in reversed(range(passes)))

    def shape(self, step: Pass) -> Tile:
        """A block's: columns that differ in their lowest digit alone."""
        rows, radix = step.log_rows, min(self.radix, step.log_rows)
        columns = max(0, min(self.tile - rows, _THREADS + radix - rows, step.digits[0]))
        along = step.variant.along_in and step.variant.along_out and self.resident_along is not None
        return Tile(rows, columns, radix, (self.resident_along or 0) if along else self.resident)


def division_of(field: Field) -> Division:
    """What is used for a field: the best of benchmarks/tune_zk.py on an H200.

    Milliseconds of 2^20 and 2^24 points there, the memory cold: bn254_fr 0.195 and 3.16. Goldilocks, radix 16 with
    shifts as inner factors, all twiddles in tables, registers for two blocks of 256 threads, 0.034 and 0.380; for three
    0.037 and 0.36. BabyBear 0.021, and 0.094 of 2^23.
    """
    if field.limbs > 1:
        return Division(rows=8, tile=9, radix=2, table=24)
    if field.word_bits == 64:
        return Division(rows=8, tile=12, radix=4, table=24, resident=2, resident_along=2)
    return Division(rows=8, tile=12, radix=4, table=16, resident=4)  # left alone it takes 32 registers, and spills


@functools.cache
def _device_kernel(field: Field, variant: Variant, tile: Tile, inverse: bool, place: Place) -> Kernel:
    return place.provider.compile(kernel_source(field, variant, tile, inverse), device=place.index)


def _overlaps(target: str) -> bool:
    """Whether the target's programs wait themselves for what is ahead in the stream: from NVIDIA's Hopper on."""
    return target.startswith("sm_") and int(target[3:].rstrip("af")) >= 90


class DevicePasses:
    """The passes of transforms of one kind on a device.

    Attributes:
        field: of the elements.
        passes: in order.
        size_bytes: of the tables.
        given_up: whether it is kept no more: the tables go with the last who holds it.
    """

    def __init__(
        self,
        place: Place,
        field: Field,
        log_n: int,
        *,
        inverse: bool,
        coset: int,
        order: str,
        division: Division | None = None,
    ) -> None:
        division = division or division_of(field)
        self.field = field
        self.given_up = False
        self._place = place
        self.passes = make_passes(
            field, division.logs(log_n), inverse=inverse, coset=coset, order=order, log_table=division.table
        )
        self._tiles = [division.shape(step) for step in self.passes]
        self._kernels = [
            _device_kernel(field, step.variant, tile, inverse and field.name == "goldilocks", place)
            for step, tile in zip(self.passes, self._tiles, strict=True)
        ]
        self._tables: list[list[Any]] = []  # launches read their memory
        self._pointers: list[tuple[Any, ...]] = []
        self._starts: dict[tuple[int, int], Callable[[Any, Any], None]] = {}
        self.size_bytes = 0
        for step, tile in zip(self.passes, self._tiles, strict=True):
            made = device_tables(place, field, step, tile)
            rest = (made.before, made.after, made.low, made.high)
            words = sum(math.prod(table.shape) for table in (made.roots, *rest) if table is not None)
            self.size_bytes += words * field.word_bits // 8
            self._tables.append([made.roots, *(made.roots if table is None else table for table in rest)])
            self._pointers.append(tuple(map(place.pointer, self._tables[-1])))
        place.provider.synchronize(place.index)  # launches on other streams read the tables too

    def launch(self, number: int, x: Any, z: Any, elements: int) -> None:
        """One pass of so many elements, from x to z."""
        start = self._starts.get((number, elements)) or self._prepare(number, x, z, elements)
        start(x, z)

    def _prepare(self, number: int, x: Any, z: Any, elements: int) -> Callable[[Any, Any], None]:
        """A launch of all but the elements, kept: a call of small transforms is mostly what the host does.

        On CUDA the driver reads what stands ready, and a pass begins while the one before it ends: see kernel.c.
        """
        kernel, tile, place, tables = self._kernels[number], self._tiles[number], self._place, self._pointers[number]
        count, _, *rest = scalars(self.passes[number], elements)
        blocks, values = -(-count // (1 << tile.columns)), (count, *rest)
        if (point := getattr(kernel.handle, "point", None)) is not None:
            args = (x, z, *tables, *values)
            ready = point((blocks, 1, 1), args, place.index, tile.threads, _overlaps(kernel.target))

            def start(x: Any, z: Any) -> None:
                ready.start(x.data_ptr(), z.data_ptr())

        else:

            def start(x: Any, z: Any) -> None:
                args = (place.pointer(x), place.pointer(z), *tables, *values)
                place.provider.launch(kernel, (blocks,), (tile.threads,), args)

        if len(self._starts) >= _SIZES_LIMIT:
            self._starts.clear()
        self._starts[number, elements] = start
        return start

    def give_up(self) -> None:
        """Wait for what reads the tables on any stream, before their memory is given to others.

        Who launches with the plan from now on sees given_up, and waits too.
        """
        self.given_up = True
        self._place.provider.synchronize(self._place.index)


LOG_MOST = 27
"""Log2 of the points of a transform, at most."""

Plan = HostPasses | DevicePasses

_TABLES_LIMIT_BYTES = 2 * 1024**3
"""Of the tables of all plans kept; twiddles of 2^24 points of four words are 512 MiB."""

_PLANS_LIMIT = 256
"""Plans kept, at most: small ones, of a new coset each time, are 2 KB beside their tables and would pile up."""

_RECORDS_LIMIT = 4096


def transform(place: Place, field: Field, x: Any, *, inverse: bool, coset: int, order: str, out: Any = None) -> Any:
    """Transforms along the last axis of the elements' shape; see accelerant.zk.ntt.

    Args:
        place: where the words are.
        field: of the elements.
        x: words; the last axis of the elements' shape has 2^k points, k from 1 to LOG_MOST.
        inverse: the inverse transform.
        coset: g, not 0; 1 for none.
        order: one of plan.ORDERS.
        out: words for the answer, which may be x; new ones by default.
    """
    shape = element_shape(field, x.shape)
    n, batch = shape[-1], math.prod(shape[:-1])
    out = place.empty(tuple(x.shape), dtype_of(field)) if out is None else out
    if not batch:
        return out
    plan = _plan(place, field, n.bit_length() - 1, math.gcd(batch, 16), inverse, coset, order)
    with counted(place, _record(place, field, tuple(shape), inverse, coset != 1, order)):
        run(plan, place, x, out, n * batch)
    if plan.given_up:  # by another thread, whose wait for the device may have come before these launches
        place.provider.synchronize(place.index)
    return out


def run(plan: Plan, place: Place, x: Any, out: Any, elements: int) -> None:
    """The passes of a plan; where the last one moves elements, those before it work in memory of their own."""
    last = len(plan.passes) - 1
    moves = not plan.passes[last].in_place
    work = place.empty(tuple(x.shape), dtype_of(plan.field)) if moves else out
    for number in range(last + 1):
        plan.launch(number, x, out if moves and number == last else work, elements)
        x = work


class _Plans:
    """Plans by what they are for; where they or their tables are too many, the longest unused are given up."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Plan] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """The plan of a key, made where there is none: without the lock, since it takes up to seconds.

        Two threads may make the same plan; both get that of the first to be done.
        """
        plan = self._known(key)
        if plan is not None:
            return plan
        made = make()
        with self._lock:
            plan = self._kept.setdefault(key, made)
            self._kept.move_to_end(key)
            self._size_bytes += made.size_bytes * (plan is made)
            given_up = list(self._beyond_limits())
        for each in given_up:
            each.give_up()
        return plan

    def _known(self, key: Hashable) -> Plan | None:
        with self._lock:
            plan = self._kept.get(key)
            if plan is not None:
                self._kept.move_to_end(key)
            return plan

    def _beyond_limits(self) -> Iterator[Plan]:
        while len(self._kept) > 1 and (self._size_bytes > _TABLES_LIMIT_BYTES or len(self._kept) > _PLANS_LIMIT):
            _, plan = self._kept.popitem(last=False)
            self._size_bytes -= plan.size_bytes
            yield plan


_plans = _Plans()


def _plan(place: Place, field: Field, log_n: int, batch: int, inverse: bool, coset: int, order: str) -> Plan:
    def make() -> Plan:
        if place is HOST:
            return HostPasses(field, log_n, batch, inverse=inverse, coset=coset, order=order)
        return DevicePasses(place, field, log_n, inverse=inverse, coset=coset, order=order)

    return _plans.get((place, field, log_n, batch if place is HOST else 0, inverse, coset, order), make)


@functools.lru_cache(maxsize=_RECORDS_LIMIT)
def _record(place: Place, field: Field, shape: Sequence[int], inverse: bool, coset: bool, order: str) -> OpRecord:
    words = [" inverse" * inverse, " coset" * coset, f" {order}" * (order != "natural")]
    size = math.prod(shape)
    return ledger().record(
        OpRecord(
            op="ntt",
            implementation=next(name for name in ("llvm", "cuda", "portable") if name in place.provider.dialects),
            backend=place.backend,
            device=place.label,
            case=f"{'x'.join(map(str, shape))} {field.name}{''.join(words)}",
            own=True,
            bytes_per_call=2 * size * field.size_bytes,
            flops_per_call=size * (shape[-1].bit_length() - 1) // 2,
            reason=f"the only one on {place.backend}",
        )
    )
