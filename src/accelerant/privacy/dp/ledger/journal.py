"""A ledger's file: an append-only journal of JSON records, and the runs that its records are of.

A line is {"record": {...}, "chain": "<hex>"}. Its chain is the SHA-256 of the previous chain and the record. Lines cut
off at the end are detected by `<file>.head`, the number of lines and the last chain; after a crash it may be one line
behind, never ahead. This detects accidents, not an adversary who writes a new file. One process writes, under the
kernel's lock on the file. Before events happen, a run reserves a number of them, which the record of those that did
happen replaces: after a crash all reserved events are counted.

    {"kind": "ledger", "version": 1, "unit", "neighbouring", "dataset"}     the first line
    {"kind": "run", "run", "id", "time", "dataset", "budget", "versions", "torn_bytes"}
    {"kind": "reserve", "run", "event", "count"}
    {"kind": "used", "run", "closed", "events": [[event, count], ...]}
    {"kind": "merged", "run", "runs": {id: [[event, count], ...]}}
    {"kind": "described", "run", "delta", "units"}                         one of the two, or both

A run has an id of 128 random bits, by which events of its checkpoints are merged once. Optional fields of a run's
record are "earlier", the beginning of the ids of runs before it that have none, "loosened", the budgets that it gave
up, and "unguarded".
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import importlib.metadata
import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from accelerant._version import __version__
from accelerant.errors import ConfigError, FormatError
from accelerant.privacy.dp.ledger.accounting import PrivacyEvent, check_delta, check_neighbouring, check_whole
from accelerant.runtime.files import clipped, decode_json, open_regular, read_regular, typed

# --- the journal ------------------------------------------------------------------------------------------------------
_START: Final = "0" * 64
_LINE: Final = b'{"record":{"kind":"'

Record = dict[str, Any]

_OPEN: weakref.WeakSet[LedgerJournal] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the child's copies of the descriptors: a worker that outlives its parent must not hold the lock."""
    for journal in list(_OPEN):
        journal.close(unlock=False)  # the parent still needs its lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Contents(NamedTuple):
    """A file's records, the bytes of their lines, and why lines may have been cut off unnoticed ("" if not)."""

    records: list[Record]
    chain: str
    size_bytes: int
    unguarded: str


class LedgerJournal:
    """A file opened for appending, and the records that it had; `torn_bytes` of a line that a crash cut short.

    Raises ConfigError if another process writes to it or it cannot be opened, FormatError if it was cut or edited.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = path.absolute()  # the process may change its folder
        self._file = -1
        self._process = os.getpid()
        try:
            created = not path.exists()
            _OPEN.add(self)
            self._file = open_regular(path, os.O_RDWR | os.O_CREAT, 0o644)
            _lock(self._file, path)
            self.records, self._chain, self._size, unguarded = read_journal(path)
            self.unguarded = "" if created else unguarded
            self.torn_bytes = os.fstat(self._file).st_size - self._size
            if self.torn_bytes:
                os.ftruncate(self._file, self._size)
            if created and sys.platform != "win32":  # where folders cannot be opened
                folder = os.open(path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)  # so that the new file's name survives a power failure
                finally:
                    os.close(folder)
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot write to the ledger {path}: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise
        self._lines = len(self.records)

    def append(self, record: Record) -> None:
        """Append a record, on the disk when this returns; ConfigError if the file is not this process's any more."""
        self.require_open()
        self._require_same()
        chain = _next_chain(self._chain, record)
        line = json.dumps({"record": record, "chain": chain}, separators=(",", ":")).encode() + b"\n"
        try:
            os.lseek(self._file, self._size, os.SEEK_SET)
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(self._file)
            self._chain, self._size, self._lines = chain, self._size + len(line), self._lines + 1
        except BaseException:  # Ctrl-C, too
            try:  # no line may follow a partial one, or one that may not be on the disk
                os.ftruncate(self._file, self._size)
                os.fsync(self._file)
            except OSError:
                self.close()
            raise
        with contextlib.suppress(OSError):  # a read-only folder
            # Not synced: after a power failure the head may be old or empty, which only weakens the check.
            head = open_regular(_head_path(self.path), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.write(head, f"{self._lines:012d} {self._chain}\n".encode())  # of constant length
            finally:
                os.close(head)

    def require_open(self) -> None:
        """Check that this process may append; errors of `append`."""
        if os.getpid() != self._process:
            raise ConfigError(
                f"the ledger {self.path} was opened by process {self._process}: only that one writes to it"
            )
        if self._file < 0:
            raise ConfigError(f"the ledger {self.path} is closed: open it again to add to it")

    def _require_same(self) -> None:
        """Raise ConfigError if the file of this name is not the one that was opened, with the lines that it had."""
        opened = os.fstat(self._file)
        try:
            same = os.path.samestat(opened, self.path.stat())
        except OSError:
            same = False
        if not same or opened.st_size != self._size:
            raise ConfigError(
                f"the ledger {self.path} was deleted, replaced or changed by another program since it was opened: what "
                "is done from now on would not be recorded. Restore it, and open it again"
            )

    def close(self, *, unlock: bool = True) -> None:
        """Close the file and release the lock, even while a child that was just forked still has the file open."""
        file, self._file = self._file, -1
        if file >= 0:
            if unlock and sys.platform != "win32":
                import fcntl

                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def __reduce__(self) -> NoReturn:
        raise ConfigError(f"the ledger {self.path} is open: it can be neither copied nor pickled")


def read_journal(path: Path) -> Contents:
    """Return the contents of a file; FormatError names a line that was edited, is missing or is no record."""
    head_path, unguarded = _head_path(path), ""
    try:  # before the file: another process may be writing
        head, head_chain = read_regular(head_path).decode("ascii").split()
        head_lines = int(head)
    except (OSError, ValueError):
        head_lines, head_chain, unguarded = 0, "", f"{head_path.name} was missing or not readable"
    *lines, torn = read_regular(path, 1 << 32).split(b"\n")
    records: list[Record] = []
    chain = _START
    for number, line in enumerate(lines, 1):
        try:
            entry = decode_json(line)
            record, claimed = entry["record"], entry["chain"]
        except (ValueError, KeyError, TypeError):
            record = claimed = None
        if not isinstance(record, dict) or not isinstance(claimed, str):
            raise FormatError(f"{path}, line {number}: no record of a privacy ledger")
        chain = _next_chain(chain, record)
        if chain != claimed:
            raise FormatError(
                f"{path}, line {number}: its checksum does not follow from the lines before it: the file was edited, "
                "or lines were taken out. Go back to an untouched copy"
            )
        if number == head_lines and chain != head_chain:
            raise FormatError(f"{path}, line {number}: {head_path.name} belongs to another ledger")
        records.append(record)
    begin = torn.rstrip(b"\0")  # a power failure may leave zeros
    if not _LINE.startswith(begin[: len(_LINE)]):  # a writer drops a torn line
        raise FormatError(f"{path}, line {len(lines) + 1}: no record of a privacy ledger")
    if head_lines > len(lines):
        raise FormatError(
            f"{path}, line {len(lines) + 1}: the file ends here, and had {head_lines} lines: it was cut. Go back to an "
            "untouched copy"
        )
    if head_lines < len(lines) and not unguarded:
        unguarded = f"{head_path.name} knew {head_lines} of {len(lines)} lines"
    return Contents(records, chain, sum(len(line) + 1 for line in lines), unguarded)


def _next_chain(chain: str, record: Record) -> str:
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{chain}{canonical}".encode()).hexdigest()


def _head_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.head")


def _lock(file: int, path: Path) -> None:
    """Take the kernel's lock on an open file; it ends with the last descriptor at the latest."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(file, 1 << 40, os.SEEK_SET)  # beyond the end: locked bytes cannot be read there
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            raise ConfigError(
                f"the ledger {path} is open in another process, or elsewhere in this one: one at a time writes to it"
            ) from None
        raise


# --- runs -------------------------------------------------------------------------------------------------------------
VERSION: Final = 1

_Budget = tuple[float, float, str]
_FACTS: Final[Mapping[str, Any]] = {  # types of the fields of a run's record
    "id": str, "time": str, "dataset": str, "earlier": str, "unguarded": str, "versions": dict[str, str],
    "budget": _Budget | None, "loosened": list[_Budget],
}  # fmt: skip


@dataclass(slots=True)
class Run:
    """One opening of a ledger: its first record, what it used, and what else it reserved, which may have happened."""

    facts: Mapping[str, Any]
    id: str = ""
    used: Counter[PrivacyEvent] = field(default_factory=Counter)
    reserved: Counter[PrivacyEvent] = field(default_factory=Counter)
    closed: bool = False

    @property
    def counts(self) -> Counter[PrivacyEvent]:
        """The most that may have happened of each event."""
        return self.used + self.reserved


@dataclass(slots=True)
class LedgerHistory:
    """The contents of a ledger's file.

    `merged` are events of other runs by id, from checkpoints. `units` is about how many the data have, 0 if unknown.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    merged: dict[str, Counter[PrivacyEvent]] = field(default_factory=dict)
    deltas: list[float] = field(default_factory=list)
    units: int = 0

    @property
    def counts(self) -> Counter[PrivacyEvent]:
        """The most that may have happened of each event, in all runs."""
        return sum(self.by_run.values(), Counter())

    @property
    def by_run(self) -> dict[str, Counter[PrivacyEvent]]:
        """The most that may have happened of each event, by the runs' ids."""
        found: dict[str, Counter[PrivacyEvent]] = {}
        for name, counts in (*((run.id, run.counts) for run in self.runs), *self.merged.items()):
            found[name] = found.get(name, Counter()) + counts
        return found

    @property
    def budgets(self) -> list[_Budget]:
        """The budgets (epsilon, delta, method) that hold: of all runs since the last that gave some up."""
        held: list[tuple[float, float, str]] = []
        for run in self.runs:
            given = run.facts.get("budget")
            held = [budget for budget in held if budget != given and budget not in run.facts.get("loosened", ())]
            held += [] if given is None else [given]  # the last
        return held

    def name_runs(self, beginning: str) -> bool:
        """Give ids to the runs that have none; return whether there were any."""
        nameless = [(number, run) for number, run in enumerate(self.runs, 1) if not run.id]
        for number, run in nameless:
            run.id = f"{beginning}-{number}"
        return bool(nameless)

    def merge(self, more: Mapping[str, Counter[PrivacyEvent]]) -> None:
        """Add events of other runs."""
        for name, counts in more.items():
            self.merged[name] = self.merged.get(name, Counter()) + counts

    def describe(self, delta: float | None, units: int | None) -> None:
        """Take the last chosen delta, and a number of units."""
        if delta is not None:
            self.deltas = [one for one in self.deltas if one != delta] + [delta]
        self.units = max(self.units, units or 0)

    @classmethod
    def replay(cls, records: Sequence[Mapping[str, Any]], path: Path) -> LedgerHistory:
        """Replay a file's records; FormatError names the line of an invalid one."""
        history = cls()
        for number, record in enumerate(records, 1):
            try:
                history._apply(record)
            except (LookupError, ValueError) as error:  # FormatError and ConfigError are ValueErrors
                reason = str(error) if isinstance(error, ValueError) else "not a record that this version knows"
                raise FormatError(f"{path}, line {number}: {reason}") from None
        return history

    def _apply(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if (kind == "ledger") != (not self.facts):
            raise FormatError("a ledger begins with one record of kind 'ledger', and has no other")
        if kind == "ledger":
            if record["version"] != VERSION:
                raise FormatError(
                    f"a ledger of version {clipped(record['version'])}, this one reads {VERSION}: update accelerant"
                )
            self.facts = {name: typed(str, record[name], name) for name in ("unit", "neighbouring", "dataset")}
            check_neighbouring(self.facts["neighbouring"])
            return
        if kind == "run":
            if record["run"] != len(self.runs) + 1:
                raise FormatError(f"run {clipped(record['run'])} follows run {len(self.runs)}")
            facts = {name: typed(_FACTS.get(name, Any), value, name) for name, value in record.items()}
            if "earlier" in facts:
                self.name_runs(facts["earlier"])
            self.runs.append(Run(facts, facts.get("id", "")))
            if (budget := facts.get("budget")) is not None:
                self.describe(check_delta(budget[1]), None)
            return
        run = self.runs[-1]
        if record["run"] != len(self.runs) or run.closed:
            raise FormatError(f"a record of run {clipped(record['run'])} after it ended")
        if kind == "reserve":
            run.reserved[PrivacyEvent.from_dict(record["event"]).times(1)] += check_whole("count", record["count"], 0)
        elif kind == "used":
            used = _counts(record["events"])
            if used - run.counts:
                raise FormatError("more was used than was reserved")
            if run.used - used:
                raise FormatError("less was used than before")
            run.used, run.reserved, run.closed = used, Counter(), bool(record["closed"])
        elif kind == "merged":
            self.merge(
                {name: _counts(events) for name, events in typed(dict[str, Any], record["runs"], "runs").items()}
            )
        elif kind == "described":
            delta, units = record.get("delta"), record.get("units")
            self.describe(
                None if delta is None else check_delta(delta), None if units is None else check_whole("units", units, 1)
            )
        else:
            raise FormatError(f"a record of kind {kind!r}")


def fresh_id() -> str:
    """Return the id of a run, 128 random bits."""
    return os.urandom(16).hex()


def _counts(events: object) -> Counter[PrivacyEvent]:
    found: Counter[PrivacyEvent] = Counter()
    for event, count in typed(list[tuple[Any, Any]], events, "events"):
        found[PrivacyEvent.from_dict(event).times(1)] += check_whole("count", count, 0)
    return found


def event_records(counts: Counter[PrivacyEvent]) -> list[tuple[dict[str, Any], int]]:
    """Return counted events as records hold them."""
    return [(event_record(event), count) for event, count in counts.items() if count]


class RunWriter:
    """Writes one run: its first record, reservations before events, and the exact counts at the end."""

    def __init__(self, journal: LedgerJournal, run: int, facts: Mapping[str, Any]) -> None:
        self.used: Counter[PrivacyEvent] = Counter()
        self._reserved: Counter[PrivacyEvent] = Counter()
        self._journal = journal
        self._run = run
        self._process = os.getpid()
        self._open = True
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.facts = {**facts, "versions": versions(), "torn_bytes": journal.torn_bytes}
        if journal.unguarded:
            self.facts["unguarded"] = journal.unguarded
        self.write("run", time=time, **self.facts)

    def write(self, kind: str, **fields: Any) -> None:
        """Append a record of this run."""
        self._journal.append({"kind": kind, "run": self._run, **fields})

    def reserve(self, event: PrivacyEvent, block: int) -> None:
        """Reserve `block` more of an event unless event.count more, which is at most `block`, are reserved already."""
        self._journal.require_open()
        one = event.times(1)
        if self.used[one] + event.count <= self._reserved[one]:
            return
        more = self.used[one] + block - self._reserved[one]
        self.write("reserve", event=event_record(one), count=more)
        self._reserved[one] += more

    def settle(self, *, closed: bool) -> None:
        """Replace the reservations by the exact counts."""
        self._reserved = self.used.copy()  # first: Ctrl-C may come after the line was written
        self.write("used", closed=closed, events=event_records(self.used))

    def close(self) -> None:
        """Settle, and close the file; a fork of the process writes nothing."""
        if not self._open:
            return
        self._open = False
        try:
            if os.getpid() == self._process:
                self.settle(closed=True)
        finally:
            self._journal.close()


def event_record(event: PrivacyEvent) -> dict[str, Any]:
    """Return an event as records hold it: without count, and without optional fields at their defaults."""
    defaults = {field.name: field.default for field in fields(PrivacyEvent) if field.name != "sampling"}
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
