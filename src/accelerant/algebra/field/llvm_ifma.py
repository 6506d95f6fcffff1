"""Prime fields of several limbs by AVX512-IFMA: eight elements at a time, 52-bit limbs, one register per limb.

vpmadd52luq and vpmadd52huq multiply the low 52 bits of two lanes and add the low or the high 52 bits of the product to
a 64-bit lane, so that carries can wait: a column takes 4 K additions of numbers below 2^52 (K limbs, 8 at most), which
stay below 2^57. A pack is [K x <8 x i64>].

A pack is normal if each limb is below 2^52. All packs between functions are, except those of load_left and load_half.
Columns are sums that are not yet carried.

    mul        the 2 K columns of x y first, all independent; then K steps, each of which adds m p so that the lowest
               column becomes 0 in its low 52 bits, and carries what is above into the next. Latency is hidden by the
               next pack's instructions, out of order. Bound by the two ports of vpmadd52: 4 K^2 of them, 100 for 4
               words (K = 5) and 256 for 6 (K = 8).
    square     products of different limbs once, doubled.
    load       words of eight elements are transposed by shuffles, then split into limbs by funnel shifts.

Source: Gueron and Krasnov 2016, "Accelerating Big Integer Arithmetic Using Intel IFMA Extensions", ARITH 23.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from accelerant.algebra.field.llvm_packed import ELEMENT, PackedField
from accelerant.algebra.field.parameters import Field
from accelerant.runtime.compilation.llvm import FunctionBuilder, Operand, Value, constant, lane_constants

LIMB_BITS = 52
LANE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The element of a pack in memory that each lane holds: loads leave them interleaved."""

_LANES = 8
_MASK = (1 << LIMB_BITS) - 1
_V = "<8 x i64>"
_UNPACK_EVEN = (0, 8, 2, 10, 4, 12, 6, 14)
_UNPACK_ODD = (1, 9, 3, 11, 5, 13, 7, 15)
_ZERO = constant(_V, 0)


class PackedIfma(PackedField):
    """Eight elements of a field of several limbs."""

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
        """Return the functions that llvm_packed.py lists, with load_left and load_half."""
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
            (code.at("i8", first, 64 * j), code.compare("sgt", bound, lane_constants("i64", range(8 * j, 8 * j + 8))))
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
        """Return `less`, between -p and p, or `more` = less + p where it is negative; both are signed columns.

        The two carry chains run in parallel: as many instructions as adding p afterwards, in half the time.
        """
        carried = [_carry(code, columns) for columns in (less, more)]
        negative = code.compare("slt", carried[0][-1], 0)
        limbs = [code.select(negative, b, a) for a, b in zip(*carried, strict=True)]
        return code.array(self.type, [code.op("and", limb, _MASK) for limb in limbs])

    def _with_modulus(self, code: FunctionBuilder, operation: str, columns: Sequence[Value]) -> list[Value]:
        return [code.op(operation, column, p) for column, p in zip(columns, self._modulus, strict=True)]

    def _add(self, code: FunctionBuilder) -> Operand:
        total = _each(code, "add", code.parts("%x"), code.parts("%y"))
        return self._settle(code, self._with_modulus(code, "sub", total), total)

    def _sub(self, code: FunctionBuilder) -> Operand:
        difference = _each(code, "sub", code.parts("%x"), code.parts("%y"))
        return self._settle(code, difference, self._with_modulus(code, "add", difference))

    def _neg(self, code: FunctionBuilder) -> Operand:
        negated = [code.op("sub", 0, x) for x in code.parts("%x")]
        return self._settle(code, negated, self._with_modulus(code, "add", negated))

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
        0 already: no product is needed for it, and it is known before m. The next column decides the next m, so the two
        products for it are kept apart and run at the same time.
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
        return self._settle(code, self._with_modulus(code, "sub", total), total)

    def _is_zero(self, code: FunctionBuilder) -> Value:
        return all_zero(code, code.parts("%x"))

    def _one_for_zero(self, code: FunctionBuilder) -> Operand:
        zero = self._is_zero(code)
        pairs = zip(code.parts("%x"), code.parts("%y"), strict=True)
        return code.array(self.type, [code.select(zero, y, x) for x, y in pairs])

    def _keep_zero(self, code: FunctionBuilder) -> Operand:
        zero = self._is_zero(code)
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


def _each(code: FunctionBuilder, operation: str, xs: Sequence[Value], ys: Sequence[Value]) -> list[Value]:
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
    """Transpose the words of eight elements, contiguous in some registers, to one register for each word of an element.

    Two words of an element (a pair) move together first: the pairs k of four elements come into one register. Unpacking
    two such registers then gives words 2 k and 2 k + 1, the elements in LANE_ORDER.
    """
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
