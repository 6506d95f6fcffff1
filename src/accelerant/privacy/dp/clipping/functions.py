"""Layers as autograd functions whose backward pass makes the gradient of the input alone, and feeds a sink.

Parameters are arguments, so that autograd visits the layer even where its input needs no gradient; they get None.
Results are no views, so that what follows may change them in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import UnsupportedCase
from accelerant.ops._differentiable import DifferentiableOp
from accelerant.ops._library import autocast_dtype
from accelerant.ops._per_example import PerExampleSink
from accelerant.ops.norm.op import _layer_norm as _layer_norm_op
from accelerant.ops.transformer.op import norm_backward_each

__all__ = [
    "SECOND_PASS",
    "expanded",
    "layer_norm",
    "linear",
    "lookup",
    "once",
    "our_norm",
    "scale_shift",
    "to_autocast",
]

_Gradients = tuple[Tensor | None, ...]


SECOND_PASS = (
    "a second backward pass through the same forward pass would add each example once more, and break the bound: add "
    "up the losses and call backward() once"
)


def to_autocast(x: Tensor) -> Tensor:
    """X in the dtype that autocast multiplies in; itself where it is off."""
    low = autocast_dtype(x.device.type)
    return x if low is None or not x.is_floating_point() or x.dtype == torch.float64 else x.to(low)


def once(ctx: Any) -> None:
    """Note a visit of a node by a backward pass.

    Raises:
        UnsupportedCase: it is the second: each example would count twice in a step.
    """
    if getattr(ctx, "visited", False):
        raise UnsupportedCase(SECOND_PASS)
    ctx.visited = True


class _Linear(torch.autograd.Function):
    """x (..., K), weight (N, K), or (K, N) if turned, bias (N,), a sink, examples -> (..., N)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: PerExampleSink, examples: int, turned: bool
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        low = weight.to(x.dtype)
        matrix = low if turned else low.t()
        y = torch.mm(rows, matrix) if bias is None else torch.addmm(bias.to(x.dtype), rows, matrix)
        ctx.sink, ctx.examples, ctx.turned, ctx.shape = sink, examples, turned, x.shape
        kept = rows if sink.wants(weight) else None
        ctx.save_for_backward(kept, low if ctx.needs_input_grad[0] else None)
        ctx.parameters = weight, bias
        sink.expect(weight, bias)
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1]))  # type: ignore[no-any-return]  # torch's own

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        once(ctx)
        rows, low = ctx.saved_tensors
        (weight, bias), sink = ctx.parameters, ctx.sink
        dy = dy.reshape(-1, dy.shape[-1])
        if rows is not None:
            if ctx.turned:
                sink.linear(weight, None, rows, dy, ctx.examples)
            else:
                sink.linear(weight, None, dy, rows, ctx.examples)
        sink.columns(bias, dy, ctx.examples)
        dx = None
        if low is not None:
            dx = torch.mm(dy, low.t() if ctx.turned else low).view(ctx.shape)
        return dx, None, None, None, None, None


_apply_linear: Callable[..., Tensor] = _Linear.apply


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, sink: PerExampleSink, examples: int, *, turned: bool = False
) -> Tensor:
    """X weight^T + bias, or x weight + bias if the weight is turned; x (..., K), its rows example-major."""
    return _apply_linear(to_autocast(x), weight, bias, sink, examples, turned)


class _Lookup(torch.autograd.Function):
    """tokens (examples, ...) or (1, ...), weight (V, D) -> their rows."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor,
        padding_idx: int | None,
        sink: PerExampleSink,
        examples: int,
        distinct: bool,
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.sink, ctx.parameter, ctx.options = sink, weight, (examples, padding_idx, distinct)
        sink.expect(weight)
        y = F.embedding(tokens, weight)
        return y if tokens.shape[0] == examples else y.expand(examples, *y.shape[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        once(ctx)
        (tokens,) = ctx.saved_tensors
        ctx.sink.embedding(ctx.parameter, dy.reshape(-1, dy.shape[-1]), tokens.reshape(-1), *ctx.options)
        return None, None, None, None, None, None


_apply_lookup: Callable[..., Tensor] = _Lookup.apply


def lookup(
    tokens: Tensor,
    weight: Tensor,
    padding_idx: int | None,
    sink: PerExampleSink,
    examples: int,
    *,
    distinct: bool = False,
) -> Tensor:
    """Rows of an embedding: (examples, ..., D); tokens (1, ...) stand for every example's.

    `distinct` says that no token stands twice in an example, as positions do not.
    """
    return _apply_lookup(tokens, weight, padding_idx, sink, examples, distinct)


class _ScaleShift(torch.autograd.Function):
    """x times weight plus bias, along dimensions `places` of x; either may be None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        places: tuple[int, ...],
        sink: PerExampleSink,
        dtype: torch.dtype,
    ) -> Tensor:
        shape = [size if place in places else 1 for place, size in enumerate(x.shape)]
        y = x
        scale = None if weight is None else weight.view(shape)
        if scale is not None:
            y = y * scale
        if bias is not None:
            y = y + bias.view(shape)
        ctx.save_for_backward(x if sink.wants(weight) else None, scale)
        ctx.sink, ctx.parameters, ctx.places, ctx.dtype = sink, (weight, bias), places, x.dtype
        sink.expect(weight, bias)
        y = y.to(dtype)
        return y.clone() if y is x else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        once(ctx)
        x, scale = ctx.saved_tensors
        (weight, bias), sink = ctx.parameters, ctx.sink
        others = tuple(place for place in range(1, dy.dim()) if place not in ctx.places)
        # The widest of both, as torch's own norms add.
        wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
        if x is not None:
            sink.gradients(weight, _summed(x.to(wide) * dy, others, weight.shape))
        if bias is not None and sink.wants(bias):
            sink.gradients(bias, _summed(dy.to(wide), others, bias.shape))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dy if scale is None else dy * scale).to(ctx.dtype)
        return dx, None, None, None, None, None


def _summed(x: Tensor, places: tuple[int, ...], shape: torch.Size) -> Tensor:
    found = x.sum(places) if places else x
    return found.reshape(x.shape[0], *shape)


_apply_scale_shift: Callable[..., Tensor] = _ScaleShift.apply


def scale_shift(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, places: tuple[int, ...], sink: PerExampleSink, dtype: Any
) -> Tensor:
    """X (examples, ...) times weight plus bias, which have the dimensions `places` of x; result in a dtype."""
    return _apply_scale_shift(x, weight, bias, places, sink, dtype)


class _Norm(torch.autograd.Function):
    """A norm of ours (accelerant.ops): x, weight and bias of its last dimension, eps -> the shape of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        op: DifferentiableOp,
        sink: PerExampleSink,
        examples: int,
    ) -> Tensor:
        y, statistics = op.forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.sink, ctx.parameters, ctx.options = sink, (weight, bias), (eps, op, examples)
        sink.expect(weight, bias)
        return y  # type: ignore[no-any-return]  # an op gives tensors

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        once(ctx)
        x, weight, bias, statistics = ctx.saved_tensors
        eps, op, examples = ctx.options
        if dy.is_cuda and op is _layer_norm_op and examples:  # all in one pass over dy and x
            sink, (scale, shift) = ctx.sink, ctx.parameters
            wanted = (sink.wants(scale), sink.wants(shift), False)
            dx_there, *sums, _ = norm_backward_each(dy, None, x, weight, statistics, eps, examples, wanted)
            for parameter, each in zip((scale, shift), sums, strict=True):
                if each is not None:
                    sink.gradients(parameter, each)
            return dx_there, *((None,) * 6)
        columns = x.shape[-1]
        ctx.sink.norm(*ctx.parameters, dy.reshape(-1, columns), x.reshape(-1, columns), statistics, examples)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = op.backward(dy, x, weight, bias, statistics, eps, (True, False, False))[0]
        return dx, *((None,) * 6)


_apply_norm: Callable[..., Tensor] = _Norm.apply


def our_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    op: DifferentiableOp,
    sink: PerExampleSink,
    examples: int,
) -> Tensor:
    """layer_norm or rms_norm of x (examples, ..., N), whichever op is."""
    return _apply_norm(x, weight, bias, eps, op, sink, examples)


class _LayerNorm(torch.autograd.Function):
    """torch's layer_norm: x (examples, ..., *shape), weight and bias of shape, eps -> the shape of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        sink: PerExampleSink,
        examples: int,
    ) -> Tensor:
        y, mean, rstd = torch.ops.aten.native_layer_norm(x, list(shape), weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.sink, ctx.parameters, ctx.norm, ctx.examples = sink, (weight, bias), shape, examples
        sink.expect(weight, bias)
        return y  # type: ignore[no-any-return]  # torch's own

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        once(ctx)
        x, mean, rstd, weight, bias = ctx.saved_tensors
        columns = torch.Size(ctx.norm).numel()
        statistics = torch.stack((mean.reshape(-1), rstd.reshape(-1)), 1)
        ctx.sink.norm(*ctx.parameters, dy.reshape(-1, columns), x.reshape(-1, columns), statistics, ctx.examples)
        dx = None
        if ctx.needs_input_grad[0]:
            dx, _, _ = torch.ops.aten.native_layer_norm_backward(
                dy, x, list(ctx.norm), mean, rstd, weight, bias, [True, False, False]
            )
        return dx, *((None,) * 6)


_apply_layer_norm: Callable[..., Tensor] = _LayerNorm.apply


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    eps: float,
    sink: PerExampleSink,
    examples: int,
) -> Tensor:
    """Torch's layer_norm of x (examples, ..., *shape)."""
    return _apply_layer_norm(x, weight, bias, shape, eps, sink, examples)


class _Expanded(torch.autograd.Function):
    """A parameter -> (examples, *shape), or (examples, *shape[1:]) of one that begins with 1."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, sink: PerExampleSink, examples: int, inside: bool) -> Tensor:
        ctx.sink, ctx.parameter = sink, parameter
        sink.expect(parameter)
        shape = parameter.shape[1:] if inside else parameter.shape
        return parameter.expand(examples, *shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        once(ctx)
        ctx.sink.gradients(ctx.parameter, dy.reshape(dy.shape[0], *ctx.parameter.shape))
        return None, None, None, None


_apply_expanded: Callable[..., Tensor] = _Expanded.apply


def expanded(parameter: Tensor, sink: PerExampleSink, examples: int, *, inside: bool = False) -> Tensor:
    """A parameter once for each example, without a copy; `inside` takes its first dimension, of 1, for that."""
    return _apply_expanded(parameter, sink, examples, inside)
