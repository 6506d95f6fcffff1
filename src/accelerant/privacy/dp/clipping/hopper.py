"""Launch of the Hopper kernel (hopper.cu) that forms per-example gradients of a matrix and their squared norms."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from accelerant.ops._hopper import launch as hopper
from accelerant.ops._hopper.program import ELEMENTS, HopperProgram, Mma
from accelerant.ops._launch import ceil_div, multiprocessors
from accelerant.runtime.dispatch import Case
from accelerant.runtime.providers.cuda_launch import PackedLaunch

KINDS = ("struct", "struct", "struct", "*f32", "struct")
"""Argument types: tensor maps of g, a and the result; partial sums of squares; struct Tiles."""

_TILE_M, _TILE_N = 128, 192
_STAGES, _SLOTS = 4, 4
"""Pipeline stages of the sum; output buffers of a warp."""

_BOX = 16
"""Rows of an output tile of a warp."""

_GROUP = 8
_SHARED_BYTES = hopper.ring_bytes(_STAGES, _TILE_M, _TILE_N) + 8 * _SLOTS * _BOX * 128
"""Pipeline stages and output buffers."""

_FILE = Path(__file__).with_name("hopper.cu")


def refuses(case: Case) -> str | None:
    """Return why the kernel cannot serve a case of shape (B, T, K, N); None if it can."""
    B, T, K, N = case.shape
    if reason := hopper.refuses_device(case, tuple(ELEMENTS)):
        return reason
    if N % 8 or K % 8:
        return f"rows of {K if K % 8 else N} elements do not begin on 16-byte boundaries"
    if max(T, N, K, B * ceil_div(N, 64) * ceil_div(K, 64)) >= 2**27:
        return "counts tiles in 32 bits"
    return None


@functools.cache
def program(dtype: torch.dtype) -> HopperProgram:
    """Return the kernel's program for bfloat16 or float16."""
    return hopper.product_program(
        "clip_form", _FILE, dtype, Mma(_TILE_N, a_across=True, b_across=True), _TILE_M // 64, _STAGES, _SHARED_BYTES,
        SLOTS=_SLOTS, ACROSS=1, IS_BF16=int(dtype == torch.bfloat16), GIVE=40, TAKE=232,
    )  # fmt: skip


_launches: hopper.LaunchCache[PackedLaunch] = hopper.LaunchCache()


def launch_form(a: Tensor, g: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Form each g_i^T a_i on the current stream, in `out` if it is given.

    a (B, T, K) is bfloat16 or float16, g (B, T, N) of its dtype. Returns (B, N, K) in that dtype, and (B, P) float32,
    whose sums over P are the squared norms. CompileError and LaunchError: see LoadedKernel.
    """
    a, g = hopper.readable(a), hopper.readable(g)
    (B, _, K), N = a.shape, g.shape[2]
    each = torch.empty(B, N, K, dtype=a.dtype, device=a.device) if out is None else out
    count = 4 * ceil_div(N, _TILE_M) * ceil_div(K, _TILE_N)
    partial = torch.empty(B, count, dtype=torch.float32, device=a.device)
    key = (
        a.data_ptr(), g.data_ptr(), each.data_ptr(), partial.data_ptr(), a.dtype, a.shape, a.stride(), N, g.stride(),
        a.get_device(),
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        launch = _launches.keep(key, _prepare(a, g, each, partial))
    launch.start()
    return each, partial


def _prepare(a: Tensor, g: Tensor, each: Tensor, partial: Tensor) -> PackedLaunch:
    B, N, K = each.shape
    *shape, count = hopper.product_tiles(N, K, a.shape[1], _TILE_M, _TILE_N, _GROUP)
    work = (ctypes.c_int32 * 5)(*shape, B * count)
    maps = [hopper.tensor_map(tensor[:, None], rows) for tensor, rows in ((g, 64), (a, 64), (each, _BOX))]
    grid = min(B * count, multiprocessors(a.device))
    return hopper.pack(program(a.dtype), KINDS, grid, (*maps, partial, bytes(work)), a.get_device())
