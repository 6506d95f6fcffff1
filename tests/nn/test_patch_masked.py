"""patch: the loss of a masked language model without its logits."""

import pytest
import torch
from patch_models import assert_same, batch, make, outcome
from torch import nn

import accelerant as acl

TIGHT = {"rtol": 2e-5, "atol": 2e-6}


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
    class Half(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 0.5 * self.inner(x)

    def exchange(model):
        predictions = model.cls.predictions
        if part == "decoder":
            predictions.decoder = Half(predictions.decoder)
        elif part == "head":
            model.cls = Half(model.cls)
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
