"""torch.nn.MultiheadAttention, which uses its parameters by a function of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant.errors import ShapeError
from accelerant.ops._per_example import PerExampleSink
from accelerant.privacy.dp.clipping.functions import expanded, linear
from accelerant.privacy.dp.clipping.layers import KINDS, Forward, Kind, batch_of

__all__ = ["register"]


def _refuses(module: nn.MultiheadAttention) -> str | None:
    if not module.batch_first:
        return "its examples come second: take batch_first=True"
    if module.bias_k is not None or module.add_zero_attn:
        return "bias_k, bias_v and add_zero_attn are not covered: leave them out"
    own = [each for each in module._parameters.values() if each is not None]
    if len({each.requires_grad for each in own}) > 1:
        return "of its own parameters some are frozen: freeze all of them or none"
    return None


def _projected(
    module: Any, sink: PerExampleSink, query: Tensor, key: Tensor, value: Tensor, examples: int
) -> tuple[Tensor, ...]:
    """q, k and v, (B, T, E) each."""
    E = module.embed_dim
    if module._qkv_same_embed_dim and query is key and key is value:
        y = linear(query, module.in_proj_weight, module.in_proj_bias, sink, examples)
        return y.chunk(3, -1)
    if module._qkv_same_embed_dim:  # one product of all positions, so that the parameter has one piece
        T, S = query.shape[1], key.shape[1]
        y = linear(torch.cat((query, key, value), 1), module.in_proj_weight, module.in_proj_bias, sink, examples)
        return y[:, :T, :E], y[:, T : T + S, E : 2 * E], y[:, T + S :, 2 * E :]
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    found = [linear(x, w, None, sink, examples) for x, w in zip((query, key, value), weights, strict=True)]
    if module.in_proj_bias is not None:
        biases = expanded(module.in_proj_bias, sink, examples)[:, None].chunk(3, -1)
        found = [y + bias for y, bias in zip(found, biases, strict=True)]
    return tuple(found)


def _added_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, examples: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one that is added to scores (B, heads, T, S): -inf where a boolean one is true."""
    whole: Tensor | None = None
    for mask, by_example in ((attn_mask, False), (key_padding_mask, True)):
        if mask is None:
            continue
        added = mask.to(dtype)
        if mask.dtype == torch.bool:
            added = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
        if by_example:
            added = added[:, None, None, :]
        elif added.dim() == 3:
            added = added.view(examples, heads, *added.shape[1:])
        whole = added if whole is None else whole + added
    return whole


def _attention(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        same = query is key and key is value
        query, examples = batch_of(query, sink, module, 3)
        key, value = (query, query) if same else (batch_of(x, sink, module, 3)[0] for x in (key, value))
        if is_causal and attn_mask is None:
            raise ShapeError("MultiheadAttention takes the attn_mask that is_causal is a hint of")
        heads = module.num_heads
        if sink.wants(module.in_proj_bias) or sink.wants(module.q_proj_weight) or sink.wants(module.in_proj_weight):
            projected = _projected(module, sink, query, key, value, examples)
        else:
            projected = _frozen(module, query, key, value)
        q, k, v = (x.view(examples, -1, heads, module.head_dim).transpose(1, 2) for x in projected)
        mask = _added_mask(attn_mask, key_padding_mask, examples, heads, q.dtype)
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.mT
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        y: Tensor = module.out_proj(mixed.transpose(1, 2).reshape(examples, -1, module.embed_dim))
        return y, weights

    return forward


def _frozen(module: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))


def register() -> None:
    """Make it known."""
    KINDS[nn.MultiheadAttention.forward] = Kind(_attention, _refuses, inside=True)
