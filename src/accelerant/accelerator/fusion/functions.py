"""The functions of torch and NumPy that fused functions may call, on traced values."""

import functools
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import torch

from accelerant.accelerator.fusion.graph import Expr, computed_in, counted, power, where
from accelerant.accelerator.fusion.recorder import ALIASES, DTYPES, FUNCTIONS, REDUCERS, Traced, refuse, traced, viewed
from accelerant.errors import ShapeError
from accelerant.ops._library import name_of

_Extreme = namedtuple("_Extreme", "values indices")


def _operand(x: Any, dtype: torch.dtype, *, wraps: bool = False) -> Expr | float:
    """Return an operand in a dtype, or as a number; with `wraps` uint8 takes negative numbers, as in torch."""
    if isinstance(x, Traced):
        return x.expr.convert(computed_in(dtype))
    if isinstance(x, (int, float, np.number, np.bool_)):
        if not dtype.is_floating_point and dtype != torch.bool and float(x) != int(x):
            raise TypeError(f"the number {x} among integers")
        whole = not dtype.is_floating_point and dtype != torch.bool
        least = -255 if wraps and dtype == torch.uint8 else torch.iinfo(dtype).min if whole else 0
        if whole and not least <= int(x) <= torch.iinfo(dtype).max:
            raise TypeError(f"{x} is out of the range of {name_of(dtype)}")
        return x.item() if isinstance(x, np.generic) else x
    raise TypeError(f"fuse does not know a {type(x).__name__} as operand")


def _pair(x: Any, y: Any, dtype: torch.dtype) -> tuple[Expr, Expr]:
    """Return two operands as values that are computed in a dtype."""
    recording, kind = traced(x, y)[0].recording, computed_in(dtype)
    graph = recording.graph
    first, second = (_operand(each, dtype, wraps=not recording.as_numpy) for each in (x, y))
    if not isinstance(first, Expr):
        first = graph.constant(first, kind)
    return first, second if isinstance(second, Expr) else graph.constant(second, kind)


def _dtype_of(*args: Any) -> torch.dtype:
    """Return the dtype of a result, by NumPy's rules or torch's."""
    values = traced(*args)
    if (not values or values[0].recording.as_numpy) and torch.bfloat16 not in [x.dtype for x in values]:
        if not values:
            args = tuple(map(np.float32, args)) if all(isinstance(x, float) for x in args) else args
        return _numpys(np.result_type(*(_empty(x) if isinstance(x, Traced) else x for x in args)))
    kinds = [torch.empty((1,) * x.ndim, dtype=x.dtype, device="meta") if isinstance(x, Traced) else x for x in args]
    kinds = [x.item() if isinstance(x, np.generic) else x for x in kinds]
    found = [torch.result_type(kinds[0], each) for each in kinds[1:]] or [kinds[0].dtype]
    return functools.reduce(torch.promote_types, found)


def _empty(x: Traced) -> np.ndarray[Any, Any]:
    return np.empty(0, str(x.dtype).removeprefix("torch."))


def _numpys(dtype: np.dtype[Any]) -> torch.dtype:
    if (found := getattr(torch, dtype.name, None)) not in DTYPES:
        raise TypeError(f"a result of {dtype.name}")
    return found  # type: ignore[no-any-return]


def _real(*args: Any) -> torch.dtype:
    """Return the dtype of a result that is a float: of a quotient, a root."""
    dtype = _dtype_of(*args)
    if dtype.is_floating_point:
        return dtype
    if traced(*args)[0].recording.as_numpy:
        return _numpys(
            np.true_divide(np.ones(1, str(dtype).removeprefix("torch.")), 1).dtype
            if len(args) > 1
            else np.sqrt(_empty(args[0])).dtype
        )
    return torch.get_default_dtype()


def _like(
    expr: Expr, dtype: torch.dtype, *args: Any, dropped: bool | None = None, size: tuple[int, ...] | None = None
) -> Traced:
    """Return a value with the dimensions that these broadcast to."""
    values = traced(*args)
    lacking = any(x.dropped for x in values)
    for x in values:
        if lacking and not x.dropped and x.ndim and (x.expr.node.by_row or x.expr.node.by_column):
            refuse("a row reduced without keepdim=True meets one that has its last dimension; reduce with keepdim=True")
    if size is None:
        try:
            size = np.broadcast_shapes(*(x._size for x in values))
        except ValueError:
            raise ShapeError(f"shapes {', '.join(str(x._size) for x in values)} do not broadcast") from None
    return Traced(values[0].recording, expr, dtype, size, lacking if dropped is None else dropped)


def _unary(build: Callable[[Expr], Expr], *, integers: bool = False) -> Callable[..., Traced]:
    """Return a function of one array; with `integers` it takes integers to integers, not to floats."""

    def function(x: Traced, *, out: None = None) -> Traced:
        if integers and x.dtype == torch.bool:
            raise TypeError("arithmetic with a condition: convert it")
        dtype = x.dtype if integers else _real(x)
        return _like(build(x.expr.convert(computed_in(dtype))), dtype, x)

    return function


def _binary(build: Callable[[Expr, Expr], Expr], rule: Callable[..., torch.dtype] = _dtype_of) -> Callable[..., Traced]:
    def function(x: Any, y: Any) -> Traced:
        dtype = rule(x, y)
        expr = build(*_pair(x, y, dtype))
        return _like(expr, torch.bool if expr.node.boolean else dtype, x, y)

    return function


def _sum_or_difference(sign: int) -> Callable[..., Traced]:
    def function(x: Any, y: Any, *, alpha: float = 1) -> Traced:
        if _dtype_of(x, y) == torch.bool:
            raise TypeError("a sum of conditions: use | and &")
        return _binary(lambda a, b: a + b * (sign * alpha) if sign * alpha != -1 else a - b)(x, y)

    return function


def _lesser(a: Expr, b: Expr) -> Expr:
    if not a.node.dtype.is_floating_point:
        return where(b < a, b, a)
    return -((-a).do("maximum", -b))


def _where(condition: Any, x: Any, y: Any) -> Traced:
    if not isinstance(condition, Traced) or not condition.expr.node.boolean:
        raise TypeError("the condition of where must be a comparison or a bool array")
    recording = condition.recording
    dtype = _dtype_of(x, y)
    if not traced(x, y) and not recording.as_numpy:
        dtype = torch.result_type(x, y)
    elif not traced(x, y):
        dtype = _numpys(np.result_type(type(x), type(y)))
    first, second = (
        each if isinstance(each, Expr) else recording.graph.constant(each, computed_in(dtype))
        for each in (_operand(x, dtype), _operand(y, dtype))
    )
    return _like(where(condition.expr, first, second), dtype, condition, x, y)


def _quotient(x: Any, y: Any, *, rounding_mode: str | None = None) -> Traced:
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    if rounding_mode is not None:
        raise TypeError(f"rounding_mode={rounding_mode!r}")
    return _binary(lambda a, b: a / b, _real)(x, y)


def _by_zero(op: str) -> Callable[..., Traced]:
    """Return floor_divide or remainder: of integers by zero, NumPy's are 0, and torch raises."""

    def function(x: Any, y: Any) -> Traced:
        if (dtype := _dtype_of(x, y)) == torch.bool:
            raise TypeError("division of conditions")
        (a, b), as_numpy = _pair(x, y, dtype), traced(x, y)[0].recording.as_numpy
        if dtype.is_floating_point:
            expr = a.do(op, b)
            if op == "mod" and as_numpy:
                expr = where(expr.equals(0.0), expr.do("signed", b), expr)
        elif b.node.op == "constant" and b.node.value not in (0, -1):
            expr = a.do(op, b)
        elif as_numpy:  # -1: the quotient of the least number wraps
            zero, nothing = b.equals(0), a.graph.constant(0, a.node.dtype)
            unit = b.equals(-1) if dtype != torch.uint8 else zero
            safe = where(zero.do("or", unit), b.graph.constant(1, b.node.dtype), b)
            expr = where(unit, -a if op == "floordiv" else nothing, a.do(op, safe))
            expr = where(zero, nothing, expr)
        else:
            expr = a.do(op, b, value="raises")
        return _like(expr, dtype, x, y)

    return function


_floor_divide = _by_zero("floordiv")


def _rounded(x: Traced, decimals: int = 0, *, out: None = None) -> Traced:
    if x.dtype == torch.bool:
        raise TypeError("a condition that is rounded")
    if not x.dtype.is_floating_point and decimals < 0:
        raise TypeError(f"decimals={decimals} of integers")
    if not decimals or not x.dtype.is_floating_point:
        return _like(x.expr.do("round"), x.dtype, x)
    scale = 10.0 ** abs(decimals)
    scaled = (x.expr * scale if decimals > 0 else x.expr / scale).do("round")
    return _like(scaled / scale if decimals > 0 else scaled * scale, x.dtype, x)


def _power(x: Any, y: Any) -> Traced:
    dtype = _dtype_of(x, y)
    if dtype.is_floating_point:
        a, b = _pair(x, y, dtype)
        base, exponent = (each.node.value if each.node.op == "constant" else None for each in (a, b))
        if base == 2:
            return _like(b.do("exp2"), dtype, x, y)
        if exponent is None:
            return _like(a.do("pow", b), dtype, x, y)
        return _like(_power_of(a, exponent, traced(x, y)[0].recording.as_numpy), dtype, x, y)
    if isinstance(y, Traced) or dtype == torch.bool:
        raise TypeError("a power of integers with an array as exponent: convert one to floats")
    if y < 0:
        raise TypeError("integers to negative powers")
    return _like(power(_pair(x, y, dtype)[0], int(y)), dtype, x)


def _power_of(a: Expr, n: float, as_numpy: bool) -> Expr:
    if n == 0.5:
        return a.do("sqrt")
    if n == -0.5:
        return (a + 0.0).do("rsqrt") if as_numpy else a.do("rsqrt")  # of -0.0, inf is NumPy's and -inf torch's
    if not math.isfinite(n) or n != int(n) or abs(n) > 1024:
        return a.do("pow", n)
    return power(a, int(n))


def _sign(x: Traced) -> Traced:
    def build(a: Expr) -> Expr:
        one, less = (a.graph.constant(number, a.node.dtype) for number in (1, -1))
        nan = where(a.equals(a), 0.0, a) if x.recording.as_numpy and x.dtype.is_floating_point else 0  # torch's is 0
        return where(a > 0, one, where(a < 0, less, nan))

    return _unary(build, integers=True)(x)


def _clamp(x: Traced, min: Any = None, max: Any = None, *, out: None = None) -> Traced:
    if any(isinstance(bound, Traced) and bound.ndim for bound in (min, max)):
        raise TypeError("clamp between arrays")
    dtype = _dtype_of(x, *(bound for bound in (min, max) if bound is not None))
    expr = x.expr.convert(computed_in(dtype))
    for bound, outside, inside in ((min, Expr.__lt__, Expr.__ge__), (max, Expr.__gt__, Expr.__le__)):
        if bound is not None:  # the gradient of NaN is 0
            limit = _operand(bound, dtype)
            expr = where(inside(expr, limit), expr, where(outside(expr, limit), limit, expr.do("stop")))
    return _like(expr, dtype, x)


def _to(x: Traced, *args: Any, **options: Any) -> Traced:
    wanted = options.pop("dtype", args[0] if args else None)
    if isinstance(wanted, Traced):
        wanted = wanted.dtype
    dtype = wanted if isinstance(wanted, torch.dtype) else getattr(torch, np.dtype(wanted).name, None)
    if dtype not in DTYPES or options or len(args) > 1:
        raise TypeError(f"a conversion to {wanted}")
    expr = x.expr.convert(computed_in(dtype))
    narrows = dtype != x.dtype and dtype in (torch.float16, torch.bfloat16, torch.float32)
    return _like(expr.do("cast", value=dtype) if narrows else expr, dtype, x)


# --- reductions ------------------------------------------------------------------------------------------------------
class _Over(NamedTuple):
    """The dimensions that a reduction is over."""

    columns: bool
    rows: bool

    def __call__(self, x: Expr, op: Literal["sum", "max"]) -> Expr:
        return x.over(op, columns=self.columns, rows=self.rows)

    def mean(self, x: Expr) -> Expr:
        """Return the mean."""
        columns, rows = self.columns and x.node.by_column, self.rows and x.node.by_row
        return self(x, "sum") / counted(x, columns=columns, rows=rows) if columns or rows else x


def _over(x: Traced, dim: Any) -> tuple[_Over, tuple[int, ...]]:
    """Return what a reduction over some dimensions is over, and the dimensions."""
    count = x.ndim
    dims = range(count) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    if any(not -max(count, 1) <= each < max(count, 1) for each in dims):
        raise TypeError(f"dim={dim} of {count} dimensions")
    chosen = {each % max(count, 1) for each in dims}
    if x.dropped:
        if len(chosen) < count:
            raise TypeError("a second reduction, over another dimension")
        over = _Over(False, True)
    else:
        leading = chosen - {count - 1}
        if leading and len(leading) < count - 1:
            raise TypeError(f"dim={dim} of {count} dimensions: only the last one, all others, or all")
        over = _Over(count - 1 in chosen, bool(leading))
    if over.rows:
        recording, node = x.recording, x.expr.node
        recording.reads_shape = True
        sizes = x._size if x.dropped else x._size[:-1]
        if node.by_row and not recording.dry and math.prod(sizes) != recording.domain.M:
            raise TypeError(f"dim={dim} of an array that is broadcast along others")
    return over, tuple(sorted(chosen)) if count else ()


def _reduction(
    build: Callable[[Expr, _Over], Expr], rule: Callable[[Traced], torch.dtype] | None = None
) -> Callable[..., Traced]:
    """Return a reduction; `rule` gives the dtype of its result, by default its argument's."""

    def function(x: Traced, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: None = None) -> Traced:
        over, dims = _over(x, dim)
        made = rule(x) if rule is not None else x.dtype
        if dtype is not None and dtype != made:
            raise TypeError(f"dtype={dtype}")
        size = tuple(1 if k in dims else each for k, each in enumerate(x._size) if keepdim or k not in dims)
        expr = build(x.expr.convert(computed_in(made)), over)
        return _like(expr, made, x, dropped=not keepdim and over == (True, False) and len(size) > 0, size=size)

    return function


def _summed(x: Traced) -> torch.dtype:
    if x.dtype == torch.uint8 and x.recording.as_numpy:
        raise TypeError("the sum of uint8, NumPy's being uint64: convert it with .astype")
    return x.dtype if x.dtype.is_floating_point else torch.int64


def _averaged(x: Traced) -> torch.dtype:
    if not x.dtype.is_floating_point and not x.recording.as_numpy:
        raise TypeError(f"the mean of {name_of(x.dtype)}: convert it with .float()")
    return x.dtype if x.dtype.is_floating_point else torch.float64


def _smallest(x: Expr, over: _Over) -> Expr:
    if not x.node.dtype.is_floating_point:  # whose least number has no opposite
        return over(x.do("bit_xor", -1), "max").do("bit_xor", -1)
    return -over(-x, "max")


def _extreme(build: Callable[[Expr, _Over], Expr], pair: str) -> Callable[..., Any]:
    """Return max or min: of the rows, as a pair where torch returns one, or of two arrays."""

    def function(x: Any, *args: Any, paired: bool, y: Any = None, **options: Any) -> Any:
        if y is not None or (args and isinstance(args[0], Traced)):
            return FUNCTIONS[pair](x, args[0] if y is None else y)
        reduced = _reduction(build)(x, *args, **options)
        return _Extreme(reduced, _UnknownIndices()) if paired and (args or "dim" in options) else reduced

    return function


class _UnknownIndices:
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

    def build(a: Expr, over: _Over) -> Expr:
        columns, rows = over.columns and a.node.by_column, over.rows and a.node.by_row
        if not columns and not rows:
            raise TypeError("the variance of one number")
        centred = a - over.mean(a)
        return over(centred * centred, "sum") / (counted(a, columns=columns, rows=rows) - less)

    return _reduction(build, _averaged)(x, dim, keepdim)


def _deviation(x: Traced, dim: Any = None, **options: Any) -> Traced:
    y = _variance(x, dim, **options)
    return _like(y.expr.do("sqrt"), y.dtype, y)


def _shifted(x: Expr, over: _Over) -> Expr:
    return x - over(x, "max").do("stop")


def _softmax(x: Expr, over: _Over) -> Expr:
    e = _shifted(x, over).do("exp")
    return e / over(e, "sum")


def _log_softmax(x: Expr, over: _Over) -> Expr:
    shifted = _shifted(x, over)
    return shifted - over(shifted.do("exp"), "sum").do("log")


def _logsumexp(x: Expr, over: _Over) -> Expr:
    largest = over(x, "max").do("stop")
    finite = where(largest.do("abs").equals(math.inf), 0.0, largest)
    return over((x - finite).do("exp"), "sum").do("log") + finite


def _rowwise(build: Callable[[Expr, _Over], Expr]) -> Callable[..., Traced]:
    """Return a function of rows, or columns, whose result has the shape of its argument."""

    def function(x: Traced, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Traced:
        if dim is None and x.ndim > 1:
            raise TypeError(f"dim=None of {x.ndim} dimensions")
        if (dtype is not None and dtype != x.dtype) or not x.dtype.is_floating_point:
            raise TypeError(f"dtype={dtype or x.dtype}")
        return _like(build(x.expr, _over(x, dim)[0]), x.dtype, x)

    return function


def _normalized(x: Traced, size: Any, weight: Any, bias: Any, eps: float, centred: bool) -> Traced:
    if len(tuple(size)) != 1 or x.dropped:
        raise TypeError("normalization over more than the last dimension")
    mean = _Over(True, False).mean
    a = x.expr - mean(x.expr) if centred else x.expr
    y = a * (mean(a * a) + eps).do("rsqrt")
    y = y if weight is None else y * _operand(weight, x.dtype)
    return _like(y if bias is None else y + _operand(bias, x.dtype), x.dtype, x, *traced(weight, bias))


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


def _activation(build: Callable[..., Expr]) -> Callable[..., Traced]:
    def function(x: Traced, *parameters: float, inplace: bool = False, **named: float) -> Traced:
        return _like(build(x.expr, *parameters, **named), x.dtype, x)

    return function


def _unsqueeze(x: Traced, dim: int) -> Traced:
    if not x.dropped or dim not in (-1, x.ndim):
        raise TypeError(f"unsqueeze({dim}) of another value than a row reduced without keepdim")
    return Traced(x.recording, x.expr, x.dtype, (*x._size, 1))


def _bits(op: str, condition: str) -> Callable[..., Traced]:
    """Return a function of the bits of integers, or of conditions."""

    def function(x: Any, y: Any) -> Traced:
        dtype = _dtype_of(x, y)
        if dtype.is_floating_point:
            raise TypeError("bits of numbers: it takes comparisons, and arrays of bool and integers")
        return _binary(lambda a, b: a.do(condition if dtype == torch.bool else op, b))(x, y)

    return function


def _condition(x: Any) -> Any:
    return _like(x.expr.convert(torch.bool), torch.bool, x) if isinstance(x, Traced) else bool(x)


def _logical(name: str) -> Callable[..., Traced]:
    return lambda x, y: FUNCTIONS[name](_condition(x), _condition(y))


def _invert(x: Traced) -> Traced:
    if x.dtype.is_floating_point:
        raise TypeError("bits of numbers: it takes comparisons, and arrays of bool and integers")
    return _like(x.expr.do("not") if x.dtype == torch.bool else x.expr.do("bit_xor", -1), x.dtype, x)


def _transposed(x: Traced, *dims: Any, swaps: bool, axes: Any = None, dim0: Any = None, dim1: Any = None) -> Traced:
    dims = dims if dim0 is None else (dim0, dim1)
    return _swapped(x, *dims) if swaps else _permuted(x, *(dims or axes or reversed(range(x.ndim))))


def _permuted(x: Traced, *dims: Any) -> Traced:
    order = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    return viewed(x, "permute", tuple(each % x.ndim for each in order))


def _swapped(x: Traced, a: int, b: int) -> Traced:
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return viewed(x, "permute", tuple(order))


def _difference(x: Traced, n: int = 1, dim: int = -1) -> Traced:
    if n != 1:
        raise TypeError(f"n={n}")
    at = (slice(None),) * (dim % x.ndim)
    return x[(*at, slice(1, None))] - x[(*at, slice(None, -1))]  # type: ignore[no-any-return]


def _test(build: Callable[[Expr], Expr]) -> Callable[..., Traced]:
    def function(x: Traced) -> Traced:
        return _like(build(x.expr.convert(computed_in(_real(x)))), torch.bool, x)

    return function


FUNCTIONS |= {
    **{name: _unary(lambda x, name=name: x.do(name)) for name in (  # type: ignore[misc]
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid",
        "erf", "erfc",
    )},
    **{
        name: _unary(lambda x, name=name: x.do(name), integers=True)  # type: ignore[misc]
        for name in ("neg", "abs", "floor", "ceil")
    },
    "round": _rounded,
    "rint": _unary(lambda x: x.do("round")),
    "square": _unary(lambda x: x * x, integers=True),
    "reciprocal": _unary(lambda x: 1.0 / x),
    "sign": _sign,
    "pos": lambda x: x,
    "contiguous": lambda x: x,
    "clone": lambda x: x,
    "detach": lambda x: _like(x.expr.do("stop"), x.dtype, x),
    "add": _sum_or_difference(1),
    "sub": _sum_or_difference(-1),
    "mul": _binary(lambda a, b: a * b),
    "div": _quotient,
    "floor_divide": _floor_divide,
    "remainder": _by_zero("mod"),
    "atan2": _binary(lambda a, b: a.do("atan2", b), _real),
    "pow": _power,
    "maximum": _binary(lambda a, b: a.do("maximum", b)),
    "minimum": _binary(_lesser),
    **{name: _binary(lambda a, b, name=name: a.do(name, b)) for name in ("lt", "le", "eq", "ne")},  # type: ignore[misc]
    "gt": _binary(lambda a, b: a > b),
    "ge": _binary(lambda a, b: a >= b),
    "bitwise_and": _bits("bit_and", "and"),
    "bitwise_or": _bits("bit_or", "or"),
    "bitwise_xor": _bits("bit_xor", "ne"),
    "bitwise_not": _invert,
    "logical_and": _logical("bitwise_and"),
    "logical_or": _logical("bitwise_or"),
    "logical_not": lambda x: _invert(_condition(x)),
    "isnan": _test(lambda x: x.do("ne", x)),
    "isinf": _test(lambda x: x.do("abs").equals(math.inf)),
    "isfinite": _test(lambda x: x.do("abs") < math.inf),
    "permute": _permuted,
    "transpose": _transposed,
    "swapaxes": _swapped,
    "diff": _difference,
    "where": _where,
    "masked_fill": lambda x, mask, value: _like(_where(mask, value, x).expr, x.dtype, x, mask),
    "clamp": _clamp,
    "to": _to,
    "float": functools.partial(_to, dtype=torch.float32),
    "half": functools.partial(_to, dtype=torch.float16),
    "bfloat16": functools.partial(_to, dtype=torch.bfloat16),
    "double": functools.partial(_to, dtype=torch.float64),
    "int": functools.partial(_to, dtype=torch.int32),
    "long": functools.partial(_to, dtype=torch.int64),
    "sum": _reduction(lambda x, over: over(x, "sum"), _summed),
    "mean": _reduction(lambda x, over: over.mean(x), _averaged),
    "amax": _reduction(lambda x, over: over(x, "max")),
    "amin": _reduction(_smallest),
    "max": _extreme(lambda x, over: over(x, "max"), "maximum"),
    "min": _extreme(_smallest, "minimum"),
    "var": _variance,
    "std": _deviation,
    "logsumexp": _reduction(_logsumexp, _averaged),
    "softmax": _rowwise(_softmax),
    "log_softmax": _rowwise(_log_softmax),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "gelu": _gelu,
    "relu": _activation(lambda x: where(x <= 0.0, where(x < 0.0, 0.0, x.do("stop")), x)),  # of -0.0: itself
    "silu": _activation(lambda x: x * x.do("sigmoid")),
    "softplus": _activation(lambda x: x.do("softplus")),
    "logsigmoid": _activation(lambda x: 0.0 - (-x).do("softplus")),
    "leaky_relu": _activation(lambda x, negative_slope=0.01: where(x > 0.0, x, x * negative_slope)),
    "elu": _activation(lambda x, alpha=1.0: where(x > 0.0, x, where(x > 0.0, 0.0, x).do("elu") * alpha)),
    "unsqueeze": _unsqueeze,
}  # fmt: skip

NAMES = frozenset((*FUNCTIONS, *ALIASES, *REDUCERS.values()))  # names of functions of torch and NumPy that are recorded
