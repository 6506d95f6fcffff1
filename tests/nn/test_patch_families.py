"""patch: families whose modules have the forms of others. Each is compared with the unpatched model."""

import functools

import pytest
import torch
from patch_models import (
    BY_FORM,
    TIGHT,
    assert_generates_the_same,
    assert_same,
    batch,
    make,
    outcome,
    outcomes_in_bfloat16,
    patch_and_compare,
    transformers,
)

import accelerant as acl
from accelerant.nn.patching import attention

KINDS = {
    "gemma2": {"loss", "norm", "residual", "rope", "attention", "activation"},
    "gemma3": {"loss", "norm", "residual", "rope", "attention", "activation"},
    "phi3": {"loss", "norm", "residual", "rope", "attention", "mlp", "activation", "embedding"},
    "mixtral": {"loss", "norm", "residual", "rope", "attention", "activation", "embedding", "experts"},
    "roberta": {"loss", "norm", "residual", "block", "attention", "mlp", "activation", "embedding"},
    "modernbert": {"loss", "norm", "rope", "attention", "activation", "embedding"},
    "t5": {"loss", "norm", "attention", "activation", "embedding"},
    "whisper": {"loss", "norm", "attention", "activation", "embedding"},
    "clip": {"norm", "residual", "attention", "mlp", "activation", "embedding"},
}
TOKENS = ("gemma2", "gemma3", "phi3", "mixtral", "roberta", "modernbert", "t5")


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", BY_FORM)
def test_outputs_and_gradients_stay(family):
    model, inputs = make(family), batch(family)
    before, keys = outcome(model, inputs), list(model.state_dict())
    report = acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert list(model.state_dict()) == keys
    capped = family == "gemma2" and model.config._attn_implementation == "eager"  # from transformers 5.21 on
    assert report.counts.keys() == KINDS[family] - ({"attention"} if capped else set())
    assert capped == any("no 'sdpa' for this model" in note for note in report.notes)


def test_the_loss_of_experts_without_a_balancing_loss_has_no_logits():
    """transformers gave them an output with router logits in 5.19."""
    config = transformers.Dots1Config(
        vocab_size=97, hidden_size=48, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, head_dim=12,
        num_attention_heads=4, num_key_value_heads=2, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        first_k_dense_replace=1, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model, inputs = transformers.Dots1ForCausalLM(config).train(), batch("llama")
    inputs |= {"output_router_logits": True, "output_hidden_states": True}
    before, kind, keys = outcome(model, inputs), type(model(**inputs)), model(**inputs).keys()
    report = acl.nn.patch(model)
    assert ("loss", "ops.linear_cross_entropy") in {(change.kind, change.now) for change in report.changed}
    assert_same(outcome(model, inputs), before, **TIGHT)
    output = model(**inputs)
    assert isinstance(output, kind)
    assert {*output.keys()} == {*keys} - {"cache", "past_key_values"}


@pytest.mark.slow
@pytest.mark.parametrize("family", BY_FORM)
def test_in_evaluation_and_undone(family):
    model, inputs = make(family), batch(family)
    before = outcome(model, inputs)
    with torch.no_grad():
        wanted = model.eval()(**inputs)
        acl.nn.patch(model)
        found = model(**inputs)
    torch.testing.assert_close((found.loss, found.logits), (wanted.loss, wanted.logits), **TIGHT)
    with torch.inference_mode():
        torch.testing.assert_close(model(**inputs).logits, wanted.logits, **TIGHT)
    acl.nn.unpatch(model.train())
    assert_same(outcome(model, inputs), before)
    assert not any(name in vars(each) for each in model.modules() for name in ("forward", "_loss_function"))


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", TOKENS)
def test_padding(family, side):
    model, inputs = make(family), batch(family, 3)
    mask = torch.ones_like(inputs["input_ids"])
    for b in (1, 2):
        mask[b, : 3 * b] = 0
    mask = mask if side == "left" else mask.flip(1)
    inputs["attention_mask"] = mask
    patch_and_compare(model, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["mask", "long mask", "tokens", "tuple", "positional"])
@pytest.mark.parametrize("family", ["gemma3", "t5", "whisper"])
def test_a_step_without_its_cache_computes_the_same(family, more):
    model, inputs = make(family), batch(family)
    prefix, labels = "" if family == "gemma3" else "decoder_", inputs["labels"]
    mask = torch.ones(labels.shape[0], labels.shape[1] + (more == "long mask"), dtype=torch.int64)
    mask[1, -3:] = 0
    options = {"mask": {f"{prefix}attention_mask": mask}, "tuple": {"return_dict": False}}
    options |= {"long mask": options["mask"], "tokens": {f"{prefix}input_ids": labels.clamp_min(0)}}
    inputs |= options.get(more, {})
    args = [inputs.pop(model.main_input_name)] if more == "positional" else []
    found = []
    for patched in (False, True):
        if patched:
            acl.nn.patch(model)
        model.zero_grad()
        try:
            output = model(*args, **inputs)
        except (RuntimeError, ValueError, IndexError) as error:
            found.append([type(error)])
            continue
        output[0].backward()
        found.append([len(output), output[0].detach(), output[1].detach(), *(p.grad for p in model.parameters())])
        if more != "tuple":
            assert (output.past_key_values is None) == (patched and more != "long mask")
            assert model(*args, **inputs, use_cache=True).past_key_values is not None
            assert model.eval()(*args, **inputs).past_key_values is not None
            model.train()
    if more != "tuple":
        found = [each[1:] if len(each) > 1 else each for each in found]  # None is no element
    for one, two in zip(*found, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(two, one, **TIGHT)
        else:
            assert one == two


@pytest.mark.slow
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "phi3", "mixtral", "t5", "whisper"])
def test_generate(family, cache):
    # With a cache, transformers' balancing loss of Mixtral fails for a mask longer than the tokens.
    settings = {"output_router_logits": False} if family == "mixtral" else {}
    model, inputs = make(family, **settings).eval(), batch(family)
    del inputs["labels"]
    if "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][1, :3] = 0
    assert_generates_the_same(model, inputs, min_new_tokens=9, use_cache=cache)


@pytest.mark.slow
@pytest.mark.parametrize("family", BY_FORM)
def test_bfloat16_is_no_further_from_the_truth_than_unpatched(family):
    truth, plain, patched = outcomes_in_bfloat16(family)
    wrong, usual = (
        sum(float((each[2][name].double() - g).norm() / (g.norm() + 1e-9)) for name, g in truth[2].items())
        for each in (patched, plain)
    )
    assert wrong <= 1.5 * usual + 1e-4  # the sum over all parameters: single ones vary by the roundings of attention


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings"), [
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"attn_logit_softcapping": 1.0, "attn_implementation": "eager"}),
    ("gemma2", {"use_bidirectional_attention": True}),
    ("gemma2", {"hidden_activation": "silu"}),
    ("gemma3", {"final_logit_softcapping": 3.0}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ("phi3", {"hidden_act": "gelu"}),
    ("mixtral", {"sliding_window": 4}),
    ("mixtral", {"output_router_logits": False}),
    ("roberta", {"hidden_act": "relu"}),
    ("roberta", {"is_decoder": True}),
    ("modernbert", {"sparse_prediction": True}),
    ("modernbert", {"mlp_bias": True, "attention_bias": True, "norm_bias": True}),
    ("t5", {"feed_forward_proj": "relu"}),
    ("t5", {"tie_word_embeddings": False}),
    ("whisper", {"activation_function": "relu"}),
])  # fmt: skip
def test_other_settings(family, settings):
    model, inputs = make(family, **settings), batch(family)
    before = outcome(model, inputs)
    acl.nn.patch(model)
    atol = 2e-6 * max(1.0, float(before[1].abs().max()))  # T5's logits are in the tens without the tied weights' scale
    assert_same(outcome(model, inputs), before, rtol=2e-5, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*TOKENS, "whisper"])
def test_gradient_checkpointing_and_dropout(family):
    names = ("dropout", "dropout_rate", "resid_pdrop", "attention_dropout", "hidden_dropout_prob")
    base = make(family).config
    model, inputs = make(family, **{name: 0.3 for name in names if hasattr(base, name)}), batch(family)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(4)
    before = outcome(model, inputs)
    acl.nn.patch(model)
    torch.manual_seed(4)
    assert_same(outcome(model, inputs), before, **TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit", "gemma2", "mixtral", "clip"])
def test_checkpointed_layers_run_again_in_the_backward_pass(family):
    """Transformers 5.23 checkpoints in the forward of the layer's class."""
    model, inputs = make(family), batch(family)
    before = outcome(model, inputs)
    acl.nn.patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = {"gpt2": "attn.c_proj", "bert": "attention.output.dense", "clip": "out_proj"}.get(family, "o_proj")
    seen = []
    for name, module in model.named_modules():
        if name.endswith(layers):
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert seen
    assert all(seen.count(name) == 2 for name in seen)


@pytest.mark.slow
@pytest.mark.parametrize("family", BY_FORM)
def test_under_autocast(family):
    model, inputs = make(family), batch(family)
    if family == "mixtral":
        model.set_experts_implementation("eager")  # torch's grouped products and autocast disagree on dtypes
    with torch.autocast("cpu", torch.bfloat16):
        plain = outcome(model, inputs)
        acl.nn.patch(model)
        patched = outcome(model, inputs)
    assert patched[0].dtype == plain[0].dtype
    torch.testing.assert_close(patched[0], plain[0], rtol=1e-2, atol=1e-3)
    # of bfloat16, of single elements
    torch.testing.assert_close(patched[1].float(), plain[1].float(), rtol=5e-2, atol=5e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers"), [
    ("gemma3", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
    pytest.param("t5", {"num_layers": 1, "num_decoder_layers": 1}, marks=pytest.mark.soak),
    pytest.param("phi3", {"num_hidden_layers": 1}, marks=pytest.mark.soak),
])  # fmt: skip
def test_compiles_whole(family, layers):
    model, inputs = make(family, **layers), batch(family)
    wanted = outcome(model, inputs)
    acl.nn.patch(model)
    model.zero_grad()
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)
    output.loss.backward()
    torch.testing.assert_close(output.loss, wanted[0], **TIGHT)
    for name, p in model.named_parameters():
        if name in wanted[2]:
            torch.testing.assert_close(p.grad, wanted[2][name], **TIGHT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::accelerant.errors.FallbackWarning")  # graph=True without a GPU
@pytest.mark.parametrize("options", [{"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(5.0)}])
@pytest.mark.parametrize("graph", [None, True])
@pytest.mark.parametrize("family", ["gemma2", "mixtral", "modernbert"])
def test_losses_take_what_transformers_passes(family, graph, options):
    model, inputs = make(family), batch(family) | options
    patch_and_compare(model, inputs, graph=graph)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "t5"])
def test_a_models_forward_that_another_library_wrapped_is_called(family, monkeypatch):
    model, inputs = make(family), batch(family)
    original = type(model).forward

    @functools.wraps(original)
    def doubled(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        output.loss = output.loss * 2
        return output

    monkeypatch.setattr(type(model), "forward", doubled)
    patch_and_compare(model, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1,), (13, 48)])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_norm_weights_of_another_shape(family, shape):
    model, inputs = make(family), batch(family)
    for norm in (
        model.model.norm,
        model.model.layers[0].input_layernorm,
        model.model.layers[1].post_attention_layernorm,
    ):
        norm.weight = torch.nn.Parameter(torch.randn(shape))
    patch_and_compare(model, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("family", ["gemma2", "modernbert", "qwen3", "gpt2", "bert"])
def test_flat_labels(family, train):
    """transformers' losses flatten what they get."""
    model, inputs = make(family).train(train), batch(family)
    name = "shift_labels" if family == "gemma2" else "labels"
    inputs[name] = torch.randint(3, 97, (26,), generator=torch.Generator().manual_seed(2))
    patch_and_compare(model, inputs)


@pytest.mark.slow
def test_tables_whose_halves_differ_are_left_to_the_model():
    """Cohere's have each angle twice in a row; ours would rotate by others."""
    model, inputs = make("phi3"), batch("phi3")
    kind = type(model.model.rotary_emb)

    class Interleaved(kind):
        def forward(self, x, position_ids):
            cos, sin = super().forward(x, position_ids)
            half = cos.shape[-1] // 2
            return cos[..., :half].repeat_interleave(2, -1), sin[..., :half].repeat_interleave(2, -1)

    model.model.rotary_emb.__class__ = Interleaved
    report = patch_and_compare(model, inputs)
    assert "rope" not in report.counts


@pytest.mark.slow
def test_a_mask_that_was_written_to_is_read():
    """The pattern that we attach to a mask is the one with which it was made."""
    model, inputs = make("llama"), batch("llama") | {"use_cache": True}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["position_ids"] = torch.arange(13)[None]
    model.config.sliding_window = None

    def hide(module, arguments, named):
        mask = attention.causal_mask(1, 13, torch.device("cpu"))
        mask[..., 3] = False
        mask[..., 3, 3] = True
        return arguments, named | {"attention_mask": mask}

    for layer in model.model.layers:
        layer.register_forward_pre_hook(hide, with_kwargs=True)
    report = patch_and_compare(model, inputs)
    assert sum(report.fallbacks.values()) == 2
