"""Launch parameters: an op's rule of thumb, or what was measured to be faster on this model of device.

    def _candidates(M: int, N: int) -> list[RowPlan]: ...

    forward_plan = Tuned("layer_norm_fwd", default=_forward_plan, candidates=_candidates)

    def launch_forward(x, ..., plan: RowPlan | None = None):
        M, N = ...
        if plan is None:
            plan = forward_plan(x.device, x.dtype, (M, N), lambda plan: launch_forward(x, ..., plan=plan))

Results are kept and shipped as those of races are, under the key "plan <name>", and stand for the same buckets of
sizes. The rule holds where nothing was measured. Measuring happens only where the setting `tune` is "first_use", or
inside `tune(...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch

from accelerant.config import choice_overrides, override
from accelerant.runtime import registry
from accelerant.runtime.dispatch.choices import Entry, choices, key_of, rounded
from accelerant.runtime.dispatch.choose import RACED, reason_of
from accelerant.runtime.dispatch.decisions import Explanation, explain_quietly
from accelerant.runtime.dispatch.race import fastest, obstacle, race
from accelerant.runtime.dispatch.rules import Plans, rules, torch_wants_determinism

__all__ = ["Tuned", "tune"]

_PLANS_LIMIT = 4096

P = TypeVar("P", bound=Hashable)


class Tuned(Generic[P]):
    """The plan of a kernel's launch by device, dtype and sizes.

    Args:
        name: of the kernel; unique.
        default: the rule: the plan for some sizes.
        candidates: the plans to try for some sizes, the default among them or not; their repr tells them apart, so it
            must be short, say everything, and stay the same from run to run.
        bucket: the sizes that one measurement stands for; by default each rounded up to a power of two.
    """

    def __init__(
        self,
        name: str,
        *,
        default: Callable[..., P],
        candidates: Callable[..., Sequence[P]],
        bucket: Callable[..., tuple[Hashable, ...]] | None = None,
    ) -> None:
        self.name = name
        self.default = default
        self.candidates = candidates
        self._bucket = bucket or (lambda *sizes: rounded(sizes))
        self._plans: Plans[P] = Plans()
        self._usual = self._plans.usual

    def __call__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        run: Callable[[P], object] | None = None,
    ) -> P:
        """The plan to launch with; looked up after the first call for the sizes.

        Args:
            device: where.
            dtype: of the main input.
            sizes: what default, candidates and bucket are called with.
            run: launches with a plan, changing nothing; without it nothing is measured here.
        """
        plans = self._plans.now() if choice_overrides or torch_wants_determinism() else self._usual
        plan = plans.get((device, dtype, sizes))
        return self._choose(device, dtype, sizes, run, plans) if plan is None else plan

    def forget(self) -> None:
        """Choose anew from the next call on."""
        self._plans.forget()

    def _choose(
        self,
        device: torch.device,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        run: Callable[[P], object] | None,
        plans: dict[Any, P],
    ) -> P:
        default = self.default(*sizes)
        known = {repr(plan): plan for plan in (default, *self.candidates(*sizes))}
        lasting = True
        found: P | None = None
        if len(known) > 1 and device.type in RACED:
            key = key_of(f"plan {self.name}", dtype, self._bucket(*sizes))
            entry = choices().find(device, key)
            now = rules()
            measured = entry is not None and not entry.table
            if now.tune and not now.deterministic and not measured and run is not None:
                raced = None if obstacle(device, ()) else self._measure(device, key, sizes, known, run)
                lasting = raced is not None
                entry = raced or entry
            name = fastest(entry.ms, known) if entry is not None else None
            found = known[name] if name is not None else None
        plan = default if found is None else found
        if lasting:
            if len(plans) >= _PLANS_LIMIT:
                plans.clear()
            plans[device, dtype, sizes] = plan
        return plan

    def _measure(
        self,
        device: torch.device,
        key: str,
        sizes: tuple[int, ...],
        known: dict[str, P],
        run: Callable[[P], object],
    ) -> Entry | None:
        """Times of all plans; None where another thread is racing or none could be launched."""
        runs = [(name, _bound(run, plan)) for name, plan in known.items()]
        outcome = race(runs, device, lost=registry.provider_of(device).lost)
        if outcome is None or not outcome.ms:
            return None
        failed = {name: reason_of(error) for name, error in outcome.failed.items()}
        entry = Entry(outcome.ms, "x".join(map(str, sizes)), failed=failed)
        choices().keep(device, key, entry)
        self.forget()
        return entry


def _bound(run: Callable[[P], object], plan: P) -> Callable[[], object]:
    return lambda: run(plan)


def tune(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call fn, and measure what is not measured yet: implementations and launch parameters of each op in it.

    What is found is kept on disk and holds from now on. Takes the time of compiling and of a few dozen calls for each
    candidate; backward passes that run inside fn are measured too.

    Returns:
        what `explain` would print, with `.result`.
    """
    with override(race="first_use", tune="first_use"):
        return explain_quietly(fn, *args, **kwargs)
