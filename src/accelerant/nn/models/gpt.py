"""GPT: a decoder-only transformer in GPT-2's form, with learned positions and an output layer that is the embedding.

logits = norm(blocks(wte[tokens] + wpe[positions])) @ wte^T    (lm_head^T where it is not tied)

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; initialisation as in its
section 2.3 (residual projections scaled by 1/sqrt(2 * layers)).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError
from accelerant.nn._precision import lowered
from accelerant.nn.layers import LayerNorm, Linear, TransformerBlock, compute_dtype, fuses, has_hooks
from accelerant.nn.models.generation import Cache, CacheShape, require_tokens
from accelerant.nn.models.gpt_checkpoint import LAYOUT
from accelerant.nn.models.gpt_decode import can_cache, decode_hidden, prefill_hidden
from accelerant.nn.models.language_model import LanguageModel
from accelerant.ops._library import is_plain
from accelerant.ops._per_example import sink_of
from accelerant.ops.transformer.block import fused_embed, tied_loss

__all__ = ["GPT", "GPTConfig"]

_PAD_MULTIPLE = 64  # rows of the vocabulary matrix, and tokens while sampling: tensor cores want whole tiles


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a GPT; the defaults are GPT-2 124M.

    Attributes:
        vocab_size: number of tokens; padded to a multiple of 64 inside, which is not seen outside.
        context: the longest sequence, in tokens.
        layers: number of transformer blocks.
        heads: attention heads in each block; divides width.
        width: features of each position.
        bias: whether linear maps and norms have a bias.
        eps: added to the variance in each norm.
        tied: whether the output layer is the embedding.
    """

    vocab_size: int = 50257
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    bias: bool = True
    eps: float = 1e-5
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"GPTConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ConfigError(f"GPTConfig.width must be a multiple of heads, got {self.width} and {self.heads}")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the vocabulary matrix in memory."""
        return -(-self.vocab_size // _PAD_MULTIPLE) * _PAD_MULTIPLE

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


class GPT(LanguageModel):
    """A language model: tokens in, logits of the next token out.

    Rows of `wte`, and of `lm_head` where there is one, past `vocab_size` are zero, get no gradient, and are left out of
    `state_dict()`.
    """

    _layout = LAYOUT
    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(
            TransformerBlock(config.width, config.heads, bias=config.bias, eps=config.eps) for _ in range(config.layers)
        )
        self.norm = LayerNorm(config.width, eps=config.eps, bias=config.bias)
        self.lm_head = None if config.tied else Linear(config.width, config.padded_vocab_size, bias=False)
        self.reset_parameters()
        self.register_state_dict_post_hook(_strip_padding)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.register_load_state_dict_pre_hook(_restore_padding)  # type: ignore[no-untyped-call]  # as above

    def reset_parameters(self) -> None:
        """Draw GPT-2's initial weights with torch's global generator."""
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.01)
        if self.lm_head is not None:
            self.lm_head.reset_parameters()
        with torch.no_grad():
            self.wte.weight[self.config.vocab_size :].zero_()
            self._output_weight()[self.config.vocab_size :].zero_()
        residual_std = 0.02 / math.sqrt(2 * self.config.layers)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)  # for the type checker: ModuleList is untyped
            block.attention.projection.reset_parameters(residual_std)
            block.mlp.down.reset_parameters(residual_std)

    def parameter_count(self) -> int:
        """Number of trained values, padding left out."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.width
        return super().parameter_count() - (padding if self.lm_head is None else 2 * padding)

    def _output_weight(self) -> Tensor:
        """(padded vocabulary, width), of the output layer."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def hidden(self, idx: Tensor) -> Tensor:
        """The final, normalised features of each position: (B, T) tokens to (B, T, width)."""
        self._require_fits(idx)
        return self._hidden(idx)[0]

    def _require_fits(self, idx: Tensor) -> None:
        require_tokens(idx, self.config.context)

    def _hidden(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """The final features, and the vocabulary matrix for an output layer; see Embed on why it comes from here."""
        x, table = self._embedded(idx)
        residual: Tensor | None = None
        for block in self.blocks:
            if type(block) is TransformerBlock and block.fuses(x) and not has_hooks(block):
                x, residual = block.split(x, residual)
            else:
                x, residual = block(x if residual is None else x + residual), None
        norm = self.norm
        if residual is None or type(norm) is not LayerNorm or has_hooks(norm):
            return norm(x if residual is None else x + residual), table
        y, _ = ops.add_layer_norm(x, residual, norm.weight, norm.bias, eps=norm.eps)
        return y, table

    def _embedded(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of both embeddings in the dtype to compute in, and the vocabulary matrix."""
        table, places = self.wte.weight, self.wpe.weight
        dtype = compute_dtype(table)
        if self._fuses_ends(idx):
            return fused_embed(idx, table, places, dtype)
        positions = torch.arange(idx.shape[1], device=idx.device)
        return (self.wte(idx) + self.wpe(positions)).to(dtype), table

    def _fuses_ends(self, idx: Tensor) -> bool:
        """Whether embeddings and loss run as functions with both passes written out, past the embeddings' forward."""
        table, places = self.wte.weight, self.wpe.weight
        both = (self.wte, self.wpe)
        usual = not any(type(each) is not nn.Embedding or has_hooks(each, feeds_sinks=True) for each in both)
        return fuses(table, compute_dtype(table)) and usual and is_plain(idx) and is_plain(places)

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
        logits = self._padded_logits(self.hidden(idx))
        return logits[:, : self.config.vocab_size].view(*idx.shape, self.config.vocab_size)

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the targets, in nats a token; the sum is taken in float32 or better.

        Args:
            idx: (B, T), as for `forward`.
            targets: (B, T), the token that follows each position; -100 leaves a position out.

        Returns:
            A scalar, differentiable in the parameters.

        Raises:
            ShapeError: the shapes differ or do not fit the model.
            UnsupportedDtype: idx or targets are not int32 or int64.
        """
        require_tokens(targets, name="targets")
        if idx.shape != targets.shape:
            raise ShapeError(f"targets must have the shape of idx, {tuple(idx.shape)}, got {tuple(targets.shape)}")
        self._require_fits(idx)
        hidden, table = self._hidden(idx)
        head = () if self.lm_head is None else (self.lm_head,)
        if fuses(hidden, hidden.dtype, *head) and is_plain(targets) and is_plain(table):
            rows = hidden.reshape(-1, self.config.width)
            weight = self._output_weight()
            low = lowered(weight, hidden.dtype)
            if weight is not self.wte.weight or sink_of(weight) is not None:
                table = weight  # not the embedding's, whose gradients meet in Embed
            return tied_loss(rows, table, low, targets.reshape(-1), self.config.vocab_size, -100)
        logits = self._padded_logits(hidden)
        if self.config.padded_vocab_size != self.config.vocab_size:
            logits[:, self.config.vocab_size :] = -math.inf  # in place: a slice would copy the largest tensor
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, targets.reshape(-1).long())

    # --- decoding (accelerant.nn.models.generation) ------------------------------------------------------------------

    def can_cache(self) -> bool:
        """Whether `decode` does what the whole model does: its blocks are as it made them."""
        return can_cache(self)

    def cache_shape(self) -> CacheShape:
        """What is kept of each token."""
        return CacheShape(self.config.layers, self.config.heads, self.config.width // self.config.heads)

    def activation_dtype(self) -> torch.dtype:
        """Of activations: the parameters', or autocast's."""
        return compute_dtype(self.wte.weight)

    def prefill(self, idx: Tensor, cache: Cache | None) -> Tensor:
        """Read (B, T) tokens from position 0 on: float32 logits (B, vocab_size) of the next; fills the cache."""
        return self._next_logits(prefill_hidden(self, idx, cache))

    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Read one more token of each sequence (B,): float32 logits (B, vocab_size) of the next; grows the cache."""
        return self._next_logits(decode_hidden(self, tokens, cache))

    def _next_logits(self, hidden: Tensor) -> Tensor:
        return self._padded_logits(hidden)[:, : self.config.vocab_size].float()

    def _padded_logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is not None:
            logits: Tensor = self.lm_head(hidden)
            return logits.reshape(-1, self.config.padded_vocab_size)
        rows = hidden.reshape(-1, self.config.width)
        return ops.matmul(rows, self.wte.weight.to(rows.dtype).t())


def _strip_padding(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    assert isinstance(module, GPT)  # for the type checker: registered on GPT alone
    for name in _padded(module):
        state[prefix + name] = state[prefix + name][: module.config.vocab_size]


def _restore_padding(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    assert isinstance(module, GPT)  # for the type checker: registered on GPT alone
    for name in _padded(module):
        weight = state.get(prefix + name)
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] == module.config.vocab_size:
            missing = module.config.padded_vocab_size - module.config.vocab_size
            state[prefix + name] = F.pad(weight, (0, 0, 0, missing))


def _padded(model: GPT) -> tuple[str, ...]:
    """Names of the parameters with a row for each token."""
    return ("wte.weight",) if model.config.tied else ("wte.weight", "lm_head.weight")
