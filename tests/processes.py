"""Processes that tests start, forked by one server that imports torch and the package once for all; and threads."""

import atexit
import contextlib
import datetime
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accelerant.cli import main


def forkserver():
    """Return the context of multiprocessing. There is one server, so all its users import the same."""
    context = multiprocessing.get_context("forkserver")
    modules = ["accelerant.cli.train", "accelerant.distributed", "accelerant.nn.train.job", "accelerant.privacy.dp"]
    modules += ["accelerant.nn.train.sharded_checkpoint", "torch.distributed.launcher.api", "torch._dynamo"]
    context.set_forkserver_preload(modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)  # the processes of every test would have it
        ensure_running()
    return context


def in_threads(works):
    """Run functions at the same time, each in a thread of its own, to their ends."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def results(function, *calls):
    """Return function(*call) for each of the calls, which are made at the same time, each in a process of its own."""
    with ProcessPoolExecutor(len(calls), forkserver(), max_tasks_per_child=1) as pool:
        return [each.result() for each in [pool.submit(function, *call) for call in calls]]


class Command:
    """`accelerant ARGUMENTS` in a process of its own, on one thread, with the methods of subprocess.Popen."""

    def __init__(self, *arguments, cwd=".", environment=None, before=None):
        self._folder = tempfile.TemporaryDirectory()
        for name in ("output", "errors"):
            Path(self._folder.name, name).touch()
        given = (list(map(str, arguments)), Path(cwd).absolute(), environment or {}, self._folder.name, before)
        self._process = forkserver().Process(target=_command, args=given)
        self._process.start()
        self.pid = self._process.pid
        atexit.register(self.send_signal, signal.SIGKILL)  # or the tests' process would wait for it

    def poll(self):
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("accelerant", timeout)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout=None):
        """Return what the process wrote to its output and errors once it has ended."""
        self.wait(timeout)
        return tuple(Path(self._folder.name, name).read_text() for name in ("output", "errors"))


def _command(arguments, cwd, environment, folder, before):
    for number, name in enumerate(("output", "errors"), 1):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    os.chdir(cwd)
    torch.set_num_threads(1)
    if before is not None:
        before()
    main(arguments)


def printed(program, *arguments):
    """Return what a program prints in a process of its own, in which Triton compiles: here it may interpret."""
    return results(_print, (program, arguments))[0]


def _print(program, arguments):
    sys.argv = ["-c", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    return text.getvalue()


@contextlib.contextmanager
def group(rank, size, folder):
    """The processes know each other, through gloo, and meet in the folder."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    timeout = datetime.timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(checks, processes, folder):
    """Run the checks, functions of no argument, in this order in each process of a group."""
    context = forkserver()
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
    with group(rank, processes, folder):
        for check in checks:
            torch.manual_seed(0)
            try:
                check()
            except Exception:
                (Path(folder) / f"{check.__name__}.{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
                sys.exit(1)
            (Path(folder) / f"{check.__name__}.{rank}.done").touch()
