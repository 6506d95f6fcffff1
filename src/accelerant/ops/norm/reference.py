"""Reference implementations of the norms for any dtype; the oracle of the tests in float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_layer_norm_reference", "add_rms_norm_reference", "layer_norm_reference", "rms_norm_reference"]


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Normalise rows to mean 0 and variance 1, scale by weight, shift by bias."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def rms_norm_reference(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Normalise rows to mean square 1, scale by weight."""
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return layer_norm of the sum, and the sum."""
    s = x + residual
    return layer_norm_reference(s, weight, bias, eps=eps), s


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return rms_norm of the sum, and the sum."""
    s = x + residual
    return rms_norm_reference(s, weight, eps=eps), s
