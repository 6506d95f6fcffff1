"""The training loop: steps, validation, stopping, and nothing that waits for the device at each step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accelerant.errors import DivergenceError
from accelerant.nn.models.gpt import GPT
from accelerant.nn.train.batches import Prefetcher, Tokens, even_windows
from accelerant.nn.train.metrics import MetricsFile, PendingStep, StepRecord, StepTimer, peak_memory_bytes
from accelerant.nn.train.optim import learning_rate, set_learning_rate
from accelerant.nn.train.presets import RunConfig

__all__ = ["Loop", "LoopEvents", "Validation", "autocast", "evaluate"]

_FLUSH_STEPS = 50
_FLUSH_S = 1.0
_CPU_TOKENS = 4096  # at once: logits of more leave the caches and take gigabytes (small: 64 windows, 4.5 GB)


@dataclass(frozen=True, slots=True)
class LoopEvents:
    """What the loop tells and asks its owner.

    Attributes:
        records: called with the steps whose numbers have arrived.
        save: called with the number of steps done, when a checkpoint is due.
        stopping: asked after each step; True ends the loop.
        advance: called on the CPU, where it takes long, with the part done of what the text names.
    """

    records: Callable[[Sequence[StepRecord]], None]
    save: Callable[[int], None]
    stopping: Callable[[], bool]
    advance: Callable[[float, str], None] = lambda _share, _text: None


@dataclass(frozen=True, slots=True)
class Validation:
    """A held-out loss: nats a token, nats a byte, and how many tokens were read."""

    nats_per_token: float
    nats_per_byte: float
    tokens: int


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 where a GPU computes in it natively, else nothing."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()


@torch.no_grad()
def evaluate(
    model: GPT,
    windows: NDArray[np.int64],
    byte_lengths: NDArray[np.int64],
    *,
    micro_batch: int,
    device: torch.device,
    watch: Callable[[float], None] = lambda _share: None,
) -> Validation:
    """The model's loss on some windows.

    Args:
        model: on device.
        windows: (n, context + 1), n at least 1.
        byte_lengths: (vocab_size,), bytes of each token.
        micro_batch: windows at once.
        device: where to.
        watch: is told which part is done.
    """
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, len(windows), micro_batch):
        rows = torch.from_numpy(windows[start : start + micro_batch]).to(device)
        with autocast(device):
            total += model.loss(rows[:, :-1], rows[:, 1:]).double() * rows[:, 1:].numel()
        watch(min(1.0, (start + micro_batch) / len(windows)))
    model.train()
    targets = windows[:, 1:]
    nats = float(total)
    return Validation(nats / targets.size, nats / max(1, int(byte_lengths[targets].sum())), targets.size)


def _windows_at_once(micro_batch: int, context: int, device: torch.device) -> int:
    """The micro-batch to compute with: on the CPU its largest divisor whose tokens stay near the caches."""
    if device.type != "cpu":
        return micro_batch
    most = max(1, _CPU_TOKENS // context)
    return next(count for count in range(min(micro_batch, most), 0, -1) if micro_batch % count == 0)


class Loop:
    """Trains a model for the steps of a run, from any step on.

    Args:
        model, optimizer: changed in place.
        run: recipe and seed.
        tokens, held_out: what to learn from and what to measure with.
        byte_lengths: (vocab_size,), bytes of each token.
        device: where the model is.
        metrics: receives a record a step.
        events: the owner.
    """

    def __init__(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        run: RunConfig,
        *,
        tokens: Tokens,
        held_out: Tokens,
        byte_lengths: NDArray[np.int64],
        device: torch.device,
        metrics: MetricsFile,
        events: LoopEvents,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._run = run
        self._tokens = tokens
        self._held_out = held_out
        self._byte_lengths = byte_lengths
        self._device = device
        self._metrics = metrics
        self._events = events
        self._micro_batch = _windows_at_once(run.recipe.micro_batch, run.recipe.context, device)
        self._pending: list[PendingStep] = []
        self._flushed_at = self._saved_at = time.monotonic()

    def run(self, start: int) -> int:
        """Do the steps from `start` (0 at first) to the recipe's last, or until stopped.

        Returns:
            Steps done in all; a checkpoint of that step was asked for.

        Raises:
            DivergenceError: a loss or gradient is not finite; no later checkpoint was asked for.
        """
        recipe = self._run.recipe
        if start >= recipe.steps:
            return start
        validate_at = {round(recipe.steps * k / (recipe.validations + 1)) for k in range(1, recipe.validations + 1)}
        done = start
        self._model.train()
        with Prefetcher(
            self._tokens,
            seed=self._run.seed,
            steps=range(start, recipe.steps),
            count=recipe.batch_size,
            context=recipe.context,
            pin=self._device.type == "cuda",
        ) as batches:
            timer = StepTimer(self._device)
            for rows in batches:
                self._step(done, rows, timer)
                done += 1
                stopping = self._events.stopping()
                if done in validate_at:
                    self._flush(self.validate(recipe.validation_sizes[0]).nats_per_token)
                    timer.mark()
                if stopping or done == recipe.steps or time.monotonic() - self._saved_at > recipe.checkpoint_every_s:
                    self._flush()
                    self._events.save(done)
                    self._saved_at = time.monotonic()
                    timer.mark()
                elif self._flush_is_due():
                    self._flush()
                if stopping:
                    break
        return done

    def validate(self, tokens: int) -> Validation:
        """The held-out loss over about that many tokens, at least one window."""
        recipe = self._run.recipe
        windows = even_windows(self._held_out, count=max(1, tokens // recipe.context), context=recipe.context)
        return evaluate(
            self._model,
            windows,
            self._byte_lengths,
            micro_batch=self._micro_batch,
            device=self._device,
            watch=lambda share: self._events.advance(share, "held-out loss"),
        )

    def _step(self, step: int, rows: Tensor, timer: StepTimer) -> None:
        recipe = self._run.recipe
        rate = learning_rate(recipe, step)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.zero_grad(set_to_none=True)
        rows = rows.to(self._device, non_blocking=True)
        parts = recipe.batch_size // self._micro_batch
        total = torch.zeros((), device=self._device)
        for number, part in enumerate(rows.split(self._micro_batch), 1):
            with autocast(self._device):
                loss = self._model.loss(part[:, :-1], part[:, 1:]) / parts
            loss.backward()
            total += loss.detach()
            if self._device.type == "cpu" and number < parts:
                self._events.advance(number / parts, f"step {step + 1}")
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), recipe.clip)
        self._optimizer.step()
        self._pending.append(PendingStep(step + 1, total, norm.detach(), rate, timer.lap()))

    def _flush_is_due(self) -> bool:
        late = time.monotonic() - self._flushed_at > _FLUSH_S
        return self._device.type == "cpu" or late or len(self._pending) >= _FLUSH_STEPS

    def _flush(self, validation_loss: float | None = None) -> None:
        """Read the pending steps' numbers with one wait, check them and pass them on."""
        pending, self._pending = self._pending, []
        self._flushed_at = time.monotonic()
        if not pending:
            return
        numbers = torch.stack([torch.stack([step.loss, step.grad_norm.float()]) for step in pending]).tolist()
        peak = peak_memory_bytes(self._device)
        records: list[StepRecord] = []
        for step, (loss, norm) in zip(pending, numbers, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._publish(records)
                raise DivergenceError(f"training diverged at step {step.step}: loss {loss}, gradient norm {norm}")
            ms = step.lap.ms()
            speed = self._run.recipe.tokens_per_step / (ms / 1e3)
            last = step is pending[-1]
            records.append(
                StepRecord(
                    step=step.step,
                    loss=loss,
                    tokens_per_s=round(speed, 1),
                    ms=round(ms, 3),
                    peak_memory_bytes=peak,
                    learning_rate=step.learning_rate,
                    grad_norm=norm,
                    validation_loss=validation_loss if last else None,
                )
            )
        self._publish(records)

    def _publish(self, records: list[StepRecord]) -> None:
        self._metrics.append(records)
        self._events.records(records)
