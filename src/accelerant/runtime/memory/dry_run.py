"""A training or inference step run only to see what it takes: on fake tensors, or for real with nothing left behind.

A real rehearsal never touches the model's own tensors: it runs on stand-ins, parameters that share the values but
have gradients of their own, and copies of the buffers. What else a step changes (random state, train or eval mode,
attributes of the modules, cached memory) is put back by `undisturbed`.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase

__all__ = ["Step", "bound", "device_of", "resized", "run_step", "stand_ins", "undisturbed"]


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
