"""The noise for an epsilon: never too little, hardly too much."""

import pytest

from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.privacy.dp.ledger.accounting import PrivacyEvent, calibrate, spent


@pytest.mark.slow
@pytest.mark.parametrize(("target", "delta", "rate", "steps", "method"), [
    pytest.param(1.0, 1e-5, 256 / 60000, 14062, "pld", marks=pytest.mark.slow),
    (8.0, 1e-6, 0.01, 2000, "rdp"),
    (0.1, 1e-6, 1.0, 1, "pld"),
    (100.0, 1e-5, 1.0, 10, "pld"),
    (0.01, 1e-5, 0.001, 10000, "pld"),
])  # fmt: skip
def test_it_is_the_least_noise(target, delta, rate, steps, method):
    noise = calibrate(target_epsilon=target, delta=delta, sample_rate=rate, steps=steps, method=method)

    def cost(noise):
        return spent([PrivacyEvent("gaussian", noise, "poisson", rate, steps)], delta, method=method).epsilon

    assert cost(noise) <= target
    assert cost(noise / 1.001) > target


def test_the_analytic_gaussian():
    assert 4.0 <= calibrate(target_epsilon=0.9263415, delta=1e-5, sample_rate=1.0, steps=1) <= 4.004


def test_charged_deltas_need_more_noise():
    plain, charged = (
        calibrate(target_epsilon=1.0, delta=1e-5, sample_rate=1.0, steps=100),
        calibrate(target_epsilon=1.0, delta=1e-5, sample_rate=1.0, steps=100, charged=5e-8),
    )
    assert charged > 1.005 * plain
    events = [PrivacyEvent("gaussian", charged, count=100, delta=5e-8)]
    assert spent(events, 1e-5).epsilon <= 1.0


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_what_was_done_before_counts(method):
    before = [PrivacyEvent("gaussian", 10.0, count=2)]
    noise = calibrate(target_epsilon=1.0, delta=1e-5, sample_rate=1.0, steps=3, method=method, before=before)
    assert spent([*before, PrivacyEvent("gaussian", noise, count=3)], 1e-5, method=method).epsilon <= 1.0
    assert spent([*before, PrivacyEvent("gaussian", noise / 1.001, count=3)], 1e-5, method=method).epsilon > 1.0
    with pytest.raises(UnsupportedCase, match=r"already has epsilon 4\.37718"):
        calibrate(target_epsilon=1.0, delta=1e-5, sample_rate=1.0, steps=1, before=[PrivacyEvent("gaussian", 1.0)])


def test_a_tiny_epsilon():
    noise = calibrate(target_epsilon=1e-4, delta=1e-6, sample_rate=1.0, steps=1)
    assert spent([PrivacyEvent("gaussian", noise)], 1e-6).epsilon <= 1e-4


@pytest.mark.slow
def test_without_amplification_sampling_does_not_help():
    assert calibrate(target_epsilon=2.0, delta=1e-5, sample_rate=0.01, steps=3, sampling="shuffled") == calibrate(
        target_epsilon=2.0, delta=1e-5, sample_rate=1.0, steps=3
    )


@pytest.mark.parametrize("mechanism", ["laplace", "discrete_laplace"])
def test_laplace(mechanism):
    assert calibrate(target_epsilon=1.0, delta=1e-12, sample_rate=1.0, steps=1, mechanism=mechanism) == pytest.approx(
        1.0, rel=2e-3
    )


def test_what_cannot_be_reached():
    with pytest.raises(UnsupportedCase, match="no noise multiplier up to 1e\\+06 reaches"):
        calibrate(target_epsilon=1.0, delta=1e-5, sample_rate=0.1, steps=1000, charged=1e-7)
    with pytest.raises(UnsupportedCase, match="it is no limit"):
        calibrate(target_epsilon=1e9, delta=1e-5, sample_rate=1.0, steps=1)


@pytest.mark.parametrize(("arguments", "message"), [
    ((0.0, 1e-5, 0.1, 10), "target_epsilon must be a number, above 0"),
    ((1.0, 0.0, 0.1, 10), "delta must be in"),
    ((1.0, 1e-5, 0.0, 10), "sample_rate must be in"),
    ((1.0, 1e-5, 0.1, 0), "steps must be a whole number"),
    ((1.0, 1e-5, 0.1, 10, "clt"), "got 'clt'"),
])  # fmt: skip
def test_values_without_meaning(arguments, message):
    with pytest.raises(ConfigError, match=message):
        calibrate(**dict(zip(("target_epsilon", "delta", "sample_rate", "steps", "method"), arguments, strict=False)))
