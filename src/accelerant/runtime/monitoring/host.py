"""The CPU's figures, from Linux's own files.

/proc has load, clocks, memory and processes, /sys has temperature and energy. Counters become rates between two
readings. Elsewhere than on Linux only the total of memory is known.
"""

from __future__ import annotations

import os
import re
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerant.runtime.monitoring.readers import Absent, ProcessMemory, TableReader

__all__ = ["CpuReader"]

_LEAST_S = 0.1
"""The least time between two readings that make a rate: the kernel counts busy time in hundredths of a second."""

_STALE_S = 10.0
"""A rate shall be about now: an older first reading is replaced."""

_PROCESSES = 10
_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal")
_LOADS = ("utilisation_percent", "core_percents")


class CpuReader:
    """Reads the CPU.

    Args:
        total_bytes: memory, for systems without /proc.
        root: where /proc and /sys are; for tests.
    """

    def __init__(self, total_bytes: int = 0, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._sys = root / "sys"
        self._total_bytes = total_bytes
        self._lock = threading.Lock()
        self._table = TableReader(
            {
                "utilisation_percent": lambda: self._busy()["cpu"],
                "core_percents": self._cores,
                "memory_used_bytes": self._memory_used,
                "memory_total_bytes": self._memory_total,
                "power_w": self._power,
                "temperature_c": self._temperature,
                "clock_mhz": self._clock,
                "processes": self._processes,
                "energy_j": self._energy,
            },
            "the system does not tell it for a CPU",
        )
        self._earlier_s = -float("inf")
        self._earlier_ticks: dict[str, tuple[int, int]] = {}
        self._ticks: dict[str, tuple[int, int]] = {}
        self._earlier_energy: tuple[float, float] | None = None
        self._joules = 0.0
        self._counters: dict[Path, int] = {}

    def read(self, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """See readers.Reader; waits a tenth of a second where load is asked for and no earlier reading is there."""
        with self._lock:
            if not any(name in _LOADS for name in names):
                return self._table.read(names)
            if time.monotonic() - self._earlier_s > _STALE_S:
                self._earlier_s, self._earlier_ticks = time.monotonic(), self._read_ticks()
                self._table.read(["power_w"])
            time.sleep(max(0.0, self._earlier_s + _LEAST_S - time.monotonic()))
            self._ticks = self._read_ticks()
            now_s = time.monotonic()
            result = self._table.read(names)
            self._earlier_s, self._earlier_ticks = now_s, self._ticks
            return result

    # --- load --------------------------------------------------------------------------------------------------------

    def _read_ticks(self) -> dict[str, tuple[int, int]]:
        """For "cpu" and each "cpuN": ticks busy and ticks in all; empty without /proc/stat."""
        found = {}
        try:
            lines = (self._proc / "stat").read_text().splitlines()
        except OSError:
            return {}
        for line in lines:
            name, *cells = line.split()
            if name.startswith("cpu"):
                ticks = [int(cell) for cell in cells[:8]]  # what follows is counted in user time already
                found[name] = sum(ticks) - sum(ticks[3:5]), sum(ticks)  # idle, iowait
        return found

    def _busy(self) -> dict[str, float]:
        """Percent busy since the earlier reading."""
        if not self._ticks:
            raise Absent(f"no {self._proc / 'stat'} on this system")
        percents = {}
        for name, (busy, total) in self._ticks.items():
            busy_before, total_before = self._earlier_ticks.get(name, (0, 0))
            passed = total - total_before
            percents[name] = 100.0 * min(1.0, max(0.0, (busy - busy_before) / passed)) if passed > 0 else 0.0
        return percents

    def _cores(self) -> tuple[float, ...]:
        return tuple(percent for name, percent in self._busy().items() if name != "cpu")

    # --- energy and temperature --------------------------------------------------------------------------------------

    def _energy(self) -> float:
        """Joules since the first call, over every package."""
        zones = [zone for zone in sorted(self._sys.glob("class/powercap/*:*")) if _is_package(zone)]
        counters = {zone / "energy_uj": zone / "max_energy_range_uj" for zone in zones}
        if not counters:
            raise Absent(f"no package has an energy counter under {self._sys / 'class/powercap'}")
        try:
            for path, limit in counters.items():
                count = int(path.read_text())
                step = count - self._counters.get(path, count)
                if step < 0:  # the counter began again
                    step += int(limit.read_text())
                self._counters[path] = count
                self._joules += step / 1e6
        except PermissionError as error:
            raise Absent(f"{error.filename}: only root may read the energy counter here") from None
        return self._joules

    def _power(self) -> float:
        """Since the earlier call; energy is counted in microjoules, about once a millisecond."""
        earlier, now = self._earlier_energy, (time.monotonic(), self._energy())
        self._earlier_energy = now
        if earlier is None or now[0] - earlier[0] < 2e-3:
            raise Absent("power is known from the second reading of the energy counter on")
        return (now[1] - earlier[1]) / (now[0] - earlier[0])

    def _temperature(self) -> float:
        """The hottest of the CPU's sensors."""
        found = []
        for monitor in sorted(self._sys.glob("class/hwmon/hwmon*")):
            if _line(monitor / "name") in _SENSORS:
                found += [int(_line(path) or "0") / 1e3 for path in sorted(monitor.glob("temp*_input"))]
        if not found:
            for zone in sorted(self._sys.glob("class/thermal/thermal_zone*")):
                if re.search(r"pkg_temp|cpu", _line(zone / "type"), re.IGNORECASE):
                    found.append(int(_line(zone / "temp") or "0") / 1e3)
        if not found:
            raise Absent(f"no CPU sensor under {self._sys / 'class/hwmon'} or {self._sys / 'class/thermal'}")
        return max(found)

    # --- the rest ----------------------------------------------------------------------------------------------------

    def _clock(self) -> float:
        """The mean over the cores."""
        paths = sorted(self._sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"))
        clocks = [int(path.read_text()) / 1e3 for path in paths]
        if not clocks:
            text = (self._proc / "cpuinfo").read_text()
            clocks = [float(number) for number in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)]
        if not clocks:
            raise Absent("neither cpufreq nor /proc/cpuinfo has the clock")
        return statistics.fmean(clocks)

    def _memory(self) -> dict[str, int]:
        text = (self._proc / "meminfo").read_text()
        return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}

    def _memory_used(self) -> int:
        info = self._memory()
        return info["MemTotal"] - info["MemAvailable"] if {"MemTotal", "MemAvailable"} <= info.keys() else 0

    def _memory_total(self) -> int:
        try:
            return self._memory()["MemTotal"]
        except (OSError, KeyError):
            if self._total_bytes:
                return self._total_bytes
            raise Absent("the system does not tell it") from None

    def _processes(self) -> tuple[ProcessMemory, ...]:
        """Those with the most resident memory."""
        found = []
        folders = [folder for folder in self._proc.iterdir() if folder.name.isdigit()]
        for folder in folders:
            try:
                pages = int((folder / "statm").read_text().split()[1])
                name = (folder / "comm").read_text().strip()
            except (OSError, IndexError, ValueError):  # it ended meanwhile
                continue
            if pages:
                found.append(ProcessMemory(int(folder.name), name, pages * _page_bytes()))
        return tuple(sorted(found, key=lambda each: -(each.memory_bytes or 0))[:_PROCESSES])


def _is_package(zone: Path) -> bool:
    """Whether a zone of powercap is a whole socket: its parts would be counted twice."""
    return _line(zone / "name").startswith("package")


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _page_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
