"""Tiny Hugging Face models with random weights, for the tests of patch."""

from __future__ import annotations

import logging
import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="patch is for models of transformers, an optional package")
logging.getLogger("transformers").setLevel(logging.ERROR)

VOCABULARY = 97
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "mistral", "bert", "vit")
CAUSAL = ("gpt2", "llama", "qwen2", "qwen3", "mistral")
ROTARY = ("llama", "qwen2", "qwen3", "mistral")

_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_ENCODER = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_SETTINGS = {
    "gpt2": ("GPT2LMHeadModel", {
        "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 3, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }),
    "llama": ("LlamaForCausalLM", _DECODER),
    "qwen2": ("Qwen2ForCausalLM", _DECODER),
    "qwen3": ("Qwen3ForCausalLM", {**_DECODER, "head_dim": 16}),
    "mistral": ("MistralForCausalLM", {**_DECODER, "sliding_window": 5}),
    "bert": ("BertForMaskedLM", {**_ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 64}),
    "vit": ("ViTForImageClassification", {**_ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 5}),
}  # fmt: skip


def make(family, seed=0, **settings):
    """A model in training mode; every weight random, the norms' too."""
    kind, base = _SETTINGS[family]
    cls = getattr(transformers, kind)
    torch.manual_seed(seed)
    model = cls(cls.config_class(**{**base, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.train()


def batch(family, B=2, S=13, seed=1):
    """Inputs with labels."""
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        return {
            "pixel_values": torch.randn(B, 3, 16, 16, generator=generator),
            "labels": torch.randint(5, (B,), generator=generator),
        }
    ids = torch.randint(3, VOCABULARY, (B, S), generator=generator)
    labels = ids.clone()
    labels[:, 1] = -100
    return {"input_ids": ids, "labels": labels}


def outcome(model, inputs):
    """(loss, logits, gradients by name) of one step."""
    model.zero_grad()
    output = model(**inputs)
    output["loss"].backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output["loss"].detach(), output["logits"].detach(), gradients


def assert_same(found, wanted, **tolerance):
    """Two outcomes within a tolerance; bit for bit without one."""
    tolerance = tolerance or {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(found[0], wanted[0], **tolerance)
    torch.testing.assert_close(found[1], wanted[1], **tolerance)
    assert found[2].keys() == wanted[2].keys()
    for name, gradient in wanted[2].items():
        torch.testing.assert_close(found[2][name], gradient, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
