"""Where a number stopped being finite: a batch is computed again, and every module's outputs and gradients are watched.

It costs a wait for the device at each module, which a training cannot afford; a diagnosis can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accelerant.nn.train.batches import Batch

__all__ = ["find_not_finite"]


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
