"""Reference implementations of gelu for any dtype; the oracle of the tests in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["gelu_reference"]


def gelu_reference(x: Tensor, approximate: str = "none") -> Tensor:
    """Multiply x by the standard normal distribution function at x, or its approximation by tanh."""
    if approximate == "none":
        return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1.0 + torch.tanh(inner))
