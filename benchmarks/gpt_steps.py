"""Training steps of GPT-2: ours, and plain PyTorch's as the peer and the reference.

A step is called with tokens and targets, (B, T) each, and returns the loss. All steps clip the gradient and update with
AdamW of the same numbers; parameters are float32, computed with under autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerant.bench.ceilings import threads_text
from accelerant.bench.suites.model import TokenBatches, step_flops, step_times
from accelerant.errors import AccelerantError
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.optim import AdamW
from accelerant.nn.train.step import TrainStep

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
    where, times = torch.device("cpu"), []
    for length in (_FEW, _MORE):
        small = replace(config, context=length)
        step, data = step_of(small), TokenBatches.drawn(small, 1, where, contiguous=True)
        step(*data.batch(0))
        times.append(min(step_times(step, data, where, 0.0).samples))  # other work on the machine only adds
    if times[1] <= times[0]:
        raise AccelerantError(f"steps of {_FEW} and {_MORE} tokens took {times[0]:.3g} and {times[1]:.3g} ms")
    each = (times[1] - times[0]) / (_MORE - _FEW)
    note = f"float32, {threads_text()}, extrapolated from {_FEW} and {_MORE} tokens"
    return times[1] + each * (batch * config.context - _MORE), note


class PlainGPT(nn.Module):
    """GPT-2 as one writes it in plain PyTorch.

    Names and order of the parameters are those of nn.GPT, so that a state_dict fits both.

    Args:
        per_example: look positions up for each example, as Opacus requires; else once for the batch.
    """

    def __init__(self, config: GPTConfig, *, per_example: bool = False) -> None:
        super().__init__()
        self.config, self.per_example = config, per_example
        width, bias = config.width, config.bias
        self.wte = nn.Embedding(config.padded_vocab_size, width)
        self.wpe = nn.Embedding(config.context, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_1": nn.LayerNorm(width, eps=config.eps, bias=bias),
                    "attention": nn.ModuleDict(
                        {"qkv": nn.Linear(width, 3 * width, bias), "projection": nn.Linear(width, width, bias)}
                    ),
                    "norm_2": nn.LayerNorm(width, eps=config.eps, bias=bias),
                    "mlp": nn.ModuleDict(
                        {"up": nn.Linear(width, 4 * width, bias), "down": nn.Linear(4 * width, width, bias)}
                    ),
                }
            )
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(width, eps=config.eps, bias=bias)
        self.lm_head = None if config.tied else nn.Linear(width, config.padded_vocab_size, bias=False)

    @classmethod
    def like(cls, model: GPT, *, per_example: bool = False) -> PlainGPT:
        """Return a plain model with the weights of one of ours, on its device."""
        plain = cls(model.config, per_example=per_example).to(model.wte.weight.device)
        with torch.no_grad():
            for to, parameter in zip(plain.parameters(), model.parameters(), strict=True):
                to.copy_(parameter)
        return plain

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, vocabulary) of tokens (B, T)."""
        B, T = tokens.shape
        positions = torch.arange(T, device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions.repeat(B, 1) if self.per_example else positions)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)  # for the type checker: ModuleList is untyped
            attention, mlp = block["attention"], block["mlp"]
            assert isinstance(attention, nn.ModuleDict) and isinstance(mlp, nn.ModuleDict)  # noqa: PT018  as above
            qkv = attention["qkv"](block["norm_1"](x)).view(B, T, 3, self.config.heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + attention["projection"](mixed.transpose(1, 2).reshape(B, T, -1))
            hidden = functional.gelu(mlp["up"](block["norm_2"](x)), approximate="tanh")
            x = x + mlp["down"](hidden)
        x = self.norm(x)
        y: Tensor = functional.linear(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)
        return y[..., : self.config.vocab_size]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean cross entropy of targets (B, T), or the logits without targets."""
        logits = self.logits(tokens)
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


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
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=RATE, betas=BETAS, fused=device.type == "cuda")
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
