"""patch: a tiny random model of every causal and masked language model of transformers equals its unpatched self."""

import copy

import pytest
import torch
from patch_models import VOCABULARY, assert_same, batch, outcome, transformers
from transformers.models.auto import configuration_auto, modeling_auto

import accelerant as acl

pytestmark = pytest.mark.soak

TINY = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "n_positions": 64, "sliding_window": 6,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 48),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff", "decoder_ffn_dim"), 64),
    "encoder_ffn_dim": 64,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
}  # fmt: skip
"""Sizes by the names that configurations have for them."""

LARGEST = 5_000_000  # parameters; models with other names for their sizes would take gigabytes
CAUSAL, MASKED = (
    {name if isinstance(name, str) else name[0]: model_type for model_type, name in reversed(mapping.items())
     if model_type != "falcon_h1"}  # whose states take gigabytes
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
)  # fmt: skip


def tiny(name, model_type):
    kind, config_class = getattr(transformers, name), configuration_auto.CONFIG_MAPPING[model_type]
    names = vars(config_class()).keys()
    settings = {key: value for key, value in TINY.items() if key in names}
    if "qk_rope_head_dim" in names:  # latent attention: heads of other sizes, which are not shared
        settings = {key: value for key, value in settings.items() if key not in ("head_dim", "num_key_value_heads")}
        settings["num_key_value_heads"] = 4
    settings |= {key: 0.0 for key in names if "drop" in key and not isinstance(getattr(config_class(), key), bool)}
    config = config_class(**settings)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


@pytest.mark.parametrize("name", sorted(CAUSAL | MASKED))
def test_it_equals_the_unpatched_model(name):
    inputs = batch("llama")
    padded = inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}
    padded["attention_mask"][1, -4:] = 0
    ids = inputs["input_ids"][:, :6]
    try:
        model = tiny(name, (CAUSAL | MASKED)[name]).train()
        before = [outcome(model, each) for each in (inputs, padded, inputs)]
        assert_same(before[0], before[2], rtol=1e-6, atol=1e-7)  # draws no random numbers
        sequences = model.eval().generate(ids, max_new_tokens=5, do_sample=False) if name in CAUSAL else None
    except Exception as error:
        pytest.skip(f"transformers: no tiny {name} of these sizes and inputs ({type(error).__name__}: {error})")
    acl.nn.patch(model)
    model.train()
    largest = max(1.0, *(float(g.abs().max()) for each in before for g in (each[1], *each[2].values()) if g.numel()))
    for each, wanted in zip((inputs, padded), before, strict=False):
        assert_same(outcome(model, each), wanted, rtol=2e-5, atol=4e-6 * largest)
    if sequences is not None:
        assert torch.equal(model.eval().generate(ids, max_new_tokens=5, do_sample=False), sequences)
    acl.nn.unpatch(model.train())
    assert_same(outcome(model, inputs), before[0])
