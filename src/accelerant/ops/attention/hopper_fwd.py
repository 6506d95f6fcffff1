"""Variants and launches of the forward kernel for Hopper (hopper_fwd.cu)."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from accelerant.ops import _hopper as hopper
from accelerant.ops._hopper import HopperProgram, LaunchCache, Mma
from accelerant.ops._launch import ceil_div, multiprocessors
from accelerant.ops.attention.launch import like
from accelerant.runtime.dispatch import Case
from accelerant.runtime.host import fork_safe
from accelerant.runtime.memory.limits import ordinary_tensors
from accelerant.runtime.providers.cuda_launch import PackedLaunch
from accelerant.runtime.streams.stream import capturing

KINDS = ("struct", "struct", "struct", "struct", "*f32", "*u32", "struct", "f32")
"""Kinds of the kernel's arguments: tensor maps of q, k, v and o; lse; ticket counter; struct Shape; scale log2(e)."""

_LOG2_E = 1.4426950408889634
_GROUP_BYTES = 16 << 20
"""Bytes of keys and values of the heads that run at a time: each tile of queries reads them, so they must fit in L2."""

_FILE = Path(__file__).with_name("hopper_fwd.cu")


class HopperFwdConfig(NamedTuple):
    """A variant of the kernel: heads of `width` in shared memory, zero-padded, warpgroups of 64 queries each.

    Blocks of `block_n` keys, a multiple of 64, so that the causal diagonal crosses one per warpgroup; `stages` of them
    in flight. `give` and `take` are registers per thread of the producer and of the compute warpgroups after
    setmaxnreg.
    """

    width: int
    warpgroups: int
    block_n: int
    stages: int
    give: int
    take: int

    @property
    def tile_m(self) -> int:
        """Queries per tile."""
        return 64 * self.warpgroups

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: two tiles of queries, the blocks of keys and values, at most 512 bytes of barriers."""
        return 2 * self.width * (2 * self.tile_m + 2 * self.stages * self.block_n) + 512


PLANS = {
    "64": HopperFwdConfig(64, warpgroups=4, block_n=64, stages=5, give=24, take=112),
    "128": HopperFwdConfig(128, warpgroups=2, block_n=64, stages=5, give=24, take=240),
    "128 long": HopperFwdConfig(128, warpgroups=3, block_n=64, stages=4, give=32, take=160),
}
"""By head width. Four warpgroups leave 112 registers per thread: enough for width 64 only."""

_LONG = 2048  # from this many queries on, tiles of 192 (three warpgroups) waste little at the end of a sequence


def plan_for(queries: int, width: int) -> HopperFwdConfig:
    """Return the variant for a sequence length and a head width."""
    if width <= 64:
        return PLANS["64"]
    return PLANS["128 long" if queries >= _LONG else "128"]


def refuses_heads(case: Case) -> str | None:
    """Return why neither Hopper kernel can serve a case of shape (B, Hq, Hkv, S, Skv, D), or None."""
    _, Hq, Hkv, S, Skv, D = case.shape
    if reason := hopper.refuses_device(case, tuple(hopper.ELEMENTS)):
        return reason
    if any(option.startswith("window") for option in case.options):
        return "supports no window"
    if D % 8 or D > 128:
        return f"takes heads of a multiple of 8 up to 128 wide, not {D}"
    if Hq % Hkv:
        return f"takes {Hkv} heads of keys only for a multiple of as many heads of queries, not {Hq}"
    if "causal" in case.options and Skv != S:
        return f"is causal for as many queries as keys, not {S} and {Skv}"
    return None


def refuses(case: Case) -> str | None:
    """Return why the kernel cannot serve a case of shape (B, Hq, Hkv, S, Skv, D), or None."""
    B, Hq, _, S, Skv, _ = case.shape
    too_large = max(B * Hq * ceil_div(S, 64), S, Skv) >= 2**30
    return refuses_heads(case) or ("counts tiles in 32 bits" if too_large else None)


@functools.cache
def program(plan: HopperFwdConfig, dtype: torch.dtype, causal: bool) -> HopperProgram:
    """Return the program text of a variant."""
    constants = {
        "HEAD_DIM": plan.width, "WGS": plan.warpgroups, "BLOCK_N": plan.block_n, "STAGES": plan.stages,
        "GIVE": plan.give, "TAKE": plan.take, "CAUSAL": int(causal), "IS_BF16": int(dtype == torch.bfloat16),
    }  # fmt: skip
    mmas = (Mma(plan.block_n), Mma(plan.width, a_in_registers=True, b_across=True))
    text = hopper.hopper_program(_FILE, hopper.ELEMENTS[dtype], mmas, constants)
    return HopperProgram("attention_fwd", text, 128 * (plan.warpgroups + 1), plan.shared_bytes)


_TICKETS = 1 << 16
_tickets_lock = fork_safe(threading.Lock())
_tickets: dict[int, Tensor] = {}  # device -> counters, all 0
_tickets_taken: dict[int, int] = {}


def _take_ticket(device: int) -> Tensor:
    """Return a counter in device memory, from which a launch's blocks draw their tiles and which they leave at 0.

    Consecutive launches may share one; launches on different streams or captured in a graph may not.
    """
    with _tickets_lock:
        if (counters := _tickets.get(device)) is None and not capturing(device):
            counters = torch.zeros(_TICKETS, dtype=torch.int32, device=torch.device("cuda", device))
            _tickets[device] = counters
            torch.cuda.current_stream(device).synchronize()  # other streams may use it too
        taken = _tickets_taken.get(device, 0)
        if counters is None or taken == _TICKETS:
            return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
        _tickets_taken[device] = taken + 1
        return counters[taken : taken + 1]


@functools.cache
def _stream_ticket(device: int, stream: int) -> Tensor:
    with ordinary_tensors():
        return _take_ticket(device)


_launches: LaunchCache[PackedLaunch] = LaunchCache()


def launch_hopper(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int = -1
) -> tuple[Tensor, Tensor]:
    """Compute attention on the current stream: o in q's shape, dtype and layout, and lse (B, Hq, S) float32."""
    o = like(q)
    B, Hq, S, _ = q.shape
    lse = torch.empty(B, Hq, S, dtype=torch.float32, device=q.device)  # not new_empty, which takes five times as long
    device = q.get_device()
    stream = torch._C._cuda_getCurrentRawStream(device)
    key = (
        q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse.data_ptr(), stream, q.dtype, causal, scale,
        q.shape, q.stride(), k.shape, k.stride(), v.stride(), device,
    )  # fmt: skip
    if (launch := _launches.get(key)) is not None and not capturing(device):
        launch.start()
        return o, lse
    captured = capturing(device)
    inputs = q, k, v
    if scale <= 0:  # the kernel takes the maximum score before it multiplies by the scale
        q, scale = (-q, -scale) if scale else (q * 0, 1.0)
    used = hopper.readable(q), hopper.readable(k), hopper.readable(v)
    ticket = _take_ticket(device) if captured else _stream_ticket(device, stream)
    launch = _prepare(*used, o, lse, causal, scale, ticket)
    launch.start()
    if not captured and all(a is b for a, b in zip(inputs, used, strict=True)):
        _launches.keep(key, launch)
    return o, lse


def bind_launch(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return launch_hopper for tensors that differ from these in their memory alone, or None if it copies some."""
    if scale <= 0 or any(hopper.readable(x) is not x for x in (q, k, v)):
        return None
    known: LaunchCache[PackedLaunch] = LaunchCache()
    device, empty_like, stream_of = q.get_device(), torch.empty_like, torch._C._cuda_getCurrentRawStream
    with ordinary_tensors():  # empty_like takes 2 us, of an expanded number too; empty of these sizes 5
        lse_like = torch.empty(1, dtype=torch.float32, device=q.device).expand(q.shape[:3])

    def launch(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        if capturing(device):
            return launch_hopper(q, k, v, causal, scale)
        o, lse, stream = empty_like(q), empty_like(lse_like), stream_of(device)
        pointers = q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse.data_ptr(), stream
        if (prepared := known.get(pointers)) is None:
            if any(pointer % 16 for pointer in pointers[:3]):
                return launch_hopper(q, k, v, causal, scale)
            ticket = _stream_ticket(device, stream)
            prepared = known.keep(pointers, _prepare(q, k, v, o, lse, causal, scale, ticket))
        prepared.start()
        return o, lse

    return launch


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, ticket: Tensor
) -> PackedLaunch:
    B, Hq, S, D = q.shape
    Hkv, Skv = k.shape[1:3]
    plan = plan_for(S, D)
    share, tiles = Hq // Hkv, ceil_div(S, plan.tile_m)
    group = min(B * Hq, share * max(1, _GROUP_BYTES // (4 * Skv * D)))
    items = B * Hq * tiles
    shape = (ctypes.c_int32 * 8)(B, Hq, share, S, Skv, tiles, group, items)
    maps = [hopper.tensor_map(x, rows) for x, rows in ((q, plan.tile_m), (k, plan.block_n), (v, plan.block_n), (o, 16))]
    args = (*maps, lse, ticket, bytes(shape), scale * _LOG2_E)
    return hopper.pack(
        program(plan, q.dtype, causal), KINDS, min(items, multiprocessors(q.device)), args, q.get_device()
    )
