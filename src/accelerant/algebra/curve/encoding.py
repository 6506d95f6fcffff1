"""Points as arrays of limbs and as bytes, to and from Python integers.

Arrays: canonical little-endian 64-bit limbs, affine, (n, 2, limbs) for G1 and (n, 2, 2, limbs) for G2 with c0 before
c1; infinity is all zeros, which is on no curve here (b is not 0).

Bytes, by layout, points contiguous:

    evm           x then y, big-endian. EIP-196 and EIP-197 for bn254: 32 bytes a coefficient, c1 before c0. EIP-2537
                  for bls12_381: 64 bytes a coefficient, the first 16 zero, c0 before c1. Infinity is all zeros.
    uncompressed  x then y, big-endian, c1 before c0, 32 or 48 bytes a coefficient, flags in the top bits of byte 0.
    compressed    x only, in the same way; the flags choose y.

The flags of bls12_381 are ZCash's (draft-irtf-cfrg-pairing-friendly-curves-11, appendix C): 0x80 compressed,
0x40 infinity, 0x20 y is the larger root (compressed only). Those of bn254 are gnark-crypto's (ecc/bn254/marshal.go,
commit 186d567), since there is no third spare bit: 0x00 uncompressed, 0x40 compressed infinity, 0x80 compressed with
the smaller root, 0xc0 with the larger one; an uncompressed infinity is all zeros. The larger of y and -y is the one
with the larger c1, or c0 where c1 is zero.

Input is untrusted, and checked but for points off the curve or the subgroup (launch.first_off). Not constant-time.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.weierstrass import Affine, Curve
from accelerant.algebra.field.words import decode
from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedDtype
from accelerant.runtime.files import clipped

E = TypeVar("E")
U64 = npt.NDArray[np.uint64]
PointLayout = Literal["evm", "uncompressed", "compressed"]

_EVM_WORD = 32


def encode_points(curve: Curve[E], points: Sequence[Affine[E]]) -> U64:
    """Return affine points as canonical limbs, (n, *curve.shape), on the curve or not; FormatError if not reduced."""
    size = curve.coordinates.base.size_bytes
    coefficients = (value for i, point in enumerate(points) for value in _coefficients(curve, point, i))
    data = b"".join(value.to_bytes(size, "little") for value in coefficients)
    return np.frombuffer(data, dtype="<u8").astype(np.uint64).reshape(len(points), *curve.shape)


def decode_points(curve: Curve[E], array: U64) -> list[Affine[E]]:
    """Return the points of canonical limbs, (n, *curve.shape), on the curve or not; FormatError if not reduced."""
    if array.dtype != np.uint64:
        raise UnsupportedDtype(f"points must be uint64, got {array.dtype}")
    if array.shape[1:] != curve.shape or array.ndim != len(curve.shape) + 1:
        wanted = ", ".join(map(str, curve.shape))
        raise ShapeError(f"points of {curve.name} must be (n, {wanted}), got {array.shape}")
    base = curve.coordinates.base
    coefficients = decode(base, array.reshape(len(array), 2 * curve.coordinates.degree, base.limbs))
    return [_point(curve, values, index) for index, values in enumerate(coefficients)]


def point_bytes(curve: Curve[E], layout: PointLayout) -> int:
    """Return the size of one point in bytes; ConfigError for an unknown layout."""
    return _coefficient_bytes(curve, layout) * curve.coordinates.degree * (1 if layout == "compressed" else 2)


def points_to_bytes(curve: Curve[E], points: Sequence[Affine[E]], layout: PointLayout) -> bytes:
    """Return affine points as bytes in a layout; reduced, but not checked to be on the curve."""
    size, codes = _coefficient_bytes(curve, layout), _flags_of(curve, layout)
    kept = curve.coordinates.degree * (1 if layout == "compressed" else 2)
    result = bytearray()
    for index, point in enumerate(points):
        ordered = _reordered(curve, layout, _coefficients(curve, point, index))
        data = bytearray(b"".join(value.to_bytes(size, "big") for value in ordered[:kept]))
        if point is None:
            data[0] |= codes.infinity
        else:
            data[0] |= codes.larger if curve.coordinates.is_larger(point[1]) else codes.smaller
        result += data
    return bytes(result)


def points_from_bytes(curve: Curve[E], data: bytes, layout: PointLayout) -> list[Affine[E]]:
    """Return the points of bytes in a layout, on the curve or not; FormatError names the first that is none."""
    size = point_bytes(curve, layout)
    if len(data) % size:
        raise FormatError(f"{layout} points of {curve.name} are {size} bytes each; {len(data)} is no multiple of that")
    return [_from_bytes(curve, data[i * size : (i + 1) * size], layout, i) for i in range(len(data) // size)]


def _from_bytes(curve: Curve[E], data: bytes, layout: PointLayout, index: int) -> Affine[E]:
    codes = _flags_of(curve, layout)
    flags, rest = data[0] & codes.mask, bytes([data[0] & ~codes.mask]) + data[1:]
    if flags not in (codes.infinity, codes.smaller, codes.larger):
        wanted = ", ".join(f"{flag:#04x}" for flag in sorted({codes.infinity, codes.smaller, codes.larger}))
        raise FormatError(f"points[{index}] has flags {flags:#04x} in byte 0; {layout} {curve.name} has {wanted}")
    infinity_is_flagged = codes.infinity != codes.smaller
    if infinity_is_flagged and flags == codes.infinity:
        if any(rest):
            raise FormatError(
                f"points[{index}] is flagged as infinity but is 0x{data.hex()}, not zero except its flags"
            )
        return None
    size = _coefficient_bytes(curve, layout)
    coefficients = [int.from_bytes(rest[i : i + size], "big") for i in range(0, len(rest), size)]
    values = _reordered(curve, layout, coefficients)
    if layout != "compressed":
        point = _point(curve, values, index)
        if point is None and infinity_is_flagged:
            raise FormatError(f"points[{index}] is all zeros without the flag of infinity, {codes.infinity:#04x}")
        return point
    x = _element(curve, values, "x", index)
    y = curve.coordinates.sqrt(curve.right_side(x))
    if y is None:
        raise FormatError(f"points[{index}] has x = {hexadecimal(x)}, with which no point is on {curve.name}")
    return x, y if curve.coordinates.is_larger(y) == (flags == codes.larger) else curve.coordinates.neg(y)


@dataclass(frozen=True, slots=True)
class _Flags:
    """The flag bits of byte 0: their mask, and the values for infinity and for the smaller or larger of y and -y."""

    mask: int
    infinity: int
    smaller: int
    larger: int


_ZCASH = {"compressed": _Flags(0xE0, 0xC0, 0x80, 0xA0), "uncompressed": _Flags(0xE0, 0x40, 0x00, 0x00)}
_GNARK = {"compressed": _Flags(0xC0, 0x40, 0x80, 0xC0), "uncompressed": _Flags(0xC0, 0x00, 0x00, 0x00)}
_NO_FLAGS = _Flags(0x00, 0x00, 0x00, 0x00)


def _flags_of(curve: Curve[E], layout: PointLayout) -> _Flags:
    field = curve.coordinates.base
    spare_bits = 8 * field.size_bytes - field.bits
    return (_ZCASH if spare_bits >= 3 else _GNARK).get(layout, _NO_FLAGS)


def _coefficient_bytes(curve: Curve[E], layout: PointLayout) -> int:
    if not isinstance(layout, str) or layout not in get_args(PointLayout):
        raise ConfigError(f"unknown layout {clipped(layout)}; known are {', '.join(get_args(PointLayout))}")
    size = curve.coordinates.base.size_bytes
    return -(-size // _EVM_WORD) * _EVM_WORD if layout == "evm" else size


def _reordered(curve: Curve[E], layout: PointLayout, values: Sequence[int]) -> list[int]:
    """Return coefficients (c0 first, x before y) in the layout's order, or back: the permutation is an involution."""
    degree = curve.coordinates.degree
    if layout == "evm" and _coefficient_bytes(curve, layout) != curve.coordinates.base.size_bytes:
        return list(values)  # EIP-2537
    return [value for i in range(0, len(values), degree) for value in reversed(values[i : i + degree])]


def _coefficients(curve: Curve[E], point: Affine[E], index: int) -> list[int]:
    """Return the coefficients, checked, x before y and c0 before c1; zeros for infinity."""
    k = curve.coordinates
    x, y = (
        # of a subclass of int, whose methods may be others, the value
        [operator.index(part) for part in k.parts(element)]
        for element in ((k.zero, k.zero) if point is None else point)
    )
    for name, parts in (("x", x), ("y", y)):
        _element(curve, parts, name, index)
    return x + y


def _point(curve: Curve[E], values: Sequence[int], index: int) -> Affine[E]:
    """Return the point with these coefficients, c0 first; None if all are zero."""
    degree = curve.coordinates.degree
    x, y = _element(curve, values[:degree], "x", index), _element(curve, values[degree:], "y", index)
    return (x, y) if any(values) else None


def _element(curve: Curve[E], parts: Sequence[int], name: str, index: int) -> E:
    """Return the element with these coefficients, the coordinate `name` of point `index`, or raise FormatError."""
    modulus = curve.coordinates.base.modulus
    for i, value in enumerate(parts):
        if not 0 <= value < modulus:
            where = f"points[{index}] {name}" + f".c{i}" * (len(parts) > 1)
            raise FormatError(
                f"{where} is {clipped(value, hexadecimal=True)}, not reduced: it must be from 0 to below the modulus "
                f"{modulus:#x}"
            )
    return curve.coordinates.join(parts)


def hexadecimal(value: object) -> str:
    """Return a coordinate, or an affine point, for a message."""
    if isinstance(value, tuple):
        return f"({', '.join(map(hexadecimal, value))})"
    return "infinity" if value is None else f"{value:#x}"
