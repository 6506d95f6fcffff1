"""Variants and launches of the backward kernels for Hopper (hopper_bwd.cu)."""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerant.ops import _hopper as hopper
from accelerant.ops._hopper import HopperProgram, LaunchCache, Mma
from accelerant.ops._launch import ceil_div, multiprocessors
from accelerant.ops.attention.hopper_fwd import refuses_heads
from accelerant.ops.attention.launch import as_laid, like
from accelerant.runtime.dispatch import Case
from accelerant.runtime.providers.cuda_launch import PackedLaunch

KINDS = ("struct",)
"""Kinds of each kernel's arguments: one struct by value."""

PARTS = ("attention_bwd", "attention_bwd_rows", "attention_bwd_dq")  # entry points, by the value of the macro PART

_TILE_K = 128
_WHOLE_KEYS = 384  # up to this many keys one block per head pays, if there are heads for all multiprocessors
_SHARED_BLOCKS = 16  # up to this many blocks per head, "shared" sums pay: they save the zero fill and the third kernel

_HELP_ROWS = 700
"""Rows whose statistics a helper block is assumed to compute in the time of one tile of products, 2.9 us."""

_FILE = Path(__file__).with_name("hopper_bwd.cu")


class HopperBwdConfig(NamedTuple):
    """A variant of the kernels: the width of a head in shared memory (64 or 128, zero-padded), and how dq is summed.

    `sums` (see hopper_bwd.cu): "added", atomically to zeros; "shared", started and finished by the blocks of a head,
    which wait for each other; "whole", by one block per head, in a fixed order.
    """

    width: int
    sums: str

    @property
    def tile_q(self) -> int:
        """Queries per tile."""
        return 128 if self.width == 64 else 64

    @property
    def give(self) -> int:
        """Registers per thread of the producer warpgroup."""
        return 40 if self._lean else 24

    @property
    def take(self) -> int:
        """Registers per thread of the compute warpgroups; the kernel is launched with 168 for all."""
        return 232 if self._lean else 240

    @property
    def _lean(self) -> bool:
        """True if the producer needs 40 registers: it also converts sums, and with 24 spills a few words."""
        return self.width == 64 or self.sums != "added"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of attention_bwd: k, v, q, do, ds, dq's fragments, row statistics, barriers, counts."""
        keys = 2 * (2 if self.width == 64 else 1) * _TILE_K * self.width * 2
        queries = 4 * self.tile_q * self.width * 2
        fragments = self.tile_q * self.width * 4
        return keys + queries + 2 * _TILE_K * self.tile_q * 2 + fragments + 16 * self.tile_q + 128 + 128 + 16


def plan_for(case_shape: tuple[int, ...], processors: int, causal: bool, deterministic: bool) -> HopperBwdConfig:
    """Return the variant for a shape (B, Hq, Hkv, S, Skv, D) on a device with this many multiprocessors."""
    B, _, Hkv, _, Skv, D = case_shape
    heads = B * Hkv
    width = 64 if D <= 64 else 128
    filled = heads / (ceil_div(heads, processors) * processors)
    if deterministic or (D <= 64 and Skv <= _WHOLE_KEYS and filled > 0.9):
        return HopperBwdConfig(width, "whole")
    if (blocks := _blocks(Skv, causal)) <= min(_SHARED_BLOCKS, processors):
        rounds = ceil_div(heads, processors // blocks)
        return HopperBwdConfig(width, "shared" if rounds <= ceil_div(heads * blocks, processors) else "added")
    return HopperBwdConfig(width, "added")


def _blocks(Skv: int, causal: bool) -> int:
    """Return the blocks per key/value head unless the sums are "whole": key tiles, in pairs if causal."""
    tiles = ceil_div(Skv, _TILE_K)
    return ceil_div(tiles, 2) if causal else tiles


class Shares(NamedTuple):
    """Division of the work: `grid` blocks compute products, `helpers` the statistics of query heads from `first` on."""

    grid: int
    helpers: int
    first: int


def shares_for(plan: HopperBwdConfig, shape: tuple[int, ...], processors: int, causal: bool) -> Shares:
    """Return the division of the work for a plan and a shape (B, Hq, Hkv, S, Skv, D).

    All blocks of a head run at the same time, so heads are processed in waves. Multiprocessors that save no wave get
    helpers, which compute the statistics of later waves; the rows kernel computes the rest and the first wave's.
    """
    B, Hq, Hkv, S, Skv, _ = shape
    heads, chunks = B * Hkv, _chunks(plan, Skv, causal)
    grid = min(processors, heads * chunks)
    if plan.sums == "shared":
        grid -= grid % chunks  # whole heads at a time
    without = Shares(grid, 0, B * Hq)
    if plan.sums != "shared" or plan.width != 64 or S % 4:  # lse is copied in multiples of 16 bytes
        return without
    waves = ceil_div(heads * chunks, grid)
    concurrent = ceil_div(heads, waves)
    helpers = processors - concurrent * chunks
    tiles = ceil_div(Skv, _TILE_K) + 1 if causal else ceil_div(S, plan.tile_q)  # per block, head and wave
    helped = helpers * tiles * _HELP_ROWS // (ceil_div(S, plan.tile_q) * plan.tile_q)  # heads in the time of one wave
    first = (Hq // Hkv) * (concurrent + (waves - 1) * max(0, concurrent - helped))
    return Shares(concurrent * chunks, helpers, first) if helpers and first < B * Hq else without


def _chunks(plan: HopperBwdConfig, Skv: int, causal: bool) -> int:
    return 1 if plan.sums == "whole" else _blocks(Skv, causal)


def refuses(case: Case) -> str | None:
    """Return why the kernels cannot serve a case of shape (B, Hq, Hkv, S, Skv, D), or None."""
    reason = refuses_heads(case)
    B, Hq, Hkv, S, Skv, _ = case.shape
    too_large = not reason and max(B * Hq * ceil_div(max(S, Skv), 64), Hq // Hkv * S, Skv) >= 2**29
    return "counts tiles in 32 bits" if too_large else reason


def _first(mma: Mma) -> str:
    """Return the wrapper mma_..._first(d, a, b), D = A B: it does not read d, whose registers are free until then."""
    text = mma.text().replace(f"{mma.name}(", f"{mma.name}_first(").replace(", int accumulate)", ")")
    text = text.replace(', "r"(accumulate)', "").replace('"+f"', '"=f"')
    return re.sub(r"setp\.ne\.b32 p, %\d+, 0;", "setp.ne.b32 p, 0, 0;", text)


@functools.cache
def program(plan: HopperBwdConfig, dtype: torch.dtype, causal: bool, part: str = PARTS[0]) -> HopperProgram:
    """Return the program text of one of the kernels of a variant."""
    scores = Mma(plan.tile_q)
    gradients = Mma(plan.width, a_in_registers=True, b_across=True)
    queries = Mma(64, a_across=True, b_across=True)
    main = part == PARTS[0]
    constants: dict[str, Any] = {
        "PART": PARTS.index(part), "D": plan.width, "CAUSAL": int(causal), "WHOLE": int(plan.sums == "whole"),
        "SHARED": int(plan.sums == "shared"), "IS_BF16": int(dtype == torch.bfloat16), "GIVE": plan.give,
        "TAKE": plan.take, "SHARED_BYTES": plan.shared_bytes, "MMA_S": scores.name,
        "MMA_S_FIRST": f"{scores.name}_first", "MMA_D": gradients.name, "MMA_Q": queries.name,
        "MMA_Q_FIRST": f"{queries.name}_first",
    }  # fmt: skip
    text = hopper.hopper_program(_FILE, hopper.ELEMENTS[dtype], (scores, gradients, queries) if main else (), constants)
    if main:
        at = text.index('#line 1 "hopper_bwd.cu"')
        text = f"{text[:at]}{_first(scores)}{_first(queries)}{text[at:]}"
    return HopperProgram(part, text, 384 if main else 256, plan.shared_bytes if main else 0)


_launches: LaunchCache[tuple[PackedLaunch, ...]] = LaunchCache()


def launch_hopper(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float,
    deterministic: bool = False, out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of attention on the current stream, in the shapes, dtype and layouts of q, k and v."""
    dq, dk, dv = out or (like(q), like(k), like(v))
    plan, sizes = _plan_and_sizes(q, k, causal, deterministic)
    space = torch.empty(sum(sizes), dtype=torch.float32, device=q.device)
    used = *(hopper.readable(x) for x in (do, q, k, v, o)), _aligned(lse)
    for launch in _launches_for(plan, used, (dq, dk, dv), space, sizes, causal, scale):
        launch.start()
    return out or (as_laid(q, dq), as_laid(k, dk), as_laid(v, dv))


def bind_launch(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, deterministic: bool
) -> Callable[..., Any] | None:
    """Return launch_hopper for tensors that differ from these in their memory alone, or None if it copies some."""
    if any(hopper.readable(x) is not x for x in (q, k, v, o)) or _aligned(lse) is not lse:
        return None
    known: LaunchCache[tuple[PackedLaunch, ...]] = LaunchCache()
    plan, sizes = _plan_and_sizes(q, k, causal, deterministic)
    size, where, strides = sum(sizes), q.device, o.stride()
    empty, empty_like, float32 = torch.empty, torch.empty_like, torch.float32

    def launch(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *_: object) -> Any:
        if do.stride() != strides:
            return launch_hopper(do, q, k, v, o, lse, causal, scale, deterministic)
        dq, dk, dv, space = empty_like(q), empty_like(k), empty_like(v), empty(size, dtype=float32, device=where)
        pointers = (
            do.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse.data_ptr(), dq.data_ptr(),
            dk.data_ptr(), dv.data_ptr(), space.data_ptr(),
        )  # fmt: skip
        if (launches := known.get(pointers)) is None:
            if any(pointer % 16 for pointer in pointers):
                return launch_hopper(do, q, k, v, o, lse, causal, scale, deterministic)
            inputs = do, q, k, v, o, lse
            launches = known.keep(pointers, _prepare(plan, inputs, (dq, dk, dv), space, sizes, causal, scale))
        for prepared in launches:
            prepared.start()
        return dq, dk, dv

    return launch


def _aligned(lse: Tensor) -> Tensor:
    return lse.contiguous() if lse.data_ptr() % 16 == 0 else lse.clone(memory_format=torch.contiguous_format)


def _plan_and_sizes(q: Tensor, k: Tensor, causal: bool, deterministic: bool) -> tuple[HopperBwdConfig, tuple[int, ...]]:
    B, Hq, S, D = q.shape
    Hkv, Skv = k.shape[1:3]
    processors = multiprocessors(q.device)
    plan = plan_for((B, Hq, Hkv, S, Skv, D), processors, causal, deterministic)
    tiles = ceil_div(S, plan.tile_q)
    heads = min(processors, B * Hkv) * (Hq // Hkv) if plan.sums == "whole" else B * Hq
    rows = tiles * plan.tile_q
    return plan, (2 * B * Hq * rows, heads * rows * plan.width, B * Hq * (tiles + 1))


def _launches_for(
    plan: HopperBwdConfig, inputs: tuple[Tensor, ...], gradients: tuple[Tensor, Tensor, Tensor], space: Tensor,
    sizes: tuple[int, ...], causal: bool, scale: float,
) -> tuple[PackedLaunch, ...]:  # fmt: skip
    do, q, k, v, o, lse = inputs
    dq, dk, dv = gradients
    key = (
        do.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse.data_ptr(), dq.data_ptr(),
        dk.data_ptr(), dv.data_ptr(), space.data_ptr(), plan, q.dtype, causal, scale, q.shape, k.shape, do.stride(),
        q.stride(), k.stride(), v.stride(), o.stride(), dq.stride(), dk.stride(), dv.stride(), q.get_device(),
    )  # fmt: skip
    return _launches.get(key) or _launches.keep(key, _prepare(plan, inputs, gradients, space, sizes, causal, scale))


def _prepare(
    plan: HopperBwdConfig, inputs: tuple[Tensor, ...], gradients: tuple[Tensor, Tensor, Tensor], space: Tensor,
    space_sizes: tuple[int, ...], causal: bool, scale: float,
) -> tuple[PackedLaunch, ...]:  # fmt: skip
    do, q, k, v, o, lse = inputs
    B, Hq, S, D = q.shape
    Hkv, Skv = k.shape[1:3]
    device = q.get_device()
    main, by_rows, by_dq = (program(plan, q.dtype, causal, part) for part in PARTS)
    hopper.load_all((main, by_rows, *[by_dq] * (plan.sums == "added")), KINDS, device)
    tiles, key_tiles = ceil_div(S, plan.tile_q), ceil_div(Skv, _TILE_K)
    shares = shares_for(plan, (B, Hq, Hkv, S, Skv, D), multiprocessors(q.device), causal)
    sums = space.data_ptr() + 4 * space_sizes[0]
    counts = sums + 4 * space_sizes[1]
    blocks = ceil_div(S, 128)
    pointers = (do.data_ptr(), o.data_ptr(), lse.data_ptr(), space.data_ptr(), sums, counts)
    row_strides = (*do.stride()[:3], *o.stride()[:3])
    rows = struct.pack("=6Q6q6i", *pointers, *row_strides, Hq, S, D, blocks, tiles * plan.tile_q, B * Hq * (tiles + 1))
    boxes = ((q, plan.tile_q), (k, _TILE_K), (v, _TILE_K), (do, plan.tile_q), (o, plan.tile_q))
    maps = b"".join(hopper.tensor_map(x, n) for x, n in boxes)
    ready = counts + 4 * B * Hq * tiles
    outputs = [space.data_ptr(), sums, counts, ready, *(x.data_ptr() for x in gradients), lse.data_ptr()]
    strides = [stride for x in gradients for stride in x.stride()[:3]]
    sizes = (B, Hq, Hkv, S, Skv, D, tiles, key_tiles, _chunks(plan, Skv, causal), shares.grid, shares.first)
    job = maps + struct.pack("=8Q9q11i2f", *outputs, *strides, *sizes, scale, scale * math.log2(math.e))
    job += bytes(-len(job) % 64)

    launches = (
        hopper.pack(by_rows, KINDS, shares.first * blocks, (rows,), device),
        hopper.pack(main, KINDS, shares.grid + shares.helpers, (job,), device, plan.sums == "shared"),
    )
    return (*launches, hopper.pack(by_dq, KINDS, B * Hq * tiles, (job,), device)) if plan.sums == "added" else launches
