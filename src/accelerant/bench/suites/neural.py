"""The neural ops beside torch and torch.compile, forward and backward apart, in one run."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant import ops
from accelerant.bench.ceilings import measure_ceilings
from accelerant.bench.cpu_column import cpu_column
from accelerant.bench.record import Environment, Record, Row
from accelerant.bench.timer import time_ms
from accelerant.errors import AccelerantError, ConfigError
from accelerant.ops._cases import Benchmark
from accelerant.runtime.dispatch import explain_quietly
from accelerant.runtime.provider import ComputeDevice

__all__ = ["OPS", "measure", "run"]

Fn = Callable[..., Tensor]

_TARGETS_OF = "H200"
"""The device for which the cases name times to reach."""

_CPU_SHRINK, _CPU_MANY = 32, 4096
"""A CPU gets the cases of more than so many rows with so many times fewer."""

_ALLOWED_ERROR = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""||ours - reference|| / ||reference||, the reference in float64; float32 products may be TF32's."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An op to measure; its cases stand in its folder.

    Attributes:
        ours, theirs: the same function by us and by torch.
        flops: of the forward pass, from its inputs and output; None where bandwidth bounds it.
    """

    ours: Fn
    theirs: Fn
    flops: Callable[[Sequence[Tensor], Tensor], int] | None = None


def _torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


OPS: dict[str, Subject] = {
    "gelu": Subject(ops.gelu, F.gelu),
    "layer_norm": Subject(ops.layer_norm, _torch_layer_norm),
    "softmax": Subject(ops.softmax, F.softmax),
    "matmul": Subject(ops.matmul, torch.matmul, lambda inputs, y: 2 * y.numel() * inputs[0].shape[-1]),
}


def run(
    device: ComputeDevice,
    *,
    names: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    budget_s: float = 0.3,
    compiled: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Record:
    """A record of its own; see measure."""
    record = Record(Environment.of(device))
    measure(record, device, names=names, dtype=dtype, budget_s=budget_s, compiled=compiled, progress=progress)
    record.conclude()
    return record


def measure(
    record: Record,
    device: ComputeDevice,
    *,
    names: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    budget_s: float = 0.3,
    compiled: bool = True,
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
        compiled: whether torch.compile is among the peers.
        cpu: with a CPU column (float32), where the device is another.
        progress: told what is measured next.

    Raises:
        ConfigError: an op that the suite does not have.
        AccelerantError: a result is wrong.
    """
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise ConfigError(f"no op {unknown[0]!r} in this suite; it has {', '.join(OPS)}")
    where = torch.device(device.torch_device)
    if "matmul TFLOP/s" not in record.ceilings:
        progress("ceilings")
        record.ceilings |= measure_ceilings(where, budget_s=budget_s)
    for name in names or OPS:
        for benchmark in importlib.import_module(f"accelerant.ops.{name}.cases").BENCHMARKS:
            case = _Case.of(name, benchmark, device, where, dtype)
            case.check()
            for row in _measure(case, budget_s, compiled, progress):
                if cpu and where.type != "cpu" and row.runner == "accelerant":
                    progress(f"{row.op} {row.case}: on the CPU")
                    row = _with_cpu(row, name, benchmark, budget_s)
                record.rows.append(row)


@dataclass(frozen=True, slots=True)
class _Case:
    """A benchmark with its tensors."""

    name: str
    label: str
    inputs: tuple[Tensor, ...]
    options: dict[str, Any]
    targets: dict[str, float | None]

    @classmethod
    def of(
        cls, name: str, benchmark: Benchmark, device: ComputeDevice, where: torch.device, dtype: torch.dtype | None
    ) -> _Case:
        sample, gpu = benchmark.sample, where.type == "cuda"
        dtype = dtype or (benchmark.dtype if gpu else torch.float32)
        drawn = [x for x in sample.tensors(dtype, where) if x is not None]
        rows = len(drawn[0])
        inputs = _first_rows(drawn, rows if gpu or rows <= _CPU_MANY else math.ceil(rows / _CPU_SHRINK))
        shapes = "@".join("x".join(map(str, x.shape)) for x in inputs if x.ndim > 1)
        options = "".join(f" {value}" for value in sample.options.values() if isinstance(value, str))
        known = _TARGETS_OF in device.name and dtype == benchmark.dtype
        targets = {"forward": benchmark.forward_ms, "backward": benchmark.backward_ms} if known else {}
        label = f"{shapes} {str(dtype).removeprefix('torch.')}{options}"
        return cls(name, label, inputs, dict(sample.options), targets)

    def check(self) -> None:
        """Compare with the float64 reference: no time of a wrong result is worth anything.

        Raises:
            AccelerantError: names the op and its error.
        """
        module = importlib.import_module(f"accelerant.ops.{self.name}.reference")
        with torch.no_grad():
            ours = OPS[self.name].ours(*self.inputs, **self.options).double()
            exact = getattr(module, f"{self.name}_reference")(*(x.double() for x in self.inputs), **self.options)
            error = float((ours - exact).norm() / exact.norm())
        if not error <= _ALLOWED_ERROR[self.inputs[0].dtype]:
            raise AccelerantError(f"{self.name} {self.label}: relative error {error:.3g} against the float64 reference")


def _first_rows(inputs: Sequence[Tensor], rows: int) -> tuple[Tensor, ...]:
    """The first input, which every op works on row by row, cut to so many rows; the others whole."""
    return (inputs[0][:rows].contiguous(), *inputs[1:])


def _with_cpu(row: Row, name: str, benchmark: Benchmark, budget_s: float) -> Row:
    """The row with the same case measured on the CPU."""
    tensors = [x for x in benchmark.sample.tensors(torch.float32) if x is not None]
    direction = row.case.split()[-1]

    def make(rows: int) -> Callable[[], Any]:
        inputs = _first_rows(tensors, rows)
        return _call(OPS[name].ours, _Case(name, "", inputs, dict(benchmark.sample.options), {}), direction)

    taken, note = cpu_column(make, len(tensors[0]), budget_s=budget_s)
    return replace(row, cpu_ms=taken, cpu_note=f"float32, {note}")


def _measure(case: _Case, budget_s: float, compiled: bool, progress: Callable[[str], None]) -> Iterator[Row]:
    subject = OPS[case.name]
    runners: dict[str, Fn] = {"accelerant": subject.ours, "torch": subject.theirs}
    if compiled:
        torch._dynamo.reset()
        runners["torch.compile"] = torch.compile(subject.theirs, dynamic=False)
    for direction, least_bytes, flops in _work(case):
        base = Row(
            "neural", case.name, f"{case.label} {direction}", "", "", bytes=least_bytes, flops=flops,
            ceiling="matmul" if flops else "copy", target=case.targets.get(direction),
        )  # fmt: skip
        for runner, fn in runners.items():
            progress(f"{base.op} {base.case}: {runner}")
            try:
                call = _call(fn, case, direction)
                chosen = _implementation(call) if runner == "accelerant" else runner
                timing = time_ms(call, case.inputs[0].device, budget_s=budget_s)
            except Exception as error:
                if runner == "accelerant":
                    raise
                yield replace(base, runner=runner, note=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
                continue
            yield replace(
                base, runner=runner, implementation=chosen, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms
            )


def _work(case: _Case) -> Iterator[tuple[str, int, int]]:
    """Directions with their least bytes and operations."""
    subject = OPS[case.name]
    with torch.no_grad():
        out = subject.theirs(*case.inputs, **case.options)
    given = sum(tensor.nbytes for tensor in case.inputs)
    flops = subject.flops(case.inputs, out) if subject.flops else 0
    yield "forward", given + out.nbytes, flops
    yield "backward", 2 * given + out.nbytes, 2 * flops


def _call(fn: Fn, case: _Case, direction: str) -> Callable[[], Any]:
    """The call to time."""
    if direction == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return fn(*case.inputs, **case.options)

        return forward
    leaves = [tensor.detach().requires_grad_() for tensor in case.inputs]
    out = fn(*leaves, **case.options)
    dy = torch.randn_like(out)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dy, retain_graph=True)

    return backward


def _implementation(call: Callable[[], Any]) -> str:
    """What dispatch chose in a call, from its own account."""
    decisions = explain_quietly(call).decisions
    names = dict.fromkeys(f"{each.implementation} ({'own' if each.own else 'library'})" for each in decisions)
    return " + ".join(names)
