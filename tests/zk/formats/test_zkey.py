"""Groth16 keys: what is read, refused and written."""

import json
import struct

import numpy as np
import pytest
from parts import VECTORS, edited, offset_of, refused, take_apart, without

from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.curve.weierstrass import PrimeCoordinates, QuadraticCoordinates, in_subgroup
from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedDtype
from accelerant.zk.formats import COEFFICIENT, Label, Zkey, write_zkey
from refusals import assert_raises

KIND, FILE = Zkey, "product.zkey"
HEADER, IC, COEFFICIENTS, A, B1, B2, C, H, CONTRIBUTIONS = range(2, 11)
BEACON = bytes(range(1, 32))


def path_of(family):
    return VECTORS / family / "product.zkey"


def integers(words, modulus):
    """Canonical coefficients of words in Montgomery form."""
    raw, size = words.astype("<u8").tobytes(), 8 * -(-modulus.bit_length() // 64)
    inverse = pow(1 << 8 * size, -1, modulus)
    return [int.from_bytes(raw[i : i + size], "little") * inverse % modulus for i in range(0, len(raw), size)]


def montgomery(values, modulus):
    size = 8 * -(-modulus.bit_length() // 64)
    return b"".join((value * (1 << 8 * size) % modulus).to_bytes(size, "little") for value in values)


def everything(key):
    names = ("alpha1", "beta1", "beta2", "gamma2", "delta1", "delta2", "ic", "a", "b1", "b2", "c", "h", "coefficients")
    names += ("n_public", "circuit_hash", "contributions")
    return {name: getattr(key, name) for name in names}


def test_a_key_is_what_snarkjs_says_of_it(family):
    """Its verification key, exported by snarkjs, and the two constraints of product.circom."""
    exported = json.loads((VECTORS / family.name / "verification_key.json").read_text())

    def affine(point):
        return [int(c) for part in point[:2] for c in (part if isinstance(part, list) else [part])]

    with Zkey.open(path_of(family.name)) as key:
        assert (key.family, key.n_vars, key.n_public, key.domain_size, key.n_constraints) == (family.name, 6, 2, 8, 2)
        points = {"vk_alpha_1": key.alpha1, "vk_beta_2": key.beta2, "vk_gamma_2": key.gamma2, "vk_delta_2": key.delta2}
        for name, words in points.items():
            assert integers(words, family.q) == affine(exported[name]), name
        assert [integers(row, family.q) for row in key.ic] == [affine(point) for point in exported["IC"]]
        entries = {
            (int(m), int(row), int(signal)): value * pow(1 << 256, -1, family.r) % family.r
            for m, row, signal, words in key.coefficients.tolist()
            for value in integers(np.array(words, np.uint64), family.r)
        }
        minus = family.r - 1
        constraints = {(0, 0, 2): minus, (1, 0, 3): 1, (0, 1, 0): minus - 2, (0, 1, 4): minus, (1, 1, 5): 1}
        assert entries == constraints | {(0, 2 + s, s): 1 for s in range(3)}
        limbs = len(key.alpha1)
        shapes = {name: words.shape for name, words in key.points.items()}
        assert shapes == {
            "IC": (3, limbs), "A": (6, limbs), "B1": (6, limbs), "B2": (6, 2 * limbs), "C": (3, limbs), "H": (8, limbs)
        }  # fmt: skip


@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_chunks_are_the_sections(family, rows):
    """Pages that were given back come again: what is read before, after and in between is the same."""
    with Zkey.open(path_of(family.name)) as key:
        before = {name: np.array(words) for name, words in key.points.items()}
        for name, words in before.items():
            chunks = list(key.chunks(name, rows))
            assert [len(chunk) for chunk in chunks[:-1]] == [rows] * (len(chunks) - 1)
            assert (np.concatenate(chunks) == words).all()
            assert all(chunk.flags.aligned and chunk.flags.owndata for chunk in chunks)
            assert (key.points[name] == words).all()
        entries = np.array(key.coefficients)
        key.forget()
        assert (key.coefficients == entries).all()


def test_contributions_are_told(family):
    with Zkey.open(path_of(family.name)) as key:
        assert [each.label for each in key.contributions] == [Label(0, "one"), Label(1, "two", 10, BEACON)]
        assert np.array_equal(key.contributions[-1].delta_after, key.delta1)
        assert len(key.circuit_hash) == 64


def test_written_again_it_is_the_same_file(family, data, tmp_path):
    with Zkey.open(path_of(family.name)) as key:
        write_zkey(tmp_path / "again.zkey", key.family, **everything(key))
    with Zkey.open(tmp_path / "again.zkey") as again:
        assert again.check() is None
        assert [each.label for each in again.contributions] == [Label(0, "one"), Label(1, "two", 10, BEACON)]
    # snarkjs has the sections in this order once a contribution was made
    assert (tmp_path / "again.zkey").read_bytes() == data


def test_a_key_without_contributions(altered, data):
    with altered(without(data, CONTRIBUTIONS)) as key:
        assert (key.circuit_hash, key.contributions) == (b"", ())


def test_other_protocols_are_named(altered, data):
    for protocol, name in ((2, r" \(PLONK\)"), (10, r" \(FFLONK\)"), (7, "")):
        with refused(1, 24, f"protocol {protocol}{name}; only 1"):
            altered(edited(data, 1, 0, struct.pack("<I", protocol)))


def test_headers_that_no_key_has(altered, data, family):
    size = 8 * -(-family.q.bit_length() // 64)
    counts = 4 + size + 4 + 32
    other = family_of({"bn254": "bls12_381", "bls12_381": "bn254"}[family.name])
    wrong = {
        (0, struct.pack("<I", 31), "q has 31 bytes; supported sizes are 32 and 48"),
        (0, struct.pack("<I", 2**32 - 1), "q has 4294967295 bytes"),
        (4, (family.q - 2).to_bytes(size, "little"), "not the prime of a supported curve"),
        (4 + size + 4, other.r.to_bytes(32, "little"), f"r is not the group order of {family.name}"),
        (counts, struct.pack("<II", 6, 6), "6 public signals and w\\[0\\] exceed 6 signals"),
        (counts, struct.pack("<II", 0, 0), "0 public signals"),
        (counts + 8, struct.pack("<I", 7), "domainSize is 7; it must be a power of two"),
        (counts + 8, struct.pack("<I", 0), "domainSize is 0"),
        (counts + 8, struct.pack("<I", 2), "domainSize is 2; it must be a power of two greater than the 2 public"),
        (counts + 12, family.q.to_bytes(size, "little"), "alpha1 is not below the modulus"),
    }
    for at, new, message in wrong:
        offset = offset_of(data, HEADER) + at
        if "r is not" in message:
            offset -= 4
        with refused(HEADER, offset, message):
            altered(edited(data, HEADER, at, new))
    if family.name == "bn254":  # 2^28 is the last power of two that divides r - 1
        with refused(HEADER, None, r"domainSize is 536870912; .* at most 2\^28"):
            altered(edited(data, HEADER, counts + 8, struct.pack("<I", 1 << 29)))


def test_counts_that_would_overflow_are_refused_before_anything_is_allocated(altered, data, family):
    size = 8 * -(-family.q.bit_length() // 64)
    counts = 4 + size + 36
    huge = 2**32 - 1
    with refused(A, None, f"bytes, {huge} points need {huge * 16 * (size // 8)}"):
        altered(edited(data, HEADER, counts, struct.pack("<I", huge)))
    at = offset_of(data, COEFFICIENTS)
    with refused(COEFFICIENTS, at, f"{huge} coefficients need {4 + 44 * huge}"):
        altered(edited(data, COEFFICIENTS, 0, struct.pack("<I", huge)))
    with refused(CONTRIBUTIONS, None, "the section ends within"):
        altered(edited(data, CONTRIBUTIONS, 64, struct.pack("<I", huge)))


@pytest.mark.parametrize(("name", "at", "bound"), [("matrix", 0, 2), ("row", 4, 8), ("signal", 8, 6)])
def test_coefficients_out_of_range_are_never_given_out(altered, data, name, at, bound):
    index = 3
    place = 4 + 44 * index + at
    with altered(edited(data, COEFFICIENTS, place, struct.pack("<I", bound - 1))) as key:
        assert len(key.coefficients) == 8
    with altered(edited(data, COEFFICIENTS, place, struct.pack("<I", bound))) as key:
        offset = offset_of(data, COEFFICIENTS) + place
        for _ in range(2):
            with refused(COEFFICIENTS, offset, f"coefficient 3: {name} {bound} is not below {bound}"):
                _ = key.coefficients


def test_contributions_that_are_none(altered, data):
    label = -(len(BEACON) + 2 + 2 + 5 + 8)  # of the last one: kind, length, name, iterations, beacon
    wrong = {
        (label, struct.pack("<I", 2), "contribution of kind 2"),
        (label + 4, struct.pack("<I", 1000), "1000 bytes of a contribution's parameters"),
        (label + 8, b"\x09", "parameter 9 after 0"),
        (label + 13, b"\x01", "parameter 1 after 1"),
        (label + 9, b"\xff", "the section ends within a contribution's parameter"),
        (label + 16, b"\x1e", "parameter 31 after 3|a contribution's parameter"),
    }
    for at, new, message in wrong:
        with refused(CONTRIBUTIONS, None, message):
            altered(edited(data, CONTRIBUTIONS, at, new))


def test_a_name_cut_inside_a_character_is_read(altered, data):
    label = -(len(BEACON) + 2 + 2 + 5)
    with altered(edited(data, CONTRIBUTIONS, label + 2, b"t\xc3\xc3")) as key:
        assert key.contributions[-1].label.name == "t��"


# --- check() ---------------------------------------------------------------------------------------------------------
def out_of_subgroup(curve):
    """A point of the curve out of the subgroup of order r."""
    k = curve.coordinates
    for x in range(1, 100):
        point_x = k.join([x] + [1] * (k.degree - 1))
        y = k.sqrt(curve.right_side(point_x))
        if y is not None and not in_subgroup(curve, (point_x, y)):
            assert isinstance(k, (PrimeCoordinates, QuadraticCoordinates))
            return [*k.parts(point_x), *k.parts(y)]
    raise AssertionError("none found")


@pytest.mark.sample(2, 1)
def test_a_point_out_of_the_subgroup_among_many_is_found(tmp_path, family):
    """Sections of so many points are tested as sums of random subsets."""
    with Zkey.open(path_of(family.name)) as key:
        arrays, n = everything(key), 700
        many = {name: np.tile(arrays[name], (n, 1))[: 1024 if name == "h" else n] for name in ("a", "b1", "b2", "h")}
        many["c"] = np.tile(arrays["c"], (n, 1))[: n - arrays["n_public"] - 1]
    path = tmp_path / "many.zkey"
    write_zkey(path, family.name, **(arrays | many))
    with Zkey.open(path) as key:
        key.check()
    cases = [("b2", B2, family.g2)] + [("h", H, family.g1)] * (family.g1.cofactor > 1)
    for name, number, curve in cases:
        wrong = many[name].copy()
        wrong[650] = np.frombuffer(montgomery(out_of_subgroup(curve), family.q), "<u8")
        write_zkey(path, family.name, **(arrays | many | {name: wrong}))
        message = rf"section {number} \(.*\), byte \d+: point 650 is on {curve.name} but not in its subgroup"
        with Zkey.open(path) as key, pytest.raises(FormatError, match=message):
            key.check()
        with Zkey.open(path) as key:
            key.check(subgroup=False)


@pytest.mark.parametrize("number", [IC, A, B1, B2, C, H])
def test_points_off_the_curve_are_found(altered, data, family, number):
    with Zkey.open(path_of(family.name)) as key:
        size = 8 * key._sections[number][1]
    index = 2
    with altered(edited(data, number, index * size, b"\x01")) as key:
        place = offset_of(data, number) + index * size
        with pytest.raises(
            FormatError, match=rf"section {number} \(.*\), byte {place}: point {index} is not on {family.name}"
        ):
            key.check()


@pytest.mark.parametrize("number", [IC, A, B1, B2, C, H])
def test_coordinates_that_are_not_reduced_are_found(altered, data, family, number):
    size = 8 * -(-family.q.bit_length() // 64)
    at = 3 * size
    for value in (family.q, (1 << 8 * size) - 1):
        place = offset_of(data, number) + at
        wrong = edited(data, number, at, value.to_bytes(size, "little"))
        with refused(number, place, "an element is not below"), altered(wrong) as key:
            assert number != IC  # of which there are few: found at once
            key.check()


@pytest.mark.parametrize("number", [A, B2])
def test_points_out_of_the_subgroup_are_found(altered, data, family, number):
    curve = family.g2 if number == B2 else family.g1
    if curve.cofactor == 1:
        return  # every point of the curve is in it
    words = montgomery(out_of_subgroup(curve), family.q)
    with altered(edited(data, number, len(words), words)) as key:
        key.check(subgroup=False)
        with refused(number, offset_of(data, number) + len(words), f"point 1 is on {curve.name} but not in"):
            key.check()


def test_infinity_in_the_header_and_values_not_below_r_are_found(altered, data, family):
    size = 8 * -(-family.q.bit_length() // 64)
    with altered(edited(data, HEADER, -4 * size, bytes(4 * size))) as key:
        place = offset_of(data, HEADER) + len(key.alpha1) * 8 * 9 + 4 + size + 4 + 32 + 12 - 4 * size
        with refused(HEADER, place, "delta2 is infinity"):
            key.check()
    with (
        altered(edited(data, HEADER, -1, b"\0")) as key,
        refused(HEADER, None, f"delta2 is not on {family.name}_g2"),
    ):
        key.check()
    large = edited(data, COEFFICIENTS, 4 + 2 * 44 + 12, family.r.to_bytes(32, "little"))
    with altered(large) as key, refused(COEFFICIENTS, None, "coefficient 2: the value is not below r"):
        key.check()


def test_a_last_contribution_of_another_key_is_found(altered, data, family):
    with Zkey.open(path_of(family.name)) as key:
        first = key.contributions[0].delta_after.astype("<u8").tobytes()
        last = key.contributions[1].delta_after.astype("<u8").tobytes()
    at = dict(take_apart(data)[2])[CONTRIBUTIONS].index(last)
    other = edited(data, CONTRIBUTIONS, at, first)
    with altered(other) as key, refused(CONTRIBUTIONS, None, "delta1 of the last contribution differs"):
        key.check()


# --- writing ---------------------------------------------------------------------------------------------------------
def test_arguments_that_make_no_key(tmp_path):
    with Zkey.open(path_of("bn254")) as key:
        good = everything(key)
        wrong = [
            ({"a": key.a[:, :-1]}, ShapeError, r"a must be \(6, 8\), got \(6, 7\)"),
            ({"b2": key.b2[:-1]}, ShapeError, r"b2 must be \(6, 16\), got \(5, 16\)"),
            ({"ic": key.ic.astype(np.int64)}, UnsupportedDtype, "ic must be uint64, got int64"),
            ({"h": key.h[:7]}, ConfigError, "number of points of h must be a power of two"),
            ({"n_public": 6}, ConfigError, "n_public must be 0 to 5"),
            ({"circuit_hash": b"short"}, ConfigError, "circuit_hash must have 64 bytes, got 5"),
            ({"coefficients": np.zeros(3, np.uint32)}, UnsupportedDtype, "coefficients must be"),
            ({"coefficients": np.zeros((1, 1), COEFFICIENT)}, ShapeError, r"coefficients must be \(n,\)"),
        ]
        for change, error, message in wrong:
            assert_raises(error, message, write_zkey, tmp_path / "wrong.zkey", "bn254", **(good | change))
        assert_raises(ConfigError, "unknown pairing 'bn256'", write_zkey, tmp_path / "wrong.zkey", "bn256", **good)
    assert not list(tmp_path.iterdir())
