"""The suite user: plain calls of ops, zk and Hugging Face's models beside torch's, with nothing raced or prepared."""

from __future__ import annotations

import json
import signal
import sys

import pytest
import torch.nn.functional as F

import accelerant.ops
from accelerant.bench import BenchmarkRecord, Environment, Row
from accelerant.bench.record import COMPILED, EAGER, STEP
from accelerant.bench.suite import SuiteRun, collect, run_suite
from accelerant.bench.suites import algebra
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, ConfigError
from accelerant.ops._cases import SampleInput, Subject
from accelerant.runtime import registry
from benchmarks import user
from benchmarks.user import UserSuite


@pytest.fixture
def cpu():
    return registry.find_device("cpu")


@pytest.fixture
def tiny(monkeypatch):
    """A row of gelu, and one attention."""
    attention = ("attention", SampleInput("x", ((1, 1, 8, 8),) * 3, {}), False)
    monkeypatch.setattr(user, "_OP_CASES", (("gelu", SampleInput("x", ((2, 8),)), True), attention))
    monkeypatch.setattr(user, "host_times_us", lambda calls: [call() and user.Timing.of([3.0, 4.0]) for call in calls])


def test_the_cases_are_unique_and_the_long_ones_come_last():
    names = list(user._cases(gpu=True))
    keys = [key for _, key, _ in names]
    assert len(set(keys)) == len(keys)
    assert all(key.startswith(f"{op} ") for op, key, _ in names)
    first = [op in user.MODELS for op, _, _ in names].index(True)
    assert {op for op, _, _ in names[first:]} == set(user.MODELS)
    assert "qwen3 4x1024 bf16 autocast, AdamW, clipping" in keys


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
    def broken(x):
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(user.OPS, "gelu", Subject(broken))
    record = run_suite(UserSuite(op=("gelu",), budget_s=0.0).resolve(cpu), cpu)
    ours, theirs = record.rows
    assert (theirs.runner, theirs.p50, theirs.note) == ("torch", None, "RuntimeError: no kernel image")
    assert ours.reached is False
    assert "did not run" in record.table()


def test_a_wrong_result_of_ours_is_an_error(cpu, tiny, monkeypatch):
    monkeypatch.setattr(accelerant.ops, "gelu", lambda x: F.gelu(x) + 1)
    with pytest.raises(AccelerantError, match=r"gelu 2x8 float32 forward .*: wrong: relative error"):
        run_suite(UserSuite(op=("gelu",), budget_s=0.0).resolve(cpu), cpu)
    monkeypatch.setattr(algebra, "first_wrong", lambda *_: "1 of 4 sums are wrong")
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


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        (UserSuite(op=("relu",)), "--op: no op 'relu'; there are attention, gelu"),
        (UserSuite(against=("jax",)), "--against: no peer 'jax'; there are torch, compile, liger"),
        (UserSuite(case=("gpt9",)), "--case: no case has 'gpt9'; there are attention 8x12x2048x64 float32"),
    ],
)
def test_wrong_options_are_refused(suite, message, cpu):
    with pytest.raises(ConfigError, match=message):
        suite.resolve(cpu)


def test_texts_choose_cases_and_the_rows_of_a_baseline(cpu):
    suite = UserSuite(case=("BERT", "babybear")).resolve(cpu)
    keys = [case.key for case in suite.cases(SuiteRun(cpu, BenchmarkRecord(Environment.of(cpu))))]
    assert keys == ["ntt babybear 2^10", "bert 2x16 bf16 autocast, AdamW, clipping"]
    assert suite.covers(Row("user", "ntt", "babybear 2^10, plain tensor", "accelerant", "accelerant"))
    assert not suite.covers(Row("user", "ntt", "goldilocks 2^10, plain tensor", "accelerant", "accelerant"))


@pytest.mark.slow
def test_caches_are_filled_in_processes_and_what_is_left_is_noted(cpu, tiny, monkeypatch):
    """Those of the calls before the first of them, those of the models after the calls; SIGTERM then keeps all rows."""
    from accelerant.bench.suites import precompile

    record, groups, rows = BenchmarkRecord(Environment.of(cpu)), [], []

    def fill(tasks, device, jobs, **options):
        groups.extend(tasks)
        rows.append([row.op for row in record.rows])
        if len(rows) == 2:
            signal.raise_signal(signal.SIGTERM)
        return "1 of 2 groups of cases were not precompiled"

    monkeypatch.setattr(precompile, "precompile", fill)
    suite = UserSuite(op=("gelu", "gpt2"), budget_s=0.0, workers=2).resolve(cpu)
    assert collect([suite], SuiteRun(cpu, record)).interrupted
    assert rows == [[], ["gelu", "gelu"]]
    key = "gpt2 2x16 bf16 autocast, AdamW, clipping"
    missing = f"2 of 3 cases not measured: {key}; gpt2 2x16 bf16 weights, AdamW, clipping"
    host, *notes = record.notes
    assert host.startswith("host: ")
    assert notes == [
        "1 of 2 groups of cases were not precompiled",
        f"stopped by an interruption; {missing}",
        "interrupted: these suites are not complete: user",
    ]
    ((task,), *_) = groups
    before = len(record.rows)
    task(cpu)  # as a process does
    assert len(record.rows) == before


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_is_trained_by_each_runner_and_resumed(tmp_path, capsys, monkeypatch):
    """Liger is absent here: its row says so, and the others are measured."""
    pytest.importorskip("transformers", reason="the models are those of transformers, an optional package")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    command = ["--device", "cpu", "--against", "torch", "--against", "liger", "--budget-seconds", "0", "--json"]
    command += ["--out", str(tmp_path / "run"), "--case", "gpt2 2x16 bf16 autocast, AdamW, clipping"]
    kept = []
    for more in ([], ["--resume", "--case", "babybear"]):
        with pytest.raises(SystemExit) as exit_:
            run_command(UserSuite, [*command, *more])
        assert not exit_.value.code
        kept.append(json.loads(capsys.readouterr().out))
    first, second = kept
    runners = {row["runner"]: row for row in first["rows"]}
    assert set(runners) == {"torch", "liger", "accelerant", STEP}
    assert "p50" not in runners["liger"] or runners["liger"]["p50"] is None
    assert "ModuleNotFoundError" in runners["liger"]["note"]
    for name in ("torch", "accelerant", STEP):
        assert runners[name]["wall_ms"] > 0
        assert "first loss 6.2" in runners[name]["note"]
    rows = {(row["op"], row["runner"]): row for row in second["rows"]}
    assert rows["gpt2", "accelerant"] == runners["accelerant"]  # not measured again
    assert rows["ntt", "accelerant"]["wall_ms"] > 0
    assert any("continued" in note for note in second["notes"])
    record = BenchmarkRecord.load(tmp_path / "run" / "record.json")
    assert "wall ms" in record.table()
    assert "wall_ms" in (tmp_path / "run" / "record.csv").read_text().splitlines()[0]
    assert "wall ms" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_a_patched_model_with_another_loss_is_an_error(cpu, monkeypatch):
    pytest.importorskip("transformers", reason="the models are those of transformers, an optional package")

    def broken(model, graph=None):
        model.lm_head.weight.data.mul_(9)

    monkeypatch.setattr(user.own_nn, "patch", broken)
    with pytest.raises(AccelerantError, match=r"gpt2 2x16 .*, accelerant: AccelerantError: the loss is"):
        run_suite(UserSuite(case=("gpt2 2x16 bf16 autocast",), budget_s=0.0, against=()).resolve(cpu), cpu)


def test_of_two_models_in_turns_one_that_fails_leaves_the_other_its_figure(cpu, monkeypatch):
    pytest.importorskip("transformers", reason="the models are those of transformers, an optional package")

    def measured(case, rows, losses, this):
        if any(row.runner == COMPILED for row in rows):
            raise RuntimeError("no memory for it")
        return [row.timed(user.Timing.of([3.0])) for row in rows]

    monkeypatch.setattr(user, "_measured_in_turns", measured)
    suite = UserSuite(case=("gpt2 2x16 bf16 autocast",), budget_s=0.0, against=("compile",))
    found = {row.runner: (row.p50, row.note) for row in run_suite(suite.resolve(cpu), cpu).rows}
    assert found["torch.compile"][0] == 3.0
    assert found[COMPILED] == (None, "RuntimeError: no memory for it")


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


@pytest.mark.gpu
def test_a_model_on_a_gpu_runs_by_each_runner():
    pytest.importorskip("transformers", reason="the models are those of transformers, an optional package")
    gpu = registry.find_device("cuda")
    suite = UserSuite(case=("gpt2 4x512 bf16 autocast, AdamW, clipping",), against=("torch",), budget_s=0.0, workers=1)
    rows = {row.runner: row for row in run_suite(suite.resolve(gpu), gpu).rows}
    assert {"torch", "accelerant", EAGER, STEP} <= set(rows) <= {"torch", "accelerant", EAGER, STEP, COMPILED}
    assert "CUDA graphs: " in rows["accelerant"].note
    assert all(row.p50 for row in rows.values())
