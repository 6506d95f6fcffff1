"""Noise sources: discrete noise from ChaCha20, fast noise in floating point from Philox, and the launches of both."""

from __future__ import annotations

import functools
import math
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError, UnsupportedDtype
from accelerant.ops._hopper import HopperProgram
from accelerant.ops._launch import multiprocessors
from accelerant.ops._library import name_of
from accelerant.privacy.dp.noise import discrete
from accelerant.privacy.dp.noise.discrete import (
    Charge,
    GaussianKernel,
    LaplaceKernel,
    PhiloxKernel,
    charge,
    choose_grid,
    laplace_charge,
)
from accelerant.privacy.random import (
    SecureStream,
    chacha20_text,
    compiled,
    index_of,
    lanes,
    renewed_after_fork,
    reserve_source,
    take,
)
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import CUDA_TARGETS, Builder, Kernel, KernelSource, portable_header
from accelerant.runtime.compilation.llvm import ROUNDS, WEYL
from accelerant.runtime.host import fork_safe
from accelerant.runtime.ledger import OpRecord, RecordedLaunch, sole_record
from accelerant.runtime.streams.stream import capturing

__all__ = ["Charge", "FastSource", "NoiseSource", "SecureSource", "charge", "choose_grid", "laplace_charge"]

BLOCK = 128  # the largest block of the portable kernels
THREADS = 512  # of the CUDA kernel: 512 with 80 registers draw 2^28 in 3.99 ms on an H200, 1024 with 64 in 4.23
ROWS = 192  # the most tensors of a launch of the CUDA kernel, whose arguments have 4 KiB
PHILOX_THREADS = 256
PHILOX_GROUP = 1024  # elements of a group of philox_add
SHARED_BYTES = (512 * 32 + 3 * 512 * 4) * 4
RANGE = 2.0**46  # grid steps at which a value saturates before noise is added, unless it is float64
KINDS = {"float32": "VALUE_FLOAT", "bfloat16": "VALUE_BFLOAT16", "float16": "VALUE_FLOAT16", "int64": "VALUE_STEPS"}

_Plan = discrete.GaussianConvolution
_COMMON = ("*u32", "*u64", "*u32", "*", "i64", "i32", "i32", "i32", "i32", "u32")
_TABLES_LIMIT = 16
_tables: dict[tuple[object, str, int], Tensor] = {}
_held: list[Tensor] = []  # tables that captured graphs read


@functools.cache
def gaussian_source(terms: int, adds: bool) -> KernelSource:
    """Return gaussian_steps or gaussian_add (state, first, tables, x, n, k1, k2, k3, k4, one[, inverse, outward])."""
    if not 1 <= terms <= discrete.MAX_TERMS:
        raise ConfigError(f"terms must be 1 to {discrete.MAX_TERMS}, got {terms}")
    entry = "gaussian_add" if adds else "gaussian_steps"
    dialects: dict[str, str | Builder] = {"portable": _portable(terms, entry), "llvm": GaussianKernel(terms, adds)}
    return KernelSource(f"{entry}_{terms}", dialects, {entry: (*_COMMON, "f32", "f32") if adds else _COMMON})


@functools.cache
def laplace_source() -> KernelSource:
    """Return laplace_steps(state, first, thresholds, out, n, digits, blocks, one)."""
    dialects: dict[str, str | Builder] = {"portable": _portable(1, "laplace_steps"), "llvm": LaplaceKernel()}
    arguments = ("*u32", "*u64", "*u32", "*i64", "i64", "i32", "i32", "u32")
    return KernelSource("laplace_steps", dialects, {"laplace_steps": arguments})


def _portable(terms: int, entry: str) -> str:
    """Return the text of one kernel of kernel.c: a driver takes a second to compile each."""
    head, *kernels = _text("kernel.c").split("ACL_KERNEL ")
    (kernel,) = (kernel for kernel in kernels if f" {entry}(" in kernel.split("{", 1)[0])
    return f"#define TERMS {terms}\n" + chacha20_text() + _text("sampler.h") + head + "ACL_KERNEL " + kernel


@functools.cache
def fused_source(terms: int, kind: str) -> KernelSource:
    """Return gaussian(rows, state, first, tables, k1, k2, k3, k4, one, inverse, outward) of gaussian.cuh."""
    sizes = f"#define TERMS {terms}\n#define THREADS {THREADS}\n#define {KINDS[kind]}\n"
    parts = (portable_header(), chacha20_text(), _text("sampler.h"), _text("rows.cuh"), _text("gaussian.cuh"))
    program = HopperProgram("gaussian", sizes + "".join(parts), THREADS, SHARED_BYTES)
    arguments = ("struct", "*u32", "*u64", "*u32", "i32", "i32", "i32", "i32", "u32", "f32", "f32")
    return KernelSource(
        f"gaussian_{kind}_{terms}", {"cuda": program}, {"gaussian": arguments}, targets=CUDA_TARGETS[1:]
    )


@functools.cache
def host_philox_source(*, laplace: bool = False) -> KernelSource:
    """Return philox_add(x, keys, first, stream, n, width, outward) of discrete.py."""
    return KernelSource(
        f"philox_{'laplace' if laplace else 'normal'}_host",
        {"llvm": PhiloxKernel(laplace)},
        {"philox_add": ("*f32", "*u32", "i64", "i64", "i64", "f32", "f32")},
    )


@functools.cache
def philox_source(kind: str, *, laplace: bool = False, fills: bool = False) -> KernelSource:
    """Return philox_add(rows, keys, first, aligned, width, outward) of philox.cuh; fills: the tensors are not read."""
    options = f"#define {KINDS[kind]}\n" + "#define LAPLACE\n" * laplace + "#define FILLS\n" * fills
    text = options + portable_header() + _text("rows.cuh") + _text("philox.cuh")
    name = f"philox_{'laplace' if laplace else 'normal'}_{kind}" + "_fills" * fills
    arguments = ("struct", "struct", "*u64", "i32", "f32", "f32")
    program = HopperProgram("philox_add", text, PHILOX_THREADS, 0)
    return KernelSource(name, {"cuda": program}, {"philox_add": arguments})


@functools.cache
def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def fused_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the dtypes that gaussian_add takes on a device; others go through gaussian_steps and add_steps."""
    return (torch.float32, torch.bfloat16, torch.float16) if _is_fused(device) else (torch.float32,)


def add_steps(x: Tensor, noise: Tensor | None, grid: float, scale: float) -> None:
    """Replace x by (round(x / grid) + noise) * grid * scale with torch's functions; noise: int64, or None for none."""
    x = x.detach()
    if x.dtype == torch.float64:
        # A float64 past 2^53 steps is a multiple of the grid already. Products by the grid, a power of two, are exact,
        # and the sum is rounded once, so the result depends on the exact sum alone; nothing saturates.
        held = x.nan_to_num(nan=0.0)
        total = torch.where(held.abs() < 2.0**53 * grid, (held * (1 / grid)).round_() * grid, held)
        x.copy_((total if noise is None else total + noise.to(torch.float64) * grid) * scale)
        return
    steps = x.to(torch.float32) * (1 / grid)
    steps = steps.round_().nan_to_num_(nan=0.0, posinf=RANGE, neginf=-RANGE).clamp_(-RANGE, RANGE).to(torch.int64)
    x.copy_((steps if noise is None else steps + noise).to(torch.float32) * (grid * scale))


def gaussian_add(stream: SecureStream, tensors: Sequence[Tensor], plan: _Plan, grid: float, scale: float) -> None:
    """Replace x by (round(x / grid) + Z) * grid * scale; x contiguous, of one dtype, on one device."""
    numbers = (1 / grid, grid * scale)
    if tensors and _is_fused(tensors[0].device):
        for at in range(0, len(tensors), ROWS):
            _launch_rows(stream, tensors[at : at + ROWS], plan, numbers)
    else:
        for x in tensors:
            _launch_one(stream, x, plan, numbers)


def gaussian_steps(stream: SecureStream, shape: Sequence[int], plan: _Plan, device: torch.device) -> Tensor:
    """Return int64 draws of the discrete Gaussian."""
    out = torch.empty(tuple(shape), dtype=torch.int64, device=device)
    if _is_fused(device):
        _launch_rows(stream, [out], plan, (1.0, 1.0))
    else:
        _launch_one(stream, out, plan, ())
    return out


def laplace_steps(stream: SecureStream, shape: Sequence[int], steps: Fraction, device: torch.device) -> Tensor:
    """Return int64 draws of the discrete Laplace distribution."""
    digits, count = discrete.digits_of(steps), math.prod(shape)
    blocks = discrete.laplace_blocks(digits)
    draws = lanes() if device.type == "cpu" else 1  # of an index
    indices = -(-count // draws)
    out = torch.empty(indices * draws, dtype=torch.int64, device=device)
    if count:
        taken = take(stream, count * blocks, device)
        table = _on_device(("laplace", steps), device)
        provider, kernel = compiled(laplace_source(), device)
        grid, block = _grid(indices, device)
        with noted("laplace_noise", [out], kernel, count, accesses=1):
            provider.launch(kernel, grid, block, (*taken, table, out, count, digits, blocks, 1))
    return out[:count].view(tuple(shape))


def _launch_one(stream: SecureStream, x: Tensor, plan: _Plan, numbers: tuple[float, ...]) -> None:
    """Launch the portable or the CPU's kernel for one tensor; without numbers the draws replace x."""
    if not x.numel():
        return
    units = discrete.groups_of(x.numel(), plan.terms) * discrete.GROUP
    taken = take(stream, units * discrete.UNIT_BLOCKS, x.device)
    provider, kernel = compiled(gaussian_source(plan.terms, bool(numbers)), x.device)
    grid, block = _grid(units // (lanes() if x.device.type == "cpu" else 1), x.device)
    table = _on_device(plan, x.device)
    with noted("gaussian_noise", [x], kernel, x.numel(), accesses=2 if numbers else 1):
        provider.launch(kernel, grid, block, (*taken, table, x, x.numel(), *_factors(plan), 1, *numbers))


def _launch_rows(stream: SecureStream, tensors: Sequence[Tensor], plan: _Plan, numbers: tuple[float, float]) -> None:
    """Launch gaussian.cuh for up to ROWS tensors."""
    rows, groups = packed_rows(tensors, discrete.GROUP * discrete.draws_of_unit(plan.terms))
    if not groups:
        return
    device = tensors[0].device
    taken, table = take(stream, groups * discrete.GROUP * discrete.UNIT_BLOCKS, device), _on_device(plan, device)
    _, kernel = compiled(fused_source(plan.terms, name_of(tensors[0].dtype)), device)
    blocks = min(multiprocessors(device), -(-groups * 32 // THREADS))
    args = (rows, *taken, table, *_factors(plan), 1, *numbers)
    elements = sum(x.numel() for x in tensors)
    with noted("gaussian_noise", tensors, kernel, elements, accesses=1 if tensors[0].dtype == torch.int64 else 2):
        kernel.handle.pack((blocks, 1, 1), args, index_of(device)).start()


def noted(op: str, tensors: Sequence[Tensor], kernel: Kernel, elements: int, *, accesses: int) -> RecordedLaunch:
    """Record the block, a launch over tensors of one dtype and device, as a call of op in the ledger."""
    x = tensors[0]
    case = f"{elements} {name_of(x.dtype)}"
    record = _record(op, kernel.name, kernel.backend, kernel.device, case, accesses * elements * x.itemsize)
    return RecordedLaunch(record, registry.create(kernel.backend), kernel.device)


@functools.lru_cache(maxsize=1024)
def _record(op: str, implementation: str, backend: str, index: int, case: str, size_bytes: int) -> OpRecord:
    device = backend if backend == "cpu" else f"{backend}:{index}"
    return sole_record(op, implementation, backend, device, case, size_bytes=size_bytes)


def packed_rows(tensors: Sequence[Tensor], group: int) -> tuple[bytes, int]:
    """Return the struct Rows of rows.cuh, for groups of `group` elements, and the number of groups."""
    rows, groups = [], 0
    for x in tensors:
        if x.numel():
            rows.append((x.data_ptr(), x.numel(), groups))
            groups += -(-x.numel() // group)
    if groups >= 2**32:
        raise ConfigError(f"{groups} groups of draws in one launch: at most 2^32 - 1")
    pointers, sizes, begins = zip(*rows, *[(0, 0, 0)] * (ROWS - len(rows)), strict=True)
    return struct.pack(f"<{ROWS}Q{ROWS}q{ROWS}III", *pointers, *sizes, *begins, groups, len(rows)), groups


def _grid(indices: int, device: torch.device) -> tuple[tuple[int], tuple[int]]:
    """Return grid and block for a number of indices (CPU) or threads."""
    return ((indices,), (1,)) if device.type == "cpu" else ((-(-indices // BLOCK),), (BLOCK,))


def _factors(plan: _Plan) -> tuple[int, ...]:
    """Return k1 to k4, 0 beyond the plan's terms."""
    return (*plan.factors[1:], *[0] * (discrete.MAX_TERMS - plan.terms))


def _is_fused(device: torch.device) -> bool:
    """Return whether gaussian.cuh serves a device: it needs 88 KiB of shared memory a block."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _on_device(key: _Plan | tuple[str, Fraction], device: torch.device) -> Tensor:
    """Return a table in a device's memory, cached."""
    cached = (key, device.type, index_of(device))
    table = _tables.get(cached)
    if table is None:
        if capturing(device):
            raise ConfigError("noise of this width is captured before it was drawn once: run a step before the capture")
        words = discrete.thresholds(key[1]) if isinstance(key, tuple) else discrete.make_tables(key.weights())
        table = torch.from_numpy(words.reshape(-1).view(np.int32).copy()).to(device)
        while len(_tables) >= _TABLES_LIMIT:
            _tables.pop(next(iter(_tables)))
        _tables[cached] = table
    if device.type == "cuda" and capturing(device):
        _held.append(table)
    return table


# --- sources ----------------------------------------------------------------------------------------------------------
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COUNTERS = PHILOX_GROUP // 4  # of a group of elements. A tensor begins a new group
_ALIGNMENT = 16
_SMALL = 1 << 18  # most elements of a CPU's tensor that is drawn together with others
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
        steps = discrete.grid_steps(std, grid)
        _check(tensors, scale)
        plan = discrete.convolution_of(steps) if steps else None
        for (device, dtype, _), members in _by_kind(tensors).items():
            if plan is not None and dtype in fused_dtypes(device):
                with _contiguous(members) as dense:
                    gaussian_add(self._stream, dense, plan, grid, scale)
                continue
            for x in members:
                noise = None if plan is None else gaussian_steps(self._stream, x.shape, plan, device)
                add_steps(x, noise, grid, scale)

    def add_laplace_(self, tensors: Sequence[Tensor], scale_b: float, *, grid: float, scale: float = 1.0) -> None:
        """Add discrete Laplace noise; arguments and errors of add_gaussian_."""
        steps = discrete.grid_steps(scale_b, grid)
        _check(tensors, scale)
        if steps:
            discrete.digits_of(steps)  # refuses before anything is changed
        for x in tensors:
            noise = laplace_steps(self._stream, x.shape, steps, x.device) if steps else None
            add_steps(x, noise, grid, scale)

    def integers(self, shape: Sequence[int], std_grid: float, device: Any = "cpu") -> Tensor:
        """Return int64 draws of the discrete Gaussian; ConfigError if std_grid is not above 0, or too wide."""
        return gaussian_steps(
            self._stream, shape, discrete.convolution_of(discrete.grid_steps(std_grid, 1.0)), torch.device(device)
        )

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
        noise = torch.zeros(tuple(shape), dtype=torch.float32, device=device)
        self.add_gaussian_([noise], std_grid)
        return noise.round_().to(torch.int64)

    def _add(self, tensors: Sequence[Tensor], width: float, scale: float, *, laplace: bool) -> None:
        if not math.isfinite(width) or width < 0:
            raise ConfigError(f"the noise's width must be at least 0 and finite, got {width!r}")
        if width and not 2.0**-120 <= width <= 2.0**120:  # the noise is float32's: others would be 0, or infinite
            raise ConfigError(f"the noise's width must be 0, or from 2^-120 to 2^120, got {width!r}")
        _check(tensors, scale)
        for (device, dtype, _), members in _by_kind(tensors).items():
            if dtype == torch.float32 or (device.type == "cuda" and dtype != torch.float64):
                with _contiguous(members) as dense:
                    self._add_dense(dense, width, scale, laplace=laplace)
                continue
            for x in members:
                noise = torch.zeros(x.shape, dtype=torch.float32, device=device)  # of the kernel
                self._add_dense([noise], width, 1.0, laplace=laplace)
                x.detach().copy_((x.detach() + noise) * scale)

    def _add_dense(
        self, tensors: Sequence[Tensor], width: float, scale: float, *, laplace: bool, fills: bool = False
    ) -> None:
        """Replace x by (x + width z) scale, for contiguous tensors of one dtype and device; `fills`: x counts as 0."""
        device = tensors[0].device
        if device.type == "cpu":
            for x in tensors:
                self._add_on_host(x, width, scale, laplace)
            return
        index = index_of(device)
        _, kernel = compiled(philox_source(name_of(tensors[0].dtype), laplace=laplace, fills=fills), device)
        provider, reserve = compiled(reserve_source(), device)
        for at in range(0, len(tensors), ROWS):
            members = tensors[at : at + ROWS]
            rows, groups = packed_rows(members, PHILOX_GROUP)
            if groups:
                counter = self._counter_on(index)
                aligned = all(x.data_ptr() % _ALIGNMENT == 0 for x in members)
                first = torch.empty(1, dtype=torch.int64, device=device)
                provider.launch(reserve, (1,), (1,), (counter, first, groups * _COUNTERS))
                blocks = min(8 * multiprocessors(device), -(-groups * 32 // PHILOX_THREADS))
                args = (rows, self._round_keys(index + 1), first, int(aligned), width, scale)
                elements = sum(x.numel() for x in members)
                with noted("philox_noise", members, kernel, elements, accesses=1 if fills else 2):
                    kernel.handle.pack((blocks, 1, 1), args, index).start()

    def _add_on_host(self, x: Tensor, width: float, scale: float, laplace: bool) -> None:
        if n := x.numel():
            with self._lock:
                first = self._host_counter
                self._host_counter += -(-n // PHILOX_GROUP) * _COUNTERS
            keys = torch.from_numpy(np.frombuffer(self._round_keys(0), np.int32).copy())
            provider, kernel = compiled(host_philox_source(laplace=laplace), x.device)
            with noted("philox_noise", [x], kernel, n, accesses=2):
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
    """Return the first group whose tensors in x's storage (spans in `taken`) do not overlap x, and note x in it."""
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
