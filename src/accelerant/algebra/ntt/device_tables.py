"""The tables of a pass as the C kernels read them: factors for their products, roots in the order of blocks.

Kernels halve blocks of rows (kernel.c): a block's factor is the root to the power that is the block's number with its
bits in the opposite order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.program import montgomery_radix
from accelerant.algebra.field.words import encode
from accelerant.algebra.ntt.plan import Pass
from accelerant.algebra.ntt.program import Tile, has_quotients
from accelerant.algebra.ntt.reference import bit_reversed
from accelerant.algebra.ntt.tables import Tables, pass_tables

__all__ = ["device_tables"]

Words = npt.NDArray[Any]


def device_tables(field: Field, step: Pass, tile: Tile) -> tuple[Words, Tables]:
    """The roots, and the rest of what a pass reads.

    Roots: rows / 2 factors w, in Montgomery form; of a field that has_quotients, w and floor(w R / p); of Goldilocks,
    at [(radix + k) 2^done + block] the factor of a thread's element k, where so many levels are done before a group.
    """
    tables = pass_tables(field, step, montgomery_radix(field))
    if field.name == "goldilocks":
        return encode(field, _by_groups(field, step, tile)), tables
    radix, roots = montgomery_radix(field), _by_blocks(field, step)
    if has_quotients(field):
        pairs = [(w, w * radix // field.modulus) for w in roots]
        return np.array([[field.words(value, 64, field.limbs) for value in pair] for pair in pairs], np.uint64), tables
    return encode(field, [w * radix % field.modulus for w in roots]), tables


def _powers(field: Field, step: Pass) -> list[int]:
    found = [1]
    for _ in range(step.rows - 1):
        found.append(found[-1] * step.root % field.modulus)
    return found


def _by_blocks(field: Field, step: Pass) -> list[int]:
    powers, bits = _powers(field, step), step.log_rows - 1
    return [powers[bit_reversed(block, bits)] for block in range(1 << bits)]


def _by_groups(field: Field, step: Pass, tile: Tile) -> list[int]:
    powers, radix = _powers(field, step), 1 << tile.radix
    found = [1] * (2 * step.rows)
    for done in range((step.log_rows - 1) % tile.radix + 1, step.log_rows, tile.radix):
        unit = step.rows >> done + tile.radix
        for k in range(radix):
            for block in range(1 << done):
                found[(radix + k << done) + block] = powers[bit_reversed(block, done) * k * unit]
    return found
