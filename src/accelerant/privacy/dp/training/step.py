"""PrivateStep: a private step as one call for each part of a draw; on a GPU as two CUDA graphs.

    step = PrivateStep(private, private.model.loss, precision=torch.bfloat16)
    for batch in private.batches(data, microbatch=64):
        result = step(batch, learning_rate)      # None until the draw's last part

A part of a draw is one graph (forward, backward, the clipped sum) and the update another (noise, division, the
optimizer). Checks and the ledger run on the host, before each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.nn.layers import LowWeights
from accelerant.nn.optim import MultiTensorOptimizer
from accelerant.nn.train.step import EAGER_STEPS, GraphedStep, Same, require_scalar
from accelerant.privacy.dp.noise.mechanisms import NoiseParameters
from accelerant.privacy.dp.sampling import DrawnBatch
from accelerant.privacy.dp.training.private import PrivateTraining
from accelerant.runtime.streams.graphs import Graph


class PrivateResult(NamedTuple):
    """The result of a step, on the device; the loss of the draw's last part is without noise: not private."""

    loss: Tensor
    examples: int


class _CapturedPart(NamedTuple):
    """A part as a graph, with the memory that it reads and writes."""

    graph: Graph
    inputs: list[Tensor]
    mask: Tensor
    loss: Tensor


class PrivateStep(GraphedStep):
    """Forward, backward, clipping, noise and update of a private training.

    Args:
        private: of `make_private`.
        loss: from the tensors of a batch to a scalar, reduced over the examples as given to `make_private`.
        precision: bfloat16 for autocast, with each matrix cast once a part; None for the parameters' own dtype.
        graph: True captures; False never does; None does on a CUDA device. Where capture is impossible, steps run
            eagerly and the ledger of ops has the reason. Batches must be parts of one shape (`batches(...,
            microbatch=)`); one of another shape runs eagerly.

    Raises:
        ConfigError: an invalid value.
    """

    def __init__(
        self, private: PrivateTraining, loss: Callable[..., Tensor], *, precision: torch.dtype | None = None,
        graph: bool | None = None,
    ) -> None:  # fmt: skip
        if precision not in (None, torch.float32, torch.bfloat16):
            raise ConfigError(f"precision must be bfloat16, float32 or None, got {precision}")
        self.private, self.loss = private, loss
        low = None if precision in (None, torch.float32) else LowWeights(precision)
        self._optimizer = private.optimizer
        self._params = [param for _, param in private.clipper.parameters]
        device = self._params[0].device
        precision = private.optimizer.precision = None if low is None else precision
        super().__init__("private_step", "private", private.model, private.optimizer, device, precision, low)
        self._shape: Any = None
        self._captured_layout: Any = None
        self._states = Same(())
        self._eager = 0
        self._part: _CapturedPart | None = None
        self._sums: dict[int, Tensor] = {}
        self._end: Graph | None = None
        self._eager_updates = 0
        self._captured_plan: NoiseParameters | None = None
        self._examples = 0
        self._decide(graph, self._reason_against_capture())

    def __repr__(self) -> str:
        return f"PrivateStep({self.private!r}, precision={self._optimizer.precision}, captured={self.captured})"

    @property
    def captured(self) -> bool:
        """Whether parts of the last shape are replayed."""
        return self._part is not None

    def __call__(self, batch: DrawnBatch, learning_rate: float) -> PrivateResult | None:
        """Process a part of a draw; with its last one, make the step. The host does not wait for the device.

        Args:
            batch: of `PrivateTraining.batches`, a tuple of tensors.
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
        loss = self._run_part(batch)
        if not batch.last:
            return None
        plan = optimizer.prepare(learning_rate)
        assert plan is not None  # for the type checker: the draw is complete
        self._run_update(plan, learning_rate)
        optimizer.finish()
        result = PrivateResult(loss, self._examples)
        self._examples = 0
        return result

    # --- a part ------------------------------------------------------------------------------------------------------
    def _run_part(self, batch: DrawnBatch) -> Tensor:
        tensors = self._moved(batch.tensors)
        mask = torch.ones(batch.rows, dtype=torch.bool, device="cpu") if batch.mask is None else batch.mask
        mask = mask.to(self._device, non_blocking=True)
        self._keep_sums()
        if not self._wants_graph:
            return self._run(tensors, mask)
        shape = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if self._part is None:
            self._eager = self._eager + 1 if shape == self._shape else 1
            self._shape = shape
            if self._eager > EAGER_STEPS:
                self._capture(tensors, mask)
        part = self._part
        if part is None or shape != self._shape:
            return self._on_side_stream(lambda: self._run(tensors, mask)).clone()
        for static, tensor in zip((*part.inputs, part.mask), (*tensors, mask), strict=True):
            static.copy_(tensor, non_blocking=True)
        part.graph.replay()
        self._optimizer.summed(batch.rows)  # an eager pass does it by its hook
        return part.loss.clone()

    def _keep_sums(self) -> None:
        """Give each sum the same memory again, which graphs add to: zero_grad() removes it."""
        if self._part is not None and self._layout() != self._captured_layout:  # the graphs depend on it
            self._part = self._end = None
            self._eager = 0
        sums = self._optimizer.sums
        missing = [param for param in self._params if param.requires_grad and id(param) not in sums]
        for param in missing:
            kept = self._sums.get(id(param))
            sums[id(param)] = torch.zeros_like(param) if kept is None else kept.zero_()
        if missing:
            self._optimizer.mark()
        if Same(sums.values()) != Same(self._sums.values()):
            self._part = self._end = None
            self._eager = 0
            self._sums = dict(sums)

    def _layout(self) -> tuple[Any, ...]:
        """Return addresses of parameters and sums, which parameters are trained, and the modules' modes."""
        return (
            [(param.data_ptr(), param.requires_grad) for param in self._params],
            [total.data_ptr() for total in self._sums.values()],
            [module.training for module in self.private.model.modules()],
        )

    def _run(self, tensors: Sequence[Tensor], mask: Tensor) -> Tensor:
        self.private.clipper.mask = mask
        with self._precision_context():
            with self._autocast():
                loss = require_scalar(self.loss(*tensors))
            loss.backward()
        return loss.detach().float()

    def _capture(self, tensors: Sequence[Tensor], mask: Tensor) -> None:
        graph, inputs, mask = Graph("private_part"), [tensor.clone() for tensor in tensors], mask.clone()
        clipper = self.private.clipper
        self._optimizer.require_untouched()
        hook, clipper.on_backward = clipper.on_backward, None  # a capture runs nothing

        def capture() -> None:
            self._part = _CapturedPart(graph, inputs, mask, graph.capture(self._run, inputs, mask, warm_up=0))

        try:
            self._recorded(capture)
        finally:
            clipper.on_backward = hook
            self._optimizer.mark()  # it raised the sums' versions, too
        self._captured_layout = self._layout()

    # --- the update --------------------------------------------------------------------------------------------------
    def _run_update(self, plan: NoiseParameters, learning_rate: float) -> None:
        """Add noise, divide, run the optimizer, and zero the sums."""
        self._set_rate(learning_rate)
        try:
            states = Same(self._optimizer.state.values())
            if self._end is not None and (plan != self._captured_plan or states != self._states):
                self._end = None  # the clipping norm moved, or a checkpoint was loaded
            settled = self._part is not None and self._eager_updates >= EAGER_STEPS
            if self._end is None and settled and self._wants_graph:
                self._refresh_optimizer()
                graph = Graph("private_update")
                if self._recorded(lambda: graph.capture(self._update, plan, warm_up=0)):
                    self._end, self._captured_plan = graph, plan
                    self._states = Same(self._optimizer.state.values())
            if self._end is None:
                self._on_side_stream(lambda: self._update(plan))
                self._eager_updates += 1
                return
            self._refresh_optimizer()
            self._end.replay()
            torch.autograd.graph.increment_version(self._params)
        finally:
            self._set_rate_number(learning_rate)

    def _update(self, plan: NoiseParameters) -> None:
        self._optimizer.update(plan)
        torch._foreach_zero_(list(self._optimizer.sums.values()))

    def _refresh_optimizer(self) -> None:
        if isinstance(self._optimizer.inner, MultiTensorOptimizer):
            self._optimizer.inner.refresh()

    def _reason_against_capture(self) -> str | None:
        if (known := self._obstacle(self._optimizer.inner)) is not None:
            return known
        if self._optimizer.follows_norms:
            return "adaptive clipping reads each backward pass's norms on the host"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "processes train together"
        return None
