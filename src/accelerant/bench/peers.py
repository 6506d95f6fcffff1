"""Other libraries' versions of our ops, each made by a function that raises UnsupportedCase where it is absent.

None of them is needed to use Accelerant; `accelerant bench neural --against liger,quack` measures them beside it.
Sources of the calls: the libraries' own public functions (Liger-Kernel 0.8, QuACK 0.6, FlashAttention-4, torch's
scaled_dot_product_attention back ends).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import UnsupportedCase

__all__ = ["NAMES"]

NAMES = ("torch", "compile", "liger", "quack", "cudnn", "flash", "flash_attn_4", "cublaslt")
"""What `--against` knows."""

Fn = Callable[..., Any]


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a library that does not load is as good as absent; the row says why
        raise UnsupportedCase(f"{package} cannot be used here: {type(error).__name__}: {error}") from None


def _liger(name: str) -> Any:
    return _module(f"liger_kernel.ops.{name}", "liger-kernel")


def liger_softmax() -> Fn:
    """Liger's softmax, over the last dimension."""
    function = _liger("softmax").LigerSoftmaxFunction
    return lambda x, dim=-1: function.apply(x)


def liger_layer_norm() -> Fn:
    """Liger's layer norm."""
    function = _liger("layer_norm").LigerLayerNormFunction
    return lambda x, weight, bias, eps=1e-5: function.apply(x, weight, bias, eps)


def liger_rms_norm() -> Fn:
    """Liger's RMS norm, computed as Llama does, not in place."""
    function = _liger("rms_norm").LigerRMSNormFunction
    return lambda x, weight, eps=1e-6: function.apply(x, weight, eps, 0.0, "llama", False)


def liger_swiglu() -> Fn:
    """Liger's product of silu(gate) and up."""
    function = _liger("swiglu").LigerSiLUMulFunction

    def call(gate: Tensor, up: Tensor | None = None) -> Tensor:
        y: Tensor = function.apply(*(gate.chunk(2, -1) if up is None else (gate, up)))
        return y

    return call


def liger_cross_entropy() -> Fn:
    """Liger's cross entropy, which writes the gradient over the logits."""
    loss = _module("liger_kernel.transformers.functional", "liger-kernel").liger_cross_entropy
    return lambda logits, targets, inplace_backward=False, **options: loss(logits, targets, **options)


def liger_linear_cross_entropy() -> Fn:
    """Liger's fused linear layer and cross entropy."""
    loss = _module("liger_kernel.transformers.functional", "liger-kernel").liger_fused_linear_cross_entropy
    return lambda hidden, weight, targets, **options: loss(hidden, weight, targets, **options)


def quack_softmax() -> Fn:
    """QuACK's softmax, over the last dimension."""
    softmax = _module("quack.softmax", "quack-kernels").softmax
    return lambda x, dim=-1: softmax(x)


def quack_layer_norm() -> Fn:
    """QuACK's layer norm, whose forward and backward (from 0.6.2 on) are joined here.

    It takes float32 weights: they are cast once, not in the calls that are timed.
    """
    module = _module("quack.rmsnorm", "quack-kernels")
    singles: dict[int, Tensor] = {}

    def single(weight: Tensor) -> Tensor:
        if weight.dtype is torch.float32:
            return weight
        if weight.data_ptr() not in singles:
            singles[weight.data_ptr()] = weight.float()
        return singles[weight.data_ptr()]

    class QuackLayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
            y, rstd, mean = module.layernorm_fwd(
                x, single(weight), single(bias), eps, return_rstd=True, return_mean=True
            )
            ctx.save_for_backward(x, weight, rstd, mean)
            result: Tensor = y
            return result

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            if not hasattr(module, "layernorm_bwd"):
                raise UnsupportedCase("this quack-kernels has no layernorm_bwd, which 0.6.2 and later have")
            x, weight, rstd, mean = ctx.saved_tensors
            return (*module.layernorm_bwd(x, weight, dy, rstd, mean), None)

    function: Callable[..., Any] = QuackLayerNorm.apply
    return lambda x, weight, bias, eps=1e-5: function(x, weight, bias, eps)


def quack_rms_norm() -> Fn:
    """QuACK's RMS norm."""
    rmsnorm = _module("quack.rmsnorm", "quack-kernels").rmsnorm
    return lambda x, weight, eps=1e-6: rmsnorm(x, weight, eps=eps)


def quack_cross_entropy() -> Fn:
    """QuACK's cross entropy, averaged over the rows."""
    loss = _module("quack.cross_entropy", "quack-kernels").cross_entropy
    return lambda logits, targets, inplace_backward=False: loss(
        logits, targets, reduction="mean", inplace_backward=inplace_backward
    )


def cublaslt_linear_gelu() -> Fn:
    """The way of torch to cuBLASLt's epilogue of bias and GELU by tanh."""

    def call(x: Tensor, weight: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
        if approximate != "tanh":
            raise UnsupportedCase("cuBLASLt's epilogue computes GELU by tanh only")
        y: Tensor = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
        return y

    return call


def _sdpa(backend: str) -> Fn:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, backend)

    def call(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )

    return call


def cudnn_attention() -> Fn:
    """Attention of torch by cuDNN."""
    return _sdpa("CUDNN_ATTENTION")


def flash_attention() -> Fn:
    """Attention of torch by FlashAttention-2."""
    return _sdpa("FLASH_ATTENTION")


def flash_attention_4() -> Fn:
    """FlashAttention-4, which has the head dimension before the sequence: views, no copies."""
    function = _module("flash_attn.cute", "flash-attn-4").flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        found = function(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=causal)
        y: Tensor = found[0] if isinstance(found, tuple) else found
        return y.transpose(1, 2)

    return call
