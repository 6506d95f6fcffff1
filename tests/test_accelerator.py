import asyncio
import dataclasses
import inspect
import json
import math
import threading
import warnings
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import accelerant
from accelerant import Accelerator, AcceleratorConfig, ComputeBackend, errors, ops
from accelerant.accelerator import facade, methods
from accelerant.accelerator.methods import METHODS, sizes_of
from accelerant.algebra.field.parameters import field_of
from accelerant.config import override, settings
from accelerant.errors import BackendUnavailable, ConfigError, FallbackWarning, FormatError, UnsupportedDtype
from accelerant.nn.train import fit
from accelerant.ops.registry import public_ops
from accelerant.runtime import registry, time_limit
from accelerant.runtime.streams.transfer import copy_async
from accelerant.service import Client
from processes import in_threads
from refusals import assert_raises
from requirements import require_backend

P = field_of("goldilocks").modulus


@pytest.fixture
def acc():
    with Accelerator("cpu") as accelerator:
        yield accelerator


def absent_backend():
    return next(name for name in registry.BACKENDS if registry.reason_absent(name))


def test_the_example_of_the_documentation(acc):
    assert acc.field_add([1, 2, 3, 4], [5, 6, 7, 8]).tolist() == [6, 8, 10, 12]


def test_operations_agree_with_torch_and_numpy(acc):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 6)).astype(np.float32)
    w, b = rng.standard_normal((2, 6)).astype(np.float32)
    t = torch.from_numpy(x)
    expected = {
        "gelu": (acc.gelu(x), torch.nn.functional.gelu(t)),
        "softmax": (acc.softmax(x, dim=0), t.softmax(0)),
        "layer_norm": (acc.layer_norm(x, w, b), torch.layer_norm(t, (6,), torch.from_numpy(w), torch.from_numpy(b))),
        "matmul": (acc.matmul(x, x.T.copy()), t @ t.T),
    }
    for name, (ours, theirs) in expected.items():
        assert isinstance(ours, np.ndarray), name
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


OPS = {name: op for name, op in public_ops().items() if op.package.startswith("accelerant.")}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", OPS)
def test_every_op_takes_arrays_and_gives_what_it_gives_for_tensors(acc, name):
    """On each sample of the op, by position and by name, alone and in a batch; with the exact bytes of the result."""
    assert set(OPS) == set(ops.__all__) <= set(METHODS)
    signature = inspect.signature(getattr(acc, name))
    assert list(signature.parameters) == list(inspect.signature(OPS[name].function).parameters)
    for sample in OPS[name].cases.SAMPLES:
        if max((math.prod(shape) for shape in sample.shapes if shape), default=0) > 1000:
            continue
        tensors = sample.tensors(torch.float32)
        arrays = [None if x is None else x.numpy() for x in tensors]
        wanted = OPS[name].function(*tensors, **sample.options)
        named = dict(zip(signature.parameters, arrays, strict=False)) | dict(sample.options)
        with acc.batch() as batch:
            later = getattr(batch, name)(*arrays, **sample.options)
        for found in (getattr(acc, name)(*arrays, **sample.options), getattr(acc, name)(**named), later.result()):
            assert type(found) is (tuple if isinstance(wanted, tuple) else type(found))
            parts, theirs = ((each,) if not isinstance(each, tuple) else each for each in (found, wanted))
            for ours, tensor in zip(parts, theirs, strict=True):
                assert isinstance(ours, (np.ndarray, np.generic))
                np.testing.assert_array_equal(ours, tensor.numpy(), strict=bool(tensor.dim()))
        inputs, result = sizes_of(name, tuple(x for x in arrays if x is not None), sample.options | fixed_of(arrays))
        assert inputs == sum(x.nbytes for x in arrays if x is not None)
        assert result == sum(x.nbytes for x in (wanted if isinstance(wanted, tuple) else (wanted,)))


def test_arrays_by_keyword(acc):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 5, 8)).astype(np.float32)
    mask = rng.random((5, 5)) > 0.3
    expected = ops.attention(*map(torch.from_numpy, (q, k, v)), mask=torch.from_numpy(mask))
    np.testing.assert_array_equal(acc.attention(q, k, v, mask=mask), expected.numpy())
    with acc.batch() as batch:
        same = [batch.attention(q, k, v, mask=mask) for _ in range(3)]
    for each in same:
        np.testing.assert_allclose(each.result(), expected.numpy(), rtol=1e-5, atol=1e-6)
    weight = rng.random(8).astype(np.float32)
    x, t = rng.random((2, 4, 8)).astype(np.float32)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.from_numpy(x), torch.from_numpy(t), pos_weight=torch.from_numpy(weight)
    )
    assert acc.binary_cross_entropy_with_logits(x, t, pos_weight=weight) == pytest.approx(float(expected), rel=1e-6)


def fixed_of(arrays):
    return {"fixed": tuple((i, None) for i, x in enumerate(arrays) if x is None)}


def test_every_op_takes_jax_arrays(acc):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    for name, op in OPS.items():
        sample = next(each for each in op.cases.SAMPLES if all(shape and 0 not in shape for shape in each.shapes))
        tensors = [x.int() if x is not None and x.dtype == torch.int64 else x for x in sample.tensors(torch.float32)]
        found = getattr(acc, name)(*[jax.numpy.asarray(x.numpy()) for x in tensors], **sample.options)
        for y in found if isinstance(found, tuple) else (found,):
            assert isinstance(y, jax.Array)


def test_numbers_and_lists_take_the_dtype_of_the_arrays_beside_them(acc):
    x = np.linspace(-1, 1, 6).reshape(2, 3)
    assert acc.add(x, 1).dtype == acc.add(1, x).dtype == acc.mul(x, [1, 2, 3]).dtype == np.float64
    np.testing.assert_array_equal(acc.mul(2, x), 2 * x)
    np.testing.assert_array_equal(acc.add(x, np.float32(0.5)), x + 0.5)
    assert acc.layer_norm(x, [1, 1, 1], [0, 0, 0]).dtype == np.float64
    half = torch.ones(3, dtype=torch.bfloat16)
    y = acc.mul([1.0, 2.0, 3.0], half)
    assert isinstance(y, torch.Tensor)
    assert y.dtype == torch.bfloat16
    assert acc.gelu(np.float64(1.5)).dtype == np.float64
    assert acc.add(1, 2) == 3
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(acc.embedding([3, 1], table), table[[3, 1]])
    assert acc.cross_entropy([[2.0, 0.0]], [0]) == pytest.approx(0.126928, rel=1e-5)
    np.testing.assert_array_equal(acc.relu([-1, 2]), [0, 2])
    np.testing.assert_array_equal(acc.softmax(x, axis=0), acc.softmax(x, 0))
    np.testing.assert_array_equal(acc.softmax(input=x, dim=0), acc.softmax(x, 0))
    q = np.ones((1, 2, 3, 4), np.float32)
    np.testing.assert_array_equal(acc.attention(query=q, key=q, value=q, is_causal=True), acc.attention(q, q, q, True))
    np.testing.assert_array_equal(acc.layer_norm(x, None, x[0], 0.5), acc.layer_norm(x, bias=x[0], eps=0.5))


def test_arguments_that_an_op_does_not_take_are_named(acc):
    assert_raises(UnsupportedDtype, "wanted integers, got float64", acc.embedding, [0.5], np.zeros((2, 2), np.float32))
    assert_raises(TypeError, "relu: got an unexpected keyword argument 'inplace'", acc.relu, [1.0], inplace=True)
    with pytest.raises(TypeError, match=r"softmax\(\) got x= also by torch's name"):
        acc.softmax(x=np.zeros((2, 2)), input=np.zeros((2, 2)))
    with pytest.raises(TypeError, match="conv2d: missing a required argument: 'weight'"):
        acc.conv2d(np.zeros((1, 1, 2, 2), np.float32))
    with pytest.raises(ConfigError, match="axis is another name of dim; got dim=0 and axis=1"):
        acc.softmax(np.zeros((2, 2)), dim=0, axis=1)
    assert_raises(UnsupportedDtype, r"got builtins\.NoneType", acc.add, None, 1)


def test_linear_layers_are_joined_and_cut_along_rows():
    rng = np.random.default_rng(4)
    x, w, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 4), (3, 4), (3,)))
    with Accelerator("cpu") as whole, Accelerator("cpu", config=AcceleratorConfig(batch_size=2)) as parts:
        wanted = whole.linear_gelu(x, w, b)
        np.testing.assert_allclose(parts.linear_gelu(x, w, b), wanted, rtol=1e-6)
        with whole.batch() as batch:
            answers = [batch.linear_gelu(x[low:high], w, b) for low, high in ((0, 1), (1, 1), (1, 5))]
            single = batch.linear_gelu(x[0], w, b)
        assert batch.launches == 1
        np.testing.assert_allclose(np.concatenate([each.result() for each in answers]), wanted, rtol=1e-6)
        np.testing.assert_allclose(single.result(), wanted[0], rtol=1e-6)


def test_answers_are_of_the_kind_that_was_given(acc):
    assert isinstance(acc.gelu([0.0, 1.0]), np.ndarray)
    assert acc.gelu([0.0, 1.0]).dtype == np.float32
    assert isinstance(acc.gelu(np.zeros((2, 3))), np.ndarray)
    assert isinstance(acc.gelu(torch.zeros(2)), torch.Tensor)
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    assert acc.gelu(frozen).tolist() == [0.0, 0.0, 0.0]


def test_jax_arrays_come_back_as_jax_arrays(acc):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    x = jax.numpy.asarray([[-1.0, 0.5], [2.0, 3.0]])
    y = acc.softmax(x)
    assert isinstance(y, jax.Array)
    np.testing.assert_allclose(np.asarray(y), np.asarray(jax.nn.softmax(x)), rtol=1e-6)


@pytest.mark.gpu
def test_cupy_arrays_come_back_as_cupy_arrays_in_stream_order():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    with Accelerator("cuda", fallback=False) as acc, cupy.cuda.Stream(non_blocking=True):
        x = cupy.random.standard_normal((2048, 2048), dtype=cupy.float32)
        for _ in range(20):
            x = x * cupy.float32(1.0001)  # still running when the call begins
        y = acc.gelu(x)
        assert isinstance(y, cupy.ndarray)
        expected = torch.nn.functional.gelu(torch.as_tensor(cupy.asnumpy(x)))
        np.testing.assert_allclose(cupy.asnumpy(y), expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_every_op_takes_cupy_arrays():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    with Accelerator("cuda", fallback=False) as acc:
        for name, op in OPS.items():
            sample = next(each for each in op.cases.SAMPLES if all(shape and 0 not in shape for shape in each.shapes))
            arrays = [cupy.asarray(x.numpy()) for x in sample.tensors(torch.float32)]
            found = getattr(acc, name)(*arrays, **sample.options)
            for y in found if isinstance(found, tuple) else (found,):
                assert isinstance(y, cupy.ndarray)


@pytest.mark.gpu
def test_jax_gpu_arrays_and_host_arrays_on_a_gpu():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    with Accelerator("cuda", fallback=False) as acc:
        x = jax.numpy.linspace(-3, 3, 1000).reshape(10, 100)
        y = acc.gelu(x)
        assert isinstance(y, jax.Array)
        np.testing.assert_allclose(np.asarray(y), np.asarray(jax.nn.gelu(x, approximate=False)), rtol=1e-4, atol=1e-5)
        host = acc.field_add(np.array([P - 1], np.uint64), np.array([2], np.uint64))
        assert host.tolist() == [1]
        on_host = torch.linspace(-1, 1, 9)
        assert acc.gelu(on_host).device.type == "cpu"
        assert acc.gelu(on_host.cuda()).device.type == "cuda"


def test_strings_and_strangers_are_refused(acc):
    for stranger in ("abc", object(), {1: 2}, None):
        assert_raises(UnsupportedDtype, "wanted an array of NumPy, torch, CuPy or JAX", acc.gelu, stranger)
    numba = SimpleNamespace(
        __cuda_array_interface__={"shape": (4,), "typestr": "<f4", "data": (0, False), "version": 3}
    )
    for call in (acc.gelu, lambda x: accelerant.kernel("ACL_KERNEL void f(ACL_GLOBAL float *y) {}")(1, 1, x)):
        with pytest.raises(
            (UnsupportedDtype, errors.LaunchError), match=r"wanted an array .*; torch.as_tensor\(x\) shares"
        ):
            call(numba)
    assert_raises(UnsupportedDtype, None, acc.gelu, [["ragged"], [1.0, 2.0]])
    assert_raises(FormatError, r"y\[1\] \(flattened\) is -1, negative", acc.field_add, [0, 0], [0, -1])
    assert_raises(UnsupportedDtype, r"x\[0\] \(flattened\) is 0.5, not an integer", acc.field_add, [0.5], [0])
    assert_raises(FormatError, rf"x\[1\] .* is {P}", acc.field_add, [0, P], [0, 0])
    assert_raises(errors.ShapeError, None, acc.field_add, [1, 2, 3], [1, 2])


# --- fields ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["goldilocks", "babybear", "bn254_fr"])
def test_field_operations_are_exact_in_every_field_on_every_kind_of_array(acc, name):
    field = accelerant.zk.field(name)
    p = field.modulus
    x, y = [1, p - 1, p // 2, 12345], [p - 1, p - 1, 3, p - 2]
    expected = {
        "field_add": [(a + b) % p for a, b in zip(x, y, strict=True)],
        "field_sub": [(a - b) % p for a, b in zip(x, y, strict=True)],
        "field_mul": [a * b % p for a, b in zip(x, y, strict=True)],
        "field_inv": [pow(a, -1, p) for a in x],
    }
    for call, answer in expected.items():
        arguments = (x,) if call == "field_inv" else (x, y)
        words = [field.encode(each) for each in arguments]
        for kind in (lambda each: each, torch.from_numpy):
            found = getattr(acc, call)(*map(kind, words), field=name)
            assert type(found) is type(kind(words[0]))
            assert field.decode(found) == answer, call
        assert field.decode(getattr(acc, call)(*arguments, field=name)) == answer
        assert field.decode(getattr(acc, call)(*arguments, field)) == answer
    single = acc.field_mul(p - 1, 2, field=name)
    assert field.decode(single.reshape(field.encode([0]).shape)) == [p - 2]
    assert acc.metrics()["field_mul"]["flops"] == 4 * 4 + 1


def test_field_operations_on_jax_arrays(acc):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    field = accelerant.zk.field("babybear")  # 32-bit words: the 64-bit ones need JAX's x64 mode
    x = jax.numpy.asarray(field.encode([2, 3]))
    y = acc.field_mul(x, x, field="babybear")
    assert isinstance(y, jax.Array)
    assert field.decode(np.asarray(y)) == [4, 9]


def test_field_arrays_of_several_limbs_are_neither_cut_nor_joined_within_an_element():
    field = accelerant.zk.field("bn254_fr")
    x = field.encode([3, 5, 7, 11, 13])
    with Accelerator("cpu", config=AcceleratorConfig(batch_size=2)) as acc:
        assert field.decode(acc.field_mul(x, x, field="bn254_fr")) == [9, 25, 49, 121, 169]
        assert field.decode(acc.field_mul(x[0], x[1], field="bn254_fr")) == 15
        assert field.decode(acc.field_mul(x, x[1], field="bn254_fr")) == [15, 25, 35, 55, 65]
        with acc.batch() as batch:
            products = [batch.field_mul(x[:n], x[:n], field="bn254_fr") for n in (1, 3, 5)]
            single = batch.field_mul(x[2], x[2], field="bn254_fr")
            other = batch.field_mul([2], [3], field="babybear")
        assert batch.launches == 2  # one of each field
        assert [field.decode(each.result()) for each in products] == [[9], [9, 25, 49], [9, 25, 49, 121, 169]]
        assert field.decode(single.result()) == 49
        assert other.result().tolist() == [6]
        batch = acc.batch()
        batch.field_inv([4, 0], field="bn254_fr")
        with pytest.raises(FormatError, match=r"x\[1\] .* is 0, which has no inverse"), batch:
            pass


def test_words_that_are_not_the_fields_are_refused(acc):
    with pytest.raises(ConfigError, match="unknown field 'cornfield'; known are goldilocks, babybear"):
        acc.field_mul([1], [2], field="cornfield")
    with pytest.raises(errors.ShapeError, match=r"y must end in an axis of the 4 limbs of bn254_fr, got shape \(3,\)"):
        acc.field_sub([1], np.zeros(3, np.uint64), field="bn254_fr")
    with pytest.raises(UnsupportedDtype, match="x must be uint64, got int64: view it"):
        acc.field_add(torch.zeros(3, dtype=torch.int64), [1, 2, 3])
    assert_raises(UnsupportedDtype, "x must be uint64, got >u8: astype", acc.field_add, np.zeros(3, ">u8"), [1, 2, 3])


@pytest.mark.slow
def test_transforms_of_goldilocks_by_default(acc):
    x = np.array([1, 2, 3, 4, 0, 0, 0, 5], np.uint64)
    y = acc.ntt(x)
    assert y.dtype == np.uint64
    assert int(y[0]) == 15
    np.testing.assert_array_equal(acc.ntt(y, inverse=True), x)
    shifted = acc.ntt([1, 2, 3, 4], coset=7, order="natural_to_bit_reversed")
    back = acc.ntt(shifted, coset=7, order="bit_reversed_to_natural", inverse=True)
    assert back.tolist() == [1, 2, 3, 4]
    assert_raises(errors.ShapeError, "power of two of points from 2 to 2\\^27, got 3", acc.ntt, [1, 2, 3])
    assert acc.metrics()["ntt"]["errors"] == 1
    for each in (acc, acc.batch()):
        with pytest.raises(ConfigError, match="coset must be a Python integer here, got ndarray"):
            each.ntt([1, 2, 3, 4], coset=np.array([7], np.uint64))


def test_transforms_of_one_shape_become_one_launch(acc):
    fr = accelerant.zk.field("bn254_fr")
    xs = [fr.random(8) for _ in range(3)]
    with acc.batch() as batch:
        answers = [batch.ntt(x, field="bn254_fr") for x in xs]
    for x, answer in zip(xs, answers, strict=True):
        np.testing.assert_array_equal(answer.result(), accelerant.zk.ntt(x, "bn254_fr"))
    assert batch.launches == 1


def test_sums_of_multiples(acc):
    group = accelerant.zk.curve("bn254_g1")
    points = group.mul(group.generator, [1, 2, 3])
    expected = group.mul(group.generator, [14])[0]
    np.testing.assert_array_equal(acc.msm([1, 2, 3], points), expected)
    words = group.scalar_field.encode([1, 2, 3])
    as_tensor = acc.msm(torch.from_numpy(words), torch.from_numpy(points))
    assert isinstance(as_tensor, torch.Tensor)
    np.testing.assert_array_equal(as_tensor.numpy(), expected)
    np.testing.assert_array_equal(acc.msm(group.scalar_field.array([1, 2, 3]), points), expected)
    refused = assert_raises(FormatError, r"scalars\[1\]", lambda: acc.msm([1, group.order], points[:2]))
    assert str(group.order) not in str(refused)
    off = points.copy()
    off[2, 0, 0] ^= np.uint64(1)
    assert_raises(FormatError, r"points\[2\]", acc.msm, [1, 2, 3], off)
    np.testing.assert_array_equal(acc.msm([1], [(1, 2)]), accelerant.zk.msm([1], [(1, 2)]))


def test_attention_agrees_with_torch(acc):
    q, k, v = np.random.default_rng(2).standard_normal((3, 1, 2, 5, 8)).astype(np.float32)
    theirs = torch.nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)), is_causal=True)
    np.testing.assert_allclose(acc.attention(q, k, v, causal=True), theirs.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batched", [False, True])
def test_arrays_without_dimensions_stay_so(acc, batched):
    words, number = np.array(7, np.uint64), np.array(1.5, np.float32)
    calls = {
        "field_add": ((words, words), 14), "field_inv": ((words,), pow(7, -1, P)), "gelu": ((number,), None),
        "softmax": ((number,), 1), "field_mul": ((3, 4), 12),
    }  # fmt: skip
    for name, (arrays, wanted) in calls.items():
        if batched:
            with acc.batch() as batch:
                answers = [getattr(batch, name)(*arrays) for _ in range(2)]
            results = [answer.result() for answer in answers]
        else:
            results = [getattr(acc, name)(*arrays)]
        for result in results:
            assert result.shape == ()
            assert np.isscalar(result)  # as NumPy's own functions return
            assert wanted is None or result == wanted
    assert isinstance(acc.gelu(torch.tensor(1.5)), torch.Tensor)


def test_tensors_without_dense_values_are_refused(acc):
    x = torch.ones(2, 3)
    for given in (x.to_sparse(), x.to_sparse_csr(), x.to("meta"), torch.nested.as_nested_tensor([x[0], x[1]])):
        assert_raises(errors.UnsupportedCase, r"the array is a .* tensor; wanted a dense one", acc.gelu, given)
    with pytest.raises(errors.UnsupportedCase, match="an argument of gelu_fwd is a sparse_coo tensor"):
        accelerant.ops.gelu(x.to_sparse())


def test_masked_arrays_are_refused(acc):
    """Their data would be computed with, and the mask lost."""
    words = np.ma.masked_array(np.arange(4, dtype=np.uint64), [0, 1, 0, 0])
    field = accelerant.zk.field("goldilocks")
    for call in (
        lambda: acc.gelu(words.astype(np.float32)), lambda: acc.field_add(words, words), lambda: acc.ntt(words),
        lambda: field.add(words, words), lambda: accelerant.zk.ntt(words, field="goldilocks"),
        lambda: acc.msm(np.ma.masked_array(np.zeros((2, 4), np.uint64)), [(1, 2), (1, 2)]),
        lambda: registry.create("cpu").copy_to_device(words), lambda: copy_async(words, "cpu"),
        lambda: fit(torch.nn.Linear(1, 2), words[:, None].astype(np.float32), words.data.astype(np.int64)),
        lambda: Client("http://127.0.0.1:9").gelu(words),
    ):  # fmt: skip
        assert_raises(UnsupportedDtype, "masked array", call)


def test_close_waits_for_submitted_calls():
    acc, gate = Accelerator("cpu"), threading.Event()
    calls = [acc.submit(gate.wait, 5.0), acc.submit(acc.gelu, [0.0]), acc.submit(lambda: acc.submit(acc.gelu, [0.0]))]
    threading.Timer(0.1, gate.set).start()
    acc.close()
    assert all(call.done() for call in calls)
    assert calls[1].result().tolist() == calls[2].result().result().tolist() == [0.0]
    assert_raises(errors.AccelerantError, "was closed", acc.submit, acc.gelu, [0.0])


def test_a_submitted_call_that_closes_is_an_error():
    acc = Accelerator("cpu")
    assert_raises(errors.AccelerantError, "waits for itself", lambda: acc.submit(acc.close).result(60))
    acc.close()


def test_use_after_close_is_an_error():
    acc = Accelerator("cpu")
    acc.close()
    acc.close()
    for use in (lambda: acc.gelu([1.0]), acc.memory, acc.synchronize, acc.benchmark, acc.__enter__):
        assert_raises(errors.AccelerantError, "was closed", use)
    assert "closed" in repr(acc)


def test_metrics_count_calls_errors_bytes_and_times(acc):
    assert acc.metrics() == {}
    for _ in range(5):
        acc.gelu(np.zeros((8, 8), np.float32))
    assert_raises(UnsupportedDtype, None, acc.gelu, None)
    figures = acc.metrics()["gelu"]
    assert (figures["calls"], figures["errors"], figures["fallbacks"]) == (6, 1, 0)
    assert figures["bytes"] == 5 * 2 * 256
    assert figures["flops"] > 0
    assert 0 < figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"]


def test_calls_from_threads_are_counted(acc):
    def work():
        for _ in range(50):
            acc.field_add([1], [2])

    in_threads([work] * 4)
    assert acc.metrics()["field_add"]["calls"] == 200


@pytest.mark.slow
def test_benchmark_covers_every_operation_and_counts_nothing(acc):
    results = acc.benchmark(iterations=2, size=8)
    assert set(results) == set(METHODS)
    for figures in results.values():
        assert 0 < figures["p50_ms"] <= figures["p99_ms"]
        assert figures["gb_per_s"] > 0
        assert figures["gflop_per_s"] >= 0  # embedding only copies
    assert acc.metrics() == {}
    for bad in (0, -1, 1.5, True):
        assert_raises(ConfigError, "iterations must be a whole number", acc.benchmark, iterations=bad)


def test_a_benchmark_on_own_data_times_every_implementation_and_marks_the_chosen(acc):
    x = np.random.default_rng(3).standard_normal((8, 16)).astype(np.float32)
    found = acc.benchmark("gelu", x, approximate="tanh", iterations=20)
    chosen, refused, whole = found.timings
    assert (chosen.name, chosen.chosen, chosen.calls) == ("torch", True, 20)
    assert 0 < chosen.p50_ms <= chosen.p95_ms
    assert chosen.p99_ms is None  # of 100 calls or more
    assert (refused.name, refused.own, refused.p50_ms, refused.note) == ("triton", True, None, "no Triton on cpu")
    assert (whole.name, whole.chosen) == ("whole call", False)
    assert (found.case, found.size_bytes, found.flops) == ("8x16 float32", 2 * x.nbytes, 10 * x.size)
    assert str(found).splitlines()[2].startswith("*  torch (library)")
    assert json.loads(json.dumps(found.to_dict()))["op"] == "gelu"
    large = acc.benchmark(ops.dropout, np.ones((256, 512), np.float32), iterations=3).timings
    assert [(one.name, one.own, one.p50_ms is not None) for one in large[:3]] == [
        ("llvm", True, True), ("triton", True, False), ("torch", False, True),
    ]  # fmt: skip
    words = np.arange(8, dtype=np.uint64)
    assert acc.benchmark("field_add", words, words, field="goldilocks", iterations=3).flops == 8
    assert acc.metrics() == {}


def test_a_benchmark_that_cannot_run_is_refused(acc):
    x = np.ones((2, 2), np.float32)
    for arguments, error, message in [
        (("abacus", x), ConfigError, "no operation 'abacus'; there are gelu"),
        (("gelu",), TypeError, "missing a required argument"),
        (("gelu", x.astype(np.int32)), UnsupportedDtype, "x is int32"),
    ]:
        assert_raises(error, message, acc.benchmark, *arguments)
    assert_raises(ConfigError, "iterations must be a whole number", acc.benchmark, "gelu", x, iterations=0)
    small = AcceleratorConfig(memory_limit_bytes=8)
    with Accelerator("cpu", config=small) as limited, pytest.raises(errors.OutOfMemory, match="the limit is 8"):
        limited.benchmark("gelu", x)


def test_batches_give_the_same_answer():
    x = np.random.default_rng(1).standard_normal((10, 7)).astype(np.float32)
    w = np.ones(7, np.float32)
    with Accelerator("cpu") as whole, Accelerator("cpu", config=AcceleratorConfig(batch_size=3)) as batched:
        np.testing.assert_array_equal(whole.gelu(x), batched.gelu(x))
        np.testing.assert_array_equal(whole.layer_norm(x, w, w), batched.layer_norm(x, w, w))
        np.testing.assert_array_equal(whole.softmax(x, 0), batched.softmax(x, 0))
        ones = np.arange(10, dtype=np.uint64)
        assert batched.field_add(ones, ones).tolist() == (2 * ones).tolist()


def test_square_weights_are_not_cut_with_the_rows():
    x = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)
    w = np.array([1, 2, 3, 4], np.float32)
    with Accelerator("cpu") as whole, Accelerator("cpu", config=AcceleratorConfig(batch_size=3)) as batched:
        np.testing.assert_array_equal(whole.layer_norm(x, w, w), batched.layer_norm(x, w, w))


@pytest.mark.parametrize("x", [[1j], ["1.5"], [b"1"], [np.datetime64("2020")], [1, None]])
def test_lists_of_what_is_no_real_number_are_refused(x):
    """NumPy drops imaginary parts, reads numbers in texts, and makes NaN of None."""
    with Accelerator("cpu") as acc, pytest.raises(UnsupportedDtype, match="wanted real numbers, got"):
        acc.gelu(x)


def test_a_call_past_its_time_or_memory_limit_says_so():
    x = np.zeros((100, 1000), np.float32)
    slow = AcceleratorConfig(batch_size=1, timeout_s=1e-9)
    with Accelerator("cpu", config=slow) as acc, pytest.raises(errors.TimeLimitExceeded, match=r"gelu: .* of 100 rows"):
        acc.gelu(x)
    small = AcceleratorConfig(memory_limit_bytes=799_999)
    with Accelerator("cpu", config=small) as acc:
        with pytest.raises(
            errors.OutOfMemory, match="gelu: inputs and result take 800,000 bytes; the limit is 799,999"
        ):
            acc.gelu(x)
        acc.gelu(x[:50])
        assert_raises(UnsupportedDtype, "cannot take this numpy array", acc.gelu, [[1.0], [1.0, 2.0]])


@pytest.mark.parametrize("call", [
    lambda acc: acc.gelu(np.zeros((8, 8), np.float32)),
    lambda acc: acc.ntt([1, 2, 3, 4]),
    lambda acc: acc.msm([1], [(1, 2)]),
    lambda acc: acc.attention(*np.zeros((3, 1, 2, 5, 8), np.float32)),
], ids=["gelu", "ntt", "msm", "attention"])  # fmt: skip
def test_the_time_limit_holds_for_calls_in_one_piece(call, monkeypatch):
    """A call that began in time and took too long ends in an error, too."""
    now = iter([0.0, 0.5, *[2.0] * 10])
    monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with Accelerator("cpu", config=AcceleratorConfig(timeout_s=1.0)) as acc:
        assert_raises(errors.TimeLimitExceeded, r"2 s of at most 1 s at its end", call, acc)
        monkeypatch.undo()
        call(acc)


def test_an_option_that_is_none_is_unset():
    fields = {each.name: None for each in dataclasses.fields(AcceleratorConfig)}
    assert AcceleratorConfig(**fields) == AcceleratorConfig()
    assert Accelerator("cpu", config=AcceleratorConfig(**fields)).relu([-1.0]).tolist() == [0.0]


@pytest.mark.parametrize("name", ["batch_size", "timeout_s", "memory_limit_bytes"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), True])
def test_limits_without_meaning_are_refused(name, value):
    assert_raises(ConfigError, f"{name} must be above 0", AcceleratorConfig, **{name: value})


def test_a_call_runs_under_the_policy_of_its_accelerator(monkeypatch):
    seen, run = [], METHODS["relu"].run

    def seeing(*tensors, **options):
        seen.append(settings().fallback)
        return run(*tensors, **options)

    monkeypatch.setitem(METHODS, "relu", replace(METHODS["relu"], run=seeing))
    with Accelerator("cpu", fallback="forbid") as strict, Accelerator("cpu", fallback="warn") as warned:
        for policy in ("allow", "forbid"):
            with override(fallback=policy):
                strict.relu([1.0])
                warned.relu([1.0])
    assert seen == ["forbid", "warn"] * 2


def test_an_absent_backend_raises_or_falls_back_with_a_warning():
    name = absent_backend()
    assert_raises(BackendUnavailable, name, Accelerator, name, fallback=False)
    with pytest.warns(FallbackWarning, match=f"{name} is not used"):
        Accelerator(name)
    with pytest.warns(FallbackWarning, match=f"{name} is not used"):  # each one that is made
        acc = Accelerator(name)
    assert acc.backend == registry.find_device("auto").backend
    assert any(entry["wanted"] == name for entry in accelerant.ledger().to_dict()["fallbacks"])


@pytest.mark.parametrize("form", ["cpu", "CPU:0", torch.device("cpu"), registry.find_device("cpu"), ComputeBackend.CPU])
def test_a_device_is_given_in_any_form(form):
    for given in (
        {"device": form},
        {"backend": form},
        {"backend": "auto", "device": form},
        {"backend": form, "device": 0},
    ):
        assert Accelerator(**given).device.label == Accelerator(form, 0).device.label == "cpu:0"
    with override(backend="cpu"):
        for given in ({}, {"device": None}, {"device": "auto"}, {"backend": None}, {"backend": "auto", "device": 0}):
            assert Accelerator(**given, fallback=None).device.label == "cpu:0"
    x = np.ones(2, np.float32)
    assert accelerant.fuse(lambda x: x + 1, device=form)(x).tolist() == [2, 2]
    assert accelerant.to(torch.ones(1), form).device == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"use_gpu=True and backend '(?i:cpu.*)' contradict"):
        Accelerator(device=form, config=AcceleratorConfig(use_gpu=True))


def test_an_absent_device_of_the_list_falls_back_or_says_why():
    absent = next(device for device in accelerant.devices() if not device.available)
    assert_raises(BackendUnavailable, absent.backend, Accelerator, device=absent, fallback=False)
    with pytest.warns(FallbackWarning, match=f"{absent.backend} is not used"):
        Accelerator(device=absent)


@pytest.mark.parametrize("index", [[0, 1], True, 0.0, "0"])
def test_a_device_is_one_number(index):
    for name in ("cpu", absent_backend()):
        with pytest.raises(ConfigError, match=r"device must be a number of the backend, such as 0; got"):
            Accelerator(name, device=index)


def test_backends_are_members_of_an_enumeration():
    assert tuple(ComputeBackend) == registry.BACKENDS
    assert Accelerator(ComputeBackend.CPU).backend == ComputeBackend.CPU
    assert registry.backend_named(ComputeBackend.METAL) == "apple"
    if registry.reason_absent("cuda"):
        with pytest.raises(BackendUnavailable, match="backend 'cuda' is not available"):
            Accelerator(ComputeBackend.CUDA, fallback=False)


def test_use_gpu_chooses_between_the_gpu_and_the_cpu():
    off, on = AcceleratorConfig(use_gpu=False), AcceleratorConfig(use_gpu=True, fallback=False)
    with override(backend="cuda"):
        assert Accelerator(config=off).backend == Accelerator("cpu", config=off).backend == "cpu"
    for setting in ("auto", "cpu"):
        with override(backend=setting):
            if registry.reason_absent(registry.backend_named("gpu")):
                assert_raises(BackendUnavailable, "backend 'cuda' is not available", Accelerator, config=on)
                with pytest.warns(FallbackWarning, match="is not used, cpu is"):
                    assert Accelerator(config=AcceleratorConfig(use_gpu=True, fallback="warn")).backend == "cpu"
            else:
                assert Accelerator(config=on).backend != "cpu"
    for backend, config in (("cpu:0", on), ("cuda", off)):
        with pytest.raises(ConfigError, match=f"use_gpu={config.use_gpu} and backend '{backend}' contradict"):
            Accelerator(backend, config=config)
    assert_raises(ConfigError, "use_gpu must be True, False or None, got 'yes'", AcceleratorConfig, use_gpu="yes")


def test_backend_by_environment_and_bad_names():
    with override(backend="cpu"):
        assert Accelerator().backend == "cpu"
    assert_raises(ConfigError, "unknown backend 'abacus'; known are cuda", Accelerator, "abacus")
    for bad in ({"backend": "cpu", "device": 3}, {"backend": "cpu:3"}):
        assert_raises(ConfigError, "there is no number 3", Accelerator, **bad)
    assert_raises(ConfigError, "device 'cpu:0' and index 1 are not the same device", Accelerator, "cpu:0", device=1)


def test_backends_have_the_names_that_people_call_them_by():
    for name in ("CPU", "cpu:0", torch.device("cpu"), " Cpu "):
        assert Accelerator(name).backend == registry.find_device(str(name)).backend == "cpu"
    other = {
        "CUDA": "cuda", "mps": "apple", "MPS:0": "apple", "apple_silicon": "apple", "Apple Silicon": "apple",
        "HIP": "rocm",
    }  # fmt: skip
    for name, backend in other.items():
        if registry.reason_absent(backend):
            for choose in (registry.find_device, lambda name: Accelerator(name, fallback=False)):
                assert_raises(BackendUnavailable, f"backend '{backend}' is not available", choose, name)
    with override(backend="CPU"):
        assert Accelerator().backend == "cpu"
    chosen = registry.find_device().backend
    assert registry.backend_named("GPU") == ("cuda" if chosen == "cpu" else chosen)
    assert_raises(ConfigError, r"unknown backend 'cudda' \(did you mean 'cuda'\?\)", Accelerator, "cudda")


@pytest.mark.parametrize(
    ("value", "policy"), [(True, "allow"), (False, "forbid"), ("False", "forbid"), ("true", "allow"), ("Warn", "warn")]
)
def test_the_fallback_is_a_policy_or_true_or_false(value, policy):
    assert Accelerator("cpu", config=AcceleratorConfig(fallback=value))._policy == policy
    assert Accelerator("cpu", fallback=value)._policy == policy
    with override(fallback=value):
        assert Accelerator("cpu")._policy == policy
    for refuse in (lambda: Accelerator("cpu", fallback="never"), lambda: AcceleratorConfig(fallback="never")):
        assert_raises(ConfigError, "fallback must be allow, warn or forbid, or true or false; got 'never'", refuse)


@pytest.mark.parametrize("backend", [pytest.param("opencl", marks=pytest.mark.slow), "webgpu"])  # PoCL takes 20 s
def test_a_backend_without_torch_tensors_has_operations_and_falls_back_for_the_rest(backend):
    require_backend(backend)
    x, q = np.array([1, P - 1], np.uint64), np.random.default_rng(0).standard_normal((1, 2, 5, 4), np.float32)
    with Accelerator(backend, fallback=False) as acc:
        assert acc.field_add(x, x).tolist() == [2, P - 2]
        np.testing.assert_allclose(acc.softmax([1.0, 1.0]), [0.5, 0.5], rtol=1e-5)
        np.testing.assert_allclose(acc.matmul(q[0, 0], q[0, 1].T), q[0, 0] @ q[0, 1].T, rtol=1e-5, atol=1e-6)
        with Accelerator("cpu") as host:
            for found, expected in (
                (acc.attention(q, q, q, causal=True), host.attention(q, q, q, causal=True)),
                (acc.layer_norm(q, q[0, 0, 0], q[0, 0, 1]), host.layer_norm(q, q[0, 0, 0], q[0, 0, 1])),
            ):
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(errors.UnsupportedCase, match=f"{backend}:0 has no kernel for this call"):
            acc.conv2d(np.ones((1, 1, 3, 3), np.float32), np.ones((1, 1, 2, 2), np.float32))
        np.testing.assert_allclose(acc.gelu([1.0, -2.0]), [0.841345, -0.0455], rtol=1e-3)
        acc.synchronize()
        assert acc.metrics()["field_add"]["p50_ms"] > 0
    ones, reason = np.ones((1, 1, 2, 2), np.float32), f"{backend}:0 has no kernel for this call"
    config = AcceleratorConfig(fallback="warn")
    with (
        Accelerator(backend, config=config) as acc,
        pytest.warns(FallbackWarning, match=rf"aten\.convolution.*{reason}"),
    ):
        assert acc.conv2d(ones, ones).item() == 4


def test_a_device_that_fails_gives_way_to_the_cpu_or_raises(monkeypatch):
    acc = Accelerator("cpu")
    monkeypatch.setattr(acc, "device", registry.find_device("cpu"))
    monkeypatch.setitem(METHODS, "gelu", replace(METHODS["gelu"], run=Mock(side_effect=errors.LaunchError("refused"))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_raises(errors.LaunchError, "refused", acc.gelu, [1.0])
    assert acc.metrics()["gelu"]["errors"] == 1


# --- many calls ------------------------------------------------------------------------------------------------------
def test_a_batch_gives_what_single_calls_give_in_fewer_launches(acc):
    rng = np.random.default_rng(2)
    shapes = [(3, 4), (1, 4), (5,), (0, 4), (2, 2, 4)]
    xs = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    w = np.ones(4, np.float32)
    with acc.batch() as batch:
        gelus = [batch.gelu(x) for x in xs]
        tanhs = [batch.gelu(x, "tanh") for x in xs]
        softmaxes = [batch.softmax(x) for x in xs if x.shape[-1] == 4]
        columns = batch.softmax(xs[0], 0)
        norms = [batch.layer_norm(x, w, w) for x in xs if x.shape[-1] == 4]
        products = [batch.matmul(xs[0].T.copy(), xs[0]) for _ in range(3)]
        sums = [batch.field_add(list(range(n)), [P - 1] * n) for n in (1, 4)]
    assert batch.launches == 7
    for x, gelu, tanh in zip(xs, gelus, tanhs, strict=True):
        assert gelu.result().shape == x.shape
        np.testing.assert_allclose(gelu.result(), acc.gelu(x), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(tanh.result(), acc.gelu(x, "tanh"), rtol=1e-6, atol=1e-7)
    fours = [x for x in xs if x.shape[-1] == 4]
    for x, softmax, norm in zip(fours, softmaxes, norms, strict=True):
        np.testing.assert_allclose(softmax.result(), acc.softmax(x), rtol=1e-6)
        np.testing.assert_allclose(norm.result(), acc.layer_norm(x, w, w), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(columns.result(), acc.softmax(xs[0], 0), rtol=1e-6)
    np.testing.assert_allclose(products[2].result(), xs[0].T @ xs[0], rtol=1e-5)
    assert [answer.result().tolist() for answer in sums] == [[P - 1], [P - 1, 0, 1, 2]]


def test_the_end_of_a_batch_raises_the_first_error_after_the_other_calls(acc):
    x = torch.ones(2, 3)
    batch = acc.batch()
    large = batch.field_add([P], [0])
    good = batch.field_add([1], [2])
    stranger = batch.gelu("abc")
    unlike = batch.layer_norm(x, x[0], eps="small")  # an error of the op itself
    after = batch.softmax(x)
    assert_raises(errors.AccelerantError, "has not ended yet", good.result)
    with pytest.raises(FormatError, match="not below the modulus") as raised, batch:
        pass
    assert raised.value.__notes__ == [
        "raised by call 0 of the batch, field_add", "3 of the batch's 5 calls failed; this is the first"
    ]  # fmt: skip
    assert good.done()
    assert good.result().tolist() == [3]
    torch.testing.assert_close(after.result(timeout=60), x / 3)
    for call, kind, words in (
        (large, FormatError, "not below the modulus"), (stranger, UnsupportedDtype, r"builtins\.str"),
        (unlike, ConfigError, "eps must be a number, got str"),
    ):  # fmt: skip
        assert_raises(kind, words, call.result)


def test_a_batch_that_is_left_by_an_error_does_nothing(acc):
    batch = acc.batch()
    answer = batch.gelu([1.0])
    batch.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert not answer.done()
    assert acc.metrics() == {}


def test_futures_are_awaited_and_asked(acc):
    x = np.linspace(-1, 1, 5, dtype=np.float32)

    async def work():
        return await asyncio.gather(*(acc.submit(acc.gelu, x * i) for i in range(4)))

    answers = asyncio.run(work())
    for i, answer in enumerate(answers):
        np.testing.assert_allclose(answer, acc.gelu(x * i), rtol=1e-6)
    future = acc.submit(acc.gelu, x, approximate="tanh")
    np.testing.assert_allclose(future.result(timeout=10), acc.gelu(x, "tanh"), rtol=1e-6)
    with acc.batch() as batch:
        pending = batch.gelu(x)
        assert (repr(batch), repr(pending)) == ("Batch(1 calls, 0 launches)", "PendingCall(0, gelu, pending)")
    assert pending.result(timeout=1).shape == x.shape
    for old in (future.result, future.wait, pending.result):
        assert_raises(TypeError, "has no argument timeout_s= any more: it is timeout= now", old, timeout_s=10)
    gate = threading.Event()
    assert_raises(TimeoutError, r"within 0\.01 s", lambda: acc.submit(gate.wait).result(timeout=0.01))
    gate.set()
    assert future.done()
    assert_raises(UnsupportedDtype, None, lambda: acc.submit(acc.gelu, "abc").result(60))


def test_a_batch_keeps_the_memory_limit():
    x = np.zeros(1000, np.float32)
    with Accelerator("cpu", config=AcceleratorConfig(memory_limit_bytes=20_000)) as acc:
        batch = acc.batch()
        answers = [batch.gelu(x) for _ in range(5)]  # 8,000 bytes each with its result: two at a time
        batch.gelu(np.zeros(3000, np.float32))
        with (
            pytest.raises(errors.OutOfMemory, match="gelu: inputs and result take 24,000 bytes; the limit is 20,000"),
            batch,
        ):
            pass
        assert batch.launches == 3
        for answer in answers:
            np.testing.assert_array_equal(answer.result(), x)


SHAPED = {  # name, arguments, bytes of the result
    "field_add": ((np.zeros((64, 1), np.uint64), np.zeros((1, 96), np.uint64)), 64 * 96 * 8),
    "field_mul": (([1, 2, 3], np.zeros((50, 1), np.uint64)), 150 * 8),
    "matmul": ((np.zeros((3, 4), np.float32), np.zeros((70, 4, 5), np.float32)), 70 * 15 * 4),
    "matmul of vectors": ((np.zeros(4, np.float32), np.zeros((9, 4, 5), np.float32)), 9 * 5 * 4),
    "gelu": (([[1.0, 2.0]],), 8),
    "layer_norm": ((np.zeros((6, 8), np.float32), np.zeros(8, np.float32), np.zeros(8, np.float32)), 6 * 8 * 4),
    "attention": ((np.zeros((1, 2, 3, 8), np.float32), *[np.zeros((1, 2, 90, 8), np.float32)] * 2), 2 * 3 * 8 * 4),
    "ntt": ((np.zeros((5, 8), np.uint64),), 5 * 8 * 8),
}


@pytest.mark.parametrize("case", SHAPED)
def test_the_memory_limit_counts_the_result_exactly(case):
    arrays, result = SHAPED[case]
    name = case.split()[0]
    with Accelerator("cpu") as acc:
        assert getattr(acc, name)(*arrays).nbytes == result
    dtype = np.float32 if name == "gelu" else np.uint64
    needed = sum((x if isinstance(x, np.ndarray) else np.asarray(x, dtype)).nbytes for x in arrays) + result
    with Accelerator("cpu", config=AcceleratorConfig(memory_limit_bytes=needed)) as acc:
        getattr(acc, name)(*arrays)
    message = f"inputs and result take {needed:,} bytes; the limit is {needed - 1:,}"
    with Accelerator("cpu", config=AcceleratorConfig(memory_limit_bytes=needed - 1)) as acc:
        assert_raises(errors.OutOfMemory, message, lambda: getattr(acc, name)(*arrays))
        batch = acc.batch()
        getattr(batch, name)(*arrays)
        with pytest.raises(errors.OutOfMemory, match=message), batch:
            pass


@pytest.mark.parametrize("limit", [24_000, 40_000, 100_000])
@pytest.mark.parametrize("kind", ["same", "alone", "mixed"])
def test_a_batch_never_holds_more_than_its_limit(limit, kind, monkeypatch):
    """A device whose tensors are counted: what moves there is a copy, and results go home by a copy."""
    held, peak = [], [0]

    def counted(x):
        held.append(weakref.ref(x))
        storages = [y.untyped_storage() for reference in held if (y := reference()) is not None]
        peak[0] = max(peak[0], sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
        return x

    move, run, wrap = methods.to_torch, METHODS["gelu"].run, facade.ArrayOrigin.wrap

    def moved(x, device, dtype=None):
        tensor, origin = move(x, device, dtype)
        return (tensor if device is None else counted(tensor.clone())), origin

    monkeypatch.setattr(methods, "to_torch", moved)
    monkeypatch.setattr(facade.ArrayOrigin, "wrap", lambda self, tensor: wrap(self, tensor).copy())
    counting = dataclasses.replace(METHODS["gelu"], run=lambda *args, **options: counted(run(*args, **options)))
    monkeypatch.setitem(METHODS, "gelu", counting)
    options = {"same": ["none"], "alone": ["none", "tanh"], "mixed": ["none", "none", "tanh"]}[kind]
    with Accelerator("cpu", config=AcceleratorConfig(memory_limit_bytes=limit)) as acc:
        with acc.batch() as batch:
            answers = [batch.gelu(np.full(1000 + 37 * i, i, np.float32), options[i % len(options)]) for i in range(12)]
        assert len([answer.result() for answer in answers]) == 12
    assert 8_000 < peak[0] <= limit


def test_a_batch_keeps_the_time_limit():
    with Accelerator("cpu", config=AcceleratorConfig(timeout_s=1e-9)) as acc:
        batch = acc.batch()
        answers = [batch.gelu([1.0]), batch.gelu([2.0])]
        with pytest.raises(errors.TimeLimitExceeded), batch:
            pass
        for answer in answers:
            assert_raises(errors.TimeLimitExceeded, r"gelu: .* of at most 1e-09 s", answer.result)


@pytest.mark.parametrize("policy", ["warn", "forbid"])
def test_a_batch_falls_back_as_a_call_does(policy, monkeypatch):
    run, failures = METHODS["gelu"].run, []

    def fails_once(x, **options):
        if not failures:
            failures.append(errors.LaunchError("refused"))
            raise failures[0]
        return run(x, **options)

    acc = Accelerator("cpu", config=AcceleratorConfig(fallback=policy))
    monkeypatch.setattr(acc, "device", replace(acc.device, backend="another"))
    monkeypatch.setitem(METHODS, "gelu", replace(METHODS["gelu"], run=fails_once))
    batch = acc.batch()
    answers = [batch.gelu([1.0]), batch.gelu([2.0, 3.0])]
    if policy == "warn":
        with pytest.warns(FallbackWarning, match="gelu: another:0 is not used, cpu is"):
            batch.__exit__(None, None, None)
        assert acc.metrics()["gelu"]["fallbacks"] == 2
    else:
        batch.__exit__(None, None, None)
        assert acc.metrics()["gelu"]["fallbacks"] == 0
    np.testing.assert_allclose(answers[1].result(), acc.gelu([2.0, 3.0]), rtol=1e-6)
