"""Launches of the backward kernels for Hopper (hopper_bwd.cu): variants, arguments, work space."""

from __future__ import annotations

import functools
import math
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerant.ops._hopper import ELEMENTS, HopperProgram, Mma, hopper_program, load, tensor_map
from accelerant.ops._rows import ceil_div
from accelerant.ops.attention.launch import as_laid, like
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.dispatch import Case

__all__ = ["KINDS", "PARTS", "Plan", "Shares", "launch_backward", "plan_for", "program", "refuses", "shares_for"]

KINDS = ("struct",)
"""Of each kernel's arguments: one struct by value."""

PARTS = ("attention_bwd", "attention_bwd_rows", "attention_bwd_dq")
"""Entry points by the kernel's macro PART."""

_TILE_K = 128
_WHOLE_KEYS = 384
"""Up to this many keys whole heads a block pay, where there are heads for all multiprocessors. On an H200, causal,
width 64, milliseconds of whole, shared and added: 768 heads of 512 0.268, 0.255, 0.285; 384 heads of 1024 0.409, 0.363,
0.410; 192 heads of 2048 0.934, 0.596, 0.661."""

_SHARED_BLOCKS = 16
"""Up to this many blocks to a head pay that start and finish its sums themselves: then the zeros and the third kernel
are a large part. Width 128, 16 heads of 8192 (32 blocks) twice: shared 2.67, added 2.65 ms."""

_HELP_ROWS = 700
"""Rows whose statistics a block that helps is taken to find in the time of a tile of products, some 2.9 us: 62 GB/s. On
an H200, 384 heads of 1024, milliseconds of 500, 700, 900: 0.352, 0.347, 0.397; of none who helps: 0.363."""

_PREPARED_LIMIT = 4096
_FILE = Path(__file__).with_name("hopper_bwd.cu")


class Plan(NamedTuple):
    """A variant of the kernels.

    Attributes:
        width: of a head in shared memory, 64 or 128; narrower heads are padded with zeros by the copy engine.
        sums: how dq is summed (see hopper_bwd.cu): "added" to zeros; "shared", started and finished by the blocks of a
            head, which wait for each other; "whole", by a block for each head, in a fixed order.
    """

    width: int
    sums: str

    @property
    def tile_q(self) -> int:
        """Queries a tile."""
        return 128 if self.width == 64 else 64

    @property
    def give(self) -> int:
        """Registers a thread of the warpgroup that copies."""
        return 40 if self._lean else 24

    @property
    def take(self) -> int:
        """Registers a thread of the warpgroups that compute; the kernel is launched with 168 for all."""
        return 232 if self._lean else 240

    @property
    def _lean(self) -> bool:
        """Whether the warps that copy, and convert sums, have 40; 24 make the copying thread spill some words."""
        return self.width == 64 or self.sums != "added"

    @property
    def shared_bytes(self) -> int:
        """Of attention_bwd: keys and values, queries and dO, dS, dq's fragments, row statistics, barriers, counts."""
        keys = 2 * (2 if self.width == 64 else 1) * _TILE_K * self.width * 2
        queries = 4 * self.tile_q * self.width * 2
        fragments = self.tile_q * self.width * 4
        return keys + queries + 2 * _TILE_K * self.tile_q * 2 + fragments + 16 * self.tile_q + 128 + 128 + 16


def plan_for(case_shape: tuple[int, ...], multiprocessors: int, causal: bool, deterministic: bool) -> Plan:
    """The variant for a shape (B, Hq, Hkv, S, Skv, D)."""
    B, _, Hkv, _, Skv, D = case_shape
    heads = B * Hkv
    width = 64 if D <= 64 else 128
    filled = heads / (ceil_div(heads, multiprocessors) * multiprocessors)
    if deterministic or (D <= 64 and Skv <= _WHOLE_KEYS and filled > 0.9):
        return Plan(width, "whole")
    blocks = _blocks(Skv, causal)
    if blocks <= min(_SHARED_BLOCKS, multiprocessors):
        rounds = ceil_div(heads, multiprocessors // blocks)
        return Plan(width, "shared" if rounds <= ceil_div(heads * blocks, multiprocessors) else "added")
    return Plan(width, "added")


def _blocks(Skv: int, causal: bool) -> int:
    """Shares of a head's work unless a block takes it whole: key tiles, in pairs if causal."""
    tiles = ceil_div(Skv, _TILE_K)
    return ceil_div(tiles, 2) if causal else tiles


class Shares(NamedTuple):
    """How the blocks of attention_bwd divide the work.

    Attributes:
        grid: blocks that multiply.
        helpers: blocks that find row statistics.
        first: the first query head, of all batches', whose statistics they find; the rows kernel finds those before.
    """

    grid: int
    helpers: int
    first: int


def shares_for(plan: Plan, shape: tuple[int, ...], multiprocessors: int, causal: bool) -> Shares:
    """The shares for a plan and a shape (B, Hq, Hkv, S, Skv, D).

    The blocks of a head run together, so heads go in rounds. Fewer blocks may take as many rounds: what is left helps.
    A round's statistics must be there when it begins. The blocks that help find as many as they can in the time of all
    rounds but the last; what they lack is the rows kernel's, and so is the first round's.
    """
    B, Hq, Hkv, S, Skv, _ = shape
    heads, chunks = B * Hkv, _chunks(plan, Skv, causal)
    grid = min(multiprocessors, heads * chunks)
    if plan.sums == "shared":
        grid -= grid % chunks  # whole heads at a time
    alone = Shares(grid, 0, B * Hq)
    if plan.sums != "shared" or plan.width != 64 or S % 4:  # lse is copied by multiples of 16 bytes
        return alone
    rounds = ceil_div(heads * chunks, grid)
    together = ceil_div(heads, rounds)
    helpers = multiprocessors - together * chunks
    tiles = ceil_div(Skv, _TILE_K) + 1 if causal else ceil_div(S, plan.tile_q)  # of a block, a head and a round
    found = helpers * tiles * _HELP_ROWS // (ceil_div(S, plan.tile_q) * plan.tile_q)  # heads, in the time of one
    first = (Hq // Hkv) * (together + (rounds - 1) * max(0, together - found))
    return Shares(together * chunks, helpers, first) if helpers and first < B * Hq else alone


def _chunks(plan: Plan, Skv: int, causal: bool) -> int:
    """Blocks to a key/value head."""
    return 1 if plan.sums == "whole" else _blocks(Skv, causal)


def refuses(case: Case) -> str | None:
    """Why the kernels cannot serve a case of shape (B, Hq, Hkv, S, Skv, D); None if they can."""
    _, Hq, Hkv, S, Skv, D = case.shape
    if D % 8 or D > 128:
        return f"takes heads of a multiple of 8 up to 128 wide, not {D}"
    if not math.prod(case.shape) or Hq % Hkv:
        return "takes no empty tensor"
    if "causal" in case.options and Skv != S:
        return f"is causal for as many queries as keys, not {S} and {Skv}"
    if max(case.shape[0] * Hq * ceil_div(max(S, Skv), 64), Hq // Hkv * S, Skv) >= 2**29:
        return "counts tiles in 32 bits"
    return None


def _first(mma: Mma) -> str:
    """The wrapper mma_..._first(d, a, b): D = A B. Nothing of d is read, so its registers are free until then."""
    text = mma.text().replace(f"{mma.name}(", f"{mma.name}_first(").replace(", int accumulate)", ")")
    text = text.replace(', "r"(accumulate)', "").replace('"+f"', '"=f"')
    return re.sub(r"setp\.ne\.b32 p, %\d+, 0;", "setp.ne.b32 p, 0, 0;", text)


@functools.cache
def program(plan: Plan, dtype: torch.dtype, causal: bool, part: str = PARTS[0]) -> HopperProgram:
    """The text of a kernel for a variant."""
    scores = Mma(plan.tile_q)
    gradients = Mma(plan.width, a_in_registers=True, b_across=True)
    queries = Mma(64, a_across=True, b_across=True)
    main = part == PARTS[0]
    constants: dict[str, Any] = {
        "PART": PARTS.index(part),
        "D": plan.width,
        "CAUSAL": int(causal),
        "WHOLE": int(plan.sums == "whole"),
        "SHARED": int(plan.sums == "shared"),
        "IS_BF16": int(dtype == torch.bfloat16),
        "GIVE": plan.give,
        "TAKE": plan.take,
        "SHARED_BYTES": plan.shared_bytes,
        "MMA_S": scores.name,
        "MMA_S_FIRST": f"{scores.name}_first",
        "MMA_D": gradients.name,
        "MMA_Q": queries.name,
        "MMA_Q_FIRST": f"{queries.name}_first",
    }
    text = hopper_program(_FILE, ELEMENTS[dtype], (scores, gradients, queries) if main else (), constants)
    if main:
        at = text.index('#line 1 "hopper_bwd.cu"')
        text = f"{text[:at]}{_first(scores)}{_first(queries)}{text[at:]}"
    return HopperProgram(part, text, 384 if main else 256, plan.shared_bytes if main else 0)


@functools.cache
def _kernel(plan: Plan, dtype: torch.dtype, causal: bool, part: str, device: int) -> Kernel:
    return load(program(plan, dtype, causal, part), KINDS, device)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float,
    deterministic: bool = False, into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of attention, on the current stream.

    Args:
        do, q, o: (B, Hq, S, D).
        k, v: (B, Hkv, Skv, D), Hkv a divisor of Hq.
        lse: (B, Hq, S) float32, as the forward returns it.
        causal: whether query i sees the keys up to i only; then S = Skv.
        scale: of the scores.
        deterministic: the same bits each time: a block for each key/value head, slow where there are few.
        into: memory for the gradients, of any strides that are multiples of 16 bytes, the last dimension contiguous.

    Returns:
        dq, dk, dv, in the shapes, dtype and layouts of q, k and v.

    Raises:
        CompileError, LaunchError: see LoadedKernel.
    """
    given = q, k, v
    dq, dk, dv = into or (like(q), like(k), like(v))
    do, q, k, v, o = (_readable(x) for x in (do, q, k, v, o))
    lse = lse.contiguous() if lse.data_ptr() % 16 == 0 else lse.clone(memory_format=torch.contiguous_format)
    B, Hq, S, D = q.shape
    Hkv, Skv = k.shape[1:3]
    device = q.get_device()
    multiprocessors = _multiprocessors(device)
    plan = plan_for((B, Hq, Hkv, S, Skv, D), multiprocessors, causal, deterministic)
    tiles = ceil_div(S, plan.tile_q)
    heads = min(multiprocessors, B * Hkv) * (Hq // Hkv) if plan.sums == "whole" else B * Hq
    stats = 2 * B * Hq * tiles * plan.tile_q
    sums = heads * tiles * plan.tile_q * plan.width
    space = torch.empty(stats + sums + B * Hq * (tiles + 1), dtype=torch.float32, device=q.device)
    key = (
        do.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse.data_ptr(), dq.data_ptr(),
        dk.data_ptr(), dv.data_ptr(), space.data_ptr(), plan, q.dtype, causal, scale, q.shape, k.shape, do.stride(),
        q.stride(), k.stride(), v.stride(), o.stride(), dq.stride(), dk.stride(), dv.stride(), device,
    )  # fmt: skip
    packed = _packed.get(key)
    if packed is None:
        if len(_packed) >= _PREPARED_LIMIT:
            _packed.clear()
        packed = _packed[key] = _pack(plan, (do, q, k, v, o, lse), (dq, dk, dv), space, (stats, sums), causal, scale)
    for launch in packed:
        launch.start()
    if into is not None:
        return into
    return as_laid(given[0], dq), as_laid(given[1], dk), as_laid(given[2], dv)


_packed: dict[tuple[object, ...], tuple[Any, ...]] = {}
"""Launches by all that they depend on: an allocator hands out the same few addresses again and again."""


def _readable(x: Tensor) -> Tensor:
    """The tensor where the copy engine can read it, else a copy."""
    if x.data_ptr() % 16 == 0 and _strides_fit(x.shape, x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(_PREPARED_LIMIT)
def _strides_fit(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    used = [stride for stride, size in zip(strides[:3], shape[:3], strict=True) if size > 1]
    return strides[3] == 1 and all(stride and stride % 8 == 0 for stride in used)


def _pack(
    plan: Plan, given: tuple[Tensor, ...], found: tuple[Tensor, Tensor, Tensor], space: Tensor,
    sizes_of: tuple[int, int], causal: bool, scale: float,
) -> tuple[Any, ...]:  # fmt: skip
    """The launches with everything in place: struct RowsJob's and struct Job's bytes, as hopper_bwd.cu has them."""
    do, q, k, v, o, lse = given
    B, Hq, S, D = q.shape
    Hkv, Skv = k.shape[1:3]
    device = q.get_device()
    tiles, key_tiles = ceil_div(S, plan.tile_q), ceil_div(Skv, _TILE_K)
    shares = shares_for(plan, (B, Hq, Hkv, S, Skv, D), _multiprocessors(device), causal)
    sums = space.data_ptr() + 4 * sizes_of[0]
    counts = sums + 4 * sizes_of[1]
    blocks = ceil_div(S, 128)
    pointers = (do.data_ptr(), o.data_ptr(), lse.data_ptr(), space.data_ptr(), sums, counts)
    row_strides = (*do.stride()[:3], *o.stride()[:3])
    rows = struct.pack("=6Q6q6i", *pointers, *row_strides, Hq, S, D, blocks, tiles * plan.tile_q, B * Hq * (tiles + 1))
    boxes = ((q, plan.tile_q), (k, _TILE_K), (v, _TILE_K), (do, plan.tile_q), (o, plan.tile_q))
    maps = b"".join(tensor_map(x, n) for x, n in boxes)
    ready = counts + 4 * B * Hq * tiles
    outputs = [space.data_ptr(), sums, counts, ready, *(x.data_ptr() for x in found), lse.data_ptr()]
    strides = [stride for x in found for stride in x.stride()[:3]]
    sizes = (B, Hq, Hkv, S, Skv, D, tiles, key_tiles, _chunks(plan, Skv, causal), shares.grid, shares.first)
    job = maps + struct.pack("=8Q9q11i2f", *outputs, *strides, *sizes, scale, scale * math.log2(math.e))
    job += bytes(-len(job) % 64)

    def packed(part: str, grid: int, argument: bytes, together: bool = False) -> Any:
        return _kernel(plan, q.dtype, causal, part, device).handle.pack((grid, 1, 1), (argument,), device, together)

    launches = [
        packed(PARTS[1], shares.first * blocks, rows),
        packed(PARTS[0], shares.grid + shares.helpers, job, plan.sums == "shared"),
    ]
    if plan.sums == "added":
        launches.append(packed(PARTS[2], B * Hq * tiles, job))
    return tuple(launches)
