"""Writing the container (container.py): a file appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from accelerant.zk.formats.container import HEAD, PREFIX, FilePath, Layout

__all__ = ["Piece", "write_container"]

Piece = bytes | npt.NDArray[Any]


def write_container(path: FilePath, layout: Layout, sections: Mapping[int, Sequence[Piece]]) -> None:
    """Write a file whole or not at all: under another name in its folder, then renamed.

    Args:
        path: of the file; what is there is replaced.
        layout: of the format.
        sections: id -> bytes and contiguous little-endian arrays, one after another.

    Raises:
        OSError: the folder cannot be written or the disk is full; path is as it was.
    """
    target = Path(path)
    with _named(target), _replacing(target) as file:
        file.write(PREFIX.pack(layout.magic, layout.version, len(sections)))
        for number, pieces in sections.items():
            file.write(HEAD.pack(number, sum(map(_size, pieces))))
            _write_pieces(file, pieces)


def _size(piece: Piece) -> int:
    return len(piece) if isinstance(piece, bytes) else piece.nbytes


def _write_pieces(file: BinaryIO, pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        if _size(piece):
            file.write(piece if isinstance(piece, bytes) else piece.reshape(-1).view(np.uint8).data)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the path's place once it is on the disk, unless there is an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in errors, not the temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
