"""The optimizer of a training: weight-decay groups, the learning rate of each step, and its state as named tensors."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerant.errors import ConfigError, FormatError, UnsupportedCase
from accelerant.nn.optim import SGD, AdamW
from accelerant.nn.train.config import TrainConfig
from accelerant.runtime.files import clipped

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_KINDS = {"AdamW": ("step", "exp_avg", "exp_avg_sq")}
"""State of each trained parameter after a step, by the optimizer's class."""


def make_optimizer(model: nn.Module, config: TrainConfig) -> AdamW | SGD:
    """Return the config's optimizer, which also clips; matrices decay, vectors (biases and norms) do not."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ConfigError(f"{type(model).__name__} has no parameter that requires a gradient")
    for pattern in config.no_decay:
        if not fnmatch.filter([name for name, _ in named], pattern):
            raise ConfigError(f"no_decay: {pattern!r} matches no parameter of {type(model).__name__}")
    spared = {name for name, parameter in named if parameter.dim() < 2}
    spared |= {name for name, _ in named for pattern in config.no_decay if fnmatch.fnmatchcase(name, pattern)}
    groups = [
        {"params": [p for name, p in named if name not in spared], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named if name in spared], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rate, norm = config.learning_rate, config.clip or None
    if config.optimizer == "sgd":
        return SGD(groups, lr=rate, momentum=config.momentum, max_grad_norm=norm)
    return AdamW(groups, lr=rate, betas=(config.beta1, config.beta2), eps=config.eps, max_grad_norm=norm)


def learning_rate(config: TrainConfig, steps: int, step: int) -> float:
    """Return the learning rate of a step, 0 for the first: linear warm-up, then the schedule down to `final_lr_ratio`.

    cosine: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5, without restarts.
    """
    peak = config.learning_rate
    warmup = max(1, round(config.warmup * steps))
    if step < warmup and config.warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, steps - warmup)) if config.warmup else step / max(1, steps)
    fraction = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return peak * (config.final_lr_ratio + (1 - config.final_lr_ratio) * fraction)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state by "parameter.kind" names: tensors, and plain numbers; UnsupportedCase for any other type."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{kind}"] = value
            elif value is None or isinstance(value, bool | int | float | str):
                numbers[f"{name}.{kind}"] = value
            else:
                raise UnsupportedCase(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} ({kind} of {name}): "
                    "checkpoints hold tensors and numbers; train without a folder"
                )
    return tensors, numbers


def require_optimizer_tensors(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, found: Mapping[str, Tensor],
    numbers: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Raise FormatError unless a checkpoint's optimizer state is complete and of these parameters and shapes."""
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if parameter in trained}
    ours = isinstance(optimizer, AdamW | SGD)  # their kernels rely on tensors of these shapes
    for full, number in (numbers or {}).items():
        if full.rpartition(".")[0] not in shapes or full in found or (ours and number is not None):
            raise FormatError(f"checkpoint {path} is of another model: optimizer.{clipped(full)} is {clipped(number)}")
    owners: dict[str, set[str]] = {}
    for full, tensor in found.items():
        name, _, kind = full.rpartition(".")
        if name not in shapes:
            raise FormatError(f"checkpoint {path} is of another model: optimizer.{full} belongs to no parameter")
        scalar = kind == "step" if ours else not tensor.dim()
        if tensor.shape != (() if scalar else shapes[name]):
            here, there = () if scalar else tuple(shapes[name]), tuple(tensor.shape)
            raise FormatError(f"checkpoint {path} is of another shape: optimizer.{full} is {there}, not {here}")
        if ours and not tensor.is_floating_point():
            raise FormatError(f"checkpoint {path} is of another dtype: optimizer.{full} is {tensor.dtype}")
        owners.setdefault(name, set()).add(kind)
    for name, kinds in owners.items():
        lacking = [kind for kind in _KINDS.get(type(optimizer).__name__, ()) if kind not in kinds]
        if lacking:
            raise FormatError(f"checkpoint {path} is of another model: optimizer.{name}.{lacking[0]} is not in it")


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]
) -> None:
    """Load the result of `optimizer_state`, whose names and shapes were checked."""
    index = {parameter: i for i, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    names = {name: index[parameter] for name, parameter in model.named_parameters() if parameter in index}
    state: dict[int, dict[str, Any]] = {}
    for full, value in {**tensors, **numbers}.items():
        name, _, kind = full.rpartition(".")
        state.setdefault(names[name], {})[kind] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
