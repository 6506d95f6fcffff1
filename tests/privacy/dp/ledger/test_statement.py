"""A statement says what a reviewer needs, in the same words in each form."""

import json
import math
import re

import pytest

from accelerant.errors import ConfigError
from accelerant.privacy.dp.ledger import Budget, PrivacyLedger, _meaning
from accelerant.privacy.dp.ledger.accounting import PrivacyEvent, spent
from refusals import assert_raises

STEP = PrivacyEvent(
    "discrete_gaussian",
    4.0,
    "poisson",
    0.01,
    50,
    delta=1e-12,
    note="warm-up",
    source="chacha20",
    secure=True,
    idealised=True,
)
INSECURE = PrivacyEvent("gaussian", 8.0, "shuffled", 0.01, 2, source="philox gaussian", secure=False)


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "privacy.jsonl"
    with PrivacyLedger(path, unit="patient", dataset="ward 7") as first:
        first.record(STEP)
    with PrivacyLedger(path, unit="patient", budget=Budget(epsilon=3.0, delta=1e-6, method="rdp")) as found:
        found.record(INSECURE)
        yield found


def test_numbers(ledger):
    found = ledger.statement(1e-5)
    cost = spent([STEP, INSECURE], 1e-5)
    assert (found.epsilon, found.charged_delta, found.delta) == (cost.epsilon, cost.charged, 1e-5)
    assert found.epsilon_rdp == spent([STEP, INSECURE], 1e-5, method="rdp").epsilon >= found.epsilon
    assert found.events == (STEP, INSECURE)
    assert found.budget == (3.0, 1e-6, "rdp")
    assert [(run["releases"], run["closed"]) for run in found.runs] == [(50, True)]
    assert found.versions["dp-accounting"]


def test_without_a_delta_the_last_chosen_one_is_stated_and_all_are_listed(tmp_path):
    """Chosen by a budget or by `describe`; the file keeps both."""
    path = tmp_path / "privacy.jsonl"
    event = PrivacyEvent("gaussian", 20.0)
    with PrivacyLedger(path, budget=Budget(epsilon=2.0, delta=1e-6)) as ledger:
        ledger.record(event)
        assert (ledger.delta, ledger.statement().delta, ledger.statement().others) == (1e-6, 1e-6, ())
        ledger.describe(delta=1e-7, units=12345)
        assert ledger.delta == 1e-7
    with PrivacyLedger(path) as ledger:
        ledger.describe(delta=1e-8, units=99)
        ledger.describe(delta=1e-7)
    for found in (ledger, PrivacyLedger.read(path)):
        assert found.deltas == (1e-6, 1e-8, 1e-7)
        statement = found.statement()
        assert (statement.delta, statement.budget, statement.units) == (1e-7, (2.0, 1e-6, "pld"), 12000)
        assert statement.epsilon == found.epsilon() == spent([event], 1e-7).epsilon
        assert statement.others == tuple((delta, spent([event], delta).epsilon) for delta in (1e-6, 1e-8))
        assert "No delta" not in str(statement)
    plain = PrivacyLedger()
    assert (plain.delta, plain.statement().delta, plain.epsilon()) == (None, 1e-5, 0.0)
    assert "No delta was chosen" in plain.statement().remarks[0]
    assert not any("No delta" in remark for remark in plain.statement(1e-5).remarks)


@pytest.mark.parametrize("given", [{"delta": 0.0}, {"delta": 1.0}, {"units": 0}, {"delta": 1e-7, "units": 2.5}])
def test_what_cannot_be_described_leaves_the_ledger_as_it_was(tmp_path, given):
    with PrivacyLedger(tmp_path / "privacy.jsonl") as ledger:
        before = ledger.path.read_bytes()
        assert_raises(ConfigError, next(reversed(given)), ledger.describe, **given)
        assert (ledger.path.read_bytes(), ledger.delta, ledger.units) == (before, None, 0)
    assert_raises(ConfigError, "is closed", ledger.describe, delta=1e-5)


@pytest.mark.parametrize(("epsilon", "right"), [(0.0, "50.1"), (3.0, "95.3"), (8.0, "99.967"), (15.0, "99.99997")])
def test_a_weak_bound_is_no_certainty(epsilon, right):
    assert f" is right in at most {right}% of cases" in _meaning(epsilon, 1e-5, "it")


def test_a_lawyer_reads_what_it_means():
    """The bound in one sentence, units, several rows of a person, what is covered, the idealisation, tuning."""
    ledger = PrivacyLedger(unit="patient")
    ledger.describe(delta=1e-7, units=1437)
    ledger.record(PrivacyEvent("gaussian", 20.0, idealised=True))
    statement = ledger.statement()
    epsilon, text = statement.epsilon, str(statement)
    factor, right = math.exp(epsilon), 100 * (math.exp(epsilon) + 1e-7) / (1 + math.exp(epsilon))
    assert "whether one patient is in the data or not changes the probability of each outcome" in statement.meaning
    stated = re.search(r"e\^epsilon = ([\d.]+), .* in at most ([\d.]+)% of cases", statement.meaning)
    assert factor <= float(stated[1]) < factor * 1.01
    assert right <= float(stated[2]) < right + 0.11
    assert "Number of units: about 1,400\n" in text
    double = re.search(r"With 2: epsilon ([\d.]+) at delta ([\d.e-]+)", text)
    assert float(double[1]) == pytest.approx(2 * epsilon, rel=1e-5)
    assert 1e-7 * (1 + factor) <= float(double[2]) < 1.02e-7 * (1 + factor)
    for said in (
        "Covered:\n  The results of the events above: a training's parameters after each step",
        "Not covered:\n  Losses, accuracies, norms and other figures that were measured on the data without noise",
        "held out",
        "trial runs that tuned settings",
        "the proof is for exact sums; this run used floating point",
    ):
        assert said in text, said
    assert "no bound on what the results reveal" in str(infinite())
    assert json.loads(infinite().to_json())["others"] == [[1e-06, "inf"]]


def infinite():
    ledger = PrivacyLedger(budget=None)
    ledger.describe(delta=1e-6)
    ledger.record(PrivacyEvent("gaussian", 0.0))
    return ledger.statement(1e-5)


def test_a_delta_not_below_one_over_the_units_is_said():
    ledger = PrivacyLedger()
    ledger.describe(delta=1e-3, units=1000)
    assert "Delta 0.001 is not below one over the about 1,000 units" in str(ledger.statement())
    assert "is not below one" not in str(ledger.statement(9e-4))


def test_numbers_are_not_rounded_to_others():
    """A delta or a sampling rate rounded down, or noise rounded up, would be of a mechanism that costs more."""
    delta, rate, noise = 1.23456749e-7, 0.012345674, 1.23456751
    ledger = PrivacyLedger(budget=Budget(epsilon=1.2345675, delta=delta))
    ledger.record(PrivacyEvent("gaussian", 1000 * noise, "poisson", rate))
    text = str(ledger.statement())
    for said in (f"at delta {delta!r}", f"probability {rate!r}", f"multiplier {1000 * noise!r}", "epsilon 1.2345675 "):
        assert said in text, said


@pytest.mark.parametrize("form", [str, lambda statement: statement.to_markdown()])
def test_text_says_all(ledger, form):
    text = form(ledger.statement())
    for said in (
        "patient",
        "add-or-remove-one: neighbouring data sets differ by one patient added or removed",
        "ward 7",
        "at delta 1e-06",
        "epsilon 3 at delta 1e-06 (rdp)",
        "50 x discrete_gaussian, noise multiplier 4",
        "each patient in each draw independently, probability 0.01",
        "noise chacha20, secure",
        "noise philox gaussian, not secure",
        "delta charged each 1e-12",
        "idealised sum",
        "warm-up",
        "without amplification",
        "ended in order",
        "Not secure: noise of philox gaussian",
        "Idealised sum: the proof is for exact sums; this run used floating point",
        "The discrete Gaussian is accounted as the continuous one",
        "None of this code has been audited",
        "52 releases, 2 kind(s)",
    ):
        assert said in text, said


def test_json_has_the_same(ledger):
    statement = ledger.statement()
    found = json.loads(statement.to_json())
    assert found["epsilon"] == statement.epsilon
    assert [PrivacyEvent.from_dict(event) for event in found["events"]] == list(statement.events)
    assert found["remarks"] == list(statement.remarks)
    assert found["unit"] == "patient"


def test_no_noise():
    ledger = PrivacyLedger()
    ledger.record(PrivacyEvent("gaussian", 0.0))
    found = ledger.statement(1e-5)
    assert found.epsilon == math.inf
    assert "have no noise" in found.reason
    assert "infinite at delta 1e-05 (1 releases (gaussian) have no noise" in str(found)
    assert json.loads(found.to_json())["epsilon"] == "inf"
    assert any("neither has the total" in remark for remark in found.remarks)


def test_remarks_are_only_of_what_was_done():
    ledger = PrivacyLedger()
    ledger.record(PrivacyEvent("gaussian", 4.0, secure=True))
    text = str(ledger.statement(1e-5))
    for absent in ("Not secure", "Idealised", "shuffled", "discrete", "Several data sets", "not recorded whether"):
        assert absent not in text
    ledger.record(PrivacyEvent("discrete_laplace", 4.0))
    text = str(ledger.statement(1e-5))
    assert "by its pure epsilon" in text
    assert "not recorded whether their noise is secure" in text


def test_a_run_that_was_not_closed(tmp_path):
    path = tmp_path / "privacy.jsonl"
    ledger = PrivacyLedger(path)
    ledger.record(STEP)
    assert "not closed: all that it reserved is counted" in str(PrivacyLedger.read(path).statement(1e-5))


def test_markdown_is_not_broken_by_names(tmp_path):
    with PrivacyLedger(tmp_path / "a", dataset="a|b") as ledger:
        assert "| Data | a\\|b |" in ledger.statement(1e-5).to_markdown()


def test_delta_without_meaning():
    assert_raises(ConfigError, "delta must be in", lambda: PrivacyLedger().statement(2.0))
