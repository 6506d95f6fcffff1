"""The launch of the kernel for Hopper (hopper.cu): a product with gelu's gradient in its epilogue."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accelerant.ops._hopper import ELEMENTS, HopperProgram, Mma, hopper_program, load, product, tensor_map
from accelerant.ops._hopper.product import HEADER, THREADS, readable, ring_bytes, tiles
from accelerant.ops._rows import ceil_div, multiprocessors
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.dispatch import Case

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
_SHARED_BYTES = ring_bytes(_STAGES, _TILE_M, _TILE_N) + 8 * ((_HELD + 2) * _BOX * 128 + 8)
"""The steps in flight; boxes of z, two of a and a barrier for each warp."""

_PREPARED_LIMIT = 4096
_FILE = Path(__file__).with_name("hopper.cu")


def refuses(case: Case) -> str | None:
    """Why the kernel cannot serve a case of shape (M, N, K); None if it can."""
    reason = product.refuses(case)
    return reason or (None if "tanh" in case.options else "has gelu's approximation by tanh alone")


@functools.cache
def program() -> HopperProgram:
    """The kernel's text."""
    mma = Mma(_TILE_N)
    constants: dict[str, int | str] = {
        "HEIGHT": _TILE_M // 64, "WIDTH": _TILE_N, "STAGES": _STAGES, "MMA": mma.name, "GIVE": 24, "TAKE": 240,
    }  # fmt: skip
    text = hopper_program(_FILE, ELEMENTS[torch.bfloat16], (mma,), constants, (HEADER,))
    return HopperProgram("transformer_dz", text, THREADS, _SHARED_BYTES)


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
    x, weight = readable(x), readable(weight)
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


def _pack(x: Tensor, weight: Tensor, z: Tensor, dz: Tensor, a: Tensor, partial: Tensor) -> PackedLaunch:
    """The launch with everything in place."""
    (M, N), K = z.shape, x.shape[1]
    device = x.get_device()
    work = tiles(M, N, K, _TILE_M, _TILE_N, _GROUP)
    shape = (ctypes.c_int32 * 7)(N, M, *work)
    boxes = ((x, _TILE_M), (weight, _TILE_N), (z, _BOX), (dz, _BOX), (a, _BOX))
    maps = [tensor_map(matrix[None, None], rows) for matrix, rows in boxes]
    grid = (min(work[-1], multiprocessors(x.device)), 1, 1)
    packed: PackedLaunch = _kernel(device).handle.pack(grid, (*maps, partial, bytes(shape)), device)
    return packed
