"""Costs and gains of the runtime: launches, eager op calls, compiles, streaming in chunks, batches."""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant import ops
from accelerant.algebra.field.program import field_add_source
from accelerant.bench.record import OURS, Row, environment_variable
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, option, same_on_cpu
from accelerant.bench.suites.bandwidth import size_name
from accelerant.bench.timer import Timing, back_to_back_ms, first_ms, host_time_us, wall_ms
from accelerant.config import override
from accelerant.errors import AccelerantError
from accelerant.runtime import registry
from accelerant.runtime.memory.limits import available_bytes
from accelerant.runtime.provider import ComputeDevice
from accelerant.runtime.streams.transfer import ChunkedRun, stream_chunks

_LAUNCH_US, _CALL_US, _WARM_MS = 8.0, 25.0, 5.0
"""Host times to reach on an H200: a launch through the provider, an eager op call, a compile from the disk cache."""


@dataclass(frozen=True)
class RuntimeSuite(Suite):
    """Measure what a launch, an eager op call and a compile cost, and what streaming and batches gain."""

    name = "runtime"
    examples = ("--json",)

    budget_s: float = option(0.3, "Seconds behind each figure of streaming and batches.", min=0.0)

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each part of the runtime."""
        parts: dict[str, Callable[[SuiteRun], list[Row]]] = {
            "launch": _launches,
            "eager op calls": _calls,
            "compile": lambda run: _compiles(run.device),
            "streaming": lambda run: _streaming(run, self.budget_s),
        }
        if run.accelerator is not None:
            parts["batches"] = lambda run: _batches(run, self.budget_s)

        def measure(name: str, run: SuiteRun) -> None:
            run.progress(f"runtime: {name}")
            known = run.is_model("H200")
            run.add(*(replace(row, target=_target(row) if known else None) for row in parts[name](run)))

        cases = {name: functools.partial(measure, name) for name in parts}
        alike = ("launch", "eager op calls", "compile")
        return [
            SuiteCase(name, case, on_cpu=same_on_cpu(case) if name in alike else None) for name, case in cases.items()
        ]


def _target(row: Row) -> float | None:
    targets = {"launch": _LAUNCH_US, "compile": _WARM_MS if "warm" in row.case else None}
    calls = _CALL_US if row.case.startswith("eager call") else None
    return targets.get(row.op, calls) if row.runner == OURS else None


def _host_row(run: SuiteRun, op: str, case: str, runner: str, implementation: str, fn: Callable[[], Any]) -> Row:
    timing = host_time_us(fn).beside(back_to_back_ms(fn, run.torch_device, budget_s=0.05))
    return Row("runtime", op, case, runner, implementation, "us").timed(timing)


def _launches(run: SuiteRun) -> list[Row]:
    """Measure a kernel launch through the provider, through cuda.core, and torch's add_."""
    device = run.device
    provider = registry.create(device.backend)
    kernel = provider.compile(field_add_source(), device=device.index)
    x = torch.zeros(256, dtype=torch.uint64, device=run.torch_device)
    args = (x, x, x, 256)
    calls: list[tuple[str, str, Callable[[], Any]]] = [
        (OURS, "provider.launch", lambda: provider.launch(kernel, (1,), (256,), args))
    ]
    if device.backend == "cuda":
        from cuda.core import Kernel, LaunchConfig, launch

        stream, config = torch.cuda.current_stream(), LaunchConfig(grid=(1,), block=(256,))
        core = Kernel.from_handle(kernel.handle.function)
        pointer, count = x.data_ptr, np.int64
        calls.append(
            ("cuda.core", "launch", lambda: launch(stream, config, core, pointer(), pointer(), pointer(), count(256)))
        )
    y = torch.zeros(256, device=run.torch_device)
    calls.append(("torch", "add_", lambda: y.add_(1.0)))
    return [_host_row(run, "launch", "host time", runner, name, call) for runner, name, call in calls]


def _calls(run: SuiteRun) -> list[Row]:
    """Measure eager calls of small ops, with and without autograd recording."""
    where, dtype = run.torch_device, torch.bfloat16 if run.gpu else torch.float32
    x = torch.randn(16, 64, device=where, dtype=dtype)
    w = torch.ones(64, device=where, dtype=dtype)
    xg, wg = x.clone().requires_grad_(), w.clone().requires_grad_()
    cases: list[tuple[str, str, Callable[[], Any], Callable[[], Any]]] = [
        ("gelu", "no gradient", lambda: ops.gelu(x, "tanh"), lambda: F.gelu(x, approximate="tanh")),
        ("gelu", "recording", lambda: ops.gelu(xg, "tanh"), lambda: F.gelu(xg, approximate="tanh")),
        ("softmax", "no gradient", lambda: ops.softmax(x), lambda: F.softmax(x, -1)),
        ("softmax", "recording", lambda: ops.softmax(xg), lambda: F.softmax(xg, -1)),
        ("layer_norm", "no gradient", lambda: ops.layer_norm(x, w, w), lambda: F.layer_norm(x, (64,), w, w)),
        ("layer_norm", "recording", lambda: ops.layer_norm(xg, wg, wg), lambda: F.layer_norm(xg, (64,), wg, wg)),
        ("matmul", "no gradient", lambda: ops.matmul(x, x.T), lambda: torch.matmul(x, x.T)),
    ]
    return [
        _host_row(run, op, f"eager call, host time, {mode}", runner, "eager", call)
        for op, mode, ours, torch_call in cases
        for runner, call in ((OURS, ours), ("torch", torch_call))
    ]


def _compiles(device: ComputeDevice) -> list[Row]:
    """Measure compiles of a C kernel and of a Triton kernel, with an empty and with a filled disk cache."""
    provider = registry.create(device.backend)
    sources = {"field_add": field_add_source()}
    if device.backend == "cuda":
        from accelerant.ops.gelu.cases import KERNELS

        sources["gelu_fwd (Triton)"] = KERNELS[0].source()
    rows = []
    for name, source in sources.items():
        for case in ("cold", "warm"):
            samples = []
            for _ in range(3):
                with (
                    tempfile.TemporaryDirectory() as folder,
                    override(cache_dir=Path(folder)),
                    environment_variable("TRITON_CACHE_DIR", folder),  # else a cold compile would be warm
                ):
                    if case == "warm":
                        provider.compile(source, device=device.index)
                    compile_ = functools.partial(provider.compile, source, device=device.index)
                    samples.append(first_ms(compile_, torch.device("cpu")))
            row = Row("runtime", "compile", f"{name}, {case} cache", OURS, provider.name)
            rows.append(row.timed(Timing.of(samples, wall=True)))
    return rows


_ALLOWED_ERROR = 1e-2


def _streaming(run: SuiteRun, budget_s: float) -> list[Row]:
    """Measure stream_chunks, the same chunks one after the other, and the overlap of copies and work.

    On an H200 the function's matrix products take about as long as a chunk's transfer, so that each of the three stages
    can hide the others.
    """
    run.require_ceiling("link", budget_s)
    where, work = run.torch_device, _StreamedWork(run)
    label = f"{size_name(work.array.nbytes)} in {size_name(work.chunk_bytes)} chunks, {work.products} products each"
    base = Row(
        "runtime", "stream", f"{label}, {work.memory}", "", "", bytes=work.array.nbytes, ceiling="host to device",
    )  # fmt: skip
    runs: list[ChunkedRun] = []
    streamed = wall_ms(lambda: runs.append(work.streamed()), where, budget_s=budget_s, least=5)
    first = work.out.clone()
    work.out.zero_()
    sequence = wall_ms(work.in_sequence, where, budget_s=budget_s, least=5)
    error = float((first.double() - work.out.double()).norm() / work.out.double().norm())
    if not error <= _ALLOWED_ERROR:
        raise AccelerantError(f"stream_chunks: relative error {error:.3g} against the same chunks in sequence")
    parts = ", ".join(
        f"{name} {1e3 * statistics.median(getattr(run, field) for run in runs):.3g} ms"
        for name, field in (("in", "copy_in_s"), ("compute", "compute_s"), ("out", "copy_out_s"))
    )
    ours = replace(base, runner=OURS, implementation="stream_chunks")
    overlap = replace(
        ours, op="stream overlap", unit="x", better="higher", bytes=0, ceiling="",
        note="1 is none, 3 is all three stages at once",
    )  # fmt: skip
    return [
        replace(ours, note=parts).timed(streamed),
        replace(base, runner="in sequence", implementation="torch, one stream").timed(sequence),
        overlap.timed(Timing.of([run.overlap for run in runs])),
    ]


class _StreamedWork:
    """An array, the function that it is streamed through, and its chunks."""

    def __init__(self, run: SuiteRun) -> None:
        gpu, self.device, self.where = run.gpu, run.device, run.torch_device
        width = 4096 if gpu else 256
        size = 2**30 if gpu and available_bytes("cpu") > 2**33 else 2**28 if gpu else 2**22
        dtype = torch.bfloat16 if gpu else torch.float32
        self.products = 3 if gpu else 1
        self.chunk_bytes = size // 32 if gpu else size // 8
        self.memory = "pinned" if gpu else "pageable"
        shape = (size // width // dtype.itemsize, width)
        self.array = torch.empty(shape, dtype=dtype, pin_memory=gpu)
        self.array.copy_(torch.randn(shape, device=self.where, dtype=dtype))
        self.out = torch.empty(shape, dtype=dtype, pin_memory=gpu)
        self.weight = (torch.randn(width, width, device=self.where) / width**0.5).to(dtype)
        self.step = self.chunk_bytes // width // dtype.itemsize

    def function(self, x: Tensor) -> Tensor:
        for _ in range(self.products):
            x = x @ self.weight
        return x

    def streamed(self) -> ChunkedRun:
        return stream_chunks(
            self.function, self.array, device=self.device, chunk_bytes=self.chunk_bytes, out=self.out, atomic=False
        )

    def in_sequence(self) -> None:
        with torch.no_grad():
            for begin in range(0, len(self.array), self.step):
                chunk = self.array[begin : begin + self.step].to(self.where, non_blocking=True)
                self.out[begin : begin + self.step].copy_(self.function(chunk), non_blocking=True)


_BATCH_CALLS, _BATCH_SIZE = 256, 1024

_BATCH_X = 2.0
"""Target of a batch on a GPU: so many times torch's speed, one by one."""


def _batches(run: SuiteRun, budget_s: float) -> list[Row]:
    """Measure many small calls one by one, merged by Accelerator.batch(), and by torch, on the host's clock."""
    assert run.accelerator is not None  # for the type checker: there is no such case without one
    where = run.torch_device
    base = Row("runtime", "batch", f"{_BATCH_CALLS} calls of gelu on {_BATCH_SIZE} float32", "", "")
    xs = list(torch.randn(_BATCH_CALLS, _BATCH_SIZE, device=where).unbind())
    with run.accelerator() as accelerator:

        def one_by_one() -> list[Tensor]:
            return [accelerator.gelu(x) for x in xs]

        def differs(message: str) -> str:
            raise AccelerantError(f"batch() gave something else than single calls: {message.splitlines()[0]}")

        def batched() -> list[Tensor]:
            with accelerator.batch() as batch:
                pending = [batch.gelu(x) for x in xs]
            return [result.result() for result in pending]

        torch.testing.assert_close(batched(), one_by_one(), rtol=1e-5, atol=1e-6, msg=differs)
        merged, single = (wall_ms(call, where, budget_s=budget_s) for call in (batched, one_by_one))
        plain = wall_ms(lambda: [F.gelu(x) for x in xs], where, budget_s=budget_s)
    ours = replace(base, runner=OURS, implementation="batch()", target_x=_BATCH_X if run.gpu else None)
    gain = replace(base, op="batch gain", runner=OURS, implementation="one by one / batch()", unit="x", better="higher")
    return [
        ours.timed(merged),
        replace(base, runner="one by one", implementation="Accelerator.gelu").timed(single),
        replace(base, runner="torch", implementation="gelu, one by one").timed(plain),
        gain.timed(single.over(merged)),
    ]
