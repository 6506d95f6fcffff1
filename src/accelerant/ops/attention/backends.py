"""Attention by cuDNN, FlashAttention and torch's memory-efficient kernels, as implementations that dispatch may choose.

Each has the signature and results of our kernels: lse is the natural logarithm, (B, Hq, S) float32, so that the forward
pass of one implementation and the backward pass of another can be combined. Each refuses what it does not support, and
what it defines differently.

Sources: torch/aten's schemas and _meta_registrations.py; aten/src/ATen/native/transformers/cuda/sdp_utils.cpp for the
requirements of each backend.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import UnsupportedCase
from accelerant.ops.attention.composite import torch_backward, torch_forward, with_layout_of, with_layouts_of
from accelerant.runtime.dispatch import Case, Implementation
from accelerant.runtime.memory.live_set import ordinary_tensors

aten = torch.ops.aten
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
    capability = nvidia_capability(case.device)
    if capability < oldest:
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


# --- cuDNN -----------------------------------------------------------------------------------------------------------

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
    capability = nvidia_capability(case.device)
    if capability < (7, 5):
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
    """Return whether heads can be folded into the batch.

    The kernels read and write the memory layout (batch, row, head, column). Folding contiguous heads saves copies of
    the result: 48 MiB of 97 at 8x12x2048x64 in float32.
    """
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


# --- implementations of the forward and backward pass ----------------------------------------------------------------


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
