"""patch: attention behind transformers' interface, with masks, windows, caches."""

import pytest
import torch
from patch_models import CAUSAL, FAMILIES, ROTARY, VOCABULARY, assert_same, batch, make, outcome

import accelerant as acl
from accelerant.nn.patching import loss
from accelerant.nn.patching.attention import Pattern

TIGHT = {"rtol": 2e-5, "atol": 2e-6}


def padded(side, B=3, S=13):
    mask = torch.ones(B, S, dtype=torch.int64)
    for b in range(1, B):
        mask[b, : 3 * b] = 0
    return mask if side == "left" else mask.flip(1)


@pytest.mark.sample(5)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*CAUSAL, "bert"])
def test_padding_is_exact_everywhere(family, side):
    model, inputs = make(family), batch(family, 3)
    inputs["attention_mask"] = padded(side)
    before = outcome(model, inputs)
    report = acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)
    ((reason, count),) = report.fallbacks.items()
    assert reason.startswith("padding (patch(model, padding='skip')")
    assert count == 2
    assert f"attention by torch, 2 times: {reason}" in str(report)


@pytest.mark.sample(5)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*CAUSAL, "bert"])
def test_padding_skipped_is_exact_where_tokens_are(family, side):
    model, inputs = make(family), batch(family, 3)
    mask = padded(side)
    inputs["attention_mask"] = mask
    inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    if side == "left":  # the last padding predicts the first token
        first = mask.argmax(1)
        inputs["labels"][torch.arange(3), first] = -100
    if family != "bert":
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    loss, logits, gradients = outcome(model, inputs)
    report = acl.nn.patch(model, padding="skip")
    found = outcome(model, inputs)
    here = mask.bool()
    assert not report.fallbacks
    assert_same((found[0], found[1][here], found[2]), (loss, logits[here], gradients), **TIGHT)


def test_padding_in_the_middle_goes_to_torch():
    model, inputs = make("bert"), batch("bert")
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][:, 4:6] = 0
    before = outcome(model, inputs)
    report = acl.nn.patch(model, padding="skip")
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert report.fallbacks == {"padding that is not at the ends of a sequence": 2}


def test_boundaries_of_runs():
    rows = [[0, 0, 1, 1], [1, 1, 1, 0], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    boundaries = Pattern(True, None, torch.tensor(rows, dtype=torch.bool)).boundaries().tolist()
    assert boundaries == [0, 2, 4, 4, 4, 7, 8, 9, 11, 12, 12, 16, 16, 16, 16, 20]
    assert Pattern(True, None, torch.tensor([[1, 0, 1]], dtype=torch.bool)).boundaries() is None


@pytest.mark.sample(4)
@pytest.mark.parametrize("mask", [None, "ones", "left"])
@pytest.mark.parametrize("S", [4, 5, 6, 13])
def test_windows(S, mask):
    model, inputs = make("mistral"), batch("mistral", 3, S)
    if mask:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if mask == "left":
            inputs["attention_mask"][1, :2] = 0
    before = outcome(model, inputs)
    report = acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert bool(report.fallbacks) == (mask == "left")


def test_layers_with_and_without_a_window():
    settings = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    model, inputs = make("qwen2", **settings), batch("qwen2")
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    before = outcome(model, inputs)
    report = acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert not report.fallbacks


def test_a_mask_of_the_users_own_goes_to_torch():
    model, inputs = make("llama"), batch("llama")
    seen = torch.rand(2, 1, 13, 13) < 0.7
    inputs["attention_mask"] = seen | torch.eye(13, dtype=torch.bool)
    before = outcome(model, inputs)
    report = acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert sum(report.fallbacks.values()) == 2


def test_packed_sequences_do_not_see_each_other():
    model, inputs = make("llama"), batch("llama", 1)
    inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7]])
    inputs["use_cache"] = False
    before = outcome(model, inputs)
    report = acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert sum(report.fallbacks.values()) == 2


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("cache", [None, True, False])
def test_positions_of_the_users_own(family, cache):
    """Transformers looks for packed sequences in them only where there is no cache."""
    model, inputs = make(family), batch(family, 1) | {"use_cache": cache}
    inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7]])
    before = outcome(model, inputs)
    acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "bert"])
@pytest.mark.parametrize("length", [11, 15])
def test_masks_of_another_length(family, length):
    """Transformers takes what a short one does not reach for padding, and what a long one has too much for nothing."""
    model, inputs = make(family), batch(family)
    inputs["attention_mask"] = torch.ones(2, length, dtype=torch.long)
    before = outcome(model, inputs)
    acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("where", ["modules", "config"])
def test_attention_that_was_made_bidirectional(family, where):
    model, inputs = make(family), batch(family)
    for module in model.modules() if where == "modules" else [model.config]:
        if hasattr(module, "is_causal") or where == "config":
            module.is_causal = False
    before = outcome(model, inputs)
    acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)


def test_long_sequences_get_no_mask_of_their_square(monkeypatch):
    monkeypatch.setattr(loss, "_LONGEST_MASK", 12)
    monkeypatch.setattr(loss, "causal_mask", lambda *_: pytest.fail("a mask of 13 x 13"))
    model, inputs = make("llama"), batch("llama")
    before = outcome(model, inputs)
    acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)


def test_dropout_of_the_weights_goes_to_torch():
    model, inputs = make("gpt2", attn_pdrop=0.5), batch("gpt2")
    report = acl.nn.patch(model)
    model(**inputs)
    assert report.fallbacks == {"dropout of the attention weights (p = 0.5)": 2}
    report.fallbacks.clear()
    model.eval()(**inputs)
    assert not report.fallbacks


def test_dropout_draws_the_same_numbers():
    model, inputs = make("gpt2", attn_pdrop=0.5), batch("gpt2")
    torch.manual_seed(0)
    before = outcome(model, inputs)
    acl.nn.patch(model)
    torch.manual_seed(0)
    assert_same(outcome(model, inputs), before, **TIGHT)


def test_attention_of_another_class_beside_ours():
    model, inputs = make("llama"), batch("llama")

    class Other(type(model.model.layers[0].self_attn)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.model.layers[1].self_attn.__class__ = Other
    before = outcome(model, inputs)
    report = acl.nn.patch(model)
    assert report.counts["attention"] == 1
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert not report.fallbacks


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_eager_attention_is_left_alone_and_gives_its_weights(family):
    model, inputs = make(family, attn_implementation="eager"), batch(family)
    wanted = model(**inputs, output_attentions=True)
    report = acl.nn.patch(model)
    assert "attention" not in report.counts
    found = model(**inputs, output_attentions=True)
    assert len(found.attentions) == 2
    for a, b in zip(found.attentions, wanted.attentions, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)
    reasons = str(report)
    assert "attn_implementation is 'eager', the only one that returns its weights" in reasons


def test_attention_switched_after_patch():
    model, inputs = make("llama"), batch("llama")
    wanted = model(**inputs).logits
    acl.nn.patch(model)
    model.set_attn_implementation("eager")
    output = model(**inputs, output_attentions=True)
    assert output.attentions[0].shape == (2, 4, 13, 13)
    torch.testing.assert_close(output.logits, wanted, **TIGHT)


def test_hidden_states_are_recorded():
    model, inputs = make("llama"), batch("llama")
    wanted = model(**inputs, output_hidden_states=True).hidden_states
    acl.nn.patch(model)
    found = model(**inputs, output_hidden_states=True).hidden_states
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


@pytest.mark.sample(7)
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("family", CAUSAL)
def test_generate(family, cache):
    model = make(family).eval()
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {
        "max_new_tokens": 9, "do_sample": False, "attention_mask": mask, "use_cache": cache != "none",
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    wanted = model.generate(ids, **options)
    acl.nn.patch(model)
    found = model.generate(ids, **options)
    assert torch.equal(found.sequences, wanted.sequences)
    for a, b in zip(found.logits, wanted.logits, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


@pytest.mark.parametrize("family", ROTARY)
def test_a_prompt_in_two_parts(family):
    model = make(family).eval()
    ids = batch(family)["input_ids"]
    with torch.no_grad():
        whole = model(ids, use_cache=True).logits
        acl.nn.patch(model)
        first = model(ids[:, :6], use_cache=True)
        second = model(ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat((first.logits, second.logits), 1), whole, **TIGHT)


def test_a_decoder_with_cross_attention():
    model = make("gpt2", add_cross_attention=True)
    inputs = batch("gpt2") | {
        "encoder_hidden_states": torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(1))
    }
    before = outcome(model, inputs)
    report = acl.nn.patch(model)
    assert report.counts["attention"] == 4
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert not report.fallbacks


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_rotary_tables_of_other_kinds(kind):
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    model, inputs = make("llama", rope_parameters=parameters), batch("llama")
    before = outcome(model, inputs)
    report = acl.nn.patch(model)
    assert report.counts["rope"] == 2
    assert_same(outcome(model, inputs), before, **TIGHT)
