import importlib
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import LAYOUTS, check_beside

from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedDtype

launch = importlib.import_module("accelerant.ops.softmax")

SHAPES = pytest.mark.parametrize(("shape", "dim"), [
    ((5, 33), -1), ((5, 768), 1), ((2, 20000), -1), ((9, 16400), -1), ((4, 70, 3), 1), ((1, 16400, 3), 1),
    ((9, 5), 0),
], ids=str)  # fmt: skip


@pytest.mark.sample(3)
@SHAPES
def test_shift_changes_nothing(shape, dim, interpreted):
    x = torch.randint(-8, 9, shape).float()  # exact after the shift
    assert torch.equal(ops.softmax(x, dim), ops.softmax(x + 1000, dim))


@pytest.mark.sample(3)
@SHAPES
def test_large_values_do_not_overflow(shape, dim, interpreted):
    x = torch.randn(shape) * 1e30
    y = ops.softmax(x, dim)
    assert torch.equal(y.argmax(dim), x.argmax(dim))
    torch.testing.assert_close(y.amax(dim), torch.ones_like(y.amax(dim)))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "atol"), [("softmax", 1e-5), ("log_softmax", 2e-4)])
@SHAPES
def test_gradient_sums_to_0(name, atol, shape, dim, interpreted):
    x = torch.randn(shape, requires_grad=True)
    getattr(ops, name)(x, dim).backward(torch.randn(shape))
    torch.testing.assert_close(x.grad.sum(dim), torch.zeros_like(x.grad.sum(dim)), rtol=0, atol=atol)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "at", "masked"), [("softmax", 0, 0.0), ("log_softmax", 1, -math.inf)])
@SHAPES
def test_masked_elements_as_torch(name, at, masked, shape, dim, interpreted):
    x = torch.randn(shape)
    x.select(dim, at).fill_(-math.inf)
    y, _ = check_beside(*(partial(getattr(of, name), dim=dim) for of in (ops, torch)), x)
    assert (y.select(dim, at) == masked).all()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@SHAPES
def test_not_a_number_as_torch(name, shape, dim, interpreted):
    for value in (-math.inf, math.nan, math.inf):
        x = torch.randn(shape)
        if value == -math.inf:
            x.transpose(0, dim)[:, :1].fill_(value)  # whole rows of it
        else:
            x.view(-1)[0] = value
        expected = getattr(torch, name)(x, dim)
        assert expected.isnan().any()
        torch.testing.assert_close(getattr(ops, name)(x, dim), expected, equal_nan=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, dim, interpreted):
    x = LAYOUTS[layout]()
    y, _ = check_beside(*(partial(of.softmax, dim=dim) for of in (ops, torch)), x, dy=LAYOUTS[layout]())
    assert y.is_contiguous()


@pytest.mark.parametrize("dim", [2, -3])
def test_refuses_a_dimension_that_is_not_there(dim):
    with pytest.raises(ShapeError, match=rf"dim must be in \[-2, 1\] for x of shape \(3, 4\), got {dim}"):
        ops.softmax(torch.ones(3, 4), dim)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_refuses_in_its_own_name(name):
    with pytest.raises(UnsupportedDtype, match=rf"^{name} takes .*; x is int64"):
        getattr(ops, name)(torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"dim must be in \[-1, 0\] for x of shape \(\), got 1"):
        getattr(ops, name)(torch.tensor(1.0), 1)


# --- log_softmax -----------------------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@SHAPES
def test_log_is_softmaxs(shape, dim, interpreted):
    x = torch.randn(shape) * 5
    y = ops.log_softmax(x, dim)
    p = ops.softmax(x, dim)
    assert (p >= 0).all()
    torch.testing.assert_close(p.sum(dim), torch.ones_like(p.sum(dim)), rtol=0, atol=1e-5)
    torch.testing.assert_close(y.exp(), p, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y.logsumexp(dim), torch.zeros_like(y.logsumexp(dim)), rtol=0, atol=1e-5)


@pytest.mark.sample(3)
@SHAPES
def test_log_keeps_what_softmax_loses(shape, dim, interpreted):
    """exp(-400) is 0 in float32; its logarithm is not."""
    x = torch.zeros(shape)
    x.select(dim, 0).fill_(-400.0)
    y = ops.log_softmax(x, dim)
    torch.testing.assert_close(y.select(dim, 0), torch.full_like(y.select(dim, 0), -400 - math.log(shape[dim] - 1)))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(shape=st.lists(st.integers(1, 40), min_size=1, max_size=3), data=st.data())
def test_any_shape_and_dimension(shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    for name in ("softmax", "log_softmax"):
        both = (partial(getattr(of, name), dim=dim) for of in (ops, torch))
        check_beside(*both, torch.randn(shape), slopes=(1e-4, 1e-5))
