"""quantize_int8: reference, launches, the public function, its implementations, registration with torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from accelerant.ops import _launch
from accelerant.ops._launch import RowTile
from accelerant.ops._library import checked_dim, define, is_plain, with_torch_keywords
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, Cost

__all__ = ["quantize_int8"]


def quantize_int8_reference(x: Tensor, *, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Return each row divided by its scale and rounded, and the scales: by definition computed in float32."""
    if x.dim() == 0:
        q, scale = quantize_int8_reference(x.reshape(1), dim=0)
        return q.reshape(()), scale
    rows = x.float().movedim(dim, -1)
    zeros = rows.new_zeros(*rows.shape[:-1], 1)
    steps = rows.new_full((), 127.0)  # with a Python number torch multiplies by the reciprocal on CUDA
    scale = torch.cat([rows.abs(), zeros], -1).amax(-1, keepdim=True) / steps
    scale[scale == 0] = 1.0
    q = torch.round(rows / scale).clamp(-127, 127)
    q[~scale.isfinite().expand(q.shape)] = 0.0
    return q.movedim(-1, dim).contiguous().to(x.dtype), scale.squeeze(-1).to(x.dtype)


KERNELS = {
    name: TritonKernel("accelerant.ops.quantize_int8.triton_kernels", f"quantize_int8_{name}", widths=widths)
    for name, widths in {"fwd": (4, 5), "wide": (3, 4), "part": (2, 3), "join": (4, 5)}.items()
}

WIDE_FROM = 16384  # longer rows do not stay in registers

WIDE = RowTile(rows=1, block_n=4096, num_warps=8)

PLANS = {4096: tuple(RowTile(rows, 4096, warps) for rows, warps in ((1, 4), (1, 8), (1, 16), (2, 8), (2, 16)))}
"""Candidates of quantize_int8_fwd by columns."""


def launch(x: Tensor, dim: int, plan: RowTile | None = None) -> tuple[Tensor, Tensor]:
    """Return q, contiguous, and scale; dim counts from 0, x has at least one dimension."""
    last = dim == x.dim() - 1
    rows = x if last else x.movedim(dim, -1)
    N = rows.shape[-1]
    q = torch.empty(rows.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(rows.shape[:-1], dtype=torch.float32, device=x.device)
    if not (M := scale.numel()) or not N:
        scale.fill_(1.0)
        return (q if last else q.movedim(-1, dim).contiguous()), scale
    lines, stride = _launch.as_rows(rows, N)
    if plan is None and N > WIDE_FROM:
        _launch.launch_wide_rows(KERNELS, "", (lines,), (q, scale), stride, WIDE, (1, torch.int32), {}, {})
    else:
        plan = plan or _launch.quantizing_plan(N)
        args = (lines, q, scale, M, N, stride)
        KERNELS["fwd"].launch(
            (_launch.ceil_div(M, plan.rows),), args, _launch.row_constants(plan, N), num_warps=plan.num_warps
        )
    return (q if last else q.movedim(-1, dim).contiguous()), scale


@with_torch_keywords
def quantize_int8(x: Tensor, *, dim: int = -1, axis: int | None = None) -> tuple[Tensor, Tensor]:
    """Round x to 8-bit integers, symmetric about 0, with a scale for each row along a dimension.

    scale = max(|x|) / 127    q = round(x / scale), halves to even, in [-127, 127]    x is about q scale

    Args:
        x: any shape, float16, bfloat16, float32 or float64; fastest along a contiguous last dimension.
        dim: the dimension whose elements share a scale; negative counts from the end. NumPy's name `axis` is accepted
            too.

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
    dim = checked_dim("quantize_int8", x, dim, axis)
    if x.dim() == 0:
        q, scale = quantize_int8(x.reshape(1), dim=0)
        return q.reshape(()), scale
    run = quantize_rows if not torch.compiler.is_compiling() and is_plain(x) else _op
    q, scale = run(x, dim)
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


_fwd: Callable[..., tuple[Tensor, Tensor]] = _launch.triton_operation(
    "quantize_int8_fwd",
    launch,
    torch_quantize,
    cost=lambda case: Cost((case.dtype.itemsize + 1) * math.prod(case.shape), 4 * math.prod(case.shape)),
)


def quantize_rows(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return quantize_int8 of a plain tensor with at least one dimension, without checks; dim counts from 0."""
    case = Case(x.device, x.dtype, x.shape, () if dim == x.dim() - 1 else (f"dim {dim}",))
    return _fwd(case, x, dim)


_op = define(
    "quantize_int8(Tensor x, int dim) -> (Tensor q, Tensor scale)",
    kernel=quantize_rows,
    fake=lambda x, dim: (x.new_empty(x.shape, dtype=torch.int8), x.new_empty(_without(x, dim), dtype=torch.float32)),
    composite=torch_quantize,
)
