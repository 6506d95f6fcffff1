"""What a training minimises, and what is measured beside it, of any module.

A batch is the tensors of some rows. A module with a method `loss` is given all of them: `model.loss(*batch)`. Of any
other module the last tensor is the targets and the rest the inputs: `loss(model(*inputs), targets)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError
from accelerant.nn.train.config import TrainConfig
from accelerant.nn.train.data import Batch
from accelerant.nn.train.step import require_scalar

__all__ = [
    "Evaluation",
    "Loss",
    "Metric",
    "Objective",
    "accuracy",
    "autocast",
    "evaluate",
    "modes_of",
    "precision_of",
    "restore_modes",
]

Metric = Callable[[Tensor, Tensor], Tensor]
"""Of outputs and targets: the mean over the rows."""

Loss = str | Callable[..., Tensor]
"""A name ("cross_entropy", "mse"), or a function of outputs and targets that gives a scalar."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured on held-out data.

    Attributes:
        step: steps done.
        loss: mean over the rows; of cross entropy over the targets that are not -100.
        rows: how many.
        metrics: other means over the rows, by name; accuracy over the targets that are not -100.
    """

    step: int
    loss: float
    rows: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The part of the targets that have the largest output; (..., classes) and (...), targets of -100 left out.

    NaN where none is left.
    """
    return (outputs.argmax(dim=-1) == targets).sum().float() / _kept(targets)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats; outputs (..., classes), targets (...) integers, -100 left out.

    Raises:
        ShapeError: the targets' shape is not that of the outputs without their last dimension.
    """
    if outputs.shape[:-1] != targets.shape:
        raise ShapeError(
            f"cross_entropy wants outputs (..., classes) and targets (...), got {tuple(outputs.shape)} and "
            f"{tuple(targets.shape)}: give a loss of your own"
        )
    rows = outputs.reshape(-1, outputs.shape[-1])
    return ops.cross_entropy(rows, targets.reshape(-1).long())


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error.

    Raises:
        ShapeError: the shapes differ.
    """
    if outputs.shape != targets.shape:
        raise ShapeError(f"mse wants outputs as the targets, got {tuple(outputs.shape)} and {tuple(targets.shape)}")
    return F.mse_loss(outputs.float(), targets.float())


_LEFT_OUT = -100
"""The target of a place that has none, as in torch."""


def _kept(targets: Tensor) -> Tensor:
    """How many targets count, float32 on their device."""
    return (targets != _LEFT_OUT).sum().float()


_NAMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cross_entropy": cross_entropy, "mse": mse}


class Objective:
    """The loss of a batch, by module.

    Args:
        model: whose loss it is.
        loss: a name or function; None: the model's own `loss`, or by the targets: cross entropy of integers, mean
            squared error of others.
        metrics: measured in evaluations; None: accuracy, where the loss is cross entropy.

    Raises:
        ConfigError: an unknown name, or metrics of a model with a loss of its own.
    """

    def __init__(self, model: nn.Module, loss: Loss | None, metrics: Mapping[str, Metric] | None) -> None:
        if isinstance(loss, str) and loss not in _NAMED:
            raise ConfigError(f"unknown loss {loss!r}; known are {', '.join(_NAMED)}, or give a function")
        self._loss = _NAMED[loss] if isinstance(loss, str) else loss
        self._own = loss is None and callable(getattr(model, "loss", None))
        if self._own and metrics:
            raise ConfigError(f"metrics want outputs, and {type(model).__name__}.loss gives none: give a loss too")
        self._metrics = metrics

    def __call__(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """The scalar loss of a batch.

        Raises:
            ConfigError: there are no targets.
        """
        if self._own:
            loss: Tensor = model.loss(*batch)  # type: ignore[operator]  # looked at when this was made
            return loss
        outputs, targets = self._outputs(model, batch)
        return self._chosen(targets)(outputs, targets)

    def kept(self, *batch: Tensor) -> Tensor | None:
        """How many of a batch's targets count, float32 on its device; None where all rows count alike."""
        if self._own or len(batch) < 2 or self._chosen(batch[-1]) is not cross_entropy:
            return None
        return _kept(batch[-1])

    def weigh(self, batches: Sequence[Sequence[Tensor]]) -> Tensor | None:
        """The part that each batch has in the mean over a step's targets; None where batches count alike."""
        counts = [self.kept(*batch) for batch in batches]
        found = [count for count in counts if count is not None]
        if len(found) < len(counts):
            return None
        kept = torch.stack(found)
        return kept / kept.sum()

    def measure(self, model: nn.Module, *batch: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor | None]]]:
        """The loss of a batch; each metric, and over how many targets it is a mean: None for all rows.

        Raises:
            ConfigError: there are no targets.
            ShapeError: the loss or a metric is no scalar.
        """
        if self._own:
            return require_scalar(self(model, *batch)), {}
        outputs, targets = self._outputs(model, batch)
        loss = self._chosen(targets)
        metrics = self._metrics
        if metrics is None:
            metrics = {"accuracy": accuracy} if loss is cross_entropy else {}
        found = {}
        for name, metric in metrics.items():
            value = torch.as_tensor(metric(outputs, targets), device=targets.device)
            if value.numel() != 1:
                raise ShapeError(f"the metric {name} must be one number, got the shape {tuple(value.shape)}")
            found[name] = value, _kept(targets) if metric is accuracy else None
        return require_scalar(loss(outputs, targets)), found

    def _outputs(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Any, Tensor]:
        if len(batch) < 2:
            raise ConfigError(
                f"the data have no targets, and {type(model).__name__} has no method `loss`: give targets"
            )
        return model(*batch[:-1]), batch[-1]

    def _chosen(self, targets: Tensor) -> Callable[[Any, Tensor], Tensor]:
        if self._loss is not None:
            return self._loss
        if targets.dtype == torch.bool or targets.is_complex():
            raise ConfigError(f"no loss goes with {targets.dtype} targets by itself: give one")
        return mse if targets.is_floating_point() else cross_entropy


def precision_of(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    """The dtype to compute in under autocast; None for the parameters' own."""
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    low = config.precision in ("bfloat16", "fp8") or (config.precision == "auto" and native)
    return torch.bfloat16 if low else None


def autocast(device: torch.device, precision: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast to a precision, or nothing for None."""
    return nullcontext() if precision is None else torch.autocast(device.type, dtype=precision)


def modes_of(model: nn.Module) -> dict[nn.Module, bool]:
    """Whether each module trains: a part may be frozen, with a mode of its own."""
    return {module: module.training for module in model.modules()}


def restore_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Put back what `modes_of` gave."""
    for module, training in modes.items():
        module.training = training


@torch.no_grad()
def evaluate(
    objective: Objective,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    step: int,
    device: torch.device,
    precision: torch.dtype | None,
    watch: Callable[[int], None] = lambda _rows: None,
) -> Evaluation:
    """The loss and the metrics of a model on some batches, in eval mode; the mode is put back.

    Args:
        objective, model: what is measured of what.
        batches: weighted by their rows, in cross entropy and accuracy by their targets other than -100.
        step: steps done, for the result.
        device, precision: where and in which dtype to compute.
        watch: is told after each batch how many rows are done.

    Raises:
        ConfigError: there is no batch.
    """
    modes = modes_of(model)
    model.eval()
    total: Tensor | None = None
    weights: Tensor | None = None
    names: list[str] = []
    rows = 0
    try:
        for batch in batches:
            moved = [each.to(device, non_blocking=True) for each in batch]
            with autocast(device, precision):
                loss, metrics = objective.measure(model, *moved)
            count = len(moved[0])
            names = list(metrics)
            found = [(loss, objective.kept(*moved)), *metrics.values()]
            means = torch.stack([value.to(device).double().reshape(()) for value, _ in found])
            counts = [float(count) if kept is None else kept for _, kept in found]
            weight = torch.stack([torch.as_tensor(each, device=device).double() for each in counts])
            sums = torch.where(weight == 0, 0.0, means * weight)  # a mean over nothing is NaN
            total = sums if total is None else total + sums
            weights = weight if weights is None else weights + weight
            rows += count
            watch(rows)
    finally:
        restore_modes(modes)
    if total is None or weights is None:
        raise ConfigError("there is nothing to evaluate on: no rows")
    loss_mean, *others = (total / weights).tolist()
    return Evaluation(step, loss_mean, rows, dict(zip(names, others, strict=True)))
