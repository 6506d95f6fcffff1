"""The layers of a transformer on Accelerant's ops.

Every layer takes `(..., width)` and keeps the leading dimensions. Under `torch.autocast` the layers take and return
the autocast dtype, so the residual stream has the low precision too; parameters and their gradients keep the master
dtype, and norms accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.nn._precision import float8_of, lowered
from accelerant.ops._library import autocast_dtype, is_ordinary, is_plain
from accelerant.ops._per_example import is_traced
from accelerant.ops.attention.op import causal_by_torch
from accelerant.ops.linear_fp8.op import MULTIPLE, Float8Weight, refuses_device
from accelerant.ops.transformer.block import (
    BlockSpec,
    ColumnSums,
    fused_attention,
    fused_block,
    fused_linear,
    fused_mlp,
)
from accelerant.runtime.memory.live_set import only_counts

__all__ = [
    "DRAW_NOTHING", "MLP", "LayerNorm", "Linear", "MultiHeadAttention", "RMSNorm", "TransformerBlock", "compute_dtype",
    "float8_weights", "fuses", "has_hooks", "modes_kept", "require_float8", "require_width",
]  # fmt: skip

FUSED = {"cuda"}
"""Device types on which a layer runs as one autograd function; elsewhere torch's own functions are as fast."""


def require_width(x: Tensor, width: int, layer: str) -> None:
    """Raise ShapeError unless the last dimension of x is `width`."""
    if x.dim() == 0 or x.shape[-1] != width:
        raise ShapeError(f"{layer} takes (..., {width}), got {tuple(x.shape)}")


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in for x: the autocast dtype of its device if autocast is on, else x's own."""
    low = autocast_dtype(x.device.type) if x.is_floating_point() else None
    return x.dtype if low is None else low


def is_fusable(x: Tensor) -> bool:
    """Return whether layers may pass x to an autograd function: it is plain, or active modes only count memory."""
    return is_plain(x) or only_counts(x)


def fuses(x: Tensor, dtype: torch.dtype, *layers: nn.Module) -> bool:
    """Return whether layers may run as one autograd function.

    They may on a GPU, for plain tensors, in the parameters' dtype or from float32 down, and if each layer is exactly a
    class of this module: hooks, subclasses and parametrizations expect each layer to be called.
    """
    if torch.compiler.is_compiling() or x.device.type not in FUSED or not is_fusable(x) or x.numel() == 0:
        return False
    for layer in layers:
        if type(layer) not in (Linear, LayerNorm) or has_hooks(layer, feeds_sinks=True):
            return False
        for parameter in layer._parameters.values():
            if parameter is None:
                continue
            if not (is_ordinary(parameter) or only_counts(parameter)) or (
                parameter.dtype not in (dtype, torch.float32)
            ):
                return False
    return True


def has_hooks(module: nn.Module, *, feeds_sinks: bool = False) -> bool:
    """Return whether calling a module does more than its class's forward.

    The forward and the hook that a per-example sink (accelerant.ops._per_example) puts into a module count too, unless
    `feeds_sinks`: what runs in place of the call feeds the sink itself.
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
        or ("forward" in module.__dict__ and not traced)  # set there by gradient checkpointing
        or module._compiled_call_impl is not None
    )


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore each module's training mode after the block; a frozen module may have another than the model."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _pair(layer: Any) -> tuple[Tensor, Tensor | None]:
    return layer.weight, layer.bias


def _cast_pair(layer: Any, dtype: torch.dtype) -> tuple[Tensor | Float8Weight, Tensor | None]:
    """Return weight and bias in the dtype of their products."""
    weight: Tensor | Float8Weight | None = float8_of(layer.weight) if dtype == torch.bfloat16 else None
    if weight is None:
        weight = lowered(layer.weight, dtype)
    return weight, None if layer.bias is None else lowered(layer.bias, dtype)


class Linear(nn.Module):
    """y = x @ weight^T + bias.

    Attributes:
        weight: (out_features, in_features), drawn from N(0, 0.02).
        bias: (out_features,), initialised to zero, or None.
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
        """Draw the weight from N(0, std) with torch's global generator and zero the bias."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to x (..., in_features); return (..., out_features) in x's dtype or the autocast dtype.

        Raises:
            ShapeError: the last dimension is not in_features.
            UnsupportedCase: precision fp8 is requested where the layer cannot use it.
        """
        require_width(x, self.in_features, "Linear")
        dtype = compute_dtype(x)
        if fuses(x, dtype, self):
            return fused_linear(x.to(dtype), *_pair(self), *_cast_pair(self, dtype))
        if float8_of(self.weight) is not None and x.numel():
            raise UnsupportedCase(
                f"precision fp8 needs a layer that runs as an autograd function of Accelerant; {self} runs on torch's "
                "(torch.compile, a subclass of Tensor, a hook or another device): use bfloat16"
            )
        rows = x.to(dtype).reshape(-1, self.in_features)
        y = ops.matmul(rows, self.weight.to(dtype).t())
        if self.bias is not None:
            y = y + self.bias.to(dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Describe the module for `print(model)`."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class LayerNorm(nn.Module):
    """Centre each row, scale it to unit variance, then scale by `weight` and shift by `bias`.

    Attributes:
        weight: (width,), initialised to one.
        bias: (width,), initialised to zero, or None.
    """

    bias: nn.Parameter | None

    def __init__(self, width: int, eps: float = 1e-5, *, bias: bool = True) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., width), in its dtype or the autocast dtype; raise ShapeError for another width."""
        require_width(x, self.width, "LayerNorm")
        return ops.layer_norm(x.to(compute_dtype(x)), self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        """Describe the module for `print(model)`."""
        return f"{self.width}, eps={self.eps}, bias={self.bias is not None}"


class RMSNorm(nn.Module):
    """Scale each row to unit root mean square, then by `weight` (width,), initially 1; see accelerant.ops.rms_norm."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        if width < 1:
            raise ConfigError(f"RMSNorm needs a width of at least 1, got {width}")
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; arguments, result and errors as in LayerNorm."""
        require_width(x, self.width, "RMSNorm")
        return ops.rms_norm(x.to(compute_dtype(x)), self.weight, eps=self.eps)

    def extra_repr(self) -> str:
        """Describe the module for `print(model)`."""
        return f"{self.width}, eps={self.eps}"


class MLP(nn.Module):
    """Two linear maps with a tanh-approximated GELU between: down(gelu(up(x)))."""

    def __init__(self, width: int, hidden: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        self.up = Linear(width, 4 * width if hidden is None else hidden, bias=bias)
        self.down = Linear(self.up.out_features, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to the last dimension of x (..., width)."""
        dtype = compute_dtype(x)
        if fuses(x, dtype, self.up, self.down):
            require_width(x, self.up.in_features, "MLP")
            params = (*_pair(self.up), *_pair(self.down))
            return fused_mlp(x.to(dtype), *params, *_cast_pair(self.up, dtype), *_cast_pair(self.down, dtype))
        y: Tensor = self.down(ops.gelu(self.up(x), approximate="tanh"))
        return y


class MultiHeadAttention(nn.Module):
    """Causal self-attention: each position attends to itself and to earlier ones.

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
        """Attend along the second dimension of x (B, T, width); raise ShapeError for another shape."""
        if x.dim() != 3:
            raise ShapeError(f"MultiHeadAttention takes (batch, time, {self.width}), got {tuple(x.shape)}")
        batch, time, _ = x.shape
        y: Tensor
        heads: Tensor = self.qkv(x).view(batch, time, 3, self.heads, self.width // self.heads)
        if fuses(heads, heads.dtype):
            y = self.projection(fused_attention(heads))
            return y
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = causal_by_torch(q, k, v)
        y = self.projection(mixed.transpose(1, 2).reshape(batch, time, self.width))
        return y


class TransformerBlock(nn.Module):
    """The pre-norm block of GPT-2: x + attention(norm(x)), then x + mlp(norm(x))."""

    float8_linears: ClassVar[bool] = True

    def __init__(self, width: int, heads: int, *, bias: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm_1 = LayerNorm(width, eps=eps, bias=bias)
        self.attention = MultiHeadAttention(width, heads, bias=bias)
        self.norm_2 = LayerNorm(width, eps=eps, bias=bias)
        self.mlp = MLP(width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to x (B, T, width)."""
        if self.fuses(x):
            return self._fused(x, None, None, None, joined=True)[0]
        x = x + self.attention(self.norm_1(x))
        y: Tensor = x + self.mlp(self.norm_2(x))
        return y

    def fuses(self, x: Tensor) -> bool:
        """Return whether `split` supports x: on a GPU, while the layers inside are as this class makes them."""
        if torch.compiler.is_compiling():
            return False
        inner = (self.attention, self.mlp)
        if type(self.attention) is not MultiHeadAttention or type(self.mlp) is not MLP or any(map(has_hooks, inner)):
            return False
        return x.dim() == 3 and x.shape[-1] == self.attention.width and fuses(x, compute_dtype(x), *self._layers())

    def split(
        self, x: Tensor, residual: Tensor | None = None, before: ColumnSums | None = None
    ) -> tuple[Tensor, Tensor, ColumnSums | None]:
        """Apply the block to x + residual and leave its last addition to the norm that reads the sum.

        Args:
            x: (B, T, width), for which `fuses` holds.
            residual: shape of x; None for zeros.
            before: as returned by the preceding block.

        Returns:
            the MLP's result, the residual stream to add it to, and the column sums to share with the following block
            (see accelerant.ops.transformer.block.ColumnSums).
        """
        bias = self.mlp.down.bias
        after = None if bias is None or not bias.requires_grad else ColumnSums(bias)
        branch, stream = self._fused(x, residual, before, after, joined=False)
        assert stream is not None  # for the type checker: only a joined block returns one tensor
        return branch, stream, after

    def _fused(
        self, x: Tensor, residual: Tensor | None, before: ColumnSums | None, after: ColumnSums | None, *, joined: bool
    ) -> tuple[Tensor, Tensor | None]:
        dtype = compute_dtype(x)
        layers = self._layers()
        params = [tensor for layer in layers for tensor in _pair(layer)]
        casts = [tensor for layer in layers if isinstance(layer, Linear) for tensor in _cast_pair(layer, dtype)]
        spec = BlockSpec(self.attention.heads, (self.norm_1.eps, self.norm_2.eps), joined=joined)
        residual = None if residual is None else residual.to(dtype)
        return fused_block(x.to(dtype), residual, spec, before, after, *params, *casts)

    def _layers(self) -> tuple[nn.Module, ...]:
        attention, mlp = self.attention, self.mlp
        # In the order in which Block takes their parameters.
        return self.norm_1, attention.qkv, attention.projection, self.norm_2, mlp.up, mlp.down


DRAW_NOTHING = (TransformerBlock, MultiHeadAttention, MLP, LayerNorm, Linear)
"""Modules that draw no random numbers; checkpointing saves the generator's state for others, for which no step can be
captured."""


# --- fp8 -------------------------------------------------------------------------------------------------------------


def require_float8(device: torch.device) -> None:
    """Raise ConfigError unless a device multiplies 8-bit floating-point numbers."""
    reason = refuses_device(device)
    if reason is not None:
        raise ConfigError(
            f"precision fp8 needs an NVIDIA GPU of compute capability 8.9 or more, {reason}: use bfloat16"
        )


def float8_weights(model: nn.Module) -> list[Tensor]:
    """Return the weights of the linear layers in a model's blocks, each once, without embeddings and output layers.

    Raises:
        ConfigError: there is none, or a dimension of one is not a multiple of 16.
    """
    weights: dict[int, Tensor] = {}
    for path, block in model.named_modules():
        if not getattr(block, "float8_linears", False):
            continue
        for name, layer in block.named_modules():
            if isinstance(layer, Linear):
                shape = tuple(layer.weight.shape)
                if any(size % MULTIPLE for size in shape):
                    raise ConfigError(
                        f"precision fp8 takes weights whose sizes are multiples of {MULTIPLE}; "
                        f"{f'{path}.{name}'.strip('.')} is {shape}"
                    )
                weights[id(layer.weight)] = layer.weight
    if not weights:
        raise ConfigError(
            f"precision fp8 is for the blocks of accelerant.nn (TransformerBlock, those of Llama); "
            f"{type(model).__name__} has none: use bfloat16"
        )
    return list(weights.values())
