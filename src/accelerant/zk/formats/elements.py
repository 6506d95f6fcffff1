"""Encoding of primes, field elements, points and contribution labels in the files.

Numbers are little-endian and take a whole number of 64-bit words (n8 bytes: 32, or 48 for coordinates of bls12_381).
Points are affine, x then y, over Fq2 c0 then c1, in Montgomery form with R = 2^(64 limbs), the representation that the
kernels use; infinity is all zeros.

A label is u32 kind (0 contribution, 1 random beacon), u32 length of the parameters, and the parameters in ascending
order: 1, u8 length, name in UTF-8;  2, u8 log2 of the number of beacon iterations;  3, u8 length, beacon bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.parameters import FAMILIES, Curve, Family
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.parameters import Field
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.zk.formats.container import U64, Cursor, MappedFile, Payload

Which = Literal["q", "r"]

_CHUNK_BYTES = 1 << 22
"""Bytes of a section validated at a time, so that memory use does not depend on the section's size."""


def _field(family: Family, which: Which) -> Field:
    return family.fq if which == "q" else family.g1.scalars


def read_family(cursor: Cursor, which: Which) -> Family:
    """Read a prime (u32 n8, then n8 bytes), "q" or "r", and return its curve family; FormatError if it is of none."""
    at = cursor.at
    size = cursor.number(f"the size of {which}")
    sizes = sorted({_field(family, which).size_bytes for family in FAMILIES.values()})
    if size not in sizes:
        raise cursor.error(f"{which} has {size} bytes; supported sizes are {' and '.join(map(str, sizes))}", at)
    at = cursor.at
    prime = cursor.number(which, size)
    for family in FAMILIES.values():
        field = _field(family, which)
        if (field.modulus, field.size_bytes) == (prime, size):
            return family
    known = ", ".join(FAMILIES)
    raise cursor.error(f"{which} is {prime:#x}, which is not the prime of a supported curve ({known})", at)


def prime_bytes(family: Family, which: Which) -> bytes:
    """Encode a prime as read_family reads it."""
    field = _field(family, which)
    return struct.pack("<I", field.size_bytes) + field.modulus.to_bytes(field.size_bytes, "little")


def point_words(family: Family, degree: int) -> int:
    """Return the number of 64-bit words of a point of G1 (degree 1) or G2 (degree 2)."""
    return 2 * degree * family.fq.limbs


def read_points(cursor: Cursor, family: Family, degrees: Mapping[str, int], prefix: str = "") -> dict[str, U64]:
    """Read a point for each name, and check that coordinates are below q; curve membership is not checked.

    Args:
        degrees: name -> 1 for a point of G1, 2 for one of G2, in file order.
        prefix: precedes the names in messages.
    """
    points = {}
    for name, degree in degrees.items():
        at, what = cursor.at, prefix + name
        points[name] = cursor.words(point_words(family, degree), what)
        _check_words(cursor.file, cursor.section, at, family.fq, points[name], what)
    return points


def words_of(value: Any, width: int, count: int | None, name: str) -> U64:
    """Return value, a uint64 array, as contiguous words, (count, width), or (width,) if count is None."""
    array = np.asarray(value)
    if array.dtype != np.uint64:
        raise UnsupportedDtype(f"{name} must be uint64, got {array.dtype}")
    expected = (width,) if count is None else (count, width)
    if array.shape != expected:
        raise ShapeError(f"{name} must be {expected}, got {array.shape}")
    return np.ascontiguousarray(array, "<u8")


def montgomery_points(curve: Curve[Any], points: U64) -> U64:
    """Convert canonical points (n, *curve.shape) to rows in Montgomery form, (n, words per point)."""
    words: U64 = launch.to_montgomery(HOST, curve, points).reshape(len(points), -1)
    return words


# --- checks of whole sections ----------------------------------------------------------------------------------------


def first_not_below(words: U64, modulus: int) -> int | None:
    """Return the index of the first row of (n, limbs) words that is not below the modulus, or None."""
    limbs = [modulus >> 64 * i & 0xFFFFFFFFFFFFFFFF for i in range(words.shape[1])]
    rows = np.flatnonzero(words[:, -1] >= np.uint64(limbs[-1]))  # few, except in malicious files
    wrong = np.ones(len(rows), np.bool_)
    for column, limb in enumerate(limbs):  # from the least significant up: the last that differs decides
        column_words, bound = words[rows, column], np.uint64(limb)
        wrong = (column_words > bound) | ((column_words == bound) & wrong)
    return int(rows[wrong.argmax()]) if wrong.any() else None


def _check_words(file: MappedFile, number: int, at: int, field: Field, words: U64, what: str) -> None:
    """Raise FormatError if an element is not below the modulus; the message omits the value, which may be secret."""
    index = first_not_below(words.reshape(-1, field.limbs), field.modulus)
    if index is not None:
        message = f"{what} is not below the modulus of {field.name}"
        raise file.error(number, at + index * field.size_bytes, message)


def _chunks(words: U64) -> list[slice]:
    rows = max(1, _CHUNK_BYTES // max(1, words.shape[1] * words.itemsize))
    return [slice(start, start + rows) for start in range(0, len(words), rows)]


def check_below(file: MappedFile, number: int, field: Field, words: U64, start: int = 0) -> None:
    """Check that all elements of section `number` are below the modulus; FormatError names the first one's offset.

    `words` are rows of the section, each a whole number of elements, from byte `start` of the payload on.
    """
    for chunk in _chunks(words):
        at = start + chunk.start * words.shape[1] * words.itemsize
        _check_words(file, number, at, field, words[chunk], "an element")


def check_points(
    file: MappedFile, number: int, curve: Curve[Any], words: U64, start: int = 0, *, subgroup: bool = True,
    named: Sequence[tuple[int, str]] = (),
) -> None:  # fmt: skip
    """Check that the points of section `number` have reduced coordinates and are on the curve and in the subgroup.

    `words`, (n, words per point), are rows of the section from byte `start` of the payload on. FormatError names the
    offset and the index of the first invalid point. The subgroup of order r contains infinity. `named` has offsets and
    names of points elsewhere in the section, which are reduced.
    """
    if not named:
        check_below(file, number, curve.coordinates.base, words, start)
    tests: tuple[tuple[launch.Test, str], ...] = (
        ("off_curve", f"not on {curve.name}"),
        ("off_subgroup", f"on {curve.name} but not in its subgroup of order r"),
    )
    for chunk in _chunks(words):
        points = HOST.contiguous(words[chunk]).reshape(-1, *curve.shape)
        for test, what in tests[: 1 + subgroup]:
            first = launch.first_off(HOST, curve, test, points)
            if first is not None:
                index = chunk.start + first
                at, name = start + index * words.shape[1] * words.itemsize, f"point {index}"
                if named:
                    at, name = named[index]
                raise file.error(number, at, f"{name} is {what}")


def count_infinities(words: U64) -> int:
    """Count the points at infinity among (n, words per point)."""
    return sum(int(len(part) - part.any(axis=1).sum()) for part in (words[chunk] for chunk in _chunks(words)))


# --- contributions ---------------------------------------------------------------------------------------------------

KINDS = {0: "contribution", 1: "beacon"}
_NAME, _ITERATIONS, _BEACON = 1, 2, 3
_MAX_LENGTH = 255
"""Bytes of a name or of a beacon: the format gives their length in one byte."""


@dataclass(frozen=True, slots=True)
class Label:
    """The description that a contributor attached to a contribution; it is not authenticated.

    Attributes:
        kind: 0 for a contribution, 1 for a random beacon.
        name: chosen by the contributor; may contain any characters.
        iterations_exp: log2 of the number of hash iterations; beacons only.
        beacon: the beacon's bytes; beacons only.
    """

    kind: int = 0
    name: str = ""
    iterations_exp: int | None = None
    beacon: bytes | None = None


def read_label(cursor: Cursor) -> Label:
    """Read a label; FormatError for an unknown kind or parameter, or parameters out of order or truncated."""
    at = cursor.at
    kind = cursor.number("a contribution's kind")
    if kind not in KINDS:
        raise cursor.error(f"contribution of kind {kind}; known kinds are 0 and 1 (a beacon)", at)
    length = cursor.number("the length of a contribution's parameters")
    if length > cursor.left:
        raise cursor.error(f"{length} bytes of a contribution's parameters, {cursor.left} are left", cursor.at - 4)
    end, last = cursor.at + length, 0
    parameters: dict[int, bytes] = {}
    while cursor.at < end:
        at = cursor.at
        key = cursor.number("a contribution's parameter", 1)
        if not last < key <= _BEACON:
            raise cursor.error(f"contribution parameter {key} after {last}; expected 1 to 3 in ascending order", at)
        size = 1 if key == _ITERATIONS else cursor.number("a parameter's length", 1)
        parameters[key] = cursor.take(size, "a contribution's parameter")
        last = key
    if cursor.at != end:
        raise cursor.error("a contribution's parameters are longer than they say", at)
    # snarkjs truncates names at 64 bytes, possibly within a character
    name = parameters.get(_NAME, b"").decode("utf-8", errors="replace")
    iterations = parameters.get(_ITERATIONS)
    return Label(kind, name, None if iterations is None else iterations[0], parameters.get(_BEACON))


def contribution_payloads(
    family: Family,
    degrees: Mapping[str, int],
    points: Mapping[str, U64],
    hashes: Mapping[str, tuple[bytes, int]],
    label: Label,
) -> list[Payload]:
    """Encode a contribution.

    Args:
        degrees: as for read_points.
        points: name -> words.
        hashes: name -> bytes and their expected number.

    Raises:
        ConfigError: a hash of another size; a label of unknown kind, with a name or a beacon of more than 255 bytes, or
            iterations_exp above 255.
        ShapeError, UnsupportedDtype: words that are not a point's.
    """
    words = (words_of(points[name], point_words(family, degree), None, name) for name, degree in degrees.items())
    checked = (check_size(value, size, name) for name, (value, size) in hashes.items())
    return [*words, *checked, _label_bytes(label)]


def check_size(value: bytes, size: int, name: str) -> bytes:
    """Return value after checking that it has `size` bytes."""
    if len(value) != size:
        raise ConfigError(f"{name} must have {size} bytes, got {len(value)}")
    return value


def _label_bytes(label: Label) -> bytes:
    if label.kind not in KINDS:
        raise ConfigError(f"a contribution's kind must be 0 or 1, got {label.kind}")
    name = label.name.encode("utf-8", errors="replace")
    for what, value in (("name", name), ("beacon", label.beacon or b"")):
        if len(value) > _MAX_LENGTH:
            raise ConfigError(f"a contribution's {what} must have at most {_MAX_LENGTH} bytes, got {len(value)}")
    data = bytes((_NAME, len(name))) + name if name else b""
    if label.iterations_exp is not None:
        if not 0 <= label.iterations_exp <= _MAX_LENGTH:
            raise ConfigError(f"a beacon's iterations_exp must be 0 to 255, got {label.iterations_exp}")
        data += bytes((_ITERATIONS, label.iterations_exp))
    if label.beacon is not None:
        data += bytes((_BEACON, len(label.beacon))) + label.beacon
    return struct.pack("<II", label.kind, len(data)) + data
