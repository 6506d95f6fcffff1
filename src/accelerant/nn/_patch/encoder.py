"""Layers of ViT and BERT as one autograd function each: layer norms, attention, an MLP with a GELU.

As in `fused`. Queries, keys and values are one product here, of their weights laid side by side: a copy of a few MiB,
for which the backward pass has one product instead of three, twice over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accelerant.nn._patch.parts import (
    Gradients,
    Spec,
    attention_case,
    linear,
    packed_gradient,
    rows_of,
    run_again,
)
from accelerant.ops.attention.op import attention_fwd
from accelerant.ops.linear_gelu.op import linear_gelu_fwd
from accelerant.ops.norm.op import _add_layer_norm, _layer_norm
from accelerant.ops.transformer.op import column_sums, dgelu, linear_dx, linear_dz, norm_backward
from accelerant.runtime.dispatch import Case

__all__ = ["PostNormLayer", "PreNormLayer"]


# --- parts -----------------------------------------------------------------------------------------------------------


def _attend(rows: Tensor, weights: Sequence[Any], B: int, spec: Spec) -> tuple[Tensor, ...]:
    """Attention of rows (B S, N), projected; and what the gradient needs: the product's weight, q, k and v, o, lse."""
    wq, bq, wk, bk, wv, bv, wo, bo = weights
    wqkv = torch.cat((wq, wk, wv))
    bqkv = None if bq is None else torch.cat((bq, bk, bv))
    qkv = linear(rows, wqkv, bqkv).view(B, rows.shape[0] // B, 3, spec.heads[0], -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    o, lse = attention_fwd(attention_case(q, k, spec), q, k, v, spec.causal, spec.scale, spec.window)
    return linear(rows_of(o), wo, bo), wqkv, qkv, o, lse


def _attend_backward(
    da: Tensor, rows: Tensor, wo: Tensor, kept: Sequence[Tensor], spec: Spec, need: Sequence[bool]
) -> tuple[Tensor, Gradients]:
    """The gradient of q, k and v (B S, 3 N), and of weight and bias of the three and of the projection's weight."""
    _, qkv, o, lse = kept
    dwo = torch.mm(da.t(), rows_of(o)) if need[6] else None
    do = torch.mm(da, wo).view(*qkv.shape[:2], *qkv.shape[3:]).transpose(1, 2)
    dqkv = packed_gradient(do, qkv, o, lse, spec).view(rows.shape[0], -1)
    nothing = (None,) * 3
    dw = torch.mm(dqkv.t(), rows).chunk(3) if any(need[:6:2]) else nothing
    db = column_sums(dqkv, dqkv.dtype).chunk(3) if any(need[1:6:2]) else nothing
    return dqkv, (dw[0], db[0], dw[1], db[1], dw[2], db[2], dwo)


def _mlp(rows: Tensor, weights: Sequence[Any], approximate: str) -> tuple[Tensor, Tensor]:
    """The MLP of rows, and what stands before its GELU."""
    up, up_bias, down, down_bias = weights
    case = Case(
        rows.device,
        rows.dtype,
        (rows.shape[0], *up.shape),
        (approximate, "bias" if up_bias is not None else "", "keep"),
    )
    f, z = linear_gelu_fwd(case, rows, up, up_bias, approximate, True)
    return linear(f, down, down_bias), z


def _mlp_backward(
    dm: Tensor, rows: Tensor, z: Tensor, weights: Sequence[Any], approximate: str, need: Sequence[bool]
) -> tuple[Tensor, Gradients]:
    """The gradient of z, and those of weight and bias of the first layer and of the second's weight."""
    _, up_bias, down, _ = weights
    sums = up_bias.dtype if need[1] else None
    if approximate == "tanh":
        dz, f, dup_bias = linear_dz(dm, down, z, sums)
    else:
        dz, f, dup_bias = dgelu(linear_dx(dm, down), z, approximate, sums)
    ddown = torch.mm(dm.t(), f) if need[2] else None
    return dz, (torch.mm(dz.t(), rows) if need[0] else None, dup_bias, ddown)


# --- ViT -------------------------------------------------------------------------------------------------------------


class PreNormLayer(torch.autograd.Function):
    """Norm, attention, residual and norm, MLP with a GELU, residual.

    Takes (spec, x (B, S, N) contiguous, weights): weight and bias of the two norms, of q, k, v and the projection, and
    of the MLP's two layers; the biases of q, k and v are all there or all None.
    """

    @staticmethod
    def forward(ctx: Any, spec: Spec, x: Tensor, *weights: Any) -> Tensor:
        """The layer's result."""
        w1, b1, w2, b2, *rest = weights
        B, _, N = x.shape
        h, statistics1 = _layer_norm.forward(x, w1, b1, spec.eps[0])
        rows = h.view(-1, N)
        a, *kept = _attend(rows, rest[:8], B, spec)
        y, s, statistics2 = _add_layer_norm.forward(a.view(x.shape), x, w2, b2, spec.eps[1])
        rows2 = y.view(-1, N)
        m, z = _mlp(rows2, rest[8:], spec.approximate)
        ctx.spec = spec
        ctx.save_for_backward(x, *weights, statistics1, rows, *kept, s, statistics2, rows2, z)
        return m.view(x.shape).add_(s)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Gradients:
        """The gradients of x and the weights."""
        x, *rest = ctx.saved_tensors
        weights, rest = rest[:16], rest[16:]
        if torch.is_grad_enabled():
            return run_again(ctx, dys[0], x, weights, 2)
        w1, b1, w2, b2, *layers = weights
        statistics1, rows, *kept, s, statistics2, rows2, z = rest
        spec: Spec = ctx.spec
        need = ctx.needs_input_grad[2:]
        dout = dys[0].contiguous()
        dm = dout.view(rows.shape)
        ddown_bias = column_sums(dm, dm.dtype) if need[15] else None
        dz, of_mlp = _mlp_backward(dm, rows2, z, layers[8:], spec.approximate, need[12:])
        dy = torch.mm(dz, layers[8]).view(x.shape)
        del dz
        sums = layers[7].dtype if need[11] else None
        da, dw2, db2, dbo = norm_backward(dy, dout, s, w2, b2, statistics2, spec.eps[1], (True, *need[2:4]), sums)
        dqkv, of_attention = _attend_backward(da.view(rows.shape), rows, layers[6], kept, spec, need[4:])
        dh: Any = torch.mm(dqkv, kept[0]).view(x.shape)
        dx, dw1, db1 = _add_layer_norm.backward(dh, da, x, w1, b1, statistics1, spec.eps[0], (True, *need[:2]))
        return (None, dx, dw1, db1, dw2, db2, *of_attention, dbo, *of_mlp, ddown_bias)


# --- BERT ------------------------------------------------------------------------------------------------------------


class PostNormLayer(torch.autograd.Function):
    """Attention, residual and norm, MLP with a GELU, residual and norm.

    Takes what PreNormLayer takes; the norms in the order of their use.
    """

    @staticmethod
    def forward(ctx: Any, spec: Spec, x: Tensor, *weights: Any) -> Tensor:
        """The layer's result."""
        out: Tensor
        w1, b1, w2, b2, *rest = weights
        B, _, N = x.shape
        a, *kept = _attend(x.view(-1, N), rest[:8], B, spec)
        y, s, statistics1 = _add_layer_norm.forward(a.view(x.shape), x, w1, b1, spec.eps[0])
        m, z = _mlp(y.view(-1, N), rest[8:], spec.approximate)
        out, s2, statistics2 = _add_layer_norm.forward(m.view(x.shape), y, w2, b2, spec.eps[1])
        ctx.spec = spec
        ctx.save_for_backward(x, *weights, *kept, y, s, statistics1, z, s2, statistics2)
        return out

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Gradients:
        """The gradients of x and the weights."""
        x, *rest = ctx.saved_tensors
        weights, rest = rest[:16], rest[16:]
        if torch.is_grad_enabled():
            return run_again(ctx, dys[0], x, weights, 2)
        w1, b1, w2, b2, *layers = weights
        *kept, y, s, statistics1, z, s2, statistics2 = rest
        spec: Spec = ctx.spec
        need = ctx.needs_input_grad[2:]
        flat = (-1, x.shape[-1])
        sums = layers[11].dtype if need[15] else None
        ds2, dw2, db2, ddown_bias = norm_backward(
            dys[0].contiguous(), None, s2, w2, b2, statistics2, spec.eps[1], (True, *need[2:4]), sums
        )
        dz, of_mlp = _mlp_backward(ds2.view(flat), y.view(flat), z, layers[8:], spec.approximate, need[12:])
        dy = ds2.view(flat).addmm_(dz, layers[8]).view(x.shape)  # both ways from y: the residual and the MLP
        del dz
        sums = layers[7].dtype if need[11] else None
        ds, dw1, db1, dbo = norm_backward(dy, None, s, w1, b1, statistics1, spec.eps[0], (True, *need[:2]), sums)
        dqkv, of_attention = _attend_backward(ds.view(flat), x.view(flat), layers[6], kept, spec, need[4:])
        dx = ds.view(flat).addmm_(dqkv, kept[0]).view(x.shape)
        return (None, dx, dw1, db1, dw2, db2, *of_attention, dbo, *of_mlp, ddown_bias)
