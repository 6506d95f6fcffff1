"""The results of loss curves: how far each lies from plain PyTorch's, and how far plain PyTorch lies from itself.

write_curve(folder, record)     curve.csv, curve.svg, curve.md and report.html
update_page(path, record)       the section of a page between its two marks
table(record)                   a text table

Two curves are compared by windows of steps. Both saw the same batches, so a batch's effect drops out of the difference.
The distance of two curves is the root mean square, over all windows, of the difference of their means.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from accelerant.errors import ConfigError
from accelerant.runtime.files import write_atomic
from accelerant.runtime.html_page import Line, line_chart, parts, render
from accelerant.runtime.html_page import table as html_table
from benchmarks.loss_curve import REFERENCE, CurveRecord, LossCurve

__all__ = [
    "MARKS",
    "CurveComparison",
    "comparisons",
    "markdown",
    "picture",
    "table",
    "update_page",
    "window",
    "write_curve",
]

MARKS = ("<!-- curve: made by `python -m benchmarks.loss_curve --page`, not by hand -->", "<!-- curve ends -->")
"""Around the section of a page."""

_WINDOWS = 20
_STYLES = ("s4", "s0", "s1", "s2", "s3", "s5")
_NOISE = f"{REFERENCE}, "

_PAGE_STYLE = "table { font-size: 13.5px; } th, td { padding: 6px 14px 6px 0; }"

_LIGHT = ("#3b6fe0", "#d9631e", "#0f9d76", "#8a5bd6", "#8a96a8", "#647084")
_DARK = ("#7aa5ff", "#ff9a57", "#3fd2a4", "#b794f6", "#7c899d", "#94a1b5")
"""Colors of the lines s0 to s5, as on HTML pages, whose style sheet an image does not have."""

_SVG_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #647084; } .grid { stroke: #d5dbe4; } .axis { stroke: #647084; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
"""
_SVG_DARK = "text { fill: #94a1b5; } .grid { stroke: #2a3342; } .axis { stroke: #94a1b5; }"


@dataclass(frozen=True, slots=True)
class CurveComparison:
    """A run compared with the reference.

    Attributes:
        final: mean loss of the last window.
        distance: root mean square over windows of the difference from the reference; 0 for the reference itself.
        last: difference of the last window.
        differences: difference of each window, run minus reference.
        within: by kind of noise, whether the distance is at most the noise's; empty for plain PyTorch.
    """

    name: str
    final: float
    distance: float
    last: float
    differences: tuple[float, ...]
    within: dict[str, bool]


def window(steps: int) -> int:
    """Return the steps in a window: a twentieth of all."""
    return max(1, steps // _WINDOWS)


def _means(curve: LossCurve, size: int) -> list[float]:
    """Return the mean of each window; the last one includes the remaining steps."""
    whole = max(1, len(curve.losses) // size)
    cuts = [*(i * size for i in range(whole)), len(curve.losses)]
    return [sum(curve.losses[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]


def comparisons(record: CurveRecord) -> list[CurveComparison]:
    """Compare each finished run with the reference.

    Raises:
        ConfigError: the reference is not finished.
    """
    reference = record.curve(REFERENCE)
    if reference is None:
        raise ConfigError(f"the run of {REFERENCE} is not finished: run the command again with the same --out")
    size = window(record.settings.steps)
    base = _means(reference, size)
    compared = []
    for curve in record.curves:
        means = _means(curve, size)
        differences = tuple(a - b for a, b in zip(means, base, strict=True))
        distance = math.sqrt(sum(difference**2 for difference in differences) / len(differences))
        compared.append(CurveComparison(curve.name, means[-1], distance, differences[-1], differences, {}))
    noise = {one.name.removeprefix(_NOISE): one.distance for one in compared if one.name.startswith(_NOISE)}
    for one in compared:
        if not one.name.startswith(REFERENCE):
            one.within.update({kind: one.distance <= size for kind, size in noise.items()})
    return compared


# --- tables ----------------------------------------------------------------------------------------------------------


def _cells(record: CurveRecord) -> list[list[str]]:
    size = window(record.settings.steps)
    head = ["run", f"loss, last {size} steps", "less plain PyTorch's", "distance", "ms a step", "tokens/s"]
    noise = [run for run in comparisons(record) if run.name.startswith(_NOISE)]
    head += [f"distance over that of {run.name.removeprefix(_NOISE)!r}" for run in noise]
    lines = [head]
    tokens = math.prod(record.settings.shape)
    for run in comparisons(record):
        curve = record.curve(run.name)
        assert curve is not None  # for the type checker: comparisons are of the record's own runs
        itself = run.name == REFERENCE
        line = [run.name, f"{run.final:.4f}", "" if itself else f"{run.last:+.4f}"]
        line += ["" if itself else f"{run.distance:.4f}", f"{curve.step_ms:.2f}"]
        line.append(f"{1e3 * tokens / curve.step_ms:,.0f}" if curve.step_ms else "")
        ours = not run.name.startswith(REFERENCE)
        line += [f"{run.distance / other.distance:.2f}" if ours and other.distance else "" for other in noise]
        lines.append(line)
    return lines


def table(record: CurveRecord) -> str:
    """Return a text table with a line for each run, and the verdicts."""
    lines = _cells(record)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = [
        "  ".join(
            text.ljust(width) if not i else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([*rows, "", *_verdicts(record)])


def _verdicts(record: CurveRecord) -> list[str]:
    verdicts = []
    for run in comparisons(record):
        for kind, within in run.within.items():
            word = "within" if within else "beyond"
            verdicts.append(f"{run.name}: {word} what plain PyTorch differs from itself by, {_NOISES[kind]}.")
    return verdicts


_NOISES = {
    "rounded": "from the same initial weights rounded to bfloat16",
    "reseeded": "from other initial weights",
}


def _described(record: CurveRecord) -> str:
    settings = record.settings
    batch, context = settings.shape
    where = f"{record.environment.device}, torch {record.environment.packages.get('torch', '')}"
    return (
        f"{record.parameters / 1e6:.3g} million parameters ({settings.preset}), {settings.steps:,} steps of {batch} x "
        f"{context} tokens of {record.corpus.get('source', 'a corpus')}, seed {settings.seed}, on one {where}. Plain "
        f"PyTorch computes in {'float32' if settings.reference == 'fp32' else 'bfloat16 under autocast'}."
    )


def markdown(record: CurveRecord, image: str, source: str) -> str:
    """Return the section of a page; `image` and `source` are the paths of the picture and the record in it."""
    head, *lines = _cells(record)
    size = window(record.settings.steps)

    def finished(kind: str) -> bool:
        return record.curve(f"{_NOISE}{kind}") is not None

    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join(
        [
            MARKS[0],
            "",
            _described(record),
            "",
            f"![loss curves, and their differences from plain PyTorch's]({image})",
            "",
            *rows,
            "",
            f"The distance of two curves is the root mean square, over windows of {size} steps, of the difference of",
            "their means; both see the same batches. "
            + " ".join(f"`{kind}` is plain PyTorch {text}." for kind, text in _NOISES.items() if finished(kind)),
            "",
            *(f"- {line}" for line in _verdicts(record)),
            "",
            f"All losses are in `{source}`.",
            "",
            MARKS[1],
        ]
    )


def update_page(path: Path, text: str) -> None:
    """Replace the section between the marks of a page.

    Raises:
        ConfigError: the page does not have both marks, once each.
    """
    page = path.read_text(encoding="utf-8")
    begin, end = (page.find(mark) for mark in MARKS)
    if begin < 0 or end < begin or any(page.count(mark) != 1 for mark in MARKS):
        raise ConfigError(f"{path} has no section of curves: a line {MARKS[0]!r} and after it {MARKS[1]!r}, once each")
    write_atomic(path, (page[:begin] + text + page[end + len(MARKS[1]) :]).encode())


# --- pictures --------------------------------------------------------------------------------------------------------


def _style(record: CurveRecord, name: str) -> str:
    return _STYLES[record.settings.names.index(name) % len(_STYLES)]


def _losses_chart(record: CurveRecord) -> str:
    size = window(record.settings.steps)
    lines = []
    for curve in record.curves:
        ends = list(itertools.accumulate(_lengths(curve, max(1, size // 2))))
        means = _means(curve, max(1, size // 2))
        lines.append(Line(curve.name, list(zip(map(float, ends), means, strict=True)), _style(record, curve.name)))
    return line_chart(lines, x_label="step", y_label="loss, nats a token")


def _differences_chart(record: CurveRecord) -> str:
    size = window(record.settings.steps)
    lines = [
        Line(
            run.name,
            [(float(min((i + 1) * size, record.settings.steps)), y) for i, y in enumerate(run.differences)],
            _style(record, run.name),
            dots=not run.name.startswith(REFERENCE),
        )
        for run in comparisons(record)
        if run.name != REFERENCE
    ]
    return line_chart(lines, x_label="step", y_label="less plain PyTorch's") if lines else ""


def _lengths(curve: LossCurve, size: int) -> list[int]:
    whole = max(1, len(curve.losses) // size)
    return [*([size] * (whole - 1)), len(curve.losses) - size * (whole - 1)]


def picture(record: CurveRecord) -> str:
    """Return both charts as one SVG file, for light and dark pages."""
    parts = [
        chart.split("</svg>")[0] + "</svg>" for chart in (_losses_chart(record), _differences_chart(record)) if chart
    ]
    height = 300
    inner = [
        re.sub(r"<svg ", f'<svg x="0" y="{i * height}" width="540" height="{height}" ', part, count=1)
        for i, part in enumerate(parts)
    ]
    base = height * len(parts)
    legend = []
    for i, curve in enumerate(record.curves):
        x, y = 58 + 250 * (i % 2), base + 18 + 20 * (i // 2)
        legend.append(
            f'<line class="line {_style(record, curve.name)}" x1="{x}" y1="{y - 4}" x2="{x + 18}" y2="{y - 4}"/>'
        )
        legend.append(f'<text x="{x + 25}" y="{y}">{escape(curve.name)}</text>')
    total = base + 10 + 20 * -(-len(record.curves) // 2)
    rules = f"{_SVG_STYLE}{_colored(_LIGHT)}\n@media (prefers-color-scheme: dark) {{ {_SVG_DARK} {_colored(_DARK)} }}"
    body = "\n".join([*inner, *legend])
    title = "Loss curves and their differences"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 540 {total}" role="img" aria-label="{title}">\n'
        f"<style>{rules}</style>\n{body}\n</svg>\n"
    )


def _colored(colors: Sequence[str]) -> str:
    return " ".join(
        f".line.s{i} {{ stroke: {color}; }} .dot.s{i} {{ fill: {color}; }}" for i, color in enumerate(colors)
    )


def _page(record: CurveRecord) -> str:
    title = f"Loss curves: {record.settings.preset} on {record.environment.device}"
    verdicts = "".join(
        f'<li class="{"good" if " within " in line else "bad"}">{escape(line)}</li>' for line in _verdicts(record)
    )
    head, *lines = _cells(record)
    figures = html_table(
        head, ([("number" if i else "", cell) for i, cell in enumerate(line)] for line in lines), head[1:]
    )
    env = record.environment
    facts = (
        ("accelerant", f"{env.accelerant} {env.commit}"), ("command", env.command), ("driver", env.driver),
        ("system", env.system), ("python", env.python), ("time", env.time), *env.packages.items(),
        *((f"corpus: {name}", str(value)) for name, value in record.corpus.items()),
    )  # fmt: skip
    about = html_table((), ((("soft", name), ("", value)) for name, value in facts if value))
    size = window(record.settings.steps)
    how = (
        f"The distance of two curves is the root mean square, over windows of {size} steps, of the difference of their "
        "means. All runs see the same batches in the same order."
    )

    def card(name: str, content: str) -> str:
        return str(parts().card(name, content))

    charts = card("Loss", _losses_chart(record)) + card("Difference from plain PyTorch", _differences_chart(record))
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(_described(record))}</p>',
        f'<div class="row">{charts}</div>',
        card("Figures", figures),
        card("Noise", f'<p class="soft">{how}</p><ul>{verdicts}</ul>'),
        card("Environment", about),
    ]
    return render("runtime/page.html", title=title, style=_PAGE_STYLE, parts=body)


def _csv(record: CurveRecord) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *(curve.name for curve in record.curves)])
    for step, losses in enumerate(zip(*(curve.losses for curve in record.curves), strict=True), 1):
        writer.writerow([step, *(f"{loss:.6f}" for loss in losses)])
    return text.getvalue()


def write_curve(folder: Path, record: CurveRecord) -> None:
    """Write curve.csv, curve.svg, curve.md and report.html to the folder of curve.json."""
    texts: Sequence[tuple[str, str]] = (
        ("curve.csv", _csv(record)),
        ("curve.svg", picture(record)),
        ("curve.md", markdown(record, "curve.svg", "curve.json") + "\n"),
        ("report.html", _page(record)),
    )
    for name, text in texts:
        write_atomic(folder / name, text.encode())
