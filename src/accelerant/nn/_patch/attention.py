"""Our attention behind transformers' AttentionInterface, under the name "accelerant", and the masks that go with it.

A model's config names its attention, and models may share a config. So whatever reaches these two functions without
belonging to a patched module gets just what "sdpa" gives it, bit for bit.

The mask is always one that torch's attention can take. Where we know what it says without reading it (causal, with a
window), a Pattern travels on it as an attribute, and our op works from that; a mask without one goes to torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from accelerant import ops
from accelerant.nn._patch.swaps import MARK, NAME

__all__ = ["Pattern", "causal_mask", "pattern_of", "register"]

_PATTERN = "_accelerant_pattern"


@dataclass(eq=False)
class Pattern:
    """What a mask says.

    Attributes:
        causal: a query sees no key after its place; queries stand beside the last keys.
        window: a query sees no key more than this many before its place.
        padding: (B, Skv) bool, False where a key is padding; None where no key is.
        implied: the mask stands for none: transformers would have made none, and left it to the module's is_causal.
    """

    causal: bool
    window: int | None = None
    padding: Tensor | None = None
    implied: bool = False
    _borders: Tensor | None = None

    def borders(self) -> Tensor | None:
        """Where runs begin and end in the sequences laid behind one another, 3B + 1 int32; None: not one run each.

        A sequence is padding, tokens, padding, each of which may be empty. Waits for the device once a mask.
        """
        assert self.padding is not None  # for the type checker: asked only where there is padding
        if self._borders is None:
            B, S = self.padding.shape
            real = self.padding.int()
            length = real.sum(1)
            first = real.argmax(1)  # of the largest; 0 where all is padding, and length too
            ends = torch.stack((first, first + length, torch.full_like(first, S)), 1)
            starts = torch.arange(B, device=real.device)[:, None] * S
            borders = torch.cat((starts[:1, 0], (ends + starts).flatten())).to(torch.int32)
            steps = (real[:, 1:] != real[:, :-1]).sum(1)
            runs = bool(((real[:, 0] + real[:, -1] + steps) <= 2).all())
            self._borders = borders if runs else borders[:0]
        return self._borders if self._borders.numel() else None


def register() -> None:
    """Tell transformers the name."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


# --- masks -----------------------------------------------------------------------------------------------------------


def attention_mask(**arguments: Any) -> Tensor | None:
    """Transformers' mask for torch's attention, with its Pattern where that is known."""
    mask: Tensor | None = sdpa_mask(**arguments)
    if mask is not None and not torch.compiler.is_compiling():
        pattern = _pattern(**arguments)
        if pattern is not None:
            setattr(mask, _PATTERN, pattern)
    return mask


def causal_mask(S: int, device: torch.device) -> Tensor:
    """The mask of S tokens that follow one another, (1, 1, S, S), which transformers takes as it is.

    Where it makes the mask itself, it reads on the host whether positions begin anew (packed sequences): the host then
    waits for all that the device still has to do, once a forward pass.
    """
    mask = torch.ones(S, S, dtype=torch.bool, device=device).tril_()[None, None]
    setattr(mask, _PATTERN, Pattern(True, implied=True))
    return mask


def _pattern(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Any,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> Pattern | None:
    """What a mask made of these arguments says, if it is one that we know."""
    window = None
    causal = mask_function is causal_mask_function
    if not causal and mask_function is not bidirectional_mask_function:
        # allow_is_causal_skip is False where anything beside the window (packed sequences, overlays) is in the mask.
        if local_size is None or not allow_is_causal_skip or not _is_window(mask_function, local_size):
            return None
        causal, window = True, local_size - 1
    if causal:
        places = (q_offset, q_length, kv_offset, kv_length)
        if not all(isinstance(place, int) for place in places) or q_offset + q_length != kv_offset + kv_length:
            return None
    padding = None
    if attention_mask is not None:
        if attention_mask.shape[-1] < kv_offset + kv_length:  # transformers takes what it does not reach for padding
            return None
        if not bool(attention_mask.all()):
            padding = attention_mask
    return Pattern(causal, window, padding)


def _is_window(function: Any, size: int) -> bool:
    """Whether a mask function says: at the query's place or before it, fewer than `size` places away.

    Asked at the places where it would differ.
    """
    zero, place = torch.zeros((), dtype=torch.int64), torch.tensor(3 * size + 7)
    around = {1: False, 0: True, 1 - size: True, -size: False, -2 * size: False}
    try:
        return all(bool(function(zero, zero, place, place + d)) is seen for d, seen in around.items())
    except (IndexError, RuntimeError):  # it reads tensors that do not reach there: none of ours
        return False


def pattern_of(mask: Tensor | None, causal: bool) -> Pattern | None:
    """What a mask says, if that is known; none at all says `causal`, and so does one that stands for none."""
    if mask is None:
        return Pattern(causal)
    found: Pattern | None = getattr(mask, _PATTERN, None)
    return Pattern(causal, implied=True) if found is not None and found.implied else found


# --- attention -------------------------------------------------------------------------------------------------------


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a module of transformers, by our op or by torch's.

    Args:
        module: the attention layer.
        query: (B, Hq, S, D).
        key, value: (B, Hkv, Skv, D).
        attention_mask: what `attention_mask` made, or a user's own, (B or 1, 1, S, Skv).
        dropout: of the weights.
        scaling: of the products; None for 1 / sqrt(D).
        is_causal: None: as the module says. Without a mask, queries then stand beside the first keys.
        position_bias: added to the products.
        kwargs: more that transformers passes.

    Returns:
        (B, S, Hq, D), and None for the weights.
    """
    mark = getattr(module, MARK, None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    pattern = pattern_of(attention_mask, causal)
    if pattern is not None and pattern.implied:
        attention_mask = None
    if mark is not None and mark.attention:
        reason = _refuses(query, key, dropout, position_bias, attention_mask, pattern, mark.padding, kwargs)
        if reason is None:
            assert pattern is not None  # _refuses has a reason where there is none
            S = query.shape[2]
            if attention_mask is None and causal and key.shape[2] > S:  # a static cache, filled up to the queries
                key, value = key[:, :, :S], value[:, :, :S]
            return _attend(query, key, value, pattern, scaling), None
        if not torch.compiler.is_compiling():
            mark.report.fallbacks[reason] += 1
    y, weights = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
        position_bias=position_bias, **kwargs,
    )  # fmt: skip
    return y, weights


def _refuses(
    query: Tensor,
    key: Tensor,
    dropout: float,
    position_bias: Tensor | None,
    mask: Tensor | None,
    pattern: Pattern | None,
    padding: str,
    kwargs: dict[str, Any],
) -> str | None:
    """Why a call goes to torch; None if our op serves it."""
    if query.shape[2] == 1:
        return "one query a sequence (decoding), where torch's own costs the host less"
    if dropout > 0.0:
        return f"dropout of the attention weights (p = {dropout})"
    if position_bias is not None:
        return "a bias of the scores by position"
    if kwargs.get("output_attentions"):
        return "output_attentions (only attn_implementation='eager' gives the weights)"
    if pattern is None:
        return "a mask that is neither causal, nor a window, nor padding (or that torch.compile traces)"
    if pattern.padding is None:
        return None
    if padding == "exact":
        return "padding (patch(model, padding='skip') keeps it on our kernels, and padded positions mean nothing then)"
    if query.shape[2] != key.shape[2]:
        return "padding beside a cache"
    return None if pattern.borders() is not None else "padding that is not at the ends of a sequence"


def _attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scaling: float | None) -> Tensor:
    """(B, S, Hq, D)."""
    if pattern.padding is None:
        o = ops.attention(q, k, v, causal=pattern.causal, scale=scaling, window=pattern.window)
        assert isinstance(o, Tensor)  # without the log-sum-exp
        return o.transpose(1, 2)
    borders = pattern.borders()
    assert borders is not None  # _refuses has a reason where there are none
    B, H, S, D = q.shape
    q, k, v = (x.transpose(1, 2).reshape(B * S, x.shape[1], D) for x in (q, k, v))
    o = ops.attention_varlen(
        q, k, v, borders, borders, S, S, causal=pattern.causal, scale=scaling, window=pattern.window
    )
    assert isinstance(o, Tensor)  # without the log-sum-exp
    return o.view(B, S, H, D)
