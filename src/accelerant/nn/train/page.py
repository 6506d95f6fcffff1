"""The frame of the HTML pages: colours for light and dark screens, cards, facts, tables, charts.

A page is one file that loads nothing from anywhere. What only one kind of page has stands in its own style sheet.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["document"]

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1b2330; --soft: #647084; --edge: #e1e6ed;
  --one: #3b6fe0; --one-soft: #b9cdf8; --two: #d9631e; --three: #0f9d76; --four: #8a5bd6; --peer: #b3bdcc; }
@media (prefers-color-scheme: dark) { :root { --page: #10141b; --card: #181e28; --text: #e6eaf1; --soft: #94a1b5;
  --edge: #2a3342; --one: #7aa5ff; --one-soft: #33496f; --two: #ff9a57; --three: #3fd2a4; --four: #b794f6;
  --peer: #4b586c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 32px 24px 48px; }
h1 { font-size: 25px; margin: 0; letter-spacing: -.01em; } h2 { font-size: 16px; margin: 0 0 12px; }
.lead, .soft, footer { color: var(--soft); } .lead { margin: 4px 0 24px; }
.row { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.facts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); margin-bottom: 16px; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 18px 20px;
  margin-bottom: 16px; min-width: 0; }
.fact { margin: 0; padding: 14px 18px; } .fact dt { color: var(--soft); font-size: 13px; }
.fact dd { margin: 0; font-size: 23px; font-weight: 600; font-variant-numeric: tabular-nums; }
.fact small { display: block; color: var(--soft); font-size: 12.5px; font-weight: 400; }
svg { width: 100%; height: auto; display: block; } svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--edge); } .axis { stroke: var(--soft); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .dot { stroke: var(--card); stroke-width: 1.5; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 0; padding: 0;
  color: var(--soft); font-size: 13px; }
.legend i { display: inline-block; width: 18px; height: 3px; border-radius: 2px; margin: 0 7px 3px 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th { text-align: left; color: var(--soft); font-weight: 500; white-space: nowrap; }
th, td { border-bottom: 1px solid var(--edge); vertical-align: top; } tr:last-child td { border-bottom: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { margin: 0; font: 12.5px/1.5 ui-monospace, monospace; }
footer { font-size: 13px; }
"""


def document(title: str, style: str, body: Sequence[str]) -> str:
    """A whole page.

    Args:
        title: escaped.
        style: the page's own rules, after those that all pages share.
        body: its parts, in order.
    """
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{title}</title>'
        f"<style>{_STYLE}{style}</style></head>\n<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )
