"""The neural ops compared with torch, torch.compile and other libraries, forward and backward, in one run.

In the tables dispatch races its implementations; at odd sizes and in the sweep it chooses as in a user's first call.
Where it chooses a library, our own kernel is measured, too. Results and gradients are compared with the float64
reference before anything is timed: a wrong result leaves a row without a time. A peer that raises leaves a row with the
reason; an exception of ours fails the run, except a lack of memory.
"""

import contextlib
import functools
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from accelerant.bench import record, suite, timer
from accelerant.bench.neural_cases import (
    BASELINES,
    RUNNERS,
    CaseWork,
    Libraries,
    Maker,
    OpCase,
    Oracle,
    PlannedCase,
    as_tuple,
    benchmarks_of,
    call_of,
    leaves_of,
    odd_benchmarks_of,
    parse_sizes,
    plan,
    runners_of,
    shapes_label,
    shrunk,
    sized,
    sweep_sizes,
    work_of,
)
from accelerant.bench.record import OURS, OUT_OF_MEMORY, Row, failure_note
from accelerant.bench.subjects import OPS, naive, numpy_call
from accelerant.bench.suite import SuiteCase, SuiteRun, check_names, dtypes_named, option
from accelerant.bench.suites import Task, compile_first, compiling, groups_of, own_kernels, precompile
from accelerant.bench.timer import first_ms, time_ms
from accelerant.config import override
from accelerant.errors import AccelerantError, ConfigError, DeviceLost, OutOfMemory
from accelerant.ops.registry import Benchmark, public_op
from accelerant.runtime import registry
from accelerant.runtime.dispatch import force, operations
from accelerant.runtime.dispatch.plan import Decision, explain_quietly
from accelerant.runtime.dispatch.race import tune
from accelerant.runtime.files import plain
from accelerant.runtime.memory.limits import LiveSet, available_bytes, size_text
from accelerant.runtime.provider import ComputeDevice

PEERS = ("torch", "compile", "cudnn", "flash", "cublaslt")
"""The peers that come with torch; the first alone by default on a CPU, where torch.compile takes 10 s a case."""


_COMPILE_S = 90.0  # seconds that precompiling may take; the rest is compiled as it is measured
_HOST_S = 20.0  # seconds that the calls of a baseline on the host may take
_COPIES = 4  # least copies of the arguments that a case holds at a time: themselves, gradients, and those of a check

_ROTATED_BYTES = 2**29
_ROTATED_LEAST, _ROTATED_MOST = 8, 64  # copies of a rotated case's arguments: together several times the L2 of any GPU


@dataclass(frozen=True)
class NeuralSuite(suite.Suite):
    """Measure the neural ops and torch, forward and backward. Cases in which a peer was faster come first."""

    name = "neural"
    examples: ClassVar[tuple[str, ...]] = (
        "",
        "--op attention --against torch --against cudnn --against flash",
        "--out now.json --compare before.json",
        "--device cpu",
        "--dtype bf16 --dtype fp16 --dtype fp32 --odd --sweep --out folder",
    )
    libraries: ClassVar[Libraries] = {}
    """Peers besides PEERS, for the comparisons outside the package."""

    op: tuple[str, ...] = option((), "Only this op; may be repeated.")
    size: tuple[str, ...] = option(
        (), "Only this size of the first argument, and of others if it has more numbers: 4096x4096, 2^20; 128..8192 "
        "doubles. One number makes all dimensions of matrices. May be repeated.", metavar="SIZE",
    )  # fmt: skip
    dtype: tuple[str, ...] | None = option(
        None, "bf16, fp16, fp32 (or bfloat16, ...); may be repeated, the first one more thoroughly. By default each "
        "case's.", same=True,
    )  # fmt: skip
    against: tuple[str, ...] | None = option(
        None, "Peers, or none. By default those that come with torch (torch, compile, cudnn, flash, cublaslt); on a "
        "CPU torch; with --size torch and the baselines unfused, numpy and naive. One that is absent leaves a row that "
        "says so. May be repeated.", same=True,
    )  # fmt: skip
    tables: bool = option(True, "The ops' tables; without them odd sizes or the sweep alone.")
    odd: bool = option(False, "Odd sizes too, compared with torch.")
    sweep: bool = option(False, "Ops of rows from 2^10 to 2^28 elements too, compared with torch and compile.")
    sweep_to: int = option(28, "The sweep's end, as a power of two.", min=10, max=30)
    budget_s: float = option(0.1, "Seconds of calls behind each figure.", min=0.0, same=True)
    workers: int | None = option(
        None,
        "Processes that compile everything first; by default all cores but two, at most 14, and 1 on a CPU.",
        min=1,
    )

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with whole names of dtypes and the device's peers; ConfigError as Suite.resolve."""
        suite.check_names("--op", "op", self.op, tuple(OPS))
        size = self.size
        dtypes = None if self.dtype is None else dtypes_named(self.dtype)
        libraries = {name for makers in self.libraries.values() for name in makers}
        if (against := self.against) is None and size:
            against = ("torch", *BASELINES)
        if against is None:
            against = PEERS if device.torch_device.startswith("cuda") else PEERS[:1]
        if unknown := [name for name in against if name not in (*PEERS, *BASELINES) and name not in libraries]:
            others = "" if libraries else "; `python -m benchmarks.neural` in a checkout has liger, quack, flash_attn_4"
            raise ConfigError(
                f"--against: no peer {unknown[0]!r}; there are {', '.join((*PEERS, *libraries, *BASELINES))}{others}"
            )
        if size and not self.op:
            raise ConfigError("--size: the sizes of which op? add --op, or run `accelerant bench OP --size ...`")
        for op in self.op:
            for one in parse_sizes(size):
                self._check_memory(op, one, (dtypes or {}).values(), device)
        if not (self.tables or self.odd or self.sweep or size):
            raise ConfigError("--no-tables: nothing is left to measure; add --odd or --sweep")
        dtype = None if dtypes is None else tuple(dtypes)
        return replace(self, dtype=dtype, against=against, size=size, tables=self.tables and not size)

    @staticmethod
    def _check_memory(op: str, size: Sequence[int], dtypes: Iterable[torch.dtype], device: ComputeDevice) -> None:
        """Raise ConfigError for a size whose arguments alone, a few times over, do not fit into the device's memory."""
        numbers = sum(math.prod(shape) for shape in sized(op, size).sample.shapes if shape is not None)
        least = _COPIES * numbers * max((dtype.itemsize for dtype in dtypes), default=4)
        room = available_bytes(device)
        if least > room:
            text = "x".join(map(str, size))
            raise ConfigError(
                f"--size: {op} {text} needs at least {size_text(least)}; {device.name} has {size_text(room)} free"
            )

    def planned(self, gpu: bool) -> list[PlannedCase]:
        """Return the planned cases of a resolved suite."""
        return plan(
            self.op, dtypes=list(dtypes_named(self.dtype or ()).values()), against=self.against or (),
            budget_s=self.budget_s, gpu=gpu, tables=self.tables, odd=self.odd,
            sweep=sweep_sizes(self.sweep_to) if self.sweep else (), sizes=parse_sizes(self.size),
            libraries=self.libraries,
        )  # fmt: skip

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return the planned cases."""
        return neural_cases(self.planned(run.gpu), self.budget_s, cpu_column=self.cpu)

    def prepare(self, run: SuiteRun) -> None:
        """Measure the ceilings."""
        run.require_ceiling("matmul", self.budget_s)

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of the requested parts, ops and dtypes."""
        parts = {part for part, included in (("", self.tables), ("odd", self.odd), ("sweep", self.sweep)) if included}
        if row.part == "size" and row.op in self.op:
            shapes = [sized(row.op, one).sample.shapes for one in parse_sizes(self.size)]
            parts |= {"size"} if any(row.case.startswith(f"{shapes_label(each)} ") for each in shapes) else set()
        dtype = not self.dtype or any(f" {name}" in row.case for name in self.dtype)
        return row.suite == self.name and row.part in parts and (not self.op or row.op in self.op) and dtype

    def measure(self, run: SuiteRun) -> None:
        """Compile in several processes, then measure all cases."""
        self.prepare(run)
        cases = self.cases(run)
        cores = os.cpu_count() or 1
        several = run.gpu and "compile" in (self.against or ())
        if (workers := self.workers or (max(1, min(14, cores - 2)) if several else 1)) > 1:

            def groups(keys: set[str]) -> list[list[Task]]:
                return groups_of([one for one in self.planned(run.gpu) if one.key in keys])

            compile_first(groups, cases, run, workers, limit_s=_COMPILE_S)
        with compiling():
            suite.measure_cases(self.name, cases, run)


def neural_cases(planned: Sequence[PlannedCase], budget_s: float, *, cpu_column: bool = False) -> list[SuiteCase]:
    """Return the suite's cases of planned ones."""
    compiled: list[tuple[str, str]] = []

    def measure(one: PlannedCase, run: SuiteRun) -> None:
        if [(one.part, one.op)] != compiled or one.part != "sweep":
            torch.compiler.reset()  # a sweep's sizes share what is compiled
        compiled[:] = [(one.part, one.op)]
        _measure_case(one, run, budget_s, cpu_column)
        if run.gpu:
            total = torch.cuda.get_device_properties(run.torch_device).total_memory
            if torch.cuda.memory_reserved(run.torch_device) > total // 2:
                torch.cuda.empty_cache()

    return [SuiteCase(one.key, functools.partial(measure, one), one.estimate_s) for one in planned]


def _measure_case(one: PlannedCase, run: SuiteRun, budget_s: float, cpu_column: bool) -> None:
    """Append the rows of a case; raise CaseFailedError for a wrong result of ours."""
    rows: list[Row] = []
    try:
        with run.clock.measure("arguments"):
            case = OpCase.of(one.op, one.benchmark, run.device, one.dtype, whole=one.part == "size")
        for row in _rows(case, one, run):
            if cpu_column and run.gpu and row.runner == OURS:
                run.progress(f"{row.op} {row.case}: on the CPU")
                row = _with_cpu(row, one.op, one.benchmark, budget_s)
            rows.append(row)
            run.add(row)
        if rows and rows[0].case.endswith(" forward"):
            for name in one.baselines:
                run.progress(f"{case.name} {case.label}: {name}")
                run.add(_host_row(name, one, rows[0], budget_s))
    except (torch.OutOfMemoryError, OutOfMemory) as error:
        # of the arguments, or of the forward pass that sizes the work
        label = f"{one.benchmark.sample.name} {str(one.dtype).removeprefix('torch.')}"
        base = Row("neural", one.op, label, "", "", part=one.part, note=failure_note(error, kind=OUT_OF_MEMORY))
        names = (OURS, *(RUNNERS.get(name, name) for name in one.peers))
        run.add(*(replace(base, runner=name) for name in names))
    for row in rows:
        if row.wrong and row.compared:
            raise suite.CaseFailedError(f"{row.op} {row.case}: {row.note}")


def _host_row(name: str, one: PlannedCase, ours: Row, budget_s: float) -> Row:
    """Return the row of a baseline on the host's CPU, in float32, checked on a few rows of the same case."""
    sample, make = one.benchmark.sample, naive if name == "naive" else numpy_call
    version = f"numpy {record.installed_version('numpy')}" if name == "numpy" else "loops over lists"
    row = Row("neural", one.op, ours.case, BASELINES[name], version, flops=ours.flops, part=one.part)
    tensors = tuple(sample.tensors(torch.float32))

    def call(rows: int) -> Callable[[], Any]:
        return make(one.op, shrunk(one.op, tensors, rows), sample.options)

    def on_tensors(*inputs: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        results = make(one.op, inputs, options)()
        if name == "naive" and isinstance(results[0], tuple):
            results = tuple(map(list, zip(*results, strict=True)))
        return tuple(torch.as_tensor(y) for y in as_tuple(results))

    try:
        few = OpCase(one.op, "", shrunk(one.op, tensors, 2), dict(sample.options), one.benchmark, False)
        error, wrong = Oracle(few).wrong(on_tensors, "forward")
        rows = 1 if tensors[0] is None else len(tensors[0])
        timing, note = (None, wrong) if wrong else timer.cpu_timing(call, rows, budget_s=budget_s, most_s=_HOST_S)
    except AccelerantError as refused:
        return replace(row, implementation="", note=str(refused))
    if timing is None:
        return replace(row, error=error, note=note)
    faster = f"ours: {plain(timing.p50_ms / ours.p50, 3)}x its speed" if ours.p50 else ""
    where = "one core" if name == "naive" else timer.threads_text()
    return replace(row.timed(timing), error=error, note=", ".join(filter(None, ("float32", where, note, faster))))


def _with_cpu(row: Row, name: str, benchmark: Benchmark, budget_s: float) -> Row:
    """Return the row with the time of the same case on the CPU, in float32."""
    tensors = benchmark.sample.tensors(torch.float32)
    direction = row.case.split()[-1]

    def make(rows: int) -> Callable[[], Any]:
        case = OpCase(name, "", shrunk(name, tensors, rows), dict(benchmark.sample.options), benchmark, False)
        return call_of(public_op(name).function, case, direction)

    first = tensors[0]
    taken, note = timer.cpu_time_ms(make, 1 if first is None or not first.ndim else len(first), budget_s=budget_s)
    return replace(row, cpu_ms=taken, cpu_note=f"float32, {note}")


def calls(
    name: str, device: ComputeDevice, dtype: torch.dtype, shrinks: Sequence[int]
) -> Iterator[tuple[str, tuple[Tensor | None, ...], dict[str, Any]]]:
    """Yield the label, tensors and options of an op's cases, all rows divided by each of `shrinks`, then odd ones."""
    for benchmark in benchmarks_of(name):
        whole = OpCase.of(name, benchmark, device, dtype)
        first = whole.inputs[0]
        rows = 1 if first is None else len(first)
        for shrink in shrinks:
            fewer = shrunk(name, whole.inputs, max(1, rows // shrink))
            shape = "" if fewer[0] is None else "x".join(map(str, fewer[0].shape))
            yield f"{shape} {str(dtype).removeprefix('torch.')}", fewer, whole.options
    for benchmark in odd_benchmarks_of(name, dtype):
        odd = OpCase.of(name, benchmark, device, dtype)
        yield odd.label, odd.inputs, odd.options


@dataclass(frozen=True, slots=True)
class _CaseRun:
    """A case being measured."""

    planned: PlannedCase
    case: OpCase
    oracle: Oracle
    run: SuiteRun


@dataclass(slots=True)
class _Runner:
    """A runner whose results were checked: its row and its call, or None with the reason in the row's note."""

    row: Row
    fn: Callable[..., Any] | None = None
    call: Callable[[], Any] | None = None
    decisions: list[Decision] = field(default_factory=list)


def _rows(case: OpCase, one: PlannedCase, run: SuiteRun) -> Iterator[Row]:
    runners = runners_of(case, one)

    def plain(direction: str) -> Callable[[], Any]:
        return call_of(public_op(case.name).function, case, direction)

    cold_ms = first_ms(plain("both" if case.together else "forward"), case.device)
    works = work_of(case)
    this = _CaseRun(one, case, Oracle(case, works[0].flops), run)
    for work in works:
        base = Row(
            "neural", case.name, f"{case.label} {work.direction}", "", "", bytes=work.bytes, flops=work.flops,
            ceiling="matmul" if work.flops else "copy", part=one.part, cold_ms=cold_ms if work is works[0] else None,
        )  # fmt: skip
        if case.aims:
            benchmark = case.benchmark
            ms, multiple = {
                "forward": (benchmark.forward_ms, benchmark.forward_x),
                "backward": (benchmark.backward_ms, benchmark.backward_x),
                "both": (benchmark.both_ms, None),
            }[work.direction]
            limit = int(benchmark.peak_mib * 2**20) if benchmark.peak_mib and work.direction == "forward" else None
            base = replace(base, target=ms, target_x=multiple, target_bytes=limit)
        if case.device.type == "cpu":
            yield from _in_turns(base, runners, work, this)
            continue
        for runner, make in runners.items():
            run.progress(f"{base.op} {base.case}: {runner}")
            row = replace(base, runner=runner)
            if runner == OURS:
                if one.race:  # as a user's call is, before the race
                    wall = timer.back_to_back_ms(plain(work.direction), case.device, budget_s=one.budget_s / 2)
                    row = replace(row, wall_ms=wall.wall_ms, back_to_back_ms=wall.back_to_back_ms)
                with override(race="first_use") if one.race else contextlib.nullcontext():
                    ready = _checked(row, make, work, this, ours=True)
                    chosen = _timed(ready, work, this)
                yield chosen
                yield from _forced(chosen, make, ready, work, this)
            else:
                yield _timed(_checked(_without_targets(row), make, work, this), work, this)


def _in_turns(base: Row, runners: Mapping[str, Maker], work: CaseWork, this: _CaseRun) -> Iterator[Row]:
    """Yield the rows on a CPU: ours and the peers' calls take turns, then our forced rows."""
    checked = []
    for runner, make in runners.items():
        this.run.progress(f"{base.op} {base.case}: {runner}")
        row, is_ours = replace(base, runner=runner), runner == OURS
        checked.append(_checked(row if is_ours else _without_targets(row), make, work, this, ours=is_ours))
    callable_ = [one for one in checked if one.call is not None]
    with this.run.clock.measure("timed calls"):
        calls = [one.call for one in callable_ if one.call is not None]
        timings = timer.time_in_turns(calls, budget_s=this.planned.budget_s)
    for one, timing in zip(callable_, timings, strict=True):
        one.row = one.row.timed(timing)
        if this.planned.part == "size" and one.call is not None:
            one.row = replace(one.row, peak_bytes=_peak_bytes(one.call, this.case.device))
    yield from (one.row for one in checked)
    yield from _forced(checked[0].row, runners[OURS], checked[0], work, this)


def _forced(chosen: Row, make: Maker, ready: _Runner, work: CaseWork, this: _CaseRun) -> Iterator[Row]:
    """Yield our own kernel where a library's was chosen, and the deterministic setting where it may cost something."""
    blank = replace(
        _without_targets(chosen), p20=None, p50=None, p80=None, note="", samples=(), peak_bytes=None, error=None,
        cold_ms=None, wall_ms=None, back_to_back_ms=None,
    )  # fmt: skip
    if (forced := own_kernels(ready.decisions)) and this.planned.part == "":
        with force(**forced):
            own = replace(blank, runner=record.OWN, target_bytes=chosen.target_bytes)
            yield _timed(_checked(own, make, work, this, ours=True), work, this)
    implementations = [one for decision in ready.decisions for one in operations()[decision.op].implementations]
    if this.planned.deterministic and not all(one.deterministic for one in implementations):
        with override(deterministic=True):
            same = _timed(
                _checked(replace(blank, runner=record.DETERMINISTIC), make, work, this, ours=True), work, this
            )
        if same.p50 and chosen.p50:
            same = replace(same, note=f"{same.p50 / chosen.p50:.2f}x the time without")
        yield same


def _without_targets(row: Row) -> Row:
    return replace(row, target=None, target_x=None, target_bytes=None)


def _checked(row: Row, make: Maker, work: CaseWork, this: _CaseRun, *, ours: bool = False) -> _Runner:
    """Make a runner's function, call it once and compare its results with the reference."""
    case, clock = this.case, this.run.clock
    decisions: list[Decision] = []
    try:
        with clock.measure("first calls, races"):
            fn = make()
            call = call_of(fn, case, work.direction)
            if ours:
                explained = explain_quietly(call)  # runs the race, if there is one
                decisions, cold_ms = explained.decisions, row.cold_ms or explained.total_ms
            else:
                cold_ms = first_ms(call, case.device)
        names = dict.fromkeys(f"{one.implementation} ({'own' if one.own else 'library'})" for one in decisions)
        reasons = "; ".join(dict.fromkeys(f"{one.op}: {one.reason}" for one in decisions if one.reason))
        implementation = (" + ".join(names) or "autograd alone") if ours else row.runner
        if row.runner == record.UNFUSED:
            implementation = f"torch, {'scores in memory' if case.name == 'attention' else 'an operation at a time'}"
        row = replace(row, implementation=implementation, reason=reasons, cold_ms=cold_ms)
        # torch.compile would compile another function for fewer rows than are timed: its results are not checked then.
        if this.oracle.whole or row.runner != "torch.compile":
            with clock.measure("checks"):
                error, wrong = this.oracle.wrong(fn, work.direction)
            row = replace(row, error=error, note=wrong)
    except Exception as error:  # noqa: BLE001 - whatever a runner raises, its row says so
        return _Runner(_failed_row(row, error, case))
    return _Runner(row, None if row.note else fn, None if row.note else call, decisions)


def _timed(ready: _Runner, work: CaseWork, this: _CaseRun) -> Row:
    if ready.call is None or ready.fn is None:
        return ready.row
    case, budget_s = this.case, this.planned.budget_s
    try:
        with this.run.clock.measure("timed calls"):
            shown = case.device.type == "cuda" or this.planned.part == "size"
            peak = _peak_bytes(ready.call, case.device) if shown else None
            if this.planned.benchmark.rotated and work.direction == "forward":
                timing, how = timer.rotated_ms(_copies(ready.fn, case), case.device, budget_s=budget_s)
            else:
                timing, how = time_ms(ready.call, case.device, budget_s=budget_s, reads=work.only_reads), ""
    except Exception as error:  # noqa: BLE001 - as above
        return _failed_row(ready.row, error, case)
    return replace(ready.row.timed(timing), peak_bytes=peak, timing=how)


def _failed_row(row: Row, error: Exception, case: OpCase) -> Row:
    """Return the row of a runner that raised; raise an error of ours again unless memory lacked."""
    if (lost := registry.provider_of(case.device).lost(error)) is not None:
        raise lost from error
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, (torch.OutOfMemoryError, OutOfMemory)):
        if case.device.type == "cuda":
            torch.cuda.empty_cache()
        return replace(row, note=failure_note(error, kind=OUT_OF_MEMORY))
    if row.runner == OURS:
        raise error
    return replace(row, note=failure_note(error))


def _copies(fn: Callable[..., Any], case: OpCase) -> list[Callable[[], Any]]:
    """Return the forward call on copies of the arguments, the first of them the arguments themselves."""
    size = sum(x.nbytes for x in case.inputs if x is not None)
    count = max(_ROTATED_LEAST, min(_ROTATED_MOST, -(-_ROTATED_BYTES // max(size, 1))))
    others = [tuple(None if x is None else x.clone() for x in case.inputs) for _ in range(count - 1)]
    return [call_of(fn, replace(case, inputs=inputs), "forward") for inputs in (case.inputs, *others)]


def _peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Return the peak memory of a call above what was allocated before; on a CPU that of torch's results alone."""
    if device.type != "cuda":
        with LiveSet(device.type) as live:
            call()
        return live.peak_bytes
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


_COMPILE_S, _COMPILE_SHARE = 60.0, 0.3  # seconds that compiling first may take, and its share of the time limit

SHRINKS = (1, 8, 64)  # each case is measured with its rows (or batches) divided by these


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The decisions of one call, forward and backward; `error` is why it failed, "" if it did not."""

    op: str
    case: str
    decisions: tuple[Decision, ...]
    error: str = ""


def count_calls(names: Sequence[str] = (), dtypes: Sequence[torch.dtype] = (torch.bfloat16,)) -> int:
    """Return the number of calls that tune_ops makes for these ops and dtypes."""
    return sum(
        len(SHRINKS) * len(benchmarks_of(name)) + len(odd_benchmarks_of(name, dtype))
        for name in names or OPS
        for dtype in dtypes
    )


def tune_ops(
    device: ComputeDevice, *, names: Sequence[str] = (),
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32), launches: bool = True, workers: int = 1,
    until: float | None = None, progress: Callable[[str], None] = lambda _: None,
) -> Iterator[TuneResult]:  # fmt: skip
    """Race and tune ops call by call, none begun after `until`; each result is on disk before the next."""
    check_names("names", "op", names, tuple(OPS))
    where = torch.device(device.torch_device)
    if workers > 1:
        planned = plan(names, dtypes=dtypes, against=(), budget_s=0.0, gpu=where.type == "cuda")
        most_s = _COMPILE_S if until is None else min(_COMPILE_S, _COMPILE_SHARE * (until - time.monotonic()))
        precompile(groups_of(planned), device, workers, limit_s=most_s, progress=progress)
    began, done, count = time.monotonic(), 0, count_calls(names, dtypes)
    for name in names or OPS:
        for dtype in dtypes:
            for label, inputs, options in calls(name, device, dtype, SHRINKS):
                if until is not None and time.monotonic() > until:
                    return
                left_s = (time.monotonic() - began) / done * (count - done) if done else 0.0
                progress(f"[{done + 1}/{count}{f', about {left_s:.0f} s left' if done else ''}] {name} {label}")
                yield _tuned(name, label, inputs, options, launches)
                done += 1
                if where.type == "cuda":
                    torch.cuda.empty_cache()


def _tuned(
    name: str, label: str, inputs: Sequence[torch.Tensor | None], options: dict[str, object], launches: bool
) -> TuneResult:
    function = public_op(name).function
    args = leaves_of(name, inputs)

    def both() -> None:
        with torch.no_grad():
            function(*inputs, **options)
        results = function(*args, **options)
        outs = [y for y in (results if isinstance(results, tuple) else (results,)) if y.requires_grad]
        if outs:
            torch.autograd.backward(outs, [torch.ones_like(y) for y in outs])

    try:
        if launches:
            return TuneResult(name, label, tuple(tune(both).decisions))
        with override(race="first_use"):
            return TuneResult(name, label, tuple(explain_quietly(both).decisions))
    except DeviceLost:
        raise
    except (AccelerantError, RuntimeError) as error:  # torch's lack of memory is one
        return TuneResult(name, label, (), f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
