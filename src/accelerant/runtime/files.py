"""Atomic file writes, and readers that are safe for untrusted files."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import os
import re
import shutil
import stat
import time
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from decimal import ROUND_CEILING, Context, Decimal
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import numpy as np

MAX_DEPTH = 100  # levels of arrays and objects that `decode_json` reads; real files have fewer than ten

_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # an unterminated string matches to the end, once

_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # brackets as signed bytes: 1 opens a level, -1 closes one
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_SHOWN_BITS = 512  # bits of the largest integer that `clipped` shows whole
_NAME_CHARACTERS = 32
"""Characters of a file's name (at most 128 bytes) in its temporary file's name, which then fits any file system."""


def temporary_path(path: Path) -> Path:
    """Return an unused hidden name in the folder of `path`."""
    return path.with_name(f".{path.name[:_NAME_CHARACTERS]}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def open_regular(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file; OSError for others, which may hang, and symlinks to write. `flags` lacks O_TRUNC."""
    if (writes := bool(flags & (os.O_WRONLY | os.O_RDWR))) and os.path.islink(path):
        raise OSError(errno.ELOOP, "it is a symlink, which is not written through", str(path))
    more = {"O_BINARY", "O_NOCTTY", "O_NONBLOCK", *(["O_NOFOLLOW"] if writes else [])}
    for name in more:
        flags |= getattr(os, name, 0)  # Windows and POSIX have some of them each
    try:
        descriptor = os.open(path, flags, mode)
    except ValueError as error:  # a null byte, or half a surrogate pair
        raise OSError(errno.EINVAL, f"it is no name of a file ({error})", repr(str(path))) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def is_virtual(path: Path | str) -> bool:
    """Return whether a path is in /proc or /sys, whose files may block, not end, or change while they are read."""
    return os.stat(path).st_dev in _virtual_devices()


@functools.cache
def _virtual_devices() -> set[int]:
    return {os.stat(root).st_dev for root in ("/proc", "/sys") if os.path.ismount(root)}


def read_regular(path: Path | str, most_bytes: int = 1 << 26) -> bytes:
    """Return the contents of a regular file; raise OSError for another, or a longer one."""
    with open(open_regular(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most_bytes:,}", str(path))
        return file.read(size)


def reason_of(error: Exception) -> object:
    """Return what an error says of a file that the message names already."""
    return getattr(error, "strerror", None) or error


class AtomicFile:
    """A new file that replaces `path`, in a folder that exists, when it is committed, and is removed when it is not.

    A killed process leaves the old file, and the temporary one, which the next AtomicFile of `path` removes. A symlink
    is replaced, not followed; a device, a pipe and a folder are refused.
    """

    def __init__(self, path: Path, *, mode: int = 0o666) -> None:
        self.path = path
        of_process = os.path.islink(path) and os.readlink(path).startswith("/proc/")  # as /dev/stdout is
        if of_process or (os.path.exists(path) and not os.path.isfile(path)):  # root may replace /dev/null for all
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        remove_leftovers(path.parent, path.name)
        self.temporary = temporary_path(path)
        try:
            descriptor = open_regular(self.temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)
        except OSError as error:
            raise self._named(error) from None
        _lock(descriptor)
        self.file: BinaryIO = os.fdopen(descriptor, "wb")

    def flush(self) -> None:
        """Wait until what was written is on the disk."""
        self.file.flush()
        with open(open_regular(self.temporary, os.O_RDWR), "rb+") as written:  # another writer may have replaced it
            os.fsync(written.fileno())

    def commit(self) -> None:
        """Flush the file to disk and rename it to `path`."""
        try:
            with open(open_regular(self.temporary, os.O_RDWR), "rb+") as written:  # another writer may have replaced it
                locked = _lock(written.fileno())  # before self.file, which is locked, is closed
                self.file.close()
                os.fsync(written.fileno())
                if locked:
                    os.replace(self.temporary, self.path)
            if not locked:  # Windows, which has no such locks, does not rename open files
                os.replace(self.temporary, self.path)
        except OSError as error:
            self.discard()
            raise self._named(error) from None

    def discard(self) -> None:
        """Close and remove the temporary file; does nothing after a commit."""
        with contextlib.suppress(OSError):
            self.file.close()  # flushes its buffer, which fails again on a full disk
        self.temporary.unlink(missing_ok=True)

    def _named(self, error: OSError) -> OSError:
        """Return the error with the name of the file that the caller knows."""
        return OSError(error.errno, error.strerror, str(self.path)) if error.errno is not None else error

    def __enter__(self) -> BinaryIO:
        return self.file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.commit()
            return
        self.discard()
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(self.temporary)):
            raise self._named(error) from None


_TEMPORARY = re.compile(r"(\..*\.)[0-9]+\.[0-9a-f]{8}\.tmp", re.DOTALL)

_FRESH_S = 0.1
"""Age of a temporary file, since its last write, from which it belongs to a killed writer if it is unlocked. A living
writer locks its file within microseconds of creating it."""


def _lock(descriptor: int, *, alone: bool = False) -> bool:
    """Lock a file until it is closed, as its writers do, or `alone`; return whether that succeeded."""
    try:
        import fcntl

        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except (ImportError, OSError):  # not on this system, or on this file system
        return False
    return True


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove temporary files, of the file of that name or of all files in a folder, whose writers were killed."""
    prefix = None if name is None else f".{name[:_NAME_CHARACTERS]}."
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name)
            if not match or prefix not in (None, match[1]) or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError), open(open_regular(entry.path, os.O_RDWR), "rb+") as leftover:
                old = abs(time.time() - os.fstat(leftover.fileno()).st_mtime) > _FRESH_S
                if old and _lock(leftover.fileno(), alone=True):
                    os.unlink(entry.path)


def remove_folder_of(pid: int, folder: str) -> None:
    """Remove a temporary folder, at the end of the process that made it and not of its forked children."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


Content = bytes | Callable[[Path], None]
"""What a file is to have, or a function that writes the file whose path it is given."""


def write_atomic(path: Path, content: Content) -> None:
    """Write a file under a temporary name in its existing folder, flush it to disk, then rename it."""
    write_together({path: content})


def write_together(contents: Mapping[Path, Content], remove: Iterable[Path] = ()) -> None:
    """Write files as write_atomic does, replacing old ones when all are written; `remove` is deleted before."""
    with contextlib.ExitStack() as stack:  # which commits the last first
        for path, content in reversed(list(contents.items())):
            atomic = AtomicFile(path)
            file = stack.enter_context(atomic)
            if callable(content):
                mode = atomic.temporary.stat().st_mode  # follows the umask; safetensors makes its files private
                content(atomic.temporary)
                atomic.temporary.chmod(mode)
            else:
                file.write(content)
            if len(contents) > 1:
                atomic.flush()
        for path in remove:
            path.unlink(missing_ok=True)


class JsonRecord:
    """Base class of dataclasses that are written as JSON."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, for JSON."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]  # subclasses are dataclasses


def decode_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Return the value of a JSON text; ValueError for another text, deep nesting and, if `unique`, a repeated name."""
    decoded = text.decode("utf-8") if isinstance(text, bytes) else text
    if decoded.count("[") + decoded.count("{") > MAX_DEPTH:
        brackets = _STRING.sub("", decoded).encode("utf-8", "surrogatepass").translate(_STEPS, _NO_BRACKETS)
        if max(itertools.accumulate(memoryview(brackets).cast("b")), default=0) > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels of arrays and objects")
    if not decoded.strip():
        raise ValueError("it is empty")
    if unique:
        return json.loads(decoded, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    return json.loads(decoded)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the name {clipped(twice)} is given twice in one object")
    return found


_WORDS = {int: "a whole number of at most 63 bits", float: "a number", bool: "true or false", str: "text"}


@functools.cache
def _fields(kind: type) -> tuple[dict[str, Any], set[str]]:
    """Return the types of a dataclass's fields, and the fields without a default."""
    missing, fields = dataclasses.MISSING, dataclasses.fields(kind)
    needed = {field.name for field in fields if field.default is missing and field.default_factory is missing}
    return typing.get_type_hints(kind), needed


def typed(kind: Any, value: object, name: str = "the value") -> Any:
    """Return a JSON value as a dataclass, list, Literal, union or other type; ValueError names a part that is none."""
    if kind in _WORDS and (type(value) is kind or (kind is float and type(value) is int)) and _fits(value):
        return kind(value)  # type: ignore[call-arg]  # first, for speed
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _record(kind, typed(dict[str, Any], value, name), name)
    if kind is Any or (kind is types.NoneType and value is None):
        return value
    if origin is types.UnionType:
        for option in inner if value is not None else (types.NoneType,) * (types.NoneType in inner):
            with contextlib.suppress(ValueError):
                return typed(option, value, name)
    elif origin is typing.Literal and isinstance(value, str) and value in inner:
        return value
    elif origin in (dict, Mapping) and isinstance(value, dict):
        if inner[1] is Any:
            return value
        return {key: typed(inner[1], item, f"{name}[{clipped(key)}]") for key, item in value.items()}
    elif origin in (list, tuple) and isinstance(value, list):
        every = [inner[0]] * len(value) if origin is list or inner[-1] is Ellipsis else inner
        if len(every) == len(value):
            return origin(typed(each, value[i], f"{name}[{i}]") for i, each in enumerate(every))
    raise ValueError(f"{name} must be {_words(kind)}, got {clipped(value)}")


def _record(kind: Any, given: dict[str, Any], name: str) -> Any:
    """Return a dataclass of JSON values; raise ValueError for one that is missing, unknown or of another type."""
    hints, needed = _fields(kind)
    for what, names in (("lacks the", needed - given.keys()), ("has an unknown", given.keys() - hints.keys())):
        if names:
            raise ValueError(f"{name} {what} field {clipped(min(names))}")
    return kind(**{field: typed(hints[field], value, field) for field, value in given.items()})


def _fits(value: object) -> bool:
    return not isinstance(value, int) or abs(value) < 1 << 63


def _words(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Literal):
        return " or ".join(repr(part) if isinstance(part, str) else _words(part) for part in inner)
    if origin in (list, tuple):
        return "a list" if origin is list or inner[-1] is Ellipsis else f"a list of {len(inner)} values"
    return "null" if kind is types.NoneType else _WORDS.get(kind, "an object")


_NPY_ERRORS = (
    SyntaxError, TokenError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError,
    EOFError,
)  # fmt: skip
"""Errors, beside ValueError, that NumPy, which parses a header as Python, raises for a malformed one."""


def npy_header(stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a .npy array; return shape, whether in Fortran order, and dtype, or raise ValueError."""
    import numpy as np

    try:
        version = np.lib.format.read_magic(stream)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"version {version} is not 1.0 or 2.0")
        shape, fortran, dtype = readers[version](stream)
    except _NPY_ERRORS as error:
        raise ValueError(f"{type(error).__name__} in its header") from None
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"the shape must be whole numbers, got {clipped(shape)}")
    return shape, fortran, dtype


def clipped(value: object, length: int = 80, *, hexadecimal: bool = False) -> str:
    """Return the start of a value's representation, for messages; of a long integer, the first 64 bits."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        bits = value.bit_length()
        return f"{'-' * (value < 0)}{abs(value) >> bits - 64:#x}... (an integer of {bits:,} bits)"
    if isinstance(value, int):
        return f"{value:#x}" if hexadecimal else repr(value)
    try:
        text = repr(value[: length + 1] if isinstance(value, str) else value)
    except ValueError:
        return f"a {type(value).__name__} with an integer of more digits than Python prints"
    return text if len(text) <= length else f"{text[:length]}{text[0] if isinstance(value, str) else ''}..."


def plain(value: float | None, digits: int = 4, *, up: bool = False) -> str:
    """Return a number in some digits without an exponent: 12,350, 0.0000123; "-" for None. `up` rounds up."""
    if value is None:
        return "-"
    if up:
        value = float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(value)))
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text
    return f"{float(text):,.0f}" if abs(value) >= 1 else f"{Decimal(text):f}"


def exact(value: float) -> str:
    """Return a number in six digits if it has no more, else in all of them: 1e-05, 0.25, 1.23456789e-07."""
    text = f"{value:g}"
    return text if float(text) == value else repr(value)


def escaped(text: object) -> str:
    """Return untrusted text in one line, with characters escaped that a terminal would interpret or cannot print."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in str(text))
