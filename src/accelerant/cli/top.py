"""`accelerant top`: every device, live."""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from accelerant.runtime.monitoring.monitor import Sample
    from accelerant.runtime.provider import ComputeDevice

__all__ = ["register", "top"]

_EPILOG = "Examples:  accelerant top   |   accelerant top --interval 0.5   |   accelerant top --json"
_PLAIN_WIDTH = 160
_SHOWN_PROCESSES = 5
_BAR = 10


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("top", epilog=_EPILOG)(top)


def top(
    interval: Annotated[float, typer.Option(help="Seconds between two looks, 0.1 to 3600.")] = 1.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one sample as JSON and end.")] = False,
) -> None:
    """Show utilisation, memory, power, temperature, clocks and processes of every device; Ctrl-C ends it.

    Where the output is no terminal, one sample is printed.
    """
    if not (math.isfinite(interval) and 0.1 <= interval <= 3600):
        raise ConfigError(f"--interval must be 0.1 to 3600 seconds, got {interval}")
    from accelerant.runtime import registry
    from accelerant.runtime.monitoring.monitor import sample

    devices = [device for device in registry.devices() if device.available]
    if json_output:
        samples = [sample(device).to_dict() for device in devices]
        print(json.dumps({"time_s": time.time(), "devices": samples}, indent=1))
        return
    from rich.console import Console

    if not sys.stdout.isatty():
        Console(width=_PLAIN_WIDTH).print(_view([sample(device) for device in devices]))
        return
    _watch(devices, interval)


def _watch(devices: list[ComputeDevice], interval: float) -> None:
    from rich.live import Live

    from accelerant.runtime.monitoring.monitor import sample

    ended = threading.Event()
    # an exception may be raised where Python drops it, in a finaliser; a flag is never lost
    usual = signal.signal(signal.SIGINT, lambda _number, _frame: ended.set())
    try:
        with Live(screen=True, auto_refresh=False) as live:
            wait = 0.0
            while not ended.wait(wait):
                began = time.monotonic()
                live.update(_view([sample(device) for device in devices], footer="Ctrl-C ends"), refresh=True)
                wait = max(0.05, interval - (time.monotonic() - began))
    finally:
        signal.signal(signal.SIGINT, usual)


def _view(samples: list[Sample], footer: str = "") -> RenderableType:
    """Devices, their processes, and why figures are absent."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("device", no_wrap=True)
    table.add_column("name", overflow="fold")
    for title in ("busy", "memory", "power", "temperature", "clock", "memory clock"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in samples:
        table.add_row(each.device, Text(each.name), *_cells(each))
    parts: list[RenderableType] = [Text(time.strftime("%Y-%m-%d %H:%M:%S")), table]
    for each in samples:
        if each.core_percents:
            parts.append(Text(f"\n{each.device} cores: " + " ".join(f"{busy:.0f}%" for busy in each.core_percents)))
        if each.processes:
            parts += [Text(f"\n{each.device} processes", style="bold"), _processes(each)]
    reasons = [line for each in samples for line in _reasons(each)]
    if reasons:
        parts.append(Text("\n" + "\n".join(reasons), style="dim"))
    if footer:
        parts.append(Text(f"\n{footer}", style="dim"))
    return Group(*parts)


_NAMES = {
    "utilisation_percent": "busy",
    "memory_used_bytes": "memory used",
    "memory_total_bytes": "memory",
    "power_w": "power",
    "temperature_c": "temperature",
    "clock_mhz": "clock",
    "processes": "processes",
}
"""Absent figures worth a line: that a GPU has no cores, or a CPU no memory clock, is none."""


def _reasons(each: Sample) -> list[str]:
    """One line a reason, with the figures that it is the reason for."""
    by_reason: dict[str, list[str]] = {}
    for name, why in each.reasons.items():
        if name in _NAMES:
            by_reason.setdefault(why, []).append(_NAMES[name])
    return [f"{each.device}: no {', '.join(names)}: {why}" for why, names in by_reason.items()]


def _cells(each: Sample) -> tuple[str, ...]:
    busy = "-"
    if each.utilisation_percent is not None:
        full = round(each.utilisation_percent / 100 * _BAR)
        busy = f"{'█' * full}{'·' * (_BAR - full)} {each.utilisation_percent:3.0f} %"
    memory = "-"
    if each.memory_total_bytes is not None:
        used = "-" if each.memory_used_bytes is None else f"{each.memory_used_bytes / 2**30:.1f}"
        memory = f"{used} / {each.memory_total_bytes / 2**30:.1f} GiB"
    return (
        busy,
        memory,
        _shown(each.power_w, "W"),
        _shown(each.temperature_c, "°C"),
        _shown(each.clock_mhz, "MHz"),
        _shown(each.memory_clock_mhz, "MHz"),
    )


def _shown(number: float | None, unit: str) -> str:
    return "-" if number is None else f"{number:.0f} {unit}"


def _processes(each: Sample) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for process in (each.processes or ())[:_SHOWN_PROCESSES]:
        memory = "-" if process.memory_bytes is None else f"{process.memory_bytes / 2**20:,.0f} MiB"
        table.add_row(str(process.pid), memory, Text(process.name or "?"))
    return table
