"""Exact search by Triton kernels: what each launch of triton_kernels.py gets, and one wait for all of them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accelerant.ops import _hopper as hopper
from accelerant.ops._hopper import HopperProgram, Mma
from accelerant.ops._launch import ceil_div, multiprocessors, next_power_of_2
from accelerant.runtime.compilation.triton import TritonKernel, interpreting, refuses_triton
from accelerant.runtime.providers.cuda_launch import PackedLaunch
from accelerant.search.filters import Selection

KERNELS = {
    name: TritonKernel("accelerant.search.triton_kernels", f"search_{name}", widths=widths, contracts=name != "score")
    for name, widths in {
        "norms": (6, 7), "maxima": (9, 10, 11, 12), "maxima_one": (8, 9), "choose": (6, 7),
        "score": (10, 11, 12, 13), "best": (),
    }.items()
}  # fmt: skip

LARGEST_K = 512
"""Answers a query that the kernels find; `search_choose` has 1,024 maxima of which it takes the k-th."""

_HALVES = (torch.bfloat16, torch.float16)
_SETS, _ROWS = 8, 32
"""Blocks of a tile of the product, and rows of a block."""

_ELEMENTS = 1 << 28
"""Maxima, and scores of chosen blocks, that are held at once."""

_LARGEST_CAPACITY = 1 << 14
"""Near rows of a query: `search_best` compares each with each."""

_CHUNK = 1 << 29
"""Elements of rows in the host's memory that are brought to the device at once."""

_UNIT = 2.0**-24

_TIED = 1 << 30
"""Added to a count of answers where the next row has the score of the last."""


def serves(device: torch.device, metric: str, k: int) -> bool:
    """Return whether the kernels find k answers on tensors of a device."""
    return metric != "hamming" and k <= LARGEST_K and refuses_triton(device) is None


def kind_of(q: torch.dtype, x: torch.dtype) -> str:
    """Return what the tensor cores multiply: "int8", "half" as given, or "bfloat16", to which others are rounded."""
    return "int8" if q == x == torch.int8 else "half" if q == x and x in _HALVES else "bfloat16"


def tile_of(queries: int, q: torch.dtype, x: torch.dtype, shared_bytes: int) -> tuple[dict[str, int | str], int, int]:
    """Return the constants of `maxima`, its warps and its stages, within so many bytes of shared memory.

    Without the tensor cores of sm_80, and in the interpreter (`shared_bytes` of 0), products are float32's.
    """
    if not shared_bytes:
        return {"KIND": "upcast", "BLOCK_Q": 32, "BLOCK_N": 256, "BLOCK_D": 32}, 8, 2
    block_q, warps = (next_power_of_2(max(queries, 16)), 4) if queries <= 64 else (128, 8)
    step = 256 * (6 if x == torch.float32 else x.itemsize) + 2 * block_q  # bytes of a column; float32 is rounded there
    block_d = 32 if x == torch.float32 else 64
    while block_d > 16 and 2 * step * block_d > shared_bytes - 2048:
        block_d //= 2
    stages = max(min(4, (shared_bytes - 2048) // (step * block_d)), 2)
    return {"KIND": kind_of(q, x), "BLOCK_Q": block_q, "BLOCK_N": 256, "BLOCK_D": block_d}, warps, stages


def _shared_bytes(device: torch.device) -> int:
    if interpreting():
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 1 << 16)) if properties.major >= 8 else 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows on the device: of x those at `at`, or all; their numbers are names[row], or row + names."""

    x: Tensor
    at: Tensor | None
    seen: Tensor | None
    known: Tensor | None
    names: Tensor | int


@dataclass(frozen=True, slots=True)
class Found:
    """Answers (queries, k): scores, rows or -1, and how many each query has; `tied` if a row left out is as near."""

    first: int
    scores: Tensor
    rows: Tensor
    counts: Tensor
    tied: bool


class Answers(NamedTuple):
    """Results of the kernels; `room` is the number of near rows of a query that fit."""

    scores: Tensor
    rows: Tensor
    counts: Tensor
    room: int


def top(
    q: Tensor, x: Tensor, k: int, metric: str, chosen: Selection, known: Tensor | None = None
) -> list[Found] | None:
    """Return the k best of tiles of queries in chunks of rows, or None where only other ways find or refuse them.

    x may lie in the host's memory; `known` are norms of its rows, on the device. None is returned where norms are not
    finite or squares beyond float32, and where too many rows are as near as the k-th.
    """
    capacity = max(32, 4 * next_power_of_2(k))
    for _ in range(2):
        step = max(_ELEMENTS // max(len(x) // 24, 4 * capacity), 1)
        tiles = [slice(at, at + step) for at in range(0, len(q), step)]
        launched = [
            (tile.start, piece.names, *_launched(q[tile], piece, tile, k, metric, capacity))
            for piece in _pieces(x, chosen, known, q.device)
            for tile in tiles
        ]
        states = [state.cpu().numpy() for *_, state in launched]  # the only wait
        most = 0
        for (*_, answers, _), state in zip(launched, states, strict=True):
            blocks, near = state[:-2].reshape(2, -1)
            if blocks.min() < 0:
                return None
            found = int((near & (_TIED - 1)).max())
            if blocks.max() > capacity or found > answers.room:
                most = max(most, int(blocks.max()), found)
        if not most:
            return [_found(*each[:3], k, state) for each, state in zip(launched, states, strict=True)]
        capacity = next_power_of_2(most)
        if most > _LARGEST_CAPACITY:
            break
    return None


def _found(first: int, names: Tensor | int, answers: Answers, k: int, state: np.ndarray[Any, Any]) -> Found:
    scores, rows, counts, _ = answers
    if isinstance(names, Tensor):
        rows = names[rows.clamp(min=0)].masked_fill_(rows < 0, -1)
    near = state[len(rows) : -2]
    width = int((near & (_TIED - 1)).max())
    if width < k:
        scores, rows = scores[:, :width], rows[:, :width]
    return Found(first, scores, rows, counts, bool((near >= _TIED).any()))


def _pieces(x: Tensor, chosen: Selection, known: Tensor | None, device: torch.device) -> Iterator[Piece]:
    """Yield the chosen rows: all at once if x is on the device, or else copied in chunks."""
    rows, seen = chosen.rows, chosen.each
    first = 0
    if isinstance(rows, range):
        first, span = rows.start, slice(rows.start, max(rows.stop, rows.start))
        x, rows = x[span], None
        known = None if known is None else known[span]
        seen = None if seen is None else seen[:, span]
    count = len(x) if rows is None else len(rows)
    if x.device == device and count:
        rows = None if rows is None else rows.to(device)
        yield Piece(x, rows, None if seen is None else seen.to(device).contiguous(), known, first)
        return
    size = max(_CHUNK // x.shape[1], 1)
    for start in range(0, count, size):
        some: Any = slice(start, min(start + size, count))
        names: Tensor | int = first + start
        if rows is not None:
            some = rows[some].to(x.device)
            names = some.to(device)
        part = None if seen is None else seen[:, some.to(seen.device) if isinstance(some, Tensor) else some]
        part = None if part is None else part.to(device).contiguous()
        norms = None if known is None else known[names if isinstance(names, Tensor) else some]
        yield Piece(x[some].to(device), None, part, norms, names)


def _launched(q: Tensor, piece: Piece, tile: slice, k: int, metric: str, capacity: int) -> tuple[Answers, Tensor]:
    """Launch the kernels; return the answers, which are right if the state says so."""
    x, at, device = piece.x, piece.at, q.device
    (Q, D), N = q.shape, len(x) if at is None else len(at)
    seen = None if piece.seen is None else piece.seen[tile] if len(piece.seen) > 1 else piece.seen
    state = torch.zeros(2 * Q + 2, dtype=torch.int32, device=device)
    kind, largest = kind_of(q.dtype, x.dtype), state[2 * Q :]
    one = Q == 1 and kind != "int8"  # conversions of int8 take longer than reading it
    rounded = kind == "bfloat16" and not one
    factor = q.bfloat16() if rounded and not interpreting() else q
    if at is None and seen is None and _suits_hopper(factor, x):
        sets, height = _SETS, _HOPPER_WIDTH // _SETS
        maxima = _maxima_hopper(factor, x, piece.known, largest, metric)
    else:
        norms = _norms(piece, largest, metric, N, whole=kind == "int8")
        unknown = largest if norms is None and kind != "int8" else None
        maxima, sets = _maxima(factor, x, at, norms, seen, unknown, metric, N, one=one)
        height = _ROWS
    chosen = torch.empty(Q, capacity, dtype=torch.int32, device=device)
    cut = torch.empty(Q, dtype=torch.float32, device=device)
    nearest = N if maxima.shape[1] <= k else min(N, capacity)
    keys = torch.empty(Q, nearest, dtype=torch.int64, device=device)
    scores = torch.empty(Q, k, dtype=torch.float32, device=device)
    rows, counts = (torch.empty(shape, dtype=torch.int64, device=device) for shape in ((Q, k), Q))
    share = 4 * _UNIT if kind == "int8" and metric == "ip" else (D + 16) * 8 * _UNIT  # tensor cores truncate sums
    blocks, tiny = maxima.shape[1], (D * 1e-38) ** 0.5  # squares below float32's range
    KERNELS["choose"].launch(
        (Q,), (q, maxima, state, cut, chosen, Q, D, q.stride(0), blocks, k, capacity, share, tiny),
        {"METRIC": metric, "ROUNDED": rounded, "WIDTH": 1024},
    )  # fmt: skip
    args = (q, x, at, seen, state, cut, chosen, keys, Q, N, D, q.stride(0), x.stride(0), _step(seen), capacity, nearest)
    parts = 16 if Q > 8 else capacity
    constants = {"METRIC": metric, "SETS": sets, "ROWS": height, "LANES": _ROWS, "PARTS": parts}
    KERNELS["score"].launch((Q * parts,), args, constants)
    first = 0 if isinstance(piece.names, Tensor) else piece.names
    KERNELS["best"].launch(
        (Q * ceil_div(max(nearest, k), 64),), (keys, state, scores, rows, counts, Q, nearest, k, first),
        {"METRIC": metric, "WIDTH": 64},
    )  # fmt: skip
    return Answers(scores, rows, counts, nearest), state


def _norms(piece: Piece, largest: Tensor, metric: str, N: int, *, whole: bool) -> Tensor | None:
    """Return the norms of rows or None, and write the squares of the largest unless the product finds that."""
    x = piece.x
    if whole and metric == "ip":
        largest[0].fill_(int(np.float32(128 * 128 * x.shape[1]).view(np.int32)))
    elif piece.known is not None:
        square = piece.known.amax().square()
        largest.copy_(torch.stack([square, square * 2.0**-16]).view(torch.int32))
    if metric == "ip" or piece.known is not None:
        return piece.known
    norms = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _measured(x, piece.at, norms, None, largest, metric, N)
    return norms


def _measured(
    x: Tensor, at: Tensor | None, norms: Tensor | None, copy: Tensor | None, largest: Tensor, metric: str, N: int
) -> None:
    args = (x, at, norms, copy, largest, N, x.shape[1], x.stride(0))
    KERNELS["norms"].launch((ceil_div(N, _ROWS),), args, {"METRIC": metric, "ROWS": _ROWS, "BLOCK_D": 128})


def _maxima(
    q: Tensor, x: Tensor, at: Tensor | None, norms: Tensor | None, seen: Tensor | None, largest: Tensor | None,
    metric: str, N: int, *, one: bool,
) -> tuple[Tensor, int]:  # fmt: skip
    """Return the largest quick score of each block of rows, (queries, blocks), and how many blocks interleave."""
    Q, D = q.shape
    sets = 1 if one else _SETS
    tiles = ceil_div(N, sets * _ROWS)
    maxima = torch.empty(Q, tiles * sets, dtype=torch.float32, device=x.device)
    if one:
        args = (q, x, at, norms, seen, maxima, largest, N, D, x.stride(0))
        KERNELS["maxima_one"].launch((tiles,), args, {"METRIC": metric, "ROWS": _ROWS, "BLOCK_D": 128})
        return maxima, sets
    constants, warps, stages = tile_of(Q, q.dtype, x.dtype, _shared_bytes(x.device))
    even = D % int(constants["BLOCK_D"]) == 0
    KERNELS["maxima"].launch(
        (ceil_div(Q, int(constants["BLOCK_Q"])) * tiles,),
        (q, x, at, norms, seen, maxima, largest, Q, N, D, q.stride(0), x.stride(0), _step(seen), maxima.shape[1]),
        {"METRIC": metric, "EVEN": even, "SETS": sets, **constants}, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return maxima, sets


# --- the product on Hopper, hopper.cu ---------------------------------------------------------------------------------

HOPPER_KINDS = ("struct", "struct", "*f32", "*f32", "*u32", "struct")
"""Kinds of the arguments: tensor maps of queries and rows, norms, maxima, largest norm, struct Work."""

_HOPPER_WIDTH, _HOPPER_STAGES = 192, 5
_HOPPER_QUERIES = 64
"""Queries from which on tiles of 128 of them are worthwhile."""

_COPIED = 1 << 26
"""Elements that are rounded to bfloat16 at once."""


def _suits_hopper(q: Tensor, x: Tensor) -> bool:
    if len(q) < _HOPPER_QUERIES or q.dtype != torch.bfloat16 or not hopper.is_hopper(x.device):
        return False
    aligned = hopper.readable(q) is q and (x.dtype != torch.bfloat16 or hopper.readable(x) is x)
    return aligned and x.shape[1] % 8 == 0 and len(x) < 1 << 30


@functools.cache
def hopper_program(metric: str, *, measures: bool) -> HopperProgram:
    """Return the kernel's program; `measures`: it finds the largest norm too."""
    shared_bytes = hopper.ring_bytes(_HOPPER_STAGES, 128, _HOPPER_WIDTH)
    registers = {"GIVE": 56, "TAKE": 224} if measures else {"GIVE": 40, "TAKE": 232}
    return hopper.product_program(
        "search_maxima", Path(__file__).with_name("hopper.cu"), torch.bfloat16, Mma(_HOPPER_WIDTH), 2, _HOPPER_STAGES,
        shared_bytes, METRIC=("ip", "l2", "cosine").index(metric), READERS=3 * measures, **registers,
    )  # fmt: skip


_launches: hopper.LaunchCache[PackedLaunch] = hopper.LaunchCache()


def _maxima_hopper(q: Tensor, x: Tensor, known: Tensor | None, largest: Tensor, metric: str) -> Tensor:
    """Return maxima of blocks; rows of other dtypes than bfloat16 are rounded to it in parts."""
    (Q, D), N = q.shape, len(x)
    blocks = ceil_div(N, _HOPPER_WIDTH) * _SETS
    maxima = torch.empty(Q, blocks, dtype=torch.float32, device=x.device)
    norms = known if known is not None or metric == "ip" else torch.empty(N, dtype=torch.float32, device=x.device)
    if x.dtype == torch.bfloat16:
        if known is not None:
            largest[0].copy_(known.amax().square().view(torch.int32))
        elif metric != "ip":
            _measured(x, None, norms, None, largest, metric, N)
        _product(q, x, norms, maxima, largest if norms is None else None, metric)
        return maxima
    step = ceil_div(_COPIED // D, _HOPPER_WIDTH) * _HOPPER_WIDTH
    copy = torch.empty(min(step, N), D, dtype=torch.bfloat16, device=x.device)
    for first in range(0, N, step):
        part = x[first : first + step]
        own = None if norms is None else norms[first : first + step]
        _measured(part, None, own if known is None else None, copy, largest, metric, len(part))
        _product(q, copy[: len(part)], own, maxima[:, first // _HOPPER_WIDTH * _SETS :], None, metric)
    return maxima


def _product(q: Tensor, x: Tensor, norms: Tensor | None, maxima: Tensor, largest: Tensor | None, metric: str) -> None:
    """Launch the product; `largest` gets the largest norm unless it is None."""
    (Q, D), N = q.shape, len(x)
    absent = maxima if norms is None else norms, maxima if largest is None else largest
    addresses = (q.data_ptr(), x.data_ptr(), maxima.data_ptr(), *(each.data_ptr() for each in absent))
    key = (*addresses, Q, N, D, q.stride(0), x.stride(0), maxima.stride(0), metric, largest is None, x.get_device())
    launch = _launches.get(key)
    if launch is None:
        program = hopper_program(metric, measures=largest is not None)
        tiles = hopper.product_tiles(Q, N, D, 128, _HOPPER_WIDTH, 8)
        work = bytes((ctypes.c_int32 * 8)(Q, N, maxima.stride(0), *tiles))
        args = (hopper.tensor_map(q, 128), hopper.tensor_map(x, _HOPPER_WIDTH), absent[0], maxima, absent[1], work)
        packed = hopper.pack(program, HOPPER_KINDS, min(tiles[-1], multiprocessors(x.device)), args, x.get_device())
        launch = _launches.keep(key, packed)
    launch.start()


def _step(seen: Tensor | None) -> int:
    """Return the distance of the masks of two queries, 0 where they share one."""
    return 0 if seen is None or len(seen) == 1 else seen.stride(0)
