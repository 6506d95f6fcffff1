"""Privacy statements: whose privacy a ledger protects, under which assumptions, and how much was spent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any, Final

from accelerant.privacy.dp.ledger.accounting import spent
from accelerant.privacy.dp.ledger.events import DEFAULT_DELTA, PrivacyEvent, check_delta
from accelerant.privacy.dp.ledger.journal import versions
from accelerant.runtime.files import escaped, exact, plain

if TYPE_CHECKING:
    from accelerant.privacy.dp.ledger.ledger import PrivacyLedger

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


def make_statement(ledger: PrivacyLedger, delta: float | None = None) -> PrivacyStatement:
    """Return the statement of a ledger; see `PrivacyLedger.statement`."""
    budget = None if ledger.budget is None else astuple(ledger.budget)
    by_default = delta is None and ledger.delta is None
    chosen = delta if delta is not None else ledger.delta or DEFAULT_DELTA
    check_delta(chosen)
    events = ledger.events
    cost = spent(events, chosen, neighbouring=ledger.neighbouring)
    others = [one for one in dict.fromkeys(ledger.deltas) if one != chosen]
    done = [event for event in events if event.count]
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
    return PrivacyStatement(
        unit=ledger.unit, neighbouring=ledger.neighbouring, delta=chosen, budget=budget, events=events, runs=runs,
        relation=_RELATIONS[ledger.neighbouring].format(unit=ledger.unit), epsilon=cost.epsilon, reason=cost.reason,
        epsilon_rdp=spent(events, chosen, method="rdp", neighbouring=ledger.neighbouring).epsilon,
        charged_delta=cost.charged, datasets=tuple(datasets), versions=versions(), units=ledger.units or None,
        others=tuple((one, spent(events, one, neighbouring=ledger.neighbouring).epsilon) for one in others),
        meaning=_meaning(cost.epsilon, chosen, _CHANGES[ledger.neighbouring].format(unit=ledger.unit)),
        covered=_covered(done), not_covered=tuple(_not_covered(ledger.unit)),
        remarks=(
            *_file_remarks(ledger),
            *_delta_remarks(chosen, ledger, by_default=by_default),
            _several_units(cost.epsilon, chosen, ledger.unit),
            *_remarks(done, len(datasets)),
        ),
    )  # fmt: skip


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
