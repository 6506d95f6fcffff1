"""The benchmark of served models: the same requests for all engines, its figures, and what loses."""

import subprocess

import pytest

from accelerant.bench.record import BenchmarkRecord, Environment
from benchmarks import serve


def test_requests_are_the_same_each_time_and_fit():
    first, again = (serve.requests_for(16, 300, 256) for _ in range(2))
    assert [(one.ids, one.tokens) for one in first] == [(one.ids, one.tokens) for one in again]
    assert len(first) == 48
    assert all(len(one.ids) >= 16 and 4 <= one.tokens <= 64 and len(one.ids) + one.tokens <= 256 for one in first)
    assert len({len(one.ids) for one in first}) > 20


def test_figures_come_from_the_times():
    requests = [serve.Request([1], 3, sent, [sent + 0.1, sent + 0.15, sent + 0.4], 3) for sent in (0.0, 1.0)]
    found = serve.summary(requests, 5_000_000)
    assert found["tokens_s"] == pytest.approx(6 / 1.4)
    assert (found["first_ms_p50"], found["between_ms_p99"]) == (pytest.approx(100), pytest.approx(250))
    assert found["memory_bytes"] == 5_000_000
    requests[0].counted = 2
    with pytest.raises(RuntimeError, match="2 tokens instead of 3"):
        serve.summary(requests, 0)


def test_rows_of_a_record_put_losses_first():
    cell = {"tokens_s": 100.0, "first_ms_p50": 1.0, "first_ms_p99": 10.0, "between_ms_p50": 1.0, "between_ms_p99": 5.0}
    cell |= {"memory_bytes": 2**27}
    record = BenchmarkRecord(Environment("cpu", *[""] * 6, {}, ""))
    record.rows += serve.rows_of("tiny", 4, "accelerant", cell)
    record.rows += serve.rows_of("tiny", 4, "generate", {**cell, "tokens_s": 150.0, "first_ms_p99": 1.0})
    record.conclude()
    cases = list(dict.fromkeys(row.case.split(", ")[1] for row in record.ordered()))
    assert cases == ["first token p99", "a token", "between tokens p99", "memory"]
    assert [row.speedup for row in record.ordered() if row.ours] == [pytest.approx(x) for x in (0.1, 2 / 3, 1, 1)]
    assert (record.rows[0].p50, record.rows[0].unit, record.rows[3].p50) == (1e4, "us", 128)


@pytest.mark.slow
def test_every_engine_answers(tmp_path, capsys, monkeypatch):
    """Those of transformers in this process, which has imported it."""
    run = subprocess.run

    def here(command, **options):
        if "--worker" not in command or "engine" in command:
            return run(command, **options)
        serve.main(command[command.index("--worker") :])
        return subprocess.CompletedProcess(command, 0, capsys.readouterr().out, "")

    monkeypatch.setattr(serve.subprocess, "run", here)
    out = tmp_path / "serve.json"
    serve.main(["--shape", "tiny", "--users", "2", "--out", str(out)])
    rows = BenchmarkRecord.load(out).rows
    assert {row.implementation for row in rows} >= {"over HTTP", "engine", "continuous", "generate"}
    assert all(row.p50 > 100 if row.unit == "MiB" else row.p50 > 0 for row in rows)
    assert "tokens/s" in capsys.readouterr().out
