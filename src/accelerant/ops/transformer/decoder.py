"""The decoder layer of Llama, Qwen and Mistral as one autograd function with explicit forward and backward passes.

A layer of eager modules is some 25 autograd nodes, most of them created in Python, and on a busy host they take longer
than the kernels: 4.2 ms for a layer of Qwen3 0.6B (28 layers, 4 x 2048 tokens) on an H200's host, where the kernels
took 2.4 ms. One node for the layer leaves the launches. Gradients also add where they are computed: those of layers
that share an input in the products' epilogue, that of the residual stream in the norm's backward kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerant.ops.attention.op import backward_pass, forward_pass
from accelerant.ops.norm.op import _add_rms_norm, _rms_norm
from accelerant.ops.rope.op import _rope
from accelerant.ops.swiglu.op import swiglu_bwd, swiglu_fwd
from accelerant.ops.transformer.block import Gradients, gradients_of, placed
from accelerant.ops.transformer.op import column_sums, linear_dw
from accelerant.runtime.dispatch import Case


class DecoderSpec(NamedTuple):
    """The configuration of a decoder layer.

    `eps` of the first norm (and the heads' norms) and of the second; `heads` of queries, and of keys and values;
    causal, window (-1 for none) and scale as in attention; `recompute`: x -> the layer's result by differentiable
    modules, for derivatives of its gradients; `mask`: attention's segments (see `segments_mask`), None for one.
    """

    eps: tuple[float, float]
    heads: tuple[int, int]
    causal: bool
    window: int
    scale: float
    recompute: Callable[[Tensor], Tensor]
    mask: Tensor | None = None


class DecoderLayer(torch.autograd.Function):
    """RMS norm, grouped-query attention with rotary embedding, residual sum and RMS norm, gated MLP, residual sum.

    Takes (spec, x (B, S, N), cos, sin (S or B S, D / 2), weights): the weights of both norms, weight and bias of q, k
    and v, the weights of the heads' norms of q and k, weight and bias of o, gate, up and down; None for absent ones.
    All tensors have one dtype; or, as under autocast, weights and biases of the seven linear layers follow once more in
    a narrower one: products and attention then compute in it, norms and the residual stream in that of x.
    """

    @staticmethod
    def forward(ctx: Any, spec: DecoderSpec, x: Tensor, cos: Tensor, sin: Tensor, *weights: Any) -> Tensor:
        """Return the layer's result (B, S, N)."""
        weights, casts = weights[:18], weights[18:]
        w1, w2, nq, nk = *weights[:2], *weights[8:10]
        wq, bq, wk, bk, wv, bv, wo, bo, wg, bg, wu, bu, wd, bd = casts or (*weights[2:8], *weights[10:])
        dtype = wq.dtype
        B, S, N = x.shape
        h, statistics1 = _rms_norm.forward(x, w1, None, spec.eps[0], True, None, dtype)
        rows = h.view(-1, N)
        q, k, v = (
            _linear(rows, weight, bias).view(B, S, heads, -1)
            for weight, bias, heads in ((wq, bq, spec.heads[0]), (wk, bk, spec.heads[1]), (wv, bv, spec.heads[1]))
        )
        saved_heads: tuple[Tensor | None, ...] = (None, None, None, None)
        if nq is not None:
            unnormalized = q, k
            q, statistics_q = _rms_norm.forward(q, nq, None, spec.eps[0])
            k, statistics_k = _rms_norm.forward(k, nk, None, spec.eps[0])
            saved_heads = (*unnormalized, statistics_q, statistics_k)
        q = _rope.forward(q.transpose(1, 2), cos, sin, False)
        k = _rope.forward(k.transpose(1, 2), cos, sin, False)
        v = v.transpose(1, 2)
        o, lse = forward_pass(q, k, v, spec.causal, spec.scale, spec.window, spec.mask)
        a = _linear(_rows(o), wo, bo).view(B, S, N)
        y, s, statistics2 = _add_rms_norm.forward(a, x, w2, None, spec.eps[1], True, dtype)
        rows2 = y.view(-1, N)
        gate, up = _linear(rows2, wg, bg), _linear(rows2, wu, bu)
        m = swiglu_fwd(Case(gate.device, gate.dtype, gate.shape), gate, up)
        out = _linear(m, wd, bd).view(B, S, N)
        out = out.add_(s) if dtype is x.dtype else s + out
        ctx.spec = spec
        ctx.save_for_backward(
            x, cos, sin, *weights, statistics1, rows, *saved_heads, q, k, v, o, lse, s, statistics2, rows2, gate, up, m,
            *casts[::2],
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Gradients:
        """Return the gradients of x and the weights."""
        (dout,) = dys
        x, cos, sin, *rest = ctx.saved_tensors
        weights, rest = rest[:18], rest[18:]
        if torch.is_grad_enabled():
            inputs = (None, x, None, None, *weights)
            found = gradients_of(ctx.spec.recompute(x), inputs, ctx.needs_input_grad[:22], dout)
            return *found, *(None,) * (len(ctx.needs_input_grad) - 22)
        w1, w2, wq, bq, wk, bk, wv, bv, nq, nk, wo, bo, wg, bg, wu, bu, wd, bd = weights
        statistics1, rows, q_in, k_in, statistics_q, statistics_k, *rest = rest
        q, k, v, o, lse, s, statistics2, rows2, gate, up, m, *casts = rest
        cq, ck, cv, co, cg, cu, cd = casts or (wq, wk, wv, wo, wg, wu, wd)
        dtype = m.dtype
        spec: DecoderSpec = ctx.spec
        need = ctx.needs_input_grad[4:]
        B, S, N = x.shape

        da: Any
        dq: Any
        dk: Any
        dout = dout.contiguous()
        dm, d_down = _linear_gradients([dout.to(dtype).view(-1, N)], m, (cd,), (wd, bd), need[16:18])
        dgate, dup = swiglu_bwd(Case(gate.device, gate.dtype, gate.shape), dm, gate, up)
        dy, d_gates = _linear_gradients([dgate, dup], rows2, (cg, cu), (wg, bg, wu, bu), need[12:16])
        da, dw2, _ = _add_rms_norm.backward(
            dy.view(B, S, N), dout, s, w2, None, statistics2, spec.eps[1], (True, need[1], False)
        )
        do, d_o = _linear_gradients([da.to(dtype).view(-1, N)], _rows(o), (co,), (wo, bo), need[10:12])
        do = do.view(B, S, spec.heads[0], -1).transpose(1, 2)
        dq, dk, dv = backward_pass(do, q, k, v, o, lse, spec.causal, spec.scale, spec.window, spec.mask)
        dq, dk = (_rope.backward(d, None, cos, sin, False, (True, False, False))[0] for d in (dq, dk))
        dnq = dnk = None
        if nq is not None:
            dq, dnq, _ = _rms_norm.backward(
                dq.transpose(1, 2), q_in, nq, None, statistics_q, spec.eps[0], (True, need[8], False)
            )
            dk, dnk, _ = _rms_norm.backward(
                dk.transpose(1, 2), k_in, nk, None, statistics_k, spec.eps[0], (True, need[9], False)
            )
            dqkv = [dq.view(rows.shape[0], -1), dk.view(rows.shape[0], -1), _rows(dv)]
        else:
            dqkv = [_rows(dq), _rows(dk), _rows(dv)]
        dh, d_qkv = _linear_gradients(dqkv, rows, (cq, ck, cv), (wq, bq, wk, bk, wv, bv), need[2:8])
        dx, dw1, _ = _add_rms_norm.backward(
            dh.view(B, S, N), da, x, w1, None, statistics1, spec.eps[0], (True, need[0], False)
        )
        absent = (None,) * (len(ctx.needs_input_grad) - 22)
        return (None, dx, None, None, dw1, dw2, *d_qkv, dnq, dnk, *d_o, *d_gates, *d_down, *absent)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _linear_gradients(
    dys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], params: Sequence[Any], needs: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the gradients of the input x that layers share and, in turn, of their params: weights and biases."""
    dx = torch.mm(dys[0], weights[0])
    gradients: list[Tensor | None] = []
    for i, dy in enumerate(dys):
        weight, bias = params[2 * i : 2 * i + 2]
        if i:
            dx.addmm_(dy, weights[i])
        dw = None
        if needs[2 * i]:
            out, same = placed(weight, *weight.shape), weight.dtype is dy.dtype
            dw = torch.mm(dy.t(), x, out=out) if same else linear_dw(dy, x, weight.dtype, out)
        gradients += (dw, column_sums(dy, bias.dtype) if needs[2 * i + 1] else None)
    return dx, gradients


def _rows(x: Tensor) -> Tensor:
    """Return (B, H, S, D) as (B S, H D)."""
    B, H, S, D = x.shape
    return x.transpose(1, 2).reshape(B * S, H * D)


fused_decoder_layer: Callable[..., Tensor] = DecoderLayer.apply
