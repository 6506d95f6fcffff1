"""The forward methods that patch puts on modules: norms, activations, embeddings, MLPs, attention and whole blocks.

Each falls back to its class's own for arguments that our op does not take. In plain training (gradients, one dtype or
autocast, no cache, dropout, hooks or adapters) a block is one autograd function; otherwise it calls its modules.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from accelerant import ops
from accelerant.nn.layers import GLOBAL_HOOKS
from accelerant.nn.patching.attention import Pattern, is_torchs, known_pattern
from accelerant.nn.patching.forms import Replacement
from accelerant.nn.patching.plain import (
    ADD_NORMS,
    add_norm,
    else_class,
    gelu_forward,
    is_small,
    keeps_dtype,
    layer_norm_forward,
    leaves,
    linear_gelu,
    silu_forward,
)
from accelerant.nn.patching.record import ATTENTION_NAME, MARK, Forward, has_hooks, is_bare, runs_forward
from accelerant.ops._library import autocast_dtype, is_ordinary, is_plain
from accelerant.ops.transformer.block import BlockSpec, DecoderSpec, fused_block, fused_decoder_layer
from accelerant.runtime.streams.graphs import ahead_of_capture

_HALF_TABLES = "_accelerant_half_tables"  # attribute of a rotary cos table: both tables as our rope takes them


# --- norms -----------------------------------------------------------------------------------------------------------
@else_class
def layer_norm_scale_forward(self: Any, hidden_states: Tensor) -> Any:
    """Run a layer norm without a bias (Cohere)."""
    if not leaves(hidden_states, composed=True) and keeps_dtype(hidden_states, self.weight):
        return ops.layer_norm(hidden_states, self.weight, eps=self.variance_epsilon)


@else_class
def rms_norm_forward(self: Any, hidden_states: Tensor) -> Any:
    """Run the RMSNorm of Llama, T5 and most others."""
    if not leaves(hidden_states, composed=True) and keeps_dtype(hidden_states, self.weight):
        return ops.rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


@else_class
def offset_rms_norm_forward(self: Any, x: Tensor) -> Any:
    """Run the RMSNorm of Gemma, which scales by 1 + weight, in float32 for low-precision weights."""
    if not leaves(x, composed=True) and keeps_dtype(x, self.weight):
        return ops.rms_norm(x, _offset(self.weight), eps=self.eps)


def _offset(weight: Tensor) -> Tensor:
    return 1.0 + (weight if weight.dtype is torch.float64 else weight.float())


ADD_NORMS |= {
    rms_norm_forward: lambda x, y, norm: ops.add_rms_norm(x, y, norm.weight, eps=norm.variance_epsilon),
    offset_rms_norm_forward: lambda x, y, norm: ops.add_rms_norm(x, y, _offset(norm.weight), eps=norm.eps),
}


# --- MLPs ------------------------------------------------------------------------------------------------------------
def _linear_gelu(module: Any, layer: Any, activation: Any, x: Tensor) -> Any:
    """Return activation(layer(x)), by one op unless the modules have to be called."""
    options = getattr(module, MARK).options
    if is_bare(activation, options["activation"], gelu_forward):
        weight = None
        if is_bare(layer, nn.Linear):
            weight = layer.weight
        elif is_bare(layer, Conv1D):  # its weight is stored as (in, out)
            weight = layer.weight.t()
        y = None if weight is None else linear_gelu(x, weight, layer.bias, options["approximate"])
        if y is not None:
            return y
    return activation(layer(x))


def gelu_mlp_forward(self: Any, hidden_states: Tensor) -> Any:
    """Run an MLP with a GELU."""
    first, activation, rest = getattr(self, MARK).options["names"]
    hidden_states = _linear_gelu(self, getattr(self, first), getattr(self, activation), hidden_states)
    for name in rest:
        hidden_states = getattr(self, name)(hidden_states)
    return hidden_states


def bert_output_forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """Run BertSelfOutput or BertOutput."""
    return add_norm(self.dropout(self.dense(hidden_states)), input_tensor, self.LayerNorm)[0]


def gated_mlp_forward(self: Any, x: Tensor) -> Any:
    """Run the gated MLP of Llama and most others."""
    if leaves(x) or not is_bare(self.act_fn, getattr(self, MARK).options["activation"], silu_forward):
        return type(self).forward(self, x)
    return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


def packed_gated_mlp_forward(self: Any, hidden_states: Tensor) -> Any:
    """Run the gated MLP of Phi-3, whose gate and up projection are one layer."""
    bare = is_bare(self.activation_fn, getattr(self, MARK).options["activation"], silu_forward)
    if leaves(hidden_states) or not bare:
        return type(self).forward(self, hidden_states)
    return self.down_proj(ops.swiglu(self.gate_up_proj(hidden_states)))


# --- experts ---------------------------------------------------------------------------------------------------------
class _Lowered:
    """A module of experts whose weights are in a lower dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return found.to(self._dtype) if isinstance(found, nn.Parameter) and found.dim() == 3 else found


def experts_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute the products of experts in autocast's dtype, as those of other layers.

    Torch's grouped products are not part of autocast. Those in float32 read on the host how many rows each has.
    """
    low, forward = autocast_dtype(hidden_states.device.type), type(self).forward
    if low is not torch.bfloat16 or self.config._experts_implementation != "grouped_mm":
        return forward(self, hidden_states, *args, **kwargs)
    return forward(_Lowered(self, low), hidden_states, *args, **kwargs)


# --- attention -------------------------------------------------------------------------------------------------------
@functools.cache
def rebound(function: Any, name: str, value: Any) -> Any:
    """Return a copy of a function in which a global name has another value; None if its decorators are not known.

    Its other globals are those of now.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:
        ours = rebound(inner, name, value) if function.__code__.co_qualname in (_TUPLES, _RENAMING) else None
        if ours is None:
            return None
        cells = [types.CellType(ours) if cell.cell_contents is inner else cell for cell in function.__closure__]
        copied = types.FunctionType(function.__code__, function.__globals__, closure=tuple(cells))
        functools.update_wrapper(copied, ours)
        return copied
    # torch.compile looks globals up in the module that __name__ names, which are the original's; without it, in these.
    names = {key: each for key, each in function.__globals__.items() if key != "__name__"} | {name: value}
    copied = types.FunctionType(function.__code__, names, None, function.__defaults__, function.__closure__)
    functools.update_wrapper(copied, function)
    del copied.__dict__["__wrapped__"]
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


@functools.cache
def rotary(apply: Any, *, partial: bool) -> Forward:
    """Return transformers' apply_rotary_pos_emb by our rope, and by `apply` for tables that ours does not take.

    `partial` allows tables that are narrower than heads; the other features stay.
    """

    def rotated(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, unsqueeze_dim: int = 1, **kwargs: Any
    ) -> Any:
        D, width = q.shape[-1], cos.shape[-1]
        fits = width == D or (partial and width < D and width % 2 == 0)
        if (
            leaves(q, composed=True) or args or kwargs or not fits
            or unsqueeze_dim not in (1, 2) or q.dim() != 4 or cos.dim() != 3
            or k.shape[-1] != D or k.dtype is not q.dtype or not _is_table_of(q, cos)
        ):  # fmt: skip
            return apply(q, k, cos, sin, *args, unsqueeze_dim=unsqueeze_dim, **kwargs)
        tables = _half_tables(cos, sin)
        return tuple(_rotate(x, tables, width, heads_last=unsqueeze_dim == 2) for x in (q, k))

    return rotated


def _is_table_of(x: Tensor, cos: Tensor) -> bool:
    """Return whether our rope takes a table's dtype: that of x, or float32 for lower ones."""
    return cos.dtype is x.dtype or (cos.dtype is torch.float32 and x.dtype is not torch.float64)


def _rotate(x: Tensor, tables: tuple[Tensor, Tensor], width: int, *, heads_last: bool) -> Tensor:
    x = x.transpose(1, 2) if heads_last else x
    y = ops.rope(x if width == x.shape[-1] else x[..., :width], *tables)
    y = y if width == x.shape[-1] else torch.cat((y, x[..., width:]), -1)
    return y.transpose(1, 2) if heads_last else y


def _half_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first halves of rotary tables (B or 1, S, D), whose halves are equal; computed once a forward pass."""
    tables: tuple[Tensor, Tensor] | None = getattr(cos, _HALF_TABLES, None)
    if tables is None:
        half = cos.shape[-1] // 2
        first, second = (table[0, :, :half] if table.shape[0] == 1 else table[..., :half] for table in (cos, sin))
        tables = first.contiguous(), second.contiguous()
        setattr(cos, _HALF_TABLES, tables)
    return tables


# --- decorators of transformers --------------------------------------------------------------------------------------
_TUPLES = "can_return_tuple.<locals>.wrapper"
_RENAMING = "deprecate_kwarg.<locals>.wrapper.<locals>.wrapped_func"  # of past_key_values to cache, from 5.24 on
_CHECKPOINTING = "GradientCheckpointingLayer.__init_subclass__.<locals>.forward_with_checkpointing"  # from 5.23 on


def _decorators(forward: Any) -> set[str]:
    names = set()
    while hasattr(forward, "__wrapped__"):
        names.add(forward.__code__.co_qualname)
        forward = forward.__wrapped__
    return names


def is_plain_forward(forward: Any) -> bool:
    """Return whether a layer's forward has no decorators but gradient checkpointing and a renaming of arguments."""
    return _decorators(forward) <= {_RENAMING, _CHECKPOINTING}


def layer_plan(module: Any, forward: Forward, changes: list[tuple[str, str]], **options: Any) -> Replacement:
    """Return the plan of a layer that may be checkpointed, and hands on a cache by the name that its class has for it.

    transformers before 5.23 checkpoints where the module is called, so that a replaced forward is checkpointed as well.
    """
    original = type(module).forward
    parameters = list(inspect.signature(original).parameters.values())[2:]
    named = {each.name: each.default for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD}
    options["defaults"] = {name: None if value is inspect.Parameter.empty else value for name, value in named.items()}
    options["cache"] = "cache" if "cache" in named else "past_key_values"
    ours = _checkpointed(forward) if _CHECKPOINTING in _decorators(original) else forward
    return Replacement(changes, ours, options=options)


@functools.cache
def _checkpointed(forward: Forward) -> Forward:
    """Return a layer's forward that leaves steps under gradient checkpointing to its class."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            return type(self).forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return run


def _named(self: Any, cache: Any) -> dict[str, Any]:
    return {getattr(self, MARK).options["cache"]: cache}


# --- whole blocks ----------------------------------------------------------------------------------------------------
def gpt2_block_forward(
    self: Any, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None, encoder_attention_mask: Tensor | None = None,
    use_cache: bool | None = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Run GPT2Block."""
    cache = kwargs.pop("cache", past_key_values)
    if encoder_hidden_states is not None:
        return type(self).forward(
            self, hidden_states, cache, attention_mask, encoder_hidden_states, encoder_attention_mask, use_cache,
            **kwargs,
        )  # fmt: skip
    if cache is None:
        y = _fused_block(self, _gpt2_parts, hidden_states, attention_mask, kwargs)
        if y is not None:
            return y
    attended, _ = self.attn(
        self.ln_1(hidden_states), attention_mask=attention_mask, use_cache=use_cache, **_named(self, cache), **kwargs
    )  # fmt: skip
    normed, residual = add_norm(attended, hidden_states, self.ln_2)
    return residual + self.mlp(normed)


def _gpt2_parts(self: Any) -> tuple[Any, ...] | None:
    attention, mlp = self.attn, self.mlp
    if not _is_usual(attention, "attention_gpt2") or (approximate := _approximation(mlp, "act")) is None:
        return None
    norms, layers = (self.ln_1, self.ln_2), (attention.c_attn, attention.c_proj, mlp.c_fc, mlp.c_proj)
    dropouts = (attention.attn_dropout, attention.resid_dropout, mlp.dropout)
    return _bare_parts(attention, attention.num_heads, approximate, norms, layers, dropouts)


def vit_layer_forward(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """Run ViTLayer."""
    y = None if is_small(hidden_states) else _fused_block(self, _vit_parts, hidden_states, attention_mask, kwargs)
    if y is not None:
        return y
    attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
    normed, residual = add_norm(self.dropout(attended), hidden_states, self.layernorm_after)
    return self.dropout(self.mlp(normed)) + residual


def _vit_parts(self: Any) -> tuple[Any, ...] | None:
    attention, mlp = self.attention, self.mlp
    if not _is_usual(attention, "attention_vit") or (approximate := _approximation(mlp, "activation_fn")) is None:
        return None
    norms = (self.layernorm_before, self.layernorm_after)
    layers = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.fc1, mlp.fc2)
    return _bare_parts(attention, attention.num_attention_heads, approximate, norms, layers, (self.dropout,))


def bert_layer_forward(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None, past_key_values: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Run BertLayer."""
    cache = kwargs.pop("cache", past_key_values)
    whole = not self.chunk_size_feed_forward and "feed_forward_chunk" not in self.__dict__
    if whole and encoder_hidden_states is None and cache is None and not is_small(hidden_states):
        y = _fused_block(self, _bert_parts, hidden_states, attention_mask, kwargs, post_norm=True)
        if y is not None:
            return y
    return type(self).forward(
        self, hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, cache, **kwargs
    )


def _bert_parts(self: Any) -> tuple[Any, ...] | None:
    outer, inner, last = self.attention, self.intermediate, self.output
    if not is_bare(outer, getattr(self, MARK).options["attention"]):
        return None
    attention, first, approximate = outer.self, outer.output, _approximation(inner, "intermediate_act_fn")
    if not _is_usual(attention, "attention_bert") or approximate is None:
        return None
    if not all(is_bare(output, type(output), bert_output_forward) for output in (first, last)):
        return None
    norms = (first.LayerNorm, last.LayerNorm)
    layers = (attention.query, attention.key, attention.value, first.dense, inner.dense, last.dense)
    dropouts = (attention.dropout, first.dropout, last.dropout)
    return _bare_parts(attention, attention.num_attention_heads, approximate, norms, layers, dropouts)


def _approximation(mlp: Any, activation: str) -> str | None:
    """Return the form of GELU between the layers of an MLP; None if the MLP or its activation has to be called."""
    if not is_bare(mlp, type(mlp), gelu_mlp_forward):
        return None
    options = getattr(mlp, MARK).options
    if options["names"][1] != activation:
        return None
    bare = is_bare(getattr(mlp, activation), options["activation"], gelu_forward)
    return str(options["approximate"]) if bare else None


def _is_usual(module: Any, *forms: str) -> bool:
    """Return whether an attention module need not be called, having one of these forms."""
    mark = getattr(module, MARK, None)
    if mark is None or not mark.attention or mark.options["form"] not in forms:
        return False
    forward = mark.options["forward"]
    usual = "forward" not in module.__dict__ if forward is None else runs_forward(module, forward)
    return usual and not has_hooks(module, ignore_captures=True)


def _pattern(module: Any, x: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> Pattern | None:
    """Return the pattern of the self-attention of x; None if the module has to be called."""
    S = x.shape[1]
    if S == 1 or module.config._attn_implementation != ATTENTION_NAME:
        return None
    if module.training and module.__dict__.get("attention_dropout"):
        return None
    if kwargs.get("output_attentions") or kwargs.get("is_causal") is not None or "position_bias" in kwargs:
        return None
    pattern = known_pattern(attention_mask, module.is_causal, (S, S))
    if pattern is None or pattern.ahead is not None:
        return None
    return pattern if pattern.padding is pattern.sequences is None or not is_torchs(pattern, x) else None


def _facts(module: nn.Module) -> tuple[Any, ...]:
    """Return what decides whether a module has to be called."""
    own = vars(module)
    hooks = (own["_forward_hooks"], own["_forward_pre_hooks"], own["_backward_hooks"], own["_backward_pre_hooks"])
    hooked = any(hooks) and [tuple(each.values()) for each in hooks]
    return type(module), own.get("forward"), tuple(own["_modules"].values()), hooked


def _parts(self: Any, find: Callable[[Any], tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
    """Return find(self), the parts of a block that runs as one function, or None; found again if modules changed."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or not torch.is_grad_enabled():
        return None
    options, hooked = getattr(self, MARK).options, any(GLOBAL_HOOKS)
    parts, seen = options.get("parts", (None, None))
    if hooked or seen is None or seen != [(module, _facts(module)) for module, _ in seen]:
        parts = find(self)
        options["parts"] = parts, None if hooked else [(module, _facts(module)) for module in self.modules()]
    return parts  # type: ignore[no-any-return]


def _bare_parts(
    attention: Any, heads: int, approximate: str, norms: tuple[Any, Any], layers: tuple[Any, ...],
    dropouts: tuple[Any, ...],
) -> tuple[Any, ...] | None:  # fmt: skip
    """Return the arguments, the parts of a block with a GELU in the order of use; None if one has to be called."""
    bare = (
        all(is_bare(norm, nn.LayerNorm, layer_norm_forward) for norm in norms)
        and all(is_bare(layer, nn.Linear if len(layers) == 6 else Conv1D) for layer in layers)
        and all(is_bare(drop, nn.Dropout) for drop in dropouts)
    )
    return (attention, heads, approximate, norms, layers, dropouts) if bare else None


def _fused_block(
    self: Any, find: Callable[[Any], tuple[Any, ...] | None], x: Tensor, attention_mask: Tensor | None,
    kwargs: dict[str, Any], *, post_norm: bool = False,
) -> Tensor | None:  # fmt: skip
    """Run a block of GPT-2, BERT or ViT as one autograd function; None if a submodule has to be called."""
    if (parts := _parts(self, find)) is None:
        return None
    attention, heads, approximate, norms, layers, dropouts = parts
    if any(drop.p and (drop.training or attention.training) for drop in dropouts) or not x.is_contiguous():
        return None
    pattern = _pattern(attention, x, attention_mask, kwargs)
    if pattern is None or x.shape[-1] % heads:  # Hugging Face rounds down: the attention is narrower than x
        return None
    weights: list[Any] = []
    for module in (*norms, *layers):
        weights += (module.weight, module.bias)
    dtype = _computes_in(x, weights)
    if dtype is None or (post_norm and autocast_dtype(x.device.type) is x.dtype):  # whose norms give float32
        return None
    n1, c1, n2, c2, *linears = weights
    if len(layers) == 4:  # Conv1D's, stored as (in, out)
        linears[::2] = [weight.t() for weight in linears[::2]]
    else:
        # One product: concatenating costs a copy of a few MiB and saves four products of the backward pass.
        biases = linears[1:6:2]
        if any((bias is None) != (biases[0] is None) for bias in biases):
            return None
        linears[:6] = torch.cat(linears[:6:2]), None if biases[0] is None else torch.cat(biases)
    window = -1 if pattern.window is None else pattern.window
    eps = (norms[0].eps, norms[1].eps)
    mask = pattern.segments(x)
    spec = BlockSpec(heads, eps, pattern.causal, window, attention.scaling, approximate, post_norm, True, mask)
    casts = _casts(linears, x.dtype, dtype)
    y, _ = fused_block(x, None, spec, None, None, n1, c1, *linears[:4], n2, c2, *linears[4:], *casts)
    return y


def clip_layer_forward(self: Any, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
    """Run the encoder layer of CLIP and SigLIP."""
    attended, _ = self.self_attn(hidden_states=self.layer_norm1(hidden_states), attention_mask=attention_mask, **kwargs)
    normed, residual = add_norm(attended, hidden_states, self.layer_norm2)
    y: Tensor = residual + self.mlp(normed)
    return y


def decoder_layer_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run the decoder layer of Llama, Qwen, Mistral, Mixtral, Gemma and others, which order the other arguments."""
    options = getattr(self, MARK).options
    arguments = options["defaults"] | dict(zip(options["defaults"], args, strict=False)) | kwargs
    caches = [arguments.pop(name, None) for name in ("cache", "past_key_values")]
    cache = caches[1] if caches[0] is None else caches[0]
    norm, after = options["norm"], options["after"]

    def by_modules(x: Tensor) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(x), **arguments, **_named(self, cache))
        if after:
            attended = getattr(self, after[0])(attended)
        normed, residual = add_norm(attended, x, getattr(self, norm))
        y = self.mlp(normed)
        if after:
            y = getattr(self, after[1])(y)
        total: Tensor = residual + y
        return total

    if cache is None and arguments["position_embeddings"] is not None and not after:
        y = _fused_decoder_layer(self, hidden_states, arguments, by_modules)
        if y is not None:
            return y
    return by_modules(hidden_states)


def _decoder_parts(self: Any) -> tuple[Any, ...] | None:
    attention, mlp, norms = self.self_attn, self.mlp, (self.input_layernorm, self.post_attention_layernorm)
    if not _is_usual(attention, "attention_llama", "attention_qk_norm") or not is_bare(
        mlp, type(mlp), gated_mlp_forward
    ):
        return None
    options = getattr(attention, MARK).options
    head_norms = (attention.q_norm, attention.k_norm) if options["form"] == "attention_qk_norm" else ()
    layers = (
        attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        mlp.gate_proj, mlp.up_proj, mlp.down_proj,
    )  # fmt: skip
    bare = (
        options["forward"] is not None  # otherwise its rope is not ours
        and is_bare(mlp.act_fn, getattr(mlp, MARK).options["activation"], silu_forward)
        and all(is_bare(layer, nn.Linear) for layer in layers)
        and all(is_bare(norm, type(norm), rms_norm_forward) for norm in (*norms, *head_norms))
    )
    return (attention, norms, head_norms, layers) if bare else None


def _fused_decoder_layer(
    self: Any, x: Tensor, arguments: dict[str, Any], by_modules: Callable[[Tensor], Tensor]
) -> Tensor | None:
    if (parts := _parts(self, _decoder_parts)) is None:
        return None
    attention, norms, head_norms, layers = parts
    pattern = _pattern(attention, x, arguments["attention_mask"], arguments)
    if pattern is None:
        return None
    cos, sin = arguments["position_embeddings"]
    D = attention.head_dim
    if cos.dim() != 3 or cos.shape[-1] != D or not _is_table_of(x, cos) or cos.requires_grad:
        return None
    eps = norms[0].variance_epsilon
    if any(norm.variance_epsilon != eps for norm in head_norms):
        return None
    linears = [each for layer in layers for each in (layer.weight, layer.bias)]
    head_weights = tuple(norm.weight for norm in head_norms) or (None, None)
    weights = (norms[0].weight, norms[1].weight, *linears[:6], *head_weights, *linears[6:])
    dtype = _computes_in(x, weights)
    if dtype is None:
        return None
    window = -1 if pattern.window is None else pattern.window
    heads = (linears[0].shape[0] // D, linears[2].shape[0] // D)

    def recomputed(x: Tensor) -> Tensor:
        with ahead_of_capture():  # by our ops, whose gradients have derivatives
            return by_modules(x)

    both_eps = (eps, norms[1].variance_epsilon)
    mask = pattern.segments(x)
    spec = DecoderSpec(both_eps, heads, pattern.causal, window, attention.scaling, recomputed, mask)
    return fused_decoder_layer(spec, x, *_half_tables(cos, sin), *weights, *_casts(linears, x.dtype, dtype))


def _computes_in(x: Tensor, weights: Any) -> torch.dtype | None:
    """Return the dtype of the products of a block's function of x (B, S, N) and weights; None if it does not take them.

    It takes plain tensors of one dtype, some with gradients; under autocast of float32 or of the low dtype.
    """
    if not is_plain(x) or x.dim() != 3:
        return None
    dtype, low, requires_grad = x.dtype, autocast_dtype(x.device.type), x.requires_grad
    if low is not None and dtype not in (low, torch.float32):
        return None
    for weight in weights:
        if weight is not None:
            if weight.dtype is not dtype or not (type(weight) is nn.Parameter or is_ordinary(weight)):
                return None
            requires_grad = requires_grad or weight.requires_grad
    return (low or dtype) if requires_grad else None


def _casts(tensors: Sequence[Tensor | None], dtype: torch.dtype, low: torch.dtype) -> list[Tensor | None]:
    """Return tensors of a dtype in a lower one, without gradients, in one launch; none if it is the same."""
    if low is dtype:
        return []
    with torch.no_grad():
        casts = [None if x is None else torch.empty_like(x, dtype=low) for x in tensors]
        torch._foreach_copy_([x for x in casts if x is not None], [x for x in tensors if x is not None])
    return casts
