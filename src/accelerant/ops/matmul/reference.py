"""Reference of matmul in plain PyTorch, in the dtype of its inputs; the tests' oracle in float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["matmul_reference"]


def matmul_reference(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum over the last dimension of a and the second to last of b (the only one of a vector)."""
    left = a.unsqueeze(0) if a.dim() == 1 else a
    right = b.unsqueeze(1) if b.dim() == 1 else b
    y = torch.einsum("...mk,...kn->...mn", left, right)
    if a.dim() == 1:
        y = y.squeeze(-2)
    return y.squeeze(-1) if b.dim() == 1 else y
