"""The state of a training as tensors and JSON: model, optimiser, random generators; and back again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accelerant.errors import ConfigError, FormatError, UnsupportedCase
from accelerant.nn.train.checkpoint import require_same_shapes
from accelerant.nn.train.config import TrainConfig
from accelerant.nn.train.optim import load_optimizer, optimizer_state, require_optimizer_tensors

__all__ = ["forked_random", "gathered", "random_state", "require_same_config", "restore_random", "restored"]

_MAY_DIFFER = frozenset(
    {
        *("accumulate", "epochs", "steps", "device", "deterministic", "graph", "recompute"),
        *("evaluate_every", "evaluations", "patience", "min_delta", "keep_best"),
        *("folder", "checkpoint_every", "checkpoint_every_s", "log", "profile", "predict_memory"),
    }
)
"""Settings that do not change what a step computes beyond rounding; the number of steps is compared by itself."""


def gathered(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that the next step depends on, but for the data: tensors by name, and JSON values.

    Raises:
        UnsupportedCase: the model or the optimiser keeps something that a checkpoint cannot hold.
    """
    tensors = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise UnsupportedCase(f"the state of the model has a {type(value).__name__} ({name}): no checkpoint")
        tensors[f"model.{name}"] = value
    states, numbers = optimizer_state(model, optimizer)
    tensors |= {f"optimizer.{name}": value for name, value in states.items()}
    drawn, rest = random_state(device)
    tensors |= {f"random.{name}": value for name, value in drawn.items()}
    return tensors, {"optimizer": numbers, "optimizer_class": type(optimizer).__name__, "random": rest}


def restored(
    path: Path,
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Put back what `gathered` gave, after checking all of it; the random generators last.

    Raises:
        FormatError: it is of another model or shape.
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    found = _part("model", tensors)
    states = _part("optimizer", tensors)
    require_same_shapes(path, _prefixed("model", found), _prefixed("model", own))
    require_optimizer_tensors(path, model, optimizer, states)
    kind = type(optimizer).__name__
    if (wanted := document.get("optimizer_class", kind)) != kind:
        raise FormatError(f"checkpoint {path} is of another optimizer: {wanted}, got {kind}")
    model.load_state_dict(found)
    load_optimizer(model, optimizer, states, document.get("optimizer", {}))
    restore_random(_part("random", tensors), document.get("random", {}), device)


def require_same_config(path: Path, found: Mapping[str, Any], config: TrainConfig) -> None:
    """Check that a checkpoint's training is the one that goes on.

    Raises:
        ConfigError: a setting that changes the training differs.
    """
    for name, value in config.to_dict().items():
        if name not in _MAY_DIFFER and name in found and found[name] != value:
            raise ConfigError(f"checkpoint {path} was trained with {name}={found[name]!r}, got {value!r}")


def random_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of the generators of torch (CPU, and the GPU that is used), NumPy and Python."""
    tensors = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    version, words, gauss = random.getstate()
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    rest: dict[str, Any] = {"python": [version, gauss]}
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    if kind == "MT19937":  # a program may put another one in its place; that one is its own affair
        tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
        rest["numpy"] = [int(place), int(has_gauss), float(cached)]
    return tensors, rest


def restore_random(tensors: Mapping[str, Tensor], rest: Mapping[str, Any], device: torch.device) -> None:
    """Put back what `random_state` gave, as far as it is there."""
    if "cpu" in tensors:
        torch.set_rng_state(tensors["cpu"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
    if "python" in tensors and "python" in rest:
        version, gauss = rest["python"]
        random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    if "numpy" in tensors and "numpy" in rest:
        place, has_gauss, cached = rest["numpy"]
        np.random.set_state(("MT19937", tensors["numpy"].numpy().astype(np.uint32), place, has_gauss, cached))


@contextmanager
def forked_random(seed: int | None = None) -> Iterator[None]:
    """The generators of the CPU (torch, NumPy, Python) are as before after the block.

    Args:
        seed: where they start inside; None: where they are.
    """
    host = torch.device("cpu")
    before = random_state(host)
    if seed is not None:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        restore_random(*before, host)


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _part(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
