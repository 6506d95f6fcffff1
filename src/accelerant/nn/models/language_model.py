"""What every language model of ours is to its user: continued by tokens, read from Hugging Face's files, written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from accelerant.nn.models import generation, hugging_face
from accelerant.nn.models.generation import Decodable

__all__ = ["LanguageModel"]


class LanguageModel(nn.Module):
    """A model made of a config: tokens in, logits of the next token out.

    Subclasses name their layout, and have what generation asks of a model (accelerant.nn.models.generation.Decodable).
    """

    _layout: ClassVar[hugging_face.Layout[Any]]
    config: Any

    def parameter_count(self) -> int:
        """Number of trained values."""
        return sum(parameter.numel() for parameter in self.parameters())

    def generate(
        self,
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
        """Continue each row by sampling one token after another.

        The model reads a window: at first the prompt, or its last `context` tokens if it is longer. The window grows by
        each token; when it would pass the context it is cut to its last context // 2 tokens, which are read anew. On a
        GPU a step, sampling included, is one CUDA graph.

        Args:
            idx: (B, T) prompt, T at least 1.
            max_new_tokens: how many tokens to add at most.
            temperature: divides the logits; 0 takes the likeliest token always.
            top_k: keep only that many likeliest tokens; None keeps all.
            top_p: of these, keep the likeliest whose probabilities reach this sum, 0 < top_p <= 1; None keeps all.
            seed: makes the draw reproducible on one device.
            generator: the random state to draw from, on idx's device; instead of seed.
            stop: a token, or several, after which a row ends. A row that ends before the others is filled with the
                first of them.
            use_cache: whether to keep keys and values of the window; False reads all of it for each token, for the same
                tokens but for rounding.

        Returns:
            (B, T + max_new_tokens), the prompt included, int64; fewer columns where every row has ended.

        Raises:
            ConfigError: a number is out of range, or both seed and generator are given.
            ShapeError: idx is not (B, T).
            UnsupportedDtype: idx is not int32 or int64.
        """
        modes = {module: module.training for module in self.modules()}  # a part may be frozen, with a mode of its own
        self.eval()
        try:
            return generation.generate(
                cast("Decodable", self), idx, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                seed=seed, generator=generator, stop=stop, use_cache=use_cache,
            )  # fmt: skip
        finally:
            for module, training in modes.items():
                module.training = training

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str] | nn.Module,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Make a model of Hugging Face's weights: a GPT of GPT-2's, a Llama of Llama's.

        Args:
            source: a folder with config.json and model.safetensors, or shards with their index, as transformers'
                save_pretrained writes them (transformers itself is not needed); or a transformers model.
            dtype: of the parameters; None: that of the embedding.
            device: where to put them; None: the CPU for a folder, and where the model is.

        Returns:
            a model with the same logits, weights of its own.

        Raises:
            ConfigError: no such folder.
            FormatError: a file that is torn or not what it should be, a pickled checkpoint; a tensor that is missing,
                surplus, or of another shape or dtype, by its name.
            UnsupportedCase: the configuration asks for what this model does not do, by the field's name.
        """
        return hugging_face.load(cls, source, cls._layout, dtype, device)

    def save_pretrained(self, path: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 10**9) -> None:
        """Write config.json and safetensors as transformers' model of this kind reads them.

        Args:
            path: folder, made if it is not there; weights in it are replaced.
            max_shard_bytes: of a file; more makes several files and an index.

        Raises:
            ConfigError: max_shard_bytes below 1.
            UnsupportedCase: the model has layers that are no longer its own, or lacks biases that such a file has;
                nothing is written then.
            OSError: the folder cannot be written.
        """
        hugging_face.save(self, self.config, path, self._layout, max_shard_bytes=max_shard_bytes)
