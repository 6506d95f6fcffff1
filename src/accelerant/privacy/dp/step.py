"""A private step as one call for each part of a draw; on a GPU as two CUDA graphs.

    step = PrivateStep(private, private.model.loss, precision=torch.bfloat16)
    for batch in private.draws(data, microbatch=64):
        result = step(batch, learning_rate)      # None until the draw's last part

A draw has any number of parts, so the parts are one graph (forward, backward, the clipped sum into .grad) and the
update another (noise, division, the optimiser): each draw replays the first as often as it has parts. What is checked
and recorded on the host stays there, before each replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from accelerant.config import settings
from accelerant.errors import ConfigError, FallbackWarning, LaunchError
from accelerant.nn._optimizer import MultiTensorOptimizer
from accelerant.nn._precision import LowWeights
from accelerant.nn.train.step import require_scalar
from accelerant.privacy.dp.noisy_sum import Plan
from accelerant.privacy.dp.private import PrivateTraining
from accelerant.privacy.dp.sampling import DrawnBatch
from accelerant.runtime.graphs import Graph
from accelerant.runtime.ledger import FallbackRecord, ledger

__all__ = ["PrivateResult", "PrivateStep"]

T = TypeVar("T")

_EAGER = 3
"""Parts, and updates, before a capture: compiling and tables in the first, addresses that come back in the others."""


class PrivateResult(NamedTuple):
    """What a step found, on the device.

    Attributes:
        loss: float32, the mean over the draw's last part. It is of the data: what is private is the parameters.
        examples: that were drawn.
    """

    loss: Tensor
    examples: int


class PrivateStep:
    """Forward, backward, clipping, noise and update of a private training.

    Args:
        private: of `make_private`.
        loss: called with the tensors of a batch, gives a scalar, reduced over the examples as `make_private` was told.
        precision: bfloat16 for autocast, with each matrix cast once a part; None for the parameters' own dtype.
        graph: True captures; False never does; None does on a CUDA device. Where it cannot be, steps run eagerly and
            the ledger of ops has the reason. Batches must be parts of one shape (`draws(..., microbatch=)`); one of
            another shape runs eagerly.

    Raises:
        ConfigError: a value that has no meaning.
    """

    def __init__(
        self,
        private: PrivateTraining,
        loss: Callable[..., Tensor],
        *,
        precision: torch.dtype | None = None,
        graph: bool | None = None,
    ) -> None:
        if precision not in (None, torch.float32, torch.bfloat16):
            raise ConfigError(f"precision must be bfloat16, float32 or None, got {precision}")
        self.private, self.loss = private, loss
        self._precision = None if precision == torch.float32 else precision
        self._low = None if self._precision is None else LowWeights(self._precision)
        self._optimizer = private.optimizer
        self._params = [each for _, each in private.clipper.parameters]
        self._device = self._params[0].device
        self._stream: torch.cuda.Stream | None = None
        self._rate: Tensor | None = None
        self._shape: Any = None
        self._eager = 0
        self._part: Graph | None = None
        self._inputs: list[Tensor] = []
        self._mask: Tensor | None = None
        self._loss: Tensor | None = None
        self._gradients: list[Tensor | None] = [None] * len(self._params)
        self._optimizer.keeps_gradients = True
        self._end: Graph | None = None
        self._eager_updates = 0
        self._planned: Plan | None = None
        self._examples = 0
        self._wants_graph = self._graph_wanted(graph)

    @property
    def captured(self) -> bool:
        """Whether parts of the last shape are replays."""
        return self._part is not None

    def __call__(self, batch: DrawnBatch, learning_rate: float) -> PrivateResult | None:
        """Take a part of a draw; with its last one, make the step. Nothing waits for the device.

        Args:
            batch: of `PrivateTraining.draws`, a tuple of tensors.
            learning_rate: of this step, for all groups.

        Returns:
            None until the draw's last part.

        Raises:
            BudgetExceeded: the step would pass the budget; parameters and ledger are as they were.
            ConfigError: a rate that is negative or NaN, a batch that is no tuple of tensors.
        """
        if not learning_rate >= 0:
            raise ConfigError(f"learning_rate must be at least 0, got {learning_rate}")
        if not isinstance(batch.tensors, tuple):
            raise ConfigError(f"a batch must be a tuple of tensors, got {type(batch.tensors).__name__}")
        optimizer = self._optimizer
        self.private.use(batch)
        self._examples += batch.examples
        loss = self._parted(batch)
        if not batch.last:
            return None
        plan = optimizer.prepare()
        assert plan is not None  # for the type checker: the draw is complete
        self._updated(plan, learning_rate)
        optimizer.finish()
        result = PrivateResult(loss, self._examples)
        self._examples = 0
        return result

    # --- a part ------------------------------------------------------------------------------------------------------

    def _parted(self, batch: DrawnBatch) -> Tensor:
        tensors = [each.to(self._device, non_blocking=True) for each in batch.tensors]
        mask = batch.mask
        if mask is None:
            mask = torch.ones(batch.rows, dtype=torch.bool)
        mask = mask.to(self._device, non_blocking=True)
        self._place_gradients()
        if not self._wants_graph:
            return self._run(tensors, mask)
        shape = tuple([(each.shape, each.dtype) for each in tensors])
        if self._part is not None and shape == self._shape:
            loss = self._replay(tensors, mask)
            self._optimizer.summed(batch.rows)  # which an eager pass tells it by itself
            return loss
        if self._part is not None:
            return self._aside(lambda: self._run(tensors, mask)).clone()
        self._eager = self._eager + 1 if shape == self._shape else 1
        self._shape = shape
        if self._eager <= _EAGER or not self._capture(tensors, mask):
            return self._aside(lambda: self._run(tensors, mask)).clone()
        loss = self._replay(tensors, mask)
        self._optimizer.summed(batch.rows)
        return loss

    def _place_gradients(self) -> None:
        """Memory that stays, since graphs add to it: zero_grad() takes it from the parameters, and nothing else may."""
        for at, param in enumerate(self._params):
            if param.grad is None and param.requires_grad:
                kept = self._gradients[at]
                param.grad = torch.zeros_like(param) if kept is None else kept.zero_()
            if param.grad is not self._gradients[at]:
                self._part = self._end = None
                self._eager = 0
                self._gradients[at] = param.grad

    def _run(self, tensors: Sequence[Tensor], mask: Tensor) -> Tensor:
        self.private.clipper.mask = mask
        with nullcontext() if self._low is None else self._low.refreshed():
            with self._autocast():
                loss = require_scalar(self.loss(*tensors))
            loss.backward()
        return loss.detach().float()

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self._precision is None else torch.autocast(self._device.type, dtype=self._precision)

    def _capture(self, tensors: Sequence[Tensor], mask: Tensor) -> bool:
        self._inputs, self._mask = [each.clone() for each in tensors], mask.clone()
        graph = Graph("private_part")
        told, self.private.clipper.on_backward = self.private.clipper.on_backward, None  # nothing runs in a capture
        try:
            self._loss = graph.capture(self._run, self._inputs, self._mask, warm_up=0)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ConfigError, LaunchError) as error:
            self._refuse(error)
            return False
        finally:
            self.private.clipper.on_backward = told
        self._part = graph
        return True

    def _replay(self, tensors: Sequence[Tensor], mask: Tensor) -> Tensor:
        assert self._part is not None  # for the type checker, as the next
        assert self._mask is not None and self._loss is not None  # noqa: PT018
        for to, each in zip(self._inputs, tensors, strict=True):
            to.copy_(each, non_blocking=True)
        self._mask.copy_(mask, non_blocking=True)
        self._part.replay()
        return self._loss.clone()

    # --- the update --------------------------------------------------------------------------------------------------

    def _updated(self, plan: Plan, learning_rate: float) -> None:
        """Noise, division and the optimiser; then the gradients are 0."""
        self._set_rate(learning_rate)
        try:
            if self._end is not None and plan != self._planned:  # the clipping norm moved
                self._end = None
            if self._end is None and self._part is not None and self._eager_updates >= _EAGER and self._wants_graph:
                self._capture_update(plan)
            if self._end is None:
                self._aside(lambda: self._update(plan))
                self._eager_updates += 1
                return
            inner = self._optimizer.inner
            if isinstance(inner, MultiTensorOptimizer):
                inner.refresh()
            self._end.replay()
            torch.autograd.graph.increment_version(self._params)
        finally:
            self._put_rate(learning_rate)

    def _update(self, plan: Plan) -> None:
        self._optimizer.update(plan)
        torch._foreach_zero_([param.grad for param in self._params if param.grad is not None])

    def _capture_update(self, plan: Plan) -> None:
        inner = self._optimizer.inner
        if isinstance(inner, MultiTensorOptimizer):
            inner.refresh()
        graph = Graph("private_update")
        try:
            graph.capture(self._update, plan, warm_up=0)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ConfigError, LaunchError) as error:
            self._refuse(error)
            return
        self._end, self._planned = graph, plan

    def _set_rate(self, rate: float) -> None:
        if not self._wants_graph:
            self._put_rate(rate)
            return
        if self._rate is None:
            self._rate = torch.zeros((), dtype=torch.float32, device=self._device)
        self._rate.fill_(rate)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate

    def _put_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    # --- graphs ------------------------------------------------------------------------------------------------------

    def _aside(self, run: Callable[[], T]) -> T:
        """Run on a stream of its own, as what comes before a capture must be."""
        if self._device.type != "cuda" or not self._wants_graph:
            return run()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            found = run()
        current.wait_stream(self._stream)
        return found

    def _graph_wanted(self, graph: bool | None) -> bool:
        if graph is False:
            return False
        why = None
        inner = self._optimizer.inner
        if self._device.type != "cuda" or torch.version.hip is not None:
            why = f"parameters are on {self._device}: graphs are CUDA's"
        elif self._optimizer.follows_norms:
            why = "adaptive clipping reads each backward pass's norms on the host"
        elif not isinstance(inner, MultiTensorOptimizer) and not inner.defaults.get("capturable"):
            why = f"{type(inner).__name__} was not made with capturable=True"
        elif torch.distributed.is_available() and torch.distributed.is_initialized():
            why = "processes train together"
        if why is not None and graph:
            self._refuse(why)
        return why is None

    def _refuse(self, reason: object) -> None:
        """Say in the ledger of ops, and once in words, that steps run eagerly; or raise, as the policy has it."""
        self._wants_graph = False
        text = f"{type(reason).__name__}: {str(reason).splitlines()[0]}" if isinstance(reason, Exception) else reason
        if settings().fallback == "forbid":
            raise LaunchError(f"the private step cannot be a CUDA graph: {text}")
        case = f"{type(self.private.model).__name__} on {self._device}"
        if ledger().fallback(FallbackRecord("private_step", case, "graph", "eager", str(text))):
            warnings.warn(
                f"private_step ({case}): no CUDA graph, steps run eagerly. {text}", FallbackWarning, stacklevel=4
            )
