"""The replacement of each form of module, and the conditions for it.

Modules are recognized by a class of torch, the form of a forward (see forms), a call of transformers' attention
interface, or a loss that our cross entropy computes; not by the model that they are in.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, activations, modeling_outputs
from transformers import __version__ as VERSION
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, fixed_cross_entropy
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from accelerant.nn.patching import blocks, loss
from accelerant.nn.patching.forms import RULES, TESTED, Options, Replacement, Rule, differs, form_of, why_left
from accelerant.nn.patching.plain import gelu_forward, plan_embedding, plan_layer_norm, plan_silu
from accelerant.nn.patching.record import MARK, Forward

_VERSIONS = "{}.{} to {}.{}".format(*TESTED[0], *TESTED[1])
_KNOWN = f"from transformers {_VERSIONS}, that"
_UNKNOWN = f"its forward is none of those, {_KNOWN} a replacement was written for"


def version_note() -> str | None:
    """Return what the report says of a version of transformers outside of TESTED; None for one within."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", VERSION)[:2])
    if TESTED[0] <= numbers <= TESTED[1]:
        return None
    return (
        f"transformers {VERSION} is {'newer' if numbers > TESTED[1] else 'older'} than the versions that patch was "
        f"written for ({_VERSIONS}): what changed in it is left alone, and may be slower"
    )


def plan_module(module: nn.Module, model: Any, options: Options) -> Replacement | str | None:
    """Return the changes to a module of a model, the reason against any, or None for a container without a rule."""
    kind: Any = type(module)
    rule = _rule_of(kind)
    is_model = issubclass(kind, PreTrainedModel)
    if rule is None and (not is_model or "forward" in module.__dict__):
        return _why_unchanged(module, model)
    if MARK in module.__dict__:
        return "is patched already"
    if "forward" in module.__dict__:
        return "its forward was replaced by another library"
    plan = _why_unchanged(module, model) if rule is None else rule(module, replace(options, model=model))
    return _without_cache(module, plan) if is_model else plan


def _without_cache(model: Any, plan: Replacement | str | None) -> Replacement | str | None:
    """Return the plan of a model; that of one with labels and a cache makes none in training."""
    kind = type(model)
    if not _caches(model) or (isinstance(plan, Replacement) and plan.forward is loss.causal_lm_forward):
        return plan
    if not isinstance(plan, Replacement):
        plan = Replacement([], notes=() if plan is None else (f"the loss of {kind.__name__} stays as it is: {plan}",))
    options = plan.options | {"inner": plan.forward, "names": tuple(_parameters(kind))}
    return replace(plan, forward=loss.cacheless_forward, options=options, notes=(*plan.notes, _CACHE))


def _caches(model: Any) -> bool:
    """Return whether calls of a model with labels may make a cache."""
    forward = inspect.unwrap(type(model).forward)
    parameters = inspect.signature(forward).parameters.values()
    names = {each.name for each in parameters}
    hands_on = any(each.kind is each.VAR_KEYWORD for each in parameters)  # the argument, unless it gives one itself
    takes = "use_cache" in names or (hands_on and "use_cache" not in str(forward.__code__.co_consts[1:]))
    return takes and "labels" in names and bool(getattr(model.config.get_text_config(), "use_cache", False))


def _parameters(kind: Any) -> list[str]:
    """Return the names of the parameters that a class's forward takes by position or by name."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]


def _rule_of(kind: Any) -> Rule | None:
    """Return the rule of a class."""
    return _rule_of_form(kind, kind.forward, form_of(kind.forward))


@functools.cache
def _rule_of_form(kind: Any, forward: Any, form: str | None) -> Rule | None:
    if kind in RULES:
        return RULES[kind]
    if kind.__module__.startswith("torch."):
        return None
    is_model = issubclass(kind, PreTrainedModel)
    if form in RULES and (_only_decorated_by_transformers(forward) if is_model else blocks.is_plain_forward(forward)):
        return RULES[form]
    if _takes_experts_functions(forward):
        return _experts
    if is_model:
        return _any_loss if {"loss_function", "CrossEntropyLoss"} & set(_names(forward)) else None
    return _attention if _calls_interface(forward) else None


def _only_decorated_by_transformers(forward: Any) -> bool:
    """Return whether the decorators of a model's forward are those of transformers, whose effect replacements have."""
    while hasattr(forward, "__wrapped__"):
        if not forward.__globals__["__name__"].startswith("transformers."):
            return False
        forward = forward.__wrapped__
    return True


def _why_unchanged(module: nn.Module, model: Any) -> str | None:
    """Return why a module without a rule is left alone; None for a container that needs no reason."""
    bases: tuple[Any, ...] = type(module).__mro__[1:]
    children = list(module.children())
    for base in bases:
        if issubclass(base, nn.Module) and base is not nn.Module and _rule_of(base) is not None:
            return f"is a subclass of {base.__name__}, whose forward may be another"
    name = type(module).__name__
    if name.endswith("RotaryEmbedding"):
        used = any(_rotated(type(each).forward, model) for each in model.modules())
        return f"computes its tables once a forward pass; {'ops.rope uses them' if used else _NO_ROPE}"
    layers = any(isinstance(child, (nn.Linear, Conv1D)) for child in children)
    norms = any(isinstance(child, nn.LayerNorm) or type(child).__name__.endswith("Norm") for child in children)
    if name.endswith("RMSNorm") or (layers and name.endswith(("Attention", "MLP"))):
        return _UNKNOWN
    if norms and name.endswith(("Layer", "Block")):
        return f"{_UNKNOWN}: its residual sums are not fused with norms"
    if isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None:
        return f"{_UNKNOWN}: its loss is not ours"
    return why_left(module)


def _names(forward: Any) -> tuple[str, ...]:
    """Return the names that a function's code refers to, attributes included."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return () if code is None else code.co_names


# --- norms, activations, embeddings ----------------------------------------------------------------------------------
def _why_method_differs(module: Any, name: str, form: str) -> str | None:
    """Return the reason against a module whose method `name`, which its forward calls, has another form; else None."""
    if differs(getattr(type(module), name, None), form):
        return f"its {name} is none that the replacement was written for"
    return None


def _row_norm(op: str, forward: Forward) -> Rule:
    """Return the rule of a norm with a weight for each element of a row."""

    def plan(module: Any, options: Options) -> Replacement | str:
        shape = tuple(module.weight.shape)
        if len(shape) != 1 or shape == (1,):  # transformers' would broadcast them
            return f"has weights of shape {shape}"
        return Replacement([("norm", op)], forward)

    return plan


_plan_offset_norm = _row_norm("ops.rms_norm", blocks.offset_rms_norm_forward)


def _offset_norm(module: Any, options: Options) -> Replacement | str:
    return _why_method_differs(module, "_norm", "rms_norm_offset._norm") or _plan_offset_norm(module, options)


_GELUS = {
    activations.GELUActivation: ("gelu", "none"),
    activations.GELUTanh: ("gelu", "tanh"),
    activations.NewGELUActivation: ("gelu_new", "tanh"),
    activations.FastGELUActivation: ("gelu_fast", "tanh"),
    activations.AccurateGELUActivation: ("gelu_accurate", "tanh"),
}
"""Activation class -> its form, and the `approximate` with which ops.gelu computes the same."""


def _approximation(module: Any) -> str | None:
    """Return the `approximate` of ops.gelu that an activation computes; None if it is another function."""
    kind = type(module)
    if kind is nn.GELU:
        return str(module.approximate)
    form, approximate = _GELUS.get(kind, ("", ""))
    if not form or differs(kind.forward, form):
        return None
    if kind is activations.GELUActivation and module.act not in (F.gelu, module._gelu_python):
        return None
    return approximate


def _gelu(module: Any, options: Options) -> Replacement | str:
    approximate = _approximation(module)
    if approximate is None:
        return f"calls {getattr(module, 'act', None)!r}, or its forward is another than ours computes"
    changes = [("activation", f"ops.gelu({approximate!r})")]
    return Replacement(changes, gelu_forward, options={"approximate": approximate})


# --- experts ---------------------------------------------------------------------------------------------------------
def _takes_experts_functions(forward: Any) -> bool:
    """Return whether a forward is that of experts for which transformers has functions by name."""
    return hasattr(forward, "__wrapped__") and forward.__globals__["__name__"] == "transformers.integrations.moe"


def _experts(module: Any, options: Options) -> Replacement | str:
    if getattr(module.config, "_experts_implementation", None) != "grouped_mm":
        return "routing and experts stay as they are"
    weights = [x for x in module.parameters(recurse=False) if x.dim() == 3]
    if not weights or any(size % 8 for x in weights for size in x.shape[1:]):
        return "torch's grouped products take sizes that are multiples of 8"
    return Replacement([("experts", "grouped products in autocast's dtype")], blocks.experts_forward)


# --- MLPs and blocks -------------------------------------------------------------------------------------------------
def _gelu_mlp(first: str, activation: str, *rest: str, kind: type[nn.Module] = nn.Linear) -> Rule:
    """Return the rule of an MLP: a linear layer, a GELU, and modules that are called one after the other."""

    def plan(module: Any, options: Options) -> Replacement | str:
        act, layer = getattr(module, activation), getattr(module, first)
        approximate = _approximation(act)
        if approximate is None:
            return f"its activation is a {type(act).__name__}, ours a GELU"
        if type(layer) is not kind or (kind is Conv1D and differs(Conv1D.forward, "conv1d")):
            return f"its {first} is a {type(layer).__module__}.{type(layer).__name__}, not a {kind.__name__}"
        settings = {"approximate": approximate, "activation": type(act), "names": (first, activation, rest)}
        return Replacement([("mlp", f"ops.linear_gelu({approximate!r})")], blocks.gelu_mlp_forward, options=settings)

    return plan


def _gated_mlp(forward: Forward, activation: str) -> Rule:
    def plan(module: Any, options: Options) -> Replacement | str:
        act = getattr(module, activation)
        kind = type(act)
        ours = kind is nn.SiLU or (kind is activations.SiLUActivation and not differs(kind.forward, "silu"))
        if not ours or getattr(act, "inplace", False):
            return f"its gate is a {kind.__name__}, ours a SiLU"
        return Replacement([("mlp", "ops.swiglu")], forward, options={"activation": kind})

    return plan


_NO_ROPE = f"the model applies them itself, by code that is none of that, {_KNOWN} ops.rope was written for"
_WHOLE = "; in plain training the block is one autograd function"
_WHOLE_ATTENTION = ("attention_llama", "attention_qk_norm", "attention_gpt2", "attention_vit")


def _residual(forward: Forward, norm: str, after: tuple[str, ...] = (), *, whole: str = "") -> Rule:
    """Return the rule of a layer that adds to the residual stream before its module `norm`.

    `after` are called on what is added; where the attention `whole` has a known form, the layer can be one function.
    """

    def plan(module: Any, options: Options) -> Replacement | str:
        kind = type(getattr(module, norm))
        rms = form_of(kind.forward) in ("rms_norm", "rms_norm_offset")
        if not rms and kind is not nn.LayerNorm:
            return f"its {norm} is a {kind.__name__}"
        known = bool(whole) and form_of(type(getattr(module, whole)).forward) in _WHOLE_ATTENTION
        op = f"ops.add_{'rms' if rms else 'layer'}_norm" + _WHOLE * known
        return blocks.layer_plan(module, forward, [("residual", op)], norm=norm, after=after)

    return plan


def _bert_layer(module: Any, options: Options) -> Replacement | str:
    if (reason := _why_method_differs(module, "feed_forward_chunk", "bert_layer.feed_forward_chunk")) is not None:
        return reason
    kind = type(module.attention)
    if differs(kind.forward, "bert_attention"):
        return f"its attention is a {kind.__name__}"
    changes = [("block", "in plain training one autograd function")]
    return blocks.layer_plan(module, blocks.bert_layer_forward, changes, attention=kind)


# --- attention -------------------------------------------------------------------------------------------------------
def _calls_interface(forward: Any) -> bool:
    """Return whether a forward finds its attention function by transformers' interface."""
    found = getattr(inspect.unwrap(forward), "__globals__", {}).get("ALL_ATTENTION_FUNCTIONS")
    return found is ALL_ATTENTION_FUNCTIONS and "ALL_ATTENTION_FUNCTIONS" in _names(forward)


def _attention(module: Any, options: Options) -> Replacement | str:
    forward = type(module).forward
    rotated = _rotated(forward, options.model)
    settings = {"form": form_of(forward), "forward": rotated}
    plan = Replacement([("rope", "ops.rope")] if rotated else [], rotated, options=settings)
    reason = _why_attention_stays(module, options.model)
    if reason is None:
        plan.changes.append(("attention", "ops.attention"))
        plan.attention = True
    elif rotated is None:
        return reason
    else:
        plan.notes = (f"attention stays as it is: {reason}",)
    return plan


def _why_attention_stays(module: Any, model: Any) -> str | None:
    """Return why a module keeps its own attention function; None if ours can take its place."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if name not in ("sdpa", "accelerant"):
        why = "the only one that returns its weights" if name == "eager" else "requested by name"
        if name == "eager" and not getattr(model, "_supports_sdpa", True):
            why = "and transformers has no 'sdpa' for this model"
        return f"attn_implementation is {name!r}, {why}"
    if _names_sdpa(type(module).__module__):
        return "its model computes something else where attn_implementation is 'sdpa'"
    return None


@functools.cache
def _names_sdpa(module: str) -> bool:
    """Return whether a modeling module compares the attention that a config names with "sdpa"."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return True
    return any("_attn_implementation" in line and re.search(r"""["']sdpa["']""", line) for line in source.splitlines())


def _rotated(forward: Any, model: Any) -> Forward | None:
    """Return an attention's forward with our rope in place of its model's; None if it has no form that we know.

    All of a model's rotary tables must be of the kind whose halves are equal.
    """
    if "apply_rotary_pos_emb" not in _names(forward):
        return None
    apply = inspect.unwrap(forward).__globals__.get("apply_rotary_pos_emb")
    form = form_of(apply)
    if form not in ("rotary", "rotary_partial"):
        return None
    if differs(inspect.unwrap(apply).__globals__.get("rotate_half"), "rotate_half"):
        return None
    tables = {type(each) for each in model.modules() if type(each).__name__.endswith("RotaryEmbedding")}
    if not tables or any(differs(kind.forward, "rotary_tables") for kind in tables):
        return None
    ours = blocks.rotary(apply, partial=form == "rotary_partial")
    rotated: Forward = blocks.rebound(forward, "apply_rotary_pos_emb", ours)
    return rotated


# --- the loss --------------------------------------------------------------------------------------------------------
_LAZY = (
    "in training with labels, the logits are not materialized: reading output.logits computes them (under "
    "torch.compile it is None); patch(model, loss=False) always computes them"
)
_CACHE = "in training with labels, no cache (past_key_values) is made unless use_cache=True is passed"
_ALL_LOGITS = (
    f"all logits are computed: the model's forward is none of those, {_KNOWN} a loss without them was written for"
)


def _loss_of(module: Any) -> tuple[Any, str | None]:
    """Return a model's loss function, and its form if all that it calls is known too."""
    function = getattr(module, "_loss_function", None) or LOSS_MAPPING.get(module.loss_type, ForCausalLMLoss)
    form = form_of(function)
    known = form in ("causal_loss", "masked_loss") and not differs(fixed_cross_entropy, "fixed_cross_entropy")
    return function, form if known else None


def _causal_lm(base: str, output: type) -> Rule:
    def plan(module: Any, options: Options) -> Replacement | str:
        function, form = _loss_of(module)
        if form != "causal_loss":
            return f"its loss is {getattr(function, '__name__', function)}"
        names = tuple(_parameters(type(module)))
        fused = options.loss and type(module.lm_head) is nn.Linear and module.lm_head.bias is None
        plain = not differs(type(getattr(module, base)).forward, "decoder")
        settings = {"base": base, "names": names, "output": output, "fused": fused, "plain": plain}
        notes: tuple[str, ...] = (_CACHE,)
        if fused:
            notes = (_LAZY, *notes)
        elif options.loss:
            notes = ("all logits are computed: lm_head is not a Linear without bias", *notes)
        return _loss_plan(loss.causal_lm_forward, fused, settings, notes)

    return plan


def _loss_plan(forward: Forward, fused: bool, settings: dict[str, Any], notes: tuple[str, ...]) -> Replacement:
    changes = [("loss", f"ops.{'linear_' if fused else ''}cross_entropy")]
    return Replacement(changes, forward, options=settings, notes=notes)


def _masked_lm(module: Any, options: Options) -> Replacement | str:
    head = type(module.cls), type(module.cls.predictions)
    known = [form_of(kind.forward) for kind in head] == ["masked_lm_bert.head", "masked_lm_bert.predictions"]
    fused = options.loss and known
    settings = {"positional": 7, "output": modeling_outputs.MaskedLMOutput, "fused": fused, "head": head}
    return _loss_plan(loss.masked_lm_forward, fused, settings, (_LAZY,) if fused else ())


def _any_loss(module: Any, options: Options) -> Replacement | str:
    """Plan our cross entropy for a model that computes its logits itself."""
    changes = [("loss", "ops.cross_entropy")]
    forward = type(module).forward
    notes = (_ALL_LOGITS,) if options.loss and module.get_output_embeddings() is not None else ()
    if "loss_function" in _names(forward):
        function, form = _loss_of(module)
        if form is None:
            return f"its loss is {getattr(function, '__name__', function)}"
        ours = loss.causal_loss if form == "causal_loss" else loss.masked_loss
        return Replacement(changes, loss_function=ours, notes=notes)
    if inspect.unwrap(forward).__globals__.get("CrossEntropyLoss") is not nn.CrossEntropyLoss:
        return "its CrossEntropyLoss is not torch's"
    rebound: Forward | None = blocks.rebound(forward, "CrossEntropyLoss", loss.CrossEntropyLoss)
    if rebound is None:
        return "its forward has decorators that patch does not know"
    head = _bare_head(module) if options.loss and _caches(module) else None
    if head is None:
        return Replacement(changes, rebound, notes=notes)
    return _loss_plan(rebound, True, {"deferred": head}, (_LAZY,))


def _bare_head(model: Any) -> str | None:
    """Return the name of a linear layer without a bias whose results are a model's logits, as its source says."""
    layer = model.get_output_embeddings()
    name = next((name for name, each in model.named_children() if each is layer), None)
    if name is None or type(getattr(model, name)) is not nn.Linear or getattr(model, name).bias is not None:
        return None
    try:
        source = inspect.getsource(inspect.unwrap(type(model).forward))
    except (OSError, TypeError):  # of a class that was made by exec, or compiled
        return None
    if re.search(r"\.(register_hook|retain_grad)\(", source):
        return None
    found = re.search(rf"^ *(\w+) = self\.{name}\([\w.\[\]]*\)$", source, re.MULTILINE)
    return name if found and len(re.findall(rf"\b{found[1]} (?:[-+*/]?=) ", source)) == 1 else None


# --- all rules -------------------------------------------------------------------------------------------------------
RULES |= {
    nn.LayerNorm: plan_layer_norm,
    nn.Embedding: plan_embedding,
    nn.SiLU: plan_silu,
    **dict.fromkeys((nn.GELU, *_GELUS), _gelu),
    "silu": plan_silu,
    "rms_norm": _row_norm("ops.rms_norm", blocks.rms_norm_forward),
    "rms_norm_offset": _offset_norm,
    "layer_norm_scale": _row_norm("ops.layer_norm", blocks.layer_norm_scale_forward),
    "mlp_activation_fn": _gelu_mlp("fc1", "activation_fn", "fc2"),
    "mlp_activation": _gelu_mlp("fc1", "activation", "fc2"),
    "mlp_act": _gelu_mlp("fc1", "act", "fc2"),
    "mlp_linear_fc": _gelu_mlp("linear_fc1", "act_fn", "linear_fc2"),
    "mlp_up_down": _gelu_mlp("up_proj", "act_fn", "down_proj"),
    "mlp_conv1d": _gelu_mlp("c_fc", "act", "c_proj", "dropout", kind=Conv1D),
    "mlp_intermediate": _gelu_mlp("dense", "intermediate_act_fn"),
    "mlp_feed_forward": _gelu_mlp(
        "intermediate_dense", "intermediate_act_fn", "intermediate_dropout", "output_dense", "output_dropout"
    ),
    "gated_mlp": _gated_mlp(blocks.gated_mlp_forward, "act_fn"),
    "packed_gated_mlp": _gated_mlp(blocks.packed_gated_mlp_forward, "activation_fn"),
    "decoder_layer": _residual(blocks.decoder_layer_forward, "post_attention_layernorm", whole="self_attn"),
    "dropout_decoder_layer": _residual(
        blocks.decoder_layer_forward, "post_attention_layernorm", ("resid_attn_dropout", "resid_mlp_dropout")
    ),
    "sandwich_layer": _residual(
        blocks.decoder_layer_forward, "pre_feedforward_layernorm",
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "clip_layer": _residual(blocks.clip_layer_forward, "layer_norm2"),
    "gpt2_block": _residual(blocks.gpt2_block_forward, "ln_2", whole="attn"),
    "vit_layer": _residual(blocks.vit_layer_forward, "layernorm_after", whole="attention"),
    "bert_layer": _bert_layer,
    "bert_output": _residual(blocks.bert_output_forward, "LayerNorm"),
    "causal_lm": _causal_lm("model", modeling_outputs.CausalLMOutputWithPast),
    "causal_lm_experts": _causal_lm("model", modeling_outputs.MoeCausalLMOutputWithPast),
    "causal_lm_gpt2": _causal_lm("transformer", modeling_outputs.CausalLMOutputWithCrossAttentions),
    "masked_lm_bert": _masked_lm,
}  # fmt: skip
