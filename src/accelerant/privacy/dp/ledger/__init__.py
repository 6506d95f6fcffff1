"""The privacy ledger: events recorded before they happen, and budgets that refuse them.

    with PrivacyLedger("privacy.jsonl", unit="patient", budget=Budget(epsilon=8, delta=1e-5)) as ledger:
        ledger.record(PrivacyEvent("gaussian", 1.1, "poisson", sample_rate=0.01))
        print(ledger.epsilon(1e-5), ledger.statement())

Everything released from the same data belongs in one ledger. Opening a file again adds to its events.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NoReturn

from accelerant.errors import ConfigError, FormatError
from accelerant.privacy.dp.ledger import journal as journals
from accelerant.privacy.dp.ledger.accounting import (
    DEFAULT_DELTA,
    Allowance,
    Budget,
    PrivacyEvent,
    about,
    check_delta,
    check_neighbouring,
    check_whole,
    remaining,
    spent,
)
from accelerant.privacy.dp.ledger.journal import LedgerHistory, versions
from accelerant.runtime.files import clipped, escaped, exact, plain
from accelerant.runtime.host import fork_safe

__all__ = ["Budget", "PrivacyEvent", "PrivacyLedger", "PrivacyStatement"]

_SHARE: Final = 32  # a block is 1/32 of what was done: a crash over-counts by at most so much
_LARGEST_BLOCK: Final = 1024
_VARIANTS: Final = 8  # events that differ only in noise or delta; the noise and delta of further ones are rounded
_NAMELESS: Final = (
    "the checkpoint is of an older version and does not say which runs spent its events: all of them are added to the "
    "ledger, even if it has them already. If it has, load the state without its entry 'spent'"
)
_variant_key = attrgetter("mechanism", "sampling", "sample_rate", "source", "secure", "idealised", "note")


class PrivacyLedger:
    """The record of what was done to one data set, in a file or in memory.

    An event is on the disk before `record` returns: kill -9 or a power failure at any moment never under-counts. To
    save disk writes, blocks are reserved in advance: a crash counts up to one in 32 too many, `settle` and `close`
    write the exact number. One process writes at a time. Thread-safe. A process that ends in order closes its ledgers.

    A file's budgets stay: each that was ever given holds whenever the file is opened, with or without a budget, until
    it is loosened.

    Args:
        path: of the file, created or appended to; None: in memory only.
        unit: whose privacy is protected: the sensitivity of an event bounds the contribution of one unit.
        neighbouring: "add-or-remove-one" or "replace-one".
        budget: events that would exceed it are refused. A file's own budgets hold as well.
        loosen_budget: give up the file's budgets for `budget`, or for none. The file and the statement say so.
        dataset: a name; "": that of the file.
        any_dataset: add to a ledger of another data set: epsilon is then that of a unit that is in both.

    Raises:
        ConfigError: an invalid value; the file is of another unit, relation or data set, or is being written; budget
            is looser than one of the file.
        FormatError: the file was cut or edited; the message names the line.

    Attributes:
        budget: the one that was given, or of the file's that hold the last.
        run_id: random; checkpoints name what a run spent by it (`by_run`, `merge`).
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, unit: str = "example",
        neighbouring: str = "add-or-remove-one", budget: Budget | None = None, dataset: str = "",
        any_dataset: bool = False, loosen_budget: bool = False,
    ) -> None:  # fmt: skip
        if not isinstance(unit, str) or not unit:
            raise ConfigError(f'unit must name whose privacy it is, "example" or "user"; got {unit!r}')
        if budget is not None and not isinstance(budget, Budget):
            raise ConfigError(f"budget must be a Budget, as Budget(epsilon=3.0, delta=1e-5); got {budget!r}")
        self.path = None if path is None else ledger_path(path)
        self.unit, self.neighbouring, self.budget = unit, check_neighbouring(neighbouring), budget
        self.dataset = dataset
        self.run_id, self._process = journals.fresh_id(), os.getpid()
        self._unguarded = ""
        self._lock = fork_safe(threading.RLock())
        self._writer: journals.RunWriter | None = None
        self._history = LedgerHistory()
        self._allowances: list[Allowance] = []
        if self.path is None:
            self._hold([])
        else:
            self._open(self.path, any_dataset, loosen_budget)
        if budget is not None:
            self._history.describe(budget.delta, None)
        self._past = self._history.counts
        self._used: Counter[PrivacyEvent] = Counter() if self._writer is None else self._writer.used

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PrivacyLedger:
        """Open a ledger's file for reading: `record` is refused. Another process may be writing it.

        Raises:
            ConfigError: it cannot be read.
            FormatError: the file is no ledger, or was cut or edited.
        """
        path = Path(path)
        try:
            contents = journals.read_journal(path)
            if contents.unguarded:  # perhaps only for now: a writer may be between a line and the head
                time.sleep(0.05)
                contents = journals.read_journal(path)
        except OSError as error:
            raise ConfigError(f"the ledger {path} cannot be read: {error.strerror or error}") from None
        history = LedgerHistory.replay(contents.records, path)
        if not history.facts:
            raise FormatError(f"{path}: no privacy ledger, it has not one whole record")
        history.name_runs(journals.fresh_id())
        ledger = cls(**history.facts)
        ledger.path, ledger._history, ledger._past = path, history, history.counts
        ledger._unguarded = contents.unguarded
        ledger._hold(_budgets(history, path))
        return ledger

    def record(self, event: PrivacyEvent) -> None:
        """Record an event that is about to happen; it is durable when this returns.

        If many events differ only in noise or delta, further ones are recorded as one that costs no less.

        Raises:
            BudgetExceeded: it would exceed the budget; nothing was written.
            ConfigError: the ledger is closed, or another process's.
            OSError: the disk is full; nothing was recorded.
        """
        with self._lock:
            self._leave_parent()
            event = self._canonical(event)
            self._require(event)
            one = event.times(1)
            if self.path is not None:
                block = min(_LARGEST_BLOCK, self._used[one] // _SHARE)  # none in advance for the first 64
                for allowance in self._allowances:
                    block = min(block, allowance.allowed(one) - self._past[one] - self._used[one])
                self._open_writer().reserve(event, max(event.count, block))
            self._used[one] += event.count

    def by_run(self) -> dict[str, list[dict[str, Any]]]:
        """Return all events as `PrivacyEvent.to_dict` by the id of the run that spent them, for a checkpoint."""
        with self._lock:
            counts = self._history.by_run
            counts[self.run_id] = counts.get(self.run_id, Counter()) + self._used
        return {
            name: [event.times(count).to_dict() for event, count in each.items()]
            for name, each in counts.items()
            if each
        }

    def merge(self, spent: Mapping[str, Sequence[Mapping[str, Any]]] | Sequence[Mapping[str, Any]]) -> None:
        """Record what a checkpoint spent and this ledger lacks, all of it or nothing.

        The events of a run that the ledger knows, by its id, are counted once; those of any other run are added,
        however alike they are. A checkpoint of an older version names no runs: all its events are added, each time,
        even if the ledger has them already.

        Args:
            spent: of `by_run`; or a list of events.

        Raises:
            FormatError: it is neither; nothing was recorded.
            BudgetExceeded, ConfigError, OSError: as for `record`.
        """
        if not isinstance(spent, Mapping):
            if spent:
                warnings.warn(_NAMELESS, UserWarning, stacklevel=3)
            spent = {journals.fresh_id(): spent}
        given = {name: Counter[PrivacyEvent]() for name in spent}
        for name, events in spent.items():
            if not isinstance(name, str) or not isinstance(events, list | tuple):
                raise FormatError(f"what runs spent is lists of events by their ids, got {clipped({name: events})}")
            for event in map(PrivacyEvent.from_dict, events):
                given[name][event.times(1)] += event.count
        with self._lock:
            self._leave_parent()
            held = self._history.by_run
            held[self.run_id] = held.get(self.run_id, Counter()) + self._used
            lacking = {name: counts - held.get(name, Counter()) for name, counts in given.items()}
            lacking = {name: counts for name, counts in lacking.items() if counts}
            after = self._past + self._used
            for one, count in sum(lacking.values(), Counter[PrivacyEvent]()).items():
                for allowance in self._allowances:
                    allowance.require(after, one.times(count))
                after[one] += count
            if not lacking:
                return
            if self.path is not None:
                self._open_writer().write(
                    "merged", runs={name: journals.event_records(each) for name, each in lacking.items()}
                )
            self._history.merge(lacking)
            self._past = self._history.counts

    def describe(self, *, delta: float | None = None, units: int | None = None) -> None:
        """Record, for the statement, the delta at which epsilon is stated, and about how many units the data have.

        `make_private` and the other functions that take a delta call this. Each chosen delta is in the statement.

        Args:
            delta: in (0, 1).
            units: 1 or more; rounded to two digits, since the exact number is not private.

        Raises:
            ConfigError: an invalid value; the ledger is closed, or another process's.
            OSError: the disk is full; nothing was recorded.
        """
        if delta is not None:
            check_delta(delta)
        if units is not None:
            units = about(check_whole("units", units, 1))
        with self._lock:
            delta = None if delta == self.delta else delta
            units = None if units is None or units <= self._history.units else units
            if delta is None and units is None:
                return
            if self.path is not None:
                given = (("delta", delta), ("units", units))
                self._open_writer().write("described", **{name: each for name, each in given if each is not None})
            self._history.describe(delta, units)

    @property
    def delta(self) -> float | None:
        """The delta at which epsilon is stated: that which a budget, a training or `describe` chose last, or None."""
        return self._history.deltas[-1] if self._history.deltas else None

    @property
    def deltas(self) -> tuple[float, ...]:
        """All deltas that were chosen, the last choice last."""
        return tuple(self._history.deltas)

    @property
    def units(self) -> int:
        """About how many units the data have, in two digits; 0 if it was not recorded."""
        return self._history.units

    def require(self, event: PrivacyEvent) -> None:
        """Check that an event fits the budget, without recording it; BudgetExceeded if it does not."""
        with self._lock:
            self._require(self._canonical(event))

    def settle(self) -> None:
        """Write the exact counts so far; a later crash over-counts only blocks reserved after this call."""
        with self._lock:
            if self.path is not None:
                self._open_writer().settle(closed=False)

    def close(self) -> None:
        """Write the exact counts and release the file. Queries still work."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()

    def __enter__(self) -> PrivacyLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        events = self.events
        held = "" if self.budget is None else f", budget epsilon {self.budget.epsilon:g} at delta {self.budget.delta:g}"
        return (
            f"PrivacyLedger({'in memory' if self.path is None else repr(str(self.path))}, unit={self.unit!r}, "
            f"{sum(event.count for event in events)} releases, {len(events)} kind(s){held})"
        )

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a ledger can be neither copied nor pickled: what a copy records would not add up")

    @property
    def events(self) -> tuple[PrivacyEvent, ...]:
        """All events, equal ones as one with their count; of runs that did not end in order, all reserved events."""
        return tuple(event.times(count) for event, count in self.counts.items() if count)

    @property
    def counts(self) -> Counter[PrivacyEvent]:
        """The number of times that each event happened, or may have happened, by the event with a count of 1."""
        with self._lock:
            return self._past + self._used

    @property
    def runs(self) -> tuple[journals.Run, ...]:
        """The earlier openings of the file."""
        return tuple(self._history.runs)

    @property
    def merged(self) -> Mapping[str, Counter[PrivacyEvent]]:
        """Events of other runs by their ids, from checkpoints."""
        return dict(self._history.merged)

    @property
    def openings(self) -> tuple[Mapping[str, Any], ...]:
        """The facts of the file's runs, with those of this one."""
        own = () if self._writer is None else (self._writer.facts,)
        return (*(run.facts for run in self._history.runs), *own)

    @property
    def unguarded(self) -> tuple[str, ...]:
        """Reasons why lines may have been cut off the file's end unnoticed; none for a file whose head was kept."""
        runs = ((f"when run {n} began", facts.get("unguarded")) for n, facts in enumerate(self.openings, 1))
        return tuple(f"{why} {when}" for when, why in (*runs, ("when it was read", self._unguarded)) if why)

    def epsilon(self, delta: float | None = None, method: str = "pld") -> float:
        """Return epsilon at delta of all events; infinite where one has no noise or delta is used up (see `statement`).

        Args:
            delta: in (0, 1); None: the chosen one, as in `statement`.
            method: "pld", privacy loss distributions, or "rdp", Renyi divergence, which is looser.

        Raises the errors of `accounting.spent`.
        """
        chosen = delta if delta is not None else self.delta or DEFAULT_DELTA
        return spent(self.events, chosen, method=method, neighbouring=self.neighbouring).epsilon

    def remaining(self, event: PrivacyEvent, *, epsilon: float, delta: float, method: str = "pld") -> int:
        """Return how many more of event (its count is ignored) stay within epsilon at delta; errors as of `epsilon`."""
        return remaining(
            self.events, event, epsilon=epsilon, delta=delta, method=method, neighbouring=self.neighbouring
        )

    def statement(self, delta: float | None = None) -> PrivacyStatement:
        """Return the ledger's statement for a reviewer: epsilon at delta, events, sampling, noise, assumptions.

        delta is by default the one that was chosen last, by a budget, a training or `describe`, or else 1e-5.
        """
        budget = None if self.budget is None else astuple(self.budget)
        by_default = delta is None and self.delta is None
        chosen = delta if delta is not None else self.delta or DEFAULT_DELTA
        check_delta(chosen)
        events = self.events
        cost = spent(events, chosen, neighbouring=self.neighbouring)
        others = [one for one in dict.fromkeys(self.deltas) if one != chosen]
        done = [event for event in events if event.count]
        runs = tuple(
            {
                "time": run.facts.get("time", ""), "dataset": run.facts.get("dataset", ""),
                "releases": sum(run.counts.values()), "closed": run.closed, "versions": run.facts.get("versions", {}),
            }
            for run in self.runs
        )  # fmt: skip
        datasets = dict.fromkeys(name for name in (*(run["dataset"] for run in runs), self.dataset) if name)
        return PrivacyStatement(
            unit=self.unit, neighbouring=self.neighbouring, delta=chosen, budget=budget, events=events, runs=runs,
            relation=_RELATIONS[self.neighbouring].format(unit=self.unit), epsilon=cost.epsilon, reason=cost.reason,
            epsilon_rdp=spent(events, chosen, method="rdp", neighbouring=self.neighbouring).epsilon,
            charged_delta=cost.charged, datasets=tuple(datasets), versions=versions(), units=self.units or None,
            others=tuple((one, spent(events, one, neighbouring=self.neighbouring).epsilon) for one in others),
            meaning=_meaning(cost.epsilon, chosen, _CHANGES[self.neighbouring].format(unit=self.unit)),
            covered=_covered(done), not_covered=tuple(_not_covered(self.unit)),
            remarks=(
                *_file_remarks(self),
                *_delta_remarks(chosen, self, by_default=by_default),
                _several_units(cost.epsilon, chosen, self.unit),
                *_remarks(done, len(datasets)),
            ),
        )  # fmt: skip

    def _require(self, event: PrivacyEvent) -> None:
        for allowance in self._allowances:
            allowance.require(self.counts, event)

    def _leave_parent(self) -> None:
        """Begin another run in a fork of the process: what it spends is not what its parent spends from now on."""
        if self.path is None and os.getpid() != self._process:
            self._history.merge({self.run_id: self._used.copy()})
            self._past = self._history.counts
            self._used.clear()
            self.run_id, self._process = journals.fresh_id(), os.getpid()

    def _canonical(self, event: PrivacyEvent) -> PrivacyEvent:
        """Return the event; or one that costs no less, where many differ from it only in noise or delta."""
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

    def _open_writer(self) -> journals.RunWriter:
        if self._writer is None:
            raise ConfigError(
                f"the ledger {self.path} was opened by PrivacyLedger.read: open it by PrivacyLedger(path) to add to it"
            )
        return self._writer

    def _open(self, path: Path, any_dataset: bool, loosen: bool) -> None:
        journal, given = journals.LedgerJournal(path), self.budget
        try:
            self._history = LedgerHistory.replay(journal.records, path)
            if self._history.facts:
                self._check_facts(path, any_dataset)
            else:
                head = {"unit": self.unit, "neighbouring": self.neighbouring, "dataset": self.dataset}
                journal.append({"kind": "ledger", "version": journals.VERSION, **head})
            held = _budgets(self._history, path)
            given_up = [one for one in held if loosen and not (given is not None and given.implies(one))]
            self._hold([one for one in held if one not in given_up])
            facts: dict[str, Any] = {"id": self.run_id, "dataset": self.dataset}
            facts["budget"] = None if given is None else list(astuple(given))
            if given_up:
                facts["loosened"] = [list(astuple(one)) for one in given_up]
            if self._history.name_runs(earlier := journals.fresh_id()):
                facts["earlier"] = earlier
            self._writer = journals.RunWriter(journal, len(self._history.runs) + 1, facts)
        except BaseException:
            journal.close()
            raise
        # When the process ends, or this object.
        weakref.finalize(self, self._writer.close)

    def _check_facts(self, path: Path, any_dataset: bool) -> None:
        facts = self._history.facts
        for name in ("unit", "neighbouring"):
            value = getattr(self, name)
            if facts[name] != value:
                raise ConfigError(
                    f"the ledger {path} is of {name} {clipped(facts[name])}, not {value!r}: the two do not add up. "
                    f"Give {name}={clipped(facts[name])}, or another file"
                )
        known = {facts["dataset"], *(run.facts.get("dataset", "") for run in self._history.runs)}
        if not self.dataset:
            self.dataset = facts["dataset"]
        elif self.dataset not in known and not any_dataset:
            raise ConfigError(
                f"the ledger {path} is of the data set {facts['dataset']!r}, not {self.dataset!r}: use another file, "
                "or give any_dataset=True where a unit may be in both"
            )

    def _hold(self, held: Sequence[Budget]) -> None:
        """Hold a file's budgets with the given one, which must not be looser."""
        given = self.budget
        for one in _binding(held):
            if given is not None and given != one and one.implies(given):
                raise ConfigError(
                    f"the ledger {self.path} has the budget epsilon {one.epsilon:g} at delta {one.delta:g}, and "
                    f"epsilon {given.epsilon:g} at delta {given.delta:g} is looser: leave budget out to keep it, or "
                    "open the ledger with PrivacyLedger(path, budget=..., loosen_budget=True), which it records"
                )
        budgets = _binding([*held, *([] if given is None else [given])])
        self._allowances = [Allowance(one, self.neighbouring) for one in budgets]
        self.budget = given or (budgets[-1] if budgets else None)


LedgerLike = PrivacyLedger | str | os.PathLike[str] | None  # a path is opened, and closed, by who gets it


@contextlib.contextmanager
def opened_ledger(
    ledger: LedgerLike, *, unit: str = "example", neighbouring: str = "add-or-remove-one"
) -> Iterator[PrivacyLedger | None]:
    """Enter a ledger, closed at the end if it was given by its path; ConfigError if it is none of both, nor None."""
    if ledger is None or isinstance(ledger, PrivacyLedger):
        yield ledger
        return
    path = ledger_path(ledger)
    if path.is_file() and path.stat().st_size:
        known = PrivacyLedger.read(path)
        unit, neighbouring = known.unit, known.neighbouring
    with PrivacyLedger(path, unit=unit, neighbouring=neighbouring) as opened:
        yield opened


def ledger_path(ledger: object) -> Path:
    """Return the path of a ledger's file; ConfigError if it is none."""
    if not isinstance(ledger, str | os.PathLike):
        raise ConfigError(f"ledger must be a PrivacyLedger, a path or None, got {type(ledger).__name__}")
    return Path(ledger)


def absolute_ledger(ledger: LedgerLike) -> LedgerLike:
    """Return what names the same ledger after the working folder has changed."""
    return ledger if ledger is None or isinstance(ledger, PrivacyLedger) else ledger_path(ledger).absolute()


def _budgets(history: LedgerHistory, path: Path) -> list[Budget]:
    """Return the budgets of a file that were not given up, in the order in which they were last given."""
    try:
        return [Budget(epsilon=epsilon, delta=delta, method=method) for epsilon, delta, method in history.budgets]
    except ConfigError as error:
        raise FormatError(f"{path}: a run's budget is not valid: {error}") from None


def _binding(budgets: Sequence[Budget]) -> list[Budget]:
    """Return the budgets without those that another one implies."""
    every = dict.fromkeys(budgets)
    return [one for one in every if not any(other != one and other.implies(one) for other in every)]


# --- the statement ----------------------------------------------------------------------------------------------------
_RELATIONS: Final = {
    "add-or-remove-one": "neighbouring data sets differ by one {unit} added or removed",
    "replace-one": "neighbouring data sets differ by one {unit} replaced",
}
_SAMPLINGS: Final = {
    "poisson": "Poisson: each {unit} in each draw independently, probability {rate}; accounted as amplification",
    "none": "none: all records are used",
    "shuffled": "shuffled batches: accounted without amplification, each release as if it used every record",
    "unknown": "unknown: accounted without amplification, each release as if it used every record",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyStatement:
    """A ledger's statement; `str` gives text, `to_json` and `to_markdown` the same for machines and documents.

    Attributes:
        relation: the neighbouring relation in words.
        epsilon: at delta, by privacy loss distributions; may be infinite.
        epsilon_rdp: the cross-check by Renyi divergence, an upper bound as well.
        reason: why epsilon is infinite, or empty.
        meaning: of epsilon and delta, in one sentence.
        units: about how many the data have; None if it was not recorded.
        others: (delta, epsilon) at other deltas that were chosen, by a budget or a training.
        charged_delta: the part of delta that cut tails and rounding take.
        budget: (epsilon, delta, method), or None.
        events: equal ones as one with its count.
        datasets: the names that were given.
        runs: of the file, in order: time, dataset, releases, closed, versions.
        covered, not_covered: what epsilon is of, and what it is not, in words.
        remarks: assumptions, in words.
        versions: of the libraries that computed the statement.
    """

    unit: str
    neighbouring: str
    relation: str
    delta: float
    epsilon: float
    epsilon_rdp: float
    reason: str
    meaning: str
    units: int | None
    others: tuple[tuple[float, float], ...]
    charged_delta: float
    budget: tuple[float, float, str] | None
    events: tuple[PrivacyEvent, ...]
    datasets: tuple[str, ...]
    runs: tuple[dict[str, Any], ...]
    covered: tuple[str, ...]
    not_covered: tuple[str, ...]
    remarks: tuple[str, ...]
    versions: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{name}: {escaped(value)}" for name, value in self._facts()]  # a name must not look like a line
        for title, content in self._sections():
            lines += [f"{title}:", *(f"  {escaped(line)}" for line in content)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return one JSON object; an infinite epsilon is the string "inf"."""
        fields = asdict(self)
        for name in ("epsilon", "epsilon_rdp"):
            fields[name] = _json_number(fields[name])
        fields["others"] = [(delta, _json_number(epsilon)) for delta, epsilon in self.others]
        return json.dumps(fields)

    def to_markdown(self) -> str:
        """Return a section for a report."""
        lines = ["# Privacy statement", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {_cell(value)} |" for name, value in self._facts()]
        for title, content in self._sections():
            lines += ["", f"## {title}", "", *(f"- {_cell(line)}" for line in content)]
        return "\n".join([*lines, ""])

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "Unit of privacy", self.unit
        yield "Neighbouring", f"{self.neighbouring}: {self.relation}"
        if self.datasets:
            yield "Data", ", ".join(self.datasets)
        reason = f" ({self.reason})" if self.reason else ""
        yield "Epsilon", f"{_number(self.epsilon)} at delta {exact(self.delta)}{reason}"
        yield "Meaning", self.meaning
        yield "Number of units", f"about {self.units:,}" if self.units else "not recorded"
        if self.others:
            found = (f"epsilon {_number(epsilon)} at delta {exact(delta)}" for delta, epsilon in self.others)
            yield "Other deltas that were chosen", "; ".join(found)
        yield "Accountant", "dp-accounting, privacy loss distributions"
        yield "Cross-check", f"epsilon {_number(self.epsilon_rdp)} by Renyi divergence, a looser bound"
        yield "Delta charged", f"{self.charged_delta:.3g}, subtracted from delta before epsilon is computed"
        if self.budget is not None:
            yield "Budget", f"epsilon {exact(self.budget[0])} at delta {exact(self.budget[1])} ({self.budget[2]})"
        releases = sum(event.count for event in self.events)
        yield "Composition", f"{releases} releases, {len(self.events)} kind(s); their order does not matter"
        yield "Versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())

    def _sections(self) -> Iterator[tuple[str, Iterable[str]]]:
        yield "Events", self._event_lines()
        if self.runs:
            yield "Runs", self._run_lines()
        yield "Covered", self.covered
        yield "Not covered", self.not_covered
        yield "Assumptions", self.remarks

    def _event_lines(self) -> Iterator[str]:
        for event in self.events:
            sampling = _SAMPLINGS[event.sampling].format(unit=self.unit, rate=exact(event.sample_rate))
            secure = {True: "secure", False: "not secure", None: "security not recorded"}[event.secure]
            noise = f"{event.source or 'source not recorded'}, {secure}" if event.noise_multiplier else "none"
            parts = [
                f"{event.count} x {event.mechanism}, noise multiplier {exact(event.noise_multiplier)}",
                f"sampling {sampling}",
                f"noise {noise}",
                f"delta charged each {event.delta:.3g}" if event.delta else "",
                "idealised sum" if event.idealised else "",
                event.note,
            ]
            yield "; ".join(filter(None, parts))
        if not self.events:
            yield "none"

    def _run_lines(self) -> Iterator[str]:
        for number, run in enumerate(self.runs, 1):
            end = "ended in order" if run["closed"] else "not closed: all that it reserved is counted"
            libraries = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
            yield f"{number}: {run['time']}, {run['releases']} releases, {end} ({libraries})"


def _file_remarks(ledger: PrivacyLedger) -> Iterator[str]:
    """Yield what a reader must know of the ledger's file."""
    for reason in ledger.unguarded:
        yield f"{reason}: lines cut off the ledger before would not have been noticed, and epsilon may be larger."
    for number, facts in enumerate(ledger.openings, 1):
        for epsilon, delta, method in facts.get("loosened", ()):
            yield f"Run {number} gave up the budget of epsilon {exact(epsilon)} at delta {exact(delta)} ({method})."
    if not all(facts.get("id") for facts in ledger.openings):
        yield (
            "Runs of older versions are in the ledger. They accounted a count's discrete Gaussian as the continuous "
            "one of its own deviation, on a grid of up to an eighth of it: delta may be 2.4% above the stated one."
        )
    if ledger.merged:
        releases = sum(sum(counts.values()) for counts in ledger.merged.values())
        yield f"{releases} releases are of {len(ledger.merged)} other run(s), taken from checkpoints."


_CHANGES: Final = {
    "add-or-remove-one": "whether one {unit} is in the data or not",
    "replace-one": "which values one {unit} has in the data",
}


def _meaning(epsilon: float, delta: float, change: str) -> str:
    """Return what epsilon and delta mean, in one sentence."""
    if math.isinf(epsilon):
        return f"there is no bound on what the results reveal of {change}"
    ratio = math.exp(epsilon) if epsilon < 700 else math.inf
    factor = plain(ratio, 3, up=True) if ratio < 1e6 else f"e^{_number(epsilon)}"
    share = min(1.0, (ratio + delta) / (1 + ratio))
    digits = 3 + int(max(0.0, -math.log10(max(1e-9, 1 - share)) - 1))  # 99.966%, not 100%
    right = "" if epsilon > 30 else (
        f"; an observer who finds both equally likely and guesses from the results is right in at most "
        f"{plain(100 * share, digits, up=True)}% of cases"
    )  # fmt: skip
    return (
        f"{change} changes the probability of each outcome by a factor of at most e^epsilon = {factor}, and by at "
        f"most delta = {exact(delta)} in addition{right}"
    )


def _several_units(epsilon: float, delta: float, unit: str) -> str:
    """Return who is a unit, and what a person with several of them has (group privacy)."""
    begin = f"A unit is one {unit}, with all that it adds to a release. "
    if math.isinf(epsilon):
        return f"{begin}Nobody has a bound."
    found = []
    for count in (2, 10):
        total = count * epsilon
        # delta (e^(k epsilon) - 1) / (e^epsilon - 1), in logarithms
        grown = math.log(delta) + _log_expm1(total) - _log_expm1(epsilon) if epsilon else math.log(delta * count)
        bound = f"{count}: epsilon {_number(total)} at delta {math.exp(grown) * 1.005:.2e}" if grown < 0 else ""
        found.append(bound or f"{count}: no bound, since delta is 1")
    return (
        f"{begin}A person with k units, such as several rows, has k times epsilon, at delta times "
        f"(e^(k epsilon) - 1) / (e^epsilon - 1). With {'; with '.join(found)}."
    )


def _log_expm1(x: float) -> float:
    """Return log(e^x - 1) of x above 0."""
    return x + math.log(-math.expm1(-x))


def _covered(done: list[PrivacyEvent]) -> tuple[str, ...]:
    if not done:
        return ("Nothing was released.",)
    return (
        "The results of the events above: a training's parameters after each step, a query's answer with noise.",
        "All that is computed from them without the data: what a model generates or predicts.",
    )


def _not_covered(unit: str) -> Iterator[str]:
    yield (
        "Losses, accuracies, norms and other figures that were measured on the data without noise, also on rows that "
        "were held out: the metrics, reports and logs of the training have such figures."
    )
    yield f"The number of units ({unit}) and what follows from it, such as the sampling rate; the choice of settings."
    yield "The data, the drawn records, the noise before it was added, and files stored with the results."
    yield (
        "Other runs on the same data: each adds to the cost. So do trial runs that tuned settings, whether their "
        "results were kept or not, unless they are in this ledger."
    )


def _delta_remarks(delta: float, ledger: PrivacyLedger, *, by_default: bool) -> Iterator[str]:
    if by_default:
        yield f"No delta was chosen: {delta:g} is shown. It should be well below one over the number of units."
    elif ledger.units and delta * ledger.units >= 1:
        yield (
            f"Delta {exact(delta)} is not below one over the about {ledger.units:,} units: to publish some of them as "
            "they are would be as private. A smaller delta has a larger epsilon."
        )


def _remarks(done: list[PrivacyEvent], datasets: int) -> Iterator[str]:
    yield "Those who ran the releases saw the data and are trusted; the noise and the drawn records are secret."
    for event in done:
        if event.noise_multiplier == 0:
            yield f"{event.count} releases have no noise: they have no privacy, and neither has the total."
    insecure = sorted({event.source or event.mechanism for event in done if event.secure is False})
    if insecure:
        yield (
            f"Not secure: noise of {', '.join(insecure)} is not cryptographic noise on a grid; an attacker who "
            "knows part of it, or examines low bits, may learn more than epsilon allows. For research."
        )
    if any(event.secure is None and event.noise_multiplier for event in done):
        yield "For some releases it was not recorded whether their noise is secure."
    if any(event.idealised for event in done):
        yield (
            "Idealised sum: the proof is for exact sums; this run used floating point. Before the noise was added, "
            "sums were rounded, and how one unit changes the rounding of the others has no useful bound (Mironov 2012)."
        )
    if any(event.sampling in ("shuffled", "unknown") for event in done):
        yield (
            "Some releases used shuffled batches or unknown draws: each is accounted as if it used all records, which "
            "is safe, and costs far more than Poisson sampling would."
        )
    if any(event.mechanism == "discrete_gaussian" for event in done):
        yield (
            "The discrete Gaussian is accounted as the continuous one of the recorded multiplier: the noise is wider "
            "by what the grid adds (Peikert 2010, theorem 3.1). Events recorded by hand must allow for it themselves."
        )
    if any(event.mechanism == "discrete_laplace" for event in done):
        yield "The discrete Laplace is accounted by its pure epsilon alone, which holds on every grid."
    if datasets > 1:
        yield "Several data sets: epsilon is that of a unit that is in all of them."
    yield "None of this code has been audited."


def _json_number(epsilon: float) -> float | str:
    return "inf" if math.isinf(epsilon) else epsilon


def _number(epsilon: float) -> str:
    return "infinite" if math.isinf(epsilon) else plain(epsilon, 6, up=True)


def _cell(text: str) -> str:
    return escaped(text).replace("|", "\\|")


Ledger = PrivacyLedger
