"""The discrete Laplace distribution from independent binary digits.

    P(Z = z) is proportional to exp(-|z| / t);  Z = G - G', both geometric: P(G = g) proportional to exp(-g / t)

The binary digits of a geometric variable are independent: digit j is 1 with probability 1 / (1 + exp(2^j / t)). Each is
one comparison of a word of 32 bits with the digit's probability; a word equal to it (probability 2^-32) is decided by
64 bits of a pool that each draw has, whether it needs them or not. So probabilities have 96 bits, and time does not
depend on what is drawn.

A draw is a unit of `blocks` blocks of keystream: words 0 to 5 are the pool, three of 64 bits (the upper word first),
then a word a digit of G, then of G'. A fourth equal word (probability below 2^-107) finds zeros.

Source: Canonne, Kamath and Steinke 2020, arXiv:2004.00010, section 5 (the distribution); the digits are the classical
decomposition of the geometric series, 1 + q + q^2 + ... = product over j of (1 + q^(2^j)).
"""

from __future__ import annotations

import decimal
import functools
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from accelerant.errors import ConfigError
from accelerant.privacy.random.chacha20 import BLOCK_WORDS, chacha20_words

__all__ = [
    "LAPLACE_POOL",
    "MAX_DIGITS",
    "WIDEST_LAPLACE",
    "digits_of",
    "laplace_blocks",
    "laplace_distance",
    "laplace_reference",
    "thresholds",
]

LAPLACE_POOL = 3
MAX_DIGITS = 36
WIDEST_LAPLACE = 2.0**29
"""The largest t in grid steps."""

_BITS = 96
_TAIL = 75
"""Of the scale: P(G >= 75 t) is below 2^-108."""

_DIGITS = 60


def digits_of(steps: Fraction) -> int:
    """Binary digits of G: the least J with 2^J >= 75 t.

    Raises:
        ConfigError: t is above WIDEST_LAPLACE.
    """
    if not 0 < steps <= WIDEST_LAPLACE:
        raise ConfigError(
            f"the scale must be between 0 and {WIDEST_LAPLACE:.1e} grid steps, got {float(steps):.6g}: "
            "take a coarser grid"
        )
    return max(1, math.ceil(_TAIL * steps) - 1).bit_length()


def laplace_blocks(digits: int) -> int:
    """Blocks of keystream of a draw."""
    return -(-(2 * LAPLACE_POOL + 2 * digits) // BLOCK_WORDS)


def _probability(steps: Fraction, digit: int) -> Decimal:
    with decimal.localcontext(decimal.Context(prec=_DIGITS, Emin=-(10**9), Emax=10**9)):
        exponent = Decimal(2**digit * steps.denominator) / Decimal(steps.numerator)
        q = (-exponent).exp()
        return q / (1 + q)


@functools.lru_cache(maxsize=64)
def thresholds(steps: Fraction) -> npt.NDArray[np.uint32]:
    """(3, J): the digits' probabilities times 2^96, in words, the upper first."""
    found = []
    for digit in range(digits_of(steps)):
        with decimal.localcontext(decimal.Context(prec=_DIGITS)):
            found.append(int((_probability(steps, digit) * 2**_BITS).to_integral_value()))
    table = np.array([[t >> shift & 0xFFFFFFFF for t in found] for shift in (64, 32, 0)], np.uint32)
    table.setflags(write=False)
    return table


@functools.lru_cache(maxsize=64)
def laplace_distance(steps: Fraction) -> float:
    """Total variation between a draw and the discrete Laplace distribution, from above."""
    digits = digits_of(steps)
    tail = 2 * math.exp(-(2**digits) / float(steps))
    rounding = 2 * digits * 2.0 ** -(_BITS + 1)
    pool = math.comb(2 * digits, LAPLACE_POOL + 1) * 2.0 ** (-32 * (LAPLACE_POOL + 1))
    return tail + rounding + pool


def laplace_reference(
    key: npt.NDArray[np.uint32], nonce: int, first: int, steps: Fraction, elements: int
) -> npt.NDArray[np.int64]:
    """Draws of the discrete Laplace distribution; arguments as gaussian_reference's, t = steps."""
    digits, table = digits_of(steps), thresholds(steps)
    blocks = laplace_blocks(digits)
    keystream = chacha20_words(key, first, elements * blocks, nonce).reshape(BLOCK_WORDS, elements, blocks)
    words = keystream.transpose(2, 0, 1).reshape(blocks * BLOCK_WORDS, elements)
    pool = np.zeros((LAPLACE_POOL + 1, elements), np.uint64)
    pool[:-1] = words[0 : 2 * LAPLACE_POOL : 2].astype(np.uint64) << np.uint64(32) | words[1 : 2 * LAPLACE_POOL : 2]
    rest = table[1].astype(np.uint64) << np.uint64(32) | table[2]
    used, every = np.zeros(elements, np.int64), np.arange(elements)
    sides = []
    for side in range(2):
        value = np.zeros(elements, np.int64)
        for j in range(digits):
            word = words[2 * LAPLACE_POOL + side * digits + j]
            equal = word == table[0, j]
            one = (word < table[0, j]) | (equal & (pool[used, every] < rest[j]))
            used = np.minimum(used + equal, LAPLACE_POOL)
            value += one.astype(np.int64) << j
        sides.append(value)
    return sides[0] - sides[1]
