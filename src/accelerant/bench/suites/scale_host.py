"""What one process gives to several devices or workers of a host, for the suite scale: proofs, sums of points, jobs.

A shared proof and a shared sum are launched on all devices by one process; many proofs have a worker process for each
device, as `accelerant zk prove-many`, and jobs of 10 ms, beside Ray's own tasks, show what handing them out costs. Sums
are compared with the multiple of the generator that Python's integers give, and every proof is verified, before a time
counts.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accelerant.bench.groth16_circuit import Circuit
from accelerant.bench.record import DEVICE, OURS, Row
from accelerant.bench.suite import SuiteRun
from accelerant.bench.timer import Timing
from accelerant.bench.zk_inputs import msm_answer, msm_points, msm_scalars
from accelerant.config import settings
from accelerant.errors import AccelerantError
from accelerant.runtime.jobs import run_jobs
from accelerant.zk import curve as curve_named
from accelerant.zk.formats import write_wtns
from accelerant.zk.groth16 import Proof, Prover, VerificationKey, verify
from accelerant.zk.groth16.setup import setup_with_known_tau
from accelerant.zk.multi_scalar.op import FixedBase

__all__ = ["Key", "measure_jobs", "measure_many", "measure_msm", "measure_proof"]

_PROOF_X, _MANY_X = 0.65, 1.95
"""Targets on two H200: time of a proof, and proofs a second, in those of one."""

_PATIENCE_S = 120.0
"""Longest wait for the slowest worker's key."""


def _devices(run: SuiteRun, count: int) -> list[str]:
    return [f"cuda:{index}" for index in range(count)] if run.gpu else ["cpu"] * count


def _timed(call: Callable[[], object], count: int) -> Timing:
    """Return wall times of calls that return when their result is on the host."""
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        samples.append((time.perf_counter() - began) * 1e3)
    return Timing.of(samples, wall=True)


def measure_msm(log_n: int, steps: int, count: int, run: SuiteRun) -> None:
    """Measure a sum of 2^log_n points, in equal parts on `count` devices, and on one where they fit."""
    group, n = curve_named("bn254_g1"), 1 << log_n
    run.progress(f"scale: msm 2^{log_n}: the points")
    words = msm_scalars(group.scalar_field.parameters, n)
    wanted = msm_answer(group, words)
    points = msm_points(group, n, run.torch_device if run.gpu else None)
    scalars: Any = torch.from_numpy(words).to(run.torch_device) if run.gpu else words
    alone = 0.0
    for devices in dict.fromkeys((1, count)):
        run.progress(f"scale: msm 2^{log_n} on {devices} devices")
        names = _devices(run, devices)
        bases = FixedBase("bn254_g1", points, check=False, multiples=False, devices=names)
        if group.decode(bases.msm(scalars)) != wanted:
            raise AccelerantError(f"msm of 2^{log_n} points on {'+'.join(names)} is wrong")
        timing = _timed(functools.partial(bases.msm, scalars), steps)
        alone = alone or timing.p50_ms
        share = f"{timing.p50_ms / alone:.3f} of the time on one" if devices > 1 else ""
        run.add(_row("msm", f"bn254_g1 2^{log_n}", devices, count, timing, note=share, bytes=96 * n))
        del bases


def _row(op: str, case: str, used: int, count: int, timing: Timing, **values: Any) -> Row:
    """Return the row of a case on one device, or on all `count`."""
    runner = OURS if used == count > 1 else DEVICE
    op = op if used == count else f"{op} on one device"
    row = Row("scale", op, f"{case}, {count} devices", runner, f"{used} device{'s' * (used > 1)}")
    return replace(row.timed(timing), **values)


class Key:
    """A key with known tau and witnesses, in a folder that goes with it; made at the first use.

    Attributes:
        name: of its circuit.
        zkey, witnesses: its files.
        verification_key: the verification key.
    """

    def __init__(self, constraints: int, witnesses: int = 4) -> None:
        self.name, self._constraints = f"groth16 {constraints:,} constraints", constraints
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self.zkey, self.witnesses = folder / "circuit.zkey", [folder / f"{i}.wtns" for i in range(witnesses)]

    @functools.cached_property
    def verification_key(self) -> VerificationKey:
        """The verification key, once all files are written."""
        circuit = Circuit(self._constraints)
        setup_with_known_tau(circuit.constraints, self.zkey)
        for i, path in enumerate(self.witnesses):
            write_wtns(path, circuit.constraints.family, circuit.witness(i))
        return VerificationKey.from_zkey(self.zkey)

    def check(self, proof: Proof) -> None:
        """Raise AccelerantError for a proof that does not verify."""
        if proof.public is None or not verify(self.verification_key, proof.public, proof):
            raise AccelerantError(f"{self.name}: a proof does not verify")


def measure_proof(key: Key, steps: int, count: int, run: SuiteRun) -> None:
    """Measure one proof at a time with the key ready, on one device and shared by `count`."""
    run.progress(f"scale: a key for {key.name}")
    _ = key.verification_key
    alone = 0.0
    for devices in dict.fromkeys((1, count)):
        if devices > 1 and not run.gpu:
            run.record.notes.append(
                "the CPU computes a proof with all its cores: there is no second device to share it"
            )
            break
        run.progress(f"scale: a proof on {devices} devices")
        names = _devices(run, devices)
        prover = Prover(key.zkey, device=names if devices > 1 else names[0])
        for path in key.witnesses[:2]:
            key.check(prover.prove(path))
        timing = _timed(functools.partial(prover.prove, key.witnesses[1]), steps)
        alone = alone or timing.p50_ms
        stages = ", ".join(
            f"{name} {1e3 * s:.2f}" for name, s in prover.timings.items() if s and not name.startswith("key: ")
        )
        share = f"{timing.p50_ms / alone:.3f} of the time on one; " if devices > 1 else ""
        target = _PROOF_X * alone if devices == 2 and run.is_model("H200") else None
        run.add(_row("proof", key.name, devices, count, timing, note=f"{share}ms: {stages}", target=target))


def measure_many(key: Key, proofs: int, count: int, run: SuiteRun) -> None:
    """Measure the time for each of many proofs, by one worker and by `count`, each with a device."""
    run.progress(f"scale: a key for {key.name}")
    _ = key.verification_key
    alone = 0.0
    for workers in dict.fromkeys((1, count)):
        run.progress(f"scale: {proofs * workers} proofs by {workers} workers")
        ms = _each_ms(key, proofs * workers, workers, run)
        alone = alone or ms
        share = f"{alone / ms:.3f} times the proofs of one; " if workers > 1 else ""
        target = alone / _MANY_X if workers == 2 and run.is_model("H200") else None
        note = f"{share}{proofs * workers} proofs, a worker for each device"
        run.add(_row("many proofs", key.name, workers, count, Timing.of([ms]), note=note, target=target))


def _each_ms(key: Key, proofs: int, workers: int, run: SuiteRun) -> float:
    """Return the time for each proof while all workers are at work."""
    items = [str(key.witnesses[i % len(key.witnesses)]) for i in range(proofs)]
    found, times = [], []
    with tempfile.TemporaryDirectory() as meeting:
        jobs = run_jobs(
            functools.partial(_prover, str(key.zkey), meeting, workers), items, backend=run.device.backend,
            devices=workers, workers=workers, threads=2,
        )  # fmt: skip
        for outcome in jobs:
            if outcome.error is not None:
                raise outcome.error
            times.append(time.perf_counter())
            found.append(outcome.value)
    for texts in found:
        key.check(Proof.from_json(*texts))
    return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


def _prover(zkey: str, meeting: str, workers: int) -> Callable[[str], tuple[str, str]]:
    """Return the function of a worker, proof.json and public.json of a witness, once all workers have the key."""
    prover = Prover(zkey, device=settings().backend)
    Path(meeting, str(os.getpid())).touch()
    end = time.monotonic() + _PATIENCE_S
    while len(os.listdir(meeting)) < workers:
        if time.monotonic() > end:
            raise AccelerantError(f"not all of {workers} workers were ready within {_PATIENCE_S:g} s")
        time.sleep(0.01)

    def prove(witness: str) -> tuple[str, str]:
        proof = prover.prove(witness)
        return proof.to_json(), proof.public_json()

    return prove


# --- jobs ------------------------------------------------------------------------------------------------------------

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
