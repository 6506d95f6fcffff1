"""Prime fields of several limbs on any 64-bit processor: one element at a time, 64-bit limbs, 128-bit products.

An element is an LLVM integer of 64 W bits: its words are registers after LLVM has split it, and an addition becomes a
chain of carries. p has a spare bit, p < 2^(64 W - 1), so that a sum of two elements fits.

A product is a row of x times a word of y and a row of p times m, chosen so that the lowest word becomes 0, in turn; for
x < p the sum stays below 2 p 2^64, so W + 1 words hold it, whatever y is. A row is added as two wide numbers, the
products at even and those at odd places, since LLVM makes carry chains of wide additions and not of single carries.
Source: Koc, Acar and Kaliski 1996, IEEE Micro 16(3), "CIOS".
"""

from __future__ import annotations

from accelerant.algebra.field.llvm_form import Form
from accelerant.algebra.field.llvm_text import Body
from accelerant.algebra.field.parameters import Field

__all__ = ["Limbs"]


class Limbs(Form):
    """See the module's docstring."""

    lanes = 1

    def __init__(self, field: Field) -> None:
        bits = 64 * field.limbs
        if field.word_bits != 64 or field.bits >= bits:
            raise ValueError(f"{field.name}: wanted 64-bit words and a spare bit, p has {field.bits} bits")
        self.field = field
        self.type = f"i{bits}"
        self.radix = self.memory_radix = 1 << bits
        self._bits = bits
        self._wide = f"i{bits + 64}"

    def constant(self, value: int) -> str:
        """The number."""
        return str(value)

    def functions(self) -> str:
        """See Form."""
        pair = [f"{self.type} %x", f"{self.type} %y"]
        place = ["ptr %x", "i64 %i", "i64 %stop"]
        return "".join(
            (
                self.define("load", place, self._load()),
                self.define("store", [*place, f"{self.type} %z"], self._store(), result="void"),
                self.define("add", pair, self._add()),
                self.define("sub", pair, self._sub()),
                self.define("neg", pair[:1], self._neg()),
                self.define("mul", pair, self._mul()),
                self.define("square", pair[:1], self._square()),
                self.define("one_for_zero", pair, self._one_for_zero()),
                self.define("keep_zero", pair, self._keep_zero()),
                self.define("fold", pair[:1], self._fold()),
            )
        )

    def _load(self) -> Body:
        body = Body()
        place = body(f"getelementptr inbounds [{self.field.limbs} x i64], ptr %x, i64 %i")
        body.do(f"ret {self.type} {body(f'load {self.type}, ptr {place}, align 8')}")
        return body

    def _store(self) -> Body:
        body = Body()
        place = body(f"getelementptr inbounds [{self.field.limbs} x i64], ptr %x, i64 %i")
        body.do(f"store {self.type} %z, ptr {place}, align 8")
        body.do("ret void")
        return body

    def _widened(self, body: Body, value: str) -> str:
        return body(f"zext {self.type} {value} to {self._wide}")

    def _settle(self, body: Body, difference: str) -> None:
        """Return the wide difference, which lies between -p and p, plus p where it is negative."""
        top = body(f"lshr {self._wide} {difference}, {self._bits}")
        word = body(f"trunc {self._wide} {top} to i64")
        mask = _hidden(body, word)
        sign = body(f"sext i64 {mask} to {self.type}")
        back = body(f"and {self.type} {sign}, {self.field.modulus}")
        low = body(f"trunc {self._wide} {difference} to {self.type}")
        body.do(f"ret {self.type} {body(f'add {self.type} {low}, {back}')}")

    def _add(self) -> Body:
        body = Body()
        total = body(f"add {self._wide} {self._widened(body, '%x')}, {self._widened(body, '%y')}")
        self._settle(body, body(f"sub {self._wide} {total}, {self.field.modulus}"))
        return body

    def _sub(self) -> Body:
        body = Body()
        self._settle(body, body(f"sub {self._wide} {self._widened(body, '%x')}, {self._widened(body, '%y')}"))
        return body

    def _neg(self) -> Body:
        body = Body()
        self._settle(body, body(f"sub {self._wide} 0, {self._widened(body, '%x')}"))
        return body

    def _word(self, body: Body, value: str, index: int) -> str:
        shifted = body(f"lshr {self.type} {value}, {64 * index}")
        return body(f"trunc {self.type} {shifted} to i64")

    def _plus_row(self, body: Body, total: str, words: list[str], factor: str) -> str:
        """Total + factor times the number that the words (zero-extended to 128 bits) make, as wide numbers."""
        for first in (0, 1):
            row = ""
            for j in range(first, len(words), 2):
                product = body(f"mul i128 {words[j]}, {factor}")
                part = body(f"zext i128 {product} to {self._wide}")
                part = body(f"shl {self._wide} {part}, {64 * j}") if j else part
                row = body(f"or {self._wide} {row}, {part}") if row else part
            total = body(f"add {self._wide} {total}, {row}") if total else row
        return total

    def _mul(self) -> Body:
        body = Body()
        count = self.field.limbs
        x = [body(f"zext i64 {self._word(body, '%x', j)} to i128") for j in range(count)]
        modulus = [str(word) for word in self.field.words(self.field.modulus, 64, count)]
        total = ""
        for i in range(count):
            y = body(f"zext i64 {self._word(body, '%y', i)} to i128")
            total = self._plus_row(body, total, x, y)
            low = body(f"trunc {self._wide} {total} to i64")
            factor = body(f"mul i64 {low}, {self.field.montgomery_inverse(64)}")
            total = self._plus_row(body, total, modulus, body(f"zext i64 {factor} to i128"))
            total = body(f"lshr {self._wide} {total}, 64")
        self._settle(body, body(f"sub {self._wide} {total}, {self.field.modulus}"))
        return body

    def _square(self) -> Body:
        """A product: of what doubling would save in multiplies, the additions take more."""
        body = Body()
        body.do(f"ret {self.type} {self.call(body, 'mul', '%x', '%x')}")
        return body

    def _is_zero(self, body: Body) -> str:
        """All ones where x is 0, else 0, as wide as an element: x - 1 borrows from the word above it only at 0."""
        less = body(f"sub {self._wide} {self._widened(body, '%x')}, 1")
        top = body(f"lshr {self._wide} {less}, {self._bits}")
        mask = _hidden(body, body(f"trunc {self._wide} {top} to i64"))
        return body(f"sext i64 {mask} to {self.type}")

    def _one_for_zero(self) -> Body:
        body = Body()
        body.do(f"ret {self.type} {body(f'or {self.type} %x, {self._and(body, self._is_zero(body))}')}")
        return body

    def _and(self, body: Body, mask: str) -> str:
        return body(f"and {self.type} {mask}, %y")

    def _keep_zero(self) -> Body:
        body = Body()
        keep = body(f"xor {self.type} {self._is_zero(body)}, -1")
        body.do(f"ret {self.type} {self._and(body, keep)}")
        return body

    def _fold(self) -> Body:
        body = Body()
        body.do(f"ret {self.type} %x")
        return body


def _hidden(body: Body, mask: str) -> str:
    """The mask, where LLVM cannot see that it is one: else it may make a branch of it."""
    return body(f'call i64 asm "", "=r,0"(i64 {mask})')
