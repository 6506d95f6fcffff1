"""Layers, models and training on Accelerant's ops."""

from accelerant.nn.convolution import AvgPool2d, Conv2d, MaxPool2d
from accelerant.nn.layers import MLP, LayerNorm, Linear, MultiHeadAttention, RMSNorm, TransformerBlock
from accelerant.nn.models import GPT, CharRNN, CharRNNConfig, GPTConfig, Llama, LlamaConfig
from accelerant.nn.patching import PatchReport, patch, unpatch
from accelerant.nn.quantization import LinearInt8, QuantizationReport, quantize
from accelerant.nn.recurrent import GRU, LSTM, RNN

from accelerant.nn import optim, train  # isort: skip  it imports the names above

__all__ = [
    "GPT", "GRU", "LSTM", "MLP", "RNN", "AvgPool2d", "CharRNN", "CharRNNConfig", "Conv2d", "GPTConfig", "LayerNorm",
    "Linear", "LinearInt8", "Llama", "LlamaConfig", "MaxPool2d", "MultiHeadAttention", "PatchReport",
    "QuantizationReport", "RMSNorm", "TransformerBlock", "optim", "patch", "quantize", "train", "unpatch",
]  # fmt: skip
