import dataclasses
import json
import logging
import math
import os
import signal
import sys
import types
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from problems import Convolutional, Dense, Recurrent, digits, first_sign, spiral
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accelerant.errors import (
    BackendUnavailable,
    ConfigError,
    DivergenceError,
    MissingDependency,
    ShapeError,
    UnsupportedCase,
)
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.train import Callback, Evaluation, PrintProgress, TrainConfig, Trainer, accuracy, fit
from accelerant.nn.train.checkpoint import load_checkpoint
from accelerant.nn.train.objective import Objective, evaluate
from modules import module
from refusals import assert_raises

QUICK = TrainConfig(steps=12, batch_size=16, learning_rate=1e-2, device="cpu", predict_memory=False)


def made(kind=Dense, *arguments, **options):
    torch.manual_seed(0)
    return kind(*arguments, **options)


def with_(config=QUICK, **changes):
    return dataclasses.replace(config, **changes)


# --- it learns -------------------------------------------------------------------------------------------------------
def test_a_spiral_is_learned():
    config = with_(steps=300, batch_size=64, learning_rate=2e-2)
    history = fit(made(), *spiral(600, 0), config, validation=spiral(200, 1))
    assert history.metrics["accuracy"] > 0.95
    assert history.status == "done"
    assert len(history.losses) == history.steps == 300
    assert [each.step for each in history.evaluations] == [60, 120, 180, 240, 300]


@pytest.mark.slow
def test_digits_are_learned_by_a_convolutional_net():
    config = TrainConfig(epochs=6, batch_size=50, learning_rate=1e-2, device="cpu")
    history = fit(made(Convolutional), *digits(1000, 0), config, validation=digits(300, 1))
    assert history.total_steps == 120
    assert history.metrics["accuracy"] > 0.9
    assert 0 < history.predicted_peak_bytes < history.expected_peak_bytes
    assert history.expected_peak_bytes == pytest.approx(history.peak_memory_bytes, rel=0.25)  # both of the process
    assert history.peak_memory_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_net_remembers_the_first_of_eight(kind):
    config = with_(steps=150, batch_size=64, learning_rate=3e-2)
    history = fit(made(Recurrent, kind), *first_sign(512, 0), config, validation=first_sign(200, 1))
    assert history.metrics["accuracy"] > 0.95


def test_a_regression_by_sgd_finds_the_line():
    x = torch.linspace(-1, 1, 64)[:, None]
    model = made(nn.Linear, 1, 1)
    config = with_(steps=200, learning_rate=0.3, optimizer="sgd", weight_decay=0.0, schedule="linear")
    history = fit(model, x, 3 * x - 0.5, config, validation=(x, 3 * x - 0.5))
    assert history.metrics["loss"] < 1e-4
    assert (model.weight.item(), model.bias.item()) == pytest.approx((3.0, -0.5), abs=0.02)


def test_a_model_with_a_loss_of_its_own_is_given_the_batch():
    model = made(GPT, GPTConfig(vocab_size=8, context=6, layers=1, heads=1, width=16))
    idx = torch.arange(7).repeat(32, 1)
    history = fit(model, idx[:, :-1], idx[:, 1:], with_(steps=40))
    assert history.losses[-1] < 0.5 * history.losses[0]


# --- data ------------------------------------------------------------------------------------------------------------
def test_tensors_arrays_datasets_and_lists_of_the_same_rows_give_the_same_losses():
    x, y = spiral(40, 0)
    expected = fit(made(), x, y, QUICK).losses
    assert fit(made(), x.numpy(), y.numpy(), QUICK).losses == expected
    assert fit(made(), x.double().numpy(), y.numpy(), QUICK).losses == expected
    assert fit(made(), x.tolist(), y.tolist(), QUICK).losses == expected
    assert fit(made(), TensorDataset(x, y), None, QUICK).losses == expected
    assert fit(made(), np.asfortranarray(x.numpy()), y, QUICK).losses == expected
    big, backwards = x.numpy().astype(">f4"), y.numpy()[::-1].copy()[::-1]
    assert fit(made(), big, backwards, QUICK).losses == expected


def test_a_loader_is_used_batch_by_batch_and_its_order_follows_the_seed():
    x, y = spiral(40, 0)

    def losses(seed, **options):
        torch.manual_seed(torch.seed() % 1000)  # whatever state the program is in
        loader = DataLoader(TensorDataset(x, y), batch_size=8, **options)
        model = made()
        return fit(model, loader, None, with_(seed=seed, steps=None, epochs=2)).losses

    shuffled = losses(1, shuffle=True)
    assert len(shuffled) == 10
    assert shuffled == losses(1, shuffle=True)
    assert shuffled != losses(2, shuffle=True)
    assert shuffled == losses(1, shuffle=True, num_workers=1)
    assert losses(1) == losses(2)


def test_a_stream_has_no_epochs():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(*spiral(40, 0), strict=True))

    history = fit(made(), Stream(), None, with_(batch_size=8, accumulate=2))
    assert history.steps == 12
    assert history.records[0].samples_per_s > 0
    with pytest.raises(ConfigError, match="the loader's dataset has no length: give steps instead of epochs"):
        fit(made(), Stream(), None, with_(steps=None))

    class Empty(IterableDataset):
        def __iter__(self):
            return iter(())

    assert_raises(ConfigError, "the loader gave no batch in epoch 0", lambda: fit(made(), Empty(), None, QUICK))


def test_several_inputs_go_to_the_model_in_order():
    model = module(lambda m, a, b: (a - b) * m.scale, scale=nn.Parameter(torch.tensor([[1.0]])))
    a, b = torch.ones(8, 1), torch.full((8, 1), 3.0)
    history = fit(model, (a, b), torch.zeros(8, 1), with_(steps=1, batch_size=8))
    assert history.losses == [4.0]


def test_every_row_is_used_once_an_epoch_and_steps_keep_their_size():
    seen = []

    class Watched(Dense):
        def forward(self, x):
            if self.training:
                seen.append(x.detach().clone())
            return super().forward(x)

    x, y = spiral(10, 0)
    fit(made(Watched), x, y, with_(steps=None, epochs=2, batch_size=4))
    assert [len(rows) for rows in seen] == [4] * 5
    rows = torch.cat(seen)
    for epoch in (rows[:10], rows[10:]):
        assert sorted(epoch[:, 0].tolist()) == sorted(x[:, 0].tolist())
    assert not torch.equal(rows[:10], rows[10:])


@pytest.mark.parametrize(("data", "targets", "error", "message"), [
    (torch.ones(4, 2), torch.zeros(3).long(), ShapeError, r"as many rows each, got \(4, 2\) and \(3,\)"),
    (torch.ones(0, 2), torch.zeros(0).long(), ConfigError, "the data have no rows"),
    (torch.ones(4, 2), None, ConfigError, "the data have no targets, and Dense has no method `loss`"),
    (torch.ones(4, 2), torch.zeros(4, 5).long(), ShapeError, r"outputs \(\.\.\., classes\) .* got \(16, 3\)"),
    (torch.ones(4, 2), torch.zeros(4), ShapeError, r"mse needs outputs like the targets, got \(16, 3\) and \(16,\)"),
    (torch.ones(4, 2), torch.zeros(4).bool(), ConfigError, "no default loss for torch.bool targets"),
    (object(), None, ConfigError, "data must be tensors, arrays, .*; got object"),
    ([["a"], ["b"]], None, ConfigError, "data must be tensors"),
    (torch.ones(4, 2).to_sparse(), torch.zeros(4).long(), UnsupportedCase, "data is a sparse_coo tensor"),
    (TensorDataset(torch.ones(4, 2)), torch.ones(4), ConfigError, "a TensorDataset has its own targets"),
])  # fmt: skip
def test_data_that_do_not_fit_are_refused(data, targets, error, message):
    assert_raises(error, message, lambda: fit(made(), data, targets, QUICK))


def test_batches_that_are_no_tensors_are_refused():
    loader = DataLoader([{"x": torch.ones(2)}] * 4, batch_size=2)
    with pytest.raises(UnsupportedCase, match="tensors in a tuple or list, got dict: give the loader a collate_fn"):
        fit(made(), loader, None, QUICK)


# --- a step ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("targets", [64, 12])
def test_accumulated_parts_are_one_large_batch_by_their_targets(targets):
    """With 12 targets in 64 rows, of an epoch's sixteen parts of four rows four or more have none."""
    x, y = spiral(64, 0)
    y[targets:] = -100
    whole, parts = made(), made()
    a = fit(whole, x, y, with_(batch_size=32))
    b = fit(parts, x, y, with_(batch_size=32, accumulate=8))
    assert all(math.isfinite(each) for each in b.losses)
    assert b.losses == pytest.approx(a.losses, rel=1e-5)
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_an_evaluation_weighs_batches_by_their_targets():
    model = made().eval()
    x, y = spiral(24, 0)
    y = y.clone()
    y[:9] = -100  # all of the first batch, and one of the second
    objective = Objective(model, None, None)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 24, 8)]
    found = evaluate(objective, model, batches, step=1, device=torch.device("cpu"), precision=None)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(x), y)
    assert found.rows == 24
    assert found.loss == pytest.approx(float(expected), rel=1e-6)


def test_recomputing_changes_memory_and_not_the_numbers():
    x, y = spiral(64, 0)
    kept = made(Dense, dropout=0.3)
    torch.manual_seed(1)
    a = fit(kept, x, y, with_(predict_memory=True, batch_size=64))
    again = made(Dense, dropout=0.3)
    torch.manual_seed(1)
    b = fit(again, x, y, with_(predict_memory=True, batch_size=64, recompute=("middle", "dropout")))
    assert a.losses == b.losses
    assert "forward" not in again.middle.__dict__
    with pytest.raises(ConfigError, match=r"recompute: 'blocks\.\*' matches no module of Dense"):
        fit(made(), x, y, with_(recompute=("blocks.*",)))


@pytest.mark.slow
def test_a_gpts_blocks_can_be_recomputed():
    idx = torch.randint(16, (16, 33), generator=torch.Generator().manual_seed(0))
    config = with_(steps=2, predict_memory=True)
    found = {}
    for patterns in ((), ("blocks.*",)):
        model = made(GPT, GPTConfig(vocab_size=16, context=32, layers=3, heads=2, width=32))
        found[patterns] = fit(model, idx[:, :-1], idx[:, 1:], dataclasses.replace(config, recompute=patterns))
    kept, again = found[()], found["blocks.*",]
    assert again.losses == kept.losses
    assert again.predicted_peak_bytes < 0.5 * kept.predicted_peak_bytes


def test_bfloat16_trains_parameters_of_float32():
    history = fit(made(), *spiral(64, 0), with_(precision="bfloat16", steps=60))
    assert history.losses[-1] < history.losses[0]
    assert history.losses != fit(made(), *spiral(64, 0), with_(steps=60)).losses


def test_float16_trains_with_a_loss_scale_that_the_history_shows(tmp_path):
    config = with_(precision="float16", steps=60, out=str(tmp_path / "run"))
    history = fit(made(), *spiral(64, 0), config, validation=spiral(64, 1))
    assert history.losses[-1] < history.losses[0]
    assert history.records[-1].loss_scale == 2.0**16
    assert "loss scale     65,536, 0 steps skipped" in str(history)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["loss_scale"] == 2.0**16
    expected = fit(made(), *spiral(64, 0), with_(steps=60)).losses
    torch.testing.assert_close(torch.tensor(history.losses), torch.tensor(expected), rtol=2e-2, atol=2e-2)


def test_overflows_in_float16_are_skipped_until_no_scale_avoids_them():
    class Overflowing(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:  # not in evaluations
                y.register_hook(lambda gradient: gradient * float("inf"))
            return y

    trainer = Trainer(made(Overflowing, 2, 3), with_(precision="float16", steps=60))
    with pytest.raises(DivergenceError, match=r"diverged at step 34: loss \d\.\d+, gradient norm (inf|nan)"):
        trainer.fit(*spiral(64, 0))
    assert [record.skipped for record in trainer.history.records] == [True] * 33  # at 2**16 to 2**-16
    assert trainer.history.records[-1].grad_norm == 0.0


def test_gradients_are_clipped_to_the_norm():
    x = torch.full((16, 1), 100.0)
    model = made(nn.Linear, 1, 1, bias=False)
    model.weight.data.fill_(before := 2.0)
    config = with_(
        steps=1, max_grad_norm=0.5, optimizer="sgd", learning_rate=1.0, warmup=0.0, momentum=0.0, weight_decay=0.0
    )
    history = fit(model, x, torch.zeros(16, 1), config)
    assert history.records[0].grad_norm > 1e3
    assert abs(model.weight.item() - before) == pytest.approx(0.5, rel=1e-4)


def test_a_users_optimiser_and_loss():
    def make(parameters):
        return torch.optim.Adagrad(parameters, lr=0.1)

    def loss(outputs, targets):
        return nn.functional.multi_margin_loss(outputs, targets)

    def first_is_largest(outputs, targets):
        return (outputs[:, 0] >= outputs.amax(1)).float().mean()

    history = fit(
        made(),
        *spiral(64, 0),
        with_(steps=60, learning_rate=0.1),
        loss=loss,
        optimizer=make,
        metrics={"first": first_is_largest},
        validation=spiral(30, 1),
    )
    assert history.losses[-1] < history.losses[0]
    assert set(history.metrics) == {"loss", "first"}
    with pytest.raises(ConfigError, match="unknown loss 'hinge'; known are cross_entropy, mse"):
        Trainer(made(), QUICK, loss="hinge")


def test_the_model_keeps_its_mode_and_statistics_are_not_trained_in_evaluations():
    model = made(Convolutional).eval()
    x, y = digits(40, 0)
    fit(model, x, y, with_(steps=2))
    assert not model.training
    before = model.layers[1].running_mean.clone()
    evaluation = Trainer(model, QUICK).evaluate(x, y)
    assert torch.equal(model.layers[1].running_mean, before)
    assert evaluation.rows == 40
    with torch.no_grad():
        assert evaluation.metrics["accuracy"] == pytest.approx(accuracy(model(x), y).item())
        assert evaluation.loss == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-5)


def test_a_part_in_eval_mode_stays_frozen():
    model = made(Convolutional).train()
    norm = model.layers[1].eval()
    x, y = digits(40, 0)
    fit(model, x, y, with_(steps=4, evaluate_every=2), validation=(x, y))
    assert model.training
    assert not norm.training
    assert norm.num_batches_tracked == 0


class Noisy(Dataset):
    """Rows with noise that is drawn when they are asked for."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, number):
        return self.x[number] + 0.1 * torch.randn(2), self.y[number]


@pytest.mark.parametrize("loader", [False, True])
def test_evaluations_draw_nothing_from_the_training(loader):
    def losses(every):
        data = Noisy(*spiral(40, 0))
        held_out = DataLoader(data, 8) if loader else data
        torch.manual_seed(3)
        model = Dense(dropout=0.2)
        return fit(model, data, None, with_(evaluate_every=every), validation=held_out).losses

    assert losses(1) == losses(12)


@pytest.mark.parametrize("loader", [False, True])
def test_an_evaluation_that_fails_leaves_the_generators_as_they_were(loader):
    data = Noisy(*spiral(40, 0))

    trainer = Trainer(made(), QUICK, metrics={"broken": Mock(side_effect=ValueError("broken"))})
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="broken") as caught:
        trainer.evaluate(DataLoader(data, 8) if loader else data)
    assert torch.equal(torch.get_rng_state(), before)
    assert caught.traceback  # which holds what was running
    assert trainer.model.training


def test_an_evaluation_that_is_not_a_number_is_not_the_best():
    x, y = spiral(20, 0)
    history = fit(made(), x, y, with_(evaluations=2), validation=(x * math.nan, y))
    assert math.isnan(history.metrics["loss"])
    assert history.best is None
    history.evaluations.append(Evaluation(12, 3.0, 20))
    assert history.best.loss == 3.0


def test_accuracy_leaves_out_the_targets_that_the_loss_leaves_out():
    outputs, targets = torch.eye(4), torch.tensor([0, 1, -100, 0])
    assert accuracy(outputs, targets).item() == pytest.approx(2 / 3)
    model = nn.Identity()
    trainer = Trainer(model, with_(batch_size=2), optimizer=lambda _: torch.optim.SGD([torch.zeros(1)], 0.1))
    found = trainer.evaluate(outputs, targets)  # batches with two, and with one of these
    assert found.metrics["accuracy"] == pytest.approx(2 / 3)
    assert found.rows == 4
    assert math.isnan(trainer.evaluate(outputs, torch.full((4,), -100)).metrics["accuracy"])


@pytest.mark.parametrize("what", ["loss", "metric"])
def test_what_is_no_single_number_is_named(what):
    def apart(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    options = {"loss": apart} if what == "loss" else {"metrics": {"apart": apart}}
    match = r"loss must be a scalar, got the shape \(8,\)" if what == "loss" else r"metric apart must be one number"
    assert_raises(ShapeError, match, lambda: Trainer(made(), with_(batch_size=24), **options).evaluate(*spiral(8, 0)))
    if what == "loss":
        with pytest.raises(ShapeError, match=r"got the shape \(8,\)"):
            fit(made(), *spiral(20, 0), with_(batch_size=8, predict_memory=True), loss=apart)


def test_a_metric_may_be_a_number():
    metrics = {"constant": lambda _outputs, _targets: 0.25}
    history = fit(made(), *spiral(20, 0), QUICK, validation=spiral(20, 1), metrics=metrics)
    assert history.metrics["constant"] == 0.25


def test_a_prediction_that_fails_is_one_note(monkeypatch):
    """torch logs what fails with tensors that have no values, and its traceback: the step raises the same error."""
    logger, seen = logging.getLogger("torch._subclasses.fake_tensor"), []

    def predict(*_arguments, **_options):
        seen.append(logger.disabled)
        raise RuntimeError("no such shape\nand more")

    monkeypatch.setattr("accelerant.nn.train.trainer.predict_peak", predict)
    history = fit(made(), *spiral(20, 0), with_(predict_memory=True))
    assert history.notes == ["peak memory not predicted: no such shape"]
    assert seen == [True]
    assert not logger.disabled


def test_an_absent_device_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    for name in ("cuda", "cuda:1"):
        assert_raises(BackendUnavailable, "'cuda'", Trainer, made(), with_(device=name))
    assert_raises(ConfigError, "unknown backend 'abacus'; known are cuda", Trainer, made(), with_(device="abacus:1"))


# --- stopping, watching ----------------------------------------------------------------------------------------------
class Wandering(nn.Module):
    """A model whose held-out loss is what the test wants, evaluation by evaluation."""

    def __init__(self, losses):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self.losses = list(losses)
        self.weights = []

    def loss(self, x):
        if self.training:
            return (self.weight * x).mean() - self.weight.sum()
        self.weights.append(self.weight.item())
        return torch.tensor(self.losses.pop(0))


def wander(losses, **changes):
    model = Wandering(losses)
    config = with_(steps=40, evaluate_every=4, max_grad_norm=None, **changes)
    x = torch.full((16, 1), 3.0)
    return model, fit(model, x, None, config, validation=x[:1])


def test_patience_ends_where_nothing_gets_better():
    _, history = wander([5, 4, 3, 3.5, 3.4, 3.2, 1], patience=3)
    assert history.status == "stopped"
    assert history.reason == "no better held-out loss in 3 evaluations"
    assert history.steps == len(history.losses) == 24
    assert (history.best.step, history.best.loss) == (12, 3.0)


def test_a_small_gain_is_no_gain():
    _, history = wander([5, 4.9, 4.8, 4.7], patience=2, min_delta=0.5)
    assert history.steps == 12
    _, history = wander([5, 4.4, 4.3, 3.8] + [3.8] * 9, patience=9, min_delta=0.5)
    assert history.steps == 40


@pytest.mark.parametrize("folder", [False, True])
def test_the_best_parameters_are_kept(tmp_path, folder):
    where = {"out": str(tmp_path / "run")} if folder else {}
    model, history = wander([5, 4, 6, 7, 8, 9, 9, 9, 9, 9], keep_best=True, **where)
    assert history.status == "done"
    assert model.weight.item() == model.weights[1] != model.weights[-1]


def test_an_interrupted_run_has_the_parameters_of_its_last_step(tmp_path):
    """It goes on from them; those of its best evaluation are in a file."""
    model = Wandering([5, 4, 6, 7])
    config = with_(steps=40, evaluate_every=4, max_grad_norm=None, keep_best=True, out=str(tmp_path / "run"))
    x = torch.full((16, 1), 3.0)

    class Stop(Callback):
        def before_step(self, trainer, step):
            if step == 17:
                os.kill(os.getpid(), signal.SIGINT)

    assert_raises(KeyboardInterrupt, None, lambda: fit(model, x, None, config, validation=x[:1], callbacks=[Stop()]))
    last, best = (load_checkpoint(tmp_path / "run" / f"{name}.safetensors")[0] for name in ("checkpoint", "best"))
    assert model.weight.item() == last["model.weight"].item() != best["weight"].item() == model.weights[1]


def test_patience_without_held_out_data_is_refused():
    with pytest.raises(ConfigError, match="patience and keep_best need held-out data: give validation"):
        fit(made(), *spiral(8, 0), with_(patience=2))


class Recorder(Callback):
    def __init__(self, stop_at=None):
        self.told = []
        self.stop_at = stop_at

    def begin(self, trainer, done, total):
        self.told.append(("begin", done, total))

    def before_step(self, trainer, step):
        self.told.append(("before", step))

    def records(self, trainer, records):
        self.told += [("record", record.step) for record in records]
        if self.stop_at in [record.step for record in records]:
            trainer.stop("enough")

    def evaluated(self, trainer, evaluation):
        self.told.append(("evaluated", evaluation.step))

    def saved(self, trainer, path, step):
        self.told.append(("saved", step, path.name))

    def end(self, trainer, history):
        self.told.append(("end", history.status))


def test_callbacks_are_told_in_order(tmp_path):
    recorder = Recorder()
    config = with_(steps=2, evaluations=1, out=str(tmp_path / "run"))
    fit(made(), *spiral(20, 0), config, validation=spiral(8, 1), callbacks=[recorder])
    assert recorder.told == [
        ("begin", 0, 2), ("before", 0), ("record", 1), ("before", 1), ("evaluated", 2), ("record", 2),
        ("saved", 2, "checkpoint.safetensors"), ("end", "done"),
    ]  # fmt: skip


def test_a_callback_may_stop_the_training():
    history = fit(made(), *spiral(20, 0), QUICK, callbacks=[Recorder(stop_at=5)])
    assert (history.status, history.reason) == ("stopped", "enough")
    assert history.steps == 6  # the step after the one whose numbers it saw
    trainer = Trainer(made(), QUICK)
    trainer.stop("before")
    assert trainer.fit(*spiral(20, 0)).steps == 12  # of that training, not of a later one


def test_progress_is_printed(capsys):
    fit(made(), *spiral(20, 0), with_(evaluations=1), validation=spiral(8, 0), callbacks=[PrintProgress(every_s=0)])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 1/12  loss ")
    assert any(line.startswith("step 12  held out: loss ") and "accuracy" in line for line in lines)


# --- what is written -------------------------------------------------------------------------------------------------
def test_a_folder_has_the_log_and_is_not_overwritten(tmp_path):
    folder = tmp_path / "run"
    config = with_(out=str(folder))
    history = fit(made(), *spiral(20, 0), config, validation=spiral(8, 1))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == history.losses
    assert {"step", "loss", "ms", "samples_per_s", "peak_memory_bytes", "learning_rate", "grad_norm"} <= lines[0].keys()
    assert "tokens_per_s" not in lines[0]
    assert lines[-1]["validation"]["accuracy"] == history.metrics["accuracy"]
    assert json.loads((folder / "history.json").read_text())["steps"] == 12
    assert TrainConfig.from_dict(json.loads((folder / "train.json").read_text())) == config
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="holds a training: give resume=True to continue it, or another folder"):
        fit(made(), *spiral(20, 0), config)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_history_prints_what_matters():
    history = fit(made(), *spiral(20, 0), with_(predict_memory=True), validation=spiral(8, 1))
    text = str(history)
    assert "done: 12 of 12 steps" in text
    assert "accuracy" in text
    assert "predicted" in text
    assert json.loads(json.dumps(history.to_dict()))["status"] == "done"


def test_a_model_whose_shapes_depend_on_values_trains_without_a_prediction():
    class Odd(Dense):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)

    history = fit(made(Odd), *spiral(20, 0), with_(predict_memory=True))
    assert history.predicted_peak_bytes is None
    assert history.notes[0].startswith("peak memory not predicted: ")
    assert history.steps == 12


def test_a_profile_is_a_chrome_trace_and_a_table(tmp_path):
    folder = tmp_path / "run"
    trainer = Trainer(made(), with_(profile=3, out=str(folder)))
    trainer.fit(*spiral(20, 0))
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    text = (folder / "kernels.txt").read_text()
    assert "aten::addmm" in text
    assert text.splitlines()[-1].endswith("in all")
    rows = {row.name: row for row in trainer.profile}
    assert rows["aten::addmm"].calls == 3.0  # three layers, once a step
    assert math.fsum(row.share for row in trainer.profile) == pytest.approx(1.0)


def test_a_profile_of_a_short_run_is_taken_at_its_end(tmp_path):
    trainer = Trainer(made(), with_(steps=2, profile=5, out=str(tmp_path / "run")))
    trainer.fit(*spiral(20, 0))
    assert {row.name: row.calls for row in trainer.profile}["aten::addmm"] == 3.0


def test_tensorboard_gets_the_scalars(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, step))

        def close(self):
            written.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    config = with_(steps=1, evaluations=1, log="tensorboard", out=str(tmp_path / "run"))
    fit(made(), *spiral(20, 0), config, validation=spiral(8, 1))
    assert written[0] == (str(tmp_path / "run" / "tensorboard"), None)
    assert {("train/loss", 1), ("train/learning_rate", 1), ("held_out/accuracy", 1)} <= set(written[1:-1])
    assert written[-1] == "closed"
    broken = with_(config, out=str(tmp_path / "other"))
    assert_raises(DivergenceError, None, lambda: fit(made(), torch.full((20, 2), math.nan), spiral(20, 0)[1], broken))
    assert written[-2:] == [(str(tmp_path / "other" / "tensorboard"), None), "closed"]


def test_tensorboard_that_is_not_there_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingDependency, match=r"pip install 'accelerant\[tensorboard\]'"):
        Trainer(made(), with_(log="tensorboard", out=str(tmp_path / "run")))


@pytest.mark.parametrize(("changes", "message"), [
    ({"batch_size": 0}, "batch_size must be above 0, got 0"),
    ({"batch_size": 8.0}, "batch_size must be a whole number, got 8.0"),
    ({"accumulate": 0}, "accumulate must be above 0, got 0"),
    ({"epochs": 0}, "epochs must be above 0, got 0"),
    ({"steps": -1}, "steps must be above 0, got -1"),
    ({"learning_rate": math.nan}, "learning_rate must be a finite number, got nan"),
    ({"warmup": 1.5}, "warmup must be a fraction, 0 to 1, got 1.5"),
    ({"betas": (0.9, 1.0)}, r"betas must be 0 or more and below 1, got \(0\.9, 1\.0\)"),
    ({"schedule": "steps"}, "schedule must be cosine or linear or constant, got 'steps'"),
    ({"precision": "float8"}, "precision must be auto or float32 or bfloat16 or float16 or fp8, got 'float8'"),
    ({"optimizer": "lion"}, "optimizer must be adamw or sgd, got 'lion'"),
    ({"recompute": "blocks.*"}, r"recompute must be a tuple of strings, got 'blocks\.\*'"),
    ({"seed": 2**63}, r"seed must be 0 to 2\*\*63 - 1"),
    ({"device": ""}, "device must not be empty"),
    ({"log": "tensorboard"}, "log='tensorboard' writes files: give a folder"),
    ({"profile": 3}, "profile=3 writes files: give a folder"),
    *[
        ({name: 0}, f"{name} must be above 0, got 0")
        for name in (
            "steps", "max_grad_norm", "evaluate_every", "patience", "checkpoint_every", "profile", "timeout_s",
        )
    ],
    ({"device": 7}, "device must be a name such as .*; got 7"),
    ({"warmup": 100}, "warmup must be a fraction, 0 to 1, got 100: give a number of steps as warmup_steps"),
    ({"betas": 0.9}, r"betas must be two numbers, got 0\.9"),
    ({"deterministic": 1}, "deterministic must be true or false, got 1"),
])  # fmt: skip
def test_configs_refuse(changes, message):
    assert_raises(ConfigError, message, with_, **changes)


def test_parts_of_a_step_are_even_but_for_a_loader_whose_batches_they_are():
    x, y = spiral(24, 0)
    rows, config = TensorDataset(x, y), with_(batch_size=16, accumulate=3, steps=2)
    for data in ((x, y), (rows,)):
        with pytest.raises(ConfigError, match="accumulate must divide the batch_size of 16, got 3"):
            fit(made(), *data, config=config)
    seen = []
    model = made()
    model.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])) if model.training else None)
    history = fit(model, DataLoader(rows, 7), None, config, validation=rows)
    assert history.steps == 2
    assert seen == [7, 7, 7, 3, 7, 7]  # 24 rows: batches of 7, 7, 7 and 3, three a step
    assert history.best.rows == 24


def test_a_config_is_json_and_back():
    config = with_(recompute=("a.*",), no_decay=("b",))
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(("width", "expected"), [(8, 1), (512, 3)])
def test_a_step_too_small_to_share_runs_on_one_thread(width, expected, monkeypatch):
    monkeypatch.setattr("accelerant.nn.train.environment.usable_cores", lambda: 4)
    before = torch.get_num_threads()
    seen = []

    class Watch(Callback):
        def before_step(self, trainer, step):
            seen.append(torch.get_num_threads())

    torch.set_num_threads(3)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 1))
        config = TrainConfig(steps=1, batch_size=2, device="cpu")
        fit(model, torch.zeros(4, 4), torch.zeros(4, 1), config, callbacks=[Watch()])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [expected]
