"""Plans, grids and charges: the bounds against exact sums of probabilities."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch

from accelerant.errors import ConfigError
from accelerant.privacy.dp.noise import charge, choose_grid, laplace_charge
from accelerant.privacy.dp.noise.discrete import (
    BASE_LIMIT,
    CELL_FIELD,
    CELL_SHIFT,
    CELLS,
    COMPARED,
    EPSILON_LIMIT,
    FINENESS,
    MAX_TERMS,
    SMOOTH,
    TOTAL_BITS,
    WIDEST,
    base_weights,
    convolution_of,
    digits_of,
    grid_steps,
    laplace_distance,
    log_ratio,
    make_tables,
    sixth_trigger,
    smoothing_widths,
    split_weights,
    table_distance,
    thresholds,
)
from refusals import assert_raises


@pytest.mark.parametrize("sigma", [0.1, 3.0, 46.4, 46.5, 93.0, 1300.0, 1400.0, 4e4, 5e4, 2.0**20, 1.2e6, 1e7, WIDEST])
def test_plans_are_exactly_as_wide_as_asked(sigma):
    plan = convolution_of(Fraction(sigma))
    assert plan.base_variance * sum(k * k for k in plan.factors) == Fraction(sigma) ** 2
    assert plan.base_variance <= Fraction(BASE_LIMIT) ** 2
    assert plan.factors[0] == 1
    assert 1 <= plan.terms <= MAX_TERMS
    assert 511 * sum(plan.factors) < 2**31
    widths = smoothing_widths(plan.sigma, plan.factors)
    assert all(w >= SMOOTH for w in widths)
    assert plan.log_ratio == sum(map(log_ratio, widths)) <= 4 * log_ratio(SMOOTH) < 2**-67


@pytest.mark.parametrize(("sigma", "dimensions"), [(3.0, 1), (1300.0, 10_000), (1.2e6, 163_000_000)])
def test_every_part_of_the_charge_is_in_it(sigma, dimensions):
    """Cut tails and tables, pools that run dry, the smoothing of each sum, and of the random rounding."""
    plan, found = convolution_of(Fraction(sigma)), charge(sigma, grid=1.0, dimensions=dimensions)
    apart = dimensions * (float(plan.distance()) + sixth_trigger(plan.terms))
    smoothing = 2 * dimensions * (plan.log_ratio + log_ratio(SMOOTH))
    assert found.delta == pytest.approx(min(1.0, (1 + math.exp(16.0)) * apart + smoothing), rel=1e-9, abs=0)
    assert found.distance == pytest.approx(apart + smoothing / 2, rel=1e-9, abs=0)
    assert found.sensitivity == math.sqrt(dimensions)
    assert found.std == pytest.approx(math.sqrt(sigma**2 - 1.58**2), rel=1e-12)


def test_the_gpt_at_multiplier_one_takes_four_terms():
    """What the time of 2^28 draws is promised for."""
    grid = choose_grid(1.0, sensitivity=1.0, dimensions=163_000_000)
    assert grid == 2.0**-20
    assert convolution_of(grid_steps(1.0, grid)).terms == 4


@pytest.mark.parametrize("sigma", [0.0, -1.0, WIDEST * 1.01])
def test_widths_out_of_range_are_refused(sigma):
    assert_raises(ConfigError, "grid steps wide", lambda: convolution_of(Fraction(sigma)))


def discrete_gaussian(variance, reach):
    """Probabilities of -reach to reach, in mpmath."""
    weights = [mpmath.exp(-mpmath.mpf(n * n) / (2 * variance)) for n in range(-reach, reach + 1)]
    total = mpmath.fsum(weights)
    return [w / total for w in weights]


@pytest.mark.parametrize(
    ("sigma", "factors"), [(4.0, (1, 3)), (13.0, (1, 3, 9)), (9.0, (1, 2, 5)), (30.0, (1, 3, 8, 24))]
)
def test_sums_are_within_the_stated_ratio_of_the_discrete_gaussian(sigma, factors):
    """Base samplers so narrow that the smoothing error is seen: the exact convolution stays within the bound, and the
    bound is not far off."""
    sigma = Fraction(sigma)
    base = sigma**2 / sum(k * k for k in factors)
    with mpmath.workdps(60):
        variance = mpmath.mpf(base.numerator) / base.denominator
        reach = int(10 * math.sqrt(base)) + 1
        one = discrete_gaussian(variance, reach)
        found = {0: mpmath.mpf(1)}
        for k in factors:
            step = {}
            for n, p in found.items():
                for i, q in enumerate(one):
                    at = n + k * (i - reach)
                    step[at] = step.get(at, 0) + p * q
            found = step
        wide = int(5 * sigma)
        ideal = discrete_gaussian(mpmath.mpf(sigma.numerator) ** 2 / sigma.denominator**2, 14 * int(sigma))
        middle = len(ideal) // 2
        worst = max(abs(mpmath.log(found[n] / ideal[middle + n])) for n in range(-wide, wide + 1))
    bound = sum(map(log_ratio, smoothing_widths(sigma, factors)))
    assert 1e-12 < worst <= bound < 20 * worst


def test_the_continuous_gaussian_rounded_at_random_is_the_discrete_one():
    """What makes Charge.std hold for any accountant; r so small that the smoothing error is seen."""
    sigma, r, points = 4.0, 0.6, 200_001
    y = np.linspace(-40, 40, points)
    continuous = np.exp(-(y**2) / (2 * (sigma**2 - r**2)))
    integers = np.arange(-60, 61)
    whole = sum(np.exp(-((n - y) ** 2) / (2 * r**2)) for n in integers)
    shown = np.arange(-12, 13)
    found = np.array([(continuous * np.exp(-((n - y) ** 2) / (2 * r**2)) / whole).sum() for n in shown])
    found /= continuous.sum()
    weights = np.exp(-(integers**2) / (2 * sigma**2))
    worst = np.abs(np.log(found / np.exp(-(shown**2) / (2 * sigma**2)) * weights.sum())).max()
    assert 1e-8 < worst <= log_ratio(r)


@pytest.mark.parametrize("std", [0.0, 0.3, 1.0, 40.0])
@pytest.mark.parametrize("sensitivity", [1e-3, 1.0, 3.7])
@pytest.mark.parametrize("dimensions", [1, 1000, 163_000_000])
def test_grids_are_fine_enough_and_no_finer(std, sensitivity, dimensions):
    std *= sensitivity
    grid = choose_grid(std, sensitivity=sensitivity, dimensions=dimensions)
    assert math.frexp(grid)[0] == 0.5
    wanted = [sensitivity / (FINENESS * math.sqrt(dimensions))] + [std / 1024] * (std > 0)
    if std and std / grid > 2**23:  # as wide as allowed: coarser than wanted
        assert std / grid <= 2**24
    else:
        assert grid <= min(wanted) < 2 * grid
    if std:
        found = charge(std, grid=grid, dimensions=dimensions)
        assert found.sensitivity == grid * math.sqrt(dimensions)
        assert std * (1 - 2e-6) < found.std <= std


def test_the_main_jobs_delta_is_far_below_the_budget():
    """14,000 releases of 1.6e8 values each, beside a delta of 1e-5; cut at 8 deviations it would be 3e-3."""
    found = charge(1.0, grid=2.0**-20, dimensions=163_000_000)
    assert 14_000 * found.delta < 1e-7
    assert found.delta <= (1 + math.exp(EPSILON_LIMIT)) * found.distance


def test_charges_grow_with_what_is_released():
    small, large = (charge(1.0, grid=2.0**-20, dimensions=d) for d in (1000, 1_000_000))
    assert large.delta == pytest.approx(1000 * small.delta, rel=1e-9)
    assert large.sensitivity == pytest.approx(math.sqrt(1000) * small.sensitivity)
    assert charge(0.0, grid=0.5, dimensions=4).delta == 0
    assert charge(0.0, grid=0.5, dimensions=4).sensitivity == 1


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5])
def test_a_sixth_trigger_is_as_improbable_as_charged(terms):
    words, draws = 15 * (16 // terms) * terms, 15 * (16 // terms)
    with mpmath.workdps(50):
        p = mpmath.mpf(2) ** -22
        exact = mpmath.fsum(mpmath.binomial(words, k) * p**k * (1 - p) ** (words - k) for k in range(6, 12)) / draws
        assert exact <= sixth_trigger(terms) <= exact * 1.001
    assert sixth_trigger(terms) < 2**-98


def test_rounding_moves_neighbours_at_most_as_charged():
    torch.manual_seed(5)
    d, grid, bound = 4000, 2.0**-7, 1.0
    worst = 0.0
    for _ in range(50):
        x = torch.randn(d, dtype=torch.float64)
        y = torch.randn(d, dtype=torch.float64)
        y = x + y / y.norm() * bound
        worst = max(worst, float(((x / grid).round() - (y / grid).round()).norm() * grid))
    assert bound < worst <= bound + charge(0.0, grid=grid, dimensions=d).sensitivity
    half = torch.full((d,), 0.5 + 1e-9) * grid, torch.full((d,), 0.5 - 1e-9, dtype=torch.float64) * grid
    moved = ((half[0].double() / grid).round() - (half[1] / grid).round()).norm() * grid
    assert float(moved) <= charge(0.0, grid=grid, dimensions=d).sensitivity * (1 + 1e-12)


def test_laplace_charges_are_l1s():
    found = laplace_charge(1.0, grid=2.0**-10, dimensions=100)
    assert found.sensitivity == 100 * 2.0**-10
    assert found.std == 1.0
    assert 0 < found.delta < 1e-18


@pytest.mark.parametrize(("std", "grid", "message"), [
    (1.0, 0.3, "power of two"), (1.0, 0.0, "grid must be above 0"), (-1.0, 0.5, "std must be at least 0"),
    (math.nan, 0.5, "std must be at least 0"), (1.0, math.inf, "grid must be above 0"),
    (1.0, 2.0**-130, "2\\^-120 to 2\\^120"),
])  # fmt: skip
def test_numbers_without_meaning_are_refused(std, grid, message):
    assert_raises(ConfigError, message, charge, std, grid=grid, dimensions=10)
    assert_raises(ConfigError, "dimensions must be at least 1", choose_grid, 1.0, sensitivity=1.0, dimensions=0)


# --- the base sampler's tables, every entry with integers, and distances against mpmath -------------------------------
VARIANCES = [Fraction(1, 100), Fraction(1), Fraction(137, 3), Fraction(2100), Fraction(465, 10) ** 2]
DIGITS = 90


def ideal(variance):
    """Probabilities of the magnitudes 0 to 511, and what lies beyond, in mpmath."""
    with mpmath.workdps(DIGITS):
        v = mpmath.mpf(variance.numerator) / variance.denominator
        weights = [mpmath.exp(-mpmath.mpf(m * m) / (2 * v)) * (2 if m else 1) for m in range(1500)]
        total = mpmath.fsum(weights)
        return [w / total for w in weights[:CELLS]], mpmath.fsum(weights[CELLS:]) / total


@pytest.mark.parametrize("variance", VARIANCES)
def test_weights_are_the_probabilities_to_118_bits(variance):
    weights = base_weights(variance)
    probabilities, beyond = ideal(variance)
    assert sum(weights) == 2**TOTAL_BITS
    with mpmath.workdps(DIGITS):
        off = [abs(w - p * 2**TOTAL_BITS) for w, p in zip(weights, probabilities, strict=True)]
        cut = 2**TOTAL_BITS * beyond * 1.01  # the tails' sum is taken from above, within 1 %
        assert max(off[1:]) < 0.5 + 0.02 * cut
        assert off[0] <= 256 + cut


@pytest.mark.parametrize("variance", VARIANCES)
def test_distance_is_a_bound_and_close(variance):
    probabilities, beyond = ideal(variance)
    with mpmath.workdps(DIGITS):
        exact = (
            mpmath.fsum(
                abs(mpmath.mpf(w) / 2**TOTAL_BITS - p)
                for w, p in zip(base_weights(variance), probabilities, strict=True)
            )
            + beyond
        ) / 2
        bound = mpmath.mpf(str(table_distance(variance)))
        assert exact <= bound <= exact * 1.0001 + mpmath.mpf(10) ** -58


def counted(entries, thresholds, capacity):
    """How often each magnitude comes out of an alias table."""
    found = [0] * CELLS
    for cell, (entry, threshold) in enumerate(zip(entries, thresholds, strict=True)):
        found[cell] += threshold
        found[(entry & CELL_FIELD) >> CELL_SHIFT] += capacity - threshold
    return found


def gathered(word):
    """The comparison's bits of an entry, put together."""
    return (word >> 16) << 7 | (word & 0x7F)


@pytest.mark.parametrize("variance", VARIANCES)
def test_tables_hold_the_weights_exactly(variance):
    weights = base_weights(variance)
    main, rest = split_weights(weights)
    tables = make_tables(weights)
    assert min(main) >= 0
    assert sum(main) == CELLS * (2**22 - 1)
    assert min(rest) >= 0
    assert sum(rest) == 2**96
    assert all(w == m * 2**87 + r for w, m, r in zip(weights, main, rest, strict=True))
    first = tables[0].tolist()
    assert not any(entry >> 31 for entry in first)
    assert counted(first, [gathered(entry & COMPARED) for entry in first], 2**22 - 1) == main
    upper, middle, lower = tables[1:].tolist()
    compared = [gathered(u & ~CELL_FIELD) << 64 | m << 32 | n for u, m, n in zip(upper, middle, lower, strict=True)]
    assert counted(upper, compared, 2**87) == rest


def test_the_words_fields_are_apart_and_complete():
    assert CELL_FIELD & COMPARED == 0
    assert CELL_FIELD | COMPARED | 1 << 31 == 2**32 - 1
    assert int(COMPARED).bit_count() == 22


@pytest.mark.parametrize("steps", [Fraction(1, 8), Fraction(3), Fraction(10**6), Fraction(2**29)])
def test_laplace_thresholds_are_the_probabilities_to_96_bits(steps):
    table = thresholds(steps)
    digits = digits_of(steps)
    assert table.shape == (3, digits)
    with mpmath.workdps(DIGITS):
        for j in range(digits):
            p = 1 / (1 + mpmath.exp(mpmath.mpf(2**j) * steps.denominator / steps.numerator))
            held = sum(int(word) << shift for word, shift in zip(table[:, j], (64, 32, 0), strict=True))
            assert abs(held - p * 2**96) <= 0.5
    assert np.exp(-float(Fraction(2**digits) / steps)) < 2**-108
    assert laplace_distance(steps) < 2**-90
