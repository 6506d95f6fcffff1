"""A whole block as one autograd function, forward and backward written out.

A block of eager modules is some 25 nodes of autograd, most of them made in Python, and on a busy host they take longer
than the kernels: 4.2 ms a layer of Qwen3 0.6B (28 layers, 4 x 2048 tokens) on an H200's host, where the kernels took
2.4 ms. One node for the block leaves the launches. It also lets gradients add where they are made: those of the layers
that share an input in the products' own epilogue, that of the residual stream in the norm's backward kernel.

The functions here serve plain training: gradients wanted, one dtype, no autocast, no cache, no dropout, layers without
hooks and adapters, a mask that our attention knows. For all else `blocks` calls the modules one by one. So it does for
derivatives of derivatives: the block is then run again, by its modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelerant.nn._patch.parts import (
    Gradients,
    Spec,
    attention_case,
    linear,
    linears_backward,
    packed_gradient,
    rows_of,
    run_again,
)
from accelerant.ops.attention.op import attention_bwd, attention_fwd
from accelerant.ops.linear_gelu.op import linear_gelu_fwd
from accelerant.ops.norm.op import _add_layer_norm, _add_rms_norm, _layer_norm, _rms_norm
from accelerant.ops.rope.op import _rope
from accelerant.ops.swiglu.op import swiglu_bwd, swiglu_fwd
from accelerant.ops.transformer.op import column_sums, dgelu, linear_dx, linear_dz, norm_backward
from accelerant.runtime.dispatch import Case

__all__ = ["DecoderLayer", "GPT2Block"]


# --- Llama, Qwen2, Qwen3, Mistral ------------------------------------------------------------------------------------


class DecoderLayer(torch.autograd.Function):
    """Norm, attention with rotary embedding, residual and norm, gated MLP, residual.

    Takes (spec, x (B, S, N), cos, sin (S or B S, D / 2), weights): the norms' first, then weight and bias of q, k, v,
    the heads' norms of q and k, then weight and bias of o, gate, up and down; None where there is none.
    """

    @staticmethod
    def forward(ctx: Any, spec: Spec, x: Tensor, cos: Tensor, sin: Tensor, *weights: Any) -> Tensor:
        """The block's result."""
        w1, w2, wq, bq, wk, bk, wv, bv, nq, nk, wo, bo, wg, bg, wu, bu, wd, bd = weights
        B, S, N = x.shape
        h, statistics1 = _rms_norm.forward(x, w1, None, spec.eps[0])
        rows = h.view(-1, N)
        q, k, v = (
            linear(rows, weight, bias).view(B, S, heads, -1)
            for weight, bias, heads in ((wq, bq, spec.heads[0]), (wk, bk, spec.heads[1]), (wv, bv, spec.heads[1]))
        )
        kept_heads: tuple[Tensor | None, ...] = (None, None, None, None)
        if nq is not None:
            kept_q, kept_k = q, k
            q, statistics_q = _rms_norm.forward(q, nq, None, spec.eps[0])
            k, statistics_k = _rms_norm.forward(k, nk, None, spec.eps[0])
            kept_heads = (kept_q, kept_k, statistics_q, statistics_k)
        q = _rope.forward(q.transpose(1, 2), cos, sin, False)
        k = _rope.forward(k.transpose(1, 2), cos, sin, False)
        v = v.transpose(1, 2)
        o, lse = attention_fwd(attention_case(q, k, spec), q, k, v, spec.causal, spec.scale, spec.window)
        a = linear(rows_of(o), wo, bo).view(B, S, N)
        y, s, statistics2 = _add_rms_norm.forward(a, x, w2, None, spec.eps[1])
        rows2 = y.view(-1, N)
        gate, up = linear(rows2, wg, bg), linear(rows2, wu, bu)
        m = swiglu_fwd(Case(gate.device, gate.dtype, gate.shape), gate, up)
        out = linear(m, wd, bd).view(B, S, N).add_(s)
        ctx.spec = spec
        ctx.save_for_backward(
            x, cos, sin, *weights, statistics1, rows, *kept_heads, q, k, v, o, lse, s, statistics2, rows2, gate, up, m
        )
        return out

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Gradients:
        """The gradients of x and the weights."""
        (dout,) = dys
        x, cos, sin, *rest = ctx.saved_tensors
        weights, rest = rest[:18], rest[18:]
        if torch.is_grad_enabled():
            return run_again(ctx, dout, x, weights, 4)
        w1, w2, wq, bq, wk, bk, wv, bv, nq, nk, wo, bo, wg, bg, wu, bu, wd, bd = weights
        statistics1, rows, kept_q, kept_k, statistics_q, statistics_k, *rest = rest
        q, k, v, o, lse, s, statistics2, rows2, gate, up, m = rest
        spec: Spec = ctx.spec
        need = ctx.needs_input_grad[4:]
        B, S, N = x.shape

        da: Any
        dq: Any
        dk: Any
        dout = dout.contiguous()
        dm, d_down = linears_backward([dout.view(-1, N)], m, (wd, bd), need[16:18])
        dgate, dup = swiglu_bwd(Case(gate.device, gate.dtype, gate.shape), dm, gate, up)
        dy, d_gates = linears_backward([dgate, dup], rows2, (wg, bg, wu, bu), need[12:16])
        da, dw2, _ = _add_rms_norm.backward(
            dy.view(B, S, N), dout, s, w2, None, statistics2, spec.eps[1], (True, need[1], False)
        )
        do, d_o = linears_backward([da.view(-1, N)], rows_of(o), (wo, bo), need[10:12])
        do = do.view(B, S, spec.heads[0], -1).transpose(1, 2)
        dq, dk, dv = attention_bwd(
            attention_case(q, k, spec), do, q, k, v, o, lse, spec.causal, spec.scale, spec.window
        )
        only_x = (True, False, False)
        dq, dk = (_rope.backward(d, None, cos, sin, False, only_x)[0] for d in (dq, dk))
        dnq = dnk = None
        if nq is not None:
            dq, dnq, _ = _rms_norm.backward(
                dq.transpose(1, 2), kept_q, nq, None, statistics_q, spec.eps[0], (True, need[8], False)
            )
            dk, dnk, _ = _rms_norm.backward(
                dk.transpose(1, 2), kept_k, nk, None, statistics_k, spec.eps[0], (True, need[9], False)
            )
            dqkv = [dq.view(rows.shape[0], -1), dk.view(rows.shape[0], -1), rows_of(dv)]
        else:
            dqkv = [rows_of(dq), rows_of(dk), rows_of(dv)]
        dh, d_qkv = linears_backward(dqkv, rows, (wq, bq, wk, bk, wv, bv), need[2:8])
        dx, dw1, _ = _add_rms_norm.backward(
            dh.view(B, S, N), da, x, w1, None, statistics1, spec.eps[0], (True, need[0], False)
        )
        return (None, dx, None, None, dw1, dw2, *d_qkv, dnq, dnk, *d_o, *d_gates, *d_down)


# --- GPT-2 -----------------------------------------------------------------------------------------------------------


class GPT2Block(torch.autograd.Function):
    """Norm, attention, residual and norm, MLP with a GELU, residual.

    Takes (spec, x (B, S, N), weights): weight and bias of the two norms, of the layers for q, k and v together, for the
    attention's result, into the MLP and out of it. The layers' weights are (in, out), as Conv1D has them. What the MLP
    is after the GELU, the backward pass makes again on its way to the GELU's gradient: it is not kept.
    """

    @staticmethod
    def forward(ctx: Any, spec: Spec, x: Tensor, *weights: Any) -> Tensor:
        """The block's result."""
        w1, b1, w2, b2, wa, ba, wo, bo, wf, bf, wp, bp = weights
        B, S, N = x.shape
        h, statistics1 = _layer_norm.forward(x, w1, b1, spec.eps[0])
        rows = h.view(-1, N)
        qkv = torch.addmm(ba, rows, wa).view(B, S, 3, spec.heads[0], -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        o, lse = attention_fwd(attention_case(q, k, spec), q, k, v, spec.causal, spec.scale, spec.window)
        a = torch.addmm(bo, rows_of(o), wo).view(B, S, N)
        y, s, statistics2 = _add_layer_norm.forward(a, x, w2, b2, spec.eps[1])
        rows2 = y.view(-1, N)
        case = Case(x.device, x.dtype, (B * S, wf.shape[1], N), (spec.approximate, "bias", "keep"))
        f, z = linear_gelu_fwd(case, rows2, wf.t(), bf, spec.approximate, True)
        out = torch.addmm(bp, f, wp).view(B, S, N).add_(s)
        ctx.spec = spec
        ctx.save_for_backward(x, *weights, statistics1, rows, qkv, o, lse, s, statistics2, rows2, z)
        return out

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Gradients:
        """The gradients of x and the weights."""
        (dout,) = dys
        x, *rest = ctx.saved_tensors
        weights, rest = rest[:12], rest[12:]
        if torch.is_grad_enabled():
            return run_again(ctx, dout, x, weights, 2)
        w1, b1, w2, b2, wa, _, wo, _, wf, bf, wp, _ = weights
        statistics1, rows, qkv, o, lse, s, statistics2, rows2, z = rest
        spec: Spec = ctx.spec
        need = ctx.needs_input_grad[2:]
        B, S, N = x.shape

        def of_weights(dy: Tensor, source: Tensor, at: int) -> tuple[Tensor | None, Tensor | None]:
            dweight = torch.mm(source.t(), dy) if need[at] else None
            return dweight, column_sums(dy, dy.dtype) if need[at + 1] else None

        dout = dout.contiguous()
        dlast = dout.view(-1, N)
        sums = bf.dtype if need[9] else None
        if spec.approximate == "tanh":
            dz, f, dbf = linear_dz(dlast, wp.t(), z, sums)
        else:
            dz, f, dbf = dgelu(linear_dx(dlast, wp.t()), z, spec.approximate, sums)
        dwp, dbp = of_weights(dlast, f, 10)
        del f
        dwf = torch.mm(rows2.t(), dz) if need[8] else None
        dy = torch.mm(dz, wf.t())
        del dz
        sums = x.dtype if need[7] else None
        da, dw2, db2, dbo = norm_backward(
            dy.view(B, S, N), dout, s, w2, b2, statistics2, spec.eps[1], (True, need[2], need[3]), sums
        )
        da_rows = da.view(-1, N)
        dwo = torch.mm(rows_of(o).t(), da_rows) if need[6] else None
        do = torch.mm(da_rows, wo.t()).view(B, S, spec.heads[0], -1).transpose(1, 2)
        dqkv = packed_gradient(do, qkv, o, lse, spec).view(B * S, -1)
        dwa, dba = of_weights(dqkv, rows, 4)
        dh = torch.mm(dqkv, wa.t())
        dx, dw1, db1 = _add_layer_norm.backward(
            dh.view(B, S, N), da, x, w1, b1, statistics1, spec.eps[0], (True, need[0], need[1])
        )
        return (None, dx, dw1, db1, dw2, db2, dwa, dba, dwo, dbo, dwf, dbf, dwp, dbp)
