"""Tensor operations, each in its folder with a reference, kernels and autograd.

Importing this starts no driver and no compiler: a kernel is compiled, or read from the disk cache, when it first runs.
"""

from __future__ import annotations

from accelerant.ops.gelu import gelu
from accelerant.ops.layer_norm import layer_norm
from accelerant.ops.matmul import matmul
from accelerant.ops.softmax import softmax

__all__ = ["gelu", "layer_norm", "matmul", "softmax"]
