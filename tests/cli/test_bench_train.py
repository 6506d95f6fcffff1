"""`accelerant bench train` on a CPU: what it prints, and the exit statuses."""

import json

import pytest

from accelerant.cli.app import main


def status(*arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "train", "--device", "cpu", *arguments])
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
        (["--batch", "0"], "equal to 1"),
    ],
)
def test_wrong_usage(arguments, words, capsys):
    assert status(*arguments) == 2
    assert words in capsys.readouterr().err
