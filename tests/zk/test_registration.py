"""Curves and fields from their parameters: BLS12-377's G1, whose q is 1 mod 4 and whose order is even."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.launch import ENTRIES
from accelerant.algebra.curve.llvm_kernels import curve_kernels
from accelerant.algebra.curve.parameters import CURVES, curve_of
from accelerant.algebra.curve.weierstrass import add, double, encode_points, in_subgroup, multiply, negate
from accelerant.algebra.field.llvm_kernels import FORMS, field_kernels
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.ntt.plan import ntt_reference
from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.zk import curve, field, msm, ntt, register_curve, register_field
from refusals import assert_raises
from requirements import require_backend, require_form

sys.path.append(str(Path(__file__).parents[1] / "algebra"))
from msm_reference import msm_sum

NAME, FQ, FR = "bls12_377_g1", "bls12_377_fq", "bls12_377_fr"
Q = 0x01AE3A4617C510EAC63B05C06CA1493B1A22D9F300F5138F1EF3622FBA094800170B5D44300000008508C00000000001
R = 0x12AB655E9A2CA55660B44D1E5C37B00159AA76FED00000010A11800000000001
GENERATOR = (
    0x008848DEFE740A67C8FC6225BF87FF5485951E2CAA9D41BB188282C8BD37CB5CD5481512FFCD394EEAB9B16EB21BE9EF,
    0x01914A69C5102EFF1F674F5D30AFEEC4BD7FB348CA3E52D96D182AD44FB82305C2FE3D3634A9591AFD82DE55559C8EA6,
)
ORDER_TWO = (Q - 1, 0)


def register(**changed):
    """Source of the parameters: Bowe, Chiesa, Green, Miers, Mishra and Wu, eprint 2018/962."""
    parameters = {"field": FQ, "scalar_field": FR, "b": 1, "generator": GENERATOR} | changed
    return register_curve(parameters.pop("name", NAME), **parameters)


@pytest.fixture(scope="module")
def g1(own_registries):
    register_field(FQ, Q, 15)
    register_field(FR, R, 22)
    return register()


def sample(n, seed=1):
    """Points of the subgroup with infinity, equal and opposite ones among them."""
    parameters, rng = curve_of(NAME), random.Random(seed)
    points = [multiply(parameters, rng.randrange(1, R), GENERATOR) for _ in range(n)]
    return [None, GENERATOR, GENERATOR, negate(parameters, GENERATOR), *points]


def out_of_subgroup():
    """Points of order 2, of twice the order r, and others of the curve."""
    parameters, rng = curve_of(NAME), random.Random(2)
    k, points = parameters.coordinates, [ORDER_TWO, add(parameters, GENERATOR, ORDER_TWO)]
    while len(points) < 12:
        x = rng.randrange(Q)
        y = k.sqrt(parameters.right_side(x))
        if y is not None:
            points += [(x, y), multiply(parameters, R, (x, y))]
    return [point for point in points if not in_subgroup(parameters, point)]


def test_parameters(g1):
    assert Q % 4 == 1
    assert g1.order == R
    assert g1.cofactor == 0x170B5D44300000000000000000000000
    assert g1.parameters.is_on_curve(GENERATOR)
    assert multiply(g1.parameters, R, GENERATOR) is None
    assert curve(NAME) is g1
    assert repr(g1) == "curve('bls12_377_g1')"
    assert register().parameters == g1.parameters  # again, with the same parameters


def test_group_law(g1):
    parameters, points = g1.parameters, sample(6)
    pairs = [(p, q) for p in points for q in points]
    x, y = (g1.encode([pair[i] for pair in pairs]) for i in range(2))
    assert g1.decode(g1.add(x, y)) == [add(parameters, p, q) for p, q in pairs]
    assert g1.decode(g1.sub(x, y)) == [add(parameters, p, negate(parameters, q)) for p, q in pairs]
    words = g1.encode(points)
    assert g1.decode(g1.double(words)) == [double(parameters, p) for p in points]
    assert g1.decode(g1.neg(words)) == [negate(parameters, p) for p in points]
    assert g1.decode(g1.sum(words)) == msm_sum(parameters, [1] * len(points), points)
    assert double(parameters, ORDER_TWO) is None
    assert add(parameters, ORDER_TWO, ORDER_TWO) is None


def test_multiplication(g1):
    points, rng = sample(4), random.Random(3)
    for scalar in (0, 1, 2, R - 1, R, R + 1, 2**256 - 1, rng.randrange(2**256)):
        words = g1.mul(g1.encode(points), scalar)
        assert g1.decode(words) == [multiply(g1.parameters, scalar, p) for p in points]


def test_sums_of_multiples(g1):
    rng, points = random.Random(4), sample(29)
    scalars = [0, 1, R - 1, *(rng.randrange(R) for _ in points[3:])]
    expected = msm_sum(g1.parameters, scalars, points)
    assert g1.decode(msm(scalars, g1.encode(points), curve=NAME)) == expected
    assert g1.decode(g1.precompute(points).msm(scalars)) == expected


def test_checks_of_points(g1):
    good, bad = sample(5), out_of_subgroup()
    off = [(GENERATOR[0], (GENERATOR[1] + 1) % Q), (1, 0)]
    points = [*good, *bad, *off]
    assert g1.is_on_curve(points).tolist() == [True] * len(good + bad) + [False] * len(off)
    assert g1.is_in_subgroup(points).tolist() == [True] * len(good) + [False] * len(bad + off)
    for point in bad:  # its order is even, so that addition is for the subgroup only
        assert_raises(FormatError, "out of the subgroup of bls12_377_g1", g1.add, point, GENERATOR)
    assert_raises(FormatError, "is not on bls12_377_g1", g1.double, off[0])


def test_many_points_of_an_even_order_are_tested_one_by_one(g1):
    """Sums of subsets of these are in the subgroup, since addition with the point of order 2 is wrong."""
    n = launch._FEWEST
    points = [GENERATOR] * (n // 2) + [negate(g1.parameters, GENERATOR)] * (n // 2 - 1) + [ORDER_TWO]
    words = launch.to_montgomery(HOST, g1.parameters, encode_points(g1.parameters, points))
    assert launch.first_off(HOST, g1.parameters, "off_subgroup", words) == n - 1


@pytest.mark.parametrize("form", FORMS)
def test_the_subgroup_in_each_form(g1, form):
    require_form(form)
    entry, points = "curve_off_subgroup", sample(3) + out_of_subgroup()
    words = g1.encode(points)
    radix = np.array(field(FQ).encode([2**384 % Q]), np.uint64)
    words = field(FQ).mul(words, radix)
    source = KernelSource(entry, {"llvm": curve_kernels(NAME, entry, form)}, {entry: ENTRIES[entry]})
    firsts = np.zeros(len(points), np.int64)
    pointers = map(HOST.pointer, (words, firsts))
    HOST.provider.launch(HOST.provider.compile(source), (len(points),), (1,), (*pointers, len(points), 1))
    assert [first == len(points) for first in firsts] == [in_subgroup(g1.parameters, point) for point in points]


@pytest.mark.slow
def test_the_c_kernels(g1):
    require_backend("opencl")
    points = sample(3) + out_of_subgroup()
    expected = [in_subgroup(g1.parameters, point) for point in points]
    assert g1.is_in_subgroup(points, device="opencl").tolist() == expected


@pytest.mark.parametrize("layout", ["evm", "uncompressed", "compressed"])
def test_bytes(g1, layout):
    words = g1.encode(sample(8))
    assert (g1.from_bytes(g1.to_bytes(words, layout), layout) == words).all()
    assert_raises(FormatError, "out of the subgroup", g1.from_bytes, g1.to_bytes(g1.encode([ORDER_TWO]), "evm"), "evm")


def test_fields(g1):
    for name, modulus in ((FQ, Q), (FR, R)):
        row, values = field(name), [0, 1, 2, modulus - 1, modulus // 2, 3**200 % modulus]
        words = row.encode(values)
        assert row.decode(row.mul(words, words)) == [value * value % modulus for value in values]
        assert row.decode(row.inv(words[1:])) == [pow(value, -1, modulus) for value in values[1:]]
    rng = random.Random(5)
    values = [rng.randrange(R) for _ in range(256)]
    assert field(FR).decode(ntt(field(FR).encode(values), FR)) == ntt_reference(values, field=FR)


def test_cache_keys_have_the_parameters(g1):
    """The code alone does not determine the kernels of what is registered."""
    assert str(Q) in curve_kernels(NAME, "curve_add").key
    assert str(Q) in field_kernels(FQ).key


@pytest.mark.parametrize(("changed", "message"), [
    ({"a": 1}, r"for curves y\^2 = x\^3 \+ b, with a = 0; got a = 1"),
    ({"b": 0}, "b must not be 0"),
    ({"field": "goldilocks"}, "coordinates must have an even number of 64-bit limbs; goldilocks has 64 bits"),
    ({"scalar_field": FQ}, "scalars must have 4 64-bit limbs; bls12_377_fq has 377 bits"),
    ({"scalar_field": "bn254_fr"}, "in Hasse's interval|is not infinity"),
    ({"b": 2}, "is not on the curve"),
    ({"generator": (GENERATOR[0] + Q, GENERATOR[1])}, "from 0 to below q"),
    ({"generator": ORDER_TWO}, "is not infinity"),
    ({"name": "bls12-377"}, "must be an identifier"),
    ({"name": "bn254_g1"}, "another curve has this name"),
    ({"field": "secp256k1_fq"}, "unknown field 'secp256k1_fq'"),
])  # fmt: skip
def test_what_is_no_curve_is_refused(g1, changed, message):
    assert_raises(ConfigError, message, lambda: register(**{"name": "another_g1"} | changed))
    assert "another_g1" not in CURVES


@pytest.mark.parametrize(("name", "modulus", "generator", "message"), [
    ("x-1", Q, 15, "must be an identifier"),
    ("even", Q + 1, 15, "is not prime"),
    ("none", 0, 2, "is not prime"),
    ("carmichael", 4943 * 3492583 * 4315959443, 5, "is not prime"),  # Fermat's test finds no witness
    ("square", Q, 4, "is a square"),
    ("one_word", 2**61 - 1, 37, "an even number of 64-bit words with a spare bit, got 61 bits"),
    ("full", 2**256 - 2**32 - 977, 3, "with a spare bit, got 256 bits"),
    ("bn254_fq", Q, 15, "another field has this name"),
])  # fmt: skip
def test_what_is_no_field_is_refused(name, modulus, generator, message):
    assert_raises(ConfigError, message, register_field, name, modulus, generator)
