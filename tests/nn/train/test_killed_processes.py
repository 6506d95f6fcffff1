"""Processes of a training that are killed (SIGKILL) at random moments; torchrun starts all of them again."""

import contextlib
import json
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from killed_worker import elastic, out_of_memory, train
from parallel_workers import launch

import soak
from accelerant.nn.train.checkpoint import load_checkpoint
from processes import forkserver

PROCESSES = 2
KILLS, STEPS = (20, 200) if soak.MINUTES else (1, 40)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")]


def started(folder, device="cpu"):
    """The agent of torchrun, as a forked process."""
    launcher = forkserver().Process(target=elastic, args=(str(folder), STEPS, PROCESSES, 2 * KILLS, device))
    launcher.start()
    return launcher


def lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_one(launcher, folder, rng):
    """Kill a process at any time from its start on, or while steps are made; return whether there was one."""
    file = folder.parent / f"{folder.name}-{rng.randrange(PROCESSES)}.pid"
    while launcher.is_alive() and not file.exists():
        time.sleep(0.01)
    if rng.random() < 0.3:
        time.sleep(rng.random())
    else:
        before = lines(folder)
        while launcher.is_alive() and lines(folder) in (before, 0):
            time.sleep(0.005)
        time.sleep(0.4 * rng.random())
    if not launcher.is_alive():
        return False
    pid = int(file.read_text())
    file.unlink()  # the next process writes it again
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


@pytest.mark.search(150)
def test_training_goes_on_from_the_last_checkpoint_to_the_same_bits(tmp_path, rng, record_property):
    straight, folder = tmp_path / "straight", tmp_path / "killed"
    assert launch(train, tmp_path / "meeting", str(straight), STEPS, processes=PROCESSES) == [None] * PROCESSES
    launcher = started(folder)
    met = sum(kill_one(launcher, folder, rng) for _ in range(KILLS))
    record_property("kills", met)
    launcher.join(400)
    assert launcher.exitcode == 0
    records = [
        [json.loads(line) for line in (each / "metrics.jsonl").read_text().splitlines()] for each in (straight, folder)
    ]
    assert [record["step"] for record in records[1]] == list(range(1, STEPS + 1))
    assert [record["loss"] for record in records[1]] == [record["loss"] for record in records[0]]
    found, wanted = (load_checkpoint(each / "checkpoint.safetensors")[0] for each in (folder, straight))
    assert found.keys() == wanted.keys()
    # A process's own random state, which no step uses after the last, is all that may differ.
    assert all(torch.equal(found[name], wanted[name]) for name in wanted if "random." not in name)
    assert len(list(folder.glob("checkpoint-shards-*"))) == 2
    assert not [path.name for path in folder.iterdir() if ".tmp" in path.name]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < PROCESSES, reason="a GPU for each of two processes")
def test_a_process_on_a_gpu_that_is_killed(tmp_path, rng):
    """NCCL's collectives wait for it, in the others; they end, and all go on."""
    straight, folder = tmp_path / "straight", tmp_path / "killed"
    for each in (straight, folder):
        launcher = started(each, "cuda")
        met = [kill_one(launcher, each, rng)] if each is folder else [True]
        launcher.join(300)
        assert (launcher.exitcode, met) == (0, [True])
    records = [
        [json.loads(line) for line in (each / "metrics.jsonl").read_text().splitlines()] for each in (straight, folder)
    ]
    assert [record["step"] for record in records[1]] == list(range(1, STEPS + 1))
    wanted, found = (torch.tensor([record["loss"] for record in each]) for each in records)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)  # sums of atomics


def test_out_of_memory_in_one_process_is_the_error_of_all(tmp_path):
    first, second = launch(out_of_memory, tmp_path / "meeting", str(tmp_path / "out"))
    assert second.startswith("12 rows at a time do not fit the device: raise accumulate")
    assert "none left" in second
    assert first == f"rank 1: {second}"
