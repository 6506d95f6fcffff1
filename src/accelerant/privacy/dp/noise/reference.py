"""The samplers in NumPy's integers: what every kernel equals, bit for bit.

A *unit* makes its draws from 16 blocks of keystream, counters first + 16 unit to first + 16 unit + 15. Its block 0 is
the pool: 5 samples of the tables' remainder, three words each. The words of blocks 1 to 15 are base samples, in order;
16 // terms draws a block, words that are left over are not used. Where a base sample's comparison is the trigger, its
magnitude is the pool's next. More than 5 triggers in a unit (probability below 2^-94) give magnitude 0; `charge` has
it.

32 units are a *group*: draw i of unit 32 g + l is element (g D + i) 32 + l, D the draws of a unit, so that 32 lanes
that work side by side touch elements side by side.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from accelerant.privacy.dp.noise.plan import Plan
from accelerant.privacy.dp.noise.table import (
    CELL_FIELD,
    CELL_SHIFT,
    COMPARED,
    COMPARED_REST,
    TRIGGER,
    Tables,
    make_tables,
)
from accelerant.privacy.random.chacha20 import BLOCK_WORDS, chacha20_words

__all__ = ["GROUP", "POOL", "UNIT_BLOCKS", "draws_of_unit", "gaussian_reference", "groups_of"]

UNIT_BLOCKS = 16
POOL = 5
GROUP = 32

Words = npt.NDArray[np.uint32]


def draws_of_unit(terms: int) -> int:
    """D: 240, 120, 75, 60, 45."""
    return (UNIT_BLOCKS - 1) * (BLOCK_WORDS // terms)


def groups_of(elements: int, terms: int) -> int:
    """Groups that so many elements take."""
    return -(-elements // (GROUP * draws_of_unit(terms)))


def gaussian_reference(key: Words, nonce: int, first: int, plan: Plan, elements: int) -> npt.NDArray[np.int64]:
    """Draws of the discrete Gaussian.

    Args:
        key: (8,), as the nonce of the keystream.
        nonce: 64 bits.
        first: counter of the first block.
        plan: whose sum is drawn.
        elements: how many.
    """
    groups = groups_of(elements, plan.terms)
    units = groups * GROUP
    words = chacha20_words(key, first, units * UNIT_BLOCKS, nonce).reshape(BLOCK_WORDS, units, UNIT_BLOCKS)
    tables = make_tables(plan.weights())
    pool = _pool(words[:, :, 0], tables)
    used = np.zeros(units, np.int64)
    each = BLOCK_WORDS // plan.terms
    found = np.zeros((UNIT_BLOCKS - 1, each, units), np.int64)
    for block in range(1, UNIT_BLOCKS):
        for draw in range(each):
            for term, k in enumerate(plan.factors):
                word = words[draw * plan.terms + term, :, block]
                found[block - 1, draw] += k * _sample(word, tables, pool, used)
    ordered = found.reshape((UNIT_BLOCKS - 1) * each, groups, GROUP).transpose(1, 0, 2)
    return ordered.reshape(-1)[:elements]


def _sample(
    word: Words, tables: Tables, pool: npt.NDArray[np.int64], used: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """A base sample of each word; counts triggers in `used`."""
    compared = word & np.uint32(COMPARED)
    entry = tables.first[_cell(word)]
    magnitude = np.where(compared < (entry & np.uint32(COMPARED)), _cell(word), _cell(entry)).astype(np.int64)
    trigger = (word & np.uint32(TRIGGER)) == TRIGGER
    magnitude[trigger] = pool[used[trigger], np.flatnonzero(trigger)]
    used[trigger] = np.minimum(used[trigger] + 1, POOL)
    return np.where(word >> np.uint32(31), -magnitude, magnitude)


def _pool(words: Words, tables: Tables) -> npt.NDArray[np.int64]:
    """(6, units): samples of the remainder, and zeros."""
    found = np.zeros((POOL + 1, words.shape[1]), np.int64)
    mask = np.uint32(COMPARED_REST)
    for slot in range(POOL):
        upper, middle, lower = words[3 * slot : 3 * slot + 3]
        cell = _cell(upper)
        entry = tables.rest[0, cell]
        u, t = upper & mask, entry & mask
        m, n = tables.rest[1, cell], tables.rest[2, cell]
        below = (u < t) | ((u == t) & ((middle < m) | ((middle == m) & (lower < n))))
        found[slot] = np.where(below, cell, _cell(entry))
    return found


def _cell(word: Words) -> Words:
    return (word & np.uint32(CELL_FIELD)) >> np.uint32(CELL_SHIFT)
