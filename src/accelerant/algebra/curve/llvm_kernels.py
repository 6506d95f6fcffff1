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

Projective points (X : Y : Z), x = X / Z and y = Y / Z, infinity (0 : 1 : 0), are added by formulas that hold for every
pair of points of a group of odd order, without a branch. Source: Renes, Costello and Batina, eprint 2015/1060,
algorithms 7, 8 and 9 (a = 0). They become internal functions on packs in memory; T is the type of a pack and d the
degree of the coordinates over Fq:

    void point_add(ptr z, ptr x, ptr y)                   12M; 3 d T each, z may be x or y
    void point_add_affine(ptr z, ptr x, ptr y)            11M; y is 2 d T, and infinity where its second element is 0
    void point_double(ptr z, ptr x)                        8M
    void point_multiple(ptr z, ptr x, ptr digits, i64 count, i64 odd)      by public_digits; z may be x
    void quadratic_add, quadratic_sub, quadratic_mul(ptr z, ptr x, ptr y)         elements of Fq2, 2 T each
    void quadratic_square(ptr z, ptr x)
    T    FIELD_inverse(T x)                               x^-1 in the pack's representation; 0 for 0

Affine points take 5M + 1S and a share of an inversion (batch_add). Infinity is (0, 0); no point of a group of odd order
has y = 0. An element is a tuple of one or two packs (c0, c1), each in the arithmetic's Montgomery form x L
unless said otherwise.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from accelerant.algebra.curve.parameters import curve_of, endomorphism
from accelerant.algebra.curve.weierstrass import SCALAR_WORDS, Coordinates, Curve, signed_windows
from accelerant.algebra.field.llvm_kernels import SOURCES, entry_functions, host_form, packed_field
from accelerant.algebra.field.llvm_packed import LIMB_BITS, PackedField, all_zero, hide, limb_of, rotated, word_of
from accelerant.runtime.compilation import llvm
from accelerant.runtime.compilation.kernel import LlvmProgram
from accelerant.runtime.compilation.llvm import NOINLINE, FunctionBuilder, Value, constant, program, vector

Element = tuple[str, ...]

_SMALL = 16  # Factors up to here are additions: a product takes as long as six or more of them


# --- packs in memory -------------------------------------------------------------------------------------------------
_PAIR = "<2 x i64>"


class Packs:
    """Loads, stores, masks (a bit a lane) and selections of packs of a wide integer, or of eight in 52-bit limbs."""

    def __init__(self, packed: PackedField) -> None:
        self.packed = packed
        self.mask = vector("i1", packed.lanes)
        self.numbers = vector("i64", packed.lanes)
        self._single = packed.lanes == 1

    def read(self, code: FunctionBuilder, pointers: Sequence[str], offset: int) -> Value:
        """Append loads of the elements at these addresses, one a lane, plus an offset in bytes."""
        if self._single:
            return code.load(self.packed.type, code.at("i8", pointers[0], offset), align=8)
        words = []
        for pair in range(self.packed.field.limbs // 2):
            halves = [code.load(_PAIR, code.at("i8", pointer, offset + 16 * pair), align=8) for pointer in pointers]
            low, high = (_join_pairs(code, halves[first::2]) for first in (0, 1))
            words += [_unpack(code, low, high, word) for word in (0, 1)]
        limbs = range(self.packed.radix.bit_length() // LIMB_BITS)
        return code.array(self.packed.type, [limb_of(code, words, LIMB_BITS * k) for k in limbs])

    def write(self, code: FunctionBuilder, pointers: Sequence[str], offset: int, pack: str) -> None:
        """Append stores, lane by lane: of equal addresses the last lane's value remains."""
        if self._single:
            code.store(self.packed.type, pack, code.at("i8", pointers[0], offset), align=8)
            return
        limbs = self._limbs(code, pack)
        for pair in range(self.packed.field.limbs // 2):
            even, odd = (word_of(code, limbs, 64 * (2 * pair + word)) for word in (0, 1))
            halves = [_unpack(code, even, odd, half) for half in (0, 1)]
            for lane, pointer in enumerate(pointers):
                first = lane // 2 * 2
                value = code.shuffle(halves[lane % 2], None, [first, first + 1])
                code.store(_PAIR, value, code.at("i8", pointer, offset + 16 * pair), align=8)

    def is_zero(self, code: FunctionBuilder, pack: str) -> Value:
        """Return the mask of the lanes that are 0."""
        if self._single:
            return code.compare("eq", Value(pack, self.packed.type), 0)
        return all_zero(code, self._limbs(code, pack))

    def select(self, code: FunctionBuilder, mask: str, x: str, y: str) -> Value:
        """Return x where the mask is set, else y; without a branch."""
        if self._single:
            bits = code.convert("sext", hide(code, code.convert("sext", Value(mask, "i1"), "i64")), self.packed.type)
            a, b = Value(x, self.packed.type), Value(y, self.packed.type)
            return code.op("xor", b, code.op("and", bits, code.op("xor", a, b)))
        pairs = zip(self._limbs(code, x), self._limbs(code, y), strict=True)
        return code.array(self.packed.type, [code.select(Value(mask, self.mask), a, b) for a, b in pairs])

    def any(self, code: FunctionBuilder, mask: Value) -> Value:
        """Return whether a lane is set, as an i1."""
        return mask if self._single else code.compare("ne", code.bitcast(mask, "i8"), 0)

    def joined(self, code: FunctionBuilder, values: Sequence[llvm.Operand]) -> Value:
        """Return a vector of one i64 per lane."""
        numbers = [Value(str(value), "i64") for value in values]
        return numbers[0] if self._single else code.join(numbers)

    def least(self, code: FunctionBuilder, mask: Value, numbers: Value, other: Value) -> Value:
        """Return the minimum of the i64 `other` and the numbers whose lanes are set."""
        if self._single:
            return code.smin(code.select(mask, numbers, other), other)
        kept = code.select(mask, numbers, (1 << 63) - 1)
        return code.smin(code.intrinsic("i64", "llvm.vector.reduce.smin.v8i64", kept), other)

    def rotated(self, code: FunctionBuilder, pack: str, step: int) -> str:
        """Return the pack with lane l + step in lane l, modulo the lanes."""
        return pack if self._single else code.array(self.packed.type, rotated(code, self._limbs(code, pack), step))

    def lanes(self, chosen: Sequence[bool]) -> Value:
        """Return a constant mask."""
        return constant("i1", chosen[0]) if self._single else llvm.lane_constants("i1", chosen)

    def _limbs(self, code: FunctionBuilder, pack: str) -> list[Value]:
        return code.parts(Value(pack, self.packed.type))


def _join_pairs(code: FunctionBuilder, pairs: Sequence[Value]) -> Value:
    """Return four registers of two words as one."""
    halves = [code.shuffle(a, b, range(4)) for a, b in (pairs[:2], pairs[2:])]
    return code.shuffle(halves[0], halves[1], range(8))


def _unpack(code: FunctionBuilder, a: Value, b: Value, odd: int) -> Value:
    """Return the even or the odd lanes of a and b, in turn."""
    return code.shuffle(a, b, [lane + odd + step for lane in range(0, 8, 2) for step in (0, 8)])


# --- elements --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Cell:
    """A variable element."""

    parts: Sequence[llvm.Variable]

    def get(self) -> Element:
        """Append a load of the element."""
        return tuple(part.get() for part in self.parts)

    def set(self, value: Element) -> None:
        """Append a store of the element."""
        for part, pack in zip(self.parts, value, strict=True):
            part.set(pack)


class Elements:
    """Arithmetic and memory of coordinates, as instructions appended to a function.

    `size` is bytes of an element in memory. Products are calls, unless `calls` is False. With `call_sums` sums and
    differences over Fq2 are, too: slower, and compiled in half the time.
    """

    def __init__(
        self, field: Coordinates[Any], packed: PackedField, code: FunctionBuilder, *, calls: bool = True,
        call_sums: bool = False,
    ) -> None:  # fmt: skip
        self.code, self.packed, self.packs = code, packed, Packs(packed)
        self.degree = field.degree
        self.size = field.degree * field.base.size_bytes
        self.zero = self.constant([0] * field.degree)
        self.one = self.constant([1] + [0] * (field.degree - 1))
        self.infinity = (self.zero, self.one, self.zero)
        self._suffix = "_call" if calls else ""
        self._called = self.degree == 2 and calls
        self._call_sums = self.degree == 2 and call_sums
        self._passed: list[str] = []

    def constant(self, parts: Sequence[int]) -> Element:
        """Return the constant with these coefficients."""
        packed = self.packed
        return tuple(packed.constant(part * packed.radix % packed.field.modulus) for part in parts)

    def add(self, a: Element, b: Element) -> Element:
        """Append a + b."""
        if self._call_sums:
            return self._pass("quadratic_add", a, b)
        return tuple(self._call("add", x, y) for x, y in zip(a, b, strict=True))

    def sub(self, a: Element, b: Element) -> Element:
        """Append a - b."""
        if self._call_sums:
            return self._pass("quadratic_sub", a, b)
        return tuple(self._call("sub", x, y) for x, y in zip(a, b, strict=True))

    def neg(self, a: Element) -> Element:
        """Append -a."""
        return tuple(self._call("neg", x) for x in a)

    def conjugate(self, a: Element) -> Element:
        """Append c0 - c1 u; an element of Fq is its own conjugate."""
        return (a[0], *(self._call("neg", x) for x in a[1:]))

    def times(self, a: Element, factor: int) -> Element:
        """Append the product of a and an integer, at least 0."""
        if factor > _SMALL:
            constant = self.constant([factor])
            return tuple(self._mul(constant[0], x) for x in a)
        if factor < 2:
            return a if factor else self.zero
        half = self.times(a, factor // 2)
        double = self.add(half, half)
        return self.add(double, a) if factor % 2 else double

    def scaled(self, a: Element, factor: Sequence[int]) -> Element:
        """Append the product of a and the constant with these coefficients."""
        if all(part == 0 for part in factor[1:]):
            return self.times(a, factor[0])
        if factor[0] == factor[1] <= _SMALL:
            difference, total = self._call("sub", *a), self._call("add", *a)
            return self.times((difference, total), factor[0])
        return self.mul(self.constant(factor), a)

    def mul(self, a: Element, b: Element) -> Element:
        """Append a b; in Fq2 by Karatsuba, three products in Fq."""
        if self.degree == 1:
            return (self._mul(a[0], b[0]),)
        return self._pass("quadratic_mul", a, b) if self._called else self.karatsuba(a, b)

    def karatsuba(self, a: Element, b: Element) -> Element:
        """Append the product in Fq2 inline."""
        low, high = self._mul(a[0], b[0]), self._mul(a[1], b[1])
        cross = self._mul(self._call("add", *a), self._call("add", *b))
        return self._call("sub", low, high), self._call("sub", cross, self._call("add", low, high))

    def square(self, a: Element) -> Element:
        """Append a^2; in Fq2 (c0 + c1) (c0 - c1) + 2 c0 c1 u."""
        if self.degree == 1:
            return (self._call(f"square{self._suffix}", a[0]),)
        return self._pass("quadratic_square", a) if self._called else self.complex_square(a)

    def complex_square(self, a: Element) -> Element:
        """Append the square in Fq2 inline."""
        real = self._mul(self._call("add", *a), self._call("sub", *a))
        half = self._mul(*a)
        return real, self._call("add", half, half)

    def inverse(self, a: Element) -> Element:
        """Append 1/a, and 0 for 0: (c0 - c1 u) / (c0^2 + c1^2) by FIELD_inverse."""
        if self.degree == 1:
            return (self._call("inverse", a[0]),)
        squares = [self._call(f"square{self._suffix}", part) for part in a]
        scale = self._call("inverse", self._call("add", *squares))
        return tuple(self._mul(scale, part) for part in self.conjugate(a))

    def product(self, a: Element, factor: int) -> Element:
        """Append a factor / L, which converts from one Montgomery form to another."""
        return tuple(self.packed.times(self.code, part, factor) for part in a)

    def _pass(self, name: str, *operands: Element) -> Element:
        """Append a call of a function on elements in memory."""
        if not self._passed:
            self._passed = [self.space() for _ in range(3)]
        for address, operand in zip(self._passed[1:], operands, strict=False):
            self.store(address, 0, operand)
        arguments = ", ".join(f"ptr {address}" for address in self._passed[: 1 + len(operands)])
        self.code.do(f"call void @{name}({arguments})")
        return self.load(self._passed[0], 0)

    def _mul(self, x: str, y: str) -> str:
        return self._call(f"mul{self._suffix}", x, y)

    def _call(self, name: str, *packs: str) -> str:
        return self.packed.call(self.code, name, *packs)

    def is_zero(self, a: Element) -> Value:
        """Append the mask of the lanes that are 0."""
        mask = self.packs.is_zero(self.code, a[0])
        for part in a[1:]:
            mask = self.code.op("and", mask, self.packs.is_zero(self.code, part))
        return mask

    def select(self, mask: str, a: Element, b: Element) -> Element:
        """Append a where the mask is set, else b; without a branch."""
        return tuple(self.packs.select(self.code, mask, x, y) for x, y in zip(a, b, strict=True))

    def read(self, pointers: Sequence[str], index: int = 0) -> Element:
        """Append loads of element `index` of the arrays at each lane's address, in memory's form."""
        first, step = index * self.size, self.packed.field.size_bytes
        return tuple(self.packs.read(self.code, pointers, first + part * step) for part in range(self.degree))

    def write(self, pointers: Sequence[str], index: int, a: Element) -> None:
        """Append stores to element `index` of the arrays at each lane's address."""
        for part, pack in enumerate(a):
            self.packs.write(self.code, pointers, index * self.size + part * self.packed.field.size_bytes, pack)

    def load(self, pointer: str, index: str | int) -> Element:
        """Append the load of an element of an array of packs, in the kernel's own memory."""
        return tuple(self.code.load(self.packed.type, pointer, at) for at in self._indices(index))

    def store(self, pointer: str, index: str | int, a: Element) -> None:
        """Append the store of an element of such an array."""
        for at, pack in zip(self._indices(index), a, strict=True):
            self.code.store(self.packed.type, pack, pointer, at)

    def _indices(self, index: str | int) -> list[str]:
        if isinstance(index, int):
            return [str(index * self.degree + part) for part in range(self.degree)]
        first = index if self.degree == 1 else self.code.i64("mul nsw", index, self.degree)
        return [first, *(self.code.i64("add nsw", first, part) for part in range(1, self.degree))]

    def space(self, count: int = 1) -> str:
        """Allocate memory of the kernel's own for some elements."""
        return self.code.stack(self.packed.type, count * self.degree)

    def cell(self, a: Element) -> Cell:
        """Allocate a variable with this value."""
        return Cell([self.code.variable(self.packed.type, part) for part in a])


Projective = tuple[Element, Element, Element]


# --- formulas --------------------------------------------------------------------------------------------------------
T = TypeVar("T")


class _Arithmetic(Protocol[T]):
    """The operations of the formulas, which Elements and a tape's Recorder provide."""

    def add(self, a: T, b: T) -> T: ...
    def sub(self, a: T, b: T) -> T: ...
    def mul(self, a: T, b: T) -> T: ...
    def square(self, a: T) -> T: ...
    def times(self, a: T, factor: int) -> T: ...
    def scaled(self, a: T, factor: Sequence[int]) -> T: ...


def add(k: _Arithmetic[T], b3: Sequence[int], p: Sequence[T], q: Sequence[T]) -> tuple[T, T, T]:
    """Append P + Q; 12M and two products by 3 b. Source: algorithm 7."""
    (x1, y1, z1), (x2, y2, z2) = p, q
    xx, yy, zz = k.mul(x1, x2), k.mul(y1, y2), k.mul(z1, z2)
    xy = k.sub(k.mul(k.add(x1, y1), k.add(x2, y2)), k.add(xx, yy))
    yz = k.sub(k.mul(k.add(y1, z1), k.add(y2, z2)), k.add(yy, zz))
    xz = k.sub(k.mul(k.add(x1, z1), k.add(x2, z2)), k.add(xx, zz))
    return _sum_of_products(k, b3, k.times(xx, 3), yy, zz, xy, yz, xz)


def add_affine(k: _Arithmetic[T], b3: Sequence[int], p: Sequence[T], q: Sequence[T]) -> tuple[T, T, T]:
    """Append P + Q, Q affine and not infinity; 11M and two products by 3 b. Source: algorithm 8."""
    (x1, y1, z1), (x2, y2) = p, q
    xx, yy = k.mul(x1, x2), k.mul(y1, y2)
    xy = k.sub(k.mul(k.add(x1, y1), k.add(x2, y2)), k.add(xx, yy))
    yz, xz = k.add(k.mul(y2, z1), y1), k.add(k.mul(x2, z1), x1)
    return _sum_of_products(k, b3, k.times(xx, 3), yy, z1, xy, yz, xz)


def _sum_of_products(k: _Arithmetic[T], b3: Sequence[int], xx3: T, yy: T, zz: T, xy: T, yz: T, xz: T) -> tuple[T, T, T]:
    """Append the part that both additions share, from 3 X1 X2, Y1 Y2, Z1 Z2 and X1 Y2 + X2 Y1, ...; 6M."""
    b3zz, b3xz = k.scaled(zz, b3), k.scaled(xz, b3)
    plus, minus = k.add(yy, b3zz), k.sub(yy, b3zz)
    x3 = k.sub(k.mul(xy, minus), k.mul(yz, b3xz))
    y3 = k.add(k.mul(minus, plus), k.mul(b3xz, xx3))
    return x3, y3, k.add(k.mul(plus, yz), k.mul(xx3, xy))


def double(k: _Arithmetic[T], b3: Sequence[int], p: Sequence[T]) -> tuple[T, T, T]:
    """Append 2 P; 6M + 2S and a product by 3 b. Source: algorithm 9."""
    x, y, z = p
    yy, yz, xy = k.square(y), k.mul(y, z), k.mul(x, y)
    b3zz = k.scaled(k.square(z), b3)
    yy8, less = k.times(yy, 8), k.sub(yy, k.times(b3zz, 3))
    y3 = k.add(k.mul(b3zz, yy8), k.mul(less, k.add(yy, b3zz)))
    return k.times(k.mul(less, xy), 2), y3, k.mul(yz, yy8)


# --- functions -------------------------------------------------------------------------------------------------------
def to_projective(k: Elements, affine: tuple[Element, Element]) -> Projective:
    """Append the projective coordinates of an affine point, x L and y L."""
    infinity = k.is_zero(affine[1])
    return affine[0], k.select(infinity, k.one, affine[1]), k.select(infinity, k.zero, k.one)


def load_point(k: Elements, pointer: str, count: int = 3) -> tuple[Element, ...]:
    """Append loads of a point's three coordinates, or of the two of an affine one."""
    return tuple(k.load(pointer, i) for i in range(count))


def store_point(k: Elements, pointer: str, point: Sequence[Element]) -> None:
    """Append stores of a point's coordinates."""
    for i, element in enumerate(point):
        k.store(pointer, i, element)


def _add_affine(k: Elements, b3: Sequence[int]) -> None:
    p, q = load_point(k, "%x"), load_point(k, "%y", 2)
    infinity = k.is_zero(q[1])
    total = add_affine(k, b3, p, q)
    store_point(k, "%z", [k.select(infinity, old, new) for old, new in zip(p, total, strict=True)])


_ODD = 4  # Odd multiples in a table for public_digits: P, 3 P, 5 P and 7 P


def public_digits(number: int) -> tuple[list[int], int]:
    """Return signed_windows of a public number and the odd multiples they need, for the fewest additions."""
    choices = [(signed_windows(number, 2), 1), (signed_windows(number, _ODD), _ODD)]
    return min(choices, key=lambda pair: sum(digit != 0 for digit in pair[0]) + pair[1] * (pair[1] > 1))


def _multiple(k: Elements) -> None:
    code = k.code
    table, total, twice, chosen = k.space(3 * _ODD), k.space(3), k.space(3), k.space(3)
    stride = 3 * k.degree
    store_point(k, table, load_point(k, "%x"))
    code.do(f"call void @point_double(ptr {twice}, ptr %x)")
    with code.loop(1, "%odd") as i:
        address = code.at(k.packed.type, table, code.i64("mul", i, stride))
        before = code.at(k.packed.type, address, -stride)
        code.do(f"call void @point_add(ptr {address}, ptr {before}, ptr {twice})")
    store_point(k, total, k.infinity)
    with code.countdown("%count") as at:
        code.do(f"call void @point_double(ptr {total}, ptr {total})")
        digit = code.convert("sext", code.load("i8", "%digits", at), "i64")
        with code.when(code.compare("ne", digit, 0)):
            size = code.intrinsic("i64", "llvm.abs.i64", digit, constant("i1", True))
            entry = code.at(k.packed.type, table, code.i64("mul", code.i64("lshr", size, 1), stride))
            x, y, z = load_point(k, entry)
            sign = k.cell(y)
            with code.when(code.compare("slt", digit, 0)):
                sign.set(k.neg(y))
            store_point(k, chosen, (x, sign.get(), z))
            code.do(f"call void @point_add(ptr {total}, ptr {total}, ptr {chosen})")
    store_point(k, "%z", load_point(k, total))


_WINDOW = 4


def _inverse(packed: PackedField) -> FunctionBuilder:
    """Return FIELD_inverse: the power p - 2 by windows of four bits, four squares and a product for each."""
    t, field = packed.type, packed.field
    code = FunctionBuilder(f"{field.name}_inverse", [f"{t} %x"], t, attributes=NOINLINE)
    exponent = field.modulus - 2
    digits = [exponent >> at & (1 << _WINDOW) - 1 for at in range(0, exponent.bit_length(), _WINDOW)]
    name = code.table(f"{field.name}_digits", "i8", digits)
    table = code.stack(t, 1 << _WINDOW)
    code.store(t, packed.constant(packed.radix % field.modulus), table, 0)
    code.store(t, "%x", table, 1)
    power = code.variable(t, "%x")
    with code.loop(2, 1 << _WINDOW) as i:
        power.set(packed.call(code, "mul_call", power.get(), "%x"))
        code.store(t, power.get(), table, i)
    power.set(code.load(t, table, digits[-1]))
    with code.countdown(len(digits) - 1) as i:
        for _ in range(_WINDOW):
            power.set(packed.call(code, "square_call", power.get()))
        digit = code.convert("zext", code.load("i8", name, i), "i64")
        power.set(packed.call(code, "mul_call", power.get(), code.load(t, table, digit)))
    code.ret(power.get())
    return code


@functools.cache
def functions(name: str, form: str) -> tuple[FunctionBuilder, ...]:
    """Return the definitions that the module's docstring lists, and those of the field that they call."""
    curve = curve_of(name)
    packed = packed_field(curve.coordinates.base, form)
    b3 = curve.coordinates.parts(curve.coordinates.times(curve.b, 3))
    points: _Writers = {
        "point_add": (_BINARY, lambda k: store_point(k, "%z", add(k, b3, load_point(k, "%x"), load_point(k, "%y")))),
        "point_add_affine": (_BINARY, lambda k: _add_affine(k, b3)),
        "point_double": (_UNARY, lambda k: store_point(k, "%z", double(k, b3, load_point(k, "%x")))),
        "point_multiple": ([*_UNARY, "ptr %digits", "i64 %count", "i64 %odd"], _multiple),
    }
    parts = [*packed.functions(), *packed.called_functions(), _inverse(packed)]
    for writers, call_sums in ((points, True), (_QUADRATIC if curve.coordinates.degree == 2 else {}, False)):
        for known, (arguments, write) in writers.items():
            code = FunctionBuilder(known, arguments, attributes=NOINLINE)
            write(Elements(curve.coordinates, packed, code, call_sums=call_sums))
            code.ret()
            parts.append(code)
    return tuple(parts)


_Writers = dict[str, tuple[list[str], Callable[[Elements], None]]]
_BINARY = ["ptr %z", "ptr %x", "ptr %y"]
_UNARY = _BINARY[:2]
_QUADRATIC: _Writers = {
    "quadratic_add": (_BINARY, lambda k: k.store("%z", 0, k.add(k.load("%x", 0), k.load("%y", 0)))),
    "quadratic_sub": (_BINARY, lambda k: k.store("%z", 0, k.sub(k.load("%x", 0), k.load("%y", 0)))),
    "quadratic_mul": (_BINARY, lambda k: k.store("%z", 0, k.karatsuba(k.load("%x", 0), k.load("%y", 0)))),
    "quadratic_square": (_UNARY, lambda k: k.store("%z", 0, k.complex_square(k.load("%x", 0)))),
}


# --- affine additions ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Pair:
    """A pack of affine points P and Q to add; the functions append loads of a coordinate, stores and prefetches."""

    x: Callable[[], tuple[Element, Element]]
    y: Callable[[], tuple[Element, Element]]
    write: Callable[[Element, Element], None]
    fetch: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory of a batch, by pack: the product of earlier denominators, its own, and whether it has a special case."""

    products: str
    denominators: str
    special: str


_PREFETCH = 4  # Packs between prefetching points and reading them: a miss takes about as long as a pack's first pass


def batch_add(k: Elements, count: str, pair: Callable[[str], Pair], scratch: Scratch, unit: int) -> None:
    """Append the additions of the packs of pairs 0 to count - 1, at least one; sums are written from the last pack on.

    Slopes are (y2 - y1) / (x2 - x1), or 3 x^2 / (2 y) where the points are equal; x3 = slope^2 - x1 - x2 and y3 = slope
    (x1 - x3) - y1. The denominators are inverted together (Montgomery 1987, section 10.3.1): 5M + 1S a pair. Only a
    pack with a special case pays for it, by a branch: the time depends on the points. In memory coordinates are x unit.
    Slopes are x L, so products keep the unit, except for a slope's square and a doubling's numerator.
    """
    code = k.code
    product = k.cell(k.one)
    with code.loop(0, count) as i:
        k.store(scratch.products, i, product.get())
        later = pair(code.smin(code.i64("add nsw", i, _PREFETCH), code.i64("sub nsw", count, 1))).fetch
        if later is not None:
            later()
        denominator = _denominator(k, pair(i), scratch, i)
        k.store(scratch.denominators, i, denominator)
        product.set(k.mul(product.get(), denominator))
    inverse = k.cell(k.inverse(product.get()))
    with code.countdown(count) as i:
        one = k.mul(inverse.get(), k.load(scratch.products, i))
        inverse.set(k.mul(inverse.get(), k.load(scratch.denominators, i)))
        special = code.convert("trunc", code.load("i8", scratch.special, i), "i1")
        _sum(k, pair(i), one, special, unit)


def _denominator(k: Elements, pair: Pair, scratch: Scratch, i: str) -> Element:
    """Append x2 - x1; 2 y for a doubling, and 1 where there is nothing to divide."""
    code, packs = k.code, k.packs
    x1, x2 = pair.x()
    difference = k.sub(x2, x1)
    denominator = k.cell(difference)
    zero = k.is_zero(difference)
    suspects = code.op("or", zero, code.op("or", k.is_zero(x1), k.is_zero(x2)))
    special = packs.any(code, suspects)
    code.store("i8", code.convert("zext", special, "i8"), scratch.special, i)
    with code.when(special):
        y1, y2 = pair.y()
        same = k.is_zero(k.sub(y2, y1))
        kept = k.select(zero, k.select(same, k.times(y1, 2), k.one), difference)
        denominator.set(k.select(code.op("or", k.is_zero(y1), k.is_zero(y2)), k.one, kept))
    return denominator.get()


def _sum(k: Elements, pair: Pair, inverse: Element, special: str, unit: int) -> None:
    code, radix = k.code, k.packed.radix
    (x1, x2), (y1, y2) = pair.x(), pair.y()
    numerator = k.cell(k.sub(y2, y1))
    with code.when(special):
        doubling = code.op("and", k.is_zero(k.sub(x2, x1)), k.is_zero(k.sub(y2, y1)))
        tangent = k.product(k.times(k.square(x1), 3), radix**2 * pow(unit, -1, k.packed.field.modulus))
        numerator.set(k.select(doubling, tangent, numerator.get()))
    slope = k.mul(numerator.get(), inverse)
    x3 = k.sub(k.product(k.square(slope), unit), k.add(x1, x2))
    y3 = k.sub(k.mul(slope, k.sub(x1, x3)), y1)
    x, y = k.cell(x3), k.cell(y3)
    with code.when(special):
        opposite = code.op("and", k.is_zero(k.sub(x2, x1)), k.is_zero(k.add(y1, y2)))
        for cell, first, second in ((x, x1, x2), (y, y1, y2)):
            total = k.select(opposite, k.zero, cell.get())
            total = k.select(k.is_zero(y2), first, total)
            cell.set(k.select(k.is_zero(y1), second, total))
    pair.write(x.get(), y.get())


# --- kernels ---------------------------------------------------------------------------------------------------------
Writer = Callable[[Curve[Any], PackedField, FunctionBuilder], None]

_PACKS = 256  # packs of pairs over Fq that share an inversion; at most 256 KiB of stack
_SCALAR_WINDOW = 4  # Bits of a digit of curve_mul: a table of 16 multiples
_LIMB_BITS = {1: 64, 8: 52}  # bits of a limb of a pack in memory, by the pack's lanes


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
    scratch = Scratch(k.space(count), k.space(count), code.stack("i8", count))
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

        batch_add(k, code.i64("sdiv", rounded, packed.lanes), pair, scratch, packed.memory_radix)


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
    packs, points, t, stride = k.packs, 1 << _SCALAR_WINDOW, packed.type, 3 * k.degree
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
        with code.countdown(SCALAR_WORDS * 64 // _SCALAR_WINDOW) as step:
            for _ in range(_SCALAR_WINDOW):
                code.do(f"call void @point_double(ptr {total}, ptr {total})")
            at = code.i64("mul", step, _SCALAR_WINDOW)
            words = code.load(packs.numbers, digits, code.i64("lshr", at, 6))
            shift = packs.joined(code, [code.i64("and", at, 63)] * packed.lanes)
            _choose(k, table, code.op("and", code.op("lshr", words, shift), points - 1), chosen)
            code.do(f"call void @point_add(ptr {total}, ptr {total}, ptr {chosen})")
        store_affine(k, total, lanes.pointers("%z", 2 * k.size))


def _choose(k: Elements, table: str, numbers: Value, chosen: str) -> None:
    """Append table[number] by lane, every entry read, through volatile masks: a masked load's time is the scalar's."""
    code, number = k.code, k.packs.numbers
    limbs = 3 * k.degree * (k.packed.radix.bit_length() // _LIMB_BITS[k.packed.lanes])
    cells = [code.variable(number, 0) for _ in range(limbs)]
    unknown = code.stack(number)
    with code.loop(0, 1 << _SCALAR_WINDOW) as i:
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
    if (test := endomorphism(curve)) is None:
        _firsts(k, lambda _: constant(k.packs.mask, False))
        return
    # For BLS12's G1 the eigenvalue is x^2 - 1, x with six bits set: a third less work than by its own digits.
    root = math.isqrt(test.eigenvalue + 1)
    squared = root * root == test.eigenvalue + 1
    digits, odd = public_digits(root if squared else test.eigenvalue)
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
    return program([*functions(name, form), *entry_functions("curve", ENTRIES, entry, POINTERS, curve, packed)])
