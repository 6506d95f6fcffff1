"""attention_varlen: attention within each of several packed sequences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops._library import name_of, not_a_tensor, with_torch_keywords
from accelerant.ops.attention import (
    AttentionOp,
    attention_reference,
    check_heads,
    checked,
    checked_window,
    options_of,
    refuses_triton_backward,
    refuses_triton_kernels,
    shapes_of,
    split_products,
)
from accelerant.ops.attention.backends import TORCH, VARLEN_FLASH, attend
from accelerant.ops.attention.launch import launch_varlen_backward, launch_varlen_forward, like
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation


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


def _sequences(*pairs: tuple[Tensor, list[int]]) -> list[list[Tensor]]:
    """Return for each tensor (total, H, D) its views of the sequences between the offsets, (1, H, length, D) each."""
    return [[x[begin:end].transpose(0, 1)[None] for begin, end in itertools.pairwise(bounds)] for x, bounds in pairs]


def _torch_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute one sequence at a time; synchronizes with the device to read the offsets."""
    bounds_q, bounds_k = cu_q.tolist(), cu_k.tolist()
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    o, lse = like(q), q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=wide)
    sequences = _sequences((q, bounds_q), (k, bounds_k), (v, bounds_k), (o, bounds_q))
    for i, (q_i, k_i, v_i, o_i) in enumerate(zip(*sequences, strict=True)):
        result, lse_i = TORCH[0].run(q_i, k_i, v_i, causal, scale, window)
        o_i.copy_(result)
        lse[:, bounds_q[i] : bounds_q[i + 1]] = lse_i[0]
    return o, lse


def _torch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
    max_k: int, causal: bool, scale: float, window: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    bounds_q, bounds_k = cu_q.tolist(), cu_k.tolist()
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    inputs = ((do, bounds_q), (q, bounds_q), (k, bounds_k), (v, bounds_k), (o, bounds_q))
    targets = zip(gradients, (bounds_q, bounds_k, bounds_k), strict=True)
    for i, (*tensors, dq, dk, dv) in enumerate(zip(*_sequences(*inputs, *targets), strict=True)):
        lse_i = lse[None, :, bounds_q[i] : bounds_q[i + 1]].contiguous()
        results = TORCH[1].run(*tensors, lse_i, causal, scale, window)
        for target, gradient in zip((dq, dk, dv), results, strict=True):
            target.copy_(gradient)
    return gradients


def _cost(case: Case, *, products: int, tensors: int) -> Cost:
    """Return the cost as if each query saw the longest sequence of keys: the lengths are known to the device only."""
    _, Hq, Hkv, total, total_k, _, max_k, D = case.shape
    pairs = total * min(max_k, total_k) // (2 if "causal" in case.options else 1)
    numbers = D * (Hq * total + Hkv * total_k)
    return Cost(tensors * numbers * case.dtype.itemsize + 4 * Hq * total, 2 * products * pairs * D * Hq)


attention_varlen_fwd = Operation(
    "attention_varlen_fwd",
    (
        split_products(launch_varlen_forward),
        Implementation("triton", launch_varlen_forward, refuses=refuses_triton_kernels, own=True),
        VARLEN_FLASH[0],
        Implementation("torch", _torch_forward),
    ),
    cost=lambda case: _cost(case, products=2, tensors=2),
)
attention_varlen_bwd: Callable[..., tuple[Tensor, ...]] = Operation(
    "attention_varlen_bwd",
    (
        split_products(launch_varlen_backward),
        Implementation("triton", launch_varlen_backward, refuses=refuses_triton_backward, own=True),
        VARLEN_FLASH[1],
        Implementation("torch", _torch_backward),
    ),
    cost=lambda case: _cost(case, products=5, tensors=4),
)


@with_torch_keywords
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, causal: bool = False, scale: float | None = None, window: int | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention within each of several sequences, packed one after the other without padding.

    Sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] and the keys cu_seqlens_k[b] to
    cu_seqlens_k[b + 1]. Each is computed as by `attention`, with the same meaning of causal, scale and window.

    Args:
        q: (total_q, Hq, D), float16, bfloat16, float32 or float64.
        k, v: (total_k, Hkv, D), dtype of q; Hkv divides Hq.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 on the device of q: the sequences' offsets, from 0 to total_q
            and total_k, non-decreasing. The values stay on the device and are not checked.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths; queries beyond max_seqlen_q are not computed.
        causal, scale, window, return_lse: as in attention.

    Returns:
        o, (total_q, Hq, D), dtype of q, in q's layout; with return_lse also the logarithms, (Hq, total_q), float32
        (float64 for float64), without a gradient. Differentiable twice. Under autocast q, k and v are cast.

    Raises:
        ShapeError: shapes that do not go together, tensors on several devices.
        UnsupportedDtype: a dtype not listed above, or several.
        ConfigError: a negative window or length.

    Source: as attention; Dao 2023, arXiv:2307.08691 for the packed form.
    """
    q, k, v = checked(q, k, v, "attention_varlen")
    if q.dim() != 3 or k.dim() != 3:
        raise ShapeError(f"attention_varlen takes q (total_q, Hq, D) and k (total_k, Hkv, D), got {shapes_of(q, k)}")
    if q.shape[2] != k.shape[2] or q.shape[2] < 1:
        raise ShapeError(f"q and k must have the same D of at least 1, got {q.shape[2]} and {k.shape[2]}")
    check_heads(q.shape[1], k.shape[1])
    _check_bounds(q, cu_seqlens_q, cu_seqlens_k)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if length < 0:
            raise ConfigError(f"{name} must be at least 0, got {length}")
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    window = checked_window(window, max_seqlen_k)
    o, lse = _attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale, window)
    return (o, lse) if return_lse else o


def _check_bounds(q: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if not isinstance(cu, Tensor):
            raise not_a_tensor("attention_varlen", name, cu)
        if cu.dtype != torch.int32:
            raise UnsupportedDtype(f"{name} must be int32, got {name_of(cu.dtype)}")
        if cu.device != q.device:
            raise ShapeError(f"{name} must be on {q.device}, where q is; it is on {cu.device}")
        if cu.dim() != 1 or cu.shape[0] < 1 or not cu.is_contiguous():
            raise ShapeError(f"{name} must be (sequences + 1,) and contiguous, got {tuple(cu.shape)}")
    if cu_q.shape != cu_k.shape:
        raise ShapeError(f"cu_seqlens_k must be {tuple(cu_q.shape)} as cu_seqlens_q is, got {tuple(cu_k.shape)}")


def _case(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float,
    window: int,
) -> Case:  # fmt: skip
    total, Hq, D = q.shape
    sizes = (cu_q.shape[0] - 1, Hq, k.shape[1], total, k.shape[0], max_q, max_k, D)
    return Case(q.device, q.dtype, sizes, options_of(causal, window))


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, *settings: Any
) -> tuple[Tensor, ...]:
    *settings_only, _ = settings
    case = _case(q, k, v, cu_q, cu_k, *settings_only)
    return attention_varlen_bwd(case, do, q, k, v, o, lse, cu_q, cu_k, *settings_only)


def _composite(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    seen = _mask(q.shape[0], k.shape[0], cu_q, cu_k, causal, window)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    o, lse = attend(q, k, v, False, scale, -1, seen)
    return o.squeeze(0).transpose(0, 1), lse.squeeze(0).detach()


def _mask(total_q: int, total_k: int, cu_q: Tensor, cu_k: Tensor, causal: bool, window: int) -> Tensor:
    """Return which key each query sees, over all sequences: (total_q, total_k) bool."""
    query, key = (torch.arange(total, device=cu_q.device, dtype=torch.int32) for total in (total_q, total_k))
    last = cu_q.shape[0] - 2
    q_sequence = (torch.searchsorted(cu_q, query, right=True) - 1).clamp(0, max(last, 0))
    k_sequence = (torch.searchsorted(cu_k, key, right=True) - 1).clamp(0, max(last, 0))
    seen = q_sequence[:, None] == k_sequence[None, :]
    if last < 0:
        return torch.zeros_like(seen)
    # The last query of a sequence is aligned with its last key.
    position = (query - cu_q[q_sequence + 1] + cu_k[q_sequence + 1])[:, None]
    if causal:
        seen = seen & (key <= position)
    if window >= 0:
        seen = seen & (key >= position - window)
    return seen


def _fake(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=wide)


_attention_varlen = AttentionOp(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, int max_q, int max_k, bool causal, "
    "float scale, int window) -> (Tensor o, Tensor lse)",
    operation=attention_varlen_fwd,
    case=_case,
    backward=_backward,
    saves=("q", "k", "v", "o", "lse", "cu_q", "cu_k"),
    gradients={"q": "q", "k": "k", "v": "v"},
    composite=_composite,
    fake=_fake,
    keeps_layout=True,
)
