"""`accelerant bench`: measure, beside the peers, in one run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.errors import ConfigError

if TYPE_CHECKING:
    from accelerant.bench.record import Record

__all__ = ["neural", "register", "runtime"]

_Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
_Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the record there as JSON too.")]
_Compare = Annotated[
    Path | None, typer.Option(metavar="BASELINE", help="A record to compare with; exit 1 where this run is slower.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of a table.")]
_NEURAL_EPILOG = (
    "Examples:  accelerant bench neural   |   accelerant bench neural --op gelu --op softmax --json   |   "
    "accelerant bench neural --out now.json --compare before.json"
)


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Measure the kernels and the runtime beside their peers.", no_args_is_help=True)
    group.command("neural", epilog=_NEURAL_EPILOG)(neural)
    group.command("runtime", epilog="Example:  accelerant bench runtime --json")(runtime)
    app.add_typer(group, name="bench")


def neural(
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be repeated.")] = None,
    device: _Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    budget_s: Annotated[float, typer.Option(min=0.0, help="Seconds of calls behind each figure.")] = 0.3,
    compiled: Annotated[bool, typer.Option(help="With torch.compile among the peers.")] = True,
    out: _Out = None,
    compare: _Compare = None,
    json_output: _Json = False,
) -> None:
    """Measure the neural ops, forward and backward, beside torch and torch.compile. Losses come first."""
    import torch

    from accelerant.bench.suites import neural as suite
    from accelerant.runtime import registry

    dtypes = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in dtypes:
        raise ConfigError(f"--dtype: wanted float32, bfloat16 or float16, got {dtype!r}")
    chosen = registry.choose(device)
    with _Progress(json_output) as progress:
        record = suite.run(
            chosen, names=op or (), dtype=dtypes[dtype], budget_s=budget_s, compiled=compiled, progress=progress.show
        )
    _finish(record, out, compare, json_output)


def runtime(device: _Device = "auto", out: _Out = None, compare: _Compare = None, json_output: _Json = False) -> None:
    """Measure what a launch, an eager op call and a compile cost."""
    from accelerant.bench.suites import runtime as suite
    from accelerant.runtime import registry

    chosen = registry.choose(device)
    with _Progress(json_output) as progress:
        record = suite.run(chosen, progress=progress.show)
    _finish(record, out, compare, json_output)


class _Progress:
    """A line on a terminal's stderr that says what is measured now; nothing elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._live = sys.stderr.isatty() and not quiet

    def __enter__(self) -> _Progress:
        return self

    def show(self, what: str) -> None:
        if self._live:
            print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _finish(record: Record, out: Path | None, baseline: Path | None, json_output: bool) -> None:
    from accelerant.bench.record import Record, compare

    if out is not None:
        record.save(out)
    print(json.dumps(record.to_dict(), indent=1) if json_output else record.table())
    if baseline is not None:
        slower = compare(Record.load(baseline), record)
        for line in slower:
            print(f"slower than {baseline}: {line}", file=sys.stderr)
        if slower:
            raise typer.Exit(1)
