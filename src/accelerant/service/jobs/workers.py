"""The server's side of the worker processes: start, feed, watch, restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from accelerant.runtime.monitoring.monitor import publish
from accelerant.service.errors import JobFailed, error_named
from accelerant.service.jobs import wire
from accelerant.service.jobs.model import WorkerStats
from accelerant.service.jobs.queue import Call, Launch, launches_of

_log = logging.getLogger("accelerant.service")

_BACKOFF_S = (0.05, 10.0)
"""Pause before a worker is started again: of the first time, and the longest; it doubles while workers end unready."""

_GRACE_S = 5.0
"""Seconds that an operation may take past its deadline until its worker is ended."""

_STUCK_S = 60.0
"""Least time until the same happens for short calls, whose first in a process compiles and loads what it needs."""

_START_S = 120.0
"""Longest time in which a worker process must be ready; the import of torch and a driver's start are in it."""


class WorkerProcess:
    """The process of one device, restarted when it ends.

    Args:
        device: the device of its operations, or "auto"; `name` tells two workers of one device apart.
        operations: "module:attribute" of the table of operations.
        started: called with the names of other devices that should have workers when the process is ready.
        idle: called when the worker can take calls again, with the number of the last ones and their seconds.
        lost: called with the worker, the reason and the calls that it had when the process has ended.
        progressed: called with each report of a job's progress.
    """

    def __init__(
        self, device: str, name: str, operations: str, *, started: Callable[..., None], idle: Callable[..., None],
        lost: Callable[..., None], progressed: Callable[..., None],
    ) -> None:  # fmt: skip
        self.device, self.name, self._operations = device, name, operations
        self._started, self._idle, self._lost, self._progressed = started, idle, lost, progressed
        self.ready = asyncio.Event()
        self.wake = asyncio.Event()  # there may be a job to run
        self.label = device
        self._ledger: bytes | dict[str, Any] = {}
        self.restarts = 0
        self.launches: list[Launch] = []
        self.job: str | None = None
        self.failure = ""  # why the last process ended before it was ready
        self._ended: asyncio.Future[dict[str, Any]] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._sent = 0.0
        self._reason, self._blameless = "", False
        self._closing = False
        self._watched: asyncio.TimerHandle | None = None

    def stats(self) -> WorkerStats:
        """Return the worker's state."""
        calls = sum(len(launch.calls) for launch in self.launches)
        pid = self._process.pid if self._process is not None and self.ready.is_set() else None
        return WorkerStats(self.name, self.label, self.ready.is_set(), self.restarts, self.job, calls, pid)

    @property
    def ledger(self) -> dict[str, Any]:
        """The process's operations, fallbacks and their times; read when they are asked for: they may be megabytes."""
        if isinstance(self._ledger, bytes):
            self._ledger = dict(json.loads(self._ledger))
        return self._ledger

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
            calls = [call for launch in self.launches for call in launch.calls]
            blameless = self._blameless or bool(calls)
            self._taken()
            self.ready.clear()
            self.failure = "" if was_ready else reason
            if not self._closing:
                self.restarts += 1
                _log.warning("%s; it starts again", reason)
            self._lost(self, reason, calls)
            if self._ended is not None and not self._ended.done():
                self._ended.set_result({"lost": reason, "blameless": blameless})
            pause = _BACKOFF_S[0] if was_ready else min(longest, 2 * pause)
            if not self._closing:
                await asyncio.sleep(pause)

    async def _start(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "accelerant.service.jobs.worker", f"--socket={theirs.fileno()}"]
            command += [f"--device={self.device}", f"--operations={self._operations}"]
            # A new program rather than a fork: device runtimes do not survive a fork.
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        return reader

    async def _listen(self, reader: asyncio.StreamReader) -> bool:
        """Handle what the worker sends until its end; return whether it got ready."""
        self._reason, self._blameless = "", False
        try:
            async with asyncio.timeout(_START_S):
                head, _ = await self._receive(reader)
            if self.name == self.device:
                self.name = head["device"]
            self.device, self.label = head["device"], head["label"]
            self.ready.set()
            self._started(head["others"])
            while True:
                head, body = await self._receive(reader)
                kind = head["kind"]
                if kind == "answer":
                    self._answered(head, body)
                elif kind == "progress":
                    self._progressed(head)
                elif kind == "ended" and self._ended is not None and not self._ended.done() and head["id"] == self.job:
                    self._ended.set_result(head)
                elif kind == "ledger":
                    self._ledger = bytes(body)
                elif kind == "lost":
                    self._reason = head["reason"]
                    publish(self.label, "lost", self._reason)
        except TimeoutError:
            self._reason = f"the worker of {self.name} was not ready within {_START_S:g} s"
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

    def kill(self, reason: str, *, blameless: bool = False) -> None:
        """End the process at once, for a reason; it starts again. A job that it runs may be `blameless`."""
        self._reason, self._blameless = reason, blameless
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

    # --- calls and the job -------------------------------------------------------------------------------------------

    def send_calls(self, calls: list[Call]) -> None:
        """Send a batch; the worker must have none."""
        self.launches = launches_of(calls)
        self._sent = time.monotonic()
        latest = max(call.deadline for call in calls) - self._sent
        self._watched = asyncio.get_running_loop().call_later(
            max(_STUCK_S, latest + _GRACE_S), self.kill, f"the worker of {self.name} was ended: its calls hang"
        )
        epoch = time.time() - self._sent
        heads: list[dict[str, Any]] = []
        body: wire.Buffers = []
        for launch in self.launches:
            first = launch.calls[0].request
            entries, parts = wire.described(first.inputs)
            if len(launch.calls) > 1:
                others = ([wire.bytes_of(x) for x in call.request.inputs.values()] for call in launch.calls[1:])
                joined = list(zip(parts, *others, strict=True))
                rows = sum(launch.rows)
                entries = [
                    [name, kind, [rows, *shape[1:]], sum(map(len, pieces))]
                    for (name, kind, shape, _), pieces in zip(entries, joined, strict=True)
                ]
                parts = [piece for pieces in joined for piece in pieces]
            body += parts
            deadline = max(call.deadline for call in launch.calls) + epoch
            heads.append({
                "operation": first.operation, "parameters": dict(first.parameters), "arrays": entries,
                "rows": launch.rows, "deadline": deadline,
            })  # fmt: skip
        self._send([wire.prefix({"kind": "calls", "launches": heads}, sum(map(len, body))), *body])

    def _taken(self) -> None:
        """Forget the batch, which has ended."""
        self.launches = []
        if self._watched is not None:
            self._watched.cancel()
            self._watched = None

    def _answered(self, head: dict[str, Any], body: memoryview) -> None:
        """Give callers their results."""
        launch = self.launches[head["launch"]]
        calls = launch.calls if head["call"] is None else [launch.calls[head["call"]]]
        if error := head.get("error"):
            results: list[Any] = [error_named(*error) or JobFailed(": ".join(error))]
        else:
            arrays = wire.restored(head["arrays"], body)
            results = [arrays] if len(calls) == 1 else _cut(arrays, launch.rows)
        for call, result in zip(calls, results, strict=True):
            call.device = self.label
            if not call.future.done():
                (call.future.set_exception if isinstance(result, Exception) else call.future.set_result)(result)
        if head["last"]:
            count = sum(len(launch.calls) for launch in self.launches)
            self._taken()
            self._idle(count, time.monotonic() - self._sent)

    async def run_job(self, message: dict[str, Any], deadline: float | None) -> dict[str, Any]:
        """Run a job and return how it ended: the worker's message, or {"lost": reason, "blameless": bool}.

        The job is blameless if calls ran beside it, or the server ended the worker. It has not "begun" if the worker
        had ended before.
        A job that passes its deadline without asking for it is ended, with the process.
        """
        if not self.ready.is_set():  # the next process must not get what it would run beside the repetition
            return {"lost": f"the worker of {self.name} ended", "begun": False}
        self.job = message["id"]
        self._ended = asyncio.get_running_loop().create_future()
        self._send(wire.frame({"kind": "job", **message}, {}))
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.time()) + _GRACE_S):
                return await asyncio.shield(self._ended)
        except TimeoutError:
            self.kill(f"the worker of {self.name} was ended: job {self.job} passed its deadline")
            await self._ended
            return {"error": ["DeadlineExceeded", "the deadline passed; the operation was ended"]}
        finally:
            self.job = None

    def tell_job(self, kind: str, **values: Any) -> None:
        """Send the running job a message: "stop" with a reason, or "lease" with its new end."""
        if self.job is not None:
            self._send(wire.frame({"kind": kind, "id": self.job, **values}, {}))


def _cut(arrays: dict[str, np.ndarray], rows: list[int]) -> list[dict[str, np.ndarray]]:
    """Return the parts of joined results."""
    parts, first = [], 0
    for count in rows:
        parts.append({name: array[first : first + count] for name, array in arrays.items()})
        first += count
    return parts
