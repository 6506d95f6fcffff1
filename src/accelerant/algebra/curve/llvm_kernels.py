"""The CPU's curve kernels: LLVM IR of the entries of one curve, in scalar or vector form.

An entry processes the indices [begin, end) that are below n; see runtime/providers/cpu.py. A point is affine, x then y
(over Fq2 c0 then c1), in Montgomery form x R mod q with R = 2^(64 limbs), infinity all zeros.

    curve_add            (x, y, z, n)                                  any points of the curve; z may be x or y
    curve_neg            (x, z, n)                                     z may be x
    curve_mul            (x, scalars, z, n, x_step, scalar_step)       z_i = s_i x_i, for any 256-bit s_i of four
                                                                       words; steps 0 (broadcast) or 1

In the following entries an index is a chunk of `chunk` points; chunks at or above n are skipped:

    curve_off_curve      (x, first, n, chunk)     first[c]: the least index of a point not on the curve, else n
    curve_off_subgroup   (x, first, n, chunk)     the same for a point, on the curve, out of the subgroup

Coordinates are reduced. curve_neg and curve_mul have no branch and no address that depends on points or scalars;
curve_add branches on special cases, and its time depends on the points.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accelerant.algebra.curve import llvm_points
from accelerant.algebra.curve.llvm_points import Element, Elements, Pair, store_point, to_projective
from accelerant.algebra.curve.parameters import curve_of, endomorphism
from accelerant.algebra.curve.weierstrass import SCALAR_WORDS, Curve
from accelerant.algebra.field.llvm_kernels import SOURCES, entry_functions, host_form, packed_field
from accelerant.algebra.field.llvm_packed import PackedField
from accelerant.runtime.compilation.kernel import LlvmProgram
from accelerant.runtime.compilation.llvm import FunctionBuilder, Value, constant, program

Writer = Callable[[Curve[Any], PackedField, FunctionBuilder], None]

_PACKS = 256
"""Packs of pairs over Fq that share an inversion (some 330 products of 254 bits; 5M + 1S for each pack), half as many
over Fq2. Their intermediate values take at most 256 KiB of stack, for BLS12-381 in lanes of eight."""

_WINDOW = 4
"""Bits of a digit of curve_mul: a table of 16 multiples."""

_LIMB_BITS = {1: 64, 8: 52}
"""Bits of a limb of a pack in memory, by the pack's lanes: limbs are i64 or vectors of eight."""


class Lanes:
    """The indices of the lanes of the pack that begins at i, clamped to the last one, whose result is written again."""

    def __init__(self, k: Elements, i: str, stop: str) -> None:
        self._code = k.code
        last = k.code.i64("sub nsw", stop, 1)
        others = (k.code.smin(k.code.i64("add nsw", i, lane), last) for lane in range(1, k.packed.lanes))
        self.indices = [i, *others]

    def pointers(self, base: str, size: int, step: str = "") -> list[str]:
        """Append the addresses of elements of `size` bytes, at `step` times the lanes' indices."""
        code, indices = self._code, self.indices
        if step:
            indices = [code.i64("mul nsw", index, step) for index in indices]
        return [code.at("i8", base, code.i64("mul nsw", index, size)) for index in indices]


def from_memory(k: Elements, a: Element) -> Element:
    """Append the conversion from memory's Montgomery form x R to the arithmetic's own, x L."""
    return k.product(a, k.packed.radix**2 * pow(k.packed.memory_radix, -1, k.packed.field.modulus))


def _read(k: Elements, pointers: Sequence[str]) -> tuple[Element, Element]:
    """Append loads of affine points, as x L and y L."""
    return from_memory(k, k.read(pointers, 0)), from_memory(k, k.read(pointers, 1))


@contextmanager
def _each_pack(k: Elements) -> Iterator[Lanes]:
    stop = k.code.smin("%end", "%n")
    with k.code.loop("%begin", stop, k.packed.lanes) as i:
        yield Lanes(k, i, stop)


def _firsts(k: Elements, bad: Callable[[list[str]], Value]) -> None:
    """Append first[c] = the least index in chunk c whose lane bad(pointers of the points) sets, else n."""
    code, packs = k.code, k.packs
    with code.loop("%begin", "%end") as c:
        start = code.i64("mul nsw", c, "%chunk")
        with code.when(code.compare("slt", start, "%n")):
            stop = code.smin(code.i64("add nsw", start, "%chunk"), "%n")
            least = code.variable("i64", "%n")
            with code.loop(start, stop, k.packed.lanes) as i:
                lanes = Lanes(k, i, stop)
                mask = bad(lanes.pointers("%x", 2 * k.size))
                least.set(packs.least(code, mask, packs.joined(code, lanes.indices), least.get()))
            code.store("i64", least.get(), "%first", c)


def _add(curve: Curve[Any], packed: PackedField, code: FunctionBuilder) -> None:
    """Append additions in blocks of packs that share an inversion; coordinates stay in memory's form."""
    k = Elements(curve.coordinates, packed, code)
    count = _PACKS // k.degree
    size, block = 2 * k.size, count * packed.lanes
    scratch = llvm_points.Scratch(k.space(count), k.space(count), code.stack("i8", count))
    stop = code.smin("%end", "%n")
    with code.loop("%begin", stop, block) as base:
        last = code.smin(code.i64("add nsw", base, block), stop)
        rounded = code.i64("add nsw", code.i64("sub nsw", last, base), packed.lanes - 1)

        def pair(i: str) -> Pair:
            lanes = Lanes(k, code.i64("add nsw", base, code.i64("mul nsw", i, packed.lanes)), last)
            p, q, z = (lanes.pointers(pointer, size) for pointer in ("%x", "%y", "%z"))

            def write(x: Element, y: Element) -> None:
                k.write(z, 0, x)
                k.write(z, 1, y)

            return Pair(lambda: (k.read(p, 0), k.read(q, 0)), lambda: (k.read(p, 1), k.read(q, 1)), write)

        llvm_points.batch_add(k, code.i64("sdiv", rounded, packed.lanes), pair, scratch, packed.memory_radix)


def _neg(curve: Curve[Any], packed: PackedField, code: FunctionBuilder) -> None:
    k = Elements(curve.coordinates, packed, code)
    with _each_pack(k) as lanes:
        pointers, z = (lanes.pointers(pointer, 2 * k.size) for pointer in ("%x", "%z"))
        x, y = k.read(pointers, 0), k.neg(k.read(pointers, 1))
        k.write(z, 0, x)
        k.write(z, 1, y)


def _mul(curve: Curve[Any], packed: PackedField, code: FunctionBuilder) -> None:
    """Append multiplications by digits of four bits, the highest first, with a lookup that reads the whole table."""
    k = Elements(curve.coordinates, packed, code)
    packs, points, t, stride = k.packs, 1 << _WINDOW, packed.type, 3 * k.degree
    table, total, chosen = k.space(3 * points), k.space(3), k.space(3)
    digits = code.stack(packs.numbers, SCALAR_WORDS)
    with _each_pack(k) as lanes:
        base = lanes.pointers("%x", 2 * k.size, "%x_step")
        scalars = lanes.pointers("%scalars", 8 * SCALAR_WORDS, "%scalar_step")
        for word in range(SCALAR_WORDS):
            values = [code.load("i64", pointer, word) for pointer in scalars]
            code.store(packs.numbers, packs.joined(code, values), digits, word)
        store_point(k, table, (*k.infinity, *to_projective(k, _read(k, base))))
        one = code.at(t, table, stride)
        with code.loop(2, points) as i:
            last = code.at(t, table, code.i64("mul", code.i64("sub", i, 1), stride))
            code.do(f"call void @point_add(ptr {code.at(t, last, stride)}, ptr {last}, ptr {one})")
        store_point(k, total, k.infinity)
        with code.countdown(SCALAR_WORDS * 64 // _WINDOW) as step:
            for _ in range(_WINDOW):
                code.do(f"call void @point_double(ptr {total}, ptr {total})")
            at = code.i64("mul", step, _WINDOW)
            words = code.load(packs.numbers, digits, code.i64("lshr", at, 6))
            shift = packs.joined(code, [code.i64("and", at, 63)] * packed.lanes)
            value = code.op("and", code.op("lshr", words, shift), points - 1)
            _choose(k, table, value, chosen)
            code.do(f"call void @point_add(ptr {total}, ptr {total}, ptr {chosen})")
        store_affine(k, total, lanes.pointers("%z", 2 * k.size))


def _choose(k: Elements, table: str, numbers: Value, chosen: str) -> None:
    """Append table[number], lane by lane: every entry is read whole, and masked.

    The masks pass through volatile memory: LLVM would turn a select into a masked load, whose time depends on the
    scalar.
    """
    code, number = k.code, k.packs.numbers
    limbs = 3 * k.degree * (k.packed.radix.bit_length() // _LIMB_BITS[k.packed.lanes])
    cells = [code.variable(number, 0) for _ in range(limbs)]
    unknown = code.stack(number)
    with code.loop(0, 1 << _WINDOW) as i:
        equal = code.compare("eq", numbers, k.packs.joined(code, [i] * k.packed.lanes))
        code.do(f"store volatile {number} {code.convert('sext', equal, 'i64')}, ptr {unknown}")
        mask = code(f"load volatile {number}, ptr {unknown}", number)
        first = code.i64("mul", i, limbs)
        for j, cell in enumerate(cells):
            limb = code.load(number, table, code.i64("add", first, j))
            cell.set(code.op("or", cell.get(), code.op("and", limb, mask)))
    for j, cell in enumerate(cells):
        code.store(number, cell.get(), chosen, j)


def store_affine(k: Elements, point: str, pointers: Sequence[str]) -> None:
    """Append stores of a projective point's affine coordinates: zeros for infinity, since the inverse of 0 is 0."""
    inverse = k.inverse(k.load(point, 2))
    for i in range(2):
        k.write(pointers, i, k.product(k.mul(k.load(point, i), inverse), k.packed.memory_radix))  # from x L to x R


def _off_curve(curve: Curve[Any], packed: PackedField, code: FunctionBuilder) -> None:
    """Append the test y^2 = x^3 + b, or both coordinates 0."""
    k = Elements(curve.coordinates, packed, code)
    b = k.constant(curve.coordinates.parts(curve.b))

    def bad(pointers: list[str]) -> Value:
        x, y = _read(k, pointers)
        on = k.is_zero(k.sub(k.square(y), k.add(k.mul(k.square(x), x), b)))
        infinite = code.op("and", k.is_zero(x), k.is_zero(y))
        return code.op("xor", code.op("or", on, infinite), True)

    _firsts(k, bad)


def _off_subgroup(curve: Curve[Any], packed: PackedField, code: FunctionBuilder) -> None:
    k = Elements(curve.coordinates, packed, code)
    test = endomorphism(curve)
    if test is None:
        _firsts(k, lambda _: constant(k.packs.mask, False))
        return
    # For BLS12's G1 the eigenvalue is x^2 - 1, x with six bits set: a third less work than by its own digits.
    root = math.isqrt(test.eigenvalue + 1)
    squared = root * root == test.eigenvalue + 1
    digits, odd = llvm_points.public_digits(root if squared else test.eigenvalue)
    listed = code.table("eigenvalue_digits", "i8", digits)
    factors = [curve.coordinates.parts(factor) for factor in (test.x_factor, test.y_factor)]
    point, multiple = k.space(3), k.space(3)

    def bad(pointers: list[str]) -> Value:
        affine = _read(k, pointers)
        store_point(k, point, to_projective(k, affine))
        for source in (point, multiple) if squared else (point,):
            numbers = f"ptr {listed}, i64 {len(digits)}, i64 {odd}"
            code.do(f"call void @point_multiple(ptr {multiple}, ptr {source}, {numbers})")
        if squared:
            k.store(point, 1, k.neg(k.load(point, 1)))
            code.do(f"call void @point_add(ptr {multiple}, ptr {multiple}, ptr {point})")
        z = k.load(multiple, 2)
        images = [k.scaled(k.conjugate(coordinate), factor) for coordinate, factor in zip(affine, factors, strict=True)]
        same_x, same_y = (k.is_zero(k.sub(k.load(multiple, i), k.mul(image, z))) for i, image in enumerate(images))
        good, infinite = code.op("and", same_x, same_y), k.is_zero(affine[1])
        if curve.cofactor % 2 == 0:
            # Points of order 2 have y = 0. The sum of points that differ by one of them is (0, 0, 0), and stays so.
            good = code.op("and", good, code.op("xor", code.op("or", infinite, k.is_zero(z)), True))
            infinite = code.op("and", infinite, k.is_zero(affine[0]))
        return code.op("xor", code.op("or", good, infinite), True)

    _firsts(k, bad)


POINTERS = ("x", "y", "z", "scalars", "first")
ENTRIES: Mapping[str, tuple[tuple[str, ...], Writer]] = {
    "add": (("x", "y", "z", "n"), _add),
    "neg": (("x", "z", "n"), _neg),
    "mul": (("x", "scalars", "z", "n", "x_step", "scalar_step"), _mul),
    "off_curve": (("x", "first", "n", "chunk"), _off_curve),
    "off_subgroup": (("x", "first", "n", "chunk"), _off_subgroup),
}

_LEAST_SHARES = {"add": 1024, "neg": 8192, "mul": 8, "off_curve": 64, "off_subgroup": 2}
"""Indices (points or chunks of points) that justify another thread: 50 us of work, more for large chunks."""


def curve_kernels(name: str, entry: str = "", form: str = "") -> LlvmProgram:
    """Return the program of a curve's entries; arguments and errors as algebra.field.llvm_kernels.field_kernels."""
    share = min(_LEAST_SHARES.values()) if not entry else _LEAST_SHARES.get(entry.removeprefix("curve_"), 1)
    return curve_program(_text, name, entry, form, share)


def curve_program(
    write: Callable[[str, str, str], str], name: str, entry: str, form: str, least_share: int
) -> LlvmProgram:
    """Return the program that `write` returns for a curve, an entry and a form; arguments as curve_kernels."""
    curve = curve_of(name)
    k = curve.coordinates
    form = form or host_form(k.base)
    parameters = (name, entry, form, k.base, k.degree, curve.scalars, curve.b, curve.generator)
    return LlvmProgram(parameters, SOURCES, functools.partial(write, name, entry, form), least_share=least_share)


@functools.cache
def _text(name: str, entry: str, form: str) -> str:
    curve = curve_of(name)
    packed = packed_field(curve.coordinates.base, form)
    return program(
        [*llvm_points.functions(name, form), *entry_functions("curve", ENTRIES, entry, POINTERS, curve, packed)]
    )
