"""Goldilocks and BabyBear: one word an element, a vector of them or a single one.

The vector form is plain LLVM vector arithmetic, eight words of 64 bits or sixteen of 32: one AVX-512 register, and
several where registers are shorter. Selections are on vectors or by masks; none branches.

    Goldilocks  p = 2^64 - 2^32 + 1, no Montgomery form (L = R = 1). With e = 2^32 - 1, 2^64 = e and 2^96 = -1 mod p, so
                a product lo + 2^64 hl + 2^96 hh is lo - hh + e hl: Hamburg 2015, eprint 2015/625, with phi = 2^32.
                All operands of mul may be any 64-bit number.
    BabyBear    p = 15 2^27 + 1, Montgomery form with L = R = 2^32; products of even and odd lanes apart, since the
                processor multiplies the low halves of 64-bit lanes.
"""

from __future__ import annotations

from abc import abstractmethod

from accelerant.algebra.field.llvm_form import Form
from accelerant.algebra.field.llvm_text import Body, splat
from accelerant.algebra.field.parameters import Field

__all__ = ["BabyBear", "Goldilocks"]


class _Words(Form):
    """What the two share: memory, and selections."""

    def __init__(self, field: Field, lanes: int) -> None:
        self.field = field
        self.lanes = lanes
        self._word = f"i{field.word_bits}"
        self.type = self._word if lanes == 1 else f"<{lanes} x {self._word}>"
        self._bits = self._vector("i1")

    def constant(self, value: int) -> str:
        """The number, in all lanes."""
        return splat(self._word, self.lanes, value)

    def functions(self) -> str:
        """See Form."""
        pair = [f"{self.type} %x", f"{self.type} %y"]
        place = ["ptr %x", "i64 %i", "i64 %stop"]
        return self._declarations() + "".join(
            (
                self.define("load", place, self._load()),
                self.define("store", [*place, f"{self.type} %z"], self._store(), result="void"),
                self.define("add", pair, self._returned("add")),
                self.define("sub", pair, self._returned("sub")),
                self.define("neg", pair[:1], self._returned("neg")),
                self.define("mul", pair, self._returned("mul")),
                self.define("square", pair[:1], self._returned("square")),
                self.define("one_for_zero", pair, self._one_for_zero()),
                self.define("keep_zero", pair, self._keep_zero()),
                self.define("fold", pair[:1], self._fold()),
            )
        )

    @abstractmethod
    def _plus(self, body: Body, x: str, y: str) -> str:
        """X + y, below p as they are."""

    @abstractmethod
    def _minus(self, body: Body, x: str, y: str) -> str:
        """X - y."""

    @abstractmethod
    def _product(self, body: Body, x: str, y: str) -> str:
        """X y / L."""

    def _returned(self, name: str) -> Body:
        body = Body()
        if name == "add":
            result = self._plus(body, "%x", "%y")
        elif name in ("sub", "neg"):
            result = self._minus(body, *(("%x", "%y") if name == "sub" else (self.constant(0), "%x")))
        else:
            result = self._product(body, "%x", "%y" if name == "mul" else "%x")
        body.do(f"ret {self.type} {result}")
        return body

    # --- memory ------------------------------------------------------------------------------------------------------

    def _vector(self, element: str) -> str:
        return element if self.lanes == 1 else f"<{self.lanes} x {element}>"

    def _suffix(self) -> str:
        return f"v{self.lanes}{self._word}"

    def _declarations(self) -> str:
        if self.lanes == 1:
            return ""
        return (
            f"declare {self.type} @llvm.masked.load.{self._suffix()}.p0(ptr, i32, {self._bits}, {self.type})\n"
            f"declare void @llvm.masked.store.{self._suffix()}.p0({self.type}, ptr, i32, {self._bits})\n"
        )

    def _mask(self, body: Body) -> str:
        """Which lanes lie before stop."""
        wide = f"<{self.lanes} x i64>"
        single = body(f"insertelement {wide} poison, i64 {body('sub i64 %stop, %i')}, i64 0")
        bound = body(f"shufflevector {wide} {single}, {wide} poison, <{self.lanes} x i32> zeroinitializer")
        lanes = "<" + ", ".join(f"i64 {lane}" for lane in range(self.lanes)) + ">"
        return body(f"icmp sgt {wide} {bound}, {lanes}")

    def _load(self) -> Body:
        body = Body()
        place = body(f"getelementptr inbounds {self._word}, ptr %x, i64 %i")
        size = self.field.word_bits // 8
        if self.lanes == 1:
            value = body(f"load {self.type}, ptr {place}, align {size}")
        else:
            value = body(
                f"call {self.type} @llvm.masked.load.{self._suffix()}.p0(ptr {place}, i32 {size}, "
                f"{self._bits} {self._mask(body)}, {self.type} zeroinitializer)"
            )
        body.do(f"ret {self.type} {value}")
        return body

    def _store(self) -> Body:
        body = Body()
        place = body(f"getelementptr inbounds {self._word}, ptr %x, i64 %i")
        size = self.field.word_bits // 8
        if self.lanes == 1:
            body.do(f"store {self.type} %z, ptr {place}, align {size}")
        else:
            body.do(
                f"call void @llvm.masked.store.{self._suffix()}.p0({self.type} %z, ptr {place}, i32 {size}, "
                f"{self._bits} {self._mask(body)})"
            )
        body.do("ret void")
        return body

    # --- selections --------------------------------------------------------------------------------------------------

    def _where(self, body: Body, relation: str, x: str, y: str, value: str) -> str:
        """The value where x and y are so related, else 0."""
        holds = body(f"icmp {relation} {self.type} {x}, {y}")
        mask = body(f"sext {self._bits} {holds} to {self.type}")
        return self._op(body, "and", mask, value)

    def _op(self, body: Body, name: str, x: str, y: str) -> str:
        return body(f"{name} {self.type} {x}, {y}")

    def _one_for_zero(self) -> Body:
        body = Body()
        body.do(f"ret {self.type} {self._op(body, 'or', '%x', self._where(body, 'eq', '%x', self.constant(0), '%y'))}")
        return body

    def _keep_zero(self) -> Body:
        body = Body()
        body.do(f"ret {self.type} {self._where(body, 'ne', '%x', self.constant(0), '%y')}")
        return body

    def _fold(self) -> Body:
        body = Body()
        value, step = "%x", self.lanes // 2
        while step:
            lanes = "<" + ", ".join(f"i32 {(lane + step) % self.lanes}" for lane in range(self.lanes)) + ">"
            turned = body(f"shufflevector {self.type} {value}, {self.type} {value}, <{self.lanes} x i32> {lanes}")
            value = self._plus(body, value, turned)
            step //= 2
        body.do(f"ret {self.type} {value}")
        return body


class Goldilocks(_Words):
    """See the module's docstring. Source of the carries: 2^64 - p = e, so a carry out is paid by adding e."""

    radix = memory_radix = 1

    def __init__(self, field: Field, lanes: int = 8) -> None:
        super().__init__(field, lanes)
        self._e = self.constant(2**64 - field.modulus)
        self._p = self.constant(field.modulus)

    def _canonical(self, body: Body, x: str) -> str:
        """X - p where x >= p; any x."""
        return self._op(body, "sub", x, self._where(body, "uge", x, self._p, self._p))

    def _plus_any(self, body: Body, x: str, y: str) -> str:
        """X + y mod p below 2^64, where x + y < 2^64 + p: paying the carry does not carry again."""
        total = self._op(body, "add", x, y)
        return self._op(body, "add", total, self._where(body, "ult", total, x, self._e))

    def _plus(self, body: Body, x: str, y: str) -> str:
        return self._canonical(body, self._plus_any(body, x, y))

    def _minus(self, body: Body, x: str, y: str) -> str:
        difference = self._op(body, "sub", x, y)
        return self._op(body, "sub", difference, self._where(body, "ult", x, y, self._e))

    def _product(self, body: Body, x: str, y: str) -> str:
        low, high = self._halves(body, x, y)
        upper = self._op(body, "lshr", high, self.constant(32))
        lower = self._op(body, "and", high, self.constant(2**32 - 1))
        # lo - hh: below 2^32 borrows only if lo < 2^32, and then what is left is above e.
        rest = self._minus(body, low, upper)
        scaled = self._op(body, "sub", self._op(body, "shl", lower, self.constant(32)), lower)
        return self._canonical(body, self._plus_any(body, rest, scaled))

    def _halves(self, body: Body, x: str, y: str) -> tuple[str, str]:
        """The low and the high word of x y."""
        if self.lanes == 1:
            product = body(f"mul i128 {body(f'zext i64 {x} to i128')}, {body(f'zext i64 {y} to i128')}")
            high = body(f"trunc i128 {body(f'lshr i128 {product}, 64')} to i64")
            return body(f"trunc i128 {product} to i64"), high
        thirty_two, mask = self.constant(32), self.constant(2**32 - 1)
        x0, y0 = (self._op(body, "and", value, mask) for value in (x, y))
        x1, y1 = (self._op(body, "lshr", value, thirty_two) for value in (x, y))
        lowest = self._op(body, "mul", x0, y0)
        middle = self._op(body, "add", self._op(body, "mul", x0, y1), self._op(body, "lshr", lowest, thirty_two))
        other = self._op(body, "add", self._op(body, "mul", x1, y0), self._op(body, "and", middle, mask))
        high = self._op(body, "add", self._op(body, "mul", x1, y1), self._op(body, "lshr", middle, thirty_two))
        high = self._op(body, "add", high, self._op(body, "lshr", other, thirty_two))
        low = self._op(body, "or", self._op(body, "shl", other, thirty_two), self._op(body, "and", lowest, mask))
        return low, high


class BabyBear(_Words):
    """See the module's docstring."""

    radix = memory_radix = 1 << 32

    def __init__(self, field: Field, lanes: int = 16) -> None:
        super().__init__(field, lanes)
        self._p = self.constant(field.modulus)

    def _plus(self, body: Body, x: str, y: str) -> str:
        """Below 2 p < 2^32, so it does not wrap."""
        total = self._op(body, "add", x, y)
        return self._op(body, "sub", total, self._where(body, "uge", total, self._p, self._p))

    def _minus(self, body: Body, x: str, y: str) -> str:
        difference = self._op(body, "sub", x, y)
        return self._op(body, "add", difference, self._where(body, "ult", x, y, self._p))

    def _product(self, body: Body, x: str, y: str) -> str:
        """The difference of the high halves of x y and m p, whose low halves are equal, m = x y / p mod 2^32."""
        inverse = pow(self.field.modulus, -1, 1 << 32)
        if self.lanes == 1:
            product = body(f"mul i64 {body(f'zext i32 {x} to i64')}, {body(f'zext i32 {y} to i64')}")
            factor = body(f"and i64 {body(f'mul i64 {product}, {inverse}')}, {2**32 - 1}")
            away = body(f"mul i64 {factor}, {self.field.modulus}")
            high, less = (body(f"trunc i64 {body(f'lshr i64 {part}, 32')} to i32") for part in (product, away))
            return self._minus(body, high, less)
        pairs = self.lanes // 2
        wide = f"<{pairs} x i64>"
        mask, down = (splat("i64", pairs, value) for value in (2**32 - 1, 32))
        x64, y64 = (body(f"bitcast {self.type} {value} to {wide}") for value in (x, y))
        highs: list[list[str]] = [[], []]
        for odd in (False, True):
            a, b = (
                body(f"lshr {wide} {value}, {down}") if odd else body(f"and {wide} {value}, {mask}")
                for value in (x64, y64)
            )
            product = body(f"mul {wide} {a}, {b}")
            low = body(f"and {wide} {product}, {mask}")
            factor = body(f"mul {wide} {low}, {splat('i64', pairs, inverse)}")
            factor = body(f"and {wide} {factor}, {mask}")
            away = body(f"mul {wide} {factor}, {splat('i64', pairs, self.field.modulus)}")
            for kept, part in zip(highs, (product, away), strict=True):
                kept.append(body(f"bitcast {wide} {part} to {self.type}"))
        lanes = "<" + ", ".join(f"i32 {i + 1}, i32 {self.lanes + i + 1}" for i in range(0, self.lanes, 2)) + ">"
        high, less = (
            body(f"shufflevector {self.type} {even}, {self.type} {odd_}, <{self.lanes} x i32> {lanes}")
            for even, odd_ in highs
        )
        return self._minus(body, high, less)
