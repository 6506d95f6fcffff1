"""Numbers modulo the square of an odd number, in a device's memory, as pairs: powers at half the cost (see pair.c).

    x = DevicePairs.of_words(words, p, space)       words of any length, modulo p^2
    y = x.power(p - 1, secret=True)
    high = y.times(3, plain=True).half(1)           of y * 3 = low + high p: words of high

Residues modulo another number are made of them by `into`. Timing is as in launch.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from accelerant.algebra.bigint.launch import TABLE_BYTES, DeviceResidues, Modulus, modulus_at, words_of
from accelerant.algebra.bigint.residues import gmp
from accelerant.algebra.field.memory_space import MemorySpace
from accelerant.runtime.recorded_launch import RecordedLaunch

_U32 = np.dtype(np.uint32)
_SECRET_WINDOW, _PUBLIC_WINDOW = 4, 5
"""Bits of an exponent for each product: a table that is read whole is small."""


class DevicePairs:
    """Numbers modulo n^2 as words (count, 2 limbs) of pairs, in Montgomery form: low + high n."""

    def __init__(self, words: Any, modulus: Modulus) -> None:
        self.words, self._n = words, modulus
        self.space = modulus.space

    @classmethod
    def of_words(cls, words: Any, modulus: Any, space: MemorySpace) -> DevicePairs:
        """Return numbers from 0 on, given by words (count, any) in the space, modulo the square of a number."""
        n, (count, width) = modulus_at(gmp().mpz(modulus), space), words.shape
        chunks = -(-width // n.limbs)
        radix = gmp().mpz(1) << 32 * n.limbs
        constants = space.load(np.concatenate([_words(n, radix ** (k + 2)) for k in range(chunks)]))
        found = space.empty((count, 2 * n.limbs), _U32)
        padded = words if width == chunks * n.limbs else space.pad(words, 1, chunks * n.limbs)
        with RecordedLaunch(n.record("pair_from", count, 3 * chunks), space.provider, space.index):
            if count:
                n.launch("bigint_pair_from", (padded, constants, found, n.words), (n.inverse, chunks), count)
        return cls(found, n)

    def __len__(self) -> int:
        return int(self.words.shape[0])

    def times(self, factor: Any, *, plain: bool = False) -> DevicePairs:
        """Multiply by one number; `plain` gives the pairs of the products themselves, not their Montgomery form."""
        n, count, space = self._n, len(self), self.space
        radix = 1 if plain else gmp().mpz(1) << 32 * n.limbs
        found, constant = space.empty((count, 2 * n.limbs), _U32), space.load(_words(n, factor * radix))
        with RecordedLaunch(n.record("pair_mul", count, 3), space.provider, space.index):
            if count:
                n.launch("bigint_pair_mul", (self.words, constant, found, n.words), (n.inverse, 0), count)
        return DevicePairs(found, n)

    def power(self, exponent: Any, *, secret: bool = False) -> DevicePairs:
        """Raise to an exponent from 0 on; with `secret`, time and addresses depend on the sizes only."""
        n, space, window = self._n, self.space, _SECRET_WINDOW if secret else _PUBLIC_WINDOW
        digits = -(-max(1, int(exponent).bit_length()) // window)
        words = space.load(words_of([gmp().mpz(exponent)], window * digits // 32 + 2))
        one = space.load(_words(n, gmp().mpz(1) << 32 * n.limbs))
        most = max(1, (TABLE_BYTES >> window) // (8 * n.limbs))
        parts = []
        with RecordedLaunch(n.record("pair_pow", len(self), 2 * window * digits), space.provider, space.index):
            for at in range(0, len(self), most):
                x = self.words if len(self) <= most else space.getitem(self.words, (slice(at, at + most),))
                count = x.shape[0]
                z = space.empty((count, 2 * n.limbs), _U32)
                table = space.empty((n.groups(count) << window, 2 * n.limbs), _U32)
                arrays = (x, words, z, table, n.words, one)
                n.launch("bigint_pair_pow", arrays, (n.inverse, digits, window, int(secret)), count)
                parts.append(z)
        found = parts[0] if parts else self.words
        for part in parts[1:]:
            found = space.joined(found, part)
        return DevicePairs(found, n)

    def half(self, index: int) -> Any:
        """Return the words (count, limbs) of low (0) or high (1)."""
        limbs = self._n.limbs
        return self.space.getitem(self.words, (slice(None), slice(index * limbs, (index + 1) * limbs)))

    def into(self, modulus: Any, factor: Any = 1) -> DeviceResidues:
        """Return factor times the numbers, of pairs that are not in Montgomery form, modulo another number."""
        low, high = (DeviceResidues.of_words(self.half(i), modulus, self.space, (factor, factor * self._n.value)[i])
                     for i in range(2))  # fmt: skip
        return low.plus_words(high.words, 1)


def _words(n: Modulus, value: Any) -> Any:
    """Return the words of value mod n^2 as a pair, (1, 2 limbs)."""
    high, low = divmod(gmp().mpz(value) % n.value**2, n.value)
    return words_of([low, high], n.limbs).reshape(1, -1)
