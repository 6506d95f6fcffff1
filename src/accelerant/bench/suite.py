"""Benchmark suites: the protocol, their options, and how a run measures their cases.

A suite is a frozen dataclass whose fields are its options; `cli/bench.py` derives the command line from them. Its cases
append rows to the record of a `SuiteRun`. Comparisons with other libraries are in the repository's benchmarks/.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import torch

from accelerant.bench.record import OURS, BenchmarkRecord, Environment, Journal, Row, failure_note
from accelerant.bench.timer import measure_copy, measure_link, measure_matmul, threads_text
from accelerant.config import DTYPE_NAMES, flag_of
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime import registry
from accelerant.runtime.provider import ComputeDevice

Progress = Callable[[str], None]

_CEILINGS: dict[str, tuple[str, Callable[..., dict[str, float]]]] = {
    "copy": ("copy GB/s", measure_copy),
    "matmul": ("matmul TFLOP/s", measure_matmul),
    "link": ("host to device GB/s", measure_link),
}


# --- the protocol ----------------------------------------------------------------------------------------------------
def option(
    default: Any, help: str, *, metavar: str | None = None, min: float | None = None, max: float | None = None,
    same: bool = False,
) -> Any:  # fmt: skip
    """Declare an option of a suite as the default of its field; `same`: a resumed run must have its value."""
    declared = {"help": help, "metavar": metavar, "min": min, "max": max}
    return field(default=default, metadata={"option": declared, "same": same})


@dataclass(frozen=True, slots=True)
class SuiteCase:
    """One unit of a suite: rows that are measured together because they are compared; `key` is unique within the suite.

    `measure` appends rows to `run.record` as they are measured, in about `estimate_s` seconds on a large GPU. `on_cpu`,
    if the case has a CPU column, returns milliseconds and a note for rows of ours, by op and case.
    """

    key: str
    measure: Callable[[SuiteRun], None]
    estimate_s: float | None = None
    on_cpu: Callable[[SuiteRun], CpuColumn] | None = None


CpuColumn = Mapping[tuple[str, str], tuple[float, str]]


def same_on_cpu(measure: Callable[[SuiteRun], None]) -> Callable[[SuiteRun], CpuColumn]:
    """Return the `on_cpu` of a case that runs unchanged on the CPU: the times of its rows of the same names."""

    def column(run: SuiteRun) -> CpuColumn:
        measure(run)
        units = {"ms": 1.0, "us": 1e-3}
        ours = [row for row in run.record.rows if row.runner == OURS and row.unit in units]
        return {(row.op, row.case): (row.p50 * units[row.unit], threads_text()) for row in ours if row.p50}

    return column


@dataclass(frozen=True, kw_only=True)
class Suite(ABC):
    """A benchmark suite, whose rows have its `name`. Subclasses are frozen dataclasses; their docstring is the help."""

    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]] = ()

    cpu: bool = option(False, "Add a CPU column where the device is another.")

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with the device's defaults filled in; raise ConfigError for an invalid option."""
        return self

    def prepare(self, run: SuiteRun) -> None:  # noqa: B027 - most suites need nothing
        """Measure what all cases need, such as ceilings."""

    @abstractmethod
    def cases(self, run: SuiteRun) -> Sequence[SuiteCase]:
        """Return the cases in the order of measurement, without touching the device."""

    def covers(self, row: Row) -> bool:
        """Return whether these options measure a baseline's row."""
        return row.suite == self.name

    def measure(self, run: SuiteRun) -> None:
        """Measure all cases; see measure_cases for the errors."""
        self.prepare(run)
        measure_cases(self.name, self.cases(run), run, cpu=self.cpu and run.gpu)

    def resumable(self) -> dict[str, str]:
        """Return the options that a resumed run must share, by their flag."""
        found = {}
        for one in fields(self):
            if one.metadata.get("same"):
                value = getattr(self, one.name)
                text = ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
                text = "default" if value is None else f"{value:g}" if isinstance(value, float) else text
                found[flag_of(one.name)] = text
        return found


def check_names(flag: str, kind: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raise ConfigError for the first name of a kind ("peer", "op") that is not among the known ones."""
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag}: no {kind} {name!r}; there are {', '.join(known)}")


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtypes_named(names: Iterable[str], flag: str = "--dtype") -> dict[str, torch.dtype]:
    """Return dtypes by their whole names; short ones, as bf16, are understood. ConfigError for others."""
    whole = [DTYPE_NAMES.get(name, name) for name in names]
    check_names(flag, "dtype", whole, tuple(_DTYPES))
    return {name: _DTYPES[name] for name in whole}


# --- a run -----------------------------------------------------------------------------------------------------------
class Clock:
    """Seconds by activity; a nested activity counts as itself only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._nested: list[float] = []

    @contextlib.contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Count the block's seconds, without those of nested activities."""
        began = time.perf_counter()
        self._nested.append(0.0)
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.seconds[activity] = self.seconds.get(activity, 0.0) + took - self._nested.pop()
            if self._nested:
                self._nested[-1] += took


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """A run of suites on a device; no case is begun after `until` (time.monotonic()).

    `progress` is called with a line about what is measured next, `clock` counts the current case's time, and
    `accelerator` returns an Accelerator on the device, which this layer cannot import.
    """

    device: ComputeDevice
    record: BenchmarkRecord
    journal: Journal | None = None
    until: float | None = None
    progress: Progress = field(default=lambda _: None)
    clock: Clock = field(default_factory=Clock)
    accelerator: Callable[[], Any] | None = None

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""
        return torch.device(self.device.torch_device)

    @property
    def gpu(self) -> bool:
        """True if torch's device is of type cuda."""
        return self.device.torch_device.startswith("cuda")

    def is_model(self, name: str) -> bool:
        """Return whether the device is a GPU of a model, such as "H200", for which targets are set."""
        return self.gpu and name in self.device.name

    def add(self, *rows: Row) -> None:
        """Append rows to the record."""
        self.record.rows.extend(rows)

    def require_ceiling(self, kind: str, budget_s: float = 0.3) -> None:
        """Measure a ceiling ("copy", "matmul" or "link") unless the record has it."""
        name, measure = _CEILINGS[kind]
        if name not in self.record.ceilings:
            self.progress(f"ceiling: {kind}")
            self.record.ceilings |= measure(self.torch_device, budget_s=budget_s)

    def left(self, cases: Iterable[SuiteCase]) -> list[SuiteCase]:
        """Return the cases that the journal lacks, each key once."""
        unique = {case.key: case for case in cases}.values()
        return [case for case in unique if self.journal is None or case.key not in self.journal.done]


class CaseFailedError(AccelerantError):
    """A case failed and its rows say why; no further row is added."""


_FAILED = "failed"  # `Row.case` of the row that records a case's exception


def measure_cases(suite: str, cases: Sequence[SuiteCase], run: SuiteRun, *, cpu: bool = False) -> None:
    """Measure cases in order, then raise the first error of a case, which may be one that the journal recorded.

    A case that raises leaves its rows so far and one that names the error; the next case goes on. After DeviceLost the
    others are left to a resumed run. `cpu` adds the CPU column to the cases that have one.
    """
    failed: Exception | None = None if run.journal is None else _recorded_failure(run.record.rows)
    if run.journal is not None:
        run.journal.begin(run.record)
    without_column: list[str] = []
    left, began, spent, measured = run.left(cases), time.monotonic(), dict[str, float](), 0
    for i, case in enumerate(left):
        if run.until is not None and time.monotonic() > run.until:
            _note_missing(run.record, "its time limit", left[i:], len(cases))
            break
        rows, notes = len(run.record.rows), len(run.record.notes)
        here = replace(run, clock=Clock(), progress=_counted(run.progress, i, left, began))
        error: Exception | None = None
        try:
            with here.clock.measure("the rest"):
                case.measure(here)
                if cpu and case.on_cpu is not None:
                    with here.clock.measure("the CPU column"):
                        _add_cpu_column(case.on_cpu, case.key, here, rows)
                elif cpu and not any(row.cpu_ms or row.cpu_note for row in run.record.rows[rows:]):
                    without_column.append(case.key)
        except KeyboardInterrupt:
            _note_missing(run.record, "an interruption", left[i:], len(cases))
            raise
        except Exception as raised:  # noqa: BLE001 - the other cases are still worth measuring
            failed, error = failed or raised, raised
            if not isinstance(raised, CaseFailedError):
                run.add(Row(suite, case.key, _FAILED, OURS, "", note=failure_note(raised)))
        measured += 1
        for activity, seconds in here.clock.seconds.items():
            spent[activity] = spent.get(activity, 0.0) + seconds
        if run.journal is not None:
            run.journal.add(case.key, run.record.rows[rows:], run.record.notes[notes:], here.clock.seconds)
        lost = None if error is None else registry.provider_of(run.torch_device).lost(error)
        if lost is not None:
            if left[i + 1 :]:
                _note_missing(run.record, "the loss of the device", left[i + 1 :], len(cases))
            raise lost from error
    if without_column:
        run.record.notes.append(f"no CPU column: {'; '.join(without_column)}")
    if len(spent) > 1:
        parts = [f"{s:.1f} s {activity}" for activity, s in sorted(spent.items(), key=lambda pair: -pair[1])]
        run.record.notes.append(f"{measured} cases took {sum(spent.values()):.1f} s: {', '.join(parts)}")
    if failed is not None:
        raise failed


def _add_cpu_column(on_cpu: Callable[[SuiteRun], CpuColumn], key: str, run: SuiteRun, first: int) -> None:
    """Add the CPU's times to our rows from `first` on; a failure there is a note and keeps what the device measured."""
    run.progress(f"{key}: on the CPU")
    device, found, failed = registry.find_device("cpu"), dict[tuple[str, str], tuple[float, str]](), ""
    try:
        found = dict(on_cpu(SuiteRun(device, BenchmarkRecord(Environment.of(device)), progress=run.progress)))
    except Exception as error:  # noqa: BLE001 - the column is an addition to rows that are measured
        failed = failure_note(error)
    for i, row in enumerate(run.record.rows[first:], first):
        if row.runner == OURS and row.p50 is not None and row.cpu_ms is None:
            taken, note = found.get((row.op, row.case), (None, failed))
            run.record.rows[i] = replace(row, cpu_ms=taken, cpu_note=note)


_NAMED = 12  # cases that a note about an incomplete run names


def _note_missing(record: BenchmarkRecord, reason: str, missing: Sequence[SuiteCase], total: int) -> None:
    names = "; ".join(case.key for case in missing[:_NAMED])
    more = f"; and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    record.notes.append(f"stopped by {reason}; {len(missing)} of {total} cases not measured: {names}{more}")


def _recorded_failure(rows: Sequence[Row]) -> AccelerantError | None:
    for row in rows:
        if row.case == _FAILED and row.p50 is None:
            return AccelerantError(f"{row.op}: {row.note}")
        if row.wrong and row.compared:
            return AccelerantError(f"{row.op} {row.case}: {row.note}")
    return None


def _counted(progress: Progress, i: int, left: Sequence[SuiteCase], began: float) -> Progress:
    """Return a progress function that says which case this is and, where estimates exist, how long the rest takes."""
    estimates = [case.estimate_s for case in left if case.estimate_s is not None]
    if len(estimates) < len(left):
        return lambda text: progress(f"[{i + 1}/{len(left)}] {text}")
    expected = sum(estimates[:i])
    pace = (time.monotonic() - began) / expected if expected > 5.0 else 1.0
    return lambda text: progress(f"[{i + 1}/{len(left)}, about {pace * sum(estimates[i:]):.0f} s left] {text}")


def run_suite(suite: Suite, device: ComputeDevice, *, progress: Progress = lambda _: None) -> BenchmarkRecord:
    """Resolve and measure a suite into a record of its own."""
    run = SuiteRun(device, BenchmarkRecord(Environment.of(device)), progress=progress)
    suite.resolve(device).measure(run)
    run.record.conclude()
    return run.record


@dataclass(slots=True)
class Collected:
    """The errors of the suites that failed, by name, and whether Ctrl-C ended the run."""

    failures: dict[str, Exception] = field(default_factory=dict)
    interrupted: bool = False


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM, as of a time limit around the command, into KeyboardInterrupt; in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def collect(suites: Sequence[Suite], run: SuiteRun, *, begin: Progress = lambda _: None) -> Collected:
    """Measure suites into one record and conclude it; a failure, Ctrl-C or SIGTERM keeps the rows measured so far."""
    record, found = run.record, Collected()
    for i, suite in enumerate(suites):
        begin(f"[{i + 1}/{len(suites)}] {suite.name}")
        try:
            with _terminable():
                suite.measure(run)
        except KeyboardInterrupt:
            found.interrupted = True
            incomplete = ", ".join(other.name for other in suites[i:])
            record.notes.append(f"interrupted: these suites are not complete: {incomplete}")
            break
        except Exception as error:  # noqa: BLE001 - the other suites are still worth measuring
            found.failures[suite.name] = error
            note = failure_note(error)
            if not any(row.suite == suite.name and row.case == _FAILED for row in record.rows):
                run.add(Row(suite.name, f"{suite.name} suite", "after the rows above", OURS, "", note=note))
            record.notes.append(f"the {suite.name} suite failed: {note}")
    record.conclude()
    return found
