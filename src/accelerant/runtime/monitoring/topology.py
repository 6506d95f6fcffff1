"""The devices of a backend: free memory, choice by free memory, and peer access."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accelerant.errors import ConfigError, OutOfMemory
from accelerant.runtime import registry
from accelerant.runtime.monitoring.readers import cuda_reader
from accelerant.runtime.provider import ComputeDevice

__all__ = ["DeviceState", "Topology", "free_memory", "peer_access", "select_by_free_memory", "topology"]


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device and its memory.

    Attributes:
        device: the device.
        total_bytes: size of its memory.
        free_bytes: available to any process.
    """

    device: ComputeDevice
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The devices of a backend.

    Attributes:
        backend: its name.
        devices: by index.
        peers: peers[i][j] is whether device i reads device j's memory directly; the diagonal is True.
    """

    backend: str
    devices: tuple[DeviceState, ...]
    peers: tuple[tuple[bool, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, for JSON."""
        return {
            "backend": self.backend,
            "devices": [
                {**state.device.to_dict(), "total_bytes": state.total_bytes, "free_bytes": state.free_bytes}
                for state in self.devices
            ],
            "peers": [list(row) for row in self.peers],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.backend}:{state.device.index}  {state.device.name}  "
            f"{state.free_bytes / 2**30:.1f} of {state.total_bytes / 2**30:.1f} GiB free"
            for state in self.devices
        ]
        if len(self.devices) > 1:
            width = len(str(len(self.devices) - 1))
            lines.append("peer access: row reads column")
            lines.append(" " * (width + 2) + " ".join(f"{j:>{width}}" for j in range(len(self.devices))))
            for i, row in enumerate(self.peers):
                lines.append(f"{i:>{width}}  " + " ".join(f"{'x' if cell else '-':>{width}}" for cell in row))
        return "\n".join(lines)


def free_memory(device: ComputeDevice) -> tuple[int, int]:
    """Return the total and free bytes of a device.

    On CUDA the driver's tools are used if present: CUDA itself would create a context, about 0.5 GB, on each device.
    """
    if device.backend == "cuda":
        names = ("memory_total_bytes", "memory_used_bytes")
        figures, _ = cuda_reader(device).read(names)
        if all(name in figures for name in names):
            return figures[names[0]], figures[names[0]] - figures[names[1]]
    info = registry.create(device.backend).memory(device.index)
    return info.total_bytes, info.free_bytes


def peer_access(backend: str = "cuda") -> tuple[tuple[bool, ...], ...]:
    """Return which devices of a backend read one another's memory directly, as in Topology.peers.

    Raises:
        ConfigError, BackendUnavailable: no such backend.
    """
    count = len(registry.create(backend).devices())

    def reads(i: int, j: int) -> bool:
        return i == j or (backend == "cuda" and bool(torch.cuda.can_device_access_peer(i, j)))

    return tuple(tuple(reads(i, j) for j in range(count)) for i in range(count))


def topology(backend: str = "auto") -> Topology:
    """Return the devices of a backend, by default the setting's, with their memory and peers.

    Raises:
        ConfigError, BackendUnavailable: no such backend.
    """
    name = registry.choose(backend).backend
    return Topology(name, _states(name), peer_access(name))


def _states(backend: str) -> tuple[DeviceState, ...]:
    return tuple(DeviceState(device, *free_memory(device)) for device in registry.create(backend).devices())


def select_by_free_memory(backend: str = "auto", *, least_bytes: int = 0) -> ComputeDevice:
    """Return the device of a backend with the most free memory; of equals the first.

    Args:
        backend: name; "auto" is the setting's.
        least_bytes: bytes that must be free on it.

    Raises:
        ConfigError, BackendUnavailable: no such backend, or a negative size.
        OutOfMemory: no device has that much; names the freest.
    """
    if least_bytes < 0:
        raise ConfigError(f"least_bytes must be 0 or more, got {least_bytes}")
    name = registry.choose(backend).backend
    best = max(_states(name), key=lambda state: state.free_bytes)
    if best.free_bytes < least_bytes:
        raise OutOfMemory(
            f"{least_bytes:,} bytes wanted on a device of {name}; the freest, {name}:{best.device.index}, "
            f"has {best.free_bytes:,} of {best.total_bytes:,}"
        )
    return best.device
