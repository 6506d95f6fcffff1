"""Reference of rope in plain PyTorch, in the dtype of its inputs; the tests' oracle in float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rope_reference"]


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Return x with each pair of features, as a complex number, rotated by the angle of its position."""
    shape = (*x.shape[:-1], x.shape[-1] // 2, 2) if interleaved else (*x.shape[:-1], 2, x.shape[-1] // 2)
    real, imaginary = x.reshape(shape).unbind(-1 if interleaved else -2)
    if cos.dim() == 3:  # tables per sequence, shared by its heads
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = (real * cos - imaginary * sin, real * sin + imaginary * cos)
    return torch.stack(rotated, -1 if interleaved else -2).reshape(x.shape)
