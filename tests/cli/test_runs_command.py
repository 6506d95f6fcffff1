"""`accelerant runs`: runs are listed, compared and exported."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from train_workers import small

from accelerant.nn.train import PRESETS, run_training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "text.txt").write_text("".join(f"the {n}th line of some text, for learning\n" for n in range(200)))

    class Quiet:
        phase = note = advance = records = begin = end = lambda *_, **__: None

    before = PRESETS["tiny"]
    small()
    run = PRESETS["tiny"].replaced(data=(str(folder / "text.txt"),), predict_memory=False)
    PRESETS["tiny"] = before
    for name, changes in (("a", {"steps": 3}), ("b", {"steps": 2, "learning_rate": 1e-3, "width": 64})):
        out = folder / "runs" / name
        run_training(run.replaced(**changes), out, torch.device("cpu"), progress=Quiet())
    return folder


@pytest.fixture
def runs(command_line, folder, monkeypatch):
    monkeypatch.chdir(folder)
    return functools.partial(command_line, "runs")


def test_two_runs_are_compared_by_what_differs(runs, tmp_path):
    status, output, _ = runs("runs/a", "runs/b", "--report", tmp_path / "page.html")
    assert status == 0
    rows = {line[:28].strip(): line[28:].split() for line in output.splitlines()}
    assert rows["learning rate"] == ["0.002", "0.001"]
    assert rows["width"] == ["32", "64"]
    assert rows["steps"] == rows["steps done"] == ["3", "2"]
    assert "heads" not in rows
    page = (tmp_path / "page.html").read_text()
    assert page.count("<polyline") == 4
    assert "runs/a" in page
    values = json.loads(runs("runs/a", "runs/b", "--json")[1])
    assert values["differing"]["width"] == [32, 64]
    assert values["runs"]["runs/a"]["figures"]["validation_loss"] > 0


def test_runs_are_listed_and_unfinished_ones_say_how_far_they_are(runs, tmp_path, monkeypatch, folder):
    assert [line.split()[:2] for line in runs()[1].splitlines()[1:]] == [["runs/a", "finished"], ["runs/b", "finished"]]
    summary = folder / "runs" / "b" / "summary.json"
    text = summary.read_text()
    summary.unlink()
    assert "step 2 of 2" in runs("runs/a", "runs/b")[1]
    summary.write_text(text)
    (folder / "runs" / "model").mkdir()
    (folder / "runs" / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    status, output, errors = runs()
    assert (status, len(output.splitlines())) == (0, 3)
    assert errors == "accelerant: left out: runs/model/config.json is not a run's of this program\n"
    shutil.rmtree(folder / "runs" / "model")
    listed = runs()[1]
    assert runs("runs")[1] == listed
    monkeypatch.chdir(tmp_path)
    assert runs(folder / "runs")[1].count(" finished ") == 2
    assert "no runs in the folder runs" in runs()[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "many", None, [1]])
@pytest.mark.parametrize("name", ["steps", "validation_loss", "private"])
def test_a_received_summary_is_shown_without_what_is_no_figure(runs, folder, tmp_path, name, value):
    other = shutil.copytree(folder / "runs" / "a", tmp_path / "other")
    summary = json.loads((other / "summary.json").read_text())
    (other / "summary.json").write_text(
        json.dumps(summary | {name: {"epsilon": value} if name == "private" else value})
    )
    assert runs(other, "--report", tmp_path / "page.html")[0] == 0
    assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", runs(other, "--json")[1]))


@pytest.mark.parametrize(("changes", "tokenizers", "texts"), [
    ({}, False, False), ({"seed": 5}, False, True), ({"vocab_size": 300}, True, False),
    ({"tokenizer": "bpe", "context": 8}, True, True),
])  # fmt: skip
def test_a_note_says_which_losses_do_not_compare(runs, folder, tmp_path, changes, tokenizers, texts):
    other = shutil.copytree(folder / "runs" / "a", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    for place in (config["run"], config["run"]["recipe"]):
        place |= {name: value for name, value in changes.items() if name in place}
    (other / "config.json").write_text(json.dumps(config))
    note = json.loads(runs("runs/a", other, "--json")[1])["note"]
    assert ("The tokenizers differ" in note, "The held-out texts differ" in note) == (tokenizers, texts)


def test_a_run_is_exported(runs, tmp_path):
    assert runs("runs/a", "--export", tmp_path / "model")[0] == 0
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), [
    (["runs/a", "runs/b", "--export", "x"], "--export takes one run, got 2"),
    (["--export", "x"], "--export takes one run, got 0"),
    (["absent"], "absent holds no run: there is no config.json"),
    (["runs/a", "--export", "runs/b"], "runs/b is the folder of a run: export into another one"),
    (["runs/a", "--report", "runs/b/metrics.jsonl"],
     "--report runs/b/metrics.jsonl would be among the files of a run: name it *.html"),
    (["runs/a"] * 7 + ["--report", "x"], "--report draws 1 to 6 runs, got 7"),
])  # fmt: skip
def test_wrong_usage_is_one_line_and_status_2(runs, arguments, message):
    status, output, errors = runs(*arguments)
    assert (status, output) == (2, "")
    assert errors == f"accelerant: {message}\n"
    assert not Path("x").exists()
