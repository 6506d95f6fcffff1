"""The replacement of each class of transformers, and the conditions for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers import activations, modeling_outputs
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.pytorch_utils import Conv1D

from accelerant.nn._patch import blocks, loss
from accelerant.nn._patch.attention import register as register_attention
from accelerant.nn._patch.fingerprints import unknown
from accelerant.nn._patch.record import MARK, Forward

__all__ = ["FAMILIES", "RULES", "ModulePlan", "Options", "Rule", "plan_module", "register_attention"]

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "mistral", "bert", "vit")
"""The supported model types."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of patch that decide which modules change."""

    loss: bool
    embedding: bool


@dataclass(slots=True)
class ModulePlan:
    """The changes to a module.

    Attributes:
        changes: (kind, op called from now on) for each change.
        forward: the new forward; None to keep the old one.
        attention: whether attention goes through the interface.
        options: settings for the module's mark.
        notes: for the report.
    """

    changes: list[tuple[str, str]]
    forward: Forward | None = None
    attention: bool = False
    options: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """The conditions and replacements for one class.

    Attributes:
        plan: (module, config of its model, options) -> the plan, or the reason why there is none.
        requires: functions that must be known besides the class's forward, as `unknown` names them.
    """

    plan: Callable[[Any, Any, Options], ModulePlan | str]
    requires: tuple[str, ...] = ()


def plan_module(module: nn.Module, config: Any, options: Options) -> ModulePlan | str | None:
    """Return the changes to a module, the reason against any, or None for a container without a rule of its own.

    Args:
        config: that of the transformers model that contains the module; None outside of one.
    """
    leaf = next(module.children(), None) is None
    if config is None or config.model_type not in FAMILIES:
        if not leaf:
            return None
        kind = "" if config is None else f": its model_type is {config.model_type!r}, patch knows {', '.join(FAMILIES)}"
        return f"is in no model that patch knows{kind}"
    path = _qualified_name(type(module))
    rule = RULES.get(path)
    if rule is None:
        parent = next((base for base in type(module).__mro__[1:] if _qualified_name(base) in RULES), None)
        if parent is not None:
            return f"is a subclass of {parent.__name__}, whose forward may be another"
        if not leaf:
            return None
        if type(module).__name__.endswith("RotaryEmbedding"):
            return "computes its tables once a forward pass; ops.rope uses them"
        return _LEAVES.get(type(module).__name__, "there is no replacement for it")
    if MARK in module.__dict__:
        return "is patched already"
    if "forward" in module.__dict__:
        return "its forward was replaced by another library"
    for function in (f"{path}.forward", *rule.requires):
        reason = unknown(function)
        if reason:
            return reason
    return rule.plan(module, config, options)


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


# --- norms, activations, embeddings ----------------------------------------------------------------------------------


def _check_eps(config: Any, names: tuple[str, ...], eps: float) -> str | None:
    expected = next((getattr(config, name) for name in names if hasattr(config, name)), None)
    return None if eps == expected else f"its eps is {eps}, where the config says {expected}"


def _layer_norm(module: Any, config: Any, options: Options) -> ModulePlan | str:
    if len(module.normalized_shape) != 1 or module.weight is None:
        return f"normalises over {tuple(module.normalized_shape)}{' without weights' * (module.weight is None)}"
    reason = _check_eps(config, ("layer_norm_epsilon", "layer_norm_eps"), module.eps)
    return reason or ModulePlan([("norm", "ops.layer_norm")], blocks.layer_norm_forward)


def _rms_norm(module: Any, config: Any, options: Options) -> ModulePlan | str:
    reason = _check_eps(config, ("rms_norm_eps",), module.variance_epsilon)
    return reason or ModulePlan([("norm", "ops.rms_norm")], blocks.rms_norm_forward)


_GELUS = {
    activations.GELUActivation: "none",
    activations.GELUTanh: "tanh",
    activations.NewGELUActivation: "tanh",
    activations.FastGELUActivation: "tanh",
    activations.AccurateGELUActivation: "tanh",
}
"""Activation class -> the `approximate` of ops.gelu that it computes (several classes for the tanh form)."""


def _gelu(module: Any, config: Any, options: Options) -> ModulePlan | str:
    approximate = _GELUS[type(module)]
    if type(module) is activations.GELUActivation and module.act not in (F.gelu, module._gelu_python):
        return f"calls {module.act!r}"
    changes = [("activation", f"ops.gelu({approximate!r})")]
    return ModulePlan(changes, blocks.gelu_forward, options={"approximate": approximate})


def _silu(module: Any, config: Any, options: Options) -> ModulePlan | str:
    if getattr(module, "inplace", False):
        return "writes over its input"
    return ModulePlan([("activation", "ops.silu")], blocks.silu_forward)


def _embedding(module: Any, config: Any, options: Options) -> ModulePlan | str:
    if not options.embedding:
        return "patch(model, embedding=False)"
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, name):
            return f"has {name}={getattr(module, name)}"
    return ModulePlan([("embedding", "ops.embedding")], blocks.embedding_forward)


def _check_activation(module: nn.Module, name: Any, supported: tuple[type, ...]) -> str | None:
    """Return why an activation is not one of the supported classes or not the one that the config names."""
    if not isinstance(name, str) or name not in activations.ACT2CLS:
        return f"its activation is {name!r}, which transformers has no name for"
    entry = activations.ACT2CLS[name]
    expected = entry[0] if isinstance(entry, tuple) else entry
    if type(module) is not expected:
        return f"its activation is a {type(module).__name__}, where the config says {name!r}"
    if type(module) not in supported:
        return f"ours has no activation {name!r}"
    return unknown(f"{type(module).__module__}:{type(module).__qualname__}.forward")


# --- MLPs and blocks -------------------------------------------------------------------------------------------------


def _gelu_mlp(forward: Forward, linear: str, act: str, setting: str, kind: type[nn.Module]) -> Rule:
    def plan(module: Any, config: Any, options: Options) -> ModulePlan | str:
        activation, layer = getattr(module, act), getattr(module, linear)
        reason = _check_activation(activation, getattr(config, setting, None), tuple(_GELUS))
        if reason:
            return reason
        if type(layer) is not kind:
            return f"its {linear} is a {type(layer).__name__}, not a {kind.__name__}"
        approximate = _GELUS[type(activation)]
        settings = {"approximate": approximate, "activation": type(activation)}
        return ModulePlan([("mlp", f"ops.linear_gelu({approximate!r})")], forward, options=settings)

    requires = () if kind is nn.Linear else ("transformers.pytorch_utils:Conv1D.forward",)
    return Rule(plan, requires)


def _gated_mlp(module: Any, config: Any, options: Options) -> ModulePlan | str:
    reason = _check_activation(module.act_fn, config.hidden_act, (activations.SiLUActivation, nn.SiLU))
    return reason or ModulePlan(
        [("mlp", "ops.swiglu")], blocks.gated_mlp_forward, options={"activation": type(module.act_fn)}
    )


_WHOLE = "; in plain training the block is one autograd function"


def _residual(forward: Forward, op: str, norm: str) -> Rule:
    def plan(module: Any, config: Any, options: Options) -> ModulePlan | str:
        kind = type(getattr(module, norm))
        known = kind is nn.LayerNorm or kind.__name__.endswith("RMSNorm")
        return ModulePlan([("residual", op)], forward) if known else f"its {norm} is a {kind.__name__}"

    return Rule(plan)


def _bert_layer(module: Any, config: Any, options: Options) -> ModulePlan | str:
    kind = type(module.attention)
    if _qualified_name(kind) != _BERT + "BertAttention":
        return f"its attention is a {kind.__name__}"
    changes = [("block", "in plain training one autograd function")]
    return ModulePlan(changes, blocks.bert_layer_forward, options={"attention": kind})


# --- attention -------------------------------------------------------------------------------------------------------


def _check_attention(config: Any) -> str | None:
    name = config._attn_implementation
    if name in ("sdpa", "accelerant"):
        return None
    why = "the only one that returns its weights" if name == "eager" else "requested by name"
    return f"attn_implementation is {name!r}, {why}"


def _attention(module: Any, config: Any, options: Options) -> ModulePlan | str:
    if getattr(module, "is_cross_attention", False):
        return "is cross attention"
    return _check_attention(config) or ModulePlan([("attention", "ops.attention")], attention=True)


def _rotary(family: str, prefix: str, *, qk_norm: bool = False, window: str | None = None) -> Rule:
    path = f"transformers.models.{family}.modeling_{family}"

    def plan(module: Any, config: Any, options: Options) -> ModulePlan | str:
        eager = importlib.import_module(path).eager_attention_forward
        settings = {"eager": eager, "qk_norm": qk_norm, "window": window}
        plan = ModulePlan([("rope", "ops.rope")], blocks.rotary_attention_forward, options=settings)
        reason = _check_attention(config)
        if reason:
            plan.notes = (f"attention stays as it is: {reason}",)
        else:
            plan.changes.append(("attention", "ops.attention"))
            plan.attention = True
        return plan

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
    def plan(module: Any, config: Any, options: Options) -> ModulePlan | str:
        function = module.__dict__.get("_loss_function") or LOSS_MAPPING.get(module.loss_type, ForCausalLMLoss)
        if function is not ForCausalLMLoss:
            return f"its loss is {getattr(function, '__name__', function)}"
        fused = options.loss and type(module.lm_head) is nn.Linear and module.lm_head.bias is None
        settings = {
            "base": base, "positional": positional, "output": output, "named": frozenset(named), "fused": fused,
        }  # fmt: skip
        if fused:
            notes: tuple[str, ...] = (_LAZY, _CACHE)
        elif options.loss:
            notes = ("all logits are computed: lm_head is not a Linear without bias", _CACHE)
        else:
            notes = (_CACHE,)
        return _loss_plan(module, loss.causal_lm_forward, fused, settings, notes)

    return Rule(plan, tuple(f"transformers.loss.loss_utils:{name}" for name in _LOSSES))


def _loss_plan(
    module: Any, forward: Forward, fused: bool, settings: dict[str, Any], notes: tuple[str, ...]
) -> ModulePlan:
    kind: Any = type(module)
    changes = [("loss", f"ops.{'linear_' if fused else ''}cross_entropy")]
    return ModulePlan(changes, loss.signed(forward, kind), options=settings, notes=notes)


def _masked_lm(module: Any, config: Any, options: Options) -> ModulePlan | str:
    head = type(module.cls), type(module.cls.predictions)
    known = [_BERT + "BertOnlyMLMHead", _BERT + "BertLMPredictionHead"]
    fused = options.loss and [_qualified_name(kind) for kind in head] == known
    settings = {"positional": 7, "output": modeling_outputs.MaskedLMOutput, "fused": fused, "head": head}
    return _loss_plan(module, loss.masked_lm_forward, fused, settings, (_LAZY,) if fused else ())


# --- all rules -------------------------------------------------------------------------------------------------------

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
        blocks.intermediate_forward, "dense", "intermediate_act_fn", "hidden_act", nn.Linear
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
    "Linear": "its product is the vendor library's, which Accelerant uses too",
    "Conv1D": "its product is the vendor library's, which Accelerant uses too",
    "Conv2d": "the convolution is cuDNN's, which Accelerant uses too",
    "Dropout": "ours draws other random numbers",
    "Identity": "does nothing",
}
"""Why modules without a rule are left alone."""
