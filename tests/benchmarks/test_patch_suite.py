"""The suite of patched models, on tiny shapes."""

import contextlib
import importlib.metadata
import json
import sys
import weakref

import pytest

pytest.importorskip("transformers", reason="the suite measures models of transformers, an optional package")

import torch

from accelerant.bench.record import BenchmarkRecord, Environment, Journal
from accelerant.bench.suite import SuiteRun, run_suite
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, ConfigError, UnsupportedCase
from accelerant.runtime import registry
from benchmarks import patch as suite
from benchmarks.patch import PatchSuite


@pytest.mark.parametrize("name", suite.MODELS)
@pytest.mark.sample(6, 2)
def test_every_model_is_measured_and_right(name):
    record = run_suite(PatchSuite(model=(name,), against=(), budget_s=0.0), registry.find_device("cpu"))
    assert record.environment.packages["transformers"] == importlib.metadata.version("transformers")
    rows = {(row.op, row.case.partition("16 ")[2] or row.case, row.runner): row for row in record.rows}
    assert len(rows) == 6  # two cases of eager and of ours, and their ratio
    for row in record.rows:
        assert row.p20 <= row.p50 <= row.p80
        assert "tokens/s" in row.note or row.unit == "x"
    ours = [row for row in record.rows if row.runner == "accelerant" and row.unit == "ms"]
    assert all(row.speedup is not None and row.implementation == "patched" for row in ours)


def case_keys(**options):
    """Return the keys of the cases that a run would measure."""
    device = registry.find_device("cpu")
    return [
        case.key
        for case in PatchSuite(("gpt2",), **options).cases(SuiteRun(device, BenchmarkRecord(Environment.of(device))))
    ]


def test_compiling_fewer_layers_measures_all_runners_on_them():
    assert case_keys() == ["gpt2, eager, accelerant, compile, liger"]
    assert case_keys(compile_layers=3) == [
        "gpt2, eager, accelerant, liger",
        "gpt2 with 3 layers, eager, accelerant, compile, liger",
    ]
    assert case_keys(against=("liger",), compile_layers=3) == ["gpt2, eager, accelerant, liger"]


@pytest.mark.parametrize(("name", "setting"), [("gpt2", "n_layer"), ("vit-base", "num_hidden_layers")])
def test_models_of_another_depth(name, setting):
    with suite._built(suite.MODELS[name].with_layers(2), "eager", torch.device("cpu")) as (module, _):
        assert getattr(module.config, setting) == 2
        assert len(module.transformer.h if name == "gpt2" else module.vit.layers) == 2


@pytest.mark.slow
def test_a_run_goes_on_after_the_models_that_it_has(tmp_path):
    path, device = tmp_path / "rows.jsonl", registry.find_device("cpu")
    first, second = (BenchmarkRecord(Environment.of(device)) for _ in range(2))
    PatchSuite(("gpt2",), (), budget_s=0.0).measure(SuiteRun(device, first, Journal(path, first, resume=False)))
    begun = []
    run = SuiteRun(device, second, Journal(path, second, resume=True), progress=begun.append)
    PatchSuite(("gpt2", "llama-1b"), (), budget_s=0.0).measure(run)
    assert begun == ["[1/1] llama-1b: eager", "[1/1] llama-1b: accelerant"]
    assert list(dict.fromkeys(row.op.split()[0] for row in second.rows)) == ["gpt2", "llama-1b"]


def test_a_patched_model_that_computes_something_else_is_an_error(monkeypatch):
    real = suite.patch

    def broken(model):
        real(model)
        model.lm_head.weight.data.mul_(20.0)

    monkeypatch.setattr(suite, "patch", broken)
    with pytest.raises(AccelerantError, match=r"gpt2, accelerant: the (loss|norm of the gradients) is"):
        run_suite(PatchSuite(model=("gpt2",), against=(), budget_s=0.0), registry.find_device("cpu"))


def test_no_runner_holds_its_model_while_the_next_is_measured(monkeypatch):
    """Its weights would count in the next one's peak: a patched model is in cycles, which wait for a collection."""
    made, alive = [], []

    @contextlib.contextmanager
    def built(*args, real=suite._built):
        alive.append([runner for runner, module in made if module() is not None])
        with real(*args) as (module, call):
            made.append((args[1], weakref.ref(module)))
            yield module, call

    monkeypatch.setattr(suite, "_built", built)
    monkeypatch.setattr(suite, "_apply_liger", lambda *_: None)
    run_suite(PatchSuite(model=("llama-1b",), against=("liger",), budget_s=0.0), registry.find_device("cpu"))
    assert alive == [[], [], []]


def test_a_case_that_our_ops_refuse_is_an_error(monkeypatch):
    def refusing(model):
        def forward(**_):
            raise UnsupportedCase("not this")

        model.forward = forward

    monkeypatch.setattr(suite, "patch", refusing)
    with pytest.raises(UnsupportedCase, match="not this"):
        run_suite(PatchSuite(model=("gpt2",), against=(), budget_s=0.0), registry.find_device("cpu"))


def test_unknown_names():
    with pytest.raises(ConfigError, match="no model 'gpt5'; there are gpt2, llama-1b"):
        PatchSuite(("gpt5",)).resolve(registry.find_device("cpu"))
    with pytest.raises(ConfigError, match="no peer 'tensorflow'; there are compile, liger"):
        PatchSuite(against=("tensorflow",)).resolve(registry.find_device("cpu"))


def test_the_command_and_a_peer_that_says_why_it_did_not_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    out = tmp_path / "record.json"
    args = ["--model", "gpt2", "--against", "liger", "--device", "cpu", "--budget-seconds", "0"]
    with pytest.raises(SystemExit, match="0"):
        run_command(PatchSuite, [*args, "--out", str(out), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert {row["runner"] for row in printed["rows"]} == {"eager", "accelerant", "liger"}
    (note,) = {row.note for row in BenchmarkRecord.load(out).rows if row.runner == "liger"}
    assert "liger-kernel cannot be used here: ModuleNotFoundError" in note
    with pytest.raises(SystemExit, match="2"):
        run_command(PatchSuite, ["--model", "gpt5"])
    assert "--model: no model 'gpt5'" in capsys.readouterr().err
