"""attention: the public function, its implementations, and the registration with torch and autograd."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import triton_operation
from accelerant.ops._library import (
    FLOATING,
    autocast_dtype,
    check_dtype,
    is_plain,
    name_of,
    not_a_tensor,
    refuses_triton_kernel,
)
from accelerant.ops.attention import backends, hopper_bwd, hopper_fwd
from accelerant.ops.attention.launch import (
    MAX_WIDTH,
    launch_backward,
    launch_forward,
    launch_segments,
    like,
    new_table,
)
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.dispatch.plan import rules
from accelerant.runtime.files import clipped
from accelerant.runtime.host import has_matrix_tiles


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, window: int | None = None,
    return_lse: bool = False, mask: Tensor | None = None, segments: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return softmax(scale q k^T + mask) v over the keys that each query sees, with a materialized score matrix."""
    if segments is not None:
        of_queries, of_keys = (segments, segments) if isinstance(segments, Tensor) else segments
        mask = of_queries[:, None, :, None] == of_keys[:, None, None, :]
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


_on_cpu: Callable[..., tuple[Tensor, Tensor]] = torch._scaled_dot_product_flash_attention_for_cpu


def refuses_triton_kernels(case: Case) -> str | None:
    """Return why the Triton kernels cannot serve a case whose last size is the head width, or None."""
    if case.shape[-1] > MAX_WIDTH:
        return f"takes heads up to {MAX_WIDTH} wide, not {case.shape[-1]}"
    return refuses_triton_kernel(case)


def refuses_triton_backward(case: Case) -> str | None:
    """Return why the Triton kernels of the backward pass cannot serve a case, or None."""
    capability, D = backends.nvidia_capability(case.device), case.shape[-1]
    if (0, 0) < capability < (8, 0) and case.dtype != torch.float16 and D > 128:
        return f"needs more than the 64 KiB of shared memory of sm_75 for heads {D} wide in float32"
    return refuses_triton_kernels(case)


def refuses_split(case: Case) -> str | None:
    """Return why the Triton kernels do not split float32 for tensor cores in a case, or None."""
    if case.dtype != torch.float32:
        return f"splits float32, not {name_of(case.dtype)}"
    if backends.nvidia_capability(case.device) != (9, 0):
        return "was measured faster than torch's kernels on sm_90 only"
    if case.shape[-1] > 128:
        return f"takes heads up to 128 wide, not {case.shape[-1]}"
    return refuses_triton_kernels(case)


def _refuses_split_rows(case: Case) -> str | None:
    """Return why torch's memory-efficient kernels go first, or what `refuses_split` says."""
    declines = backends.EFFICIENT[0].refuses
    if case.shape[-1] % 16 and declines is not None and declines(case) is None:  # 0.55 of its speed at 36
        return f"reads heads {case.shape[-1]} wide 4 bytes at a time: they are no multiple of 16"
    return refuses_split(case)


def split_products(run: Callable[..., Any], refuses: Callable[[Case], str | None] = refuses_split) -> Implementation:
    """Return the implementation that splits float32 into two numbers of float16; its error is near that of float32."""
    return Implementation("triton_fp16x3", partial(run, split=True), refuses=refuses, own=True)


def _hopper_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return hopper_bwd.launch_hopper(do, q, k, v, o, lse, causal, scale, rules().deterministic)


def _bind_hopper_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, window: int
) -> Callable[..., Any] | None:
    return hopper_bwd.bind_launch(q, k, v, o, lse, causal, scale, rules().deterministic)


def _cost(case: Case, *, products: int, tensors: int) -> Cost:
    """Return the cost of `products` that read or write each of q and k `tensors` times; windows count as full."""
    B, Hq, Hkv, S, Skv, D = case.shape
    causal = "causal" in case.options
    window = next((int(each.removeprefix("window ")) for each in case.options if each.startswith("window")), None)
    last = min(S, Skv)
    pairs = last * (last + 1) // 2 + last * (Skv - last) if causal else S * Skv
    if causal and window is not None:
        pairs = min(pairs, S * (window + 1))
    elements = B * D * (Hq * S + Hkv * Skv)
    return Cost(tensors * elements * case.dtype.itemsize + 4 * B * Hq * S, 2 * products * pairs * D * B * Hq)


attention_fwd = Operation(
    "attention_fwd",
    (
        Implementation(
            "hopper", hopper_fwd.launch_hopper, refuses=hopper_fwd.refuses, own=True, bind=hopper_fwd.bind_launch
        ),
        backends.CUDNN[0],
        backends.FLASH_4[0],
        backends.FLASH[0],
        split_products(launch_forward, _refuses_split_rows),
        backends.EFFICIENT[0],
        Implementation("triton", launch_forward, refuses=refuses_triton_kernels, own=True),
        backends.TORCH[0],
    ),
    cost=lambda case: _cost(case, products=2, tensors=2),
)
attention_bwd = Operation(
    "attention_bwd",
    (
        Implementation("hopper", _hopper_backward, refuses=hopper_bwd.refuses, own=True, bind=_bind_hopper_backward),
        backends.FLASH_4[1],
        backends.CUDNN[1],
        backends.FLASH[1],
        split_products(launch_backward, _refuses_split_rows),
        backends.EFFICIENT[1],
        Implementation("triton", launch_backward, refuses=refuses_triton_backward, own=True),
        backends.TORCH[1],
    ),
    cost=lambda case: _cost(case, products=5, tensors=4),
)


def _why_torch(case: Case) -> str:
    """Return the ledger's reason for a call that the caller gives to torch."""
    if "dropout" in case.options:
        return "does not drop attention weights"
    if "broadcast" in case.options:
        return "takes equal batches, and values as wide as the keys"
    return "not chosen for a layer: torch's autograd costs less here"


_WIDE_KEYS, _WIDE_ELEMENTS = 256, 2**14


def _is_faster_wide(q: Tensor, k: Tensor) -> bool:
    """Return whether torch's kernels for a CPU take a half precision in float32, casts included, in less time.

    Float16 always, bfloat16 in short sequences, but for processors that multiply tiles of it.
    """
    if not q.is_cpu or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    short = k.shape[-2] <= _WIDE_KEYS and k.shape[-2] * k.shape[-1] <= _WIDE_ELEMENTS
    return q.dtype == torch.float16 or (short and not has_matrix_tiles())


def torch_sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None = None,
    shared: bool = False,
) -> Tensor:  # fmt: skip
    """Return torch's scaled_dot_product_attention, in float32 where that takes less time."""
    if not dropout and _is_faster_wide(q, k):
        wide = None if mask is None else mask if mask.dtype == torch.bool else mask.float()
        args = q.float(), k.float(), v.float(), wide, dropout, causal
        with torch.autocast("cpu", enabled=False):
            mixed = functional.scaled_dot_product_attention(*args, scale=scale, enable_gqa=shared)
        return mixed.to(q.dtype)
    return functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=shared)


sdpa_fwd = Operation(
    "sdpa_fwd",
    (
        Implementation("triton", launch_forward, refuses=_why_torch, own=True),
        Implementation("torch", torch_sdpa, differentiable=True),
    ),
    cost=lambda case: _cost(case, products=2, tensors=2),
)


def attend_by_torch(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Return torch's scaled_dot_product_attention, recorded by torch's autograd, and counted for plain tensors.

    For dropout, which our kernels lack, and for layers on a CPU. Causal positions are aligned at the first query and
    key; queries that see no key give zeros.
    """
    blind = None
    if mask is not None:
        mask = _checked_mask(mask, q, (*q.shape[:3], k.shape[2]))
        if causal:
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()
            mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
        hidden = ~mask if mask.dtype == torch.bool else mask <= backends.HIDDEN
        blind = hidden.all(-1, keepdim=True)
        mask = (mask | blind if mask.dtype == torch.bool else mask.masked_fill(blind, 0.0)).to(
            torch.bool if mask.dtype == torch.bool else q.dtype
        )
    args = q, k, v, mask, dropout, causal and mask is None
    mixed: Tensor
    if not is_compiling() and is_plain(q):
        words = (*((f"mask {name_of(mask.dtype)}",) if mask is not None else ()), *(("dropout",) if dropout else ()))
        case = _case(q, k, v, causal, 0.0, -1)
        mixed = sdpa_fwd(case._replace(options=(*case.options, *words)) if words else case, *args)
    else:
        mixed = torch_sdpa(*args)
    return mixed if blind is None else mixed.masked_fill(blind, 0.0)


def _torch_equivalent(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *, window: int | None = None,
    return_lse: bool = False, mask: None = None, segments: None = None,
) -> Tensor:  # fmt: skip
    """Compute attention by torch's CPU function."""
    return backends.with_layout_of(q, _on_cpu(q, k, v, 0.0, bool(causal) and q.shape[2] != 1, scale=scale)[0])


def _torch_serves(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *, window: int | None = None,
    return_lse: bool = False, mask: Tensor | None = None, segments: Any = None,
) -> bool:  # fmt: skip
    """Return whether torch's function gives the same: equal numbers of heads, in a layout that torch preserves."""
    contiguous = all(x.is_contiguous() for x in (q, k, v))
    heads_last = all(x.transpose(1, 2).is_contiguous() for x in (q, k, v))
    same_mask = window is None and (not causal or q.shape[2] in (1, k.shape[2]))
    nonempty = q.numel() > 0 and k.numel() > 0
    plain = mask is None and segments is None and not return_lse
    return nonempty and (contiguous or heads_last) and same_mask and q.shape[1] == k.shape[1] and plain


_cpu = CpuFastPath(_torch_equivalent, serves=_torch_serves, any_layout=True, pure=True)


@_cpu
def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *, window: int | None = None,
    return_lse: bool = False, mask: Tensor | None = None, segments: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute softmax attention: for each query the mean of the values, weighted by softmax of the scaled scores.

    s[i, j] = scale q[i] . k[j]        o[i] = sum_j exp(s[i, j]) v[j] / sum_j exp(s[i, j]),  j over the visible keys

    The last query is aligned with the last key: query i has position i + Skv - S. (torch's function with causal=True
    aligns the first query with the first key; the two agree for S = Skv.)

    Args:
        q: (B, Hq, S, D), float16, bfloat16, float32 or float64; any layout, fastest if D is contiguous.
        k, v: (B, Hkv, Skv, D), dtype of q. Hkv divides Hq: Hq / Hkv neighbouring heads of q share one of k and v.
        causal: hide the keys after a query's position.
        scale: factor of the scores; None for 1 / sqrt(D).
        window: hide the keys more than this many before a query's position; None for no limit.
        return_lse: also return the logarithm of the sum of exponentials.
        mask: broadcasts to (B, Hq, S, Skv), on the device of q. bool: False hides the key. Numbers, in the dtype of q
            or float32: added to the scaled score; up to -1e30, such as -inf, they hide the key. It applies together
            with causal and window.
        segments: integers below 2^31 in size, on the device of q: a query sees the keys of its own number only. (B, S)
            for queries and keys alike, or a pair (B, S) and (B, Skv). Sequences that are packed in one row have a
            number each; keys that are padding have one that no query has, such as -1. It applies together with causal
            and window, and not together with mask: our kernels skip the keys outside of a segment, and need no memory
            of S Skv. On a GPU, where nothing reads them, larger numbers lose their upper bits.

    Returns:
        o, (B, Hq, S, D), dtype of q, in q's layout; accumulated in float32 from products in q's dtype. A query that
        sees no key, whatever hides them, gives zeros and zero gradients. With return_lse (o, lse): lse[i] = log sum_j
        exp(s[i, j]), natural logarithm, (B, Hq, S), float32 (float64 for float64), -inf without a visible key; it
        carries no gradient. Memory is linear in S and Skv. Differentiable twice (the second time with a materialized
        score matrix). Under torch.autocast q, k and v are cast to the autocast dtype.

    Raises:
        ShapeError: incompatible shapes, Hkv that does not divide Hq, tensors on several devices.
        UnsupportedDtype: a dtype not listed above, or several.
        ConfigError: a negative window, causal is not a bool, mask together with segments, or segments that are neither
            one tensor nor two, or too large (on a CPU).

    The kernels take D up to 256; torch's functions serve wider heads. With a mask our Triton kernels run on a GPU. A
    mask of numbers that requires a gradient gets it from torch's functions, with a materialized score matrix: the
    ledger has the call as attention_mask_gradient. Under forward-mode differentiation and the transforms of torch.func
    (grad, jvp, vmap, ...) torch's own functions run, which the ledger does not count.

    Source: Vaswani et al. 2017, arXiv:1706.03762, equation 1; Ainslie et al. 2023, arXiv:2305.13245 for shared keys;
    Beltagy et al. 2020, arXiv:2004.05150, section 3.1 for the window.
    """
    q, k, v = checked(q, k, v, "attention")
    if q.dim() != 4 or k.dim() != 4:
        raise ShapeError(f"attention takes q (B, Hq, S, D) and k (B, Hkv, Skv, D), got {shapes_of(q, k)}")
    B, Hq, S, D = q.shape
    kB, Hkv, Skv, kD = k.shape
    if kB != B or kD != D or D < 1:
        raise ShapeError(f"q and k must have the same B and D, and D be at least 1, got {shapes_of(q, k)}")
    check_heads(Hq, Hkv)
    if not isinstance(causal, bool):
        raise ConfigError(f"attention: causal must be True or False, got {type(causal).__name__}; a mask goes to mask=")
    # A single query sees all keys, as does a window of Skv - 1: without a mask more implementations can serve.
    causal = causal and S != 1
    scale = D**-0.5 if scale is None else float(scale)
    window = checked_window(window, Skv)
    if segments is not None:
        if mask is not None:
            raise ConfigError("attention takes mask or segments, not both: a mask of bools can hold the segments too")
        mask = _checked_segments(q, k, segments)
        o, lse = _masked(q, k, v, mask, causal, scale, window)
    elif mask is None:
        o, lse = _attention(q, k, v, causal, scale, window)
    else:
        mask = _checked_mask(mask, q, (B, Hq, S, Skv))
        learned = mask.requires_grad and torch.is_grad_enabled()
        o, lse = (_learned_mask if learned else _masked)(q, k, v, mask, causal, scale, window)
    return (o, lse) if return_lse else o


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention by the signature and the meaning of torch's function.

    Args:
        query: (..., Hq, S, D) or (..., S, D).
        key, value: (..., Hkv, Skv, D), dtype of query; with enable_gqa Hkv divides Hq, else they are equal.
        attn_mask: as the mask of `attention`; not together with is_causal.
        dropout_p: probability of dropping an attention weight, which torch's kernels do.
        is_causal: hide the keys after a query's, the first query aligned with the first key. (`attention` aligns the
            last ones; the two agree for S = Skv.)
        scale: factor of the scores; None for 1 / sqrt(D).
        enable_gqa: neighbouring heads of query may share one of key and value.

    Returns:
        shape and dtype of query, as of `attention`. Shapes that it lacks (broadcast batches, values of another width)
        and dropout are served by torch's function.

    Raises:
        ShapeError: heads that differ without enable_gqa.
        ConfigError: is_causal together with attn_mask.
        ShapeError, UnsupportedDtype, TypeError: as `attention`.
    """
    if is_causal and attn_mask is not None:
        raise ConfigError("scaled_dot_product_attention takes attn_mask or is_causal, not both, as torch's function")
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_dtype("scaled_dot_product_attention", x, name)
    shapes = query.shape, key.shape, value.shape
    if min(map(len, shapes)) < 3:  # torch's words for what it does not take either
        return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    Hq, Hkv = query.shape[-3], key.shape[-3]
    if Hq != Hkv and not enable_gqa and 1 not in (Hq, Hkv):
        raise ShapeError(f"query has {Hq} heads, key {Hkv}: pass enable_gqa=True to share those of key")
    alike = key.shape == value.shape and query.shape[:-3] == key.shape[:-3] and (Hq == Hkv or enable_gqa)
    if dropout_p or not alike:
        args = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        if is_compiling() or not is_plain(query):
            return torch_sdpa(*args)
        sizes = (math.prod(query.shape[:-3]), Hq, Hkv, query.shape[-2], key.shape[-2], query.shape[-1])
        options = (*options_of(is_causal, -1), "dropout" if dropout_p else "broadcast")
        mixed: Tensor = sdpa_fwd(Case(query.device, query.dtype, sizes, options), *args)
        return mixed
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    S, Skv = q.shape[2], k.shape[2]
    if attn_mask is not None and query.dim() > 4:
        attn_mask = attn_mask.expand(*query.shape[:-1], Skv).reshape(-1, *query.shape[-3:-1], Skv)
    if is_causal and Skv > S:
        k, v = k[:, :, :S], v[:, :, :S]
    elif is_causal and Skv < S:
        attn_mask = torch.ones(S, Skv, dtype=torch.bool, device=q.device).tril_()
    o = attention(q, k, v, is_causal and attn_mask is None, scale, mask=attn_mask)
    return o.reshape(query.shape)  # type: ignore[union-attr]  # one tensor without return_lse


def _checked_mask(mask: Tensor, q: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(mask, Tensor):
        raise not_a_tensor("attention", "mask", mask)
    if mask.dtype not in (torch.bool, q.dtype, torch.float32):
        raise UnsupportedDtype(f"mask must be bool, {name_of(q.dtype)} as q is, or float32; got {name_of(mask.dtype)}")
    if mask.device != q.device:
        raise ShapeError(f"mask must be on {q.device}, where q is; it is on {mask.device}")
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(sizes) > 4 or any(size not in (1, whole) for size, whole in zip(sizes, shape, strict=True)):
        raise ShapeError(f"mask must broadcast to (B, Hq, S, Skv) = {shape}, got {tuple(mask.shape)}")
    return mask.view(sizes) if mask.dim() < 4 else mask


def _checked_segments(q: Tensor, k: Tensor, segments: Any) -> Tensor:
    if not isinstance(segments, Tensor) and not (isinstance(segments, tuple | list) and len(segments) == 2):
        raise ConfigError(f"segments must be a tensor, or a pair of tensors, got {clipped(segments)}")
    of_queries, of_keys = (segments, segments) if isinstance(segments, Tensor) else segments
    for name, x, of in (("queries", of_queries, q), ("keys", of_keys, k)):
        if not isinstance(x, Tensor):
            raise not_a_tensor("attention", f"segments of {name}", x)
        if x.is_floating_point() or x.is_complex():
            raise UnsupportedDtype(f"segments must be integers, got {name_of(x.dtype)}")
        if x.device != q.device:
            raise ShapeError(f"segments must be on {q.device}, where q is; they are on {x.device}")
        shape = (of.shape[0], of.shape[2])
        if x.shape != shape:
            raise ShapeError(f"segments of {name} must be {tuple(shape)}, got {tuple(x.shape)}")
        wide = x.device.type == "cpu" and x.element_size() == 8 and not is_compiling() and is_plain(x)
        if wide and not torch.equal(x.to(torch.int32).to(x.dtype), x):
            raise ConfigError(f"segments of {name} must be below 2^31 in size")
    return segments_mask(of_queries, of_keys)


def shapes_of(*tensors: Tensor) -> str:
    """Return the shapes of tensors for an error: "(2, 3) and (4,)"."""
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors)


def checked(q: Tensor, k: Tensor, v: Tensor, op: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors in the dtype to compute in, after the checks that all kinds of attention share."""
    try:
        dtype = q.dtype
        if k.dtype is not dtype or v.dtype is not dtype or dtype not in FLOATING:
            _check_dtypes(q, k, v, op)
    except AttributeError:
        _check_dtypes(q, k, v, op)
        raise
    if v.shape != k.shape:
        raise ShapeError(f"v must be {tuple(k.shape)}, the shape of k, got {tuple(v.shape)}")
    if q.device != k.device or q.device != v.device:
        raise ShapeError(f"q, k and v must be on one device; they are on {q.device}, {k.device} and {v.device}")
    if (low := autocast_dtype(q.device.type)) is not None and dtype != torch.float64:
        return q.to(low), k.to(low), v.to(low)
    return q, k, v


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor, op: str) -> None:
    cache = {"attention_decode": "_cache", "attention_paged": "_blocks"}.get(op, "")
    for name, x in (("q", q), (f"k{cache}", k), (f"v{cache}", v)):
        check_dtype(op, x, name)
    if autocast_dtype(q.device.type) is None or torch.float64 in (q.dtype, k.dtype, v.dtype):
        names = ", ".join(name_of(x.dtype) for x in (q, k, v))
        raise UnsupportedDtype(f"q, k and v must have one dtype, got {names}")


def check_heads(Hq: int, Hkv: int) -> None:
    """Raise unless Hkv divides Hq."""
    if Hkv < 1 or Hq < 1 or Hq % Hkv:
        raise ShapeError(f"the heads of k must divide those of q, got {Hkv} and {Hq}")


def checked_window(window: int | None, keys: int) -> int:
    """Return the window as the registered ops take it: -1 for none, and for one that hides none of the keys."""
    if window is None:
        return -1
    if window < 0:
        raise ConfigError(f"window must be at least 0, got {clipped(window)}")
    return -1 if window >= keys - 1 else window


@functools.lru_cache(maxsize=4096)
def options_of(causal: bool, window: int) -> tuple[str, ...]:
    """Return the options of a case, for example ("causal", "window 128")."""
    return (*(("causal",) if causal else ()), *((f"window {window}",) if window >= 0 else ()))


def _case(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int) -> Case:
    B, Hq, S, D = q.shape
    return Case(q.device, q.dtype, (B, Hq, k.shape[1], S, k.shape[2], D), options_of(causal, window))


@_cpu.case
def _cpu_case(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int) -> Case | None:
    """Return None if a gradient is needed: torch's function is differentiable once, this op twice."""
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return None if needs_grad else _case(q, k, v, causal, scale, window)


def _composite(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    o, lse = backends.attend(q, k, v, causal, scale, window, mask=mask)
    return o, lse.detach()


def _fake(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return like(q), q.new_empty(q.shape[:3], dtype=wide)


class AttentionOp(DifferentiableOp):
    """One that returns the logarithms of the sums, too, without a gradient."""

    public = 2


class _Attention(AttentionOp):
    def bound(self, args: tuple[Any, ...], results: Any, first: bool) -> Callable[..., Any]:
        """Return forward and backward pass for more tensors like these."""
        case = _case(*args)
        forward, backward = attention_fwd.bound(case), attention_bwd.bound(case)
        return self.autograd_function(1 if first else 2, forward, lambda *args: backward(*args[:-1]))


_attention = _Attention(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, int window) -> (Tensor o, Tensor lse)",
    operation=attention_fwd,
    case=_case,
    backward=lambda *args: backward_pass(*args[:-1]),
    saves=("q", "k", "v", "o", "lse"),
    gradients={"q": "q", "k": "k", "v": "v"},
    composite=_composite,
    fake=_fake,
    keeps_layout=True,
    cpu=_cpu,
)


# --- with a mask -----------------------------------------------------------------------------------------------------
def _masked_case(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool, scale: float, window: int) -> Case:
    plain = _case(q, k, v, causal, scale, window)
    kind = "segments" if mask.dtype == torch.int32 else f"mask {name_of(mask.dtype)}"
    return plain._replace(options=(*plain.options, kind))


def _any_segments(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """Return the table of segments with ranges that are true of any: each row may see all of the others."""
    S, Skv, table = of_queries.shape[1], of_keys.shape[1], new_table(of_queries, of_keys)
    table[:, 1] = table[:, 3] = 0
    table[:, 2, :S] = Skv
    table[:, 2, S:] = S
    return table


def _segments_cost(case: Case) -> Cost:
    B, S, Skv = case.shape
    return Cost(16 * B * (S + Skv), 8 * B * S * Skv)


attention_segments: Callable[..., Tensor] = triton_operation(
    "attention_segments", launch_segments, _any_segments, cost=_segments_cost
)


def segments_mask(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """Return the segments (B, S) and (B, Skv) of queries and keys as implementations take them: a table.

    A table (B, 4, S + Skv) int32 also holds what each row sees, so that kernels skip the rest; nothing is read on the
    host. Where a transform or a compiler sees the call, it is a mask of bools, (B, 1, S, Skv).
    """
    if is_compiling() or not is_plain(of_queries) or not is_plain(of_keys):
        return (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
    sizes = (*of_queries.shape, of_keys.shape[1])
    return attention_segments(Case(of_queries.device, torch.int32, sizes), of_queries, of_keys)


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, causal: bool, scale: float | None, window: int | None
) -> Tensor:
    """Return `attention` with a mask of `segments_mask`, which several layers may share."""
    q, k, v = checked(q, k, v, "attention")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    o: Tensor = _masked(q, k, v, mask, causal, scale, checked_window(window, k.shape[2]))[0]
    return o


def forward_pass(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return o and lse without autograd, with a mask of `segments_mask` if there is one."""
    settings = causal, scale, window
    if mask is None:
        o, lse = attention_fwd(_case(q, k, v, *settings), q, k, v, *settings)
    else:
        o, lse = attention_masked_fwd(_masked_case(q, k, v, mask, *settings), q, k, v, mask, *settings)
    return o, lse


def backward_pass(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, window: int,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv of `forward_pass`."""
    settings = causal, scale, window
    if mask is None:
        dq, dk, dv = attention_bwd(_case(q, k, v, *settings), do, q, k, v, o, lse, *settings)
    else:
        case = _masked_case(q, k, v, mask, *settings)
        dq, dk, dv = attention_masked_bwd(case, do, q, k, v, o, lse, mask, *settings)
    return dq, dk, dv


def _by_keyword(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return an implementation that takes the mask after its tensors."""

    def masked(*args: Any, **options: Any) -> Any:
        *tensors, mask, causal, scale, window = args
        return run(*tensors, causal, scale, window, mask=mask, **options)

    return masked


attention_masked_fwd, attention_masked_bwd = (
    Operation(
        f"attention_masked_{way}",
        (
            split_products(_by_keyword(own)),
            Implementation("triton", _by_keyword(own), refuses=refuses, own=True),
            Implementation("torch", _by_keyword(library)),
        ),
        cost=partial(_cost, products=products, tensors=tensors),
    )
    for way, own, refuses, library, products, tensors in (
        ("fwd", launch_forward, refuses_triton_kernels, backends.torch_forward, 2, 2),
        ("bwd", launch_backward, refuses_triton_backward, backends.torch_backward, 5, 4),
    )
)


_masked_composite: Callable[..., tuple[Tensor, Tensor]] = _by_keyword(_composite)
_masked = AttentionOp(
    "attention_masked(Tensor q, Tensor k, Tensor v, Tensor mask, bool causal, float scale, int window) "
    "-> (Tensor o, Tensor lse)",
    operation=attention_masked_fwd,
    case=_masked_case,
    backward=lambda do, q, k, v, mask, o, lse, causal, scale, window, needs: backward_pass(
        do, q, k, v, o, lse, causal, scale, window, mask
    ),
    saves=("q", "k", "v", "mask", "o", "lse"),
    gradients={"q": "q", "k": "k", "v": "v"},
    composite=_masked_composite,
    fake=lambda q, k, v, mask, causal, scale, window: _fake(q, k, v, causal, scale, window),
    keeps_layout=True,
)

attention_mask_gradient: Callable[..., tuple[Tensor, Tensor]] = Operation(
    "attention_mask_gradient",
    (
        Implementation("triton", launch_forward, refuses=lambda case: "gives a mask no gradient", own=True),
        Implementation("torch", _masked_composite, differentiable=True),
    ),
    cost=partial(_cost, products=2, tensors=2),
)


def _learned_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    if is_compiling() or not is_plain(q):
        return _masked_composite(q, k, v, mask, *settings)
    return attention_mask_gradient(_masked_case(q, k, v, mask, *settings), q, k, v, mask, *settings)
