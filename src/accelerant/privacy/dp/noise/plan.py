"""How a wide discrete Gaussian is put together from narrow ones, and how far that is from the real one.

    Z = x_0 + k_1 x_1 + ... + k_m x_m        x_i independent, discrete Gaussian of deviation s (the base sampler's)

With a_i^2 = s^2 (1 + k_1^2 + ... + k_i^2), each step adds k_i x_i to a sum of deviation a_(i-1). Completing the square,

    P(sum = n) is proportional to exp(-n^2 / (2 a_i^2)) * f(c_n),
    f(c) = sum over integers y of exp(-(y - c)^2 / (2 w_i^2)),
    1 / w_i^2 = 1 / s^2 + k_i^2 / a_(i-1)^2

and by Poisson summation f lies within a factor 1 -+ e_i of a constant,
e_i = 2 sum over j >= 1 of exp(-2 pi^2 w_i^2 j^2). So every probability of Z is within a factor exp(-+ tau) of the
discrete Gaussian's of deviation a_m, with tau = sum of ln((1 + e_i) / (1 - e_i)). A plan takes the k_i so that no w_i
is below SMOOTH, and s so that a_m is exactly what is asked.

Source: Micciancio and Walter 2017, "Gaussian sampling over the integers: efficient, generic, constant-time", section 3
and Lemma 2.3 there (Micciancio and Regev 2007, smoothing parameter).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from accelerant.errors import ConfigError
from accelerant.privacy.dp.noise.table import CELLS, base_weights, table_distance

__all__ = [
    "BASE_LIMIT", "CUT", "MAX_TERMS", "SMOOTH", "WIDEST", "Plan", "log_ratio", "make_plan", "smoothing_widths",
]  # fmt: skip

CUT = 11
"""Deviations of the base sampler that its table reaches: what lies beyond has probability 4e-28, 2^-91."""

SMOOTH = 1.58
"""The least w_i: e_i is then below 2^-70."""

BASE_LIMIT = (CELLS - 1) / CUT
"""The largest deviation of the base sampler."""

MAX_TERMS = 5

WIDEST = 3.2e7
"""The largest deviation in grid steps. Sums then stay below 2^31."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A discrete Gaussian as a sum.

    Attributes:
        sigma: its deviation in grid steps, exact.
        factors: 1, k_1, ... k_m.
        log_ratio: tau above: a bound of |ln(P(Z = n) / ideal)| with the ideal base sampler.
    """

    sigma: Fraction
    factors: tuple[int, ...]
    log_ratio: float

    @property
    def base_variance(self) -> Fraction:
        """s^2."""
        return self.sigma**2 / sum(k * k for k in self.factors)

    @property
    def terms(self) -> int:
        """Base samples of a draw."""
        return len(self.factors)

    def weights(self) -> tuple[int, ...]:
        """See table.base_weights."""
        return base_weights(self.base_variance)

    def distance(self) -> Decimal:
        """Of a draw from a sum of ideal base samples, in total variation, from above: cut tails, rounded weights."""
        return self.terms * table_distance(self.base_variance)


@functools.lru_cache(maxsize=64)
def make_plan(sigma: Fraction) -> Plan:
    """The plan of fewest terms for a deviation in grid steps.

    Raises:
        ConfigError: sigma is above WIDEST.
    """
    if sigma <= 0 or sigma > WIDEST:
        raise ConfigError(
            f"the noise must be between 0 and {WIDEST:.1e} grid steps wide, got {float(sigma):.6g}: "
            "take a coarser grid (choose_grid gives one)"
        )
    if sigma <= BASE_LIMIT:
        return Plan(sigma, (1,), 0.0)
    for terms in range(2, MAX_TERMS + 1):
        factors = _factors(float(sigma), terms)
        widths = smoothing_widths(sigma, factors)
        if min(widths) >= SMOOTH:
            return Plan(sigma, factors, sum(map(log_ratio, widths)))
    raise ConfigError(f"no sum of {MAX_TERMS} terms is {float(sigma):.6g} grid steps wide")


def _factors(sigma: float, terms: int) -> tuple[int, ...]:
    """Nearly 1, t, t^2, ..., with the base sampler nearly as wide as its table allows."""
    ratio = (sigma / (BASE_LIMIT * 0.998)) ** (1 / (terms - 1))
    factors = [max(1, round(ratio**i)) for i in range(terms)]
    while sigma > BASE_LIMIT * math.sqrt(sum(k * k for k in factors)):
        factors[-1] += 1
    return tuple(factors)


def smoothing_widths(sigma: Fraction, factors: tuple[int, ...]) -> list[float]:
    """w_1 to w_m."""
    base = float(sigma**2 / sum(k * k for k in factors))
    widths, partial = [], base
    for k in factors[1:]:
        widths.append((1 / base + k * k / partial) ** -0.5)
        partial += k * k * base
    return widths


def log_ratio(width: float) -> float:
    """ln((1 + e) / (1 - e)) of a w, from above."""
    first = math.exp(-2 * math.pi**2 * width**2)
    e = 2 * first / (1 - first)
    return 2 * e / (1 - e)
