"""Packs of field elements that lie apart in memory, and masks of their lanes, for both forms of arithmetic.

The forms (algebra/field/llvm_form.py) load elements that stand side by side; coordinates of points do not, and sums of
buckets gather their points by index. A mask says for each lane of a pack yes or no.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from accelerant.algebra.curve.llvm_flow import Flow
from accelerant.algebra.field.llvm_form import Form
from accelerant.algebra.field.llvm_text import splat

__all__ = ["LanePacks", "Packs", "ScalarPacks", "packs_of"]


class Packs(ABC):
    """What curves ask of packs beyond arithmetic.

    Attributes:
        form: the arithmetic.
        mask: LLVM's type of a mask.
        numbers: LLVM's type of a 64-bit number for each lane.
    """

    mask: str
    numbers: str

    def __init__(self, form: Form) -> None:
        self.form = form

    @abstractmethod
    def read(self, code: Flow, pointers: Sequence[str], offset: int) -> str:
        """The pack of the elements at these addresses, one a lane, plus an offset in bytes."""

    @abstractmethod
    def write(self, code: Flow, pointers: Sequence[str], offset: int, pack: str) -> None:
        """The same outward, lane by lane, so that of equal addresses the last lane counts."""

    @abstractmethod
    def is_zero(self, code: Flow, pack: str) -> str:
        """The mask of the lanes that are 0."""

    @abstractmethod
    def select(self, code: Flow, mask: str, x: str, y: str) -> str:
        """X where the mask is set, else y; without a branch."""

    @abstractmethod
    def any(self, code: Flow, mask: str) -> str:
        """Whether a lane is set, as an i1."""

    @abstractmethod
    def joined(self, code: Flow, values: Sequence[str]) -> str:
        """A number for each lane, from as many i64."""

    @abstractmethod
    def least(self, code: Flow, mask: str, numbers: str, other: str) -> str:
        """The least number whose lane is set, and at most the i64 `other`."""

    @abstractmethod
    def turned(self, code: Flow, pack: str, step: int) -> str:
        """The pack with lane l + step in lane l, modulo the lanes."""

    @abstractmethod
    def lanes(self, chosen: Sequence[bool]) -> str:
        """The mask of some lanes that are known now."""

    def all(self, value: int) -> str:
        """A number in all lanes."""
        return splat("i64", self.form.lanes, value)

    def all_set(self) -> str:
        """The mask of all lanes."""
        return self.lanes([True] * self.form.lanes)

    def none_set(self) -> str:
        """The mask of no lane."""
        return self.lanes([False] * self.form.lanes)

    def equal(self, code: Flow, numbers: str, value: str) -> str:
        """The mask of the lanes whose number is that of `value`."""
        return code(f"icmp eq {self.numbers} {numbers}, {value}")

    def both(self, code: Flow, a: str, b: str) -> str:
        """The mask of the lanes that are set in a and in b."""
        return code(f"and {self.mask} {a}, {b}")

    def either(self, code: Flow, a: str, b: str) -> str:
        """The mask of the lanes that are set in a or in b."""
        return code(f"or {self.mask} {a}, {b}")

    def but(self, code: Flow, a: str, b: str) -> str:
        """The mask of the lanes that are set in a and not in b."""
        return self.both(code, a, code(f"xor {self.mask} {b}, {self.all_set()}"))


class ScalarPacks(Packs):
    """One element: a wide integer."""

    mask = "i1"
    numbers = "i64"

    def read(self, code: Flow, pointers: Sequence[str], offset: int) -> str:
        """See Packs."""
        return code(f"load {self.form.type}, ptr {code.at('i8', pointers[0], offset)}, align 8")

    def write(self, code: Flow, pointers: Sequence[str], offset: int, pack: str) -> None:
        """See Packs."""
        code.do(f"store {self.form.type} {pack}, ptr {code.at('i8', pointers[0], offset)}, align 8")

    def is_zero(self, code: Flow, pack: str) -> str:
        """See Packs."""
        return code(f"icmp eq {self.form.type} {pack}, 0")

    def select(self, code: Flow, mask: str, x: str, y: str) -> str:
        """By a word that LLVM cannot see to be a mask: else it may make a branch of it."""
        t = self.form.type
        word = code(f'call i64 asm "", "=r,0"(i64 {code(f"sext i1 {mask} to i64")})')
        wide = code(f"sext i64 {word} to {t}")
        difference = code(f"xor {t} {x}, {y}")
        return code(f"xor {t} {y}, {code(f'and {t} {wide}, {difference}')}")

    def any(self, code: Flow, mask: str) -> str:
        """See Packs."""
        return mask

    def joined(self, code: Flow, values: Sequence[str]) -> str:
        """See Packs."""
        return values[0]

    def least(self, code: Flow, mask: str, numbers: str, other: str) -> str:
        """See Packs."""
        kept = code(f"select i1 {mask}, i64 {numbers}, i64 {other}")
        return code.least(kept, other)

    def turned(self, code: Flow, pack: str, step: int) -> str:
        """See Packs."""
        return pack

    def lanes(self, chosen: Sequence[bool]) -> str:
        """See Packs."""
        return "true" if chosen[0] else "false"


_V = "<8 x i64>"
_BITS = 52
_MASK = (1 << _BITS) - 1


class LanePacks(Packs):
    """Eight elements in 52-bit limbs: algebra/field/llvm_lanes.py.

    An element's words are moved two at a time: `low` has a pair of the lanes 0, 2, 4 and 6, `high` that of the others,
    and unpacking both gives a register of each word.
    """

    mask = "<8 x i1>"
    numbers = _V

    def __init__(self, form: Form) -> None:
        super().__init__(form)
        self._pairs = form.field.limbs // 2
        self._count = form.radix.bit_length() // _BITS

    def read(self, code: Flow, pointers: Sequence[str], offset: int) -> str:
        """See Packs."""
        words = []
        for pair in range(self._pairs):
            places = [code.at("i8", pointer, offset + 16 * pair) for pointer in pointers]
            halves = [code(f"load <2 x i64>, ptr {place}, align 8") for place in places]
            low, high = (_joined_pairs(code, halves[first::2]) for first in (0, 1))
            words += [_unpacked(code, low, high, word) for word in (0, 1)]
        return self._pack(code, [_limb(code, words, _BITS * k) for k in range(self._count)])

    def write(self, code: Flow, pointers: Sequence[str], offset: int, pack: str) -> None:
        """See Packs."""
        limbs = self._limbs(code, pack)
        for pair in range(self._pairs):
            even, odd = (_word(code, limbs, 64 * (2 * pair + word)) for word in (0, 1))
            halves = [_unpacked(code, even, odd, half) for half in (0, 1)]
            for lane, pointer in enumerate(pointers):
                at = lane // 2 * 2
                value = code(f"shufflevector {_V} {halves[lane % 2]}, {_V} poison, <2 x i32> <i32 {at}, i32 {at + 1}>")
                code.do(f"store <2 x i64> {value}, ptr {code.at('i8', pointer, offset + 16 * pair)}, align 8")

    def is_zero(self, code: Flow, pack: str) -> str:
        """See Packs."""
        limbs = self._limbs(code, pack)
        some = limbs[0]
        for limb in limbs[1:]:
            some = code(f"or {_V} {some}, {limb}")
        return code(f"icmp eq {_V} {some}, zeroinitializer")

    def select(self, code: Flow, mask: str, x: str, y: str) -> str:
        """See Packs."""
        pairs = zip(self._limbs(code, x), self._limbs(code, y), strict=True)
        return self._pack(code, [code(f"select {self.mask} {mask}, {_V} {a}, {_V} {b}") for a, b in pairs])

    def any(self, code: Flow, mask: str) -> str:
        """See Packs."""
        return code(f"icmp ne i8 {code(f'bitcast {self.mask} {mask} to i8')}, 0")

    def joined(self, code: Flow, values: Sequence[str]) -> str:
        """See Packs."""
        found = "poison"
        for lane, value in enumerate(values):
            found = code(f"insertelement {_V} {found}, i64 {value}, i64 {lane}")
        return found

    def least(self, code: Flow, mask: str, numbers: str, other: str) -> str:
        """See Packs."""
        none = splat("i64", 8, (1 << 63) - 1)
        kept = code(f"select {self.mask} {mask}, {_V} {numbers}, {_V} {none}")
        return code.least(code(f"call i64 @llvm.vector.reduce.smin.v8i64({_V} {kept})"), other)

    def turned(self, code: Flow, pack: str, step: int) -> str:
        """See Packs."""
        order = _lanes([(lane + step) % 8 for lane in range(8)])
        limbs = self._limbs(code, pack)
        return self._pack(code, [code(f"shufflevector {_V} {limb}, {_V} poison, <8 x i32> {order}") for limb in limbs])

    def lanes(self, chosen: Sequence[bool]) -> str:
        """See Packs."""
        return "<" + ", ".join(f"i1 {'true' if lane else 'false'}" for lane in chosen) + ">"

    def _limbs(self, code: Flow, pack: str) -> list[str]:
        return [code(f"extractvalue {self.form.type} {pack}, {k}") for k in range(self._count)]

    def _pack(self, code: Flow, limbs: Sequence[str]) -> str:
        pack = "poison"
        for k, limb in enumerate(limbs):
            pack = code(f"insertvalue {self.form.type} {pack}, {_V} {limb}, {k}")
        return pack


def _joined_pairs(code: Flow, pairs: Sequence[str]) -> str:
    """Four registers of two words as one."""
    halves = []
    for a, b in (pairs[:2], pairs[2:]):
        halves.append(code(f"shufflevector <2 x i64> {a}, <2 x i64> {b}, <4 x i32> {_lanes(range(4))}"))
    return code(f"shufflevector <4 x i64> {halves[0]}, <4 x i64> {halves[1]}, <8 x i32> {_lanes(range(8))}")


def _unpacked(code: Flow, a: str, b: str, odd: int) -> str:
    """The even or the odd lanes of a and b, in turn."""
    lanes = [lane + odd + step for lane in range(0, 8, 2) for step in (0, 8)]
    return code(f"shufflevector {_V} {a}, {_V} {b}, <8 x i32> {_lanes(lanes)}")


def _lanes(values: Sequence[int]) -> str:
    return "<" + ", ".join(f"i32 {value}" for value in values) + ">"


def _limb(code: Flow, words: Sequence[str], low: int) -> str:
    """52 bits of a number in 64-bit words, from bit `low` on."""
    word, offset = divmod(low, 64)
    shift = splat("i64", 8, offset)
    if offset == 0:
        found = words[word]
    elif word + 1 == len(words):
        found = code(f"lshr {_V} {words[word]}, {shift}")
    else:
        found = code(f"call {_V} @llvm.fshr.v8i64({_V} {words[word + 1]}, {_V} {words[word]}, {_V} {shift})")
    return code(f"and {_V} {found}, {splat('i64', 8, _MASK)}")


def _word(code: Flow, limbs: Sequence[str], low: int) -> str:
    """64 bits of a number in 52-bit limbs, from bit `low` on."""
    found = ""
    for k, limb in enumerate(limbs):
        left = _BITS * k - low
        if not -_BITS < left < 64:
            continue
        shift = "shl" if left > 0 else "lshr"
        part = code(f"{shift} {_V} {limb}, {splat('i64', 8, abs(left))}") if left else limb
        found = code(f"or {_V} {found}, {part}") if found else part
    return found


def packs_of(form: Form) -> Packs:
    """The packs of a form."""
    return ScalarPacks(form) if form.lanes == 1 else LanePacks(form)
