"""A run whose batches and steps are made elsewhere, with a state, figures and curves of its own."""

import json
import os
import signal

import pytest
import torch

from accelerant.errors import ConfigError, DivergenceError
from accelerant.nn.train.callbacks import Extension, ReportChart
from accelerant.nn.train.data import TokenSource
from accelerant.nn.train.job import resume_training, run_training
from accelerant.nn.train.step import StepResult


class Marked(Extension):
    """Steps of plain descent over the first windows, counted."""

    name = "marked"

    def __init__(self):
        self.steps, self.closed, self.required = 0, 0, None

    def require(self, run):
        self.required = run

    def source(self, tokens, config, fingerprint):
        return TokenSource(tokens, config, fingerprint=fingerprint)

    def attach(self, trainer):
        def step(batches, rate):
            loss = trainer.loss(*batches[0])
            for p, grad in zip(
                trainer.model.parameters(), torch.autograd.grad(loss, trainer.model.parameters()), strict=True
            ):
                p.data -= 0.1 * grad
            self.steps += 1
            return StepResult(loss.detach(), torch.zeros(()))

        return step

    def description(self):
        return {"rate": 0.1}

    def words(self, folder):
        return ["--marked"]

    def state(self):
        return {"steps": self.steps}

    def restore(self, state):
        self.steps = state["steps"]

    def results(self):
        return {"steps": self.steps}

    def curves(self):
        return [ReportChart("A & B", "of <it>", [(1.0, 2.0), (6.0, 4.0)], "things")]

    def remarks(self):
        return ["what 1 < 2 means"]

    def close(self):
        self.closed += 1


@pytest.mark.slow
def test_its_steps_figures_and_curves(run, tmp_path, cpu, watcher):
    out, extension = tmp_path / "out", Marked()
    outcome = run_training(run, out, cpu, progress=watcher(), extension=extension)
    assert extension.required is run
    assert outcome.summary["marked"] == {"steps": 12}
    assert extension.closed == 1
    config = json.loads((out / "config.json").read_text())
    assert (config["extension"], config["marked"]) == ("marked", {"rate": 0.1})
    page = (out / "report.html").read_text()
    for text in ("A &amp; B", "of &lt;it&gt;", 'aria-label="things by step"', "what 1 &lt; 2 means"):
        assert text in page


@pytest.mark.slow
def test_its_state_goes_on_and_no_other_run_takes_its_place(run, tmp_path, cpu, watcher):
    out = tmp_path / "out"
    stop = watcher(5, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run_training(run, out, cpu, progress=stop, extension=Marked()).signal == signal.SIGINT
    with pytest.raises(ConfigError, match="one of marked"):
        resume_training(out, cpu, progress=watcher())
    extension = Marked()
    summary = resume_training(out, cpu, progress=watcher(), extension=extension).summary
    assert summary["marked"] == {"steps": 12}
    assert extension.closed == 1


def test_a_step_that_is_not_finite_is_told_without_looking_into_it(run, tmp_path, cpu, watcher):
    class Broken(Marked):
        def attach(self, trainer):
            return lambda batches, rate: StepResult(torch.tensor(float("nan")), torch.zeros(()))

    extension = Broken()
    with pytest.raises(DivergenceError, match="the steps are not the Trainer's own"):
        run_training(run, tmp_path / "out", cpu, progress=watcher(), extension=extension)
    assert extension.closed == 1
