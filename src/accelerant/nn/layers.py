"""The layers of a transformer on Accelerant's ops.

Every layer takes `(..., width)` and keeps the leading dimensions. Under `torch.autocast` the layers take and return
the autocast dtype, so the residual stream has the low precision too; parameters and their gradients keep the master
dtype, and norms accumulate in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.ops._library import autocast_dtype, is_ordinary, is_plain, name_of
from accelerant.ops._per_example import is_traced
from accelerant.ops.attention.op import attend_by_torch
from accelerant.ops.linear_fp8.op import MULTIPLE, Float8Weight, Float8Weights, refuses_device
from accelerant.ops.transformer.block import (
    BlockSpec,
    ColumnSums,
    fused_attention,
    fused_block,
    fused_linear,
    fused_mlp,
)
from accelerant.runtime.memory.live_set import only_counts

FUSED = {"cuda"}
"""Device types on which a layer runs as one autograd function; elsewhere torch's own functions are as fast."""


GLOBAL_HOOKS = (
    everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks, everywhere._global_backward_hooks,
    everywhere._global_backward_pre_hooks,
)  # fmt: skip
"""torch's hooks of all modules."""


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
            if parameter is not None and (
                parameter.dtype not in (dtype, torch.float32) or not (is_ordinary(parameter) or only_counts(parameter))
            ):
                return False
    return True


def has_hooks(module: nn.Module, *, feeds_sinks: bool = False) -> bool:
    """Return whether calling a module does more than its class's forward.

    The forward and the hook that a per-example sink (accelerant.ops._per_example) puts into a module count too, unless
    `feeds_sinks`: what runs in place of the call feeds the sink itself.
    """
    traced = feeds_sinks and is_traced(module)
    return bool(
        module._forward_hooks or len(module._forward_pre_hooks) > traced
        or module._backward_hooks or module._backward_pre_hooks or any(GLOBAL_HOOKS)
        or ("forward" in module.__dict__ and not traced)  # set there by gradient checkpointing
        or module._compiled_call_impl is not None
    )  # fmt: skip


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
        bias: (out_features,), initialized to zero, or None.
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
    """Center each row, scale it to unit variance, then scale by `weight` and shift by `bias`.

    Attributes:
        weight: (width,), initialized to one.
        bias: (width,), initialized to zero, or None.
    """

    bias: nn.Parameter | None

    def __init__(self, width: int, eps: float = 1e-5, *, bias: bool = True) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., width), in its dtype or the autocast dtype; raise ShapeError for another width."""
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
        """Normalize the last dimension; arguments, result and errors as in LayerNorm."""
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
    """Attention: softmax(q k^T / sqrt(width / heads) + mask) v in each head, then a projection back to width.

    Args:
        width, heads: heads divides width.
        bias: whether the linear maps have one.
        causal: in self-attention each position attends to itself and to earlier ones only.
        dropout: probability of zero for attention weights, in training.
        context_width: makes this cross-attention: keys and values are those of a context (B, S, context_width).

    Attributes:
        qkv: self-attention's linear map to queries, keys and values, in this order.
        query, key_value: the two maps of cross-attention in its place.
        projection: from the heads back to width.

    Raises:
        ConfigError: heads does not divide width; dropout is not in [0, 1).
    """

    def __init__(
        self, width: int, heads: int, *, bias: bool = True, causal: bool = True, dropout: float = 0.0,
        context_width: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if heads < 1 or width % heads:
            raise ConfigError(f"width must be a multiple of heads, got width {width} and {heads} heads")
        self.width = width
        self.heads = heads
        self.causal = causal
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {dropout}")
        self.dropout = float(dropout)
        self.context_width = context_width
        if context_width is None:
            self.qkv = Linear(width, 3 * width, bias=bias)
        else:
            self.query = Linear(width, width, bias=bias)
            self.key_value = Linear(context_width, 2 * width, bias=bias)
        self.projection = Linear(width, width, bias=bias)

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend along the second dimension.

        Args:
            x: (B, T, width).
            context: (B, S, context_width) for cross-attention; None for self-attention, where S = T.
            mask: broadcasts to (B, heads, T, S), as for accelerant.ops.attention: bools, True where a position attends,
                or numbers to add to the scores. (torch.nn.MultiheadAttention's attn_mask of bools is the opposite.)
            key_padding_mask: (B, S) bool, True for padding, which nothing attends to, as torch.nn names it.

        Returns:
            (B, T, width). A position that attends to nothing gets the projection of zeros.

        Raises:
            ShapeError: another shape, or a context for self-attention or none for cross-attention.
            UnsupportedDtype: a mask of another dtype.
        """
        if x.dim() != 3:
            raise ShapeError(f"MultiHeadAttention takes (batch, time, {self.width}), got {tuple(x.shape)}")
        if (context is None) != (self.context_width is None):
            given = "none" if context is None else f"{tuple(context.shape)}"
            wanted = "no context" if self.context_width is None else f"a context (batch, time, {self.context_width})"
            raise ShapeError(f"this MultiHeadAttention takes {wanted}, got {given}")
        batch, time, _ = x.shape
        width = self.width // self.heads
        dropout = self.dropout if self.training else 0.0
        y: Tensor
        if context is None:
            heads: Tensor = self.qkv(x).view(batch, time, 3, self.heads, width)
            plain = mask is None and key_padding_mask is None and not dropout
            if plain and self.causal and fuses(heads, heads.dtype):
                y = self.projection(fused_attention(heads))
                return y
            q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            if context.dim() != 3 or context.shape[0] != batch:
                raise ShapeError(f"context must be ({batch}, time, {self.context_width}), got {tuple(context.shape)}")
            q = self.query(x).view(batch, time, self.heads, width).transpose(1, 2)
            pairs = self.key_value(context).view(batch, context.shape[1], 2, self.heads, width)
            k, v = pairs.permute(2, 0, 3, 1, 4).unbind(0)
        causal = self.causal and context is None
        seen = _with_padding(mask, key_padding_mask, (batch, k.shape[2]))
        if dropout or (seen is None and (q.is_cpu or not fuses(q, q.dtype))):
            mixed = attend_by_torch(q, k, v, causal=causal, mask=seen, dropout=dropout)
        else:
            mixed = ops.attention(q, k, v, causal, mask=seen)  # type: ignore[assignment]  # no log-sum-exp
        y = self.projection(mixed.transpose(1, 2).reshape(batch, time, self.width))
        return y


def _with_padding(mask: Tensor | None, padding: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Return the mask with padded keys (B, S) hidden as well."""
    if padding is None:
        return mask
    if padding.dtype != torch.bool or padding.shape != shape:
        given = f"{tuple(padding.shape)} {name_of(padding.dtype)}"
        raise ShapeError(f"key_padding_mask must be {shape} bool, got {given}")
    real = ~padding[:, None, None]
    if mask is None:
        return real
    return mask & real if mask.dtype == torch.bool else mask.masked_fill(~real, float("-inf"))


class TransformerBlock(nn.Module):
    """A transformer block, by default the pre-norm block of GPT-2: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        width, heads: heads divides width.
        bias: whether linear maps and norms have one.
        eps: of the norms.
        d_ff: width of the MLP's hidden layer; None for 4 * width.
        norm_first: False for post-norm, as in the original transformer and BERT: norm(x + attention(x)).
        causal: whether self-attention hides later positions.
        dropout: probability of zero, in training: for attention weights, and for each branch before it is added.
        context_width: adds cross-attention to a context of this width, between self-attention and the MLP, with a norm
            of its own (a decoder block).

    Raises:
        ConfigError: a value out of range.
    """

    float8_linears: ClassVar[bool] = True

    def __init__(
        self, width: int, heads: int, *, bias: bool = True, eps: float = 1e-5, d_ff: int | None = None,
        norm_first: bool = True, causal: bool = True, dropout: float = 0.0, context_width: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm_1 = LayerNorm(width, eps=eps, bias=bias)
        self.attention = MultiHeadAttention(width, heads, bias=bias, causal=causal, dropout=dropout)
        self.norm_2 = LayerNorm(width, eps=eps, bias=bias)
        self.mlp = MLP(width, d_ff, bias=bias)
        self.norm_first = norm_first
        self.dropout = self.attention.dropout
        self.context_width = context_width
        if context_width is not None:
            self.norm_context = LayerNorm(width, eps=eps, bias=bias)
            self.cross_attention = MultiHeadAttention(
                width, heads, bias=bias, causal=False, dropout=dropout, context_width=context_width
            )

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None, context_mask: Tensor | None = None,
        context_padding_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Apply the block to x (B, T, width).

        Args:
            context: (B, S, context_width), for a block with cross-attention.
            mask, key_padding_mask: of self-attention; see MultiHeadAttention.
            context_mask, context_padding_mask: the same of cross-attention.

        Raises:
            ShapeError: another shape, or a context for a block without cross-attention or none for one with it.
        """
        if (context is None) != (self.context_width is None):
            wanted = "no context" if self.context_width is None else f"a context (batch, time, {self.context_width})"
            raise ShapeError(f"this TransformerBlock takes {wanted}")
        if context is None and mask is None and key_padding_mask is None and self._is_whole(x):
            return self._fused(x, None, None, None, joined=self.norm_first)[0]
        branches: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = [
            (self.norm_1, partial(self.attention, mask=mask, key_padding_mask=key_padding_mask)),
            (self.norm_2, self.mlp),
        ]
        if context is not None:
            masks = {"mask": context_mask, "key_padding_mask": context_padding_mask}
            branches.insert(1, (self.norm_context, partial(self.cross_attention, context=context, **masks)))
        for norm, branch in branches:
            if self.norm_first:
                x = x + ops.dropout(branch(norm(x)), self.dropout, self.training)
            else:
                x = norm(x + ops.dropout(branch(x), self.dropout, self.training))
        return x

    @property
    def is_gpt2(self) -> bool:
        """True if the block computes what one of GPT-2 does: pre-norm, causal, without cross-attention and dropout."""
        plain = self.norm_first and self.context_width is None and self.attention.causal
        return plain and not (self.training and (self.dropout or self.attention.dropout))

    def fuses(self, x: Tensor) -> bool:
        """Return whether `split` supports x: a block of GPT-2 on a GPU, with the layers that this class makes."""
        return self.is_gpt2 and self._is_whole(x)

    def _is_whole(self, x: Tensor) -> bool:
        """Return whether the block runs as one autograd function."""
        drops = self.training and (self.dropout or self.attention.dropout)
        if torch.compiler.is_compiling() or drops or self.context_width is not None:
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
        eps, causal = (self.norm_1.eps, self.norm_2.eps), self.attention.causal
        spec = BlockSpec(self.attention.heads, eps, causal, post_norm=not self.norm_first, joined=joined)
        residual = None if residual is None else residual.to(dtype)
        return fused_block(x.to(dtype), residual, spec, before, after, *params, *casts)

    def _layers(self) -> tuple[nn.Module, ...]:
        attention, mlp = self.attention, self.mlp
        # In the order in which Block takes their parameters.
        return self.norm_1, attention.qkv, attention.projection, self.norm_2, mlp.up, mlp.down


DRAW_NOTHING = (TransformerBlock, MultiHeadAttention, MLP, LayerNorm, Linear)
"""Modules that draw no random numbers, without dropout; checkpointing saves the generator's state for others, for which
no step can be captured."""


# --- weights cast once a step ----------------------------------------------------------------------------------------
#
# Autocast keeps parameters in float32 and casts them at each use: twice a step for each matrix, and again for each
# micro-batch. A LowWeights refreshes all copies that layers requested with one multi-tensor cast, and the layers use
# them while it is active. Copies are not used outside of that, so no weight has a stale copy.


class LowWeights:
    """Low-precision copies of the parameters that layers requested while it was active.

    Products use the matrices in `float8` in 8-bit floating point; ShapeError for a dimension that is no multiple of 16.
    """

    def __init__(self, dtype: torch.dtype, float8: Iterable[Tensor] = ()) -> None:
        self._dtype = dtype
        self._sources: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._by_id: dict[int, Tensor] = {}
        sources = list(float8)
        self._float8 = Float8Weights(sources) if sources else None
        self._rounded = dict(zip(map(id, sources), self._float8.each, strict=True)) if self._float8 else {}

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a parameter's copy, created on the first request."""
        if dtype != self._dtype:
            return weight.detach().to(dtype)
        copy = self._by_id.get(id(weight))
        if copy is None:
            copy = weight.detach().to(dtype)
            self._sources.append(weight)  # kept alive, so that its id stays unique
            self._copies.append(copy)
            self._by_id[id(weight)] = copy
        return copy

    @contextmanager
    def refreshed(self) -> Iterator[None]:
        """Refresh all copies and activate them inside the context."""
        if self._copies:
            torch._foreach_copy_(self._copies, [source.detach() for source in self._sources])
        if self._float8 is not None:
            self._float8.fill()
        token = _active.set(self)
        _rounded.update(self._rounded)
        try:
            yield
        finally:
            _active.reset(token)
            for key in self._rounded:
                del _rounded[key]


_active: ContextVar[LowWeights | None] = ContextVar("accelerant_low_weights", default=None)

_rounded: dict[int, Float8Weight] = {}
"""Weight identity -> its 8-bit form while active, for all threads: recomputation runs on autograd's threads."""


def lowered(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in a dtype, detached: itself, the active copy, or a new one."""
    if weight.dtype == dtype:
        return weight.detach()
    copies = _active.get()
    return weight.detach().to(dtype) if copies is None else copies.of(weight, dtype)


def float8_of(weight: Tensor) -> Float8Weight | None:
    """Return a weight's active 8-bit form; None if there is none."""
    return _rounded.get(id(weight))


# --- fp8 -------------------------------------------------------------------------------------------------------------


def require_float8(device: torch.device) -> None:
    """Raise ConfigError unless a device multiplies 8-bit floating-point numbers."""
    reason = refuses_device(device)
    if reason is not None:
        needs = "an NVIDIA GPU of compute capability 8.9 or more"
        raise ConfigError(f"precision fp8 needs {needs}, {reason}: use bfloat16")


def float8_weights(model: nn.Module) -> list[Tensor]:
    """Return the weights of the linear layers in a model's blocks, each once, without embeddings and output layers.

    Raises ConfigError if there is none, or a dimension of one is not a multiple of 16.
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
