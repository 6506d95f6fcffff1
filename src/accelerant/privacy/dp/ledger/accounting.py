"""Epsilon of what was done: events grouped, charged deltas taken off, then composed by dp-accounting.

Known answers: sigma 1.1, q = 256/60000, 14,062 steps, delta 1e-5 give 2.3817 by PLD and 2.5966 by RDP.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.privacy.dp.ledger.composition import Release, pld_epsilon, rdp_epsilon, rdp_values
from accelerant.privacy.dp.ledger.events import CHARGED_UP_TO, Event, check_delta, check_neighbouring

__all__ = ["Method", "Spent", "check_epsilon", "check_method", "last_within", "remaining", "renyi", "spent"]

Method = Literal["pld", "rdp"]

_MANY: Final = 16  # distinct releases that are composed as they are: each costs 0.3 s once. More are rounded down
_MOST_NOISE: Final = 1e6  # more is accounted as so much: its square overflows
_MOST_STEPS: Final = 10**9
_SLACK: Final = 1e-7  # by how much, relatively, an epsilon under charged deltas may be above the least one


@dataclass(frozen=True, slots=True)
class Spent:
    """What events cost.

    Attributes:
        epsilon: may be infinite; `reason` then says why.
        delta: that was asked for.
        charged: part of delta that the charged deltas take.
        method: "pld" or "rdp".
        reason: empty for a finite epsilon.
    """

    epsilon: float
    delta: float
    charged: float
    method: Method
    reason: str = ""


def spent(
    events: Iterable[Event], delta: float, *, method: str = "pld", neighbouring: str = "add-or-remove-one"
) -> Spent:
    """Epsilon at delta of all events together.

    What the events charge of delta is taken off before the accountant is asked. Above an epsilon of CHARGED_UP_TO the
    charge grows with it; the epsilon is then the least that satisfies its own charge.

    Args:
        events: in any order; composition does not depend on it.
        delta: in (0, 1).
        method: "pld" or "rdp".
        neighbouring: "add-or-remove-one" or "replace-one"; noise multipliers are noise over the sensitivity under
            the same relation.

    Raises:
        ConfigError: delta, method or neighbouring without meaning.
        UnsupportedCase: Poisson sampling under "replace-one".
        MissingDependency: dp-accounting is not installed.
    """
    chosen, delta = check_method(method), check_delta(delta)
    done = [event for event in events if event.count]
    counts, reason = _releases(done, check_neighbouring(neighbouring))
    if reason:
        return Spent(math.inf, delta, 0.0, chosen, reason)
    charge = math.fsum(event.count * event.delta for event in done) * (1 + 1e-12)  # products round
    ask = pld_epsilon if chosen == "pld" else rdp_epsilon
    epsilon, charged = 0.0, charge
    while charged < delta:
        found = ask(counts, delta - charged)
        if not math.isfinite(found):
            return Spent(math.inf, delta, charged, chosen, "the accountant finds no finite epsilon at this delta")
        if charge == 0 or found <= max(epsilon, CHARGED_UP_TO):
            return Spent(max(found, epsilon), delta, charged, chosen)
        epsilon = found * (1 + _SLACK)
        charged = charge * math.exp(min(epsilon, 700.0) - CHARGED_UP_TO)
    reason = f"delta {delta:g} is used up by what the events charge of it, {charged:.3g}: ask at a larger delta"
    return Spent(math.inf, delta, charged, chosen, reason)


def remaining(
    events: Sequence[Event],
    event: Event,
    epsilon: float,
    delta: float,
    *,
    method: str = "pld",
    neighbouring: str = "add-or-remove-one",
) -> int:
    """How many more of event (its count is ignored) fit epsilon at delta, after events. At most 10^9.

    Raises:
        ConfigError, UnsupportedCase, MissingDependency: as for `spent`; or epsilon is not above 0.
    """
    check_epsilon(epsilon)

    def cost(more: int, way: str) -> float:
        return spent((*events, event.times(more)), delta, method=way, neighbouring=neighbouring).epsilon

    start = last_within(lambda more: cost(more, "rdp"), epsilon)
    return start if method == "rdp" else last_within(lambda more: cost(more, method), epsilon, start)


def last_within(cost: Callable[[int], float], limit: float, start: int = 0) -> int:
    """The largest n in [0, 10^9] with cost(n) <= limit, of a cost that does not fall; 0 where none has.

    Args:
        cost: of n; each call may take long: the crossing is interpolated, cost about as a square root.
        limit: of the cost.
        start: a guess.
    """
    low, high, step = -1, _MOST_STEPS + 1, max(1, start // 8)
    cost_low, cost_high = 0.0, math.inf
    probe = start
    turn = 0
    while high - low > 1:
        found = cost(probe)
        if found <= limit:
            low, cost_low = probe, found
        else:
            high, cost_high = probe, found
        if high - low <= 1:
            break
        if high > _MOST_STEPS:
            probe = min(_MOST_STEPS, low + step)
            step *= 4
            continue
        turn += 1
        share = 0.5
        if turn % 3 and low >= 0 and math.isfinite(cost_high) and cost_high > cost_low:
            share = (limit**2 - cost_low**2) / (cost_high**2 - cost_low**2)
        probe = min(high - 1, max(low + 1, low + round(share * (high - low))))
    return max(low, 0)


def renyi(event: Event, orders: Sequence[float]) -> list[float]:
    """Renyi divergence of one release of event at these orders, in nats.

    Raises:
        MissingDependency: dp-accounting is not installed.
    """
    if event.noise_multiplier == 0:
        return [math.inf] * len(orders)
    return [float(value) for value in rdp_values(_release(event), tuple(orders))]


def check_method(method: str) -> Method:
    """method, if it is one that is known.

    Raises:
        ConfigError: it is not.
    """
    if method not in get_args(Method):
        raise ConfigError(f'method must be "pld" or "rdp", got {method!r}')
    return "pld" if method == "pld" else "rdp"


def check_epsilon(epsilon: float, name: str = "epsilon") -> float:
    """epsilon, if it is above 0 and finite.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0 < epsilon < math.inf:
        raise ConfigError(f"{name} must be above 0 and finite, got {epsilon!r}")
    return float(epsilon)


def _releases(events: Sequence[Event], neighbouring: str) -> tuple[dict[Release, int], str]:
    """Counts of equal releases; or why epsilon is infinite."""
    counts: Counter[Release] = Counter()
    for event in events:
        if event.noise_multiplier == 0:
            return {}, f"{event.count} releases ({event.mechanism}) have no noise: noise_multiplier is 0"
        if event.amplified and neighbouring == "replace-one":
            raise UnsupportedCase(
                "Poisson sampling is accounted for units that are added or removed, not replaced: make the ledger with "
                'neighbouring="add-or-remove-one"'
            )
        counts[_release(event)] += event.count
    if len(counts) <= _MANY:
        return dict(counts), ""
    return _fewer(counts), ""


def _fewer(counts: Counter[Release]) -> dict[Release, int]:
    """At most about _MANY releases that cost no less: noise multipliers rounded down, by as little as does it."""
    for share in (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1):  # of an octave
        fewer: Counter[Release] = Counter()
        for release, count in counts.items():
            noise = release.noise_multiplier
            rounded = 2 ** (math.floor(share * math.log2(noise)) / share)
            fewer[release._replace(noise_multiplier=min(rounded, noise))] += count
        if len(fewer) <= _MANY:
            break
    return dict(fewer)


def _release(event: Event) -> Release:
    """What one of the event costs: a shuffled or unknown draw counts as if all records were used.

    A discrete Gaussian on a fine grid is within its charged delta of the continuous one.
    """
    mechanism = "gaussian" if event.mechanism == "discrete_gaussian" else event.mechanism
    return Release(mechanism, min(event.noise_multiplier, _MOST_NOISE), event.sample_rate if event.amplified else 1.0)
