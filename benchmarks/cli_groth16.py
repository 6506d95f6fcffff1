"""`accelerant bench groth16`: proofs with the key ready and from files, memory, snarkjs beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.cli.bench_pieces import Compare, Device, Json, LimitS, Out, Pieces, Report, Resume, peers_of

if TYPE_CHECKING:
    from accelerant.bench.journal import Journal
    from accelerant.bench.record import Record, Row
    from accelerant.runtime.provider import ComputeDevice

__all__ = ["EPILOG", "groth16"]

EPILOG = (
    "Examples:  accelerant bench groth16 --constraints 1000 --constraints 32701   |   "
    "accelerant bench groth16 --device cpu --against none --json   |   "
    "accelerant bench groth16 --against snarkjs --snarkjs node_modules/snarkjs/build/cli.cjs --out folder"
)


def groth16(
    constraints: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N", help="Constraints of a circuit; may be repeated. 1000 to 1048001 by default."),
    ] = None,
    device: Device = "auto",
    against: Annotated[
        str, typer.Option(metavar="LIST", help="snarkjs, or none. Where it is not here its rows say so.")
    ] = "snarkjs",
    snarkjs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="snarkjs's cli.cjs, or its program; looked for if not given.")
    ] = None,
    runs: Annotated[int, typer.Option(min=2, help="Proofs, and processes, behind each figure.")] = 5,
    limit_s: LimitS = None,
    out: Out = None,
    resume: Resume = False,
    report: Report = None,
    compare: Compare = None,
    json_output: Json = False,
) -> None:
    """Measure Groth16 proofs: the key warm, by stages; the command from files; memory; snarkjs on the same files."""
    from benchmarks import groth16 as suite

    sizes, peers = tuple(dict.fromkeys(constraints or suite.CONSTRAINTS)), peers_of(against)
    suite.check_peers(peers)

    def measure(
        record: Record, where: ComputeDevice, journal: Journal | None, until: float | None, show: Callable[[str], None]
    ) -> None:
        suite.measure(
            record, where, constraints=sizes, against=peers, snarkjs=snarkjs, runs=runs, journal=journal, until=until,
            progress=show,
        )  # fmt: skip

    def asked(row: Row) -> bool:
        return row.suite == "groth16" and any(row.case.startswith(f"{suite.key_of(n)},") for n in sizes)

    same = {"--runs": str(runs), "--against": ",".join(peers) or "none"}
    Pieces(device, limit_s, out, resume, report, compare, json_output).run("groth16", measure, asked, same)
