"""A tiny random model of every family that transformers has, by kind, with inputs and labels."""

import copy
import inspect

import torch
from patch_models import VOCABULARY, transformers
from transformers.models.auto import configuration_auto, modeling_auto

_SIZES = {
    **dict.fromkeys(
        ("vocab_size", "src_vocab_size", "tgt_vocab_size", "decoder_vocab_size", "n_words"), VOCABULARY
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_encoder_position_embeddings", "max_length", "image_size",
         "max_decoder_position_embeddings", "max_target_positions"), 64,
    ),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim", "emb_dim", "embedding_dim",
         "dim_model", "projection_dim", "pooler_output_size", "classifier_proj_size", "output_hidden_size"), 48,
    ),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim",
         "speech_encoder_intermediate_size", "d_inner"), 64,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
         "num_decoder_layers", "num_encoder_layers", "speech_encoder_layers"), 2,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
         "num_encoder_attention_heads", "num_decoder_attention_heads", "speech_encoder_attention_heads",
         "num_conv_pos_embedding_groups", "mamba_n_heads"), 4,
    ),
    "num_key_value_heads": 2, **dict.fromkeys(("head_dim", "d_kv", "d_head"), 12), "sliding_window": 6,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "xvector_output_dim"), 32),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "num_groups"), 8),
    **dict.fromkeys(("num_sparse_encoder_layers", "num_sparse_decoder_layers", "num_random_blocks"), 1),
    **dict.fromkeys(
        ("num_mel_bins", "num_conv_pos_embeddings", "feature_projection_input_dim", "codevector_dim",
         "proj_codevector_dim", "num_codevectors_per_group"), 16,
    ),
    "patch_size": 4, "encoder_stride": 4, "window_size": 2, "num_labels": 5, "max_source_positions": 32,
    "conv_depthwise_kernel_size": 7, "attention_window": 8, "block_size": 4, "attn_layer_period": 2,
    "attn_layer_offset": 1, "width_coefficient": 0.25, "depth_coefficient": 0.25, "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}  # fmt: skip
"""Sizes by the names that configurations have for them."""

_DEPTHS = ("depths", "depth", "stage_num_blocks", "stage_numb_of_layers", "layers", "num_block_repeats")
_WIDTHS = (
    "hidden_sizes", "embed_dim", "embed_dims", "conv_dim", "stage_in_channels", "stage_mid_channels", "tdnn_dim",
    "stage_out_channels", "stem_channels", "hidden_channels", "channels", "decoder_hidden_sizes",
)  # fmt: skip
_OTHERS = {
    "EfficientNetForImageClassification": {"hidden_dim": 320},
    "EsmcForMaskedLM": {"num_key_value_heads": 4},
    "FunnelForMaskedLM": {"block_sizes": [1, 1]},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "GraniteSpeech5ForCTC": {"context_size": 16},
    "KimiLinearForCausalLM": {"num_hidden_layers": 4},
    "LevitForImageClassification": {"patch_size": 16, "hidden_sizes": [128, 256, 384]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LukeForMaskedLM": {"entity_vocab_size": 50, "entity_emb_size": 16},
    "Qwen3NextForCausalLM": {"num_hidden_layers": 4},
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "ReformerForMaskedLM": {"axial_pos_embds": False},
    "ReformerModelWithLMHead": {"axial_pos_embds": False, "is_decoder": True},
    "StableLmForCausalLM": {"partial_rotary_factor": 0.5},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
"""Settings of single models, whose configurations check them against each other."""

_LARGEST = 5_000_000  # parameters; models with other names for their sizes would take gigabytes
_SLOW = ("falcon_h1", "nemotron_h")  # whose states take gigabytes, or whose steps a minute
_MAPPINGS = {
    "causal": "CAUSAL_LM", "masked": "MASKED_LM", "sequence": "SEQ_TO_SEQ_CAUSAL_LM", "image": "IMAGE_CLASSIFICATION",
    "speech": "SPEECH_SEQ_2_SEQ", "ctc": "CTC", "audio": "AUDIO_CLASSIFICATION",
}  # fmt: skip
FAMILIES = {
    kind: {
        name if isinstance(name, str) else name[0]: model_type
        for model_type, name in reversed(getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items())
        if model_type not in _SLOW
    }
    for kind, mapping in _MAPPINGS.items()
}
"""Kind of model -> name of its class -> type of its configuration."""

CASES = sorted({name: kind for kind in reversed(FAMILIES) for name in FAMILIES[kind]}.items())


def tiny(name, kind, **settings):
    """A model in training mode; every weight random, the norms' too."""
    cls, config_class = getattr(transformers, name), configuration_auto.CONFIG_MAPPING[FAMILIES[kind][name]]
    given = {"decoder_start_token_id": 0} | _shrunk(config_class()) | _OTHERS.get(name, {}) | settings
    config = config_class(**given)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    if size > _LARGEST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.train()


def _shrunk(config):
    found = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            found[name] = _shrunk(value)
        elif isinstance(value, list | tuple) and name in _DEPTHS:
            found[name] = [min(each, 1) for each in value]
        elif isinstance(value, list | tuple) and name in _WIDTHS and all(isinstance(each, int) for each in value):
            found[name] = [each if each <= 16 else max(4, each // 16 * 4) for each in value]
        elif name in _SIZES and not isinstance(value, list | tuple):
            found[name] = _SIZES[name]
        elif name == "embed_dim" and isinstance(value, int):
            found[name] = 48
        elif "drop" in name and isinstance(value, float):
            found[name] = 0.0
    if "qk_rope_head_dim" in vars(config):  # latent attention: heads of other sizes, which are not shared
        found.pop("head_dim", None)
        found["num_key_value_heads"] = 4
    return found


def inputs_of(model, kind):
    """Inputs and labels that a model takes; of audio, the first shape that it does not refuse."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 13), generator=generator)
    labels, classes = ids.masked_fill(torch.arange(13) == 1, -100), torch.randint(2, (2,), generator=generator)
    if kind in ("causal", "masked"):
        return {"input_ids": ids, "labels": labels}
    short = labels[:, :9].contiguous()
    if kind == "sequence":
        return {"input_ids": ids, "labels": short if model.config.is_encoder_decoder else labels}
    if kind == "image":
        size = getattr(getattr(model.config, "vision_config", model.config), "image_size", None) or 64
        size = size if isinstance(size, int) else size[0]
        return {"pixel_values": torch.randn(2, 3, size, size, generator=generator), "labels": classes}
    labels = {"audio": classes, "ctc": short[:, 2:5]}.get(kind, short)
    shapes = {
        "input_features": [(16, 64), (64, 16), (64, 80), (64, 128), (32, 48), (64, 32), (64, 40), (80, 64), (128, 64)],
        "input_values": [(3200,), (64, 16), (1, 3200)],
    }
    failed = ValueError("no known inputs")
    for argument in shapes.keys() & inspect.signature(type(model).forward).parameters:
        for shape in shapes[argument]:
            inputs = {argument: torch.randn(2, *shape, generator=generator), "labels": labels}
            try:
                model(**inputs)
            except (RuntimeError, ValueError, IndexError) as error:
                failed = error
            else:
                return inputs
    raise failed
