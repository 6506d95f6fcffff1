"""Primes, field elements and points as the files have them: read, written and checked.

Numbers are little-endian, in as many bytes as the 64-bit words of the prime take (n8: 32, or 48 for the coordinates
of bls12_381). Points are affine, x then y, over Fq2 c0 then c1, in Montgomery form with R = 2^(64 limbs), which is the
form of the kernels; infinity is all zeros.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.parameters import FAMILIES, Curve, Family
from accelerant.algebra.field.parameters import FIELDS, Field
from accelerant.algebra.field.places import HOST
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.zk.formats.container import Container, Cursor

__all__ = [
    "check_below",
    "check_points",
    "coordinate_field",
    "count_infinities",
    "first_not_below",
    "hash_bytes",
    "montgomery_points",
    "point_words",
    "prime_bytes",
    "read_family",
    "read_point",
    "scalar_field",
    "why_forgeable",
    "words_of",
]

U64 = npt.NDArray[np.uint64]
Which = Literal["q", "r"]

_CHUNK_BYTES = 1 << 22
"""Of a section, at a time: what a check allocates does not grow with the section."""


def coordinate_field(family: Family) -> Field:
    """Of the points' coordinates or of their coefficients, modulus q."""
    return FIELDS[f"{family.name}_fq"]


def scalar_field(family: Family) -> Field:
    """Of witnesses and constraints, modulus r."""
    return FIELDS[f"{family.name}_fr"]


def _field(family: Family, which: Which) -> Field:
    return coordinate_field(family) if which == "q" else scalar_field(family)


def read_family(cursor: Cursor, which: Which) -> Family:
    """The pairing whose prime comes next: u32 n8, then n8 bytes.

    Args:
        cursor: moved behind the prime.
        which: q, the modulus of the points' coordinates, or r, their order.

    Raises:
        FormatError: no such prime is known.
    """
    at = cursor.at
    size = cursor.u32(f"the size of {which}")
    sizes = sorted({_field(family, which).size_bytes for family in FAMILIES.values()})
    if size not in sizes:
        raise cursor.error(f"{which} has {size} bytes; those known have {' or '.join(map(str, sizes))}", at)
    at = cursor.at
    prime = cursor.number(size, which)
    for family in FAMILIES.values():
        field = _field(family, which)
        if (field.modulus, field.size_bytes) == (prime, size):
            return family
    raise cursor.error(f"{which} is {prime:#x}, of no pairing known here ({', '.join(FAMILIES)})", at)


def prime_bytes(family: Family, which: Which) -> bytes:
    """What read_family reads."""
    field = _field(family, which)
    return struct.pack("<I", field.size_bytes) + field.modulus.to_bytes(field.size_bytes, "little")


def point_words(family: Family, degree: int) -> int:
    """Words of a point of G1 (degree 1) or G2 (degree 2)."""
    return 2 * degree * coordinate_field(family).limbs


def read_point(cursor: Cursor, family: Family, degree: int, what: str) -> U64:
    """The words of the next point, its coordinates found below q; whether it is on the curve is not asked.

    Raises:
        FormatError: one is not.
    """
    at = cursor.at
    words = cursor.words(point_words(family, degree), what)
    _check_words(cursor.container, cursor.section.id, at, coordinate_field(family), words, what)
    return words


def why_forgeable(gamma2: U64, delta2: U64) -> str | None:
    """Why anyone can make proofs that a key of these two points accepts; None where they do not say so.

    With delta2 = gamma2, as snarkjs's `groth16 setup` leaves them until someone contributes, pi_A = alpha1, pi_B =
    beta2 and pi_C = minus the sum of IC prove any public inputs.
    """
    if not np.array_equal(gamma2, delta2):
        return None
    return "gamma2 equals delta2: nobody contributed to this key, and anyone can make proofs that it accepts"


def words_of(value: Any, width: int, count: int | None, name: str) -> U64:
    """An argument of a writer as contiguous words: (count, width), or (width,) where count is None.

    Raises:
        UnsupportedDtype: not uint64.
        ShapeError: of another shape.
    """
    array = np.asarray(value)
    if array.dtype != np.uint64:
        raise UnsupportedDtype(f"{name} must be uint64, got {array.dtype}")
    wanted = (width,) if count is None else (count, width)
    if array.shape != wanted:
        raise ShapeError(f"{name} must be {wanted}, got {array.shape}")
    return np.ascontiguousarray(array, "<u8")


def hash_bytes(value: bytes, size: int, name: str) -> bytes:
    """An argument of a writer that is a hash.

    Raises:
        ConfigError: of another length.
    """
    if len(value) != size:
        raise ConfigError(f"{name} must have {size} bytes, got {len(value)}")
    return value


def montgomery_points(curve: Curve[Any], points: U64) -> U64:
    """Canonical points (n, *curve.shape) as rows of words in Montgomery form, (n, words of a point)."""
    words: U64 = launch.to_montgomery(HOST, curve, points).reshape(len(points), -1)
    return words


# --- checks of whole sections ----------------------------------------------------------------------------------------


def first_not_below(words: U64, modulus: int) -> int | None:
    """The first row of (n, limbs) words that is not below the modulus, None where all are."""
    limbs = [modulus >> 64 * i & 0xFFFFFFFFFFFFFFFF for i in range(words.shape[1])]
    rows = np.flatnonzero(words[:, -1] >= np.uint64(limbs[-1]))  # few, but for hostile files
    wrong = np.ones(len(rows), np.bool_)
    for column, limb in enumerate(limbs):  # from the least significant up: the last that differs decides
        found, bound = words[rows, column], np.uint64(limb)
        wrong = (found > bound) | ((found == bound) & wrong)
    return int(rows[wrong.argmax()]) if wrong.any() else None


def _check_words(container: Container, number: int, at: int, field: Field, words: U64, what: str) -> None:
    """Refuse words, at a byte of the file, of which an element is not below the modulus. It may be secret."""
    index = first_not_below(words.reshape(-1, field.limbs), field.modulus)
    if index is not None:
        message = f"{what} is not below the modulus of {field.name}"
        raise container.error(number, at + index * field.size_bytes, message)


def _chunks(words: U64) -> list[slice]:
    rows = max(1, _CHUNK_BYTES // max(1, words.shape[1] * words.itemsize))
    return [slice(start, start + rows) for start in range(0, len(words), rows)]


def check_below(container: Container, number: int, field: Field, words: U64, start: int = 0) -> None:
    """Refuse a section of which an element is not below the modulus.

    Args:
        container: the file.
        number: of the section.
        field: of the elements.
        words: rows of the section, of whole elements.
        start: of the first row in the section's payload, bytes.

    Raises:
        FormatError: names the first one's offset.
    """
    begin = container.sections[number].offset + start
    for chunk in _chunks(words):
        at = begin + chunk.start * words.shape[1] * words.itemsize
        _check_words(container, number, at, field, words[chunk], "an element")


def check_points(
    container: Container, number: int, curve: Curve[Any], words: U64, start: int = 0, *, subgroup: bool = True
) -> None:
    """Refuse a section of which a point has an unreduced coordinate, is off the curve or out of the subgroup.

    Args:
        container: the file.
        number: of the section.
        curve: of the points.
        words: (n, words of a point), rows of the section.
        start: of the first point in the section's payload, bytes.
        subgroup: ask for the subgroup of order r too; infinity is in it.

    Raises:
        FormatError: names the first one's offset and index.
    """
    check_below(container, number, curve.coordinates.base, words, start)
    size = words.shape[1] * words.itemsize
    tests: tuple[tuple[launch.Test, str], ...] = (
        ("off_curve", f"not on {curve.name}"),
        ("off_subgroup", f"on {curve.name} but not in its subgroup of order r"),
    )
    for chunk in _chunks(words):
        points = HOST.contiguous(words[chunk]).reshape(-1, *curve.shape)
        for test, what in tests[: 1 + subgroup]:
            found = launch.first_off(HOST, curve, test, points)
            if found is not None:
                index = chunk.start + found
                offset = container.sections[number].offset + start + index * size
                raise container.error(number, offset, f"point {index} is {what}")


def count_infinities(words: U64) -> int:
    """How many of (n, words of a point) are infinity."""
    return sum(int(len(part) - part.any(axis=1).sum()) for part in (words[chunk] for chunk in _chunks(words)))
