"""A run whose steps are made elsewhere: what a layer above may put in the place of batches and step.

`accelerant train` hands one to job.py; private training (privacy/dp/training/run.py) is the only one. Everything else
of a run (model, schedule, evaluation, checkpoints, report) stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from accelerant.nn.train.batches import Tokens
from accelerant.nn.train.callbacks import Callback
from accelerant.nn.train.charts import Point
from accelerant.nn.train.config import TrainConfig
from accelerant.nn.train.presets import RunConfig
from accelerant.nn.train.source import Source
from accelerant.nn.train.step import StepResult

if TYPE_CHECKING:
    from accelerant.nn.train.trainer import Trainer

__all__ = ["Curve", "Extension", "Step"]


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
