"""Horizontal bars for a page: labels, values and spreads as text and boxes, so that they reflow on a narrow screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["STYLE", "Bar", "bars"]

STYLE = """
.bars { display: grid; gap: 3px 12px; grid-template-columns: minmax(0, 270px) 1fr; margin: 0 0 16px;
  font-size: 13px; align-items: center; }
.bars b { grid-column: 1 / -1; font-weight: 600; margin-top: 4px; overflow-wrap: anywhere; }
.bars b small { font-weight: 400; color: var(--soft); margin-left: 8px; }
.bars .who { color: var(--soft); overflow-wrap: anywhere; }
.track { position: relative; display: flex; align-items: center; gap: 8px; min-width: 0; }
.room { position: relative; flex: 1; height: 15px; }
.bar { position: absolute; inset: 0 auto 0 0; border-radius: 0 3px 3px 0; background: var(--peer); min-width: 2px; }
.bar.ours { background: var(--one); } .bar.lost { background: var(--two); }
.spread { position: absolute; top: 50%; height: 0; border-top: 1.5px solid var(--text); opacity: .55; }
.limit { position: absolute; top: -3px; bottom: -3px; border-left: 1.5px dashed var(--soft); }
.value { flex: 0 0 auto; width: 12.5em; font-variant-numeric: tabular-nums; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
.keys { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--soft); font-size: 13px; margin: 0 0 12px; }
.keys i { display: inline-block; width: 14px; height: 10px; border-radius: 2px; margin-right: 7px; }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        who: its label.
        value: its length.
        text: what stands beside it.
        style: "ours", "lost" or "peer".
        low, high: ends of its spread; equal for none.
    """

    who: str
    value: float
    text: str
    style: str = "peer"
    low: float = 0.0
    high: float = 0.0


def bars(title: str, shown: Sequence[Bar], *, aside: str = "", most: float = 0.0, limit: float = 0.0) -> str:
    """A group of bars over one scale.

    Args:
        title: above the group; none if empty.
        shown: from top to bottom.
        aside: beside the title.
        most: the scale's end; the largest value by default.
        limit: where to draw a dashed line; 0 for none.
    """
    most = max([most, limit, *(max(bar.value, bar.high) for bar in shown)]) or 1.0
    parts = [f"<b>{escape(title)}{f'<small>{escape(aside)}</small>' if aside else ''}</b>"] if title else []
    for bar in shown:
        spread = ""
        if bar.high > bar.low:
            left, width = 100 * bar.low / most, 100 * (bar.high - bar.low) / most
            spread = f'<span class="spread" style="left:{left:.2f}%;width:{width:.2f}%"></span>'
        line = f'<span class="limit" style="left:{100 * limit / most:.2f}%"></span>' if limit else ""
        parts.append(
            f'<span class="who">{escape(bar.who)}</span><span class="track"><span class="room">'
            f'<span class="bar {bar.style}" style="width:{100 * bar.value / most:.2f}%"></span>{spread}{line}</span>'
            f'<span class="value" title="{escape(bar.text)}">{escape(bar.text)}</span></span>'
        )
    return f'<div class="bars">{"".join(parts)}</div>'
