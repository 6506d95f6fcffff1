import errno
import hashlib
import math
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from accelerant.errors import ConfigError, FormatError, MissingFile, UnsupportedCase
from accelerant.nn.train import Evaluation, TrainConfig
from accelerant.nn.train import checkpoint as module
from accelerant.nn.train.checkpoint import (
    BestModel,
    Checkpoints,
    gathered,
    load_checkpoint,
    require_same_config,
    require_same_shapes,
    require_space,
    restored,
    save_checkpoint,
    write_tensors,
)
from refusals import assert_raises

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.5), "c": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
}  # fmt: skip


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, TENSORS, {"step": 3, "name": "é"})
    return path


def test_it_comes_back_exactly(path):
    tensors, document = load_checkpoint(path)
    assert document == {"step": 3, "name": "é"}
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_views_of_one_memory_are_saved_apart(path):
    whole = torch.arange(8.0)
    save_checkpoint(path, {"low": whole[:4], "high": whole[4:], "turned": whole.view(2, 4).t()}, {})
    tensors, _ = load_checkpoint(path)
    assert tensors["high"].tolist() == [4, 5, 6, 7]
    assert tensors["turned"].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_equal_documents_have_equal_checksums(path, tmp_path):
    save_checkpoint(tmp_path / "other", TENSORS, {"name": "é", "step": 3})
    found = []
    for each in (path, tmp_path / "other"):
        with safe_open(each, framework="pt") as file:
            found.append(file.metadata())
    assert found[0] == found[1]


def test_every_cut_is_noticed(path):
    content = path.read_bytes()
    for length in (0, 1, 7, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert_raises(FormatError, r"torn or not a checkpoint", load_checkpoint, path)


def test_a_flipped_bit_is_noticed(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert_raises(FormatError, "does not match its checksum", load_checkpoint, path)


@pytest.mark.parametrize(("old", "new"), [
    (b'step\\": 3', b'step\\": 4'),  # of the document
    (b'"c":{', b'"d":{'),  # the order of names stays
    (b'"dtype":"BF16","shape":[3]', b'"dtype":"F16", "shape":[3]'),
    (b'"shape":[2,3]', b'"shape":[3,2]'),
    (b'"shape":[0,4]', b'"shape":[4,0]'),
])  # fmt: skip
def test_a_changed_header_is_noticed(path, old, new):
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    assert_raises(FormatError, "does not match its checksum", load_checkpoint, path)


def test_another_programs_file_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert_raises(FormatError, "not a checkpoint of this program", load_checkpoint, tmp_path / "model.safetensors")
    assert_raises(MissingFile, "no checkpoint", load_checkpoint, str(tmp_path / "absent.safetensors"))


def test_shapes_are_compared_before_anything_is_copied(path):
    good = {"a": torch.zeros(2, 3)}
    require_same_shapes(path, good, {"a": torch.ones(2, 3)})
    with pytest.raises(FormatError, match=r"another shape: a is \(2, 3\), the model wants \(2, 4\)"):
        require_same_shapes(path, good, {"a": torch.zeros(2, 4)})
    assert_raises(FormatError, "another model: b", require_same_shapes, path, good, {**good, "b": torch.zeros(1)})
    with pytest.raises(FormatError, match=r"another dtype: a is torch.float32, the model wants torch.bfloat16"):
        require_same_shapes(path, good, {"a": torch.zeros(2, 3, dtype=torch.bfloat16)})


def test_a_full_disk_is_an_error_of_the_system_and_names_the_file(path, monkeypatch):
    def full(*_arguments, **_options):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'") as full_disk:
        save_checkpoint(path, {"a": torch.zeros(2)}, {})
    assert full_disk.value.errno == errno.ENOSPC
    assert not list(path.parent.glob("*.tmp")) + list(path.parent.glob(".*.tmp"))


def test_files_have_the_users_mode(path):
    plain = path.with_name("plain")
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode


BOTH = ("checkpoint.safetensors", "checkpoint-previous.safetensors")


@pytest.mark.parametrize(("code", "present", "damaged", "left"), [
    (errno.ENOSPC, BOTH, False, BOTH[:1]), (errno.EDQUOT, BOTH, False, BOTH[:1]),
    (errno.ENOSPC, BOTH, True, BOTH[1:]), (errno.EACCES, BOTH, False, None), (errno.ENOSPC, BOTH[:1], False, None),
    (errno.ENOSPC, BOTH[1:], False, None),
])  # fmt: skip
def test_room_is_made_on_a_full_disk_and_never_of_the_only_good_checkpoint(tmp_path, code, present, damaged, left):
    for name in present:
        save_checkpoint(tmp_path / name, TENSORS, {"step": 3})
    if damaged:
        (tmp_path / BOTH[0]).write_bytes((tmp_path / BOTH[0]).read_bytes()[:-1])
    calls = []

    def write():
        calls.append(1)
        if len(calls) == 1:
            raise OSError(code, "no")

    checkpoints = Checkpoints(tmp_path)
    if left is None:
        assert_raises(OSError, "no", checkpoints.make_room, write)
    else:
        checkpoints.make_room(write)
    assert len(calls) == (1 if left is None else 2)
    assert {path.name for path in tmp_path.iterdir()} == set(present if left is None else left)


@pytest.mark.parametrize(("error", "named"), [(OSError(errno.EACCES, "no", "temporary"), True), (OSError("no"), False)])
def test_an_error_of_a_file_names_the_checkpoint(tmp_path, monkeypatch, error, named):
    monkeypatch.setattr(module, "write_atomic", Mock(side_effect=error))
    caught = assert_raises(OSError, "no", lambda: Checkpoints(tmp_path).save({}, {"step": 1}))
    assert caught.filename == (str(tmp_path / BOTH[0]) if named else None)


def test_the_size_is_that_of_the_larger_checkpoint_with_its_shards(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.size_bytes == 0
    save_checkpoint(checkpoints.previous, {"a": torch.zeros(100)}, {})
    assert checkpoints.size_bytes == checkpoints.previous.stat().st_size > 400
    save_checkpoint(checkpoints.path, {}, {"shards": {"folder": "checkpoint-shards-3"}})
    assert checkpoints.size_bytes == checkpoints.previous.stat().st_size
    (tmp_path / "checkpoint-shards-3").mkdir()
    for rank, size in enumerate((1000, 500)):
        (tmp_path / f"checkpoint-shards-3/0000{rank}.safetensors").write_bytes(bytes(size))
    assert checkpoints.size_bytes == checkpoints.path.stat().st_size + 1500


def test_shards_without_a_checkpoint_are_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    folders = [f"checkpoint-shards-{number}" for number in (1, 2, 3, "x")]
    for name in folders:
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-shards-4").touch()  # no folder: left alone
    save_checkpoint(checkpoints.previous, {}, {"shards": {"folder": folders[0]}})
    checkpoints.path.write_bytes(b"torn")  # of which they may be
    checkpoints.clean()
    assert all((tmp_path / name).is_dir() for name in folders)
    save_checkpoint(checkpoints.path, {}, {"shards": {"folder": folders[1]}})
    checkpoints.clean()
    assert [(tmp_path / name).exists() for name in (*folders, "checkpoint-shards-4")] == [True, True, False, True, True]


@pytest.mark.parametrize(
    "document", ["{", "3", '["shards"]', '{"shards": 3}', '{"shards": {}}', '{"shards": {"folder": 3}}']
)
def test_a_document_without_shards_as_it_should_have_them_is_damage(tmp_path, document):
    checkpoints = Checkpoints(tmp_path)
    write_tensors(checkpoints.path, {}, {"format": "accelerant-checkpoint-1", "document": document})
    with pytest.raises(FormatError, match=r"checkpoint\.safetensors is damaged: "):
        checkpoints.size_bytes  # noqa: B018


@pytest.mark.parametrize(("document", "message"), [
    ({}, "step must be"), ({"step": -1}, "'step' must be 0 or more, got -1"), ({"step": 1.5}, "step must be"),
    ({"step": 1, "position": {"row": -1}}, "'row' must be 0 or more, got -1"),
    ({"step": 1, "position": {"row": "0"}}, "position"), ({"step": 1, "optimizer": {"0.lr": []}}, "optimizer"),
])  # fmt: skip
def test_values_of_another_type_are_refused(tmp_path, document, message):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({}, document)
    assert_raises(FormatError, f"is of another program: .*{message}", checkpoints.load)
    checkpoints.save({}, {"step": 0, "position": {"row": 0}})
    assert checkpoints.load()[1] == {"step": 0, "position": {"row": 0}}


def test_the_space_of_three_checkpoints_is_required_exactly(tmp_path, monkeypatch):
    parameters, small, free = 1000, 4 << 20, 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=total * path.exists()))
    for present, total in ((0, 1 << 40), (0, 0), (700, 1 << 40)):
        if present:  # checkpoints and shards make room for new ones
            (tmp_path / "checkpoint.safetensors").write_bytes(bytes(300))
            (tmp_path / "checkpoint-shards-3").mkdir()
            (tmp_path / "checkpoint-shards-3/00000.safetensors").write_bytes(bytes(400))
            (tmp_path / "other").write_bytes(bytes(500))
        folder = tmp_path if present else tmp_path / "a" / "b"  # which is not made yet
        free = 3 * (1 + 2) * 4 * parameters + small - present  # parameters and two moments
        require_space(folder, parameters)
        free -= 1
        if total:
            with pytest.raises(ConfigError, match="for checkpoints and results, and its disk has 4"):
                require_space(folder, parameters)
        else:
            require_space(folder, parameters)


def test_settings_that_change_a_step_may_not_differ(tmp_path):
    config = TrainConfig(steps=5)
    found = config.to_dict()
    require_same_config(tmp_path, found, config)
    require_same_config(tmp_path, {}, config)  # of an older version
    for name in (
        "batch_size",
        "learning_rate",
        "optimizer",
        "precision",
        "schedule",
        "max_grad_norm",
        "seed",
        "warmup",
    ):
        with pytest.raises(ConfigError, match=f"was trained with {name}='other', got"):
            require_same_config(tmp_path, found | {name: "other"}, config)
    free = ("steps", "epochs", "device", "out", "patience", "keep_best", "checkpoint_every", "log", "accumulate")
    require_same_config(tmp_path, found | dict.fromkeys(free, "other"), config)


def test_a_better_loss_is_lower_by_more_than_min_delta():
    best = BestModel(patience=2, min_delta=0.5)
    for loss, better, exhausted in ((4.0, True, False), (3.5, False, False), (3.25, True, False), (3.0, False, False),
                                    (math.nan, False, True)):  # fmt: skip
        assert best.update(Evaluation(step=1, loss=loss, rows=1)) is better
        assert best.exhausted is exhausted
    again = BestModel(patience=2, min_delta=0.5)
    assert again.state() == {"loss": None, "step": 0, "waited": 0}
    again.restore(best.state())
    assert again.state() == best.state() == {"loss": 3.25, "step": 1, "waited": 2}
    assert again.exhausted
    assert not BestModel(patience=None, min_delta=0.0).exhausted


@pytest.mark.parametrize("in_folder", [True, False])
def test_the_best_parameters_come_back(tmp_path, in_folder):
    folder, model, best = tmp_path if in_folder else None, nn.Linear(2, 2), BestModel(patience=None, min_delta=0.0)
    before = {name: x.clone() for name, x in model.state_dict().items()}

    def changed_and_loaded():
        nn.init.ones_(model.weight)
        best.load_into(model, folder)
        return {name: torch.equal(x, before[name]) for name, x in model.state_dict().items()}

    assert changed_and_loaded() == {"weight": False, "bias": True}  # none is kept
    model.load_state_dict(before)
    best.keep(model, folder)
    assert changed_and_loaded() == {"weight": True, "bias": True}
    assert (tmp_path / BestModel.NAME).exists() is in_folder


def test_the_state_of_a_training_is_of_its_model_and_optimizer(tmp_path, monkeypatch):
    def made(kind=torch.optim.AdamW, width=3):
        model = nn.Linear(2, width)
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    cpu = torch.device("cpu")
    model, optimizer = made()
    tensors, document = gathered(model, optimizer, cpu)
    other, its = made()
    restored(tmp_path, tensors, document, other, its, cpu)
    again = gathered(other, its, cpu)
    assert again[1] == document
    assert again[0].keys() == tensors.keys()
    assert all(torch.equal(again[0][name], tensor) for name, tensor in tensors.items())
    with pytest.raises(FormatError, match=r"is of another optimizer: AdamW, got Adam$"):
        restored(tmp_path, tensors, document, *made(torch.optim.Adam), cpu)
    with pytest.raises(FormatError, match=r"is of another shape: model\.bias is \(3,\), the model wants \(4,\)"):
        restored(tmp_path, tensors, document, *made(width=4), cpu)
    monkeypatch.setattr(nn.Linear, "get_extra_state", lambda self: 3)
    with pytest.raises(UnsupportedCase, match=r"the state of the model has a int \(_extra_state\): no checkpoint"):
        gathered(model, optimizer, cpu)


@pytest.mark.parametrize("rest", ['{"python": [1]}', "{", "\xff", None])
def test_the_random_states_of_a_sharded_checkpoint_are_json(tmp_path, rest):
    """None: of another dtype, which NumPy does not have."""
    found = torch.ones(8, dtype=torch.bfloat16)
    if rest is not None:
        found = torch.frombuffer(bytearray(rest.encode("latin-1")), dtype=torch.uint8)
    name, kind = "rank0.random.json", str(found.dtype).removeprefix("torch.")
    shard = tmp_path / "checkpoint-shards-1" / "00000.safetensors"
    shard.parent.mkdir()
    write_tensors(shard, {f"{name}:0": found}, {})
    content = shard.read_bytes()
    chunk = {"file": 0, "offsets": [0], "sizes": [len(found)]}
    listed = {
        "folder": shard.parent.name,
        "files": [[shard.name, len(content), hashlib.sha256(content).hexdigest()]],
        "tensors": {name: {"dtype": kind, "shape": [len(found)], "chunks": [chunk]}},
    }
    save_checkpoint(tmp_path / BOTH[0], {}, {"step": 1, "shards": listed})
    if rest == '{"python": [1]}':
        assert load_checkpoint(tmp_path / BOTH[0]) == ({}, {"step": 1, "random": {"python": [1]}})
    else:
        assert_raises(FormatError, "has the state of no random generator", lambda: load_checkpoint(tmp_path / BOTH[0]))
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(FormatError, match=r"is damaged: .*00000.safetensors does not match its checksum"):
        load_checkpoint(tmp_path / BOTH[0])
