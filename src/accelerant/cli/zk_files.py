"""What the commands of `accelerant zk` do with files and the terminal. No typer here: a proof may begin without it."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.files import AtomicFile

__all__ = ["Progress", "shown", "targets_of", "text_of", "warn", "write_all"]

_MOST_BYTES = 64 << 20
"""Of a JSON file that is read: a verification key of 300,000 public inputs has as many."""


def targets_of(targets: list[Path], sources: list[Path]) -> list[Path]:
    """The paths to write, symlinks followed; asked before any work.

    Raises:
        ConfigError: one is in no folder, is there and no regular file, or is another or a source.
    """
    from accelerant.zk.formats.container import writable_target

    seen = {os.path.realpath(source): "is also to be read" for source in sources}
    for target in targets:
        resolved = str(writable_target(target))
        if resolved in seen:
            raise ConfigError(f"{target} is to be written, and {seen[resolved]}: give another name")
        seen[resolved] = "so is another file"
    return [Path(resolved) for resolved in list(seen)[-len(targets) :]]


def text_of(path: Path) -> bytes:
    """What a JSON file has. A pipe that nobody writes to would hang; a device might never end.

    Raises:
        ConfigError: it cannot be read, or is no regular file.
        FormatError: it is larger than any that is read.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path} is no regular file; copy what it gives into one")
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > _MOST_BYTES:
        raise FormatError(f"{path} has more than {_MOST_BYTES >> 20} MiB, as no proof or verification key has")
    return text


def warn(path: Path, forgeable: str | None) -> None:
    """Say on stderr why anyone can make proofs that a key accepts, if so."""
    if forgeable is not None:
        print(f"accelerant: warning: {shown(path)}: {forgeable}", file=sys.stderr)


def write_all(texts: Mapping[Path, str]) -> None:
    """Write files, each whole: all under other names and on the disk first, then renamed.

    Where a rename fails the files before it are already the new ones.

    Raises:
        OSError: a folder cannot be written, or the disk is full.
    """
    with contextlib.ExitStack() as written:
        for path, text in texts.items():
            file = written.enter_context(AtomicFile(path))
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())


class Progress:
    """The stage at work, on one line of a terminal's stderr; nothing elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._live = not quiet and sys.stderr is not None and sys.stderr.isatty()  # None: it was closed

    def __call__(self, stage: str) -> None:
        """Show the stage that begins."""
        self._show(stage)

    def __enter__(self) -> Callable[[str], None]:
        return self

    def __exit__(self, *_: object) -> None:
        self._show("")

    def _show(self, text: str) -> None:
        if self._live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def shown(text: object) -> str:
    """Text of strangers, names of files among it, without what a terminal would obey or cannot print."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in str(text))
