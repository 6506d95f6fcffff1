"""`accelerant devices`, `top` and `doctor`: what is there, what it does now, and whether it computes."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from accelerant.cli.help import examples, option
from accelerant.cli.terminal import ProgressLine, console, is_live, print_table, table_lines, wrapped
from accelerant.errors import ConfigError
from accelerant.runtime.files import escaped

if TYPE_CHECKING:
    from rich.text import Text

    from accelerant.bench.certificate import Certificate
    from accelerant.cli.doctor_checks import Check
    from accelerant.runtime.monitoring import ProcessMemory, Sample
    from accelerant.runtime.provider import ComputeDevice

_BAR = 10
_SORTS = {"m": "memory", "p": "pid", "n": "name"}  # key -> order of the processes


@examples("accelerant devices\naccelerant devices --json")
def devices(json_output: bool = option("Print a JSON list.", "--json", default=False)) -> None:
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
    interval: float = option("Seconds between two readings, 0.1 to 3600.", default=1.0),
    json_output: bool = option("Print one sample as JSON and exit.", "--json", default=False),
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
                    if (key := keys(min(0.1, until - time.monotonic()))) == "q":
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


_DOCTOR_EXAMPLES = """\
accelerant doctor
accelerant doctor --json > report.json
accelerant doctor --certify --out certificate"""

_COLORS = {"ok": "green", "warning": "yellow", "failed": "red"}


@examples(_DOCTOR_EXAMPLES)
def doctor(
    json_output: bool = option("Print a JSON object.", "--json", default=False),
    certify: bool = option("Compare every op on every device with its reference.", default=False),
    quick: bool = option("Certify a case of each op, in float32, and one field and "
                                        "curve of each shape.", default=False),
    device: list[str] | None = option("Certify this backend or "
                                                     "device alone; may be repeated.", metavar="NAME"),
    op: list[str] | None = option("Certify this op alone; may be "
                                                 "repeated.", metavar="NAME"),
    out: Path | None = option("Write certificate.json and "
                                             "certificate.html there.", metavar="FOLDER"),
    check: Path | None = option("Check the SHA-256 of a "
                                               "certificate.json, and print its summary.", metavar="FILE"),
) -> None:  # fmt: skip
    """Check the installation, compilers, cache and devices, and run a computation on each device.

    Each line is ok, warning or failed. Exit status 1 if something failed. With --certify, every op runs on every
    device instead, and is compared with its reference; exit status 1 if a row is wrong.
    """
    if check is not None:
        from accelerant.bench.certificate import Certificate

        return _print_certificate(Certificate.load(check))
    if certify:
        return _certify(device or [], op or [], quick, out, json_output)
    if quick or device or op or out:
        raise typer.BadParameter("--quick, --device, --op and --out belong to --certify")
    from accelerant.cli.doctor_checks import checks

    show = ProgressLine(every_s=math.inf)  # on a terminal only
    results: list[Check] = []
    for found in checks(lambda part: None if json_output else show(f"{part} ...")):
        results.append(found)
        if not json_output:
            show("")
            _print_check(found)
    counts = {status: sum(one.status == status for one in results) for status in _COLORS}
    if json_output:
        print(json.dumps({"counts": counts, "checks": [one.to_dict() for one in results]}, indent=1))
    else:
        print(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['failed']} failed")
    if counts["failed"]:
        raise typer.Exit(1)


def _print_check(check: Check) -> None:
    from rich.text import Text

    line = Text(f"{check.status:<8}", style=_COLORS[check.status])
    line.append(f"{check.name:<20} ", style="bold")
    line.append(check.found, style="default")
    shown = console()
    shown.print(line, soft_wrap=True)
    if check.advice:
        advice = Text(f"{'':29}to do: {check.advice}", style="" if check.status == "ok" else "bold")
        shown.print(advice, soft_wrap=True)


def _certify(names: list[str], ops: list[str], quick: bool, out: Path | None, json_output: bool) -> None:
    from accelerant.bench.certificate import certify
    from accelerant.runtime import registry

    devices = [registry.find_device(name) for name in names] or registry.devices()
    show = ProgressLine()
    certificate = certify(devices, ops=ops, quick=quick, progress=show)
    show("")
    paths = certificate.save(out) if out is not None else ()
    if json_output:
        print(certificate.to_json(), end="")
    else:
        _print_certificate(certificate)
        for path in paths:
            print(f"written: {path}")
    if certificate.wrong:
        raise typer.Exit(1)


def _print_certificate(certificate: Certificate) -> None:
    """Print how many rows of each device have each verdict, and every row that is wrong."""
    verdicts = ("exact", "within", "wrong", "not served")
    rows = []
    for device in certificate.devices:
        mine = [row for row in certificate.rows if row.device == device.label]
        counts = [str(sum(row.verdict == verdict for row in mine)) for verdict in verdicts]
        rows.append((device.label, *counts, str(sum(row.fallbacks for row in mine)), device.name))
    print_table(("device", *verdicts, "fallbacks", "name"), rows, right=(*verdicts, "fallbacks"))
    if certificate.wrong:
        print()
        wrong = [(row.op, row.dtype, row.device, row.implementation, row.note) for row in certificate.wrong]
        print_table(("wrong op", "dtype", "device", "implementation", "found"), wrong, prose=True)
    print(f"{certificate.scope}; {certificate.time}; SHA-256 {certificate.sha256}")
