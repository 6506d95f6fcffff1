"""The neural ops beside torch and torch.compile, forward and backward apart, in one run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant import ops
from accelerant.bench.ceilings import measure_ceilings
from accelerant.bench.record import Environment, Record, Row
from accelerant.bench.timer import time_ms
from accelerant.errors import ConfigError
from accelerant.runtime.dispatch import explain_quietly
from accelerant.runtime.provider import ComputeDevice

__all__ = ["OPS", "run"]

Fn = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Subject:
    """An op to measure.

    Attributes:
        ours, theirs: the same function by us and by torch.
        gpu_shapes, cpu_shapes: cases; dims as the op's `make` reads them.
        make: shape, dtype, device -> the function's arguments; those that are floating take gradients.
        flops: shape -> operations of the forward pass; 0 where bandwidth bounds it.
    """

    ours: Fn
    theirs: Fn
    gpu_shapes: tuple[tuple[int, ...], ...]
    cpu_shapes: tuple[tuple[int, ...], ...]
    make: Callable[[tuple[int, ...], torch.dtype, torch.device], tuple[Tensor, ...]]
    flops: Callable[[tuple[int, ...]], int] = lambda _: 0


def _rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.randn(shape, device=device).to(dtype),)


def _norm(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    weight = torch.randn(shape[-1], device=device).to(dtype)
    return (*_rows(shape, dtype, device), weight, torch.randn_like(weight))


def _factors(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    *batch, m, k, n = shape
    a = torch.randn(*batch, m, k, device=device).to(dtype)
    return a, torch.randn(*batch, k, n, device=device).to(dtype)


def _product_flops(shape: tuple[int, ...]) -> int:
    return 2 * functools.reduce(int.__mul__, shape, 1)


_LARGE = ((16384, 4096), (65536, 768))
_SMALL = ((512, 768),)
OPS: dict[str, Subject] = {
    "gelu": Subject(
        functools.partial(ops.gelu, approximate="tanh"),
        functools.partial(F.gelu, approximate="tanh"),
        _LARGE[:1],
        _SMALL,
        _rows,
    ),
    "layer_norm": Subject(ops.layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), _LARGE, _SMALL, _norm),
    "softmax": Subject(ops.softmax, functools.partial(F.softmax, dim=-1), _LARGE[:1], _SMALL, _rows),
    "matmul": Subject(
        ops.matmul,
        torch.matmul,
        ((8192, 1024, 4096), (16384, 768, 3072), (64, 512, 128, 512)),
        ((256, 256, 256),),
        _factors,
        _product_flops,
    ),
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
    """Measure.

    Args:
        device: where.
        names: ops of OPS; all by default.
        dtype: bfloat16 on a GPU, float32 on a CPU by default.
        budget_s: seconds for each figure.
        compiled: whether torch.compile is among the peers.
        progress: told what is measured next.

    Raises:
        ConfigError: an op that the suite does not have.
    """
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise ConfigError(f"no op {unknown[0]!r} in this suite; it has {', '.join(OPS)}")
    where = torch.device(device.torch_device)
    gpu = where.type == "cuda"
    dtype = dtype or (torch.bfloat16 if gpu else torch.float32)
    record = Record(Environment.of(device))
    progress("ceilings")
    record.ceilings = measure_ceilings(where)
    for name in names or OPS:
        subject = OPS[name]
        for shape in subject.gpu_shapes if gpu else subject.cpu_shapes:
            torch.manual_seed(0)
            inputs = subject.make(shape, dtype, where)
            for row in _case(name, subject, shape, inputs, budget_s, compiled, progress):
                record.rows.append(_against_ceiling(row, record.ceilings))
    record.rows = _with_speedups(record.rows)
    return record


def _case(
    name: str,
    subject: Subject,
    shape: tuple[int, ...],
    inputs: tuple[Tensor, ...],
    budget_s: float,
    compiled: bool,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    runners: dict[str, Fn] = {"accelerant": subject.ours, "torch": subject.theirs}
    if compiled:
        torch._dynamo.reset()
        runners["torch.compile"] = torch.compile(subject.theirs, dynamic=False)
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    for direction, least_bytes, flops in _work(subject, shape, inputs):
        case = f"{'x'.join(map(str, shape))} {dtype} {direction}"
        base = Row("neural", name, case, "", "", bytes=least_bytes, flops=flops, ceiling="matmul" if flops else "copy")
        for runner, fn in runners.items():
            progress(f"{name} {case}: {runner}")
            call, check = _call(fn, inputs, direction)
            try:
                chosen = _implementation(check) if runner == "accelerant" else runner
                timing = time_ms(call, inputs[0].device, budget_s=budget_s)
            except Exception as error:
                if runner == "accelerant":
                    raise
                yield replace(base, runner=runner, note=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
                continue
            yield replace(
                base, runner=runner, implementation=chosen, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms
            )


def _work(subject: Subject, shape: tuple[int, ...], inputs: tuple[Tensor, ...]) -> Iterator[tuple[str, int, int]]:
    """Directions with their least bytes and operations."""
    with torch.no_grad():
        out = subject.theirs(*inputs)
    given = sum(tensor.nbytes for tensor in inputs)
    flops = subject.flops(shape)
    yield "forward", given + out.nbytes, flops
    yield "backward", 2 * given + out.nbytes, 2 * flops


def _call(fn: Fn, inputs: tuple[Tensor, ...], direction: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The call to time, and one to look at."""
    if direction == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return fn(*inputs)

        return forward, forward
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = fn(*leaves)
    dy = torch.randn_like(out)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dy, retain_graph=True)

    return backward, backward


def _implementation(call: Callable[[], Any]) -> str:
    """What dispatch chose in a call, from its own account."""
    decisions = explain_quietly(call).decisions
    names = dict.fromkeys(f"{each.implementation} ({'own' if each.own else 'library'})" for each in decisions)
    return " + ".join(names)


def _against_ceiling(row: Row, ceilings: dict[str, float]) -> Row:
    if row.p50 is None:
        return row
    if row.ceiling == "matmul":
        return replace(row, percent_of_ceiling=100 * row.flops / row.p50 / 1e9 / ceilings["matmul TFLOP/s"])
    return replace(row, percent_of_ceiling=100 * row.bytes / row.p50 / 1e6 / ceilings["copy GB/s"])


def _with_speedups(rows: list[Row]) -> list[Row]:
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.runner != "accelerant" and row.p50 is not None:
            best[row.op, row.case] = min(best.get((row.op, row.case), row.p50), row.p50)

    def speedup(row: Row) -> float | None:
        peer = best.get((row.op, row.case))
        return peer / row.p50 if row.runner == "accelerant" and row.p50 and peer else None

    return [replace(row, speedup=speedup(row)) for row in rows]
