"""One optimizer step as one call: forward, backward, clipping and update; on a GPU as one CUDA graph.

The first steps run eagerly, because they compile kernels and create optimizer state; the next one is captured, and all
later ones are replays over the same memory.
"""

from __future__ import annotations

import fnmatch
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accelerant._version import __version__
from accelerant.config import settings
from accelerant.errors import AccelerantError, ConfigError, FallbackWarning, LaunchError, ShapeError
from accelerant.nn.layers import LowWeights, dtype_of, float8_weights, require_float8
from accelerant.nn.optim import MultiTensorOptimizer, clip_grad_norm_
from accelerant.nn.train.data import Batch
from accelerant.nn.train.parallel import GradientReduction, described, is_reduced_elsewhere, start_equal
from accelerant.nn.transformer import DRAW_NOTHING
from accelerant.ops._library import is_distributed
from accelerant.runtime.compilation import background
from accelerant.runtime.ledger import FallbackRecord, ledger
from accelerant.runtime.processes import Processes
from accelerant.runtime.streams.graphs import Graph, ahead_of_capture

# --- steps as CUDA graphs --------------------------------------------------------------------------------------------
T = TypeVar("T")

EAGER_STEPS = 3
"""Steps before the capture: the first compiles kernels and creates state, the others settle memory addresses."""


class Same:
    """Objects, kept alive, compared by identity: the states that an optimizer's `load_state_dict` replaces."""

    __slots__ = ("_objects",)

    def __init__(self, objects: Iterable[object]) -> None:
        self._objects = tuple(objects)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        a, b = self._objects, other._objects
        return len(a) == len(b) and all(map(operator.is_, a, b))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._objects)))


class GraphedStep:
    """Base of steps that become CUDA graphs: device, precision, learning rate, and the decision to capture.

    `op` names the step in the ledger, `words` in messages; `low` casts each matrix once per pass.
    """

    def __init__(
        self, op: str, words: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device,
        precision: torch.dtype | None, low: LowWeights | None,
    ) -> None:  # fmt: skip
        self._op, self._words = op, words
        self._case = f"{type(model).__name__} on {device}"
        self._groups, self._device, self._precision, self._low = optimizer, device, precision, low
        self._rate: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._wants_graph = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._case})"

    # --- eager, and captured as well ---------------------------------------------------------------------------------
    def _precision_context(self) -> AbstractContextManager[object]:
        return nullcontext() if self._low is None else self._low.refreshed()

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self._precision is None else torch.autocast(self._device.type, dtype=self._precision)

    def _moved(self, batch: Iterable[Tensor]) -> list[Tensor]:
        return [each.to(self._device, non_blocking=True) for each in batch]

    def _set_rate(self, rate: float) -> None:
        """Set the learning rate: a number for eager steps, a tensor for replays; both float32, for equal results."""
        if not self._wants_graph:
            self._set_rate_number(rate)
            return
        if self._rate is None:
            self._rate = torch.zeros((), dtype=torch.float32, device=self._device)
        self._rate.fill_(rate)
        for group in self._groups.param_groups:
            group["lr"] = self._rate

    def _set_rate_number(self, rate: float) -> None:
        rate = torch.tensor(rate, dtype=torch.float32).item()
        for group in self._groups.param_groups:
            group["lr"] = rate

    def _on_side_stream(self, run: Callable[[], T]) -> T:
        """Run on a separate stream, as the steps before a capture must."""
        if not self._wants_graph:
            return run()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), ahead_of_capture(), background.awaited():
            result = run()
        current.wait_stream(self._stream)
        return result

    # --- the graph ---------------------------------------------------------------------------------------------------
    def _decide(self, graph: bool | None, obstacle: str | None) -> None:
        """Capture steps unless the user chose not to (graph=False), or there is an obstacle."""
        self._wants_graph = graph is not False and obstacle is None
        if graph and obstacle:
            self._refuse(obstacle)

    def _obstacle(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Return why the device or the optimizer rules out a capture, or None."""
        if self._device.type != "cuda" or torch.version.hip is not None:
            return f"parameters are on {self._device}: graphs are CUDA's"
        if not isinstance(optimizer, MultiTensorOptimizer) and not optimizer.defaults.get("capturable"):
            return f"{type(optimizer).__name__} was not made with capturable=True"
        return None

    def _recorded(self, capture: Callable[[], object], undo: Callable[[], object] | None = None) -> bool:
        """Capture, and return whether it succeeded; if not, undo it and run steps eagerly from now on."""
        try:
            with ahead_of_capture():
                capture()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ConfigError, LaunchError) as raised:  # torch's errors of a capture are RuntimeErrors
            if undo is not None:
                undo()
            error: Exception = raised
            while isinstance(error.__context__, RuntimeError | AccelerantError):  # the capture's end raises another
                error = error.__context__
            self._refuse(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return False
        return True

    def _refuse(self, reason: str) -> None:
        """Report in the ledger, and warn once, that steps run eagerly; or raise, if the fallback policy says so."""
        self._wants_graph = False
        if settings().fallback == "forbid":
            raise LaunchError(f"the {self._words} step cannot be a CUDA graph: {reason}")
        entry = FallbackRecord(self._op, self._case, "graph", "eager", reason)
        if ledger().fallback(entry) or settings().fallback == "warn":
            text = f"{self._op} ({self._case}): no CUDA graph, steps run eagerly. {reason}"
            warnings.warn(text, FallbackWarning, stacklevel=5)


# --- the step --------------------------------------------------------------------------------------------------------
class StepResult(NamedTuple):
    """The result of a step: float32 scalars on the device, in memory that no later step writes.

    `loss` is the mean over the step's batches in all processes; `grad_norm` is before clipping, and not finite if the
    step was skipped (see LossScale).
    """

    loss: Tensor
    grad_norm: Tensor


class LossScale:
    """The factor of the loss in float16, which keeps small gradients above float16's smallest numbers.

    A step whose gradients are not finite changes nothing and halves the factor; after `interval` other steps in a row
    it doubles. All of this happens on the device, where `value`, `good_steps` (since the last change) and `skipped`
    are. Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2, with the constants of torch.amp.GradScaler.
    """

    SMALLEST = 2.0**-16
    """Overflows at a smaller factor have another cause, and end a training."""

    def __init__(self, device: torch.device, initial: float = 2.0**16, interval: int = 2000) -> None:
        if not (initial > 0 and initial < float("inf")) or interval < 1:
            needs = "a finite factor above 0 and an interval of 1"
            raise ConfigError(f"a loss scale needs {needs}, got {initial}, {interval}")
        self.interval = interval
        self.value = torch.tensor(initial, dtype=torch.float32, device=device)
        self.good_steps, self.skipped = torch.zeros(2, dtype=torch.int32, device=device).unbind()

    def update(self, grad_norm: Tensor) -> None:
        """Adapt the factor to the gradients' norm in the step that used it."""
        overflow = grad_norm.isfinite().logical_not().float().reshape(())
        self.skipped += overflow.int()
        torch._amp_update_scale_(self.value, self.good_steps, overflow, 2.0, 0.5, self.interval)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps; `load` copies into them."""
        return {"value": self.value, "good_steps": self.good_steps, "skipped": self.skipped}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def require_scalar(loss: Any) -> Tensor:
    """Return the loss if it is a tensor of one element; raise ShapeError if it is not."""
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

    If torch.distributed is initialized with several processes, they do each step together: parameters and buffers begin
    as rank 0's, and the gradient is that of the mean over the batches of all, summed in buckets while the backward pass
    runs. The gradients of a DistributedDataParallel, and of parameters that FSDP2 shards, are left to these.

    Args:
        model: its parameters are the optimizer's.
        optimizer: those of accelerant.nn.optim clip and update in one launch. torch's work, too; for a graph they must
            have been created with capturable=True. All groups get the learning rate of the call, which is a number
            before and after it.
        loss: called with the tensors of a batch; returns a scalar.
        max_grad_norm: maximum norm of all gradients together; None for no clipping.
        accumulate: batches in a step; the gradient is that of the mean of their losses.
        weigh: called with a step's batches if there are several; returns the weights of their losses in that mean,
            (accumulate,) on their device, 0 for one to ignore even if its loss is NaN; None for equal weights. They are
            divided by their sum over all processes.
        precision: bfloat16 for autocast, with each matrix cast once per step; float16 for the same with a loss scale;
            float8_e4m3fn for bfloat16 with the linear products of accelerant.nn's blocks in 8 bits (forward, and the
            gradient of their input); None for the parameters' own dtype.
        loss_scale: for float16; None for a new one.
        graph: True to capture the step, False not to, None to capture on a CUDA device; with several processes if
            their collectives are NCCL's, which are captured, too, and not those of a DistributedDataParallel. If a
            capture is impossible, steps run eagerly and the ledger has the reason.
        reduce_dtype: of the gradients' sum over the processes: float32, or bfloat16 for half the traffic.
        bucket_bytes: size of the parts in which gradients are summed; None for one that suits what sums them.

    Attributes:
        captured: whether steps are replays by now.
        loss_scale: that of float16; None in other precisions.

    Raises:
        ConfigError: an unsupported value; in float16 parameters of that dtype, or an optimizer that cannot skip a step
            on the device (torch's can with fused=True); in all processes, a value or a version that differs in one.

    While a graph is replayed, hooks and Python code of the model do not run, batches must keep their shapes (one of
    another shape runs eagerly), and `.grad` holds the gradients of the last step as usual. Call `reset` after a change
    that a captured step does not see: other code of the model, or replaced modules and parameters.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], *,
        max_grad_norm: float | None = None, accumulate: int = 1,
        weigh: Callable[[Sequence[Sequence[Tensor]]], Tensor | None] | None = None,
        precision: torch.dtype | str | None = None, graph: bool | None = None, loss_scale: LossScale | None = None,
        reduce_dtype: torch.dtype | str = torch.float32, bucket_bytes: int | None = None,
    ) -> None:  # fmt: skip
        if accumulate < 1:
            raise ConfigError(f"accumulate must be at least 1, got {accumulate}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be above 0, or None; got {max_grad_norm}")
        precision, reduce_dtype = dtype_of(precision), dtype_of(reduce_dtype) or torch.float32
        if precision not in (None, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
            raise ConfigError(f"precision must be bfloat16, float16, float8_e4m3fn, float32 or None, got {precision}")
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.accumulate = accumulate
        self._processes = processes = Processes()
        self._weigh = weigh if accumulate > 1 or processes.size > 1 else None
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        if not self._params:
            raise ConfigError("the optimizer has no parameters")
        device, low = self._params[0].device, None
        self._own = isinstance(optimizer, MultiTensorOptimizer)
        self._max_norm = float("inf") if max_grad_norm is None else float(max_grad_norm)  # infinity only computes it
        if self._own:  # its step computes the norm and clips
            if (current := optimizer.defaults["max_grad_norm"]) is None:
                optimizer.defaults["max_grad_norm"] = self._max_norm
            elif max_grad_norm is not None and current != max_grad_norm:
                raise ConfigError(f"max_grad_norm is {max_grad_norm} here and {current} in the optimizer: give it once")
        split = any(map(is_distributed, self._params))  # FSDP frees weights: copies of them must not stay
        if precision == torch.float8_e4m3fn:
            require_float8(device)
            if split:
                raise ConfigError("precision fp8 needs whole parameters, these are sharded: use bfloat16")
            precision, low = torch.bfloat16, LowWeights(torch.bfloat16, float8_weights(model))
        elif precision in (torch.bfloat16, torch.float16):
            low = None if split else LowWeights(precision)
        self.loss_scale = self._checked_scale(loss_scale, device) if precision == torch.float16 else None
        autocast = None if precision == torch.float32 else precision
        super().__init__("train_step", "training", model, optimizer, device, autocast, low)
        self._reduction: GradientReduction | None = None
        self._averages = processes.size > 1 and is_reduced_elsewhere(model, self._params)
        if processes.size > 1:
            same: dict[str, object] = {
                "accelerant": __version__, "torch": torch.__version__, "the parameters": described(self._params),
                "accumulate": accumulate, "max_grad_norm": self._max_norm, "precision": precision, "graph": graph,
                "reduce_dtype": reduce_dtype, "bucket_bytes": bucket_bytes,
            }  # fmt: skip
            with processes.agreed(same):
                if not self._averages:
                    sizes: Any = {"dtype": reduce_dtype, "bucket_bytes": bucket_bytes}
                    self._reduction = GradientReduction(self._params, processes, **sizes)
            if self._reduction is not None:
                self._reduction.connect()
            start_equal(model, processes)
        self._decide(graph, self._obstacle_of(automatic=graph is None))
        self.reset()

    def _checked_scale(self, scale: LossScale | None, device: torch.device) -> LossScale:
        if any(param.dtype == torch.float16 for param in self._params):
            raise ConfigError("float16 training keeps parameters in float32, and casts them: call model.float() first")
        if not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            needs = f"an optimizer that can skip a step on the device, not {type(self.optimizer).__name__}"
            raise ConfigError(f"float16 needs {needs}: use accelerant.nn.optim, or fused=True")
        return LossScale(device) if scale is None else scale

    def reset(self) -> None:
        """Discard the captured step; the next steps run eagerly and are captured again."""
        self._graph: Graph | None = None
        self._seen: Any = None
        self._eager = 0
        self._inputs: list[list[Tensor]] = []
        self._output: Tensor | None = None
        self._grads: list[Tensor | None] = []

    def __repr__(self) -> str:
        model, optimizer = type(self.model).__name__, type(self.optimizer).__name__
        mode = "captured" if self.captured else "eager"
        return f"TrainStep({model} on {self._device}, {optimizer}, accumulate={self.accumulate}, {mode})"

    @property
    def captured(self) -> bool:
        """True if steps of the last shapes are replays of a graph."""
        return self._graph is not None

    @property
    def bucket_bytes(self) -> list[int]:
        """Bytes of the sums of gradients, in their order; empty for one process."""
        return [] if self._reduction is None else self._reduction.bucket_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a tied embedding's rows that this process sends in a step; 0 where its gradient is summed whole."""
        return 0 if self._reduction is None else self._reduction.row_bytes

    def __call__(self, batches: Sequence[Batch], learning_rate: float) -> StepResult:
        """Do one step on `accumulate` batches, each the arguments of the loss; nothing waits for the device.

        Raises ConfigError for another number of batches or a learning rate that is negative or NaN, and ShapeError if
        the loss is no scalar.
        """
        if len(batches) != self.accumulate:
            raise ConfigError(f"a step takes {self.accumulate} batches, got {len(batches)}")
        if not learning_rate >= 0:
            raise ConfigError(f"learning_rate must be at least 0, got {learning_rate}")
        try:
            self._set_rate(learning_rate)
            return self._step(batches)
        finally:
            self._set_rate_number(learning_rate)  # a number: the optimizer's groups outlive this object

    def _step(self, batches: Sequence[Batch]) -> StepResult:
        """Replay the step if it is captured for these shapes, else run it; capture it after enough eager steps."""
        if not self._wants_graph:
            return StepResult(*self._run(self._moved_all(batches)).unbind())
        seen = self._signature(batches)
        if self._graph is not None and seen[1:] != self._seen[1:]:
            self.reset()  # memory that the captured step uses was replaced
        if self._graph is not None:
            return self._replay(batches) if seen == self._seen else self._eager_step(batches)
        self._eager = self._eager + 1 if self._seen is not None and seen[0] == self._seen[0] else 1
        self._seen = seen
        if self._eager <= EAGER_STEPS:
            result = self._eager_step(batches)
            self._seen = self._signature(batches)  # the first step creates the optimizer's state
            return result
        return self._replay(batches) if self._capture(batches) else self._step(batches)

    # --- the step itself ---------------------------------------------------------------------------------------------
    def _run(self, batches: Sequence[Sequence[Tensor]]) -> Tensor:
        """Run the whole step, eagerly or under capture; return the loss and the norm, (2,) float32."""
        if type(self.optimizer).zero_grad is torch.optim.Optimizer.zero_grad:
            for group in self.optimizer.param_groups:  # what it does, in a tenth of its time
                for param in group["params"]:
                    param.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=True)
        try:
            total = self._gradients(batches)
        finally:
            if self._reduction is not None:
                self._reduction.release()
        norm = self._update()
        if self.loss_scale is not None:
            self.loss_scale.update(norm)
        return torch.stack([total.float().reshape(()), norm.float().to(total.device)])

    def _gradients(self, batches: Sequence[Sequence[Tensor]]) -> Tensor:
        """Compute the gradients, summed over the processes; return the loss."""
        scale, reduction, processes = self.loss_scale, self._reduction, self._processes.size
        total: Tensor | None = None
        weights = None if self._weigh is None else self._weigh(batches)
        losses = self.accumulate * (1 if self._averages else processes)
        if weights is not None:
            weights = weights / self._processes.sum_(weights.sum())
            if self._averages:
                weights = weights * processes
        with self._precision_context():
            for number, batch in enumerate(batches):
                if reduction is not None and number == self.accumulate - 1:
                    reduction.watch()
                with self._autocast():
                    loss = require_scalar(self.loss(*batch))
                    if weights is not None:
                        loss = torch.where(weights[number] == 0, torch.zeros_like(loss), loss) * weights[number]
                    elif losses > 1:
                        loss = loss / losses
                if reduction is not None and number == self.accumulate - 1:
                    reduction.frozen = self._graph is not None  # others replay the captured step
                    reduction.arm()
                (loss if scale is None else loss.float() * scale.value).backward()
                total = loss.detach() if total is None else total + loss.detach()
        assert total is not None  # for the type checker: there is at least one batch
        if reduction is not None:
            total = total.float()
            reduction.finish(total)
        elif processes > 1:
            total = self._processes.sum_(total.float() / processes)
        return total

    def _update(self) -> Tensor:
        """Clip and update; return the gradients' norm, without the loss scale."""
        optimizer: Any = self.optimizer
        scale = self.loss_scale
        if self._own:
            optimizer.grad_scale = None if scale is None else scale.value  # it skips the step by the norm
            optimizer.step()
            optimizer.grad_scale = None  # for steps outside
            norm: Tensor = optimizer.grad_norm
            return norm
        if scale is not None:
            grads = [param.grad for param in self._params if param.grad is not None]
            torch._foreach_mul_(grads, scale.value.double().reciprocal().float())
        norm = clip_grad_norm_(self._params, self._max_norm)
        if scale is not None:
            optimizer.grad_scale, optimizer.found_inf = None, norm.isfinite().logical_not().float().reshape(())
        optimizer.step()
        if scale is not None:
            del optimizer.grad_scale, optimizer.found_inf
        return norm

    def _moved_all(self, batches: Sequence[Batch]) -> list[list[Tensor]]:
        return [self._moved(batch) for batch in batches]

    # --- the graph ---------------------------------------------------------------------------------------------------
    def _obstacle_of(self, *, automatic: bool) -> str | None:
        """Return why no step can be captured, as far as is known before the first, or None."""
        if (known := self._obstacle(self.optimizer)) is not None:
            return known
        if any(param.device != self._device for param in self._params):
            return "parameters are on several devices"
        if automatic and isinstance(self.model, torch.nn.parallel.DistributedDataParallel):
            return "DistributedDataParallel reduces the gradients: graph=True captures its collectives too"
        if self._processes.size > 1 and "cuda:nccl" not in torch.distributed.get_backend_config():
            return "processes train together, and their collectives on a GPU are not NCCL's"
        return None

    def _signature(self, batches: Sequence[Batch]) -> tuple[Any, ...]:
        """Return what a captured step depends on: the shapes, and objects that may be replaced."""
        return (
            tuple([tuple([(each.shape, each.dtype) for each in batch]) for batch in batches]),
            Same(self.optimizer.state.values()),
            tuple([param.data_ptr() for param in self._params]),
            tuple([param.requires_grad for param in self._params]),
            tuple([module.training for module in self.model.modules()]),
        )

    def _eager_step(self, batches: Sequence[Batch]) -> StepResult:
        moved = self._moved_all(batches)
        pair = self._on_side_stream(lambda: self._run(moved)).clone()  # in memory of the current stream
        return StepResult(*pair.unbind())

    def _capture(self, batches: Sequence[Batch]) -> bool:
        """Record the step without running it; return whether that succeeded."""
        self._inputs = [[each.to(self._device, copy=True) for each in batch] for batch in batches]
        if isinstance(self.optimizer, MultiTensorOptimizer):
            self.optimizer.refresh()
        self.optimizer.zero_grad(set_to_none=True)
        graph = Graph("train_step")

        def capture() -> None:
            self._output = graph.capture(self._run, self._inputs, warm_up=0)

        # A failed capture leaves gradients in uninitialized memory.
        recorded = self._recorded(capture, undo=lambda: self.optimizer.zero_grad(set_to_none=True))
        if any(self._processes.largest([not recorded])):  # some processes cannot replay while others exchange flags
            self.optimizer.zero_grad(set_to_none=True)
            if recorded:
                self._refuse("the capture failed in another process")
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
            if param.grad is not grad:  # an eager step replaced it
                param.grad = grad
        torch.autograd.graph.increment_version(self._params)
        return StepResult(*self._output.clone().unbind())


# --- gradient checkpointing ------------------------------------------------------------------------------------------
@contextmanager
def recomputed(model: nn.Module, patterns: Sequence[str]) -> Iterator[None]:
    """Make modules whose names match a pattern recompute their activations in the backward pass (checkpointing).

    A module inside a matching one is not changed itself. Random numbers (dropout) are drawn identically again. Of a
    chain of blocks only their inputs stay in memory, for one more forward pass: Chen et al. 2016, arXiv:1604.06174.
    """
    named = [(name, module) for name, module in model.named_modules() if name]
    for pattern in patterns:
        if not fnmatch.filter([name for name, _ in named], pattern):
            raise ConfigError(f"recompute: {pattern!r} matches no module of {type(model).__name__}")
    chosen: dict[str, nn.Module] = {}
    for name, module in named:
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if not inside and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            chosen[name] = module
    try:
        for module in chosen.values():
            module.forward = _checkpointed(module.forward, module)
        yield
    finally:
        for module in chosen.values():
            module.__dict__.pop("forward", None)


def _checkpointed(forward: Any, module: nn.Module) -> Any:
    draws = any(type(child) not in DRAW_NOTHING or getattr(child, "dropout", 0.0) for child in module.modules())

    def run(*args: Any, **options: Any) -> Any:
        if not module.training:
            return forward(*args, **options)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=draws, **options)

    return run
