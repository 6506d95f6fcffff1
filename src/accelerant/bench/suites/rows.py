"""The rows of one case of the neural suite: each runner checked, then timed.

Where dispatch chooses a library, the case is measured once more with our own kernel forced; and once with the setting
`deterministic`, where that may cost something. A runner that raises has a row that says why; an error of ours is the
run's, but for a lack of memory, which is a result. On a CPU the runners are called in turns.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from accelerant import ops
from accelerant.bench.clock import Clock
from accelerant.bench.record import DETERMINISTIC, OUT_OF_MEMORY, OWN, Row
from accelerant.bench.subjects import OPS
from accelerant.bench.suites.cases import Case, Work, call_of, work_of
from accelerant.bench.suites.checks import Oracle
from accelerant.bench.suites.plan import Planned
from accelerant.bench.timer import Timing, rotated_ms, time_in_turns, time_ms
from accelerant.config import override
from accelerant.errors import OutOfMemory
from accelerant.runtime import registry
from accelerant.runtime.dispatch import force, operations
from accelerant.runtime.dispatch.plan import Decision, explain_quietly

__all__ = ["lack_of_memory", "own_kernels", "rows_of", "runner_names", "runners_of"]

_RUNNERS = {"compile": "torch.compile"}
"""The runners of peers that have another name as such."""

_ROTATED_BYTES = 2**29
_ROTATED_LEAST, _ROTATED_MOST = 8, 64
"""Copies that a rotated case has: so many that they are several times what the L2 of any GPU holds."""

Progress = Callable[[str], None]
Maker = Callable[[], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class _Bench:
    """A case in work: what it was planned as, its tensors, what its results must be, and where its time goes."""

    each: Planned
    case: Case
    oracle: Oracle
    clock: Clock


@dataclass(slots=True)
class _Ready:
    """A runner's row before it is timed: the call, or None with the reason in the row's note."""

    row: Row
    fn: Callable[..., Any] | None = None
    call: Callable[[], Any] | None = None
    decisions: list[Decision] = field(default_factory=list)


def runners_of(case: Case, each: Planned) -> dict[str, Maker]:
    """Runner -> what makes its function. Ours first."""
    subject = OPS[case.name]
    made: dict[str, Maker] = {"accelerant": lambda: getattr(ops, case.name)}
    for peer in each.peers:
        if peer == "torch":
            made["torch"] = lambda: subject.theirs
        elif peer == "compile":
            made[_RUNNERS[peer]] = lambda: _compiled(case, each.part)
        else:
            made[peer] = subject.peers[peer]
    return made


def _compiled(case: Case, part: str) -> Callable[..., Any]:
    """Torch's function compiled for a case's sizes; in a sweep, for any number of rows, with the largest in view."""
    theirs = OPS[case.name].theirs
    if part != "sweep" or case.inputs[0] is None:
        return torch.compile(theirs, dynamic=False)
    compiled, rows = torch.compile(theirs), len(case.inputs[0])

    def of_any_rows(*args: Any, **options: Any) -> Any:
        for x in args:
            if isinstance(x, Tensor) and x.ndim and len(x) == rows > 1:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return compiled(*args, **options)

    return of_any_rows


def runner_names(each: Planned) -> list[str]:
    """Ours, and those of the peers that have the op."""
    return ["accelerant", *(_RUNNERS.get(name, name) for name in each.peers)]


def rows_of(case: Case, each: Planned, clock: Clock, progress: Progress) -> Iterator[Row]:
    """Each runner's rows of a case, as they are measured.

    Raises:
        AccelerantError, RuntimeError, ...: what ours raised, but for a lack of memory.
    """
    runners = runners_of(case, each)
    works = work_of(case)
    bench = _Bench(each, case, Oracle(case, works[0].flops), clock)
    for work in works:
        base = Row(
            "neural", case.name, f"{case.label} {work.direction}", "", "", bytes=work.bytes, flops=work.flops,
            ceiling="matmul" if work.flops else "copy", part=each.part,
        )  # fmt: skip
        base = _aimed(base, case, work.direction)
        if case.device.type == "cpu":
            yield from _in_turns(base, runners, work, bench, progress)
            continue
        for runner, make in runners.items():
            progress(f"{base.op} {base.case}: {runner}")
            row = replace(base, runner=runner)
            if runner == "accelerant":
                yield from _ours(row, make, work, bench)
            else:
                yield _timed(_ready(_unaimed(row), make, work, bench), work, bench)


def _in_turns(base: Row, runners: dict[str, Maker], work: Work, bench: _Bench, progress: Progress) -> Iterator[Row]:
    """On a CPU: ours and the peers in turns, then our rows besides."""
    ready = []
    for runner, make in runners.items():
        progress(f"{base.op} {base.case}: {runner}")
        row, is_ours = replace(base, runner=runner), runner == "accelerant"
        ready.append(_ready(row if is_ours else _unaimed(row), make, work, bench, ours=is_ours))
    going = [each for each in ready if each.call is not None]
    with bench.clock.of("timed calls"):
        taken = time_in_turns([each.call for each in going if each.call is not None], budget_s=bench.each.budget_s)
    for each, timing in zip(going, taken, strict=True):
        each.row = _with_times(each.row, timing)
    yield from (each.row for each in ready)
    ours = ready[0]
    yield from _ours_besides(ours.row, runners["accelerant"], ours, work, bench)


def _ours(row: Row, make: Maker, work: Work, bench: _Bench) -> Iterator[Row]:
    """The chosen implementation; then our own kernel where that is a library's; then deterministic mode."""
    races = bench.each.race and bench.case.device.type == "cuda"
    with override(race="first_use") if races else contextlib.nullcontext():
        ready = _ready(row, make, work, bench, ours=True)
        chosen = _timed(ready, work, bench)
    yield chosen
    yield from _ours_besides(chosen, make, ready, work, bench)


def _ours_besides(chosen: Row, make: Maker, ready: _Ready, work: Work, bench: _Bench) -> Iterator[Row]:
    """Our own kernel where a library's was chosen, and what the setting `deterministic` costs where it may."""
    blank = replace(_unaimed(chosen), p20=None, p50=None, p80=None, note="", samples=(), peak_bytes=None, error=None)
    forced = own_kernels(ready.decisions)
    if forced and bench.each.part == "":
        with force(**forced):
            own = replace(blank, runner=OWN, target_bytes=chosen.target_bytes)
            yield _timed(_ready(own, make, work, bench, ours=True), work, bench)
    if bench.each.deterministic and _may_differ(ready.decisions):
        with override(deterministic=True):
            same = _timed(_ready(replace(blank, runner=DETERMINISTIC), make, work, bench, ours=True), work, bench)
        if same.p50 and chosen.p50:
            same = replace(same, note=f"{same.p50 / chosen.p50:.2f}x the time without")
        yield same


def own_kernels(decisions: Sequence[Decision]) -> dict[str, str]:
    """What to force so that our own kernels run where dispatch chose a library."""
    forced = {}
    for each in decisions:
        if not each.own:
            refused = {name for name, _ in each.refused}
            own = [one.name for one in operations()[each.op].implementations if one.own and one.name not in refused]
            if own:
                forced[each.op] = own[0]
    return forced


def _may_differ(decisions: Sequence[Decision]) -> bool:
    """Whether an op in a call has an implementation whose bits vary."""
    return any(not one.deterministic for each in decisions for one in operations()[each.op].implementations)


def _aimed(row: Row, case: Case, direction: str) -> Row:
    """The row with what the case names to reach."""
    it = case.benchmark
    if not case.aims:
        return row
    aims = {
        "forward": (it.forward_ms, it.forward_x),
        "backward": (it.backward_ms, it.backward_x),
        "both": (it.both_ms, None),
    }
    ms, multiple = aims[direction]
    within = int(it.peak_mib * 2**20) if it.peak_mib and direction == "forward" else None
    return replace(row, target=ms, target_x=multiple, target_bytes=within)


def _unaimed(row: Row) -> Row:
    return replace(row, target=None, target_x=None, target_bytes=None)


def _ready(row: Row, make: Maker, work: Work, bench: _Bench, *, ours: bool = False) -> _Ready:
    """A runner whose results were compared, with the call to time; or its row, which says why there is none."""
    case, clock = bench.case, bench.clock
    decisions: list[Decision] = []
    try:
        with clock.of("first calls, races"):
            fn = make()
            call = call_of(fn, case, work.direction)
            if ours:
                decisions = explain_quietly(call).decisions  # a race, if there is one, is run here
        row = replace(row, implementation=_implementation(decisions) if ours else row.runner, reason=_reason(decisions))
        # Of fewer rows than are timed, torch.compile would compile another function: its results are not seen.
        if bench.oracle.whole or row.runner != "torch.compile":
            with clock.of("checks"):
                error, wrong = bench.oracle.wrong(fn, work.direction)
            row = replace(row, error=error, note=wrong)
    except Exception as error:  # noqa: BLE001 - whatever a runner raises, its row says so
        return _Ready(_failed_row(row, error, case))
    return _Ready(row, None if row.note else fn, None if row.note else call, decisions)


def _timed(ready: _Ready, work: Work, bench: _Bench) -> Row:
    """The row with its times, or with why it has none."""
    if ready.call is None or ready.fn is None:
        return ready.row
    case, budget_s = bench.case, bench.each.budget_s
    try:
        with bench.clock.of("timed calls"):
            peak = _peak_bytes(ready.call, case.device)
            if bench.each.benchmark.rotated and work.direction == "forward":
                timing, how = rotated_ms(_copies(ready.fn, case), case.device, budget_s=budget_s)
            else:
                timing, how = time_ms(ready.call, case.device, budget_s=budget_s, reads=work.only_reads), ""
    except Exception as error:  # noqa: BLE001 - as above
        return _failed_row(ready.row, error, case)
    return replace(_with_times(ready.row, timing), peak_bytes=peak, timing=how)


def _with_times(row: Row, timing: Timing) -> Row:
    return replace(row, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms, samples=timing.samples)


def _failed_row(row: Row, error: Exception, case: Case) -> Row:
    """The row of a runner that raised. Out of memory is a result; else an error of ours is the run's."""
    lost = registry.provider_of(case.device).lost(error)
    if lost is not None:
        raise lost from error
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, (torch.OutOfMemoryError, OutOfMemory)):
        if case.device.type == "cuda":
            torch.cuda.empty_cache()
        return replace(row, note=lack_of_memory(error))
    if row.runner == "accelerant":
        raise error
    return replace(row, note=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}")


def lack_of_memory(error: Exception) -> str:
    """The note of a row that it left without a time."""
    return f"{OUT_OF_MEMORY}{(str(error).splitlines() or [''])[0][:160]}"


def _copies(fn: Callable[..., Any], case: Case) -> list[Callable[[], Any]]:
    """The forward call on copies of the arguments, the first of them the arguments themselves."""
    size = sum(x.nbytes for x in case.inputs if x is not None)
    count = max(_ROTATED_LEAST, min(_ROTATED_MOST, -(-_ROTATED_BYTES // max(size, 1))))
    others = [tuple(None if x is None else x.clone() for x in case.inputs) for _ in range(count - 1)]
    return [call_of(fn, replace(case, inputs=inputs), "forward") for inputs in (case.inputs, *others)]


def _peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """What a call takes at its highest, its results among that, above what was there before."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _implementation(decisions: Sequence[Decision]) -> str:
    """What dispatch chose in a call, from its own account."""
    names = dict.fromkeys(f"{each.implementation} ({'own' if each.own else 'library'})" for each in decisions)
    return " + ".join(names) or "autograd alone"


def _reason(decisions: Sequence[Decision]) -> str:
    """Why dispatch chose it."""
    return "; ".join(dict.fromkeys(f"{each.op}: {each.reason}" for each in decisions if each.reason))
