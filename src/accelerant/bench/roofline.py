"""Rates against arithmetic intensity, under the roof that the ceilings measured in the run make.

The roof is min(copy rate x intensity, matrix rate); intensity is operations over least bytes. Source: Williams,
Waterman and Patterson 2009, "Roofline: an insightful visual performance model", section 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from accelerant.bench.record import Record, Row

__all__ = ["roofline"]

_WIDTH, _HEIGHT = 1060, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 16, 44


def roofline(record: Record) -> str:
    """The plot as SVG; empty where the run measured no case with operations, or no ceilings.

    Each case is one dot a runner, filled for ours, hollow for the peers; a dot's title says which.
    """
    copy, matrix = record.ceilings.get("copy GB/s"), record.ceilings.get("matmul TFLOP/s")
    rows = [row for row in record.rows if row.tflop_s and row.bytes]
    if not copy or not matrix or not rows:
        return ""
    intensities = [row.flops / row.bytes for row in rows]
    ridge = matrix * 1e3 / copy
    x_low, x_high = math.log10(min(*intensities, ridge) / 2), math.log10(max(*intensities, ridge) * 2)
    y_low = math.log10(min(min(row.tflop_s or matrix for row in rows), copy * 10**x_low / 1e3) / 1.5)
    y_high = math.log10(matrix * 1.6)

    def x(intensity: float) -> float:
        return _LEFT + (math.log10(intensity) - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(rate) - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)

    start = 10**x_low
    roof = (
        f"{x(start):.1f},{y(copy * start / 1e3):.1f} {x(ridge):.1f},{y(matrix):.1f} {x(10**x_high):.1f},{y(matrix):.1f}"
    )
    parts = [
        *(_grid_x(10**power, x(10**power)) for power in _powers(x_low, x_high)),
        *(_grid_y(10**power, y(10**power)) for power in _powers(y_low, y_high)),
        f'<polyline class="line s5" points="{roof}"/>',
        (
            f'<text x="{_WIDTH - _RIGHT}" y="{y(matrix) - 6:.1f}" text-anchor="end">'
            f"{matrix:.0f} TFLOP/s, matrix product</text>"
        ),
        f'<text x="{x(start * 1.3):.1f}" y="{y(copy * start * 1.3 / 1e3) + 34:.1f}">{copy:.0f} GB/s, copy</text>',
        *(_dot(row, x(row.flops / row.bytes), y(row.tflop_s or 1.0)) for row in _ours_last(rows)),
        f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">operations a byte</text>',
        f'<text x="14" y="{_TOP + 4}">TFLOP/s</text>',
    ]
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Roofline">{"".join(parts)}</svg>'


def _powers(low: float, high: float) -> range:
    return range(math.ceil(low), math.floor(high) + 1)


def _grid_x(value: float, at: float) -> str:
    line = f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
    return f'{line}<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{value:g}</text>'


def _grid_y(value: float, at: float) -> str:
    line = f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
    return f'{line}<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>'


def _ours_last(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.compared)


def _dot(row: Row, x: float, y: float) -> str:
    title = escape(f"{row.op} {row.case}, {row.runner} {row.implementation}: {row.tflop_s:.0f} TFLOP/s")
    lost = row.speedup is not None and row.speedup < 1
    style = f'class="dot {"s1" if lost else "s0"}"' if row.compared else 'class="peer-dot"'
    return f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{title}</title></circle>'
