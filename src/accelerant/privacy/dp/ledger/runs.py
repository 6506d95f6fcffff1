"""The runs of a ledger's file: what each writes, and how often each event may have happened.

Before events happen, a run reserves a number of them. A record of the events that did happen replaces its reservations.
So after a crash all reserved events are counted, and only the first event of a block waits for the disk.

    {"kind": "ledger", "version": 1, "unit", "neighbouring", "dataset"}     the first line
    {"kind": "run", "run", "time", "dataset", "budget", "versions", "torn_bytes"}
    {"kind": "reserve", "run", "event", "count"}
    {"kind": "used", "run", "closed", "events": [[event, count], ...]}
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from accelerant._version import __version__
from accelerant.errors import FormatError
from accelerant.privacy.dp.ledger.events import Event
from accelerant.privacy.dp.ledger.journal import Journal

__all__ = ["VERSION", "History", "Run", "RunWriter", "event_record", "versions"]

VERSION: Final = 1


@dataclass(slots=True)
class Run:
    """One opening of a ledger.

    Attributes:
        facts: of its first record: time, dataset, budget, versions.
        used: events known to have happened.
        reserved: further events that may have happened.
        closed: whether it ended with a record of the events that happened.
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
        """Replay a file's records; FormatError names the line of an invalid one."""
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


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise FormatError(f"a count of {value!r}")
    return value


class RunWriter:
    """Writes one run: its first record, reservations before events, and the exact counts at the end.

    Args:
        journal: of the ledger's file.
        run: the run's number, from 1.
        facts: for its first record: dataset, budget.
    """

    def __init__(self, journal: Journal, run: int, facts: Mapping[str, Any]) -> None:
        self.used: Counter[Event] = Counter()
        self._reserved: Counter[Event] = Counter()
        self._journal = journal
        self._run = run
        self._process = os.getpid()
        self._open = True
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found = {"versions": versions(), "torn_bytes": journal.torn_bytes}
        journal.append({"kind": "run", "run": run, "time": time, **facts, **found})

    def reserve(self, event: Event, block: int) -> None:
        """Reserve `block` more of an event unless event.count more, which is at most `block`, are reserved already."""
        self._journal.require_open()
        one = event.times(1)
        if self.used[one] + event.count <= self._reserved[one]:
            return
        more = self.used[one] + block - self._reserved[one]
        self._journal.append({"kind": "reserve", "run": self._run, "event": event_record(one), "count": more})
        self._reserved[one] += more

    def settle(self, *, closed: bool) -> None:
        """Replace the reservations by the exact counts."""
        events = [[event_record(event), count] for event, count in self.used.items() if count]
        self._journal.append({"kind": "used", "run": self._run, "closed": closed, "events": events})
        self._reserved = self.used.copy()

    def close(self) -> None:
        """Settle, and close the file; a fork of the process writes nothing."""
        if not self._open:
            return
        self._open = False
        if os.getpid() == self._process:
            self.settle(closed=True)
        self._journal.close()


def event_record(event: Event) -> dict[str, Any]:
    """Return an event as records hold it: without count, and without optional fields at their defaults."""
    defaults = {field.name: field.default for field in fields(Event) if field.name != "sampling"}
    values = event.to_dict()
    return {name: value for name, value in values.items() if name != "count" and value != defaults.get(name)}


def versions() -> dict[str, str]:
    """Return the versions of this library and of those that a ledger's numbers depend on."""
    found = {"accelerant": __version__}
    for package in ("dp-accounting", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
