import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerant.algebra.curve import CURVES, curve_of
from accelerant.algebra.curve.weierstrass import PrimeCoordinates, QuadraticCoordinates
from accelerant.algebra.field.parameters import FIELDS, Field

NAMES = list(CURVES)


def elements(k):
    """Edges and random values, as coefficients."""
    q, rng = k.base.modulus, random.Random(2)
    values = [0, 1, 2, q - 1, q // 2, q // 2 + 1, 1 << 64, (1 << 128) - 1, rng.randrange(q), rng.randrange(q)]
    if k.degree == 1:
        return [k.join([value]) for value in values]
    return [k.join(pair) for value in values for pair in ((value, 0), (0, value), (value, values[-1]), (q - 1, value))]


def plain_product(k, a, b):
    """From the definition, u^2 = -1."""
    q, (a0, *a1), (b0, *b1) = k.base.modulus, k.parts(a), k.parts(b)
    if not a1:
        return k.join([a0 * b0 % q])
    return k.join([(a0 * b0 - a1[0] * b1[0]) % q, (a0 * b1[0] + a1[0] * b0) % q])


@pytest.mark.parametrize("name", NAMES)
def test_arithmetic(name):
    k = curve_of(name).coordinates
    q, values = k.base.modulus, elements(k)
    for a, b in zip(values, reversed(values), strict=True):
        assert k.mul(a, b) == plain_product(k, a, b)
        assert k.square(a) == plain_product(k, a, a)
        assert k.parts(k.add(a, b)) == tuple((x + y) % q for x, y in zip(k.parts(a), k.parts(b), strict=True))
        assert k.add(k.sub(a, b), b) == a
        assert k.add(a, k.neg(a)) == k.zero
        assert k.times(a, 3) == k.add(a, k.add(a, a))
        if a == k.zero:
            with pytest.raises(ZeroDivisionError):
                k.inv(a)
        else:
            assert k.mul(a, k.inv(a)) == k.one
    assert k.power(values[-1], 5) == k.mul(k.square(k.square(values[-1])), values[-1])
    assert k.power(values[-1], 0) == k.one


@pytest.mark.parametrize("name", NAMES)
def test_square_roots(name):
    k = curve_of(name).coordinates
    order = k.base.modulus**k.degree - 1
    for a in elements(k):
        root = k.sqrt(a)
        is_square = a == k.zero or k.power(a, order // 2) == k.one
        assert (root is not None) == is_square
        if root is not None:
            assert k.square(root) == a
            assert k.sqrt(k.square(a)) in (a, k.neg(a))


@pytest.mark.parametrize("name", NAMES)
def test_larger_is_one_of_both_signs(name):
    k = curve_of(name).coordinates
    for a in elements(k):
        parts, negated = k.parts(a)[::-1], k.parts(k.neg(a))[::-1]
        assert k.is_larger(a) == (parts > negated)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(["bn254_g2", "bls12_381_g2"]), st.integers(0), st.integers(0))
def test_conjugate_is_frobenius(name, c0, c1):
    k = curve_of(name).coordinates
    q = k.base.modulus
    a = (c0 % q, c1 % q)
    assert k.conjugate(a) == k.power(a, q)


@pytest.mark.parametrize("name", ["bn254_fr", "bls12_381_fr", "goldilocks"])
def test_square_roots_for_q_of_1_mod_4(name):
    field, rng = FIELDS[name], random.Random(3)
    q, k = field.modulus, PrimeCoordinates(field)
    assert q % 4 == 1
    assert k.sqrt(0) == 0
    for a in [1, 2, 3, 4, q - 1, *(rng.randrange(q) for _ in range(20))]:
        root = k.sqrt(a * a % q)
        assert root in (a, q - a)
        assert k.sqrt(a * a * field.generator % q) is None


def test_the_extension_needs_q_of_3_mod_4():
    for name in ("bn254_fq", "bls12_381_fq"):
        assert QuadraticCoordinates(FIELDS[name]).base is FIELDS[name]
        assert pow(-1, (FIELDS[name].modulus - 1) // 2, FIELDS[name].modulus) == FIELDS[name].modulus - 1
    with pytest.raises(ValueError, match="-1 is a square mod 97"):
        QuadraticCoordinates(Field("base", 97, 5))
    with pytest.raises(ValueError, match="-1 is a square"):
        QuadraticCoordinates(FIELDS["bn254_fr"])
