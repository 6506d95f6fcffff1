"""A name for what code of this package would build, cheaper than building it: the key of kernels that Python writes."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from accelerant._version import __version__

__all__ = ["sources_hash"]

_PACKAGE = Path(__file__).parents[2]


@functools.cache
def sources_hash(*folders: str, endings: tuple[str, ...] = (".py",)) -> str:
    """SHA-256, in hexadecimal, of this version and of the files in these folders of the package, and below.

    Args:
        folders: relative to the package, "algebra"; whatever the built text depends on must lie in them.
        endings: of the files' names.
    """
    digest, start = hashlib.sha256(__version__.encode()), len(str(_PACKAGE)) + 1
    for folder in folders:
        for path in sorted(_files(str(_PACKAGE / folder), endings)):
            with open(path, "rb", buffering=0) as file:
                content = file.read()
            digest.update(f"{path[start:].replace(os.sep, '/')} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _files(folder: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Their paths. A first call waits for this: pathlib takes twice as long."""
    for root, below, names in os.walk(folder):
        below[:] = [name for name in below if name != "__pycache__"]
        yield from (os.path.join(root, name) for name in names if name.endswith(endings))
