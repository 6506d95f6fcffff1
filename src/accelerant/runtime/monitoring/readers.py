"""Readers of device figures: NVML, amdsmi, torch.mps, and Linux's files for the CPU; facts about NVIDIA's drivers.

Sources: CUDA compatibility guide (minimum drivers), CUDA C++ programming guide (compute capabilities, environment
variables), nvml.h (masks), MIG user guide (names of slices).
"""

import contextlib
import functools
import importlib
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerant.runtime.host import fork_safe, read_meminfo
from accelerant.runtime.provider import ComputeDevice

MINIMUM_DRIVERS = {13: "580.65.06", 12: "525.60.13"}
"""Major version of CUDA -> the oldest driver of Linux that runs programs built for any of its releases."""


def minimum_driver(cuda: str) -> str:
    """Return the oldest driver for a version of CUDA ("13.0"); empty for one that this project does not run on."""
    return MINIMUM_DRIVERS.get(_major(cuda), "")


def _major(version: str) -> int:
    return int(match[0]) if (match := re.match(r"\d+", version)) else 0


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of the loaded kernel driver ("580.95.05"); empty without one."""
    try:
        match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return match[1] if match else ""


def driver_problem(driver_cuda: int, torch_cuda: str, bindings: str) -> str:
    """Return why a driver of CUDA `driver_cuda` (12040 is 12.4) is too old, and what to do; empty if it is not."""
    supported = f"the NVIDIA driver supports CUDA up to {driver_cuda // 1000}.{driver_cuda % 1000 // 10}"
    for what, version, remedy in (
        ("torch is built for CUDA", torch_cuda, "a torch built for CUDA 12 with 'accelerant[cuda12]'"),
        ("cuda-bindings compiles for CUDA", bindings, "'accelerant[cuda12]'"),
    ):
        if driver_cuda // 1000 < _major(version):
            needed = minimum_driver(version)
            newer = f"driver {needed} or newer" if needed else "a newer driver"
            release = ".".join(version.split(".")[:2])
            return f"{supported}; {what} {release}: install {newer}, or {remedy}"
    return ""


OLDEST_CAPABILITY = (7, 5)  # the first compute capability for which NVRTC 13 and Triton compile


def capability_problem(major: int, minor: int) -> str:
    """Return why kernels cannot run on a device of a compute capability; empty if they can."""
    if (major, minor) >= OLDEST_CAPABILITY:
        return ""
    oldest = ".".join(map(str, OLDEST_CAPABILITY))
    return f"its compute capability is {major}.{minor}, and kernels are compiled for {oldest} and newer"


def cuda_dtypes(major: int, minor: int) -> list[str]:
    """Return the floating dtypes that a compute capability converts or computes in hardware, the widest first."""
    capability = 10 * major + minor
    least = {"bfloat16": 80, "float8_e4m3fn": 89, "float8_e5m2": 89, "float4_e2m1": 100}
    return ["float64", "float32", "float16", *(name for name, needed in least.items() if capability >= needed)]


def matrix_dtypes(major: int, minor: int) -> list[str]:
    """Return the operand dtypes of a compute capability's matrix units (tensor cores); float64 where it is fast."""
    capability = 10 * major + minor
    least = {
        "float16": 70, "int8": 75, "bfloat16": 80, "tfloat32": 80, "float8_e4m3fn": 89, "float8_e5m2": 89,
        "float4_e2m1": 100,
    }  # fmt: skip
    fast = ["float64"] if capability in (80, 90, 100) else []
    return fast + [name for name, needed in least.items() if capability >= needed]


# --- MIG and the choice of devices -----------------------------------------------------------------------------------
_INDEX = re.compile(r"\d+")
_GPU = re.compile(r"GPU-[0-9a-fA-F-]+")
_SLICE = re.compile(r"MIG-(?:GPU-[0-9a-fA-F-]+/\d+/\d+|[0-9a-fA-F-]+)")


def visible_devices_problem(value: str | None) -> str:
    """Return what is wrong with a value of CUDA_VISIBLE_DEVICES, or hides more than it seems; empty for nothing."""
    if value is None:
        return ""
    parts = [part.strip() for part in value.split(",")]
    if not any(parts):
        return "it is empty: no device is visible"
    slices = [part for part in parts if _SLICE.fullmatch(part)]
    for i, part in enumerate(parts):
        if not any(kind.fullmatch(part) for kind in (_INDEX, _GPU, _SLICE)):
            hidden = f"it and {len(parts) - i - 1} after it are hidden" if i < len(parts) - 1 else "it is hidden"
            wanted = "a number, GPU-<uuid>, MIG-<uuid> or MIG-GPU-<uuid>/<instance>/<compute instance>"
            return f"{part!r} names no device ({wanted}): {hidden}"
    if len(set(parts)) < len(parts):
        return "it names a device twice: none is visible"
    if slices and len(parts) > 1:
        return f"a process computes on one MIG slice, so the others are hidden: name {slices[0]} alone"
    return ""


def profile_of(name: str) -> str:
    """Return the profile of a MIG slice from its device's name ("1g.18gb" of "NVIDIA H200 MIG 1g.18gb"), or ""."""
    return match[1] if (match := re.search(r"\bMIG (\d+c?\.?\d*g\.\d+gb\S*)", name)) else ""


def hidden_slices(visible: set[str]) -> list[ComputeDevice]:
    """Return the MIG slices that this process does not see, as absent devices; `visible` has UUIDs without "MIG-"."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except Exception:  # noqa: BLE001 - not installed, or no driver: no slice can be listed
        return []
    found: list[ComputeDevice] = []
    for index in range(count):
        with contextlib.suppress(nvml.NVMLError):  # a GPU without MIG, or of which a container has only a part
            parent = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlDeviceGetMigMode(parent)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
                continue
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(parent)
            for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
                with contextlib.suppress(nvml.NVMLError):  # no slice of this number
                    handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, number)
                    uuid = str(nvml.nvmlDeviceGetUUID(handle))
                    if uuid.removeprefix("MIG-") not in visible:
                        name = str(nvml.nvmlDeviceGetName(handle))
                        found.append(_hidden(uuid, name, nvml.nvmlDeviceGetMemoryInfo(handle).total, major, minor))
    return found


def _hidden(uuid: str, name: str, memory_bytes: int, major: int, minor: int) -> ComputeDevice:
    return ComputeDevice(
        backend="cuda", index=-1, name=name, available=False, memory_bytes=int(memory_bytes),
        reason=f"a MIG slice that this process does not see: CUDA_VISIBLE_DEVICES={uuid} selects it",
        architecture=f"sm_{major}{minor}", properties={"uuid": uuid, "mig_profile": profile_of(name)},
    )  # fmt: skip


_SLOW_DOWNS = {
    0x04: "power", 0x08: "hardware", 0x20: "thermal", 0x40: "thermal", 0x80: "power brake",
}  # fmt: skip
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that lower the clocks against the user's wish: software power cap,
hardware slowdown, software and hardware thermal slowdown, external power brake."""


def slow_down_reasons(bits: int) -> tuple[str, ...]:
    """Return why a device lowers its clocks ("thermal", "power", ...), from NVML's mask of reasons, sorted."""
    return tuple(sorted({name for bit, name in _SLOW_DOWNS.items() if bits & bit}))


FIGURES = (
    "utilisation_percent", "core_percents", "memory_used_bytes", "memory_total_bytes", "power_w", "temperature_c",
    "clock_mhz", "memory_clock_mhz", "slow_down", "ecc_corrected", "ecc_uncorrected", "processes",
)  # fmt: skip
"""The figures of a sample, "processes" the last; a reader may also report "energy_j", joules since some fixed time."""


class Absent(Exception):  # noqa: N818 - not an error: it carries a reason to the table of reasons
    """A figure that the device does not report, with the reason."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """A process on a device; None for a figure that may not be read.

    The process's number is the driver's; a container may have another one. Memory is on the device (resident, on a
    CPU).
    """

    pid: int
    name: str | None
    memory_bytes: int | None


class TableReader:
    """A reader made of a function for each figure, which may raise Absent; `otherwise` is the reason for others."""

    def __init__(
        self, figures: Mapping[str, Callable[[], Any]], otherwise: str, errors: tuple[type[Exception], ...] = ()
    ) -> None:
        self._figures = figures
        self._otherwise = otherwise
        self._errors: tuple[type[Exception], ...] = (Absent, OSError, ValueError, *errors)

    def read(self, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the figures that are present, and a reason for each of the other names."""
        figures: dict[str, Any] = {}
        reasons: dict[str, str] = {}
        for name in names:
            if name not in self._figures:
                reasons[name] = self._otherwise
                continue
            try:
                figures[name] = self._figures[name]()
            except self._errors as error:
                reasons[name] = str(error) or type(error).__name__
        return figures, reasons


def cuda_reader(device: ComputeDevice) -> TableReader:
    """Return a reader of NVML if nvidia-ml-py is installed and starts, else of torch."""
    import torch

    uuid = str(torch.cuda.get_device_properties(device.index).uuid)  # no CUDA_VISIBLE_DEVICES renumbers it
    if not (reason := nvml_missing()):
        nvml: Any = importlib.import_module("pynvml")
        for kind in ("GPU", "MIG"):  # torch gives the number without the word that NVML wants before it
            with contextlib.suppress(nvml.NVMLError):
                return _nvml_reader(nvml, nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}"))
        reason = f"NVML does not know the device {uuid}"

    def memory(which: int) -> int:
        return torch.cuda.mem_get_info(device.index)[which]

    figures = {"memory_total_bytes": lambda: memory(1), "memory_used_bytes": lambda: memory(1) - memory(0)}
    return TableReader(figures, reason, (RuntimeError,))


@functools.cache
def nvml_missing() -> str:
    """Return why NVML cannot be read through nvidia-ml-py here; empty if it can."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return "needs nvidia-ml-py: pip install 'accelerant[monitor]'"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return f"NVML does not start: {error}"
    return ""


_OF_THE_GPU = ("power_w", "energy_j", "utilisation_percent")


def _nvml_reader(nvml: Any, handle: Any) -> TableReader:
    """Return a reader of a GPU or a MIG slice, whose temperature, clocks and memory errors are its GPU's."""
    gpu = handle
    is_slice = False
    with contextlib.suppress(nvml.NVMLError):
        is_slice = bool(nvml.nvmlDeviceIsMigDeviceHandle(handle))
        gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_slice else handle

    def slow_down() -> tuple[str, ...]:
        return slow_down_reasons(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))

    def errors(kind: int) -> int:
        return int(nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC))

    def memory() -> Any:  # version 2 does not count what the driver keeps for itself as used
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)

    def processes() -> tuple[ProcessMemory, ...]:
        by_pid: dict[int, ProcessMemory] = {}
        for list_of_kind in (nvml.nvmlDeviceGetGraphicsRunningProcesses, nvml.nvmlDeviceGetComputeRunningProcesses):
            for process in list_of_kind(handle):
                name = None
                with contextlib.suppress(nvml.NVMLError, UnicodeDecodeError):
                    name = str(nvml.nvmlSystemGetProcessName(process.pid)) or None
                by_pid[process.pid] = ProcessMemory(process.pid, name, process.usedGpuMemory)
        return tuple(sorted(by_pid.values(), key=lambda process: -(process.memory_bytes or 0)))

    figures = {
        "utilisation_percent": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "memory_used_bytes": lambda: int(memory().used),
        "memory_total_bytes": lambda: int(memory().total),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
        "clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
        "memory_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
        "slow_down": slow_down,
        "ecc_corrected": lambda: errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        "ecc_uncorrected": lambda: errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        "processes": processes,
        "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
    }
    if is_slice:
        figures = {name: read for name, read in figures.items() if name not in _OF_THE_GPU}
        return TableReader(figures, "NVML has it for the whole GPU, not for a MIG slice", (nvml.NVMLError,))
    return TableReader(figures, "NVML has no such figure", (nvml.NVMLError,))


def _number(text: object) -> float | None:
    """Return the text as a number, or None for "[N/A]" and the like."""
    with contextlib.suppress(ValueError):
        return float(str(text))
    return None


def amdsmi_reader(device: ComputeDevice) -> TableReader:
    """Return a reader of amdsmi, a package of ROCm; torch finds the device's handle."""
    import torch

    try:
        smi: Any = importlib.import_module("amdsmi")
        finder: Any = torch.cuda
        handle = finder._get_amdsmi_handler(device.index)
    except (ImportError, AttributeError, RuntimeError) as error:
        reason = f"amdsmi cannot be read: {error}"
        figures: dict[str, Callable[[], Any]] = {"memory_total_bytes": lambda: torch.cuda.mem_get_info(device.index)[1]}
        return TableReader(figures, reason, (RuntimeError,))

    def clock(kind: str) -> float:
        info = smi.amdsmi_get_clock_info(handle, getattr(smi.AmdSmiClkType, kind))
        return _amd_number(info.get("clk", info.get("cur_clk")))

    def memory(which: int) -> int:
        return torch.cuda.mem_get_info(device.index)[which]

    def power() -> float:
        info = smi.amdsmi_get_power_info(handle)
        current = _number(info.get("current_socket_power"))
        return current if current is not None else _amd_number(info.get("average_socket_power"))

    def temperature() -> float:
        junction = smi.AmdSmiTemperatureType.JUNCTION
        return _amd_number(smi.amdsmi_get_temp_metric(handle, junction, smi.AmdSmiTemperatureMetric.CURRENT))

    def energy() -> float:
        info = smi.amdsmi_get_energy_count(handle)  # the count was called "power" before ROCm 6.2.1
        count = _amd_number(info.get("energy_accumulator", info.get("power")))
        return count * _amd_number(info["counter_resolution"]) / 1e6

    def processes() -> tuple[ProcessMemory, ...]:
        listed = smi.amdsmi_get_gpu_process_list(handle)
        return tuple(ProcessMemory(int(p["pid"]), p.get("name"), int(p["memory_usage"]["vram_mem"])) for p in listed)

    return TableReader(
        {
            "utilisation_percent": lambda: _amd_number(smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]),
            "memory_used_bytes": lambda: memory(1) - memory(0),
            "memory_total_bytes": lambda: memory(1),
            "power_w": power,
            "temperature_c": temperature,
            "clock_mhz": lambda: clock("GFX"),
            "memory_clock_mhz": lambda: clock("MEM"),
            "processes": processes,
            "energy_j": energy,
        },
        "amdsmi has no such figure",
        (smi.AmdSmiException, KeyError, TypeError, RuntimeError),
    )


def _amd_number(value: object) -> float:
    """Return a figure of amdsmi as a number; raise Absent for "N/A"."""
    if (number := _number(value)) is None:
        raise Absent(f"amdsmi says {value}")
    return number


def apple_reader() -> TableReader:
    """Return a reader of torch.mps: this process's memory, and the most that the system recommends to use."""
    import torch

    figures: dict[str, Callable[[], Any]] = {
        "memory_used_bytes": torch.mps.driver_allocated_memory,
        "memory_total_bytes": torch.mps.recommended_max_memory,
    }
    return TableReader(figures, "macOS reports this only to powermetrics, which needs root", (RuntimeError,))


_LEAST_S = 0.1  # least time between two readings of a rate: the kernel counts busy time in hundredths of a second
_STALE_S = 10.0  # an earlier reading older than this is replaced, so that a rate is recent
_PROCESSES = 10
_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal")
_LOADS = ("utilisation_percent", "core_percents")


class CpuReader(TableReader):
    """Reads the CPU's figures; `total_bytes` is for systems without /proc, `root` for tests."""

    def __init__(self, total_bytes: int = 0, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._sys = root / "sys"
        self._total_bytes = total_bytes
        self._lock = fork_safe(threading.Lock())
        super().__init__(
            {
                "utilisation_percent": lambda: self._busy()["cpu"],
                "core_percents": lambda: tuple(share for name, share in self._busy().items() if name != "cpu"),
                "memory_used_bytes": self._memory_used,
                "memory_total_bytes": self._memory_total,
                "power_w": self._power,
                "temperature_c": self._temperature,
                "clock_mhz": self._clock,
                "slow_down": self._slow_down,
                "ecc_corrected": lambda: self._ecc("ce_count"),
                "ecc_uncorrected": lambda: self._ecc("ue_count"),
                "processes": self._processes,
                "energy_j": self._energy,
            },
            "the system does not report it for a CPU",
        )
        self._earlier_s = -float("inf")
        self._earlier_ticks: dict[str, tuple[int, int]] = {}
        self._ticks: dict[str, tuple[int, int]] = {}
        self._earlier_energy: tuple[float, float] | None = None
        self._joules = 0.0
        self._counters: dict[Path, int] = {}
        self._throttled: int | None = None

    def read(self, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Read figures; waits 0.1 s for the load if there is no recent reading."""
        with self._lock:
            if not any(name in _LOADS for name in names):
                return super().read(names)
            if time.monotonic() - self._earlier_s > _STALE_S:
                self._earlier_s, self._earlier_ticks = time.monotonic(), self._read_ticks()
                super().read(["power_w"])
            time.sleep(max(0.0, self._earlier_s + _LEAST_S - time.monotonic()))
            self._ticks = self._read_ticks()
            now_s = time.monotonic()
            result = super().read(names)
            self._earlier_s, self._earlier_ticks = now_s, self._ticks
            return result

    def _read_ticks(self) -> dict[str, tuple[int, int]]:
        """Return busy and total ticks of "cpu" and each "cpuN"; empty without /proc/stat."""
        ticks_by_name = {}
        with contextlib.suppress(OSError):
            for line in (self._proc / "stat").read_text().splitlines():
                name, *cells = line.split()
                if name.startswith("cpu"):
                    ticks = [int(cell) for cell in cells[:8]]  # the rest is part of user time
                    ticks_by_name[name] = sum(ticks) - sum(ticks[3:5]), sum(ticks)  # idle, iowait
        return ticks_by_name

    def _busy(self) -> dict[str, float]:
        if not self._ticks:
            raise Absent(f"no {self._proc / 'stat'} on this system")
        percents = {}
        for name, (busy, total) in self._ticks.items():
            busy_before, total_before = self._earlier_ticks.get(name, (0, 0))
            passed = total - total_before
            percents[name] = 100.0 * min(1.0, max(0.0, (busy - busy_before) / passed)) if passed > 0 else 0.0
        return percents

    def _energy(self) -> float:
        """Return the joules since the first call, summed over the packages."""
        # A package is a whole socket; counting its parts as well would count twice.
        zones = self._sys.glob("class/powercap/*:*")
        packages = sorted(zone for zone in zones if _line(zone / "name").startswith("package"))
        if not packages:
            raise Absent(f"no package has an energy counter under {self._sys / 'class/powercap'}")
        try:
            for package in packages:
                count = int((package / "energy_uj").read_text())
                step = count - self._counters.get(package, count)
                if step < 0:  # the counter wrapped around
                    step += int((package / "max_energy_range_uj").read_text())
                self._counters[package] = count
                self._joules += step / 1e6
        except PermissionError as error:
            raise Absent(f"{error.filename}: only root may read the energy counter here") from None
        return self._joules

    def _power(self) -> float:
        """Return the mean power since the earlier call; energy is updated about once a millisecond."""
        earlier, now = self._earlier_energy, (time.monotonic(), self._energy())
        self._earlier_energy = now
        if earlier is None or now[0] - earlier[0] < 2e-3:
            raise Absent("power is known from the second reading of the energy counter on")
        return (now[1] - earlier[1]) / (now[0] - earlier[0])

    def _temperature(self) -> float:
        celsius = []
        for monitor in sorted(self._sys.glob("class/hwmon/hwmon*")):
            if _line(monitor / "name") in _SENSORS:
                celsius += [int(_line(path) or "0") / 1e3 for path in sorted(monitor.glob("temp*_input"))]
        if not celsius:
            for zone in sorted(self._sys.glob("class/thermal/thermal_zone*")):
                if re.search(r"pkg_temp|cpu", _line(zone / "type"), re.IGNORECASE):
                    celsius.append(int(_line(zone / "temp") or "0") / 1e3)
        if not celsius:
            raise Absent(f"no CPU sensor under {self._sys / 'class/hwmon'} or {self._sys / 'class/thermal'}")
        return max(celsius)

    def _clock(self) -> float:
        paths = sorted(self._sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"))
        if not (clocks := [int(path.read_text()) / 1e3 for path in paths]):
            text = (self._proc / "cpuinfo").read_text()
            clocks = [float(number) for number in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)]
        if not clocks:
            raise Absent("neither cpufreq nor /proc/cpuinfo has the clock")
        return statistics.fmean(clocks)

    def _slow_down(self) -> tuple[str, ...]:
        """Return ("thermal",) if the processor slowed down for its heat since the earlier call."""
        paths = list(self._sys.glob("devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count"))
        if not paths:
            raise Absent(f"no thermal_throttle under {self._sys / 'devices/system/cpu'}")
        before, self._throttled = self._throttled, sum(int(path.read_text()) for path in paths)
        return ("thermal",) if before is not None and self._throttled > before else ()

    def _ecc(self, name: str) -> int:
        """Return the errors of the main memory since the system's start, by EDAC's files of a name."""
        counts = [int(path.read_text()) for path in self._sys.glob(f"devices/system/edac/mc/mc[0-9]*/{name}")]
        if not counts:
            raise Absent(f"no memory controller under {self._sys / 'devices/system/edac/mc'}")
        return sum(counts)

    def _memory_used(self) -> int:
        info = read_meminfo(self._proc / "meminfo")
        return info["MemTotal"] - info["MemAvailable"] if {"MemTotal", "MemAvailable"} <= info.keys() else 0

    def _memory_total(self) -> int:
        try:
            return read_meminfo(self._proc / "meminfo")["MemTotal"]
        except (OSError, KeyError):
            if self._total_bytes:
                return self._total_bytes
            raise Absent("the system does not report it") from None

    def _processes(self) -> tuple[ProcessMemory, ...]:
        processes = []
        page_bytes = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
        for folder in self._proc.iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):  # no process, or it ended meanwhile
                number, pages = int(folder.name), int((folder / "statm").read_text().split()[1])
                if pages:
                    name = (folder / "comm").read_text(errors="backslashreplace").strip()  # any bytes
                    processes.append(ProcessMemory(number, name, pages * page_bytes))
        return tuple(sorted(processes, key=lambda process: -(process.memory_bytes or 0))[:_PROCESSES])


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
