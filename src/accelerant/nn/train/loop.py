"""The training loop: steps, evaluation, stopping, and nothing that waits for the device at each step.

It knows neither model nor files: the step does the arithmetic, and its owner (trainer.py) the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from accelerant.nn.train.batches import Batch
from accelerant.nn.train.metrics import PendingStep, StepRecord, StepTimer, peak_memory_bytes
from accelerant.nn.train.objective import Evaluation
from accelerant.nn.train.step import StepResult

__all__ = ["Loop", "LoopEvents", "NotFinite", "Pace", "split"]

_FLUSH_STEPS = 50
_FLUSH_S = 1.0


class NotFinite(Exception):  # noqa: N818  caught inside: users see DivergenceError
    """A step's loss or gradient is not finite.

    Attributes:
        step: of it, 0 the first.
        loss, grad_norm: what was found; the norm None where the gradients were not looked at.
    """

    def __init__(self, step: int, loss: float, grad_norm: float) -> None:
        self.step, self.loss, self.grad_norm = step, loss, grad_norm
        super().__init__(f"training diverged at step {step + 1}: loss {loss}, gradient norm {grad_norm}")


@dataclass(frozen=True, slots=True)
class LoopEvents:
    """What the loop tells and asks its owner.

    Attributes:
        records: called with the steps whose numbers have arrived.
        evaluate: called with the steps done, where an evaluation is due.
        save: called with the steps done, when a checkpoint is due.
        stopping: asked after each step; True ends the loop.
        before: called with the number of each step, 0 the first, before it.
    """

    records: Callable[[Sequence[StepRecord]], None]
    evaluate: Callable[[int], Evaluation]
    save: Callable[[int], None]
    stopping: Callable[[], bool]
    before: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Pace:
    """How far a run goes, and what it does on the way.

    Attributes:
        steps: in all.
        rate: the learning rate of a step, 0 the first.
        evaluate_at: steps done at which to evaluate.
        save_every: steps between checkpoints; 0: by time alone.
        save_every_s: seconds between them.
        per_step: samples or tokens in a step.
        tokens: whether they are tokens.
    """

    steps: int
    rate: Callable[[int], float]
    evaluate_at: Collection[int]
    save_every: int
    save_every_s: float
    per_step: int
    tokens: bool


def split(parts: Sequence[Batch], micro_batch: int | None) -> list[Batch]:
    """The parts of a step, each of micro_batch rows."""
    if micro_batch is None:
        return list(parts)
    return [rows for part in parts for rows in zip(*(each.split(micro_batch) for each in part), strict=True)]


class Loop:
    """Does the steps of a run, from any step on.

    Args:
        step: one of them.
        device: where it computes.
        micro_batch: rows at once; None: the parts of a step are as they should be.
        pace: what happens when.
        events: the owner.
    """

    def __init__(
        self,
        step: Callable[[Sequence[Batch], float], StepResult],
        *,
        device: torch.device,
        micro_batch: int | None,
        pace: Pace,
        events: LoopEvents,
    ) -> None:
        self._step = step
        self._device = device
        self._micro_batch = micro_batch
        self._pace = pace
        self._events = events
        self._pending: list[PendingStep] = []
        self._flushed_at = self._saved_at = time.monotonic()

    def run(self, start: int, batches: Iterator[Sequence[Batch]]) -> int:
        """Do the steps from `start` (0 at first) to the last, or until stopped.

        Args:
            start: steps done before.
            batches: the parts of each step from there on.

        Returns:
            Steps done in all; a checkpoint of that step was asked for.

        Raises:
            NotFinite: a loss or gradient is not finite; no later checkpoint was asked for.
        """
        pace, done = self._pace, start
        timer = StepTimer(self._device)
        while done < pace.steps:
            parts = next(batches)
            self._events.before(done)
            self._one(done, parts, timer)
            done += 1
            evaluating = done in pace.evaluate_at
            if evaluating:
                self._flush(evaluate_after=done)
            stopping = self._events.stopping()
            if stopping or done == pace.steps or self._save_is_due(done):
                self._flush()
                self._events.save(done)
                self._saved_at = time.monotonic()
                timer.mark()
            elif evaluating:
                timer.mark()
            elif self._flush_is_due():
                self._flush()
            if stopping:
                break
        return done

    def _one(self, step: int, parts: Sequence[Batch], timer: StepTimer) -> None:
        rate = self._pace.rate(step)
        moved = [tuple(each.to(self._device, non_blocking=True) for each in part) for part in parts]
        result = self._step(split(moved, self._micro_batch), rate)
        self._pending.append(PendingStep(step + 1, result.loss, result.grad_norm, rate, timer.lap()))

    def _save_is_due(self, done: int) -> bool:
        every = self._pace.save_every
        return (every > 0 and done % every == 0) or time.monotonic() - self._saved_at > self._pace.save_every_s

    def _flush_is_due(self) -> bool:
        late = time.monotonic() - self._flushed_at > _FLUSH_S
        return self._device.type == "cpu" or late or len(self._pending) >= _FLUSH_STEPS

    def _flush(self, evaluate_after: int = 0) -> None:
        """Read the pending steps' numbers with one wait, check them and pass them on, the last with its evaluation."""
        pending, self._pending = self._pending, []
        self._flushed_at = time.monotonic()
        if not pending:
            return
        numbers = torch.stack([torch.stack([step.loss, step.grad_norm]) for step in pending]).tolist()
        peak = peak_memory_bytes(self._device)
        records: list[StepRecord] = []
        for step, (loss, norm) in zip(pending, numbers, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._events.records(records)
                raise NotFinite(step.step - 1, loss, norm)
            evaluation = self._events.evaluate(evaluate_after) if evaluate_after and step is pending[-1] else None
            records.append(self._record(step, loss, norm, peak, evaluation))
        self._events.records(records)

    def _record(
        self, step: PendingStep, loss: float, norm: float, peak: int, evaluation: Evaluation | None
    ) -> StepRecord:
        ms = step.lap.ms()
        speed = round(self._pace.per_step / (ms / 1e3), 1)
        return StepRecord(
            step=step.step,
            loss=loss,
            tokens_per_s=speed if self._pace.tokens else None,
            ms=round(ms, 3),
            peak_memory_bytes=peak,
            learning_rate=step.learning_rate,
            grad_norm=norm,
            validation_loss=None if evaluation is None else evaluation.loss,
            samples_per_s=None if self._pace.tokens else speed,
            validation=(evaluation.metrics or None) if evaluation is not None else None,
        )
