"""The fused blocks of a GPU, run on the CPU: what they give the sink."""

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from accelerant.errors import ShapeError
from accelerant.nn import GPT, MLP, GPTConfig, layers
from accelerant.privacy.dp.clipping import PerExampleClipper
from accelerant.privacy.dp.training.separation import SeparationCheck
from modules import module

BOUND = 0.5


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setattr(layers, "FUSED", {"cpu"})


def nodes(loss):
    found, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [each for each, _ in node.next_functions]
    return {type(node).__name__ for node in found}


def one_by_one(model, idx, targets):
    """The sum of clipped gradients, each example in a pass of its own."""
    sums = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    for i in range(len(idx)):
        model.zero_grad()
        model.loss(idx[i : i + 1], targets[i : i + 1]).backward()
        norm = sum(each.grad.double().square().sum() for each in model.parameters()).sqrt()
        for name, each in model.named_parameters():
            sums[name] += min(1.0, BOUND / float(norm)) * each.grad
    model.zero_grad()
    return sums


@pytest.mark.sample(3)
@pytest.mark.parametrize(("bias", "tied"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(
    "T", [8, 40]
)  # shorter and longer than the width: the output layer's gradients unformed, formed
def test_a_gpt_of_fused_blocks(fused, T, bias, tied):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=50, context=64, layers=2, heads=2, width=32, bias=bias, tied=tied))
    rows = torch.randint(0, 50, (5, T + 1))
    idx, targets = rows[:, :-1], rows[:, 1:]
    wanted = one_by_one(model, idx, targets)
    clipper = PerExampleClipper(model, max_grad_norm=BOUND)
    loss = model.loss(idx, targets)
    assert {"BlockBackward", "EmbedBackward", "TiedLossBackward"} <= nodes(loss)
    loss.backward()
    for name, each in model.named_parameters():
        error = (each.grad - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-12)
        assert error < 3e-6, name  # norms are bounds, of T = 8 products
    clipper.detach()
    model.zero_grad()
    model.loss(idx, targets).backward()  # an ordinary pass again, still fused
    assert "BlockBackward" in nodes(model.loss(idx, targets))
    assert all(each.grad is not None for each in model.parameters())


def test_frozen_parameters_cost_nothing(fused):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=50, context=64, layers=2, heads=2, width=32))
    for name, each in model.named_parameters():
        each.requires_grad_("blocks.1" in name)
    rows = torch.randint(0, 50, (3, 9))
    clipper = PerExampleClipper(model, max_grad_norm=BOUND)
    model.loss(rows[:, :-1], rows[:, 1:]).backward()
    assert {name for name, each in model.named_parameters() if each.grad is not None} == {
        name for name, _ in clipper.parameters
    }


@pytest.mark.parametrize("B", [5, 32])  # 32: the width, which a mistaken shape would pass for
def test_a_frozen_block_behind_one_that_learns(fused, B):
    """What it leaves for the bias before it are sums over all examples."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=50, context=64, layers=2, heads=2, width=32))
    rows = torch.randint(0, 50, (B, 9))
    for name, each in model.named_parameters():
        each.requires_grad_("blocks.0" in name)
    found = {}
    for kind in ("cpu", "none"):
        layers.FUSED = {kind}
        model.zero_grad()
        clipper = PerExampleClipper(model, max_grad_norm=BOUND)
        loss = model.loss(rows[:, :-1], rows[:, 1:])
        assert ("BlockBackward" in nodes(loss)) == (kind == "cpu")
        loss.backward()
        clipper.detach()
        found[kind] = torch.cat([each.grad.flatten() for _, each in clipper.parameters])
    assert (found["cpu"] - found["none"]).norm() < 2e-6 * found["none"].norm()


def test_another_forward_pass_may_come_between(fused):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=50, context=64, layers=1, heads=2, width=32))
    rows = torch.randint(0, 50, (4, 9))
    idx, targets = rows[:, :-1], rows[:, 1:]
    wanted = one_by_one(model, idx, targets)
    PerExampleClipper(model, max_grad_norm=BOUND)
    loss = model.loss(idx, targets)
    model.loss(idx[:2], targets[:2])  # of two examples, and dropped
    loss.backward()
    for name, each in model.named_parameters():
        assert (each.grad - wanted[name]).norm() < 2e-6 * wanted[name].norm().clamp(min=1e-12) + 1e-7, name


def test_a_layer_that_does_not_get_the_examples_first_is_refused(fused):
    model = module(lambda m, x: m.mlp(x.transpose(0, 1)), mlp=MLP(32))
    PerExampleClipper(model, max_grad_norm=BOUND)
    with pytest.raises(ShapeError, match="batch of 3 examples"):
        model(torch.randn(3, 5, 32))


@pytest.mark.parametrize("T", [8, 40])
@pytest.mark.parametrize("where", ["hooks", "checkpoint", "check"])
def test_saved_tensors_that_are_copies(fused, where, T):
    """Hooks on saved tensors, of a checkpoint or of the check of a first batch, return parameters without a sink."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=50, context=64, layers=2, heads=2, width=32))
    rows = torch.randint(0, 50, (4, T + 1))
    idx, targets = rows[:, :-1], rows[:, 1:]
    wanted = one_by_one(model, idx, targets)
    clipper = PerExampleClipper(model, max_grad_norm=BOUND)
    if where == "checkpoint":
        checkpoint(model.loss, idx, targets, use_reentrant=False).backward()
    elif where == "hooks":
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            model.loss(idx, targets).backward()
    else:
        check = SeparationCheck(clipper)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "it was not checked"
            check.before_forward((idx,), {})
        assert not check.pending
        model.loss(idx, targets).backward()
    for name, each in model.named_parameters():
        assert (each.grad - wanted[name]).norm() < 3e-6 * wanted[name].norm().clamp(min=1e-12), name
