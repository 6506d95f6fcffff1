import dataclasses
import re

import pytest
import torch
from problems import Convolutional, Dense, digits, spiral
from torch import nn
from torch.utils.data import TensorDataset

from accelerant.errors import DivergenceError, FormatError
from accelerant.nn.train import TrainConfig, fit
from accelerant.nn.train.checkpoint import load_checkpoint
from accelerant.nn.train.data import permutation

CONFIG = TrainConfig(steps=20, batch_size=8, learning_rate=1e-2, device="cpu", predict_memory=False, checkpoint_every=3)


class Breaks(nn.Module):
    """Gives something else than numbers at one call of the training."""

    def __init__(self, at, how):
        super().__init__()
        self.at, self.how = at, how

    def forward(self, x):
        if self.training:
            self.at -= 1
        if self.at > 0 or not self.training:
            return x
        if self.how == "output":
            return x / (x - x)
        return x + (x - x).abs().sqrt()  # finite, with a gradient that is not


def model(at, how="output"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Sequential(nn.Tanh(), Breaks(at, how)), nn.Linear(8, 3))


def failed(*arguments, **options):
    with pytest.raises(DivergenceError) as error:
        fit(*arguments, **options)
    return str(error.value)


def test_the_step_the_module_and_the_last_good_checkpoint_are_named(tmp_path):
    net = model(at=8)
    config = dataclasses.replace(CONFIG, out=str(tmp_path))
    text = failed(net, *spiral(40, 0), config)
    path = tmp_path / "checkpoint.safetensors"
    assert re.fullmatch(
        r"training diverged at step 8: loss (nan|inf), gradient norm nan; first not finite: the output of 1\.1 "
        rf"\(Breaks\); the last good checkpoint, of step 6, is kept in {re.escape(str(path))}",
        text,
    )
    assert load_checkpoint(path)[1]["step"] == 6


def test_the_parameters_are_those_before_the_step():
    net = model(at=3)
    failed(net, *spiral(40, 0), CONFIG)
    torch.manual_seed(0)
    straight = model(at=99)
    fit(straight, *spiral(40, 0), dataclasses.replace(CONFIG, steps=2, warmup=0.0, schedule="constant"))
    other = model(at=3)
    failed(other, *spiral(40, 0), dataclasses.replace(CONFIG, warmup=0.0, schedule="constant"))
    for a, b in zip(other.parameters(), straight.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(parameter.isfinite().all() for parameter in net.parameters())


def test_a_gradient_that_is_not_finite_names_where_it_came_from():
    text = failed(model(at=4, how="gradient"), *spiral(40, 0), CONFIG)
    assert re.search(
        r"step 4: loss \d\.\d+, gradient norm nan; first not finite: the gradient at the output of 1\.0", text
    )
    assert text.endswith("there is no checkpoint: the training has no folder")


def test_the_part_of_an_accumulated_step_is_named():
    class Large(nn.Module):
        def forward(self, x):
            return torch.where(x > 1e20, x * 1e38, x)

    x, y = spiral(40, 0)
    x[7, 0] = 1e21
    place = permutation(0, 0, 40).tolist().index(7)
    text = failed(nn.Sequential(Large(), Dense(8)), x, y, dataclasses.replace(CONFIG, accumulate=4))
    assert f"at step {place // 8 + 1}: " in text
    assert f"the output of 0 (Large), in part {place % 8 // 2 + 1} of 4" in text


def test_data_that_are_not_finite_are_named():
    x, y = spiral(40, 0)
    x[7, 1] = torch.nan
    text = failed(model(at=99), x, y, CONFIG)
    assert "tensor 0 of the batch is not finite" in text


def test_a_loss_that_is_not_finite_by_itself():
    text = failed(model(at=99), *spiral(40, 0), CONFIG, loss=lambda outputs, _: outputs.sum() / 0.0)
    assert "the loss itself, while every module's output is finite" in text


def test_an_overflow_of_the_parameters_is_named():
    config = dataclasses.replace(
        CONFIG, learning_rate=1e38, max_grad_norm=None, optimizer="sgd", warmup=0.0, weight_decay=0.0
    )
    text = failed(Dense(8), *spiral(40, 0), config)
    assert "diverged at step 2: " in text
    assert re.search(r"first not finite: the (output of \w+ \(\w+\)|loss itself)|was not finite before", text)


def test_statistics_that_the_step_spoilt_do_not_hide_the_cause():
    x, y = digits(40, 0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(1), Breaks(3, "output"), nn.Unflatten(1, (1, 8, 8)), Convolutional())
    assert "the output of 1 (Breaks)" in failed(net, x, y, CONFIG)


# --- where the host sees it later, as on a GPU -----------------------------------------------------------------------
class Large(nn.Module):
    def forward(self, x):
        return torch.where(x > 1e20, x * torch.inf, x)


@pytest.fixture
def late(monkeypatch):
    """No look before the update: the parameters are no numbers any more when the loss is read."""
    monkeypatch.setattr("accelerant.nn.train.callbacks._CHECKED", ())


def broken(kind, folder, every=5, **changes):
    """A training that fails at step 14, row 3 of the batch; its text, and the model."""
    x, y = spiral(400, 0)
    x[int(permutation(0, 0, 400)[8 * 13 + 3]), 0] = 1e21
    data = {"tensors": (x, y), "dataset": (TensorDataset(x, y), None)}[kind]
    torch.manual_seed(0)
    net = nn.Sequential(Large(), Dense(8, dropout=0.2))
    config = dataclasses.replace(CONFIG, out=str(folder), checkpoint_every=every, **changes)
    return failed(net, *data, config), net


@pytest.mark.parametrize("kind", ["tensors", "dataset"])
def test_the_steps_since_the_checkpoint_are_done_again(late, tmp_path, monkeypatch, kind):
    text, net = broken(kind, tmp_path / "late")
    assert "at step 14: " in text
    assert re.search(
        r"first not finite: the output of 0 \(Large\); the last good checkpoint, of step 10, is kept", text
    )
    monkeypatch.setattr("accelerant.nn.train.callbacks._CHECKED", ("cpu",))
    _, looked = broken(kind, tmp_path / "looked")
    for a, b in zip(net.parameters(), looked.parameters(), strict=True):
        assert torch.equal(a, b)  # those before the step, by both ways


def test_without_a_checkpoint_it_begins_with_the_first_parameters(late, tmp_path):
    for folder in ("", tmp_path / "run"):
        text, net = broken("tensors", folder, every=None, accumulate=2)
        assert "the output of 0 (Large), in part 1 of 2; there is no checkpoint" in text
        assert all(parameter.isfinite().all() for parameter in net.parameters())


def test_what_is_too_far_back_is_not_done_again(late, tmp_path, monkeypatch):
    monkeypatch.setattr("accelerant.nn.train.callbacks._MAX_REPEATED_STEPS", 2)
    text, _ = broken("tensors", tmp_path)
    assert "not diagnosed: the last saved state is 3 steps back; the last good checkpoint, of step 10" in text


def test_a_checkpoint_that_was_torn_meanwhile_hides_the_cause_but_not_the_error(late, tmp_path, monkeypatch):
    monkeypatch.setattr("accelerant.nn.train.checkpoint.Checkpoints.load", torn)
    text, _ = broken("tensors", tmp_path)
    assert "at step 14: " in text
    assert "not diagnosed: torn; " in text


def torn(_):
    raise FormatError("torn")
