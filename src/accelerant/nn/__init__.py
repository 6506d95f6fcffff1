"""Layers, models and training on Accelerant's ops."""

from accelerant.nn.layers import MLP, LayerNorm, Linear, MultiHeadAttention, TransformerBlock
from accelerant.nn.models import GPT, GPTConfig
from accelerant.nn.quantization import LinearInt8, QuantizationReport, quantize

from accelerant.nn import optim, train  # isort: skip  it imports the names above

__all__ = [
    "GPT",
    "MLP",
    "GPTConfig",
    "LayerNorm",
    "Linear",
    "LinearInt8",
    "MultiHeadAttention",
    "QuantizationReport",
    "TransformerBlock",
    "optim",
    "quantize",
    "train",
]
