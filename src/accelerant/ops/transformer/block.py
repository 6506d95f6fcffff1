# ruff: noqa: D102  forward and backward are autograd's; the classes say what they take and give
"""A transformer block, and its pieces, as autograd functions with both passes written out.

What torch's autograd would do besides is left out: weights are cast once, not at each use; gelu's result is not kept,
but made anew beside its gradient; q, k and v are views of one product and their gradients one buffer; the gradients of
weights leave the product in the parameters' dtype; a residual is added where the next norm reads it. The residual
stream therefore goes from block to block as two tensors, what was added last and what it is to be added to.

Kept for the backward pass, in bytes a position of width W in a 16-bit dtype: 2 W each for two sums, two norms and o;
6 W for q, k and v; 8 W before gelu. That is 24 W in all, 18 KiB for GPT-2 124M.

A backward pass that is itself differentiated (create_graph=True) runs the plain composition once more.

A weight may come as 8-bit numbers instead (Float8Weight): its product forward, and the one back to its input, are then
of those; the product that is the weight's gradient stays in the dtype of x.

Parameters that have a sink (accelerant.ops._per_example) get no gradient here: it is given what theirs is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from accelerant.ops._per_example import Forming, PerExampleSink, announce, examples_of, sink_of
from accelerant.ops.linear_fp8 import op as float8
from accelerant.ops.linear_fp8.op import Float8Weight, flattened, unflattened
from accelerant.ops.linear_gelu.op import linear_gelu_fwd
from accelerant.ops.norm.op import _add_layer_norm, _layer_norm
from accelerant.ops.transformer import ends, op, packed
from accelerant.ops.transformer.reference import block_reference
from accelerant.runtime.dispatch import Case

__all__ = [
    "Attention", "Block", "BlockShape", "Embed", "FusedLinear", "FusedMLP", "TiedLoss", "fused_attention",
    "fused_block", "fused_embed", "fused_linear", "fused_mlp", "tied_loss",
]  # fmt: skip

_Gradients = tuple[Tensor | None, ...]
_Weight = Tensor | Float8Weight
"""A linear layer's weight as its products take it."""


class BlockShape(NamedTuple):
    """Of a block: heads, and eps of its two norms."""

    heads: int
    eps: tuple[float, float]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool], examples: int,
    sums: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Those of a linear layer's parameters, in their dtypes; sums are those of dy's columns, where they are known.

    Where the parameters have a sink it gets them, and sums are of each example; sums that a block of the other kind has
    left, a frozen one say, are not used.
    """
    sink = _sink((weight, bias))
    if sums is not None and sums.dim() != (1 if sink is None else 2):
        sums = None
    if sink is not None:
        weight_there, bias_there = _wanted((weight, bias), needs)
        if bias_there is not None and sums is not None:
            sink.gradients(bias_there, sums)
            bias_there = None
        sink.linear(weight_there, bias_there, dy, x, examples)
        return None, None
    dbias = None
    if needs[1] and bias is not None:
        dbias = op.column_sums(dy, bias.dtype) if sums is None or sums.dtype != bias.dtype else sums
    return op.linear_dw(dy, x, weight.dtype) if needs[0] else None, dbias


def _sink(params: Sequence[Tensor | None]) -> PerExampleSink | None:
    """Where per-example gradients of a layer's parameters go, if any does."""
    for param in params:
        sink = sink_of(param)
        if sink is not None:
            return sink
    return None


def _announce(x: Tensor, params: Sequence[Tensor | None]) -> int:
    """Tell the parameters' sink, if there is one, that each will come once more; the examples x is of, else 0."""
    sink = _sink(params)
    return 0 if sink is None else announce(sink, x, *params)


def _wanted(params: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    return [param if need else None for param, need in zip(params, needs, strict=True)]


def _refuse_twice(low: _Weight) -> None:
    """Raises RuntimeError where a gradient of products in fp8 is to be differentiated: rounding has no derivative."""
    if isinstance(low, Float8Weight):
        raise RuntimeError("the backward pass of a layer in fp8 cannot be differentiated: take bfloat16 for that")


def _note(dx: Tensor, sums: Tensor | None) -> None:
    """Leave the sums of a gradient's columns with it, for the block before: its last bias is what they belong to."""
    dx._column_sums = sums, dx._version  # type: ignore[attr-defined]  # a tensor takes attributes


def _noted(dy: Tensor) -> Tensor | None:
    """The sums that were left with a gradient, if nothing was added to it since."""
    sums, version = getattr(dy, "_column_sums", (None, 0))
    return sums if version == dy._version else None


# --- a linear layer --------------------------------------------------------------------------------------------------


class FusedLinear(torch.autograd.Function):
    """x (..., K), weight (N, K) and bias (N,) in the parameters' dtype, the same two in x's -> (..., N)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: _Weight, low_bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, *flattened([low]))
        ctx.examples = _announce(x, (weight, bias))
        return op.linear(_rows(x), low, low_bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        x, weight, bias, *parts = ctx.saved_tensors
        (low,) = unflattened(parts)
        needs = ctx.needs_input_grad
        dy, rows = _rows(dy), _rows(x)
        if torch.is_grad_enabled():
            _refuse_twice(low)
            dx = (dy @ weight.to(dy.dtype)).view(x.shape)
            db = None if bias is None else dy.sum(0).to(bias.dtype)
            return dx, (dy.t() @ rows).to(weight.dtype), db, None, None
        dx = op.linear_dx(dy, low).view(x.shape) if needs[0] else None
        return dx, *_weight_gradients(dy, rows, weight, bias, needs[1:3], ctx.examples), None, None


# --- the MLP ---------------------------------------------------------------------------------------------------------


def _mlp_forward(
    y: Tensor, up: _Weight, up_bias: Tensor | None, down: _Weight, down_bias: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """down(gelu(up(y))) of rows, and what stands before gelu, if that is to be kept."""
    if isinstance(up, Float8Weight):
        assert isinstance(down, Float8Weight)  # for the type checker: weights are of one kind
        z = float8.linear(y, up, up_bias)
        return float8.gelu_linear(z, down, down_bias), z if keep else z.new_empty(0)
    options = ("tanh", "" if up_bias is None else "bias", "keep" if keep else "")
    a, z = linear_gelu_fwd(Case(y.device, y.dtype, (y.shape[0], *up.shape), options), y, up, up_bias, "tanh", keep)
    return op.linear(a, down, down_bias), z


def _mlp_backward(
    dm: Tensor, y: Tensor, z: Tensor, lows: Sequence[_Weight], params: Sequence[Tensor | None], needs: Sequence[bool],
    examples: int, dm_sums: Tensor | None = None,
) -> tuple[Tensor, _Gradients]:  # fmt: skip
    """The gradient of the MLP's rows y, and of weight and bias of up and down."""
    up, up_bias, down, down_bias = params
    assert up is not None and down is not None  # noqa: PT018  for the type checker: weights are there
    sums = up_bias.dtype if up_bias is not None and needs[1] else None
    sink = _sink((up, up_bias))
    low_up, low_down = lows
    rounded: float8.Rounded | None = None
    if isinstance(low_up, Float8Weight) and isinstance(low_down, Float8Weight):
        dz, a, dup_bias, rounded = float8.linear_dz(dm, low_down, z, low_up, None if sink is not None else sums)
    else:
        assert isinstance(low_down, Tensor)  # for the type checker: weights are of one kind
        dz, a, dup_bias = op.linear_dz(dm, low_down, z, sums, None if sink is None else examples)
    ddown, ddown_bias = _weight_gradients(dm, a, down, down_bias, needs[2:4], examples, dm_sums)
    del a
    dup: Tensor | None
    if sink is None:
        dup = op.linear_dw(dz, y, up.dtype) if needs[0] else None
    else:
        dup, dup_bias = _weight_gradients(dz, y, up, up_bias, needs[:2], examples, dup_bias)
    if isinstance(low_up, Float8Weight) and rounded is not None:
        return float8.rounded_dx(rounded, low_up, dz.dtype), (dup, dup_bias, ddown, ddown_bias)
    return op.linear_dx(dz, low_up), (dup, dup_bias, ddown, ddown_bias)


class FusedMLP(torch.autograd.Function):
    """x (..., W); weight and bias of up and of down, then the same four in x's dtype -> (..., W)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        params, (up, up_bias, down, down_bias) = given[:4], given[4:]
        m, z = _mlp_forward(_rows(x), up, up_bias, down, down_bias, any(ctx.needs_input_grad))
        ctx.save_for_backward(x, z, *params, *flattened([up, down]))
        ctx.examples = _announce(x, params)
        return m.view(*x.shape[:-1], m.shape[-1])

    @staticmethod
    def backward(ctx: Any, dm: Tensor) -> _Gradients:
        x, z, *rest = ctx.saved_tensors
        params, lows = rest[:4], unflattened(rest[4:])
        nothing = (None,) * 4
        if torch.is_grad_enabled():
            _refuse_twice(lows[0])
            return *_again(_plain_mlp, dm, x, params, ctx.needs_input_grad[:5]), *nothing
        dx, gradients = _mlp_backward(_rows(dm), _rows(x), z, lows, params, ctx.needs_input_grad[1:5], ctx.examples)
        return dx.view(x.shape), *gradients, *nothing


def _plain_mlp(x: Tensor, params: Sequence[Any]) -> Tensor:
    up, up_bias, down, down_bias = [None if param is None else param.to(x.dtype) for param in params]
    assert up is not None and down is not None  # noqa: PT018  for the type checker: weights are there
    return functional.linear(functional.gelu(functional.linear(x, up, up_bias), approximate="tanh"), down, down_bias)


# --- attention -------------------------------------------------------------------------------------------------------


class Attention(torch.autograd.Function):
    """Causal self-attention of a packed product qkv (B, T, 3, H, D) -> (B, T, H D)."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        o, lse = packed.attend(qkv)
        ctx.save_for_backward(qkv, o, lse)
        return _joined(o)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        qkv, o, lse = ctx.saved_tensors
        if torch.is_grad_enabled():
            (found,) = _again(lambda x, _: _plain_attention(x), dy, qkv, (), (True,))
            assert found is not None  # for the type checker: it was asked for
            return found
        return packed.attend_backward(_split(dy, qkv), qkv, o, lse)


def _joined(o: Tensor) -> Tensor:
    """(B, H, T, D) as (B, T, H D), a view where heads lie side by side."""
    B, H, T, D = o.shape
    return o.transpose(1, 2).reshape(B, T, H * D)


def _split(do: Tensor, qkv: Tensor) -> Tensor:
    """The reverse."""
    B, T, _, H, D = qkv.shape
    return do.reshape(B, T, H, D).transpose(1, 2)


def _plain_attention(qkv: Tensor) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    T = q.shape[2]
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return _joined(scores.masked_fill(later, -torch.inf).softmax(-1) @ v)


# --- the block -------------------------------------------------------------------------------------------------------


class Block(torch.autograd.Function):
    """The pre-norm block: x and residual (B, T, W) -> the last branch, and the residual that it is to be added to.

    s1 = x + residual    s2 = s1 + projection(attention(qkv(norm_1(s1))))    branch = down(gelu(up(norm_2(s2))))

    Takes x, residual (None at first: s1 = x), the shape, weight and bias of norm_1, qkv, projection, norm_2, up and
    down, and the eight of the linear maps once more in x's dtype; the four weights as 8-bit numbers, if one is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, shape: BlockShape, *given: Any) -> tuple[Tensor, Tensor]:
        params, (qkv_weight, qkv_bias, projection, projection_bias, up, up_bias, down, down_bias) = (
            given[:12],
            given[12:],
        )
        B, T, W = x.shape
        if residual is None:
            y1, t1 = _layer_norm._forward(x, params[0], params[1], shape.eps[0])
            s1 = x
        else:
            y1, s1, t1 = _add_layer_norm._forward(x, residual, params[0], params[1], shape.eps[0])
        qkv = op.linear(_rows(y1), qkv_weight, qkv_bias).view(B, T, 3, shape.heads, W // shape.heads)
        o, lse = packed.attend(qkv)
        p = op.linear(_rows(_joined(o)), projection, projection_bias).view(B, T, W)
        y2, s2, t2 = _add_layer_norm._forward(p, s1, params[6], params[7], shape.eps[1])
        m, z = _mlp_forward(_rows(y2), up, up_bias, down, down_bias, any(ctx.needs_input_grad))
        lows = flattened([qkv_weight, projection, up, down])
        ctx.save_for_backward(s1, t1, y1, qkv, o, lse, s2, t2, y2, z, *params, *lows)
        ctx.examples = _announce(x, params)
        ctx.block, ctx.alone = shape, residual is None
        ctx.set_materialize_grads(False)
        return m.view(B, T, W), s2

    @staticmethod
    def backward(ctx: Any, dm: Tensor | None, ds: Tensor | None) -> _Gradients:
        s1, t1, y1, qkv, o, lse, s2, t2, y2, z, *rest = ctx.saved_tensors
        params, lows = rest[:12], unflattened(rest[12:])
        needs = ctx.needs_input_grad[3:15]
        shape: BlockShape = ctx.block
        B, T = s1.shape[:2]
        if dm is None:
            dm = torch.zeros_like(s2)
        if torch.is_grad_enabled():
            _refuse_twice(lows[0])
            if not ctx.alone:
                raise RuntimeError(
                    "the backward pass of a block with a residual apart cannot be differentiated, since only their sum "
                    'is kept: discard "cuda" from accelerant.nn.layers.FUSED for that'
                )
            given = (dm, torch.zeros_like(s2) if ds is None else ds)
            found = _again(partial(_plain_block, shape), given, s1, params, (True, *needs))
            return found[0], None, None, *found[1:], *((None,) * 8)
        examples: int = ctx.examples
        dy2, mlp = _mlp_backward(_rows(dm), _rows(y2), z, lows[2:], params[8:], needs[8:], examples, _noted(dm))
        g2, dn2, dc2, g2_sums = _norm_gradients(
            dy2.view_as(s2),
            ds,
            s2,
            params[6:8],
            t2,
            shape.eps[1],
            needs[6:8],
            params[5] if needs[5] else None,
            examples,
        )
        g2_rows = _rows(g2)
        projected = _weight_gradients(g2_rows, _rows(_joined(o)), params[4], params[5], needs[4:6], examples, g2_sums)
        do = op.linear_dx(g2_rows, lows[1]).view(B, T, -1)
        dqkv = packed.attend_backward(_split(do, qkv), qkv, o, lse).view(B * T, -1)
        mixed = _weight_gradients(dqkv, _rows(y1), params[2], params[3], needs[2:4], examples)
        dy1 = op.linear_dx(dqkv, lows[0]).view_as(s1)
        last = None if ctx.alone else params[11]  # the block before has such a bias, too
        g1, dn1, dc1, g1_sums = _norm_gradients(dy1, g2, s1, params[:2], t1, shape.eps[0], needs[:2], last, examples)
        _note(g1, g1_sums)
        return g1, None if ctx.alone else g1, None, dn1, dc1, *mixed, *projected, dn2, dc2, *mlp, *((None,) * 8)


def _norm_gradients(
    dy: Tensor, ds: Tensor | None, s: Tensor, params: Sequence[Tensor | None], statistics: Tensor, eps: float,
    needs: Sequence[bool], before: Tensor | None, examples: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of s + ds, of scale and shift, and the sums that `before` wants, the bias that s ended with."""
    weight, bias = params
    assert weight is not None  # for the type checker: a block's norms have one
    sink = _sink((*params, before))
    if sink is None:
        sums = None if before is None else before.dtype
        return op.norm_backward(dy, ds, s, weight, bias, statistics, eps, (True, *needs), sums)
    wanted = (sink.wants(weight), sink.wants(bias), sink.wants(before))
    g, dweight, dbias, each = op.norm_backward_each(dy, ds, s, weight, statistics, eps, examples, wanted)
    for param, found in ((weight, dweight), (bias, dbias)):
        if param is not None and found is not None:
            sink.gradients(param, found)
    return g, None, None, each


def _plain_block(shape: BlockShape, x: Tensor, params: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    return block_reference(x, shape.heads, shape.eps, tuple(params))


def _again(
    run: Any, dy: Any, x: Tensor, params: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of x and of the parameters, to be differentiated in turn: run(x, params) is done once more."""
    with torch.enable_grad():
        whole = [x.view_as(x), *(None if param is None else param.view_as(param) for param in params)]
        for each, need in zip(whole, needs, strict=True):
            if each is not None and need and not each.requires_grad:
                each.requires_grad_()
        y = run(whole[0], whole[1:])
        wanted = [each for each, need in zip(whole, needs, strict=True) if need and each is not None]
        found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True, materialize_grads=True, allow_unused=True))
    return tuple(next(found) if need and each is not None else None for each, need in zip(whole, needs, strict=True))


# --- embeddings ------------------------------------------------------------------------------------------------------


class Embed(torch.autograd.Function):
    """tokens (B, T), table (V, D), places (P, D), a dtype -> the sum of their rows (B, T, D), and the table itself.

    The table that comes out is for the output layer that is tied to it: both gradients then meet here, and the rows of
    one are added to the other where it lies.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tokens, table, places)
        ctx.set_materialize_grads(False)
        _announce(tokens, (table, places))
        return ends.embed(tokens, table, places, dtype), table.view_as(table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dtable: Tensor | None) -> _Gradients:
        tokens, table, places = ctx.saved_tensors
        dplaces = None
        if dy is None:
            return None, dtable, None, None
        sink = _sink((table, places))
        if sink is not None:
            B, T, D = dy.shape
            rows, (table, places) = _rows(dy), _wanted((table, places), ctx.needs_input_grad[1:3])
            if table is not None:
                sink.embedding(table, rows, tokens, B)
            if places is not None:
                sink.embedding(places, rows, torch.arange(T, device=dy.device), B, distinct=True)
            return None, None, None, None
        if ctx.needs_input_grad[1]:
            if dtable is None:
                dtable = torch.zeros_like(table)
            ends.embed_backward(dy, tokens, dtable)
        if ctx.needs_input_grad[2]:
            B, T, D = dy.shape
            dplaces = torch.zeros_like(places)
            dplaces[:T] = op.column_sums(dy.reshape(B, T * D), places.dtype).view(T, D)
        return None, dtable if ctx.needs_input_grad[1] else None, dplaces, None


class TiedLoss(torch.autograd.Function):
    """hidden (M, K), table (V, K) in the parameters' dtype and in hidden's, targets (M,), classes -> the mean loss.

    The gradients are made with the loss (see accelerant.ops.linear_cross_entropy), and given away by the first backward
    pass; another one makes them again. Rows of the table from `classes` on get a gradient of 0.

    Where the table has a sink it gets each example's gradient, formed with the loss too; or, where sequences are
    shorter than the table is wide, the gradient of all logits, which is then the smaller.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: Tensor, low: Tensor, targets: Tensor, classes: int, ignore_index: int
    ) -> Tensor:
        needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        sink = sink_of(table) if needs[1] else None
        forming = None
        if sink is not None:
            forming = Forming(sink, examples_of(sink, hidden.shape[0]))
            sink.expect(table)
        loss, *ctx.gradients = ends.tied_loss(hidden, low, targets, classes, ignore_index, needs, forming)
        ctx.save_for_backward(hidden, table, low, targets)
        ctx.rest, ctx.dtypes = (classes, ignore_index, needs, forming), (hidden.dtype, table.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        hidden, table, *others = ctx.saved_tensors
        made, ctx.gradients = ctx.gradients, None
        if made is None:
            _, *made = ends.tied_loss(hidden, *others, *ctx.rest)
        forming, sink = ctx.rest[3], sink_of(table)
        if forming is not None and sink is not None and made[1] is not None:
            if made[1].dim() == 3:  # of the very numbers that were formed: what is scaled after them is not rounded
                sink.gradients(table, made[1], forming.squares, dy)
            else:
                sink.linear(table, None, ends.scaled(made[1], dy), hidden, forming.examples)
            made[1] = None
        found = [None if each is None else ends.scaled(each, dy) for each in made]
        low = [None if each is None else each.to(dtype) for each, dtype in zip(found, ctx.dtypes, strict=True)]
        return *low, None, None, None, None


fused_linear: Callable[..., Tensor] = FusedLinear.apply
fused_mlp: Callable[..., Tensor] = FusedMLP.apply
fused_attention: Callable[..., Tensor] = Attention.apply
fused_block: Callable[..., tuple[Tensor, Tensor]] = Block.apply
fused_embed: Callable[..., tuple[Tensor, Tensor]] = Embed.apply
tied_loss: Callable[..., Tensor] = TiedLoss.apply
