"""Launches of the forward kernel for Hopper (hopper.cu): its variants and arguments."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accelerant.ops._hopper import ELEMENTS, HopperProgram, Mma, hopper_program, load, tensor_map
from accelerant.ops._hopper.product import HEADER, THREADS, readable, refuses, ring_bytes, tiles
from accelerant.ops._rows import ceil_div, multiprocessors
from accelerant.runtime.compilation.kernel import Kernel

if TYPE_CHECKING:
    from accelerant.runtime.providers.cuda_launch import PackedLaunch

__all__ = ["KINDS", "PLANS", "Plan", "launch_hopper", "plan_for", "program", "refuses"]

KINDS = ("struct", "struct", "struct", "struct", "*u32", "struct")
"""Of the kernel's arguments: maps of x, weight, y and z; bias; struct Shape."""

_PREPARED_LIMIT = 4096
_FILE = Path(__file__).with_name("hopper.cu")
_ROWS_STORED = 16
"""Of a box that a warp stores."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A variant of the kernel; see its description.

    Attributes:
        height: rows of a tile, in 64s.
        width: columns of a tile, a multiple of 64.
        stages: steps of the sum in flight.
        slots: buffers of 2 KiB a warp, for results on their way out; even, so that z and y fit.
        group: tiles down before one to the right.
    """

    height: int
    width: int
    stages: int
    slots: int = 2
    group: int = 8

    @property
    def tile_m(self) -> int:
        """Rows a tile."""
        return 64 * self.height

    @property
    def shared_bytes(self) -> int:
        """The steps in flight, the warps' buffers, two parts of the bias."""
        return ring_bytes(self.stages, self.tile_m, self.width) + 8 * 2048 * self.slots + 1024


PLANS = (Plan(2, 128, 6), Plan(2, 192, 4, slots=4))
"""Tiles of 128 columns are for products that those of 192 would waste more of."""

_NARROW_COST = 1.03
"""Time of a tile of 128 columns against two thirds of one of 192: H200, bfloat16, K of 768 and 1024."""


@functools.lru_cache(maxsize=4096)
def plan_for(M: int, N: int, programs: int) -> Plan:
    """The variant for a result's sizes on a device with so many multiprocessors: that with the shortest rounds."""
    narrow, wide = PLANS
    rounds = {plan: ceil_div(ceil_div(M, plan.tile_m) * ceil_div(N, plan.width), programs) for plan in PLANS}
    return narrow if rounds[narrow] * narrow.width * _NARROW_COST < rounds[wide] * wide.width else wide


@functools.cache
def program(plan: Plan, dtype: torch.dtype, tanh: bool, keep: bool) -> HopperProgram:
    """The kernel's text for a variant."""
    mma = Mma(plan.width)
    constants: dict[str, int | str] = {
        "HEIGHT": plan.height, "WIDTH": plan.width, "STAGES": plan.stages, "SLOTS": plan.slots, "MMA": mma.name,
        "TANH": int(tanh), "KEEP": int(keep), "IS_BF16": int(dtype == torch.bfloat16), "GIVE": 40, "TAKE": 232,
    }  # fmt: skip
    text = hopper_program(_FILE, ELEMENTS[dtype], (mma,), constants, (HEADER,))
    return HopperProgram("linear_gelu", text, THREADS, plan.shared_bytes)


@functools.cache
def _kernel(plan: Plan, dtype: torch.dtype, tanh: bool, keep: bool, device: int) -> Kernel:
    return load(program(plan, dtype, tanh, keep), KINDS, device)


def launch_hopper(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    approximate: str,
    keep: bool = True,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Give y, (M, N); and z, (M, N) if kept, else empty; on the current stream.

    Args:
        x: (M, K).
        weight: (N, K).
        bias: (N,), or None.
        approximate: "none" or "tanh".
        keep: whether z is wanted.
        plan: the variant; by default plan_for's.

    Raises:
        CompileError, LaunchError: see LoadedKernel.
    """
    x, weight = readable(x), readable(weight)
    if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % 4):
        bias = bias.clone(memory_format=torch.contiguous_format)
    M, N = x.shape[0], weight.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    z = torch.empty(M if keep else 0, N, dtype=x.dtype, device=x.device)
    key = (
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(), z.data_ptr(), x.dtype,
        x.shape, x.stride(), N, weight.stride(), approximate, plan, x.get_device(),
    )  # fmt: skip
    packed = _packed.get(key)
    if packed is None:
        packed = _pack(x, weight, bias, approximate, y, z if keep else None, plan)
        if len(_packed) >= _PREPARED_LIMIT:
            _packed.clear()
        _packed[key] = packed
    packed.start()
    return y, z if keep else z.view(-1)


_packed: dict[tuple[object, ...], PackedLaunch] = {}
"""Launches by all that they depend on: an allocator hands out the same few addresses again and again."""


def _pack(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, y: Tensor, z: Tensor | None, plan: Plan | None
) -> PackedLaunch:
    """The launch with everything in place."""
    (M, K), N = x.shape, weight.shape[0]
    device, programs = x.get_device(), multiprocessors(x.device)
    plan = plan or plan_for(M, N, programs)
    work = tiles(M, N, K, plan.tile_m, plan.width, plan.group)
    shape = (ctypes.c_int32 * 6)(0 if bias is None else N, *work)
    boxes = ((x, plan.tile_m), (weight, plan.width), (y, _ROWS_STORED), (y if z is None else z, _ROWS_STORED))
    maps = [tensor_map(matrix[None, None], rows) for matrix, rows in boxes]
    kernel = _kernel(dataclasses.replace(plan, group=0), x.dtype, approximate == "tanh", z is not None, device)
    args = (*maps, x if bias is None else bias, bytes(shape))
    packed: PackedLaunch = kernel.handle.pack((min(work[-1], programs), 1, 1), args, device)
    return packed
