"""A budget, and its check before each event that seldom asks the accountant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from accelerant.errors import BudgetExceeded
from accelerant.privacy.dp.ledger.accounting import check_epsilon, check_method, last_within, spent
from accelerant.privacy.dp.ledger.events import Event, check_delta

__all__ = ["Allowance", "Budget"]


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be spent: epsilon at delta, by the accountant "pld" or "rdp".

    Raises:
        ConfigError: a value without meaning.
    """

    epsilon: float
    delta: float
    method: str = "pld"

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        check_method(self.method)


class Allowance:
    """What a budget still allows.

    Counts of events that are known to fit are kept: epsilon does not fall with a count, so all that is below fits as
    well. They are extended, when reached, by what happened since the last time, as many times over as fits.

    Args:
        budget: that must not be passed.
        neighbouring: the relation of the ledger.
    """

    def __init__(self, budget: Budget, neighbouring: str) -> None:
        self.budget = budget
        self._neighbouring = neighbouring
        self._fits: Counter[Event] = Counter()
        self._since: Counter[Event] = Counter()

    def allowed(self, event: Event) -> int:
        """How many of event, from the ledger's first on, are known to fit. `require` raises it."""
        return self._fits[event.times(1)]

    def require(self, counts: Mapping[Event, int], event: Event) -> None:
        """Check that event fits, after counts.

        Raises:
            BudgetExceeded: it does not.
        """
        one = event.times(1)
        known = all(count <= self._fits[other] for other, count in counts.items())  # others may have written, too
        if known and counts.get(one, 0) + event.count <= self._fits[one]:
            return
        after = Counter(counts)
        after[one] += event.count
        found = self._cost(after, self.budget.method)
        if found > self.budget.epsilon:
            budget = self.budget
            before = self._cost(Counter(counts), budget.method)
            raise BudgetExceeded(
                f"the budget is epsilon {budget.epsilon:g} at delta {budget.delta:g}: {before:.6g} is spent, and "
                f"{event.count} more ({event.mechanism}, noise multiplier {event.noise_multiplier:g}) would make it "
                f"{found:.6g}. Nothing was done or recorded: stop here, or raise the budget"
            )
        self._fits = self._extended(after, event)
        self._since = Counter(counts)

    def _extended(self, after: Counter[Event], event: Event) -> Counter[Event]:
        """after, and what happened since the last time as many times over as fits."""
        happened = after - self._since if self._since else Counter({event.times(1): event.count})

        def more(times: int) -> Counter[Event]:
            return after + Counter({one: count * times for one, count in happened.items()})

        limit, times = self.budget.epsilon, 0
        for method in dict.fromkeys(("rdp", self.budget.method)):  # the fast one first, for a guess

            def cost(times: int, method: str = method) -> float:
                return self._cost(more(times), method)

            times = last_within(cost, limit, times)
        return more(times)

    def _cost(self, counts: Counter[Event], method: str) -> float:
        events = [event.times(count) for event, count in counts.items()]
        return spent(events, self.budget.delta, method=method, neighbouring=self._neighbouring).epsilon
