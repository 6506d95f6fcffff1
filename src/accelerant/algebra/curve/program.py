"""A curve's programs in C, assembled from its constants and the files of this folder.

kernel.c, point.h and complete.h serve G1 and G2: COORD in them is the prefix of the coordinates' field, which is the
base field itself (BASE) or its quadratic extension (quadratic.h). Dialects are those of algebra/field/program.py:
"portable" C, and "cuda" with carry chains; llvm_kernels.py builds "llvm".

A program contains one curve, and usually one entry. Point arithmetic is large: loops are not unrolled, and products of
coordinates are function calls (COORD_MUL), so that NVRTC takes 0.5 to 2 s for an entry, not minutes. A call costs some
60 instructions in addition to the 400 and more of a product.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from accelerant.algebra.curve.llvm_kernels import curve_kernels
from accelerant.algebra.curve.parameters import endomorphism
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.program import CudaProgram, defined, field_text, montgomery_radix, read_files
from accelerant.algebra.field.program import prefixed as replace_prefixes
from accelerant.errors import ConfigError
from accelerant.runtime.compilation.kernel import KernelSource, LazyDialects

BLOCK = 128
"""Most threads per block in the C dialects; a power of two. Each may use 255 registers and more."""

ADDS = 16
"""Points that a thread of curve_add adds with one inversion."""

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
    """Return a CudaProgram of a curve; `folders` have sources in addition to those of fields and curves.

    `arguments` is everything else that determines the text that `write` returns.
    """
    return CudaProgram(curve.canonical_text() + arguments, (*_FOLDERS, *folders), write)


def point_text(curve: Curve[Any], dialect: str, *, called: bool = True) -> str:
    """Return the curve's coordinates and points (point.h) in dialect "portable" or "cuda"; follows portable.h.

    Types and functions begin with the prefix that `prefixed` substitutes for COORD. Products of coordinates are
    function calls unless `called` is False.
    """
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
    """Return the macros PREFIX_MUL, _SQUARE and _MUL_SUB: the field's own functions, or calls of them.

    Over Fq2 the last is two products and a difference: no registers are left for more.
    """
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
