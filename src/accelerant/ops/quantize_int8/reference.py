"""Reference of quantize_int8 in float32, which is part of its definition; results have the dtype of x."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["quantize_int8_reference"]


def quantize_int8_reference(x: Tensor, *, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Return each row divided by its scale and rounded, and the scales."""
    if x.dim() == 0:
        q, scale = quantize_int8_reference(x.reshape(1), dim=0)
        return q.reshape(()), scale
    rows = x.float().movedim(dim, -1)
    zeros = rows.new_zeros(*rows.shape[:-1], 1)
    steps = rows.new_full((), 127.0)  # with a Python number torch multiplies by the reciprocal on CUDA
    scale = torch.cat([rows.abs(), zeros], -1).amax(-1, keepdim=True) / steps
    scale[scale == 0] = 1.0
    q = torch.round(rows / scale).clamp(-127, 127)
    q[~scale.isfinite().expand(q.shape)] = 0.0
    return q.movedim(-1, dim).contiguous().to(x.dtype), scale.squeeze(-1).to(x.dtype)
