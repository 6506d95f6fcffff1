"""Training of any module: `Trainer`, and `fit`, its short form.

A `Source` (data.py) gives the batches, a `TrainStep` (step.py) does a step; `accelerant train` (job.py) runs on it.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelerant._renamed import missing_arguments
from accelerant._version import __version__
from accelerant.errors import (
    AccelerantError,
    ConfigError,
    DivergenceError,
    FormatError,
    OutOfMemory,
    TimeLimitExceeded,
    UnsupportedCase,
)
from accelerant.nn.layers import float8_weights, modes_kept, require_float8
from accelerant.nn.train.callbacks import Callback, NanDiagnosis, NotFinite, Step, TensorBoard
from accelerant.nn.train.checkpoint import BestModel, Checkpoints, gathered, is_full, require_same_config, restored
from accelerant.nn.train.config import TrainConfig
from accelerant.nn.train.data import Batch, Data, Source, make_source, split
from accelerant.nn.train.environment import StopRequest, numerics
from accelerant.nn.train.history import (
    History,
    MetricsFile,
    PendingStep,
    ProfiledKernel,
    RunFolder,
    RunLock,
    StepProfiler,
    StepRecord,
    StepTimer,
    peak_memory_bytes,
    reserved_memory_bytes,
    used_memory_bytes,
)
from accelerant.nn.train.objective import (
    Evaluation,
    Loss,
    MakeOptimizer,
    Metric,
    Objective,
    autocast,
    evaluate,
    learning_rate,
    make_optimizer,
    precision_of,
)
from accelerant.nn.train.parallel import start_equal
from accelerant.nn.train.step import LossScale, TrainStep, recomputed
from accelerant.ops._library import is_distributed
from accelerant.runtime import registry
from accelerant.runtime.files import clipped
from accelerant.runtime.ledger import ledger
from accelerant.runtime.memory.limits import available_bytes, peak_recorded, size_text
from accelerant.runtime.memory.peak import predict_peak
from accelerant.runtime.processes import Processes, Watch
from accelerant.runtime.time_limit import check_time, time_limit
from accelerant.tensors import TensorDevice, tensor_device, to
from accelerant.tensors.tensor import serves

_SHARED_BYTES = 1 << 20
"""A step on the CPU whose tensors take less runs on one thread: its operations are too short for two."""

_CPU_MEMORY = "DefaultCPUAllocator"  # in torch's error of an allocation on the CPU, a RuntimeError

_PEAK_EVERY_S = 0.1  # on the CPU, where reading the peak memory takes as long as a tenth of a small step
_FLUSH_STEPS, _FLUSH_S = 50, 1.0  # on a GPU, losses are read back after that many steps or seconds


_SETTINGS = ("lr", "learning_rate", "epochs", "steps", "batch_size", "optimizer_name", "device", "seed", "out")


@missing_arguments(**{name: f"TrainConfig({name}=...) as config=" for name in _SETTINGS})
def fit(
    model: nn.Module, data: Data, targets: Data | None = None, config: TrainConfig | None = None, *,
    validation: Any = None, loss: Loss | None = None, optimizer: MakeOptimizer | None = None,
    metrics: Mapping[str, Metric] | None = None, callbacks: Sequence[Callback] = (), resume: bool = False,
) -> History:  # fmt: skip
    """Train a model: Trainer(model, config, ...).fit(data, targets, ...), which documents arguments and errors."""
    trainer = Trainer(model, config, loss=loss, optimizer=optimizer, metrics=metrics, callbacks=callbacks)
    return trainer.fit(data, targets, validation=validation, resume=resume)


class Trainer:
    """Trains one module.

    Several processes of torch.distributed train together: each makes the same Trainer and calls the same methods.
    Rank 0 alone writes files, except checkpoints, which all may write. Callbacks run in each process.

    Args:
        model: moved to the config's device and trained in place.
        loss: "cross_entropy", "mse", or a function of outputs and targets. None for the model's method `loss`, called
            with the tensors of a batch; for a model without one, cross entropy of integer targets (the outputs' last
            dimension is the classes) and mean squared error of others.
        optimizer: constructs the optimizer from parameters; None for the config's. The learning rate is the config's in
            any case.
        metrics: functions of outputs and targets, measured in evaluations; None for accuracy with cross entropy.

    Attributes:
        device: torch's device of the batches; the CPU where the config's is one of OpenCL or WebGPU, to which the
            operations copy them.
        objective: the loss of a batch.
        precision: the dtype of autocast; None for the parameters' own.
        loss_scale: the LossScale of float16; None in other precisions.
        history: of the current or last run.
        profile: time by kernel, if a profile was taken.
        step: replaces TrainStep (see callbacks.Extension); None.
        stopping: the reason given to `stop` in this run; empty if it was not called.

    Raises:
        ConfigError: a value that does not apply to this model.
        BackendUnavailable: the device is absent.
    """

    def __init__(
        self, model: nn.Module, config: TrainConfig | None = None, *, loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None, metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        self.config = config or TrainConfig()
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigError("give the module inside the DistributedDataParallel: processes train together without it")
        self._first = Processes().first
        place = _tensor_device(self.config, model)
        self.device = torch.device("cpu") if place is not None else _device(str(self.config.device))
        if self.config.precision == "fp8":
            require_float8(self.device)
            float8_weights(model)
        self.objective = Objective(model, loss, metrics)
        if place is not None and self.config.precision not in ("auto", "float32"):
            raise ConfigError(f"precision must be auto or float32 on {place.label}, got {self.config.precision!r}")
        self.model = model.to(self.device) if place is None else to(model, place.label)
        if optimizer is None:
            self.optimizer: torch.optim.Optimizer = make_optimizer(model, self.config)
        else:
            self.optimizer = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        self.callbacks = list(callbacks)
        if self.config.log == "tensorboard" and self._first:
            self.callbacks.append(TensorBoard(Path(self.config.out or "") / "tensorboard"))
        self.precision = precision_of(self.config, self.device)
        self.loss_scale = LossScale(self.device) if self.precision == torch.float16 else None
        self.history = History()
        self.profile: list[ProfiledKernel] = []
        self.step: Step | None = None
        self.stopping = ""

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        model, optimizer = type(self.model).__name__, type(self.optimizer).__name__
        done = f"{self.history.steps:,} of {self.history.total_steps:,} steps" if self.history.total_steps else "no run"
        return f"Trainer({model} of {count:,} parameters on {self.device}, {optimizer}, {done})"

    def fit(self, data: Data, targets: Data | None = None, *, validation: Any = None, resume: bool = False) -> History:
        """Train.

        Args:
            data: tensors or arrays of rows (several in a tuple), a torch Dataset or DataLoader, or a token file.
            targets: one row for each row of data; None if the data contain them, or the model's loss needs none.
            validation: data to evaluate on: (data, targets), or a Dataset, DataLoader or token file.
            resume: whether to continue from the newest intact checkpoint in the config's folder, if there is one. On
                the CPU the result equals, bit for bit, that of an uninterrupted run. A config with more steps or epochs
                extends a finished run.

        Returns:
            The history. The model is trained in place; its modules keep their training or eval mode.

        Raises:
            ConfigError: data, targets and config do not fit together, or differ between processes that train together;
                the folder holds a run and resume is False, or another process uses it.
            FormatError: the checkpoints are damaged or of another model.
            DivergenceError: a loss or gradient is not finite; names step, module and the last good checkpoint.
            OutOfMemory: a step does not fit the device.
            TimeLimitExceeded: the config's timeout_s, or a time_limit around the call, has passed; the step was
                completed, and a checkpoint written if there is a folder.
            KeyboardInterrupt: Ctrl-C; the step was completed, and a checkpoint written if there is a folder.
        """
        with Processes().agreed({}):
            source, held_out = self._sources(data, targets, validation, resume=resume)
        config = self.config
        with numerics(deterministic=config.deterministic):
            if config.out is not None:
                history = self._fit_in_folder(Path(config.out), source, held_out, resume)
            else:
                history = self.run(source, held_out)
        if history.signal == signal.SIGINT:
            raise KeyboardInterrupt(f"stopped after step {history.steps} of {history.total_steps}")
        if history.signal is not None:
            raise SystemExit(128 + history.signal)
        return history

    def _sources(
        self, data: Data, targets: Data | None, validation: Any, *, resume: bool
    ) -> tuple[Source, Source | None]:  # fmt: skip
        """Return the sources of training and validation data; raise as `fit`."""
        config = self.config
        source = make_source(data, targets, config)
        if config.batch_size % config.accumulate and not isinstance(data, DataLoader):
            raise ConfigError(f"accumulate must divide the batch_size of {config.batch_size}, got {config.accumulate}")
        held_out = None
        if validation is not None:
            first, second = validation if isinstance(validation, tuple) and len(validation) == 2 else (validation, None)
            held_out = make_source(first, second, config)
        elif config.patience or config.keep_best:
            raise ConfigError("patience and keep_best need held-out data: give validation")
        if resume and config.out is None:
            raise ConfigError("resume continues from a checkpoint: give the config a folder as out")
        return source, held_out

    def _fit_in_folder(self, folder: Path, source: Source, held_out: Source | None, resume: bool) -> History:
        checkpoints = Checkpoints(folder)
        with ExitStack() as stack:
            with Processes().agreed({}):
                continuing = checkpoints.exist
                if self._first:
                    lock = stack.enter_context(RunLock(folder))
                    if not resume and (continuing or (folder / "metrics.jsonl").exists()):
                        advice = "give resume=True to continue it, or another folder"
                        raise ConfigError(f"{folder} holds a training: {advice}")
                    lock.take()
                    if not continuing:
                        RunFolder.write_json(folder / "train.json", self.config.to_dict())
            history = self.run(source, held_out, out=folder, resume=continuing)
            if self._first:
                if continuing:  # not earlier: a config that differs from the checkpoint's is refused
                    RunFolder.write_json(folder / "train.json", self.config.to_dict())
                RunFolder.write_json(folder / "history.json", history.to_dict())
        return history

    def run(
        self, source: Source, held_out: Source | None = None, *, out: Path | None = None, resume: bool = False,
        fingerprint: str = "", evaluate_at: Collection[int] | None = None,
    ) -> History:  # fmt: skip
        """Train on a source: what `fit` does once it has its data and the lock of its folder; raises as `fit`.

        `out` is the folder for checkpoints and metrics, None to write nothing; `fingerprint` is the data's, by default
        the source's; `evaluate_at` has the completed steps at which to evaluate. After SIGINT or SIGTERM a checkpoint
        is written.
        """
        self.stopping = ""
        run = TrainingRun(self, source, held_out, out, fingerprint or source.fingerprint(), evaluate_at)
        self.history = run.history
        try:
            with modes_kept(self.model), time_limit(self.config.timeout_s, "training"), Watch():
                run.execute(resume=resume)
        except BaseException as error:
            self.notify("failed", error)
            raise
        self.profile = [] if run.profiler is None else run.profiler.table
        self.notify("end", run.history)
        return run.history

    def evaluate(self, data: Data, targets: Data | None = None) -> Evaluation:
        """Return the loss and the metrics on all rows of some data; of several processes all call this."""
        return self.measure(make_source(data, targets, self.config), step=0)

    def measure(self, source: Source, *, step: int) -> Evaluation:
        """Return the loss and the metrics on all rows of a source, labeled with the number of completed steps."""
        total, processes = source.rows(), Processes()
        if processes.size > 1:  # those of a batch norm, for example
            processes.from_first_([buffer.detach() for buffer in self.model.buffers()])

        def watch(rows: int) -> None:
            if total:
                self.notify("advance", min(1.0, rows / total), "held-out loss")

        batches = source.in_order(source.microbatch or self.config.microbatch)
        with ledger().phase("evaluation"), closing(batches):
            return evaluate(
                self.objective, self.model, batches, step=step, device=self.device, precision=self.precision,
                watch=watch,
            )  # fmt: skip

    def stop(self, reason: str) -> None:
        """End the training after the current step; called by callbacks."""
        self.stopping = reason or "a callback asked for it"

    def notify(self, event: str, *arguments: Any) -> None:
        """Call the method of that name of each callback."""
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)

    def loss(self, *batch: Tensor) -> Tensor:
        """Return the loss of a batch in the training's precision."""
        return self.loss_of(self.model, *batch)

    def loss_of(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Return the loss of a batch in the training's precision with another module as the model."""
        with autocast(self.device, self.precision):
            return self.objective(model, *batch)


_ON_THE_HOST = (nn.RNNBase, nn.modules.conv._ConvNd)
"""Layers that run on the host where tensors are OpenCL's or WebGPU's."""


def _tensor_device(config: TrainConfig, model: nn.Module) -> TensorDevice | None:
    """Return the device of OpenCL or WebGPU that a config means; "auto" means none that cannot train this model."""
    name = str(config.device)
    if serves(name):
        return tensor_device(name)
    if name.lower() != "auto" or Processes().size > 1 or config.precision not in ("auto", "float32"):
        return None
    place = tensor_device("auto")
    if place is None or any(isinstance(part, _ON_THE_HOST) for part in model.modules()):
        return None
    return place if all(x.dtype in place.dtypes for x in (*model.parameters(), *model.buffers())) else None


def _device(name: str) -> torch.device:
    """Return the torch device of a config's name; raise ConfigError or BackendUnavailable if there is none."""
    chosen = registry.find_device(name, torch_tensors=True)
    if not chosen.torch_device:
        what = "this precision, model or number of processes; give another device"
        raise ConfigError(f"device: {chosen.label}, the setting's backend, does not train {what}")
    device = torch.device(chosen.torch_device)
    if device.type == "cuda" and Processes().size > 1 and ":" not in name:  # one GPU each, as torchrun numbers them
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
        torch.cuda.set_device(device)
    return device


class TrainingRun:
    """One run of a trainer, from the first step or a checkpoint to its end; arguments as for Trainer.run."""

    def __init__(
        self, trainer: Trainer, source: Source, held_out: Source | None, folder: Path | None, fingerprint: str,
        evaluate_at: Collection[int] | None,
    ) -> None:  # fmt: skip
        config = trainer.config
        self._trainer, self._source, self._held_out = trainer, source, held_out
        self._processes = processes = Processes()
        self._folder, self._fingerprint = folder if processes.first else None, fingerprint
        self._flags: Callable[[], list[int]] | None = None
        self._signal = 0  # that all processes know of
        self._checkpoints = None if folder is None else Checkpoints(folder)
        total = config.steps or source.steps(config.epochs)
        self.history = History(total_steps=total)
        self.profiler: StepProfiler | None = None
        self._best = BestModel(config.patience, config.min_delta)
        self._rate = functools.partial(learning_rate, config, total)
        if evaluate_at is None:
            every, count = config.evaluate_every, config.evaluations
            if held_out is None:
                evaluate_at = ()
            elif every:
                evaluate_at = (*range(every, total, every), total)
            else:
                evaluate_at = [max(1, round(total * k / count)) for k in range(1, count + 1)]
        self._evaluate_at = frozenset(evaluate_at)
        self._pending: list[PendingStep] = []
        self._saved: int | None = None  # step of the last checkpoint
        self._saving: int | None = None  # of the one that is being written
        self._flushed_at = time.monotonic()
        self._peak = -math.inf, 0  # when it was read, and the bytes
        self._began, self._earlier_s = time.monotonic(), 0.0  # of this process, and what earlier ones took

    def execute(self, *, resume: bool) -> None:
        """Train, from the newest intact checkpoint if `resume` is set; raise as `Trainer.fit`."""
        history, trainer, config = self.history, self._trainer, self._trainer.config
        self._agree(resume)
        document: dict[str, Any] = {}
        if self._checkpoints is not None:
            if resume:
                document = self._restore(self._checkpoints)
            self._checkpoints.clean()
        start = history.resumed_from
        start_equal(trainer.model, self._processes)
        path = None if self._folder is None else self._folder / "metrics.jsonl"
        self._metrics = MetricsFile(path, keep_steps=start)
        history.records = self._metrics.records
        if path is not None and self._metrics.lost:
            self._note(f"{path} lacks {self._metrics.lost:,} of the first {start:,} steps: so does the history")
        if not trainer.model.training:  # otherwise a module in eval mode is frozen on purpose
            trainer.model.train()
        # Memory that earlier parts of the program used does not count towards this run's peak.
        recorded = peak_recorded(trainer.device) if trainer.device.type == "cuda" else nullcontext()
        with StopRequest() as stop, recorded, recomputed(trainer.model, config.recompute):
            if config.predict_memory:
                self._predict()
            if self._best.exhausted:  # the run had stopped early
                trainer.stop(self._patience_reason)
            else:
                self._train(start, document.get("position", {}), stop)
            if number := stop.signal if self._processes.size == 1 else self._signal:
                history.status, history.signal = "interrupted", number
            elif trainer.stopping:
                history.status, history.reason = "stopped", trainer.stopping
        if config.keep_best and history.status != "interrupted":
            self._best.load_into(trainer.model, self._folder)
            start_equal(trainer.model, self._processes)  # rank 0 has it in a file
        history.seconds = self._seconds
        history.peak_memory_bytes = peak_memory_bytes(trainer.device)
        history.reserved_memory_bytes = reserved_memory_bytes(trainer.device)

    @property
    def _seconds(self) -> float:
        return self._earlier_s + time.monotonic() - self._began

    # --- several processes -------------------------------------------------------------------------------------------
    def _agree(self, resume: bool) -> None:
        """Raise ConfigError in each process if they do not run the same training."""
        model, config = self._trainer.model, self._trainer.config.to_dict()
        if self._processes.size > 1 and getattr(model, "needs_equal_batches", False):
            raise UnsupportedCase(
                f"a Trainer gives each process rows of its own; those of a {type(model).__name__} compute the same "
                "rows: use TrainStep"
            )
        same: dict[str, object] = {
            "accelerant": __version__, "torch": torch.__version__, "the data": self._fingerprint, "resume": resume,
            "steps": self.history.total_steps, "precision": self._trainer.precision,
        }  # fmt: skip
        with self._processes.agreed(same):
            same |= {name: config[name] for name in config.keys() - {"device", "out", "profile", *same}}

    def _agreed(self, flags: list[int], *, wait: bool) -> list[int]:
        """Return the largest flags of all processes, so that they do the same after the same step.

        With `wait` these are the flags of now, else those of the step before: then nothing waits for another process.
        """
        if self._processes.size == 1:
            return flags
        previous, self._flags = self._flags, self._processes.start_largest(flags)
        found = [0] * len(flags) if previous is None else previous()
        if wait:
            found, self._flags = list(map(max, found, self._flags())), None
        return found

    # --- steps -------------------------------------------------------------------------------------------------------
    def _train(self, start: int, position: dict[str, int], stop: StopRequest) -> None:
        trainer, config, source, total = self._trainer, self._trainer.config, self._source, self.history.total_steps
        if config.profile and self._folder is not None:
            self.profiler = StepProfiler(self._folder, config.profile, range(start, total), trainer.device)
        with ExitStack() as stack:
            step = trainer.step
            own = step is None
            self._diagnosis = NanDiagnosis(trainer, source, self._checkpoints, self._rate, start, position, active=own)
            stack.enter_context(self._diagnosis)
            if step is None:
                step = TrainStep(
                    trainer.model, trainer.optimizer,
                    self._diagnosis.recorded(functools.partial(trainer.objective, trainer.model)),
                    max_grad_norm=config.max_grad_norm, accumulate=source.accumulate or config.accumulate,
                    weigh=trainer.objective.weigh,
                    precision=torch.float8_e4m3fn if config.precision == "fp8" else trainer.precision,
                    graph={"auto": None, "on": True, "off": False}[config.graph] if source.fixed else False,
                    loss_scale=trainer.loss_scale, reduce_dtype=getattr(torch, config.reduce_dtype),
                )  # fmt: skip
            pin = trainer.device.type == "cuda"
            batches = stack.enter_context(closing(source.batches(range(start, total), position, pin=pin)))
            trainer.notify("begin", start, total)
            try:
                with ledger().phase("training"):
                    self.history.steps = self._loop(start, step, batches, stop)
            except NotFinite as error:
                batches.close()
                reason = self._diagnosis.explain(step, error.step, trainer.loss)
                raise DivergenceError(f"{error}; {reason}") from error
            except OSError as error:
                if self._saved is None or not is_full(error):
                    raise
                kept = f"{error.strerror}; step {self._saved:,} is kept in a checkpoint, to resume from with more space"
                raise OSError(error.errno, kept, error.filename) from None
            except OutOfMemory:
                raise
            except (RuntimeError, MemoryError) as error:
                if not isinstance(error, torch.OutOfMemoryError | MemoryError) and _CPU_MEMORY not in str(error):
                    raise
                reason = str(error).split("\n", maxsplit=1)[0]
                raise OutOfMemory(
                    f"{config.microbatch} rows at a time do not fit the device: raise accumulate (now "
                    f"{config.accumulate}), or name modules in recompute ({reason})"
                ) from None
            finally:
                if self.profiler is not None:
                    self.profiler.finish()

    def _loop(self, start: int, step: Step, batches: Iterator[Sequence[Batch]], stop: StopRequest) -> int:
        """Do the steps from `start` on, until stopped, without waiting for the device; return the steps completed."""
        trainer, total, device = self._trainer, self.history.total_steps, self._trainer.device
        every, every_s = trainer.config.checkpoint_every, trainer.config.checkpoint_every_s
        done, timer = start, StepTimer(device)
        self._flushed_at = saved_at = time.monotonic()
        while done < total:
            parts = next(batches)
            self._diagnosis.begin_step(done)
            if self.profiler is not None:
                self.profiler.before(done)
            trainer.notify("before_step", done)
            rate = self._rate(done)
            moved = [tuple(tensor.to(device, non_blocking=True) for tensor in part) for part in parts]
            scale = None if trainer.loss_scale is None else trainer.loss_scale.value.clone()
            result = step(split(moved, self._source.microbatch), rate)
            done += 1
            self._settle()
            self._pending.append(PendingStep(done, result.loss, result.grad_norm, rate, timer.lap(), scale))
            if evaluating := done in self._evaluate_at:
                self._flush(evaluate_after=done)
            out_of_time, now = self._out_of_time(done), time.monotonic()
            flags = [stop.signal or 0, bool(trainer.stopping), out_of_time is not None, False, False]
            if self._processes.first:
                many = len(self._pending) >= _FLUSH_STEPS or now - self._flushed_at > _FLUSH_S
                flags[3:] = now - saved_at > every_s, many
            wait = evaluating or done == total or device.type == "cpu"
            self._signal, stopped, late, save_is_due, flush_is_due = self._agreed(flags, wait=wait)
            if late and out_of_time is None:
                out_of_time = TimeLimitExceeded(f"another process's time limit has passed after step {done:,}")
            if stopped and not trainer.stopping:
                trainer.stop("another process asked for it")
            stopping = bool(self._signal or stopped or late)
            if stopping or done == total or save_is_due or (every and done % every == 0):
                self._flush()
                self._save(done)
                saved_at = time.monotonic()
                timer.mark()
            elif evaluating:
                timer.mark()
            elif device.type == "cpu" or flush_is_due:
                self._flush()
            if out_of_time and done < total:
                self._settle(wait=True)
                raise out_of_time
            if stopping:
                break
        self._settle(wait=True)
        return done

    def _out_of_time(self, done: int) -> TimeLimitExceeded | None:
        """Return the error of a time limit that has passed; a checkpoint comes before it."""
        try:
            check_time(f"after step {done:,} of {self.history.total_steps:,}")
        except TimeLimitExceeded as error:
            if self._folder is not None:
                error.add_note(f"a checkpoint of that step is in {self._folder}; resume=True continues from it")
            return error
        return None

    def _flush(self, evaluate_after: int = 0) -> None:
        """Read the pending steps' results with one wait, check and record them, the last one with its evaluation."""
        pending, self._pending = self._pending, []
        self._flushed_at = time.monotonic()
        if not pending:
            return
        scalars = [[x for x in (step.loss, step.grad_norm, step.loss_scale) if x is not None] for step in pending]
        numbers = torch.stack([torch.stack(each) for each in scalars]).tolist()
        if self._trainer.device.type != "cpu" or self._flushed_at - self._peak[0] > _PEAK_EVERY_S:
            self._peak = self._flushed_at, peak_memory_bytes(self._trainer.device)
        records: list[StepRecord] = []
        failure: NotFinite | None = None
        for step, (loss, norm, *scale) in zip(pending, numbers, strict=True):
            skipped = bool(scale) and not math.isfinite(norm) and scale[0] >= LossScale.SMALLEST
            if not (math.isfinite(loss) and (skipped or math.isfinite(norm))):
                failure = NotFinite(step.step - 1, loss, norm)
                break
            evaluation = self._evaluate(evaluate_after) if evaluate_after and step is pending[-1] else None
            ms, tokens = step.ms(), self._source.unit == "tokens"
            speed = round(self._source.per_step / (ms / 1e3), 1)
            records.append(StepRecord(
                step=step.step, loss=loss, tokens_per_s=speed if tokens else None, ms=round(ms, 3),
                peak_memory_bytes=self._peak[1], learning_rate=step.learning_rate, grad_norm=0.0 if skipped else norm,
                samples_per_s=None if tokens else speed, loss_scale=scale[0] if scale else None,
                skipped=skipped or None, validation_loss=None if evaluation is None else evaluation.loss,
                validation=None if evaluation is None else evaluation.metrics or None,
            ))  # fmt: skip
        try:
            self._metrics.append(records)
        except OSError:
            if failure is None and self._processes.size == 1:
                with suppress(OSError):  # the first error is raised
                    self._save(pending[-1].step)
            raise
        self._trainer.notify("records", records)
        if failure is not None:
            raise failure

    @property
    def _patience_reason(self) -> str:
        return f"no better held-out loss in {self._trainer.config.patience} evaluations"

    def _evaluate(self, step: int) -> Evaluation:
        assert self._held_out is not None  # for the type checker: otherwise there are no steps to evaluate at
        trainer = self._trainer
        evaluation = trainer.measure(self._held_out, step=step)
        self.history.evaluations.append(evaluation)
        if self._best.update(evaluation) and trainer.config.keep_best:
            self._best.keep(trainer.model, self._folder)
        if self._best.exhausted:
            trainer.stop(self._patience_reason)
        trainer.notify("evaluated", evaluation)
        return evaluation

    # --- checkpoints -------------------------------------------------------------------------------------------------
    def _save(self, step: int) -> None:
        if self._checkpoints is None:
            return
        self._settle(wait=True)
        trainer, history = self._trainer, self.history
        tensors, values = gathered(trainer.model, trainer.optimizer, trainer.device, trainer.loss_scale)
        states = [(type(callback).__name__, dict(callback.state())) for callback in trainer.callbacks]
        document = {
            **values, "step": step, "total_steps": history.total_steps, "data": self._fingerprint,
            "seconds": round(self._seconds, 3),
            "position": self._source.position(), "config": trainer.config.to_dict(), "best": self._best.state(),
            "evaluations": [asdict(evaluation) for evaluation in history.evaluations],
            "callbacks": [(name, state) for name, state in states if state],
        }  # fmt: skip
        with ledger().phase("checkpoints"):
            self._checkpoints.save(tensors, document)
        self._saving = step
        self._settle()

    def _settle(self, *, wait: bool = False) -> None:
        """Report a checkpoint that has been written, or with `wait` await its end; raise its error."""
        if self._checkpoints is None or self._saving is None:
            return
        with ledger().phase("checkpoints") if wait else nullcontext():
            if not self._checkpoints.finished(wait=wait):
                return
        self._saved, self._saving = self._saving, None
        self._diagnosis.saved(self._saved)
        self._trainer.notify("saved", self._checkpoints.path, self._saved)

    def _restore(self, checkpoints: Checkpoints) -> dict[str, Any]:
        trainer, history = self._trainer, self.history
        tensors, document, note = checkpoints.load(trainer.model.state_dict())
        path = checkpoints.path if note is None else checkpoints.previous
        data = document.get("data", document.get("corpus_sha256"))  # the name in the first format
        if data != self._fingerprint:
            advice = "restore them, or start a new run"
            raise FormatError(f"the data of {path.parent} changed since its checkpoint: {advice}")
        require_same_config(path, document.get("config", {}), trainer.config)
        before, total, done = document.get("total_steps", history.total_steps), history.total_steps, document["step"]
        if done > before:
            raise FormatError(f"checkpoint {path} is of step {done}, of {before}")
        if done > total:
            raise ConfigError(
                f"the training in {path.parent} has done {done:,} steps: give more than that, or none to go on to "
                f"{before:,}; got {total:,}"
            )
        self._earlier_s = document.get("seconds", 0.0)
        restored(path, tensors, document, trainer.model, trainer.optimizer, trainer.device, trainer.loss_scale)
        self._best.restore(document.get("best", {}))
        remaining = list(trainer.callbacks)  # states of one class are restored in the order of its callbacks
        for name, state in document.get("callbacks", []):
            callback = next((callback for callback in remaining if type(callback).__name__ == name), None)
            if callback is None:
                lacks = f"the state of a callback {name[:80]}, which this training lacks"
                raise ConfigError(f"checkpoint {path} has {lacks}")
            remaining.remove(callback)
            try:
                callback.restore(state)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
                if isinstance(error, AccelerantError):
                    raise
                reason = clipped(f"{type(error).__name__}: {error}")
                raise FormatError(f"checkpoint {path} has another state of {name}: {reason}") from error
        history.evaluations = document.get("evaluations", [])
        history.resumed_from = history.steps = self._saved = document["step"]
        if (wrote := document.get("processes", 1)) != self._processes.size:
            trained = f"{wrote} process{'es' * (wrote != 1)} trained so far"
            self._note(f"{trained}, now {self._processes.size}: losses agree up to rounding")
        if before != total:
            self._note(f"a run of {total:,} steps instead of {before:,}: the learning rate follows the new number")
        if note is not None:
            self._note(note)
        return document

    # --- memory ------------------------------------------------------------------------------------------------------
    def _predict(self) -> None:
        """Predict the peak memory of a step from shapes; a note says if that is impossible."""
        trainer, logger = self._trainer, logging.getLogger("torch._subclasses.fake_tensor")
        disabled, logger.disabled = logger.disabled, True  # the note below reports the error in one line
        try:
            if any(map(is_distributed, trainer.model.parameters())):
                raise UnsupportedCase("parameters are sharded")  # FSDP2 would keep what has no values
            batch = tuple(tensor.to(trainer.device) for tensor in self._source.example())
            predicted = predict_peak(trainer.model, *batch, call=trainer.loss_of, optimizer=trainer.optimizer)
        except Exception as error:  # noqa: BLE001  a model may do anything with tensors that have no values
            self.history.notes.append(f"peak memory not predicted: {(str(error) or repr(error)).splitlines()[0]}")
            return
        finally:
            logger.disabled = disabled
        total = predicted.total
        if trainer.config.accumulate > 1:  # gradients of earlier micro-batches coexist with those being computed
            size = sum(p.numel() * p.element_size() for p in trainer.model.parameters() if p.requires_grad)
            total += max(0, size - predicted.gradients)
        if trainer.device.type == "cpu" and predicted.total - predicted.optimizer_state < _SHARED_BYTES:
            torch.set_num_threads(1)  # until the end of `numerics`
        present = predicted.parameters + (predicted.optimizer_state if trainer.optimizer.state else 0)
        more = total - present
        self.history.predicted_peak_bytes = total
        before = peak_memory_bytes(trainer.device)  # of this process, perhaps in an earlier part of the program
        self.history.expected_peak_bytes = max(before, used_memory_bytes(trainer.device) + more)
        if trainer.device.type == "cuda" and more > (free := available_bytes(trainer.device)):
            self._note(
                f"a step is predicted to take {size_text(more)} more than the parameters; {size_text(free)} are free "
                f"on {trainer.device}"
            )

    def _note(self, text: str) -> None:
        self.history.notes.append(text)
        self._trainer.notify("note", text)
