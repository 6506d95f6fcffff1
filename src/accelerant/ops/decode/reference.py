"""Reference of the decoding steps in plain PyTorch, in the dtype of the inputs; the tests' oracle in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["linear_reference", "rope_reference"]


def linear_reference(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, *, norm: Tensor | None = None, eps: float = 1e-6,
    residual: Tensor | None = None, gated: bool = False,
) -> Tensor:  # fmt: skip
    """Return the result of accelerant.ops.decode.op.linear."""
    h = x if norm is None else x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * norm
    z = h @ weight.to(h.dtype).T
    if scale is not None:
        z = z * scale
    if gated:
        gate, up = z.chunk(2, -1)
        z = F.silu(gate) * up
    return z if residual is None else z + residual


def rope_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rotated queries, and copies of the caches with the new token."""
    B, kv_heads, T, D = k_cache.shape
    x = qkv.view(B, -1, D)
    heads = x.shape[1] - 2 * kv_heads
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    rotated = x.clone()
    for b, position in enumerate(positions.tolist()):
        if position >= T:
            continue
        c, s = cos[position].to(x.dtype), sin[position].to(x.dtype)
        x1, x2 = x[b].chunk(2, -1)
        rotated[b] = torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)
        k_cache[b, :, position] = rotated[b, heads : heads + kv_heads]
        v_cache[b, :, position] = x[b, heads + kv_heads :]
    return rotated[:, :heads, None], k_cache, v_cache
