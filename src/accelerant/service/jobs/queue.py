"""The queue of short calls, fair between API keys, and the worker processes that run them.

Keys take turns; of one key's calls the one of the highest priority goes first, then the oldest. A batch is taken in
that order until it would last longer than `batch_s` or pass `batch_bytes`. Within it, calls of the same elementwise
operation with equal parameters, dtypes and trailing dimensions become one launch, joined along axis 0. `Child` and
`ChildEnd` are both ends of a process on a socket pair, with frames of wire.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from accelerant.runtime.host import fork_safe
from accelerant.runtime.monitoring.monitor import publish
from accelerant.service.errors import DeadlineExceeded, JobFailed, error_named
from accelerant.service.jobs import wire
from accelerant.service.jobs.store import check_bounds
from accelerant.service.jobs.wire import JobRequest, WorkerStats

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


@dataclass(eq=False, slots=True)
class Call:
    """A short call: its request, the future that its caller awaits, and what has become of it so far.

    Calls of one `kind` may be launched as one; one of None is launched alone. `deadline` is of time.monotonic(),
    `avoid` the device on which its worker was lost, `device` the label of the one that ran it.
    """

    request: JobRequest
    deadline: float
    kind: tuple[Any, ...] | None
    future: asyncio.Future[dict[str, np.ndarray]] = field(repr=False)
    size_bytes: int
    losses: int = 0
    avoid: str | None = None
    device: str = ""


@dataclass(eq=False)
class Launch:
    """Calls that a worker runs as one; each has so many rows of the joined inputs (none where it is alone)."""

    calls: list[Call]
    rows: list[int]


def launches_of(calls: list[Call]) -> list[Launch]:
    """Return the launches of a batch."""
    merged: dict[Any, Launch] = {}
    for call in calls:
        joined = call.kind is not None and len(calls) > 1
        launch = merged.setdefault(call.kind if joined else call, Launch([], []))
        launch.calls.append(call)
        launch.rows.append(next(iter(call.request.inputs.values())).shape[0] if joined else 0)
    return list(merged.values())


class CallQueue:
    """The waiting calls of a server, of one event loop, bounded in number and bytes, as batches are in seconds too."""

    def __init__(
        self, most_calls: int, most_bytes: int, *, batch_s: float = 0.02, batch_bytes: int = 8 << 20,
        batch_calls: int = 32,
    ) -> None:  # fmt: skip
        self.most_calls, self.most_bytes = most_calls, most_bytes
        self.batch_s, self.batch_bytes, self.batch_calls = batch_s, batch_bytes, batch_calls
        self.calls: set[Call] = set()  # that wait or are in a worker
        self.held_bytes = 0
        self._held_of: dict[str, tuple[int, int]] = {}  # the same by key
        self._numbers = itertools.count()
        self._waiting: OrderedDict[str, list[tuple[int, int, int, Call]]] = OrderedDict()  # heaps; first: next turn
        self._seconds = 0.01  # of a call, averaged over the latest

    @property
    def held(self) -> int:
        """The number of calls that wait or are in a worker."""
        return len(self.calls)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def retry_after_s(self) -> float:
        """Estimate of the seconds in which half of the queue will have been served."""
        return min(60.0, max(1.0, self.held * self._seconds / 2))

    def put(self, call: Call) -> None:
        """Add a call; raise QueueFull if it passes a bound (see `check_bounds`). The end of its future takes it off."""
        held, own = (self.held, self.held_bytes), self._held_of.get(call.request.key_id, (0, 0))
        check_bounds(held, own, call.size_bytes, self.most_calls, self.most_bytes, self.retry_after_s)
        self._hold(call, 1)
        call.future.add_done_callback(lambda _: self._hold(call, -1))
        self._push(call)

    def _hold(self, call: Call, change: int) -> None:
        (self.calls.add if change > 0 else self.calls.discard)(call)
        key, size = call.request.key_id, change * call.size_bytes
        self.held_bytes += size
        count, held_bytes = self._held_of.pop(key, (0, 0))
        count += change
        if count:
            self._held_of[key] = count, held_bytes + size
        if change < 0 and len(self._waiting.get(key, ())) > 2 * count:
            self._forget_ended(key)

    def _forget_ended(self, key: str) -> None:
        """Drop a key's calls that ended while they waited: behind calls of a higher priority they might stay."""
        heap = [entry for entry in self._waiting[key] if not entry[-1].future.done()]
        heapq.heapify(heap)
        self._waiting[key] = heap
        if not heap:
            del self._waiting[key]

    def put_back(self, call: Call) -> None:
        """Add a call whose worker was lost ahead of its key's other calls; it is within the bounds already."""
        if not call.future.done():
            self._push(call, first=True)

    def _push(self, call: Call, *, first: bool = False) -> None:
        number = next(self._numbers)
        heap = self._waiting.setdefault(call.request.key_id, [])
        heapq.heappush(heap, (-call.request.priority, -1 if first else number, number, call))

    def measured(self, calls: int, seconds: float) -> None:
        """Note that a batch of so many calls took so long, for `retry_after_s`."""
        self._seconds += 0.1 * (seconds / max(1, calls) - self._seconds)

    def take(self, device: str, *, alone: bool) -> list[Call]:
        """Return the next batch for a device, empty if there is none.

        Calls that were given up or are past their deadline are dropped. A call that lost its worker on this device
        waits for another, unless this one is `alone`, and runs in a batch of its own: should it end the next worker,
        too, no other call is lost with it.
        """
        batch: list[Call] = []
        cost, size, passed_over = 0.0, 0, []
        while self._waiting and len(batch) < self.batch_calls:
            key, heap = next(iter(self._waiting.items()))
            call = heap[0][-1]
            if call.future.done():
                self._drop_first(key)
                continue
            full = cost + call.request.cost_s > self.batch_s or size + call.size_bytes > self.batch_bytes
            if batch and (full or call.losses or batch[-1].losses):
                break
            self._waiting.move_to_end(key)
            self._drop_first(key)
            if call.deadline < time.monotonic():
                call.future.set_exception(DeadlineExceeded("the deadline passed while the call was queued"))
                continue
            if call.avoid == device and not alone:
                passed_over.append(call)
                continue
            batch.append(call)
            cost += call.request.cost_s
            size += call.size_bytes
        for call in passed_over:
            self.put_back(call)
        return batch

    def _drop_first(self, key: str) -> None:
        heap = self._waiting[key]
        heapq.heappop(heap)
        if not heap:
            del self._waiting[key]

    def clear(self) -> list[Call]:
        """Remove and return all waiting calls."""
        calls = [entry[-1] for heap in self._waiting.values() for entry in heap if not entry[-1].future.done()]
        self._waiting.clear()
        return calls


_GRACE_S = 5.0  # seconds that an operation may take past its deadline until its worker is ended

_STUCK_S = 60.0
"""Least time until the same happens for short calls, whose first in a process compiles and loads what it needs."""


class WorkerProcess(Child):
    """The process of one device, restarted when it ends; callbacks tell its start, idleness, loss and progress."""

    def __init__(
        self, device: str, name: str, operations: str, *, started: Callable[..., None], idle: Callable[..., None],
        lost: Callable[..., None], progressed: Callable[..., None],
    ) -> None:  # fmt: skip
        super().__init__(name, "accelerant.service.jobs.worker")
        self.device, self._operations = device, operations
        self._started, self._idle, self._lost, self._progressed = started, idle, lost, progressed
        self.wake = asyncio.Event()  # there may be a job to run
        self.label = device
        self._ledger: bytes | dict[str, Any] = {}
        self.launches: list[Launch] = []
        self.job: str | None = None
        self._ended: asyncio.Future[dict[str, Any]] | None = None
        self._sent = 0.0
        self._blameless = False
        self._watched: asyncio.TimerHandle | None = None

    def stats(self) -> WorkerStats:
        """Return the worker's state."""
        calls = sum(len(launch.calls) for launch in self.launches)
        return WorkerStats(self.name, self.label, self.ready.is_set(), self.restarts, self.job, calls, self.pid)

    @property
    def ledger(self) -> dict[str, Any]:
        """The process's operations, fallbacks and their times; read when they are asked for: they may be megabytes."""
        if isinstance(self._ledger, bytes):
            self._ledger = dict(json.loads(self._ledger))
        return self._ledger

    # --- the process -------------------------------------------------------------------------------------------------

    def arguments(self) -> list[str]:
        """Return the device and the operations."""
        return [f"--device={self.device}", f"--operations={self._operations}"]

    def _began(self, head: dict[str, Any]) -> None:
        if self.name == self.device:
            self.name = head["device"]
        self.device, self.label = head["device"], head["label"]
        self.ready.set()
        self._started(head["others"])

    def _heard(self, head: dict[str, Any], body: memoryview) -> None:
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

    def _gone(self, reason: str) -> None:
        calls = [call for launch in self.launches for call in launch.calls]
        blameless, self._blameless = self._blameless or bool(calls), False
        self._taken()
        self._lost(self, reason, calls)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result({"lost": reason, "blameless": blameless})

    def kill(self, reason: str, *, blameless: bool = False) -> None:
        """End the process at once, for a reason; it starts again. A job that it runs may be `blameless`."""
        self._blameless = blameless
        super().kill(reason)

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
        self.launches = []
        if self._watched is not None:
            self._watched.cancel()
            self._watched = None

    def _answered(self, head: dict[str, Any], body: memoryview) -> None:
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

        A job is blameless beside calls, or where the server ended the worker; past its deadline the process is ended.
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
    parts, first = [], 0
    for count in rows:
        parts.append({name: array[first : first + count] for name, array in arrays.items()})
        first += count
    return parts
