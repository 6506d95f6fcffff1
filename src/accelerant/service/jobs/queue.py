"""The queue of short calls: bounded by count and bytes, fair between API keys, and cut into batches for a worker.

Keys take turns; of one key's calls the one of the highest priority goes first, then the oldest. So a key that sends a
thousand calls delays another's by one batch at most, whatever their priorities.

A batch is taken in that order until it would last longer than `batch_s` or pass `batch_bytes`. Within it, calls of the
same elementwise operation with equal parameters, dtypes and trailing dimensions become one launch: their inputs, which
have one shape each, are joined along axis 0.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accelerant.service.errors import DeadlineExceeded
from accelerant.service.jobs.model import JobRequest
from accelerant.service.jobs.store import check_bounds


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
