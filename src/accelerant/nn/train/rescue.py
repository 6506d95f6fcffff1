"""What is done where a loss or gradient is not finite: go back to before that step, and find the module.

On the CPU a step's gradients are looked at before the update, so the parameters are still those that made the trouble.
On a GPU nothing waits for that: the parameters are taken from the last checkpoint, or from a copy of the first ones,
and the steps since then are done again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelerant.errors import FormatError
from accelerant.nn.train.batches import Batch
from accelerant.nn.train.checkpoint import Checkpoints
from accelerant.nn.train.diagnose import find_not_finite
from accelerant.nn.train.loop import NotFinite, split
from accelerant.nn.train.source import Source
from accelerant.nn.train.state import gathered, restored
from accelerant.nn.train.step import TrainStep

if TYPE_CHECKING:
    from accelerant.nn.train.trainer import Trainer

__all__ = ["Rescue"]

_LOOKED_AT = ("cpu",)
"""Devices on which a step's gradients are looked at before the update: nothing has to wait there."""

_REPLAYED_STEPS = 1000
"""More steps than this are not done again: the message says so."""


class Rescue:
    """Keeps what a diagnosis needs; a context manager.

    Args:
        trainer: whose run it is.
        source: of its batches.
        checkpoints: of its folder; None without one.
        rate: the learning rate of a step.
        start, position: where this run began.
        watches: whether steps are the Trainer's own, which can be looked into and done again.
    """

    def __init__(
        self,
        trainer: Trainer,
        source: Source,
        checkpoints: Checkpoints | None,
        rate: Callable[[int], float],
        start: int,
        position: dict[str, int],
        *,
        watches: bool = True,
    ) -> None:
        self._trainer = trainer
        self._source = source
        self._checkpoints = checkpoints
        self._rate = rate
        self._position = position
        self._step = start
        self._saved = start
        self._waits = watches and trainer.device.type in _LOOKED_AT
        self._seen: list[tuple[Batch, Tensor]] = []
        self._random: Tensor | None = None
        self._handle: Any = None
        self._first: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        if watches and not self._waits and not start:
            tensors, values = gathered(trainer.model, trainer.optimizer, trainer.device)
            self._first = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}, values

    def __enter__(self) -> Rescue:
        if self._waits:
            self._handle = self._trainer.optimizer.register_step_pre_hook(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def begin(self, step: int) -> None:
        """A step comes, 0 the first."""
        self._step = step
        self._seen = []
        if self._waits:
            self._random = torch.get_rng_state()

    def saved(self, step: int) -> None:
        """A checkpoint of so many steps was written."""
        self._saved, self._first = step, None

    def watched(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The loss, and on the CPU a look at what goes in and comes out."""
        if not self._waits:
            return loss
        parts = self._trainer.config.accumulate

        def run(*batch: Tensor) -> Tensor:
            if self._seen:
                self._trainer.tell("advance", len(self._seen) / parts, f"step {self._step + 1}")
            value = loss(*batch)
            self._seen.append((batch, value.detach()))
            return value

        return run

    def diagnosis(self, step: object, failed: int, loss: Callable[..., Tensor]) -> str:
        """What to tell of a step that failed: the module, the last good checkpoint. The model goes back to before it.

        Args:
            step: does the steps since the last checkpoint again, on a GPU; another than TrainStep is not asked to.
            failed: the step, 0 the first.
            loss: of a batch, in the training's precision.
        """
        if not isinstance(step, TrainStep):
            return f"not diagnosed: the steps are not the Trainer's own; {self._last_good()}"
        try:
            parts = [batch for batch, _ in self._seen] if self._waits else self._before(step, failed)
        except (FormatError, StopIteration) as error:
            return f"not diagnosed: {error}; {self._last_good()}"
        if parts is None:
            return f"not diagnosed: the state kept last is {failed - self._saved:,} steps back; {self._last_good()}"
        if self._random is not None:
            torch.set_rng_state(self._random)
        self._trainer.model.train()
        if parts is not None and len(parts) > 1:  # a mean over no targets is NaN, and does not count
            kept = self._trainer.objective.weigh(parts)
            if kept is not None:
                parts = [part for part, share in zip(parts, kept.tolist(), strict=True) if share != 0]
        return f"{find_not_finite(self._trainer.model, loss, parts)}; {self._last_good()}"

    def _look(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before the update of a step on the CPU: raise where the loss or a gradient is not finite."""
        grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        norms = torch._foreach_norm([grad for grad in grads if not grad.is_sparse])
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        loss = self._mean_seen()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(self._step, loss, norm)

    def _mean_seen(self) -> float:
        """The loss of the step under way: its parts weighed as the step weighs them."""
        parts, values = [batch for batch, _ in self._seen], [float(value) for _, value in self._seen]
        weights = self._trainer.objective.weigh(parts) if len(parts) > 1 else None
        shares: list[float] = [1 / len(parts)] * len(parts) if weights is None else weights.tolist()
        return sum(value * share for value, share in zip(values, shares, strict=True) if share != 0)

    def _before(self, step: TrainStep, failed: int) -> list[Batch] | None:
        """Put everything back to before the failed step; its parts. None: that would take too long."""
        if failed - self._saved > _REPLAYED_STEPS:
            return None
        trainer = self._trainer
        position, path = self._position, ""
        if self._first is not None:
            tensors, document = self._first
            trainer.optimizer.state.clear()
        elif self._checkpoints is not None:
            tensors, document, _ = self._checkpoints.load()
            position, path = document.get("position", {}), str(self._checkpoints.path)
        else:
            return None
        restored(Path(path), tensors, document, trainer.model, trainer.optimizer, trainer.device)
        step.reset()
        start = int(document.get("step", 0))
        batches = self._source.batches(range(start, failed + 1), position, pin=False)
        try:
            for number in range(start, failed):
                step(self._moved(next(batches)), self._rate(number))
            return self._moved(next(batches))
        finally:
            batches.close()

    def _moved(self, parts: Sequence[Batch]) -> list[Batch]:
        there = [tuple(each.to(self._trainer.device) for each in part) for part in parts]
        return split(there, self._source.micro_batch)

    def _last_good(self) -> str:
        if self._checkpoints is None:
            return "there is no checkpoint: the training has no folder"
        if not self._saved:
            return "there is no checkpoint yet"
        return f"the last good checkpoint, of step {self._saved}, is kept in {self._checkpoints.path}"
