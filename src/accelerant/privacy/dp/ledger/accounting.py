"""Events, and epsilon of them and back, by dp-accounting: privacy loss distributions, and Renyi divergence.

Both give upper bounds. Privacy loss distributions (PLD) are tight up to their discretization, "connect the dots" of
Doroshenko et al. 2022, arXiv:2207.04380; Renyi divergence (RDP), Mironov 2017, arXiv:1702.07476, and of the sampled
Gaussian Mironov et al. 2019, arXiv:1908.10530, is faster, looser and independent of it: the cross-check.

Events are grouped into equal releases, their charged deltas are subtracted from delta, and the rest is composed.
Known answers: sigma 1.1, q = 256/60000, 14,062 steps, delta 1e-5 give 2.3817 by PLD and 2.5966 by RDP.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from functools import lru_cache, reduce
from typing import Any, Final, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray

from accelerant._renamed import missing_arguments, understood_arguments
from accelerant.errors import BudgetExceeded, ConfigError, FormatError, MissingDependency, UnsupportedCase
from accelerant.runtime.files import clipped, plain

Mechanism = Literal["gaussian", "laplace", "discrete_gaussian", "discrete_laplace", "randomized_response"]
Sampling = Literal["poisson", "none", "unknown", "shuffled"]
Neighbouring = Literal["add-or-remove-one", "replace-one"]

CHARGED_UP_TO: Final = 16.0  # the epsilon for which deltas are stated: t of variation costs (1 + e^epsilon) t
DEFAULT_DELTA: Final = 1e-5  # The delta at which epsilon is stated where nobody chose one

_KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    "note": (str, "text"), "source": (str, "text"), "secure": (bool | None, "True, False or None"),
    "idealised": (bool, "True or False"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrivacyEvent:
    """One release, or `count` equal ones.

    Args:
        mechanism: gaussian and discrete_gaussian bound the L2 norm, laplace and discrete_laplace the L1 norm of what
            one unit contributes. randomized_response represents any mechanism of pure epsilon.
        noise_multiplier: standard deviation (Gaussian) or scale b (Laplace) over the sensitivity; 1 / epsilon for
            randomized_response. 0 is no privacy: epsilon is infinite. For noise of deviation s on integers give
            sqrt(s^2 - 1.58^2) over the sensitivity: discrete_gaussian is accounted as the continuous one, than which
            wide discrete noise of that deviation is at least as private.
        sampling: "poisson": each unit was in the draw independently with probability sample_rate. "none": all
            records are used. "shuffled", "unknown": accounted as "none", since a shuffled loader's batches are no
            Poisson draws (Chua et al. 2024, arXiv:2403.17673) and nothing is known of the other.
        sample_rate: in (0, 1]; 1 for "none". For a shuffled or unknown draw it is recorded, and not used.
        count: 0 or more.
        delta: charged by each release in addition to its epsilon: cut tails, tables, smoothing. Valid while the total
            epsilon is at most CHARGED_UP_TO; above it, more is charged.
        note: for the reader of the ledger.
        source: name of the noise source.
        secure: whether the noise is cryptographic and on a grid; None if unknown.
        idealised: the sum before the noise was in floating point, without a bound on what its rounding reveals.

    Raises:
        ConfigError: an invalid value.
    """

    mechanism: Mechanism
    noise_multiplier: float
    sampling: Sampling = "none"
    sample_rate: float = 1.0
    count: int = 1
    _: KW_ONLY
    delta: float = 0.0
    note: str = ""
    source: str = ""
    secure: bool | None = None
    idealised: bool = False

    def __post_init__(self) -> None:
        _check_choice("mechanism", self.mechanism, Mechanism)
        _check_choice("sampling", self.sampling, Sampling)
        for name in ("noise_multiplier", "sample_rate", "delta"):
            number = _as_float(getattr(self, name))
            if number is None:
                raise ConfigError(f"{name} must be a number, got {clipped(getattr(self, name))}")
            object.__setattr__(self, name, number)
        for name, (kind, words) in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be {words}, got {clipped(getattr(self, name))}")
        if not 0 <= self.noise_multiplier < math.inf:
            raise ConfigError(f"noise_multiplier must be 0 or more, and finite, got {self.noise_multiplier}")
        if not 0 < self.sample_rate <= 1:
            raise ConfigError(f"sample_rate must be in (0, 1], got {self.sample_rate}")
        if self.sampling == "none" and self.sample_rate != 1:
            raise ConfigError(
                f"sample_rate must be 1 where nothing is sampled, got {self.sample_rate}: say how the records were "
                'drawn, sampling="poisson" only where each was drawn independently (PoissonSampler)'
            )
        check_whole("count", self.count, 0)
        if not 0 <= self.delta < 1:
            raise ConfigError(f"delta of an event must be in [0, 1), got {self.delta}")

    @property
    def amplified(self) -> bool:
        """Whether the accounting uses that records were sampled."""
        return self.sampling == "poisson" and self.sample_rate < 1

    def times(self, count: int) -> PrivacyEvent:
        """Return the same event with another count."""
        return replace(self, count=count)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; `from_dict` restores them exactly."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> PrivacyEvent:
        """Restore the event of `to_dict`; FormatError if a field is missing, unknown or invalid."""
        known = {field.name for field in fields(cls)}
        if not isinstance(record, Mapping) or not {"mechanism", "noise_multiplier"} <= set(record) <= known:
            found = ", ".join(sorted(record)) if isinstance(record, Mapping) else repr(record)
            raise FormatError(f"an event has the fields {', '.join(sorted(known))}; got {found[:200]}")
        try:
            return cls(**record)
        except ConfigError as error:
            raise FormatError(f"an invalid event: {error}") from None


def check_delta(delta: float) -> float:
    """Return delta as a float; ConfigError if it is not in (0, 1)."""
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < 1:
        raise ConfigError(f"delta must be in (0, 1), well below one over the number of units, got {clipped(delta)}")
    return float(delta)


def check_whole(name: str, value: object, least: int) -> int:
    """Return a whole number; ConfigError if it is none, below `least`, or of more than 63 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number, {least} or more, got {clipped(value)}")
    if value >= 1 << 63:
        raise ConfigError(f"{name} must be below 2^63, got {clipped(value)}")
    return value


def about(count: int) -> int:
    """Return a number rounded down to two digits, all that is published of the size of private data."""
    unit: int = 10 ** max(0, len(str(count)) - 2)
    return count // unit * unit


def check_number(
    name: str, value: object, *, least: float = 0.0, open_below: bool = True, most: float = math.inf
) -> float:
    """Return a finite number as a float; ConfigError if it is none, or not from least (or above it) to most."""
    number = _as_float(value)
    if number is not None and least <= number <= most and math.isfinite(number) and (number > least or not open_below):
        return number
    below = f"above {least:g}" if open_below else f"at least {least:g}"
    above = "finite" if most == math.inf else f"at most {most:g}"
    raise ConfigError(f"{name} must be a number, {below} and {above}; got {clipped(value)}")


def _as_float(value: object) -> float | None:
    """Return a number as a float, infinity for a whole number that is too large; None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_neighbouring(neighbouring: str) -> Neighbouring:
    """Return the neighbouring relation; ConfigError if it is unknown."""
    _check_choice("neighbouring", neighbouring, Neighbouring)
    return cast(Neighbouring, neighbouring)


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ConfigError(f"{name} must be one of {', '.join(get_args(choices))}, got {clipped(value)}")


# --- from events to epsilon and back ---------------------------------------------------------------------------------
Method = Literal["pld", "rdp"]

_MAX_RELEASES: Final = 16  # distinct ones composed exactly: each costs 0.3 s once. More have their noise rounded down
_MAX_NOISE: Final = 1e6  # larger multipliers are accounted as this one: their squares overflow
_MIN_NOISE: Final = 1e-100  # smaller ones are no noise: the inverses of their squares overflow
_MAX_STEPS: Final = 10**9  # of one kind: the distributions of more take minutes
_SLACK: Final = 1e-7  # relative excess of an epsilon under charged deltas over the least one


class Spent(NamedTuple):
    """Epsilon, the part of delta that the events' charged deltas take, and why epsilon is infinite, if it is."""

    epsilon: float
    charged: float
    reason: str = ""


def spent(
    events: Iterable[PrivacyEvent], delta: float, *, method: str = "pld", neighbouring: str = "add-or-remove-one"
) -> Spent:
    """Return epsilon at delta of all events together.

    The events' own deltas are subtracted first; above an epsilon of CHARGED_UP_TO they grow with it. UnsupportedCase
    for Poisson sampling under "replace-one".
    """
    accountant = pld_epsilon if check_method(method) == "pld" else rdp_epsilon
    delta = check_delta(delta)
    done = [event for event in events if event.count]
    counts, reason = _releases(done, check_neighbouring(neighbouring))
    if reason:
        return Spent(math.inf, 0.0, reason)
    charge = math.fsum(event.count * event.delta for event in done) * (1 + 1e-12)  # products round
    least, charged = 0.0, charge
    while charged < delta:
        epsilon = accountant(counts, delta - charged)
        if not math.isfinite(epsilon):
            return Spent(math.inf, charged, "the accountant finds no finite epsilon at this delta")
        if charge == 0 or epsilon <= max(least, CHARGED_UP_TO):
            return Spent(max(epsilon, least), charged)
        least = epsilon * (1 + _SLACK)
        charged = charge * math.exp(min(least, 700.0) - CHARGED_UP_TO)
    reason = f"delta {delta:g} is used up by what the events charge of it, {charged:.3g}: choose a larger delta"
    return Spent(math.inf, charged, reason)


def remaining(
    events: Sequence[PrivacyEvent], event: PrivacyEvent, *, epsilon: float, delta: float, method: str = "pld",
    neighbouring: str = "add-or-remove-one",
) -> int:  # fmt: skip
    """Return how many more of event (its count is ignored) fit epsilon at delta, after events; at most 10^9."""
    check_number("epsilon", epsilon)

    def cost(more: int, way: str) -> float:
        return spent((*events, event.times(more)), delta, method=way, neighbouring=neighbouring).epsilon

    return most_within(cost, epsilon, method)


def most_within(cost: Callable[[int, str], float], limit: float, method: str) -> int:
    """Return `last_within` of cost(n, method); the search starts from the result for the fast cost(n, "rdp")."""
    start = last_within(lambda n: cost(n, "rdp"), limit)
    return start if method == "rdp" else last_within(lambda n: cost(n, method), limit, start)


def last_within(cost: Callable[[int], float], limit: float, start: int = 0) -> int:
    """Return the largest n in [0, 10^9] with cost(n) <= limit, for a nondecreasing cost; it searches from `start`."""
    low, high, step = -1, _MAX_STEPS + 1, max(1, start // 8)
    cost_low, cost_high = 0.0, math.inf
    probe, turn = start, 0
    while high - low > 1:
        value = cost(probe)
        if value <= limit:
            low, cost_low = probe, value
        else:
            high, cost_high = probe, value
        if high - low <= 1:
            break
        if high > _MAX_STEPS:
            probe = min(_MAX_STEPS, low + step)
            step *= 4
            continue
        turn += 1
        share = 0.5
        if turn % 3 and low >= 0 and math.isfinite(cost_high) and cost_high > cost_low:
            share = (limit**2 - cost_low**2) / (cost_high**2 - cost_low**2)
        probe = min(high - 1, max(low + 1, low + round(share * (high - low))))
    return max(low, 0)


def check_method(method: str) -> Method:
    """Return the accountant's name; ConfigError if it is unknown."""
    if method not in get_args(Method):
        raise ConfigError(f'method must be "pld" or "rdp", got {method!r}')
    return cast(Method, method)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A limit on the privacy loss: epsilon at delta, by the accountant "pld" or "rdp"."""

    epsilon: float
    delta: float
    method: str = "pld"

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon)
        check_delta(self.delta)
        check_method(self.method)

    def implies(self, other: Budget) -> bool:
        """Return whether what stays within this budget stays within another."""
        return self.method == other.method and self.epsilon <= other.epsilon and self.delta <= other.delta


class Allowance:
    """The rest of a budget; counts that are known to fit are kept, so that few events call the accountant."""

    def __init__(self, budget: Budget, neighbouring: str) -> None:
        self.budget = budget
        self._neighbouring = neighbouring
        self._fits: Counter[PrivacyEvent] = Counter()
        self._since: Counter[PrivacyEvent] = Counter()

    def allowed(self, event: PrivacyEvent) -> int:
        """Return how many of event, counted from the ledger's first, are known to fit. `require` raises the number."""
        return self._fits[event.times(1)]

    def require(self, counts: Mapping[PrivacyEvent, int], event: PrivacyEvent) -> None:
        """Check that event fits after counts; BudgetExceeded if it does not."""
        one = event.times(1)
        known = all(count <= self._fits[other] for other, count in counts.items())  # others may have written, too
        if known and counts.get(one, 0) + event.count <= self._fits[one]:
            return
        after = Counter(counts)
        after[one] += event.count
        cost, budget = self._cost(after, self.budget.method), self.budget
        if cost > budget.epsilon:
            before = self._cost(Counter(counts), budget.method)
            raise BudgetExceeded(
                f"the budget is epsilon {budget.epsilon:g} at delta {budget.delta:g}: {plain(before, 6)} is spent, and "
                f"{event.count} more ({event.mechanism}, noise multiplier {event.noise_multiplier:g}) would make it "
                f"{plain(cost, 6, up=True)}. Nothing was done or recorded: stop here, or raise the budget"
            )
        recent = after - self._since if self._since else Counter({one: event.count})

        def extended(times: int) -> Counter[PrivacyEvent]:
            return after + Counter({one: count * times for one, count in recent.items()})

        times = most_within(lambda times, method: self._cost(extended(times), method), budget.epsilon, budget.method)
        self._fits, self._since = extended(times), Counter(counts)

    def _cost(self, counts: Counter[PrivacyEvent], method: str) -> float:
        events = [event.times(count) for event, count in counts.items()]
        return spent(events, self.budget.delta, method=method, neighbouring=self._neighbouring).epsilon


class Release(NamedTuple):
    """The mechanism, noise and Poisson sampling rate (1: none) that determine the cost of one release."""

    mechanism: str
    noise_multiplier: float
    sample_rate: float


def release_of(event: PrivacyEvent) -> Release:
    """Return what determines the cost of one release; shuffled and unknown draws count as if all records were used."""
    mechanism = "gaussian" if event.mechanism == "discrete_gaussian" else event.mechanism
    return Release(mechanism, min(event.noise_multiplier, _MAX_NOISE), event.sample_rate if event.amplified else 1.0)


def _releases(events: Sequence[PrivacyEvent], neighbouring: str) -> tuple[Mapping[Release, int], str]:
    """Return counts of equal releases, or why epsilon is infinite; noise of too many kinds is rounded down."""
    counts: Counter[Release] = Counter()
    for event in events:
        if event.noise_multiplier < _MIN_NOISE:
            given = f"noise_multiplier is {event.noise_multiplier:g}"
            return {}, f"{event.count} releases ({event.mechanism}) have no noise: {given}"
        if event.amplified and neighbouring == "replace-one":
            raise UnsupportedCase(
                "Poisson sampling is accounted for units that are added or removed, not replaced: make the ledger with "
                'neighbouring="add-or-remove-one"'
            )
        counts[release_of(event)] += event.count
    plain = {each: count for each, count in counts.items() if each[::2] == ("gaussian", 1.0)}
    if sum(plain.values()) > 1:  # together one Gaussian release, rounded down
        counts -= Counter(plain)
        noise = math.fsum(count / each.noise_multiplier**2 for each, count in plain.items()) ** -0.5
        counts[Release("gaussian", noise * (1 - 2.0**-40), 1.0)] = 1
    merged, steps_per_octave = counts, 1024
    while len(merged) > _MAX_RELEASES and steps_per_octave:
        merged = Counter()
        for release, count in counts.items():
            noise = release.noise_multiplier
            rounded = 2 ** (math.floor(steps_per_octave * math.log2(noise)) / steps_per_octave)
            merged[release._replace(noise_multiplier=min(rounded, noise))] += count
        steps_per_octave //= 2
    return merged, ""


# --- noise for an epsilon --------------------------------------------------------------------------------------------
_TOLERANCE: Final = 8e-4
_LEAST_NOISE: Final = 1e-3


@understood_arguments(target_delta="delta", q="sample_rate")
@missing_arguments(epochs="steps=, the number of batches of all epochs", accountant='method="pld" or "rdp"')
def calibrate(
    *, target_epsilon: float, delta: float, sample_rate: float = 1.0, steps: int, method: str = "pld",
    mechanism: Mechanism = "gaussian", sampling: Sampling = "poisson", charged: float = 0.0,
    before: Sequence[PrivacyEvent] = (),
) -> float:  # fmt: skip
    """Return the least noise multiplier, to 1e-3 above, with which `steps` releases stay within target_epsilon.

    Args:
        target_epsilon, delta: of all releases together, and of the events `before`.
        sample_rate: of each release; 1: all records.
        method: "pld" or "rdp".
        mechanism, sampling: of `PrivacyEvent`.
        charged: delta that each release charges.
        before: what was done to the data already.

    Raises:
        ConfigError: an invalid value.
        UnsupportedCase: no multiplier up to 10^6 suffices, 10^-3 already does, or `before` exceeds the target.
        MissingDependency: dp-accounting is not installed.
    """
    check_number("target_epsilon", target_epsilon)
    check_delta(delta)
    way = check_method(method)
    check_whole("steps", steps, 1)

    def cost(noise: float) -> float:
        event = PrivacyEvent(mechanism, noise, sampling, sample_rate, count=steps, delta=charged)
        return spent([*before, event], delta, method=way).epsilon

    spent_before = spent(before, delta, method=way)
    if spent_before.epsilon > target_epsilon:
        raise UnsupportedCase(
            f"what was done to the data already has epsilon {spent_before.epsilon:.6g} at delta {delta:g}: no noise "
            f"brings it down to {target_epsilon:g}"
        )

    def guess(noise: float) -> float:
        release = release_of(PrivacyEvent(mechanism, noise, sampling, sample_rate))
        return rdp_epsilon({release: steps}, delta - steps * charged, orders) if steps * charged < delta else math.inf

    # RDP first: it is fast and a close upper bound. Without `before`, which by RDP may already exceed the target.
    orders = _ORDERS if way == "rdp" else _WHOLE_ORDERS
    noise, power = _least_noise(guess, target_epsilon, 1.0, 1.2)
    if way == "pld" or before or charged:
        noise, _ = _least_noise(cost, target_epsilon, noise, power)
    return noise


def _least_noise(cost: Callable[[float], float], target: float, guess: float, power: float) -> tuple[float, float]:
    """Return the least noise with cost within target, by secants, and the power of the noise by which cost falls."""
    low, high = 0.0, math.inf
    noise = guess
    last: tuple[float, float] | None = None
    while high > low * (1 + _TOLERANCE):
        value = cost(noise)
        low, high = (low, noise) if value <= target else (noise, high)
        if low > _MAX_NOISE:
            raise UnsupportedCase(
                f"no noise multiplier up to {_MAX_NOISE:g} reaches this epsilon: raise epsilon or delta, lower the "
                "charged delta, the number of steps or the sampling rate"
            )
        if high < _LEAST_NOISE:
            raise UnsupportedCase(
                f"a noise multiplier of {_LEAST_NOISE:g} reaches this epsilon already: it is no limit"
            )
        if not math.isfinite(value):
            noise = _next_probe(math.inf, low, high)
            continue
        if last is not None and value > 0 and last[1] not in (0, value):
            power = min(10.0, max(0.1, math.log(last[1] / value) / math.log(noise / last[0])))
        last = noise, value
        noise = _next_probe(noise * min(value / target, 1e30) ** (1 / power), low, high)
    return high, power


def _next_probe(aim: float, low: float, high: float) -> float:
    """Return a probe near aim, strictly between low and high, within a factor of 4 of a known bound."""
    low, high = max(low, high / 16 if high < math.inf else 0.0), min(high, 16 * low if low else math.inf)
    side = 1 + _TOLERANCE / 4
    aim = aim / side if aim * aim > low * high else aim * side
    return aim if low * side <= aim <= high / side else math.sqrt(low * high)


# --- composition by dp-accounting ------------------------------------------------------------------------------------
_ORDERS: Final[tuple[float, ...]] = (
    *(1 + tenths / 10 for tenths in range(1, 100)),
    *(float(order) for order in (*range(11, 64), 128, 256, 512, 1024)),
)
_WHOLE_ORDERS: Final = tuple(order for order in _ORDERS if order.is_integer())  # finite sums, not series
_PLD_LIMIT: Final = 1e4  # an epsilon above is meaningless, and its distribution has too many points
_POINTS: Final = 1e6  # of one release's distribution: more take seconds; a fifth where the interval is finer than usual
_USUAL: Final = 1e-4
_BLOCK: Final = 1 << 16
_ROUNDED: Final = 8 * 2.0**-53  # delta that is charged for the roundings of one composition
_SUMMED: Final = 1e-9  # of delta: up to 10^7 points of a distribution are summed one after the other
_REFINED: Final = 10**6  # releases; of more, a finer distribution takes minutes
_INTERVALS: Final = ((0.05, 1e-6), (0.5, 1e-5), (30.0, 1e-4), (1000.0, 1e-3), (math.inf, 1e-2))
# (epsilon below, interval): the error falls with the interval's square and grows with the count, 1e-5 of epsilon here


def pld_epsilon(counts: Mapping[Release, int], delta: float) -> float:
    """Return epsilon of these releases at delta, by privacy loss distributions.

    Above 10^4, for more than 10^9 releases of a kind, and for the least deltas, it is the bound by Renyi divergence.
    """
    given, bound = delta, rdp_epsilon(counts, delta, _WHOLE_ORDERS)
    if len(counts) == 1 and (release := next(iter(counts)))[::2] == ("gaussian", 1.0):
        return min(bound, _gaussian_epsilon(release.noise_multiplier / math.sqrt(counts[release]), delta))
    if not counts or bound > _PLD_LIMIT or max(counts.values()) > _MAX_STEPS:
        return rdp_epsilon(counts, delta)
    delta = delta * (1 - _SUMMED) - _ROUNDED * (sum(counts.values()) + len(counts))
    if delta <= 0:
        return rdp_epsilon(counts, given)
    interval = next(interval for limit, interval in _INTERVALS if bound < limit)
    widest = max(map(_widest_loss, counts))
    while widest / interval > (_POINTS if interval >= _USUAL else _POINTS / 5):
        interval *= 10
    try:
        epsilon = _epsilon_by_interval(interval, counts, delta)
        if epsilon > bound and max(counts.values()) <= _REFINED:  # many small releases: too coarse for the loss of one
            epsilon = _epsilon_by_interval(interval / 10, counts, delta)
    except (ValueError, OverflowError):  # dp-accounting's logarithms, of a rate next to 1 or of hardly any noise
        return rdp_epsilon(counts, given)
    return min(epsilon, bound)  # both are upper bounds


def _gaussian_epsilon(noise: float, delta: float) -> float:
    """Return the epsilon of the Gaussian mechanism, rounded up: Balle and Wang 2018, arXiv:1805.06530, theorem 8."""

    def excess(epsilon: float) -> float:
        """Return how far delta at epsilon is above the given one, with 2^-36 for the roundings of each term."""
        near, far = epsilon * noise - 0.5 / noise, epsilon * noise + 0.5 / noise
        if far < 25:
            mills = math.sqrt(math.pi / 2) * math.exp(far * far / 2) * math.erfc(far / math.sqrt(2))
        else:  # Laplace's continued fraction
            mills = 1 / reduce(lambda below, k: far + k / below, range(40, 0, -1), far)
        above = math.erfc(near / math.sqrt(2)) / 2 * (1 + 2.0**-36)
        return above - math.exp(-near * near / 2) / math.sqrt(2 * math.pi) * mills * (1 - 2.0**-36) - delta

    if excess(0.0) <= 0:
        return 0.0
    low, high = 0.0, 0.5 / noise**2 + math.sqrt(-2 * math.log(delta)) / noise  # Chernoff's bound
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def _epsilon_by_interval(interval: float, counts: Mapping[Release, int], delta: float) -> float:
    distributions = (_composed(release, count, interval) for release, count in sorted(counts.items()))
    return float(reduce(lambda total, other: total.compose(other), distributions).get_epsilon_for_delta(delta))


def rdp_epsilon(counts: Mapping[Release, int], delta: float, orders: tuple[float, ...] = _ORDERS) -> float:
    """Return epsilon of these releases at delta, by Renyi divergence; arguments and errors of `pld_epsilon`."""
    if not counts:
        return 0.0
    total = np.zeros(len(orders))
    for release, count in counts.items():
        total += count * rdp_values(release, orders)
    rdp = _load("rdp.rdp_privacy_accountant")
    return min(float(rdp.compute_epsilon(orders, total, delta)[0]), _summed_epsilon(counts))


def _summed_epsilon(counts: Mapping[Release, int]) -> float:
    """Return the sum of the releases' pure epsilons, rounded up: the least bound for the least deltas."""
    each = []
    for release, count in counts.items():
        pure = _pure_epsilon(release)
        if pure is None:
            pure = 1 / release.noise_multiplier if release.mechanism == "laplace" else math.inf
        each.append(count * pure)
    return sum(each) * (1 + len(each) * 2.0**-50)


@lru_cache(maxsize=256)
def rdp_values(release: Release, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the Renyi divergence of one release with noise at K orders above 1: (K,) float64, nats, read-only."""
    events, rdp = _load("dp_event"), _load("rdp.rdp_privacy_accountant")
    relation = _load("privacy_accountant").NeighboringRelation
    pure = _pure_epsilon(release)
    if pure is not None and pure > 500:  # exp overflows; the divergence is never above the pure epsilon
        values = np.full(len(orders), pure)
    elif pure is not None:
        # Among mechanisms of pure epsilon, randomized response has the largest divergence.
        flip = 2 / (1 + math.exp(pure))
        accountant = rdp.RdpAccountant(orders, relation.REPLACE_ONE)
        values = accountant.compose(events.RandomizedResponseDpEvent(flip, 2)).rdp
    else:
        kind = events.LaplaceDpEvent if release.mechanism == "laplace" else events.GaussianDpEvent
        event = kind(release.noise_multiplier)
        if release.sample_rate < 1:
            event = events.PoissonSampledDpEvent(release.sample_rate, event)
        with _quiet(), np.errstate(divide="ignore", over="ignore"):
            values = rdp.RdpAccountant(orders, relation.ADD_OR_REMOVE_ONE).compose(event).rdp
    result = np.array(values, dtype=np.float64)
    if (release.mechanism, release.sample_rate) != ("gaussian", 1.0):  # whose formula is one quotient
        # Sums of up to `order` terms, whose logarithm is divided by order - 1. Of small rates little else is left, and
        # dp-accounting takes a negative divergence for an epsilon of 0. At most a fifth of it was measured.
        below = np.array(orders) - 1.0
        result = np.maximum(result, 0.0)
        result += 16 * 2.0**-53 * (below + 1) * (1 / below + result)
    result.flags.writeable = False
    return result


def _pure_epsilon(release: Release) -> float | None:
    """Return the pure epsilon of a release that is accounted by that alone, amplified by sampling; else None."""
    if release.mechanism not in ("discrete_laplace", "randomized_response") and not (
        release.mechanism == "laplace" and release.sample_rate < 1
    ):
        return None
    pure = 1 / release.noise_multiplier
    if release.sample_rate == 1:
        return pure
    if pure > 500:
        return pure + math.log(release.sample_rate) + math.exp(-pure) / release.sample_rate
    return math.log1p(release.sample_rate * math.expm1(pure))  # Li et al. 2012, arXiv:1101.2604, theorem 1


def _widest_loss(release: Release) -> float:
    """Return about the width of one release's privacy loss distribution."""
    noise = release.noise_multiplier
    if "gaussian" not in release.mechanism:
        return 2 / noise
    loss, rate = 0.5 / noise**2 + 10 / noise, release.sample_rate  # tails to exp(-50)
    if rate == 1:
        return 2 * loss
    gain = math.log1p(rate * math.expm1(loss)) if loss < 700 else loss + math.log(rate)
    return gain + min(loss, -math.log1p(-rate))


@lru_cache(maxsize=32)
def _composed(release: Release, count: int, interval: float) -> Any:
    """Compose equal releases; more than 2^16 in blocks, since dp-accounting may use an integer of `count` digits."""
    one = _distribution(release, interval)
    if count <= _BLOCK:
        return one if count == 1 else one.self_compose(count)
    blocks, rest = divmod(count, _BLOCK)
    whole = one.self_compose(_BLOCK)
    whole = whole if blocks == 1 else whole.self_compose(blocks)
    return whole.compose(_composed(release, rest, interval)) if rest else whole


@lru_cache(maxsize=64)
def _distribution(release: Release, interval: float) -> Any:
    """Return the privacy loss distribution of one release, for adding and for removing a unit."""
    pld = _load("pld.privacy_loss_distribution")
    exact = release.mechanism == "laplace"  # unlike in Renyi divergence, sampled or not
    pure = None if exact else _pure_epsilon(release)
    if pure is not None and pure > 500:
        return pld.PrivacyLossDistribution.create_from_rounded_probability(
            {math.ceil(pure / interval): 1.0}, 0.0, interval
        )
    if pure is not None:
        parameters = _load("pld.common").DifferentialPrivacyParameters(pure, 0.0)
        return pld.from_privacy_parameters(parameters, value_discretization_interval=interval)
    make = pld.from_laplace_mechanism if exact else pld.from_gaussian_mechanism
    return make(release.noise_multiplier, value_discretization_interval=interval, sampling_prob=release.sample_rate)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence dp-accounting's warnings about orders that it leaves out: the bound by the others holds."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _load(module: str) -> Any:
    try:
        return importlib.import_module(f"dp_accounting.{module}")
    except ImportError:
        raise MissingDependency("dp-accounting", "privacy", "privacy accounting") from None
