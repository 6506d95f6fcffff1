"""Comparison of a record with a baseline and with floors, and the page of a record with plots.

A row regressed if its median is worse by more than 5% and by more than twice the noise: the baseline's spread from its
median on the worse side plus this run's on the better side (p20 to p80, which is 0.84 standard deviations of a normal
distribution to either side). A row that is worse by less than that is "unclear": named, but not a regression.

Floors are the least speeds that a benchmark must show, read from a TOML file. A key is an op and its case, or words of
its cases; odd sizes and sweeps are not checked, since below some size nothing gains:

    margin = 0.9                                # what `bench check --write` multiplied the records' figures by
    ["NVIDIA H200"]                             # the record's device, or a part of its name
    "gelu forward" = 1.1                        # 1.1 times torch's speed, in each case with these words
    "gpt step" = { times = 1.3, peer = "compile" }
    "msm bn254_g1 2^20" = { ms = 5.0 }          # at most
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from accelerant.bench.record import DETERMINISTIC, OURS, OWN, BenchmarkRecord, Row
from accelerant.errors import FormatError
from accelerant.runtime.files import plain, read_regular, reason_of, write_atomic
from accelerant.runtime.html_page import Bar, Line, line_chart, render, text_table

_NUMBERS = (
    "p50", "to reach", "p20-p80", "% of ceiling", "speedup", "wall ms", "back to back ms", "device ms", "p95", "p99",
    "first call", "GB/s", "GFLOP/s", "GOp/s", "peak MiB", "CPU", "over CPU",
)  # fmt: skip

Cases = dict[tuple[str, ...], list[Row]]
Cells = list[tuple[str, str]]
"""CSS class and text of the cells of a row."""
CaseBars = tuple[str, str, list[Bar]]
"""Title of a case, what is said beside it, and a bar for each runner."""


def write_report(path: Path, record: BenchmarkRecord, comparison: Comparison | None = None) -> None:
    """Write the page; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, build_report(record, comparison).encode())


def build_report(record: BenchmarkRecord, comparison: Comparison | None = None) -> str:
    """Return the page of a concluded record as HTML."""
    # thousands of the sweep's sizes would bury the named cases; those that did not run come after these
    swept = [row for row in record.rows if row.part == "sweep" and row.p50 is not None]
    others = [row for row in record.rows if row.part != "sweep" or row.p50 is None]
    record = replace(record, rows=sorted(others, key=lambda row: row.part == "sweep"))
    cases, ours = _cases(record.ordered()), [row for row in record.rows if row.runner == OURS]
    suites: dict[str, list[CaseBars]] = {suite: [] for suite, *_ in cases}
    for (suite, *_), rows in cases.items():
        if not _lost(rows) and any(row.speedup is not None for row in rows):
            suites[suite].append(_case_bars(rows))
    shares = sorted(
        (row for row in ours if row.percent_of_ceiling is not None), key=lambda r: r.percent_of_ceiling or 0
    )
    over_cpu = sorted((row.over_cpu, f"{row.op} {row.case}") for row in record.rows if row.over_cpu is not None)
    head, *lines = record.cells()
    return render(
        "bench/report.html",
        title=f"Benchmark: {record.environment.device}",
        env=record.environment,
        figures=_figures(record, cases),
        notes=_notes(record),
        comparison=comparison,
        lost=[_case_bars(rows) for rows in cases.values() if _lost(rows)],
        sweep_losses=_sweep_losses(swept),
        sweep_sizes=len({row.case_key for row in swept if row.runner == OURS}),
        suites=suites,
        links=_charts(_link_rates(record.rows), "log2 of the size in MiB"),
        roofline=roofline(record),
        sweep_rates=_charts(_sweep_rates(swept), "log2 of the elements"),
        shares=[
            Bar(f"{row.op} {row.case}", min(percent, 150.0), f"{percent:.0f}% of {row.ceiling}", "ours")
            for row in shares
            if (percent := row.percent_of_ceiling) is not None
        ],
        over_cpu=[Bar(name, math.log10(max(over, 1.0)), f"{over:,.0f}x", "ours") for over, name in over_cpu],
        targets=_targets(record),
        head=head,
        rows=[list(map(_cell, head, line)) for line in lines],
        numbers=_NUMBERS,
        environment=_environment(record),
    )


def _cases(rows: Iterable[Row]) -> Cases:
    cases: Cases = {}
    for row in rows:
        cases.setdefault(row.case_key, []).append(row)
    return cases


def _lost(rows: Sequence[Row]) -> bool:
    """Return whether dispatch's choice was slower than a peer, or has no time where a peer has one."""
    ours = [row for row in rows if row.runner == OURS]
    if any(row.slower for row in ours):
        return True
    return any(row.p50 is None for row in ours) and any(row.p50 is not None and row.peer for row in rows)


def _figures(record: BenchmarkRecord, cases: Cases) -> list[tuple[str, str, str]]:
    contested = [row for row in record.rows if row.speedup is not None and row.runner == OURS]
    items = []
    if contested:
        won, level = sum((row.speedup or 0) >= 1 for row in contested), sum(row.level for row in contested)
        also = f", {level} more level with it" if level else ""
        mean = math.exp(sum(math.log(row.speedup or 1) for row in contested) / len(contested))
        about = f"cases at least as fast as the fastest peer{also}"
        items.append(("Against peers", f"{won} of {len(contested)}", about))
        items.append(("Speed-up", f"{mean:.2f}x", "over the fastest peer, geometric mean"))
    if aimed := [row for row in record.rows if row.aims and row.compared]:
        items.append(("Targets", f"{sum(_met(row, cases) for row in aimed)} of {len(aimed)}", "reached"))
    for name, value in record.ceilings.items():
        what, _, unit = name.rpartition(" ")
        items.append((what[:1].upper() + what[1:], plain(value), f"{unit}, ceiling measured in this run"))
    return items


def _notes(record: BenchmarkRecord) -> list[str]:
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
    return [*record.notes, *wrong, *missing]


def _case_bars(rows: Sequence[Row]) -> CaseBars:
    ran = [row for row in rows if row.p50 is not None]
    ours = next((row for row in rows if row.runner == OURS), None)
    aside = f"{ours.speedup:.3g}x the fastest peer's speed" if ours is not None and ours.speedup is not None else ""
    aside = f"ours has no time: {ours.note}" if ours is not None and ours.p50 is None else aside

    def style(row: Row) -> str:
        if row.runner not in (OURS, OWN, DETERMINISTIC):
            return "peer"
        return "lost" if row.slower else "ours"

    shown = [
        Bar(
            row.runner if row.implementation in ("", row.runner) else f"{row.runner}: {row.implementation}",
            row.p50 or 0.0,
            f"{plain(row.p50)} {row.unit}" + f", wall {plain(row.wall_ms)} ms" * (row.wall_ms not in (None, row.p50)),
            style(row), row.p20 or 0.0, row.p80 or 0.0,
        )
        for row in ran
    ]  # fmt: skip
    return f"{ran[0].op} {ran[0].case}", aside, shown


_STYLES = {OURS: "s0", "torch": "s4", "torch.compile": "s2"}


def _charts(rows: Iterable[tuple[str, str, float, float]], x_label: str) -> list[tuple[str, str]]:
    """Return titles and charts of (title, line, x, GB/s)."""
    series: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for title, line, x, rate in rows:
        series.setdefault(title, {}).setdefault(line, []).append((x, rate))
    charts = []
    for title, lines in series.items():
        drawn = [
            Line(name, sorted(points), _STYLES.get(name, f"s{i % 6}"), dots=True)
            for i, (name, points) in enumerate(sorted(lines.items(), key=lambda pair: pair[0] not in _STYLES))
        ]
        charts.append((title, line_chart(drawn, x_label=x_label, y_label="GB/s", zero=True)))
    return charts


def _sweep_rates(rows: Iterable[Row]) -> Iterator[tuple[str, str, float, float]]:
    """Yield op and direction, runner, log2 of the elements and GB/s; round numbers of elements only."""
    for row in rows:
        size = re.match(r"(\d+)x(\d+)\b", row.case)
        if row.rate_gb_s and size and (elements := int(size[1]) * int(size[2])) % 2 == 0:
            yield f"{row.op} {row.case.split()[-1]}", row.runner, math.log2(elements), row.rate_gb_s


def _link_rates(rows: Iterable[Row]) -> Iterator[tuple[str, str, float, float]]:
    """Yield direction, kind of memory, log2 of the MiB and GB/s of copies over a link and on the device."""
    for row in rows:
        size = re.match(r"(\d+) (B|KiB|MiB|GiB)\b", row.case)
        if row.suite == "bandwidth" and size is not None and row.rate_gb_s is not None:
            mib = int(size[1]) * {"B": 2**-20, "KiB": 2**-10, "MiB": 1, "GiB": 2**10}[size[2]]
            name = f"{row.case[size.end() :].strip()}, {row.implementation}".removeprefix(", ")
            yield f"{row.op[:1].upper()}{row.op[1:]}", name, math.log2(mib), row.rate_gb_s


def _sweep_losses(rows: Iterable[Row]) -> list[Cells]:
    """Return a row for each size at which torch or torch.compile was faster."""
    lost = [
        (row, min((peer for peer in rows if peer.peer and peer.p50), key=lambda peer: peer.p50 or 0.0))
        for rows in filter(_lost, _cases(rows).values())
        for row in rows
        if row.runner == OURS
    ]
    lost.sort(key=lambda pair: pair[0].speedup or 0.0)
    return [
        [
            ("word", row.op), ("wide", row.case), ("wide", row.implementation), ("number", plain(row.p50)),
            ("word", peer.runner), ("number", plain(peer.p50)), ("number bad", f"{row.speedup:.2f}x"),
        ]
        for row, peer in lost
    ]  # fmt: skip


_WIDTH, _HEIGHT = 1060, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 16, 44


def roofline(record: BenchmarkRecord) -> str:
    """Return the roofline as SVG, a dot for each row; "" without ceilings or rows with operations."""
    copy, matrix = record.ceilings.get("copy GB/s"), record.ceilings.get("matmul TFLOP/s")
    rows = [row for row in record.rows if row.tflop_s and row.bytes]
    if not copy or not matrix or not rows:
        return ""
    intensities = [row.flops / row.bytes for row in rows]
    ridge = matrix * 1e3 / copy
    x_low, x_high = math.log10(min(*intensities, ridge) / 2), math.log10(max(*intensities, ridge) * 2)
    y_low = math.log10(min(min(row.tflop_s or matrix for row in rows), copy * 10**x_low / 1e3) / 1.5)
    y_high = math.log10(matrix * 1.6)
    base, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def x(intensity: float) -> float:
        return round(_LEFT + (math.log10(intensity) - x_low) / (x_high - x_low) * (right - _LEFT), 1)

    def y(rate: float) -> float:
        return round(base - (math.log10(rate) - y_low) / (y_high - y_low) * (base - _TOP), 1)

    def dot(row: Row) -> tuple[float, float, str, str]:
        lost = row.speedup is not None and row.speedup < 1
        style = f"dot {'s1' if lost else 's0'}" if row.compared else "peer-dot"
        title = f"{row.op} {row.case}, {row.runner} {row.implementation}: {row.tflop_s:.0f} TFLOP/s"
        return x(row.flops / row.bytes), y(row.tflop_s or 1.0), style, title

    start, end = 10**x_low, 10**x_high
    return render(
        "bench/roofline.html",
        columns=[(x(10**n), f"{10**n:g}") for n in range(math.ceil(x_low), math.floor(x_high) + 1)],
        levels=[(y(10**n), f"{10**n:g}") for n in range(math.ceil(y_low), math.floor(y_high) + 1)],
        roof=[(x(start), y(copy * start / 1e3)), (x(ridge), y(matrix)), (x(end), y(matrix))],
        dots=list(map(dot, sorted(rows, key=lambda row: row.compared))),  # ours over the peers
        copy=copy, matrix=matrix, copy_label=(x(start * 1.3), y(copy * start * 1.3 / 1e3)),
        width=_WIDTH, height=_HEIGHT, left=_LEFT, right=right, top=_TOP, base=base,
    )  # fmt: skip


def _met(row: Row, cases: Cases) -> bool:
    """Return whether a row's targets are reached and every named peer ran."""
    return bool(row.reached) and all(peer.p50 is not None or peer.compared for peer in cases[row.case_key])


def _targets(record: BenchmarkRecord) -> list[Cells]:
    cases = _cases(record.rows)
    aimed = [row for row in record.rows if row.aims and row.compared]
    rows = []
    for row in sorted(aimed, key=lambda row: _met(row, cases)):
        met = _met(row, cases)
        reached = _figure(row)
        if row.p50 is not None and row.target_bytes and row.peak_bytes is not None:
            reached += f", {plain(row.peak_bytes / 2**20)} MiB"
        if not met and row.reached:
            reached += ", a peer did not run"
        own = next((other for other in cases[row.case_key] if other.runner == OWN), None)
        rows.append(
            [
                ("word", row.op), ("wide", row.case), ("wide", row.implementation),
                ("number", row.aims), ("number", reached),
                ("number", "the same" if own is None else _figure(own)),
                ("good", "reached") if met else ("bad", "unmet"),
            ]
        )  # fmt: skip
    return rows


def _figure(row: Row) -> str:
    """Return a row's median and speed-up, or why it has none."""
    if row.p50 is None:
        return "wrong" if row.wrong else "did not run"
    return f"{plain(row.p50)} {row.unit}" + (f", {row.speedup:.2f}x" if row.speedup else "")


def _cell(name: str, text: str) -> tuple[str, str]:
    """Return the CSS class and the text of a cell of all rows."""
    if name in ("case", "note", "ran", "CPU"):
        return "wide", text
    lost = name == "speedup" and text and float(text.split("x")[0]) < 1
    return ("number" if name in _NUMBERS else "word") + (" bad" if lost else ""), text


def _environment(record: BenchmarkRecord) -> list[tuple[str, str]]:
    env = record.environment
    return [
        ("device", f"{env.device} ({env.backend}, {env.architecture})"),
        ("driver", env.driver or "none"),
        ("system", env.system),
        ("python", env.python),
        *((name, value) for name, value in (("commit", env.commit), ("command", env.command)) if value),
        *env.packages.items(),
        *((f"ceiling: {name}", plain(value, 5)) for name, value in record.ceilings.items()),
    ]


_LEAST = 0.05  # change of a median from run to run by clocks and memory layouts, however steady each run is

_TIMES_NOISE = 2.0

Verdict = Literal["slower", "missing", "unclear", "same", "faster"]


@dataclass(frozen=True, slots=True)
class Change:
    """A row of the baseline and of this run; `now` is None where this run does not have it.

    `worse` is cost now over cost before, `noise` the two spreads as a share of the baseline's median; "slower" and
    "missing" are regressions, "unclear" is worse within the noise.
    """

    before: Row
    now: Row | None
    worse: float
    noise: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of a run with its baseline, a change for each row of it that the run was to measure.

    `not_asked` is the number of rows of the baseline that the run was not to measure, `added` that of rows that the
    baseline does not have.
    """

    changes: tuple[Change, ...]
    not_asked: int = 0
    added: int = 0

    @property
    def regressions(self) -> list[Change]:
        """The changes that fail the comparison."""
        return [change for change in self.changes if change.verdict in ("slower", "missing")]

    def table(self) -> str:
        """Return a text table of the changes, regressions first and the worst first, and the counts of all verdicts."""
        order = ("slower", "missing", "unclear", "faster")
        shown = sorted(
            (change for change in self.changes if change.verdict != "same"),
            key=lambda change: (order.index(change.verdict), -change.worse),
        )
        lines = [("verdict", "suite", "op", "case", "before", "now", "change", "noise")] if shown else []
        for change in shown:
            row, now = change.before, change.now
            figures = ((now.note if now else "") or "not run", "", "")
            if now is not None and now.p50 is not None:
                figures = (f"{plain(now.p50)} {now.unit}", f"{change.worse:.2f}x", f"{100 * change.noise:.0f}%")
            lines.append((change.verdict, row.suite, row.op, row.case, f"{plain(row.p50)} {row.unit}", *figures))
        counts = {name: sum(change.verdict == name for change in self.changes) for name in (*order, "same")}
        summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no row in common"
        if self.added:
            summary += f", {self.added} not in the baseline"
        if self.not_asked:
            summary += f", {self.not_asked} of the baseline not asked for"
        return "\n".join([*text_table(lines, width=1 << 20), summary])


def check_comparable(old: BenchmarkRecord, device: str) -> None:
    """Raise FormatError for a baseline of another device, or one that has no row to compare with."""
    if old.environment.device != device:
        raise FormatError(f"the baseline is of {old.environment.device}, this run of {device}")
    if not any(row.compared and row.p50 is not None for row in old.rows):
        raise FormatError("the baseline has no measured row of ours: nothing to compare with")


def compare(old: BenchmarkRecord, new: BenchmarkRecord, *, asked: Callable[[Row], bool] = lambda _: True) -> Comparison:
    """Compare each row of a baseline with this run's; peers' times are not compared.

    `asked` returns whether this run was to measure a row of the baseline. FormatError as check_comparable.
    """
    check_comparable(old, new.environment.device)
    now = {row.key: row for row in new.rows if row.compared}
    before = {row.key: row for row in old.rows if row.compared and row.p50 is not None}
    covered = [row for row in before.values() if asked(row)]
    added = sum(row.p50 is not None and key not in before for key, row in now.items())
    changes = tuple(_change(row, now.get(row.key)) for row in covered)
    return Comparison(changes, not_asked=len(before) - len(covered), added=added)


def _change(before: Row, now: Row | None) -> Change:
    if now is None or now.p50 is None or now.unit != before.unit:
        return Change(before, now, 1.0, 0.0, "missing")
    low, middle, high = _costs(before)
    low_now, middle_now, high_now = _costs(now)
    if (worse := middle_now / middle) >= 1:
        noise = ((high - middle) + (middle_now - low_now)) / middle
        verdict: Verdict = "slower" if worse > 1 + _TIMES_NOISE * noise else "unclear"
        return Change(before, now, worse, noise, verdict if worse > 1 + _LEAST else "same")
    noise = ((middle - low) + (high_now - middle_now)) / middle
    return Change(before, now, worse, noise, "faster" if 1 - worse > max(_LEAST, _TIMES_NOISE * noise) else "same")


def _costs(row: Row) -> tuple[float, float, float]:
    """Return the quantiles in rising order as costs, of which less is better."""
    middle = row.p50 or 1.0
    low, high = row.p20 or middle, row.p80 or middle
    if not low <= middle <= high:  # no run writes such a row: its spread cannot be believed
        low = high = middle
    return (1 / high, 1 / middle, 1 / low) if row.better == "higher" else (low, middle, high)


# --- floors -----------------------------------------------------------------------------------------------------------
_DIRECTIONS = ("forward", "backward", "both")
_FIELDS = {"times", "peer", "ms"}


@dataclass(frozen=True, slots=True)
class Floor:
    """A floor of the rows with the words of `key`: the least multiple of a peer's speed, or the most milliseconds."""

    device: str
    key: str
    times: float | None = None
    peer: str = "torch"
    ms: float | None = None

    def rows(self, record: BenchmarkRecord) -> list[Row]:
        """Return the rows of ours that must reach the floor: of the case that it names, or with its words."""
        mine = [row for row in record.rows if _checked(row) and f"{self.key} ".startswith(f"{row.op} ")]
        exact = [row for row in mine if self.key == f"{row.op} {row.case}"]
        return exact or [row for row in mine if set(self.key.removeprefix(row.op).split()) <= set(row.case.split())]


def _checked(row: Row) -> bool:
    return row.runner == OURS and row.part in ("", "size") and row.unit == "ms"


@dataclass(frozen=True, slots=True)
class Miss:
    """A case below its floor; `reached` is None where it has no figure, and `why` says so."""

    key: str
    case: str
    needed: str
    reached: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class FloorCheck:
    """The result of a check: figures that reach their floors, those that do not, and floors that were not checked."""

    held: int
    missed: tuple[Miss, ...]
    unmeasured: tuple[str, ...] = ()

    def table(self) -> str:
        """Return a text table of the misses, and the counts."""
        lines = [("floor", "case", "needed", "reached", "why")] if self.missed else []
        lines += [(one.key, one.case, one.needed, one.reached, one.why) for one in self.missed]
        counts = f"{self.held} of {self.held + len(self.missed)} figures reach their floors"
        absent = f"{len(self.unmeasured)} floors need a record: {', '.join(self.unmeasured)}" if self.unmeasured else ""
        return "\n".join(filter(None, [*text_table(lines, width=1 << 20), counts, absent]))

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return asdict(self)


def read_floors(path: Path) -> list[Floor]:
    """Read a file of floors; FormatError names the file and the key that is not one."""
    try:
        table = tomllib.loads(read_regular(path).decode())
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} is not a file of floors: {reason_of(error)}") from None
    floors = []
    for device, entries in table.items():
        if device == "margin" and isinstance(entries, float | int):
            continue
        if not isinstance(entries, dict):
            raise FormatError(f"{path}: {device!r} is outside a table; floors are in tables named after devices")
        for key, value in entries.items():
            given = value if isinstance(value, dict) else {"times": value}
            numbers = [given[name] for name in ("times", "ms") if name in given]
            good = len(numbers) == 1 and given.keys() <= _FIELDS and isinstance(given.get("peer", ""), str)
            good = good and isinstance(numbers[0], float | int) and not isinstance(numbers[0], bool)
            if not good or not 0 < numbers[0] < math.inf:
                forms = "a number above 0, {times = ..., peer = ...} or {ms = ...}"
                raise FormatError(f"{path}: {key!r} must be {forms}; got {value!r}")
            floors.append(Floor(device, key, **given))
    return floors


def check_floors(floors: Sequence[Floor], records: Sequence[BenchmarkRecord]) -> FloorCheck:
    """Check records against their devices' floors; a floor without a row, or a row without a time, is a miss."""
    held, misses = 0, list[Miss]()
    for floor in floors:
        needed = f"{plain(floor.ms)} ms at most" if floor.ms is not None else f"{floor.times:g}x {floor.peer}"
        compared = 0
        for record in records:
            for row in floor.rows(record) if floor.device in record.environment.device else ():
                figure = row.p50 if floor.ms is not None else _speed(row, record, floor.peer)
                if figure is None and row.p50 is not None:
                    continue
                compared += 1
                if figure is None:
                    misses.append(Miss(floor.key, row.case, needed, "-", row.note))
                elif (figure <= floor.ms) if floor.ms is not None else (figure >= (floor.times or 0.0)):
                    held += 1
                else:
                    reached = f"{figure:.3g}{' ms' if floor.ms is not None else 'x'}"
                    misses.append(Miss(floor.key, row.case, needed, reached))
        if not compared and any(floor.device in record.environment.device for record in records):
            misses.append(Miss(floor.key, "", needed, "-", "no row to compare in these records"))
    return FloorCheck(held, tuple(misses))


def _speed(row: Row, record: BenchmarkRecord, peer: str) -> float | None:
    times = [other.p50 for other in record.rows if other.case_key == row.case_key and other.runner == peer]
    return times[0] / row.p50 if times and times[0] and row.p50 else None


def floors_text(records: Sequence[BenchmarkRecord], margin: float) -> str:
    """Return the floors that records reach with a margin, as TOML: speed over torch's, or else ms; no first calls."""
    tables: dict[str, dict[str, str]] = {}
    for record in records:
        speeds: dict[str, float] = {}
        floors = tables.setdefault(record.environment.device, {})
        for row in record.rows:
            if not _checked(row) or row.p50 is None or row.op == "first call":
                continue
            if speed := _speed(row, record, "torch"):
                last = row.case.split()[-1]
                key = f"{row.op} {last}" if last in _DIRECTIONS else row.op
                speeds[key] = min(speed, speeds.get(key, math.inf))
            elif not any(other.peer and other.case_key == row.case_key for other in record.rows):
                floors[f"{row.op} {row.case}"] = f"{{ ms = {float(f'{(row.p80 or row.p50) / margin:.3g}'):g} }}"
        floors |= {key: f"{math.floor(100 * margin * speed) / 100:g}" for key, speed in speeds.items()}
    lines = [
        "# Made from records by `accelerant bench check FLOORS.toml RECORD.json ... --write`.",
        f"margin = {margin:g}",
    ]
    for device, floors in tables.items():
        lines += ["", f'["{device}"]', *(f'"{key}" = {floors[key]}' for key in sorted(floors))]
    return "\n".join([*lines, ""])
