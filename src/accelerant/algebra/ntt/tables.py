"""The factors of a pass as words, made on the host; what a device makes itself is device_tables.py's.

Words are Montgomery forms x R mod p (R of algebra.field.program.montgomery_radix), so that a product of one with an
element divides by R and leaves the element in the form that it has. Where an arithmetic divides by another L, its
factors are x L mod p.

A table of twiddles has as many factors as a transform has points, or a share of that: the CPU's own kernel multiplies
them, and Python sees those of one column (of 2^16 points of BN254 2 ms, where a call of Python for each factor of the
first few columns took 12).


----

The tables of a pass as the C kernels read them: roots in the order of blocks, and powers, which the device makes.

Kernels halve blocks of rows (kernel.c): a block's factor is the root to the power that is the block's number with its
bits in the opposite order. Those are few, and the host makes them. Twiddles are as many as the transform has points:
powers.c makes them from the squares of three numbers, so that neither the CPU's compiler starts nor a table is copied
(of 2^16 points of BN254 both were most of the first call of a process on a GPU).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.memory_space import HOST, MemorySpace
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.program import BLOCK, kernel_source, montgomery_radix
from accelerant.algebra.field.words import dtype_of, tail_of
from accelerant.algebra.ntt.plan import Pass, Powers
from accelerant.algebra.ntt.program import LADDER, Tile, has_quotients, powers_source
from accelerant.runtime.compilation.kernel import Kernel

__all__ = [
    "DeviceTables",
    "Tables",
    "device_tables",
    "limbs_of_52_bits",
    "pass_tables",
    "powers_of",
    "roots_of",
    "words_of",
]

Words = npt.NDArray[Any]

_MASK = (1 << 52) - 1

_TOGETHER = (1 << 13, 1 << 16)
"""Factors multiplied in one launch, at least and at most: few of a small table, since memory that is touched for the
first time takes longer than the products; of a large one enough for several cores."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The factors of a pass; None where it has none.

    Attributes:
        roots: (rows / 2, ...), powers of the pass's root.
        before, after: (rows, ...).
        low, high: (rows, 2^log_low, ...) and (rows, 2^(log_inner - log_low), ...); high where twiddles are split.
    """

    roots: Words
    before: Words | None
    after: Words | None
    low: Words | None
    high: Words | None


def pass_tables(field: Field, step: Pass, radix: int) -> Tables:
    """The tables of a pass.

    Args:
        field: of the elements.
        step: the pass.
        radix: L.
    """
    p = field.modulus

    def scaled(values: Sequence[int]) -> Words:
        return words_of(field, [value * radix % p for value in values])

    low = high = None
    if step.twiddles is not None:
        base, size = step.twiddles.base.by_place(p), 1 << step.log_low
        low = _columns(field, scaled(step.twiddles.start.by_place(p)), base, size)
        if step.variant.split:
            far = [pow(each, size, p) for each in base]
            high = _columns(field, scaled([1] * step.rows), far, 1 << step.digits[0] - step.log_low)
    return Tables(
        roots=scaled(powers_of(field, step.root, max(1, step.rows // 2))),
        before=None if step.before is None else scaled(step.before.by_place(p)),
        after=None if step.after is None else scaled(step.after.by_place(p)),
        low=low,
        high=high,
    )


def words_of(field: Field, values: Iterable[int]) -> Words:
    """The words of integers below the modulus, (n, ...): what algebra.field.words.encode checks is known here."""
    size, dtype = field.size_bytes, dtype_of(field)
    data = b"".join([value.to_bytes(size, "little") for value in values])
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape((-1, *tail_of(field)))


def powers_of(field: Field, base: int, count: int) -> list[int]:
    """1, base, base^2, ..., so many."""
    found = [1]
    for _ in range(count - 1):
        found.append(found[-1] * base % field.modulus)
    return found


def limbs_of_52_bits(field: Field, words: Words) -> Words:
    """The same numbers, (..., words of 64 bits), as (..., limbs of 52 bits)."""
    count = -(-64 * field.limbs // 52)
    limbs = np.empty((*words.shape[:-1], count), np.uint64)
    for k in range(count):
        word, shift = divmod(52 * k, 64)
        limb = words[..., word] >> np.uint64(shift)
        if shift > 12 and word + 1 < field.limbs:
            limb = limb | words[..., word + 1] << np.uint64(64 - shift)
        limbs[..., k] = limb & np.uint64(_MASK)
    return limbs


def _columns(field: Field, start: Words, base: Sequence[int], count: int) -> Words:
    """(rows, count, ...): start[r] base[r]^c, the start's words as they are to be stored; count a power of two.

    With c = c0 + near c1, each factor is one product of start base^c0 and base^(near c1), columns found by doubling.
    """
    p, radix = field.modulus, montgomery_radix(field)
    factor = words_of(field, [value * radix % p for value in base])
    near = 1 << (count.bit_length() - 1 + 1) // 2
    first, factor = _doubled(field, start, factor, min(near, count))
    if near >= count:
        return first
    ones = words_of(field, [radix % p]).repeat(len(start), axis=0)
    second, _ = _doubled(field, ones, factor, count // near)
    shape = (len(start), count // near, near, *tail_of(field))
    table = np.empty(shape, dtype_of(field))
    least, most = _TOGETHER
    rows = max(1, min(most, max(least, len(start) * count // 8)) // count)
    factors = np.empty((min(rows, len(start)), *shape[1:]), dtype_of(field))
    for at in range(0, len(start), rows):
        part = table[at : at + rows]
        np.copyto(part, first[at : at + rows, None])
        np.copyto(factors[: len(part)], second[at : at + rows, :, None])
        _multiply(field, part, factors[: len(part)], part)
    return table.reshape((len(start), count, *tail_of(field)))


def _doubled(field: Field, start: Words, factor: Words, count: int) -> tuple[Words, Words]:
    """(rows, count, ...), start[r] factor[r]^c, and factor^count; factors in Montgomery form, (rows, ...)."""
    table, done = np.ascontiguousarray(start[:, None]), 1
    while done < count:
        further, squared = np.empty_like(table), np.empty_like(factor)
        _multiply(field, table, factor[:, None].repeat(done, axis=1), further)
        _multiply(field, factor, factor, squared)
        table, factor, done = np.concatenate((table, further), axis=1), squared, 2 * done
    return table, factor


def _multiply(field: Field, x: Words, y: Words, z: Words) -> None:
    """Z = x y / R, element by element; not in the ledger, since no caller asked for it."""
    n = x.size // field.limbs
    HOST.provider.launch(_kernel(field), (n,), (1,), (*map(HOST.pointer, (x, y, z)), n))


@functools.cache
def _kernel(field: Field) -> Kernel:
    return HOST.provider.compile(kernel_source(field, "field_mul_montgomery"))


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


def device_tables(place: MemorySpace, field: Field, step: Pass, tile: Tile) -> DeviceTables:
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


def _made(place: MemorySpace, field: Field, start: Powers, base: Powers, log_count: int, log_unit: int) -> Any:
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
def _powers_kernel(field: Field, place: MemorySpace) -> Kernel:
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
