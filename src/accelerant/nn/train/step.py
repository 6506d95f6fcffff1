"""One optimiser step as one call: forward, backward, clipping and update; on a GPU as one CUDA graph.

    step = TrainStep(model, optimizer, model.loss, max_grad_norm=1.0, precision=torch.bfloat16)
    for number, batch in enumerate(batches):
        result = step([batch], learning_rate(number))
    float(result.loss)                               # only now does anything wait for the device

A step of a small or middling model is hundreds of kernels, each shorter than its launch takes on the host. A graph has
them launched by the device. The first steps run eagerly, since kernels are compiled and tables are made then; the one
after them is captured, and from there on every step is a replay over the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelerant.errors import ConfigError, ShapeError
from accelerant.nn._precision import LowWeights
from accelerant.nn.layers import float8_weights, require_float8
from accelerant.nn.optim import MultiTensorOptimizer, clip_grad_norm_
from accelerant.nn.train.graphed import EAGER_STEPS, GraphedStep, Same
from accelerant.runtime.streams.graphs import Graph

__all__ = ["StepResult", "TrainStep", "require_scalar"]

Batch = tuple[Tensor, ...]


class StepResult(NamedTuple):
    """What a step found, float32 scalars on the device, in memory that no later step writes.

    Attributes:
        loss: the mean over the batches of the step.
        grad_norm: Euclidean norm of all gradients, before clipping.
    """

    loss: Tensor
    grad_norm: Tensor


def require_scalar(loss: Any) -> Tensor:
    """The loss, if it is a tensor of one element.

    Raises:
        ShapeError: it is not; naming its shape.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    if not isinstance(loss, Tensor):
        raise ShapeError(f"the loss must be a scalar tensor, got {type(loss).__name__}")
    raise ShapeError(
        f"the loss must be a scalar, got the shape {tuple(loss.shape)}: take its mean (a loss of torch with "
        'reduction="none" gives one value for each row)'
    )


class TrainStep(GraphedStep):
    """Forward, backward, clipping and update of a model.

    Args:
        model: its parameters are those of the optimiser.
        optimizer: accelerant.nn.optim's clip and update in one launch. Any other of torch's serves; for a graph it must
            have been made with capturable=True. The learning rate of all its groups is that of the call, a number
            before and after it.
        loss: called with the tensors of a batch, gives a scalar.
        max_grad_norm: clip all gradients together to this norm; None does not clip.
        accumulate: batches in a step; the gradient is that of the mean of their losses.
        weigh: of a step's batches, the part that each one's loss has in that mean, (accumulate,) on their device, 0 for
            one that does not count even if its loss is NaN; None for equal parts. Called where there are several.
        precision: bfloat16 for autocast, with each matrix cast once a step; float8_e4m3fn for that with the products
            of the linear layers in accelerant.nn's blocks in 8 bits (forward, and back to their input); None for the
            parameters' own dtype.
        graph: True captures the step; False never does; None does on a CUDA device in a process that trains alone.
            Where it cannot be, steps run eagerly and the ledger has the reason.

    Attributes:
        captured: whether the steps are replays by now.

    Raises:
        ConfigError: a value that has no meaning.

    While a graph is replayed, hooks and Python code of the model do not run, batches must keep their shapes (one of
    another shape runs eagerly), and `.grad` holds the gradients of the last step as usual. Call `reset` after a change
    that a captured step cannot see: to the model's code, or of modules and parameters replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Tensor],
        *,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        weigh: Callable[[Sequence[Sequence[Tensor]]], Tensor | None] | None = None,
        precision: torch.dtype | None = None,
        graph: bool | None = None,
    ) -> None:
        if accumulate < 1:
            raise ConfigError(f"accumulate must be at least 1, got {accumulate}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be above 0, or None; got {max_grad_norm}")
        if precision not in (None, torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            raise ConfigError(
                f"precision must be bfloat16, float8_e4m3fn, float32 or None, got {precision}; "
                "float16 needs a loss scale"
            )
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.accumulate = accumulate
        self._weigh = weigh if accumulate > 1 else None
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        if not self._params:
            raise ConfigError("the optimizer has no parameters")
        device, low = self._params[0].device, None
        self._own = isinstance(optimizer, MultiTensorOptimizer)
        self._max_norm = self._fused_norm(max_grad_norm)
        if precision == torch.float8_e4m3fn:
            require_float8(device)
            precision, low = torch.bfloat16, LowWeights(torch.bfloat16, float8_weights(model))
        elif precision == torch.bfloat16:
            low = LowWeights(precision)
        super().__init__("train_step", "training", model, optimizer, device, None if low is None else precision, low)
        self._decide(graph, self._obstacle_of(automatic=graph is None))
        self.reset()

    def reset(self) -> None:
        """Forget the captured step; the next steps run eagerly and are captured anew."""
        self._graph: Graph | None = None
        self._seen: Any = None
        self._eager = 0
        self._inputs: list[list[Tensor]] = []
        self._output: Tensor | None = None
        self._grads: list[Tensor | None] = []

    @property
    def captured(self) -> bool:
        """Whether steps of the last shapes are replays."""
        return self._graph is not None

    def __call__(self, batches: Sequence[Batch], learning_rate: float) -> StepResult:
        """Do one step; nothing waits for the device.

        Args:
            batches: `accumulate` of them, each the arguments of the loss; tensors elsewhere are copied to the device.
            learning_rate: of this step, for all groups.

        Returns:
            loss and norm.

        Raises:
            ConfigError: another number of batches, or a rate that is negative or NaN.
            ShapeError: the loss is no scalar.
        """
        if len(batches) != self.accumulate:
            raise ConfigError(f"a step takes {self.accumulate} batches, got {len(batches)}")
        if not learning_rate >= 0:
            raise ConfigError(f"learning_rate must be at least 0, got {learning_rate}")
        try:
            self._set_rate(learning_rate)
            return self._step(batches)
        finally:
            self._put_rate(learning_rate)  # a number: what the optimiser says of itself outlives this object

    def _step(self, batches: Sequence[Batch]) -> StepResult:
        """By a replay where there is one for these shapes, else eagerly; after enough eager ones, captured."""
        if not self._wants_graph:
            return self._result(self._run(self._moved_all(batches)))
        seen = self._signature(batches)
        if self._graph is not None and seen[1:] != self._seen[1:]:
            self.reset()  # what the captured step stands on was replaced
        if self._graph is not None:
            return self._replay(batches) if seen == self._seen else self._eager_step(batches)
        self._eager = self._eager + 1 if self._seen is not None and seen[0] == self._seen[0] else 1
        self._seen = seen
        if self._eager <= EAGER_STEPS:
            result = self._eager_step(batches)
            self._seen = self._signature(batches)  # the first step makes the optimiser's state
            return result
        return self._replay(batches) if self._capture(batches) else self._result(self._run(self._moved_all(batches)))

    # --- the step itself ---------------------------------------------------------------------------------------------

    def _run(self, batches: Sequence[Sequence[Tensor]]) -> Tensor:
        """All of it, as it is captured too: the loss and the norm, (2,) float32."""
        self.optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        weights = None if self._weigh is None else self._weigh(batches)
        with self._precision_context():
            for number, batch in enumerate(batches):
                with self._autocast():
                    loss = require_scalar(self.loss(*batch))
                    if weights is not None:
                        loss = torch.where(weights[number] == 0, torch.zeros_like(loss), loss) * weights[number]
                    elif self.accumulate > 1:
                        loss = loss / self.accumulate
                loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
        if self._own:
            self.optimizer.step()
            norm = self.optimizer.grad_norm  # type: ignore[attr-defined]  # of MultiTensorOptimizer
        else:
            norm = clip_grad_norm_(self._params, float("inf") if self._max_norm is None else self._max_norm)
            self.optimizer.step()
        assert total is not None and norm is not None  # noqa: PT018  for the type checker: both are there by now
        return torch.stack([total.float().reshape(()), norm.float().to(total.device)])

    def _fused_norm(self, max_norm: float | None) -> float | None:
        """Hand the clipping to an optimiser of ours, which finds the norm on the way; infinity finds it alone."""
        if not self._own:
            return max_norm
        theirs = self.optimizer.defaults["max_grad_norm"]
        if theirs is None:
            self.optimizer.defaults["max_grad_norm"] = float("inf") if max_norm is None else float(max_norm)
        elif max_norm is not None and theirs != max_norm:
            raise ConfigError(f"max_grad_norm is {max_norm} here and {theirs} in the optimizer: give it once")
        return max_norm

    def _moved_all(self, batches: Sequence[Batch]) -> list[list[Tensor]]:
        return [self._moved(batch) for batch in batches]

    def _result(self, pair: Tensor) -> StepResult:
        loss, norm = pair.unbind()
        return StepResult(loss, norm)

    # --- the graph ---------------------------------------------------------------------------------------------------

    def _obstacle_of(self, *, automatic: bool) -> str | None:
        """Why no step can be captured, as far as is known before the first."""
        if (known := self._obstacle(self.optimizer)) is not None:
            return known
        if any(param.device != self._device for param in self._params):
            return "parameters are on several devices"
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if automatic and distributed and torch.distributed.get_world_size() > 1:
            return "processes train together: graph=True captures their collectives too"
        return None

    def _signature(self, batches: Sequence[Batch]) -> tuple[Any, ...]:
        """What a captured step stands on: shapes; and what may be replaced under it."""
        return (
            tuple([tuple([(each.shape, each.dtype) for each in batch]) for batch in batches]),
            Same(self.optimizer.state.values()),
            tuple([param.data_ptr() for param in self._params]),
            tuple([param.requires_grad for param in self._params]),
            tuple([module.training for module in self.model.modules()]),
        )

    def _eager_step(self, batches: Sequence[Batch]) -> StepResult:
        """One on a stream of its own, as those before a capture must be."""
        moved = self._moved_all(batches)
        return self._result(self._aside(lambda: self._run(moved)).clone())  # in memory of the current stream

    def _capture(self, batches: Sequence[Batch]) -> bool:
        """Record the step, which does not run; whether that went well."""
        self._inputs = [[each.to(self._device, copy=True) for each in batch] for batch in batches]
        if isinstance(self.optimizer, MultiTensorOptimizer):
            self.optimizer.refresh()
        self.optimizer.zero_grad(set_to_none=True)
        graph = Graph("train_step")

        def capture() -> None:
            self._output = graph.capture(self._run, self._inputs, warm_up=0)

        # A capture that failed leaves gradients of memory that nothing was written to.
        if not self._recorded(capture, undo=lambda: self.optimizer.zero_grad(set_to_none=True)):
            return False
        self._grads = [param.grad for param in self._params]
        self._graph = graph
        return True

    def _replay(self, batches: Sequence[Batch]) -> StepResult:
        assert self._graph is not None and self._output is not None  # noqa: PT018  for the type checker
        for inputs, batch in zip(self._inputs, batches, strict=True):
            for to, each in zip(inputs, batch, strict=True):
                to.copy_(each, non_blocking=True)
        if isinstance(self.optimizer, MultiTensorOptimizer):
            self.optimizer.refresh()
        self._graph.replay()
        for param, grad in zip(self._params, self._grads, strict=True):
            if param.grad is not grad:  # an eager step came between
                param.grad = grad
        torch.autograd.graph.increment_version(self._params)
        return self._result(self._output.clone())
