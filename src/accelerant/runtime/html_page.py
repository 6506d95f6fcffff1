"""Tables as text, and HTML pages that load nothing from anywhere: the style sheet and the parts of a page.

Texts are escaped, except those that a docstring calls HTML. Lines and dots of a chart have the classes s0 to s5.
"""

from __future__ import annotations

import itertools
import math
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_STYLE = Path(__file__).with_suffix(".css")


def document(title: str, style: str, body: Sequence[str]) -> str:
    """Return a page whose parts are HTML, with a style sheet of its own after that of all pages."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    page = (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{escape(title)}</title>'
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}{style}</style></head>\n<body><main>\n"
        + "\n".join(filter(None, body))
        + "\n</main></body></html>\n"
    )
    return page.encode(errors="backslashreplace").decode()


def card(title: str, content: str, style: str = "") -> str:
    """Return a card of HTML under a heading; `style` is a further CSS class."""
    return f'<section class="{f"card {style}".strip()}"><h2>{escape(title)}</h2>{content}</section>'


def facts(items: Iterable[tuple[str, str, str]]) -> str:
    """Return a row of figures, each of a name, a value and a remark."""
    return '<div class="facts">{}</div>'.format(
        "".join(
            f'<dl class="card fact"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></dl>'
            for name, value, remark in items
        )
    )


def table(head: Sequence[str], rows: Iterable[Sequence[tuple[str, str]]], numbers: Iterable[str] = ()) -> str:
    """Return a table that scrolls sideways; cells have a CSS class and a text, `numbers` align right."""
    numbers = set(numbers)
    top = "".join(f'<th class="number">{escape(x)}</th>' if x in numbers else f"<th>{escape(x)}</th>" for x in head)
    lines = ["".join(f'<td class="{style}">{escape(text)}</td>' for style, text in cells) for cells in rows]
    body = "".join(f"<tr>{line}</tr>" for line in ([top] if head else []) + lines)
    return f'<div class="scroll"><table>{body}</table></div>'


_GAP, _NARROWEST = 2, 8


def text_table(
    rows: Iterable[Sequence[str]], *, numbers: Iterable[str] = (), width: int | None = None, indent: int = 0
) -> list[str]:
    """Return the lines of a table whose first row has the names; one cell alone is a heading, `numbers` align right."""
    whole = [tuple(row) for row in rows]
    if not whole:
        return []
    if width is None and sys.stdout is not None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    columns = [[row[i] for row in whole if len(row) > 1] for i in range(len(whole[0]))]
    sizes = [max(map(len, column)) for column in columns]
    right = [name in set(numbers) for name in whole[0]]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    for least in (words, [_NARROWEST] * len(sizes)):  # words break only where that is not enough
        while width is not None and sum(sizes) + _GAP * (len(sizes) - 1) > width - indent:
            can = [i for i, size in enumerate(sizes) if not right[i] and size > least[i]]
            if not can:
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


def bars(title: str, shown: Sequence[Bar], *, aside: str = "", limit: float = 0.0) -> str:
    """Return bars on one scale, with a dashed line at `limit` unless it is 0; `aside` follows the title as text."""
    most = max([limit, *(max(bar.value, bar.high) for bar in shown)]) or 1.0
    parts = [f"<b>{escape(title)}{f'<small>{escape(aside)}</small>' if aside else ''}</b>"] if title else []
    line = f'<span class="limit" style="left:{100 * limit / most:.2f}%"></span>' if limit else ""
    for bar in shown:
        spread = ""
        if bar.high > bar.low:
            left, width = 100 * bar.low / most, 100 * (bar.high - bar.low) / most
            spread = f'<span class="spread" style="left:{left:.2f}%;width:{width:.2f}%"></span>'
        parts.append(
            f'<span class="who">{escape(bar.label)}</span><span class="track"><span class="room">'
            f'<span class="bar {bar.style}" style="width:{100 * bar.value / most:.2f}%"></span>{spread}{line}</span>'
            f'<span class="value" title="{escape(bar.text)}">{escape(bar.text)}</span></span>'
        )
    return f'<div class="bars">{"".join(parts)}</div>'


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
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + i) * step for i in range(count)]


_MOST = 1e300


def _drawable(points: Sequence[Point]) -> list[Point]:
    """Return the points whose values are finite, and small enough for differences that are."""
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
    """Return at most _MOST_POINTS points: the means of runs of equal length."""
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
    shown = [Line(line.label, _thinned(points), line.style, line.dots) for line, points in drawn if points]
    if not shown:
        return '<p class="empty">No steps were recorded.</p>'
    xs = [x for line in shown for x, _ in line.points]
    ys = [y for line in shown for _, y in line.points] + [reference.y for reference in references]
    low_x, high_x = _range(min(xs), max(xs))
    low_y, high_y = _range(0.0 if zero else min(ys), max(ys))
    margin = 0.06 * (high_y - low_y)
    high_y, low_y = high_y + margin, low_y if zero else low_y - margin

    def at(x: float, y: float) -> Point:
        across = (x - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)
        up = (y - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM)
        return round(_LEFT + across, 1), round(_HEIGHT - _BOTTOM - up, 1)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_label)} by {escape(x_label)}">']
    for y in ticks(low_y, high_y):
        px, py = at(low_x, y)
        parts.append(f'<line class="grid" x1="{px}" y1="{py}" x2="{_WIDTH - _RIGHT}" y2="{py}"/>')
        parts.append(f'<text class="tick" x="{px - 8}" y="{py + 4}" text-anchor="end">{short_number(y)}</text>')
    for x in ticks(low_x, high_x, 6):
        px, py = at(x, low_y)
        parts.append(f'<line class="axis" x1="{px}" y1="{py}" x2="{px}" y2="{py + 5}"/>')
        parts.append(f'<text class="tick" x="{px}" y="{py + 19}" text-anchor="middle">{short_number(x)}</text>')
    base = _HEIGHT - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{base}" x2="{_WIDTH - _RIGHT}" y2="{base}"/>')
    for reference in references:
        px, py = at(low_x, reference.y)
        parts.append(f'<line class="reference" x1="{px}" y1="{py}" x2="{_WIDTH - _RIGHT}" y2="{py}"/>')
        text = escape(reference.label)
        parts.append(f'<text class="level" x="{_WIDTH - _RIGHT}" y="{py - 6}" text-anchor="end">{text}</text>')
    parts += [_drawn(line, [at(x, y) for x, y in line.points]) for line in shown]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="name" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    center = (_TOP + base) / 2
    turned = f'transform="rotate(-90 14 {center})"'
    parts.append(f'<text class="name" x="14" y="{center}" {turned} text-anchor="middle">{escape(y_label)}</text>')
    parts.append("</svg>")
    items = "".join(f'<li><i class="{line.style}"></i>{escape(line.label)}</li>' for line in shown)
    return "".join(parts) + f'<ul class="legend">{items}</ul>'


def _range(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _drawn(line: Line, points: Sequence[Point]) -> str:
    joined = " ".join(f"{x},{y}" for x, y in points)
    parts = [f'<polyline class="line {line.style}" points="{joined}"/>']
    if line.dots or len(points) == 1:
        parts += [f'<circle class="dot {line.style}" cx="{x}" cy="{y}" r="4"/>' for x, y in points]
    return "".join(parts)
