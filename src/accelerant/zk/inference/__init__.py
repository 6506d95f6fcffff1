"""Proofs of inference: a committed network of 8-bit integers maps this input to this output. Not zero-knowledge.

>>> prover = accelerant.zk.inference.Prover(network)
>>> y, proof = prover.prove(x)
>>> accelerant.zk.inference.verify(prover.commitment, x, y, proof)
True

docs/proof-of-inference.md has the protocol and its soundness.
"""

from accelerant.zk.inference.proofs import (
    IntegerNetwork,
    ModelCommitment,
    Prover,
    check,
    commit,
    commitment_memory_bytes,
    integer_network,
    proof_memory_bytes,
    verify,
)
from accelerant.zk.inference.verifier import Layer, Network, RejectedProofError

__all__ = [
    "IntegerNetwork", "Layer", "ModelCommitment", "Network", "Prover", "RejectedProofError", "check", "commit",
    "commitment_memory_bytes", "integer_network", "proof_memory_bytes", "verify",
]  # fmt: skip
