"""Field arithmetic on Python integers: the oracle.

Elements are canonical integers from 0 to p - 1 unless a function says otherwise. Nothing here is constant-time.
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerant.algebra.field.parameters import FIELDS, field_of
from accelerant.errors import ShapeError

__all__ = [
    "MODULI",
    "field_add_reference",
    "field_batch_inverse_reference",
    "field_dot_reference",
    "field_inv_reference",
    "field_mul_reference",
    "field_neg_reference",
    "field_pow_reference",
    "field_reduce_reference",
    "field_square_reference",
    "field_sub_reference",
    "field_sum_reference",
    "field_unreduced_reference",
]

MODULI = {name: field.modulus for name, field in FIELDS.items()}
"""Field name -> modulus."""


def field_add_reference(x: Sequence[int], y: Sequence[int], *, field: str) -> list[int]:
    """Return (x + y) mod p, element by element.

    Raises:
        ConfigError: unknown field.
        ShapeError: lengths differ.
    """
    p = field_of(field).modulus
    return [(a + b) % p for a, b in _pairs(x, y)]


def field_sub_reference(x: Sequence[int], y: Sequence[int], *, field: str) -> list[int]:
    """Return (x - y) mod p; raises as field_add_reference."""
    p = field_of(field).modulus
    return [(a - b) % p for a, b in _pairs(x, y)]


def field_mul_reference(x: Sequence[int], y: Sequence[int], *, field: str) -> list[int]:
    """Return x y mod p; raises as field_add_reference."""
    p = field_of(field).modulus
    return [a * b % p for a, b in _pairs(x, y)]


def field_square_reference(x: Sequence[int], *, field: str) -> list[int]:
    """Return x^2 mod p."""
    return field_mul_reference(x, x, field=field)


def field_neg_reference(x: Sequence[int], *, field: str) -> list[int]:
    """Return -x mod p."""
    p = field_of(field).modulus
    return [-a % p for a in x]


def field_pow_reference(x: Sequence[int], exponent: int, *, field: str) -> list[int]:
    """Return x^exponent mod p; x^0 = 1, also of 0. A negative exponent takes the power of the inverse.

    Raises:
        ZeroDivisionError: the exponent is negative and an element is 0; names its index.
    """
    p = field_of(field).modulus
    base = x if exponent >= 0 else field_batch_inverse_reference(x, field=field)
    return [pow(a, abs(exponent), p) for a in base]


def field_inv_reference(x: Sequence[int], *, field: str) -> list[int]:
    """Return x^(p - 2): the inverse, and 0 of 0."""
    p = field_of(field).modulus
    return [pow(a, p - 2, p) for a in x]


def field_batch_inverse_reference(x: Sequence[int], *, field: str) -> list[int]:
    """Return all inverses by one inversion and three products an element.

    Source: Montgomery 1987, Mathematics of Computation 48, pages 243 to 264.

    Raises:
        ZeroDivisionError: an element is 0 mod p; names its index.
    """
    p = field_of(field).modulus
    products = [1]
    for i, a in enumerate(x):
        if a % p == 0:
            raise ZeroDivisionError(f"x[{i}] is 0, which has no inverse")
        products.append(products[-1] * a % p)
    inverse = pow(products[-1], -1, p)
    inverses = [0] * len(x)
    for i in reversed(range(len(x))):
        inverses[i] = inverse * products[i] % p
        inverse = inverse * x[i] % p
    return inverses


def field_sum_reference(x: Sequence[int], *, field: str) -> int:
    """Return the sum of all elements; 0 of none."""
    return sum(x) % field_of(field).modulus


def field_dot_reference(x: Sequence[int], y: Sequence[int], *, field: str) -> int:
    """Return the sum of x y; 0 of none. Raises as field_add_reference."""
    return sum(a * b for a, b in _pairs(x, y)) % field_of(field).modulus


def field_reduce_reference(x: Sequence[int], *, field: str) -> list[int]:
    """Return any integers mod p."""
    p = field_of(field).modulus
    return [a % p for a in x]


def field_unreduced_reference(x: Sequence[int], *, field: str) -> int:
    """Return the least index of an integer that is not from 0 to p - 1; the length if there is none."""
    p = field_of(field).modulus
    return next((i for i, a in enumerate(x) if not 0 <= a < p), len(x))


def _pairs(x: Sequence[int], y: Sequence[int]) -> zip[tuple[int, int]]:
    if len(x) != len(y):
        raise ShapeError(f"x and y must be of one length, got {len(x)} and {len(y)}")
    return zip(x, y, strict=True)
