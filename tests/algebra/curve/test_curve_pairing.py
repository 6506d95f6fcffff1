import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairing_reference import (
    final_exponentiation,
    g1_point,
    g2_point,
    groth16_pairs,
    pairing,
    product_is_one,
    read_groth16,
    tower_of,
)

from accelerant.algebra.curve import FAMILIES, family_of
from accelerant.algebra.curve.weierstrass import multiply, negate

each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


def random_element(family, seed):
    """An element of Fq12 without zero coefficients."""
    values = [pow(7, seed * 12 + i + 1, family.q) for i in range(12)]
    pairs = list(zip(values[::2], values[1::2], strict=True))
    return tuple(pairs[:3]), tuple(pairs[3:])


def plain_power(tower, a, exponent):
    result = tower.one
    for bit in bin(exponent)[2:]:
        result = tower.square(result)
        if bit == "1":
            result = tower.mul(result, a)
    return result


@each_family
def test_tower(family):
    tower = tower_of(family)
    a, b, c = (random_element(family, seed) for seed in range(3))
    assert tower.mul(a, b) == tower.mul(b, a)
    assert tower.mul(tower.mul(a, b), c) == tower.mul(a, tower.mul(b, c))
    assert tower.square(a) == tower.mul(a, a)
    assert tower.mul(a, tower.inv(a)) == tower.one
    # w^6 is xi.
    zero, one = (0, 0), (1, 0)
    w = ((zero, zero, zero), (one, zero, zero))
    assert tower.power(w, 6) == ((family.nonresidue, zero, zero), (zero, zero, zero))
    # Frobenius and powers, from their definitions.
    assert tower.frobenius(a) == plain_power(tower, a, family.q)
    powers = [a]
    for _ in range(12):
        powers.append(tower.frobenius(powers[-1]))
    assert powers[6] == tower.conjugate(a)
    assert powers[12] == a
    exponent = family.q**2 * 5 + family.q * (family.q - 1) + 2
    assert tower.power(a, exponent) == plain_power(tower, a, exponent)
    assert tower.power(a, 0) == tower.one
    with pytest.raises(ZeroDivisionError):
        tower.inv(((zero, zero, zero), (zero, zero, zero)))


def test_final_power_is_what_it_says():
    family = family_of("bn254")
    tower = tower_of(family)
    f = random_element(family, 5)
    assert final_exponentiation(family, f) == plain_power(tower, f, (family.q**12 - 1) // family.r)


@each_family
def test_order_and_degeneracy(family):
    tower, g1, g2 = tower_of(family), family.g1.generator, family.g2.generator
    value = pairing(family, g1, g2)
    assert value != tower.one
    assert tower.power(value, family.r) == tower.one
    assert pairing(family, None, g2) == pairing(family, g1, None) == tower.one
    assert tower.mul(value, pairing(family, negate(family.g1, g1), g2)) == tower.one
    assert tower.mul(value, pairing(family, g1, negate(family.g2, g2))) == tower.one


@each_family
@settings(max_examples=2, deadline=None)
@given(a=st.integers(1, 1 << 256), b=st.integers(1, 1 << 256))
def test_bilinear(family, a, b):
    p, q = multiply(family.g1, a, family.g1.generator), multiply(family.g2, b, family.g2.generator)
    tower = tower_of(family)
    value = tower.power(pairing(family, family.g1.generator, family.g2.generator), a * b % family.r)
    assert pairing(family, p, q) == value


@each_family
def test_product(family):
    g1, g2 = family.g1, family.g2
    p, q = g1.generator, g2.generator
    assert product_is_one(family, [])
    pairs = [(multiply(g1, 6, p), q), (negate(g1, multiply(g1, 2, p)), multiply(g2, 3, q))]
    assert product_is_one(family, [*pairs, (None, q), (p, None)])
    assert not product_is_one(family, pairs[1:])


@pytest.mark.parametrize("circuit", ["poseidon", "range"])
def test_groth16_proofs_of_snarkjs(circuit):
    family = family_of("bn254")
    key, public, proof = read_groth16(circuit)
    assert product_is_one(family, groth16_pairs(key, public, proof))
    # Another public input, and points of the right groups that are not the proof's.
    changed = [str((int(public[0]) + 1) % family.r), *public[1:]]
    assert not product_is_one(family, groth16_pairs(key, changed, proof))
    assert not product_is_one(family, groth16_pairs(key, public, {**proof, "pi_c": proof["pi_a"]}))


def test_groth16_key_agrees_with_snarkjs_on_a_pairing():
    """vk_alphabeta_12 is a power of e(alpha, beta), in snarkjs's tower, which is ours.

    Its last factor of the exponent is 2 x (6 x^2 + 3 x + 1) times (q^4 - q^2 + 1) / r, which is cheaper to raise to.
    Source: Fuentes-Castaneda, Knapp and Rodriguez-Henriquez, SAC 2011.
    """
    family = family_of("bn254")
    x = family.parameter
    key, _, _ = read_groth16("poseidon")
    theirs = tuple(tuple(tuple(map(int, pair)) for pair in half) for half in key["vk_alphabeta_12"])
    value = pairing(family, g1_point(key["vk_alpha_1"]), g2_point(key["vk_beta_2"]))
    assert tower_of(family).power(value, 2 * x * (6 * x**2 + 3 * x + 1)) == theirs
