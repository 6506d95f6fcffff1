"""`python -m benchmarks.training` on a CPU: its output and exit statuses."""

import json

import pytest

from accelerant.cli.bench import run_command
from benchmarks import step_kernels
from benchmarks.training import TrainingSuite


def status(*arguments):
    with pytest.raises(SystemExit) as exit_:
        run_command(TrainingSuite, ["--device", "cpu", *arguments])
    return exit_.value.code or 0


@pytest.mark.slow
def test_ours_beside_plain_pytorch(tmp_path, capsys):
    out = tmp_path / "now.json"
    assert status("--batch", "2", "--against", "torch", "--budget-s", "0", "--out", str(out), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["runner"] for row in printed["rows"]] == ["accelerant", "torch"]
    assert json.loads(out.read_text())["rows"] == printed["rows"]
    assert all("tokens/s" in row["note"] for row in printed["rows"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "jax"], "no peer 'jax'; there are torch, compile"),
        (["--batch", "0"], "equal to 1"),
    ],
)
def test_wrong_usage(arguments, words, capsys):
    assert status(*arguments) == 2
    assert words in capsys.readouterr().err


def test_kernels_need_a_gpu(capsys):
    with pytest.raises(SystemExit, match="2"):
        step_kernels.main(["--device", "cpu"])
    assert "take --device cuda" in capsys.readouterr().err


def test_a_peer_named_twice_is_listed_once(capsys):
    assert status("--against", "torch, compile,torch,", "--list") == 0
    assert capsys.readouterr().out.splitlines()[0] == "batch of 8, accelerant, torch, compile"


@pytest.mark.slow
def test_a_folder_that_a_run_goes_on_from(tmp_path, capsys):
    folder = tmp_path / "run"
    shared = ["--against", "none", "--budget-s", "0", "--out", str(folder)]
    assert status("--batch", "2", "--batch", "3", "--limit-s", "0", *shared) == 0
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
    assert status("--batch", "2", "--resume", *shared, "--budget-s", "1") == 2
    assert "--budget-s" in capsys.readouterr().err
    assert status("--resume") == 2
    assert "--out must name the folder" in capsys.readouterr().err
