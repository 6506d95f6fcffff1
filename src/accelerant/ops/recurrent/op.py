"""LSTM and GRU: cuDNN's on a GPU, torch's own on a CPU; what this adds is the ledger.

A recurrence of our own would not beat cuDNN, which keeps the weights on chip from step to step. The gradients are from
torch's autograd; the backward pass is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = ["gru", "gru_fwd", "lstm", "lstm_fwd"]


def _cost(case: Case) -> Cost:
    """X read, the weights read and y written once; each weight works at each step of each sequence."""
    B, T, inputs = case.shape
    weights, outputs = case.options[0], case.options[1]
    return Cost((B * T * (inputs + outputs) + weights) * case.dtype.itemsize, 2 * B * T * weights)


lstm_fwd = Operation("lstm_fwd", (Implementation("torch", torch._VF.lstm),), cost=_cost)
gru_fwd = Operation("gru_fwd", (Implementation("torch", torch._VF.gru),), cost=_cost)


def lstm(
    x: Tensor,
    state: tuple[Tensor, Tensor],
    weights: Sequence[Tensor],
    *,
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Long short-term memory over (B, T, inputs); arguments as torch.nn.LSTM has them, already checked.

    Returns:
        y (B, T, outputs), and h and c after the last step, (layers directions, B, hidden) each.
    """
    found: tuple[Tensor, Tensor, Tensor] = lstm_fwd(
        _case(x, state[0], weights, bidirectional),
        x, state, list(weights), bias, layers, dropout, training, bidirectional, True,
    )  # fmt: skip
    return found


def gru(
    x: Tensor,
    state: Tensor,
    weights: Sequence[Tensor],
    *,
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor]:
    """Gated recurrent units over (B, T, inputs); as lstm.

    Returns:
        y (B, T, outputs), and h after the last step, (layers directions, B, hidden).
    """
    found: tuple[Tensor, Tensor] = gru_fwd(
        _case(x, state, weights, bidirectional),
        x, state, list(weights), bias, layers, dropout, training, bidirectional, True,
    )  # fmt: skip
    return found


def _case(x: Tensor, h: Tensor, weights: Sequence[Tensor], bidirectional: bool) -> Case:
    outputs = h.shape[-1] * (2 if bidirectional else 1)
    return Case(x.device, x.dtype, x.shape, (sum(weight.numel() for weight in weights), outputs))
