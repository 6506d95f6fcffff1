"""AdamW with GPT's weight-decay groups, its schedule, and its state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelerant.nn.train.presets import Recipe

__all__ = ["learning_rate", "load_optimizer_tensors", "make_optimizer", "optimizer_tensors", "set_learning_rate"]

_STATE = ("step", "exp_avg", "exp_avg_sq")


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, vectors (biases and norms) do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (recipe.beta1, recipe.beta2)
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=betas, eps=1e-8, fused=True)


def learning_rate(recipe: Recipe, step: int) -> float:
    """The rate of a step, 0 the first: a linear warm-up, then half a cosine to `final_lr_ratio` of the peak."""
    warmup = max(1, round(recipe.warmup * recipe.steps))
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, recipe.steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return recipe.learning_rate * (recipe.final_lr_ratio + (1 - recipe.final_lr_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use a rate in every group from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state under "parameter.kind" names; empty before the first step."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{kind}"] = value
    return tensors


def expected_optimizer_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors without memory that have the names and shapes of the state after a step."""
    expected = {}
    for name, parameter in model.named_parameters():
        for kind in _STATE:
            shape = () if kind == "step" else parameter.shape
            expected[f"{name}.{kind}"] = torch.empty(shape, device="meta")
    return expected


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave; names and shapes were checked before."""
    index = {parameter: i for i, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    state: dict[int, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        state[index[parameter]] = {kind: tensors[f"{name}.{kind}"] for kind in _STATE}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
