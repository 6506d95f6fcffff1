"""A record as a page: what was lost first, bars beside the peers, shares of the ceilings, targets, all rows.

One HTML file that loads nothing from anywhere, for light and dark screens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from accelerant.bench import bars as bars_module
from accelerant.bench.bars import Bar, bars
from accelerant.bench.compare import Comparison
from accelerant.bench.record import DETERMINISTIC, DEVICE, OWN, Record, Row
from accelerant.bench.roofline import roofline
from accelerant.nn.train.charts import Line, line_chart
from accelerant.nn.train.page import document
from accelerant.runtime.files import write_atomic

__all__ = ["build_report", "write_report"]

_STYLE = """
.soft { font-size: 13.5px; margin: 0 0 12px; }
.warn { border-color: var(--two); } .warn ul { margin: 0; padding-left: 20px; overflow-wrap: anywhere; }
.line.s0 { stroke: var(--one); } .line.s1 { stroke: var(--two); } .line.s2 { stroke: var(--three); }
.line.s3 { stroke: var(--four); } .line.s4 { stroke: var(--peer); } .line.s5 { stroke: var(--soft); }
.dot.s0, i.s0 { fill: var(--one); background: var(--one); } .dot.s1, i.s1 { fill: var(--two); background: var(--two); }
.dot.s2, i.s2 { fill: var(--three); background: var(--three); }
.dot.s3, i.s3 { fill: var(--four); background: var(--four); }
.dot.s4, i.s4 { fill: var(--peer); background: var(--peer); }
.dot.s5, i.s5 { fill: var(--soft); background: var(--soft); }
.peer-dot { fill: none; stroke: var(--peer); stroke-width: 1.5; }
table { font-size: 13px; } th, td { padding: 5px 10px 5px 0; }
td.number, td.word { white-space: nowrap; } td.wide { min-width: 150px; overflow-wrap: anywhere; }
.bad { color: var(--two); font-weight: 600; } .good { color: var(--three); font-weight: 600; }
pre { overflow-x: auto; }
"""

_NUMBERS = ("p50", "to reach", "p20-p80", "% of ceiling", "speedup", "GB/s", "TFLOP/s", "peak MiB", "CPU", "over CPU")

Cases = dict[tuple[str, ...], list[Row]]


def write_report(path: Path, record: Record, comparison: Comparison | None = None) -> None:
    """Write the page under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, build_report(record, comparison).encode())


def build_report(record: Record, comparison: Comparison | None = None) -> str:
    """The page.

    Args:
        record: concluded.
        comparison: with a baseline, if one was made.

    Returns:
        HTML; every text from outside is escaped.
    """
    env = record.environment
    swept, record = _parted(record)
    cases = _cases(record.ordered())
    title = f"Benchmark: {escape(env.device)}"
    body = [
        f"<h1>{title}</h1>",
        f'<p class="lead">Accelerant {escape(env.accelerant)} on {escape(env.system)}, {escape(env.time)}</p>',
        _facts(record, cases),
        _notes(record),
        _comparison(comparison),
        _losses(cases),
        _sweep_losses(swept),
        *(_suite(suite, cases) for suite in dict.fromkeys(key[0] for key in cases)),
        _links(record),
        _roofline_card(record),
        _sweep_card(swept),
        _ceiling_card(record),
        _cpu_card(record),
        _targets(record),
        _card("All rows", _table(record)),
        _environment(record),
        "<footer>Times are medians; the line over a bar spans the 20th to the 80th percentile.</footer>",
    ]
    return document(title, _STYLE + bars_module.STYLE, [part for part in body if part])


def _parted(record: Record) -> tuple[Record, Record]:
    """The sweep, and the rest: thousands of sizes would bury the cases that have a name."""
    parts = [
        [row for row in record.rows if (row.part == "sweep") is swept and not (swept and row.p50 is None)]
        for swept in (True, False)
    ]
    missing = [row for row in record.rows if row.part == "sweep" and row.p50 is None]
    swept, rest = (replace(record, rows=rows) for rows in parts)
    return swept, replace(rest, rows=rest.rows + missing)


def _cases(rows: Iterable[Row]) -> Cases:
    cases: Cases = {}
    for row in rows:
        cases.setdefault(row.case_key, []).append(row)
    return cases


def _lost(rows: Sequence[Row]) -> bool:
    """Whether what dispatch chose was slower than a peer, or has no time where a peer has one."""
    if any(row.runner == "accelerant" and row.speedup is not None and row.speedup < 1 for row in rows):
        return True
    ours = [row for row in rows if row.runner == "accelerant"]
    return any(row.p50 is None for row in ours) and any(row.p50 is not None and not row.compared for row in rows)


def _card(title: str, content: str, style: str = "") -> str:
    return f'<section class="card {style}"><h2>{escape(title)}</h2>{content}</section>'


def _facts(record: Record, cases: Cases) -> str:
    contested = [row for row in record.rows if row.speedup is not None and row.runner == "accelerant"]
    won = sum((row.speedup or 0) >= 1 for row in contested)
    facts = []
    if contested:
        mean = math.exp(sum(math.log(row.speedup or 1) for row in contested) / len(contested))
        facts.append(("Against peers", f"{won} of {len(contested)}", "cases at least as fast as the fastest peer"))
        facts.append(("Speed-up", f"{mean:.2f}x", "over the fastest peer, geometric mean"))
    aimed = [row for row in record.rows if row.aims and row.compared]
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
    absent = [row for row in record.rows if row.p50 is None]
    wrong = [f"{row.op} {row.case}: {row.runner} was {row.note}" for row in absent if row.wrong]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in absent:
        if not row.wrong:
            reasons.setdefault((row.runner, row.note, row.op), []).append(row.case)
    missing = [
        f"{op}: {runner} did not run: {note} ({cases[0]}{f' and {len(cases) - 1} more' if len(cases) > 1 else ''})"
        for (runner, note, op), cases in reasons.items()
    ]
    lines = [*record.notes, *wrong, *missing]
    return _card("To know first", f"<ul>{''.join(f'<li>{escape(x)}</li>' for x in lines)}</ul>", "warn") * bool(lines)


def _comparison(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    style = "warn" if comparison.regressions else ""
    return _card("Beside the baseline", f"<pre>{escape(comparison.table())}</pre>", style)


def _losses(cases: Cases) -> str:
    lost = {key: rows for key, rows in cases.items() if _lost(rows)}
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
        if key[0] == suite and not _lost(rows) and any(row.speedup is not None for row in rows)
    ]
    if not shown:
        return ""
    return _card(f"{suite.capitalize()}: beside the peers", _keys() + "".join(_case(rows) for rows in shown))


def _case(rows: Sequence[Row]) -> str:
    """The runners of a case, each case on a scale of its own."""
    ran = [row for row in rows if row.p50 is not None]
    speedup = next((row.speedup for row in ran if row.speedup is not None and row.runner == "accelerant"), None)
    aside = "" if speedup is None else f"{speedup:.3g}x the fastest peer's speed"
    without = next((row.note for row in rows if row.runner == "accelerant" and row.p50 is None), None)
    aside = f"ours has no time: {without}" if without is not None else aside
    shown = [
        Bar(
            row.runner if row.implementation in ("", row.runner) else f"{row.runner}: {row.implementation}",
            row.p50 or 0.0,
            f"{row.p50:.4g} {row.unit}",
            "peer"
            if row.runner not in ("accelerant", OWN, DETERMINISTIC)
            else "lost"
            if (row.speedup or 1) < 1
            else "ours",
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


def _swept(record: Record) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Op and direction -> runner -> log2 of the elements and GB/s, of round numbers of elements."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in record.rows:
        size = re.match(r"(\d+)x(\d+)\b", row.case)
        if row.rate_gb_s and size:
            elements = int(size[1]) * int(size[2])
            if elements % 2 == 0:
                name = f"{row.op} {row.case.split()[-1]}"
                found.setdefault(name, {}).setdefault(row.runner, []).append((math.log2(elements), row.rate_gb_s))
    return found


def _sweep_card(record: Record) -> str:
    """Rates by size, ours beside torch's."""
    styles = {"accelerant": "s0", "torch": "s4", "torch.compile": "s2"}
    charts = []
    for name, runners in _swept(record).items():
        lines = [
            Line(runner, sorted(points), styles.get(runner, "s5"), dots=True)
            for runner, points in sorted(runners.items(), key=lambda pair: list(styles).index(pair[0]))
        ]
        chart = line_chart(lines, x_label="log2 of the elements", y_label="GB/s", zero=True)
        charts.append(f"<div><b>{escape(name)}</b>{chart}</div>")
    text = '<p class="soft">Least bytes over the median; odd numbers of elements stand in the record alone.</p>'
    return _card("Rate by size", f'{text}<div class="row">{"".join(charts)}</div>') if charts else ""


def _sweep_losses(record: Record) -> str:
    """Sizes at which torch or torch.compile was faster, a line each."""
    lost = [
        (row, min((peer for peer in rows if not peer.compared and peer.p50), key=lambda peer: peer.p50 or 0.0))
        for rows in _cases(record.rows).values()
        if _lost(rows)
        for row in rows
        if row.runner == "accelerant"
    ]
    if not lost:
        return ""
    lost.sort(key=lambda pair: pair[0].speedup or 0.0)
    body = "".join(
        f'<tr><td class="word">{escape(row.op)}</td><td class="wide">{escape(row.case)}</td>'
        f'<td class="wide">{escape(row.implementation)}</td><td class="number">{row.p50:.4g}</td>'
        f'<td class="word">{escape(peer.runner)}</td><td class="number">{peer.p50:.4g}</td>'
        f'<td class="number bad">{row.speedup:.2f}x</td></tr>'
        for row, peer in lost
    )
    count = len({row.case_key for row in record.rows if row.runner == "accelerant"})
    text = f'<p class="soft">{len(lost)} of {count} sizes, the worst first; times in ms.</p>'
    head = "<tr><th>op</th><th>case</th><th>ran</th><th>p50</th><th>faster</th><th>p50</th><th>speedup</th></tr>"
    return _card("Lost in the sweep", f'{text}<div class="scroll"><table>{head}{body}</table></div>', "warn")


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
    peers = cases[row.case_key]
    return bool(row.reached) and all(peer.p50 is not None or peer.compared for peer in peers)


def _targets(record: Record) -> str:
    cases = _cases(record.rows)
    aimed = [row for row in record.rows if row.aims and row.compared]
    if not aimed:
        return ""
    lines = []
    for row in sorted(aimed, key=lambda row: _met(row, cases)):
        met = _met(row, cases)
        reached = "wrong" if row.wrong else "did not run" if row.p50 is None else f"{row.p50:.4g} {row.unit}"
        if row.target_x and row.speedup:
            reached += f", {row.speedup:.2f}x"
        if row.target_bytes and row.peak_bytes is not None:
            reached += f", {row.peak_bytes / 2**20:.4g} MiB"
        if not met and row.reached:
            reached += ", a peer did not run"
        lines.append(
            (row, _aim(row), reached, _own(cases[row.case_key]), ("good", "reached") if met else ("bad", "unmet"))
        )
    body = "".join(
        f'<tr><td class="word">{escape(row.op)}</td><td class="wide">{escape(row.case)}</td>'
        f'<td class="wide">{escape(row.implementation)}</td><td class="number">{escape(target)}</td>'
        f'<td class="number">{escape(reached)}</td><td class="number">{escape(own)}</td>'
        f'<td class="{verdict[0]}">{verdict[1]}</td></tr>'
        for row, target, reached, own, verdict in lines
    )
    head = "<tr><th>op</th><th>case</th><th>ran</th>"
    head += (
        "".join(f'<th class="number">{name}</th>' for name in ("to reach", "p50", "own kernel, forced"))
        + "<th></th></tr>"
    )
    return _card("Targets", f'<div class="scroll"><table>{head}{body}</table></div>')


def _aim(row: Row) -> str:
    """What a row is to reach, in words."""
    parts = [f"{row.target:.4g} {row.unit}" if row.target else ""]
    parts.append(f"{row.target_x:.2f}x the fastest peer" if row.target_x else "")
    parts.append(f"{row.target_bytes / 2**20:.4g} MiB" if row.target_bytes else "")
    return ", ".join(filter(None, parts))


def _own(rows: Sequence[Row]) -> str:
    """What our own kernel took where dispatch chose a library; "the same" where it chose ours."""
    own = next((row for row in rows if row.runner == OWN), None)
    if own is None:
        return "the same"
    if own.p50 is None:
        return "wrong" if own.wrong else "did not run"
    return f"{own.p50:.4g} {own.unit}" + (f", {own.speedup:.2f}x" if own.speedup else "")


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
    lost = name == "speedup" and text and float(text.split("x")[0]) < 1
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
