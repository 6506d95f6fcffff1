"""Compilation of a run's kernels in several processes that share the device, before anything is timed.

A figure takes milliseconds, and compiling a peer seconds of one core. Each process calls what will be timed on the same
arguments; the results stay in the disk caches of torch.compile, Triton, the libraries and Accelerant. Nothing is raced
and no time is kept, since the other processes disturb both. What fails here fails again in the run, and is reported
there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import queue
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._inductor.config

from accelerant.bench.record import BenchmarkRecord, Environment
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun
from accelerant.bench.suites.neural_cases import OpCase, PlannedCase, call_of, runners_of
from accelerant.config import override
from accelerant.ops.registry import public_op
from accelerant.runtime.dispatch import Decision, explain_quietly, force, operations
from accelerant.runtime.provider import ComputeDevice

Task = Callable[[ComputeDevice], None]  # compiles something for a device; it can be pickled

_MEMORY_SHARE, _MEMORY_ALL = 0.2, 0.9
"""Limits of the device's memory for one process and for all; a case that needs more is compiled in the run."""

_RECOMPILES = 64
"""Versions that torch.compile may make of a function: a sweep's sizes, both directions, exceed its default of 8."""

_POLL_S = 0.5

_START_METHODS = [name for name in ("forkserver", "spawn") if name in multiprocessing.get_all_start_methods()]
"""Quicker first. A driver that is running does not survive a plain fork."""

_PRELOADED = ["accelerant.bench.suites.precompile", "torch._dynamo", "torch._inductor.compile_fx"]
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
    left = {case.key for case in run.left(cases)}
    if not left:
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
    torch._inductor.config.compile_threads = 1  # there is a process for each core already
    torch._inductor.config.autotune_local_cache = False  # tuning results are not to be kept while others use the device
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
