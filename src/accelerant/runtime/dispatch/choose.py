"""Which implementation runs a case, and why.

Of those that serve it: the forced one; otherwise the fastest by what was measured on this model of device, a local race
before a shipped table; otherwise the first. Where the setting `race` asks for it and no local result covers the case,
the race is run here, on the arguments of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.runtime import registry
from accelerant.runtime.dispatch.case import Case, Implementation
from accelerant.runtime.dispatch.choices import Entry, choices, key_of, rounded
from accelerant.runtime.dispatch.race import MARGIN, fastest, obstacle, race
from accelerant.runtime.dispatch.rules import rules

__all__ = ["Choice", "choose", "powers_of_two", "reason_of"]

RACED = frozenset({"cuda", "cpu"})
"""Types of torch device whose calls a race can time."""


@dataclass(slots=True)
class Choice:
    """An implementation and why.

    Attributes:
        implementation: to run.
        reason: in words.
        raced: what was timed, with milliseconds.
        forced: it is to be no other.
        lasting: False where a race that was asked for could not be run at this call.
        refused: what served but failed in the race that was looked up, with the reason.
        failed: what failed in a race that was run just now.
        measured: a race was run just now.
    """

    implementation: Implementation
    reason: str
    raced: tuple[tuple[str, float], ...] = ()
    forced: bool = False
    lasting: bool = True
    refused: tuple[tuple[str, str], ...] = ()
    failed: Mapping[str, Exception] = field(default_factory=dict)
    measured: bool = False


def choose(
    op: str,
    case: Case,
    refusals: Sequence[tuple[Implementation, str | None]],
    bucket: Callable[[Case], tuple[Hashable, ...]],
    args: tuple[Any, ...],
    is_transient: Callable[[Exception], bool],
) -> Choice:
    """The implementation for a case under the rules in force.

    Args:
        op: name of the Operation.
        case: what is called.
        refusals: each implementation, the preferred first, with its reason against the case.
        bucket: what of the case a race stands for.
        args: of the call; used if there is a race.
        is_transient: tells an error that says nothing about the next call, so that a race with one is not kept.

    Raises:
        UnsupportedCase: none serves the case, or the forced one does not.
        ConfigError: the forced one does not exist.
    """
    now = rules()
    forced = dict(now.forced).get(op) if now.forced else None
    if forced is not None:
        return Choice(_forced(op, case, forced, refusals), "forced", forced=True)
    serving = [each for each, reason in refusals if reason is None]
    if not serving:
        reasons = "; ".join(f"{each.name}: {reason}" for each, reason in refusals)
        raise UnsupportedCase(f"{op} has no implementation for {case} on {case.device} ({reasons})")
    if len(serving) == 1:
        return Choice(serving[0], "the only one that serves this case")
    if case.device.type not in RACED or any(each.mutates for each in serving):
        return Choice(serving[0], "order of preference")
    key = key_of(op, case.dtype, bucket(case))
    entry = choices().find(case.device, key)
    if not now.race or now.deterministic or _covers(entry, serving):
        return _by_times(case, entry, serving)
    obstructed = obstacle(case.device, args) is not None
    outcome = None if obstructed else _race(case, serving, args)
    if outcome is None:
        choice = _by_times(case, entry, serving)
        choice.lasting = False
        return choice
    ms, failed = outcome
    lasting = bool(ms) and not any(map(is_transient, failed.values()))
    if not ms:  # the call itself says what is wrong
        failed = {}
    else:
        entry = Entry(ms, str(case), failed={name: reason_of(error) for name, error in failed.items()})
        if lasting:
            choices().keep(case.device, key, entry)
    choice = _by_times(case, entry, serving)
    choice.lasting, choice.failed, choice.measured = lasting, failed, lasting
    return choice


def powers_of_two(case: Case) -> tuple[Hashable, ...]:
    """The usual bucket: each size rounded up to a power of two, the options as they are."""
    return (*rounded(case.shape), *case.options)


def reason_of(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' | '.join(str(error).splitlines()[:2])}"


def _forced(op: str, case: Case, name: str, refusals: Sequence[tuple[Implementation, str | None]]) -> Implementation:
    for each, reason in refusals:
        if each.name == name:
            if reason is None:
                return each
            raise UnsupportedCase(f"{op} is forced to {name!r}, which refuses {case} on {case.device}: {reason}")
    known = ", ".join(each.name for each, _ in refusals)
    raise ConfigError(f"setting implementation: {op} has the implementations {known}; got {name!r}")


def _covers(entry: Entry | None, serving: Sequence[Implementation]) -> bool:
    """Whether an entry is local and knows each implementation."""
    if entry is None or entry.table:
        return False
    return all(each.name in entry.ms or each.name in entry.failed for each in serving)


def _race(
    case: Case, serving: Sequence[Implementation], args: tuple[Any, ...]
) -> tuple[dict[str, float], dict[str, Exception]] | None:
    """Times and failures; None where another thread is racing."""
    runs = [(each.name, _call(each.run, args)) for each in serving]
    outcome = race(runs, case.device, lost=registry.provider_of(case.device).lost)
    return None if outcome is None else (outcome.ms, outcome.failed)


def _call(run: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], object]:
    return lambda: run(*args)


def _by_times(case: Case, entry: Entry | None, serving: Sequence[Implementation]) -> Choice:
    """The fastest that an entry knows, or the first."""
    name = fastest(entry.ms, [each.name for each in serving]) if entry is not None else None
    if entry is None or name is None:
        return Choice(serving[0], "order of preference")
    winner = next(each for each in serving if each.name == name)
    times = {each.name: entry.ms[each.name] for each in serving if each.name in entry.ms}
    refused = tuple(
        (each.name, f"failed in the race of {entry.date}: {entry.failed[each.name]}")
        for each in serving
        if each.name in entry.failed
    )
    return Choice(winner, _why(name, times, entry, str(case)), tuple(times.items()), refused=refused)


def _why(name: str, times: Mapping[str, float], entry: Entry, case: str) -> str:
    """What was timed where, in words."""
    others = ", ".join(f"{other} {ms:.4f} ms" for other, ms in times.items() if other != name)
    text = f"raced {times[name]:.4f} ms" + (f" against {others}" if others else "")
    if times[name] > min(times.values()):
        text += f", preferred within {MARGIN:.0%}"
    if entry.case and entry.case != case:
        text += f" at {entry.case}"
    if entry.table:
        return f"shipped table for {entry.table}, {text}"
    return f"{text} ({entry.date}, this device)"
