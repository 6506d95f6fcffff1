"""`accelerant bench decode`: the time of a token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.errors import ConfigError

if TYPE_CHECKING:
    from accelerant.bench.record import Record, Row

__all__ = ["EPILOG", "decode"]

EPILOG = (
    "Examples:  accelerant bench decode   |   accelerant bench decode --dtype int8 --against none   |   "
    "accelerant bench decode --out now.json --compare before.json"
)


def decode(
    dtype: Annotated[
        str, typer.Option("--dtype", "--dtypes", metavar="LIST", help="Of the weights: bfloat16, int8.")
    ] = "bfloat16,int8",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    against: Annotated[str, typer.Option(metavar="LIST", help="Peers: torch, compile, or none.")] = "torch,compile",
    budget_s: Annotated[float, typer.Option(min=0.0, help="Seconds of steps behind each figure.")] = 0.5,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the record there as JSON too.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots there.")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="BASELINE", help="A record to compare with; exit 1 where this run is slower.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of a table.")] = False,
) -> None:
    """Measure decoding of one sequence with a Llama of 8 billion parameters: milliseconds a token, tokens a second."""
    from accelerant.bench.suites import decode as suite
    from accelerant.cli.bench import _Session

    whole = {"bf16": "bfloat16"}
    dtypes = tuple(whole.get(part.strip(), part.strip()) for part in dtype.split(",") if part.strip())
    peers = tuple(part.strip() for part in against.split(",") if part.strip() and part.strip() != "none")
    for option, given in (("--dtype", (dtypes, ())), ("--against", ((), peers))):
        try:
            suite.check_names(*given)
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from None
    session = _Session(device, out, report, compare, json_output)

    def measure(record: Record) -> None:
        suite.measure(record, session.device, dtypes=dtypes, against=peers, budget_s=budget_s, progress=session.show)

    def asked(row: Row) -> bool:
        return row.suite == "decode" and any(each in row.case for each in dtypes)

    session.run([("decode", measure)], asked)
