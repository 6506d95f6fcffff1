"""One optimiser step as one call: forward, backward, clipping and update; on a GPU as one CUDA graph.

    step = TrainStep(model, optimizer, model.loss, max_grad_norm=1.0, precision=torch.bfloat16)
    for number, batch in enumerate(batches):
        result = step([batch], learning_rate(number))
    float(result.loss)                               # waits for the device

A step of a small model launches hundreds of kernels, each shorter than its launch takes on the host. With a graph the
device launches them. The first steps run eagerly, because they compile kernels and create optimiser state; the next one
is captured, and all later ones are replays over the same memory.
"""

from __future__ import annotations

import fnmatch
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accelerant.config import settings
from accelerant.errors import ConfigError, FallbackWarning, LaunchError, ShapeError
from accelerant.nn._precision import LowWeights
from accelerant.nn.layers import (
    MLP,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    TransformerBlock,
    float8_weights,
    require_float8,
)
from accelerant.nn.optim import MultiTensorOptimizer, clip_grad_norm_
from accelerant.nn.train.data import Batch
from accelerant.runtime.ledger import FallbackRecord, ledger
from accelerant.runtime.streams.graphs import Graph

__all__ = [
    "EAGER_STEPS",
    "GraphedStep",
    "Same",
    "StepResult",
    "TrainStep",
    "recomputed",
    "require_scalar",
]

# --- capturing steps -------------------------------------------------------------------------------------------------


T = TypeVar("T")

EAGER_STEPS = 3
"""Steps before the capture: compiling and tables in the first, addresses that come back in the others."""


class Same:
    """Objects that are compared by identity, and kept: the id() of one that is gone may be another's.

    Args:
        objects: the states of an optimiser, which `load_state_dict` replaces.
    """

    __slots__ = ("_objects",)

    def __init__(self, objects: Iterable[object]) -> None:
        self._objects = tuple(objects)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        ours, theirs = self._objects, other._objects
        return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._objects)))


class GraphedStep:
    """The base of a step: where it computes, in what precision, at which rate, and whether as a graph.

    Args:
        op: the step's name in the ledger of ops.
        words: what it is called in messages.
        model: named in them.
        optimizer: whose groups take the rate.
        device: of the parameters.
        precision: for autocast; None for none.
        low: casts each matrix once a pass; None for none.
    """

    def __init__(
        self,
        op: str,
        words: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        precision: torch.dtype | None,
        low: LowWeights | None,
    ) -> None:
        self._op, self._words = op, words
        self._case = f"{type(model).__name__} on {device}"
        self._groups = optimizer
        self._device = device
        self._precision = precision
        self._low = low
        self._rate: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._wants_graph = False

    # --- eager, and captured as well ---------------------------------------------------------------------------------

    def _precision_context(self) -> AbstractContextManager[object]:
        return nullcontext() if self._low is None else self._low.refreshed()

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self._precision is None else torch.autocast(self._device.type, dtype=self._precision)

    def _moved(self, batch: Iterable[Tensor]) -> list[Tensor]:
        return [each.to(self._device, non_blocking=True) for each in batch]

    def _set_rate(self, rate: float) -> None:
        """A number for eager steps, memory for those that are replayed; of float32 both, so that they give the same."""
        if not self._wants_graph:
            self._put_rate(rate)
            return
        if self._rate is None:
            self._rate = torch.zeros((), dtype=torch.float32, device=self._device)
        self._rate.fill_(rate)
        for group in self._groups.param_groups:
            group["lr"] = self._rate

    def _put_rate(self, rate: float) -> None:
        rate = torch.tensor(rate, dtype=torch.float32).item()
        for group in self._groups.param_groups:
            group["lr"] = rate

    def _aside(self, run: Callable[[], T]) -> T:
        """Run on a stream of its own, as what comes before a capture must."""
        if not self._wants_graph:
            return run()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            found = run()
        current.wait_stream(self._stream)
        return found

    # --- the graph ---------------------------------------------------------------------------------------------------

    def _decide(self, graph: bool | None, obstacle: str | None) -> None:
        """Settle whether steps are to be captured.

        Args:
            graph: as the user has it; None: where it can be.
            obstacle: why it cannot be.

        Raises:
            LaunchError: it was asked for, cannot be, and the fallback policy forbids another way.
        """
        self._wants_graph = graph is not False and obstacle is None
        if graph and obstacle is not None:
            self._refuse(obstacle)

    def _obstacle(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Why no step can be captured, as far as device and optimiser tell."""
        if self._device.type != "cuda" or torch.version.hip is not None:
            return f"parameters are on {self._device}: graphs are CUDA's"
        if not isinstance(optimizer, MultiTensorOptimizer) and not optimizer.defaults.get("capturable"):
            return f"{type(optimizer).__name__} was not made with capturable=True"
        return None

    def _recorded(self, capture: Callable[[], object], undo: Callable[[], object] | None = None) -> bool:
        """Capture, and say whether that went well; where it did not, steps run eagerly from now on, and that is said.

        Args:
            capture: records, and keeps what it gives.
            undo: called where it failed.
        """
        try:
            capture()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ConfigError, LaunchError) as error:  # torch's errors of a capture are RuntimeErrors
            if undo is not None:
                undo()
            self._refuse(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return False
        return True

    def _refuse(self, reason: str) -> None:
        """Say in the ledger, and once in words, that steps run eagerly; or raise, as the fallback policy has it."""
        self._wants_graph = False
        if settings().fallback == "forbid":
            raise LaunchError(f"the {self._words} step cannot be a CUDA graph: {reason}")
        entry = FallbackRecord(self._op, self._case, "graph", "eager", reason)
        if ledger().fallback(entry) or settings().fallback == "warn":
            warnings.warn(
                f"{self._op} ({self._case}): no CUDA graph, steps run eagerly. {reason}", FallbackWarning, stacklevel=5
            )


# --- the step --------------------------------------------------------------------------------------------------------


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


# --- gradient checkpointing ------------------------------------------------------------------------------------------


_DRAW_NOTHING = (TransformerBlock, MultiHeadAttention, MLP, LayerNorm, Linear)
"""Modules that use no random generator: where there are others, its state is kept, which no graph can capture."""


@contextmanager
def recomputed(model: nn.Module, patterns: Sequence[str]) -> Iterator[None]:
    """For a block of code, modules whose names match a pattern keep no activations while they train.

    A module inside one that matches is left alone. Random draws inside (dropout) are repeated as they were.

    Args:
        model: whose modules; each is as before afterwards.
        patterns: of names, as in named_modules: "blocks.?", "encoder.layers.*".

    Raises:
        ConfigError: a pattern matches no module.
    """
    named = [(name, module) for name, module in model.named_modules() if name]
    for pattern in patterns:
        if not fnmatch.filter([name for name, _ in named], pattern):
            raise ConfigError(f"recompute: {pattern!r} matches no module of {type(model).__name__}")
    chosen: list[tuple[str, nn.Module]] = []
    for name, module in named:
        inside = any(name.startswith(f"{outer}.") for outer, _ in chosen)
        if not inside and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            chosen.append((name, module))
    try:
        for _, module in chosen:
            module.forward = _again(module.forward, module)
        yield
    finally:
        for _, module in chosen:
            module.__dict__.pop("forward", None)


def _again(forward: Any, module: nn.Module) -> Any:
    draws = not all(type(each) in _DRAW_NOTHING for each in module.modules())

    def run(*args: Any, **options: Any) -> Any:
        if not module.training:
            return forward(*args, **options)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=draws, **options)

    return run
