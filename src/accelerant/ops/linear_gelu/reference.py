"""The mathematics of linear_gelu, in whatever dtype comes; the oracle of its tests in float64."""

from __future__ import annotations

from torch import Tensor

from accelerant.ops.gelu.reference import gelu_reference

__all__ = ["linear_gelu_reference"]


def linear_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """The product, the bias, then gelu."""
    z = x @ weight.T
    return gelu_reference(z if bias is None else z + bias, approximate)
