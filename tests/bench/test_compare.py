from dataclasses import replace

import pytest

from accelerant.bench import BenchmarkRecord, Environment, Row, compare
from accelerant.errors import FormatError
from accelerant.runtime import registry
from refusals import assert_raises

ROW = Row("neural", "gelu", "4x4 float32 forward", "accelerant", "triton (own)", p20=0.99, p50=1.0, p80=1.01)


def record(*rows):
    return BenchmarkRecord(Environment.of(registry.find_device("cpu")), {}, list(rows))


def at(p50, spread=0.01, **changes):
    return replace(ROW, p20=p50 * (1 - spread), p50=p50, p80=p50 * (1 + spread), **changes)


def verdict(before, now):
    return compare(record(before), record(now)).changes[0].verdict


@pytest.mark.sample(3)
@pytest.mark.parametrize(("before", "now", "expected"), [
    (at(1.0), at(1.04), "same"),
    (at(1.0), at(1.06), "slower"),
    (at(1.0), at(0.94), "faster"),
    (at(1.0), at(0.96), "same"),
    (at(1.0, 0.1), at(1.3, 0.1), "unclear"),
    (at(1.0, 0.1), at(1.7, 0.1), "slower"),
    (at(1.0, 0.0), at(1.3, 0.2), "unclear"),
    (at(1.0, 0.2), at(1.3, 0.0), "unclear"),
    (at(1.0, 0.3), at(0.8, 0.0), "same"),
    (at(1.0, 0.9), at(1.9, 0.9), "unclear"),
    (replace(ROW, p50=0.01), at(1.0), "slower"),
    (at(2.0, unit="x", better="higher"), at(1.0, unit="x", better="higher"), "slower"),
    (at(1.0, unit="x", better="higher"), at(2.0, unit="x", better="higher"), "faster"),
    (at(1.0), replace(ROW, p20=None, p50=None, p80=None, note="broken"), "missing"),
    (at(1.0), at(1.0, unit="us"), "missing"),
    (at(1.0, runner="device"), at(2.0, runner="device"), "slower"),
])  # fmt: skip
def test_the_spread_of_both_runs_decides(before, now, expected):
    assert verdict(before, now) == expected


def test_a_row_without_its_spread_is_judged_by_its_median():
    assert verdict(replace(ROW, p20=None, p80=None), replace(ROW, p50=1.06, p20=None, p80=None)) == "slower"


def test_the_table_names_regressions_first_and_counts_the_rest():
    before = record(
        at(1.0), at(1.0, op="softmax"), at(1.0, op="matmul"), at(1.0, op="add", suite="algebra"),
        at(1.0, op="erf"), at(1.0, runner="torch"),
    )  # fmt: skip
    now = record(at(1.5), at(0.5, op="softmax"), at(1.0, op="matmul"), at(1.0, op="new"), at(9.0, runner="torch"))
    found = compare(before, now, asked=lambda row: row.suite == "neural")
    lines = found.table().splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["verdict", "slower", "missing", "faster"]
    assert "1.50x" in lines[1]
    assert "erf" in lines[2]
    assert "not run" in lines[2]
    counts = "1 slower, 1 missing, 1 faster, 1 same, 1 not in the baseline, 1 of the baseline not asked for"
    assert lines[4:] == [counts]
    assert [change.before.op for change in found.regressions] == ["gelu", "erf"]


def test_why_a_row_did_not_run_stands_in_the_table():
    broken = replace(ROW, p20=None, p50=None, p80=None, note="LaunchError: refused")
    assert "LaunchError: refused" in compare(record(ROW), record(broken)).table()


def test_records_of_different_devices_and_empty_baselines_are_not_compared():
    other = record(ROW)
    other.environment = replace(other.environment, device="abacus")
    assert_raises(FormatError, "abacus", compare, record(ROW), other)
    assert_raises(FormatError, "no measured row of ours", compare, record(replace(ROW, runner="torch")), record(ROW))
