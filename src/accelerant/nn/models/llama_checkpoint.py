"""Llama as Hugging Face's transformers lays it out: names, what of theirs makes our joined weights, the config."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from accelerant.nn.models.hugging_face import Fields, Layout, Part
from accelerant.ops.rope.tables import Llama3Scaling

if TYPE_CHECKING:
    from accelerant.nn.models.llama import LlamaConfig

__all__ = ["LAYOUT"]


def _config_of(given: Fields) -> LlamaConfig:
    """The config that Hugging Face's fields mean.

    Raises:
        UnsupportedCase: a field asks for what this model does not do.
    """
    from accelerant.nn.models.llama import LlamaConfig

    given.require("hidden_act", "silu")
    given.require("attention_bias", False)
    given.require("mlp_bias", False)
    given.require("pretraining_tp", 1)
    given.require("is_causal", True)
    heads = given.integer("num_attention_heads", 32)
    kv_heads = given.get("num_key_value_heads")
    head_width = given.get("head_dim")
    context = given.integer("max_position_embeddings", 2048)
    base, scaling = _rope_of(given)
    return LlamaConfig(
        vocab_size=given.integer("vocab_size", 32000),
        context=context,
        layers=given.integer("num_hidden_layers", 32),
        heads=heads,
        kv_heads=heads if kv_heads is None else given.integer("num_key_value_heads"),
        width=given.integer("hidden_size", 4096),
        hidden=given.integer("intermediate_size", 11008),
        head_width=None if head_width is None else given.integer("head_dim"),
        rope_base=base,
        rope_scaling=scaling,
        eps=given.number("rms_norm_eps", 1e-6),
        tied=given.boolean("tie_word_embeddings", False),
    )


def _rope_of(given: Fields) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling: of `rope_parameters`, or of `rope_theta` and `rope_scaling` in older files."""
    new = given.fields("rope_parameters")
    old = given.fields("rope_scaling")
    rope = new if new is not None else old if old is not None else Fields({}, given.origin)
    base = rope.number("rope_theta", given.number("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise rope.unsupported("rope_type", kind, "'default' or 'llama3'")
    return base, Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_context=rope.integer("original_max_position_embeddings"),
    )


def _config_to(config: LlamaConfig) -> dict[str, Any]:
    """Hugging Face's fields of a config; the rotary ones in the new form and in the old."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "head_dim": config.head_size,
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": rope,
        "rope_theta": config.rope_base,
        "rope_scaling": None if config.rope_scaling is None else rope,
    }


def _parts(config: LlamaConfig) -> dict[str, tuple[Part, ...]]:
    width, hidden, head = config.width, config.hidden, config.head_size
    q, kv = config.heads * head, config.kv_heads * head
    found: dict[str, tuple[Part, ...]] = {}
    found["embed.weight"] = (Part("embed_tokens.weight", (config.vocab_size, width)),)
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}.", f"layers.{i}."
        found[f"{ours}norm_1.weight"] = (Part(f"{theirs}input_layernorm.weight", (width,)),)
        found[f"{ours}attention.qkv.weight"] = (
            Part(f"{theirs}self_attn.q_proj.weight", (q, width)),
            Part(f"{theirs}self_attn.k_proj.weight", (kv, width)),
            Part(f"{theirs}self_attn.v_proj.weight", (kv, width)),
        )
        found[f"{ours}attention.projection.weight"] = (Part(f"{theirs}self_attn.o_proj.weight", (width, q)),)
        found[f"{ours}norm_2.weight"] = (Part(f"{theirs}post_attention_layernorm.weight", (width,)),)
        found[f"{ours}mlp.gate_up.weight"] = (
            Part(f"{theirs}mlp.gate_proj.weight", (hidden, width)),
            Part(f"{theirs}mlp.up_proj.weight", (hidden, width)),
        )
        found[f"{ours}mlp.down.weight"] = (Part(f"{theirs}mlp.down_proj.weight", (width, hidden)),)
    found["norm.weight"] = (Part("norm.weight", (width,)),)
    if not config.tied:
        found["lm_head.weight"] = (Part("lm_head.weight", (config.vocab_size, width)),)
    return found


LAYOUT: Layout[LlamaConfig] = Layout(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    config_of=_config_of,
    config_to=_config_to,
    parts=_parts,
    tied=lambda config: ("lm_head.weight", "embed_tokens.weight") if config.tied else None,
    ignored=re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),  # tables, which older versions saved
)
