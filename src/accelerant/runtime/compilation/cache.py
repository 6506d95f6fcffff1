"""The disk cache of compiled kernels.

One folder an entry, named by the hash of everything the result depends on:

    <cache_dir>/kernels/<sha256>/code          machine code
    <cache_dir>/kernels/<sha256>/report.json   name, target, compiler, registers, spills, shared memory, log

An entry is written under a temporary name and renamed, so that readers see all of it or nothing, whatever else runs or
dies. The report carries the code's checksum: a torn or altered entry is compiled again. A problem with the cache costs
time and one warning a process, never a result: a folder that cannot be read or written is bypassed, and temporary
folders of dead processes are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerant.config import settings
from accelerant.runtime.compilation.kernel import Binary, Resources
from accelerant.runtime.files import JsonRecord, decode_json

__all__ = ["CacheEntry", "KernelCache", "kernel_key"]

_FORMAT = 1
_TEMPORARY = ".new-"
_LEFTOVER_S = 3600.0
"""Age from which a temporary folder is taken for a dead process's: it is renamed within milliseconds."""

_log = logging.getLogger("accelerant.cache")
_lock = threading.Lock()
_warned: set[Path] = set()
"""Folders and entries that a warning was given for."""

_swept: set[Path] = set()
"""Folders that were searched for leftovers."""


def kernel_key(**parts: object) -> str:
    """Return the SHA-256, in hexadecimal, of the named parts; order does not matter."""
    text = json.dumps({"format": _FORMAT, **parts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CacheEntry(JsonRecord):
    """One compiled kernel source on disk.

    The key is the name of its folder, and `registers` the most that an entry point uses a thread; None where the
    compiler does not say. A damaged entry has no name but a reason, and is compiled again at the next use.
    """

    key: str
    name: str
    target: str
    compiler: str
    size_bytes: int
    age_s: float
    registers: int | None
    damage: str = ""


class KernelCache:
    """Compiled kernels on disk, in `root`, or the folder `kernels` of the settings' cache folder."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else settings().cache_dir / "kernels"

    def get_or_build(self, key: str, build: Callable[[], Binary], **report: object) -> tuple[Binary, bool]:
        """Return the entry for a key from kernel_key, and whether it was in the cache; build and store it otherwise.

        Errors of `build` pass through and nothing is stored. `report` has further fields of the report, for people.
        """
        cached = self._read(key)
        if cached is not None:
            return cached, True
        binary = build()
        try:
            self._write(key, binary, report)
        except OSError as error:  # a full or read-only disk costs the next start, not this one
            _warn_once(self.root, f"kernel cache {self.root} cannot be written, so kernels are compiled anew: {error}")
        return binary, False

    def has(self, key: str) -> bool:
        """Return whether there is an entry; it may still prove damaged."""
        try:
            return (self.root / key / "code").is_file()
        except OSError:
            return False

    def remove(self, key: str) -> None:
        """Remove an entry, if it exists and may be removed."""
        folder = self.root / key
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # a file where a folder should be
            folder.unlink()

    def entries(self) -> list[CacheEntry]:
        """Return every entry, by name and target; damaged ones first."""
        if not self.root.is_dir():
            return []
        folders = (folder for folder in self.root.iterdir() if folder.is_dir() and not folder.name.startswith("."))
        return sorted(map(_describe, folders), key=lambda entry: (entry.name, entry.target, entry.age_s))

    def clear(self, entries: Iterable[CacheEntry]) -> int:
        """Remove entries and return the bytes freed; processes that have loaded them are not affected."""
        freed = 0
        for entry in entries:
            try:
                shutil.rmtree(self.root / entry.key)
            except FileNotFoundError:  # another process was first
                continue
            freed += entry.size_bytes
        return freed

    def remove_leftovers(self) -> int:
        """Remove the temporary folders of processes that died while writing, and return their number."""
        old = [folder for folder in self.root.glob(f"{_TEMPORARY}*") if _age_s(folder) > _LEFTOVER_S]
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)
        return sum(not folder.exists() for folder in old)

    def _read(self, key: str) -> Binary | None:
        folder = self.root / key
        try:
            report: dict[str, Any] = decode_json((folder / "report.json").read_bytes())
            code = (folder / "code").read_bytes()
            if report["sha256"] != hashlib.sha256(code).hexdigest():
                raise ValueError("the code does not match its checksum")
            return Binary(
                code=code,
                symbols=report["symbols"],
                resources={entry: Resources(**fields) for entry, fields in report["resources"].items()},
                metadata=report["metadata"],
                log=report["log"],
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn_once(self.root, f"kernel cache {self.root} cannot be read, so kernels are compiled anew: {error}")
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _warn_once(folder, f"kernel cache entry {folder} is damaged ({error}): compiling again")
            self.remove(key)
            return None

    def _write(self, key: str, binary: Binary, report: dict[str, object]) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with _lock:
            first = self.root not in _swept
            _swept.add(self.root)
        if first:
            self.remove_leftovers()
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.root))
        try:
            (temporary / "code").write_bytes(binary.code)
            body = {
                **report,
                "symbols": dict(binary.symbols),
                "resources": {entry: value.to_dict() for entry, value in binary.resources.items()},
                "metadata": dict(binary.metadata),
                "sha256": hashlib.sha256(binary.code).hexdigest(),
                "log": binary.log,
            }
            (temporary / "report.json").write_text(json.dumps(body, indent=1), encoding="utf-8")
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


def _describe(folder: Path) -> CacheEntry:
    stats = [path.stat() for path in folder.iterdir()]
    size = sum(stat.st_size for stat in stats)
    age_s = max([0.0, *(time.time() - stat.st_mtime for stat in stats)])
    try:
        report = decode_json((folder / "report.json").read_bytes())
        counts = [entry["registers"] for entry in report["resources"].values() if entry["registers"] is not None]
        name, target, compiler = (str(report.get(part, "")) for part in ("name", "target", "compiler"))
        if not (folder / "code").is_file():
            raise ValueError("no code")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return CacheEntry(folder.name, "", "", "", size, age_s, None, str(error) or type(error).__name__)
    return CacheEntry(folder.name, name, target, compiler, size, age_s, max(counts, default=None))


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
