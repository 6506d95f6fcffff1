"""The mathematics of layer_norm, in whatever dtype comes; the oracle of its tests in float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["layer_norm_reference"]


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Rows of mean 0 and variance 1, scaled by weight, shifted by bias."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias
