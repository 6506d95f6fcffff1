"""The bodies of the CPU's curve entries, over either form of arithmetic.

ENTRIES has them by name; llvm_kernels.py says what each computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accelerant.algebra.curve.llvm_coordinates import Element, Elements
from accelerant.algebra.curve.llvm_points import Pair, Scratch, batch_add, entered, public_digits
from accelerant.algebra.curve.parameters import endomorphism
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.llvm_packed import PackedField
from accelerant.runtime.compilation.llvm import FunctionBuilder, Value

__all__ = ["ENTRIES", "POINTERS", "Lanes", "lanes_of", "leave", "mine", "theirs"]

Writer = Callable[[Curve[Any], PackedField, FunctionBuilder], None]

_PACKS = 256
"""Packs of pairs over Fq that share an inversion (some 330 products of 254 bits; 5M + 1S for each pack), half as many
over Fq2. What is kept of them lies on the stack: 256 KiB at most, of BLS12-381 in lanes of eight."""

_WINDOW = 4
"""Bits of a digit of curve_mul: a table of 16 multiples."""

_SCALAR_WORDS = 4

_LIMB_BITS = {1: 64, 8: 52}
"""Of a pack in memory, by its lanes: limbs of an i64 or of a vector of eight, one after another."""


# --- points in memory ------------------------------------------------------------------------------------------------


class Lanes:
    """The indices of a pack's lanes: from i on, and the last before stop again and again beyond it.

    So lanes beyond the end compute what the last one does, and write it again.
    """

    def __init__(self, code: FunctionBuilder, lanes: int, i: str, stop: str) -> None:
        self._code = code
        last = code.i64("sub nsw", stop, 1)
        self.indices = [i, *(code.smin(code.i64("add nsw", i, lane), last) for lane in range(1, lanes))]

    def pointers(self, base: str, size: int, step: str = "") -> list[str]:
        """Addresses of elements of `size` bytes, of index `step` times the lane's."""
        code, indices = self._code, self.indices
        if step:
            indices = [code.i64("mul nsw", index, step) for index in indices]
        return [code.at("i8", base, code.i64("mul nsw", index, size)) for index in indices]


def lanes_of(k: Elements, i: str, stop: str) -> Lanes:
    """The lanes of the pack that begins at i."""
    return Lanes(k.code, k.form.lanes, i, stop)


def mine(k: Elements, a: Element) -> Element:
    """From x R to x L: from memory's Montgomery representation to the form's own."""
    return k.product(a, k.form.radix**2 * pow(k.form.memory_radix, -1, k.form.field.modulus))


def theirs(k: Elements, a: Element) -> Element:
    """From x L to x R: the other way."""
    return k.product(a, k.form.memory_radix)


def _read(k: Elements, pointers: Sequence[str]) -> tuple[Element, Element]:
    """Affine points in the form's own representation."""
    return mine(k, k.read(pointers, 0)), mine(k, k.read(pointers, 1))


# --- loops -----------------------------------------------------------------------------------------------------------


@contextmanager
def _each_pack(k: Elements) -> Iterator[Lanes]:
    """Over the packs of [begin, min(end, n))."""
    stop = k.code.smin("%end", "%n")
    with k.code.loop("%begin", stop, k.form.lanes) as i:
        yield lanes_of(k, i, stop)


def _firsts(k: Elements, bad: Callable[[list[str]], Value]) -> None:
    """first[c] = the least index of a lane that bad(pointers of the points) sets, of chunk c, else n."""
    code, packs = k.code, k.packs
    with code.loop("%begin", "%end") as c:
        start = code.i64("mul nsw", c, "%chunk")
        with code.when(code.compare("slt", start, "%n")):
            stop = code.smin(code.i64("add nsw", start, "%chunk"), "%n")
            least = code.variable("i64", "%n")
            with code.loop(start, stop, k.form.lanes) as i:
                lanes = lanes_of(k, i, stop)
                mask = bad(lanes.pointers("%x", 2 * k.size))
                least.set(packs.least(code, mask, packs.joined(code, lanes.indices), least.get()))
            code.store("i64", least.get(), "%first", c)


# --- entries ---------------------------------------------------------------------------------------------------------


def _add(curve: Curve[Any], form: PackedField, code: FunctionBuilder) -> None:
    """Blocks of packs, each with an inversion; coordinates stay in memory's representation."""
    k = Elements(curve.coordinates, form, code)
    count = _PACKS // k.degree
    size, block = 2 * k.size, count * form.lanes
    scratch = Scratch(k.space(count), k.space(count), code.stack("i8", count))
    stop = code.smin("%end", "%n")
    with code.loop("%begin", stop, block) as base:
        last = code.smin(code.i64("add nsw", base, block), stop)
        rounded = code.i64("add nsw", code.i64("sub nsw", last, base), form.lanes - 1)

        def pair(i: str) -> Pair:
            lanes = lanes_of(k, code.i64("add nsw", base, code.i64("mul nsw", i, form.lanes)), last)
            p, q, z = (lanes.pointers(pointer, size) for pointer in ("%x", "%y", "%z"))

            def write(x: Element, y: Element) -> None:
                k.write(z, 0, x)
                k.write(z, 1, y)

            return Pair(lambda: (k.read(p, 0), k.read(q, 0)), lambda: (k.read(p, 1), k.read(q, 1)), write)

        batch_add(k, code.i64("sdiv", rounded, form.lanes), pair, scratch, form.memory_radix)


def _neg(curve: Curve[Any], form: PackedField, code: FunctionBuilder) -> None:
    k = Elements(curve.coordinates, form, code)
    with _each_pack(k) as lanes:
        x, z = (lanes.pointers(pointer, 2 * k.size) for pointer in ("%x", "%z"))
        kept, opposite = k.read(x, 0), k.neg(k.read(x, 1))
        k.write(z, 0, kept)
        k.write(z, 1, opposite)


def _mul(curve: Curve[Any], form: PackedField, code: FunctionBuilder) -> None:
    """Digits of four bits from the top: four doublings, and the multiple that every table entry is compared for."""
    k = Elements(curve.coordinates, form, code)
    packs, points, t = k.packs, 1 << _WINDOW, form.type
    table, total, chosen = k.space(3 * points), k.space(3), k.space(3)
    digits = code.stack(packs.numbers, _SCALAR_WORDS)
    stride = 3 * k.degree
    with _each_pack(k) as lanes:
        base = lanes.pointers("%x", 2 * k.size, "%x_step")
        scalars = lanes.pointers("%scalars", 8 * _SCALAR_WORDS, "%scalar_step")
        for word in range(_SCALAR_WORDS):
            values = [code.load("i64", pointer, word) for pointer in scalars]
            code.store(packs.numbers, packs.joined(code, values), digits, word)
        for j, element in enumerate((k.zero, k.one, k.zero, *entered(k, _read(k, base)))):
            k.store(table, j, element)
        one = code.at(t, table, stride)
        with code.loop(2, points) as i:
            last = code.at(t, table, code.i64("mul", code.i64("sub", i, 1), stride))
            code.do(f"call void @point_add(ptr {code.at(t, last, stride)}, ptr {last}, ptr {one})")
        for j, element in enumerate((k.zero, k.one, k.zero)):
            k.store(total, j, element)
        with code.countdown(_SCALAR_WORDS * 64 // _WINDOW) as step:
            for _ in range(_WINDOW):
                code.do(f"call void @point_double(ptr {total}, ptr {total})")
            at = code.i64("mul", step, _WINDOW)
            words = code.load(packs.numbers, digits, code.i64("lshr", at, 6))
            shift = packs.joined(code, [code.i64("and", at, 63)] * form.lanes)
            value = code.op("and", code.op("lshr", words, shift), points - 1)
            _choose(k, table, value, chosen)
            code.do(f"call void @point_add(ptr {total}, ptr {total}, ptr {chosen})")
        leave(k, total, lanes.pointers("%z", 2 * k.size))


def _choose(k: Elements, table: str, numbers: Value, chosen: str) -> None:
    """Table[number], lane by lane: every entry is read whole, and masked.

    The masks pass through volatile memory, so that LLVM knows nothing of them. Of a select between what is loaded and
    something else it makes a load under a mask, also of a volatile load; that leaves the other lanes unread, and may
    then depend on the scalar in time. What it costs is within 4 % of a multiplication, and on one lane a gain.
    """
    code, number = k.code, k.packs.numbers
    limbs = 3 * k.degree * (k.form.radix.bit_length() // _LIMB_BITS[k.form.lanes])
    cells = [code.variable(number, 0) for _ in range(limbs)]
    unknown = code.stack(number)
    with code.loop(0, 1 << _WINDOW) as i:
        equal = code.compare("eq", numbers, k.packs.joined(code, [i] * k.form.lanes))
        code.do(f"store volatile {number} {code.convert('sext', equal, 'i64')}, ptr {unknown}")
        mask = code(f"load volatile {number}, ptr {unknown}", number)
        first = code.i64("mul", i, limbs)
        for j, cell in enumerate(cells):
            limb = code.load(number, table, code.i64("add", first, j))
            cell.set(code.op("or", cell.get(), code.op("and", limb, mask)))
    for j, cell in enumerate(cells):
        code.store(number, cell.get(), chosen, j)


def leave(k: Elements, point: str, pointers: Sequence[str]) -> None:
    """Write a projective point's affine coordinates: infinity, whose Z has the inverse 0, as zeros."""
    inverse = k.inverse(k.load(point, 2))
    for i in range(2):
        k.write(pointers, i, theirs(k, k.mul(k.load(point, i), inverse)))


def _off_curve(curve: Curve[Any], form: PackedField, code: FunctionBuilder) -> None:
    """y^2 = x^3 + b, or both 0."""
    k = Elements(curve.coordinates, form, code)
    b = k.constant(curve.coordinates.parts(curve.b))

    def bad(pointers: list[str]) -> Value:
        x, y = _read(k, pointers)
        on = k.is_zero(k.sub(k.square(y), k.add(k.mul(k.square(x), x), b)))
        infinite = code.op("and", k.is_zero(x), k.is_zero(y))
        return k.packs.but(code, k.packs.all_set(), code.op("or", on, infinite))

    _firsts(k, bad)


def _off_subgroup(curve: Curve[Any], form: PackedField, code: FunctionBuilder) -> None:
    """The endomorphism's image against the multiple: endomorphism.py."""
    k = Elements(curve.coordinates, form, code)
    test = endomorphism(curve)
    if test is None:
        _firsts(k, lambda _: k.packs.none_set())
        return
    chain = _chain(curve, test.eigenvalue)
    digits, odd = public_digits(chain[0])
    listed = code.table("eigenvalue_digits", "i8", digits)
    factors = [curve.coordinates.parts(factor) for factor in (test.x_factor, test.y_factor)]
    point, multiple = k.space(3), k.space(3)

    def bad(pointers: list[str]) -> Value:
        affine = _read(k, pointers)
        for i, element in enumerate(entered(k, affine)):
            k.store(point, i, element)
        source = point
        for _ in range(chain[1]):
            numbers = f"ptr {listed}, i64 {len(digits)}, i64 {odd}"
            code.do(f"call void @point_multiple(ptr {multiple}, ptr {source}, {numbers})")
            source = multiple
        if chain[2]:
            k.store(point, 1, k.neg(k.load(point, 1)))
            code.do(f"call void @point_add(ptr {multiple}, ptr {multiple}, ptr {point})")
        z = k.load(multiple, 2)
        good = k.packs.all_set()
        for i, (coordinate, factor) in enumerate(zip(affine, factors, strict=True)):
            image = k.scaled(k.conjugate(coordinate), factor)
            same = k.is_zero(k.sub(k.load(multiple, i), k.mul(image, z)))
            good = code.op("and", good, same)
        infinite = k.is_zero(affine[1])
        if curve.cofactor % 2 == 0:
            # Points of order 2 have y = 0; and a sum of two points that differ by one is (0, 0, 0), where it ends.
            good = k.packs.but(code, k.packs.but(code, good, infinite), k.is_zero(z))
            infinite = code.op("and", infinite, k.is_zero(affine[0]))
        return k.packs.but(code, k.packs.all_set(), code.op("or", good, infinite))

    _firsts(k, bad)


def _chain(curve: Curve[Any], eigenvalue: int) -> tuple[int, int, bool]:
    """(k, n, less): the eigenvalue is k^n, or k^n - 1 where `less` is set.

    Of BLS12's G1 it is x^2 - 1, x with six bits set: a third less work than by its own digits.
    """
    root = math.isqrt(eigenvalue + 1)
    return (root, 2, True) if root * root == eigenvalue + 1 else (eigenvalue, 1, False)


POINTERS = ("x", "y", "z", "scalars", "first")
_CHECK = ("x", "first", "n", "chunk")
ENTRIES: Mapping[str, tuple[tuple[str, ...], Writer]] = {
    "add": (("x", "y", "z", "n"), _add),
    "neg": (("x", "z", "n"), _neg),
    "mul": (("x", "scalars", "z", "n", "x_step", "scalar_step"), _mul),
    "off_curve": (_CHECK, _off_curve),
    "off_subgroup": (_CHECK, _off_subgroup),
}
