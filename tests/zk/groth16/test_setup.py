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
from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.words import decode, encode
from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedCase
from accelerant.zk import curve as curve_named
from accelerant.zk.formats import TERM, R1cs, Zkey, write_r1cs, write_wtns
from accelerant.zk.groth16 import VerificationKey, prove, setup, verify
from accelerant.zk.groth16.keys import SparseMatrix
from accelerant.zk.groth16.setup import LABEL, FixedBaseTable, setup_with_known_tau
from refusals import assert_raises

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


def test_a_circuit_without_signals_has_a_domain_of_two_as_with_snarkjs(tmp_path, family):
    none = np.zeros(0, TERM)
    sizes = {"n_wires": 1, "n_pub_out": 0, "n_pub_in": 0, "n_prv_in": 0, "n_constraints": 0}
    write_r1cs(tmp_path / "circuit.r1cs", family, **sizes, a=none, b=none, c=none)
    write_wtns(tmp_path / "witness.wtns", family, encode(FIELDS[f"{family}_fr"], [1]))
    facts = setup_with_known_tau(tmp_path / "circuit.r1cs", tmp_path / "circuit.zkey")
    assert (facts["constraints"], facts["domain"]) == (0, 2)
    proof = prove(tmp_path / "circuit.zkey", tmp_path / "witness.wtns", device="cpu")
    assert verify(VerificationKey.from_zkey(tmp_path / "circuit.zkey"), [], proof)


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


FR = FIELDS["bn254_fr"]
P = FR.modulus


@pytest.mark.parametrize(("n_rows", "n_columns", "n_entries"), [(1, 1, 0), (1, 1, 1), (7, 3, 20), (1500, 40, 4000)])
def test_products_of_matrices(n_rows, n_columns, n_entries):
    """Rows without entries, several entries at one place, entries in any order; more rows than one thread takes."""
    rng = random.Random(n_entries)
    special = (0, 1, P - 1, P - 2)

    def some():
        return rng.choice(special) if rng.random() < 0.5 else rng.randrange(P)

    rows = np.array([rng.randrange(n_rows) for _ in range(n_entries)], np.int64)
    columns = np.array([rng.randrange(n_columns) for _ in range(n_entries)], np.uint32)
    values, x = [some() for _ in range(n_entries)], [some() for _ in range(n_columns)]
    expected = [0] * n_rows
    for row, column, value in zip(rows, columns, values, strict=True):
        expected[row] += value * x[column]
    matrix = SparseMatrix.from_entries(
        FR, n_rows, rows, columns, encode(FR, [value << 256 for value in values], reduce=True)
    )
    assert matrix.n_entries == n_entries
    assert decode(FR, matrix.times(encode(FR, x).reshape(-1, 4))) == [value % P for value in expected]


def test_values_need_not_be_reduced():
    """A key's values are not looked at: any words, taken modulo p."""
    largest = np.full((1, 4), 2**64 - 1, np.uint64)
    at = np.zeros(1, np.int64)
    for x in (0, 1, P - 1):
        product = decode(FR, SparseMatrix.from_entries(FR, 1, at, at, largest).times(encode(FR, [x])))
        assert product == [(2**256 - 1) * x * pow(2, -256, P) % P]


def test_what_the_kernel_would_not_find_is_refused():
    rows, columns, values = np.array([0, 3]), np.array([1, 5]), np.zeros((2, 4), np.uint64)
    assert_raises(ShapeError, "row 3 of 3", SparseMatrix.from_entries, FR, 3, rows, columns, values)
    matrix = SparseMatrix.from_entries(FR, 4, rows, columns, values)
    assert_raises(ShapeError, "n at least 6, got", matrix.times, np.zeros((5, 4), np.uint64))
    assert not matrix.times(np.zeros((6, 4), np.uint64)).any()


def test_the_product_may_go_to_memory_that_is_there():
    at, values = np.arange(3), encode(FR, [value << 256 for value in (1, 2, 3)], reduce=True)
    matrix = SparseMatrix.from_entries(FR, 3, at, at, values)
    x, storage = encode(FR, [5, 6, 7]), np.full((2, 3, 4), 9, np.uint64)
    assert matrix.times(x, out=storage[1]) is not None
    assert decode(FR, storage[1]) == [5, 12, 21]
    assert (storage[0] == 9).all()
    for wrong in (storage[1, :2], storage[:, 0], np.empty((3, 4)), np.empty((4, 3), np.uint64).T):
        assert_raises(ShapeError, r"out must be \(3, 4\), uint64, contiguous", matrix.times, x, out=wrong)
