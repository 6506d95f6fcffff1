"""`accelerant zk inspect`: what a .zkey, .wtns, .r1cs or .ptau file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from accelerant.cli.zk_files import shown

__all__ = ["EPILOG", "inspect"]

EPILOG = (
    "Examples:  accelerant zk inspect circuit.zkey   |   accelerant zk inspect circuit.r1cs --json   |   "
    "accelerant zk inspect downloaded.zkey --check"
)

_WIDTH = 18


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .zkey, .wtns, .r1cs or .ptau file.")],
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Look at every number and point too: reduced, on its curve, in its subgroup; takes longer."
        ),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object, and no progress.")] = False,
) -> None:
    """Say what a file of circom or snarkjs holds: curve, sizes, public inputs, points at infinity, contributions.

    Exit status 2 where the file is not what it claims; the message names the section and the offset. That a ceremony's
    contributions are genuine is not asked: snarkjs zkey verify and powersoftau verify do.
    """
    from rich.console import Console

    from accelerant.zk.formats import describe

    if json_output:
        print(json.dumps(describe(file, check=check)))
        return
    with Console(stderr=True).status("checking the file" if check else "reading the file"):
        facts = describe(file, check=check)
    for line in _lines(facts):
        print(line)


def _lines(facts: dict[str, Any]) -> list[str]:
    found = []
    for name, value in facts.items():
        title = name.removesuffix("_bytes").replace("_", " ")
        found += [f"{title if i == 0 else '':<{_WIDTH}} {line}" for i, line in enumerate(_values(name, value))]
    return found


def _values(name: str, value: Any) -> list[str]:
    """What stands beside a name, a line each."""
    if name == "points":
        return [f"{key:<18} {_points(**counts)}" for key, counts in value.items()]
    if name == "contributions":
        return [_contribution(i + 1, **each) for i, each in enumerate(value)] or ["none"]
    if name == "size_bytes":
        return [f"{value:,} bytes"]
    if value is None:
        return ["no"]
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    if isinstance(value, dict):
        return [", ".join(f"{key} {count:,}" for key, count in value.items())]
    if isinstance(value, list):
        return [", ".join(map(shown, value)) or "none"]
    return [f"{value:,}" if isinstance(value, int) else shown(value) or "none"]


def _points(points: int, infinite: int) -> str:
    return f"{points:>12,}" + (f", {infinite:,} infinite" if infinite else "")


def _contribution(index: int, kind: str, name: str, beacon: str = "", iterations_exp: int | None = None) -> str:
    what = f"{index}  {shown(name) or '(no name)'}"
    if kind == "beacon":
        hashed = "" if iterations_exp is None else f", hashed 2^{iterations_exp} times"
        what += f"  beacon {beacon}{hashed}"
    return what
