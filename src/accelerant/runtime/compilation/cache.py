"""The disk cache of compiled kernels.

One folder an entry, named by the hash of everything the result depends on:

    <cache_dir>/kernels/<sha256>/code          machine code
    <cache_dir>/kernels/<sha256>/report.json   name, target, compiler, registers, spills, shared memory, log

An entry is written under a temporary name and renamed, so that readers see all of it or none, whatever else runs
or dies. The report carries the code's checksum: a torn or altered entry is not loaded but compiled again. Whatever is
wrong with the cache costs time and one warning a process, never a result: a folder that cannot be read or written is
bypassed, and what dead processes left half-written is removed.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerant.config import settings
from accelerant.runtime.compilation.kernel import Binary, Resources
from accelerant.runtime.files import decode_json

__all__ = ["KernelCache", "kernel_key"]

_FORMAT = 1
_TEMPORARY = ".new-"
_LEFTOVER_S = 3600.0
"""A temporary folder this old belongs to nobody: it is written within milliseconds."""

_log = logging.getLogger("accelerant.cache")
_lock = threading.Lock()
_warned: set[Path] = set()
"""Folders and entries that a warning was given for."""

_swept: set[Path] = set()
"""Folders that were searched for leftovers."""


def kernel_key(**parts: object) -> str:
    """The SHA-256, in hexadecimal, of the named parts; order does not matter."""
    text = json.dumps({"format": _FORMAT, **parts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class KernelCache:
    """Compiled kernels on disk.

    Args:
        root: folder to keep them in; `kernels` in the settings' cache folder by default.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else settings().cache_dir / "kernels"

    def get_or_build(self, key: str, build: Callable[[], Binary], **report: object) -> tuple[Binary, bool]:
        """The entry for `key`, built and stored if it is not there.

        Args:
            key: from kernel_key.
            build: makes the binary; its errors pass through and nothing is stored.
            report: what to note beside the code, for people.

        Returns:
            the binary, and whether it came from the cache.
        """
        found = self._read(key)
        if found is not None:
            return found, True
        binary = build()
        try:
            self._write(key, binary, report)
        except OSError as error:  # a full or read-only disk costs the next start, not this one
            _warn_once(self.root, f"kernel cache {self.root} cannot be written, so kernels are compiled anew: {error}")
        return binary, False

    def has(self, key: str) -> bool:
        """Whether there is an entry, which may yet be found damaged; none in a folder that cannot be read."""
        try:
            return (self.root / key / "code").is_file()
        except OSError:
            return False

    def remove(self, key: str) -> None:
        """Forget an entry, if it is there and may be removed."""
        place = self.root / key
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):  # a file where a folder should be
            place.unlink()

    def remove_leftovers(self) -> int:
        """Remove the temporary folders of processes that died while writing; how many went."""
        old = [each for each in self.root.glob(f"{_TEMPORARY}*") if _age_s(each) > _LEFTOVER_S]
        for each in old:
            shutil.rmtree(each, ignore_errors=True)
        return sum(not each.exists() for each in old)

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
            shutil.rmtree(temporary, ignore_errors=True)  # there only where it was not put

    def _put(self, temporary: Path, key: str) -> None:
        """Rename a complete entry to its place; one that is there and sound, another process's, stays."""
        for last in (False, True):
            try:
                os.rename(temporary, self.root / key)
                return
            except OSError:
                if self._read(key) is not None:
                    return
                if last:
                    raise
                self.remove(key)


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
