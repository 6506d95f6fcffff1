"""`accelerant doctor`: checks of the installation, and advice where one fails."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.cli.terminal import ProgressLine, console

if TYPE_CHECKING:
    from accelerant.cli.doctor_checks import Check

__all__ = ["doctor", "register"]

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "doctor", epilog="accelerant doctor\naccelerant doctor --json > report.json", rich_help_panel="Devices"
    )(doctor)


def doctor(json_output: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False) -> None:
    """Check the installation, compilers, cache and devices, and run a computation on each device.

    Each line is ok, warning or failed. Exit status 1 if something failed.
    """
    from accelerant.cli.doctor_checks import checks

    show = ProgressLine(every_s=math.inf)  # on a terminal only
    results: list[Check] = []
    for check in checks(lambda part: None if json_output else show(f"{part} ...")):
        results.append(check)
        if not json_output:
            show("")
            _print(check)
    counts = {status: sum(check.status == status for check in results) for status in _COLOURS}
    if json_output:
        print(json.dumps({"counts": counts, "checks": [check.to_dict() for check in results]}, indent=1))
    else:
        print(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['failed']} failed")
    if counts["failed"]:
        raise typer.Exit(1)


def _print(check: Check) -> None:
    from rich.text import Text

    line = Text(f"{check.status:<8}", style=_COLOURS[check.status])
    line.append(f"{check.name:<20} ", style="bold")
    line.append(check.found, style="default")
    shown = console()
    shown.print(line, soft_wrap=True)
    if check.advice:
        advice = Text(f"{'':29}to do: {check.advice}", style="" if check.status == "ok" else "bold")
        shown.print(advice, soft_wrap=True)
