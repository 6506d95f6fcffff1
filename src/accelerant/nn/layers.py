"""The layers a transformer is made of, each over Accelerant's ops.

Every layer takes `(..., width)` and keeps the leading dimensions. Under `torch.autocast` the layers take and give
the autocast dtype, so the residual stream travels in the low precision too; parameters and their gradients keep
the master dtype, and norms accumulate in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError
from accelerant.ops._library import autocast_dtype

__all__ = ["MLP", "LayerNorm", "Linear", "MultiHeadAttention", "TransformerBlock"]


def _require_width(x: Tensor, width: int, layer: str) -> None:
    if x.dim() == 0 or x.shape[-1] != width:
        raise ShapeError(f"{layer} takes (..., {width}), got {tuple(x.shape)}")


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype to compute in for x: the autocast dtype of its device where autocast is on, else x's own."""
    low = autocast_dtype(x.device.type) if x.is_floating_point() else None
    return x.dtype if low is None else low


class Linear(nn.Module):
    """y = x @ weight^T + bias.

    Attributes:
        weight: (out_features, in_features), drawn from N(0, 0.02).
        bias: (out_features,), zero at first, or None.
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ConfigError(f"Linear needs at least one input and output, got {in_features} and {out_features}")
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw the weight from N(0, std) with torch's global generator and clear the bias."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to the last dimension.

        Args:
            x: (..., in_features).

        Returns:
            (..., out_features), in x's dtype or the autocast dtype.

        Raises:
            ShapeError: the last dimension is not in_features.
        """
        _require_width(x, self.in_features, "Linear")
        dtype = compute_dtype(x)
        rows = x.to(dtype).reshape(-1, self.in_features)
        y = ops.matmul(rows, self.weight.to(dtype).t())
        if self.bias is not None:
            y = y + self.bias.to(dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class LayerNorm(nn.Module):
    """Centre each row, scale it to unit variance, then scale by `weight` and shift by `bias`.

    Attributes:
        weight: (width,), one at first.
        bias: (width,), zero at first, or None.
    """

    bias: nn.Parameter | None

    def __init__(self, width: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension.

        Args:
            x: (..., width).

        Returns:
            The shape of x, in x's dtype or the autocast dtype; sums accumulate in float32.

        Raises:
            ShapeError: the last dimension is not width.
        """
        _require_width(x, self.width, "LayerNorm")
        return ops.layer_norm(x.to(compute_dtype(x)), self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"{self.width}, eps={self.eps}, bias={self.bias is not None}"


class MLP(nn.Module):
    """Two linear maps with a tanh-approximated GELU between: down(gelu(up(x)))."""

    def __init__(self, width: int, hidden: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        self.up = Linear(width, 4 * width if hidden is None else hidden, bias=bias)
        self.down = Linear(self.up.out_features, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to (..., width)."""
        y: Tensor = self.down(ops.gelu(self.up(x), approximate="tanh"))
        return y


class MultiHeadAttention(nn.Module):
    """Causal self-attention: each position reads itself and what stands before it.

    softmax(q k^T / sqrt(width / heads)) v in each head, then a projection back to width.
    """

    def __init__(self, width: int, heads: int, *, bias: bool = True) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ConfigError(f"width must be a multiple of heads, got width {width} and {heads} heads")
        self.width = width
        self.heads = heads
        self.qkv = Linear(width, 3 * width, bias=bias)
        self.projection = Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Attend along the second dimension.

        Args:
            x: (B, T, width).

        Returns:
            (B, T, width).

        Raises:
            ShapeError: x is not (B, T, width).
        """
        if x.dim() != 3:
            raise ShapeError(f"MultiHeadAttention takes (batch, time, {self.width}), got {tuple(x.shape)}")
        batch, time, _ = x.shape
        heads: Tensor = self.qkv(x).view(batch, time, 3, self.heads, self.width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, time, self.width))
        return y


class TransformerBlock(nn.Module):
    """The pre-norm block of GPT-2: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, *, bias: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm_1 = LayerNorm(width, eps=eps, bias=bias)
        self.attention = MultiHeadAttention(width, heads, bias=bias)
        self.norm_2 = LayerNorm(width, eps=eps, bias=bias)
        self.mlp = MLP(width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to (B, T, width)."""
        x = x + self.attention(self.norm_1(x))
        y: Tensor = x + self.mlp(self.norm_2(x))
        return y
