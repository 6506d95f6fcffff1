"""Programs and launches of the samplers: on CPUs, on CUDA devices, fused with rounding and scaling by dtype."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.ops._hopper.program import HopperProgram
from accelerant.ops._launch import multiprocessors
from accelerant.ops._library import name_of
from accelerant.privacy.dp.noise.discrete import (
    GROUP,
    MAX_TERMS,
    UNIT_BLOCKS,
    GaussianPlan,
    digits_of,
    draws_of_unit,
    groups_of,
    laplace_blocks,
    make_tables,
    thresholds,
)
from accelerant.privacy.dp.noise.llvm_discrete import GaussianKernel, LaplaceKernel
from accelerant.privacy.dp.noise.llvm_philox import PhiloxKernel
from accelerant.privacy.random import SecureStream
from accelerant.privacy.random.device import chacha20_text, compiled, index_of, take
from accelerant.privacy.random.llvm_kernels import lanes
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import CUDA_TARGETS, Builder, Kernel, KernelSource, portable_header
from accelerant.runtime.ledger import OpRecord
from accelerant.runtime.recorded_launch import RecordedLaunch, sole_record
from accelerant.runtime.streams.stream import capturing

BLOCK = 128  # the largest block of the portable kernels
THREADS = 512  # of the CUDA kernel: 512 with 80 registers draw 2^28 in 3.99 ms on an H200, 1024 with 64 in 4.23
ROWS = 192  # the most tensors of a launch of the CUDA kernel, whose arguments have 4 KiB
PHILOX_THREADS = 256
PHILOX_GROUP = 1024  # elements of a group of philox_add
SHARED_BYTES = (512 * 32 + 3 * 512 * 4) * 4
RANGE = 2.0**46  # grid steps at which a value saturates before noise is added, unless it is float64
KINDS = {"float32": "VALUE_FLOAT", "bfloat16": "VALUE_BFLOAT16", "float16": "VALUE_FLOAT16", "int64": "VALUE_STEPS"}

_COMMON = ("*u32", "*u64", "*u32", "*", "i64", "i32", "i32", "i32", "i32", "u32")
_TABLES_LIMIT = 16
_tables: dict[tuple[object, str, int], Tensor] = {}
_held: list[Tensor] = []  # tables that captured graphs read


@functools.cache
def gaussian_source(terms: int, adds: bool) -> KernelSource:
    """Return gaussian_steps or gaussian_add (state, first, tables, x, n, k1, k2, k3, k4, one[, inverse, outward]).

    state and first as in keystream_source; tables: those of make_tables.
    """
    if not 1 <= terms <= MAX_TERMS:
        raise ConfigError(f"terms must be 1 to {MAX_TERMS}, got {terms}")
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
def fused_source(terms: int, kind: str, threads: int = THREADS) -> KernelSource:
    """Return gaussian(rows, state, first, tables, k1, k2, k3, k4, one, inverse, outward) of gaussian.cuh."""
    sizes = f"#define TERMS {terms}\n#define THREADS {threads}\n#define {KINDS[kind]}\n"
    parts = (portable_header(), chacha20_text(), _text("sampler.h"), _text("rows.cuh"), _text("gaussian.cuh"))
    program = HopperProgram("gaussian", sizes + "".join(parts), threads, SHARED_BYTES)
    arguments = ("struct", "*u32", "*u64", "*u32", "i32", "i32", "i32", "i32", "u32", "f32", "f32")
    return KernelSource(
        f"gaussian_{kind}_{terms}", {"cuda": program}, {"gaussian": arguments}, targets=CUDA_TARGETS[1:]
    )


@functools.cache
def host_philox_source(*, laplace: bool = False) -> KernelSource:
    """Return philox_add(x, keys, first, stream, n, width, outward) of llvm_philox.py."""
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


def gaussian_add(
    stream: SecureStream, tensors: Sequence[Tensor], plan: GaussianPlan, grid: float, scale: float
) -> None:
    """Replace x by (round(x / grid) + Z) * grid * scale; x contiguous, of one dtype, on one device."""
    numbers = (1 / grid, grid * scale)
    if tensors and _is_fused(tensors[0].device):
        for at in range(0, len(tensors), ROWS):
            _launch_rows(stream, tensors[at : at + ROWS], plan, numbers)
    else:
        for x in tensors:
            _launch_one(stream, x, plan, numbers)


def gaussian_steps(stream: SecureStream, shape: Sequence[int], plan: GaussianPlan, device: torch.device) -> Tensor:
    """Return int64 draws of the discrete Gaussian."""
    out = torch.empty(tuple(shape), dtype=torch.int64, device=device)
    if _is_fused(device):
        _launch_rows(stream, [out], plan, (1.0, 1.0))
    else:
        _launch_one(stream, out, plan, ())
    return out


def laplace_steps(stream: SecureStream, shape: Sequence[int], steps: Fraction, device: torch.device) -> Tensor:
    """Return int64 draws of the discrete Laplace distribution."""
    digits, count = digits_of(steps), math.prod(shape)
    blocks = laplace_blocks(digits)
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


def _launch_one(stream: SecureStream, x: Tensor, plan: GaussianPlan, numbers: tuple[float, ...]) -> None:
    """Launch the portable or the CPU's kernel for one tensor; without numbers the draws replace x."""
    if not x.numel():
        return
    units = groups_of(x.numel(), plan.terms) * GROUP
    taken = take(stream, units * UNIT_BLOCKS, x.device)
    provider, kernel = compiled(gaussian_source(plan.terms, bool(numbers)), x.device)
    grid, block = _grid(units // (lanes() if x.device.type == "cpu" else 1), x.device)
    table = _on_device(plan, x.device)
    with noted("gaussian_noise", [x], kernel, x.numel(), accesses=2 if numbers else 1):
        provider.launch(kernel, grid, block, (*taken, table, x, x.numel(), *_factors(plan), 1, *numbers))


def _launch_rows(
    stream: SecureStream, tensors: Sequence[Tensor], plan: GaussianPlan, numbers: tuple[float, float]
) -> None:
    """Launch gaussian.cuh for up to ROWS tensors."""
    rows, groups = packed_rows(tensors, GROUP * draws_of_unit(plan.terms))
    if not groups:
        return
    device = tensors[0].device
    taken, table = take(stream, groups * GROUP * UNIT_BLOCKS, device), _on_device(plan, device)
    _, kernel = compiled(fused_source(plan.terms, name_of(tensors[0].dtype)), device)
    blocks = min(multiprocessors(device), -(-groups * 32 // THREADS))
    args = (rows, *taken, table, *_factors(plan), 1, *numbers)
    elements = sum(x.numel() for x in tensors)
    with noted("gaussian_noise", tensors, kernel, elements, accesses=1 if tensors[0].dtype == torch.int64 else 2):
        kernel.handle.pack((blocks, 1, 1), args, index_of(device)).start()


def noted(op: str, tensors: Sequence[Tensor], kernel: Kernel, elements: int, *, accesses: int) -> RecordedLaunch:
    """Record the block, a launch of a kernel over tensors of one dtype and device, as a call of op in the ledger.

    `elements` are those of all tensors, `accesses` the reads and writes of each.
    """
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


def _factors(plan: GaussianPlan) -> tuple[int, ...]:
    """Return k1 to k4, 0 beyond the plan's terms."""
    return (*plan.factors[1:], *[0] * (MAX_TERMS - plan.terms))


def _is_fused(device: torch.device) -> bool:
    """Return whether gaussian.cuh serves a device: it needs 88 KiB of shared memory a block."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _on_device(key: GaussianPlan | tuple[str, Fraction], device: torch.device) -> Tensor:
    """Return a table in a device's memory, cached."""
    cached = (key, device.type, index_of(device))
    table = _tables.get(cached)
    if table is None:
        if capturing(device):
            raise ConfigError("noise of this width is captured before it was drawn once: run a step before the capture")
        words = make_tables(key.weights()) if isinstance(key, GaussianPlan) else thresholds(key[1])
        table = torch.from_numpy(words.reshape(-1).view(np.int32).copy()).to(device)
        while len(_tables) >= _TABLES_LIMIT:
            _tables.pop(next(iter(_tables)))
        _tables[cached] = table
    if device.type == "cuda" and capturing(device):
        _held.append(table)
    return table
