"""Arguments of zk that are no fields, numbers, points or shapes: each has a clear error of the library."""

import numpy as np
import pytest
import torch

import accelerant as acl
from accelerant.algebra.curve.parameters import family_of
from accelerant.errors import AccelerantError, ConfigError, FormatError, OutOfMemory, ShapeError, UnsupportedDtype
from accelerant.runtime.files import clipped
from accelerant.zk import curve, field, msm, ntt, pairing_product_is_one, register_curve, register_field
from refusals import assert_raises

H = 10**5000
"""Python prints at most 4,300 digits; a message that shows this number raises ValueError."""

F, BABYBEAR = field("bn254_fr"), field("babybear")
G1, G2 = curve("bn254_g1"), curve("bn254_g2")
X = F.array([1, 2, 3, 4, 5, 6])
ONES = F.encode([[1, 1]])
CURVE = {"field": "bn254_fq", "scalar_field": "bn254_fr", "b": 3, "generator": (1, 2), "a": 0}
NUMBERS = {
    "F.encode([x])": lambda x: F.encode([x]),
    "F.encode(x)": lambda x: F.encode(x),
    "babybear.encode([x])": lambda x: BABYBEAR.encode([x]),
    "F.add(x, 1)": lambda x: F.add(x, 1),
    "F.mul([x], [1])": lambda x: F.mul([x], [1]),
    "F.array([x])": lambda x: F.array([x]),
    "array * x": lambda x: X * [x] * 6 if isinstance(x, str) else X * x,
    "array / x": lambda x: X / x,
    "array - x": lambda x: x - X,
    "F.dot([x], [x])": lambda x: F.dot([x], [x]),
    "ntt([x, 0])": lambda x: ntt([x, 0], "bn254_fr"),
    "ntt(coset=x)": lambda x: ntt([1, 0], "bn254_fr", coset=x),
    "Accelerator.field_mul": lambda x: acl.Accelerator("cpu").field_mul([x], [1], field="bn254_fr"),
    "Accelerator.ntt": lambda x: acl.Accelerator("cpu").ntt([x, 0], field="bn254_fr"),
    "Accelerator.msm": lambda x: acl.Accelerator("cpu").msm([1], [(x, 2)]),
    "register_field(modulus=x)": lambda x: register_field("stranger", x, generator=3),
    "register_curve(generator=(x, 2))": lambda x: register_curve("stranger", **CURVE | {"generator": (x, 2)}),
    "G1.encode((x, 2))": lambda x: G1.encode((x, 2)),
    "G1.encode([(x, 2)])": lambda x: G1.encode([(x, 2)]),
    "G2.encode": lambda x: G2.encode(((1, 2), (3, x))),
    "G1.add": lambda x: G1.add((1, x), None),
    "msm scalar": lambda x: msm([x], [(1, 2)]),
    "msm point": lambda x: msm([1], [(x, 2)]),
    "pairing": lambda x: pairing_product_is_one([(1, x)], [None]),
}
"""Functions of a number that must be reduced."""

OTHERS = {
    "F.random(x)": F.random,
    "F.random((x,))": lambda x: F.random((x,)),
    "F.sum(axis=x)": lambda x: F.sum(ONES, x),
    "array.sum(x)": X.sum,
    "np.sum(axis=x)": lambda x: np.sum(X, axis=x),
    "reshape(x)": X.reshape,
    "reshape(x, 2)": lambda x: X.reshape(x, 2),
    "ntt(field=x)": lambda x: ntt([1, 0], x),
    "ntt(inverse=x)": lambda x: ntt([1, 0], F, inverse=x),
    "ntt(reduce=x)": lambda x: ntt([1, 0], F, reduce=x),
    "ntt(order=x)": lambda x: ntt([1, 0], F, order=x),
    "ntt(device=x)": lambda x: ntt([1, 0], F, device=x),
    "ntt(array, x)": lambda x: ntt(X[:2], x),
    "F.add(reduce=x)": lambda x: F.add([1], [1], reduce=x),
    "field(x)": field,
    "curve(x)": curve,
    "register_field(x)": lambda x: register_field(x, 2**255 - 19, generator=2),
    "register_field(modulus=x)": lambda x: register_field("stranger", x, generator=3),
    "register_field(generator=x)": lambda x: register_field("stranger", F.modulus, generator=x),
    "register_curve(x)": lambda x: register_curve(x, **CURVE),
    "register_curve(field=x)": lambda x: register_curve("stranger", **CURVE | {"field": x}),
    "register_curve(b=x)": lambda x: register_curve("stranger", **CURVE | {"b": x}),
    "register_curve(generator=x)": lambda x: register_curve("stranger", **CURVE | {"generator": x}),
    "to_bytes(layout=x)": lambda x: G1.to_bytes((1, 2), x),
    "from_bytes(x)": G1.from_bytes,
    "msm(curve=x)": lambda x: msm([1], [(1, 2)], x),
    "msm(check=x)": lambda x: msm([1], [(1, 2)], check=x),
    "msm(devices=x)": lambda x: msm([1], [(1, 2)], devices=x),
    "pairing(curve=x)": lambda x: pairing_product_is_one([], [], x),
}
"""Functions of something else than a number."""


@pytest.mark.parametrize("name", NUMBERS)
def test_integers_of_any_size_have_a_short_error(name):
    for x in (H, -H):
        with pytest.raises((FormatError, ConfigError)) as refused:
            NUMBERS[name](x)
        assert len(str(refused.value)) < 400
        assert "Exceeds the limit" not in str(refused.value)


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_integer_has_an_error_of_the_library(name):
    for x in (True, 1.0, "1", b"1", {}, 1j, object()):
        with pytest.raises((UnsupportedDtype, ConfigError, TypeError)) as refused:
            NUMBERS[name](x)
        if not name.startswith("array"):  # whose operators return NotImplemented
            assert isinstance(refused.value, AccelerantError), x


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments_have_an_error_of_the_library(name):
    for x in (H, -H, 2.5, (1.5, 2), [H], {}, 1j, object(), np.array([H, 1], object), [1, [2]]):
        with pytest.raises(AccelerantError) as refused:
            OTHERS[name](x)
        assert len(str(refused.value)) < 400, x


def test_sizes_and_axes():
    assert F.random(np.int64(3)).shape == (3, 4)
    assert F.random((np.int32(2), 0)).shape == (2, 0, 4)
    assert F.random([2, 1]).shape == (2, 1, 4)
    assert F.random(()).shape == (4,)
    assert X.reshape([2, 3]).shape == X.reshape(np.int64(2), -1).shape == (2, 3)
    with pytest.raises(ShapeError, match=r"of less than 2\^63 elements; got \(1099511627776, 1099511627776\)"):
        F.random((2**40, 2**40))
    assert_raises(OutOfMemory, "which this host has not", F.random, 2**57)
    assert_raises(ShapeError, "0 or more", F.random, (3, -1))
    assert_raises(UnsupportedDtype, r"axis must be an integer, got tuple \(0, 1\)", F.sum, ONES, (0, 1))
    assert_raises(UnsupportedDtype, "a size must be an integer, got bool True", F.random, (True,))


def test_inverse_is_a_boolean():
    """ntt(x, F, 2) and inverse="no" meant the inverse."""
    forward = ntt([1, 0], F)
    assert np.array_equal(ntt([1, 0], F, inverse=np.bool_(False)), forward)
    for wrong in ("no", 2, 0, None):
        assert_raises(ConfigError, "inverse must be True or False", ntt, [1, 0], F, inverse=wrong)


def test_lists_of_arrays_are_arrays():
    points = G1.mul((1, 2), [5, 7, 11])
    words = F.encode([2, 3, 4])
    expected = msm(words, points)
    for library in (lambda x: x, torch.from_numpy):
        for wrap in (list, tuple):
            found = msm(wrap(map(library, words)), wrap(map(library, points)))
            assert isinstance(found, np.ndarray if library(words) is words else torch.Tensor)
            assert np.array_equal(np.asarray(found), expected)
    rows = [list(words), list(words)]
    assert np.array_equal(msm(rows, list(points)), np.stack([expected] * 2))
    assert np.array_equal(G1.precompute(list(points)).msm(list(words)), expected)
    assert np.array_equal(G1.mul(list(points), list(words)), G1.mul(points, words))
    assert np.array_equal(F.add(list(words), [1, 1, 1]), F.encode([3, 4, 5]))
    assert np.array_equal(ntt(list(words[:2]), F), ntt(words[:2], F))
    with pytest.raises(
        UnsupportedDtype,
        match=r"points must be arrays of one library and dtype; \[0\] is ndarray of uint64, \[1\] tuple",
    ):
        msm([1, 2], [points[0], (1, 2)])
    with pytest.raises(
        ShapeError, match=r"points must be arrays of one shape and device, got \(2, 4\) and \(3, 2, 4\)"
    ):
        msm([1, 2], [points[0], points])
    assert_raises(UnsupportedDtype, "one library", lambda: msm([1, 2], [points[0], torch.from_numpy(points[1])]))


@pytest.mark.gpu
def test_lists_of_tensors_on_a_gpu():
    points = torch.from_numpy(G1.mul((1, 2), [5, 7, 11])).cuda()
    words = torch.from_numpy(F.encode([2, 3, 4])).cuda()
    assert msm(list(words), list(points)).cpu().equal(msm(words, points).cpu())
    assert F.add(list(words), list(words)).cpu().equal(F.add(words, words).cpu())
    assert_raises(ShapeError, "one shape and device", lambda: msm([1, 2], [points[0], points[1].cpu()]))


def test_booleans_are_no_coordinates():
    for call in (lambda: G1.encode([(True, 2)]), lambda: msm([1], [(True, 2)]), lambda: G1.encode((1, True))):
        assert_raises(UnsupportedDtype, r"must be \(x, y\) of integers, or None for infinity, got \(", call)
    assert_raises(UnsupportedDtype, "of integers", G2.encode, ((1, True), (2, 3)))


def test_points_out_of_the_subgroup_are_no_fixed_base():
    """The default check of FixedBase and precompute is of the subgroup, of msm of the curve."""
    low = (0, 2)  # of order 3 on BLS12-381's curve
    g1 = curve("bls12_381_g1")
    for call in (
        lambda: acl.zk.curve("bls12_381_g1").precompute([low]),
        lambda: acl.zk.curve("bls12_381_g1").precompute(g1.encode([low]), check=True),
        lambda: msm([1], [low], "bls12_381_g1", check="subgroup"),
        lambda: msm([1], [low], "bls12_381_g1", check=True),
        lambda: g1.mul(low, 1),
        lambda: g1.from_bytes(g1.to_bytes(low)),
    ):
        assert_raises(FormatError, "out of the subgroup of bls12_381_g1", call)
    from accelerant.zk.multi_scalar import FixedBase

    assert_raises(FormatError, "out of the subgroup of bls12_381_g1", FixedBase, "bls12_381_g1", [low])
    for call in (
        lambda: FixedBase("bls12_381_g1", [low], check="curve").msm([1]),
        lambda: msm([1], [low], "bls12_381_g1"),
        lambda: g1.add(low, None),
    ):
        assert g1.decode(call()) == low
    assert_raises(ConfigError, r"check must be .*, got 'group'", msm, [1], [low], "bls12_381_g1", check="group")
    family = family_of("bn254")
    for check in (True, "subgroup"):
        assert_raises(FormatError, "not on bn254_g1", FixedBase, "bn254_g1", [(1, 3)], check=check)
    assert FixedBase("bn254_g1", [family.g1.generator]).n == 1


@pytest.mark.parametrize(("value", "shown"), [
    (0, "0"), (-7, "-7"), (2**512 - 1, str(2**512 - 1)), (2**512, "0x8000000000000000... (an integer of 513 bits)"),
    (-(2**600), "-0x8000000000000000... (an integer of 601 bits)"),
    ([H], "a list with an integer of more digits than Python prints"),
    ("x" * 90, "'" + "x" * 79 + "'..."), (True, "True"),
])  # fmt: skip
def test_clipped(value, shown):
    assert clipped(value) == shown
