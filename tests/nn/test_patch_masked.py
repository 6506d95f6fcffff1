"""patch: losses without logits, of masked language models, and of encoders and decoders."""

import copy

import pytest
import torch
import transformers
from patch_models import TIGHT, VOCABULARY, assert_same, batch, make, outcome

import accelerant as acl
from modules import module


@pytest.fixture
def counted(monkeypatch):
    """The calls of both losses, by their names."""
    calls = []
    for name in ("cross_entropy", "linear_cross_entropy"):
        original = getattr(acl.ops, name)

        def count(*args, function=original, name=name, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(acl.ops, name, count)
    return calls


def pair():
    model, inputs = make("bert"), batch("bert")
    with torch.no_grad():
        model.cls.predictions.bias.normal_()  # as large as the logits: a loss without it would be seen
    return model, inputs, outcome(model, inputs)


def test_the_loss_needs_no_logits(counted):
    model, inputs, before = pair()
    acl.nn.patch(model)
    output = model(**inputs)
    assert counted == ["linear_cross_entropy"]
    assert output.to_tuple()[1].source._value is None
    assert_same(outcome(model, inputs), before, **TIGHT)
    torch.testing.assert_close(output.logits, before[1], **TIGHT)


@pytest.mark.parametrize("why", ["loss=False", "evaluation", "no labels"])
def test_with_logits(why, counted):
    model, inputs, before = pair()
    acl.nn.patch(model, loss=why != "loss=False")
    if why == "evaluation":
        model.eval()
    if why == "no labels":
        del inputs["labels"]
    output = model(**inputs)
    torch.testing.assert_close(output["logits"], before[1], **TIGHT)
    assert type(dict(output)["logits"]) is torch.Tensor
    assert counted == ([] if why == "no labels" else ["cross_entropy"])


def test_tuples_and_hidden_states():
    model, inputs, _ = pair()
    calls = [
        {"return_dict": False},
        {"output_hidden_states": True},
        {"return_dict": False, "output_hidden_states": True},
    ]
    wanted = [model(**inputs, **call) for call in calls]
    acl.nn.patch(model)
    for call, each in zip(calls, wanted, strict=True):
        found = model(**inputs, **call)
        assert len(tuple(found)) == len(tuple(each))
        torch.testing.assert_close(found[0], each[0], **TIGHT)
        torch.testing.assert_close(found[1], each[1], **TIGHT)
        if "output_hidden_states" in call:
            torch.testing.assert_close(found[2], each[2], **TIGHT)


@pytest.mark.parametrize("part", ["decoder", "decoder without bias", "head"])
def test_a_head_that_was_exchanged_is_called(part, counted):
    def half(inner):
        return module(lambda m, x: 0.5 * m.inner(x), inner=inner)

    def exchange(model):
        predictions = model.cls.predictions
        if part == "decoder":
            predictions.decoder = half(predictions.decoder)
        elif part == "head":
            model.cls = half(model.cls)
        else:
            predictions.decoder.bias = None

    model, inputs, _ = pair()
    acl.nn.patch(model)
    exchange(model)
    plain = pair()[0]
    exchange(plain)
    with torch.no_grad():
        for to, given in zip(plain.parameters(), model.parameters(), strict=True):
            to.copy_(given)
    assert_same(outcome(model, inputs), outcome(plain, inputs), **TIGHT)
    assert counted == ["cross_entropy"]


PAIRS = {"d_model": 48, "d_ff": 80, "num_layers": 1, "encoder_layers": 1, "decoder_layers": 1, "d_kv": 12,
         "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 80,
         "decoder_ffn_dim": 80, "dropout": 0.0, "dropout_rate": 0.0, "vocab_size": VOCABULARY, "pad_token_id": 0,
         "eos_token_id": 2, "decoder_start_token_id": 0, "bos_token_id": 1}  # fmt: skip


@pytest.mark.parametrize("name", ["whisper", "T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_the_loss_of_a_decoder_needs_no_logits(name, counted):
    model, inputs = make("whisper"), batch("whisper")
    if name != "whisper":
        kind = getattr(transformers, name)
        torch.manual_seed(0)
        model, inputs = kind(kind.config_class(**PAIRS)).train(), batch("bert")
    other = copy.deepcopy(model)
    acl.nn.patch(other)
    other.__dict__["_accelerant_patch"].choice.fixed = True
    changed = name.startswith("Bart")  # by a bias that is added to them

    def both(each):
        """The outcome of a step in which the logits take part."""
        each.zero_grad()
        output = each(**inputs)
        lazy = getattr(output.to_tuple()[1], "source", None)
        assert (lazy is not None and lazy._value is None) is (each is other and not changed)
        (output.loss + output.logits.sin().mean()).backward()
        grads = {name: p.grad.clone() for name, p in each.named_parameters() if p.grad is not None}
        return output.loss.detach(), output.logits.detach(), grads

    assert_same(both(other), both(model), **TIGHT)
    assert counted == ["cross_entropy" if changed else "linear_cross_entropy"]
    assert_same(outcome(other, inputs), outcome(model, inputs), **TIGHT)
    assert "forward" not in other.get_output_embeddings().__dict__
