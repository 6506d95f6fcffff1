"""The neural ops beside torch, torch.compile and other libraries, forward and backward apart, in one run.

In the tables dispatch races its implementations, as it does for a user who asks for it; where it chooses a library, the
case is measured once more with our own kernel forced. At odd sizes and in the sweep it chooses as a user's first call
does. Results and gradients, ours and the peers', are compared with the float64 reference before anything is timed: what
is wrong has a row that says so, and no time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accelerant import ops
from accelerant.bench import peers
from accelerant.bench.ceilings import measure_ceilings
from accelerant.bench.cpu_column import cpu_column
from accelerant.bench.journal import Journal
from accelerant.bench.record import DETERMINISTIC, OWN, Environment, Record, Row
from accelerant.bench.subjects import OPS
from accelerant.bench.suites.cases import Case, Work, benchmarks_of, call_of, shrunk, work_of
from accelerant.bench.suites.checks import Oracle
from accelerant.bench.suites.plan import Planned, plan
from accelerant.bench.timer import rotated_ms, time_ms
from accelerant.config import override
from accelerant.errors import AccelerantError, ConfigError, DeviceLost
from accelerant.ops._cases import Benchmark
from accelerant.runtime import registry
from accelerant.runtime.decisions import Decision, explain_quietly
from accelerant.runtime.dispatch import force, operations
from accelerant.runtime.provider import ComputeDevice

__all__ = [
    "AGAINST",
    "OPS",
    "calls",
    "check_against",
    "compiling",
    "measure",
    "measure_planned",
    "own_kernels",
    "run",
    "runners_of",
]

AGAINST = ("torch", "compile", "cudnn", "flash", "cublaslt")
"""The peers of a run that names none: what a torch with CUDA has."""

_RECOMPILES = 64
"""What torch.compile may make of one function: a sweep's sizes, forward and backward, are more than its usual 8."""

_ROTATED_BYTES = 2**29
_ROTATED_LEAST, _ROTATED_MOST = 8, 64
"""Copies that a rotated case has: so many that they are several times what the L2 of any GPU holds."""

Progress = Callable[[str], None]
Maker = Callable[[], Callable[..., Any]]


def run(
    device: ComputeDevice,
    *,
    names: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    budget_s: float = 0.3,
    against: Sequence[str] = AGAINST,
    progress: Progress = lambda _: None,
) -> Record:
    """A record of its own; see measure."""
    record = Record(Environment.of(device))
    measure(record, device, names=names, dtype=dtype, budget_s=budget_s, against=against, progress=progress)
    record.conclude()
    return record


def check_against(names: Sequence[str]) -> None:
    """Refuse a peer that is none.

    Raises:
        ConfigError: names it and the ones there are.
    """
    unknown = [name for name in names if name not in peers.NAMES]
    if unknown:
        raise ConfigError(f"no peer {unknown[0]!r}; there are {', '.join(peers.NAMES)}")


def measure(
    record: Record,
    device: ComputeDevice,
    *,
    names: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    budget_s: float = 0.3,
    against: Sequence[str] = AGAINST,
    cpu: bool = False,
    progress: Progress = lambda _: None,
) -> None:
    """Measure the tables of the ops into a record.

    Args:
        record: gets ceilings and rows, each as it is measured.
        device: where.
        names: ops of OPS; all by default.
        dtype: the cases' own on a GPU, float32 on a CPU by default.
        budget_s: seconds for each figure.
        against: the peers, of peers.NAMES. One that is absent leaves a row that says so.
        cpu: with a CPU column (float32), where the device is another.
        progress: told what is measured next.

    Raises:
        ConfigError: an op or a peer that the suite does not have.
        AccelerantError: a result is wrong.
    """
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise ConfigError(f"no op {unknown[0]!r} in this suite; it has {', '.join(OPS)}")
    check_against(against)
    gpu = device.torch_device.startswith("cuda")
    planned = plan(names, dtypes=[dtype] if dtype else [], against=against, budget_s=budget_s, gpu=gpu)
    measure_planned(record, device, planned, budget_s=budget_s, cpu=cpu, progress=progress)


def measure_planned(
    record: Record,
    device: ComputeDevice,
    planned: Sequence[Planned],
    *,
    journal: Journal | None = None,
    budget_s: float = 0.3,
    until: float | None = None,
    cpu: bool = False,
    progress: Progress = lambda _: None,
) -> None:
    """Measure what is planned into a record, and case by case into a journal.

    Args:
        record: gets ceilings and rows, each as it is measured.
        device: where.
        planned: the cases; those that the journal has are left out.
        journal: gets each case as soon as it is done.
        budget_s: seconds for each ceiling.
        until: the time of time.monotonic() after which no further case is begun; a note says how many are missing.
        cpu: with a CPU column (float32), where the device is another.
        progress: told what is measured next.

    Raises:
        AccelerantError: a result of ours is wrong, or an op of ours failed; the other cases were measured first.
    """
    began = time.monotonic()
    where = torch.device(device.torch_device)
    if "matmul TFLOP/s" not in record.ceilings:
        progress("ceilings")
        record.ceilings |= measure_ceilings(where, budget_s=max(budget_s, 0.0))
    if journal is not None:
        journal.begin(record)
    left = [each for each in planned if journal is None or each.key not in journal.done]
    with compiling():
        _measure_left(record, device, planned, left, journal, budget_s, until, cpu, progress, began)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """torch.compile as the cases need it: for many sizes, and with backward passes that are run again and again."""
    import torch._functorch.config as functorch

    with (
        torch._dynamo.config.patch(recompile_limit=_RECOMPILES),
        functorch.patch(donated_buffer=False),  # a second backward pass needs them again
    ):
        yield


def _measure_left(
    record: Record,
    device: ComputeDevice,
    planned: Sequence[Planned],
    left: Sequence[Planned],
    journal: Journal | None,
    budget_s: float,
    until: float | None,
    cpu: bool,
    progress: Progress,
    began: float,
) -> None:
    where = torch.device(device.torch_device)
    failed = None if journal is None else _failed(record.rows)
    compiled = None
    for i, each in enumerate(left):
        if until is not None and time.monotonic() > until:
            record.notes.append(f"stopped by its time limit: {len(left) - i} of {len(planned)} cases not measured")
            break
        if (each.part, each.op) != compiled or each.part != "sweep":
            torch._dynamo.reset()  # a sweep's sizes share what is compiled
        compiled = each.part, each.op
        rows, notes, error = _measured(each, device, cpu, budget_s, _counted(progress, i, left, began))
        record.rows += rows
        record.notes += notes
        if journal is not None:
            journal.add(each.key, rows, notes)
        failed = failed or error
        if where.type == "cuda" and torch.cuda.memory_reserved(where) > _most_bytes(where):
            torch.cuda.empty_cache()
    if failed is not None:
        raise failed


def _failed(rows: Sequence[Row]) -> AccelerantError | None:
    """What ended the run that a journal is of with an error: a run that goes on with it ends so, too."""
    for row in rows:
        if (row.wrong and row.compared) or (row.runner == "accelerant" and row.p50 is None):
            return AccelerantError(f"{row.op} {row.case}: {row.note}")
    return None


def _counted(progress: Progress, i: int, left: Sequence[Planned], began: float) -> Progress:
    """Tells which of the cases it is, and about how many seconds are left, from what the cases so far took."""
    spent, expected = time.monotonic() - began, sum(each.estimate_s for each in left[:i])
    pace = spent / expected if expected > 5.0 else 1.0
    rest = pace * sum(each.estimate_s for each in left[i:])
    return lambda what: progress(f"[{i + 1}/{len(left)}, about {rest:.0f} s left] {what}")


def _most_bytes(device: torch.device) -> int:
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total // 2


def _measured(
    each: Planned, device: ComputeDevice, cpu: bool, budget_s: float, progress: Progress
) -> tuple[list[Row], list[str], AccelerantError | None]:
    """The rows and notes of a case; and the error, where ours failed."""
    rows: list[Row] = []
    try:
        case = Case.of(each.op, each.benchmark, device, each.dtype)
        for row in _rows(case, each, progress):
            if cpu and case.device.type != "cpu" and row.runner == "accelerant":
                progress(f"{row.op} {row.case}: on the CPU")
                row = _with_cpu(row, each.op, each.benchmark, budget_s)
            rows.append(row)
    except torch.OutOfMemoryError as error:
        return rows, [f"{each.key}: {str(error).splitlines()[0][:100]}"], None
    except DeviceLost:
        raise
    except Exception as error:  # noqa: BLE001 - the other ops' figures are worth having; this one ends the run with 1
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        label = each.benchmark.sample.name
        rows.append(Row("neural", each.op, label, "accelerant", "", part=each.part, note=text))
        return rows, [], error if isinstance(error, AccelerantError) else AccelerantError(f"{each.key}: {text}")
    wrong = next((row for row in rows if row.wrong and row.compared), None)
    return rows, [], None if wrong is None else AccelerantError(f"{wrong.op} {wrong.case}: {wrong.note}")


def _with_cpu(row: Row, name: str, benchmark: Benchmark, budget_s: float) -> Row:
    """The row with the same case measured on the CPU."""
    tensors = benchmark.sample.tensors(torch.float32)
    direction = row.case.split()[-1]

    def make(rows: int) -> Callable[[], Any]:
        inputs = shrunk(name, tensors, rows)
        case = Case(name, "", inputs, dict(benchmark.sample.options), benchmark, False)
        return call_of(getattr(ops, name), case, direction)

    first = tensors[0]
    taken, note = cpu_column(make, 1 if first is None or not first.ndim else len(first), budget_s=budget_s)
    return replace(row, cpu_ms=taken, cpu_note=f"float32, {note}")


def calls(
    name: str, device: ComputeDevice, dtype: torch.dtype, shrinks: Sequence[int]
) -> Iterator[tuple[str, tuple[Tensor | None, ...], dict[str, Any]]]:
    """An op's cases in a dtype, each whole and with so many times fewer rows: label, tensors, options."""
    for benchmark in benchmarks_of(name):
        whole = Case.of(name, benchmark, device, dtype)
        first = whole.inputs[0]
        rows = 1 if first is None else len(first)
        for shrink in shrinks:
            fewer = shrunk(name, whole.inputs, max(1, rows // shrink))
            shape = "" if fewer[0] is None else "x".join(map(str, fewer[0].shape))
            yield f"{shape} {str(dtype).removeprefix('torch.')}", fewer, whole.options


# --- a case's rows ---------------------------------------------------------------------------------------------------


def runners_of(case: Case, each: Planned) -> dict[str, Maker]:
    """Runner -> what makes its function. Ours first."""
    subject = OPS[case.name]
    made: dict[str, Maker] = {"accelerant": lambda: getattr(ops, case.name)}
    for peer in each.peers:
        if peer == "torch":
            made["torch"] = lambda: subject.theirs
        elif peer == "compile":
            made["torch.compile"] = lambda: _compiled(case, each.part)
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


def _rows(case: Case, each: Planned, progress: Progress) -> Iterator[Row]:
    runners = runners_of(case, each)
    works = work_of(case)
    oracle = Oracle(case, works[0].flops)
    for work in works:
        base = Row(
            "neural", case.name, f"{case.label} {work.direction}", "", "", bytes=work.bytes, flops=work.flops,
            ceiling="matmul" if work.flops else "copy", part=each.part,
        )  # fmt: skip
        base = _aimed(base, case, work.direction)
        for runner, make in runners.items():
            progress(f"{base.op} {base.case}: {runner}")
            row = replace(base, runner=runner)
            if runner == "accelerant":
                yield from _ours(row, make, case, work, each, oracle)
            else:
                unaimed = replace(row, target=None, target_x=None, target_bytes=None)
                # Of fewer rows than are timed, torch.compile would compile another function: its results are not seen.
                checks = oracle if oracle.whole or runner != "torch.compile" else None
                yield _timed(unaimed, make, case, work, each, checks)


def _ours(row: Row, make: Maker, case: Case, work: Work, each: Planned, oracle: Oracle) -> Iterator[Row]:
    """The chosen implementation; then our own kernel where that is a library's; then deterministic mode."""
    races = each.race and case.device.type == "cuda"
    with override(race="first_use") if races else contextlib.nullcontext():
        chosen = _timed(row, make, case, work, each, oracle, ours=True)
    yield chosen
    decisions = explain_quietly(call_of(make(), case, work.direction)).decisions
    forced = own_kernels(decisions)
    if forced and each.part == "":
        with force(**forced):
            own = replace(row, runner=OWN, target=None, target_x=None)
            yield _timed(own, make, case, work, each, oracle, ours=True)
    if each.deterministic and _may_differ(decisions):
        with override(deterministic=True):
            unaimed = replace(row, runner=DETERMINISTIC, target=None, target_x=None, target_bytes=None)
            same = _timed(unaimed, make, case, work, each, oracle, ours=True)
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


def _timed(
    row: Row, make: Maker, case: Case, work: Work, each: Planned, oracle: Oracle | None, *, ours: bool = False
) -> Row:
    """The row with its results compared and its times taken, or with why not."""
    try:
        fn = make()
        call = call_of(fn, case, work.direction)
        chosen = _implementation(call) if ours else row.runner  # a race, if there is one, is run here
        error, wrong = oracle.wrong(fn, work.direction) if oracle is not None else (None, "")
        row = replace(row, implementation=chosen, error=error, note=wrong)
        if wrong:
            return row
        peak = _peak_bytes(call, case.device)
        if each.benchmark.rotated and work.direction == "forward":
            timing, how = rotated_ms(_copies(fn, case), case.device, budget_s=each.budget_s)
        else:
            timing, how = time_ms(call, case.device, budget_s=each.budget_s, reads=work.only_reads), ""
    except Exception as error:
        lost = registry.provider_of(case.device).lost(error)
        if lost is not None:
            raise lost from error
        if ours and row.runner == "accelerant":
            raise
        text = (str(error).splitlines() or [""])[0][:160]
        return replace(row, note=f"{type(error).__name__}: {text}")
    return replace(
        row, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms, peak_bytes=peak, timing=how,
        samples=timing.samples,
    )  # fmt: skip


def _copies(fn: Callable[..., Any], case: Case) -> list[Callable[[], Any]]:
    """The forward call on copies of the arguments, the first of them the arguments themselves."""
    size = sum(x.nbytes for x in case.inputs if x is not None)
    count = max(_ROTATED_LEAST, min(_ROTATED_MOST, -(-_ROTATED_BYTES // max(size, 1))))
    if case.device.type != "cuda":
        count = 2
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


def _implementation(call: Callable[[], Any]) -> str:
    """What dispatch chose in a call, from its own account."""
    decisions = explain_quietly(call).decisions
    names = dict.fromkeys(f"{each.implementation} ({'own' if each.own else 'library'})" for each in decisions)
    return " + ".join(names) or "nothing to run"
