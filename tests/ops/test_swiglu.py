import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import check_beside, ran

from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedDtype

launch = importlib.import_module("accelerant.ops.swiglu")


def torchs(gate, up=None):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return torch.nn.functional.silu(gate) * up


def against_torch(*tensors):
    shape = torchs(*tensors).shape
    dy = torch.randn(shape[::-1]).permute(*range(len(shape) - 1, -1, -1))  # a layout of its own
    y, _ = check_beside(ops.swiglu, torchs, *tensors, near=(4e-6, 1e-6), slopes=(4e-6, 2e-6), dy=dy)
    assert y.is_contiguous()


@pytest.mark.sample(3)
@pytest.mark.parametrize("n", [127, 128, 1023, 1024, 1025, 3000])
def test_around_a_block(n, interpreted):
    against_torch(torch.randn(n), torch.randn(n))
    against_torch(torch.randn(3, 2 * n))


def test_halves_are_the_two_tensors(interpreted):
    gate, up = torch.randn(4, 33), torch.randn(4, 33)
    assert torch.equal(ops.swiglu(torch.cat((gate, up), -1)), ops.swiglu(gate, up))


def test_not_a_number_as_torch(interpreted):
    odd = torch.tensor([0.0, 1.0, 200.0, -200.0, math.inf, -math.inf, math.nan, 3e38, -3e38])
    gate, up = odd.repeat_interleave(9), odd.repeat(9)
    torch.testing.assert_close(ops.swiglu(gate, up), torchs(gate, up), rtol=1e-5, atol=1e-30, equal_nan=True)


LAYOUTS = {
    "transposed": lambda: torch.randn(6, 4).t(),
    "every second": lambda: torch.randn(6, 8)[:, ::2],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "part of a row": lambda: torch.randn(6, 8)[1:5, 3:7],
    "rows apart": lambda: torch.randn(2, 5, 3, 6)[:, 1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, interpreted):
    against_torch(LAYOUTS[layout](), LAYOUTS[layout]())
    against_torch(LAYOUTS[layout]())
    assert ran() == {"triton"}


def test_halves_of_one_matrix_given_apart(interpreted):
    x = torch.randn(5, 14, requires_grad=True)
    y = ops.swiglu(*x.chunk(2, -1))
    assert torch.equal(y, ops.swiglu(x))
    (one,) = torch.autograd.grad(y.sum(), x)
    (other,) = torch.autograd.grad(ops.swiglu(x).sum(), x)
    assert torch.equal(one, other)


@settings(max_examples=20, deadline=None)
@given(shape=st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_any_shape(shape):
    against_torch(torch.randn(shape), torch.randn(shape))
    against_torch(torch.randn(*shape[:-1], 2 * shape[-1]))


def test_only_one_gradient(interpreted):
    gate, up = torch.randn(3, 5), torch.randn(3, 5, requires_grad=True)
    ops.swiglu(gate, up).sum().backward()
    torch.testing.assert_close(up.grad, torch.nn.functional.silu(gate))
    assert gate.grad is None


def test_keeps_its_arguments_alone():
    gate, up = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    y = ops.swiglu(gate, up)
    kept = y.grad_fn.saved_tensors
    assert [each.data_ptr() for each in kept] == [gate.data_ptr(), up.data_ptr()]


X = torch.ones(3)


@pytest.mark.parametrize(("tensors", "error", "words"), [
    ((torch.ones(3, 5),), ShapeError, "the last dimension of gate must be even, got shape"),
    ((torch.tensor(1.0),), ShapeError, "the last dimension of gate must be even, got shape"),
    ((torch.ones(3, 4), X), ShapeError, r"up must have the shape of gate, \(3, 4\), got \(3,\)"),
    ((X, X.half()), UnsupportedDtype, "gate and up must have one dtype, got float32 and float16"),
    ((X, X.to("meta")), ShapeError, "gate and up must be on one device, got cpu and meta"),
    ((X.long(), X), UnsupportedDtype, r"swiglu takes .*; gate is int64"),
])  # fmt: skip
def test_refuses(tensors, error, words):
    with pytest.raises(error, match=words):
        ops.swiglu(*tensors)
