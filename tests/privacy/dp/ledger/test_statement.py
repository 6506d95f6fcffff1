"""A statement says what a reviewer needs, in the same words in each form."""

import json
import math

import pytest

from accelerant.errors import ConfigError
from accelerant.privacy.dp.ledger import Budget, Ledger
from accelerant.privacy.dp.ledger.accounting import spent
from accelerant.privacy.dp.ledger.events import Event

STEP = Event(
    "discrete_gaussian", 4.0, "poisson", 0.01, 50, 1e-12, "warm-up", source="chacha20", secure=True, idealised=True
)
INSECURE = Event("gaussian", 8.0, "shuffled", 0.01, 2, source="philox gaussian", secure=False)


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "privacy.jsonl"
    with Ledger(path, unit="patient", dataset="ward 7") as first:
        first.record(STEP)
    with Ledger(path, unit="patient", budget=Budget(3.0, 1e-6, "rdp")) as found:
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


def test_delta_is_the_budgets_where_none_is_given(ledger):
    assert ledger.statement().delta == 1e-6
    plain = Ledger().statement()
    assert plain.delta == 1e-5
    assert "No delta was chosen" in plain.remarks[0]
    assert not any("No delta" in remark for remark in Ledger().statement(1e-5).remarks)


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
        "Idealised sum: the sum before the noise was in floating point",
        "The discrete Gaussian is accounted as the continuous one",
        "None of this code has been audited",
        "52 releases, 2 kind(s)",
    ):
        assert said in text, said


def test_json_has_the_same(ledger):
    statement = ledger.statement()
    found = json.loads(statement.to_json())
    assert found["epsilon"] == statement.epsilon
    assert [Event.from_dict(event) for event in found["events"]] == list(statement.events)
    assert found["remarks"] == list(statement.remarks)
    assert found["unit"] == "patient"


def test_no_noise():
    ledger = Ledger()
    ledger.record(Event("gaussian", 0.0))
    found = ledger.statement(1e-5)
    assert found.epsilon == math.inf
    assert "have no noise" in found.reason
    assert "infinite at delta 1e-05 (1 releases (gaussian) have no noise" in str(found)
    assert json.loads(found.to_json())["epsilon"] == "inf"
    assert any("neither has the total" in remark for remark in found.remarks)


def test_remarks_are_only_of_what_was_done():
    ledger = Ledger()
    ledger.record(Event("gaussian", 4.0, secure=True))
    text = str(ledger.statement(1e-5))
    for absent in ("Not secure", "Idealised", "shuffled", "discrete", "Several data sets", "not recorded whether"):
        assert absent not in text
    ledger.record(Event("discrete_laplace", 4.0))
    text = str(ledger.statement(1e-5))
    assert "by its pure epsilon" in text
    assert "not recorded whether their noise is secure" in text


def test_a_run_that_was_not_closed(tmp_path):
    path = tmp_path / "privacy.jsonl"
    ledger = Ledger(path)
    ledger.record(STEP)
    assert "not closed: all that it reserved is counted" in str(Ledger.read(path).statement(1e-5))


def test_markdown_is_not_broken_by_names(tmp_path):
    with Ledger(tmp_path / "a", dataset="a|b") as ledger:
        assert "| Data | a\\|b |" in ledger.statement(1e-5).to_markdown()


def test_delta_without_meaning():
    with pytest.raises(ConfigError, match="delta must be in"):
        Ledger().statement(2.0)


@pytest.mark.slow
def test_without_a_delta_that_of_the_last_budget_is_shown(tmp_path):
    path = tmp_path / "privacy.jsonl"
    for budget in (Budget(2.0, 1e-6), Budget(3.0, 1e-7), None):
        with Ledger(path, budget=budget) as ledger:
            ledger.record(Event("gaussian", 20.0, "poisson", 0.01))
    statement = Ledger.read(path).statement()
    assert (statement.delta, statement.budget) == (1e-7, (3.0, 1e-7, "pld"))
    assert "No delta was chosen" not in str(statement)
    assert Ledger.read(path).statement(1e-5).delta == 1e-5
