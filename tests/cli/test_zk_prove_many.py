"""`accelerant zk prove-many` on processes of this host; tests/runtime/test_jobs.py has it on a cluster."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest

from accelerant.zk.groth16 import Proof, VerificationKey, verify

GROTH16 = Path(__file__).parents[1] / "vectors" / "groth16"
RANGE = GROTH16 / "range"


@pytest.fixture
def run(command_line):
    return functools.partial(command_line, "zk", "prove-many")


@pytest.fixture
def witnesses(tmp_path):
    paths = [tmp_path / f"w{i}.wtns" for i in range(3)]
    for path in paths:
        shutil.copy(RANGE / "witness.wtns", path)
    return paths


@pytest.mark.slow
def test_proofs_of_many_witnesses(run, witnesses, tmp_path):
    (tmp_path / "cut.wtns").write_bytes(witnesses[0].read_bytes()[:400])
    (tmp_path / "other.wtns").symlink_to(GROTH16 / "poseidon" / "witness.wtns")
    out, key = tmp_path / "a" / "b", RANGE / "circuit.zkey"
    failing = [tmp_path / name for name in ("cut.wtns", "other.wtns")]
    status, output, error = run(key, *failing, *witnesses, "--out", out, "--workers", 2)
    lines = output.splitlines()
    assert (status, len(lines)) == (1, 3)
    assert re.fullmatch(r"(\d of 5 witnesses, \d failed, [\d.]+/s\n)*", error)  # on a loaded machine, its progress
    assert lines[0].startswith(f"{failing[0]}: {failing[0]}: section 2")
    assert "the witness is of another circuit" in lines[1]
    assert lines[2].startswith(f"{out}: 3 proofs in ")
    assert sorted(path.name for path in out.iterdir()) == sorted(
        f"w{i}.{kind}.json" for i in range(3) for kind in ("proof", "public")
    )
    trusted = VerificationKey.from_json((RANGE / "verification_key.json").read_text())
    for path in out.glob("*.proof.json"):
        proof = Proof.from_json(path.read_text(), (RANGE / "public.json").read_text())
        assert verify(trusted, proof.public, proof)

    # The second run keeps what is valid: not a proof of another one's inputs, none cut off, none without its inputs
    kept = (out / "w0.proof.json").read_bytes()
    public = json.loads((out / "w1.public.json").read_text())
    (out / "w1.public.json").write_text(json.dumps(["7", *public[1:]]))
    (out / "w2.proof.json").write_bytes(kept[:-9])
    status, output, _ = run(key, *witnesses, "--out", out, "--json")
    facts = json.loads(output)
    assert (status, facts["failed"], facts["engine"]) == (0, [], "local")
    assert [Path(one["witness"]).name for one in facts["present"]] == ["w0.wtns"]
    assert [Path(one["proof"]).name for one in facts["proved"]] == ["w1.proof.json", "w2.proof.json"]
    assert (out / "w0.proof.json").read_bytes() == kept
    assert json.loads((out / "w1.public.json").read_text()) == public


def test_nothing_is_started_for_wrong_arguments(run, witnesses, tmp_path):
    key = RANGE / "circuit.zkey"
    for arguments, reason in [
        ((key, witnesses[0], witnesses[0]), "w0.proof.json is to be written, and so is another file"),
        ((key, witnesses[0], "--device", "cuda:1"), "--device must be auto, cpu, cuda or opencl, got 'cuda:1'"),
        ((witnesses[0], witnesses[0]), "zkey"),
        ((tmp_path / "none.zkey", witnesses[0]), "none.zkey"),
        ((key, witnesses[0], tmp_path / "absent.wtns"), "absent.wtns: no such file"),
        ((key, witnesses[0], "--out", witnesses[1]), f"--out {witnesses[1]} is not a folder"),
    ]:
        status, output, error = run("--out", tmp_path / "out", *arguments)
        assert (status, output) == (2, "")
        assert reason in error


def test_all_are_there(run, witnesses, tmp_path):
    for kind in ("proof", "public"):
        shutil.copy(RANGE / f"{kind}.json", tmp_path / f"w0.{kind}.json")
    status, output, _ = run(RANGE / "circuit.zkey", witnesses[0], "--out", tmp_path)
    assert status == 0
    assert output.startswith(f"{tmp_path}: 0 proofs in ")
    assert output.endswith("s, 1 were there, 0 failed\n")
