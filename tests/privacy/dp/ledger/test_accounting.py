"""Epsilon: known answers, what is not amplified, charged deltas, bounds that stay bounds."""

import functools
import json
import math
import sys
import time

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerant.errors import ConfigError, FormatError, MissingDependency, UnsupportedCase
from accelerant.privacy.dp.ledger import accounting
from accelerant.privacy.dp.ledger.accounting import (
    CHARGED_UP_TO,
    PrivacyEvent,
    calibrate,
    last_within,
    rdp_values,
    release_of,
    remaining,
    spent,
)
from accelerant.privacy.dp.ledger.journal import event_record
from accelerant.privacy.dp.noise import discrete
from refusals import assert_raises

RATE, DELTA = 256 / 60000, 1e-5
STEP = PrivacyEvent("gaussian", 1.1, "poisson", RATE)


def epsilon(*events, delta=DELTA, **options):
    return spent(events, delta, **options).epsilon


# --- known answers ---------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_dp_sgd_on_mnist():
    """TensorFlow Privacy's tutorial; both numbers are Google dp-accounting 0.6.0's."""
    assert round(epsilon(STEP.times(14062)), 4) == 2.3817
    assert round(epsilon(STEP.times(14062), method="rdp"), 4) == 2.5966


def test_renyi_divergence_of_the_sampled_gaussian():
    """50 steps at q = 0.01, sigma = 2.5: Opacus's and TensorFlow Privacy's test values."""
    found = rdp_values(release_of(PrivacyEvent("gaussian", 2.5, "poisson", 0.01)), (1.5, 2.5, 5.0))
    assert [50 * value for value in found] == pytest.approx([6.70579741e-4, 1.08548710e-3, 2.18075656e-3], rel=1e-6)


@pytest.mark.parametrize("order", [2, 32, 63, 256])
@pytest.mark.parametrize(("rate", "sigma"), [(1e-9, 50.0), (1e-6, 1000.0), (0.1, 50.0), (0.9, 1000.0), (0.99, 1e6)])
def test_renyi_divergence_is_an_upper_bound_where_it_rounds(rate, sigma, order):
    """The finite sum of Mironov et al. 2019 in 60 digits, and no more than its roundings above."""
    with mpmath.workdps(60):
        q, variance = mpmath.mpf(rate), mpmath.mpf(sigma) ** 2
        terms = (
            mpmath.binomial(order, k) * (1 - q) ** (order - k) * q**k * mpmath.exp(k * (k - 1) / (2 * variance))
            for k in range(order + 1)
        )
        exact = mpmath.log(mpmath.fsum(terms)) / (order - 1)
        found = rdp_values(release_of(PrivacyEvent("gaussian", sigma, "poisson", rate)), (float(order),))[0]
        assert exact <= found <= exact * (1 + mpmath.mpf(10) ** -9) + order * mpmath.mpf(10) ** -14


@pytest.mark.parametrize(("sigma", "count"), [(1e6, 1 << 62), (1e5, 10**10), (1e6, 10**12)])
def test_many_small_releases_are_not_taken_for_nothing(sigma, count):
    """A divergence that is rounded to less than 0 was an epsilon of 0."""
    rate, whole = 1 - 2.0**-53, PrivacyEvent("gaussian", sigma, count=count)
    found = epsilon(PrivacyEvent("gaussian", sigma, "poisson", rate, count))
    assert found >= epsilon(whole) * (1 - 1e-9) > 0.001


@pytest.mark.parametrize(
    "event", [PrivacyEvent("gaussian", 0.05, "poisson", 1 - 2.0**-53), PrivacyEvent("laplace", 1e-3, "poisson", 0.5)]
)
def test_what_the_distributions_cannot_hold_has_the_bound_by_renyi(event):
    assert epsilon(event) == epsilon(event, method="rdp") > 50


@pytest.mark.parametrize(("sigma", "wanted"), [(1.0, 4.3771781), (4.0, 0.9263415)])
def test_analytic_gaussian(sigma, wanted):
    """Balle and Wang 2018, arXiv:1805.06530, theorem 8."""
    found = epsilon(PrivacyEvent("gaussian", sigma))
    assert found == pytest.approx(wanted, abs=1e-6)


def exact_epsilon(sigma, count, delta):
    """Balle and Wang 2018, theorem 8, in 40 digits: `count` releases without sampling are one of more noise."""
    with mpmath.workdps(40):
        mu = mpmath.sqrt(count) / mpmath.mpf(sigma)
        low, high = mpmath.mpf(0), mu * mu / 2 + 60 * mu
        for _ in range(90):
            middle = (low + high) / 2
            found = mpmath.ncdf(mu / 2 - middle / mu) - mpmath.exp(middle) * mpmath.ncdf(-mu / 2 - middle / mu)
            low, high = (middle, high) if found > delta else (low, middle)
        return float(low)


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize(("sigma", "count", "delta"), [
    (1.5, 300, 1e-13), (1.5, 10_000, 1e-13), (40.0, 300, 1e-13), (40.0, 10_000, 1e-13), (1.0, 1, 1e-14),
    (5.0, 10_000, 1e-11), (5.0, 10_000, 1e-12), (0.7, 10, 1e-16), (300.0, 10_000, 1e-20), (1.0, 1, 1e-300),
    (2.0, 1, 0.3), (40.0, 300, 1e-5),
])  # fmt: skip
def test_epsilon_is_an_upper_bound_where_probabilities_round(sigma, count, delta):
    exact = exact_epsilon(sigma, count, delta)
    found = epsilon(PrivacyEvent("gaussian", sigma, count=count), delta=delta)
    assert exact <= found <= exact * (1 + 1e-7)


@pytest.mark.slow
@given(
    sigma=st.floats(0.3, 300), count=st.sampled_from([1, 2, 7, 50, 300, 5000, 100_000]),
    exponent=st.floats(-16, -0.4), kinds=st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_a_gaussian_is_never_below_the_exact_value(sigma, count, exponent, kinds):
    delta, sigmas = 10**exponent, [sigma * (1 + k / 10) for k in range(kinds)]
    together = math.fsum(s**-2 for s in sigmas) ** -0.5
    if count / together**2 > 2000:
        return
    found = epsilon(*(PrivacyEvent("gaussian", s, count=count) for s in sigmas), delta=delta)
    exact = exact_epsilon(together, count, delta)
    assert exact * (1 - 1e-12) - 1e-15 <= found <= exact * (1 + 1e-6) + 1e-9


def test_randomised_response_is_exact():
    """delta(t) = (e^epsilon - e^t) / (1 + e^epsilon)."""
    pure, delta = 1.0, 1e-2
    wanted = math.log(math.exp(pure) - delta * (1 + math.exp(pure)))
    assert epsilon(PrivacyEvent("randomized_response", 1 / pure), delta=delta) == pytest.approx(wanted, abs=2e-4)


def test_pure_epsilon_is_amplified_by_sampling():
    """log(1 + q (e^epsilon - 1)), Li et al. 2012."""
    found = epsilon(PrivacyEvent("randomized_response", 0.5, "poisson", 0.1), delta=1e-12)
    assert found == pytest.approx(math.log1p(0.1 * math.expm1(2.0)), abs=2e-4)


@pytest.mark.parametrize("mechanism", ["laplace", "discrete_laplace"])
def test_laplace_is_at_most_its_pure_epsilon(mechanism):
    found = epsilon(PrivacyEvent(mechanism, 2.0), delta=1e-9)
    assert 0.4999 < found <= 0.5 + 1e-4


def test_several_coordinates_share_a_laplace():
    """L1 sensitivity in two coordinates costs no more than in one, so the scale over it is what counts."""
    for delta in (1e-6, 1e-3, 0.1):
        both = epsilon(PrivacyEvent("laplace", 2.0), PrivacyEvent("laplace", 2.0), delta=delta)
        assert both <= epsilon(PrivacyEvent("laplace", 1.0), delta=delta) + 2e-4


def test_gaussians_compose_by_their_inverse_variances():
    both = epsilon(PrivacyEvent("gaussian", 3.0), PrivacyEvent("gaussian", 4.0, count=2))
    assert both == pytest.approx(epsilon(PrivacyEvent("gaussian", (1 / 9 + 2 / 16) ** -0.5)), rel=1e-5)


def test_the_discrete_gaussian_on_a_fine_grid_costs_as_the_continuous():
    """64 steps of the grid to the sensitivity are the coarsest that the noise chooses."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    exact = pld.from_discrete_gaussian_mechanism(64, sensitivity=64, use_connect_dots=True)
    found = epsilon(PrivacyEvent("discrete_gaussian", 1.0))
    assert found == pytest.approx(exact.get_epsilon_for_delta(DELTA), abs=1e-3)


# --- sampling and relations ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sampling", ["shuffled", "unknown"])
@pytest.mark.parametrize("mechanism", ["gaussian", "discrete_gaussian", "laplace", "discrete_laplace"])
def test_what_is_no_poisson_draw_is_not_amplified(sampling, mechanism):
    whole, drawn = PrivacyEvent(mechanism, 2.0, sampling, 0.01, 5), PrivacyEvent(mechanism, 2.0, "poisson", 0.01, 5)
    assert release_of(whole) == release_of(PrivacyEvent(mechanism, 2.0)) != release_of(drawn)
    assert (release_of(whole).sample_rate, release_of(drawn).sample_rate) == (1.0, 0.01)
    for method in ("rdp", "pld") if mechanism == "gaussian" else ("rdp",):
        assert epsilon(whole, method=method) == epsilon(PrivacyEvent(mechanism, 2.0, count=5), method=method)
    assert epsilon(whole, method="rdp") > 5 * epsilon(drawn, method="rdp")


def test_poisson_sampling_is_refused_where_records_are_replaced():
    assert_raises(UnsupportedCase, "added or removed, not replaced", epsilon, STEP, neighbouring="replace-one")
    assert epsilon(PrivacyEvent("gaussian", 1.0), neighbouring="replace-one") == epsilon(PrivacyEvent("gaussian", 1.0))


# --- no answer, and why ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [0.0, 1e-300, 1e-155])  # the inverse of its square overflows
def test_no_noise_is_no_privacy(noise, method):
    found = spent([STEP, PrivacyEvent("gaussian", noise, "poisson", 0.1, 3)], DELTA, method=method)
    assert found.epsilon == math.inf
    assert "3 releases (gaussian) have no noise" in found.reason


def test_nothing_done_costs_nothing():
    assert epsilon() == epsilon(STEP.times(0)) == epsilon(PrivacyEvent("gaussian", 0.0, count=0)) == 0


def test_charged_delta_is_taken_off_before_the_accountant_is_asked():
    charged = PrivacyEvent("gaussian", 1.1, "poisson", RATE, 100, delta=2e-8)
    assert epsilon(charged) == pytest.approx(epsilon(STEP.times(100), delta=DELTA - 2e-6), rel=1e-9)
    assert spent([charged], DELTA).charged == pytest.approx(2e-6)


def test_delta_used_up():
    found = spent([PrivacyEvent("gaussian", 1.1, "poisson", RATE, 100, delta=1e-7)], DELTA)
    assert found.epsilon == math.inf
    assert "used up by what the events charge" in found.reason


@pytest.mark.parametrize("charge", [1e-13, 1e-12, 3e-12])
def test_charges_grow_beyond_the_epsilon_they_hold_for(charge):
    """Total variation t costs (1 + e^epsilon) t; an event's delta has that of epsilon 16."""
    plain = epsilon(PrivacyEvent("gaussian", 0.3), method="rdp")
    assert plain > CHARGED_UP_TO == discrete.EPSILON_LIMIT
    found = spent([PrivacyEvent("gaussian", 0.3, delta=charge)], DELTA, method="rdp")
    assert found.charged >= charge * math.exp(found.epsilon - CHARGED_UP_TO) * (1 - 1e-9)
    assert found.epsilon >= epsilon(PrivacyEvent("gaussian", 0.3), delta=DELTA - found.charged, method="rdp") > plain


def test_charges_are_as_recorded_up_to_that_epsilon():
    found = spent([PrivacyEvent("gaussian", 1.0, delta=1e-6)], DELTA, method="rdp")
    assert found == (
        epsilon(PrivacyEvent("gaussian", 1.0), delta=DELTA - 1e-6 * (1 + 1e-12), method="rdp"),
        1e-6 * (1 + 1e-12),
        "",
    )


@pytest.mark.parametrize("noise", [1e-200, 1e-6, 0.01, 1e6, 1e200])
def test_extreme_noise_has_an_answer(noise):
    found = epsilon(PrivacyEvent("gaussian", noise))
    assert found == 0 if noise >= 1e6 else found > 1000


# --- bounds ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sigma", "rate", "count", "more"), [(1.0, 0.3, 20, 1), (1.5, 0.02, 300, 50), (5.0, 1e-3, 1, 3)]
)
def test_more_steps_never_cost_less_and_the_cross_check_is_looser(sigma, rate, count, more):
    step = PrivacyEvent("gaussian", sigma, "poisson", rate)
    one, two = epsilon(step.times(count)), epsilon(step.times(count + more))
    assert one <= two + 1e-5
    assert one <= epsilon(step.times(count), method="rdp")


def test_many_noise_multipliers_are_rounded_to_the_safe_side():
    events = [PrivacyEvent("gaussian", 20 + index / 10) for index in range(100)]
    exact = epsilon(PrivacyEvent("gaussian", sum(event.noise_multiplier**-2 for event in events) ** -0.5))
    assert exact <= epsilon(*events) <= 1.05 * exact


@pytest.mark.parametrize(("noise", "count"), [(1e6, 10**7), (1e6, 4273), (300.0, 10**6)])
def test_gaussian_releases_are_one_together(noise, count):
    """The analytic Gaussian mechanism of Balle and Wang, at the epsilon that is found."""
    found, mu = epsilon(PrivacyEvent("gaussian", noise, count=count)), math.sqrt(count) / noise

    def exact(epsilon):
        above, below = (0.5 * math.erfc((epsilon / mu + side * mu / 2) / math.sqrt(2)) for side in (-1, 1))
        return above - math.exp(epsilon) * below

    assert exact(found) <= DELTA <= exact(found * 0.98)


@pytest.mark.parametrize("mechanism", ["laplace", "randomized_response", "discrete_laplace"])
@pytest.mark.parametrize("delta", [1e-15, 1e-300])
def test_pure_epsilons_add_up_at_the_least_deltas(mechanism, delta):
    found = epsilon(PrivacyEvent(mechanism, 4.0, count=3), delta=delta)
    assert 0.749 <= found <= 0.75 * (1 + 1e-12)


@pytest.mark.slow
def test_a_count_that_changes_reuses_the_distribution_of_one_step():
    step = PrivacyEvent("gaussian", 1.3, "poisson", 0.01)
    epsilon(step.times(1000))
    before = accounting._distribution.cache_info().misses
    for count in range(1001, 1003):
        epsilon(step.times(count))
    assert accounting._distribution.cache_info().misses == before


def test_small_epsilons_are_resolved():
    """At dp-accounting's usual interval of 1e-4 this is 0.0353."""
    assert 0.015 < epsilon(PrivacyEvent("gaussian", 5.0, "poisson", 1e-4, 10**5)) < 0.0166


def test_more_steps_than_a_block():
    """A Gaussian composed by its variance, through the blocks that very many steps are composed in."""
    many = epsilon(PrivacyEvent("gaussian", 1000.0, "poisson", 0.999999, 2**17 + 3))
    assert many == pytest.approx(epsilon(PrivacyEvent("gaussian", 1000 / (2**17 + 3) ** 0.5)), rel=1e-3)


@pytest.mark.parametrize("step", [PrivacyEvent("gaussian", 1e6), PrivacyEvent("gaussian", 1e4, "poisson", 0.001)])
def test_no_count_takes_long(step):
    began = time.perf_counter()
    assert 0 < epsilon(step.times(2**50)) < math.inf
    assert time.perf_counter() - began < 10.0


# --- how many more ---------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_remaining_is_the_last_that_fits(method):
    step = PrivacyEvent("gaussian", 2.0, "poisson", 0.02)
    done = [step.times(50), PrivacyEvent("gaussian", 20.0)]
    count = remaining(done, step, epsilon=1.0, delta=DELTA, method=method)
    assert epsilon(*done, step.times(count), method=method) <= 1.0
    assert epsilon(*done, step.times(count + 1), method=method) > 1.0


@pytest.mark.slow
def test_remaining_without_a_limit_or_room():
    assert remaining([], PrivacyEvent("gaussian", 0.0), epsilon=1.0, delta=DELTA) == 0
    assert remaining([PrivacyEvent("gaussian", 0.5)], STEP, epsilon=1.0, delta=DELTA) == 0
    event = PrivacyEvent("gaussian", 1e6, "poisson", 1e-9)
    assert remaining([], event, epsilon=1.0, delta=DELTA, method="rdp") == 10**9


@given(limit=st.integers(-1, 10**9), start=st.integers(0, 10**9))
@settings(max_examples=200, deadline=None, derandomize=True)  # a loaded machine is no error
def test_last_within_finds_any_step(limit, start):
    asked = []

    def cost(count):
        asked.append(count)
        return math.sqrt(count) if count <= limit else math.sqrt(count) + 1e5

    assert last_within(lambda count: 0.0 if cost(count) < 1e5 and count <= limit else 2.0, 1.0, start) == max(limit, 0)
    assert len(asked) < 120


# --- wrong usage -----------------------------------------------------------------------------------------------------
EPSILON = functools.partial(epsilon, STEP)
EVENT = functools.partial(PrivacyEvent, mechanism="gaussian", noise_multiplier=1.0)
NOISE = functools.partial(calibrate, target_epsilon=1.0, delta=1e-5, sample_rate=0.1, steps=10)


@pytest.mark.parametrize(("call", "changes", "message"), [
    (EPSILON, {"delta": 0}, "delta must be in"),
    (EPSILON, {"delta": 1.0}, "delta must be in"),
    (EPSILON, {"delta": math.nan}, "got nan"),
    (EPSILON, {"method": "gdp"}, "got 'gdp'"),
    (EPSILON, {"neighbouring": "similar"}, "got 'similar'"),
    (functools.partial(remaining, [], STEP, delta=DELTA), {"epsilon": 0.0}, "epsilon must be a number, above 0"),
    (NOISE, {"target_epsilon": 0.0}, "target_epsilon must be a number, above 0"),
    (NOISE, {"delta": 0.0}, "delta must be in"),
    (NOISE, {"sample_rate": 0.0}, "sample_rate must be in"),
    (NOISE, {"steps": 0}, "steps must be a whole number"),
    (NOISE, {"method": "clt"}, "got 'clt'"),
    (EVENT, {"mechanism": "exponential"}, "mechanism must be one of .* got 'exponential'"),
    (EVENT, {"noise_multiplier": -1.0}, "noise_multiplier must be 0 or more"),
    (EVENT, {"noise_multiplier": math.inf}, "finite, got inf"),
    (EVENT, {"noise_multiplier": math.nan}, "got nan"),
    (EVENT, {"noise_multiplier": "1"}, "noise_multiplier must be a number, got '1'"),
    (EVENT, {"sampling": "uniform"}, "sampling must be one of"),
    (EVENT, {"sampling": "poisson", "sample_rate": 0.0}, "sample_rate must be in"),
    (EVENT, {"sampling": "poisson", "sample_rate": 1.5}, "got 1.5"),
    (EVENT, {"sample_rate": 0.5}, "say how the records were drawn"),
    (EVENT, {"count": -1}, "count must be a whole number"),
    (EVENT, {"count": 1.0}, "got 1.0"),
    (EVENT, {"count": True}, "got True"),
    (EVENT, {"delta": 1.0}, "delta of an event"),
])  # fmt: skip
def test_values_without_meaning(call, changes, message):
    assert_raises(ConfigError, message, call, **changes)


def test_without_dp_accounting(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting.rdp.rdp_privacy_accountant", None)
    assert_raises(MissingDependency, r"pip install 'accelerant\[privacy\]'", epsilon, PrivacyEvent("gaussian", 1.2345))


# --- events: what they refuse, and that JSON gives them back ----------------------------------------------------------
events = st.builds(
    PrivacyEvent,
    st.sampled_from(["gaussian", "laplace", "discrete_gaussian", "discrete_laplace", "randomized_response"]),
    st.floats(0, 1e9),
    st.sampled_from(["poisson", "shuffled", "unknown"]),
    st.floats(0, 1, exclude_min=True),
    st.just(1),
    delta=st.floats(0, 0.5),
    note=st.text(max_size=5),
    source=st.text(max_size=5),
    secure=st.sampled_from([True, False, None]),
    idealised=st.booleans(),
)


@given(event=events)
@settings(max_examples=30, deadline=None, derandomize=True)  # a loaded machine is no error
def test_json_gives_the_same_event_back(event):
    assert PrivacyEvent.from_dict(json.loads(json.dumps(event.to_dict()))) == event
    assert PrivacyEvent.from_dict(json.loads(json.dumps(event_record(event)))) == event


def test_a_record_has_what_is_not_the_default():
    few = {"mechanism": "gaussian", "noise_multiplier": 0.5, "sampling": "none"}  # which never go without saying
    assert event_record(PrivacyEvent("gaussian", 0.5, count=7)) == few
    more = few | {"sampling": "poisson", "sample_rate": 0.25, "delta": 1e-9, "note": "a", "source": "b",
                  "secure": False, "idealised": True}  # fmt: skip
    assert event_record(PrivacyEvent(**more, count=7)) == more


@pytest.mark.parametrize(("found", "message"), [
    ({}, "an event has the fields"),
    ({"mechanism": "gaussian"}, "an event has the fields"),
    ({"mechanism": "gaussian", "noise_multiplier": 1, "more": 2}, "an event has the fields"),
    ({"mechanism": "gaussian", "noise_multiplier": -1}, "got -1"),
])  # fmt: skip
def test_other_fields_and_values_without_meaning_are_no_event(found, message):
    assert_raises(FormatError, message, PrivacyEvent.from_dict, found)


def test_amplified():
    assert PrivacyEvent("gaussian", 1.0, "poisson", 0.5).amplified
    assert not PrivacyEvent("gaussian", 1.0, "poisson", 1.0).amplified
    assert not PrivacyEvent("gaussian", 1.0, "shuffled", 0.5).amplified


# --- the noise for an epsilon: never too little, hardly too much ------------------------------------------------------
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
