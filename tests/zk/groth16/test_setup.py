from __future__ import annotations

import random
from pathlib import Path

import circuits
import numpy as np
import oracle
import pytest

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.parameters import curve_of, family_of
from accelerant.algebra.curve.weierstrass import multiply
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.words import encode
from accelerant.errors import ConfigError, FormatError, UnsupportedCase
from accelerant.zk import curve as curve_named
from accelerant.zk.formats import R1cs, Zkey
from accelerant.zk.groth16 import setup
from accelerant.zk.groth16.setup import LABEL, FixedBaseTable, setup_with_known_tau

FORMATS = Path(__file__).parents[2] / "vectors" / "formats"


def entries_of(key):
    return sorted((int(e["matrix"]), int(e["row"]), int(e["signal"]), e["value"].tobytes()) for e in key.coefficients)


def test_a_key_is_sound_and_says_what_it_is(tmp_path, family):
    circuits.write_circuit(tmp_path, family, 20, 3)
    facts = setup_with_known_tau(tmp_path / "circuit.r1cs", tmp_path / "circuit.zkey")
    assert facts == {"curve": family, "constraints": 20, "signals": 25, "public_inputs": 3, "domain": 32}
    with Zkey.open(tmp_path / "circuit.zkey") as key:
        key.check()
        (contribution,) = key.contributions
        assert contribution.label.name == LABEL
        assert "INSECURE" in LABEL
        assert oracle.points_of(family_of(family).g2, key.gamma2) == [family_of(family).g2.generator]


def test_the_matrices_are_those_of_snarkjs(product, tmp_path):
    """The same constraints, the same rows for public inputs, the same domain."""
    _, folder = product
    setup_with_known_tau(folder / "product.r1cs", tmp_path / "circuit.zkey")
    with Zkey.open(folder / "product.zkey") as theirs, Zkey.open(tmp_path / "circuit.zkey") as ours:
        assert entries_of(theirs) == entries_of(ours)
        assert (theirs.n_vars, theirs.n_public, theirs.domain_size) == (ours.n_vars, ours.n_public, ours.domain_size)
        for name in ("a", "b1", "b2", "c"):
            assert (getattr(theirs, name).any(axis=1) == getattr(ours, name).any(axis=1)).all(), name


def test_keys_differ(tmp_path):
    circuits.write_circuit(tmp_path, "bn254", 2, 1)
    for name in ("one", "two"):
        setup_with_known_tau(tmp_path / "circuit.r1cs", tmp_path / name)
    with Zkey.open(tmp_path / "one") as one, Zkey.open(tmp_path / "two") as two:
        for name in ("alpha1", "beta1", "beta2", "delta1", "delta2", "a", "h"):
            assert (getattr(one, name) != getattr(two, name)).any(), name


def test_custom_gates_are_refused(tmp_path):
    with pytest.raises(UnsupportedCase, match="custom gates"):
        setup_with_known_tau(FORMATS / "bn254" / "gates.r1cs", tmp_path / "circuit.zkey")
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_kind(tmp_path):
    with pytest.raises(FormatError):
        setup_with_known_tau(FORMATS / "bn254" / "product.wtns", tmp_path / "circuit.zkey")


def test_a_target_that_cannot_be_written_is_found_first(tmp_path):
    seen = []
    for name, match in (("nowhere/circuit.zkey", "circuit.zkey: the directory"), (".", "is a directory")):
        with (
            R1cs.open(FORMATS / "bn254" / "product.r1cs") as r1cs,
            pytest.raises(ConfigError, match=match),
        ):
            setup_with_known_tau(r1cs, tmp_path / name, progress=seen.append)
    assert not seen


# --- multiples of one point -------------------------------------------------------------------------------------------

CURVES = ["bn254_g1", "bn254_g2", *(pytest.param(f"bls12_381_g{i}", marks=pytest.mark.slow) for i in (1, 2))]


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("n", [1, 1 << 16])
def test_multiples(name, n, monkeypatch):
    monkeypatch.setattr(setup, "_CHUNK_POINTS", 16)
    curve, group = curve_of(name), curve_named(name)
    order = curve.order
    draw = random.Random(n)
    scalars = [0, 1, 2, order - 1, order // 2, *(1 << i for i in (7, 63, 64, 65, 127, 128, 192, 253))]
    scalars += [draw.randrange(order) for _ in range(20)]
    table = FixedBaseTable(curve, launch.to_montgomery(HOST, curve, group.generator[None]), n)
    assert table.bits * table.windows >= order.bit_length()
    found = table.multiples(encode(curve.scalars, scalars))
    assert oracle.points_of(curve, found) == [multiply(curve, s, curve.generator) if s else None for s in scalars]


def test_the_table_grows_with_what_is_asked():
    curve = curve_of("bn254_g1")
    base = launch.to_montgomery(HOST, curve, curve_named("bn254_g1").generator[None])
    few, many = (FixedBaseTable(curve, base, n) for n in (1, 4096))
    assert few.bits < many.bits
    assert few.multiples(np.zeros((0, 4), np.uint64)).shape == (0, 2, 4)
