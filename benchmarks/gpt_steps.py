"""Training steps of GPT-2: ours, and plain PyTorch's as the peer and the reference.

A step is called with tokens and targets, (B, T) each, and returns the loss. All steps clip the gradient and update with
AdamW of the same numbers; parameters are float32, computed with under autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelerant.bench.timer import threads_text, time_in_turns
from accelerant.errors import AccelerantError
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.optim import AdamW
from accelerant.nn.train.step import TrainStep
from benchmarks.model import TokenBatches, step_flops, step_times
from benchmarks.plain_models import PlainGPT

__all__ = [
    "BETAS",
    "RATE",
    "WARM_UP",
    "WEIGHT_DECAY",
    "PlainGPT",
    "Step",
    "TokenBatches",
    "cpu_step_ms",
    "own_step",
    "parameter_groups",
    "plain_step",
    "step_flops",
    "step_times",
]

WARM_UP = 6
"""Steps before the timed ones."""

RATE, BETAS, WEIGHT_DECAY, _CLIP = 6e-4, (0.9, 0.95), 0.1, 1.0

Step = Callable[[Tensor, Tensor], Tensor]


_FEW, _MORE = 64, 256
"""Tokens of the two steps from which the CPU column of a large step is extrapolated."""


def cpu_step_ms(step_of: Callable[[GPTConfig], Step], config: GPTConfig, batch: int) -> tuple[float, str]:
    """Return the milliseconds of a step on the CPU, extrapolated from steps of few tokens, and a note that says so.

    A step takes a time for the update and one for each token; two lengths give both. Attention's share, which grows
    with the square of the length, is left out. `step_of` returns a step of a model with another context.

    Raises:
        AccelerantError: the longer step was not slower, on a machine that does other work.
    """
    where, steps = torch.device("cpu"), []
    for length in (_FEW, _MORE):
        small = replace(config, context=length)
        steps.append(partial(step_of(small), *TokenBatches.drawn(small, 1, where, contiguous=True).batch(0)))
    times = [min(timing.samples) for timing in time_in_turns(steps)]  # other work on the machine only adds
    if times[1] <= times[0]:
        raise AccelerantError(f"steps of {_FEW} and {_MORE} tokens took {times[0]:.3g} and {times[1]:.3g} ms")
    each = (times[1] - times[0]) / (_MORE - _FEW)
    note = f"float32, {threads_text()}, extrapolated from {_FEW} and {_MORE} tokens"
    return times[1] + each * (batch * config.context - _MORE), note


def parameter_groups(model: nn.Module, decay: float = WEIGHT_DECAY) -> list[dict[str, Any]]:
    """Return the optimizer's groups: matrices decay, vectors do not."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


def plain_step(model: PlainGPT, *, compiled: bool = False, precision: torch.dtype | None = torch.bfloat16) -> Step:
    """Return a step of the plain model with torch's fused AdamW; `precision` is of autocast, None for float32."""
    device = model.wte.weight.device
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=RATE, betas=BETAS, fused=device.type in ("cpu", "cuda"))
    if compiled:
        torch.compiler.reset()  # else a second batch size is compiled for any size, which is slower
    loss_of = torch.compile(model) if compiled else model

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=precision or torch.bfloat16, enabled=precision is not None):
            loss: Tensor = loss_of(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        return loss.detach()

    return step


def own_step(model: GPT, *, precision: torch.dtype | None = torch.bfloat16, graph: bool | None = None) -> Step:
    """Return the same step of ours."""
    optimizer = AdamW(parameter_groups(model), lr=RATE, betas=BETAS)
    step = TrainStep(model, optimizer, model.loss, max_grad_norm=_CLIP, precision=precision, graph=graph)
    return lambda tokens, targets: step([(tokens, targets)], RATE).loss
