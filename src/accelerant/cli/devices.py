"""`accelerant devices` and `top`: the devices of this machine, why other backends are absent, and live figures."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelerant.cli.help import examples
from accelerant.cli.terminal import console, is_live, print_table, table_lines, wrapped
from accelerant.errors import ConfigError
from accelerant.runtime.files import escaped

if TYPE_CHECKING:
    from rich.text import Text

    from accelerant.runtime.monitoring import ProcessMemory, Sample
    from accelerant.runtime.provider import ComputeDevice

_BAR = 10
_SORTS = {"m": "memory", "p": "pid", "n": "name"}  # key -> order of the processes


@examples("accelerant devices\naccelerant devices --json")
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
    chosen = registry.find_device()
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


# --- top --------------------------------------------------------------------------------------------------------------


@examples("accelerant top\naccelerant top --interval 0.5\naccelerant top --json")
def top(
    interval: Annotated[float, typer.Option(help="Seconds between two readings, 0.1 to 3600.")] = 1.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one sample as JSON and exit.")] = False,
) -> None:
    """Show utilization, memory, power, temperature, clocks and processes of every device; q or Ctrl-C ends it.

    The keys m, p and n sort the processes by memory, pid or name. If the output is not a terminal, one sample is
    printed.
    """
    if not (math.isfinite(interval) and 0.1 <= interval <= 3600):
        raise ConfigError(f"--interval must be 0.1 to 3600 seconds, got {interval}")
    from accelerant.runtime import registry
    from accelerant.runtime.monitoring.monitor import sample

    devices = [device for device in registry.devices() if device.available]
    if json_output:
        samples = [sample(device).to_dict() for device in devices]
        print(json.dumps({"time_s": time.time(), "devices": samples}, indent=1))
    elif is_live(sys.stdout):
        _watch(devices, interval)
    else:
        shown = console()
        for line in _view([sample(device) for device in devices], shown.width):
            shown.print(line, soft_wrap=True)


def _watch(devices: list[ComputeDevice], interval: float) -> None:
    from rich.console import Group
    from rich.live import Live

    from accelerant.runtime.monitoring.monitor import sample

    ended: list[int] = []
    # a KeyboardInterrupt raised in a finalizer would be lost; a flag is not
    usual = {one: signal.signal(one, lambda number, _: ended.append(number)) for one in (signal.SIGINT, signal.SIGTERM)}
    sort = "memory"
    try:
        with _keys() as keys, Live(console=console(), screen=True, auto_refresh=False) as live:
            while not ended:
                began = time.monotonic()
                samples = [sample(device) for device in devices]
                live.update(Group(*_view(samples, live.console.width, sort, keys=True)), refresh=True)
                until = max(time.monotonic() + 0.05, began + interval)
                while not ended and time.monotonic() < until:
                    key = keys(min(0.1, until - time.monotonic()))
                    if key == "q":
                        return
                    if key in _SORTS:
                        sort = _SORTS[key]
                        live.update(Group(*_view(samples, live.console.width, sort, keys=True)), refresh=True)
    finally:
        for one, handler in usual.items():
            signal.signal(one, handler)
    if signal.SIGTERM in ended:
        raise typer.Exit(128 + signal.SIGTERM)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key of the terminal, at most the given seconds, and returns it, or ""."""
    if not sys.stdin.isatty():
        yield _no_key
    elif sys.platform == "win32":
        import msvcrt

        def pressed(seconds: float) -> str:
            time.sleep(max(0.0, seconds))
            return msvcrt.getwch().lower() if msvcrt.kbhit() else ""

        yield pressed
    else:
        import select
        import termios
        import tty

        terminal = sys.stdin.fileno()

        def pressed(seconds: float) -> str:
            if not select.select([terminal], [], [], max(0.0, seconds))[0]:
                return ""
            return os.read(terminal, 1).decode("ascii", "replace").lower() or "q"  # nothing: the terminal is gone

        before = termios.tcgetattr(terminal)
        tty.setcbreak(terminal)
        try:
            yield pressed
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(max(0.0, seconds))
    return ""


def _view(samples: list[Sample], width: int, sort: str = "memory", *, keys: bool = False) -> list[Text]:
    """Return the lines of a screen; with `keys` the second one names them."""
    from rich.text import Text

    lines = [Text(time.strftime("%Y-%m-%d %H:%M:%S"))]
    if keys:
        orders = ", ".join(f"{key} {order}{'*' * (order == sort)}" for key, order in _SORTS.items())
        lines += [Text(line, style="dim") for line in wrapped(f"q quit; sort by {orders}", width)]
    figures = ("busy", "memory", "power", "temperature", "clock", "memory clock")
    rows = [(item.device, item.name, *_cells(item)) for item in samples]
    lines += table_lines(("device", "name", *figures), rows, width, right=figures)
    for item in samples:
        if item.core_percents:
            cores = f"{item.device} cores: " + " ".join(f"{busy:.0f}%" for busy in item.core_percents)
            lines += [Text(), *map(Text, wrapped(cores, width))]
        if item.slow_down:
            lines += [Text(), *map(Text, wrapped(f"{item.device} slowed down: {', '.join(item.slow_down)}", width))]
        if item.ecc_uncorrected:
            lines += [Text(), *map(Text, wrapped(f"{item.device} memory errors: {item.ecc_uncorrected}", width))]
        if item.processes:
            lines += [Text(), Text(f"{item.device} processes", style="bold"), *_processes(item, sort)]
    reasons = [Text(part, style="dim") for item in samples for line in _reasons(item) for part in wrapped(line, width)]
    return [*lines, Text(), *reasons] if reasons else lines


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


def _processes(item: Sample, sort: str) -> list[Text]:
    from rich.text import Text

    def order(process: ProcessMemory) -> Any:
        by = {"memory": -(process.memory_bytes or 0), "pid": process.pid, "name": (process.name or "").lower()}
        return by[sort]

    lines = []
    for process in sorted(item.processes or (), key=order):
        memory = "-" if process.memory_bytes is None else f"{process.memory_bytes / 2**20:,.0f} MiB"
        lines.append(Text(f"{process.pid:>8}  {memory:>12}  {escaped(process.name or '?')}"))
    return lines
