"""GPT-2 as Hugging Face's transformers lays it out: names, Conv1D's transposed weights, the tied head, the config."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from accelerant.errors import UnsupportedCase
from accelerant.nn.models.hugging_face import Fields, Layout, Part

if TYPE_CHECKING:
    from accelerant.nn.models.gpt import GPTConfig

__all__ = ["LAYOUT"]


def _config_of(given: Fields) -> GPTConfig:
    """The config that Hugging Face's fields mean.

    Dropout is not part of a GPT here and its rates are not read.

    Raises:
        UnsupportedCase: a field asks for what this model does not do.
    """
    from accelerant.nn.models.gpt import GPTConfig

    given.require("activation_function", "gelu_new", "gelu_pytorch_tanh")
    given.require("scale_attn_weights", True)
    given.require("scale_attn_by_inverse_layer_idx", False)
    given.require("reorder_and_upcast_attn", False)
    given.require("add_cross_attention", False)
    given.require("is_causal", True)
    width = given.integer("n_embd", 768)
    given.require("n_inner", None, 4 * width)
    return GPTConfig(
        vocab_size=given.integer("vocab_size", 50257),
        context=given.integer("n_positions", 1024),
        layers=given.integer("n_layer", 12),
        heads=given.integer("n_head", 12),
        width=width,
        eps=given.number("layer_norm_epsilon", 1e-5),
        tied=given.boolean("tie_word_embeddings", True),
    )


def _config_to(config: GPTConfig) -> dict[str, Any]:
    if not config.bias:
        raise UnsupportedCase("GPT2LMHeadModel always has biases, and this model none (bias=False)")
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "n_ctx": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.eps,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": config.tied,
    }


def _parts(config: GPTConfig) -> dict[str, tuple[Part, ...]]:
    width = config.width
    found = {
        "wte.weight": Part("wte.weight", (config.vocab_size, width)),
        "wpe.weight": Part("wpe.weight", (config.context, width)),
    }
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}.", f"h.{i}."
        for name, norm in (("norm_1", "ln_1"), ("norm_2", "ln_2")):
            found[f"{ours}{name}.weight"] = Part(f"{theirs}{norm}.weight", (width,))
            found[f"{ours}{name}.bias"] = Part(f"{theirs}{norm}.bias", (width,))
        for name, conv, inner, outer in (
            ("attention.qkv", "attn.c_attn", width, 3 * width),
            ("attention.projection", "attn.c_proj", width, width),
            ("mlp.up", "mlp.c_fc", width, 4 * width),
            ("mlp.down", "mlp.c_proj", 4 * width, width),
        ):
            found[f"{ours}{name}.weight"] = Part(f"{theirs}{conv}.weight", (inner, outer), turned=True)
            found[f"{ours}{name}.bias"] = Part(f"{theirs}{conv}.bias", (outer,))
    found["norm.weight"] = Part("ln_f.weight", (width,))
    found["norm.bias"] = Part("ln_f.bias", (width,))
    if not config.tied:
        found["lm_head.weight"] = Part("lm_head.weight", (config.vocab_size, width))
    return {ours: (part,) for ours, part in found.items()}


LAYOUT: Layout[GPTConfig] = Layout(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    config_of=_config_of,
    config_to=_config_to,
    parts=_parts,
    tied=lambda config: ("lm_head.weight", "wte.weight") if config.tied else None,
    ignored=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),  # masks, which older versions saved
)
