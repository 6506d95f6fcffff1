"""Compilation of all kernels that a Hugging Face model needs, ahead of the process that trains it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerant.config import override
from accelerant.errors import CompileError, ConfigError, MissingDependency
from accelerant.nn.patching.api import patch
from accelerant.nn.patching.choice import remember
from accelerant.runtime.compilation import background

_POLL_S = 0.05
_AUTOMATIC = ("MaskedLM", "CausalLM", "Seq2SeqLM")


def model_of(name: str, device: torch.device) -> nn.Module:
    """Return a model of transformers with random weights: of a folder's config.json, or of a type's default config."""
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency("transformers", "huggingface", "--model") from error
    try:
        folder = Path(name).is_dir()
        config = transformers.AutoConfig.from_pretrained(name) if folder else transformers.AutoConfig.for_model(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {name}: {error}") from error
    kinds: list[Any] = [getattr(transformers, each, None) for each in getattr(config, "architectures", None) or ()]
    mappings = (getattr(transformers, f"AutoModelFor{each}")._model_mapping for each in _AUTOMATIC)
    kinds += [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    for kind in filter(None, kinds):
        if {"input_ids", "labels"} <= inspect.signature(kind.forward).parameters.keys():
            with device:
                model: nn.Module = kind._from_config(config)
            return model.train()
    raise ConfigError(f"--model {name}: {type(config).__name__} has no language model that takes input_ids and labels")


def compile_kernels(
    model: nn.Module, batch: int, tokens: int, low: torch.dtype | None, progress: Callable[[str], None] = lambda _: None
) -> list[str]:  # fmt: skip
    """Patch a language model and compile the kernels of its training step and of its evaluation on its device.

    `low` is the dtype of autocast, None for none. Returns the names of the kernels that were not in the disk cache;
    raises CompileError if the child processes fail.
    """
    patch(model, graph=False)
    background.start()
    before = len(background.asked()[0])
    with override(race="off"):  # calls run on our ops, without a comparison
        for train in (True, False):
            while _misses(model.train(train), torch.zeros(batch, tokens, dtype=torch.long), low):
                while (found := background.asked())[1]:
                    total = len(found[0]) - before
                    progress(f"compiled: {total - found[1]} of {total} kernels")
                    time.sleep(_POLL_S)
                if not background.is_ready():  # which warns of the reason
                    raise CompileError(f"the kernels of {type(model).__name__} are not compiled")
    if next(model.parameters()).is_cuda:
        remember(model)
    return background.asked()[0][before:]


def _misses(model: nn.Module, ids: torch.Tensor, low: torch.dtype | None) -> int:
    """Run a step, an evaluation if the model is not in training mode; return how many operations lacked kernels."""
    device, before = next(model.parameters()).device, background.misses()
    ids = ids.to(device)
    with torch.autocast(device.type, low, enabled=low is not None), torch.set_grad_enabled(model.training):
        loss = model(input_ids=ids, labels=ids)["loss"]
    if model.training:
        loss.backward()
        model.zero_grad()
    return background.misses() - before
