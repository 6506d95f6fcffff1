"""Compilation of CUDA kernels by child processes, while libraries' functions run in their place.

A preferred implementation whose kernels are not in the disk cache asks the children for all that it would have
launched, and a library's function gives the result (dispatch/operation.py). The disk cache and a lock for each kernel
divide the work between the children of all processes of the host.
"""

from __future__ import annotations

import atexit
import base64
import collections
import contextlib
import copy
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import get_ident
from typing import Any

from accelerant.config import settings
from accelerant.errors import CompileError, FallbackWarning
from accelerant.runtime.compilation.cache import KernelCache
from accelerant.runtime.compilation.cuda import DIALECTS, compile_cuda, compiler_version
from accelerant.runtime.compilation.kernel import Binary, KernelSource
from accelerant.runtime.host import fork_safe, python_child, usable_cores
from accelerant.runtime.ledger import FallbackRecord, ledger
from accelerant.runtime.provider import watched

MOST_CHILDREN = 8
PATIENCE_S = 300.0  # longest time without a result after which the children are taken for hung, and killed

_IDLE_S = 60.0  # after which a child without work ends
_WATCH_S = 0.25  # between two looks of a child at whether its parent lives
_RETRY_S = 0.05  # between two looks at kernels that other processes are compiling

_PROGRAM = f"""
import os, signal, sys
parent = int(sys.argv[1])
signal.signal(signal.SIGALRM, lambda *_: os.getppid() == parent or os._exit(1))
signal.setitimer(signal.ITIMER_REAL, {_WATCH_S}, {_WATCH_S})  # until work() watches it
from accelerant.runtime.compilation.background import work
work(parent)
"""


# --- attempts --------------------------------------------------------------------------------------------------------
class NotCompiledError(Exception):
    """A kernel is not compiled yet; if it is to be skipped, the attempt goes on to find the others that it needs."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips


attempts: dict[int, bool] = {}
"""Threads, by identity, that run an implementation without waiting for a compiler; whether kernels are skipped."""

missing: set[int] = set()  # those of them that have met a kernel that is not compiled


def attempt(run: Callable[..., Any], args: tuple[Any, ...], skips: bool) -> Any:
    """Run an implementation if its kernels are compiled; otherwise ask for them, and raise NotCompiledError.

    If it `skips`, nothing is launched from the first missing kernel on, so that it finds the others; otherwise that one
    ends the run, or is waited for once others were launched.
    """
    if (thread := get_ident()) in missing:
        return run(*args)  # within another one, which is void
    outer = attempts.get(thread)
    attempts[thread] = skips
    try:
        result = run(*args)
    except Exception:
        if thread not in missing:  # else it may be due to a kernel that was skipped
            raise
    finally:
        if outer is None:
            del attempts[thread]
        else:
            attempts[thread] = outer
        if missed := thread in missing:
            missing.discard(thread)
    if missed:
        raise NotCompiledError
    return result


def is_missing() -> bool:
    """Return whether this thread is in an attempt that has met a missing kernel."""
    return bool(missing) and get_ident() in missing


def pass_over() -> None:
    """Raise NotCompiledError while kernels that earlier attempts asked for are being compiled."""
    if _compilers is not None and not _awaited and not _compilers.is_ready():
        _compilers.misses += 1
        raise NotCompiledError


def start() -> None:
    """Let library functions serve while child processes compile kernels; not on Windows, nor without a Python."""
    global _compilers
    if _compilers is None and os.name == "posix" and sys.executable:
        _compilers = _Compilers()


def is_started() -> bool:
    """Return whether operations run libraries' functions instead of waiting for compilers."""
    return _compilers is not None


def is_ready() -> bool:
    """Return whether every kernel that was asked for is compiled; never, once the children have failed."""
    return _compilers is None or _compilers.is_ready()


def asked() -> tuple[list[str], int]:
    """Return the names of the kernels that were asked for so far, and how many of them are still being compiled."""
    return ([], 0) if _compilers is None else _compilers.asked()


def misses() -> int:
    """Return how many runs libraries have served so far; times measured while it changed are not our kernels'."""
    return 0 if _compilers is None else _compilers.misses


def binary_of(key: str, source: KernelSource, target: str) -> Binary:
    """Return the code of a kernel that the disk cache lacks; in an attempt, ask for it and raise NotCompiledError."""
    compilers, thread = _compilers, get_ident()
    if compilers is None:
        return compile_cuda(source, target)
    found, skips = compilers.result(key), attempts.get(thread)
    if found is None and skips is not None and not _awaited:
        launched = any(counter.count for counter in watched.get(thread, ()))
        if (skips or not launched) and compilers.ask(key, source, target):
            compilers.misses += thread not in missing
            missing.add(thread)
            raise NotCompiledError(skips)
    return compile_cuda(source, target) if found is None else found


_awaited = 0  # blocks, of any thread, that wait for kernels


@contextlib.contextmanager
def awaited() -> Iterator[None]:
    """Wait for kernels inside the block, as for the last calls before a capture, which could not load them."""
    global _awaited
    _awaited += 1
    try:
        yield
    finally:
        _awaited -= 1


# --- the parent's side -----------------------------------------------------------------------------------------------
class _Child:
    """A compiling process; threads write to it and read from it, so that nobody else waits for it."""

    def __init__(self, hear: Callable[[_Child, str], None]) -> None:
        pipe = subprocess.PIPE
        variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        variables |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERANT_CACHE_DIR": str(settings().cache_dir)}
        self.process = python_child(
            _PROGRAM, str(os.getpid()), site=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL,
            start_new_session=True, env=variables,
        )  # fmt: skip
        self._hear = hear
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.send = self._lines.put
        for run in (self._write, self._read):
            threading.Thread(target=run, name="accelerant-compile", daemon=True).start()

    def kill(self) -> None:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)  # with the assembler that it may have started

    def _write(self) -> None:
        stdin = self.process.stdin
        assert stdin is not None  # for the type checker
        with contextlib.suppress(OSError, ValueError):  # it has ended
            while line := self._lines.get():
                stdin.write(line)
                stdin.flush()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._hear(self, line)
        self.process.wait()
        self.send("")
        self._hear(self, "")


class _Compilers:
    """The child processes, and what became of the kernels that were asked for."""

    def __init__(self) -> None:
        self.misses = 0
        self._lock, self._pid = fork_safe(threading.Lock()), os.getpid()
        self._children: list[_Child] = []
        self._asked: list[str] = []
        self._waiting: dict[str, tuple[str, str]] = {}  # key -> the kernel's name, and the line that asks for it
        self._results: dict[str, Binary | CompileError] = {}  # errors, and what the disk cache could not keep
        self._heard = time.monotonic()
        self._failure, self._warned = "", False
        atexit.register(self.close)

    def is_ready(self) -> bool:
        with self._lock:
            if self._waiting and time.monotonic() - self._heard > PATIENCE_S:
                self._fail(f"no kernel was compiled within {PATIENCE_S:.0f} s")
            ready, failure = not self._waiting and not self._failure, "" if self._warned else self._failure
            self._warned = bool(self._failure)
        if failure:
            warnings.warn(f"kernels are not compiled in the background: {failure}", FallbackWarning, stacklevel=4)
        return ready

    def asked(self) -> tuple[list[str], int]:
        """Return the names of the kernels that were asked for so far, and how many are still being compiled."""
        with self._lock:
            return list(self._asked), len(self._waiting)

    def result(self, key: str) -> Binary | None:
        """Return code that the disk cache could not keep; raise the error of a kernel that does not compile."""
        found = self._results.get(key)
        if isinstance(found, CompileError):
            raise copy.copy(found)
        return found

    def ask(self, key: str, source: KernelSource, target: str) -> bool:
        """Have a kernel compiled; return False if it cannot be passed to another process."""
        with self._lock:
            if key in self._waiting or self._failure:
                return True
            dialect, program = source.pick(DIALECTS)
            try:
                job = pickle.dumps((key, replace(source, dialects={dialect: program}), target))
            except (pickle.PicklingError, TypeError, AttributeError):
                return False
            if not self._waiting:
                self._heard = time.monotonic()
            self._asked.append(source.name)
            self._waiting[key] = source.name, f"{base64.b64encode(job).decode()}\n"
            if self._children:
                for child in self._children:
                    child.send(self._waiting[key][1])
            else:
                self._spawn()
            return True

    def close(self) -> None:
        """Kill the children."""
        if os.getpid() == self._pid:
            for child in self._children:
                child.kill()

    def _spawn(self) -> None:
        try:
            for _ in range(_count()):
                child = _Child(self._heard_from)
                self._children.append(child)
                for _, line in self._waiting.values():
                    child.send(line)
        except (OSError, RuntimeError) as error:  # the limit of processes or threads
            if not self._children:
                self._fail(f"no process starts: {error}")

    def _heard_from(self, child: _Child, line: str) -> None:
        """Take a result of a child; an empty line is its end."""
        with self._lock:
            if line:
                key, result = pickle.loads(base64.b64decode(line))  # from a process of our own
                self._heard = time.monotonic()
                self._waiting.pop(key, None)
                if result is not None:
                    self._results[key] = result
                return
            self._children.remove(child)
            if self._waiting and not self._children:
                if child.process.returncode:
                    self._fail(f"the last process that compiles ended with status {child.process.returncode}")
                else:  # it had been idle for too long, just before it was asked
                    self._spawn()

    def _fail(self, reason: str) -> None:
        if self._failure:
            return
        names = ", ".join(sorted({name for name, _ in self._waiting.values()}))
        self._failure = f"{reason}; not compiled: {names}"
        self._waiting.clear()
        ledger().fallback(FallbackRecord("compile", names, "background", "libraries", reason))
        self.close()


_compilers: _Compilers | None = None


def _forget() -> None:
    global _compilers
    _compilers = None  # of the parent process, as its children are
    attempts.clear()
    missing.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _count() -> int:
    if not KernelCache().is_writable():
        return 1  # several would each compile everything
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_CHILDREN, (usable_cores() - 1) // local))


# --- the child's side ------------------------------------------------------------------------------------------------
def work(parent: int) -> None:
    """Compile the kernels that standard input asks for, one a line; answer each with its key, and its code or error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(parent, lines.put), daemon=True).start()
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(OSError, AttributeError):  # macOS has no such policy
            os.nice(19)
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # a core that does this is idle to all others
    jobs: collections.deque[tuple[str, KernelSource, str]] = collections.deque()
    locks = _Locks()
    busy = 0  # how many of them in turn were found to be compiled by others
    while True:
        wait_s = _IDLE_S if not jobs else _RETRY_S if busy >= len(jobs) else 0.0
        with contextlib.suppress(queue.Empty):
            while True:
                line = lines.get(timeout=wait_s) if wait_s else lines.get_nowait()
                jobs.append(pickle.loads(base64.b64decode(line)))
                wait_s = 0.0
        if not jobs:
            os._exit(0)
        key, source, target = job = jobs.popleft()
        with locks.held(key) as ours:
            if ours or KernelCache().has(key):
                result, busy = _compiled(key, source, target), 0
                print(base64.b64encode(pickle.dumps((key, result))).decode(), file=answers, flush=True)
            else:
                busy = busy + 1 if busy < len(jobs) + 1 else 1
                jobs.append(job)


def _compiled(key: str, source: KernelSource, target: str) -> Binary | CompileError | None:
    """Compile a kernel into the disk cache; return its code if it is not kept there, or its error."""
    cache = KernelCache()
    try:
        binary, _ = cache.get_or_build(
            key, lambda: compile_cuda(source, target), name=source.name, target=target,
            compiler=compiler_version(source),
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001  which the parent raises where the kernel is used
        return error if isinstance(error, CompileError) else CompileError(f"kernel {source.name!r}", repr(error))
    return None if cache.has(key) else binary


def _receive(parent: int, put: Callable[[str], None]) -> None:
    """Pass the lines of standard input on, until it ends or the parent process does: then kill this process group."""
    rest = b""
    while os.getppid() == parent:
        if select.select([0], [], [], _WATCH_S)[0]:
            if not (data := os.read(0, 1 << 16)):
                break
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                put(line.decode())
    if sys.platform != "win32":
        os.killpg(0, signal.SIGKILL)


class _Locks:
    """A lock for each kernel, among the processes that share a cache: a byte of a file, free once its holder ends."""

    def __init__(self) -> None:
        self._file: Any = None
        with contextlib.suppress(OSError):
            KernelCache().prepare()
            self._file = open(KernelCache().root / ".compiling", "ab")  # noqa: SIM115  as long as the process

    @contextlib.contextmanager
    def held(self, key: str) -> Iterator[bool]:
        """Hold a kernel's lock in the block, which learns whether no other process has it."""
        place = int(key[:8], 16)
        try:
            import fcntl

            if self._file is not None:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except (BlockingIOError, PermissionError):
            yield False
            return
        except (ImportError, OSError):  # a system, or a file system, without locks
            self._file = None
        try:
            yield True
        finally:
            if self._file is not None:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)
