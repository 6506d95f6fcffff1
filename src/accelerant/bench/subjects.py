"""The neural ops as the benchmark sees them: torch's function of each, its operations, and torch's other back ends.

Each function takes an op's arguments as its cases.py gives them: tensors positional, options by keyword.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import UnsupportedCase
from accelerant.ops._cases import SampleInput, Subject
from accelerant.ops.registry import public_op, watch

__all__ = ["OPS", "Subject", "subject_of"]


def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def _swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return F.silu(gate) * up


def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    if interleaved:
        one, two = x[..., ::2], x[..., 1::2]
        return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2).to(x.dtype)
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(x.dtype)


def attention_by_torch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Compute attention by the back end that torch chooses."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _attention_by(backend: str) -> Callable[..., Any]:
    """Return torch's attention by one of its back ends: CUDNN_ATTENTION, or FLASH_ATTENTION for FlashAttention-2."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, backend)

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        with sdpa_kernel(chosen):
            return attention_by_torch(q, k, v, **options)

    return call


def _cublaslt_linear_gelu() -> Callable[..., Any]:
    """Return torch's function for cuBLASLt's epilogue of bias and tanh GELU."""

    def call(x: Tensor, weight: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
        if approximate != "tanh":
            raise UnsupportedCase("cuBLASLt's epilogue computes GELU by tanh only")
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

    return call


def _attention_decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float | None = None) -> Tensor:
    """Compute by torch's attention with a mask of the keys that each query sees."""
    positions = lengths[:, None] - q.shape[2] + torch.arange(q.shape[2], device=q.device)
    seen = torch.arange(k.shape[2], device=q.device) <= positions[..., None]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen[:, None], scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, causal: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Compute by torch's prototype for packed sequences, whose parameter for "causal" depends on the version."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    options |= {"is_causal": causal} if "is_causal" in known else {"window_size": (-1, 0 if causal else -1)}
    result = varlen_attn(q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, **options)
    return result[0] if isinstance(result, tuple) else result


def _torch_takes(sample: SampleInput) -> bool:
    """Return whether torch takes a sample of attention: no window, and causal only with as many queries as keys."""
    q, k = sample.shapes[:2]
    return "window" not in sample.options and (not sample.options.get("causal") or (q or ())[2:3] == (k or ())[2:3])


def _reduced(sample: SampleInput) -> bool:
    """Return whether a sample's loss is one number, which needs no upstream gradient."""
    return sample.options.get("reduction") != "none"


def _quantize_int8(x: Tensor, *, dim: int = -1) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(dim, keepdim=True).float() / 127
    return torch.round(x / scale).to(torch.int8), scale.squeeze(dim)


def _linear_int8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, dynamic: bool = False
) -> Tensor:
    """Compute with a dequantized weight, or with torch's integer product where `dynamic`."""
    if not dynamic:
        return F.linear(x, (weight * scale[:, None]).to(x.dtype), bias)
    q, x_scale = _quantize_int8(x)
    y = torch._int_mm(q, weight.t()) * x_scale[:, None] * scale
    return (y if bias is None else y + bias).to(x.dtype)


def _matmul_flops(inputs: Sequence[Tensor], y: Tensor) -> int:
    return 2 * y.numel() * inputs[0].shape[-1]


def varlen_flops(q: Tensor, cu_q: Tensor, cu_k: Tensor, *, causal: bool) -> int:
    """Count attention_flops of each packed sequence."""
    pairs = int((cu_q.diff().long() * cu_k.diff().long()).sum())
    return 4 * pairs * q.shape[1] * q.shape[2] // (2 if causal else 1)


def attention_flops(q: Tensor, k: Tensor, *, causal: bool) -> int:
    """Count two products over all pairs, by convention half of them where it is causal."""
    return 4 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3] // (2 if causal else 1)


def _torch_function(op: str) -> Callable[..., Any]:
    """Return torch's function of an op, as its CPU fast path calls it."""
    function: Callable[..., Any] = public_op(op).function.torch_function  # type: ignore[attr-defined]
    return function


_OWN: dict[str, Subject] = {
    "layer_norm": Subject(_torch_function("layer_norm"), shared=(1, 2)),
    "add_layer_norm": Subject(_torch_function("add_layer_norm"), shared=(2, 3)),
    "rms_norm": Subject(_torch_function("rms_norm"), shared=(1,)),
    "add_rms_norm": Subject(_torch_function("add_rms_norm"), shared=(2,)),
    "linear_gelu": Subject(_linear_gelu, {"cublaslt": _cublaslt_linear_gelu}, _matmul_flops, shared=(1, 2)),
    "swiglu": Subject(_swiglu),
    "rope": Subject(_rope, constants=(1, 2)),
    "embedding": Subject(F.embedding, shared=(1,)),
    "dropout": Subject(lambda x, p=0.5, seed=None: F.dropout(x, p), random=True),
    "cross_entropy": Subject(_torch_function("cross_entropy"), odd=_reduced),
    **{
        name: Subject(_torch_function(name), constants=(1,), odd=_reduced)
        for name in ("mse_loss", "l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
    },
    "linear_cross_entropy": Subject(
        _torch_function("linear_cross_entropy"),
        flops=lambda inputs, _: 2 * inputs[0].numel() * inputs[1].shape[0],
        shared=(1,),
        odd=_reduced,
    ),
    "matmul": Subject(torch.matmul, flops=_matmul_flops, shared=(1,)),
    "quantize_int8": Subject(_quantize_int8),
    "linear_int8": Subject(
        _linear_int8,
        flops=lambda inputs, y: _matmul_flops(inputs, y) if len(inputs[0]) > 16 else 0,  # the weight bounds few rows
        constants=(2,),
        shared=(1, 2, 3),
    ),
    "attention": Subject(
        attention_by_torch,
        {
            "cudnn": functools.partial(_attention_by, "CUDNN_ATTENTION"),
            "flash": functools.partial(_attention_by, "FLASH_ATTENTION"),
        },
        lambda inputs, _: attention_flops(inputs[0], inputs[1], causal=False),
        backward_flops=2.5,
        odd=_torch_takes,
    ),
    "attention_varlen": Subject(
        _attention_varlen,
        flops=lambda inputs, _: varlen_flops(inputs[0], inputs[3], inputs[4], causal=False),
        backward_flops=2.5,
        odd=lambda sample: "window" not in sample.options,
    ),
    "attention_decode": Subject(_attention_decode),
    "conv2d": Subject(F.conv2d, flops=lambda inputs, y: 2 * y.numel() * inputs[1][0].numel(), shared=(1, 2)),
}


def subject_of(name: str) -> Subject:
    """Return what an op is measured against: the SUBJECT of its cases.py, its entry here, or torch's function alone."""
    declared: Subject | None = getattr(public_op(name).cases, "SUBJECT", None)
    return declared or _OWN.get(name) or Subject(_torch_function(name))


OPS: dict[str, Subject] = {}
"""The subjects of the public ops."""

watch(lambda op: OPS.update({op.name: subject_of(op.name)}))
