"""The binary container of circom and snarkjs files (magic, version, sections), and what sections hold in common.

    magic (4 bytes), u32 version, u32 number of sections, then for each section u32 id, u64 size, payload

All integers are little-endian. Sections may come in any order; unknown ids are ignored. Files are untrusted, and
mapped, not read: no allocation depends on a size before the file is known to have that many bytes. If another program
truncates a mapped file, reading it ends the process (SIGBUS). Source: iden3/binfileutils, iden3/r1csfile.

Numbers take a whole number of 64-bit words (n8 bytes: 32, or 48 for coordinates of bls12_381). Points are affine, x
then y, over Fq2 c0 then c1, in Montgomery form with R = 2^(64 limbs), the representation that the kernels use; infinity
is all zeros. A label is u32 kind (0 contribution, 1 random beacon), u32 length of the parameters, and the parameters in
ascending order: 1, u8 length, name in UTF-8;  2, u8 log2 of the number of beacon iterations;  3, u8 length, beacon
bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.parameters import FAMILIES, Curve, Family
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.words import not_below
from accelerant.errors import ConfigError, FormatError, MissingFile, ShapeError, UnsupportedDtype
from accelerant.runtime.files import AtomicFile, reason_of

U64 = npt.NDArray[np.uint64]
FilePath = str | os.PathLike[str]

MAX_SECTIONS = 256  # above what any format uses; bounds the memory of the section table
PREFIX = struct.Struct("<4sII")  # File header: magic, version, number of sections
HEAD = struct.Struct("<IQ")  # Section header: id, payload size in bytes

_WORD_BYTES = 8


@dataclass(frozen=True)
class FileFormat:
    """A file format: extension without the dot, first bytes, version, section names by id, mandatory sections."""

    kind: str
    magic: bytes
    version: int
    names: Mapping[int, str]
    required: tuple[int, ...]

    def title(self, number: int) -> str:
        """Return a section's id, and its name if it has one, for messages."""
        return f"section {number} ({self.names[number]})" if number in self.names else f"section {number}"


@dataclass(frozen=True, slots=True)
class FileSection:
    """The position of a section's payload: byte offset in the file and size in bytes."""

    offset: int
    size: int


def _path(path: FilePath) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise UnsupportedDtype(f"a file must be given as a str or a pathlib.Path, got {type(path).__name__}")
    return Path(path)


def regular_file(path: FilePath) -> Path:
    """Return path as a Path; FormatError if the file does not exist, or is a directory, a pipe or a device."""
    file = _path(path)
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        raise MissingFile(f"{file} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise FormatError(f"cannot read {file}: {reason_of(error)}") from None
    if not stat.S_ISREG(mode):
        raise FormatError(f"{file} is not a regular file and cannot be mapped; copy its contents to a file")
    return file


class MappedFile(ABC):
    """A read-only memory mapping of a file in one of the formats; a context manager.

    Attributes:
        family: "bn254" or "bls12_381", from the primes in the file.
        data: the mapping.
        size_bytes: file size in bytes.
        sections: id -> FileSection.
    """

    layout: ClassVar[FileFormat]
    family: str

    def __init__(self, path: FilePath) -> None:
        self.path = regular_file(path)
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < PREFIX.size:
                    message = f"{self.path} is not a .{self.layout.kind} file: it is shorter than the file header"
                    raise FormatError(message)
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._file = os.dup(file.fileno())
                self._closed = weakref.finalize(self, os.close, self._file)
        except FormatError:
            raise
        except OSError as error:
            raise FormatError(f"cannot read {self.path}: {error.strerror or error}") from None
        except ValueError:  # mmap refuses empty files: it was truncated after fstat
            raise FormatError(f"{self.path} was truncated while it was being opened") from None
        self.size_bytes = len(self.data)
        try:
            self.sections = self._read_sections()
            for number in self.layout.required:
                self.require(number)
            self._read()
        except FormatError:
            self.close()
            raise

    @classmethod
    def open(cls, path: FilePath) -> Self:
        """Map a file and validate the sizes of all sections; FormatError names section and offset."""
        return cls(path)

    @abstractmethod
    def _read(self) -> None:
        """Read the parts of fixed size and validate all sizes."""

    @abstractmethod
    def check(self) -> None:
        """Read the whole file and validate what open() does not read; FormatError names section and offset."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what formats.describe says of a file of this format."""

    def close(self) -> None:
        """Release the mapping. Arrays that still refer to it keep it alive."""
        self._closed()
        self._file = -1  # the number may be another file's
        with contextlib.suppress(BufferError):
            self.data.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def copy(self, number: int, start: int, to: U64) -> None:
        """Copy a section from byte `start` into words, in any thread; FormatError if the file is shorter now."""
        at = self.sections[number].offset + start
        if not hasattr(os, "preadv"):
            to.reshape(-1).view(np.uint8)[:] = np.frombuffer(self.data, np.uint8, to.nbytes, at)
            return
        left = to.reshape(-1).view(np.uint8).data
        while left:
            if not (count := os.preadv(self._file, [left], at)):
                raise self.error(number, at - self.sections[number].offset, "the file was truncated while it was read")
            left, at = left[count:], at + count

    def forget(self) -> None:
        """Return the resident pages of the mapping, which count as memory of this process, to the system."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)

    def _read_sections(self) -> dict[int, FileSection]:
        if self.size_bytes < PREFIX.size:
            raise FormatError(f"{self.path} was truncated while it was being opened")
        magic, version, count = PREFIX.unpack_from(self.data)
        path, layout, kind = self.path, self.layout, f".{self.layout.kind}"
        if magic != layout.magic:
            raise FormatError(f"{path} is not a {kind} file: it begins with {magic!r}, not {layout.magic!r}")
        if version != layout.version:
            raise FormatError(f"{path}: byte 4: {kind} version {version}; only version {layout.version} is supported")
        if count > MAX_SECTIONS:
            raise FormatError(f"{path}: byte 8: {count} sections; a {kind} file has at most {MAX_SECTIONS}")
        sections: dict[int, FileSection] = {}
        at = PREFIX.size
        for index in range(count):
            if self.size_bytes - at < HEAD.size:
                raise FormatError(f"{path}: byte {at}: the file ends before section {index + 1} of {count}")
            number, size = HEAD.unpack_from(self.data, at)
            section = FileSection(at + HEAD.size, size)
            if number in sections:
                message = f"duplicate section; the first is at byte {sections[number].offset}"
                raise FormatError(f"{path}: {layout.title(number)}, byte {at}: {message}")
            left = self.size_bytes - section.offset
            if size > left:
                message = f"the section has {size} bytes, but the file has only {left} more"
                raise FormatError(f"{path}: {layout.title(number)}, byte {at}: {message}")
            sections[number] = section
            at = section.offset + size
        if at != self.size_bytes:
            raise FormatError(f"{path}: byte {at}: {self.size_bytes - at} trailing bytes after the last section")
        return sections

    def require(self, number: int) -> None:
        """Raise FormatError unless the section exists."""
        if number not in self.sections:
            raise FormatError(f"{self.path}: {self.layout.title(number)} is missing")

    def error(self, number: int, at: int, message: str) -> FormatError:
        """Return a FormatError for byte `at` of a section's payload; it gives the offset in the file."""
        offset = self.sections[number].offset + at
        return FormatError(f"{self.path}: {self.layout.title(number)}, byte {offset}: {message}")

    def cursor(self, number: int) -> Cursor:
        """Return a Cursor at the start of a section."""
        return Cursor(self, number)

    def expect_size(self, number: int, size: int, why: str) -> None:
        """Raise FormatError unless the section has exactly `size` bytes; `why` says what needs them."""
        if self.sections[number].size != size:
            raise self.error(number, 0, f"{self.sections[number].size} bytes, {why} need {size}")

    def array(self, number: int, dtype: npt.DTypeLike, *, start: int = 0, count: int | None = None) -> Any:
        """Return a read-only view, perhaps unaligned, of a section from byte `start` on; ValueError once closed."""
        section, kind = self.sections[number], np.dtype(dtype)
        items = (section.size - start) // kind.itemsize if count is None else count
        if items < 0 or start + items * kind.itemsize > section.size:
            raise self.error(number, 0, f"{section.size} bytes do not hold {items} of {kind.itemsize}")
        return np.frombuffer(self.data, kind, items, section.offset + start)

    def rows(self, number: int, width: int, *, start: int = 0, count: int | None = None) -> U64:
        """Return a section as rows of 64-bit words, (n, width); see array."""
        words: U64 = self.array(number, np.dtype(f"({width},)<u8"), start=start, count=count)
        return words


class Cursor:
    """A sequential reader of one section, `at` a byte of the payload; reading past its end raises FormatError."""

    def __init__(self, file: MappedFile, number: int) -> None:
        self.file, self.section, self.at = file, number, 0
        self._payload = file.sections[number]

    def error(self, message: str, at: int | None = None) -> FormatError:
        """Return a FormatError for the current offset, or for `at`."""
        return self.file.error(self.section, self.at if at is None else at, message)

    @property
    def left(self) -> int:
        """Unread bytes of the section."""
        return self._payload.size - self.at

    def take(self, size: int, what: str) -> bytes:
        """Read the next `size` bytes; `what` names them in the error."""
        if size > self.left:
            raise self.error(f"the section ends within {what}: {size} bytes needed, {self.left} left")
        start = self._payload.offset + self.at
        self.at += size
        return self.file.data[start : start + size]

    def number(self, what: str, size: int = 4) -> int:
        """Read an unsigned integer of `size` bytes."""
        return int.from_bytes(self.take(size, what), "little")

    def words(self, count: int, what: str) -> U64:
        """Read `count` 64-bit words into a new array."""
        return np.frombuffer(self.take(count * _WORD_BYTES, what), "<u8").astype(np.uint64)

    def until_zero(self, what: str) -> bytes:
        """Read bytes up to a zero byte and skip it."""
        start = self._payload.offset + self.at
        if (size := self.file.data.find(b"\0", start, start + self.left) - start) < 0:
            raise self.error(f"{what} is not terminated by a zero byte")
        return self.take(size + 1, what)[:-1]

    def end(self) -> None:
        """Raise FormatError if the section has unread bytes."""
        if self.left:
            raise self.error(f"{self.left} trailing bytes")


Payload = bytes | npt.NDArray[Any]

_ANYONE, _OWNER = 0o666, 0o600  # Permissions of a new file: readable by anyone the umask allows, or by its owner only


def writable_target(path: FilePath) -> Path:
    """Resolve the path of a file to write, before an expensive computation; ConfigError unless it is a regular file."""
    requested, mode = _path(path), None
    try:
        target = Path(os.path.realpath(requested))
        if in_directory := os.path.isdir(target.parent):
            with contextlib.suppress(FileNotFoundError):
                mode = os.lstat(target).st_mode
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ConfigError(f"{requested} cannot be written: {reason_of(error)}") from None
    if not in_directory:
        raise MissingFile(f"{requested}: the directory {target.parent} does not exist")
    if mode is None or stat.S_ISREG(mode):
        return target
    other = "a directory" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
    what = "a loop of symlinks" if stat.S_ISLNK(mode) else other
    raise ConfigError(f"{requested} is {what}; expected a file name")


def write_container(
    path: FilePath, layout: FileFormat, sections: Mapping[int, Sequence[Payload]], *, secret: bool = False
) -> None:
    """Write sections, bytes or arrays, to a file that replaces an old one at the end; `secret`: for its owner only."""
    target = writable_target(path)
    try:
        with AtomicFile(target, mode=_OWNER if secret else _ANYONE) as file:
            file.write(PREFIX.pack(layout.magic, layout.version, len(sections)))
            for number, payloads in sections.items():
                parts = [x if isinstance(x, bytes) else x.reshape(-1).view(np.uint8).data for x in payloads]
                file.write(HEAD.pack(number, sum(map(len, parts))))
                for part in parts:
                    file.write(part)
    except OSError as error:  # it names the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from None


# --- primes, points and words -----------------------------------------------------------------------------------------
Which = Literal["q", "r"]

_CHUNK_BYTES = 1 << 22  # bytes of a section that are validated at a time


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
    """Read a point for each name, of degree 1 (G1) or 2 (G2); check that coordinates are below q, not membership."""
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
def _check_words(file: MappedFile, number: int, at: int, field: Field, words: U64, what: str) -> None:
    """Raise FormatError if an element is not below the modulus; the message omits the value, which may be secret."""
    wrong = not_below(words.reshape(-1, field.limbs), field.modulus)
    if wrong.size:
        raise file.error(
            number, at + int(wrong[0]) * field.size_bytes, f"{what} is not below the modulus of {field.name}"
        )


def _chunks(words: U64) -> list[slice]:
    rows = max(1, _CHUNK_BYTES // max(1, words.shape[1] * words.itemsize))
    return [slice(start, start + rows) for start in range(0, len(words), rows)]


def check_below(file: MappedFile, number: int, field: Field, words: U64) -> None:
    """Check that the elements of a section's rows are below the modulus; FormatError names the first one's offset."""
    for chunk in _chunks(words):
        at = chunk.start * words.shape[1] * words.itemsize
        _check_words(file, number, at, field, words[chunk], "an element")


def check_points(
    file: MappedFile, number: int, curve: Curve[Any], words: U64, *, subgroup: bool = True,
    named: Sequence[tuple[int, str]] = (),
) -> None:  # fmt: skip
    """Check that points have reduced coordinates and are on the curve and in the subgroup; infinity is.

    `words` are the section's rows, or of reduced points with offsets and names in `named`. FormatError names the first.
    """
    if not named:
        check_below(file, number, curve.coordinates.base, words)
    tests: tuple[tuple[launch.Test, str], ...] = (
        ("off_curve", f"not on {curve.name}"),
        ("off_subgroup", f"on {curve.name} but not in its subgroup of order r"),
    )
    for chunk in _chunks(words):
        points = HOST.contiguous(words[chunk]).reshape(-1, *curve.shape)
        for test, what in tests[: 1 + subgroup]:
            if (first := launch.first_off(HOST, curve, test, points)) is not None:
                index = chunk.start + first
                at, name = named[index] if named else (index * words.shape[1] * words.itemsize, f"point {index}")
                raise file.error(number, at, f"{name} is {what}")


def count_infinities(words: U64) -> int:
    """Count the points at infinity among (n, words per point)."""
    return sum(int(len(part) - part.any(axis=1).sum()) for part in (words[chunk] for chunk in _chunks(words)))


def points_facts(points: Mapping[str, U64], contributions: Sequence[Any]) -> dict[str, Any]:
    """Return the numbers of points by section, and the labels of contributions, as JSON values."""
    counts = {name: {"points": len(words), "infinite": count_infinities(words)} for name, words in points.items()}
    return {"points": counts, "contributions": [contribution.label.facts() for contribution in contributions]}


# --- contributions ---------------------------------------------------------------------------------------------------
KINDS = {0: "contribution", 1: "beacon"}
_NAME, _ITERATIONS, _BEACON = 1, 2, 3
_MAX_LENGTH = 255  # Bytes of a name or of a beacon: the format gives their length in one byte


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

    def facts(self) -> dict[str, Any]:
        """Return the label as JSON values, without what it does not have."""
        beacon = None if self.beacon is None else self.beacon.hex()
        more = {"beacon": beacon, "iterations_exp": self.iterations_exp}
        return {"kind": KINDS[self.kind], "name": self.name} | {k: v for k, v in more.items() if v is not None}


def read_label(cursor: Cursor) -> Label:
    """Read a label; FormatError for an unknown kind or parameter, or parameters out of order or truncated."""
    at = cursor.at
    if (kind := cursor.number("a contribution's kind")) not in KINDS:
        raise cursor.error(f"contribution of kind {kind}; known kinds are 0 and 1 (a beacon)", at)
    if (length := cursor.number("the length of a contribution's parameters")) > cursor.left:
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


def read_contributions(
    cursor: Cursor, family: Family, degrees: Mapping[str, int], hashes: Mapping[str, int]
) -> Iterator[tuple[Label, dict[str, U64], dict[str, bytes]]]:
    """Read a count and so many contributions, which end a section: points as read_points, hashes of so many bytes."""
    for _ in range(cursor.number("the number of contributions")):  # each takes bytes of the section
        points = read_points(cursor, family, degrees, "a contribution's ")
        taken = {name: cursor.take(size, f"a contribution's {name}") for name, size in hashes.items()}
        yield read_label(cursor), points, taken
    cursor.end()


def contribution_payloads(
    family: Family, degrees: Mapping[str, int], points: Mapping[str, U64], hashes: Mapping[str, int], contribution: Any
) -> list[Payload]:
    """Encode what read_contributions reads of one, whose attributes are `hashes` and `label`; all are checked."""
    words = (words_of(points[name], point_words(family, degree), None, name) for name, degree in degrees.items())
    checked = (check_size(getattr(contribution, name), size, name) for name, size in hashes.items())
    return [*words, *checked, _label_bytes(contribution.label)]


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
