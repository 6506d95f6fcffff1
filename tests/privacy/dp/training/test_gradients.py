"""GradientPrivatizer: clip, sum on the grid, noise, divide."""

import math

import numpy as np
import pytest
import torch

from accelerant.errors import BudgetExceeded, ConfigError, ShapeError, UnsupportedDtype
from accelerant.privacy import dp


def make(**changes):
    return dp.GradientPrivatizer(
        **{"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": 4.0, **changes}
    )


def gradients(count=7, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2, 2, count)[:, None]
    return {
        "weight": (torch.randn(count, 3, 2, generator=generator) * scale[:, :, None]).to(dtype),
        "bias": (torch.randn(count, 2, generator=generator) * scale).to(dtype),
    }


def clipped(named, bounds):
    """Sums in float64 of gradients clipped together (one bound) or by tensor."""
    wide = {name: each.double().flatten(1) for name, each in named.items()}
    norms = {name: each.norm(dim=1) for name, each in wide.items()}
    if not isinstance(bounds, dict):
        together = torch.stack([each**2 for each in norms.values()]).sum(0).sqrt()
        norms, bounds = dict.fromkeys(norms, together), dict.fromkeys(norms, bounds)
    factors = {name: torch.minimum(torch.ones_like(norms[name]), bounds[name] / norms[name]) for name in named}
    return {n: (wide[n] * factors[n][:, None]).sum(0).reshape(named[n].shape[1:]) for n in named}


@pytest.mark.parametrize("bounds", [0.7, {"weight": 0.4, "bias": 3.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_noise_it_is_the_clipped_mean(bounds, dtype):
    named = gradients(dtype=dtype)
    privatizer = make(max_grad_norm=bounds)
    means = privatizer(named)
    for name, total in clipped(named, bounds).items():
        torch.testing.assert_close(means[name], (total / 4).to(dtype))
    assert 0 < privatizer.clipped < 1
    wanted = 0.7 if isinstance(bounds, float) else math.hypot(0.4, 3.0)
    assert privatizer.sensitivity == pytest.approx(wanted)


@pytest.mark.usefixtures("fixed_entropy")
def test_a_tensor_alone_and_an_empty_batch():
    named = gradients()["bias"]
    assert make()(named).shape == (2,)
    assert torch.equal(make()(named[:0]), torch.zeros(2))
    noisy = make(noise_multiplier=1.0)(torch.zeros(0, 1000))
    assert float(noisy.std()) * 4 == pytest.approx(1.0, rel=0.12)  # 5 deviations of an estimated deviation


def test_what_comes_out_is_on_the_grid_of_the_noise():
    """Nothing of the floating-point sum is left in the low bits."""
    privatizer = make(noise_multiplier=1.0, expected_batch_size=1.0)
    found = privatizer(gradients(dtype=torch.float64)["bias"])
    release = privatizer.ledger.events[0]
    assert release.mechanism == "discrete_gaussian"
    assert not release.idealised
    steps = found / 2.0**-20  # far finer than any grid that two dimensions get
    assert torch.equal(steps, steps.round())


@pytest.mark.usefixtures("fixed_entropy")
def test_the_noise_is_that_of_the_multiplier():
    privatizer = make(noise_multiplier=3.0, max_grad_norm=2.0, expected_batch_size=1.0)
    found = torch.cat([privatizer(torch.zeros(1, 500)) for _ in range(4)])
    assert float(found.std()) == pytest.approx(6.0 * (1 + 1 / 64), rel=0.085)  # 5 deviations of 2,000 draws' deviation


def test_gradients_that_are_not_finite_count_as_nothing():
    named = gradients()
    named["weight"][2, 0, 0] = float("nan")
    named["bias"][4, 1] = float("inf")
    privatizer = make()
    means = privatizer(named)
    keep = [0, 1, 3, 5, 6]
    wanted = clipped({name: each[keep] for name, each in named.items()}, 1.0)
    for name, total in wanted.items():
        torch.testing.assert_close(means[name], (total / 4).float())
    assert privatizer.dropped == 2


def test_events_and_the_budget():
    ledger = dp.Ledger(budget=dp.Budget(1.5, 1e-5, "rdp"))
    privatizer = make(noise_multiplier=4.0, sampling="poisson", sample_rate=0.5, ledger=ledger)
    with pytest.raises(BudgetExceeded):
        [privatizer(gradients()) for _ in range(200)]
    (event,) = ledger.events
    assert (event.noise_multiplier, event.sampling, event.sample_rate) == (4.0, "poisson", 0.5)
    assert ledger.epsilon(1e-5) <= 1.5
    fast = make(noise_multiplier=1.0, secure=False)
    fast(gradients())
    assert fast.ledger.events[0].secure is False
    assert fast.ledger.events[0].idealised


def test_zero_gradients_and_zero_rows():
    assert torch.equal(make()(torch.zeros(3, 4)), torch.zeros(4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier must be .*-1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be .*0"),
        ({"max_grad_norm": {}}, "names no tensor"),
        ({"expected_batch_size": float("nan")}, "expected_batch_size must be .*nan"),
        ({"sampling": "sometimes"}, "sampling must be .*'sometimes'"),
        ({"sampling": "poisson"}, "sample_rate goes with"),
        ({"sample_rate": 0.5}, "sample_rate goes with"),
        ({"sampling": "poisson", "sample_rate": 1.5}, "sample_rate must be .*1.5"),
    ],
)
def test_arguments_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_tensors_are_checked():
    with pytest.raises(ShapeError, match="as many in each"):
        make()({"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)})
    with pytest.raises(ShapeError, match="examples"):
        make()(torch.zeros(()))
    with pytest.raises(UnsupportedDtype, match="int64"):
        make()(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ConfigError, match="max_grad_norm names"):
        make(max_grad_norm={"a": 1.0})({"b": torch.zeros(2, 2)})
    with pytest.raises(ConfigError, match="name no tensor"):
        make()({})


@pytest.mark.parametrize(
    "gradients", [np.zeros((3, 2)), {"weight": np.zeros((3, 2))}, None], ids=["array", "named", "none"]
)
def test_gradients_are_tensors(gradients):
    privatizer = dp.GradientPrivatizer(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=3)
    with pytest.raises(UnsupportedDtype, match=r"must be torch tensors, .* got"):
        privatizer(gradients)
    assert not privatizer.ledger.events
