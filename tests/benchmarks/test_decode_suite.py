"""The suite of decoding, on a tiny model."""

import json
from unittest.mock import Mock

import pytest
import torch

from accelerant.bench.record import BenchmarkRecord, Environment
from accelerant.bench.suite import SuiteRun, run_suite
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime import registry
from benchmarks import decode as suite
from benchmarks.decode import DecodeSuite
from refusals import assert_raises


@pytest.mark.slow
def test_both_dtypes_are_measured_and_right():
    record = run_suite(DecodeSuite(against=("torch",), budget_s=0.0), registry.find_device("cpu"))
    assert [(row.case.rpartition(" ")[2], row.runner) for row in record.rows] == [
        ("bfloat16", "torch"), ("bfloat16", "accelerant"), ("int8", "torch"), ("int8", "accelerant"),
    ]  # fmt: skip
    for row in record.rows:
        assert row.p20 <= row.p50 <= row.p80
        assert row.percent_of_ceiling > 0
        assert row.note == f"{1e3 / row.p50:,.1f} tokens/s"
    ours = [row for row in record.rows if row.runner == "accelerant"]
    assert all(row.speedup is not None for row in ours)
    assert ours[1].bytes < 0.75 * ours[0].bytes


@pytest.mark.slow
def test_the_longest_measurement_fits_the_models_context():
    device = registry.find_device("cpu")
    record = BenchmarkRecord(Environment.of(device), ceilings={"copy GB/s": 1.0})
    DecodeSuite(("bfloat16",), ("torch",), budget_s=600.0).measure(SuiteRun(device, record))  # 40 samples end it
    assert [len(row.samples) for row in record.rows] == [40, 40]


def test_bytes_are_those_that_a_step_reads():
    with torch.no_grad():
        model = suite._random_model(torch.device("cpu"), "bfloat16")
    weights = sum(p.nbytes for p in model.parameters()) - model.embed.weight.nbytes
    assert suite._weight_bytes(model) == weights


def test_a_model_that_computes_something_else_is_an_error(monkeypatch):
    real = suite._block

    def broken(x, *args):
        return 2 * real(x, *args)

    monkeypatch.setattr(suite, "_block", broken)
    with pytest.raises(AccelerantError, match=r"decode, bfloat16: logits are .* from float32's"):
        run_suite(DecodeSuite(against=(), budget_s=0.0), registry.find_device("cpu"))


@pytest.mark.slow
def test_a_peer_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(torch, "compile", Mock(side_effect=RuntimeError("no compiler here")))
    record = run_suite(
        DecodeSuite(dtype=("bfloat16",), against=("compile",), budget_s=0.0), registry.find_device("cpu")
    )
    notes = {row.runner: row.note for row in record.rows}
    assert notes["compile"] == "RuntimeError: no compiler here"
    assert "tokens/s" in notes["accelerant"]
    assert "torch" not in notes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logits", "exact_logits"])
def test_without_a_reference_nothing_is_measured(name, monkeypatch):
    monkeypatch.setattr(suite._PlainStep, name, Mock(side_effect=torch.OutOfMemoryError("out of memory")))
    with pytest.raises(AccelerantError, match=r"torch's step, which others are checked by: OutOfMemoryError"):
        run_suite(DecodeSuite(dtype=("bfloat16",), against=(), budget_s=0.0), registry.find_device("cpu"))


def test_unknown_names():
    with pytest.raises(ConfigError, match="no dtype 'fp4'; there are bfloat16, int8, int4"):
        DecodeSuite(("fp4",)).resolve(registry.find_device("cpu"))
    with pytest.raises(ConfigError, match="no peer 'vllm'; there are torch, compile"):
        DecodeSuite(against=("vllm",)).resolve(registry.find_device("cpu"))


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    out = tmp_path / "record.json"
    args = ["--dtype", "bf16", "--against", "none", "--device", "cpu", "--budget-seconds", "0"]
    assert_raises(SystemExit, "0", run_command, DecodeSuite, [*args, "--out", str(out), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert [row["runner"] for row in printed["rows"]] == ["accelerant"]
    assert BenchmarkRecord.load(out).rows[0].op == "Llama, tiny"
    assert_raises(SystemExit, "2", run_command, DecodeSuite, ["--dtype", "int4", "--device", "cpu"])
    assert "int4, the last one with --requests" in capsys.readouterr().err
    assert_raises(SystemExit, "2", run_command, DecodeSuite, ["--dtype", ",", "--device", "cpu"])
    assert "--dtype: no dtype ','; there are bfloat16, int8" in capsys.readouterr().err


@pytest.mark.slow
def test_requests_are_decoded_at_once_by_engine_and_generate(monkeypatch):
    monkeypatch.setattr(suite, "CPU_SHAPE", suite._TINY)
    record = run_suite(DecodeSuite(against=(), requests=(1, 3)), registry.find_device("cpu"))
    assert [(row.case, row.runner, row.implementation) for row in record.rows] == [
        (f"{count} of 64 + 32 tokens, float32", runner, implementation)
        for count in ("1 request", "3 requests")
        for runner, implementation in (
            ("accelerant", "engine"),
            ("accelerant", "engine, fast"),
            ("generate", "accelerant's, one batch"),
        )
    ]
    assert all("tokens/s" in row.note for row in record.rows)
    assert "first token" in record.rows[0].note
