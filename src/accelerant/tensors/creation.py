"""Aten operations that create tensors: copies, constants, joins of tensors and random values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelerant.tensors.dispatch import TABLE, aten, register
from accelerant.tensors.table import dim_of, elementwise, expression, on_device, operand, representable, strided
from accelerant.tensors.tensor import DeviceTensor, TensorDevice


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
    parts = [x for x in tensors if not (x.dim() == 1 and not x.numel())]
    if not parts:
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
