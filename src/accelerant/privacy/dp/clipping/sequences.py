"""Recurrent layers and torch.nn.MultiheadAttention, which use their parameters by functions of their own.

LSTM and GRU run forward by torch's own functions. Each direction of each layer is an autograd function that recomputes
all gates in two products, and goes back step by step. Computed in the parameters' dtype, also under autocast.

Source: Hochreiter and Schmidhuber 1997; Cho et al. 2014, arXiv:1406.1078, with the reset gate after the product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import nn as our
from accelerant.errors import ShapeError, UnsupportedCase
from accelerant.ops._per_example import PerExampleSink
from accelerant.ops.recurrent.op import run_layers
from accelerant.privacy.dp.clipping.layers import expanded, linear, require_first_visit
from accelerant.privacy.dp.clipping.rules import LayerRule, register

_Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # Matrices for inputs and states, and their biases


def _gates(x: Tensor, states: Tensor, weights: _Weights) -> tuple[Tensor, Tensor]:
    """Return the contributions of inputs (B, T, K) and states (B, T, H) to all gates, (B, T, gates H) each."""
    return F.linear(x, weights[0], weights[2]), F.linear(states, weights[1], weights[3])


def _feed(
    sink: PerExampleSink, weights: _Weights, x: Tensor, states: Tensor, dx_gates: Tensor, dh_gates: Tensor
) -> None:
    examples = x.shape[0]
    w_ih, w_hh, b_ih, b_hh = weights
    sink.linear(w_ih, b_ih, dx_gates.flatten(0, 1), x.reshape(-1, x.shape[2]), examples)
    sink.linear(w_hh, b_hh, dh_gates.flatten(0, 1), states.reshape(-1, states.shape[2]), examples)


class _LSTM(torch.autograd.Function):
    """x (B, T, K), h and c (B, H), the weights -> y (B, T, H), h and c after the last step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, c: Tensor, sink: PerExampleSink, *weights: Any) -> Any:
        flat = [weight for weight in weights if weight is not None]
        y, last_h, last_c = torch.lstm(x, (h[None], c[None]), flat, weights[2] is not None, 1, 0.0, False, False, True)
        ctx.save_for_backward(x, h, c, y, *(None if w is None else w.detach() for w in weights))
        ctx.sink, ctx.parameters = sink, weights
        sink.expect(*weights)
        return y, last_h[0], last_c[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        require_first_visit(ctx)
        x, h, c, y, *weights = ctx.saved_tensors
        states = torch.cat((h[:, None], y[:, :-1]), 1)
        of_x, of_h = _gates(x, states, tuple(weights))
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
        _feed(ctx.sink, ctx.parameters, x, states, gates, gates)
        return gates @ weights[0], dh, dc, None, None, None, None, None


class _GRU(torch.autograd.Function):
    """x (B, T, K), h (B, H), the weights -> y (B, T, H), and h after the last step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, sink: PerExampleSink, *weights: Any) -> Any:
        flat = [weight for weight in weights if weight is not None]
        y, last = torch.gru(x, h[None], flat, weights[2] is not None, 1, 0.0, False, False, True)
        ctx.save_for_backward(x, h, y, *(None if w is None else w.detach() for w in weights))
        ctx.sink, ctx.parameters = sink, weights
        sink.expect(*weights)
        return y, last[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        require_first_visit(ctx)
        x, h, y, *weights = ctx.saved_tensors
        states = torch.cat((h[:, None], y[:, :-1]), 1)
        of_x, of_h = _gates(x, states, tuple(weights))
        (xr, xz, xn), (hr, hz, hn) = of_x.chunk(3, -1), of_h.chunk(3, -1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        n = (xn + r * hn).tanh()
        x_gates, h_gates = torch.empty_like(of_x), torch.empty_like(of_h)
        for t in reversed(range(x.shape[1])):
            dh = dh + dy[:, t]
            dn = dh * (1 - z[:, t]) * (1 - n[:, t] * n[:, t])
            dz = dh * (states[:, t] - n[:, t]) * z[:, t] * (1 - z[:, t])
            dr = dn * hn[:, t] * r[:, t] * (1 - r[:, t])
            x_gates[:, t] = torch.cat((dr, dz, dn), 1)
            h_gates[:, t] = torch.cat((dr, dz, dn * r[:, t]), 1)
            dh = dh * z[:, t] + h_gates[:, t] @ weights[1]
        _feed(ctx.sink, ctx.parameters, x, states, x_gates, h_gates)
        return x_gates @ weights[0], dh, None, None, None, None, None


_run_lstm: Callable[..., tuple[Tensor, ...]] = _LSTM.apply
_run_gru: Callable[..., tuple[Tensor, ...]] = _GRU.apply


# --- recurrent layers ------------------------------------------------------------------------------------------------


@register
class _RecurrentRule(LayerRule):
    layers: ClassVar[tuple[type[nn.Module] | str, ...]] = (nn.LSTM, nn.GRU, our.LSTM, our.GRU)
    has_states = True

    @classmethod
    def refusal(cls, module: nn.RNNBase) -> str | None:
        if module.mode not in ("LSTM", "GRU"):  # our RNN has the forward of our LSTM
            return "its cells are not covered: take LSTM or GRU"
        if not module.batch_first:
            return "its examples come second: take batch_first=True"
        if module.proj_size:
            return "projections are not covered: take proj_size=0 and a Linear after it"
        if len({param.requires_grad for param in module.parameters()}) > 1:
            return "some of its parameters are frozen: freeze all of them or none"
        return None

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Run all layers and directions; return y and the final state or states, (layers directions, B, H) each."""
        module, lstm = self.module, self.module.mode == "LSTM"
        if not isinstance(input, Tensor):
            raise UnsupportedCase(
                f"{type(module).__name__} got {type(input).__name__}: packed sequences are not covered while a clipper "
                "is attached; pad them, and leave padded steps out of the loss"
            )
        x, examples = self.examples_first(input, 3)
        x = x.to(module.weight_ih_l0.dtype)
        directions = 2 if module.bidirectional else 1
        shape = (module.num_layers * directions, examples, module.hidden_size)
        states = hx if lstm else (hx,)
        if hx is None:
            states = (x.new_zeros(shape),) * (2 if lstm else 1)
        for state in states:
            if state.shape != shape:
                raise ShapeError(f"the state of {type(module).__name__} must be {shape}, got {tuple(state.shape)}")

        def run(x: Tensor, layer: int, direction: int) -> tuple[Tensor, ...]:
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            weights = [getattr(module, f"{name}_l{layer}{'_reverse' * direction}", None) for name in names]
            begin = [state[layer * directions + direction].to(x.dtype) for state in states]
            with torch.autocast(x.device.type, enabled=False):  # the backward pass repeats it in this dtype
                return (_run_lstm if lstm else _run_gru)(x, *begin, self.sink, *weights)

        y, *final = run_layers(run, x, module.num_layers, module.dropout, module.training, module.bidirectional)
        return y, tuple(final) if lstm else final[0]


# --- attention -------------------------------------------------------------------------------------------------------


@register
class _MultiheadAttentionRule(LayerRule):
    layers = (nn.MultiheadAttention, our.MultiheadAttention)
    covers_children = True

    @classmethod
    def refusal(cls, module: nn.MultiheadAttention) -> str | None:
        if not module.batch_first:
            return "its examples come second: take batch_first=True"
        if module.bias_k is not None or module.add_zero_attn:
            return "bias_k, bias_v and add_zero_attn are not covered: leave them out"
        own = [param for param in module._parameters.values() if param is not None]
        if len({param.requires_grad for param in own}) > 1:
            return "of its own parameters some are frozen: freeze all of them or none"
        return None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        module = self.module
        same = query is key and key is value
        query, examples = self.examples_first(query, 3)
        key, value = (query, query) if same else (self.examples_first(x, 3)[0] for x in (key, value))
        if is_causal and attn_mask is None:
            raise ShapeError("MultiheadAttention takes the attn_mask that is_causal is a hint of")
        heads = module.num_heads
        projected = self._projected(query, key, value, examples)
        q, k, v = (x.view(examples, -1, heads, module.head_dim).transpose(1, 2) for x in projected)
        mask = _added_mask(attn_mask, key_padding_mask, examples, heads, q.dtype)
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.mT
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        y: Tensor = module.out_proj(mixed.transpose(1, 2).reshape(examples, -1, module.embed_dim))
        return y, weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, examples: int) -> tuple[Tensor, ...]:
        """Return q, k and v, (B, T, E) each."""
        module, sink, E = self.module, self.sink, self.module.embed_dim
        joint, bias = module._qkv_same_embed_dim, module.in_proj_bias
        separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        if not any(sink.wants(param) for param in (bias, module.q_proj_weight, module.in_proj_weight)):
            weights = module.in_proj_weight.chunk(3) if joint else separate
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        if joint and query is key and key is value:
            return linear(query, module.in_proj_weight, bias, sink, examples).chunk(3, -1)
        if joint:  # one product of all positions, so that the parameter has one contribution
            T, S = query.shape[1], key.shape[1]
            y = linear(torch.cat((query, key, value), 1), module.in_proj_weight, bias, sink, examples)
            return y[:, :T, :E], y[:, T : T + S, E : 2 * E], y[:, T + S :, 2 * E :]
        projected = [linear(x, w, None, sink, examples) for x, w in zip((query, key, value), separate, strict=True)]
        if bias is not None:
            parts = expanded(bias, sink, examples)[:, None].chunk(3, -1)
            projected = [y + part for y, part in zip(projected, parts, strict=True)]
        return tuple(projected)


def _added_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, examples: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Combine both masks into one to add to scores (B, heads, T, S): -inf where a boolean one is true."""
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask if attn_mask.dim() != 3 else attn_mask.view(examples, heads, *attn_mask.shape[1:]))
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    added = [
        torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
        if mask.dtype == torch.bool
        else mask.to(dtype)
        for mask in masks
    ]
    return functools.reduce(torch.add, added) if added else None
