"""Records a Python function of arrays: values that take part in operators and in functions of torch and NumPy.

A Traced value stands for an array while the function runs once. What it meets is looked up by name in FUNCTIONS; what
is not there is refused by that name, with the line of the user's code.
"""

from __future__ import annotations

import functools
import linecache
import math
import os
import sys
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from accelerant.accelerator.fusion.graph import Expr, Graph, Input, Program, Result, power, sized, where
from accelerant.errors import UnsupportedCase, UnsupportedDtype
from accelerant.ops._library import name_of
from accelerant.ops._refusals import FLOATING

__all__ = ["FUNCTIONS", "NAMES", "Domain", "Recording", "Returned", "Traced"]

_OURS = tuple(str(Path(path).parent) + os.sep for path in (__file__, torch.__file__, np.__file__))
_Extreme = namedtuple("_Extreme", "values indices")


class Domain:
    """The shape that all inputs broadcast to: `rows` (the leading sizes) of N columns."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.rows = tuple(shape[:-1])
        self.M, self.N = math.prod(self.rows), shape[-1] if shape else 1

    def shape(self, ndim: int, by_row: bool, by_column: bool, dropped: bool) -> tuple[int, ...]:
        """Return the shape of a value; `dropped`: without the dimension of the columns."""
        if not ndim:
            return ()
        leading = ndim if dropped else ndim - 1
        rows = self.rows[len(self.rows) - leading :] if by_row else (1,) * leading
        return rows if dropped else (*rows, self.N if by_column else 1)


class Returned:
    """The shape of a result, up to the sizes of the domain, and its dtype."""

    __slots__ = ("by_column", "dropped", "ndim")

    def __init__(self, ndim: int, by_column: bool, dropped: bool) -> None:
        self.ndim, self.by_column, self.dropped = ndim, by_column, dropped


def refuse(text: str) -> NoReturn:
    """Raise UnsupportedCase with the innermost line of the user's own code."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is not None:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        text += f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno}{': ' + line if line else ''})"
    raise UnsupportedCase(f"fuse: {text}")


class Recording:
    """One run of the function on traced values.

    Attributes:
        reads_shape: the function asked for a shape, so that the program serves this shape alone.
        captured: arrays of no dimension from outside of the function, which are inputs after its own.
        of_torch: methods of arrays have torch's signatures, not NumPy's.
    """

    def __init__(self, domain: Domain, inputs: Sequence[tuple[Input, int]], *, of_torch: bool) -> None:
        """Take the domain, and each input with its number of dimensions."""
        self.graph, self.domain, self.reads_shape, self.of_torch = Graph(), domain, False, of_torch
        self.inputs = [each for each, _ in inputs]
        self.captured: list[torch.Tensor | np.ndarray[Any, Any]] = []
        self._captured: list[Traced] = []
        self.values = []
        for index, (each, ndim) in enumerate(inputs):
            expr = self.graph.add(
                "input", value=(index, each.dtype == torch.bool), by_row=each.by_row, by_column=each.by_column
            )
            self.values.append(Traced(self, expr, each.dtype, ndim))

    def capture(self, x: torch.Tensor | np.ndarray[Any, Any]) -> Traced:
        """Return the value of an array from outside, which is read at each call."""
        if x.ndim or (isinstance(x, torch.Tensor) and (x.requires_grad or x.device.type != "cpu")):
            refuse("an array from outside of the function: make it an argument")
        for known, traced in zip(self.captured, self._captured, strict=True):
            if known is x:
                return traced
        dtype = x.dtype if isinstance(x, torch.Tensor) else getattr(torch, x.dtype.name, None)
        if not isinstance(dtype, torch.dtype) or dtype.is_complex:
            refuse(f"a {x.dtype} array from outside of the function: make it an argument")
        wide = any(each.dtype == torch.float64 for each in self.inputs)
        expr = self.graph.add("input", value=(len(self.inputs), False))
        self.inputs.append(Input(False, False, torch.float64 if wide else torch.float32))
        self.captured.append(x)
        self._captured.append(Traced(self, expr, dtype, 0))
        return self._captured[-1]

    def program(self, outputs: Sequence[Any]) -> tuple[Program, tuple[Returned, ...]]:
        """Return the program of the function's results, and their shapes."""
        results, shapes = [], []
        for number, y in enumerate(outputs):
            if not isinstance(y, Traced):
                raise UnsupportedCase(f"fuse: result {number} is a {type(y).__name__}, not computed from the arguments")
            node = y.expr.node
            if not node.by_row:
                text = f"result {number} has shape {tuple(y.shape)}, the inputs {(*self.domain.rows, self.domain.N)}"
                raise UnsupportedCase(f"fuse: {text}: compute it outside of the fused function")
            if not node.boolean and not y.dtype.is_floating_point:
                raise UnsupportedDtype(f"fuse: result {number} would be {name_of(y.dtype)}: convert it in the function")
            results.append(Result(y.expr.index, "full" if node.by_column else "column", y.dtype))
            shapes.append(Returned(y.ndim, node.by_column, y.dropped))
        return Program.of(self.graph, self.inputs, results), tuple(shapes)


class Traced:
    """An array of the recorded function.

    `dropped` values were reduced without keepdim: they lack the dimension of the columns.
    """

    __slots__ = ("dropped", "dtype", "expr", "ndim", "recording")
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]  # as __eq__ returns an array

    def __init__(self, recording: Recording, expr: Expr, dtype: torch.dtype, ndim: int, dropped: bool = False) -> None:
        self.recording, self.expr, self.dtype, self.ndim, self.dropped = recording, expr, dtype, ndim, dropped

    @property
    def shape(self) -> torch.Size:
        """The shape; who asks gets a program for it alone."""
        self.recording.reads_shape = True
        node = self.expr.node
        return torch.Size(self.recording.domain.shape(self.ndim, node.by_row, node.by_column, self.dropped))

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        return _call("torch", function.__name__, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "reduce":
            return _call("numpy", _REDUCERS.get(ufunc.__name__, ufunc.__name__ + ".reduce"), inputs, options)
        return _call("numpy", ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}", inputs, options)

    def __array_function__(self, function: Callable[..., Any], types: object, args: Any, kwargs: Any) -> Any:
        return _call("numpy", function.__name__, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _READS:
            refuse(f"{name}() reads values, which are not known while the function is recorded")
        if name not in FUNCTIONS and name not in _ALIASES:
            refuse(f"{name} of an array is not supported")
        return lambda *args, **options: _call("array", name, (self, *args), options)

    def _control(self, *_: object) -> NoReturn:
        refuse(
            "a value of an array decides what the function does, and is not known while it is recorded; use torch.where"
        )

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __iter__ = __contains__ = __array__ = _control

    def __len__(self) -> int:
        return self.shape[0]

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, key: Any) -> Any:
        if self.dropped and (key == (Ellipsis, None) or key == (*[slice(None)] * self.ndim, None)):
            return _unsqueeze(self, -1)
        refuse("indexing is not supported")

    def __setitem__(self, key: object, value: object) -> None:
        refuse("an assignment to elements is not supported")


def _operator(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    def method(self: Traced, other: Any = None) -> Any:
        args = (self,) if name in ("neg", "abs", "invert", "pos") else (other, self) if reflected else (self, other)
        return _call("operator", name, args, {})

    return method


for _name, _function in (
    ("add", "add"), ("sub", "sub"), ("mul", "mul"), ("truediv", "div"), ("pow", "pow"), ("and", "bitwise_and"),
    ("or", "bitwise_or"), ("floordiv", "floor_divide"), ("mod", "remainder"), ("matmul", "matmul"),
):  # fmt: skip
    setattr(Traced, f"__{_name}__", _operator(_function))
    setattr(Traced, f"__r{_name}__", _operator(_function, reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert", "pos"):
    setattr(Traced, f"__{_name}__", _operator(_name))


# --- calls -----------------------------------------------------------------------------------------------------------


def _call(library: str, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Record a call of a function by its name."""
    function = FUNCTIONS.get(_ALIASES.get(name, name))
    if function is None:
        refuse(f"{name if library == 'operator' else f'{library}.{name}'} is not supported")
    recording = _traced(*args, *options.values())[0].recording
    args = tuple(recording.capture(x) if isinstance(x, (torch.Tensor, np.ndarray)) else x for x in args)
    given = {
        _OPTIONS.get(key, key): recording.capture(x) if isinstance(x, (torch.Tensor, np.ndarray)) else x
        for key, x in options.items()
    }
    if library == "numpy":
        given = {key: value for key, value in given.items() if value is not None and value is not np._NoValue}
    of_torch = library == "torch" or (library == "array" and args[0].recording.of_torch)
    if name in ("max", "min"):
        given["paired"] = of_torch
    if name in ("var", "std"):
        given["correction"] = given.pop("ddof", given.get("correction", 1 if of_torch else 0))
    try:
        return function(*args, **given)
    except TypeError as error:
        refuse(f"{name} with arguments that fuse does not know: {str(error).partition(') ')[2] or error}")


_OPTIONS = {"input": "x", "other": "y", "axis": "dim", "keepdims": "keepdim", "a_min": "min", "a_max": "max"}
_ALIASES = {
    "absolute": "abs", "negative": "neg", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
    "power": "pow", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
    "equal": "eq", "not_equal": "ne", "logical_and": "bitwise_and", "logical_or": "bitwise_or", "invert": "bitwise_not",
    "logical_not": "bitwise_not", "positive": "pos", "clip": "clamp", "astype": "to",
    "log_sigmoid": "logsigmoid", "copy": "clone",
}  # fmt: skip
_REDUCERS = {"add": "sum", "maximum": "amax", "minimum": "amin"}
_READS = ("item", "tolist", "numpy", "cpu", "cuda", "data")


def _traced(*args: Any) -> list[Traced]:
    return [x for x in args if isinstance(x, Traced)]


def _operand(x: Any) -> Expr | float:
    if isinstance(x, Traced):
        return x.expr
    if isinstance(x, (int, float, np.number, np.bool_)):
        return float(x)
    raise TypeError(f"fuse does not know a {type(x).__name__} as operand")


def _dtype_of(*args: Any) -> torch.dtype:
    """Return the dtype of a result by torch's rules."""
    kinds = [torch.empty((1,) * x.ndim, dtype=x.dtype, device="meta") if isinstance(x, Traced) else x for x in args]
    kinds = [x.item() if isinstance(x, np.generic) else x for x in kinds]
    result = torch.result_type(kinds[0], kinds[1]) if len(kinds) > 1 else kinds[0].dtype
    return result


def _like(expr: Expr, dtype: torch.dtype, *args: Any, dropped: bool | None = None, ndim: int | None = None) -> Traced:
    """Return a value with the dimensions that these broadcast to."""
    values = _traced(*args)
    lacking = any(x.dropped for x in values)
    for x in values:
        if lacking and not x.dropped and x.ndim and (x.expr.node.by_row or x.expr.node.by_column):
            refuse("a row reduced without keepdim=True meets one that has its last dimension; reduce with keepdim=True")
    most = max(x.ndim for x in values) if ndim is None else ndim
    return Traced(values[0].recording, expr, dtype, most, lacking if dropped is None else dropped)


def _unary(build: Callable[[Expr], Expr]) -> Callable[..., Traced]:
    def function(x: Traced) -> Traced:
        dtype = x.dtype if x.dtype.is_floating_point else torch.float32
        return _like(build(x.expr), dtype, x)

    return function


def _binary(build: Callable[[Expr, Any], Expr]) -> Callable[..., Traced]:
    def function(x: Any, y: Any) -> Traced:
        recording = _traced(x, y)[0].recording
        first = _operand(x)
        expr = build(first if isinstance(first, Expr) else recording.graph.constant(first), _operand(y))
        return _like(expr, torch.bool if expr.node.boolean else _dtype_of(x, y), x, y)

    return function


def _sum_or_difference(sign: float) -> Callable[..., Traced]:
    def function(x: Any, y: Any, *, alpha: float = 1) -> Traced:
        if _dtype_of(x, y) == torch.bool:
            raise TypeError("a sum of conditions: use | and &")
        return _binary(lambda a, b: a + b * (sign * alpha) if sign * alpha != -1 else a - b)(x, y)

    return function


def _where(condition: Any, x: Any, y: Any) -> Traced:
    if not isinstance(condition, Traced) or not condition.expr.node.boolean:
        raise TypeError("the condition of where must be a comparison or a bool array")
    expr = where(condition.expr, _operand(x), _operand(y))
    return _like(expr, _dtype_of(x, y) if _traced(x, y) else torch.float32, condition, x, y)


def _power(x: Any, y: Any) -> Traced:
    if isinstance(x, Traced) and isinstance(y, Traced):
        raise TypeError("a power of two arrays")
    return _binary(_exponential if isinstance(y, Traced) else _power_of)(x, y)


def _exponential(a: Expr, b: Expr) -> Expr:
    base = a.node.value
    if base <= 0:
        raise TypeError(f"a power of the number {base}, which is not positive")
    return b.do("exp2") if base == 2 else a.do("pow", b)


def _power_of(a: Expr, n: float) -> Expr:
    if n == 0.5:
        return a.do("sqrt")
    if n == -0.5:
        return a.do("rsqrt")
    if not math.isfinite(n):
        raise TypeError(f"a power of {n}")
    if n != int(n):
        return a.do("pow", n)
    if abs(n) > 1024:
        raise TypeError(f"a power of {n:g}")
    return power(a, int(n))


def _clamp(x: Traced, min: Any = None, max: Any = None) -> Traced:
    expr = x.expr
    if any(isinstance(bound, Traced) and bound.ndim for bound in (min, max)):
        raise TypeError("clamp between arrays")
    for bound, outside, inside in ((min, Expr.__lt__, Expr.__ge__), (max, Expr.__gt__, Expr.__le__)):
        if bound is not None:  # the gradient of NaN is 0
            limit = _operand(bound)
            expr = where(inside(expr, limit), expr, where(outside(expr, limit), limit, expr.do("stop")))
    return _like(expr, x.dtype, x)


def _to(x: Traced, *args: Any, **options: Any) -> Traced:
    wanted = options.pop("dtype", args[0] if args else None)
    if isinstance(wanted, Traced):
        wanted = wanted.dtype
    dtype = wanted if isinstance(wanted, torch.dtype) else getattr(torch, np.dtype(wanted).name, None)
    if dtype not in FLOATING or options or len(args) > 1:
        raise TypeError(f"a conversion to {wanted}")
    if dtype == torch.float64 and not any(each.dtype == torch.float64 for each in x.recording.inputs):
        raise TypeError("a conversion to float64 of narrower inputs: convert them outside")
    return _like(x.expr.do("cast", value=dtype) if dtype != x.dtype else x.expr, dtype, x)


# --- reductions ------------------------------------------------------------------------------------------------------


def _reduction(build: Callable[[Expr], Expr]) -> Callable[..., Traced]:
    def function(x: Traced, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Traced:
        _check_dim(x, dim)
        if x.dtype == torch.bool:
            raise TypeError("the sum of a condition, which is an integer: convert it with .float()")
        if dtype is not None and dtype != x.dtype:
            raise TypeError(f"dtype={dtype}")
        ndim = x.ndim if keepdim else x.ndim - 1
        return _like(build(x.expr), x.dtype, x, dropped=not keepdim and ndim > 0, ndim=max(ndim, 0))

    return function


def _check_dim(x: Traced, dim: Any, *, every: bool = True) -> None:
    """Refuse another dimension than the last one; without one every dimension is meant, which an array of one has."""
    if x.dropped:
        raise TypeError("a second reduction, over another dimension")
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if (dim is None and (x.ndim > 1 or not every)) or (dim is not None and dim not in (-1, max(x.ndim - 1, 0))):
        raise TypeError(f"dim={dim} of {x.ndim} dimensions: only the last one, dim=-1")


def _mean(x: Expr) -> Expr:
    return x.over_row("sum") / sized(x) if x.node.by_column else x


def _smallest(x: Expr) -> Expr:
    return -(-x).over_row("max")


def _extreme(build: Callable[[Expr], Expr], pair: str) -> Callable[..., Any]:
    """Return max or min: of the rows, as a pair where torch returns one, or of two arrays."""

    def function(x: Any, *args: Any, paired: bool, y: Any = None, **options: Any) -> Any:
        if y is not None or (args and isinstance(args[0], Traced)):
            return FUNCTIONS[pair](x, args[0] if y is None else y)
        reduced = _reduction(build)(x, *args, **options)
        return _Extreme(reduced, _Unknown()) if paired and (args or "dim" in options) else reduced

    return function


class _Unknown:
    """The indices of the largest elements, which are not computed."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse("the indices of max and min are not supported")


def _variance(
    x: Traced, dim: Any = None, *, correction: float = 1, keepdim: bool = False, unbiased: bool | None = None
) -> Traced:
    less = float(correction if unbiased is None else unbiased)

    def build(a: Expr) -> Expr:
        if not a.node.by_column:
            raise TypeError("the variance of one number")
        centred = a - _mean(a)
        return (centred * centred).over_row("sum") / (sized(a) - less)

    return _reduction(build)(x, dim, keepdim)


def _deviation(x: Traced, dim: Any = None, **options: Any) -> Traced:
    y = _variance(x, dim, **options)
    return _like(y.expr.do("sqrt"), y.dtype, y)


def _shifted(x: Expr) -> Expr:
    return x - x.over_row("max").do("stop")


def _softmax(x: Expr) -> Expr:
    e = _shifted(x).do("exp")
    return e / e.over_row("sum")


def _log_softmax(x: Expr) -> Expr:
    shifted = _shifted(x)
    return shifted - shifted.do("exp").over_row("sum").do("log")


def _logsumexp(x: Expr) -> Expr:
    largest = x.over_row("max").do("stop")
    finite = where(largest.do("abs").equals(math.inf), 0.0, largest)
    return (x - finite).do("exp").over_row("sum").do("log") + finite


def _rowwise(build: Callable[[Expr], Expr]) -> Callable[..., Traced]:
    """Return a function of rows whose result has the shape of its argument."""

    def function(x: Traced, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Traced:
        _check_dim(x, dim, every=False)
        if dtype is not None and dtype != x.dtype:
            raise TypeError(f"dtype={dtype}")
        return _like(build(x.expr), x.dtype, x)

    return function


def _normalized(x: Traced, size: Any, weight: Any, bias: Any, eps: float, centred: bool) -> Traced:
    if len(tuple(size)) != 1 or x.dropped:
        raise TypeError("normalization over more than the last dimension")
    a = x.expr - _mean(x.expr) if centred else x.expr
    y = a * (_mean(a * a) + eps).do("rsqrt")
    y = y if weight is None else y * _operand(weight)
    return _like(y if bias is None else y + _operand(bias), x.dtype, x, *_traced(weight, bias))


def _layer_norm(
    x: Traced, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable: bool = True
) -> Traced:
    return _normalized(x, normalized_shape, weight, bias, eps, centred=True)


def _rms_norm(x: Traced, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Traced:
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps  # as torch does
    return _normalized(x, normalized_shape, weight, None, eps, centred=False)


# --- activations -----------------------------------------------------------------------------------------------------


def _gelu(x: Traced, approximate: str = "none") -> Traced:
    a = x.expr
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (a + 0.044715 * (a * a * a))
        return _like(a * (inner * 2.0).do("sigmoid"), x.dtype, x)
    if approximate != "none":
        raise TypeError(f"approximate={approximate!r}")
    return _like(0.5 * a * (1.0 + (a * math.sqrt(0.5)).do("erf")), x.dtype, x)


def _leaky_relu(x: Traced, negative_slope: float = 0.01, inplace: bool = False) -> Traced:
    return _like(where(x.expr > 0.0, x.expr, x.expr * negative_slope), x.dtype, x)


def _elu(x: Traced, alpha: float = 1.0, inplace: bool = False) -> Traced:
    return _like(where(x.expr > 0.0, x.expr, where(x.expr > 0.0, 0.0, x.expr).do("elu") * alpha), x.dtype, x)


def _activation(build: Callable[[Expr], Expr]) -> Callable[..., Traced]:
    def function(x: Traced, inplace: bool = False) -> Traced:
        return _like(build(x.expr), x.dtype, x)

    return function


def _unsqueeze(x: Traced, dim: int) -> Traced:
    if not x.dropped or dim not in (-1, x.ndim):
        raise TypeError(f"unsqueeze({dim}) of another value than a row reduced without keepdim")
    return Traced(x.recording, x.expr, x.dtype, x.ndim + 1)


def _condition(name: str) -> Callable[..., Traced]:
    def function(x: Any, y: Any) -> Traced:
        if not all(isinstance(each, Traced) and each.expr.node.boolean for each in (x, y)):
            raise TypeError("bits of numbers: it takes comparisons and bool arrays")
        return _binary(lambda a, b: a.do(name, b))(x, y)

    return function


def _invert(x: Traced) -> Traced:
    if not x.expr.node.boolean:
        raise TypeError("bits of numbers: it takes comparisons and bool arrays")
    return _like(x.expr.do("not"), torch.bool, x)


def _test(build: Callable[[Expr], Expr]) -> Callable[..., Traced]:
    return lambda x: _like(build(x.expr), torch.bool, x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _unary(lambda x, name=name: x.do(name)) for name in (  # type: ignore[misc]
        "neg", "abs", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh",
        "sigmoid", "erf", "erfc", "floor", "ceil",
    )},
    "square": _unary(lambda x: x * x),
    "reciprocal": _unary(lambda x: 1.0 / x),
    "sign": _unary(lambda x: where(x > 0.0, 1.0, where(x < 0.0, -1.0, 0.0))),
    "pos": lambda x: x,
    "contiguous": lambda x: x,
    "clone": lambda x: x,
    "detach": lambda x: _like(x.expr.do("stop"), x.dtype, x),
    "add": _sum_or_difference(1),
    "sub": _sum_or_difference(-1),
    "mul": _binary(lambda a, b: a * b),
    "div": _binary(lambda a, b: a / b),
    "pow": _power,
    "maximum": _binary(lambda a, b: a.do("maximum", b)),
    "minimum": _binary(lambda a, b: -((-a).do("maximum", -b))),
    **{name: _binary(lambda a, b, name=name: a.do(name, b)) for name in ("lt", "le", "eq", "ne")},  # type: ignore[misc]
    "gt": _binary(lambda a, b: a > b),
    "ge": _binary(lambda a, b: a >= b),
    "bitwise_and": _condition("and"),
    "bitwise_or": _condition("or"),
    "bitwise_not": _invert,
    "isnan": _test(lambda x: x.do("ne", x)),
    "isinf": _test(lambda x: x.do("abs").equals(math.inf)),
    "isfinite": _test(lambda x: x.do("abs") < math.inf),
    "where": _where,
    "masked_fill": lambda x, mask, value: _like(_where(mask, value, x).expr, x.dtype, x, mask),
    "clamp": _clamp,
    "to": _to,
    "float": functools.partial(_to, dtype=torch.float32),
    "half": functools.partial(_to, dtype=torch.float16),
    "bfloat16": functools.partial(_to, dtype=torch.bfloat16),
    "double": functools.partial(_to, dtype=torch.float64),
    "sum": _reduction(lambda x: x.over_row("sum")),
    "mean": _reduction(_mean),
    "amax": _reduction(lambda x: x.over_row("max")),
    "amin": _reduction(_smallest),
    "max": _extreme(lambda x: x.over_row("max"), "maximum"),
    "min": _extreme(_smallest, "minimum"),
    "var": _variance,
    "std": _deviation,
    "logsumexp": _reduction(_logsumexp),
    "softmax": _rowwise(_softmax),
    "log_softmax": _rowwise(_log_softmax),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "gelu": _gelu,
    "relu": _activation(lambda x: where(x <= 0.0, where(x < 0.0, 0.0, x.do("stop")), x)),  # of -0.0: itself
    "silu": _activation(lambda x: x * x.do("sigmoid")),
    "softplus": _activation(lambda x: x.do("softplus")),
    "logsigmoid": _activation(lambda x: 0.0 - (-x).do("softplus")),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "unsqueeze": _unsqueeze,
}  # fmt: skip
"""Name in torch or NumPy -> function of traced values. It raises TypeError for arguments that it does not know."""

NAMES = frozenset((*FUNCTIONS, *_ALIASES, *_REDUCERS.values()))
"""Names of functions of torch and NumPy that are recorded."""
