"""Reference implementations of the elementwise ops for any dtype; the oracle of the tests in float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_reference", "mul_reference", "relu_reference", "sigmoid_reference", "silu_reference", "tanh_reference"]


def add_reference(a: Tensor, b: Tensor | float) -> Tensor:
    """Return the sum of a and b, broadcast as in PyTorch."""
    return a + b


def mul_reference(a: Tensor, b: Tensor | float) -> Tensor:
    """Return the product of a and b, broadcast as in PyTorch."""
    return a * b


def relu_reference(x: Tensor) -> Tensor:
    """Return x where it is positive, 0 elsewhere; NaN stays."""
    return torch.where(x <= 0, torch.zeros_like(x), x)


def sigmoid_reference(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + torch.exp(-x))


def tanh_reference(x: Tensor) -> Tensor:
    """Return (exp(2x) - 1) / (exp(2x) + 1), by expm1, which keeps small results exact."""
    below = x < 0  # neither abs nor sign has the slope 1 that is wanted at 0
    e = torch.expm1(-2.0 * torch.where(below, -x, x))
    return torch.where(below, e, -e) / (e + 2.0)


def silu_reference(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x))."""
    return x / (1.0 + torch.exp(-x))
