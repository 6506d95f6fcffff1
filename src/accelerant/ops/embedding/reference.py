"""Reference of embedding in plain PyTorch, in the dtype of its inputs; the tests' oracle in float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["embedding_reference"]


def embedding_reference(indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Return weight[indices]; the row padding_idx gets no gradient."""
    if padding_idx is not None:
        number = torch.arange(weight.shape[0], device=weight.device)[:, None]
        weight = torch.where(number == padding_idx % weight.shape[0], weight.detach(), weight)
    return weight[indices.long()]
