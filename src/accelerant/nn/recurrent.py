"""Recurrent layers over (B, T, inputs): by cuDNN on a GPU, and by kernels of our own where those are faster.

Their parameters are those of torch.nn.LSTM, GRU and RNN, so state dicts are interchangeable; calls are counted in the
ledger.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops._library import name_of
from accelerant.ops.recurrent.op import recurrent


def _initial_states(module: nn.RNNBase, x: Tensor, states: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    """Check x and the states; return the states, zeros if none are given."""
    name = type(module).__name__
    if x.dim() != 3 or x.shape[2] != module.input_size or not x.shape[1]:
        raise ShapeError(f"{name} takes (B, T, {module.input_size}), T at least 1, got {tuple(x.shape)}")
    dtype = _weights(module)[0].dtype
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise UnsupportedDtype(f"{name} has parameters of {name_of(dtype)}, x is {name_of(x.dtype)}")
    shape = (module.num_layers * (2 if module.bidirectional else 1), x.shape[0], module.hidden_size)
    if states and len(states) != count:
        raise ShapeError(f"the state of {name} must be {count} tensors, got {len(states)}")
    for state in states:
        if state.shape != shape:
            raise ShapeError(f"the state of {name} must be {shape}, got {tuple(state.shape)}")
        if state.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise UnsupportedDtype(f"x of {name} is {name_of(x.dtype)}, its state is {name_of(state.dtype)}")
    return states or (torch.zeros(shape, dtype=x.dtype, device=x.device),) * count


def _weights(module: nn.RNNBase) -> list[Tensor]:
    """Return all weights; on a GPU they share one allocation, as cuDNN requires."""
    return cast("list[Tensor]", module._flat_weights)


def _run(module: nn.RNNBase, cell: str, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    return recurrent(
        cell, x, states, _weights(module), bias=module.bias, layers=module.num_layers, dropout=module.dropout,
        training=module.training, bidirectional=module.bidirectional,
    )  # fmt: skip


class _Recurrent(nn.RNNBase):
    """Base of the layers: our constructor over that of torch's class, which follows in the method resolution order."""

    def __init__(
        self, inputs: int, hidden: int, layers: int = 1, *, bias: bool = True, dropout: float = 0.0,
        bidirectional: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        if inputs < 1 or hidden < 1 or layers < 1:
            raise ConfigError(f"{name} needs inputs, hidden and layers of at least 1, got {inputs}, {hidden}, {layers}")
        if not 0 <= dropout < 1:
            raise ConfigError(f"{name}: dropout must be at least 0 and below 1, got {dropout}")
        if dropout and layers == 1:
            raise ConfigError(f"{name}: dropout applies between layers, and there is one")
        initialize: Any = super().__init__  # of torch's class, which sets the mode of RNNBase itself
        options |= {"bias": bias, "batch_first": True, "dropout": dropout, "bidirectional": bidirectional}
        initialize(inputs, hidden, layers, **options)


class LSTM(_Recurrent, nn.LSTM):
    """Long short-term memory; dropout between layers while training.

    Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers, Schmidhuber and Cummins 2000.
    """

    def forward(  # type: ignore[override]  # torch also takes packed and unbatched sequences
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Process sequences.

        Args:
            x: (B, T, inputs).
            state: initial h and c, (layers directions, B, hidden) each; None for zeros.

        Returns:
            y (B, T, directions hidden), and h and c after the last step.

        Raises:
            ShapeError: x or a state has another shape.
            UnsupportedDtype: x or a state has another dtype than the parameters.
        """
        y, h, c = _run(self, "lstm", x, *_initial_states(self, x, state or (), 2))
        return y, (h, c)


class GRU(_Recurrent, nn.GRU):
    """Gated recurrent units; dropout between layers while training.

    Source: Cho et al. 2014, arXiv:1406.1078, with the reset gate after the product, as in cuDNN.
    """

    def forward(  # type: ignore[override]  # torch also takes packed and unbatched sequences
        self, x: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Process sequences; as LSTM, with h alone as the state."""
        y, h = _run(self, "gru", x, *_initial_states(self, x, () if state is None else (state,), 1))
        return y, h


class RNN(_Recurrent, nn.RNN):
    """Elman's layers, h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu; dropout between layers while training.

    Source: Elman 1990, "Finding structure in time".
    """

    def __init__(
        self, inputs: int, hidden: int, layers: int = 1, *, nonlinearity: str = "tanh", bias: bool = True,
        dropout: float = 0.0, bidirectional: bool = False,
    ) -> None:  # fmt: skip
        if nonlinearity not in ("tanh", "relu"):
            raise ConfigError(f"RNN: nonlinearity must be tanh or relu, got {nonlinearity!r}")
        super().__init__(
            inputs, hidden, layers, bias=bias, dropout=dropout, bidirectional=bidirectional, nonlinearity=nonlinearity
        )

    def forward(  # type: ignore[override]  # torch also takes packed and unbatched sequences
        self, x: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Process sequences; as LSTM, with h alone as the state."""
        y, h = _run(self, self.nonlinearity, x, *_initial_states(self, x, () if state is None else (state,), 1))
        return y, h
