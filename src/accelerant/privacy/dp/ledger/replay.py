"""What the records of a ledger's file mean: how often each event may have happened.

A run reserves before it acts: "up to so many of this event". A record of what was used replaces its reservations. So
what a crash leaves counts in full, and no event has to wait for the disk but the first of a block.

    {"kind": "ledger", "version": 1, "unit", "neighbouring", "dataset"}     the first line
    {"kind": "run", "run", "time", "dataset", "budget", "versions", "torn_bytes"}
    {"kind": "reserve", "run", "event", "count"}
    {"kind": "used", "run", "closed", "events": [[event, count], ...]}
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from accelerant._version import __version__
from accelerant.errors import FormatError
from accelerant.privacy.dp.ledger.events import Event

__all__ = ["VERSION", "Book", "Run", "event_record", "used_records", "versions"]

VERSION: Final = 1


@dataclass(slots=True)
class Run:
    """One opening of a ledger.

    Attributes:
        facts: of its first record: time, dataset, budget, versions.
        used: what is known to have been done, at least.
        reserved: what may have been done besides.
        closed: whether it ended with a record of what was used.
    """

    facts: Mapping[str, Any]
    used: Counter[Event] = field(default_factory=Counter)
    reserved: Counter[Event] = field(default_factory=Counter)
    closed: bool = False

    @property
    def counts(self) -> Counter[Event]:
        """Of each event how many there may have been."""
        return self.used + self.reserved


@dataclass(slots=True)
class Book:
    """A ledger's file, read.

    Attributes:
        facts: of the first record: unit, neighbouring, dataset. Empty for an empty file.
        runs: in order.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    @property
    def counts(self) -> Counter[Event]:
        """Of all runs."""
        total: Counter[Event] = Counter()
        for run in self.runs:
            total.update(run.counts)
        return total

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], path: Path) -> Book:
        """The book of a file's records.

        Raises:
            FormatError: a record that has no meaning here; the message names the line.
        """
        book = cls()
        for number, record in enumerate(records, 1):
            try:
                book._take(record)
            except (KeyError, IndexError, TypeError, ValueError) as error:  # FormatError is a ValueError
                what = str(error) if isinstance(error, FormatError) else "not a record that this version knows"
                raise FormatError(f"{path}, line {number}: {what}") from None
        return book

    def _take(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if (kind == "ledger") != (not self.facts):
            raise FormatError("a ledger begins with one record that says what it is of, and has no other such record")
        if kind == "ledger":
            if record["version"] != VERSION:
                raise FormatError(
                    f"a ledger of version {record['version']}, this one reads {VERSION}: update accelerant"
                )
            self.facts = {name: str(record[name]) for name in ("unit", "neighbouring", "dataset")}
            return
        if kind == "run":
            if record["run"] != len(self.runs) + 1:
                raise FormatError(f"run {record['run']} follows run {len(self.runs)}")
            self.runs.append(Run({name: value for name, value in record.items() if name != "kind"}))
            return
        run = self.runs[-1]
        if record["run"] != len(self.runs) or run.closed:
            raise FormatError(f"a record of run {record['run']} after it ended")
        if kind == "reserve":
            run.reserved[Event.from_dict(record["event"]).times(1)] += _count(record["count"])
        elif kind == "used":
            self._settle(run, record)
        else:
            raise FormatError(f"a record of kind {kind!r}")

    def _settle(self, run: Run, record: Mapping[str, Any]) -> None:
        used = Counter({Event.from_dict(event).times(1): _count(count) for event, count in record["events"]})
        if used - run.counts:
            raise FormatError("more was used than was reserved")
        if run.used - used:
            raise FormatError("less was used than before")
        run.used, run.reserved, run.closed = used, Counter(), bool(record["closed"])


def event_record(event: Event) -> dict[str, Any]:
    """An event as its records have it: without count, and without fields that are as they are by default."""
    plain = Event(event.mechanism, event.noise_multiplier).to_dict()
    found = event.to_dict()
    del found["count"]
    keep = ("mechanism", "noise_multiplier", "sampling")
    return {name: value for name, value in found.items() if name in keep or value != plain[name]}


def used_records(counts: Iterable[tuple[Event, int]]) -> list[list[Any]]:
    """The events of a record of what was used."""
    return [[event_record(event), count] for event, count in counts if count]


def versions() -> dict[str, str]:
    """Of this library and of those that a ledger's numbers depend on."""
    found = {"accelerant": __version__}
    for package in ("dp-accounting", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise FormatError(f"a count of {value!r}")
    return value
