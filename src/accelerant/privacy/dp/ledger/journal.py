"""An append-only file of JSON records from which a crash cannot remove records unnoticed.

A line is {"record": {...}, "chain": "<hex>"}. Its chain is the SHA-256 of the previous chain and the record, so that an
edited, moved or removed line breaks it. Lines cut off at the end are detected by `<file>.head`, which holds the number
of lines and the last chain; after a crash it may be one line behind the file, never ahead. Where it is behind or
missing, the journal says so (`unguarded`). There is no key: this detects accidents, not an adversary who writes a new
file.

One process writes, under the kernel's lock on the file, which ends with the process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.files import decode_json, open_regular, read_regular

_START: Final = "0" * 64
_LINE: Final = b'{"record":{"kind":"'

Record = dict[str, Any]

_OPEN: weakref.WeakSet[Journal] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the child's copies of the descriptors: a worker that outlives its parent must not hold the lock."""
    for journal in list(_OPEN):
        journal.close(unlock=False)  # the parent still needs its lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Contents(NamedTuple):
    """The contents of a file.

    Attributes:
        size_bytes: of the records' lines; the rest of the file is a torn line.
        unguarded: why lines could have been cut off at the end unnoticed; empty if they could not.
    """

    records: list[Record]
    chain: str
    size_bytes: int
    unguarded: str


class Journal:
    """A file opened for appending, and the records that it had.

    Args:
        path: created if absent, readable by all and writable by its owner, subject to the umask.

    Attributes:
        torn_bytes: length of a last line that a crash cut short, and that was dropped. `append` never returned from it.

    Raises:
        ConfigError: another process writes to it, or it cannot be opened or locked.
        FormatError: it was cut or edited; the message names the line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = path.absolute()  # the process may change its folder
        self._file = -1
        self._process = os.getpid()
        try:
            created = not path.exists()
            _OPEN.add(self)
            self._file = open_regular(path, os.O_RDWR | os.O_CREAT, 0o644)
            _lock(self._file, path)
            self.records, self._chain, self._size, unguarded = read_journal(path)
            self.unguarded = "" if created else unguarded
            self.torn_bytes = os.fstat(self._file).st_size - self._size
            if self.torn_bytes:
                os.ftruncate(self._file, self._size)
            if created and sys.platform != "win32":  # where folders cannot be opened
                folder = os.open(path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)  # so that the new file's name survives a power failure
                finally:
                    os.close(folder)
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot write to the ledger {path}: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise
        self._lines = len(self.records)

    def append(self, record: Record) -> None:
        """Append a record; it is on the disk when this returns.

        Raises:
            ConfigError: the journal is closed, or was opened by the parent that this process was forked from; the file
                was deleted, replaced or changed by another program.
            OSError: the disk is full or fails; the file is as before, or the journal is closed.
        """
        self.require_open()
        self._require_same()
        chain = _next_chain(self._chain, record)
        line = json.dumps({"record": record, "chain": chain}, separators=(",", ":")).encode() + b"\n"
        try:
            os.lseek(self._file, self._size, os.SEEK_SET)
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(self._file)
            self._chain, self._size, self._lines = chain, self._size + len(line), self._lines + 1
        except BaseException:  # Ctrl-C, too
            try:  # no line may follow a partial one, or one that may not be on the disk
                os.ftruncate(self._file, self._size)
                os.fsync(self._file)
            except OSError:
                self.close()
            raise
        with contextlib.suppress(OSError):  # a read-only folder
            # Not synced: after a power failure the head may be old or empty, which only weakens the check.
            head = open_regular(_head_path(self.path), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.write(head, f"{self._lines:012d} {self._chain}\n".encode())  # of constant length
            finally:
                os.close(head)

    def require_open(self) -> None:
        """Check that this process may append; errors of `append`."""
        if os.getpid() != self._process:
            raise ConfigError(
                f"the ledger {self.path} was opened by process {self._process}: only that one writes to it"
            )
        if self._file < 0:
            raise ConfigError(f"the ledger {self.path} is closed: open it again to add to it")

    def _require_same(self) -> None:
        """Raise ConfigError if the file of this name is not the one that was opened, with the lines that it had."""
        opened = os.fstat(self._file)
        try:
            same = os.path.samestat(opened, self.path.stat())
        except OSError:
            same = False
        if not same or opened.st_size != self._size:
            raise ConfigError(
                f"the ledger {self.path} was deleted, replaced or changed by another program since it was opened: what "
                "is done from now on would not be recorded. Restore it, and open it again"
            )

    def close(self, *, unlock: bool = True) -> None:
        """Close the file and release the lock, even while a child that was just forked still has the file open."""
        file, self._file = self._file, -1
        if file >= 0:
            if unlock and sys.platform != "win32":
                import fcntl

                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def __reduce__(self) -> NoReturn:
        raise ConfigError(f"the ledger {self.path} is open: it can be neither copied nor pickled")


def read_journal(path: Path) -> Contents:
    """Return the contents of a file; FormatError names a line that was edited, is missing or is no record."""
    head_path, unguarded = _head_path(path), ""
    try:  # before the file: another process may be writing
        head, head_chain = read_regular(head_path).decode("ascii").split()
        head_lines = int(head)
    except (OSError, ValueError):
        head_lines, head_chain, unguarded = 0, "", f"{head_path.name} was missing or not readable"
    *lines, torn = read_regular(path, 1 << 32).split(b"\n")
    records: list[Record] = []
    chain = _START
    for number, line in enumerate(lines, 1):
        try:
            entry = decode_json(line)
            record, claimed = entry["record"], entry["chain"]
        except (ValueError, KeyError, TypeError):
            record = claimed = None
        if not isinstance(record, dict) or not isinstance(claimed, str):
            raise FormatError(f"{path}, line {number}: no record of a privacy ledger")
        chain = _next_chain(chain, record)
        if chain != claimed:
            raise FormatError(
                f"{path}, line {number}: its checksum does not follow from the lines before it: the file was edited, "
                "or lines were taken out. Go back to an untouched copy"
            )
        if number == head_lines and chain != head_chain:
            raise FormatError(f"{path}, line {number}: {head_path.name} belongs to another ledger")
        records.append(record)
    begin = torn.rstrip(b"\0")  # a power failure may leave zeros
    if not _LINE.startswith(begin[: len(_LINE)]):  # a writer drops a torn line
        raise FormatError(f"{path}, line {len(lines) + 1}: no record of a privacy ledger")
    if head_lines > len(lines):
        raise FormatError(
            f"{path}, line {len(lines) + 1}: the file ends here, and had {head_lines} lines: it was cut. Go back to an "
            "untouched copy"
        )
    if head_lines < len(lines) and not unguarded:
        unguarded = f"{head_path.name} knew {head_lines} of {len(lines)} lines"
    return Contents(records, chain, sum(len(line) + 1 for line in lines), unguarded)


def _next_chain(chain: str, record: Record) -> str:
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{chain}{canonical}".encode()).hexdigest()


def _head_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.head")


def _lock(file: int, path: Path) -> None:
    """Take the kernel's lock on an open file; it ends with the last descriptor at the latest."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(file, 1 << 40, os.SEEK_SET)  # beyond the end: locked bytes cannot be read there
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            raise ConfigError(
                f"the ledger {path} is open in another process, or elsewhere in this one: one at a time writes to it"
            ) from None
        raise
