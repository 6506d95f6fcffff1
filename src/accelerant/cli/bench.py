"""`accelerant bench`: measure, beside the peers, in one run."""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.errors import AccelerantError, ConfigError, FormatError

if TYPE_CHECKING:
    import torch

    from accelerant.bench.collect import Part
    from accelerant.bench.compare import Comparison
    from accelerant.bench.record import Record, Row
    from accelerant.bench.suites.plan import Planned
    from accelerant.runtime.provider import ComputeDevice

__all__ = ["Progress", "algebra", "bandwidth", "check_writable", "everything", "neural", "register", "runtime"]

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
        help="Peers: torch, compile, liger, quack, cudnn, flash, flash_attn_4, cublaslt, or none; on a CPU torch by "
        "default. What is not installed leaves a row that says so.",
    ),
]
_Csv = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows there as CSV too.")]
_Ops = Annotated[list[str] | None, typer.Option(help="Only this op of the neural suite; may be repeated.")]
_NEURAL_EPILOG = (
    "Examples:  accelerant bench neural   |   "
    "accelerant bench neural --op attention --against torch,cudnn,flash,flash_attn_4   |   "
    "accelerant bench neural --out now.json --compare before.json   |   "
    "accelerant bench neural --device cpu   |   "
    "accelerant bench neural --dtypes bf16,fp16,fp32 --odd --sweep --out folder   |   "
    "accelerant bench neural --no-tables --odd --sweep --out folder"
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
    for name in _MOVED:
        group.command(name, hidden=True, context_settings=_ANY_ARGUMENTS)(_moved(name))
    app.add_typer(group, name="bench")


_MOVED = ("patch", "decode", "train", "curve", "dp", "zk", "groth16")
_ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}


def _moved(name: str) -> Callable[[], None]:
    """Return a command that names the one that replaced it."""

    def command() -> None:
        raise ConfigError(
            f"bench {name} is not in the installed package: run `python -m benchmarks {name}` in a checkout"
        )

    return command


def neural(
    op: _Ops = None,
    device: _Device = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            "--dtypes",
            metavar="LIST",
            help="bf16, fp16, fp32 (or bfloat16, ...), the first one more thoroughly; by default each case's.",
        ),
    ] = None,
    against: _Against = None,
    tables: Annotated[bool, typer.Option(help="The ops' tables; without them odd sizes or the sweep alone.")] = True,
    odd: Annotated[bool, typer.Option("--odd", help="Odd sizes too, beside torch.")] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Ops of rows from 2^10 to 2^28 elements too, beside torch and compile.")
    ] = False,
    sweep_to: Annotated[int, typer.Option(min=10, max=30, help="The sweep's end, as a power of two.")] = 28,
    budget_s: _Budget = 0.1,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile everything first; by default 1 on a CPU.")
    ] = None,
    limit_s: Annotated[
        float | None, typer.Option(min=0.0, help="Begin no case after so many seconds; --resume goes on later.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Measure nothing; show the cases and about how long.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A .json file for the record; or a folder, which gets record.json, record.csv, report.html, and "
            "rows.jsonl as they are measured.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run whose folder --out names.")] = False,
    csv: _Csv = None,
    report: _Report = None,
    compare: _Compare = None,
    json_output: _Json = False,
) -> None:
    """Measure the neural ops, forward and backward, beside torch and other libraries. Losses come first."""
    from accelerant.bench.journal import Journal
    from accelerant.bench.suites import neural as suite
    from accelerant.bench.suites.plan import plan, sweep_sizes

    until = None if limit_s is None else time.monotonic() + limit_s
    wanted = _dtypes(dtype)
    _check_ops(op)
    chosen = _peers(against)
    if not (tables or odd or sweep):
        raise ConfigError("--no-tables: nothing is left to measure; add --odd or --sweep")
    folder = out if out is not None and (out.is_dir() or not out.suffix) else None
    if resume and folder is None:
        raise ConfigError("--resume: --out must name the folder of the run to go on with")
    if folder is not None:
        _make_folder(folder)
        out, csv, report = folder / "record.json", csv or folder / "record.csv", report or folder / "report.html"
    session = _Session(device, out, report, compare, json_output, csv=csv)
    gpu = session.device.torch_device.startswith("cuda")
    named = _peers_on(session.device) if chosen is None else chosen
    planned = plan(
        op or (), dtypes=[each for _, each in wanted], against=named, budget_s=budget_s, gpu=gpu, tables=tables,
        odd=odd, sweep=sweep_sizes(sweep_to) if sweep else (),
    )  # fmt: skip
    processes = jobs or (_compiling_jobs() if gpu and "compile" in named else 1)
    if listed:
        _list(planned, processes, json_output)
        return

    asked_for = {
        "--against": ",".join(named) or "none",
        "--dtypes": ",".join(name for name, _ in wanted) or "each case's",
        "--budget-s": f"{budget_s:g}",
    }

    def measure(record: Record) -> None:
        try:
            journal = None if folder is None else Journal(folder / "rows.jsonl", record, resume=resume, asked=asked_for)
        except FormatError as error:  # a usage error writes nothing: the record in the folder stays
            raise ConfigError(f"--resume: {error}; another folder starts anew") from None
        if processes > 1:
            from accelerant.bench.suites.warm import compile_ahead, share_caches

            share_caches()
            left = [each for each in planned if journal is None or each.key not in journal.done]
            most_s = _COMPILE_S if limit_s is None else min(_COMPILE_S, limit_s / 3)
            missing = compile_ahead(left, session.device, processes, limit_s=most_s, progress=session.show)
            record.notes += [missing] if missing else []
        suite.measure_planned(
            record, session.device, planned, journal=journal, budget_s=budget_s, until=until, progress=session.show
        )

    parts = {part for part, is_asked in (("", tables), ("odd", odd), ("sweep", sweep)) if is_asked}

    def asked(row: Row) -> bool:
        of_dtype = not wanted or any(f" {name}" in row.case for name, _ in wanted)
        return row.suite == "neural" and row.part in parts and (not op or row.op in op) and of_dtype

    session.run([("neural", measure)], asked)


_COMPILE_S = 90.0
"""Seconds that compiling ahead may take; what is not compiled by then is compiled as it is measured."""


def _compiling_jobs() -> int:
    """A process a core, less two for the device's sake."""
    import os

    return max(1, min(14, (os.cpu_count() or 1) - 2))


def _dtypes(text: str | None) -> list[tuple[str, torch.dtype]]:
    """The dtypes that `--dtype` names, with their whole names."""
    import torch

    whole = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    found = {}
    for each in [] if text is None else text.split(","):
        name = whole.get(each.strip(), each.strip())
        if name not in known:
            raise ConfigError(f"--dtype: wanted float32, bfloat16 or float16, got {each!r}")
        found[name] = known[name]
    return list(found.items())


def _list(planned: Sequence[Planned], jobs: int, json_output: bool) -> None:
    """Show what would be measured."""
    if json_output:
        print(json.dumps([{"case": each.key, "about_s": round(each.estimate_s, 3)} for each in planned], indent=1))
        return
    for each in planned:
        print(f"{each.estimate_s:6.2f} s  {each.figures:2d} figures  {each.key}")
    compile_s = sum(each.compile_s for each in planned if each.part != "sweep") / jobs if jobs > 1 else 0.0
    measure_s, figures = sum(each.estimate_s for each in planned), sum(each.figures for each in planned)
    print(
        f"{len(planned)} cases, about {figures} figures: on a large GPU about {measure_s:.0f} s, after about "
        f"{compile_s:.0f} s of compiling in {jobs} processes"
    )


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
    peers = _peers(against)
    session = _Session(device, out, report, compare, json_output, lines=True, csv=csv)
    named = _peers_on(session.device) if peers is None else peers
    parts = [session.part(name, budget_s, "compile" in named, cpu, op or (), named) for name in chosen]
    session.run(parts, lambda row: row.suite in chosen and (row.suite != "neural" or not op or row.op in op))


def _peers(against: str | None) -> tuple[str, ...] | None:
    """The peers that `--against` names, each once; None where it is absent."""
    from accelerant.bench.suites.neural import check_against

    if against is None:
        return None
    named = tuple(dict.fromkeys(part.strip() for part in against.split(",") if part.strip() not in ("", "none")))
    try:
        check_against(named)
    except ConfigError as error:
        raise ConfigError(f"--against: {error}") from None
    return named


def _peers_on(device: ComputeDevice) -> tuple[str, ...]:
    """Those that come with a torch for the device."""
    from accelerant.bench.suites.neural import AGAINST, AGAINST_ON_CPU

    return AGAINST if device.torch_device.startswith("cuda") else AGAINST_ON_CPU


def _check_ops(names: Sequence[str] | None) -> None:
    from accelerant.bench.suites.neural import OPS

    for name in names or ():
        if name not in OPS:
            raise ConfigError(f"--op: no op {name!r} in this suite; it has {', '.join(OPS)}")


_SAY_EACH_S = 15.0


def _columns() -> int:
    """Of the terminal, so that a line that is written over stays one line."""
    return max(20, shutil.get_terminal_size().columns - 1)


class Progress:
    """Says on a terminal's stderr what is measured now, in one line that is written over; else a line now and then.

    The first line comes late enough for a short run to have none. An empty text clears the line.
    """

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self._said = time.monotonic()

    def __call__(self, what: str) -> None:
        """Say it."""
        if self.live:
            print(f"\r\x1b[K{what[: _columns()]}", end="", file=sys.stderr, flush=True)
        elif what and time.monotonic() - self._said > _SAY_EACH_S:
            self._said = time.monotonic()
            print(what, file=sys.stderr, flush=True)


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
        if self.device.torch_device.startswith("cuda") and self.device.index:
            import torch

            torch.cuda.set_device(self.device.index)  # clocks and flushes work on the current device
        for name, path in (("--out", out), ("--report", report), ("--csv", csv)):
            if path is not None:
                check_writable(name, path)
        self.out, self.report, self.csv, self.json_output = out, report, csv, json_output
        self.baseline_path = baseline
        self.baseline = None if baseline is None else Record.load(baseline)
        if self.baseline is not None:
            try:
                check_comparable(self.baseline, self.device.name)
            except FormatError as error:
                raise FormatError(f"{baseline}: {error}") from None
        self._lines = lines
        self.show = Progress()

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
            if self._lines and not self.show.live:
                print(f"[{i + 1}/{count}] {name}", file=sys.stderr, flush=True)
            measure(record)

        return name, announced

    def _print(self, record: Record, comparison: Comparison | None) -> None:
        print(record.to_json() if self.json_output else record.table(), flush=True)
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


def _make_folder(path: Path) -> None:
    """See to it that the folder that `--out` names is there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: folder {path} cannot be made: {error.strerror or error}") from None


def check_writable(name: str, path: Path) -> None:
    """Refuse, before anything is measured, a path that could not be written afterwards."""
    if path.is_dir():
        raise ConfigError(f"{name}: {path} is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be written: {error.strerror or error}") from None
