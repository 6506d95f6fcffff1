"""Training of any module: `Trainer`, and `fit`, its short form.

history = fit(model, x, y, TrainConfig(epochs=5, learning_rate=3e-3), validation=(x_test, y_test))
print(history)
"""

from __future__ import annotations

import functools
import json
import logging
import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelerant.errors import ConfigError, DivergenceError, FormatError, OutOfMemory
from accelerant.nn.layers import float8_weights, require_float8
from accelerant.nn.train.callbacks import Callback, Step, TensorBoard
from accelerant.nn.train.checkpoint import Best, Checkpoints, gathered, require_same_config, restored
from accelerant.nn.train.config import TrainConfig
from accelerant.nn.train.data import Batch, Data, Source, make_source, split
from accelerant.nn.train.environment import StopRequest, numerics
from accelerant.nn.train.folder import RunLock
from accelerant.nn.train.history import (
    History,
    MetricsFile,
    PendingStep,
    StepRecord,
    StepTimer,
    peak_memory_bytes,
    reserved_memory_bytes,
)
from accelerant.nn.train.nan_diagnosis import NotFinite, Rescue
from accelerant.nn.train.objective import (
    Evaluation,
    Loss,
    Metric,
    Objective,
    autocast,
    evaluate,
    modes_of,
    precision_of,
    restore_modes,
)
from accelerant.nn.train.optim import MakeOptimizer, learning_rate, make_optimizer
from accelerant.nn.train.profiler import KernelTime, StepProfiler
from accelerant.nn.train.step import StepResult, TrainStep, recomputed
from accelerant.runtime import registry
from accelerant.runtime.files import write_atomic
from accelerant.runtime.memory.limits import available_bytes, peak_recorded, size_text
from accelerant.runtime.memory.peak import predict_peak

__all__ = [
    "Loop",
    "LoopEvents",
    "Pace",
    "Run",
    "Trainer",
    "fit",
]

# --- the loop --------------------------------------------------------------------------------------------------------


_FLUSH_STEPS = 50
_FLUSH_S = 1.0


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


# --- a run -----------------------------------------------------------------------------------------------------------


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


# --- the trainer -----------------------------------------------------------------------------------------------------


def fit(
    model: nn.Module,
    data: Data,
    targets: Data | None = None,
    config: TrainConfig | None = None,
    *,
    validation: Any = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
) -> History:
    """Train a model: Trainer(model, config, ...).fit(data, targets, ...), where arguments and errors are explained."""
    trainer = Trainer(model, config, loss=loss, optimizer=optimizer, metrics=metrics, callbacks=callbacks)
    return trainer.fit(data, targets, validation=validation, resume=resume)


class Trainer:
    """Trains one module.

    Args:
        model: is moved to the config's device and changed in place.
        config: how; the defaults where it is None.
        loss: "cross_entropy", "mse", or a function of outputs and targets. None: the model's method `loss`, called with
            the tensors of a batch; or, of a model without one, by the targets: cross entropy of integers (the classes
            are the outputs' last dimension), mean squared error of others.
        optimizer: makes one from parameters; None: the config's. The learning rate is the config's in any case.
        metrics: functions of outputs and targets, measured in evaluations; None: accuracy with cross entropy.
        callbacks: are told what happens, in that order.

    Attributes:
        model, config, device, optimizer, callbacks: as they are used.
        objective: the loss of a batch, by module.
        precision: the dtype to compute in; None for the parameters' own.
        history: of the present or the last run.
        profile: the table by kernel, where a profile was taken.
        step: what makes the steps in place of a TrainStep (extension.py); None.

    Raises:
        ConfigError: a value that has no meaning for this model.
        BackendUnavailable: the device is not there.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig | None = None,
        *,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config = config or TrainConfig()
        self.device = _device(self.config.device)
        if self.config.precision == "fp8":
            require_float8(self.device)
            float8_weights(model)
        self.objective = Objective(model, loss, metrics)
        self.model = model.to(self.device)
        if optimizer is None:
            self.optimizer: torch.optim.Optimizer = make_optimizer(model, self.config)
        else:
            self.optimizer = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        self.callbacks = list(callbacks)
        if self.config.log == "tensorboard":
            self.callbacks.append(TensorBoard(Path(self.config.folder) / "tensorboard"))
        self.precision = precision_of(self.config, self.device)
        self.history = History()
        self.profile: list[KernelTime] = []
        self.step: Step | None = None
        self._stop = ""

    def stop(self, reason: str) -> None:
        """End the training after the present step; for callbacks."""
        self._stop = reason or "a callback asked for it"

    def fit(self, data: Data, targets: Data | None = None, *, validation: Any = None, resume: bool = False) -> History:
        """Train.

        Args:
            data: tensors or arrays of rows (several in a tuple), a torch Dataset or DataLoader, a token file.
            targets: a row for each of data's; None where data have their own, or the model's loss wants none.
            validation: data to evaluate on: (data, targets), or a Dataset, DataLoader or token file.
            resume: go on from the newest whole checkpoint in the config's folder, or begin where there is none. On the
                CPU the result is, bit for bit, that of a run that was never interrupted.

        Returns:
            How it went. The model is trained in place; each of its modules is left in the mode in which it was.

        Raises:
            ConfigError: data, targets and config do not go together; the folder holds a run and resume is False, or
                another process uses it.
            FormatError: the checkpoints are torn or of another model.
            DivergenceError: a loss or gradient is not finite; names step, layer and the last good checkpoint.
            OutOfMemory: a step does not fit the device.
            KeyboardInterrupt: Ctrl-C; the step was finished, and a checkpoint written where there is a folder.
        """
        source = make_source(data, targets, self.config)
        rows, parts = self.config.batch_size, self.config.accumulate
        if rows % parts and not isinstance(data, DataLoader):
            raise ConfigError(f"accumulate must divide the batch_size of {rows}, got {parts}")
        held_out = None
        if validation is not None:
            first, second = validation if isinstance(validation, tuple) and len(validation) == 2 else (validation, None)
            held_out = make_source(first, second, self.config)
        elif self.config.patience or self.config.keep_best:
            raise ConfigError("patience and keep_best go by held-out data: give validation")
        with numerics(deterministic=self.config.deterministic):
            if not self.config.folder:
                if resume:
                    raise ConfigError("resume goes on from a checkpoint: give the config a folder")
                return _raised(self.run(source, held_out))
            return self._fit_in_folder(Path(self.config.folder), source, held_out, resume)

    def evaluate(self, data: Data, targets: Data | None = None) -> Evaluation:
        """The loss and the metrics on some data, all of it, in order."""
        return self.measure(make_source(data, targets, self.config), step=0)

    def measure(self, source: Source, *, step: int) -> Evaluation:
        """The same on a source, after so many steps."""
        total = source.rows()

        def watch(rows: int) -> None:
            if total:
                self.tell("advance", min(1.0, rows / total), "held-out loss")

        with closing(source.in_order(source.micro_batch or self.config.micro_batch)) as batches:
            return evaluate(
                self.objective,
                self.model,
                batches,
                step=step,
                device=self.device,
                precision=self.precision,
                watch=watch,
            )

    def tell(self, occasion: str, *arguments: Any) -> None:
        """Call that method of each callback."""
        for callback in self.callbacks:
            getattr(callback, occasion)(self, *arguments)

    def run(
        self,
        source: Source,
        held_out: Source | None = None,
        *,
        folder: Path | None = None,
        resume: bool = False,
        fingerprint: str = "",
        evaluate_at: Collection[int] | None = None,
    ) -> History:
        """Train on a source: what `fit` does once it has its data and the right to its folder.

        Args:
            source, held_out: to learn from, and to evaluate on.
            folder: for checkpoints and metrics; None writes nothing.
            resume: start from the newest whole checkpoint there.
            fingerprint: of the data; the source's own by default.
            evaluate_at: steps done at which to evaluate; by the config otherwise.

        Returns:
            How it went; after SIGINT or SIGTERM with a checkpoint written.

        Raises: as `fit`.
        """
        self._stop = ""
        modes = modes_of(self.model)
        run = Run(self, source, held_out, folder, fingerprint or source.fingerprint(), evaluate_at)
        self.history = run.history
        try:
            history = run.go(resume=resume)
        except BaseException as error:
            self.tell("failed", error)
            raise
        finally:
            restore_modes(modes)
        self.profile = run.profile
        self.tell("end", history)
        return history

    @property
    def stopping(self) -> str:
        """Why `stop` was called; empty where it was not."""
        return self._stop

    def loss(self, *batch: Tensor) -> Tensor:
        """The loss of a batch, in the precision of the training."""
        return self.loss_of(self.model, *batch)

    def loss_of(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """The same of another module in the model's place."""
        with autocast(self.device, self.precision):
            return self.objective(model, *batch)

    def _fit_in_folder(self, folder: Path, source: Source, held_out: Source | None, resume: bool) -> History:
        checkpoints = Checkpoints(folder)
        with RunLock(folder) as lock:
            if not resume and (checkpoints.exist or (folder / "metrics.jsonl").exists()):
                raise ConfigError(f"{folder} holds a training: give resume=True to go on, or another folder")
            lock.take()
            going_on = checkpoints.exist
            if not going_on:
                self._write_json(folder / "train.json", self.config.to_dict())
            history = self.run(source, held_out, folder=folder, resume=going_on)
            if going_on:  # only now: a config that the checkpoint does not go with is refused
                self._write_json(folder / "train.json", self.config.to_dict())
            self._write_json(folder / "history.json", history.to_dict())
        return _raised(history)

    @staticmethod
    def _write_json(path: Path, values: Mapping[str, Any]) -> None:
        write_atomic(path, (json.dumps(values, indent=2) + "\n").encode())


def _device(name: str) -> torch.device:
    """The torch device of a config's name.

    Raises:
        ConfigError: there is none of that name.
        BackendUnavailable: it is not on this machine.
    """
    if ":" not in name:
        return torch.device(registry.choose(name).torch_device)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or a device of torch, got {name!r}: {error}") from None
    registry.choose(device.type)  # says why, where it is not there
    return device


def _raised(history: History) -> History:
    """Hand a signal on that the run has taken."""
    if history.signal == signal.SIGINT:
        raise KeyboardInterrupt(f"stopped after step {history.steps} of {history.total_steps}")
    if history.signal is not None:
        raise SystemExit(128 + history.signal)
    return history
