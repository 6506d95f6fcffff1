import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import LAYOUTS, counted

from accelerant import ops
from accelerant.config import override
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops.embedding import embedding_reference
from accelerant.runtime.dispatch import operations

launch = importlib.import_module("accelerant.ops.embedding")

BACKWARDS = pytest.mark.parametrize("backward", [launch.launch_backward_sorted, launch.launch_backward_atomic])
NEEDS = (True,)


def summed(dy, indices, V, padding_idx=-1):
    """The gradient, in float64, by a loop."""
    found = torch.zeros(V, dy.shape[-1], dtype=torch.float64)
    for number, row in zip(indices.flatten().tolist(), dy.double().reshape(-1, dy.shape[-1]), strict=True):
        if 0 <= number < V and number != padding_idx:
            found[number] += row
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_copies_exactly(dtype, index, interpreted):
    weight = torch.randn(50, 300).to(dtype)
    weight[3, 2], weight[3, 5] = math.nan, -math.inf
    indices = torch.randint(50, (4, 7), dtype=index)
    indices[0, 0] = 3
    y = ops.embedding(indices, weight)
    assert y.is_contiguous()
    torch.testing.assert_close(y, weight[indices.long()], rtol=0, atol=0, equal_nan=True)


@pytest.mark.sample(5, 3)
@BACKWARDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize(
    ("T", "V", "used"), [(1, 3, 3), (32, 5, 5), (33, 5, 1), (64, 40, 40), (200, 9, 3), (300, 7, 1)]
)
def test_gradient_is_the_sum(backward, dtype, padding_idx, T, V, used, interpreted):
    """Runs within a chunk, ending at one, over two and over many."""
    dy, indices = torch.randn(T, 40).to(dtype), torch.randint(used, (T,))
    weight = torch.empty(V, 40, dtype=dtype)
    (found,) = backward(dy, indices, weight, padding_idx, NEEDS)
    assert found.dtype == dtype
    expected = summed(dy, indices, V, padding_idx)
    torch.testing.assert_close(found.double(), expected, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_added_to_given_rows(dtype, interpreted):
    """Also those of an index that several chunks share."""
    indices = torch.tensor([3, 0, 3, 3, 7, 3, 3, 0, 3])
    dy, into = torch.randn(9, 5).to(dtype), torch.randn(8, 5)
    wanted = into.double().index_add_(0, indices, dy.double())
    (found,) = launch.launch_backward_sorted(dy, indices, into, -1, NEEDS, chunk=2, into=into)
    assert found is into
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 64, 128])
@pytest.mark.parametrize("used", [1, 2, 9])
def test_any_chunk_gives_the_same(chunk, used, interpreted):
    dy, indices = torch.randn(70, 5), torch.randint(used, (70,))
    (found,) = launch.launch_backward_sorted(dy, indices, torch.empty(9, 5), -1, NEEDS, chunk=chunk)
    torch.testing.assert_close(found, summed(dy, indices, 9).float(), rtol=1e-5, atol=1e-5)


@BACKWARDS
def test_low_precision_adds_in_float32(backward, interpreted):
    """1 + 300 times 2^-9 would stay 1 if each sum were rounded to bfloat16."""
    dy = torch.full((301, 8), 2.0**-9, dtype=torch.bfloat16)
    dy[0] = 1
    (found,) = backward(dy, torch.zeros(301, dtype=torch.int64), torch.empty(2, 8, dtype=torch.bfloat16), -1, NEEDS)
    assert (found[0] == torch.tensor(1 + 300 * 2.0**-9).bfloat16()).all()
    assert (found[1] == 0).all()


@pytest.mark.parametrize("padding_idx", [0, 3, -1, -5])
def test_padding_gets_no_gradient(padding_idx, interpreted):
    weight = torch.randn(5, 4, requires_grad=True)
    indices = torch.arange(5).repeat(3)
    y = ops.embedding(indices, weight, padding_idx=padding_idx)
    assert torch.equal(y, weight[indices])
    y.sum().backward()
    expected = torch.full((5, 4), 3.0)
    expected[padding_idx] = 0
    assert torch.equal(weight.grad, expected)


@BACKWARDS
def test_numbers_that_are_no_rows(backward, interpreted):
    """As on a GPU, where nothing checks them first: NaN forward, and no part in the gradient."""
    indices = torch.tensor([2, -1, 4, 5, 2**40, -(2**40), 0])
    weight = torch.randn(5, 8)
    y = launch.launch_forward(indices, weight, -1)
    inside = torch.tensor([0, 2, 6])
    assert torch.equal(y[inside], weight[indices[inside]])
    assert y[[1, 3, 4, 5]].isnan().all()
    dy = torch.randn(7, 8)
    (found,) = backward(dy, indices, weight, -1, NEEDS)
    torch.testing.assert_close(found, summed(dy, indices, 5).float())


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "permuted batch"])
def test_any_layout(layout, interpreted):
    weight = LAYOUTS[layout]().detach().requires_grad_()
    indices = torch.randint(6, (4, 5)).t()
    y = ops.embedding(indices, weight)
    assert torch.equal(y, weight[indices])
    dy = torch.randn(4, 5, 33).transpose(0, 1)
    y.backward(dy)
    torch.testing.assert_close(weight.grad, summed(dy, indices, 6).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(T=st.integers(0, 150), V=st.integers(1, 40), D=st.integers(1, 40), data=st.data())
def test_any_shape(T, V, D, data):
    used = data.draw(st.integers(1, V))
    padding_idx = data.draw(st.none() | st.integers(-V, V - 1))
    indices, weight = torch.randint(used, (T,)), torch.randn(V, D, requires_grad=True)
    exact = weight.detach().double().requires_grad_()
    y, expected = (
        f(indices, w, padding_idx=padding_idx) for f, w in ((ops.embedding, weight), (embedding_reference, exact))
    )
    assert torch.equal(y.double(), expected)
    dy = torch.randn(T, D)
    y.backward(dy)
    expected.backward(dy.double())
    torch.testing.assert_close(weight.grad, exact.grad.float(), rtol=1e-5, atol=1e-5)


def test_atomic_sums_are_refused_where_bits_must_repeat(interpreted):
    weight = torch.randn(5, 4, requires_grad=True)
    atomic = next(each for each in operations()["embedding_bwd"].implementations if each.name == "triton-atomic")
    assert not atomic.deterministic
    with override(deterministic=True):
        ops.embedding(torch.arange(5), weight).sum().backward()
    ran = {row["op"]: row["implementation"] for row in counted()}
    assert ran["embedding_bwd"] == "triton"


# --- rejections ------------------------------------------------------------------------------------------------------
ZERO, TABLE = torch.tensor([0]), torch.ones(5, 3)


@pytest.mark.parametrize(("indices", "weight", "options", "error", "words"), [
    (torch.tensor([0, 5, 4]), TABLE, {}, ConfigError, r"indices must be in \[0, 5\), got 5"),
    (torch.tensor([0, -1, 4]), TABLE, {}, ConfigError, r"indices must be in \[0, 5\), got -1"),
    (ZERO, TABLE[:0], {}, ConfigError, r"indices must be in \[0, 0\), got 0"),
    (ZERO, TABLE, {"padding_idx": 5}, ConfigError, r"padding_idx must be in \[-5, 5\), got 5"),
    (ZERO, TABLE, {"padding_idx": -6}, ConfigError, r"padding_idx must be in \[-5, 5\), got -6"),
    (torch.ones(3), TABLE, {}, UnsupportedDtype, "indices must be int64 or int32, got float32"),
    (ZERO, TABLE.long(), {}, UnsupportedDtype, r"embedding takes .*; weight is int64"),
    (ZERO, torch.ones(5), {}, ShapeError, r"weight must be \(V, D\), got \(5,\)"),
    (ZERO.to("meta"), TABLE, {}, ShapeError, "indices must be on cpu, where weight is; they are on meta"),
])  # fmt: skip
def test_refuses(indices, weight, options, error, words):
    with pytest.raises(error, match=words):
        ops.embedding(indices, weight, **options)


def test_low_precision_adds_in_float32_without_kernels(uninterpreted):
    weight = torch.zeros(2, 8, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.full((301, 8), 2.0**-9, dtype=torch.bfloat16)
    dy[0] = 1
    ops.embedding(torch.zeros(301, dtype=torch.int64), weight).backward(dy)
    assert (weight.grad[0] == torch.tensor(1 + 300 * 2.0**-9).bfloat16()).all()
