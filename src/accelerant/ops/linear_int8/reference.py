"""Reference of linear_int8 in plain PyTorch, in the dtype of its inputs; the tests' oracle in float64."""

from __future__ import annotations

from torch import Tensor

from accelerant.ops.quantize_int8.op import quantize_int8_reference

__all__ = ["linear_int8_reference"]


def linear_int8_reference(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, dynamic: bool = False
) -> Tensor:
    """Return x times the scaled weight, plus bias; dynamic rounds x to integers with row scales first."""
    if dynamic:
        q, x_scale = quantize_int8_reference(x.detach())
        rounded = q * x_scale.unsqueeze(-1)
        x = x + (rounded - x).detach() if x.requires_grad else rounded
    y = x @ (weight.to(scale.dtype) * scale[:, None]).to(x.dtype).T
    return y if bias is None else y + bias
