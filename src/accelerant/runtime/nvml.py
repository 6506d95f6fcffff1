"""What NVML says of a device's memory, without making a CUDA context on it.

Needs nvidia-ml-py; where that or the driver is missing, the answer is a reason instead of figures.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

import torch

__all__ = ["ProcessMemory", "memory", "other_processes"]

_lock = threading.Lock()
_loaded: list[Any] = []
"""The module pynvml once NVML has started, or the reason why it does not."""


class ProcessMemory(NamedTuple):
    """What another process holds on a device; None where the system does not tell (containers, MIG)."""

    pid: int
    size_bytes: int | None


def memory(index: int) -> tuple[int, int] | str:
    """Total and free bytes of torch's CUDA device of that number, or why they are not known."""
    nvml = _nvml()
    if isinstance(nvml, str):
        return nvml
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, index))
    except nvml.NVMLError as error:
        return f"NVML: {error}"
    return int(info.total), int(info.free)


def other_processes(index: int) -> list[ProcessMemory] | str:
    """The other processes that compute on a device, the largest first, or why they are not known."""
    nvml = _nvml()
    if isinstance(nvml, str):
        return nvml
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(_handle(nvml, index))
    except nvml.NVMLError as error:
        return f"NVML: {error}"
    rows = [ProcessMemory(each.pid, each.usedGpuMemory) for each in found if each.pid != os.getpid()]
    return sorted(rows, key=lambda row: -(row.size_bytes or 0))


def _nvml() -> Any:
    with _lock:
        if not _loaded:
            _loaded.append(_start())
        return _loaded[0]


def _start() -> Any:
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML does not start: {error}"
    return pynvml


def _handle(nvml: Any, index: int) -> Any:
    """By identity, since CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's."""
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode())
