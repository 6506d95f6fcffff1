"""Pairing-friendly curves from one call: both kinds, both twists and both signs of the parameter."""

import random
import sys
from pathlib import Path

import pytest

from accelerant import zk
from accelerant.algebra.curve import CURVES, FAMILIES, pairing, weierstrass
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.curve.weierstrass import PrimeCoordinates, QuadraticCoordinates, encode_points, multiply
from accelerant.algebra.field.parameters import FIELDS, Field
from accelerant.errors import ConfigError, FormatError
from accelerant.zk.groth16 import Proof, Prover, VerificationKey, verify
from accelerant.zk.groth16.setup import setup_with_known_tau

sys.path += [str(Path(__file__).parent / "groth16"), str(Path(__file__).parents[1] / "algebra")]
sys.path.append(str(Path(__file__).parents[1] / "algebra" / "curve"))
from circuits import write_circuit
from msm_reference import msm_sum
from pairing_reference import pairing as pairing_reference
from pairing_reference import tower_of
from small_orders import of_cofactor, point_out_of_subgroup

# (kind, x, b, c, twist); found by search near 2^62 and 2^63, with 2^8 dividing r - 1
PARAMETERS = {
    "bn_plus": ("bn", 0x40000000000695F1, 12, 5, "divide"),
    "bn_minus": ("bn", -0x400000000000120F, 3, 3, "divide"),
    "bls_plus": ("bls12", 0x7FFFFFFFFFEDB100, 4, 1, "multiply"),
    "bls_minus": ("bls12", -0x7FFFFFFFFFEEB100, 6, 4, "divide"),
}


def generator(curve):
    """Return the cofactor's multiple of the point with the least x."""
    k = curve.coordinates
    for i in range(1, 100):
        x = k.join((i,) if k.degree == 1 else (i, 0))
        if (y := k.sqrt(curve.right_side(x))) is not None and (found := multiply(curve, curve.cofactor, (x, y))):
            return found
    raise AssertionError("no point")


def parameters_of(name):
    """Return the arguments of register_family; the generators take the groups' orders."""
    kind, x, b, c, twist = PARAMETERS[name]
    if kind == "bn":
        q = 36 * x**4 + 36 * x**3 + 24 * x**2 + 6 * x + 1
        r = q - 6 * x**2
        trace, second = 6 * x**2 + 1, 2 * q - r
    else:
        r = x**4 - x**2 + 1
        q, trace = (x - 1) ** 2 * r // 3 + x, x + 1
        second = (x**8 - 4 * x**7 + 5 * x**6 - 4 * x**4 + 6 * x**3 - 4 * x**2 - 4 * x + 13) // 9
    field = Field("q", q, next(g for g in range(2, 99) if pow(g, (q - 1) // 2, q) != 1))
    order = Field("r", r, next(g for g in range(2, 99) if pow(g, (r - 1) // 2, r) != 1))
    k = QuadraticCoordinates(field)
    b2 = k.times((c, 1) if twist == "multiply" else k.inv((c, 1)), b)
    g1 = weierstrass.Curve("g1", PrimeCoordinates(field), order, b, (0, 0), (q + 1 - trace) // r)
    g2 = weierstrass.Curve("g2", k, order, b2, ((0, 0), (0, 0)), second)
    return {
        "kind": kind, "parameter": x, "b": b, "nonresidue": (c, 1), "twist": twist,
        "g1_generator": generator(g1), "g2_generator": generator(g2),
    }  # fmt: skip


pytestmark = pytest.mark.usefixtures("own_registries")


@pytest.fixture(
    scope="module",
    params=["bn_minus", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bn_plus", "bls_minus", "bls_plus"))],
)
def family(request):
    g1, g2 = zk.register_family(request.param, **parameters_of(request.param))
    assert (g1.name, g2.name) == (f"{request.param}_g1", f"{request.param}_g2")
    assert FAMILIES[request.param].parameter == PARAMETERS[request.param][1]
    return FAMILIES[request.param]


def pairs_of(family, n, seed=1):
    rng = random.Random(seed)
    return [
        tuple(multiply(curve, rng.randrange(1, family.r), curve.generator) for curve in (family.g1, family.g2))
        for _ in range(n)
    ]


def encoded(family, pairs):
    return (encode_points(family.g1, [p for p, _ in pairs]), encode_points(family.g2, [q for _, q in pairs]))


def test_both_groups_have_arithmetic_and_sums(family):
    rng = random.Random(2)
    for name in (f"{family.name}_g1", f"{family.name}_g2"):
        curve, parameters = zk.curve(name), curve_of(name)
        scalars = [0, 1, family.r - 1, *(rng.randrange(family.r) for _ in range(6))]
        points = [multiply(parameters, i, parameters.generator) for i in range(1, 10)]
        expected = msm_sum(parameters, scalars, points)
        assert curve.decode(zk.msm(scalars, curve.encode(points), curve=name)) == expected
        assert curve.decode(curve.sum(curve.mul(points, scalars))) == expected
        assert curve.is_in_subgroup(curve.encode(points)).all()
    words = zk.field(f"{family.name}_fr").encode([2, 3])
    assert zk.field(f"{family.name}_fr").decode(zk.ntt(words, f"{family.name}_fr")) == [5, family.r - 1]


def test_the_pairing_is_the_references(family):
    pairs = pairs_of(family, 2)
    tower = tower_of(family)
    wanted = tower.mul(*(pairing_reference(family, *pair) for pair in pairs))
    assert pairing.product(family, *encoded(family, pairs)) == wanted != tower.one


def test_equations_of_pairings(family):
    (p, q), (a, b) = pairs_of(family, 1)[0], (1234567, 7654321)
    equal = [(multiply(family.g1, a, p), multiply(family.g2, b, q)), (multiply(family.g1, -a * b, p), q)]
    points = encoded(family, equal)
    assert zk.pairing_product_is_one(*points, family.name)
    assert not zk.pairing_product_is_one(*(each[:1] for each in points), family.name)


def test_points_out_of_the_subgroup_are_refused(family):
    p, q = pairs_of(family, 1)[0]
    for group in ("g1", "g2"):
        curve = getattr(family, group)
        if curve.cofactor == 1:
            continue
        for bad in (point_out_of_subgroup(curve), of_cofactor(curve, 1)):
            pair = (bad, q) if group == "g1" else (p, bad)
            with pytest.raises(FormatError, match="not in its subgroup of order r"):
                zk.pairing_product_is_one(*encoded(family, [pair]), family.name)


def test_groth16_from_circuit_to_json(family, tmp_path):
    write_circuit(tmp_path, family.name, 30, 2)
    setup_with_known_tau(tmp_path / "circuit.r1cs", tmp_path / "circuit.zkey")
    prover = Prover(tmp_path / "circuit.zkey")
    proof = prover.prove(tmp_path / "witness.wtns")
    key = VerificationKey.from_json(prover.verification_key.to_json())
    assert key.family == family.name
    again = Proof.from_json(proof.to_json(), proof.public_json())
    assert verify(key, again.public, again)
    assert not verify(key, [again.public[0] + 1, *again.public[1:]], again)


@pytest.mark.parametrize(("changed", "message"), [
    ({"kind": "bls24"}, "kind must be bn or bls12"),
    ({"twist": "none"}, "twist divide or multiply"),
    ({"b": True}, "must be Python integers"),
    ({"parameter": PARAMETERS["bls_plus"][1] - 1}, "is 1 mod 3"),
    ({"parameter": PARAMETERS["bls_plus"][1] + 12}, "is not prime"),
    ({"kind": "bn", "parameter": 2**70 + 1}, "is not prime"),
    ({"kind": "bn", "parameter": 2**62}, "wanted q = 3 mod 4"),
    ({"b": 0}, "b not 0 mod q"),
    ({"nonresidue": (0, 1)}, "a non-residue"),
    ({"nonresidue": (1, 2)}, "a non-residue"),
    ({"nonresidue": (3, 1)}, "is a square or a cube|not on the curve"),
    ({"b": 5}, "is not on the curve"),
    ({"b": 1 << 400}, "must be from 0 to below q"),
    ({"g1_generator": (-1, 2)}, "must be from 0 to below q"),
    ({"twist": "divide"}, "is not on the curve"),
    ({"g1_generator": (0, 2)}, "is not infinity"),
])  # fmt: skip
def test_what_is_no_family_is_refused_and_leaves_nothing(changed, message):
    given = parameters_of("bls_plus") | changed
    before = [dict(table) for table in (FIELDS, CURVES, FAMILIES)]
    with pytest.raises(ConfigError, match=message):
        zk.register_family("refused", **given)
    assert [dict(table) for table in (FIELDS, CURVES, FAMILIES)] == before


@pytest.mark.parametrize("name", ["bn128", "BN254", "bn_254", "alt_bn128", "bls12381", "BLS12_381"])
def test_a_name_that_files_use_for_another_family_is_refused(name):
    """A key that says bn128 would be read as one of the new family."""
    with pytest.raises(ConfigError, match=rf"^{name}: files that name \w+ could mean this family, too"):
        zk.register_family(name, **parameters_of("bls_plus"))
    assert name not in FAMILIES
    with pytest.raises(ConfigError, match=rf"^{name}_fr is another name of \w+_fr: take one of its own"):
        zk.register_field(f"{name}_fr", FIELDS["bls12_381_fr"].modulus, generator=7)
    with pytest.raises(ConfigError, match=rf"^{name}_g1 is another name of \w+_g1: take one of its own"):
        zk.register_curve(f"{name}_g1", field="bn254_fq", scalar_field="bn254_fr", b=3, generator=(1, 2))


def test_names_of_registered_families_differ_by_letters(monkeypatch):
    monkeypatch.setitem(FAMILIES, "mine", FAMILIES["bls12_381"])
    with pytest.raises(ConfigError, match="MI_NE: files that name mine could mean this family, too"):
        zk.register_family("MI_NE", **parameters_of("bls_plus"))
