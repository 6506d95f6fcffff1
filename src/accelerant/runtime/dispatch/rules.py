"""The rules that a choice stands under: which settings it depends on, and plans kept apart by them.

A plan is made once a case and then looked up, so it must not outlive the settings that it was made under. While no such
setting is overridden and torch asks for no determinism, there is one set of plans and the look-up costs what a dict
costs; otherwise there is one for each set of rules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from accelerant.config import Settings, choice_overrides, settings

__all__ = ["Plans", "Rules", "rules", "torch_wants_determinism"]

_RULES_LIMIT = 64
"""The most sets of rules that plans are kept for."""

# The public function wraps this one in Python, which would show in the time of a call.
torch_wants_determinism: Callable[[], bool] = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)


class Rules(NamedTuple):
    """What a choice depends on besides its case.

    Attributes:
        race, tune: whether what was not measured yet is measured when it is met.
        deterministic: set, or asked for by torch.use_deterministic_algorithms.
        forced: pairs of an op and its implementation.
        cache_dir: where local results are kept.
    """

    race: bool
    tune: bool
    deterministic: bool
    forced: tuple[tuple[str, str], ...]
    cache_dir: Path


_last: tuple[Settings, bool, Rules] | None = None


def rules() -> Rules:
    """The rules in force, here and now."""
    global _last
    now, by_torch, last = settings(), torch_wants_determinism(), _last
    if last is not None and last[0] is now and last[1] is by_torch:
        return last[2]
    found = Rules(
        race=now.race == "first_use",
        tune=now.tune == "first_use",
        deterministic=now.deterministic or by_torch,
        forced=now.implementation,
        cache_dir=now.cache_dir,
    )
    _last = (now, by_torch, found)
    return found


V = TypeVar("V")


class Plans(Generic[V]):
    """Plans by case, apart for each set of rules.

    Attributes:
        usual: those under the settings as loaded. A hot path looks in here itself, unless `choice_overrides` of
            config.py holds something or torch_wants_determinism() says so.
    """

    def __init__(self) -> None:
        self.usual: dict[Any, V] = {}
        self._others: dict[Rules, dict[Any, V]] = {}
        self._made_of_usual: list[dict[Any, Any]] = []

    def now(self) -> dict[Any, V]:
        """Those under the rules in force."""
        if not choice_overrides and not torch_wants_determinism():
            return self.usual
        key = rules()
        found = self._others.get(key)
        if found is None:
            if len(self._others) >= _RULES_LIMIT:
                self._others.clear()
            found = self._others.setdefault(key, {})
        return found

    def also_forgets(self, made: dict[Any, Any]) -> None:
        """From now on clear this, too, when plans are dropped: it was made of the usual ones."""
        if all(made is not each for each in self._made_of_usual):
            self._made_of_usual.append(made)

    def forget(self, case: Hashable | None = None) -> None:
        """Drop the plans of a case, or all; and whatever was made of the usual ones."""
        for made in self._made_of_usual:
            made.clear()
        for plans in (self.usual, *list(self._others.values())):
            if case is None:
                plans.clear()
            else:
                plans.pop(case, None)
