"""Transforms of words: cached plans for the CPU and for devices, with their tables, and recorded launches.

Every element is below the modulus, in canonical or in Montgomery form. Factors in tables are Montgomery forms, or x L
mod p where an arithmetic divides by another L. On the CPU the field's kernel multiplies twiddles; on devices powers.c
computes them from the squares of three numbers.
"""

from __future__ import annotations

import functools
import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.llvm_kernels import host_form, packed_field
from accelerant.algebra.field.memory_space import HOST, DeviceVerdict, MemorySpace
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.program import BLOCK, montgomery_radix
from accelerant.algebra.field.program import kernel_source as field_source
from accelerant.algebra.field.words import dtype_of, element_shape, tail_of
from accelerant.algebra.ntt import plan as programs
from accelerant.algebra.ntt.plan import Pass, RowPowers, Variant, make_passes, powers, reversed_numbers
from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.host import fork_safe
from accelerant.runtime.ledger import OpRecord, RecordedLaunch, launch, sole_record
from accelerant.runtime.time_limit import check_time, is_limited

LOG_MOST = 27  # Log2 of the largest number of points of a transform
_TABLES_LIMIT_BYTES = 2 * 1024**3  # of all cached plans; twiddles of 2^24 points of four words are 512 MiB
_PLANS_LIMIT = 256  # cached plans: each coset needs another one, 2 KB in addition to its tables


def transform(
    space: MemorySpace, field: Field, x: Any, *, inverse: bool, coset: int, order: str, out: Any = None,
    verdict: DeviceVerdict | None = None,
) -> Any:  # fmt: skip
    """Transform along the last axis of the elements' shape, which has 2^k points; see accelerant.zk.ntt.

    `coset` is g, 1 for none; `out` may be x. A verdict, on CUDA devices, is set if an element of x is not below the
    modulus.
    """
    record, n, batch = _case(space, field, tuple(x.shape), inverse, coset != 1, order)
    if not batch:
        return space.empty(tuple(x.shape), dtype_of(field)) if out is None else out
    keep = out is not None and is_limited()
    plan = _plan(space, field, n.bit_length() - 1, math.gcd(batch, 16), inverse, coset, order)
    with RecordedLaunch(record, space.provider, space.index):
        out = run(plan, space, x, out, n * batch, keep=keep, verdict=verdict)
    if plan.retired:  # another thread dropped it and may have waited for the device before these launches
        space.provider.synchronize(space.index)
    return out


def run(
    plan: NttPlan, space: MemorySpace, x: Any, out: Any, elements: int, *, keep: bool = False,
    verdict: DeviceVerdict | None = None,
) -> Any:  # fmt: skip
    """Launch the passes of a plan and return `out`, or new words; `keep` leaves `out` as it is at a time limit."""
    last = len(plan.passes) - 1
    moves = not plan.passes[last].in_place or (keep and last > 0)
    work = space.empty(tuple(x.shape), dtype_of(plan.field)) if moves and last else None
    for number in range(last + 1):
        judges = () if verdict is None or number else (verdict,)
        target = work if moves and number < last else out
        if target is None:  # allocated late: a device begins with the first pass meanwhile
            target = out = space.empty(tuple(x.shape), dtype_of(plan.field))
        plan.launch(number, x, target, elements, *judges)
        x = target
        if number < last:
            check_time(f"after {number + 1} of {last + 1} passes", lambda: space.provider.synchronize(space.index))
    return out


@functools.lru_cache(maxsize=4096)
def _case(
    space: MemorySpace, field: Field, words: Sequence[int], inverse: bool, coset: bool, order: str
) -> tuple[OpRecord, int, int]:
    """Return the record of a transform of words of a shape, its points, and the number of such in a batch."""
    shape = element_shape(field, words)
    dialect = next(name for name in ("llvm", "cuda", "portable", "wgsl") if name in space.provider.dialects)
    case = f"{'x'.join(map(str, shape))} {field.name}" + " inverse" * inverse + " coset" * coset
    case += f" {order}" * (order != "natural")
    operations = math.prod(shape) * (shape[-1].bit_length() - 1) // 2
    sizes = {"size_bytes": 2 * math.prod(shape) * field.size_bytes, "operations": operations}
    record = sole_record("ntt", dialect, space.backend, space.label, case, **sizes)
    return record, shape[-1], math.prod(shape[:-1])


class _Plans:
    """A cache of plans that drops the least recently used ones beyond limits on their number and their tables' size."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, NttPlan] = OrderedDict()
        self._size_bytes = 0
        self._lock = fork_safe(threading.Lock())

    def get(self, key: Hashable, make: Callable[[], NttPlan]) -> NttPlan:
        """Return a key's plan, made if there is none, outside the lock: of two threads both get the first one's."""
        with self._lock:
            if (plan := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return plan
        new = make()
        with self._lock:
            plan = self._kept.setdefault(key, new)
            self._kept.move_to_end(key)
            self._size_bytes += new.size_bytes * (plan is new)
            dropped = []
            while len(self._kept) > 1 and (self._size_bytes > _TABLES_LIMIT_BYTES or len(self._kept) > _PLANS_LIMIT):
                dropped.append(self._kept.popitem(last=False)[1])
                self._size_bytes -= dropped[-1].size_bytes
        for old in dropped:
            old.retire()
        return plan


_plans = _Plans()


def _plan(space: MemorySpace, field: Field, log_n: int, batch: int, inverse: bool, coset: int, order: str) -> NttPlan:
    def make() -> NttPlan:
        if space is HOST:
            return CpuNttPlan(field, log_n, batch, inverse=inverse, coset=coset, order=order)
        return DeviceNttPlan(space, field, log_n, inverse=inverse, coset=coset, order=order)

    return _plans.get((space, field, log_n, batch if space is HOST else 0, inverse, coset, order), make)


def scalars(step: Pass, elements: int) -> Sequence[int]:
    """Return the scalar arguments of a pass, in the order of llvm_kernels.SCALARS."""
    layouts = (*step.reads.column, step.reads.row, *step.writes.column, step.writes.row)
    return (elements >> step.log_rows, step.log_rows, step.log_low, *step.digits, *layouts)


def _split(log_n: int, passes: int) -> tuple[int, ...]:
    """Return log2 of the rows of each pass, as equal as possible, the larger first."""
    return tuple((log_n + m) // passes for m in reversed(range(passes)))


_LOG_ROWS = 10  # log2 of the most rows of a pass: 320 KiB of stack, less than a core's cache
_LOG_TABLE = 20  # log2 of the largest table of twiddles: beyond it, a second product is quicker


@functools.cache
def _host_kernel(field: Field, variant: Variant, form: str) -> Kernel:
    entries = {"ntt_pass": (f"*u{field.word_bits}",) * len(programs.POINTERS) + ("i64",) * len(programs.SCALARS)}
    dialects = {"llvm": programs.pass_kernel(field, variant, form)}
    return HOST.provider.compile(KernelSource(f"ntt_{field.name}_{form}", dialects, entries))


def _host_division(field: Field, log_n: int, batch: int, form: str = "") -> tuple[str, tuple[int, ...]]:
    """Return the form of the CPU's arithmetic, and log2 of the rows of each pass."""
    form = form or host_form(field)
    lanes = packed_field(field, form).lanes
    if lanes**2 > 1 << log_n and (batch % lanes or lanes > 1 << log_n):
        form = "scalar"  # a pass would have fewer columns, or fewer neighbouring rows, than a pack has lanes
    lanes = packed_field(field, form).lanes
    # One pass suffices if its columns fill the lanes, or if there are too few points for two.
    single = lanes**2 > 1 << log_n or (log_n <= _LOG_ROWS and batch % lanes == 0)
    return form, _split(log_n, 1 if single else max(2, -(-log_n // _LOG_ROWS)))


def scratch_bytes(space: MemorySpace, field: Field, shape: Sequence[int], order: str) -> int:
    """Return the scratch memory of a transform of elements of a shape, besides tables, which plans keep."""
    log_n, batch = shape[-1].bit_length() - 1, math.prod(shape[:-1])
    on_host = space is HOST
    division = division_of(field, space.backend)
    logs = _host_division(field, log_n, math.gcd(batch, 16))[1] if on_host else division.logs(log_n)
    return math.prod(shape) * field.size_bytes if order == "natural" and len(logs) > 1 else 0


class NttPlan(ABC):
    """The passes of one kind of transform in a memory space, in the order in which they run, and their tables."""

    def __init__(self, space: MemorySpace, field: Field, passes: Sequence[Pass], tables: Sequence[Tables]) -> None:
        self.field, self.passes, self.retired, self._space = field, passes, False, space
        given = [table for each in tables for table in each if table is not None]
        self.size_bytes = sum(math.prod(table.shape) for table in given) * field.word_bits // 8
        # owns the memory that launches read; a kernel does not read what stands for a table that there is not
        self._tables = [[each.roots if table is None else table for table in each] for each in tables]

    @abstractmethod
    def launch(self, number: int, x: Any, z: Any, elements: int, *verdict: DeviceVerdict) -> None:
        """Launch one pass on so many elements, from x to z; on a device the first one may take a verdict."""

    def retire(self) -> None:
        """Mark the plan as dropped, and wait for launches that read its tables: their memory is reused next."""
        self.retired = True


class CpuNttPlan(NttPlan):
    """A plan with kernels of the CPU."""

    def __init__(
        self, field: Field, log_n: int, batch: int, *, inverse: bool, coset: int, order: str, form: str = ""
    ) -> None:
        form, logs = _host_division(field, log_n, batch, form)
        packed = packed_field(field, form)
        passes = make_passes(field, logs, inverse=inverse, coset=coset, order=order, log_table=_LOG_TABLE)
        self._kernels = [_host_kernel(field, step.variant, form) for step in passes]
        tables = [pass_tables(field, step, packed.radix) for step in passes]
        if programs.by_limbs(packed):  # but for low, which is read as words
            tables = [
                Tables(*(t if t is None or t is each.low else limbs_of_52_bits(field, t) for t in each))
                for each in tables
            ]
        super().__init__(HOST, field, passes, tables)

    def launch(self, number: int, x: Any, z: Any, elements: int, *_: DeviceVerdict) -> None:
        """Launch one pass; there is no verdict on the CPU."""
        step, kernel = self.passes[number], self._kernels[number]
        pointers = map(HOST.pointer, (x, z, *self._tables[number]))
        HOST.provider.launch(kernel, (elements,), (1,), (*pointers, *scalars(step, elements)))


_THREADS = 8  # Log2 of the most threads of a block: what every device supports
_SIZES_LIMIT = 256  # prepared launches that a plan keeps, with and without a verdict


@dataclass(frozen=True, slots=True)
class Division:
    """The division of work among passes, blocks and threads; all but `resident` are log2."""

    rows: int  # most rows of a pass, if three passes suffice; else a third of the points
    tile: int  # elements of a block, and of a transform of one pass
    radix: int  # elements of a thread; at most 4
    table: int  # most elements of a table of twiddles; beyond, a twiddle is the product of two
    resident: int = 0
    resident_along: int | None = None  # `resident` (see Tile) of passes along the rows on both sides, if it differs

    def logs(self, log_n: int) -> tuple[int, ...]:
        """Return the rows of each pass, the larger first: one pass if the points fit in a block, else two or three."""
        return _split(log_n, 1 if log_n <= self.tile else min(3, max(2, -(-log_n // self.rows))))

    def shape(self, step: Pass) -> programs.Tile:
        """Return the tile of a block, whose columns differ in their lowest digit only."""
        rows, radix = step.log_rows, min(self.radix, step.log_rows)
        columns = max(0, min(self.tile - rows, _THREADS + radix - rows, step.digits[0]))
        along = step.variant.along_in and step.variant.along_out and self.resident_along is not None
        return programs.Tile(rows, columns, radix, (self.resident_along or 0) if along else self.resident)


def division_of(field: Field, backend: str = "") -> Division:
    """Return the division of a field's transforms: the fastest of benchmarks/tune_zk.py on an H200."""
    if backend == "webgpu":  # 16 KiB of workgroup memory is what every device has
        return Division(rows=8, tile=9, radix=1, table=20)
    if field.limbs > 1:
        return Division(rows=8, tile=9, radix=2, table=24)
    if field.word_bits == 64:
        return Division(rows=8, tile=12, radix=4, table=24, resident=2, resident_along=2)
    return Division(rows=8, tile=12, radix=4, table=16, resident=4)  # else NVRTC gives it 32 registers, and spills


@functools.cache
def _device_kernel(
    field: Field, variant: Variant, tile: programs.Tile, inverse: bool, space: MemorySpace, checked: bool = False
) -> Kernel:
    return space.provider.compile(programs.kernel_source(field, variant, tile, inverse, checked), device=space.index)


class DeviceNttPlan(NttPlan):
    """A plan with kernels of a device."""

    def __init__(
        self, space: MemorySpace, field: Field, log_n: int, *, inverse: bool, coset: int, order: str,
        division: Division | None = None,
    ) -> None:  # fmt: skip
        division = division or division_of(field, space.backend)
        logs, table = division.logs(log_n), division.table
        passes = make_passes(field, logs, inverse=inverse, coset=coset, order=order, log_table=table)
        self._tiles = [division.shape(step) for step in passes]
        tables = [device_tables(space, field, step, tile) for step, tile in zip(passes, self._tiles, strict=True)]
        super().__init__(space, field, passes, tables)
        self._shifts = inverse and field.name == "goldilocks"
        self._pointers = [tuple(map(space.pointer, each)) for each in self._tables]
        self._starts: dict[tuple[int, int, int], Callable[..., None]] = {}
        self._provider = space.provider  # whose backend may be unregistered before the plan is dropped
        self._provider.synchronize(space.index)  # launches on other streams read the tables, too

    def launch(self, number: int, x: Any, z: Any, elements: int, *verdict: DeviceVerdict) -> None:
        """Launch one pass; launches of the same arguments are prepared once."""
        start = self._starts.get((number, elements, len(verdict)))
        (start or self._prepare(number, elements, x, z, *verdict))(x, z, *verdict)

    def _prepare(self, number: int, elements: int, *arrays: Any) -> Callable[..., None]:
        """Return and cache a launch that lacks x, z and a verdict; from Hopper on it may overlap the preceding pass."""
        step, tile, space, tables = self.passes[number], self._tiles[number], self._space, self._pointers[number]
        kernel = _device_kernel(self.field, step.variant, tile, self._shifts, space, len(arrays) > 2)
        count, _, *rest = scalars(step, elements)
        blocks, values = -(-count // (1 << tile.columns)), (count, *rest)
        if (point := getattr(kernel.handle, "point", None)) is not None:
            target = kernel.target
            overlaps = target.startswith("sm_") and int(target[3:].rstrip("af")) >= 90
            ready = point((blocks, 1, 1), (*arrays, *tables, *values), space.index, tile.threads, overlaps)

            def start(*arrays: Any) -> None:
                ready.start(*(each.data_ptr() for each in arrays))

        else:

            def start(*arrays: Any) -> None:
                args = (*map(space.pointer, arrays), *tables, *values)
                space.provider.launch(kernel, (blocks,), (tile.threads,), args)

        if len(self._starts) >= _SIZES_LIMIT:
            self._starts.clear()
        self._starts[number, elements, len(arrays) - 2] = start
        return start

    def retire(self) -> None:
        """See NttPlan; launches may be on any stream. The CPU's have ended when they return."""
        super().retire()
        self._provider.synchronize(self._space.index)


Words = npt.NDArray[Any]

_MASK = (1 << 52) - 1

_BATCH = (1 << 13, 1 << 16)  # fewest and most factors multiplied in one launch


class Tables(NamedTuple):
    """The factors of a pass, on the host or in a device's memory; None for those that it does not have.

    `roots` are powers of the pass's root, (rows / 2, ...), on devices as of roots_of; `before` and `after`
    (rows, 1, ...); `low` (rows, 2^log_low, ...); `high` of split twiddles (rows, 2^(log_inner - log_low), ...).
    """

    roots: Any
    before: Any
    after: Any
    low: Any
    high: Any


def _tables(step: Pass, roots: Any, columns: Callable[[RowPowers, RowPowers, int, int], Any]) -> Tables:
    """Return tables; columns(start, base, log_count, log_unit) makes start base^(c 2^log_unit) of each row and c."""
    low = high = None
    if step.twiddles is not None:
        start, base = step.twiddles.start, step.twiddles.base
        low = columns(start, base, step.log_low, 0)
        if step.variant.split:
            ones = RowPowers(1, 1, start.log_rows, start.by_bits)
            high = columns(ones, base, step.digits[0] - step.log_low, step.log_low)
    alone = RowPowers(1, 1, 0)
    before, after = (None if each is None else columns(each, alone, 0, 0) for each in (step.before, step.after))
    return Tables(roots, before, after, low, high)


def pass_tables(field: Field, step: Pass, radix: int) -> Tables:
    """Return the tables of a pass on the host, as factors x L mod p for the radix L."""
    p = field.modulus

    def scaled(values: Sequence[int]) -> Words:
        return _words_of(field, [value * radix % p for value in values])

    def columns(start: RowPowers, base: RowPowers, log_count: int, log_unit: int) -> Words:
        bases = [pow(value, 1 << log_unit, p) for value in base.by_position(p)]
        return _columns(field, scaled(start.by_position(p)), bases, 1 << log_count)

    return _tables(step, scaled(powers(1, step.root, max(1, step.rows // 2), p)), columns)


def _words_of(field: Field, values: Iterable[int]) -> Words:
    """Return the words of integers below the modulus, (n, ...), without the checks of algebra.field.words.encode."""
    size, dtype = field.size_bytes, dtype_of(field)
    data = b"".join([value.to_bytes(size, "little") for value in values])
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape((-1, *tail_of(field)))


def limbs_of_52_bits(field: Field, words: Words) -> Words:
    """Convert numbers from (..., words of 64 bits) to (..., limbs of 52 bits)."""
    count = -(-64 * field.limbs // 52)
    limbs = np.empty((*words.shape[:-1], count), np.uint64)
    for k in range(count):
        word, shift = divmod(52 * k, 64)
        limb = words[..., word] >> np.uint64(shift)
        if shift > 12 and word + 1 < field.limbs:
            limb = limb | words[..., word + 1] << np.uint64(64 - shift)
        limbs[..., k] = limb & np.uint64(_MASK)
    return limbs


def _columns(field: Field, start: Words, base: Sequence[int], count: int) -> Words:
    """Return start[r] base[r]^c, (rows, count, ...), in the form of start's words; count is a power of two."""
    p, radix = field.modulus, montgomery_radix(field)
    factor = _words_of(field, [value * radix % p for value in base])
    near = 1 << (count.bit_length() - 1 + 1) // 2
    first, factor = _doubled(field, start, factor, min(near, count))
    if near >= count:
        return first
    ones = _words_of(field, [radix % p]).repeat(len(start), axis=0)
    second, _ = _doubled(field, ones, factor, count // near)
    shape = (len(start), count // near, near, *tail_of(field))
    table = np.empty(shape, dtype_of(field))
    rows = max(1, min(_BATCH[1], max(_BATCH[0], len(start) * count // 8)) // count)
    factors = np.empty((min(rows, len(start)), *shape[1:]), dtype_of(field))
    for at in range(0, len(start), rows):
        part = table[at : at + rows]
        np.copyto(part, first[at : at + rows, None])
        np.copyto(factors[: len(part)], second[at : at + rows, :, None])
        _multiply(field, part, factors[: len(part)], part)
    return table.reshape((len(start), count, *tail_of(field)))


def _doubled(field: Field, start: Words, factor: Words, count: int) -> tuple[Words, Words]:
    """Return start[r] factor[r]^c, (rows, count, ...), and factor^count; factors in Montgomery form, (rows, ...)."""
    table = np.ascontiguousarray(start[:, None])
    while (done := table.shape[1]) < count:
        further, squared = np.empty_like(table), np.empty_like(factor)
        _multiply(field, table, factor[:, None].repeat(done, axis=1), further)
        _multiply(field, factor, factor, squared)
        table, factor = np.concatenate((table, further), axis=1), squared
    return table, factor


def _multiply(field: Field, x: Words, y: Words, z: Words) -> None:
    """Store x y / R in z, element by element; not recorded in the ledger, since no caller asked for it."""
    n, entry = x.size // field.limbs, "field_mul_montgomery"
    launch(HOST, field_source(field, entry), entry, n, 1, (x, y, z), n)


_LOG_STEPS = 4  # Log2 of the most factors of a thread


def device_tables(space: MemorySpace, field: Field, step: Pass, tile: programs.Tile) -> Tables:
    """Return the tables of a pass on a device, made on the current stream: other streams must wait for it."""
    roots = space.load(roots_of(field, step, tile, plain="wgsl" in space.provider.dialects))
    return _tables(step, roots, functools.partial(_device_powers, space, field))


def _device_powers(
    space: MemorySpace, field: Field, start: RowPowers, base: RowPowers, log_count: int, log_unit: int
) -> Any:
    """Return start base^(c 2^log_unit) for each row and column c, (rows, 2^log_count, ...), by powers.c."""
    rows, steps = start.log_rows, min(_LOG_STEPS, log_count)
    table = space.empty((1 << rows, 1 << log_count, *tail_of(field)), dtype_of(field))
    p, values = field.modulus, [start.scale]
    for number in (start.base, base.scale, base.base):
        squares = [number]
        for _ in range(programs.LADDER - 1):
            squares.append(squares[-1] ** 2 % p)
        values += squares
    ladder = space.load(_words_of(field, [value * montgomery_radix(field) % p for value in values]))
    numbers = (rows, log_count, steps, log_unit, int(start.by_bits), int(start.base != 1), int(base.scale != 1))
    blocks = -(-(1 << rows + log_count - steps) // BLOCK)
    launch(space, programs.powers_source(field), "ntt_powers", blocks, BLOCK, (table, ladder), *numbers)
    return table


def roots_of(field: Field, step: Pass, tile: programs.Tile, *, plain: bool = False) -> Words:
    """Return the roots of a pass: rows / 2 factors w, in Montgomery form; if has_quotients, w and floor(w R / p).

    `plain` roots, for WGSL, have no quotients and the same order for every field. For Goldilocks in C, [(radix + k)
    2^done + block] is the factor of element k in a group with `done` levels before it.
    """
    if field.name == "goldilocks" and not plain:
        all_roots = np.array(powers(1, step.root, step.rows, field.modulus), np.uint64)
        elements, by_level = np.arange(1 << tile.radix), np.ones(2 * step.rows, np.uint64)
        for done in range((step.log_rows - 1) % tile.radix + 1, step.log_rows, tile.radix):
            exponents = np.outer(elements, reversed_numbers(done)) * (step.rows >> done + tile.radix)
            by_level[1 << tile.radix + done : 2 << tile.radix + done] = all_roots[exponents.reshape(-1)]
        return by_level
    p, radix, count = field.modulus, montgomery_radix(field), max(1, step.rows // 2)
    roots = powers(1, step.root, count, p)
    if programs.has_quotients(field) and not plain:
        factors, quotients = _words_of(field, roots), _words_of(field, [(w * radix) // p for w in roots])
        words = np.stack((factors, quotients), axis=1)
    else:
        words = _words_of(field, [w * radix % p for w in roots])
    return words[reversed_numbers(count.bit_length() - 1)]
