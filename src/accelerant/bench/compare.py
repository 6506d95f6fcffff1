"""Comparison of a record with a baseline, judged by the spread that both runs measured.

A row regressed if its median is worse by more than 5% and by more than twice the noise: the baseline's spread from its
median on the worse side plus this run's on the better side (p20 to p80, which is 0.84 standard deviations of a normal
distribution to either side). A row that is worse by less than that is "unclear": named, but not a regression.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from accelerant.bench.record import BenchmarkRecord, Row
from accelerant.errors import FormatError
from accelerant.runtime.files import plain
from accelerant.runtime.html_page import text_table

_LEAST = 0.05
"""Change of a median from run to run by clocks and memory layouts, however steady each run is."""

_TIMES_NOISE = 2.0

Verdict = Literal["slower", "missing", "unclear", "same", "faster"]


@dataclass(frozen=True, slots=True)
class Change:
    """A row of the baseline and of this run.

    Attributes:
        now: None where this run does not have the row.
        worse: cost now over cost before; above 1 is worse, also for figures where more is better.
        noise: the two spreads as a share of the baseline's median.
        verdict: "slower" and "missing" are regressions; "unclear" is worse within the noise.
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
