"""Reference of linear_gelu in plain PyTorch, in the dtype of its inputs; the tests' oracle in float64."""

from __future__ import annotations

from torch import Tensor

from accelerant.ops.gelu.op import gelu_reference

__all__ = ["linear_gelu_reference"]


def linear_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return gelu(x weight^T + bias)."""
    z = x @ weight.T
    return gelu_reference(z if bias is None else z + bias, approximate)
