"""Noise on tensors and releases: what is added, what is recorded, what is refused."""

import math

import numpy as np
import pytest
import torch

from accelerant.errors import BudgetExceeded, ConfigError, UnsupportedDtype
from accelerant.privacy import dp


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.usefixtures("fixed_entropy")
def test_gaussian_noise_in_place(secure):
    x = torch.full((2000,), 5.0)
    assert dp.gaussian_noise_(x, 2.0, secure=secure) is x
    assert float(x.mean()) == pytest.approx(5.0, abs=5 * 2.0 / 2000**0.5)
    assert float(x.std()) == pytest.approx(2.0, rel=0.08)


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.usefixtures("fixed_entropy")
def test_laplace_noise_in_place(secure):
    x = torch.zeros(4000)
    dp.laplace_noise_(x, 1.5, secure=secure)
    assert float(x.abs().mean()) == pytest.approx(1.5, rel=0.08)  # E|x| = b, deviation b
    assert float(x.mean()) == pytest.approx(0.0, abs=5 * 1.5 * (2 / 4000) ** 0.5)


@pytest.mark.usefixtures("fixed_entropy")
def test_several_tensors_are_one_release():
    ledger = dp.Ledger()
    tensors = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(0)]
    dp.gaussian_noise_(tensors, 4.0, sensitivity=2.0, ledger=ledger)
    (event,) = ledger.events
    assert event.count == 1
    assert event.mechanism == "discrete_gaussian"
    assert 2.0 / (1 + 1 / 64) <= event.noise_multiplier < 2.0  # rounding to the grid adds to the sensitivity
    assert all(bool((each != 0).all()) for each in tensors)


def test_a_laplace_release_of_epsilon_costs_epsilon():
    ledger = dp.Ledger()
    dp.release(10.0, mechanism="laplace", sensitivity=1.0, epsilon=0.5, ledger=ledger)
    assert ledger.epsilon(1e-9) == pytest.approx(0.5, rel=1e-3)


def test_a_gaussian_release_of_epsilon_and_delta_costs_them():
    ledger = dp.Ledger()
    found = dp.release(torch.zeros(50), mechanism="gaussian", sensitivity=1.0, epsilon=1.0, delta=1e-5, ledger=ledger)
    assert found.shape == (50,)
    assert 0.99 < ledger.epsilon(1e-5) <= 1.0
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


def test_a_release_past_the_budget_draws_nothing():
    ledger = dp.Ledger(budget=dp.Budget(1.0, 1e-6))
    dp.release(1.0, mechanism="laplace", sensitivity=1.0, epsilon=0.8, ledger=ledger)
    with pytest.raises(BudgetExceeded):
        dp.release(1.0, mechanism="laplace", sensitivity=1.0, epsilon=0.8, ledger=ledger)
    x = torch.zeros(3)
    with pytest.raises(BudgetExceeded):
        dp.laplace_noise_(x, 1.0, sensitivity=1.0, ledger=ledger)
    assert torch.equal(x, torch.zeros(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mechanism": "uniform", "epsilon": 1.0}, "mechanism must be .*'uniform'"),
        ({"mechanism": "laplace"}, "either epsilon or noise_multiplier"),
        ({"mechanism": "laplace", "epsilon": 1.0, "noise_multiplier": 1.0}, "either epsilon or noise_multiplier"),
        ({"mechanism": "laplace", "epsilon": 1.0, "delta": 1e-5}, "needs no delta"),
        ({"mechanism": "gaussian", "epsilon": 1.0}, "needs delta"),
        ({"mechanism": "gaussian", "noise_multiplier": 1.0, "delta": 1e-5}, "delta goes with epsilon"),
        ({"mechanism": "laplace", "epsilon": -1.0}, "epsilon must be .*-1"),
        ({"mechanism": "laplace", "epsilon": 1.0, "sensitivity": 0.0}, "sensitivity must be .*0"),
    ],
)
def test_arguments_of_a_release_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        dp.release(1.0, **{"sensitivity": 1.0, **options})


def test_values_that_cannot_be_released():
    options = {"mechanism": "laplace", "sensitivity": 1.0, "epsilon": 1.0}
    with pytest.raises(ConfigError, match="finite"):
        dp.release(float("nan"), **options)
    with pytest.raises(ConfigError, match="real numbers"):
        dp.release(torch.tensor([True]), **options)
    with pytest.raises(ConfigError, match=r"2\^53"):
        dp.release(torch.tensor([2**60]), **options)
    with pytest.raises(UnsupportedDtype, match="int64"):
        dp.gaussian_noise_(torch.zeros(2, dtype=torch.int64), 1.0)
    with pytest.raises(ConfigError, match="needs the sensitivity"):
        dp.gaussian_noise_(torch.zeros(2), 1.0, ledger=dp.Ledger())
    with pytest.raises(ConfigError, match="std must be a number"):
        dp.gaussian_noise_(torch.zeros(2), 0.0)


@pytest.mark.usefixtures("fixed_entropy")
def test_counts_of_bytes_do_not_wrap():
    found = dp.release(torch.ones(200, dtype=torch.uint8), mechanism="laplace", sensitivity=1, epsilon=0.1)
    assert found.dtype == torch.uint8
    assert int((found == 0).sum()) > 20  # a third of the answers are below 0
    assert int((found > 200).sum()) == 0  # exp(-20) each


@pytest.mark.parametrize("add", [dp.gaussian_noise_, dp.laplace_noise_])
@pytest.mark.parametrize(
    "x", [np.zeros(3), [np.zeros(3)], [torch.zeros(2), np.zeros(3)]], ids=["array", "list", "mixed"]
)
def test_noise_in_place_takes_tensors_alone(add, x):
    with pytest.raises(UnsupportedDtype, match=r"torch tensors, got .*: convert it by torch.from_numpy"):
        add(x, 1.0)
