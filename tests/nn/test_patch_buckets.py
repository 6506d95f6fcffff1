"""patch with CUDA graphs where lengths vary: calls padded to few lengths give what they give as they are."""

import copy
import random
import weakref
from unittest.mock import Mock

import pytest
import torch
import transformers
from patch_models import VOCABULARY, assert_same, make
from test_patch_graphs import BEFORE, Rerun, on_cpu  # noqa: F401

import accelerant as acl
from accelerant.errors import FallbackWarning
from accelerant.nn.patching import buckets

CAUSAL = ("gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3")
MASKED = ("bert", "roberta", "modernbert")


def drawn(rng, family, length, style, rows=2, labels=0.75):
    """A batch of rows of several lengths, padded to `length` as the style says; "packed" has several in a row."""
    ids = torch.tensor([[rng.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(rows)])
    mask, targets = torch.ones_like(ids), ids.clone()
    targets[:, 1::3] = -100
    for row in range(rows):
        left = rng.randrange(length // 2) if style in ("left", "both") else 0
        right = rng.randrange(length // 2) if style in ("right", "both") else 0
        mask[row, :left] = 0
        mask[row, length - right :] = 0
    ids[mask == 0] = 1 if family == "roberta" else 0
    targets[mask == 0] = -100
    found = {"input_ids": ids}
    if rng.random() < labels:
        found["labels"] = targets
    if family in CAUSAL and (style != "packed" or "labels" not in found or rng.random() < 0.5):
        found["use_cache"] = False
    if style == "packed":
        cut = rng.randrange(1, length)
        found["position_ids"] = torch.cat((torch.arange(cut), torch.arange(length - cut))).expand(rows, -1)
    elif style != "none" or (rng.random() < 0.2 and family in MASKED):
        found["attention_mask"] = None if style == "none" else mask
    return found


def outcome(model, batch):
    """(loss, logits, gradients by name) of one step in which the loss and the logits take part."""
    model.zero_grad()
    output = model(**batch)
    loss = output.logits.float().square().mean() + (output.loss if "labels" in batch else 0)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), output.logits.detach(), grads


def patched(model):
    other = copy.deepcopy(model)
    other.report = acl.nn.patch(other, graph=True)
    return other


def assert_steps_agree(model, other, batches):
    for batch in batches:
        assert_same(outcome(other, batch), outcome(model, batch), rtol=1e-3, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", CAUSAL + MASKED)
def test_any_lengths_and_paddings_give_what_they_give_without_graphs(family, rng):
    model = make(family)
    other = patched(model)
    styles = ("none", "right", "left", "both") + ("packed",) * (family in CAUSAL)
    style, batches = rng.choice(styles), []
    for _ in range(20):
        style = rng.choice(styles) if rng.random() < 0.2 else style
        batches.append(drawn(rng, family, rng.randrange(6, 49), style))
    assert_steps_agree(model, other, batches)
    outcomes = other.report.graphs
    assert outcomes["replayed"] + outcomes["eager: before the capture"] == len(batches)
    assert outcomes["replayed"] >= 5
    assert not [note for note in other.report.notes if "padded" in note]


TEXT_TO_TEXT = {"d_model": 48, "d_ff": 80, "encoder_layers": 1, "decoder_layers": 2, "num_layers": 1, "d_kv": 12,
                "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 80,
                "decoder_ffn_dim": 80, "dropout": 0.0, "dropout_rate": 0.0, "vocab_size": VOCABULARY, "pad_token_id": 0,
                "eos_token_id": 2, "decoder_start_token_id": 0, "bos_token_id": 1}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration", "MarianMTModel",
                                  "MT5ForConditionalGeneration", "BartModel"])  # fmt: skip
def test_encoder_and_decoder_of_any_lengths_give_what_they_give_without_graphs(name, rng):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**TEXT_TO_TEXT, max_position_embeddings=64)).train()
    other = patched(model)
    styles, collated = rng.choice([["none"], ["right"], ["none", "right", "left"]]), rng.random() < 0.5
    for _ in range(20):
        batch = drawn(rng, "t5", rng.randrange(6, 49), rng.choice(styles), labels=0)
        target = drawn(rng, "t5", rng.randrange(4, 33), "right", labels=1.0)
        batch |= {"use_cache": False} | ({} if name.endswith("tModel") else {"labels": target["labels"]})
        if collated or name.endswith("tModel"):  # as DataCollatorForSeq2Seq does
            batch |= {"decoder_input_ids": target["input_ids"], "decoder_attention_mask": target["attention_mask"]}
        found = []
        for each in (model, other):
            each.zero_grad()
            output = each(**batch)
            outputs = output.last_hidden_state if name.endswith("tModel") else output.logits
            encoded = output.encoder_last_hidden_state
            loss = outputs.sin().mean() + encoded.sin().mean() + (output.loss if "labels" in batch else 0)
            loss.backward()
            grads = {name: p.grad.clone() for name, p in each.named_parameters() if p.grad is not None}
            found.append((loss.detach(), outputs.detach(), grads))
        assert found[0][1].shape == found[1][1].shape
        assert_same(*found[::-1], rtol=1e-3, atol=1e-5)
    assert other.report.graphs["replayed"] >= 5
    assert not [note for note in other.report.notes if "padded" in note]


@pytest.mark.slow
def test_transcripts_of_any_length_give_what_they_give_without_graphs(rng):
    model = make("whisper")
    other = patched(model)
    features = torch.randn(2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
    for _ in range(20):
        labels = drawn(rng, "whisper", rng.randrange(4, 25), "right", labels=1.0)["labels"]
        batch = {"input_features": features, "labels": labels}
        assert_same(outcome(other, batch), outcome(model, batch), rtol=1e-3, atol=1e-5)
    assert other.report.graphs["replayed"] >= 5


@pytest.mark.parametrize(("least", "most", "rows", "pairs"), [
    (100, 500, 1, 1), (100, 500, 8, 1), (1, 128, 1, 1), (20, 2000, 1, 1), (400, 420, 1, 1), (1, 30, 4, 1),
    (100, 500, 8, 2),
])  # fmt: skip
def test_few_lengths_have_graphs_and_calls_are_filled_up_little(least, most, rows, pairs, rng):
    added = tokens = 0
    for _ in range(20):
        lengths, captured, captures = buckets.Lengths((None,) * pairs), [], 0
        for call in range(60):
            length = tuple(max(rng.randint(least, most) for _ in range(rows)) for _ in range(pairs))
            lengths.see(length)
            if call < BEFORE:
                continue
            chosen = lengths.choose(length, captured)
            assert buckets.covers(chosen, length)
            if chosen not in captured:
                captured = [chosen, *(captured if any(buckets.covers(each, chosen) for each in captured) else ())]
                captures += 1
            added, tokens = added + sum(chosen) - sum(length), tokens + sum(length)
        assert len(captured) <= buckets._MOST_BUCKETS
        assert captures <= 40
    assert added <= (0.12 if pairs == 1 else 0.2) * tokens


def test_between_captures_the_shortest_lengths_that_have_graphs_serve():
    lengths = buckets.Lengths((None,))
    for length in (500, 300, 120, 480):
        lengths.see((length,))
    longest = lengths.choose((120,), [], more=False)  # nothing is captured yet
    assert longest[0] >= 500
    assert lengths.choose((120,), [longest], more=False) == longest
    shorter = lengths.choose((120,), [longest])
    assert (120,) <= shorter < (130,)
    assert lengths.choose((130,), [longest, (256,), shorter], more=False) == (256,)
    lengths.see((700,))
    assert lengths.choose((700,), [longest], more=False)[0] >= 700


def steps(family, lengths, style="none", seed=0):
    rng = random.Random(seed)
    return [drawn(rng, family, length, style, labels=1.0) for length in lengths]


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_labels_without_a_length_give_the_models_own_error(family):
    model = make(family)
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "labels": torch.tensor(1)}
    errors = []
    for each in (model, patched(model)):
        with pytest.raises(Exception) as raised:  # noqa: PT011  which one is the model's affair
            each(**batch)
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1]


def test_no_bucket_is_longer_than_the_model_allows():
    model = make("gpt2")
    other = patched(model)
    assert_steps_agree(model, other, steps("gpt2", [50, 64, 40, 63, 45, 61, 39, 64, 40, 64]))
    assert other.report.graphs["replayed"] >= 4


def test_one_length_has_graphs_of_its_own_and_a_last_batch_runs_as_it_is():
    model = make("llama")
    other = patched(model)
    assert_steps_agree(model, other, steps("llama", [13] * 8 + [5] + [13] * 4))
    outcomes = other.report.graphs
    assert outcomes["captured"] == 1
    assert outcomes["replayed"] == sum(outcomes[key] for key in outcomes if key != "captured") - BEFORE - 1
    ((_, length),) = other.__dict__["_accelerant_patch"].graphs._captured
    assert length == (13,)


def test_the_largest_bucket_is_captured_first_and_all_share_its_memory():
    other = patched(make("llama"))
    graphs_of = other.__dict__["_accelerant_patch"].graphs
    for batch in steps("llama", [20, 24, 20, 24, 11, 24, 11, 24, 11, 24] * 2):
        outcome(other, batch)
        for line in graphs_of._lines.values():
            assert list(line.graphs) == sorted(line.graphs, reverse=True)
            assert len({id(each.pool.handle) for each in line.graphs.values()}) <= 1
            kept = [grad.data_ptr() for each in line.graphs.values() for grad in each._grads if grad is not None]
            assert len(kept) == len(set(kept)) * max(1, len(line.graphs))
    for batch in steps("llama", [40, 12, 40, 12]):
        outcome(other, batch)
    (line,) = graphs_of._lines.values()
    assert next(iter(line.graphs)) >= (40,)
    assert len({id(each.pool) for each in line.graphs.values()}) == 1


def test_graphs_that_give_way_to_longer_ones_leave_their_memory_though_their_last_loss_is_kept():
    other = patched(make("llama"))
    graphs_of = other.__dict__["_accelerant_patch"].graphs
    for batch in steps("llama", [20, 24, 20, 24, 11, 24, 20]):
        loss = other(**batch).loss
        loss.backward(retain_graph=True)
        other.zero_grad()
    (line,) = graphs_of._lines.values()
    held = [weakref.ref(x) for each in line.graphs.values() for x in (*each.outputs, *each.out_grads) if x is not None]
    assert len(held) > 1
    for longer in steps("llama", [40, 40]):
        other(**longer).loss.backward()
    assert next(iter(line.graphs)) >= (40,)
    assert {ref() for ref in held} == {None}
    wanted, found = copy.deepcopy(other), other
    acl.nn.unpatch(wanted)
    for each, last in ((wanted, lambda: wanted(**batch).loss), (found, lambda: loss)):
        each.zero_grad()
        last().backward()  # once more
    for one, two in zip(wanted.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-3, atol=1e-5)


def test_gradients_of_embeddings_have_the_callers_length():
    model = make("llama")
    other = patched(model)
    for step, length in enumerate((12, 20, 9, 17, 20, 11)):
        found = []
        for each in (model, other):
            torch.manual_seed(step)
            x = torch.randn(2, length, 48, requires_grad=True)
            each(inputs_embeds=x, labels=torch.ones(2, length, dtype=torch.int64), use_cache=False).loss.backward()
            found.append(x.grad)
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)
    assert other.report.graphs["replayed"] == 3


def test_the_number_of_items_in_a_batch_makes_no_graph_of_its_own():
    model = make("llama")
    other = patched(model)
    batches = [batch | {"num_items_in_batch": 3 + step} for step, batch in enumerate(steps("llama", [9, 14, 20] * 4))]
    assert_steps_agree(model, other, batches)
    assert other.report.graphs["replayed"] == len(batches) - BEFORE


def test_outputs_are_those_of_the_call_as_tuples_and_with_hidden_states_too():
    model = make("llama")
    other = patched(model)
    for options in ({"return_dict": False}, {"output_hidden_states": True}):
        for batch in steps("llama", [9, 14, 20, 14, 8, 12, 20, 10]):
            one, two = (tuple(each(**batch, **options).to_tuple() if "output_hidden_states" in options
                              else each(**batch, **options)) for each in (model, other))  # fmt: skip
            for a, b in zip(one, two, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5)
    assert other.report.graphs["replayed"] >= 2


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_with_dropout_lengths_are_tried_in_evaluation_which_is_over_afterwards(family):
    more = {"resid_pdrop": 0.1} if family == "gpt2" else {"hidden_dropout_prob": 0.1}
    model = make(family, **more)
    acl.nn.patch(model, graph=False)
    list(model.modules())[-2].eval()
    was = [module.training for module in model.modules()]
    (batch,) = steps(family, [9])
    call = buckets.Buckets(model).call((tuple(batch), None, None), list(batch.values()))
    state = torch.get_rng_state()
    padding = buckets.tried(model, call, (12,), model, draws=True)
    assert padding.dims == (None, (1, 0))
    assert [module.training for module in model.modules()] == was
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(buckets.Untrue, match="depend on"):
        buckets.tried(model, call, (12,), model, draws=False)


@pytest.mark.filterwarnings("ignore::accelerant.errors.FallbackWarning")
def test_a_step_with_two_lengths_has_memory_for_each():
    model = make("llama")
    other = patched(model)
    batches = steps("llama", [9, 14] * 16)
    for one, two in zip(batches[::2], batches[1::2], strict=True):
        found = []
        for each in (model, other):
            each.zero_grad()
            (each(**one).loss * each(**two).loss).backward()
            found.append([p.grad.clone() for p in each.parameters()])
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
    captured = other.__dict__["_accelerant_patch"].graphs._captured
    assert len({id(each.pool) for each in captured.values()}) >= 2


def test_memory_that_runs_out_in_a_capture_leaves_the_model_as_it_was(monkeypatch):
    model = make("llama")
    other = copy.deepcopy(model)
    report = acl.nn.patch(other)

    monkeypatch.setattr(Rerun, "capture", Mock(side_effect=torch.OutOfMemoryError("no memory")))
    batches = steps("llama", [9, 14, 20] * 4)
    with pytest.warns(FallbackWarning, match="memory ran out while its graphs were captured") as warned:
        assert_steps_agree(model, other, batches)
    assert len(warned) == 1
    assert not other.__dict__["_accelerant_patch"].graphs._lines
    assert report.graphs["eager: memory ran out while its graphs were captured"] == len(batches) - BEFORE


def config(kind, **more):
    base = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0,
            "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    return kind(**{**base, **more})


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more}


@pytest.mark.parametrize(("make_model", "reason"), [
    (lambda: make("mixtral"), "experts count the tokens"),
    (lambda: transformers.LEDModel(transformers.LEDConfig(vocab_size=9, d_model=8, encoder_layers=1,
        encoder_attention_heads=1, decoder_layers=1, decoder_attention_heads=1)), "has an attention of its own"),
    (lambda: transformers.BertForQuestionAnswering(transformers.BertConfig(vocab_size=99, hidden_size=32,
        num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)), "QuestionAnswering may count"),
    (lambda: transformers.LlamaForCausalLM(config(transformers.LlamaConfig, rope_parameters=rope("dynamic"))),
     "rotary embedding depends on the length"),
    (lambda: transformers.LlamaForSequenceClassification(config(transformers.LlamaConfig, pad_token_id=None)),
     "without a pad_token_id"),
    (lambda: torch.nn.Linear(3, 3), "positions of a Linear are independent"),
])  # fmt: skip
def test_models_that_count_positions_keep_their_lengths(make_model, reason):
    assert reason in buckets.obstacle(make_model())


def test_a_model_whose_results_depend_on_the_length_keeps_it_and_says_so(monkeypatch):
    model = make("llama")
    inner = type(model.model.norm).forward

    def leaks(self, x):
        return inner(self, x) + x.mean(1, keepdim=True)

    monkeypatch.setattr(type(model.model.norm), "forward", leaks)
    other = patched(model)
    with pytest.warns(FallbackWarning, match="depend on the tokens that pad"):
        assert_steps_agree(model, other, steps("llama", [9, 14, 20, 9, 14, 20] * 4))
    assert any("not padded to share CUDA graphs: its results depend" in note for note in other.report.notes)
    captured = other.__dict__["_accelerant_patch"].graphs._captured
    assert captured  # each length its own
    assert all(each.padding is None for each in captured.values())


SMALL = {
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "n_embd": 48, "n_layer": 1, "n_head": 3,
    "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dim": 48, "hidden_dim": 80,
    "n_layers": 1, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 32,
    "layerdrop": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    ["LlamaForSequenceClassification", "BertModel", "BertForSequenceClassification", "BertForTokenClassification",
     "GPT2ForSequenceClassification", "GPT2Model", "Qwen3ForTokenClassification", "DistilBertForMaskedLM",
     "OPTForCausalLM", "XLMRobertaForSequenceClassification"],
)  # fmt: skip
def test_heads_and_bare_models_give_what_they_give_without_graphs(name, rng):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(config(kind.config_class, bos_token_id=1, eos_token_id=2, **SMALL)).train()
    other = patched(model)
    for _ in range(12):
        family = "roberta" if "Roberta" in name else "bert"
        batch = drawn(rng, family, rng.randrange(8, 49), rng.choice(["none", "right"]), labels=1.0)
        if "SequenceClassification" in name:
            batch["labels"] = torch.tensor([0, 1])
        elif "TokenClassification" in name:
            batch["labels"] = batch["labels"].clamp(max=1)
        elif name.endswith("Model"):
            del batch["labels"]
        if name.startswith(("GPT2", "Qwen3", "Llama", "OPT")):
            batch["use_cache"] = False
        found = []
        for each in (model, other):
            each.zero_grad()
            output = each(**batch)
            loss = output.loss if "labels" in batch else output.last_hidden_state.sin().mean()
            loss.backward()
            found.append((loss.detach(), [p.grad.clone() for p in each.parameters() if p.grad is not None]))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
    assert other.report.graphs["replayed"] >= 4


def without_labels(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_evaluation_runs_from_graphs_at_any_lengths(family, mode, rng):
    model = make(family).eval()
    other = copy.deepcopy(model)
    report = acl.nn.patch(other, graph=True)
    kept = []
    for step in range(24):
        batch = drawn(rng, family, rng.randrange(6, 49), "right" if rng.random() < 0.5 else "none")
        with mode():
            one, two = model(**batch), other(**batch)
            kept.append((one.logits, two.logits))
        if step == 16:  # as an optimizer does
            for each in (model, other):
                each.lm_head.weight.data.mul_(2) if family == "qwen3" else next(each.parameters()).data.mul_(2)
    for one, two in kept:
        torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-5)
    assert report.graphs["replayed"] >= 6


@pytest.mark.slow
def test_training_and_evaluation_in_turns_have_graphs_of_their_own(rng):
    model = make("bert")
    other = patched(model)
    for _ in range(24):
        batch = drawn(rng, "bert", rng.randrange(6, 49), "right", labels=1.0)
        assert_same(outcome(other, batch), outcome(model, batch), rtol=1e-3, atol=1e-5)
        with torch.no_grad():
            for each in (model, other):
                each.eval()
                for param in each.parameters():
                    param.sub_(param.grad, alpha=1e-3)
            found = [each(**without_labels(batch)).logits for each in (model, other)]
            torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
        model.train()
        other.train()
    assert other.report.graphs["replayed"] == 2 * (24 - BEFORE)
