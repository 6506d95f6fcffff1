"""Groth16 on BN254 and BLS12-381, with the files of circom and snarkjs: see docs/groth16.md.

>>> from accelerant.zk import groth16
>>> prover = groth16.Prover("circuit.zkey")
>>> proof = prover.prove("witness.wtns")
>>> groth16.verify(prover.verification_key, proof.public, proof)
True
"""

from typing import TYPE_CHECKING

from accelerant._renamed import missing_names
from accelerant.zk.groth16.proof import Proof
from accelerant.zk.groth16.prover import Prover, prove
from accelerant.zk.groth16.verifier import VerificationKey, verify, verify_many

__all__ = ["Proof", "Prover", "VerificationKey", "prove", "verify", "verify_many"]

_KEY = "groth16.Prover(key).verification_key, or the command accelerant zk export-vk"
_WITNESS = "groth16.prove(key, witness): the program that circom makes computes the witness"
_CEREMONY = "snarkjs for the ceremony, or the command accelerant zk setup for a key of tests"
_ELSEWHERE = {
    **dict.fromkeys(("fullProve", "full_prove"), _WITNESS),
    **dict.fromkeys(("exportVerificationKey", "export_verification_key"), _KEY),
    **dict.fromkeys(("setup", "newZKey", "contribute", "beacon"), _CEREMONY),
    "exportSolidityCallData": "the command accelerant zk calldata",
    "exportSolidityVerifier": "the command accelerant zk verifier",
}  # Names of snarkjs -> what to write here

if not TYPE_CHECKING:  # a type checker reports a name that is missing
    __getattr__ = missing_names(__name__, _ELSEWHERE)
