"""The neural ops compared with Liger, QuACK and FlashAttention-4, and the peers that come with torch.

    python -m benchmarks.neural --against torch --against compile --against liger --against quack --out neural-h200

Each library's functions are made by a function that raises UnsupportedCase where the library is absent; the rows then
say so. The calls are the libraries' own public functions (Liger-Kernel 0.8, QuACK 0.6, FlashAttention-4).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accelerant.bench.neural import NeuralSuite
from accelerant.bench.neural_cases import Libraries
from accelerant.cli.bench import run_command
from accelerant.errors import UnsupportedCase

__all__ = ["NeuralPeersSuite"]

Fn = Callable[..., Any]


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a library that does not load is as good as absent; the row says why
        raise UnsupportedCase(f"{package} cannot be used here: {type(error).__name__}: {error}") from None


def _liger(name: str) -> Any:
    return _module(f"liger_kernel.ops.{name}", "liger-kernel")


def liger_softmax() -> Fn:
    """Return Liger's softmax over the last dimension."""
    function = _liger("softmax").LigerSoftmaxFunction
    return lambda x, dim=-1: function.apply(x)


def liger_layer_norm() -> Fn:
    """Return Liger's layer norm."""
    function = _liger("layer_norm").LigerLayerNormFunction
    return lambda x, weight, bias, eps=1e-5: function.apply(x, weight, bias, eps)


def liger_rms_norm() -> Fn:
    """Return Liger's RMS norm, computed as Llama does, not in place."""
    function = _liger("rms_norm").LigerRMSNormFunction
    return lambda x, weight, eps=1e-6: function.apply(x, weight, eps, 0.0, "llama", False)


def liger_swiglu() -> Fn:
    """Return Liger's product of silu(gate) and up."""
    function = _liger("swiglu").LigerSiLUMulFunction

    def call(gate: Tensor, up: Tensor | None = None) -> Tensor:
        y: Tensor = function.apply(*(gate.chunk(2, -1) if up is None else (gate, up)))
        return y

    return call


def liger_cross_entropy() -> Fn:
    """Return Liger's cross entropy, which writes the gradient over the logits."""
    loss = _module("liger_kernel.transformers.functional", "liger-kernel").liger_cross_entropy
    return lambda logits, targets, inplace_backward=False, **options: loss(logits, targets, **options)


def liger_linear_cross_entropy() -> Fn:
    """Return Liger's fused linear layer and cross entropy."""
    loss = _module("liger_kernel.transformers.functional", "liger-kernel").liger_fused_linear_cross_entropy
    return lambda hidden, weight, targets, **options: loss(hidden, weight, targets, **options)


def quack_softmax() -> Fn:
    """Return QuACK's softmax over the last dimension."""
    softmax = _module("quack.softmax", "quack-kernels").softmax
    return lambda x, dim=-1: softmax(x)


def quack_layer_norm() -> Fn:
    """Return QuACK's layer norm, its forward and backward functions (the latter from 0.6.2 on) joined.

    It takes float32 weights, which are cast once, outside the timed calls.
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
    """Return QuACK's RMS norm."""
    rmsnorm = _module("quack.rmsnorm", "quack-kernels").rmsnorm
    return lambda x, weight, eps=1e-6: rmsnorm(x, weight, eps=eps)


def quack_cross_entropy() -> Fn:
    """Return QuACK's cross entropy, averaged over the rows."""
    loss = _module("quack.cross_entropy", "quack-kernels").cross_entropy
    return lambda logits, targets, inplace_backward=False: loss(
        logits, targets, reduction="mean", inplace_backward=inplace_backward
    )


def flash_attention_4() -> Fn:
    """Return FlashAttention-4, whose layout has heads after the sequence; views, no copies."""
    function = _module("flash_attn.cute", "flash-attn-4").flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        result = function(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=causal)
        y: Tensor = result[0] if isinstance(result, tuple) else result
        return y.transpose(1, 2)

    return call


@dataclass(frozen=True)
class NeuralPeersSuite(NeuralSuite):
    """Measure the neural ops, torch and other libraries, forward and backward; losses come first."""

    examples = (
        "--against torch --against compile --against liger --against quack",
        "--op gelu --op softmax --against torch --against liger",
        "--dtype bf16 --dtype fp16 --dtype fp32 --odd --sweep --out folder",
    )
    libraries: ClassVar[Libraries] = {
        "softmax": {"liger": liger_softmax, "quack": quack_softmax},
        "layer_norm": {"liger": liger_layer_norm, "quack": quack_layer_norm},
        "rms_norm": {"liger": liger_rms_norm, "quack": quack_rms_norm},
        "swiglu": {"liger": liger_swiglu},
        "cross_entropy": {"liger": liger_cross_entropy, "quack": quack_cross_entropy},
        "linear_cross_entropy": {"liger": liger_linear_cross_entropy},
        "attention": {"flash_attn_4": flash_attention_4},
    }


if __name__ == "__main__":
    from benchmarks.neural import NeuralPeersSuite as Suite  # not __main__'s, whose functions no other process finds

    run_command(Suite)
