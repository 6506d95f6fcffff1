"""Watch: what the other processes say when one fails; gloo on the CPU, three processes."""

import contextlib
import os
import re
import signal
import sys
import time

import pytest
import torch.distributed as dist
from watch_workers import work

from accelerant.runtime.processes import Watch
from processes import forkserver

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
    pytest.mark.skipif(sys.platform != "linux", reason="limits of memory, and the states of processes, of Linux"),
]


def test_a_single_process_is_not_watched():
    with Watch(), pytest.raises(ZeroDivisionError):
        1 / 0  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize(("failure", "victim", "own", "others"), [
    ("error", 1, "ValueError: a row of 3, got 4", "ProtocolError: rank 1: ValueError: a row of 3, got 4"),
    ("own", 0, "OutOfMemory: 8 rows do not fit", "OutOfMemory: rank 0: 8 rows do not fit"),
    ("memory", 2, "DefaultCPUAllocator: can't allocate memory", "rank 2: .*can't allocate memory"),
    ("kill", 1, "", "ProtocolError: rank 1: no sign of life for . s: it was killed"),
    ("stop", 1, "", "error: rank 1: no sign of life for 4 s: it was killed, hangs"),
])  # fmt: skip
def test_one_line_names_the_rank_and_all_end(tmp_path, failure, victim, own, others):
    context = forkserver()
    children = [
        context.Process(target=work, args=(rank, 3, str(tmp_path), failure, victim), daemon=True) for rank in range(3)
    ]
    for child in children:
        child.start()
    until = time.monotonic() + 200
    try:
        for rank, child in enumerate(children):
            if rank != victim or failure != "stop":
                child.join(max(0.0, until - time.monotonic()))
                assert child.exitcode == (-signal.SIGKILL if (rank, failure) == (victim, "kill") else 1)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
    for rank in range(3):
        lines = (tmp_path / f"{rank}.err").read_text().splitlines()
        text = lines[-1] if lines else ""
        wanted = own if rank == victim else others
        assert re.search(wanted, text) if wanted else not text, (rank, lines)
