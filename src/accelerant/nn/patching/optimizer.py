"""Steps of torch's Adam and AdamW over the parameters of patched models, by torch's fused kernels.

By default torch takes a kernel for each part of such a step, each of which reads and writes all parameters' memory: as
much time as the replays of a small model. The fused kernels compute the same in one pass. An optimizer is changed
before its first step alone, while it has no state.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_DEFAULTS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def add(model: nn.Module) -> None:
    """Let optimizers of a model's parameters take fused kernels, from their first step on."""
    _register()
    _models.add(model)


def discard(model: nn.Module) -> None:
    """Leave the optimizers alone that have not made a step yet."""
    _models.discard(model)


@functools.cache
def _register() -> Any:
    return register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _seen or torch.compiler.is_compiling():
        return
    _seen.add(optimizer)
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not optimizer.state:
        ours = {id(param) for model in _models for param in model.parameters()}
        for group in optimizer.param_groups:
            usual = _DEFAULTS.items() <= group.items() and not isinstance(group["lr"], Tensor)
            if usual and all(id(x) in ours and _is_plain(x) for x in group["params"]):
                group["fused"] = True


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.is_cuda and x.is_floating_point()
