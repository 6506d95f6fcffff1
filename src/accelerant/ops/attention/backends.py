"""Attention by cuDNN, FlashAttention and torch's memory-efficient kernels, as implementations that dispatch may choose.

Each has the signature and results of our kernels: lse is the natural logarithm, (B, Hq, S) float32, so that the forward
pass of one implementation and the backward pass of another can be combined.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import UnsupportedCase
from accelerant.ops.attention.launch import like, with_rows
from accelerant.runtime.dispatch import Case, Implementation
from accelerant.runtime.memory.limits import ordinary_tensors

# --- torch's own functions -------------------------------------------------------------------------------------------
aten = torch.ops.aten
_unsafe_view: Callable[..., Tensor] = aten._unsafe_view.default
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

    `seen`, (S, Skv) bool, replaces causal and window. Returns o in q's dtype, and lse, float32 at least.
    """
    mask = without_table(mask, q.shape[2])
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


def without_table(mask: Tensor | None, queries: int) -> Tensor | None:
    """Return a mask as it is, or as a bool if it is a table of segments (see `launch_segments`)."""
    if mask is None or mask.dtype != torch.int32:
        return mask
    return (mask[:, 0, :queries, None] == mask[:, 0, None, queries:])[:, None]


HIDDEN = -1e30  # numbers of a mask up to this hide a key as -inf does, such as the smallest of float32 and of bfloat16


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


def _folds_heads(*tensors: Tensor) -> bool:
    """Return whether heads, of one number above one, can be folded into the batch, which saves copies."""
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
    mask = without_table(mask, S)
    if q.device.type != "cpu" or (mask is not None and Hq != Hkv):
        o, lse = attend(q, k, v, causal, scale, window, mask=mask)
        return with_layout_of(q, o), lse.contiguous()
    masked = mask is not None
    flag, mask = _additive(q, k, causal, window, mask)
    folded = not masked and _folds_heads(q, k, v)
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
    mask = without_table(mask, q.shape[2])
    if q.device.type != "cpu" or (mask is not None and Hq != Hkv):
        return with_layouts_of((q, k, v), dense_backward(do, q, k, v, o, lse, causal, scale, window, mask))
    masked = mask is not None
    flag, mask = _additive(q, k, causal, window, mask)
    if masked or (causal and q.shape[2] > k.shape[2]):
        lse = lse.masked_fill(lse == -math.inf, 0)
    folded = not masked and _folds_heads(q, k, v, o)
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


_HALF = (torch.bfloat16, torch.float16)


def _is_causal(case: Case) -> bool:
    return "causal" in case.options


def _has_window(case: Case) -> bool:
    return any(str(option).startswith("window") for option in case.options)


@functools.cache
def nvidia_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU; (0, 0) for any other device."""
    if device.type != "cuda" or torch.version.hip:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def _refuses_library(case: Case, widest: int, oldest: tuple[int, int] = (8, 0)) -> str | None:
    """Return the refusals common to cuDNN and the FlashAttention libraries."""
    _, Hq, Hkv, S, Skv, D = case.shape
    if nvidia_capability(case.device) < oldest:
        return f"needs an NVIDIA GPU from sm_{oldest[0]}{oldest[1]} on"
    if case.dtype not in _HALF:
        return f"takes bfloat16 and float16, not {str(case.dtype).removeprefix('torch.')}"
    if D % 8 or widest < D:
        return f"takes heads of a multiple of 8 up to {widest} wide, not {D}"
    if not math.prod(case.shape) or not Hkv or Hq % Hkv:
        return "takes no empty tensor"
    if _is_causal(case) and Skv < S:
        return f"does not define queries that see no key (causal, {S} queries, {Skv} keys)"
    return None


def _aligned(x: Tensor) -> Tensor:
    """Return x if its rows are contiguous and begin on 16-byte boundaries, else a copy."""
    step = 16 // x.element_size()
    *strides, last = x.stride()
    if last != 1 or x.data_ptr() % 16 or any(stride % step for stride in strides):
        return x.contiguous()
    return x if all(strides) else x.contiguous()  # cuDNN may refuse an expanded dimension


@functools.cache
def _seed(device: torch.device) -> Tensor:
    """Return a placeholder for the random generator's state, which nothing reads without dropout."""
    with ordinary_tensors():
        return torch.zeros((), dtype=torch.int64, device=device)


_cudnn_lse_dims: dict[str, int] = {}
"""Dimensions of lse in this torch's cuDNN functions, (B, H, S, 1) or (B, H, S); recorded by the first call."""


def _refuses_cudnn(case: Case) -> str | None:
    if refused := _refuses_library(case, widest=128):
        return refused
    _, _, _, S, Skv, _ = case.shape
    if nvidia_capability(case.device)[0] not in (9, 10):
        return "is preferred on sm_90 and sm_100 only, as in torch"
    if not torch.backends.cudnn.is_available() or (torch.backends.cudnn.version() or 0) < 90000:
        return "needs cuDNN 9"
    if torch.backends.cudnn.version() <= 91500 and (S % 128 or Skv % 128):
        return "is wrong before 9.15.1 for lengths that are not multiples of 128"  # pytorch/pytorch issue 169849
    if _has_window(case):
        return "supports no window through torch"
    if _is_causal(case) and Skv != S:
        return f"has the causal mask of the top left corner, which differs for {S} queries and {Skv} keys"
    if Skv == 1 or S == 1:
        return "takes sequences of 2 or more"
    return None


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int) -> tuple[Tensor, Tensor]:
    o, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        _aligned(q), _aligned(k), _aligned(v), None, True, 0.0, causal, False, scale=scale
    )
    _cudnn_lse_dims["cudnn"] = lse.dim()
    return with_layout_of(q, o), lse.reshape(lse.shape[:3])


def _cudnn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, window: int
) -> tuple[Tensor, ...]:
    if "cudnn" not in _cudnn_lse_dims:
        tiny = q.new_zeros(1, 1, 64, q.shape[-1])
        _cudnn_forward(tiny, tiny, tiny, False, 1.0, -1)
    if _cudnn_lse_dims["cudnn"] == 4:
        lse = lse.unsqueeze(-1)
    seed = _seed(q.device)
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        _aligned(do), _aligned(q), _aligned(k), _aligned(v), o, lse, seed, seed, None, None, None,
        q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return with_layouts_of((q, k, v), gradients)


# --- FlashAttention 2, in torch --------------------------------------------------------------------------------------
def _refuses_flash(case: Case) -> str | None:
    if refused := _refuses_library(case, widest=256):
        return refused
    return None if torch.backends.cuda.is_flash_attention_available() else "this torch was built without it"


def _refuses_flash_backward(case: Case) -> str | None:
    refused = _refuses_flash(case)
    capability, D = nvidia_capability(case.device), case.shape[-1]
    if not refused and 192 < D <= 224 and (capability[0] == 12 or (8, 6) <= capability <= (8, 9)):
        return f"has no backward pass for heads {D} wide on sm_{capability[0]}{capability[1]}"
    return refused


def _flash_windows(causal: bool, window: int) -> dict[str, int | None]:
    return {"window_size_left": window if window >= 0 else None, "window_size_right": 0 if causal else None}


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int) -> tuple[Tensor, Tensor]:
    rows = [_aligned(x).transpose(1, 2) for x in (q, k, v)]
    o, lse, *_ = aten._flash_attention_forward(
        *rows, None, None, q.shape[2], k.shape[2], 0.0, causal, False, scale=scale, **_flash_windows(causal, window)
    )
    return with_layout_of(q, o.transpose(1, 2)), lse.reshape(q.shape[:3])


def _flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, window: int
) -> tuple[Tensor, ...]:
    rows = [_aligned(x).transpose(1, 2) for x in (do, q, k, v, o)]
    seed = _seed(q.device)
    gradients = aten._flash_attention_backward(
        *rows, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale,
        **_flash_windows(causal, window),
    )  # fmt: skip
    return with_layouts_of((q, k, v), tuple(gradient.transpose(1, 2) for gradient in gradients))


def _refuses_varlen_flash(case: Case) -> str | None:
    sequences, Hq, Hkv, total, total_k, max_q, max_k, D = case.shape
    longest = (sequences, Hq, Hkv, max(max_q, total and 1), max_k, D)
    refused = _refuses_flash_backward(case._replace(shape=longest, options=()))
    return refused if total and total_k else "takes no empty tensor"


def _varlen_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    o, lse, *_ = aten._flash_attention_forward(
        _aligned(q), _aligned(k), _aligned(v), cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale,
        **_flash_windows(causal, window),
    )  # fmt: skip
    if lse.shape != (q.shape[1], q.shape[0]):
        raise UnsupportedCase(f"this torch's FlashAttention gives lse {tuple(lse.shape)} for packed sequences")
    return with_layout_of(q, o), lse.masked_fill_(lse == math.inf, -math.inf)  # inf marks a query that sees no key


def _varlen_flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
    max_k: int, causal: bool, scale: float, window: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    seed = _seed(q.device)
    gradients = aten._flash_attention_backward(
        *(_aligned(x) for x in (do, q, k, v, o)), lse.masked_fill(lse == -math.inf, math.inf), cu_q, cu_k,
        max_q, max_k, 0.0, causal, seed, seed, scale=scale, **_flash_windows(causal, window),
    )  # fmt: skip
    return with_layouts_of((q, k, v), tuple(gradients))


# --- FlashAttention 4, if installed ----------------------------------------------------------------------------------
@functools.cache
def _flash_4() -> Any:
    """Return the module flash_attn.cute.interface, or the reason why it cannot be used."""
    try:
        if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
            return "the package flash-attn-4 is not installed"
        return importlib.import_module("flash_attn.cute.interface")
    except Exception as error:  # noqa: BLE001  # a library's import may raise anything
        return f"flash_attn.cute cannot be imported: {type(error).__name__}: {error}"


def _flash_4_call(name: str, *args: Any, **options: Any) -> Any:
    try:
        return getattr(_flash_4(), name)(*args, **options)
    except (TypeError, AssertionError, NotImplementedError) as error:
        raise UnsupportedCase(f"flash_attn.cute: {type(error).__name__}: {error}") from error


def _refuses_flash_4(case: Case) -> str | None:
    if refused := _refuses_library(case, widest=128, oldest=(9, 0)):
        return refused
    if _has_window(case):
        return "is not used for windows"
    if case.shape[-1] not in (64, 96, 128):
        return f"takes heads 64, 96 or 128 wide, not {case.shape[-1]}"
    if nvidia_capability(case.device)[0] not in (9, 10):
        return "is for sm_90 and sm_100"
    module = _flash_4()
    return module if isinstance(module, str) else None


def _flash_4_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int) -> tuple[Tensor, Tensor]:
    rows = [_aligned(x).transpose(1, 2) for x in (q, k, v)]
    o, lse = _flash_4_call("_flash_attn_fwd", *rows, softmax_scale=scale, causal=causal, return_lse=True)[:2]
    return with_layout_of(q, o.transpose(1, 2)), lse.contiguous()


def _flash_4_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, window: int
) -> tuple[Tensor, ...]:
    do_, *rows = [_aligned(x).transpose(1, 2) for x in (do, q, k, v, o)]
    gradients = _flash_4_call("_flash_attn_bwd", *rows, do_, lse, softmax_scale=scale, causal=causal)[:3]
    return with_layouts_of((q, k, v), tuple(gradient.transpose(1, 2) for gradient in gradients))


# --- torch's memory-efficient kernels --------------------------------------------------------------------------------
_EFFICIENT_ROWS = 32  # lse is padded to a multiple of this


def _refuses_efficient(case: Case) -> str | None:
    _, Hq, Hkv, S, Skv, D = case.shape
    if (capability := nvidia_capability(case.device)) < (7, 5):
        return "needs an NVIDIA GPU"
    if case.dtype == torch.float64 or (case.dtype == torch.bfloat16 and capability < (8, 0)):
        return f"takes float32 and float16, and bfloat16 from sm_80 on, not {case.dtype}"
    if D % (8 if case.dtype in _HALF else 4):
        return f"takes heads of a multiple of 8 (float32: 4), not {D}"
    if not Hkv or Hq % Hkv:
        return "takes no empty tensor"
    if _has_window(case):
        return "is not used for windows"
    if _is_causal(case) and Skv != S:
        return f"has the causal mask of the top left corner, which differs for {S} queries and {Skv} keys"
    return None if math.prod(case.shape) else "takes no empty tensor"


_MAX_BATCHES = 65535  # limit of its grid


def _heads_as_batches(x: Tensor) -> Tensor:
    return x.reshape(-1, 1, *x.shape[2:])


def _folds(*tensors: Tensor) -> bool:
    """Return whether heads can be folded into the batch: saves copies, as results are (batch, row, head, column)."""
    B, H = tensors[0].shape[:2]
    return B * H <= _MAX_BATCHES and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in tensors)


def _repeated(x: Tensor, group: int) -> Tensor:
    """Return keys or values with each head repeated for the query heads that share it."""
    return x if group == 1 else x.repeat_interleave(group, 1)


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    k, v = (_repeated(x, q.shape[1] // x.shape[1]) for x in (k, v))
    folds = _folds(q, k, v)
    inputs = [_heads_as_batches(x) if folds else _aligned(x) for x in (q, k, v)]
    o, lse, *_ = aten._scaled_dot_product_efficient_attention(*inputs, None, True, 0.0, causal, scale=scale)
    lse = lse[:, :, : q.shape[2]].reshape(q.shape[:3]).contiguous()
    return (o.reshape(q.shape) if folds else with_layout_of(q, o)), lse


def _efficient_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, window: int
) -> tuple[Tensor, ...]:
    group = q.shape[1] // k.shape[1]
    given, k, v = (q, k, v), _repeated(k, group), _repeated(v, group)
    beyond = -q.shape[2] % _EFFICIENT_ROWS
    lse = torch.nn.functional.pad(lse, (0, beyond), value=math.inf)
    folds = _folds(q, k, v, o)
    inputs = [_heads_as_batches(x) if folds else _aligned(x) for x in (do.contiguous() if folds else do, q, k, v)]
    # The kernel assumes that rows of o are Hq * D apart, and otherwise reads out of bounds (o_strideM in
    # mem_eff_attention/kernel_backward.h).
    o = _heads_as_batches(o) if folds else o.transpose(1, 2).contiguous().transpose(1, 2)
    lse = _heads_as_batches(lse) if folds else lse
    seed = _seed(q.device)
    gradients = aten._scaled_dot_product_efficient_attention_backward(
        *inputs, None, o, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )[:3]
    if folds:
        gradients = [x.reshape(like.shape) for x, like in zip(gradients, (q, k, v), strict=True)]
    if group > 1:
        gradients = [gradients[0], *(x.unflatten(1, (-1, group)).sum(2) for x in gradients[1:])]
    return with_layouts_of(given, tuple(gradients))


def _pair(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], refuses: Callable[[Case], str | None],
    refuses_backward: Callable[[Case], str | None] | None = None,
) -> tuple[Implementation, Implementation]:  # fmt: skip
    """Return a library's two passes, of which the backward one adds in no fixed order."""
    return (
        Implementation(name, forward, refuses=refuses),
        Implementation(name, backward, refuses=refuses_backward or refuses, deterministic=False),
    )


CUDNN = _pair("cudnn", _cudnn_forward, _cudnn_backward, _refuses_cudnn)
FLASH = _pair("flash", _flash_forward, _flash_backward, _refuses_flash, _refuses_flash_backward)
VARLEN_FLASH = _pair("flash", _varlen_flash_forward, _varlen_flash_backward, _refuses_varlen_flash)
FLASH_4 = _pair("flash_attn_4", _flash_4_forward, _flash_4_backward, _refuses_flash_4)
EFFICIENT = _pair("efficient", _efficient_forward, _efficient_backward, _refuses_efficient)
TORCH = (Implementation("torch", torch_forward, differentiable=True), Implementation("torch", torch_backward))
