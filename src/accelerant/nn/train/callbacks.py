# ruff: noqa: D102  Callback documents the methods of its subclasses
"""Callbacks, which watch a training, and extensions, which replace its batches and steps.

Private training (accelerant.privacy.dp.training.run) is the only extension. Model, schedule, evaluation, checkpoints
and report stay those of an ordinary run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerant._renamed import renamed_arguments
from accelerant.errors import MissingDependency
from accelerant.nn.train.config import RunConfig, TrainConfig
from accelerant.nn.train.data import Batch, Source
from accelerant.nn.train.history import StepRecord
from accelerant.nn.train.objective import Evaluation
from accelerant.nn.train.step import StepResult
from accelerant.nn.train.tokens import Tokens
from accelerant.runtime.html_page import Point
from accelerant.runtime.processes import Processes

if TYPE_CHECKING:
    from accelerant.nn.train import Trainer
    from accelerant.nn.train.history import History


class Callback:
    """Receives the events of a training; each method does nothing until a subclass overrides it.

    `trainer.stop(reason)` ends the training after the current step. On a GPU losses are read back for many steps
    together, so `records` receives several.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def begin(self, trainer: Trainer, done: int, total: int) -> None:
        """Training starts after `done` of `total` steps."""

    def before_step(self, trainer: Trainer, step: int) -> None:
        """A step begins, 0 for the first."""

    def records(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        """The measurements of some steps have arrived."""

    def evaluated(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """The model was evaluated on held-out data."""

    def saved(self, trainer: Trainer, path: Path, step: int) -> None:
        """A checkpoint was written."""

    def note(self, trainer: Trainer, text: str) -> None:
        """There is something that the user should know."""

    def advance(self, trainer: Trainer, share: float, text: str) -> None:
        """A long operation, named by the text, is done to this share, 0 to 1."""

    def end(self, trainer: Trainer, history: History) -> None:
        """Training ended without an error."""

    def failed(self, trainer: Trainer, error: BaseException) -> None:
        """Training ended with an error, which is raised afterwards."""

    def state(self) -> Mapping[str, Any]:
        """Return JSON values to save in checkpoints."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`, before a resumed training begins."""


class PrintProgress(Callback):
    """Prints a line every few seconds to the standard error stream; of several processes rank 0 does."""

    def __init__(self, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._last = 0.0
        self._total = 0

    def __repr__(self) -> str:
        return f"PrintProgress(every_s={self._every_s})"

    def begin(self, trainer: Trainer, done: int, total: int) -> None:
        self._total = total

    def records(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        now = time.monotonic()
        if records and (now - self._last >= self._every_s or records[-1].step == self._total):
            self._last = now
            last = records[-1]
            self._print(f"step {last.step}/{self._total}  loss {last.loss:.4f}  {last.ms:.1f} ms")

    def evaluated(self, trainer: Trainer, evaluation: Evaluation) -> None:
        metrics = "".join(f"  {name} {value:.4f}" for name, value in evaluation.metrics.items())
        self._print(f"step {evaluation.step}  held out: loss {evaluation.loss:.4f}{metrics}")

    def note(self, trainer: Trainer, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        if Processes().first:
            print(text, file=sys.stderr)


@renamed_arguments(folder="out")
class TensorBoard(Callback):
    """Writes scalars for TensorBoard to a folder; raises MissingDependency if it is not installed."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingDependency("tensorboard", "tensorboard", "a log for TensorBoard") from None
        self._make: Any = SummaryWriter
        self._folder = Path(out)
        self._writer: Any = None

    def __repr__(self) -> str:
        return f"TensorBoard({str(self._folder)!r})"

    def begin(self, trainer: Trainer, done: int, total: int) -> None:
        # The records of later steps, which an interrupted run left, are hidden.
        self._writer = self._make(str(self._folder), purge_step=done + 1 if done else None)

    def records(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        for record in records:
            speed = record.samples_per_s if record.tokens_per_s is None else record.tokens_per_s
            values = {"loss": record.loss, "learning_rate": record.learning_rate, "grad_norm": record.grad_norm}
            for name, value in {**values, "per_s": speed}.items():
                self._writer.add_scalar(f"train/{name}", value, record.step)

    def evaluated(self, trainer: Trainer, evaluation: Evaluation) -> None:
        for name, value in {"loss": evaluation.loss, **evaluation.metrics}.items():
            self._writer.add_scalar(f"held_out/{name}", value, evaluation.step)

    def end(self, trainer: Trainer, history: History) -> None:
        if self._writer is not None:  # None if nothing was left to do
            self._writer.close()

    def failed(self, trainer: Trainer, error: BaseException) -> None:
        if self._writer is not None:
            self._writer.close()


# --- extensions ------------------------------------------------------------------------------------------------------

Step = Callable[[Sequence[Batch], float], StepResult]
"""One step of a training, from its batches and the learning rate; nothing need wait for the device."""


@dataclass(frozen=True, slots=True)
class ReportChart:
    """A chart in the report: a card with one line, whose points are in ascending order of x, the completed steps."""

    title: str
    label: str
    points: Sequence[Point]
    y_label: str


class Extension(Callback):
    """Replaces batches or steps of a run, and adds results under its `name`; this base class changes nothing."""

    name = "extension"

    def require(self, run: RunConfig) -> None:
        """Raise ConfigError unless the run is supported; called before its folder is changed."""

    def require_extensible(self) -> None:
        """Raise ConfigError unless a run may continue with another number of steps."""

    def configured(self, config: TrainConfig) -> TrainConfig:
        """Return the Trainer's config."""
        return config

    def named(self, sha256: str, description: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the text's name in checkpoints, which resuming compares, and its description in config.json."""
        return sha256, description

    def source(self, tokens: Tokens, config: TrainConfig, fingerprint: str) -> Source | None:
        """Return the source of the batches, before the run's folder is changed; None for ordinary windows."""
        return None

    def attach(self, trainer: Trainer) -> Step | None:
        """Return the step to use, None for the ordinary one; called once, before a checkpoint is restored."""
        return None

    def description(self) -> dict[str, Any]:
        """Return what is needed to continue the run, for config.json."""
        return {}

    def words(self, folder: Path) -> list[str]:
        """Return the command-line options that start the run of a folder again."""
        return []

    def results(self) -> dict[str, Any]:
        """Return values for summary.json after the training; write the extension's own files."""
        return {}

    def curves(self) -> Sequence[ReportChart]:
        """Return charts for the report."""
        return ()

    def remarks(self) -> Sequence[str]:
        """Return sentences for the report on the meaning of the figures."""
        return ()

    def close(self) -> None:
        """Release resources when the run ends, for whatever reason."""
