"""Peak memory of a training or inference step: predicted from shapes, and measured.

The prediction runs the step on fake tensors and counts the live storages after each op, forward and backward. Memory
that a library's kernel allocates inside one op is estimated. A real run restores all that the step changes.
"""

from __future__ import annotations

import copy
import gc
import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

from accelerant.errors import ConfigError, OutOfMemory, ShapeError, UnsupportedCase
from accelerant.runtime.files import JsonRecord
from accelerant.runtime.memory import limits
from accelerant.runtime.memory.limits import CUDA_GRANULARITY, LiveSet, available_bytes, size_text, storage_bytes

OptimizerLike = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""An optimizer, or what makes one from a list of parameters: torch.optim.AdamW, lambda ps: SGD(ps, lr=0.1)."""


@dataclass(frozen=True, slots=True)
class PeakPrediction(JsonRecord):
    """Memory at the peak of a step, in bytes; the parts add up to the total.

    Parameters include buffers, and gradients are those that exist at the peak. Optimizer state is as from the second
    step on. Activations are everything else: intermediate results, results, the optimizer's temporaries. The workspace
    is an estimate of what kernels allocate inside one op (0 on the CPU). The phase is "forward", "backward" or
    "optimizer".
    """

    parameters: int
    inputs: int
    gradients: int
    optimizer_state: int
    activations: int
    workspace: int
    total: int
    phase: str

    def __str__(self) -> str:
        names = ("parameters", "inputs", "gradients", "optimizer_state", "activations", "workspace")
        parts = ", ".join(f"{name.replace('_', ' ')} {size_text(getattr(self, name))}" for name in names)
        return f"{size_text(self.total)} at the peak ({self.phase}): {parts}"


@dataclass(frozen=True, slots=True)
class PeakComparison:
    """A prediction, and the allocator's count on CUDA or, on the CPU, the live storages of a real run."""

    predicted: PeakPrediction
    measured_bytes: int
    device: str

    @property
    def error(self) -> float:
        """Relative error of the prediction: 0.03 is 3% too high."""
        return self.predicted.total / self.measured_bytes - 1.0 if self.measured_bytes else math.inf

    def __str__(self) -> str:
        return (
            f"{self.device}: predicted {size_text(self.predicted.total)}, measured {size_text(self.measured_bytes)} "
            f"({self.error:+.1%})\n  {self.predicted}"
        )


def predict_peak(
    target: nn.Module | Callable[..., Any],
    *inputs: Any,
    call: Callable[..., Any] | None = None,
    backward: bool = True,
    optimizer: OptimizerLike | None = None,
) -> PeakPrediction:
    """Predict the peak memory of a step from shapes; nothing runs on the device and nothing is changed.

    Args:
        target: a module, or a function of tensors.
        inputs: arguments: tensors, or lists, tuples and dicts of them. Only shapes, dtypes and devices are read.
        call: how the module is used, call(module, *inputs); module(*inputs) by default. With backward, it should return
            the loss: a larger result gets a gradient of its own size.
        backward: whether it is a training step, or an inference under no_grad.
        optimizer: steps after the backward pass, with its state already allocated.

    Raises:
        ConfigError: arguments that exclude each other.
        UnsupportedCase: control flow or shapes depend on values, or an op has no fake implementation; names it.
    """
    step = ModelStep(target, call, backward)

    def fake_inputs(fake: FakeTensorMode) -> Any:
        def as_fake(leaf: Tensor) -> Tensor:
            return fake.from_tensor(leaf.detach().requires_grad_(leaf.requires_grad))

        return pytree.tree_map_only(Tensor, as_fake, inputs)

    return predict_step(step, fake_inputs, device_of(step, inputs), optimizer)


def compare_peak(
    target: nn.Module | Callable[..., Any],
    *inputs: Any,
    call: Callable[..., Any] | None = None,
    backward: bool = True,
    optimizer: OptimizerLike | None = None,
) -> PeakComparison:
    """Predict the peak, then run a real step (two with an optimizer) and measure it.

    Arguments and errors are those of predict_peak. The model is unchanged afterwards: gradients, buffers, modes and
    random state are restored; with an optimizer, the parameters' values are copied to the host and back.
    """
    step = ModelStep(target, call, backward)
    device = device_of(step, inputs)
    predicted = predict_peak(target, *inputs, call=call, backward=backward, optimizer=optimizer)
    measured = measure_step(step, inputs, device, optimizer)
    return PeakComparison(predicted, measured, str(device))


def predict_step(
    step: ModelStep, make_inputs: Callable[[FakeTensorMode], Any], device: torch.device,
    optimizer: OptimizerLike | None = None,
) -> PeakPrediction:  # fmt: skip
    """Predict as predict_peak does, with inputs that are made inside the fake mode and may have any size."""
    if optimizer is not None and not step.backward:
        raise ConfigError("an optimizer needs gradients; got backward=False")
    rounding = CUDA_GRANULARITY if device.type == "cuda" else 1
    workspace = _Workspace(device, threads=2 if step.backward else 1)
    live = LiveSet(device.type, granularity=rounding, watch=workspace.see)
    after_forward: list[int] = []
    try:
        # One thread: the modes are this thread's own, and autograd would use another one for a CUDA device.
        with (
            restored_state(step, torch.device("meta")),
            torch.autograd.set_multithreading_enabled(False),
            limits.predicting() as fake,
        ):
            state = {name: _faked(fake, tensor, device) for name, tensor in step.tensors().items()}
            fakes = make_inputs(fake)
            parameters, inputs = live.hold(state), live.hold(fakes)
            forward = bind_forward(step, state, fakes)
            with live:
                result, gradients = run_step(forward, step.backward, lambda: after_forward.append(live.peak_bytes))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedCase(f"the step depends on values, not on shapes alone ({error}): no prediction") from error
    except UnsupportedOperatorException as error:
        raise UnsupportedCase(f"{error} has no fake implementation: no prediction") from error
    peak, gradient_bytes = live.peak_bytes, live.alive_at_peak(gradients)
    phase = "backward" if peak > after_forward[0] else "forward"
    state_bytes = 0
    if optimizer is not None:
        state_bytes, temporaries = _optimizer_bytes(optimizer, step, rounding)
        if live.live_bytes + temporaries > peak:
            peak, phase = live.live_bytes + temporaries, "optimizer"
            gradient_bytes = storage_bytes(gradients, device.type, rounding)
    del result
    return PeakPrediction(
        parameters=parameters, inputs=inputs, gradients=gradient_bytes, optimizer_state=state_bytes,
        activations=peak - parameters - inputs - gradient_bytes, workspace=workspace.size_bytes,
        total=peak + state_bytes + workspace.size_bytes, phase=phase,
    )  # fmt: skip


def _faked(fake: FakeTensorMode, tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type != "meta":
        return fake.from_tensor(tensor)
    moved = torch.empty_like(tensor, device=device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


class _Workspace:
    """An estimate of the memory that CUDA kernels take inside one op: cuBLAS's workspaces, and a temporary."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._threads = threads
        self._cuda = device.type == "cuda"
        self._device = device
        self._products = 0
        self._largest = 0

    @property
    def size_bytes(self) -> int:
        return self._threads * self._products + self._largest

    def see(self, name: str, args: Sequence[Any], result: Any) -> None:
        if not self._cuda:
            return
        op = name.partition("::")[2].partition(".")[0]
        if op in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_addmm_activation"):
            wide = torch.cuda.is_available() and torch.cuda.get_device_capability(self._device)[0] >= 9
            self._products = (32 << 20) if wide else (8 << 20) + (128 << 10)  # torch's defaults
        elif "convolution" in op:
            # cuDNN may transpose an operand, or build a matrix as large as both together
            self._largest = max(self._largest, storage_bytes([list(args[:3]), result], "cuda"))
        elif op.endswith("attention_backward"):
            query = args[1]
            self._largest = max(self._largest, query.numel() * 4)  # the gradient of the queries, summed in float32


# --- the optimizer ---------------------------------------------------------------------------------------------------
def _optimizer_bytes(optimizer: OptimizerLike, step: ModelStep, granularity: int) -> tuple[int, int]:
    """Return the bytes of an optimizer's state and of its step's temporaries, by a run on the meta device."""
    if not isinstance(step.target, nn.Module):
        raise ConfigError("an optimizer steps the parameters of a module; the target is a function")
    if isinstance(optimizer, torch.optim.Optimizer):
        originals = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        copied = copy_optimizer(optimizer, {id(parameter): _meta(parameter) for parameter in originals})
    else:
        originals = [parameter for parameter in step.target.parameters() if parameter.requires_grad]
        copied = _make_optimizer(optimizer, [_meta(parameter) for parameter in originals])
    fused = any(group.get("fused") for group in copied.param_groups)
    for group in copied.param_groups:
        if group.get("capturable"):
            group["capturable"] = False
        if group.get("fused"):
            group["fused"], group["foreach"] = False, False
        elif group.get("foreach", False) is None and any(original.device.type == "cuda" for original in originals):
            group["foreach"] = True  # torch's default on CUDA
    live = LiveSet("meta", granularity=granularity)
    live.hold([[parameter, parameter.grad] for group in copied.param_groups for parameter in group["params"]])
    before = live.live_bytes
    try:
        with live:
            copied.step()
            kept = live.live_bytes
            if fused:
                return kept - before, 0
            live.reset_peak()
            copied.step()
    except (RuntimeError, TypeError) as error:  # needs values, or a closure
        raise UnsupportedCase(f"{type(copied).__name__} does not step without values: {error}") from error
    return kept - before, live.peak_bytes - kept


def _make_optimizer(
    optimizer: Callable[[list[nn.Parameter]], Any], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    result = optimizer(parameters)
    if not isinstance(result, torch.optim.Optimizer):
        wanted = "wanted one, or what makes one from parameters"
        raise ConfigError(f"optimizer: {wanted}; that made {type(result).__name__}")
    return result


def copy_optimizer(optimizer: torch.optim.Optimizer, parameters: dict[int, nn.Parameter]) -> torch.optim.Optimizer:
    """Copy an optimizer without its state onto other parameters, given by the id of those they replace."""
    memo: dict[int, Any] = dict(parameters)
    for state in optimizer.state.values():
        memo.update({id(value): value for value in state.values() if isinstance(value, Tensor)})  # not copied
    copied = copy.deepcopy(optimizer, memo)
    copied.state.clear()
    return copied


def _meta(parameter: nn.Parameter) -> nn.Parameter:
    copied = nn.Parameter(torch.empty_like(parameter, device="meta"))
    copied.grad = torch.empty_like(copied)
    return copied


# --- the real run ----------------------------------------------------------------------------------------------------
def measure_step(
    step: ModelStep, inputs: tuple[Any, ...], device: torch.device, optimizer: OptimizerLike | None = None, *,
    limit_bytes: int | None = None, placeholder: tuple[int, int] = (0, 0),
) -> int:  # fmt: skip
    """Measure the peak of a real run that leaves the model unchanged; a CPU's stops where limit_bytes are alive."""
    with restored_state(step, device):
        state = shadow_parameters(step)
        forward = bind_forward(step, state, inputs)
        own = [tensor for tensor in state.values() if isinstance(tensor, nn.Parameter)]
        stepped: torch.optim.Optimizer | None = None
        values: list[Tensor] = []
        if optimizer is not None:
            values = [parameter.detach().to("cpu", copy=True) for parameter in own]
            if isinstance(optimizer, torch.optim.Optimizer):
                assert isinstance(step.target, nn.Module)  # for the type checker: predicted before
                originals = map(id, step.target.parameters())
                stepped = copy_optimizer(optimizer, dict(zip(originals, own, strict=True)))
            else:
                stepped = _make_optimizer(optimizer, [parameter for parameter in own if parameter.requires_grad])

        def run() -> None:
            always = torch.empty(placeholder[0], dtype=torch.uint8, device=device)
            for _ in range(1 if stepped is None else 2):  # an optimizer's state exists in the second step
                result, gradients = run_step(forward, step.backward)
                torch.empty(placeholder[1], dtype=torch.uint8, device=device)
                if stepped is not None:
                    for parameter in own:
                        parameter.grad = gradients.get(id(parameter))
                    stepped.step()
                    stepped.zero_grad()
                del result, gradients
            del always

        try:
            if device.type == "cuda":
                held = storage_bytes([state, inputs], "cuda", CUDA_GRANULARITY)
                with limits.peak_recorded(device) as record:
                    run()
                return held + record.growth_bytes
            live = LiveSet(device.type, limit_bytes=limit_bytes)
            live.hold([state, inputs])
            with live:
                run()
            return live.peak_bytes
        finally:
            for parameter, value in zip(own, values, strict=False):  # there are no values without an optimizer
                parameter.data.copy_(value)


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A forward pass of a module, call(module, *inputs), or of a function, with or without its backward pass."""

    target: nn.Module | Callable[..., Any]
    call: Callable[..., Any] | None = None
    backward: bool = True

    def __post_init__(self) -> None:
        if not callable(self.target):
            raise ConfigError(f"wanted a module or a function, got {type(self.target).__name__}")
        if self.call is not None and not isinstance(self.target, nn.Module):
            raise ConfigError("call= says how a module is used; the target is a function already")

    def tensors(self) -> dict[str, Tensor]:
        """Return the module's parameters and buffers by name, each once; empty for a function."""
        if not isinstance(self.target, nn.Module):
            return {}
        return {**dict(self.target.named_parameters()), **dict(self.target.named_buffers())}


def bind_forward(step: ModelStep, state: Mapping[str, Tensor], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """Return the step's forward pass on other tensors in place of the module's own."""
    target = step.target
    if not isinstance(target, nn.Module):
        return lambda: target(*inputs)
    if step.call is None:
        return lambda: torch.func.functional_call(target, dict(state), inputs)
    wrapped, call = nn.Module(), step.call
    wrapped.add_module("module", target)
    wrapped.forward = lambda *arguments: call(target, *arguments)  # an attribute of this object alone
    renamed = {f"module.{name}": tensor for name, tensor in state.items()}
    return lambda: torch.func.functional_call(wrapped, renamed, inputs)


def run_step(
    forward: Callable[[], Any], backward: bool, between: Callable[[], object] = lambda: None
) -> tuple[Any, dict[int, Tensor]]:
    """Run forward, `between` and, if asked, backward; return the result and the gradients by the id of their leaf."""
    with torch.set_grad_enabled(backward):
        result = forward()
    between()
    if not backward:
        return result, {}
    roots = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not roots:
        raise UnsupportedCase("no result requires a gradient; pass backward=False to look at the forward pass alone")
    leaves = _leaves(roots)
    gradients = torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)
    return result, {
        id(leaf): gradient for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None
    }


def _leaves(roots: list[Tensor]) -> list[Tensor]:
    """Return the tensors whose gradients a backward pass from the roots accumulates."""
    leaves = {id(root): root for root in roots if root.grad_fn is None}
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.setdefault(id(variable), variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(leaves.values())


def shadow_parameters(step: ModelStep) -> dict[str, Tensor]:
    """Return parameters that share only the module's values, and copies of its buffers, by name."""
    if not isinstance(step.target, nn.Module):
        return {}
    state: dict[str, Tensor] = {
        name: nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
        for name, parameter in step.target.named_parameters()
    }
    state.update({name: buffer.detach().clone() for name, buffer in step.target.named_buffers()})
    return state


def device_of(step: ModelStep, inputs: Any) -> torch.device:
    """Return the accelerator that the step's tensors are on, or the CPU; raise ConfigError for several."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    devices = {tensor.device for tensor in (*step.tensors().values(), *tensors)}
    if any(device.type == "meta" for device in devices):
        raise ConfigError("tensors on the meta device have no memory; give them on the device that is asked about")
    accelerators = sorted(str(device) for device in devices if device.type != "cpu")
    if len(accelerators) > 1:
        raise ConfigError(f"the step's tensors are on several devices: {', '.join(accelerators)}")
    return torch.device(accelerators[0] if accelerators else "cpu")


def with_batch(sample: Any, rows: int, device: torch.device | None = None) -> Any:
    """Return the sample with so many rows, its own repeated; ShapeError unless its tensors share a first dimension."""
    tensors = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.dim()]
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) != 1 or 0 in sizes:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor with dimensions"
        raise ShapeError(f"the first dimension of each tensor of the sample must be its batch; got {shapes}")
    (present,) = sizes

    def with_rows(leaf: Tensor) -> Tensor:
        moved = leaf.detach().to(device or leaf.device)
        if leaf.dim():
            moved = moved.index_select(0, torch.arange(rows, device=moved.device) % present)
        return moved.requires_grad_(leaf.requires_grad)

    return pytree.tree_map_only(Tensor, with_rows, sample)


@contextmanager
def modules_restored(model: nn.Module | None) -> Iterator[None]:
    """Restore at the end the random state of Python and NumPy, and the attributes of a model's modules."""
    modules = [] if model is None else model.modules()
    plain = [vars(module) for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    inner = [each for own in plain for each in own.values() if isinstance(each, (list, dict, set))]
    containers = [(each, copy.copy(each)) for each in (*inner, *plain)]
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for container, before in containers:
            if not _holds(container, before):  # a loop over hooks breaks where their dict is filled anew
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(before)


def _holds(container: Any, items: Any) -> bool:
    """Return whether a container has the same objects as its copy had."""
    if isinstance(container, dict):
        return container.keys() == items.keys() and all(container[key] is items[key] for key in items)
    return len(container) == len(items) and all(map(operator.is_, container, items))


@contextmanager
def restored_state(step: ModelStep, device: torch.device) -> Iterator[None]:
    """Restore at the end what a step on shadow parameters may change; the device is "meta" if the step runs on none."""
    host, cuda = torch.get_rng_state(), device.type == "cuda"
    device_state = torch.cuda.get_rng_state(device) if cuda else None
    held = torch.cuda.memory_allocated(device) if cuda else 0
    try:
        with modules_restored(step.target if isinstance(step.target, nn.Module) else None):
            yield
    finally:
        torch.set_rng_state(host)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)
            if torch.cuda.memory_allocated(device) > held:
                gc.collect()  # results with reference cycles
                clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
                if clear is not None and torch.cuda.memory_allocated(device) > held:
                    clear()
            torch.cuda.empty_cache()


_SHARE = {"cuda": 0.9, "cpu": 0.5}
"""Default budget as a fraction of the available memory; the CPU's is shared with everything else."""

_RUNS_LIMIT = 8
_CLOSE_ENOUGH = 1 / 64  # real runs stop when the batch could grow by no more than this fraction


@dataclass(frozen=True, slots=True)
class BatchSizeSearch(JsonRecord):
    """The result of optimal_batch_size; usable as an integer, the batch size.

    The peaks at that batch size are predicted from shapes, and measured in a real run (None without one); the budget
    limits them, with the model's own memory. `bytes_per_row` is the cost of one more row. `runs` has the real runs in
    order: batch size, and the peak or None if memory ran out.
    """

    batch_size: int
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int | None
    bytes_per_row: int
    runs: tuple[tuple[int, int | None], ...]

    def __index__(self) -> int:
        return self.batch_size

    def __str__(self) -> str:
        measured = "not run" if self.measured_bytes is None else f"measured {size_text(self.measured_bytes)}"
        return (
            f"batch size {self.batch_size}: predicted {size_text(self.predicted_bytes)}, {measured}, "
            f"budget {size_text(self.budget_bytes)}, {size_text(self.bytes_per_row)} a row"
        )


def optimal_batch_size(
    model: nn.Module,
    sample: Any,
    *,
    budget: int | float | None = None,
    backward: bool = True,
    call: Callable[..., Any] | None = None,
    optimizer: OptimizerLike | None = None,
    maximum: int = 65536,
    confirm: bool = True,
) -> BatchSizeSearch:
    """Find the largest batch whose step stays within the budget.

    The model, its gradients, buffers and modes, the random state and the device's memory are unchanged afterwards.

    Args:
        model: on its device.
        sample: one input, or a tuple of them, as for a call; the first dimension of each tensor is the batch. A few
            rows suffice: they are repeated.
        budget: bytes for the whole peak, or, as a float up to 1.0, a fraction of the memory that this process could
            have; 0.9 by default, 0.5 on the CPU.
        backward: whether it is a training step in train mode, or inference in eval mode under no_grad.
        call: how the model is used, call(model, *inputs); it should return the loss.
        optimizer: its state and its step's memory count; it is not stepped.
        maximum: the largest batch to consider.
        confirm: whether to run the step; if not, the prediction is the result.

    Raises:
        OutOfMemory: not even one row fits; says how much it needs.
        ConfigError, ShapeError: an invalid argument.
        UnsupportedCase: the step cannot be predicted; says why.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: wanted a torch.nn.Module, got {type(model).__name__}")
    if isinstance(maximum, bool) or not isinstance(maximum, int) or maximum < 1:
        raise ConfigError(f"maximum must be a whole number of at least 1, got {maximum!r}")
    step = ModelStep(model, call, backward)
    inputs = tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)
    device = device_of(step, inputs)
    with_batch(inputs, 1)  # raises if there is no batch dimension
    budget_bytes = _budget(budget, step, device)
    modes = {module: module.training for module in model.modules()}
    try:
        model.train(backward)
        return _Search(step, inputs, device, optimizer, budget_bytes, maximum).run(confirm)
    finally:
        for module, training in modes.items():
            module.training = training


def _budget(budget: int | float | None, step: ModelStep, device: torch.device) -> int:
    share = _SHARE.get(device.type, 0.5) if budget is None else budget
    if isinstance(share, bool) or not isinstance(share, (int, float)) or share <= 0:
        raise ConfigError(f"budget must be bytes above 0, or a part of the memory above 0.0 to 1.0; got {budget!r}")
    if isinstance(share, int):
        return share
    if share > 1.0:
        raise ConfigError(f"budget as a float is a part of the memory, at most 1.0; got {share} (bytes are integers)")
    own = storage_bytes(step.tensors(), device.type, CUDA_GRANULARITY)
    return int(share * (available_bytes(device) + own))


@dataclass(slots=True)
class _Search:
    """A search: its arguments, and the predictions by rows and the real runs so far."""

    _step: ModelStep
    _inputs: tuple[Any, ...]
    _device: torch.device
    _optimizer: OptimizerLike | None
    _budget: int
    _maximum: int
    _predictions: dict[int, PeakPrediction] = field(default_factory=dict)
    _runs: list[tuple[int, int | None]] = field(default_factory=list)

    def run(self, confirm: bool) -> BatchSizeSearch:
        few, more = min(2, self._maximum), min(4, self._maximum)
        slope = (self._predicted(more).total - self._predicted(few).total) / max(1, more - few)
        fits, total = self._largest(lambda rows: self._predicted(rows).total, few, slope, math.inf)
        if total is None:
            least = self._predicted(1)
            raise OutOfMemory(
                f"not even one row fits {self._budget:,} bytes on {self._device}: it takes {least.total:,} ({least})"
            )
        per_row = self._predicted(fits).inputs
        if fits > 1:
            per_row = (total - self._predicted(fits // 2).total) // (fits - fits // 2)
        best, measured = fits, None
        if confirm:
            best, measured = self._largest(self._measure, fits, max(1, per_row), _RUNS_LIMIT, _CLOSE_ENOUGH)
            if measured is None:
                raise OutOfMemory(
                    f"not even one row fits {self._budget:,} bytes on {self._device} when run; "
                    f"the prediction is {self._predicted(1)}"
                )
        return BatchSizeSearch(best, self._budget, self._predicted(best).total, measured, per_row, tuple(self._runs))

    def _largest(
        self, peak_of: Callable[[int], int | None], guess: int, slope: float, tries: float, close: float = 0.0
    ) -> tuple[int, int | None]:
        """Return the largest batch within the budget, and its peak; (0, None) if not even one row fits.

        Each guess is where the line through the nearest peaks, or through one of them with the `slope`, meets the
        budget. Once a batch fits, the search ends after `tries` peaks, or if it could grow by a fraction `close` alone.
        """
        low, high = 0, self._maximum + 1  # low fits; high does not, or is not allowed
        peaks: dict[int, int | None] = {}
        while high - low > 1 and (not low or len(peaks) < tries):
            guess = min(max(guess, low + 1), high - 1)
            peak = peaks[guess] = peak_of(guess)
            if peak is not None and peak <= self._budget:
                low = guess
            else:
                high = guess
            under, over = peaks.get(low), peaks.get(high)
            if under is not None and over is not None:
                slope = (over - under) / (high - low)
            if over is None and high in peaks:  # memory ran out, and by how much is unknown
                guess = (low + high) // 2 if low else high - max(1, high // 4)
            elif slope <= 0:
                guess = high - 1
            elif under is not None:
                guess = low + int((self._budget - under) / slope)
            elif over is not None:
                guess = high - math.ceil((over - self._budget) / slope)
            if close and low and min(guess, high - 1) - low <= low * close:
                break
        return low, peaks.get(low)

    def _predicted(self, rows: int) -> PeakPrediction:
        def with_rows(leaf: Tensor) -> Tensor:
            shape = (rows, *leaf.shape[1:]) if leaf.dim() else leaf.shape
            empty = torch.empty(shape, dtype=leaf.dtype, device=self._device if leaf.dim() else leaf.device)
            return empty.requires_grad_(leaf.requires_grad)

        def fake_inputs(fake: FakeTensorMode) -> Any:
            return pytree.tree_map_only(Tensor, with_rows, self._inputs)

        if rows not in self._predictions:
            self._predictions[rows] = predict_step(self._step, fake_inputs, self._device, self._optimizer)
        return self._predictions[rows]

    def _measure(self, rows: int) -> int | None:
        """Return the peak of a real run; None if memory ran out."""
        expected = self._predicted(rows)
        optimizer = expected.optimizer_state, expected.activations if expected.phase == "optimizer" else 0
        peak: int | None = None
        try:
            inputs = with_batch(self._inputs, rows, self._device)
            peak = measure_step(self._step, inputs, self._device, limit_bytes=self._budget, placeholder=optimizer)
        except (OutOfMemory, RuntimeError, MemoryError) as error:
            if not limits.is_out_of_memory(error):
                raise
        # The error is released here, with the tensors of its traceback.
        self._runs.append((rows, peak))
        return peak
