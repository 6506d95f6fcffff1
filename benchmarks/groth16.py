"""Groth16 proofs on BN254: with the key kept ready, from files, and what memory they take; snarkjs beside.

Circuits are made up (groth16_circuit.py), their keys by who knows tau. A case has

    proof         by a Prover that has read the key: witnesses that it has not seen, from files, each once
    stage, span   what that goes to: stages on the host's clock, spans on the device's, which overlap
    many          the same by Prover.prove_many, for each proof
    key           reading the key, once for a Prover; kernels are loaded
    command       `accelerant zk prove` as a process, from its start to its end
    memory        of reading the key and a proof, over that of a process that has made a small proof
    first proof   the command with an empty cache of kernels; of the first case

Each proof is verified before its time counts, and the command's by snarkjs too where it is there, as snarkjs's is by
us. It has no prover that stays, so its command stands beside both. Processes run in turns, ours and snarkjs's.
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
from typing import Any

from accelerant.algebra.field.llvm_kernels import host_form
from accelerant.algebra.field.parameters import field_of
from accelerant.bench.journal import Journal
from accelerant.bench.pieces import Piece, Progress, measure_pieces
from accelerant.bench.record import Environment, Record, Row
from accelerant.bench.timer import Timing
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime.provider import ComputeDevice
from accelerant.zk.formats import write_wtns
from accelerant.zk.groth16 import Proof, Prover, VerificationKey, verify
from accelerant.zk.groth16.setup import setup_with_known_tau
from benchmarks import groth16_memory
from benchmarks.groth16_circuit import Circuit
from benchmarks.groth16_process import Ran, Snarkjs, accelerant, environment, find_snarkjs, run

__all__ = ["CONSTRAINTS", "PEERS", "check_peers", "key_of", "measure", "run_suite"]

CONSTRAINTS = (1_000, 32_701, 131_001, 1_048_001)
"""Of the cases, by default: with public inputs and all a little below powers of two, as domains are."""

PEERS = ("snarkjs",)

_TARGETS_OF = "H200"
_WARM_MS = {131_001: 12.0, 1_048_001: 40.0}
"""Constraints -> a proof to reach on an H200, self-verification apart."""

_WARM_CPU_X = {"vector": 10.0, "scalar": 5.0}
"""Form of field arithmetic -> of snarkjs's CPU time; "vector" is AVX512-IFMA."""

_COMMAND_CPU_X = 5.0
_AIMED = 32_701
"""Constraints from which on aims on a CPU and for memory hold: below, both programs spend their time on starting."""

_MEMORY_X = 2.0
_FIRST_MS = 3000.0
_SMALL = 1_000
"""Constraints of the circuit that warms a process up where memory is looked at."""

_LIMIT_S = 1800.0
"""Of one process: snarkjs takes minutes for a million constraints."""

_LARGE = 1 << 18
_LARGE_RUNS = 2
"""Runs of processes of so many constraints and more, at most."""


def run_suite(device: ComputeDevice, **options: Any) -> Record:
    """A record of its own; see measure."""
    record = Record(Environment.of(device))
    measure(record, device, **options)
    record.conclude()
    return record


def check_peers(against: Sequence[str]) -> None:
    """Refuse names that no peer has.

    Raises:
        ConfigError: lists those that there are.
    """
    for name in against:
        if name not in PEERS:
            raise ConfigError(f"--against: no peer {name!r}; there are {', '.join(PEERS)}, or none")


def key_of(constraints: int) -> str:
    """How the cases of a circuit begin."""
    return f"{constraints:,} constraints"


def measure(
    record: Record,
    device: ComputeDevice,
    *,
    constraints: Sequence[int] = CONSTRAINTS,
    against: Sequence[str] = PEERS,
    snarkjs: Path | None = None,
    runs: int = 5,
    journal: Journal | None = None,
    until: float | None = None,
    progress: Progress = lambda _: None,
) -> None:
    """Measure into a record.

    Args:
        record: gets rows.
        device: where proofs are made.
        constraints: of each circuit.
        against: of PEERS.
        snarkjs: its cli.cjs, or a program; looked for if not given.
        runs: proofs and processes behind each figure, 2 at least.
        journal: gets the rows of a circuit as soon as they are there; those that it has are left out.
        until: the time of time.monotonic() after which no further circuit is begun.
        progress: told what is measured next.

    Raises:
        ConfigError: another peer.
        AccelerantError: a proof was wrong; the other circuits were measured.
    """
    check_peers(against)
    peer = find_snarkjs(snarkjs) if "snarkjs" in against else None
    with tempfile.TemporaryDirectory() as folder:
        pieces = [
            Piece("groth16", key_of(n), functools.partial(_case, _Case(n, i == 0, device, Path(folder), runs, peer)))
            for i, n in enumerate(constraints)
        ]
        measure_pieces(record, pieces, journal=journal, until=until, progress=progress)


@dataclass(frozen=True, slots=True)
class _Case:
    """A circuit on a device.

    Attributes:
        constraints: of it.
        first: whether first proofs are measured with it.
        device: where.
        root: a folder for files.
        runs: behind each figure.
        peer: snarkjs; None where it was not asked for.
    """

    constraints: int
    first: bool
    device: ComputeDevice
    root: Path
    runs: int
    peer: Snarkjs | None

    @property
    def gpu(self) -> bool:
        return self.device.torch_device.startswith("cuda")

    @property
    def place(self) -> str:
        return f"cuda:{self.device.index}" if self.gpu else "cpu"

    @property
    def folder(self) -> Path:
        return self.root / str(self.constraints)

    @property
    def zkey(self) -> Path:
        return self.folder / "circuit.zkey"

    def witness(self, i: int) -> Path:
        """The file of a witness."""
        return self.folder / f"witness-{i}.wtns"

    @property
    def process_runs(self) -> int:
        return min(self.runs, _LARGE_RUNS) if self.constraints >= _LARGE else self.runs

    def env(self, **more: str) -> dict[str, str]:
        return environment(self.device.backend, self.root, **more)

    def aimed(self, aim: float) -> float | None:
        """What is to be reached, where anything is."""
        return aim if self.constraints >= _AIMED else None

    def row(self, op: str, what: str = "", **values: Any) -> Row:
        """One of ours, without its figures."""
        base = Row("groth16", op, key_of(self.constraints) + what, "accelerant", "own kernels")
        return replace(base, **values)


def _case(this: _Case, record: Record, progress: Progress) -> None:
    _files(this, record, progress)
    try:
        processes = _Processes(this, progress)
        _warm(this, record, progress, processes)
        processes.report(record)
        _memory(this, record, progress)
        if this.first:
            _first_proof(this, record, progress)
    finally:
        for path in this.folder.iterdir():  # a million constraints are a gigabyte
            path.unlink()


def _files(this: _Case, record: Record, progress: Progress, count: int | None = None) -> None:
    """Key, witnesses and verification key of a circuit."""
    named = key_of(this.constraints)
    progress(f"groth16: {named}: circuit")
    this.folder.mkdir(exist_ok=True)
    circuit = Circuit(this.constraints)
    began = time.perf_counter()
    setup_with_known_tau(circuit.constraints, this.zkey, progress=lambda part: progress(f"groth16: {named}: {part}"))
    took = time.perf_counter() - began
    for i in range(2 * this.runs + 2 if count is None else count):
        progress(f"groth16: {named}: witness {i + 1}")
        write_wtns(this.witness(i), circuit.constraints.family, circuit.witness(i))
    (this.folder / "key.json").write_text(VerificationKey.from_zkey(this.zkey).to_json(), encoding="utf-8")
    if count is None:
        record.notes.append(f"{named}: a key of {this.zkey.stat().st_size / 2**20:.3g} MiB, made in {took:.3g} s")


# --- a prover that has read the key ----------------------------------------------------------------------------------


def _warm(this: _Case, record: Record, progress: Progress, processes: _Processes) -> None:
    named = key_of(this.constraints)
    progress(f"groth16: {named}: reading the key")
    reading = []
    for _ in range(3):
        began = time.perf_counter()
        prover = Prover(this.zkey, device=this.place)
        reading.append((time.perf_counter() - began) * 1e3)
    key = _timed(this.row("key", ", read", reason=prover.explain()), reading[1:])  # the first loads kernels
    _check(this, prover.prove(this.witness(0)), prover.verification_key)
    progress(f"groth16: {named}: proofs with the key warm")
    wall, cpu, parts = [], [], list[dict[str, float]]()
    spans = list[dict[str, float]]()
    for i in range(1, this.runs + 1):
        began, spent = time.perf_counter(), time.process_time()
        proof = prover.prove(this.witness(i))
        wall.append((time.perf_counter() - began) * 1e3)
        cpu.append((time.process_time() - spent) * 1e3)
        _check(this, proof, prover.verification_key)
        parts.append({name: s * 1e3 for name, s in prover.timings.items() if not name.startswith("key: ")})
        spans.append({name: s * 1e3 for name, s in prover.spans.items()})
    apart = [all_of_it - each.get("verification", 0.0) for all_of_it, each in zip(wall, parts, strict=True)]
    fast = this.gpu and _TARGETS_OF in this.device.name
    record.rows.append(_timed(this.row("proof", ", key warm, wall"), wall))
    record.rows += processes.beside(record.rows[-1], "wall")
    target = _WARM_MS.get(this.constraints) if fast else None
    record.rows.append(_timed(this.row("proof", ", key warm, self-verification apart", target=target), apart))
    if not this.gpu:
        form = host_form(field_of("bn254_fq"))
        note = "" if form == "vector" else "no AVX512-IFMA here"
        aim = this.aimed(_WARM_CPU_X[form])
        record.rows.append(_timed(this.row("proof", ", key warm, CPU time", target_x=aim, note=note), cpu))
        record.rows += processes.beside(record.rows[-1], "cpu")
    for op, each in (("stage", parts), ("span", spans)):
        for name in each[0]:
            record.rows.append(_timed(this.row(op, f", {name}"), [one[name] for one in each if name in one]))
    record.rows.append(key)
    progress(f"groth16: {named}: many proofs")
    ahead = [this.witness(i) for i in range(this.runs + 1, 2 * this.runs + 1)]
    began = time.perf_counter()
    proofs = list(prover.prove_many(ahead))
    took = (time.perf_counter() - began) * 1e3 / len(ahead)
    for proof in proofs:
        _check(this, proof, prover.verification_key)
    record.rows.append(_timed(this.row("many", ", for each proof", note=f"{len(ahead)} witnesses"), [took]))


def _check(this: _Case, proof: Proof, key: VerificationKey) -> None:
    if proof.public is None or not verify(key, proof.public, proof):
        raise AccelerantError(f"{key_of(this.constraints)}: a proof does not verify")


def _timed(row: Row, samples: Sequence[float]) -> Row:
    """With quantiles; of one sample all the same."""
    timing = Timing.of(list(samples) * (2 if len(samples) == 1 else 1))
    return replace(row, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms, samples=tuple(samples))


# --- processes -------------------------------------------------------------------------------------------------------


class _Processes:
    """Our command and snarkjs's, in turns."""

    def __init__(self, this: _Case, progress: Progress) -> None:
        self._this = this
        self._ours: list[Ran] = []
        self._theirs: list[Ran] = []
        named, folder = key_of(this.constraints), this.folder
        self._peer = this.peer if this.peer is not None and not this.peer.missing else None
        self._out = {who: (folder / f"{who}-proof.json", folder / f"{who}-public.json") for who in ("our", "their")}
        progress(f"groth16: {named}: accelerant zk prove, the first time")
        self._prove()
        for i in range(this.process_runs):
            progress(f"groth16: {named}: accelerant zk prove, {i + 1} of {this.process_runs}")
            self._ours.append(self._prove())
            if self._peer is not None:
                progress(f"groth16: {named}: snarkjs, {i + 1} of {this.process_runs}")
                files = (this.zkey, this.witness(0), *self._out["their"])
                self._theirs.append(self._snarkjs("prove", *files).checked("snarkjs groth16 prove"))
        self._judge()

    def _prove(self) -> Ran:
        files = (self._this.zkey, self._this.witness(0), *self._out["our"])
        return run(accelerant("zk", "prove", *files), _LIMIT_S, self._this.env()).checked("accelerant zk prove")

    def _snarkjs(self, what: str, *files: Path) -> Ran:
        command = self._peer.command if self._peer is not None else ()
        return run([*command, "groth16", what, *map(str, files)], _LIMIT_S)

    def _judge(self) -> None:
        """Our proof by them, theirs by us."""
        key, named = self._this.folder / "key.json", key_of(self._this.constraints)
        for who, (proof, public) in self._out.items():
            if who == "their" and self._peer is None:
                continue
            parsed = Proof.from_json(proof.read_text(), public.read_text())
            _check(self._this, parsed, VerificationKey.from_json(key.read_text()))
        if self._peer is not None and self._snarkjs("verify", key, *reversed(self._out["our"])).status:
            raise AccelerantError(f"{named}: snarkjs does not accept our proof")

    def report(self, record: Record) -> None:
        """Rows of the command."""
        for kind, what, aim in (("wall", "wall", None), ("cpu", "CPU time", _COMMAND_CPU_X)):
            target = None if aim is None or self._this.gpu else self._this.aimed(aim)
            row = self._this.row("command", f", {what}", target_x=target)
            note = "accepted by snarkjs groth16 verify" if self._peer is not None else ""
            record.rows.append(_timed(replace(row, note=note), [getattr(ran, f"{kind}_ms") for ran in self._ours]))
            record.rows += self.beside(record.rows[-1], kind)

    def beside(self, row: Row, kind: str) -> list[Row]:
        """The peer in a case; nothing where it was not asked for."""
        peer = self._this.peer
        if peer is None:
            return []
        version = peer.version or "snarkjs"
        theirs = Row(row.suite, row.op, row.case, "snarkjs", version, note=peer.missing or "its command, whole")
        return [_timed(theirs, [getattr(ran, f"{kind}_ms") for ran in self._theirs]) if self._theirs else theirs]


# --- memory, and first proofs ----------------------------------------------------------------------------------------


def _memory(this: _Case, record: Record, progress: Progress) -> None:
    """Beside twice the key's size; on a GPU the device's memory and the host's."""
    progress(f"groth16: {key_of(this.constraints)}: memory")
    size = this.zkey.stat().st_size
    ours = this.row("memory", ", host", unit="MiB", target=this.aimed(_MEMORY_X * size / 2**20))
    if not sys.platform.startswith("linux"):
        record.rows.append(replace(ours, note="only Linux's kernel counts it as it is counted here"))
        return
    small = replace(this, constraints=_SMALL, root=this.root / "small")
    small.root.mkdir(exist_ok=True)
    _files(small, record, lambda _: None, count=1)
    files = (small.zkey, small.witness(0), this.zkey, this.witness(0))
    program = [sys.executable, "-P", str(Path(groth16_memory.__file__)), this.place, *map(str, files)]
    found = []
    for _ in range(min(3, this.process_runs)):
        ran = run(program, _LIMIT_S, this.env()).checked("the proof whose memory is counted")
        found.append(json.loads(ran.output.splitlines()[-1]))  # warnings come before

    def row(of: Row, name: str, note: str) -> Row:
        values = [max(each[name], 1) / 2**20 for each in found]
        times = f"{statistics.median(values) * 2**20 / size:.2f} times the key"
        return replace(_timed(of, values), note="; ".join(filter(None, (times, note))))

    anonymous = statistics.median(each["anonymous"] for each in found) / size
    base = statistics.median(each["base"] for each in found) / 2**20
    note = f"{anonymous:.2f} without pages of files; over {base:.0f} MiB that a small proof leaves"
    record.rows.append(row(replace(ours, target=None if this.gpu else ours.target), "peak", note))
    if this.gpu:
        record.rows.append(row(this.row("memory", ", device", unit="MiB", target=ours.target), "device", ""))


def _first_proof(this: _Case, record: Record, progress: Progress) -> None:
    """With an empty cache: what compiling takes."""
    samples: dict[str, list[float]] = {"wall": [], "CPU time": []}
    for i in range(min(3, this.runs)):
        progress(f"groth16: first proof, empty cache, {i + 1}")
        with tempfile.TemporaryDirectory() as cache:
            files = (this.zkey, this.witness(0), this.folder / "first.json", this.folder / "public.json")
            env = this.env(ACCELERANT_CACHE_DIR=cache, CUDA_CACHE_PATH=cache)
            ran = run(accelerant("zk", "prove", *files), _LIMIT_S, env).checked("accelerant zk prove")
        samples["wall"].append(ran.wall_ms)
        samples["CPU time"].append(ran.cpu_ms)
    for name, times in samples.items():
        target = _FIRST_MS if name == "wall" else None
        record.rows.append(_timed(this.row("first proof", f", empty cache, {name}", target=target), times))
