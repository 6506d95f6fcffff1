"""Local privacy: reports are as likely as they should be, estimates unbiased, epsilon what is recorded."""

import math

import pytest
import torch

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.privacy import dp


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


@pytest.mark.usefixtures("fixed_entropy")
def test_vectors_in_a_ball():
    local = dp.LocalGaussian(2.0, 3, epsilon=1.0, delta=1e-5)
    reports = local.randomize(torch.tensor([[30.0, 0.0, 40.0]]).expand(3000, 3))
    wanted = torch.tensor([1.2, 0.0, 1.6], dtype=torch.float64)
    assert float((local.mean(reports) - wanted).abs().max()) < 5 * local.standard_error(3000)
    assert float(reports[:, 1].std()) == pytest.approx(3.7304 * 4.0, rel=0.08)  # sigma of (1, 1e-5), sensitivity 4


def test_ledgers_are_of_replaced_records():
    ledger = dp.Ledger(neighbouring="replace-one")
    dp.RandomizedResponse(3, epsilon=0.5).randomize(torch.zeros(9, dtype=torch.int64), ledger=ledger)
    dp.LocalLaplace(0.0, 1.0, epsilon=0.25).randomize(torch.zeros(9), ledger=ledger)
    assert ledger.epsilon(1e-9) == pytest.approx(0.75, rel=1e-3)  # the reports of each record add up
    with pytest.raises(ConfigError, match="replace-one"):
        dp.LocalLaplace(0.0, 1.0, epsilon=0.25).randomize(torch.zeros(9), ledger=dp.Ledger())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dp.RandomizedResponse(1, 1.0), "choices must be .*1"),
        (lambda: dp.RandomizedResponse(2, 0.0), "epsilon must be .*0"),
        (lambda: dp.LocalLaplace(1.0, 1.0, 1.0), "high must be .*1"),
        (lambda: dp.LocalGaussian(1.0, 0, 1.0, 1e-5), "dimensions must be .*0"),
        (lambda: dp.LocalGaussian(1.0, 1, 1.0, 0.9), "delta must be .*0.9"),
        (lambda: dp.RandomizedResponse(3, 1.0).randomize(torch.tensor([3])), "0 to 2"),
        (lambda: dp.RandomizedResponse(3, 1.0).estimate(torch.tensor([], dtype=torch.int64)), "at least one"),
        (lambda: dp.LocalLaplace(0.0, 1.0, 1.0).randomize(torch.tensor([float("nan")])), "NaN"),
    ],
)
def test_values_are_checked(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_kinds_are_checked():
    with pytest.raises(UnsupportedDtype, match="whole numbers"):
        dp.RandomizedResponse(3, 1.0).randomize(torch.zeros(3))
    with pytest.raises(ShapeError, match=r"\(n, 2\)"):
        dp.LocalGaussian(1.0, 2, 1.0, 1e-5).randomize(torch.zeros(3))
