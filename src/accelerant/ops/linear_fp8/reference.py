"""Reference of linear_fp8's steps in plain PyTorch, on any device, with real conversions to e4m3."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_MAX_E4M3 = 448.0
_TINY = 2.0**-100


def rows_reference(x: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return q (M, N) = e4m3(x f / s), and s (M,) float32, the least powers of two that fit the rows of x (M, N).

    Source: Micikevicius et al. 2022, arXiv:2209.05433, section 3.
    """
    x = x.float() if factor is None else x.float() * factor
    peak = x.abs().amax(1) if x.shape[1] else x.new_zeros(x.shape[0])
    mantissa, exponent = torch.frexp(peak.clamp(min=_TINY))  # peak = mantissa 2^exponent, 448 = 0.875 * 2^9
    scale = torch.ldexp(torch.ones_like(peak), exponent - 9 + (mantissa > _MAX_E4M3 / 512).int())
    scale = torch.where(peak.isfinite(), scale, torch.nan)
    return (x / scale[:, None]).to(torch.float8_e4m3fn), scale


def gelu_reference(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows_reference of gelu(z), by the tanh approximation."""
    return rows_reference(functional.gelu(z.float(), approximate="tanh"))


def dgelu_reference(da: Tensor, z: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dz and gelu(z) in z's dtype, q and s of dz f, and the sums of dz's columns as (1, N) float32."""
    dz = torch.ops.aten.gelu_backward(da.float(), z.float(), approximate="tanh")
    a = functional.gelu(z.float(), approximate="tanh")
    q, scale = rows_reference(dz, factor)
    return dz.to(z.dtype), a.to(z.dtype), q, scale, dz.sum(0, keepdim=True)


def product_reference(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product of x (M, K) and weight (N, K), e4m3 with row scales, plus bias: (M, N) in a dtype."""
    y = (x.float() * x_scale[:, None]) @ weight.float().t()
    y = y if weight_scale is None else y * weight_scale
    return (y if bias is None else y + bias.float()).to(dtype)
