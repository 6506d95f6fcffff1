"""Reference of attention in plain PyTorch, in the dtype of its inputs; the tests' oracle in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, window: int | None = None,
    return_lse: bool = False, mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return softmax(scale q k^T + mask) v over the keys that each query sees, with a materialized score matrix."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    S, Skv, D = q.shape[2], k.shape[2], q.shape[3]
    position = torch.arange(S, device=q.device)[:, None] + (Skv - S)
    key = torch.arange(Skv, device=q.device)[None, :]
    seen = torch.ones(S, Skv, dtype=torch.bool, device=q.device)
    if causal:
        seen &= key <= position
    if window is not None:
        seen &= key >= position - window
    scores = (q @ k.transpose(-1, -2)) * (D**-0.5 if scale is None else scale)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        seen = seen & ~(mask <= -1e30)
        scores = scores + mask.masked_fill(mask <= -1e30, 0.0)
    empty = ~seen.any(-1, keepdim=True)
    if Skv:
        largest = scores.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True).masked_fill(empty, 0)
    else:
        largest = scores.new_zeros(*scores.shape[:-1], 1)
    weights = (scores - largest).masked_fill(~seen, -math.inf).exp()
    total = weights.sum(-1, keepdim=True)
    o = (weights @ v) / total.masked_fill(empty, 1)
    if not return_lse:
        return o
    lse = (total.masked_fill(empty, 1).log() + largest).masked_fill(empty, -math.inf)
    return o, lse.squeeze(-1).detach()


def attention_varlen_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, causal: bool = False, scale: float | None = None, window: int | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return attention_reference of each sequence; the maximum lengths are not used."""
    results = []
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for begin_q, end_q, begin_k, end_k in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        parts = (x.transpose(0, 1)[None] for x in (q[begin_q:end_q], k[begin_k:end_k], v[begin_k:end_k]))
        results.append(attention_reference(*parts, causal=causal, scale=scale, window=window, return_lse=True))
    none = q[:0] + 0 * (k.sum() + v.sum())  # gives k and v gradients even without sequences
    o = torch.cat([none, *(o[0].transpose(0, 1) for o, _ in results)])
    if not return_lse:
        return o
    return o, torch.cat([q.new_empty(q.shape[1], 0), *(lse[0] for _, lse in results)], 1)
