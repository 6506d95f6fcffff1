"""patch: attention behind transformers' interface, with masks, windows, caches."""

import copy
import itertools
import pickle
import random

import pytest
import torch
from patch_models import (
    CAUSAL,
    FAMILIES,
    ROTARY,
    TIGHT,
    VOCABULARY,
    assert_generates_the_same,
    assert_same,
    batch,
    make,
    outcome,
    patch_and_compare,
)
from transformers import DataCollatorWithFlattening
from transformers.masking_utils import sdpa_mask

import accelerant as acl
from accelerant.nn.patching import attention, blocks


def padded(kind, B=3, S=13, seed=0):
    """A mask of tokens, drawn: the first sequence has no padding, the others some."""
    draw = random.Random(f"{kind} {seed}")
    mask = torch.ones(B, S, dtype=torch.int64)
    for b in range(1, B):
        first, end = draw.randint(1, S // 2), draw.randint(S // 2, S - 1)
        if kind in ("left", "both"):
            mask[b, :first] = 0
        if kind in ("right", "both"):
            mask[b, end:] = 0
        if kind == "holes":
            mask[b, [i for i in range(S) if draw.random() < 0.4]] = 0
    if kind == "nothing else":
        mask[1] = 0
    return mask


def packed(B=3, S=13, seed=0):
    """Positions that restart at drawn tokens, other ones in each row."""
    draw = random.Random(seed)
    starts = [[0, *sorted(draw.sample(range(1, S), draw.randint(0, 3))), S] for _ in range(B)]
    return torch.tensor([[i for a, b in itertools.pairwise(row) for i in range(b - a)] for row in starts])


@pytest.fixture
def ours(monkeypatch):
    """Padding and packed sequences by our op on a CPU, too, where it runs by torch's functions."""
    for module in (attention, blocks):
        monkeypatch.setattr(module, "is_torchs", lambda pattern, x: False)


@pytest.mark.sample(9)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["left", "right", "both", "holes", "nothing else", "ones"])
@pytest.mark.parametrize("family", [*CAUSAL, "gemma2", "gemma3", "phi3", "mixtral", "bert", "roberta", "modernbert"])
def test_padding_is_exact_everywhere_on_our_kernels(family, kind, seed, ours):
    model, inputs = make(family), batch(family, 3)
    inputs["attention_mask"] = padded(kind, seed=seed)
    report = patch_and_compare(model, inputs, padding=("exact", "skip")[seed])
    assert not report.fallbacks


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_padding_without_our_kernels_is_that_of_torch(family):
    model, inputs = make(family), batch(family, 3)
    inputs["attention_mask"] = padded("both")
    report = patch_and_compare(model, inputs)
    assert report.fallbacks == {"padding, packed sequences or windows of both sides where our kernels do not run": 2}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [None, "left", "holes"])
@pytest.mark.parametrize("S", [2, 3, 4, 5, 13])
def test_windows_that_look_both_ways(S, kind, ours):
    model, inputs = make("modernbert"), batch("modernbert", 3, S)  # 3 tokens back and ahead
    if kind is not None:
        inputs["attention_mask"] = padded(kind, S=S)
    report = patch_and_compare(model, inputs)
    assert not report.fallbacks


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", [*CAUSAL, "gemma2", "gemma3"])
def test_packed_sequences_do_not_see_each_other(family, seed, ours):
    model, inputs = make(family), batch(family, 3) | {"use_cache": False}
    inputs["position_ids"] = packed(seed=seed) if seed else packed(1)
    report = patch_and_compare(model, inputs)
    assert not report.fallbacks


def test_packed_batches_of_a_collator(ours):
    """DataCollatorWithFlattening's arguments for FlashAttention, beside positions that say the same."""
    rows = [{"input_ids": list(range(3, 3 + length))} for length in (4, 7, 2)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    model, inputs = make("llama"), collate(rows) | {"use_cache": False}
    report = patch_and_compare(model, inputs)
    assert not report.fallbacks


@pytest.mark.parametrize("checkpointing", [True, False], ids=["reentrant", "not reentrant"])
def test_padding_of_a_checkpointed_model(checkpointing, ours):
    model, inputs = make("llama"), batch("llama", 3) | {"attention_mask": padded("both"), "use_cache": False}
    before = outcome(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    model.enable_input_require_grads()
    report = acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert not report.fallbacks


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "modernbert"])
def test_padding_in_layers_that_are_compiled_alone(family, ours):
    """The mask comes from outside of what is compiled; another one in each step compiles nothing again."""
    model, other = make(family), make(family)
    acl.nn.patch(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    compiled = []
    for step in range(4):
        inputs = batch(family, 3, seed=step) | {"attention_mask": padded("both", seed=step)}
        assert_same(outcome(model, inputs), outcome(other, inputs), **TIGHT)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[1] == compiled[3]


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("family", [*CAUSAL, "gemma2", "gemma3", "bert", "modernbert", "whisper"])
@pytest.mark.parametrize("mask", [None, "attention_mask", "position_ids"])
def test_nothing_of_a_mask_is_read_on_the_host(family, mask):
    """On the device "meta" whose tensors have no values: torch raises where one is read."""
    no_warning = {"pad_token_id": None} if family == "gpt2" else {}  # it reads tokens to warn of padding without a mask
    model, inputs = make(family, **no_warning).to("meta"), {name: x.to("meta") for name, x in batch(family, 3).items()}
    report = acl.nn.patch(model)
    if mask == "attention_mask":
        length = inputs["labels"].shape[1]
        inputs["decoder_attention_mask" if family == "whisper" else mask] = torch.ones(3, length).long().to("meta")
    elif mask == "position_ids":
        if family in ("bert", "modernbert", "whisper"):
            pytest.skip("it takes no packed sequences")
        inputs |= {"position_ids": packed().to("meta"), "use_cache": False}
    model(**inputs).loss.backward()
    assert not report.fallbacks


def test_masks_that_nothing_reads_are_not_made(ours, monkeypatch):
    def absent(**arguments):
        assert sdpa_mask(**arguments) is None
        return None

    monkeypatch.setattr(attention, "sdpa_mask", absent)
    for mask in ({}, {"attention_mask": padded("both")}, {"position_ids": packed(), "use_cache": False}):
        for family in ("llama", "gpt2"):
            model, inputs = make(family), batch(family, 3)
            acl.nn.patch(model)
            outcome(model, inputs | mask)


def test_a_mask_that_is_read_is_that_of_transformers():
    arguments = {"batch_size": 3, "q_length": 13, "kv_length": 13, "attention_mask": padded("both").bool()}
    mask, wanted = attention.attention_mask(**arguments), sdpa_mask(**arguments)
    lengths = (13, 13)
    assert (mask.shape, mask.dtype, mask.device) == (wanted.shape, wanted.dtype, wanted.device)
    assert repr(mask) == "mask((3, 1, 13, 13), torch.bool, computed when read)"
    for each in (mask, mask.detach(), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.clone()):
        assert torch.equal(each, wanted)
    assert attention.known_pattern(mask.detach(), True, lengths).padding is not None
    assert (mask.logical_not().tolist(), mask.numpy().sum()) == ((~wanted).tolist(), wanted.sum())
    mask[0] = False  # through a view
    assert attention.known_pattern(mask, True, lengths) is None
    assert not mask[0].any()


@pytest.mark.sample(4)
@pytest.mark.parametrize("mask", [None, "ones", "left"])
@pytest.mark.parametrize("S", [4, 5, 6, 13])
def test_windows(S, mask, ours):
    model, inputs = make("mistral"), batch("mistral", 3, S)
    if mask:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if mask == "left":
            inputs["attention_mask"][1, :2] = 0
    report = patch_and_compare(model, inputs)
    assert not report.fallbacks


def test_layers_with_and_without_a_window():
    settings = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    model, inputs = make("qwen2", **settings), batch("qwen2")
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    report = patch_and_compare(model, inputs)
    assert not report.fallbacks


def test_a_mask_of_the_users_own_goes_to_torch():
    model, inputs = make("llama"), batch("llama")
    seen = torch.rand(2, 1, 13, 13) < 0.7
    inputs["attention_mask"] = seen | torch.eye(13, dtype=torch.bool)
    report = patch_and_compare(model, inputs)
    assert sum(report.fallbacks.values()) == 2


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("cache", [None, True, False, "checkpointing"])
def test_positions_of_the_users_own(family, cache):
    """Transformers looks for packed sequences in them only where there is no cache."""
    model, inputs = make(family), batch(family, 1)
    if cache == "checkpointing":
        model.gradient_checkpointing_enable()
    else:
        inputs["use_cache"] = cache
    inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7]])
    patch_and_compare(model, inputs)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "bert"])
@pytest.mark.parametrize("length", [11, 15])
def test_masks_of_another_length(family, length):
    """Transformers takes what a short one does not reach for padding, and what a long one has too much for nothing."""
    model, inputs = make(family), batch(family)
    inputs["attention_mask"] = torch.ones(2, length, dtype=torch.long)
    patch_and_compare(model, inputs)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("where", ["modules", "config"])
def test_attention_that_was_made_bidirectional(family, where):
    model, inputs = make(family), batch(family)
    for module in model.modules() if where == "modules" else [model.config]:
        if hasattr(module, "is_causal") or where == "config":
            module.is_causal = False
    patch_and_compare(model, inputs)


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
    report = patch_and_compare(model, inputs)
    assert report.counts["attention"] == 1
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
    options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert_generates_the_same(model, inputs, use_cache=cache != "none", **options)


@pytest.mark.parametrize("kind", ["ones", "left", "holes"])
@pytest.mark.parametrize("family", ROTARY)
def test_a_prompt_in_two_parts(family, kind, ours):
    model = make(family).eval()
    ids, mask = batch(family, 3)["input_ids"], padded(kind)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=True).logits
        report = acl.nn.patch(model)
        first = model(ids[:, :6], attention_mask=mask[:, :6], use_cache=True)
        second = model(ids[:, 6:], attention_mask=mask, past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat((first.logits, second.logits), 1), whole, **TIGHT)
    assert not report.fallbacks


@pytest.mark.parametrize("kind", [None, "ones", "right", "holes", "nothing else"])
def test_a_decoder_with_cross_attention(kind, ours):
    model = make("gpt2", add_cross_attention=True)
    inputs = batch("gpt2", 3) | {
        "encoder_hidden_states": torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(1))
    }
    if kind is not None:
        inputs |= {"encoder_attention_mask": padded(kind, S=5), "attention_mask": padded("left")}
    report = patch_and_compare(model, inputs)
    assert report.counts["attention"] == 4
    assert not report.fallbacks


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_rotary_tables_of_other_kinds(kind):
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    model, inputs = make("llama", rope_parameters=parameters), batch("llama")
    report = patch_and_compare(model, inputs)
    assert report.counts["rope"] == 2
