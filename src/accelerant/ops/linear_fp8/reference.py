"""linear_fp8's pieces in plain PyTorch, on any device: numbers go to e4m3 and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["dgelu_reference", "gelu_reference", "product_reference", "rows_reference"]

_LARGEST = 448.0
_TINY = 2.0**-100


def rows_reference(x: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find q (M, N) = e4m3(x f / s), and s (M,) in float32, of x (M, N): the least powers of two that hold the rows.

    Source: Micikevicius et al. 2022, arXiv:2209.05433, section 3.
    """
    x = x.float() if factor is None else x.float() * factor
    peak = x.abs().amax(1) if x.shape[1] else x.new_zeros(x.shape[0])
    mantissa, exponent = torch.frexp(peak.clamp(min=_TINY))  # peak = mantissa 2^exponent, 448 = 0.875 * 2^9
    scale = torch.ldexp(torch.ones_like(peak), exponent - 9 + (mantissa > _LARGEST / 512).int())
    scale = torch.where(peak.isfinite(), scale, torch.nan)
    return (x / scale[:, None]).to(torch.float8_e4m3fn), scale


def gelu_reference(z: Tensor) -> tuple[Tensor, Tensor]:
    """The same of gelu(z), by the tanh approximation."""
    return rows_reference(functional.gelu(z.float(), approximate="tanh"))


def dgelu_reference(da: Tensor, z: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Find dz and gelu(z) in z's dtype, q and s of dz f, and the sums of dz's columns as (1, N) in float32."""
    dz = torch.ops.aten.gelu_backward(da.float(), z.float(), approximate="tanh")
    a = functional.gelu(z.float(), approximate="tanh")
    q, scale = rows_reference(dz, factor)
    return dz.to(z.dtype), a.to(z.dtype), q, scale, dz.sum(0, keepdim=True)


def product_reference(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply x (M, K) and weight (N, K), both in e4m3, rows by their scales, and add bias: (M, N) in a dtype."""
    y = (x.float() * x_scale[:, None]) @ weight.float().t()
    y = y if weight_scale is None else y * weight_scale
    return (y if bias is None else y + bias.float()).to(dtype)
