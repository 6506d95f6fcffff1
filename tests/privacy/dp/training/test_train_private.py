"""`accelerant train --private`: windows, epsilon in every result, resumption, refusals."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from accelerant.cli import main
from accelerant.errors import BudgetExceeded, ConfigError, FormatError
from accelerant.nn.train.config import TrainConfig, preset
from accelerant.nn.train.corpus import load_corpus
from accelerant.nn.train.job import resume_training, run_training
from accelerant.privacy import dp
from accelerant.privacy.dp.ledger.accounting import about, spent
from accelerant.privacy.dp.training.run import PrivateRun, PrivateSettings, WindowSource, split_draw
from accelerant.runtime.files import plain
from micro_run import MICRO
from refusals import assert_raises

CPU = torch.device("cpu")
RUN = MICRO.replaced(steps=4, validations=1, predict_memory=True)


class Watcher:
    """Who watches a run; may act when the numbers of a step arrive."""

    def __init__(self, at=None, action=None):
        self.at, self.action, self.notes = at, action, []

    def phase(self, text):
        pass

    def note(self, text):
        self.notes.append(text)

    def advance(self, share, text=""):
        pass

    def begin(self, **_):
        pass

    def records(self, records):
        if self.action and self.at in [record.step for record in records]:
            self.action()

    def end(self):
        pass


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_text("".join(f"the {n}th line of some text, for learning\n" for n in range(100)))
    return RUN.replaced(data=(str(text),), seed=3)


def settings(folder, **changes):
    return PrivateSettings(str(folder / "privacy-ledger.jsonl"), **{"noise_multiplier": 3.0, **changes})


def train(run, out, watcher=None, **changes):
    extension = PrivateRun(settings(out, **changes))
    return run_training(run, out, CPU, progress=watcher or Watcher(), extension=extension)


def resume(out, watcher=None, **options):
    described = json.loads((out / "config.json").read_text())["private"]
    return resume_training(out, CPU, progress=watcher or Watcher(), extension=PrivateRun.of(described), **options)


@pytest.mark.parametrize("secure", [True, False])
def test_settings_of_an_earlier_version_are_read(secure):
    today = dataclasses.asdict(PrivateSettings("", target_epsilon=3.0, insecure_noise=not secure))
    before = {name: value for name, value in today.items() if name != "insecure_noise"}
    assert PrivateRun.of({"settings": {**before, "secure": secure}}).settings == PrivateSettings(**today)
    for wrong in ({"secure": "no"}, {"secure": 0}, {"secure": True, "insecure_noise": True}):
        with pytest.raises(ConfigError, match=r"config\.json does not say how the run is private"):
            PrivateRun.of({"settings": {**before, **wrong}})


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def interrupted_run(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "out"
    assert train(run, out, Watcher(2, interrupt)).signal == signal.SIGINT
    return out


@pytest.fixture
def interrupted(interrupted_run, tmp_path):
    """A copy of the folder of a run of 4 steps that was interrupted after 2 or 3."""
    return shutil.copytree(interrupted_run, tmp_path / "out")


@pytest.fixture(scope="module")
def finished_run(run, tmp_path_factory):
    out, watcher = tmp_path_factory.mktemp("runs") / "out", Watcher()
    train(run, out, watcher)
    assert not watcher.notes
    return out


@pytest.fixture
def finished(finished_run, tmp_path):
    """A copy of the folder of a finished run."""
    return shutil.copytree(finished_run, tmp_path / "out")


def counted(out):
    return sum(event.count for event in dp.PrivacyLedger.read(out / "privacy-ledger.jsonl").events)


@pytest.mark.slow
def test_epsilon_stands_in_every_result(finished_run):
    out = finished_run
    private = json.loads((out / "summary.json").read_text())["private"]
    ledger = dp.PrivacyLedger.read(out / "privacy-ledger.jsonl")
    assert private["epsilon"] == ledger.epsilon(1e-5)
    assert private["unit"] == ledger.unit == "window of 17 tokens"
    assert private["noise_multiplier"] == 3.0
    assert counted(out) == 4
    (event,) = {event.sampling for event in ledger.events}
    assert event == "poisson"
    page = (out / "report.html").read_text()
    assert f"epsilon {plain(ledger.epsilon(1e-5), up=True)} at delta 1e-05" in page
    assert 'aria-label="epsilon by step"' in page
    assert "not covered" in page.lower()
    statement = json.loads((out / "privacy.json").read_text())
    assert statement["unit"] == "window of 17 tokens"


@pytest.mark.parametrize("which", ["interrupted_run", pytest.param("finished_run", marks=pytest.mark.slow)])
def test_no_file_has_a_digest_the_size_or_a_path_of_the_text(run, which, request):
    """A digest tells apart two texts of which one has a window more; only config.json names the file, to resume."""
    folder, corpus = request.getfixturevalue(which), load_corpus(run.data, seed=3, window_bytes=17, fixed=True)
    text = Path(run.data[0]).read_bytes()
    tokens = np.frombuffer(text, np.uint8)
    digests = [hashlib.sha256(each).hexdigest() for each in (text, tokens.astype("<u2").tobytes(), tokens.tobytes())]
    sizes = {len(text), corpus.train_bytes, corpus.held_out_bytes, corpus.train_bytes // 17}
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "trace.json"]
    assert len(files) >= 4
    for path in files:
        content = path.read_bytes()
        for digest in (corpus.sha256, *digests):
            assert digest.encode() not in content, path
            assert bytes.fromhex(digest) not in content, path
        if path.suffix in (".json", ".jsonl", ".html"):
            numbers = set(map(int, re.findall(rb"(?<![\w.])(\d{2,})(?![\w.])", content.replace(b",", b""))))
            if path.suffix != ".html":
                assert not numbers & sizes, (path, numbers & sizes)
        assert path.name == "config.json" or run.data[0].encode() not in content, path
    (event,) = {event.times(1) for event in dp.PrivacyLedger.read(folder / "privacy-ledger.jsonl").events}
    assert event.sample_rate == 4 / about(corpus.train_bytes // 17) != 4 / (corpus.train_bytes // 17)


def test_windows_are_disjoint_and_each_token_is_in_one():
    config = TrainConfig(context=4, batch_size=2, accumulate=1, device="cpu")
    source = WindowSource(torch.arange(23).numpy().astype("uint16"), config, "")
    assert source.windows == 4
    assert source.rate == 0.5
    for size, batch, rate in ((1999, 19, 0.01), (1999, 1950, 1.0), (1999, 1999, 1.0), (120, 12, 0.1), (99, 9, 1 / 11)):
        tokens = np.zeros(5 * size, np.uint16)
        assert WindowSource(tokens, dataclasses.replace(config, batch_size=batch), "").rate == rate
    inputs, targets = source._data[torch.arange(4)]
    rows = torch.cat([inputs, targets[:, -1:]], 1)
    assert torch.equal(rows.flatten(), torch.arange(20))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    with pytest.raises(ConfigError, match="4 windows of 5 tokens, a batch draws 8"):
        WindowSource(torch.arange(23).numpy().astype("uint16"), dataclasses.replace(config, batch_size=8), "")


def test_a_draw_is_split_without_padding():
    config = TrainConfig(context=4, batch_size=2, accumulate=2, device="cpu")
    source = WindowSource(torch.arange(100).numpy().astype("uint16"), config, "")
    whole = dp.DrawnBatch(source._data[torch.arange(5)], None, True, 5, 5)
    parts = split_draw(whole, 2)
    assert [(part.rows, part.examples, part.last) for part in parts] == [(2, 2, False), (2, 2, False), (1, 1, True)]
    assert torch.equal(torch.cat([part.tensors[0] for part in parts]), whole.tensors[0])


def test_the_loss_of_a_step_is_that_of_its_windows(run, tmp_path):
    """Without noise: the recorded loss is the mean over the windows that were drawn, that of before where none was."""
    seen = []

    class Seen(PrivateRun):
        def attach(self, trainer):
            step = super().attach(trainer)

            def watched(batches, rate):
                rows = [torch.cat(column) for column in zip(*batches, strict=True)]
                with torch.no_grad():
                    mean = float(trainer.model.loss(*rows))
                drawn = sum(part.examples for part in self._source.drawn)  # of an empty draw there is a row of padding
                seen.append(mean if drawn else seen[-1] if seen else 0.0)
                return step(batches, rate)

            return watched

    extension = Seen(settings(tmp_path / "out", noise_multiplier=0.0))
    run_training(run, tmp_path / "out", CPU, progress=Watcher(), extension=extension)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert len(seen) == 4
    assert [json.loads(line)["loss"] for line in lines] == pytest.approx(seen, rel=1e-5)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["private"]["epsilon"] == "inf"


@pytest.mark.slow
def test_an_interrupted_run_goes_on_in_the_same_ledger(interrupted):
    out = interrupted
    before = counted(out)
    assert 2 <= before < 4
    summary = resume(out).summary
    assert counted(out) == 4
    assert summary["steps"] == 4
    assert len(dp.PrivacyLedger.read(out / "privacy-ledger.jsonl").runs) == 2
    assert summary["private"]["epsilon"] == pytest.approx(
        dp.PrivacyLedger.read(out / "privacy-ledger.jsonl").epsilon(1e-5), abs=1e-6
    )


@pytest.mark.slow
def test_what_a_checkpoint_has_spent_is_counted_where_the_ledger_is_gone(interrupted):
    """Deleted, or left on another machine: a new file that begins at nothing would state too small an epsilon."""
    out = interrupted
    before = counted(out)
    for file in out.glob("privacy-ledger.jsonl*"):
        file.unlink()
    assert resume(out).summary["steps"] == 4
    assert counted(out) == 4 > before >= 2


@pytest.mark.slow
def test_the_ledger_of_a_run_goes_where_its_folder_goes(run, interrupted, tmp_path):
    """A new run in the folder moves an unfinished one aside; what is resumed there is no part of the new one's."""
    out = interrupted
    train(run, out)
    assert counted(out) == 4
    moved = out.rename(tmp_path / "elsewhere") / "unfinished-1"
    summary = resume(moved).summary
    assert summary["private"]["ledger"] == str(moved / "privacy-ledger.jsonl")
    assert (counted(moved), counted(moved.parent)) == (4, 4)


@pytest.mark.slow
def test_one_ledger_in_the_folder_for_several_runs_composes_them(run, tmp_path):
    out, results = tmp_path / "out", []
    for steps in (4, 8):
        extension = PrivateRun(PrivateSettings(str(out / "mine.jsonl"), noise_multiplier=3.0))
        outcome = run_training(run, out, CPU, progress=Watcher(), extension=extension)
        results.append(outcome.summary["private"]["epsilon"])
        assert sum(event.count for event in dp.PrivacyLedger.read(out / "mine.jsonl").events) == steps
        assert (out / "privacy.json").is_file()
    assert results[1] > 1.2 * results[0]


@pytest.mark.slow
def test_a_ledger_that_was_cut_ends_the_resumption_before_a_step(interrupted):
    out = interrupted
    ledger = out / "privacy-ledger.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 1])
    checkpoint = (out / "checkpoint.safetensors").read_bytes()
    assert_raises(FormatError, r"it was cut\. Go back to an untouched copy", resume, out)
    assert (out / "checkpoint.safetensors").read_bytes() == checkpoint
    ledger.write_bytes(whole)
    assert resume(out).summary["steps"] == 4


def _rate(run):
    tokens = int(os.path.getsize(run.data[0]) * 0.9)
    return 4 / about(tokens // 17)


@pytest.mark.slow
def test_a_resumed_run_whose_budget_is_spent_ends_with_its_results(run, tmp_path):
    """Steps made and lost (a crash after the checkpoint) stay spent: the run ends earlier, not past epsilon."""
    out = tmp_path / "out"
    stop = Watcher(2, interrupt)
    target = spent([dp.PrivacyEvent("gaussian", 3.0, "poisson", _rate(run), 4, delta=1e-20)], 1e-5).epsilon
    train(run, out, stop, target_epsilon=target)
    with dp.PrivacyLedger(out / "privacy-ledger.jsonl", unit="window of 17 tokens", loosen_budget=True) as ledger:
        (event,) = [event.times(2) for event in ledger.events]
        ledger.record(event)
    summary = resume(out).summary
    assert summary["stopped"] == "the privacy budget is spent"
    assert summary["steps"] < 4
    assert summary["private"]["epsilon"] <= target + 1e-6
    assert (out / "model.safetensors").is_file()


def test_an_ordinary_resumption_of_a_private_run_is_refused(interrupted):
    out = interrupted
    assert_raises(ConfigError, "one of private", lambda: resume_training(out, CPU, progress=Watcher()))
    assert counted(out) < 4


@pytest.mark.slow
def test_a_new_run_in_the_folder_keeps_the_old_ledger(run, finished):
    out, watcher = finished, Watcher()
    train(run, out, watcher)
    assert "finished-1/privacy-ledger.jsonl" in watcher.notes[0]
    assert counted(out) == counted(out / "finished-1") == 4


@pytest.mark.slow
def test_a_ledger_that_cannot_be_written_leaves_the_finished_run_in_the_folder(run, finished, tmp_path):
    out = finished
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with dp.PrivacyLedger(tmp_path / "taken.jsonl", unit="window of 17 tokens"):
        for path, error, message in (
            (tmp_path / "nowhere" / "l.jsonl", ConfigError, "cannot write to the ledger"),
            (tmp_path, ConfigError, "cannot write to the ledger"),
            (tmp_path / "taken.jsonl", ConfigError, "one at a time"),
            (Path(run.data[0]), FormatError, "no record of a privacy ledger"),
        ):
            extension = PrivateRun(PrivateSettings(str(path), noise_multiplier=3.0))
            assert_raises(error, message, run_training, run, out, CPU, progress=Watcher(), extension=extension)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_the_ledger_of_others_is_given_back_where_the_folder_cannot_be_used(run, tmp_path):
    out, shared = tmp_path / "out", tmp_path / "shared.jsonl"
    out.mkdir()
    (out / "config.json").write_text("somebody else's")
    extension = PrivateRun(PrivateSettings(str(shared), noise_multiplier=3.0))
    assert_raises(ConfigError, "something else", run_training, run, out, CPU, progress=Watcher(), extension=extension)
    dp.PrivacyLedger(shared, unit="window of 17 tokens").close()


def test_the_command_that_starts_a_run_again_names_the_ledger_of_others(tmp_path):
    shared, out = tmp_path / "shared.jsonl", tmp_path / "out"
    given = ["--private", "--delta", "1e-05", "--max-grad-norm", "1.0", "--noise-multiplier", "3.0"]
    assert PrivateRun(settings(out)).words(out) == given
    assert PrivateRun(PrivateSettings(str(shared), noise_multiplier=3.0)).words(out) == [
        *given,
        "--ledger",
        str(shared),
    ]
    out.mkdir()
    (spent := out / "privacy-ledger.jsonl").touch()
    assert PrivateRun(settings(out)).words(out) == [*given, "--ledger", str(spent), "--out", f"{out}-again"]
    assert MICRO.replaced(name="tiny").command(str(out), "cpu", ["--out", "again"]).count("--out") == 1


@pytest.mark.slow
def test_a_delta_that_is_not_below_one_over_the_windows_is_said(run, tmp_path):
    out, watcher = tmp_path / "out", Watcher()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summary = train(run, out, watcher, delta=0.01).summary
    windows = summary["private"]["windows"]
    (note,) = watcher.notes
    assert f"delta 0.01 is not below one over the about {windows:,} units (window of 17 tokens)" in note
    assert note in (out / "report.html").read_text()


@pytest.mark.slow
def test_a_ledger_that_does_not_go_with_the_run_is_refused_before_the_folder_is_touched(run, tmp_path):
    out, shared = tmp_path / "out", tmp_path / "shared.jsonl"
    with dp.PrivacyLedger(shared, unit="window of 17 tokens") as ledger:
        ledger.record(dp.PrivacyEvent("gaussian", 0.5))
    for unit, error, message in (
        ("window of 17 tokens", BudgetExceeded, "holds epsilon"),
        ("user", ConfigError, "unit"),
    ):
        if unit == "user":
            shared = tmp_path / "other.jsonl"
            dp.PrivacyLedger(shared, unit=unit).close()
        extension = PrivateRun(PrivateSettings(str(shared), target_epsilon=1.0))
        assert_raises(error, message, run_training, run, out, CPU, progress=Watcher(), extension=extension)
        assert not (out / "config.json").exists()


@pytest.mark.parametrize(("changes", "message"), [
    ({"precision": "fp8"}, "fp8"),
    ({"precision": "float16"}, "overflow that skips a step would reveal"),
    ({"recompute": ("blocks.*",)}, "recompute"),
    ({"patience": 2}, "held-out losses, which have no noise, would choose"),
    ({"keep_best": True}, "held-out losses, which have no noise, would choose"),
    ({"tokenizer": "bpe", "vocab_size": 300}, "tokenizer trained on the text"),
    ({"batch_size": 400}, "not enough data"),
])  # fmt: skip
def test_what_cannot_be_private_is_refused(run, tmp_path, changes, message):
    extension = PrivateRun(settings(tmp_path / "out"))
    changed = run.replaced(**changes)
    if changes.get("precision") == "fp8":
        assert_raises(ConfigError, message, extension.require, changed)
        return
    with pytest.raises(ConfigError, match=message):
        run_training(changed, tmp_path / "out", CPU, progress=Watcher(), extension=extension)


@pytest.mark.slow
def test_a_model_that_has_seen_the_text_without_noise_is_no_beginning_of_a_private_run(run, finished_run, tmp_path):
    run_training(run.replaced(steps=1), tmp_path / "seen", CPU, progress=Watcher())
    with pytest.raises(ConfigError, match="seen was trained on this text without noise, and epsilon would not cover"):
        train(run.replaced(init_from=str(tmp_path / "seen")), tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    train(run.replaced(init_from=str(finished_run), steps=1), tmp_path / "out")


@pytest.fixture
def accelerant(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def go(*arguments):
        ended = assert_raises(SystemExit, None, main, [str(argument) for argument in arguments])
        return ended.code or 0, *capsys.readouterr()

    return go


@pytest.mark.slow
def test_the_command(accelerant, run, monkeypatch):
    short = preset("tiny").replaced(validation_tokens=256, sample_tokens=8)
    monkeypatch.setattr("accelerant.nn.train.config.preset", lambda name: short)
    given = ("train", "--private", "--data", run.data[0], "--steps", 2, "--device", "cpu", "--out", "out")
    given += ("--batch-size", 24, "--microbatch", 6)
    status, output, _ = accelerant(*given, "--target-epsilon", 2, "--delta", "1e-5", "--insecure-noise")
    assert status == 0
    private = json.loads(Path("out/summary.json").read_text())["private"]
    assert private["sample_rate"] == 24 / private["windows"]
    assert "at delta 1e-05 for each window of 65 tokens, noise NOT secure" in output
    status, output, _ = accelerant(*given, "--noise-multiplier", 3, "--json")
    assert status == 0
    private = json.loads(output)["private"]
    assert private["secure"] is True
    assert private["noise_multiplier"] == 3.0


@pytest.mark.parametrize(("options", "message"), [
    (["--target-epsilon", "8"], "--target-epsilon goes with --private"),
    (["--insecure-noise"], "--insecure-noise goes with --private"),
    (["--private"], "needs --target-epsilon or --noise-multiplier"),
    (["--private", "--target-epsilon", "-1"], "target_epsilon must be"),
    (["--private", "--noise-multiplier", "1", "--delta", "2"], "delta must be"),
    (["--private", "--resume", "out"], "leave out --private"),
    (["--private", "--noise-multiplier", "1", "--ledger", ""], "--ledger must not be empty"),
    (["--private", "--noise-multiplier", "1", "--ledger", "text.txt"], "text.txt, line 1: no record of a privacy"),
    (["--private", "--noise-multiplier", "1", "--ledger", "."], "--ledger . must be a file, in a folder that"),
    (["--private", "--noise-multiplier", "1", "--ledger", "no/l.jsonl"], "--ledger no/l.jsonl must be a file, in"),
])  # fmt: skip
def test_options_are_checked(accelerant, monkeypatch, options, message):
    monkeypatch.setattr("accelerant.nn.train.job.tokenize", None)  # refused before the text is read
    Path("text.txt").write_text("no ledger\n")
    status, _, errors = accelerant("train", *options)
    assert status == 2
    assert message in errors


def test_a_run_without_a_target_is_extended_for_more_epsilon_and_one_with_a_target_is_not(finished):
    before = json.loads((finished / "summary.json").read_text())["private"]["epsilon"]
    summary = resume(finished, steps=6).summary
    assert summary["steps"] == 6
    ledger = dp.PrivacyLedger.read(finished / "privacy-ledger.jsonl")
    assert sum(event.count for event in ledger.events) == 6
    assert before < summary["private"]["epsilon"] == pytest.approx(ledger.epsilon(1e-5))
    config = json.loads((finished / "config.json").read_text())
    config["private"]["settings"]["target_epsilon"] = 8.0
    (finished / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match="its steps spend epsilon 8: for more steps start a new run into another --out"
    ):
        resume(finished, steps=7)
