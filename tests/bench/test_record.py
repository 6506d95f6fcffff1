from __future__ import annotations

import functools
import json
import os
import subprocess
from dataclasses import replace

import pytest
import torch

from accelerant.bench import BenchmarkRecord, Environment, Row, host_time_us, time_ms, wall_ms
from accelerant.bench.record import _commit
from accelerant.bench.timer import Timing, back_to_back_ms, back_to_back_times_ms, covers, host_times_us
from accelerant.errors import FormatError
from accelerant.runtime import registry
from refusals import assert_raises

ROW = Row("neural", "gelu", "4x4 float32 forward", "accelerant", "triton (own)", p20=0.9, p50=1.0, p80=1.2, speedup=2.0)


def record(*rows):
    return BenchmarkRecord(Environment.of(registry.find_device("cpu")), {"copy GB/s": 10.0}, list(rows))


def test_a_record_survives_the_disk_and_is_written_whole(tmp_path):
    path = tmp_path / "deep" / "record.json"
    record(ROW).save(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]
    loaded = BenchmarkRecord.load(path)
    assert loaded.rows == [ROW]
    assert loaded.environment.packages["torch"] == torch.__version__
    assert json.loads(path.read_text())["environment"]["device"]


def test_a_record_that_cannot_be_written_names_its_path_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "record.json"
    caught = assert_raises(OSError, r"record\.json", lambda: record(ROW).save(path))
    assert caught.filename == str(path)
    (tmp_path / "record.json").mkdir()
    assert_raises(OSError, r"record\.json", lambda: record(ROW).save(tmp_path / "record.json"))
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "record.json"}


def test_losses_come_first():
    lost = replace(ROW, op="softmax", speedup=0.8)
    worse = replace(ROW, op="layer_norm", speedup=0.5)
    peer = replace(ROW, op="layer_norm", runner="torch", speedup=None)
    ordered = record(ROW, lost, worse, peer).ordered()
    assert [(row.op, row.runner) for row in ordered] == [
        ("layer_norm", "accelerant"), ("layer_norm", "torch"), ("softmax", "accelerant"), ("gelu", "accelerant"),
    ]  # fmt: skip


def test_a_target_is_the_least_where_higher_is_better():
    rows = [replace(ROW, op=f"{p50}", p50=p50, speedup=None, better="higher", target=1.0) for p50 in (1.1, 0.8, 0.7)]
    assert [row.reached for row in rows] == [True, False, False]
    assert [replace(row, better="lower").reached for row in rows] == [False, True, True]
    assert [row.op for row in record(*rows).ordered()] == ["0.7", "0.8", "1.1"]


def test_the_table_shows_peers_that_did_not_run():
    table = record(ROW, Row("neural", "gelu", ROW.case, "torch.compile", "", note="no C++ compiler")).table()
    assert "did not run" in table
    assert "no C++ compiler" in table
    assert "2.00x" in table


def test_percentages_and_speedups_are_of_the_same_run_and_the_fastest_peer():
    case = replace(ROW, speedup=None, bytes=5_000_000, ceiling="copy")
    slow, fast = (replace(case, runner=name, p50=p50) for name, p50 in (("torch", 4.0), ("torch.compile", 3.0)))
    absent = replace(case, runner="liger", p50=None, note="not installed")
    found = record(case, slow, fast, absent, replace(case, runner="device", p50=0.5))
    found.conclude()
    assert [row.speedup for row in found.rows] == [3.0, None, None, None, None]
    assert [row.percent_of_ceiling for row in found.rows] == pytest.approx([50.0, 12.5, 100 / 6, None, 100.0])
    product = record(replace(case, ceiling="matmul", flops=2 * 10**9))
    product.ceilings["matmul TFLOP/s"] = 4.0
    product.conclude()
    assert product.rows[0].percent_of_ceiling == pytest.approx(50.0)


def test_figures_over_the_cpu_and_their_absence_are_shown():
    table = record(
        replace(ROW, cpu_ms=40.0, cpu_note="scaled from 1/32 of the rows"),
        replace(ROW, op="matmul", cpu_note="skipped: 3.0 s for 1/1024 of the rows"),
    ).table()
    assert "40 ms (scaled from 1/32 of the rows)" in table
    assert " 40x" in table
    assert "skipped: 3.0 s" in table
    assert "over CPU" not in record(ROW).table()


def test_high_percentiles_need_enough_samples():
    few, some, many = (replace(ROW, samples=tuple(float(i) for i in range(1, n + 1))) for n in (19, 20, 101))
    assert (few.p95, few.p99) == (None, None)
    assert (some.p95, some.p99) == (pytest.approx(19.05), None)
    assert (many.p95, many.p99) == (96.0, 100.0)
    head, *lines = record(few, replace(many, op="relu")).cells()
    at = head.index("p95")
    assert head[at : at + 2] == ["p95", "p99"]
    assert [line[at : at + 2] for line in lines] == [["-", "-"], ["96", "100"]]
    assert "p95" not in record(few).cells()[0]
    assert many.to_dict()["p99"] == 100.0


def test_rates_and_first_calls_are_shown():
    row = replace(ROW, p50=2.0, flops=4_000_000, operations=6_000_000, cold_ms=31.5)
    assert (row.gflop_s, row.gop_s) == (2.0, 3.0)
    head, line = record(row).cells()
    shown = dict(zip(head, line, strict=True))
    assert (shown["GFLOP/s"], shown["GOp/s"], shown["first call"]) == ("2", "3", "31.5 ms")


@pytest.mark.parametrize(("name", "value"), [("p50", "fast"), ("p50", float("nan")), ("p20", None), ("op", 3)])
def test_a_record_with_figures_that_no_run_writes_is_refused(tmp_path, name, value):
    path = tmp_path / "x.json"
    record(ROW).save(path)
    table = json.loads(path.read_text())
    table["rows"][0][name] = value
    path.write_text(json.dumps(table))
    assert_raises(FormatError, name, BenchmarkRecord.load, path)


@pytest.mark.parametrize(("text", "why"), [
    ("", ""),
    ("[]", "it must be an object"),
    ("{}", "'rows'"),
    ('{"environment": {}, "ceilings": {}, "rows": []}', "lacks the field"),
])  # fmt: skip
def test_what_is_no_record_is_refused(tmp_path, text, why):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert_raises(FormatError, rf"x\.json is not a benchmark record: .*{why}", BenchmarkRecord.load, path)


def test_a_slow_host_is_hidden_by_more_flushes():
    assert covers(host_s=50e-6, flush_s=230e-6) == 1
    assert covers(host_s=400e-6, flush_s=230e-6) == 4
    assert covers(host_s=1.0, flush_s=230e-6) == 8


def test_timers_order_quick_and_slow():
    small, large = torch.randn(8, 8), torch.randn(600, 600)
    quick = time_ms(lambda: small @ small, torch.device("cpu"), budget_s=0.02)
    slow = time_ms(lambda: large @ large, torch.device("cpu"), budget_s=0.02)
    assert quick.p20_ms <= quick.p50_ms <= quick.p80_ms
    assert quick.p50_ms < slow.p50_ms
    waited = wall_ms(lambda: large @ large, torch.device("cpu"), budget_s=0.0, least=2)
    assert waited.repeats == 2
    assert waited.p50_ms > quick.p50_ms
    assert waited.wall_ms == waited.p50_ms
    paced = back_to_back_ms(lambda: small @ small, torch.device("cpu"), calls=4, budget_s=0.001)
    assert paced.back_to_back_ms == paced.p50_ms
    assert paced.wall_ms > 0
    assert Timing.of([2.0]).beside(paced).wall_ms == paced.wall_ms
    turns: list[str] = []
    functions = [functools.partial(turns.append, "a"), functools.partial(turns.append, "b")]
    back_to_back_times_ms(functions, torch.device("cpu"), calls=2, budget_s=0.0)
    assert "ababab" in "".join(turns)  # from an idle device to an idle one
    assert "aabb" in "".join(turns)
    assert 0 < host_time_us(lambda: None, calls=100, rounds=3).p50_ms < 100
    made: list[int] = []
    host_times_us([lambda: made.append(0), lambda: made.append(1)], calls=2, rounds=1)
    assert made == [0, 0, 1, 1] * 3


def test_the_commit_is_that_of_the_packages_checkout(tmp_path, monkeypatch):
    """Not that of a project around the environment in which it is installed, or of the folder that it is run in."""
    monkeypatch.delenv("ACCELERANT_COMMIT", raising=False)
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)

    def git(folder, *words):
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(["git", "-C", folder, *names, *words], capture_output=True, text=True, check=True).stdout

    def package(folder):
        (folder / "bench").mkdir(parents=True)
        (folder / "__init__.py").touch()
        return folder

    for name in ("checkout", "project"):
        own = package(tmp_path / name / "src" / "accelerant") if name == "checkout" else tmp_path / name
        own.mkdir(exist_ok=True)
        (own / "a.py").touch()
        git(tmp_path / name, "init", "-q")
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "-qm", name)
    installed = package(tmp_path / "project" / ".venv" / "lib" / "accelerant")
    commit = git(tmp_path / "checkout", "rev-parse", "--short=12", "HEAD").strip()
    source = tmp_path / "checkout" / "src" / "accelerant"
    monkeypatch.chdir(tmp_path / "project")
    for environment in ({}, {"GIT_DIR": f"{tmp_path / 'project' / '.git'}", "GIT_WORK_TREE": f"{tmp_path}"}):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert (_commit(source), _commit(installed)) == (commit, "")
    (source / "ops.py").touch()  # anywhere in the package: what was measured is not that commit's
    assert _commit(source) == f"{commit}+"
    assert _commit(tmp_path / "absent") == ""
