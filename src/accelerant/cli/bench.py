"""`accelerant bench`: one command for each suite, derived from the suite's options, and the comparison of records.

`run_command(SuiteClass)` is the entry point of the suites in the repository's benchmarks/ folder.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.cli.app import exit_status
from accelerant.cli.help import Application, Group, HelpGroup, option, parameters_of, with_parameters
from accelerant.cli.terminal import ProgressLine
from accelerant.errors import AccelerantError, ConfigError, FormatError
from accelerant.runtime.files import escaped, write_atomic

if TYPE_CHECKING:
    from accelerant.bench.record import BenchmarkRecord
    from accelerant.bench.report import Comparison
    from accelerant.bench.suite import Suite

_SUITES = {
    "neural": "accelerant.bench.neural:NeuralSuite",
    "algebra": "accelerant.bench.suites:AlgebraSuite",
    "runtime": "accelerant.bench.suites:RuntimeSuite",
    "bandwidth": "accelerant.bench.suites:BandwidthSuite",
}
"""Command -> module and class; a suite imports torch, so it is loaded when its command runs."""

_Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel="Results")]


class _SuiteGroup(HelpGroup):
    """A command group that loads a suite's module when its command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # Any: click's own Context or typer's copy, by typer's version
        """Return the names of the suites and of the other commands."""
        return [*_SUITES, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None where there is none of the name."""
        program = f"accelerant bench {cmd_name}"
        if cmd_name in _SUITES:
            return typer.main.get_command(_suite_app(_load(cmd_name), program))
        if (found := super().get_command(ctx, cmd_name)) is None and cmd_name in _ops():
            found = typer.main.get_command(_suite_app(_load("neural"), program, op=cmd_name))
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of the arguments."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            known = [*self.list_commands(ctx), *_ops()]
            close = get_close_matches(name, known)
            others = f": close are {', '.join(close)}" if close else f"; there are {', '.join(known)}"
            raise ConfigError(f"no suite or op {name!r}{others}")
        return super().resolve_command(ctx, args)


def _ops() -> Collection[str]:
    from accelerant.ops.registry import public_ops

    return public_ops()


def _load(name: str) -> type[Suite]:
    module, _, kind = _SUITES[name].partition(":")
    suite: type[Suite] = getattr(importlib.import_module(module), kind)
    return suite


def run_command(kind: type[Suite], arguments: list[str] | None = None) -> None:
    """Run a suite's command line, by default the process's, and exit; for `python -m benchmarks.NAME`."""
    program = f"python -m {kind.__module__ if kind.__module__ != '__main__' else f'benchmarks.{kind.name}'}"
    with exit_status():
        _suite_app(kind, program)(args=sys.argv[1:] if arguments is None else arguments, prog_name=program)


# --- a suite's options -----------------------------------------------------------------------------------------------
def _suite_app(kind: type[Suite], program: str, op: str = "") -> typer.Typer:
    """Return the application of a suite's command; `op` names the only op that it measures."""
    app = Application()
    examples = _OP_EXAMPLES if op else kind.examples
    app.command(op or kind.name, epilog="\n".join(f"{program} {example}".strip() for example in examples))(
        _suite_command(kind, op)
    )
    return app


_OP_EXAMPLES = (
    "--size 1024",
    "--size 128..4096 --dtype float32 --dtype bfloat16",
    "--against torch --against compile --out now.json",
)


def _suite_command(kind: type[Suite], op: str = "") -> Callable[..., None]:
    """Return a function whose parameters are the suite's options and those that all suites share."""
    given: dict[str, Any] = {"op": (op,)} if op else {}
    declared = [one.name for one in fields(kind) if "option" in one.metadata and one.name not in given]
    parameters = [one for one in parameters_of(kind) if one.name in declared]

    def command(**values: Any) -> None:
        own = {name: _value(values.pop(name)) for name in declared}
        suite = kind(**given, **{name: value for name, value in own.items() if value is not None})
        _RunOptions(**values).run([suite], kind.name)

    text = f"Measure {op} and torch's, forward and backward; with --size at sizes of your own." if op else kind.__doc__
    return with_parameters(command, [*parameters, *parameters_of(_RunOptions)], text or "")


def _value(value: Any) -> Any:
    """Convert an option's value to the field's: lists to tuples without repetitions, "none" to an empty one."""
    if not isinstance(value, list):
        return value
    return tuple(dict.fromkeys(one for one in value if one != "none")) if value else None


# --- a run -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class _RunOptions:
    """The options that all suites share."""

    device: _Device = "auto"
    max_seconds: float | None = option("Begin no case after so many seconds; --resume goes on later.", min=0.0)
    listed: bool = option("Measure nothing; show the cases.", "--list", default=False)
    out: Path | None = option(
        "A .json file for the record; or a folder for record.json, record.csv, report.html, and rows.jsonl as they are "
        "measured.",
        metavar="PATH",
        panel="Results",
    )
    resume: bool = option("Go on with the run whose folder --out names.", panel="Results", default=False)
    csv: Path | None = option("Write the rows there as CSV too.", metavar="FILE", panel="Results")
    report: Path | None = option("Write a page with plots there.", metavar="FILE", panel="Results")
    compare: Path | None = option(
        "A record to compare with; exit 1 where this run is slower.", metavar="BASELINE", panel="Results"
    )
    json_output: _Json = False

    def run(self, suites: Sequence[Suite], name: str = "") -> None:
        """Check the options, measure, print and write the results, and exit; `name` is that of an only suite."""
        from accelerant import Accelerator
        from accelerant.bench.record import BenchmarkRecord, Environment, Journal
        from accelerant.bench.report import compare
        from accelerant.bench.suite import SuiteRun, collect
        from accelerant.runtime import registry

        until = None if self.max_seconds is None else time.monotonic() + self.max_seconds
        device = registry.find_device(self.device, torch_tensors=True)
        if not device.torch_device:
            raise ConfigError(f"--device: bench measures devices that torch has tensors on; {self.device} is not one")
        if device.torch_device.startswith("cuda") and device.index:
            import torch

            torch.cuda.set_device(device.index)  # timing events and cache flushes use the current device
        suites = [suite.resolve(device) for suite in suites]
        show = ProgressLine()
        accelerator = functools.partial(Accelerator, device.backend, device.index)
        run = SuiteRun(
            device, BenchmarkRecord(Environment.of(device)), until=until, progress=show, accelerator=accelerator
        )
        if self.listed:
            _show_cases([case for suite in suites for case in suite.cases(run)], self.json_output)
            return
        out, csv, report, journal = self._files()
        baseline = self._baseline(device.name)
        if journal is not None:
            options = {flag: value for suite in suites for flag, value in suite.resumable().items()}
            try:
                run = replace(run, journal=Journal(journal, run.record, resume=self.resume, options=options))
            except FormatError as refused:  # a usage error writes nothing: the record in the folder stays
                raise ConfigError(f"--resume: {refused}; name another folder to start over") from None
        outcome = collect(suites, run, begin=lambda text: None if name or show.live else print(text, file=sys.stderr))
        show("")
        if name and isinstance(error := outcome.failures.get(name), ConfigError):
            raise error
        comparison = None
        if baseline is not None and not outcome.interrupted:
            comparison = compare(baseline, run.record, asked=lambda row: any(one.covers(row) for one in suites))
        print(run.record.to_json() if self.json_output else _lines(run.record.table()), flush=True)
        if comparison is not None:
            word = "slower than" if comparison.regressions else "compared with"
            print(f"{word} {escaped(self.compare)}:\n{_lines(comparison.table())}", file=sys.stderr)
        for suite, error in outcome.failures.items():
            first = (str(error).splitlines() or [""])[0]
            text = first if isinstance(error, AccelerantError) else f"{type(error).__name__}: {first}"
            print(f"accelerant: the {suite} suite failed: {text}", file=sys.stderr)
        if outcome.interrupted:
            print("accelerant: interrupted; what was measured is kept, nothing was compared", file=sys.stderr)
        _save(run.record, comparison, out, csv, report)
        if outcome.interrupted:
            raise typer.Exit(130)
        if outcome.failures or (comparison is not None and comparison.regressions):
            raise typer.Exit(1)

    def _files(self) -> tuple[Path | None, Path | None, Path | None, Path | None]:
        """Return the paths of record, CSV, page and journal, after checking that they can be written."""
        out, csv, report, journal = self.out, self.csv, self.report, None
        folder = out if out is not None and (out.is_dir() or not out.suffix) else None
        if self.resume and folder is None:
            raise ConfigError("--resume: --out must name the folder of the run to go on with")
        if folder is None and out is not None and out.suffix.lower() != ".json":
            raise ConfigError(f"--out: {out} must be a .json file, or a folder")
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--out: folder {folder} cannot be made: {error.strerror or error}") from None
            out, csv, report = folder / "record.json", csv or folder / "record.csv", report or folder / "report.html"
            journal = folder / "rows.jsonl"
        for name, path, others in (("--out", out, ()), ("--report", report, (out,)), ("--csv", csv, (out, report))):
            if path is not None:
                check_writable(name, path, *others)
        return out, csv, report, journal

    def _baseline(self, device: str) -> BenchmarkRecord | None:
        from accelerant.bench.record import BenchmarkRecord
        from accelerant.bench.report import check_comparable

        if self.compare is None:
            return None
        baseline = BenchmarkRecord.load(self.compare)
        try:
            check_comparable(baseline, device)
        except FormatError as error:
            raise FormatError(f"{self.compare}: {error}") from None
        return baseline


def _show_cases(cases: Sequence[Any], json_output: bool) -> None:
    if json_output:
        print(json.dumps([{"case": case.key, "about_s": case.estimate_s} for case in cases], indent=1))
        return
    for case in cases:
        print(case.key if case.estimate_s is None else f"{case.estimate_s:6.2f} s  {case.key}")
    known = [case.estimate_s for case in cases if case.estimate_s is not None]
    print(f"{len(cases)} cases" + (f", about {sum(known):.0f} s on a large GPU, without compiling" if known else ""))


def _save(
    record: BenchmarkRecord, comparison: Comparison | None, out: Path | None, csv: Path | None, report: Path | None
) -> None:
    """Write the files; one that cannot be written keeps none of the others from being written."""
    from accelerant.bench.report import write_report

    refused: list[str] = []
    page = functools.partial(write_report, record=record, comparison=comparison)
    for name, path, write in (("--out", out, record.save), ("--csv", csv, record.save_csv), ("--report", report, page)):
        if path is not None:
            try:
                write(path)
            except OSError as error:
                refused.append(f"{name}: {path} cannot be written: {error.strerror or error}")
    if refused:
        raise OSError("; ".join(refused))


# --- bench all, bench compare ----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class _AllCommand(_RunOptions):
    """Run every suite. One that fails, or Ctrl-C, leaves what was measured."""

    suite: list[str] | None = option(f"Of {', '.join(_SUITES)}; may be repeated.")
    op: list[str] | None = option("Only this op of the neural suite; may be repeated.")
    budget_s: float = option("Seconds of calls behind each figure.", min=0.0, default=0.3)
    against: list[str] | None = option("A peer of the neural suite: see bench neural --help; may be repeated.")
    cpu: bool = option("Add a CPU column where the device is another.", default=True)

    def run(self, suites: Sequence[Suite] = (), name: str = "") -> None:
        """Run the chosen suites."""
        from accelerant.bench.suite import check_names

        check_names("--suite", "suite", self.suite or (), tuple(_SUITES))
        peers = _value(self.against)
        compiled = {} if peers is None else {"compiled": "compile" in peers}
        neural = {"op": tuple(self.op or ())} | ({} if peers is None else {"against": peers})
        own: dict[str, dict[str, Any]] = {"neural": neural, "algebra": compiled}
        chosen = [one for one in _SUITES if one in (self.suite or _SUITES)]
        super().run([_load(one)(**{"budget_s": self.budget_s, "cpu": self.cpu, **own.get(one, {})}) for one in chosen])


def compare_records(
    baseline: Annotated[Path, typer.Argument(help="The record to compare with.")],
    record: Annotated[Path, typer.Argument(help="The record to judge, of the same device.")],
) -> None:
    """Compare two records; exit 1 where a row of the second is slower or missing."""
    from accelerant.bench.record import BenchmarkRecord
    from accelerant.bench.report import compare

    comparison = compare(BenchmarkRecord.load(baseline), BenchmarkRecord.load(record))
    print(_lines(comparison.table()))
    if comparison.regressions:
        raise typer.Exit(1)


def check(
    floors: Annotated[Path, typer.Argument(help="The least speeds, a TOML file.")],
    records: Annotated[
        list[Path] | None, typer.Argument(metavar="[RECORD]...", help="Records to check; by default it measures now.")
    ] = None,
    op: list[str] | None = option("Only floors of this op; may be repeated."),
    write: bool = option("Write the file from the records instead.", default=False),
    margin: float = option("With --write: share of the records' speeds to require.", min=0.01, max=1.0, default=0.9),
    device: _Device = "auto",
    budget_s: float = option(
        "Seconds of calls behind each figure measured now.", "--budget-seconds", min=0.0, default=0.1
    ),
    max_seconds: float | None = option("Begin no case after so many seconds.", min=0.0),
    json_output: _Json = False,
) -> None:
    """Check records, or the ops on this device now, against floors. Exit 1 with a table of what is below."""
    from accelerant.bench.record import BenchmarkRecord
    from accelerant.bench.report import check_floors, floors_text, read_floors
    from accelerant.bench.subjects import OPS
    from accelerant.bench.suite import check_names
    from accelerant.runtime import registry

    loaded = [BenchmarkRecord.load(path) for path in records or ()]
    if write:
        if not loaded:
            raise ConfigError("--write: name the records to make floors from")
        check_writable("FLOORS", floors, *records or ())
        write_atomic(floors, floors_text(loaded, margin).encode())
        return
    known = read_floors(floors)
    check_names("--op", "op", op or (), sorted({*OPS, *(floor.key.split()[0] for floor in known)}))
    names = [record.environment.device for record in loaded] or [registry.find_device(device, torch_tensors=True).name]
    mine = [floor for floor in known if any(floor.device in name for name in names)]
    mine = [floor for floor in mine if not op or any(f"{floor.key} ".startswith(f"{one} ") for one in op)]
    if not mine:
        tables = ", ".join(sorted({floor.device for floor in known})) or "none"
        asked = "of these ops " if op else ""
        raise FormatError(f"{floors}: no floors {asked}for {names[0]}; it has tables for {tables}")
    unmeasured, failed = list[str](), False
    if not loaded:
        unmeasured = [floor.key for floor in mine if floor.key.split()[0] not in OPS]
        mine = [floor for floor in mine if floor.key not in unmeasured]
        record, failed = _measured(
            tuple(dict.fromkeys(floor.key.split()[0] for floor in mine)), device, budget_s, max_seconds
        )
        loaded = [record]
    result = replace(check_floors(mine, loaded), unmeasured=tuple(unmeasured))
    print(json.dumps(result.to_dict(), indent=1) if json_output else _lines(result.table()))
    if result.missed or failed:
        raise typer.Exit(1)


def _measured(
    ops: tuple[str, ...], device: str, budget_s: float, max_seconds: float | None
) -> tuple[BenchmarkRecord, bool]:
    """Measure ops and torch's; return the record, and whether a case failed."""
    from accelerant.bench.neural import NeuralSuite
    from accelerant.bench.record import BenchmarkRecord, Environment
    from accelerant.bench.suite import SuiteRun, collect
    from accelerant.runtime import registry

    chosen, show = registry.find_device(device, torch_tensors=True), ProgressLine()
    until = None if max_seconds is None else time.monotonic() + max_seconds
    run = SuiteRun(chosen, BenchmarkRecord(Environment.of(chosen)), until=until, progress=show)
    suites = [NeuralSuite(op=ops, against=("torch",), budget_s=budget_s).resolve(chosen)] if ops else []
    outcome = collect(suites, run)
    show("")
    for error in outcome.failures.values():
        print(f"accelerant: {error}", file=sys.stderr)
    if outcome.interrupted:
        raise typer.Exit(130)
    return run.record, bool(outcome.failures)


def _lines(table: str) -> str:
    """Return a table, which may have names from a file, without control characters."""
    return "\n".join(map(escaped, table.splitlines()))


bench = Group(
    "Measure the kernels and the runtime, compared with their peers. `accelerant bench OP` measures one op, with "
    "--size at sizes of your own: `accelerant bench gelu --help`.",
    {
        _AllCommand: "all --out now.json --report report.html\naccelerant bench all --compare before.json\n"
        "accelerant bench all --suite algebra --budget-seconds 0.1",
        compare_records: "compare before.json after.json",
        check: "check floors.toml\naccelerant bench check floors.toml --op gelu\n"
        "accelerant bench check floors.toml now.json\naccelerant bench check floors.toml now.json --write",
    },
    cls=_SuiteGroup,
)


# --- paths -----------------------------------------------------------------------------------------------------------
def check_writable(name: str, path: Path, *others: Path | None) -> None:
    """Raise ConfigError for a path, given by the option `name`, that could not be written, or is one of the others."""
    if path.is_dir():
        raise ConfigError(f"{name}: {path} is a folder; name a file")
    if os.path.realpath(path) in {os.path.realpath(other) for other in others if other is not None}:
        raise ConfigError(f"{name}: {path} is another file of this command: give another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be written: {error.strerror or error}") from None
