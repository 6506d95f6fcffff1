"""`accelerant bench decode`: the time of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.cli.bench_pieces import (
    BudgetS,
    Compare,
    Device,
    Json,
    LimitS,
    Out,
    Pieces,
    Report,
    Resume,
    peers_of,
)
from accelerant.errors import ConfigError

if TYPE_CHECKING:
    from accelerant.bench.journal import Journal
    from accelerant.bench.record import Record, Row
    from accelerant.runtime.provider import ComputeDevice

__all__ = ["EPILOG", "decode"]

EPILOG = (
    "Examples:  accelerant bench decode   |   accelerant bench decode --dtype int8 --against none   |   "
    "accelerant bench decode --out now.json --compare before.json"
)


def decode(
    dtype: Annotated[
        str, typer.Option("--dtype", "--dtypes", metavar="LIST", help="Of the weights: bfloat16, int8.")
    ] = "bfloat16,int8",
    device: Device = "auto",
    against: Annotated[str, typer.Option(metavar="LIST", help="Peers: torch, compile, or none.")] = "torch,compile",
    budget_s: BudgetS = 0.5,
    limit_s: LimitS = None,
    out: Out = None,
    resume: Resume = False,
    report: Report = None,
    compare: Compare = None,
    json_output: Json = False,
) -> None:
    """Measure decoding of one sequence with a Llama of 8 billion parameters: milliseconds a token, tokens a second."""
    from benchmarks import decode as suite

    whole = {"bf16": "bfloat16"}
    dtypes = tuple(whole.get(part.strip(), part.strip()) for part in dtype.split(",") if part.strip())
    peers = peers_of(against)
    for option, given in (("--dtype", (dtypes, ())), ("--against", ((), peers))):
        try:
            suite.check_names(*given)
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from None
    if not dtypes:
        raise ConfigError(f"--dtype: name one of {', '.join(suite.DTYPES)}; got {dtype!r}")

    def measure(
        record: Record, where: ComputeDevice, journal: Journal | None, until: float | None, show: Callable[[str], None]
    ) -> None:
        suite.measure(
            record, where, dtypes=dtypes, against=peers, budget_s=budget_s, journal=journal, until=until, progress=show
        )

    def asked(row: Row) -> bool:
        return row.suite == "decode" and any(each in row.case for each in dtypes)

    same = {"--against": ",".join(peers), "--budget-s": f"{budget_s:g}"}
    Pieces(device, limit_s, out, resume, report, compare, json_output).run("decode", measure, asked, same)
