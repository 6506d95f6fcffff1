"""The benchmark of served models: the same requests for all engines, its figures, and what loses."""

import json
import subprocess

import pytest

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
    assert found["memory_mb"] == 5
    requests[0].counted = 2
    with pytest.raises(RuntimeError, match="2 tokens instead of 3"):
        serve.summary(requests, 0)


def test_losses_come_first_and_the_worst_of_them():
    cell = {"users": 4, "first_ms_p99": 10.0, "between_ms_p99": 5.0, "memory_mb": 100.0}
    rows = [
        {"engine": "accelerant", "tokens_s": 100.0, **cell},
        {"engine": "engine", "tokens_s": 1e6, **cell},
        {"engine": "generate", "tokens_s": 150.0, **cell, "first_ms_p99": 1.0},
    ]
    found = serve.losses(rows)
    assert [text.split(" users, ")[1].split(":")[0] for text in found] == ["first_ms_p99", "tokens_s"]
    assert found[0].startswith("10.00x worse")


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
    rows = json.loads(out.read_text())["rows"]
    assert {row["engine"] for row in rows} >= {"accelerant", "engine", "continuous", "generate"}
    assert all(row["tokens_s"] > 0 and row["memory_mb"] > 100 for row in rows)
    assert "tokens_s" in capsys.readouterr().out
