"""Benchmark records: rows of measurements with the environment that they were made in.

A `Journal` keeps finished cases on disk, as JSON lines: a resumed run continues after them. The first line has the
environment and options of the run, each other one a case; one that was cut short is ignored:

    {"journal": 1, "environment": {...}, "asked": {"--against": "torch"}, "ceilings": {...}}
    {"done": "gelu 16384x4096-tanh bfloat16 torch", "rows": [...], "notes": [...], "took_s": {"timed calls": 0.4}}
"""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import io
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from accelerant._version import __version__
from accelerant.bench.timer import Timing
from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.files import decode_json, open_regular, plain, read_regular, reason_of, typed, write_atomic
from accelerant.runtime.html_page import text_table
from accelerant.runtime.ledger import quantile
from accelerant.runtime.provider import ComputeDevice

DEVICE, OURS = "device", "accelerant"
"""Runners of rows that measure the device itself, and of those that a user's call runs, with dispatch's choice."""

OWN = "accelerant, own kernel"
"""Runner of rows in which our own kernel was forced because dispatch had chosen a library."""

DETERMINISTIC = "accelerant, deterministic"
"""Runner of rows measured with the setting `deterministic`, for ops that it may slow down."""

COMPILED, STEP, EAGER = "accelerant, compiled", "accelerant, TrainStep", "accelerant, graph=False"
"""Runners of patched models: under torch.compile, trained by TrainStep, without CUDA graphs. OURS is `patch(model)`;
its notes tell whether it captured any.
"""

OUT_OF_MEMORY = "out of memory: "  # prefix of the note of a row without a time because the device lacked memory

NAIVE, NUMPY, UNFUSED = _BASELINES = "python (naive)", "numpy (baseline)", "unfused (baseline)"
"""Runners that are no peers, left out where our speed is compared with the fastest library's: plain Python numbers,
NumPy on the host's CPU, and a kernel for each arithmetic operation, as a user of NumPy or CuPy writes an op.
"""

_P95_SAMPLES, _P99_SAMPLES = 20, 100
"""Samples without which a 95th or 99th percentile would be the slowest call, whatever its share."""

_PACKAGES = (
    "torch", "triton", "cuda-core", "numpy", "llvmlite", "transformers", "liger-kernel", "quack-kernels",
    "flash-attn-4", "opacus", "dp-accounting",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Environment:
    """The device, versions, source commit and command that a record was made with."""

    device: str
    backend: str
    architecture: str
    driver: str
    system: str
    python: str
    accelerant: str
    packages: dict[str, str]
    time: str
    commit: str = ""
    command: str = ""

    @classmethod
    def of(cls, device: ComputeDevice) -> Environment:
        """Return the environment of this process and a device."""
        versions = {name: version for name in _PACKAGES if (version := installed_version(name))}
        versions["torch"] = torch.__version__
        if torch.version.cuda:
            versions["cuda"] = torch.version.cuda
        path = Path(sys.argv[0])
        program = f"python -m benchmarks.{path.stem}" if path.parent.name == "benchmarks" else "accelerant"
        return cls(
            device=device.name,
            backend=device.backend,
            architecture=device.architecture,
            driver=str(device.properties.get("driver", "")),
            system=platform.platform(terse=True),
            python=platform.python_version(),
            accelerant=__version__,
            packages=versions,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=_commit(),
            command=" ".join([program, *sys.argv[1:]]),
        )


def installed_version(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@contextlib.contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of this process's environment for the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_PACKAGE = Path(__file__).resolve().parents[1]


def _commit(package: Path = _PACKAGE) -> str:
    """Return the commit of the package's checkout, with "+" where it was changed since; "" for an installed package."""
    if "ACCELERANT_COMMIT" in os.environ:  # set for a copy without its history
        return os.environ["ACCELERANT_COMMIT"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # a hook's name another

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(package), *words], capture_output=True, text=True, check=True, env=own
        )  # fmt: skip
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation of one case, measured.

    Attributes:
        suite, op, case: what was measured; the case holds sizes, dtype and direction.
        runner: "accelerant" or the peer's name.
        implementation: the implementation that ran: "triton (own)", "torch"; for a peer its name.
        unit: of the quantiles: "ms", "us", "MiB", or "x" for a ratio.
        p20, p50, p80: quantiles of the samples; None where the case did not run.
        bytes, flops: least work of the case; 0 where meaningless.
        ceiling: the ceiling that bounds the case: "copy", "matmul", "host to device", "device to host", or empty.
        percent_of_ceiling: of the ceiling measured in this run.
        target: the p50 to reach on this device, where one is set.
        speedup: on our rows, speed over the fastest peer that ran.
        note: why a runner did not run, or a remark on the figure.
        better: "lower" or "higher".
        cpu_ms: on our rows of another device, the same case on this machine's CPU.
        cpu_note: how cpu_ms was measured, or why it was not.
        target_x: the speed to reach, as a multiple of the fastest peer's.
        peak_bytes: device memory that a call takes at its peak, above its arguments.
        samples: single times, in the row's unit.
        part: of the neural suite: "" for its tables, "odd" for odd sizes, "sweep" for a sweep of sizes.
        error: ||x - reference|| / ||reference|| of the results, where they were compared.
        timing: how the times were taken, where not one by one with a cold cache.
        target_bytes: the peak_bytes to stay within.
        reason: on our rows, why dispatch chose the implementation.
        cold_ms: milliseconds of the first call of the case in this process, with what it compiles and loads.
        operations: field or curve operations of a call; 0 where it has none.
        wall_ms: milliseconds of the user's plain call, host included, from an idle device to an idle one: nothing is
            raced, prepared or flushed before it.
        back_to_back_ms: the same of one of several calls without a pause.
        device_ms: the device's part, where the quantiles are wall times.
        level: whether one of our rows is slower than the fastest peer by less than the samples' spread: its 20th
            percentile is at most that peer's median, or its median at most that peer's 80th percentile.
    """

    suite: str
    op: str
    case: str
    runner: str
    implementation: str
    unit: str = "ms"
    p20: float | None = None
    p50: float | None = None
    p80: float | None = None
    bytes: int = 0
    flops: int = 0
    ceiling: str = ""
    percent_of_ceiling: float | None = None
    target: float | None = None
    speedup: float | None = None
    note: str = ""
    better: str = "lower"
    cpu_ms: float | None = None
    cpu_note: str = ""
    target_x: float | None = None
    peak_bytes: int | None = None
    samples: tuple[float, ...] = ()
    part: str = ""
    error: float | None = None
    timing: str = ""
    target_bytes: int | None = None
    reason: str = ""
    level: bool = False
    cold_ms: float | None = None
    operations: int = 0
    wall_ms: float | None = None
    back_to_back_ms: float | None = None
    device_ms: float | None = None

    @property
    def p95(self) -> float | None:
        """95th percentile of at least 20 samples; None of fewer."""
        return quantile(sorted(self.samples), 0.95) if len(self.samples) >= _P95_SAMPLES else None

    @property
    def p99(self) -> float | None:
        """99th percentile of at least 100 samples; None of fewer."""
        return quantile(sorted(self.samples), 0.99) if len(self.samples) >= _P99_SAMPLES else None

    @property
    def wrong(self) -> bool:
        """True if the results were wrong, so that nothing was timed."""
        return self.note.startswith("wrong: ")

    @property
    def aims(self) -> str:
        """The row's targets as text; "" without any."""
        texts = (
            f"{plain(self.target)} {self.unit}" if self.target else "",
            f"{self.target_x:.2f}x the best" if self.target_x else "",
            f"{plain(self.target_bytes / 2**20)} MiB" if self.target_bytes else "",
        )
        return " ".join(filter(None, texts))

    def _per_ns(self, amount: int) -> float | None:
        """Return an amount over the median: bytes as GB/s, operations as 10^9 a second."""
        per_ms = {"ms": 1e6, "us": 1e3}.get(self.unit)
        return amount / self.p50 / per_ms if per_ms and amount and self.p50 else None

    @property
    def gflop_s(self) -> float | None:
        """Floating-point operations over the median, in GFLOP/s."""
        return self._per_ns(self.flops)

    @property
    def tflop_s(self) -> float | None:
        """The same in TFLOP/s."""
        return self.gflop_s and self.gflop_s / 1e3

    @property
    def gop_s(self) -> float | None:
        """Field or curve operations over the median, in 10^9 a second."""
        return self._per_ns(self.operations)

    @property
    def rate_gb_s(self) -> float | None:
        """Least bytes over the median, in GB/s."""
        return self._per_ns(self.bytes)

    @property
    def of_target(self) -> float | None:
        """Share of the target that the median reaches, above 1 where it is better; None without either."""
        if not self.target or not self.p50:
            return None
        return self.p50 / self.target if self.better == "higher" else self.target / self.p50

    @property
    def reached(self) -> bool | None:
        """True if the targets are reached; None without targets."""
        if not self.aims:
            return None
        if self.p50 is None:
            return False
        return (
            (self.of_target or 1.0) >= 1.0
            and (not self.target_x or (self.speedup or 0.0) >= self.target_x)
            and (not self.target_bytes or (self.peak_bytes is not None and self.peak_bytes <= self.target_bytes))
        )

    @property
    def over_cpu(self) -> float | None:
        """Speed over the CPU's."""
        unit_ms = {"ms": 1.0, "us": 1e-3}.get(self.unit)
        return self.cpu_ms / self.p50 / unit_ms if self.cpu_ms and self.p50 and unit_ms else None

    @property
    def compared(self) -> bool:
        """True if it is compared with a baseline: our rows and the device's, not the peers'."""
        return self.ours or self.runner in (OWN, DETERMINISTIC, DEVICE)

    @property
    def ours(self) -> bool:
        """True if a user's call runs it: with dispatch's choice, or a patched model."""
        return self.runner in (OURS, COMPILED, EAGER, STEP)

    @property
    def peer(self) -> bool:
        """True if it is another library's, with which ours are compared."""
        return not self.compared and self.runner not in _BASELINES

    @property
    def slower(self) -> bool:
        """True if the fastest peer was faster by more than the samples' spread."""
        return self.speedup is not None and self.speedup < 1 and not self.level

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """The identity of a row across records."""
        return self.suite, self.op, self.case, self.runner, self.part

    @property
    def case_key(self) -> tuple[str, str, str, str]:
        """The identity of a case; a sweep may have a size that a table has too."""
        return self.suite, self.part, self.op, self.case

    @property
    def lacked_memory(self) -> bool:
        """True if it did not run because the device lacked memory."""
        return self.note.startswith(OUT_OF_MEMORY)

    def timed(self, timing: Timing) -> Row:
        """Return the row with the quantiles and samples of a timing."""
        return replace(
            self, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms, samples=timing.samples,
            wall_ms=self.wall_ms or timing.wall_ms, back_to_back_ms=self.back_to_back_ms or timing.back_to_back_ms,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the identity, the quantiles, and other fields that differ from their defaults, for JSON.

        Rates and the percentiles of many samples, which follow from the fields, are added for other readers.
        """
        always = ("suite", "op", "case", "runner", "implementation", "unit", "p20", "p50", "p80")
        pairs = [(one, getattr(self, one.name)) for one in fields(self)]
        values = {one.name: value for one, value in pairs if one.name in always or value != one.default}
        values |= {name: value for name in _DERIVED if (value := getattr(self, name)) is not None}
        return {  # to the resolution of the clocks
            name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in values.items()
        }

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Row:
        """Return the row of a dictionary without its unknown names; TypeError or ValueError if it is not a row."""
        known = {one.name for one in fields(cls)}
        row: Row = typed(cls, {name: value for name, value in body.items() if name in known}, "a row")
        for quantile_ in ("p20", "p50", "p80"):
            value = getattr(row, quantile_)
            if value is None and (quantile_ == "p50" or row.p50 is None):
                continue
            if value is None or not 0 < value < math.inf:  # no run writes it
                raise ValueError(f"{row.op} {row.case}: {quantile_} is {value!r}")
        return row


_DERIVED = ("p95", "p99", "rate_gb_s", "gflop_s", "gop_s")


@dataclass(slots=True)
class BenchmarkRecord:
    """The rows of a run, the ceilings measured in it, whose names end in their unit, and what a reader must know."""

    environment: Environment
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def conclude(self) -> None:
        """Compute the rows' percentages of the ceilings and speed-ups over the fastest peer that ran."""
        best: dict[tuple[str, ...], Row] = {}
        for row in self.rows:
            known = best.get(row.case_key)
            if row.peer and row.p50 is not None and (known is None or row.p50 < (known.p50 or 0.0)):
                best[row.case_key] = row

        def concluded(row: Row) -> Row:
            if row.p50 is None:
                return row
            peer = best.get(row.case_key) if row.ours or row.runner == OWN else None
            speedup = peer.p50 / row.p50 if peer is not None and peer.p50 and row.p50 else None
            level = False
            if peer is not None and peer.p50 and speedup is not None and speedup < 1:
                level = (row.p20 or row.p50) <= peer.p50 or row.p50 <= (peer.p80 or peer.p50)
            return replace(row, speedup=speedup, level=level, percent_of_ceiling=self._percent(row))

        self.rows = [concluded(row) for row in self.rows]

    def _percent(self, row: Row) -> float | None:
        if row.ceiling == "matmul" and f"{row.ceiling} TFLOP/s" in self.ceilings and row.p50:
            return 100 * row.flops / row.p50 / 1e9 / self.ceilings[f"{row.ceiling} TFLOP/s"]
        ceiling = self.ceilings.get(f"{row.ceiling} GB/s")
        return 100 * row.rate_gb_s / ceiling if ceiling and row.rate_gb_s else None

    def ordered(self) -> list[Row]:
        """Return the rows case by case: cases without a time of ours, then those lost, the worst first.

        A case is lost if a peer was faster or, without a peer, if its target in time was missed.
        """
        worst: dict[tuple[str, ...], float] = {}
        for row in self.rows:
            reached = row.speedup or row.of_target
            if row.ours and (reached is not None or row.p50 is None):
                worst[row.case_key] = min(reached or 0.0, worst.get(row.case_key, math.inf))
        lost = {key: speedup for key, speedup in worst.items() if speedup < 1.0}
        keys = (row.case_key for row in self.rows)
        places = {key: (key not in lost, lost.get(key, 0.0), i) for i, key in enumerate(dict.fromkeys(keys))}
        return sorted(self.rows, key=lambda row: places[row.case_key])

    def save_csv(self, path: Path) -> None:
        """Write the rows without their samples as comma-separated values; whole or not at all."""
        names = [*(one.name for one in fields(Row) if one.name != "samples"), *_DERIVED, "tflop_s"]
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(names)
        for row in self.ordered():
            writer.writerow([getattr(row, name) for name in names])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.getvalue().encode())

    def to_dict(self) -> dict[str, Any]:
        """Return the record for JSON; see Row.to_dict."""
        return {
            "environment": asdict(self.environment),
            "ceilings": self.ceilings,
            "rows": [row.to_dict() for row in self.ordered()],
            "notes": self.notes,
        }

    def to_json(self) -> str:
        """Return the record as JSON text with one row a line, so that files stay small and differences readable."""
        body = self.to_dict()
        if not (rows := ",\n".join(json.dumps(row) for row in body.pop("rows"))):
            return json.dumps({**body, "rows": []}, indent=1) + "\n"
        return f'{json.dumps(body, indent=1)[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'

    def save(self, path: Path) -> None:
        """Write as JSON; whole or not at all. An OSError names `path`."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, self.to_json().encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error

    @classmethod
    def load(cls, path: Path) -> BenchmarkRecord:
        """Read what `save` wrote; FormatError if it is not a record."""
        try:
            table = typed(dict[str, Any], decode_json(read_regular(path)), "it")
            rows = [Row.read(row) for row in table["rows"]]
            environment = typed(Environment, table["environment"])
            notes = typed(list[str], table.get("notes", []), "notes")
            return cls(environment, typed(dict[str, float], table["ceilings"], "ceilings"), rows, notes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{path} is not a benchmark record: {reason_of(error)}") from None

    def cells(self) -> list[list[str]]:
        """Return the table's cells, the header first; columns without a value are left out."""
        lines = [list(_HEAD), *map(_cells, self.ordered())]
        filled = [i for i in range(len(_HEAD)) if i < 10 or any(line[i] not in ("", "-") for line in lines[1:])]
        return [[line[i] for i in filled] for line in lines]

    def table(self) -> str:
        """Return a text table; cases in which a peer was faster come first."""
        where = f"{self.environment.device} ({self.environment.architecture}), " + ", ".join(
            f"{name} {version}" for name, version in self.environment.packages.items()
        )
        ceilings = ", ".join(f"{name} {plain(value)}" for name, value in self.ceilings.items())
        top = [
            where,
            f"ceilings measured in this run: {ceilings}" if ceilings else "",
            *text_table(self.cells(), width=_WIDE),
        ]
        return "\n".join([*top, *filter(None, [self.verdict()]), *(f"note: {note}" for note in self.notes)])

    def verdict(self) -> str:
        """Return in how many cases we are as fast as the fastest peer that ran, level, or slower; "" where none ran."""
        if not (ours := [row for row in self.rows if row.ours and row.speedup is not None]):
            return ""
        level, slower = sum(row.level for row in ours), sum(row.slower for row in ours)
        text = f"at least as fast as the fastest peer in {len(ours) - level - slower} of {len(ours)} cases"
        text += f", level (slower within the spread of the samples) in {level}" if level else ""
        return text + (f", slower in {slower}" if slower else "")


_WIDE = 1 << 20  # width of text tables, whose rows are lines

_HEAD = (
    "op", "case", "runner", "ran", "p50", "to reach", "p20-p80", "% of ceiling", "speedup", "wall ms", "reached",
    "back to back ms", "device ms", "p95", "p99", "first call", "GB/s", "GFLOP/s", "GOp/s", "peak MiB", "CPU",
    "over CPU", "note",
)  # fmt: skip


def _cells(row: Row) -> list[str]:
    if row.p50 is None:
        reason = "wrong result" if row.wrong else "out of memory" if row.lacked_memory else "did not run"
        return [row.op, row.case, row.runner, reason, "-", *[""] * (len(_HEAD) - 6), row.note]
    high = ["-" if one is None else plain(one) for one in (row.p95, row.p99)]
    rates = (row.rate_gb_s, row.gflop_s, row.gop_s, row.peak_bytes and row.peak_bytes / 2**20)
    return [
        row.op, row.case, row.runner, row.implementation, f"{plain(row.p50)} {row.unit}",
        row.aims if row.compared else "", f"{plain(row.p20)}-{plain(row.p80)}",
        "" if row.percent_of_ceiling is None else f"{row.percent_of_ceiling:.0f}% of {row.ceiling}",
        "" if row.speedup is None else f"{row.speedup:.2f}x" + " (level)" * row.level, _shown(row.wall_ms),
        {True: "yes", False: "no", None: ""}[row.reached if row.compared else None],
        _shown(row.back_to_back_ms), _shown(row.device_ms), *high, _shown(row.cold_ms, " ms"), *map(_shown, rates),
        f"{plain(row.cpu_ms)} ms ({row.cpu_note})" if row.cpu_ms else row.cpu_note,
        "" if row.over_cpu is None else f"{row.over_cpu:.0f}x", "; ".join(filter(None, (row.timing, row.note))),
    ]  # fmt: skip


def _shown(value: float | None, unit: str = "") -> str:
    return "" if value is None else plain(value) + unit


def failure_note(error: BaseException, most: int = 160, kind: str = "") -> str:
    """Return "Type: first line of the message" for a row's note, or another kind instead of the error's type."""
    return f"{kind or f'{type(error).__name__}: '}{(str(error).splitlines() or [''])[0][:most]}"


# --- the journal of a run ---------------------------------------------------------------------------------------------
_FORMAT = 1
SAME = ("device", "accelerant", "commit", "packages", "driver")
"""Fields of the environment that a resumed run must share with the one that it continues."""


class Journal:
    """The journal of a run, which `resume` continues; ConfigError where it exists, FormatError for another's."""

    def __init__(
        self, path: Path, record: BenchmarkRecord, *, resume: bool, options: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self.options = dict(options or {})
        self.done: set[str] = set()
        lines = read_regular(path, 1 << 30).splitlines(keepends=True) if path.exists() else []
        if lines and not resume:
            raise ConfigError(f"{path} is of an earlier run: --resume goes on with it, another folder starts a new one")
        if whole := [line for line in lines if line.endswith(b"\n")]:
            self._read(whole, record)
        if lines:
            with open(open_regular(path, os.O_RDWR), "r+b") as file:  # the next line must not continue a torn one
                file.truncate(sum(map(len, whole)))
        self._begun = bool(whole)

    def _read(self, lines: Sequence[bytes], record: BenchmarkRecord) -> None:
        try:
            head = decode_json(lines[0])
            if head["journal"] != _FORMAT:
                raise ValueError(f"format {head['journal']!r}")
            environment = typed(Environment, head["environment"])
            cases = [decode_json(line) for line in lines[1:]]
            rows = [Row.read(row) for case in cases for row in case["rows"]]
            done = {str(case["done"]) for case in cases}
            notes = [str(note) for case in cases for note in case["notes"]]
            ceilings = {str(name): float(value) for name, value in head["ceilings"].items()}
            options = {str(name): str(value) for name, value in head.get("asked", {}).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{self.path} is no journal of a run: {error}") from None
        here = record.environment
        for name in SAME:
            then, now = getattr(environment, name), getattr(here, name)
            if then != now:
                raise FormatError(f"{self.path} is of a run with {name} {then!r}; here it is {now!r}")
        for name in dict.fromkeys((*self.options, *options)):
            then, now = options.get(name, "not given"), self.options.get(name, "not given")
            if then != now:
                raise FormatError(f"{self.path} is of a run with {name} {then}; this one has {name} {now}")
        record.environment, record.ceilings = environment, ceilings
        record.rows, record.notes = rows, [*notes, f"interrupted, and continued at {here.time}"]
        self.done = done

    def begin(self, record: BenchmarkRecord) -> None:
        """Write the first line unless the file has it."""
        if not self._begun:
            self._begun = True
            environment = asdict(record.environment)
            head = {"journal": _FORMAT, "environment": environment, "asked": self.options, "ceilings": record.ceilings}
            self._write(head)

    def add(
        self, key: str, rows: Sequence[Row], notes: Sequence[str] = (), took_s: Mapping[str, float] | None = None
    ) -> None:
        """Write a finished case and the seconds of its activities; it is on disk when this returns."""
        self.done.add(key)
        body = {"done": key, "rows": [row.to_dict() for row in rows], "notes": list(notes)}
        self._write(body | ({"took_s": {name: round(s, 3) for name, s in took_s.items()}} if took_s else {}))

    def _write(self, body: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
            file.write(json.dumps(body).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
