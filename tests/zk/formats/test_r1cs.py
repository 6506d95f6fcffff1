"""Constraints: what is read, refused and written."""

import struct
from unittest.mock import Mock

import numpy as np
import pytest
from parts import VECTORS, edited, offset_of, put_together, refused, take_apart

from accelerant.algebra.curve.parameters import family_of
from accelerant.errors import ConfigError, OutOfMemory, ShapeError, UnsupportedDtype
from accelerant.zk.formats import TERM, CustomGate, R1cs, write_r1cs
from accelerant.zk.formats import circuit as circuit_module
from refusals import assert_raises

KIND, FILE = R1cs, "product.r1cs"
HEADER, CONSTRAINTS, LABELS, GATES, USES = range(1, 6)
COUNTS = 36
"""Where the header's counts begin."""


def triples(terms):
    """(row, wire, value) with the value as an integer."""
    return [
        (row, wire, sum(int(limb) << 64 * i for i, limb in enumerate(value))) for row, wire, value in terms.tolist()
    ]


def terms_of(entries):
    """The inverse of triples."""
    found = np.zeros(len(entries), TERM)
    for i, (row, wire, value) in enumerate(entries):
        found[i] = row, wire, np.frombuffer(value.to_bytes(32, "little"), "<u8")
    return found


def sizes(circuit):
    names = ("n_wires", "n_pub_out", "n_pub_in", "n_prv_in", "n_labels", "n_constraints")
    return {name: getattr(circuit, name) for name in names}


def test_constraints_are_those_of_the_circuit(family):
    """Of product.circom: (-a) b = -x and (-3 - c) x = 5 a - o, the wires 1 o a b c x."""
    with R1cs.open(VECTORS / family.name / "product.r1cs") as circuit:
        assert sizes(circuit) == dict(zip(sizes(circuit), (6, 1, 1, 2, 6, 2), strict=True))
        assert (circuit.family, circuit.n_public, circuit.custom_gates) == (family.name, 2, ())
        assert circuit.labels.tolist() == list(range(6))
        minus = family.r - 1
        a, b, c = map(triples, circuit.matrices())
        assert a == [(0, 2, minus), (1, 0, minus - 2), (1, 4, minus)]
        assert b == [(0, 3, 1), (1, 5, 1)]
        assert c == [(0, 5, minus), (1, 1, minus), (1, 2, 5)]


def test_custom_gates_are_told():
    with R1cs.open(VECTORS / "bn254" / "gates.r1cs") as circuit:
        assert circuit.custom_gates == (CustomGate("G", (7,)),)
        assert circuit.n_custom_gate_uses == 1
        circuit.check()


def test_written_again_it_has_the_same_sections(family, data, tmp_path):
    with R1cs.open(VECTORS / family.name / "product.r1cs") as circuit:
        a, b, c = circuit.matrices()
        again = tmp_path / "again.r1cs"
        write_r1cs(again, family.name, **sizes(circuit), a=a[::-1], b=b[[1, 0]], c=c, labels=circuit.labels)
    assert sorted(take_apart(again.read_bytes())[2]) == sorted(take_apart(data)[2])


def some_terms(rng, n, each):
    """About so many terms in each of n rows, by row and wire."""
    found = np.zeros(rng.integers(900 * max(n, 1), size=n * each).size, TERM)
    keys = np.unique(rng.integers(900 * max(n, 1), size=len(found)))
    found = found[: len(keys)]
    found["row"], found["wire"] = keys // 900, keys % 900
    found["value"] = rng.integers(1 << 60, size=(len(keys), 4), dtype=np.uint64)
    return found


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_what_is_written_is_read(n, family, tmp_path):
    """Empty combinations, long ones, rows without any term; more terms than a chunk of the reader."""
    rng = np.random.default_rng(n)
    matrices = {name: some_terms(rng, n, each) for name, each in (("a", 2), ("b", 100), ("c", 1))}
    numbers = {"n_wires": 900, "n_pub_out": 1, "n_pub_in": 0, "n_prv_in": 3, "n_labels": 2**40, "n_constraints": n}
    labels = rng.integers(2**63, size=900, dtype=np.uint64)
    path = tmp_path / "some.r1cs"
    mixed = {name: rng.permutation(terms) for name, terms in matrices.items()}
    write_r1cs(path, family.name, **numbers, **mixed, labels=labels)
    with R1cs.open(path) as circuit:
        assert sizes(circuit) == numbers
        assert np.array_equal(circuit.labels, labels)
        for found, wanted in zip(circuit.matrices(), matrices.values(), strict=True):
            assert np.array_equal(found, wanted)
    assert n < 1000 or len(matrices["b"]) > 1 << 16


def test_what_no_header_has(altered, data, family):
    for at, new, message in (
        (0, struct.pack("<I", 8), "r has 8 bytes"),
        (4, (family.r + 2).to_bytes(32, "little"), "not the prime of a supported curve"),
        (COUNTS, struct.pack("<I", 2), "2 public signals and wire 0 exceed 2 wires"),
        (COUNTS, struct.pack("<II", 6, 2**32 - 1), "4294967296 public signals"),
        (
            COUNTS + 12,
            struct.pack("<I", 2**31),
            "2 public signals, 2147483648 private inputs and wire 0 exceed 6 wires",
        ),
        (COUNTS + 12, struct.pack("<I", 4), "4 private inputs and wire 0 exceed 6 wires and 6 labels"),
    ):
        with refused(HEADER, offset_of(data, HEADER) + at, message):
            altered(edited(data, HEADER, at, new))


def test_private_inputs_without_wires_have_labels(altered, data):
    """circom counts private inputs that no constraint uses; their wires are gone, their labels are not."""
    with altered(edited(data, HEADER, COUNTS + 12, struct.pack("<IQ", 6, 9))) as circuit:
        assert (circuit.n_wires, circuit.n_public, circuit.n_prv_in, circuit.n_labels) == (6, 2, 6, 9)
    with refused(HEADER, None, "6 wires and 8 labels"):
        altered(edited(data, HEADER, COUNTS + 12, struct.pack("<IQ", 6, 8)))


@pytest.mark.parametrize("wires", [3, 5, 7, 2**32 - 1])
def test_other_counts_of_wires(altered, data, wires):
    with refused(LABELS, offset_of(data, LABELS), f"48 bytes, labels of {wires} wires need {8 * wires}"):
        altered(edited(data, HEADER, COUNTS, struct.pack("<I", wires)))


def test_other_counts_of_constraints(altered, data):
    at = offset_of(data, CONSTRAINTS)
    with refused(CONSTRAINTS, at, "312 bytes; 4294967295 constraints"):
        altered(edited(data, HEADER, -4, struct.pack("<I", 2**32 - 1)))
    wrong = edited(data, HEADER, -4, struct.pack("<I", 3))
    with (
        altered(wrong) as circuit,
        refused(CONSTRAINTS, None, "ends within linear combination 0 of constraint 2 of 3"),
    ):
        circuit.matrices()
    wrong = edited(data, HEADER, -4, struct.pack("<I", 1))
    with altered(wrong) as circuit, refused(CONSTRAINTS, at + 3 * 40, "192 bytes after the last of 1 constraints"):
        circuit.matrices()


@pytest.mark.parametrize("count", [3, 9, 2**31, 2**32 - 1])
def test_combinations_that_do_not_fill_the_section(altered, data, count):
    wrong = edited(data, CONSTRAINTS, 0, struct.pack("<I", count))
    with altered(wrong) as circuit, refused(CONSTRAINTS, None, ""):
        circuit.matrices()


def test_a_last_combination_longer_than_the_section(altered, data):
    last = 3 * 40 + 76 + 40
    place = offset_of(data, CONSTRAINTS) + last
    wrong = edited(data, CONSTRAINTS, last, struct.pack("<I", 3))
    with (
        altered(wrong) as circuit,
        refused(CONSTRAINTS, place, "ends within linear combination 2 of constraint 1 of 2"),
    ):
        circuit.matrices()


def test_wires_and_values_that_are_not_there(altered, data, family):
    at = offset_of(data, CONSTRAINTS)
    second = 3 * 40 + 76 + 4  # B's only term of constraint 1
    wrong = edited(data, CONSTRAINTS, second, struct.pack("<I", 6))
    with altered(wrong) as circuit, refused(CONSTRAINTS, at + second, "wire 6 of 6"):
        circuit.check()
    wrong = edited(data, CONSTRAINTS, second + 4, family.r.to_bytes(32, "little"))
    with altered(wrong) as circuit, refused(CONSTRAINTS, at + second + 4, "a value is not below"):
        circuit.check()


def test_matrices_that_do_not_fit_in_memory(altered, data, monkeypatch):
    """A sparse file can claim 2^32 - 1 constraints without a term."""

    with altered(data) as circuit:
        monkeypatch.setattr(circuit_module, "array", Mock(side_effect=MemoryError))
        for read in (circuit.matrices, circuit.check):
            assert_raises(OutOfMemory, r"altered.r1cs: the matrices of 2 constraints do not fit", read)


def test_custom_gates_that_are_none(altered):
    data = (VECTORS / "bn254" / "gates.r1cs").read_bytes()
    huge = struct.pack("<I", 2**32 - 1)
    for number, at, new, message in (
        (GATES, 0, huge, "4294967295 custom gates; at most 65536"),
        (GATES, 0, struct.pack("<I", 2), "name is not terminated by a zero byte"),
        (GATES, 6, huge, "the section ends within a custom gate's parameters: 137438953440 bytes needed"),
        (USES, 0, huge, "the section ends within"),
        (USES, 4, struct.pack("<I", 1), "custom gate 1 of 1"),
        (USES, 8, huge, "the section ends within a use's wires: 34359738360 bytes needed"),
    ):
        with refused(number, None, message):
            altered(edited(data, number, at, new))
    magic, version, sections = take_apart(data)
    gates = struct.pack("<I", 65537) + bytes(5 * 65537)  # of no name and no parameters, five bytes each
    with refused(GATES, None, "65537 custom gates"):
        altered(put_together(magic, version, [(n, gates if n == GATES else payload) for n, payload in sections]))
    endless = [(n, struct.pack("<I", 1) + b"g" * 100 if n == GATES else payload) for n, payload in sections]
    with refused(GATES, None, "not terminated by a zero byte"):
        altered(put_together(magic, version, endless))


def test_arguments_that_make_no_circuit(tmp_path):
    good = {"n_wires": 3, "n_pub_out": 1, "n_pub_in": 1, "n_prv_in": 0, "n_constraints": 1}
    good |= {name: terms_of([(0, 1, 5)]) for name in "abc"}
    r = family_of("bn254").r
    for change, error, message in (
        ({"n_wires": 2}, ConfigError, "2 public signals and wire 0 do not fit in 2 wires"),
        ({"n_constraints": 2**32}, ConfigError, r"n_constraints must be 0 to 2\^32 - 1"),
        ({"a": terms_of([(1, 0, 1)])}, ConfigError, "a has row 1; they must be below 1"),
        ({"b": terms_of([(0, 3, 1)])}, ConfigError, "b has wire 3; they must be below 3"),
        ({"c": terms_of([(0, 0, 1), (0, 1, r)])}, ConfigError, r"c\[1\] has a value that is not below r"),
        ({"a": np.zeros(2, np.uint64)}, UnsupportedDtype, "a must be"),
        ({"a": terms_of([(0, 1, 5)])[None]}, ShapeError, r"a must be \(n,\)"),
        ({"labels": np.zeros(2, np.uint64)}, ShapeError, r"labels must be \(3,\)"),
        ({"n_labels": -1}, ConfigError, "n_labels must be 0 to"),
        (
            {"n_prv_in": 1},
            ConfigError,
            "2 public signals, 1 private inputs and wire 0 do not fit in 3 wires and 3 labels",
        ),
    ):
        assert_raises(error, message, write_r1cs, tmp_path / "wrong.r1cs", "bn254", **(good | change))
    assert not list(tmp_path.iterdir())
