"""Launch parameters: an op's default rule, or the plan that was measured to be faster on this model of device.

    forward_plan = Tuned("layer_norm_fwd", default=_forward_plan, candidates=_candidates)
    plan = forward_plan(x.device, x.dtype, (M, N), lambda plan: launch_forward(x, ..., plan=plan))

Results are kept and shipped as those of races are, under the key "plan <name>". Measuring happens only where the
setting `tune` is "first_use", or inside `tune(...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from accelerant.config import choice_overrides, override
from accelerant.runtime import registry
from accelerant.runtime.dispatch.case import PlanCache, rules, torch_wants_determinism
from accelerant.runtime.dispatch.choice_store import CandidateTimes, Sources, choices, key_of, rounded
from accelerant.runtime.dispatch.plan import Explanation, explain_quietly
from accelerant.runtime.dispatch.race import RACED_DEVICES, fastest, obstacle, race, reason_of

P = TypeVar("P", bound=Hashable)


class Tuned(Generic[P]):
    """The launch plans of a kernel by device, dtype and sizes.

    Args:
        name: of the kernel; unique.
        default: the rule: sizes -> plan.
        candidates: sizes -> the plans to time. Their repr tells them apart, from run to run.
        bucket: the sizes that one measurement stands for; by default each rounded up to a power of two.
    """

    def __init__(
        self, name: str, *, default: Callable[..., P], candidates: Callable[..., Sequence[P]],
        bucket: Callable[..., tuple[Hashable, ...]] | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.default = default
        self.candidates = candidates
        self.plans: PlanCache[P] = PlanCache()
        self._usual = self.plans.usual
        self._bucket = bucket or (lambda *sizes: rounded(sizes))
        self._sources = Sources((default, candidates))

    def __call__(
        self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], run: Callable[[P], object] | None = None
    ) -> P:
        """Return the plan to launch with; a look-up after the first call for the sizes.

        `run` launches with a plan, without side effects; None: nothing is measured in this call.
        """
        plans = self.plans.current() if choice_overrides or torch_wants_determinism() else self._usual
        plan = plans.get((device, dtype, sizes))
        return self._choose(device, dtype, sizes, run, plans) if plan is None else plan

    def forget(self) -> None:
        """Choose anew from the next call on."""
        self.plans.forget()

    def _choose(
        self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], run: Callable[[P], object] | None,
        plans: dict[Any, P],
    ) -> P:  # fmt: skip
        default = self.default(*sizes)
        candidates = {repr(plan): plan for plan in (default, *self.candidates(*sizes))}
        plan, lasting = default, True
        if len(candidates) > 1 and device.type in RACED_DEVICES:
            key = key_of(f"plan {self.name}", dtype, self._bucket(*sizes))
            measured = choices().find(device, key, self._sources)
            current = rules()
            may_measure = current.tune and not current.deterministic and (measured is None or bool(measured.table))
            if may_measure and run is not None:
                runs = [(name, partial(run, candidate)) for name, candidate in candidates.items()]
                outcome = None if obstacle(device, ()) else race(runs, device, lost=registry.provider_of(device).lost)
                lasting = outcome is not None and bool(outcome.ms)  # else another races, or none was launched
                if outcome is not None and outcome.ms:
                    failed = {name: reason_of(error) for name, error in outcome.failed.items()}
                    case = "x".join(map(str, sizes))
                    measured = CandidateTimes(outcome.ms, case, failed=failed, sources=self._sources())
                    choices().keep(device, key, measured)
                    self.forget()
            name = fastest(measured.ms, candidates) if measured is not None else None
            if name is not None:
                plan = candidates[name]
        if lasting:
            self.plans.store(plans, (device, dtype, sizes), plan)
        return plan


def tune(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call fn, and measure what is not measured yet: implementations and launch plans of each op in it.

    Results are kept on disk and used from now on. Takes the time of compiling, and of a few dozen calls of each
    candidate; backward passes that run inside fn are measured too. Returns what `explain` would print, with `.result`.
    """
    with override(race="first_use", tune="first_use"):
        return explain_quietly(fn, *args, **kwargs)
