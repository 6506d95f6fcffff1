"""Our language models, which use their embedding as the output layer without calling a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelerant import ops
from accelerant.nn import GPT, Llama
from accelerant.nn.layers import compute_dtype
from accelerant.ops._per_example import PerExampleSink
from accelerant.privacy.dp.clipping import functions
from accelerant.privacy.dp.clipping.layers import MODELS

__all__ = ["register"]

Methods = dict[str, Callable[..., Any]]


def _gpt(model: GPT, sink: PerExampleSink) -> Methods:
    plain_embedded, plain_logits, plain_loss = model._embedded, model._padded_logits, model.loss

    def embedded(idx: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled() or model._fuses_ends(idx):  # the fused functions feed the sink themselves
            return plain_embedded(idx)
        table, places = model.wte.weight, model.wpe.weight
        positions = torch.arange(idx.shape[1], device=idx.device)[None]
        # Not by calling wpe: (T,) positions could be one token for each of T examples.
        at = places[positions]
        if sink.wants(places):
            at = functions.lookup(positions, places, None, sink, idx.shape[0], distinct=True)
        return (model.wte(idx) + at).to(compute_dtype(table)), table

    def logits(hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or model.lm_head is not None or not sink.wants(model.wte.weight):
            return plain_logits(hidden)
        rows = hidden.reshape(-1, model.config.width)
        return functions.linear(rows, model.wte.weight, None, sink, hidden.shape[0])

    def loss(idx: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return plain_loss(idx, targets)
        if model._fuses_ends(idx):
            sink.begin(idx)
        return plain_loss(idx, targets)

    return {"_embedded": embedded, "_padded_logits": logits, "loss": loss}


def _llama(model: Llama, sink: PerExampleSink) -> Methods:
    plain_logits, plain_loss = model._logits, model.loss

    def logits(hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or model.lm_head is not None or not sink.wants(model.embed.weight):
            return plain_logits(hidden)
        rows = functions.linear(hidden.flatten(0, -2), model.embed.weight, None, sink, hidden.shape[0])
        return rows.view(*hidden.shape[:-1], model.config.vocab_size)

    def loss(idx: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return plain_loss(idx, targets)
        return ops.cross_entropy(model(idx).flatten(0, 1), targets.flatten().long())

    return {"_logits": logits, "loss": loss}


def register() -> None:
    """Make them known."""
    MODELS[GPT] = _gpt
    MODELS[Llama] = _llama
