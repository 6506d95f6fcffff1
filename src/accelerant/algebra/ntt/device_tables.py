"""The tables of a pass as the C kernels read them: roots in the order of blocks, and powers, which the device makes.

Kernels halve blocks of rows (kernel.c): a block's factor is the root to the power that is the block's number with its
bits in the opposite order. Those are few, and the host makes them. Twiddles are as many as the transform has points:
powers.c makes them from the squares of three numbers, so that neither the CPU's compiler starts nor a table is copied
(of 2^16 points of BN254 both were most of the first call of a process on a GPU).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.places import Place
from accelerant.algebra.field.program import BLOCK, montgomery_radix
from accelerant.algebra.field.words import dtype_of, tail_of
from accelerant.algebra.ntt.plan import Pass, Powers
from accelerant.algebra.ntt.program import LADDER, Tile, has_quotients, powers_source
from accelerant.algebra.ntt.tables import powers_of, words_of
from accelerant.runtime.compilation.kernel import Kernel

__all__ = ["DeviceTables", "device_tables", "roots_of"]

Words = npt.NDArray[Any]

_LOG_STEPS = 4
"""Log2 of the factors of a thread, at most."""


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """What a pass reads beside its elements, at their place; None where it has none.

    Attributes:
        roots: see roots_of.
        before, after: (rows, ...).
        low, high: as algebra.ntt.tables.Tables has them.
    """

    roots: Any
    before: Any
    after: Any
    low: Any
    high: Any


def device_tables(place: Place, field: Field, step: Pass, tile: Tile) -> DeviceTables:
    """The tables of a pass, in order with what the current stream does: other streams must wait for it."""
    low = high = None
    if step.twiddles is not None:
        start, base, log_inner = step.twiddles.start, step.twiddles.base, step.digits[0]
        low = _made(place, field, start, base, step.log_low, 0)
        if step.variant.split:
            ones = Powers(1, 1, start.log_rows, start.by_bits)
            high = _made(place, field, ones, base, log_inner - step.log_low, step.log_low)
    none = Powers(1, 1, 0)
    return DeviceTables(
        roots=place.load(roots_of(field, step, tile)),
        before=None if step.before is None else _made(place, field, step.before, none, 0, 0),
        after=None if step.after is None else _made(place, field, step.after, none, 0, 0),
        low=low,
        high=high,
    )


# --- powers ----------------------------------------------------------------------------------------------------------


def _made(place: Place, field: Field, start: Powers, base: Powers, log_count: int, log_unit: int) -> Any:
    """(rows, 2^log_count, ...): start base^(c 2^log_unit) of each place and column c, by powers.c."""
    rows, steps = start.log_rows, min(_LOG_STEPS, log_count)
    table = place.empty((1 << rows, 1 << log_count, *tail_of(field)), dtype_of(field))
    ladder = place.load(_ladder(field, start.scale, start.base, base.scale, base.base))
    numbers = (rows, log_count, steps, log_unit, int(start.by_bits), int(start.base != 1), int(base.scale != 1))
    grid = (-(-(1 << rows + log_count - steps) // BLOCK),)
    args = (place.pointer(table), place.pointer(ladder), *numbers)
    place.provider.launch(_powers_kernel(field, place), grid, (BLOCK,), args)
    return table


def _ladder(field: Field, scale: int, *bases: int) -> Words:
    """What powers.c calls so."""
    p, radix = field.modulus, montgomery_radix(field)
    values = [scale * radix % p]
    for base in bases:
        square = base
        for _ in range(LADDER):
            values.append(square * radix % p)
            square = square * square % p
    return words_of(field, values)


@functools.cache
def _powers_kernel(field: Field, place: Place) -> Kernel:
    return place.provider.compile(powers_source(field), device=place.index)


# --- roots -----------------------------------------------------------------------------------------------------------


def roots_of(field: Field, step: Pass, tile: Tile) -> Words:
    """Roots: rows / 2 factors w, in Montgomery form; of a field that has_quotients, w and floor(w R / p).

    Of Goldilocks, at [(radix + k) 2^done + block] the factor of a thread's element k, where so many levels are done
    before a group.
    """
    if field.name == "goldilocks":
        return _by_groups(field, step, tile)
    p, radix, count = field.modulus, montgomery_radix(field), max(1, step.rows // 2)
    roots = powers_of(field, step.root, count)
    if has_quotients(field):
        plain, quotients = words_of(field, roots), words_of(field, [(w * radix) // p for w in roots])
        words = np.stack((plain, quotients), axis=1)
    else:
        words = words_of(field, [w * radix % p for w in roots])
    return words[_turned(count.bit_length() - 1)]


def _by_groups(field: Field, step: Pass, tile: Tile) -> Words:
    powers = np.array(powers_of(field, step.root, step.rows), np.uint64)
    elements, found = np.arange(1 << tile.radix), np.ones(2 * step.rows, np.uint64)
    for done in range((step.log_rows - 1) % tile.radix + 1, step.log_rows, tile.radix):
        exponents = np.outer(elements, _turned(done)) * (step.rows >> done + tile.radix)
        found[1 << tile.radix + done : 2 << tile.radix + done] = powers[exponents.reshape(-1)]
    return found


def _turned(bits: int) -> npt.NDArray[np.int64]:
    """The numbers of so many bits with these in the opposite order."""
    found = np.zeros(1, np.int64)
    for _ in range(bits):
        found = np.concatenate((2 * found, 2 * found + 1))
    return found
