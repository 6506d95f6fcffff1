"""The suite groth16 with small circuits, its circuits, and its processes; a program stands for snarkjs."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerant.algebra.field.parameters import field_of
from accelerant.bench.record import BenchmarkRecord, Environment
from accelerant.bench.suite import SuiteRun, run_suite
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime import registry
from accelerant.zk.formats import write_wtns
from accelerant.zk.groth16 import Proof, Prover, verify
from accelerant.zk.groth16.setup import setup_with_known_tau
from benchmarks import groth16 as suite
from benchmarks import groth16_circuit, groth16_process
from benchmarks.groth16 import Groth16Suite
from benchmarks.groth16_circuit import Circuit

R = field_of("bn254_fr").modulus


def integers(words):
    return [sum(int(word) << 64 * i for i, word in enumerate(row)) for row in words]


# --- circuits --------------------------------------------------------------------------------------------------------
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(0, 20), st.integers(0, 5))
def test_witnesses_satisfy_their_circuits(n_constraints, n_public, seed):
    circuit = Circuit(n_constraints, n_public, seed=seed)
    constraints, witness = circuit.constraints, circuit.witness(seed)
    values = integers(witness)
    assert values[0] == 1
    assert max(values) < R
    assert len(values) == constraints.n_wires
    assert constraints.n_public == min(n_public, n_constraints)
    sums = []
    for matrix in constraints.matrices:
        rows = [0] * n_constraints
        assert (np.diff(matrix["row"].astype(np.int64)) >= 0).all()
        for row, wire, factor in zip(matrix["row"], matrix["wire"], integers(matrix["value"]), strict=True):
            rows[row] += factor * values[wire]
        sums.append(rows)
    assert all((a * b - c) % R == 0 for a, b, c in zip(*sums, strict=True))
    assert all(sums[2][i] % R for i in range(constraints.n_public))  # a public input is in its constraint


def test_witnesses_differ_and_circuits_do_not():
    one, same, other = Circuit(40), Circuit(40), Circuit(40, seed=2)
    for a, b in zip(one.constraints.matrices, same.constraints.matrices, strict=True):
        assert (a == b).all()
    assert (one.constraints.matrices[0] != other.constraints.matrices[0]).any()
    assert (one.witness(1) != one.witness(2)).any()
    assert (one.witness(1) == same.witness(1)).all()
    bits = np.flatnonzero(np.arange(40) % 4 < groth16_circuit._BITS_OF_FOUR)
    assert len(bits) == 20


@pytest.mark.slow
def test_a_witness_of_another_seed_is_proved_with_one_key(tmp_path):
    circuit = Circuit(30)
    setup_with_known_tau(circuit.constraints, tmp_path / "circuit.zkey")
    prover = Prover(tmp_path / "circuit.zkey", device="cpu")
    for seed in (1, 2):
        write_wtns(tmp_path / "w.wtns", "bn254", circuit.witness(seed))
        proof = prover.prove(tmp_path / "w.wtns", verify=False)
        assert verify(prover.verification_key, proof.public, proof)


# --- processes -------------------------------------------------------------------------------------------------------
def program(folder, text):
    path = folder / "program.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def test_what_a_process_took(tmp_path):
    spend = "import time\nwhile time.process_time() < 0.3: pass\nprint('done')\n"
    ran = groth16_process.run(program(tmp_path, spend), 60)
    assert ran.status == 0
    assert ran.output == "done\n"
    assert 290 < ran.cpu_ms < 1.1 * ran.wall_ms
    asleep = groth16_process.run(program(tmp_path, "import time; time.sleep(0.4)"), 60)
    assert asleep.wall_ms >= 400 > asleep.cpu_ms


def test_processes_that_fail(tmp_path):
    ran = groth16_process.run(program(tmp_path, "import sys; print('first'); sys.exit('no such thing')"), 60)
    with pytest.raises(AccelerantError, match=r"^it ended with status 1: no such thing$"):
        ran.checked("it")
    with pytest.raises(AccelerantError, match=r"took longer than 0.2 s"):
        groth16_process.run(program(tmp_path, "import time; time.sleep(60)"), 0.2)


def test_the_environment_of_our_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for writes_none in (True, False):
        monkeypatch.setattr(sys, "dont_write_bytecode", writes_none)
        found = groth16_process.environment("cpu", tmp_path, MORE="1")
        assert "PYTHONDONTWRITEBYTECODE" not in found
        assert (found.get("PYTHONPYCACHEPREFIX") == str(tmp_path / "bytecode")) == writes_none
        assert (found["ACCELERANT_BACKEND"], found["MORE"]) == ("cpu", "1")


def test_where_snarkjs_is_not(tmp_path, monkeypatch):
    paths = {"node": sys.executable}
    monkeypatch.setattr(groth16_process.shutil, "which", paths.get)
    monkeypatch.setattr(groth16_process, "_CHECKOUT", tmp_path / "nothing.cjs")
    assert "npm install snarkjs" in groth16_process.find_snarkjs().missing
    assert groth16_process.find_snarkjs(tmp_path / "x").missing == f"there is no {tmp_path / 'x'}"
    (tmp_path / "other.js").write_text("print('something else')")
    assert "does not say that it is snarkjs" in groth16_process.find_snarkjs(tmp_path / "other.js").missing
    paths.clear()
    assert groth16_process.find_snarkjs().missing == "Node is not here"


PEER = """
import sys
from accelerant.cli import main
if sys.argv[1:] == ["--version"]:
    print("snarkjs@0.0.1")
else:
    main(["zk", *sys.argv[2:]])
"""
"""Python runs it where Node would run snarkjs: the same arguments, by us."""


@pytest.fixture
def peer(tmp_path, monkeypatch):
    path = tmp_path / "cli.cjs"
    path.write_text(PEER)
    monkeypatch.setattr(groth16_process.shutil, "which", {"node": sys.executable}.get)
    return path


def test_the_peer_that_stands_for_snarkjs(peer):
    found = groth16_process.find_snarkjs(peer)
    assert found.command == (sys.executable, str(peer))
    assert found.version.startswith("snarkjs 0.0.1, node Python 3.")
    assert not found.missing


# --- the suite -------------------------------------------------------------------------------------------------------
@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(suite, "_SMALL", 3)
    monkeypatch.setattr(suite, "_AIMED", 20)
    monkeypatch.setattr(suite, "_measure_first_proof", lambda this: this.run.record.notes.append(f"{this.first}"))


STAGES = ("witness", "blinding", "quotient", "sum A", "sum B1", "sum B2", "sum C", "sum H", "proof", "verification")


@pytest.mark.slow
def test_every_row_is_there(small, peer):
    record = run_suite(Groth16Suite((20,), snarkjs=peer, runs=2), registry.find_device("cpu"))
    case = suite.case_name(20)
    peers = {"proof": ", key warm, {}", "command": ", {}"}
    rows = {(row.op, row.case, row.runner): row for row in record.rows}
    assert len(rows) == len(record.rows)
    wanted = {(op, case + what.format(kind), who) for op, what in peers.items() for kind in ("wall", "CPU time")
              for who in ("accelerant", "snarkjs")}  # fmt: skip
    wanted |= {("stage", f"{case}, {stage}", "accelerant") for stage in STAGES}
    wanted |= {
        ("proof", f"{case}, key warm, self-verification apart", "accelerant"),
        ("key", f"{case}, read", "accelerant"),
        ("many", f"{case}, for each proof", "accelerant"),
        ("memory", f"{case}, host", "accelerant"),
    }
    assert set(rows) == wanted
    assert all(0 < row.p20 <= row.p50 <= row.p80 for row in record.rows)
    warm = rows["proof", f"{case}, key warm, CPU time", "accelerant"]
    assert warm.target_x in (5.0, 10.0)
    assert warm.speedup == rows["command", f"{case}, CPU time", "snarkjs"].p50 / warm.p50
    assert rows["command", f"{case}, CPU time", "accelerant"].target_x == 5.0
    memory = rows["memory", f"{case}, host", "accelerant"]
    assert (memory.unit, memory.target > 0) == ("MiB", True)
    assert "times the key" in memory.note
    assert "True" in record.notes
    assert record.notes[0].startswith(f"{case}: a key of ")


@pytest.mark.slow
def test_a_wrong_proof_stops_the_case(small, monkeypatch):
    monkeypatch.setattr(suite, "verify", lambda *_: False)
    monkeypatch.setattr(groth16_process.shutil, "which", lambda _: None)
    device = registry.find_device("cpu")
    record = BenchmarkRecord(Environment.of(device))
    with pytest.raises(AccelerantError, match="3 constraints: a proof does not verify"):
        Groth16Suite((3,), runs=2).measure(SuiteRun(device, record))
    assert [(row.op, row.case) for row in record.rows] == [("3 constraints", "failed")]


def test_another_peer_is_refused():
    with pytest.raises(ConfigError, match="no peer 'rapidsnark'; there are snarkjs"):
        Groth16Suite(against=("snarkjs", "rapidsnark")).resolve(registry.find_device("cpu"))


@pytest.mark.slow
def test_the_first_proof_compiles(monkeypatch, tmp_path):
    device = registry.find_device("cpu")
    record = BenchmarkRecord(Environment.of(device))
    case = suite._CircuitRun(3, True, SuiteRun(device, record), tmp_path, 2, None)
    suite._write_files(case)
    assert suite._cpu_proof_ms(case) > 0  # of the CPU column, on the same files
    suite._measure_first_proof(case)
    assert [row.case for row in record.rows] == [f"3 constraints, empty cache, {what}" for what in ("wall", "CPU time")]
    assert record.rows[0].target == suite._FIRST_MS


# --- the command -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_command_where_the_peer_is_not_here(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(groth16_process.shutil, "which", lambda _: None)
    monkeypatch.setattr(suite, "_measure_memory", lambda this: None)
    with pytest.raises(SystemExit) as ended:
        run_command(Groth16Suite, ["--device", "cpu", "--constraints", "3", "--runs", "2", "--out",
              str(tmp_path / "out"), "--json"])  # fmt: skip
    assert not ended.value.code
    printed = json.loads(capsys.readouterr().out)
    assert {row["suite"] for row in printed["rows"]} == {"groth16"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "record.json", "record.csv", "report.html", "rows.jsonl",
    }  # fmt: skip
    rows = BenchmarkRecord.load(tmp_path / "out" / "record.json").rows
    theirs = [row for row in rows if row.runner == "snarkjs"]
    assert [(row.p50, row.note) for row in theirs] == [(None, "Node is not here")] * 4
    ours = [row for row in rows if row.runner == "accelerant"]
    assert len(ours) + len(theirs) == len(printed["rows"])
    assert all(row.p50 and not row.aims for row in ours)  # fewer constraints than aims are for


@pytest.mark.parametrize("arguments", [["--against", "rapidsnark"], ["--constraints", "0"], ["--runs", "1"]])
def test_wrong_usage(arguments):
    with pytest.raises(SystemExit) as ended:
        run_command(Groth16Suite, ["--device", "cpu", *arguments])
    assert ended.value.code == 2


@pytest.mark.slow
def test_proofs_of_the_memory_program(tmp_path):
    """The program that counts memory, as the suite runs it."""
    circuit = Circuit(3)
    setup_with_known_tau(circuit.constraints, tmp_path / "k.zkey")
    write_wtns(tmp_path / "w.wtns", "bn254", circuit.witness(1))
    files = [str(tmp_path / name) for name in ("k.zkey", "w.wtns")] * 2
    path = Path(suite.groth16_memory.__file__)
    ran = groth16_process.run([sys.executable, "-P", str(path), "cpu", *files], 120).checked("it")
    found = json.loads(ran.output)
    assert found["base"] > 10 * 2**20
    assert 0 <= found["peak"] < 2**30
    assert found["device"] == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux's kernel counts memory as it is counted")
def test_a_warning_beside_the_memory_program_s_figures(tmp_path, monkeypatch):
    """A cache that cannot be written makes one, in the same output."""
    device = registry.find_device("cpu")
    record = BenchmarkRecord(Environment.of(device))
    case = suite._CircuitRun(3, False, SuiteRun(device, record), tmp_path, 2, None)
    case.folder.mkdir()
    case.zkey.write_bytes(bytes(2**20))
    figures = json.dumps({"base": 0, "peak": 2**21, "anonymous": 2**20, "device": 0})
    ran = groth16_process.FinishedProcess(1.0, 1.0, 0, f"kernel cache /nowhere cannot be written\n{figures}\n")
    monkeypatch.setattr(suite, "run", lambda *_: ran)
    monkeypatch.setattr(suite, "_write_files", lambda *_, **__: None)
    suite._measure_memory(case)
    (row,) = record.rows
    assert (row.p50, row.note.partition(";")[0]) == (2.0, "2.00 times the key")


@pytest.mark.slow
def test_proof_files_are_those_of_the_command(small, tmp_path):
    """What is judged is what the command wrote."""
    device = registry.find_device("cpu")
    record = BenchmarkRecord(Environment.of(device))
    case = suite._CircuitRun(3, False, SuiteRun(device, record), tmp_path, 2, None)
    suite._write_files(case, count=1)
    processes = suite._Processes(case)
    proof, public = processes._out["our"]
    assert Proof.from_json(proof.read_text(), public.read_text()).public
    processes.add_rows()
    assert [row.case for row in record.rows] == ["3 constraints, wall", "3 constraints, CPU time"]
