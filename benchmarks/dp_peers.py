"""What private steps are measured beside: plain PyTorch without privacy, and Opacus in its three modes.

All train the same architecture, GPT-2 with an output layer of its own (Opacus does not take a tied one under ghost
clipping), with float32 parameters under autocast and torch's AdamW. Opacus is not needed to use Accelerant; where it
does not load its rows say so.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerant.errors import UnsupportedCase
from accelerant.nn import GPT, GPTConfig
from benchmarks.training import _BETAS, _DECAY, _RATE, PlainGPT, plain_step

__all__ = ["PEERS", "Step", "UntiedGPT", "opacus_step", "peer_step"]

PEERS = ("torch", "opacus ghost", "opacus fast", "opacus hooks")
"""Plain PyTorch without privacy; Opacus with ghost norms, with instantiated norms, and with per-example gradients."""

Step = Callable[[Tensor, Tensor], Tensor]
"""Called with tokens and targets, (B, T) each; gives the loss."""


class _Block(nn.Module):
    """Parameters in the order of those of nn.layers.TransformerBlock."""

    def __init__(self, width: int, heads: int, *, bias: bool, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width, eps=eps, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.projection = nn.Linear(width, width, bias)
        self.norm_2 = nn.LayerNorm(width, eps=eps, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias)
        self.down = nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        x = x + self.projection(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return y


class UntiedGPT(nn.Module):
    """GPT-2 with an output layer of its own, as one writes it in plain PyTorch.

    Args:
        config: of the model; `tied` must be False.
        per_example: look positions up for each example, as Opacus needs it; else once for the batch.
    """

    def __init__(self, config: GPTConfig, *, per_example: bool = False) -> None:
        super().__init__()
        self.config, self.per_example = config, per_example
        self.wte = nn.Embedding(config.padded_vocab_size, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(
            *(_Block(config.width, config.heads, bias=config.bias, eps=config.eps) for _ in range(config.layers))
        )
        self.norm = nn.LayerNorm(config.width, eps=config.eps, bias=config.bias)
        self.lm_head = nn.Linear(config.width, config.padded_vocab_size, bias=False)

    @classmethod
    def like(cls, model: GPT, *, per_example: bool = False) -> UntiedGPT:
        """With the numbers of a model of ours, on its device.

        Raises:
            UnsupportedCase: the model's output layer is its embedding.
        """
        if model.config.tied:
            raise UnsupportedCase("the peers' model has an output layer of its own: give a config with tied=False")
        plain = cls(model.config, per_example=per_example).to(model.wte.weight.device)
        with torch.no_grad():
            for to, given in zip(plain.parameters(), model.parameters(), strict=True):
                to.copy_(given)
        return plain

    def logits(self, tokens: Tensor) -> Tensor:
        """(B, T, vocabulary) of tokens (B, T)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions.repeat(len(tokens), 1) if self.per_example else positions)
        scores: Tensor = self.lm_head(self.norm(self.blocks(x)))
        return scores[..., : self.config.vocab_size]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean cross entropy of targets (B, T); without them the logits."""
        logits = self.logits(tokens)
        return logits if targets is None else functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def peer_step(name: str, model: GPT, *, precision: torch.dtype | None, noise: float, bound: float, batch: int) -> Step:
    """A step of a peer that starts from a model's numbers.

    Args:
        name: of PEERS.
        precision: of autocast; None for float32.
        noise, bound: noise multiplier and clipping norm, of Opacus.
        batch: examples in a step.

    Raises:
        UnsupportedCase: Opacus cannot be used here.
    """
    if name == "torch":  # takes whatever has an embedding and gives its loss
        return plain_step(cast(PlainGPT, UntiedGPT.like(model)), precision=precision)
    mode = name.removeprefix("opacus ")
    step, _ = opacus_step(
        UntiedGPT.like(model, per_example=True), mode, precision=precision, noise=noise, bound=bound, batch=batch
    )
    return step


def opacus_step(
    model: nn.Module, mode: str, *, precision: torch.dtype | None, noise: float, bound: float, batch: int
) -> tuple[Step, Any]:
    """A private step of Opacus, and its wrapped model.

    Args:
        model: gives logits (B, T, V) of tokens.
        mode: "ghost" or "fast" (two backward passes, gradients of examples never kept), or "hooks".

    Raises:
        UnsupportedCase: it cannot be used here.
    """
    opacus, utils = _opacus("opacus"), _opacus("opacus.utils.fast_gradient_clipping_utils")
    optimizers = _opacus("opacus.optimizers")
    device = next(model.parameters()).device
    inner = torch.optim.AdamW(model.parameters(), _RATE, _BETAS, weight_decay=_DECAY, fused=device.type == "cuda")
    told = {"noise_multiplier": noise, "max_grad_norm": bound, "expected_batch_size": batch}
    criterion: Any = nn.CrossEntropyLoss()
    if mode == "hooks":
        module = opacus.GradSampleModule(model)
        optimizer = optimizers.DPOptimizer(inner, **told)
    else:
        module = opacus.GradSampleModuleFastGradientClipping(
            model, max_grad_norm=bound, use_ghost_clipping=mode == "ghost"
        )
        optimizer = optimizers.DPOptimizerFastGradientClipping(inner, **told)
        criterion = utils.DPLossFastGradientClipping(module, optimizer, criterion)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=precision or torch.bfloat16, enabled=precision is not None):
            logits = module(tokens)
        shape = {} if mode == "hooks" else {"shape": logits.shape}
        loss = criterion(logits.flatten(0, 1).float(), targets.flatten(), **shape)
        loss.backward()
        optimizer.step()
        found: Tensor = loss.detach()
        return found

    return step, module


def _opacus(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a library that does not load is as good as absent; the row says why
        raise UnsupportedCase(f"Opacus cannot be used here: {type(error).__name__}: {error}") from None
