"""The factors of a pass as words: made on the host, with the field's own kernels where there are many.

Words are Montgomery forms x R mod p (R of algebra.field.program.montgomery_radix), so that a product of one with an
element divides by R and leaves the element in the form that it has. Where an arithmetic divides by another L, its
factors are x L mod p.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.places import HOST
from accelerant.algebra.field.program import kernel_source, montgomery_radix
from accelerant.algebra.field.words import dtype_of, encode, tail_of
from accelerant.algebra.ntt.plan import Pass
from accelerant.runtime.kernel import Kernel

__all__ = ["Tables", "limbs_of_52_bits", "pass_tables"]

Words = npt.NDArray[Any]

_MASK = (1 << 52) - 1


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

    def powers(start: Sequence[int], base: Sequence[int], count: int) -> Words:
        return _powers(field, [value * radix % p for value in start], base, count)

    low = high = None
    if step.twiddles is not None:
        inner, size = step.digits[0], 1 << step.log_low
        low = powers(step.twiddles.start, step.twiddles.base, size)
        if step.variant.split:
            far = [pow(base, size, p) for base in step.twiddles.base]
            high = powers([1] * step.rows, far, 1 << inner - step.log_low)
    return Tables(
        roots=powers([1], [step.root], max(1, step.rows // 2))[0],
        before=powers(step.before, [1] * step.rows, 1)[:, 0] if step.before else None,
        after=powers(step.after, [1] * step.rows, 1)[:, 0] if step.after else None,
        low=low,
        high=high,
    )


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


def _powers(field: Field, start: Sequence[int], base: Sequence[int], count: int) -> Words:
    """(len(start), count, ...): start[r] base[r]^c, the start as it is to be stored; by doubling."""
    p, tail = field.modulus, tail_of(field)
    table = np.empty((len(start), count, *tail), dtype_of(field))
    table[:, 0] = encode(field, list(start))
    done, step = 1, list(base)
    while done < count:
        more = min(done, count - done)
        factors = encode(field, [value * montgomery_radix(field) % p for value in step])
        spread = np.broadcast_to(factors[:, None], (len(start), more, *tail))
        table[:, done : done + more] = _products(field, table[:, :more], spread)
        step = [value * value % p for value in step]
        done += more
    return table


def _products(field: Field, x: Words, y: Words) -> Words:
    """X y / R, element by element; not in the ledger, since no caller asked for it."""
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
    z = np.empty_like(x)
    n = x.size // field.limbs
    HOST.provider.launch(_multiply(field), (n,), (1,), (*map(HOST.pointer, (x, y, z)), n))
    return z


@functools.cache
def _multiply(field: Field) -> Kernel:
    return HOST.provider.compile(kernel_source(field, "field_mul_montgomery"))
