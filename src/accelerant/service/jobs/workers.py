"""The server's side of the worker processes: start, feed, watch, restart."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from accelerant.runtime.monitoring.monitor import publish
from accelerant.service.child import Child
from accelerant.service.errors import JobFailed, error_named
from accelerant.service.jobs import wire
from accelerant.service.jobs.model import WorkerStats
from accelerant.service.jobs.queue import Call, Launch, launches_of

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
