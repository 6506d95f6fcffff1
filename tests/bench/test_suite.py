"""Cases of a suite: the time limit, resuming with a journal, failures; and several suites in one record."""

import json
import signal
import time
from dataclasses import dataclass

import pytest

from accelerant.bench.record import BenchmarkRecord, Environment, Journal, Row
from accelerant.bench.suite import Clock, SuiteCase, SuiteRun, collect, measure_cases
from accelerant.errors import AccelerantError, DeviceLost, FormatError
from accelerant.runtime import registry
from refusals import assert_raises


def new_record():
    return BenchmarkRecord(Environment.of(registry.find_device("cpu")))


def run_cases(record, cases, **options):
    measure_cases("suite", cases, SuiteRun(registry.find_device("cpu"), record, **options))


def case(key, seen, *, fails=None):
    def measure(run):
        record = run.record
        seen.append(key)
        run.progress(f"measuring {key}")
        record.rows.append(Row("suite", key, "case", "accelerant", "own", p20=1.0, p50=2.0, p80=3.0))
        record.notes.append(f"note of {key}")
        if fails:
            raise fails("it came out wrong\nand much more")

    return SuiteCase(key, measure)


def test_every_case_is_measured_and_said():
    record, seen, said = new_record(), [], []
    run_cases(record, [case("a", seen), case("b", seen)], progress=said.append)
    assert seen == [row.op for row in record.rows] == ["a", "b"]
    assert said == ["[1/2] measuring a", "[2/2] measuring b"]


def test_none_is_begun_after_the_limit():
    record, seen = new_record(), []
    run_cases(record, [case("a", seen), case("b", seen)], until=time.monotonic() - 1)
    assert not seen
    assert record.notes == ["stopped by its time limit; 2 of 2 cases not measured: a; b"]


def test_a_run_goes_on_where_it_was_stopped(tmp_path):
    path, seen = tmp_path / "rows.jsonl", []
    first = new_record()
    run_cases(first, [case("a", seen)], journal=Journal(path, first, resume=False))
    with path.open("ab") as file:
        file.write(b'{"done": "b", "ro')  # killed while it wrote
    second = new_record()
    journal = Journal(path, second, resume=True)
    run_cases(second, [case("a", seen), case("b", seen)], journal=journal)
    assert seen == ["a", "b"]
    assert [row.op for row in second.rows] == ["a", "b"]
    assert "note of a" in second.notes
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("done") for line in lines] == [None, "a", "b"]
    path.write_bytes(b"something else\n")
    assert_raises(FormatError, None, Journal, path, new_record(), resume=True)


def test_a_run_goes_on_after_a_torn_first_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"journal": 1, "env')  # killed while it wrote
    for _ in range(2):
        record = new_record()
        run_cases(record, [case("a", [])], journal=Journal(path, record, resume=True))
        assert [row.op for row in record.rows] == ["a"]


def test_a_case_named_twice_is_measured_once():
    record, seen = new_record(), []
    run_cases(record, [case("a", seen), case("a", seen)])
    assert seen == ["a"]


def test_a_lost_device_leaves_the_cases_after_it_to_a_run_that_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(type(registry.create("cpu")), "lost", lambda self, error: DeviceLost(f"gone: {error}"))
    path, seen = tmp_path / "rows.jsonl", []
    cases = [case("a", seen, fails=RuntimeError), case("b", seen), case("c", seen)]
    record = new_record()
    with pytest.raises(DeviceLost, match="gone: it came out wrong"):
        run_cases(record, cases, journal=Journal(path, record, resume=False))
    assert seen == ["a"]
    assert record.notes[-1] == "stopped by the loss of the device; 2 of 3 cases not measured: b; c"
    monkeypatch.undo()
    again = new_record()
    with pytest.raises(AccelerantError, match="a: RuntimeError: it came out wrong"):  # its row stays, b and c are made
        run_cases(again, cases, journal=Journal(path, again, resume=True))
    assert seen == ["a", "b", "c"]


@pytest.mark.parametrize("kind", [AccelerantError, RuntimeError])
def test_a_failure_leaves_its_rows_and_the_cases_after_it(kind, tmp_path):
    path, seen = tmp_path / "rows.jsonl", []
    cases = [case("a", seen, fails=kind), case("b", seen)]
    record = new_record()
    assert_raises(kind, "it came out wrong", run_cases, record, cases, journal=Journal(path, record, resume=False))
    assert [(row.op, row.case, row.note) for row in record.rows] == [
        ("a", "case", ""),
        ("a", "failed", f"{kind.__name__}: it came out wrong"),
        ("b", "case", ""),
    ]
    again = new_record()
    with pytest.raises(AccelerantError, match=f"a: {kind.__name__}: it came out wrong"):
        run_cases(again, cases, journal=Journal(path, again, resume=True))
    assert seen == ["a", "b"]


# --- several suites --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class FakeSuite:
    name: str
    add: object

    def measure(self, run):
        self.add(run.record)


def collected(**suites):
    record = new_record()
    run = SuiteRun(registry.find_device("cpu"), record)
    return record, collect([FakeSuite(name, add) for name, add in suites.items()], run)


def adds(name):
    return lambda record: record.rows.append(measured(name))


def measured(name):
    return Row(name, "op", "case", "accelerant", "own", p20=1.0, p50=1.0, p80=1.0)


def test_a_suite_that_fails_costs_the_others_nothing():
    def breaks(record):
        record.rows.append(measured("first"))
        raise ValueError("no such thing\nand more")

    record, found = collected(first=breaks, second=adds("second"))
    assert [(row.suite, row.p50, row.note) for row in record.rows] == [
        ("first", 1.0, ""),
        ("first", None, "ValueError: no such thing"),
        ("second", 1.0, ""),
    ]
    assert list(found.failures) == ["first"]
    assert not found.interrupted
    assert "the first suite failed" in record.table()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured_and_names_what_was_not(number):
    def interrupted(record):
        record.rows.append(measured("second"))
        signal.raise_signal(number)

    record, found = collected(first=adds("first"), second=interrupted, third=adds("third"))
    assert [row.suite for row in record.rows] == ["first", "second"]
    assert found.interrupted
    assert record.notes == ["interrupted: these suites are not complete: second, third"]


def test_a_clock_counts_nested_activities_once():
    clock, began = Clock(), time.perf_counter()
    with clock.measure("outer"):
        time.sleep(0.02)
        with clock.measure("inner"):
            time.sleep(0.03)
    took = time.perf_counter() - began
    assert clock.seconds["outer"] >= 0.02
    assert clock.seconds["inner"] >= 0.03
    assert clock.seconds["outer"] + clock.seconds["inner"] <= took
