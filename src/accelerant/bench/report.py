"""A record as a page: what was lost first, bars beside the peers, shares of the ceilings, targets, all rows.

One HTML file that loads nothing from anywhere, for light and dark screens.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from accelerant.bench import bars as bars_module
from accelerant.bench.bars import Bar, bars
from accelerant.bench.compare import Comparison
from accelerant.bench.record import DEVICE, OWN, Record, Row
from accelerant.bench.roofline import roofline
from accelerant.nn.train.charts import Line, line_chart

__all__ = ["build_report", "write_report"]

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1b2330; --soft: #647084; --edge: #e1e6ed;
  --one: #3b6fe0; --two: #d9631e; --three: #0f9d76; --four: #8a5bd6; --peer: #b3bdcc; }
@media (prefers-color-scheme: dark) { :root { --page: #10141b; --card: #181e28; --text: #e6eaf1; --soft: #94a1b5;
  --edge: #2a3342; --one: #7aa5ff; --two: #ff9a57; --three: #3fd2a4; --four: #b794f6; --peer: #4b586c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 32px 24px 48px; }
h1 { font-size: 25px; margin: 0; letter-spacing: -.01em; } h2 { font-size: 16px; margin: 0 0 12px; }
.lead, .soft, footer { color: var(--soft); } .lead { margin: 4px 0 24px; }
.soft { font-size: 13.5px; margin: 0 0 12px; }
.row { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.facts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); margin-bottom: 16px; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 18px 20px;
  margin-bottom: 16px; min-width: 0; }
.fact { margin: 0; padding: 14px 18px; } .fact dt { color: var(--soft); font-size: 13px; }
.fact dd { margin: 0; font-size: 23px; font-weight: 600; font-variant-numeric: tabular-nums; }
.fact small { display: block; color: var(--soft); font-size: 12.5px; font-weight: 400; }
.warn { border-color: var(--two); } .warn ul { margin: 0; padding-left: 20px; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; } svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--edge); } .axis { stroke: var(--soft); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .dot { stroke: var(--card); stroke-width: 1.5; }
.line.s0 { stroke: var(--one); } .line.s1 { stroke: var(--two); } .line.s2 { stroke: var(--three); }
.line.s3 { stroke: var(--four); } .line.s4 { stroke: var(--peer); } .line.s5 { stroke: var(--soft); }
.dot.s0, i.s0 { fill: var(--one); background: var(--one); } .dot.s1, i.s1 { fill: var(--two); background: var(--two); }
.dot.s2, i.s2 { fill: var(--three); background: var(--three); }
.dot.s3, i.s3 { fill: var(--four); background: var(--four); }
.dot.s4, i.s4 { fill: var(--peer); background: var(--peer); }
.dot.s5, i.s5 { fill: var(--soft); background: var(--soft); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 0; padding: 0;
  color: var(--soft); font-size: 13px; }
.legend i { display: inline-block; width: 18px; height: 3px; border-radius: 2px; margin: 0 7px 3px 0; }
.peer-dot { fill: none; stroke: var(--peer); stroke-width: 1.5; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; color: var(--soft); font-weight: 500; white-space: nowrap; }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--edge); vertical-align: top; }
tr:last-child td { border-bottom: 0; } .number { text-align: right; font-variant-numeric: tabular-nums; }
td.number, td.word { white-space: nowrap; } td.wide { min-width: 150px; overflow-wrap: anywhere; }
.bad { color: var(--two); font-weight: 600; } .good { color: var(--three); font-weight: 600; }
pre { margin: 0; font: 12.5px/1.5 ui-monospace, monospace; overflow-x: auto; }
footer { font-size: 13px; }
"""

_NUMBERS = ("p50", "to reach", "p20-p80", "% of ceiling", "speedup", "GB/s", "TFLOP/s", "peak MiB", "CPU", "over CPU")

Cases = dict[tuple[str, str, str], list[Row]]


def write_report(path: Path, record: Record, comparison: Comparison | None = None) -> None:
    """Write the page under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(build_report(record, comparison), encoding="utf-8")
    temporary.replace(path)


def build_report(record: Record, comparison: Comparison | None = None) -> str:
    """The page.

    Args:
        record: concluded.
        comparison: with a baseline, if one was made.

    Returns:
        HTML; every text from outside is escaped.
    """
    env = record.environment
    cases: Cases = {}
    for row in record.ordered():
        cases.setdefault(row.key[:3], []).append(row)
    title = f"Benchmark: {escape(env.device)}"
    body = [
        f"<h1>{title}</h1>",
        f'<p class="lead">Accelerant {escape(env.accelerant)} on {escape(env.system)}, {escape(env.time)}</p>',
        _facts(record, cases),
        _notes(record),
        _comparison(comparison),
        _losses(cases),
        *(_suite(suite, cases) for suite in dict.fromkeys(key[0] for key in cases)),
        _links(record),
        _roofline_card(record),
        _sweep_card(record),
        _ceiling_card(record),
        _cpu_card(record),
        _targets(record),
        _card("All rows", _table(record)),
        _environment(record),
        "<footer>Times are medians; the line over a bar spans the 20th to the 80th percentile.</footer>",
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{title}</title>'
        f"<style>{_STYLE}{bars_module.STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def _card(title: str, content: str, style: str = "") -> str:
    return f'<section class="card {style}"><h2>{escape(title)}</h2>{content}</section>'


def _facts(record: Record, cases: Cases) -> str:
    contested = [row for row in record.rows if row.speedup is not None]
    won = sum((row.speedup or 0) >= 1 for row in contested)
    facts = []
    if contested:
        mean = math.exp(sum(math.log(row.speedup or 1) for row in contested) / len(contested))
        facts.append(("Against peers", f"{won} of {len(contested)}", "cases at least as fast as the fastest peer"))
        facts.append(("Speed-up", f"{mean:.2f}x", "over the fastest peer, geometric mean"))
    aimed = [row for row in record.rows if (row.target or row.target_x) and row.runner == "accelerant"]
    if aimed:
        facts.append(("Targets", f"{sum(_met(row, cases) for row in aimed)} of {len(aimed)}", "reached"))
    for name, value in record.ceilings.items():
        what, _, unit = name.rpartition(" ")
        facts.append((what[:1].upper() + what[1:], f"{value:.4g}", f"{unit}, ceiling measured in this run"))
    items = [
        f'<dl class="card fact"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(unit)}</small></dd></dl>'
        for name, value, unit in facts
    ]
    return f'<div class="facts">{"".join(items)}</div>'


def _notes(record: Record) -> str:
    absent = [f"{row.op} {row.case}: {row.runner} did not run: {row.note}" for row in record.rows if row.p50 is None]
    lines = [*record.notes, *absent]
    return _card("To know first", f"<ul>{''.join(f'<li>{escape(x)}</li>' for x in lines)}</ul>", "warn") * bool(lines)


def _comparison(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    style = "warn" if comparison.regressions else ""
    return _card("Beside the baseline", f"<pre>{escape(comparison.table())}</pre>", style)


def _losses(cases: Cases) -> str:
    lost = {
        key: rows for key, rows in cases.items() if any(row.speedup is not None and row.speedup < 1 for row in rows)
    }
    if not lost:
        return ""
    text = '<p class="soft">Cases in which a peer was faster, the worst first.</p>'
    return _card("Lost", text + _keys() + "".join(_case(rows) for rows in lost.values()), "warn")


def _keys() -> str:
    names = (("--one", "Accelerant, at least as fast"), ("--two", "Accelerant, slower"), ("--peer", "peers"))
    return f"""<div class="keys">{
        "".join(f'<span><i style="background:var({colour})"></i>{name}</span>' for colour, name in names)
    }</div>"""


def _suite(suite: str, cases: Cases) -> str:
    """Cases of a suite that have a peer and were not lost, those stand above."""
    shown = [
        rows
        for key, rows in cases.items()
        if key[0] == suite and any(row.speedup is not None and row.speedup >= 1 for row in rows)
    ]
    if not shown:
        return ""
    return _card(f"{suite.capitalize()}: beside the peers", _keys() + "".join(_case(rows) for rows in shown))


def _case(rows: Sequence[Row]) -> str:
    """The runners of a case, each case on a scale of its own."""
    ran = [row for row in rows if row.p50 is not None]
    speedup = next((row.speedup for row in ran if row.speedup is not None), None)
    aside = "" if speedup is None else f"{speedup:.3g}x the fastest peer's speed"
    shown = [
        Bar(
            row.runner if row.implementation in ("", row.runner) else f"{row.runner}: {row.implementation}",
            row.p50 or 0.0,
            f"{row.p50:.4g} {row.unit}",
            "peer" if row.runner not in ("accelerant", OWN) else "lost" if (row.speedup or 1) < 1 else "ours",
            row.p20 or 0.0,
            row.p80 or 0.0,
        )
        for row in ran
    ]
    return bars(f"{ran[0].op} {ran[0].case}", shown, aside=aside)


def _ceiling_card(record: Record) -> str:
    rows = [row for row in record.rows if row.percent_of_ceiling is not None and row.runner in ("accelerant", DEVICE)]
    if not rows:
        return ""
    shown = [
        Bar(
            f"{row.op} {row.case}",
            min(row.percent_of_ceiling or 0.0, 150.0),
            f"{row.percent_of_ceiling:.0f}% of {row.ceiling}",
            "ours",
        )
        for row in sorted(rows, key=lambda row: row.percent_of_ceiling or 0.0)
        if row.runner == "accelerant"
    ]
    text = '<p class="soft">Ours; the dashed line is the ceiling, bars end at 150%.</p>'
    return _card("Share of the measured ceiling", text + bars("", shown, limit=100.0)) if shown else ""


def _roofline_card(record: Record) -> str:
    drawn = roofline(record)
    text = '<p class="soft">Filled: ours; hollow: the peers. The pointer over a dot says which case it is.</p>'
    return _card("Roofline", text + drawn) if drawn else ""


def _sweep_card(record: Record) -> str:
    """Rates by size, for ops that were measured at five sizes or more."""
    lines: dict[str, dict[float, float]] = {}
    for row in record.rows:
        size = re.match(r"(\d+)x(\d+)\b", row.case)
        if row.suite == "neural" and row.runner == "accelerant" and row.rate_gb_s and size and not row.flops:
            elements = math.log2(int(size[1]) * int(size[2]))
            name = f"{row.op} {row.case[size.end() :].strip().split('@')[-1]}"
            lines.setdefault(name, {})[elements] = row.rate_gb_s
    drawn = [
        Line(name, sorted(points.items()), f"s{i % 6}", dots=True)
        for i, (name, points) in enumerate((name, points) for name, points in lines.items() if len(points) >= 5)
    ]
    charts = [
        line_chart(drawn[i : i + 6], x_label="log2 of the elements", y_label="GB/s", zero=True)
        for i in range(0, len(drawn), 6)
    ]
    return _card("Rate by size", "".join(charts)) if charts else ""


def _cpu_card(record: Record) -> str:
    rows = [row for row in record.rows if row.over_cpu is not None]
    if not rows:
        return ""
    shown = [
        Bar(f"{row.op} {row.case}", math.log10(max(row.over_cpu or 1.0, 1.0)), f"{row.over_cpu:,.0f}x", "ours")
        for row in sorted(rows, key=lambda row: row.over_cpu or 0.0)
    ]
    text = '<p class="soft">Bars on a logarithmic scale; how the CPU was measured stands in the table.</p>'
    return _card("Over this machine's CPU", text + bars("", shown))


def _links(record: Record) -> str:
    """Rates of copies by size, a chart each for the link and the device."""
    series: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in record.rows:
        size = re.match(r"(\d+) (B|KiB|MiB|GiB)\b", row.case)
        if row.suite != "bandwidth" or size is None or row.rate_gb_s is None:
            continue
        mib = int(size[1]) * {"B": 2**-20, "KiB": 2**-10, "MiB": 1, "GiB": 2**10}[size[2]]
        kind = row.case[size.end() :].strip()
        name = f"{row.op} {kind}, {row.implementation}".replace(" ,", ",")
        series.setdefault(row.op, {}).setdefault(name, []).append((math.log2(mib), row.rate_gb_s))
    charts = []
    for op, lines in series.items():
        drawn = [
            Line(name.removeprefix(f"{op} "), sorted(points), f"s{i % 6}", dots=True)
            for i, (name, points) in enumerate(lines.items())
        ]
        chart = line_chart(drawn, x_label="log2 of the size in MiB", y_label="GB/s", zero=True)
        charts.append(_card(f"{op[:1].upper()}{op[1:]}", chart))
    return f'<div class="row">{"".join(charts)}</div>' if charts else ""


def _met(row: Row, cases: Cases) -> bool:
    """Reached, with every named peer there to be beaten."""
    peers = cases[row.key[:3]]
    return bool(row.reached) and all(peer.p50 is not None or peer.runner == OWN for peer in peers)


def _targets(record: Record) -> str:
    cases: Cases = {}
    for row in record.rows:
        cases.setdefault(row.key[:3], []).append(row)
    aimed = [row for row in record.rows if (row.target or row.target_x) and row.runner == "accelerant"]
    if not aimed:
        return ""
    lines = []
    for row in sorted(aimed, key=lambda row: _met(row, cases)):
        met = _met(row, cases)
        reached = "did not run" if row.p50 is None else f"{row.p50:.4g} {row.unit}"
        if row.target_x and row.speedup:
            reached += f", {row.speedup:.2f}x"
        if not met and row.reached:
            reached += ", a peer did not run"
        lines.append(
            (
                row.op,
                row.case,
                f"{row.target:.4g} {row.unit}" if row.target else f"{row.target_x:.2f}x the fastest peer",
                reached,
                ("good", "reached") if met else ("bad", "unmet"),
            )
        )
    body = "".join(
        f'<tr><td class="word">{escape(op)}</td><td class="wide">{escape(case)}</td>'
        f'<td class="number">{escape(target)}</td><td class="number">{escape(reached)}</td>'
        f'<td class="{verdict[0]}">{verdict[1]}</td></tr>'
        for op, case, target, reached, verdict in lines
    )
    head = '<tr><th>op</th><th>case</th><th class="number">to reach</th><th class="number">p50</th><th></th></tr>'
    return _card("Targets", f'<div class="scroll"><table>{head}{body}</table></div>')


def _table(record: Record) -> str:
    head, *lines = record.cells()
    top = "".join(f'<th class="number">{escape(x)}</th>' if x in _NUMBERS else f"<th>{escape(x)}</th>" for x in head)
    body = "".join(
        f"<tr>{''.join(_cell(name, text) for name, text in zip(head, line, strict=True))}</tr>" for line in lines
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _cell(name: str, text: str) -> str:
    if name in ("case", "note", "ran", "CPU"):
        return f'<td class="wide">{escape(text)}</td>'
    lost = name == "speedup" and text and float(text.rstrip("x")) < 1
    style = ("number" if name in _NUMBERS else "word") + (" bad" if lost else "")
    return f'<td class="{style}">{escape(text)}</td>'


def _environment(record: Record) -> str:
    env = record.environment
    facts: Iterable[tuple[str, str]] = (
        ("device", f"{env.device} ({env.backend}, {env.architecture})"),
        ("driver", env.driver or "none"),
        ("system", env.system),
        ("python", env.python),
        *((name, value) for name, value in (("commit", env.commit), ("command", env.command)) if value),
        *env.packages.items(),
        *((f"ceiling: {name}", f"{value:.5g}") for name, value in record.ceilings.items()),
    )
    rows = "".join(f'<tr><th>{escape(name)}</th><td class="wide">{escape(value)}</td></tr>' for name, value in facts)
    return _card("Environment", f"<table>{rows}</table>")
