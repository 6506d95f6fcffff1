"""Where a key goes when nobody says: a GPU is looked for only where looking is cheap, or worth it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from accelerant.algebra.field.memory_space import HOST, MemorySpace, space_at
from accelerant.config import settings
from accelerant.errors import BackendUnavailable, ConfigError
from accelerant.runtime.provider import ComputeDevice

__all__ = ["Devices", "chosen_places"]

Devices = str | ComputeDevice | Sequence[str | ComputeDevice]

_LEAST_DOMAIN = 1 << 16
"""Points from which on torch is imported to look for a GPU. That, starting CUDA and copying the key take some three
seconds; two CPU cores prove 32,701 constraints in 0.1 s."""

_NODES = ("/dev/nvidiactl", "/dev/dxg")
"""One is there where an NVIDIA driver is: on Linux, and on Windows' Linux."""


def chosen_places(device: Devices, domain_size: int) -> tuple[MemorySpace, ...]:
    """The places of one device, or of several that share the work.

    Args:
        device: as Prover has it.
        domain_size: of the key.

    Raises:
        ConfigError: no backend has that name, or no device that number; none is named; the CPU is among several.
        BackendUnavailable: the backend is not there; says why.
    """
    if isinstance(device, str | ComputeDevice):
        return (_automatic(domain_size) if device == "auto" else space_at(device),)
    places = tuple(space_at(each) for each in device)
    if not places or (len(places) > 1 and HOST in places):
        raise ConfigError(f"device must be one, or several of which none is the CPU; got {device!r}")
    return places


def _automatic(domain_size: int) -> MemorySpace:
    if settings().backend != "auto":
        return space_at(settings().backend)
    there = any(Path(node).exists() for node in _NODES) and importlib.util.find_spec("torch") is not None
    if not there or ("torch" not in sys.modules and domain_size < _LEAST_DOMAIN):
        return HOST
    try:
        return space_at("cuda")
    except BackendUnavailable:
        return HOST
