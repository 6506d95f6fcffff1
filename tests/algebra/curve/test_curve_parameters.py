import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerant.algebra.curve import CURVES, FAMILIES, curve_of, family_of
from accelerant.algebra.curve.parameters import _checked
from accelerant.algebra.curve.weierstrass import Curve, PrimeCoordinates, QuadraticCoordinates, multiply
from accelerant.algebra.field.parameters import FIELDS, Field
from accelerant.errors import ConfigError
from refusals import assert_raises


def test_family_parameters_are_the_published_ones():
    # EIP-196 names no x; Beuchat et al., eprint 2010/354, and EIP-2537 do.
    assert family_of("bn254").parameter == 4965661367192848881
    assert family_of("bls12_381").parameter == -0xD201000000010000


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_family_parameter_gives_back_both_moduli(family):
    x = family.parameter
    if family.kind == "bn":
        assert family.q == 36 * x**4 + 36 * x**3 + 24 * x**2 + 6 * x + 1
        assert family.r == 36 * x**4 + 36 * x**3 + 18 * x**2 + 6 * x + 1
    else:
        assert family.r == x**4 - x**2 + 1
        assert 3 * (family.q - x) == (x - 1) ** 2 * family.r


def test_cofactors():
    # EIP-2537's; BN254's G1 has prime order.
    assert curve_of("bn254_g1").cofactor == 1
    assert curve_of("bls12_381_g1").cofactor == 0x396C8C005555E1568C00AAAB0000AAAB
    assert curve_of("bls12_381_g2").cofactor == int(
        "5d543a95414e7f1091d50792876a202cd91de4547085abaa68a205b2e5a7ddfa628f1cb4d9e82ef21537e293a6691ae1"
        "616ec6e786f0c70cf1c38e31c7238e5",
        16,
    )


@pytest.mark.parametrize("name", CURVES)
def test_group_order_annihilates_any_point_and_is_near_the_fields_size(name):
    curve, rng = curve_of(name), random.Random(1)
    k, q = curve.coordinates, curve.coordinates.base.modulus
    size = q**k.degree
    # Hasse: |order - size - 1| <= 2 sqrt(size).
    assert (curve.cofactor * curve.order - size - 1) ** 2 <= 4 * size
    found = 0
    while found < 2:
        x = k.join([rng.randrange(q) for _ in range(k.degree)])
        y = k.sqrt(curve.right_side(x))
        if y is not None:
            found += 1
            assert multiply(curve, curve.cofactor * curve.order, (x, y)) is None


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_twist(family):
    k, q = family.g2.coordinates, family.q
    # xi is neither a square nor a cube, so w^6 - xi is irreducible.
    assert k.power(family.nonresidue, (q**2 - 1) // 2) != k.one
    assert k.power(family.nonresidue, (q**2 - 1) // 3) != k.one
    b, xi = family.g2.b, family.nonresidue
    assert (k.mul(b, xi) if family.twist == "divide" else k.mul(k.inv(b), k.times(xi, family.b**2))) == (family.b, 0)


def test_hash_is_of_the_canonical_text():
    curve = curve_of("bn254_g1")
    text = curve.canonical_text()
    q, r = FIELDS["bn254_fq"].modulus, FIELDS["bn254_fr"].modulus
    assert text == f"curve bn254_g1\nmodulus {q:x}\ndegree 1\nb 3\nx 1\ny 2\norder {r:x}\ncofactor 1\n"
    assert curve.parameters_hash() == hashlib.sha256(text.encode()).hexdigest()


def test_hashes_are_as_documented():
    assert {name: curve_of(name).parameters_hash() for name in CURVES} == {
        "bn254_g1": "4b80b719664d252346a8067c79e9a828313f7b19405c1c083791f6093b649db5",
        "bn254_g2": "ade8ba25ad1dc6421cc08c61c5b6aa5bab97e9dc1989251c4eaf123aac2be5d0",
        "bls12_381_g1": "b25abc284db97f0f25eb46394ff9f6ad123f18a151c01771360b64c38e59adef",
        "bls12_381_g2": "9377ebb14c653094ad12e9ebafedf0641a33193c2404e900f0e68c0cf975cb88",
    }


def test_a_wrong_table_is_refused():
    good = curve_of("bls12_381_g1")

    def make(generator):
        return Curve("wrong", good.coordinates, good.scalars, good.b, generator, good.cofactor)

    assert_raises(ConfigError, "not on the curve", lambda: _checked(make((good.generator[0], good.generator[1] + 1))))
    # x = 4 has a point of the curve, out of the subgroup (ZCash's own example).
    y = good.coordinates.sqrt(4**3 + 4)
    assert_raises(ConfigError, "is not infinity", lambda: _checked(make((4, y))))


def test_unknown_names():
    assert_raises(ConfigError, r"unknown curve 'secp256k1'; known are bn254_g1", curve_of, "secp256k1")
    assert_raises(ConfigError, "unknown pairing 'bn254_g1'", family_of, "bn254_g1")


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
            assert_raises(ZeroDivisionError, None, k.inv, a)
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
    assert_raises(ValueError, "-1 is a square mod 97", lambda: QuadraticCoordinates(Field("base", 97, 5)))
    assert_raises(ValueError, "-1 is a square", QuadraticCoordinates, FIELDS["bn254_fr"])
