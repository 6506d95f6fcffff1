import re
from dataclasses import dataclass

import pytest
import torch

from accelerant.config import override
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation, force, race
from accelerant.runtime.dispatch.race import CandidateTimes, Tuned, tune
from clock import Clock
from processes import in_threads

CPU = torch.device("cpu")
CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(race, "time", CLOCK)


@dataclass(frozen=True, slots=True)
class Plan:
    rows: int
    warps: int = 4


class Launches:
    """Launches whose time is in the plan: 4 rows are the best."""

    def __init__(self):
        self.plans = []

    def __call__(self, plan):
        self.plans.append(plan)
        if plan.rows == 64:
            raise ValueError("too many rows")
        CLOCK.sleep({4: 1e-4}.get(plan.rows, 4e-3))


@pytest.fixture
def launches():
    return Launches()


@pytest.fixture
def folder(tmp_path):
    with override(cache_dir=tmp_path):
        yield tmp_path


def tuned(**more):
    return Tuned(
        "probe_fwd",
        default=lambda M, N: Plan(1),
        candidates=lambda M, N: [Plan(rows) for rows in (2, 4, 64)],
        **more,
    )


def test_the_rule_holds_where_nothing_was_measured(folder, launches):
    plan = tuned()
    assert plan(CPU, torch.float32, (8, 16), launches) == Plan(1)
    assert not launches.plans
    assert not list(folder.iterdir())


def test_the_best_is_found_once_for_a_bucket_and_kept(folder, launches):
    plan = tuned()
    with override(tune="first_use"):
        assert plan(CPU, torch.float32, (8, 16), launches) == Plan(4)
        measured = len(launches.plans)
        assert plan(CPU, torch.float32, (8, 16), launches) == Plan(4)
        assert plan(CPU, torch.float32, (7, 9), launches) == Plan(4)
        assert len(launches.plans) == measured
        assert plan(CPU, torch.float32, (7, 17), launches) == Plan(4)
        assert len(launches.plans) > measured
    (found, _) = race.choices().entries(CPU).items()
    assert found[0] == "plan probe_fwd float32 8 16"
    assert set(found[1].ms) == {repr(Plan(rows)) for rows in (1, 2, 4)}
    assert found[1].failed == {repr(Plan(64)): "ValueError: too many rows"}
    race._stores.clear()  # as another process would
    assert tuned()(CPU, torch.float32, (8, 16)) == Plan(4)
    assert tuned()(CPU, torch.float16, (8, 16)) == Plan(1)


def test_what_was_chosen_before_is_chosen_anew_after_measuring(folder, launches):
    plan = tuned()
    assert plan(CPU, torch.float32, (8, 16), launches) == Plan(1)
    with override(tune="first_use"):
        plan(CPU, torch.float32, (8, 16), launches)
    assert plan(CPU, torch.float32, (8, 16), launches) == Plan(4)


def test_a_plan_that_is_no_candidate_any_more_is_not_used(folder):
    key = race.key_of("plan probe_fwd", torch.float32, (8, 16))
    race.choices().keep(CPU, key, CandidateTimes({"Plan(rows=3, warps=4)": 0.1}))
    assert tuned()(CPU, torch.float32, (8, 16)) == Plan(1)
    race.choices().keep(CPU, key, CandidateTimes({repr(Plan(2)): 0.5, repr(Plan(1)): 0.505}))
    assert tuned()(CPU, torch.float32, (8, 16)) == Plan(1)  # the rule wins a tie


def test_a_bucket_of_its_own(folder, launches):
    plan = tuned(bucket=lambda M, N: (N,))
    with override(tune="first_use"):
        plan(CPU, torch.float32, (8, 17), launches)
        measured = len(launches.plans)
        plan(CPU, torch.float32, (999, 17), launches)
        assert len(launches.plans) == measured
        plan(CPU, torch.float32, (999, 18), launches)
        assert len(launches.plans) > measured


def test_nothing_is_measured_without_a_launch_or_with_determinism_or_while_tracing(folder, launches, monkeypatch):
    plan = tuned()
    with override(tune="first_use"):
        assert plan(CPU, torch.float32, (8, 16)) == Plan(1)
        plan.forget()
        with override(deterministic=True):
            assert plan(CPU, torch.float32, (8, 16), launches) == Plan(1)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            assert plan(CPU, torch.float32, (8, 16), launches) == Plan(1)
        assert not launches.plans
        assert plan(CPU, torch.float32, (8, 16), launches) == Plan(4)


def test_where_no_plan_can_be_launched_the_rule_holds(folder):
    def broken(plan):
        raise ValueError(plan)

    with override(tune="first_use"):
        assert tuned()(CPU, torch.float32, (8, 16), broken) == Plan(1)
    assert not list(folder.iterdir())


def test_tune_measures_implementations_and_their_plans(folder, launches):
    plan = tuned()

    def run(x):
        launches(plan(x.device, x.dtype, tuple(x.shape), launches))

    op = Operation(
        "tuned_probe",
        (Implementation("own", run, own=True), Implementation("torch", lambda x: CLOCK.sleep(4e-3))),
        cost=lambda case: Cost(1, 1),
    )
    x = torch.ones(8, 16)
    case = Case(CPU, x.dtype, x.shape)
    with force(tuned_probe="torch"):
        op(case, x)
    (decision,) = tune(op, case, x).decisions
    assert decision.implementation == "own"
    assert re.match(r"raced \d+\.\d{4} ms against torch \d+\.\d{4} ms", decision.reason), decision.reason
    launches.plans.clear()
    op(case, x)
    assert launches.plans == [Plan(4)]


def test_threads_get_a_plan_whoever_measures(folder, launches):
    plan = tuned()
    found = []

    def work():
        with override(tune="first_use", cache_dir=folder):
            found.append(plan(CPU, torch.float32, (8, 16), launches))

    in_threads([work] * 4)
    assert set(found) <= {Plan(1), Plan(4)}
    assert Plan(4) in found
