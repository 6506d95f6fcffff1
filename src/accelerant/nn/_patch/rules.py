"""Which module gets which forward: one rule a class of transformers, and what must hold for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers import activations, modeling_outputs
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.pytorch_utils import Conv1D

from accelerant.nn._patch import blocks, layers, loss
from accelerant.nn._patch.known import unknown
from accelerant.nn._patch.swaps import Forward

__all__ = ["FAMILIES", "RULES", "Options", "Plan", "Rule", "leaf_reason"]

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "mistral", "bert", "vit")
"""The model types that patch knows."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for; see patch."""

    loss: bool = True
    padding: str = "exact"
    embedding: bool = True


@dataclass(slots=True)
class Plan:
    """What is to be done to a module.

    Attributes:
        changes: (kind, what is called now), one each.
        forward: the new one; None where the old one stays.
        attention: whether attention goes through the interface.
        options: for the module's mark.
        notes: for the report.
    """

    changes: list[tuple[str, str]]
    forward: Forward | None = None
    attention: bool = False
    options: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """Attributes.

    plan: (module, config of its model, options) -> the Plan, or the reason why there is none.
    needs: functions that must be known beside the class's own forward, as `unknown` names them.
    """

    plan: Callable[[Any, Any, Options], Plan | str]
    needs: tuple[str, ...] = ()


# --- norms, activations, embeddings ----------------------------------------------------------------------------------


def _eps_of(module: Any, config: Any, attributes: tuple[str, ...], found: float) -> str | None:
    said = next((getattr(config, name) for name in attributes if hasattr(config, name)), None)
    return None if found == said else f"its eps is {found}, where the config says {said}"


def _layer_norm(module: Any, config: Any, options: Options) -> Plan | str:
    if len(module.normalized_shape) != 1 or module.weight is None:
        return f"normalises over {tuple(module.normalized_shape)}" + (
            " without weights" if module.weight is None else ""
        )
    refused = _eps_of(module, config, ("layer_norm_epsilon", "layer_norm_eps"), module.eps)
    return refused or Plan([("norm", "ops.layer_norm")], layers.layer_norm_forward)


def _rms_norm(module: Any, config: Any, options: Options) -> Plan | str:
    refused = _eps_of(module, config, ("rms_norm_eps",), module.variance_epsilon)
    return refused or Plan([("norm", "ops.rms_norm")], layers.rms_norm_forward)


_GELUS = {
    activations.GELUActivation: "none",
    activations.GELUTanh: "tanh",
    activations.NewGELUActivation: "tanh",
    activations.FastGELUActivation: "tanh",
    activations.AccurateGELUActivation: "tanh",
}
"""Activation -> the `approximate` of ours that it is (the tanh ones write one formula in several ways)."""


def _gelu(module: Any, config: Any, options: Options) -> Plan | str:
    approximate = _GELUS[type(module)]
    if type(module) is activations.GELUActivation and module.act not in (F.gelu, module._gelu_python):
        return f"calls {module.act!r}"
    plan = Plan([("activation", f"ops.gelu({approximate!r})")], layers.gelu_forward)
    plan.options = {"approximate": approximate}
    return plan


def _silu(module: Any, config: Any, options: Options) -> Plan | str:
    if getattr(module, "inplace", False):
        return "writes over its input"
    return Plan([("activation", "ops.silu")], layers.silu_forward)


def _embedding(module: Any, config: Any, options: Options) -> Plan | str:
    if not options.embedding:
        return "patch(model, embedding=False)"
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, name):
            return f"has {name}={getattr(module, name)}"
    return Plan([("embedding", "ops.embedding")], layers.embedding_forward)


def _activation(module: nn.Module, name: Any, wanted: tuple[type, ...]) -> str | None:
    """Why an activation cannot be ours: it must be what the config names, and one of `wanted`."""
    if not isinstance(name, str) or name not in activations.ACT2CLS:
        return f"its activation is {name!r}, which transformers has no name for"
    entry = activations.ACT2CLS[name]
    expected = entry[0] if isinstance(entry, tuple) else entry
    if type(module) is not expected:
        return f"its activation is a {type(module).__name__}, where the config says {name!r}"
    if type(module) not in wanted:
        return f"ours has no activation {name!r}"
    return unknown(f"{type(module).__module__}:{type(module).__qualname__}.forward")


# --- MLPs and blocks -------------------------------------------------------------------------------------------------


def _gelu_mlp(forward: Forward, linear: str, act: str, setting: str, kind: type[nn.Module]) -> Rule:
    def plan(module: Any, config: Any, options: Options) -> Plan | str:
        activation, layer = getattr(module, act), getattr(module, linear)
        refused = _activation(activation, getattr(config, setting, None), tuple(_GELUS))
        if refused:
            return refused
        if type(layer) is not kind:
            return f"its {linear} is a {type(layer).__name__}, not a {kind.__name__}"
        approximate = _GELUS[type(activation)]
        made = Plan([("mlp", f"ops.linear_gelu({approximate!r})")], forward)
        made.options = {"approximate": approximate, "activation": type(activation)}
        return made

    needs = () if kind is nn.Linear else ("transformers.pytorch_utils:Conv1D.forward",)
    return Rule(plan, needs)


def _gated_mlp(module: Any, config: Any, options: Options) -> Plan | str:
    refused = _activation(module.act_fn, config.hidden_act, (activations.SiLUActivation, nn.SiLU))
    return refused or Plan(
        [("mlp", "ops.swiglu")], blocks.gated_mlp_forward, options={"activation": type(module.act_fn)}
    )


_WHOLE = "; in plain training the block is one autograd function"


def _residual(forward: Forward, op: str, norm: str) -> Rule:
    def plan(module: Any, config: Any, options: Options) -> Plan | str:
        found = getattr(module, norm)
        known = type(found) is nn.LayerNorm or type(found).__name__.endswith("RMSNorm")
        return Plan([("residual", op)], forward) if known else f"its {norm} is a {type(found).__name__}"

    return Rule(plan)


def _bert_layer(module: Any, config: Any, options: Options) -> Plan | str:
    kind = type(module.attention)
    if f"{kind.__module__}:{kind.__qualname__}" != _BERT + "BertAttention":
        return f"its attention is a {kind.__name__}"
    made = Plan([("block", "in plain training one autograd function")], blocks.bert_layer_forward)
    made.options = {"attention": kind}
    return made


# --- attention -------------------------------------------------------------------------------------------------------


def _interface(config: Any) -> str | None:
    """Why attention stays what it is."""
    name = config._attn_implementation
    if name in ("sdpa", "accelerant"):
        return None
    why = "the only one that returns its weights" if name == "eager" else "asked for by name"
    return f"attn_implementation is {name!r}, {why}"


def _attention(module: Any, config: Any, options: Options) -> Plan | str:
    if getattr(module, "is_cross_attention", False):
        return "is cross attention"
    return _interface(config) or Plan([("attention", "ops.attention")], attention=True)


def _rotary(family: str, prefix: str, *, qk_norm: bool = False, window: str | None = None) -> Rule:
    path = f"transformers.models.{family}.modeling_{family}"

    def plan(module: Any, config: Any, options: Options) -> Plan | str:
        made = Plan([("rope", "ops.rope")], blocks.rotary_attention_forward)
        refused = _interface(config)
        if refused:
            made.notes = (f"attention stays as it is: {refused}",)
        else:
            made.changes.append(("attention", "ops.attention"))
            made.attention = True
        from importlib import import_module

        eager = import_module(path).eager_attention_forward
        made.options = {"eager": eager, "qk_norm": qk_norm, "window": window}
        return made

    names = ("apply_rotary_pos_emb", "rotate_half", f"{prefix}RotaryEmbedding.forward")
    return Rule(plan, tuple(f"{path}:{name}" for name in names))


# --- losses ----------------------------------------------------------------------------------------------------------

_LAZY = (
    "with labels in training mode, logits never exist whole: output.logits makes them when it is read, and is None "
    "under torch.compile; patch(model, loss=False) makes them always"
)
_CACHE = "with labels in training mode, past_key_values are made only where use_cache=True is passed"
_LOSSES = ("ForCausalLMLoss", "fixed_cross_entropy")


def _causal_lm(base: str, positional: int, output: type, named: tuple[str, ...]) -> Rule:
    def plan(module: Any, config: Any, options: Options) -> Plan | str:
        function = module.__dict__.get("_loss_function") or LOSS_MAPPING.get(module.loss_type, ForCausalLMLoss)
        if function is not ForCausalLMLoss:
            return f"its loss is {getattr(function, '__name__', function)}"
        fused = options.loss and type(module.lm_head) is nn.Linear and module.lm_head.bias is None
        made = Plan([("loss", f"ops.{'linear_' if fused else ''}cross_entropy")])
        kind: Any = type(module)
        made.forward = loss.signed(loss.causal_lm_forward, kind)
        made.options = {
            "base": base, "positional": positional, "output": output, "named": frozenset(named), "fused": fused,
        }  # fmt: skip
        if fused:
            made.notes = (_LAZY, _CACHE)
        elif options.loss:
            made.notes = ("logits exist whole: lm_head is not a Linear without bias", _CACHE)
        else:
            made.notes = (_CACHE,)
        return made

    return Rule(plan, tuple(f"transformers.loss.loss_utils:{name}" for name in _LOSSES))


def _masked_lm(module: Any, config: Any, options: Options) -> Plan | str:
    kind: Any = type(module)
    kinds = type(module.cls), type(module.cls.predictions)
    fused = options.loss and all(
        f"{found.__module__}:{found.__qualname__}" == _BERT + name
        for found, name in zip(kinds, ("BertOnlyMLMHead", "BertLMPredictionHead"), strict=True)
    )
    made = Plan([("loss", f"ops.{'linear_' if fused else ''}cross_entropy")])
    made.forward = loss.signed(loss.masked_lm_forward, kind)
    made.options = {"positional": 7, "output": modeling_outputs.MaskedLMOutput, "fused": fused, "head": kinds}
    made.notes = (_LAZY,) if fused else ()
    return made


# --- all of them -----------------------------------------------------------------------------------------------------

_INPUTS = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache")
_GPT2_INPUTS = (*_INPUTS, "token_type_ids", "encoder_hidden_states", "encoder_attention_mask")
_GPT2, _BERT, _VIT = (f"transformers.models.{name}.modeling_{name}:" for name in ("gpt2", "bert", "vit"))
_ACTIVATIONS = "transformers.activations:"

RULES: dict[str, Rule] = {
    "torch.nn.modules.normalization:LayerNorm": Rule(_layer_norm),
    "torch.nn.modules.sparse:Embedding": Rule(_embedding),
    "torch.nn.modules.activation:SiLU": Rule(_silu),
    _ACTIVATIONS + "SiLUActivation": Rule(_silu),
    **{f"{_ACTIVATIONS}{kind.__name__}": Rule(_gelu) for kind in _GELUS},
    _GPT2 + "GPT2Attention": Rule(_attention),
    _GPT2 + "GPT2MLP": _gelu_mlp(blocks.gpt2_mlp_forward, "c_fc", "act", "activation_function", Conv1D),
    _GPT2 + "GPT2Block": _residual(blocks.gpt2_block_forward, "ops.add_layer_norm" + _WHOLE, "ln_2"),
    _GPT2 + "GPT2LMHeadModel": _causal_lm(
        "transformer", 8, modeling_outputs.CausalLMOutputWithCrossAttentions, (*_GPT2_INPUTS, "logits_to_keep")
    ),
    _BERT + "BertSelfAttention": Rule(_attention),
    _BERT + "BertIntermediate": _gelu_mlp(
        layers.intermediate_forward, "dense", "intermediate_act_fn", "hidden_act", nn.Linear
    ),
    _BERT + "BertLayer": Rule(
        _bert_layer, tuple(_BERT + name for name in ("BertLayer.feed_forward_chunk", "BertAttention.forward"))
    ),
    _BERT + "BertSelfOutput": _residual(blocks.bert_output_forward, "ops.add_layer_norm", "LayerNorm"),
    _BERT + "BertOutput": _residual(blocks.bert_output_forward, "ops.add_layer_norm", "LayerNorm"),
    _BERT + "BertForMaskedLM": Rule(
        _masked_lm, tuple(f"{_BERT}{name}.forward" for name in ("BertOnlyMLMHead", "BertLMPredictionHead"))
    ),
    _VIT + "ViTAttention": Rule(_attention),
    _VIT + "ViTMLP": _gelu_mlp(blocks.vit_mlp_forward, "fc1", "activation_fn", "hidden_act", nn.Linear),
    _VIT + "ViTLayer": _residual(blocks.vit_layer_forward, "ops.add_layer_norm" + _WHOLE, "layernorm_after"),
}

for _family, _prefix, _qk_norm, _window in (
    ("llama", "Llama", False, None),
    ("qwen2", "Qwen2", False, "layer"),
    ("qwen3", "Qwen3", True, "layer"),
    ("mistral", "Mistral", False, "config"),
):
    _path = f"transformers.models.{_family}.modeling_{_family}:{_prefix}"
    RULES |= {
        _path + "RMSNorm": Rule(_rms_norm),
        _path + "Attention": _rotary(_family, _prefix, qk_norm=_qk_norm, window=_window),
        _path + "MLP": Rule(_gated_mlp),
        _path + "DecoderLayer": _residual(
            blocks.decoder_layer_forward, "ops.add_rms_norm" + _WHOLE, "post_attention_layernorm"
        ),
        _path + "ForCausalLM": _causal_lm(
            "model", 5, modeling_outputs.CausalLMOutputWithPast, (*_INPUTS, "logits_to_keep")
        ),
    }  # fmt: skip

_LEAVES = {
    "Linear": "its product is the vendor's library's, as in ours",
    "Conv1D": "its product is the vendor's library's, as in ours",
    "Conv2d": "the convolution is cuDNN's, as in ours",
    "Dropout": "ours draws other random numbers",
    "Identity": "does nothing",
}


def leaf_reason(module: nn.Module) -> str:
    """Why a module without a rule stays."""
    name = type(module).__name__
    if name.endswith("RotaryEmbedding"):
        return "makes its tables once a forward pass; ours turns by them"
    return _LEAVES.get(name, "there is no replacement for it")
