"""Floors: the least speed that a benchmark must show, read from a TOML file, and the check of records against them.

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerant.bench.record import OURS, BenchmarkRecord, Row
from accelerant.errors import FormatError
from accelerant.runtime.files import plain, read_regular
from accelerant.runtime.html_page import text_table

_DIRECTIONS = ("forward", "backward", "both")
_FIELDS = {"times", "peer", "ms"}


@dataclass(frozen=True, slots=True)
class Floor:
    """A floor of the rows whose op and case have the words of `key`.

    Attributes:
        device: the device's name, or a part of it.
        times: the least speed, as a multiple of the peer's; None for a floor in milliseconds.
        peer: runner to compare with.
        ms: the most milliseconds.
    """

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
    """Check records against the floors of their devices; a floor without a row to compare is a miss.

    A case that the peer does not have is left out. One of ours that has no time is a miss with the reason.
    """
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
    """Return the floors that records reach with a margin, as TOML.

    Cases that torch has too give the least speed over torch's of each op and direction, times the margin; others in
    milliseconds give their 80th percentile over the margin. First calls, which depend on the host, are left out.
    """
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
