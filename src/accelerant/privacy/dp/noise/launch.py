"""Launches of the samplers: on CPUs, on CUDA devices, fused with rounding and scaling where the dtype allows."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.ops._launch import multiprocessors
from accelerant.privacy.dp.noise.laplace import digits_of, laplace_blocks, thresholds
from accelerant.privacy.dp.noise.plan import Plan
from accelerant.privacy.dp.noise.program import BLOCK, ROWS, THREADS, fused_source, gaussian_source, laplace_source
from accelerant.privacy.dp.noise.reference import GROUP, UNIT_BLOCKS, draws_of_unit, groups_of
from accelerant.privacy.dp.noise.table import Tables, make_tables
from accelerant.privacy.random import SecureStream
from accelerant.privacy.random.device import take
from accelerant.privacy.random.llvm_kernels import lanes
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.ledger import OpRecord
from accelerant.runtime.provider import ComputeProvider
from accelerant.runtime.recorded_launch import RecordedLaunch, sole_record
from accelerant.runtime.streams.stream import capturing

__all__ = [
    "add_steps",
    "compiled",
    "fused_dtypes",
    "gaussian_add",
    "gaussian_steps",
    "index_of",
    "laplace_steps",
    "noted",
    "packed_rows",
    "table_words",
]

RANGE = 2.0**46
"""Grid steps at which a value saturates before noise is added."""

_FUSED_CAPABILITY = (8, 0)
"""Devices with 88 KiB of shared memory a block."""

_TABLES_LIMIT = 16
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.int64: "int64"}


def fused_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Those that gaussian_add takes on a device; the others go through gaussian_steps and add_steps."""
    if device.type == "cuda" and _is_fused(index_of(device)):
        return torch.float32, torch.bfloat16, torch.float16
    return (torch.float32,)


def add_steps(x: Tensor, noise: Tensor | None, grid: float, scale: float) -> None:
    """Make of x (round(x / grid) + noise) * grid * scale by torch's functions; noise int64, None for none."""
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    x = x.detach()
    steps = (x.to(real) * (1 / grid)).round_().nan_to_num_(nan=0.0, posinf=RANGE, neginf=-RANGE).clamp_(-RANGE, RANGE)
    total = steps.to(torch.int64) if noise is None else steps.to(torch.int64) + noise
    x.copy_(total.to(real) * (grid * scale))


def gaussian_add(stream: SecureStream, tensors: Sequence[Tensor], plan: Plan, grid: float, scale: float) -> None:
    """Make of x (round(x / grid) + Z) * grid * scale, of contiguous tensors of one dtype on one device."""
    if not tensors:
        return
    device = tensors[0].device
    numbers = (1 / grid, grid * scale)
    if device.type == "cuda" and _is_fused(index_of(device)):
        for at in range(0, len(tensors), ROWS):
            _launch_rows(stream, tensors[at : at + ROWS], plan, numbers)
        return
    for x in tensors:
        _launch_one(stream, x, plan, numbers)


def gaussian_steps(stream: SecureStream, shape: Sequence[int], plan: Plan, device: torch.device) -> Tensor:
    """int64 draws."""
    out = torch.empty(tuple(shape), dtype=torch.int64, device=device)
    if not out.numel():
        return out
    if device.type == "cuda" and _is_fused(index_of(device)):
        _launch_rows(stream, [out], plan, (1.0, 1.0))
    else:
        _launch_one(stream, out, plan, ())
    return out


def laplace_steps(stream: SecureStream, shape: Sequence[int], steps: Fraction, device: torch.device) -> Tensor:
    """int64 draws of the discrete Laplace distribution."""
    digits, count = digits_of(steps), 1
    for size in shape:
        count *= size
    blocks = laplace_blocks(digits)
    together = lanes() if device.type == "cpu" else 1
    indices = -(-count // together)
    out = torch.empty(indices * together, dtype=torch.int64, device=device)
    if count:
        taken = take(stream, count * blocks, device)
        table = _on_device(("laplace", steps), device)
        provider, kernel = compiled(laplace_source(), device)
        grid, block = _grid(indices, device)
        with noted("laplace_noise", [out], kernel, count, accesses=1):
            provider.launch(kernel, grid, block, (*taken, table, out, count, digits, blocks, 1))
    return out[:count].view(tuple(shape))


# --- launches --------------------------------------------------------------------------------------------------------


def _launch_one(stream: SecureStream, x: Tensor, plan: Plan, numbers: tuple[float, ...]) -> None:
    """The portable kernels, or the CPU's: a tensor a launch; without numbers x gets the draws."""
    if not x.numel():
        return
    groups = groups_of(x.numel(), plan.terms)
    taken = take(stream, groups * GROUP * UNIT_BLOCKS, x.device)
    provider, kernel = compiled(gaussian_source(plan.terms, bool(numbers)), x.device)
    grid, block = _grid(groups * (GROUP // (lanes() if x.device.type == "cpu" else 1)), x.device)
    table = _on_device(plan, x.device)
    with noted("gaussian_noise", [x], kernel, x.numel(), accesses=2 if numbers else 1):
        provider.launch(kernel, grid, block, (*taken, table, x, x.numel(), *_factors(plan), 1, *numbers))


def _launch_rows(stream: SecureStream, tensors: Sequence[Tensor], plan: Plan, numbers: tuple[float, float]) -> None:
    """gaussian.cuh: up to ROWS tensors a launch."""
    rows, groups = packed_rows(tensors, GROUP * draws_of_unit(plan.terms))
    if not groups:
        return
    device = tensors[0].device
    taken, table = take(stream, groups * GROUP * UNIT_BLOCKS, device), _on_device(plan, device)
    _, kernel = compiled(fused_source(plan.terms, _NAMES[tensors[0].dtype]), device)
    blocks = min(multiprocessors(device), -(-groups * 32 // THREADS))
    args = (rows, *taken, table, *_factors(plan), 1, *numbers)
    elements = sum(x.numel() for x in tensors)
    with noted("gaussian_noise", tensors, kernel, elements, accesses=1 if tensors[0].dtype == torch.int64 else 2):
        kernel.handle.pack((blocks, 1, 1), args, index_of(device)).start()


def noted(op: str, tensors: Sequence[Tensor], kernel: Kernel, elements: int, *, accesses: int) -> RecordedLaunch:
    """Record the block as a call in the runtime's ledger.

    Args:
        op: its name in the ledger.
        tensors: of one dtype and device.
        kernel: the kernel that is launched.
        elements: in all tensors.
        accesses: reads and writes of each element.
    """
    x = tensors[0]
    case = f"{elements} {str(x.dtype).removeprefix('torch.')}"
    record = _record(op, kernel.name, kernel.backend, kernel.device, case, accesses * elements * x.itemsize)
    return RecordedLaunch(record, registry.create(kernel.backend), kernel.device)


@functools.lru_cache(maxsize=1024)
def _record(op: str, implementation: str, backend: str, index: int, case: str, size_bytes: int) -> OpRecord:
    device = backend if backend == "cpu" else f"{backend}:{index}"
    return sole_record(op, implementation, backend, device, case, size_bytes=size_bytes)


def packed_rows(tensors: Sequence[Tensor], group: int) -> tuple[bytes, int]:
    """The struct Rows of rows.cuh, with groups of so many elements, and how many those are."""
    pointers, sizes, begins, groups = [], [], [], 0
    for x in tensors:
        if x.numel():
            pointers.append(x.data_ptr())
            sizes.append(x.numel())
            begins.append(groups)
            groups += -(-x.numel() // group)
    if groups >= 2**32:
        raise ConfigError(f"{groups} groups of draws in one launch: at most 2^32 - 1")
    rest = [0] * (ROWS - len(pointers))
    packed = struct.pack(
        f"<{ROWS}Q{ROWS}q{ROWS}III", *pointers, *rest, *sizes, *rest, *begins, *rest, groups, len(pointers)
    )
    return packed, groups


def _grid(indices: int, device: torch.device) -> tuple[tuple[int], tuple[int]]:
    """Grid and block of so many indices or threads."""
    return ((indices,), (1,)) if device.type == "cpu" else ((-(-indices // BLOCK),), (BLOCK,))


def _factors(plan: Plan) -> tuple[int, int, int, int]:
    k = (*plan.factors[1:], 0, 0, 0, 0)
    return k[0], k[1], k[2], k[3]


def index_of(device: torch.device) -> int:
    """Its number on its backend."""
    if device.type != "cuda":
        return 0
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _is_fused(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= _FUSED_CAPABILITY


def compiled(source: KernelSource, device: torch.device) -> tuple[ComputeProvider, Kernel]:
    """A source's one kernel on a device; sources are known by their names."""
    key = source.name, device.type, index_of(device)
    if key not in _kernels:
        provider = registry.create(device.type)
        _kernels[key] = provider, provider.compile(source, device=key[2])
    return _kernels[key]


_kernels: dict[tuple[str, str, int], tuple[ComputeProvider, Kernel]] = {}


def table_words(tables: Tables) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    """(2048,) as kernels take them."""
    return np.concatenate([tables.first, tables.rest.reshape(-1)])


_tables: dict[tuple[object, str, int], Tensor] = {}


def _on_device(wanted: Plan | tuple[str, Fraction], device: torch.device) -> Tensor:
    """A table in a device's memory, kept.

    Raises:
        ConfigError: a graph is being captured, and the table is not there yet.
    """
    key = (wanted, device.type, index_of(device))
    found = _tables.get(key)
    if found is None:
        if capturing(device):
            raise ConfigError("noise of this width is captured before it was drawn once: run a step before the capture")
        words = table_words(make_tables(wanted.weights())) if isinstance(wanted, Plan) else thresholds(wanted[1])
        found = torch.from_numpy(words.reshape(-1).view(np.int32).copy()).to(device)
        while len(_tables) >= _TABLES_LIMIT:
            _tables.pop(next(iter(_tables)))
        _tables[key] = found
    if device.type == "cuda" and capturing(device):
        _held.append(found)
    return found


_held: list[Tensor] = []
"""Tables that captured graphs read."""
