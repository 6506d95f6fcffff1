"""The factors of a pass as words, made on the host; what a device makes itself is device_tables.py's.

Words are Montgomery forms x R mod p (R of algebra.field.program.montgomery_radix), so that a product of one with an
element divides by R and leaves the element in the form that it has. Where an arithmetic divides by another L, its
factors are x L mod p.

A table of twiddles has as many factors as a transform has points, or a share of that: the CPU's own kernel multiplies
them, and Python sees those of one column (of 2^16 points of BN254 2 ms, where a call of Python for each factor of the
first few columns took 12).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.places import HOST
from accelerant.algebra.field.program import kernel_source, montgomery_radix
from accelerant.algebra.field.words import dtype_of, tail_of
from accelerant.algebra.ntt.plan import Pass
from accelerant.runtime.compilation.kernel import Kernel

__all__ = ["Tables", "limbs_of_52_bits", "pass_tables", "powers_of", "words_of"]

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
