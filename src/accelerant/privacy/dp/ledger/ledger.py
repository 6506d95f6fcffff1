"""The privacy ledger: events recorded before they happen, and budgets that refuse them.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

from accelerant.errors import BudgetExceeded, ConfigError, FormatError
from accelerant.privacy.dp.ledger.accounting import check_method, last_within, remaining, spent
from accelerant.privacy.dp.ledger.events import Event, check_delta, check_neighbouring, check_number
from accelerant.privacy.dp.ledger.journal import Journal, read_journal
from accelerant.privacy.dp.ledger.replay import VERSION, History, Run, event_record, used_records, versions
from accelerant.privacy.dp.ledger.statement import Statement, make_statement

__all__ = ["Allowance", "Budget", "Ledger"]

_SHARE: Final = 32  # a block is this share of what was done: a crash over-counts by at most so much
_LARGEST_BLOCK: Final = 1024
_VARIANTS: Final = 8  # of one event, that differ in noise or delta alone; more are rounded


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on the privacy loss: epsilon at delta, by the accountant "pld" or "rdp".

    Raises:
        ConfigError: an invalid value.
    """

    epsilon: float
    delta: float
    method: str = "pld"

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon)
        check_delta(self.delta)
        check_method(self.method)


class Allowance:
    """The rest of a budget, checked before each event with few calls of the accountant.

    Counts of events that are known to fit are kept: epsilon does not fall with a count, so all smaller counts fit as
    well. When they are reached, they are extended by what happened since the last time, as many times over as fits.

    Args:
        budget: that must not be passed.
        neighbouring: the relation of the ledger.
    """

    def __init__(self, budget: Budget, neighbouring: str) -> None:
        self.budget = budget
        self._neighbouring = neighbouring
        self._fits: Counter[Event] = Counter()
        self._since: Counter[Event] = Counter()

    def allowed(self, event: Event) -> int:
        """Return how many of event, from the ledger's first on, are known to fit. `require` raises it."""
        return self._fits[event.times(1)]

    def require(self, counts: Mapping[Event, int], event: Event) -> None:
        """Check that event fits, after counts.

        Raises:
            BudgetExceeded: it does not.
        """
        one = event.times(1)
        known = all(count <= self._fits[other] for other, count in counts.items())  # others may have written, too
        if known and counts.get(one, 0) + event.count <= self._fits[one]:
            return
        after = Counter(counts)
        after[one] += event.count
        cost, budget = self._cost(after, self.budget.method), self.budget
        if cost > budget.epsilon:
            before = self._cost(Counter(counts), budget.method)
            raise BudgetExceeded(
                f"the budget is epsilon {budget.epsilon:g} at delta {budget.delta:g}: {before:.6g} is spent, and "
                f"{event.count} more ({event.mechanism}, noise multiplier {event.noise_multiplier:g}) would make it "
                f"{cost:.6g}. Nothing was done or recorded: stop here, or raise the budget"
            )
        self._fits = self._extended(after, event)
        self._since = Counter(counts)

    def _extended(self, after: Counter[Event], event: Event) -> Counter[Event]:
        happened = after - self._since if self._since else Counter({event.times(1): event.count})

        def extended(times: int) -> Counter[Event]:
            return after + Counter({one: count * times for one, count in happened.items()})

        times = 0
        for method in dict.fromkeys(("rdp", self.budget.method)):  # the fast one first, for a guess

            def cost(times: int, method: str = method) -> float:
                return self._cost(extended(times), method)

            times = last_within(cost, self.budget.epsilon, times)
        return extended(times)

    def _cost(self, counts: Counter[Event], method: str) -> float:
        events = [event.times(count) for event, count in counts.items()]
        return spent(events, self.budget.delta, method=method, neighbouring=self._neighbouring).epsilon


class Ledger:
    """The record of what was done to one data set, in a file or in memory.

    An event is on the disk before `record` returns: kill -9 or a power failure at any moment never under-counts. To
    spare the disk, blocks are reserved in advance: a crash counts up to one in 32 too many, `settle` and `close` write
    the exact number. One process writes at a time. Thread-safe. A process that ends in order closes its ledgers.

    Args:
        path: of the file, created or appended to; None: in memory alone.
        unit: whose privacy it is: the sensitivity of an event bounds the contribution of one unit.
        neighbouring: "add-or-remove-one" or "replace-one".
        budget: events that would pass it are refused.
        dataset: a name; "": that of the file.
        any_dataset: add to a ledger of another data set: epsilon is then that of a unit that is in both.

    Attributes:
        path, unit, neighbouring, budget, dataset: as above.

    Raises:
        ConfigError: an invalid value; the file is of another unit, relation or data set, or is being written.
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
        self._writer: _RunWriter | None = None
        self._history = History()
        if self.path is not None:
            self._open(self.path, any_dataset)
        self._past = self._history.counts
        self._used: Counter[Event] = Counter() if self._writer is None else self._writer.used

    @classmethod
    def read(cls, path: str | Path) -> Ledger:
        """Open a ledger's file for reading: `record` is refused. Another process may be writing it.

        Raises:
            ConfigError: it cannot be read.
            FormatError: the file is no ledger, or was cut or edited.
        """
        path = Path(path)
        try:
            records, _, _ = read_journal(path)
        except OSError as error:
            raise ConfigError(f"the ledger {path} cannot be read: {error.strerror or error}") from None
        history = History.replay(records, path)
        if not history.facts:
            raise FormatError(f"{path}: no privacy ledger, it has not one whole record")
        ledger = cls(**history.facts)
        ledger.path, ledger._history, ledger._past = path, history, history.counts
        return ledger

    # --- recording ---------------------------------------------------------------------------------------------------

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
                self._open_writer().reserve(event, self._block(event))
            self._used[event.times(1)] += event.count

    def record_missing(self, events: Iterable[Event]) -> None:
        """Record those events of a checkpoint that the ledger lacks: it was in memory, or is another file.

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
        """Write exactly what was done so far: a later crash counts only what is reserved from here on."""
        with self._lock:
            if self.path is not None:
                self._open_writer().settle(closed=False)

    def close(self) -> None:
        """Write what was done, and release the file. The ledger still answers."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a ledger can be neither copied nor pickled: what a copy records would not add up")

    # --- queries -----------------------------------------------------------------------------------------------------

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, equal ones as one with their count. Of runs that did not end in order, all that was reserved."""
        with self._lock:
            return tuple(event.times(count) for event, count in (self._past + self._used).items() if count)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The earlier openings of the file."""
        return tuple(self._history.runs)

    def epsilon(self, delta: float, method: str = "pld") -> float:
        """Return epsilon at delta of all events; infinite where one has no noise or delta is used up (see `statement`).

        Args:
            delta: in (0, 1).
            method: "pld", privacy loss distributions, or "rdp", Renyi divergence, which is looser.

        Raises:
            ConfigError: an invalid value.
            MissingDependency: dp-accounting is not installed.
        """
        return spent(self.events, delta, method=method, neighbouring=self.neighbouring).epsilon

    def remaining(self, epsilon: float, delta: float, event: Event, method: str = "pld") -> int:
        """Return how many more of event (its count is ignored) stay within epsilon at delta; errors as of `epsilon`."""
        return remaining(self.events, event, epsilon, delta, method=method, neighbouring=self.neighbouring)

    def statement(self, delta: float | None = None) -> Statement:
        """Return what a reviewer needs: unit, relation, epsilon at delta, events, sampling, noise, assumptions.

        Args:
            delta: None: the budget's, or that of the last run that had one, or else 1e-5.
        """
        return make_statement(self, delta)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _require(self, event: Event) -> None:
        if self._allowance is not None:
            self._allowance.require(self._past + self._used, event)

    def _block(self, event: Event) -> int:
        """Return how many to reserve with event: for the first 64 none ahead, never more than the budget allows."""
        one = event.times(1)
        block = min(_LARGEST_BLOCK, self._used[one] // _SHARE)
        if self._allowance is not None:
            block = min(block, self._allowance.allowed(one) - self._past[one] - self._used[one])
        return max(event.count, block)

    def _canonical(self, event: Event) -> Event:
        """Return the event; for one of many that differ in noise or delta alone, one of few that cost no less.

        Each distinct event takes a line of the file and a composition.
        """
        one = event.times(1)
        if one in self._used or one in self._past:
            return event
        if sum(_variant_key(other) == _variant_key(one) for other in self._used) < _VARIANTS:
            return event
        noise, delta = event.noise_multiplier, event.delta
        if noise:
            noise = min(noise, 2 ** (math.floor(256 * math.log2(noise)) / 256))
        if delta:
            delta = min(0.5, max(delta, 2 ** (math.ceil(4 * math.log2(delta)) / 4)))
        return replace(event, noise_multiplier=noise, delta=max(delta, event.delta))

    def _open_writer(self) -> _RunWriter:
        if self._writer is None:
            raise ConfigError(f"the ledger {self.path} was opened by Ledger.read: open it by Ledger(path) to add to it")
        return self._writer

    def _open(self, path: Path, any_dataset: bool) -> None:
        journal = Journal(path)
        try:
            self._history = History.replay(journal.records, path)
            if not self._history.facts:
                facts = {"unit": self.unit, "neighbouring": self.neighbouring, "dataset": self.dataset}
                journal.append({"kind": "ledger", "version": VERSION, **facts})
            else:
                self._check_facts(path, any_dataset)
            self._writer = _RunWriter(journal, len(self._history.runs) + 1)
            self._writer.start(self.dataset, self.budget)
        except BaseException:
            journal.close()
            raise
        # At the end of the process, or of this object; a fork of the process leaves the file alone.
        weakref.finalize(self, self._writer.close)

    def _check_facts(self, path: Path, any_dataset: bool) -> None:
        facts = self._history.facts
        for name in ("unit", "neighbouring"):
            value = getattr(self, name)
            if facts[name] != value:
                raise ConfigError(
                    f"the ledger {path} is of {name} {facts[name]!r}, not {value!r}: the two do not add up. Give "
                    f"{name}={facts[name]!r}, or another file"
                )
        known = {facts["dataset"], *(str(run.facts.get("dataset", "")) for run in self._history.runs)}
        if not self.dataset:
            self.dataset = facts["dataset"]
        elif self.dataset not in known and not any_dataset:
            raise ConfigError(
                f"the ledger {path} is of the data set {facts['dataset']!r}, not {self.dataset!r}: use another file, "
                "or give any_dataset=True where a unit may be in both"
            )


class _RunWriter:
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
        """Reserve event.count more of an event, or `block` of them, which is no less, where they are not reserved."""
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


def _variant_key(event: Event) -> tuple[Any, ...]:
    """Return the fields without noise, delta and count."""
    return (event.mechanism, event.sampling, event.sample_rate, event.source, event.secure, event.idealised, event.note)
