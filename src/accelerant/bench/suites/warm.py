"""Everything that a run compiles, compiled before it, in several processes that share the device.

A figure takes milliseconds and a compiled peer seconds of one core. Each process calls what will be timed, forward and
backward, on the arguments that it will be timed on; what was compiled stays in the disk caches of torch.compile,
Triton, the libraries and Accelerant. Nothing is timed here, and nothing is raced: other processes disturb both. What
fails here fails again in the run, and says so there.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config

from accelerant import ops
from accelerant.bench.suites import neural, rows
from accelerant.bench.suites.cases import Case, call_of
from accelerant.bench.suites.plan import Planned
from accelerant.config import override
from accelerant.runtime.dispatch import force
from accelerant.runtime.dispatch.plan import explain_quietly
from accelerant.runtime.provider import ComputeDevice

__all__ = ["compile_ahead", "share_caches"]

_MEMORY_SHARE, _MEMORY_ALL = 0.2, 0.9
"""Of the device's memory, for one process and for all: a case that needs more is compiled in the run."""

_LOOK_S = 0.5

_STARTS = [each for each in ("forkserver", "spawn") if each in multiprocessing.get_all_start_methods()]
"""Ways to start a process, quicker first. A driver that is running does not survive a plain fork."""

_PRELOADED = ["accelerant.bench.suites.warm", "torch._dynamo", "torch._inductor.compile_fx"]
"""Imported once, in the process that the others are forked from: 14 imports at a time take half a minute."""


def share_caches() -> None:
    """Ask the libraries for their disk caches, in this process and those that it starts, before they are loaded."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the server of processes must not start the driver


def compile_ahead(
    planned: Sequence[Planned],
    device: ComputeDevice,
    jobs: int,
    *,
    limit_s: float,
    progress: Callable[[str], None] = lambda _: None,
) -> str:
    """Compile what the planned cases need.

    Args:
        planned: the cases.
        device: where they will be timed.
        jobs: processes.
        limit_s: seconds after which what is left is compiled in the run.
        progress: told how many are done.

    Returns:
        what was not compiled, in words; "" if all was.
    """
    groups, count, until = _groups(planned), 0, time.monotonic() + limit_s
    for start in _STARTS:
        count = _compile_in(start, groups, device, jobs, until=until, progress=progress)
        if count or time.monotonic() > until:
            break  # else every process ended at once: the server it came from had looked at the driver
    missing = len(groups) - count
    return f"{missing} of {len(groups)} groups of cases were not compiled ahead" if missing else ""


def _compile_in(
    start: str,
    groups: list[list[Planned]],
    device: ComputeDevice,
    jobs: int,
    *,
    until: float,
    progress: Callable[[str], None],
) -> int:
    """How many groups processes that are started in one way compiled until then."""
    context: Any = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(_PRELOADED)
    tasks: Any = context.Queue()
    done: Any = context.Queue()
    for group in groups:
        tasks.put(group)
    processes = min(jobs, len(groups))
    share = min(_MEMORY_SHARE, _MEMORY_ALL / max(processes, 1))
    workers = [context.Process(target=_work, args=(tasks, done, device, share), daemon=True) for _ in range(processes)]
    for worker in workers:
        worker.start()
    count = 0
    while count < len(groups) and time.monotonic() < until and any(worker.is_alive() for worker in workers):
        with contextlib.suppress(queue.Empty):
            done.get(timeout=_LOOK_S)
            count += 1
        progress(f"compiled ahead: {count} of {len(groups)} groups of cases")
    for worker in workers:
        worker.join(_LOOK_S if count == len(groups) else 0.0)
        if worker.is_alive():
            worker.kill()
            worker.join()
    for each in (tasks, done):
        each.cancel_join_thread()
        each.close()
    return count


def _groups(planned: Sequence[Planned]) -> list[list[Planned]]:
    """Cases that one process compiles one after the other: a sweep's sizes of an op share what is compiled."""
    found = [[each] for each in planned if each.part != "sweep"]
    found.sort(key=lambda group: (not group[0].deterministic, -group[0].compile_s))  # the tables' own dtype first
    swept = sorted((each for each in planned if each.part == "sweep"), key=lambda each: each.op)
    # sorted() keeps the order of an op's sizes, on which what torch.compile makes of them depends.
    sweeps = [list(group) for _, group in itertools.groupby(swept, key=lambda each: each.op)]
    first = sum(group[0].deterministic for group in found)
    return [*found[:first], *sweeps, *found[first:]]


def _work(tasks: Any, done: Any, device: ComputeDevice, share: float) -> None:
    """A process: groups until there are none."""
    warnings.simplefilter("ignore")
    if torch.cuda._is_in_bad_fork():
        return
    torch._inductor.config.compile_threads = 1  # there is a process for each core already
    torch._inductor.config.autotune_local_cache = False  # what is tuned while others use the device is not to be kept
    if device.torch_device.startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(share, device.index)
    while True:
        try:
            group = tasks.get(timeout=_LOOK_S)
        except queue.Empty:
            return
        torch._dynamo.reset()
        with neural.compiling():
            for each in group:
                with contextlib.suppress(Exception):
                    _compile(each, device)
        if device.torch_device.startswith("cuda"):
            with contextlib.suppress(Exception):
                torch.cuda.empty_cache()
        done.put(len(group))


def _compile(each: Planned, device: ComputeDevice) -> None:
    """Call ours, and the peers. What fails is left to the run."""
    case = Case.of(each.op, each.benchmark, device, each.dtype)
    for runner, make in rows.runners_of(case, each).items():
        for direction in ("both",) if case.together else ("forward", "backward"):
            with contextlib.suppress(Exception):
                call_of(make(), case, direction)()
                if runner == "accelerant":
                    _compile_ours(case, direction, each)
    if case.device.type == "cuda":
        torch.cuda.synchronize(case.device)


def _compile_ours(case: Case, direction: str, each: Planned) -> None:
    """The kernels that are not chosen: those that a race tries, and those of deterministic mode."""
    fn = getattr(ops, case.name)
    decisions = explain_quietly(call_of(fn, case, direction)).decisions
    forced = rows.own_kernels(decisions)
    if forced and each.part == "":
        with contextlib.suppress(Exception), force(**forced):
            call_of(fn, case, direction)()
    if each.deterministic:
        with contextlib.suppress(Exception), override(deterministic=True):
            call_of(fn, case, direction)()
    for decision in decisions if each.race else ():
        for name in decision.not_tried:
            with contextlib.suppress(Exception), force(**{decision.op: name}):
                call_of(fn, case, direction)()
