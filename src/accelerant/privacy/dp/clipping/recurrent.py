"""LSTM and GRU: forward by torch's own, the pass back through time written out.

Each direction of each layer is a function. Its backward pass makes all gates anew, in two products over all steps since
the states are known, and goes back step by step for their gradients; with these, both matrices are linear maps of all
steps. Computed in the parameters' dtype, also under autocast.

Source: Hochreiter and Schmidhuber 1997; Cho et al. 2014, arXiv:1406.1078, with the reset gate after the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import nn as our
from accelerant.errors import ShapeError, UnsupportedCase
from accelerant.ops._per_example import PerExampleSink
from accelerant.privacy.dp.clipping.functions import once
from accelerant.privacy.dp.clipping.layers import KINDS, Forward, Kind, batch_of

__all__ = ["register"]

_Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Of inputs and of states, and their biases."""


def _gates(x: Tensor, before: Tensor, weights: _Weights) -> tuple[Tensor, Tensor]:
    """What inputs (B, T, K) and states (B, T, H) give to all gates, (B, T, gates H) each."""
    return F.linear(x, weights[0], weights[2]), F.linear(before, weights[1], weights[3])


def _feed(
    sink: PerExampleSink, weights: _Weights, x: Tensor, before: Tensor, dx_gates: Tensor, dh_gates: Tensor
) -> None:
    examples = x.shape[0]
    w_ih, w_hh, b_ih, b_hh = weights
    sink.linear(w_ih, b_ih, dx_gates.flatten(0, 1), x.reshape(-1, x.shape[2]), examples)
    sink.linear(w_hh, b_hh, dh_gates.flatten(0, 1), before.reshape(-1, before.shape[2]), examples)


class _LSTM(torch.autograd.Function):
    """x (B, T, K), h and c (B, H), the weights -> y (B, T, H), h and c after the last step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, c: Tensor, sink: PerExampleSink, *weights: Any) -> Any:
        flat = [weight for weight in weights if weight is not None]
        y, last_h, last_c = torch._VF.lstm(
            x, (h[None], c[None]), flat, weights[2] is not None, 1, 0.0, False, False, True
        )
        ctx.save_for_backward(x, h, c, y, *(None if w is None else w.detach() for w in weights))
        ctx.sink, ctx.parameters = sink, weights
        sink.expect(*weights)
        return y, last_h[0], last_c[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        once(ctx)
        x, h, c, y, *weights = ctx.saved_tensors
        before = torch.cat((h[:, None], y[:, :-1]), 1)
        of_x, of_h = _gates(x, before, tuple(weights))
        i, f, g, o = (of_x + of_h).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cells = [c]
        for t in range(x.shape[1]):
            cells.append(f[:, t] * cells[-1] + i[:, t] * g[:, t])
        gates = x.new_empty((*x.shape[:2], 4 * h.shape[1]))
        for t in reversed(range(x.shape[1])):
            dh = dh + dy[:, t]
            tanh = cells[t + 1].tanh()
            dc = dc + dh * o[:, t] * (1 - tanh * tanh)
            parts = (
                dc * g[:, t] * i[:, t] * (1 - i[:, t]),
                dc * cells[t] * f[:, t] * (1 - f[:, t]),
                dc * i[:, t] * (1 - g[:, t] * g[:, t]),
                dh * tanh * o[:, t] * (1 - o[:, t]),
            )
            gates[:, t] = torch.cat(parts, 1)
            dc = dc * f[:, t]
            dh = gates[:, t] @ weights[1]
        _feed(ctx.sink, ctx.parameters, x, before, gates, gates)
        return gates @ weights[0], dh, dc, None, None, None, None, None


class _GRU(torch.autograd.Function):
    """x (B, T, K), h (B, H), the weights -> y (B, T, H), and h after the last step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, sink: PerExampleSink, *weights: Any) -> Any:
        flat = [weight for weight in weights if weight is not None]
        y, last = torch._VF.gru(x, h[None], flat, weights[2] is not None, 1, 0.0, False, False, True)
        ctx.save_for_backward(x, h, y, *(None if w is None else w.detach() for w in weights))
        ctx.sink, ctx.parameters = sink, weights
        sink.expect(*weights)
        return y, last[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        once(ctx)
        x, h, y, *weights = ctx.saved_tensors
        before = torch.cat((h[:, None], y[:, :-1]), 1)
        of_x, of_h = _gates(x, before, tuple(weights))
        (xr, xz, xn), (hr, hz, hn) = of_x.chunk(3, -1), of_h.chunk(3, -1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        n = (xn + r * hn).tanh()
        x_gates, h_gates = torch.empty_like(of_x), torch.empty_like(of_h)
        for t in reversed(range(x.shape[1])):
            dh = dh + dy[:, t]
            dn = dh * (1 - z[:, t]) * (1 - n[:, t] * n[:, t])
            dz = dh * (before[:, t] - n[:, t]) * z[:, t] * (1 - z[:, t])
            dr = dn * hn[:, t] * r[:, t] * (1 - r[:, t])
            x_gates[:, t] = torch.cat((dr, dz, dn), 1)
            h_gates[:, t] = torch.cat((dr, dz, dn * r[:, t]), 1)
            dh = dh * z[:, t] + h_gates[:, t] @ weights[1]
        _feed(ctx.sink, ctx.parameters, x, before, x_gates, h_gates)
        return x_gates @ weights[0], dh, None, None, None, None, None


_run_lstm: Callable[..., tuple[Tensor, ...]] = _LSTM.apply
_run_gru: Callable[..., tuple[Tensor, ...]] = _GRU.apply


# --- modules ---------------------------------------------------------------------------------------------------------


def _refuses(module: nn.RNNBase) -> str | None:
    if not module.batch_first:
        return "its examples come second: take batch_first=True"
    if module.proj_size:
        return "projections are not covered: take proj_size=0 and a Linear after it"
    if len({each.requires_grad for each in module.parameters()}) > 1:
        return "some of its parameters are frozen: freeze all of them or none"
    return None


def _run(module: Any, sink: PerExampleSink, x: Tensor, states: tuple[Tensor, ...] | None, count: int) -> Any:
    """All layers and directions: y, and each state after the last step, (layers directions, B, H)."""
    if not isinstance(x, Tensor):
        raise UnsupportedCase(
            f"{type(module).__name__} got {type(x).__name__}: packed sequences are not covered while a clipper is "
            "attached; pad them, and leave padded steps out of the loss"
        )
    x, examples = batch_of(x, sink, module, 3)
    x = x.to(module.weight_ih_l0.dtype)
    directions = 2 if module.bidirectional else 1
    shape = (module.num_layers * directions, examples, module.hidden_size)
    if states is None:
        states = (x.new_zeros(shape),) * count
    for state in states:
        if state.shape != shape:
            raise ShapeError(f"the state of {type(module).__name__} must be {shape}, got {tuple(state.shape)}")
    ends: list[list[Tensor]] = [[] for _ in range(count)]
    run = _run_lstm if count == 2 else _run_gru
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            weights = [getattr(module, f"{name}_l{layer}{'_reverse' * direction}", None) for name in names]
            begin = [state[at].to(x.dtype) for state in states]
            y, *last = run(x.flip(1) if direction else x, *begin, sink, *weights)
            outputs.append(y.flip(1) if direction else y)
            for end, each in zip(ends, last, strict=True):
                end.append(each)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if module.dropout and layer + 1 < module.num_layers:
            x = F.dropout(x, module.dropout, module.training)
    return x, tuple(torch.stack(end) for end in ends)


def _lstm(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(input: Tensor, hx: Any = None) -> Any:
        return _run(module, sink, input, hx, 2)

    return forward


def _gru(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(input: Tensor, hx: Tensor | None = None) -> Any:
        y, (h,) = _run(module, sink, input, None if hx is None else (hx,), 1)
        return y, h

    return forward


def _ours(make: Any) -> Any:
    """The same for our modules, whose arguments have other names."""

    def wrapped(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
        inner = make(module, sink, plain)

        def forward(x: Tensor, state: Any = None) -> Any:
            return inner(x, state)

        return forward

    return wrapped


def register() -> None:
    """Make them known."""
    KINDS[nn.LSTM.forward] = Kind(_lstm, _refuses)
    KINDS[nn.GRU.forward] = Kind(_gru, _refuses)
    KINDS[our.LSTM.forward] = Kind(_ours(_lstm), _refuses)
    KINDS[our.GRU.forward] = Kind(_ours(_gru), _refuses)
