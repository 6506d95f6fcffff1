"""Command lines in processes that torchrun would start; apart, so that a fresh interpreter can import it."""

import contextlib
import io
import json
import os
import signal
import sys
import time

import torch

from processes import forkserver
from requirements import free_port


def small():
    """Make the preset's model, evaluation and sample small: most of the time of a run of few steps."""
    from accelerant.nn.train.config import PRESETS

    PRESETS["tiny"] = PRESETS["tiny"].replaced(layers=1, width=32, validation_tokens=1024, sample_tokens=8)


def until_signalled():
    """Make a small training that waits, once three steps are in its metrics, for the signal that is to end it."""
    from accelerant.nn.train.history import MetricsFile

    small()
    append = MetricsFile.append

    def wait(file, records):
        append(file, records)
        stop = getattr(signal.getsignal(signal.SIGINT), "__self__", True)  # a StopRequest, false before the signal
        while len(file.records) >= 3 and not stop:
            time.sleep(0.01)

    MetricsFile.append = wait


def losses(out):
    """The losses of a run's folder, step by step."""
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def commands(lines, change=None, interrupt=None):
    """Run a command line in each process; return status, output and errors of each. They are forked by one server."""
    context = forkserver()
    port = free_port()
    queue = context.Queue()
    started = [
        context.Process(
            target=_enter, args=(rank, len(lines), port, list(map(str, line)), change, interrupt is not None, queue)
        )
        for rank, line in enumerate(lines)
    ]
    for each in started:
        each.start()
    try:
        until = time.monotonic() + 200
        while interrupt is not None and time.monotonic() < until:
            if interrupt.exists() and interrupt.stat().st_size:
                for each in started:
                    os.kill(each.pid, signal.SIGINT)
                break
            time.sleep(0.05)
        found = dict(queue.get(timeout=240) for _ in started)  # a limit for processes that hang, on a loaded machine
    finally:
        for each in started:
            each.join(10)
            each.kill()
    return [found[rank] for rank in range(len(lines))]


def _enter(rank, size, port, line, change, interrupted, queue):
    from accelerant.cli import main

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
    )  # fmt: skip
    torch.set_num_threads(1)
    (until_signalled if interrupted else small)()
    if change is not None and rank == 1:
        change()
    output, errors, status = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main(line)
        except SystemExit as ended:
            status = ended.code or 0
    queue.put((rank, (status, output.getvalue(), errors.getvalue())))
    queue.close()
    queue.join_thread()
    if torch.distributed.is_initialized():
        os._exit(0)  # after an error: nobody is waited for
