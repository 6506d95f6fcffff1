"""Backends whose devices this process opens through the library of a driver: OpenCL and WebGPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any, ClassVar

from accelerant.runtime import provider
from accelerant.runtime.host import has_gpu_node
from accelerant.runtime.provider import ComputeDevice, ComputeProvider, MemoryInfo


class DriverProvider(ComputeProvider):
    """Devices of every driver of a library; `probing` opens each in a child, since a broken driver ends its process."""

    automatic: ClassVar[bool] = True
    automatic_kinds: ClassVar[tuple[str, ...]] = ("gpu",)
    library: ClassVar[str]
    probing: ClassVar[str]
    driver: ClassVar[str]
    standard: ClassVar[str]

    @classmethod
    def probe(cls) -> str:
        if importlib.util.find_spec(cls.library) is None:
            return f"{cls.library} is not installed: pip install 'accelerant[{cls.name}]'"
        return provider.probe_in_child(cls.probing, cls.driver, timeout_s=60)

    @classmethod
    def may_have_hardware(cls) -> bool:
        return has_gpu_node()

    def __init__(self, opened: Sequence[Any]) -> None:
        """Keep the opened devices: each has a `counter`, `memory_bytes`, `reserved_bytes`, `described` and `trim`."""
        self._devices = opened
        self._pid = os.getpid()

    def devices(self) -> list[ComputeDevice]:
        return [opened.described(index) for index, opened in enumerate(self._devices)]

    def memory(self, device: int = 0) -> MemoryInfo:
        opened = self._device(device)
        total, reserved = opened.memory_bytes, opened.reserved_bytes()
        held, peak = opened.counter.allocated_bytes, opened.counter.peak_bytes
        return MemoryInfo(total, max(0, total - reserved), held, reserved, peak)

    def trim(self, device: int = 0) -> None:
        self._device(device).trim()

    def _device(self, device: int) -> Any:
        """Return a device, in the process that opened it: a forked child has none of its driver's threads."""
        provider.refuse_forked(self._pid, f"{self.name}:{device}", self.standard)
        provider.check_device(self.name, device, len(self._devices))
        return self._devices[device]
