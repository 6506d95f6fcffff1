"""Proving keys: their interface, the choice of the device, timings of stages, and the key in the memory of the CPU.

The CPU kernels' limbs differ from the file's, so points are copied once, in chunks, and the pages of the file are
released as they are read. A key and its proofs take less than twice the file's size.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.memory_space import HOST, MemorySpace, space_at, spaces_at
from accelerant.algebra.field.words import not_below
from accelerant.algebra.msm.cpu import CpuBases, cpu_plan
from accelerant.config import settings
from accelerant.errors import BackendUnavailable, ConfigError
from accelerant.runtime.files import clipped
from accelerant.runtime.host import usable_cores
from accelerant.runtime.provider import compile_seconds
from accelerant.runtime.registry import DeviceLike, is_automatic
from accelerant.zk.formats.circuit import Witness
from accelerant.zk.formats.zkey import Zkey
from accelerant.zk.groth16.matrices import SparseMatrix, quotient, snarkjs_scalar_field
from accelerant.zk.multi_scalar import Devices, run_sums

U64 = npt.NDArray[np.uint64]
ProgressCallback = Callable[[str], None]

SECTIONS = ("A", "B1", "B2", "C", "H")
"""Sections of points in a key. The scalars of A, B1 and B2 are the witness, of C its private values, of H the
quotient's values."""

_MIN_DOMAIN = 1 << 16
"""Smallest domain for which torch is imported to look for a GPU. Importing it, starting CUDA and copying the key take
some three seconds; two CPU cores prove 32,701 constraints in 0.1 s."""

_NVIDIA_NODES = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of NVIDIA's driver on Linux and in the Windows Subsystem for Linux."""

_CHUNK_POINTS = 1 << 14  # Points converted at a time: 1 or 2 MB of BN254
_SMALL_BITS = 32  # Scalars below 2^32 have few digits and do not count when the window is chosen


class UnreducedError(Exception):
    """A value of the witness is not below r."""


class KeySums(NamedTuple):
    """The multi-scalar multiplications of a proof, which a device computes meanwhile.

    Attributes:
        public: waits for (n_public, 4), the public inputs, from the same copy of the witness as the sums; raises
            UnreducedError. Called before `sum`.
        sum: waits for the sum of a section: words of one affine point in Montgomery form, of any shape.
        spans: part -> seconds of device time, after all sums; parts overlap. Empty on the CPU.
    """

    public: Callable[[], U64]
    sum: Callable[[str], U64]
    spans: Callable[[], dict[str, float]]


class Stages:
    """Timings of stages in seconds, without the compilation of kernels; `progress` gets each name before it begins."""

    def __init__(self, progress: ProgressCallback | None = None, compilation: str = "compile") -> None:
        self.timings: dict[str, float] = {compilation: 0.0}
        self._progress, self._compilation = progress, compilation

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as the stage `name`."""
        if self._progress is not None and name not in self.timings:
            self._progress(name)
        start, compiled = time.perf_counter(), compile_seconds()
        yield
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start
        self.compiled(name, compile_seconds() - compiled)

    def compiled(self, name: str, seconds: float) -> None:
        """Move time of a stage to the compilation."""
        self.timings[name] -= seconds
        self.timings[self._compilation] += seconds

    @property
    def compile_s(self) -> float:
        """Seconds of compilation."""
        return self.timings[self._compilation]


def spaces_of(device: DeviceLike, domain_size: int, devices: Devices = None) -> tuple[MemorySpace, ...]:
    """Return the memory spaces of one device, or of several that share the work; ConfigError as for Prover."""
    if isinstance(device, list | tuple):
        raise ConfigError(f"several devices are devices={clipped(device)}, not device=")
    if devices is None:
        return (_automatic(domain_size) if is_automatic(device) else space_at(device),)
    spaces = tuple(spaces_at(device, devices))
    if len(spaces) > 1 and HOST in spaces:
        raise ConfigError(f"devices must be one, or several of which none is the CPU; got {clipped(devices)}")
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


# --- the CPU ---------------------------------------------------------------------------------------------------------


class HostKey:
    """The sections and constraints of a key on the CPU, prepared for many witnesses."""

    label = HOST.label  # in the ledger

    def __init__(self, zkey: Zkey, stages: Stages) -> None:
        """Read the sections of a key, which may be closed afterwards; raises FormatError as Zkey.coefficients."""
        family = family_of(zkey.family)
        with stages("key: constraints"):
            field = snarkjs_scalar_field(family)
            self._rows = SparseMatrix.from_coefficients(field, zkey.domain_size, zkey.coefficients)
            zkey.forget()
        with stages("key: points"):
            curves = {name: family.g2 if name == "B2" else family.g1 for name in SECTIONS}
            self._sections = {name: _HostSection(curve, zkey, name) for name, curve in curves.items()}
        self._n_public = zkey.n_public

    def begin(self, witness: Witness, stages: Stages) -> KeySums:
        """Copy a witness, whose file may change at any time, and start its sums; `stages` also times the waits."""
        with stages("witness"):
            values = np.array(witness.values, np.uint64)
            if not_below(values, self._rows.field.modulus).size:
                raise UnreducedError

        private = self._n_public + 1

        def sum_(name: str) -> U64:
            scalars = values[private:] if name == "C" else values
            if name == "H":
                with stages("quotient"):
                    scalars = quotient(self._rows, values)
            with stages(f"sum {name}"):
                return self._sections[name].msm(scalars)

        return KeySums(lambda: values[1:private], sum_, dict)

    def explain(self) -> str:
        """Describe where each section is stored and how it is summed, one line per section."""
        return "\n".join(f"{name}: {section.explain()}" for name, section in self._sections.items())


class _HostSection:
    """The finite points of a section, in the form of the kernels."""

    def __init__(self, curve: Curve[Any], zkey: Zkey, name: str) -> None:
        self._curve = curve
        finite = np.zeros(len(zkey.points[name]), np.bool_)
        self._bases = CpuBases.of_chunks(curve, _finite(zkey.chunks(name, _CHUNK_POINTS), finite), len(finite))
        self._indices = None if self._bases.n == len(finite) else np.flatnonzero(finite)

    def msm(self, scalars: U64) -> U64:
        """Return the sum of scalars, (n, 4) below the order, times the points: (1, *shape), Montgomery form."""
        rows = scalars if self._indices is None else scalars[self._indices]
        large = rows[:, 1:].any(axis=1) | (rows[:, 0] >> np.uint64(_SMALL_BITS) != 0)
        plan = cpu_plan(self._curve.order, max(1, int(np.count_nonzero(large))), usable_cores())
        words = HOST.contiguous(rows)
        total: U64 = run_sums(HOST, self._curve, [words], lambda row: self._bases.msm(row, plan))
        return total

    def explain(self) -> str:
        return f"{self._bases.n} points on the CPU; {self._bases.explain()}"


def _finite(chunks: Iterator[U64], finite: npt.NDArray[np.bool_]) -> Iterator[U64]:
    """Yield the finite points of each chunk, and mark them in `finite`."""
    start = 0
    for chunk in chunks:
        mask = finite[start : start + len(chunk)]
        np.any(chunk, axis=1, out=mask)
        start += len(chunk)
        yield chunk if mask.all() else chunk[mask]
