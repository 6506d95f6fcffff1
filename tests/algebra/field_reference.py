"""Field arithmetic on Python integers: the oracle.

Elements are canonical integers from 0 to p - 1 unless a function says otherwise. Nothing here is constant-time.
"""

from accelerant.algebra.field.parameters import field_of
from accelerant.errors import ShapeError


def field_add_reference(x, y, *, field):
    """Return (x + y) mod p, element by element.

    Raises:
        ConfigError: unknown field.
        ShapeError: lengths differ.
    """
    p = field_of(field).modulus
    return [(a + b) % p for a, b in _pairs(x, y)]


def field_sub_reference(x, y, *, field):
    """Return (x - y) mod p; raises as field_add_reference."""
    p = field_of(field).modulus
    return [(a - b) % p for a, b in _pairs(x, y)]


def field_mul_reference(x, y, *, field):
    """Return x y mod p; raises as field_add_reference."""
    p = field_of(field).modulus
    return [a * b % p for a, b in _pairs(x, y)]


def field_square_reference(x, *, field):
    """Return x^2 mod p."""
    return field_mul_reference(x, x, field=field)


def field_neg_reference(x, *, field):
    """Return -x mod p."""
    p = field_of(field).modulus
    return [-a % p for a in x]


def field_pow_reference(x, exponent, *, field):
    """Return x^exponent mod p; x^0 = 1, also of 0. A negative exponent takes the power of the inverse.

    Raises:
        ZeroDivisionError: the exponent is negative and an element is 0; names its index.
    """
    p = field_of(field).modulus
    base = x if exponent >= 0 else field_batch_inverse_reference(x, field=field)
    return [pow(a, abs(exponent), p) for a in base]


def field_inv_reference(x, *, field):
    """Return x^(p - 2): the inverse, and 0 of 0."""
    p = field_of(field).modulus
    return [pow(a, p - 2, p) for a in x]


def field_batch_inverse_reference(x, *, field):
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


def field_sum_reference(x, *, field):
    """Return the sum of all elements; 0 of none."""
    return sum(x) % field_of(field).modulus


def field_dot_reference(x, y, *, field):
    """Return the sum of x y; 0 of none. Raises as field_add_reference."""
    return sum(a * b for a, b in _pairs(x, y)) % field_of(field).modulus


def field_reduce_reference(x, *, field):
    """Return any integers mod p."""
    p = field_of(field).modulus
    return [a % p for a in x]


def field_unreduced_reference(x, *, field):
    """Return the least index of an integer that is not from 0 to p - 1; the length if there is none."""
    p = field_of(field).modulus
    return next((i for i, a in enumerate(x) if not 0 <= a < p), len(x))


def _pairs(x, y):
    if len(x) != len(y):
        raise ShapeError(f"x and y must be of one length, got {len(x)} and {len(y)}")
    return zip(x, y, strict=True)
