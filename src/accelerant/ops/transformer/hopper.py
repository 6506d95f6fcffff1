"""Launch of the kernel for Hopper (hopper.cu): a product with the gradient of gelu in its epilogue."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from accelerant.ops._hopper import launch as hopper
from accelerant.ops._hopper.launch import HopperProgram, Mma
from accelerant.ops._launch import ceil_div, multiprocessors
from accelerant.runtime.dispatch import Case
from accelerant.runtime.providers.cuda_launch import PackedLaunch

KINDS = ("struct", "struct", "struct", "struct", "struct", "*f32", "struct")
"""Kinds of the kernel's arguments: tensor maps of x, weight, z, dz and a; partial sums; struct Shape."""

_TILE_M, _TILE_N = 128, 128
_STAGES = 4  # steps of K in flight
_HELD = 4  # boxes of z that a warp holds
_BOX = 16  # rows of a box of z, dz or a
_GROUP = 8
_SHARED_BYTES = hopper.ring_bytes(_STAGES, _TILE_M, _TILE_N) + 8 * ((_HELD + 2) * _BOX * 128 + 8)
"""Operand tiles in flight; for each warp its boxes of z, two boxes of a and a barrier."""

_FILE = Path(__file__).with_name("hopper.cu")


def refuses(case: Case) -> str | None:
    """Return why the kernel cannot serve a case of shape (M, N, K), or None."""
    return hopper.refuses_product(case) or (
        None if "tanh" in case.options else "computes gelu by the tanh approximation only"
    )


@functools.cache
def program() -> HopperProgram:
    """Return the program text."""
    return hopper.product_program(
        "transformer_dz", _FILE, torch.bfloat16, Mma(_TILE_N), _TILE_M // 64, _STAGES, _SHARED_BYTES, GIVE=24, TAKE=240
    )


_launches: hopper.LaunchCache[PackedLaunch] = hopper.LaunchCache()


def launch_dz(x: Tensor, weight: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dz = (x weight^T) gelu'(z), a = gelu(z) (M, N), and float32 sums of dz's columns, a row per 32 rows of M.

    x is (M, K) bfloat16, weight (N, K) the transpose of the linear map's weight, z (M, N) contiguous.
    """
    x, weight = hopper.readable(x), hopper.readable(weight)
    M, N = z.shape
    dz, a = torch.empty_like(z), torch.empty_like(z)
    partial = torch.empty(4 * ceil_div(M, _TILE_M), N, dtype=torch.float32, device=z.device)
    if M % _TILE_M:
        partial[-4:].zero_()  # warps whose rows are all past the end write nothing
    key = (
        x.data_ptr(), weight.data_ptr(), z.data_ptr(), dz.data_ptr(), a.data_ptr(), partial.data_ptr(),
        x.shape, x.stride(), N, weight.stride(), x.get_device(),
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        launch = _launches.keep(key, _prepare(x, weight, z, dz, a, partial))
    launch.start()
    return dz, a, partial


def _prepare(x: Tensor, weight: Tensor, z: Tensor, dz: Tensor, a: Tensor, partial: Tensor) -> PackedLaunch:
    (M, N), K = z.shape, x.shape[1]
    tiles = hopper.product_tiles(M, N, K, _TILE_M, _TILE_N, _GROUP)
    shape = (ctypes.c_int32 * 7)(N, M, *tiles)
    boxes = ((x, _TILE_M), (weight, _TILE_N), (z, _BOX), (dz, _BOX), (a, _BOX))
    args = (*(hopper.tensor_map(*box) for box in boxes), partial, bytes(shape))
    return hopper.pack(program(), KINDS, min(tiles[-1], multiprocessors(x.device)), args, x.get_device())
