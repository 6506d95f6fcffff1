"""A run's report: one HTML file with curves, the ledger's table, the settings and the sample.

It loads no other files, so it can be mailed, archived and read offline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from accelerant.nn.train.callbacks import ReportChart
from accelerant.nn.train.history import StepRecord
from accelerant.runtime.html_page import (
    Line,
    Reference,
    card,
    document,
    facts,
    line_chart,
    short_number,
    smoothed,
    table,
)
from accelerant.runtime.ledger import row_cells, sections
from accelerant.runtime.memory.limits import size_text

_MOST_DOTS = 40  # on a curve
_ROWS_SHOWN = 16  # of the ledger; a sample adds many cases of few calls each

_STYLE = """
.reference { stroke: var(--soft); stroke-dasharray: 4 4; opacity: .7; } svg .level { font-size: 11px; }
.line.each { stroke: var(--one-soft); stroke-width: 1; } .line.mean { stroke: var(--one); }
.line.held { stroke: var(--two); } .line.speed { stroke: var(--three); }
.dot.each, .dot.mean { fill: var(--one); } .dot.held { fill: var(--two); } .dot.speed { fill: var(--three); }
i.each { background: var(--one-soft); } i.mean { background: var(--one); } i.held { background: var(--two); }
i.speed { background: var(--three); } .line.more { stroke: var(--four); } .dot.more { fill: var(--four); }
i.more { background: var(--four); }
h3 { font-size: 14px; margin: 18px 0 4px; }
table { font-size: 13.5px; } th, td { padding: 6px 14px 6px 0; } .wrap { overflow-wrap: anywhere; }
.number, .word { white-space: nowrap; }
td.case { font-family: ui-monospace, monospace; font-size: 12px; color: var(--soft); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
summary { color: var(--soft); cursor: pointer; padding: 8px 0 0; font-size: 13.5px; }
.empty { color: var(--soft); }
"""


def build_report(
    *, summary: Mapping[str, Any], config: Mapping[str, Any], records: Sequence[StepRecord], ledger: Mapping[str, Any],
    sample: str, curves: Sequence[ReportChart] = (), remarks: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return the page of summary.json, config.json and Ledger.to_dict() as HTML; `remarks` explain the figures."""
    preset, source, device = (
        str(value) for value in (summary["preset"], config["corpus"]["source"], summary["device"])
    )
    count = summary["parameters"]
    size = f"{count:,}" if count < 1e5 else f"{count / 1e6:.1f} million"
    lead = f"{size} parameters, trained on {escape(source)}, on {escape(device)}"
    versions = ", ".join(f"{name} {version}" for name, version in config["versions"].items())
    charts = [_loss_card(summary, config, records)]
    for curve in curves:
        line = Line(curve.label, curve.points, "more", dots=len(curve.points) <= _MOST_DOTS)
        charts.append(_chart_card(curve.title, line, curve.y_label))
    speeds = [(float(record.step), record.tokens_per_s or 0.0) for record in records]
    charts.append(_chart_card("Throughput", Line("tokens a second", speeds, "speed"), "tokens a second"))
    body = [
        f"<h1>Training report: {escape(preset)}</h1>",
        f'<p class="lead">{lead}</p>',
        _facts(summary),
        *[f'<p class="card">{escape(text)}</p>' for text in remarks],
        f'<div class="row">{"".join(charts)}</div>',
        _ledger_card(ledger),
        card("What the model writes", f"<pre>{escape(sample)}</pre>"),
        f'<div class="row">{_table_card("Settings", _settings(config))}{_table_card("Data", _data(config))}</div>',
        f"<footer>{escape(versions)}</footer>",
    ]
    return document(f"Training report: {preset}", _STYLE, body)


def _facts(summary: Mapping[str, Any]) -> str:
    speed, predicted = summary["tokens_per_s"], summary.get("expected_peak_bytes")
    tokens, steps = summary["tokens"], summary["steps"]
    memory = "resident" if str(summary["device"]).startswith("cpu") else "allocated"
    together = f", of {count} processes" if (count := summary.get("processes", 1)) > 1 else ""
    if predicted is not None:
        memory += f"; {size_text(predicted)} predicted"
    items = [
        ("Held-out loss", f"{summary['validation_nats_per_byte']:.3f}", "nats a byte"),
        ("Bigram model", f"{summary['bigram_nats_per_byte']:.3f}", f"unigram {summary['unigram_nats_per_byte']:.3f}"),
        ("Throughput", "not recorded" if speed is None else f"{speed:,.0f}", f"tokens a second, median{together}"),
        ("Learned from", f"{tokens / 1e6:,.2f} M" if tokens >= 1e6 else f"{tokens:,}", f"tokens in {steps:,} steps"),
        ("Peak memory", size_text(summary["peak_memory_bytes"]), memory),
        ("Time", f"{summary['seconds']:,.0f} s", "in all"),
    ]
    if restarts := summary.get("restarts"):
        items.append(("Restarts", f"{restarts}", "from the last checkpoint: a process had died"))
    if summary.get("loss_scale"):
        items.append(("Loss scale", *summary["loss_scale"].split(", ", 1)))
    return facts(items)


def _loss_card(summary: Mapping[str, Any], config: Mapping[str, Any], records: Sequence[StepRecord]) -> str:
    losses = [(float(record.step), record.loss) for record in records]
    held = [(float(r.step), r.validation_loss) for r in records if r.validation_loss is not None]
    held.append((float(summary["steps"]), summary["validation_loss"]))
    lines = [
        Line("training, each step", losses, "each"),
        Line("training, mean", smoothed(losses, max(1, len(losses) // 40)), "mean"),
        Line("held out", held, "held", dots=True),
    ]
    references = []
    if config["run"]["recipe"]["tokenizer"] == "bytes":  # the n-gram models count bytes
        references = [Reference(name, summary[f"{name}_nats_per_byte"]) for name in ("unigram", "bigram")]
    return card("Loss", line_chart(lines, x_label="step", y_label="nats a token", references=references))


def _chart_card(title: str, line: Line, y_label: str) -> str:
    return card(title, line_chart([line], x_label="step", y_label=y_label, zero=True))


def _ledger_card(ledger: Mapping[str, Any]) -> str:
    if not ledger.get("ops"):
        return card("What ran where", '<p class="empty">The ledger recorded no calls.</p>')
    numbers = ("calls", "ms, median", "total ms", "%", "bytes", "flops")
    names = ("op", "implementation", "device", "case", *numbers, "not chosen")

    def tabulated(part: Sequence[Mapping[str, Any]], rest: Sequence[tuple[str, str]] = ()) -> str:
        return table(names, [*map(_ledger_cells, part), *filter(None, [rest])], numbers=numbers)

    tables = ""
    for section in sections(ledger):
        unnamed: list[tuple[str, str]] = []
        if section.heading:
            tables += f"<h3>{escape(section.heading)}</h3>"
        if section.seconds is not None:
            unnamed = [("soft", "not attributed"), *[("", "")] * 5]
            unnamed += [*(("number", text) for text in section.unattributed), *[("", "")] * 3]
        if section.rows:
            tables += tabulated(section.rows[:_ROWS_SHOWN], unnamed)
        if more := section.rows[_ROWS_SHOWN:]:
            tables += f"<details><summary>{len(more)} more cases</summary>{tabulated(more)}</details>"
    fallbacks = ledger.get("fallbacks", ())
    text = "No fallbacks." if not fallbacks else f"Fallbacks: {'; '.join(_pairs(entry) for entry in fallbacks)}"
    return card("What ran where", f'{tables}<p class="soft">{text}</p>')


def _ledger_cells(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    device, (*_, each, total, share) = row.get("device") or row.get("backend"), row_cells(row)
    calls, known = row.get("calls", 0), row.get("bytes_per_call") is not None
    moved, flops = (row[f"{name}_per_call"] * calls if known else row.get(name) for name in ("bytes", "flops"))
    refused = "; ".join(f"{entry.get('implementation')}: {entry.get('reason')}" for entry in row.get("refused", ()))
    return [
        *[("word", str(value)) for value in (row.get("op"), row.get("implementation"), device)],
        ("case", str(row.get("case"))),
        *[("number", text) for text in (f"{calls:,}", each, total, share)],
        ("number", size_text(moved) if moved else "-"),
        ("number", short_number(flops) if flops else "-"),
        ("soft", refused),
    ]


def _pairs(entry: object) -> str:
    if isinstance(entry, Mapping):
        return escape(", ".join(f"{name} {value}" for name, value in entry.items()))
    return escape(str(entry))


def _table_card(title: str, rows: Iterable[tuple[str, object]]) -> str:
    return card(title, table((), ([("soft", name), ("wrap", str(value))] for name, value in rows)))


def _settings(config: Mapping[str, Any]) -> list[tuple[str, object]]:
    run = config["run"]
    rows = [(name.replace("_", " "), value) for name, value in run["recipe"].items()]
    return [*rows, ("seed", run["seed"]), ("deterministic", "yes" if run["deterministic"] else "no")]


def _data(config: Mapping[str, Any]) -> list[tuple[str, object]]:
    corpus = config["corpus"]
    rows = [(name.replace("_", " "), value) for name, value in corpus.items() if value != []]
    shown = [(name, "; ".join(value) if isinstance(value, list) else value) for name, value in rows]
    return [(name, f"{value:,}" if isinstance(value, int) else value) for name, value in shown]
