# ruff: noqa: D102  forward and backward are autograd's; each class documents its arguments and results
"""Transformer blocks and their parts as autograd functions with explicit forward and backward passes.

Weights are cast once, GELU's result is recomputed, and a residual is added in the norm that reads it, so the stream
travels between blocks as two tensors. Parameters with a per-example sink (ops/_per_example.py) get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from accelerant.ops import linear_fp8 as float8
from accelerant.ops import transformer as op
from accelerant.ops._per_example import Forming, announce, examples_of, first_sink, sink_of
from accelerant.ops.attention import attention_reference, backward_pass, forward_pass
from accelerant.ops.attention.backends import without_table
from accelerant.ops.linear_fp8 import Float8Weight, flattened, unflattened
from accelerant.ops.linear_gelu import linear_gelu_fwd
from accelerant.ops.norm import _add_layer_norm, _add_rms_norm, _layer_norm, _rms_norm
from accelerant.ops.rope import _rope
from accelerant.ops.swiglu import swiglu_bwd, swiglu_fwd
from accelerant.runtime.dispatch import Case


class BlockSpec(NamedTuple):
    """The configuration of a transformer block.

    `window` -1 for all positions; `scale` None for 1 / sqrt(head width); `post_norm`: norms follow the residual
    additions (BERT); `joined`: a pre-norm block returns the sum of branch and stream; `mask`: attention's segments.
    """

    heads: int
    eps: tuple[float, float]
    causal: bool = True
    window: int = -1
    scale: float | None = None
    approximate: str = "tanh"
    post_norm: bool = False
    joined: bool = False
    mask: Tensor | None = None


def packed_attention_reference(
    qkv: Tensor, causal: bool, window: int, scale: float | None, mask: Tensor | None = None
) -> Tensor:
    """Return the self-attention of q, k and v packed as (B, T, 3, H, D): (B, T, H D)."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    window_or_none, mask = None if window < 0 else window, without_table(mask, q.shape[2])
    o = attention_reference(q, k, v, causal=causal, scale=scale, window=window_or_none, mask=mask)
    assert isinstance(o, Tensor)  # for the type checker: no log-sum-exp was requested
    return o.transpose(1, 2).flatten(2)


def mlp_reference(x: Tensor, params: Sequence[Tensor | None], approximate: str = "tanh") -> Tensor:
    """Return down(gelu(up(x))); `params` are the weight and bias of up and of down, in any dtype."""
    up, up_bias, down, down_bias = (None if param is None else param.to(x.dtype) for param in params)
    assert up is not None and down is not None  # noqa: PT018  for the type checker
    return functional.linear(
        functional.gelu(functional.linear(x, up, up_bias), approximate=approximate), down, down_bias
    )


def block_reference(x: Tensor, spec: BlockSpec, params: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Apply a transformer block.

    Pre-norm (GPT-2, ViT):  s = x + projection(attention(qkv(norm_1(x))))    y = down(gelu(up(norm_2(s))))
    Post-norm (BERT):       h = norm_1(x + projection(attention(qkv(x))))    y = norm_2(h + down(gelu(up(h))))

    Args:
        x: (B, T, W).
        params: weight and bias of norm_1, qkv, projection, norm_2, up and down, in any dtype; a bias may be None.

    Returns:
        y and s; (y + s, None) if `spec.joined`, (y, None) in post-norm.

    Source: Radford et al. 2019, section 2.3; Devlin et al. 2019, arXiv:1810.04805, section 3; Vaswani et al. 2017,
    arXiv:1706.03762, equation 1.
    """
    n1, c1, qkv, c2, projection, c3, n2, c4 = (None if param is None else param.to(x.dtype) for param in params[:8])
    assert qkv is not None and projection is not None  # noqa: PT018  for the type checker
    B, T, W = x.shape

    def attention(y: Tensor) -> Tensor:
        heads = functional.linear(y, qkv, c2).view(B, T, 3, spec.heads, W // spec.heads)
        o = packed_attention_reference(heads, spec.causal, spec.window, spec.scale, spec.mask)
        return functional.linear(o, projection, c3)

    if spec.post_norm:
        h = functional.layer_norm(x + attention(x), (W,), n1, c1, spec.eps[0])
        y = h + mlp_reference(h, params[8:], spec.approximate)
        return functional.layer_norm(y, (W,), n2, c4, spec.eps[1]), None
    s = x + attention(functional.layer_norm(x, (W,), n1, c1, spec.eps[0]))
    y = mlp_reference(functional.layer_norm(s, (W,), n2, c4, spec.eps[1]), params[8:], spec.approximate)
    return (y + s, None) if spec.joined else (y, s)


class TableSums(Protocol):
    """Sums of gradients over processes: where products leave theirs, and the two parts of a tied table's apart."""

    def place(self, weight: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return the memory in which a parameter's gradient is summed; None where it is copied there."""

    def looks_up(self, table: Tensor, count: int, dtype: torch.dtype) -> None:
        """Note that this many rows of a table are looked up, in a dtype."""

    def multiplies(self, table: Tensor) -> None:
        """Note that a table is an output layer's weight."""

    def takes_product(self, table: Tensor, gradient: Tensor) -> bool:
        """Take the output layer's part, and return True; or return False, for both parts to meet as usual."""

    def takes_rows(self, table: Tensor, dy: Tensor, tokens: Tensor) -> bool:
        """Take the other part, if the first was taken."""

    def whole(self, table: Tensor, gradient: Tensor) -> None:
        """Note a gradient in which both parts have met."""


table_sums: list[TableSums] = []  # that of the step which is under way, if its processes sum gradients; none or one


def placed(weight: Tensor, rows: int, columns: int) -> Tensor | None:
    """Return the memory (rows, columns) in which the step sums the gradient of a weight; None for memory of its own."""
    return next((sums.place(weight, (rows, columns)) for sums in table_sums), None)


Gradients = tuple[Tensor | None, ...]
_Params = Sequence[Tensor | None]
_Weight = Tensor | Float8Weight  # a linear layer's weight in the form that its products take


class ColumnSums:
    """Column sums of the gradient that a block's first norm passes to the block before it, for the latter's last bias.

    The earlier block takes them if autograd hands it the same tensor, unmodified, and need not read it again.
    """

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias
        self._stored: tuple[Tensor, int, Tensor | None] | None = None

    def store(self, gradient: Tensor, sums: Tensor | None) -> None:
        """Keep the column sums of a gradient."""
        self._stored = gradient, gradient._version, sums

    def take(self, gradient: Tensor) -> Tensor | None:
        """Return the stored sums if they are those of `gradient`, and forget them."""
        stored, self._stored = self._stored, None
        return stored[2] if stored is not None and stored[0] is gradient and stored[1] == gradient._version else None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _announce(ctx: Any, x: Tensor, params: _Params) -> None:
    sink = first_sink(params)
    ctx.examples = None if sink is None else announce(sink, x, *params)
    ctx.sunk = None if sink is None else params


def _with_sinks(ctx: Any, saved: Sequence[Any]) -> Sequence[Any]:
    """Return saved parameters: hooks on saved tensors, of checkpoints for example, return copies without a sink."""
    return saved if ctx.sunk is None else ctx.sunk


def _required(params: _Params, needs: Sequence[bool]) -> list[Tensor | None]:
    return [param if need else None for param, need in zip(params, needs, strict=True)]


def _linear_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool],
    examples: int | None, sums: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of a linear layer's weight and bias, in their dtypes; (None, None) if a sink takes them.

    `sums` are column sums of dy if known, per example with a sink. The weight's gradient has the weight's memory
    layout.
    """
    sink = None if examples is None else first_sink((weight, bias))
    if sums is not None and sums.dim() != (1 if sink is None else 2):
        sums = None  # left by a block of the other kind, a frozen one for example
    if sink is not None and examples is not None:
        required_weight, required_bias = _required((weight, bias), needs)
        if required_bias is not None and sums is not None:
            sink.gradients(required_bias, sums)
            required_bias = None
        sink.linear(required_weight, required_bias, dy, x, examples)
        return None, None
    dweight = dbias = None
    if needs[0]:
        transposed = not weight.is_contiguous()
        a, b = (x, dy) if transposed else (dy, x)
        out = placed(weight, a.shape[1], b.shape[1])
        same = weight.dtype is x.dtype
        dweight = torch.mm(a.t(), b, out=out) if same else op.linear_dw(a, b, weight.dtype, out)
        dweight = dweight.t() if transposed else dweight
    if needs[1] and bias is not None:
        dbias = op.column_sums(dy, bias.dtype) if sums is None or sums.dtype != bias.dtype else sums
    return dweight, dbias


def _refuse_float8(weight: _Weight) -> None:
    """Raise RuntimeError for double differentiation through fp8 products: rounding has no derivative."""
    if isinstance(weight, Float8Weight):
        raise RuntimeError("the backward pass of a layer in fp8 cannot be differentiated: use bfloat16 for that")


def gradients_of(y: Any, inputs: _Params, needs: Sequence[bool], dy: Any) -> Gradients:
    """Return differentiable gradients of y with respect to the inputs that need one, None for the others."""
    required = _required(inputs, needs)
    gradients = torch.autograd.grad(
        y, [x for x in required if x is not None], dy, create_graph=True, materialize_grads=True, allow_unused=True
    )
    remaining = iter(gradients)
    return tuple(None if x is None else next(remaining) for x in required)


def _double_backward(
    run: Callable[[Tensor, list[Any]], Any], dy: Any, x: Tensor, params: _Params, needs: Sequence[bool]
) -> Gradients:
    """Return differentiable gradients of x and the parameters, by autograd through run(x, params)."""
    with torch.enable_grad():
        inputs: list[Any] = [None if tensor is None else tensor.view_as(tensor) for tensor in (x, *params)]
        for tensor in _required(inputs, needs):
            if tensor is not None and not tensor.requires_grad:
                tensor.requires_grad_()
        return gradients_of(run(inputs[0], inputs[1:]), inputs, needs, dy)


class FusedLinear(torch.autograd.Function):
    """x (..., K), weight (N, K) and bias (N,) as parameters, the same two in the dtype of x -> (..., N)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cast_weight: _Weight, cast_bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, *flattened([cast_weight]))
        _announce(ctx, x, (weight, bias))
        return op.linear(_rows(x), cast_weight, cast_bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x, *saved = ctx.saved_tensors
        (weight, bias), (cast_weight,) = _with_sinks(ctx, saved[:2]), unflattened(saved[2:])
        needs = ctx.needs_input_grad
        dy, rows = _rows(dy), _rows(x)
        if torch.is_grad_enabled():
            _refuse_float8(cast_weight)
            dx = (dy @ weight.to(dy.dtype)).view(x.shape)
            dbias = None if bias is None else dy.sum(0).to(bias.dtype)
            return dx, (dy.t() @ rows).to(weight.dtype), dbias, None, None
        dx = op.linear_dx(dy, cast_weight).view(x.shape) if needs[0] else None
        return dx, *_linear_gradients(dy, rows, weight, bias, needs[1:3], ctx.examples), None, None


def _mlp_forward(
    y: Tensor, up: _Weight, up_bias: Tensor | None, down: _Weight, down_bias: Tensor | None, approximate: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return down(gelu(up(y))) of rows, and the input of GELU if `keep`, else an empty tensor."""
    if isinstance(up, Float8Weight):
        assert isinstance(down, Float8Weight)  # for the type checker: weights are of one kind
        z = float8.linear(y, up, up_bias)
        return float8.gelu_linear(z, down, down_bias), z if keep else z.new_empty(0)
    options = (approximate, "" if up_bias is None else "bias", "keep" if keep else "")
    case = Case(y.device, y.dtype, (y.shape[0], *up.shape), options)
    a, z = linear_gelu_fwd(case, y, up, up_bias, approximate, keep)
    assert isinstance(down, Tensor)  # for the type checker: weights are of one kind
    return functional.linear(a, down, down_bias), z


def _mlp_backward(
    dm: Tensor, y: Tensor, z: Tensor, weights: Sequence[_Weight], params: _Params, needs: Sequence[bool],
    examples: int | None, *, approximate: str = "tanh", sums: Tensor | None = None, add_to: Tensor | None = None,
) -> tuple[Tensor, Gradients]:  # fmt: skip
    """Return the gradients of the MLP's input and of the weight and bias of up and of down.

    z is the input of GELU; `sums` are column sums of dm if known; `add_to` is overwritten by the input's gradient
    added.
    """
    up, up_bias, down, down_bias = params
    assert up is not None and down is not None  # noqa: PT018  for the type checker
    bias_dtype = up_bias.dtype if up_bias is not None and needs[1] else None
    per_example = examples is not None and first_sink((up, up_bias)) is not None
    up_weight, down_weight = weights
    rounded: float8.Rounded | None = None
    if isinstance(up_weight, Float8Weight) and isinstance(down_weight, Float8Weight):
        column_dtype = None if per_example else bias_dtype
        dz, a, dup_bias, rounded = float8.linear_dz(dm, down_weight, z, up_weight, column_dtype)
    else:
        assert isinstance(down_weight, Tensor)  # for the type checker: weights are of one kind
        dz, a, dup_bias = op.linear_dz(dm, down_weight, z, bias_dtype, examples if per_example else None, approximate)
    down_gradients = _linear_gradients(dm, a, down, down_bias, needs[2:4], examples, sums)
    del a
    gradients = (*_linear_gradients(dz, y, up, up_bias, needs[:2], examples, dup_bias), *down_gradients)
    if isinstance(up_weight, Float8Weight) and rounded is not None:
        dy = float8.rounded_dx(rounded, up_weight, dz.dtype)
        return dy if add_to is None else add_to.add_(dy), gradients
    return op.linear_dx(dz, up_weight) if add_to is None else _add_linear_dx(add_to, dz, up_weight), gradients


def _add_linear_dx(total: Tensor, dy: Tensor, weight: _Weight) -> Tensor:
    """Add dy weight to `total` in place, in the product's epilogue if it has that dtype."""
    if isinstance(weight, Float8Weight) or total.dtype is not dy.dtype:
        return total.add_(op.linear_dx(dy, weight))
    return total.addmm_(dy, weight)


class FusedMLP(torch.autograd.Function):
    """x (..., W); weight and bias of up and of down, then the same four in the dtype of x -> (..., W)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *tensors: Any) -> Tensor:
        params, (up, up_bias, down, down_bias) = tensors[:4], tensors[4:]
        m, z = _mlp_forward(_rows(x), up, up_bias, down, down_bias, "tanh", any(ctx.needs_input_grad))
        ctx.save_for_backward(x, z, *params, *flattened([up, down]))
        _announce(ctx, x, params)
        return m.view(*x.shape[:-1], m.shape[-1])

    @staticmethod
    def backward(ctx: Any, dm: Tensor) -> Gradients:
        x, z, *rest = ctx.saved_tensors
        params, weights = _with_sinks(ctx, rest[:4]), unflattened(rest[4:])
        needs = ctx.needs_input_grad[:5]
        if torch.is_grad_enabled():
            _refuse_float8(weights[0])
            return *_double_backward(mlp_reference, dm, x, params, needs), *(None,) * 4
        dx, gradients = _mlp_backward(_rows(dm), _rows(x), z, weights, params, needs[1:], ctx.examples)
        return dx.view(x.shape), *gradients, *(None,) * 4


class Attention(torch.autograd.Function):
    """Causal self-attention of a packed product qkv (B, T, 3, H, D) -> (B, T, H D)."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        o, lse = op.attend(qkv)
        ctx.save_for_backward(qkv, o, lse)
        B, H, T, D = o.shape
        return o.transpose(1, 2).reshape(B, T, H * D)  # a view if the memory of o is (B, T, H, D)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        qkv, o, lse = ctx.saved_tensors
        if torch.is_grad_enabled():
            (dqkv,) = _double_backward(lambda x, _: packed_attention_reference(x, True, -1, None), dy, qkv, (), (True,))
            assert dqkv is not None  # for the type checker: it was requested
            return dqkv
        return op.attend_backward(_split_heads(dy, qkv), qkv, o, lse)


def _split_heads(do: Tensor, qkv: Tensor) -> Tensor:
    B, T, _, H, D = qkv.shape
    return do.reshape(B, T, H, D).transpose(1, 2)


class Block(torch.autograd.Function):
    """A transformer block on x + residual (B, T, W); see block_reference for its formulas, which BlockSpec configures.

    Takes x; residual, or None for zeros, always None in post-norm; the spec; the ColumnSums shared with the preceding
    and with the following block, or None; weight and bias of norm_1, qkv, projection, norm_2, up and down; and weight
    and bias of the four linear layers once more in the dtype of x (weights all as tensors or all as Float8Weight),
    absent if the parameters have that dtype. Without a residual those tensors may have a narrower dtype than x, as
    under autocast: products and attention then compute in it, norms and sums in that of x.

    Returns what block_reference does, in the dtype of x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, spec: BlockSpec, before: ColumnSums | None,
        after: ColumnSums | None, *tensors: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        params, casts = tensors[:12], tensors[12:]
        n1, c1, *_, n2, c2 = params[:8]
        linears = casts or (*params[2:6], *params[8:])
        qkv_weight, qkv_bias, projection, projection_bias, up, up_bias, down, down_bias = linears
        B, T, W = x.shape
        dtype = qkv_weight.dtype if isinstance(qkv_weight, Tensor) else x.dtype
        if spec.post_norm:
            y1 = x.to(dtype)
        elif residual is None:
            y1, t1 = _layer_norm.forward(x, n1, c1, spec.eps[0], True, None, dtype)
            s1 = x
        else:
            y1, s1, t1 = _add_layer_norm.forward(x, residual, n1, c1, spec.eps[0])
        linear = functional.linear if isinstance(qkv_weight, Tensor) else op.linear
        qkv = linear(y1.reshape(-1, W), qkv_weight, qkv_bias).view(B, T, 3, spec.heads, W // spec.heads)
        o, lse = op.attend(qkv, spec.causal, spec.window, spec.scale, spec.mask)
        p = linear(o.transpose(1, 2).reshape(-1, W), projection, projection_bias).view(B, T, W)
        if spec.post_norm:
            stream, s1, t1 = _add_layer_norm.forward(p, x, n1, c1, spec.eps[0], True, x.dtype)
            y2 = stream.to(dtype)
        else:
            y2, s2, t2 = _add_layer_norm.forward(p, s1, n2, c2, spec.eps[1], True, dtype)
        keep = any(ctx.needs_input_grad)
        m, z = _mlp_forward(y2.reshape(-1, W), up, up_bias, down, down_bias, spec.approximate, keep)
        y, s = m.view(B, T, W), None
        if spec.post_norm:
            y, s2, t2 = _add_layer_norm.forward(y, stream, n2, c2, spec.eps[1], True, x.dtype)
        elif spec.joined:
            y = y.add_(s2) if dtype is x.dtype else s2 + y
        else:
            s = s2
        weights = flattened(casts[::2]) if casts else ()
        ctx.save_for_backward(s1, t1, y1, qkv, o, lse, s2, t2, y2, z, *params, *weights)
        _announce(ctx, x, params)
        ctx.spec, ctx.single, ctx.before, ctx.after = spec, residual is None, before, after
        ctx.set_materialize_grads(False)
        return y, s

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> Gradients:
        s1, t1, y1, qkv, o, lse, s2, t2, y2, z, *rest = ctx.saved_tensors
        params, spec, examples = _with_sinks(ctx, rest[:12]), ctx.spec, ctx.examples
        weights = unflattened(rest[12:]) if rest[12:] else (params[2], params[4], params[8], params[10])
        needs = ctx.needs_input_grad[5:17]
        norm_1, norm_2, mlp_params = params[:2], params[6:8], params[8:]
        absent = (None,) * (len(ctx.needs_input_grad) - 17)
        W = s1.shape[-1]
        dy = torch.zeros_like(s2) if dy is None else dy
        if torch.is_grad_enabled():
            _refuse_float8(weights[0])
            if not ctx.single:
                raise RuntimeError(
                    "the backward pass of a block with a separate residual cannot be differentiated, since only their "
                    'sum is saved: discard "cuda" from accelerant.nn.layers.FUSED for that'
                )

            def run(x: Tensor, params: _Params) -> tuple[Tensor, ...]:
                return tuple(y for y in block_reference(x, spec, params) if y is not None)

            dys = (dy,) if spec.post_norm or spec.joined else (dy, torch.zeros_like(s2) if ds is None else ds)
            x = y1 if spec.post_norm else s1
            dx, *gradients = _double_backward(run, dys, x, params, (ctx.needs_input_grad[0], *needs))
            return dx, None, None, None, None, *gradients, *absent
        sums = None if ctx.after is None else ctx.after.take(dy)
        add_to = None
        if spec.post_norm:
            last = mlp_params[3] if needs[11] else None
            g2, dn2, dc2, sums = _norm_gradients(
                dy.contiguous(), None, s2, norm_2, t2, spec.eps[1], needs[6:8], last, examples
            )
            dy = g2
            # A sink keeps the gradients that it gets until the pass is over.
            add_to = g2.reshape(-1, W) if examples is None else g2.reshape(-1, W).clone()
        elif spec.joined:
            ds = dy = dy.contiguous()
        dy2, mlp = _mlp_backward(
            dy.to(y2.dtype).reshape(-1, W), y2.reshape(-1, W), z, weights[2:], mlp_params, needs[8:], examples,
            approximate=spec.approximate, sums=sums, add_to=add_to,
        )  # fmt: skip
        last = params[5] if needs[5] else None
        if spec.post_norm:
            g, dn1, dc1, sums = _norm_gradients(
                dy2.view_as(s1), None, s1, norm_1, t1, spec.eps[0], needs[:2], last, examples
            )
        else:
            g, dn2, dc2, sums = _norm_gradients(
                dy2.view_as(s2), ds, s2, norm_2, t2, spec.eps[1], needs[6:8], last, examples
            )
        linear_dx: Callable[..., Tensor] = torch.mm if isinstance(weights[0], Tensor) else op.linear_dx
        total = g.reshape(-1, W)
        rows, o_rows = total.to(o.dtype), o.transpose(1, 2).reshape(-1, W)
        dprojection = _linear_gradients(rows, o_rows, params[4], params[5], needs[4:6], examples, sums)
        do = _split_heads(linear_dx(rows, weights[1]), qkv)
        dqkv = op.attend_backward(do, qkv, o, lse, spec.causal, spec.window, spec.scale, spec.mask)
        dqkv = dqkv.view(rows.shape[0], -1)
        dqkv_params = _linear_gradients(dqkv, y1.reshape(-1, W), params[2], params[3], needs[2:4], examples)
        if spec.post_norm:
            add_to = total if examples is None else total.clone()
            dx = _add_linear_dx(add_to, dqkv, weights[0]).view_as(s1)
        else:
            dy1 = linear_dx(dqkv, weights[0]).view_as(s1)
            last = None if ctx.before is None else ctx.before.bias
            if examples is None and sink_of(last) is not None:
                last = None  # a frozen block does not know the examples whose gradients the sink needs
            dx, dn1, dc1, sums = _norm_gradients(dy1, g, s1, norm_1, t1, spec.eps[0], needs[:2], last, examples)
            if ctx.before is not None:
                ctx.before.store(dx, sums)
        dresidual = None if ctx.single else dx
        return (
            dx, dresidual, None, None, None, dn1, dc1, *dqkv_params, *dprojection, dn2, dc2, *mlp, *absent
        )  # fmt: skip


def _norm_gradients(
    dy: Tensor, ds: Tensor | None, s: Tensor, params: _Params, statistics: Tensor, eps: float, needs: Sequence[bool],
    last: Tensor | None, examples: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of a norm's input s, plus ds, of its scale and shift, and the first one's column sums."""
    weight, bias = params
    assert weight is not None  # for the type checker: a block's norms have one
    sink = None if examples is None else first_sink((*params, last))
    if sink is None or examples is None:
        sums = None if last is None else last.dtype
        return op.norm_backward(dy, ds, s, weight, bias, statistics, eps, (True, *needs), sums)
    required = (sink.wants(weight), sink.wants(bias), sink.wants(last))
    g, dweight, dbias, sums_each = op.norm_backward_each(dy, ds, s, weight, statistics, eps, examples, required)
    for param, gradient in ((weight, dweight), (bias, dbias)):
        if param is not None and gradient is not None:
            sink.gradients(param, gradient)
    return g, None, None, sums_each


# --- embeddings and loss ---------------------------------------------------------------------------------------------
class Embed(torch.autograd.Function):
    """tokens (B, T), table (V, D), positions (P, D), a dtype -> the sum of their rows (B, T, D), and the table itself.

    An output layer is tied to the returned table: rows of one gradient are added to the other in place.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, table: Tensor, positions: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tokens, table, positions)
        ctx.set_materialize_grads(False)
        _announce(ctx, tokens, (table, positions))
        for sums in table_sums:
            sums.looks_up(table, tokens.numel(), dtype)
        return op.embed(tokens, table, positions, dtype), table.view_as(table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dtable: Tensor | None) -> Gradients:
        tokens, *saved = ctx.saved_tensors
        table, positions = _with_sinks(ctx, saved)
        if dy is None:
            return None, dtable, None, None
        B, T, D = dy.shape
        if (sink := first_sink((table, positions))) is not None:
            rows, (table, positions) = _rows(dy), _required((table, positions), ctx.needs_input_grad[1:3])
            if table is not None:
                sink.embedding(table, rows, tokens, B)
            if positions is not None:
                sink.embedding(positions, rows, torch.arange(T, device=dy.device), B, distinct=True)
            return None, None, None, None
        dpositions = None
        if ctx.needs_input_grad[1] and not any(sums.takes_rows(table, dy, tokens) for sums in table_sums):
            dtable = torch.zeros_like(table) if dtable is None else dtable
            op.embed_backward(dy, tokens, dtable)
            for sums in table_sums:
                sums.whole(table, dtable)
        if ctx.needs_input_grad[2]:
            dpositions = torch.zeros_like(positions)
            dpositions[:T] = op.column_sums(dy.reshape(B, T * D), positions.dtype).view(T, D)
        return None, dtable if ctx.needs_input_grad[1] else None, dpositions, None


class TiedLoss(torch.autograd.Function):
    """hidden (M, K), table (V, K) as a parameter and in hidden's dtype, targets (M,), classes -> the mean loss.

    The gradients are computed with the loss and released by the first backward pass; a further one computes them again.
    With a sink the table's is per example or, if sequences are shorter than it is wide, that of all logits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: Tensor, cast_table: Tensor, targets: Tensor, classes: int, ignore_index: int
    ) -> Tensor:
        needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        sink = sink_of(table) if needs[1] else None
        for sums in table_sums:
            sums.multiplies(table)
        forming = None
        if sink is not None:
            forming = Forming(sink, examples_of(sink, hidden.shape[0]))
            sink.expect(table)
        loss, *ctx.gradients = op.tied_loss(hidden, cast_table, targets, classes, ignore_index, needs, forming)
        ctx.save_for_backward(hidden, table, cast_table, targets)
        ctx.sunk = None if sink is None else [table]
        ctx.options, ctx.dtypes = (classes, ignore_index, needs, forming), (hidden.dtype, table.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        hidden, saved, *others = ctx.saved_tensors
        (table,) = _with_sinks(ctx, [saved])
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, *gradients = op.tied_loss(hidden, *others, *ctx.options)
        forming, sink = ctx.options[3], sink_of(table)
        if forming is not None and sink is not None and gradients[1] is not None:
            if gradients[1].dim() == 3:  # formed with the loss; dy scales them in the sink, without rounding
                sink.gradients(table, gradients[1], forming.squares, dy)
            else:
                sink.linear(table, None, op.scaled(gradients[1], dy), hidden, forming.examples)
            gradients[1] = None
        dhidden, dtable = gradients
        out = None if dtable is None else placed(table, *table.shape)
        if out is not None:
            dtable = torch.mul(dtable, dy, out=out)
        elif dtable is not None:
            dtable = op.scaled(dtable, dy)
        scaled = None if dhidden is None else op.scaled(dhidden, dy), dtable
        cast = [None if g is None else g.to(dtype) for g, dtype in zip(scaled, ctx.dtypes, strict=True)]
        if cast[1] is not None and any(sums.takes_product(table, cast[1]) for sums in table_sums):
            cast[1] = None
        return *cast, None, None, None, None


fused_linear: Callable[..., Tensor] = FusedLinear.apply
fused_mlp: Callable[..., Tensor] = FusedMLP.apply
fused_attention: Callable[..., Tensor] = Attention.apply
fused_block: Callable[..., tuple[Tensor, Tensor | None]] = Block.apply
fused_embed: Callable[..., tuple[Tensor, Tensor]] = Embed.apply
tied_loss: Callable[..., Tensor] = TiedLoss.apply


# --- the decoder layer -----------------------------------------------------------------------------------------------
class DecoderSpec(NamedTuple):
    """The configuration of a decoder layer: eps of both norms; heads of queries, and of keys and values.

    `recompute`: x -> the layer's result by differentiable modules, for derivatives of its gradients.
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
        a = _linear(_joined_heads(o), wo, bo).view(B, S, N)
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
        dm, d_down = _gradients_of_linear([dout.to(dtype).view(-1, N)], m, (cd,), (wd, bd), need[16:18])
        dgate, dup = swiglu_bwd(Case(gate.device, gate.dtype, gate.shape), dm, gate, up)
        dy, d_gates = _gradients_of_linear([dgate, dup], rows2, (cg, cu), (wg, bg, wu, bu), need[12:16])
        da, dw2, _ = _add_rms_norm.backward(
            dy.view(B, S, N), dout, s, w2, None, statistics2, spec.eps[1], (True, need[1], False)
        )
        do, d_o = _gradients_of_linear([da.to(dtype).view(-1, N)], _joined_heads(o), (co,), (wo, bo), need[10:12])
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
            dqkv = [dq.view(rows.shape[0], -1), dk.view(rows.shape[0], -1), _joined_heads(dv)]
        else:
            dqkv = [_joined_heads(dq), _joined_heads(dk), _joined_heads(dv)]
        dh, d_qkv = _gradients_of_linear(dqkv, rows, (cq, ck, cv), (wq, bq, wk, bk, wv, bv), need[2:8])
        dx, dw1, _ = _add_rms_norm.backward(
            dh.view(B, S, N), da, x, w1, None, statistics1, spec.eps[0], (True, need[0], False)
        )
        absent = (None,) * (len(ctx.needs_input_grad) - 22)
        return (None, dx, None, None, dw1, dw2, *d_qkv, dnq, dnk, *d_o, *d_gates, *d_down, *absent)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _gradients_of_linear(
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
            dw = torch.mm(dy.t(), x, out=out) if same else op.linear_dw(dy, x, weight.dtype, out)
        gradients += (dw, op.column_sums(dy, bias.dtype) if needs[2 * i + 1] else None)
    return dx, gradients


def _joined_heads(x: Tensor) -> Tensor:
    B, H, S, D = x.shape
    return x.transpose(1, 2).reshape(B * S, H * D)


fused_decoder_layer: Callable[..., Tensor] = DecoderLayer.apply
