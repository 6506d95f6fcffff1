"""The interface of a proving key in some memory space, timings of stages, and the choice of the device."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.memory_space import HOST, MemorySpace, space_at
from accelerant.config import settings
from accelerant.errors import BackendUnavailable, ConfigError
from accelerant.runtime.provider import ComputeDevice

__all__ = ["SECTIONS", "Devices", "KeySums", "ProgressCallback", "ProvingKey", "Stages", "UnreducedError", "spaces_of"]

U64 = npt.NDArray[np.uint64]
ProgressCallback = Callable[[str], None]
Devices = str | ComputeDevice | Sequence[str | ComputeDevice]

SECTIONS = ("A", "B1", "B2", "C", "H")
"""Sections of points in a key. The scalars of A, B1 and B2 are the witness, of C its private values, of H the
quotient's values."""

_MIN_DOMAIN = 1 << 16
"""Smallest domain for which torch is imported to look for a GPU. Importing it, starting CUDA and copying the key take
some three seconds; two CPU cores prove 32,701 constraints in 0.1 s."""

_NVIDIA_NODES = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of NVIDIA's driver on Linux and in the Windows Subsystem for Linux."""


class UnreducedError(Exception):
    """A value of the witness is not below r."""


class KeySums(NamedTuple):
    """The multi-scalar multiplications of a proof.

    Attributes:
        sums: section -> words of one affine point in Montgomery form, of any shape.
        public: (n_public, 4), the public inputs, from the same copy of the witness as the sums.
        spans: part -> seconds of device time; parts overlap. Empty on the CPU.
    """

    sums: dict[str, U64]
    public: U64
    spans: dict[str, float]


class Stages:
    """Timings of consecutive stages.

    Attributes:
        timings: stage -> seconds, in the order in which stages began.
    """

    def __init__(self, progress: ProgressCallback | None = None) -> None:
        """Progress: called with the name of each stage before it begins."""
        self.timings: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as the stage `name`."""
        if self._progress is not None:
            self._progress(name)
        start = time.perf_counter()
        yield
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start


class ProvingKey(Protocol):
    """The point sections and constraints of a key, prepared for many witnesses.

    Attributes:
        label: name of the device, as in the ledger.
    """

    label: str

    def begin(self, values: U64, stages: Stages) -> Callable[[], KeySums]:
        """Copy a witness and start its sums; return a function that waits for them and may raise UnreducedError.

        Args:
            values: (n_vars, 4) words in the mapped file, which may change at any time.
            stages: times each part of the work, including that of the returned function.
        """
        ...

    def explain(self) -> str:
        """Describe where each section is stored and how it is summed, one line per section."""
        ...


def spaces_of(device: Devices, domain_size: int) -> tuple[MemorySpace, ...]:
    """Return the memory spaces of one device, or of several that share the work.

    Args:
        device: as for Prover.
        domain_size: the key's.

    Raises:
        ConfigError: unknown backend or device number; an empty list; the CPU among several devices.
        BackendUnavailable: the backend is unavailable; says why.
    """
    if isinstance(device, str | ComputeDevice):
        return (_automatic(domain_size) if device == "auto" else space_at(device),)
    spaces = tuple(map(space_at, device))
    if not spaces or (len(spaces) > 1 and HOST in spaces):
        raise ConfigError(f"device must be one, or several of which none is the CPU; got {device!r}")
    return spaces


def _automatic(domain_size: int) -> MemorySpace:
    if settings().backend != "auto":
        return space_at(settings().backend)
    has_gpu = any(Path(node).exists() for node in _NVIDIA_NODES) and importlib.util.find_spec("torch") is not None
    if not has_gpu or ("torch" not in sys.modules and domain_size < _MIN_DOMAIN):
        return HOST
    try:
        return space_at("cuda")
    except BackendUnavailable:
        return HOST
