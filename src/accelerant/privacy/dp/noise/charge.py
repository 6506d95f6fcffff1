"""The cost of a release on a grid beyond the noise itself: rounding, cut tails, rounded tables, smoothing.

Sensitivity. A release rounds each of d coordinates to the nearest multiple of the grid g, which moves it by at most
g / 2, and the vector by at most g sqrt(d) / 2. Both of two neighbouring sums at distance C are moved, so they are at
most C + g sqrt(d) apart on the grid, which is the sensitivity that the noise must cover.

Deviation. With integer data the discrete Gaussian's Renyi divergences are at most the continuous one's of the same
deviation (Canonne, Kamath and Steinke 2020, arXiv:2004.00010, Proposition 5). For any other accountant: adding the
continuous Gaussian of variance sigma^2 - r^2 and rounding at random to the integers by a discrete Gaussian of deviation
r gives the discrete Gaussian of deviation sigma, within the smoothing error of r (Peikert 2010, "An efficient and
parallel Gaussian sampler for lattices", Theorem 3.1). So it is at least as private as the continuous one of deviation
sqrt(sigma^2 - r^2): Charge.std, with r = 1.58 steps. That is the deviation in the ledger (noisy_sum.py).

Delta. The draws differ from the discrete Gaussian in two ways:

* The base samples are within total variation t of exact ones (GaussianPlan.distance: tails cut at 11 deviations,
  weights in units of 2^-118), and a unit's pool serves five triggers. The d coordinates of a release are within
  T = d (terms t + u), where u is the probability of a sixth trigger for each draw. A mechanism within T of an
  (epsilon, delta) private one is (epsilon, delta + (1 + e^epsilon) T) private.
* With exact base samples the probabilities are within exp(-+ tau) of the discrete Gaussian's (discrete.py), those of a
  release within exp(-+ d tau). That adds 2 d tau to epsilon. A mechanism that is (epsilon + a, delta) private is also
  (epsilon, delta + 1 - e^-a) private, so it can be charged as 2 d tau of delta. The random rounding above has its own
  tau.

Both add up over releases. (1 + e^epsilon) is taken for a total epsilon of EPSILON_LIMIT.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from accelerant.errors import ConfigError
from accelerant.privacy.dp.ledger.events import CHARGED_UP_TO
from accelerant.privacy.dp.noise.discrete import (
    POOL,
    SMOOTH,
    UNIT_BLOCKS,
    draws_of_unit,
    laplace_distance,
    log_ratio,
    make_plan,
)

EPSILON_LIMIT = CHARGED_UP_TO  # Charge.delta holds for a total epsilon up to this
FINENESS = 64  # rounding to choose_grid's grid adds at most 1 / FINENESS to the sensitivity
LEAST_STEPS = 1024  # of choose_grid's grid in a deviation
_MOST_STEPS = 2.0**24


@dataclass(frozen=True, slots=True)
class Charge:
    """The cost of a release beyond the noise itself.

    Attributes:
        delta: added to delta by each release, for a total epsilon up to EPSILON_LIMIT.
        sensitivity: added to the sensitivity by rounding, in the units of the released values.
        std: deviation of the continuous noise that is at most as private, in the same units; see the module's
            docstring. For Laplace noise the scale itself, whose discrete form is exactly as private.
        distance: total variation from the noise of deviation std. delta is at most (1 + exp(EPSILON_LIMIT)) distance;
            an accountant that knows its epsilon charges (1 + e^epsilon) distance instead.
    """

    delta: float
    sensitivity: float
    std: float
    distance: float


def choose_grid(std: float, sensitivity: float, dimensions: int) -> float:
    """Return the largest power of two whose rounding adds at most 1/64 to an L2 sensitivity; less for narrow noise.

    Args:
        std: of the noise, in the units of the values; 0 for none.
        sensitivity: L2, in the same units.
        dimensions: coordinates of a release, at least 1; for an L1 sensitivity their square.

    Returns:
        g with g sqrt(dimensions) <= sensitivity / 64 and g <= std / 1024, unless that is below std / 2^24: then g is
        coarser, and rounding adds more.

    Raises:
        ConfigError: a number out of range.
    """
    _check("std", std, least=0.0)
    _check("sensitivity", sensitivity)
    if dimensions < 1:
        raise ConfigError(f"dimensions must be at least 1, got {dimensions}")
    most = sensitivity / (FINENESS * math.sqrt(dimensions))
    if std > 0:
        most = max(min(most, std / LEAST_STEPS), 2 * std / _MOST_STEPS)
    return math.ldexp(1.0, math.frexp(most)[1] - 1)


def grid_steps(std: float, grid: float) -> Fraction:
    """Return the exact deviation in grid steps; ConfigError if the grid is no power of two, or a number is invalid."""
    _check("grid", grid)
    _check("std", std, least=0.0)
    if math.frexp(grid)[0] != 0.5 or not 2.0**-120 <= grid <= 2.0**120:
        raise ConfigError(
            f"grid must be a power of two from 2^-120 to 2^120, so that scaling by it is exact, got {grid!r}"
        )
    return Fraction(std) / Fraction(grid)


def charge(std: float, grid: float, dimensions: int) -> Charge:
    """Return the charge of a release of `dimensions` values with add_gaussian_; see the module's docstring.

    Raises ConfigError for a number out of range, a grid that is no power of two, and noise too wide for the grid.
    """
    steps = grid_steps(std, grid)
    rounding = grid * math.sqrt(dimensions)
    if not steps:
        return Charge(0.0, rounding, 0.0, 0.0)
    plan = make_plan(steps)
    apart = dimensions * (float(plan.distance()) + sixth_trigger(plan.terms))
    smoothing = 2 * dimensions * (plan.log_ratio + log_ratio(SMOOTH))
    effective = grid * math.sqrt(max(0.0, float(steps**2) - SMOOTH**2))
    delta = min(1.0, (1 + math.exp(EPSILON_LIMIT)) * apart + smoothing)
    return Charge(delta, rounding, effective, min(1.0, apart + smoothing / 2))


def sixth_trigger(terms: int) -> float:
    """Return a bound on the probability for each draw that its unit has more triggers than its pool serves."""
    words = (UNIT_BLOCKS - 1) * (16 // terms) * terms
    return math.comb(words, POOL + 1) * 2.0 ** (-22 * (POOL + 1)) / draws_of_unit(terms)


def laplace_charge(scale: float, grid: float, dimensions: int) -> Charge:
    """Return the charge of add_laplace_, whose sensitivity is L1: rounding adds grid * dimensions to it."""
    steps = grid_steps(scale, grid)
    apart = dimensions * laplace_distance(steps) if steps else 0.0
    return Charge(min(1.0, (1 + math.exp(EPSILON_LIMIT)) * apart), grid * dimensions, scale, apart)


def _check(name: str, value: float, least: float | None = None) -> None:
    if not math.isfinite(value) or value < 0 or (least is None and value == 0):
        raise ConfigError(f"{name} must be {'above' if least is None else 'at least'} 0 and finite, got {value!r}")
