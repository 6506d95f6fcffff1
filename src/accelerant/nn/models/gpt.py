"""GPT: a decoder-only transformer in GPT-2's form, with learned positions and a tied output layer.

logits = norm(blocks(wte[tokens] + wpe[positions])) @ wte^T

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
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.nn.layers import LayerNorm, TransformerBlock, compute_dtype

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
    """

    vocab_size: int = 50257
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    bias: bool = True
    eps: float = 1e-5

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


class GPT(nn.Module):
    """A language model: tokens in, logits of the next token out.

    Rows of `wte` past `vocab_size` are zero, get no gradient, and are left out of `state_dict()`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(
            TransformerBlock(config.width, config.heads, bias=config.bias, eps=config.eps) for _ in range(config.layers)
        )
        self.norm = LayerNorm(config.width, eps=config.eps, bias=config.bias)
        self.reset_parameters()
        self.register_state_dict_post_hook(_strip_padding)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.register_load_state_dict_pre_hook(_restore_padding)  # type: ignore[no-untyped-call]  # as above

    def reset_parameters(self) -> None:
        """Draw GPT-2's initial weights with torch's global generator."""
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.01)
        with torch.no_grad():
            self.wte.weight[self.config.vocab_size :].zero_()
        residual_std = 0.02 / math.sqrt(2 * self.config.layers)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)  # for the type checker: ModuleList is untyped
            block.attention.projection.reset_parameters(residual_std)
            block.mlp.down.reset_parameters(residual_std)

    def parameter_count(self) -> int:
        """Number of trained values, padding left out."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.width
        return sum(parameter.numel() for parameter in self.parameters()) - padding

    def hidden(self, idx: Tensor) -> Tensor:
        """The final, normalised features of each position: (B, T) tokens to (B, T, width)."""
        _require_tokens(idx, "idx")
        if idx.shape[1] > self.config.context:
            raise ShapeError(f"at most {self.config.context} tokens fit the context, got {idx.shape[1]}")
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.wte(idx) + self.wpe(positions)
        x = x.to(compute_dtype(x))
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.norm(x)
        return y

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
        _require_tokens(targets, "targets")
        if idx.shape != targets.shape:
            raise ShapeError(f"targets must have the shape of idx, {tuple(idx.shape)}, got {tuple(targets.shape)}")
        logits = self._padded_logits(self.hidden(idx))
        if self.config.padded_vocab_size != self.config.vocab_size:
            logits[:, self.config.vocab_size :] = -math.inf  # in place: a slice would copy the largest tensor
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, targets.reshape(-1).long())

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue each row by sampling one token after another.

        Args:
            idx: (B, T) prompt, T at least 1; only its last `context` tokens are read.
            max_new_tokens: how many tokens to add.
            temperature: divides the logits; 0 takes the likeliest token always.
            top_k: keep only that many likeliest tokens; None keeps all.
            seed: makes the draw reproducible on one device.
            generator: the random state to draw from, on idx's device; instead of seed.

        Returns:
            (B, T + max_new_tokens), the prompt included, int64.

        Raises:
            ConfigError: a number is out of range, or both seed and generator are given.
        """
        _require_tokens(idx, "idx")
        _require_sampling(max_new_tokens, temperature, top_k)
        if seed is not None:
            if generator is not None:
                raise ConfigError("generate takes seed or generator, not both")
            generator = torch.Generator(device=idx.device).manual_seed(seed)
        was_training = self.training
        self.eval()
        tokens = idx.long()
        try:
            for _ in range(max_new_tokens):
                logits = self._last_logits(tokens[:, -self.config.context :])
                chosen = _sample(logits, temperature, top_k, generator)
                tokens = torch.cat([tokens, chosen], dim=1)
        finally:
            self.train(was_training)
        return tokens

    def _padded_logits(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, self.config.width)
        return ops.matmul(rows, self.wte.weight.to(rows.dtype).t())

    def _last_logits(self, idx: Tensor) -> Tensor:
        """(B, vocab_size) logits of the token after the last.

        Tokens are added on the right, where attention does not look: kernels then see few lengths, not each one.
        """
        time = idx.shape[1]
        length = min(-(-time // _PAD_MULTIPLE) * _PAD_MULTIPLE, self.config.context)
        hidden = self.hidden(F.pad(idx, (0, length - time)))
        return self._padded_logits(hidden[:, time - 1])[:, : self.config.vocab_size].float()


def _require_tokens(tokens: Tensor, name: str) -> None:
    if tokens.dim() != 2 or tokens.shape[1] < 1:
        raise ShapeError(f"{name} must be (batch, time) with at least one token, got {tuple(tokens.shape)}")
    if tokens.dtype not in (torch.int32, torch.int64):
        raise UnsupportedDtype(f"{name} must be int32 or int64, got {tokens.dtype}")


def _require_sampling(max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"temperature must be 0 or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k must be at least 1, got {top_k}")


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token from each row of (B, vocab_size) logits; returns (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial(ops.softmax(logits, dim=-1), num_samples=1, generator=generator)


def _strip_padding(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    assert isinstance(module, GPT)  # for the type checker: registered on GPT alone
    key = f"{prefix}wte.weight"
    state[key] = state[key][: module.config.vocab_size]


def _restore_padding(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    assert isinstance(module, GPT)  # for the type checker: registered on GPT alone
    weight = state.get(f"{prefix}wte.weight")
    if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] == module.config.vocab_size:
        missing = module.config.padded_vocab_size - module.config.vocab_size
        state[f"{prefix}wte.weight"] = F.pad(weight, (0, 0, 0, missing))
