import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accelerant.nn.train.config import PRESETS


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the {n}th line of some text, for learning\n" for n in range(600)))
    return path


@pytest.fixture
def accelerant(command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A short validation and sample: most of the time of a run of few steps.
    monkeypatch.setitem(PRESETS, "tiny", PRESETS["tiny"].replaced(validation_tokens=1024, sample_tokens=8))
    return command_line


@pytest.mark.slow
def test_text_becomes_a_token_file_that_training_takes(accelerant, text):
    status, output, errors = accelerant("data", "prepare", text, "--out", "text.tokens", "--tokenizer", "bytes")
    assert (status, errors) == (0, "")
    assert re.search(r"tokens +\d\d,\d{3} of a vocabulary of 256, uint16", output)
    assert accelerant("data", "info", "text.tokens", "--check")[1] == output

    status, output, _ = accelerant(
        *("train", "--data", "text.tokens", "--steps", 5, "--device", "cpu", "--out", "run", "--json")
    )
    assert status == 0
    summary = json.loads(output)
    assert summary["validation_nats_per_byte"] == pytest.approx(summary["validation_loss"], abs=1e-4)
    assert 0 < summary["bigram_nats_per_byte"] < summary["unigram_nats_per_byte"]
    corpus = json.loads(Path("run/config.json").read_text())["corpus"]
    assert corpus["train_tokens"] + corpus["held_out_tokens"] == text.stat().st_size + 1
    assert Path("run/report.html").is_file()


@pytest.mark.slow
def test_a_bpe_is_trained_kept_and_used(accelerant, text):
    lines = Path("lines.jsonl")
    lines.write_text("".join(json.dumps({"body": line}) + "\n" for line in text.read_text().splitlines()))
    arguments = ("data", "prepare", lines, "--out", "b.tokens", "--field", "body", "--vocab-size", 300, "--json")
    status, output, errors = accelerant(*arguments)
    assert (status, errors) == (0, "")
    found = json.loads(output)
    assert found["documents"] == 600
    assert 257 < found["vocab_size"] <= 300
    train = ("train", "--data", "b.tokens", "--steps", 2, "--device", "cpu", "--json")
    status, output, errors = accelerant(*train)
    assert status == 0, errors
    summary = json.loads(output)
    assert summary["validation_nats_per_byte"] < summary["validation_loss"]
    assert json.loads(Path("runs/tiny/config.json").read_text())["model"]["vocab_size"] == found["vocab_size"]

    Path("runs/tiny/summary.json").unlink()  # as if it had been killed after its last checkpoint
    status, output, errors = accelerant("train", "--resume", "runs/tiny", "--json")
    assert status == 0, errors
    assert json.loads(output)["validation_loss"] == summary["validation_loss"]

    Path("b.tokens.tokenizer.json").unlink()
    status, _, errors = accelerant(*train)
    assert status == 2
    assert "cannot read the tokenizer" in errors


@pytest.mark.parametrize(("arguments", "message"), [
    (("prepare", "absent", "--out", "a"), "no file or folder 'absent'"),
    (("prepare", "", "--out", "a"), "PATH must not be empty"),
    (("prepare", "text.txt", "--out", ""), "--out must not be empty"),
    (("prepare", "text.txt", "--out", "a", "--tokenizer", "absent.json"), "cannot read the tokenizer absent.json"),
    (("prepare", "text.txt", "--out", "a", "--tokenizer", "text.txt"), "text.txt: not a tokenizer"),
    (("prepare", "text.txt", "--out", "a", "--tokenizer", "bytes", "--vocab-size", "5"), "--vocab-size is for"),
    (("prepare", "text.txt", "--out", "text.txt/a"), "cannot write to text.txt/a"),
    (("info", "absent"), "no token file absent"),
    (("info", "text.txt"), "text.txt is no token file: make one with accelerant data prepare"),
])  # fmt: skip
def test_bad_input_is_one_line_and_status_2(accelerant, text, arguments, message):
    status, output, errors = accelerant("data", *arguments)
    assert (status, output) == (2, "")
    assert re.fullmatch(f"accelerant: .*{re.escape(message)}.*\n", errors)
    assert [path.name for path in Path().iterdir()] == ["text.txt"]


def test_a_torn_token_file_and_one_among_others_are_refused_by_training(accelerant, text):
    accelerant("data", "prepare", text, "--out", "a.tokens", "--tokenizer", "bytes", "--json")
    status, _, errors = accelerant("train", "--data", "a.tokens", text, "--device", "cpu", "--json")
    assert status == 2
    assert "a.tokens is a token file: name it alone" in errors
    Path("a.tokens").write_bytes(Path("a.tokens").read_bytes()[:-1])
    status, _, errors = accelerant("train", "--data", "a.tokens", "--device", "cpu", "--json")
    assert status == 2
    assert "a.tokens is torn: " in errors
    assert not Path("runs").exists()


def test_help_has_an_example_and_does_not_load_torch():
    script = (
        "import sys\nfrom accelerant.cli import main\n"
        "try:\n    main(['data', 'prepare', '--help'])\nfinally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "--tokenizer" in done.stdout
    assert "accelerant data prepare" in done.stdout
