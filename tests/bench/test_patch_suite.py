"""The suite of patched models, on tiny shapes."""

import json

import pytest

pytest.importorskip("transformers", reason="the suite measures models of transformers, an optional package")

from accelerant.bench.record import Record
from accelerant.bench.suites import patch as suite
from accelerant.cli import main
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime import registry


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(suite, "_BACK_TO_BACK", 1)
    monkeypatch.setattr(suite, "_LEAST", 2)


@pytest.mark.parametrize("name", suite.MODELS)
def test_every_model_is_measured_and_right(name):
    record = suite.run(registry.choose("cpu"), names=[name], runners=("eager", "accelerant"), budget_s=0.0)
    rows = {(row.op, row.case.partition("16 ")[2] or row.case, row.runner): row for row in record.rows}
    assert len(rows) == 6  # two cases of eager and of ours, and their ratio
    for row in record.rows:
        assert row.p20 <= row.p50 <= row.p80
        assert "tokens/s" in row.note or row.unit == "x"
    ours = [row for row in record.rows if row.runner == "accelerant" and row.unit == "ms"]
    assert all(row.speedup is not None and row.implementation == "patched" for row in ours)


def test_liger_says_why_it_did_not_run(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "liger_kernel", None)
    record = suite.run(registry.choose("cpu"), names=["gpt2"], runners=("liger",), budget_s=0.0)
    notes = {row.note for row in record.rows if row.runner == "liger"}
    assert len(notes) == 1
    assert "liger-kernel cannot be used here: ModuleNotFoundError" in notes.pop()


def test_a_patched_model_that_computes_something_else_is_an_error(monkeypatch):
    real = suite.patch

    def broken(model):
        real(model)
        model.lm_head.weight.data.mul_(20.0)

    monkeypatch.setattr(suite, "patch", broken)
    with pytest.raises(AccelerantError, match=r"gpt2, accelerant: the (loss|norm of the gradients) is"):
        suite.run(registry.choose("cpu"), names=["gpt2"], runners=("accelerant",), budget_s=0.0)


def test_unknown_names():
    with pytest.raises(ConfigError, match="no model 'gpt5' in this suite; it has gpt2, llama-1b"):
        suite.check_names(["gpt5"], ())
    with pytest.raises(ConfigError, match="no runner 'tensorflow' in this suite; it has eager, accelerant"):
        suite.check_names((), ["tensorflow"])


def test_the_command(tmp_path, capsys):
    out = tmp_path / "record.json"
    args = ["bench", "patch", "--model", "gpt2", "--against", "none", "--device", "cpu", "--budget-s", "0"]
    with pytest.raises(SystemExit, match="0"):
        main([*args, "--out", str(out), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert {row["runner"] for row in printed["rows"]} == {"eager", "accelerant"}
    assert Record.load(out).rows
    with pytest.raises(SystemExit, match="2"):
        main([*args[:3], "gpt5"])
    assert "--model: no model 'gpt5'" in capsys.readouterr().err
