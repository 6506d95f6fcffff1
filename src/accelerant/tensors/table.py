"""Aten operations on elements and the reductions, for the table of TensorDevices.

Most entries are one expression: `{0}`, `{1}`, ... are the operands, which are tensors or numbers.
"""

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerant.tensors.tensor import DeviceTensor, TensorDevice, register, span


# --- operands --------------------------------------------------------------------------------------------------------
def operand(place: TensorDevice, x: Any) -> Any:
    """Return an argument as a tensor on the device, or as a number: host tensors of one element are numbers."""
    if isinstance(x, DeviceTensor) or not isinstance(x, Tensor):
        return x
    return x.item() if x.dim() == 0 else place.upload(x)


def on_device(place: TensorDevice, x: Tensor) -> DeviceTensor:
    """Return a tensor on the device; those of the host are copied."""
    return x if isinstance(x, DeviceTensor) else place.upload(x)


def vector(place: TensorDevice, x: Tensor) -> DeviceTensor:
    """Return the elements of a tensor as a vector on the device, with their memory if their order allows it."""
    whole = on_device(place, x)
    if whole.dim() == 1:
        return whole
    return strided(whole if whole.is_contiguous() else place.contiguous(whole), (whole.numel(),), (1,))


def strided(x: DeviceTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> DeviceTensor:
    """Return a view of a tensor's buffer; the offset is the tensor's own by default."""
    at = int(x.storage_offset()) if offset is None else offset
    return DeviceTensor(x.place, x.buffer, size, stride, at, x.dtype)


def promoted(a: Any, b: Any) -> torch.dtype:
    """Return the dtype of an operation of two operands, as torch.result_type."""
    if isinstance(a, DeviceTensor) and a.dtype != torch.bool:
        if isinstance(b, DeviceTensor) and a.dtype == b.dtype:
            return a.dtype
        if isinstance(b, (int, bool)) or (isinstance(b, float) and a.dtype.is_floating_point):
            return a.dtype
    pair = (torch.empty((0,) * x.dim(), dtype=x.dtype) if isinstance(x, DeviceTensor) else x for x in (a, b))
    return torch.result_type(*pair)  # of the host's tensors, which promote as those do


def _broadcast(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    first = tensors[0].shape if tensors else ()
    if all(x.shape == first for x in tensors):
        return tuple(first)
    return tuple(torch.broadcast_shapes(*(x.shape for x in tensors)))


def spreads(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return whether a shape broadcasts to another."""
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape[::-1], to[::-1], strict=False))


@lru_cache(maxsize=4096)
def _numbered(template: str, numbers: tuple[bool, ...]) -> str:
    """Return the expression of a template, some of whose operands are numbers."""
    tensors, scalars, names = 0, 0, []
    for number in numbers:
        names.append(f"s{scalars}" if number else f"x{tensors}")
        scalars, tensors = scalars + number, tensors + (not number)
    return re.sub(r"\{(\d+)\}", lambda match: names[int(match[1])], template)


def _check_written(out: DeviceTensor, inputs: Sequence[DeviceTensor], dtype: torch.dtype) -> None:
    """Raise torch's errors for a result that `out` cannot hold, and for memory that is read and written."""
    if not torch.can_cast(dtype, out.dtype):
        raise RuntimeError(f"result type {dtype} can't be cast to the desired output type {out.dtype}")
    if any(n > 1 and not step for n, step in zip(out.shape, out.stride(), strict=True)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    for x in inputs:
        if x.buffer is not out.buffer or not x.numel():
            continue
        first, begin = int(out.storage_offset()), int(x.storage_offset())
        if first == begin and x.shape == out.shape and x.stride() == out.stride():
            continue
        if first <= begin + span(x) and begin <= first + span(out) and _is_dense(x) and _is_dense(out):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
                "memory location. Please clone() the tensor before performing the operation."
            )


def _is_dense(x: Tensor) -> bool:
    return span(x) == x.numel() - 1


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and statistics of a dtype: float32 for two bytes, as torch's."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


_LARGEST = 3.4028235677973366e38 - 2.0**74
"""Numbers beyond are rounded to an infinite float32."""


def _number(x: Any, dtype: torch.dtype) -> Any:
    """Return a number as torch casts it: integers wrap, and floats beyond float32's range are infinite."""
    if dtype.is_floating_point:
        beyond = dtype != torch.float64 and not -_LARGEST <= x <= _LARGEST and x == x
        return math.copysign(math.inf, x) if beyond else x
    if dtype == torch.bool or not isinstance(x, int):
        return torch.tensor(x).to(dtype).item()
    bits = 8 * dtype.itemsize
    x &= (1 << bits) - 1
    return x - (1 << bits) if dtype.is_signed and x >> (bits - 1) else x


def representable(x: Any, dtype: torch.dtype) -> Any:
    """Return a number as a value of a dtype; raise torch's error if the dtype does not have it."""
    return x if isinstance(x, Tensor) or _holds(dtype, x) else torch.zeros((), dtype=dtype).masked_fill(_TRUE, x).item()


_TRUE = torch.tensor(True)


def _holds(dtype: torch.dtype, x: Any) -> bool:
    """Return whether every floating dtype has a number: up to 65504, or infinity, or NaN."""
    return dtype.is_floating_point and not 65504 < abs(x) < math.inf


def elementwise(
    place: TensorDevice, template: str, operands: Sequence[Any], dtype: torch.dtype, *,
    compute: torch.dtype | None = None, out: DeviceTensor | None = None, integers: Sequence[int] = (),
) -> Any:  # fmt: skip
    """Return a template's value for each element, in a new tensor or in `out`; NotImplemented for unknown dtypes."""
    whole = [operand(place, x) for x in operands]
    tensors = [x for x in whole if isinstance(x, DeviceTensor)]
    compute = dtype if compute is None else compute
    if compute not in place.dtypes or (out is None and dtype not in place.dtypes):
        return NotImplemented
    shape = _broadcast(tensors) if tensors or out is None else tuple(out.shape)
    if out is None:
        out = place.empty(shape, dtype)
    else:
        if tuple(out.shape) != shape and not spreads(shape, out.shape):
            raise RuntimeError(f"output with shape {list(out.shape)} doesn't match the broadcast shape {list(shape)}")
        _check_written(out, tensors, dtype)
    if out.numel():
        numbers = tuple(not isinstance(x, DeviceTensor) for x in whole)
        scalars = [_number(x, compute) for x in whole if not isinstance(x, DeviceTensor)]
        place.map(out, _numbered(template, numbers), tensors, scalars, integers, compute=compute)
    return out


def expression(name: str, template: str) -> None:
    """Register an operation that is an expression of its arguments, in the dtype of the first."""
    register(name)(lambda place, *args: elementwise(place, template, args, args[0].dtype))


# --- elementwise -----------------------------------------------------------------------------------------------------
def _compared(place: TensorDevice, x: Any, dtype: torch.dtype) -> Any:
    """Return an operand as torch compares it: numbers and tensors of no dimensions in the common dtype."""
    if isinstance(x, Tensor) and (x.dim() or x.dtype == dtype):
        return x
    if isinstance(x, DeviceTensor):
        return place.contiguous(x, dtype) if dtype in place.dtypes else x
    return torch.tensor(operand(place, x), dtype=dtype) if dtype != wide(dtype) else x


_REFUSED = ""
"""Instead of a template: the host raises torch's error, or runs the call."""


def _pointwise(
    names: str, floats: str, result: str = "same", *, integers: str | None = None, bools: str | None = None
) -> None:
    """Register an expression by its templates for the operands' common dtype, which its result has unless it says."""

    def run(place: TensorDevice, a: Any, *others: Any, out: Any = None, decimals: int = 0) -> Any:
        compute: torch.dtype = promoted(a, *others) if others else a.dtype
        if result == "float" and not compute.is_floating_point:
            compute = torch.get_default_dtype()
        template = floats if compute.is_floating_point else bools if compute == torch.bool else integers
        template = floats if template is None else template
        if template == _REFUSED or decimals:
            return NotImplemented
        operands = (a, *others)
        if result == "bool" and others:
            operands = tuple(_compared(place, x, compute) for x in operands)
        dtype = torch.bool if result == "bool" else compute
        return elementwise(place, template, operands, dtype, compute=compute, out=out)

    register(*names.split())(run)


for _name, _template in {
    "exp": "exp({0})", "log": "log({0})", "sqrt": "sqrt({0})", "rsqrt": "1 / sqrt({0})", "reciprocal": "1 / {0}",
    "tanh": "tanh({0})", "sigmoid": "1 / (1 + exp(-{0}))", "sin": "sin({0})", "cos": "cos({0})", "erf": "erf({0})",
    "log2": "log2({0})", "log10": "log({0}) * 0.4342944819032518",
    "exp2": "exp2({0})",
    "log1p": "select(log(1 + {0}) * ({0} / ((1 + {0}) - 1)), {0}, 1 + {0} == 1 || (is_inf({0}) && {0} > 0))",
    "silu": "{0} / (1 + exp(-{0}))",
}.items():  # fmt: skip
    _pointwise(f"{_name} {_name}_", _template, "float")
for _name, _template in {
    "neg": "-{0}", "abs": "abs({0})", "relu": "select({0}, 0, {0} < 0)", "square": "{0} * {0}",
}.items():  # fmt: skip
    _pointwise(f"{_name} {_name}_", _template, bools=_REFUSED)
for _name, _template in {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint"}.items():
    _pointwise(f"{_name} {_name}_", f"{_template}({{0}})", integers="{0}", bools=_REFUSED)
_pointwise("sign sign_", "select(select(0, -1, {0} < 0), 1, {0} > 0)")
_pointwise("logical_not", "{0} == 0", "bool")
_pointwise("isnan", "is_nan({0})", "bool", integers="{0} != {0}", bools="{0} != {0}")
_pointwise("isinf", "is_inf({0})", "bool", integers="{0} != {0}", bools="{0} != {0}")
_pointwise("bitwise_not bitwise_not_", _REFUSED, integers="~{0}", bools="{0} == 0")
for _name, _template in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _pointwise(f"{_name} {_name}_", f"{{0}} {_template} {{1}}", "bool")
for _name, _template in {
    "and": "({0} != 0) && ({1} != 0)", "or": "({0} != 0) || ({1} != 0)", "xor": "({0} != 0) != ({1} != 0)",
}.items():  # fmt: skip
    _pointwise(f"logical_{_name} logical_{_name}_", _template, "bool")
for _name, _template in {"and": "&", "or": "|", "xor": "^"}.items():
    _both = f"{{0}} {_template} {{1}}"
    _pointwise(f"bitwise_{_name} bitwise_{_name}_", _REFUSED, integers=_both, bools=_both)
_pointwise("mul mul_", "{0} * {1}")
_pointwise("maximum max.other", "max({0}, {1})")
_pointwise("minimum min.other", "min({0}, {1})")
_pointwise("remainder remainder_", "rem_floor({0}, {1})")
_pointwise("floor_divide floor_divide_", "div_floor({0}, {1})")


def _is_alpha(alpha: Any, dtype: torch.dtype) -> bool:
    """Return whether torch takes an alpha: a bool for bool alone, and a float for no integers."""
    return isinstance(alpha, bool) <= (dtype == torch.bool) and (isinstance(alpha, int) or dtype.is_floating_point)


def _is_bool(x: Any) -> bool:
    return x.dtype == torch.bool if isinstance(x, Tensor) else isinstance(x, bool)


def _sum_or_difference(
    place: TensorDevice, a: Any, b: Any, alpha: Any = 1, *, sign: str, out: DeviceTensor | None = None
) -> Any:
    dtype = promoted(a, b)
    if not _is_alpha(alpha, dtype) or (sign == "-" and (_is_bool(a) or _is_bool(b))):
        return NotImplemented  # torch's error
    if dtype == torch.bool:
        return elementwise(place, "({0} != 0) || ({1} != 0 && {2} != 0)", (a, b, alpha), dtype, out=out)
    if alpha == 1:
        return elementwise(place, f"{{0}} {sign} {{1}}", (a, b), dtype, out=out)
    return elementwise(place, f"{{0}} {sign} {{2}} * {{1}}", (a, b, representable(alpha, dtype)), dtype, out=out)


register("add", "add_")(partial(_sum_or_difference, sign="+"))
register("sub", "sub_")(partial(_sum_or_difference, sign="-"))
register("rsub")(lambda place, a, b, alpha=1: _sum_or_difference(place, b, a, alpha, sign="-"))


@register("div", "div_")
def _div(
    place: TensorDevice, a: Any, b: Any, *, rounding_mode: str | None = None, out: DeviceTensor | None = None
) -> Any:
    dtype = promoted(a, b)
    if rounding_mode is None:
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        return elementwise(place, "{0} / {1}", (a, b), dtype, out=out)
    if rounding_mode == "floor":
        return elementwise(place, "div_floor({0}, {1})", (a, b), dtype, out=out)
    template = "trunc({0} / {1})" if dtype.is_floating_point else "div_trunc({0}, {1})"
    return elementwise(place, template, (a, b), dtype, out=out)


_POWERS: dict[Any, str] = {2: "{0} * {0}", 3: "{0} * {0} * {0}", 1: "{0}"}
_FLOAT_POWERS: dict[Any, str] = {0.5: "sqrt({0})", -0.5: "1 / sqrt({0})", -1: "1 / {0}", -2: "1 / ({0} * {0})"}


@register("pow", "pow_")
def _pow(place: TensorDevice, a: Any, b: Any, *, out: DeviceTensor | None = None) -> Any:
    dtype = promoted(a, b)
    exponent = b.item() if isinstance(b, Tensor) and b.dim() == 0 and not isinstance(b, DeviceTensor) else b
    if not isinstance(exponent, Tensor):
        template = _POWERS.get(exponent) or (_FLOAT_POWERS.get(exponent) if dtype.is_floating_point else None)
        if template is not None:
            return elementwise(place, template, (a,), dtype, out=out)
    if not dtype.is_floating_point:
        return NotImplemented
    return elementwise(place, "pow({0}, {1})", (a, exponent), dtype, out=out)


@register("clamp", "clamp_")
def _clamp(place: TensorDevice, x: Any, low: Any = None, high: Any = None, *, out: DeviceTensor | None = None) -> Any:
    dtype = x.dtype
    for bound in (low, high):
        dtype = dtype if bound is None else torch.promote_types(dtype, promoted(x, bound))
    if dtype == torch.bool or low is high is None:
        return NotImplemented  # torch's error
    template, operands = "{0}", [x]
    for function, bound in (("max", low), ("min", high)):
        if bound is not None:
            template = f"{function}({template}, {{{len(operands)}}})"
            operands.append(representable(bound, dtype))
    return elementwise(place, template, operands, dtype, out=out)


register("clamp_min", "clamp_min_")(lambda place, x, low, *, out=None: _clamp(place, x, low, out=out))
register("clamp_max", "clamp_max_")(lambda place, x, high, *, out=None: _clamp(place, x, None, high, out=out))


@register("where.self")
def _where(place: TensorDevice, condition: Any, a: Any, b: Any) -> Any:
    return elementwise(place, "select({2}, {1}, {0} != 0)", (condition, a, b), promoted(a, b))


@register("masked_fill", "masked_fill_")
def _masked_fill(place: TensorDevice, x: Any, mask: Any, value: Any, *, out: DeviceTensor | None = None) -> Any:
    if isinstance(value, Tensor) and (value.dim() or not torch.can_cast(value.dtype, x.dtype)):
        return NotImplemented  # torch's error
    operands = (x, mask, representable(value, x.dtype))
    return elementwise(place, "select({0}, {2}, {1} != 0)", operands, x.dtype, out=out)


@register("lerp", "lerp_")
def _lerp(place: TensorDevice, a: Any, b: Any, weight: Any, *, out: DeviceTensor | None = None) -> Any:
    if {a.dtype} != {each.dtype for each in (b, weight) if isinstance(each, Tensor)} or not a.dtype.is_floating_point:
        return NotImplemented  # torch's error
    template = "select({1} - ({1} - {0}) * (1 - {2}), {0} + {2} * ({1} - {0}), abs({2}) < 0.5)"
    return elementwise(place, template, (a, b, weight), a.dtype, out=out)


def _add_scaled(name: str, template: str, *, floats_only: bool) -> None:
    def run(place: TensorDevice, x: Any, a: Any, b: Any, *, value: Any = 1, out: DeviceTensor | None = None) -> Any:
        dtype = torch.promote_types(promoted(x, a), promoted(x, b))
        refused = not dtype.is_floating_point if floats_only else dtype == torch.bool or not _is_alpha(value, dtype)
        if refused:
            return NotImplemented  # torch's error
        return elementwise(place, template, (x, a, b, representable(value, wide(dtype))), dtype, out=out)

    register(name, f"{name}_")(run)


_add_scaled("addcmul", "{0} + {3} * {1} * {2}", floats_only=False)
_add_scaled("addcdiv", "{0} + {3} * ({1} / {2})", floats_only=True)


# --- reductions ------------------------------------------------------------------------------------------------------
def dim_of(dim: int, rank: int) -> int:
    """Return a dimension as a number from 0; raise torch's error if a tensor of this rank does not have it."""
    rank = max(rank, 1)
    if not -rank <= dim < rank:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})")
    return dim % rank


def fits(func: Any, *args: Any) -> bool:
    """Return whether torch accepts the shapes and dtypes of a call; raise its error where it does not.

    Kernels read at strides and indices, so a tensor of another shape would be read beyond its end. Torch's checks run
    on tensors without memory, once for each combination; those may refuse what it accepts, which the host then runs.
    Only for operations whose checks are in C++: others import torch's in Python, for seconds.
    """
    return _fits(func, *map(_layout, args))


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    def on(self, device: str) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)


def _layout(x: Any) -> Any:
    if isinstance(x, Tensor):
        return _Layout(tuple(x.shape), x.dtype)
    return tuple(map(_layout, x)) if isinstance(x, (list, tuple)) else x


@lru_cache(maxsize=4096)
def _fits(func: Any, *args: Any) -> bool:
    def tensors(x: Any, device: str) -> Any:
        if isinstance(x, _Layout):
            return x.on(device)
        return [tensors(each, device) for each in x] if isinstance(x, tuple) else x

    with contextlib.suppress(Exception):
        func(*tensors(args, "meta"))
        return True
    func(*tensors(args, "cpu"))
    return False


def dims_of(x: Tensor, dims: Any) -> list[int]:
    """Return the dimensions that an argument names; all of them for None and an empty list."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(x.dim()))
    listed = [dim_of(dim, x.dim()) for dim in ([dims] if isinstance(dims, int) else dims)]
    for dim in listed:
        if listed.count(dim) > 1:
            raise RuntimeError(f"dim {dim} appears multiple times in the list of dims")
    return sorted(listed) if x.dim() else []


def reduced(size: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Return a shape with sizes of 1 at the reduced dimensions."""
    return [1 if at in dims else n for at, n in enumerate(size)]


def reduction(
    place: TensorDevice, kind: str, inputs: Sequence[DeviceTensor], dims: Sequence[int], dtype: torch.dtype, *,
    pre: str = "x0", post: str = "a", scalars: Sequence[float] = (), compute: torch.dtype | None = None,
    keepdim: bool = False,
) -> Any:  # fmt: skip
    """Return a reduction in a new tensor; the dimensions of size 1 stay with `keepdim`."""
    compute = dtype if compute is None else compute
    if dtype not in place.dtypes or compute not in place.dtypes:
        return NotImplemented
    shape = _broadcast(inputs)
    out = place.empty(reduced(shape, dims), dtype)
    if out.numel():
        place.reduce(out, kind, inputs, dims, pre=pre, post=post, scalars=scalars, compute=compute)
    if keepdim or not dims:
        return out
    kept = [at for at in range(len(shape)) if at not in dims]
    return strided(out, [out.shape[at] for at in kept], [out.stride(at) for at in kept])


def deep_product(place: TensorDevice, out: DeviceTensor, a: DeviceTensor, b: DeviceTensor, depth: int) -> None:
    """Write a product of many terms as the sum of products of `depth` terms."""
    parts: Any = place.empty((-(-a.shape[2] // depth), *out.shape), out.dtype)
    for at in range(parts.shape[0]):
        along = slice(at * depth, (at + 1) * depth)
        x: Any = a[:, :, along]
        y: Any = b[:, along]
        place.matmul(parts[at], x, y)
    place.reduce(strided(out, (1, *out.shape), (0, *out.stride())), "sum", (parts,), [0])


def _sum_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)


@register("sum.default", "sum.dim_IntList")
def _sum(place: TensorDevice, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return reduction(place, "sum", (x,), dims_of(x, dim), _sum_dtype(x, dtype), keepdim=keepdim)


@register("prod.default", "prod.dim_int")
def _prod(place: TensorDevice, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return reduction(place, "prod", (x,), dims_of(x, dim), _sum_dtype(x, dtype), keepdim=keepdim)


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[at] for at in dims)


@register("mean.default", "mean.dim")
def _mean(place: TensorDevice, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    wanted = dtype or x.dtype
    if not wanted.is_floating_point:
        return NotImplemented  # torch's error
    dims = dims_of(x, dim)
    count = _count(x, dims)
    post = "a / s0"
    return reduction(place, "sum", (x,), dims, wanted, post=post, scalars=(float(count),), keepdim=keepdim)


def _extreme(kind: str) -> Callable[..., Any]:
    def run(place: TensorDevice, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        dims = dims_of(x, dim)
        return NotImplemented if not _count(x, dims) else reduction(place, kind, (x,), dims, x.dtype, keepdim=keepdim)

    return run


def _extreme_at(kind: str) -> Callable[..., Any]:
    values, at = _extreme(kind), _argument(f"arg{kind}")

    def run(place: TensorDevice, x: Any, dim: int, keepdim: bool = False) -> Any:
        if not x.numel():
            return NotImplemented
        return values(place, x, dim, keepdim), at(place, x, dim, keepdim)

    return run


def _argument(kind: str) -> Callable[..., Any]:
    def run(place: TensorDevice, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if not x.numel() or torch.int64 not in place.dtypes:
            return NotImplemented
        if dim is None:
            found = reduction(place, kind, (vector(place, x),), [0], torch.int64, compute=x.dtype)
            return strided(found, (1,) * x.dim(), (1,) * x.dim()) if keepdim else found
        if not x.dim():
            dims_of(x, dim)  # its check
            return elementwise(place, "{0}", (0,), torch.int64)
        return reduction(place, kind, (x,), dims_of(x, dim), torch.int64, compute=x.dtype, keepdim=keepdim)

    return run


register("amax", "max.default")(_extreme("max"))
register("amin", "min.default")(_extreme("min"))
for _kind in ("argmax", "argmin"):

    def _numbers_argument(place: TensorDevice, x: Any, *args: Any, kind: str = _kind, **kwargs: Any) -> Any:
        return NotImplemented if x.dtype == torch.bool else _argument(kind)(place, x, *args, **kwargs)

    register(_kind)(_numbers_argument)
register("max.dim")(_extreme_at("max"))
register("min.dim")(_extreme_at("min"))


def _quantified(kind: str) -> Callable[..., Any]:
    def run(place: TensorDevice, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        dtype = torch.uint8 if x.dtype == torch.uint8 else torch.bool
        if isinstance(dim, (list, tuple)) and not dim:
            return elementwise(place, "{0} != 0", (x,), dtype, compute=x.dtype)
        pre = "select(0, 1, x0 != 0)"
        dims = dims_of(x, dim)
        compute = torch.int32 if x.dtype == torch.bool else x.dtype
        return reduction(place, kind, (x,), dims, dtype, pre=pre, post="a > 0", compute=compute, keepdim=keepdim)

    return run


register("any.default", "any.dim", "any.dims")(_quantified("max"))
register("all.default", "all.dim", "all.dims")(_quantified("min"))


def _variance(name: str, post: str, *, with_mean: bool = False) -> None:
    def run(place: TensorDevice, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        if not x.numel() or not x.dtype.is_floating_point:
            return NotImplemented
        dims = dims_of(x, dim)
        mean = _mean(place, x, dims, True, dtype=wide(x.dtype))
        count = (float(max(_count(x, dims) - (1 if correction is None else correction), 0)),)
        pre = "(x0 - x1) * (x0 - x1)"
        result = reduction(place, "sum", (x, mean), dims, x.dtype, pre=pre, post=post, scalars=count, keepdim=keepdim)
        if not with_mean:
            return result
        return result, (mean if keepdim else mean.reshape(result.shape)).to(x.dtype)

    register(f"{name}.correction")(run)


_variance("var", "a / s0")
_variance("std", "sqrt(a / s0)")
_variance("var_mean", "a / s0", with_mean=True)


@register("linalg_vector_norm.default")
def _vector_norm(
    place: TensorDevice, x: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    dims, wanted = dims_of(x, dim), dtype or x.dtype
    kinds = {2: ("sum", "x0 * x0", "sqrt(a)"), 1: ("sum", "abs(x0)", "a"), math.inf: ("max", "abs(x0)", "a")}
    if order not in kinds or not wanted.is_floating_point or (order == math.inf and not _count(x, dims)):
        return NotImplemented
    kind, pre, post = kinds[order]
    return reduction(place, kind, (x,), dims, wanted, pre=pre, post=post, keepdim=keepdim)
