"""The forward methods of norms, activations, embeddings and linear layers with a GELU, and when they may run.

Each falls back to its class's own where our op would give another dtype, or where a part was changed since: a part with
hooks or adapters is called, never looked into.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from accelerant import ops
from accelerant.nn._patch.swaps import MARK, is_bare
from accelerant.ops._library import autocast_dtype

__all__ = [
    "activated_linear",
    "add_norm",
    "embedding_forward",
    "gelu_forward",
    "intermediate_forward",
    "keeps_dtype",
    "layer_norm_forward",
    "rms_norm_forward",
    "silu_forward",
]


def keeps_dtype(x: Tensor, weight: Tensor) -> bool:
    """Whether torch gives the dtype of x, as our norms always do: no mixed dtypes, no autocast of a low one."""
    if x.dtype is not weight.dtype:
        return False
    return x.dtype in (torch.float32, torch.float64) or autocast_dtype(x.device.type) is None


# --- norms -----------------------------------------------------------------------------------------------------------


def layer_norm_forward(self: Any, input: Tensor) -> Tensor:
    """nn.LayerNorm's."""
    if not keeps_dtype(input, self.weight):
        return _own(self, input)
    return ops.layer_norm(input, self.weight, self.bias, eps=self.eps)


def rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """That of Llama's, Qwen's and Mistral's RMSNorm."""
    if not keeps_dtype(hidden_states, self.weight):
        return _own(self, hidden_states)
    return ops.rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


def add_norm(x: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """The norm of the residual stream after x is added, and that sum: in one pass where the norm is one of ours."""
    own = type(norm) is nn.LayerNorm
    forward = layer_norm_forward if own else rms_norm_forward
    if x.dtype is residual.dtype and is_bare(norm, type(norm), forward) and keeps_dtype(x, norm.weight):
        if own:
            return ops.add_layer_norm(x, residual, norm.weight, norm.bias, eps=norm.eps)
        return ops.add_rms_norm(x, residual, norm.weight, eps=norm.variance_epsilon)
    total = x + residual
    return norm(total), total


# --- activations -----------------------------------------------------------------------------------------------------


def gelu_forward(self: Any, input: Tensor) -> Tensor:
    """That of transformers' GELU modules; the mark says whether by tanh."""
    return ops.gelu(input, approximate=getattr(self, MARK).options["approximate"])


def silu_forward(self: Any, input: Tensor) -> Tensor:
    """That of transformers' SiLU module and of nn.SiLU."""
    return ops.silu(input)


def activated_linear(layer: Any, activation: Any, x: Tensor, options: dict[str, Any]) -> Tensor | None:
    """linear_gelu of a layer and the activation after it; None where they must be called."""
    if not is_bare(activation, options["activation"], gelu_forward):
        return None
    if is_bare(layer, nn.Linear):
        weight = layer.weight
    elif is_bare(layer, Conv1D):
        weight = layer.weight.t()  # (in, out) in memory
    else:
        return None
    return ops.linear_gelu(x, weight, layer.bias, options["approximate"])


def intermediate_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """BertIntermediate's."""
    options = getattr(self, MARK).options
    y = activated_linear(self.dense, self.intermediate_act_fn, hidden_states, options)
    return _own(self, hidden_states) if y is None else y


# --- embedding -------------------------------------------------------------------------------------------------------


def embedding_forward(self: Any, input: Tensor) -> Tensor:
    """nn.Embedding's."""
    return ops.embedding(input, self.weight, padding_idx=self.padding_idx)


def _own(module: nn.Module, x: Tensor) -> Tensor:
    """What the module's class does."""
    y: Tensor = type(module).forward(module, x)
    return y
