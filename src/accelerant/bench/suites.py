"""The suites of the runtime, of copies and of field arithmetic; and compiling ahead of a run.

Of copies, rows of the runner "device" are torch's, rows of "accelerant" ours of the same bytes. Those that involve
pinned memory are timed by the device's events, others by the host's clock from call to end. Field addition is compared
with integer code of NumPy and torch; every sum is checked exactly first.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import queue
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant import ops
from accelerant.algebra.field.field import prime_field
from accelerant.algebra.field.program import field_add_source
from accelerant.bench import timer
from accelerant.bench.neural_cases import OpCase, PlannedCase, call_of, runners_of
from accelerant.bench.record import DEVICE, OURS, BenchmarkRecord, Environment, Row, environment_variable, failure_note
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, option, same_on_cpu
from accelerant.config import override
from accelerant.errors import AccelerantError, ConfigError
from accelerant.ops.registry import public_op
from accelerant.runtime import registry
from accelerant.runtime.dispatch import Decision, explain_quietly, force, operations
from accelerant.runtime.memory.limits import available_bytes
from accelerant.runtime.provider import ComputeDevice
from accelerant.runtime.streams.transfer import ChunkedRun, copy_async, stream_chunks

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
    timing = timer.host_time_us(fn).beside(timer.back_to_back_ms(fn, run.torch_device, budget_s=0.05))
    return Row("runtime", op, case, runner, implementation, "us").timed(timing)


def _launches(run: SuiteRun) -> list[Row]:
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
                    samples.append(timer.first_ms(compile_, torch.device("cpu")))
            row = Row("runtime", "compile", f"{name}, {case} cache", OURS, provider.name)
            rows.append(row.timed(timer.Timing.of(samples, wall=True)))
    return rows


_ALLOWED_ERROR = 1e-2


def _streaming(run: SuiteRun, budget_s: float) -> list[Row]:
    """Measure stream_chunks, the same chunks one after the other, and the overlap of copies and work."""
    run.require_ceiling("link", budget_s)
    where, work = run.torch_device, _StreamedWork(run)
    label = f"{size_name(work.array.nbytes)} in {size_name(work.chunk_bytes)} chunks, {work.products} products each"
    base = Row(
        "runtime", "stream", f"{label}, {work.memory}", "", "", bytes=work.array.nbytes, ceiling="host to device",
    )  # fmt: skip
    runs: list[ChunkedRun] = []
    streamed = timer.wall_ms(lambda: runs.append(work.streamed()), where, budget_s=budget_s, least=5)
    first = work.out.clone()
    work.out.zero_()
    sequence = timer.wall_ms(work.in_sequence, where, budget_s=budget_s, least=5)
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
        overlap.timed(timer.Timing.of([run.overlap for run in runs])),
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

_BATCH_X = 2.0  # target of a batch on a GPU: so many times torch's speed, one by one


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
        merged, single = (timer.wall_ms(call, where, budget_s=budget_s) for call in (batched, one_by_one))
        plain = timer.wall_ms(lambda: [F.gelu(x) for x in xs], where, budget_s=budget_s)
    ours = replace(base, runner=OURS, implementation="batch()", target_x=_BATCH_X if run.gpu else None)
    gain = replace(base, op="batch gain", runner=OURS, implementation="one by one / batch()", unit="x", better="higher")
    return [
        ours.timed(merged),
        replace(base, runner="one by one", implementation="Accelerator.gelu").timed(single),
        replace(base, runner="torch", implementation="gelu, one by one").timed(plain),
        gain.timed(single.over(merged)),
    ]


# --- copies by size ---------------------------------------------------------------------------------------------------
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_PERIOD = 251  # period of the bytes that are sent; a prime, so that misplaced bytes show
_BUFFERS = 6  # buffers of one size that exist at the same time, at most

_INTO, _BACK, _COPY = "host to device", "device to host", "device copy"


def default_sizes(gpu: bool) -> tuple[int, ...]:
    """Return 1 MiB to 1 GiB for a GPU, 256 KiB to 64 MiB for a CPU."""
    return tuple(2**power for power in ((20, 22, 24, 26, 28, 30) if gpu else (18, 22, 26)))


def parse_sizes(sizes: Sequence[str]) -> tuple[int, ...]:
    """Return the bytes of sizes like "1MiB", in rising order; ConfigError for anything but a size above 0."""
    parsed = set()
    for text in sizes:
        match = re.fullmatch(r"\s*(\d+)\s*([a-zA-Z]*)\s*", text)
        if match is None or match[2].upper() not in _UNITS or not int(match[1]):
            raise ConfigError(f"--size: wanted sizes like 64KiB, 1MiB or 1GiB; got {text!r}")
        parsed.add(int(match[1]) * _UNITS[match[2].upper()])
    return tuple(sorted(parsed))


def size_name(size: int) -> str:
    """Return 1048576 as "1 MiB", in the largest unit of which it is a whole number."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


@dataclass(frozen=True)
class BandwidthSuite(Suite):
    """Measure copies to the device, back, and on it: by size, from pinned and from pageable memory."""

    name = "bandwidth"
    examples = ("--size 1MiB --size 64MiB --size 1GiB",)

    size: tuple[str, ...] | None = option(None, "Bytes of a copy, like 64MiB; may be repeated.", metavar="SIZE")
    budget_s: float = option(0.3, "Seconds of calls behind each figure.", min=0.0)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with sizes that fit the memory of host and device; ConfigError if given ones do not."""
        room = min(available_bytes(device), available_bytes("cpu"))
        if self.size is None:
            gpu = device.torch_device.startswith("cuda")
            return replace(self, size=tuple(f"{size}B" for size in default_sizes(gpu) if _BUFFERS * size <= room))
        largest = max(parse_sizes(self.size), default=0)
        if _BUFFERS * largest > room:
            raise ConfigError(f"--size: {size_name(largest)} needs {_BUFFERS} buffers of it; {room:,} bytes are free")
        return self

    def prepare(self, run: SuiteRun) -> None:
        """Measure the ceilings of the device and of the link, the latter with the largest size."""
        run.require_ceiling("copy", self.budget_s)
        run.progress("ceiling: link")
        largest = max(parse_sizes(self.size or ()), default=None)
        run.record.ceilings |= timer.measure_link(run.torch_device, size=largest, budget_s=self.budget_s)
        if not run.gpu:
            run.record.notes.append("bandwidth: no pinned memory without a GPU; host and device are one memory here")

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each size."""
        cases = {size: functools.partial(_measure, size, self.budget_s) for size in parse_sizes(self.size or ())}
        return [SuiteCase(size_name(size), case, on_cpu=same_on_cpu(case)) for size, case in cases.items()]

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of one of the sizes."""
        names = {size_name(size) for size in parse_sizes(self.size or ())}
        return row.suite == self.name and " ".join(row.case.split()[:2]) in names


def _measure(size: int, budget_s: float, run: SuiteRun) -> None:
    """Add the rows of one size; AccelerantError for a copy that brings other bytes."""
    where, name, index = run.torch_device, size_name(size), run.device.index
    run.progress(f"bandwidth: {name}")
    pageable = torch.arange(_PERIOD, dtype=torch.uint8).repeat(size // _PERIOD + 1)[:size]
    there = pageable.to(where)
    other, provider = torch.zeros_like(there), registry.create(run.device.backend)

    def add(row: Row, by_events: bool, call: Callable[[], Any], result: Callable[[], Tensor] | None = None) -> None:
        """Add a row of a copy, whose bytes are those of `result`."""
        row = row.timed((timer.time_ms if by_events else timer.wall_ms)(call, where, budget_s=budget_s))
        if result is not None and not torch.equal(result().to("cpu"), pageable):
            raise AccelerantError(f"{row.op} {row.case} by {row.implementation}: other bytes came than were sent")
        run.add(row)

    base = Row("bandwidth", "", name, DEVICE, "torch copy_", bytes=size)
    hosts = [("pageable", pageable)]
    if run.gpu:
        hosts.insert(0, ("pinned", pageable.pin_memory()))
    for kind, host in hosts:
        row = replace(base, op=_INTO, ceiling=_INTO, case=f"{name} {kind}")
        other.zero_()
        add(row, kind == "pinned", functools.partial(other.copy_, host, non_blocking=True), lambda: other)
        send = functools.partial(copy_async, host, run.device)
        row = replace(row, runner=OURS, implementation="copy_async")
        add(row, kind == "pinned", send, functools.partial(_sent, send))
    for kind, host in hosts:
        row = replace(base, op=_BACK, ceiling=_BACK, case=f"{name} {kind}")
        target = torch.empty_like(host, pin_memory=kind == "pinned")
        receive = functools.partial(target.copy_, there, non_blocking=target.is_pinned())
        add(row, kind == "pinned", receive, target.clone)
    row = replace(row, case=f"{name} to a new array", implementation="torch to")
    new = functools.partial(there.to, "cpu", copy=True)
    add(row, False, new, new)
    buffer = provider.copy_to_device(pageable.numpy(), index)
    back = functools.partial(provider.copy_to_host, buffer, np.uint8, (size,))
    row = replace(row, runner=OURS, implementation="provider.copy_to_host")
    add(row, False, back, lambda: torch.from_numpy(back()))
    # bytes read and bytes written both count
    add(replace(base, op=_COPY, bytes=2 * size, ceiling="copy"), True, lambda: other.copy_(there))


def _sent(send: Callable[[], Any]) -> Any:
    return send().result()


Task = Callable[[ComputeDevice], None]  # compiles something for a device; it can be pickled

_MEMORY_SHARE, _MEMORY_ALL = 0.2, 0.9
"""Limits of the device's memory for one process and for all; a case that needs more is compiled in the run."""

_RECOMPILES = 64
"""Versions that torch.compile may make of a function: a sweep's sizes, both directions, exceed its default of 8."""

_POLL_S = 0.5

_START_METHODS = [name for name in ("forkserver", "spawn") if name in multiprocessing.get_all_start_methods()]
"""Quicker first. A driver that is running does not survive a plain fork."""

_PRELOADED = [__name__, "torch._dynamo", "torch._inductor.compile_fx"]
"""Imported once, in the server process that the others are forked from: 14 simultaneous imports take half a minute."""


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Configure torch.compile for many sizes and for backward passes that run again and again."""
    import torch._functorch.config as functorch

    with (
        torch._dynamo.config.patch(recompile_limit=_RECOMPILES),
        functorch.patch(donated_buffer=False),  # a second backward pass needs the buffers again
    ):
        yield


def own_kernels(decisions: Sequence[Decision]) -> dict[str, str]:
    """Return the implementations to force, by op, so that our kernels run where dispatch chose a library."""
    forced = {}
    for decision in decisions:
        if not decision.own:
            refused = {name for name, _ in decision.refused}
            own = [one.name for one in operations()[decision.op].implementations if one.own and one.name not in refused]
            if own:
                forced[decision.op] = own[0]
    return forced


def measure_quietly(suite: Suite, key: str, device: ComputeDevice) -> None:
    """Measure a case of a suite and forget it: what it compiled stays in the disk caches."""
    run = SuiteRun(device, BenchmarkRecord(Environment.of(device)))
    next(case for case in suite.cases(run) if case.key == key).measure(run)


def compile_first(
    groups: Callable[[set[str]], Sequence[Sequence[Task]]], cases: Sequence[SuiteCase], run: SuiteRun, workers: int, *,
    limit_s: float, share: float | None = None,
) -> None:  # fmt: skip
    """Compile what the cases left need, in at most half of the run's time, or note that `limit_s` was too short."""
    if not (left := {case.key for case in run.left(cases)}):
        return
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the server process must not start the driver
    limit_s = limit_s if run.until is None else min(limit_s, (run.until - time.monotonic()) / 2)
    note = precompile(groups(left), run.device, workers, limit_s=limit_s, progress=run.progress, share=share)
    run.record.notes += [note] if note else []


def precompile(
    groups: Sequence[Sequence[Task]], device: ComputeDevice, workers: int, *, limit_s: float,
    progress: Callable[[str], None] = lambda _: None, share: float | None = None,
) -> str:  # fmt: skip
    """Run groups of tasks in processes, each with a share of the device's memory; return a note on what is left."""
    count, until = 0, time.monotonic() + limit_s
    workers = max(1, min(workers, len(groups)))
    share = share or min(_MEMORY_SHARE, _MEMORY_ALL / workers)
    for method in _START_METHODS:
        count = _compile_in(method, groups, device, workers, share, until, progress)
        if count or time.monotonic() > until:
            break  # else each process ended at once, because its server process had initialized the driver
    missing = len(groups) - count
    return f"{missing} of {len(groups)} groups of cases were not precompiled" if missing else ""


def _compile_in(
    method: str, groups: Sequence[Sequence[Task]], device: ComputeDevice, workers: int, share: float, until: float,
    progress: Callable[[str], None],
) -> int:  # fmt: skip
    """Return how many groups the processes of a start method compiled in time."""
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_PRELOADED)
    tasks: Any = context.Queue()
    done: Any = context.Queue()
    for group in groups:
        tasks.put(group)
    processes = [context.Process(target=_work, args=(tasks, done, device, share), daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    count = 0
    while count < len(groups) and time.monotonic() < until and any(one.is_alive() for one in processes):
        with contextlib.suppress(queue.Empty):
            done.get(timeout=_POLL_S)
            count += 1
        progress(f"precompiled: {count} of {len(groups)} groups of cases")
    for process in processes:
        process.join(_POLL_S if count == len(groups) else 0.0)
        if process.is_alive():
            process.kill()
            process.join()
    for one in (tasks, done):
        one.cancel_join_thread()
        one.close()
    return count


def groups_of(planned: Sequence[PlannedCase]) -> list[list[Task]]:
    """Group cases that one process compiles one after the other: a sweep's sizes of an op share what is compiled."""
    single = [[one] for one in planned if one.part != "sweep"]
    single.sort(key=lambda group: (not group[0].deterministic, -group[0].compile_s))  # the tables' first dtype first
    swept = sorted((one for one in planned if one.part == "sweep"), key=lambda one: one.op)
    # sorted() keeps the order of an op's sizes, on which torch.compile's result depends.
    sweeps = [list(group) for _, group in itertools.groupby(swept, key=lambda one: one.op)]
    first = sum(group[0].deterministic for group in single)
    ordered = [*single[:first], *sweeps, *single[first:]]
    return [[functools.partial(_compile, one) for one in group] for group in ordered]


def _work(tasks: Any, done: Any, device: ComputeDevice, share: float) -> None:
    """Compile groups until none is left; the main function of a process."""
    warnings.simplefilter("ignore")
    if torch.cuda._is_in_bad_fork():
        return
    from torch._inductor import config as inductor  # its import takes a second, which few commands need

    inductor.compile_threads = 1  # there is a process for each core already
    inductor.autotune_local_cache = False  # tuning results are not to be kept while others use the device
    if device.torch_device.startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(share, device.index)
    while True:
        try:
            group = tasks.get(timeout=_POLL_S)
        except queue.Empty:
            return
        torch.compiler.reset()
        with compiling():
            for one in group:
                with contextlib.suppress(Exception):
                    one(device)
        if device.torch_device.startswith("cuda"):
            with contextlib.suppress(Exception):
                torch.cuda.empty_cache()
        done.put(len(group))


def _compile(one: PlannedCase, device: ComputeDevice) -> None:
    """Call ours, the peers, and the kernels of ours that a race, a forced choice or deterministic mode will run."""
    case = OpCase.of(one.op, one.benchmark, device, one.dtype)
    for runner, make in runners_of(case, one).items():
        for direction in ("both",) if case.together else ("forward", "backward"):
            with contextlib.suppress(Exception):
                call_of(make(), case, direction)()
                if runner == "accelerant":
                    _compile_alternatives(case, direction, one)
    if case.device.type == "cuda":
        torch.cuda.synchronize(case.device)


def _compile_alternatives(case: OpCase, direction: str, one: PlannedCase) -> None:
    fn = public_op(case.name).function
    decisions = explain_quietly(call_of(fn, case, direction)).decisions
    settings: list[contextlib.AbstractContextManager[Any]] = []
    if one.part == "" and (forced := own_kernels(decisions)):
        settings.append(force(**forced))
    if one.deterministic:
        settings.append(override(deterministic=True))
    if one.race:
        settings += [force(**{decision.op: name}) for decision in decisions for name in decision.not_tried]
    for setting in settings:
        with contextlib.suppress(Exception), setting:
            call_of(fn, case, direction)()


_P = prime_field("goldilocks").modulus
_SIGN = -(2**63)
_EPSILON = 2**32 - 1
_GPU_SIZES, _CPU_SIZES = (2**20, 2**25), (2**14, 2**20)
_CHECKED = 2**16  # sums that are also compared with Python's integers


@dataclass(frozen=True)
class AlgebraSuite(Suite):
    """Measure field arithmetic and integer code of NumPy and torch, checked exactly first."""

    name = "algebra"
    examples = ("--no-compiled",)

    budget_s: float = option(0.3, "Seconds of calls behind each figure.", min=0.0)
    compiled: bool = option(True, "With torch.compile among the peers.")

    def prepare(self, run: SuiteRun) -> None:
        """Measure the copy ceiling."""
        run.require_ceiling("copy", self.budget_s)

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each number of elements."""
        sizes = _GPU_SIZES if run.gpu else _CPU_SIZES
        return [SuiteCase(f"field_add {n:,} elements", functools.partial(self._measure, n)) for n in sizes]

    def _measure(self, n: int, run: SuiteRun) -> None:
        x, y = operands(n)
        for row, call in self._calls(run, x, y):
            run.progress(f"{row.op} {row.case}: {row.runner}")
            try:
                if wrong := first_wrong(x, y, call()):
                    raise AccelerantError(f"{row.op} by {row.runner}: {wrong}")
                row = row.timed(timer.time_ms(call, run.torch_device, budget_s=self.budget_s))
            except Exception as error:
                if row.runner == "accelerant":
                    raise
                run.add(replace(row, implementation="", note=failure_note(error)))
                continue
            if self.cpu and run.gpu and row.runner == "accelerant" and row.op == "field_add":
                taken, note = timer.cpu_time_ms(
                    lambda rows: functools.partial(_add, x[:rows], y[:rows]), n, budget_s=self.budget_s
                )
                row = replace(row, cpu_ms=taken, cpu_note=note)
            run.add(row)

    def _calls(self, run: SuiteRun, x: Any, y: Any) -> Iterator[tuple[Row, Callable[[], Any]]]:
        """Yield the runners of the checked call, then the kernel launch alone."""
        n, device = x.size, run.device
        a, b = (torch.from_numpy(values).to(run.torch_device) for values in (x, y))
        signed, other = a.view(torch.int64), b.view(torch.int64)
        base = Row(
            "algebra", "field_add", f"goldilocks {n:,} elements", "", "", bytes=24 * n, ceiling="copy", operations=n
        )
        ours = replace(base, runner="accelerant", implementation="kernel (own), operands checked")
        yield ours, lambda: _add(a, b)
        yield replace(base, runner="torch", implementation="int64 ops"), lambda: _torch_add(signed, other)
        if self.compiled:
            fused = torch.compile(_torch_add, dynamic=False)
            yield replace(base, runner="torch.compile", implementation="int64 ops"), lambda: fused(signed, other)
        if not run.gpu:
            yield replace(base, runner="numpy", implementation="uint64 ops"), lambda: _numpy_add(x, y)
        yield replace(ours, op="field_add kernel", implementation="kernel (own)"), kernel_launch(device, a, b)


def kernel_launch(device: ComputeDevice, a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """Return the launch alone of the addition of two tensors of elements."""
    provider, z, n = registry.create(device.backend), torch.empty_like(a), a.numel()
    kernel = provider.compile(field_add_source(), device=device.index)

    def launch() -> Tensor:
        provider.launch(kernel, (-(-n // 256),), (256,), (a, b, z, n))
        return z

    return launch


def operands(n: int) -> tuple[Any, Any]:
    """Return two arrays of n elements of Goldilocks: all pairs of edge values, then random ones."""
    rng = np.random.default_rng(11)
    x, y = (rng.integers(0, _P, n, dtype=np.uint64) for _ in range(2))
    edges = [0, 1, _EPSILON, 2**32, 2**63, _P - 2, _P - 1]
    pairs = [(a, b) for a in edges for b in edges]
    x[: len(pairs)], y[: len(pairs)] = [a for a, _ in pairs], [b for _, b in pairs]
    return x, y


def _add(x: Any, y: Any) -> Any:
    return prime_field("goldilocks").add(x, y)


def _torch_add(x: Tensor, y: Tensor) -> Tensor:
    """Add in signed 64-bit words; flipping the sign bit orders them as unsigned ones."""
    total = x + y
    total = torch.where((total ^ _SIGN) < (x ^ _SIGN), total + _EPSILON, total)
    return torch.where((total ^ _SIGN) >= _P + _SIGN, total - (_P - 2**64), total)


def _numpy_add(x: Any, y: Any) -> Any:
    total = x + y
    total += np.where(total < x, np.uint64(_EPSILON), np.uint64(0))
    return np.where(total >= np.uint64(_P), total - np.uint64(_P), total)


def first_wrong(x: Any, y: Any, got: Any) -> str:
    """Compare sums in Goldilocks with the host's arithmetic; return how many are wrong, with the first one, or ""."""
    host = (got.cpu().numpy() if isinstance(got, Tensor) else got).view(np.uint64)
    room = np.uint64(_P) - y  # x + y reaches the modulus where x >= room
    expected = np.where(x >= room, x - room, x + y)
    exact = [(a + b) % _P for a, b in zip(x[:_CHECKED].tolist(), y[:_CHECKED].tolist(), strict=True)]
    if expected[:_CHECKED].tolist() != exact:
        return "the host's own integer arithmetic is wrong"
    wrong = np.flatnonzero(host != expected)
    if not wrong.size:
        return ""
    at = int(wrong[0])
    first = f"{x[at]} + {y[at]} gave {host[at]}, not {expected[at]}"
    return f"{wrong.size:,} of {host.size:,} sums are wrong, the first: {first}"
