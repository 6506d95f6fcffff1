"""patch: blocks as one autograd function, and when they are not."""

import pytest
import torch
from patch_models import CAUSAL, assert_same, batch, make, outcome
from torch import nn

import accelerant as acl
from accelerant.nn._patch import blocks

TIGHT = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture
def fused(monkeypatch):
    """How many blocks ran as one function."""
    counted = []
    for name in ("DecoderLayer", "GPT2Block"):
        function = getattr(blocks, name)

        class Counting:
            @staticmethod
            def apply(*arguments, function=function):
                counted.append(function.__name__)
                return function.apply(*arguments)

        monkeypatch.setattr(blocks, name, Counting)
    return counted


@pytest.mark.parametrize("family", CAUSAL)
def test_a_training_step_is_fused(family, fused):
    model, inputs = make(family), batch(family)
    before = outcome(model, inputs)
    acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert len(fused) == 2


def test_biases_everywhere(fused):
    model, inputs = make("llama", attention_bias=True, mlp_bias=True), batch("llama")
    before = outcome(model, inputs)
    acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert len(fused) == 2


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("which", ["norms and biases", "all but the first layer's last", "none of the blocks"])
def test_frozen_weights_get_no_gradient(family, which, fused):
    model, inputs = make(family), batch(family)
    for name, parameter in model.named_parameters():
        if which == "norms and biases":
            parameter.requires_grad_(not ("norm" in name or "ln_" in name or "bias" in name))
        elif which == "none of the blocks":
            parameter.requires_grad_(".0." not in name and ".1." not in name)
        else:
            parameter.requires_grad_(".0.mlp.c_proj" in name or ".0.mlp.down_proj" in name)
    before = outcome(model, inputs)
    acl.nn.patch(model)
    assert_same(outcome(model, inputs), before, **TIGHT)
    assert fused


@pytest.mark.parametrize("family", CAUSAL)
def test_gradients_of_embeddings_and_of_gradients(family, fused):
    model, plain = make(family), make(family, attn_implementation="eager")  # sdpa has no second derivative
    labels = batch(family)["labels"]
    start = torch.randn(2, 13, 48, generator=torch.Generator().manual_seed(2))

    def twice(model):
        x = start.clone().requires_grad_()
        loss = model(inputs_embeds=x, labels=labels).loss
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = loss + dx.square().sum()
        parameters = [p for n, p in model.named_parameters() if "mlp" in n]
        return dx.detach(), *torch.autograd.grad(penalty, parameters)

    acl.nn.patch(model)
    for a, b in zip(twice(model), twice(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert len(fused) == 2


@pytest.mark.parametrize(
    "change", ["cache", "hook", "adapter", "dropout", "autocast", "no gradient", "evaluation of attention weights"]
)
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_what_is_not_fused(family, change, fused):
    settings = {"attn_pdrop" if family == "gpt2" else "attention_dropout": 0.5} if change == "dropout" else {}
    model, inputs = make(family, **settings), batch(family)
    acl.nn.patch(model)
    block = (model.transformer.h if family == "gpt2" else model.model.layers)[0]
    other = 0
    if change == "cache":
        model(**inputs, use_cache=True).loss.backward()
    elif change == "hook":
        seen = []
        (block.mlp.c_fc if family == "gpt2" else block.mlp.up_proj).register_forward_hook(lambda *_: seen.append(1))
        outcome(model, inputs)
        assert seen == [1]
        other = 1
    elif change == "adapter":
        name = "c_proj" if family == "gpt2" else "down_proj"
        setattr(block.mlp, name, nn.Sequential(getattr(block.mlp, name)))
        outcome(model, inputs)
        other = 1
    elif change == "dropout":
        model(**inputs)
    elif change == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            model(**inputs)
    elif change == "no gradient":
        with torch.no_grad():
            model(**inputs)
    else:
        model.set_attn_implementation("eager")
        assert len(model(**inputs, output_attentions=True).attentions) == 2
    assert len(fused) == other


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("when", ["before", "after"])
def test_parts_that_were_exchanged_are_called(family, when, fused):
    class Half(nn.Module):
        def forward(self, x):
            return x * 0.5

    def exchange(model):
        if family == "gpt2":
            first, second = model.transformer.h
            first.mlp.dropout = Half()
            second.attn.resid_dropout = Half()
        else:
            first, second = model.model.layers
            first.mlp = Half()
            second.input_layernorm = Half()

    plain, model, inputs = make(family), make(family), batch(family)
    exchange(plain)
    if when == "before":
        exchange(model)
    acl.nn.patch(model)
    if when == "after":
        exchange(model)
    assert_same(outcome(model, inputs), outcome(plain, inputs), **TIGHT)
    assert not fused


@pytest.mark.parametrize("family", CAUSAL)
def test_hooks_on_all_modules_are_heard(family, fused):
    kind = "Conv1D" if family == "gpt2" else "Linear"

    def double(module, inputs, output):
        return output * 2 if type(module).__name__ == kind else None

    plain, model, inputs = make(family), make(family), batch(family)
    acl.nn.patch(model)
    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        assert_same(outcome(model, inputs), outcome(plain, inputs), **TIGHT)
    finally:
        handle.remove()
    assert not fused


def test_two_backward_passes(fused):
    model, inputs = make("llama"), batch("llama")
    acl.nn.patch(model)
    loss = model(**inputs).loss
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * first[name])


def test_saved_tensors_go_through_hooks(fused):
    model, inputs = make("llama"), batch("llama")
    acl.nn.patch(model)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        model(**inputs).loss.backward()
    assert len(packed) > 2 * 20
