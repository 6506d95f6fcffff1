"""Discrete Gaussian and Laplace noise: draws from random words, and the cost of a release beyond the noise itself.

Discrete Gaussian. A wide one is a sum of narrow ones, whose deviations are chosen so that no w_i is below SMOOTH:
    Z = x_0 + k_1 x_1 + ... + k_m x_m        x_i independent, discrete Gaussian of deviation s (the base sampler)

With a_i^2 = s^2 (1 + k_1^2 + ... + k_i^2), each step adds k_i x_i to a sum of deviation a_(i-1). Completing the square,

    P(sum = n) is proportional to exp(-n^2 / (2 a_i^2)) * f(c_n),
    f(c) = sum over integers y of exp(-(y - c)^2 / (2 w_i^2)),
    1 / w_i^2 = 1 / s^2 + k_i^2 / a_(i-1)^2

and by Poisson summation f lies within a factor 1 -+ e_i of a constant,
e_i = 2 sum over j >= 1 of exp(-2 pi^2 w_i^2 j^2). So every probability of Z is within a factor exp(-+ tau) of the
discrete Gaussian's of deviation a_m, with tau = sum of ln((1 + e_i) / (1 - e_i)).

Base sampler. One word of 32 bits gives a magnitude of 0 to 511: bits 15-7 choose a cell, bits 30-16 and 6-0 are
compared with the cell's threshold, bit 31 is the sign. Below the threshold the magnitude is the cell, else the cell's
alias (Walker 1977). A comparison of all ones is the *trigger*: the magnitude comes from a second table, of the weights
that 22 bits cannot hold, with another 96 bits: 9 choose a cell and 87 are compared. The mixture has weights that are
integers times 2^-118. Entries have the threshold and the alias at the bits of the comparison and of the cell, in the
second table in three words, with 23 bits of the threshold in the first.

Units. A *unit* has 16 blocks of keystream, counters first + 16 unit and up. Block 0 is the pool: 5 samples of the
second table. The words of blocks 1 to 15 are base samples, in order, for 16 // terms draws a block. More than 5
triggers in a unit (probability below 2^-94) give magnitude 0. 32 units are a *group*: draw i of unit 32 g + l is
element (g D + i) 32 + l, where a unit has D draws, so that parallel lanes access adjacent elements.

Discrete Laplace. P(Z = z) is proportional to exp(-|z| / t); Z = G - G', both geometric: P(G = g) proportional to
exp(-g / t). The binary digits of a geometric variable are independent: digit j is 1 with probability
1 / (1 + exp(2^j / t)). Each is one comparison of a word of 32 bits with the digit's probability; if they are equal
(probability 2^-32), 64 bits decide, from a pool that each draw has whether it needs it or not, so time does not depend
on the drawn values. A draw is a unit of `laplace_blocks` blocks of keystream: words 0 to 5 are the pool, three numbers
of 64 bits (the upper word first), then a word for each digit of G, then of G'. A fourth equal word (probability below
2^-107) is decided by zeros.

A release costs more than the noise itself by rounding, cut tails, rounded tables and smoothing:

Sensitivity. A release rounds each of d coordinates to the nearest multiple of the grid g, which moves it by at most
g / 2, and the vector by at most g sqrt(d) / 2. Both of two neighbouring sums at distance C are moved, so they are at
most C + g sqrt(d) apart on the grid, which is the sensitivity that the noise must cover.

Deviation. With integer data the discrete Gaussian's Renyi divergences are at most the continuous one's of the same
deviation (Canonne, Kamath and Steinke 2020, arXiv:2004.00010, Proposition 5). For any other accountant: adding the
continuous Gaussian of variance sigma^2 - r^2 and rounding at random to the integers by a discrete Gaussian of deviation
r gives the discrete Gaussian of deviation sigma, within the smoothing error of r (Peikert 2010, "An efficient and
parallel Gaussian sampler for lattices", Theorem 3.1). So it is at least as private as the continuous one of deviation
sqrt(sigma^2 - r^2): Charge.std, with r = 1.58 steps. That is the deviation in the ledger (`widened`).

Delta. The draws differ from the discrete Gaussian in two ways:

* The base samples are within total variation t of exact ones (GaussianConvolution.distance: tails cut at 11 deviations,
  weights in units of 2^-118), and a unit's pool serves five triggers. The d coordinates of a release are within
  T = d (terms t + u), where u is the probability of a sixth trigger for each draw. A mechanism within T of an
  (epsilon, delta) private one is (epsilon, delta + (1 + e^epsilon) T) private.
* With exact base samples the probabilities are within exp(-+ tau) of the discrete Gaussian's (discrete.py), those of a
  release within exp(-+ d tau). That adds 2 d tau to epsilon. A mechanism that is (epsilon + a, delta) private is also
  (epsilon, delta + 1 - e^-a) private, so it can be charged as 2 d tau of delta. The random rounding above has its own
  tau.

Both add up over releases. (1 + e^epsilon) is taken for a total epsilon of EPSILON_LIMIT.

Source: Micciancio and Walter 2017, section 3, and Lemma 2.3 there (Micciancio and Regev 2007); Walker 1977; Canonne,
Kamath and Steinke 2020, arXiv:2004.00010, section 5 (the discrete Laplace).
"""

from __future__ import annotations

import decimal
import functools
import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from accelerant.errors import ConfigError
from accelerant.privacy.dp.ledger.events import CHARGED_UP_TO
from accelerant.privacy.random.stream import BLOCK_WORDS

CELLS = 512
CELL_SHIFT = 7
CELL_FIELD = (CELLS - 1) << CELL_SHIFT
COMPARED = 0x7FFFFFFF & ~CELL_FIELD  # bits of a word that the first table compares
TRIGGER = COMPARED  # bits of a word that are all ones at the trigger
COMPARED_REST = 0xFFFFFFFF & ~CELL_FIELD  # bits of the first of three words that the second table compares

_BITS = 22
_CAPACITY = 2**_BITS - 1  # values of a cell's comparison in the first table: all but the trigger
_REST_BITS = 87
TOTAL_BITS = 9 + _BITS + _REST_BITS
_DECIMALS = decimal.Context(prec=80, Emin=-(10**6))


def _weights(variance: Fraction) -> tuple[list[Decimal], Decimal]:
    """Return exp(-m^2 / (2 variance)), m = 0 to 511, both signs together, and an upper bound of the sum over all m."""
    with decimal.localcontext(_DECIMALS):
        factor = Decimal(-variance.denominator) / Decimal(2 * variance.numerator)
        weight, step, square = Decimal(1), factor.exp(), (2 * factor).exp()  # of m^2 and of 2 m + 1 by products, which
        both = [weight]  # are 20 times faster than 512 exponentials; they lose 6 of the 80 digits
        for _ in range(1, CELLS):
            weight, step = weight * step, step * square
            both.append(2 * weight)
        # From 512 on at most a geometric series of ratio exp((2 * 512 + 1) factor).
        beyond = 2 * (factor * CELLS * CELLS).exp() / (1 - (factor * (2 * CELLS + 1)).exp())
        return both, sum(both, beyond)


@functools.lru_cache(maxsize=64)
def base_weights(variance: Fraction) -> tuple[int, ...]:
    """Return probabilities of the magnitudes 0 to 511 of a discrete Gaussian, times 2^118; they sum to 2^118.

    That of 0 has the remainder of cut tails and rounding.
    """
    both, total = _weights(variance)
    with decimal.localcontext(_DECIMALS):
        rounded = [int((w / total * 2**TOTAL_BITS).to_integral_value()) for w in both]
    rounded[0] += 2**TOTAL_BITS - sum(rounded)
    return tuple(rounded)


@functools.lru_cache(maxsize=64)
def table_distance(variance: Fraction) -> Decimal:
    """Return a bound on the total variation between base_weights and the discrete Gaussian on all integers."""
    both, total = _weights(variance)
    with decimal.localcontext(_DECIMALS):
        scale = Decimal(2**TOTAL_BITS)
        held = [abs(weight / scale - w / total) for weight, w in zip(base_weights(variance), both, strict=True)]
        return (sum(held, 1 - sum(both, Decimal(0)) / total) / 2) * (1 + Decimal(10) ** -30) + Decimal(10) ** -60


def split_weights(weights: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Split weights, first[m] 2^87 + rest[m], between the tables: sums of 512 (2^22 - 1) and of 2^96."""
    first = [w >> _REST_BITS for w in weights]
    rest = [w & (2**_REST_BITS - 1) for w in weights]
    surplus = sum(first) - CELLS * _CAPACITY  # 1 to 512, since the remainders are below 2^87 each
    largest = max(range(CELLS), key=first.__getitem__)
    first[largest] -= surplus
    rest[largest] += surplus << _REST_BITS
    return first, rest


def _alias(weights: list[int], capacity: int) -> tuple[list[int], list[int]]:
    """Return thresholds below `capacity` and aliases; a full cell has the threshold 0 and itself as alias.

    Cell c maps values below its threshold to c and the others to its alias: exactly proportional to the weights.
    """
    left = list(weights)
    small = [c for c in range(CELLS) if left[c] < capacity]
    large = [c for c in range(CELLS) if left[c] > capacity]
    thresholds, aliases = [0] * CELLS, list(range(CELLS))
    while small:
        cell, giver = small.pop(), large[-1]
        thresholds[cell], aliases[cell] = left[cell], giver
        left[giver] -= capacity - left[cell]
        if left[giver] <= capacity:
            large.pop()
            if left[giver] < capacity:
                small.append(giver)
    return thresholds, aliases


def _spread(upper: int) -> int:
    """Move bits of a comparison to their positions around the cell: 7 below, the others above."""
    return (upper & 0x7F) | (upper >> 7) << 16


@functools.lru_cache(maxsize=64)
def make_tables(weights: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    """Return the base sampler's tables for weights that sum to 2^118: (4, 512), the first, then the second's words."""
    main, remainder = split_weights(weights)
    first, rest = _alias(main, _CAPACITY), _alias(remainder, 2**_REST_BITS)
    rows = [
        [_spread(t) | a << CELL_SHIFT for t, a in zip(*first, strict=True)],
        [_spread(t >> 64) | a << CELL_SHIFT for t, a in zip(*rest, strict=True)],
        [t >> 32 & 0xFFFFFFFF for t in rest[0]],
        [t & 0xFFFFFFFF for t in rest[0]],
    ]
    tables = np.array(rows, np.uint32)
    tables.setflags(write=False)
    return tables


# --- sums of base samples --------------------------------------------------------------------------------------------

CUT = 11  # deviations of the base sampler within its table: the rest has probability 4e-28, 2^-91
SMOOTH = 1.58  # the least w_i: e_i is then below 2^-70
BASE_LIMIT = (CELLS - 1) / CUT  # the largest deviation of the base sampler
MAX_TERMS = 5
WIDEST = 3.2e7  # the largest deviation in grid steps: sums then stay below 2^31
UNIT_BLOCKS = 16
POOL = 5
GROUP = 32


@dataclass(frozen=True, slots=True)
class GaussianConvolution:
    """A discrete Gaussian of deviation sigma, in grid steps, as a sum; log_ratio is tau of the module's docstring."""

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
        """Return the base sampler's weights, see `base_weights`."""
        return base_weights(self.base_variance)

    def distance(self) -> Decimal:
        """Return a bound on a draw's total variation from a sum of ideal base samples: cut tails, rounded weights."""
        return self.terms * table_distance(self.base_variance)


@functools.lru_cache(maxsize=64)
def convolution_of(sigma: Fraction) -> GaussianConvolution:
    """Return the plan of fewest terms for a deviation in grid steps; ConfigError if it is above WIDEST."""
    if sigma <= 0 or sigma > WIDEST:
        raise ConfigError(
            f"the noise must be between 0 and {WIDEST:.1e} grid steps wide, got {float(sigma):.6g}: "
            "take a coarser grid (choose_grid gives one)"
        )
    if sigma <= BASE_LIMIT:
        return GaussianConvolution(sigma, (1,), 0.0)
    for terms in range(2, MAX_TERMS + 1):
        factors = _factors(float(sigma), terms)
        widths = smoothing_widths(sigma, factors)
        if min(widths) >= SMOOTH:
            return GaussianConvolution(sigma, factors, sum(map(log_ratio, widths)))
    raise ConfigError(f"no sum of {MAX_TERMS} terms is {float(sigma):.6g} grid steps wide")


def _factors(sigma: float, terms: int) -> tuple[int, ...]:
    """Return nearly 1, t, t^2, ..., with the base sampler nearly as wide as its table allows."""
    ratio = (sigma / (BASE_LIMIT * 0.998)) ** (1 / (terms - 1))
    factors = [max(1, round(ratio**i)) for i in range(terms)]
    while sigma > BASE_LIMIT * math.sqrt(sum(k * k for k in factors)):
        factors[-1] += 1
    return tuple(factors)


def smoothing_widths(sigma: Fraction, factors: tuple[int, ...]) -> list[float]:
    """Return w_1 to w_m."""
    base = float(sigma**2 / sum(k * k for k in factors))
    widths, partial = [], base
    for k in factors[1:]:
        widths.append((1 / base + k * k / partial) ** -0.5)
        partial += k * k * base
    return widths


def log_ratio(width: float) -> float:
    """Return an upper bound on ln((1 + e_i) / (1 - e_i)) for a width w_i."""
    first = math.exp(-2 * math.pi**2 * width**2)
    e = 2 * first / (1 - first)
    return 2 * e / (1 - e)


def draws_of_unit(terms: int) -> int:
    """Return D, the draws of a unit: 240, 120, 75, 60, 45."""
    return (UNIT_BLOCKS - 1) * (BLOCK_WORDS // terms)


def groups_of(elements: int, terms: int) -> int:
    """Return the number of groups of units for a number of elements."""
    return -(-elements // (GROUP * draws_of_unit(terms)))


# --- discrete Laplace ------------------------------------------------------------------------------------------------

LAPLACE_POOL = 3
WIDEST_LAPLACE = 2.0**29  # the largest t in grid steps
_LAPLACE_BITS = 96
_TAIL = 75  # scales at which G is cut: P(G >= 75 t) is below 2^-108
_LAPLACE_DECIMALS = decimal.Context(prec=60, Emin=-(10**9), Emax=10**9)


def digits_of(steps: Fraction) -> int:
    """Return the number of binary digits of G, the least J with 2^J >= 75 t; ConfigError if t is too wide."""
    if not 0 < steps <= WIDEST_LAPLACE:
        raise ConfigError(
            f"the scale must be between 0 and {WIDEST_LAPLACE:.1e} grid steps, got {float(steps):.6g}: "
            "take a coarser grid"
        )
    return max(1, math.ceil(_TAIL * steps) - 1).bit_length()


def laplace_blocks(digits: int) -> int:
    """Return the number of blocks of keystream for a draw."""
    return -(-(2 * LAPLACE_POOL + 2 * digits) // BLOCK_WORDS)


@functools.lru_cache(maxsize=64)
def thresholds(steps: Fraction) -> npt.NDArray[np.uint32]:
    """Return the probabilities of the J digits times 2^96, (3, J) words, the upper first."""
    scaled = []
    with decimal.localcontext(_LAPLACE_DECIMALS):
        for digit in range(digits_of(steps)):
            q = (-(Decimal(2**digit * steps.denominator) / Decimal(steps.numerator))).exp()
            scaled.append(int((q / (1 + q) * 2**_LAPLACE_BITS).to_integral_value()))
    table = np.array([[t >> shift & 0xFFFFFFFF for t in scaled] for shift in (64, 32, 0)], np.uint32)
    table.setflags(write=False)
    return table


@functools.lru_cache(maxsize=64)
def laplace_distance(steps: Fraction) -> float:
    """Return a bound on the total variation between a draw and the discrete Laplace distribution."""
    digits = digits_of(steps)
    tail = 2 * math.exp(-(2**digits) / float(steps))
    rounding = 2 * digits * 2.0 ** -(_LAPLACE_BITS + 1)
    pool = math.comb(2 * digits, LAPLACE_POOL + 1) * 2.0 ** (-32 * (LAPLACE_POOL + 1))
    return tail + rounding + pool


# --- the charge of a release ------------------------------------------------------------------------------------------


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


def choose_grid(std: float, *, sensitivity: float, dimensions: int) -> float:
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


def charge(std: float, *, grid: float, dimensions: int) -> Charge:
    """Return the charge of a release of `dimensions` values with add_gaussian_; see the module's docstring.

    Raises ConfigError for a number out of range, a grid that is no power of two, and noise too wide for the grid.
    """
    steps = grid_steps(std, grid)
    rounding = grid * math.sqrt(dimensions)
    if not steps:
        return Charge(0.0, rounding, 0.0, 0.0)
    plan = convolution_of(steps)
    apart = dimensions * (float(plan.distance()) + sixth_trigger(plan.terms))
    smoothing = 2 * dimensions * (plan.log_ratio + log_ratio(SMOOTH))
    effective = grid * math.sqrt(max(0.0, float(steps**2) - SMOOTH**2))
    delta = min(1.0, (1 + math.exp(EPSILON_LIMIT)) * apart + smoothing)
    return Charge(delta, rounding, effective, min(1.0, apart + smoothing / 2))


def sixth_trigger(terms: int) -> float:
    """Return a bound on the probability for each draw that its unit has more triggers than its pool serves."""
    words = (UNIT_BLOCKS - 1) * (16 // terms) * terms
    return math.comb(words, POOL + 1) * 2.0 ** (-22 * (POOL + 1)) / draws_of_unit(terms)


def laplace_charge(scale: float, *, grid: float, dimensions: int) -> Charge:
    """Return the charge of add_laplace_, whose sensitivity is L1: rounding adds grid * dimensions to it."""
    steps = grid_steps(scale, grid)
    apart = dimensions * laplace_distance(steps) if steps else 0.0
    return Charge(min(1.0, (1 + math.exp(EPSILON_LIMIT)) * apart), grid * dimensions, scale, apart)


def _check(name: str, value: float, least: float | None = None) -> None:
    if not math.isfinite(value) or value < 0 or (least is None and value == 0):
        raise ConfigError(f"{name} must be {'above' if least is None else 'at least'} 0 and finite, got {value!r}")
