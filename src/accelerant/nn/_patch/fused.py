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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerant.ops._library import is_ordinary, is_plain
from accelerant.ops.attention.op import attention_bwd, attention_fwd, options_of
from accelerant.ops.linear_gelu.op import linear_gelu_bwd, linear_gelu_fwd
from accelerant.ops.norm.op import _add_layer_norm, _add_rms_norm, _layer_norm, _rms_norm
from accelerant.ops.rope.op import _rope
from accelerant.ops.swiglu.op import swiglu_bwd, swiglu_fwd
from accelerant.runtime.dispatch import Case

__all__ = ["DecoderLayer", "GPT2Block", "Gradients", "Spec", "is_serviceable"]

Weights = tuple[Tensor | None, ...]
Gradients = tuple[Tensor | None, ...]


class Spec(NamedTuple):
    """What a block's function needs to know beside its tensors.

    Attributes:
        eps: of the first norm and of the second.
        heads: of queries, and of keys and values.
        causal, window, scale: as attention takes them.
        approximate: of the GELU; "" where there is none.
        again: the block by its modules, (x) -> its result.
    """

    eps: tuple[float, float]
    heads: tuple[int, int]
    causal: bool
    window: int
    scale: float
    approximate: str
    again: Callable[[Tensor], Tensor]


def is_serviceable(x: Tensor, weights: Weights) -> bool:
    """Whether a block's function may take these: gradients wanted, one dtype, nobody who wants to see the parts."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return False
    if not is_plain(x) or x.dim() != 3:
        return False
    dtype, learns = x.dtype, x.requires_grad
    for weight in weights:
        if weight is not None:
            if weight.dtype is not dtype or not is_ordinary(weight):
                return False
            learns = learns or weight.requires_grad
    return learns


# --- parts -----------------------------------------------------------------------------------------------------------


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _linears_backward(
    dys: Sequence[Tensor], x: Tensor, weights: Sequence[Any], needs: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradient of what several layers share, summed by their products; and those of (weight, bias), ...."""
    dx = torch.mm(dys[0], weights[0])
    gradients: list[Tensor | None] = []
    for i, dy in enumerate(dys):
        if i:
            dx.addmm_(dy, weights[2 * i])
        gradients.append(torch.mm(dy.t(), x) if needs[2 * i] else None)
        gradients.append(dy.sum(0) if needs[2 * i + 1] else None)
    return dx, gradients


def _rows(x: Tensor) -> Tensor:
    """(B, H, S, D) as (B S, H D)."""
    B, H, S, D = x.shape
    return x.transpose(1, 2).reshape(B * S, H * D)


def _attention_case(q: Tensor, k: Tensor, spec: Spec) -> Case:
    B, Hq, S, D = q.shape
    return Case(q.device, q.dtype, (B, Hq, k.shape[1], S, k.shape[2], D), options_of(spec.causal, spec.window))


def _run_again(ctx: Any, dy: Tensor, x: Tensor, weights: Sequence[Tensor | None], first: int) -> Gradients:
    """The gradients with a graph of their own, from the block's modules."""
    found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    places = [i for i, need in enumerate(ctx.needs_input_grad) if need]
    inputs = [x, *weights]
    at = [0 if i == 1 else i - first + 1 for i in places]  # x is argument 1, the weights begin at `first`
    y = ctx.spec.again(x)
    wanted: list[Any] = [inputs[i] for i in at]
    gradients = torch.autograd.grad(y, wanted, dy, create_graph=True, allow_unused=True, materialize_grads=True)
    for place, gradient in zip(places, gradients, strict=True):
        found[place] = gradient
    return tuple(found)


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
            _linear(rows, weight, bias).view(B, S, heads, -1)
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
        o, lse = attention_fwd(_attention_case(q, k, spec), q, k, v, spec.causal, spec.scale, spec.window)
        a = _linear(_rows(o), wo, bo).view(B, S, N)
        y, s, statistics2 = _add_rms_norm.forward(a, x, w2, None, spec.eps[1])
        rows2 = y.view(-1, N)
        gate, up = _linear(rows2, wg, bg), _linear(rows2, wu, bu)
        m = swiglu_fwd(Case(gate.device, gate.dtype, gate.shape), gate, up)
        out = _linear(m, wd, bd).view(B, S, N).add_(s)
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
            return _run_again(ctx, dout, x, weights, 4)
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
        dm, d_down = _linears_backward([dout.view(-1, N)], m, (wd, bd), need[16:18])
        dgate, dup = swiglu_bwd(Case(gate.device, gate.dtype, gate.shape), dm, gate, up)
        dy, d_gates = _linears_backward([dgate, dup], rows2, (wg, bg, wu, bu), need[12:16])
        da, dw2, _ = _add_rms_norm.backward(
            dy.view(B, S, N), dout, s, w2, None, statistics2, spec.eps[1], (True, need[1], False)
        )
        do, d_o = _linears_backward([da.view(-1, N)], _rows(o), (wo, bo), need[10:12])
        do = do.view(B, S, spec.heads[0], -1).transpose(1, 2)
        dq, dk, dv = attention_bwd(
            _attention_case(q, k, spec), do, q, k, v, o, lse, spec.causal, spec.scale, spec.window
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
            dqkv = [dq.view(rows.shape[0], -1), dk.view(rows.shape[0], -1), _rows(dv)]
        else:
            dqkv = [_rows(dq), _rows(dk), _rows(dv)]
        dh, d_qkv = _linears_backward(dqkv, rows, (wq, bq, wk, bk, wv, bv), need[2:8])
        dx, dw1, _ = _add_rms_norm.backward(
            dh.view(B, S, N), da, x, w1, None, statistics1, spec.eps[0], (True, need[0], False)
        )
        return (None, dx, None, None, dw1, dw2, *d_qkv, dnq, dnk, *d_o, *d_gates, *d_down)


# --- GPT-2 -----------------------------------------------------------------------------------------------------------


class GPT2Block(torch.autograd.Function):
    """Norm, attention, residual and norm, MLP with a GELU, residual.

    Takes (spec, x (B, S, N), weights): weight and bias of the two norms, of the layers for q, k and v together, for the
    attention's result, into the MLP and out of it. The layers' weights are (in, out), as Conv1D has them.
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
        o, lse = attention_fwd(_attention_case(q, k, spec), q, k, v, spec.causal, spec.scale, spec.window)
        a = torch.addmm(bo, _rows(o), wo).view(B, S, N)
        y, s, statistics2 = _add_layer_norm.forward(a, x, w2, b2, spec.eps[1])
        rows2 = y.view(-1, N)
        case = Case(x.device, x.dtype, (B * S, wf.shape[1], N), (spec.approximate, "bias", "keep"))
        f, z = linear_gelu_fwd(case, rows2, wf.t(), bf, spec.approximate, True)
        out = torch.addmm(bp, f, wp).view(B, S, N).add_(s)
        ctx.spec = spec
        ctx.save_for_backward(x, *weights, statistics1, rows, qkv, o, lse, s, statistics2, rows2, z, f)
        return out

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Gradients:
        """The gradients of x and the weights."""
        (dout,) = dys
        x, *rest = ctx.saved_tensors
        weights, rest = rest[:12], rest[12:]
        if torch.is_grad_enabled():
            return _run_again(ctx, dout, x, weights, 2)
        w1, b1, w2, b2, wa, _, wo, _, wf, bf, wp, _ = weights
        statistics1, rows, qkv, o, lse, s, statistics2, rows2, z, f = rest
        spec: Spec = ctx.spec
        need = ctx.needs_input_grad[2:]
        B, S, N = x.shape

        def conv1d(dy: Tensor, source: Tensor, weight: Tensor, at: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
            dweight = torch.mm(source.t(), dy) if need[at] else None
            return torch.mm(dy, weight.t()), dweight, dy.sum(0) if need[at + 1] else None

        da: Any
        dout = dout.contiguous()
        df, dwp, dbp = conv1d(dout.view(-1, N), f, wp, 10)
        names = [name for name, wanted in (("x", True), ("weight", need[8]), ("bias", need[9])) if wanted]
        case = Case(x.device, x.dtype, (B * S, wf.shape[1], N), (spec.approximate, *names))
        dy, dwf, dbf = linear_gelu_bwd(case, df, rows2, wf.t(), bf, z, spec.approximate, (True, need[8], need[9]))
        da, dw2, db2 = _add_layer_norm.backward(
            dy.view(B, S, N), dout, s, w2, b2, statistics2, spec.eps[1], (True, need[2], need[3])
        )
        do, dwo, dbo = conv1d(da.view(-1, N), _rows(o), wo, 6)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        do = do.view(B, S, spec.heads[0], -1).transpose(1, 2)
        parts = attention_bwd(_attention_case(q, k, spec), do, q, k, v, o, lse, spec.causal, spec.scale, spec.window)
        dqkv = torch.cat([_rows(part) for part in parts], 1)
        dh, dwa, dba = conv1d(dqkv, rows, wa, 4)
        dx, dw1, db1 = _add_layer_norm.backward(
            dh.view(B, S, N), da, x, w1, b1, statistics1, spec.eps[0], (True, need[0], need[1])
        )
        dwf = None if dwf is None else dwf.t()
        return (None, dx, dw1, db1, dw2, db2, dwa, dba, dwo, dbo, dwf, dbf, dwp, dbp)
