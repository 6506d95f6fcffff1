"""The base sampler's tables, every entry with integers, and distances against mpmath."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest

from accelerant.privacy.dp.noise.discrete import (
    CELL_FIELD,
    CELL_SHIFT,
    CELLS,
    COMPARED,
    TOTAL_BITS,
    base_weights,
    digits_of,
    laplace_distance,
    make_tables,
    split_weights,
    table_distance,
    thresholds,
)

VARIANCES = [Fraction(1, 100), Fraction(1), Fraction(137, 3), Fraction(2100), Fraction(465, 10) ** 2]
DIGITS = 90


def ideal(variance):
    """Probabilities of the magnitudes 0 to 511, and what lies beyond, in mpmath."""
    with mpmath.workdps(DIGITS):
        v = mpmath.mpf(variance.numerator) / variance.denominator
        weights = [mpmath.exp(-mpmath.mpf(m * m) / (2 * v)) * (2 if m else 1) for m in range(1500)]
        total = mpmath.fsum(weights)
        return [w / total for w in weights[:CELLS]], mpmath.fsum(weights[CELLS:]) / total


@pytest.mark.parametrize("variance", VARIANCES)
def test_weights_are_the_probabilities_to_118_bits(variance):
    weights = base_weights(variance)
    probabilities, beyond = ideal(variance)
    assert sum(weights) == 2**TOTAL_BITS
    with mpmath.workdps(DIGITS):
        off = [abs(w - p * 2**TOTAL_BITS) for w, p in zip(weights, probabilities, strict=True)]
        cut = 2**TOTAL_BITS * beyond * 1.01  # the tails' sum is taken from above, within 1 %
        assert max(off[1:]) < 0.5 + 0.02 * cut
        assert off[0] <= 256 + cut


@pytest.mark.parametrize("variance", VARIANCES)
def test_distance_is_a_bound_and_close(variance):
    probabilities, beyond = ideal(variance)
    with mpmath.workdps(DIGITS):
        exact = (
            mpmath.fsum(
                abs(mpmath.mpf(w) / 2**TOTAL_BITS - p)
                for w, p in zip(base_weights(variance), probabilities, strict=True)
            )
            + beyond
        ) / 2
        bound = mpmath.mpf(str(table_distance(variance)))
        assert exact <= bound <= exact * 1.0001 + mpmath.mpf(10) ** -58


def counted(entries, thresholds, capacity):
    """How often each magnitude comes out of an alias table."""
    found = [0] * CELLS
    for cell, (entry, threshold) in enumerate(zip(entries, thresholds, strict=True)):
        found[cell] += threshold
        found[(entry & CELL_FIELD) >> CELL_SHIFT] += capacity - threshold
    return found


def gathered(word):
    """The comparison's bits of an entry, put together."""
    return (word >> 16) << 7 | (word & 0x7F)


@pytest.mark.parametrize("variance", VARIANCES)
def test_tables_hold_the_weights_exactly(variance):
    weights = base_weights(variance)
    main, rest = split_weights(weights)
    tables = make_tables(weights)
    assert min(main) >= 0
    assert sum(main) == CELLS * (2**22 - 1)
    assert min(rest) >= 0
    assert sum(rest) == 2**96
    assert all(w == m * 2**87 + r for w, m, r in zip(weights, main, rest, strict=True))
    first = tables[0].tolist()
    assert not any(entry >> 31 for entry in first)
    assert counted(first, [gathered(entry & COMPARED) for entry in first], 2**22 - 1) == main
    upper, middle, lower = tables[1:].tolist()
    compared = [gathered(u & ~CELL_FIELD) << 64 | m << 32 | n for u, m, n in zip(upper, middle, lower, strict=True)]
    assert counted(upper, compared, 2**87) == rest


def test_the_words_fields_are_apart_and_complete():
    assert CELL_FIELD & COMPARED == 0
    assert CELL_FIELD | COMPARED | 1 << 31 == 2**32 - 1
    assert int(COMPARED).bit_count() == 22


@pytest.mark.parametrize("steps", [Fraction(1, 8), Fraction(3), Fraction(10**6), Fraction(2**29)])
def test_laplace_thresholds_are_the_probabilities_to_96_bits(steps):
    table = thresholds(steps)
    digits = digits_of(steps)
    assert table.shape == (3, digits)
    with mpmath.workdps(DIGITS):
        for j in range(digits):
            p = 1 / (1 + mpmath.exp(mpmath.mpf(2**j) * steps.denominator / steps.numerator))
            held = sum(int(word) << shift for word, shift in zip(table[:, j], (64, 32, 0), strict=True))
            assert abs(held - p * 2**96) <= 0.5
    assert np.exp(-float(Fraction(2**digits) / steps)) < 2**-108
    assert laplace_distance(steps) < 2**-90
