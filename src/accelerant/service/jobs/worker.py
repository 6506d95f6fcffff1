"""The worker process of a device: it runs short calls and, at the same time, one job.

The server starts it by `python -m accelerant.service.jobs.worker` with one end of a socket pair, on which frames of
wire.py travel. Of two threads one reads the socket while the other runs short calls, so that a long call keeps no lease
and no stop from the job; the main thread runs the job. The arrays of jobs are files, which do not pass through the
server.

The process ends when the socket does, so it never outlives its server. A lost device ends it, too: the server starts
another and repeats the work.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from accelerant.errors import AccelerantError, DeviceLost
from accelerant.runtime import registry
from accelerant.runtime.host import fork_safe
from accelerant.runtime.ledger import ledger
from accelerant.service.errors import Cancelled, DeadlineExceeded
from accelerant.service.jobs import wire
from accelerant.service.jobs.wire import ChildEnd, child_arguments

if TYPE_CHECKING:
    from accelerant.service.operations import OpSpec

_REPORT_S = 0.25  # least time between two reports of a job's progress
_LEDGER_S = 1.0  # time between two reports of the process's ledger


class Suspended(Exception):  # noqa: N818 - not an error
    """The server stops, or no longer holds the job: a resumable job saves its state, and runs again elsewhere."""


class Context:
    """The surroundings of an operation in a worker: device, deadline by time.time(), and what the settings `placed`."""

    def __init__(self, device: str, directory: Path | None, deadline: float | None, worker: Worker, job: str) -> None:
        self.device, self.deadline = device, deadline
        self._directory, self._worker, self._job = directory, worker, job
        self._reported = 0.0
        self.stop = ""  # the server's reason to stop
        self.lease: float | None = None
        self.placed: dict[str, Any] = {}

    @property
    def directory(self) -> Path:
        """The job's private folder, removed after it; that of a resumable job is there again after a crash."""
        if self._directory is None:
            raise RuntimeError("a short call has no folder")
        return self._directory

    def progress(self, fraction: float, message: str = "") -> None:
        """Report the share of the work that is done; raise Cancelled, DeadlineExceeded or Suspended to end it early."""
        if self.stop == "cancel":
            raise Cancelled("the job was cancelled")
        if fraction < 1.0 and (self.stop or (self.lease is not None and time.time() > self.lease)):
            raise Suspended(self.stop or "the server's lease has expired")
        now = time.time()
        if self.deadline is not None and now > self.deadline:
            raise DeadlineExceeded(f"the deadline passed when {fraction:.0%} of the work was done")
        if self._job and (now - self._reported > _REPORT_S or fraction >= 1.0):
            self._reported = now
            self._worker.send({"kind": "progress", "id": self._job, "progress": fraction, "message": message[:500]})


def load_operations(place: str) -> dict[str, OpSpec]:
    """Return the table of operations at "module:attribute", and with it those of the public ops of "...,op,op"."""
    place, *ops = place.split(",")
    module, _, attribute = place.partition(":")
    table: dict[str, OpSpec] = getattr(importlib.import_module(module), attribute)
    if not ops:
        return table
    from accelerant.service.operations import op_spec

    return {**{name: op_spec(name) for name in ops}, **table}


class Worker(ChildEnd):
    """One end of the socket, and what arrives on it."""

    def __init__(self, connection: socket.socket, device: str, operations: Mapping[str, OpSpec]) -> None:
        super().__init__(connection)
        self.device, self.operations = device, operations
        self._jobs: queue.SimpleQueue[tuple[dict[str, Any], Context]] = queue.SimpleQueue()
        self._reading = fork_safe(threading.Lock())
        self._running: Context | None = None
        self._worked = threading.Event()  # since the ledger was sent
        self._log = logging.getLogger("accelerant.service.worker")

    def run(self, label: str, others: Sequence[str]) -> NoReturn:
        """Run jobs in this thread and short calls in others, until the socket ends."""
        self.send({"kind": "ready", "device": self.device, "label": label, "others": list(others)})
        for name in ("calls", "more"):
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        threading.Thread(target=self._send_ledger, name="ledger", daemon=True).start()
        while True:
            self._run_job(*self._jobs.get())

    def _send_ledger(self) -> NoReturn:
        """Send the ledger after work, at most once a second."""
        while True:
            self._worked.wait()
            time.sleep(_LEDGER_S)
            self._worked.clear()
            text = json.dumps(ledger().to_dict(), separators=(",", ":")).encode()
            self.send({"kind": "ledger"}, {"ledger": np.frombuffer(text, np.uint8)})

    # --- the socket --------------------------------------------------------------------------------------------------
    def _serve(self) -> NoReturn:
        """Read frames in turns with the other thread; the one that reads calls runs them, as a hand-over takes time."""
        while True:
            with self._reading:
                head, body = self.receive()
                self._told(head)
            if head["kind"] == "calls":
                self._run_calls(head["launches"], body)

    def _told(self, head: dict[str, Any]) -> None:
        """Begin a job, or pass a message to the one that runs."""
        kind = head["kind"]
        if kind == "job":  # the context is there before the next frame, which may be for it
            self._running = Context(self.device, Path(head["directory"]), head["deadline"], self, head["id"])
            self._running.lease = head["lease"]
            self._jobs.put((head, self._running))
        elif kind != "calls" and (context := self._running) is not None and context._job == head["id"]:
            if kind == "stop":
                context.stop = head["reason"]
            elif kind == "lease":
                context.lease = head["until"]

    # --- short calls -------------------------------------------------------------------------------------------------
    def _run_calls(self, launches: list[dict[str, Any]], body: memoryview) -> None:
        """Run the launches of a batch; one that fails is repeated call by call, to tell which call has the error."""
        offset = 0
        for number, launch in enumerate(launches):
            size = sum(entry[3] for entry in launch["arrays"])
            arrays = wire.restored(launch["arrays"], body[offset : offset + size])
            offset += size
            last = number == len(launches) - 1
            rows = launch["rows"]
            head = {"kind": "answer", "launch": number, "call": None if len(rows) > 1 else 0, "last": last}
            error = self._answer(head, launch, arrays, sum(rows) if len(rows) > 1 else None)
            if error is None:
                continue
            if len(rows) == 1:
                self.send({**head, "error": error})
                continue
            first = 0
            for call, count in enumerate(rows):
                part = {name: array[first : first + count] for name, array in arrays.items()}
                first += count
                head = {"kind": "answer", "launch": number, "call": call, "last": last and call == len(rows) - 1}
                if (error := self._answer(head, launch, part, None)) is not None:
                    self.send({**head, "error": error})

    def _answer(
        self, head: dict[str, Any], launch: dict[str, Any], arrays: dict[str, np.ndarray], rows: int | None
    ) -> list[str] | None:
        """Run a launch and send its result; return the error if it fails."""
        context = Context(self.device, None, launch["deadline"], self, "")
        try:
            result = self._run(launch, arrays, context)
            if rows is not None and any(array.ndim == 0 or array.shape[0] != rows for array in result.values()):
                raise RuntimeError(f"{launch['operation']} is no elementwise operation")
            self.send(head, result)
        except Exception as error:  # noqa: BLE001 - whatever an operation raises is the answer
            return self._described(launch["operation"], error)
        return None

    def _run(self, given: dict[str, Any], arrays: dict[str, np.ndarray], context: Context) -> dict[str, np.ndarray]:
        self._worked.set()
        operation = self.operations[given["operation"]]
        parameters = given["parameters"]
        if operation.placed:
            context.placed = {name: parameters[name] for name in operation.placed}
            parameters = {name: value for name, value in parameters.items() if name not in operation.placed}
        result: dict[str, np.ndarray] = operation.run(arrays, operation.parameters.model_validate(parameters), context)
        return result

    def _described(self, operation: str, error: Exception) -> list[str]:
        """Return the type and message of an error for the client; the message of an unforeseen one stays in the log."""
        if isinstance(error, DeviceLost):
            self.send({"kind": "lost", "reason": f"{self.device} was lost: {error}"})
            os._exit(70)
        if isinstance(error, AccelerantError):
            return [type(error).__name__, str(error)]
        if isinstance(error, MemoryError):
            return ["OutOfMemory", f"{operation} needs more memory than there is"]
        self._log.error("%s failed", operation, exc_info=error)
        return ["JobFailed", f"{operation} failed with {type(error).__name__}; the server's log has the details"]

    # --- jobs --------------------------------------------------------------------------------------------------------
    def _run_job(self, given: dict[str, Any], context: Context) -> None:
        """Run a job from its file of inputs, write the file of its result, and say how it ended."""
        answer: dict[str, Any] = {"kind": "ended", "id": given["id"], "attempt": given["attempt"]}
        try:
            context.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            result = self._run(given, wire.read_file(Path(given["inputs"])), context)
            context.progress(1.0)
            answer["result_bytes"] = wire.write_file(Path(given["result"]), result)
        except Suspended:
            answer["suspended"] = True
        except Exception as error:  # noqa: BLE001 - whatever an operation raises is the answer
            answer["error"] = self._described(given["operation"], error)
        self._running = None
        self.send(answer)


def find_devices(device: str) -> tuple[str, str, list[str]]:
    """Return the name of a device for operations, its label, and the names of others of its kind if it is "auto"."""
    if device == "cpu":
        return device, "cpu:0", []
    chosen = registry.find_device(device)
    if device != "auto":
        return device, chosen.label, []
    if chosen.backend == "cpu":
        return "cpu", chosen.label, []
    present = [other for other in registry.devices() if other.available and not other.software]
    others = [other.label for other in present if other.backend == chosen.backend and other.label != chosen.label]
    return chosen.label, chosen.label, others


def main() -> NoReturn:
    """Run the worker on the socket that the server passed."""
    given, connection = child_arguments("device", "operations")
    try:
        device, label, others = find_devices(given.device)
    except AccelerantError as error:
        sys.exit(f"worker of {given.device}: {error}")
    operations = load_operations(given.operations)
    warm = getattr(sys.modules[given.operations.partition(":")[0]], "warm", None)
    if warm is not None:
        warm(device)
    Worker(connection, device, operations).run(label, others)


if __name__ == "__main__":
    main()
