"""The disk cache of compiled kernels.

One folder an entry, named by the hash of everything the result depends on:

    <cache_dir>/kernels/<sha256>/code          machine code
    <cache_dir>/kernels/<sha256>/report.json   name, target, compiler, registers, spills, shared memory, log

An entry is written under a temporary name and renamed, so that readers see all of it or nothing; its checksum finds a
torn or altered one. A problem with the cache costs time and one warning a process, never a result.

Code from here runs with the rights of the process, so the folder is created for its user alone (0700). It is bypassed,
as is an entry, if it belongs to another user than root, may be written by the group or by everyone, or is a symlink.
Windows has no such modes. A folder that root wrote into the image of a container serves every user who may read it.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerant.config import settings
from accelerant.errors import ConfigError
from accelerant.runtime.compilation.kernel import Binary, Resources
from accelerant.runtime.files import JsonRecord, decode_json
from accelerant.runtime.host import fork_safe

_FORMAT = 2
_KEY = re.compile("[0-9a-f]{64}")
_FILES = ("report.json", "code")
_HAS_MODES = os.open in os.supports_dir_fd  # not on Windows
_TEMPORARY = ".new-"
KNOWN = ".known-"
"""Prefix of empty files which note that the kernels of a model are there."""
_LEFTOVER_S = 3600.0
"""Age from which a temporary folder is taken for a dead process's: it is renamed within milliseconds."""

_log = logging.getLogger("accelerant.cache")
_lock = fork_safe(threading.Lock())
_warned: set[Path] = set()  # folders and entries that a warning was given for
_swept: set[Path] = set()  # folders that were searched for leftovers


def kernel_key(**parts: object) -> str:
    """Return the SHA-256, in hexadecimal, of the named parts; order does not matter."""
    text = json.dumps({"format": _FORMAT, **parts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CacheEntry(JsonRecord):
    """A compiled source on disk; a damaged one, or one that another user could write (not `trusted`), is not used."""

    key: str
    name: str
    target: str
    compiler: str
    size_bytes: int
    age_s: float
    registers: int | None
    damage: str = ""
    trusted: bool = True


_watchers: list[Callable[[bool], None]] = []


@contextlib.contextmanager
def watch_compilation(watch: Callable[[bool], None]) -> Iterator[None]:
    """Call `watch` in a block of code, with True when a thread begins to compile a kernel, with False when it ends."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Report to the watchers that a kernel is compiled in this block."""
    watchers = list(_watchers)
    for watch in watchers:
        watch(True)
    try:
        yield
    finally:
        for watch in watchers:
            watch(False)


class KernelCache:
    """Compiled kernels on disk, in `root`, or the folder `kernels` of the settings' cache folder."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else settings().cache_dir / "kernels"

    def get_or_build(self, key: str, build: Callable[[], Binary], **report: object) -> tuple[Binary, bool]:
        """Return the entry for a key from kernel_key, and whether it was in the cache; build and store it otherwise."""
        try:
            cached = self._read(key)
        except PermissionError as error:
            advice = "make it yours alone (chown, chmod go-w), or set ACCELERANT_CACHE_DIR to another folder"
            text = f"kernel cache {self.root} is not used, so each process compiles its kernels: {error}; {advice}"
            _warn_once(self.root, text)
            with compiling():
                return build(), False
        if cached is not None:
            return cached, True
        with compiling():
            binary = build()
        try:
            self._write(key, binary, report)
        except OSError as error:  # a full or read-only disk costs the next start, not this one
            _warn_once(self.root, f"kernel cache {self.root} cannot be written, so kernels are compiled anew: {error}")
        return binary, False

    def refusal(self) -> str:
        """Return why the folder is not used; empty if it is, or does not exist yet."""
        if _HAS_MODES:
            try:
                with _opened(self.root):
                    pass
            except PermissionError as error:
                return error.strerror or str(error)
            except OSError:  # does not exist, or cannot be written, as the first write says
                pass
        return ""

    def has(self, key: str) -> bool:
        """Return whether there is an entry that may be used; it may still prove damaged."""
        try:
            return bool(self._contents(key))
        except OSError:
            return False

    def remove(self, key: str) -> None:
        """Remove an entry, if it exists and may be removed."""
        folder = self.root / key
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # a file where a folder should be
            folder.unlink()

    def entries(self) -> list[CacheEntry]:
        """Return every entry, damaged ones first; raise ConfigError where the folder is not used."""
        if reason := self.refusal():
            raise ConfigError(f"kernel cache {self.root} is not used: {reason}")
        if not self.root.is_dir():
            return []
        keys = (folder.name for folder in self.root.iterdir() if _KEY.fullmatch(folder.name) and folder.is_dir())
        return sorted(map(self._describe, keys), key=lambda entry: (entry.name, entry.target, entry.age_s))

    def clear(self, entries: Iterable[CacheEntry]) -> list[CacheEntry]:
        """Remove entries, but for links and folders with files of others; return those that were removed."""
        for mark in self.root.glob(f"{KNOWN}*"):
            mark.unlink(missing_ok=True)
        return [entry for entry in entries if _remove_ours(self.root / entry.key)]

    def remove_leftovers(self) -> int:
        """Remove the temporary folders of processes that died while writing, and return their number."""
        old = [folder for folder in self.root.glob(f"{_TEMPORARY}*") if _age_s(folder) > _LEFTOVER_S]
        return sum(map(_remove_ours, old))

    def prepare(self) -> None:
        """Create the folder for this user alone, if it does not exist."""
        self.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.mkdir(mode=0o700, exist_ok=True)

    def require_writable(self) -> None:
        """Raise ConfigError, which says why, where entries cannot be stored."""
        advice = "set ACCELERANT_CACHE_DIR to a folder that this user can write"
        if reason := self.refusal():
            raise ConfigError(f"kernel cache {self.root} is not used: {reason}; {advice}")
        try:
            self.prepare()
            with tempfile.TemporaryFile(dir=self.root) as file:
                file.write(b"probe")
        except OSError as error:
            reason = f"cannot be written: {error.strerror or error}"
            raise ConfigError(f"kernel cache {self.root} {reason}; {advice}") from None

    def is_writable(self) -> bool:
        """Return whether entries can be stored."""
        try:
            self.require_writable()
        except ConfigError:
            return False
        return True

    def _contents(self, key: str) -> list[bytes]:
        """Return report and code of an entry; raise PermissionError if someone else could have written them."""
        if not _HAS_MODES:
            return [(self.root / key / name).read_bytes() for name in _FILES]
        contents = []
        with _opened(self.root) as root, _opened(key, root) as folder:
            for name in _FILES:
                with _opened(name, folder) as descriptor, open(descriptor, "rb", closefd=False) as file:
                    contents.append(file.read())
        return contents

    def _load(self, key: str) -> tuple[dict[str, Any], Binary]:
        """Return an entry's report and code; raise OSError, or another error for a damaged one."""
        text, code = self._contents(key)
        report: dict[str, Any] = decode_json(text)
        if report.pop("sha256") != _checksum(key, report, code):
            raise ValueError("it does not match its checksum")
        return report, Binary(
            code=code,
            symbols=report["symbols"],
            resources={entry: Resources(**fields) for entry, fields in report["resources"].items()},
            metadata=report["metadata"],
            log=report["log"],
        )

    def _read(self, key: str) -> Binary | None:
        """Return an entry, None if there is none or it is damaged; raise PermissionError if it is not to be used."""
        folder = self.root / key
        try:
            return self._load(key)[1]
        except FileNotFoundError:
            return None
        except PermissionError:
            raise
        except OSError as error:
            _warn_once(self.root, f"kernel cache {self.root} cannot be read, so kernels are compiled anew: {error}")
            return None
        except _DAMAGE as error:
            _warn_once(folder, f"kernel cache entry {folder} is damaged ({error}): compiling again")
            self.remove(key)
            return None

    def _describe(self, key: str) -> CacheEntry:
        size, age_s = 0, 0.0
        try:
            with contextlib.suppress(OSError):
                stats = [(self.root / key / name).lstat() for name in _FILES if (self.root / key / name).exists()]
                size = sum(found.st_size for found in stats)
                age_s = max([0.0, *(time.time() - found.st_mtime for found in stats)])
            report, binary = self._load(key)
        except (OSError, *_DAMAGE) as error:
            damage, trusted = str(error) or type(error).__name__, not isinstance(error, PermissionError)
            return CacheEntry(key, "", "", "", size, age_s, None, damage, trusted)
        name, target, compiler = (str(report.get(part, "")) for part in ("name", "target", "compiler"))
        counts = [found.registers for found in binary.resources.values() if found.registers is not None]
        return CacheEntry(key, name, target, compiler, size, age_s, max(counts, default=None))

    def _write(self, key: str, binary: Binary, report: dict[str, object]) -> None:
        self.prepare()
        with _lock:
            first = self.root not in _swept
            _swept.add(self.root)
        if first:
            self.remove_leftovers()
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.root))
        try:
            body = {
                **report,
                "symbols": dict(binary.symbols),
                "resources": {entry: value.to_dict() for entry, value in binary.resources.items()},
                "metadata": dict(binary.metadata),
                "log": binary.log,
            }
            body["sha256"] = _checksum(key, body, binary.code)
            for name, content in zip(_FILES, (json.dumps(body, indent=1).encode(), binary.code), strict=True):
                with open(temporary / name, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                    file.write(content)
            self._put(temporary, key)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # exists only where the rename failed

    def _put(self, temporary: Path, key: str) -> None:
        """Rename a complete entry to its key; a sound entry of another process stays."""
        for last_attempt in (False, True):
            try:
                os.rename(temporary, self.root / key)
                return
            except OSError:
                if self._read(key) is not None:
                    return
                if last_attempt:
                    raise
                self.remove(key)


_DAMAGE = (ValueError, KeyError, TypeError, AttributeError)  # errors from reading a report that is not what was written


def _checksum(key: str, report: dict[str, Any], code: bytes) -> str:
    return hashlib.sha256(json.dumps([key, report]).encode() + code).hexdigest()


@contextlib.contextmanager
def _opened(path: str | Path, within: int | None = None) -> Iterator[int]:
    """Open a file or folder; PermissionError for a symlink, or where another user can change it."""
    if stat.S_ISLNK(os.stat(path, dir_fd=within, follow_symlinks=False).st_mode):
        raise PermissionError(errno.EPERM, "is a symlink", str(path))
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0), dir_fd=within)
    try:
        found = os.fstat(descriptor)
        if hasattr(os, "geteuid") and found.st_uid not in (os.geteuid(), 0):  # root could do anything anyway
            raise PermissionError(errno.EPERM, f"belongs to another user, {found.st_uid}", str(path))
        if found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "may be written by its group or by everyone", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_ours(folder: Path) -> bool:
    """Remove a folder of the cache, unless it is a link or has files that the cache did not write."""
    try:
        if folder.is_symlink() or not {path.name for path in folder.iterdir()} <= {*_FILES}:
            return False
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    except OSError:  # another process was first, or it may not be removed
        return False
    return True


def _warn_once(about: Path, message: str) -> None:
    with _lock:
        if about in _warned:
            return
        _warned.add(about)
    _log.warning("%s", message)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:  # another process was first
        return 0.0
