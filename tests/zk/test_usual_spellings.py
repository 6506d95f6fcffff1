"""What users of galois, snarkjs, py_ecc and others type: orders of arguments, names, operators."""

import pickle
import re

import numpy as np
import pytest
import torch

import accelerant as acl
from accelerant import zk
from accelerant.algebra.field.parameters import FIELDS
from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedCase, UnsupportedDtype
from refusals import assert_raises

FR, G1, G2 = zk.field("bn254_fr"), zk.curve("bn254_g1"), zk.curve("bn254_g2")


@pytest.fixture(params=FIELDS)
def field(request):
    return zk.field(request.param)


def test_numpys_array_equal_compares_elements(field):
    x = field([1, 2, 3])
    assert np.array_equal(x, field([1, 2, 3]))
    assert np.array_equal([1, 2, 3], a2=x)
    for other in (field([1, 2, 4]), field([1, 2]), [1, 2, 4], x + 1):
        assert not np.array_equal(x, other)
    assert_raises(UnsupportedCase, r"np\.array_equiv is not defined on field elements", np.array_equiv, x, x)
    assert (np.sum(x).ints(), np.shape(x), np.size(x)) == (6, (3,), 3)


def test_a_field_makes_arrays(field):
    x = field([[1, 2], [3, 4]])
    assert isinstance(x, zk.FieldArray)
    assert x.tolist() == x.ints() == field.array(x).tolist() == [[1, 2], [3, 4]]
    assert field.order == field.characteristic == field.modulus
    for zeros in (field.zeros((2, 3)), field.Zeros((2, 3))):
        assert zeros.tolist() == [[0] * 3] * 2
    assert field.ones(3).tolist() == field.Ones(3).tolist() == [1] * 3
    assert field.Range(1, 8, 3).tolist() == [1, 4, 7]
    assert field.Identity(2).tolist() == [[1, 0], [0, 1]]
    assert field.ones(()).tolist() == 1
    assert field.Random((2, 5)).shape == field.uniform((2, 5)).shape == (2, 5)
    assert int(field.primitive_element) == field.generator
    assert int(field(7)) == 7
    assert_raises(ShapeError, "0 or more", field.zeros, -1)


def test_products_of_matrices_are_those_of_integers(field):
    values = np.arange(24).reshape(2, 3, 4)
    x, y = field(values), field(values[0].T)
    assert (x @ y).tolist() == (values @ values[0].T).tolist()
    assert (x @ [1, 2, 3, 4]).tolist() == (values @ [1, 2, 3, 4]).tolist()
    assert ([1, 2, 3] @ x).tolist() == ([1, 2, 3] @ values).tolist()
    assert np.matmul(x[0], y).tolist() == (values[0] @ values[0].T).tolist()
    assert (x[0, 0] @ x[0, 0]).tolist() == 14
    assert x.T.tolist() == x.transpose().tolist() == values.T.tolist()
    assert x.flatten().tolist() == list(range(24))
    for other in ([1, 2, 3], [1], 5):
        with pytest.raises(ShapeError, match=r"@ takes \(\.\.\., n, k\) and \(\.\.\., k, m\), or vectors of k"):
            x @ other


def test_single_elements(field):
    x = field([0, 5])
    assert int(x[1]) == x[1].item() == 5
    assert bool(x[1])
    assert not x[0]
    assert_raises(TypeError, r"int\(\) takes a single element, got an array of shape \(2,\)", lambda: int(x))
    assert_raises(ValueError, "ambiguous", lambda: bool(x))


def test_a_registered_field_is_the_field_of_its_name():
    again = zk.register_field("bn254_fr", FR.modulus, FR.generator)
    assert again is FR


# --- points and scalars in either order ------------------------------------------------------------------------------
POINTS, SCALARS = G1.mul(G1.generator, [2, 3]), FR.encode([5, 7])
KINDS = {
    "words": (SCALARS, POINTS),
    "tensors": (torch.from_numpy(SCALARS), torch.from_numpy(POINTS)),
    "lists of arrays": (list(SCALARS), list(POINTS)),
    "Python": ([5, 7], G1.decode(POINTS)),
    "tuple": ((5, 7), POINTS),
    "FieldArray": (FR([5, 7]), POINTS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_either_order(kind):
    scalars, points = KINDS[kind]
    for call, expected in ((zk.msm, G1.mul(G1.generator, 31)), (G1.mul, G1.mul(G1.generator, [10, 21]))):
        for found in (
            call(scalars, points), call(points, scalars), call(scalars=scalars, points=points),
            call(scalars, points=points), call(points, scalars=scalars),
        ):  # fmt: skip
            assert np.array_equal(np.asarray(found), expected)


def test_either_order_of_other_shapes():
    rows = FR.encode([[5, 7], [1, 2]])  # (2, 2, 4), as two points are
    assert np.array_equal(zk.msm(rows, POINTS), G1.mul(G1.generator, [31, 8]))
    assert np.array_equal(zk.msm(POINTS, rows), zk.msm(rows, POINTS))
    for curve in (G2, zk.curve("bls12_381_g1"), zk.curve("bls12_381_g2")):
        points = curve.mul([2, 3], curve.generator)
        expected = curve.mul(curve.generator, 31)
        for scalars in (SCALARS, [5, 7]):
            assert np.array_equal(zk.msm(points, scalars, curve.name), expected)
            assert np.array_equal(zk.msm(scalars, points, curve=curve.name), expected)
    assert G1.decode(G1.mul(5, None)) is G1.decode(G1.mul(None, 5)) is None
    assert G1.decode(zk.msm([None], [5])) is None


@pytest.mark.parametrize("call", [
    lambda **names: G1.mul(*names.values()) if "x" in names else G1.mul(**names),
    lambda **names: zk.msm([names["x"], (1, 2)], [names["y"], (1, 2)]) if "x" in names else zk.msm(
        [[1, 2], [1, 2]], [names["points"], (1, 2)]),
])  # fmt: skip
def test_what_could_be_in_either_order_asks_for_names(call):
    with pytest.raises(
        ConfigError, match="either argument could be the points: give both by name, scalars= and points="
    ):
        call(x=(1, 2), y=(1, 2))
    call(scalars=(1, 2), points=(1, 2))


def test_no_order_shows_scalars_in_a_message():
    """Two scalars have the shape of a point, and rows of them that of points: neither may be shown as a point."""
    secret, bad = np.array([[1234567, 0, 0, 0]] * 2, np.uint64), G1.generator.copy()
    bad[0, 0] ^= 1
    rows, points = np.stack([secret, secret]), np.stack([G1.generator, bad])
    for call, scalars, wrong in ((G1.mul, secret, bad), (zk.msm, rows, points), (G1.mul, secret, bad.astype("i4"))):
        for given in ((scalars, wrong), (wrong, scalars)):
            caught = assert_raises((FormatError, UnsupportedDtype), None, call, *given)
            assert not re.search(r"12d687|1234567|\d{6}", str(caught))


def test_one_device_and_several():
    for where in (
        {"device": "cpu"},
        {"device": torch.device("cpu")},
        {"devices": ["cpu"]},
        {"devices": ("cpu", "cpu")},
    ):
        assert np.array_equal(zk.msm(SCALARS, POINTS, **where), G1.mul(G1.generator, 31))
    for where in ({"device": "cpu", "devices": ["cpu"]}, {"devices": []}, {"devices": "cpu"}):
        with pytest.raises(ConfigError, match="devices must be a list of devices, and device not be given"):
            zk.msm(SCALARS, POINTS, **where)


@pytest.mark.parametrize("devices", [["cpu"], ("cpu", "cpu"), ["cpu"] * 40])
def test_transforms_are_shared(devices):
    words = FR.random((3, 5, 8))
    expected = zk.ntt(words, FR)
    assert np.array_equal(zk.ntt(words, FR, devices=devices), expected)
    assert np.array_equal(zk.ntt(words[0, 0], FR, devices=devices), expected[0, 0])
    assert zk.ntt(torch.from_numpy(words), "bn128_fr", devices=devices).numpy().tolist() == expected.tolist()
    there = zk.ntt(FR(words), coset=3, devices=devices)
    assert np.array_equal(zk.ntt(there, coset=3, inverse=True, devices=devices).canonical(), words)
    assert zk.ntt([[1, 2], [3, 4]], FR, devices=devices).tolist() == zk.ntt([[1, 2], [3, 4]], FR).tolist()
    assert zk.ntt(words[:0], FR, devices=devices).shape == (0, 5, 8, 4)
    assert_raises(ConfigError, "out= or devices=, not both", zk.ntt, words, FR, devices=devices, out=words)
    with pytest.raises(ConfigError, match="devices must be a list of devices, and device not be given"):
        zk.ntt(words, FR, devices=devices, device="cpu")


# --- names -----------------------------------------------------------------------------------------------------------
def test_names_of_snarkjs():
    assert zk.field("bn128_fr") is FR
    assert zk.curve("bn128_g1") is zk.curve("BN254_g1") is zk.curve("alt_bn128_g1") is G1
    assert zk.curve("BLS12-381_g2") is zk.curve("bls12_381_g2")
    assert np.array_equal(zk.msm(SCALARS, POINTS, "bn128_g1"), zk.msm(SCALARS, POINTS))
    assert zk.FixedBase("bn128_g1", POINTS).curve == "bn254_g1"
    assert zk.pairing_product_is_one([], [], "bn128")
    assert zk.field(FR) is zk.field(FR.modulus) is FR
    assert np.array_equal(zk.msm(SCALARS, POINTS, curve=G1), zk.msm(SCALARS, POINTS))
    for wrong in ("bn128", "bn129_g1", "bn128_g3", "bn128g1"):
        assert_raises(ConfigError, f"unknown curve '{wrong}'", zk.curve, wrong)


def test_infinity_is_the_neutral_element():
    for curve in (G1, G2):
        assert curve.decode(curve.infinity) is curve.decode(curve.identity) is None
        assert np.array_equal(curve.add(curve.infinity, curve.generator), curve.generator)


@pytest.mark.parametrize("family", ["bn254", "bls12_381"])
def test_values_of_pairings(family):
    g1, g2 = zk.curve(f"{family}_g1"), zk.curve(f"{family}_g2")
    e = zk.pairing(g1.generator, g2.generator, family)
    six = zk.pairing(g1.mul(g1.generator, 2), g2.mul(g2.generator, 3), family=family)
    assert six == e**6 == e * e**5 == zk.pairing(g2.mul(g2.generator, 3), g1.decode(g1.mul(g1.generator, 2)), family)
    assert e != six
    assert e != 1
    assert e**g1.order == e * e.inverse() == e / e == e**0 == zk.pairing([], [], family) == 1
    assert e**-1 == e.inverse()
    assert {e, pickle.loads(pickle.dumps(e))} == {e}
    points = g1.mul(g1.generator, [6, g1.order - 2])
    assert (
        zk.pairing(points, g2.mul(g2.generator, [1, 3]), family) == zk.pairing(g1.infinity, g2.generator, family) == 1
    )
    assert repr(e).startswith(f"PairingValue({family}, 0x")
    assert repr(e / e) == f"PairingValue({family}, 1)"
    assert_raises(UnsupportedDtype, "the exponent must be an integer", lambda: e**0.5)
    assert_raises(TypeError, "unsupported operand", lambda: e * 2)


def test_values_of_two_pairings_are_not_multiplied():
    x, y = zk.pairing([], [], "bn254"), zk.pairing([], [], "bls12_381")
    assert x != y
    assert_raises(ConfigError, "values of two pairings cannot be multiplied: bn254 and bls12_381", lambda: x * y)


def test_reprs_say_what_a_value_is():
    from accelerant.algebra.curve.parameters import curve_of
    from accelerant.algebra.field.memory_space import HOST

    assert [repr(x) for x in (FR, G1, curve_of("bn254_g2"), FR([1, 2]))] == [
        "field('bn254_fr')", "curve('bn254_g1')", "Curve(bn254_g2)", "FieldArray(bn254_fr, shape (2,), cpu)",
    ]  # fmt: skip
    assert repr(HOST).endswith("(cpu)")


def test_former_names():
    from accelerant.algebra import field
    from accelerant.zk import formats

    with pytest.raises(AttributeError, match=r"accelerant\.algebra\.field\.prime_field is accelerant\.zk\.field now"):
        field.prime_field  # noqa: B018
    with pytest.raises(AttributeError, match=r"formats\.Contribution is ZkeyContribution now"):
        formats.Contribution  # noqa: B018
    with pytest.raises(TypeError, match="has no argument curve= any more: it is family= now"):
        zk.pairing_product_is_one([], [], curve="bn254")


def test_either_order_of_an_accelerator():
    accelerator = acl.Accelerator("cpu")
    for arguments in ((SCALARS, POINTS), (POINTS, SCALARS), ([5, 7], POINTS), (POINTS, [5, 7])):
        assert np.array_equal(np.asarray(accelerator.msm(*arguments)), G1.mul(G1.generator, 31))
    assert np.array_equal(np.asarray(accelerator.msm(points=POINTS, scalars=SCALARS)), G1.mul(G1.generator, 31))
