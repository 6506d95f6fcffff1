"""The parts of a transformer: its MLP, attention with heads, and the block of both."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import ops
from accelerant._renamed import missing_arguments, understood_arguments
from accelerant.config import settings
from accelerant.errors import ConfigError, ShapeError
from accelerant.nn.layers import (
    LayerNorm,
    Linear,
    cast_pair,
    compute_dtype,
    fuses,
    has_hooks,
    may_bypass,
    may_fuse,
    pair_of,
    require_width,
)
from accelerant.ops._library import name_of
from accelerant.ops.attention import attend_by_torch, torch_sdpa
from accelerant.ops.matmul import may_use_onednn
from accelerant.ops.norm import torch_composite
from accelerant.ops.transformer.block import BlockSpec, ColumnSums, fused_attention, fused_block, fused_mlp
from accelerant.runtime.compilation.triton import interpreting
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation, case_of


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
            params = (*pair_of(self.up), *pair_of(self.down))
            return fused_mlp(x.to(dtype), *params, *cast_pair(self.up, dtype), *cast_pair(self.down, dtype))
        y: Tensor = self.down(ops.gelu(self.up(x), approximate="tanh"))
        return y


@missing_arguments(
    **dict.fromkeys(("embed_dim", "num_heads", "batch_first", "kdim"), "nn.MultiheadAttention, which is torch's layer")
)
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


_WIDE = {torch.float32}
_FLOATS = _WIDE | {torch.float16, torch.bfloat16}
_FEW_PRODUCTS = 2**21
"""Multiplications of a layer up to which a CPU takes float32 in less time than 16 bits with the casts of weights."""


@understood_arguments(d_model="width", nhead="heads", dim_feedforward="d_ff", layer_norm_eps="eps")
@missing_arguments(
    batch_first="the call without it: the batch is first", activation="the call without it: it is GELU in its tanh form"
)
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
            if may_fuse(x):
                return self._fused(x, None, None, None, joined=self.norm_first)[0]
            y: Tensor = block_by_torch(self._case(x), x, self)
            return y
        branches: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = [
            (self.norm_1, partial(self.attention, mask=mask, key_padding_mask=key_padding_mask)),
            (self.norm_2, self.mlp),
        ]
        if context is not None:
            masks = {"mask": context_mask, "key_padding_mask": context_padding_mask}
            branches.insert(1, (self.norm_context, partial(self.cross_attention, context=context, **masks)))
        drops = self.dropout > 0 and self.training
        for norm, branch in branches:
            y = branch(norm(x) if self.norm_first else x)
            x = x + (ops.dropout(y, self.dropout) if drops else y)
            if not self.norm_first:
                x = norm(x)
        return x

    @property
    def is_gpt2(self) -> bool:
        """True if the block computes what one of GPT-2 does: pre-norm, causal, without cross-attention and dropout."""
        plain = self.norm_first and self.context_width is None and self.attention.causal
        return plain and not (self.training and (self.dropout or self.attention.dropout))

    def fuses(self, x: Tensor) -> bool:
        """Return whether `split` supports x: a block of GPT-2 on a GPU, with the layers that this class makes."""
        return may_fuse(x) and self._is_whole(x) and self.is_gpt2

    def _is_whole(self, x: Tensor) -> bool:
        """Return whether the block runs without its modules: as one autograd function, or by torch's functions."""
        fused = may_fuse(x)
        if torch.compiler.is_compiling() or self.context_width is not None or not (fused or self._is_by_torch(x)):
            return False
        parts: Any = self._modules
        attention, mlp = parts["attention"], parts["mlp"]
        if self.training and (self.dropout or attention.dropout):
            return False
        if type(attention) is not MultiHeadAttention or type(mlp) is not MLP or has_hooks(attention) or has_hooks(mlp):
            return False
        whole = x.dim() == 3 and x.shape[-1] == attention.width
        return whole and may_bypass(x, compute_dtype(x), *self._layers(), feeds_sinks=fused)

    def _is_by_torch(self, x: Tensor) -> bool:
        """Return whether our products of x on a CPU would be torch's, so that calls of modules and ops cost time."""
        torchs = x.is_cpu and not may_use_onednn(compute_dtype(x), x.numel() * self._up().out_features)
        return torchs and not interpreting() and not settings().implementation

    def _up(self) -> Any:
        parts: Any = self._modules  # past nn.Module.__getattr__, which costs as much as a small call
        return parts["mlp"]._modules["up"]

    def _case(self, x: Tensor) -> Case:
        parts: Any = self._modules
        causal, order = "causal" if parts["attention"].causal else "", "" if self.norm_first else "post-norm"
        words = f"{parts['attention'].heads} heads", causal, order, f"d_ff {self._up().out_features}"
        return case_of((x.device, compute_dtype(x), x.shape, words))

    def by_torch(self, x: Tensor) -> Tensor:
        """Apply the block by torch's functions, which nothing counts; under autocast few rows run in float32."""
        if not torch.is_autocast_enabled("cpu"):
            return self._functions(x, x.dtype)
        low, dtypes = compute_dtype(x), {each.dtype for each in self._params() if each is not None}
        few = x.numel() * self._up().out_features <= _FEW_PRODUCTS and x.dtype in _FLOATS
        dtype = torch.float32 if few and dtypes == _WIDE else low
        shown = torch.promote_types(x.dtype, low) if self.norm_first else low
        torch.set_autocast_enabled("cpu", False)  # which would ask each function
        try:
            return self._functions(x.to(dtype) if dtype == torch.float32 else x, dtype).to(shown)
        finally:
            torch.set_autocast_enabled("cpu", True)

    def _functions(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute in a dtype; the body is one function, since each call of another costs a part of a small block."""
        layers: tuple[Any, ...] = self._layers()
        params: list[Any] = self._params()
        if dtype != torch.float32:
            params[2:6], params[8:] = _cast(params[2:6], dtype), _cast(params[8:], dtype)
        n1, c1, qkv, c2, projection, c3, n2, c4, up, c5, down, c6 = params
        attention: Any = self._modules["attention"]
        shape, eps = x.shape, (layers[0].eps, layers[3].eps)
        y = _normalized(x, n1, c1, eps[0], dtype) if self.norm_first else x.to(dtype)
        heads = F.linear(y, qkv, c2).view(*shape[:2], 3, attention.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        if dtype == torch.float32:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=attention.causal)
        else:
            mixed = torch_sdpa(q, k, v, None, 0.0, attention.causal)
        x = x + F.linear(mixed.transpose(1, 2).reshape(shape), projection, c3)
        y = _normalized(x, n2, c4, eps[1], dtype) if self.norm_first else (x := _normalized(x, n1, c1, eps[0], dtype))
        x = x + F.linear(F.gelu(F.linear(y, up, c5), approximate="tanh"), down, c6)
        return x if self.norm_first else _normalized(x, n2, c4, eps[1], dtype)

    def split(
        self, x: Tensor, residual: Tensor | None = None, before: ColumnSums | None = None
    ) -> tuple[Tensor, Tensor, ColumnSums | None]:
        """Apply the block to x + residual (None: zeros) and leave its last addition to the norm that reads the sum.

        `fuses` holds for x (B, T, width); `before` is what the preceding block returned. Returns the MLP's result, the
        residual stream to add it to, and the column sums for the following block
        (accelerant.ops.transformer.block.ColumnSums).
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
        params = [tensor for layer in layers for tensor in pair_of(layer)]
        casts = [tensor for layer in layers if isinstance(layer, Linear) for tensor in cast_pair(layer, dtype)]
        eps, causal = (self.norm_1.eps, self.norm_2.eps), self.attention.causal
        spec = BlockSpec(self.attention.heads, eps, causal, post_norm=not self.norm_first, joined=joined)
        residual = None if residual is None else residual.to(dtype)
        return fused_block(x.to(dtype), residual, spec, before, after, *params, *casts)

    def _layers(self) -> tuple[nn.Module, ...]:
        parts: Any = self._modules  # past nn.Module.__getattr__, which costs as much as a small call
        attention, mlp = parts["attention"]._modules, parts["mlp"]._modules
        # In the order in which Block takes their parameters.
        return parts["norm_1"], attention["qkv"], attention["projection"], parts["norm_2"], mlp["up"], mlp["down"]

    def _params(self) -> list[Tensor | None]:
        found = [layer._parameters for layer in self._layers()]  # a pruned layer's are in another order
        return [each[name] for each in found for name in ("weight", "bias")]


def _cast(params: list[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    return [None if each is None else each.to(dtype) for each in params]


def _normalized(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    if x.dtype == weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32):
        return torch.layer_norm(x, weight.shape, weight, bias, eps).to(dtype)
    return torch_composite(True, x, weight, bias, eps).to(dtype)


def _block_cost(case: Case) -> Cost:
    (B, T, W), hidden = case.shape, int(case.options[-1].removeprefix("d_ff "))
    weights, pairs = 2 * W * (2 * W + hidden), T * (T + 1) // 2 if "causal" in case.options else T * T
    return Cost((weights + 2 * B * T * W) * case.dtype.itemsize, 2 * B * T * weights + 4 * B * pairs * W)


_ONLY_COST = "products are torch's here: calls of the layers would only cost the host more"

block_by_torch = Operation(
    "torch_block_fwd",
    (
        Implementation("layers", lambda x, block: block(x), refuses=lambda _: _ONLY_COST),
        Implementation("torch", lambda x, block: block.by_torch(x), differentiable=True),
    ),
    cost=_block_cost,
)
"""A block on a CPU as one call of the ledger, which counts none of its parts."""

DRAW_NOTHING = (TransformerBlock, MultiHeadAttention, MLP, LayerNorm, Linear)
"""Modules that draw no random numbers, without dropout; checkpointing saves the generator's state for others, for which
no step can be captured."""
