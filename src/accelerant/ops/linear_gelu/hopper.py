"""Variants and launches of the forward kernel for Hopper (hopper.cu)."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from accelerant.ops import _hopper as hopper
from accelerant.ops._hopper import HopperProgram, Mma
from accelerant.ops._launch import ceil_div, multiprocessors
from accelerant.runtime.providers.cuda_launch import PackedLaunch

KINDS = ("struct", "struct", "struct", "struct", "*u32", "struct")
"""Kinds of the kernel's arguments: tensor maps of x, weight, y and z; bias; struct Shape."""

_FILE = Path(__file__).with_name("hopper.cu")
_STORED_ROWS = 16  # rows of the box that a warp stores


@dataclass(frozen=True, slots=True)
class GeluHopperTile:
    """A variant of the kernel: tiles of 64 `height` rows by `width` columns, `stages` steps of K in flight.

    `slots`: 2 KiB output buffers per warp, even, one each for z and y. `group`: tiles taken down a column before the
    next column, for reuse in the L2 cache.
    """

    height: int
    width: int
    stages: int
    slots: int = 2
    group: int = 8

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return 64 * self.height

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: operand tiles in flight, output buffers, two tiles' parts of the bias."""
        return hopper.ring_bytes(self.stages, self.tile_m, self.width) + 8 * 2048 * self.slots + 1024


PLANS = (GeluHopperTile(2, 128, 6), GeluHopperTile(2, 192, 4, slots=4))
_NARROW_COST = 1.03
"""Time per column of a 128-wide tile relative to a 192-wide one: H200, bfloat16, K of 768 and 1024."""


@functools.lru_cache(maxsize=4096)
def plan_for(M: int, N: int, multiprocessors: int) -> GeluHopperTile:
    """Return the variant whose waves of tiles take the least time for a result of M x N."""
    narrow, wide = PLANS
    waves = {plan: ceil_div(ceil_div(M, plan.tile_m) * ceil_div(N, plan.width), multiprocessors) for plan in PLANS}
    return narrow if waves[narrow] * narrow.width * _NARROW_COST < waves[wide] * wide.width else wide


@functools.cache
def program(plan: GeluHopperTile, dtype: torch.dtype, tanh: bool, keep: bool) -> HopperProgram:
    """Return the program text of a variant."""
    return hopper.product_program(
        "linear_gelu", _FILE, dtype, Mma(plan.width), plan.height, plan.stages, plan.shared_bytes, SLOTS=plan.slots,
        TANH=int(tanh), KEEP=int(keep), IS_BF16=int(dtype == torch.bfloat16), GIVE=40, TAKE=232,
    )  # fmt: skip


_launches: hopper.LaunchCache[PackedLaunch] = hopper.LaunchCache()


def launch_hopper(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, keep: bool = True,
    plan: GeluHopperTile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the kernel on the current stream: y (M, N), and the pre-activation z (M, N) if kept, else an empty tensor.

    x is (M, K), weight (N, K), bias (N,) or None.
    """
    x, weight = hopper.readable(x), hopper.readable(weight)
    if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % 4):
        bias = bias.clone(memory_format=torch.contiguous_format)
    M, N = x.shape[0], weight.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    z = torch.empty(M if keep else 0, N, dtype=x.dtype, device=x.device)
    key = (
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(), z.data_ptr(), x.dtype,
        x.shape, x.stride(), N, weight.stride(), approximate, plan, x.get_device(),
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        launch = _launches.keep(key, _prepare(x, weight, bias, approximate, y, z if keep else None, plan))
    launch.start()
    return y, z if keep else z.view(-1)


def _prepare(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, y: Tensor, z: Tensor | None,
    plan: GeluHopperTile | None,
) -> PackedLaunch:  # fmt: skip
    (M, K), N = x.shape, weight.shape[0]
    device, processors = x.get_device(), multiprocessors(x.device)
    plan = plan or plan_for(M, N, processors)
    tiles = hopper.product_tiles(M, N, K, plan.tile_m, plan.width, plan.group)
    shape = (ctypes.c_int32 * 6)(0 if bias is None else N, *tiles)
    boxes = ((x, plan.tile_m), (weight, plan.width), (y, _STORED_ROWS), (y if z is None else z, _STORED_ROWS))
    args = (*(hopper.tensor_map(*box) for box in boxes), x if bias is None else bias, bytes(shape))
    variant = program(dataclasses.replace(plan, group=0), x.dtype, approximate == "tanh", z is not None)
    return hopper.pack(variant, KINDS, min(tiles[-1], processors), args, device)
