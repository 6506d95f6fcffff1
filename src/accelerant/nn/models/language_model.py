"""Base class of language models: text generation, loading and saving in Hugging Face's format."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.nn.layers import modes_kept
from accelerant.nn.models import hugging_face
from accelerant.nn.models.generation import STOP_INTERVAL, Decodable, Decoding, Sampling, require_tokens
from accelerant.nn.models.hugging_face import is_run
from accelerant.runtime.files import JsonRecord
from accelerant.runtime.ledger import ledger


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

    Subclasses set their checkpoint layout and implement accelerant.nn.models.generation.Decodable.
    """

    _layout: ClassVar[hugging_face.Layout[Any]]
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
        model = cast("Decodable", self)
        with ledger().phase("sampling"), modes_kept(self):
            self.eval()
            cached = use_cache and model.can_cache()
            run = Decoding(model, idx, max_new_tokens, sampling, generator=generator, stop=stops, use_cache=cached)
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
        cls, source: str | os.PathLike[str] | nn.Module, *, dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:  # fmt: skip
        """Build a model from Hugging Face weights: a GPT from GPT-2's, a Llama from Llama's.

        Args:
            source: a folder with config.json and model.safetensors, or shards with their index, as written by
                transformers' save_pretrained (transformers itself is not needed); the folder of a run of
                `accelerant train`; or a transformers model.
            dtype: dtype of the parameters; None: that of the embedding.
            device: device of the parameters; None: the CPU for a folder, the model's device for a model.

        Returns:
            a model with the same logits and its own copy of the weights.

        Raises:
            ConfigError: no such folder.
            FormatError: a truncated or malformed file, a pickled checkpoint; a tensor that is missing, unexpected, or
                of another shape or dtype. Names the file or tensor.
            UnsupportedCase: a field of the configuration, which is named, asks for a feature that this model lacks.
        """
        if not isinstance(source, nn.Module) and is_run(source):
            from accelerant.nn.train.job import load_run  # which imports the models

            model = load_run(source, device)[0]
            if not isinstance(model, cls):
                kind = type(model).__name__
                raise UnsupportedCase(f"{source} is a run of a {kind}: {kind}.from_pretrained opens it")
            return model if dtype is None else model.to(dtype)
        return hugging_face.load(cls, source, cls._known_layout(), dtype, device)

    @classmethod
    def _known_layout(cls) -> hugging_face.Layout[Any]:
        """Return the checkpoint format; raise UnsupportedCase for a model that has none."""
        layout: hugging_face.Layout[Any] | None = getattr(cls, "_layout", None)
        if layout is None:
            raise UnsupportedCase(
                f"{cls.__name__} has no format of Hugging Face's: save its state_dict() and its config"
            )
        return layout

    def save_pretrained(self, path: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 10**9) -> None:
        """Write config.json and safetensors that transformers can load.

        Args:
            path: folder, created if absent; weights in it are replaced.
            max_shard_bytes: size limit of a file; a larger model is written as several files and an index.

        Raises:
            ConfigError: max_shard_bytes below 1.
            UnsupportedCase: the model has replaced layers, or lacks biases that the format requires; nothing is written
                then.
            OSError: the folder cannot be written.
        """
        hugging_face.save(self, self.config, path, self._known_layout(), max_shard_bytes=max_shard_bytes)
