"""A child process of the server, on a socket pair with frames of jobs/wire.py: both of its ends.

`Child` is the server's end: it starts the process, and starts it again whenever it ends. `ChildEnd` is the process's:
it ends with its server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from accelerant.runtime.host import fork_safe
from accelerant.service.jobs import wire

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

    @property
    def pid(self) -> int | None:
        """The process's number while it takes work."""
        return self._process.pid if self._process is not None and self.ready.is_set() else None

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
        head_bytes, body_bytes = wire.PREFIX.unpack(await reader.readexactly(wire.PREFIX.size))
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

    def _send(self, buffers: wire.Buffers) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.writelines(buffers)


class ChildEnd:
    """The process's end of the socket; the process ends when the socket does, so it never outlives its server."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = fork_safe(threading.Lock())

    def send(self, head: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Send a frame."""
        buffers = wire.frame(head, arrays or {})
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
        head_bytes, body_bytes = wire.PREFIX.unpack(self._read(wire.PREFIX.size))
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
