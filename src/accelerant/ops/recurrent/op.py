"""LSTM and GRU by cuDNN on a GPU and by torch on a CPU, counted in the ledger.

A recurrent kernel would not beat cuDNN, which keeps the weights on chip between steps. Gradients are computed by
torch's autograd; the backward pass is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = ["gru", "gru_fwd", "lstm", "lstm_fwd"]


def _cost(case: Case) -> Cost:
    """Return the cost of reading x and the weights and writing y once, with a product per weight, step and sequence."""
    B, T, inputs = case.shape
    weights, outputs = case.options[0], case.options[1]
    return Cost((B * T * (inputs + outputs) + weights) * case.dtype.itemsize, 2 * B * T * weights)


lstm_fwd = Operation("lstm_fwd", (Implementation("torch", torch._VF.lstm),), cost=_cost)
gru_fwd = Operation("gru_fwd", (Implementation("torch", torch._VF.gru),), cost=_cost)


def lstm(
    x: Tensor, state: tuple[Tensor, Tensor], weights: Sequence[Tensor], *, bias: bool, layers: int, dropout: float,
    training: bool, bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run an LSTM over x (B, T, inputs); arguments as in torch.nn.LSTM, already checked.

    Returns:
        y (B, T, outputs), and h and c after the last step, (layers directions, B, hidden) each.
    """
    results: tuple[Tensor, Tensor, Tensor] = lstm_fwd(
        _case(x, state[0], weights, bidirectional),
        x, state, list(weights), bias, layers, dropout, training, bidirectional, True,
    )  # fmt: skip
    return results


def gru(
    x: Tensor, state: Tensor, weights: Sequence[Tensor], *, bias: bool, layers: int, dropout: float,
    training: bool, bidirectional: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run a GRU over x (B, T, inputs); arguments as in torch.nn.GRU, already checked.

    Returns:
        y (B, T, outputs), and h after the last step, (layers directions, B, hidden).
    """
    results: tuple[Tensor, Tensor] = gru_fwd(
        _case(x, state, weights, bidirectional),
        x, state, list(weights), bias, layers, dropout, training, bidirectional, True,
    )  # fmt: skip
    return results


def _case(x: Tensor, h: Tensor, weights: Sequence[Tensor], bidirectional: bool) -> Case:
    outputs = h.shape[-1] * (2 if bidirectional else 1)
    return Case(x.device, x.dtype, x.shape, (sum(weight.numel() for weight in weights), outputs))
