"""Tensor operations, each in its folder with a reference, kernels and autograd.

Under forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap and their combinations) torch's own
functions run in an op's place; the ledger does not count them.

Keywords may be those of torch's function of the same name: `gelu(input=x)`, `cross_entropy(input=logits, target=y)`,
`attention(query=q, key=k, value=v, is_causal=True)`. `linear` and `scaled_dot_product_attention` are torch's signatures
of matmul and attention.

Importing this starts no driver and no compiler: a kernel is compiled, or read from the disk cache, when it first runs.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from accelerant.ops.attention import attention
from accelerant.ops.attention import scaled_dot_product_attention as scaled_dot_product_attention
from accelerant.ops.attention.varlen import attention_varlen
from accelerant.ops.conv2d import conv2d
from accelerant.ops.cross_entropy import cross_entropy
from accelerant.ops.decode import attention_decode, attention_paged
from accelerant.ops.decode.paged import append_paged as append_paged
from accelerant.ops.dropout import dropout
from accelerant.ops.elementwise import add, mul, relu, sigmoid, silu, tanh
from accelerant.ops.embedding import embedding
from accelerant.ops.gelu import gelu
from accelerant.ops.linear_cross_entropy import linear_cross_entropy
from accelerant.ops.linear_gelu import linear_gelu
from accelerant.ops.linear_int4 import linear_int4
from accelerant.ops.linear_int4.op import quantize_int4 as quantize_int4
from accelerant.ops.linear_int8 import linear_int8
from accelerant.ops.losses import binary_cross_entropy, binary_cross_entropy_with_logits, l1_loss, mse_loss
from accelerant.ops.matmul import linear as linear
from accelerant.ops.matmul import matmul
from accelerant.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from accelerant.ops.pool2d import avg_pool2d, max_pool2d
from accelerant.ops.quantize_int8 import quantize_int8
from accelerant.ops.rope import rope
from accelerant.ops.softmax import log_softmax, softmax
from accelerant.ops.swiglu import swiglu

__all__ = [
    "add", "add_layer_norm", "add_rms_norm", "attention", "attention_decode", "attention_paged", "attention_varlen",
    "avg_pool2d", "binary_cross_entropy", "binary_cross_entropy_with_logits", "conv2d", "cross_entropy", "dropout",
    "embedding", "gelu", "l1_loss", "layer_norm", "linear_cross_entropy", "linear_gelu", "linear_int4", "linear_int8",
    "log_softmax", "matmul", "max_pool2d", "mse_loss", "mul", "quantize_int8", "relu", "rms_norm", "rope", "sigmoid",
    "silu", "softmax", "swiglu", "tanh",
]  # fmt: skip


def _torch_names(name: str) -> Any:
    lacking = f"module {__name__!r} has no attribute {name!r}"
    for place, path in ((torch.nn.functional, "torch.nn.functional"), (torch, "torch")):
        if not name.startswith("_") and isinstance(getattr(place, name, None), FunctionType | BuiltinFunctionType):
            raise AttributeError(f"{lacking}: write {path}.{name}")
    raise AttributeError(lacking)


if not TYPE_CHECKING:  # a type checker reports the names that are not there
    __getattr__ = _torch_names
