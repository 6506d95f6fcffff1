"""What the CPU's field kernels ask of a form of arithmetic: how elements lie in registers, and the functions on them.

A form is one of

    llvm_limbs.py   64-bit limbs, 128-bit products; any processor             BN254, BLS12-381
    llvm_lanes.py   52-bit limbs, eight elements a register; AVX512-IFMA      the same
    llvm_words.py   one word an element, vectors or not                       Goldilocks, BabyBear

and gives these internal functions, always inlined, FIELD standing for the field's name and T for the form's type (a
pack of `lanes` elements). None branches on an element or takes an address from one.

    T    FIELD_load(ptr x, i64 i, i64 stop)         elements i .. i + lanes - 1 of an array; 0 from stop on
    void FIELD_store(ptr z, i64 i, i64 stop, T)     the same; writes nothing from stop on
    T    FIELD_load_left, FIELD_load_half           times 2^d and 2^(d/2), d = `shift` > 0: for products only
    T    FIELD_add, FIELD_sub(T x, T y)             x, y < p
    T    FIELD_neg(T x)                             x < p
    T    FIELD_mul(T x, T y)                        x y / L mod p, L the form's `radix`
    T    FIELD_square(T x)                          the same with y = x
    T    FIELD_one_for_zero(T x, T one)             `one` where x is 0, else x
    T    FIELD_keep_zero(T x, T y)                  0 where x is 0, else y
    T    FIELD_fold(T x)                            the sum of a pack, in its first element

All results are below p. In mul x is below p, and y any number that fits in the words of an element; in llvm_lanes.py it
suffices that x y < L p. FIELD_mul_far and FIELD_square_far (`far`) are the same functions, not inlined. Operands beyond
what is said here give an undefined number, and nothing worse.

In memory an element is words, the least significant first, contiguous; its Montgomery form there is x R mod p with R =
`memory_radix`. L and R differ where limbs have 52 bits: L = 2^d R, so a product of Montgomery forms loads one operand
with load_left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from accelerant.algebra.field.llvm_text import INLINE, NOINLINE, REGISTERS, Body, function
from accelerant.algebra.field.parameters import Field

__all__ = ["Form"]

_FAR = ("mul_far", "square_far")


class Form(ABC):
    """The arithmetic of a field in LLVM IR.

    Attributes:
        field: which.
        lanes: elements in a pack.
        type: LLVM's type of a pack.
        radix: L, what a product is divided by (not reduced mod p); 1 where it is not divided.
        memory_radix: R, of the Montgomery form in memory; 1 where that is the canonical form.
        shift: d with L = 2^d R.
    """

    field: Field
    lanes: int
    type: str
    radix: int
    memory_radix: int
    shift: int = 0

    @abstractmethod
    def constant(self, value: int) -> str:
        """A pack of equal elements, without its type."""

    @abstractmethod
    def functions(self) -> str:
        """The definitions that the module's docstring lists, and what they declare."""

    def call(self, body: Body, name: str, *packs: str) -> str:
        """Call FIELD_name on packs; the name of the result."""
        return body(self.called(name, *packs))

    def called(self, name: str, *packs: str) -> str:
        """The instruction that calls FIELD_name on packs."""
        arguments = ", ".join(f"{self.type} {pack}" for pack in packs)
        convention = f"{REGISTERS} " if name in _FAR else ""
        return f"call {convention}{self.type} @{self.field.name}_{name}({arguments})"

    def load(self, body: Body, pointer: str, i: str, stop: str, suffix: str = "") -> str:
        """Call FIELD_load, or with the suffix FIELD_load_left or FIELD_load_half."""
        name = f"{self.field.name}_load{suffix}"
        return body(f"call {self.type} @{name}(ptr {pointer}, i64 {i}, i64 {stop})")

    def store(self, body: Body, pointer: str, i: str, stop: str, pack: str) -> None:
        """Call FIELD_store."""
        body.do(f"call void @{self.field.name}_store(ptr {pointer}, i64 {i}, i64 {stop}, {self.type} {pack})")

    def times(self, body: Body, pack: str, factor: int) -> str:
        """The product of a pack and factor / L; the pack itself where the factor is L."""
        factor %= self.field.modulus
        if factor == self.radix % self.field.modulus:
            return pack
        return self.call(body, "mul_far", self.constant(factor), pack)

    def far(self) -> str:
        """FIELD_mul_far and FIELD_square_far, the same not inlined: most of what compilation takes is their bodies."""
        definitions = []
        for name, packs in (("mul", ("%x", "%y")), ("square", ("%x",))):
            body = Body()
            body.do(f"ret {self.type} {self.call(body, name, *packs)}")
            arguments = [f"{self.type} {pack}" for pack in packs]
            definitions.append(
                function(f"{self.field.name}_{name}_far", self.type, arguments, body, f"internal {REGISTERS}", NOINLINE)
            )
        return "".join(definitions)

    def define(self, name: str, arguments: list[str], body: Body, result: str = "") -> str:
        """A function of the form; its result is a pack unless another type is given."""
        return function(f"{self.field.name}_{name}", result or self.type, arguments, body, "internal", INLINE)
