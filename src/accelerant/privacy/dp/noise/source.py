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
from accelerant.ops._library import name_of
from accelerant.privacy.dp.noise import launch
from accelerant.privacy.dp.noise.charge import grid_steps
from accelerant.privacy.dp.noise.discrete import digits_of, make_plan
from accelerant.privacy.dp.noise.launch import PHILOX_GROUP, add_steps, gaussian_steps
from accelerant.privacy.random import SecureStream
from accelerant.privacy.random.device import compiled, index_of, reserve_source
from accelerant.privacy.random.llvm_kernels import lanes
from accelerant.privacy.random.stream import renewed_after_fork
from accelerant.runtime.compilation.philox import ROUNDS, WEYL
from accelerant.runtime.host import fork_safe
from accelerant.runtime.streams.stream import capturing

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COUNTERS = PHILOX_GROUP // 4  # of a group of elements. A tensor begins a new group
_ALIGNMENT = 16
_SMALL = 1 << 18
"""Most elements of a tensor of a CPU that is drawn together with others, since a launch takes as long as 10,000 draws.
28 tensors of 437,760 elements in all take 7.0 ms of secure noise, and 11.8 ms one by one; Philox's 2.4 and 4.8."""
_LOW = 0xFFFFFFFF


class NoiseSource(ABC):
    """Adds noise to tensors in place.

    Attributes:
        secure: whether a privacy proof holds for the noise, drawn on a grid from a cryptographic generator.
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
    discrete Laplace variable of scale scale_b / grid. x / grid is rounded to the nearest integer, halves to even; NaN
    counts as 0. Beyond +-2^46 x / grid saturates (not in float64), so that the sum never wraps and every result is a
    multiple of the grid. The sum, an integer, is converted once to float32 (for float64 tensors to float64), multiplied
    by the public grid * scale, then rounded to the tensor's dtype.

    Args:
        stream: of the keystream; one with a fresh key by default.

    Trust: the keystream and the values before noise are secret. Time does not depend on the drawn values on CUDA
    devices of compute capability 8.0 or newer and on CPUs with AVX-512 (Laplace noise: on all devices). Elsewhere
    tables of 8 KiB are read at secret addresses, from shared memory or the first-level cache: an observer who measures
    these accesses can learn about the noise.
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
            std: of the noise, in the units of x; 0 only rounds and scales.
            grid: a power of two from 2^-120 to 2^120.
            scale: of the result.

        Raises:
            ConfigError: a number out of range, or noise too wide for the grid; nothing was changed.
            UnsupportedDtype: another dtype.
        """
        steps = grid_steps(std, grid)
        _check(tensors, scale)
        plan = make_plan(steps) if steps else None
        for (device, dtype, _), members in _by_kind(tensors).items():
            if plan is not None and dtype in launch.fused_dtypes(device):
                with _contiguous(members) as dense:
                    launch.gaussian_add(self._stream, dense, plan, grid, scale)
                continue
            for x in members:
                noise = None if plan is None else gaussian_steps(self._stream, x.shape, plan, device)
                add_steps(x, noise, grid, scale)

    def add_laplace_(self, tensors: Sequence[Tensor], scale_b: float, *, grid: float, scale: float = 1.0) -> None:
        """Add discrete Laplace noise; arguments and errors of add_gaussian_."""
        steps = grid_steps(scale_b, grid)
        _check(tensors, scale)
        if steps:
            digits_of(steps)  # refuses before anything is changed
        for x in tensors:
            noise = launch.laplace_steps(self._stream, x.shape, steps, x.device) if steps else None
            add_steps(x, noise, grid, scale)

    def integers(self, shape: Sequence[int], std_grid: float, device: Any = "cpu") -> Tensor:
        """Return int64 draws of the discrete Gaussian; ConfigError if std_grid is not above 0, or too wide."""
        return gaussian_steps(self._stream, shape, make_plan(grid_steps(std_grid, 1.0)), torch.device(device))

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
            source and a forked process always get a new seed.
    """

    secure = False
    name = "philox gaussian"

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and not 0 <= seed < 2**64:
            raise ConfigError(f"seed must be in [0, 2^64), got {seed}")
        self._lock = fork_safe(threading.Lock())
        self._renew(seed)
        renewed_after_fork.add(self)

    def _renew(self, seed: int | None = None) -> None:
        self._seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self._host_counter = 0
        self._counters: dict[int, Tensor] = {}  # of each CUDA device

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
                self._add_dense([x.detach()], std, 1.0, laplace=False, fills=True)
            else:
                x.detach().zero_()
                self.add_gaussian_([x], std)

    def integers(self, shape: Sequence[int], std_grid: float, device: Any = "cpu") -> Tensor:
        """Return Gaussian draws of deviation std_grid, rounded to int64."""
        noise = torch.zeros(tuple(shape), device=device)
        self.add_gaussian_([noise], std_grid)
        return noise.round_().to(torch.int64)

    def _add(self, tensors: Sequence[Tensor], width: float, scale: float, *, laplace: bool) -> None:
        if not math.isfinite(width) or width < 0:
            raise ConfigError(f"the noise's width must be at least 0 and finite, got {width!r}")
        _check(tensors, scale)
        for (device, dtype, _), members in _by_kind(tensors).items():
            if dtype == torch.float32 or (device.type == "cuda" and dtype != torch.float64):
                with _contiguous(members) as dense:
                    self._add_dense(dense, width, scale, laplace=laplace)
                continue
            for x in members:
                noise = torch.zeros(x.shape, device=device)
                self._add_dense([noise], width, 1.0, laplace=laplace)
                x.detach().copy_((x.detach() + noise) * scale)

    def _add_dense(
        self, tensors: Sequence[Tensor], width: float, scale: float, *, laplace: bool, fills: bool = False
    ) -> None:
        """Replace x by (x + width z) scale, for contiguous tensors of one dtype and device.

        Args:
            tensors: float32, bfloat16 or float16; on the CPU only float32.
            laplace: z has the density exp(-|z|) / 2 instead of the normal one.
            fills: x counts as 0 and is not read (only CUDA devices).
        """
        device = tensors[0].device
        if device.type == "cpu":
            for x in tensors:
                self._add_on_host(x, width, scale, laplace)
            return
        index = index_of(device)
        _, kernel = compiled(launch.philox_source(name_of(tensors[0].dtype), laplace=laplace, fills=fills), device)
        provider, reserve = compiled(reserve_source(), device)
        for at in range(0, len(tensors), launch.ROWS):
            members = tensors[at : at + launch.ROWS]
            rows, groups = launch.packed_rows(members, PHILOX_GROUP)
            if groups:
                counter = self._counter_on(index)
                aligned = all(x.data_ptr() % _ALIGNMENT == 0 for x in members)
                first = torch.empty(1, dtype=torch.int64, device=device)
                provider.launch(reserve, (1,), (1,), (counter, first, groups * _COUNTERS))
                blocks = min(8 * multiprocessors(device), -(-groups * 32 // launch.PHILOX_THREADS))
                args = (rows, self._round_keys(index + 1), first, int(aligned), width, scale)
                elements = sum(x.numel() for x in members)
                with launch.noted("philox_noise", members, kernel, elements, accesses=1 if fills else 2):
                    kernel.handle.pack((blocks, 1, 1), args, index).start()

    def _add_on_host(self, x: Tensor, width: float, scale: float, laplace: bool) -> None:
        if n := x.numel():
            with self._lock:
                first = self._host_counter
                self._host_counter += -(-n // PHILOX_GROUP) * _COUNTERS
            keys = torch.from_numpy(np.frombuffer(self._round_keys(0), np.int32).copy())
            provider, kernel = compiled(launch.host_philox_source(laplace=laplace), x.device)
            with launch.noted("philox_noise", [x], kernel, n, accesses=2):
                provider.launch(kernel, (-(-n // (4 * lanes())),), (1,), (x, keys, first, 0, n, width, scale))

    def _counter_on(self, index: int) -> Tensor:
        """Return (1,) int64 on a CUDA device, the next counter, which each replay of a captured graph advances."""
        with self._lock:
            if index not in self._counters:
                if capturing(index):
                    raise ConfigError("noise is captured before it was drawn once on this device: run a step before")
                self._counters[index] = torch.zeros(1, dtype=torch.int64, device=torch.device("cuda", index))
            return self._counters[index]

    def _round_keys(self, stream: int) -> bytes:
        """Return the struct Keys of philox.cuh: the key's two words in each of ten rounds, the counter's third word."""
        halves = self._seed & _LOW, self._seed >> 32
        words = [halves[side] + i * WEYL[side] & _LOW for i in range(ROUNDS) for side in (0, 1)]
        return struct.pack("<21I", *words, stream)

    def __reduce__(self) -> tuple[Any, tuple[()]]:  # of copies, too
        return FastSource, ()

    def __repr__(self) -> str:
        return "FastSource()"


def _by_kind(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype, int], list[Tensor]]:
    """Group the tensors by device and dtype, in order; a CPU's that may share elements are in different groups."""
    groups: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = {}
    taken: dict[int, list[tuple[int, int]]] = {}
    for x in tensors:
        number = _first_apart(x, taken) if x.device.type == "cpu" and x.numel() else 0
        groups.setdefault((x.device, x.dtype, number), []).append(x)
    return groups


def _first_apart(x: Tensor, taken: dict[int, list[tuple[int, int]]]) -> int:
    """Return the first group whose tensors in x's storage end before x or begin after it, and note x as one of it.

    Args:
        taken: address of a storage -> of each group, the addresses between which its tensors lie.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    first, last = x.data_ptr(), x.data_ptr() + extent * x.element_size()
    spans = taken.setdefault(x.untyped_storage().data_ptr(), [])
    for number, (low, high) in enumerate(spans):
        if last <= low or high <= first:
            spans[number] = min(low, first), max(high, last)
            return number
    spans.append((first, last))
    return len(spans) - 1


@contextmanager
def _contiguous(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield contiguous tensors. Those that are not are copied and copied back; small ones of a CPU as one tensor."""
    detached = [x.detach() for x in tensors]
    small = [x for x in detached if x.device.type == "cpu" and x.numel() <= _SMALL]
    dense = [x for x in detached if len(small) < 2 or x.device.type != "cpu" or x.numel() > _SMALL]
    copies = [x.contiguous() for x in dense]
    joined = [torch.cat([x.reshape(-1) for x in small])] if len(small) > 1 else []
    yield copies + joined
    for x, y in zip(dense, copies, strict=True):
        if x.data_ptr() != y.data_ptr():
            x.copy_(y)
    for vector in joined:
        parts = vector.split([x.numel() for x in small])
        torch._foreach_copy_(small, [part.view(x.shape) for x, part in zip(small, parts, strict=True)])


def _check(tensors: Sequence[Tensor], scale: float) -> None:
    if not math.isfinite(scale):
        raise ConfigError(f"scale must be finite, got {scale!r}")
    for x in tensors:
        if x.device.type not in ("cpu", "cuda"):
            raise ConfigError(f"noise is drawn on cpu and cuda, not on {x.device.type}: move the tensors to the CPU")
        if x.dtype not in _DTYPES:
            raise UnsupportedDtype(f"noise is added to float32, bfloat16, float16 or float64, got {x.dtype}")
