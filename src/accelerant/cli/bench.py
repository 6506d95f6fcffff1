"""`accelerant bench`: measure, beside the peers, in one run."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.errors import AccelerantError, ConfigError, FormatError

if TYPE_CHECKING:
    from accelerant.bench.collect import Part
    from accelerant.bench.compare import Comparison
    from accelerant.bench.record import Record, Row
    from accelerant.runtime.provider import ComputeDevice

__all__ = ["algebra", "bandwidth", "everything", "neural", "register", "runtime"]

_SUITES = ("neural", "algebra", "runtime", "bandwidth")

_Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
_Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the record there as JSON too.")]
_Report = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots there.")]
_Compare = Annotated[
    Path | None, typer.Option(metavar="BASELINE", help="A record to compare with; exit 1 where this run is slower.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of a table.")]
_Budget = Annotated[float, typer.Option(min=0.0, help="Seconds of calls behind each figure.")]
_Compiled = Annotated[bool, typer.Option(help="With torch.compile among the peers.")]
_Against = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Peers: torch, compile, liger, quack, cudnn, flash, flash_attn_4, cublaslt, or none. What is not "
        "installed leaves a row that says so.",
    ),
]
_Csv = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows there as CSV too.")]
_Ops = Annotated[list[str] | None, typer.Option(help="Only this op of the neural suite; may be repeated.")]
_NEURAL_EPILOG = (
    "Examples:  accelerant bench neural   |   "
    "accelerant bench neural --op attention --against torch,cudnn,flash,flash_attn_4   |   "
    "accelerant bench neural --out now.json --compare before.json"
)
_ALL_EPILOG = (
    "Examples:  accelerant bench all --out now.json --report report.html   |   "
    "accelerant bench all --compare before.json   |   accelerant bench all --suite algebra --budget-s 0.1"
)


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Measure the kernels and the runtime beside their peers.", no_args_is_help=True)
    group.command("all", epilog=_ALL_EPILOG)(everything)
    group.command("neural", epilog=_NEURAL_EPILOG)(neural)
    group.command("algebra", epilog="Example:  accelerant bench algebra --no-compiled")(algebra)
    group.command("runtime", epilog="Example:  accelerant bench runtime --json")(runtime)
    group.command("bandwidth", epilog="Example:  accelerant bench bandwidth --sizes 1MiB,64MiB,1GiB")(bandwidth)
    app.add_typer(group, name="bench")


def neural(
    op: _Ops = None,
    device: _Device = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16, or several with commas; by default each case's.")
    ] = None,
    against: _Against = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Each op from 2^10 to 2^28 elements, odd ones too.")] = False,
    budget_s: _Budget = 0.3,
    out: _Out = None,
    csv: _Csv = None,
    report: _Report = None,
    compare: _Compare = None,
    json_output: _Json = False,
) -> None:
    """Measure the neural ops, forward and backward, beside torch and other libraries. Losses come first."""
    import torch

    from accelerant.bench.suites import neural as suite

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    wanted = [] if dtype is None else dtype.split(",")
    for each in wanted:
        if each not in known:
            raise ConfigError(f"--dtype: wanted float32, bfloat16 or float16, got {each!r}")
    _check_ops(op)
    named = _peers(against)
    session = _Session(device, out, report, compare, json_output, csv=csv)

    def measure(record: Record) -> None:
        chosen: list[str | None] = [*wanted] or [None]
        for each in chosen:
            suite.measure(
                record, session.device, names=op or (), dtype=None if each is None else known[each], budget_s=budget_s,
                against=named, sweep=suite.sweep_sizes() if sweep else (), progress=session.show,
            )  # fmt: skip

    def asked(row: Row) -> bool:
        of_dtype = not wanted or any(f" {each}" in row.case for each in wanted)
        return row.suite == "neural" and (not op or row.op in op) and of_dtype

    session.run([("neural", measure)], asked)


def algebra(
    device: _Device = "auto",
    budget_s: _Budget = 0.3,
    compiled: _Compiled = True,
    out: _Out = None,
    report: _Report = None,
    compare: _Compare = None,
    json_output: _Json = False,
) -> None:
    """Measure field arithmetic beside integer paths of NumPy and torch, checked exactly first."""
    session = _Session(device, out, report, compare, json_output)
    session.run([session.part("algebra", budget_s, compiled)], lambda row: row.suite == "algebra")


def runtime(
    device: _Device = "auto",
    budget_s: _Budget = 0.3,
    out: _Out = None,
    report: _Report = None,
    compare: _Compare = None,
    json_output: _Json = False,
) -> None:
    """Measure what a launch, an eager op call and a compile cost, and what streaming and batches gain."""
    session = _Session(device, out, report, compare, json_output)
    session.run([session.part("runtime", budget_s)], lambda row: row.suite == "runtime")


def bandwidth(
    sizes: Annotated[str | None, typer.Option(metavar="LIST", help="Like 1MiB,64MiB,1GiB.")] = None,
    device: _Device = "auto",
    budget_s: _Budget = 0.3,
    out: _Out = None,
    report: _Report = None,
    compare: _Compare = None,
    json_output: _Json = False,
) -> None:
    """Measure copies to the device, back, and on it: by size, from pinned and from pageable memory."""
    from accelerant.bench.suites import bandwidth as suite

    wanted = suite.parse_sizes(sizes) if sizes is not None else ()
    session = _Session(device, out, report, compare, json_output)

    def measure(record: Record) -> None:
        suite.measure(record, session.device, sizes=wanted, budget_s=budget_s, progress=session.show)

    names = {suite.size_name(size) for size in wanted}

    def asked(row: Row) -> bool:
        return row.suite == "bandwidth" and (not names or " ".join(row.case.split()[:2]) in names)

    session.run([("bandwidth", measure)], asked)


def everything(
    device: _Device = "auto",
    suite: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(_SUITES)}; may be repeated.")] = None,
    op: _Ops = None,
    budget_s: _Budget = 0.3,
    against: _Against = None,
    cpu: Annotated[bool, typer.Option(help="With a CPU column, where the device is another.")] = True,
    out: _Out = None,
    report: _Report = None,
    compare: _Compare = None,
    csv: _Csv = None,
    json_output: _Json = False,
) -> None:
    """Run every suite. One that fails, or Ctrl-C, leaves what was measured."""
    unknown = [name for name in suite or () if name not in _SUITES]
    if unknown:
        raise ConfigError(f"--suite: no suite {unknown[0]!r}; there are {', '.join(_SUITES)}")
    _check_ops(op)
    chosen = [name for name in _SUITES if not suite or name in suite]
    session = _Session(device, out, report, compare, json_output, lines=True, csv=csv)
    named = _peers(against)
    parts = [session.part(name, budget_s, "compile" in named, cpu, op or (), named) for name in chosen]
    session.run(parts, lambda row: row.suite in chosen and (row.suite != "neural" or not op or row.op in op))


def _peers(against: str | None) -> tuple[str, ...]:
    """The peers that `--against` names."""
    from accelerant.bench.suites.neural import AGAINST, check_against

    if against is None:
        return AGAINST
    named = tuple(part.strip() for part in against.split(",") if part.strip() and part.strip() != "none")
    try:
        check_against(named)
    except ConfigError as error:
        raise ConfigError(f"--against: {error}") from None
    return named


def _check_ops(names: Sequence[str] | None) -> None:
    from accelerant.bench.suites.neural import OPS

    for name in names or ():
        if name not in OPS:
            raise ConfigError(f"--op: no op {name!r} in this suite; it has {', '.join(OPS)}")


class _Session:
    """One invocation: what is checked before anything is measured, the measuring, and what is left behind."""

    def __init__(
        self, device: str, out: Path | None, report: Path | None, baseline: Path | None, json_output: bool, *,
        lines: bool = False, csv: Path | None = None,
    ) -> None:  # fmt: skip
        from accelerant.bench.compare import check_comparable
        from accelerant.bench.record import Record
        from accelerant.runtime import registry

        self.device: ComputeDevice = registry.choose(device)
        if not self.device.torch_device:
            raise ConfigError(f"--device: bench measures devices that torch has tensors on; {device} is not one")
        for name, path in (("--out", out), ("--report", report), ("--csv", csv)):
            if path is not None:
                _check_writable(name, path)
        self.out, self.report, self.csv, self.json_output = out, report, csv, json_output
        self.baseline_path = baseline
        self.baseline = None if baseline is None else Record.load(baseline)
        if self.baseline is not None:
            try:
                check_comparable(self.baseline, self.device.name)
            except FormatError as error:
                raise FormatError(f"{baseline}: {error}") from None
        self._lines = lines
        self._live = sys.stderr.isatty()

    def show(self, what: str) -> None:
        """Say on a terminal's stderr what is measured now, in one line that is written over."""
        if self._live:
            print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)

    def part(
        self,
        name: str,
        budget_s: float,
        compiled: bool = True,
        cpu: bool = False,
        names: Sequence[str] = (),
        against: Sequence[str] = (),
    ) -> Part:
        """A suite by its name."""
        from accelerant import Accelerator
        from accelerant.bench.suites import algebra, bandwidth, neural, runtime

        common: dict[str, Any] = {"budget_s": budget_s, "progress": self.show}
        accelerator = functools.partial(Accelerator, self.device.backend, self.device.index)
        calls: dict[str, Callable[[Record], None]] = {
            "neural": lambda record: neural.measure(
                record, self.device, names=names, against=against, cpu=cpu, **common
            ),
            "algebra": lambda record: algebra.measure(record, self.device, compiled=compiled, cpu=cpu, **common),
            "runtime": lambda record: runtime.measure(record, self.device, accelerator=accelerator, **common),
            "bandwidth": lambda record: bandwidth.measure(record, self.device, **common),
        }
        return name, calls[name]

    def run(self, parts: Sequence[Part], asked: Callable[[Row], bool]) -> None:
        """Measure, leave the record, the page and the table, and exit with the status."""
        from accelerant.bench.collect import collect
        from accelerant.bench.compare import compare

        found = collect(self.device, [self._announced(i, len(parts), part) for i, part in enumerate(parts)])
        self.show("")
        usage = next((error for error in found.failures.values() if isinstance(error, ConfigError)), None)
        if usage is not None and len(parts) == 1:
            raise usage
        comparison: Comparison | None = None
        if self.baseline is not None and not found.interrupted:
            comparison = compare(self.baseline, found.record, asked=asked)
        self._print(found.record, comparison)
        for name, error in found.failures.items():
            first = (str(error).splitlines() or [""])[0]
            text = first if isinstance(error, AccelerantError) else f"{type(error).__name__}: {first}"
            print(f"accelerant: the {name} suite failed: {text}", file=sys.stderr)
        if found.interrupted:
            print("accelerant: interrupted; what was measured is kept, nothing was compared", file=sys.stderr)
        self._save(found.record, comparison)
        if found.interrupted:
            raise typer.Exit(130)
        if found.failures or (comparison is not None and comparison.regressions):
            raise typer.Exit(1)

    def _announced(self, i: int, count: int, part: Part) -> Part:
        name, measure = part

        def announced(record: Record) -> None:
            if self._lines and not self._live:
                print(f"[{i + 1}/{count}] {name}", file=sys.stderr, flush=True)
            measure(record)

        return name, announced

    def _print(self, record: Record, comparison: Comparison | None) -> None:
        print(json.dumps(record.to_dict(), indent=1) if self.json_output else record.table(), flush=True)
        if comparison is not None:
            slower = f"slower than {self.baseline_path}:" if comparison.regressions else f"beside {self.baseline_path}:"
            print(f"{slower}\n{comparison.table()}", file=sys.stderr)

    def _save(self, record: Record, comparison: Comparison | None) -> None:
        """Write the record and the page, after everything was printed: a full disk takes neither the other nor that."""
        from accelerant.bench.report import write_report

        refused: list[str] = []
        calls: list[tuple[str, Path | None, Callable[[Path], None]]] = [
            ("--out", self.out, record.save),
            ("--csv", self.csv, record.save_csv),
            ("--report", self.report, lambda path: write_report(path, record, comparison)),
        ]
        for name, path, write in calls:
            if path is not None:
                try:
                    write(path)
                except OSError as error:
                    refused.append(f"{name}: {path} cannot be written: {error.strerror or error}")
        if refused:
            raise OSError("; ".join(refused))


def _check_writable(name: str, path: Path) -> None:
    """Refuse, before anything is measured, a path that could not be written afterwards."""
    if path.is_dir():
        raise ConfigError(f"{name}: {path} is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be written: {error.strerror or error}") from None
