"""Launches of the forward kernel for Hopper (hopper_fwd.cu): its variants, arguments and the order of its tiles."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from accelerant.ops._hopper import ELEMENTS, HopperProgram, Mma, hopper_program, load, tensor_map
from accelerant.ops._rows import ceil_div
from accelerant.ops.attention.launch import like
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.dispatch import Case
from accelerant.runtime.streams.capture import capturing

if TYPE_CHECKING:
    from accelerant.runtime.providers.cuda_launch import PackedLaunch

__all__ = ["KINDS", "PLANS", "Plan", "launch_forward", "plan_for", "program", "refuses"]

KINDS = ("struct", "struct", "struct", "struct", "*f32", "*u32", "struct", "f32")
"""Of the kernel's arguments: maps of q, k, v and o; lse; tickets; struct Shape; scale times log2 e."""

_LOG2_E = 1.4426950408889634
_GROUP_BYTES = 16 << 20
"""Keys and values of the heads that run together: they are read once a tile, so they should stay in the L2 cache."""

_PREPARED_LIMIT = 4096
_FILE = Path(__file__).with_name("hopper_fwd.cu")


class Plan(NamedTuple):
    """A variant of the kernel.

    Attributes:
        width: of a head in shared memory; narrower heads are padded with zeros by the copy engine.
        warpgroups: that compute, 64 queries each.
        block_n: keys a block, a multiple of 64 (the diagonal crosses one block of a warpgroup's).
        stages: blocks of keys and values in flight.
        give, take: registers a thread of the producer and of the others; of 65536, less than which launched with.
    """

    width: int
    warpgroups: int
    block_n: int
    stages: int
    give: int
    take: int

    @property
    def tile_m(self) -> int:
        """Queries a tile."""
        return 64 * self.warpgroups

    @property
    def shared_bytes(self) -> int:
        """Two tiles of queries, the blocks of keys and values, the barriers (at most 512 bytes)."""
        return 2 * self.width * (2 * self.tile_m + 2 * self.stages * self.block_n) + 512


PLANS = {
    "64": Plan(64, warpgroups=4, block_n=64, stages=5, give=24, take=112),
    "128": Plan(128, warpgroups=2, block_n=64, stages=5, give=24, take=240),
    "128 long": Plan(128, warpgroups=3, block_n=64, stages=4, give=32, take=160),
}
"""By what they are for. Four warpgroups leave 112 registers a thread: enough for width 64 only."""

_LONG = 2048
"""From this many queries on, three warpgroups' tiles of 192 do not waste much at the end."""


def plan_for(queries: int, width: int) -> Plan:
    """The variant for a length and a head's width."""
    if width <= 64:
        return PLANS["64"]
    return PLANS["128 long" if queries >= _LONG else "128"]


def refuses(case: Case) -> str | None:
    """Why the kernel cannot serve a case of shape (B, Hq, Hkv, S, Skv, D); None if it can."""
    _, Hq, Hkv, S, Skv, D = case.shape
    if D % 8 or D > 128:
        return f"takes heads of a multiple of 8 up to 128 wide, not {D}"
    if not math.prod(case.shape) or Hq % Hkv:
        return "takes no empty tensor"
    if "causal" in case.options and Skv != S:
        return f"is causal for as many queries as keys, not {S} and {Skv}"
    if max(case.shape[0] * Hq * ceil_div(S, 64), S, Skv) >= 2**30:
        return "counts tiles in 32 bits"
    return None


@functools.cache
def program(plan: Plan, dtype: torch.dtype, causal: bool) -> HopperProgram:
    """The kernel's text for a variant."""
    constants = {
        "HEAD_DIM": plan.width,
        "WGS": plan.warpgroups,
        "BLOCK_N": plan.block_n,
        "STAGES": plan.stages,
        "GIVE": plan.give,
        "TAKE": plan.take,
        "CAUSAL": int(causal),
        "IS_BF16": int(dtype == torch.bfloat16),
    }
    mmas = (Mma(plan.block_n), Mma(plan.width, a_in_registers=True, b_across=True))
    text = hopper_program(_FILE, ELEMENTS[dtype], mmas, constants)
    return HopperProgram("attention_fwd", text, 128 * (plan.warpgroups + 1), plan.shared_bytes)


@functools.cache
def _kernel(plan: Plan, dtype: torch.dtype, causal: bool, device: int) -> Kernel:
    return load(program(plan, dtype, causal), KINDS, device)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_SLOTS = 1 << 16
_slots_lock = threading.Lock()
_slots: dict[int, Tensor] = {}
_slots_taken: dict[int, int] = {}


def _tickets(device: int) -> Tensor:
    """A counter in device memory, 0: the kernel's blocks draw their tiles from it, and leave it at 0.

    Launches that run one after the other may share one. Those on different streams may not, nor may those captured
    in a graph, which can be replayed beside anything.
    """
    with _slots_lock:
        slots = _slots.get(device)
        if slots is None and not capturing(device):
            slots = _slots[device] = torch.zeros(_SLOTS, dtype=torch.int32, device=torch.device("cuda", device))
            torch.cuda.current_stream(device).synchronize()  # other streams may use it too
        taken = _slots_taken.get(device, 0)
        if slots is None or taken == _SLOTS:
            return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
        _slots_taken[device] = taken + 1
        return slots[taken : taken + 1]


@functools.cache
def _tickets_of(device: int, stream: int) -> Tensor:
    return _tickets(device)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention, on the current stream.

    Args:
        q: (B, Hq, S, D).
        k, v: (B, Hkv, Skv, D), Hkv a divisor of Hq.
        causal: whether query i sees the keys up to i only; then S = Skv.
        scale: of the scores.

    Returns:
        o, in q's shape, dtype and layout; lse, (B, Hq, S) float32, the logarithm of the sum of each row's exponentials.

    Raises:
        CompileError, LaunchError: see LoadedKernel.
    """
    o = like(q)
    B, Hq, S, _ = q.shape
    lse = torch.empty(B, Hq, S, dtype=torch.float32, device=q.device)  # not new_empty, which takes five times as long
    device = q.get_device()
    stream = torch._C._cuda_getCurrentRawStream(device)
    key = (
        q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse.data_ptr(), stream, q.dtype, causal, scale,
        q.shape, q.stride(), k.shape, k.stride(), v.stride(), device,
    )  # fmt: skip
    packed = _packed.get(key)
    if packed is None or capturing(device):
        _start_anew(key, q, k, v, o, lse, causal, scale)
    else:
        packed.start()
    return o, lse


_packed: dict[tuple[object, ...], PackedLaunch] = {}
"""Launches by all that they depend on: an allocator hands out the same few addresses again and again."""


def _start_anew(
    key: tuple[object, ...], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> None:
    """Prepare the launch and start it; keep it for the next call if that may use it."""
    device = q.get_device()
    captured = capturing(device)
    tickets = _tickets(device) if captured else _tickets_of(device, torch._C._cuda_getCurrentRawStream(device))
    given = q, k, v
    if scale <= 0:  # the kernel looks for the largest score before it multiplies by the scale
        q, scale = (-q, -scale) if scale else (q * 0, 1.0)
    used = _readable(q), _readable(k), _readable(v)
    packed = _pack(*used, o, lse, causal, scale, tickets)
    packed.start()
    if not captured and all(a is b for a, b in zip(given, used, strict=True)):
        if len(_packed) >= _PREPARED_LIMIT:
            _packed.clear()
        _packed[key] = packed


def _readable(x: Tensor) -> Tensor:
    """The tensor where the copy engine can read it, else a copy."""
    strides = [stride for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride and stride % 8 == 0 for stride in strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _pack(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, tickets: Tensor
) -> PackedLaunch:
    """The launch with everything in place."""
    B, Hq, S, D = q.shape
    Hkv, Skv = k.shape[1:3]
    device = q.get_device()
    plan = plan_for(S, D)
    share, tiles = Hq // Hkv, ceil_div(S, plan.tile_m)
    group = min(B * Hq, share * max(1, _GROUP_BYTES // (4 * Skv * D)))
    items = B * Hq * tiles
    shape = (ctypes.c_int32 * 8)(B, Hq, share, S, Skv, tiles, group, items)
    maps = [tensor_map(x, rows) for x, rows in ((q, plan.tile_m), (k, plan.block_n), (v, plan.block_n), (o, 16))]
    args = (*maps, lse, tickets, bytes(shape), scale * _LOG2_E)
    grid = (min(items, _multiprocessors(device)), 1, 1)
    packed: PackedLaunch = _kernel(plan, q.dtype, causal, device).handle.pack(grid, args, device)
    return packed
