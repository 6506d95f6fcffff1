"""A process of the suite scale that a test starts in place of torch's launcher; apart, so that a fork can import it."""

import json
import multiprocessing
import os
import sys

import torch

from requirements import free_port


def measured(settings, folder, processes=2):
    """Return the results that rank 0 wrote; the processes are forked by one server, which imports torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.scale_work", "torch._dynamo"])
    port = free_port()
    out = folder / "found.jsonl"
    children = [
        context.Process(target=_enter, args=(rank, processes, port, settings, out)) for rank in range(processes)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(150)
    status = [child.exitcode for child in children]
    for child in children:
        child.kill()
    assert status == [0] * processes
    return [json.loads(line) for line in out.read_text().splitlines()]


def _enter(rank, size, port, settings, out):
    from benchmarks.scale_work import work

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
    )  # fmt: skip
    torch.set_num_threads(1)
    work(settings, out)
