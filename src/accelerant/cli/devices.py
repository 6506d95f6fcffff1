"""`accelerant devices`: the devices of this machine, and why other backends are absent."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.cli.terminal import print_table

if TYPE_CHECKING:
    from accelerant.runtime.provider import ComputeDevice

_EXAMPLES = """\
accelerant devices
accelerant devices --json"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("devices", epilog=_EXAMPLES, rich_help_panel="Devices")(devices)


def devices(json_output: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List the devices of each backend, and why a backend is absent.

    The device that --device auto means is marked.
    """
    from accelerant.runtime import registry

    listed = registry.devices()
    peers = _peers(listed)
    if json_output:
        facts = [device.to_dict() | {"peers": peers.get((device.backend, device.index), [])} for device in listed]
        print(json.dumps(facts, indent=1))
        return
    from accelerant.runtime.monitoring.monitor import free_memory

    rows = []
    chosen = registry.choose()
    for device in listed:
        if not device.available:
            size = f"{device.memory_bytes / 2**30:.0f} GiB" if device.memory_bytes else ""
            rows.append((device.backend, device.name or "-", size, f"absent: {device.reason}"))
            continue
        remarks = [device.architecture, *["automatic choice"] * (device == chosen)]
        if near := peers.get((device.backend, device.index)):
            remarks.append(f"reads the memory of {', '.join(map(str, near))}")
        try:
            total, free = free_memory(device)
            memory = f"{free / 2**30:.0f} / {total / 2**30:.0f} GiB"
        except Exception as error:
            if device.backend in registry.BACKENDS:
                raise
            memory = f"- ({type(error).__name__})"  # another package's provider takes the others' rows not away
        rows.append((device.label, device.name, memory, ", ".join(filter(None, remarks))))
    print_table(("backend", "device", "free / total", "architecture"), rows, right=("free / total",), prose=True)


def _peers(present: list[ComputeDevice]) -> dict[tuple[str, int], list[int]]:
    """Return, for each device of a backend with several, the devices whose memory it reads directly."""
    from accelerant.runtime.monitoring.monitor import peer_access

    peers: dict[tuple[str, int], list[int]] = {}
    for backend in {device.backend for device in present if device.index > 0}:
        for i, row in enumerate(peer_access(backend)):
            peers[backend, i] = [j for j, reads in enumerate(row) if reads and j != i]
    return peers
