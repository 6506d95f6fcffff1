"""A name for what code of this package would build, cheaper than building it: the key of kernels that Python writes."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from accelerant._version import __version__

__all__ = ["sources_hash"]

_PACKAGE = Path(__file__).parents[1]


@functools.cache
def sources_hash(*folders: str, pattern: str = "*.py") -> str:
    """SHA-256, in hexadecimal, of this version and of the files in these folders of the package, and below.

    Args:
        folders: relative to the package, "algebra"; whatever the built text depends on must lie in them.
        pattern: of the files' names.
    """
    digest = hashlib.sha256(__version__.encode())
    for folder in folders:
        for path in sorted((_PACKAGE / folder).rglob(pattern)):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()
