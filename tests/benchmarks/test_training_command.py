"""`accelerant bench train` on a CPU: what it prints, and the exit statuses."""

import json

import pytest

from accelerant.cli.bench_pieces import peers_of
from benchmarks.__main__ import main


def status(*arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--device", "cpu", *arguments])
    return exit_.value.code or 0


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
        (["--kernels"], "take --device cuda"),
        (["--precision", "fp8"], "bf16, or with --kernels fp8; got 'fp8'"),
        (["--precision", "fp4", "--kernels"], "got 'fp4'"),
        (["--batch", "0"], "equal to 1"),
    ],
)
def test_wrong_usage(arguments, words, capsys):
    assert status(*arguments) == 2
    assert words in capsys.readouterr().err


def test_a_peer_named_twice_is_measured_once():
    assert peers_of("torch, compile,torch,") == ("torch", "compile")
    assert peers_of("none") == ()


def test_a_folder_that_a_run_goes_on_from(tmp_path, capsys):
    folder = tmp_path / "run"
    shared = ["--against", "none", "--budget-s", "0", "--out", str(folder)]
    assert status("--batch", "2", "--batch", "3", "--limit-s", "0", *shared) == 0
    assert "stopped by its time limit; not measured: batch of 2, accelerant; batch of 3, accelerant" in (
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
