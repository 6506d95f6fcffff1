"""gelu's formulas and ends; test_elementwise.py has layouts, autocast, compilation and integers."""

import math

import pytest
import torch

from accelerant import ops
from accelerant.errors import ConfigError

BOTH = pytest.mark.parametrize("approximate", ["none", "tanh"])


@BOTH
def test_values_at_the_ends(approximate, interpreted):
    x = torch.tensor([0.0, 20.0, -20.0, 1e4, -1e4, 3e38, -3e38, math.inf, math.nan])
    y = ops.gelu(x, approximate)
    assert y[:7].tolist() == [0.0, 20.0, 0.0, x[3].item(), 0.0, x[5].item(), 0.0]
    assert y[7] == math.inf
    assert y[8].isnan()


@BOTH
def test_slope_at_the_ends(approximate, interpreted):
    x = torch.tensor([0.0, 20.0, -20.0, 1e4, -1e4, 3e38, -3e38], requires_grad=True)
    ops.gelu(x, approximate).sum().backward()
    assert x.grad.tolist() == [0.5, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


@BOTH
def test_odd_part_is_half_of_x(approximate):
    x = torch.linspace(-6, 6, 1001)
    torch.testing.assert_close(ops.gelu(x, approximate) - ops.gelu(-x, approximate), x, rtol=2e-6, atol=1e-6)


def test_formulas_differ():
    x = torch.linspace(-3, 3, 50)
    gap = (ops.gelu(x) - ops.gelu(x, "tanh")).abs().max()
    assert 1e-4 < gap < 1e-3


@pytest.mark.parametrize("n", [4095, 4096, 4097, 3 * 4096 + 1])
def test_around_a_block(n, interpreted):
    x = torch.randn(n, requires_grad=True)
    y = ops.gelu(x, "tanh")
    y.sum().backward()
    z = x.detach().clone().requires_grad_()
    expected = torch.nn.functional.gelu(z, approximate="tanh")
    expected.sum().backward()
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(x.grad, z.grad, rtol=2e-6, atol=2e-6)


def test_refuses_another_formula():
    with pytest.raises(ConfigError, match="approximate must be 'none' or 'tanh', got 'sigmoid'"):
        ops.gelu(torch.ones(3), "sigmoid")
