"""The launch of the kernel for Hopper (hopper.cu): a product with gelu's gradient in its epilogue."""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accelerant.ops._rows import ceil_div, multiprocessors
from accelerant.ops.attention.hopper import ELEMENTS, HopperProgram, Mma, load, primitives, tensor_map
from accelerant.runtime.dispatch import Case
from accelerant.runtime.kernel import Kernel

if TYPE_CHECKING:
    from accelerant.runtime.providers.cuda_launch import PackedLaunch

__all__ = ["KINDS", "launch_dz", "program", "refuses"]

KINDS = ("struct", "struct", "struct", "struct", "struct", "*f32", "struct")
"""Of the kernel's arguments: maps of x, weight, z, dz and a; partial sums; struct Shape."""

_TILE_M, _TILE_N = 128, 128
_STAGES, _HELD = 4, 4
"""Steps of the sum in flight; boxes of z that a warp holds."""

_BOX = 16
"""Rows of a box of z, dz or a."""

_GROUP = 8
_THREADS = 384
_SHARED_BYTES = _STAGES * (_TILE_M + _TILE_N) * 128 + 8 * (_HELD + 2) * _BOX * 128 + 16 * _STAGES + 64
"""The steps in flight; boxes of z and two of a for each warp; the barriers."""

_PREPARED_LIMIT = 4096


def refuses(case: Case) -> str | None:
    """Why the kernel cannot serve a case of shape (M, N, K); None if it can."""
    M, N, K = case.shape
    if case.device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(case.device) != (9, 0):
        return "is for sm_90"
    if case.dtype != torch.bfloat16:
        return f"takes bfloat16, not {str(case.dtype).removeprefix('torch.')}"
    if "tanh" not in case.options:
        return "has gelu's approximation by tanh alone"
    if not math.prod(case.shape):
        return "takes no empty tensor"
    if N % 8 or K % 8:
        return f"rows of {K if K % 8 else N} elements do not begin on 16-byte boundaries"
    if max(M, N, K) >= 2**30 or ceil_div(M, 64) * ceil_div(N, 64) >= 2**30:
        return "counts tiles in 32 bits"
    return None


@functools.cache
def program() -> HopperProgram:
    """The kernel's text."""
    constants = {"STAGES": _STAGES, "GIVE": 24, "TAKE": 240}
    element = ELEMENTS[torch.bfloat16]
    macros = [f'#define ELEMENT "{element}"', *(f"#define {name} {value}" for name, value in constants.items())]
    body = (Path(__file__).parent / "hopper.cu").read_text()
    text = "\n".join([*macros, primitives(), Mma(_TILE_N).text(), '#line 1 "hopper.cu"', body])
    return HopperProgram("transformer_dz", text, _THREADS, _SHARED_BYTES)


@functools.cache
def _kernel(device: int) -> Kernel:
    return load(program(), KINDS, device)


def launch_dz(x: Tensor, weight: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply and go back through gelu, on the current stream.

    Args:
        x: (M, K) bfloat16.
        weight: (N, K), the transpose of the linear map's weight.
        z: (M, N), contiguous.

    Returns:
        dz and a, (M, N); float32 partial sums of dz's columns, one row for each 32 of M.

    Raises:
        CompileError, LaunchError: see LoadedKernel.
    """
    x, weight = _readable(x), _readable(weight)
    M, N = z.shape
    dz, a = torch.empty_like(z), torch.empty_like(z)
    partial = torch.empty(4 * ceil_div(M, _TILE_M), N, dtype=torch.float32, device=z.device)
    if M % _TILE_M:
        partial[-4:].zero_()  # warps whose rows are all beyond the last write nothing
    key = (
        x.data_ptr(), weight.data_ptr(), z.data_ptr(), dz.data_ptr(), a.data_ptr(), partial.data_ptr(),
        x.shape, x.stride(), N, weight.stride(), x.get_device(),
    )  # fmt: skip
    packed = _packed.get(key)
    if packed is None:
        if len(_packed) >= _PREPARED_LIMIT:
            _packed.clear()
        packed = _packed[key] = _pack(x, weight, z, dz, a, partial)
    packed.start()
    return dz, a, partial


_packed: dict[tuple[object, ...], PackedLaunch] = {}
"""Launches by all that they depend on: an allocator hands out the same few addresses again and again."""


def _readable(x: Tensor) -> Tensor:
    """The matrix where the copy engine can read it, else a copy."""
    if x.stride(1) == 1 and x.data_ptr() % 16 == 0 and (x.shape[0] == 1 or (x.stride(0) > 0 and x.stride(0) % 8 == 0)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _pack(x: Tensor, weight: Tensor, z: Tensor, dz: Tensor, a: Tensor, partial: Tensor) -> PackedLaunch:
    """The launch with everything in place."""
    (M, N), K = z.shape, x.shape[1]
    device = x.get_device()
    down, across = ceil_div(M, _TILE_M), ceil_div(N, _TILE_N)
    shape = (ctypes.c_int32 * 7)(N, M, ceil_div(K, 64), down, across, _GROUP, down * across)
    boxes = ((x, _TILE_M), (weight, _TILE_N), (z, _BOX), (dz, _BOX), (a, _BOX))
    maps = [tensor_map(matrix[None, None], rows) for matrix, rows in boxes]
    grid = (min(down * across, multiprocessors(x.device)), 1, 1)
    packed: PackedLaunch = _kernel(device).handle.pack(grid, (*maps, partial, bytes(shape)), device)
    return packed
