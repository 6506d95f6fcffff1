"""`accelerant bench patch`: Hugging Face models before and after accelerant.nn.patch."""

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

__all__ = ["EPILOG", "patch"]

EPILOG = (
    "Examples:  accelerant bench patch   |   accelerant bench patch --model gpt2 --against compile   |   "
    "accelerant bench patch --out folder --limit-s 120   |   accelerant bench patch --out folder --resume"
)


def patch(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="gpt2, llama-1b, qwen2-0.5b, qwen3-0.6b, mistral-7b-8, bert-base or vit-base; may be repeated."
        ),
    ] = None,
    device: Device = "auto",
    against: Annotated[
        str, typer.Option(metavar="LIST", help="Beside eager: compile, liger, or none.")
    ] = "compile,liger",
    compile_layers: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Compile models of N layers, and measure all runners on those too; 0: whole ones."
        ),
    ] = 0,
    budget_s: BudgetS = 0.5,
    limit_s: LimitS = None,
    out: Out = None,
    resume: Resume = False,
    report: Report = None,
    compare: Compare = None,
    json_output: Json = False,
) -> None:
    """Measure a training step of Hugging Face models as they are, patched, compiled and with Liger: time and memory."""
    from benchmarks import patch as suite

    names, peers = tuple(model or ()), peers_of(against)
    for option, given in (("--model", (names, ())), ("--against", ((), peers))):
        try:
            suite.check_names(*given)
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from None

    def measure(
        record: Record, where: ComputeDevice, journal: Journal | None, until: float | None, show: Callable[[str], None]
    ) -> None:
        suite.measure(
            record, where, names=names, runners=("eager", "accelerant", *peers), compile_layers=compile_layers,
            budget_s=budget_s, journal=journal, until=until, progress=show,
        )  # fmt: skip

    def asked(row: Row) -> bool:
        return row.suite == "patch" and (not names or row.op.split()[0] in names)

    same = {"--against": ",".join(peers), "--budget-s": f"{budget_s:g}", "--compile-layers": str(compile_layers)}
    Pieces(device, limit_s, out, resume, report, compare, json_output).run("patch", measure, asked, same)
