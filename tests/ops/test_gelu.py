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


def test_refuses_another_formula():
    with pytest.raises(ConfigError, match="approximate must be 'none' or 'tanh', got 'sigmoid'"):
        ops.gelu(torch.ones(3), "sigmoid")
