"""Output of every command: encoding, width, progress and tables, for terminals of any size, pipes and files.

Characters that the stream's encoding lacks are replaced by similar ones of ASCII or escaped. A row of a table is one
line, except on a terminal that is too narrow for it; no name is cut. Importing this module loads no other package.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import textwrap
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

COMPILING = "compiling kernels (once)"
"""Shown instead of a stage while a kernel is compiled, which the disk cache has from then on."""

_UNLIMITED = 1 << 16  # columns where nothing is wrapped
_LEAST_PROSE = 24  # columns below which the last cell of a row, a sentence, is not wrapped beside the other cells

_SIMILAR = dict(zip("█·°…→•━╸╺─│╭╮╰╯\u00d7\u2013\u2014", "#. ~>*---" + "-|++++x--", strict=True))


# --- the standard streams --------------------------------------------------------------------------------------------
def prepare_streams() -> None:
    """Let standard output and error accept every character; streams that were closed at the start become empty ones."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # print would write an error to standard output, or a file might get its number
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - open until the end
    codecs.register_error("accelerant", _substitute)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="accelerant")


def _substitute(error: UnicodeError) -> tuple[str, int]:
    """Return similar characters, one for one so that columns stay aligned, or escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> str:
    if "\u2800" <= character <= "\u28ff":  # Braille patterns: rich's spinners
        return "*"
    return _SIMILAR.get(character) or character.encode("ascii", "backslashreplace").decode()


def is_live(stream: TextIO | None) -> bool:
    """Return whether lines of a stream can be overwritten: it is a terminal, and not a dumb one."""
    return stream is not None and stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def columns(stream: TextIO) -> int | None:
    """Return the columns of a terminal, which COLUMNS overrides; None for a pipe or file."""
    if not stream.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80  # 0: nobody has set it
    except OSError:
        return 80


def console(*, stderr: bool = False) -> Console:
    """Return rich's console for a standard stream, without markup; nothing is wrapped in a pipe or file."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if is_live(stream):  # rich follows the window's size
        return Console(file=stream, markup=False, emoji=False, highlight=False)
    width = columns(stream) or _UNLIMITED
    return Console(file=stream, markup=False, emoji=False, highlight=False, width=width, height=25)


class ProgressLine:
    """Progress on stderr: an overwritten line on a terminal, else one every `every_s` seconds; "" clears it."""

    def __init__(self, every_s: float = 15.0) -> None:
        self.live = is_live(sys.stderr)
        self._every_s = every_s
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        """Show a line; one that cannot be written, on a full disk for one, is dropped."""
        with suppress(OSError):
            if self.live:
                width = max(20, (columns(sys.stderr) or 80) - 1)  # a longer line could not be overwritten
                print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)
            elif text and time.monotonic() - self._last >= self._every_s:
                self._last = time.monotonic()
                print(text, file=sys.stderr, flush=True)


def span_text(seconds: float) -> str:
    """Format a time for people: "3 d", "2 h", "119 min", "12 s", "0.5 s"."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.1f} s" if seconds < 10 else f"{seconds:.0f} s"


# --- tables ----------------------------------------------------------------------------------------------------------
def print_table(
    titles: Sequence[str], rows: Sequence[Sequence[str | Text]], *, right: Collection[str] = (), prose: bool = False
) -> None:
    """Print a table to standard output; see table_lines."""
    shown = console()
    for line in table_lines(titles, rows, shown.width, right=right, prose=prose):
        shown.print(line, soft_wrap=True)


def table_lines(
    titles: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    width: int,
    *,
    right: Collection[str] = (),
    prose: bool = False,
) -> list[Text]:
    """Return a table's lines: one a row if they fit, else a few; with `prose` the last cell wraps beside others."""
    from rich.text import Text

    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    head = [Text(title, style="bold") for title in titles]
    widths = [max(cell.cell_len for cell in column) for column in zip(head, *cells, strict=True)]
    beside = sum(widths[:-1]) + 2 * (len(widths) - 1)
    least = max([_LEAST_PROSE, *(len(word) for row in cells for word in row[-1].plain.split())])
    if beside + (min(least, widths[-1]) if prose else widths[-1]) > width:
        filled = [at for at in range(len(titles)) if any(row[at].plain not in ("", "-") for row in cells)]
        if len(filled) < len(titles):  # the others' columns are left out
            some = [[row[at] for at in filled] for row in cells]
            return table_lines([titles[at] for at in filled], some, width, right=right, prose=prose)
        return [line for row in cells for line in _block(titles, row, width)]
    lines = []
    for row in [head, *cells]:
        more: list[str] = []
        if row[-1].cell_len > width - beside:
            first, *more = [part.strip() for part in wrapped(row[-1].plain, width - beside)]
            row = [*row[:-1], Text(first)]
        line = Text()
        for title, cell, size in zip(titles, row, widths, strict=True):
            pad = " " * (size - cell.cell_len)
            line.append_text(Text.assemble(pad, cell) if title in right else Text.assemble(cell, pad)).append("  ")
        line.rstrip()
        lines += [line, *(Text(" " * beside + part) for part in more)]
    return lines


def _block(titles: Sequence[str], row: Sequence[Text], width: int) -> Iterator[Text]:
    """Yield the first cell, and below it the others with their titles."""
    from rich.text import Text

    yield Text.assemble(row[0], style="bold")
    cells = [(title, cell.plain) for title, cell in zip(titles[1:], row[1:], strict=True)]
    line = ""
    for item in [f"{title} {cell}".strip() for title, cell in cells if cell not in ("", "-")]:
        if line and len(line) + 2 + len(item) > width - 3:
            yield from map(Text, wrapped(f"{line},", width, "  "))
            line = ""
        line = f"{line}, {item}" if line else item
    yield from map(Text, wrapped(line, width, "  "))


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the lines of a text, after the first indented by two more; no word is cut."""
    return textwrap.wrap(
        text, max(1, width), initial_indent=indent, subsequent_indent=f"{indent}  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
