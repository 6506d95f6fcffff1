# ruff: noqa: D102  Callback documents the methods
"""Callbacks, which watch a training; extensions, which replace its batches and steps; and the search for NaN.

Private training (accelerant.privacy.dp.training.run) is the only extension.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accelerant._renamed import renamed_arguments
from accelerant.errors import FormatError, MissingDependency
from accelerant.nn.train.checkpoint import Checkpoints, gathered, restored
from accelerant.nn.train.config import RunConfig, TrainConfig
from accelerant.nn.train.data import Batch, Source, split
from accelerant.nn.train.history import StepRecord
from accelerant.nn.train.objective import Evaluation
from accelerant.nn.train.step import StepResult, TrainStep
from accelerant.nn.train.tokens import Tokens
from accelerant.runtime.html_page import Point
from accelerant.runtime.processes import Processes

if TYPE_CHECKING:
    from accelerant.nn.train import Trainer
    from accelerant.nn.train.history import History


class Callback:
    """Receives the events of a training; each method does nothing until a subclass overrides it.

    `trainer.stop(reason)` ends the training after the current step. On a GPU losses are read back for many steps
    together, so `records` receives several.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def begin(self, trainer: Trainer, done: int, total: int) -> None:
        """Training starts after `done` of `total` steps."""

    def before_step(self, trainer: Trainer, step: int) -> None:
        """A step begins, 0 for the first."""

    def records(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        """The measurements of some steps have arrived."""

    def evaluated(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """The model was evaluated on held-out data."""

    def saved(self, trainer: Trainer, path: Path, step: int) -> None:
        """A checkpoint was written."""

    def note(self, trainer: Trainer, text: str) -> None:
        """There is something that the user should know."""

    def advance(self, trainer: Trainer, share: float, text: str) -> None:
        """A long operation, named by the text, is done to this share, 0 to 1."""

    def end(self, trainer: Trainer, history: History) -> None:
        """Training ended without an error."""

    def failed(self, trainer: Trainer, error: BaseException) -> None:
        """Training ended with an error, which is raised afterwards."""

    def state(self) -> Mapping[str, Any]:
        """Return JSON values to save in checkpoints."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`, before a resumed training begins."""


class PrintProgress(Callback):
    """Prints a line every few seconds to the standard error stream; of several processes rank 0 does."""

    def __init__(self, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._last = 0.0
        self._total = 0

    def __repr__(self) -> str:
        return f"PrintProgress(every_s={self._every_s})"

    def begin(self, trainer: Trainer, done: int, total: int) -> None:
        self._total = total

    def records(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        now = time.monotonic()
        if records and (now - self._last >= self._every_s or records[-1].step == self._total):
            self._last = now
            last = records[-1]
            self._print(f"step {last.step}/{self._total}  loss {last.loss:.4f}  {last.ms:.1f} ms")

    def evaluated(self, trainer: Trainer, evaluation: Evaluation) -> None:
        metrics = "".join(f"  {name} {value:.4f}" for name, value in evaluation.metrics.items())
        self._print(f"step {evaluation.step}  held out: loss {evaluation.loss:.4f}{metrics}")

    def note(self, trainer: Trainer, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        if Processes().first:
            print(text, file=sys.stderr)


@renamed_arguments(folder="out")
class TensorBoard(Callback):
    """Writes scalars for TensorBoard to a folder; raises MissingDependency if it is not installed."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingDependency("tensorboard", "tensorboard", "a log for TensorBoard") from None
        self._make: Any = SummaryWriter
        self._folder = Path(out)
        self._writer: Any = None

    def __repr__(self) -> str:
        return f"TensorBoard({str(self._folder)!r})"

    def begin(self, trainer: Trainer, done: int, total: int) -> None:
        # The records of later steps, which an interrupted run left, are hidden.
        self._writer = self._make(str(self._folder), purge_step=done + 1 if done else None)

    def records(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        for record in records:
            speed = record.samples_per_s if record.tokens_per_s is None else record.tokens_per_s
            values = {"loss": record.loss, "learning_rate": record.learning_rate, "grad_norm": record.grad_norm}
            for name, value in {**values, "per_s": speed}.items():
                self._writer.add_scalar(f"train/{name}", value, record.step)

    def evaluated(self, trainer: Trainer, evaluation: Evaluation) -> None:
        for name, value in {"loss": evaluation.loss, **evaluation.metrics}.items():
            self._writer.add_scalar(f"held_out/{name}", value, evaluation.step)

    def end(self, trainer: Trainer, history: History) -> None:
        if self._writer is not None:  # None if nothing was left to do
            self._writer.close()

    def failed(self, trainer: Trainer, error: BaseException) -> None:
        if self._writer is not None:
            self._writer.close()


# --- extensions ------------------------------------------------------------------------------------------------------
Step = Callable[[Sequence[Batch], float], StepResult]
"""One step of a training, from its batches and the learning rate; nothing need wait for the device."""


@dataclass(frozen=True, slots=True)
class ReportChart:
    """A chart in the report: a card with one line, whose points are in ascending order of x, the completed steps."""

    title: str
    label: str
    points: Sequence[Point]
    y_label: str


class Extension(Callback):
    """Replaces batches or steps of a run, and adds results under its `name`; this base class changes nothing."""

    name = "extension"

    def require(self, run: RunConfig) -> None:
        """Raise ConfigError unless the run is supported; called before its folder is changed."""

    def require_extensible(self) -> None:
        """Raise ConfigError unless a run may continue with another number of steps."""

    def configured(self, config: TrainConfig) -> TrainConfig:
        """Return the Trainer's config."""
        return config

    def named(self, sha256: str, description: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the text's name in checkpoints, which resuming compares, and its description in config.json."""
        return sha256, description

    def source(self, tokens: Tokens, config: TrainConfig, fingerprint: str) -> Source | None:
        """Return the source of the batches, before the run's folder is changed; None for ordinary windows."""
        return None

    def attach(self, trainer: Trainer) -> Step | None:
        """Return the step to use, None for the ordinary one; called once, before a checkpoint is restored."""
        return None

    def description(self) -> dict[str, Any]:
        """Return what is needed to continue the run, for config.json."""
        return {}

    def words(self, folder: Path) -> list[str]:
        """Return the command-line options that start the run of a folder again."""
        return []

    def results(self) -> dict[str, Any]:
        """Return values for summary.json after the training; write the extension's own files."""
        return {}

    def curves(self) -> Sequence[ReportChart]:
        """Return charts for the report."""
        return ()

    def remarks(self) -> Sequence[str]:
        """Return sentences for the report on the meaning of the figures."""
        return ()

    def close(self) -> None:
        """Release resources when the run ends, for whatever reason."""


_CHECKED = ("cpu",)  # devices on which gradients are checked before the update, since nothing has to wait there
_NOTHING = "computed again, every part is finite by itself: their sum overflows, or the step varies from run to run"
_MAX_REPEATED_STEPS = 1000  # more steps are not repeated; the message says so


class NotFinite(Exception):  # noqa: N818  caught by the trainer: users see DivergenceError
    """The loss or the gradient of a step, 0 for the first, is not finite."""

    def __init__(self, step: int, loss: float, grad_norm: float) -> None:
        self.step, self.loss, self.grad_norm = step, loss, grad_norm
        super().__init__(f"training diverged at step {step + 1}: loss {loss}, gradient norm {grad_norm}")


class NanDiagnosis:
    """Keeps what the diagnosis of a failed step needs; `active`: the steps are the Trainer's own, to be repeated."""

    def __init__(
        self, trainer: Trainer, source: Source, checkpoints: Checkpoints | None, rate: Callable[[int], float],
        start: int, position: dict[str, int], *, active: bool = True,
    ) -> None:  # fmt: skip
        self._trainer, self._source, self._checkpoints, self._rate = trainer, source, checkpoints, rate
        self._position, self._step, self._saved = position, start, start
        self._checks = active and trainer.device.type in _CHECKED
        self._computed: list[tuple[Batch, Tensor]] = []
        self._random: Tensor | None = None
        self._handle: Any = None
        self._initial: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        if active and not self._checks and not start:
            tensors, values = gathered(trainer.model, trainer.optimizer, trainer.device, trainer.loss_scale)
            self._initial = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}, values

    def __enter__(self) -> NanDiagnosis:
        if self._checks:
            self._handle = self._trainer.optimizer.register_step_pre_hook(self._check)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def begin_step(self, step: int) -> None:
        """Note that a step begins, 0 for the first."""
        self._step = step
        self._computed = []
        if self._checks:
            self._random = torch.get_rng_state()

    def saved(self, step: int) -> None:
        """Note that a checkpoint after so many steps was written."""
        self._saved, self._initial = step, None

    def recorded(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the loss function; on the CPU one that also records its batches and results."""
        if not self._checks:
            return loss
        parts = self._trainer.config.accumulate

        def run(*batch: Tensor) -> Tensor:
            if self._computed:
                self._trainer.notify("advance", len(self._computed) / parts, f"step {self._step + 1}")
            value = loss(*batch)
            self._computed.append((batch, value.detach()))
            return value

        return run

    def explain(self, step: object, failed: int, loss: Callable[..., Tensor]) -> str:
        """Return words on step `failed`: the module, the last good checkpoint. Restores the state from before it."""
        if not isinstance(step, TrainStep):
            return f"not diagnosed: the steps are not the Trainer's own; {self._last_good()}"
        try:
            parts = [batch for batch, _ in self._computed] if self._checks else self._return_to(step, failed)
        except (FormatError, StopIteration) as error:
            return f"not diagnosed: {error}; {self._last_good()}"
        if parts is None:
            return f"not diagnosed: the last saved state is {failed - self._saved:,} steps back; {self._last_good()}"
        if self._random is not None:
            torch.set_rng_state(self._random)
        self._trainer.model.train()
        if len(parts) > 1:  # a mean over no targets is NaN, and has weight 0
            weights = self._trainer.objective.weigh(parts)
            if weights is not None:
                parts = [part for part, weight in zip(parts, weights.tolist(), strict=True) if weight != 0]
        found, processes = find_not_finite(self._trainer.model, loss, parts), Processes()
        if processes.size > 1:  # one of them may have the only part that is not finite
            all_found = processes.exchange(found[:500])
            rank = next((rank for rank, each in enumerate(all_found) if each != _NOTHING), 0)
            found = all_found[rank] + (f" (rank {rank})" if all_found[rank] != _NOTHING else "")
        return f"{found}; {self._last_good()}"

    def _check(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise NotFinite before an update on the CPU if the loss or a gradient is not finite.

        With a loss scale gradients may overflow; TrainingRun._flush decides what that means.
        """
        grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        dense = [] if self._trainer.loss_scale is not None else [grad for grad in grads if not grad.is_sparse]
        norms = torch._foreach_norm(dense) if dense else ()
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        parts, values = [batch for batch, _ in self._computed], [float(value) for _, value in self._computed]
        weights = self._trainer.objective.weigh(parts) if len(parts) > 1 else None
        shares: list[float] = [1 / len(parts)] * len(parts) if weights is None else (weights / weights.sum()).tolist()
        loss = sum(value * share for value, share in zip(values, shares, strict=True) if share != 0)
        if any(Processes().largest([not (math.isfinite(loss) and math.isfinite(norm))])):
            raise NotFinite(self._step, loss, norm)

    def _return_to(self, step: TrainStep, failed: int) -> list[Batch] | None:
        """Restore the state from before the failed step; return its micro-batches, None if that would take too long."""
        if failed - self._saved > _MAX_REPEATED_STEPS:
            return None
        trainer = self._trainer
        position, path = self._position, ""
        if self._initial is not None:
            tensors, document = self._initial
            trainer.optimizer.state.clear()
        elif self._checkpoints is not None:
            tensors, document, _ = self._checkpoints.load()
            position, path = document.get("position", {}), str(self._checkpoints.path)
        else:
            return None
        scale = trainer.loss_scale
        restored(Path(path), tensors, document, trainer.model, trainer.optimizer, trainer.device, scale)
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
        moved = [tuple(tensor.to(self._trainer.device) for tensor in part) for part in parts]
        return split(moved, self._source.microbatch)

    def _last_good(self) -> str:
        if self._checkpoints is None:
            return "there is no checkpoint: the training has no folder"
        if not self._saved:
            return "there is no checkpoint yet"
        return f"the last good checkpoint, of step {self._saved}, is kept in {self._checkpoints.path}"


# --- finding the module ----------------------------------------------------------------------------------------------
def find_not_finite(model: nn.Module, loss: Callable[..., Tensor], parts: Sequence[Batch]) -> str:
    """Name the first thing of a step that is not finite: parameter, input, output of a module, loss or gradient.

    The model has its parameters from before the step; gradients are set to None. Waits for the device at each module.
    """
    for name, parameter in model.named_parameters():  # not the buffers, which the failed step may have changed
        if not _finite(parameter):
            return f"{name} was not finite before the step"
    for number, part in enumerate(parts, 1):
        where = "" if len(parts) == 1 else f", in part {number} of {len(parts)}"
        for index, tensor in enumerate(part):
            if not _finite(tensor):
                return f"tensor {index} of the batch is not finite{where}"
        names: list[str] = []
        model.zero_grad(set_to_none=True)
        with _watched(model, names):
            value = loss(*part)
            if not names and not _finite(value):
                names.append("the loss itself, while every module's output is finite")
            if not names:
                value.backward()
        model.zero_grad(set_to_none=True)
        if names:
            return f"first not finite: {names[0]}{where}"
    return _NOTHING


def _finite(value: object) -> bool:
    """Return whether all floating-point tensors in a nested value are finite; waits for the device."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors)


@contextmanager
def _watched(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Append to `names` the first thing computed inside the block that is not finite."""
    handles: list[Any] = []

    def check(value: object, name: str) -> None:
        if not names and not _finite(value):
            names.append(name)

    def output_hook(label: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            check(output, f"the output of {label}")
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    handles.append(leaf.register_hook(lambda g: check(g, f"the gradient at the output of {label}")))

        return hook

    def parameter_hook(name: str) -> Callable[[Tensor], None]:
        return lambda parameter: check(parameter.grad, f"the gradient of {name}")

    try:
        for name, module in model.named_modules():
            label = f"{name or 'the model'} ({type(module).__name__})"
            handles.append(module.register_forward_hook(output_hook(label)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                handles.append(parameter.register_post_accumulate_grad_hook(parameter_hook(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()
