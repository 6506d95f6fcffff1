"""zk.field and FieldArray against Python integers: every function, every refusal, on the CPU and on OpenCL."""

import copy
import operator
import pickle
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import accelerant
from accelerant import errors
from accelerant.algebra.field import parameters
from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.runtime import registry
from accelerant.runtime.dispatch.plan import explain_quietly
from accelerant.runtime.ledger import ledger
from accelerant.zk import FieldArray
from accelerant.zk import field as field_of
from refusals import assert_raises
from requirements import require_backend

NAMES = tuple(parameters.FIELDS)
SMALL = ("goldilocks", "babybear", "bn254_fr")
"""One of each kind of word; the other fields differ from the last in their constants alone."""


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "mersenne61")) for name in NAMES])
def field(request):
    return field_of(request.param)


@pytest.fixture(params=SMALL)
def one_of_each(request):
    return field_of(request.param)


@pytest.fixture(params=["cpu", pytest.param("opencl", marks=pytest.mark.slow)])  # PoCL compiles some minutes
def device(request):
    require_backend(request.param)
    if request.param == "opencl" and "field" in request.fixturenames:
        name = request.getfixturevalue("field").name
        if name not in SMALL:
            pytest.skip(f"{name}: its kernels are bn254_fr's with other constants")
    return request.param


def edges(p):
    """0, 1, what surrounds each word's end, and the modulus's neighbours."""
    powers = [2**k + d for k in (31, 32, 63, 64, 127, 128, 192, 254, 255, 320, 380) for d in (-1, 0, 1)]
    return [0, 1, 2, *(x for x in powers if x < p), p // 2, p // 2 + 1, p - 2, p - 1]


def pairs(p):
    values = edges(p)
    return [a for a in values for _ in values], [b for _ in values for b in values]


def unreduced(field):
    """Words of the largest number that they can hold, and that number."""
    words = field.encode([0, 1, 2])
    words[1] = np.iinfo(field.dtype).max
    return words, 2 ** (8 * field.parameters.size_bytes) - 1


# --- facts, in and out -----------------------------------------------------------------------------------------------
def test_the_facts_of_a_field(field):
    row = parameters.FIELDS[field.name]
    assert (field.modulus, field.limbs, field.generator) == (row.modulus, row.limbs, row.generator)
    assert (field.modulus - 1) % 2**field.two_adicity == 0
    assert (field.modulus - 1) >> field.two_adicity & 1
    assert field_of(field.name) is field
    assert pickle.loads(pickle.dumps(field)) is field
    assert field.name in repr(field)


def test_an_unknown_field_lists_those_there_are():
    with pytest.raises(ConfigError, match=r"unknown field 'bn128'; known are goldilocks, babybear, bn254_fr, .*_fq"):
        accelerant.zk.field("bn128")


def test_words_are_little_endian_and_come_back(field):
    values = edges(field.modulus)
    words = field.encode(values)
    assert words.dtype == (np.uint32 if field.name == "babybear" else np.uint64)
    assert words.shape == ((len(values), field.limbs) if field.limbs > 1 else (len(values),))
    assert words[1].reshape(-1).tolist() == [1] + [0] * (field.limbs - 1)
    bits = 8 * words.dtype.itemsize
    assert [sum(int(w) << bits * i for i, w in enumerate(np.ravel(row))) for row in words] == values
    assert field.decode(words) == values
    assert field.decode(words[3]) == values[3]
    assert field.decode(field.encode([[1, 2], [3, 4], [5, 6]])) == [[1, 2], [3, 4], [5, 6]]
    assert field.decode(field.encode(7)) == 7
    assert field.decode(field.encode([])) == []
    assert field.decode(torch.from_numpy(words)) == values


def test_integers_of_any_array_are_encoded(one_of_each):
    for dtype in (np.int8, np.int64, np.uint64, object):
        assert one_of_each.decode(one_of_each.encode(np.array([[1, 2], [3, 4]], dtype))) == [[1, 2], [3, 4]]
    assert one_of_each.decode(one_of_each.encode([np.int32(5), 6])) == [5, 6]


def test_what_is_no_element_is_refused_by_index_and_value(one_of_each):
    p = one_of_each.modulus
    with pytest.raises(FormatError, match=rf"x\[3\] \(flattened\) is {p}, not below the modulus {p}"):
        one_of_each.encode([[0, 1], [2, p]])
    assert_raises(FormatError, r"x\[1\] \(flattened\) is -5, negative", one_of_each.encode, [0, -5])
    assert one_of_each.decode(one_of_each.encode([p, -5, p**3 + 2], reduce=True)) == [0, p - 5, 2]
    for wrong in (1.0, "1", None, True, [2]):
        with pytest.raises(UnsupportedDtype, match=r"x\[1\] \(flattened\) is .*, not an integer"):
            one_of_each.encode([0, wrong] if wrong != [2] else [0, [1, 2]])
    for dtype in (np.float64, np.bool_, np.complex128):
        with pytest.raises(UnsupportedDtype, match=f"x must hold integers, got {np.dtype(dtype)}"):
            one_of_each.encode(np.ones(2, dtype))


def test_random_is_uniform_and_below_the_modulus(field):
    p, n = field.modulus, 4000
    values = field.decode(field.random(n))
    assert max(values) < p
    assert len(set(values)) > n - 20  # BabyBear: 4000^2 / 2 / 2^31, about 4 coincidences
    eighths = np.bincount([8 * value // p for value in values], minlength=8)
    assert np.abs(eighths - n / 8).max() < 7 * (n / 8) ** 0.5
    assert field.random((2, 3)).shape[:2] == (2, 3)
    assert field.random(0).shape[0] == 0
    assert isinstance(field.decode(field.random(())), int)
    assert_raises(ShapeError, r"0 or more, .*; got \(2, -1\)", field.random, (2, -1))


# --- functions of words ----------------------------------------------------------------------------------------------
@pytest.mark.sample(2, 1)
def test_every_function_is_exact_on_edge_values(field, device):
    p = field.modulus
    x, y = pairs(p)
    a, b = field.encode(x), field.encode(y)
    for name, function in {"add": operator.add, "sub": operator.sub, "mul": operator.mul}.items():
        found = getattr(field, name)(a, b, device=device)
        assert type(found) is np.ndarray
        assert found.dtype == a.dtype
        assert field.decode(found) == [function(u, v) % p for u, v in zip(x, y, strict=True)], name
    values = edges(p)
    words = field.encode(values)
    assert field.decode(field.square(words, device=device)) == [v * v % p for v in values]
    assert field.decode(field.neg(words, device=device)) == [-v % p for v in values]
    assert field.decode(field.inv(words[1:], device=device)) == [pow(v, -1, p) for v in values[1:]]
    for exponent in (0, 1, 2, 65537, 2**64, p - 2):
        assert field.decode(field.pow(words, exponent, device=device)) == [pow(v, exponent, p) for v in values]
    assert field.decode(field.pow(words[1:], -3, device=device)) == [pow(v, -3, p) for v in values[1:]]
    assert field.decode(field.sum(a, device=device)) == sum(x) % p
    assert field.decode(field.dot(a, b, device=device)) == sum(u * v for u, v in zip(x, y, strict=True)) % p


@pytest.mark.parametrize("n", [1, 255, 256, 257, 4095, 4097, 70001])
def test_sums_of_all_lengths(one_of_each, device, n):
    p = one_of_each.modulus
    words = one_of_each.random(n)
    values = one_of_each.decode(words)
    assert one_of_each.decode(one_of_each.sum(words, device=device)) == sum(values) % p
    assert one_of_each.decode(one_of_each.dot(words, words, device=device)) == sum(v * v for v in values) % p


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 17, 33])
def test_short_rows(one_of_each, columns):
    """The CPU reduces short rows, and the last chunks of longer ones, by columns; operands do not change."""
    p = one_of_each.modulus
    numbers = (edges(p) * 3 * columns)[: 3 * columns]
    x, y = (np.array(each, object).reshape(3, columns) for each in (numbers, numbers[::-1]))
    words, others = one_of_each.encode(x), one_of_each.encode(y)
    before = words.copy(), others.copy()
    total, product = one_of_each.sum(words, -1), one_of_each.dot(words, others)
    assert one_of_each.decode(total) == (x.sum(-1) % p).tolist()
    assert one_of_each.decode(product) == ((x * y).sum(-1) % p).tolist()
    assert one_of_each.array(words).dot(others).ints() == ((x * y).sum(-1) % p).tolist()
    assert not any(np.shares_memory(found, each) for found in (total, product) for each in (words, others))
    assert all((each == was).all() for each, was in zip((words, others), before, strict=True))


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 4099), (300, 17), (1, 1), (0, 4), (4, 0)], ids=str)
def test_sums_along_an_axis(one_of_each, device, shape):
    p = one_of_each.modulus
    words = one_of_each.random(shape)
    values = np.array(one_of_each.decode(words), object).reshape(shape)
    for axis in (None, *range(-len(shape), len(shape))):
        expected = np.asarray(values.sum(axis=axis) % p).tolist()
        assert one_of_each.decode(one_of_each.sum(words, axis, device=device)) == expected
    products = np.asarray((values * values).sum(axis=-1) % p).tolist()
    assert one_of_each.decode(one_of_each.dot(words, words, device=device)) == products
    assert_raises(ShapeError, f"there is no axis {len(shape)}", one_of_each.sum, words, len(shape))


def test_leading_dimensions_broadcast(one_of_each, device):
    p = one_of_each.modulus
    x, y = one_of_each.random((3, 1, 5)), one_of_each.random((4, 1))
    u, v = (np.array(one_of_each.decode(each), object) for each in (x, y))
    assert one_of_each.decode(one_of_each.mul(x, y, device=device)) == (u * v % p).tolist()
    assert one_of_each.decode(one_of_each.sub(7, y, device=device)) == ((7 - v) % p).tolist()
    assert one_of_each.decode(one_of_each.add(x, [[1], [2]], device=device)) == (np.add(u, [[1], [2]]) % p).tolist()
    assert_raises(ShapeError, r"shapes that broadcast, got \(3, 1, 5\) and \(2,\)", one_of_each.add, x, [1, 2])
    assert_raises(ShapeError, "single elements", one_of_each.dot, 1, 2)


def test_arrays_of_any_layout(one_of_each):
    p = one_of_each.modulus
    words = one_of_each.random((6, 8))
    values = np.array(one_of_each.decode(words), object)
    for cut in (np.s_[::2, ::-3], np.s_[1], np.s_[:, 3], np.s_[:0]):
        assert one_of_each.decode(one_of_each.square(words[cut])) == (values[cut] ** 2 % p).tolist()
    frozen = words.copy()
    frozen.flags.writeable = False
    assert one_of_each.decode(one_of_each.neg(frozen)) == (-values % p).tolist()
    assert np.array_equal(frozen, words)
    data = b"\0" + words.tobytes()
    odd = np.frombuffer(data, np.uint8)[1:].view(words.dtype).reshape(words.shape)  # aligned to one byte
    assert one_of_each.decode(one_of_each.neg(odd)) == (-values % p).tolist()


def test_nothing_gives_nothing(one_of_each, device):
    empty = one_of_each.encode([])
    for call in (one_of_each.square, one_of_each.neg, one_of_each.inv):
        assert call(empty, device=device).shape == empty.shape
    assert one_of_each.mul(empty, 5, device=device).shape == empty.shape
    assert one_of_each.pow(empty, 3, device=device).shape == empty.shape
    assert one_of_each.decode(one_of_each.sum(empty, device=device)) == 0
    assert one_of_each.decode(one_of_each.dot(empty, empty, device=device)) == 0
    assert one_of_each.array(empty, device=device).ints() == []


def test_unreduced_words_are_refused_or_reduced(field, device):
    words, value = unreduced(field)
    p = field.modulus
    for call in (field.square, field.inv, field.decode, field.array, field.sum):
        assert_raises(FormatError, rf"x\[1\] \(flattened\) is {value}, not below the modulus {p}", call, words)
    assert_raises(FormatError, r"y\[1\]", field.add, [0, 1, 2], words)
    assert field.decode(words, reduce=True) == [0, value % p, 2]
    assert field.decode(field.add(words, [1, -1, p], device=device, reduce=True)) == [1, (value - 1) % p, 2]
    assert field.array(words, device=device, reduce=True).ints() == [0, value % p, 2]
    many = np.repeat(field.encode([p - 1]), 20_000, axis=0)
    many[19_998] = words[1]
    assert_raises(FormatError, rf"x\[19998\] \(flattened\) is {value}", field.neg, many)


def test_the_smallest_unreduced_words_are_found(field):
    """The modulus itself, and what differs from it in one limb."""
    p, bits = field.modulus, field.parameters.word_bits
    for shift in range(field.limbs):
        for value in (p, p + (1 << bits * shift)):
            if value < 2 ** (bits * field.limbs):
                words = field.encode([0])
                np.ravel(words)[:] = field.parameters.words(value, bits, field.limbs)
                assert_raises(FormatError, f"is {value}, not below", field.neg, words)
                assert field.decode(words, reduce=True) == [value % p]


def test_zero_has_no_inverse(one_of_each, device):
    x = one_of_each.encode([[1, 2, 3], [4, 0, 0]])
    assert_raises(FormatError, r"x\[4\] \(flattened\) is 0, which has no inverse", one_of_each.inv, x, device=device)
    assert_raises(FormatError, r"x\[4\]", one_of_each.pow, x, -1, device=device)
    array = one_of_each.array(x, device=device)
    with pytest.raises(FormatError, match=r"y\[4\] \(flattened\) is 0, which has no inverse"):
        _ = array / array


def test_wrong_words_are_refused_with_what_to_do(one_of_each):
    name = one_of_each.dtype.name
    good = one_of_each.encode([1, 2])
    with pytest.raises(
        UnsupportedDtype, match=f"x must be {name}, got {name[1:]}: view it as {name} if it holds canon"
    ):
        one_of_each.neg(good.view(name[1:]))
    with pytest.raises(UnsupportedDtype, match=f"y must be {name}, got >u.: astype\\({name}\\) brings it into"):
        one_of_each.add(good, good.astype(one_of_each.dtype.newbyteorder(">")))
    assert_raises(UnsupportedDtype, "got float64: encode", lambda: one_of_each.neg(good.astype(np.float64)))
    assert_raises(UnsupportedDtype, "got uint8: encode", one_of_each.neg, torch.zeros(2, dtype=torch.uint8))
    for stranger in (1.5, "1", None, {1}):
        with pytest.raises(UnsupportedDtype, match="x must be a NumPy array, a torch tensor or Python integers, got"):
            one_of_each.neg(stranger)
    with pytest.raises(UnsupportedDtype, match=r"x is a FieldArray: use its operators, or .* \.canonical\(\)"):
        one_of_each.neg(one_of_each.array(good))
    for exponent in (2.0, "2", True, [1, 2]):
        assert_raises(UnsupportedDtype, "the exponent must be one Python integer", one_of_each.pow, good, exponent)
    if one_of_each.limbs > 1:
        for shape in ((3,), (4, 3), ()):
            with pytest.raises(ShapeError, match=f"limbs of {one_of_each.name}, got shape"):
                one_of_each.neg(np.zeros(shape, one_of_each.dtype))


def test_a_device_that_is_not_there(one_of_each):
    assert_raises(ConfigError, "unknown backend 'abacus'", one_of_each.neg, [1], device="abacus")
    with pytest.raises(ConfigError, match=r"device must be a name such as 'cpu', .* got 'cpu:x'"):
        one_of_each.neg([1], device="cpu:x")
    assert_raises(ConfigError, "there is no number 7", one_of_each.neg, [1], device="cpu:7")
    assert_raises(errors.BackendUnavailable, None, one_of_each.neg, [1], device="rocm")
    assert one_of_each.decode(one_of_each.neg([0], device=registry.find_device("cpu"))) == [0]


def test_tensors_give_tensors(one_of_each, device):
    p = one_of_each.modulus
    x = torch.from_numpy(one_of_each.encode([1, 2, p - 1]))
    y = one_of_each.mul(x, 2, device=device)
    assert isinstance(y, torch.Tensor)
    assert y.dtype == x.dtype
    assert one_of_each.decode(y) == [2, 4, p - 2]
    assert isinstance(one_of_each.add([1, 1, 1], x), torch.Tensor)
    array = one_of_each.array(x, device=device)
    assert isinstance(array.canonical(), torch.Tensor)
    assert isinstance((array * 2 + 1).canonical(), torch.Tensor)
    assert isinstance(one_of_each.array(x.numpy()).canonical(), np.ndarray)


# --- FieldArray ------------------------------------------------------------------------------------------------------
@pytest.mark.sample(2, 1)
def test_expressions_of_field_arrays(field, device):
    p = field.modulus
    values = edges(p)[1:]
    x = field.array(values, device=device)
    y = field.array(field.encode(list(reversed(values))), device=device)
    pairs_ = list(zip(values, reversed(values), strict=True))
    assert ((x**3 - 5 * y + 1) / x).ints() == [(u**3 - 5 * v + 1) * pow(u, -1, p) % p for u, v in pairs_]
    assert (2 - x).ints() == [(2 - u) % p for u in values]
    assert (1 / x).ints() == x.inv().ints() == (x**-1).ints() == [pow(u, -1, p) for u in values]
    assert (-x).ints() == (0 - +x).ints() == [-u % p for u in values]
    assert (x * x).ints() == x.square().ints() == (x**2).ints()
    assert x.sum().ints() == sum(values) % p
    assert x.dot(y).ints() == sum(u * v for u, v in pairs_) % p
    assert field.decode(x.canonical()) == field.decode(x) == values
    assert [bool(same) for same in x == y] == [u == v for u, v in pairs_]
    assert [bool(other) for other in x != y] == [u != v for u, v in pairs_]
    assert x.device.partition(":")[0] == device


def test_the_inside_is_montgomery_form_with_two_to_the_words_bits():
    for name in NAMES:
        field = field_of(name)
        bits = 8 * field.parameters.size_bytes
        inside = field.array([1, 5]).words
        radix = 1 if name in ("goldilocks", "mersenne61") else 2**bits
        assert field.decode(inside) == [radix % field.modulus, 5 * radix % field.modulus]


def test_shapes_of_field_arrays(one_of_each, device):
    words = one_of_each.random((3, 4))
    values = np.array(one_of_each.decode(words), object)
    x = one_of_each.array(words, device=device)
    assert (x.shape, x.ndim, x.size, len(x), x.nbytes) == ((3, 4), 2, 12, 3, words.nbytes)
    for key in (1, -1, np.s_[1:], np.s_[:, 2], np.s_[::2, 1:3], np.s_[..., 0], np.s_[1, ...], None, np.s_[:, None, 1]):
        assert x[key].ints() == values[key].tolist(), key
    assert x[1, 2].ints() == values[1, 2]
    assert x[1, 2].shape == ()
    assert x[np.array([2, 0])].ints() == values[[2, 0]].tolist()
    assert x[values % 2 == 1].ints() == values[values % 2 == 1].tolist()
    assert [row.ints() for row in x] == values.tolist()
    assert x.reshape(2, 6).ints() == x.reshape((2, -1)).ints() == values.reshape(2, 6).tolist()
    assert (x.reshape(-1)[5:7] * x[0, 0]).ints() == [
        v * values[0, 0] % one_of_each.modulus for v in values.reshape(-1)[5:7]
    ]
    with pytest.raises(IndexError):
        _ = x[0, 0, 0]
    with pytest.raises(IndexError):
        _ = x[3]
    for shape in ((5, 2), (-1, 5), (-1, -1), (12, -2)):
        assert_raises(ShapeError, "12 elements of shape", x.reshape, *shape)
    assert_raises(TypeError, "no length", lambda: len(x[0, 0]))


def test_field_arrays_in_numpy_expressions(one_of_each, device):
    p = one_of_each.modulus
    a = one_of_each.random((2, 3))
    u = np.array(one_of_each.decode(a), object)
    x = one_of_each.array(a, device=device)
    assert np.add(x, x).ints() == (2 * u % p).tolist()
    assert np.subtract(1, x).ints() == ((1 - u) % p).tolist()
    assert np.multiply(a, x).ints() == (a * x).ints() == (x * a).ints() == (u * u % p).tolist()
    assert np.power(x, 5).ints() == (u**5 % p).tolist()
    assert np.negative(x).ints() == (-u % p).tolist()
    assert np.true_divide(x, x + x).ints() == [[pow(2, -1, p)] * 3] * 2
    assert np.reciprocal(x).ints() == x.inv().ints()
    assert np.square(x).ints() == (u * u % p).tolist()
    assert np.sum(x).ints() == u.sum() % p
    assert np.sum(x, axis=0).ints() == np.add.reduce(x).ints() == (u.sum(axis=0) % p).tolist()
    assert np.equal(x, a).all()
    assert (np.uint64(3) * x).ints() == (3 * u % p).tolist()
    for refused in (np.sin, np.sqrt, np.floor_divide, np.remainder, np.less, np.add.accumulate, np.multiply.reduce):
        with pytest.raises(UnsupportedCase, match=r"np\.\w+(\.\w+)? is not defined on field elements; defined are add"):
            refused(*[x] * getattr(refused, "nin", 1))
    assert_raises(UnsupportedCase, r"np\.add with out", np.add, x, x, out=x)
    assert_raises(UnsupportedDtype, r"call \.canonical\(\) for words, \.ints\(\) for Python integers", np.asarray, x)
    assert_raises(UnsupportedCase, "no dtype", np.sum, x, dtype=np.uint64)


def test_what_does_not_go_together(one_of_each):
    p = one_of_each.modulus
    x = one_of_each.array([1, 2, 3])
    other = field_of("bls12_381_fq").array([1, 2, 3])
    for use in (lambda: x + other, lambda: field_of("bls12_381_fq").array(x), lambda: x == other):
        assert_raises(ConfigError, "bls12_381_fq", use)
    with pytest.raises(ShapeError, match="broadcast"):
        _ = x * [1, 2]
    with pytest.raises(FormatError, match="is -1, negative"):
        _ = x + -1
    with pytest.raises(FormatError, match=f"is {p}, not below"):
        _ = x * p
    with pytest.raises(UnsupportedDtype, match="float"):
        _ = x * 1.5
    with pytest.raises(UnsupportedDtype, match="exponent"):
        _ = x**0.5
    assert (x == "1") is False
    assert (x != None) is True  # noqa: E711  # what is meant
    assert_raises(TypeError, "unhashable", lambda: hash(x))


def copies(array):
    return copy.copy(array), copy.deepcopy(array), array.copy(), pickle.loads(pickle.dumps(array))


@pytest.mark.sample(4, 1)
@pytest.mark.parametrize("where", ["cpu", "opencl", "webgpu"])
def test_copied_and_pickled_arrays_are_on_their_device(one_of_each, where):
    require_backend(where)
    array = one_of_each.array([[0, 1], [2, one_of_each.modulus - 1]], device=where)
    for again in copies(array):
        assert (again.device, again.shape, again.ints()) == (array.device, array.shape, array.ints())
        assert again.space == array.space
        assert (array == again).all()
    of_tensor = one_of_each.array(torch.from_numpy(one_of_each.encode([5, 6])))
    for again in copies(of_tensor):
        assert isinstance(again.canonical(), torch.Tensor)


@pytest.mark.slow
def test_arrays_of_a_device_without_tensors_and_of_two_devices():
    require_backend("opencl")
    field = field_of("babybear")
    here, there = field.array([1, 2]), field.array([[3, 4], [5, 6], [7, 8]], device="opencl")
    with pytest.raises(ShapeError, match="one device, got cpu and opencl:0"):
        _ = here + there
    assert (here + field.array(there, device="cpu")).ints() == [[4, 6], [6, 8], [8, 10]]
    assert (there[1:, ::-1] + there[0] + 1).ints() == [[10, 10], [12, 12]]
    assert (there.reshape(2, 3) == [[3, 4, 0], [6, 7, 8]]).tolist() == [[True, True, False], [True, True, True]]
    assert isinstance(there.canonical(), np.ndarray)
    assert field.array(here, device="opencl").device == "opencl:0"
    assert field.array(here) is here


def test_values_stay_out_of_repr(one_of_each):
    x = one_of_each.array([123456789])
    assert repr(x) == f"FieldArray({one_of_each.name}, shape (1,), cpu)"
    assert isinstance(x, FieldArray)


def test_inputs_are_never_changed(one_of_each, device):
    a, b = one_of_each.random(50), one_of_each.random(50)
    kept = a.copy(), b.copy()
    x = one_of_each.array(a, device=device)
    view = x[10:20]
    _ = one_of_each.mul(a, b, device=device), one_of_each.sum(a, device=device), x * b + view[0], x.sum()
    x += b
    assert np.array_equal(a, kept[0])
    assert np.array_equal(b, kept[1])
    assert view.ints() == one_of_each.decode(a[10:20])


# --- the ledger ------------------------------------------------------------------------------------------------------
def test_calls_enter_the_ledger(device, monkeypatch):
    monkeypatch.setattr("accelerant.runtime.ledger._CASES_LIMIT", 1 << 20)  # other tests may have reached it
    ledger().reset()
    field = field_of("bn254_fr")
    x = field.random((1, 15))
    field.mul(x, x, device=device)
    field.mul(x, x, device=device)
    _ = field.array(x, device=device) ** 5
    rows = {(row["op"], row["case"]): row for row in ledger().to_dict()["ops"] if row["backend"] == device}
    product = rows["field_mul", "1x15 bn254_fr"]
    assert (product["calls"], product["bytes_per_call"], product["flops_per_call"]) == (2, 3 * 15 * 32, 15)
    assert product["implementation"] == ("llvm" if device == "cpu" else "portable")
    assert product["own"]
    assert rows["field_pow", "1x15 bn254_fr montgomery"]["flops_per_call"] == 3 * 15  # x^2, x^4, x^5
    assert rows["field_to_montgomery", "1x15 bn254_fr"]["calls"] == 1


def test_explain_sees_a_call():
    field = field_of("babybear")
    explanation = explain_quietly(field.add, [1, 2], [3, 4])
    assert explanation.result.tolist() == [4, 6]
    (decision,) = explanation.decisions
    assert (decision.op, decision.implementation, decision.device) == ("field_add", "llvm", "cpu")


def test_a_failed_launch_is_counted(monkeypatch):
    from accelerant.algebra.field import launch
    from accelerant.errors import LaunchError

    ledger().reset()
    monkeypatch.setattr(launch, "_launch", Mock(side_effect=LaunchError("refused")))
    assert_raises(LaunchError, "refused", lambda: field_of("babybear").neg([]))
    (row,) = ledger().to_dict()["ops"]
    assert (row["op"], row["calls"], row["failures"]) == ("field_neg", 1, 1)


# --- on a GPU --------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_everything_on_cuda(name):
    field = field_of(name)
    p = field.modulus
    x, y = pairs(p)
    a, b = (torch.from_numpy(field.encode(each)).cuda() for each in (x, y))
    both = list(zip(x, y, strict=True))
    assert field.mul(a, b).is_cuda
    assert field.decode(field.mul(a, b)) == [u * v % p for u, v in both]
    assert field.decode(field.sub(a, b)) == [(u - v) % p for u, v in both]
    assert field.decode(field.sum(a)) == sum(x) % p
    assert field.decode(field.dot(a, b)) == sum(u * v for u, v in both) % p
    array = field.array(a)
    assert array.device == "cuda:0"
    assert ((array + 1) * b).canonical().is_cuda
    assert ((array + 1) ** 3 * b).ints() == [(u + 1) ** 3 * v % p for u, v in both]
    assert (array == array).all()
    assert array[1:][::3][:5].ints() == x[1:][::3][:5]
    assert array.reshape(-1, len(edges(p))).sum(0).ints() == [
        sum(x[i :: len(edges(p))]) % p for i in range(len(edges(p)))
    ]
    assert_raises(FormatError, r"x\[0\] \(flattened\) is 0, which has no inverse", lambda: field.inv(a))
    words, value = unreduced(field)
    assert_raises(FormatError, rf"x\[1\] \(flattened\) is {value}", lambda: field.neg(torch.from_numpy(words).cuda()))
    assert field.decode(field.neg(torch.from_numpy(words).cuda(), reduce=True)) == [0, -value % p, p - 2]
    host = field.mul(field.encode(x), field.encode(y), device="cuda")
    assert isinstance(host, np.ndarray)
    assert field.decode(host) == [u * v % p for u, v in both]
    odd = torch.cat([a.reshape(-1)[:1].view(torch.uint8), a.reshape(-1).view(torch.uint8)])
    odd = odd[a.element_size() :].view(a.dtype).reshape(a.shape)  # begins at the second word
    assert field.decode(field.neg(odd)) == [-u % p for u in x]


def test_words_as_tensors_of_a_device(one_of_each, monkeypatch):
    """What CUDA's arrays go through, with the CPU in its place."""
    from accelerant.algebra.field import memory_space

    field, p = one_of_each, one_of_each.modulus
    monkeypatch.setattr(memory_space, "space_of", lambda tensor: memory_space._TensorSpace("cpu", 0))
    words = field.random((3, 5))
    values = np.array(field.decode(words), object)
    a = torch.from_numpy(words)
    x = field.array(a)
    assert x.device == "cpu:0"
    assert isinstance(x.words, torch.Tensor)
    assert ((x + 1) * a - x[0]).ints() == (((values + 1) * values - values[0]) % p).tolist()
    assert (x.reshape(5, 3)[1:, None, ::2] ** 3).ints() == (values.reshape(5, 3)[1:, None, ::2] ** 3 % p).tolist()
    assert (x == a).all()
    assert (x[:, 1] != x[:, 1]).sum() == 0
    for axis in (None, 0, 1):
        assert x.sum(axis).ints() == np.asarray(values.sum(axis=axis) % p).tolist()
    long = torch.from_numpy(field.random((2, 5001)))
    assert field.decode(field.sum(long, 1)) == [sum(row) % p for row in field.decode(long)]
    assert field.mul(a, 2).dtype == a.dtype
    assert field.mul(a.transpose(0, 1) if field.limbs == 1 else a.transpose(0, 1)[::2], 1).dtype == a.dtype
    bad, value = unreduced(field)
    assert_raises(FormatError, rf"x\[1\] \(flattened\) is {value}", lambda: field.neg(torch.from_numpy(bad)))
    assert field.decode(torch.from_numpy(bad), reduce=True) == [0, value % p, 2]
    assert_raises(FormatError, r"x\[2\] \(flattened\) is 0", field.inv, torch.from_numpy(field.encode([1, 2, 0])))
    one_word_on = torch.cat([a.reshape(-1)[:1].view(torch.uint8), a.reshape(-1).view(torch.uint8)])
    one_word_on = one_word_on[a.element_size() :].view(a.dtype).reshape(a.shape)
    assert field.decode(field.neg(one_word_on)) == (-values % p).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_kernels_on_cuda_check_what_they_read(name):
    """Errors name the element as on the CPU, the next call does not see them, and `out` keeps its content."""
    field = field_of(name)
    words, value = unreduced(field)
    bad, n = torch.from_numpy(words).cuda(), 1 << 12
    good = torch.from_numpy(field.encode([1, 2, 3])).cuda()
    calls = (lambda x: field.add(x, good), lambda x: field.mul(x, x), field.square, field.neg, field.inv, field.sum)
    for call in calls:
        with pytest.raises(FormatError, match=rf"^x\[1\] \(flattened\) is {value}, not below"):
            call(bad)
        call(good)
    assert_raises(FormatError, rf"^y\[1\] \(flattened\) is {value}", lambda: field.sub(good, bad))
    assert field.decode(field.add(good, 1)) == [2, 3, 4]
    assert field.decode(field.add(good[:0], good[:0])) == []
    if 1 << field.parameters.two_adicity < n:
        return  # the field has no transform of this size
    x = torch.from_numpy(field.random(n)).cuda()
    expected = accelerant.zk.ntt(x.cpu().numpy(), name)
    signed = torch.int64 if x.element_size() == 8 else torch.int32
    for at in (0, n // 2, n - 1):
        wrong, out = x.clone(), torch.empty_like(x)
        wrong.view(signed)[at] = bad.view(signed)[1]
        before = out.cpu().numpy()
        for target in (None, out, wrong):
            with pytest.raises(FormatError, match=rf"^x\[{at}\] \(flattened\) is {value}"):
                accelerant.zk.ntt(wrong, name, out=target)
        assert np.array_equal(out.cpu().numpy(), before)
        assert np.array_equal(accelerant.zk.ntt(x, name).cpu().numpy(), expected)


@pytest.mark.gpu
def test_calls_on_streams_and_threads_are_judged_apart():
    field = field_of("goldilocks")
    good = torch.from_numpy(field.random(1 << 16)).cuda()
    bad = good.clone()
    bad.view(torch.int64)[4321] = -1
    torch.cuda.synchronize()

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(50):
                if (i + number) % 2:
                    assert_raises(FormatError, r"x\[4321\]", lambda: field.neg(bad))
                else:
                    assert np.array_equal(field.neg(field.neg(good)).cpu().numpy(), good.cpu().numpy())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
