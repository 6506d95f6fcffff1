"""Packs of field elements gathered from memory, and masks of their lanes.

PackedField (algebra/field/llvm_packed.py) loads contiguous elements; a pack of coordinates of points is not contiguous,
and sums of buckets gather points by index. A mask has a bit for each lane of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerant.algebra.field.llvm_ifma import LIMB_BITS, all_zero, limb_of, rotated, word_of
from accelerant.algebra.field.llvm_packed import PackedField, hide
from accelerant.runtime.compilation.llvm import FunctionBuilder, Operand, Value, constant, lane_constants, vector

__all__ = ["Packs"]

_PAIR = "<2 x i64>"


class Packs:
    """Loads, stores, masks and selections of packs of one element (a wide integer) or of eight in 52-bit limbs.

    Words of eight elements are moved two at a time: one register holds a pair of words of the lanes 0, 2, 4 and 6, one
    those of the odd lanes; unpacking them gives a register for each word.

    Attributes:
        packed: the arithmetic.
        mask: LLVM's type of a mask.
        numbers: LLVM's type of a 64-bit number for each lane.
    """

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

    def joined(self, code: FunctionBuilder, values: Sequence[Operand]) -> Value:
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
        return constant("i1", chosen[0]) if self._single else lane_constants("i1", chosen)

    def _limbs(self, code: FunctionBuilder, pack: str) -> list[Value]:
        return code.parts(Value(pack, self.packed.type))


def _join_pairs(code: FunctionBuilder, pairs: Sequence[Value]) -> Value:
    """Return four registers of two words as one."""
    halves = [code.shuffle(a, b, range(4)) for a, b in (pairs[:2], pairs[2:])]
    return code.shuffle(halves[0], halves[1], range(8))


def _unpack(code: FunctionBuilder, a: Value, b: Value, odd: int) -> Value:
    """Return the even or the odd lanes of a and b, in turn."""
    return code.shuffle(a, b, [lane + odd + step for lane in range(0, 8, 2) for step in (0, 8)])
