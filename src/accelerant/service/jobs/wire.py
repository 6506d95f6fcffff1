"""Jobs as callers see them; named arrays and JSON as bytes: messages to workers, files of inputs and results.

    frame = length of head (4 bytes), length of body (8 bytes), head (JSON), body (arrays end to end)

The head lists each array's name, dtype and shape. Nothing is pickled. Numbers are little-endian; texts and files are
arrays of uint8. `Child` and `ChildEnd` are the server's and the process's end of a socket pair with such frames.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from accelerant.errors import FormatError, UnsupportedDtype
from accelerant.runtime.host import fork_safe

PREFIX = struct.Struct("<IQ")
Buffers = list[bytes | memoryview]


def described(arrays: Mapping[str, np.ndarray]) -> tuple[list[list[Any]], Buffers]:
    """Return the description of arrays for the head, [name, dtype, shape, bytes] of each, and their bytes."""
    entries: list[list[Any]] = []
    buffers: Buffers = []
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc":
            raise UnsupportedDtype(f"array {name!r} has dtype {array.dtype}, which is no number")
        data = bytes_of(array)
        entries.append([name, array.dtype.newbyteorder("<").str, list(array.shape), len(data)])
        buffers.append(data)
    return entries, buffers


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the bytes of an array that `described` has described."""
    if not (array.flags.c_contiguous and array.dtype.str[0] != ">"):
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data


def restored(entries: Iterable[Sequence[Any]], body: memoryview | bytes) -> dict[str, np.ndarray]:
    """Return the arrays that `described` described, as views of the body."""
    arrays, offset = {}, 0
    for name, kind, shape, size in entries:
        arrays[name] = np.frombuffer(memoryview(body)[offset : offset + size], np.dtype(kind)).reshape(shape)
        offset += size
    if offset != len(body):
        raise FormatError(f"the arrays take {offset} bytes, the body has {len(body)}")
    return arrays


_encoded = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one in each call


def prefix(head: Mapping[str, Any], size_bytes: int) -> bytes:
    """Return the bytes of a frame ahead of its body of `size_bytes`, at a multiple of 16 from the head's start."""
    text = _encoded(head).encode()
    text += b" " * (-len(text) % 16)  # fields copy arrays that are not aligned
    return PREFIX.pack(len(text), size_bytes) + text


def frame(head: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Buffers:
    """Return a frame whose head is `head` and the arrays' description under "arrays"."""
    entries, buffers = described(arrays)
    return [prefix({**head, "arrays": entries}, sum(map(len, buffers))), *buffers]


def write_file(path: Path, arrays: Mapping[str, np.ndarray]) -> int:
    """Write arrays to a new private file and return their bytes, when they are on the disk; an error leaves no file."""
    buffers = frame({}, arrays)
    opened = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with open(opened, "wb") as file:
            file.writelines(buffers)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        wipe(path)
        raise
    return sum(map(len, buffers))


def read_file(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file; raise FormatError if it is cut short."""
    content = memoryview(path.read_bytes())
    if len(content) >= PREFIX.size:
        head_bytes, body_bytes = PREFIX.unpack(content[: PREFIX.size])
        if len(content) == PREFIX.size + head_bytes + body_bytes:
            head = json.loads(bytes(content[PREFIX.size : PREFIX.size + head_bytes]))
            return restored(head["arrays"], content[PREFIX.size + head_bytes :])
    raise FormatError(f"{path.name} is cut short: it has {len(content)} bytes")


def wipe(path: Path) -> None:
    """Overwrite a file or folder with zeros, and remove it, if there; copy-on-write and flash may keep old blocks."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            for inner in path.iterdir():
                wipe(inner)
            path.rmdir()
        else:
            with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:  # removed in any case
                left = os.fstat(file.fileno()).st_size
                while left > 0:
                    left -= file.write(bytes(min(left, 1 << 20)))
                os.fsync(file.fileno())
            path.unlink()


class JobState(StrEnum):
    """The states of a job; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether a job in this state stays in it."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(slots=True)
class JobRequest:
    """A validated request: its parameters are JSON, and shapes and dtypes of its inputs have been checked.

    `priority` orders the requests of one key. `deadline_s` counts from now (None: the settings' for calls, none for
    jobs); `cost_s` estimates its seconds; `kind` is `merge_kind`'s where it is known already.
    """

    operation: str
    parameters: Mapping[str, Any]
    inputs: Mapping[str, np.ndarray] = field(repr=False)
    key_id: str = ""
    priority: int = 0
    deadline_s: float | None = None
    request_id: str = ""
    cost_s: float = 0.0
    kind: tuple[Any, ...] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the inputs."""
        return sum(array.nbytes for array in self.inputs.values())


def merge_kind(request: JobRequest) -> tuple[Any, ...] | None:
    """Return what calls of an elementwise operation that run as one have in common; None for one that runs alone."""
    arrays = list(request.inputs.items())
    if not arrays or not (shape := arrays[0][1].shape) or any(array.shape != shape for _, array in arrays):
        return None  # joined arrays would broadcast otherwise
    kinds = tuple((name, array.dtype.str) for name, array in arrays)
    return request.operation, json.dumps(dict(request.parameters), sort_keys=True), shape[1:], kinds


@dataclass(frozen=True)
class Job:
    """The record of a job. Times are seconds since the epoch; `progress` is a share from 0 to 1."""

    id: str
    operation: str
    state: JobState
    progress: float
    message: str
    error: str | None
    key_id: str
    priority: int
    attempts: int
    device: str | None
    created: float
    started: float | None
    finished: float | None
    result_bytes: int | None


@dataclass(frozen=True)
class WorkerStats:
    """The state of a worker process; `restarts` counts those that ended, `calls` its short calls, `job` is an id."""

    device: str
    label: str
    alive: bool
    restarts: int
    job: str | None
    calls: int
    pid: int | None


@dataclass(frozen=True)
class QueueStats:
    """Numbers of short calls in memory and of jobs in the store; `jobs`, by state, are some seconds old at most."""

    queued: int
    running: int
    bytes: int
    jobs: dict[str, int]
    workers: tuple[WorkerStats, ...]


# --- processes that exchange frames ----------------------------------------------------------------------------------
_log = logging.getLogger("accelerant.service")

_BACKOFF_S = (0.05, 10.0)
"""Pause before a process is started again: of the first time, and the longest; it doubles while it ends unready."""


class Child:
    """A process that runs a module, restarted when it ends; `failure` is why the last one ended before it was ready."""

    start_s: ClassVar[float] = 120.0
    """Longest time in which a process must be ready; the import of torch and a driver's start are in it."""

    def __init__(self, name: str, module: str) -> None:
        self.name, self._module = name, module
        self.ready = asyncio.Event()
        self.restarts = 0
        self.failure = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reason = ""
        self._closing = False
        self._ledger: bytes | dict[str, Any] = {}

    @property
    def pid(self) -> int | None:
        """The process's number while it takes work."""
        return self._process.pid if self._process is not None and self.ready.is_set() else None

    @property
    def ledger(self) -> dict[str, Any]:
        """The process's calls, as `Ledger.to_dict()` has them, {} before the first; read when asked for: megabytes."""
        if isinstance(self._ledger, bytes):
            self._ledger = dict(json.loads(self._ledger))
        return self._ledger

    # --- what a kind of child does -----------------------------------------------------------------------------------
    def arguments(self) -> list[str]:
        """Return the arguments of the module, besides the socket."""
        raise NotImplementedError

    def _began(self, head: dict[str, Any]) -> None:
        """Note what the process says of itself in its first frame; it is ready."""

    def _heard(self, head: dict[str, Any], body: memoryview) -> None:
        """Handle a later frame."""
        raise NotImplementedError

    def _gone(self, reason: str) -> None:
        """End what the process had to do: it has ended."""
        raise NotImplementedError

    # --- the process -------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Start the process, and start it again whenever it ends, until `close`."""
        pause, longest = _BACKOFF_S
        while not self._closing:
            try:
                reader = await self._start()
                was_ready = await self._listen(reader)
                self.ready.clear()
                reason = await self._ended_because()
            except OSError as error:  # no processes or files are left
                was_ready, reason = False, f"the worker of {self.name} cannot be started: {error}"
            self.ready.clear()
            self.failure = "" if was_ready else reason
            if not self._closing:
                self.restarts += 1
                _log.warning("%s; it starts again", reason)
            self._gone(reason)
            pause = _BACKOFF_S[0] if was_ready else min(longest, 2 * pause)
            if not self._closing:
                await asyncio.sleep(pause)

    async def _start(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", self._module, f"--socket={theirs.fileno()}", *self.arguments()]
            # A new program rather than a fork: device runtimes do not survive a fork.
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        return reader

    async def _listen(self, reader: asyncio.StreamReader) -> bool:
        """Handle what the process sends until its end; return whether it got ready."""
        self._reason = ""
        try:
            async with asyncio.timeout(self.start_s):
                head, _ = await self._receive(reader)
            if "failure" in head:
                self._reason = str(head["failure"])
                return False
            self._began(head)
            self.ready.set()
            while True:
                self._heard(*await self._receive(reader))
        except TimeoutError:
            self._reason = f"the worker of {self.name} was not ready within {self.start_s:g} s"
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the process has ended
        except (ValueError, KeyError, IndexError, TypeError) as error:
            self.kill(f"the worker of {self.name} sent a malformed message: {type(error).__name__}")
        return self.ready.is_set()

    @staticmethod
    async def _receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], memoryview]:
        head_bytes, body_bytes = PREFIX.unpack(await reader.readexactly(PREFIX.size))
        content = memoryview(await reader.readexactly(head_bytes + body_bytes))
        return json.loads(bytes(content[:head_bytes])), content[head_bytes:]

    async def _ended_because(self) -> str:
        """Wait for the process, which has closed its socket or is to be killed, and return why it ended."""
        process = self._process
        assert process is not None  # for the type checker: _start set it
        if self._writer is not None:
            self._writer.close()
        try:
            status = await asyncio.to_thread(process.wait, 2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            status = await asyncio.to_thread(process.wait)
        if self._reason:
            return self._reason
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"the worker of {self.name} was ended by {signal.Signals(-status).name}"
        return f"the worker of {self.name} ended with status {status}"

    def kill(self, reason: str) -> None:
        """End the process at once, for a reason; it starts again."""
        self._reason = reason
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """End the process, and do not start it again."""
        self._closing = True
        if self._process is not None:
            self._process.kill()

    def _send(self, buffers: Buffers) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.writelines(buffers)


class ChildEnd:
    """The process's end of the socket; the process ends when the socket does, so it never outlives its server."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = fork_safe(threading.Lock())

    def send(self, head: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Send a frame."""
        buffers = frame(head, arrays or {})
        try:
            with self._sending:
                if sum(map(len, buffers)) < 1 << 16:
                    self._socket.sendall(b"".join(buffers))
                else:
                    for buffer in buffers:
                        self._socket.sendall(buffer)
        except OSError:  # the server is gone
            os._exit(0)

    def receive(self) -> tuple[dict[str, Any], memoryview]:
        """Return the next frame."""
        head_bytes, body_bytes = PREFIX.unpack(self._read(PREFIX.size))
        content = memoryview(self._read(head_bytes + body_bytes))
        return json.loads(bytes(content[:head_bytes])), content[head_bytes:]

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        view = memoryview(content)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError:
                count = 0
            if not count:
                os._exit(0)
            view = view[count:]
        return content


def child_arguments(*names: str) -> tuple[argparse.Namespace, socket.socket]:
    """Return the arguments that the server gave this process, and its end of the socket."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    for name in names:
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # which a terminal or an init system sends to the whole group
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(given.socket, False)
    os.umask(0o077)
    return given, socket.socket(fileno=given.socket)
