"""Tables as text, and HTML pages that load nothing from anywhere.

A page is a jinja2 template beside the module whose data it shows; it extends page.html and uses the macros of
html_page.html. Texts are escaped, except those that a docstring calls HTML. Lines and dots of a chart have the classes
s0 to s5.
"""

import functools
import itertools
import math
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader  # on the first page

    loader = FileSystemLoader(_PACKAGE)
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, auto_reload=False, loader=loader)


def parts() -> Any:
    """Return the macros of html_page.html as functions, whose results are HTML."""
    return _environment().get_template("runtime/html_page.html").module


def render(template: str, **values: object) -> str:
    """Return the page that a template of this package makes of the values; `template` is its path in the package."""
    return str(_environment().get_template(template).render(values)).encode(errors="backslashreplace").decode()


def table(head: Sequence[str], rows: Iterable[Sequence[tuple[str, str]]], numbers: Iterable[str] = ()) -> str:
    """Return a table that scrolls sideways; cells have a CSS class and a text, `numbers` align right."""
    return str(parts().table(head, rows, tuple(numbers)))


_GAP, _NARROWEST = 2, 8


def text_table(
    rows: Iterable[Sequence[str]], *, numbers: Iterable[str] = (), width: int | None = None, indent: int = 0
) -> list[str]:
    """Return the lines of a table whose first row has the names; one cell alone is a heading, `numbers` align right."""
    if not (whole := [tuple(row) for row in rows]):
        return []
    if width is None and sys.stdout is not None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    columns = [[row[i] for row in whole if len(row) > 1] for i in range(len(whole[0]))]
    sizes = [max(map(len, column)) for column in columns]
    right = [name in set(numbers) for name in whole[0]]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    for least in (words, [_NARROWEST] * len(sizes)):  # words break only where that is not enough
        while width is not None and sum(sizes) + _GAP * (len(sizes) - 1) > width - indent:
            if not (can := [i for i, size in enumerate(sizes) if not right[i] and size > least[i]]):
                break
            sizes[max(can, key=sizes.__getitem__)] -= 1
    lines = []
    for row in whole:
        if len(row) == 1:
            lines.append(row[0])
            continue
        wrapped = [textwrap.wrap(cell, size) or [""] for cell, size in zip(row, sizes, strict=True)]
        for parts in itertools.zip_longest(*wrapped, fillvalue=""):
            aligned = (
                part.rjust(size) if number else part.ljust(size)
                for part, size, number in zip(parts, sizes, right, strict=True)
            )
            lines.append((" " * indent + (" " * _GAP).join(aligned)).rstrip())
    return lines


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar in the style "ours", "lost" or "peer"; its spread is from low to high."""

    label: str
    value: float
    text: str
    style: str = "peer"
    low: float = 0.0
    high: float = 0.0


_WIDTH, _HEIGHT = 540, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 14, 44
_MOST_POINTS = 500

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """Points to join, in rising x, drawn with a CSS class; `dots` marks each point too."""

    label: str
    points: Sequence[Point]
    style: str
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """A dashed level with its name."""

    label: str
    y: float


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round values that cover low to high in steps of 1, 2 or 5 times a power of ten; about that many."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [(first + i) * step for i in range(math.floor(high / step + 1e-9) - first + 1)]


_MOST = 1e300


def _drawable(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if abs(y) < _MOST]


def smoothed(points: Sequence[Point], span: int) -> list[Point]:
    """Return the mean of each point and its neighbours, up to span // 2 on either side, as many on both."""
    points = _drawable(points)
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    result: list[Point] = []
    for i, (x, _) in enumerate(points):
        reach = min(span // 2, i, len(points) - 1 - i)
        result.append((x, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return result


def _thinned(points: Sequence[Point]) -> list[Point]:
    size = -(-len(points) // _MOST_POINTS)
    runs = [points[i : i + size] for i in range(0, len(points), size)] if size > 1 else [[p] for p in points]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def short_number(value: float) -> str:
    """Format a number in four digits: 1500 as 1.5k, 0.25 as 0.25."""
    for limit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{letter}"
    return f"{value:.4g}"


def line_chart(
    lines: Sequence[Line], *, x_label: str, y_label: str, references: Sequence[Reference] = (), zero: bool = False
) -> str:
    """Return lines over one pair of axes as an `<svg>` element; points that are not finite are left out."""
    drawn = [(line, _drawable(line.points)) for line in lines]
    if not (shown := [(line, _thinned(points)) for line, points in drawn if points]):
        return '<p class="empty">No steps were recorded.</p>'
    xs = [x for _, points in shown for x, _ in points]
    ys = [y for _, points in shown for _, y in points] + [reference.y for reference in references]
    low_x, high_x = _range(min(xs), max(xs))
    low_y, high_y = _range(0.0 if zero else min(ys), max(ys))
    margin = 0.06 * (high_y - low_y)
    high_y, low_y = high_y + margin, low_y if zero else low_y - margin
    right, base = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def across(x: float) -> float:
        return round(_LEFT + (x - low_x) / (high_x - low_x) * (right - _LEFT), 1)

    def up(y: float) -> float:
        return round(base - (y - low_y) / (high_y - low_y) * (base - _TOP), 1)

    return str(
        parts().chart(
            [(line, [(across(x), up(y)) for x, y in points]) for line, points in shown],
            [(up(y), short_number(y)) for y in ticks(low_y, high_y)],
            [(across(x), short_number(x)) for x in ticks(low_x, high_x, 6)],
            [(up(reference.y), reference.label) for reference in references],
            x_label, y_label, _WIDTH, _HEIGHT, _LEFT, right, _TOP, base,
        )
    )  # fmt: skip


def _range(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)
