import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from accelerant.zk.groth16 import Proof, VerificationKey

VECTORS = Path(__file__).parents[2] / "vectors"


@pytest.fixture(params=["range", "poseidon"])
def circuit(request):
    """The folder of a circuit with snarkjs's key, witness, and proof."""
    return VECTORS / "groth16" / request.param


FAMILIES = ["bn254", pytest.param("bls12_381", marks=pytest.mark.slow)]
"""The second needs kernels of its own, eight seconds to compile; both run the same lines."""


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(params=FAMILIES)
def product(request):
    """The family, and the folder of a tiny circuit whose key snarkjs made on it."""
    return request.param, VECTORS / "formats" / request.param


@pytest.fixture
def parts(circuit):
    """Key, public inputs and proof, each as JSON and as read."""
    texts = {name: (circuit / f"{name}.json").read_text() for name in ("verification_key", "public", "proof")}
    proof = Proof.from_json(texts["proof"], texts["public"])
    return SimpleNamespace(
        texts=texts,
        json={name: json.loads(text) for name, text in texts.items()},
        key=VerificationKey.from_json(texts["verification_key"]),
        public=proof.public,
        proof=proof,
    )
