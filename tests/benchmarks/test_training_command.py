"""`python -m benchmarks.training` on a CPU: its output and exit statuses."""

import json

import pytest

from accelerant.bench.record import BenchmarkRecord, Environment
from accelerant.bench.suite import SuiteRun
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError
from accelerant.nn import GPTConfig
from accelerant.runtime import registry
from benchmarks import dp, gpt_steps, step_kernels
from benchmarks.dp_steps import PrivateCase
from benchmarks.training import TrainingSuite
from clock import Clock


def status(*arguments):
    with pytest.raises(SystemExit) as exit_:
        run_command(TrainingSuite, ["--device", "cpu", *arguments])
    return exit_.value.code or 0


@pytest.mark.slow
def test_ours_beside_plain_pytorch(tmp_path, capsys):
    out = tmp_path / "now.json"
    assert status("--batch", "2", "--against", "torch", "--budget-seconds", "0", "--out", str(out), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["runner"] for row in printed["rows"]] == ["accelerant", "torch"]
    assert json.loads(out.read_text())["rows"] == printed["rows"]
    assert all("tokens/s" in row["note"] for row in printed["rows"])


@pytest.mark.parametrize(("arguments", "words"), [
    (["--against", "jax"], "no peer 'jax'; there are torch, compile"),
    (["--batch", "0"], "0 is not in the range x>=1"),
])  # fmt: skip
def test_wrong_usage(arguments, words, capsys):
    assert status(*arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "take --device cuda"),
    (["--model", "gpt5"], "--model: 'gpt5' is none of gpt2, llama,"),
    (["--runner", "graph"], "--runner: 'graph' is none of torch, patched, patched-compiled,"),
])  # fmt: skip
def test_kernels_need_a_gpu_and_names_that_are_known(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        step_kernels.main(["--device", "cpu", *arguments])
    assert words in capsys.readouterr().err


@pytest.mark.gpu
def test_what_device_and_host_do_in_a_step_of_a_hugging_face_model(capsys):
    step_kernels.main(["--device", "cuda", "--model", "bert", "--runner", "eager"])
    printed = capsys.readouterr().out
    assert "clock      a step, back to back" in printed
    assert "host       aten::" in printed


def test_a_peer_named_twice_is_listed_once(capsys):
    assert status("--against", "torch", "--against", "compile", "--against", "torch", "--list") == 0
    assert capsys.readouterr().out.splitlines()[0] == "batch of 8, accelerant, torch, compile"


@pytest.mark.slow
def test_a_folder_that_a_run_goes_on_from(tmp_path, capsys):
    folder = tmp_path / "run"
    shared = ["--against", "none", "--budget-seconds", "0", "--out", str(folder)]
    assert status("--batch", "2", "--batch", "3", "--max-seconds", "0", *shared) == 0
    assert "stopped by its time limit; 2 of 2 cases not measured: batch of 2, accelerant; batch of 3, accelerant" in (
        capsys.readouterr().out
    )
    assert status("--batch", "2", *shared) == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    assert status("--batch", "2", "--resume", *shared) == 0
    assert status("--batch", "2", "--batch", "3", "--resume", *shared) == 0
    rows = json.loads((folder / "record.json").read_text())["rows"]
    assert [row["case"].partition("x")[0] for row in rows] == ["2", "3"]
    assert {path.name for path in folder.iterdir()} == {"record.json", "record.csv", "report.html", "rows.jsonl"}
    assert status("--batch", "2", "--resume", *shared, "--budget-seconds", "1") == 2
    assert "--budget-seconds" in capsys.readouterr().err
    assert status("--resume") == 2
    assert "--out must name the folder" in capsys.readouterr().err


@pytest.mark.slow
def test_the_cpu_column_is_extrapolated_from_two_lengths(monkeypatch):
    monkeypatch.setattr("accelerant.bench.timer.time", clock := Clock())
    config, lengths = GPTConfig(64, 512, 1, 2, 16), []

    def step_of(small):
        lengths.append(small.context)
        return lambda tokens, targets: clock.sleep(1e-3 * (10 + tokens.numel() / 10))

    ms, note = gpt_steps.cpu_step_ms(step_of, config, 4)
    assert lengths == [64, 256]
    assert ms == pytest.approx(10 + 204.8, rel=1e-3)
    assert note.endswith("extrapolated from 64 and 256 tokens")
    with pytest.raises(AccelerantError, match="steps of 64 and 256 tokens took"):
        gpt_steps.cpu_step_ms(lambda small: lambda x, y: clock.sleep(1e-3 * (300 - small.context)), config, 4)


@pytest.mark.slow
def test_the_cpu_columns_of_training_and_private_training_name_the_rows_of_a_gpu(monkeypatch):
    monkeypatch.setattr(gpt_steps, "_FEW", 8)  # a model this small takes as long for its update as for 256 tokens
    monkeypatch.setattr(gpt_steps, "_MORE", 1024)
    device = registry.find_device("cpu")
    config = GPTConfig(256, 1024, 2, 4, 128, tied=False)

    def column(case):
        return case.on_cpu(SuiteRun(device, BenchmarkRecord(Environment.of(device))))

    run = SuiteRun(device, BenchmarkRecord(Environment.of(device)))
    (training,) = TrainingSuite(batch=(4,), config=config).cases(run)
    assert list(column(training)) == [("gpt step", "4x1024 2 layers of 128 bf16 autocast")]
    private = dp._on_cpu(PrivateCase(4, config), SuiteRun(device, BenchmarkRecord(Environment.of(device))))
    name = "4x1024 2 layers of 128, untied, bf16 autocast"
    assert list(private) == [
        ("gpt step", f"{name}, not private"), ("private gpt step", f"{name}, secure"),
        ("private gpt step", f"{name}, Philox"),
    ]  # fmt: skip
    assert all(ms > 0 for ms, _ in private.values())
