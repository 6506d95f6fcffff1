"""snarkjs, as package-lock.json pins it, is the judge: it accepts our proofs and keys, and makes proofs for ours."""

import json
import subprocess
from pathlib import Path

import pytest
from circuits import write_circuit

from accelerant.zk.groth16 import Proof, Prover, VerificationKey, verify
from accelerant.zk.groth16.setup import setup_with_known_tau
from requirements import snarkjs_command

TESTS = Path(__file__).parents[2]
INTEROP = TESTS / "interop" / "snarkjs"


@pytest.fixture(scope="session")
def snarkjs():
    """run(*arguments) -> exit status and output."""
    command = snarkjs_command()

    def run(*arguments):
        done = subprocess.run(
            [*command, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


def accepts(snarkjs, folder, key, public, proof):
    """Whether `snarkjs groth16 verify` takes these texts."""
    paths = []
    for name, text in (("key", key), ("public", public), ("proof", proof)):
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(text)
    status, output = snarkjs("groth16", "verify", *paths)
    assert (status == 0) == ("OK!" in output), output
    return status == 0


def test_it_is_the_pinned_version(snarkjs):
    wanted = json.loads((INTEROP / "package.json").read_text())["dependencies"]["snarkjs"]
    assert f"snarkjs@{wanted}" in snarkjs("--version")[1]


@pytest.mark.parametrize("name", ["poseidon", "range"])
@pytest.mark.sample(2)
def test_both_circuits(snarkjs, tmp_path, name):
    folder = TESTS / "vectors" / "groth16" / name
    proof = Prover(folder / "circuit.zkey").prove(folder / "witness.wtns")
    key = (folder / "verification_key.json").read_text()
    assert accepts(snarkjs, tmp_path, key, proof.public_json(), proof.to_json())
    wrong = [str(proof.public[0] ^ 1), *map(str, proof.public[1:])]
    assert not accepts(snarkjs, tmp_path, key, json.dumps(wrong), proof.to_json())


def test_its_new_proofs_verify_here(snarkjs, tmp_path):
    folder = TESTS / "vectors" / "groth16" / "poseidon"
    paths = tmp_path / "proof.json", tmp_path / "public.json"
    status, output = snarkjs("groth16", "prove", folder / "circuit.zkey", folder / "witness.wtns", *paths)
    assert status == 0, output
    proof = Proof.from_json(*(path.read_text() for path in paths))
    key = VerificationKey.from_json((folder / "verification_key.json").read_text())
    assert verify(key, proof.public, proof)
    assert not verify(key, [proof.public[0] ^ 1, *proof.public[1:]], proof)


def test_call_data(snarkjs):
    folder = TESTS / "vectors" / "groth16" / "range"
    status, output = snarkjs("zkey", "export", "soliditycalldata", folder / "public.json", folder / "proof.json")
    proof = Proof.from_json((folder / "proof.json").read_text(), (folder / "public.json").read_text())
    assert (status, output.strip()) == (0, proof.to_calldata())


def test_call_data_without_public_inputs(snarkjs, tmp_path):
    folder = TESTS / "vectors" / "groth16" / "range"
    (tmp_path / "public.json").write_text("[]")
    status, output = snarkjs("zkey", "export", "soliditycalldata", tmp_path / "public.json", folder / "proof.json")
    proof = Proof.from_json((folder / "proof.json").read_text(), "[]")
    assert (status, output.strip()) == (0, proof.to_calldata())


GENERATED = [
    ("bn254", 1, 0),
    pytest.param("bn254", 2, 1, marks=pytest.mark.slow),
    pytest.param("bn254", 1000, 300, marks=pytest.mark.slow),
    pytest.param("bn254", 32000, 5, marks=pytest.mark.slow),
    pytest.param("bls12_381", 1, 0, marks=pytest.mark.slow),
    pytest.param("bls12_381", 100, 3, marks=pytest.mark.slow),
    pytest.param("bls12_381", 5000, 20, marks=pytest.mark.slow),
]


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize(("family", "n_constraints", "n_public"), GENERATED)
def test_generated_circuits(snarkjs, tmp_path, family, n_constraints, n_public):
    """Our key, our proof, their verifier; our key, their proof, our verifier; and their export of our key."""
    write_circuit(tmp_path, family, n_constraints, n_public)
    zkey, witness = tmp_path / "circuit.zkey", tmp_path / "witness.wtns"
    setup_with_known_tau(tmp_path / "circuit.r1cs", zkey)
    prover = Prover(zkey)
    proof, key = prover.prove(witness), prover.verification_key
    assert accepts(snarkjs, tmp_path, key.to_json(), proof.public_json(), proof.to_json())

    status, output = snarkjs("zkey", "export", "verificationkey", zkey, tmp_path / "theirs.json")
    assert status == 0, output
    assert (tmp_path / "theirs.json").read_text() == key.to_json()

    paths = tmp_path / "their-proof.json", tmp_path / "their-public.json"
    status, output = snarkjs("groth16", "prove", zkey, witness, *paths)
    assert status == 0, output
    theirs = Proof.from_json(*(path.read_text() for path in paths))
    assert theirs.public == proof.public
    assert verify(key, theirs.public, theirs)
