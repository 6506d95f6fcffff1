"""Poisson sampling at small rates in time proportional to what is drawn, with exact probabilities.

Units come in blocks of m = 2^bits. How many of a block are drawn is binomial: with a rate t / 2^53 its distribution
function is a multiple of 2^(-53 m), so that a uniform number of 53 m bits gives it without error. Its first 53 bits
settle all but one block in 10^14; the others are then drawn. Which ones is uniform: places are drawn again where two
are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["RareDraws"]

_WORD: Final = 53

Integers = Callable[[int], NDArray[np.int64]]


class RareDraws:
    """Draws from whole blocks.

    Args:
        threshold: the rate times 2^53, a whole number above 0 and below 2^53.
        bits: log2 of a block's length, 1 or more; the mean of a block, rate * 2^bits, should not be above 1.
    """

    def __init__(self, threshold: int, bits: int) -> None:
        self._threshold = threshold
        self._bits = bits
        self._length = 1 << bits
        self._shift = _WORD * (self._length - 1)
        self._exact: list[int] = []  # P(count <= k) * 2^(53 m)
        self._weight = 0  # P(count = k) * 2^(53 m) of the last k
        first = [self._up_to(0) >> self._shift]
        while first[-1] < (1 << _WORD) - 1:  # what is above the last is settled exactly, as ties are
            first.append(self._up_to(len(first)) >> self._shift)
        self._first = np.array(first, np.int64)

    def draw(self, blocks: int, integers: Integers) -> NDArray[np.int64]:
        """The units drawn of so many blocks: (n,) int64, ascending.

        Args:
            blocks: how many.
            integers: gives n uniform integers of 53 bits.
        """
        counts = self.counts(integers(blocks), integers)
        owners = np.repeat(np.arange(blocks, dtype=np.int64), counts) << self._bits
        units = owners | self._places(len(owners), integers)
        while True:
            units.sort()  # owners stay as they are: each has its high bits
            (equal,) = np.nonzero(units[1:] == units[:-1])
            if not equal.size:
                return units
            again = np.isin(owners, owners[equal])
            units[again] = owners[again] | self._places(int(again.sum()), integers)

    def counts(self, words: NDArray[np.int64], integers: Integers) -> NDArray[np.int64]:
        """How many of each block are drawn, from the first 53 bits of its uniform number."""
        found = np.searchsorted(self._first, words).astype(np.int64)
        for place in np.nonzero(self._first[np.minimum(found, len(self._first) - 1)] == words)[0]:
            found[place] = self._settle(int(words[place]), integers)
        return found

    def _settle(self, word: int, integers: Integers) -> int:
        """The count of a block whose first bits are those of a bound: with all 53 m bits."""
        number = word
        for more in integers(self._length - 1).tolist():
            number = number << _WORD | more
        count = 0
        while count < self._length and number >= self._up_to(count):
            count += 1
        return count

    def _up_to(self, count: int) -> int:
        """P(count or fewer of a block) * 2^(53 m), exactly."""
        while len(self._exact) <= count:
            k, rest = len(self._exact), (1 << _WORD) - self._threshold
            if k:
                self._weight = self._weight * (self._length - k + 1) * self._threshold // (k * rest)  # no remainder
            else:
                self._weight = rest**self._length
            self._exact.append(self._weight + (self._exact[-1] if k else 0))
        return self._exact[count]

    def _places(self, count: int, integers: Integers) -> NDArray[np.int64]:
        return integers(count) & (self._length - 1)
