"""Training of any module: `Trainer`, and `fit`, its short form.

    history = fit(model, x, y, TrainConfig(epochs=5, learning_rate=3e-3), validation=(x_test, y_test))
    print(history)

The loop is loop.py's, a step step.py's TrainStep, data come from a Source (sources.py); run.py puts them together with
evaluation, early stop, checkpoints, callbacks and diagnosis. `accelerant train` is a use of the Trainer (job.py).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelerant.errors import ConfigError
from accelerant.nn.layers import float8_weights, require_float8
from accelerant.nn.train.callbacks import Callback, TensorBoard
from accelerant.nn.train.checkpoint import Checkpoints
from accelerant.nn.train.config import TrainConfig
from accelerant.nn.train.environment import numerics
from accelerant.nn.train.extension import Step
from accelerant.nn.train.history import History
from accelerant.nn.train.lock import RunLock
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
from accelerant.nn.train.optim import MakeOptimizer, make_optimizer
from accelerant.nn.train.profiler import KernelTime
from accelerant.nn.train.run import Run
from accelerant.nn.train.source import Source
from accelerant.nn.train.sources import Data, make_source
from accelerant.runtime import registry
from accelerant.runtime.files import write_atomic

__all__ = ["Trainer", "fit"]


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
