"""Multiples of one point by many scalars, on the CPU: what a key of known secrets is made of.

With the multiples d 2^(w j) G of all digits d below 2^w in a table, s G is the sum of one entry for each digit of s:
windows - 1 affine additions of 6 products each, inversions shared, where a multiplication by doubling takes 250 of them
and more. Source: Yao's method, Knuth volume 2, section 4.6.3; Brickell et al., EUROCRYPT 1992.

Times and memory accesses depend on the scalars.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.memory_space import HOST

__all__ = ["Multiples"]

U64 = npt.NDArray[np.uint64]

_WIDTHS = range(2, 15)
"""Bits of a digit. At 14 the table is 20 MB for BN254 G1."""

_AT_ONCE = 1 << 16
"""Points that are added at a time: enough for all cores, and they stay in the second cache."""

_WORD = 64


class Multiples:
    """The table of one point.

    Attributes:
        curve: of the point.
        bits: of a digit.
        windows: digits of a scalar.
    """

    def __init__(self, curve: Curve[Any], point: U64, n: int) -> None:
        """Compute the table that suits n scalars, those of all calls.

        Args:
            curve: of the point.
            point: (1, *shape), Montgomery form.
            n: how many multiples will be asked for.
        """
        order_bits = curve.order.bit_length()
        self.curve = curve
        self.bits = min(_WIDTHS, key=lambda bits: -(-order_bits // bits) * (n + (1 << bits)))
        self.windows = -(-order_bits // self.bits)
        firsts = [point]
        for _ in range(self.windows - 1):
            firsts.append(self._doubled(firsts[-1], self.bits))
        top = np.concatenate(firsts)  # 2^k 2^(w j) G, of each window
        table = np.zeros((self.windows, 1, *curve.shape), np.uint64)
        for _ in range(self.bits):
            more = self._sum(table, np.broadcast_to(top[:, None], table.shape))
            table = np.concatenate([table, more], axis=1)
            top = self._sum(top, top)
        self._table = table

    def of(self, scalars: U64) -> U64:
        """The multiples, (n, *shape) in Montgomery form, infinity all zeros.

        Args:
            scalars: (n, 4), canonical words below the order.
        """
        found = np.empty((len(scalars), *self.curve.shape), np.uint64)
        for start in range(0, len(scalars), _AT_ONCE):
            found[start : start + _AT_ONCE] = self._chunk(scalars[start : start + _AT_ONCE])
        return found

    def _chunk(self, scalars: U64) -> U64:
        total: U64 = self._table[0].take(self._digit(scalars, 0), axis=0)
        for window in range(1, self.windows):
            total = self._sum(total, self._table[window].take(self._digit(scalars, window), axis=0))
        return total

    def _digit(self, scalars: U64, window: int) -> npt.NDArray[np.intp]:
        word, shift = divmod(window * self.bits, _WORD)
        digit: U64 = scalars[:, word] >> np.uint64(shift)
        if shift + self.bits > _WORD and word + 1 < scalars.shape[1]:
            digit = np.bitwise_or(digit, scalars[:, word + 1] << np.uint64(_WORD - shift))
        return np.asarray(digit & np.uint64((1 << self.bits) - 1), np.intp)

    def _sum(self, x: U64, y: U64) -> U64:
        shape = (-1, *self.curve.shape)
        found: U64 = launch.add(HOST, self.curve, x.reshape(shape), np.ascontiguousarray(y).reshape(shape))
        return found.reshape(x.shape)

    def _doubled(self, point: U64, times: int) -> U64:
        for _ in range(times):
            point = self._sum(point, point)
        return point
