import errno
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from accelerant.config import override
from accelerant.errors import ConfigError, DivergenceError, FormatError, MissingDependency, UnsupportedCase
from accelerant.nn import GPT, CharRNN, GPTConfig, Llama, quantize
from accelerant.nn.models.tokenizer import load_text_model
from accelerant.nn.train import (
    RunConfig,
    export_run,
    load_checkpoint,
    load_run,
    resume_training,
    run_training,
    save_checkpoint,
)
from accelerant.nn.train.checkpoint import BestModel
from accelerant.nn.train.config import PRESETS, cpu_flops_per_s, duration_note, preset, windows_at_once
from accelerant.nn.train.corpus import load_corpus
from accelerant.nn.train.environment import StopRequest
from accelerant.nn.train.history import History, MetricsFile, RunFolder, RunLock, read_metrics
from accelerant.nn.train.job import prompt_of, steps_until
from accelerant.nn.train.objective import Evaluation
from accelerant.runtime.files import AtomicFile
from refusals import assert_raises


@pytest.fixture
def train(run, tmp_path, cpu, watcher):
    """Runs with changes to the run; returns the outcome and the folder."""

    def start(name, *, watch=None, **changes):
        config = run.replaced(**changes)
        out = tmp_path / name
        return run_training(config, out, cpu, progress=watch or watcher()), out

    return start


def stop():
    os.kill(os.getpid(), signal.SIGINT)


def losses(out):
    return [(record.step, record.loss, record.validation_loss) for record in read_metrics(out / "metrics.jsonl")]


def files(out):
    return sorted(path.name for path in out.iterdir())


def test_a_run_leaves_all_its_files_and_nothing_else_beside_those_that_were_there(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    outcome, out = train("run")
    assert (out / "notes.txt").read_text() == "mine"
    assert files(out) == [
        "checkpoint.safetensors", "config.json", "metrics.jsonl", "model.safetensors", "notes.txt", "report.html",
        "sample.txt", "summary.json",
    ]  # fmt: skip
    assert json.loads((out / "summary.json").read_text()) == outcome.summary
    assert outcome.summary["status"] == "done"
    assert [step for step, _, _ in losses(out)] == list(range(1, 13))
    assert [step for step, _, validation in losses(out) if validation] == [4, 8]
    config = json.loads((out / "config.json").read_text())
    model = GPT(GPTConfig(**config["model"]))
    model.load_state_dict(load_file(out / "model.safetensors"))
    assert config["parameters"] == model.parameter_count()


@pytest.mark.slow
def test_the_model_beats_a_bigram_model_on_held_out_text(train, text):
    """Of words from a list in any order: what a pair of bytes says is little, what a word's beginning says is much."""
    words = ["accelerate", "beginning", "checkpoint", "derivative", "embedding", "function", "gradient", "hypothesis"]
    generator = random.Random(0)
    text.write_text("".join(generator.choice(words) + " " for _ in range(4000)))
    outcome, out = train("run", steps=200, width=32, batch_size=8, microbatch=8, validation_tokens=4096)
    assert 5.5 < losses(out)[0][1] < 6  # log 256 and more: initial weights of narrow models are large
    summary = outcome.summary
    assert summary["validation_nats_per_byte"] < 0.7 * summary["bigram_nats_per_byte"]
    assert summary["bigram_nats_per_byte"] < summary["unigram_nats_per_byte"]


def test_the_validation_loss_is_that_of_the_saved_model(train, run, text):
    outcome, out = train("run", validation_tokens=10**6)
    corpus = load_corpus([str(text)], seed=3, window_bytes=17)
    held_out = b"\n".join(document.data for document in corpus.held_out)
    config = json.loads((out / "config.json").read_text())
    model = GPT(GPTConfig(**config["model"]))
    model.load_state_dict(load_file(out / "model.safetensors"))
    count = (len(held_out) - 1) // 16
    rows = torch.tensor([list(held_out[16 * n : 16 * n + 17]) for n in range(count)])
    expected = model.loss(rows[:, :-1], rows[:, 1:]).item()
    assert outcome.summary["validation_loss"] == pytest.approx(expected, abs=1e-4)
    assert outcome.summary["validation_tokens"] == count * 16


RNN = {"model": "rnn", "width": 32, "heads": 1}


@pytest.mark.slow
def test_a_recurrent_run_continues_exactly(train, watcher, cpu):
    _, straight = train("straight", **RNN)
    _, out = train("run", watch=watcher(7, stop), **RNN)
    outcome = resume_training(out, cpu, progress=watcher())
    assert outcome.summary["status"] == "done"
    assert losses(out) == losses(straight)
    assert (out / "sample.txt").read_bytes() == (straight / "sample.txt").read_bytes()
    model, _ = load_run(out)
    assert (type(model), model.config.cell) == (CharRNN, "lstm")
    assert model.parameter_count() == json.loads((out / "config.json").read_text())["parameters"]


def test_a_recurrent_run_refuses_what_is_for_blocks(train):
    for changes, option in (({"precision": "fp8"}, "--precision fp8"), ({"recompute": ("blocks.*",)}, "--recompute")):
        with pytest.raises(ConfigError, match=f"{option} is for the blocks of a GPT, and micro is a recurrent model"):
            train("run", **RNN, **changes)


@pytest.mark.slow
def test_the_preset_rnn_beats_a_bigram_model(train):
    tenth = {"steps": 60, "validation_tokens": 4096, "predict_memory": False}  # of the preset's steps
    run = preset("rnn").replaced(**tenth)
    fields = {name: getattr(run, name) for name in ("model", "layers", "heads", "width", "tokenizer", "vocab_size")}
    more = {name: getattr(run.training, name) for name in ("context", "batch_size", "learning_rate")}
    outcome, _ = train("run", **tenth, **fields, **more, microbatch=run.training.batch_size)
    assert outcome.summary["beats_bigram"]


@pytest.mark.slow
def test_the_seed_decides_the_losses(train, run):
    _, first = train("first")
    _, second = train("second")
    _, other = train("other", seed=4)
    assert losses(first) == losses(second)
    assert losses(first)[0] != losses(other)[0]
    assert (first / "sample.txt").read_bytes() == (second / "sample.txt").read_bytes()


@pytest.mark.slow
def test_micro_batches_do_not_change_the_gradient(train):
    _, whole = train("whole", microbatch=4)
    _, parts = train("parts", microbatch=1)
    assert [loss for _, loss, _ in losses(parts)] == pytest.approx([loss for _, loss, _ in losses(whole)], rel=1e-4)


@pytest.mark.parametrize("at", [1, 7, 11, 12])
@pytest.mark.sample(2)
def test_an_interrupted_run_continues_exactly(straight, train, watcher, cpu, at):
    interrupted, out = train("run", watch=watcher(at, stop))
    assert interrupted.signal == signal.SIGINT
    assert interrupted.summary["steps_done"] == min(at + 1, 12)  # the step in progress is done
    assert interrupted.summary["resume"] == f"accelerant train --resume {out}"
    assert not (out / "summary.json").exists()
    resumed = resume_training(out, cpu, progress=watcher())
    assert resumed.summary["status"] == "done"
    assert losses(out) == losses(straight)
    a, b = (load_file(folder / "model.safetensors") for folder in (out, straight))
    assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.slow
def test_lines_past_the_checkpoint_are_dropped(straight, train, watcher, cpu):
    _, out = train("run", watch=watcher(5, stop))
    with (out / "metrics.jsonl").open("a") as file:  # as a crash some steps after the checkpoint leaves it
        file.writelines((straight / "metrics.jsonl").read_text().splitlines(keepends=True)[6:9])
        file.write('{"step": 10, "lo')
    resume_training(out, cpu, progress=watcher())
    assert losses(out) == losses(straight)


@pytest.mark.slow
@pytest.mark.parametrize("at", [5, 12])
def test_a_run_without_its_metrics_goes_on_and_says_so(straight, train, watcher, cpu, at):
    _, out = train("run", watch=watcher(at, stop))
    (out / "metrics.jsonl").unlink()
    watch, notes = watcher(), []
    watch.note = notes.append
    resumed = resume_training(out, cpu, progress=watch)
    done = min(at + 1, 12)
    assert notes == [f"{out}/metrics.jsonl lacks {done} of the first {done} steps: so does the history"]
    assert losses(out) == losses(straight)[done:]
    assert (resumed.summary["tokens_per_s"] is None) == (resumed.summary["train_loss"] is None) == (done == 12)
    assert ("not recorded" in (out / "report.html").read_text()) == (done == 12)
    a, b = (load_file(folder / "model.safetensors") for folder in (out, straight))
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_periodic_checkpoints_are_written_while_training(train, watcher, tmp_path):
    seen = []
    watch = watcher()
    path = tmp_path / "run" / "checkpoint.safetensors"
    watch.records = lambda records: seen.append(load_checkpoint(path)[1]["step"] if path.exists() else 0)
    train("run", watch=watch, checkpoint_every_s=0.0, validations=0)
    assert seen == list(range(12))  # at each step's records, the checkpoint of the step before


def test_a_finished_run_says_so_and_is_not_touched(train, watcher, cpu):
    outcome, out = train("run")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    again = resume_training(out, cpu, progress=watcher())
    assert again.already_finished
    assert again.summary == outcome.summary
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_divergence_stops_and_keeps_the_last_good_checkpoint(train, run, tmp_path):
    with pytest.raises(DivergenceError, match=r"diverged at step \d+: loss .*; the last good checkpoint, of step \d+"):
        train("run", learning_rate=1e30, max_grad_norm=1e30, checkpoint_every_s=0.0)
    _, document = load_checkpoint(tmp_path / "run" / "checkpoint.safetensors")
    assert document["step"] == len(losses(tmp_path / "run"))


@pytest.mark.slow
def test_an_unfinished_run_is_kept_when_a_new_one_takes_its_folder(train, watcher, cpu):
    _, out = train("run", watch=watcher(5, stop))
    watch = watcher()
    train("run", watch=watch)
    kept = out / "unfinished-1"
    assert watch.notes == [f"kept the unfinished run that was here: accelerant train --resume {kept}"]
    resume_training(kept, cpu, progress=watcher())
    assert losses(kept) == losses(out)


@pytest.mark.slow
def test_a_finished_run_is_kept_or_overwritten_on_request(train, watcher, cpu, run):
    first, out = train("run", steps=5)
    model = (out / "model.safetensors").read_bytes()
    watch, kept = watcher(), out / "finished-1"
    train("run", steps=6, watch=watch)
    assert watch.notes == [f"kept the finished run that was here in {kept} (--overwrite replaces it)"]
    assert (kept / "model.safetensors").read_bytes() == model
    moved = resume_training(kept, cpu, progress=watcher())
    assert moved.already_finished
    assert moved.summary == {**first.summary, "out": str(kept), "report": str(kept / "report.html")}
    assert len(losses(out)) == 6

    silent = watcher()
    shorter = run.replaced(steps=4)
    run_training(shorter, out, cpu, progress=silent, overwrite=True)
    assert silent.notes == []
    assert len(losses(out)) == 4
    assert "finished-2" not in files(out)


@pytest.mark.slow
def test_a_finished_run_is_extended_exactly(train, watcher, cpu):
    """Interrupted or not, before or after the first checkpoint; where it fails the finished run stays."""
    _, out = train("run", steps=5)
    again = shutil.copytree(out, out.with_name("again"))

    def resume(folder, watch, steps=None):
        return resume_training(folder, cpu, progress=watch, steps=steps)

    watch = watcher()
    first = json.loads((out / "summary.json").read_text())
    summary = resume(out, watch, 9).summary
    assert summary["steps"] == 9
    assert summary["seconds"] > first["seconds"]
    assert watch.notes == ["a run of 9 steps instead of 5: the learning rate follows the new number"]
    assert len(losses(out)) == 9
    assert resume(out, watcher()).already_finished
    assert_raises(ConfigError, "has done 9 steps: give more, got 8", lambda: resume(out, watcher(), 8))
    (out / "summary.json").unlink()  # as if it were interrupted after its last step
    with pytest.raises(ConfigError, match="has done 9 steps: give more than that, or none to go on to 9; got 8"):
        resume(out, watcher(), 8)

    config, checkpoint = (again / name for name in ("config.json", "checkpoint.safetensors"))
    before, whole = config.read_bytes(), checkpoint.read_bytes()
    checkpoint.write_bytes(whole[:-1])
    assert_raises(FormatError, "torn", lambda: resume(again, watcher(), 9))
    assert (again / "summary.json").exists()
    assert config.read_bytes() == before
    checkpoint.write_bytes(whole)
    assert resume(again, watcher(7, stop), 9).signal == signal.SIGINT
    assert not (again / "summary.json").exists()
    resume(again, watcher())
    assert losses(again) == losses(out)
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_event_logs_go_with_their_run(train, watcher):
    _, out = train("run", watch=watcher(5, stop))
    (out / "tensorboard").mkdir()
    (out / "tensorboard" / "events").write_text("of the first")
    train("run")
    assert (out / "unfinished-1" / "tensorboard" / "events").read_text() == "of the first"
    assert "tensorboard" not in files(out)
    (out / "tensorboard").mkdir()
    train("run")
    assert "tensorboard" not in files(out)


@pytest.mark.parametrize("name", ["model.safetensors", "tensorboard/events"])
def test_files_of_another_program_are_not_overwritten_nor_removed(train, tmp_path, name):
    path, top = tmp_path / "run" / name, name.partition("/")[0]
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    assert_raises(ConfigError, f"holds {top} of something else", train, "run")
    assert files(tmp_path / "run") == [top]
    assert path.read_text() == "precious"


def test_a_log_that_cannot_be_written_leaves_the_older_run(train, run, monkeypatch):
    _, out = train("run", steps=5)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert_raises(MissingDependency, "tensorboard", train, "run", log="tensorboard")
    assert (out / "summary.json").is_file()
    assert len(losses(out)) == 5


def test_bad_data_leaves_no_folder(train, run, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("only some words")
    assert_raises(ConfigError, "not enough data", train, "run", data=(str(short),))
    assert_raises(ConfigError, "no file or folder", train, "run", data=(str(tmp_path / "absent"),))
    assert not (tmp_path / "run").exists()


def test_a_folder_below_a_file_is_refused(train, text):
    assert_raises(ConfigError, r"cannot write to .*: .*text.txt is not a folder", train, "text.txt/run")


def test_a_folder_of_the_text_is_refused(train, text):
    link = text.parent / "link"
    link.symlink_to(text.parent)
    with pytest.raises(ConfigError, match="is a folder of the text, to which the run's files would be added"):
        train("", data=(str(text), str(link)))
    assert files(text.parent) == ["link", "text.txt"]


def test_resume_refuses_what_is_no_run(tmp_path, watcher, cpu):
    def resume():
        resume_training(tmp_path, cpu, progress=watcher())

    assert_raises(FormatError, r"holds no run: there is no config.json", resume)
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert_raises(FormatError, "not a run's of this program", resume)
    (tmp_path / "config.json").write_text("{")
    assert_raises(FormatError, "cannot read", resume)


@pytest.fixture
def interrupted(interrupted_once, text):
    folder = shutil.copytree(interrupted_once, text.with_name("run"))
    config = json.loads((folder / "config.json").read_text())
    config["run"]["data"] = [str(text)]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def resume(interrupted, watcher, cpu):
    return lambda: resume_training(interrupted, cpu, progress=watcher())


NAMES = (
    *RunFolder.FILES, RunFolder.LEDGER, f"{RunFolder.LEDGER}.head", RunFolder.EVENT_LOGS, BestModel.NAME,
    ".accelerant-write-test", ".checkpoint.safetensors.new", ".checkpoint.safetensors.1.00000000.tmp",
)  # fmt: skip


@pytest.mark.parametrize("start", ["resume", pytest.param("anew", marks=pytest.mark.slow)])
def test_no_link_in_a_received_folder_is_written_through(tmp_path, interrupted, start, resume, cpu, watcher, run):
    """Each name that a run writes is a link, to a file that the run needs, a file of the user, or to none yet."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for number, name in enumerate(NAMES):
        if (interrupted / name).exists():
            (interrupted / name).rename(outside / name)
        elif number % 2:
            (outside / name).write_text("precious")
        if name != "summary.json" or number % 2 == 0:  # with a summary the run would be finished
            (interrupted / name).symlink_to(outside / name)
    before = {path.name: path.read_bytes() for path in outside.iterdir()}
    if start == "resume":
        resume()
    else:
        run_training(run, interrupted, cpu, progress=watcher())
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == before
    assert not (interrupted / "summary.json").is_symlink()


@pytest.mark.parametrize(("name", "value", "message"), [
    ("width", 1 << 20, r"checkpoint .* has [\d,]+ bytes, too few for a model of 1 layers of width 1,048,576"),
    ("layers", 4000, "too few for a model of 4,000 layers"),
    ("layers", 1 << 40, "layers must be at most 4096, got 1099511627776"),
    ("context", 1 << 40, "too few for a model of"),
    ("sample_tokens", 1 << 31, "sample_tokens must be at most 1048576"),
    ("validations", 1 << 31, "validations must be at most 65536"),
    ("steps", -5, "not the settings of a run: steps must be above 0, got -5"),
])  # fmt: skip
@pytest.mark.sample(3)
def test_sizes_in_a_received_config_are_checked_before_anything_is_allocated(interrupted, resume, name, value, message):
    config = json.loads((interrupted / "config.json").read_text())
    config["run"]["recipe"][name] = value
    (interrupted / "config.json").write_text(json.dumps(config))
    assert_raises(FormatError, message, resume)


STATES = [
    *(({"step": value}, "step'? must be") for value in (None, "3", 3.0, -1, 1 << 63, [3])),
    ({"step": 99}, "is of step 99, of 12"),
    *(({name: 7}, f"{name} must be an object") for name in ("config", "position", "best", "optimizer", "random")),
    ({"position": {"epoch": -1}}, "'epoch' must be 0 or more"),
    ({"best": {"loss": "low"}}, r"best\['loss'\] must be a number or null"),
    ({"evaluations": [{"step": 1}]}, r"evaluations\[0\] lacks the field 'loss'"),
    ({"callbacks": [["x"]]}, r"callbacks\[0\] must be a list of 2 values"),
    ({"callbacks": [["x\n\x1b[2J" * 99, {}]]}, "has the state of a callback"),
    ({"optimizer": {"blocks.0.exp_avg": 3}}, "optimizer.'blocks.0.exp_avg' is 3"),
    ({"random": {"numpy": [10**6, 0, 0.0]}}, "the state of no random generator: a position of 1000000"),
    ({"random": {"python": [3]}}, "the state of no random generator"),
]


@pytest.mark.parametrize(("changes", "message"), STATES, ids=str)
@pytest.mark.sample(4)
def test_a_crafted_state_in_a_checkpoint_is_refused_before_anything_is_restored(interrupted, resume, changes, message):
    path = interrupted / "checkpoint.safetensors"
    tensors, document = load_checkpoint(path)
    document |= changes
    save_checkpoint(path, tensors, {name: value for name, value in document.items() if value is not None})
    metrics, generator = (interrupted / "metrics.jsonl").read_bytes(), random.getstate()
    assert_raises((FormatError, ConfigError), message, resume)
    assert (interrupted / "metrics.jsonl").read_bytes() == metrics
    assert random.getstate() == generator


@pytest.mark.parametrize(("name", "tensor", "message"), [
    ("optimizer.wte.weight.exp_avg", torch.zeros(()), r"another shape: optimizer.wte.weight.exp_avg is \(\), not"),
    ("optimizer.wte.weight.step", torch.zeros(3), r"optimizer.wte.weight.step is \(3,\), not \(\)"),
    ("optimizer.wte.weight.exp_avg", "int64", "another dtype: optimizer.wte.weight.exp_avg is torch.int64"),
    ("random.cpu", torch.zeros(16, dtype=torch.uint8), "the state of no random generator"),
    ("random.python", torch.zeros(625, dtype=torch.int64) - 1, "the state of no random generator"),
    ("random.numpy", torch.zeros(600, dtype=torch.int64), "the state of no random generator"),
    ("model.wpe.weight", torch.zeros(16, 24), r"another shape: model.wpe.weight is \(16, 24\), .* wants \(16, 16\)"),
    ("optimizer.norm.weight.exp_avg", None, "another model: optimizer.norm.weight.exp_avg"),
], ids=["scalar", "steps", "integers", "torch", "python", "numpy", "parameter", "missing"])  # fmt: skip
@pytest.mark.sample(3)
def test_crafted_tensors_in_a_checkpoint_are_refused(interrupted, resume, name, tensor, message):
    path = interrupted / "checkpoint.safetensors"
    tensors, document = load_checkpoint(path)
    tensors[name] = tensors[name].long() if isinstance(tensor, str) else tensor
    save_checkpoint(path, {each: value for each, value in tensors.items() if value is not None}, document)
    assert_raises(FormatError, message, resume)


def test_the_lock_of_a_received_folder_is_a_file_of_its_own(interrupted, resume, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (interrupted / RunLock.NAME).symlink_to(tmp_path / "precious")
    assert_raises(ConfigError, r"cannot write to .*run: it is a symlink, which is not written through", resume)
    assert (tmp_path / "precious").read_text() == "precious"
    (interrupted / RunLock.NAME).unlink()
    os.mkfifo(interrupted / RunLock.NAME)
    assert_raises(ConfigError, r"cannot write to .*run: it is not a regular file", resume)


def test_resume_refuses_a_torn_checkpoint_and_leaves_the_metrics(interrupted, resume):
    metrics = (interrupted / "metrics.jsonl").read_bytes()
    path = interrupted / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert_raises(FormatError, "torn", resume)
    path.unlink()
    assert_raises(FormatError, "no checkpoint", resume)
    assert (interrupted / "metrics.jsonl").read_bytes() == metrics


def test_resume_refuses_other_data(interrupted, resume, text):
    text.write_text(text.read_text().replace("some text", "more text"))
    assert_raises(FormatError, r"the data of .* changed since its checkpoint", resume)


@pytest.mark.slow
def test_a_bpe_run_resumes_with_its_own_tokenizer(train, watcher, cpu, tmp_path):
    bpe = {"tokenizer": "bpe", "vocab_size": 280}
    with override(cache_dir=tmp_path / "cache"):
        _, straight = train("straight", **bpe)
        _, out = train("run", watch=watcher(5, stop), **bpe)
    with override(cache_dir=tmp_path / "other"):
        outcome = resume_training(out, cpu, progress=watcher())
    assert losses(out) == losses(straight)
    assert (out / "tokenizer.json").is_file()
    assert outcome.summary["validation_nats_per_byte"] < outcome.summary["validation_loss"]


@pytest.mark.slow
def test_a_run_begins_with_a_model_of_hugging_face(train, watcher, cpu, tmp_path):
    """One step with a tiny rate leaves the model as it was; an interrupted run resumes without the folder."""
    with override(cache_dir=tmp_path / "cache"):
        _, first = train("first", tokenizer="bpe", vocab_size=280)
    folder = tmp_path / "hub"
    size = load_run(first)[1].vocab_size + 3  # more tokens than the tokenizer has, as in padded models
    torch.manual_seed(1)
    given = GPT(GPTConfig(vocab_size=size, context=24, layers=2, heads=2, width=16, eps=1e-6, tied=False)).half()
    given.save_pretrained(folder)
    shutil.copy(first / "tokenizer.json", folder)
    begin = {"init_from": str(folder), "learning_rate": 1e-12, "weight_decay": 0.0}
    _, straight = train("straight", **begin)
    _, out = train("run", watch=watcher(5, stop), **begin)
    shutil.rmtree(folder)
    resume_training(out, cpu, progress=watcher())
    assert losses(out) == losses(straight)
    model, tokenizer = load_run(out)
    assert (model.config, tokenizer.vocab_size) == (given.config, size - 3)
    for name, value in given.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value.float(), rtol=1e-5, atol=1e-6)


@pytest.fixture
def initial(tmp_path):
    """The folder of a model of bytes, as its author or someone else left it."""
    folder = tmp_path / "hub"
    GPT(GPTConfig(vocab_size=256, context=24, layers=1, heads=2, width=16)).save_pretrained(folder)
    return folder


def test_bad_folders_to_begin_with_leave_no_folder(train, initial, tmp_path):
    config = json.loads((initial / "config.json").read_text())
    for change, error, message in (
        ({}, FormatError, "cannot read the tokenizer .*tokenizer.json"),
        ({"model_type": "llama"}, UnsupportedCase, "model_type must be 'gpt2', got 'llama'"),
        ({"n_layer": 10**9}, FormatError, "too few for the 1000000000 layers of its config"),
        ({"n_embd": 32}, FormatError, "must be"),
    ):
        (initial / "config.json").write_text(json.dumps(config | change))
        assert_raises(error, message, train, "run", init_from=str(initial))
        assert not (tmp_path / "run").exists()
    assert_raises(ConfigError, r"--init-from and --out are both .*hub", train, "hub", init_from=str(initial))


def test_epochs_become_steps(run, tmp_path, cpu, watcher, text):
    started = {"progress": watcher()}
    outcome = run_training(run, tmp_path / "run", cpu, epochs=0.05, **started)
    tokens = json.loads((tmp_path / "run" / "config.json").read_text())["corpus"]["train_tokens"]
    assert outcome.summary["steps"] == -(-tokens // (20 * 4 * 16))
    assert outcome.summary["epochs"] == pytest.approx(0.05, abs=0.01)
    assert resume_training(tmp_path / "run", cpu, epochs=0.05, **started).already_finished


def test_torchs_global_settings_are_put_back(train):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train("run")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_a_signal_to_all_processes_that_the_launcher_passes_on_does_not_interrupt_the_checkpoint():
    assert threading.current_thread() is threading.main_thread()  # or the signals would end this process
    hangup = getattr(signal, "SIGHUP", signal.SIGTERM)  # of a terminal that closes
    if signal.getsignal(hangup) == signal.SIG_IGN:  # under nohup
        hangup = signal.SIGTERM
    with StopRequest() as stop:
        for number in (hangup, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert stop.signal == hangup
        stop._at -= 2.0
        signal.raise_signal(signal.SIGTERM)
        assert_raises(KeyboardInterrupt, None, signal.raise_signal, signal.SIGINT)


def test_presets_are_as_documented():
    assert set(PRESETS) == {"tiny", "small", "gpt2", "rnn", "llama"}
    gpt2 = preset("gpt2")
    assert (gpt2.layers, gpt2.heads, gpt2.width, gpt2.vocab_size) == (12, 12, 768, 50257)
    assert gpt2.tokens_per_step == 32 * 1024
    for run in PRESETS.values():
        assert RunConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run


@pytest.mark.parametrize(("changes", "message"), [
    ({"seed": -1}, "seed must be 0 to"),
    ({"seed": 2**63}, "seed must be 0 to"),
    ({"steps": -1}, "steps must be above 0, got -1"),
    ({"steps": 0}, "steps must be above 0, got 0"),
    ({"cpu_threads": -1}, "cpu_threads must be above 0, got -1"),
    ({"learning_rate": -0.1}, "learning_rate must be above 0"),
    ({"microbatch": 3}, "microbatch must divide the batch of 4, got 3"),
    ({"tokenizer": "words"}, "tokenizer must be bytes or bpe, got 'words'"),
    ({"tokenizer": 7}, "tokenizer must be bytes or bpe, got 7"),
    ({"steps": "60"}, "steps must be a whole number, got '60'"),
    ({"steps": 6.0}, "steps must be a whole number, got 6.0"),
    ({"steps": True}, "steps must be a whole number, got True"),
    ({"learning_rate": "1e-3"}, "learning_rate must be a finite number, got '1e-3'"),
    ({"max_grad_norm": float("nan")}, "max_grad_norm must be a finite number, got nan"),
    ({"betas": (0.9, 1.0)}, r"betas must be 0 or more and below 1, got \(0\.9, 1\.0\)"),
])  # fmt: skip
def test_runs_refuse(run, changes, message):
    assert_raises(ConfigError, message, run.replaced, **changes)


@pytest.mark.slow
def test_an_interruption_after_the_last_step_can_be_resumed_too(train, watcher, cpu):
    def interrupt(text):
        if text == "writing a sample":
            raise KeyboardInterrupt

    watch = watcher()
    watch.phase = interrupt
    outcome, out = train("run", watch=watch)
    assert outcome.signal == signal.SIGINT
    assert outcome.summary["steps_done"] == 12
    resumed = resume_training(out, cpu, progress=watcher())
    assert resumed.summary["status"] == "done"
    assert len(losses(out)) == 12


@pytest.mark.parametrize(("changes", "message"), [
    ({"seed": "1"}, "seed must be a whole number, got '1'"),
    ({"deterministic": "yes"}, "deterministic must be true or false, got 'yes'"),
    ({"data": "stdlib"}, "data must be a list of strings, got 'stdlib'"),
    ({"data": [1]}, r"data must be a path or several, got \(1,\)"),
    ({"data": [""]}, "data names an empty path"),
    ({"recipe": {**preset("tiny").to_dict()["recipe"], "steps": "60"}}, "steps must be a whole number, got '60'"),
    ({"recipe": []}, "not the settings of a run"),
])  # fmt: skip
def test_settings_of_another_type_are_refused(run, changes, message):
    assert_raises(FormatError, message, lambda: RunConfig.from_dict({**run.to_dict(), **changes}))


def test_a_run_without_a_checkpoint_says_how_to_start_again(train, interrupted, resume, run, text):
    (interrupted / "checkpoint.safetensors").unlink()
    with pytest.raises(FormatError, match=r"none was written yet: start it again$"):
        resume()  # it is of no preset
    config = json.loads((interrupted / "config.json").read_text())
    changed = preset("tiny").resized(48, None).replaced(steps=7, seed=3, data=run.data)
    config["run"] = changed.to_dict()
    (interrupted / "config.json").write_text(json.dumps(config))
    command = (
        f"accelerant train --preset tiny --data {text} --device cpu --steps 7 --batch-size 48 --seed 3 "
        f"--out {interrupted}"
    )
    assert_raises(FormatError, f"none was written yet: start again with: {command}$", resume)


def test_a_folder_in_use_is_refused_and_left_alone(train, watcher, tmp_path, cpu):
    tried = []

    def second():
        before = files(tmp_path / "run")
        assert_raises(ConfigError, rf"run is in use by process {os.getpid()}: wait", train, "run")
        with pytest.raises(ConfigError, match=rf"run is in use by process {os.getpid()}: wait"):
            resume_training(tmp_path / "run", cpu, progress=watcher())
        assert files(tmp_path / "run") == before
        tried.append(True)

    _, out = train("run", watch=watcher(5, second))
    assert tried
    assert len(losses(out)) == 12
    assert RunLock.NAME not in files(out)


def test_short_runs_of_large_presets_spend_little_beside_their_steps():
    for name in ("small", "gpt2"):
        whole = preset(name)
        assert whole.validation_sizes == (whole.validation_tokens // 4, whole.validation_tokens)
        assert whole.sample_size == whole.sample_tokens
        short = whole.replaced(steps=5)
        way, last = short.validation_sizes
        learnt = 5 * short.tokens_per_step
        assert 0 < short.validations * way + last <= learnt / 4
        assert 0 < short.sample_size * short.training.context <= learnt / 4
    for steps in (1, 2400):
        tiny = preset("tiny").replaced(steps=steps)
        assert (tiny.validation_sizes, tiny.sample_size) == ((1 << 14, 1 << 16), 400)


def test_the_cpu_takes_few_tokens_at_once():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    configs = {name: run.training for name, run in PRESETS.items()}
    at_once = {name: windows_at_once(config.microbatch, config.context, cpu) for name, config in configs.items()}
    assert at_once == {"tiny": 8, "small": 16, "gpt2": 4, "rnn": 16, "llama": 8}
    assert windows_at_once(64, 256, cuda) == 64
    assert windows_at_once(3, 2048, cpu) == 1


def test_long_phases_tell_how_far_they_are(train, watcher):
    watch = watcher()
    train("run", watch=watch)
    assert (1.0, "held-out loss") in watch.shares
    assert watch.shares[-1] == (1.0, "")  # of the sample
    assert (0.5, "step 1") in watch.shares


def test_the_steps_that_a_loss_still_needs_are_those_of_its_curve():
    """The loss falls by 0.3 with each doubling of the steps: one more doubling, and a fifth."""
    curve = [(25, 3.6), (50, 3.3), (100, 3.0)]
    assert steps_until(curve, 2.7) == 120
    assert steps_until([*curve, (200, 3.1)], 2.7) is None  # it rises
    assert steps_until(curve, 0.9) is None  # 12,800 steps
    assert steps_until([(30, 3.0), (30, 3.0)], 2.7) is None
    assert steps_until([(1, 3.6), (2, 3.3), (4, 3.0)], 2.7) is None


def test_a_prompt_is_a_word_of_the_text():
    assert prompt_of("def a():\n    return\ndef b(): ...\nclass C:\n") == "def "
    assert prompt_of("1, 2, 3\n4, 5, 6, 7, 8, 9\n") == "1, 2, 3\n4, 5, 6,"
    assert prompt_of("\n\n") == "\n"


def test_a_long_run_on_the_cpu_is_announced_with_what_takes_less(run):
    assert duration_note(run, pytest.fail) is None  # not even measured
    tiny, gpt2 = preset("tiny"), preset("gpt2")
    threads = f"{torch.get_num_threads()} thread"
    assert duration_note(tiny, lambda _: 1e12) is None
    assert duration_note(tiny, lambda _: 2e10).startswith(f"2,400 steps take about 3 minutes on the CPU with {threads}")
    note = duration_note(gpt2, lambda _: 1e11)
    assert re.fullmatch(
        rf"2,000 steps take about 6 days on the CPU with {threads}s?; --preset tiny about 33 seconds, --steps 13 an "
        "hour; Ctrl-C keeps a checkpoint",
        note,
    )
    assert "--preset" not in duration_note(tiny, lambda _: 1e8)
    assert 1e8 < cpu_flops_per_s(tiny) < 1e13


@pytest.fixture
def disk(monkeypatch, tmp_path_factory):
    """A full disk: `files` is the room for checkpoints and the model in bytes, `lines` that for metrics in steps."""
    free = SimpleNamespace(files=1 << 30, lines=1 << 30, temporary=1 << 30)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    commit, append = AtomicFile.commit, MetricsFile.append

    def full(file):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    def committed(file):
        used = sum(path.stat().st_size for path in file.path.parent.glob("*.safetensors"))
        file.file.flush()
        room = free.temporary if file.path.is_relative_to(tempfile.gettempdir()) else free.files
        if "safetensors" in file.path.name and used + file.temporary.stat().st_size > room:
            file.discard()
            raise full(file.path)
        commit(file)

    def appended(metrics, records):
        if records[-1].step > free.lines:
            raise full("metrics.jsonl")
        append(metrics, records)

    monkeypatch.setattr(AtomicFile, "commit", committed)
    monkeypatch.setattr(MetricsFile, "append", appended)
    return free


def test_a_disk_without_room_for_the_checkpoints_is_refused_before_the_earlier_run_moves(train, monkeypatch):
    _, out = train("run", steps=2)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20, total=1 << 30))
    assert_raises(ConfigError, r"run needs 4\.\d MiB for checkpoints and .*, and its disk has 1\.0 MiB", train, "run")
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.mark.slow
def test_a_full_disk_names_the_file_and_keeps_what_fits(straight, train, watcher, cpu, disk, tmp_path):
    """First without the metrics, then with room for one checkpoint, then for two, and for the weights alone."""
    checkpoint, model = ((straight / name).stat().st_size for name in ("checkpoint.safetensors", "model.safetensors"))

    def resume(out):
        return resume_training(out, cpu, progress=watcher())

    disk.lines = 5
    assert_raises(OSError, r"No space .*; step 6 is kept in a checkpoint.*: 'metrics.jsonl'", train, "run")
    out, disk.lines = tmp_path / "run", 1 << 30
    assert load_checkpoint(out / "checkpoint.safetensors")[1]["step"] == 6

    disk.files = checkpoint + 100
    assert_raises(OSError, r"No space .*; step 6 is kept in a checkpoint.*run/checkpoint.safetensors", resume, out)
    disk.files = 2 * checkpoint + 1000  # the last one, and the model once the one before it is gone
    resume(out)
    assert not (out / "checkpoint-previous.safetensors").exists()
    assert (out / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()

    disk.files = model + 100
    with pytest.raises(OSError, match=r"the weights so far are in .*model.safetensors: '.*/checkpoint.safetensors'"):
        train("other")
    weights = load_run(tmp_path / "other")[0].state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in load_file(straight / "model.safetensors").items())


@pytest.mark.slow
def test_results_that_find_no_room_are_written_by_a_resumption(straight, train, watcher, cpu, disk, tmp_path):
    checkpoint = (straight / "checkpoint.safetensors").stat().st_size
    disk.files = checkpoint + 400
    assert_raises(OSError, r"step 12 is kept in a checkpoint, with more space: accelerant train --resume", train, "run")
    disk.files = 1 << 30
    out = tmp_path / "run"
    assert resume_training(out, cpu, progress=watcher()).summary["status"] == "done"
    assert (out / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


def test_the_time_of_a_resumed_run_counts_its_earlier_parts(interrupted_once, tmp_path, cpu, watcher):
    out = shutil.copytree(interrupted_once, tmp_path / "run")
    tensors, document = load_checkpoint(out / "checkpoint.safetensors")
    assert 0 < document["seconds"] < 60
    save_checkpoint(out / "checkpoint.safetensors", tensors, {**document, "seconds": 1e6})
    summary = resume_training(out, cpu, progress=watcher()).summary
    assert 1e6 < summary["seconds"] < 1e6 + 1000
    assert "1,000," in (out / "report.html").read_text()


def test_a_rising_held_out_loss_is_pointed_out_in_log_summary_and_report(train, watcher, text):
    text.write_text("".join(random.Random(0).choices("abcdefgh ", k=150)))  # nothing to learn but by heart
    watch = watcher()
    outcome, out = train("run", watch=watch, steps=80, width=32, batch_size=8, microbatch=8, validations=4)
    assert outcome.summary["held_out"].startswith("the held-out loss rises: ")
    assert [note for note in watch.notes if "the held-out loss rises: " in note][1:] == []  # once
    assert any("train on more data, a smaller model, or for about" in note for note in watch.notes)
    assert "The held-out loss rises: " in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("curve", "rises"),
    [([3.0, 2.0, 1.9], False), ([2.0, 2.03, 2.05], False), ([2.0, 1.5, 1.6], True), ([2.0, 2.5], True),
     ([2.0, 2.5, 1.9], False), ([0.001, 0.009], False), ([math.nan, 2.0, 3.0], True), ([2.0], False), ([], False)],
)  # fmt: skip
def test_a_held_out_loss_rises_when_it_is_clearly_above_its_best(curve, rises):
    history = History(evaluations=[Evaluation(10 * k, loss, 5) for k, loss in enumerate(curve)])
    assert bool(history.rising) == rises == ("learns its training data by heart" in str(history))


@pytest.mark.parametrize("which", ["straight", "of_words"])
def test_a_run_opens_with_from_pretrained_and_exports_to_transformers_with_its_tokens(which, request, tmp_path, train):
    transformers = pytest.importorskip("transformers")
    out = request.getfixturevalue(which)
    model, tokenizer = load_run(out)
    opened = GPT.from_pretrained(out, dtype=torch.float64)
    assert all(torch.equal(value.double(), opened.state_dict()[name]) for name, value in model.state_dict().items())
    assert_raises(UnsupportedCase, r"is a run of a GPT: GPT\.from_pretrained opens it", Llama.from_pretrained, out)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "generation_config.json").write_text('{"eos_token_id": 101}')  # of a model that was there
    export_run(out, tmp_path / "export")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    for text in ("le 3\u1d49 café\n\n süß", "the 9th line  of\tsome \U0001f600", "日本", ""):
        tokens = tokenizer.encode_text(text)
        assert theirs(text, add_special_tokens=False).input_ids == tokens
        assert theirs.decode(tokens) == text == tokenizer.decode(tokens)
    assert theirs.eos_token_id == tokenizer.end
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    tokens = torch.tensor([tokenizer.encode_text("the line")])
    assert torch.allclose(again(tokens).logits, model(tokens), atol=1e-4)
    assert again.generation_config.eos_token_id == tokenizer.end
    text = load_text_model(tmp_path / "export", torch.device("cpu"))
    assert text.prompt("the line") == tokens[0].tolist()
    assert text.stops == (() if tokenizer.end is None else (tokenizer.end,))
    assert_raises(ConfigError, "is the folder of a run: export into another one", export_run, out, out)
    begun = train("begun", init_from=str(tmp_path / "export"), steps=1)[1]
    assert type(load_run(begun)[1]) is type(tokenizer)
    quantize(model)
    assert model.generate(tokens, 3, temperature=0).shape[1] == tokens.shape[1] + 3
    model.save_pretrained(tmp_path / "quantized")
    saved = GPT.from_pretrained(tmp_path / "quantized")
    quantize(saved)
    assert torch.equal(saved(tokens), model(tokens))


def test_a_recurrent_run_opens_but_has_no_form_in_transformers(train, tmp_path):
    _, out = train("run", **RNN, steps=1)
    assert type(CharRNN.from_pretrained(out)) is CharRNN
    with pytest.raises(UnsupportedCase, match=r"is a run of a CharRNN: CharRNN\.from_pretrained opens it"):
        GPT.from_pretrained(out)
    assert_raises(UnsupportedCase, "CharRNN has no format of Hugging Face's", export_run, out, tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("room", [1 << 30, 0])
def test_a_disk_that_fills_before_the_first_checkpoint_keeps_the_weights_elsewhere_or_says_that_nothing_is_kept(
    train, watcher, disk, room
):
    disk.lines, disk.files, disk.temporary = 2, 0, room
    told = r"No space left on device; " + (
        r"the weights so far are in (\S+)/model.safetensors, for --init-from \1:" if room else
        r"nothing of the training is kept: no checkpoint was written, and no weights \(No space left on device\):"
    )  # fmt: skip
    full_disk = assert_raises(OSError, told + " 'metrics.jsonl'$", train, "run")
    kept = list(Path(tempfile.gettempdir()).iterdir())
    assert len(kept) == bool(room)
    if room:
        assert str(kept[0]) in str(full_disk)
        disk.lines, disk.files = 1 << 30, 1 << 30
        assert train("again", init_from=str(kept[0]), steps=1)[0].summary["status"] == "done"


def test_a_folder_that_is_deleted_during_a_run_is_no_wrong_path_and_keeps_the_weights_elsewhere(
    train, watcher, disk, tmp_path
):
    with pytest.raises(OSError, match=r"No such file .*; the weights so far are in .*: '.*metrics.jsonl'") as gone:
        train("run", watch=watcher(2, lambda: shutil.rmtree(tmp_path / "run")))
    assert type(gone.value) is OSError  # of FileNotFoundError the command's status says that its input is wrong
    assert load_run(next(Path(tempfile.gettempdir()).iterdir()))


@pytest.mark.parametrize(
    ("changes", "told"), [({}, False), ({"seed": 4}, True), ({"context": 8}, True)], ids=["same", "seed", "context"]
)
def test_a_model_that_was_trained_on_text_that_is_held_out_is_named(train, straight, watcher, changes, told):
    watch = watcher()
    train("run", watch=watch, init_from=str(straight), steps=1, **changes)
    assert any("some of the text that is held out here" in note for note in watch.notes) == told
    assert all("give --seed 3 and --context 16, as there" in note for note in watch.notes)


def test_a_context_above_that_of_the_model_to_begin_with_is_refused(train, straight, tmp_path):
    with pytest.raises(ConfigError, match="--context 32 is above the 16 tokens of the model in"):
        train("run", init_from=str(straight), context=32)
    assert not (tmp_path / "run").exists()
