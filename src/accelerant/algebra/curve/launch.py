"""The curve kernels in C, and launches of every dialect on arrays of points, recorded in the ledger.

kernel.c, point.h and complete.h serve G1 and G2: COORD in them is the prefix of the coordinates' field, the base field
(BASE) or its quadratic extension (quadratic.h). A program contains one curve, and usually one entry; products of
coordinates are function calls (COORD_MUL), so that NVRTC takes seconds, not minutes. Points are words (n,
*curve.shape): contiguous, affine, Montgomery form, infinity all zeros. Scalars are (n, 4) words, any number below
2^256.
"""

import functools
import os
import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.llvm_kernels import curve_kernels
from accelerant.algebra.curve.parameters import endomorphism
from accelerant.algebra.curve.weierstrass import SCALAR_WORDS, Curve
from accelerant.algebra.field import launch as field_launch
from accelerant.algebra.field.memory_space import HOST, DeviceVerdict, MemorySpace
from accelerant.algebra.field.program import CudaProgram, defined, field_text, montgomery_radix, read_files
from accelerant.algebra.field.program import prefixed as replace_prefixes
from accelerant.algebra.field.words import dtype_of
from accelerant.errors import ConfigError, FormatError, ShapeError
from accelerant.runtime.compilation.kernel import KernelSource, LazyDialects
from accelerant.runtime.files import clipped
from accelerant.runtime.ledger import OpRecord, RecordedLaunch, launch, sole_record

__all__ = [
    "SCALAR_WORDS", "Test", "add", "check_reduced", "first_off", "from_montgomery", "inward", "multiply", "neg", "off",
    "to_montgomery", "unreduced_coordinate",
]  # fmt: skip

Words = Any
Test = Literal["off_curve", "off_subgroup"]

_CHUNKS = {"cpu": 64, "": 128}  # points per partial result of a test: an index of the CPU's kernel, else a block
_LANES = 8  # Most points that the CPU's kernels process at once

_COSTS = {  # entry -> arrays of points that it accesses; multiplications of coordinates a point
    "add": (3, 12), "neg": (2, 0), "mul": (2, 256 * 8 + 64 * 12), "inward": (2, 0),
    "off_curve": (1, 0), "off_subgroup": (1, 0),
}  # fmt: skip


def to_montgomery(space: MemorySpace, curve: Curve[Any], points: Words) -> Words:
    """Convert canonical points to Montgomery form."""
    return field_launch.elementwise(space, curve.coordinates.base, "to_montgomery", "canonical", points)


def inward(
    space: MemorySpace, curve: Curve[Any], points: Words, scalars: Words | None, verdict: DeviceVerdict
) -> Words:
    """Convert canonical points of a CUDA device to Montgomery form; invalid points or scalars set the verdict."""
    n, z = _count(points), space.empty(tuple(points.shape), dtype_of(curve.coordinates.base))
    count = 0 if scalars is None else prod(scalars.shape[:-1])
    arrays = (points, z, points if scalars is None else scalars, verdict)
    with RecordedLaunch(_record(curve, "inward", space, n), space.provider, space.index):
        if max(n, count):
            _launch(space, curve, "inward", arrays, (n, count), max(n, count))
    return z


def from_montgomery(space: MemorySpace, curve: Curve[Any], points: Words) -> Words:
    """Convert points in Montgomery form to canonical ones."""
    return field_launch.elementwise(space, curve.coordinates.base, "from_montgomery", "montgomery", points)


def add(space: MemorySpace, curve: Curve[Any], x: Words, y: Words) -> Words:
    """Add points elementwise; ShapeError if x and y differ in length."""
    if (n := _count(x)) != _count(y):
        raise ShapeError(f"curve addition: wanted as many points on both sides, got {n} and {_count(y)}")
    z = space.empty(tuple(x.shape), dtype_of(curve.coordinates.base))
    _run(space, curve, "add", (x, y, z), (n,), n)
    return z


def neg(space: MemorySpace, curve: Curve[Any], x: Words) -> Words:
    """Negate points."""
    n, z = _count(x), space.empty(tuple(x.shape), dtype_of(curve.coordinates.base))
    _run(space, curve, "neg", (x, z), (n,), n)
    return z


def multiply(space: MemorySpace, curve: Curve[Any], x: Words, scalars: Words) -> Words:
    """Multiply points by scalars elementwise; one point or scalar is broadcast, other lengths raise ShapeError."""
    points, count = _count(x), _count(scalars)
    if points != count and 1 not in (points, count):
        raise ShapeError(f"curve multiplication: {points} points and {count} scalars; wanted as many, or one of either")
    n = points if count == 1 else count
    z = space.empty((n, *curve.shape), dtype_of(curve.coordinates.base))
    sizes = (n, int(points > 1), int(count > 1))
    _run(space, curve, "mul", (x, scalars, z), sizes, n)
    return z


def first_off(space: MemorySpace, curve: Curve[Any], test: Test, x: Words) -> int | None:
    """Return the least index of a point that fails a test, or None; many are first tested by _all_in_subgroup."""
    n, chunk = _count(x), _CHUNKS.get(space.backend, _CHUNKS[""])
    if not n or (test == "off_subgroup" and curve.cofactor == 1):
        return None
    if test == "off_subgroup" and space is HOST and n >= _FEWEST and curve.cofactor % 2:
        return _first_out_of_subgroup(curve, x)
    return index if (index := space.minimum(_firsts(space, curve, test, x, chunk))) < n else None


def off(space: MemorySpace, curve: Curve[Any], test: Test, x: Words) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which points fail a test, (n,) on the host."""
    n = _count(x)
    if first_off(space, curve, test, x) is None:  # one result for all points: cheap, and mostly the answer
        return np.zeros(n, np.bool_)
    return np.asarray(space.store(_firsts(space, curve, test, x, 1)).view(np.int64) < n)


def _firsts(space: MemorySpace, curve: Curve[Any], test: Test, x: Words, chunk: int) -> Words:
    """Return for each chunk the least index of a point that fails a test, else n."""
    n = _count(x)
    firsts = space.empty((-(-n // chunk),), np.dtype(np.int64))
    _run(space, curve, test, (x, firsts), (n, chunk), n, chunk)
    return firsts


# --- the subgroup test of many points --------------------------------------------------------------------------------
_FEWEST, _MOST = 128, 1 << 15  # points that are tested together: fewest that are faster, and most

_COMBINATIONS = 64

_Points = npt.NDArray[np.uint64]


def _first_out_of_subgroup(curve: Curve[Any], x: _Points) -> int | None:
    for start in range(0, len(x), _MOST):
        part = x[start : start + _MOST]
        with RecordedLaunch(_record(curve, "off_subgroup", HOST, len(part)), HOST.provider, HOST.index):
            passed = _all_in_subgroup(curve, part)
        if not passed:
            index = HOST.minimum(_firsts(HOST, curve, "off_subgroup", part, _CHUNKS["cpu"]))
            if index < len(part):
                return start + index
    return None


def _all_in_subgroup(curve: Curve[Any], x: _Points) -> bool:
    """Return whether points (n, *shape) of a curve of odd order are in the subgroup; n is at least 1.

    False is never wrong. True is wrong with probability at most 2^-64: of 64 random subsets the sums are tested. Let P
    be a point out of the subgroup. Of a subset's sums without P and with P at most one is in the subgroup, and each has
    probability 1/2, whatever else it contains. A single random combination would not do: P's part out of the subgroup
    may have order 3.

    Each point gets rows of random digits of b bits, and each bit is a subset: n + 2^(b + 1) additions give b sums.
    """
    bits = min(range(1, 17), key=lambda bits: -(-_COMBINATIONS // bits) * (len(x) + (2 << bits)))
    draws = np.frombuffer(os.urandom(2 * len(x) * -(-_COMBINATIONS // bits)), np.uint16).reshape(-1, len(x))
    digits, rows = draws & np.uint16((1 << bits) - 1), max(1, _MOST // len(x))
    sums = [_subset_sums(curve, x, digits[i : i + rows], bits) for i in range(0, len(digits), rows)]
    tested = np.concatenate(sums)
    n, firsts = len(tested), np.empty(-(-len(tested) // _LANES), np.int64)
    _launch(HOST, curve, "off_subgroup", (tested, firsts), (n, _LANES), n, _LANES)
    return bool((firsts == n).all())


def _subset_sums(curve: Curve[Any], x: _Points, digits: npt.NDArray[np.uint16], bits: int) -> _Points:
    """Return the sums of the points whose digits, (rows, n), have bit b - 1, ..., 0: (bits * rows, *shape)."""
    rows = len(digits)
    buckets = (digits + (np.arange(rows) << bits)[:, None]).reshape(-1)
    order = np.argsort(buckets.astype(np.uint16) if rows << bits <= 1 << 16 else buckets, kind="stable")
    total, buckets = x[order % len(x)], buckets[order]
    counts = np.bincount(buckets, minlength=rows << bits)
    while counts.max() > 1:  # add neighbours of one bucket
        ranks = np.arange(len(buckets)) - np.repeat(np.cumsum(counts) - counts, counts)
        first, second = np.flatnonzero(ranks % 2 == 0), np.flatnonzero(ranks % 2)
        merged = total[first]
        merged[np.searchsorted(first, second - 1)] = _sum(curve, total[second - 1], total[second])
        total, buckets, counts = merged, buckets[first], -(-counts // 2)
    sums = np.zeros((1, rows << bits, *curve.shape), np.uint64)
    sums[0, buckets] = total
    sums = sums.reshape(1, rows, 1 << bits, *curve.shape)
    for _ in range(bits):  # sums[0] are of all points, the others of those with one bit; the next bit splits them
        low, high = np.split(sums, 2, axis=2)
        sums = np.concatenate([_sum(curve, low, high), high[:1]])
    subsets: _Points = sums[1:].reshape(-1, *curve.shape)
    return subsets


def _sum(curve: Curve[Any], x: _Points, y: _Points) -> _Points:
    """Add points elementwise, without a record in the ledger, whose cases are the numbers of points."""
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
    z, n = np.empty_like(x), x.size // prod(curve.shape)
    _launch(HOST, curve, "add", (x, y, z), (n,), n)
    return z


# --- reduction -------------------------------------------------------------------------------------------------------
def check_reduced(space: MemorySpace, curve: Curve[Any], points: Words, name: str) -> None:
    """Raise FormatError if a coefficient of canonical points, (..., *shape), is not below the modulus; names it."""
    field = curve.coordinates.base
    if (index := field_launch.first_unreduced(space, field, points)) is not None:
        point, part = divmod(index, 2 * curve.coordinates.degree)
        value = field_launch.element(space, field, points, index)
        raise unreduced_coordinate(curve, f"{name}[{point}] (flattened)", part, value)


def unreduced_coordinate(curve: Curve[Any], point: str, part: int, value: int) -> FormatError:
    """Return the error for coefficient number `part` of a point: x before y, c0 before c1."""
    degree, modulus = curve.coordinates.degree, curve.coordinates.base.modulus
    coordinate = "xy"[part // degree] + (f".c{part % degree}" if degree > 1 else "")
    what = "negative" if value < 0 else f"not below the modulus {modulus:#x}"
    return FormatError(f"{point} {coordinate} is {clipped(value, hexadecimal=True)}, {what}")


def _count(words: Words) -> int:
    return int(words.shape[0])


def _run(
    space: MemorySpace, curve: Curve[Any], op: str, arrays: Sequence[Words], sizes: Sequence[int], *n: int
) -> None:
    """Launch entry curve_<op> on n points, arguments as _launch, and record the call."""
    with RecordedLaunch(_record(curve, op, space, n[0]), space.provider, space.index):
        if n[0]:
            _launch(space, curve, op, arrays, sizes, *n)


def _launch(
    space: MemorySpace, curve: Curve[Any], op: str, arrays: Sequence[Words], sizes: Sequence[int], n: int,
    chunk: int = 1,
) -> None:  # fmt: skip
    entry = f"curve_{op}"
    blocks, threads = (-(-n // chunk), 1) if space.backend == "cpu" else grid_and_block(entry, n, chunk)
    launch(space, kernel_source(curve, entry), entry, blocks, threads, arrays, *sizes)


@functools.lru_cache(maxsize=4096)
def _record(curve: Curve[Any], op: str, space: MemorySpace, n: int) -> OpRecord:
    dialect, _ = kernel_source(curve).pick(space.provider.dialects)
    arrays, products = _COSTS[op]
    size_bytes = arrays * n * prod(curve.shape) * dtype_of(curve.coordinates.base).itemsize
    return sole_record(
        f"curve_{op}", dialect, space.backend, space.label, f"{n} {curve.name}",
        size_bytes=size_bytes, operations=products * n,
    )  # fmt: skip


# --- programs in C ----------------------------------------------------------------------------------------------------
BLOCK = 128  # Most threads per block in the C dialects; a power of two. Each may use 255 registers and more.
ADDS = 16  # Points that a thread of curve_add adds with one inversion

_FOLDERS = ("algebra/field", "algebra/curve")
_BY_CHUNK = ("curve_off_curve", "curve_off_subgroup")
_BASE = "fq"

ENTRIES: dict[str, tuple[str, ...]] = {
    "curve_add": ("*u64", "*u64", "*u64", "i64"),
    "curve_neg": ("*u64", "*u64", "i64"),
    "curve_mul": ("*u64", "*u64", "*u64", "i64", "i64", "i64"),
    "curve_inward": ("*u64", "*u64", "*u64", "*u32", "i64", "i64"),
    "curve_off_curve": ("*u64", "*i64", "i64", "i64"),
    "curve_off_subgroup": ("*u64", "*i64", "i64", "i64"),
}
"""Entry point -> the types of its arguments; P is an array of points.

    curve_add            x P, y P, z P, n                                        z may be x or y
    curve_neg            x P, z P, n
    curve_mul            x P, scalars *u64, z P, n, x_step, scalar_step          z_i = s_i x_i
    curve_inward         x P canonical, z P, scalars *u64, verdict *u32, n, n_scalars
    curve_off_curve      x P, first *i64, n, chunk
    curve_off_subgroup   x P, first *i64, n, chunk

Points are affine, x then y (over Fq2 c0 then c1), in Montgomery form with R of algebra.field.program's
montgomery_radix, infinity all zeros. Except in curve_off_curve they are on the curve; any two may be equal, opposite or
infinite. On curves of even order, curve_add and curve_mul take points of the subgroup only. A scalar is four words, any
number below 2^256, not reduced mod r. A step is 1, or 0 to broadcast one point or scalar. For chunk c, first[c] is the
least index in it of a point off the curve, or out of the subgroup of order r, else n. curve_inward is not for the CPU.

Time and addresses of curve_mul depend neither on the scalars nor on the points.
"""


@functools.cache
def kernel_source(curve: Curve[Any], entry: str | None = None) -> KernelSource:
    """Return the curve's functions on arrays in every dialect, or one of ENTRIES; ConfigError for an unknown one."""
    if entry is not None and entry not in ENTRIES:
        raise ConfigError(f"{curve.name} has no entry {entry!r}; it has {', '.join(ENTRIES)}")
    dialects = LazyDialects(
        portable=lambda: _kernels(curve, "portable", entry),
        llvm=lambda: curve_kernels(curve.name, entry or ""),
        cuda=lambda: cuda_program(curve, f"{entry}", functools.partial(_kernels, curve, "cuda", entry)),
    )
    kept = ENTRIES if entry is None else {entry: ENTRIES[entry]}
    return KernelSource(name=f"{entry or 'curve'}_{curve.name}", dialects=dialects, entries=kept)


def grid_and_block(entry: str, n: int, chunk: int = 1) -> tuple[int, int]:
    """Return blocks and threads per block of an entry of the C dialects, for n > 0 points in chunks of `chunk`."""
    by_chunk = entry in _BY_CHUNK and chunk > 1  # one thread processes a chunk of one point
    points = chunk if by_chunk else BLOCK * (ADDS if entry == "curve_add" else 1)
    return -(-n // points), BLOCK


def cuda_program(curve: Curve[Any], arguments: str, write: Callable[[], str], *folders: str) -> CudaProgram:
    """Return a CudaProgram of a curve, with sources in `folders` too; the text depends on `arguments` besides."""
    return CudaProgram(curve.canonical_text() + arguments, (*_FOLDERS, *folders), write)


def point_text(curve: Curve[Any], dialect: str, *, called: bool = True) -> str:
    """Return the curve's coordinates and points (point.h) in a dialect; products are calls unless `called` is False."""
    k = curve.coordinates
    exponent = ", ".join(f"0x{word:x}UL" for word in k.base.words(k.base.modulus - 2, 64, k.base.limbs))
    parts = [defined({"BASE_EXPONENT": exponent, "BASE_NIBBLES": -(-k.base.bits // 4)}), _file("inverse.h")]
    if k.degree == 2:
        parts += [_products("BASE", 1, called=False), _file("quadratic.h")]
    parts += [_products("COORD", k.degree, called=called), _file("point.h")]
    return field_text(k.base, _BASE, dialect) + prefixed(curve, "".join(parts))


def prefixed(curve: Curve[Any], text: str) -> str:
    """Replace COORD and BASE, as words or before an underscore, by the prefixes of the coordinates' and base field."""
    return replace_prefixes(text, BASE=_BASE, COORD=_BASE if curve.coordinates.degree == 1 else f"{_BASE}2")


def coordinate(curve: Curve[Any], value: Any) -> str:
    """Return a coordinate's initializer in C, in Montgomery form."""
    base = curve.coordinates.base
    parts = []
    for part in curve.coordinates.parts(value):
        limbs = base.words(part * montgomery_radix(base) % base.modulus, 32, 2 * base.limbs)
        parts.append("{{" + ", ".join(f"0x{limb:x}U" for limb in limbs) + "}}")
    return parts[0] if len(parts) == 1 else "{" + ", ".join(parts) + "}"


_ENTRY = re.compile(r"^ACL_KERNEL ACL_BLOCK\(\w+\) void (\w+)\([^{]*\{\n(?:.*\n)*?\}\n", re.MULTILINE)


def _kernels(curve: Curve[Any], dialect: str, entry: str | None) -> str:
    k, test = curve.coordinates, endomorphism(curve)
    eigenvalue = 0 if test is None else test.eigenvalue
    words = k.base.words(eigenvalue, 64, max(1, -(-eigenvalue.bit_length() // 64)))
    values: dict[str, int | str] = {
        "CURVE_BLOCK": BLOCK,
        "CURVE_ADDS": ADDS,
        "CURVE_PARTS": 2 * k.degree,
        "CURVE_ORDER": ", ".join(f"0x{word:x}UL" for word in curve.scalars.words(curve.order, 64, 4)),
        "CURVE_EIGENVALUE": ", ".join(f"0x{word:x}UL" for word in words),
        "CURVE_EIGENVALUE_BITS": eigenvalue.bit_length(),
        "COORD_B": coordinate(curve, curve.b),
        "COORD_3B": coordinate(curve, k.times(curve.b, 3)),
        "COORD_ENDOMORPHISM_X": coordinate(curve, k.one if test is None else test.x_factor),
        "COORD_ENDOMORPHISM_Y": coordinate(curve, k.one if test is None else test.y_factor),
        "COORD_CONJUGATE(x)": "COORD_conjugate(x)" if k.degree == 2 else "(x)",
    }
    kernels = _ENTRY.sub(lambda match: match[0] if entry in (None, match[1]) else "", _file("kernel.c"))
    return point_text(curve, dialect) + prefixed(curve, defined(values) + _file("complete.h") + kernels)


def _products(prefix: str, degree: int, called: bool) -> str:
    """Return the macros PREFIX_MUL, _SQUARE and _MUL_SUB; the last is of two products and a difference over Fq2."""
    products = {"mul": "xy", "square": "x"} | ({"mul_sub": "xyvw"} if degree == 1 else {})
    texts, macros = [], {}
    for name, letters in products.items():
        arguments, far = ", ".join(letters), f"{prefix}_{name}_far" if called else f"{prefix}_{name}"
        macros[f"{prefix}_{name.upper()}({arguments})"] = f"{far}({arguments})"
        if called:
            typed = ", ".join(f"{prefix} {letter}" for letter in letters)
            texts.append(f"ACL_FAR {prefix} {far}({typed}) {{\n    return {prefix}_{name}({arguments});\n}}\n\n")
    if degree == 2:
        macros[f"{prefix}_MUL_SUB(x, y, v, w)"] = f"{prefix}_sub({prefix}_MUL(x, y), {prefix}_MUL(v, w))"
    return "".join(texts) + defined(macros)


def _file(name: str) -> str:
    return read_files("algebra/curve", name)
