"""Copies and files of a model with a clipper attached are ordinary models."""

import copy
import io
import pickle

import pytest
import torch
from clip_checks import Chain, loss_of
from torch import nn

from accelerant.nn import GPT, GPTConfig
from accelerant.privacy.dp.clipping import PerExampleClipper


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


class Own(nn.Linear):
    """A class that says itself what its state is."""

    def __getstate__(self):
        return {**self.__dict__, "told": True}


def seen(module, *_):
    module.calls = getattr(module, "calls", 0) + 1


ways = pytest.mark.parametrize("way", [copy.deepcopy, pickled, saved])


@ways
def test_a_copy_has_nothing_of_the_clipper(way):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4).eval().requires_grad_(False)
    model, x = Chain(nn.Linear(6, 4), norm, Own(4, 3)), torch.randn(5, 6)
    model.register_forward_pre_hook(seen)  # the user's own goes along
    plain = [set(module.__dict__) for module in copy.deepcopy(model).modules()]
    loss_of(model, x).backward()
    expected = [each.grad.clone() for each in model.parameters() if each.requires_grad]
    model.zero_grad()
    clipper = PerExampleClipper(model, max_grad_norm=1e-3)
    other = way(model)
    assert clipper.norms is None
    other.layers[2].__dict__.pop("told")
    for module, names in zip(other.modules(), plain, strict=True):
        assert set(module.__dict__) - {"told", "calls"} == names - {"told", "calls"}
        assert not module._forward_hooks
        assert not module._forward_hooks_always_called
        assert not module._forward_pre_hooks_with_kwargs
        assert len(module._forward_pre_hooks) == (module is other)
    loss_of(other, x).backward()
    for each, gradient in zip([p for p in other.parameters() if p.requires_grad], expected, strict=True):
        torch.testing.assert_close(each.grad, gradient)
    assert clipper.norms is None
    other.zero_grad()
    again = PerExampleClipper(other, max_grad_norm=1e-3)
    for one, two in ((model, clipper), (other, again)):
        loss_of(one, x).backward()
        assert two.norms is not None
    torch.testing.assert_close(again.norms, clipper.norms)


@ways
def test_a_language_model_s_copy_learns_as_it_did(way):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=7, context=6, layers=1, heads=2, width=8))
    tokens = torch.randint(7, (2, 6))
    expected = torch.autograd.grad(model.loss(tokens, tokens), list(model.parameters()))
    PerExampleClipper(model, max_grad_norm=1e-3)
    other = way(model)
    assert set(other.__dict__) == set(GPT(model.config).__dict__)
    found = torch.autograd.grad(other.loss(tokens, tokens), list(other.parameters()))
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
