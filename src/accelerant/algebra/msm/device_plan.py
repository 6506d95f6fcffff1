"""The division of a multi-scalar multiplication on a device, its C kernels, and the launches that follow from it.

A launch names its scratch arrays, so that the launches of sums of one size are computed once.

Affine rounds. An affine addition takes 5M + 1S, 3M of which are its share of an inversion; one in XYZZ coordinates 8M +
2S. With r rounds a bucket of k points takes (1 - 2^-r) k additions of the first kind, (2^r - 1) / 2 on average for the
padding of its last unit, and k / 2^r of the second kind.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from accelerant.algebra.curve.launch import cuda_program, point_text, prefixed
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.memory_space import MemorySpace
from accelerant.algebra.field.program import defined, read_files
from accelerant.errors import ConfigError, OutOfMemory
from accelerant.runtime.compilation.kernel import Kernel, KernelSource, LazyDialects
from accelerant.runtime.ledger import compiled, on_forget

_PRODUCTS_PER_ENTRY = 10
_PRODUCTS_PER_BUCKET = 30
"""Costs that determine the window: one addition of an affine point per entry, and a bit more than two of the additions
of fold.c per bucket.
"""

_CROWDED_BITS = (6, 10)  # a highest digit of fewer bits crowds few buckets: it counts as so many more

_MAX_WINDOW = 22
_FEW_BUCKETS, _THREADS = 1 << 15, 1 << 16  # with fewer buckets, segments are shortened to occupy so many threads
_MIN_SEGMENT = 8  # points of a segment: adding two costs 1.4 times an addition

_MIN_CHUNK = 1024

ROUNDS: dict[int, tuple[tuple[int, int], ...]] = {12: ((3 << 23, 2),)}
"""32-bit limbs of a coordinate -> (entries of a chunk, rounds of affine.c), most entries first: rounds from that many
entries on; none for other limbs. Scratch grows with them: 2^22 points of BLS12-381 take 8.4 GB instead of 1.0.
docs/zk.md has the times.
"""

_ROUNDS_FILL = 13  # Average units of a bucket below which rounds pad too much
_ROUNDS_SHARE = (1.0, 0.97, 0.9)  # Time of an entry with no round, one, and more, relative to its products

_MAX_ROUNDS = 5
_AFFINE_ENTRIES = 64  # entries of a thread of affine.c: its share of an inversion is small
_BINNED_ENTRIES = 1 << 21  # Entries from which bins.c sorts them, three launches more
_INVERT_THREADS = 1 << 15  # Threads of msm_affine_invert above which each takes more products

_COMBINE_BLOCKS = 1024
_CACHED = 256  # Plans, and chunks of them, whose launches are kept
MAX_INDICES = (1 << 31) - 1  # most points, or digits of a chunk: 31 bits and a sign

_U32, _U64 = np.dtype(np.uint32), np.dtype(np.uint64)


def _number(formula: Callable[[DeviceMsmPlan], int]) -> int:
    """Return a property, a number that follows from a plan."""
    return property(formula)  # type: ignore[return-value]  # what an instance gives


@dataclass(frozen=True, slots=True)
class DeviceMsmPlan:
    """The division of a sum; every field may be tuned."""

    points: int  # of a chunk; chunks are summed one after the other
    window: int  # bits of a digit, c
    windows: int  # digits of a scalar
    shared: bool  # one set of buckets for all windows, since the points' multiples are stored
    segment: int  # largest number of units that one thread sums; a unit is 2^rounds points of a bucket
    rounds: int = 0  # of affine.c, before segments are summed
    per_thread: int = 1  # log2 of the buckets of a thread of fold.c
    inlined: bool | None = None  # for accumulate_source
    resident: int | None = None  # for accumulate_source
    fold_inlined: bool = False  # for fold_source
    bins_fit: bool = True  # the device's local memory is large enough for bins.c

    buckets = _number(lambda p: 1 << p.window - 1)  # of a set
    sets = _number(lambda p: 1 if p.shared else p.windows)  # of buckets
    keys = _number(lambda p: p.sets * p.buckets)  # buckets of all sets
    entries = _number(lambda p: p.windows * p.points)  # digits of a chunk
    binned = _number(lambda p: p.bins_fit and p.entries >= _BINNED_ENTRIES)  # whether bins.c sorts the entries
    bins = _number(lambda p: (p.keys - 1 >> p.bin_bits) + 1 if p.binned else 0)  # of all keys
    pieces = _number(lambda p: p.bins + p.entries // PIECE)  # of bins, at most
    counters = _number(lambda p: p.keys + COUNTERS + (p.bins + 1 if p.binned else 0))  # of keys, segments and bins
    units = _number(lambda p: (p.entries + min(p.keys, p.entries) * ((1 << p.rounds) - 1)) >> p.rounds)  # at most
    padded_entries = _number(lambda p: p.units << p.rounds)  # entries with their padding to units, at most
    affine_units = _number(lambda p: max(1, _AFFINE_ENTRIES >> p.rounds))  # of a thread of affine.c
    heavy = _number(lambda p: p.units // p.segment)  # buckets of more than one segment, at most
    segments = _number(lambda p: min(p.keys, p.entries) + p.heavy)  # at most
    sums = _number(lambda p: p.keys + 2 * p.heavy)  # points in XYZZ coordinates: buckets, and parts of heavy ones
    tiles = _number(lambda p: -(-p.keys // TILE))  # of keys

    @property
    def bin_bits(self) -> int:
        """log2 of the keys of a bin of bins.c: about as many as a set has bins, so that both halves write long runs."""
        bits = (self.buckets - 1).bit_length()
        return min(MAX_BIN_BITS, max(bits - MAX_WINDOW_BINS.bit_length() + 1, (bits + 1) // 2))

    @property
    def affine_threads(self) -> int:
        """Threads of affine.c; 0 without rounds."""
        return -(-self.units // (self.affine_units * AFFINE_BLOCK)) * AFFINE_BLOCK if self.rounds else 0

    @property
    def affine_pairs(self) -> tuple[int, int]:
        """Pairs of the first and of the second round, whose memory the later rounds use again; 0 without the round."""
        first = self.affine_threads * self.affine_units << self.rounds >> 1
        return first, first // 2 if self.rounds > 1 else 0

    def blocks(self, threads: int) -> int:
        """Return the blocks per set of msm_reduce's first launch."""
        return -(-self.buckets // (threads << self.per_thread))

    def size_bytes(self, curve: Curve[Any]) -> int:
        """Return the scratch memory: all but points and scalars."""
        arrays = scratch_shapes(curve.name, self).values()
        return (
            sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays) + 24 * coordinate_words(curve) * self.sets
        )

    def explain(self, curve: Curve[Any]) -> str:
        """Describe the plan."""
        sets = "one set of" if self.shared else f"{self.sets} sets of"
        rounds = f"{self.rounds} rounds of affine additions in pairs, " * bool(self.rounds)
        return (
            f"chunks of {self.points:,} points, {self.windows} windows of {self.window} bits, signed, "
            f"{sets} {self.buckets:,} buckets, {rounds}segments of at most {self.segment << self.rounds} points, "
            f"{self.size_bytes(curve) / 1e6:,.1f} MB of scratch"
        )


def coordinate_words(curve: Curve[Any]) -> int:
    """Return the 64-bit words of a coordinate."""
    return curve.coordinates.degree * curve.coordinates.base.limbs


def device_plan(
    curve: Curve[Any], n: int, free_bytes: int, *, shared: bool = False, window: int | None = None,
    segment: int | None = None, rounds: int | None = None, chunk: int | None = None, **tuned: Any,
) -> DeviceMsmPlan:  # fmt: skip
    """Return the plan with the window of the fewest products and the largest chunks that fit free_bytes.

    Windows have 2 to 22 bits, segments 1 to 1024 units, rounds are 0 to 5, over Fq2 none. ConfigError for others,
    OutOfMemory if a chunk of 1024 points does not fit. `tuned` are further fields of the plan.
    """
    if window is not None and not 2 <= window <= _MAX_WINDOW:
        raise ConfigError(f"window must be 2 to {_MAX_WINDOW} bits, got {window}")
    if segment is not None and not 1 <= segment <= MAX_SEGMENT_UNITS:
        raise ConfigError(f"segment must be 1 to {MAX_SEGMENT_UNITS} units, got {segment}")
    max_rounds = _MAX_ROUNDS if curve.coordinates.degree == 1 else 0
    if rounds is not None and not 0 <= rounds <= max_rounds:
        raise ConfigError(f"rounds must be 0 to {max_rounds} on {curve.name}, got {rounds}")
    size, order_bits, limbs = min(n, chunk or n), curve.order.bit_length(), 2 * coordinate_words(curve)
    while True:
        plan = _best_plan(order_bits, limbs, size, shared, window, segment, rounds)
        if rounds is None and plan.rounds and plan.size_bytes(curve) > free_bytes:
            plan = _best_plan(order_bits, limbs, size, shared, window, segment, 0)
        plan = replace(plan, **{name: value for name, value in tuned.items() if value is not None})
        if (needed := plan.size_bytes(curve)) <= free_bytes and plan.entries <= MAX_INDICES:
            return plan
        if size <= _MIN_CHUNK:
            raise OutOfMemory(
                f"a sum of multiples in chunks of {size} points takes {needed:,} bytes of scratch, and {free_bytes:,} "
                f"are free; a smaller window than {plan.window} bits takes less"
            )
        size = -(-size // 2)


@functools.lru_cache(maxsize=256)
def _best_plan(
    order_bits: int, limbs: int, n: int, shared: bool, window: int | None, segment: int | None, rounds: int | None
) -> DeviceMsmPlan:
    bits = order_bits + 1  # signed digits may carry beyond the highest bit

    def candidate(c: int) -> DeviceMsmPlan:
        plan = DeviceMsmPlan(n, c, -(-bits // c), shared, segment or MAX_SEGMENT_UNITS)
        if rounds is None:
            best = next((best for entries, best in ROUNDS.get(limbs, ()) if plan.entries >= entries), 0)
            best = min(best, max(0, (plan.entries // (_ROUNDS_FILL * plan.keys)).bit_length() - 1))
        per_thread = max(1, (plan.keys // _THREADS).bit_length())
        plan = replace(plan, per_thread=per_thread, rounds=best if rounds is None else rounds)
        if segment:
            return plan
        # Few buckets are split to get more threads. Otherwise only buckets of far more points than the average are
        # split, and those that one thread would still be summing when the others have finished.
        limit = plan.units // _THREADS
        if plan.keys >= _FEW_BUCKETS:
            limit = min(4 * plan.units // plan.keys, limit // 4)
        return replace(plan, segment=min(MAX_SEGMENT_UNITS, 1 << max(_MIN_SEGMENT, limit - 1).bit_length()))

    def products(plan: DeviceMsmPlan) -> float:
        highest = bits - (plan.windows - 1) * plan.window  # bits of the last digit
        crowded = sum(highest < few for few in _CROWDED_BITS) * n
        per_entry = _PRODUCTS_PER_ENTRY * _ROUNDS_SHARE[min(plan.rounds, 2)]
        return per_entry * (plan.entries + crowded) + _PRODUCTS_PER_BUCKET * plan.keys

    return min((candidate(c) for c in ([window] if window else range(2, _MAX_WINDOW + 1))), key=products)


# --- launches --------------------------------------------------------------------------------------------------------
class MsmChunk(NamedTuple):
    """The `size` of `n` points that are summed at once; scalars and points are the rows of the first one."""

    size: int
    n: int
    scalars: int
    points: int


class MsmLaunch(NamedTuple):
    """A kernel launch: entry, grid, block, arrays by name, then numbers."""

    source: KernelSource
    entry: str
    grid: int
    block: int
    arrays: tuple[str, ...]
    numbers: tuple[int, ...]


PreparedLaunch = tuple[Kernel, MsmLaunch]


@functools.lru_cache(maxsize=_CACHED)
def scratch_shapes(curve: str, plan: DeviceMsmPlan) -> Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and dtype of the scratch arrays by name: all arrays but "scalars", "points" and "results"."""
    coordinate = coordinate_words(curve_of(curve))
    width = 4 * coordinate
    block_sums = (plan.sets * plan.blocks(reduce_block(curve_of(curve))), width)
    shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
        "sorted": ((plan.padded_entries,), _U32),  # with bins, before that the digits
        "counts": ((plan.counters,), _U32),
        "tiles": ((plan.tiles,), _U32),
        "segments": ((plan.segments, 3), _U32),
        "heavy": ((max(1, plan.heavy), 3), _U32),
        "sums": ((plan.sums, width), _U64),
        "plain": (block_sums, _U64),
        "weighted": (block_sums, _U64),
    }
    if plan.binned:
        before = (plan.pieces, 1 << plan.bin_bits)
        shapes |= {"binned": ((plan.entries,), _U64), "pieces": ((plan.pieces, 2), _U32), "before": (before, _U32)}
    else:
        shapes |= {"digits": ((plan.entries,), _U32), "ranks": ((plan.entries,), _U32)}
    if plan.rounds:
        shapes["totals"] = ((plan.affine_threads, coordinate), _U64)
    for k, count in enumerate(plan.affine_pairs):  # two rounds alternate between these
        if count:
            shapes |= {f"rows{k}": ((count, 2 * coordinate), _U64), f"before{k}": ((count, coordinate), _U64)}
    return shapes


@functools.lru_cache(maxsize=_CACHED)
def prepared_sum(space: MemorySpace, curve: str, plan: DeviceMsmPlan, chunk: MsmChunk) -> tuple[PreparedLaunch, ...]:
    """Return the launches from scalars and points (multiples, if shared) to the sums of windows, "results"."""
    parameters = curve_of(curve)
    return prepare(space, (*sort_launches(parameters, plan, chunk), *_sum_launches(parameters, plan, chunk.points)))


on_forget.append(prepared_sum.cache_clear)


def prepare(space: MemorySpace, launches: Iterable[MsmLaunch]) -> tuple[PreparedLaunch, ...]:
    """Compile the kernels of launches."""
    return tuple((compiled(space, launch.source, launch.entry), launch) for launch in launches)


def sort_launches(curve: Curve[Any], p: DeviceMsmPlan, chunk: MsmChunk) -> Iterator[MsmLaunch]:
    """Yield the launches of sort.c and bins.c, from "scalars" to "sorted", "counts", "segments" and "heavy"."""
    n, of_sort, of_bins = chunk.size, sort_source(), bins_source()
    scalar_blocks, blocks = -(-n // SORT_BLOCK), -(-n // (SORT_BLOCK * ENTRIES_PER_THREAD))
    spread, stride = (0, chunk.n) if p.shared else (p.buckets, 0)
    digits = "sorted" if p.binned else "digits"
    counted, by_bin = (digits, "ranks", "counts"), ("binned", "pieces", "counts", "before")
    bins = (p.keys + COUNTERS, p.bins)  # where they are in counts, and their number
    per_window, bin_blocks = (bins[0], n, p.windows, spread), p.windows * -(-n // PIECE)

    def run(source: KernelSource, entry: str, grid: int, arrays: tuple[str, ...], *numbers: int) -> MsmLaunch:
        return MsmLaunch(source, entry, grid, SORT_BLOCK, arrays, numbers)

    sizes = (chunk.scalars, n, p.window, p.windows, p.counters, scalar_blocks * SORT_BLOCK)
    yield run(of_sort, "msm_digits", scalar_blocks, ("scalars", digits, "counts"), *sizes)
    if p.binned:
        yield run(of_bins, "msm_count", bin_blocks, (digits, "counts"), *per_window, p.bin_bits)
        yield run(of_bins, "msm_pieces", 1, ("counts", "pieces"), *bins)
        binned = (digits, "counts", "binned")
        yield run(of_bins, "msm_partition", bin_blocks, binned, *per_window, stride, p.bin_bits)
        yield run(of_bins, "msm_rank_bins", p.pieces, by_bin, *bins, p.bin_bits)
    else:
        yield run(of_sort, "msm_rank", p.windows * blocks, counted, n, blocks, spread)
    yield run(of_sort, "msm_tiles", p.tiles, ("counts", "tiles"), p.keys, p.segment, p.rounds)
    yield run(of_sort, "msm_scan", 1, ("counts", "tiles"), p.keys, p.tiles, p.segment)
    lists = ("counts", "tiles", "segments", "heavy", "sums", "sorted")
    yield run(of_sort, "msm_segments", p.tiles, lists, p.keys, p.segment, 4 * coordinate_words(curve), p.rounds)
    if p.binned:
        yield run(of_bins, "msm_scatter_bins", p.pieces, (*by_bin, "sorted"), *bins, p.bin_bits)
    else:
        yield run(of_sort, "msm_scatter", p.windows * blocks, (*counted, "sorted"), n, blocks, spread, stride)


def _affine_launches(curve: Curve[Any], p: DeviceMsmPlan, first: int) -> Iterator[MsmLaunch]:
    """Yield the rounds of affine.c; `first` is the row of "points" from which entries count."""
    source = affine_source(curve, p.inlined, p.resident)
    threads, blocks = p.affine_threads, p.affine_threads // AFFINE_BLOCK
    sizes = (p.keys, first, threads, p.affine_units)
    begin = ("points", "sorted", "counts", "before0", "totals")
    yield MsmLaunch(source, "msm_affine_begin", blocks, AFFINE_BLOCK, begin, (*sizes, p.rounds))
    per_thread = min(INVERSIONS_PER_THREAD, -(-threads // _INVERT_THREADS))
    rows = "points"
    for k in range(p.rounds):
        grid = -(-threads // (INVERT_BLOCK * per_thread))
        yield MsmLaunch(source, "msm_affine_invert", grid, INVERT_BLOCK, ("totals",), (threads, per_thread))
        after = f"before{1 - k % 2}" if k + 1 < p.rounds else f"before{k % 2}"  # the last round writes none
        arrays = (rows, "sorted", "counts", f"before{k % 2}", "totals", f"rows{k % 2}", after)
        yield MsmLaunch(source, "msm_affine_round", blocks, AFFINE_BLOCK, arrays, (*sizes, k, p.rounds))
        rows = f"rows{k % 2}"


def _sum_launches(curve: Curve[Any], p: DeviceMsmPlan, first: int) -> Iterator[MsmLaunch]:
    """Yield the launches from "sorted" and "segments" to the sums of windows."""
    rows = "points"
    if p.rounds:
        yield from _affine_launches(curve, p, first)
        rows, first = f"rows{(p.rounds - 1) % 2}", 0
    source = accumulate_source(curve, p.inlined, p.resident, p.rounds > 0)
    grid = -(-p.segments // ACCUMULATE_BLOCK)
    lists = (rows, "sorted", "segments", "counts", "sums")
    yield MsmLaunch(source, "msm_accumulate", grid, ACCUMULATE_BLOCK, lists, (p.keys, first))
    source, threads = fold_source(curve, p.fold_inlined), reduce_block(curve)
    groups, blocks = min(_COMBINE_BLOCKS, p.heavy), p.blocks(threads)
    if groups:
        for again in (0, 1):
            yield MsmLaunch(
                source, "msm_combine", groups, threads, ("heavy", "counts", "sums"), (p.keys, groups, again)
            )
    last = int(blocks == 1)
    arrays = ("sums", "sums", "results" if last else "plain", "weighted")
    yield MsmLaunch(source, "msm_reduce", p.sets * blocks, threads, arrays, (p.buckets, blocks, p.per_thread, 0, last))
    if not last:
        log_items = ((blocks - 1) // threads).bit_length()
        sizes = (blocks, 1, log_items, p.per_thread + threads.bit_length() - 1, 1)
        yield MsmLaunch(source, "msm_reduce", p.sets, threads, ("plain", "weighted", "results", "weighted"), sizes)


Sizes = Mapping[str, int | str]

# --- kernels ----------------------------------------------------------------------------------------------------------
SORT_BLOCK = 256  # threads of a block of sort.c and bins.c, a power of two
ENTRIES_PER_THREAD = 4  # entries of a thread of msm_rank and msm_scatter
PIECE = 4096  # entries of a block of bins.c, in 32 KiB of local memory; a multiple of SORT_BLOCK
MAX_WINDOW_BINS = 2048  # largest number of bins of a set of buckets, whose counters are in local memory, too
BINS_LOCAL_BYTES = 4 * (MAX_WINDOW_BINS + SORT_BLOCK) + 4 * SORT_BLOCK + 8 * PIECE + 8  # of a block of msm_partition
MAX_BIN_BITS = 10  # log2 of the largest number of keys of a bin, likewise
TILE = 1024  # keys of a block of msm_tiles and msm_segments; a multiple of SORT_BLOCK
MAX_SEGMENT_UNITS = 1024  # largest number of units of a segment
COUNTERS: int = MAX_SEGMENT_UNITS + 5  # numbers after the keys in counts
ACCUMULATE_BLOCK = 128  # threads of a block of msm_accumulate
AFFINE_BLOCK = 128  # threads of a block of msm_affine_begin and msm_affine_round
INVERT_BLOCK = 128  # threads of a block of msm_affine_invert, with two elements each, of at most 12 limbs, in 25 KiB
INVERSIONS_PER_THREAD = 8  # largest number of products that a thread of msm_affine_invert takes
MULTIPLES_BLOCK = 128  # threads of a block of multiples.c
POINTS_PER_INVERSION = 8  # points of a thread of multiples.c, which share an inversion

ACCUMULATION: dict[int, tuple[bool, int]] = {8: (True, 512), 12: (False, 384), 16: (False, 256), 24: (False, 256)}
"""32-bit limbs of a coordinate -> how accumulate.c is compiled: whether products are inlined (with 12 limbs and more
the loop would not fit the instruction cache), and the threads resident on a multiprocessor, given as the bound of a
block's threads: 65,536 registers give 128, 168 or 255 to each."""

_SORT = {
    "msm_digits": ("*u64", "*u32", "*u32", "i64", "i64", "i32", "i32", "i64", "i64"),
    "msm_rank": ("*u32", "*u32", "*u32", "i64", "i64", "i64"),
    "msm_tiles": ("*u32", "*u32", "i64", "i32", "i32"),
    "msm_scan": ("*u32", "*u32", "i64", "i64", "i32"),
    "msm_segments": ("*u32", "*u32", "*u32", "*u32", "*u64", "*u32", "i64", "i32", "i32", "i32"),
    "msm_scatter": ("*u32", "*u32", "*u32", "*u32", "i64", "i64", "i64", "i64"),
}
_BINS = {
    "msm_count": ("*u32", "*u32", "i64", "i64", "i64", "i64", "i32"),
    "msm_pieces": ("*u32", "*u32", "i64", "i64"),
    "msm_partition": ("*u32", "*u32", "*u64", "i64", "i64", "i64", "i64", "i64", "i32"),
    "msm_rank_bins": ("*u64", "*u32", "*u32", "*u32", "i64", "i64", "i32"),
    "msm_scatter_bins": ("*u64", "*u32", "*u32", "*u32", "*u32", "i64", "i64", "i32"),
}
_ACCUMULATE = {"msm_accumulate": ("*u64", "*u32", "*u32", "*u32", "*u64", "i64", "i64")}
_AFFINE = {
    "msm_affine_begin": ("*u64", "*u32", "*u32", "*u64", "*u64", "i64", "i64", "i64", "i32", "i32"),
    "msm_affine_invert": ("*u64", "i64", "i32"),
    "msm_affine_round": ("*u64", "*u32", "*u32", "*u64", "*u64", "*u64", "*u64", *("i64",) * 3, *("i32",) * 3),
}
_FOLD = {
    "msm_combine": ("*u32", "*u32", "*u64", "i64", "i64", "i32"),
    "msm_reduce": ("*u64", "*u64", "*u64", "*u64", "i64", "i64", "i32", "i32", "i32"),
}
_MULTIPLES = {"msm_multiples": ("*u64", "*u64", "i64", "i64", "i64", "i32")}

_DIGIT_BITS = 30  # bits of a digit of divsteps.h
_BEGIN_EXTRA_THREADS = 128  # resident threads of msm_affine_begin, bound by memory, beyond those of msm_affine_round
_THREAD_SEGMENTS = 16  # largest number of segments of a bucket that one thread sums; a block sums more


def reduce_block(curve: Curve[Any]) -> int:
    """Return the threads of a block of msm_combine and msm_reduce: one point each in 25 KiB of shared memory."""
    return 128 // curve.coordinates.degree


@functools.cache
def sort_source() -> KernelSource:
    """Return the kernels of sort.c."""
    sizes = {"MSM_BLOCK": SORT_BLOCK, "MSM_EACH": ENTRIES_PER_THREAD, "MSM_TILE": TILE}
    text = _defined(sizes) + read_files("algebra/msm", "prefix_sum.h", "sort.c")
    return KernelSource(name="msm_sort", dialects={"portable": text}, entries=_SORT)


@functools.cache
def bins_source() -> KernelSource:
    """Return the kernels of bins.c."""
    bins_per_thread = MAX_WINDOW_BINS // SORT_BLOCK + 1  # a set of buckets may begin within a bin
    sizes = {
        "MSM_BLOCK": SORT_BLOCK,
        "MSM_EACH": PIECE // SORT_BLOCK,
        "MSM_PIECE": PIECE,
        "MSM_BINS": bins_per_thread * SORT_BLOCK,
        "MSM_BINS_PER_THREAD": bins_per_thread,
        "MSM_BIN_KEYS": 1 << MAX_BIN_BITS,
        "MSM_KEYS_PER_THREAD": (1 << MAX_BIN_BITS) // SORT_BLOCK,
    }
    text = _defined(sizes) + read_files("algebra/msm", "prefix_sum.h", "bins.c")
    return KernelSource(name="msm_bins", dialects={"portable": text}, entries=_BINS)


@functools.cache
def accumulate_source(
    curve: Curve[Any], inlined: bool | None = None, resident: int | None = None, rows: bool = False
) -> KernelSource:
    """Return the kernel of accumulate.c; `rows`: a segment's points are consecutive, otherwise entries index them."""
    inlined, resident = _accumulation(curve, inlined, resident)
    name = "accumulate" + "_rows" * rows + f"_{resident}" + "_inlined" * inlined
    sizes: Sizes = {"MSM_RESIDENT": resident, "MSM_ENTRY(sorted, k)": "(u32)(k)" if rows else "sorted[k]"}
    return _source(curve, name, ("accumulate.c",), _ACCUMULATE, sizes, inlined)


@functools.cache
def affine_source(curve: Curve[Any], inlined: bool | None = None, resident: int | None = None) -> KernelSource:
    """Return the kernels of affine.c, for a curve over Fq; arguments as for accumulate_source."""
    inlined, resident = _accumulation(curve, inlined, resident)
    base = curve.coordinates.base
    digits = -(-(base.bits + 6) // _DIGIT_BITS)  # including a sign, and values up to 16 p
    listed = ", ".join(f"0x{digit:x}" for digit in base.words(base.modulus, _DIGIT_BITS, digits))
    sizes: Sizes = {
        "MSM_RESIDENT": resident,
        "MSM_BEGIN_RESIDENT": resident + _BEGIN_EXTRA_THREADS,
        "MSM_INVERT_BLOCK": INVERT_BLOCK,
        "MSM_INVERT_EACH": INVERSIONS_PER_THREAD,
        "BASE_DIGITS": digits,
        "BASE_MODULUS_DIGITS": listed,
        "BASE_MODULUS_INVERSE": f"{pow(base.modulus, -1, 1 << _DIGIT_BITS)}U",
    }
    name = f"affine_{resident}" + "_inlined" * inlined
    return _source(curve, name, ("divsteps.h", "affine.c"), _AFFINE, sizes, inlined)


@functools.cache
def fold_source(curve: Curve[Any], inlined: bool = False) -> KernelSource:
    """Return the kernels of fold.c; inlined, independent products overlap, but compilation takes five times as long."""
    sizes = {"MSM_REDUCE_BLOCK": reduce_block(curve), "MSM_FEW": _THREAD_SEGMENTS}
    return _source(curve, "fold" + "_inlined" * inlined, ("fold.c",), _FOLD, sizes, inlined)


@functools.cache
def multiples_source(curve: Curve[Any]) -> KernelSource:
    """Return the kernel of multiples.c."""
    sizes = {"MSM_MULTIPLES_BLOCK": MULTIPLES_BLOCK, "MSM_TOGETHER": POINTS_PER_INVERSION}
    return _source(curve, "multiples", ("multiples.c",), _MULTIPLES, sizes, False)


def _accumulation(curve: Curve[Any], inlined: bool | None, resident: int | None) -> tuple[bool, int]:
    limbs = 2 * curve.coordinates.degree * curve.coordinates.base.limbs
    default = ACCUMULATION.get(limbs, (limbs <= 8, 512 if limbs <= 8 else 256))
    return default[0] if inlined is None else inlined, resident or default[1]


def _source(
    curve: Curve[Any], name: str, files: tuple[str, ...], entries: Mapping[str, tuple[str, ...]], sizes: Sizes,
    inlined: bool,
) -> KernelSource:  # fmt: skip
    def text(dialect: str) -> str:
        called = dialect == "portable" or not inlined
        own = _defined(sizes) + read_files("algebra/msm", *files)
        return point_text(curve, dialect, called=called) + prefixed(curve, own)

    identity = f"{files} {inlined} {_defined(sizes)}"
    dialects = LazyDialects(
        portable=lambda: text("portable"),
        cuda=lambda: cuda_program(curve, identity, lambda: text("cuda"), "algebra/msm"),
    )
    return KernelSource(name=f"msm_{name}_{curve.name}", dialects=dialects, entries=entries)


def _defined(sizes: Sizes) -> str:
    fixed: Sizes = {
        "MSM_LENGTH": MAX_SEGMENT_UNITS, "MSM_SEGMENTS": MAX_SEGMENT_UNITS + 1, "MSM_HEAVY": MAX_SEGMENT_UNITS + 2,
        "MSM_PARTIALS": MAX_SEGMENT_UNITS + 3, "MSM_UNITS": MAX_SEGMENT_UNITS + 4, "MSM_NONE": "0xffffffffU",
        "MSM_COUNTERS": COUNTERS,
    }  # fmt: skip
    return defined({**fixed, **sizes})
