import errno

import pytest
import torch
from safetensors import SafetensorError

from accelerant.errors import FormatError
from accelerant.nn.train.checkpoint import (
    Checkpoints,
    load_checkpoint,
    require_same_shapes,
    save_checkpoint,
    write_tensors,
)

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor(7.5),
    "c": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
}


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


def test_every_cut_is_noticed(path):
    content = path.read_bytes()
    for length in (0, 1, 7, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(FormatError, match=r"torn or not a checkpoint"):
            load_checkpoint(path)


def test_a_flipped_bit_is_noticed(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(FormatError, match="does not match its checksum"):
        load_checkpoint(path)


def test_a_changed_document_is_noticed(path):
    content = path.read_bytes()
    assert content.count(b'step\\": 3') == 1
    path.write_bytes(content.replace(b'step\\": 3', b'step\\": 4'))
    with pytest.raises(FormatError, match="does not match its checksum"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"c":{', b'"d":{'),  # the order of names stays
        (b'"dtype":"BF16","shape":[3]', b'"dtype":"F16", "shape":[3]'),
        (b'"shape":[2,3]', b'"shape":[3,2]'),
        (b'"shape":[0,4]', b'"shape":[4,0]'),
    ],
)
def test_a_changed_header_is_noticed(path, old, new):
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    with pytest.raises(FormatError, match="does not match its checksum"):
        load_checkpoint(path)


def test_another_programs_file_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="not a checkpoint of this program"):
        load_checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="no checkpoint"):
        load_checkpoint(tmp_path / "absent.safetensors")


def test_shapes_are_compared_before_anything_is_copied(path):
    good = {"a": torch.zeros(2, 3)}
    require_same_shapes(path, good, {"a": torch.ones(2, 3)})
    with pytest.raises(FormatError, match=r"another shape: a is \(2, 3\), the model wants \(2, 4\)"):
        require_same_shapes(path, good, {"a": torch.zeros(2, 4)})
    with pytest.raises(FormatError, match="another model: b"):
        require_same_shapes(path, good, {**good, "b": torch.zeros(1)})
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


@pytest.mark.parametrize(
    ("code", "present", "damaged", "left"),
    [
        (errno.ENOSPC, BOTH, False, BOTH[:1]),
        (errno.EDQUOT, BOTH, False, BOTH[:1]),
        (errno.ENOSPC, BOTH, True, BOTH[1:]),
        (errno.EACCES, BOTH, False, None),
        (errno.ENOSPC, BOTH[:1], False, None),
        (errno.ENOSPC, BOTH[1:], False, None),
    ],
)
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
        with pytest.raises(OSError, match="no"):
            checkpoints.make_room(write)
    else:
        checkpoints.make_room(write)
    assert len(calls) == (1 if left is None else 2)
    assert {path.name for path in tmp_path.iterdir()} == set(present if left is None else left)


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


@pytest.mark.parametrize(
    "document", ["{", "3", '["shards"]', '{"shards": 3}', '{"shards": {}}', '{"shards": {"folder": 3}}']
)
def test_a_document_without_shards_as_it_should_have_them_is_damage(tmp_path, document):
    checkpoints = Checkpoints(tmp_path)
    write_tensors(checkpoints.path, {}, {"format": "accelerant-checkpoint-1", "document": document})
    with pytest.raises(FormatError, match=r"checkpoint\.safetensors is damaged: "):
        checkpoints.size_bytes  # noqa: B018
