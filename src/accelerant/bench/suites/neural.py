"""The neural ops beside torch, torch.compile and other libraries, forward and backward apart, in one run.

Dispatch races its implementations here, as it does for a user who asks for it; where it chooses a library, the case is
measured once more with our own kernel forced. The result of a forward pass is compared with the float64 reference
before anything is timed; gradients are what the tests check.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accelerant import ops
from accelerant.bench import peers
from accelerant.bench.ceilings import measure_ceilings
from accelerant.bench.cpu_column import cpu_column
from accelerant.bench.record import OWN, Environment, Record, Row
from accelerant.bench.subjects import OPS, Subject, attention_flops
from accelerant.bench.timer import time_ms
from accelerant.config import override
from accelerant.errors import AccelerantError, ConfigError, DeviceLost
from accelerant.ops._cases import Benchmark, Indices, Sample
from accelerant.runtime.decisions import explain_quietly
from accelerant.runtime.dispatch import force, operations
from accelerant.runtime.provider import ComputeDevice

__all__ = ["AGAINST", "OPS", "calls", "check_against", "measure", "run", "sweep_sizes"]

AGAINST = ("torch", "compile", "cudnn", "flash", "cublaslt")
"""The peers of a run that names none: what a torch with CUDA has."""

_TARGETS_OF = "H200"
"""The device for which the cases name what to reach."""

_CPU_SHRINK, _CPU_MANY = 32, 4096
"""A CPU gets the cases of more than so many rows with so many times fewer."""

_ALLOWED_ERROR = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""||ours - reference|| / ||reference||, the reference in float64; float32 products may be TF32's."""

_REFERENCE_ELEMENTS = 2**28
"""A reference that would hold more elements in float64 is computed on the first rows alone."""

Directions = tuple[tuple[str, int, int], ...]


def run(
    device: ComputeDevice,
    *,
    names: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    budget_s: float = 0.3,
    against: Sequence[str] = AGAINST,
    progress: Callable[[str], None] = lambda _: None,
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
    sweep: Sequence[int] = (),
    cpu: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure into a record.

    Args:
        record: gets ceilings and rows, each as it is measured.
        device: where.
        names: ops of OPS; all by default.
        dtype: the cases' own on a GPU, float32 on a CPU by default.
        budget_s: seconds for each figure.
        against: the peers, of peers.NAMES. One that is absent leaves a row that says so.
        sweep: instead of the cases, each op's first case at these numbers of elements.
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
    where = torch.device(device.torch_device)
    if "matmul TFLOP/s" not in record.ceilings:
        progress("ceilings")
        record.ceilings |= measure_ceilings(where, budget_s=budget_s)
    failed: AccelerantError | None = None
    for name in names or OPS:
        benchmarks = _benchmarks(name)
        if sweep:
            benchmarks = [resized for size in sweep if (resized := _resized(benchmarks[0], size)) is not None]
        for benchmark in benchmarks:
            try:
                case = _Case.of(name, benchmark, device, where, dtype)
                case.check()
                for row in _measure(case, budget_s, against, progress):
                    if cpu and where.type != "cpu" and row.runner == "accelerant":
                        progress(f"{row.op} {row.case}: on the CPU")
                        row = _with_cpu(row, name, benchmark, budget_s)
                    record.rows.append(row)
            except torch.OutOfMemoryError as error:
                record.notes.append(f"{name} {benchmark.sample.name}: {str(error).splitlines()[0][:100]}")
            except DeviceLost:
                raise
            except AccelerantError as error:  # the other ops' figures are worth having; this one ends the run with 1
                failed = failed or error
                label = benchmark.sample.name
                note = f"{type(error).__name__}: {error}"
                record.rows.append(Row("neural", name, label, "accelerant", "", note=note))
            if where.type == "cuda":
                torch.cuda.empty_cache()
    if failed is not None:
        raise failed


def _benchmarks(name: str) -> list[Benchmark]:
    function = getattr(ops, name)
    cases = importlib.import_module(f"{function.__module__.rpartition('.')[0]}.cases")
    return list(cases.FAMILY[name].BENCHMARKS if hasattr(cases, "FAMILY") else cases.BENCHMARKS)


# --- sizes -----------------------------------------------------------------------------------------------------------


def sweep_sizes() -> list[int]:
    """2^10 to 2^28 elements by powers of four, and beside each of the middle ones an odd number."""
    return [size for power in range(10, 29, 2) for size in ((1 << power), (1 << power) - 1) if size != (1 << 28) - 1]


def _resized(benchmark: Benchmark, size: int) -> Benchmark | None:
    """The same op with so many elements in its first argument, in rows of the same length where that divides them.

    None where another argument depends on the first in a way that is not row by row.
    """
    first = benchmark.sample.arguments[0]
    if not isinstance(first, tuple) or len(first) != 2:
        return None
    columns = first[1]
    shape = (size // columns, columns) if size % columns == 0 else (1, size)
    arguments: list[Any] = []
    for argument in benchmark.sample.arguments:
        if isinstance(argument, Indices):
            arguments.append(replace(argument, shape=(shape[0], *argument.shape[1:])))
        elif argument == first:
            arguments.append(shape)
        elif argument is not None and argument == (columns,):
            arguments.append((shape[1],))
        else:
            return None
    name = "x".join(map(str, shape))
    return Benchmark(Sample(name, tuple(arguments), benchmark.sample.options), benchmark.dtype)


def calls(
    name: str, device: ComputeDevice, dtype: torch.dtype, shrinks: Sequence[int]
) -> Iterator[tuple[str, tuple[Tensor | None, ...], dict[str, Any]]]:
    """An op's cases in a dtype, each whole and with so many times fewer rows: label, tensors, options."""
    where = torch.device(device.torch_device)
    for benchmark in _benchmarks(name):
        for shrink in shrinks:
            inputs = tuple(benchmark.sample.tensors(dtype, where))
            first = inputs[0]
            rows = 1 if first is None else max(1, len(first) // shrink)
            fewer = _first_rows(inputs, min(rows, _CPU_MANY) if where.type == "cpu" else rows)
            shape = "" if fewer[0] is None else "x".join(map(str, fewer[0].shape))
            yield f"{shape} {str(dtype).removeprefix('torch.')}", fewer, dict(benchmark.sample.options)


# --- a case ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Case:
    """A benchmark with its tensors."""

    name: str
    label: str
    inputs: tuple[Tensor | None, ...]
    options: dict[str, Any]
    benchmark: Benchmark
    aims: bool

    @classmethod
    def of(
        cls, name: str, benchmark: Benchmark, device: ComputeDevice, where: torch.device, dtype: torch.dtype | None
    ) -> _Case:
        sample, gpu = benchmark.sample, where.type == "cuda"
        dtype = dtype or (benchmark.dtype if gpu else torch.float32)
        inputs = tuple(sample.tensors(dtype, where))
        if not gpu:
            inputs = _first_rows(inputs, _cpu_rows(inputs))
        shapes = "@".join("x".join(map(str, x.shape)) for x in inputs if x is not None and x.ndim > 1)
        shapes = shapes or "@".join("x".join(map(str, x.shape)) for x in inputs if x is not None)
        options = "".join(f" {_option(key, value)}" for key, value in sample.options.items())
        aims = _TARGETS_OF in device.name and dtype == benchmark.dtype
        label = f"{shapes} {str(dtype).removeprefix('torch.')}{options}"
        return cls(name, label, inputs, dict(sample.options), benchmark, aims)

    @property
    def device(self) -> torch.device:
        return next(x for x in self.inputs if x is not None).device

    def check(self) -> None:
        """Compare with the float64 reference: no time of a wrong result is worth anything.

        Raises:
            AccelerantError: names the op and its error.
        """
        if OPS[self.name].random:
            return
        module = importlib.import_module(f"{getattr(ops, self.name).__module__.rpartition('.')[0]}.reference")
        reference = getattr(module, f"{self.name}_reference")
        inputs = _affordable(self)
        with torch.no_grad():
            ours = _first(getattr(ops, self.name)(*inputs, **self.options)).double()
            exact = _first(reference(*(_wide(x) for x in inputs), **self.options))
            error = float((ours - exact).norm() / exact.norm().clamp_min(1e-30))
        dtype = next(x.dtype for x in inputs if x is not None and x.is_floating_point())
        if not error <= _ALLOWED_ERROR[dtype]:
            raise AccelerantError(f"{self.name} {self.label}: relative error {error:.3g} against the float64 reference")


def _option(key: str, value: object) -> str:
    return key if value is True else f"not {key}" if value is False else f"{key} {value}"


def _first(results: Any) -> Tensor:
    first: Tensor = results[0] if isinstance(results, tuple) else results
    return first


def _wide(x: Tensor | None) -> Tensor | None:
    return x.double() if x is not None and x.is_floating_point() else x


def _affordable(case: _Case) -> tuple[Tensor | None, ...]:
    """The arguments, cut to what a reference in float64 has memory for."""
    if case.name == "attention":  # its reference holds the scores; a few heads are as good as all
        return tuple(None if x is None else x[:1, : max(1, x.shape[1] // 8), :2048] for x in case.inputs)
    total = sum(x.numel() for x in case.inputs if x is not None)
    rows = len(case.inputs[0]) if case.inputs[0] is not None else 1
    if case.name == "linear_cross_entropy" or total > _REFERENCE_ELEMENTS:
        return _first_rows(case.inputs, max(1, min(rows // 16, rows * _REFERENCE_ELEMENTS // max(total, 1))))
    return case.inputs


def _cpu_rows(inputs: Sequence[Tensor | None]) -> int:
    rows = len(inputs[0]) if inputs[0] is not None else 1
    return rows if rows <= _CPU_MANY else math.ceil(rows / _CPU_SHRINK)


def _first_rows(inputs: Sequence[Tensor | None], rows: int) -> tuple[Tensor | None, ...]:
    """The first rows of the first argument, which ops work on row by row, and of those that go along with it."""
    first = inputs[0]
    if first is None or len(first) <= rows:
        return tuple(inputs)
    others = [x[:rows].contiguous() if x is not None and _goes_along(x, first) else x for x in inputs[1:]]
    return (first[:rows].contiguous(), *others)


def _goes_along(x: Tensor, first: Tensor) -> bool:
    """Whether an argument has a row, or a number, for each row of the first."""
    return x.ndim > 0 and len(x) == len(first) and (x.ndim == 1 or x.shape[1:] == first.shape[1:])


def _with_cpu(row: Row, name: str, benchmark: Benchmark, budget_s: float) -> Row:
    """The row with the same case measured on the CPU."""
    tensors = benchmark.sample.tensors(torch.float32)
    direction = row.case.split()[-1]

    def make(rows: int) -> Callable[[], Any]:
        inputs = _first_rows(tensors, rows)
        case = _Case(name, "", inputs, dict(benchmark.sample.options), benchmark, False)
        return _call(getattr(ops, name), case, direction)

    first = tensors[0]
    taken, note = cpu_column(make, 1 if first is None else len(first), budget_s=budget_s)
    return replace(row, cpu_ms=taken, cpu_note=f"float32, {note}")


# --- measuring -------------------------------------------------------------------------------------------------------


def _runners(case: _Case, against: Sequence[str]) -> dict[str, Callable[[], Callable[..., Any]]]:
    """Runner -> what makes its function. Ours first."""
    subject = OPS[case.name]
    made: dict[str, Callable[[], Callable[..., Any]]] = {"accelerant": lambda: getattr(ops, case.name)}
    for peer in against:
        if peer == "torch":
            made["torch"] = lambda: subject.theirs
        elif peer == "compile":
            made["torch.compile"] = lambda: torch.compile(subject.theirs, dynamic=False)
        elif peer in subject.peers:
            made[peer] = subject.peers[peer]
    return made


def _measure(case: _Case, budget_s: float, against: Sequence[str], progress: Callable[[str], None]) -> Iterator[Row]:
    torch._dynamo.reset()
    runners = _runners(case, against)
    for direction, least_bytes, flops in _work(case):
        base = Row(
            "neural", case.name, f"{case.label} {direction}", "", "", bytes=least_bytes, flops=flops,
            ceiling="matmul" if flops else "copy",
        )  # fmt: skip
        base = _aimed(base, case, direction)
        for runner, make in runners.items():
            progress(f"{base.op} {base.case}: {runner}")
            row = replace(base, runner=runner)
            if runner != "accelerant":
                yield _timed(row, make, case, direction, budget_s)
                continue
            with override(race="first_use") if case.device.type == "cuda" else contextlib.nullcontext():
                row = _timed(row, make, case, direction, budget_s, ours=True)
            yield row
            for forced in _own_kernels(make(), case, direction):
                with force(**forced):
                    again = replace(base, runner=OWN, target=None, target_x=None)
                    yield _timed(again, make, case, direction, budget_s, ours=True)


def _timed(
    row: Row,
    make: Callable[[], Callable[..., Any]],
    case: _Case,
    direction: str,
    budget_s: float,
    *,
    ours: bool = False,
) -> Row:
    try:
        call = _call(make(), case, direction)
        chosen = _implementation(call) if ours else row.runner
        peak = _peak_bytes(call, case.device)
        timing = time_ms(call, case.device, budget_s=budget_s, reads=_only_reads(case, direction))
    except Exception as error:
        if ours and row.runner == "accelerant":
            raise
        text = (str(error).splitlines() or [""])[0][:160]
        return replace(row, note=f"{type(error).__name__}: {text}")
    return replace(
        row, implementation=chosen, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms, peak_bytes=peak,
        samples=timing.samples,
    )  # fmt: skip


def _only_reads(case: _Case, direction: str) -> bool:
    """Whether what a call writes is next to nothing beside what it reads."""
    if direction != "forward":
        return False
    with torch.no_grad():
        out = getattr(ops, case.name)(*case.inputs, **case.options)
    written: int = sum(y.nbytes for y in (out if isinstance(out, tuple) else (out,)))
    return 32 * written < sum(x.nbytes for x in case.inputs if x is not None)


def _aimed(row: Row, case: _Case, direction: str) -> Row:
    """The row with what the case names to reach."""
    it = case.benchmark
    aims = {
        "forward": (it.forward_ms, it.forward_x),
        "backward": (it.backward_ms, it.backward_x),
        "both": (it.both_ms, None),
    }
    ms, multiple = aims[direction]
    return replace(row, target=ms, target_x=multiple) if case.aims else row


def _work(case: _Case) -> Directions:
    """Directions with their least bytes and operations."""
    subject = OPS[case.name]
    with torch.no_grad():
        out = getattr(ops, case.name)(*case.inputs, **case.options)
    made = sum(y.nbytes for y in (out if isinstance(out, tuple) else (out,)))
    given = [x for x in case.inputs if x is not None]
    size = sum(x.nbytes for x in given)
    learned = sum(x.nbytes for x in _leaves(case) if x is not None and x.requires_grad)
    flops = _flops(subject, case, given, _first(out))
    if case.benchmark.both_ms is not None or case.name.endswith("cross_entropy"):
        return (("both", size + learned, int(flops * (1 + subject.backward_flops))),)
    backward = ("backward", size + learned + made, int(flops * subject.backward_flops))
    return (("forward", size + made, flops), *([backward] if _learns(case) else []))


def _flops(subject: Subject, case: _Case, given: Sequence[Tensor], out: Tensor) -> int:
    if case.name == "attention":
        return attention_flops(given[0], given[1], causal=bool(case.options.get("causal")))
    return subject.flops(given, out) if subject.flops else 0


def _learns(case: _Case) -> bool:
    return _first(getattr(ops, case.name)(*_leaves(case), **case.options)).requires_grad


def _leaves(case: _Case) -> list[Tensor | None]:
    """The arguments, those that a model learns or passes on asking for a gradient."""
    constants = OPS[case.name].constants
    return [
        x.detach().requires_grad_() if x is not None and x.is_floating_point() and i not in constants else x
        for i, x in enumerate(case.inputs)
    ]


def _call(fn: Callable[..., Any], case: _Case, direction: str) -> Callable[[], Any]:
    """The call to time."""
    if direction == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return fn(*case.inputs, **case.options)

        return forward
    args = _leaves(case)
    leaves = [x for x in args if x is not None and x.requires_grad]
    if direction == "both":

        def both() -> Any:
            return torch.autograd.grad(_first(fn(*args, **case.options)), leaves)

        return both
    results = fn(*args, **case.options)
    outs = [y for y in (results if isinstance(results, tuple) else (results,)) if y.requires_grad]
    dys = [torch.randn_like(y) for y in outs]

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(outs, leaves, dys, retain_graph=True)

    return backward


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
    return " + ".join(names)


def _own_kernels(fn: Callable[..., Any], case: _Case, direction: str) -> Iterator[dict[str, str]]:
    """What to force so that our own kernels run where dispatch chose a library; nothing where it chose ours."""
    decisions = explain_quietly(_call(fn, case, direction)).decisions
    forced = {}
    for each in decisions:
        if not each.own:
            own = [one.name for one in operations()[each.op].implementations if one.own]
            refused = {name for name, _ in each.refused}
            own = [name for name in own if name not in refused]
            if own:
                forced[each.op] = own[0]
    if forced:
        yield forced
