"""The factors of a pass as words: tables for the CPU's kernel, and for the C kernels of devices.

Words are Montgomery forms x R mod p (R of algebra.field.program.montgomery_radix): a product with one divides by R and
so preserves the other operand's form. If an arithmetic divides by another L, its factors are x L mod p.

A table of twiddles has as many factors as a transform has points, or a fraction of that. On the CPU the field's kernel
multiplies them, and Python computes one column only (2 ms for 2^16 points of BN254; 12 ms with a Python call for each
factor of the first few columns). On devices powers.c computes them from the squares of three numbers: no CPU kernel is
compiled and no table copied, which took most of a process's first call. The roots of devices' kernels are few, so the
host computes them: a block's factor is the root to the power of its bit-reversed number (kernel.c).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.memory_space import HOST, MemorySpace
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.program import BLOCK, kernel_source, montgomery_radix
from accelerant.algebra.field.words import dtype_of, tail_of
from accelerant.algebra.ntt.plan import Pass, Powers, powers
from accelerant.algebra.ntt.program import LADDER, Tile, has_quotients, powers_source
from accelerant.runtime.recorded_launch import launch

Words = npt.NDArray[Any]

_MASK = (1 << 52) - 1

_BATCH = (1 << 13, 1 << 16)
"""Fewest and most factors multiplied in one launch: few for a small table, since the first access to memory takes
longer than the products; for a large one enough for several cores."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The factors of a pass, on the host or in a device's memory; None for those that it does not have.

    Attributes:
        roots: (rows / 2, ...), powers of the pass's root; on devices as roots_of returns them.
        before, after: (rows, ...).
        low, high: (rows, 2^log_low, ...) and (rows, 2^(log_inner - log_low), ...); high if twiddles are split.
    """

    roots: Any
    before: Any
    after: Any
    low: Any
    high: Any


def pass_tables(field: Field, step: Pass, radix: int) -> Tables:
    """Return the tables of a pass on the host, as factors x L mod p for the radix L."""
    p = field.modulus

    def scaled(values: Sequence[int]) -> Words:
        return _words_of(field, [value * radix % p for value in values])

    low = high = None
    if step.twiddles is not None:
        base, size = step.twiddles.base.by_position(p), 1 << step.log_low
        low = _columns(field, scaled(step.twiddles.start.by_position(p)), base, size)
        if step.variant.split:
            far = [pow(value, size, p) for value in base]
            high = _columns(field, scaled([1] * step.rows), far, 1 << step.digits[0] - step.log_low)
    return Tables(
        roots=scaled(powers(1, step.root, max(1, step.rows // 2), p)),
        before=None if step.before is None else scaled(step.before.by_position(p)),
        after=None if step.after is None else scaled(step.after.by_position(p)),
        low=low,
        high=high,
    )


def _words_of(field: Field, values: Iterable[int]) -> Words:
    """Return the words of integers below the modulus, (n, ...), without the checks of algebra.field.words.encode."""
    size, dtype = field.size_bytes, dtype_of(field)
    data = b"".join([value.to_bytes(size, "little") for value in values])
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape((-1, *tail_of(field)))


def limbs_of_52_bits(field: Field, words: Words) -> Words:
    """Convert numbers from (..., words of 64 bits) to (..., limbs of 52 bits)."""
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
    """Return start[r] base[r]^c, (rows, count, ...), in the form of start's words; count is a power of two.

    With c = c0 + near c1, each factor is the product of start base^c0 and base^(near c1), columns made by doubling.
    """
    p, radix = field.modulus, montgomery_radix(field)
    factor = _words_of(field, [value * radix % p for value in base])
    near = 1 << (count.bit_length() - 1 + 1) // 2
    first, factor = _doubled(field, start, factor, min(near, count))
    if near >= count:
        return first
    ones = _words_of(field, [radix % p]).repeat(len(start), axis=0)
    second, _ = _doubled(field, ones, factor, count // near)
    shape = (len(start), count // near, near, *tail_of(field))
    table = np.empty(shape, dtype_of(field))
    rows = max(1, min(_BATCH[1], max(_BATCH[0], len(start) * count // 8)) // count)
    factors = np.empty((min(rows, len(start)), *shape[1:]), dtype_of(field))
    for at in range(0, len(start), rows):
        part = table[at : at + rows]
        np.copyto(part, first[at : at + rows, None])
        np.copyto(factors[: len(part)], second[at : at + rows, :, None])
        _multiply(field, part, factors[: len(part)], part)
    return table.reshape((len(start), count, *tail_of(field)))


def _doubled(field: Field, start: Words, factor: Words, count: int) -> tuple[Words, Words]:
    """Return start[r] factor[r]^c, (rows, count, ...), and factor^count; factors in Montgomery form, (rows, ...)."""
    table = np.ascontiguousarray(start[:, None])
    while (done := table.shape[1]) < count:
        further, squared = np.empty_like(table), np.empty_like(factor)
        _multiply(field, table, factor[:, None].repeat(done, axis=1), further)
        _multiply(field, factor, factor, squared)
        table, factor = np.concatenate((table, further), axis=1), squared
    return table, factor


def _multiply(field: Field, x: Words, y: Words, z: Words) -> None:
    """Store x y / R in z, element by element; not recorded in the ledger, since no caller asked for it."""
    n, entry = x.size // field.limbs, "field_mul_montgomery"
    launch(HOST, kernel_source(field, entry), entry, n, 1, (x, y, z), n)


_LOG_STEPS = 4
"""Log2 of the most factors of a thread."""


def device_tables(space: MemorySpace, field: Field, step: Pass, tile: Tile) -> Tables:
    """Return the tables of a pass on a device, made on the current stream: other streams must wait for it."""
    low = high = None
    if step.twiddles is not None:
        start, base, log_inner = step.twiddles.start, step.twiddles.base, step.digits[0]
        low = _device_powers(space, field, start, base, step.log_low, 0)
        if step.variant.split:
            ones = Powers(1, 1, start.log_rows, start.by_bits)
            high = _device_powers(space, field, ones, base, log_inner - step.log_low, step.log_low)
    none = Powers(1, 1, 0)
    return Tables(
        roots=space.load(roots_of(field, step, tile, plain="wgsl" in space.provider.dialects)),
        before=None if step.before is None else _device_powers(space, field, step.before, none, 0, 0),
        after=None if step.after is None else _device_powers(space, field, step.after, none, 0, 0),
        low=low,
        high=high,
    )


def _device_powers(space: MemorySpace, field: Field, start: Powers, base: Powers, log_count: int, log_unit: int) -> Any:
    """Return start base^(c 2^log_unit) for each row and column c, (rows, 2^log_count, ...), by powers.c."""
    rows, steps = start.log_rows, min(_LOG_STEPS, log_count)
    table = space.empty((1 << rows, 1 << log_count, *tail_of(field)), dtype_of(field))
    p, values = field.modulus, [start.scale]
    for number in (start.base, base.scale, base.base):
        squares = [number]
        for _ in range(LADDER - 1):
            squares.append(squares[-1] ** 2 % p)
        values += squares
    ladder = space.load(_words_of(field, [value * montgomery_radix(field) % p for value in values]))
    numbers = (rows, log_count, steps, log_unit, int(start.by_bits), int(start.base != 1), int(base.scale != 1))
    blocks = -(-(1 << rows + log_count - steps) // BLOCK)
    launch(space, powers_source(field), "ntt_powers", blocks, BLOCK, (table, ladder), *numbers)
    return table


def roots_of(field: Field, step: Pass, tile: Tile, *, plain: bool = False) -> Words:
    """Return the roots of a pass: rows / 2 factors w, in Montgomery form; if has_quotients, w and floor(w R / p).

    `plain` roots, for WGSL, have no quotients and the same order for every field. For Goldilocks in C,
    [(radix + k) 2^done + block] is the factor of a thread's element k in a group of levels, with `done` levels before
    it.
    """
    if field.name == "goldilocks" and not plain:
        all_roots = np.array(powers(1, step.root, step.rows, field.modulus), np.uint64)
        elements, by_level = np.arange(1 << tile.radix), np.ones(2 * step.rows, np.uint64)
        for done in range((step.log_rows - 1) % tile.radix + 1, step.log_rows, tile.radix):
            exponents = np.outer(elements, _reversed(done)) * (step.rows >> done + tile.radix)
            by_level[1 << tile.radix + done : 2 << tile.radix + done] = all_roots[exponents.reshape(-1)]
        return by_level
    p, radix, count = field.modulus, montgomery_radix(field), max(1, step.rows // 2)
    roots = powers(1, step.root, count, p)
    if has_quotients(field) and not plain:
        factors, quotients = _words_of(field, roots), _words_of(field, [(w * radix) // p for w in roots])
        words = np.stack((factors, quotients), axis=1)
    else:
        words = _words_of(field, [w * radix % p for w in roots])
    return words[_reversed(count.bit_length() - 1)]


def _reversed(bits: int) -> npt.NDArray[np.int64]:
    """Return the numbers of so many bits, bit-reversed."""
    numbers = np.zeros(1, np.int64)
    for _ in range(bits):
        numbers = np.concatenate((2 * numbers, 2 * numbers + 1))
    return numbers
