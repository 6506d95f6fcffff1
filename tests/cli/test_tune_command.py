"""`accelerant tune`: what it finds is kept, listed, and written as a table."""

import functools
import json
import re

import pytest

import commands
from accelerant.bench import neural


@pytest.fixture
def cache(tmp_path, monkeypatch):
    from accelerant.config import override

    with override(cache_dir=str(tmp_path / "cache")):
        yield tmp_path


status = functools.partial(commands.status, "tune", "--device", "cpu")


@pytest.mark.slow
def test_each_call_says_what_was_chosen_and_why(cache, capsys):
    assert status("--op", "relu", "--dtype", "float32", "--no-launches") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("relu_fwd ") and " -> torch: " in line for line in lines)


def test_what_is_known_is_written_as_a_table(cache, capsys):
    path = cache / "table.json"
    assert status("--list", "--out", str(path), "--serves", "Another CPU") == 0
    body = json.loads(path.read_text())
    assert body["serves"][-1] == "Another CPU"
    assert body["entries"] == {}


def test_no_results_are_said_to_be_none_and_how_to_make_them(cache, capsys):
    assert status("--list") == 0
    assert re.fullmatch(r"no results for .+: `accelerant tune` measures them\n", capsys.readouterr().out)


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_measured(cache, capsys, monkeypatch):
    monkeypatch.setattr(neural, "tune_ops", lambda *_, **__: pytest.fail("something was measured"))
    (cache / "file").write_text("in the way")
    assert status("--op", "relu", "--out", str(cache / "file" / "table.json")) == 2
    assert f"--out: {cache}/file/table.json cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--dtype", "int4"), "no dtype 'int4'"), (("--op", "nothing"), "no op 'nothing'")],
)
def test_wrong_usage_exits_2(cache, capsys, arguments, message):
    assert status(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_table_is_written_after_each_op(cache, monkeypatch):
    """A run that is killed has the ops before the one it was at."""
    from accelerant.bench import neural

    path, seen = cache / "table.json", []
    met = neural._tuned

    def tuned(name, *rest):
        seen.append((name, path.exists()))
        return met(name, *rest)

    monkeypatch.setattr(neural, "_tuned", tuned)
    arguments = ("--op", "relu", "--op", "dropout", "--dtype", "float32", "--no-launches", "--out", str(path))
    assert status(*arguments) == 0
    assert [there for name, there in seen if name == "relu"] == [False] * 5  # three sizes, and two odd ones
    assert [there for name, there in seen if name == "dropout"] == [False, True, True, True, True]
    raced = {entry.split()[0] for entry in json.loads(path.read_text())["entries"]}
    assert {key.partition("_")[0] for key in raced} == {"dropout"}  # relu has one implementation on a CPU


@pytest.mark.slow
def test_a_time_limit_ends_the_run_and_the_table_keeps_what_it_had(cache, capsys, monkeypatch):
    path = cache / "table.json"
    old = {"relu_fwd float32 1 1": {"ms": {"torch": 1.0}, "case": "x", "date": "2026-01-01"}}
    path.write_text(json.dumps({"format": 1, "device": "x", "serves": ["x"], "entries": old}))
    arguments = ("--op", "dropout", "--dtype", "float32", "--no-launches", "--out", str(path))
    assert status(*arguments, "--max-seconds", "0") == 0
    assert "stopped by the time limit: 5 of 5 calls not made" in capsys.readouterr().err
    assert json.loads(path.read_text())["entries"] == old
    assert status(*arguments, "--max-seconds", "600") == 0
    assert "time limit" not in capsys.readouterr().err
    assert not set(old) & set(json.loads(path.read_text())["entries"])  # the run was whole, and knows no such entry


def test_a_file_that_is_no_table_is_refused_before_anything_is_measured(cache, capsys, monkeypatch):
    monkeypatch.setattr(neural, "tune_ops", lambda *_, **__: pytest.fail("something was measured"))
    path = cache / "table.json"
    path.write_text("[]")
    assert status("--op", "relu", "--out", str(path)) == 2
    assert "exists and is no table of choices" in capsys.readouterr().err
    assert path.read_text() == "[]"


def test_an_empty_file_and_a_link_to_itself_become_a_table(cache):
    empty, loop = cache / "empty.json", cache / "loop.json"
    empty.touch()
    loop.symlink_to(loop)
    for path in (empty, loop):
        assert status("--op", "relu", "--list", "--out", str(path)) == 0
        assert json.loads(path.read_text())["format"] == 1


@pytest.mark.slow
def test_progress_says_how_much_is_left(cache):
    import torch

    from accelerant.runtime import registry

    said = []
    calls = neural.tune_ops(registry.find_device("cpu"), names=["relu"], launches=False, progress=said.append)
    assert len(list(calls)) == neural.count_calls(["relu"], [torch.bfloat16, torch.float32]) == 10
    assert said[0].startswith("[1/10] relu ")
    assert said[-1].startswith("[10/10, about ")
