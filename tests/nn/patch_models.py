"""Tiny Hugging Face models with random weights, for the tests of patch."""

import logging
import os

import pytest
import torch

import accelerant as acl

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="patch is for models of transformers, an optional package")
logging.getLogger("transformers").setLevel(logging.ERROR)

VOCABULARY = 97
TIGHT = {"rtol": 2e-5, "atol": 2e-6}
"""Of float32 on a CPU: sums in another order."""

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "mistral", "bert", "vit")
CAUSAL = ("gpt2", "llama", "qwen2", "qwen3", "mistral")
ROTARY = ("llama", "qwen2", "qwen3", "mistral")
BY_FORM = ("gemma2", "gemma3", "phi3", "mixtral", "roberta", "modernbert", "t5", "whisper", "clip")
"""Families without a replacement of their own: their modules have the forms of others."""

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
    "gemma2": ("Gemma2ForCausalLM", {
        **_DECODER, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20, "final_logit_softcapping": 2.0,
    }),
    "gemma3": ("Gemma3ForCausalLM", {
        **_DECODER, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
    "phi3": ("Phi3ForCausalLM", {**_DECODER, "resid_pdrop": 0.0, "sliding_window": 5}),
    "mixtral": ("MixtralForCausalLM", {
        **_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    }),
    "roberta": ("RobertaForMaskedLM", {
        **_ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 66, "pad_token_id": 1,
    }),
    "modernbert": ("ModernBertForMaskedLM", {
        "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "local_attention": 6,
        "global_attn_every_n_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
        "sep_token_id": 2,
    }),
    "t5": ("T5ForConditionalGeneration", {
        "vocab_size": VOCABULARY, "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_heads": 4,
        "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    }),
    "whisper": ("WhisperForConditionalGeneration", {
        "vocab_size": VOCABULARY, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 80, "decoder_ffn_dim": 80,
        "num_mel_bins": 8, "max_source_positions": 11, "max_target_positions": 64, "dropout": 0.0,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
        "suppress_tokens": [], "begin_suppress_tokens": [],
    }),
    "clip": ("CLIPForImageClassification", {
        "vision_config": {
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 16, "patch_size": 4, "hidden_act": "gelu",
        },
        "num_labels": 5,
    }),
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
    if family == "whisper":
        labels = torch.randint(3, VOCABULARY, (B, S), generator=generator)
        return {"input_features": torch.randn(B, 8, 22, generator=generator), "labels": labels}
    if family in ("vit", "clip"):
        return {
            "pixel_values": torch.randn(B, 3, 16, 16, generator=generator),
            "labels": torch.randint(5, (B,), generator=generator),
        }
    ids = torch.randint(3, VOCABULARY, (B, S), generator=generator)
    labels = ids.clone()
    labels[:, 1] = -100
    if family == "t5":
        labels = labels[:, : S - 4].contiguous()
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


def patch_and_compare(model, inputs, **options):
    """Patch a model, whose outcome stays; return the report."""
    before = outcome(model, inputs)
    report = acl.nn.patch(model, **options)
    assert_same(outcome(model, inputs), before, **TIGHT)
    return report


def outcomes_in_bfloat16(family):
    """Outcomes in float64, in bfloat16, and in bfloat16 patched, whose logits are as near to the first's."""
    found, model = [], make(family)
    if family == "mixtral":
        model.set_experts_implementation("eager")  # torch's grouped products have no float64
    for step, dtype in enumerate((torch.float64, torch.bfloat16, torch.bfloat16)):
        if step == 2:
            acl.nn.patch(model)
        inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch(family).items()}
        found.append(outcome(model.to(dtype), inputs))
    truth, plain, patched = found
    assert (patched[0].dtype, patched[1].dtype) == (plain[0].dtype, torch.bfloat16)
    wrong, usual = (float((each[1].double() - truth[1]).norm() / truth[1].norm()) for each in (patched, plain))
    assert wrong <= 1.5 * usual + 1e-4
    return found


def assert_generates_the_same(model, inputs, **options):
    """Patch a model, which generates the same tokens, with the same logits where it returns them."""
    options |= {"max_new_tokens": 9, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    wanted = model.generate(**inputs, **options)
    acl.nn.patch(model)
    found = model.generate(**inputs, **options)
    assert torch.equal(found["sequences"], wanted["sequences"])
    if model.config.model_type != "whisper":  # whose generate() returns them by segment
        torch.testing.assert_close(found.logits, wanted.logits, **TIGHT)
