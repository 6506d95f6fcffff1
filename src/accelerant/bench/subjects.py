"""The neural ops as the benchmark sees them: torch's function of each, torch's other back ends, and the baselines.

The baselines of `accelerant bench OP` are the ops as a user without fused kernels writes them, once for an array
namespace `xp`: "unfused" with torch's functions, "numpy", and "naive" on Python lists, a row at a time. They compute in
float32 and are not counted among the peers.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import UnsupportedCase
from accelerant.ops.registry import SampleInput, Subject, public_op, watch


def _torch_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def _torch_swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return F.silu(gate) * up


def _torch_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
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


def _attention_paged(
    q: Tensor, k_blocks: Tensor, v_blocks: Tensor, table: Tensor, lengths: Tensor, starts: Tensor | None = None,
    *, window: int | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Compute by torch's attention with the blocks gathered: rows of one token at once, others one at a time."""
    if starts is None and len(q):  # the heads that share keys are queries of one head: the fastest for few queries
        k, v = (x[table.long()].flatten(1, 2).transpose(1, 2) for x in (k_blocks, v_blocks))
        key = torch.arange(k.shape[2], device=q.device)
        seen = (key < lengths[:, None]) & (key >= lengths[:, None] - (window or k.shape[2]))
        heads = q.unflatten(1, (k.shape[1], -1))
        return F.scaled_dot_product_attention(heads, k, v, attn_mask=seen[:, None, None], scale=scale).flatten(1, 2)
    bounds = list(range(len(q) + 1)) if starts is None else starts.tolist()
    found = []
    for row, length in enumerate(lengths.tolist()):
        queries = q[bounds[row] : bounds[row + 1]].transpose(0, 1)[None]
        k, v = (x[table[row].long()].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (k_blocks, v_blocks))
        position = torch.arange(queries.shape[2], device=q.device)[:, None] + length - queries.shape[2]
        key = torch.arange(length, device=q.device)
        seen = (key <= position) & (key > position - (window or length + 1))
        mixed = F.scaled_dot_product_attention(queries, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        found.append(mixed[0].transpose(0, 1))
    return torch.cat(found) if found else q.clone()


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
    "linear_gelu": Subject(_torch_linear_gelu, {"cublaslt": _cublaslt_linear_gelu}, _matmul_flops, shared=(1, 2)),
    "swiglu": Subject(_torch_swiglu),
    "rope": Subject(_torch_rope, constants=(1, 2)),
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
    "attention_paged": Subject(_attention_paged, odd=lambda sample: "softcap" not in sample.options),
    "conv2d": Subject(F.conv2d, flops=lambda inputs, y: 2 * y.numel() * inputs[1][0].numel(), shared=(1, 2)),
}


def subject_of(name: str) -> Subject:
    """Return what an op is measured against: the SUBJECT of its cases.py, its entry here, or torch's function alone."""
    declared: Subject | None = getattr(public_op(name).cases, "SUBJECT", None)
    return declared or _OWN.get(name) or Subject(_torch_function(name))


OPS: dict[str, Subject] = {}  # the subjects of the public ops

watch(lambda op: OPS.update({op.name: subject_of(op.name)}))


# --- as a user without fused kernels writes them ----------------------------------------------------------------------
Composition = Callable[..., Any]

_LAST = {"axis": -1, "keepdims": True}
_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)


def _sigmoid(xp: Any, x: Any) -> Any:
    return 1 / (1 + xp.exp(-x))


def _gelu(xp: Any, x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + xp.tanh(_ROOT_2_OVER_PI * (x + 0.044715 * (x * x * x))))
    return 0.5 * x * (1 + xp.erf(x * math.sqrt(0.5)))


def _softmax(xp: Any, x: Any, dim: int = -1) -> Any:
    powers = xp.exp(x - xp.amax(x, **_LAST))
    return powers / xp.sum(powers, **_LAST)


def _log_softmax(xp: Any, x: Any, dim: int = -1) -> Any:
    shifted = x - xp.amax(x, **_LAST)
    return shifted - xp.log(xp.sum(xp.exp(shifted), **_LAST))


def _layer_norm(xp: Any, x: Any, weight: Any = 1.0, bias: Any = 0.0, eps: float = 1e-5) -> Any:
    centered = x - xp.mean(x, **_LAST)
    return centered / xp.sqrt(xp.mean(centered * centered, **_LAST) + eps) * weight + bias


def _rms_norm(xp: Any, x: Any, weight: Any = 1.0, eps: float = 1e-6) -> Any:
    return x / xp.sqrt(xp.mean(x * x, **_LAST) + eps) * weight


def _swiglu(xp: Any, gate: Any, up: Any) -> Any:
    return gate * _sigmoid(xp, gate) * up


def _linear_gelu(xp: Any, x: Any, weight: Any, bias: Any = 0.0, approximate: str = "none") -> Any:
    return _gelu(xp, xp.matmul(x, xp.swapaxes(weight, -1, -2)) + bias, approximate)


def _attention(xp: Any, q: Any, k: Any, v: Any, causal: bool = False, scale: float | None = None) -> Any:
    """Compute with all scores in memory."""
    scores = xp.matmul(q, xp.swapaxes(k, -1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores + xp.triu(xp.full_like(scores[0, 0], -math.inf), 1)
    return xp.matmul(_softmax(xp, scores), v)


def _rope(xp: Any, x: Any, cos: Any, sin: Any, interleaved: bool = False) -> Any:
    half = x.shape[-1] // 2
    one, two = x[..., :half], x[..., half:]
    return xp.concatenate((one * cos - two * sin, two * cos + one * sin), axis=-1)


COMPOSITIONS: dict[str, Composition] = {
    "add": lambda xp, x, y: x + y,
    "mul": lambda xp, x, y: x * y,
    "relu": lambda xp, x: x * (x > 0),
    "sigmoid": _sigmoid,
    "silu": lambda xp, x: x * _sigmoid(xp, x),
    "tanh": lambda xp, x: xp.tanh(x),
    "gelu": _gelu,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "add_layer_norm": lambda xp, x, y, *rest, **options: (_layer_norm(xp, x + y, *rest, **options), x + y),
    "add_rms_norm": lambda xp, x, y, *rest, **options: (_rms_norm(xp, x + y, *rest, **options), x + y),
    "swiglu": _swiglu,
    "matmul": lambda xp, x, y: xp.matmul(x, y),
    "linear_gelu": _linear_gelu,
    "attention": _attention,
    "rope": _rope,
}

NOT_BY_ROWS = ("attention", "rope")  # compositions that plain Python cannot compute row by row

_NAIVE_ELEMENTS = 1 << 22
"""Most numbers of a naive call's shared arguments: as Python objects they take some 30 bytes each."""


def _present(arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments without absent ones at the end."""
    kept = list(arguments)
    while kept and kept[-1] is None:
        kept.pop()
    return kept


# --- the three forms -------------------------------------------------------------------------------------------------
def unfused(op: str) -> Callable[..., Any]:
    """Return an op as torch's arithmetic, one kernel an operation; 16-bit arguments are widened to float32."""

    def call(*arguments: Tensor | None, **options: Any) -> Any:
        given = _present(arguments)
        dtype = given[0].dtype
        wide = [x.float() if x.is_floating_point() and x.itemsize < 4 else x for x in given]
        result = COMPOSITIONS[op](torch, *wide, **options)
        return tuple(y.to(dtype) for y in result) if isinstance(result, tuple) else result.to(dtype)

    return call


class _NumPy:
    """NumPy with SciPy's error function, which it lacks."""

    def __getattr__(self, name: str) -> Any:
        if name != "erf":
            return getattr(np, name)
        try:
            from scipy.special import erf  # type: ignore[import-untyped]  # SciPy has no annotations
        except ImportError:
            raise UnsupportedCase("NumPy has no erf, and SciPy is not installed") from None
        return erf


def numpy_call(op: str, inputs: Sequence[Tensor | None], options: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the call of an op by NumPy on the memory of CPU tensors."""
    arrays = [x.numpy() for x in _present(inputs)]
    return lambda: COMPOSITIONS[op](_NumPy(), *arrays, **options)


def naive(op: str, inputs: Sequence[Tensor | None], options: Mapping[str, Any]) -> Callable[[], list[Any]]:
    """Return an op's call in plain Python, on lists of rows; UnsupportedCase for no matrix, or weights too large."""
    given = _present(inputs)
    rows, width = given[0].shape if given[0].ndim == 2 else (0, 0)
    if not rows or not width:
        raise UnsupportedCase("plain Python is measured for the rows of a matrix")
    along = [i not in OPS[op].shared and x.shape == given[0].shape for i, x in enumerate(given)]
    if sum(x.numel() for x, each in zip(given, along, strict=True) if not each) > _NAIVE_ELEMENTS:
        raise UnsupportedCase(f"weights of more than {_NAIVE_ELEMENTS:,} numbers are not made into lists")
    lists = [_PlainRow(x.tolist()) for x in given]

    def call() -> list[Any]:
        results = []
        for i in range(rows):
            row = [_PlainRow(x[i]) if each else x for x, each in zip(lists, along, strict=True)]
            results.append(COMPOSITIONS[op](_Plain, *row, **options))
        return results

    return call


def _elementwise(function: Callable[[Any, Any], Any], swapped: bool = False) -> Callable[[_PlainRow, Any], _PlainRow]:
    """Return arithmetic of a row with another or with a number, by a loop over Python's floats."""

    def call(self: _PlainRow, other: Any) -> _PlainRow:
        others = other if isinstance(other, list) else itertools.repeat(other)
        return _PlainRow([function(b, a) if swapped else function(a, b) for a, b in zip(self, others, strict=False)])

    return call


class _PlainRow(list[Any]):
    """A row of numbers with elementwise arithmetic."""

    __add__ = __radd__ = _elementwise(operator.add)  # not a list's concatenation
    __mul__ = __rmul__ = _elementwise(operator.mul)  # nor its repetition
    __gt__ = _elementwise(operator.gt)  # type: ignore[assignment]  # nor its order
    __sub__, __truediv__ = _elementwise(operator.sub), _elementwise(operator.truediv)
    __rsub__, __rtruediv__ = _elementwise(operator.sub, True), _elementwise(operator.truediv, True)

    def __neg__(self) -> _PlainRow:
        return self * -1.0


def _mapped(function: Callable[[float], float]) -> Callable[[Any], Any]:
    return lambda x: _PlainRow([function(a) for a in x]) if isinstance(x, list) else function(x)


def _bounded_exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf  # beyond it Python raises where arrays have an infinity


class _Plain:
    """The functions of a composition on one row; a reduction gives a number."""

    exp = staticmethod(_mapped(_bounded_exp))
    tanh, erf, log, sqrt = (staticmethod(_mapped(one)) for one in (math.tanh, math.erf, math.log, math.sqrt))

    amax, sum = (staticmethod(lambda x, _each=one, **_: float(_each(x))) for one in (max, sum))
    mean = staticmethod(lambda x, **_: float(sum(x)) / len(x))
    swapaxes = staticmethod(lambda x, *_: [list(column) for column in zip(*x, strict=True)])

    @staticmethod
    def matmul(x: _PlainRow, y: list[Any]) -> _PlainRow:
        """Return a row times a matrix, by a loop over columns and one over rows."""
        return _PlainRow([sum(a * row[j] for a, row in zip(x, y, strict=True)) for j in range(len(y[0]))])
