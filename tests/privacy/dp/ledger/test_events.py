"""Events: what they refuse, and that JSON gives them back."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerant.errors import ConfigError, FormatError
from accelerant.privacy.dp.ledger.accounting import PrivacyEvent
from accelerant.privacy.dp.ledger.journal import event_record


@pytest.mark.parametrize(("fields", "message"), [
    ({"mechanism": "exponential"}, "mechanism must be one of .* got 'exponential'"),
    ({"noise_multiplier": -1.0}, "noise_multiplier must be 0 or more"),
    ({"noise_multiplier": math.inf}, "finite, got inf"),
    ({"noise_multiplier": math.nan}, "got nan"),
    ({"noise_multiplier": "1"}, "noise_multiplier must be a number, got '1'"),
    ({"sampling": "uniform"}, "sampling must be one of"),
    ({"sampling": "poisson", "sample_rate": 0.0}, "sample_rate must be in"),
    ({"sampling": "poisson", "sample_rate": 1.5}, "got 1.5"),
    ({"sample_rate": 0.5}, "say how the records were drawn"),
    ({"count": -1}, "count must be a whole number"),
    ({"count": 1.0}, "got 1.0"),
    ({"count": True}, "got True"),
    ({"delta": 1.0}, "delta of an event"),
])  # fmt: skip
def test_fields_without_meaning(fields, message):
    with pytest.raises(ConfigError, match=message):
        PrivacyEvent(**({"mechanism": "gaussian", "noise_multiplier": 1.0} | fields))


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
    with pytest.raises(FormatError, match=message):
        PrivacyEvent.from_dict(found)


def test_amplified():
    assert PrivacyEvent("gaussian", 1.0, "poisson", 0.5).amplified
    assert not PrivacyEvent("gaussian", 1.0, "poisson", 1.0).amplified
    assert not PrivacyEvent("gaussian", 1.0, "shuffled", 0.5).amplified
