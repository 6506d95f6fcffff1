"""Measurements of a training: a record a step with its device time, the metrics file, profiles, the history of a run.

Losses on a GPU are read back for many steps together: reading each at its step would make the host wait for the
device.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from accelerant.errors import FormatError
from accelerant.nn.train.objective import Evaluation
from accelerant.runtime.files import decode_json, open_regular, read_regular, typed, write_atomic
from accelerant.runtime.host import read_meminfo
from accelerant.runtime.html_page import table
from accelerant.runtime.memory.limits import size_text


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of metrics.jsonl.

    Attributes:
        step: 1 for the first.
        loss: training loss of the step's batch before its update; for text in nats per token.
        tokens_per_s: tokens of the step over its time; None if the data are not tokens.
        ms: device time of the step (on the CPU: wall time).
        peak_memory_bytes: maximum so far: allocated on a GPU, resident on the CPU.
        learning_rate: of the step.
        grad_norm: before clipping.
        validation_loss: after the step, if it was evaluated.
        samples_per_s: rows of the step over its time, if the data are not tokens.
        validation: metrics measured with the validation loss, by name.
        loss_scale: factor of the loss in float16.
        skipped: True if a gradient overflowed, so that the step changed nothing; its grad_norm is 0.
    """

    step: int
    loss: float
    tokens_per_s: float | None
    ms: float
    peak_memory_bytes: int
    learning_rate: float
    grad_norm: float
    validation_loss: float | None = None
    samples_per_s: float | None = None
    validation: Mapping[str, float] | None = None
    loss_scale: float | None = None
    skipped: bool | None = None

    def to_json(self) -> str:
        """Return one line with all values but None."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({name: value for name, value in values.items() if value is not None})

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """Read the result of `to_json`; raise ValueError if the line is no record."""
        values = typed(dict[str, Any], decode_json(line))
        record: StepRecord = typed(cls, {"tokens_per_s": None, **values})
        return record


class MetricsFile:
    """Appends to metrics.jsonl, cut to `keep_steps` first; `records` are all, `lost` counts steps without a line."""

    def __init__(self, path: Path | None, *, keep_steps: int = 0) -> None:
        self._path = path
        self.records: list[StepRecord] = []
        if path is not None:
            if keep_steps and path.exists():
                self.records = [record for record in read_metrics(path) if record.step <= keep_steps]
            write_atomic(path, "".join(record.to_json() + "\n" for record in self.records).encode())
        self.lost = 0 if path is None else keep_steps - len(self.records)

    def append(self, records: Sequence[StepRecord]) -> None:
        """Append records to the file and to `records`."""
        self.records += records
        if self._path is not None:
            try:
                with open(open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
                    file.write("".join(record.to_json() + "\n" for record in records).encode())
            except OSError as error:  # of a write it names no file
                raise OSError(error.errno, error.strerror, str(self._path)) from None


def read_metrics(path: Path) -> list[StepRecord]:
    """Read the records of a metrics.jsonl, but no last line cut off by a crash; raise FormatError if one is invalid."""
    try:
        lines = read_regular(path, 1 << 30).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"cannot read {path}: {error}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(StepRecord.from_json(line))
        except ValueError:
            if number == len(lines):
                break
            raise FormatError(f"{path}, line {number}: not a step's record") from None
    return records


class StepTimer:
    """Measures times between marks: with events on a GPU, without waiting for it; with the clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last: Any = self._now()

    def mark(self) -> None:
        """Start a span."""
        self._last = self._now()

    def lap(self) -> Callable[[], float]:
        """End a span and start the next; return a function that waits for the device and returns its milliseconds."""
        start, end = self._last, self._now()
        self._last = end

        def ms() -> float:
            if isinstance(start, float):
                return float(end - start) * 1e3
            end.synchronize()
            return float(start.elapsed_time(end))

        return ms

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose results are still on the device."""

    step: int
    loss: Tensor
    grad_norm: Tensor
    learning_rate: float
    ms: Callable[[], float]
    loss_scale: Tensor | None = None


def reserved_memory_bytes(device: torch.device) -> int:
    """Return the maximum size of torch's memory pool on a GPU; 0 on the CPU."""
    return int(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else 0


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: torch's allocations on a GPU, the process's resident set on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if (size := _process_status("VmHWM")) is not None:  # getrusage's value includes the parent's before exec
        return size
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def used_memory_bytes(device: torch.device) -> int:
    """Return the memory in use now, of the kind that `peak_memory_bytes` counts; where it is unknown, the peak."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    size = _process_status("VmRSS")
    return peak_memory_bytes(device) if size is None else size


def _process_status(name: str) -> int | None:
    """Return a size in bytes from Linux's /proc/self/status; None elsewhere, and for another format."""
    try:
        return read_meminfo(Path("/proc/self/status")).get(name)
    except (OSError, ValueError):
        return None


# --- profiling -------------------------------------------------------------------------------------------------------

_WARM_UP = 6  # unprofiled steps: kernels compile in the first, and a CUDA graph is captured in the fourth
_NAME_WIDTH = 90


@dataclass(frozen=True, slots=True)
class ProfiledKernel:
    """One kernel, or operator on the CPU: its mean calls and time per step, and its share of the total time."""

    name: str
    calls: float
    ms: float
    share: float


class StepProfiler:
    """Profiles steps, of a short run the last, into trace.json (for Chrome), kernels.txt and kernels.json."""

    def __init__(self, folder: Path, steps: int, run: range, device: torch.device) -> None:
        self._folder = folder
        self._steps = steps
        self._begin = max(run.start, min(run.start + _WARM_UP, run.stop - steps))
        self._device = device
        self._last = run.start
        self._profile: Any = None
        self.table: list[ProfiledKernel] = []

    def before(self, step: int) -> None:
        """Start or stop the profile at the beginning of a step."""
        if step == self._begin + self._steps:
            self.finish()
        self._last = step
        if step == self._begin:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
                torch.cuda.synchronize(self._device)
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()

    def finish(self) -> None:
        """Stop the profile, if it is running, and write the files."""
        if self._profile is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profile, self._profile = self._profile, None
        profile.stop()
        write_atomic(self._folder / "trace.json", lambda path: profile.export_chrome_trace(str(path)))
        self.table = _by_kernel(profile, self._device.type == "cuda", self._last + 1 - self._begin)
        write_atomic(self._folder / "kernels.txt", kernel_table(self.table).encode())
        rows = [asdict(row) for row in self.table]
        write_atomic(self._folder / "kernels.json", (json.dumps(rows, indent=1) + "\n").encode())


def _by_kernel(profile: Any, cuda: bool, steps: int) -> list[ProfiledKernel]:
    times: dict[str, list[float]] = {}
    for event in profile.events():
        on_device = event.device_type.name == "CUDA"
        if cuda != on_device or getattr(event, "is_user_annotation", False):
            continue
        us = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        times.setdefault(event.name, []).append(us)
    total = sum(map(sum, times.values())) or 1.0
    rows = [ProfiledKernel(name, len(us) / steps, sum(us) / steps / 1e3, sum(us) / total) for name, us in times.items()]
    return sorted(rows, key=lambda row: -row.ms)


def kernel_table(rows: list[ProfiledKernel], limit: int = 40) -> str:
    """Return the rows as text, in their order; those after the limit as one."""
    lines = [f"{'ms a step':>10} {'share':>7} {'calls':>8}  kernel"]
    shown, rest = rows[:limit], rows[limit:]
    lines += [f"{row.ms:10.3f} {row.share:7.1%} {row.calls:8.1f}  {row.name[:_NAME_WIDTH]}" for row in shown]
    if rest:
        ms, share, calls = (sum(getattr(row, name) for row in rest) for name in ("ms", "share", "calls"))
        lines.append(f"{ms:10.3f} {share:7.1%} {calls:8.1f}  {len(rest)} others")
    total = sum(row.ms for row in rows)
    return "\n".join([*lines, f"{total:10.3f} {1:7.0%} {'':8}  in all"]) + "\n"


# --- the history of a run --------------------------------------------------------------------------------------------

_RISE, _LEAST_RISE = 0.03, 0.01  # of the best held-out loss: evaluations read different shares of the data
Status = Literal["done", "stopped", "interrupted"]


@dataclass(slots=True)
class History:
    """The course and the result of a training.

    Attributes:
        total_steps: planned number of steps.
        records: one per step; with a folder also those before a resumption.
        evaluations: on held-out data, in order.
        steps: number of completed steps.
        status: "done"; "stopped" early; "interrupted" by a signal.
        reason: why it was stopped.
        signal: number of the signal that interrupted it, or None.
        seconds: duration, with the parts before a resumption.
        predicted_peak_bytes: predicted peak memory of a step; None without a prediction.
        expected_peak_bytes: the same and what was in use before, so comparable to `peak_memory_bytes`.
        peak_memory_bytes: measured peak: allocated on a GPU; resident, of the whole process, on the CPU.
        reserved_memory_bytes: maximum size of torch's memory pool; 0 on the CPU.
        resumed_from: the step of the checkpoint that this process started from; 0 for none.
        notes: remarks for the user.
    """

    total_steps: int = 0
    records: list[StepRecord] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    steps: int = 0
    status: Status = "done"
    reason: str = ""
    signal: int | None = None
    seconds: float = 0.0
    predicted_peak_bytes: int | None = None
    expected_peak_bytes: int | None = None
    peak_memory_bytes: int = 0
    reserved_memory_bytes: int = 0
    resumed_from: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The training loss of each step."""
        return [record.loss for record in self.records]

    @property
    def loss_scale(self) -> str:
        """The last factor of the loss in float16 and the number of skipped steps, as text; empty without one."""
        value = self.records[-1].loss_scale if self.records else None
        if value is None:
            return ""
        skipped = sum(record.skipped is True for record in self.records)
        return f"{value:{',.0f' if value >= 1 else 'g'}}, {skipped:,} steps skipped"

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the lowest loss, the earliest of several; None if there is none or all are NaN."""
        comparable = [evaluation for evaluation in self.evaluations if not math.isnan(evaluation.loss)]
        return min(comparable, key=lambda evaluation: evaluation.loss, default=None)

    @property
    def rising(self) -> str:
        """Sentence that says that the held-out loss rises since its best evaluation, and what to do; else empty."""
        best, last = self.best, self.evaluations[-1] if self.evaluations else None
        if best is None or last is None or not last.loss > best.loss + max(_RISE * abs(best.loss), _LEAST_RISE):
            return ""
        return (
            f"the held-out loss rises: {best.loss:.3f} after step {best.step:,}, {last.loss:.3f} after step "
            f"{last.step:,}. The model learns its training data by heart: train on more data, a smaller model, or for "
            f"about {max(1, best.step):,} steps"
        )

    @property
    def metrics(self) -> Mapping[str, float]:
        """The loss and the metrics of the last evaluation; empty without one."""
        return {"loss": self.evaluations[-1].loss, **self.evaluations[-1].metrics} if self.evaluations else {}

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, without the records."""
        values = asdict(self)
        del values["records"]
        return {**values, "best": None if self.best is None else asdict(self.best)}

    def __str__(self) -> str:
        return "\n".join([self._outcome(), *(f"{name:<15}{text}" for name, text in self._rows())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = ([("", cell) for cell in row] for row in self._rows())
        return f"<p>{escape(self._outcome())}</p>{table((), rows)}"

    def _outcome(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.status}{why}: {self.steps:,} of {self.total_steps:,} steps in {self.seconds:.1f} s"

    def _rows(self) -> list[tuple[str, str]]:
        rows = []
        if self.records:
            rows.append(("training loss", f"{self.records[0].loss:.4f} -> {self.records[-1].loss:.4f}"))
        if self.loss_scale:
            rows.append(("loss scale", self.loss_scale))
        if self.best is not None:
            parts = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
            rows.append(("held out", f"{parts}; best loss {self.best.loss:.4f} at step {self.best.step:,}"))
        if self.rising:
            rows.append(("", self.rising))
        predicted = "not predicted"
        if self.predicted_peak_bytes is not None and self.expected_peak_bytes is not None:
            sizes = size_text(self.expected_peak_bytes), size_text(self.predicted_peak_bytes)
            predicted = "{} predicted ({} for a step)".format(*sizes)
        return [*rows, ("peak memory", f"{size_text(self.peak_memory_bytes)}, {predicted}")]
