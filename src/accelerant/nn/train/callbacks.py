"""Callbacks, which watch a training, and extensions, which replace its batches and steps.

Private training (accelerant.privacy.dp.training.run) is the only extension. Model, schedule, evaluation, checkpoints
and report stay those of an ordinary run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from accelerant.errors import MissingDependency
from accelerant.nn.train.config import RunConfig, TrainConfig
from accelerant.nn.train.data import Source
from accelerant.nn.train.history import StepRecord
from accelerant.nn.train.objective import Evaluation
from accelerant.nn.train.step import StepResult
from accelerant.nn.train.tokenfile import Tokens
from accelerant.runtime.html_page import Point

if TYPE_CHECKING:
    from accelerant.nn.train.history import History
    from accelerant.nn.train.trainer import Trainer

__all__ = [
    "Callback",
    "Curve",
    "Extension",
    "PrintProgress",
    "Step",
    "TensorBoard",
]


class Callback:
    """Does nothing at every occasion; a subclass does something at some.

    `trainer.stop(reason)` ends the training after the present step. On a GPU losses are read back many steps at once,
    so `records` gets several.
    """

    def begin(self, trainer: Trainer, done: int, total: int) -> None:
        """Training starts, with `done` of `total` steps behind it."""

    def before_step(self, trainer: Trainer, step: int) -> None:
        """A step comes, 0 the first."""

    def records(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        """The numbers of some steps have arrived."""

    def evaluated(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Held-out data were measured."""

    def saved(self, trainer: Trainer, path: Path, step: int) -> None:
        """A checkpoint was written."""

    def note(self, trainer: Trainer, text: str) -> None:
        """Something the user should know."""

    def advance(self, trainer: Trainer, share: float, text: str) -> None:
        """So much of what the text names is done, 0 to 1; where it takes long."""

    def end(self, trainer: Trainer, history: History) -> None:
        """Training is over; not after an error."""

    def failed(self, trainer: Trainer, error: BaseException) -> None:
        """Training ended by an error, which is raised afterwards."""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint should keep of this callback: JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave, before a resumed training begins."""


class PrintProgress(Callback):
    """A line every few seconds on the error stream.

    Args:
        every_s: seconds between lines.
    """

    def __init__(self, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._last = 0.0
        self._total = 0

    def begin(self, trainer: Trainer, done: int, total: int) -> None:
        """Remember how many steps there are."""
        self._total = total

    def records(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        """A line, if the last is some seconds old, or the training ends."""
        now = time.monotonic()
        if records and (now - self._last >= self._every_s or records[-1].step == self._total):
            self._last = now
            last = records[-1]
            print(f"step {last.step}/{self._total}  loss {last.loss:.4f}  {last.ms:.1f} ms", file=sys.stderr)

    def evaluated(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """A line."""
        metrics = "".join(f"  {name} {value:.4f}" for name, value in evaluation.metrics.items())
        print(f"step {evaluation.step}  held out: loss {evaluation.loss:.4f}{metrics}", file=sys.stderr)

    def note(self, trainer: Trainer, text: str) -> None:
        """A line."""
        print(text, file=sys.stderr)


class TensorBoard(Callback):
    """Writes scalars for TensorBoard.

    Args:
        folder: where to.

    Raises:
        MissingDependency: tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingDependency("tensorboard", "tensorboard", "a log for TensorBoard") from None
        self._make: Any = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def begin(self, trainer: Trainer, done: int, total: int) -> None:
        """Open the log; what it has of later steps is hidden."""
        self._writer = self._make(str(self._folder), purge_step=done + 1 if done else None)

    def records(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        """Loss, rate, norm and speed."""
        for record in records:
            speed = record.samples_per_s if record.tokens_per_s is None else record.tokens_per_s
            values = {"loss": record.loss, "learning_rate": record.learning_rate, "grad_norm": record.grad_norm}
            for name, value in {**values, "per_s": speed}.items():
                self._writer.add_scalar(f"train/{name}", value, record.step)

    def evaluated(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Loss and metrics."""
        for name, value in {"loss": evaluation.loss, **evaluation.metrics}.items():
            self._writer.add_scalar(f"held_out/{name}", value, evaluation.step)

    def end(self, trainer: Trainer, history: History) -> None:
        """Close the log; it was not opened where nothing was left to do."""
        if self._writer is not None:
            self._writer.close()

    def failed(self, trainer: Trainer, error: BaseException) -> None:
        """Close the log: the scalars before the trouble are the ones to look at."""
        if self._writer is not None:
            self._writer.close()


# --- extensions ------------------------------------------------------------------------------------------------------


class Step(Protocol):
    """One step of a training."""

    def __call__(self, batches: Sequence[tuple[Tensor, ...]], learning_rate: float) -> StepResult:
        """Do it; nothing need wait for the device."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart of its own in the report.

    Attributes:
        title: of its card.
        label: of the line.
        points: in rising x, the steps done.
        y_label: with the unit.
    """

    title: str
    label: str
    points: Sequence[Point]
    y_label: str


class Extension(Callback):
    """What changes in a run; this one changes nothing.

    Attributes:
        name: of its entry in config.json and summary.json.
    """

    name = "extension"

    def require(self, run: RunConfig) -> None:
        """Check that the run can be done so, before its folder is touched.

        Raises:
            ConfigError: it cannot.
        """

    def configured(self, config: TrainConfig) -> TrainConfig:
        """The Trainer's config."""
        return config

    def source(self, tokens: Tokens, config: TrainConfig, fingerprint: str) -> Source | None:
        """Where the batches come from; None for the ordinary windows. Called before the run's folder is touched.

        Raises:
            ConfigError: the data do not suffice.
        """
        return None

    def attach(self, trainer: Trainer) -> Step | None:
        """Called once, before a checkpoint is put in place: what makes the steps; None for the ordinary step."""
        return None

    def description(self) -> dict[str, Any]:
        """For config.json: what is needed to go on with the run."""
        return {}

    def words(self, folder: Path) -> list[str]:
        """What the command line needs to start the run of a folder again."""
        return []

    def results(self) -> dict[str, Any]:
        """For summary.json, once the training is over; writes its own files."""
        return {}

    def curves(self) -> Sequence[Curve]:
        """For the report."""
        return ()

    def remarks(self) -> Sequence[str]:
        """Sentences for the report, on what the figures mean."""
        return ()

    def close(self) -> None:
        """The run is over, well or not."""
