"""Rare draws: the exact binomial law of a block, ties settled by all bits, uniform places."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from accelerant.privacy.dp.sampling import PoissonSampler, RareDraws

WORDS = 1 << 53


def given(*batches):
    """A source whose answers are fixed."""
    left = list(batches)

    def integers(count):
        batch = left.pop(0)
        assert len(batch) == count
        return np.array(batch, np.int64)

    return integers


def law(threshold, length, count):
    rate = Fraction(threshold, WORDS)
    return math.comb(length, count) * rate**count * (1 - rate) ** (length - count)


@pytest.mark.parametrize(("threshold", "bits"), [(WORDS // 3, 1), (WORDS // 5, 2), (12345, 3), (WORDS // 4097, 5)])
def test_the_distribution_function_is_exact(threshold, bits):
    draws, length = RareDraws(threshold, bits), 1 << bits
    total = Fraction(0)
    for count in range(length + 1):
        total += law(threshold, length, count)
        assert Fraction(draws._up_to(count), 1 << (53 * length)) == total
    assert total == 1


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_words_beside_a_bound_and_ties_at_it(count, off):
    """One below the first 53 bits of P(<= count): as many; one above: one more; equal: all the bits decide."""
    threshold, bits = WORDS // 5 + 1, 2
    bound = RareDraws(threshold, bits)._up_to(count)
    word = (bound >> 53 * 3) + off
    if off:
        assert RareDraws(threshold, bits).counts(np.array([word]), given()).tolist() == [count + (off > 0)]
        return
    for below in (1, 0):
        number = bound - below
        parts = [(number >> 53 * place) & (WORDS - 1) for place in (2, 1, 0)]
        assert (number >> 53 * 3) == word
        found = RareDraws(threshold, bits).counts(np.array([word]), given(parts))
        assert found.tolist() == [count + (not below)]


def test_the_far_tail_is_settled_by_all_bits():
    draws = RareDraws(WORDS // 4096, 6)
    most = [WORDS - 1] * 63
    assert draws.counts(np.array([WORDS - 1]), given(most)).tolist() == [64]


def test_equal_places_are_drawn_again():
    draws = RareDraws(WORDS // 5, 2)
    two = (draws._up_to(1) >> 53 * 3) + 1
    source = given([two, 0, two], [1, 1, 2, 3], [0, 3])
    assert draws.draw(3, source).tolist() == [0, 3, 10, 11]


def test_all_sets_of_places_are_as_likely():
    """Two of four places: each of the six pairs from as many of the outcomes that are kept."""
    draws, found = RareDraws(WORDS // 5, 2), {}
    two = (draws._up_to(1) >> 53 * 3) + 1
    for places in itertools.permutations(range(4), 2):
        pair = tuple(draws.draw(1, given([two], list(places))).tolist())
        found[pair] = found.get(pair, 0) + 1
    assert len(found) == 6
    assert set(found.values()) == {2}


def test_nothing_of_no_blocks():
    assert RareDraws(WORDS // 100, 6).draw(0, given([], [])).tolist() == []


@pytest.mark.parametrize(("size", "rate"), [(64 * 5 + 7, 1 / 65), (3 * 4096 + 100, 1 / 4096), (10_000, 1e-3)])
@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.sample(3)
def test_a_sampler_with_blocks_and_a_rest(size, rate):
    """Mean, variance, and where: within 6 standard deviations; the units after the last block as the others."""
    steps = 4000
    sampler = PoissonSampler(size, rate, steps=steps)
    lengths, hits = [], np.zeros(size)
    for draw in sampler:
        assert draw.tolist() == sorted(set(draw.tolist()))
        lengths.append(len(draw))
        hits[draw] += 1
    assert sampler._rare is not None
    mean, variance = size * rate, size * rate * (1 - rate)
    assert abs(np.mean(lengths) - mean) < 6 * (variance / steps) ** 0.5
    assert abs(np.var(lengths) - variance) < 6 * variance * (2 / steps + 1 / (variance * steps)) ** 0.5
    rest = size % sampler._rare._length
    for part in (hits[size - rest :], hits[: size // 2], hits[::2]):
        wanted = steps * rate * len(part)
        assert abs(part.sum() - wanted) < 6 * wanted**0.5
