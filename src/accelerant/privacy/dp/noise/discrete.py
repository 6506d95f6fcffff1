"""Discrete Gaussian and Laplace noise: draws from random words, and the cost of a release beyond the noise itself.

A wide discrete Gaussian is a sum of narrow ones: docs/privacy-guarantee.md has the proof, and what a release costs more
than the noise itself.

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

Source: Micciancio and Walter 2017, section 3, and Lemma 2.3 there (Micciancio and Regev 2007); Walker 1977; Canonne,
Kamath and Steinke 2020, arXiv:2004.00010, section 5 (the discrete Laplace).

On the CPU, as LLVM IR, bit for bit, with the variates of philox.cuh:

    gaussian_steps  out <- Z                                     out i64
    gaussian_add    x <- (round(x / grid) + Z) * grid * scale    x float32
    laplace_steps   out <- Z                                     out i64
    philox_add      x <- (x + width * z) * outward               z from N(0, 1), or of density exp(-|z|) / 2

Layout: an index of a Gaussian launch is one unit in each of lanes() lanes; with each draw they write adjacent elements.
        An index of a Laplace launch is one draw in each lane; one of a Philox launch is a counter in each lane, for
        four adjacent elements each.
Time does not depend on the drawn values. Only without AVX-512 does Gaussian noise read a table of 2 KiB at secret
addresses, from the first-level cache.

Philox 4x32-10 and Box-Muller are for research, not for a privacy claim: ln u = e ln 2 + ln(1 + f), f in
[sqrt(1/2) - 1, sqrt(2) - 1], by f - f^2 / 2 + f^3 P(f); sin(2 pi v) = v S(v^2) of |v| <= 1/4; P of degree 8 and S of
degree 4, fitted for the least largest error: 2e-10 and 4e-9 before rounding.
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
from accelerant.privacy.dp.ledger.accounting import CHARGED_UP_TO
from accelerant.privacy.random import (
    BLOCK_WORDS,
    KeystreamBlocks,
    Load,
    VectorKernel,
    host_vectors,
    lanes,
    update_elements,
)
from accelerant.runtime.compilation.llvm import (
    FunctionBuilder,
    Operand,
    Value,
    Variable,
    constant,
    lane_constants,
    philox,
    program,
    suffix,
    vector,
)

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
    """Return probabilities of the magnitudes 0 to 511 of a discrete Gaussian, times 2^118; 0 has the remainder."""
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
    """Return thresholds and aliases: cell c maps values below its threshold to c, up to `capacity` to its alias."""
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
    """A discrete Gaussian of deviation sigma, in grid steps, as a sum; log_ratio is docs/privacy-guarantee.md's tau."""

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
    """The cost of a release beyond the noise itself (docs/privacy-guarantee.md), in the units of the released values.

    An accountant that knows its epsilon charges (1 + e^epsilon) distance, which delta bounds up to EPSILON_LIMIT.
    """

    delta: float  # added to delta by each release, for a total epsilon up to EPSILON_LIMIT
    sensitivity: float  # added to the sensitivity by rounding
    std: float  # of the continuous noise that is at most as private; of Laplace noise the scale, exactly as private
    distance: float  # total variation from the noise of deviation std


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
    """Return the charge of a release of `dimensions` values with add_gaussian_; see docs/privacy-guarantee.md.

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


# --- kernels of the CPU: Philox ---------------------------------------------------------------------------------------
_LOGARITHM = (
    0.33333298563957214, -0.25000008940696716, 0.20002824068069458, -0.16668526828289032, 0.14207574725151062,
    -0.12389998883008957, 0.11952442675828934, -0.11787271499633789, 0.06747034937143326,
)  # fmt: skip
_SINE = (6.283185005187988, -41.34165573120117, 81.60102081298828, -76.55010986328125, 39.53886795043945)
_LN2 = 0.6931471824645996
_SQRT_HALF_BITS = 0x3F3504F3
_STEP = 2.0**-32


def _float(code: FunctionBuilder, name: str, x: Value, *others: Operand) -> Value:
    operands = [other if isinstance(other, Value) else constant(x.type, float(other)) for other in others]
    return code.intrinsic(x.type, f"llvm.{name}.{suffix(x.type)}", x, *operands)


def _polynomial(code: FunctionBuilder, coefficients: tuple[float, ...], x: Value) -> Value:
    """Append Horner's rule."""
    y = constant(x.type, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        y = _float(code, "fmuladd", y, x, coefficient)
    return y


def _logarithm(code: FunctionBuilder, word: Value) -> Value:
    """Return approximately -ln((word + 1) / 2^32)."""
    u = _float(code, "fmuladd", code.convert("uitofp", word, "float"), _STEP, _STEP)
    bits = code.bitcast(u, word.type)
    exponent = code.op("ashr", code.op("sub", bits, _SQRT_HALF_BITS), 23)
    mantissa = code.op("sub", bits, code.op("shl", exponent, 23))
    f = code.op("fsub", code.bitcast(mantissa, u.type), 1.0)
    square = code.op("fmul", f, f)
    cubic = code.op("fmul", code.op("fmul", square, f), _polynomial(code, _LOGARITHM, f))
    small = code.op("fadd", f, _float(code, "fmuladd", square, -0.5, cubic))
    whole = code.convert("sitofp", exponent, "float")
    return code.fneg(_float(code, "fmuladd", whole, _LN2, small))


def _sine(code: FunctionBuilder, v: Value) -> Value:
    """Return sin(2 pi v) of |v| <= 1/4."""
    return code.op("fmul", v, _polynomial(code, _SINE, code.op("fmul", v, v)))


def _normal_pair(code: FunctionBuilder, first: Value, second: Value) -> list[Value]:
    """Append Box-Muller: the radius from one word, the angle 2 pi (r - 1/2) from the upper 23 bits of the other."""
    radius = _float(code, "sqrt", code.op("fmul", _logarithm(code, first), 2.0))
    upper = code.op("or", code.op("lshr", second, 9), 0x3F800000)
    turn = code.op("fsub", code.bitcast(upper, radius.type), 1.5)
    from_quarter = code.op("fsub", 0.25, _float(code, "fabs", turn))
    cosine = _sine(code, from_quarter)
    folded = code.op("fsub", 0.25, _float(code, "fabs", from_quarter))
    sine = _sine(code, _float(code, "copysign", folded, turn))
    return [code.op("fmul", radius, wave) for wave in (cosine, sine)]


def _laplace(code: FunctionBuilder, word: Value) -> Value:
    """Return a variate whose size has 31 bits of the word, and whose sign is the uppermost."""
    size = _logarithm(code, code.op("shl", word, 1))
    sign = code.op("and", word, 0x80000000)
    return code.bitcast(code.op("xor", code.bitcast(size, word.type), sign), size.type)


def _interleaved(code: FunctionBuilder, z: list[Value], count: int) -> Value:
    """Return four vectors as one, whose elements 4 i to 4 i + 3 are those of lane i."""
    first, second = (code.shuffle(z[i], z[i + 1], range(2 * count)) for i in (0, 2))
    joined = code.shuffle(first, second, range(4 * count))
    order = [(p % 4 // 2) * 2 * count + p // 4 + (p % 2) * count for p in range(4 * count)]
    return code.shuffle(joined, None, order)


@dataclass(frozen=True, slots=True)
class PhiloxKernel(VectorKernel):
    """A Builder of philox_add(begin, end, x, keys, first, stream, n, width, outward); normal or Laplace variates."""

    laplace: bool = False

    @property
    def least_share(self) -> int:
        """The fewest indices that are worth another thread: about 10 us."""
        return 8192 // (4 * lanes())

    def build(self, target: str) -> str:
        """Return LLVM IR."""
        count = (self.vectors or host_vectors()).lanes
        elements = 4 * count
        scalars = ("i64 %first", "i64 %stream", "i64 %n", "float %width", "float %outward")
        code = self.function("philox_add", "ptr noalias %x", "ptr noalias readonly %keys", *scalars)
        stream = code.broadcast("%stream", count)
        width, outward = (code.broadcast(scalar, elements) for scalar in ("%width", "%outward"))

        def key(i: int, word: int) -> Value:
            loaded = code.load("i32", "%keys", 2 * i + word, align=4)
            return code.broadcast(code.convert("zext", loaded, "i64"), count)

        with code.loop("%begin", "%end") as index:
            first = code.op("add", "%first", code.op("mul", index, count))
            counters = code.op("add", code.broadcast(first, count), lane_constants("i64", range(count)))
            counter = [counters, code.op("lshr", counters, 32), stream, constant(counters.type, 0)]
            words = [code.convert("trunc", word, "i32") for word in philox(code, counter, key)]
            if self.laplace:
                z = [_laplace(code, word) for word in words]
            else:
                z = [*_normal_pair(code, *words[:2]), *_normal_pair(code, *words[2:])]
            noise = _interleaved(code, z, count)

            def add(load: Load, noise: Value = noise) -> Value:
                return code.op("fmul", _float(code, "fmuladd", noise, width, load()), outward)

            update_elements(code, "float", elements, "%x", code.op("mul", index, elements), add)
        code.ret()
        return program([code])


# --- discrete noise ---------------------------------------------------------------------------------------------------
_TOGETHER = 2  # lookups that share loads of the table; with 5, registers run out

_MOST = 2.0**46
_INTEGER = 2.0**23
_POOL_WORDS = 2 * LAPLACE_POOL  # words of a Laplace draw's first block that become the pool

_INPUTS = ("ptr noalias readonly %state", "ptr noalias readonly %first")


def _lookups(blocks: KeystreamBlocks, tables: list[int], words: list[Value]) -> list[Value]:
    """Return the entry of each word's cell, in table tables[i] (0: the first, 1 to 3: the remainder's) for word i."""
    code = blocks.code
    shifted = [code.op("lshr", word, 7) for word in words]
    if not blocks.vectors.wide_permutes:
        every = constant(vector("i1", blocks.lanes), True)
        gather = f"llvm.masked.gather.{suffix(words[0].type)}.v{blocks.lanes}p0"
        found = []
        for table, cell in zip(tables, shifted, strict=True):
            index = code.op("add", code.convert("zext", code.op("and", cell, CELLS - 1), "i64"), table * CELLS)
            pointers = vector("ptr", blocks.lanes)
            addresses = code(f"getelementptr inbounds i32, ptr %tables, {index.type} {index}", pointers)
            rest = Value("poison", cell.type)
            found.append(code.intrinsic(cell.type, gather, addresses, constant("i32", 4), every, rest))
        return found
    kind = words[0].type
    bits = [[code.op("and", word, 1 << bit) for bit in (12, 13, 14, 15)] for word in words]
    chosen = [[code.compare("ne", bit, 0) for bit in of_word] for of_word in bits]

    def tree(level: int, first: int) -> list[Value]:
        """Return the entries among 32 << level cells from `first` on."""
        if level == 0:
            found = []
            for table, cell in zip(tables, shifted, strict=True):
                base = (table * CELLS + first) // 16
                low, high = (code.load(kind, "%tables", base + i, align=4) for i in (0, 1))
                found.append(code.intrinsic(kind, "llvm.x86.avx512.vpermi2var.d.512", low, cell, high))
            return found
        below, above = tree(level - 1, first), tree(level - 1, first + (16 << level))
        return [code.select(chosen[i][level - 1], above[i], below[i]) for i in range(len(words))]

    return tree(4, 0)


def _pool(blocks: KeystreamBlocks) -> tuple[Value, Value]:
    """Return five magnitudes of 9 bits, from bit 7 on of two words, computed from a block of keystream."""
    code = blocks.code
    low = high = constant(vector("i32", blocks.lanes), 0)
    for slot in range(POOL):
        words = [blocks.word(3 * slot + i) for i in range(3)]
        entries = _lookups(blocks, [1, 2, 3], [words[0]] * 3)
        compared, threshold = (code.op("and", x, COMPARED_REST) for x in (words[0], entries[0]))
        below = code.compare("ult", words[2], entries[2])
        for x, y in ((words[1], entries[1]), (compared, threshold)):
            less, equal = code.compare("ult", x, y), code.compare("eq", x, y)
            below = code.op("or", less, code.op("and", equal, below))
        magnitude = code.op("and", code.select(below, words[0], entries[0]), CELL_FIELD)
        shift = 9 * slot
        if shift < 32:
            low = code.op("or", low, code.op("shl", magnitude, shift))
        if shift + 16 > 32:
            high = code.op("or", high, code.op("shl" if shift > 32 else "lshr", magnitude, abs(32 - shift)))
    return low, high


def _sample(
    code: FunctionBuilder, word: Value, entry: Value, pool: tuple[Value, Value], trigger: int
) -> tuple[Value, tuple[Value, Value]]:
    """Return a base sample, and the pool after it."""
    low, high = pool
    compared, threshold = code.op("and", word, COMPARED), code.op("and", entry, COMPARED)
    chosen = code.select(code.compare("ult", compared, threshold), word, entry)
    triggered = code.compare("eq", code.op("and", word, trigger), trigger)
    chosen = code.select(triggered, low, chosen)
    next_low = code.intrinsic(word.type, f"llvm.fshr.{suffix(word.type)}", high, low, constant(word.type, 9))
    pool = code.select(triggered, next_low, low), code.select(triggered, code.op("lshr", high, 9), high)
    magnitude = code.op("lshr", code.op("and", chosen, CELL_FIELD), 7)
    sign = code.op("ashr", word, 31)
    return code.op("sub", code.op("xor", magnitude, sign), sign), pool


@dataclass(frozen=True, slots=True)
class GaussianKernel(VectorKernel):
    """A Builder of gaussian_steps or gaussian_add; a word with all bits of `trigger` takes its sample from the pool."""

    terms: int
    adds: bool
    trigger: int = TRIGGER
    least_share = 2  # the fewest indices that are worth another thread: about 10 us

    @property
    def entry(self) -> str:
        """The function's name."""
        return "gaussian_add" if self.adds else "gaussian_steps"

    def build(self, target: str) -> str:
        """Return LLVM IR."""
        scalars = ["i64 %n", *(f"i32 %k{i}" for i in range(1, 5)), "i32 %one"]
        scalars += ["float %inverse", "float %outward"] if self.adds else []
        code = self.function(self.entry, *_INPUTS, "ptr noalias readonly %tables", "ptr noalias %x", *scalars)
        blocks = KeystreamBlocks(code, self.vectors or host_vectors())
        count, words = blocks.lanes, vector("i32", blocks.lanes)
        parts = 32 // count
        with code.loop("%begin", "%end") as index:
            strides = lane_constants("i64", range(0, BLOCK_WORDS * count, BLOCK_WORDS))
            counters = blocks.counters(code.op("mul", index, BLOCK_WORDS * count), strides)
            group = code.op("mul", code.op("udiv", index, parts), 32 * draws_of_unit(self.terms))
            at = code.variable("i64", code.op("add", group, code.op("mul", code.op("urem", index, parts), count)))
            blocks.generate(counters)
            pool = [code.variable(words, word) for word in _pool(blocks)]
            with code.loop(1, 16) as number:
                blocks.generate(code.op("add", counters, code.broadcast(number, count)))
                first = at.get()
                after = self._draws(blocks, first, (pool[0].get(), pool[1].get()))
                for variable, word in zip(pool, after, strict=True):
                    variable.set(word)
                at.set(code.op("add", first, 32 * (BLOCK_WORDS // self.terms)))
        code.ret()
        return blocks.program()

    def _draws(self, blocks: KeystreamBlocks, first: Value, pool: tuple[Value, Value]) -> tuple[Value, Value]:
        """Append the draws of a block of keystream, for elements from `first` on; return the pool after them."""
        code = blocks.code
        factors = [code.broadcast(f"%k{i}", blocks.lanes) for i in range(1, self.terms)]
        used = BLOCK_WORDS // self.terms * self.terms
        words: list[Value] = []
        entries: list[Value] = []
        for draw in range(BLOCK_WORDS // self.terms):
            z: Value | None = None
            for i in range(self.terms):
                position = self.terms * draw + i
                if position == len(words):
                    words += [blocks.word(position + j) for j in range(min(_TOGETHER, used - position))]
                    entries += _lookups(blocks, [0] * (len(words) - position), words[position:])
                sample, pool = _sample(code, words[position], entries[position], pool, self.trigger)
                z = sample if z is None else code.op("add", z, code.op("mul", sample, factors[i - 1]))
            assert z is not None  # for the type checker: a draw has at least one term
            self._store(code, code.op("add", first, 32 * draw), z, blocks.lanes)
        return pool

    def _store(self, code: FunctionBuilder, at: Value, z: Value, count: int) -> None:
        wide = code.convert("sext", z, "i64")

        def add(load: Load) -> Value:
            y = code.convert("sitofp", code.op("add", _steps(code, load(), count), wide), "float")
            return code.op("fmul", y, code.broadcast("%outward", count))

        if self.adds:
            update_elements(code, "float", count, "%x", at, add)
        else:
            update_elements(code, "i64", count, "%x", at, lambda load: wide)


def _steps(code: FunctionBuilder, x: Value, count: int) -> Value:
    """Append sampler.h's to_steps."""
    y = code.op("fmul", x, code.broadcast("%inverse", count))
    negative = code.compare("olt", y, 0.0)
    size = code.select(negative, code.fneg(y), y)
    rounded = code.op("fsub", code.op("fadd", size, _INTEGER), _INTEGER)
    whole = code.select(code.compare("olt", size, _INTEGER), rounded, size)
    whole = code.select(code.compare("olt", whole, _MOST), whole, _MOST)
    whole = code.select(code.compare("oeq", y, y), whole, 0.0)
    signed = code.select(negative, code.fneg(whole), whole)
    return code.convert("fptosi", signed, "i64")


@dataclass(frozen=True, slots=True)
class LaplaceKernel(VectorKernel):
    """A Builder of laplace_steps; arguments as kernel.c has them, and space for whole vectors in `out`."""

    least_share = 16  # the fewest indices that are worth another thread: about 10 us

    def build(self, target: str) -> str:
        """Return LLVM IR."""
        memory = (*_INPUTS, "ptr noalias readonly %thresholds", "ptr noalias %out")
        code = self.function("laplace_steps", *memory, "i64 %n", "i32 %digits", "i32 %blocks", "i32 %one")
        blocks = KeystreamBlocks(code, self.vectors or host_vectors())
        count = blocks.lanes
        numbers = vector("i64", count)
        per_draw, digits = (code.convert("zext", argument, "i64") for argument in ("%blocks", "%digits"))
        last = code.op("add", code.op("shl", digits, 1), _POOL_WORDS)
        strides = code.op("mul", code.broadcast(per_draw, count), lane_constants("i64", range(count)))
        with code.loop("%begin", "%end") as index:
            draws = code.op("mul", index, count)
            counters = blocks.counters(code.op("mul", draws, per_draw), strides)
            word = code.variable("i64", 0)
            pool = [code.variable(numbers, 0) for _ in range(LAPLACE_POOL)]
            total = code.variable(numbers, 0)
            with code.loop(0, per_draw) as block:
                blocks.generate(code.op("add", counters, code.broadcast(block, count)))
                begins = code.compare("eq", block, 0)
                halves = [code.convert("zext", blocks.word(i), "i64") for i in range(_POOL_WORDS)]
                for i, number in enumerate(pool):
                    fresh = code.op("or", code.op("shl", halves[2 * i], 32), halves[2 * i + 1])
                    number.set(code.select(begins, fresh, number.get()))
                begin = code.select(begins, _POOL_WORDS, word.get())
                end = code.smin(code.op("add", code.op("mul", block, BLOCK_WORDS), BLOCK_WORDS), last)
                with code.loop(begin, end) as position:
                    total.set(code.op("add", total.get(), _digit(blocks, position, digits, pool)))
                word.set(end)
            code.store(numbers, total.get(), code.at("i64", "%out", draws), align=8)
        code.ret()
        return blocks.program()


def _digit(blocks: KeystreamBlocks, position: Value, digits: Value, pool: list[Variable]) -> Value:
    """Append the comparison of a word with its digit's threshold, ties by the pool; return the digit's term."""
    code, count = blocks.code, blocks.lanes
    word = blocks.word(code.op("and", position, BLOCK_WORDS - 1))
    number = code.op("sub", position, _POOL_WORDS)
    second = code.compare("uge", number, digits)
    digit = code.select(second, code.op("sub", number, digits), number)
    middle = code.op("add", digits, digit)
    places = (digit, middle, code.op("add", digits, middle))
    upper, *rest = (code.load("i32", "%thresholds", place, align=4) for place in places)
    high, low = (code.convert("zext", part, "i64") for part in rest)
    threshold = code.broadcast(upper, count)
    remainder = code.broadcast(code.op("or", code.op("shl", high, 32), low), count)
    equal = code.compare("eq", word, threshold)
    values = [variable.get() for variable in pool]
    tie = code.op("and", equal, code.compare("ult", values[0], remainder))
    below = code.op("or", code.compare("ult", word, threshold), tie)
    rest_of_pool: list[Operand] = [*values[1:], 0]
    for variable, value, following in zip(pool, values, rest_of_pool, strict=True):
        variable.set(code.select(equal, following, value))
    weight = code.i64("shl", 1, digit)
    signed = code.select(second, code.i64("sub", 0, weight), weight)
    return code.select(below, code.broadcast(signed, count), 0)
