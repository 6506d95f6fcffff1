"""Norms beside LayerNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import ConfigError
from accelerant.nn.layers import _require_width, compute_dtype

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Scale each row to unit root mean square, then by `weight`; see accelerant.ops.rms_norm.

    Attributes:
        weight: (width,), one at first.
    """

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        if width < 1:
            raise ConfigError(f"RMSNorm needs a width of at least 1, got {width}")
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension.

        Args:
            x: (..., width).

        Returns:
            The shape of x, in x's dtype or the autocast dtype; sums accumulate in float32.

        Raises:
            ShapeError: the last dimension is not width.
        """
        _require_width(x, self.width, "RMSNorm")
        return ops.rms_norm(x.to(compute_dtype(x)), self.weight, eps=self.eps)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"{self.width}, eps={self.eps}"
