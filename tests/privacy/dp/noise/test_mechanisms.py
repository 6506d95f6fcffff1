"""Noise on tensors and releases: what is added, what is recorded, what is refused."""

import math
import time
from fractions import Fraction

import numpy as np
import pytest
import torch

import soak
from accelerant.errors import BudgetExceeded, ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.privacy import dp
from accelerant.privacy.dp.noise.mechanisms import NoisySum
from refusals import assert_raises


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.usefixtures("fixed_entropy")
def test_noise_in_place(insecure):
    x = torch.full((2000,), 5.0)
    assert dp.gaussian_noise_(x, 2.0, insecure=insecure) is x
    assert float(x.mean()) == pytest.approx(5.0, abs=5 * 2.0 / 2000**0.5)
    assert float(x.std()) == pytest.approx(2.0, rel=0.08)
    x = torch.zeros(4000)
    assert dp.laplace_noise_(x, 1.5, insecure=insecure) is x
    assert float(x.abs().mean()) == pytest.approx(1.5, rel=0.08)  # E|x| = b, deviation b
    assert float(x.mean()) == pytest.approx(0.0, abs=5 * 1.5 * (2 / 4000) ** 0.5)


ROWS = torch.ones(3, 2)
DEFAULTS = {
    "gaussian_noise_": lambda book: dp.gaussian_noise_(torch.zeros(3), 4.0, sensitivity=1.0, ledger=book),
    "laplace_noise_": lambda book: dp.laplace_noise_(torch.zeros(3), 4.0, sensitivity=1.0, ledger=book),
    "release": lambda book: dp.release(1.0, mechanism="gaussian", sensitivity=1.0, noise_multiplier=4.0, ledger=book),
    "release of whole numbers": lambda book: dp.release(
        1, mechanism="laplace", sensitivity=1, epsilon=1.0, ledger=book
    ),
    "Privatizer with noise": lambda book: dp.Privatizer(
        noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1.0, ledger=book
    )(ROWS),
    "Privatizer": lambda book: dp.Privatizer(
        epsilon=2.0, delta=1e-5, max_grad_norm=1.0, steps=1, sample_rate=1.0, expected_batch_size=1.0, ledger=book
    ).step(ROWS),
}  # make_private's are in training/


@pytest.mark.parametrize("name", DEFAULTS)
def test_noise_is_secure_and_draws_are_unknown_unless_a_caller_says_otherwise(name):
    ledger = dp.PrivacyLedger()
    DEFAULTS[name](ledger)
    (event,) = ledger.events
    assert event.secure is True
    assert event.mechanism.startswith("discrete_")
    assert event.sampling == {"Privatizer with noise": "unknown", "Privatizer": "poisson"}.get(name, "none")


@pytest.mark.usefixtures("fixed_entropy")
def test_several_tensors_are_one_release():
    ledger = dp.PrivacyLedger()
    tensors = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(0)]
    dp.gaussian_noise_(tensors, 4.0, sensitivity=2.0, ledger=ledger)
    (event,) = ledger.events
    assert event.count == 1
    assert event.mechanism == "discrete_gaussian"
    assert 2.0 / (1 + 1 / 64) <= event.noise_multiplier < 2.0  # rounding to the grid adds to the sensitivity
    assert all(bool((each != 0).all()) for each in tensors)


def test_a_laplace_release_of_epsilon_costs_epsilon():
    ledger = dp.PrivacyLedger()
    dp.release(10.0, mechanism="laplace", sensitivity=1.0, epsilon=0.5, ledger=ledger)
    assert ledger.epsilon(1e-9) == pytest.approx(0.5, rel=1e-3)


def test_a_gaussian_release_of_epsilon_and_delta_costs_them():
    ledger = dp.PrivacyLedger()
    found = dp.release(torch.zeros(50), mechanism="gaussian", sensitivity=1.0, epsilon=1.0, delta=1e-5, ledger=ledger)
    assert found.shape == (50,)
    assert 0.99 < ledger.epsilon(1e-5) <= 1.0
    assert ledger.statement().delta == ledger.delta == 1e-5
    # Analytic Gaussian (Balle and Wang 2018): sigma 3.7304 for epsilon 1, delta 1e-5
    assert ledger.events[0].noise_multiplier == pytest.approx(3.7304, rel=2e-3)


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.usefixtures("fixed_entropy")
def test_whole_numbers_stay_whole_and_need_no_rounding(mechanism):
    values = torch.arange(400) * 3
    found = dp.release(values, mechanism=mechanism, sensitivity=1, noise_multiplier=20.0)
    assert found.dtype == torch.int64
    assert bool((found != values).any())
    spread = 20.0 if mechanism == "gaussian" else 20.0 * 2**0.5
    assert float((found - values).double().std()) == pytest.approx(spread, rel=0.3)
    assert isinstance(dp.release(7, mechanism=mechanism, sensitivity=1, noise_multiplier=1.0), int)


@pytest.mark.usefixtures("fixed_entropy")
def test_a_count_under_little_noise_is_right_in_distribution():
    """b = 0.5: P(0) of the rounded Laplace variable is 1 - exp(-1) = 0.632."""
    found = dp.release(torch.zeros(3000, dtype=torch.int64), mechanism="laplace", sensitivity=1, noise_multiplier=0.5)
    share = float((found == 0).double().mean())
    assert share == pytest.approx(1 - math.exp(-1), abs=5 * (0.632 * 0.368 / 3000) ** 0.5 + 0.07)


def test_values_come_back_as_they_came():
    options = {"mechanism": "gaussian", "sensitivity": 1.0, "noise_multiplier": 1.0}
    assert isinstance(dp.release(1.5, **options), float)
    array = dp.release(np.zeros((2, 3), np.float32), **options)
    assert (array.dtype, array.shape) == (np.float32, (2, 3))
    assert dp.release(torch.zeros(3, dtype=torch.bfloat16), **options).dtype == torch.bfloat16
    assert dp.release(torch.zeros(0), **options).shape == (0,)
    given = torch.ones(4)
    dp.release(given, **options)
    assert torch.equal(given, torch.ones(4))


FAR_APART = [
    (1_000_000_031.0, 1_000_000_033.0),
    ([1_000_000_031.0], [1_000_000_033.0]),
    (-(2.0**52) - 1, -(2.0**52) + 1),
    (1e11 + 0.25, 1e11 - 1.75),
    (2**61 + 1, 2**61 + 3),
    (10**30, 10**30 + 2),
    ([2**63, -1], [2**63 + 2, -1]),
    (np.uint64(2**64 - 101), np.uint64(2**64 - 103)),
    (torch.tensor([2**62 - 1]), torch.tensor([2**62 + 1])),
]


@pytest.mark.sample(3, 2)
@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
@pytest.mark.parametrize("pair", FAR_APART, ids=lambda pair: repr(pair[0]))
@pytest.mark.usefixtures("fixed_entropy")
def test_neighbours_are_told_apart_no_better_than_epsilon_allows(pair, mechanism):
    """The best test for two values: which side of their mean the answer is on. Nothing but the noise moves it."""
    strength = {"epsilon": 0.5, "delta": 1e-6} if mechanism == "gaussian" else {"epsilon": 0.5}
    if mechanism == "gaussian":
        strength = {"noise_multiplier": 2.0}
    exact = [each[0] if isinstance(each, list | torch.Tensor) else each for each in pair]
    exact = [Fraction(int(each)) if not isinstance(each, float) else Fraction(each) for each in exact]
    middle, above, errors = sum(exact) / 2, [], []
    for value, number in zip(pair, exact, strict=True):
        found = [dp.release(value, mechanism=mechanism, sensitivity=2.0, **strength) for _ in range(150)]
        found = [each[0] if isinstance(each, list | torch.Tensor) else each for each in found]
        found = [Fraction(each) if isinstance(each, float) else Fraction(int(each)) for each in found]
        above.append(sum(each > middle for each in found) / 150)
        errors += [float(each - number) for each in found]
    scale = 4.0 * (2**0.5 if mechanism == "laplace" else 1.0)
    assert np.std(errors) == pytest.approx(scale, rel=0.25)  # 300 draws, 4 deviations
    assert abs(np.mean(errors)) < 4 * scale / 300**0.5
    # P(above) is 0.61 and 0.39 for Laplace noise of b = 4, 0.60 and 0.40 for Gaussian noise of 4: 0.04 is a deviation.
    assert 0.05 < abs(above[0] - above[1]) < 0.45


def test_whole_numbers_end_at_the_limits_of_their_dtype():
    options = {"mechanism": "laplace", "sensitivity": 1, "epsilon": 0.01}
    for top in (np.iinfo(np.int64).max, np.iinfo(np.int64).min):
        found = dp.release(np.full(50, top), **options)
        assert found.dtype == np.int64
        assert ((found == top) | (abs(found.astype(object) - top) < 20_000)).all()
        assert (found == top).any()
    assert dp.release(torch.tensor([3, 250], dtype=torch.uint8), **options).dtype == torch.uint8


def test_wide_noise_on_whole_numbers_has_a_coarser_grid():
    found = dp.release([10**12] * 40, mechanism="gaussian", sensitivity=10**9, noise_multiplier=100.0)
    assert all(isinstance(each, int) for each in found)
    assert np.std(np.array(found, float)) == pytest.approx(1e11, rel=0.5)


# --- the delta of the discrete Gaussian, by its exact privacy loss ---------------------------------------------------
def exact_delta(plan, sensitivity, epsilon):
    """The largest delta at epsilon of one number plus discrete Gaussian noise, over the distances of two neighbours."""
    sigma = plan.scale / plan.grid
    reach = int(14 * sigma)
    z = np.arange(-reach, reach + 1)
    p = np.exp(-0.5 * (z / sigma) ** 2)
    p /= p.sum()
    most = sensitivity / plan.grid
    steps = int(most) + (most != int(most))  # rounding takes two numbers apart to the next step
    return max(
        float(np.maximum(p[s:] - math.exp(epsilon) * p[: len(p) - s], 0).sum() + p[:s].sum()) for s in {steps, 1}
    )


ASKED = [
    pytest.param(*strength, *query, marks=[] if strength == (1.0, 1e-6) and query == (7, 1) else pytest.mark.slow)
    for strength in ((0.1, 1e-3), (0.5, 1e-9), (1.0, 1e-6), (4.0, 1e-6), (8.0, 1e-3))
    for query in ((7, 1), (7, 3), (0.3, 1.0), (0.3, 0.7))
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("epsilon", "delta", "value", "sensitivity"), ASKED)
def test_the_exact_delta_is_within_the_one_asked(monkeypatch, epsilon, delta, value, sensitivity):
    plans = []
    monkeypatch.setattr(NoisySum, "add_", lambda self, tensors, plan, factor: plans.append(plan))
    ledger = dp.PrivacyLedger()
    dp.release(value, mechanism="gaussian", sensitivity=sensitivity, epsilon=epsilon, delta=delta, ledger=ledger)
    assert exact_delta(plans[0], sensitivity, epsilon) <= delta
    assert ledger.epsilon(delta) <= epsilon


@pytest.mark.search(60)
def test_exact_deltas_are_within_the_recorded_ones(monkeypatch, rng, record_property):
    """Random releases: their exact delta is within that of the continuous noise in the ledger and the delta charged."""
    plans, random, releases = [], np.random.default_rng(rng.randrange(2**32)), 50 if soak.MINUTES else 8
    record_property("releases", releases)
    monkeypatch.setattr(NoisySum, "add_", lambda self, tensors, plan, factor: plans.append(plan))
    for _ in range(releases):
        whole, multiplier = bool(random.integers(2)), float(np.exp(random.uniform(np.log(0.2), np.log(30))))
        sensitivity = int(random.integers(1, 40)) if whole else float(np.exp(random.uniform(-12, 12)))
        ledger, value = dp.PrivacyLedger(), 7 if whole else 0.3
        dp.release(value, mechanism="gaussian", sensitivity=sensitivity, noise_multiplier=multiplier, ledger=ledger)
        (event,) = ledger.events
        for delta in (1e-2, 1e-5, 1e-8):
            # The least epsilon of the continuous noise at delta, by bisection: Balle and Wang 2018, theorem 8.
            low, high = 0.0, 1e4
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if analytic_delta(event.noise_multiplier, middle) > delta else (low, middle)
            found = exact_delta(plans[-1], sensitivity, high)
            assert found <= delta * (1 + 1e-9) + event.delta + 1e-14, (sensitivity, multiplier, delta)


def analytic_delta(multiplier, epsilon):
    def below(x):
        return 0.5 * math.erfc(-x / 2**0.5)

    shift, slope = 0.5 / multiplier, epsilon * multiplier
    second = below(-shift - slope)
    return below(shift - slope) - (math.exp(epsilon + math.log(second)) if second else 0.0)


def test_a_release_past_the_budget_draws_nothing():
    ledger = dp.PrivacyLedger(budget=dp.Budget(epsilon=1.0, delta=1e-6))
    dp.release(1.0, mechanism="laplace", sensitivity=1.0, epsilon=0.8, ledger=ledger)
    with pytest.raises(BudgetExceeded):
        dp.release(1.0, mechanism="laplace", sensitivity=1.0, epsilon=0.8, ledger=ledger)
    x = torch.zeros(3)
    assert_raises(BudgetExceeded, None, dp.laplace_noise_, x, 1.0, sensitivity=1.0, ledger=ledger)
    assert torch.equal(x, torch.zeros(3))


@pytest.mark.parametrize(("options", "message"), [
    ({"mechanism": "uniform", "epsilon": 1.0}, "mechanism must be .*'uniform'"),
    ({"mechanism": "laplace"}, "either epsilon or noise_multiplier"),
    ({"mechanism": "laplace", "epsilon": 1.0, "noise_multiplier": 1.0}, "either epsilon or noise_multiplier"),
    ({"mechanism": "laplace", "epsilon": 1.0, "delta": 1e-5}, "needs no delta"),
    ({"mechanism": "gaussian", "epsilon": 1.0}, "needs delta"),
    ({"mechanism": "gaussian", "noise_multiplier": 1.0, "delta": 1e-5}, "delta goes with epsilon"),
    ({"mechanism": "laplace", "epsilon": -1.0}, "epsilon must be .*-1"),
    ({"mechanism": "laplace", "epsilon": 1.0, "sensitivity": 0.0}, "sensitivity must be .*0"),
    ({"mechanism": "laplace", "epsilon": 10**400}, "epsilon must be a number, above 0 and finite"),
    ({"mechanism": "laplace", "epsilon": 1.0, "sensitivity": 1e-320}, "from 2\\^-120 to 2\\^120"),
])  # fmt: skip
def test_arguments_of_a_release_are_checked(options, message):
    assert_raises(ConfigError, message, dp.release, 1.0, **{"sensitivity": 1.0, **options})


def test_values_that_cannot_be_released():
    options = {"mechanism": "laplace", "sensitivity": 1.0, "epsilon": 1.0}
    assert_raises(ConfigError, "finite", dp.release, float("nan"), **options)
    assert_raises(ConfigError, "real numbers", dp.release, torch.tensor([True]), **options)
    assert_raises(ConfigError, r"past 2\^53 do not go with floats", dp.release, [2**60 + 1, 0.5], **options)
    with pytest.raises(ConfigError, match="real numbers of at most 64 bits, got"):
        dp.release(np.zeros(2, np.longdouble), **options)
    assert_raises(ConfigError, "int or float, got Fraction", lambda: dp.release(Fraction(1, 3), **options))
    with pytest.raises(UnsupportedCase, match="no noise multiplier up to"):
        dp.release(1.0, mechanism="gaussian", sensitivity=1.0, epsilon=1e-300, delta=1e-9)
    with pytest.raises(UnsupportedDtype, match="value is a masked array"):  # hidden values would be released
        dp.release(np.ma.array([1.0, 2.0], mask=[False, True]), **options)
    assert_raises(UnsupportedDtype, "int64", dp.gaussian_noise_, torch.zeros(2, dtype=torch.int64), 1.0)
    with pytest.raises(ConfigError, match="needs the sensitivity"):
        dp.gaussian_noise_(torch.zeros(2), 1.0, ledger=dp.PrivacyLedger())
    assert_raises(ConfigError, "std must be a number", dp.gaussian_noise_, torch.zeros(2), 0.0)


@pytest.mark.usefixtures("fixed_entropy")
def test_counts_of_bytes_do_not_wrap():
    found = dp.release(torch.ones(200, dtype=torch.uint8), mechanism="laplace", sensitivity=1, epsilon=0.1)
    assert found.dtype == torch.uint8
    assert int((found == 0).sum()) > 20  # a third of the answers are below 0
    assert int((found > 200).sum()) == 0  # exp(-20) each


@pytest.mark.parametrize("add", [dp.gaussian_noise_, dp.laplace_noise_])
@pytest.mark.parametrize("x", [np.zeros(3), [np.zeros(3)], [torch.zeros(2), np.zeros(3)], np.float32(1), 5], ids=str)
def test_noise_in_place_takes_tensors_alone(add, x):
    assert_raises(UnsupportedDtype, r"torch tensors, got .*: convert it by torch.from_numpy", add, x, 1.0)
    assert_raises(UnsupportedCase, "noise is added to is a sparse_coo tensor", add, torch.eye(3).to_sparse(), 1.0)


# --- local privacy: reports are as likely as they should be, estimates unbiased, epsilon what is recorded -------------
@pytest.mark.parametrize("choices", [2, 5])
@pytest.mark.usefixtures("fixed_entropy")
def test_randomised_response_has_its_probabilities(choices):
    response = dp.RandomizedResponse(choices, epsilon=1.0)
    truth = math.e / (math.e + choices - 1)
    assert response.truth == pytest.approx(truth, rel=1e-9)
    assert response.truth / ((1 - response.truth) / (choices - 1)) < math.e  # rounding is on the safe side
    reports = response.randomize(torch.full((20000,), 1))
    shares = torch.bincount(reports, minlength=choices) / 20000
    wanted = torch.full((choices,), (1 - truth) / (choices - 1))
    wanted[1] = truth
    assert float((shares - wanted).abs().max()) < 5 * 0.5 / 20000**0.5


@pytest.mark.usefixtures("fixed_entropy")
def test_the_estimate_is_unbiased():
    response = dp.RandomizedResponse(4, epsilon=2.0)
    answers = torch.tensor([0] * 5000 + [1] * 3000 + [3] * 2000)
    estimate = response.estimate(response.randomize(answers))
    assert float(estimate.sum()) == pytest.approx(1.0)
    wanted = torch.tensor([0.5, 0.3, 0.0, 0.2], dtype=torch.float64)
    assert float((estimate - wanted).abs().max()) < 8 * response.standard_error(10000)


def test_the_shape_is_kept_and_empty_answers_are_none():
    response = dp.RandomizedResponse(3, epsilon=0.5)
    assert response.randomize(torch.zeros(2, 3, dtype=torch.int32)).shape == (2, 3)
    assert response.randomize(torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.usefixtures("fixed_entropy")
def test_numbers_between_bounds():
    local = dp.LocalLaplace(-1.0, 3.0, epsilon=1.0)
    reports = local.randomize(torch.full((5000,), 9.0))  # clamped to 3
    assert local.mean(reports) == pytest.approx(3.0, abs=5 * local.standard_error(5000))
    assert float((reports - 3).abs().mean()) == pytest.approx(4.0 * (1 + 1 / 64), rel=0.08)


def test_reports_of_lists_and_arrays():
    answers = dp.RandomizedResponse(3, epsilon=50.0)
    assert answers.randomize([[0, 2]]).tolist() == [[0, 2]]
    assert answers.estimate(np.array([1, 1])).round().tolist() == [0, 1, 0]
    numbers = dp.LocalLaplace(0.0, 1.0, epsilon=1e6)
    assert numbers.mean(numbers.randomize(np.array([0.5, 7.0]))) == pytest.approx(0.75, abs=1e-3)
    assert_raises(UnsupportedDtype, r"values must be numbers.*'a'", answers.randomize, ["a"])


@pytest.mark.slow
def test_reports_of_the_longest_vectors():
    vectors = dp.LocalGaussian(max_norm=2.0, dimensions=2, epsilon=1e3, delta=1e-5)
    found = vectors.randomize([[3e200, 4e200], [0.0, 0.0], [0.3, -0.4]])
    expected = torch.tensor([[1.2, 1.6], [0.0, 0.0], [0.3, -0.4]])
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=12 * vectors.standard_error(1))


@pytest.mark.usefixtures("fixed_entropy")
def test_vectors_in_a_ball():
    local = dp.LocalGaussian(max_norm=2.0, dimensions=3, epsilon=1.0, delta=1e-5)
    reports = local.randomize(torch.tensor([[30.0, 0.0, 40.0]]).expand(3000, 3))
    wanted = torch.tensor([1.2, 0.0, 1.6], dtype=torch.float64)
    assert float((local.mean(reports) - wanted).abs().max()) < 5 * local.standard_error(3000)
    assert float(reports[:, 1].std()) == pytest.approx(3.7304 * 4.0, rel=0.08)  # sigma of (1, 1e-5), sensitivity 4


def test_ledgers_are_of_replaced_records():
    ledger = dp.PrivacyLedger(neighbouring="replace-one")
    dp.RandomizedResponse(3, epsilon=0.5).randomize(torch.zeros(9, dtype=torch.int64), ledger=ledger)
    dp.LocalLaplace(0.0, 1.0, epsilon=0.25).randomize(torch.zeros(9), ledger=ledger)
    assert ledger.epsilon(1e-9) == pytest.approx(0.75, rel=1e-3)  # the reports of each record add up
    with pytest.raises(ConfigError, match="replace-one"):
        dp.LocalLaplace(0.0, 1.0, epsilon=0.25).randomize(torch.zeros(9), ledger=dp.PrivacyLedger())


@pytest.mark.parametrize(("make", "message"), [
    (lambda: dp.RandomizedResponse(1, 1.0), "choices must be .*1"),
    (lambda: dp.RandomizedResponse(2, 0.0), "epsilon must be .*0"),
    (lambda: dp.LocalLaplace(1.0, 1.0, epsilon=1.0), "high must be .*1"),
    (lambda: dp.LocalGaussian(max_norm=1.0, dimensions=0, epsilon=1.0, delta=1e-5), "dimensions must be .*0"),
    (lambda: dp.LocalGaussian(max_norm=1.0, dimensions=1, epsilon=1.0, delta=0.9), "delta must be .*0.9"),
    (lambda: dp.RandomizedResponse(3, 1.0).randomize(torch.tensor([3])), "0 to 2"),
    (lambda: dp.RandomizedResponse(3, 1.0).estimate(torch.tensor([], dtype=torch.int64)), "at least one"),
    (lambda: dp.LocalLaplace(0.0, 1.0, epsilon=1.0).randomize(torch.tensor([float("nan")])), "NaN"),
])  # fmt: skip
def test_values_are_checked(make, message):
    assert_raises(ConfigError, message, make)


def test_kinds_are_checked():
    assert_raises(UnsupportedDtype, "whole numbers", lambda: dp.RandomizedResponse(3, 1.0).randomize(torch.zeros(3)))
    with pytest.raises(ShapeError, match=r"\(n, 2\)"):
        dp.LocalGaussian(max_norm=1.0, dimensions=2, epsilon=1.0, delta=1e-5).randomize(torch.zeros(3))


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 12.0, 900.0])
def test_the_noise_of_one_report_is_found_at_once(epsilon):
    dp.LocalGaussian(max_norm=1.0, dimensions=3, epsilon=1.0, delta=1e-5)  # loads dp-accounting
    begin = time.process_time()
    dp.LocalGaussian(max_norm=1.0, dimensions=3, epsilon=epsilon, delta=1e-5)
    assert time.process_time() - begin < 0.2
