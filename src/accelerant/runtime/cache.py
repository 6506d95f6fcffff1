"""The disk cache of compiled kernels.

One folder an entry, named by the hash of everything the result depends on:

    <cache_dir>/kernels/<sha256>/code          machine code
    <cache_dir>/kernels/<sha256>/report.json   name, target, compiler, registers, spills, shared memory, log

An entry is written under a temporary name and renamed, so that readers see all of it or none, whatever else runs
or dies. The report carries the code's checksum: a torn or altered entry is not loaded but compiled again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerant.config import settings
from accelerant.runtime.kernel import Binary, Resources

__all__ = ["KernelCache", "kernel_key"]

_FORMAT = 1
_log = logging.getLogger("accelerant.cache")


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
            _log.warning("kernel cache %s cannot be written: %s", self.root, error)
        return binary, False

    def remove(self, key: str) -> None:
        """Forget an entry, if it is there."""
        shutil.rmtree(self.root / key, ignore_errors=True)

    def _read(self, key: str) -> Binary | None:
        folder = self.root / key
        try:
            report: dict[str, Any] = json.loads((folder / "report.json").read_bytes())
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
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("kernel cache entry %s is damaged (%s): compiling again", folder, error)
            self.remove(key)
            return None

    def _write(self, key: str, binary: Binary, report: dict[str, object]) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=self.root))
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
            os.rename(temporary, self.root / key)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            if not (self.root / key).is_dir():  # otherwise another process was first, with the same content
                raise
