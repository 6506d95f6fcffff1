"""Base class of language models: text generation, loading and saving in Hugging Face's format.

Generation has a cache of keys and values. All state that changes from token to token is on the device: positions, drawn
tokens, which sequences have ended. One decoding step, sampling included, is therefore captured as a CUDA graph and
replayed, without synchronization until the end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from accelerant._renamed import renamed_arguments, understood_arguments
from accelerant.errors import ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.nn.layers import compute_dtype, dtype_of, modes_kept
from accelerant.nn.models import hugging_face
from accelerant.nn.models.hugging_face import is_run
from accelerant.runtime.files import JsonRecord
from accelerant.runtime.ledger import ledger
from accelerant.runtime.streams.graphs import Graph


class ModelConfig(JsonRecord):
    """Base class of the frozen dataclasses that describe a model."""

    __slots__ = ()

    def require_positive(self, *names: str) -> None:
        """Raise ConfigError unless the named fields are at least 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise ConfigError(f"{type(self).__name__}.{name} must be at least 1, got {getattr(self, name)}")


class LanguageModel(nn.Module):
    """A model built from a config that maps tokens to logits of the next token.

    Subclasses set their checkpoint layout, and implement `hidden`, `forward`, `loss` and decoding with a cache.
    """

    _layouts: ClassVar[tuple[hugging_face.Layout, ...]]
    config: Any
    positions: Tensor | None = None
    """Positions of the tokens, (T,) int64, in a process that has a part of a sequence; None for 0 to T - 1."""

    def parameter_count(self) -> int:
        """Return the number of trained values."""
        return sum(parameter.numel() for parameter in self.parameters())

    def hidden(self, idx: Tensor) -> Tensor:
        """Return the final normalized features, (B, T, width), of tokens (B, T)."""
        raise NotImplementedError

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
        raise NotImplementedError

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of the targets, in nats per token, summed in float32 or better.

        Args:
            idx: (B, T), as for `forward`.
            targets: (B, T), the token that follows each position; -100 excludes a position.

        Returns:
            A scalar, differentiable in the parameters.

        Raises:
            ShapeError: the shapes differ or T exceeds the context.
            UnsupportedDtype: idx or targets are not int32 or int64.
        """
        raise NotImplementedError

    def _require_targets(self, idx: Tensor, targets: Tensor) -> None:
        require_tokens(idx, self.config.context)
        require_tokens(targets, name="targets")
        if idx.shape != targets.shape:
            raise ShapeError(f"targets must have the shape of idx, {tuple(idx.shape)}, got {tuple(targets.shape)}")

    def can_cache(self) -> bool:
        """Return whether `decode` computes what the model does, which replaced modules or hooks prevent."""
        raise NotImplementedError

    def cache_shape(self) -> tuple[int, int, int]:
        """Return layers, kv_heads and width: the cache has so many keys for each token, and as many values."""
        raise NotImplementedError

    def activation_dtype(self) -> torch.dtype:
        """Return the dtype of activations and of the cache: that of the embedding, or autocast's."""
        return compute_dtype(next(self.parameters()))

    def prefill(self, idx: Tensor, cache: Cache | None) -> Tensor:
        """Read a prompt (B, T) into the cache; return float32 logits (B, vocab_size) of the next token."""
        raise NotImplementedError

    def decode(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Append one token of each sequence (B,) to the cache; return float32 logits (B, vocab_size) of the next."""
        raise NotImplementedError

    @torch.no_grad()
    def generate(
        self, idx: Tensor, max_new_tokens: int, *, temperature: float = 1.0, top_k: int | None = None,
        top_p: float | None = None, seed: int | None = None, generator: torch.Generator | None = None,
        stop: int | Sequence[int] | None = None, use_cache: bool = True,
        watch: Callable[[Tensor], None] = lambda _tokens: None,
    ) -> Tensor:  # fmt: skip
        """Continue each row by sampling token after token.

        The model reads a window: at first the prompt, or its last `context` tokens. The window grows by each token;
        when it would exceed the context it is cut to its last context // 2 tokens, which are read as a new prompt. On
        a GPU a step, sampling included, is one CUDA graph.

        Args:
            idx: (B, T) prompt, T at least 1.
            max_new_tokens: most tokens to add.
            temperature: divides the logits; 0 selects the most likely token.
            top_k: number of most likely tokens to keep; None keeps all.
            top_p: keep the most likely of these until their probabilities reach this sum, 0 < top_p <= 1; None keeps
                all.
            seed: makes the draw reproducible on one device.
            generator: random state to draw from, on idx's device; instead of seed.
            stop: one or several tokens that end a row. A row that ends before the others is filled with the first of
                them.
            use_cache: whether to cache keys and values of the window; False reads all of it for each token and yields
                the same tokens up to rounding.
            watch: receives the tokens so far, (B, T + n), now and then, to show the progress.

        Returns:
            (B, T + max_new_tokens), the prompt included, int64; fewer columns if every row has ended.

        Raises:
            ConfigError: a value is out of range, or both seed and generator are given.
            ShapeError: idx is not (B, T).
            UnsupportedDtype: idx is not int32 or int64.
        """
        require_tokens(idx)
        if max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
        sampling = Sampling(temperature, top_k, top_p)
        stops = () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)
        for token in stops:
            if not 0 <= token < self.config.vocab_size:
                raise ConfigError(f"stop must be tokens below {self.config.vocab_size}, got {token}")
        if seed is not None:
            if generator is not None:
                raise ConfigError("generate takes seed or generator, not both")
            generator = torch.Generator(device=idx.device).manual_seed(seed)
        if not max_new_tokens or not idx.shape[0]:
            return idx.long()
        with ledger().phase("sampling"), modes_kept(self):
            self.eval()
            cached = use_cache and self.can_cache()
            run = Decoding(self, idx, max_new_tokens, sampling, generator=generator, stop=stops, use_cache=cached)
            for count in range(1, max_new_tokens + 1):
                run.advance()
                if count % STOP_INTERVAL == 0 or count == max_new_tokens:
                    watch(run.tokens[:, : run.end])
                    if run.has_ended():
                        break
        tokens, prompt = run.tokens[:, : run.end], idx.shape[1]
        if not stops:
            return tokens
        ended = torch.isin(tokens[:, prompt:], torch.tensor(stops, device=tokens.device))
        lengths = torch.where(ended.any(-1), ended.long().argmax(-1) + 1, ended.shape[1])
        return tokens[:, : prompt + int(lengths.max())]

    @classmethod
    def from_pretrained(
        cls, source: str | os.PathLike[str] | nn.Module, *, dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> Self:  # fmt: skip
        """Build a model from Hugging Face weights: a GPT from GPT-2's, a Llama from Llama's and its kin's.

        Args:
            source: a folder with config.json and model.safetensors, or shards with their index, as written by
                transformers' save_pretrained (transformers itself is not needed); the folder of a run of
                `accelerant train`; or a transformers model.
            dtype: dtype of the parameters, or its name; None: that of the embedding.
            device: device of the parameters; None: the CPU for a folder, the model's device for a model.

        Returns:
            a model with the same logits and its own copy of the weights.

        Raises:
            ConfigError: no such folder.
            FormatError: a truncated or malformed file, a pickled checkpoint; a tensor that is missing, unexpected, or
                of another shape or dtype. Names the file or tensor.
            UnsupportedCase: a field of the configuration, which is named, asks for a feature that this model lacks.
        """
        dtype = dtype_of(dtype)
        if not isinstance(source, nn.Module) and is_run(source):
            from accelerant.nn.train.job import load_run  # which imports the models

            model = load_run(source, device)[0]
            if not isinstance(model, cls):
                kind = type(model).__name__
                raise UnsupportedCase(f"{source} is a run of a {kind}: {kind}.from_pretrained opens it")
            return model if dtype is None else model.to(dtype)
        return hugging_face.built(cls, hugging_face.described(source, cls._known_layouts()), dtype, device)

    @classmethod
    def _known_layouts(cls) -> tuple[hugging_face.Layout, ...]:
        """Return the checkpoint formats; raise UnsupportedCase for a model that has none."""
        layouts: tuple[hugging_face.Layout, ...] = getattr(cls, "_layouts", ())
        if not layouts:
            raise UnsupportedCase(
                f"{cls.__name__} has no format of Hugging Face's: save its state_dict() and its config"
            )
        return layouts

    @understood_arguments(save_directory="out")
    @renamed_arguments(path="out")
    def save_pretrained(self, out: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 10**9) -> None:
        """Write config.json and safetensors that transformers can load.

        Args:
            out: folder, created if absent; weights in it are replaced.
            max_shard_bytes: size limit of a file; a larger model is written as several files and an index.

        Raises:
            ConfigError: max_shard_bytes below 1.
            UnsupportedCase: the model has replaced layers, or lacks biases that the format requires; nothing is written
                then.
            OSError: the folder cannot be written.
        """
        hugging_face.save(self, self.config, out, self._known_layouts(), max_shard_bytes=max_shard_bytes)


# --- generation ------------------------------------------------------------------------------------------------------
STOP_INTERVAL = 16  # tokens between two checks whether every sequence has ended: a check synchronizes with the device
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
        """Allocate a cache for at least `tokens` tokens of each sequence; `shape` as of LanguageModel.cache_shape."""
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


_LARGEST_PENALTY = 1e6  # float32 holds logits times it


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution from which a token is drawn, given logits, with the options of LanguageModel.generate.

    The others are for nn.serving.Engine alone; neutral values turn them off.

    Attributes:
        min_p: drops tokens less likely than this part of the most likely one; 0 keeps all.
        repetition_penalty: divides the positive logits of tokens that occurred in prompt or answer, and multiplies
            their negative ones; above 0, 1 is neutral.
        presence_penalty: subtracted from the logits of tokens that occurred in the answer.
        frequency_penalty: the same, for each occurrence.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    _: KW_ONLY
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p must be from 0 to 1, got {self.min_p}")
        if not 1 / _LARGEST_PENALTY <= self.repetition_penalty <= _LARGEST_PENALTY:
            raise ConfigError(
                f"repetition_penalty must be from {1 / _LARGEST_PENALTY:g} to {_LARGEST_PENALTY:g}, "
                f"got {self.repetition_penalty}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= _LARGEST_PENALTY:
                raise ConfigError(
                    f"{name} must be from {-_LARGEST_PENALTY:g} to {_LARGEST_PENALTY:g}, got {getattr(self, name)}"
                )

    @property
    def penalizes(self) -> bool:
        """Return whether the distribution depends on the tokens before, beyond the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Draw a token (B,), int64, for each row of logits (B, V), float32, by inverting the cumulative distribution.

        `uniform`, (B,), holds draws from [0, 1); it is not read at temperature 0.
        """
        if self.temperature == 0:
            return argmax(logits)
        if self.temperature < 1e-20:  # the quotients would be infinite, and their softmax NaN
            logits = logits - logits.amax(-1, keepdim=True)
        logits = logits / max(self.temperature, torch.finfo(logits.dtype).tiny)
        k = logits.shape[-1] if self.top_k is None else min(self.top_k, logits.shape[-1])
        if k == logits.shape[-1] and self.top_p is None:
            return draw(torch.softmax(logits, dim=-1), uniform)
        best, ids = logits.topk(k, dim=-1) if self.top_p is None or self.top_k else logits.sort(-1, descending=True)
        probabilities = torch.softmax(best, dim=-1)
        if self.top_p is not None:
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        return ids.gather(-1, draw(probabilities, uniform)[:, None])[:, 0]


def argmax(logits: Tensor) -> Tensor:
    """Return the first maximum of each row; on a GPU in two stages: a row alone would occupy few multiprocessors."""
    if logits.shape[-1] % _ARGMAX_BLOCK or logits.is_cpu:
        return logits.argmax(dim=-1)
    blocks: Tensor = logits.unflatten(-1, (-1, _ARGMAX_BLOCK))
    largest, indices = blocks.max(dim=-1)
    block = largest.argmax(dim=-1, keepdim=True)
    return (block * _ARGMAX_BLOCK + indices.gather(-1, block))[:, 0]


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
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
        self, model: LanguageModel, idx: Tensor, max_new_tokens: int, sampling: Sampling, *,
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
        if cut := window > self.model.config.context:
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
