"""The ledger: what ran where, how often, how fast, and what was refused or fell back, with the reason.

Counting is always on and costs a lock and an addition. Time is sampled: one call in `SAMPLE_EVERY` is enclosed by two
device events, which are read later, on request or when enough of them wait; nothing waits for the device.

A CUDA graph runs its ops without Python, so nothing counts them. It has a manifest of the calls that were captured, and
each replay counts as those; see streams/graphs.py.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from accelerant.runtime.host import fork_safe
from accelerant.runtime.provider import ComputeProvider, Event

__all__ = ["Decision", "FallbackRecord", "Ledger", "Manifest", "OpKey", "OpRecord", "ledger", "observers", "quantile"]

OpKey = tuple[str, str, str, str]
"""Op, implementation, device and case of a record."""

SAMPLE_EVERY = 64
"""One call in 64 is timed, and each of the second to fourth, so that short runs have figures too."""

_SAMPLES_KEPT = 512
_PENDING_LIMIT = 128
_CASES_LIMIT = 512


@dataclass(frozen=True, slots=True)
class FallbackRecord:
    """One kind of fallback: op and case, the implementation or device that was wanted, the one that ran, and why."""

    op: str
    case: str
    wanted: str
    ran: str
    reason: str


@dataclass(slots=True)
class OpRecord:
    """Calls of one op by one implementation in one case.

    Attributes:
        own: whether the implementation is a kernel of Accelerant or of a library.
        refused: implementations that were preferred but refused, with the reason.
        bytes_per_call: least bytes moved: each input read once, each output written once.
        flops_per_call: floating-point or integer operations of the algorithm.
        calls, failures: number of calls begun, and of those that raised.
        reason: of the last choice of this implementation.
    """

    op: str
    implementation: str
    backend: str
    device: str
    case: str
    own: bool
    refused: tuple[tuple[str, str], ...] = ()
    bytes_per_call: int = 0
    flops_per_call: int = 0
    calls: int = 0
    failures: int = 0
    reason: str = ""
    samples_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES_KEPT))

    def to_dict(self) -> dict[str, Any]:
        """Return the record for JSON; quantiles are None until a call was timed."""
        samples = sorted(self.samples_ms)
        names = ("op", "implementation", "own", "backend", "device", "case", "calls", "failures")
        return {
            **{name: getattr(self, name) for name in names},
            "timed": len(samples),
            "ms_p20": quantile(samples, 0.2),
            "ms_p50": quantile(samples, 0.5),
            "ms_p80": quantile(samples, 0.8),
            "bytes": self.bytes_per_call * self.calls,
            "flops": self.flops_per_call * self.calls,
            "bytes_per_call": self.bytes_per_call,
            "flops_per_call": self.flops_per_call,
            "reason": self.reason,
            "refused": [{"implementation": name, "reason": reason} for name, reason in self.refused],
        }


@dataclass(frozen=True, slots=True)
class Decision:
    """The implementation that runs a case of an op, and the reason.

    Attributes:
        refused: implementations that were preferred but refused, or failed in the race, with the reason.
        not_tried: implementations that were neither refused nor timed.
        reason: of the choice: "forced", race times, a shipped table, the order of preference.
        raced: timed implementations and milliseconds per call, the chosen one among them; empty without a race.
    """

    op: str
    case: str
    device: str
    implementation: str
    own: bool
    refused: tuple[tuple[str, str], ...] = ()
    not_tried: tuple[str, ...] = ()
    reason: str = ""
    raced: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.op}  {self.case}  on {self.device}"]
        lines += [f"  refused  {name}: {reason}" for name, reason in self.refused]
        why = f": {self.reason}" if self.reason else ""
        lines.append(f"  chosen   {self.implementation}{' (own kernel)' if self.own else ' (library)'}{why}")
        lines += [f"  not tried  {name}" for name in self.not_tried]
        return "\n".join(lines)


@dataclass(slots=True)
class Manifest:
    """The ops that a captured graph runs at each replay, with their number of calls.

    The owner of the graph adds to `replays`; the records' counts include the first `settled` of them.
    """

    name: str
    calls: Mapping[OpKey, int]
    replays: int = 0
    settled: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest for JSON."""
        names = ("op", "implementation", "device", "case")
        ops = [{**dict(zip(names, key, strict=True)), "calls": count} for key, count in self.calls.items()]
        return {"graph": self.name, "replays": self.replays, "ops": ops}


def quantile(ordered: list[float], q: float) -> float | None:
    """Return a quantile of sorted samples by linear interpolation; None without samples."""
    if not ordered:
        return None
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class Ledger:
    """Counts of calls, fallbacks and graph replays; `accelerant.ledger()` returns the one that dispatch writes.

    Attributes:
        lock: held while a count changes.
    """

    def __init__(self) -> None:
        self.lock = fork_safe(threading.Lock())
        self._records: dict[OpKey, OpRecord] = {}
        self._fallbacks: dict[FallbackRecord, int] = {}
        self._manifests: list[Manifest] = []
        self._pending: deque[tuple[OpRecord, Event, Event]] = deque()

    def record(self, new: OpRecord) -> OpRecord:
        """Return the record with the same op, implementation, device and case; add this one if there is none.

        Beyond 512 cases of an op the others share a record, so that a program whose shapes never repeat does not grow
        without limit.
        """
        with self.lock:
            key = (new.op, new.implementation, new.device, new.case)
            if (known := self._records.get(key)) is not None:
                known.refused, known.reason = new.refused, new.reason
                return known
            if sum(1 for other in self._records if other[0] == new.op) >= _CASES_LIMIT:
                new.case, new.bytes_per_call, new.flops_per_call = "other", 0, 0
                return self._records.setdefault((new.op, new.implementation, new.device, "other"), new)
            self._records[key] = new
            return new

    def begin(self, record: OpRecord, provider: ComputeProvider, device: int) -> Event | None:
        """Count a call; return the event before it if it is to be timed."""
        with self.lock:
            calls = record.calls = record.calls + 1
        return self.mark(record, provider, device) if calls % SAMPLE_EVERY == 0 or 1 < calls <= 4 else None

    def mark(self, record: OpRecord, provider: ComputeProvider, device: int) -> Event | None:
        """Record an event of a timed call; an error there, of a lost device, is a failure of the call."""
        try:
            return provider.record_event(device)
        except BaseException as error:
            self.failed(record)
            lost = provider.lost(error) if isinstance(error, RuntimeError) else None
            if lost is None:
                raise
            raise lost from error

    def discount(self, record: OpRecord) -> None:
        """Take back a counted call, which is made in another way."""
        with self.lock:
            record.calls = max(0, record.calls - 1)  # it may have been reset in between

    def end(self, record: OpRecord, start: Event, provider: ComputeProvider, device: int) -> None:
        """Record the event after a timed call."""
        stop = self.mark(record, provider, device)
        if stop is None:
            return
        with self.lock:
            self._pending.append((record, start, stop))
            full = len(self._pending) >= _PENDING_LIMIT
        if full:
            self.collect()

    def failed(self, record: OpRecord) -> None:
        """Count a call that raised, or was interrupted."""
        with self.lock:
            record.failures += 1

    def fallback(self, entry: FallbackRecord) -> bool:
        """Count a fallback; return True the first time."""
        with self.lock:
            self._fallbacks[entry] = self._fallbacks.get(entry, 0) + 1
            return self._fallbacks[entry] == 1

    def captured(self, name: str, calls: Mapping[OpKey, int]) -> Manifest:
        """Take back calls that were counted while a graph was captured, since they did not run; return its manifest."""
        manifest = Manifest(name, dict(calls))
        with self.lock:
            self._add(manifest.calls, -1)
            self._manifests.append(manifest)
        return manifest

    def release(self, manifest: Manifest) -> None:
        """Forget a graph that is no longer replayed; its replays stay counted."""
        with self.lock:
            self._settle()
            self._manifests = [other for other in self._manifests if other is not manifest]

    def _settle(self) -> None:
        """Count the replays since the last time; under the lock."""
        for manifest in self._manifests:
            times = manifest.replays - manifest.settled
            manifest.settled += times
            self._add(manifest.calls, times)

    def _add(self, calls: Mapping[OpKey, int], times: int) -> None:
        for key, count in calls.items():
            record = self._records.get(key) or self._records.get((*key[:3], "other"))
            if record is not None:
                record.calls += count * times

    def collect(self) -> None:
        """Read the events that the device has passed."""
        with self.lock:
            for _ in range(len(self._pending)):
                record, start, stop = self._pending.popleft()
                if stop.done():
                    record.samples_ms.append(start.elapsed_ms(stop))
                else:
                    self._pending.append((record, start, stop))
            while len(self._pending) > 4 * _PENDING_LIMIT:
                self._pending.popleft()

    def records(self) -> list[OpRecord]:
        """Return every record, in order of first use."""
        self.collect()
        with self.lock:
            self._settle()
            return [record for record in self._records.values() if record.calls]

    def reset(self) -> None:
        """Forget counts, times and fallbacks."""
        with self.lock:
            self._pending.clear()
            self._fallbacks.clear()
            for record in self._records.values():
                record.calls = record.failures = 0
                record.samples_ms.clear()
            for manifest in self._manifests:
                manifest.replays = manifest.settled = 0

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        ops = [record.to_dict() for record in self.records()]
        with self.lock:
            fallbacks = [{**asdict(entry), "count": count} for entry, count in self._fallbacks.items()]
            graphs = [manifest.to_dict() for manifest in self._manifests]
        return {"ops": ops, "fallbacks": fallbacks, "graphs": graphs}

    def to_json(self, indent: int | None = None) -> str:
        """Return everything as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_prometheus(self) -> str:
        """Return everything in Prometheus' text format 0.0.4.

        Reasons are labels of `_info` metrics alone, of value 1, so that a counter's identity does not change with the
        text of a reason; join them on the labels that both have.
        """
        table = self.to_dict()
        lines: list[str] = []

        def family(
            name: str, kind: str, text: str, rows: list[dict[str, Any]], value: Callable[[Any], object],
            labels: tuple[str, ...] = _LABELS,
        ) -> None:  # fmt: skip
            lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
            for row in rows:
                if (amount := value(row)) is not None:
                    lines.append(f"{name}{{{_label_text(row, labels)}}} {amount}")

        def median_s(row: dict[str, Any]) -> float | None:
            return None if row["ms_p50"] is None else row["ms_p50"] / 1e3

        ops, fallbacks = table["ops"], table["fallbacks"]
        family("accelerant_op_calls_total", "counter", "Calls begun.", ops, lambda row: row["calls"])
        family("accelerant_op_failures_total", "counter", "Calls that raised.", ops, lambda row: row["failures"])
        family("accelerant_op_bytes_total", "counter", "Least bytes moved.", ops, lambda row: row["bytes"])
        family("accelerant_op_flops_total", "counter", "Operations done.", ops, lambda row: row["flops"])
        family("accelerant_op_seconds", "gauge", "Median of the timed calls.", ops, median_s)
        with_reason = (*_LABELS, "reason")
        family("accelerant_op_info", "gauge", "Reason of the last choice.", ops, lambda row: 1, with_reason)
        series: dict[str, dict[str, Any]] = {}
        for row in fallbacks:  # one series for all reasons
            total = series.setdefault(_label_text(row, _LABELS), {**row, "count": 0})
            total["count"] += row["count"]
        totals = list(series.values())
        family("accelerant_fallbacks_total", "counter", "Fallbacks taken.", totals, lambda row: row["count"])
        family("accelerant_fallback_info", "gauge", "Reasons of fallbacks.", fallbacks, lambda row: 1, with_reason)
        family("accelerant_graph_replays_total", "counter", "Graphs run.", table["graphs"], lambda row: row["replays"])
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        rows = [("op", "implementation", "device", "case", "calls", "ms (median)")]
        for row in self.to_dict()["ops"]:
            median = "-" if row["ms_p50"] is None else f"{row['ms_p50']:.4g}"
            rows.append((row["op"], row["implementation"], row["device"], row["case"], str(row["calls"]), median))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


_LABELS = ("op", "implementation", "backend", "device", "case", "wanted", "ran", "graph")
"""Labels that identify a series, as far as a row has them."""


def _label_text(row: dict[str, Any], labels: tuple[str, ...]) -> str:
    def escaped(value: object) -> str:
        return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return ",".join(f'{name}="{escaped(row[name])}"' for name in labels if name in row)


observers: list[Callable[[Decision], None]] = []
"""Functions called with each decision of dispatch and each recorded launch; empty except while `explain` runs."""

_ledger = Ledger()


def ledger() -> Ledger:
    """Return the process's ledger.

    >>> print(accelerant.ledger())                       # a table
    >>> accelerant.ledger().to_json()                    # the same for programs
    >>> accelerant.ledger().to_prometheus()              # the same for a scraper
    """
    return _ledger
