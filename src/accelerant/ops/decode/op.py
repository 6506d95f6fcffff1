"""attention_decode: launches, reference, the public function, and the registration with torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops._hopper import starts_early
from accelerant.ops._launch import ceil_div, multiprocessors, next_power_of_2, triton_operation
from accelerant.ops._library import define, is_plain, name_of, not_a_tensor, with_torch_keywords
from accelerant.ops.attention import attention_reference, check_heads, checked, refuses_triton_kernels, shapes_of
from accelerant.ops.attention.backends import TORCH, attend
from accelerant.ops.attention.launch import triton_capability, with_rows
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, Cost

KERNELS = {
    name: TritonKernel("accelerant.ops.decode.triton_kernels", f"attention_decode_{name}")
    for name in ("fwd", "combine")
}

MAX_SPLITS = 64
NUM_WARPS = 4
_PROGRAMS = 2  # per multiprocessor, if each has at least _ENOUGH_KEYS keys
_ENOUGH_KEYS = 512


@functools.cache
def constants(rows: int, width: int, dtype: torch.dtype, capability: tuple[int, int] | None) -> dict[str, int | bool]:
    """Return the compile-time arguments of fwd for `rows` rows per key head; capability None: the interpreter."""
    block_d = max(16, next_power_of_2(width))
    upcast = dtype == torch.bfloat16 and (capability is None or capability < (8, 0))
    slow = dtype == torch.float32 or upcast or (capability is not None and capability < (8, 0))
    block_m = min(16 if slow else 64, max(16, next_power_of_2(rows)))
    block_n = 16 if capability is None or (slow and block_d > 64) else 32 if slow or block_d > 128 else 64
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d, "UPCAST": upcast}


@functools.cache
def stages_for(capability: tuple[int, int] | None) -> int:
    """Return the pipeline depth: as many loads as fit in 227, 99 or 64 KiB of shared memory."""
    return 4 if capability == (9, 0) else 2 if capability is not None and capability >= (8, 0) else 1


def splits_for(programs: int, T: int, block_n: int, device: torch.device) -> int:
    """Return the parts of T keys, with `programs` programs each, that fill the device in one wave."""
    processors = multiprocessors(device)
    most = min(ceil_div(T, block_n), MAX_SPLITS)
    if ceil_div(_PROGRAMS * processors, programs) * _ENOUGH_KEYS > T:
        return max(1, min(processors // programs, most))  # a second program per multiprocessor costs more than it hides
    return max(1, min(_PROGRAMS * processors // programs, most))


def launch_forward(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, splits: int | None = None) -> Tensor:
    """Return o, contiguous; splits None for splits_for's."""
    B, Hq, Sq, D = q.shape
    Hkv, T = k.shape[1], k.shape[2]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not o.numel():
        return o
    if not T:
        return o.zero_()
    q, k, v = with_rows(q), with_rows(k), with_rows(v)
    group = Hq // Hkv
    capability = triton_capability(q.device)
    fixed = constants(group * Sq, D, q.dtype, capability)
    row_blocks = ceil_div(group * Sq, int(fixed["BLOCK_M"]))
    programs = B * Hkv * row_blocks
    splits = splits or splits_for(programs, T, int(fixed["BLOCK_N"]), q.device)
    parts, lse = o, None
    if splits > 1:
        parts = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, B, Hq, Sq), dtype=torch.float32, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    KERNELS["fwd"].launch(
        (programs * splits,),
        (q, k, v, lengths, parts, lse, T, Sq, Hkv, group, row_blocks, splits, D, scale, *strides),
        {**fixed, "EARLY": starts_early(q.device)},
        num_warps=NUM_WARPS,
        num_stages=stages_for(capability),
    )
    if lse is not None:
        rows = B * Hq * Sq
        joined = {
            "BLOCK_S": next_power_of_2(splits), "BLOCK_D": fixed["BLOCK_D"], "EARLY": starts_early(q.device),
        }  # fmt: skip
        KERNELS["combine"].launch((rows,), (parts, lse, o, rows, splits, D), joined, num_warps=NUM_WARPS)
    return o


def _torch_forward(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Compute one sequence at a time; synchronizes with the device to read the lengths."""
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


attention_decode_fwd: Callable[..., Tensor] = triton_operation(
    "attention_decode_fwd", launch_forward, _torch_forward, cost=_cost, refuses=refuses_triton_kernels
)


def attention_decode_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, scale: float | None = None
) -> Tensor:
    """Return causal attention of each sequence's queries to the first `length` keys of its cache."""
    results = []
    for b, length in enumerate(lengths.tolist()):
        k, v = (x[b : b + 1, :, :length] for x in (k_cache, v_cache))
        results.append(attention_reference(q[b : b + 1], k, v, causal=True, scale=scale))
    return torch.cat(cast("list[Tensor]", results)) if results else q.clone()


def token_rows(tokens: int, lengths: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the row of each token, and the tokens of its row that come after it."""
    token = torch.arange(tokens, device=lengths.device, dtype=torch.int32)
    if starts is None:
        return token, torch.zeros_like(token)
    row = (torch.searchsorted(starts, token, right=True) - 1).clamp(0, max(lengths.shape[0] - 1, 0))
    return row, starts[row + 1] - 1 - token


def attention_paged_reference(
    q: Tensor, k_blocks: Tensor, v_blocks: Tensor, block_table: Tensor, lengths: Tensor,
    starts: Tensor | None = None, *, window: int | None = None, scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Return causal attention of each token to its row's keys, gathered for each token."""
    row, left = token_rows(q.shape[0], lengths, starts)
    position = (lengths[row] - 1 - left)[:, None]
    table = block_table[row].clamp(0, max(k_blocks.shape[0] - 1, 0))
    key = torch.arange(table.shape[1] * k_blocks.shape[1], device=q.device)
    seen = key <= position
    if window is not None:
        seen = seen & (key > position - window)
    keys, values = (
        x[table].flatten(1, 2).where(seen[..., None, None], 0).transpose(1, 2) for x in (k_blocks, v_blocks)
    )
    scores = q.unflatten(1, (k_blocks.shape[2], -1)) @ keys.transpose(-1, -2)
    scores = scores * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~seen[:, None, None]
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1).masked_fill(hidden, 0)
    return (weights @ values).flatten(1, 2)


@with_torch_keywords
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float | None = None
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
        shapes = shapes_of(q, k_cache)
        raise ShapeError(f"attention_decode takes q (B, Hq, Sq, D) and caches (B, Hkv, T, D), got {shapes}")
    B, Hq, _, D = q.shape
    if k_cache.shape[0] != B or k_cache.shape[3] != D or D < 1:
        raise ShapeError(f"q and k_cache must have the same B and D, got {shapes_of(q, k_cache)}")
    check_heads(Hq, k_cache.shape[1])
    if not isinstance(lengths, Tensor):
        raise not_a_tensor("attention_decode", "lengths", lengths)
    if lengths.dim() != 1 or lengths.shape[0] != B or not lengths.is_contiguous():
        raise ShapeError(f"lengths must be ({B},) and contiguous, got {tuple(lengths.shape)}")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise UnsupportedDtype(f"lengths must be int32 or int64, got {name_of(lengths.dtype)}")
    if lengths.device != q.device:
        raise ShapeError(f"lengths must be on {q.device}, where q is; it is on {lengths.device}")
    run = _forward if not torch.compiler.is_compiling() and is_plain(q) else _op
    return run(q, k_cache, v_cache, lengths, D**-0.5 if scale is None else float(scale))


def _forward(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    B, Hq, Sq, D = q.shape
    case = Case(q.device, q.dtype, (B, Hq, k.shape[1], Sq, k.shape[2], D))
    return attention_decode_fwd(case, q, k, v, lengths, scale)


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
    composite=_composite,
)
