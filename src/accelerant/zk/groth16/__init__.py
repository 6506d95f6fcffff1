"""Groth16 on BN254 and BLS12-381, with the files of circom and snarkjs: see docs/groth16.md.

>>> from accelerant.zk import groth16
>>> prover = groth16.Prover("circuit.zkey")
>>> proof = prover.prove("witness.wtns")
>>> groth16.verify(prover.verification_key, proof.public, proof)
True
"""

from accelerant.zk.groth16.proof import Proof
from accelerant.zk.groth16.prover import Prover, prove
from accelerant.zk.groth16.verifier import VerificationKey, verify, verify_many

__all__ = ["Proof", "Prover", "VerificationKey", "prove", "verify", "verify_many"]
