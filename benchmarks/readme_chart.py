"""Draw the README's chart from the committed records, and write the tables of its figures and of all slower cases.

    python -m benchmarks.readme_chart    docs/pictures/chart-*.svg, and sections of README.md, docs/benchmarks.md and
                                         docs/scaling.md

The pictures are for light and dark pages, and for wide and narrow ones; the badges have the values of pyproject.toml.
tests/benchmarks/test_readme_chart.py compares all of them with the records.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from accelerant._version import __version__
from accelerant.bench.record import DEVICE, BenchmarkRecord, Row
from accelerant.errors import ConfigError
from accelerant.runtime.files import plain, write_atomic

__all__ = ["Bar", "Panel", "draw", "files", "main", "panels", "slower_cases"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

_LIGHT = {
    "card": "#ffffff",
    "edge": "#d7dde6",
    "text": "#1b2330",
    "soft": "#5a677a",
    "bar": "#3b6fe0",
    "peer": "#c2cad6",
}
_DARK = {
    "card": "#141a23",
    "edge": "#2a3342",
    "text": "#e6eaf1",
    "soft": "#9fabbd",
    "bar": "#7aa5ff",
    "peer": "#4b586c",
}
_WIDTH, _PAD, _ROW, _HEAD = 430, 20, 37, 66
"""Width of a panel and its margin, height of a bar with its text, and of a panel's title."""

_TOP = 26

_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: $text; }
.title { font-size: 16px; font-weight: 600; } .soft { fill: $soft; font-size: 12px; }
.ours { font-weight: 600; } .value { text-anchor: end; font-variant-numeric: tabular-nums; }
rect.card { fill: $card; stroke: $edge; } rect.peer { fill: $peer; } rect.mine { fill: $bar; }
"""

_SLOWER = 0.95
"""A case counts as slower below this share of the fastest peer's speed."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One runner's figure.

    Attributes:
        speed: the bar's length is proportional to it.
        text: the figure with its unit, and the peak memory.
        loss: losses of the first steps, for the table.
    """

    name: str
    speed: float
    text: str
    ours: bool = False
    loss: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars of one comparison, from one record."""

    title: str
    setting: str
    record: str
    bars: tuple[Bar, ...]


def panels() -> list[Panel]:
    """Return the four comparisons of the chart, from the committed records."""
    patch, neural, dp, proofs = map(_record, ("patch-h200", "neural-h200", "dp-h200", "groth16-cpu"))
    model, case = "llama-1b", "4 x 2048 bfloat16 forward, backward, AdamW"
    tokens = 4 * 2048
    names = {"eager": "PyTorch", "compile": "torch.compile", "liger": "Liger", "accelerant": "Accelerant, nn.patch"}
    training = [_rate(_row(patch, model, case, runner), name, tokens) for runner, name in names.items()]

    size = "32x12x1024x64"
    names = {"torch": "PyTorch", "cudnn": "cuDNN", "flash_attn_4": "FlashAttention-4", "accelerant": "Accelerant"}
    attention = []
    for runner, name in names.items():
        parts = [
            _row(neural, "attention", f"{size}@{size}@{size} bfloat16 causal {direction}", runner)
            for direction in ("forward", "backward")
        ]
        ms = sum(_p50(part) for part in parts)
        memory = max(part.peak_bytes or 0 for part in parts)
        attention.append(Bar(name, 1 / ms, f"{ms:.3f} ms, {memory / 2**20:.0f} MiB", runner == "accelerant"))

    size = "64x1024 12 layers of 768, untied, bf16 autocast"
    private = [
        _rate(_row(dp, op, f"{size}, {case}", runner), name, 64 * 1024)
        for op, case, runner, name in (
            ("gpt step", "not private", "torch", "PyTorch, not private"),
            ("private gpt step", "Philox", "opacus hooks", "Opacus, private"),
            ("private gpt step", "secure", "accelerant", "Accelerant, private"),
        )
    ]

    size = "131,001 constraints"
    commands = [
        Bar(name, 1 / _p50(row), f"{_p50(row) / 1e3:.2f} s", row.runner == "accelerant")
        for row, name in (
            (_row(proofs, "command", f"{size}, wall", "snarkjs"), "snarkjs"),
            (_row(proofs, "command", f"{size}, wall", "accelerant"), "Accelerant"),
            (_row(proofs, "proof", f"{size}, key warm, wall", "accelerant"), "Accelerant, key loaded"),
        )
    ]
    gpu = patch.environment.device
    return [
        Panel(
            "Train a Hugging Face model",
            f"Llama 1B, 4 x 2048 tokens, bfloat16, {gpu}",
            "patch-h200",
            tuple(training),
        ),
        Panel(
            "Attention, forward and backward",
            f"32 x 12 heads x 1024 x 64, causal, bfloat16, {gpu}",
            "neural-h200",
            tuple(attention),
        ),
        Panel(
            "Train with differential privacy",
            f"12 layers of 768, 64 x 1024 tokens, bfloat16, {gpu}",
            "dp-h200",
            tuple(private),
        ),
        Panel(
            "Prove with Groth16",
            "131,001 constraints, from files to files, 2 CPU cores",
            "groth16-cpu",
            tuple(commands),
        ),
    ]


def draw(shown: Sequence[Panel], colors: Mapping[str, str], columns: int) -> str:
    """Return the chart as SVG, with so many panels in a row."""
    rows = [shown[i : i + columns] for i in range(0, len(shown), columns)]
    heights = [_HEAD + _ROW * max(len(panel.bars) for panel in row) + 8 for row in rows]
    width, height = columns * (_WIDTH + 12) - 12, _TOP + sum(heights) + 12 * (len(heights) - 1)
    style = _STYLE
    for name, color in colors.items():
        style = style.replace(f"${name}", color)
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{escape(alt_text(shown))}">',
        f"<style>{style}</style>",
        '<text class="soft" x="2" y="14">Longer bars are faster. GiB and MiB: peak memory of the GPU.</text>',
    ]
    for number, panel in enumerate(shown):
        row, column = divmod(number, columns)
        x, y = column * (_WIDTH + 12), sum(heights[:row]) + 12 * row + _TOP
        inner, longest = _WIDTH - 2 * _PAD, max(bar.speed for bar in panel.bars)
        parts += [
            f'<g transform="translate({x} {y})">',
            f'<rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{heights[row] - 1}" rx="10"/>',
            f'<text class="title" x="{_PAD}" y="30">{escape(panel.title)}</text>',
            f'<text class="soft" x="{_PAD}" y="49">{escape(panel.setting)}</text>',
        ]
        for place, bar in enumerate(panel.bars):
            top, long = _HEAD + _ROW * place, max(2.0, inner * bar.speed / longest)
            kind, fill = ("ours", "mine") if bar.ours else ("", "peer")
            parts += [
                f'<text class="{kind}" x="{_PAD}" y="{top + 12}">{escape(bar.name)}</text>',
                f'<text class="{kind} value" x="{_WIDTH - _PAD}" y="{top + 12}">{escape(bar.text)}</text>',
                f'<rect class="{fill}" x="{_PAD}" y="{top + 18}" width="{long:.1f}" height="9" rx="2"/>',
            ]
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def alt_text(shown: Sequence[Panel]) -> str:
    """Return the chart as a sentence for each panel."""
    return " ".join(
        f"{panel.title} ({panel.setting}): {'; '.join(f'{bar.name} {bar.text}' for bar in panel.bars)}."
        for panel in shown
    )


def files() -> dict[Path, str]:
    """Return every file that the records determine, by path: the pictures, and the pages with their sections."""
    shown = panels()
    pictures = ROOT / "docs" / "pictures"
    made = {
        pictures / f"chart-{shape}-{name}.svg": draw(shown, colors, columns)
        for name, colors in (("light", _LIGHT), ("dark", _DARK))
        for shape, columns in (("wide", 2), ("narrow", 1))
    }
    made |= {pictures / f"badge-{name}.svg": text for name, text in badges().items()}
    for page, name, text in (
        (ROOT / "README.md", "chart", _readme_section(shown)),
        (ROOT / "docs" / "benchmarks.md", "figures", _figures_section(shown)),
        (ROOT / "docs" / "benchmarks.md", "user", _user_section(_record("user-h200"))),
        (ROOT / "docs" / "benchmarks.md", "slower", _slower_section()),
        (ROOT / "docs" / "scaling.md", "scale", _scale_section(sorted(RESULTS.glob("scale-*.json"), reverse=True))),
    ):
        made[page] = _replaced(made.get(page) or page.read_text(encoding="utf-8"), name, text, page)
    return made


def badges() -> dict[str, str]:
    """Return the README's badges as SVG, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    minor = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    values = {
        "version": __version__,
        "python": ", ".join(minor),
        "license": project["license"],
        "docs": "docs/index.md",
    }
    return {name: _badge(name, value) for name, value in values.items()}


def _badge(name: str, value: str) -> str:
    left, right = (round(7 * len(text)) + 14 for text in (name, value))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="22" role="img" '
        f'aria-label="{name}: {escape(value)}">\n'
        "<style>text { font: 12px system-ui, sans-serif; fill: #fff; text-anchor: middle; }</style>\n"
        f'<rect width="{left + right}" height="22" rx="4" fill="#4b586c"/>\n'
        f'<path d="M{left} 0 H{left + right - 4} a4 4 0 0 1 4 4 V18 a4 4 0 0 1 -4 4 H{left} Z" fill="#2f5fd0"/>\n'
        f'<text x="{left / 2}" y="15">{name}</text><text x="{left + right / 2}" y="15">{escape(value)}</text>\n</svg>\n'
    )


def slower_cases(record: BenchmarkRecord) -> list[Row]:
    """Return the rows slower than the fastest peer by more than 5% and than the samples' spread, the slowest first."""
    rows = [
        row for row in record.rows if row.runner == "accelerant" and (row.speedup or 1.0) < _SLOWER and not row.level
    ]
    return sorted(rows, key=lambda row: row.speedup or 0.0)


def main() -> None:
    """Write the pictures and the sections."""
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, text.encode())
        print(path.relative_to(ROOT))


def _record(name: str) -> BenchmarkRecord:
    return BenchmarkRecord.load(RESULTS / f"{name}.json")


def _row(record: BenchmarkRecord, op: str, case: str, runner: str) -> Row:
    (row,) = [row for row in record.rows if (row.op, row.case, row.runner) == (op, case, runner)]
    return row


def _p50(row: Row) -> float:
    if row.p50 is None:
        raise ConfigError(f"{row.op}, {row.case}, {row.runner}: the record has no time")
    return row.p50


def _rate(row: Row, name: str, tokens: int) -> Bar:
    rate = tokens / _p50(row) * 1e3
    loss = re.search(r"first loss(?:es)? ([\d. ]*\d)", row.note)
    memory = f"{(row.peak_bytes or 0) / 2**30:.1f} GiB"
    return Bar(name, rate, f"{rate:,.0f} tokens/s, {memory}", row.runner == "accelerant", loss[1] if loss else "")


def _readme_section(shown: Sequence[Panel]) -> str:
    alt = escape(alt_text(shown))
    sources = "\n".join(
        f'  <source media="{"(max-width: 600px) and " * (shape == "narrow")}(prefers-color-scheme: {color})" '
        f'srcset="docs/pictures/chart-{shape}-{color}.svg">'
        for shape in ("narrow", "wide")
        for color in ("dark", "light")
    )
    return (
        f'<picture>\n{sources}\n  <img alt="{alt}" src="docs/pictures/chart-wide-light.svg" width="100%">\n</picture>'
    )


def _figures_section(shown: Sequence[Panel]) -> str:
    lines = [
        "| comparison | runner | median, peak memory | loss of the first steps | record |",
        "|---|---|---|---|---|",
    ]
    for panel in shown:
        for bar in panel.bars:
            link = f"[{panel.record}](../benchmarks/results/{panel.record}.csv)"
            lines.append(f"| {panel.title}: {panel.setting} | {bar.name} | {bar.text} | {bar.loss} | {link} |")
    about = []
    for panel in shown:
        made = _record(panel.record).environment
        versions = ", ".join(f"{name} {version}" for name, version in made.packages.items())
        about.append(f"- `{panel.record}`: {made.device}, {made.time[:10]}, Python {made.python}, {versions}.")
    return "\n".join([*lines, "", *about])


_USER_PEERS = ("torch", "torch.compile", "liger")


def _user_section(record: BenchmarkRecord) -> str:
    """Return the table of what plain calls cost: what is not reached first, then in the order of the record."""
    by_case: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in record.rows:
        by_case.setdefault(row.case_key, {})[row.runner] = row
    lines = [
        "| plain call | runner | ours | device | torch | torch.compile | Liger | to reach | reached |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted((row for row in record.ordered() if row.ours), key=lambda row: row.reached is not False):
        case = re.sub(r"@[\dx@]+", "", row.case)  # the other arguments' sizes
        peers = [_figure(by_case[row.case_key].get(name)) for name in _USER_PEERS]
        device = "" if row.device_ms is None else f"{plain(row.device_ms)} ms"
        reached = {True: "yes", False: "no", None: ""}[row.reached] + " (level)" * (
            row.level and row.reached is not None
        )
        runner = row.runner.removeprefix("accelerant, ")
        cells = (f"{row.op} {case}", runner, _figure(row), device, *peers, row.aims, reached)
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"- {note}" for note in record.notes]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _figure(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{plain(row.p50)} {row.unit}" if row.p50 is not None else "did not run"


def _scale_section(paths: Sequence[Path]) -> str:
    """Return for each record of several devices the table of its cases, and its costs and predictions."""
    parts = []
    for path in paths:
        record = BenchmarkRecord.load(path)
        by_case: dict[str, list[Row]] = {}
        for row in record.rows:
            by_case.setdefault(row.case, []).append(row)
        lines = [
            f"**{record.environment.device}**, `benchmarks/results/{path.name}`, commit {record.environment.commit}\n",
            "| case | one device alone | all | of its speed | to reach | torch | predicted, to measured |",
            "|---|---|---|---|---|---|---|",
        ]
        for ours in (row for row in record.rows if row.ours):
            others = [row for row in by_case[ours.case] if row.runner == DEVICE]
            alone = next((row for row in others if not row.op.startswith("predicted") and ours.op in row.op), None)
            predicted = next((row for row in others if row.op == f"predicted {ours.op}"), None)
            peer = next((row for row in by_case[ours.case] if row.runner == "torch"), None)
            speed = f"{alone.p50 / ours.p50:.3f}" if alone and alone.p50 and ours.p50 else ""
            ratio = f"{predicted.p50 / ours.p50:.3f}" if predicted and predicted.p50 and ours.p50 else ""
            reached = {True: ", reached", False: ", not reached", None: ""}[ours.reached]
            aims = f"{ours.aims}{reached}" if ours.aims else ""
            figures = (_figure(alone), _figure(ours), speed, aims, _figure(peer), ratio)
            lines.append(f"| {' | '.join((f'{ours.op}, {ours.case}', *figures))} |")
        parts.append("\n".join([*lines, "", *(f"- {note}" for note in record.notes)]))
    return "\n\n".join(parts)


def _slower_section() -> str:
    lines = [
        "| record | compared | slower by over 5% | the slowest case of each op: speed over the fastest peer's |",
        "|---|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        if path.stem.startswith("curve"):
            continue  # losses
        record = BenchmarkRecord.load(path)
        compared = sum(row.runner == "accelerant" and row.speedup is not None for row in record.rows)
        if not compared:
            continue
        slower = slower_cases(record)
        worst: dict[str, Row] = {}
        for row in slower:
            worst.setdefault(row.op, row)
        texts = [f"{op} {row.speedup:.2f} ({row.case})" for op, row in worst.items()]
        lines.append(f"| {path.stem} | {compared} | {len(slower)} | {'; '.join(texts)} |")
    return "\n".join(lines)


def _replaced(page: str, name: str, text: str, path: Path) -> str:
    begin, end = f"<!-- {name}: made by `python -m benchmarks.readme_chart` -->", f"<!-- {name} ends -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ConfigError(f"{path} needs a line {begin!r} and after it {end!r}, once each")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    main()
