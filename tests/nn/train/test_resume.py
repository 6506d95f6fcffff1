import dataclasses
import errno
import json
import os
import random
import signal

import numpy as np
import pytest
import torch
from problems import Convolutional, Dense, digits, spiral
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from accelerant.errors import ConfigError, FormatError
from accelerant.nn.train import Callback, TrainConfig, Trainer, checkpoint, fit
from accelerant.nn.train.checkpoint import Checkpoints, load_checkpoint, save_checkpoint
from accelerant.nn.train.history import read_metrics
from accelerant.nn.train.step import LossScale
from processes import forkserver
from refusals import assert_raises

CONFIG = TrainConfig(steps=20, batch_size=8, learning_rate=1e-2, device="cpu", predict_memory=False, checkpoint_every=6)


class Interrupt(Callback):
    """SIGINT when the numbers of a step arrive: the step after it is done too."""

    def __init__(self, at):
        self.at = at

    def records(self, trainer, records):
        if self.at in [record.step for record in records]:
            os.kill(os.getpid(), signal.SIGINT)


def start(model, data, folder, **options):
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    changes = options.pop("changes", {})
    config = dataclasses.replace(CONFIG, out=str(folder), **changes)
    return fit(model(), *(data() if callable(data) else data), config=config, **options)


def stopped(model, data, folder, at, **options):
    """The same run, interrupted, and gone on with in other states of all random generators."""
    with pytest.raises(KeyboardInterrupt, match=f"stopped after step ({at}|{at + 1}) of 20"):
        start(model, data, folder, callbacks=[Interrupt(at)], **options)
    torch.manual_seed(999)
    random.seed(999)
    np.random.seed(999)
    changes = options.pop("changes", {})
    config = dataclasses.replace(CONFIG, out=str(folder), **changes)
    trainer = Trainer(fresh := model(), config)
    history = trainer.fit(*(data() if callable(data) else data), resume=True, **options)
    return fresh, history


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def dense():
    torch.manual_seed(0)
    return Dense(16, dropout=0.3)


def convolutional():
    torch.manual_seed(0)
    return Convolutional()


class Noisy(Dataset):
    """Draws from every generator for each item, as augmentations do."""

    def __init__(self):
        self.x, self.y = spiral(40, 0)

    def __len__(self):
        return 40

    def __getitem__(self, number):
        noise = torch.randn(2) + random.random() + float(np.random.rand())
        return self.x[number] + 0.01 * noise, self.y[number]


class Stream(IterableDataset):
    """Of no known length, and noisy too."""

    def __iter__(self):
        items = Noisy()
        return (items[number] for number in range(37))


NOISY = Noisy()

CASES = {
    "dense, dropout": (dense, spiral(40, 0), {}),
    "convolutional, batch norm": (convolutional, digits(40, 0), {}),
    "accumulated": (dense, spiral(40, 0), {"changes": {"accumulate": 4}}),
    "sgd": (dense, spiral(40, 0), {"changes": {"optimizer": "sgd", "max_grad_norm": None}}),
    "float16": (dense, spiral(40, 0), {"changes": {"precision": "float16"}}),
    "evaluated": (dense, spiral(40, 0), {"validation": spiral(20, 1), "changes": {"patience": 50, "keep_best": True}}),
    "dataset": (dense, lambda: (Noisy(),), {}),
    "loader": (dense, lambda: (DataLoader(Noisy(), batch_size=8, shuffle=True),), {}),
    "loader, batches of the caller's": (
        dense,
        lambda: (
            DataLoader(
                NOISY, batch_sampler=BatchSampler(RandomSampler(NOISY, generator=torch.Generator()), 8, drop_last=False)
            ),
        ),
        {},
    ),
    "stream": (dense, lambda: (Stream(),), {}),
    "loader, accumulated, odd": (
        dense,
        lambda: (DataLoader(Noisy(), batch_size=3, shuffle=True),),
        {"changes": {"accumulate": 2}},
    ),
}


def test_a_loss_scale_is_resumed_bit_for_bit(tmp_path):
    def run(folder, steps):
        config = dataclasses.replace(CONFIG, out=str(tmp_path / folder), precision="float16", schedule="constant")
        trainer = Trainer(dense(), dataclasses.replace(config, steps=steps, warmup=0.0))
        trainer.loss_scale = LossScale(trainer.device, initial=2.0**40, interval=3)
        history = trainer.fit(*spiral(40, 0), resume=(tmp_path / folder).exists())
        return [(record.loss, record.loss_scale, record.skipped) for record in history.records]

    torch.manual_seed(5)
    straight = run("straight", 40)
    torch.manual_seed(5)
    run("run", 25)
    assert run("run", 40) == straight
    a, b = (load_checkpoint(tmp_path / name / "checkpoint.safetensors")[0] for name in ("run", "straight"))
    assert same(a, b)
    assert 10 < int(a["loss_scale.skipped"]) < 40
    del a["loss_scale.skipped"]
    save_checkpoint(
        tmp_path / "run" / "checkpoint.safetensors",
        a,
        load_checkpoint(tmp_path / "straight" / "checkpoint.safetensors")[1],
    )
    (tmp_path / "run" / "checkpoint-previous.safetensors").unlink()
    assert_raises(FormatError, "skipped is only in one of the two", run, "run", 40)


@pytest.mark.parametrize("at", [4, 5, 12])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_a_resumed_run_is_the_straight_run_bit_for_bit(tmp_path, case, at):
    model, data, options = CASES[case]
    straight = start(model, data, tmp_path / "straight", **options)
    fresh, history = stopped(model, data, tmp_path / "run", at, **options)
    assert history.resumed_from in (at, at + 1)  # where an evaluation follows the step, the run ends there
    assert history.status == "done"
    assert history.losses == straight.losses
    assert history.evaluations == straight.evaluations
    a, b = (load_checkpoint(tmp_path / name / "checkpoint.safetensors") for name in ("run", "straight"))
    assert same(a[0], b[0])  # model, optimizer, all random states
    assert (a[1]["random"], a[1]["best"]) == (b[1]["random"], b[1]["best"])
    if "keep_best" in options.get("changes", {}):
        best, _ = load_checkpoint(tmp_path / "straight" / "best.safetensors")
        assert same(dict(fresh.state_dict()), best)


@pytest.mark.slow
def test_workers_batches_are_the_same_after_a_resumption(tmp_path):
    def data():
        return (DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1),)

    straight = start(dense, data, tmp_path / "straight")
    _, history = stopped(dense, data, tmp_path / "run", 7)
    assert history.losses == straight.losses


def damaged(folder, name, how):
    path = folder / name
    data = bytearray(path.read_bytes())
    if how == "cut":
        data = data[:-7]
    elif how == "empty":
        data = data[:0]
    else:
        data[-100] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["cut", "empty", "flipped"])
def test_where_the_last_checkpoint_is_torn_the_one_before_serves(tmp_path, how):
    data = spiral(40, 0)
    straight = start(dense, data, tmp_path / "straight")
    assert_raises(KeyboardInterrupt, None, lambda: start(dense, data, tmp_path / "run", callbacks=[Interrupt(14)]))
    damaged(tmp_path / "run", "checkpoint.safetensors", how)
    config = dataclasses.replace(CONFIG, out=str(tmp_path / "run"))
    history = fit(dense(), *data, config, resume=True)
    assert history.resumed_from == 12
    assert history.losses == straight.losses
    words = "damaged" if how == "flipped" else "torn"
    assert words in history.notes[0]
    assert history.notes[0].endswith("using the previous one, of step 12")


def test_the_only_good_checkpoint_is_kept_when_the_disk_is_full_and_until_there_is_another(tmp_path, monkeypatch):
    for step in (1, 2):
        Checkpoints(tmp_path).save({"a": torch.full((2,), float(step))}, {"step": step})
    damaged(tmp_path, "checkpoint.safetensors", "flipped")
    resumed = Checkpoints(tmp_path)
    assert resumed.load()[1]["step"] == 1

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(resumed.path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", full)
        assert_raises(OSError, "No space left", resumed.save, {"a": torch.ones(2)}, {"step": 3})
    assert Checkpoints(tmp_path).load()[1]["step"] == 1
    Checkpoints(tmp_path).save({"a": torch.ones(2)}, {"step": 2})
    damaged(tmp_path, "checkpoint.safetensors", "flipped")
    resumed = Checkpoints(tmp_path)
    resumed.load()
    resumed.save({"a": torch.ones(2)}, {"step": 4})
    assert load_checkpoint(resumed.previous)[1]["step"] == 1


def test_where_both_are_torn_nothing_is_touched(tmp_path):
    data = spiral(40, 0)
    start(dense, data, tmp_path)
    damaged(tmp_path, "checkpoint.safetensors", "cut")
    damaged(tmp_path, "checkpoint-previous.safetensors", "flipped")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FormatError, match=r"checkpoint .*/checkpoint\.safetensors is torn"):
        fit(dense(), *data, dataclasses.replace(CONFIG, out=str(tmp_path)), resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]


def test_a_checkpoint_that_vanished_between_two_names_is_no_loss(tmp_path):
    """Killed after the last was renamed to be the one before, and before the new one had its name."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({"a": torch.ones(2)}, {"step": 1})
    checkpoints.path.rename(checkpoints.previous)
    names = ("best.safetensors", ".checkpoint.safetensors.new", "config.json")
    leftovers = [f".{name}.9.0123abcd.tmp" for name in names]
    for name in (".checkpoint.safetensors.new", ".tmpL8mNm7", *leftovers):  # the second is of safetensors
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (0, 0))
    assert checkpoints.exist
    tensors, document, note = checkpoints.load()
    assert document["step"] == 1
    assert same(tensors, {"a": torch.ones(2)})
    assert "no checkpoint" in note
    checkpoints.clean()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-previous.safetensors"]


def run_until_killed(folder, how):
    """The run of the test below, which ends while it writes a checkpoint, or between two steps."""

    class Kill(Callback):
        def before_step(self, trainer, step):
            if how == "step" and step == 13:
                os.kill(os.getpid(), signal.SIGKILL)

    whole = checkpoint.save_checkpoint

    def torn(path, tensors, document):
        whole(path, tensors, document)
        if how == "save" and document["step"] == 12:
            path.write_bytes(path.read_bytes()[:1000])
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_checkpoint = torn
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    config = dataclasses.replace(CONFIG, out=str(folder))
    fit(Dense(16, dropout=0.3), *spiral(40, 0), config, callbacks=[Kill()], resume=True)


def exit_code(folder, how):
    process = forkserver().Process(target=run_until_killed, args=(folder, how))
    process.start()
    process.join(300)
    return process.exitcode


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_bit_for_bit(tmp_path):
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    model = Dense(16, dropout=0.3)
    straight = fit(model, *spiral(40, 0), dataclasses.replace(CONFIG, out=str(tmp_path / "straight")))
    folder = tmp_path / "run"
    assert exit_code(folder, "save") == -signal.SIGKILL  # while the checkpoint of step 12 is written
    assert load_checkpoint(folder / "checkpoint.safetensors")[1]["step"] == 6
    assert exit_code(folder, "step") == -signal.SIGKILL  # between two steps
    config = dataclasses.replace(CONFIG, out=str(folder), checkpoint_every=6)
    assert fit(Dense(16, dropout=0.3), *spiral(40, 0), config, resume=True).resumed_from == 12
    a, b = (load_checkpoint(each / "checkpoint.safetensors")[0] for each in (folder, tmp_path / "straight"))
    assert same(a, b)
    assert [record.loss for record in read_metrics(folder / "metrics.jsonl")] == straight.losses


@pytest.fixture
def interrupted(tmp_path):
    assert_raises(KeyboardInterrupt, None, lambda: start(dense, spiral(40, 0), tmp_path, callbacks=[Interrupt(5)]))
    return dataclasses.replace(CONFIG, out=str(tmp_path))


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"batch_size": 4}, ConfigError, "was trained with batch_size=8, got 4"),
    ({"learning_rate": 0.1}, ConfigError, "was trained with learning_rate=0.01, got 0.1"),
    ({"seed": 1}, ConfigError, "was trained with seed=0, got 1"),
    ({"steps": 3}, ConfigError, r"has done \d+ steps: give more than that, or none to go on to \d+; got 3"),
])  # fmt: skip
def test_another_training_is_refused(interrupted, changes, error, message):
    with pytest.raises(error, match=message):
        fit(dense(), *spiral(40, 0), dataclasses.replace(interrupted, **changes), resume=True)


def test_other_data_and_other_models_are_refused(interrupted):
    assert_raises(FormatError, "changed since its checkpoint", fit, dense(), *spiral(40, 3), interrupted, resume=True)
    with pytest.raises(FormatError, match=r"another shape: model.down.weight is \(3, 16\), the model wants \(3, 17\)"):
        fit(Dense(17), *spiral(40, 0), interrupted, resume=True)
    with pytest.raises(FormatError, match=r"another dtype: model.down.bias is torch.float32, the model wants torch.bf"):
        fit(dense().bfloat16(), *spiral(40, 0), interrupted, resume=True)


def test_another_optimiser_is_refused(interrupted):
    with pytest.raises(FormatError, match="is of another optimizer: AdamW, got Adam"):
        fit(dense(), *spiral(40, 0), interrupted, optimizer=torch.optim.Adam, resume=True)


def test_a_refused_config_is_not_written_down(interrupted, tmp_path):
    before = (tmp_path / "train.json").read_bytes()
    with pytest.raises(ConfigError, match="was trained with batch_size=8, got 4"):
        fit(dense(), *spiral(40, 0), dataclasses.replace(interrupted, batch_size=4), resume=True)
    assert (tmp_path / "train.json").read_bytes() == before
    fit(dense(), *spiral(40, 0), dataclasses.replace(interrupted, checkpoint_every=7), resume=True)
    assert json.loads((tmp_path / "train.json").read_text())["checkpoint_every"] == 7


def test_a_run_that_was_stopped_early_has_nothing_left_to_do(tmp_path):
    config = dataclasses.replace(CONFIG, out=str(tmp_path), evaluate_every=2, patience=1, min_delta=9.0)
    first = fit(dense(), *spiral(40, 0), config, validation=spiral(20, 1))
    again = fit(dense(), *spiral(40, 0), config, validation=spiral(20, 1), resume=True)
    assert (first.status, first.steps) == (again.status, again.steps) == ("stopped", 4)
    assert again.reason == first.reason == "no better held-out loss in 1 evaluations"
    assert again.losses == first.losses
    patient = dataclasses.replace(config, patience=99)
    assert fit(dense(), *spiral(40, 0), patient, validation=spiral(20, 1), resume=True).status == "done"


class Counter(Callback):
    def __init__(self, by=1):
        self.count, self.by = 0, by

    def before_step(self, trainer, step):
        self.count += self.by

    def state(self):
        return {"count": self.count}

    def restore(self, state):
        self.count = state["count"]


def test_states_of_callbacks_come_back(tmp_path):
    config = dataclasses.replace(CONFIG, out=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        fit(dense(), *spiral(40, 0), config, callbacks=[Counter(1), Interrupt(9), Counter(100)])
    with pytest.raises(ConfigError, match="has the state of a callback Counter, which this training lacks"):
        fit(dense(), *spiral(40, 0), config, callbacks=[Counter()], resume=True)
    one, other = Counter(1), Counter(100)
    fit(dense(), *spiral(40, 0), config, callbacks=[Interrupt(-1), one, other], resume=True)
    assert (one.count, other.count) == (20, 2000)  # those of one class in their order


def test_resuming_needs_a_folder_and_begins_where_it_holds_nothing(tmp_path):
    with pytest.raises(ConfigError, match="resume continues from a checkpoint: give the config a folder"):
        fit(dense(), *spiral(40, 0), CONFIG, resume=True)
    history = fit(dense(), *spiral(40, 0), dataclasses.replace(CONFIG, out=str(tmp_path / "new")), resume=True)
    assert (history.resumed_from, history.steps) == (0, 20)


def test_a_checkpoint_of_the_first_format_is_read(tmp_path):
    """As it was before there was a Trainer: the hash of the text under another name, and nothing of the generators."""
    trainer = Trainer(dense(), dataclasses.replace(CONFIG, out=str(tmp_path)))
    trainer.fit(*spiral(40, 0))
    tensors, document = load_checkpoint(tmp_path / "checkpoint.safetensors")
    first = {name: value for name, value in tensors.items() if name not in ("random.numpy", "random.python")}
    save_checkpoint(tmp_path / "checkpoint.safetensors", first, {"step": 20, "corpus_sha256": document["data"]})
    history = fit(dense(), *spiral(40, 0), trainer.config, resume=True)
    assert history.resumed_from == history.steps == 20


def test_a_dataset_in_memory_and_one_by_one_are_the_same_training(tmp_path):
    x, y = spiral(40, 0)
    assert (
        start(dense, (x, y), tmp_path / "a").losses
        == start(dense, lambda: (TensorDataset(x, y),), tmp_path / "b").losses
    )
