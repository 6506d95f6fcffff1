"""`accelerant devices`: what is here, and why the rest is not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from accelerant.runtime.provider import ComputeDevice

__all__ = ["devices", "register"]

_EPILOG = "Examples:  accelerant devices   |   accelerant devices --json"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("devices", epilog=_EPILOG)(devices)


def devices(
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the devices of each backend; an absent backend says why.

    What --device auto takes is marked.
    """
    from accelerant.runtime import registry

    found = registry.devices()
    if json_output:
        print(json.dumps([device.to_dict() for device in found], indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("backend", "device", "architecture", "memory", ""):
        table.add_column(title, justify="right" if title == "memory" else "left")
    chosen = registry.choose()
    for device in found:
        table.add_row(*_cells(device, "automatic choice" if device == chosen else ""))
    Console().print(table)


def _cells(device: ComputeDevice, remark: str) -> tuple[str, ...]:
    from rich.markup import escape

    if not device.available:
        return device.backend, "-", "", "", escape(f"absent: {device.reason}")
    memory = f"{device.memory_bytes / 2**30:.0f} GiB"
    return f"{device.backend}:{device.index}", device.name, device.architecture, memory, remark
