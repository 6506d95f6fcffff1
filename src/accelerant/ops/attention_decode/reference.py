"""Reference of attention_decode in plain PyTorch, in the dtype of its inputs; the tests' oracle in float64."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from accelerant.ops.attention.reference import attention_reference

__all__ = ["attention_decode_reference"]


def attention_decode_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, scale: float | None = None
) -> Tensor:
    """Return causal attention of each sequence's queries to the first `length` keys of its cache."""
    results = []
    for b, length in enumerate(lengths.tolist()):
        k, v = (x[b : b + 1, :, :length] for x in (k_cache, v_cache))
        results.append(attention_reference(q[b : b + 1], k, v, causal=True, scale=scale))
    return torch.cat(cast("list[Tensor]", results)) if results else q.clone()
