"""Telemetry of the service: log lines, spans, Prometheus metrics, and the events that the dashboard shows.

Devices are sampled in this process, which starts no driver. What the workers computed comes from their ledgers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from accelerant._version import __version__
from accelerant.errors import BackendUnavailable
from accelerant.runtime import registry
from accelerant.runtime.files import escaped
from accelerant.runtime.ledger import merged, prometheus_text, sections
from accelerant.runtime.monitoring.monitor import Sample, event_counts, to_prometheus, watch_devices
from accelerant.service.errors import Refused

if TYPE_CHECKING:
    from accelerant.runtime.provider import ComputeDevice
    from accelerant.service.jobs.service import JobService
    from accelerant.service.served_models.process import ServedModels
    from accelerant.service.settings import ServiceSettings


@dataclass(slots=True)
class RequestRecord:
    """A request that has been answered; `held_bytes` is what it still takes of the bytes that Inference bounds."""

    request_id: str
    method: str
    path: str
    route: str = ""
    operation: str = ""
    backend: str = ""
    key_id: str = ""
    status: int = 0
    seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    held_bytes: int = 0


BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper ends of the buckets of latencies, in seconds; the last bucket is open."""

_HISTORY = 120  # samples of a device that a new page of the dashboard is given: two minutes
_RETRY_S = 10.0  # time after which devices that could not be read are tried again

_LEDGER_ROWS = 200
_LEDGER_COLUMNS = (
    "op", "implementation", "own", "device", "case", "calls", "failures", "ms_p50", "ms_first", "ms_total", "share",
    "reason",
)  # fmt: skip
_LEDGER_EVERY = 3  # seconds between two readings of the workers' ledgers for a page


class Telemetry(Collector):
    """Counts of requests, samples of devices, read within its context, and the queue's state; of one event loop."""

    stream_s: ClassVar[float] = math.inf
    """Seconds after which a stream of events ends; its client connects again."""

    def __init__(self, jobs: JobService, settings: ServiceSettings) -> None:
        self._jobs = jobs
        self._settings = settings
        self._served: ServedModels | None = None
        self._started = time.time()
        self._closed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="accelerant-telemetry", daemon=True)
        self._history: dict[str, deque[Sample]] = {}
        self._registry = CollectorRegistry()
        self._series: dict[tuple[str, str, str], Any] = {}  # of the histogram: to look one up there takes longer
        self._requests = Histogram(
            "accelerant_request_seconds", "Time from a request's first byte to its answer.",
            ("operation", "backend", "status"), buckets=BUCKETS_S, registry=self._registry,
        )  # fmt: skip
        self._registry.register(self)

    def register(self, served: ServedModels) -> None:
        """Add the metrics and the ledgers of served models."""
        served.metrics.register(self._registry)
        self._served = served

    def __enter__(self) -> Telemetry:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._thread.join(1.0)  # a daemon, which may wait for a driver

    def end_events(self) -> None:
        """End the streams of events. A drain begins with it, since a stop waits for open connections."""
        self._ended = True

    def close(self) -> None:
        """End the events and the reading of devices."""
        self.end_events()
        self._closed.set()

    def _watch(self) -> None:
        """Read the devices of the workers, and the CPU, until the end. To find them may take seconds."""
        while not self._closed.is_set():
            try:
                labels = self._labels()
                with watch_devices(devices=_present(labels), samples=self._add):
                    while labels == self._labels() and not self._closed.wait(1.0):
                        pass
            except Exception:
                logging.getLogger("accelerant").exception("the devices could not be read")
                self._closed.wait(_RETRY_S)

    def _labels(self) -> list[str]:
        return sorted({"cpu:0", *self._jobs.labels})

    def _add(self, item: Sample) -> None:
        self._history.setdefault(item.device, deque(maxlen=_HISTORY)).append(item)

    # --- metrics -----------------------------------------------------------------------------------------------------
    def observe(self, record: RequestRecord) -> None:
        """Count an answered request of an operation."""
        if record.operation:
            labels = (record.operation, record.backend, str(record.status))
            series = self._series.get(labels)
            if series is None:
                series = self._series[labels] = self._requests.labels(*labels)
            series.observe(record.seconds)

    def metrics(self) -> bytes:
        """Return every metric in Prometheus' text format 0.0.4."""
        samples = [history[-1] for history in list(self._history.values())]
        texts = (to_prometheus(samples), prometheus_text(self.ledger()))
        return generate_latest(self._registry) + "".join(texts).encode()

    def collect(self) -> Iterator[Metric]:
        """Yield the queue's, the jobs' and the workers' metrics, and whether each device is lost."""
        stats, settings = self._jobs.stats(), self._settings
        for name, text, value in (
            ("queue_jobs", "Jobs that wait.", stats.queued),
            ("queue_jobs_limit", "Waiting jobs at which a request is refused with 429.", settings.queue_jobs),
            ("queue_bytes", "Bytes of the inputs of waiting jobs.", stats.bytes),
            ("queue_bytes_limit", "Bytes at which a request is refused with 429.", settings.queue_bytes),
            ("jobs_running", "Jobs that run.", stats.running),
        ):
            yield GaugeMetricFamily(f"accelerant_{name}", text, value)
        states = GaugeMetricFamily("accelerant_jobs", "Jobs of the store, by state.", labels=["state"])
        for state, count in stats.jobs.items():
            states.add_metric([state], count)
        names = ["device", "worker"]
        up = GaugeMetricFamily("accelerant_worker_up", "1 while the worker process runs.", labels=names)
        restarts = CounterMetricFamily("accelerant_worker_restarts", "Starts after the first one.", labels=names)
        for worker in stats.workers:
            up.add_metric([worker.label, worker.device], int(worker.alive))
            restarts.add_metric([worker.label, worker.device], worker.restarts)
        lost = GaugeMetricFamily("accelerant_device_lost", "1 once a device is lost.", labels=["device"])
        for device in sorted({*self._history, *(worker.label for worker in stats.workers), *lost_devices()}):
            lost.add_metric([device], int(device in lost_devices()))
        yield from (states, up, restarts, lost)

    def ledger(self) -> dict[str, Any]:
        """Return what the workers computed, as `Ledger.to_dict()` has it."""
        return merged([*self._jobs.ledgers(), *(self._served.ledgers() if self._served else ())])

    def devices(self) -> list[dict[str, Any]]:
        """Return the latest sample of each device, and whether the device is lost."""
        lost = lost_devices()
        latest = [history[-1] for history in list(self._history.values())]
        return [{**item.to_dict(), "lost": item.device in lost} for item in latest]

    # --- the dashboard -----------------------------------------------------------------------------------------------
    async def events(self, key_id: str | None = None) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield names and data: "start" once, "state" each second, "job" (of the key) and "ledger" when they change."""
        jobs = await self._jobs.list(key_id, limit=50)
        history = {name: [item.to_dict() for item in items] for name, items in list(self._history.items())}
        known = {"version": __version__, "started": self._started, "buckets_s": BUCKETS_S, "history": history}
        yield "start", known | {"jobs": [asdict(job) for job in jobs]}
        changes = aiter(self._jobs.subscribe())
        upcoming = asyncio.ensure_future(anext(changes, None))
        try:
            shown: dict[str, Any] | None = None
            due, tick = time.monotonic(), 0
            end = due + self.stream_s
            while not self._ended and time.monotonic() < end:
                if time.monotonic() >= due:
                    yield "state", self._state()
                    if tick % _LEDGER_EVERY == 0 and (rows := self._ledger_rows()) != shown:
                        shown = rows
                        yield "ledger", rows
                    due, tick = time.monotonic() + 1.0, tick + 1
                done, _ = await asyncio.wait({upcoming}, timeout=max(0.0, due - time.monotonic()))
                if done:
                    if (change := upcoming.result()) is None:
                        return  # the service has stopped
                    upcoming = asyncio.ensure_future(anext(changes, None))
                    if key_id in (None, change["key_id"]):
                        yield "job", change
        finally:
            upcoming.cancel()
            with suppress(asyncio.CancelledError):
                await upcoming

    def _state(self) -> dict[str, Any]:
        stats = self._jobs.stats()
        return {
            "time_s": time.time(),
            "devices": self.devices(),
            "queue": {
                "queued": stats.queued, "running": stats.running, "bytes": stats.bytes,
                "jobs_limit": self._settings.queue_jobs, "bytes_limit": self._settings.queue_bytes,
            },
            "workers": [asdict(worker) for worker in stats.workers],
            "requests": self._latencies(),
            "fallbacks": sum(row["count"] for row in self.ledger()["fallbacks"]),
        }  # fmt: skip

    def _latencies(self) -> dict[str, dict[str, Any]]:
        """Return, for each operation, requests by bucket of latency, their sum in seconds, and those that failed."""
        found: dict[str, dict[str, Any]] = {}
        for series in self._requests.collect():
            for line in series.samples:
                empty = {"below": dict.fromkeys([*BUCKETS_S, math.inf], 0), "seconds": 0.0, "errors": 0}
                row = found.setdefault(line.labels["operation"], empty)
                if line.name.endswith("_bucket"):
                    row["below"][float(line.labels["le"])] += int(line.value)
                elif line.name.endswith("_sum"):
                    row["seconds"] += line.value
                elif line.name.endswith("_count") and int(line.labels["status"]) >= 400:
                    row["errors"] += int(line.value)
        for row in found.values():  # Prometheus' buckets are cumulative
            row["counts"] = [high - low for low, high in itertools.pairwise([0, *row.pop("below").values()])]
        return found

    def _ledger_rows(self) -> dict[str, Any]:
        exported = self.ledger()
        rows = [row for section in sections(exported) for row in section.rows]
        kept = [{name: row[name] for name in _LEDGER_COLUMNS} for row in rows[:_LEDGER_ROWS]]
        return {"rows": kept, "left_out": len(rows) - len(kept), "fallbacks": exported["fallbacks"]}


def _present(labels: Iterable[str]) -> list[ComputeDevice]:
    found = {}
    for label in labels:
        with suppress(BackendUnavailable):  # its worker says why it does not start
            device = registry.find_device(label)
            found[device.label] = device
    return list(found.values())


def lost_devices() -> set[str]:
    """Return the devices of which this process has seen the event "lost"."""
    return {device for device, kind in event_counts() if kind == "lost"}


# --- logs and spans --------------------------------------------------------------------------------------------------
class _Formatter(logging.Formatter):
    """One line a record: JSON, or text."""

    def __init__(self, style: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._json = style == "json"

    def format(self, entry: logging.LogRecord) -> str:
        if entry.exc_info and isinstance(error := entry.exc_info[1], Refused):  # uvicorn's, of an answer that had begun
            message = f"{entry.getMessage().strip()}: {error}"
            entry = logging.makeLogRecord({**vars(entry), "msg": message, "args": (), "exc_info": None})
        if not self._json:
            return super().format(entry).replace("\n", "\n  ")
        line: dict[str, Any] = {"time": round(entry.created, 6), "level": entry.levelname.lower()}
        line |= {"logger": entry.name, "message": entry.getMessage()}
        if entry.exc_info:
            line["exception"] = self.formatException(entry.exc_info)
        return json.dumps(line)


_quoted = json.encoder.encode_basestring_ascii
_LOGGED_TEXTS = ("request_id", "method", "path", "route", "operation", "backend", "key_id")


class RequestLog:
    """An observer that writes a line for each request, those of a twentieth of a second together."""

    def __init__(self, stream: Any, style: str) -> None:
        self._stream, self._json = stream, style == "json"
        self._lines: list[str] = []

    def __call__(self, record: RequestRecord) -> None:
        """Write a line soon."""
        if not self._lines:
            asyncio.get_running_loop().call_later(0.05, self.flush)
        if self._json:
            fields = [f'"{name}": {_quoted(getattr(record, name))}' for name in _LOGGED_TEXTS]  # json.dumps: 1 us each
            start = f'{{"time": {time.time():.6f}, "level": "info", "seconds": {record.seconds:.6f}, '
            numbers = f'"status": {record.status}, "bytes_in": {record.bytes_in}, "bytes_out": {record.bytes_out}'
            self._lines.append(f"{start}{', '.join(fields)}, {numbers}}}\n")
        else:
            now, path = time.strftime("%Y-%m-%d %H:%M:%S"), escaped(record.path)
            took = f"{record.seconds * 1e3:.1f} ms"
            self._lines.append(f"{now} {record.status} {record.method} {path} {took} {record.request_id}\n")

    def flush(self) -> None:
        """Write the lines now; what cannot be written, to a full disk or a closed pipe, is lost."""
        text = "".join(self._lines)
        self._lines.clear()  # first: lines that stayed would be collected for ever
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def log_to(stream: Any, style: str) -> RequestLog:
    """Write the logs of the service and of uvicorn to a stream; return the observer that logs requests there."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter(style))
    for name in ("accelerant.service", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    return RequestLog(stream, style)


_NO_SPAN = nullcontext()


def tracing() -> Callable[[RequestRecord, Iterable[tuple[bytes, bytes]]], AbstractContextManager[Any]]:
    """Return a maker of spans, or of nothing where OpenTelemetry is not installed and set up."""
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        return lambda record, headers: _NO_SPAN
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # no exporter has been set
        return lambda record, headers: _NO_SPAN
    tracer = trace.get_tracer("accelerant.service")

    def span(record: RequestRecord, headers: Iterable[tuple[bytes, bytes]]) -> AbstractContextManager[Any]:
        carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers}
        attributes = {"http.request.method": record.method, "url.path": record.path, "request_id": record.request_id}
        found: AbstractContextManager[Any] = tracer.start_as_current_span(
            f"{record.method} {record.path}", propagate.extract(carrier), trace.SpanKind.SERVER, attributes
        )
        return found

    return span
