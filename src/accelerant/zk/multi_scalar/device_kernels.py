"""C kernels of multi-scalar multiplication on devices: sort.c and bins.c, of all curves, and those of each curve."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from accelerant.algebra.curve.program import cuda_program, point_text, prefixed
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.program import defined, read_files
from accelerant.runtime.compilation.kernel import KernelSource, LazyDialects

Sizes = Mapping[str, int | str]

SORT_BLOCK = 256  # threads of a block of sort.c and bins.c, a power of two
ENTRIES_PER_THREAD = 4  # entries of a thread of msm_rank and msm_scatter
PIECE = 4096  # entries of a block of bins.c, in 32 KiB of local memory; a multiple of SORT_BLOCK
MAX_WINDOW_BINS = 2048  # largest number of bins of a set of buckets, whose counters are in local memory, too
BINS_LOCAL_BYTES = 4 * (MAX_WINDOW_BINS + SORT_BLOCK) + 4 * SORT_BLOCK + 8 * PIECE + 8  # of a block of msm_partition
MAX_BIN_BITS = 10  # log2 of the largest number of keys of a bin, likewise
TILE = 1024  # keys of a block of msm_tiles and msm_segments; a multiple of SORT_BLOCK
MAX_SEGMENT_UNITS = 1024  # largest number of units of a segment
COUNTERS = MAX_SEGMENT_UNITS + 5  # numbers after the keys in counts
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
    text = _defined(sizes) + read_files("zk/multi_scalar", "prefix_sum.h", "sort.c")
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
    text = _defined(sizes) + read_files("zk/multi_scalar", "prefix_sum.h", "bins.c")
    return KernelSource(name="msm_bins", dialects={"portable": text}, entries=_BINS)


@functools.cache
def accumulate_source(
    curve: Curve[Any], inlined: bool | None = None, resident: int | None = None, rows: bool = False
) -> KernelSource:
    """Return the kernel of accumulate.c.

    Args:
        inlined, resident: by default as in ACCUMULATION.
        rows: a segment's points are consecutive, as rounds of affine.c leave them; otherwise entries index them.
    """
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
    """Return the kernels of fold.c.

    Inlined, independent products overlap, which helps where there are too few threads to hide their latency;
    compilation takes about five times as long.
    """
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
    curve: Curve[Any],
    name: str,
    files: tuple[str, ...],
    entries: Mapping[str, tuple[str, ...]],
    sizes: Sizes,
    inlined: bool,
) -> KernelSource:
    def text(dialect: str) -> str:
        called = dialect == "portable" or not inlined
        own = _defined(sizes) + read_files("zk/multi_scalar", *files)
        return point_text(curve, dialect, called=called) + prefixed(curve, own)

    identity = f"{files} {inlined} {_defined(sizes)}"
    dialects = LazyDialects(
        portable=lambda: text("portable"),
        cuda=lambda: cuda_program(curve, identity, lambda: text("cuda"), "zk/multi_scalar"),
    )
    return KernelSource(name=f"msm_{name}_{curve.name}", dialects=dialects, entries=entries)


def _defined(sizes: Sizes) -> str:
    fixed: Sizes = {
        "MSM_LENGTH": MAX_SEGMENT_UNITS,
        "MSM_SEGMENTS": MAX_SEGMENT_UNITS + 1,
        "MSM_HEAVY": MAX_SEGMENT_UNITS + 2,
        "MSM_PARTIALS": MAX_SEGMENT_UNITS + 3,
        "MSM_UNITS": MAX_SEGMENT_UNITS + 4,
        "MSM_NONE": "0xffffffffU",
        "MSM_COUNTERS": COUNTERS,
    }
    return defined({**fixed, **sizes})
