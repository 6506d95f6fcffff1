"""Code that runs for each example by itself: torch's vmap over the examples, which layers with a rule leave.

In a region, a tensor that depends on the examples has the shape that it has in a batch of one example, and the real
one, (B, *shape), is hidden from the code. So an operation cannot mix examples, whatever their dimension is, and a
tensor of the same shape that no example determines (a mask, a vector of positions) is known as shared. What a layer
with a rule gets and returns is unwrapped and wrapped here, so that its autograd function sees the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._functorch.vmap import vmap_increment_nesting
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from accelerant.errors import UnsupportedCase

_CHECKPOINT = (
    "checkpoint(), or other hooks for saved tensors, are called in the forward pass of a module that runs for each "
    "example by itself, and do not know that: call them outside of that module, or in a layer of it"
)


class NotForEachExample(UnsupportedCase):
    """A result that all examples share is used in a way that is possible only in a region.

    Args:
        once: another batch may need none.
    """

    def __init__(self, message: str, *, once: bool = False) -> None:
        super().__init__(message)
        self.once = once


class Region:
    """The scope of code that runs for each example by itself.

    Attributes:
        examples: B.
    """

    def __init__(self, level: int, examples: int) -> None:
        self.level, self.examples = level, examples

    def wrap(self, x: Tensor) -> Tensor:
        """Hide the first dimension of x (B, *shape)."""
        return _functorch._add_batch_dim(x, 0, self.level)

    def unwrap(self, x: Tensor) -> Tensor | None:
        """Return (B, *shape); None if no example determines x."""
        if not _functorch.is_batchedtensor(x) or _functorch.maybe_get_level(x) != self.level:
            return None
        value, dim = _functorch._unwrap_batched(x, self.level)
        return value.movedim(0 if dim is None else dim, 0)

    def created(self, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor (B, *shape) that is made outside of the region, wrapped."""
        with _outside():
            return self.wrap(make())

    def outside(self, call: Callable[..., Any], args: Any, kwargs: Any, *, states: bool = False) -> Any:
        """Call a layer with the whole batch.

        Args:
            states: results and arguments after the first have the examples in dimension 1 (those of recurrent layers).

        Raises:
            UnsupportedCase: an argument has no dimension for the examples where the layer's input has one.
        """
        B, leads = self.examples, list[bool]()
        known: dict[int, Tensor] = {}

        def enter(x: Tensor) -> Tensor:
            if id(x) in known:
                return known[id(x)]
            value, first = self.unwrap(x), not leads
            at = 1 if states and not first else 0
            lead = x.dim() > at and x.shape[at] == 1
            if value is None and (first or states):  # the rule of a layer takes examples first
                value = x.expand(B, *x.shape)
            elif value is not None and not first and lead != leads[0]:
                raise UnsupportedCase(
                    f"an argument {tuple(x.shape)} of {_name(call)} has no dimension for the examples, as it would be "
                    "for one: give it one as the input has"
                )
            if first:
                leads.append(lead)
            if value is not None and lead:
                value = value.squeeze(1 + at)
                value = value.movedim(0, 1) if at else value
            known[id(x)] = x if value is None else value
            return known[id(x)]

        seen: list[Tensor] = []

        def leave(y: Tensor) -> Tensor:
            at = 1 if states and seen else 0
            seen.append(y)
            if y.dim() <= at or y.shape[at] != B:
                raise UnsupportedCase(f"{_name(call)} returned {tuple(y.shape)}, without a dimension of {B} examples")
            y = y.movedim(at, 0)
            return self.wrap(y.unsqueeze(1 + at) if leads[:1] == [True] else y)

        inputs = mapped((args, kwargs), enter)
        with _outside():
            return mapped(call(*inputs[0], **inputs[1]), leave)


_regions: list[Region | None] = []
"""Those that run, the innermost last; None where a layer left one."""


def in_region() -> bool:
    """Return whether a region runs, also where a layer left it."""
    return bool(_regions)


def current() -> Region | None:
    """Return the region that the running code is in."""
    return _regions[-1] if _regions else None


@contextmanager
def _outside() -> Iterator[None]:
    _regions.append(None)
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    torch._C._autograd._saved_tensors_hooks_enable()
    try:
        with temporarily_pop_interpreter_stack():
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_disable(message or _CHECKPOINT, False)
        _regions.pop()


@contextmanager
def region(examples: int) -> Generator[Region]:
    """Run code for each of so many examples by itself."""
    hooks = torch._C._autograd
    message = hooks._saved_tensors_hooks_get_disabled_error_message()
    with vmap_increment_nesting(examples, "different") as level:
        now = Region(level, examples)
        _regions.append(now)
        hooks._saved_tensors_hooks_disable(_CHECKPOINT, False)
        try:
            with _Attention(now):
                yield now
        finally:
            if message is None:
                hooks._saved_tensors_hooks_enable()
            else:
                hooks._saved_tensors_hooks_disable(message, False)
            _regions.pop()


class _Attention(TorchFunctionMode):
    """Calls torch's attention with the whole batch where it can: for each example it would run once each."""

    def __init__(self, now: Region) -> None:
        super().__init__()
        self._region = now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and current() is self._region:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            if all(self._region.unwrap(each) is None or (each.dim() == 4 and each.shape[0] == 1) for each in tensors):
                return self._region.outside(func, args, kwargs)
            with sdpa_kernel(SDPBackend.MATH):  # of operations that vmap has; a bias may take gradients
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def mapped(nested: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested containers and data classes with each tensor changed."""

    def each(item: Any) -> Any:
        if isinstance(item, Tensor):
            return change(item)
        if is_dataclass(item) and not isinstance(item, type):
            return replace(item, **{field.name: mapped(getattr(item, field.name), change) for field in fields(item)})
        return item

    return tree_map(each, nested)


def _name(call: Any) -> str:
    owner = getattr(call, "__self__", None)
    return type(getattr(owner, "module", owner)).__name__ if owner is not None else getattr(call, "__name__", "a layer")
