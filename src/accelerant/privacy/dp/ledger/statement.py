"""Privacy statements: whose privacy a ledger protects, under which assumptions, and how much was spent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any, Final

from accelerant.privacy.dp.ledger.accounting import spent
from accelerant.privacy.dp.ledger.events import Event, check_delta
from accelerant.privacy.dp.ledger.runs import versions
from accelerant.runtime.files import plain

if TYPE_CHECKING:
    from accelerant.privacy.dp.ledger.ledger import Ledger

__all__ = ["Statement", "make_statement"]

_DELTA: Final = 1e-5

_RELATIONS: Final = {
    "add-or-remove-one": "neighbouring data sets differ by one {unit} added or removed",
    "replace-one": "neighbouring data sets differ by one {unit} replaced",
}
_SAMPLINGS: Final = {
    "poisson": "Poisson: each {unit} in each draw independently, probability {rate:.6g}; accounted as amplification",
    "none": "none: all records are used",
    "shuffled": "shuffled batches: accounted without amplification, each release as if it used every record",
    "unknown": "unknown: accounted without amplification, each release as if it used every record",
}


@dataclass(frozen=True, slots=True)
class Statement:
    """A ledger's statement; `str` gives text, `to_json` and `to_markdown` the same for machines and documents.

    Attributes:
        relation: the neighbouring relation in words.
        epsilon: at delta, by privacy loss distributions; may be infinite.
        epsilon_rdp: the cross-check by Renyi divergence, an upper bound as well.
        reason: why epsilon is infinite, or empty.
        charged_delta: the part of delta that cut tails and rounding take.
        budget: (epsilon, delta, method), or None.
        events: equal ones as one with its count.
        datasets: the names that were given.
        runs: of the file, in order: time, dataset, releases, closed, versions.
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
    charged_delta: float
    budget: tuple[float, float, str] | None
    events: tuple[Event, ...]
    datasets: tuple[str, ...]
    runs: tuple[dict[str, Any], ...]
    remarks: tuple[str, ...]
    versions: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self._facts()]
        for title, content in self._sections():
            lines += [f"{title}:", *(f"  {line}" for line in content)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return one JSON object; an infinite epsilon is the string "inf"."""
        fields = asdict(self)
        for name in ("epsilon", "epsilon_rdp"):
            if math.isinf(fields[name]):
                fields[name] = "inf"
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
        yield "Epsilon", f"{_number(self.epsilon)} at delta {self.delta:g}{reason}"
        yield "Accountant", "dp-accounting, privacy loss distributions"
        yield "Cross-check", f"epsilon {_number(self.epsilon_rdp)} by Renyi divergence, a looser bound"
        yield "Delta charged", f"{self.charged_delta:.3g}, subtracted from delta before epsilon is computed"
        if self.budget is not None:
            yield "Budget", f"epsilon {self.budget[0]:g} at delta {self.budget[1]:g} ({self.budget[2]})"
        releases = sum(event.count for event in self.events)
        yield "Composition", f"{releases} releases, {len(self.events)} kind(s); their order does not matter"
        yield "Versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())

    def _sections(self) -> Iterator[tuple[str, Iterable[str]]]:
        yield "Events", self._event_lines()
        if self.runs:
            yield "Runs", self._run_lines()
        yield "Assumptions", self.remarks

    def _event_lines(self) -> Iterator[str]:
        for event in self.events:
            sampling = _SAMPLINGS[event.sampling].format(unit=self.unit, rate=event.sample_rate)
            secure = {True: "secure", False: "not secure", None: "security not recorded"}[event.secure]
            noise = f"{event.source or 'source not recorded'}, {secure}" if event.noise_multiplier else "none"
            parts = [
                f"{event.count} x {event.mechanism}, noise multiplier {event.noise_multiplier:.6g}",
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


def make_statement(ledger: Ledger, delta: float | None = None) -> Statement:
    """Return the statement of a ledger; see `Ledger.statement`."""
    budget = None if ledger.budget is None else astuple(ledger.budget)
    chosen = delta if delta is not None else budget[1] if budget is not None else _DELTA
    check_delta(chosen)
    events = ledger.events
    cost = spent(events, chosen, neighbouring=ledger.neighbouring)
    runs = tuple(
        {
            "time": run.facts.get("time", ""),
            "dataset": run.facts.get("dataset", ""),
            "releases": sum(run.counts.values()),
            "closed": run.closed,
            "versions": run.facts.get("versions", {}),
        }
        for run in ledger.runs
    )
    datasets = dict.fromkeys(name for name in (*(run["dataset"] for run in runs), ledger.dataset) if name)
    return Statement(
        unit=ledger.unit, neighbouring=ledger.neighbouring, delta=chosen, budget=budget, events=events, runs=runs,
        relation=_RELATIONS[ledger.neighbouring].format(unit=ledger.unit), epsilon=cost.epsilon, reason=cost.reason,
        epsilon_rdp=spent(events, chosen, method="rdp", neighbouring=ledger.neighbouring).epsilon,
        charged_delta=cost.charged, datasets=tuple(datasets), versions=versions(),
        remarks=(
            *_file_remarks(ledger),
            *_remarks(events, len(datasets), chosen_by_default=delta is None and budget is None),
        ),
    )  # fmt: skip


def _file_remarks(ledger: Ledger) -> Iterator[str]:
    """Yield what a reader must know of the ledger's file."""
    for reason in ledger.unguarded:
        yield f"{reason}: lines cut off the ledger before would not have been noticed, and epsilon may be larger."
    for number, facts in enumerate(ledger.openings, 1):
        for epsilon, delta, method in facts.get("loosened", ()):
            yield f"Run {number} gave up the budget of epsilon {epsilon:g} at delta {delta:g} ({method})."
    if not all(facts.get("id") for facts in ledger.openings):
        yield (
            "Runs of older versions are in the ledger. They accounted a count's discrete Gaussian as the continuous "
            "one of its own deviation, on a grid of up to an eighth of it: delta may be 2.4% above the stated one."
        )
    if ledger.merged:
        releases = sum(sum(counts.values()) for counts in ledger.merged.values())
        yield f"{releases} releases are of {len(ledger.merged)} other run(s), taken from checkpoints."


def _remarks(events: tuple[Event, ...], datasets: int, *, chosen_by_default: bool) -> Iterator[str]:
    done = [event for event in events if event.count]
    if chosen_by_default:
        yield f"No delta was chosen: {_DELTA:g} is shown. It should be well below one over the number of units."
    yield "Those who ran the releases saw the data and are trusted; the noise and the drawn records are secret."
    yield "Only this ledger is counted: other runs on the same data, trial runs too, add to the cost."
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
            "Idealised sum: the sum before the noise was in floating point, where rounding has no useful bound; "
            "epsilon is that of exact sums (Mironov 2012)."
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


def _number(epsilon: float) -> str:
    return "infinite" if math.isinf(epsilon) else plain(epsilon, 6, up=True)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
