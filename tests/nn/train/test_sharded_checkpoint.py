"""Checkpoints of several processes: gloo on the CPU, sharded (FSDP2) and replicated."""

import json
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from checkpoint_workers import CPU, both, launch, loading, made, saving

from accelerant.errors import FormatError
from accelerant.nn.train.checkpoint import (
    Checkpoints,
    gathered,
    load_checkpoint,
    restored,
    save_checkpoint,
    write_tensors,
)
from accelerant.nn.train.sharded_checkpoint import ShardSaver, load_shards
from refusals import assert_raises

pytestmark = [
    pytest.mark.slow,  # each process imports torch
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with two checkpoints of three sharded processes."""
    folder = tmp_path_factory.mktemp("three")
    launch(saving, 3, str(folder), True)
    return folder


def test_two_are_kept_with_their_shards(written):
    names = sorted(path.name for path in written.iterdir() if path.name.startswith((".", "checkpoint")))
    assert names == [
        "checkpoint-previous.safetensors", "checkpoint-shards-2", "checkpoint-shards-3", "checkpoint.safetensors"
    ]  # fmt: skip
    files = sorted(path.name for path in (written / "checkpoint-shards-3").iterdir())
    assert files == [f"0000{rank}.safetensors" for rank in range(3)]


def test_one_process_reads_them(written):
    tensors, document = load_checkpoint(written / "checkpoint.safetensors")
    kept = torch.load(written / "kept-3.pt")
    assert tensors.keys() == kept.keys()
    assert all(torch.equal(tensors[name], kept[name]) for name in kept)
    assert (document["step"], document["processes"]) == (3, 3)
    model, optimizer = made(1, sharded=False, seed=4)
    restored(written, *Checkpoints(written).load(model.state_dict())[:2], model, optimizer, CPU)
    assert all(torch.equal(kept[f"model.{name}"], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("processes", [2, 4])
def test_another_number_of_processes_reads_them(written, processes):
    launch(both, processes, str(written), True, 3, 3)
    again = load_checkpoint(written / f"again-{processes}" / "checkpoint.safetensors")[0]
    kept = torch.load(written / f"again-{processes}" / "kept-3.pt")
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def test_a_damaged_shard_is_noticed_and_the_previous_checkpoint_used(written, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(written, folder)
    shard = folder / "checkpoint-shards-3" / "00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(FormatError, match=r"is damaged: .*00001.safetensors does not match its checksum"):
        load_checkpoint(folder / "checkpoint.safetensors")
    _, document, note = Checkpoints(folder).load()
    assert document["step"] == 2
    assert "using the previous one, of step 2" in note
    launch(loading_previous, 2, str(folder))
    shard.unlink()
    with pytest.raises(FormatError, match=r"is damaged: .*00001.safetensors: No such file"):
        load_checkpoint(folder / "checkpoint.safetensors")
    shutil.rmtree(folder / "checkpoint-shards-2")
    assert_raises(FormatError, r"checkpoint\.safetensors is damaged", lambda: Checkpoints(folder).load())


def loading_previous(rank, processes, folder):
    """Each process takes the previous one, though only one of them reads the damaged file."""
    model, _ = made(processes, sharded=True, seed=2)
    _, document, note = Checkpoints(folder).load(model.state_dict())
    assert document["step"] == 2
    assert "00001.safetensors does not match its checksum" in note
    dist.barrier()


@pytest.mark.parametrize("sharded", [False, True])
def test_replicated_state_and_a_checkpoint_of_one_process(tmp_path, sharded):
    model, optimizer = made(1, sharded=False, seed=1)
    torch.manual_seed(5000)
    tensors, values = gathered(model, optimizer, CPU)
    if sharded:  # a file of one process, read by two that shard
        torch.save(tensors, tmp_path / "kept-5.pt")
        Checkpoints(tmp_path).save(tensors, {**values, "step": 5})
        launch(loading, 2, str(tmp_path), True, 5, 1)
        return
    launch(saving, 2, str(tmp_path), False, True)
    sizes = [path.stat().st_size for path in (tmp_path / "checkpoint-shards-3").iterdir()]
    assert max(sizes) < 1.5 * min(sizes)  # each writes a part of what all have
    launch(loading, 4, str(tmp_path), False, 3, 2, True)


def test_crafted_lists_of_shards_are_refused(written, tmp_path):
    text = json.loads(_metadata(written / "checkpoint.safetensors")["document"])
    name = "model.up.weight"

    def refused(words, change):
        document = json.loads(json.dumps(text))
        change(document["shards"])
        save_checkpoint(tmp_path / "checkpoint.safetensors", {}, document)
        assert_raises(FormatError, words, load_checkpoint, tmp_path / "checkpoint.safetensors")

    refused("'/etc' is no name of a shard", lambda s: s.update(folder="/etc"))
    refused(r"'../x' is no name of a shard", lambda s: s["files"][0].__setitem__(0, "../x"))
    refused("do not cover its shape", lambda s: s["tensors"][name].update(shape=[1 << 40, 2]))
    refused("do not cover its shape", lambda s: s["tensors"][name]["chunks"].pop())
    refused("do not cover its shape", lambda s: s["tensors"][name]["chunks"][0].update(offsets=[5, 0]))
    refused("do not cover its shape", lambda s: s["tensors"][name]["chunks"][0].update(file=-1))
    refused("has the dtype 'object'", lambda s: s["tensors"][name].update(dtype="object"))
    whole = {"shape": [1 << 40], "chunks": [{"file": 0, "offsets": [0], "sizes": [1 << 40]}]}
    refused("tensors of .* bytes in files of", lambda s: s["tensors"][name].update(whole))
    refused("lacks the field 'chunks'", lambda s: s["tensors"][name].pop("chunks"))
    refused("No such file", lambda s: None)


def _metadata(path):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_written_is_what_was_there_at_the_start(tmp_path, device, monkeypatch):
    """On a GPU through pinned memory, which the second checkpoint uses again."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        saver, listed = ShardSaver(write_tensors, pinned=device == "cuda"), []
        tensors = {"model.w": torch.randn(300, 400, device=device), "model.tied": torch.ones(3, device=device)}
        tensors["model.again"] = tensors["model.tied"]
        for step in (1, 2):
            kept = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
            saver.start(tmp_path / f"checkpoint-shards-{step}", tensors, listed.append)
            for tensor in tensors.values():
                tensor.add_(1)
            assert saver.finished(wait=True)
            saver._stager._state_dict_stager.close()  # as torch 2.11 does after every copy
            path = tmp_path / "checkpoint.safetensors"
            listed[-1].verify(path)
            found = load_shards(path, listed[-1], dict(zip(kept, kept, strict=True)), {})
            assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())
    finally:
        dist.destroy_process_group()
