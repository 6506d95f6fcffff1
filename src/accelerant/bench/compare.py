"""Comparison of a record with a baseline, judged by the spread that both runs measured, and with floors.

A row regressed if its median is worse by more than 5% and by more than twice the noise: the baseline's spread from its
median on the worse side plus this run's on the better side (p20 to p80, which is 0.84 standard deviations of a normal
distribution to either side). A row that is worse by less than that is "unclear": named, but not a regression.

Floors are the least speeds that a benchmark must show, read from a TOML file:

    margin = 0.9                                # what `bench check --write` multiplied the records' figures by

    ["NVIDIA H200"]                             # the record's device, or a part of its name
    "gelu forward" = 1.1                        # 1.1 times torch's speed, in each case with these words
    "gpt step" = { times = 1.3, peer = "compile" }
    "msm bn254_g1 2^20" = { ms = 5.0 }          # at most

A key is an op and its case, or words of its cases. Odd sizes and sweeps are not checked: below some size nothing gains.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from accelerant.bench.record import OURS, BenchmarkRecord, Row
from accelerant.errors import FormatError
from accelerant.runtime.files import plain, read_regular
from accelerant.runtime.html_page import text_table

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
    worse = middle_now / middle
    if worse >= 1:
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
        raise FormatError(f"{path} is not a file of floors: {error}") from None
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
