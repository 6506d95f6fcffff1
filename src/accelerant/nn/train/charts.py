"""Line charts as inline SVG: axes, grid, several lines, marked points, horizontal references.

Colours come from the page's CSS classes, so that one chart serves light and dark.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "Reference", "line_chart", "smoothed", "ticks"]

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
    """Round values that cover low to high in steps of 1, 2 or 5 times a power of ten; about that many."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + i) * step for i in range(count)]


def smoothed(points: Sequence[Point], span: int) -> list[Point]:
    """The mean of each point and its neighbours, up to span // 2 on either side, as many on both."""
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    result: list[Point] = []
    for i, (x, _) in enumerate(points):
        reach = min(span // 2, i, len(points) - 1 - i)
        result.append((x, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return result


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most _MOST_POINTS points: means of equal runs."""
    size = -(-len(points) // _MOST_POINTS)
    runs = [points[i : i + size] for i in range(0, len(points), size)] if size > 1 else [[p] for p in points]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def _label(value: float) -> str:
    """A tick's text: 1500 as 1.5k, 0.25 as 0.25."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{letter}"
    return f"{value:.4g}"


def line_chart(
    lines: Sequence[Line], *, x_label: str, y_label: str, references: Sequence[Reference] = (), zero: bool = False
) -> str:
    """Draw lines over one pair of axes.

    Args:
        lines: at least one point among them, else the chart says that there is no data.
        x_label, y_label: names with units.
        references: levels to draw where they lie inside the chart.
        zero: whether the y axis starts at 0.

    Returns:
        An `<svg>` element without scripts or outside resources.
    """
    shown = [Line(line.label, _thinned(line.points), line.style, line.dots) for line in lines if line.points]
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
        parts.append(f'<text class="tick" x="{px - 8}" y="{py + 4}" text-anchor="end">{_label(y)}</text>')
    for x in ticks(low_x, high_x, 6):
        px, py = at(x, low_y)
        parts.append(f'<line class="axis" x1="{px}" y1="{py}" x2="{px}" y2="{py + 5}"/>')
        parts.append(f'<text class="tick" x="{px}" y="{py + 19}" text-anchor="middle">{_label(x)}</text>')
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
    centre = (_TOP + base) / 2
    turned = f'transform="rotate(-90 14 {centre})"'
    parts.append(f'<text class="name" x="14" y="{centre}" {turned} text-anchor="middle">{escape(y_label)}</text>')
    parts.append("</svg>")
    return "".join(parts) + _legend(shown)


def _range(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _drawn(line: Line, points: Sequence[Point]) -> str:
    joined = " ".join(f"{x},{y}" for x, y in points)
    parts = [f'<polyline class="line {line.style}" points="{joined}"/>']
    if line.dots or len(points) == 1:
        parts += [f'<circle class="dot {line.style}" cx="{x}" cy="{y}" r="4"/>' for x, y in points]
    return "".join(parts)


def _legend(lines: Sequence[Line]) -> str:
    items = "".join(f'<li><i class="{line.style}"></i>{escape(line.label)}</li>' for line in lines)
    return f'<ul class="legend">{items}</ul>'
