"""The Trainer on a GPU: as a graph and without, where numbers fail, resuming, a whole run of a GPT."""

import dataclasses
import gc
import json

import pytest
import torch
from problems import Convolutional, Dense, digits, spiral
from torch import nn

from accelerant.errors import DivergenceError
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.train import Callback, TrainConfig, Trainer, fit, resume_training, run_training
from accelerant.nn.train.data import permutation
from accelerant.nn.train.history import read_metrics

pytestmark = pytest.mark.gpu

CONFIG = TrainConfig(steps=200, batch_size=64, learning_rate=2e-2, device="cuda", predict_memory=False)


def made(kind=Dense, **options):
    torch.manual_seed(0)
    return kind(**options)


@pytest.mark.parametrize("graph", ["off", "on"])
def test_a_spiral_is_learned(graph):
    config = dataclasses.replace(CONFIG, graph=graph)
    history = fit(made(), *spiral(600, 0), config, validation=spiral(200, 1))
    assert history.metrics["accuracy"] > 0.95
    assert history.peak_memory_bytes > 0
    assert len(history.records) == 200


def test_a_graph_changes_no_loss():
    config = dataclasses.replace(CONFIG, precision="float32", steps=30)
    x, y = digits(400, 0)
    a = fit(made(Convolutional), x, y, dataclasses.replace(config, graph="off")).losses
    b = fit(made(Convolutional), x, y, dataclasses.replace(config, graph="on")).losses
    assert b[:10] == pytest.approx(a[:10], rel=1e-3)


class Large(nn.Module):
    def forward(self, x):
        return torch.where(x > 1e20, x * torch.inf, x)


@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize("folder", [False, True])
def test_the_step_and_the_module_are_found_by_going_back(tmp_path, graph, folder):
    """The parameters are no numbers any more when the host sees it, some steps later."""
    x, y = spiral(4000, 0)
    x[int(permutation(0, 0, 4000)[64 * 40 + 3]), 0] = 1e21
    config = dataclasses.replace(CONFIG, graph=graph, checkpoint_every=25, precision="float32")
    if folder:
        config = dataclasses.replace(config, out=str(tmp_path / "run"))
    model = nn.Sequential(Large(), made())
    good = "the last good checkpoint, of step 25" if folder else "there is no checkpoint"
    with pytest.raises(DivergenceError, match=rf"at step 41: .* the output of 0 \(Large\); {good}"):
        fit(model, x, y, config)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


class Stop(Callback):
    def __init__(self, at):
        self.at = at

    def before_step(self, trainer, step):
        if step == self.at:
            trainer.stop("for the test")


@pytest.mark.parametrize(("graph", "dropout"), [("off", 0.2), ("on", 0.0)])
def test_a_resumed_run_is_the_straight_run(tmp_path, graph, dropout):
    config = dataclasses.replace(CONFIG, graph=graph, steps=80, precision="float32", deterministic=True)

    def run(name, **options):
        model = made(dropout=dropout)
        return model, fit(model, *spiral(600, 0), dataclasses.replace(config, out=str(tmp_path / name)), **options)

    straight, expected = run("straight")
    run("run", callbacks=[Stop(40)])
    resumed, history = run("run", resume=True)
    assert history.resumed_from == 41
    assert history.losses == pytest.approx(expected.losses, rel=1e-4)
    for a, b in zip(resumed.parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_profile_has_the_devices_kernels(tmp_path):
    trainer = Trainer(made(), dataclasses.replace(CONFIG, steps=20, profile=4, graph="on", out=str(tmp_path / "p")))
    trainer.fit(*spiral(100, 0))
    names = [row.name for row in trainer.profile]
    assert any("adamw" in name for name in names)
    assert not any(name.startswith("aten::") for name in names)
    assert json.loads((tmp_path / "p" / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("graph", ["off", "on"])
def test_recomputed_blocks_change_the_peak_and_no_loss(graph):
    idx = torch.randint(256, (64, 257), generator=torch.Generator().manual_seed(0))
    found = []
    for patterns in ((), ("blocks.*",)):
        gc.collect()  # the graph of the model before
        model = made(GPT, config=GPTConfig(vocab_size=256, context=256, layers=6, heads=4, width=256))
        config = dataclasses.replace(CONFIG, steps=6, graph=graph, recompute=patterns)
        found.append(fit(model, idx[:, :-1], idx[:, 1:], config))
    kept, again = found
    assert again.losses == pytest.approx(kept.losses, rel=1e-2)
    assert again.peak_memory_bytes < 0.8 * kept.peak_memory_bytes


def test_a_gpt_is_trained_predicted_measured_and_resumed(run, tmp_path, watcher):
    device = torch.device("cuda", torch.cuda.current_device())
    run = run.replaced(
        context=64, width=64, batch_size=16, microbatch=8, steps=60, deterministic=False, predict_memory=True
    )
    outcome = run_training(run, tmp_path / "run", device, progress=watcher())
    summary = outcome.summary
    assert summary["status"] == "done"
    assert summary["reserved_memory_bytes"] >= summary["peak_memory_bytes"] > 0
    assert summary["predicted_peak_bytes"] > 0
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert records[-1].loss < records[0].loss - 1
    (tmp_path / "run" / "summary.json").unlink()
    again = resume_training(tmp_path / "run", device, progress=watcher())
    assert again.summary["validation_loss"] == pytest.approx(summary["validation_loss"], abs=0.01)
