"""Runs checks in several processes that know each other through gloo; a check is a function of no argument."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


def run(checks, processes, folder):
    """Run the checks, in this order, in each process; return name -> None or the text of the first error."""
    context = multiprocessing.get_context("forkserver")  # its server imports torch once for all
    context.set_forkserver_preload(["accelerant.distributed", "accelerant.nn.train", "torch._dynamo"])
    children = [context.Process(target=_enter, args=(rank, processes, checks, folder)) for rank in range(processes)]
    for child in children:
        child.start()
    while any(child.is_alive() for child in children):
        for child in children:
            child.join(0.2)
        if any(child.exitcode for child in children):  # the others would wait for it
            for child in children:
                child.terminate()
    errors = sorted(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)  # the cause first
    return {
        check.__name__: None
        if all((Path(folder) / f"{check.__name__}.{rank}.done").exists() for rank in range(processes))
        else "\n".join(path.read_text() for path in errors) or f"exit codes {[child.exitcode for child in children]}"
        for check in checks
    }


def _enter(rank, processes, checks, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    store = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes, timeout=timeout)
    for check in checks:
        torch.manual_seed(0)
        try:
            check()
        except Exception:
            (Path(folder) / f"{check.__name__}.{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
            sys.exit(1)
        (Path(folder) / f"{check.__name__}.{rank}.done").touch()
    dist.destroy_process_group()
