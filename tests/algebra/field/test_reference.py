"""The oracle: a field's laws, and answers that need no oracle."""

import random

import field_reference as reference
import pytest

from accelerant.algebra.field.parameters import FIELDS
from accelerant.errors import ConfigError, ShapeError

EVERY = pytest.mark.parametrize("name", FIELDS)


def elements(name, count=20):
    p = FIELDS[name].modulus
    edges = [0, 1, 2, p - 1, p - 2, (p - 1) // 2, *(2**k % p for k in (31, 32, 63, 64, 128, 253))]
    return edges + [random.Random(name).randrange(p) for _ in range(count)]


@EVERY
def test_laws_of_a_field(name):
    x, p = elements(name), FIELDS[name].modulus
    y = x[::-1]
    add, sub, mul = (getattr(reference, f"field_{op}_reference") for op in ("add", "sub", "mul"))
    assert all(0 <= a < p for op in (add, sub, mul) for a in op(x, y, field=name))
    assert sub(add(x, y, field=name), y, field=name) == x
    assert add(x, reference.field_neg_reference(x, field=name), field=name) == [0] * len(x)
    assert reference.field_square_reference(x, field=name) == mul(x, x, field=name)
    both = mul(add(x, y, field=name), add(x, y, field=name), field=name)
    squares = add(mul(x, x, field=name), mul(y, y, field=name), field=name)
    twice = add(mul(x, y, field=name), mul(x, y, field=name), field=name)
    assert both == add(squares, twice, field=name)


@EVERY
def test_inverses_and_powers(name):
    x = elements(name)
    inverse = reference.field_inv_reference(x, field=name)
    assert inverse[0] == 0
    assert reference.field_mul_reference(x, inverse, field=name) == [0] + [1] * (len(x) - 1)
    assert reference.field_batch_inverse_reference(x[1:], field=name) == inverse[1:]
    assert reference.field_batch_inverse_reference([], field=name) == []
    assert reference.field_pow_reference(x, 0, field=name) == [1] * len(x)
    assert reference.field_pow_reference(x[1:], -1, field=name) == inverse[1:]
    cube = reference.field_mul_reference(reference.field_square_reference(x, field=name), x, field=name)
    assert reference.field_pow_reference(x, 3, field=name) == cube
    assert reference.field_pow_reference(x, FIELDS[name].modulus, field=name) == x


@EVERY
def test_sums(name):
    x, p = elements(name), FIELDS[name].modulus
    assert reference.field_sum_reference(x, field=name) == sum(x) % p
    assert reference.field_dot_reference(x, x, field=name) == sum(a * a for a in x) % p
    assert reference.field_sum_reference([], field=name) == reference.field_dot_reference([], [], field=name) == 0


@EVERY
def test_what_is_not_reduced(name):
    p = FIELDS[name].modulus
    assert reference.field_reduce_reference([p, p + 1, -1, 2**400], field=name) == [0, 1, p - 1, 2**400 % p]
    assert reference.field_unreduced_reference([0, p - 1, p, p + 1], field=name) == 2
    assert reference.field_unreduced_reference([0, -1], field=name) == 1
    assert reference.field_unreduced_reference([0, p - 1], field=name) == 2


def test_refusals():
    with pytest.raises(ConfigError, match="unknown field 'fermat'"):
        reference.field_add_reference([1], [2], field="fermat")
    with pytest.raises(ShapeError, match="got 1 and 2"):
        reference.field_dot_reference([1], [2, 3], field="babybear")
    with pytest.raises(ZeroDivisionError, match=r"x\[1\] is 0"):
        reference.field_pow_reference([3, 2013265921], -2, field="babybear")
