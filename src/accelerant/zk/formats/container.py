"""The binary container of circom and snarkjs files: magic, version, sections.

    magic (4 bytes), u32 version, u32 number of sections, then for each section u32 id, u64 size, payload

All integers are little-endian. Sections may come in any order; unknown section ids are ignored.
Source: iden3/binfileutils, and the .r1cs format documented in iden3/r1csfile.

Files are untrusted. They are mapped, not read: no allocation depends on a size claimed by the file before the file is
known to contain that many bytes. A section that extends past the end of the file, is duplicated or missing, and
trailing bytes raise FormatError with the file, the section and the offset. The checks hold as long as no other program
modifies the file: if a mapped file is truncated, reading it ends the process (SIGBUS), as for any mapped file.
write_container replaces files atomically and never truncates one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from accelerant.errors import ConfigError, FormatError, UnsupportedDtype
from accelerant.runtime.files import AtomicFile

U64 = npt.NDArray[np.uint64]
FilePath = str | os.PathLike[str]

MAX_SECTIONS = 256
"""Upper bound on the sections of a file, above what any format uses; bounds the memory of the section table."""

PREFIX = struct.Struct("<4sII")
"""File header: magic, version, number of sections."""

HEAD = struct.Struct("<IQ")
"""Section header: id, payload size in bytes."""

_WORD_BYTES = 8


@dataclass(frozen=True)
class Layout:
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
class Section:
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
        raise FormatError(f"{file} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise FormatError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(mode):
        raise FormatError(f"{file} is not a regular file and cannot be mapped; copy its contents to a file")
    return file


class MappedFile(ABC):
    """A read-only memory mapping of a file in one of the formats; a context manager.

    Attributes:
        family: "bn254" or "bls12_381", from the primes in the file.
        data: the mapping.
        size_bytes: file size in bytes.
        sections: id -> Section.
    """

    layout: ClassVar[Layout]
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
        """Map a file, read the parts of fixed size and validate the sizes of all sections.

        Raises:
            FormatError: the file does not exist, has another format, or is inconsistent; names section and offset.
        """
        return cls(path)

    @abstractmethod
    def _read(self) -> None:
        """Read the parts of fixed size and validate all sizes."""

    @abstractmethod
    def check(self) -> None:
        """Read the whole file and validate the contents that open() does not read.

        Raises:
            FormatError: names the section and the offset.
        """

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
        """Copy a section from byte `start` on into words, which are contiguous; FormatError if the file is shorter now.

        Several threads may copy parts: reading costs less than half of the page faults of a new mapping.
        """
        at = self.sections[number].offset + start
        if not hasattr(os, "preadv"):
            to.reshape(-1).view(np.uint8)[:] = np.frombuffer(self.data, np.uint8, to.nbytes, at)
            return
        left = to.reshape(-1).view(np.uint8).data
        while left:
            count = os.preadv(self._file, [left], at)
            if not count:
                raise self.error(number, at - self.sections[number].offset, "the file was truncated while it was read")
            left, at = left[count:], at + count

    def forget(self) -> None:
        """Return the resident pages of the mapping to the system (madvise MADV_DONTNEED, where available).

        Resident pages count towards the memory of this process. Later accesses read them from the file again.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)

    def _read_sections(self) -> dict[int, Section]:
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
        sections: dict[int, Section] = {}
        at = PREFIX.size
        for index in range(count):
            if self.size_bytes - at < HEAD.size:
                raise FormatError(f"{path}: byte {at}: the file ends before section {index + 1} of {count}")
            number, size = HEAD.unpack_from(self.data, at)
            section = Section(at + HEAD.size, size)
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
        """Return a read-only view, possibly unaligned, of a section from byte `start` on; by default all that fits.

        Raises ValueError once the file is closed.
        """
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
    """A sequential reader of one section; reading past its end raises FormatError.

    Attributes:
        section: id of the section.
        at: offset of the next byte in the payload.
    """

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
        size = self.file.data.find(b"\0", start, start + self.left) - start
        if size < 0:
            raise self.error(f"{what} is not terminated by a zero byte")
        return self.take(size + 1, what)[:-1]

    def end(self) -> None:
        """Raise FormatError if the section has unread bytes."""
        if self.left:
            raise self.error(f"{self.left} trailing bytes")


Payload = bytes | npt.NDArray[Any]

_ANYONE, _OWNER = 0o666, 0o600
"""Permissions of a new file: readable by anyone the umask allows, or by its owner only."""


def writable_target(path: FilePath) -> Path:
    """Resolve the path of a file to write; call it before an expensive computation.

    A rename would replace a device or a pipe, and a symlink rather than its target: symlinks are followed, and anything
    but a regular file is refused.

    Raises:
        ConfigError: the directory does not exist, the path is invalid, or it names a directory, a device, a pipe or a
            loop of symlinks.
    """
    requested, mode = _path(path), None
    try:
        target = Path(os.path.realpath(requested))
        in_directory = os.path.isdir(target.parent)
        if in_directory:
            with contextlib.suppress(FileNotFoundError):
                mode = os.lstat(target).st_mode
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ConfigError(f"{requested} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    if not in_directory:
        raise ConfigError(f"{requested}: the directory {target.parent} does not exist")
    if mode is None or stat.S_ISREG(mode):
        return target
    other = "a directory" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
    what = "a loop of symlinks" if stat.S_ISLNK(mode) else other
    raise ConfigError(f"{requested} is {what}; expected a file name")


def write_container(
    path: FilePath, layout: Layout, sections: Mapping[int, Sequence[Payload]], *, secret: bool = False
) -> None:
    """Write a file atomically: to a temporary file in the same directory, which is then renamed.

    Args:
        path: an existing regular file is replaced; of a symlink, its target.
        sections: id -> bytes and contiguous little-endian arrays, concatenated.
        secret: make the file readable by its owner only.

    Raises:
        ConfigError: path does not name a regular file (writable_target).
        OSError: the directory is not writable or the disk is full; an existing file is unchanged.
    """
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
