"""`accelerant bench dp`: private training steps beside steps without privacy and Opacus, and noise alone."""

from __future__ import annotations

import json
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

__all__ = ["EPILOG", "dp"]

EPILOG = (
    "Examples:  accelerant bench dp   |   accelerant bench dp --case 64x1024/16 --against none   |   "
    "accelerant bench dp --case noise   |   accelerant bench dp --case 64x1024 --kernels   |   "
    "accelerant bench dp --device cpu --out folder --limit-s 120"
)


def dp(
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            metavar="CASE",
            help="BATCHxLENGTH, BATCHxLENGTH/PART with virtual batches of PART rows, tiny (the preset), or noise; may "
            "be repeated. By default on a GPU 64x1024/16, noise, 16x1024, 128x128; on a CPU tiny, noise.",
        ),
    ] = None,
    device: Device = "auto",
    against: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Beside ours: torch (plain, without privacy), opacus (all three of: opacus ghost, opacus fast, "
            "opacus hooks), or none. What is not installed leaves a row that says so.",
        ),
    ] = "torch,opacus",
    layers: Annotated[int, typer.Option(min=1, help="Of the model; the default is GPT-2 124M's.")] = 12,
    width: Annotated[int, typer.Option(min=1, help="Of the model; a head has 64 of it.")] = 768,
    vocab: Annotated[int, typer.Option(min=1, help="Tokens that the model knows.")] = 50304,
    draws: Annotated[
        int | None, typer.Option(min=10, max=32, help="Of noise, as a power of two. By default 28; on a CPU 22.")
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Show a private step of ours by kernel, on a GPU, instead of measuring.")
    ] = False,
    budget_s: BudgetS = 2.0,
    limit_s: LimitS = None,
    out: Out = None,
    resume: Resume = False,
    report: Report = None,
    compare: Compare = None,
    json_output: Json = False,
) -> None:
    """Measure private steps of GPT-2 124M: time, memory, share of the speed without privacy; and noise alone."""
    from accelerant.nn import GPTConfig
    from accelerant.runtime import registry
    from benchmarks import dp as suite
    from benchmarks.training import kernel_table

    peers = _peers(against, suite.PEERS)
    model = GPTConfig(vocab, 1024, layers, max(1, width // 64), width, tied=False)
    for each in case or ():
        if each != "noise":
            suite.parse_case(each, model)
    if kernels:
        where = registry.choose(device)
        if not where.torch_device.startswith("cuda"):
            raise ConfigError("--kernels: the profiler's times are a GPU's; take --device cuda")
        shown = next((each for each in case or ("64x1024",) if each != "noise"), "64x1024")
        shares = suite.step_by_kernel(where, suite.parse_case(shown, model))
        print(json.dumps([share.to_dict() for share in shares], indent=1) if json_output else kernel_table(shares))
        return

    def measure(
        record: Record, where: ComputeDevice, journal: Journal | None, until: float | None, show: Callable[[str], None]
    ) -> None:
        suite.measure(
            record, where, cases=case, model=model, draws=draws, against=peers, budget_s=budget_s, journal=journal,
            until=until, progress=show,
        )  # fmt: skip

    same = {"--against": ",".join(peers), "--budget-s": f"{budget_s:g}", "--model": f"{layers}x{width}x{vocab}"}
    Pieces(device, limit_s, out, resume, report, compare, json_output).run("dp", measure, _asked(case), same)


def _peers(against: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The peers that --against names; "opacus" for its three modes."""
    found: list[str] = []
    for name in peers_of(against):
        chosen = [each for each in known if each == name or each.split()[0] == name]
        if not chosen:
            raise ConfigError(f"--against: no peer {name!r}; there are {', '.join(known)}")
        found += [each for each in chosen if each not in found]
    return tuple(found)


def _asked(cases: list[str] | None) -> Callable[[Row], bool]:
    """Whether a baseline's row was asked for in this run."""
    from benchmarks.dp import parse_case

    named = {parse_case(each).name for each in cases or () if each != "noise"}

    def asked(row: Row) -> bool:
        if cases is None or row.suite != "dp":
            return row.suite == "dp"
        return row.case.split()[0] in named or ("noise" in cases and row.op in ("noise", "keystream"))

    return asked
