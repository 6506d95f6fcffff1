"""The programs of sums of multiples on a device: sort.c, the same for all curves, and those of a curve's points."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accelerant.algebra.curve.program import cuda_program, point_text, prefixed
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.runtime.compilation.kernel import KernelSource, LazyDialects

__all__ = [
    "ACCUMULATE_BLOCK",
    "ACCUMULATION",
    "AFFINE_BLOCK",
    "COUNTERS",
    "EACH",
    "INVERT_BLOCK",
    "INVERT_EACH",
    "LONGEST",
    "MULTIPLES_BLOCK",
    "SORT_BLOCK",
    "TILE",
    "TOGETHER",
    "Launch",
    "accumulate_source",
    "affine_source",
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
"""The most units of a segment."""

COUNTERS = LONGEST + 5
"""Numbers behind the keys in counts."""

ACCUMULATE_BLOCK = 128
"""Threads of a block of msm_accumulate, as it is launched."""

AFFINE_BLOCK = 128
"""Threads of a block of msm_affine_begin and msm_affine_round, as they are launched."""

INVERT_BLOCK = 128
"""Threads of a block of msm_affine_invert: each has two elements of at most 12 64-bit limbs in 25 KiB."""

INVERT_EACH = 8
"""Products that a thread of msm_affine_invert takes, at most."""

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
    "msm_tiles": ("*u32", "*u32", "i64", "i32", "i32"),
    "msm_scan": ("*u32", "*u32", "i64", "i64", "i32"),
    "msm_segments": ("*u32", "*u32", "*u32", "*u32", "*u64", "*u32", "i64", "i32", "i32", "i32"),
    "msm_scatter": ("*u32", "*u32", "*u32", "*u32", "i64", "i64", "i64", "i64"),
}
_ACCUMULATE = {"msm_accumulate": ("*u64", "*u32", "*u32", "*u32", "*u64", "i64", "i64")}
_AFFINE = {
    "msm_affine_begin": ("*u64", "*u32", "*u32", "*u64", "*u64", "i64", "i64", "i64", "i32", "i32"),
    "msm_affine_invert": ("*u64", "i64", "i32"),
    "msm_affine_round": ("*u64", "*u32", "*u32", "*u64", "*u64", "*u64", "*u64", *("i64",) * 3, *("i32",) * 3),
}
_FOLD = {
    "msm_combine": ("*u32", "*u32", "*u64", "i64", "i64"),
    "msm_reduce": ("*u64", "*u64", "*u64", "*u64", "i64", "i64", "i32", "i32", "i32"),
}
_MULTIPLES = {"msm_multiples": ("*u64", "*u64", "i64", "i64", "i64", "i32")}

TOGETHER = 8
"""Points that a thread of multiples.c takes together, for one inversion."""

_DIGIT_BITS = 30
"""Of divsteps.h."""

_MORE = 128
"""Threads that msm_affine_begin, which waits for memory, has in addition to those of msm_affine_round."""

_FEW = 16
"""Segments of a bucket that one thread adds up; above, a block does."""


class Launch(NamedTuple):
    """An entry of a program to be launched: blocks, threads of a block, arrays by their names, then numbers."""

    source: KernelSource
    entry: str
    grid: int
    block: int
    arrays: tuple[str, ...]
    numbers: tuple[int, ...]


def reduce_block(curve: Curve[Any]) -> int:
    """Threads of a block of msm_combine and msm_reduce: as many as have room for a point each in 25 KiB."""
    return 128 // curve.coordinates.degree


@functools.cache
def sort_source() -> KernelSource:
    """sort.c."""
    text = _defined({"MSM_BLOCK": SORT_BLOCK, "MSM_EACH": EACH, "MSM_TILE": TILE}) + _text("sort.c")
    return KernelSource(name="msm_sort", dialects={"portable": text}, entries=_SORT)


@functools.cache
def accumulate_source(
    curve: Curve[Any], written_out: bool | None = None, resident: int | None = None, rows: bool = False
) -> KernelSource:
    """accumulate.c; the two as ACCUMULATION has them for the curve, if not given.

    Args:
        rows: the points of segments stand side by side, as rounds of affine.c leave them; else entries name them.
    """
    written_out, resident = _compiled(curve, written_out, resident)
    name = "accumulate" + "_rows" * rows + f"_{resident}" + "_written_out" * written_out
    sizes: dict[str, int | str] = {
        "MSM_RESIDENT": resident,
        "MSM_ENTRY(places, k)": "(u32)(k)" if rows else "places[k]",
    }
    return _source(curve, name, ("accumulate.c",), _ACCUMULATE, sizes, written_out)


@functools.cache
def affine_source(curve: Curve[Any], written_out: bool | None = None, resident: int | None = None) -> KernelSource:
    """affine.c, for a curve over Fq; the two as for accumulate_source."""
    written_out, resident = _compiled(curve, written_out, resident)
    base = curve.coordinates.base
    digits = -(-(base.bits + 6) // _DIGIT_BITS)  # a sign, and room for 16 p
    listed = ", ".join(f"0x{digit:x}" for digit in base.words(base.modulus, _DIGIT_BITS, digits))
    sizes: dict[str, int | str] = {
        "MSM_RESIDENT": resident,
        "MSM_BEGIN_RESIDENT": resident + _MORE,
        "MSM_INVERT_BLOCK": INVERT_BLOCK,
        "MSM_INVERT_EACH": INVERT_EACH,
        "BASE_DIGITS": digits,
        "BASE_MODULUS_DIGITS": listed,
        "BASE_MODULUS_INVERSE": f"{pow(base.modulus, -1, 1 << _DIGIT_BITS)}U",
    }
    name = f"affine_{resident}" + "_written_out" * written_out
    return _source(curve, name, ("divsteps.h", "affine.c"), _AFFINE, sizes, written_out)


@functools.cache
def fold_source(curve: Curve[Any], written_out: bool = False) -> KernelSource:
    """fold.c, with carry chains written out at each product or not.

    Written out, independent products overlap, where there are too few threads to hide their latency; a compiler takes
    some five times as long.
    """
    sizes = {"MSM_REDUCE_BLOCK": reduce_block(curve), "MSM_FEW": _FEW}
    return _source(curve, "fold" + "_written_out" * written_out, ("fold.c",), _FOLD, sizes, written_out)


@functools.cache
def multiples_source(curve: Curve[Any]) -> KernelSource:
    """multiples.c."""
    sizes = {"MSM_MULTIPLES_BLOCK": MULTIPLES_BLOCK, "MSM_TOGETHER": TOGETHER}
    return _source(curve, "multiples", ("multiples.c",), _MULTIPLES, sizes, False)


def _compiled(curve: Curve[Any], written_out: bool | None, resident: int | None) -> tuple[bool, int]:
    """Both as ACCUMULATION has them, where they are not given."""
    limbs = 2 * curve.coordinates.degree * curve.coordinates.base.limbs
    usual = ACCUMULATION.get(limbs, (limbs <= 8, 512 if limbs <= 8 else 256))
    return usual[0] if written_out is None else written_out, resident or usual[1]


def _source(
    curve: Curve[Any],
    name: str,
    files: tuple[str, ...],
    entries: Mapping[str, tuple[str, ...]],
    sizes: Mapping[str, int | str],
    written_out: bool,
) -> KernelSource:
    def text(dialect: str) -> str:
        called = dialect == "portable" or not written_out
        texts = (_defined(sizes), *map(_text, files))
        return point_text(curve, dialect, called=called) + prefixed(curve, "".join(texts))

    dialects = LazyDialects(
        portable=lambda: text("portable"),
        cuda=lambda: cuda_program(curve, f"{files} {written_out} {_defined(sizes)}", lambda: text("cuda"), "zk/msm"),
    )
    return KernelSource(name=f"msm_{name}_{curve.name}", dialects=dialects, entries=entries)


def _defined(sizes: Mapping[str, int | str]) -> str:
    fixed: dict[str, int | str] = {
        "MSM_LENGTH": LONGEST,
        "MSM_SEGMENTS": LONGEST + 1,
        "MSM_HEAVY": LONGEST + 2,
        "MSM_PARTIALS": LONGEST + 3,
        "MSM_UNITS": LONGEST + 4,
        "MSM_NONE": "0xffffffffU",
        "MSM_COUNTERS": COUNTERS,
    }
    return "".join(f"#define {name} {size}\n" for name, size in {**fixed, **sizes}.items())


def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
