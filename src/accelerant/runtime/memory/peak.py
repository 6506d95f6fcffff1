"""Peak memory of a step: predicted from shapes without touching the device, and measured beside it.

    print(predict_peak(model, idx, targets, call=GPT.loss, optimizer=torch.optim.AdamW))
    print(compare_peak(model, idx, targets, call=GPT.loss))

The prediction runs the step on fake tensors, which have shapes and no memory, and counts the storages alive after each
op, forward and backward. It knows any op with a fake implementation, ours included. What a kernel allocates inside one
op it can only guess: that is the figure `workspace`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.runtime.memory.limits import peak_recorded, size_text
from accelerant.runtime.memory.live_set import CUDA_GRANULARITY, LiveSet, predicting, storage_bytes

__all__ = [
    "OptimizerLike",
    "PeakComparison",
    "PeakPrediction",
    "Step",
    "bound",
    "compare_peak",
    "device_of",
    "measure_step",
    "predict_peak",
    "predict_step",
    "resized",
    "run_step",
    "stand_ins",
    "undisturbed",
]

OptimizerLike = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""An optimizer, or what makes one from a list of parameters: torch.optim.AdamW, lambda ps: SGD(ps, lr=0.1)."""


@dataclass(frozen=True, slots=True)
class PeakPrediction:
    """What is alive when the most is, in bytes; the parts add up to the total.

    Attributes:
        parameters: parameters and buffers.
        inputs: the example inputs.
        gradients: those gradients that are there at the peak.
        optimizer_state: from the second step on.
        activations: everything else: intermediate results, results, temporaries of the optimizer.
        workspace: a guess of what kernels allocate inside one op (0 on the CPU).
        total: the sum.
        phase: where the peak is: "forward", "backward" or "optimizer".
    """

    parameters: int
    inputs: int
    gradients: int
    optimizer_state: int
    activations: int
    workspace: int
    total: int
    phase: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        names = ("parameters", "inputs", "gradients", "optimizer_state", "activations", "workspace")
        parts = ", ".join(f"{name.replace('_', ' ')} {size_text(getattr(self, name))}" for name in names)
        return f"{size_text(self.total)} at the peak ({self.phase}): {parts}"


@dataclass(frozen=True, slots=True)
class PeakComparison:
    """A prediction beside the truth.

    Attributes:
        predicted: from shapes.
        measured_bytes: CUDA: what the allocator counted; CPU: what the same count of live storages gives on a real run.
        device: where it ran.
    """

    predicted: PeakPrediction
    measured_bytes: int
    device: str

    @property
    def error(self) -> float:
        """The prediction's deviation from what was measured: 0.03 is 3% too high."""
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
    """Peak memory of a step, from shapes; nothing runs on the device and nothing is changed.

    Args:
        target: a module, or a function of tensors.
        inputs: what it is called with: tensors, or lists, tuples and dicts of them. Only their shapes, dtypes and
            devices are read.
        call: how the module is used: call(module, *inputs); module(*inputs) by default. With backward, let it return
            the loss: a larger result is given a gradient of its own size.
        backward: a training step; if not, an inference under no_grad.
        optimizer: steps after the backward pass, its state there from before.

    Raises:
        ConfigError: arguments that do not go together.
        UnsupportedCase: control flow or shapes depend on values, or an op has no fake implementation; names it.
    """
    step = Step(target, call, backward)
    return predict_step(step, lambda fake: _faked(fake, inputs), device_of(step, inputs), optimizer)


def compare_peak(
    target: nn.Module | Callable[..., Any],
    *inputs: Any,
    call: Callable[..., Any] | None = None,
    backward: bool = True,
    optimizer: OptimizerLike | None = None,
) -> PeakComparison:
    """Predict the peak, then run two steps for real and measure the second's.

    Arguments and errors are predict_peak's. The model is left as it was: gradients, buffers, modes and random state are
    put back; with an optimizer, the parameters' values are copied to the host and back.
    """
    step = Step(target, call, backward)
    device = device_of(step, inputs)
    predicted = predict_peak(target, *inputs, call=call, backward=backward, optimizer=optimizer)
    measured = measure_step(step, inputs, device, optimizer)
    return PeakComparison(predicted, measured, str(device))


# --- prediction ------------------------------------------------------------------------------------------------------


def predict_step(
    step: Step,
    make_inputs: Callable[[FakeTensorMode], tuple[Any, ...]],
    device: torch.device,
    optimizer: OptimizerLike | None = None,
) -> PeakPrediction:
    """As predict_peak; the inputs are made inside the fake mode, so that they may have any size."""
    if optimizer is not None and not step.backward:
        raise ConfigError("an optimizer needs gradients; got backward=False")
    rounding = _granularity(device)
    workspace = _Workspace(device, threads=2 if step.backward else 1)
    live = LiveSet(device.type, granularity=rounding, watch=workspace.see)
    after_forward: list[int] = []
    try:
        # One thread: the modes are this thread's own, and autograd would use another one for a CUDA device.
        with (
            undisturbed(step, torch.device("meta")),
            torch.autograd.set_multithreading_enabled(False),
            predicting() as fake,
        ):
            state = {name: fake.from_tensor(tensor) for name, tensor in step.tensors().items()}
            made = make_inputs(fake)
            parameters, inputs = live.hold(state), live.hold(made)
            forward = bound(step, state, made)
            with live:
                result, gradients = run_step(forward, step.backward, lambda: after_forward.append(live.peak_bytes))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedCase(f"the step depends on values, not on shapes alone ({error}): no prediction") from error
    except UnsupportedOperatorException as error:
        raise UnsupportedCase(f"{error} has no fake implementation: no prediction") from error
    peak, here = live.peak_bytes, live.alive_at_peak(gradients)
    phase = "backward" if peak > after_forward[0] else "forward"
    state_bytes = 0
    if optimizer is not None:
        state_bytes, temporaries = _optimizer_bytes(optimizer, step, rounding)
        if live.live_bytes + temporaries > peak:
            peak, phase = live.live_bytes + temporaries, "optimizer"
            here = storage_bytes(gradients, device.type, rounding)
    del result
    return PeakPrediction(
        parameters=parameters,
        inputs=inputs,
        gradients=here,
        optimizer_state=state_bytes,
        activations=peak - parameters - inputs - here,
        workspace=workspace.size_bytes,
        total=peak + state_bytes + workspace.size_bytes,
        phase=phase,
    )


def _granularity(device: torch.device) -> int:
    return CUDA_GRANULARITY if device.type == "cuda" else 1


def _faked(fake: FakeTensorMode, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    def of(leaf: Any) -> Any:
        return fake.from_tensor(leaf.detach().requires_grad_(leaf.requires_grad)) if isinstance(leaf, Tensor) else leaf

    made: tuple[Any, ...] = pytree.tree_map(of, inputs)
    return made


class _Workspace:
    """Guesses what CUDA kernels allocate inside one op.

    That is cuBLAS's workspace, kept from the first product on by each thread that multiplies (autograd's is another
    than the caller's), and the largest temporary of convolutions and attention.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self._threads = threads
        self._cuda = device.type == "cuda"
        self._device = device
        self._products = 0
        self._largest = 0

    @property
    def size_bytes(self) -> int:
        """The guess for the ops seen."""
        return self._threads * self._products + self._largest

    def see(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Look at an op."""
        if not self._cuda:
            return
        op = name.partition("::")[2].partition(".")[0]
        if op in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_addmm_activation"):
            wide = torch.cuda.is_available() and torch.cuda.get_device_capability(self._device)[0] >= 9
            self._products = (32 << 20) if wide else (8 << 20) + (128 << 10)  # torch's defaults
        elif "convolution" in op:
            # cuDNN may turn the layout of an operand around, or build a matrix as large as the two together.
            self._largest = max(self._largest, storage_bytes([list(args[:3]), result], "cuda"))
        elif op.endswith("attention_backward"):
            query = args[1]
            self._largest = max(self._largest, query.numel() * 4)  # the gradient of the queries, summed in float32


# --- the optimizer ---------------------------------------------------------------------------------------------------


def _optimizer_bytes(optimizer: OptimizerLike, step: Step, granularity: int) -> tuple[int, int]:
    """What an optimizer keeps, and what its step allocates beyond that: run on the meta device."""
    if not isinstance(step.target, nn.Module):
        raise ConfigError("an optimizer steps the parameters of a module; the target is a function")
    own = [parameter for parameter in step.target.parameters() if parameter.requires_grad]
    twin, fused = _on_meta(optimizer, own)
    live = LiveSet("meta", granularity=granularity)
    live.hold([[parameter, parameter.grad] for group in twin.param_groups for parameter in group["params"]])
    before = live.live_bytes
    try:
        with live:
            twin.step()
            kept = live.live_bytes
            live.reset_peak()
            twin.step()
    except (RuntimeError, TypeError) as error:  # needs values, or a closure
        raise UnsupportedCase(f"{type(twin).__name__} does not step without values: {error}") from error
    return kept - before, 0 if fused else live.peak_bytes - kept


def _on_meta(optimizer: OptimizerLike, own: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, bool]:
    """The optimizer on parameters without memory, its state empty; and whether its step is one kernel."""
    if isinstance(optimizer, torch.optim.Optimizer):
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        twin = twin_of(optimizer, {id(parameter): _meta(parameter) for parameter in given})
        cuda = any(parameter.device.type == "cuda" for parameter in given)
    else:
        twin = _made(optimizer, [_meta(parameter) for parameter in own])
        cuda = any(parameter.device.type == "cuda" for parameter in own)
    fused = any(group.get("fused") for group in twin.param_groups)
    for group in twin.param_groups:
        if group.get("capturable"):
            group["capturable"] = False
        if group.get("fused"):
            group["fused"], group["foreach"] = False, False
        elif cuda and group.get("foreach", False) is None:
            group["foreach"] = True  # torch's default on CUDA
    return twin, fused


def _made(optimizer: Callable[[list[nn.Parameter]], Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made = optimizer(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"optimizer: wanted one, or what makes one from parameters; that made {type(made).__name__}")
    return made


def twin_of(optimizer: torch.optim.Optimizer, parameters: dict[int, nn.Parameter]) -> torch.optim.Optimizer:
    """A copy of an optimizer without its state, on other parameters, given by the id of those that they stand for."""
    memo: dict[int, Any] = dict(parameters)
    for state in optimizer.state.values():
        memo.update({id(value): value for value in state.values() if isinstance(value, Tensor)})  # not worth a copy
    twin = copy.deepcopy(optimizer, memo)
    twin.state.clear()
    return twin


def _meta(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device="meta"))
    made.grad = torch.empty_like(made)
    return made


# --- the real run ----------------------------------------------------------------------------------------------------


def measure_step(
    step: Step,
    inputs: tuple[Any, ...],
    device: torch.device,
    optimizer: OptimizerLike | None = None,
    *,
    limit_bytes: int | None = None,
    placeholder: tuple[int, int] = (0, 0),
) -> int:
    """The peak of a real run, its parameters and inputs included; leaves nothing behind.

    Args:
        step, inputs, device: what runs where.
        optimizer: steps too; the parameters get their values back from the host.
        limit_bytes: on the CPU, stop where more than this is alive.
        placeholder: bytes to hold all the time, and after backward, in place of an optimizer.

    Raises:
        OutOfMemory, torch.OutOfMemoryError: it does not fit.
    """
    with undisturbed(step, device):
        state = stand_ins(step)
        rehearsal = _Rehearsal(step, state, inputs, optimizer, placeholder)
        try:
            if device.type == "cuda":
                held = storage_bytes([state, inputs], "cuda", CUDA_GRANULARITY)
                with peak_recorded(device) as record:
                    rehearsal.run(device)
                return held + record.growth_bytes
            live = LiveSet(device.type, limit_bytes=limit_bytes)
            live.hold([state, inputs])
            with live:
                rehearsal.run(device)
            return live.peak_bytes
        finally:
            rehearsal.restore()


class _Rehearsal:
    """Two steps on stand-ins, the second with whatever the first created."""

    def __init__(
        self,
        step: Step,
        state: dict[str, Tensor],
        inputs: tuple[Any, ...],
        optimizer: OptimizerLike | None,
        placeholder: tuple[int, int],
    ) -> None:
        self._step = step
        self._trained = [tensor for name, tensor in state.items() if isinstance(tensor, nn.Parameter)]
        self._forward = bound(step, state, inputs)
        self._placeholder = placeholder
        self._optimizer: torch.optim.Optimizer | None = None
        self._values: list[Tensor] = []
        if optimizer is not None:
            self._values = [parameter.detach().to("cpu", copy=True) for parameter in self._trained]
            self._optimizer = self._bind(optimizer)

    def run(self, device: torch.device) -> None:
        """Both steps; one is enough where no optimizer has a state to create."""
        always = torch.empty(self._placeholder[0], dtype=torch.uint8, device=device)
        for _ in range(1 if self._optimizer is None else 2):
            result, gradients = run_step(self._forward, self._step.backward)
            torch.empty(self._placeholder[1], dtype=torch.uint8, device=device)
            if self._optimizer is not None:
                for parameter in self._trained:
                    parameter.grad = gradients.get(id(parameter))
                self._optimizer.step()
                self._optimizer.zero_grad()
            del result, gradients
        del always

    def restore(self) -> None:
        """The parameters' values."""
        for parameter, value in zip(self._trained, self._values, strict=False):
            parameter.data.copy_(value)

    def _bind(self, optimizer: OptimizerLike) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self._trained if parameter.requires_grad]
        if not isinstance(optimizer, torch.optim.Optimizer):
            return _made(optimizer, trained)
        assert isinstance(self._step.target, nn.Module)  # for the type checker: predicted before
        originals = self._step.target.parameters()
        return twin_of(optimizer, {id(original): own for original, own in zip(originals, self._trained, strict=True)})


@dataclass(frozen=True, slots=True)
class Step:
    """What is rehearsed.

    Attributes:
        target: a module, or a function of tensors.
        call: how a module is used: call(module, *inputs); None for module(*inputs).
        backward: whether gradients are computed, of all that requires them; if not, autograd does not listen.
    """

    target: nn.Module | Callable[..., Any]
    call: Callable[..., Any] | None = None
    backward: bool = True

    def __post_init__(self) -> None:
        if not callable(self.target):
            raise ConfigError(f"wanted a module or a function, got {type(self.target).__name__}")
        if self.call is not None and not isinstance(self.target, nn.Module):
            raise ConfigError("call= says how a module is used; the target is a function already")

    def tensors(self) -> dict[str, Tensor]:
        """The module's parameters and buffers by name, each once; nothing for a function."""
        if not isinstance(self.target, nn.Module):
            return {}
        return {**dict(self.target.named_parameters()), **dict(self.target.named_buffers())}

    def trained(self) -> list[str]:
        """The names of the parameters that require a gradient."""
        if not isinstance(self.target, nn.Module):
            return []
        return [name for name, parameter in self.target.named_parameters() if parameter.requires_grad]


class _Call(nn.Module):
    """A module together with the way in which it is used."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, *inputs: Any) -> Any:
        """As `call` does."""
        return self.call(self.module, *inputs)


def bound(step: Step, state: Mapping[str, Tensor], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """The step's forward pass on other tensors in place of the module's own."""
    target = step.target
    if not isinstance(target, nn.Module):
        return lambda: target(*inputs)
    if step.call is None:
        return lambda: torch.func.functional_call(target, dict(state), inputs)
    wrapped = _Call(target, step.call)
    renamed = {f"module.{name}": tensor for name, tensor in state.items()}
    return lambda: torch.func.functional_call(wrapped, renamed, inputs)


def run_step(
    forward: Callable[[], Any], backward: bool, between: Callable[[], object] = lambda: None
) -> tuple[Any, dict[int, Tensor]]:
    """Run forward and, if asked, backward from all of its results that require a gradient.

    A result that is not a scalar is given a gradient of ones, as large as itself. `between` is called after forward.

    Returns:
        the result, and the gradients by the id of the leaf that they belong to.

    Raises:
        UnsupportedCase: gradients are wanted and nothing requires one.
    """
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
    """The tensors whose gradients a backward pass from the roots would accumulate."""
    found = {id(root): root for root in roots if root.grad_fn is None}
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.setdefault(id(variable), variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found.values())


def stand_ins(step: Step) -> dict[str, Tensor]:
    """Parameters that share the module's values and nothing else, and copies of its buffers, by name."""
    if not isinstance(step.target, nn.Module):
        return {}
    state: dict[str, Tensor] = {
        name: nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
        for name, parameter in step.target.named_parameters()
    }
    state.update({name: buffer.detach().clone() for name, buffer in step.target.named_buffers()})
    return state


def device_of(step: Step, inputs: Any) -> torch.device:
    """Where the step runs: the accelerator that its tensors are on, or else the CPU.

    Raises:
        ConfigError: they are on several accelerators.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    devices = {tensor.device for tensor in (*step.tensors().values(), *tensors)}
    if any(device.type == "meta" for device in devices):
        raise ConfigError("tensors on the meta device have no memory; give them on the device that is asked about")
    accelerators = sorted(str(device) for device in devices if device.type != "cpu")
    if len(accelerators) > 1:
        raise ConfigError(f"the step's tensors are on several devices: {', '.join(accelerators)}")
    return torch.device(accelerators[0] if accelerators else "cpu")


def resized(sample: Any, rows: int, device: torch.device | None = None) -> Any:
    """The sample with so many rows: its own, repeated. Tensors without dimensions stay as they are.

    Raises:
        ShapeError: tensors of the sample differ in their first dimension, or it has no rows.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.dim()]
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) != 1 or 0 in sizes:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor with dimensions"
        raise ShapeError(f"the first dimension of each tensor of the sample must be its batch; got {shapes}")
    (given,) = sizes

    def with_rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        moved = leaf.detach().to(device or leaf.device)
        if leaf.dim():
            moved = moved.index_select(0, torch.arange(rows, device=moved.device) % given)
        return moved.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(with_rows, sample)


@contextmanager
def undisturbed(step: Step, device: torch.device) -> Iterator[None]:
    """Put back, at the end, what a step on stand-ins may still change: see the module's docstring.

    Attributes of modules that are lists, dicts or sets get back their content, one level deep.

    Args:
        step: what runs.
        device: where; "meta" where nothing runs on a device.
    """
    modules = list(step.target.modules()) if isinstance(step.target, nn.Module) else []
    attributes = [(module, dict(vars(module)), _contents(module)) for module in modules]
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with contextlib.ExitStack() as stack:
        stack.callback(_empty_caches, device, held)
        stack.callback(_restore_attributes, attributes)
        stack.enter_context(_random_state(device))
        yield


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """The module's containers, each with a copy of what is in it."""
    return [(value, value.copy()) for value in vars(module).values() if isinstance(value, (list, dict, set))]


def _restore_attributes(attributes: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]]) -> None:
    for module, before, contents in attributes:
        vars(module).clear()
        vars(module).update(before)
        for container, content in contents:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)


@contextmanager
def _random_state(device: torch.device) -> Iterator[None]:
    python, numpy_state, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(host)
        if there is not None:
            torch.cuda.set_rng_state(there, device)


def _empty_caches(device: torch.device, held_before: int) -> None:
    """Free what the rehearsal left in torch's caches on the device."""
    if device.type != "cuda":
        return
    if torch.cuda.memory_allocated(device) > held_before:
        gc.collect()  # results that refer to themselves
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None and torch.cuda.memory_allocated(device) > held_before:
            clear()
    torch.cuda.empty_cache()
