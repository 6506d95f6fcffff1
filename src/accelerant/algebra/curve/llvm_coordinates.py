"""Coordinates of points in LLVM IR: Fq, and Fq2 by Karatsuba, with the methods of coordinates.Coordinates.

An element is a tuple of one or two packs (c0, c1), each in the form's own Montgomery representation x L unless said
otherwise. What a method writes goes to the code that the object was made for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerant.algebra.curve.llvm_packs import Packs, packs_of
from accelerant.algebra.curve.weierstrass import Coordinates
from accelerant.algebra.field.llvm_packed import PackedField
from accelerant.runtime.compilation.llvm import FunctionBuilder, Variable

__all__ = ["Cell", "Element", "Elements"]

Element = tuple[str, ...]

_SMALL = 16
"""Factors up to here are additions: a product takes as long as six or more of them."""


class Cell:
    """Variables of one element."""

    def __init__(self, parts: Sequence[Variable]) -> None:
        self._parts = parts

    def get(self) -> Element:
        """The element now."""
        return tuple(part.get() for part in self._parts)

    def set(self, value: Element) -> None:
        """Overwrite it."""
        for part, pack in zip(self._parts, value, strict=True):
            part.set(pack)


class Elements:
    """Arithmetic and memory of coordinates.

    Attributes:
        code: where instructions go.
        form: the arithmetic of Fq.
        packs: masks and memory.
        degree: over Fq, 1 or 2.
        size: bytes of an element in memory.
        zero: of the field.
        one: of the field, as 1 L.
    """

    def __init__(
        self,
        field: Coordinates[Any],
        form: PackedField,
        code: FunctionBuilder,
        *,
        calls: bool = True,
        call_sums: bool = False,
    ) -> None:
        """Arithmetic that writes to some code.

        Args:
            field: of the coordinates.
            form: the arithmetic of Fq.
            code: where instructions go.
            calls: products are calls, of FIELD_mul_call and, over Fq2, of quadratic_mul (llvm_points.py).
            call_sums: over Fq2 sums and differences are calls too: a tenth slower, and half the time to compile.
        """
        self.code = code
        self.form = form
        self.packs: Packs = packs_of(form)
        self.degree = field.degree
        self.size = field.degree * field.base.size_bytes
        self.zero = self.constant([0] * field.degree)
        self.one = self.constant([1] + [0] * (field.degree - 1))
        self._suffix = "_call" if calls else ""
        self._called = self.degree == 2 and calls
        self._call_sums = self.degree == 2 and call_sums
        self._passed: list[str] = []

    # --- arithmetic --------------------------------------------------------------------------------------------------

    def constant(self, parts: Sequence[int]) -> Element:
        """An element of these coefficients."""
        form = self.form
        return tuple(form.constant(part * form.radix % form.field.modulus) for part in parts)

    def add(self, a: Element, b: Element) -> Element:
        """The sum a + b."""
        if self._call_sums:
            return self._pass("quadratic_add", a, b)
        return tuple(self._call("add", x, y) for x, y in zip(a, b, strict=True))

    def sub(self, a: Element, b: Element) -> Element:
        """The difference a - b."""
        if self._call_sums:
            return self._pass("quadratic_sub", a, b)
        return tuple(self._call("sub", x, y) for x, y in zip(a, b, strict=True))

    def neg(self, a: Element) -> Element:
        """The opposite, -a."""
        return tuple(self._call("neg", x) for x in a)

    def conjugate(self, a: Element) -> Element:
        """c0 - c1 u; of Fq the element itself."""
        return (a[0], *(self._call("neg", x) for x in a[1:]))

    def times(self, a: Element, k: int) -> Element:
        """Multiply a by an integer, k >= 0."""
        if k > _SMALL:
            constant = self.constant([k])
            return tuple(self._mul(constant[0], x) for x in a)
        if k < 2:
            return a if k else self.zero
        half = self.times(a, k // 2)
        double = self.add(half, half)
        return self.add(double, a) if k % 2 else double

    def scaled(self, a: Element, factor: Sequence[int]) -> Element:
        """Multiply a by a constant of these coefficients."""
        if all(part == 0 for part in factor[1:]):
            return self.times(a, factor[0])
        if factor[0] == factor[1] <= _SMALL:
            difference, total = self._call("sub", *a), self._call("add", *a)
            return self.times((difference, total), factor[0])
        return self.mul(self.constant(factor), a)

    def mul(self, a: Element, b: Element) -> Element:
        """The product; in Fq2 Karatsuba's, three products in Fq."""
        if self.degree == 1:
            return (self._mul(a[0], b[0]),)
        return self._pass("quadratic_mul", a, b) if self._called else self.karatsuba(a, b)

    def karatsuba(self, a: Element, b: Element) -> Element:
        """The product in Fq2, written out."""
        low, high = self._mul(a[0], b[0]), self._mul(a[1], b[1])
        cross = self._mul(self._call("add", *a), self._call("add", *b))
        return self._call("sub", low, high), self._call("sub", cross, self._call("add", low, high))

    def square(self, a: Element) -> Element:
        """The square; in Fq2 (c0 + c1) (c0 - c1) + 2 c0 c1 u."""
        if self.degree == 1:
            return (self._call(f"square{self._suffix}", a[0]),)
        return self._pass("quadratic_square", a) if self._called else self.complex_square(a)

    def complex_square(self, a: Element) -> Element:
        """The square in Fq2, written out."""
        real = self._mul(self._call("add", *a), self._call("sub", *a))
        half = self._mul(*a)
        return real, self._call("add", half, half)

    def inverse(self, a: Element) -> Element:
        """1/a, and 0 of 0: (c0 - c1 u) / (c0^2 + c1^2). Source of the function: llvm_points.inverse."""
        t = self.form.type
        call = f"call {t} @{self.form.field.name}_inverse({t} "
        if self.degree == 1:
            return (self.code(f"{call}{a[0]})", t),)
        squares = [self._call(f"square{self._suffix}", part) for part in a]
        scale = self.code(f"{call}{self._call('add', *squares)})", t)
        return tuple(self._mul(scale, part) for part in self.conjugate(a))

    def product(self, a: Element, factor: int) -> Element:
        """A factor / L: changes from one Montgomery representation to another."""
        return tuple(self.form.times(self.code, part, factor) for part in a)

    def _pass(self, name: str, *operands: Element) -> Element:
        """Call a function on elements in memory."""
        if not self._passed:
            self._passed = [self.space() for _ in range(3)]
        for place, operand in zip(self._passed[1:], operands, strict=False):
            self.store(place, 0, operand)
        arguments = ", ".join(f"ptr {place}" for place in self._passed[: 1 + len(operands)])
        self.code.do(f"call void @{name}({arguments})")
        return self.load(self._passed[0], 0)

    def _mul(self, x: str, y: str) -> str:
        return self._call(f"mul{self._suffix}", x, y)

    def _call(self, name: str, *packs: str) -> str:
        return self.form.call(self.code, name, *packs)

    # --- choices -----------------------------------------------------------------------------------------------------

    def is_zero(self, a: Element) -> str:
        """The mask of the lanes that are 0."""
        mask = self.packs.is_zero(self.code, a[0])
        for part in a[1:]:
            mask = self.code.op("and", mask, self.packs.is_zero(self.code, part))
        return mask

    def select(self, mask: str, a: Element, b: Element) -> Element:
        """A where the mask is set, else b; without a branch."""
        return tuple(self.packs.select(self.code, mask, x, y) for x, y in zip(a, b, strict=True))

    # --- memory ------------------------------------------------------------------------------------------------------

    def read(self, pointers: Sequence[str], index: int = 0) -> Element:
        """The element `index` of those that begin at each lane's address, as it is in memory."""
        step = self.form.field.size_bytes
        return tuple(
            self.packs.read(self.code, pointers, index * self.size + part * step) for part in range(self.degree)
        )

    def write(self, pointers: Sequence[str], index: int, a: Element) -> None:
        """The same outward."""
        for part, pack in enumerate(a):
            offset = index * self.size + part * self.form.field.size_bytes
            self.packs.write(self.code, pointers, offset, pack)

    def load(self, pointer: str, index: str | int) -> Element:
        """An element of an array of packs: the kernel's own memory."""
        return tuple(self.code.load(self.form.type, pointer, at) for at in self._places(index))

    def store(self, pointer: str, index: str | int, a: Element) -> None:
        """The same outward."""
        for at, pack in zip(self._places(index), a, strict=True):
            self.code.store(self.form.type, pack, pointer, at)

    def _places(self, index: str | int) -> list[str]:
        if isinstance(index, int):
            return [str(index * self.degree + part) for part in range(self.degree)]
        first = index if self.degree == 1 else self.code.i64("mul nsw", index, self.degree)
        return [first, *(self.code.i64("add nsw", first, part) for part in range(1, self.degree))]

    def space(self, count: int = 1) -> str:
        """The kernel's own memory of so many elements."""
        return self.code.stack(self.form.type, count * self.degree)

    def cell(self, a: Element) -> Cell:
        """Variables with this value."""
        return Cell([self.code.variable(self.form.type, part) for part in a])
