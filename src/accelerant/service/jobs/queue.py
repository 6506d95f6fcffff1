"""The queue of short calls, fair between API keys, and the worker processes that run them.

Keys take turns; of one key's calls the one of the highest priority goes first, then the oldest. A batch is taken in
that order until it would last longer than `batch_s` or pass `batch_bytes`. Within it, calls of the same elementwise
operation with equal parameters, dtypes and trailing dimensions become one launch, joined along axis 0.
"""

import asyncio
import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accelerant.runtime.monitoring.monitor import publish
from accelerant.service.errors import DeadlineExceeded, JobFailed, error_named
from accelerant.service.jobs import wire
from accelerant.service.jobs.store import check_bounds
from accelerant.service.jobs.wire import Child, JobRequest, WorkerStats


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
