"""The base sampler's table: magnitudes 0 to 511 of a discrete Gaussian, in integers.

One word of 32 bits gives a sample: 9 bits choose a cell, 22 bits are compared with the cell's threshold, 1 is the sign.

    31    sign
    30-16 upper 15 bits of the comparison
    15-7  cell
    6-0   lower 7 bits of the comparison

Below the threshold the magnitude is the cell, else the cell's alias (Walker 1977). A comparison of all ones, of
probability 2^-22, is the *trigger*: the magnitude comes from a second table instead, of the weights that 22 bits cannot
hold, with 96 bits of its own: 9 of a cell and 87 to compare. The mixture has the weights 2^-118 times an integer.
A magnitude's weight is that of both signs together; 0 has no sign, and its sign's bit changes nothing.

An entry of the first table has the threshold in the places of the comparison and the alias in the place of the cell; of
the second likewise, in three words, with 23 bits of the threshold in the first (the sign's place is one more bit).

Source: Walker 1977, "An efficient method for generating discrete random variables with general distributions"; the
split of the weights into a table and a rare remainder is as in Kronmal and Peterson 1979, with integers throughout.
"""

from __future__ import annotations

import decimal
import functools
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
import numpy.typing as npt

__all__ = [
    "CELLS",
    "CELL_FIELD",
    "COMPARED",
    "COMPARED_REST",
    "TOTAL_BITS",
    "TRIGGER",
    "Tables",
    "base_weights",
    "make_tables",
    "split_weights",
    "table_distance",
]

CELLS = 512
CELL_SHIFT = 7
CELL_FIELD = (CELLS - 1) << CELL_SHIFT
COMPARED = 0x7FFFFFFF & ~CELL_FIELD
"""Bits of a word that the first table compares; all ones is the trigger."""

TRIGGER = COMPARED
"""Bits of a word that are all ones at the trigger."""

COMPARED_REST = 0xFFFFFFFF & ~CELL_FIELD
"""Bits of the first of three words that the second table compares."""

_BITS = 22
_CAPACITY = 2**_BITS - 1
"""Values of the comparison of a cell of the first table: all but the trigger."""

_REST_BITS = 87
TOTAL_BITS = 9 + _BITS + _REST_BITS
_DIGITS = 80


@dataclass(frozen=True, slots=True)
class Tables:
    """See the module's docstring.

    Attributes:
        first: (512,) uint32.
        rest: (3, 512) uint32.
    """

    first: npt.NDArray[np.uint32]
    rest: npt.NDArray[np.uint32]


def _weights(variance: Fraction) -> tuple[list[Decimal], Decimal]:
    """exp(-m^2 / (2 variance)) of m = 0 to 511, both signs together, and the sum over all integers, from above."""
    with decimal.localcontext(decimal.Context(prec=_DIGITS, Emin=-(10**6))):
        factor = Decimal(-variance.denominator) / Decimal(2 * variance.numerator)
        weight, step, square = Decimal(1), factor.exp(), (2 * factor).exp()  # of m^2 and of 2 m + 1 by products, which
        both = [weight]  # are 20 times quicker than 512 exponentials; they lose 6 of the 80 digits
        for _ in range(1, CELLS):
            weight, step = weight * step, step * square
            both.append(2 * weight)
        # Beyond: at most a geometric series of ratio exp((2 * 512 + 1) factor).
        beyond = 2 * (factor * CELLS * CELLS).exp() / (1 - (factor * (2 * CELLS + 1)).exp())
        return both, sum(both, beyond)


@functools.lru_cache(maxsize=64)
def base_weights(variance: Fraction) -> tuple[int, ...]:
    """Probabilities of the magnitudes 0 to 511 of a discrete Gaussian, times 2^118; they sum to 2^118.

    Rounded to the nearest; 0 takes what cut tails and rounding leave.
    """
    both, total = _weights(variance)
    with decimal.localcontext(decimal.Context(prec=_DIGITS, Emin=-(10**6))):
        rounded = [int((w / total * 2**TOTAL_BITS).to_integral_value()) for w in both]
    rounded[0] += 2**TOTAL_BITS - sum(rounded)
    return tuple(rounded)


@functools.lru_cache(maxsize=64)
def table_distance(variance: Fraction) -> Decimal:
    """Total variation between base_weights and the discrete Gaussian on all integers, from above."""
    both, total = _weights(variance)
    with decimal.localcontext(decimal.Context(prec=_DIGITS, Emin=-(10**6))):
        scale = Decimal(2**TOTAL_BITS)
        held = [abs(weight / scale - w / total) for weight, w in zip(base_weights(variance), both, strict=True)]
        return (sum(held, 1 - sum(both, Decimal(0)) / total) / 2) * (1 + Decimal(10) ** -30) + Decimal(10) ** -60


def split_weights(weights: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Weights of the first table, which sum to 512 (2^22 - 1), and of the second, which sum to 2^96.

    weights[m] = first[m] 2^87 + rest[m].
    """
    first = [w >> _REST_BITS for w in weights]
    rest = [w & (2**_REST_BITS - 1) for w in weights]
    surplus = sum(first) - CELLS * _CAPACITY  # 1 to 512, since the remainders are below 2^87 each
    largest = max(range(CELLS), key=first.__getitem__)
    first[largest] -= surplus
    rest[largest] += surplus << _REST_BITS
    return first, rest


def _alias(weights: list[int], capacity: int) -> tuple[list[int], list[int]]:
    """Thresholds below `capacity` and aliases; a full cell has the threshold 0 and itself as alias.

    Cell c gives c for values below its threshold and the alias for the others, below the capacity, exactly as often as
    the weights, which sum to 512 times the capacity, say.
    """
    left = list(weights)
    small = [c for c in range(CELLS) if left[c] < capacity]
    large = [c for c in range(CELLS) if left[c] > capacity]
    thresholds, aliases = [0] * CELLS, list(range(CELLS))
    while small:
        cell, giver = small.pop(), large[-1]
        thresholds[cell], aliases[cell] = left[cell], giver
        left[giver] -= capacity - left[cell]
        if left[giver] <= capacity:
            large.pop()
            if left[giver] < capacity:
                small.append(giver)
    return thresholds, aliases


def _spread(upper: int) -> int:
    """Bits of a comparison in their places around the cell: 7 below, the others above."""
    return (upper & 0x7F) | (upper >> 7) << 16


@functools.lru_cache(maxsize=64)
def make_tables(weights: tuple[int, ...]) -> Tables:
    """The tables of magnitudes with weights that sum to 2^118."""
    main, remainder = split_weights(weights)
    thresholds, aliases = _alias(main, _CAPACITY)
    first = [_spread(t) | a << CELL_SHIFT for t, a in zip(thresholds, aliases, strict=True)]
    thresholds, aliases = _alias(remainder, 2**_REST_BITS)
    rest = [
        [_spread(t >> 64) | a << CELL_SHIFT for t, a in zip(thresholds, aliases, strict=True)],
        [t >> 32 & 0xFFFFFFFF for t in thresholds],
        [t & 0xFFFFFFFF for t in thresholds],
    ]
    tables = Tables(np.array(first, np.uint32), np.array(rest, np.uint32))
    tables.first.setflags(write=False)
    tables.rest.setflags(write=False)
    return tables
