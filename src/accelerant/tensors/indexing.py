"""Aten operations that read or write elements at indices, on the kernels `gather` and `scatter` of TensorDevices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accelerant.tensors.dispatch import aten, register
from accelerant.tensors.table import dim_of, elementwise, fits, on_device, operand, strided, vector
from accelerant.tensors.tensor import SEVERAL, DeviceTensor, TensorDevice

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
    found = _linear(place, x, indices)
    if found is None:
        return NotImplemented
    linear, shape, dim = found
    count = sum(index is not None for index in indices)
    merged = _merged(x, dim, count)
    if merged is None:
        merged = _merged(place.contiguous(x), dim, count)
    out = _index_select(place, merged, dim, vector(place, linear))
    return out if out is NotImplemented else strided(out, shape, place.empty(shape, torch.bool).stride())


@register("index_put_.default", "_index_put_impl_.default")
def _index_put_(
    place: TensorDevice, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, unsafe: bool = False,
    *, out: DeviceTensor | None = None,
) -> Any:  # fmt: skip
    found = _linear(place, x, indices)
    if found is None or values.dtype != x.dtype:
        return NotImplemented
    linear, shape, dim = found
    count = sum(index is not None for index in indices)
    merged = _merged(x, dim, count)
    if merged is None:
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
