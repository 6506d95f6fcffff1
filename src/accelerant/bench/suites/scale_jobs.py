"""Jobs of 10 ms by our workers, on this host and on Ray, beside Ray's own tasks: what handing them out costs."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from accelerant.bench.record import DEVICE, OURS, Row
from accelerant.bench.suite import SuiteRun
from accelerant.bench.timer import Timing
from accelerant.errors import AccelerantError
from accelerant.runtime.jobs import run_jobs

__all__ = ["measure_jobs"]

_JOB_S, _JOBS, _ROUNDS = 0.01, 200, 3
_MOST_X = 1.05
"""Target of the time on Ray, in that of bare tasks."""


def _prepare() -> Callable[[int], int]:
    return _sleep


def _sleep(item: int) -> int:
    time.sleep(_JOB_S)
    return item


def measure_jobs(count: int, run: SuiteRun) -> None:
    """Measure the time of a job with `count` workers that are ready, in rounds that take turns."""
    jobs = _JOBS * count
    row = Row("scale", "job", f"{1e3 * _JOB_S:g} ms, {jobs} jobs, {count} workers", DEVICE, "local workers", unit="ms")
    run.progress("scale: jobs by local workers")
    run.add(row.timed(Timing.of([_ours_ms("local", jobs, count) for _ in range(_ROUNDS)])))
    if importlib.util.find_spec("ray") is None:
        run.record.notes.append("jobs on Ray were not measured: pip install 'accelerant[ray]'")
        return
    bare, ours = [], []
    with _cluster(count) as ray:
        for turn in range(_ROUNDS):
            run.progress(f"scale: jobs on Ray, {turn + 1} of {_ROUNDS}")
            bare.append(_bare_ms(ray, jobs, count))
            ours.append(_ours_ms("ray", jobs, count))
    theirs = Timing.of(bare)
    named = Row(row.suite, row.op, row.case, OURS, "on Ray", target=_MOST_X * theirs.p50_ms)
    found = named.timed(Timing.of(ours))
    note = f"{(found.p50 or 0.0) / theirs.p50_ms:.3f} of the time of bare tasks"
    run.add(replace(found, note=note), Row(row.suite, row.op, row.case, "ray", "bare tasks").timed(theirs))


def _ours_ms(engine: Any, jobs: int, count: int) -> float:
    """Return the time of a job from the first outcome to the last."""
    times = []
    for outcome in run_jobs(_prepare, range(jobs), engine=engine, workers=count):
        if outcome.error is not None or outcome.value != outcome.index:
            raise AccelerantError(f"job {outcome.index} returned {outcome.value}, {outcome.error}")
        times.append(time.perf_counter())
    return 1e3 * (times[-1] - times[0]) / (jobs - 1)


def _bare_ms(ray: Any, jobs: int, count: int) -> float:
    task = ray.remote(num_cpus=1)(_sleep)
    ray.get([task.remote(i) for i in range(10 * count)])  # starts Ray's workers
    began = time.perf_counter()
    if ray.get([task.remote(i) for i in range(jobs)]) != list(range(jobs)):
        raise AccelerantError("Ray's tasks returned other values")
    return 1e3 * (time.perf_counter() - began) / jobs


@contextmanager
def _cluster(count: int) -> Iterator[Any]:
    """Start Ray on this host for the block."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = importlib.import_module("ray")
    ray.init(num_cpus=count, num_gpus=0, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()
