"""zk.curve and zk.pairing_product_is_one against Python integers: every function, every refusal, on the CPU and on
OpenCL."""

import pickle
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import accelerant
from accelerant.algebra.curve import CURVES, FAMILIES, curve_of, family_of
from accelerant.algebra.curve.weierstrass import add, encode_points, multiply, negate, points_to_bytes
from accelerant.errors import BackendUnavailable, ConfigError, FormatError, ShapeError, UnsupportedDtype
from accelerant.runtime.ledger import ledger
from accelerant.zk import curve as group_of
from accelerant.zk import pairing_product_is_one
from refusals import assert_raises
from requirements import require_backend

sys.path.append(str(Path(__file__).parents[1] / "algebra"))
from msm_reference import msm_sum
from small_orders import point_out_of_subgroup

NAMES = tuple(CURVES)


@pytest.fixture(params=NAMES)
def group(request):
    return group_of(request.param)


@pytest.fixture(params=["cpu", pytest.param("opencl", marks=pytest.mark.slow)])  # PoCL compiles long
def device(request):
    require_backend(request.param)
    if request.param == "opencl" and "group" in request.fixturenames:
        name = request.getfixturevalue("group").name
        if name != "bn254_g1":
            pytest.skip(f"{name}: tests/algebra/curve has the kernels of every curve")
    return request.param


def some_points(parameters, n, seed=1):
    """Edge points first: infinity, the generator, its opposite, its double; then others."""
    rng = random.Random(seed)
    g = parameters.generator
    edges = [None, g, negate(parameters, g), multiply(parameters, 2, g)]
    return (edges + [multiply(parameters, rng.getrandbits(128), g) for _ in range(n - 4)])[:n]


def point_off_curve(parameters):
    x, y = parameters.generator
    return x, parameters.coordinates.add(y, parameters.coordinates.one)


def scalars_of(parameters):
    r, rng = parameters.order, random.Random(7)
    return [
        0, 1, 2, 3, r - 1, r, r + 1, (1 << 256) - 1, 1 << 255, 15, 16, 0xF0F0, *(rng.getrandbits(256) for _ in "abcd"),
    ]  # fmt: skip


# --- facts, in and out -----------------------------------------------------------------------------------------------
def test_the_facts_of_a_curve(group):
    parameters = curve_of(group.name)
    assert group.order == parameters.order == group.scalar_field.modulus
    assert group.cofactor == parameters.cofactor
    assert group.field.modulus == parameters.coordinates.base.modulus
    assert (group.degree, group.shape) == (parameters.coordinates.degree, parameters.shape)
    assert group.parameters_hash == parameters.parameters_hash()
    assert len(group.parameters_hash) == 64
    assert group.generator.shape == group.shape
    assert group.generator.dtype == np.uint64
    assert group.decode(group.generator) == parameters.generator
    assert group_of(group.name) is group is pickle.loads(pickle.dumps(group))
    assert repr(group) == f"curve({group.name!r})"


def test_an_unknown_curve_lists_those_there_are():
    with pytest.raises(ConfigError, match=r"unknown curve 'bn129_g1'; known are bn254_g1, .*bls12_381_g2"):
        accelerant.zk.curve("bn129_g1")
    assert_raises(ConfigError, r"unknown curve .*; known are bn254_g1", accelerant.zk.curve, ["bn254_g1"])
    assert_raises(ConfigError, r"unknown pairing .*; known are bn254", pairing_product_is_one, [], [], ["bn254"])
    with pytest.raises(ConfigError, match="unknown pairing 'bn129'; known are bn254, bls12_381"):
        pairing_product_is_one([], [], "bn129")


def test_points_come_back(group):
    points = some_points(group.parameters, 6)
    words = group.encode(points)
    assert words.shape == (6, *group.shape)
    assert np.array_equal(words, encode_points(group.parameters, points))
    assert group.decode(words) == group.decode(points) == points
    assert group.decode(words.reshape(2, 3, *group.shape)) == [points[:3], points[3:]]
    assert group.decode(words.reshape(3, 1, 2, *group.shape)) == [[points[i : i + 2]] for i in (0, 2, 4)]
    assert group.decode(words[4]) == points[4]
    assert group.decode(group.encode(points[4])) == points[4]
    assert group.decode(group.encode(None)) is None
    assert not group.encode(None).any()
    assert group.encode([]).shape == (0, *group.shape)
    assert group.decode([]) == []
    assert group.decode(torch.from_numpy(words)) == points


def test_what_is_no_point_is_refused(group):
    x, y = group.parameters.generator
    for wrong in ((x,), (x, y, 1), ("x", y), 5, "point", (1.0, 2.0), ((1, 2), 3)):
        with pytest.raises(UnsupportedDtype, match=r"points\[1\] must be \(.*\) of integers, or None for infinity"):
            group.encode([None, wrong])
    q = group.field.modulus
    big = (q, 1) if group.degree == 1 else ((0, q), (1, 0))
    assert_raises(FormatError, rf"points\[1\] x\S* is {q:#x}, not below the modulus {q:#x}$", group.encode, [None, big])
    with pytest.raises(FormatError, match=r"^point y\S* is -0x1, negative$"):
        group.encode((1, -1) if group.degree == 1 else ((1, 1), (-1, 0)))
    long = (10**5000, "x") if group.degree == 1 else ((10**5000, 1), (1, "x"))
    with pytest.raises(UnsupportedDtype, match=r"^point must be .*, got \(.*int.*, str\)+$"):
        group.encode(long)  # Python writes no integer of 5000 digits
    assert_raises(UnsupportedDtype, r"got tuple$", lambda: group.encode((1,) * 1000))


def test_zeros_are_infinity(group):
    """As for the precompiles of EIP-196 and EIP-2537."""
    zero = (0,) * group.degree if group.degree > 1 else 0
    assert not group.encode((zero, zero)).any()
    assert group.decode(group.encode([(zero, zero)])) == [None]


def test_lists_of_no_points_keep_their_shape(group):
    for shape in ((0,), (0, 3), (2, 0), (2, 0, 3), (2, 3, 0)):
        assert group.decode(np.zeros((*shape, *group.shape), np.uint64)) == np.zeros(shape).tolist()


@pytest.mark.parametrize("layout", ["evm", "uncompressed", "compressed"])
def test_bytes(group, layout):
    points = some_points(group.parameters, 6)
    words = group.encode(points)
    data = points_to_bytes(group.parameters, points, layout)
    assert group.to_bytes(words, layout) == group.to_bytes(points, layout) == data
    assert np.array_equal(group.from_bytes(data, layout), words)
    assert_raises(FormatError, "is no multiple of that", lambda: group.from_bytes(data[1:], layout))
    assert_raises(ConfigError, "unknown layout", group.from_bytes, data, "der")
    for kind in (bytearray, memoryview):
        assert np.array_equal(group.from_bytes(kind(data), layout), words)
    for wrong in ("a" * len(data), list(data), np.frombuffer(data, np.uint8), None):
        with pytest.raises(UnsupportedDtype, match=f"^data must be bytes, .* got {type(wrong).__name__}$"):
            group.from_bytes(wrong, layout)
    if group.cofactor != 1:
        bad = points_to_bytes(group.parameters, [*points, point_out_of_subgroup(group.parameters)], layout)
        with pytest.raises(FormatError, match=rf"points\[6\] .* out of the subgroup of {group.name}"):
            group.from_bytes(bad, layout)
        assert group.from_bytes(bad, layout, check=False).shape == (7, *group.shape)
    if layout != "compressed":
        bad = points_to_bytes(group.parameters, [*points, point_off_curve(group.parameters)], layout)
        assert_raises(FormatError, rf"points\[6\] .* is not on {group.name}", group.from_bytes, bad, layout)


# --- the group -------------------------------------------------------------------------------------------------------
def test_add_sub_double_neg(group, device):
    parameters = group.parameters
    points = some_points(parameters, 5)
    first = [p for p in points for _ in points]
    second = [q for _ in points for q in points]
    x, y = group.encode(first), group.encode(second)
    assert group.decode(group.add(x, y, device=device)) == [
        add(parameters, p, q) for p, q in zip(first, second, strict=True)
    ]
    assert group.decode(group.sub(x, y, device=device)) == [
        add(parameters, p, negate(parameters, q)) for p, q in zip(first, second, strict=True)
    ]
    assert group.decode(group.double(points, device=device)) == [add(parameters, p, p) for p in points]
    assert group.decode(group.neg(points, device=device)) == [negate(parameters, p) for p in points]


def test_mul(group, device):
    parameters = group.parameters
    scalars, point = scalars_of(parameters), some_points(parameters, 5)[4]
    wanted = [multiply(parameters, s, point) for s in scalars]
    found = group.mul(group.encode(point), scalars, device=device)
    assert found.shape == (len(scalars), *group.shape)
    assert group.decode(found) == wanted
    points = some_points(parameters, 6)
    assert group.decode(group.mul(points, 5, device=device)) == [multiply(parameters, 5, p) for p in points]
    assert group.decode(group.mul(points, list(range(6)), device=device)) == [
        multiply(parameters, i, p) for i, p in enumerate(points)
    ]
    assert group.decode(group.mul(point, group.order, device=device)) is None


def test_mul_broadcasts(device):
    group = group_of("bn254_g1")
    points = some_points(group.parameters, 6)[3:]
    scalars = [[1, 2], [3, 4]]
    found = group.mul(group.encode(points).reshape(3, 1, 1, *group.shape), scalars, device=device)
    assert found.shape == (3, 2, 2, *group.shape)
    assert group.decode(found) == [[[multiply(group.parameters, s, p) for s in row] for row in scalars] for p in points]
    words = group.scalar_field.encode(scalars)
    assert np.array_equal(group.mul(group.encode(points).reshape(3, 1, 1, *group.shape), words), found)
    assert group.mul(group.generator, np.zeros((0, 4), np.uint64)).shape == (0, *group.shape)
    assert group.mul(np.zeros((0, *group.shape), np.uint64), 3).shape == (0, *group.shape)
    assert group.mul(np.zeros((2, 0, *group.shape), np.uint64), [[1], [2]]).shape == (2, 0, *group.shape)


def test_add_broadcasts(device):
    group = group_of("bn254_g1")
    points = some_points(group.parameters, 6)
    words = group.encode(points)
    wanted = [add(group.parameters, p, points[4]) for p in points]
    assert group.decode(group.add(words, words[4], device=device)) == wanted
    assert group.decode(group.add(points[4], words, device=device)) == wanted
    assert group.add(words.reshape(6, 1, *group.shape), words[:0]).shape == (6, 0, *group.shape)
    assert group.add(group.generator, group.generator).shape == group.shape


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 8, 13])
def test_sum(n, device):
    group = group_of("bn254_g1")
    points = some_points(group.parameters, n)
    assert group.decode(group.sum(group.encode(points), device=device)) == msm_sum(group.parameters, [1] * n, points)


def test_sum_of_every_curve_and_of_many_axes(group):
    points = some_points(group.parameters, 6)
    words = group.encode(points).reshape(2, 3, *group.shape)
    assert group.decode(group.sum(words)) == msm_sum(group.parameters, [1] * 6, points)
    assert group.sum(words).shape == group.shape


def test_precompute():
    """The sums of other curves are in test_msm.py: G2's kernels take long to compile."""
    group = group_of("bn254_g1")
    parameters = group.parameters
    points, scalars = some_points(parameters, 5), [3, 0, 1, group.order - 1, 1 << 200]
    key = group.precompute(group.encode(points))
    assert group.decode(key.msm(scalars)) == msm_sum(parameters, scalars, points)
    wrong = group.encode([*points, point_off_curve(parameters)])
    assert_raises(FormatError, rf"points\[5\] .* is not on {group.name}", group.precompute, wrong)
    group.precompute(wrong, check=False)


# --- questions -------------------------------------------------------------------------------------------------------
def test_is_on_curve_and_in_subgroup(group, device):
    parameters = group.parameters
    points = [*some_points(parameters, 5), point_off_curve(parameters), parameters.generator]
    wanted, inside = [True] * 5 + [False, True], [True] * 5 + [False, True]
    if group.cofactor != 1:
        points.append(point_out_of_subgroup(parameters))
        wanted.append(True)
        inside.append(False)
    words = group.encode(points)
    assert group.is_on_curve(words, device=device).tolist() == wanted
    assert group.is_in_subgroup(words, device=device).tolist() == inside
    assert group.is_on_curve(words[:5], device=device).all()
    assert group.is_on_curve(words[:4].reshape(2, 2, *group.shape), device=device).shape == (2, 2)
    assert group.is_on_curve(words[5]) is False
    assert group.is_in_subgroup(points[1]) is True
    assert group.is_in_subgroup(words[:0]).shape == (0,)


@pytest.mark.parametrize("n", [63, 64, 65, 200])
def test_the_first_of_many_is_named(n):
    """Beyond a chunk, and in its middle."""
    group = group_of("bn254_g1")
    words = np.repeat(group.encode([group.parameters.generator]), n, axis=0)
    for bad in (0, n // 2, n - 1):
        wrong = words.copy()
        wrong[bad:, 1, 0] += np.uint64(1)
        with pytest.raises(
            FormatError, match=rf"points\[{bad}\] \(flattened\) is \(0x1, 0x3\), which is not on bn254_g1"
        ):
            group.neg(wrong)
        assert group.is_on_curve(wrong).tolist() == [i < bad for i in range(n)]


def test_what_check_refuses(group, device):
    parameters = group.parameters
    points = [*some_points(parameters, 4), point_off_curve(parameters)]
    words = group.encode(points)
    shown = r"\(.*0x.*\)"
    for call in (group.neg, group.double, group.sum, lambda p, device: group.mul(p, 2, device=device)):
        with pytest.raises(FormatError, match=rf"^points\[4\] \(flattened\) is {shown}, which is not on {group.name}$"):
            call(words, device=device)
    for call in (group.add, group.sub):
        assert_raises(FormatError, r"^p\[4\] \(flattened\)", call, words, words, device=device)
        assert_raises(FormatError, r"^q\[4\] \(flattened\)", call, words[0], words, device=device)
        assert call(words, words, check=False, device=device).shape == words.shape
    if group.cofactor != 1:
        outside = point_out_of_subgroup(parameters)
        with pytest.raises(FormatError, match=rf"^points\[1\] .*, which is out of the subgroup of {group.name}$"):
            group.mul([None, outside], 2, device=device)
        # The group law is the curve's: these are right beyond the subgroup.
        twice = add(parameters, outside, outside)
        assert group.decode(group.mul([outside], 2, check=False, device=device)) == [twice]
        assert group.decode(group.double([outside], device=device)) == [twice]
        assert group.decode(group.mul(outside, group.order, check=False)) == multiply(parameters, group.order, outside)


def test_coordinates_that_are_not_reduced_are_refused(group):
    limbs = group.shape[-1]
    words = group.encode(some_points(group.parameters, 4))
    words[2].reshape(-1, limbs)[-1] = group.field.parameters.words(group.field.modulus + 7, 64, limbs)
    words[3] = words[2]
    coordinate = "y" if group.degree == 1 else r"y\.c1"
    wrong = rf"\[2\] \(flattened\) {coordinate} is {group.field.modulus + 7:#x}, not below the modulus"
    calls = (group.neg, group.decode, group.is_on_curve, group.is_in_subgroup, group.to_bytes)
    for call in (*calls, lambda p: group.add(p, p, check=False), lambda p: group.mul(p, 1, check=False)):
        for array in (words, words.reshape(2, 2, *group.shape), torch.from_numpy(words)):
            assert_raises(FormatError, wrong, call, array)
    first = group.encode(some_points(group.parameters, 4))
    first[0].reshape(-1, limbs)[0] = np.uint64(2**64 - 1)
    with pytest.raises(FormatError, match=rf"^q\[0\] \(flattened\) x\S* is 0x{'f' * 16 * limbs}, not below"):
        group.sub(words[1], first)


def test_shapes_and_kinds_that_are_refused(group):
    words = group.encode(some_points(group.parameters, 4))
    tail = ", ".join(map(str, group.shape))
    with pytest.raises(ShapeError, match=rf"points must be \(\.\.\., {tail}\), got \(4, 3, "):
        group.neg(np.concatenate([words, words[:, :1]], axis=1))
    assert_raises(ShapeError, "must end in an axis of the", lambda: group.neg(words[..., 1:]))
    with pytest.raises(ShapeError, match=r"p and q must have leading dimensions that broadcast, got \(4,\) and \(3,\)"):
        group.add(words, words[:3])
    with pytest.raises(ShapeError, match=r"points and scalars must have leading .* got \(4,\) and \(2,\)"):
        group.mul(words, [1, 2])
    with pytest.raises(UnsupportedDtype, match="points must be uint64, got int64: view it as uint64"):
        group.neg(words.view(np.int64))
    assert_raises(UnsupportedDtype, "points must be uint64, got >u8", lambda: group.neg(words.astype(">u8")))
    with pytest.raises(UnsupportedDtype, match="points must be a NumPy array, a torch tensor or of Python, got str"):
        group.neg("infinity")
    assert_raises(UnsupportedDtype, "scalars must be uint64, got float64", group.mul, words, np.ones((4, 4)))
    with pytest.raises(ShapeError, match="scalars must end in an axis of the 4 limbs"):
        group.mul(words, np.ones((4, 3), np.uint64))
    assert_raises((BackendUnavailable, ConfigError), None, group.neg, words, device="nowhere")


WORDS = np.array([[1234567890123456789, 0, 0, 0], [5, 0, 0, 0]], np.uint64)
FR = group_of("bn254_g1").scalar_field
REFUSED_SCALARS = {
    "float": ([1, 1234567.5], UnsupportedDtype, r"^scalars\[1\] must be an integer, got float$"),
    "float of NumPy": ([np.float64(1234567)], UnsupportedDtype, r"^scalars\[0\] must be an integer, got float64$"),
    "text": (["1234567"], UnsupportedDtype, r"^scalars\[0\] must be an integer, got str$"),
    "bytes": ([[b"1234567"]], UnsupportedDtype, r"^scalars\[0\] \(flattened\) must be an integer, got bytes$"),
    "boolean": ([1, True], UnsupportedDtype, r"^scalars\[1\] must be an integer, got bool$"),
    "boolean of NumPy": ([1, np.bool_(True)], UnsupportedDtype, r"^scalars\[1\] must be an integer, got bool"),
    "None": ([None], UnsupportedDtype, r"^scalars\[0\] must be an integer, got NoneType$"),
    "negative": ([1, 1, -1234567], FormatError, r"^scalars\[2\] is not from 0 to below "),
    "large": ([1, 1234567 << 256], FormatError, r"^scalars\[1\] is not from 0 to below "),
    "large in a row": ([[1, 2], [3, 1 << 256]], FormatError, r"^scalars\[3\] \(flattened\) is not from 0 to below "),
    "ragged": (
        [[1234567, 2], [3]],
        ShapeError,
        r"^scalars must be nested evenly, got lists of 1 and of 2 side by side$",
    ),
    "uneven": ([[1234567, 2], 3], ShapeError, r"nested evenly, got lists and integers side by side$"),
    "uneven within": ([[[1234567], 3]], ShapeError, r"nested evenly, got lists and integers side by side$"),
    "array after integers": ((1, WORDS[0]), UnsupportedDtype, r"^scalars\[1\] is an array"),
    "array of one integer": ([1, np.array(5)], UnsupportedDtype, r"^scalars\[1\] is an array"),
    "array in a row": ([[1], [WORDS[0]]], UnsupportedDtype, r"^scalars\[1\] \(flattened\) is an array"),
    "field array": ([FR.array([1, 2])], UnsupportedDtype, r"^scalars\[0\] is an array"),
}


@pytest.mark.parametrize("case", REFUSED_SCALARS)
def test_scalars_that_are_refused_are_not_shown(case):
    group, (scalars, error, text) = group_of("bn254_g1"), REFUSED_SCALARS[case]
    refused = assert_raises(error, text, group.mul, group.generator, scalars)
    assert "1234567" not in str(refused)


def test_integers_of_numpy_and_of_other_kinds():
    class Whole:
        def __index__(self):
            return 7

    group = group_of("bn254_g1")
    wanted = group.decode(group.mul(group.generator, [5, 6, 7]))
    assert group.decode(group.mul(group.generator, (np.int64(5), np.uint8(6), Whole()))) == wanted
    assert group.decode(group.mul(group.generator, np.int8(5))) == wanted[0]
    for shape in ((0,), (2, 0), (1, 0)):
        assert group.mul(group.generator, np.zeros(shape, int).tolist()).shape == (*shape, *group.shape)


def test_multiples_by_field_arrays(group, device):
    scalars, point = [3, 0, group.order - 1, 1 << 200], group.parameters.generator
    words = group.mul(group.generator, scalars)
    field = group.scalar_field
    assert np.array_equal(group.mul(group.generator, field.array(scalars, device=device)), words)
    square = field.array(scalars).reshape(2, 2)
    assert group.mul(point, square * 1).shape == (2, 2, *group.shape)
    assert np.array_equal(group.mul(point, square).reshape(words.shape), words)
    found = group.mul(point, field.array(torch.from_numpy(field.encode(scalars))), device=device)
    assert isinstance(found, torch.Tensor)
    assert np.array_equal(found.numpy(), words)
    with pytest.raises(ConfigError, match=rf"scalars must be of {field.name}, got a FieldArray of {group.field.name}"):
        group.mul(group.generator, group.field.array([1]))


def test_names_in_errors():
    g1, g2 = group_of("bn254_g1"), group_of("bn254_g2")
    q = g1.field.modulus
    for call, name in ((lambda p: g1.add(g1.generator, p), "q"), (lambda p: g1.sub(p, g1.generator), "p")):
        assert_raises(UnsupportedDtype, rf"^{name}\[1\] must be \(x, y\) of integers", call, [(1, 2), (1, 2.0)])
        assert_raises(UnsupportedDtype, rf"^{name} must be \(x, y\) of integers.*got \(int, float\)$", call, (1, 2.0))
        assert_raises(FormatError, rf"^{name}\[1\] y is {q:#x}, not below the modulus", call, [(1, 2), (1, q)])
    good = [g1.parameters.generator], [g2.parameters.generator]
    for wrong, bad in (((1, 2.0), ((1, 2), 3)), ((1, q), ((1, 2), (3, q)))):
        assert_raises((UnsupportedDtype, FormatError), r"^g1_points\[0\] ", pairing_product_is_one, [wrong], good[1])
        assert_raises((UnsupportedDtype, FormatError), r"^g2_points\[0\] ", pairing_product_is_one, good[0], [bad])
    words = np.repeat(g2.generator[None], 3, axis=0)
    words[1, 1, 0] = 2**64 - 1
    with pytest.raises(FormatError, match=r"^g2_points\[1\] \(flattened\) y\.c0 is 0xf{64}, not below"):
        pairing_product_is_one(good[0] * 3, words)


def test_arguments_stay_as_they_are(group):
    words = group.encode(some_points(group.parameters, 4))
    kept = words.copy()
    words.setflags(write=False)
    group.add(words, words)
    group.mul(words, 3)
    group.neg(words)
    group.is_in_subgroup(words)
    assert np.array_equal(words, kept)
    every_other = np.repeat(words, 2, axis=0)[::2]
    assert np.array_equal(group.double(every_other), group.double(words))


# --- torch -----------------------------------------------------------------------------------------------------------
def test_tensors_in_and_out(group):
    words = group.encode(some_points(group.parameters, 5))
    tensor = torch.from_numpy(words)
    for found, wanted in (
        (group.add(tensor, tensor), group.add(words, words)),
        (group.add([group.parameters.generator], tensor), group.add(group.generator, words)),
        (group.mul(tensor, 7), group.mul(words, 7)),
        (group.neg(tensor), group.neg(words)),
        (group.sum(tensor), group.sum(words)),
    ):
        assert isinstance(found, torch.Tensor)
        assert found.dtype == torch.uint64
        assert np.array_equal(found.numpy(), wanted)
    scalars = torch.from_numpy(group.scalar_field.encode([1, 2, 3, 4, 5]))
    found = group.mul(group.parameters.generator, scalars)
    assert isinstance(found, torch.Tensor)
    assert isinstance(group.mul(words, scalars), np.ndarray)  # in the first array's kind
    answer = group.is_on_curve(tensor)
    assert isinstance(answer, torch.Tensor)
    assert answer.dtype == torch.bool
    assert answer.all()
    assert_raises(ConfigError, "the tensor is on meta", lambda: group.neg(tensor.to("meta")))


def test_the_ledger_has_it():
    group = group_of("bn254_g1")
    ledger().reset()
    group.mul(group.generator, [1, 2, 3], check=False)
    rows = {row["op"]: row for row in ledger().to_dict()["ops"]}
    assert (rows["curve_mul"]["case"], rows["curve_mul"]["implementation"]) == ("3 bn254_g1", "llvm")
    assert rows["curve_mul"]["own"]


# --- pairings --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FAMILIES)
def test_pairing_product(name):
    g1, g2 = (group_of(f"{name}_{part}") for part in ("g1", "g2"))
    p = g1.mul(g1.generator, [6, 2, 4])
    q = g2.mul(g2.generator, [1, 1, g2.order - 2])
    assert pairing_product_is_one(p, q, name)
    assert not pairing_product_is_one(p[:2], q[:2], name)
    assert pairing_product_is_one(torch.from_numpy(p), torch.from_numpy(q), family=name)
    assert pairing_product_is_one(g1.decode(p), g2.decode(q), name)
    assert pairing_product_is_one([None], [family_of(name).g2.generator], name)
    assert pairing_product_is_one([], [], name)
    assert_raises(FormatError, r"g1_points\[0\], .* is not on", pairing_product_is_one, [(1, 1)], [None], name)
    assert pairing_product_is_one([(1, 1)], [None], name, check=False)
    outside = point_out_of_subgroup(g2.parameters)
    with pytest.raises(FormatError, match=r"g2_points\[2\], .* not in its subgroup"):
        pairing_product_is_one(p, [*g2.decode(q[:2]), outside], name)
    assert_raises(ShapeError, "as many points of both groups, got 3 and 2", pairing_product_is_one, p, q[:2], name)
    assert_raises(ShapeError, r"must be \(n, 2, \d\), got \(2, \d\)", pairing_product_is_one, p[0], q[0], name)


def test_the_page_has_the_hashes():
    page = (Path(__file__).parents[2] / "docs" / "zk.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"| `{name}` | `{group_of(name).parameters_hash}` |" in page
