"""What each process of the tests of Watch does; apart, so that a fresh interpreter can import it."""

import datetime
import os
import resource
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from accelerant.errors import OutOfMemory
from accelerant.runtime.processes import Watch

STEPS = 40


def work(rank, processes, folder, failure, victim):
    """Sum numbers again and again; in one process something happens after some steps. The error goes to a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=processes,
        timeout=datetime.timedelta(seconds=300),
    )  # fmt: skip
    sys.stderr = open(Path(folder) / f"{rank}.err", "w", buffering=1)  # noqa: SIM115  until the end of the process
    done = 0
    try:
        with Watch(silent_s=4.0, grace_s=2.0):
            for number in range(STEPS):
                if number == STEPS // 2 and rank == victim:
                    _fail(failure)
                dist.all_reduce(torch.ones(1000))
                done = number
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    assert done == STEPS - 1
    os._exit(0)


def _fail(failure):
    if failure == "error":
        raise ValueError("a row of 3, got 4")
    if failure == "own":
        raise OutOfMemory("8 rows do not fit")
    if failure == "memory":
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 28), resource.RLIM_INFINITY))
        torch.zeros(1 << 30)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[failure])
