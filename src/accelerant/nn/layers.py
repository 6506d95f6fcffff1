"""The layers a transformer is made of, each over Accelerant's ops.

Every layer takes `(..., width)` and keeps the leading dimensions. Under `torch.autocast` the layers take and give
the autocast dtype, so the residual stream travels in the low precision too; parameters and their gradients keep
the master dtype, and norms accumulate in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.nn._precision import float8_of, lowered
from accelerant.ops._library import autocast_dtype, is_ordinary, is_plain
from accelerant.ops._per_example import is_traced
from accelerant.ops.linear_fp8.op import Float8Weight
from accelerant.ops.transformer.block import BlockShape, fused_attention, fused_block, fused_linear, fused_mlp

__all__ = ["MLP", "LayerNorm", "Linear", "MultiHeadAttention", "TransformerBlock"]


FUSED = {"cuda"}
"""Types of device where a layer runs as one function; elsewhere torch's own functions serve as well."""


def _require_width(x: Tensor, width: int, layer: str) -> None:
    if x.dim() == 0 or x.shape[-1] != width:
        raise ShapeError(f"{layer} takes (..., {width}), got {tuple(x.shape)}")


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype to compute in for x: the autocast dtype of its device where autocast is on, else x's own."""
    low = autocast_dtype(x.device.type) if x.is_floating_point() else None
    return x.dtype if low is None else low


def fuses(x: Tensor, dtype: torch.dtype, *layers: nn.Module) -> bool:
    """Whether layers may run as one function with both passes written out.

    That is on a GPU, for plain tensors, in the parameters' dtype or from float32 down; and for layers as they are
    defined here: a hook, a subclass or a parametrization has something to say at each layer.
    """
    if torch.compiler.is_compiling() or x.device.type not in FUSED or not is_plain(x) or x.numel() == 0:
        return False
    for layer in layers:
        if type(layer) not in (Linear, LayerNorm) or has_hooks(layer, feeds_sinks=True):
            return False
        for parameter in layer._parameters.values():
            if parameter is None:
                continue
            if not is_ordinary(parameter) or (parameter.dtype not in (dtype, torch.float32)):
                return False
    return True


def has_hooks(module: nn.Module, *, feeds_sinks: bool = False) -> bool:
    """Whether calling a module does something besides its class's forward.

    A sink of its parameters (accelerant.ops._per_example) counts, unless what is run instead feeds sinks too: it has a
    forward and a hook in the module.
    """
    everywhere = torch.nn.modules.module
    traced = feeds_sinks and is_traced(module)
    return bool(
        module._forward_hooks
        or len(module._forward_pre_hooks) > traced
        or module._backward_hooks
        or module._backward_pre_hooks
        or everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
        or ("forward" in module.__dict__ and not traced)  # as gradient checkpointing puts it there
        or module._compiled_call_impl is not None
    )


def _pair(layer: Any) -> tuple[Tensor, Tensor | None]:
    return layer.weight, layer.bias


def _low_pair(layer: Any, dtype: torch.dtype) -> tuple[Tensor | Float8Weight, Tensor | None]:
    """Weight and bias as products take them."""
    low: Tensor | Float8Weight | None = float8_of(layer.weight) if dtype == torch.bfloat16 else None
    if low is None:
        low = lowered(layer.weight, dtype)
    return low, None if layer.bias is None else lowered(layer.bias, dtype)


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
            UnsupportedCase: its weight is wanted in fp8 where it cannot be.
        """
        _require_width(x, self.in_features, "Linear")
        dtype = compute_dtype(x)
        if fuses(x, dtype, self):
            return fused_linear(x.to(dtype), *_pair(self), *_low_pair(self, dtype))
        if float8_of(self.weight) is not None and x.numel():
            raise UnsupportedCase(
                f"precision fp8 needs layers as functions of ours; {self} runs as torch's, under torch.compile, for a "
                "subclass of Tensor or on another device: take bfloat16"
            )
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
        dtype = compute_dtype(x)
        if fuses(x, dtype, self.up, self.down):
            _require_width(x, self.up.in_features, "MLP")
            params = (*_pair(self.up), *_pair(self.down))
            return fused_mlp(x.to(dtype), *params, *_low_pair(self.up, dtype), *_low_pair(self.down, dtype))
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
        y: Tensor
        heads: Tensor = self.qkv(x).view(batch, time, 3, self.heads, self.width // self.heads)
        if fuses(heads, heads.dtype):
            y = self.projection(fused_attention(heads))
            return y
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.projection(mixed.transpose(1, 2).reshape(batch, time, self.width))
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
        if self.fuses(x):
            branch, residual = self.split(x)
            return branch + residual
        x = x + self.attention(self.norm_1(x))
        y: Tensor = x + self.mlp(self.norm_2(x))
        return y

    def fuses(self, x: Tensor) -> bool:
        """Whether `split` serves x: on a GPU, while the layers inside are as this class makes them."""
        if torch.compiler.is_compiling():
            return False
        inner = (self.attention, self.mlp)
        if type(self.attention) is not MultiHeadAttention or type(self.mlp) is not MLP or any(map(has_hooks, inner)):
            return False
        return x.dim() == 3 and x.shape[-1] == self.attention.width and fuses(x, compute_dtype(x), *self._layers())

    def split(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The block on x + residual, its last sum left to whoever reads it: a norm adds and normalises in one pass.

        Args:
            x: (B, T, width), for which `fuses` holds.
            residual: shape of x; None for zeros.

        Returns:
            what the MLP adds, and what it is to be added to.
        """
        dtype = compute_dtype(x)
        layers = self._layers()
        params = [each for layer in layers for each in _pair(layer)]
        lows = [each for layer in layers if isinstance(layer, Linear) for each in _low_pair(layer, dtype)]
        shape = BlockShape(self.attention.heads, (self.norm_1.eps, self.norm_2.eps))
        residual = None if residual is None else residual.to(dtype)
        return fused_block(x.to(dtype), residual, shape, *params, *lows)

    def _layers(self) -> tuple[nn.Module, ...]:
        """In the order in which Block takes their parameters."""
        attention, mlp = self.attention, self.mlp
        return self.norm_1, attention.qkv, attention.projection, self.norm_2, mlp.up, mlp.down
