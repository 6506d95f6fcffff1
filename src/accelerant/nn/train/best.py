"""The best evaluation so far: when to stop, and which parameters to keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from accelerant.nn.train.checkpoint import load_checkpoint, save_checkpoint
from accelerant.nn.train.objective import Evaluation

__all__ = ["Best"]


class Best:
    """Watches evaluations.

    Args:
        patience: evaluations without a better loss after which it is enough; 0: never.
        min_delta: a loss is better if it is lower by more than this.
    """

    NAME = "best.safetensors"

    def __init__(self, patience: int, min_delta: float) -> None:
        self._patience = patience
        self._min_delta = min_delta
        self._loss = math.inf
        self._step = 0
        self._waited = 0
        self._kept: dict[str, Tensor] = {}

    @property
    def exhausted(self) -> bool:
        """Whether patience is at its end."""
        return 0 < self._patience <= self._waited

    def see(self, evaluation: Evaluation) -> bool:
        """Whether an evaluation is the best so far."""
        if evaluation.loss < self._loss - self._min_delta:
            self._loss, self._step, self._waited = evaluation.loss, evaluation.step, 0
            return True
        self._waited += 1
        return False

    def keep(self, model: nn.Module, folder: Path | None) -> None:
        """Keep the parameters as they are: in the folder, or in host memory where there is none."""
        state = model.state_dict()
        if folder is not None:
            save_checkpoint(folder / self.NAME, state, {"step": self._step, "loss": self._loss})
        else:
            self._kept = {name: value.detach().to("cpu", copy=True) for name, value in state.items()}

    def give(self, model: nn.Module, folder: Path | None) -> None:
        """Give a model the parameters that were kept; nothing where none were."""
        if folder is not None and (folder / self.NAME).is_file():
            model.load_state_dict(load_checkpoint(folder / self.NAME)[0])
        elif self._kept:
            model.load_state_dict(self._kept)

    def state(self) -> dict[str, Any]:
        """JSON values; `restore` is the inverse."""
        loss = None if math.isinf(self._loss) else self._loss
        return {"loss": loss, "step": self._step, "waited": self._waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        loss = state.get("loss")
        self._loss = math.inf if loss is None else float(loss)
        self._step, self._waited = int(state.get("step", 0)), int(state.get("waited", 0))
