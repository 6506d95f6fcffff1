"""The noise that an epsilon needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from accelerant.errors import UnsupportedCase
from accelerant.privacy.dp.ledger.accounting import check_epsilon, check_method, spent
from accelerant.privacy.dp.ledger.events import Event, Mechanism, Sampling, check_delta, check_whole

__all__ = ["calibrate"]

_TOLERANCE: Final = 8e-4
_LEAST: Final = 1e-3
_MOST: Final = 1e6


def calibrate(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    method: str = "pld",
    *,
    mechanism: Mechanism = "gaussian",
    sampling: Sampling = "poisson",
    charged: float = 0.0,
    before: Sequence[Event] = (),
) -> float:
    """The least noise multiplier with which `steps` releases stay within target_epsilon at delta.

    Args:
        target_epsilon: above 0.
        delta: in (0, 1).
        sample_rate: of Poisson sampling, in (0, 1]; 1: every record in every step.
        steps: how many, 1 or more.
        method: "pld" or "rdp".
        mechanism: as in `Event`.
        sampling: "poisson", or how else the records are drawn; others are not amplified.
        charged: delta of each step's event.
        before: what was done to the data already; the target is for all together.

    Returns:
        Never below the least one, and at most 1e-3 of it above.

    Raises:
        ConfigError: a value without meaning.
        UnsupportedCase: no noise multiplier up to 10^6 does it, or 10^-3 already does; `before` is past the target.
        MissingDependency: dp-accounting is not installed.
    """
    check_epsilon(target_epsilon, "target_epsilon")
    check_delta(delta)
    way = check_method(method)
    check_whole("steps", steps, 1)

    def cost(noise: float, by: str, past: Sequence[Event] = ()) -> float:
        event = Event(mechanism, noise, sampling, sample_rate, steps, charged)
        return spent([*past, event], delta, method=by).epsilon

    spent_before = spent(before, delta, method=way)
    if spent_before.epsilon > target_epsilon:
        raise UnsupportedCase(
            f"what was done to the data already has epsilon {spent_before.epsilon:.6g} at delta {delta:g}: no noise "
            f"brings it down to {target_epsilon:g}"
        )
    # by RDP first, which is fast and close above; of the past it may say that it is past the target by itself
    found, power = _least(lambda noise: cost(noise, "rdp"), target_epsilon, 1.0, 1.2)
    if way == "pld" or before:
        found, _ = _least(lambda noise: cost(noise, way, before), target_epsilon, found, power)
    return found


def _least(cost: Callable[[float], float], target: float, guess: float, power: float) -> tuple[float, float]:
    """The least noise whose cost is within target, from above, and the power of the noise that the cost falls with.

    Epsilon falls about as a power of the noise: a probe is where the power through the last two would meet the target,
    a little to the side whose bound is further away.
    """
    low, high = 0.0, math.inf
    noise = guess
    last: tuple[float, float] | None = None
    while high > low * (1 + _TOLERANCE):
        found = cost(noise)
        low, high = (low, noise) if found <= target else (noise, high)
        if low > _MOST:
            raise UnsupportedCase(
                f"no noise multiplier up to {_MOST:g} reaches this epsilon: raise epsilon or delta, lower the charged "
                "delta, the number of steps or the sampling rate"
            )
        if high < _LEAST:
            raise UnsupportedCase(f"a noise multiplier of {_LEAST:g} reaches this epsilon already: it is no limit")
        if not math.isfinite(found):
            noise = _next(math.inf, low, high)
            continue
        if last is not None and found > 0 and last[1] not in (0, found):
            power = min(10.0, max(0.1, math.log(last[1] / found) / math.log(noise / last[0])))
        last = noise, found
        noise = _next(noise * (found / target) ** (1 / power), low, high)
    return high, power


def _next(aim: float, low: float, high: float) -> float:
    """A probe near aim, strictly between low and high, within a factor of 4 of what is known."""
    low, high = max(low, high / 16 if high < math.inf else 0.0), min(high, 16 * low if low else math.inf)
    side = 1 + _TOLERANCE / 4
    aim = aim / side if aim * aim > low * high else aim * side
    return aim if low * side <= aim <= high / side else math.sqrt(low * high)
