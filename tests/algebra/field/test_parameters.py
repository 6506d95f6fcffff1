"""The table of fields: what is published of each, and what follows from it."""

import pytest

from accelerant.algebra.field.parameters import FIELDS, Field, field_of
from accelerant.errors import ConfigError
from refusals import assert_raises

PUBLISHED = {
    # EIP-196 (BN254) and EIP-2537 (BLS12-381), where the moduli stand in hexadecimal or decimal
    "bn254_fq": 21888242871839275222246405745257275088696311157297823662689037894645226208583,
    "bn254_fr": 21888242871839275222246405745257275088548364400416034343698204186575808495617,
    "bls12_381_fq": int(
        "1a0111ea397fe69a4b1ba7b6434bacd764774b84f38512bf6730d2a0f6b0f6241eabfffeb153ffffb9feffffffffaaab", 16
    ),
    "bls12_381_fr": 0x73EDA753299D7D483339D80809A1D80553BDA402FFFE5BFEFFFFFFFF00000001,
    "goldilocks": 18446744069414584321,
    "babybear": 2013265921,
    "mersenne61": 2305843009213693951,
}
SIZES = {  # bits, words, bits of a word, two-adicity
    "goldilocks": (64, 1, 64, 32),
    "babybear": (31, 1, 32, 27),
    "mersenne61": (61, 1, 64, 1),
    "bn254_fr": (254, 4, 64, 28),
    "bn254_fq": (254, 4, 64, 1),
    "bls12_381_fr": (255, 4, 64, 32),
    "bls12_381_fq": (381, 6, 64, 1),
}
EVERY = pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)


def test_moduli_are_the_published_ones():
    assert {name: field.modulus for name, field in FIELDS.items()} == PUBLISHED


def test_sizes():
    found = {name: (field.bits, field.limbs, field.word_bits, field.two_adicity) for name, field in FIELDS.items()}
    assert found == SIZES
    assert all(field.size_bytes == field.limbs * field.word_bits // 8 for field in FIELDS.values())


@EVERY
def test_moduli_are_prime(field):
    """Miller and Rabin's test to the first twelve primes: right below 2^81, and few composites above pass it."""
    p = field.modulus
    odd = (p - 1) >> field.two_adicity
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        power = pow(base, odd, p)
        assert power in (1, p - 1) or p - 1 in (pow(power, 2**k, p) for k in range(1, field.two_adicity))


@EVERY
def test_generators_are_the_least(field):
    """No power residue of any small prime that divides p - 1, as every smaller number is."""
    p = field.modulus
    small = [q for q in range(2, 1 << 12) if (p - 1) % q == 0 and all(q % d for d in range(2, q))]

    def primitive(g):
        return all(pow(g, (p - 1) // q, p) != 1 for q in small)

    assert primitive(field.generator)
    assert not any(primitive(g) for g in range(2, field.generator))


@EVERY
def test_roots_of_unity_are_primitive(field):
    p = field.modulus
    for k in range(1, field.two_adicity + 1):
        root = field.root_of_unity(2**k)
        assert pow(root, 2**k, p) == 1
        assert pow(root, 2 ** (k - 1), p) == p - 1
    assert field.root_of_unity(1) == 1
    for order in (0, -2, 2 ** (field.two_adicity + 1)):
        assert_raises(ConfigError, f"{field.name} has no root of unity of order {order}:", field.root_of_unity, order)


@EVERY
@pytest.mark.parametrize("bits", [29, 32, 52, 64])
def test_montgomerys_constants(field, bits):
    limbs = -(-field.bits // bits)
    inverse = field.montgomery_inverse(bits)
    assert inverse * field.modulus % 2**bits == 2**bits - 1
    words = field.words(field.modulus, bits, limbs)
    assert len(words) == limbs
    assert all(0 <= word < 2**bits for word in words)
    assert sum(word << bits * i for i, word in enumerate(words)) == field.modulus


def test_words_that_do_not_fit_are_refused():
    field = FIELDS["babybear"]
    assert field.words(2**32 - 1, 16, 2) == (0xFFFF, 0xFFFF)
    for value in (-1, 2**32):
        assert_raises(ValueError, f"{value} does not fit in 2 limbs of 16 bits", field.words, value, 16, 2)


def test_unknown_fields_are_refused():
    assert field_of("babybear") is FIELDS["babybear"]
    assert_raises(ConfigError, "unknown field 'fermat'; known are goldilocks, babybear, bn254_fr", field_of, "fermat")


@pytest.mark.parametrize(("modulus", "generator"), [(16, 3), (97, 4), (1, 1), (2, 1)])
def test_a_table_that_cannot_be_right_is_refused(modulus, generator):
    assert_raises(ValueError, f"wrong: {generator} is a square mod {modulus}", Field, "wrong", modulus, generator)
