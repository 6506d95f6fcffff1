"""Prove knowledge of a witness with Groth16, and verify the proof, with circom's and snarkjs's files.

    python examples/groth16_proof.py [FOLDER]

FOLDER has circuit.zkey and witness.wtns, as snarkjs and circom write them; by default a Poseidon hash from the tests.
The proof does not reveal the witness. `snarkjs groth16 verify` accepts the files that are written.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from accelerant.zk import groth16

POSEIDON = Path(__file__).parents[1] / "tests" / "vectors" / "groth16" / "poseidon"


def main(folder: Path = POSEIDON) -> None:
    """Prove, verify, and refuse a false claim."""
    prover = groth16.Prover(folder / "circuit.zkey")  # reads the key once, for any number of proofs
    print(f"{prover.family}: {prover.n_vars} values, {prover.n_public} of them public")
    proof = prover.prove(folder / "witness.wtns")
    key = prover.verification_key
    print("valid:", groth16.verify(key, proof.public, proof))

    first, *others = proof.public
    print("valid for another public value:", groth16.verify(key, (first + 1, *others), proof))

    proofs = [proof, prover.prove(folder / "witness.wtns")]  # with other randomness
    print("both at once:", groth16.verify_many(key, [each.public for each in proofs], proofs))

    with tempfile.TemporaryDirectory() as out:
        for name, text in (
            ("proof.json", proof.to_json()),
            ("public.json", proof.public_json()),
            ("verification_key.json", key.to_json()),
        ):
            Path(out, name).write_text(text, encoding="utf-8")
        read = groth16.Proof.from_json(Path(out, "proof.json").read_text(), Path(out, "public.json").read_text())
        print("the same after writing and reading:", read == proof)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
