import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerant.errors import ConfigError, FormatError, UnsupportedCase
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.optim import SGD, AdamW
from accelerant.nn.train import TrainConfig
from accelerant.nn.train.checkpoint import load_optimizer, optimizer_state, require_optimizer_tensors
from accelerant.nn.train.objective import learning_rate, make_optimizer
from refusals import assert_raises

CONFIG = TrainConfig(weight_decay=0.1)
WHERE = Path("some.safetensors")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=64, context=4, layers=1, heads=1, width=8))


def rates(steps=100, **changes):
    config = TrainConfig(**{"learning_rate": 1.0, "warmup": 0.1, "final_lr_ratio": 0.02, **changes})
    return [learning_rate(config, steps, step) for step in range(steps)]


def test_the_schedule_warms_up_and_falls_along_a_cosine():
    found = rates()
    assert found[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert found[10] == pytest.approx(1.0)
    assert found[55] == pytest.approx(0.51)  # half-way down the cosine
    assert found[99] == pytest.approx(0.02, abs=0.001)
    assert all(a > b for a, b in itertools.pairwise(found[10:]))


def test_the_other_schedules():
    linear = rates(schedule="linear")
    assert linear[55] == pytest.approx(0.51)
    assert linear[78] - linear[77] == pytest.approx(linear[20] - linear[19])
    assert set(rates(schedule="constant")[10:]) == {1.0}
    assert rates(schedule="constant", warmup=0.0) == [1.0] * 100
    assert rates(warmup=0.0)[0] == 1.0


def test_one_step_runs_have_a_rate():
    assert rates(steps=1) == [1.0]


def test_only_matrices_decay(model):
    decaying, rest = make_optimizer(model, CONFIG).param_groups
    assert decaying["weight_decay"] == 0.1
    assert {parameter.dim() for parameter in decaying["params"]} == {2}
    assert rest["weight_decay"] == 0
    assert {parameter.dim() for parameter in rest["params"]} == {1}
    assert len(decaying["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_names_may_be_spared_from_decay_and_frozen_parameters_are_left_out(model):
    model.wpe.weight.requires_grad_(False)
    config = TrainConfig(weight_decay=0.1, no_decay=("wte*",))
    decaying, rest = make_optimizer(model, config).param_groups
    every = [*decaying["params"], *rest["params"]]
    assert any(parameter is model.wte.weight for parameter in rest["params"])
    assert not any(parameter is model.wpe.weight for parameter in every)
    with pytest.raises(ConfigError, match=r"no_decay: 'word\*' matches no parameter of GPT"):
        make_optimizer(model, TrainConfig(no_decay=("word*",)))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert_raises(ConfigError, "GPT has no parameter that requires a gradient", make_optimizer, model, CONFIG)


def test_the_config_chooses_the_optimiser_and_its_numbers(model):
    adam = make_optimizer(model, TrainConfig(betas=(0.8, 0.9), eps=1e-6, max_grad_norm=2.0))
    assert isinstance(adam, AdamW)
    assert (adam.defaults["betas"], adam.defaults["eps"], adam.defaults["max_grad_norm"]) == ((0.8, 0.9), 1e-6, 2.0)
    sgd = make_optimizer(model, TrainConfig(optimizer="sgd", momentum=0.5, max_grad_norm=None))
    assert isinstance(sgd, SGD)
    assert (sgd.defaults["momentum"], sgd.defaults["max_grad_norm"]) == (0.5, None)


def step(model, optimizer):
    idx = torch.arange(4)[None]
    optimizer.zero_grad()
    model.loss(idx, idx.flip(1)).backward()
    optimizer.step()


MAKERS = {
    "adamw": lambda model: make_optimizer(model, CONFIG),
    "sgd": lambda model: make_optimizer(model, TrainConfig(optimizer="sgd")),
    "torch adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "torch adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
    "torch asgd": lambda model: torch.optim.ASGD(model.parameters(), foreach=False),
}


@pytest.mark.parametrize("name", MAKERS)
def test_state_comes_back_and_the_next_step_is_the_same(model, name):
    optimizer = MAKERS[name](model)
    step(model, optimizer)
    tensors, numbers = optimizer_state(model, optimizer)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    assert tensors
    other = GPT(model.config)
    other.load_state_dict(model.state_dict())
    restored = MAKERS[name](other)
    require_optimizer_tensors(WHERE, other, restored, tensors)
    load_optimizer(other, restored, tensors, numbers)
    step(model, optimizer)
    step(other, restored)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_state_of_torchs_adamw_is_one_of_ours(model):
    """As checkpoints hold it that were written before our optimizer was the one."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, optimizer)
    tensors, numbers = optimizer_state(model, optimizer)
    ours = make_optimizer(model, CONFIG)
    require_optimizer_tensors(WHERE, model, ours, tensors)
    load_optimizer(model, ours, tensors, numbers)
    after, _ = optimizer_state(model, ours)
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[name], tensors[name]) for name in tensors)


def test_another_models_state_is_refused(model):
    optimizer = make_optimizer(model, CONFIG)
    step(model, optimizer)
    tensors, _ = optimizer_state(model, optimizer)
    with pytest.raises(FormatError, match=r"another model: optimizer.head.weight.exp_avg belongs to no parameter"):
        require_optimizer_tensors(WHERE, model, optimizer, {**tensors, "head.weight.exp_avg": torch.zeros(2)})
    with pytest.raises(FormatError, match=r"another shape: optimizer.wpe.weight.exp_avg is \(4, 9\), not \(4, 8\)"):
        require_optimizer_tensors(WHERE, model, optimizer, {**tensors, "wpe.weight.exp_avg": torch.zeros(4, 9)})
    del tensors["wpe.weight.exp_avg_sq"]
    with pytest.raises(FormatError, match=r"another model: optimizer.wpe.weight.exp_avg_sq is not in it"):
        require_optimizer_tensors(WHERE, model, optimizer, tensors)


def test_state_that_no_file_can_hold_is_refused():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(layer.parameters())
    optimizer.step(lambda: layer(torch.ones(1, 2)).sum())
    optimizer.state[layer.weight]["old"] = [torch.ones(2)]
    assert_raises(UnsupportedCase, r"LBFGS keeps a list \(old of weight\)", optimizer_state, layer, optimizer)
