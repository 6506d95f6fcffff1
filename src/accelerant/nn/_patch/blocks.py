"""The forward methods of whole blocks: what stands between two norms and two matrix products becomes one op.

They take and give what transformers' own do, call every part that they do not replace, and go back to their class's
own forward for what they do not know (cross attention, rotary tables of another shape).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from accelerant import ops
from accelerant.nn._patch.attention import Pattern, pattern_of
from accelerant.nn._patch.encoder import PostNormLayer, PreNormLayer
from accelerant.nn._patch.fused import DecoderLayer, GPT2Block
from accelerant.nn._patch.layers import (
    activated_linear,
    add_norm,
    gelu_forward,
    intermediate_forward,
    layer_norm_forward,
    rms_norm_forward,
    silu_forward,
)
from accelerant.nn._patch.parts import Spec, is_serviceable
from accelerant.nn._patch.swaps import MARK, NAME, has_hooks, is_bare, swapped

__all__ = [
    "bert_layer_forward",
    "bert_output_forward",
    "decoder_layer_forward",
    "gated_mlp_forward",
    "gpt2_block_forward",
    "gpt2_mlp_forward",
    "rotary_attention_forward",
    "vit_layer_forward",
    "vit_mlp_forward",
]

_HALVES = "_accelerant_halves"


# --- GPT-2 -----------------------------------------------------------------------------------------------------------


def gpt2_mlp_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """GPT2MLP's."""
    y = activated_linear(self.c_fc, self.act, hidden_states, getattr(self, MARK).options)
    if y is None:
        y = self.act(self.c_fc(hidden_states))
    dropped: Tensor = self.dropout(self.c_proj(y))
    return dropped


def gpt2_block_forward(
    self: Any,
    hidden_states: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    use_cache: bool | None = False,
    **kwargs: Any,
) -> Any:
    """GPT2Block's."""
    if encoder_hidden_states is not None:
        return type(self).forward(
            self, hidden_states, past_key_values, attention_mask, encoder_hidden_states, encoder_attention_mask,
            use_cache, **kwargs,
        )  # fmt: skip
    again = functools.partial(_gpt2_block, self, past_key_values, attention_mask, use_cache, kwargs)
    if past_key_values is None:
        fused = _fused_gpt2_block(self, hidden_states, attention_mask, kwargs, again)
        if fused is not None:
            return fused
    return again(hidden_states)


def _gpt2_block(
    self: Any, past_key_values: Any, attention_mask: Tensor | None, use_cache: Any, kwargs: Any, hidden_states: Tensor
) -> Any:
    """The block by its modules."""
    attended, _ = self.attn(
        self.ln_1(hidden_states),
        past_key_values=past_key_values,
        attention_mask=attention_mask,
        use_cache=use_cache,
        **kwargs,
    )
    normed, residual = add_norm(attended, hidden_states, self.ln_2)
    return residual + self.mlp(normed)


def _fused_gpt2_block(
    self: Any, x: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any], again: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The block by one function, where that serves."""
    attention, mlp, norms = self.attn, self.mlp, (self.ln_1, self.ln_2)
    pattern = _plain_attention(attention, x, attention_mask, kwargs)
    if pattern is None or not is_bare(mlp, type(mlp), gpt2_mlp_forward):
        return None
    options = getattr(mlp, MARK).options
    layers = (attention.c_attn, attention.c_proj, mlp.c_fc, mlp.c_proj)
    if not (
        all(is_bare(norm, nn.LayerNorm, layer_norm_forward) for norm in norms)
        and all(is_bare(layer, Conv1D) for layer in layers)
        and is_bare(mlp.act, options["activation"], gelu_forward)
        and "forward" not in attention.__dict__
    ):
        return None
    dropouts = (attention.attn_dropout, attention.resid_dropout, mlp.dropout)
    if not all(
        is_bare(each, nn.Dropout) and not (each.p and (each.training or attention.training)) for each in dropouts
    ):
        return None
    weights = tuple(tensor for module in (*norms, *layers) for tensor in (module.weight, module.bias))
    if not is_serviceable(x, weights):
        return None
    heads = (attention.num_heads, attention.num_heads)
    window = -1 if pattern.window is None else pattern.window
    spec = Spec(
        (norms[0].eps, norms[1].eps), heads, pattern.causal, window, attention.scaling, options["approximate"], again
    )
    apply: Callable[..., Tensor] = GPT2Block.apply
    y = apply(spec, x, *weights)
    return y


def _plain_attention(module: Any, x: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> Pattern | None:
    """What attention of x to itself is to see; None where a module of attention has to be called for it."""
    mark = getattr(module, MARK, None)
    if mark is None or not mark.attention or module.config._attn_implementation != NAME or x.shape[1] == 1:
        return None
    if has_hooks(module, beside_captures=True):
        return None
    if kwargs.get("output_attentions") or kwargs.get("is_causal") is not None or "position_bias" in kwargs:
        return None
    pattern = pattern_of(attention_mask, module.is_causal)
    return pattern if pattern is not None and pattern.padding is None else None


# --- Llama, Qwen2, Qwen3, Mistral ------------------------------------------------------------------------------------


def gated_mlp_forward(self: Any, x: Tensor) -> Any:
    """LlamaMLP's and its kin's."""
    if not is_bare(self.act_fn, getattr(self, MARK).options["activation"], silu_forward):
        return type(self).forward(self, x)
    return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


def decoder_layer_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    """LlamaDecoderLayer's and its kin's."""
    arguments = {
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "past_key_values": past_key_values,
        "use_cache": use_cache,
        "position_embeddings": position_embeddings,
        **kwargs,
    }
    again = functools.partial(_decoder_layer, self, arguments)
    if past_key_values is None and position_embeddings is not None:
        fused = _fused_decoder_layer(self, hidden_states, attention_mask, position_embeddings, kwargs, again)
        if fused is not None:
            return fused
    return again(hidden_states)


def _decoder_layer(self: Any, arguments: dict[str, Any], hidden_states: Tensor) -> Tensor:
    """The layer by its modules."""
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **arguments)
    normed, residual = add_norm(attended, hidden_states, self.post_attention_layernorm)
    y: Tensor = residual + self.mlp(normed)
    return y


def _fused_decoder_layer(
    self: Any,
    x: Tensor,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    kwargs: dict[str, Any],
    again: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """The layer by one function, where that serves."""
    attention, mlp, norms = self.self_attn, self.mlp, (self.input_layernorm, self.post_attention_layernorm)
    pattern = _plain_attention(attention, x, attention_mask, kwargs)
    if pattern is None or not swapped(attention, rotary_attention_forward):
        return None
    if not is_bare(mlp, type(mlp), gated_mlp_forward):
        return None
    options = getattr(attention, MARK).options
    heads = (attention.q_norm, attention.k_norm) if options["qk_norm"] else ()
    layers = (
        attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        mlp.gate_proj, mlp.up_proj, mlp.down_proj,
    )  # fmt: skip
    if not (
        is_bare(mlp.act_fn, getattr(mlp, MARK).options["activation"], silu_forward)
        and all(is_bare(layer, nn.Linear) for layer in layers)
        and all(is_bare(norm, type(norm), rms_norm_forward) for norm in (*norms, *heads))
        and not (attention.training and attention.attention_dropout)
    ):
        return None
    cos, sin = position_embeddings
    D = attention.head_dim
    if cos.dim() != 3 or cos.shape[-1] != D or cos.dtype not in (x.dtype, torch.float32) or cos.requires_grad:
        return None
    eps = norms[0].variance_epsilon
    if any(norm.variance_epsilon != eps for norm in heads):
        return None
    q, k, v, o, gate, up, down = ((layer.weight, layer.bias) for layer in layers)
    of_heads = tuple(norm.weight for norm in heads) or (None, None)
    weights = (norms[0].weight, norms[1].weight, *q, *k, *v, *of_heads, *o, *gate, *up, *down)
    if not is_serviceable(x, weights):
        return None
    spec = Spec(
        (eps, norms[1].variance_epsilon), (q[0].shape[0] // D, k[0].shape[0] // D), pattern.causal,
        -1 if pattern.window is None else pattern.window, attention.scaling, "", again,
    )  # fmt: skip
    apply: Callable[..., Tensor] = DecoderLayer.apply
    y = apply(spec, x, *_halves(cos, sin), *weights)
    return y


def rotary_attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """LlamaAttention's and its kin's, with our rope; attention itself is what the config names, as before."""
    options = getattr(self, MARK).options
    assert position_embeddings is not None  # the model makes them for every layer
    cos, sin = position_embeddings
    q = self.q_proj(hidden_states)
    if cos.dim() != 3 or cos.shape[-1] != self.head_dim or cos.dtype not in (q.dtype, torch.float32):
        return type(self).forward(
            self, hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask,
            past_key_values=past_key_values, **kwargs,
        )  # fmt: skip
    tables = _halves(cos, sin)
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k = q.view(shape), self.k_proj(hidden_states).view(shape)
    if options["qk_norm"]:
        q, k = self.q_norm(q), self.k_norm(k)
    q, k = ops.rope(q.transpose(1, 2), *tables), ops.rope(k.transpose(1, 2), *tables)
    v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, options["eager"])
    window = options["window"]
    if window is not None:
        kwargs["sliding_window"] = getattr(self.config, "sliding_window", None) if window == "config" else (
            self.sliding_window
        )  # fmt: skip
    dropout = self.attention_dropout if self.training else 0.0
    o, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
    return self.o_proj(o.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


def _halves(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The tables as our rope takes them, from (B or 1, S, D) whose two halves are equal; made once a forward pass."""
    kept: tuple[Tensor, Tensor] | None = None
    tracing = torch.compiler.is_compiling()
    if not tracing:
        kept = getattr(cos, _HALVES, None)
    if kept is None:
        half = cos.shape[-1] // 2
        tables = [table[0, :, :half] if table.shape[0] == 1 else table[..., :half] for table in (cos, sin)]
        kept = tables[0].contiguous(), tables[1].contiguous()
        if not tracing:
            setattr(cos, _HALVES, kept)
    return kept


# --- BERT, ViT -------------------------------------------------------------------------------------------------------


def bert_output_forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """BertSelfOutput's and BertOutput's."""
    return add_norm(self.dropout(self.dense(hidden_states)), input_tensor, self.LayerNorm)[0]


def vit_mlp_forward(self: Any, hidden_states: Tensor) -> Any:
    """ViTMLP's."""
    y = activated_linear(self.fc1, self.activation_fn, hidden_states, getattr(self, MARK).options)
    return self.fc2(self.activation_fn(self.fc1(hidden_states)) if y is None else y)


def vit_layer_forward(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """ViTLayer's."""
    again = functools.partial(_vit_layer, self, attention_mask, kwargs)
    fused = _fused_vit_layer(self, hidden_states, attention_mask, kwargs, again)
    return again(hidden_states) if fused is None else fused


def _vit_layer(self: Any, attention_mask: Tensor | None, kwargs: dict[str, Any], hidden_states: Tensor) -> Tensor:
    """The layer by its modules."""
    attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
    normed, residual = add_norm(self.dropout(attended), hidden_states, self.layernorm_after)
    y: Tensor = self.dropout(self.mlp(normed)) + residual
    return y


def _fused_vit_layer(
    self: Any, x: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any], again: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The layer by one function, where that serves."""
    attention, mlp = self.attention, self.mlp
    pattern = _plain_attention(attention, x, attention_mask, kwargs)
    if pattern is None or "forward" in attention.__dict__ or not is_bare(mlp, type(mlp), vit_mlp_forward):
        return None
    options = getattr(mlp, MARK).options
    if not is_bare(mlp.activation_fn, options["activation"], gelu_forward):
        return None
    if attention.training and attention.attention_dropout:
        return None
    layers = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.fc1, mlp.fc2)
    return _fused_encoder_layer(
        PreNormLayer, x, (self.layernorm_before, self.layernorm_after), layers, (self.dropout,), attention.training,
        pattern, attention.num_attention_heads, attention.scaling, options["approximate"], again,
    )  # fmt: skip


def bert_layer_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """BertLayer's."""
    again = functools.partial(
        type(self).forward, self, attention_mask=attention_mask, encoder_hidden_states=encoder_hidden_states,
        encoder_attention_mask=encoder_attention_mask, past_key_values=past_key_values, **kwargs,
    )  # fmt: skip
    fused = None
    if encoder_hidden_states is None and past_key_values is None and not self.chunk_size_feed_forward:
        fused = _fused_bert_layer(self, hidden_states, attention_mask, kwargs, again)
    return again(hidden_states) if fused is None else fused


def _fused_bert_layer(
    self: Any, x: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any], again: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The layer by one function, where that serves."""
    outer, inner, last = self.attention, self.intermediate, self.output
    if not is_bare(outer, getattr(self, MARK).options["attention"]):
        return None
    attention, first = outer.self, outer.output
    pattern = _plain_attention(attention, x, attention_mask, kwargs)
    if pattern is None or "forward" in attention.__dict__ or "feed_forward_chunk" in self.__dict__:
        return None
    if not is_bare(inner, type(inner), intermediate_forward):
        return None
    if not all(is_bare(each, type(each), bert_output_forward) for each in (first, last)):
        return None
    options = getattr(inner, MARK).options
    if not is_bare(inner.intermediate_act_fn, options["activation"], gelu_forward):
        return None
    layers = (attention.query, attention.key, attention.value, first.dense, inner.dense, last.dense)
    return _fused_encoder_layer(
        PostNormLayer, x, (first.LayerNorm, last.LayerNorm), layers,
        (attention.dropout, first.dropout, last.dropout), attention.training, pattern, attention.num_attention_heads,
        attention.scaling, options["approximate"], again,
    )  # fmt: skip


def _fused_encoder_layer(
    function: type[PreNormLayer | PostNormLayer],
    x: Tensor,
    norms: tuple[Any, Any],
    layers: tuple[Any, ...],
    dropouts: tuple[Any, ...],
    training: bool,
    pattern: Pattern,
    heads: int,
    scale: float,
    approximate: str,
    again: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """ViT's or BERT's layer by one function, where these parts of it are what they say."""
    if not (
        all(is_bare(norm, nn.LayerNorm, layer_norm_forward) for norm in norms)
        and all(is_bare(layer, nn.Linear) for layer in layers)
        and all(is_bare(each, nn.Dropout) and not (each.p and (each.training or training)) for each in dropouts)
        and len({layer.bias is None for layer in layers[:3]}) == 1
        and x.is_contiguous()
    ):
        return None
    weights = tuple(tensor for module in (*norms, *layers) for tensor in (module.weight, module.bias))
    if not is_serviceable(x, weights):
        return None
    window = -1 if pattern.window is None else pattern.window
    spec = Spec((norms[0].eps, norms[1].eps), (heads, heads), pattern.causal, window, scale, approximate, again)
    apply: Callable[..., Tensor] = function.apply
    y = apply(spec, x, *weights)
    return y
