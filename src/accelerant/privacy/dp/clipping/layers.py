"""Linear maps, convolutions, embeddings and norms: autograd functions that feed a sink, and their layers' rules.

Functions give the sink factors of parameters' gradients, and compute the gradient of the input only. Parameters are
arguments, so that autograd visits the layer even where its input needs no gradient. Results are no views.

LSTM and GRU run forward by torch's own functions. Each direction of each layer is an autograd function that recomputes
all gates in two products, and goes back step by step. RNN, projections and packed sequences run step by step, each a
linear layer. Computed in the parameters' dtype, also under autocast.

Source: Hochreiter and Schmidhuber 1997; Cho et al. 2014, arXiv:1406.1078, with the reset gate after the product.
"""
# ruff: noqa: D102  GradientContribution documents the methods of its subclasses

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from accelerant import nn as our
from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedCase
from accelerant.nn import GPT, Llama
from accelerant.nn.layers import compute_dtype, rms_eps
from accelerant.nn.patching.forms import unknown
from accelerant.ops._differentiable import DifferentiableOp
from accelerant.ops._library import cast_for_autocast
from accelerant.ops._per_example import PerExampleSink
from accelerant.ops.norm import _layer_norm as _layer_norm_op
from accelerant.ops.norm import _rms_norm as _rms_norm_op
from accelerant.ops.recurrent import run_layers
from accelerant.ops.transformer import norm_backward_each
from accelerant.privacy.dp.clipping import launch
from accelerant.privacy.dp.clipping.backward_pass import Dense, GradientContribution, prefers_ghost
from accelerant.privacy.dp.clipping.launch import chunks, wide
from accelerant.privacy.dp.clipping.rules import (
    LayerRule,
    Methods,
    NotForEachExample,
    Region,
    SharedRows,
    in_region,
    model_methods,
    register,
)

_Gradients = tuple[Tensor | None, ...]

SECOND_PASS = (
    "a second backward pass through the same forward pass would add each example once more, and break the bound: add "
    "up the losses and call backward() once"
)


def to_autocast(x: Tensor) -> Tensor:
    """Return x in autocast's dtype for products; x itself where autocast is off."""
    cast: Tensor = cast_for_autocast(x)[0]
    return cast


def require_first_visit(ctx: Any) -> None:
    """Raise UnsupportedCase if a backward pass visited the node before: each example would count twice in a step."""
    if getattr(ctx, "visited", False):
        raise UnsupportedCase(SECOND_PASS)
    ctx.visited = True


# --- linear maps -----------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """x (..., K), weight (N, K), or (K, N) if transposed, bias (N,), a sink, examples -> (..., N)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: PerExampleSink, examples: int, transposed: bool
    ) -> Tensor:
        rows = x.flatten(0, -2)
        low = weight.to(x.dtype)
        matrix = low if transposed else low.t()
        y = torch.mm(rows, matrix) if bias is None else torch.addmm(bias.to(x.dtype), rows, matrix)
        ctx.sink, ctx.examples, ctx.transposed, ctx.shape = sink, examples, transposed, x.shape
        ctx.save_for_backward(rows if sink.wants(weight) else None, low if ctx.needs_input_grad[0] else None)
        ctx.parameters = weight, bias
        sink.expect(weight, bias)
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1]))  # type: ignore[no-any-return]  # torch's own

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        require_first_visit(ctx)
        rows, low = ctx.saved_tensors
        (weight, bias), sink = ctx.parameters, ctx.sink
        dy = dy.flatten(0, -2)
        if rows is not None:
            factors = (rows, dy) if ctx.transposed else (dy, rows)
            sink.linear(weight, None, *factors, ctx.examples)
        sink.columns(bias, dy, ctx.examples)
        dx = None if low is None else torch.mm(dy, low.t() if ctx.transposed else low).view(ctx.shape)
        return dx, None, None, None, None, None


_apply_linear: Callable[..., Tensor] = _Linear.apply


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, sink: PerExampleSink, examples: int, *, transposed: bool = False
) -> Tensor:
    """Return x weight^T + bias, or x weight + bias if the weight is transposed; x (..., K), its rows example-major."""
    return _apply_linear(to_autocast(x), weight, bias, sink, examples, transposed)


@register
class _LinearRule(LayerRule):
    layers = (nn.Linear, our.Linear)

    def forward(self, input: Tensor) -> Tensor:
        x, examples = self.examples_first(input)
        x = x.to(compute_dtype(x)) if isinstance(self.module, our.Linear) else x
        return linear(x, self.module.weight, self.module.bias, self.sink, examples)


# --- embeddings and parameters that are added ------------------------------------------------------------------------


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, padding: int | None, sink: PerExampleSink, examples: int,
        distinct: bool = False,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(tokens)
        ctx.sink, ctx.parameter, ctx.options = sink, weight, (examples, padding, distinct)
        sink.expect(weight)
        y = F.embedding(tokens, weight)
        return y if tokens.shape[0] == examples else y.expand(examples, *y.shape[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        require_first_visit(ctx)
        (tokens,) = ctx.saved_tensors
        ctx.sink.embedding(ctx.parameter, dy.reshape(-1, dy.shape[-1]), tokens.reshape(-1), *ctx.options)
        return None, None, None, None, None, None


lookup: Callable[..., Tensor] = _Lookup.apply
"""tokens, weight (V, D), padding_idx or None, sink, examples[, distinct] -> rows of the embedding, (examples, ..., D).

tokens are (examples, ...), or (1, ...) shared by all examples. `distinct`: no token repeats within an example."""


@register
class _EmbeddingRule(LayerRule):
    layers = (nn.Embedding,)
    shares = True
    _takes_positions: bool | None = None  # whether vectors of tokens are positions, by the first (torch.compile)

    @classmethod
    def refusal(cls, module: nn.Embedding) -> str | None:
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq mixes the examples of a batch: leave it out"
        if module.sparse:
            return "sparse gradients are not made: take sparse=False"
        return None

    def forward(self, input: Tensor) -> Tensor:
        tokens, count, shared = input, self.sink.batch, False
        if count is not None and tokens.dim() and not in_region():
            shared = self._is_shared(tokens, count)
            tokens = tokens[None] if shared else tokens
        if count is None or tokens.dim() == 0 or tokens.shape[0] != 1:
            tokens, count = self.examples_first(tokens, least=1)
        self.sink.shared = self.sink.shared or tokens.shape[:1] != (count,)
        y = lookup(tokens, self.module.weight, self.module.padding_idx, self.sink, count)
        return SharedRows.of(y) if shared and self.sink.runs_by_example else y

    def _is_shared(self, tokens: Tensor, count: int) -> bool:
        """Return whether tokens are a vector that all examples share, as of positions; raise where it is not known."""
        vector, alike = tokens.dim() == 1, tokens.shape[0] == count
        message = (
            f"an Embedding got {tuple(tokens.shape)}, for {count} examples: they may be positions that all examples "
            "share, or tokens. Give positions as (1, T), or a token for each example as (B, 1)"
        )
        if self.sink.runs_by_example:
            unclear = count > 1 and alike and (vector or _are_distances(tokens)) and not self.sink.is_input(tokens)
            if unclear or not (vector or alike or tokens.shape[0] == 1):
                raise NotForEachExample(message, once=unclear)
            if vector and not alike:
                self._takes_positions = True
            return vector and not alike
        if vector and self._takes_positions is None:
            self._takes_positions = _are_positions(tokens)
            if self._takes_positions and alike and count > 1:
                self._takes_positions = None
                raise ShapeError(message)
        return vector and bool(self._takes_positions)


def _are_positions(tokens: Tensor) -> bool:
    """Return whether a vector of tokens is 0, 1, 2, ...: one for each position, not one for each example."""
    count = torch.arange(tokens.shape[0], device=tokens.device)
    return bool(tokens.shape[0]) and bool((tokens - tokens[0] == count).all())


def _are_distances(tokens: Tensor) -> bool:
    """Return whether tokens (T, T) are of distances, as T5's: alike on diagonals, and neighbours for 0 and 1."""
    if tokens.dim() != 2 or tokens.shape[0] != tokens.shape[1] or len(tokens) < 2:
        return False
    steps = tokens[:, 0].diff()
    ordered = bool((steps[0].abs() == 1) & (steps * steps[0] >= 0).all())
    return ordered and bool((tokens[1:, 1:] == tokens[:-1, :-1]).all())


class _Expanded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, sink: PerExampleSink, examples: int) -> Tensor:
        ctx.sink, ctx.parameter = sink, parameter
        sink.expect(parameter)
        return parameter.expand(examples, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        require_first_visit(ctx)
        ctx.sink.gradients(ctx.parameter, dy)
        return None, None, None


expanded: Callable[..., Tensor] = _Expanded.apply  # parameter, sink, examples -> (examples, *shape), without a copy


# --- norms -----------------------------------------------------------------------------------------------------------


class _ScaleShift(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: tuple[int, ...], sink: PerExampleSink,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        shape = [size if dim in dims else 1 for dim, size in enumerate(x.shape)]
        scale = None if weight is None else weight.view(shape)
        y = x if scale is None else x * scale
        if bias is not None:
            y = y + bias.view(shape)
        ctx.save_for_backward(x if sink.wants(weight) else None, scale)
        ctx.sink, ctx.parameters, ctx.dims, ctx.dtype = sink, (weight, bias), dims, x.dtype
        sink.expect(weight, bias)
        y = y.to(dtype)
        return y.clone() if y is x else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        require_first_visit(ctx)
        x, scale = ctx.saved_tensors
        (weight, bias), sink = ctx.parameters, ctx.sink
        others = tuple(dim for dim in range(1, dy.dim()) if dim not in ctx.dims)
        dtype = wide(dy.dtype)  # as torch's own norms accumulate
        if x is not None:
            sink.gradients(weight, _summed(x.to(dtype) * dy, others, weight.shape))
        if bias is not None and sink.wants(bias):
            sink.gradients(bias, _summed(dy.to(dtype), others, bias.shape))
        dx = (dy if scale is None else dy * scale).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


def _summed(x: Tensor, dims: tuple[int, ...], shape: torch.Size) -> Tensor:
    return (x.sum(dims) if dims else x).reshape(x.shape[0], *shape)


scale_shift: Callable[..., Tensor] = _ScaleShift.apply
"""x (examples, ...), weight, bias, dims, sink, dtype -> x times weight plus bias, which have x's dimensions `dims`.

Weight and bias may be None."""


class _ExampleNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...], eps: float,
        op: DifferentiableOp | None, sink: PerExampleSink, examples: int,
    ) -> Tensor:  # fmt: skip
        if op is None:
            y, *statistics = torch.ops.aten.native_layer_norm(x, shape, weight, bias, eps)
        else:
            y, *statistics = op.forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, *statistics)
        ctx.sink, ctx.parameters, ctx.options = sink, (weight, bias), (shape, eps, op, examples)
        sink.expect(weight, bias)
        return y  # type: ignore[no-any-return]  # both return tensors

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        require_first_visit(ctx)
        x, weight, bias, *statistics = ctx.saved_tensors
        sink, parameters, (shape, eps, op, examples) = ctx.sink, ctx.parameters, ctx.options
        dx, needed = None, (True, False, False)
        if dy.is_cuda and op is _layer_norm_op and examples:  # all in one pass over dy and x
            wanted = (sink.wants(parameters[0]), sink.wants(parameters[1]), False)
            dx, *sums, _ = norm_backward_each(dy, None, x, weight, statistics[0], eps, examples, wanted)
            for parameter, gradients in zip(parameters, sums, strict=True):
                if gradients is not None:
                    sink.gradients(parameter, gradients)
        else:
            columns = math.prod(shape)
            joint = torch.stack([each.reshape(-1) for each in statistics], 1) if op is None else statistics[0]
            sink.norm(*parameters, dy.reshape(-1, columns), x.reshape(-1, columns), joint, examples)
            if ctx.needs_input_grad[0] and op is None:
                native = torch.ops.aten.native_layer_norm_backward
                dx = native(dy, x, shape, *statistics, weight, bias, list(needed))[0]
            elif ctx.needs_input_grad[0]:
                dx = op.backward(dy, x, weight, bias, *statistics, eps, needed)[0]
        return dx, None, None, None, None, None, None, None


_norm: Callable[..., Tensor] = _ExampleNorm.apply
"""x (examples, ..., *shape), weight, bias, shape, eps, op, sink, examples -> x normalized over `shape`.

op: layer_norm or rms_norm of accelerant.ops; None for torch's layer_norm. Weight and bias may be None."""


@register
class _LayerNormRule(LayerRule):
    layers = (nn.LayerNorm,)

    def forward(self, input: Tensor) -> Tensor:
        module, shape = self.module, tuple(self.module.normalized_shape)
        x, examples = self.examples_first(input, 1 + len(shape))
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.float()
        # On a GPU our backward pass takes one pass over dy and x, torch's kernels with both per-example sums six.
        ours = x.is_cuda and len(shape) == 1 and module.weight is not None and module.weight.dtype == x.dtype
        op = _layer_norm_op if ours and x.dtype != torch.float64 else None
        x = x if op is None else x.contiguous()
        return _norm(x, module.weight, module.bias, shape, module.eps, op, self.sink, examples)


@register
class _OurNormRule(LayerRule):
    layers = (our.LayerNorm, our.RMSNorm)

    def forward(self, x: Tensor) -> Tensor:
        module, rms = self.module, isinstance(self.module, our.RMSNorm)
        x = x.to(compute_dtype(x))
        if len(module.normalized_shape) > 1:
            return _RMSNormRule.forward(self, x) if rms else _LayerNormRule.forward(self, x)  # type: ignore[arg-type]
        x, examples = self.examples_first(x.contiguous())
        bias, op, eps = (None, _rms_norm_op, rms_eps(module, x)) if rms else (module.bias, _layer_norm_op, module.eps)
        return _norm(x, module.weight, bias, x.shape[-1:], eps, op, self.sink, examples)


@register
class _RMSNormRule(LayerRule):
    layers = (nn.RMSNorm,)

    def forward(self, x: Tensor) -> Tensor:
        module, shape = self.module, tuple(self.module.normalized_shape)
        x, _ = self.examples_first(x, 1 + len(shape))
        y = F.rms_norm(x, shape, None, module.eps)
        dims = tuple(range(x.dim() - len(shape), x.dim()))
        return scale_shift(y, module.weight, None, dims, self.sink, torch.result_type(y, module.weight))


@register
class _ChannelNormRule(LayerRule):
    layers = (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)

    def forward(self, input: Tensor) -> Tensor:
        module, groups = self.module, getattr(self.module, "num_groups", None)
        x, _ = self.examples_first(input, 3 if groups is None else 2)
        eps = module.eps
        y = F.instance_norm(x, eps=eps) if groups is None else F.group_norm(x, groups, None, None, eps)
        return scale_shift(y, module.weight, module.bias, (1,), self.sink, y.dtype)


@register
class _PReLURule(LayerRule):
    layers = (nn.PReLU,)

    def forward(self, input: Tensor) -> Tensor:
        x, _ = self.examples_first(input)
        dims = (1,) if self.module.num_parameters > 1 else ()
        return torch.where(x > 0, x, scale_shift(x, self.module.weight, None, dims, self.sink, x.dtype))


# --- language models of accelerant.nn, whose output layer is the embedding's table -----------------------------------


def _gpt_methods(model: GPT, sink: PerExampleSink) -> Methods:
    plain_embedded, plain_logits, plain_loss = model._embedded, model._padded_logits, model.loss

    def embedded(idx: Tensor) -> tuple[Tensor, Tensor]:
        if model._fuses_embeddings(idx):  # the fused functions feed the sink themselves
            return plain_embedded(idx)
        table, position_table = model.wte.weight, model.wpe.weight
        positions = torch.arange(idx.shape[1], device=idx.device)[None]
        # Without a call of wpe: (T,) positions could be one token for each of T examples.
        added = position_table[positions]
        if sink.wants(position_table):
            added = lookup(positions, position_table, None, sink, idx.shape[0], True)
        return (model.wte(idx) + added).to(compute_dtype(table)), table

    def logits(hidden: Tensor) -> Tensor:
        if model.lm_head is not None or not sink.wants(model.wte.weight):
            return plain_logits(hidden)
        return linear(hidden.reshape(-1, model.config.width), model.wte.weight, None, sink, hidden.shape[0])

    def loss(idx: Tensor, targets: Tensor) -> Tensor:
        _check_labels(sink, targets)
        if model._fuses_embeddings(idx):
            sink.begin(idx)
        return plain_loss(idx, targets)

    return {"_embedded": embedded, "_padded_logits": logits, "loss": loss}


def _llama_methods(model: Llama, sink: PerExampleSink) -> Methods:
    plain_logits = model._logits

    def logits(hidden: Tensor) -> Tensor:
        if model.lm_head is not None or not sink.wants(model.embed.weight):
            return plain_logits(hidden)
        rows = linear(hidden.flatten(0, -2), model.embed.weight, None, sink, hidden.shape[0])
        return rows.view(*hidden.shape[:-1], model.config.vocab_size)

    def loss(idx: Tensor, targets: Tensor) -> Tensor:
        _check_labels(sink, targets)
        return ops.cross_entropy(model(idx).flatten(0, 1), targets.flatten().long())

    return {"_logits": logits, "loss": loss}


def _check_labels(sink: PerExampleSink, targets: Tensor) -> None:
    """Let the owner of a clipper check the labels that a model averages over, of which some may be ignored."""
    check = getattr(sink, "on_labels", None)
    if check is not None:
        check(targets)


model_methods.update({GPT: _gpt_methods, Llama: _llama_methods})


# --- transformers; its source is checked by fingerprints -------------------------------------------------------------


class _HuggingFaceRule(LayerRule):
    form: str

    @classmethod
    def matches(cls, path: str) -> bool:
        return not unknown(f"{path}.forward", cls.form)


@register
class _Conv1DRule(_HuggingFaceRule):
    layers, form = ("transformers.pytorch_utils:Conv1D",), "conv1d"

    def forward(self, x: Tensor) -> Tensor:
        x, examples = self.examples_first(x)
        return linear(x, self.module.weight, self.module.bias, self.sink, examples, transposed=True)


@register
class _HuggingFaceRMSNormRule(_HuggingFaceRule):
    form = "rms_norm"
    layers = tuple(
        f"transformers.models.{name.lower()}.modeling_{name.lower()}:{name}RMSNorm"
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
    )

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, _ = self.examples_first(hidden_states)
        weight, floats = self.module.weight, x.float()
        y = (floats * (floats.pow(2).mean(-1, keepdim=True) + self.module.variance_epsilon).rsqrt()).to(x.dtype)
        dtype = torch.promote_types(weight.dtype, y.dtype)
        return scale_shift(y, weight, None, (x.dim() - 1,), self.sink, dtype)


# --- convolutions: the rows of their norms are unfolded windows -------------------------------------------------------


class Windows(NamedTuple):
    """A convolution's stride, padding and dilation in each dimension of the image, and its groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(slots=True)
class Convolution(GradientContribution):
    """A kernel's gradient from x (B, C, ...), g (B, O, ...) and weight (O, C / groups, ...); windows are not kept."""

    of: ClassVar = "x"
    x: Tensor
    g: Tensor
    weight: Tensor
    windows: Windows

    def bound(self) -> Tensor:
        B, groups, dtype = self.x.shape[0], self.windows.groups, self.x.dtype
        total = torch.empty(B, dtype=torch.float64, device=self.x.device)
        for part in self._chunks():
            a, g = self._rows(part)
            terms = launch.ghost_terms(a.flatten(0, 1), g.flatten(0, 1))
            gram = launch.Gram.of(*terms, (*a.shape[2:], g.shape[3]), _factor_roundoff(dtype, self.x.device))
            total[part] = launch.bounded([gram]).view(-1, groups).sum(1)
        return total

    def dense(self) -> Dense:
        gradients = self.x.new_empty((self.x.shape[0], *self.weight.shape))
        for part in self._chunks():
            a, g = self._rows(part)
            gradients[part] = torch.matmul(g.mT, a).view(-1, *self.weight.shape)
        return Dense(gradients)

    def prefers_ghost(self) -> bool:
        """Apply the rule to one group."""
        x, N = self.x, self.g.shape[1] // self.windows.groups
        sizes = (x.shape[0], self._positions(), N, self.weight[0].numel(), x.element_size())
        return prefers_ghost(*sizes, x.device.type)

    def total(self, weights: Tensor, drop: Tensor | None, shape: torch.Size) -> Tensor:
        """Return the gradient of weighted g; in float32, since 16 bits round by more than an example adds."""
        dtype = launch.weighted_dtype(wide(self.g.dtype), self.x)
        g = launch.scaled(self.g, weights.to(dtype), drop, dtype)
        x = launch.cleared(self.x, drop).to(dtype)
        _, total, _ = _backward(g, x, self.weight.to(g.dtype), self.windows, [False, True, False])
        return total.view(shape)  # type: ignore[no-any-return]  # torch's own

    def _positions(self) -> int:
        return self.g[0, 0].numel() if self.g.shape[0] else 1

    def _chunks(self) -> Iterator[slice]:
        return chunks(self.x.shape[0], self.weight[0].numel() * self.windows.groups * self._positions())

    def _rows(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return windows (b, groups, T, K) and gradients (b, groups, T, N)."""
        groups = self.windows.groups
        x, kernel = self.x[part], tuple(self.weight.shape[2:])
        stride, padding, dilation = self.windows[:3]
        if x.dim() == 3:
            x, kernel = x.unsqueeze(2), (1, *kernel)
            stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
        a = F.unfold(x, kernel, dilation, padding, stride)
        a = a.view(x.shape[0], groups, -1, a.shape[2])
        return a.mT, self.g[part].reshape(x.shape[0], groups, -1, a.shape[3]).mT


def _factor_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Return `launch.factor_roundoff` of a convolution; on a GPU cuDNN takes TF32, or transforms the images."""
    if dtype == torch.float64:
        return 2.0**-53
    if device.type == "cpu":
        library: Any = torch.backends.mkldnn
        return launch.FLOAT32_ROUNDOFF[library.conv.fp32_precision]
    return launch.FLOAT32_ROUNDOFF["tf32"]


def _backward(dy: Tensor, x: Tensor, weight: Tensor, windows: Windows, mask: list[bool]) -> Any:
    unpadded = [0] * len(windows.stride)
    return torch.ops.aten.convolution_backward(
        dy, x, weight, None, *windows[:3], False, unpadded, windows.groups, mask
    )  # fmt: skip


class _Convolve(torch.autograd.Function):
    """x (B, C, ...), weight, bias -> (B, O, ...)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows, sink: Any, examples: int
    ) -> Tensor:
        low = weight.to(x.dtype)
        low_bias = None if bias is None else bias.to(x.dtype)
        y = torch.ops.aten.convolution(x, low, low_bias, *windows[:3], False, [0] * len(windows.stride), windows.groups)
        ctx.save_for_backward(x, low)
        ctx.windows, ctx.sink, ctx.parameters, ctx.examples = windows, sink, (weight, bias), examples
        sink.expect(weight, bias)
        return y  # type: ignore[no-any-return]  # torch's own

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        require_first_visit(ctx)
        x, low = ctx.saved_tensors
        (weight, bias), sink, windows = ctx.parameters, ctx.sink, ctx.windows
        if sink.wants(weight):
            sink.contribute(weight, Convolution(x, dy, low, windows), ctx.examples)
        if sink.wants(bias):
            sink.gradients(bias, dy.flatten(2).sum(2, dtype=wide(dy.dtype)))
        dx = _backward(dy, x, low, windows, [True, False, False])[0] if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


_convolve: Callable[..., Tensor] = _Convolve.apply


@register
class _ConvRule(LayerRule):
    layers = (nn.Conv1d, nn.Conv2d, our.Conv2d)

    def forward(self, input: Tensor) -> Tensor:
        module, dimensions = self.module, len(self.module.kernel_size)
        x, examples = self.examples_first(input, 2 + dimensions)
        padding = module.padding
        if module.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
            padding = (0,) * dimensions
        windows = Windows(module.stride, padding, module.dilation, module.groups)
        return _convolve(to_autocast(x), module.weight, module.bias, windows, self.sink, examples)


# --- recurrent layers ------------------------------------------------------------------------------------------------

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


def _step(
    mode: str, gates: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor | None], sink: PerExampleSink
) -> tuple[Tensor, ...]:
    """Return the states (B, H) after one step, from the inputs' part of the gates (B, gates H); weights of states."""
    h, (w_hh, b_hh, *projection) = states[0], weights
    assert w_hh is not None  # for the type checker
    own = linear(h, w_hh, b_hh, sink, len(h))
    if mode == "LSTM":
        i, f, g, o = (gates + own).chunk(4, -1)
        c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h if not projection or projection[0] is None else linear(h, projection[0], None, sink, len(h)), c
    if mode == "GRU":
        (xr, xz, xn), (hr, hz, hn) = gates.chunk(3, -1), own.chunk(3, -1)
        n = (xn + (xr + hr).sigmoid() * hn).tanh()
        return (n + (xz + hz).sigmoid() * (h - n),)
    return ((gates + own).relu() if mode.lower().endswith("relu") else (gates + own).tanh(),)


@register
class _RecurrentRule(LayerRule):
    layers: ClassVar[tuple[type[nn.Module] | str, ...]] = (nn.LSTM, nn.GRU, nn.RNN, our.LSTM, our.GRU)
    has_states = True

    def inside(self, region: Region, *args: Any, **kwargs: Any) -> Any:
        if not self.module.batch_first or not all(isinstance(each, Tensor) for each in args[:1]):
            raise UnsupportedCase(
                f"{self.module} is called where modules with parameters of their own run for each example by itself: "
                "take batch_first=True there, and no packed sequences"
            )
        return super().inside(region, *args, **kwargs)

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Run all layers and directions; return y and the final state or states, (layers directions, B, H) each."""
        module, lstm, mask = self.module, self.module.mode == "LSTM", None
        result: Any
        if packed := isinstance(input, PackedSequence):
            x, lengths = pad_packed_sequence(input, batch_first=True)
            mask = torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]
        else:
            x = input if module.batch_first or input.dim() < 3 else input.transpose(0, 1)
        x, examples = self.examples_first(x, 3)
        x = x.to(module.weight_ih_l0.dtype)
        directions = 2 if module.bidirectional else 1
        outer = (module.num_layers * directions, examples)
        shapes = [(*outer, module.proj_size or module.hidden_size), (*outer, module.hidden_size)][: 1 + lstm]
        states = [x.new_zeros(shape) for shape in shapes] if hx is None else hx if lstm else (hx,)
        for state, shape in zip(states, shapes, strict=True):
            if state.shape != shape:
                raise ShapeError(f"the state of {type(module).__name__} must be {shape}, got {tuple(state.shape)}")

        def run(x: Tensor, layer: int, direction: int) -> tuple[Tensor, ...]:
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
            weights = [getattr(module, f"{name}_l{layer}{'_reverse' * direction}", None) for name in names]
            begin = [state[layer * directions + direction].to(x.dtype) for state in states]
            with torch.autocast(x.device.type, enabled=False):  # the backward pass repeats it in this dtype
                if mask is None and not module.proj_size and module.mode in ("LSTM", "GRU"):
                    return (_run_lstm if lstm else _run_gru)(x, *begin, self.sink, *weights[:4])
                return self._by_steps(x, begin, weights, mask.flip(1) if mask is not None and direction else mask)

        y, *final = run_layers(run, x, module.num_layers, module.dropout, module.training, module.bidirectional)
        if packed:
            result = pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=input.sorted_indices is None)
        else:
            result = y if module.batch_first else y.transpose(0, 1)
        return result, tuple(final) if lstm else final[0]

    def _by_steps(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor | None], mask: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Run one direction of a layer; steps (B, T) that are masked leave the states as they are."""
        (w_ih, w_hh, b_ih, b_hh, w_hr), found = weights, []
        assert w_ih is not None  # for the type checker
        gates = linear(x, w_ih, b_ih, self.sink, len(x))
        for t in range(x.shape[1]):
            after = _step(self.module.mode, gates[:, t], states, (w_hh, b_hh, w_hr), self.sink)
            if mask is not None:
                after = tuple(torch.where(mask[:, t, None], *each) for each in zip(after, states, strict=True))
            states = after
            found.append(states[0])
        return torch.stack(found, 1), *states


@register
class _CellRule(LayerRule):
    layers = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        module, (x, examples) = self.module, self.examples_first(input)
        mode = getattr(module, "nonlinearity", type(module).__name__.removesuffix("Cell"))
        count = 2 if isinstance(module, nn.LSTMCell) else 1
        states = (x.new_zeros(examples, module.hidden_size),) * count if hx is None else hx if count == 2 else (hx,)
        states = [self.examples_first(each)[0] for each in states]
        gates = linear(x, module.weight_ih, module.bias_ih, self.sink, examples)
        after = _step(mode, gates, states, (module.weight_hh, module.bias_hh), self.sink)
        return after if count == 2 else after[0]


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
        if not any(map(sink.wants, (bias, module.in_proj_weight, *separate))):
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
