"""GPT's part in generation: a prompt read with its keys and values kept, and one more token of each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant import ops
from accelerant.nn.layers import MultiHeadAttention, TransformerBlock, has_hooks
from accelerant.nn.models.generation import Cache, prompt_length
from accelerant.ops.decode.op import append

if TYPE_CHECKING:
    from accelerant.nn.models.gpt import GPT

__all__ = ["can_cache", "decode_hidden", "prefill_hidden"]


def can_cache(model: GPT) -> bool:
    """Whether the functions below do what the blocks do: those are of the usual kind, without hooks of their own."""
    for block in model.blocks:
        if type(block) is not TransformerBlock or type(block.attention) is not MultiHeadAttention:
            return False
        if has_hooks(block) or has_hooks(block.attention):
            return False
    return not has_hooks(model.wte) and not has_hooks(model.wpe)


def prefill_hidden(model: GPT, idx: Tensor, cache: Cache | None) -> Tensor:
    """The features (B, width) of the last of (B, T) tokens from position 0 on.

    Tokens are added on the right, where attention does not look. Without a cache the model's own forward pass runs.
    """
    time = idx.shape[1]
    length = prompt_length(time, model.config.context, cache)
    if cache is None:
        return model.hidden(F.pad(idx, (0, length - time)))[:, time - 1]
    idx = F.pad(idx, (0, length - time))
    x = model.wte(idx) + model.wpe(torch.arange(length, device=idx.device))
    x = x.to(model.activation_dtype())
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, TransformerBlock)  # for the type checker: ModuleList is untyped
        attention = block.attention
        heads: Tensor = attention.qkv(block.norm_1(x)).view(*idx.shape, 3, attention.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        cache.hold(layer, k, v)
        mixed = ops.attention(q, k, v, causal=True)
        assert isinstance(mixed, Tensor)  # for the type checker: no log-sum-exp was asked for
        x = x + attention.projection(mixed.transpose(1, 2).reshape(x.shape))
        x = x + block.mlp(block.norm_2(x))
    cache.lengths.fill_(time)
    y: Tensor = model.norm(x[:, time - 1])
    return y


def decode_hidden(model: GPT, tokens: Tensor, cache: Cache) -> Tensor:
    """The features (B, width) of one more token of each sequence (B,); grows the cache."""
    positions = cache.lengths.clamp(max=model.config.context - 1)
    x = (model.wte(tokens) + model.wpe(positions)).to(model.activation_dtype())
    lengths = cache.lengths + 1
    for block, k, v in zip(model.blocks, cache.k, cache.v, strict=True):
        assert isinstance(block, TransformerBlock)  # for the type checker: ModuleList is untyped
        q = append(block.attention.qkv(block.norm_1(x)), cache.lengths, k, v)
        mixed = ops.attention_decode(q, k, v, lengths)
        x = x + block.attention.projection(mixed.flatten(1))
        x = x + block.mlp(block.norm_2(x))
    cache.lengths += 1
    y: Tensor = model.norm(x)
    return y
