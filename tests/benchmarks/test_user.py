"""The suite user: plain calls of ops and zk beside torch's, with nothing raced or prepared."""

import json
from unittest.mock import Mock

import pytest
import torch.nn.functional as F

import accelerant.ops
from accelerant.bench import BenchmarkRecord, Environment, Row, suites
from accelerant.bench.suite import SuiteRun, run_suite
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, ConfigError
from accelerant.ops.registry import SampleInput, Subject
from accelerant.runtime import registry
from benchmarks import user
from benchmarks.user import UserSuite


@pytest.fixture
def tiny(monkeypatch):
    """A row of gelu, and one attention."""
    attention = ("attention", SampleInput("x", ((1, 1, 8, 8),) * 3, {}), False)
    monkeypatch.setattr(user, "_OP_CASES", (("gelu", SampleInput("x", ((2, 8),)), True), attention))
    monkeypatch.setattr(user, "host_times_us", lambda calls: [call() and user.Timing.of([3.0, 4.0]) for call in calls])


def test_the_cases_are_unique():
    keys = [key for _, key, _ in user._cases(gpu=True)]
    assert len(set(keys)) == len(keys)
    assert all(key.startswith(f"{op} ") for op, key, _ in user._cases(gpu=True))


def test_ops_are_measured_beside_torch_by_wall_and_by_host(cpu, tiny):
    suite = UserSuite(op=("gelu", "attention"), budget_s=0.0).resolve(cpu)
    rows = run_suite(suite, cpu).rows
    assert [(row.op, row.case.split()[-2:], row.unit, row.runner) for row in rows] == [
        ("gelu", ["host", "time"], "us", "accelerant"), ("gelu", ["host", "time"], "us", "torch"),
        *(("attention", ["float32", way], "ms", who) for who in ("accelerant", "torch") for way in
          ("forward", "backward")),
    ]  # fmt: skip
    for row in rows:
        assert row.wall_ms > 0
        assert row.cold_ms > 0
        assert row.error < 1e-5
        assert suite.covers(row)
        assert (row.reached is None) is (row.runner == "torch")
    assert (rows[0].p50, rows[0].timing) == (3.5, "host, back to back in turns")
    assert rows[2].p50 == rows[2].wall_ms


def test_a_peer_that_fails_has_its_reason_and_no_time(cpu, tiny, monkeypatch):
    monkeypatch.setitem(user.OPS, "gelu", Subject(Mock(side_effect=RuntimeError("no kernel image"))))
    record = run_suite(UserSuite(op=("gelu",), budget_s=0.0).resolve(cpu), cpu)
    ours, theirs = record.rows
    assert (theirs.runner, theirs.p50, theirs.note) == ("torch", None, "RuntimeError: no kernel image")
    assert ours.reached is False
    assert "did not run" in record.table()


def test_a_wrong_result_of_ours_is_an_error(cpu, tiny, monkeypatch):
    monkeypatch.setattr(accelerant.ops, "gelu", lambda x: F.gelu(x) + 1)
    with pytest.raises(AccelerantError, match=r"gelu 2x8 float32 forward .*: wrong: relative error"):
        run_suite(UserSuite(op=("gelu",), budget_s=0.0).resolve(cpu), cpu)
    monkeypatch.setattr(suites, "first_wrong", lambda *_: "1 of 4 sums are wrong")
    with pytest.raises(AccelerantError, match=r"field_add goldilocks .*: 1 of 4 sums are wrong"):
        run_suite(UserSuite(op=("field_add",), budget_s=0.0).resolve(cpu), cpu)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["msm", "ntt", "field_add", "first call"])
def test_exact_arithmetic_is_measured_by_its_plain_calls(op, cpu, monkeypatch):
    monkeypatch.setattr(user, "_PROCESSES", 1)
    suite = UserSuite(op=(op,), budget_s=0.0).resolve(cpu)
    rows = run_suite(suite, cpu).rows
    assert rows
    for row in rows:
        assert suite.covers(row)
        assert row.p50 == row.wall_ms > 0
        assert row.target is None  # an H200 has one


@pytest.mark.parametrize(("suite", "message"), [
    (UserSuite(op=("relu",)), "--op: no op 'relu'; there are attention, gelu"),
    (UserSuite(against=("jax",)), "--against: no peer 'jax'; there are torch, compile"),
    (UserSuite(case=("gpt9",)), "--case: no case has 'gpt9'; there are attention 8x12x2048x64 float32"),
])  # fmt: skip
def test_wrong_options_are_refused(suite, message, cpu):
    with pytest.raises(ConfigError, match=message):
        suite.resolve(cpu)


def test_texts_choose_cases_and_the_rows_of_a_baseline(cpu):
    suite = UserSuite(case=("FIRST", "babybear")).resolve(cpu)
    keys = [case.key for case in suite.cases(SuiteRun(cpu, BenchmarkRecord(Environment.of(cpu))))]
    assert keys == ["ntt babybear 2^10", "first call msm"]
    assert suite.covers(Row("user", "ntt", "babybear 2^10, plain tensor", "accelerant", "accelerant"))
    assert not suite.covers(Row("user", "ntt", "goldilocks 2^10, plain tensor", "accelerant", "accelerant"))


@pytest.mark.slow
def test_a_run_is_resumed_after_caches_are_filled_in_processes(cpu, tiny, tmp_path, capsys, monkeypatch):
    from accelerant.bench import suites

    groups = []

    def fill(tasks, device, jobs, **options):
        groups.extend(tasks)
        return "1 of 2 groups of cases were not precompiled"

    monkeypatch.setattr(suites, "precompile", fill)
    command = ["--device", "cpu", "--budget-seconds", "0", "--json", "--out", str(tmp_path), "--workers", "2"]
    kept = []
    for more in (["--op", "gelu"], ["--op", "gelu", "--op", "attention", "--resume"]):
        with pytest.raises(SystemExit) as exit_:
            run_command(UserSuite, [*command, *more])
        assert not exit_.value.code
        kept.append(json.loads(capsys.readouterr().out))
    first, second = kept
    assert "1 of 2 groups of cases were not precompiled" in first["notes"]
    assert any("continued" in note for note in second["notes"])
    assert [row for row in second["rows"] if row["op"] == "gelu"] == first["rows"]  # not measured again
    assert any(row["op"] == "attention" and row["wall_ms"] > 0 for row in second["rows"])
    assert "wall_ms" in (tmp_path / "record.csv").read_text().splitlines()[0]
    (task,), *_ = groups
    task(cpu)  # as a process does


@pytest.mark.gpu
def test_a_gpu_has_wall_and_device_times_and_targets():
    gpu = registry.find_device("cuda")
    suite = UserSuite(op=("gelu", "ntt"), against=("torch",), budget_s=0.02, workers=1).resolve(gpu)
    record = run_suite(suite, gpu)
    for row in record.rows:
        assert row.wall_ms > 0
        assert row.back_to_back_ms > 0
        if row.op == "ntt":
            assert row.device_ms > 0  # from cold caches: it may be above the wall time, which is from warm ones
    head = record.cells()[0]
    assert {"wall ms", "back to back ms", "device ms", "reached"} <= set(head)
