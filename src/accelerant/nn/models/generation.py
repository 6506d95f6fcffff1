"""Token-by-token generation with a key-value cache.

A model implements Decodable: `prefill` reads a prompt, `decode` one more token of each sequence, and `cache_shape`
gives the dimensions of the cache. All state that changes from token to token is on the device: positions, drawn tokens,
which sequences have ended. One decoding step, sampling included, is therefore captured as a CUDA graph and replayed,
without synchronization until the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.runtime.streams.graphs import Graph

STOP_INTERVAL = 16
"""Tokens between two checks whether every sequence has ended: a check synchronizes with the device."""

_LENGTH_MULTIPLE = 64  # capacities and prompts in tokens are rounded up to it, so that kernels see few sizes
_EAGER_STEPS = 2  # before the capture: kernels are compiled and libraries initialized
_MIN_CAPTURED_TOKENS = 8
_ARGMAX_BLOCK = 256  # logits of a row that the first of two argmax stages reduces


@dataclass(slots=True)
class Cache:
    """Keys and values of the tokens so far, at fixed addresses.

    Attributes:
        k, v: for each layer (B, kv_heads, capacity, width), contiguous.
        lengths: (B,) int32, number of tokens in the cache, on the device.
    """

    k: list[Tensor]
    v: list[Tensor]
    lengths: Tensor

    @classmethod
    def empty(
        cls, shape: tuple[int, int, int], batch: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Cache:
        """Allocate a cache for at least `tokens` tokens of each sequence; `shape` as of Decodable.cache_shape."""
        layers, kv_heads, width = shape
        size = (layers, batch, kv_heads, cache_capacity(tokens), width)
        k, v = (torch.zeros(size, dtype=dtype, device=device).unbind(0) for _ in range(2))
        return cls(list(k), list(v), torch.zeros(batch, dtype=torch.int32, device=device))

    def store_prompt(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copy the keys and values of a prompt (B, kv_heads, T, width) to the start of a layer."""
        self.k[layer][:, :, : k.shape[2]] = k
        self.v[layer][:, :, : v.shape[2]] = v


def cache_capacity(tokens: int) -> int:
    """Return the capacity of a cache for `tokens` tokens: rounded up to a multiple of 64."""
    return -(-tokens // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


class Decodable(Protocol):
    """A model that supports cached generation."""

    config: Any  # with `context`, the longest sequence, and `vocab_size`

    def can_cache(self) -> bool:
        """Return whether `decode` computes what the model does, which replaced modules or hooks prevent."""

    def cache_shape(self) -> tuple[int, int, int]:
        """Return layers, kv_heads and width: the cache has so many keys for each token, and as many values."""

    def activation_dtype(self) -> torch.dtype:
        """Return the dtype of activations and of the cache: the parameters' or autocast's."""

    def prefill(self, idx: Tensor, cache: Cache | None) -> Tensor:
        """Read a prompt (B, T) into the cache; return float32 logits (B, vocab_size) of the next token."""

    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Append one token of each sequence (B,) to the cache; return float32 logits (B, vocab_size) of the next."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution from which a token is drawn, given logits, with the options of LanguageModel.generate."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Draw a token (B,), int64, for each row of logits (B, V), float32, by inverting the cumulative distribution.

        `uniform`, (B,), holds draws from [0, 1); it is not read at temperature 0.
        """
        if self.temperature == 0:
            return _argmax(logits)
        if self.temperature < 1e-20:  # the quotients would be infinite, and their softmax NaN
            logits = logits - logits.amax(-1, keepdim=True)
        logits = logits / max(self.temperature, torch.finfo(logits.dtype).tiny)
        k = logits.shape[-1] if self.top_k is None else min(self.top_k, logits.shape[-1])
        if k == logits.shape[-1] and self.top_p is None:
            return _draw(torch.softmax(logits, dim=-1), uniform)
        best, ids = logits.topk(k, dim=-1) if self.top_p is None or self.top_k else logits.sort(-1, descending=True)
        probabilities = torch.softmax(best, dim=-1)
        if self.top_p is not None:
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        return ids.gather(-1, _draw(probabilities, uniform)[:, None])[:, 0]


def _argmax(logits: Tensor) -> Tensor:
    """Return the first maximum of each row; in two stages, since a row alone would occupy few multiprocessors."""
    if logits.shape[-1] % _ARGMAX_BLOCK:
        return logits.argmax(dim=-1)
    blocks: Tensor = logits.unflatten(-1, (-1, _ARGMAX_BLOCK))
    largest, indices = blocks.max(dim=-1)
    block = largest.argmax(dim=-1, keepdim=True)
    return (block * _ARGMAX_BLOCK + indices.gather(-1, block))[:, 0]


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index at which the cumulative probability exceeds a fraction of the total."""
    single = probabilities.shape[0] == 1  # cumsum gives each row of a matrix one multiprocessor, a vector all
    cumulative = probabilities[0].cumsum(0)[None] if single else probabilities.cumsum(-1)
    indices = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    last = (probabilities > 0).long().mul_(torch.arange(probabilities.shape[-1], device=indices.device)).amax(-1)
    return torch.minimum(indices[:, 0], last)  # the product may round up to the total


class Decoding:
    """Sequences that grow by one token with each call of `advance`.

    The model reads a window of the tokens, to which the arguments apply as in LanguageModel.generate. `graph` says
    whether to capture a step as a CUDA graph; None: on a GPU, for at least 8 tokens.
    """

    def __init__(
        self, model: Decodable, idx: Tensor, max_new_tokens: int, sampling: Sampling, *,
        generator: torch.Generator | None = None, stop: Sequence[int] = (), use_cache: bool = True,
        graph: bool | None = None,
    ) -> None:  # fmt: skip
        batch, time = idx.shape
        device = idx.device
        self.model, self.sampling = model, sampling
        self.tokens = torch.empty(batch, time + max_new_tokens, dtype=torch.int64, device=device)
        self.tokens[:, :time] = idx
        self.begin, self.end = max(0, time - model.config.context), time
        uniform = sampling.temperature != 0
        self._uniform = torch.rand(max_new_tokens if uniform else 1, batch, generator=generator, device=device)
        self._drawn = torch.zeros(1, dtype=torch.int64, device=device)
        self._column = torch.full((1,), time, dtype=torch.int64, device=device)
        self._current = torch.zeros(batch, dtype=torch.int64, device=device)
        self._stop = torch.tensor(list(stop), dtype=torch.int64, device=device) if stop else None
        self._done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.cache: Cache | None = None
        if use_cache and max_new_tokens > 1:
            tokens = min(model.config.context, time + max_new_tokens)
            self.cache = Cache.empty(model.cache_shape(), batch, tokens, model.activation_dtype(), device)
        self._graph: Graph | None = None
        self._steps = 0
        if graph is None:
            graph = device.type == "cuda" and max_new_tokens >= _MIN_CAPTURED_TOKENS
        self._captures = graph and self.cache is not None

    def advance(self) -> None:
        """Add a token to each sequence; to one that has ended, the first stop token."""
        window = self.end - self.begin
        cut = window > self.model.config.context
        if cut:
            self.begin = self.end - max(1, self.model.config.context // 2)
        if cut or self._steps == 0 or self.cache is None:  # the window is read as a prompt
            self._accept(self.model.prefill(self.tokens[:, self.begin : self.end], self.cache))
        elif not self._captures or self._steps <= _EAGER_STEPS:
            self._decode()
        else:
            if self._graph is None:
                self._graph = Graph("decode")
                self._graph.capture(self._decode, warm_up=0)
            self._graph.replay()
        self._steps += 1
        self.end += 1

    def has_ended(self) -> bool:
        """Return whether every sequence has produced a stop token; synchronizes with the device."""
        return self._stop is not None and bool(self._done.all())

    def _decode(self) -> None:
        assert self.cache is not None  # for the type checker: callers have checked
        self._accept(self.model.decode(self._current, self.cache))

    def _accept(self, logits: Tensor) -> None:
        """Draw a token and record it, on the device alone, so that a graph can capture it."""
        uniform = self._uniform.index_select(0, self._drawn)[0]
        drawn = self.sampling.choose(logits, uniform)
        if self._stop is not None:
            drawn = torch.where(self._done, self._stop[0], drawn)
            self._done |= (drawn[:, None] == self._stop).any(-1)
        self.tokens.index_copy_(1, self._column, drawn[:, None])
        self._current.copy_(drawn)
        self._column += 1
        if self.sampling.temperature != 0:
            self._drawn += 1


def padded_prompt_length(time: int, context: int, cache: Cache | None) -> int:
    """Return the length to which a prompt of `time` tokens is padded, within the context and the cache."""
    length = min(cache_capacity(time), context)
    return length if cache is None else min(length, cache.k[0].shape[2])


def require_tokens(tokens: Tensor, context: int | None = None, name: str = "idx") -> None:
    """Raise ShapeError unless tokens are (B, T), 1 <= T <= context; UnsupportedDtype unless int32 or int64."""
    if tokens.dim() != 2 or tokens.shape[1] < 1:
        raise ShapeError(f"{name} must be (batch, time) with at least one token, got {tuple(tokens.shape)}")
    if tokens.dtype not in (torch.int32, torch.int64):
        raise UnsupportedDtype(f"{name} must be int32 or int64, got {tokens.dtype}")
    if context is not None and tokens.shape[1] > context:
        raise ShapeError(f"at most {context} tokens fit the context, got {tokens.shape[1]}")
