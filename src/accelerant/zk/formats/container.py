"""The container that circom and snarkjs keep their binary files in: magic, version, sections.

    magic (4 bytes), u32 version, u32 number of sections, then for each section u32 id, u64 size, payload

All little-endian. Sections are looked up by id, in whatever order they come; ids that a format does not know are left
alone. Source: iden3/binfileutils, and the format of .r1cs that iden3/r1csfile documents.

Files come from strangers. A file is mapped, not read: nothing is allocated by a size that the file claims before the
file is known to hold it. Sections that reach past the end, come twice, are missing, or leave bytes over are refused
with a FormatError that names the file, the section and the offset. What was checked holds for as long as nobody else
writes to the file: one that another program shortens while it is mapped ends the process (SIGBUS), as with every
mapped file. write_container never does that: it puts a new file in the place of the old one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from accelerant.errors import FormatError

__all__ = [
    "HEAD",
    "MAX_SECTIONS",
    "PREFIX",
    "Container",
    "Cursor",
    "FilePath",
    "Layout",
    "MappedFile",
    "Section",
    "regular_file",
]

U64 = npt.NDArray[np.uint64]
FilePath = str | os.PathLike[str]

MAX_SECTIONS = 256
"""More than any of the formats has: a file of nothing but empty sections shall not become a table larger than it."""

PREFIX = struct.Struct("<4sII")
"""Of a file: magic, version, number of sections."""

HEAD = struct.Struct("<IQ")
"""Of a section: id, size in bytes."""

_WORD_BYTES = 8


@dataclass(frozen=True)
class Layout:
    """What a format has in the container.

    Attributes:
        kind: as files of the format end, without the dot.
        magic: the first four bytes.
        version: the one that is read and written.
        names: section id -> what it holds, for messages.
        required: ids without which a file is refused.
    """

    kind: str
    magic: bytes
    version: int
    names: Mapping[int, str]
    required: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Where a section's payload lies.

    Attributes:
        id: its number.
        offset: of the payload, bytes from the file's start.
        size: of the payload, bytes.
    """

    id: int
    offset: int
    size: int


def regular_file(path: FilePath) -> Path:
    """A regular file's path.

    Raises:
        FormatError: there is no such file, or it is a folder, a pipe or a device.
    """
    found = Path(path)
    try:
        mode = found.stat().st_mode
    except FileNotFoundError:
        raise FormatError(f"no file {found}") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise FormatError(f"cannot read {found}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(mode):
        raise FormatError(f"{found} is no regular file: it has to be mapped; copy it into one")
    return found


class Container:
    """A file's sections, mapped read-only.

    Attributes:
        path: of the file.
        layout: of the format.
        size: of the file, bytes.
        sections: id -> where its payload lies.
    """

    def __init__(self, path: FilePath, layout: Layout) -> None:
        """Map the file and find its sections.

        Raises:
            FormatError: it is not there, not of this format, or its sections do not fill it exactly.
        """
        self.path = regular_file(path)
        self.layout = layout
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < PREFIX.size:
                    raise FormatError(f"{self.path} is no .{layout.kind} file: it is shorter than a file's head")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FormatError:
            raise
        except OSError as error:
            raise FormatError(f"cannot read {self.path}: {error.strerror or error}") from None
        except ValueError:  # mmap's, of an empty file: it was not empty when it was asked
            raise FormatError(f"{self.path} was emptied while it was opened") from None
        self.size = len(self._map)
        try:
            self.sections = self._found()
        except FormatError:
            self.close()
            raise

    def close(self) -> None:
        """Give the mapping back; arrays that are still in use keep it until they go."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def forget(self) -> None:
        """Give the pages that were read back to the system; they are read again where they are asked for again.

        Until then they count as this process's memory. Where the system has no such call they stay.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _found(self) -> dict[int, Section]:
        if self.size < PREFIX.size:
            raise FormatError(f"{self.path} was shortened while it was opened")
        magic, version, count = PREFIX.unpack_from(self._map)
        layout = self.layout
        if magic != layout.magic:
            raise FormatError(f"{self.path} is no .{layout.kind} file: it begins with {magic!r}, not {layout.magic!r}")
        if version != layout.version:
            raise FormatError(
                f"{self.path}: byte 4: .{layout.kind} version {version}, this program reads version {layout.version}"
            )
        if count > MAX_SECTIONS:
            raise FormatError(f"{self.path}: byte 8: {count} sections, no .{layout.kind} file has over {MAX_SECTIONS}")
        found: dict[int, Section] = {}
        at = PREFIX.size
        for index in range(count):
            if self.size - at < HEAD.size:
                raise FormatError(f"{self.path}: byte {at}: the file ends before section {index + 1} of {count}")
            number, size = HEAD.unpack_from(self._map, at)
            section = Section(number, at + HEAD.size, size)
            if number in found:
                first = found[number].offset
                raise self.error(number, at, f"the section comes twice; the first is at byte {first}")
            if size > self.size - section.offset:
                left = self.size - section.offset
                raise self.error(number, at, f"the section has {size} bytes, the file {left} more")
            found[number] = section
            at = section.offset + size
        if at != self.size:
            raise FormatError(f"{self.path}: byte {at}: {self.size - at} bytes after the last section")
        for number in layout.required:
            self._require(number, found)
        return found

    def require(self, number: int) -> None:
        """Refuse a file without a section.

        Raises:
            FormatError: names it.
        """
        self._require(number, self.sections)

    def _require(self, number: int, found: Mapping[int, Section]) -> None:
        if number not in found:
            raise FormatError(f"{self.path}: section {number} ({self.layout.names[number]}) is missing")

    def error(self, number: int, offset: int, message: str) -> FormatError:
        """The error of a section, to raise."""
        name = self.layout.names.get(number)
        return FormatError(f"{self.path}: section {number}{f' ({name})' if name else ''}, byte {offset}: {message}")

    def cursor(self, number: int) -> Cursor:
        """What reads a section from its start."""
        return Cursor(self, self.sections[number])

    def expect_size(self, number: int, size: int, why: str) -> None:
        """Refuse a section that has not exactly these bytes.

        Raises:
            FormatError: names both, and why so many are wanted.
        """
        section = self.sections[number]
        if section.size != size:
            raise self.error(number, section.offset, f"{section.size} bytes, {why} need {size}")

    def array(self, number: int, dtype: npt.DTypeLike, *, start: int = 0, count: int | None = None) -> Any:
        """A section's bytes as an array, read-only and not copied; it need not be aligned.

        Args:
            number: of a section whose size has been found right.
            dtype: of the elements.
            start: of the array in the payload, bytes.
            count: of elements; as many as there are by default.

        Raises:
            ValueError: the file was closed.
        """
        section, kind = self.sections[number], np.dtype(dtype)
        found = (section.size - start) // kind.itemsize if count is None else count
        if found < 0 or start + found * kind.itemsize > section.size:
            raise self.error(number, section.offset, f"{section.size} bytes do not hold {found} of {kind.itemsize}")
        return np.frombuffer(self._map, kind, found, section.offset + start)

    def rows(self, number: int, width: int, *, start: int = 0, count: int | None = None) -> U64:
        """A section's bytes as rows of 64-bit words, (n, width); as array."""
        words: U64 = self.array(number, np.dtype(f"({width},)<u8"), start=start, count=count)
        return words

    def overlapping(self, number: int, dtype: np.dtype[Any], step: int) -> Any:
        """Every step bytes of a section an element as long as dtype says; read-only, as array."""
        section = self.sections[number]
        count = max(0, (section.size - dtype.itemsize) // step + 1)
        return np.ndarray((count,), dtype, self._map, section.offset, (step,))

    def words32(self, number: int) -> memoryview:
        """A section of a multiple of 4 bytes as 32-bit words; what has it releases it."""
        section = self.sections[number]
        with memoryview(self._map) as whole, whole[section.offset : section.offset + section.size] as part:
            return part.cast("I")

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Bytes of the file that are known to be there."""
        return self._map[offset : offset + size]

    def find(self, value: bytes, start: int, end: int) -> int:
        """The offset of bytes between two, -1 where they are not there."""
        return self._map.find(value, start, end)


class Cursor:
    """Reads a section's payload piece by piece; past its end is an error.

    Attributes:
        at: the offset of the next byte in the file.
    """

    def __init__(self, container: Container, section: Section) -> None:
        self.container = container
        self.section = section
        self.at = section.offset

    def error(self, message: str, at: int | None = None) -> FormatError:
        """The error of this place, or of another, to raise."""
        return self.container.error(self.section.id, self.at if at is None else at, message)

    @property
    def left(self) -> int:
        """Bytes of the payload that were not read."""
        return self.section.offset + self.section.size - self.at

    def take(self, size: int, what: str) -> bytes:
        """The next bytes.

        Raises:
            FormatError: the section ends before.
        """
        if size > self.left:
            raise self.error(f"the section ends in {what}: it needs {size} bytes, {self.left} are left")
        data = self.container.bytes_at(self.at, size)
        self.at += size
        return data

    def number(self, size: int, what: str) -> int:
        """An unsigned integer of so many bytes."""
        return int.from_bytes(self.take(size, what), "little")

    def u32(self, what: str) -> int:
        """An unsigned integer of four bytes."""
        return self.number(4, what)

    def words(self, count: int, what: str) -> U64:
        """So many 64-bit words, copied."""
        data = self.take(count * _WORD_BYTES, what)
        words: U64 = np.frombuffer(data, "<u8").astype(np.uint64)
        return words

    def until_zero(self, what: str) -> bytes:
        """Bytes up to a zero byte, which is passed over.

        Raises:
            FormatError: the section has none.
        """
        size = self.container.find(b"\0", self.at, self.at + self.left) - self.at
        if size < 0:
            raise self.error(f"no zero byte ends {what}")
        return self.take(size + 1, what)[:-1]

    def end(self) -> None:
        """Refuse bytes left over.

        Raises:
            FormatError: there are.
        """
        if self.left:
            raise self.error(f"{self.left} bytes more than the section needs")


class MappedFile(ABC):
    """A file of one of the formats, mapped. A context manager.

    Attributes:
        layout: of the format.
        path: of the file.
        family: "bn254" or "bls12_381", by the primes in the file.
    """

    layout: ClassVar[Layout]
    family: str

    def __init__(self, container: Container) -> None:
        """Of a file's sections; open() is how to make one."""
        self._container = container
        self.path = container.path
        self._read(container)

    @classmethod
    def open(cls, path: FilePath) -> Self:
        """Map a file: everything is read of which the size does not grow with the circuit, and all sizes are checked.

        Raises:
            FormatError: it is not there, of another format, or not what it claims; names section and offset.
        """
        container = Container(path, cls.layout)
        try:
            return cls(container)
        except FormatError:
            container.close()
            raise

    @abstractmethod
    def _read(self, container: Container) -> None:
        """Read what open() reads."""

    @abstractmethod
    def check(self) -> None:
        """Read the whole file and refuse what open() did not see.

        Raises:
            FormatError: names section and offset.
        """

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return self._container.size

    def close(self) -> None:
        """Give the mapping back; arrays still in use keep it."""
        self._container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
