import json
import os

import pytest
import torch

from accelerant.errors import FormatError
from accelerant.nn.train.history import History, MetricsFile, StepRecord, StepTimer, peak_memory_bytes, read_metrics
from clock import Clock
from refusals import assert_raises


def record(step, **changes):
    values = {"loss": 2.5, "tokens_per_s": 100.0, "ms": 10.0, "peak_memory_bytes": 7}
    return StepRecord(**{"step": step, **values, "learning_rate": 0.1, "grad_norm": 1.0, **changes})


def test_a_line_a_step_with_the_documented_names(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.append([record(1), record(2, validation_loss=3.0)])
    metrics.append([record(3)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {"step", "loss", "tokens_per_s", "ms", "peak_memory_bytes"} <= lines[0].keys()
    assert "validation_loss" not in lines[0]
    assert lines[1]["validation_loss"] == 3.0
    assert read_metrics(path) == metrics.records


def test_a_new_run_starts_an_empty_file_and_a_resumed_one_keeps_its_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append([record(step) for step in range(1, 6)])
    resumed = MetricsFile(path, keep_steps=3)
    resumed.append([record(4)])
    assert [r.step for r in read_metrics(path)] == [1, 2, 3, 4]
    MetricsFile(path)
    assert path.read_text() == ""


def test_what_a_kept_file_lacks_is_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert MetricsFile(path, keep_steps=3).lost == 3
    assert path.read_text() == ""
    MetricsFile(path).append([record(1), record(2)])
    assert MetricsFile(path, keep_steps=3).lost == 1
    assert MetricsFile(path).lost == 0
    assert MetricsFile(None, keep_steps=3).lost == 0


def test_a_cut_last_line_is_left_out_but_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append([record(1), record(2)])
    path.write_text(path.read_text()[:-20])
    assert [r.step for r in read_metrics(path)] == [1]
    path.write_text("{\n" + path.read_text())
    assert_raises(FormatError, "line 1: not a step's record", read_metrics, path)


def test_a_missing_file_is_refused(tmp_path):
    assert_raises(FormatError, "cannot read", read_metrics, tmp_path / "metrics.jsonl")


def test_laps_measure_the_time_since_the_last_mark(monkeypatch):
    monkeypatch.setattr("accelerant.nn.train.history.time", clock := Clock())
    timer = StepTimer(torch.device("cpu"))
    clock.sleep(0.3)
    timer.mark()
    clock.sleep(0.1)
    assert timer.lap()() == pytest.approx(100, abs=1e-3)
    assert timer.lap()() == pytest.approx(0, abs=1e-3)


@pytest.mark.slow
def test_memory_counts_what_is_held():
    """In a forked process: the peak is the process's, and earlier tests may have left it high."""
    child = os.fork()
    if not child:
        before = peak_memory_bytes(torch.device("cpu"))
        held = b"x" * (1 << 28)
        os._exit(peak_memory_bytes(torch.device("cpu")) - before > len(held) // 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_history_prints_as_a_table_and_escapes():
    record = StepRecord(1, 2.5, None, 1.0, 7, 0.1, 1.0)
    history = History(total_steps=2, steps=1, status="stopped", reason="<b>", records=[record], seconds=1.25)
    lines = repr(history).splitlines()
    assert lines[:2] == ["stopped (<b>): 1 of 2 steps in 1.2 s", "training loss  2.5000 -> 2.5000"]
    html = history._repr_html_()
    assert "stopped (&lt;b&gt;)" in html
    assert '<td class="">training loss</td>' in html
