"""Multi-scalar multiplication on the CPU: buckets of signed digits, filled by affine additions with shared inversions.

A task is a window (digit) of all scalars: its points are sorted by bucket, each bucket is summed in rounds of
independent additions, and the buckets are weighted by running sums; Horner's rule combines the
windows. Source: Pippenger's method as in eprint 2012/549; shared inversions as in eprint 2022/1400.

The kernels are LLVM IR, over either form of field arithmetic. Points and elements between these entries are in the
form's own Montgomery representation (x L, where memory elsewhere has x R), in words, so that a product loads its
operands without a shift.

    msm_enter    (x, z, n)                         convert points from x R to x L; z may be x
    msm_recode   (scalars, columns, shift, n)      columns[w n + i] = word w of scalars[i] + shift, w = 0 to 5
    msm_sum      (points, columns, tasks, next, scratch, offsets, partials, sizes)
                 one index per worker. Workers take tasks from the counter `next`; a task computes for each of its sets
                 of buckets a partial sum of digits times points, projective
    msm_finish   (partials, doublings, z, count)   z = sum of partials, doubled doublings[t] times before partial t is
                                                   added; one point, affine, x R

A task is a range of points and of windows (digits). Digits are signed, d in [-2^(c-1), 2^(c-1)), and point i goes to
bucket |d|, as -P where d < 0. Each window of a task has a set of buckets, or all share one. Digits come from the scalar
plus h = sum 2^(c-1) 2^(c j): its digits less 2^(c-1) are those of the scalar, without carries; msm_recode adds h.

    _sort         sort entries by bucket: count, prefix sum, distribute. An entry is the index of its point, bit 31 the
                  sign.
    _first_round  pair entries k and k + h of each bucket, h half of its size rounded up. Sums go to slots, h per
                  bucket; the last entry of an odd number is copied to its slot.
    _next_round   pair slots k and k + h of each bucket, in place.

Each round halves every bucket, regardless of their sizes, until all have one slot; its additions are independent and
share inversions. Slot 0 is infinity, the sum of an empty bucket.

All times depend on scalars and points.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch as curve_launch
from accelerant.algebra.curve import llvm_kernels
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.llvm_kernels import entry_functions, host_form, packed_field
from accelerant.algebra.field.llvm_packed import PackedField
from accelerant.algebra.field.memory_space import HOST
from accelerant.errors import ConfigError, OutOfMemory, ShapeError, UnsupportedCase
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.compilation.llvm import NOINLINE, FunctionBuilder, Value, constant, program
from accelerant.runtime.host import usable_cores
from accelerant.runtime.ledger import launch
from accelerant.runtime.time_limit import check_time, is_limited

SIGN = 1 << 31  # Bit of an entry whose point is subtracted
PACKS = 512  # packs of pairs that share an inversion; their scratch is 320 KiB on BN254
_INLINED = 4  # most words of coordinates whose products are inlined: 12% faster, slow to compile
_LINE = 64  # Bytes of a cache line
TASK = 7  # i64s of a task: windows first, end, points first, end, sets, first partial sum, step
SIZES = ("tasks", "n", "bits", "buckets", "step", "stride", "scratch")  # i64s in `sizes`, of which a worker's

_LEAST_SHARES = {"msm_enter": 1024, "msm_recode": 4096, "msm_sum": 1, "msm_finish": 1 << 62}


@functools.cache
def kernel_source(curve: str, entry: str, form: str = "") -> KernelSource:
    """Return the kernel of one entry; raises ConfigError for an unknown one."""
    if entry.removeprefix("msm_") not in _ENTRIES:
        raise ConfigError(f"unknown entry {entry!r}; known are {', '.join(f'msm_{known}' for known in _ENTRIES)}")
    arguments, _ = _ENTRIES[entry.removeprefix("msm_")]
    kinds = tuple(f"*{_POINTERS[a]}" if a in _POINTERS else "i64" for a in arguments)
    builder = llvm_kernels.curve_program(_text, curve, entry, form, _LEAST_SHARES[entry])
    return KernelSource("_".join(filter(None, (entry, curve, form))), {"llvm": builder}, {entry: kinds}, targets=())


@functools.cache
def _text(name: str, entry: str, kind: str) -> str:
    curve = curve_of(name)
    form = packed_field(curve.coordinates.base, kind)
    parts = [] if entry == "msm_recode" else list(llvm_kernels.functions(name, kind))
    if entry == "msm_sum":
        parts += [_pairs(curve, form), _copy(curve, form)]
    return program([*parts, *entry_functions("msm", _ENTRIES, entry, _POINTERS, curve, form)])


# --- buckets ---------------------------------------------------------------------------------------------------------
class WorkerMemory(NamedTuple):
    """Pointers to a worker's arrays, of i32 except `points`."""

    ends: str  # per bucket, set by set, including 0: end of its entries, the start of the next
    slots: str  # per bucket: its first slot
    left: str  # per bucket: its number of slots that are not summed yet
    single: str  # entries left over in the first round, at most one per bucket
    single_slot: str  # their slots
    entries: str  # all entries of the task, by bucket
    a: str  # sources of pairs, entries or slots
    b: str  # likewise
    z: str  # slots of their sums
    points: str  # slots, affine points


class _Task(NamedTuple):
    """The i64 values of a task: ranges of windows and points, and 2^(bits - 1) buckets in each set."""

    windows: tuple[str, str]
    points: tuple[str, str]
    stride: str  # distance of a window's multiples of the points from the previous window's, or 0 without multiples
    n: str  # number of points, the length of a column of words
    bits: str
    buckets: str
    sets: str
    step: str  # distance between two windows' sets in WorkerMemory: buckets + 1, or 0 where all windows share one set

    def all_buckets(self, code: FunctionBuilder) -> str:
        """Return the number of buckets of all sets, including each set's bucket 0."""
        return code.i64("mul", self.sets, code.i64("add", self.buckets, 1))


def _load(code: FunctionBuilder, pointer: str, index: str | int) -> Value:
    return code.convert("zext", code.load("i32", pointer, index), "i64")


def _store(code: FunctionBuilder, value: str, pointer: str, index: str | int) -> None:
    code.store("i32", code.convert("trunc", Value(value, "i64"), "i32"), pointer, index)


def _sort(code: FunctionBuilder, task: _Task, work: WorkerMemory, columns: str) -> None:
    """Fill work.ends and work.entries; bucket 0, of zero digits, comes first in each set."""
    after = task.all_buckets(code)
    size = code.i64("mul", after, 4)
    zero, volatile = constant("i8", 0), constant("i1", False)
    code.intrinsic("void", "llvm.memset.p0.i64", work.ends, zero, size, volatile)
    mask = code.i64("sub", code.i64("shl", 1, task.bits), 1)
    for distribute in (False, True):
        with code.loop(*task.windows) as window:
            # A digit lies in one or two words, of two columns
            at = code.i64("mul", window, task.bits)
            low_column = code.at("i64", columns, code.i64("mul", code.i64("lshr", at, 6), task.n))
            high_column, shift = code.at("i64", low_column, task.n), code.i64("and", at, 63)
            base = code.i64("mul", window, task.stride)
            first = code.i64("mul", code.i64("sub", window, task.windows[0]), task.step)
            with code.loop(*task.points) as i:
                low, high = code.load("i64", low_column, i), code.load("i64", high_column, i)
                word = code.intrinsic("i64", "llvm.fshr.i64", high, low, shift)
                digit = code.i64("sub", code.i64("and", word, mask), task.buckets)
                negative = code.i64("ashr", digit, 63)  # all ones, or 0
                magnitude = code.i64("sub", code.i64("xor", digit, negative), negative)
                bucket = code.i64("add", first, magnitude)
                position = _load(code, work.ends, bucket)
                _store(code, code.i64("add", position, 1), work.ends, bucket)
                if distribute:
                    sign = code.i64("and", negative, SIGN)
                    entry = code.i64("or", code.i64("add", base, i), sign)
                    _store(code, entry, work.entries, position)
        if not distribute:
            total = code.variable("i64", "0")
            with code.loop(0, after) as bucket:
                count = _load(code, work.ends, bucket)
                _store(code, total.get(), work.ends, bucket)
                total.set(code.i64("add", total.get(), count))


def _first_round(code: FunctionBuilder, task: _Task, work: WorkerMemory) -> tuple[str, str]:
    """Fill work.slots, work.left, the pairs and the entries left over; return the numbers of pairs and of those."""
    slot, pairs, singles = (code.variable("i64", first) for first in ("1", "0", "0"))
    begin = code.variable("i64", "0")
    with code.loop(0, task.sets) as number:
        zero = code.i64("mul", number, code.i64("add", task.buckets, 1))
        _store(code, "0", work.left, zero)
        begin.set(_load(code, work.ends, zero))
        first = code.i64("add", zero, 1)
        with code.loop(first, code.i64("add", first, task.buckets)) as bucket:
            start, end = begin.get(), _load(code, work.ends, bucket)
            size, slot_before, pairs_before = code.i64("sub", end, start), slot.get(), pairs.get()
            half, count = code.i64("lshr", code.i64("add", size, 1), 1), code.i64("lshr", size, 1)
            _store(code, code.select(code.compare("eq", size, 0), 0, slot_before), work.slots, bucket)
            _store(code, half, work.left, bucket)
            with code.loop(0, count) as k:
                here = code.i64("add", start, k)
                pair = code.i64("add", pairs_before, k)
                _store(code, _load(code, work.entries, here), work.a, pair)
                _store(code, _load(code, work.entries, code.i64("add", here, half)), work.b, pair)
                _store(code, code.i64("add", slot_before, k), work.z, pair)
            with code.when(code.compare("ne", half, count)):
                alone = singles.get()
                _store(code, _load(code, work.entries, code.i64("add", start, count)), work.single, alone)
                _store(code, code.i64("add", slot_before, count), work.single_slot, alone)
                singles.set(code.i64("add", alone, 1))
            pairs.set(code.i64("add", pairs_before, count))
            slot.set(code.i64("add", slot_before, half))
            begin.set(end)
    return pairs.get(), singles.get()


def _next_round(code: FunctionBuilder, task: _Task, work: WorkerMemory) -> str:
    """Fill the pairs and lower work.left; return the number of pairs, 0 once each bucket has at most one slot."""
    pairs = code.variable("i64", "0")
    with code.loop(1, task.all_buckets(code)) as bucket:
        size = _load(code, work.left, bucket)
        with code.when(code.compare("ugt", size, 1)):
            half = code.i64("lshr", code.i64("add", size, 1), 1)
            _store(code, half, work.left, bucket)
            first, at = _load(code, work.slots, bucket), pairs.get()
            count = code.i64("sub", size, half)
            with code.loop(0, count) as k:
                here, pair = code.i64("add", first, k), code.i64("add", at, k)
                _store(code, here, work.a, pair)
                _store(code, code.i64("add", here, half), work.b, pair)
                _store(code, here, work.z, pair)
            pairs.set(code.i64("add", at, count))
    return pairs.get()


# --- entries ---------------------------------------------------------------------------------------------------------
def _enter(curve: Curve[Any], form: PackedField, code: FunctionBuilder) -> None:
    k = llvm_kernels.Elements(curve.coordinates, form, code)
    stop = code.smin("%end", "%n")
    with code.loop("%begin", stop, form.lanes) as i:
        lanes = llvm_kernels.Lanes(k, i, stop)
        x, z = (lanes.pointers(pointer, 2 * k.size) for pointer in ("%x", "%z"))
        entered = [llvm_kernels.from_memory(k, k.read(x, part)) for part in range(2)]
        for part, element in enumerate(entered):
            k.write(z, part, element)


def _recode(curve: Curve[Any], form: PackedField, code: FunctionBuilder) -> None:
    shift = code.load("i320", "%shift", align=8)
    with code.loop("%begin", code.smin("%end", "%n")) as i:
        scalar = code.load("i256", code.at("[4 x i64]", "%scalars", i), align=8)
        total = code.op("add", code.convert("zext", scalar, "i320"), shift)
        for word in range(6):
            value = code.convert("trunc", code.op("lshr", total, 64 * word), "i64") if word < 5 else "0"
            code.store("i64", value, "%columns", code.i64("add", code.i64("mul", "%n", word), i))


def _sum(curve: Curve[Any], form: PackedField, code: FunctionBuilder) -> None:
    k = llvm_kernels.Elements(curve.coordinates, form, code)
    size = {name: code.load("i64", "%sizes", i) for i, name in enumerate(SIZES)}
    with code.loop("%begin", "%end") as worker:
        base = code.at("i8", "%scratch", code.i64("mul", worker, size["scratch"]))
        arrays = [code.at("i8", base, code.load("i64", "%offsets", i)) for i in range(len(WorkerMemory._fields) + 1)]
        work, batch = WorkerMemory(*arrays[:-1]), arrays[-1]
        slots = [work.points] * form.lanes
        k.write(slots, 0, k.zero)
        k.write(slots, 1, k.zero)
        number = code.variable("i64", code("atomicrmw add ptr %next, i64 1 monotonic", "i64"))
        with code.loop_while(lambda: code.compare("slt", number.get(), size["tasks"])):
            first = code.i64("mul", number.get(), TASK)
            row = [code.load("i64", "%tasks", code.i64("add", first, i)) for i in range(TASK)]
            common = {name: size[name] for name in ("stride", "n", "bits", "buckets", "step")}
            task = _Task(windows=(row[0], row[1]), points=(row[2], row[3]), sets=row[4], **common)
            _sort(code, task, work, "%columns")
            _add_up(k, task, work, batch)
            with code.loop(0, task.sets) as one:
                partial = code.i64("add", row[5], code.i64("mul", one, row[6]))
                address = code.at("i8", "%partials", code.i64("mul", partial, 3 * k.size))
                zero = code.i64("mul", one, code.i64("add", task.buckets, 1))
                _weight(k, task, work, zero, address)
            number.set(code("atomicrmw add ptr %next, i64 1 monotonic", "i64"))


def _add_up(k: llvm_kernels.Elements, task: _Task, work: WorkerMemory, batch: str) -> None:
    """Add in rounds until each bucket has one slot."""
    code = k.code

    def add_pairs(source: str, count: str) -> None:
        arrays = ", ".join(f"ptr {pointer}" for pointer in (source, work.points, work.a, work.b, work.z, batch))
        code.do(f"call void @msm_pairs({arrays}, i64 {count})")

    count, singles = _first_round(code, task, work)
    add_pairs("%points", count)
    arrays = f"ptr %points, ptr {work.points}, ptr {work.single}, ptr {work.single_slot}"
    code.do(f"call void @msm_copy({arrays}, i64 {singles})")
    pairs = code.variable("i64", _next_round(code, task, work))
    with code.loop_while(lambda: code.compare("ne", pairs.get(), 0)):
        add_pairs(work.points, pairs.get())
        pairs.set(_next_round(code, task, work))


def _signed(k: llvm_kernels.Elements, array: str, indices: Sequence[str]) -> tuple[list[str], str]:
    """Return the point indices of a pack of entries, and the mask of their signs."""
    code, packs = k.code, k.packs
    entries = [_load(code, array, index) for index in indices]
    sign = code.compare("uge", packs.joined(code, entries), SIGN)
    return [code.i64("and", entry, SIGN - 1) for entry in entries], sign


def _point_addresses(k: llvm_kernels.Elements, base: str, numbers: Sequence[str]) -> list[str]:
    return [k.code.at("i8", base, k.code.i64("mul nsw", number, 2 * k.size)) for number in numbers]


def _signed_y(k: llvm_kernels.Elements, addresses: Sequence[str], sign: str) -> llvm_kernels.Element:
    """Read y, or -y where the sign is set."""
    y = k.read(addresses, 1)
    return k.select(sign, k.neg(y), y)


def _pairs(curve: Curve[Any], form: PackedField) -> FunctionBuilder:
    """Build msm_pairs(source, target, a, b, z, batch, count): target[z[i]] = +-source[a[i]] +- source[b[i]]."""
    arguments = [*(f"ptr %{name}" for name in ("source", "target", "a", "b", "z", "batch")), "i64 %count"]
    code = FunctionBuilder("msm_pairs", arguments, attributes=NOINLINE)
    small = curve.coordinates.degree == 1 and form.field.limbs <= _INLINED
    k = llvm_kernels.Elements(curve.coordinates, form, code, calls=not small)
    block = PACKS * form.lanes
    denominators = code.at(form.type, "%batch", PACKS * k.degree)
    scratch = llvm_kernels.Scratch("%batch", denominators, code.at(form.type, denominators, PACKS * k.degree))
    with code.loop(0, "%count", block) as base:
        last = code.smin(code.i64("add nsw", base, block), "%count")
        rounded = code.i64("add nsw", code.i64("sub nsw", last, base), form.lanes - 1)

        def pair(i: str) -> llvm_kernels.Pair:
            indices = llvm_kernels.Lanes(k, code.i64("add nsw", base, code.i64("mul nsw", i, form.lanes)), last).indices
            sources, signs = [], []
            for array in ("%a", "%b"):
                numbers, sign = _signed(k, array, indices)
                sources.append(_point_addresses(k, "%source", numbers))
                signs.append(sign)
            target = _point_addresses(k, "%target", _signed(k, "%z", indices)[0])

            def ys() -> tuple[llvm_kernels.Element, llvm_kernels.Element]:
                return _signed_y(k, sources[0], signs[0]), _signed_y(k, sources[1], signs[1])

            def write(x: llvm_kernels.Element, y: llvm_kernels.Element) -> None:
                k.write(target, 0, x)
                k.write(target, 1, y)

            def fetch() -> None:
                for address in (*sources[0], *sources[1]):
                    for line in range(0, 2 * k.size, _LINE):
                        read, locality, data = (constant("i32", value) for value in (0, 3, 1))
                        code.intrinsic("void", "llvm.prefetch.p0", code.at("i8", address, line), read, locality, data)

            return llvm_kernels.Pair(lambda: (k.read(sources[0], 0), k.read(sources[1], 0)), ys, write, fetch)

        llvm_kernels.batch_add(k, code.i64("sdiv", rounded, form.lanes), pair, scratch, form.radix)
    code.ret()
    return code


def _copy(curve: Curve[Any], form: PackedField) -> FunctionBuilder:
    """Build msm_copy(source, target, a, z, count): target[z[i]] = +-source[a[i]]."""
    arguments = [*(f"ptr %{name}" for name in ("source", "target", "a", "z")), "i64 %count"]
    code = FunctionBuilder("msm_copy", arguments, attributes=NOINLINE)
    k = llvm_kernels.Elements(curve.coordinates, form, code)
    with code.loop(0, "%count", form.lanes) as i:
        indices = llvm_kernels.Lanes(k, i, "%count").indices
        numbers, sign = _signed(k, "%a", indices)
        source = _point_addresses(k, "%source", numbers)
        target = _point_addresses(k, "%target", _signed(k, "%z", indices)[0])
        x, y = k.read(source, 0), _signed_y(k, source, sign)
        k.write(target, 0, x)
        k.write(target, 1, y)
    code.ret()
    return code


def _weight(k: llvm_kernels.Elements, task: _Task, work: WorkerMemory, zero: str, partial: str) -> None:
    """Write the sum of b times bucket b of the set whose bucket 0 is at `zero`.

    Lane l has the buckets b = lanes j + l + 1. From the highest j down, R = R + bucket and S = S + R give S, the sum of
    j + 1 times a bucket, so the result is lanes S - (lanes - 1 - l) R, summed over the lanes.
    """
    code, lanes = k.code, k.packed.lanes
    running, total, bucket = k.space(3), k.space(3), k.space(2)
    _set_infinity(k, running, total)
    with code.countdown(code.i64("sdiv", task.buckets, lanes)) as j:
        first = code.i64("add", zero, code.i64("add", code.i64("mul", j, lanes), 1))
        slots = [_load(code, work.slots, code.i64("add", first, lane)) for lane in range(lanes)]
        addresses = _point_addresses(k, work.points, slots)
        for i in range(2):
            k.store(bucket, i, k.read(addresses, i))
        code.do(f"call void @point_add_affine(ptr {running}, ptr {running}, ptr {bucket})")
        code.do(f"call void @point_add(ptr {total}, ptr {total}, ptr {running})")
    if lanes > 1:
        _join_lanes(k, running, total)
    for i in range(3):
        k.write([partial] * lanes, i, k.load(total, i))


def _join_lanes(k: llvm_kernels.Elements, running: str, total: str) -> None:
    """Set total, in all lanes, to the sum over lanes l of lanes S - (lanes - 1 - l) R, S in total and R in running."""
    code, packs, lanes = k.code, k.packs, k.packed.lanes
    weighted, chosen = k.space(3), k.space(3)
    infinity = (k.zero, k.one, k.zero)
    _set_infinity(k, weighted)
    for bit in reversed(range((lanes - 1).bit_length())):
        code.do(f"call void @point_double(ptr {weighted}, ptr {weighted})")
        code.do(f"call void @point_double(ptr {total}, ptr {total})")
        mask = packs.lanes([bool(lanes - 1 - lane >> bit & 1) for lane in range(lanes)])
        for i, other in enumerate(infinity):
            k.store(chosen, i, k.select(mask, k.load(running, i), other))
        code.do(f"call void @point_add(ptr {weighted}, ptr {weighted}, ptr {chosen})")
    k.store(weighted, 1, k.neg(k.load(weighted, 1)))
    code.do(f"call void @point_add(ptr {total}, ptr {total}, ptr {weighted})")
    step = lanes // 2
    while step:
        for i in range(3):
            k.store(chosen, i, tuple(packs.rotated(code, pack, step) for pack in k.load(total, i)))
        code.do(f"call void @point_add(ptr {total}, ptr {total}, ptr {chosen})")
        step //= 2


def _set_infinity(k: llvm_kernels.Elements, *points: str) -> None:
    for point in points:
        for i, element in enumerate((k.zero, k.one, k.zero)):
            k.store(point, i, element)


def _finish(curve: Curve[Any], form: PackedField, code: FunctionBuilder) -> None:
    """Build Horner's rule; all lanes compute the same."""
    k = llvm_kernels.Elements(curve.coordinates, form, code)
    total, partial = k.space(3), k.space(3)
    _set_infinity(k, total)
    with code.loop(0, "%count") as t:
        with code.loop(0, code.load("i64", "%doublings", t)):
            code.do(f"call void @point_double(ptr {total}, ptr {total})")
        address = code.at("i8", "%partials", code.i64("mul", t, 3 * k.size))
        for i in range(3):
            k.store(partial, i, k.read([address] * form.lanes, i))
        code.do(f"call void @point_add(ptr {total}, ptr {total}, ptr {partial})")
    llvm_kernels.store_affine(k, total, ["%z"] * form.lanes)


_POINTERS = {
    **dict.fromkeys(("x", "z", "points", "partials", "scalars", "columns", "shift"), "u64"),
    **dict.fromkeys(("tasks", "next", "offsets", "doublings", "sizes"), "i64"),
    "scratch": "u8",
}
_ENTRIES: Mapping[str, tuple[tuple[str, ...], Callable[[Curve[Any], PackedField, FunctionBuilder], None]]] = {
    "enter": (("x", "z", "n"), _enter),
    "recode": (("scalars", "columns", "shift", "n"), _recode),
    "sum": (("points", "columns", "tasks", "next", "scratch", "offsets", "partials", "sizes"), _sum),
    "finish": (("partials", "doublings", "z", "count"), _finish),
}


# --- sums ------------------------------------------------------------------------------------------------------------
U64 = npt.NDArray[np.uint64]

_TASK_POINTS = 1 << 20  # Largest number of points of a task, whose memory is about 50 bytes a point on BN254 G1
_GROUP_POINTS = 1 << 14  # most points times windows of a task with several windows
_RANGE_POINTS = 256  # Smallest range of points that is split off to occupy a core
_MULTIPLES_SHARE = 0.125  # Largest share of the free memory that multiples take
_SCRATCH_SHARE, _SMALL_SCRATCH_BYTES = 0.5, 1 << 26  # most of the free memory for scratch; bytes not asked for
_WINDOWS = range(4, 19)  # bits of a digit: a pack has eight buckets; larger sets leave the cache
_ADDITION, _WEIGHTING = 6, 26  # Products of coordinates per point and window, and per bucket
_ENTRIES_BETWEEN_CHECKS = 1 << 20  # points times windows summed between two checks of a time limit

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
        """Return the tasks (tasks, TASK) of msm_sum; partial sums go by window from the highest, then range."""
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
            if (stop := bases.n + len(chunk)) > limit or limit >= SIGN:
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
            "tasks": len(tasks.rows), "n": self.n, "bits": plan.bits, "buckets": 1 << plan.bits - 1,
            "step": 0 if plan.shared else tasks.step, "stride": self.n if plan.shared else 0, "scratch": tasks.scratch,
        }  # fmt: skip
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
