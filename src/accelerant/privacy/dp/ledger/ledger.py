"""The privacy ledger: what was done to the data, written down before it is done.

    with Ledger("privacy.jsonl", unit="patient", budget=Budget(epsilon=8, delta=1e-5)) as ledger:
        ledger.record(Event("gaussian", 1.1, "poisson", sample_rate=0.01))
        print(ledger.epsilon(1e-5), ledger.statement())

Everything released from the same data belongs in one ledger: trainings, restarts, searches over settings, histograms.
Open the same file again and the events add up.
"""

from __future__ import annotations

import datetime
import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from accelerant.errors import ConfigError, FormatError
from accelerant.privacy.dp.ledger.accounting import remaining, spent
from accelerant.privacy.dp.ledger.budget import Allowance, Budget
from accelerant.privacy.dp.ledger.events import Event, check_neighbouring
from accelerant.privacy.dp.ledger.journal import Journal, read_journal
from accelerant.privacy.dp.ledger.replay import VERSION, Book, Run, event_record, used_records, versions

if TYPE_CHECKING:
    from accelerant.privacy.dp.ledger.statement import Statement

__all__ = ["Budget", "Ledger"]

_SHARE: Final = 32  # a block is such a share of what was done: so much, at most, a crash over-counts
_LARGEST_BLOCK: Final = 1024
_VARIANTS: Final = 8  # of one event, that differ in noise or delta alone; more are rounded


class Ledger:
    """What was done to one data set, in a file or in memory.

    An event is on the disk before `record` returns: kill -9 or a power failure at any moment never under-counts. To
    spare the disk, blocks are reserved ahead: a crash counts up to one in 32 too many, `settle` and `close` write
    the exact number. One process writes at a time. Thread-safe. A process that ends in order closes its ledgers.

    Args:
        path: of the file, which is made or added to; None: in memory alone.
        unit: whose privacy it is: what one event's sensitivity is the bound of.
        neighbouring: "add-or-remove-one" or "replace-one".
        budget: events that would pass it are refused.
        dataset: a name; "": that of the file.
        any_dataset: add to a ledger of another data set: epsilon is then that of a unit that is in both.

    Attributes:
        path, unit, neighbouring, budget, dataset: as above.

    Raises:
        ConfigError: a value without meaning; the file is another unit's, relation's or data set's, or is being written.
        FormatError: the file was cut or edited; the message names the line.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        unit: str = "example",
        neighbouring: str = "add-or-remove-one",
        budget: Budget | None = None,
        dataset: str = "",
        any_dataset: bool = False,
    ) -> None:
        if not unit:
            raise ConfigError('unit must name whose privacy it is, "example" or "user"; got an empty string')
        self.path = None if path is None else Path(path)
        self.unit, self.neighbouring, self.budget = unit, check_neighbouring(neighbouring), budget
        self.dataset = dataset
        self._allowance = None if budget is None else Allowance(budget, self.neighbouring)
        self._lock = threading.RLock()
        self._pen: _Pen | None = None
        self._book = Book()
        if self.path is not None:
            self._open(self.path, any_dataset)
        self._past = self._book.counts
        self._used: Counter[Event] = Counter() if self._pen is None else self._pen.used

    @classmethod
    def read(cls, path: str | Path) -> Ledger:
        """A ledger's file, to be looked at: `record` is refused. It may be being written at the same time.

        Raises:
            ConfigError: it cannot be read.
            FormatError: the file is no ledger, or was cut or edited.
        """
        path = Path(path)
        try:
            records, _, _ = read_journal(path)
        except OSError as error:
            raise ConfigError(f"the ledger {path} cannot be read: {error.strerror or error}") from None
        book = Book.of(records, path)
        if not book.facts:
            raise FormatError(f"{path}: no privacy ledger, it has not one whole record")
        ledger = cls(unit=book.facts["unit"], neighbouring=book.facts["neighbouring"], dataset=book.facts["dataset"])
        ledger.path, ledger._book, ledger._past = path, book, book.counts
        return ledger

    # --- recording -----------------------------------------------------------------------------------------------

    def record(self, event: Event) -> None:
        """Record an event that is about to happen; it is durable when this returns.

        Events that differ from many others in noise or delta alone are recorded as one that costs no less.

        Raises:
            BudgetExceeded: it would pass the budget; nothing was written.
            ConfigError: the ledger is closed, or another process's.
            OSError: the disk is full; nothing was recorded.
        """
        with self._lock:
            event = self._canonical(event)
            self._require(event)
            if self.path is not None:
                self._written().reserve(event, self._block(event))
            self._used[event.times(1)] += event.count

    def record_missing(self, events: Iterable[Event]) -> None:
        """Record of events, as a checkpoint holds them, what the ledger does not: it was of memory, or is another file.

        Raises: as `record`.
        """
        held = Counter({event.times(1): event.count for event in self.events})
        for event in events:
            if event.count > held[event.times(1)]:
                self.record(event.times(event.count - held[event.times(1)]))

    def require(self, event: Event) -> None:
        """Check that an event fits the budget; nothing is recorded.

        Raises:
            BudgetExceeded: it would pass it.
        """
        with self._lock:
            self._require(self._canonical(event))

    def settle(self) -> None:
        """Write down exactly what was done so far: a crash after it counts only what is reserved from here on."""
        with self._lock:
            if self.path is not None:
                self._written().settle(closed=False)

    def close(self) -> None:
        """Write down what was done, and give the file back. The ledger still answers."""
        with self._lock:
            if self._pen is not None:
                self._pen.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a ledger can be neither copied nor pickled: what a copy records would not add up")

    # --- asking --------------------------------------------------------------------------------------------------

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, equal ones as one with their count. Of runs that did not end in order, all that was reserved."""
        with self._lock:
            return tuple(event.times(count) for event, count in self._counts().items() if count)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The earlier openings of the file."""
        return tuple(self._book.runs)

    def epsilon(self, delta: float, method: str = "pld") -> float:
        """Epsilon at delta of all events; infinite where one has no noise or delta is used up (`statement` says why).

        Args:
            delta: in (0, 1).
            method: "pld", privacy loss distributions, or "rdp", Renyi divergence, which is looser.

        Raises:
            ConfigError: a value without meaning.
            MissingDependency: dp-accounting is not installed.
        """
        return spent(self.events, delta, method=method, neighbouring=self.neighbouring).epsilon

    def remaining(self, epsilon: float, delta: float, event: Event, method: str = "pld") -> int:
        """How many more of event (its count is ignored) stay within epsilon at delta; errors as of `epsilon`."""
        return remaining(self.events, event, epsilon, delta, method=method, neighbouring=self.neighbouring)

    def statement(self, delta: float | None = None) -> Statement:
        """What a reviewer needs: unit, relation, epsilon at delta, events, sampling, noise, what is assumed.

        Args:
            delta: None: the budget's, or that of the last run that had one, or else 1e-5.
        """
        from accelerant.privacy.dp.ledger.statement import make_statement

        return make_statement(self, delta)

    # --- inside --------------------------------------------------------------------------------------------------

    def _counts(self) -> Counter[Event]:
        return self._past + self._used

    def _require(self, event: Event) -> None:
        if self._allowance is not None:
            self._allowance.require(self._counts(), event)

    def _block(self, event: Event) -> int:
        """How many to reserve with event: for the first 64 none ahead, never more than the budget allows."""
        one = event.times(1)
        ahead = min(_LARGEST_BLOCK, self._used[one] // _SHARE)
        if self._allowance is not None:
            ahead = min(ahead, self._allowance.allowed(one) - self._past[one] - self._used[one])
        return max(event.count, ahead)

    def _canonical(self, event: Event) -> Event:
        """The event; if it is one of many that differ in noise or delta alone, one of few that cost no less.

        Each distinct event takes a line of the file and a composition.
        """
        one = event.times(1)
        if one in self._used or one in self._past:
            return event
        alike = sum(_kind(other) == _kind(one) for other in self._used)
        if alike < _VARIANTS:
            return event
        noise, delta = event.noise_multiplier, event.delta
        if noise:
            noise = min(noise, 2 ** (math.floor(256 * math.log2(noise)) / 256))
        if delta:
            delta = min(0.5, max(delta, 2 ** (math.ceil(4 * math.log2(delta)) / 4)))
        found = event.to_dict() | {"noise_multiplier": noise, "delta": max(delta, event.delta)}
        return Event.from_dict(found)

    def _written(self) -> _Pen:
        if self._pen is None:
            raise ConfigError(f"the ledger {self.path} was opened by Ledger.read: open it by Ledger(path) to add to it")
        return self._pen

    def _open(self, path: Path, any_dataset: bool) -> None:
        journal = Journal(path)
        try:
            self._book = Book.of(journal.records, path)
            if not self._book.facts:
                facts = {"unit": self.unit, "neighbouring": self.neighbouring, "dataset": self.dataset}
                journal.append({"kind": "ledger", "version": VERSION, **facts})
            else:
                self._check_facts(path, any_dataset)
            self._pen = _Pen(journal, len(self._book.runs) + 1)
            self._pen.start(self.dataset, self.budget)
        except BaseException:
            journal.close()
            raise
        # at the end of the process, or of this object; a fork of the process leaves the file alone
        weakref.finalize(self, self._pen.close)

    def _check_facts(self, path: Path, any_dataset: bool) -> None:
        facts = self._book.facts
        for name, given in (("unit", self.unit), ("neighbouring", self.neighbouring)):
            if facts[name] != given:
                raise ConfigError(
                    f"the ledger {path} is of {name} {facts[name]!r}, not {given!r}: the two do not add up. Give "
                    f"{name}={facts[name]!r}, or another file"
                )
        known = {facts["dataset"], *(str(run.facts.get("dataset", "")) for run in self._book.runs)}
        if not self.dataset:
            self.dataset = facts["dataset"]
        elif self.dataset not in known and not any_dataset:
            raise ConfigError(
                f"the ledger {path} is of the data set {facts['dataset']!r}, not {self.dataset!r}: use another file, "
                "or say any_dataset=True where a unit may be in both"
            )


class _Pen:
    """Writes one run of a ledger's file: reservations before events, the exact counts at the end."""

    def __init__(self, journal: Journal, run: int) -> None:
        self.used: Counter[Event] = Counter()
        self._reserved: Counter[Event] = Counter()
        self._journal = journal
        self._run = run
        self._process = os.getpid()
        self._open = True

    def start(self, dataset: str, budget: Budget | None) -> None:
        self._journal.append(
            {
                "kind": "run",
                "run": self._run,
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "dataset": dataset,
                "budget": None if budget is None else [budget.epsilon, budget.delta, budget.method],
                "versions": versions(),
                "torn_bytes": self._journal.torn_bytes,
            }
        )

    def reserve(self, event: Event, block: int) -> None:
        """Have event.count more of it reserved; if they are not, have block of them, which is at least as many."""
        self._journal.require_open()
        one = event.times(1)
        if self.used[one] + event.count <= self._reserved[one]:
            return
        more = self.used[one] + block - self._reserved[one]
        self._journal.append({"kind": "reserve", "run": self._run, "event": event_record(one), "count": more})
        self._reserved[one] += more

    def settle(self, *, closed: bool) -> None:
        events = used_records(self.used.items())
        self._journal.append({"kind": "used", "run": self._run, "closed": closed, "events": events})
        self._reserved = self.used.copy()

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if os.getpid() == self._process:
            self.settle(closed=True)
        self._journal.close()


def _kind(event: Event) -> tuple[Any, ...]:
    return (event.mechanism, event.sampling, event.sample_rate, event.source, event.secure, event.idealised, event.note)
