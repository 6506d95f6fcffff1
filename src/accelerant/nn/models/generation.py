"""Continuing sequences token by token, with the keys and values of earlier tokens kept.

A model takes part by a few methods (see Decodable): `prefill` reads a prompt, `decode` one more token of each sequence,
and `cache_shape` says what to keep for them. Everything that changes from token to token is on the device: positions,
what was drawn, who has ended. So one step of decoding, sampling included, is captured as one CUDA graph and replayed,
and nothing waits for the device until the end.
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

__all__ = ["Cache", "CacheShape", "Decodable", "Decoding", "Sampling", "generate", "prompt_length", "require_tokens"]

_STOP_INTERVAL = 16
"""Tokens between two looks at whether every sequence has ended: a look waits for the device."""

_ROUND = 64
"""Places of a cache are a multiple of this, so that kernels meet few sizes."""

_PROMPT_MULTIPLE = 64
"""Tokens of a prompt are rounded up to this: kernels then see few lengths, not each one."""

_EAGER = 2
"""Steps before the capture: in them kernels are compiled and libraries set up."""

_WORTH_CAPTURING = 8

_PIECE = 256
"""Of a row of logits whose largest is looked for by itself."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model keeps of each token: layers times kv_heads times width keys, and as many values."""

    layers: int
    kv_heads: int
    width: int


@dataclass(slots=True)
class Cache:
    """Keys and values of the tokens so far, in memory that stays.

    Attributes:
        k, v: for each layer (B, kv_heads, places, width), contiguous.
        lengths: (B,) int32, how many places hold something, on the device.
    """

    k: list[Tensor]
    v: list[Tensor]
    lengths: Tensor

    @classmethod
    def empty(cls, shape: CacheShape, batch: int, places: int, dtype: torch.dtype, device: torch.device) -> Cache:
        """Room for `places` tokens of each sequence, and a few more."""
        rounded = -(-places // _ROUND) * _ROUND
        size = (shape.layers, batch, shape.kv_heads, rounded, shape.width)
        k, v = (torch.zeros(size, dtype=dtype, device=device).unbind(0) for _ in range(2))
        return cls(list(k), list(v), torch.zeros(batch, dtype=torch.int32, device=device))

    def hold(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put the keys and values of a prompt (B, kv_heads, T, width) at the beginning of a layer."""
        self.k[layer][:, :, : k.shape[2]] = k
        self.v[layer][:, :, : v.shape[2]] = v


class Decodable(Protocol):
    """A model that can be continued."""

    config: Any  # with `context`, the most tokens it takes, and `vocab_size`

    def can_cache(self) -> bool:
        """Whether `decode` does what the whole model does; not so where its parts were replaced, or have hooks."""

    def cache_shape(self) -> CacheShape:
        """What `prefill` keeps for `decode`."""

    def activation_dtype(self) -> torch.dtype:
        """Of activations, and so of the cache: the parameters' dtype, or autocast's."""

    def prefill(self, idx: Tensor, cache: Cache | None) -> Tensor:
        """Read (B, T) tokens from position 0 on: float32 logits (B, vocab_size) of the next; fills the cache."""

    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Read one more token of each sequence (B,): float32 logits (B, vocab_size) of the next; grows the cache."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from logits.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token always.
        top_k: keep only that many likeliest tokens; None keeps all.
        top_p: of these, keep the likeliest whose probabilities reach this sum; None keeps all.
    """

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
        """One token of each row.

        Args:
            logits: (B, V), float32.
            uniform: (B,), numbers in [0, 1): where in the cumulated probabilities to draw. Not read at temperature 0.

        Returns:
            (B,), int64.
        """
        if self.temperature == 0:
            return _likeliest(logits)
        logits = logits / self.temperature
        k = logits.shape[-1] if self.top_k is None else min(self.top_k, logits.shape[-1])
        if k == logits.shape[-1] and self.top_p is None:
            return _draw(torch.softmax(logits, dim=-1), uniform)
        best, ids = logits.topk(k, dim=-1) if self.top_p is None or self.top_k else logits.sort(-1, descending=True)
        probabilities = torch.softmax(best, dim=-1)
        if self.top_p is not None:
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        return ids.gather(-1, _draw(probabilities, uniform)[:, None])[:, 0]


def _likeliest(logits: Tensor) -> Tensor:
    """The first of each row's largest, in two steps where a row alone would keep few multiprocessors busy."""
    if logits.shape[-1] % _PIECE:
        return logits.argmax(dim=-1)
    pieces: Tensor = logits.unflatten(-1, (-1, _PIECE))
    best, places = pieces.max(dim=-1)
    piece = best.argmax(dim=-1, keepdim=True)
    return (piece * _PIECE + places.gather(-1, piece))[:, 0]


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first place at which the cumulated probabilities pass a share of their sum."""
    flat = probabilities.shape[0] == 1  # one row of a table is summed by one multiprocessor, a vector by all
    cumulated = probabilities[0].cumsum(0)[None] if flat else probabilities.cumsum(-1)
    places = torch.searchsorted(cumulated, uniform[:, None] * cumulated[:, -1:], right=True)
    last = (probabilities > 0).long().mul_(torch.arange(probabilities.shape[-1], device=places.device)).amax(-1)
    return torch.minimum(places[:, 0], last)  # a product may round up to the sum


class Decoding:
    """Sequences being continued: `start`, then `advance` again and again.

    Args:
        model: that continues them.
        idx: (B, T) prompt.
        max_new_tokens: how many tokens may come.
        sampling: how each is drawn.
        generator: the random state to draw from; None for torch's own.
        stop: tokens after which a sequence ends.
        use_cache: False: every step reads the whole window anew.
        graph: whether to capture steps as a CUDA graph; None: on a GPU, where enough of them come.

    A window is what the model reads: at first the prompt, or its last `context` tokens if it is longer. It grows by
    each token; when it would pass the context it is cut to its last context // 2 tokens, which are read anew.
    """

    def __init__(
        self,
        model: Decodable,
        idx: Tensor,
        max_new_tokens: int,
        sampling: Sampling,
        *,
        generator: torch.Generator | None = None,
        stop: Sequence[int] = (),
        use_cache: bool = True,
        graph: bool | None = None,
    ) -> None:
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
            places = min(model.config.context, time + max_new_tokens)
            self.cache = Cache.empty(model.cache_shape(), batch, places, model.activation_dtype(), device)
        self._graph: Graph | None = None
        self._steps = 0
        if graph is None:
            graph = device.type == "cuda" and max_new_tokens >= _WORTH_CAPTURING
        self._captures = graph and self.cache is not None

    def advance(self) -> None:
        """Add a token to each sequence; to one that has ended, its stop token again (the first of them)."""
        window = self.end - self.begin
        if window > self.model.config.context:
            window = max(1, self.model.config.context // 2)
            self.begin = self.end - window
            self._read(window)
        elif self._steps == 0 or self.cache is None:
            self._read(window)
        else:
            self._step()
        self.end += 1

    def has_ended(self) -> bool:
        """Whether every sequence has met a stop token; waits for the device."""
        return self._stop is not None and bool(self._done.all())

    def _read(self, window: int) -> None:
        """Take the window as a prompt."""
        self._accept(self.model.prefill(self.tokens[:, self.end - window : self.end], self.cache))
        self._steps += 1

    def _step(self) -> None:
        if not self._captures or self._steps <= _EAGER:
            self._decode()
        else:
            if self._graph is None:
                self._graph = Graph("decode")
                self._graph.capture(self._decode, warm_up=0)
            self._graph.replay()
        self._steps += 1

    def _decode(self) -> None:
        assert self.cache is not None  # for the type checker: asked by those who call
        self._accept(self.model.decode(self._current, self.cache))

    def _accept(self, logits: Tensor) -> None:
        """Draw from the logits and write down what was drawn; device-side alone, so that a graph can hold it."""
        uniform = self._uniform.index_select(0, self._drawn)[0]
        chosen = self.sampling.choose(logits, uniform)
        if self._stop is not None:
            chosen = torch.where(self._done, self._stop[0], chosen)
            self._done |= (chosen[:, None] == self._stop).any(-1)
        self.tokens.index_copy_(1, self._column, chosen[:, None])
        self._current.copy_(chosen)
        self._column += 1
        if self.sampling.temperature != 0:
            self._drawn += 1


@torch.no_grad()
def generate(
    model: Decodable,
    idx: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    stop: int | Sequence[int] | None = None,
    use_cache: bool = True,
) -> Tensor:
    """Continue each row of a prompt by one token after another; see the models' `generate`."""
    require_tokens(idx)
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    sampling = Sampling(temperature, top_k, top_p)
    stops = () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)
    for each in stops:
        if not 0 <= each < model.config.vocab_size:
            raise ConfigError(f"stop must be tokens below {model.config.vocab_size}, got {each}")
    if seed is not None:
        if generator is not None:
            raise ConfigError("generate takes seed or generator, not both")
        generator = torch.Generator(device=idx.device).manual_seed(seed)
    if not max_new_tokens or not idx.shape[0]:
        return idx.long()
    use_cache = use_cache and model.can_cache()
    run = Decoding(model, idx, max_new_tokens, sampling, generator=generator, stop=stops, use_cache=use_cache)
    for made in range(1, max_new_tokens + 1):
        run.advance()
        if made % _STOP_INTERVAL == 0 and run.has_ended():
            break
    return _cut(run.tokens[:, : run.end], idx.shape[1], stops)


def _cut(tokens: Tensor, prompt: int, stops: Sequence[int]) -> Tensor:
    """Without the columns in which every sequence has ended already."""
    if not stops:
        return tokens
    ended = torch.isin(tokens[:, prompt:], torch.tensor(stops, device=tokens.device))
    width = ended.shape[1]
    first = torch.where(ended.any(-1), ended.long().argmax(-1) + 1, width)
    return tokens[:, : prompt + int(first.max())]


def prompt_length(time: int, context: int, cache: Cache | None) -> int:
    """Tokens to read for a prompt of so many: a few more on the right, as far as the context and the cache go."""
    length = min(-(-time // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE, context)
    return length if cache is None else min(length, cache.k[0].shape[2])


def require_tokens(tokens: Tensor, context: int | None = None, name: str = "idx") -> None:
    """Raise ShapeError unless tokens are (B, T), 1 <= T <= context, UnsupportedDtype unless int32 or int64."""
    if tokens.dim() != 2 or tokens.shape[1] < 1:
        raise ShapeError(f"{name} must be (batch, time) with at least one token, got {tuple(tokens.shape)}")
    if tokens.dtype not in (torch.int32, torch.int64):
        raise UnsupportedDtype(f"{name} must be int32 or int64, got {tokens.dtype}")
    if context is not None and tokens.shape[1] > context:
        raise ShapeError(f"at most {context} tokens fit the context, got {tokens.shape[1]}")
