"""Composed events to an epsilon, by the package dp-accounting: privacy loss distributions, and Renyi divergence.

Both give upper bounds. Privacy loss distributions (PLD) are tight up to their discretisation, "connect the dots" of
Doroshenko et al. 2022, arXiv:2207.04380; Renyi divergence (RDP), Mironov 2017, arXiv:1702.07476, and of the sampled
Gaussian Mironov et al. 2019, arXiv:1908.10530, is faster, looser and independent of it: the cross-check.

A mechanism here is what was released once: its name, noise_multiplier and the rate of Poisson sampling (1: none).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accelerant.errors import MissingDependency

__all__ = ["Release", "pld_epsilon", "rdp_epsilon", "rdp_values"]


class Release(NamedTuple):
    """What one release costs, without how often it was done."""

    mechanism: str
    noise_multiplier: float
    sample_rate: float


_ORDERS: Final = (
    *(1 + tenths / 10 for tenths in range(1, 100)),
    *(float(order) for order in (*range(11, 64), 128, 256, 512, 1024)),
)
_PLD_LIMIT: Final = 1e4  # an epsilon above says nothing, and its distribution has too many points
_POINTS: Final = 1e6  # of one release's distribution: more take seconds; a fifth where the interval is finer than usual
_USUAL: Final = 1e-4
_BLOCK: Final = 1 << 16
_REFINED: Final = 10**6  # releases; of more, a finer distribution takes minutes
_INTERVALS: Final = ((0.05, 1e-6), (0.5, 1e-5), (30.0, 1e-4), (1000.0, 1e-3), (math.inf, 1e-2))
# (epsilon below, interval): the error falls with the interval's square and grows with the count, 1e-5 of epsilon here


def pld_epsilon(counts: Mapping[Release, int], delta: float) -> float:
    """Epsilon of these releases at delta, by privacy loss distributions.

    Where they cannot tell (epsilon above 10^4, delta below what floating point resolves) it is the bound by Renyi
    divergence, which holds as well. Releases without noise are the caller's to catch.

    Args:
        counts: of each release how many, 1 or more.
        delta: in (0, 1).

    Raises:
        MissingDependency: dp-accounting is not installed.
    """
    bound = rdp_epsilon(counts, delta)
    if not counts or bound > _PLD_LIMIT:
        return bound
    interval = _interval(counts, bound)
    epsilon = _by_intervals_of(interval, counts, delta)
    if epsilon > bound and max(counts.values()) <= _REFINED:  # many small releases: too coarse for the loss of one
        epsilon = _by_intervals_of(interval / 10, counts, delta)
    return min(epsilon, bound)  # either holds


def _by_intervals_of(interval: float, counts: Mapping[Release, int], delta: float) -> float:
    composed: Any = None
    for release, count in sorted(counts.items()):
        one = _composed(release, count, interval)
        composed = one if composed is None else composed.compose(one)
    return float(composed.get_epsilon_for_delta(delta))


def rdp_epsilon(counts: Mapping[Release, int], delta: float) -> float:
    """Epsilon of these releases at delta, by Renyi divergence; arguments and errors of `pld_epsilon`."""
    if not counts:
        return 0.0
    total = np.zeros(len(_ORDERS))
    for release, count in counts.items():
        total += count * rdp_values(release, _ORDERS)
    rdp = _load("rdp.rdp_privacy_accountant")
    return float(rdp.compute_epsilon(_ORDERS, total, delta)[0])


@lru_cache(maxsize=256)
def rdp_values(release: Release, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Renyi divergence of one release.

    Args:
        release: with noise.
        orders: (K,), each above 1.

    Returns:
        (K,) float64, nats; not to be written to.

    Raises:
        MissingDependency: dp-accounting is not installed.
    """
    events, rdp = _load("dp_event"), _load("rdp.rdp_privacy_accountant")
    relation = _load("privacy_accountant").NeighboringRelation
    pure = _pure_epsilon(release)
    if pure is not None and pure > 500:  # exp overflows; the divergence is never above the pure epsilon
        values = np.full(len(orders), pure)
    elif pure is not None:
        # of any mechanism of pure epsilon, that of randomised response is the largest
        flip = 2 / (1 + math.exp(pure))
        accountant = rdp.RdpAccountant(orders, relation.REPLACE_ONE)
        values = accountant.compose(events.RandomizedResponseDpEvent(flip, 2)).rdp
    else:
        event = (events.LaplaceDpEvent if release.mechanism == "laplace" else events.GaussianDpEvent)(
            release.noise_multiplier
        )
        if release.sample_rate < 1:
            event = events.PoissonSampledDpEvent(release.sample_rate, event)
        with _quiet(), np.errstate(divide="ignore", over="ignore"):
            values = rdp.RdpAccountant(orders, relation.ADD_OR_REMOVE_ONE).compose(event).rdp
    found = np.array(values, dtype=np.float64)
    found.flags.writeable = False
    return found


def _pure_epsilon(release: Release) -> float | None:
    """Epsilon where the release is accounted by it alone, amplified by sampling; None for the others.

    A discrete Laplace costs a little more than the continuous one of its scale, by how much depends on the grid.
    What holds on every grid is its pure epsilon. The sampled Laplace has no bound in Renyi divergence in dp-accounting.
    """
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


def _interval(counts: Mapping[Release, int], epsilon: float) -> float:
    """The discretisation: fine enough for epsilon, and no more points than can be convolved quickly."""
    interval = next(interval for limit, interval in _INTERVALS if epsilon < limit)
    widest = max(_widest_loss(release) for release in counts)
    while widest / interval > (_POINTS if interval >= _USUAL else _POINTS / 5):
        interval *= 10
    return interval


def _widest_loss(release: Release) -> float:
    """About the largest privacy loss that one release's distribution spans, both signs together."""
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
    """So many equal releases. Beyond 2^16 in blocks: dp-accounting has an integer of so many digits for sparse ones."""
    one = _distribution(release, interval)
    if count <= _BLOCK:
        return one if count == 1 else one.self_compose(count)
    blocks, rest = divmod(count, _BLOCK)
    whole = one.self_compose(_BLOCK)
    whole = whole if blocks == 1 else whole.self_compose(blocks)
    return whole.compose(_composed(release, rest, interval)) if rest else whole


@lru_cache(maxsize=64)
def _distribution(release: Release, interval: float) -> Any:
    """The privacy loss distribution of one release, for adding and for removing a unit."""
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
    """Without dp-accounting's warnings of orders that it leaves out: the bound by the others holds."""
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
