"""The norms by torch's functions: for devices without our kernels, float64, and derivatives of derivatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def torch_forward(
    centre: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, statistics: bool = True,
    residual: Tensor | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Normalize as launch_forward does; statistics may be returned unasked, where torch computes them anyway.

    Without them, everything that runs on a CPU is torch's own and differentiable, as it is on a GPU for one dtype.
    """
    same = dtype in (None, x.dtype) and x.is_cuda and {x.dtype}.issuperset(_dtypes(weight, bias, residual))
    if not statistics and (x.is_cpu or (same and (centre or bias is None))):
        s = x if residual is None else x + residual
        if not x.is_cpu:
            y = (
                torch.layer_norm(s, s.shape[-1:], weight, bias, eps)
                if centre
                else torch.rms_norm(s, s.shape[-1:], weight, eps)
            )
        elif centre and x.dtype in (torch.float16, torch.bfloat16):
            _, inner, w, b = _widened(s, centre, weight, bias)
            y = torch.layer_norm(inner, x.shape[-1:], w, b, eps)
        else:
            y = torch_composite(centre, s, weight, bias, eps)
        y = y if y.is_contiguous() else y.contiguous()
        return (y,) if residual is None else (y, s.contiguous())
    dtype = x.dtype if dtype is None else dtype
    if residual is not None:
        x = x + residual
    wide, inner, weight, bias = _widened(x, centre, weight, bias)
    if centre:
        y, mean, rstd = torch.native_layer_norm(inner, x.shape[-1:], weight, bias, eps)
        kept = torch.stack((mean.reshape(-1), rstd.reshape(-1)), 1)
    else:
        y, rstd = torch.ops.aten._fused_rms_norm(inner, x.shape[-1:], weight, eps)
        kept = rstd.reshape(-1, 1)
        if bias is not None:
            y = y + bias
    y = y.to(dtype).contiguous()
    kept = kept.to(wide)
    return (y, kept) if residual is None else (y, x.contiguous(), kept)


def torch_backward(
    centre: bool, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, eps: float,
    needs: Sequence[bool], ds: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute the gradients as launch_backward does."""
    wants_weight, wants_bias = needs[1] and weight is not None, needs[2] and bias is not None
    dtypes = (None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x_wide, dy_wide = x.to(wide), dy.to(wide)
    shape = (*x.shape[:-1], 1)
    columns = statistics.t().contiguous()  # torch's backward pass takes them for dense
    rstd = columns[-1].reshape(shape)
    mean = columns[0].reshape(shape) if centre else torch.zeros_like(rstd)
    # torch returns dbias only together with dweight, and neither without a weight.
    scale = torch.ones(x.shape[-1:], dtype=wide, device=x.device) if weight is None and wants_bias else weight
    scale = None if scale is None else scale.to(wide)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy_wide, x_wide, x.shape[-1:], mean, rstd, scale, scale, [True, wants_weight or wants_bias, wants_bias]
    )
    if not centre:  # with a mean of 0 its dx lacks rstd mean(dy w), which it took for the gradient through the mean
        N = max(x.shape[-1], 1)
        g = dy_wide.mean(-1) if scale is None else torch.matmul(dy_wide, scale).div_(N)
        dx = dx.addcmul_(g.unsqueeze(-1), rstd)
    if ds is not None:
        dx = dx.add_(ds)
    return (
        dx.to(x.dtype).contiguous(),
        dweight.to(dtypes[0]) if wants_weight else None,
        dbias.to(dtypes[1]) if wants_bias else None,
    )


def _dtypes(*tensors: Tensor | None) -> set[torch.dtype]:
    return {x.dtype for x in tensors if x is not None}


def torch_composite(centre: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return y, differentiable in every way that torch supports; computed wide and rounded once."""
    dtype = x.dtype
    if _uniform(x, weight, bias):  # four calls of `to` without effect cost as much as a small layer_norm
        if centre:
            return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)
        y = torch.rms_norm(x, x.shape[-1:], weight, eps)
        return y if bias is None else y + bias
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = x.to(wide)
    weight, bias = None if weight is None else weight.to(wide), None if bias is None else bias.to(wide)
    if centre:
        return torch.layer_norm(x, x.shape[-1:], weight, bias, eps).to(dtype)
    y = torch.rms_norm(x, x.shape[-1:], weight, eps)
    return (y if bias is None else y + bias).to(dtype)


def _uniform(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether all tensors have the dtype to compute in."""
    dtype = x.dtype
    return (
        dtype in (torch.float32, torch.float64)
        and (weight is None or weight.dtype == dtype)
        and (bias is None or bias.dtype == dtype)
    )


def _widened(
    x: Tensor, centre: bool, weight: Tensor | None, bias: Tensor | None
) -> tuple[torch.dtype, Tensor, Tensor | None, Tensor | None]:
    """Return the dtype to compute in, and x and the vectors as torch computes in it.

    On a CPU, layer_norm of low precision keeps float32 statistics if the weight is float32: x need not be widened.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    mixed = centre and x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16)
    if mixed and weight is None:
        weight = torch.ones(x.shape[-1:], dtype=wide)
    inner = x if mixed else x.to(wide)
    return wide, inner, None if weight is None else weight.to(wide), None if bias is None else bias.to(wide)
