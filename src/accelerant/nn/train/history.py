"""The measurements of a training and what it leaves: records of steps, metrics file, profiles, report, folder.

Losses on a GPU are read back for many steps together, since reading each at its step would make the host wait for the
device. One run at a time writes to a folder: the kernel holds its lock (flock) and releases it with the process; where
fcntl is missing, the lock is a file that names its process, and that of a dead process is replaced.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from accelerant.errors import ConfigError, FormatError, MissingFile
from accelerant.nn.train.checkpoint import Checkpoints
from accelerant.nn.train.objective import Evaluation
from accelerant.runtime.files import decode_json, open_regular, read_regular, reason_of, typed, write_atomic
from accelerant.runtime.host import read_meminfo
from accelerant.runtime.html_page import Line, Reference, line_chart, render, short_number, smoothed, table
from accelerant.runtime.ledger import Section, row_cells, sections
from accelerant.runtime.memory.limits import size_text

if TYPE_CHECKING:
    from accelerant.nn.train.callbacks import ReportChart


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of metrics.jsonl; its step counts from 1, the loss is that of the step's batch before its update.

    A loss of text is in nats per token. `ms` is device time (on the CPU: wall time), `peak_memory_bytes` the maximum so
    far (allocated on a GPU, resident on the CPU), `grad_norm` before clipping. `tokens_per_s` or, for other data,
    `samples_per_s` is set; `validation_loss` and the metrics in `validation` where the step was evaluated. In float16
    `loss_scale` is the factor of the loss; `skipped` says that a gradient overflowed and nothing changed.
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
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """Read the result of `to_json`; raise ValueError if the line is no record."""
        record: StepRecord = typed(cls, {"tokens_per_s": None, **typed(dict[str, Any], decode_json(line))})
        return record


class MetricsFile:
    """Appends records to metrics.jsonl, after dropping those of steps beyond `keep_steps`.

    `records` has all records of the file; `lost` is the number of kept steps that have none.
    """

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
    """Read the records of a metrics.jsonl; raise FormatError if one is invalid, except a last line that a crash cut."""
    try:
        lines = read_regular(path, 1 << 30).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"cannot read {path}: {reason_of(error)}") from None
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
    """Measures the time between marks: by events on a GPU, without waiting for it, and by the clock on the CPU."""

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
    return peak_memory_bytes(device) if (size := _process_status("VmRSS")) is None else size


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
    """Profiles some steps (the last ones of a short run) into trace.json (for Chrome), kernels.txt and kernels.json."""

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
_RISE, _LEAST_RISE = 0.03, 0.01  # relative and absolute rise that counts: evaluations read different parts of the data
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
        """A sentence with advice if the held-out loss has risen since its best evaluation; else empty."""
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


_MOST_DOTS = 40  # on a curve
_ROWS_SHOWN = 16  # of the ledger; a sample adds many cases of few calls each


def build_report(
    *, summary: Mapping[str, Any], config: Mapping[str, Any], records: Sequence[StepRecord], ledger: Mapping[str, Any],
    sample: str, curves: Sequence[ReportChart] = (), remarks: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return the page of summary.json, config.json and Ledger.to_dict() as HTML; `remarks` explain the figures."""
    run, corpus, count = config["run"], config["corpus"], summary["parameters"]
    settings = {**run["recipe"], "seed": run["seed"], "deterministic": "yes" if run["deterministic"] else "no"}
    numbers = ("calls", "ms, median", "total ms", "%", "bytes", "flops")
    return render(
        "nn/train/report.html",
        title=f"Training report: {summary['preset']}",
        size=f"{count:,}" if count < 1e5 else f"{count / 1e6:.1f} million",
        summary=summary,
        config=config,
        figures=_figures(summary),
        remarks=remarks,
        charts=_charts(summary, config, records, curves),
        calls=list(map(_ledger_table, sections(ledger))) if ledger.get("ops") else (),
        head=("op", "implementation", "device", "case", *numbers, "not chosen"),
        numbers=numbers,
        fallbacks=ledger.get("fallbacks"),
        sample=sample,
        settings=[(name.replace("_", " "), value) for name, value in settings.items()],
        data=[(name.replace("_", " "), _shown(value)) for name, value in corpus.items() if value != []],
    )


def _figures(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    speed, predicted = summary["tokens_per_s"], summary.get("expected_peak_bytes")
    tokens, steps = summary["tokens"], summary["steps"]
    memory = "resident" if str(summary["device"]).startswith("cpu") else "allocated"
    together = f", of {count} processes" if (count := summary.get("processes", 1)) > 1 else ""
    if predicted is not None:
        memory += f"; {size_text(predicted)} predicted"
    items = [
        ("Held-out loss", f"{summary['validation_nats_per_byte']:.3f}", "nats a byte"),
        ("Bigram model", f"{summary['bigram_nats_per_byte']:.3f}", f"unigram {summary['unigram_nats_per_byte']:.3f}"),
        ("Throughput", "not recorded" if speed is None else f"{speed:,.0f}", f"tokens a second, median{together}"),
        ("Learned from", f"{tokens / 1e6:,.2f} M" if tokens >= 1e6 else f"{tokens:,}", f"tokens in {steps:,} steps"),
        ("Peak memory", size_text(summary["peak_memory_bytes"]), memory),
        ("Time", f"{summary['seconds']:,.0f} s", "in all"),
    ]
    if restarts := summary.get("restarts"):
        items.append(("Restarts", f"{restarts}", "from the last checkpoint: a process had died"))
    if summary.get("loss_scale"):
        items.append(("Loss scale", *summary["loss_scale"].split(", ", 1)))
    return items


def _charts(
    summary: Mapping[str, Any], config: Mapping[str, Any], records: Sequence[StepRecord], curves: Sequence[ReportChart]
) -> Iterator[tuple[str, str]]:
    losses = [(float(record.step), record.loss) for record in records]
    held = [(float(r.step), r.validation_loss) for r in records if r.validation_loss is not None]
    held.append((float(summary["steps"]), summary["validation_loss"]))
    lines = [
        Line("training, each step", losses, "each"),
        Line("training, mean", smoothed(losses, max(1, len(losses) // 40)), "mean"),
        Line("held out", held, "held", dots=True),
    ]
    references = []
    if config["run"]["recipe"]["tokenizer"] == "bytes":  # the n-gram models count bytes
        references = [Reference(name, summary[f"{name}_nats_per_byte"]) for name in ("unigram", "bigram")]
    yield "Loss", line_chart(lines, x_label="step", y_label="nats a token", references=references)
    for curve in curves:
        line = Line(curve.label, curve.points, "more", dots=len(curve.points) <= _MOST_DOTS)
        yield curve.title, line_chart([line], x_label="step", y_label=curve.y_label, zero=True)
    speed = Line("tokens a second", [(float(record.step), record.tokens_per_s or 0.0) for record in records], "speed")
    yield "Throughput", line_chart([speed], x_label="step", y_label="tokens a second", zero=True)


_Cells = list[tuple[str, str]]


def _ledger_table(section: Section) -> tuple[str, list[_Cells], list[_Cells]]:
    """Return a heading and the cells of its table, and of the rows beyond `_ROWS_SHOWN`."""
    rows, more = section.rows[:_ROWS_SHOWN], section.rows[_ROWS_SHOWN:]
    if (shown := list(map(_ledger_cells, rows))) and section.seconds is not None:
        unnamed = [("soft", "not attributed"), *[("", "")] * 5]
        shown.append([*unnamed, *(("number", text) for text in section.unattributed), *[("", "")] * 3])
    return section.heading, shown, list(map(_ledger_cells, more))


def _ledger_cells(row: Mapping[str, Any]) -> _Cells:
    device, (*_, each, total, share) = row.get("device") or row.get("backend"), row_cells(row)
    calls, known = row.get("calls", 0), row.get("bytes_per_call") is not None
    moved, flops = (row[f"{name}_per_call"] * calls if known else row.get(name) for name in ("bytes", "flops"))
    refused = "; ".join(f"{entry.get('implementation')}: {entry.get('reason')}" for entry in row.get("refused", ()))
    return [
        *[("word", str(value)) for value in (row.get("op"), row.get("implementation"), device)],
        ("case", str(row.get("case"))),
        *[("number", text) for text in (f"{calls:,}", each, total, share)],
        ("number", size_text(moved) if moved else "-"),
        ("number", short_number(flops) if flops else "-"),
        ("soft", refused),
    ]


def _shown(value: object) -> str:
    return "; ".join(value) if isinstance(value, list) else f"{value:,}" if isinstance(value, int) else str(value)


_FORMAT = "accelerant-train-1"
_ADD_UP = "this run begins a new ledger. Trainings on the same data add up: give --ledger {} to continue that one"


class RunFolder:
    """A run's folder: config.json is written first and names the format, summary.json last, when it is finished."""

    FILES = (
        "config.json", "metrics.jsonl", "checkpoint.safetensors", "tokenizer.json",
        "model.safetensors", "sample.txt", "report.html", "summary.json",
        "checkpoint-previous.safetensors", "trace.json", "kernels.txt", "kernels.json", "privacy.json",
        "tokenizer_config.json",
    )  # fmt: skip

    LEDGER = "privacy-ledger.jsonl"
    """The privacy ledger of a private run. It is never removed: deleting a model restores no privacy budget."""

    EVENT_LOGS = "tensorboard"

    _MOVING = ".accelerant-moving"
    """Subfolder of an earlier run while its files are moved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.metrics, self.checkpoint, self.tokenizer = (path / name for name in self.FILES[:4])
        self.model, self.sample, self.report, self.summary = (path / name for name in self.FILES[4:8])

    @property
    def finished(self) -> bool:
        """True if the run in the folder is finished."""
        return self.summary.is_file()

    @property
    def resume_command(self) -> str:
        """The command that continues the run, in as many processes as wrote its last checkpoint."""
        count = Checkpoints(self.path).written[1]
        return f"accelerant train --resume {shlex.quote(str(self.path))}{f' --gpus {count}' * (count > 1)}"

    def require_usable(self) -> None:
        """Raise ConfigError unless a run may write here: existing files of those names are a run's."""
        nearest = next(each for each in (self.path, *self.path.parents) if each.exists())
        if not nearest.is_dir():
            raise ConfigError(f"cannot write to {self.path}: {nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(f"cannot write to {self.path}: no permission in {nearest}")
        foreign = [name for name in (*self.FILES, self.EVENT_LOGS) if (self.path / name).exists()]
        try:
            if foreign:
                self.read_config()
        except FormatError:
            what = f"{foreign[0]} of something else"
            raise ConfigError(f"{self.path} holds {what}: give --out another folder") from None

    def start(self, *, overwrite: bool = False) -> str | None:
        """Prepare the folder for a new run, and return a note: an earlier one is moved, or removed (`overwrite`)."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / ".accelerant-write-test", b"")
            (self.path / ".accelerant-write-test").unlink()
            old = [self.path / name for name in self.FILES if (self.path / name).is_file()]
            shards = list(self.path.glob(Checkpoints.SHARDS))
            logs = [log] if (log := self.path / self.EVENT_LOGS).is_dir() else []
            holds = Checkpoints(self.path).exist or self.finished or self.model.is_file()
            if (holds and not overwrite) or (self.path / self._MOVING).is_dir():
                return self._move_aside([*old, *shards, *self.path.glob(f"{self.LEDGER}*"), *logs])
            self.summary.unlink(missing_ok=True)  # first: a partly removed run is not a finished one
            for folder in (*shards, *logs):
                shutil.rmtree(folder)
            for file in sorted(
                old, key=lambda file: file == self.config
            ):  # the configuration marks the files as a run's
                file.unlink(missing_ok=True)
            return self._keep_ledger()
        except OSError as error:
            raise ConfigError(f"cannot write to {self.path}: {error.strerror or error}") from None

    def _move_aside(self, files: Sequence[Path]) -> str:
        """Move a run's files into a subfolder, or go on with a move that was killed; return a note for the user."""
        moving = self.path / self._MOVING
        moving.mkdir(exist_ok=True)
        here = {file.name for folder in (self.path, moving) for file in folder.iterdir() if file.is_file()}
        finished, private = self.summary.name in here, self.LEDGER in here
        kept = self._free_name("finished" if finished else "unfinished")
        for file in sorted(files, key=lambda file: file == self.config):
            file.rename(moving / file.name)
        moving.rename(kept)
        if not finished:
            return f"kept the unfinished run that was here: {RunFolder(kept).resume_command}"
        note = f"kept the finished run that was here in {kept} (--overwrite replaces it)"
        return f"{note}; {_ADD_UP.format(kept / self.LEDGER)}" if private else note

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Write config.json."""
        self.write_json(self.config, {"format": _FORMAT, **values})

    def reopen(self, config: Mapping[str, Any]) -> None:
        """Replace config.json when a run is to have another number of steps, so that it is no longer finished."""
        self.summary.unlink(missing_ok=True)  # first: the summary marks a finished run
        self.write_config(config)

    def read_config(self) -> dict[str, Any]:
        """Read config.json; raise FormatError if it is absent or was not written by a run."""
        values = self._read_json(self.config)
        if values.get("format") != _FORMAT:
            raise FormatError(f"{self.config} is not a run's of this program")
        return values

    def read_summary(self) -> dict[str, Any]:
        """Read summary.json, with the paths of this folder, which may have moved; FormatError as for read_config."""
        return self._read_json(self.summary) | {"out": str(self.path), "report": str(self.report)}

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            values = decode_json(read_regular(path))
        except (FileNotFoundError, NotADirectoryError):
            raise MissingFile(f"{self.path} holds no run: there is no {path.name}") from None
        except (OSError, ValueError) as error:
            raise FormatError(f"cannot read {path}: {reason_of(error)}") from None
        if not isinstance(values, dict):
            raise FormatError(f"{path} is not a run's of this program")
        return values

    @staticmethod
    def write_json(path: Path, values: Mapping[str, Any]) -> None:
        """Write a JSON document atomically, indented."""
        write_atomic(path, (json.dumps(values, indent=2) + "\n").encode())

    def _keep_ledger(self) -> str | None:
        """Rename the privacy ledger of the previous run; return a note for the user."""
        ledger = self.path / self.LEDGER
        if not ledger.is_file():
            return None
        kept = self._free_name(ledger.stem, ledger.suffix)
        for file in self.path.glob(f"{self.LEDGER}*"):  # and the files of its writer
            file.rename(kept.with_name(kept.name + file.name.removeprefix(self.LEDGER)))
        return f"kept the privacy ledger of the run that was here as {kept.name}; {_ADD_UP.format(kept)}"

    def _free_name(self, stem: str, suffix: str = "") -> Path:
        paths = (self.path / f"{stem}-{number}{suffix}" for number in itertools.count(1))
        return next(path for path in paths if not path.exists())


# --- the lock --------------------------------------------------------------------------------------------------------
_UNWRITTEN_S = 10.0  # an older lock file without a process ID was left by a crash
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # from file systems without locks


class RunLock:
    """The lock of a run's folder. Entering acquires it if the folder exists; `take` makes the folder, too."""

    NAME = ".accelerant-train.lock"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / self.NAME
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        if self._folder.is_dir():
            self.take()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        if sys.platform == "win32":  # an open file cannot be removed there
            os.close(file)
            self._path.unlink(missing_ok=True)
        else:
            self._path.unlink(missing_ok=True)  # before others can take the lock of a file that is then gone
            os.close(file)

    def take(self) -> None:
        """Acquire the lock if it is not held; raise ConfigError if another run has it, or the folder is unusable."""
        if self._file is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = self._flock()
            if self._file is None:
                self._file = self._create()
            os.truncate(self._file, 0)
            os.write(self._file, str(os.getpid()).encode())
        except OSError as error:
            raise ConfigError(f"cannot write to {self._folder}: {error.strerror or error}") from None

    def _flock(self) -> int | None:
        """Return the file with the kernel's lock on it; None if the system has no such locks."""
        try:
            import fcntl
        except ImportError:  # Windows
            return None
        while True:
            file = open_regular(self._path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.stat(self._path)
                if os.path.samestat(os.fstat(file), found):
                    return file
            except FileNotFoundError:
                pass  # its last owner removed it between open and flock
            except BlockingIOError:
                os.close(file)
                raise self._in_use() from None
            except OSError as error:
                os.close(file)
                if error.errno not in _NO_LOCKS:
                    raise
                if self._owner() is None:
                    self._path.unlink(missing_ok=True)
                return None
            os.close(file)

    def _create(self) -> int:
        """Return the file, created by this process; that of a dead process is replaced."""
        while True:
            try:
                return open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                owner = self._owner()
                if self._age_s() < _UNWRITTEN_S if owner is None else _alive(owner):
                    raise self._in_use() from None
                try:
                    self._path.unlink(missing_ok=True)
                except PermissionError:  # Windows: a process has it open
                    raise self._in_use() from None

    def _owner(self) -> int | None:
        try:
            return int(read_regular(self._path, 32))
        except (OSError, ValueError):
            return None

    def _age_s(self) -> float:
        try:
            return time.time() - self._path.stat().st_mtime
        except FileNotFoundError:
            return _UNWRITTEN_S

    def _in_use(self) -> ConfigError:
        owner = self._owner()
        who = "another process" if owner is None else f"process {owner}"
        return ConfigError(f"{self._folder} is in use by {who}: wait for its end, or give --out another folder")


def _alive(process: int) -> bool:
    if sys.platform == "win32":  # os.kill would end it
        import ctypes

        handle = ctypes.windll.kernel32.OpenProcess(0x1000, False, process)  # PROCESS_QUERY_LIMITED_INFORMATION
        if not handle:
            return False
        code = ctypes.c_ulong()
        known = ctypes.windll.kernel32.GetExitCodeProcess(handle, ctypes.byref(code))
        ctypes.windll.kernel32.CloseHandle(handle)
        return bool(known) and code.value == 259  # STILL_ACTIVE
    try:
        os.kill(process, 0)
    except PermissionError:
        return True  # another user's
    except (OSError, OverflowError):
        return False
    return process > 0
