"""The inputs of a choice: a case, its cost, the implementations, and the settings in force."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from accelerant.config import Settings, choice_overrides, settings
from accelerant.runtime.files import clipped


class Case(NamedTuple):
    """Everything that a choice may depend on: device and dtype of the main input, the sizes, and other options."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    options: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return " ".join(_word(part) for part in (self.shape, self.dtype, *self.options) if part != "")


def _word(part: Any) -> str:
    """Return a shape as 8x64, another value as text without torch's name."""
    try:
        if isinstance(part, tuple) and all(type(size) is int for size in part):
            return "x".join(map(str, part)) or "scalar"
        return str(part).removeprefix("torch.")
    except ValueError:  # an integer of more digits than Python prints
        return clipped(part)


case_of: Callable[[tuple[torch.device, torch.dtype, tuple[int, ...], tuple[Any, ...]]], Case]
case_of = partial(tuple.__new__, Case)
"""Build a Case from a tuple of its four fields, in a quarter of the time of the class's own constructor."""


class Cost(NamedTuple):
    """The least work of a call: bytes with each input read once and each output written once; operations."""

    bytes: int
    flops: int


FEW_ELEMENTS = "few elements"
"""An option of cases on a GPU that differentiable implementations alone serve: the call waits for the host anyway."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run an op.

    Attributes:
        name: "triton", "torch", "cublaslt", ...
        run: called with the arguments that follow the Case in a call of the Operation.
        refuses: returns why it cannot serve a case, or None; None if it serves every case.
        own: a kernel of Accelerant, not of a library.
        deterministic: the same inputs give the same bits; False where atomics add.
        mutates: changes its arguments: it is never raced, and is followed by another implementation after a failure
            only if it is our own and had launched no kernel.
        differentiable: consists of torch's differentiable functions, so that torch's autograd may serve the op.
        group: implementations of an op and of its backward op that read each other's saved tensors ("cudnn"); "" for
            those that share the op's own form. See saved_by.
        bind: the arguments -> a function that does the same as `run` for tensors in other memory; see Operation.bound.
    """

    name: str
    run: Callable[..., Any]
    refuses: Callable[[Case], str | None] | None = None
    own: bool = False
    deterministic: bool = True
    mutates: bool = False
    differentiable: bool = False
    group: str = ""
    bind: Callable[..., Callable[..., Any] | None] | None = None


_SAVED_BY = "saved by "


def saved_by(group: str) -> str:
    """Return the option of a backward case that names the group whose tensors were saved; "" for the op's own form."""
    return f"{_SAVED_BY}{group}" if group else ""


def group_of(case: Case) -> str:
    """Return the group whose saved tensors a backward case has; see saved_by."""
    for option in case.options:
        if isinstance(option, str) and option.startswith(_SAVED_BY):
            return option.removeprefix(_SAVED_BY)
    return ""


# The public function is a Python wrapper, which would show in the time of a call.
torch_wants_determinism: Callable[[], bool] = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)


class Rules(NamedTuple):
    """The settings that a choice depends on besides its case.

    `race` is None for "auto": where no shipped table serves the device. `forced` has pairs of an op and its
    implementation.
    """

    race: bool | None
    tune: bool
    deterministic: bool
    debug: bool
    forced: tuple[tuple[str, str], ...]
    cache_dir: Path


_latest: tuple[Settings, bool, Rules] | None = None


def rules() -> Rules:
    """Return the rules in force."""
    global _latest
    current, by_torch, latest = settings(), torch_wants_determinism(), _latest
    if latest is not None and latest[0] is current and latest[1] is by_torch:
        return latest[2]
    result = Rules(
        race=None if current.race == "auto" else current.race == "first_use",
        tune=current.tune == "first_use",
        deterministic=current.deterministic or by_torch,
        debug=current.debug,
        forced=current.implementation,
        cache_dir=current.cache_dir,
    )
    _latest = (current, by_torch, result)
    return result


V = TypeVar("V")

_RULES_LIMIT = 64  # maximum number of rules that plans are kept for
PLANS_LIMIT = 4096
"""Maximum number of plans under one set of rules."""


class PlanCache(Generic[V]):
    """Plans by case, separate for each set of rules, since a plan must not outlive the settings it was made under.

    Hot paths read `usual`, the plans under the settings as loaded, unless `choice_overrides` of config.py holds
    something or torch_wants_determinism() says so.
    """

    def __init__(self) -> None:
        self.usual: dict[Any, V] = {}
        self._others: dict[Rules, dict[Any, V]] = {}
        self._dependents: list[dict[Any, Any]] = []

    def current(self) -> dict[Any, V]:
        """Return the plans under the rules in force."""
        if not choice_overrides and not torch_wants_determinism():
            return self.usual
        key = rules()
        plans = self._others.get(key)
        if plans is None:
            if len(self._others) >= _RULES_LIMIT:
                self._others.clear()
            plans = self._others.setdefault(key, {})
        return plans

    def store(self, plans: dict[Any, V], key: Hashable, plan: V) -> None:
        """Keep a plan in one of the dicts, which is emptied when it is full."""
        if len(plans) >= PLANS_LIMIT:
            plans.clear()
        plans[key] = plan

    def add_dependent(self, derived: dict[Any, Any]) -> None:
        """Clear a dict that was derived from the usual plans whenever plans are dropped."""
        if all(derived is not known for known in self._dependents):
            self._dependents.append(derived)

    def forget(self, key: Hashable | None = None) -> None:
        """Drop the plans of a key, or all plans; and everything derived from the usual ones."""
        for derived in self._dependents:
            derived.clear()
        for plans in (self.usual, *list(self._others.values())):
            if key is None:
                plans.clear()
            else:
                plans.pop(key, None)
