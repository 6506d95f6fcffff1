"""The ledger: what ran where, how often, how fast, and what was refused or fell back, with the reason.

Counting costs a lock and an addition. One call in `SAMPLE_EVERY` is enclosed by two device events, which are read
later. Replays of a CUDA graph count by the manifest of its capture. An op with one implementation on each backend
records its launches by itself: `sole_record`, `RecordedLaunch`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Protocol

from accelerant.errors import OutOfMemory
from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.host import fork_safe
from accelerant.runtime.html_page import table, text_table
from accelerant.runtime.provider import ComputeProvider, Event, Pointer, lacks_host_memory

OpKey = tuple[str, str, str, str]  # op, implementation, device and case of a record

_KEY = ("op", "implementation", "device", "case")
_COUNTS = ("calls", "failures", "bytes", "flops")

SAMPLE_EVERY = 64  # one call in 64 is timed, and each of the first four, so that short runs have figures too
RARELY = 16 * SAMPLE_EVERY  # the same where timing costs more than the call: observed backward passes, small calls

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
    """Calls of one op by one implementation, `own` or a library's, in one case.

    `bytes_per_call` are the least. `first_ms`, of a call that may compile, is not among the samples. Of the `recording`
    calls left to torch's autograd `sampled` are observed; they had `passes` backward passes, counted in `backward`.
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
    first_ms: float | None = None
    first: Event | None = None
    seen: int = 0
    recording: int = 0
    sampled: int = 0
    passes: int = 0
    backward: OpRecord | None = None

    @property
    def key(self) -> OpKey:
        """Op, implementation, device and case."""
        return self.op, self.implementation, self.device, self.case

    def total_ms(self, calls: int, *, first: bool) -> float | None:
        """Return the time of so many calls by the mean of the samples; None if none was timed."""
        if not (samples := self.samples_ms or ([] if self.first_ms is None else [self.first_ms])):
            return None
        mean = sum(samples) / len(samples)
        return mean * calls + (self.first_ms - mean if first and self.first_ms is not None else 0.0)

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
            "ms_first": self.first_ms,
            "ms_total": self.total_ms(self.calls, first=True),
            "bytes": self.bytes_per_call * self.calls,
            "flops": self.flops_per_call * self.calls,
            "bytes_per_call": self.bytes_per_call,
            "flops_per_call": self.flops_per_call,
            "reason": self.reason,
            "refused": [{"implementation": name, "reason": reason} for name, reason in self.refused],
        }


@dataclass(frozen=True, slots=True)
class Decision:
    """The implementation that runs a case of an op, and the reason: "forced", race times, a table, the order.

    `not_tried` are implementations that were neither refused nor timed; `raced` has the timed ones with milliseconds.
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
    """The calls that a captured graph makes at each replay; the records' counts include the first `settled` replays."""

    name: str
    calls: Mapping[OpKey, int]
    replays: int = 0
    settled: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest for JSON."""
        ops = [{**dict(zip(_KEY, key, strict=True)), "calls": count} for key, count in self.calls.items()]
        return {"graph": self.name, "replays": self.replays, "ops": ops}


@dataclass(slots=True)
class _PhaseTotals:
    """Wall time and calls of a phase; `first` has the records whose first call ran in it."""

    seconds: float = 0.0
    calls: dict[OpKey, int] = field(default_factory=dict)
    first: set[OpKey] = field(default_factory=set)


def quantile(ordered: list[float], q: float) -> float | None:
    """Return a quantile of sorted samples by linear interpolation; None without samples."""
    if not ordered:
        return None
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class Ledger:
    """Counts of calls, fallbacks and graph replays; `accelerant.ledger()` returns the one that dispatch writes."""

    def __init__(self) -> None:
        self.lock = fork_safe(threading.Lock())
        self._records: dict[OpKey, OpRecord] = {}
        self._fallbacks: dict[FallbackRecord, int] = {}
        self._manifests: list[Manifest] = []
        self._pending: deque[tuple[OpRecord, Event, Event]] = deque()
        self._phases: dict[str, _PhaseTotals] = {}
        self._active: list[tuple[str]] = []  # compared by identity: threads may leave in another order
        self._since = 0.0

    def record(self, new: OpRecord) -> OpRecord:
        """Return the record with the same op, implementation, device and case; add this one if there is none.

        Beyond 512 cases of an op the others share a record, so that a program whose shapes never repeat stays small.
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
        return self.mark(record, provider, device, calls) if calls % SAMPLE_EVERY == 0 or calls <= 4 else None

    def mark(self, record: OpRecord, provider: ComputeProvider, device: int, number: int = 0) -> Event | None:
        """Record an event of a timed call, the first if `number` is 1; an error there is one of the call."""
        try:
            event = provider.record_event(device)
            if number == 1:
                record.first = event
            return event
        except BaseException as error:
            self.failed(record)
            lost = provider.lost(error) if isinstance(error, RuntimeError) else None
            if lost is None:
                raise
            raise lost from error

    def discount(self, record: OpRecord, recording: bool = False) -> None:
        """Take back a counted call, which is made in another way."""
        with self.lock:
            if record.calls:  # it may have been reset in between; no call from here on, see CpuFastPath
                record.calls -= 1
                record.recording -= recording

    def end(self, record: OpRecord, start: Event, provider: ComputeProvider, device: int) -> None:
        """Record the event after a timed call."""
        if (stop := self.mark(record, provider, device)) is None:
            return
        with self.lock:
            self._pending.append((record, start, stop))
            full = len(self._pending) >= _PENDING_LIMIT
        if full:
            self.collect()

    def observed(self, record: OpRecord) -> Callable[[], Callable[[float], None]]:
        """Return a function to call at the start of a backward pass through a call; its result takes the time in ms."""
        record.sampled += 1

        def begin() -> Callable[[float], None]:
            if record.backward is None:
                op = f"{record.op.removesuffix('_fwd')}_bwd"
                key = (op, record.implementation, record.backend, record.device, record.case)
                timed = "calls and times" if record.backend == "cpu" else "calls"
                reason = f"torch's autograd; {timed} from observed passes"
                record.backward = self.record(OpRecord(*key, own=False, reason=reason))
            record.passes += 1
            return end

        def end(ms: float) -> None:
            backward = record.backward
            if record.backend != "cpu":  # the host's clock says nothing of the device's time
                return
            if backward is not None and backward.first_ms is None:
                backward.first_ms = ms
            elif backward is not None:
                backward.samples_ms.append(ms)

        return begin

    def failed(self, record: OpRecord) -> None:
        """Count a call that raised, or was interrupted."""
        with self.lock:
            record.failures += 1

    def fallback(self, entry: FallbackRecord) -> bool:
        """Count a fallback; return True the first time."""
        with self.lock:
            self._fallbacks[entry] = self._fallbacks.get(entry, 0) + 1
            return self._fallbacks[entry] == 1

    def fallback_count(self) -> int:
        """Return the number of fallbacks."""
        with self.lock:
            return sum(self._fallbacks.values())

    def fallbacks(self) -> dict[FallbackRecord, int]:
        """Return every kind of fallback with its count."""
        with self.lock:
            return dict(self._fallbacks)

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
        """Count the replays and the backward passes of torch's autograd since the last time; under the lock."""
        for record in self._records.values():
            if record.backward is not None:
                passes = round(record.recording * record.passes / max(1, record.sampled))
                record.backward.calls = max(record.backward.calls, passes)
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
                    elapsed_ms = start.elapsed_ms(stop)
                    if start is record.first:
                        record.first, record.first_ms = None, elapsed_ms
                    else:
                        record.samples_ms.append(elapsed_ms)
                else:
                    self._pending.append((record, start, stop))
            while len(self._pending) > 4 * _PENDING_LIMIT:
                self._pending.popleft()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count wall time and calls of a block for a phase, except those of phases within it.

        Phases are the process's, not a thread's. The time is the host's.
        """
        entry = (name,)
        with self.lock:
            self._enter_phase()
            self._active.append(entry)
        try:
            yield
        finally:
            with self.lock:
                self._enter_phase()
                self._active = [other for other in self._active if other is not entry]

    def _enter_phase(self) -> None:
        """Give time and calls since the last time to the active phase; under the lock."""
        self._settle()
        now = time.perf_counter()
        phase = self._phases.setdefault(self._active[-1][0], _PhaseTotals()) if self._active else _PhaseTotals()
        phase.seconds += now - self._since
        self._since = now
        for key, record in self._records.items():
            if calls := record.calls - record.seen:
                if not record.seen:
                    phase.first.add(key)
                phase.calls[key] = phase.calls.get(key, 0) + calls
                record.seen = record.calls

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
            self._phases.clear()
            self._since = time.perf_counter()
            for record in self._records.values():
                record.calls = record.failures = record.seen = record.recording = record.sampled = record.passes = 0
                record.first = record.first_ms = None
                record.samples_ms.clear()
            for manifest in self._manifests:
                manifest.replays = manifest.settled = 0

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        ops = [record.to_dict() for record in self.records()]
        with self.lock:
            fallbacks = [{**asdict(entry), "count": count} for entry, count in self._fallbacks.items()]
            graphs = [manifest.to_dict() for manifest in self._manifests]
            self._enter_phase()
            phases = [self._phase_to_dict(name, phase) for name, phase in self._phases.items()]
        return {"ops": ops, "fallbacks": fallbacks, "graphs": graphs, "phases": phases}

    def _phase_to_dict(self, name: str, phase: _PhaseTotals) -> dict[str, Any]:
        ops = [
            {
                **dict(zip(_KEY, key, strict=True)),
                "calls": calls,
                "ms_total": self._records[key].total_ms(calls, first=key in phase.first),
            }
            for key, calls in phase.calls.items()
            if calls > 0
        ]
        return {"phase": name, "seconds": phase.seconds, "ops": ops}

    def to_json(self, indent: int | None = None) -> str:
        """Return everything as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_prometheus(self) -> str:
        """Return everything in Prometheus' text format 0.0.4; see prometheus_text."""
        return prometheus_text(self.to_dict())

    def __str__(self) -> str:
        exported = self.to_dict()
        rows: list[tuple[str, ...]] = []
        for section in sections(exported):
            if section.heading:
                rows.append((section.heading,))
            rows += section.cells()
        notes = [_FIRST_NOTE] if any(row_cells(row)[5].endswith("*") for row in exported["ops"]) else []
        notes += [
            f"fallback: {entry['op']}  {entry['case']}: {entry['ran']} instead of {entry['wanted']}, "
            f"{entry['count']:,} times: {entry['reason']}"
            for entry in exported["fallbacks"]
        ]
        return "\n".join([*text_table([_HEAD, *rows], numbers=_NUMBERS), *notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = []
        for section in sections(self.to_dict()):
            if section.heading:
                parts.append(f"<h4>{escape(section.heading)}</h4>")
            rows = ([("number" if i > 3 else "", row[i]) for i in range(len(row))] for row in section.cells())
            parts.append(table(_HEAD, rows, numbers=_NUMBERS))
        return "".join(parts) + f"<p>{_FIRST_NOTE}</p>"


def prometheus_text(exported: Mapping[str, Any]) -> str:
    """Return the result of `Ledger.to_dict()` in Prometheus' text format; reasons are labels of `_info` alone."""
    lines: list[str] = []

    def family(
        name: str, kind: str, text: str, rows: list[dict[str, Any]], value: Callable[[Any], object],
        labels: tuple[str, ...] = _LABELS,
    ) -> None:  # fmt: skip
        shown = [({label: row[label] for label in labels if label in row}, value(row)) for row in rows]
        lines.extend(metric_family(name, kind, text, shown))

    def median_s(row: dict[str, Any]) -> float | None:
        return None if row["ms_p50"] is None else row["ms_p50"] / 1e3

    ops, fallbacks = exported["ops"], exported["fallbacks"]
    family("accelerant_op_calls_total", "counter", "Calls begun.", ops, lambda row: row["calls"])
    family("accelerant_op_failures_total", "counter", "Calls that raised.", ops, lambda row: row["failures"])
    family("accelerant_op_bytes_total", "counter", "Least bytes moved.", ops, lambda row: row["bytes"])
    family("accelerant_op_flops_total", "counter", "Operations done.", ops, lambda row: row["flops"])
    family("accelerant_op_seconds", "gauge", "Median of the timed calls.", ops, median_s)
    with_reason = (*_LABELS, "reason")
    family("accelerant_op_info", "gauge", "Reason of the last choice.", ops, lambda row: 1, with_reason)
    series: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in fallbacks:  # one series for all reasons
        key = tuple(row.get(name) for name in _LABELS)
        total = series.setdefault(key, {**row, "count": 0})
        total["count"] += row["count"]
    totals = list(series.values())
    family("accelerant_fallbacks_total", "counter", "Fallbacks taken.", totals, lambda row: row["count"])
    family("accelerant_fallback_info", "gauge", "Reasons of fallbacks.", fallbacks, lambda row: 1, with_reason)
    family("accelerant_graph_replays_total", "counter", "Graphs run.", exported["graphs"], lambda row: row["replays"])
    return "\n".join(lines) + "\n"


def merged(exports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results of `Ledger.to_dict()` of several processes as one, without phases."""
    ops: dict[tuple[Any, ...], dict[str, Any]] = {}
    fallbacks: dict[tuple[Any, ...], dict[str, Any]] = {}
    graphs: dict[str, dict[str, Any]] = {}
    for exported in exports:
        for row in exported["graphs"]:
            replays = row["replays"] + graphs.get(row["graph"], {"replays": 0})["replays"]
            graphs[row["graph"]] = {**row, "replays": replays}
        for row in exported["ops"]:
            key = tuple(row[name] for name in _KEY)
            before = ops.get(key, {"calls": 0})
            counts = {name: row[name] + before.get(name, 0) for name in _COUNTS}
            ms = [part["ms_total"] for part in (row, before) if part.get("ms_total") is not None]
            most = row if row["calls"] >= before["calls"] else before
            ops[key] = {**most, **counts, "ms_total": sum(ms) if ms else None}
        for row in exported["fallbacks"]:
            key = tuple(value for name, value in row.items() if name != "count")
            fallbacks[key] = {**row, "count": row["count"] + fallbacks.get(key, {"count": 0})["count"]}
    return {
        "ops": list(ops.values()),
        "fallbacks": list(fallbacks.values()),
        "graphs": list(graphs.values()),
        "phases": [],
    }


_HEAD = ("op", "implementation", "device", "case", "calls", "ms", "total ms", "%")
_NUMBERS = ("calls", "ms", "total ms", "%")
_FIRST_NOTE = "ms: median; total ms: mean times calls; * the first call, which may compile"


@dataclass(frozen=True, slots=True)
class Section:
    """The ops of a phase or of the process, the costliest first; `rest` is the share of its time that no op has."""

    title: str
    seconds: float | None
    rows: list[dict[str, Any]]
    rest: float = 0.0

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows of a text, with one for the time that is not attributed."""
        rows = [row_cells(row) for row in self.rows]
        if self.seconds is not None:
            rows.append(("not attributed", "", "", "", "", "", *self.unattributed))
        return rows

    @property
    def heading(self) -> str:
        """The title, and the wall time if there is one."""
        return self.title if self.seconds is None else f"{self.title}: {_plain(self.seconds)} s"

    @property
    def unattributed(self) -> tuple[str, str]:
        """The time in ms that no op has, and its share, as texts."""
        return _plain(self.rest * (self.seconds or 0.0) * 1e3), f"{self.rest:.1%}"


def sections(exported: Mapping[str, Any]) -> list[Section]:
    """Return the result of `Ledger.to_dict()` by phase; what ran outside of phases is the last section."""
    known = {tuple(row.get(name) for name in _KEY): row for row in exported.get("ops", ())}
    outside = {key: (row["calls"], row.get("ms_total") or 0.0) for key, row in known.items()}
    found = []
    for phase in exported.get("phases", ()):
        rows = []
        for part in phase["ops"]:
            key = tuple(part[name] for name in _KEY)
            rows.append({**known.get(key, {}), **part})
            calls, ms = outside.get(key, (0, 0.0))
            outside[key] = calls - part["calls"], ms - (part["ms_total"] or 0.0)
        found.append(_section(phase["phase"], phase["seconds"], rows))
    left = [{**known[key], "calls": calls, "ms_total": ms} for key, (calls, ms) in outside.items() if calls > 0]
    if left or not found:
        found.append(_section("outside of phases" if found else "", None, left))
    return found


def _section(title: str, seconds: float | None, rows: list[dict[str, Any]]) -> Section:
    attributed = sum(row["ms_total"] or 0.0 for row in rows)
    whole = max(attributed, (seconds or 0.0) * 1e3)
    ordered = sorted(rows, key=lambda row: (row["ms_total"] or 0.0, row["calls"]), reverse=True)
    shares = [{**row, "share": (row["ms_total"] or 0.0) / whole if whole else 0.0} for row in ordered]
    return Section(title, seconds, shares, 1 - attributed / whole if seconds and whole else 0.0)


def row_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return op, implementation, device, case, calls, time of a call, total time and share as texts."""
    ms, total = row.get("ms_p50"), row.get("ms_total")
    first = "-" if row.get("ms_first") is None else f"{_plain(row['ms_first'])}*"
    names = tuple(str(row.get(name)) for name in _KEY)
    each, whole = first if ms is None else _plain(ms), _plain(total) if total else "-"
    return (*names, f"{row['calls']:,}", each, whole, f"{row.get('share', 0):.1%}")


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 1 else f"{value:.4f}"


_LABELS = ("op", "implementation", "backend", "device", "case", "wanted", "ran", "graph")
"""Labels that identify a series, as far as a row has them."""


def metric_family(name: str, kind: str, text: str, rows: Iterable[tuple[Mapping[str, object], object]]) -> list[str]:
    """Return the lines of a metric in Prometheus' text format; a row has labels and a value, None for none."""
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    return lines + [f"{name}{{{_label_text(labels)}}} {value}" for labels, value in rows if value is not None]


def _label_text(labels: Mapping[str, object]) -> str:
    def escaped(value: object) -> str:
        return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())


observers: list[Callable[[Decision], None]] = []
"""Functions called with each decision of dispatch and each recorded launch; empty except while `explain` runs."""

_ledger = Ledger()


def ledger() -> Ledger:
    """Return the process's ledger, which prints as a table; see also its to_json and to_prometheus."""
    return _ledger


_kernels: dict[tuple[str, str, str, int], Kernel] = {}  # compiled kernels, by program, entry point, backend and device


on_forget: list[Callable[[], object]] = []
"""Functions that clear caches of what holds compiled kernels, called when a backend's provider is replaced."""


class LaunchMemory(Protocol):
    """The memory of one device: its provider, the device's index, and the addresses of arrays in it."""

    backend: str
    index: int

    @property
    def provider(self) -> ComputeProvider:
        """Return the provider that computes there."""

    def pointer(self, words: Any, /) -> Pointer:
        """Return what a launch takes for an array."""


def sole_record(
    op: str, implementation: str, backend: str, device: str, case: str, *, size_bytes: int, operations: int = 0
) -> OpRecord:
    """Return the ledger's record of an op's only implementation on a backend; callers cache it."""
    key, reason = (op, implementation, backend, device, case), f"the only one on {backend}"
    return _ledger.record(OpRecord(*key, True, (), size_bytes, operations, reason=reason))


def count_call(record: OpRecord) -> None:
    """Count a call without a time, and notify `explain`; no event is recorded, so a graph may be captured meanwhile."""
    with _ledger.lock:
        record.calls += 1
    _notify(record)


def _notify(record: OpRecord) -> None:
    for observer in list(observers):
        names = (record.op, record.case, record.device, record.implementation)
        observer(Decision(*names, own=record.own, reason=record.reason))


class RecordedLaunch:
    """Counts a block as one call, times a sample, and notifies `explain`; an unusable device becomes DeviceLost."""

    __slots__ = ("_index", "_provider", "_record", "_start")

    def __init__(self, record: OpRecord, provider: ComputeProvider, index: int) -> None:
        self._record, self._provider, self._index = record, provider, index

    def __enter__(self) -> None:
        self._start = _ledger.begin(self._record, self._provider, self._index)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        record = self._record
        if error is not None:
            _ledger.failed(record)
            lost = self._provider.lost(error) if isinstance(error, Exception) else None
            if lost is not None:
                raise lost from error
            if lacks_host_memory(error):
                raise OutOfMemory(f"{record.op} ({record.case}): the host's memory is exhausted: {error}") from error
            return
        if self._start is not None:
            _ledger.end(record, self._start, self._provider, self._index)
        if observers:
            _notify(record)


def compiled(space: LaunchMemory, source: KernelSource, entry: str) -> Kernel:
    """Return the kernel of an entry point, compiled on first use; the name of a source determines its text."""
    key = (source.name, entry, space.backend, space.index)
    if (kernel := _kernels.get(key)) is None:
        kernel = _kernels[key] = space.provider.compile(source, entry=entry, device=space.index)
    return kernel


def forget(backend: str) -> None:
    """Forget the compiled kernels of a backend, whose provider is replaced by another."""
    for key in [key for key in _kernels if key[2] == backend]:
        del _kernels[key]
    for clear in on_forget:
        clear()


def launch(
    space: LaunchMemory, source: KernelSource, entry: str, blocks: int, threads: int, arrays: Sequence[Any],
    *scalars: int,
) -> None:  # fmt: skip
    """Launch an entry point of a program on arrays of the space, then scalars; on the CPU `blocks` counts indices."""
    kernel = compiled(space, source, entry)
    space.provider.launch(kernel, (blocks,), (threads,), (*map(space.pointer, arrays), *scalars))
