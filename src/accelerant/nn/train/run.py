"""One run of a Trainer: from the first step, or a checkpoint, to its end."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerant.errors import ConfigError, DivergenceError, FormatError, OutOfMemory
from accelerant.nn.train.best import Best
from accelerant.nn.train.checkpoint import Checkpoints
from accelerant.nn.train.config import TrainConfig
from accelerant.nn.train.environment import StopRequest
from accelerant.nn.train.history import History
from accelerant.nn.train.loop import Loop, LoopEvents, NotFinite, Pace
from accelerant.nn.train.metrics import MetricsFile, StepRecord, peak_memory_bytes, reserved_memory_bytes
from accelerant.nn.train.objective import Evaluation
from accelerant.nn.train.optim import learning_rate
from accelerant.nn.train.profiler import KernelTime, StepProfiler
from accelerant.nn.train.recompute import recomputed
from accelerant.nn.train.rescue import Rescue
from accelerant.nn.train.source import Source
from accelerant.nn.train.state import gathered, require_same_config, restored
from accelerant.nn.train.step import TrainStep
from accelerant.runtime.memory.limits import available_bytes, peak_recorded, size_text
from accelerant.runtime.memory.peak import predict_peak

if TYPE_CHECKING:
    from accelerant.nn.train.trainer import Trainer

__all__ = ["Run"]


class Run:
    """What one run of a trainer holds.

    Args:
        trainer: model, optimiser, config, callbacks.
        source, held_out: to learn from, and to evaluate on.
        folder: for checkpoints and metrics; None writes nothing.
        fingerprint: of the data.
        evaluate_at: steps done at which to evaluate; None: by the config.

    Attributes:
        history: what was done so far.
    """

    def __init__(
        self,
        trainer: Trainer,
        source: Source,
        held_out: Source | None,
        folder: Path | None,
        fingerprint: str,
        evaluate_at: Collection[int] | None,
    ) -> None:
        config = trainer.config
        self._trainer = trainer
        self._source = source
        self._held_out = held_out
        self._folder = folder
        self._fingerprint = fingerprint
        self._checkpoints = None if folder is None else Checkpoints(folder)
        self.history = History(total_steps=config.steps or source.steps(config.epochs))
        self._best = Best(config.patience, config.min_delta)
        self._profiler: StepProfiler | None = None
        if evaluate_at is None:
            evaluate_at = () if held_out is None else _evaluation_steps(config, self.history.total_steps)
        self._pace = Pace(
            steps=self.history.total_steps,
            rate=functools.partial(learning_rate, config, self.history.total_steps),
            evaluate_at=frozenset(evaluate_at),
            save_every=config.checkpoint_every,
            save_every_s=config.checkpoint_every_s,
            per_step=source.per_step,
            tokens=source.unit == "tokens",
        )

    @property
    def _enough(self) -> str:
        return f"no better held-out loss in {self._trainer.config.patience} evaluations"

    @property
    def profile(self) -> list[KernelTime]:
        """The table by kernel; empty without a profile."""
        return [] if self._profiler is None else self._profiler.table

    def go(self, *, resume: bool) -> History:
        """Train, from the newest whole checkpoint where resume is set.

        Raises: as `Trainer.fit`.
        """
        began, history, trainer = time.monotonic(), self.history, self._trainer
        document: dict[str, Any] = {}
        if self._checkpoints is not None:
            if resume:
                document = self._restore(self._checkpoints)
            self._checkpoints.clean()
        start = history.resumed_from
        path = None if self._folder is None else self._folder / "metrics.jsonl"
        self._metrics = MetricsFile(path, keep_steps=start)
        history.records = self._metrics.records
        if path is not None and self._metrics.lost:
            self._note(
                f"{path} lacks {self._metrics.lost:,} of the {start:,} steps before: the history begins without them"
            )
        if not trainer.model.training:  # else a part that is in eval mode is frozen on purpose
            trainer.model.train()
        # What earlier parts of the program held does not count as this run's peak.
        counted: AbstractContextManager[object] = nullcontext()
        if trainer.device.type == "cuda":
            counted = peak_recorded(trainer.device)
        with StopRequest() as stop, counted, recomputed(trainer.model, trainer.config.recompute):
            if trainer.config.predict_memory:
                history.predicted_peak_bytes = self._predict()
            if self._best.exhausted:  # it was stopped early, and is still as it was
                trainer.stop(self._enough)
            else:
                self._train(start, document.get("position", {}), stop)
            if stop:
                history.status, history.signal = "interrupted", stop.signal
            elif trainer.stopping:
                history.status, history.reason = "stopped", trainer.stopping
        if trainer.config.keep_best and history.status != "interrupted":
            self._best.give(trainer.model, self._folder)
        history.seconds = time.monotonic() - began
        history.peak_memory_bytes = peak_memory_bytes(trainer.device)
        history.reserved_memory_bytes = reserved_memory_bytes(trainer.device)
        return history

    def _train(self, start: int, position: dict[str, int], stop: StopRequest) -> None:
        trainer, source, pace = self._trainer, self._source, self._pace
        if trainer.config.profile and self._folder is not None:
            steps = range(start, pace.steps)
            self._profiler = StepProfiler(self._folder, trainer.config.profile, steps, trainer.device)
        pin = trainer.device.type == "cuda"
        with ExitStack() as opened:
            own = trainer.step is None
            self._rescue = Rescue(trainer, source, self._checkpoints, pace.rate, start, position, watches=own)
            opened.enter_context(self._rescue)
            step = self._step() if trainer.step is None else trainer.step
            batches = opened.enter_context(closing(source.batches(range(start, pace.steps), position, pin=pin)))
            events = LoopEvents(
                records=self._records,
                evaluate=self._evaluate,
                save=self._save,
                stopping=lambda: bool(stop or trainer.stopping),
                before=self._before,
            )
            loop = Loop(step, device=trainer.device, micro_batch=source.micro_batch, pace=pace, events=events)
            trainer.tell("begin", start, pace.steps)
            try:
                self.history.steps = loop.run(start, batches)
            except NotFinite as error:
                batches.close()
                raise DivergenceError(f"{error}; {self._rescue.diagnosis(step, error.step, trainer.loss)}") from error
            except torch.OutOfMemoryError as error:
                raise _out_of_memory(trainer.config, error) from None
            finally:
                if self._profiler is not None:
                    self._profiler.finish()

    def _step(self) -> TrainStep:
        trainer, config = self._trainer, self._trainer.config
        graph = {"auto": None, "on": True, "off": False}[config.graph]
        return TrainStep(
            trainer.model,
            trainer.optimizer,
            self._rescue.watched(functools.partial(trainer.objective, trainer.model)),
            max_grad_norm=config.clip or None,
            accumulate=config.accumulate,
            weigh=trainer.objective.weigh,
            precision=torch.float8_e4m3fn if config.precision == "fp8" else trainer.precision,
            graph=graph if self._source.fixed else False,
        )

    # --- what the loop asks ------------------------------------------------------------------------------------------

    def _before(self, step: int) -> None:
        self._rescue.begin(step)
        if self._profiler is not None:
            self._profiler.before(step)
        self._trainer.tell("before_step", step)

    def _records(self, records: Sequence[StepRecord]) -> None:
        self._metrics.append(records)
        self._trainer.tell("records", records)

    def _evaluate(self, step: int) -> Evaluation:
        assert self._held_out is not None  # for the type checker: there are no steps to evaluate at otherwise
        config, trainer = self._trainer.config, self._trainer
        evaluation = trainer.measure(self._held_out, step=step)
        self.history.evaluations.append(evaluation)
        if self._best.see(evaluation) and config.keep_best:
            self._best.keep(trainer.model, self._folder)
        if self._best.exhausted:
            trainer.stop(self._enough)
        trainer.tell("evaluated", evaluation)
        return evaluation

    def _save(self, step: int) -> None:
        if self._checkpoints is None:
            return
        trainer, history = self._trainer, self.history
        tensors, values = gathered(trainer.model, trainer.optimizer, trainer.device)
        document = {
            **values,
            "step": step,
            "total_steps": history.total_steps,
            "data": self._fingerprint,
            "position": self._source.position(),
            "config": trainer.config.to_dict(),
            "best": self._best.state(),
            "evaluations": [asdict(each) for each in history.evaluations],
            "callbacks": self._callback_states(),
        }
        self._checkpoints.save(tensors, document)
        self._rescue.saved(step)
        trainer.tell("saved", self._checkpoints.path, step)

    # --- before the first step ---------------------------------------------------------------------------------------

    def _restore(self, checkpoints: Checkpoints) -> dict[str, Any]:
        """Put the newest whole checkpoint in place; its document."""
        trainer, history = self._trainer, self.history
        tensors, document, note = checkpoints.load()
        path = checkpoints.path if note is None else checkpoints.previous
        data = document.get("data", document.get("corpus_sha256"))  # as the first runs wrote it
        if data != self._fingerprint:
            advice = "restore them, or start a new run"
            raise FormatError(f"the data of {path.parent} changed since its checkpoint: {advice}")
        require_same_config(path, document.get("config", {}), trainer.config)
        wanted = document.get("total_steps", history.total_steps)
        if wanted != history.total_steps:
            raise ConfigError(f"checkpoint {path} is of a run of {wanted} steps, got {history.total_steps}")
        restored(path, tensors, document, trainer.model, trainer.optimizer, trainer.device)
        self._best.restore(document.get("best", {}))
        self._restore_callbacks(path, document.get("callbacks", []))
        history.evaluations = [Evaluation(**each) for each in document.get("evaluations", [])]
        history.resumed_from = history.steps = int(document["step"])
        if note is not None:
            self._note(note)
        return document

    def _callback_states(self) -> list[tuple[str, dict[str, Any]]]:
        """The class and the state of each callback that has one."""
        states = [(type(callback).__name__, dict(callback.state())) for callback in self._trainer.callbacks]
        return [(name, state) for name, state in states if state]

    def _restore_callbacks(self, path: Path, states: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Give each state to the callback of its class, those of one class in their order."""
        waiting = list(self._trainer.callbacks)
        for name, state in states:
            found = next((callback for callback in waiting if type(callback).__name__ == name), None)
            if found is None:
                raise ConfigError(f"checkpoint {path} has the state of a callback {name}, and there is none of it here")
            waiting.remove(found)
            found.restore(state)

    def _predict(self) -> int | None:
        """The peak of a step from its shapes; None, with a note, where shapes do not say it."""
        trainer = self._trainer
        try:
            batch = tuple(each.to(trainer.device) for each in self._source.example())
            with _quiet(logging.getLogger("torch._subclasses.fake_tensor")):  # the error is told in one line
                predicted = predict_peak(trainer.model, *batch, call=trainer.loss_of, optimizer=trainer.optimizer)
        except Exception as error:  # noqa: BLE001  whatever a model does with tensors that have no values
            self.history.notes.append(f"peak memory not predicted: {(str(error) or repr(error)).splitlines()[0]}")
            return None
        total = predicted.total
        if trainer.config.accumulate > 1:  # the gradients of earlier parts are there while a later one is computed
            every = sum(p.numel() * p.element_size() for p in trainer.model.parameters() if p.requires_grad)
            total += max(0, every - predicted.gradients)
        more = total - predicted.parameters  # those are there already
        if trainer.device.type == "cuda" and more > (room := available_bytes(trainer.device)):
            where = f"{size_text(room)} are free on {trainer.device}"
            self._note(f"a step is predicted to take {size_text(more)} more than the parameters; {where}")
        return total

    def _note(self, text: str) -> None:
        self.history.notes.append(text)
        self._trainer.tell("note", text)


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """A logger says nothing inside."""
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def _evaluation_steps(config: TrainConfig, steps: int) -> set[int]:
    """After which steps to evaluate; the last is one of them."""
    if config.evaluate_every:
        return {*range(config.evaluate_every, steps, config.evaluate_every), steps}
    return {max(1, round(steps * k / config.evaluations)) for k in range(1, config.evaluations + 1)}


def _out_of_memory(config: TrainConfig, error: Exception) -> OutOfMemory:
    reason = str(error).split("\n", maxsplit=1)[0]
    return OutOfMemory(
        f"{config.micro_batch} rows at once do not fit the device: raise accumulate (now {config.accumulate}), "
        f"or name modules in recompute ({reason})"
    )
