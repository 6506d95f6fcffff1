"""The CPU's kernels of multi-scalar multiplication, LLVM IR over either form of arithmetic.

Points and elements between these entries are in the form's own Montgomery representation (x L; in memory it is x R),
words as everywhere: so a product loads what it needs without a shift.

    msm_enter    (x, z, n)                                    points x R to x L; z may be x
    msm_recode   (scalars, columns, shift, n)                 column w, of n words, has word w of scalar + shift (five
                                                              words), w = 0 to 5
    msm_sum      (points, columns, tasks, next, scratch, offsets, partials, sizes)
                 an index is a worker. Workers take tasks (llvm_buckets.py) from `next` until there are none; task t
                 gives for each set of buckets a partial sum of digits times points, projective
    msm_finish   (partials, doublings, count, z)              z = sum of partials, doubled doublings[t] times before
                                                              number t is added; one point, affine, x R

All times depend on scalars and points.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerant.algebra.curve.llvm_kernels import CurveKernels, from_memory, lanes_from, store_affine
from accelerant.algebra.curve.llvm_points import Element, Elements, Pair, Scratch, batch_add, functions
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.llvm_kernels import packed_field
from accelerant.algebra.field.llvm_packed import PackedField
from accelerant.errors import ConfigError
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.compilation.llvm import NOINLINE, FunctionBuilder, constant, program
from accelerant.zk.msm.llvm_buckets import SIGN, Task, Work, first_round, next_round, sort

__all__ = ["PACKS", "SIZES", "TASK", "MsmKernels", "kernel_source"]

PACKS = 512
"""Packs of pairs that share an inversion, some 330 products; what they keep is 320 KiB on BN254 in lanes of eight."""

_INLINED = 4
"""Words of coordinates whose products are written out in additions of points: 12 % faster, and half a second more to
compile; of longer ones they are called."""

_LINE = 64
"""Bytes of a cache line."""

TASK = 7
"""Numbers, i64, of a task: its first window and the one after the last, its first point and the one after the last,
its sets of buckets, the partial sum of the first set, and the step to the next one's."""

SIZES = ("tasks", "n", "bits", "buckets", "step", "stride", "scratch")
"""The numbers, i64, that `sizes` has: how many tasks; how many points; see Task; bytes of a worker's scratch."""

_LEAST_SHARES = {"msm_enter": 1024, "msm_recode": 4096, "msm_sum": 1, "msm_finish": 1 << 62}


@dataclass(frozen=True, slots=True)
class MsmKernels(CurveKernels):
    """A Builder of one of the module's entries; attributes as CurveKernels."""

    @property
    def least_share(self) -> int:
        """Indices that are worth another thread."""
        return _LEAST_SHARES[self.entry]

    def build(self, target: str) -> str:
        """LLVM IR.

        Raises:
            ConfigError: unknown curve, entry or form.
        """
        return _text(self.curve, self.entry, self.chosen_form)


@functools.cache
def kernel_source(curve: str, entry: str, form: str = "") -> KernelSource:
    """One entry, for the CPU.

    Raises:
        ConfigError: there is no such entry.
    """
    if entry not in _ENTRIES:
        raise ConfigError(f"unknown entry {entry!r}; known are {', '.join(_ENTRIES)}")
    kinds = tuple(f"*{_POINTERS[a]}" if a in _POINTERS else "i64" for a in _ENTRIES[entry][0])
    return KernelSource(f"{entry}_{curve}", {"llvm": MsmKernels(curve, entry, form)}, {entry: kinds}, targets=())


@functools.cache
def _text(name: str, entry: str, kind: str) -> str:
    curve = curve_of(name)
    form = packed_field(curve.coordinates.base, kind)
    arguments, write = _ENTRIES[entry]
    typed = [f"ptr %{a}" if a in _POINTERS else f"i64 %{a}" for a in ("begin", "end", *arguments)]
    code = FunctionBuilder(entry, typed, linkage="", attributes="nounwind")
    write(curve, form, code)
    code.ret()
    parts = [] if entry == "msm_recode" else list(functions(name, kind))
    if entry == "msm_sum":
        parts += [_pairs(curve, form), _copy(curve, form)]
    return program([*parts, code])


# --- entries ---------------------------------------------------------------------------------------------------------


def _enter(curve: Curve[Any], form: PackedField, code: FunctionBuilder) -> None:
    k = Elements(curve.coordinates, form, code)
    stop = code.smin("%end", "%n")
    with code.loop("%begin", stop, form.lanes) as i:
        lanes = lanes_from(k, i, stop)
        x, z = (lanes.pointers(pointer, 2 * k.size) for pointer in ("%x", "%z"))
        entered = [from_memory(k, k.read(x, part)) for part in range(2)]
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
    k = Elements(curve.coordinates, form, code)
    size = {name: code.load("i64", "%sizes", i) for i, name in enumerate(SIZES)}
    with code.loop("%begin", "%end") as worker:
        base = code.at("i8", "%scratch", code.i64("mul", worker, size["scratch"]))
        places = [code.at("i8", base, code.load("i64", "%offsets", i)) for i in range(len(Work.names()) + 1)]
        work, batch = Work(*places[:-1]), places[-1]
        slots = [work.points] * form.lanes
        k.write(slots, 0, k.zero)
        k.write(slots, 1, k.zero)
        number = code.variable("i64", code("atomicrmw add ptr %next, i64 1 monotonic", "i64"))
        with code.loop_while(lambda: code.compare("slt", number.get(), size["tasks"])):
            t = number.get()
            first = code.i64("mul", t, TASK)
            row = [code.load("i64", "%tasks", code.i64("add", first, i)) for i in range(TASK)]
            task = Task(
                windows=(row[0], row[1]),
                points=(row[2], row[3]),
                stride=size["stride"],
                n=size["n"],
                bits=size["bits"],
                buckets=size["buckets"],
                sets=row[4],
                step=size["step"],
            )
            sort(code, task, work, "%columns")
            _add_up(k, task, work, batch)
            with code.loop(0, task.sets) as one:
                partial = code.i64("add", row[5], code.i64("mul", one, row[6]))
                place = code.at("i8", "%partials", code.i64("mul", partial, 3 * k.size))
                zero = code.i64("mul", one, code.i64("add", task.buckets, 1))
                _weigh(k, task, work, zero, place)
            number.set(code("atomicrmw add ptr %next, i64 1 monotonic", "i64"))


def _add_up(k: Elements, task: Task, work: Work, batch: str) -> None:
    """Rounds of additions, until a bucket has one slot."""
    code = k.code

    def add_pairs(source: str, count: str) -> None:
        arrays = ", ".join(f"ptr {pointer}" for pointer in (source, work.points, work.a, work.b, work.z, batch))
        code.do(f"call void @msm_pairs({arrays}, i64 {count})")

    count, singles = first_round(code, task, work)
    add_pairs("%points", count)
    arrays = ", ".join(f"ptr {pointer}" for pointer in ("%points", work.points, work.single, work.place))
    code.do(f"call void @msm_copy({arrays}, i64 {singles})")
    pairs = code.variable("i64", next_round(code, task, work))
    with code.loop_while(lambda: code.compare("ne", pairs.get(), 0)):
        add_pairs(work.points, pairs.get())
        pairs.set(next_round(code, task, work))


def _signed(k: Elements, array: str, indices: Sequence[str]) -> tuple[list[str], str]:
    """The numbers of a pack of entries, and the mask of their signs."""
    code, packs = k.code, k.packs
    entries = [code.convert("zext", code.load("i32", array, index), "i64") for index in indices]
    sign = code.compare("uge", packs.joined(code, entries), SIGN)
    return [code.i64("and", entry, SIGN - 1) for entry in entries], sign


def _at(k: Elements, base: str, numbers: Sequence[str]) -> list[str]:
    """Addresses of affine points."""
    return [k.code.at("i8", base, k.code.i64("mul nsw", number, 2 * k.size)) for number in numbers]


def _ordinate(k: Elements, places: Sequence[str], sign: str) -> Element:
    """Y, or -y where the sign is set."""
    y = k.read(places, 1)
    return k.select(sign, k.neg(y), y)


def _pairs(curve: Curve[Any], form: PackedField) -> FunctionBuilder:
    """msm_pairs(source, target, a, b, z, batch, count): target[z[i]] = +-source[a[i]] +- source[b[i]], each at once."""
    arguments = [*(f"ptr %{name}" for name in ("source", "target", "a", "b", "z", "batch")), "i64 %count"]
    code = FunctionBuilder("msm_pairs", arguments, attributes=NOINLINE)
    small = curve.coordinates.degree == 1 and form.field.limbs <= _INLINED
    k = Elements(curve.coordinates, form, code, calls=not small)
    block = PACKS * form.lanes
    denominators = code.at(form.type, "%batch", PACKS * k.degree)
    scratch = Scratch("%batch", denominators, code.at(form.type, denominators, PACKS * k.degree))
    with code.loop(0, "%count", block) as base:
        last = code.smin(code.i64("add nsw", base, block), "%count")
        rounded = code.i64("add nsw", code.i64("sub nsw", last, base), form.lanes - 1)

        def pair(i: str) -> Pair:
            indices = lanes_from(k, code.i64("add nsw", base, code.i64("mul nsw", i, form.lanes)), last).indices
            sources, signs = [], []
            for array in ("%a", "%b"):
                numbers, sign = _signed(k, array, indices)
                sources.append(_at(k, "%source", numbers))
                signs.append(sign)
            target = _at(k, "%target", _signed(k, "%z", indices)[0])

            def ys() -> tuple[Element, Element]:
                return _ordinate(k, sources[0], signs[0]), _ordinate(k, sources[1], signs[1])

            def write(x: Element, y: Element) -> None:
                k.write(target, 0, x)
                k.write(target, 1, y)

            def fetch() -> None:
                for place in (*sources[0], *sources[1]):
                    for line in range(0, 2 * k.size, _LINE):
                        read, locality, data = (constant("i32", value) for value in (0, 3, 1))
                        code.intrinsic("void", "llvm.prefetch.p0", code.at("i8", place, line), read, locality, data)

            return Pair(lambda: (k.read(sources[0], 0), k.read(sources[1], 0)), ys, write, fetch)

        batch_add(k, code.i64("sdiv", rounded, form.lanes), pair, scratch, form.radix)
    code.ret()
    return code


def _copy(curve: Curve[Any], form: PackedField) -> FunctionBuilder:
    """msm_copy(source, target, a, z, count): target[z[i]] = +-source[a[i]]."""
    arguments = [*(f"ptr %{name}" for name in ("source", "target", "a", "z")), "i64 %count"]
    code = FunctionBuilder("msm_copy", arguments, attributes=NOINLINE)
    k = Elements(curve.coordinates, form, code)
    with code.loop(0, "%count", form.lanes) as i:
        indices = lanes_from(k, i, "%count").indices
        numbers, sign = _signed(k, "%a", indices)
        source, target = _at(k, "%source", numbers), _at(k, "%target", _signed(k, "%z", indices)[0])
        x, y = k.read(source, 0), _ordinate(k, source, sign)
        k.write(target, 0, x)
        k.write(target, 1, y)
    code.ret()
    return code


def _weigh(k: Elements, task: Task, work: Work, zero: str, partial: str) -> None:
    """Write the sum of b times bucket b, of the set whose bucket 0 is at `zero`.

    Lane l has the buckets b = lanes j + l + 1. From the highest j down, R = R + bucket and S = S + R give the sums of
    j + 1 times a bucket, so what is wanted is lanes S - (lanes - 1 - l) R, added up over the lanes.
    """
    code, lanes = k.code, k.packed.lanes
    running, total, bucket = k.space(3), k.space(3), k.space(2)
    _set_infinity(k, running, total)
    with code.countdown(code.i64("sdiv", task.buckets, lanes)) as j:
        first = code.i64("add", zero, code.i64("add", code.i64("mul", j, lanes), 1))
        slots = [
            code.convert("zext", code.load("i32", work.slots, code.i64("add", first, lane)), "i64")
            for lane in range(lanes)
        ]
        places = _at(k, work.points, slots)
        for i in range(2):
            k.store(bucket, i, k.read(places, i))
        code.do(f"call void @point_add_affine(ptr {running}, ptr {running}, ptr {bucket})")
        code.do(f"call void @point_add(ptr {total}, ptr {total}, ptr {running})")
    if lanes > 1:
        _join_lanes(k, running, total)
    for i in range(3):
        k.write([partial] * lanes, i, k.load(total, i))


def _join_lanes(k: Elements, running: str, total: str) -> None:
    """Total = the sum over the lanes of lanes S - (lanes - 1 - l) R, S in total and R in running; all lanes have it."""
    code, packs, lanes = k.code, k.packs, k.packed.lanes
    weighed, chosen = k.space(3), k.space(3)
    infinity = (k.zero, k.one, k.zero)
    _set_infinity(k, weighed)
    for bit in reversed(range((lanes - 1).bit_length())):
        code.do(f"call void @point_double(ptr {weighed}, ptr {weighed})")
        code.do(f"call void @point_double(ptr {total}, ptr {total})")
        mask = packs.lanes([bool(lanes - 1 - lane >> bit & 1) for lane in range(lanes)])
        for i, other in enumerate(infinity):
            k.store(chosen, i, k.select(mask, k.load(running, i), other))
        code.do(f"call void @point_add(ptr {weighed}, ptr {weighed}, ptr {chosen})")
    k.store(weighed, 1, k.neg(k.load(weighed, 1)))
    code.do(f"call void @point_add(ptr {total}, ptr {total}, ptr {weighed})")
    step = lanes // 2
    while step:
        for i in range(3):
            k.store(chosen, i, tuple(packs.rotated(code, pack, step) for pack in k.load(total, i)))
        code.do(f"call void @point_add(ptr {total}, ptr {total}, ptr {chosen})")
        step //= 2


def _set_infinity(k: Elements, *points: str) -> None:
    for point in points:
        for i, element in enumerate((k.zero, k.one, k.zero)):
            k.store(point, i, element)


def _finish(curve: Curve[Any], form: PackedField, code: FunctionBuilder) -> None:
    """Horner's rule, in every lane the same."""
    k = Elements(curve.coordinates, form, code)
    total, partial = k.space(3), k.space(3)
    _set_infinity(k, total)
    with code.loop(0, "%count") as t:
        with code.loop(0, code.load("i64", "%doublings", t)):
            code.do(f"call void @point_double(ptr {total}, ptr {total})")
        place = code.at("i8", "%partials", code.i64("mul", t, 3 * k.size))
        for i in range(3):
            k.store(partial, i, k.read([place] * form.lanes, i))
        code.do(f"call void @point_add(ptr {total}, ptr {total}, ptr {partial})")
    store_affine(k, total, ["%z"] * form.lanes)


_POINTERS = {
    **dict.fromkeys(("x", "z", "points", "partials", "scalars", "columns", "shift"), "u64"),
    **dict.fromkeys(("tasks", "next", "offsets", "doublings", "sizes"), "i64"),
    "scratch": "u8",
}
_ENTRIES: Mapping[str, tuple[tuple[str, ...], Callable[[Curve[Any], PackedField, FunctionBuilder], None]]] = {
    "msm_enter": (("x", "z", "n"), _enter),
    "msm_recode": (("scalars", "columns", "shift", "n"), _recode),
    "msm_sum": (("points", "columns", "tasks", "next", "scratch", "offsets", "partials", "sizes"), _sum),
    "msm_finish": (("partials", "doublings", "count", "z"), _finish),
}
