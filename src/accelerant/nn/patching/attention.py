"""Our attention as "accelerant" in transformers' AttentionInterface, with its masks.

A call from a module that is not patched, whose config may be shared, gets exactly the result of "sdpa". Masks are
always valid for torch's attention. If a mask's content is known from how it was made, a Pattern is attached to it as an
attribute, since transformers passes nothing else on; a mask without one goes to torch.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from accelerant import ops
from accelerant.nn.patching.plain import EXPORT_REASON, SMALL_REASON, is_exported, is_small
from accelerant.nn.patching.record import ATTENTION_NAME, MARK, Capture

_PATTERN = "_accelerant_pattern"

_bidirectional = getattr(masking_utils, "bidirectional_mask_function", None)  # from transformers 5

_OPTIONS = frozenset(("dropout", "scaling", "is_causal", "position_bias", "kwargs"))
_NEW_OPTIONS = frozenset(list(inspect.signature(sdpa_attention_forward).parameters)[5:]) - _OPTIONS
"""Options of transformers' function that ours does not know; it is transformers' that has to serve them."""

_REFUSES_CAPS = "softcap" in sdpa_attention_forward.__code__.co_consts  # from 5.21 on; before, it ignores them


@dataclass(eq=False)
class Pattern:
    """The content of an attention mask.

    Attributes:
        causal: whether a query attends to no later key; queries are aligned with the last keys.
        window: how many positions back a query attends; None for all.
        padding: (B, Skv) bool, False where a key is padding; None if there is no padding.
        implied: whether the mask replaces the absence of one, for which the module's is_causal decides.
        version: the mask's version: what was written into it since is unknown.
    """

    causal: bool
    window: int | None = None
    padding: Tensor | None = None
    implied: bool = False
    version: int = 0
    _boundaries: Tensor | None = None

    def boundaries(self) -> Tensor | None:
        """Return the boundaries of runs in the concatenated sequences, 3B + 1 int32.

        A sequence consists of padding, tokens and padding, each possibly empty; None if one does not. Synchronizes with
        the device once a mask.
        """
        assert self.padding is not None  # for the type checker: called only with padding
        if self._boundaries is None:
            B, S = self.padding.shape
            real = self.padding.int()
            length = real.sum(1)
            first = real.argmax(1)  # index of the first token; 0 if all is padding, as is length
            ends = torch.stack((first, first + length, torch.full_like(first, S)), 1)
            starts = torch.arange(B, device=real.device)[:, None] * S
            boundaries = torch.cat((starts[:1, 0], (ends + starts).flatten())).to(torch.int32)
            steps = (real[:, 1:] != real[:, :-1]).sum(1)
            runs = bool(((real[:, 0] + real[:, -1] + steps) <= 2).all())
            self._boundaries = boundaries if runs else boundaries[:0]
        return self._boundaries if self._boundaries.numel() else None


def register() -> None:
    """Register attention and masks with transformers."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, attention_mask)


# --- masks -----------------------------------------------------------------------------------------------------------


def attention_mask(**arguments: Any) -> Tensor | None:
    """Return transformers' mask for torch's attention, with its Pattern attached if that is known."""
    if (
        torch.compiler.is_compiling() and arguments.get("attention_mask") is None
        and arguments.get("mask_function") is _bidirectional and arguments.get("allow_is_bidirectional_skip")
    ):  # fmt: skip
        return None  # as transformers does where nothing is traced
    mask: Tensor | None = sdpa_mask(**arguments)
    # transformers 4 passes positions in place of lengths
    if mask is not None and "q_length" in arguments and not torch.compiler.is_compiling():
        pattern = _pattern_of_arguments(**arguments)
        if pattern is not None:
            pattern.version = _version(mask)
            setattr(mask, _PATTERN, pattern)
    return mask


def causal_mask(S: int, device: torch.device) -> Tensor:
    """Return the causal mask of S consecutive tokens, (1, 1, S, S), which transformers accepts as it is.

    To build the mask itself, transformers reads on the host whether positions restart (packed sequences), which
    synchronizes with the device once a forward pass. Under torch.compile it builds one in any case, and no attributes
    can be attached: an empty mask then stands for the causal one.
    """
    if torch.compiler.is_compiling():
        return torch.ones(1, 1, 0, 0, dtype=torch.bool, device=device)
    mask = torch.ones(S, S, dtype=torch.bool, device=device).tril_()[None, None]
    setattr(mask, _PATTERN, Pattern(True, implied=True, version=_version(mask)))
    return mask


def _pattern_of_arguments(
    *, q_length: int, kv_length: int, mask_function: Any, q_offset: Any = 0, kv_offset: Any = 0,
    attention_mask: Tensor | None = None, local_size: int | None = None, allow_is_causal_skip: bool = True, **_: Any,
) -> Pattern | None:  # fmt: skip
    """Return the pattern of a mask made from these arguments; None if it is unknown."""
    window = None
    causal = mask_function is causal_mask_function
    if not causal and (mask_function is not _bidirectional or _bidirectional is None):
        # allow_is_causal_skip is False if the mask contains more than the window (packed sequences, overlays).
        if local_size is None or not allow_is_causal_skip or not _is_window(mask_function, local_size):
            return None
        causal, window = True, local_size - 1
    if causal:
        bounds = (q_offset, q_length, kv_offset, kv_length)
        if not all(isinstance(bound, int) for bound in bounds) or q_offset + q_length != kv_offset + kv_length:
            return None
    padding = None
    if attention_mask is not None:
        if attention_mask.shape[-1] < kv_offset + kv_length:  # transformers treats keys beyond it as padding
            return None
        attention_mask = attention_mask[..., kv_offset : kv_offset + kv_length]
        if not (bool(attention_mask.all()) if Capture.full_masks is None else Capture.full_masks):
            padding = attention_mask
    return Pattern(causal, window, padding)


def _version(mask: Tensor) -> int:
    return 0 if mask.is_inference() else mask._version  # an inference tensor has none


def _is_window(function: Any, size: int) -> bool:
    """Return whether a mask function allows keys at distances 0 to size - 1 before the query; tests the boundaries."""
    zero = torch.zeros((), dtype=torch.int64)
    queries = [torch.tensor(3 * size + at) for at in (7, 8)]  # two: a chunk of `size` looks like a window at its end
    expected = {1: False, 0: True, 1 - size: True, -size: False, -2 * size: False}
    try:
        return all(bool(function(zero, zero, q, q + d)) is seen for q in queries for d, seen in expected.items())
    except (IndexError, RuntimeError):  # it indexes smaller tensors: not a window function
        return False


def known_pattern(mask: Tensor | None, causal: bool, lengths: tuple[int, int]) -> Pattern | None:
    """Return the pattern of a mask over `lengths` queries and keys; that of `causal` for no mask or an implied one.

    None if it is unknown, or the mask is of other lengths or was written to since it was made.
    """
    if mask is None or mask.shape[-2:] == (0, 0):  # see causal_mask
        return Pattern(causal, implied=True)
    pattern: Pattern | None = getattr(mask, _PATTERN, None)
    if pattern is None or mask.shape[-2:] != lengths or _version(mask) != pattern.version:
        return None
    return Pattern(causal, implied=True) if pattern.implied else pattern


# --- attention -------------------------------------------------------------------------------------------------------


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, position_bias: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention for a transformers module, by our op or by torch's.

    queries are (B, Hq, S, D), keys and values (B, Hkv, Skv, D), the mask (B or 1, 1, S, Skv); `is_causal` None takes
    the module's setting. Without a mask, queries are aligned with the first keys. Returns (B, S, Hq, D), and None in
    place of the weights.
    """
    mark = getattr(module, MARK, None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    pattern = known_pattern(attention_mask, causal, (query.shape[-2], key.shape[-2]))
    if pattern is not None and pattern.implied:
        attention_mask = None
    if mark is not None and mark.attention:
        reason = _refuses(module, (query, key, value), dropout, position_bias, pattern, mark.padding, kwargs)
        if reason is None:
            assert pattern is not None  # otherwise _refuses gives a reason
            S = query.shape[2]
            if attention_mask is None and pattern.causal and key.shape[2] > S:  # a static cache with room left
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
    module: Any, qkv: tuple[Tensor, Tensor, Tensor], dropout: float, position_bias: Tensor | None,
    pattern: Pattern | None, padding: str, kwargs: dict[str, Any],
) -> str | None:  # fmt: skip
    """Return why a call goes to torch; None if our op serves it."""
    query, key, value = qkv
    if is_exported():
        return EXPORT_REASON
    if is_small(query):
        return SMALL_REASON
    if query.shape[2] == 1:
        return "one query a sequence (decoding), where torch's own costs the host less"
    if dropout > 0.0:
        return f"dropout of the attention weights (p = {dropout})"
    if position_bias is not None:
        return "a bias of the scores by position"
    if kwargs.get("output_attentions"):
        return "output_attentions (only attn_implementation='eager' gives the weights)"
    if _REFUSES_CAPS and kwargs.get("softcap") is not None:
        return "a soft cap of the scores"
    if any(option in _NEW_OPTIONS for option in kwargs):  # torch.compile cannot trace an intersection of keys
        return "an option that this version of transformers added"
    groups = max(1, getattr(module, "num_key_value_groups", 1))
    if any(x.dim() != 4 for x in qkv) or key.shape != value.shape or query.shape[1] != key.shape[1] * groups:
        return "queries, keys and values of other shapes"
    if pattern is None:
        return "a mask that is neither causal, nor a window, nor padding (or that torch.compile traces)"
    if pattern.causal and key.shape[2] < query.shape[2]:
        return "fewer keys than queries, hidden from the first query on"
    if pattern.padding is None:
        return None
    if padding == "exact":
        return "padding (patch(model, padding='skip') keeps it on our kernels, and padded positions mean nothing then)"
    if query.shape[2] != key.shape[2]:
        return "padding together with a cache"
    return None if pattern.boundaries() is not None else "padding that is not at the ends of a sequence"


def _attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scaling: float | None) -> Tensor:
    """Return our attention, (B, S, Hq, D)."""
    if pattern.padding is None:
        o = ops.attention(q, k, v, causal=pattern.causal, scale=scaling, window=pattern.window)
        assert isinstance(o, Tensor)  # without the log-sum-exp
        return o.transpose(1, 2)
    boundaries = pattern.boundaries()
    assert boundaries is not None  # otherwise _refuses gives a reason
    B, H, S, D = q.shape
    q, k, v = (x.transpose(1, 2).reshape(B * S, x.shape[1], D) for x in (q, k, v))
    o = ops.attention_varlen(
        q, k, v, boundaries, boundaries, S, S, causal=pattern.causal, scale=scaling, window=pattern.window
    )
    assert isinstance(o, Tensor)  # without the log-sum-exp
    return o.view(B, S, H, D)
