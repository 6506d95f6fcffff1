"""The neural ops as a user without fused kernels writes them: the baselines of `accelerant bench OP`.

A composition is written once, for an array namespace `xp`, and runs in three forms. With torch's functions it is the
baseline "unfused": each operation is a kernel of its own whose result is written to memory, as in CuPy; attention holds
all of its scores. With NumPy it is the baseline "numpy". On plain Python lists, a row at a time, it is the baseline
"naive". Baselines compute in float32 and are not counted among the peers.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.bench.subjects import OPS
from accelerant.errors import UnsupportedCase

Composition = Callable[..., Any]

_LAST = {"axis": -1, "keepdims": True}
_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)


# --- compositions ----------------------------------------------------------------------------------------------------


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

NOT_BY_ROWS = ("attention", "rope")
"""Compositions that plain Python cannot compute row by row."""

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
    """Return the call of an op in plain Python: a loop over the rows of the first argument, each a list of numbers.

    Raises:
        UnsupportedCase: the first argument is no matrix, or the weights are too large for lists.
    """
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
