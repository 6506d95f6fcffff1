"""Field arithmetic on packs of elements in LLVM IR: the interface and its implementations.

A pack is `lanes` elements in registers. The implementations of PackedField are

    PackedLimbs        64-bit limbs, 128-bit products, one element; any processor      BN254, BLS12-381
    PackedIfma         52-bit limbs, eight elements; AVX512-IFMA                       BN254, BLS12-381
    PackedGoldilocks   one word per element, one element or a vector of eight          Goldilocks
    PackedMersenne61   one word per element, one element or a vector of eight          2^61 - 1
    PackedBabyBear     one word per element, one element or a vector of sixteen        BabyBear

Each defines these internal functions, always inlined, where FIELD is the field's name and T the type of a pack. None
branches on an element or takes an address from one.

    T    FIELD_load(ptr x, i64 i, i64 stop)         elements i .. i + lanes - 1 of an array; 0 from stop on
    void FIELD_store(ptr x, i64 i, i64 stop, T)     stores them; writes nothing from stop on
    T    FIELD_load_left, FIELD_load_half           loads times 2^d or 2^(d/2), d = `shift` > 0: for products only
    T    FIELD_add, FIELD_sub(T x, T y)             x, y < p
    T    FIELD_neg(T x)                             x < p
    T    FIELD_mul(T x, T y)                        x y / L mod p, L the implementation's `radix`
    T    FIELD_square(T x)                          x x / L mod p
    T    FIELD_one_for_zero(T x, T one)             `one` where x is 0, else x
    T    FIELD_keep_zero(T x, T y)                  0 where x is 0, else y
    T    FIELD_fold(T x)                            the sum of a pack, in its first element

All results are below p. In mul x is below p, and y any number that fits in the words of an element; in PackedIfma it
suffices that x y < L p. FIELD_mul_call and FIELD_square_call are the same functions, not inlined. Other operands give
an undefined number, but no error.

In memory an element is contiguous words, the least significant first; its Montgomery form there is x R mod p with R =
`memory_radix`. L and R differ where limbs have 52 bits: L = 2^d R, so a product of Montgomery forms loads one operand
with load_left.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from accelerant.algebra.field.parameters import Field
from accelerant.runtime.compilation import llvm
from accelerant.runtime.compilation.llvm import REGISTERS, FunctionBuilder, Operand, Value, constant, vector

ELEMENT = ("ptr %x", "i64 %i", "i64 %stop")  # Arguments of the functions that read or write elements of an array


class PackedField(Protocol):
    """A field's arithmetic on packs; the private methods write the bodies of the functions that the module lists."""

    field: Field
    lanes: int
    type: str
    radix: int  # L, the divisor of products (not reduced mod p); 1 where they are not divided
    memory_radix: int  # R of the Montgomery form in memory; 1 where that is the canonical form
    shift: int = 0  # d with L = 2^d R

    def constant(self, value: int) -> Value:
        """Return a pack of equal elements."""
        ...

    def _load(self, code: FunctionBuilder) -> Operand: ...
    def _store(self, code: FunctionBuilder) -> None: ...

    def functions(self) -> list[FunctionBuilder]:
        """Return the functions that the module's docstring lists, without the called ones; a method writes each."""
        store = FunctionBuilder(f"{self.field.name}_store", [*ELEMENT, f"{self.type} %z"])
        self._store(store)
        store.ret()
        packs = [f"{self.type} %x", f"{self.type} %y"]
        counts = dict.fromkeys(("neg", "square", "fold"), 1)
        counts |= dict.fromkeys(("add", "sub", "mul", "one_for_zero", "keep_zero"), 2)
        own = [self.function(name, packs[:count], getattr(self, f"_{name}")) for name, count in counts.items()]
        return [self.function("load", ELEMENT, self._load), store, *own]

    def called_functions(self) -> list[FunctionBuilder]:
        """Return FIELD_mul_call and FIELD_square_call: most of what compilation takes is the bodies of products."""
        functions = []
        for name, packs in (("mul", ("%x", "%y")), ("square", ("%x",))):
            called, arguments = f"{self.field.name}_{name}_call", [f"{self.type} {pack}" for pack in packs]
            code = FunctionBuilder(
                called, arguments, self.type, linkage=f"internal {REGISTERS}", attributes=llvm.NOINLINE
            )
            code.ret(self.call(code, name, *packs))
            functions.append(code)
        return functions

    def function(self, name: str, arguments: Sequence[str], write: Callable[..., Operand]) -> FunctionBuilder:
        """Return FIELD_name, which returns a pack."""
        code = FunctionBuilder(f"{self.field.name}_{name}", arguments, self.type)
        code.ret(write(code))
        return code

    def call(self, code: FunctionBuilder, name: str, *packs: str) -> Value:
        """Append a call of FIELD_name on packs."""
        arguments = ", ".join(f"{self.type} {pack}" for pack in packs)
        convention = f"{REGISTERS} " if name.endswith("_call") else ""
        return code(f"call {convention}{self.type} @{self.field.name}_{name}({arguments})", self.type)

    def load(self, code: FunctionBuilder, pointer: str, i: str, stop: str, suffix: str = "") -> Value:
        """Append a call of FIELD_load, or with the suffix FIELD_load_left or FIELD_load_half."""
        return code(f"call {self.type} @{self.field.name}_load{suffix}(ptr {pointer}, i64 {i}, i64 {stop})", self.type)

    def store(self, code: FunctionBuilder, pointer: str, i: str, stop: str, pack: str) -> None:
        """Append a call of FIELD_store."""
        code.do(f"call void @{self.field.name}_store(ptr {pointer}, i64 {i}, i64 {stop}, {self.type} {pack})")

    def times(self, code: FunctionBuilder, pack: str, factor: int) -> str:
        """Return the product of a pack and factor / L; the pack itself where the factor is L."""
        factor %= self.field.modulus
        if factor == self.radix % self.field.modulus:
            return pack
        return self.call(code, "mul_call", self.constant(factor), pack)


# --- several limbs, one element --------------------------------------------------------------------------------------
class PackedLimbs(PackedField):
    """One element of several 64-bit limbs, an LLVM integer of 64 W bits, whose additions LLVM makes chains of carries.

    p has a spare bit, so that a sum of two elements fits. A product adds, for each word of y, that word times x, and p
    times an m that makes the lowest word 0, which is then dropped. For x < p the sum stays below 2 p 2^64, so W + 1
    words hold it, for any y. Each such row is added as two wide numbers, the products of even and those of odd words,
    since LLVM makes carry chains of wide additions and not of single carries. Source: Koc, Acar and Kaliski 1996, IEEE
    Micro 16(3), "CIOS".
    """

    lanes = 1

    def __init__(self, field: Field) -> None:
        bits = 64 * field.limbs
        if field.word_bits != 64 or field.bits >= bits:
            raise ValueError(f"{field.name}: wanted 64-bit words and a spare bit, p has {field.bits} bits")
        self.field, self._bits = field, bits
        self.type, self._wide = f"i{bits}", f"i{bits + 64}"
        self.radix = self.memory_radix = 1 << bits

    def constant(self, value: int) -> Value:
        """Return the number."""
        return constant(self.type, value)

    def _load(self, code: FunctionBuilder) -> Operand:
        return code.load(self.type, code.at(f"[{self.field.limbs} x i64]", "%x", "%i"), align=8)

    def _store(self, code: FunctionBuilder) -> None:
        code.store(self.type, "%z", code.at(f"[{self.field.limbs} x i64]", "%x", "%i"), align=8)

    def _widen(self, code: FunctionBuilder, value: str) -> Value:
        return code.convert("zext", value, self._wide)

    def _settle(self, code: FunctionBuilder, difference: Value) -> Value:
        """Return a wide difference, which is between -p and p, plus p where it is negative."""
        mask = hide(code, code.convert("trunc", code.op("lshr", difference, self._bits), "i64"))
        correction = code.op("and", code.convert("sext", mask, self.type), self.field.modulus)
        return code.op("add", code.convert("trunc", difference, self.type), correction)

    def _add(self, code: FunctionBuilder) -> Operand:
        total = code.op("add", self._widen(code, "%x"), self._widen(code, "%y"))
        return self._settle(code, code.op("sub", total, self.field.modulus))

    def _sub(self, code: FunctionBuilder) -> Operand:
        return self._settle(code, code.op("sub", self._widen(code, "%x"), self._widen(code, "%y")))

    def _neg(self, code: FunctionBuilder) -> Operand:
        return self._settle(code, code.op("sub", 0, self._widen(code, "%x")))

    def _word(self, code: FunctionBuilder, value: str, index: int) -> Value:
        """Return a word of an element, zero-extended to 128 bits."""
        word = code.convert("trunc", code.op("lshr", value, 64 * index), "i64")
        return code.convert("zext", word, "i128")

    def _add_row(self, code: FunctionBuilder, total: Value, words: list[Value], factor: Value) -> Value:
        """Return total + factor times the number of these words (128 bits each), as wide numbers."""
        for first in (0, 1):
            row = constant(self._wide, 0)
            for j in range(first, len(words), 2):
                part = self._widen(code, code.op("mul", words[j], factor))
                row = code.op("or", row, code.op("shl", part, 64 * j))
            total = code.op("add", total, row)
        return total

    def _mul(self, code: FunctionBuilder) -> Operand:
        count, field = self.field.limbs, self.field
        x = [self._word(code, "%x", j) for j in range(count)]
        modulus = [constant("i128", word) for word in field.words(field.modulus, 64, count)]
        total = constant(self._wide, 0)
        for i in range(count):
            total = self._add_row(code, total, x, self._word(code, "%y", i))
            factor = code.op("mul", code.convert("trunc", total, "i64"), field.montgomery_inverse(64))
            total = self._add_row(code, total, modulus, code.convert("zext", factor, "i128"))
            total = code.op("lshr", total, 64)
        return self._settle(code, code.op("sub", total, field.modulus))

    def _square(self, code: FunctionBuilder) -> Operand:
        return self.call(code, "mul", "%x", "%x")  # doubling saves multiplies, but its additions take longer

    def _is_zero(self, code: FunctionBuilder) -> Value:
        """Return all ones where x is 0, else 0, as wide as an element: x - 1 borrows from the word above only at 0."""
        less = code.op("sub", self._widen(code, "%x"), 1)
        mask = hide(code, code.convert("trunc", code.op("lshr", less, self._bits), "i64"))
        return code.convert("sext", mask, self.type)

    def _one_for_zero(self, code: FunctionBuilder) -> Operand:
        return code.op("or", "%x", code.op("and", self._is_zero(code), "%y"))

    def _keep_zero(self, code: FunctionBuilder) -> Operand:
        return code.op("and", code.op("xor", self._is_zero(code), -1), "%y")

    def _fold(self, code: FunctionBuilder) -> Operand:
        return "%x"


def hide(code: FunctionBuilder, mask: Value) -> Value:
    """Return the mask, opaque to LLVM, which may otherwise turn its use into a branch."""
    return code(f'call i64 asm "", "=r,0"(i64 {mask})', "i64")


# --- one word an element ---------------------------------------------------------------------------------------------
class _PackedWords(PackedField):
    """Elements of one word: eight of 64 bits, sixteen of 32, or one; subclasses add and multiply any two values."""

    def __init__(self, field: Field, lanes: int) -> None:
        self.field, self.lanes = field, lanes
        self._word, self._size = f"i{field.word_bits}", field.word_bits // 8
        self.type = vector(self._word, lanes)
        self._p = self.constant(field.modulus)

    def constant(self, value: int) -> Value:
        return constant(self.type, value)

    def _mask(self, code: FunctionBuilder) -> Value:
        bound = code.broadcast(code.op("sub", "%stop", "%i"), self.lanes)
        return code.compare("sgt", bound, llvm.lane_constants("i64", range(self.lanes)))

    def _load(self, code: FunctionBuilder) -> Operand:
        address = code.at(self._word, "%x", "%i")
        if self.lanes == 1:
            return code.load(self.type, address, align=self._size)
        return code.masked_load(self.type, address, self._mask(code), self._size)

    def _store(self, code: FunctionBuilder) -> None:
        address = code.at(self._word, "%x", "%i")
        if self.lanes == 1:
            code.store(self.type, "%z", address, align=self._size)
        else:
            code.masked_store("%z", address, self._mask(code), self._size)

    def _where(self, code: FunctionBuilder, relation: str, x: Operand, y: Operand, value: Operand) -> Value:
        """Return the value where x and y are so related, else 0."""
        return code.op("and", code.convert("sext", code.compare(relation, x, y), self._word), value)

    def _neg(self, code: FunctionBuilder) -> Operand:
        return self._sub(code, self.constant(0), "%x")

    def _mul(self, code: FunctionBuilder) -> Operand:
        return self._product(code, "%x", "%y")

    def _square(self, code: FunctionBuilder) -> Operand:
        return self._product(code, "%x", "%x")

    @abstractmethod
    def _add(self, code: FunctionBuilder, x: Operand = "%x", y: Operand = "%y") -> Value: ...

    def _sub(self, code: FunctionBuilder, x: Operand = "%x", y: Operand = "%y") -> Value:
        return code.op("add", code.op("sub", x, y), self._where(code, "ult", x, y, self._p))

    @abstractmethod
    def _product(self, code: FunctionBuilder, x: str, y: str) -> Value: ...

    def _halves(self, code: FunctionBuilder, x: str, y: str) -> tuple[Value, Value]:
        """Return the low and the high 64 bits of products of 64-bit words."""
        if self.lanes == 1:
            product = code.op("mul", code.convert("zext", x, "i128"), code.convert("zext", y, "i128"))
            high = code.convert("trunc", code.op("lshr", product, 64), "i64")
            return code.convert("trunc", product, "i64"), high
        mask = 2**32 - 1
        x0, y0 = (code.op("and", value, mask) for value in (x, y))
        x1, y1 = (code.op("lshr", value, 32) for value in (x, y))
        lowest = code.op("mul", x0, y0)
        middle = code.op("add", code.op("mul", x0, y1), code.op("lshr", lowest, 32))
        other = code.op("add", code.op("mul", x1, y0), code.op("and", middle, mask))
        high = code.op("add", code.op("mul", x1, y1), code.op("lshr", middle, 32))
        high = code.op("add", high, code.op("lshr", other, 32))
        return code.op("or", code.op("shl", other, 32), code.op("and", lowest, mask)), high

    def _one_for_zero(self, code: FunctionBuilder) -> Operand:
        return code.op("or", "%x", self._where(code, "eq", "%x", 0, "%y"))

    def _keep_zero(self, code: FunctionBuilder) -> Operand:
        return self._where(code, "ne", "%x", 0, "%y")

    def _fold(self, code: FunctionBuilder) -> Operand:
        value: Operand = "%x"
        for step in (self.lanes >> k for k in range(1, self.lanes.bit_length())):
            rotated = code.shuffle(value, None, [(lane + step) % self.lanes for lane in range(self.lanes)])
            value = self._add(code, value, rotated)
        return value


class PackedGoldilocks(_PackedWords):
    """p = 2^64 - 2^32 + 1, no Montgomery form (L = R = 1); operands of mul may be any 64-bit numbers.

    With e = 2^32 - 1 = 2^64 - p, 2^64 = e and 2^96 = -1 mod p, so a product lo + 2^64 hl + 2^96 hh is lo - hh + e hl,
    and a carry out is paid by adding e. Source: Hamburg 2015, eprint 2015/625, with phi = 2^32.
    """

    radix = memory_radix = 1

    def __init__(self, field: Field, lanes: int) -> None:
        super().__init__(field, lanes)
        self._e = self.constant(2**64 - field.modulus)

    def _canonical(self, code: FunctionBuilder, x: Value) -> Value:
        """Return x - p where x >= p; any x."""
        return code.op("sub", x, self._where(code, "uge", x, self._p, self._p))

    def _add_any(self, code: FunctionBuilder, x: Operand, y: Operand) -> Value:
        """Return x + y mod p below 2^64, where x + y < 2^64 + p: paying the carry does not carry again."""
        total = code.op("add", x, y)
        return code.op("add", total, self._where(code, "ult", total, x, self._e))

    def _add(self, code: FunctionBuilder, x: Operand = "%x", y: Operand = "%y") -> Value:
        return self._canonical(code, self._add_any(code, x, y))

    def _sub(self, code: FunctionBuilder, x: Operand = "%x", y: Operand = "%y") -> Value:
        return code.op("sub", code.op("sub", x, y), self._where(code, "ult", x, y, self._e))

    def _product(self, code: FunctionBuilder, x: str, y: str) -> Value:
        low, high = self._halves(code, x, y)
        upper, lower = code.op("lshr", high, 32), code.op("and", high, 2**32 - 1)
        # lo - hh: below 2^32 borrows only if lo < 2^32, and then what is left is above e.
        rest = self._sub(code, low, upper)
        scaled = code.op("sub", code.op("shl", lower, 32), lower)
        return self._canonical(code, self._add_any(code, rest, scaled))


class PackedMersenne61(_PackedWords):
    """p = 2^61 - 1, L = R = 1: bits above the lowest 61 are added to those; operands of mul may be any 64 bits."""

    radix = memory_radix = 1

    def _reduced(self, code: FunctionBuilder, x: Value) -> Value:
        """Return x mod p; any x: the sum of its parts is at most p + 7."""
        total = code.op("add", code.op("and", x, self._p), code.op("lshr", x, 61))
        return code.op("sub", total, self._where(code, "uge", total, self._p, self._p))

    def _add(self, code: FunctionBuilder, x: Operand = "%x", y: Operand = "%y") -> Value:
        return self._reduced(code, code.op("add", x, y))

    def _product(self, code: FunctionBuilder, x: str, y: str) -> Value:
        low, high = self._halves(code, x, y)
        above = code.op("or", code.op("shl", high, 3), code.op("lshr", low, 61))  # below 2^64: x < 2^61
        return self._reduced(code, code.op("add", self._reduced(code, above), code.op("and", low, self._p)))


class PackedBabyBear(_PackedWords):
    """p = 15 2^27 + 1, L = R = 2^32; even and odd lanes are multiplied apart, as the low halves of 64-bit lanes."""

    radix = memory_radix = 1 << 32

    def _add(self, code: FunctionBuilder, x: Operand = "%x", y: Operand = "%y") -> Value:
        total = code.op("add", x, y)  # below 2 p < 2^32: it does not wrap
        return code.op("sub", total, self._where(code, "uge", total, self._p, self._p))

    def _product(self, code: FunctionBuilder, x: str, y: str) -> Value:
        """Return the difference of the high halves of x y and m p, whose low halves are equal: m = x y / p mod 2^32."""
        p, inverse, mask = self.field.modulus, pow(self.field.modulus, -1, 1 << 32), 2**32 - 1
        if self.lanes == 1:
            product = code.op("mul", code.convert("zext", x, "i64"), code.convert("zext", y, "i64"))
            factor = code.op("and", code.op("mul", product, inverse), mask)
            parts = (product, code.op("mul", factor, p))
            high, less = (code.convert("trunc", code.op("lshr", part, 32), "i32") for part in parts)
            return self._sub(code, high, less)
        pairs = vector("i64", self.lanes // 2)
        operands = [code.bitcast(value, pairs) for value in (x, y)]
        halves: list[tuple[Value, Value]] = []
        for odd in (False, True):
            a, b = (code.op("lshr", value, 32) if odd else code.op("and", value, mask) for value in operands)
            product = code.op("mul", a, b)
            factor = code.op("and", code.op("mul", code.op("and", product, mask), inverse), mask)
            reduction = code.op("mul", factor, p)
            halves.append((code.bitcast(product, self.type), code.bitcast(reduction, self.type)))
        order = [lane for i in range(1, self.lanes, 2) for lane in (i, self.lanes + i)]
        high, less = (code.shuffle(even, odd, order) for even, odd in zip(*halves, strict=True))
        return self._sub(code, high, less)


LIMB_BITS = 52
LANE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the element that each lane holds: loads leave them interleaved

_LANES = 8
_MASK = (1 << LIMB_BITS) - 1
_V = "<8 x i64>"
_UNPACK_EVEN = (0, 8, 2, 10, 4, 12, 6, 14)
_UNPACK_ODD = (1, 9, 3, 11, 5, 13, 7, 15)
_ZERO = constant(_V, 0)


class PackedIfma(PackedField):
    """Eight elements of a field of several limbs by AVX512-IFMA: 52-bit limbs, one register per limb, [K x <8 x i64>].

    vpmadd52luq and vpmadd52huq multiply the low 52 bits of two lanes and add the low or the high 52 bits of the product
    to a 64-bit lane, so that carries can wait: a column takes 4 K additions of numbers below 2^52 (K limbs, 8 at most),
    which stay below 2^57. A pack is normal if each limb is below 2^52. All packs between functions are, except those of
    load_left and load_half. Columns are sums that are not yet carried.

        mul        the 2 K columns of x y first, all independent; then K steps, each of which adds m p so that the
                   lowest column becomes 0 in its low 52 bits, and carries what is above into the next. Bound by the two
                   ports of vpmadd52: 4 K^2 of them, 100 for 4 words (K = 5) and 256 for 6 (K = 8).
        square     products of different limbs once, doubled.
        load       words of eight elements are transposed by shuffles, then split into limbs by funnel shifts.

    Source: Gueron and Krasnov 2016, "Accelerating Big Integer Arithmetic Using Intel IFMA Extensions", ARITH 23.
    """

    lanes = _LANES

    def __init__(self, field: Field) -> None:
        words = field.limbs
        if field.word_bits != 64 or words % 2:
            raise ValueError(f"{field.name}: wanted an even number of 64-bit words, got {words}")
        self.field, self._words = field, words
        self.limbs = -(-64 * words // LIMB_BITS)
        self.type = f"[{self.limbs} x {_V}]"
        self.radix, self.memory_radix = 1 << LIMB_BITS * self.limbs, 1 << 64 * words
        self.shift = LIMB_BITS * self.limbs - 64 * words
        self._modulus = field.words(field.modulus, LIMB_BITS, self.limbs)

    def constant(self, value: int) -> Value:
        """Return the limbs, each in all lanes."""
        limbs = self.field.words(value, LIMB_BITS, self.limbs)
        return Value("[" + ", ".join(f"{_V} {constant(_V, limb)}" for limb in limbs) + "]", self.type)

    def functions(self) -> list[FunctionBuilder]:
        """Return the functions that the module lists, with load_left and load_half."""
        shifts = {"load_left": self.shift, "load_half": self.shift // 2}
        return [
            *super().functions(),
            *(self.function(name, ELEMENT, lambda code, d=d: self._load(code, d)) for name, d in shifts.items()),
        ]

    def _registers(self, code: FunctionBuilder) -> list[tuple[Value, Value]]:
        """Return the address of each of W registers of an array's words, and the mask of its words before stop."""
        bound = code.broadcast(code.op("mul", code.op("sub", "%stop", "%i"), self._words), _LANES)
        first = code.at(f"[{self._words} x i64]", "%x", "%i")
        return [
            (
                code.at("i8", first, 64 * j),
                code.compare("sgt", bound, llvm.lane_constants("i64", range(8 * j, 8 * j + 8))),
            )
            for j in range(self._words)
        ]

    def _load(self, code: FunctionBuilder, shift: int = 0) -> Operand:
        """Load a pack. A shifted one is not normal; products, its only use, ignore the bits above 52."""
        words = _columns(code, [code.masked_load(_V, address, mask, 8) for address, mask in self._registers(code)])
        limbs = [limb_of(code, words, LIMB_BITS * k - shift, masked=not shift) for k in range(self.limbs)]
        return code.array(self.type, limbs)

    def _store(self, code: FunctionBuilder) -> None:
        limbs = code.parts("%z")
        words = [word_of(code, limbs, 64 * j) for j in range(self._words)]
        for row, (address, mask) in zip(_rows(code, words), self._registers(code), strict=True):
            code.masked_store(row, address, mask, 8)

    def _settle(self, code: FunctionBuilder, less: Sequence[Value], more: Sequence[Value]) -> Value:
        """Return `less`, between -p and p, or `more` = less + p where it is negative, by two parallel carry chains."""
        carried = [_carry(code, columns) for columns in (less, more)]
        negative = code.compare("slt", carried[0][-1], 0)
        limbs = [code.select(negative, b, a) for a, b in zip(*carried, strict=True)]
        return code.array(self.type, [code.op("and", limb, _MASK) for limb in limbs])

    def _add(self, code: FunctionBuilder) -> Operand:
        total = _each(code, "add", code.parts("%x"), code.parts("%y"))
        return self._settle(code, _each(code, "sub", total, self._modulus), total)

    def _sub(self, code: FunctionBuilder) -> Operand:
        difference = _each(code, "sub", code.parts("%x"), code.parts("%y"))
        return self._settle(code, difference, _each(code, "add", difference, self._modulus))

    def _neg(self, code: FunctionBuilder) -> Operand:
        negated = [code.op("sub", 0, x) for x in code.parts("%x")]
        return self._settle(code, negated, _each(code, "add", negated, self._modulus))

    def _mul(self, code: FunctionBuilder) -> Operand:
        xs, ys = code.parts("%x"), code.parts("%y")
        columns = [_ZERO] * (2 * self.limbs)
        for i, y in enumerate(ys):
            for j, x in enumerate(xs):
                _accumulate(code, columns, i + j, x, y)
        return self._reduce(code, columns)

    def _square(self, code: FunctionBuilder) -> Operand:
        xs = code.parts("%x")
        columns = [_ZERO] * (2 * self.limbs)
        for i, y in enumerate(xs):
            for j, x in enumerate(xs[:i]):
                _accumulate(code, columns, i + j, x, y)
        columns = [column if column is _ZERO else code.op("add", column, column) for column in columns]
        for i, x in enumerate(xs):
            _accumulate(code, columns, 2 * i, x, x)
        return self._reduce(code, columns)

    def _reduce(self, code: FunctionBuilder, columns: list[Value]) -> Value:
        """Return (the columns' number) / L mod p, for a number below L p.

        m p makes the low 52 bits of column i zero, so it only adds a carry to the next column, 1 unless those bits were
        0 already: it is known before m. The next column decides the next m, so its two products are kept apart.
        """
        inverse = constant(_V, self.field.montgomery_inverse(LIMB_BITS))
        modulus = [constant(_V, limb) for limb in self._modulus]
        for i in range(self.limbs):
            factor = _multiply_add(code, "l", _ZERO, columns[i], inverse)
            carry = code.op("lshr", code.op("add", columns[i], _MASK), LIMB_BITS)
            high = _multiply_add(code, "h", _ZERO, modulus[0], factor)
            columns[i + 1] = code.op("add", columns[i + 1], carry)
            for j, p in enumerate(modulus[1:], start=1):
                _accumulate(code, columns, i + j, p, factor)
                if j == 1:
                    columns[i + 1] = code.op("add", columns[i + 1], high)
        total = columns[self.limbs :]
        return self._settle(code, _each(code, "sub", total, self._modulus), total)

    def _one_for_zero(self, code: FunctionBuilder) -> Operand:
        zero = all_zero(code, code.parts("%x"))
        pairs = zip(code.parts("%x"), code.parts("%y"), strict=True)
        return code.array(self.type, [code.select(zero, y, x) for x, y in pairs])

    def _keep_zero(self, code: FunctionBuilder) -> Operand:
        zero = all_zero(code, code.parts("%x"))
        return code.array(self.type, [code.select(zero, 0, y) for y in code.parts("%y")])

    def _fold(self, code: FunctionBuilder) -> Operand:
        pack: str = "%x"
        for step in (4, 2, 1):
            pack = self.call(code, "add", pack, code.array(self.type, rotated(code, code.parts(pack), step)))
        return pack


def limb_of(code: FunctionBuilder, words: Sequence[Value], low: int, *, masked: bool = True) -> Value:
    """Return 52 bits (more if not masked) of a number in 64-bit words, from bit `low` on, which may be negative."""
    word, offset = divmod(low, 64)
    if low < 0:
        limb = code.op("shl", words[0], -low)
    elif offset == 0:
        limb = words[word]
    elif word + 1 == len(words):
        limb = code.op("lshr", words[word], offset)
    else:
        limb = code.intrinsic(_V, "llvm.fshr.v8i64", words[word + 1], words[word], constant(_V, offset))
    return code.op("and", limb, _MASK) if masked else limb


def word_of(code: FunctionBuilder, limbs: Sequence[Value], low: int) -> Value:
    """Return 64 bits of a number in 52-bit limbs, from bit `low` on."""
    first, offset = divmod(low, LIMB_BITS)
    word = code.op("lshr", limbs[first], offset) if offset else limbs[first]
    for k in range(first + 1, min(-(-(low + 64) // LIMB_BITS), len(limbs))):
        word = code.op("or", word, code.op("shl", limbs[k], LIMB_BITS * k - low))
    return word


def all_zero(code: FunctionBuilder, limbs: Sequence[Value]) -> Value:
    """Return the mask of the lanes whose limbs are all 0."""
    combined = functools.reduce(lambda a, b: code.op("or", a, b), limbs)
    return code.compare("eq", combined, 0)


def rotated(code: FunctionBuilder, limbs: Sequence[Value], step: int) -> list[Value]:
    """Return the limbs with lane l + step in lane l, modulo the lanes."""
    order = [(lane + step) % _LANES for lane in range(_LANES)]
    return [code.shuffle(limb, None, order) for limb in limbs]


def _each(code: FunctionBuilder, operation: str, xs: Sequence[Value], ys: Sequence[Operand]) -> list[Value]:
    return [code.op(operation, x, y) for x, y in zip(xs, ys, strict=True)]


def _multiply_add(code: FunctionBuilder, half: str, total: Value, x: Value, y: Value) -> Value:
    return code.intrinsic(_V, f"llvm.x86.avx512.vpmadd52{half}.uq.512", total, x, y)


def _accumulate(code: FunctionBuilder, columns: list[Value], k: int, x: Value, y: Value) -> None:
    """Add x y to the columns, its low half to column k and its high half to the one above."""
    columns[k] = _multiply_add(code, "l", columns[k], x, y)
    columns[k + 1] = _multiply_add(code, "h", columns[k + 1], x, y)


def _carry(code: FunctionBuilder, columns: Sequence[Value]) -> list[Value]:
    """Carry from each column to the next: limbs are in the low 52 bits, the sign in the highest column's upper bits."""
    carried = [columns[0]]
    for column in columns[1:]:
        carried.append(code.op("add", column, code.op("ashr", carried[-1], LIMB_BITS)))
    return carried


def _columns(code: FunctionBuilder, rows: Sequence[Value]) -> list[Value]:
    """Transpose the words of eight elements to a register for each word; lanes are in LANE_ORDER."""
    words, pairs = [], len(rows) // 2
    for k in range(pairs):
        halves = []
        for h in range(2):
            numbers = [pairs * (4 * h + e) + k for e in range(4)]
            halves.append(_pick(code, [rows[n // 4] for n in numbers], [n % 4 for n in numbers]))
        words += [code.shuffle(halves[0], halves[1], order) for order in (_UNPACK_EVEN, _UNPACK_ODD)]
    return words


def _rows(code: FunctionBuilder, words: Sequence[Value]) -> list[Value]:
    """Return the inverse of _columns."""
    pairs = len(words) // 2
    halves: list[list[Value]] = [[], []]
    for k in range(pairs):
        for half, order in zip(halves, (_UNPACK_EVEN, _UNPACK_ODD), strict=True):
            half.append(code.shuffle(words[2 * k], words[2 * k + 1], order))
    rows = []
    for r in range(2 * pairs):
        elements = [divmod(4 * r + c, pairs) for c in range(4)]
        sources = [halves[element // 4][k] for element, k in elements]
        rows.append(_pick(code, sources, [element % 4 for element, _ in elements]))
    return rows


def _pick(code: FunctionBuilder, sources: Sequence[Value], positions: Sequence[int]) -> Value:
    """Return a register whose pair c is pair positions[c] of sources[c]: one shuffle fewer than distinct sources."""
    distinct = list(dict.fromkeys(sources))
    picked, done = distinct[0], {c: p for c, p in enumerate(positions) if sources[c] == distinct[0]}
    for source in distinct[1:]:
        lanes = []
        for c in range(4):
            pair = 4 + positions[c] if sources[c] == source else done.get(c, c)
            lanes += [2 * pair, 2 * pair + 1]
        picked = code.shuffle(picked, source, lanes)
        done = {c: c for c in range(4)}
    return picked
