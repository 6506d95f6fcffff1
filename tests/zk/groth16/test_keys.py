"""A key in the CPU's memory: sections in chunks, points at infinity left out."""

from __future__ import annotations

import circuits
import numpy as np
import pytest

from accelerant.zk.formats import Zkey
from accelerant.zk.groth16 import Prover, keys, verify
from accelerant.zk.groth16.keys import SECTIONS, HostKey, Stages
from accelerant.zk.groth16.setup import setup_with_known_tau


@pytest.fixture
def folder(tmp_path):
    circuits.write_circuit(tmp_path, "bn254", 40, 3)
    setup_with_known_tau(tmp_path / "circuit.r1cs", tmp_path / "circuit.zkey")
    return tmp_path


@pytest.mark.parametrize("size", [1, 7, 64])
def test_chunks_of_any_size_make_the_same_key(folder, monkeypatch, size):
    with Zkey.open(folder / "circuit.zkey") as zkey:
        whole = HostKey(zkey, Stages())
        monkeypatch.setattr(keys, "_CHUNK_POINTS", size)
        key = HostKey(zkey, Stages())
        for name in SECTIONS:
            one, other = whole._sections[name], key._sections[name]
            finite = zkey.points[name].any(axis=1)
            assert (one._bases._points == other._bases._points).all(), name
            assert one._bases.n == other._bases.n == finite.sum()
            if finite.all():
                assert one._indices is other._indices is None
            else:
                assert one._indices.tolist() == other._indices.tolist() == np.flatnonzero(finite).tolist()
    prover = Prover(folder / "circuit.zkey", device="cpu")
    proof = prover.prove(folder / "witness.wtns", verified=False)
    assert verify(prover.verification_key, proof.public, proof)


def test_a_section_without_finite_points(folder, monkeypatch):
    zeros = {"B1": 8, "B2": 16}
    with Zkey.open(folder / "circuit.zkey") as zkey:
        found = {name: words if name not in zeros else np.zeros_like(words) for name, words in zkey.points.items()}
        monkeypatch.setattr(Zkey, "points", property(lambda _: found))
        key = HostKey(zkey, Stages())
        scalars = np.ones((zkey.n_vars, 4), np.uint64)
        for name in zeros:
            assert not key._sections[name].msm(scalars).any()
            assert key._sections[name]._bases.n == 0


def test_a_key_is_not_needed_any_more_when_it_is_read(folder):
    with Zkey.open(folder / "circuit.zkey") as zkey:
        prover = Prover(zkey, device="cpu")
    (folder / "circuit.zkey").write_bytes(b"something else")
    proof = prover.prove(folder / "witness.wtns", verified=False)
    assert verify(prover.verification_key, proof.public, proof)
