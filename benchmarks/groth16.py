"""Groth16 proofs on BN254 compared with those of snarkjs: with the key kept ready, from files, and their memory.

    python -m benchmarks.groth16 --constraints 32701

Circuits are generated (groth16_circuit.py), their keys made from a known tau. A case has

    proof         by a Prover that has read the key: new witnesses from files, each once
    stage, span   its parts: stages on the host's clock, spans on the device's, which overlap
    many          proofs by Prover.prove_many, the time of each
    key           reading the key, once for a Prover; kernels are loaded
    command       `accelerant zk prove` as a process, from its start to its end
    memory        of reading the key and a proof, above that of a process that has made a small proof
    first proof   the command with an empty cache of kernels; of the first case

Each proof is verified before its time counts, the command's by snarkjs too where it is installed, and snarkjs's by us.
snarkjs has no prover that keeps the key, so its command is the peer of both. The processes take turns.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from accelerant.algebra.field.llvm_kernels import host_form
from accelerant.algebra.field.parameters import field_of
from accelerant.bench.record import Row
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, check_names, option
from accelerant.bench.timer import Timing, threads_text
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError
from accelerant.runtime.provider import ComputeDevice
from accelerant.zk.formats import write_wtns
from accelerant.zk.groth16 import Proof, Prover, VerificationKey, verify
from accelerant.zk.groth16.setup import setup_with_known_tau
from benchmarks import groth16_memory
from benchmarks.groth16_circuit import Circuit
from benchmarks.groth16_process import FinishedProcess, Snarkjs, accelerant, environment, find_snarkjs, run

__all__ = ["Groth16Suite", "case_name"]

_WARM_MS = {131_001: 12.0, 1_048_001: 40.0}
"""Target of a proof on an H200 without self-verification, by constraints."""

_WARM_CPU_X = {"vector": 10.0, "scalar": 5.0}
"""Target as a multiple of snarkjs's speed in CPU time, by the form of field arithmetic; "vector" is AVX512-IFMA."""

_COMMAND_CPU_X = 5.0
_AIMED = 32_701
"""Least constraints for targets on a CPU and of memory: with fewer, both programs mostly start."""

_MEMORY_X = 2.0
_FIRST_MS = 3000.0
_SMALL = 1_000
"""Constraints of the proof that warms a process up before its memory is counted."""

_LIMIT_S = 1800.0
"""Limit of one process: snarkjs takes minutes for a million constraints."""

_LARGE = 1 << 18
_LARGE_RUNS = 2
"""Most runs of processes from _LARGE constraints on."""


def case_name(constraints: int) -> str:
    """Return the text that the cases of a circuit begin with."""
    return f"{constraints:,} constraints"


@dataclass(frozen=True)
class Groth16Suite(Suite):
    """Measure Groth16 proofs: the key warm, by stages; the command from files; memory; snarkjs on the same files."""

    name = "groth16"
    examples = (
        "--constraints 1000 --constraints 32701",
        "--device cpu --against none --json",
        "--against snarkjs --snarkjs node_modules/snarkjs/build/cli.cjs --out folder",
    )

    constraints: tuple[int, ...] = option(
        (1_000, 32_701, 131_001, 1_048_001),
        "Constraints of a circuit; may be repeated. With public inputs they are a little below powers of two, as "
        "domains are.",
        metavar="N", min=1,
    )  # fmt: skip
    against: tuple[str, ...] = option(("snarkjs",), "snarkjs, or none. Where it is absent its rows say so.", same=True)
    snarkjs: Path | None = option(  # noqa: RUF009 - a dataclass field
        None, "snarkjs's cli.cjs, or its program; by default a checkout's or the one on PATH.", metavar="FILE"
    )
    runs: int = option(5, "Proofs, and processes, behind each figure.", min=2, same=True)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite; raises ConfigError for an unknown peer."""
        check_names("--against", "peer", self.against, ("snarkjs",))
        return self

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each circuit."""
        return [
            SuiteCase(case_name(n), functools.partial(self._measure, n, first=i == 0))
            for i, n in enumerate(self.constraints)
        ]

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of one of the circuits."""
        return row.suite == self.name and any(row.case.startswith(f"{case_name(n)},") for n in self.constraints)

    def _measure(self, constraints: int, run: SuiteRun, *, first: bool) -> None:
        peer = find_snarkjs(self.snarkjs) if "snarkjs" in self.against else None
        with tempfile.TemporaryDirectory() as folder:
            _measure_circuit(_CircuitRun(constraints, first, run, Path(folder), self.runs, peer, self.cpu and run.gpu))


@dataclass(frozen=True, slots=True)
class _CircuitRun:
    """A circuit being measured.

    Attributes:
        first: first proofs are measured with it.
        root: a folder for files.
        runs: proofs and processes behind each figure.
        peer: None where snarkjs was not requested.
        cpu: add the CPU column.
    """

    constraints: int
    first: bool
    run: SuiteRun
    root: Path
    runs: int
    peer: Snarkjs | None
    cpu: bool = False

    @property
    def name(self) -> str:
        return case_name(self.constraints)

    @property
    def device_name(self) -> str:
        return f"cuda:{self.run.device.index}" if self.run.gpu else "cpu"

    @property
    def folder(self) -> Path:
        return self.root / str(self.constraints)

    @property
    def zkey(self) -> Path:
        return self.folder / "circuit.zkey"

    def witness(self, i: int) -> Path:
        """Return the file of a witness."""
        return self.folder / f"witness-{i}.wtns"

    @property
    def process_runs(self) -> int:
        return min(self.runs, _LARGE_RUNS) if self.constraints >= _LARGE else self.runs

    def env(self, **more: str) -> dict[str, str]:
        return environment(self.run.device.backend, self.root, **more)

    def aimed(self, target: float) -> float | None:
        """Return a target, or None where the circuit is too small to have one."""
        return target if self.constraints >= _AIMED else None

    def progress(self, text: str) -> None:
        self.run.progress(f"groth16: {self.name}: {text}")

    def row(self, op: str, variant: str = "", **values: Any) -> Row:
        """Return a row of ours without its figures."""
        return replace(Row("groth16", op, self.name + variant, "accelerant", "own kernels"), **values)

    def check(self, proof: Proof, key: VerificationKey) -> None:
        """Raise AccelerantError for a proof that does not verify."""
        if proof.public is None or not verify(key, proof.public, proof):
            raise AccelerantError(f"{self.name}: a proof does not verify")


def _measure_circuit(this: _CircuitRun) -> None:
    _write_files(this)
    try:
        processes = _Processes(this)
        _measure_warm(this, processes)
        processes.add_rows()
        _measure_memory(this)
        if this.first:
            _measure_first_proof(this)
    finally:
        for path in this.folder.iterdir():  # a million constraints take a gigabyte
            path.unlink()


def _write_files(this: _CircuitRun, count: int | None = None) -> None:
    """Write the key, witnesses and verification key of a circuit; `count` is the number of witnesses."""
    this.progress("circuit")
    this.folder.mkdir(exist_ok=True)
    circuit = Circuit(this.constraints)
    began = time.perf_counter()
    setup_with_known_tau(circuit.constraints, this.zkey, progress=this.progress)
    took = time.perf_counter() - began
    for i in range(2 * this.runs + 2 if count is None else count):
        this.progress(f"witness {i + 1}")
        write_wtns(this.witness(i), circuit.constraints.family, circuit.witness(i))
    (this.folder / "key.json").write_text(VerificationKey.from_zkey(this.zkey).to_json(), encoding="utf-8")
    if count is None:
        size = this.zkey.stat().st_size / 2**20
        this.run.record.notes.append(f"{this.name}: a key of {size:.3g} MiB, made in {took:.3g} s")


# --- a prover that has read the key ----------------------------------------------------------------------------------


def _measure_warm(this: _CircuitRun, processes: _Processes) -> None:
    """Measure reading the key, proofs with the key warm by stages and spans, and many proofs."""
    run = this.run
    this.progress("reading the key")
    reading = []
    for _ in range(3):
        began = time.perf_counter()
        prover = Prover(this.zkey, device=this.device_name)
        reading.append((time.perf_counter() - began) * 1e3)
    key = _timed(this.row("key", ", read", reason=prover.explain()), reading[1:])  # the first loads kernels
    this.check(prover.prove(this.witness(0)), prover.verification_key)
    this.progress("proofs with the key warm")
    wall, cpu = [], []
    stages, spans = list[dict[str, float]](), list[dict[str, float]]()
    for i in range(1, this.runs + 1):
        began, spent = time.perf_counter(), time.process_time()
        proof = prover.prove(this.witness(i))
        wall.append((time.perf_counter() - began) * 1e3)
        cpu.append((time.process_time() - spent) * 1e3)
        this.check(proof, prover.verification_key)
        timings = {name: s * 1e3 for name, s in prover.timings.items() if not name.startswith("key: ")}
        timings.pop("compile")  # 0: the kernels are loaded
        stages.append(timings)
        spans.append({name: s * 1e3 for name, s in prover.spans.items()})
    row = _timed(this.row("proof", ", key warm, wall"), wall)
    if this.cpu:
        row = replace(row, cpu_ms=_cpu_proof_ms(this), cpu_note=f"key warm, {threads_text()}")
    run.add(row, *processes.peer_rows(row, "wall"))
    target = _WARM_MS.get(this.constraints) if run.is_model("H200") else None
    apart = [ms - stage.get("verification", 0.0) for ms, stage in zip(wall, stages, strict=True)]
    run.add(_timed(this.row("proof", ", key warm, self-verification apart", target=target), apart))
    if not run.gpu:
        form = host_form(field_of("bn254_fq"))
        note = "" if form == "vector" else "no AVX512-IFMA here"
        row = this.row("proof", ", key warm, CPU time", target_x=this.aimed(_WARM_CPU_X[form]), note=note)
        run.add(_timed(row, cpu), *processes.peer_rows(row, "cpu"))
    for op, samples in (("stage", stages), ("span", spans)):
        for name in samples[0]:
            run.add(_timed(this.row(op, f", {name}"), [sample[name] for sample in samples if name in sample]))
    run.add(key)
    this.progress("many proofs")
    witnesses = [this.witness(i) for i in range(this.runs + 1, 2 * this.runs + 1)]
    began = time.perf_counter()
    proofs = list(prover.prove_many(witnesses))
    took = (time.perf_counter() - began) * 1e3 / len(witnesses)
    for proof in proofs:
        this.check(proof, prover.verification_key)
    run.add(_timed(this.row("many", ", for each proof", note=f"{len(witnesses)} witnesses"), [took]))


def _cpu_proof_ms(this: _CircuitRun) -> float:
    """Return the milliseconds of a proof of the same circuit on the CPU, the key warm."""
    this.progress("a proof on the CPU")
    prover, times = Prover(this.zkey, device="cpu"), []
    prover.prove(this.witness(0))
    for i in (1, 2):
        began = time.perf_counter()
        proof = prover.prove(this.witness(i))
        times.append((time.perf_counter() - began) * 1e3)
        this.check(proof, prover.verification_key)
    return statistics.median(times)


def _timed(row: Row, samples: Sequence[float]) -> Row:
    """Return the row with the quantiles of its samples, all the same for a single one."""
    return replace(row.timed(Timing.of(samples, wall=row.case.endswith("wall"))), samples=tuple(samples))


# --- processes -------------------------------------------------------------------------------------------------------


class _Processes:
    """Our command and snarkjs's, which take turns; each side verifies the other's proof."""

    def __init__(self, this: _CircuitRun) -> None:
        self._this = this
        self._ours: list[FinishedProcess] = []
        self._peers: list[FinishedProcess] = []
        self._peer = this.peer if this.peer is not None and not this.peer.missing else None
        self._out = {
            who: (this.folder / f"{who}-proof.json", this.folder / f"{who}-public.json") for who in ("our", "peer")
        }
        this.progress("accelerant zk prove, the first time")
        self._prove()
        for i in range(this.process_runs):
            this.progress(f"accelerant zk prove, {i + 1} of {this.process_runs}")
            self._ours.append(self._prove())
            if self._peer is not None:
                this.progress(f"snarkjs, {i + 1} of {this.process_runs}")
                files = (this.zkey, this.witness(0), *self._out["peer"])
                self._peers.append(self._snarkjs("prove", *files).checked("snarkjs groth16 prove"))
        self._verify()

    def _prove(self) -> FinishedProcess:
        files = (self._this.zkey, self._this.witness(0), *self._out["our"])
        return run(accelerant("zk", "prove", *files), _LIMIT_S, self._this.env()).checked("accelerant zk prove")

    def _snarkjs(self, command: str, *files: Path) -> FinishedProcess:
        program = self._peer.command if self._peer is not None else ()
        return run([*program, "groth16", command, *map(str, files)], _LIMIT_S)

    def _verify(self) -> None:
        key = self._this.folder / "key.json"
        for who, (proof, public) in self._out.items():
            if who == "our" or self._peer is not None:
                parsed = Proof.from_json(proof.read_text(), public.read_text())
                self._this.check(parsed, VerificationKey.from_json(key.read_text()))
        if self._peer is not None and self._snarkjs("verify", key, *reversed(self._out["our"])).status:
            raise AccelerantError(f"{self._this.name}: snarkjs does not accept our proof")

    def add_rows(self) -> None:
        """Add the rows of the commands."""
        for kind, variant, aim in (("wall", "wall", None), ("cpu", "CPU time", _COMMAND_CPU_X)):
            target = None if aim is None or self._this.run.gpu else self._this.aimed(aim)
            note = "accepted by snarkjs groth16 verify" if self._peer is not None else ""
            row = self._this.row("command", f", {variant}", target_x=target, note=note)
            times = [getattr(process, f"{kind}_ms") for process in self._ours]
            self._this.run.add(_timed(row, times), *self.peer_rows(row, kind))

    def peer_rows(self, row: Row, kind: str) -> list[Row]:
        """Return snarkjs's row in the case of one of ours; none where it was not requested."""
        peer = self._this.peer
        if peer is None:
            return []
        note = peer.missing or "its command, whole"
        theirs = Row(row.suite, row.op, row.case, "snarkjs", peer.version or "snarkjs", note=note)
        times = [getattr(process, f"{kind}_ms") for process in self._peers]
        return [_timed(theirs, times) if times else theirs]


# --- memory, and first proofs ----------------------------------------------------------------------------------------


def _measure_memory(this: _CircuitRun) -> None:
    """Measure the host's memory, and on a GPU the device's, against twice the size of the key."""
    this.progress("memory")
    size = this.zkey.stat().st_size
    ours = this.row("memory", ", host", unit="MiB", target=this.aimed(_MEMORY_X * size / 2**20))
    if not sys.platform.startswith("linux"):
        this.run.add(replace(ours, note="only Linux's kernel counts it as it is counted here"))
        return
    small = replace(this, constraints=_SMALL, root=this.root / "small")
    small.root.mkdir(exist_ok=True)
    _write_files(small, count=1)
    files = (small.zkey, small.witness(0), this.zkey, this.witness(0))
    program = [sys.executable, "-P", str(Path(groth16_memory.__file__)), this.device_name, *map(str, files)]
    counts = []
    for _ in range(min(3, this.process_runs)):
        process = run(program, _LIMIT_S, this.env()).checked("the proof whose memory is counted")
        counts.append(json.loads(process.output.splitlines()[-1]))  # warnings come before

    def counted(row: Row, name: str, note: str) -> Row:
        values = [max(count[name], 1) / 2**20 for count in counts]
        times = f"{statistics.median(values) * 2**20 / size:.2f} times the key"
        return replace(_timed(row, values), note="; ".join(filter(None, (times, note))))

    anonymous = statistics.median(count["anonymous"] for count in counts) / size
    base = statistics.median(count["base"] for count in counts) / 2**20
    note = f"{anonymous:.2f} without pages of files; over {base:.0f} MiB that a small proof leaves"
    this.run.add(counted(replace(ours, target=None if this.run.gpu else ours.target), "peak", note))
    if this.run.gpu:
        this.run.add(counted(this.row("memory", ", device", unit="MiB", target=ours.target), "device", ""))


def _measure_first_proof(this: _CircuitRun) -> None:
    """Measure the command with an empty cache, which includes compiling."""
    wall, cpu = [], []
    for i in range(min(3, this.runs)):
        this.progress(f"first proof, empty cache, {i + 1}")
        with tempfile.TemporaryDirectory() as cache:
            files = (this.zkey, this.witness(0), this.folder / "first.json", this.folder / "public.json")
            env = this.env(ACCELERANT_CACHE_DIR=cache, CUDA_CACHE_PATH=cache)
            process = run(accelerant("zk", "prove", *files), _LIMIT_S, env).checked("accelerant zk prove")
        wall.append(process.wall_ms)
        cpu.append(process.cpu_ms)
    this.run.add(_timed(this.row("first proof", ", empty cache, wall", target=_FIRST_MS), wall))
    this.run.add(_timed(this.row("first proof", ", empty cache, CPU time"), cpu))


if __name__ == "__main__":
    run_command(Groth16Suite)
