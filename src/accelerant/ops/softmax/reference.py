"""Reference implementations of softmax and log_softmax for any dtype; the oracle of the tests in float64."""

from __future__ import annotations

from torch import Tensor

__all__ = ["log_softmax_reference", "softmax_reference"]


def softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    """Return exp(x) over its sum, with the maximum subtracted from the exponents."""
    if x.numel() == 0:
        return x.clone()
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def log_softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    """Return x minus its maximum, minus the logarithm of the sum of exponentials."""
    if x.numel() == 0:
        return x.clone()
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()
