"""quantize_int8: the public function, its implementations, and the registration with torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from accelerant.errors import ShapeError
from accelerant.ops._launch import triton_operation
from accelerant.ops._library import below_autograd, define, is_plain
from accelerant.ops._refusals import check_dtype
from accelerant.ops.quantize_int8.launch import launch
from accelerant.runtime.dispatch import Case, Cost

__all__ = ["quantize_int8", "quantize_rows"]


def quantize_int8(x: Tensor, *, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Round x to 8-bit integers, symmetric about 0, with a scale for each row along a dimension.

    scale = max(|x|) / 127    q = round(x / scale), halves to even, in [-127, 127]    x is about q scale

    Args:
        x: any shape, float16, bfloat16, float32 or float64; fastest along a contiguous last dimension.
        dim: the dimension whose elements share a scale; negative counts from the end.

    Returns:
        q, int8, shape of x, contiguous; and scale, float32, the shape of x without `dim`. Computed in float32, to which
        float64 is rounded first. The scale of a row of zeros (or empty, or with all magnitudes below 127 * 2^-150) is
        1, so that division by it is always defined. A row with an infinity or a NaN has that as its scale and zeros
        for q, so that q scale is NaN there and nowhere else. Not differentiable.

    Raises:
        ShapeError: x has no such dimension.
        UnsupportedDtype: a dtype not listed above.
        TypeError: x is not a tensor.

    Source: Jacob et al. 2018, arXiv:1712.05877, section 2.
    """
    check_dtype("quantize_int8", x)
    dims = x.dim() or 1  # a scalar counts as one element along dimension 0
    if not -dims <= dim < dims:
        raise ShapeError(f"dim must be in [{-dims}, {dims - 1}] for x of shape {tuple(x.shape)}, got {dim}")
    if x.dim() == 0:
        q, scale = quantize_int8(x.reshape(1), dim=0)
        return q.reshape(()), scale
    run = quantize_rows if not torch.compiler.is_compiling() and is_plain(x) else _op
    q, scale = run(x, dim % dims)
    return q, scale


def torch_quantize(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return quantize_int8 by torch's functions; dim counts from 0."""
    with torch.no_grad():
        if not x.shape[dim]:
            return x.new_empty(x.shape, dtype=torch.int8), x.new_ones(_without(x, dim), dtype=torch.float32)
        wide = x.detach().float().contiguous()
        peak = torch.maximum(wide.amax(dim, keepdim=True), -wide.amin(dim, keepdim=True))  # faster than of |x|
        scale = peak / wide.new_full((), 127.0)  # with a Python number torch multiplies by the reciprocal on CUDA
        scale = torch.where(scale == 0, 1.0, scale)
        steps = (wide / scale).round_()
        if not _needs_no_clamp(scale):
            steps = steps.clamp(-127, 127).nan_to_num_(nan=0.0)
        return steps.to(torch.int8), scale.squeeze(dim)


def _needs_no_clamp(scale: Tensor) -> bool:
    """Return whether all scales are known to be normal and finite, which is checked only where that is cheap."""
    if scale.device.type != "cpu" or torch.compiler.is_compiling() or not is_plain(scale) or not scale.numel():
        return False
    low, high = torch.aminmax(scale)
    return bool(low >= torch.finfo(torch.float32).tiny) and bool(high < torch.inf)


def _without(x: Tensor, dim: int) -> list[int]:
    return [size for i, size in enumerate(x.shape) if i != dim]


def _cost(case: Case) -> Cost:
    n = math.prod(case.shape)
    return Cost((case.dtype.itemsize + 1) * n, 4 * n)


_fwd = triton_operation("quantize_int8_fwd", launch, torch_quantize, cost=_cost)


def quantize_rows(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return quantize_int8 of a plain tensor with at least one dimension, without checks; dim counts from 0."""
    case = Case(x.device, x.dtype, x.shape, () if dim == x.dim() - 1 else (f"dim {dim}",))
    results: tuple[Tensor, Tensor] = _fwd(case, x, dim)
    return results


def _past_autograd(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    with below_autograd():
        results: tuple[Tensor, Tensor] = _op(x, dim)
    return results


def _fake(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(_without(x, dim), dtype=torch.float32)


_op = define(
    "quantize_int8(Tensor x, int dim) -> (Tensor q, Tensor scale)",
    kernel=quantize_rows,
    fake=_fake,
    differentiable=_past_autograd,
    composite=torch_quantize,
)
