"""The programs of sums of multiples on a device: sort.c, the same for all curves; accumulate.c, fold.c, multiples.c."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerant.algebra.curve.program import point_text, prefixed
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.runtime.kernel import KernelSource
from accelerant.runtime.portable import portable_header

__all__ = [
    "ACCUMULATE_BLOCK",
    "ACCUMULATION",
    "COUNTERS",
    "EACH",
    "LONGEST",
    "MULTIPLES_BLOCK",
    "SORT_BLOCK",
    "TILE",
    "TOGETHER",
    "accumulate_source",
    "fold_source",
    "multiples_source",
    "reduce_block",
    "sort_source",
]

SORT_BLOCK = 256
"""Threads of a block of sort.c, a power of two."""

EACH = 4
"""Entries of a thread of msm_rank and msm_scatter."""

TILE = 1024
"""Keys of a block of msm_tiles and msm_segments; a multiple of SORT_BLOCK."""

LONGEST = 1024
"""The most points of a segment."""

COUNTERS = LONGEST + 4
"""Numbers behind the keys in counts."""

ACCUMULATE_BLOCK = 128
"""Threads of a block of msm_accumulate, as it is launched."""

MULTIPLES_BLOCK = 128
"""Threads of a block of multiples.c."""

ACCUMULATION: dict[int, tuple[bool, int]] = {8: (True, 512), 12: (False, 384), 16: (False, 256), 24: (False, 256)}
"""32-bit limbs of a coordinate -> how accumulate.c is compiled. First whether carry chains are written out at each
product: with 12 limbs and more the loop is so large that it leaves the cache of instructions. Then the threads that
one multiprocessor of NVIDIA's shall hold, which is said as the bound of a block's threads: its 65,536 registers give
128, 168 or 255 to each."""

_SORT = {
    "msm_digits": ("*u64", "*u32", "*u32", "i64", "i64", "i32", "i32", "i64", "i64"),
    "msm_rank": ("*u32", "*u32", "*u32", "i64", "i64", "i64"),
    "msm_tiles": ("*u32", "*u32", "i64", "i32"),
    "msm_scan": ("*u32", "*u32", "i64", "i64", "i32"),
    "msm_segments": ("*u32", "*u32", "*u32", "*u32", "*u64", "i64", "i32", "i32"),
    "msm_scatter": ("*u32", "*u32", "*u32", "*u32", "i64", "i64", "i64", "i64"),
}
_ACCUMULATE = {"msm_accumulate": ("*u64", "*u32", "*u32", "*u32", "*u64", "i64", "i64")}
_FOLD = {
    "msm_combine": ("*u32", "*u32", "*u64", "i64", "i64"),
    "msm_reduce": ("*u64", "*u64", "*u64", "*u64", "i64", "i64", "i32", "i32", "i32"),
}
_MULTIPLES = {"msm_multiples": ("*u64", "*u64", "i64", "i64", "i64", "i32")}

TOGETHER = 8
"""Points that a thread of multiples.c takes together, for one inversion."""

_FEW = 16
"""Segments of a bucket that one thread adds up; above, a block does."""


def reduce_block(curve: Curve[Any]) -> int:
    """Threads of a block of msm_combine and msm_reduce: as many as have room for a point each in 25 KiB."""
    return 128 // curve.coordinates.degree


@functools.cache
def sort_source() -> KernelSource:
    """sort.c."""
    text = _defined({"MSM_BLOCK": SORT_BLOCK, "MSM_EACH": EACH, "MSM_TILE": TILE}) + _text("sort.c")
    return KernelSource(name="msm_sort", dialects={"portable": text}, entries=_SORT)


@functools.cache
def accumulate_source(curve: Curve[Any], written_out: bool | None = None, resident: int | None = None) -> KernelSource:
    """accumulate.c; the two as ACCUMULATION has them for the curve, if not given."""
    usual = ACCUMULATION[2 * curve.coordinates.degree * curve.coordinates.base.limbs]
    written_out = usual[0] if written_out is None else written_out
    resident = resident or usual[1]
    name = f"accumulate_{resident}" + "_written_out" * written_out
    return _source(curve, name, "accumulate.c", _ACCUMULATE, {"MSM_RESIDENT": resident}, written_out)


@functools.cache
def fold_source(curve: Curve[Any], written_out: bool = False) -> KernelSource:
    """fold.c, with carry chains written out at each product or not.

    Written out, independent products overlap, where there are too few threads to hide their latency; a compiler takes
    some five times as long.
    """
    sizes = {"MSM_REDUCE_BLOCK": reduce_block(curve), "MSM_FEW": _FEW}
    return _source(curve, "fold" + "_written_out" * written_out, "fold.c", _FOLD, sizes, written_out)


@functools.cache
def multiples_source(curve: Curve[Any]) -> KernelSource:
    """multiples.c."""
    sizes = {"MSM_MULTIPLES_BLOCK": MULTIPLES_BLOCK, "MSM_TOGETHER": TOGETHER}
    return _source(curve, "multiples", "multiples.c", _MULTIPLES, sizes, False)


def _source(
    curve: Curve[Any],
    name: str,
    file: str,
    entries: Mapping[str, tuple[str, ...]],
    sizes: dict[str, int],
    written_out: bool,
) -> KernelSource:
    def text(dialect: str) -> str:
        called = dialect == "portable" or not written_out
        return point_text(curve, dialect, called=called) + prefixed(curve, _defined(sizes) + _text(file))

    dialects = {"portable": text("portable"), "cuda": f"{portable_header()}\n{text('cuda')}"}
    return KernelSource(name=f"msm_{name}_{curve.name}", dialects=dialects, entries=entries)


def _defined(sizes: dict[str, int]) -> str:
    fixed = {
        "MSM_LENGTH": LONGEST,
        "MSM_SEGMENTS": LONGEST + 1,
        "MSM_HEAVY": LONGEST + 2,
        "MSM_PARTIALS": LONGEST + 3,
        "MSM_COUNTERS": COUNTERS,
    }
    return "".join(f"#define {name} {size}\n" for name, size in (fixed | sizes).items())


def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
