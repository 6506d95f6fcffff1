"""Facts about NVIDIA's devices and drivers: required versions, dtypes, MIG slices, CUDA_VISIBLE_DEVICES, event masks.

Sources: CUDA compatibility guide (minimum drivers), CUDA C++ programming guide (compute capabilities, environment
variables), nvml.h (masks), MIG user guide (names of slices).
"""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path
from typing import Any

from accelerant.runtime.provider import ComputeDevice

MINIMUM_DRIVERS = {13: "580.65.06", 12: "525.60.13"}
"""Major version of CUDA -> the oldest driver of Linux that runs programs built for any of its releases."""


def minimum_driver(cuda: str) -> str:
    """Return the oldest driver for a version of CUDA ("13.0"); empty for one that this project does not run on."""
    return MINIMUM_DRIVERS.get(_major(cuda), "")


def _major(version: str) -> int:
    match = re.match(r"\d+", version)
    return int(match[0]) if match else 0


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


# --- compute capabilities --------------------------------------------------------------------------------------------


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
    match = re.search(r"\bMIG (\d+c?\.?\d*g\.\d+gb\S*)", name)
    return match[1] if match else ""


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


# --- clocks ----------------------------------------------------------------------------------------------------------

_SLOW_DOWNS = {
    0x04: "power", 0x08: "hardware", 0x20: "thermal", 0x40: "thermal", 0x80: "power brake",
}  # fmt: skip
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that lower the clocks against the user's wish: software power cap,
hardware slowdown, software and hardware thermal slowdown, external power brake."""


def slow_down_reasons(bits: int) -> tuple[str, ...]:
    """Return why a device lowers its clocks ("thermal", "power", ...), from NVML's mask of reasons, sorted."""
    return tuple(sorted({name for bit, name in _SLOW_DOWNS.items() if bits & bit}))
