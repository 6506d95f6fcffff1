"""Diagnosis of a loss or gradient that is not finite: find the module in which it arises.

The state from before the step is restored, and the step's batch is computed again while every module's outputs and
gradients are checked. On the CPU gradients are checked before the update, so the parameters are still those of the
failed step. On a GPU nothing waits for such a check: parameters come from the last checkpoint, or from a copy of the
initial ones, and the steps since then are repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accelerant.errors import FormatError
from accelerant.nn.train.checkpoint import Checkpoints, gathered, restored
from accelerant.nn.train.data import Batch, Source, split
from accelerant.nn.train.step import TrainStep

if TYPE_CHECKING:
    from accelerant.nn.train.trainer import Trainer

__all__ = [
    "NotFinite",
    "Rescue",
    "find_not_finite",
]


def find_not_finite(
    model: nn.Module,
    loss: Callable[..., Tensor],
    parts: Sequence[Batch],
) -> str:
    """Name the first thing of a step that is not finite: parameter, input, output of a module, loss, gradient.

    Args:
        model: with the parameters that it had before the step; they stay, gradients are left empty.
        loss: of a part, in the precision of the training.
        parts: of the step, on the model's device.

    Returns:
        Words for a message, without a full stop.
    """
    for name, parameter in model.named_parameters():  # not the buffers: the failed step may have spoilt them
        if not _finite(parameter):
            return f"{name} was not finite before the step"
    for number, part in enumerate(parts, 1):
        where = "" if len(parts) == 1 else f", in part {number} of {len(parts)}"
        for place, tensor in enumerate(part):
            if not _finite(tensor):
                return f"tensor {place} of the batch is not finite{where}"
        found: list[str] = []
        model.zero_grad(set_to_none=True)
        with _watched(model, found):
            value = loss(*part)
            if not found and not _finite(value):
                found.append("the loss itself, while every module's output is finite")
            if not found:
                value.backward()
        model.zero_grad(set_to_none=True)
        if found:
            return f"first not finite: {found[0]}{where}"
    return "computed again, every part is finite by itself: their sum overflows, or the step varies from run to run"


def _finite(value: object) -> bool:
    """Whether every tensor in something has finite values only; one wait for the device each."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors)


@contextmanager
def _watched(model: nn.Module, found: list[str]) -> Iterator[None]:
    """Adds to `found` each thing that is not finite, in the order of its making."""
    handles: list[Any] = []

    def output_hook(label: str) -> Callable[..., None]:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not found and not _finite(output):
                found.append(f"the output of {label}")
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    handles.append(leaf.register_hook(gradient_hook(f"the gradient at the output of {label}")))

        return look

    def gradient_hook(text: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            if not found and not _finite(gradient):
                found.append(text)

        return look

    def parameter_hook(name: str) -> Callable[[Tensor], None]:
        def look(parameter: Tensor) -> None:
            if not found and not _finite(parameter.grad):
                found.append(f"the gradient of {name}")

        return look

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


# --- restoring the failed step ---------------------------------------------------------------------------------------


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


class NotFinite(Exception):  # noqa: N818  caught inside: users see DivergenceError
    """A step's loss or gradient is not finite.

    Attributes:
        step: of it, 0 the first.
        loss, grad_norm: what was found; the norm None where the gradients were not looked at.
    """

    def __init__(self, step: int, loss: float, grad_norm: float) -> None:
        self.step, self.loss, self.grad_norm = step, loss, grad_norm
        super().__init__(f"training diverged at step {step + 1}: loss {loss}, gradient norm {grad_norm}")
