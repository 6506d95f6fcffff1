"""`accelerant bench train`: a training step of GPT-2 beside plain PyTorch, eagerly and compiled."""

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

__all__ = ["EPILOG", "train"]

EPILOG = (
    "Examples:  accelerant bench train   |   accelerant bench train --batch 32 --against none --kernels   |   "
    "accelerant bench train --out folder --limit-s 120   |   accelerant bench train --out folder --resume"
)


def train(
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences in a step; may be repeated.")] = None,
    device: Device = "auto",
    against: Annotated[
        str, typer.Option(metavar="LIST", help="Beside ours: torch (plain, eager), compile, or none.")
    ] = "torch,compile",
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Show a step of ours by kernel, on a GPU, instead of measuring.")
    ] = False,
    precision: Annotated[str, typer.Option(help="Of the step that --kernels shows: bf16 or fp8.")] = "bf16",
    budget_s: BudgetS = 2.0,
    limit_s: LimitS = None,
    out: Out = None,
    resume: Resume = False,
    report: Report = None,
    compare: Compare = None,
    json_output: Json = False,
) -> None:
    """Measure a training step of GPT-2 124M: time, tokens a second, memory. On a CPU, of a small model."""
    from accelerant.runtime import registry
    from benchmarks import training as suite

    peers = peers_of(against)
    for name in peers:
        if name not in suite.RUNNERS:
            raise ConfigError(f"--against: no peer {name!r}; there are {', '.join(suite.RUNNERS)}")
    if precision not in ("bf16", "fp8") or (precision != "bf16" and not kernels):
        raise ConfigError(f"--precision: bf16, or with --kernels fp8; got {precision!r}")
    where = registry.choose(device)
    gpu = where.torch_device.startswith("cuda")
    batches = tuple(batch or ((32, 64) if gpu else (8,)))
    if kernels:
        if not gpu:
            raise ConfigError("--kernels: the profiler's times are a GPU's; take --device cuda")
        shares = suite.step_by_kernel(where, batches[0], float8=precision == "fp8")
        print(
            json.dumps([share.to_dict() for share in shares], indent=1) if json_output else suite.kernel_table(shares)
        )
        return

    def measure(
        record: Record, where: ComputeDevice, journal: Journal | None, until: float | None, show: Callable[[str], None]
    ) -> None:
        suite.measure(
            record, where, batches=batches, against=peers, budget_s=budget_s, journal=journal, until=until,
            progress=show,
        )  # fmt: skip

    def asked(row: Row) -> bool:
        return row.suite == "training" and row.case.split("x")[0] in map(str, batches)

    same = {"--against": ",".join(peers), "--budget-s": f"{budget_s:g}"}
    Pieces(device, limit_s, out, resume, report, compare, json_output).run("training", measure, asked, same)
