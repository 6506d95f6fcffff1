"""Aten operations that create tensors (copies, constants, joins, random values) or index them."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelerant.tensors.table import (
    dim_of,
    elementwise,
    expression,
    fits,
    on_device,
    operand,
    representable,
    strided,
    vector,
)
from accelerant.tensors.tensor import SEVERAL, TABLE, DeviceTensor, TensorDevice, aten, register


def _copy(place: TensorDevice, out: DeviceTensor, x: Tensor, non_blocking: bool = False, **_: Any) -> Any:
    source = operand(place, x)
    if isinstance(source, DeviceTensor) and source.place is not place:
        source = place.upload(source.place.download(source))
    return elementwise(place, "{0}", (source,), out.dtype, compute=torch.promote_types(x.dtype, out.dtype), out=out)


TABLE[aten.copy_.default] = _copy


@register("clone")
def _clone(place: TensorDevice, x: DeviceTensor, *, memory_format: Any = None) -> Any:
    return place.contiguous(x)


@register("_to_copy")
def _to_copy(
    place: TensorDevice, x: DeviceTensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Any:
    return NotImplemented if dtype not in (None, *place.dtypes) else place.contiguous(x, dtype)


@register("fill_")
def _fill(place: TensorDevice, x: DeviceTensor, value: Any, *, out: DeviceTensor) -> Any:
    if isinstance(value, Tensor) and value.dim():
        return NotImplemented  # torch's error
    return elementwise(place, "{0}", (representable(value, x.dtype),), x.dtype, out=x)


@register("zero_")
def _zero(place: TensorDevice, x: DeviceTensor, *, out: DeviceTensor) -> Any:
    return elementwise(place, "{0}", (0,), x.dtype, out=x)


def _filled(place: TensorDevice, size: Sequence[int], dtype: torch.dtype, value: Any) -> Any:
    if dtype not in place.dtypes:
        return NotImplemented
    out = place.empty(size, dtype)
    return out if value is None else elementwise(place, "{0}", (representable(value, dtype),), dtype, out=out)


def _fill_like(place: TensorDevice, x: DeviceTensor, value: Any, *, dtype: Any = None, **_: Any) -> Any:
    return _filled(place, x.shape, x.dtype if dtype is None else dtype, value)


def _fill_new(
    place: TensorDevice, x: DeviceTensor, size: Sequence[int], value: Any, *, dtype: Any = None, **_: Any
) -> Any:
    return _filled(place, size, x.dtype if dtype is None else dtype, value)


register("full_like.default")(_fill_like)
register("new_full.default")(_fill_new)
for _name, _value in {"empty": None, "zeros": 0, "ones": 1}.items():
    register(f"{_name}_like.default")(partial(_fill_like, value=_value))
    register(f"new_{_name}.default")(partial(_fill_new, value=_value))


@register("new_empty_strided.default")
def _new_empty_strided(
    place: TensorDevice, x: DeviceTensor, size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any
) -> Any:
    wanted = x.dtype if dtype is None else dtype
    if wanted not in place.dtypes:
        return NotImplemented
    span = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return strided(place.empty((span,), wanted), size, stride)


@register("_local_scalar_dense")
def _item(place: TensorDevice, x: DeviceTensor) -> Any:
    return place.download(x).item()


@register("equal")
def _equal(place: TensorDevice, a: Any, b: Any) -> bool:
    if a.shape != b.shape:
        return False
    return not a.numel() or bool((a == b).all().item())


def _triangle(
    place: TensorDevice, x: DeviceTensor, diagonal: int = 0, *, out: DeviceTensor | None = None, name: str, sign: str
) -> Any:
    if x.dim() < 2:
        raise RuntimeError(f"{name}: input tensor must have at least 2 dimensions, got {x.dim()}")
    template = f"select(0, {{0}}, i % n0 {sign} (i / n0) % n1 + n2)"
    return elementwise(place, template, (x,), x.dtype, out=out, integers=(x.shape[-1], x.shape[-2], diagonal))


register("tril", "tril_")(partial(_triangle, name="tril", sign="<="))
register("triu", "triu_")(partial(_triangle, name="triu", sign=">="))


@register("cat")
def _cat(place: TensorDevice, tensors: Sequence[Any], dim: int = 0) -> Any:
    if not (parts := [x for x in tensors if not (x.dim() == 1 and not x.numel())]):
        return NotImplemented
    dtype = parts[0].dtype
    for x in parts[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    if dtype not in place.dtypes:
        return NotImplemented
    if not all(x.dim() for x in parts):
        raise RuntimeError("cat: a tensor of no dimensions cannot be concatenated; see torch.stack")
    dim = dim_of(dim, parts[0].dim())
    size = list(parts[0].shape)
    if any(
        x.dim() != len(size) or [*x.shape[:dim], *x.shape[dim + 1 :]] != [*size[:dim], *size[dim + 1 :]] for x in parts
    ):
        raise RuntimeError(f"cat: sizes must match except in dimension {dim}, got {[tuple(x.shape) for x in parts]}")
    size[dim] = sum(x.shape[dim] for x in parts)
    out, at = place.empty(size, dtype), 0
    for x in parts:
        part = strided(out, x.shape, out.stride(), at * out.stride(dim))
        if x.numel():
            place.copy(part, operand(place, x) if x.dim() else x)
        at += x.shape[dim]
    return out


@register("repeat.default")
def _repeat(place: TensorDevice, x: DeviceTensor, repeats: Sequence[int]) -> Any:
    if len(repeats) < x.dim() or min(repeats, default=1) < 0:
        return NotImplemented  # torch's error
    sizes = [1] * (len(repeats) - x.dim()) + list(x.shape)
    out = place.empty([count * n for count, n in zip(repeats, sizes, strict=True)], x.dtype)
    if out.numel():
        whole: Any = out.view([n for pair in zip(repeats, sizes, strict=True) for n in pair])
        place.copy(whole, x.reshape([n for size in sizes for n in (1, size)]))
    return out


@register("unsafe_split.Tensor")
def _split(place: TensorDevice, x: DeviceTensor, size: int, dim: int = 0) -> Any:
    return aten.split.Tensor(x, size, dim)


@register("stack")
def _stack(place: TensorDevice, tensors: Sequence[Any], dim: int = 0) -> Any:
    dim = dim_of(dim, tensors[0].dim() + 1)
    if any(x.shape != tensors[0].shape for x in tensors):
        raise RuntimeError(f"stack expects each tensor to be equal size, got {[tuple(x.shape) for x in tensors]}")
    lifted: Any = [on_device(place, x).unsqueeze(dim) for x in tensors]
    return _cat(place, lifted, dim)


# --- random values ---------------------------------------------------------------------------------------------------
def _seed(generator: Any) -> tuple[int, int]:
    """Return two halves of a seed, drawn from torch's generator of the host."""
    low, high = torch.randint(0, 2**31, (2,), generator=generator).tolist()
    return low, high


@register("uniform_")
def _uniform(
    place: TensorDevice, x: Any, low: float = 0.0, high: float = 1.0, *, generator: Any = None, out: DeviceTensor
) -> Any:
    if not x.dtype.is_floating_point or not low <= high:
        return NotImplemented  # torch's error
    drawn, steps = "uniform(i, n0, n1)", {torch.float16: 2048.0, torch.bfloat16: 256.0}.get(x.dtype)
    if steps:  # as many bits as the dtype has, or values near 1 are rounded to it
        drawn = f"floor({drawn} * {steps}) / {steps}"
    return elementwise(
        place, f"{{0}} + {{1}} * ({drawn})", (low, high - low), x.dtype, out=x, integers=_seed(generator)
    )


@register("normal_")
def _normal(
    place: TensorDevice, x: Any, mean: float = 0.0, std: float = 1.0, *, generator: Any = None, out: DeviceTensor
) -> Any:
    if not x.dtype.is_floating_point or not std >= 0:
        return NotImplemented  # torch's error
    return elementwise(place, "{0} + {1} * normal(i, n0, n1)", (mean, std), x.dtype, out=x, integers=_seed(generator))


@register("bernoulli_.float")
def _bernoulli(place: TensorDevice, x: Any, p: float = 0.5, *, generator: Any = None, out: DeviceTensor) -> Any:
    if not 0 <= p <= 1:
        return NotImplemented  # torch's error
    template, compute = "select(0, 1, uniform(i, n0, n1) < {0})", torch.float32
    return elementwise(place, template, (p,), x.dtype, compute=compute, out=x, integers=_seed(generator))


@register("bernoulli.default")
def _bernoulli_of(place: TensorDevice, p: Any, *, generator: Any = None) -> Any:
    template = "select(0, 1, uniform(i, n0, n1) < {0})"
    return elementwise(place, template, (p,), p.dtype, integers=_seed(generator))


def _drawn_like(
    place: TensorDevice, x: Any, *, dtype: Any = None, draw: Callable[..., Any] = _uniform, **_: Any
) -> Any:
    out = _filled(place, x.shape, dtype or x.dtype, None)
    return out if out is NotImplemented else draw(place, out, out=out)


register("rand_like.default")(_drawn_like)
register("randn_like.default")(partial(_drawn_like, draw=_normal))


@register("native_dropout")
def _dropout(place: TensorDevice, x: Any, p: float, train: bool | None) -> Any:
    if not 0 <= p <= 1:
        return NotImplemented  # torch's error
    if train is False or p == 0:
        return place.contiguous(x), _filled(place, x.shape, torch.bool, 1)
    template = "uniform(i, n0, n1) >= {0}"
    mask = _filled(place, x.shape, torch.bool, None)
    elementwise(place, template, (p,), torch.bool, compute=torch.float32, out=mask, integers=_seed(None))
    return elementwise(place, "select(0, {0} * {2}, {1} != 0)", (x, mask, 1 / (1 - p) if p < 1 else 0.0), x.dtype), mask


expression("native_dropout_backward", "{0} * {1} * {2}")


_INDICES = (torch.int32, torch.int64)


def _along(index: DeviceTensor, dim: int, size: Sequence[int]) -> DeviceTensor:
    """Return a vector of indices as a view of a shape, the same at each place of the other dimensions."""
    step = index.stride(0) if index.dim() else 1
    return strided(index, size, [step if at == dim else 0 for at in range(len(size))])


def _gathered(place: TensorDevice, size: Sequence[int], x: DeviceTensor, dim: int, index: DeviceTensor) -> DeviceTensor:
    out = place.empty(size, x.dtype)
    if out.numel():
        if not x.shape[dim]:
            raise IndexError(f"indices for dimension {dim}, which is empty in {tuple(x.shape)}")
        place.gather(out, x, dim, index)
    return out


@register("index_select.default")
def _index_select(place: TensorDevice, x: Any, dim: int, index: Any) -> Any:
    dim = dim_of(dim, x.dim())
    if not x.dim() or index.dim() > 1 or index.dtype not in _INDICES:
        return NotImplemented  # torch's error
    index = vector(place, index)
    size = [*x.shape[:dim], index.numel(), *x.shape[dim + 1 :]]
    return _gathered(place, size, x, dim, _along(index, dim, size))


@register("embedding.default")
def _embedding(
    place: TensorDevice, weight: Any, index: Any, padding_idx: int = -1, scale_grad: bool = False, sparse: bool = False
) -> Any:
    if weight.dim() != 2 or index.dtype not in _INDICES:
        return NotImplemented  # torch's error
    shape = (*index.shape, weight.shape[1])
    out = _index_select(place, operand(place, weight), 0, vector(place, index))
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    return strided(out, shape, strides)


@register("embedding_dense_backward.default")
def _embedding_backward(
    place: TensorDevice, dy: Any, index: Any, rows: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    width = dy.shape[-1]
    if scale_grad_by_freq or dy.numel() != index.numel() * width:
        return NotImplemented
    index, dy = vector(place, index), operand(place, dy)
    dweight = elementwise(place, "{0}", (0,), dy.dtype, out=place.empty((rows, width), dy.dtype))
    flat = dy if dy.is_contiguous() else place.contiguous(dy)
    flat = strided(flat, (index.numel(), width), (width, 1))
    if padding_idx >= 0:
        index = elementwise(place, "select({0}, {2}, {0} == {1})", (index, padding_idx, rows), index.dtype)
    if flat.numel():
        place.scatter(dweight, 0, _along(index, 0, flat.shape), flat, add=True, check=False)  # checked forward
    return dweight


@register("gather.default")
def _gather(place: TensorDevice, x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if not fits(aten.gather.default, x, dim, index) or not x.dim() or not index.dim():
        return NotImplemented
    return _gathered(place, index.shape, operand(place, x), dim_of(dim, x.dim()), on_device(place, index))


def _scattered(place: TensorDevice, out: DeviceTensor, dim: int, index: Any, source: Any, add: bool) -> Any:
    func = aten.scatter_add.default if add else aten.scatter.src if isinstance(source, Tensor) else aten.scatter.value
    if not fits(func, out, dim, index, source) or not out.dim() or not index.dim():
        return NotImplemented
    index, source = on_device(place, index), operand(place, source)
    if isinstance(source, DeviceTensor):
        source = strided(source, index.shape, source.stride())
    else:
        source = elementwise(place, "{0}", (source,), out.dtype, out=place.empty(index.shape, out.dtype))
    if index.numel():
        place.scatter(out, dim_of(dim, out.dim()), index, source, add=add)
    return out


def _scatters(names: Sequence[str], *, add: bool) -> None:
    def run(place: TensorDevice, x: Any, dim: int, index: Any, source: Any, *, out: DeviceTensor | None = None) -> Any:
        return _scattered(place, place.contiguous(x) if out is None else out, dim, index, source, add)

    register(*names)(run)


_scatters(("scatter_.src", "scatter_.value", "scatter.src", "scatter.value"), add=False)
_scatters(("scatter_add_.default", "scatter_add.default"), add=True)


@register("index_add_.default")
def _index_add_(
    place: TensorDevice, x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1, out: DeviceTensor
) -> Any:
    dim = dim_of(dim, x.dim())
    if alpha != 1 or not x.dim() or index.dim() > 1 or index.dtype not in _INDICES or source.dtype != x.dtype:
        return NotImplemented
    if list(source.shape) != [*x.shape[:dim], index.numel(), *x.shape[dim + 1 :]]:
        return NotImplemented  # torch's error
    return _scattered(place, x, dim, _along(vector(place, index), dim, source.shape), source, add=True)


@register("index_add.default")
def _index_add(place: TensorDevice, x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    copied = place.contiguous(x)
    return _index_add_(place, copied, dim, index, source, alpha=alpha, out=copied)


# --- gradients of views ----------------------------------------------------------------------------------------------
def _view_backward(view: str) -> Callable[..., Any]:
    """Return the gradient of a view: zeros, with the gradient of the view written to it."""

    def run(place: TensorDevice, dy: Any, size: Sequence[int], *args: Any) -> Any:
        dx = dy.new_zeros(size)
        getattr(aten, view)(dx, *args).copy_(dy)
        return dx

    return run


for _view in ("select", "slice", "diagonal"):
    register(f"{_view}_backward.default")(_view_backward(_view))


# --- x[i, j] ---------------------------------------------------------------------------------------------------------
def _linear(place: TensorDevice, x: DeviceTensor, indices: Sequence[Any]) -> tuple[DeviceTensor, list[int], int] | None:
    """Return adjacent index tensors as one of a flattened dimension, the result's shape and the dimension; or None."""
    at = [dim for dim, index in enumerate(indices) if index is not None]
    if not at or at[-1] - at[0] + 1 != len(at) or any(indices[dim].dtype not in _INDICES for dim in at):
        return None
    if at[-1] >= x.dim():
        raise IndexError(f"too many indices for tensor of dimension {x.dim()} (got {len(indices)})")
    linear: Any = None
    count = 1
    for dim in at:
        index, size = on_device(place, indices[dim]), x.shape[dim]
        wrapped = elementwise(place, "select({0}, {0} + {1}, {0} < 0 && {0} >= -{1})", (index, size), torch.int64)
        if linear is not None:
            template = "select({0} * {1} + {2}, {4}, {0} < 0 || {0} >= {3} || {2} < 0 || {2} >= {1})"
            wrapped = elementwise(place, template, (linear, size, wrapped, count, SEVERAL), torch.int64)
        linear, count = wrapped, count * size
    return linear, [*x.shape[: at[0]], *linear.shape, *x.shape[at[-1] + 1 :]], at[0]


def _merged(x: DeviceTensor, dim: int, count: int) -> DeviceTensor | None:
    """Return a view with `count` dimensions from `dim` on merged; None where the strides do not allow it."""
    for at in range(dim, dim + count - 1):
        if x.stride(at) != x.stride(at + 1) * x.shape[at + 1]:
            return None
    size = [*x.shape[:dim], math.prod(x.shape[dim : dim + count]), *x.shape[dim + count :]]
    return strided(x, size, [*x.stride()[:dim], x.stride(dim + count - 1), *x.stride()[dim + count :]])


@register("index.Tensor")
def _index(place: TensorDevice, x: Any, indices: Sequence[Any]) -> Any:
    x = operand(place, x)
    if (found := _linear(place, x, indices)) is None:
        return NotImplemented
    linear, shape, dim = found
    count = sum(index is not None for index in indices)
    if (merged := _merged(x, dim, count)) is None:
        merged = _merged(place.contiguous(x), dim, count)
    out = _index_select(place, merged, dim, vector(place, linear))
    return out if out is NotImplemented else strided(out, shape, place.empty(shape, torch.bool).stride())


@register("index_put_.default", "_index_put_impl_.default")
def _index_put_(
    place: TensorDevice, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, unsafe: bool = False,
    *, out: DeviceTensor | None = None,
) -> Any:  # fmt: skip
    if (found := _linear(place, x, indices)) is None or values.dtype != x.dtype:
        return NotImplemented
    linear, shape, dim = found
    count = sum(index is not None for index in indices)
    if (merged := _merged(x, dim, count)) is None:
        return NotImplemented
    source = elementwise(place, "{0}", (values,), x.dtype, out=place.empty(shape, x.dtype))
    flat = [*shape[:dim], linear.numel(), *x.shape[dim + count :]]
    source = strided(source, flat, place.empty(flat, torch.bool).stride())
    if source.numel():
        place.scatter(merged, dim, _along(vector(place, linear), dim, flat), source, add=accumulate)
    return x


@register("index_put.default", "_unsafe_index_put.default")
def _index_put(place: TensorDevice, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    return _index_put_(place, place.contiguous(x), indices, values, accumulate)
