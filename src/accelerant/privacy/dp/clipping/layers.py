"""Linear maps, embeddings and norms: autograd functions that feed a sink, and the rules of the layers that use them.

The backward pass of each function makes the gradient of the input alone and gives the sink what the parameters'
gradients are made of. Parameters are arguments, so that autograd visits the layer even where its input needs no
gradient; they get None. Results are no views, so that later operations may change them in place.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import nn as our
from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedCase
from accelerant.nn import GPT, Llama
from accelerant.nn._patch.fingerprints import fingerprint, unknown
from accelerant.nn.layers import compute_dtype
from accelerant.ops._differentiable import DifferentiableOp
from accelerant.ops._library import autocast_dtype
from accelerant.ops._per_example import PerExampleSink as Sink
from accelerant.ops.norm.op import _layer_norm as _layer_norm_op
from accelerant.ops.norm.op import _rms_norm as _rms_norm_op
from accelerant.ops.transformer.op import norm_backward_each
from accelerant.privacy.dp.clipping.launch import wide
from accelerant.privacy.dp.clipping.rules import LayerRule, Methods, register, register_model

__all__ = ["SECOND_PASS", "expanded", "linear", "lookup", "require_first_visit", "scale_shift", "to_autocast"]

_Gradients = tuple[Tensor | None, ...]

SECOND_PASS = (
    "a second backward pass through the same forward pass would add each example once more, and break the bound: add "
    "up the losses and call backward() once"
)


def to_autocast(x: Tensor) -> Tensor:
    """Return x in autocast's dtype for products; x itself where autocast is off."""
    low = autocast_dtype(x.device.type)
    return x if low is None or not x.is_floating_point() or x.dtype == torch.float64 else x.to(low)


def require_first_visit(ctx: Any) -> None:
    """Check that a backward pass visits a node for the first time.

    Raises:
        UnsupportedCase: it is the second visit: each example would count twice in a step.
    """
    if getattr(ctx, "visited", False):
        raise UnsupportedCase(SECOND_PASS)
    ctx.visited = True


# --- linear maps -----------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """x (..., K), weight (N, K), or (K, N) if transposed, bias (N,), a sink, examples -> (..., N)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Sink, examples: int, transposed: bool
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
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
        dy = dy.reshape(-1, dy.shape[-1])
        if rows is not None:
            factors = (rows, dy) if ctx.transposed else (dy, rows)
            sink.linear(weight, None, *factors, ctx.examples)
        sink.columns(bias, dy, ctx.examples)
        dx = None
        if low is not None:
            dx = torch.mm(dy, low.t() if ctx.transposed else low).view(ctx.shape)
        return dx, None, None, None, None, None


_apply_linear: Callable[..., Tensor] = _Linear.apply


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, sink: Sink, examples: int, *, transposed: bool = False
) -> Tensor:
    """Return x weight^T + bias, or x weight + bias if the weight is transposed; x (..., K), its rows example-major."""
    return _apply_linear(to_autocast(x), weight, bias, sink, examples, transposed)


@register
class _LinearRule(LayerRule):
    layers = (nn.Linear,)

    def forward(self, input: Tensor) -> Tensor:
        x, examples = self.examples_first(input)
        return linear(x, self.module.weight, self.module.bias, self.sink, examples)


@register
class _OurLinearRule(LayerRule):
    layers = (our.Linear,)

    def forward(self, x: Tensor) -> Tensor:
        x, examples = self.examples_first(x)
        return linear(x.to(compute_dtype(x)), self.module.weight, self.module.bias, self.sink, examples)


# --- embeddings and parameters that are added ------------------------------------------------------------------------


class _Lookup(torch.autograd.Function):
    """tokens (examples, ...) or (1, ...), weight (V, D) -> their rows."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, padding_idx: int | None, sink: Sink, examples: int, distinct: bool
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.sink, ctx.parameter, ctx.options = sink, weight, (examples, padding_idx, distinct)
        sink.expect(weight)
        y = F.embedding(tokens, weight)
        return y if tokens.shape[0] == examples else y.expand(examples, *y.shape[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        require_first_visit(ctx)
        (tokens,) = ctx.saved_tensors
        ctx.sink.embedding(ctx.parameter, dy.reshape(-1, dy.shape[-1]), tokens.reshape(-1), *ctx.options)
        return None, None, None, None, None, None


_apply_lookup: Callable[..., Tensor] = _Lookup.apply


def lookup(
    tokens: Tensor, weight: Tensor, padding_idx: int | None, sink: Sink, examples: int, *, distinct: bool = False
) -> Tensor:
    """Return rows of an embedding, (examples, ..., D); tokens (1, ...) are shared by all examples.

    `distinct` asserts that no token repeats within an example, as positions do not.
    """
    return _apply_lookup(tokens, weight, padding_idx, sink, examples, distinct)


@register
class _EmbeddingRule(LayerRule):
    layers = (nn.Embedding,)
    _takes_positions: bool | None = None
    """Whether its vectors of tokens are positions, shared by the examples; learnt at the first call."""

    @classmethod
    def refusal(cls, module: nn.Embedding) -> str | None:
        if module.max_norm is not None:
            return "max_norm changes the table in the forward pass: leave it out"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq mixes the examples of a batch: leave it out"
        if module.sparse:
            return "sparse gradients are not made: take sparse=False"
        return None

    def forward(self, input: Tensor) -> Tensor:
        padding, examples = self.module.padding_idx, self.sink.batch
        if input.dim() == 1 and examples is not None:
            if self._takes_positions is None:
                self._takes_positions = _are_positions(input, examples)
            if self._takes_positions:
                return lookup(input[None], self.module.weight, padding, self.sink, examples)
        if input.dim() and input.shape[0] == 1 and examples is not None:
            return lookup(input, self.module.weight, padding, self.sink, examples)
        tokens, count = self.examples_first(input, least=1)
        return lookup(tokens, self.module.weight, padding, self.sink, count)


def _are_positions(tokens: Tensor, examples: int) -> bool:
    """Return whether a vector of tokens is 0, 1, 2, ...: one for each position, not one for each example."""
    count = torch.arange(tokens.shape[0], device=tokens.device)
    if tokens.shape[0] == 0 or not bool((tokens - tokens[0] == count).all()):
        return False
    if tokens.shape[0] == examples and examples > 1:
        raise ShapeError(
            f"an Embedding got the {examples} consecutive numbers that positions would be, for {examples} examples: "
            "give positions as (1, T), or a token for each example as (B, 1)"
        )
    return tokens.shape[0] != examples


class _Expanded(torch.autograd.Function):
    """A parameter -> (examples, *shape), or (examples, *shape[1:]) of one whose first dimension is 1."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, sink: Sink, examples: int, batched: bool) -> Tensor:
        ctx.sink, ctx.parameter = sink, parameter
        sink.expect(parameter)
        return parameter.expand(examples, *(parameter.shape[1:] if batched else parameter.shape))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        require_first_visit(ctx)
        ctx.sink.gradients(ctx.parameter, dy.reshape(dy.shape[0], *ctx.parameter.shape))
        return None, None, None, None


_apply_expanded: Callable[..., Tensor] = _Expanded.apply


def expanded(parameter: Tensor, sink: Sink, examples: int, *, batched: bool = False) -> Tensor:
    """Return a parameter once for each example, without a copy; `batched`: its first dimension, of 1, is the batch."""
    return _apply_expanded(parameter, sink, examples, batched)


# --- norms -----------------------------------------------------------------------------------------------------------


class _ScaleShift(torch.autograd.Function):
    """x times weight plus bias, along dimensions `dims` of x; either may be None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dims: tuple[int, ...],
        sink: Sink,
        dtype: torch.dtype,
    ) -> Tensor:
        shape = [size if dim in dims else 1 for dim, size in enumerate(x.shape)]
        y = x
        scale = None if weight is None else weight.view(shape)
        if scale is not None:
            y = y * scale
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
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dy if scale is None else dy * scale).to(ctx.dtype)
        return dx, None, None, None, None, None


def _summed(x: Tensor, dims: tuple[int, ...], shape: torch.Size) -> Tensor:
    return (x.sum(dims) if dims else x).reshape(x.shape[0], *shape)


scale_shift: Callable[..., Tensor] = _ScaleShift.apply
"""x (examples, ...), weight, bias, dims, sink, dtype -> x times weight plus bias, which have x's dimensions `dims`."""


class _Norm(torch.autograd.Function):
    """layer_norm or rms_norm of accelerant.ops: x (examples, ..., N), weight, bias, eps -> the shape of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        op: DifferentiableOp,
        sink: Sink,
        examples: int,
    ) -> Tensor:
        y, statistics = op.forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.sink, ctx.parameters, ctx.options = sink, (weight, bias), (eps, op, examples)
        sink.expect(weight, bias)
        return y  # type: ignore[no-any-return]  # an op returns tensors

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        require_first_visit(ctx)
        x, weight, bias, statistics = ctx.saved_tensors
        eps, op, examples = ctx.options
        if dy.is_cuda and op is _layer_norm_op and examples:  # all in one pass over dy and x
            sink, (scale, shift) = ctx.sink, ctx.parameters
            wanted = (sink.wants(scale), sink.wants(shift), False)
            fused_dx, *sums, _ = norm_backward_each(dy, None, x, weight, statistics, eps, examples, wanted)
            for parameter, gradients in zip((scale, shift), sums, strict=True):
                if gradients is not None:
                    sink.gradients(parameter, gradients)
            return fused_dx, *((None,) * 6)
        columns = x.shape[-1]
        ctx.sink.norm(*ctx.parameters, dy.reshape(-1, columns), x.reshape(-1, columns), statistics, examples)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = op.backward(dy, x, weight, bias, statistics, eps, (True, False, False))[0]
        return dx, *((None,) * 6)


_norm: Callable[..., Tensor] = _Norm.apply


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
        sink: Sink,
        examples: int,
    ) -> Tensor:
        y, mean, rstd = torch.ops.aten.native_layer_norm(x, list(shape), weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.sink, ctx.parameters, ctx.norm, ctx.examples = sink, (weight, bias), shape, examples
        sink.expect(weight, bias)
        return y  # type: ignore[no-any-return]  # torch's own

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        require_first_visit(ctx)
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


_layer_norm: Callable[..., Tensor] = _LayerNorm.apply


@register
class _LayerNormRule(LayerRule):
    layers = (nn.LayerNorm,)

    def forward(self, input: Tensor) -> Tensor:
        module, shape = self.module, tuple(self.module.normalized_shape)
        x, examples = self.examples_first(input, 1 + len(shape))
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.float()
        return _layer_norm(x, module.weight, module.bias, shape, module.eps, self.sink, examples)


@register
class _OurNormRule(LayerRule):
    layers = (our.LayerNorm, our.RMSNorm)

    def forward(self, x: Tensor) -> Tensor:
        module = self.module
        x, examples = self.examples_first(x)
        x = x.to(compute_dtype(x)).contiguous()
        if isinstance(module, our.RMSNorm):
            return _norm(x, module.weight, None, module.eps, _rms_norm_op, self.sink, examples)
        return _norm(x, module.weight, module.bias, module.eps, _layer_norm_op, self.sink, examples)


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
class _GroupNormRule(LayerRule):
    layers = (nn.GroupNorm,)

    def forward(self, input: Tensor) -> Tensor:
        module = self.module
        x, _ = self.examples_first(input)
        y = F.group_norm(x, module.num_groups, None, None, module.eps)
        return scale_shift(y, module.weight, module.bias, (1,), self.sink, y.dtype)


@register
class _InstanceNormRule(LayerRule):
    layers = (nn.modules.instancenorm._InstanceNorm,)

    def forward(self, input: Tensor) -> Tensor:
        x, _ = self.examples_first(input, 3)
        y = F.instance_norm(x, eps=self.module.eps)
        return scale_shift(y, self.module.weight, self.module.bias, (1,), self.sink, y.dtype)


# --- our language models: the embedding is the output layer, without a call of a layer -------------------------------


@register_model(GPT)
def _gpt_methods(model: GPT, sink: Sink) -> Methods:
    plain_embedded, plain_logits, plain_loss = model._embedded, model._padded_logits, model.loss

    def embedded(idx: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled() or model._fuses_embeddings(idx):  # the fused functions feed the sink themselves
            return plain_embedded(idx)
        table, position_table = model.wte.weight, model.wpe.weight
        positions = torch.arange(idx.shape[1], device=idx.device)[None]
        # Without a call of wpe: (T,) positions could be one token for each of T examples.
        added = position_table[positions]
        if sink.wants(position_table):
            added = lookup(positions, position_table, None, sink, idx.shape[0], distinct=True)
        return (model.wte(idx) + added).to(compute_dtype(table)), table

    def logits(hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or model.lm_head is not None or not sink.wants(model.wte.weight):
            return plain_logits(hidden)
        return linear(hidden.reshape(-1, model.config.width), model.wte.weight, None, sink, hidden.shape[0])

    def loss(idx: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled() and model._fuses_embeddings(idx):
            sink.begin(idx)
        return plain_loss(idx, targets)

    return {"_embedded": embedded, "_padded_logits": logits, "loss": loss}


@register_model(Llama)
def _llama_methods(model: Llama, sink: Sink) -> Methods:
    plain_logits, plain_loss = model._logits, model.loss

    def logits(hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or model.lm_head is not None or not sink.wants(model.embed.weight):
            return plain_logits(hidden)
        rows = linear(hidden.flatten(0, -2), model.embed.weight, None, sink, hidden.shape[0])
        return rows.view(*hidden.shape[:-1], model.config.vocab_size)

    def loss(idx: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return plain_loss(idx, targets)
        return ops.cross_entropy(model(idx).flatten(0, 1), targets.flatten().long())

    return {"_logits": logits, "loss": loss}


# --- transformers, known by the fingerprints of its source -----------------------------------------------------------


class _HuggingFaceRule(LayerRule):
    @classmethod
    def matches(cls, path: str) -> bool:
        return unknown(f"{path}.forward") is None


@register
class _Conv1DRule(_HuggingFaceRule):
    layers = ("transformers.pytorch_utils:Conv1D",)

    def forward(self, x: Tensor) -> Tensor:
        x, examples = self.examples_first(x)
        return linear(x, self.module.weight, self.module.bias, self.sink, examples, transposed=True)


@register
class _HuggingFaceRMSNormRule(_HuggingFaceRule):
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


@register
class _ViTEmbeddingsRule(LayerRule):
    """Expands the class token and the positions, (1, ...), to one for each example."""

    layers = ("transformers.models.vit.modeling_vit:ViTEmbeddings",)
    _FINGERPRINTS = ("30b221f6bf44c7c2",)  # of transformers 5.17

    @classmethod
    def matches(cls, path: str) -> bool:
        package, _, name = path.partition(":")
        try:
            return fingerprint(getattr(importlib.import_module(package), name).forward) in cls._FINGERPRINTS
        except (OSError, SyntaxError, TypeError):  # no source
            return False

    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own = dict(self.module._parameters)
        try:
            for name, param in own.items():
                if self.sink.wants(param):
                    self.module._parameters[name] = expanded(param, self.sink, pixel_values.shape[0], batched=True)
            y: Tensor = self.plain(pixel_values, *args, **kwargs)
            return y
        finally:
            self.module._parameters.update(own)
