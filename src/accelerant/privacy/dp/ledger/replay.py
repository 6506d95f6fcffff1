"""Replay of a ledger's file: how often each event may have happened.

A run reserves before it acts: "up to so many of this event". A record of what was used replaces its reservations. So a
crash counts all that was reserved, and only the first event of a block waits for the disk.

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

__all__ = ["VERSION", "History", "Run", "event_record", "used_records", "versions"]

VERSION: Final = 1


@dataclass(slots=True)
class Run:
    """One opening of a ledger.

    Attributes:
        facts: of its first record: time, dataset, budget, versions.
        used: events known to have happened.
        reserved: further events that may have happened.
        closed: whether it ended with a record of what was used.
    """

    facts: Mapping[str, Any]
    used: Counter[Event] = field(default_factory=Counter)
    reserved: Counter[Event] = field(default_factory=Counter)
    closed: bool = False

    @property
    def counts(self) -> Counter[Event]:
        """The most that may have happened of each event."""
        return self.used + self.reserved


@dataclass(slots=True)
class History:
    """The contents of a ledger's file.

    Attributes:
        facts: of the first record: unit, neighbouring, dataset. Empty for an empty file.
        runs: in order.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    @property
    def counts(self) -> Counter[Event]:
        """The most that may have happened of each event, in all runs."""
        total: Counter[Event] = Counter()
        for run in self.runs:
            total.update(run.counts)
        return total

    @classmethod
    def replay(cls, records: Sequence[Mapping[str, Any]], path: Path) -> History:
        """Replay a file's records.

        Raises:
            FormatError: an invalid record; the message names the line.
        """
        history = cls()
        for number, record in enumerate(records, 1):
            try:
                history._apply(record)
            except (KeyError, IndexError, TypeError, ValueError) as error:  # FormatError is a ValueError
                reason = str(error) if isinstance(error, FormatError) else "not a record that this version knows"
                raise FormatError(f"{path}, line {number}: {reason}") from None
        return history

    def _apply(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if (kind == "ledger") != (not self.facts):
            raise FormatError("a ledger begins with one record of kind 'ledger', and has no other")
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
            used = Counter({Event.from_dict(event).times(1): _count(count) for event, count in record["events"]})
            if used - run.counts:
                raise FormatError("more was used than was reserved")
            if run.used - used:
                raise FormatError("less was used than before")
            run.used, run.reserved, run.closed = used, Counter(), bool(record["closed"])
        else:
            raise FormatError(f"a record of kind {kind!r}")


def event_record(event: Event) -> dict[str, Any]:
    """Return an event as records hold it: without count, and without fields at their defaults."""
    plain = Event(event.mechanism, event.noise_multiplier).to_dict()
    fields = event.to_dict()
    del fields["count"]
    always = ("mechanism", "noise_multiplier", "sampling")
    return {name: value for name, value in fields.items() if name in always or value != plain[name]}


def used_records(counts: Iterable[tuple[Event, int]]) -> list[list[Any]]:
    """Return the events of a record of what was used."""
    return [[event_record(event), count] for event, count in counts if count]


def versions() -> dict[str, str]:
    """Return the versions of this library and of those that a ledger's numbers depend on."""
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
