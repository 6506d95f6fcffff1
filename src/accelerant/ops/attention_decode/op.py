"""attention_decode: reference, implementations, the public function, and the registration with torch."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops._launch import triton_operation
from accelerant.ops._library import below_autograd, define, is_plain, name_of
from accelerant.ops.attention.backends import TORCH
from accelerant.ops.attention.composite import attend
from accelerant.ops.attention.op import check_heads, checked, refuses_triton_kernels
from accelerant.ops.attention.reference import attention_reference
from accelerant.ops.attention_decode.launch import launch_forward
from accelerant.runtime.dispatch import Case, Cost

__all__ = ["attention_decode", "attention_decode_fwd", "attention_decode_reference"]


def attention_decode_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, scale: float | None = None
) -> Tensor:
    """Return causal attention of each sequence's queries to the first `length` keys of its cache."""
    results = []
    for b, length in enumerate(lengths.tolist()):
        k, v = (x[b : b + 1, :, :length] for x in (k_cache, v_cache))
        results.append(attention_reference(q[b : b + 1], k, v, causal=True, scale=scale))
    return torch.cat(cast("list[Tensor]", results)) if results else q.clone()


def _torch_forward(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Compute one sequence at a time; synchronises with the device to read the lengths."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.no_grad():
        for b, length in enumerate(lengths.tolist()):
            keys, values = (x[b : b + 1, :, : max(length, 0)] for x in (k, v))
            o[b : b + 1] = TORCH[0].run(q[b : b + 1], keys, values, q.shape[2] > 1, scale, -1)[0]
    return o


def _cost(case: Case) -> Cost:
    """Return the cost for full caches."""
    B, Hq, Hkv, Sq, T, D = case.shape
    return Cost((2 * B * Hkv * T * D + 2 * B * Hq * Sq * D) * case.dtype.itemsize, 4 * B * Hq * Sq * T * D)


attention_decode_fwd = triton_operation(
    "attention_decode_fwd", launch_forward, _torch_forward, cost=_cost, refuses=refuses_triton_kernels
)


def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, scale: float | None = None
) -> Tensor:
    """Compute attention of each sequence's newest queries to a cache of keys and values.

    The caches already hold the keys and values of these queries: query i of Sq sees the keys before
    length - Sq + i + 1, that is itself and all before it.

    Args:
        q: (B, Hq, Sq, D), float16, bfloat16, float32 or float64; Sq is 1, or a few (as in speculative decoding).
        k_cache, v_cache: (B, Hkv, T, D), dtype of q; Hkv divides Hq. Any layout, fastest if D is contiguous. Nothing
            beyond a sequence's length is read.
        lengths: (B,) int32 or int64 on the device of q: keys of each sequence, 0 to T. The values stay on the device
            and are not checked; more than T counts as T.
        scale: factor of the scores; None for 1 / sqrt(D).

    Returns:
        (B, Hq, Sq, D), dtype of q, contiguous, without a gradient. A query that sees no key gives zeros. Under
        torch.autocast q and the caches are cast to the autocast dtype.

    Raises:
        ShapeError: incompatible shapes, tensors on several devices.
        UnsupportedDtype: a dtype not listed above, or several.

    Source: Dao, Haziza, Massa and Sizov 2023, "Flash-Decoding for long-context inference".
    """
    q, k_cache, v_cache = checked(q, k_cache, v_cache, "attention_decode")
    if q.dim() != 4 or k_cache.dim() != 4:
        shapes = f"{tuple(q.shape)} and {tuple(k_cache.shape)}"
        raise ShapeError(f"attention_decode takes q (B, Hq, Sq, D) and caches (B, Hkv, T, D), got {shapes}")
    B, Hq, _, D = q.shape
    if k_cache.shape[0] != B or k_cache.shape[3] != D or D < 1:
        shapes = f"{tuple(q.shape)} and {tuple(k_cache.shape)}"
        raise ShapeError(f"q and k_cache must have the same B and D, got {shapes}")
    check_heads(Hq, k_cache.shape[1])
    if lengths.dim() != 1 or lengths.shape[0] != B or not lengths.is_contiguous():
        raise ShapeError(f"lengths must be ({B},) and contiguous, got {tuple(lengths.shape)}")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise UnsupportedDtype(f"lengths must be int32 or int64, got {name_of(lengths.dtype)}")
    if lengths.device != q.device:
        raise ShapeError(f"lengths must be on {q.device}, where q is; it is on {lengths.device}")
    run = _forward if not torch.compiler.is_compiling() and is_plain(q) else _op
    o: Tensor = run(q, k_cache, v_cache, lengths, D**-0.5 if scale is None else float(scale))
    return o


def _forward(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    B, Hq, Sq, D = q.shape
    case = Case(q.device, q.dtype, (B, Hq, k.shape[1], Sq, k.shape[2], D))
    o: Tensor = attention_decode_fwd(case, q, k, v, lengths, scale)
    return o


def _without_gradient(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    with below_autograd():
        o: Tensor = _op(q, k, v, lengths, scale)
    return o


def _composite(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    Sq, T = q.shape[2], k.shape[2]
    key, query = torch.arange(T, device=q.device), torch.arange(Sq, device=q.device)
    length = lengths[:, None, None, None, None]
    seen = key <= length - Sq + query[:, None]
    kept = (key < lengths[:, None])[:, None, :, None]
    o = attend(q, k.where(kept, 0), v.where(kept, 0), False, scale, -1, seen & (key < length))[0]
    return o.detach()


_op = define(
    "attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, float scale) -> Tensor",
    kernel=_forward,
    fake=lambda q, k, v, lengths, scale: q.new_empty(q.shape),
    differentiable=_without_gradient,
    composite=_composite,
)
