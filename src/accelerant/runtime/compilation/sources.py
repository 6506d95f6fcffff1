"""Hashes of the package's own sources: the cache keys of kernels whose text Python code writes."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from accelerant._version import __version__

__all__ = ["builder_key", "sources_hash"]

_PACKAGE = Path(__file__).parents[2]
_BUILDER = ("runtime/compilation/llvm.py", "runtime/compilation/philox.py")


def builder_key(builder: object, *sources: str) -> str:
    """Return the key of a Builder (see kernel.py) of LLVM IR: its fields, and the code that writes the text.

    Writing the text takes up to 60 ms, which a process that finds machine code on disk need not spend.

    Args:
        builder: the dataclass, or a tuple of it and what its fields only name; with the code in `sources` and the IR
            builder's, its repr is all that the text depends on.
        sources: files and folders of the package.
    """
    return f"{builder!r} {sources_hash(*_BUILDER, *sources)}"


@functools.cache
def sources_hash(*paths: str, endings: tuple[str, ...] = (".py",)) -> str:
    """Return the SHA-256, in hexadecimal, of this version and of these files, and of the files below these folders.

    Args:
        paths: relative to the package, "algebra" or "runtime/compilation/llvm.py"; whatever the built text depends on
            must lie in them.
        endings: of the names of files in folders.
    """
    digest, start = hashlib.sha256(__version__.encode()), len(str(_PACKAGE)) + 1
    for relative in paths:
        path = str(_PACKAGE / relative)
        for file_path in [path] if os.path.isfile(path) else sorted(_files(path, endings)):
            with open(file_path, "rb", buffering=0) as file:
                content = file.read()
            digest.update(f"{file_path[start:].replace(os.sep, '/')} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _files(folder: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths of a folder's files. A first call waits for this: pathlib takes twice as long."""
    for root, below, names in os.walk(folder):
        below[:] = [name for name in below if name != "__pycache__"]
        yield from (os.path.join(root, name) for name in names if name.endswith(endings))
