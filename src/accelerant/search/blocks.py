"""Exact search by Triton kernels: what each launch of triton_kernels.py gets, and one wait for all of them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerant.ops import _hopper as hopper
from accelerant.ops._hopper import HopperProgram, Mma
from accelerant.ops._launch import ceil_div, multiprocessors, next_power_of_2
from accelerant.runtime.compilation.triton import TritonKernel, interpreting, recorders, refuses_triton
from accelerant.runtime.providers.cuda_launch import PackedLaunch
from accelerant.search.arrays import Selection

KERNELS = {
    name: TritonKernel(
        "accelerant.search.triton_kernels", f"search_{name}", widths=widths, contracts=name not in ("score", "finish")
    )
    for name, widths in {
        "norms": (7, 8), "maxima": (10, 11, 12, 13), "maxima_one": (9, 10), "choose": (7, 8),
        "score": (11, 12, 13, 14), "best": (), "finish": (14, 15), "compact": (),
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

_FEW = 4096, 16
"""Maxima that `search_choose` compares at once, and its warps, for few queries."""

_ALONE, _PARTS = 2048, 128
"""Near rows of a single query up to which one kernel does all that follows the maxima, and its programs."""

_MARKS = 4096
"""Elements of a mask of which a program finds the rows."""

_SMALL = 1 << 17
"""Rows up to which blocks have 8 of them: those that are chosen are scored in less time, and there are few."""

_Shape = tuple[Any, ...]
"""Dtype and dimensions of an array."""

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
    """Rows on the device: of x those at `at`, those of a mask, or all; their numbers are names[row], or row + names.

    `room`: the bound of the number of rows that the mask selects, which the kernels count.
    """

    x: Tensor
    at: Tensor | None
    seen: Tensor | None
    known: Known | None
    names: Tensor | int
    marks: Tensor | None = None
    room: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """Answers (queries, k): scores, rows or -1, and how many each query has; `tied` if a row left out is as near."""

    first: int
    scores: Tensor
    rows: Tensor
    counts: Tensor
    tied: bool


class Known(NamedTuple):
    """Norms of rows, and the two numbers that the kernels find otherwise: bits of squares, as in their `state`."""

    norms: Tensor
    largest: Tensor

    @classmethod
    def of(cls, norms: Tensor) -> Known:
        """Return what the kernels need to know of rows with these norms."""
        square = norms.amax().square() if len(norms) else norms.new_zeros(())
        return cls(norms, torch.stack([square, square * 2.0**-16]).view(torch.int32))


class Space(NamedTuple):
    """Memory for the kernels of one search: `work` begins with their state, `told` is that on the host.

    `free`: where the memory waits for the next search, with zeros as its state.
    """

    work: Tensor
    told: Tensor
    free: list[Space] | None


class Answers(NamedTuple):
    """Results of the kernels, right if the state says so, which is on the host once their stream is done.

    `room`: number of near rows of a query that fit; `marked`: number of rows of a mask that fit, 0 without.
    """

    room: int
    marked: int
    scores: Tensor
    rows: Tensor
    counts: Tensor
    space: Space


Launched = tuple[int, Piece, Answers]
"""The first query of a tile, a piece, and what the kernels write."""

_rooms: hopper.LaunchCache[int] = hopper.LaunchCache(1024)
"""Rows that masks of so many rows, on a device, selected lately, rounded up to a power of two."""


def start(
    q: Tensor, x: Tensor, k: int, metric: str, chosen: Selection, known: Known | None = None, capacity: int = 0
) -> list[Launched]:
    """Launch a search of the k best of tiles of queries in chunks of rows, for `top` to wait for."""
    capacity = capacity or _capacity(k)
    step = max(_ELEMENTS // max(len(x) // 24, 4 * capacity), 1)
    tiles = [slice(at, at + step) for at in range(0, len(q), step)]
    return [
        (tile.start, piece, _launched(q[tile], piece, tile, k, metric, capacity))
        for piece in _pieces(x, chosen, known, q.device)
        for tile in tiles
    ]


def top(
    q: Tensor, x: Tensor, k: int, metric: str, chosen: Selection, known: Known | None, launched: list[Launched]
) -> list[Found] | None:
    """Return the k best that `start` launched the search of, or None where only other ways find or refuse them.

    x may lie in the host's memory, `known` on the device. None is returned where norms are not
    finite or squares beyond float32, and where too many rows are as near as the k-th.
    """
    capacity = _capacity(k)
    for _ in range(3):
        _wait(q.device)
        found = [_found(*each, k, capacity) for each in launched]
        if -1 in (few := [each for each in found if isinstance(each, int)]):
            return None
        if not few:
            return [each for each in found if isinstance(each, Found)]
        capacity = next_power_of_2(max(few))
        if capacity > _LARGEST_CAPACITY:
            break
        launched = start(q, x, k, metric, chosen, known, capacity)
    return None


def _capacity(k: int) -> int:
    return max(32, 4 * next_power_of_2(k))


class Quick(NamedTuple):
    """A search of arrays of one GPU, of which the launches are known."""

    plan: Plan
    x: Tensor
    piece: Piece


def quick(q: Any, x: Any, k: Any, metric: Any, mask: Any) -> Quick | None:
    """Return a search of arrays of any kind that `top` made before; None without."""
    if type(k) is not int or type(metric) is not str:
        return None
    for each in (q, x) if mask is None or type(mask) is range else (q, x, mask):
        if not isinstance(each, Tensor) or not each.is_cuda or each.layout is not torch.strided or each.is_neg():
            return None
    if q.dim() != 2 or x.dim() != 2:
        return None
    first, room = 0, 0
    if type(mask) is range:
        if mask.step != 1 or not 0 <= mask.start < mask.stop <= len(x):
            return None
        first, x, mask = mask.start, x[mask.start : mask.stop], None
    elif mask is not None:
        known = _rooms.get((mask.shape[0] if mask.dim() else 0, mask.device)) if mask.dtype == torch.bool else None
        if known is None or mask.shape != x.shape[:1] or mask.device != x.device or not mask.is_contiguous():
            return None
        room = known
    plan = _plans.get(_key(q, x, None, None, None, mask, room, k, metric, _capacity(k), first))
    return None if plan is None else Quick(plan, x, Piece(x, None, None, None, first, mask, room))


def again(case: Quick, q: Tensor, k: int) -> Found | None:
    """Return the answers by launches that are known, None where they do not find them."""
    answers = _replayed(case.plan, q, (q, case.x, None, None, None, None, case.piece.marks))
    if answers is None:
        return None
    _wait(q.device)
    found = _found(0, case.piece, answers, k, _capacity(k))
    return found if isinstance(found, Found) else None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _found(first: int, piece: Piece, answers: Answers, k: int, capacity: int) -> Found | int:
    """Return answers, or the capacity that they need, or -1 where others have to find them."""
    room, marked, scores, rows, counts, (_, told, free) = answers
    if len(told) == 6:  # in less time than by arrays
        most, near, *_, selected = told.tolist()
        least, width, tied = most, near & (_TIED - 1), near >= _TIED
    else:
        state = told.numpy()
        chosen, counted = state[:-4].reshape(2, -1)
        least, most, selected = int(chosen.min()), int(chosen.max()), int(state[-1])
        width, tied = int((counted & (_TIED - 1)).max()), bool((counted >= _TIED).any())
    if free is not None:
        free.append(answers.space)
    if piece.marks is not None:
        count = next_power_of_2(max(selected, 1))
        fits = count <= marked
        if not fits or marked > 8 * count:  # fewer do no harm
            _rooms.keep((len(piece.marks), piece.marks.device), marked // 2 if fits else count)
        if not fits:
            return capacity
    if least < 0:
        return -1
    if most > capacity or width > room:
        return int(max(most, width))
    if isinstance(piece.names, Tensor):
        rows = piece.names[rows.clamp(min=0)].masked_fill_(rows < 0, -1)
    if width < k:
        scores, rows = scores[:, :width], rows[:, :width]
    return Found(first, scores, rows, counts, tied)


def _pieces(x: Tensor, chosen: Selection, known: Known | None, device: torch.device) -> Iterator[Piece]:
    """Yield the chosen rows: all at once if x is on the device, or else copied in chunks."""
    if (marks := chosen.marks) is not None and x.device == marks.device == device and len(x):
        if (room := _rooms.get((len(marks), device))) is None:
            room = next_power_of_2(max(int(marks.count_nonzero()), 1))
            _rooms.keep((len(marks), device), room)
        yield Piece(x, None, None, known, 0, marks.contiguous(), room)
        return
    rows, seen = chosen.rows, chosen.each
    first = 0
    if isinstance(rows, range):
        first, span = rows.start, slice(rows.start, max(rows.stop, rows.start))
        x, rows = x[span], None
        known = None if known is None else known._replace(norms=known.norms[span])
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
        own = None if known is None else known._replace(norms=known.norms[names if isinstance(names, Tensor) else some])
        yield Piece(x[some].to(device), None, part, own, names)


@dataclass(frozen=True, slots=True)
class Plan:
    """Launches of searches that differ in memory alone: each pointer as the number of an array and an offset.

    `fixed`: the addresses, if some of the launches have them within their arguments.
    """

    work: tuple[_Shape, ...]
    out: tuple[_Shape, ...]
    work_bytes: int
    out_bytes: int
    room: int
    marked: int
    launches: list[tuple[Any, list[tuple[int, int]]]]
    fixed: list[int] | None
    free: list[Space] | None


_plans: hopper.LaunchCache[Plan] = hopper.LaunchCache(256)


def _size_bytes(arrays: Sequence[_Shape]) -> int:
    return sum(ceil_div(math.prod(shape) * dtype.itemsize, 16) * 16 for dtype, *shape in arrays)


def _cut(memory: Tensor, arrays: Sequence[_Shape]) -> list[Any]:
    """Return arrays that follow one another in memory, each from a multiple of 16 bytes on."""
    typed = {dtype: memory.view(dtype) for dtype, *_ in arrays}
    found, at = [], 0
    for dtype, *shape in arrays:
        found.append(typed[dtype].as_strided(shape, (*shape[1:], 1), at // dtype.itemsize))
        at += ceil_div(math.prod(shape) * dtype.itemsize, 16) * 16
    return found


def _space(size: int, state: int, device: torch.device, free: list[Space] | None) -> Space:
    """Return memory of so many bytes, with zeros as the state of so many numbers; `free` as of a Space."""
    if free is None:
        work = torch.empty(size, dtype=torch.uint8, device=device)
        return Space(work, work[: 4 * state].zero_().view(torch.int32), None)
    try:
        return free.pop()
    except IndexError:
        told = torch.zeros(state, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        return Space(torch.zeros(size, dtype=torch.uint8, device=device), told, free)


def _told(space: Space) -> Space:
    """Return memory whose state is on the host as soon as its stream is done."""
    state = space.told
    if not state.is_cuda:
        return space
    copy = torch.empty(state.shape, dtype=state.dtype, device="cpu", pin_memory=True)
    return space._replace(told=copy.copy_(state, non_blocking=True))


def _launched(q: Tensor, piece: Piece, tile: slice, k: int, metric: str, capacity: int) -> Answers:
    """Launch the kernels; a case that is known takes few steps of the host."""
    x, at, device = piece.x, piece.at, q.device
    seen = None if piece.seen is None else piece.seen[tile] if len(piece.seen) > 1 else piece.seen
    first = 0 if isinstance(piece.names, Tensor) else piece.names
    known, bound = (None, None) if piece.known is None else piece.known
    key = _key(q, x, at, seen, known, piece.marks, piece.room, k, metric, capacity, first)
    plan = _plans.get(key)
    replayed = None if plan is None else _replayed(plan, q, (q, x, at, seen, known, bound, piece.marks))
    if replayed is not None:
        return replayed

    (Q, D), N = q.shape, piece.room or (len(x) if at is None else len(at))
    kind = kind_of(q.dtype, x.dtype)
    words = kind == "int8" and Q == 1 and _has_words(q, x)
    one = Q == 1 and (kind != "int8" or words)  # single conversions of int8 take longer than reading it
    rounded = kind == "bfloat16" and not one
    factor = q.bfloat16() if rounded and not interpreting() else q
    on_hopper = at is seen is piece.marks is None and N > _HOPPER_ROWS and _suits_hopper(factor, x)
    sets = 1 if one else 4 * _SETS if N <= _SMALL and not on_hopper else _SETS
    height = _ROWS if one else (_HOPPER_WIDTH if on_hopper else 8 * _ROWS) // sets
    blocks = ceil_div(N, sets * height) * sets
    room = N if blocks <= k else min(N, capacity)
    shapes: tuple[_Shape, ...] = (
        (torch.int32, 2 * Q + 4), (torch.float32, Q, blocks), (torch.int64, Q, room), (torch.int32, Q, capacity),
        (torch.float32, Q), (torch.float32, 0 if metric == "ip" or known is not None or one else len(x)),
        (torch.int64, piece.room),
    )  # fmt: skip
    of_out = ((torch.float32, Q, k), (torch.int64, Q, k), (torch.int64, Q))
    alone = one and capacity <= _ALONE
    free: list[Space] | None = [] if alone else None
    space = _space(_size_bytes(shapes), 2 * Q + 4, device, free)
    out = torch.empty(_size_bytes(of_out), dtype=torch.uint8, device=device)
    state, maxima, keys, chosen, cut, norms, rows = _cut(space.work, shapes)
    scores, ids, counts = _cut(out, of_out)
    answers = Answers(room, piece.room, scores, ids, counts, space)
    largest, count = state[2 * Q : 2 * Q + 2], None
    thread = threading.get_ident()
    recorded = recorders[thread] = []
    try:
        if piece.marks is not None:
            at, count = rows, state[2 * Q + 3 :]
            KERNELS["compact"].launch(
                (ceil_div(len(x), _MARKS),), (piece.marks, at, count, len(x), N), {"WIDTH": _MARKS}, num_warps=8
            )
            piece = dataclasses.replace(piece, at=at)
        if on_hopper:
            _maxima_hopper(factor, x, known, norms, maxima, largest, metric)
        else:
            _maxima(factor, piece, count, norms, seen, maxima, largest, metric, N, one=one, words=words, sets=sets)
        tiny = (D * 1e-38) ** 0.5  # squares below float32's range
        whole = kind == "int8" and metric == "ip"
        share = 4 * _UNIT if whole else (D + 16) * 8 * _UNIT  # tensor cores truncate sums
        bounds = share, tiny, 128.0 * D**0.5 if whole else tiny
        found = largest if bound is None else bound
        if alone:
            chunk = min(max(next_power_of_2(ceil_div(blocks, _PARTS)), 16), 256)
            parts = min(next_power_of_2(ceil_div(blocks, chunk)), _PARTS)  # each number compiles a kernel
            KERNELS["finish"].launch(
                (parts,), (q, x, at, count, seen, maxima, state, space.told, found, keys, *answers[2:5], N, D,
                x.stride(0), blocks, room, k, first, *bounds), {"METRIC": metric, "ROWS": height, "WIDTH": _FEW[0],
                "CHUNK": chunk, "PARTS": parts}, num_warps=_FEW[1],
            )  # fmt: skip
        else:
            _decide(q, piece, count, seen, answers, (state, maxima, keys, chosen, cut), found, bounds, k, metric, sets,
                    height, rounded=rounded)  # fmt: skip
    finally:
        del recorders[thread]
    if recorded and not rounded:  # by own kernels alone, on these arrays
        owners = (q, x, piece.at if count is None else None, seen, known, bound, piece.marks, space.work, out)
        told = (space.told,) if alone else ()
        launches = [(kernel, [_place(each, (*owners, *told)) for each in used]) for kernel, used in recorded]
        fixed = [0 if each is None else each.data_ptr() for each in owners] if on_hopper else None
        _plans.keep(key, Plan(shapes, of_out, len(space.work), len(out), room, piece.room, launches, fixed, free))
    return answers if alone else answers._replace(space=_told(space))


def _decide(
    q: Tensor, piece: Piece, count: Tensor | None, seen: Tensor | None, answers: Answers, work: Sequence[Tensor],
    largest: Tensor, bounds: tuple[float, float, float], k: int, metric: str, sets: int, height: int, *, rounded: bool,
) -> None:  # fmt: skip
    """Launch what follows the maxima: the choice of blocks, their scores, the best of these."""
    (state, maxima, keys, chosen, cut), (Q, D), x, at = work, q.shape, piece.x, piece.at
    N, capacity, room, blocks = len(x) if at is None else len(at), chosen.shape[1], answers.room, maxima.shape[1]
    first = 0 if isinstance(piece.names, Tensor) else piece.names
    width, warps = _FEW if Q <= 64 else (1024, 4)
    KERNELS["choose"].launch(
        (Q,), (q, maxima, state, largest, cut, chosen, Q, D, q.stride(0), blocks, k, capacity, *bounds),
        {"METRIC": metric, "ROUNDED": rounded, "WIDTH": width}, num_warps=warps,
    )  # fmt: skip
    parts = 16 if Q > 8 else capacity
    KERNELS["score"].launch(
        (Q * parts,), (q, x, at, count, seen, state, cut, chosen, keys, Q, N, D, q.stride(0), x.stride(0),
        _step(seen), capacity, room), {"METRIC": metric, "SETS": sets, "ROWS": height, "LANES": next_power_of_2(height),
        "PARTS": parts},
    )  # fmt: skip
    KERNELS["best"].launch(
        (Q * ceil_div(max(room, k), 64),), (keys, state, *answers[2:5], Q, room, k, first),
        {"METRIC": metric, "WIDTH": 64},
    )  # fmt: skip


def _key(
    q: Tensor, x: Tensor, at: Tensor | None, seen: Tensor | None, known: Tensor | None, marks: Tensor | None,
    room: int, k: int, metric: str, capacity: int, first: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Return what the launches of a search depend on beside addresses, of which the alignment counts."""
    return (
        q.shape, q.dtype, q.stride(), x.shape, x.dtype, x.stride(), None if at is None else at.shape, _step(seen), room,
        q.device, x.device, k, metric, capacity, first,
        *[None if each is None else each.data_ptr() & 15 for each in (q, x, at, seen, known, marks)],
    )  # fmt: skip


def _replayed(plan: Plan, q: Tensor, arrays: Sequence[Tensor | None]) -> Answers | None:
    """Launch what is known; None if the launches are of other addresses."""
    space = _space(plan.work_bytes, plan.work[0][1], q.device, plan.free)
    out = torch.empty(plan.out_bytes, dtype=torch.uint8, device=q.device)
    bases = [0 if each is None else each.data_ptr() for each in (*arrays, space.work, out)]
    if plan.fixed is not None and plan.fixed != bases:
        return None
    bases.append(space.told.data_ptr())
    for launch, places in plan.launches:
        if places:
            launch.start([bases[base] + offset for base, offset in places])
        else:
            launch.start()
    space = space if plan.free is not None else _told(space)
    scores, rows, counts = _cut(out, plan.out)
    return Answers(plan.room, plan.marked, scores, rows, counts, space)


def _place(pointer: int, owners: Sequence[Tensor | None]) -> tuple[int, int]:
    """Return the number of the array that a pointer is in, and its offset there."""
    for at, each in reversed(list(enumerate(owners))):
        if each is not None and (
            pointer == each.data_ptr() or each.data_ptr() < pointer < each.data_ptr() + each.nbytes
        ):
            return at, pointer - each.data_ptr()
    raise ValueError(f"no array has address {pointer}")


def _has_words(q: Tensor, x: Tensor) -> bool:
    """Return whether an instruction multiplies four elements of int8 vectors."""
    aligned = not (x.shape[1] | x.stride(0) | q.data_ptr() | x.data_ptr()) & 3
    return aligned and _shared_bytes(x.device) > 0 and torch.version.hip is None


def _measured(
    x: Tensor, at: Tensor | None, count: Tensor | None, norms: Tensor | None, copy: Tensor | None, largest: Tensor,
    metric: str, N: int,
) -> None:  # fmt: skip
    args = (x, at, count, norms, copy, largest, N, x.shape[1], x.stride(0))
    KERNELS["norms"].launch((ceil_div(N, _ROWS),), args, {"METRIC": metric, "ROWS": _ROWS, "BLOCK_D": 128})


def _maxima(
    q: Tensor, piece: Piece, count: Tensor | None, norms: Tensor, seen: Tensor | None, maxima: Tensor, largest: Tensor,
    metric: str, N: int, *, one: bool, words: bool, sets: int,
) -> None:  # fmt: skip
    """Write the largest quick score of each block of rows, and the squares of the largest norms if not known."""
    x, at, (Q, D) = piece.x, piece.at, q.shape
    known = None if piece.known is None else piece.known.norms
    whole = metric == "ip" and kind_of(q.dtype, x.dtype) == "int8"
    if known is None and metric != "ip" and not one:
        _measured(x, at, count, norms, None, largest, metric, N)
        known = norms
    unknown = None if whole or known is not None else largest  # the product finds it
    if one:
        q, x = (each.view(torch.int32) for each in (q, x)) if words else (q, x)
        KERNELS["maxima_one"].launch(
            (maxima.shape[1],), (q, x, at, count, known, seen, maxima, unknown, N, x.shape[1], x.stride(0)),
            {"METRIC": metric, "WORDS": words, "ROWS": _ROWS,
             "BLOCK_D": 64 if x.dtype in _HALVES and unknown is not None else 128},
        )  # fmt: skip
        return
    constants, warps, stages = tile_of(Q, q.dtype, x.dtype, _shared_bytes(x.device))
    tiles = ceil_div(Q, int(constants["BLOCK_Q"])) * (maxima.shape[1] // sets)
    KERNELS["maxima"].launch(
        (tiles,),
        (q, x, at, count, known, seen, maxima, unknown, Q, N, D, q.stride(0), x.stride(0), _step(seen),
         maxima.shape[1]),
        {"METRIC": metric, "EVEN": D % int(constants["BLOCK_D"]) == 0, "SETS": sets, **constants},
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


# --- the product on Hopper, hopper.cu ---------------------------------------------------------------------------------

HOPPER_KINDS = ("struct", "struct", "*f32", "*f32", "*u32", "struct")
"""Kinds of the arguments: tensor maps of queries and rows, norms, maxima, largest norm, struct Work."""

_HOPPER_WIDTH, _HOPPER_STAGES = 192, 5
_HOPPER_QUERIES = 64
"""Queries from which on tiles of 128 of them are worthwhile."""

_HOPPER_ROWS = 1 << 14
"""Rows up to which blocks of 8 of them take less time, whose chosen ones are scored sooner."""

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


def _maxima_hopper(
    q: Tensor, x: Tensor, known: Tensor | None, room: Tensor, maxima: Tensor, largest: Tensor, metric: str
) -> None:  # fmt: skip
    """Write maxima of blocks; rows of other dtypes than bfloat16 are rounded to it in parts."""
    D, N = q.shape[1], len(x)
    norms = known if known is not None or metric == "ip" else room
    if x.dtype == torch.bfloat16:
        if known is None and metric != "ip":
            _measured(x, None, None, norms, None, largest, metric, N)
        _product(q, x, norms, maxima, largest if norms is None else None, metric)
        return
    step = ceil_div(_COPIED // D, _HOPPER_WIDTH) * _HOPPER_WIDTH
    copy = torch.empty(min(step, N), D, dtype=torch.bfloat16, device=x.device)
    for first in range(0, N, step):
        part = x[first : first + step]
        own = None if norms is None else norms[first : first + step]
        _measured(part, None, None, own if known is None else None, copy, largest, metric, len(part))
        _product(q, copy[: len(part)], own, maxima[:, first // _HOPPER_WIDTH * _SETS :], None, metric)


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
    recorded: list[Any] = recorders.get(threading.get_ident(), [])
    recorded.append((launch, ()))


def _step(seen: Tensor | None) -> int:
    """Return the distance of the masks of two queries, 0 where they share one."""
    return 0 if seen is None or len(seen) == 1 else seen.stride(0)
