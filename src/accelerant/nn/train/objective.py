"""The loss that a training minimizes, evaluation with metrics, and the optimizer with its learning rates.

A batch is a tuple of tensors. The loss of a module with a method `loss` is `model.loss(*batch)`. For any other module
the last tensor is the targets and the others the inputs: `loss(model(*inputs), targets)`.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError
from accelerant.nn.layers import modes_kept
from accelerant.nn.optim import SGD, AdamW
from accelerant.nn.train.config import TrainConfig
from accelerant.nn.train.data import Batch
from accelerant.nn.train.step import require_scalar
from accelerant.runtime.processes import Processes

Metric = Callable[[Tensor, Tensor], Tensor]
"""A function of outputs and targets that returns the mean over the rows."""

Loss = str | Callable[..., Tensor]
"""A name ("cross_entropy", "mse"), or a function of outputs and targets that returns a scalar."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss and metrics over the `rows` of held-out data after `step` steps.

    Cross entropy and accuracy are means over the targets other than -100.
    """

    step: int
    loss: float
    rows: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the fraction of the targets (...) that are the largest of the outputs (..., classes).

    Targets of -100 are ignored; NaN if there are no others.
    """
    return (outputs.argmax(dim=-1) == targets).sum().float() / _kept(targets)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of outputs (..., classes) and integer targets (...) other than -100."""
    if outputs.shape[:-1] != targets.shape:
        raise ShapeError(
            f"cross_entropy needs outputs (..., classes) and targets (...), got {tuple(outputs.shape)} and "
            f"{tuple(targets.shape)}: give another loss"
        )
    return ops.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1).long())


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error; raise ShapeError if the shapes differ."""
    if outputs.shape != targets.shape:
        raise ShapeError(f"mse needs outputs like the targets, got {tuple(outputs.shape)} and {tuple(targets.shape)}")
    return ops.mse_loss(outputs.float(), targets.float())


_IGNORED = -100  # the target to ignore, as in torch


def _kept(targets: Tensor) -> Tensor:
    """Return the number of targets that are not ignored, float32 on their device."""
    return (targets != _IGNORED).sum().float()


_NAMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cross_entropy": cross_entropy, "mse": mse}


class Objective:
    """The loss of a batch, and the metrics that evaluations measure, as functions of the module and the batch."""

    def __init__(self, model: nn.Module, loss: Loss | None, metrics: Mapping[str, Metric] | None) -> None:
        if isinstance(loss, str) and loss not in _NAMED:
            raise ConfigError(f"unknown loss {loss!r}; known are {', '.join(_NAMED)}, or give a function")
        self._loss = _NAMED[loss] if isinstance(loss, str) else loss
        self._own = loss is None and callable(getattr(model, "loss", None))
        if self._own and metrics:
            own = f"{type(model).__name__}.loss"
            raise ConfigError(f"metrics need outputs, which {own} does not return: give a loss too")
        self._metrics = metrics

    def __call__(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Return the scalar loss of a batch; raise ConfigError if there are no targets."""
        if self._own:
            loss: Tensor = model.loss(*batch)  # type: ignore[operator]  # checked in __init__
            return loss
        outputs, targets = self._outputs(model, batch)
        return self._chosen(targets)(outputs, targets)

    def kept(self, *batch: Tensor) -> Tensor | None:
        """Return the number of a batch's targets that count, float32 on its device; None if all rows count equally."""
        if self._own or len(batch) < 2 or self._chosen(batch[-1]) is not cross_entropy:
            return None
        return _kept(batch[-1])

    def weigh(self, batches: Sequence[Sequence[Tensor]]) -> Tensor | None:
        """Return each batch's weight in the mean over a step's targets, their number; None for equal weights."""
        counts = [self.kept(*batch) for batch in batches]
        known = [count for count in counts if count is not None]
        return torch.stack(known) if len(known) == len(counts) else None

    def measure(self, model: nn.Module, *batch: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor | None]]]:
        """Return the loss of a batch, and each metric with the number of targets it averages: None for all rows."""
        if self._own:
            return require_scalar(self(model, *batch)), {}
        outputs, targets = self._outputs(model, batch)
        loss = self._chosen(targets)
        if (metrics := self._metrics) is None:
            metrics = {"accuracy": accuracy} if loss is cross_entropy else {}
        values = {}
        for name, metric in metrics.items():
            value = torch.as_tensor(metric(outputs, targets), device=targets.device)
            if value.numel() != 1:
                raise ShapeError(f"the metric {name} must be one number, got the shape {tuple(value.shape)}")
            values[name] = value, _kept(targets) if metric is accuracy else None
        return require_scalar(loss(outputs, targets)), values

    def _outputs(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Any, Tensor]:
        if len(batch) < 2:
            kind = type(model).__name__
            raise ConfigError(f"the data have no targets, and {kind} has no method `loss`: give targets")
        return model(*batch[:-1]), batch[-1]

    def _chosen(self, targets: Tensor) -> Callable[[Any, Tensor], Tensor]:
        if self._loss is not None:
            return self._loss
        if targets.dtype == torch.bool or targets.is_complex():
            raise ConfigError(f"no default loss for {targets.dtype} targets: give one")
        return mse if targets.is_floating_point() else cross_entropy


def precision_of(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast; None for the parameters' own."""
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if config.precision == "float16":
        return torch.float16
    low = config.precision in ("bfloat16", "fp8") or (config.precision == "auto" and native)
    return torch.bfloat16 if low else None


def autocast(device: torch.device, precision: torch.dtype | None) -> AbstractContextManager[object]:
    """Return an autocast to a precision; None for none."""
    return nullcontext() if precision is None else torch.autocast(device.type, dtype=precision)


@torch.no_grad()
def evaluate(
    objective: Objective, model: nn.Module, batches: Iterable[Batch], *, step: int, device: torch.device,
    precision: torch.dtype | None, watch: Callable[[int], None] = lambda _rows: None,
) -> Evaluation:  # fmt: skip
    """Return the loss and the metrics of a model on batches, in eval mode; the mode is restored.

    Batches are weighted by their rows; for cross entropy and accuracy by their targets other than -100. Of several
    processes, which all call this with the same batches, each computes its share. `watch` receives the rows done after
    each batch.
    """
    totals: Tensor | None = None  # sums and weights of the loss and of each metric
    first: Batch | None = None
    names: list[str] = []
    rows = 0
    processes = Processes()

    def widened(value: Tensor | float) -> Tensor:
        found = value if isinstance(value, Tensor) else torch.as_tensor(value)
        found = found if found.is_cuda else found.cpu()  # other devices may lack float64
        return found.to(device if device.type == "cuda" else "cpu").double().reshape(())

    def measured_sums(batch: Batch) -> Tensor:
        moved = [tensor.to(device, non_blocking=True) for tensor in batch]
        with autocast(device, precision):
            loss, metrics = objective.measure(model, *moved)
        names[:] = metrics
        measured = [(loss, objective.kept(*moved)), *metrics.values()]
        means = torch.stack([widened(value) for value, _ in measured])
        counts = [float(len(moved[0])) if kept is None else kept for _, kept in measured]
        weight = torch.stack([widened(value) for value in counts])
        sums = torch.where(weight == 0, 0.0, means * weight)  # a mean over no targets is NaN
        return torch.stack((sums, weight))

    with modes_kept(model):
        model.eval()
        for number, batch in enumerate(batches):
            first = batch if first is None else first
            if number % processes.size == processes.rank:
                both = measured_sums(batch)
                totals = both if totals is None else totals + both
            rows += len(batch[0])
            watch(rows)
        if first is None:
            raise ConfigError("there are no rows to evaluate on")
        if totals is None:  # fewer batches than processes: this one takes part in the sum
            totals = torch.zeros_like(measured_sums(first))
    processes.sum_(totals)
    loss_mean, *others = (totals[0] / totals[1]).tolist()
    return Evaluation(step, loss_mean, rows, dict(zip(names, others, strict=True)))


# --- the optimizer ---------------------------------------------------------------------------------------------------
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def make_optimizer(model: nn.Module, config: TrainConfig) -> AdamW | SGD:
    """Return the config's optimizer, which also clips; matrices decay, vectors (biases and norms) do not."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ConfigError(f"{type(model).__name__} has no parameter that requires a gradient")
    for pattern in config.no_decay:
        if not fnmatch.filter([name for name, _ in named], pattern):
            raise ConfigError(f"no_decay: {pattern!r} matches no parameter of {type(model).__name__}")
    spared = {name for name, parameter in named if parameter.dim() < 2}
    spared |= {name for name, _ in named for pattern in config.no_decay if fnmatch.fnmatchcase(name, pattern)}
    groups = [
        {"params": [p for name, p in named if name not in spared], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named if name in spared], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rate, norm = config.learning_rate, config.max_grad_norm
    if config.optimizer == "sgd":
        return SGD(groups, lr=rate, momentum=config.momentum, max_grad_norm=norm)
    return AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, max_grad_norm=norm)


def learning_rate(config: TrainConfig, steps: int, step: int) -> float:
    """Return the learning rate of a step, 0 for the first: linear warm-up, then the schedule down to `final_lr_ratio`.

    cosine: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5, without restarts.
    """
    peak = config.learning_rate
    if (warmup := config.warmup_steps) is None:
        warmup = max(1, round(config.warmup * steps)) if config.warmup else 0
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    fraction = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return peak * (config.final_lr_ratio + (1 - config.final_lr_ratio) * fraction)
