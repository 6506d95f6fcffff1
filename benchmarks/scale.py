"""Several processes and devices: what training, decoding and proofs gain from them, beside the cost model.

torch's elastic launcher starts each number of processes for each case of scale_work.py. Predictions come from the
collectives measured in the same run (scale_model.py), so the case `collectives` comes first.

A shared proof and a shared sum are launched on all devices by one process; many proofs have a worker process for each
device, as `accelerant zk prove-many`, and jobs of 10 ms, beside Ray's own tasks, show what handing them out costs. Sums
are compared with the multiple of the generator that Python's integers give, and every proof is verified, before a time
counts.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

import accelerant
from accelerant.bench.record import DEVICE, OURS, Row
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, check_names, option
from accelerant.bench.timer import Timing
from accelerant.cli.bench import run_command
from accelerant.config import settings
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime.host import usable_cores
from accelerant.runtime.jobs import run_jobs
from accelerant.runtime.memory.limits import size_text
from accelerant.runtime.provider import ComputeDevice
from accelerant.zk import curve as curve_named
from accelerant.zk.formats import write_wtns
from accelerant.zk.groth16 import Proof, Prover, VerificationKey, verify
from accelerant.zk.groth16.setup import setup_with_known_tau
from accelerant.zk.multi_scalar import FixedBase
from benchmarks.groth16_circuit import Circuit
from benchmarks.model import MODELS
from benchmarks.scale_model import Costs, outlook
from benchmarks.zk_inputs import msm_answer, msm_points, msm_scalars

__all__ = ["CASES", "ScaleSuite", "rows"]

CASES = ("collectives", "data", "tensor", "context", "sharded", "proof", "many", "msm", "jobs")

_PROGRAM = "benchmarks.scale_work"


@dataclass(frozen=True)
class ScaleSuite(Suite):
    """Measure training, decoding, attention and proofs over several devices of this host; predict up to 1,024."""

    name = "scale"
    examples: ClassVar[tuple[str, ...]] = (
        "", "--case collectives --case data --batch 32 --batch 4",
        "--processes 1 --processes 2 --parameters 14M --device cpu",
    )  # fmt: skip

    case: tuple[str, ...] | None = option(None, f"Of {', '.join(CASES)}; by default all.")
    processes: tuple[str, ...] | None = option(
        None, "Numbers of processes. By default 2, 4, 8, as many as there are GPUs; on a CPU 2.",
    )  # fmt: skip
    parameters: str | None = option(
        None, f"Of the GPT, of {', '.join(MODELS)}. By default 124M; on a CPU 0.5M.", metavar="SIZE"
    )
    batch: tuple[str, ...] | None = option(
        None, "Sequences of each process of the GPT. By default 32 and 4; on a CPU 4."
    )
    against: tuple[str, ...] = option(("torch",), "torch (DistributedDataParallel, FSDP2, compiled on a GPU), or none.")
    log_points: int | None = option(None, "Log2 of msm's points. By default 26; on a CPU 10.", min=1, max=28)
    constraints: int | None = option(None, "Of the proofs. By default 1048001; on a CPU 500.", min=1)
    proofs: int | None = option(None, "Proofs of each worker. By default 150; on a CPU 4.", min=2)
    steps: int = option(20, "Samples behind each figure.", min=3)

    max_seconds_each: float = option(600.0, "Seconds that each case may take with a number of processes.", min=1.0)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with the device's defaults; ConfigError for an unknown name or too many processes."""
        check_names("--case", "case", self.case or (), CASES)
        check_names("--against", "peer", self.against, ("torch",))
        check_names("--parameters", "size", [self.parameters] if self.parameters else [], tuple(MODELS))
        gpu = device.torch_device.startswith("cuda")
        most = torch.cuda.device_count() if gpu else 64
        given = self.processes or [str(n) for n in (2, 4, 8) if n <= (most if gpu else 2)] or ["1"]
        if not all(text.isdecimal() and 1 <= int(text) <= most for text in given):
            raise ConfigError(f"--processes: wanted numbers from 1 to {most}, got {','.join(given)}")
        batch = self.batch or (("32", "4") if gpu else ("4",))
        if not all(text.isdecimal() and int(text) for text in batch):
            raise ConfigError(f"--batch: wanted numbers from 1 on, got {','.join(batch)}")
        return replace(
            self, processes=tuple(given), parameters=self.parameters or ("124M" if gpu else "0.5M"), batch=batch,
            log_points=self.log_points or (26 if gpu else 10), proofs=self.proofs or (150 if gpu else 4),
            constraints=self.constraints or (1_048_001 if gpu else 500),
        )  # fmt: skip

    def prepare(self, run: SuiteRun) -> None:
        """Measure the copy rate."""
        run.require_ceiling("copy")

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each number of processes, collectives first: the predictions need them."""
        counts = sorted({int(text) for text in self.processes or ()})
        measures: dict[str, Callable[[int, SuiteRun], None]] = {
            name: functools.partial(self._launch, name) for name in CASES[:5]
        }
        key = _Key(self.constraints or 1)
        measures |= {
            "msm": functools.partial(_msm, self.log_points or 1, self.steps),
            "proof": functools.partial(_proof, key, self.steps),
            "many": functools.partial(_many, key, self.proofs or 2),
        }
        measures["jobs"] = _jobs
        return [
            SuiteCase(f"{name}, {count} processes", functools.partial(measures[name], count))
            for name in CASES
            for count in counts
            if name in (self.case or CASES) and not (name == "collectives" and count == 1)
        ]

    def measure(self, run: SuiteRun) -> None:
        """Measure all cases; add the fitted costs."""
        try:
            super().measure(run)
        finally:
            costs = _costs(run)
            backend = "nccl" if run.gpu else "gloo"
            if costs is not None:
                run.record.notes += [
                    f"{op} by {backend}: {link.latency_ms * 1e3:.1f} us a message, {link.bytes_per_ms / 1e6:.3g} GB/s"
                    for op, link in costs.links.items()
                ]
                run.record.notes.append(f"a hidden all_reduce slows computation down by {costs.lost:.2f} of its time")

    def _launch(self, name: str, count: int, run: SuiteRun) -> None:
        """Measure a case in so many processes, and add its rows, also those before a failure."""
        run.progress(f"scale: {name} in {count} processes")
        settings: dict[str, Any] = {
            "case": name, "gpu": run.gpu, "steps": self.steps, "peer": "torch" in self.against,
            "parameters": self.parameters, "batch": [int(text) for text in self.batch or ()],
        }  # fmt: skip
        found, error = _launched(count, settings, self.max_seconds_each)
        run.add(*rows(found, count, run))
        if error is not None:
            raise error


def rows(found: Sequence[Mapping[str, Any]], count: int, run: SuiteRun) -> list[Row]:
    """Return the rows that rank 0 of `count` processes wrote, and a prediction beside those that have one.

    Besides fields of a Row a result may have `tokens` of a process, the time `alone_ms` of one device and what it is
    `than`, the speeds to reach, `aim` in those of one device and `aim_x` in torch's, and of `predict` the step's kind
    and facts; `outlook` if these are to be predicted for more processes.
    """
    costs = None if count == 1 else _costs(run)
    on_h200 = count == 2 and run.is_model("H200")
    made = []
    for one in found:
        fields = {name: one[name] for name in ("unit", "bytes", "error", "peak_bytes") if one.get(name) is not None}
        row = Row("scale", one["op"], f"{one['case']}, {count} processes", one["runner"], one["implementation"])
        row = replace(row, **fields).timed(timing := Timing.of(one["samples"]))
        alone: Any = one.get("alone_ms")
        notes = [one.get("note")]
        if than := one.get("than"):
            notes.append(f"{alone / timing.p50_ms:.3f} of the speed {than}")
        if tokens := one.get("tokens"):
            notes.append(f"{1e3 * tokens / timing.p50_ms:,.0f} tokens/s a process")
        if row.peak_bytes:
            notes.append(f"{size_text(row.peak_bytes)} at the peak")
        row = replace(row, note="; ".join(filter(None, notes)))
        if on_h200 and one.get("aim"):
            row = replace(row, target=alone / one["aim"])
        if on_h200 and one.get("aim_x"):
            row = replace(row, target_x=one["aim_x"])
        made.append(row)
        if costs is None or not one.get("predict"):
            continue
        kind, facts = one["predict"]
        ms = costs.predicted_ms(kind, alone_ms=alone, processes=count, **facts)
        note = f"{ms / timing.p50_ms:.3f} of the measured time"
        predicted = Row("scale", f"predicted {row.op}", row.case, DEVICE, "cost model", note=note)
        made.append(replace(predicted, p20=ms, p50=ms, p80=ms))
        if one.get("outlook"):
            run.record.notes += [f"{row.case}: {note}" for note in outlook(alone, costs=costs, **facts)]
    peaks = {row.op: row.peak_bytes for row in made if row.runner == "torch"}
    return [replace(row, target_bytes=peaks.get(row.op)) if row.target_x else row for row in made]


def _costs(run: SuiteRun) -> Costs | None:
    return Costs.of(run.record.rows, run.record.ceilings.get("copy GB/s"))


# --- processes -------------------------------------------------------------------------------------------------------


def _launched(
    processes: int, settings: Mapping[str, Any], limit_s: float
) -> tuple[list[dict[str, Any]], AccelerantError | None]:
    """Return what rank 0 of so many processes measured, and the error that ended them."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.jsonl"
        command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        roots = [str(Path(each).absolute().parents[1]) for each in (__file__, accelerant.__file__)]
        paths = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])
        threads = {} if settings["gpu"] else {"OMP_NUM_THREADS": str(max(1, usable_cores() // processes))}
        done = subprocess.Popen(
            [*command, "-m", _PROGRAM, json.dumps(settings), str(out)], text=True, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **threads, "PYTHONPATH": paths},
        )  # fmt: skip
        error = None
        try:
            _, said = done.communicate(timeout=limit_s)
        except BaseException as reason:  # Ctrl-C, too, which does not reach another session
            done.terminate()  # the launcher ends its processes
            done.communicate()
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
            error = AccelerantError(f"{processes} processes did not end within {limit_s:g} s")
        else:
            if done.returncode:
                lines = [line for line in said.splitlines() if "Error" in line] or said.splitlines()
                error = AccelerantError(
                    f"{processes} processes ended with status {done.returncode}: {' '.join(lines[:2])}"
                )
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
        return [json.loads(line) for line in lines], error


# --- sums of points and proofs ---------------------------------------------------------------------------------------

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


def _msm(log_n: int, steps: int, count: int, run: SuiteRun) -> None:
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


class _Key:
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


def _proof(key: _Key, steps: int, count: int, run: SuiteRun) -> None:
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
        prover = Prover(key.zkey, devices=names)
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


def _many(key: _Key, proofs: int, count: int, run: SuiteRun) -> None:
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


def _each_ms(key: _Key, proofs: int, workers: int, run: SuiteRun) -> float:
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


def _jobs(count: int, run: SuiteRun) -> None:
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


if __name__ == "__main__":
    run_command(ScaleSuite)
