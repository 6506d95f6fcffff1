"""The steps of a training of which the loss curve is wanted: plain PyTorch's, and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accelerant.nn import GPT
from accelerant.nn.optim import AdamW
from accelerant.nn.train.presets import Recipe
from accelerant.nn.train.step import TrainStep
from benchmarks.training import PlainGPT

__all__ = ["Made", "own_run", "plain_run"]

Made = tuple[nn.Module, torch.optim.Optimizer, Callable[[Tensor, Tensor, float], Tensor]]
"""Model, optimiser, and the step: tokens, targets and learning rate to the loss, on the device."""


def plain_run(model: PlainGPT, recipe: Recipe, low: torch.dtype | None) -> Made:
    """As one writes it: torch's optimiser, its clipping, autocast.

    On a GPU torch captures the step as a CUDA graph, the same kernels in the same order: eagerly a step of few tokens
    waits for the host.

    Args:
        model: on its device.
        recipe: the optimiser's numbers.
        low: the dtype of autocast; None for none.
    """
    where = model.wte.weight.device
    gpu = where.type == "cuda"
    optimizer = torch.optim.AdamW(
        _groups(model, recipe.weight_decay),
        lr=torch.tensor(recipe.learning_rate, device=where) if gpu else recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        fused=gpu,
        capturable=gpu,
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(where.type, dtype=low or torch.bfloat16, enabled=low is not None):
            loss: Tensor = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        return loss.detach()

    run = _Captured(step) if gpu else step

    def rated(tokens: Tensor, targets: Tensor, rate: float) -> Tensor:
        for group in optimizer.param_groups:
            if gpu:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return run(tokens, targets)

    return model, optimizer, rated


def own_run(model: GPT, recipe: Recipe, precision: torch.dtype | None) -> Made:
    """The same of ours; float8_e4m3fn for fp8."""
    groups = _groups(model, recipe.weight_decay)
    optimizer = AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2))
    step = TrainStep(model, optimizer, model.loss, max_grad_norm=recipe.clip, precision=precision)
    return model, optimizer, lambda tokens, targets, rate: step([(tokens, targets)], rate).loss


class _Captured:
    """A step of plain PyTorch, replayed as a CUDA graph after a few eager ones."""

    _EAGER = 3

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._step = step
        self._done = 0
        self._stream = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()
        self._inputs: tuple[Tensor, ...] = ()
        self._loss = torch.empty(0)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self._done += 1
        if self._done <= self._EAGER:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                loss = self._step(tokens, targets)
            torch.cuda.current_stream().wait_stream(self._stream)
            return loss
        if not self._inputs:
            self._inputs = tokens.clone(), targets.clone()
            with torch.cuda.graph(self._graph):
                self._loss = self._step(*self._inputs)
        for to, given in zip(self._inputs, (tokens, targets), strict=True):
            to.copy_(given)
        self._graph.replay()
        return self._loss.clone()


def _groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
