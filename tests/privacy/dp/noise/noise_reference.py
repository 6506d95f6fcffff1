"""The discrete samplers of noise/discrete.py in NumPy's integers: every kernel's oracle."""

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from accelerant.privacy.dp.noise.discrete import (
    CELL_FIELD,
    CELL_SHIFT,
    COMPARED,
    COMPARED_REST,
    GROUP,
    LAPLACE_POOL,
    POOL,
    TRIGGER,
    UNIT_BLOCKS,
    GaussianConvolution,
    digits_of,
    groups_of,
    laplace_blocks,
    make_tables,
    thresholds,
)
from accelerant.privacy.random import BLOCK_WORDS, chacha20_words

Words = npt.NDArray[np.uint32]


def gaussian_reference(
    key: Words, nonce: int, first: int, plan: GaussianConvolution, elements: int
) -> npt.NDArray[np.int64]:
    """Return draws of the discrete Gaussian."""
    groups = groups_of(elements, plan.terms)
    units = groups * GROUP
    words = chacha20_words(key, first, units * UNIT_BLOCKS, nonce).reshape(BLOCK_WORDS, units, UNIT_BLOCKS)
    tables = make_tables(plan.weights())
    pool = _pool(words[:, :, 0], tables)
    used = np.zeros(units, np.int64)
    each = BLOCK_WORDS // plan.terms
    draws = np.zeros((UNIT_BLOCKS - 1, each, units), np.int64)
    for block in range(1, UNIT_BLOCKS):
        for draw in range(each):
            for term, k in enumerate(plan.factors):
                word = words[draw * plan.terms + term, :, block]
                draws[block - 1, draw] += k * _sample(word, tables, pool, used)
    ordered = draws.reshape((UNIT_BLOCKS - 1) * each, groups, GROUP).transpose(1, 0, 2)
    return ordered.reshape(-1)[:elements]


def _sample(
    word: Words, tables: Words, pool: npt.NDArray[np.int64], used: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return a base sample of each word; count triggers in `used`."""
    compared = word & np.uint32(COMPARED)
    entry = tables[0, _cell(word)]
    magnitude = np.where(compared < (entry & np.uint32(COMPARED)), _cell(word), _cell(entry)).astype(np.int64)
    trigger = (word & np.uint32(TRIGGER)) == TRIGGER
    magnitude[trigger] = pool[used[trigger], np.flatnonzero(trigger)]
    used[trigger] = np.minimum(used[trigger] + 1, POOL)
    return np.where(word >> np.uint32(31), -magnitude, magnitude)


def _pool(words: Words, tables: Words) -> npt.NDArray[np.int64]:
    """Return (6, units): samples of the second table, and zeros."""
    draws = np.zeros((POOL + 1, words.shape[1]), np.int64)
    mask = np.uint32(COMPARED_REST)
    for slot in range(POOL):
        upper, middle, lower = words[3 * slot : 3 * slot + 3]
        cell = _cell(upper)
        entry = tables[1, cell]
        u, t = upper & mask, entry & mask
        m, n = tables[2, cell], tables[3, cell]
        below = (u < t) | ((u == t) & ((middle < m) | ((middle == m) & (lower < n))))
        draws[slot] = np.where(below, cell, _cell(entry))
    return draws


def _cell(word: Words) -> Words:
    return (word & np.uint32(CELL_FIELD)) >> np.uint32(CELL_SHIFT)


def laplace_reference(key: Words, nonce: int, first: int, steps: Fraction, elements: int) -> npt.NDArray[np.int64]:
    """Return draws of the discrete Laplace distribution; arguments as gaussian_reference's, t = steps."""
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
