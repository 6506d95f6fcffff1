import dataclasses
import itertools

import pytest
import torch

from accelerant.nn import GPT, GPTConfig
from accelerant.nn.train.optim import (
    expected_optimizer_tensors,
    learning_rate,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=64, context=4, layers=1, heads=1, width=8))


def test_the_schedule_warms_up_and_falls(recipe):
    recipe = dataclasses.replace(recipe, steps=100, warmup=0.1, learning_rate=1.0, final_lr_ratio=0.02)
    rates = [learning_rate(recipe, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.51)  # half-way down the cosine
    assert rates[99] == pytest.approx(0.02, abs=0.001)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_one_step_runs_have_a_rate(recipe):
    assert learning_rate(dataclasses.replace(recipe, steps=1), 0) == recipe.learning_rate


def test_only_matrices_decay(model, recipe):
    decaying, rest = make_optimizer(model, recipe).param_groups
    assert decaying["weight_decay"] == recipe.weight_decay
    assert {parameter.dim() for parameter in decaying["params"]} == {2}
    assert rest["weight_decay"] == 0
    assert {parameter.dim() for parameter in rest["params"]} == {1}
    assert len(decaying["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_state_comes_back_and_the_next_step_is_the_same(model, recipe):
    idx = torch.arange(4)[None]

    def step(model, optimizer):
        optimizer.zero_grad()
        model.loss(idx, idx.flip(1)).backward()
        optimizer.step()

    optimizer = make_optimizer(model, recipe)
    assert optimizer_tensors(model, optimizer) == {}
    step(model, optimizer)
    state = {name: tensor.clone() for name, tensor in optimizer_tensors(model, optimizer).items()}
    expected = expected_optimizer_tensors(model)
    assert {name: tensor.shape for name, tensor in state.items()} == {n: t.shape for n, t in expected.items()}
    other = GPT(model.config)
    other.load_state_dict(model.state_dict())
    restored = make_optimizer(other, recipe)
    load_optimizer_tensors(other, restored, state)
    step(model, optimizer)
    step(other, restored)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
