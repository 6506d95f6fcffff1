"""Copies and files of a module that a clipper is attached to: they are ordinary modules.

What a clipper puts into a module (hooks, a forward of its own) knows the clipper, and through it the training; it is
marked. copy, pickle and torch.save ask a module itself for its state, and the `__getstate__` that is put there leaves
out what is marked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, TypeVar

from torch import nn

__all__ = ["leave_out", "mark"]

T = TypeVar("T")

_MARK: Final = "_accelerant_attached"
_STATE: Final = "__getstate__"
_HOOKS: Final = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}
"""Where torch keeps hooks, and what it keeps beside them by their numbers."""


def mark(call: T) -> T:
    """The same function or object, left out of copies from now on."""
    setattr(call, _MARK, True)
    return call


def leave_out(module: nn.Module) -> Callable[[], None]:
    """Have copies and files of a module leave out what is marked; returns what undoes it."""
    if _STATE in module.__dict__:  # ours already, or the user's own business
        return _nothing

    def state() -> Any:
        return _ordinary(type(module).__getstate__(module))

    module.__dict__[_STATE] = mark(state)

    def undo() -> None:
        if module.__dict__.get(_STATE) is state:
            del module.__dict__[_STATE]

    return undo


def _nothing() -> None:
    return None


def _ordinary(state: Any) -> Any:
    """A module's state without what is marked; a class whose state is no dictionary sees to it itself."""
    if not isinstance(state, dict):
        return state
    left = {name: value for name, value in state.items() if not getattr(value, _MARK, False)}
    for name, besides in _HOOKS.items():
        hooks = left.get(name, {})
        ours = {number for number, hook in hooks.items() if getattr(hook, _MARK, False)}
        if ours:
            for each in (name, *besides):
                left[each] = OrderedDict((n, value) for n, value in left[each].items() if n not in ours)
    return left
