"""`accelerant bench zk`: fields, transforms, sums of multiples of points, pairings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.cli.bench_pieces import BudgetS, Compare, Device, Json, LimitS, Out, Pieces, Report, Resume
from accelerant.errors import ConfigError

if TYPE_CHECKING:
    from accelerant.bench.journal import Journal
    from accelerant.bench.record import Record, Row
    from accelerant.runtime.provider import ComputeDevice

__all__ = ["EPILOG", "zk"]

EPILOG = (
    "Examples:  accelerant bench zk   |   accelerant bench zk --only msm --only ntt   |   "
    'accelerant bench zk --only "bn254_g1 2^20" --json   |   accelerant bench zk --out folder --limit-s 300   |   '
    "accelerant bench zk --device cpu --list"
)


def zk(
    only: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Only cases with that in their names; may be repeated.")
    ] = None,
    device: Device = "auto",
    budget_s: BudgetS = 0.3,
    limit_s: LimitS = None,
    listed: Annotated[bool, typer.Option("--list", help="Measure nothing; show the cases.")] = False,
    out: Out = None,
    resume: Resume = False,
    report: Report = None,
    compare: Compare = None,
    json_output: Json = False,
) -> None:
    """Measure field products, number-theoretic transforms, sums of multiples of points, pairings, and first calls."""
    from accelerant.runtime import registry
    from benchmarks import zk as suite

    texts = tuple(only or ())
    try:
        cases = suite.cases_on(registry.choose(device), texts)
    except ConfigError as error:
        raise ConfigError(f"--only: {error}" if texts else str(error)) from None
    if listed:
        print("\n".join(case.key for case in cases))
        return

    def measure(
        record: Record, where: ComputeDevice, journal: Journal | None, until: float | None, show: Callable[[str], None]
    ) -> None:
        suite.measure(record, where, only=texts, budget_s=budget_s, journal=journal, until=until, progress=show)

    def asked(row: Row) -> bool:
        return row.suite == "zk" and any(f"{row.op} {row.case}".startswith(case.key) for case in cases)

    same = {"--budget-s": f"{budget_s:g}"}
    Pieces(device, limit_s, out, resume, report, compare, json_output).run("zk", measure, asked, same)
