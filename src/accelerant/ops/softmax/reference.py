"""The mathematics of softmax and log_softmax, in whatever dtype comes; the oracle of their tests in float64."""

from __future__ import annotations

from torch import Tensor

__all__ = ["log_softmax_reference", "softmax_reference"]


def softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) over its sum, both with the largest element taken off the exponent."""
    if x.numel() == 0:
        return x.clone()
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def log_softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    """Log of softmax, without the division: x less its largest element, less the log of the sum of exponentials."""
    if x.numel() == 0:
        return x.clone()
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()
