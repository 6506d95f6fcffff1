"""Attention by torch and its libraries, as implementations that dispatch may choose instead of our kernels.

Each takes and gives what our kernels do: lse is the natural logarithm, (B, Hq, S) float32, so that the forward pass of
one and the backward pass of another go together. Each has its refusals: what it cannot do, or not as we define it.

Sources: torch/aten's schemas and _meta_registrations.py; aten/src/ATen/native/transformers/cuda/sdp_utils.cpp for what
each back end takes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import UnsupportedCase
from accelerant.ops.attention.composite import graded, laid, torch_backward, torch_forward
from accelerant.runtime.dispatch import Case, Implementation

__all__ = [
    "CUDNN",
    "EFFICIENT",
    "FLASH",
    "FLASH_4",
    "TORCH",
    "VARLEN_FLASH",
    "capability_of",
    "causal_of",
    "is_half",
    "window_of",
]

aten = torch.ops.aten


# --- what a case says ------------------------------------------------------------------------------------------------


def causal_of(case: Case) -> bool:
    """Whether the case is causal."""
    return "causal" in case.options


def window_of(case: Case) -> bool:
    """Whether the case has a window."""
    return any(str(option).startswith("window") for option in case.options)


def is_half(dtype: torch.dtype) -> bool:
    """Whether tensor cores of every age take a dtype (bfloat16 from sm_80 on)."""
    return dtype in (torch.bfloat16, torch.float16)


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Of an NVIDIA device; (0, 0) for any other."""
    if device.type != "cuda" or torch.version.hip:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def _refuses_library(case: Case, widest: int, oldest: tuple[int, int] = (8, 0)) -> str | None:
    """What cuDNN and the FlashAttention libraries have in common."""
    _, Hq, Hkv, S, Skv, D = case.shape
    capability = capability_of(case.device)
    if capability < oldest:
        return f"needs an NVIDIA GPU from sm_{oldest[0]}{oldest[1]} on"
    if not is_half(case.dtype):
        return f"takes bfloat16 and float16, not {str(case.dtype).removeprefix('torch.')}"
    if D % 8 or widest < D:
        return f"takes heads of a multiple of 8 up to {widest} wide, not {D}"
    if not math.prod(case.shape) or not Hkv or Hq % Hkv:
        return "takes no empty tensor"
    if causal_of(case) and Skv < S:
        return f"has no rule for queries that see no key (causal, {S} queries, {Skv} keys)"
    return None


def _strided(x: Tensor) -> Tensor:
    """The same x as 16-byte loads can take it: copied unless rows are contiguous and begin at multiples of 16 bytes."""
    step = 16 // x.element_size()
    *strides, last = x.stride()
    if last != 1 or x.data_ptr() % 16 or any(stride % step for stride in strides):
        return x.contiguous()
    return x if all(strides) else x.contiguous()  # an expanded dimension, which cuDNN may refuse


@functools.cache
def _seed(device: torch.device) -> Tensor:
    """What stands for the state of a random generator: without dropout nothing reads it."""
    return torch.zeros((), dtype=torch.int64, device=device)


# --- cuDNN -----------------------------------------------------------------------------------------------------------

_cudnn_lse_dims: dict[str, int] = {}
"""4 or 3: whether this torch's cuDNN functions carry lse as (B, H, S, 1) or (B, H, S); learnt from the first call."""


def _refuses_cudnn(case: Case) -> str | None:
    refused = _refuses_library(case, widest=128)
    if refused:
        return refused
    _, _, _, S, Skv, _ = case.shape
    if capability_of(case.device)[0] not in (9, 10):
        return "is preferred on sm_90 and sm_100 alone, as by torch"
    if not torch.backends.cudnn.is_available() or (torch.backends.cudnn.version() or 0) < 90000:
        return "needs cuDNN 9"
    if torch.backends.cudnn.version() <= 91500 and (S % 128 or Skv % 128):
        return "is wrong before 9.15.1 for lengths that are no multiple of 128"  # pytorch/pytorch issue 169849
    if window_of(case):
        return "torch gives it no window"
    if causal_of(case) and Skv != S:
        return f"torch gives it the causal mask of the top left corner, which is another for {S} queries, {Skv} keys"
    if Skv == 1 or S == 1:
        return "takes sequences of 2 or more"
    return None


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int) -> tuple[Tensor, Tensor]:
    found = aten._scaled_dot_product_cudnn_attention(
        _strided(q), _strided(k), _strided(v), None, True, 0.0, causal, False, scale=scale
    )
    o, lse = found[0], found[1]
    _cudnn_lse_dims["cudnn"] = lse.dim()
    return laid(o, q), lse.reshape(lse.shape[:3])


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
        _strided(do), _strided(q), _strided(k), _strided(v), o, lse, seed, seed, None, None, None,
        q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return graded(gradients, (q, k, v))


# --- FlashAttention 2, in torch --------------------------------------------------------------------------------------


def _refuses_flash(case: Case) -> str | None:
    refused = _refuses_library(case, widest=256)
    if refused:
        return refused
    return None if torch.backends.cuda.is_flash_attention_available() else "this torch was built without it"


def _refuses_flash_backward(case: Case) -> str | None:
    refused = _refuses_flash(case)
    capability, D = capability_of(case.device), case.shape[-1]
    if not refused and 192 < D <= 224 and (capability[0] == 12 or (8, 6) <= capability <= (8, 9)):
        return f"has no backward pass for heads {D} wide on sm_{capability[0]}{capability[1]}"
    return refused


def _flash_windows(causal: bool, window: int) -> dict[str, int | None]:
    return {"window_size_left": window if window >= 0 else None, "window_size_right": 0 if causal else None}


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int) -> tuple[Tensor, Tensor]:
    rows = [_strided(x).transpose(1, 2) for x in (q, k, v)]
    found = aten._flash_attention_forward(
        *rows, None, None, q.shape[2], k.shape[2], 0.0, causal, False, scale=scale, **_flash_windows(causal, window)
    )
    return laid(found[0].transpose(1, 2), q), found[1].reshape(q.shape[:3])


def _flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, window: int
) -> tuple[Tensor, ...]:
    rows = [_strided(x).transpose(1, 2) for x in (do, q, k, v, o)]
    seed = _seed(q.device)
    gradients = aten._flash_attention_backward(
        *rows, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale,
        **_flash_windows(causal, window),
    )  # fmt: skip
    return graded(tuple(gradient.transpose(1, 2) for gradient in gradients), (q, k, v))


def _refuses_varlen_flash(case: Case) -> str | None:
    sequences, Hq, Hkv, total, total_k, max_q, max_k, D = case.shape
    longest = (sequences, Hq, Hkv, max(max_q, total and 1), max_k, D)
    refused = _refuses_flash_backward(case._replace(shape=longest, options=()))
    return refused if total and total_k else "takes no empty tensor"


def _varlen_flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    o, lse, *_ = aten._flash_attention_forward(
        _strided(q), _strided(k), _strided(v), cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale,
        **_flash_windows(causal, window),
    )  # fmt: skip
    if lse.shape != (q.shape[1], q.shape[0]):
        raise UnsupportedCase(f"this torch's FlashAttention gives lse {tuple(lse.shape)} for packed sequences")
    return laid(o, q), lse.masked_fill_(lse == math.inf, -math.inf)  # its mark of a query that sees no key


def _varlen_flash_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    window: int,
) -> tuple[Tensor, ...]:
    seed = _seed(q.device)
    gradients = aten._flash_attention_backward(
        *(_strided(x) for x in (do, q, k, v, o)), lse.masked_fill(lse == -math.inf, math.inf), cu_q, cu_k,
        max_q, max_k, 0.0, causal, seed, seed, scale=scale, **_flash_windows(causal, window),
    )  # fmt: skip
    return graded(tuple(gradients), (q, k, v))


# --- FlashAttention 4, where it is installed -------------------------------------------------------------------------


@functools.cache
def _flash_4() -> Any:
    """The module flash_attn.cute.interface, or the reason why there is none."""
    try:
        if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
            return "the package flash-attn-4 is not installed"
        return importlib.import_module("flash_attn.cute.interface")
    except Exception as error:  # noqa: BLE001  # another library's import fails in any way it likes
        return f"flash_attn.cute cannot be imported: {type(error).__name__}: {error}"


def _refuses_flash_4(case: Case) -> str | None:
    refused = _refuses_library(case, widest=128, oldest=(9, 0))
    if refused:
        return refused
    if window_of(case):
        return "is not asked for windows"
    if case.shape[-1] not in (64, 96, 128):
        return f"takes heads 64, 96 or 128 wide, not {case.shape[-1]}"
    if capability_of(case.device)[0] not in (9, 10):
        return "is for sm_90 and sm_100"
    module = _flash_4()
    return module if isinstance(module, str) else None


def _flash_4_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int) -> tuple[Tensor, Tensor]:
    rows = [_strided(x).transpose(1, 2) for x in (q, k, v)]
    try:
        o, lse = _flash_4()._flash_attn_fwd(*rows, softmax_scale=scale, causal=causal, return_lse=True)[:2]
    except (TypeError, AssertionError, NotImplementedError) as error:
        raise UnsupportedCase(f"flash_attn.cute: {type(error).__name__}: {error}") from error
    return laid(o.transpose(1, 2), q), lse.contiguous()


def _flash_4_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, window: int
) -> tuple[Tensor, ...]:
    do_, *rows = [_strided(x).transpose(1, 2) for x in (do, q, k, v, o)]
    try:
        gradients = _flash_4()._flash_attn_bwd(*rows, do_, lse, softmax_scale=scale, causal=causal)[:3]
    except (TypeError, AssertionError, NotImplementedError) as error:
        raise UnsupportedCase(f"flash_attn.cute: {type(error).__name__}: {error}") from error
    return graded(tuple(gradient.transpose(1, 2) for gradient in gradients), (q, k, v))


# --- torch's memory-efficient kernels --------------------------------------------------------------------------------

_EFFICIENT_ROWS = 32  # lse is padded to a multiple of this


def _refuses_efficient(case: Case) -> str | None:
    _, Hq, Hkv, S, Skv, D = case.shape
    capability = capability_of(case.device)
    if capability < (7, 5):
        return "needs an NVIDIA GPU"
    if case.dtype == torch.float64 or (case.dtype == torch.bfloat16 and capability < (8, 0)):
        return f"takes float32 and float16, and bfloat16 from sm_80 on, not {case.dtype}"
    if D % (8 if is_half(case.dtype) else 4):
        return f"takes heads of a multiple of 8 (float32: 4), not {D}"
    if Hq != Hkv:
        return f"takes as many heads of keys as of queries, not {Hkv} and {Hq}"
    if window_of(case):
        return "is not asked for windows"
    if causal_of(case) and Skv != S:
        return f"has the causal mask of the top left corner, which is another for {S} queries and {Skv} keys"
    return None if math.prod(case.shape) else "takes no empty tensor"


_MOST_BATCHES = 65535  # of its grid


def _one_head(x: Tensor) -> Tensor:
    """The same numbers with each head as a batch of its own; see _folds."""
    return x.reshape(-1, 1, *x.shape[2:])


def _folds(*tensors: Tensor) -> bool:
    """Whether heads may go as batches.

    The kernels want and give memory in the order (batch, row, head, column), so for tensors whose heads are contiguous
    that saves copies of the result: 48 MiB of 97 at 8x12x2048x64 in float32.
    """
    B, H = tensors[0].shape[:2]
    return B * H <= _MOST_BATCHES and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in tensors)


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    folds = _folds(q, k, v)
    given = [_one_head(x) if folds else _strided(x) for x in (q, k, v)]
    found = aten._scaled_dot_product_efficient_attention(*given, None, True, 0.0, causal, scale=scale)
    lse = found[1][:, :, : q.shape[2]].reshape(q.shape[:3]).contiguous()
    return (found[0].reshape(q.shape) if folds else laid(found[0], q)), lse


def _efficient_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, window: int
) -> tuple[Tensor, ...]:
    beyond = -q.shape[2] % _EFFICIENT_ROWS
    lse = torch.nn.functional.pad(lse, (0, beyond), value=math.inf)
    folds = _folds(q, k, v, o)
    given = [_one_head(x) if folds else _strided(x) for x in (do.contiguous() if folds else do, q, k, v)]
    # Its kernel asks nobody how far apart the rows of o lie: it takes Hq * D, and reads beyond the end if they do not
    # (o_strideM in mem_eff_attention/kernel_backward.h).
    o = _one_head(o) if folds else o.transpose(1, 2).contiguous().transpose(1, 2)
    lse = _one_head(lse) if folds else lse
    seed = _seed(q.device)
    gradients = aten._scaled_dot_product_efficient_attention_backward(
        *given, None, o, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )[:3]
    if folds:
        gradients = [x.reshape(like.shape) for x, like in zip(gradients, (q, k, v), strict=True)]
    return graded(tuple(gradients), (q, k, v))


# --- pairs of implementations: forward, backward ---------------------------------------------------------------------

CUDNN = (
    Implementation("cudnn", _cudnn_forward, refuses=_refuses_cudnn),
    Implementation("cudnn", _cudnn_backward, refuses=_refuses_cudnn, deterministic=False),
)
FLASH = (
    Implementation("flash", _flash_forward, refuses=_refuses_flash),
    Implementation("flash", _flash_backward, refuses=_refuses_flash_backward, deterministic=False),
)
VARLEN_FLASH = (
    Implementation("flash", _varlen_flash_forward, refuses=_refuses_varlen_flash),
    Implementation("flash", _varlen_flash_backward, refuses=_refuses_varlen_flash, deterministic=False),
)
FLASH_4 = (
    Implementation("flash_attn_4", _flash_4_forward, refuses=_refuses_flash_4),
    Implementation("flash_attn_4", _flash_4_backward, refuses=_refuses_flash_4, deterministic=False),
)
EFFICIENT = (
    Implementation("efficient", _efficient_forward, refuses=_refuses_efficient),
    Implementation("efficient", _efficient_backward, refuses=_refuses_efficient, deterministic=False),
)
TORCH = (Implementation("torch", torch_forward, differentiable=True), Implementation("torch", torch_backward))
