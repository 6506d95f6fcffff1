"""`accelerant bench train`: a training step of GPT-2 beside plain PyTorch, eagerly and compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.errors import ConfigError

if TYPE_CHECKING:
    from accelerant.bench.record import Record, Row

__all__ = ["EPILOG", "train"]

EPILOG = (
    "Examples:  accelerant bench train   |   accelerant bench train --batch 32 --against none --kernels   |   "
    "accelerant bench train --out now.json --compare before.json"
)


def train(
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences in a step; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    against: Annotated[
        str, typer.Option(metavar="LIST", help="Beside ours: torch (plain, eager), compile, or none.")
    ] = "torch,compile",
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Show a step of ours by kernel, on a GPU, instead of measuring.")
    ] = False,
    budget_s: Annotated[float, typer.Option(min=0.0, help="Seconds of steps behind each figure.")] = 2.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the record there as JSON too.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots there.")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="BASELINE", help="A record to compare with; exit 1 where this run is slower.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure a training step of GPT-2 124M: time, tokens a second, memory. On a CPU, of a small model."""
    from accelerant.bench.suites import training as suite
    from accelerant.cli.bench import _Session

    peers = tuple(part.strip() for part in against.split(",") if part.strip() and part.strip() != "none")
    for name in peers:
        if name not in suite.RUNNERS:
            raise ConfigError(f"--against: no peer {name!r}; there are {', '.join(suite.RUNNERS)}")
    session = _Session(device, out, report, compare, json_output)
    gpu = session.device.torch_device.startswith("cuda")
    batches = tuple(batch or ((32, 64) if gpu else (8,)))
    if kernels:
        if not gpu:
            raise ConfigError("--kernels: the profiler's times are a GPU's; take --device cuda")
        shares = suite.step_by_kernel(session.device, batches[0])
        print(
            json.dumps([share.to_dict() for share in shares], indent=1) if json_output else suite.kernel_table(shares)
        )
        return

    def measure(record: Record) -> None:
        suite.measure(record, session.device, batches=batches, against=peers, budget_s=budget_s, progress=session.show)

    def asked(row: Row) -> bool:
        return row.suite == "training" and int(row.case.split("x")[0]) in batches

    session.run([("training", measure)], asked)
