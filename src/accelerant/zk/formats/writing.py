"""Writing the container (container.py): a file appears whole or not at all.

What is renamed onto a path takes the place of whatever is there, a device or a pipe too, and of a symlink rather than
of what it points to: such paths are looked at first.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from accelerant.errors import ConfigError
from accelerant.runtime.files import AtomicFile
from accelerant.zk.formats.container import HEAD, PREFIX, FilePath, Layout

__all__ = ["Piece", "writable_target", "write_container"]

Piece = bytes | npt.NDArray[Any]

_ANYONE, _OWNER = 0o666, 0o600
"""Permissions of a new file; the first before the umask."""


def writable_target(path: FilePath) -> Path:
    """The path of a file to write or replace, symlinks followed: to be asked before anything is computed.

    Raises:
        ConfigError: there is no such folder; or what is there is a folder, a device, a pipe, a loop of symlinks; or the
            name is not one that a file can have.
    """
    given = Path(path)
    try:
        target = Path(os.path.realpath(given))
        in_folder = os.path.isdir(target.parent)
        mode = _mode(target) if in_folder else None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ConfigError(f"{given} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    if not in_folder:
        raise ConfigError(f"{given}: there is no folder {target.parent}")
    if mode is None or stat.S_ISREG(mode):
        return target
    if stat.S_ISLNK(mode):
        raise ConfigError(f"{given} is a loop of symlinks; wanted the name of a file")
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{given} is a folder; wanted the name of a file")
    raise ConfigError(f"{given} is a device, a pipe or a socket, and a file would take its place; wanted a file's name")


def _mode(path: Path) -> int | None:
    """Of what is there, symlinks not followed; None where nothing is."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None


def write_container(
    path: FilePath, layout: Layout, sections: Mapping[int, Sequence[Piece]], *, secret: bool = False
) -> None:
    """Write a file whole or not at all: under another name in its folder, then renamed.

    Args:
        path: of the file; a regular file that is there is replaced, of a symlink the file that it points to.
        layout: of the format.
        sections: id -> bytes and contiguous little-endian arrays, one after another.
        secret: nobody but the owner may read it.

    Raises:
        ConfigError: path names no regular file (writable_target).
        OSError: the folder cannot be written or the disk is full; path is as it was.
    """
    target = writable_target(path)
    with _named(Path(path)), AtomicFile(target, mode=_OWNER if secret else _ANYONE) as file:
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
def _named(path: Path) -> Iterator[None]:
    """Name the file in errors, not the temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
