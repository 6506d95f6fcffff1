"""`accelerant top`: live figures of every device."""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated

import typer

from accelerant.cli.app import PLAIN_WIDTH
from accelerant.errors import ConfigError
from accelerant.runtime.files import escaped

if TYPE_CHECKING:
    from rich.console import RenderableType

    from accelerant.runtime.monitoring.monitor import Sample
    from accelerant.runtime.provider import ComputeDevice

__all__ = ["register", "top"]

_EPILOG = "Examples:  accelerant top   |   accelerant top --interval 0.5   |   accelerant top --json"
_SHOWN_PROCESSES = 5
_BAR = 10


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("top", epilog=_EPILOG)(top)


def top(
    interval: Annotated[float, typer.Option(help="Seconds between two readings, 0.1 to 3600.")] = 1.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one sample as JSON and exit.")] = False,
) -> None:
    """Show utilisation, memory, power, temperature, clocks and processes of every device; Ctrl-C ends it.

    If the output is not a terminal, one sample is printed.
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
        Console(width=PLAIN_WIDTH).print(_view([sample(device) for device in devices]))
        return
    _watch(devices, interval)


def _watch(devices: list[ComputeDevice], interval: float) -> None:
    from rich.live import Live

    from accelerant.runtime.monitoring.monitor import sample

    ended = threading.Event()
    # a KeyboardInterrupt raised in a finaliser would be lost; a flag is not
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
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("device", no_wrap=True)
    table.add_column("name", overflow="fold")
    for title in ("busy", "memory", "power", "temperature", "clock", "memory clock"):
        table.add_column(title, justify="right", no_wrap=True)
    for item in samples:
        table.add_row(item.device, Text(item.name), *_cells(item))
    parts: list[RenderableType] = [Text(time.strftime("%Y-%m-%d %H:%M:%S")), table]
    for item in samples:
        if item.core_percents:
            parts.append(Text(f"\n{item.device} cores: " + " ".join(f"{busy:.0f}%" for busy in item.core_percents)))
        if item.processes:
            parts += [Text(f"\n{item.device} processes", style="bold"), _processes(item)]
    reasons = [line for item in samples for line in _reasons(item)]
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
"""Figures whose absence is reported: not that a GPU has no cores, or a CPU no memory clock."""


def _reasons(item: Sample) -> list[str]:
    """Return one line for each reason, with its figures."""
    by_reason: dict[str, list[str]] = {}
    for name, why in item.reasons.items():
        if name in _NAMES:
            by_reason.setdefault(why, []).append(_NAMES[name])
    return [f"{item.device}: no {', '.join(names)}: {why}" for why, names in by_reason.items()]


def _cells(item: Sample) -> tuple[str, ...]:
    busy = memory = "-"
    if item.utilisation_percent is not None:
        full = round(item.utilisation_percent / 100 * _BAR)
        busy = f"{'█' * full}{'·' * (_BAR - full)} {item.utilisation_percent:3.0f} %"
    if item.memory_total_bytes is not None:
        used = "-" if item.memory_used_bytes is None else f"{item.memory_used_bytes / 2**30:.1f}"
        memory = f"{used} / {item.memory_total_bytes / 2**30:.1f} GiB"
    figures = ((item.power_w, "W"), (item.temperature_c, "°C"), (item.clock_mhz, "MHz"), (item.memory_clock_mhz, "MHz"))
    return busy, memory, *("-" if number is None else f"{number:.0f} {unit}" for number, unit in figures)


def _processes(item: Sample) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for process in (item.processes or ())[:_SHOWN_PROCESSES]:
        memory = "-" if process.memory_bytes is None else f"{process.memory_bytes / 2**20:,.0f} MiB"
        table.add_row(str(process.pid), memory, Text(escaped(process.name or "?")))
    return table
