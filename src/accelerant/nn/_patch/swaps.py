"""Forward methods replaced on single modules, and put back.

A module's own `forward` hides its class's. It is a bound method, so a deep copy of the model is patched too, each
method bound to its own copy. Pickle would bind it to nothing, so that raises and says what to do.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerant.errors import ConfigError
from accelerant.nn._patch.report import PatchReport

__all__ = ["MARK", "NAME", "RECORD", "Forward", "Mark", "Record", "has_hooks", "is_bare", "swapped"]

NAME = "accelerant"
"""What a patched model's config says instead of "sdpa"."""

MARK = "_accelerant"
"""The attribute of a changed module: its Mark."""

RECORD = "_accelerant_patch"
"""The attribute of a patched model: its Record."""

Forward = Callable[..., Any]


class _NotPickled:
    """What cannot be pickled, and says so."""

    def __reduce_ex__(self, protocol: object) -> Any:
        raise ConfigError(
            "a patched model cannot be pickled: save its state_dict() or use save_pretrained(), whose keys and files "
            "are those of the unpatched model; or call accelerant.nn.unpatch(model) first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = deepcopy(self.__dict__, memo)
        return copied


@dataclass(eq=False)
class Mark(_NotPickled):
    """What a changed module's methods need to know.

    Attributes:
        report: the model's, to count fallbacks in.
        attention: whether attention goes to our op.
        padding: what attention does with padded positions, as patch takes it.
        options: of the module's kind, such as its activation.
    """

    report: PatchReport
    attention: bool = False
    padding: str = "exact"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Record(_NotPickled):
    """All that was done to a model.

    Attributes:
        report: what the user got.
        marked: the modules with a Mark.
        forwards: modules and the functions that replace their forward.
        configs: configurations whose attention was switched from "sdpa".
    """

    report: PatchReport
    marked: list[nn.Module] = field(default_factory=list)
    forwards: list[tuple[nn.Module, Forward]] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)

    def mark(self, module: nn.Module, padding: str) -> Mark:
        """The module's mark, made if there is none."""
        mark: Mark | None = module.__dict__.get(MARK)
        if mark is None:
            mark = Mark(self.report, padding=padding)
            module.__dict__[MARK] = mark
            self.marked.append(module)
        return mark

    def swap(self, module: nn.Module, forward: Forward) -> None:
        """Let a module run `forward`, a function that takes it as its first argument."""
        module.__dict__["forward"] = types.MethodType(forward, module)
        self.forwards.append((module, forward))

    def check(self) -> None:
        """Refuse to undo what another library has built upon.

        Raises:
            ConfigError: a forward was replaced or wrapped after patch.
        """
        for module, forward in self.forwards:
            if not swapped(module, forward):
                raise ConfigError(
                    f"the forward of a {type(module).__name__} was replaced after patch; undo that first "
                    "(accelerate: accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
                )

    def undo(self) -> None:
        """Put everything back."""
        for module, _ in self.forwards:
            del module.__dict__["forward"]
        for module in self.marked:
            del module.__dict__[MARK]
        for config in self.configs:
            if config._attn_implementation == NAME:  # else somebody has chosen another since
                config._attn_implementation_internal = "sdpa"


def swapped(module: nn.Module, forward: Forward) -> bool:
    """Whether a module runs `forward`, unwrapped."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is forward


def has_hooks(module: nn.Module, *, beside_captures: bool = False) -> bool:
    """Whether calling a module calls hooks: its own, or torch's for all modules.

    Args:
        module: any.
        beside_captures: whether to overlook those that transformers leaves on layers and attention for good, once
            hidden states were asked for: from attention they take its weights, and ours gives none.
    """
    everywhere = torch.nn.modules.module
    return bool(
        any(not (beside_captures and _is_capture(hook)) for hook in module._forward_hooks.values())
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    )


def _is_capture(hook: Any) -> bool:
    return (
        getattr(hook, "__module__", None) == "transformers.utils.output_capturing"
        and getattr(hook, "__name__", None) == "output_capturing_hook"
    )


def is_bare(module: nn.Module, kind: type[nn.Module], forward: Forward | None = None) -> bool:
    """Whether calling a module does no more than its class says, so that its weights may be used without the call.

    That is not so for a layer with hooks (FSDP, offloading), another class (LoRA, quantised, parametrised) or another
    forward than `forward` (None: its class's).
    """
    if type(module) is not kind or has_hooks(module):
        return False
    return "forward" not in module.__dict__ if forward is None else swapped(module, forward)
