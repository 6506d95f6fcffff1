"""Attention by torch's own functions, on any device: the fallback of the kernels and libraries.

On the CPU these are torch's fused functions, forward and backward; elsewhere the score matrix is materialized.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import repeat

import torch
from torch import Tensor

from accelerant.ops.attention.launch import like, with_rows

aten = torch.ops.aten
_unsafe_view = aten._unsafe_view.default
_forward, _backward = (
    getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{end}").default for end in ("", "_backward")
)


def with_layout_of(x: Tensor, y: Tensor, empty: Callable[[Tensor], Tensor] = like) -> Tensor:
    """Return y with the strides of empty(x), which the op's fake implementation promises."""
    if y.stride() == x.stride() or (y.is_contiguous() and x.is_contiguous()):
        return y
    target = empty(x)
    return y if y.stride() == target.stride() else target.copy_(y)


def with_layouts_of(inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the gradients with the strides that torch.empty_like gives for the inputs."""
    return tuple(map(with_layout_of, inputs, gradients, repeat(torch.empty_like)))


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int, seen: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention with a materialized score matrix, by functions that torch differentiates any number of times.

    Args:
        q: (B, Hq, S, D).
        k, v: (B, Hkv, Skv, D).
        causal, scale, window: as the op's; window -1 for none.
        seen: (S, Skv) bool mask, in place of causal and window.
        mask: as the op's, of four dimensions.

    Returns:
        o in q's dtype, and lse, float32 (float64 for float64).
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    Hkv, S, Skv = k.shape[1], q.shape[2], k.shape[2]
    grouped = q.to(wide).unflatten(1, (Hkv, q.shape[1] // Hkv))
    scores = (grouped @ k.to(wide).unsqueeze(2).transpose(-1, -2)) * scale
    seen = _mask(S, Skv, causal, window, q.device) if seen is None else seen
    if mask is not None:
        heads = (1, 1) if mask.shape[1] == 1 else (Hkv, q.shape[1] // Hkv)
        visible, added = _split(mask.unflatten(1, heads))
        seen = visible if seen is None else visible & seen
        scores = scores if added is None else scores + added.to(wide)
    blind = None
    if seen is not None:
        blind = ~seen.any(-1, keepdim=True)
        # Rows that see no key attend to all and are cleared below, which avoids inf - inf.
        scores = scores.masked_fill(~(seen | blind), -math.inf)
    weights = torch.softmax(scores, -1)
    lse = torch.logsumexp(scores, -1)
    o = (weights @ v.to(wide).unsqueeze(2)).to(q.dtype)
    if blind is not None:
        o, lse = o.masked_fill(blind, 0), lse.masked_fill(blind.squeeze(-1), -math.inf)
    return o.flatten(1, 2), lse.flatten(1, 2)


def _split(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return which keys a mask leaves visible, and the numbers to add to scores, 0 where it hides; None for a bool."""
    if mask.dtype == torch.bool:
        return mask, None
    visible = ~(mask <= HIDDEN)
    return visible, torch.where(visible, mask, 0.0)


HIDDEN = -1e30
"""Numbers of a mask up to this hide a key as -inf does, such as the smallest of float32 and of bfloat16."""


def _mask(S: int, Skv: int, causal: bool, window: int, device: torch.device) -> Tensor | None:
    """Return which key each query sees, (S, Skv) bool; None if each sees all."""
    if not causal and window < 0:
        return None
    position = torch.arange(S, device=device)[:, None] + (Skv - S)
    key = torch.arange(Skv, device=device)[None, :]
    seen = key <= position if causal else key >= position - window
    return seen & (key >= position - window) if causal and window >= 0 else seen


def _additive(
    q: Tensor, k: Tensor, causal: bool, window: int, mask: Tensor | None = None
) -> tuple[bool, Tensor | None]:
    """Return the arguments is_causal and attn_mask of torch's CPU function."""
    S, Skv = q.shape[2], k.shape[2]
    if mask is None and window < 0 and (not causal or Skv == S):
        return causal, None
    seen = _mask(S, Skv, causal, window, q.device)
    if mask is None:
        assert seen is not None  # by the condition above
        return False, q.new_zeros(S, Skv).masked_fill_(~seen, -math.inf)
    visible, added = _split(mask)
    visible = visible if seen is None else visible & seen
    added = q.new_zeros(()) if added is None else added.to(q.dtype)
    shape = torch.broadcast_shapes(visible.shape, (1, 1, S, Skv))
    return False, torch.where(visible, added, -math.inf).expand(shape)


def _grouped(q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return (B * Hkv, group, S, D) views: heads that share keys become a batch, the keys repeated by stride 0."""
    B, Hkv = others[0].shape[:2]
    group = q.shape[1] // Hkv
    keys = [x.reshape(B * Hkv, 1, *x.shape[2:]).expand(-1, group, -1, -1) for x in others]
    return (q.reshape(B * Hkv, group, *q.shape[2:]), *keys)


def _folds(*tensors: Tensor) -> bool:
    """Return whether heads can be folded into the batch: contiguous tensors with the same number of heads, above one.

    Torch's functions return results and gradients with the memory layout (B, S, H, D). Folding saves a copy in the
    forward pass and three in the backward pass for contiguous heads.
    """
    heads = tensors[0].shape[1]
    return heads > 1 and all(x.is_contiguous() and x.shape[1] == heads for x in tensors)


def _arguments(q: Tensor, k: Tensor, v: Tensor, *, folded: bool) -> tuple[Tensor, ...]:
    """Return q, k and v with the shapes that torch's CPU functions expect."""
    if folded:
        return tuple([x.view(-1, 1, *x.shape[2:]) for x in (q, k, v)])
    rows = with_rows(q), with_rows(k), with_rows(v)
    return rows if q.shape[1] == k.shape[1] else _grouped(*rows)


def unfolded(o: Tensor, q: Tensor) -> Tensor:
    """Return a result of folded heads in q's shape; no view for autograd, so that it may be changed in place."""
    return _unsafe_view(o, tuple(q.shape))


def torch_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return o in q's layout, and lse (B, Hq, S), contiguous."""
    B, Hq, S, _ = q.shape
    Hkv, Skv = k.shape[1], k.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if not q.numel() or not k.numel():
        return like(q).zero_(), q.new_full((B, Hq, S), -math.inf, dtype=wide)
    if q.device.type != "cpu" or (mask is not None and Hq != Hkv):
        o, lse = attend(q, k, v, causal, scale, window, mask=mask)
        return with_layout_of(q, o), lse.contiguous()
    masked = mask is not None
    flag, mask = _additive(q, k, causal, window, mask)
    folded = not masked and _folds(q, k, v)
    args = _arguments(q, k, v, folded=folded)
    o, lse = _forward(*args, 0.0, flag, attn_mask=mask, scale=scale)
    if folded:
        o, lse = unfolded(o, q), lse.view(B, Hq, S)
    elif Hq != Hkv:
        o, lse = o.reshape(q.shape), lse.reshape(B, Hq, S)
    lse = lse.contiguous()
    if masked:
        assert mask is not None  # for the type checker: made from the op's
        blind = (mask == -math.inf).all(-1)
        o, lse = o.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -math.inf)
    elif causal and Skv < S:
        lse[:, :, : S - Skv] = -math.inf
    return with_layout_of(q, o), lse


def torch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, window: int,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return dq, dk and dv, in the layouts of q, k and v."""
    Hq, Hkv = q.shape[1], k.shape[1]
    if not q.numel() or not k.numel():
        return tuple(torch.empty_like(x).zero_() for x in (q, k, v))
    if q.device.type != "cpu" or (mask is not None and Hq != Hkv):
        return with_layouts_of((q, k, v), dense_backward(do, q, k, v, o, lse, causal, scale, window, mask))
    masked = mask is not None
    flag, mask = _additive(q, k, causal, window, mask)
    if masked or (causal and q.shape[2] > k.shape[2]):
        lse = lse.masked_fill(lse == -math.inf, 0)
    folded = not masked and _folds(q, k, v, o)
    args = _arguments(q, k, v, folded=folded)
    do, shape = with_rows(do), args[0].shape
    if folded or Hq != Hkv:
        do, o, lse = do.reshape(shape), o.reshape(shape), lse.reshape(shape[:3])
    dq, dk, dv = _backward(do, *args, o, lse, 0.0, flag, attn_mask=mask, scale=scale)
    if Hq != Hkv:
        dk, dv = dk.sum(1), dv.sum(1)
    if folded:
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)
    if Hq != Hkv:
        dq, dk, dv = dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)
    return with_layouts_of((q, k, v), (dq, dk, dv))


def dense_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, window: int,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return dq, dk and dv by the formulas of triton_kernels.py, with a materialized score matrix."""
    wide = lse.dtype
    split = (k.shape[1], q.shape[1] // k.shape[1])
    dos, qs, os = (x.to(wide).unflatten(1, split) for x in (do, q, o))
    ks, vs = (x.to(wide).unsqueeze(2) for x in (k, v))
    scores = qs @ ks.transpose(-1, -2) * scale
    seen = _mask(q.shape[2], k.shape[2], causal, window, q.device)
    if mask is not None:
        visible, added = _split(mask.unflatten(1, (1, 1) if mask.shape[1] == 1 else split))
        seen = visible if seen is None else visible & seen
        scores = scores if added is None else scores + added.to(wide)
    p = (scores - lse.unflatten(1, split).unsqueeze(-1)).exp()
    if seen is not None:
        p = p.masked_fill(~seen, 0)
    ds = p * (dos @ vs.transpose(-1, -2) - (dos * os).sum(-1, keepdim=True)) * scale
    dq = (ds @ ks).flatten(1, 2).to(q.dtype)
    dk = (ds.transpose(-1, -2) @ qs).sum(2).to(k.dtype)
    return dq, dk, (p.transpose(-1, -2) @ dos).sum(2).to(v.dtype)
