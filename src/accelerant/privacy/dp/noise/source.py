"""Noise sources: discrete noise from ChaCha20, and fast noise in floating point from Philox."""

from __future__ import annotations

import math
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError, UnsupportedDtype
from accelerant.ops._launch import multiprocessors
from accelerant.privacy.dp.noise.charge import grid_steps
from accelerant.privacy.dp.noise.discrete import digits_of, make_plan
from accelerant.privacy.dp.noise.launch import (
    PHILOX_GROUP,
    PHILOX_THREADS,
    ROWS,
    add_steps,
    compiled,
    fused_dtypes,
    gaussian_add,
    gaussian_steps,
    host_philox_source,
    index_of,
    laplace_steps,
    noted,
    packed_rows,
    philox_source,
)
from accelerant.privacy.random import SecureStream
from accelerant.privacy.random.device import compiled_reserve
from accelerant.privacy.random.llvm_kernels import lanes
from accelerant.runtime.streams.stream import capturing

__all__ = ["FastSource", "NoiseSource", "PhiloxState", "SecureSource", "add_philox", "round_keys"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class NoiseSource(ABC):
    """Adds noise to tensors in place.

    Attributes:
        secure: whether a privacy proof holds for the noise: drawn on a grid from a cryptographic generator.
        name: in the ledger.
    """

    secure: bool
    name: str

    @abstractmethod
    def add_gaussian_(self, tensors: Sequence[Tensor], std: float, *, grid: float, scale: float = 1.0) -> None:
        """Add Gaussian noise to each element, then scale."""

    @abstractmethod
    def add_laplace_(self, tensors: Sequence[Tensor], scale_b: float, *, grid: float, scale: float = 1.0) -> None:
        """Add Laplace noise of density proportional to exp(-|z| / scale_b) to each element, then scale."""

    @abstractmethod
    def integers(self, shape: Sequence[int], std_grid: float, device: Any = "cpu") -> Tensor:
        """Return int64 draws of the Gaussian of deviation std_grid, in steps."""


class SecureSource(NoiseSource):
    """Discrete noise on a grid, from ChaCha20.

        x <- (round(x / grid) + Z) * grid * scale

    Z is a discrete Gaussian of deviation std / grid (discrete.py; `charge` bounds the distance from exact), or a
    discrete Laplace variable of scale scale_b / grid. x / grid is rounded to the nearest integer, halves to even;
    beyond +-2^46 it saturates, and NaN counts as 0, so that the sum never wraps and nothing but a multiple of the grid
    comes out. The sum, an integer of 64 bits, is converted once to float32 (float64 of float64) and multiplied by
    grid * scale, which needs no secret; then rounded to the tensor's dtype.

    Args:
        stream: of the keystream; one with a fresh key by default.

    Trust: the keystream and the values before noise are secret. Time does not depend on what is drawn on CUDA devices
    of compute capability 8.0 or newer and on CPUs with AVX-512 (Laplace noise: anywhere). Elsewhere tables of 8 KiB are
    read at secret addresses, from shared memory or the first-level cache: whoever measures those can learn about them.
    """

    secure = True
    name = "chacha20 discrete gaussian"

    def __init__(self, stream: SecureStream | None = None) -> None:
        self._stream = SecureStream() if stream is None else stream

    def add_gaussian_(self, tensors: Sequence[Tensor], std: float, *, grid: float, scale: float = 1.0) -> None:
        """Add discrete Gaussian noise; see the class.

        Args:
            tensors: float32, bfloat16, float16 or float64, of any devices; one launch for up to 192 of one dtype on a
                CUDA device.
            std: of the noise, in the units of x; 0 for rounding and scaling alone.
            grid: a power of two from 2^-120 to 2^120.
            scale: of the result.

        Raises:
            ConfigError: a number out of range, or noise too wide for the grid; nothing was changed.
            UnsupportedDtype: another dtype.
        """
        steps = grid_steps(std, grid)
        _check(tensors, scale)
        plan = make_plan(steps) if steps else None
        for (device, dtype), members in _by_kind(tensors).items():
            if plan is not None and dtype in fused_dtypes(device):
                with _contiguous(members) as dense:
                    gaussian_add(self._stream, dense, plan, grid, scale)
                continue
            for x in members:
                noise = None if plan is None else gaussian_steps(self._stream, x.shape, plan, device)
                add_steps(x, noise, grid, scale)

    def add_laplace_(self, tensors: Sequence[Tensor], scale_b: float, *, grid: float, scale: float = 1.0) -> None:
        """Add discrete Laplace noise; arguments and errors as add_gaussian_'s."""
        steps = grid_steps(scale_b, grid)
        _check(tensors, scale)
        if steps:
            digits_of(steps)  # refuses before anything is changed
        for x in tensors:
            add_steps(x, laplace_steps(self._stream, x.shape, steps, x.device) if steps else None, grid, scale)

    def integers(self, shape: Sequence[int], std_grid: float, device: Any = "cpu") -> Tensor:
        """Return int64 draws of the discrete Gaussian of deviation std_grid.

        Raises:
            ConfigError: std_grid is not above 0, or too wide.
        """
        return gaussian_steps(self._stream, shape, make_plan(grid_steps(std_grid, 1.0)), torch.device(device))

    def laplace_integers(self, shape: Sequence[int], scale_grid: float, device: Any = "cpu") -> Tensor:
        """Return int64 draws of the discrete Laplace distribution: P(z) proportional to exp(-|z| / scale_grid).

        Raises:
            ConfigError: scale_grid is not above 0, or too wide.
        """
        return laplace_steps(self._stream, shape, grid_steps(scale_grid, 1.0), torch.device(device))

    def __repr__(self) -> str:
        return "SecureSource()"


class FastSource(NoiseSource):
    """Gaussian noise in floating point from Philox: for research, not for a privacy claim.

        x <- (x + N(0, std^2)) * scale

    Philox is not cryptographic, and the low bits of floating-point noise reveal x (Mironov 2012, "On significance
    of the least significant bits for differential privacy"). The grid is not used. The noise is float32's, also of
    float64 tensors.

    Args:
        seed: below 2^64; by default from the system's entropy. torch.manual_seed has no effect. A copy, an unpickled
            source and a forked process have seeds of their own, whatever was given.
    """

    secure = False
    name = "philox gaussian"

    def __init__(self, seed: int | None = None) -> None:
        self._state = PhiloxState(seed)

    def add_gaussian_(self, tensors: Sequence[Tensor], std: float, *, grid: float = 1.0, scale: float = 1.0) -> None:
        """Add Gaussian noise; see the class. Several tensors of one dtype on a CUDA device take one launch."""
        self._add(tensors, std, scale, laplace=False)

    def add_laplace_(self, tensors: Sequence[Tensor], scale_b: float, *, grid: float = 1.0, scale: float = 1.0) -> None:
        """Add Laplace noise of density exp(-|z| / scale_b) / (2 scale_b), as add_gaussian_."""
        self._add(tensors, scale_b, scale, laplace=True)

    def fill_gaussian_(self, tensors: Sequence[Tensor], std: float) -> None:
        """Replace each element by Gaussian noise; on CUDA devices without reading it."""
        for x in tensors:
            if x.device.type == "cuda" and x.dtype != torch.float64 and x.is_contiguous() and x.numel():
                _check([x], std)
                self._own()
                add_philox(self._state, [x.detach()], std, 1.0, laplace=False, fills=True)
            else:
                x.detach().zero_()
                self.add_gaussian_([x], std)

    def integers(self, shape: Sequence[int], std_grid: float, device: Any = "cpu") -> Tensor:
        """Return int64 Gaussian draws of deviation std_grid, rounded."""
        noise = torch.zeros(tuple(shape), device=device)
        self.add_gaussian_([noise], std_grid)
        return noise.round_().to(torch.int64)

    def _add(self, tensors: Sequence[Tensor], width: float, scale: float, *, laplace: bool) -> None:
        if not math.isfinite(width) or width < 0:
            raise ConfigError(f"the noise's width must be at least 0 and finite, got {width!r}")
        _check(tensors, scale)
        self._own()
        for (device, dtype), members in _by_kind(tensors).items():
            if dtype == torch.float32 or (device.type == "cuda" and dtype != torch.float64):
                with _contiguous(members) as dense:
                    add_philox(self._state, dense, width, scale, laplace=laplace)
                continue
            for x in members:
                noise = torch.zeros(x.shape, device=device)
                add_philox(self._state, [noise], width, 1.0, laplace=laplace)
                x.detach().copy_((x.detach() + noise) * scale)

    def _own(self) -> None:
        """Take a new seed in a forked process."""
        if self._state.process != os.getpid():
            self._state = PhiloxState()

    def __copy__(self) -> FastSource:
        return FastSource()

    def __deepcopy__(self, memo: dict[int, Any]) -> FastSource:
        return FastSource()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return FastSource, ()

    def __repr__(self) -> str:
        return "FastSource()"


def _by_kind(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Group the tensors by device and dtype, in order."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in tensors:
        groups.setdefault((x.device, x.dtype), []).append(x)
    return groups


@contextmanager
def _contiguous(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield contiguous tensors; those that are not are copied, and copied back."""
    dense = [x.detach().contiguous() for x in tensors]
    yield dense
    for x, y in zip(tensors, dense, strict=True):
        if x.data_ptr() != y.data_ptr():
            x.detach().copy_(y)


def _check(tensors: Sequence[Tensor], scale: float) -> None:
    if not math.isfinite(scale):
        raise ConfigError(f"scale must be finite, got {scale!r}")
    for x in tensors:
        if x.device.type not in ("cpu", "cuda"):
            raise ConfigError(f"noise is drawn on cpu and cuda, not on {x.device.type}: move the tensors to the CPU")
        if x.dtype not in _DTYPES:
            raise UnsupportedDtype(f"noise is added to float32, bfloat16, float16 or float64, got {x.dtype}")


# --- Philox ----------------------------------------------------------------------------------------------------------

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_COUNTERS = PHILOX_GROUP // 4
"""Counters of a group of elements. A tensor begins a new group."""

_ALIGNMENT = 16
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


class PhiloxState:
    """A seed, and the counters of each device.

    Args:
        seed: below 2^64; None for the system's entropy.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and not 0 <= seed < 2**64:
            raise ConfigError(f"seed must be in [0, 2^64), got {seed}")
        self.seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._counter = 0
        self._counters: dict[int, Tensor] = {}

    def take(self, counters: int) -> int:
        """Take so many counters on the CPU; return the first."""
        with self._lock:
            first = self._counter
            self._counter += counters
        return first

    def counter_on(self, index: int) -> Tensor:
        """Return (1,) int64 on a CUDA device, the next counter: a captured graph draws anew at each replay.

        Raises:
            ConfigError: a graph is being captured before noise was drawn once there.
        """
        with self._lock:
            if index not in self._counters:
                if capturing(index):
                    raise ConfigError("noise is captured before it was drawn once on this device: run a step before")
                self._counters[index] = torch.zeros(1, dtype=torch.int64, device=torch.device("cuda", index))
            return self._counters[index]


def add_philox(
    state: PhiloxState, tensors: Sequence[Tensor], width: float, scale: float, *, laplace: bool, fills: bool = False
) -> None:
    """Replace x by (x + width z) scale, for contiguous tensors of one dtype and device.

    Args:
        state: of the seed and counters.
        tensors: float32, bfloat16 or float16; on the CPU float32 alone.
        width: of the noise.
        scale: of the result.
        laplace: z has the density exp(-|z|) / 2 instead of the normal one.
        fills: what is in x counts as 0, and is not read (CUDA devices alone).
    """
    if tensors[0].device.type == "cpu":
        for x in tensors:
            _add_on_host(state, x, width, scale, laplace)
        return
    device = tensors[0].device
    index = index_of(device)
    _, kernel = compiled(philox_source(_NAMES[tensors[0].dtype], laplace=laplace, fills=fills), device)
    provider, reserve = compiled_reserve(index)
    for at in range(0, len(tensors), ROWS):
        members = tensors[at : at + ROWS]
        rows, groups = packed_rows(members, PHILOX_GROUP)
        if groups:
            counter = state.counter_on(index)
            aligned = all(x.data_ptr() % _ALIGNMENT == 0 for x in members)
            first = torch.empty(1, dtype=torch.int64, device=device)
            provider.launch(reserve, (1,), (1,), (counter, first, groups * _COUNTERS))
            blocks = min(8 * multiprocessors(device), -(-groups * 32 // PHILOX_THREADS))
            args = (rows, round_keys(state.seed, index + 1), first, int(aligned), width, scale)
            with noted("philox_noise", members, kernel, sum(map(Tensor.numel, members)), accesses=1 if fills else 2):
                kernel.handle.pack((blocks, 1, 1), args, index).start()


def _add_on_host(state: PhiloxState, x: Tensor, width: float, scale: float, laplace: bool) -> None:
    n = x.numel()
    if n:
        first = state.take(-(-n // PHILOX_GROUP) * _COUNTERS)
        keys = torch.from_numpy(np.frombuffer(round_keys(state.seed, 0), np.int32).copy())
        provider, kernel = compiled(host_philox_source(laplace=laplace), x.device)
        args = (x, keys, first, 0, n, width, scale)
        with noted("philox_noise", [x], kernel, n, accesses=2):
            provider.launch(kernel, (-(-n // (4 * lanes())),), (1,), args)


def round_keys(seed: int, stream: int) -> bytes:
    """Return the struct Keys of philox.cuh: the key's two words in each of ten rounds, and the counter's third word."""
    halves = seed & _LOW, seed >> 32
    words = [halves[side] + i * _WEYL[side] & _LOW for i in range(10) for side in (0, 1)]
    return struct.pack("<21I", *words, stream)
