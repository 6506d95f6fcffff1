"""Arguments that are not tensors: each op names the argument and its type."""

import re

import numpy as np
import pytest
import torch

from accelerant import ops

X, W, V = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
HEADS, IMAGES = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 5)
TARGETS = torch.tensor([0, 1, 2])
INT8, SCALE = torch.ones(5, 4, dtype=torch.int8), torch.ones(5)
CU, LENGTHS, PACKED = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3]), torch.randn(3, 2, 4)

CALLS = {
    "attention": (lambda q, k, v: ops.attention(q, k, v), (HEADS, HEADS, HEADS), ("q", "k", "v")),
    "attention_decode": (lambda q, k, v: ops.attention_decode(q, k, v, LENGTHS), (HEADS,) * 3, ("q", "k", "v")),
    "attention_varlen": (lambda q, k, v: ops.attention_varlen(q, k, v, CU, CU, 3, 3), (PACKED,) * 3, ("q", "k", "v")),
    "avg_pool2d": (lambda x: ops.avg_pool2d(x, 2), (IMAGES,), ("x",)),
    "conv2d": (lambda x, w: ops.conv2d(x, w), (IMAGES, torch.randn(3, 2, 2, 2)), ("x", "weight")),
    "cross_entropy": (lambda x, t: ops.cross_entropy(x, t), (X, TARGETS), ("logits", "targets")),
    "dropout": (lambda x: ops.dropout(x, 0.5), (X,), ("x",)),
    "embedding": (lambda i, w: ops.embedding(i, w), (TARGETS, W), ("indices", "weight")),
    "linear_cross_entropy": (
        lambda h, w, t: ops.linear_cross_entropy(h, w, t), (X, W, TARGETS), ("hidden", "weight", "targets")
    ),
    "linear_gelu": (lambda x, w, b: ops.linear_gelu(x, w, b), (X, W, V), ("x", "weight", "bias")),
    "linear_int8": (lambda x, w, s: ops.linear_int8(x, w, s), (X, INT8, SCALE), ("x", "weight", "scale")),
    "matmul": (lambda a, b: ops.matmul(a, b), (X, W.T), ("a", "b")),
    "max_pool2d": (lambda x: ops.max_pool2d(x, 2), (IMAGES,), ("x",)),
    "quantize_int8": (lambda x: ops.quantize_int8(x), (X,), ("x",)),
    "rope": (lambda x, c, s: ops.rope(x, c, s), (HEADS, torch.randn(3, 2), torch.randn(3, 2)), ("x", "cos", "sin")),
    "swiglu": (lambda g, u: ops.swiglu(g, u), (X, X), ("gate", "up")),
}  # fmt: skip


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("convert", [lambda x: x.numpy(), lambda x: x.tolist()], ids=["numpy", "list"])
@pytest.mark.parametrize("op", CALLS)
def test_an_argument_that_is_not_a_tensor_is_named_with_its_type(op, convert, autocast):
    call, arguments, names = CALLS[op]
    for i, name in enumerate(names):
        wrong = list(arguments)
        wrong[i] = convert(arguments[i].contiguous())
        kind = "numpy.ndarray" if isinstance(wrong[i], np.ndarray) else "list"
        words = re.escape(f"{op} takes torch tensors; {name} is a {kind}")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(TypeError, match=words):
            call(*wrong)
