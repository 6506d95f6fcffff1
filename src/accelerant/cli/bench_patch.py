"""`accelerant bench patch`: Hugging Face models before and after accelerant.nn.patch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.errors import ConfigError

if TYPE_CHECKING:
    from accelerant.bench.record import Record, Row

__all__ = ["EPILOG", "patch"]

EPILOG = (
    "Examples:  accelerant bench patch   |   accelerant bench patch --model gpt2 --against compile   |   "
    "accelerant bench patch --model llama-1b --against none --out now.json"
)


def patch(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="gpt2, llama-1b, qwen2-0.5b, qwen3-0.6b, mistral-7b-8, bert-base or vit-base; may be repeated."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    against: Annotated[
        str, typer.Option(metavar="LIST", help="Beside eager: compile, liger, or none.")
    ] = "compile,liger",
    budget_s: Annotated[float, typer.Option(min=0.0, help="Seconds of steps behind each figure.")] = 1.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the record there as JSON too.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots there.")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="BASELINE", help="A record to compare with; exit 1 where this run is slower.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of a table.")] = False,
) -> None:
    """Measure a training step of Hugging Face models as they are, patched, compiled and with Liger: time and memory."""
    from accelerant.bench.suites import patch as suite
    from accelerant.cli.bench import _Session

    names = tuple(model or ())
    peers = tuple(part.strip() for part in against.split(",") if part.strip() and part.strip() != "none")
    try:
        suite.check_names(names, ())
    except ConfigError as error:
        raise ConfigError(f"--model: {error}") from None
    try:
        suite.check_names((), peers)
    except ConfigError as error:
        raise ConfigError(f"--against: {error}") from None
    session = _Session(device, out, report, compare, json_output)

    def measure(record: Record) -> None:
        suite.measure(
            record, session.device, names=names, runners=("eager", "accelerant", *peers), budget_s=budget_s,
            progress=session.show,
        )  # fmt: skip

    def asked(row: Row) -> bool:
        return row.suite == "patch" and (not names or row.op.removesuffix(" over eager") in names)

    session.run([("patch", measure)], asked)
