"""Llama: a decoder-only transformer with rotary positions, grouped-query attention, RMS norms and gated MLPs.

h = embed[tokens];  h += attention(norm(h)), h += mlp(norm(h)) in each block;  logits = norm(h) @ head^T
mlp(x) = (silu(x gate^T) * (x up^T)) down^T

Weights that read the same input stand in one matrix: queries, keys and values in `qkv`, gates and what they gate in
`gate_up`. So training multiplies larger matrices and decoding reads each input once.

Source: Touvron et al. 2023, arXiv:2302.13971, section 2.2; Grattafiori et al. 2024, arXiv:2407.21783, section 3.2.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError
from accelerant.nn.layers import Linear, compute_dtype, has_hooks
from accelerant.nn.models.generation import Cache, CacheShape, prompt_length, require_tokens
from accelerant.nn.models.language_model import LanguageModel
from accelerant.nn.models.llama_checkpoint import LAYOUT
from accelerant.nn.normalization import RMSNorm
from accelerant.nn.quantization import LinearInt8
from accelerant.ops.decode.op import append, linear
from accelerant.ops.rope.tables import Llama3Scaling, rope_tables

__all__ = ["Llama", "LlamaConfig"]


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a Llama; the defaults are Llama 3.1 8B.

    Attributes:
        vocab_size: number of tokens.
        context: the longest sequence, in tokens.
        layers: number of transformer blocks.
        heads: query heads in each block.
        kv_heads: heads of keys and values; divides heads.
        width: features of each position.
        hidden: features inside each MLP.
        head_width: features of a head, even; None for width / heads.
        rope_base: of the rotary frequencies.
        rope_scaling: how they are stretched for a longer context; None for not at all.
        eps: added to the mean square in each norm.
        tied: whether the output layer is the embedding.
    """

    vocab_size: int = 128256
    context: int = 131072
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    width: int = 4096
    hidden: int = 14336
    head_width: int | None = None
    rope_base: float = 500000.0
    rope_scaling: Llama3Scaling | None = Llama3Scaling()  # noqa: RUF009 - frozen
    eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "heads", "kv_heads", "width", "hidden"):
            if getattr(self, name) < 1:
                raise ConfigError(f"LlamaConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"LlamaConfig.kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if self.head_width is None and self.width % self.heads:
            raise ConfigError(f"LlamaConfig.width must be a multiple of heads, got {self.width} and {self.heads}")
        if self.head_size % 2 or self.head_size < 2:
            raise ConfigError(f"LlamaConfig: heads must have an even width, got {self.head_size}")
        if self.rope_base <= 0:
            raise ConfigError(f"LlamaConfig.rope_base must be above 0, got {self.rope_base}")

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.width // self.heads if self.head_width is None else self.head_width

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


class LlamaAttention(nn.Module):
    """Causal attention with rotary positions; each head of keys and values serves heads / kv_heads of queries."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = config.heads, config.kv_heads, config.head_size
        self.qkv = Linear(config.width, (config.heads + 2 * config.kv_heads) * self.head_width, bias=False)
        self.projection = Linear(config.heads * self.head_width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Cache, int] | None = None) -> Tensor:
        """Attend along the second dimension of x (B, T, width); the cache, and whose layer this is, takes k and v."""
        heads: Tensor = self.qkv(x).view(*x.shape[:2], self.heads + 2 * self.kv_heads, self.head_width).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
        if cache is not None:
            cache[0].hold(cache[1], k, v)
        mixed = ops.attention(q, k, v, causal=True)
        assert isinstance(mixed, Tensor)  # for the type checker: no log-sum-exp was asked for
        y: Tensor = self.projection(mixed.transpose(1, 2).reshape(*x.shape[:2], self.heads * self.head_width))
        return y


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * hidden, bias=False)
        self.down = Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to (..., width)."""
        y: Tensor = self.down(ops.swiglu(self.gate_up(x)))
        return y


class LlamaBlock(nn.Module):
    """The pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(config.width, eps=config.eps)
        self.attention = LlamaAttention(config)
        self.norm_2 = RMSNorm(config.width, eps=config.eps)
        self.mlp = GatedMLP(config.width, config.hidden)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, cache: tuple[Cache, int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The block on x + residual: what its MLP adds, and what that is to be added to, for the norm that follows."""
        y, s = _add_norm(x, residual, self.norm_1)
        y, s = _add_norm(self.attention(y, cos, sin, cache), s, self.norm_2)
        return self.mlp(y), s


class Llama(LanguageModel):
    """A language model: tokens in, logits of the next token out.

    Attributes:
        embed: (vocab_size, width).
        blocks: of LlamaBlock.
        norm: before the output layer.
        lm_head: the output layer, or None where the embedding is.
    """

    _layout = LAYOUT
    config: LlamaConfig
    lm_head: Linear | None

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, eps=config.eps)
        self.lm_head = None if config.tied else Linear(config.width, config.vocab_size, bias=False)
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        nn.init.normal_(self.embed.weight, std=0.02)

    def hidden(self, idx: Tensor) -> Tensor:
        """The final, normalised features of each position: (B, T) tokens to (B, T, width)."""
        return self._hidden(idx, None)

    def forward(self, idx: Tensor) -> Tensor:
        """Score every token as the next one, at each position.

        Args:
            idx: (B, T), integer tokens below vocab_size, 1 <= T <= context.

        Returns:
            (B, T, vocab_size) logits, in the parameters' dtype or the autocast dtype.

        Raises:
            ShapeError: idx is not (B, T) or T is out of range.
            UnsupportedDtype: idx is not int32 or int64.
        """
        return self._logits(self.hidden(idx))

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the targets, in nats a token; the logits never exist whole.

        Args:
            idx: (B, T), as for `forward`.
            targets: (B, T), the token that follows each position; -100 leaves a position out.

        Returns:
            A scalar, differentiable in the parameters.

        Raises:
            ShapeError: the shapes differ or do not fit the model.
            UnsupportedDtype: idx or targets are not int32 or int64.
        """
        if idx.shape != targets.shape:
            raise ShapeError(f"targets must have the shape of idx, {tuple(idx.shape)}, got {tuple(targets.shape)}")
        rows = self.hidden(idx).flatten(0, 1)
        head: nn.Module = self._head()
        if isinstance(head, LinearInt8):  # quantised: its weight is no matrix of floating point
            return ops.cross_entropy(self._logits(rows), targets.flatten().long())
        assert isinstance(head.weight, Tensor)  # for the type checker
        return ops.linear_cross_entropy(rows, head.weight.to(rows.dtype), targets.flatten().long())

    # --- decoding (accelerant.nn.models.generation) ------------------------------------------------------------------

    def can_cache(self) -> bool:
        """Whether `decode` does what the whole model does: its blocks are as it made them, and nothing has hooks."""
        usual = type(self.norm) is RMSNorm and all(
            type(block) is LlamaBlock
            and type(block.attention) is LlamaAttention
            and type(block.mlp) is GatedMLP
            and type(block.norm_1) is type(block.norm_2) is RMSNorm
            for block in self.blocks
        )
        return usual and not any(has_hooks(module) for module in self.modules() if module is not self)

    def cache_shape(self) -> CacheShape:
        """What is kept of each token."""
        return CacheShape(self.config.layers, self.config.kv_heads, self.config.head_size)

    def activation_dtype(self) -> torch.dtype:
        """Of activations."""
        return compute_dtype(self.embed.weight)

    def prefill(self, idx: Tensor, cache: Cache | None) -> Tensor:
        """Read (B, T) tokens from position 0 on: float32 logits (B, vocab_size) of the next; fills the cache."""
        time = idx.shape[1]
        length = prompt_length(time, self.config.context, cache)
        if cache is not None:
            cache.lengths.fill_(time)
        hidden = self._hidden(nn.functional.pad(idx, (0, length - time)), cache)
        return self._logits(hidden[:, time - 1]).float()

    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Read one more token of each sequence (B,): float32 logits (B, vocab_size) of the next; grows the cache."""
        dtype = self.activation_dtype()
        s = self.embed(tokens).to(dtype)
        cos, sin = self._rope_tables(s)
        lengths = cache.lengths + 1
        for block, k, v in zip(self.blocks, cache.k, cache.v, strict=True):
            assert isinstance(block, LlamaBlock)  # for the type checker: ModuleList is untyped
            qkv = _line(block.attention.qkv, s, norm=block.norm_1)
            q = append(qkv, cache.lengths, k, v, cos, sin)
            o = ops.attention_decode(q, k, v, lengths)
            s = _line(block.attention.projection, o.flatten(1), residual=s)
            h = _line(block.mlp.gate_up, s, norm=block.norm_2, gated=True)
            s = _line(block.mlp.down, h, residual=s)
        cache.lengths += 1
        return _line(self._head(), s, norm=self.norm).float()

    def _hidden(self, idx: Tensor, cache: Cache | None) -> Tensor:
        require_tokens(idx, self.config.context)
        x = self.embed(idx)
        x = x.to(compute_dtype(x))
        cos, sin = (table[: idx.shape[1]] for table in self._rope_tables(x))
        residual: Tensor | None = None
        for layer, block in enumerate(self.blocks):
            x, residual = block(x, residual, cos, sin, None if cache is None else (cache, layer))
        return _add_norm(x, residual, self.norm)[0]

    def _head(self) -> Linear | nn.Embedding:
        """The module that has the output layer's weight."""
        return self.embed if self.lm_head is None else self.lm_head

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is not None:
            y: Tensor = self.lm_head(hidden)
            return y
        rows = ops.matmul(hidden.reshape(-1, self.config.width), self.embed.weight.to(hidden.dtype).t())
        return rows.view(*hidden.shape[:-1], self.config.vocab_size)

    def _rope_tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of every position, float32 (float64 for float64), on x's device; made when first asked for."""
        config = self.config
        key = (x.device, torch.float64 if x.dtype == torch.float64 else torch.float32)
        found = self._tables.get(key)
        if found is None:
            with torch.inference_mode(False):  # they outlive whatever mode this call is in
                found = rope_tables(config.context, config.head_size, config.rope_base, config.rope_scaling, key[1])
                found = (found[0].to(x.device), found[1].to(x.device))
            if type(found[0]) is Tensor:  # not one that only stands for another while something is traced
                self._tables[key] = found
        return found


def _add_norm(x: Tensor, residual: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum."""
    if residual is None:
        return norm(x), x
    if norm._forward_hooks or norm._forward_pre_hooks:
        s = x + residual
        return norm(s), s
    return ops.add_rms_norm(x, residual, norm.weight, eps=norm.eps)


def _line(
    layer: nn.Module, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None, gated: bool = False
) -> Tensor:
    """A linear layer of a decoding step with what stands around it, in one kernel where the layer is a plain one."""
    weight, scale = getattr(layer, "weight", None), None
    plain = type(layer) in (Linear, LinearInt8) or isinstance(layer, nn.Embedding)  # another may do more: it is called
    plain = plain and getattr(layer, "bias", None) is None
    if isinstance(layer, LinearInt8):
        plain = plain and not layer.dynamic
        scale = layer.scale
    elif isinstance(weight, Tensor):
        weight = weight.to(x.dtype)
    if plain and isinstance(weight, Tensor):
        gain = None if norm is None else norm.weight
        eps = 0.0 if norm is None else norm.eps
        return linear(x, weight, scale, norm=gain, eps=eps, residual=residual, gated=gated)
    y: Tensor = layer(x if norm is None else norm(x))
    if gated:
        y = ops.swiglu(y)
    return y if residual is None else y + residual
