"""Layers, models and training on Accelerant's ops; every other name of torch.nn (Embedding, GELU, ...) is torch's."""

from typing import Any

from torch import nn as _torch_nn

from accelerant.nn.encoder import Encoder
from accelerant.nn.layers import (
    GRU,
    LSTM,
    RNN,
    AvgPool2d,
    Conv2d,
    LayerNorm,
    Linear,
    MaxPool2d,
    MultiheadAttention,
    RMSNorm,
)
from accelerant.nn.models import GPT, CharRNN, CharRNNConfig, GPTConfig, Llama, LlamaConfig
from accelerant.nn.models.llama import load_model
from accelerant.nn.patching import PatchReport, patch, unpatch
from accelerant.nn.quantization import LinearInt4, LinearInt8, QuantizationReport, quantize, unquantize
from accelerant.nn.transformer import MLP, MultiHeadAttention, TransformerBlock

from accelerant.nn import optim, serving, train  # isort: skip  it imports the names above

__all__ = [
    "GPT", "GRU", "LSTM", "MLP", "RNN", "AvgPool2d", "CharRNN", "CharRNNConfig", "Conv2d", "Encoder", "GPTConfig",
    "LayerNorm", "Linear", "LinearInt4", "LinearInt8", "Llama", "LlamaConfig", "MaxPool2d", "MultiHeadAttention",
    "MultiheadAttention", "PatchReport", "QuantizationReport", "RMSNorm", "TransformerBlock", "load_model", "optim",
    "patch", "quantize", "serving", "train", "unpatch", "unquantize",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(_torch_nn, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_torch_nn, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_torch_nn.modules.__all__})
