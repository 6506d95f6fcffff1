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
from accelerant.bench.clock import Clock, described
from accelerant.bench.cpu_column import cpu_column
from accelerant.bench.journal import Journal
from accelerant.bench.record import Environment, Record, Row
from accelerant.bench.subjects import OPS
from accelerant.bench.suites.cases import Case, benchmarks_of, call_of, shrunk
from accelerant.bench.suites.plan import Planned, plan
from accelerant.bench.suites.rows import lack_of_memory, rows_of, runner_names
from accelerant.errors import AccelerantError, ConfigError, DeviceLost, OutOfMemory
from accelerant.ops._cases import Benchmark
from accelerant.runtime.provider import ComputeDevice

__all__ = [
    "AGAINST",
    "AGAINST_ON_CPU",
    "OPS",
    "calls",
    "check_against",
    "compiling",
    "measure",
    "measure_planned",
    "run",
]

AGAINST = ("torch", "compile", "cudnn", "flash", "cublaslt")
"""The peers of a run that names none: what a torch with CUDA has."""

AGAINST_ON_CPU = ("torch",)
"""The same on a CPU, where torch.compile takes some ten seconds a case to compile."""

_RECOMPILES = 64
"""What torch.compile may make of one function: a sweep's sizes, forward and backward, are more than its usual 8."""

Progress = Callable[[str], None]


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
    compiled, clocks = None, []
    for i, each in enumerate(left):
        if until is not None and time.monotonic() > until:
            record.notes.append(f"stopped by its time limit: {len(left) - i} of {len(planned)} cases not measured")
            break
        if (each.part, each.op) != compiled or each.part != "sweep":
            torch._dynamo.reset()  # a sweep's sizes share what is compiled
        compiled = each.part, each.op
        clock = Clock()
        with clock.of("the rest"):
            rows, notes, error = _measured(each, device, cpu, budget_s, clock, _counted(progress, i, left, began))
        clocks.append(clock.seconds)
        record.rows += rows
        record.notes += notes
        if journal is not None:
            journal.add(each.key, rows, notes, clock.seconds)
        failed = failed or error
        if where.type == "cuda" and torch.cuda.memory_reserved(where) > _most_bytes(where):
            torch.cuda.empty_cache()
    if clocks:
        record.notes.append(f"{len(clocks)} cases took {described(clocks)}")
    if failed is not None:
        raise failed


def _failed(rows: Sequence[Row]) -> AccelerantError | None:
    """What ended the run that a journal is of with an error: a run that goes on with it ends so, too."""
    for row in rows:
        if (row.wrong and row.compared) or (row.runner == "accelerant" and row.p50 is None and not row.lacked_memory):
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
    each: Planned, device: ComputeDevice, cpu: bool, budget_s: float, clock: Clock, progress: Progress
) -> tuple[list[Row], list[str], AccelerantError | None]:
    """The rows and notes of a case; and the error, where ours failed."""
    rows: list[Row] = []
    try:
        with clock.of("arguments"):
            case = Case.of(each.op, each.benchmark, device, each.dtype)
        for row in rows_of(case, each, clock, progress):
            if cpu and case.device.type != "cpu" and row.runner == "accelerant":
                progress(f"{row.op} {row.case}: on the CPU")
                row = _with_cpu(row, each.op, each.benchmark, budget_s)
            rows.append(row)
    except (torch.OutOfMemoryError, OutOfMemory) as error:  # of the arguments, or of what says how much work it is
        base = Row("neural", each.op, _label_of(each), "", "", part=each.part, note=lack_of_memory(error))
        return [*rows, *(replace(base, runner=runner) for runner in runner_names(each))], [], None
    except DeviceLost:
        raise
    except Exception as error:  # noqa: BLE001 - the other ops' figures are worth having; this one ends the run with 1
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        rows.append(Row("neural", each.op, _label_of(each), "accelerant", "", part=each.part, note=text))
        return rows, [], error if isinstance(error, AccelerantError) else AccelerantError(f"{each.key}: {text}")
    wrong = next((row for row in rows if row.wrong and row.compared), None)
    return rows, [], None if wrong is None else AccelerantError(f"{wrong.op} {wrong.case}: {wrong.note}")


def _label_of(each: Planned) -> str:
    return f"{each.benchmark.sample.name} {str(each.dtype).removeprefix('torch.')}"


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
