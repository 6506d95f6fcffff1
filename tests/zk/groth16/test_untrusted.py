"""Keys, points, numbers and batches that strangers send: what each entrance of a verifier answers."""

import copy
import dataclasses
import enum
import functools
import itertools
import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest

import commands
from accelerant.algebra.curve.parameters import endomorphism, family_of
from accelerant.algebra.curve.weierstrass import add, decode_points, encode_points, multiply, negate
from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.words import decode
from accelerant.errors import AccelerantError, ConfigError, FormatError, ShapeError, UnsupportedDtype
from accelerant.zk import curve as curve_named
from accelerant.zk.formats import Witness, Zkey, describe, write_wtns, write_zkey
from accelerant.zk.formats.container import montgomery_points
from accelerant.zk.groth16 import Proof, VerificationKey, prove, verify, verify_many
from accelerant.zk.groth16.proof import point_to_json
from accelerant.zk.groth16.verifier import Statement
from refusals import assert_raises

sys.path.append(str(Path(__file__).parents[2] / "algebra"))
from small_orders import of_small_order, point_out_of_subgroup

VECTORS = Path(__file__).parents[2] / "vectors"
H = 10**5000
"""An integer that Python refuses to print."""

FAMILIES = ["bn254", "bls12_381"]
KEY = {"alpha": "g1", "beta": "g2", "gamma": "g2", "delta": "g2", "ic[0]": "g1", "ic[2]": "g1"}
JSON_NAMES = {"alpha": "vk_alpha_1", "beta": "vk_beta_2", "gamma": "vk_gamma_2", "delta": "vk_delta_2"}
ZKEY_NAMES = {"alpha": "alpha1", "beta": "beta2", "gamma": "gamma2", "delta": "delta2"}


@functools.cache
def folder(family):
    return VECTORS / "formats" / family


@functools.cache
def key_of(family):
    return VerificationKey.from_json((folder(family) / "verification_key.json").read_text())


@functools.cache
def points_of(family):
    """The key's points in Python."""
    key, pairing = key_of(family), family_of(family)
    found = {name: decode_points(getattr(pairing, KEY[name]), getattr(key, name)[None])[0] for name in JSON_NAMES}
    return found | {f"ic[{i}]": point for i, point in enumerate(decode_points(pairing.g1, key.ic))}


@functools.cache
def torsion(family, group):
    """Points on the curve of a small order, by the order; none if every point is in the subgroup."""
    pairing = family_of(family)
    curve = getattr(pairing, group)
    orders = {"bn254_g1": (), "bn254_g2": (10069,), "bls12_381_g1": (3, 11), "bls12_381_g2": (13,)}[curve.name]
    return {order: of_small_order(curve, order) for order in orders}


def wrong_points(family, group, point):
    """Kind -> point that is wrong in this way."""
    curve = getattr(family_of(family), group)
    k = curve.coordinates
    kinds = {"off the curve": (point[0], k.add(point[1], k.one)), "x and y exchanged": (point[1], point[0])}
    for order, small in torsion(family, group).items():
        kinds |= {f"of order {order}": small, f"plus a point of order {order}": add(curve, point, small)}
    if curve.cofactor > 1:
        kinds["out of the subgroup"] = point_out_of_subgroup(curve)
    return kinds


def key_with(family, changes):
    """The key with other points, as the constructor takes them."""
    key = key_of(family)
    for name, point in changes.items():
        curve = getattr(family_of(family), "g1" if name[0] in "ai" else "g2")
        (words,) = encode_points(curve, [point])
        if name.startswith("ic"):
            ic = key.ic.copy()
            ic[int(name[3])] = words
            key = dataclasses.replace(key, ic=ic)
        else:
            key = dataclasses.replace(key, **{name: words})
    return key


def json_with(family, name, rows):
    value = json.loads((folder(family) / "verification_key.json").read_text())
    if name.startswith("ic"):
        value["IC"][int(name[3])] = rows
    else:
        value[JSON_NAMES[name]] = rows
    return json.dumps(value)


def zkey_with(path, family, name, point):
    """Write a proving key with another point, and return its path."""
    curve = getattr(family_of(family), KEY[name])
    (words,) = montgomery_points(curve, encode_points(curve, [point]))
    names = ("alpha1", "beta1", "beta2", "gamma2", "delta1", "delta2", "a", "b1", "b2", "c", "h", "coefficients")
    with Zkey.open(folder(family) / "product.zkey") as zkey:
        arrays = {each: np.array(getattr(zkey, each)) for each in (*names, "ic")}
        if name.startswith("ic"):
            arrays["ic"][int(name[3])] = words
        else:
            arrays[ZKEY_NAMES[name]] = words
        write_zkey(path, family, n_public=zkey.n_public, **arrays)
    return path


command = functools.partial(commands.run, "zk")


# --- keys ------------------------------------------------------------------------------------------------------------
@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", KEY)
def test_a_wrong_point_of_a_key_is_refused_where_the_key_enters(family, name, tmp_path, capsys):
    curve, point = getattr(family_of(family), KEY[name]), points_of(family)[name]
    upper = name.replace("ic", "IC")
    for kind, wrong in wrong_points(family, KEY[name], point).items():
        what = "not on|subgroup"
        with pytest.raises(FormatError, match=rf"^{name.replace('[', '.').replace(']', '.')}.*({what})"):
            key_with(family, {name: wrong})
        text = json_with(family, name, point_to_json(curve, wrong))
        refused = assert_raises(FormatError, what, VerificationKey.from_json, text, name="vk.json")
        assert str(refused).startswith(f"vk.json: {JSON_NAMES.get(name, upper)}"), kind
        evil = zkey_with(tmp_path / "evil.zkey", family, name, wrong)
        assert_raises(FormatError, rf"evil.zkey: section [23] .*({what})", VerificationKey.from_zkey, evil)
        status, output, error = command(capsys, "export-vk", evil, tmp_path / "vk.json")
        assert (status, output) == (2, ""), kind
        assert "not on" in error or "subgroup" in error
        assert not (tmp_path / "vk.json").exists()
    negated = key_with(family, {name: negate(curve, point)})
    assert negated.forgeable is None
    assert family != "bn254" or not verify(negated, proof_of(family).public, proof_of(family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", KEY)
def test_infinity_and_unreduced_coordinates_of_a_key(family, name, tmp_path):
    curve, point = getattr(family_of(family), KEY[name]), points_of(family)[name]
    q = curve.coordinates.base.modulus
    infinite = json_with(family, name, point_to_json(curve, None))
    evil = zkey_with(tmp_path / "evil.zkey", family, name, None)
    if name.startswith("ic"):
        assert f"IC[{name[3]}] of this key is infinity" in VerificationKey.from_json(infinite).forgeable
        assert VerificationKey.from_zkey(evil).forgeable == VerificationKey.from_json(infinite).forgeable
        what = "forge proofs for it with all public inputs 0" if name == "ic[0]" else r"valid with any public[1]"
        assert what in VerificationKey.from_json(infinite).forgeable
    else:
        for read in (
            lambda: VerificationKey.from_json(infinite),
            lambda: key_with(family, {name: None}),
            lambda: VerificationKey.from_zkey(evil),
        ):
            assert_raises(FormatError, f"({name}|{JSON_NAMES[name]}|{ZKEY_NAMES[name]}) is infinity", read)
        with Zkey.open(evil) as zkey:
            assert f"{ZKEY_NAMES[name]} of this key is infinity" in zkey.forgeable
    rows = point_to_json(curve, point)
    first = rows[0] if curve.coordinates.degree == 1 else rows[0][0]
    for number in (str(int(first) + q), str(q), f"-{first}", f"+{first}", f"0{first}", f"{first} "):
        changed = [number if curve.coordinates.degree == 1 else [number, rows[0][1]], *rows[1:]]
        with pytest.raises(FormatError, match=r"not below the modulus|decimal string"):
            VerificationKey.from_json(json_with(family, name, changed))
    words = encode_points(curve, [point])[0]
    words.reshape(-1, curve.coordinates.base.limbs)[0] = [q >> 64 * i & (2**64 - 1) for i in range(words.shape[-1])]
    changes = {"ic": np.stack([words, words])} if name.startswith("ic") else {name: words}
    assert_raises(FormatError, "not below the modulus", lambda: dataclasses.replace(key_of(family), **changes))


def test_words_that_are_no_key():
    key = key_of("bn254")
    for changes, error, match in (
        ({"family": "bn255"}, ConfigError, "unknown pairing 'bn255'"),
        ({"family": ["bn254"]}, ConfigError, "unknown pairing"),
        ({"family": "bls12_381"}, ShapeError, "alpha must be"),
        ({"alpha": key.alpha.astype(np.int64)}, UnsupportedDtype, "points must be uint64"),
        ({"alpha": None}, ShapeError, "alpha must be"),
        ({"beta": key.beta[0]}, ShapeError, r"beta must be \(2, 2, 4\), got"),
        ({"ic": key.ic[:0]}, ShapeError, r"ic must be \(nPublic \+ 1, 2, 4\), got \(0, 2, 4\)"),
        ({"ic": key.ic[0]}, ShapeError, "ic must be"),
        ({"ic": [[1], [2, 3]]}, UnsupportedDtype, "ic must be an array of uint64 on the host, got list"),
        ({"ic": np.ma.masked_array(key.ic, key.ic == 5)}, UnsupportedDtype, "ic is a masked array"),
    ):
        assert_raises(error, match, dataclasses.replace, key, **changes)


def test_a_key_cannot_change_after_its_check():
    key = key_of("bn254")
    assert dataclasses.replace(key, ic=np.zeros_like(key.ic[:1])).n_public == 0  # infinity, of a circuit without inputs
    source = key.ic.copy()
    made = dataclasses.replace(key, ic=source)
    source[:] = 1
    assert np.array_equal(made.ic, key.ic)
    text = pickle.dumps(made)
    for each in (made, copy.copy(made), copy.deepcopy(made), pickle.loads(text)):
        for name in ("alpha", "beta", "gamma", "delta", "ic"):
            with pytest.raises(ValueError, match="read-only"):
                getattr(each, name)[:] = 0
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                getattr(each, name).setflags(write=True)
        assert each.to_json() == key.to_json()
        assert len({each, key}) == 1
    assert text.count(key.ic[1].tobytes()) == 1
    with pytest.raises(FormatError, match=r"ic\[1\].* is not on bn254_g1"):
        pickle.loads(text.replace(key.ic[1].tobytes(), key.ic[1].tobytes()[::-1][1:] + b"\0"))


# --- keys that anyone can forge proofs for ---------------------------------------------------------------------------
def related_keys(family):
    """Name -> a key with two points whose logarithms are otherwise unknown, and a proof that needs no witness."""
    pairing, p = family_of(family), points_of(family)
    g1, g2, r = pairing.g1, pairing.g2, pairing.r
    public = (5, 77)
    total = p["ic[0]"]
    for i, x in enumerate(public):
        total = add(g1, total, multiply(g1, x, p[f"ic[{i + 1}]"]))
    psi = endomorphism(g2)
    alpha, beta, gamma, delta = p["alpha"], p["beta"], p["gamma"], p["delta"]
    eigenvalue = psi.eigenvalue if multiply(g2, psi.eigenvalue, gamma) == psi.apply(g2, gamma) else -psi.eigenvalue
    for k in (1, -1, 16, pow(16, -1, r), 15 * pow(-7, -1, r) % r, eigenvalue):
        inverse = pow(k, -1, r)
        yield f"delta {k}", {"delta": multiply(g2, inverse, gamma)}, (public, alpha, beta, multiply(g1, -k, total))
    yield "beta", {"beta": multiply(g2, 3, gamma)}, (public, add(g1, multiply(g1, 3, alpha), total), gamma, None)
    yield "beta and delta", {"beta": multiply(g2, -2, delta)}, (public, total, gamma, multiply(g1, 2, alpha))
    yield "delta 1", {"gamma": multiply(g2, 7**99, gamma), "delta": multiply(g2, 4, g2.generator)}, None
    yield "beta 1", {"gamma": multiply(g2, 7**99, gamma), "beta": negate(g2, g2.generator)}, None
    yield "alpha 1", {"alpha": multiply(g1, 5, g1.generator)}, None
    third = pow(g1.scalars.generator, (r - 1) // 3, r)  # by which the other endomorphism multiplies
    yield "alpha third", {"alpha": multiply(g1, -third * third % r, g1.generator)}, None
    zero = (0, 0)
    yield "ic 0 infinite", {"ic[0]": None}, (zero, alpha, beta, None)
    three = add(g2, beta, multiply(g2, 3, gamma))
    yield "ic 0 alpha", {"ic[0]": multiply(g1, 3, alpha)}, (zero, alpha, three, None)
    yield "ic 1 infinite", {"ic[1]": None}, None
    yield "ic 0 opposite", {"ic[0]": negate(g1, p["ic[2]"])}, ((0, 1), alpha, beta, None)
    yield "ic 1 equal", {"ic[1]": p["ic[2]"]}, None
    yield "ic 0 twice", {"ic[0]": multiply(g1, -2 % r, p["ic[1]"])}, ((2, 0), alpha, beta, None)
    yield "ic 2 third", {"ic[2]": multiply(g1, 3 * third % r, p["ic[1]"])}, None


@pytest.mark.parametrize("family", ["bn254", pytest.param("bls12_381", marks=pytest.mark.slow)])
def test_forgeable_keys_say_so(family):
    """Each kind of related points is reported, and where the key suffices the forged proof verifies."""
    assert key_of(family).forgeable is None
    forged = 0
    for name, changes, proof in related_keys(family):
        key = key_with(family, changes)
        assert key.forgeable is not None, name
        assert ("anyone can forge" in key.forgeable) == (name not in ("ic 1 infinite", "ic 1 equal", "ic 2 third")), (
            name
        )
        if proof is not None:
            public, a, b, c = proof
            forgery = Proof(family, a, b, c)
            assert verify(key, public, forgery), name
            assert verify_many(key, [public] * 2, [forgery] * 2), name
            forged += 1
    assert forged == 12


def test_unrelated_points_are_not_called_forgeable():
    """Factors that nobody would try, and gamma = 1, which every key of snarkjs has."""
    g2 = family_of("bn254").g2
    assert points_of("bn254")["gamma"] == g2.generator
    for k in (17, 3**50, -(7**40)):
        assert key_with("bn254", {"delta": multiply(g2, k, points_of("bn254")["beta"])}).forgeable is None
    for circuit in ("range", "poseidon"):
        text = (VECTORS / "groth16" / circuit / "verification_key.json").read_text()
        assert VerificationKey.from_json(text).forgeable is None


def test_equal_and_opposite_points_among_many():
    many = oracle.key_of_logarithms("bn254", 2**100, 3**70, 1, 5**60, [7**50 + i for i in range(300)])
    assert many.forgeable is None
    for last in (many.ic[7], curve_named("bn254_g1").neg(many.ic[7])):
        ic = np.concatenate([many.ic[:-1], last[None]])
        assert dataclasses.replace(many, ic=ic).forgeable.startswith("IC[7] and IC[299] of this key are related")


def test_a_forgeable_proving_key_says_so(tmp_path):
    """The header of a .zkey is in Montgomery form; its report is that of its verification key."""
    gamma = points_of("bn254")["gamma"]
    evil = zkey_with(tmp_path / "evil.zkey", "bn254", "delta", multiply(family_of("bn254").g2, 3, gamma))
    with Zkey.open(evil) as zkey:
        assert (
            zkey.forgeable
            == "gamma2 and delta2 of this key are related by a small factor, so anyone can forge proofs for it"
        )
        assert VerificationKey.from_zkey(zkey).forgeable == zkey.forgeable


# --- proofs ----------------------------------------------------------------------------------------------------------
@functools.cache
def proof_of(family):
    """A valid proof of the family's key, by Python: the prover's kernels take a second to compile."""
    with Witness.open(folder(family) / "product.wtns") as witness, Zkey.open(folder(family) / "product.zkey") as zkey:
        values = decode(FIELDS[f"{family}_fr"], np.array(witness.values))
        return Proof(family, *oracle.prove(zkey, values, 3, 5), tuple(values[1 : zkey.n_public + 1]))


@pytest.mark.parametrize("family", ["bn254", pytest.param("bls12_381", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_wrong_point_of_a_proof_is_refused_everywhere(family, name, tmp_path, capsys):
    key, proof, group = key_of(family), proof_of(family), "g2" if name == "b" else "g1"
    curve, point = getattr(family_of(family), group), getattr(proof, name)
    public = proof.public
    (tmp_path / "q.json").write_text(proof.public_json())
    for kind, wrong in wrong_points(family, group, point).items():
        forged = dataclasses.replace(proof, **{name: wrong})
        for call in (
            lambda forged=forged: verify(key, public, forged),
            lambda forged=forged: verify_many(key, [public], [forged]),
            lambda forged=forged: verify_many(key, [public] * 3, [proof, forged, proof]),
            forged.to_json,
        ):
            for _ in range(3):  # a random combination must not hide it now and then
                assert_raises(FormatError, rf"^(pi_|proofs\[[01]\]\.){name}.*(not on|subgroup)", call)
        others = {"a": None, "b": None, "c": None} | {name: wrong}  # infinity in its pair must not hide it
        assert_raises(FormatError, r"not on|subgroup", verify, key, public, dataclasses.replace(proof, **others))
        with pytest.raises(FormatError, match=r"not on|subgroup"):
            verify_many(key, [public] * 2, [proof, dataclasses.replace(proof, **others)])
        text = dataclasses.replace(proof, **{name: None}).to_json()
        value = json.loads(text) | {f"pi_{name}": point_to_json(curve, wrong)}
        (tmp_path / "p.json").write_text(json.dumps(value))
        status, output, error = command(
            capsys, "verify", folder(family) / "verification_key.json", tmp_path / "q.json", tmp_path / "p.json"
        )
        assert (status, output) == (2, ""), kind
        assert "not on" in error or "subgroup" in error
    for wrong in (None, negate(curve, point), curve.generator, multiply(curve, 2, point)):
        other = dataclasses.replace(proof, **{name: wrong})
        assert not verify(key, public, other)
        assert not verify_many(key, [public] * 2, [proof, other])
    q = curve.coordinates.base.modulus
    x, y = point
    for moved in ((x + q, y), (x, y - q)) if group == "g1" else (((x[0] + q, x[1]), y), (x, (y[0], y[1] - q))):
        other = dataclasses.replace(proof, **{name: moved})
        for call in (lambda other=other: verify(key, public, other), other.to_json):
            assert_raises(FormatError, "not reduced", call)


def test_pi_c_of_small_order_in_a_batch():
    """Random coefficients annihilate a point of order 3 in a third of the draws: each pi_C is tested by itself."""
    key, pairing = key_of("bls12_381"), family_of("bls12_381")
    good = Proof("bls12_381", pairing.g1.generator, pairing.g2.generator, pairing.g1.generator)
    forged = dataclasses.replace(good, c=add(pairing.g1, good.c, (0, 2)))
    for _ in range(12):
        with pytest.raises(FormatError, match=r"^proofs\[1\]\.c .*out of the subgroup of bls12_381_g1"):
            verify_many(key, [(1, 2)] * 2, [good, forged])


def test_a_batch_draws_coefficients_of_128_bits(monkeypatch):
    """With one byte a wrong proof would pass with probability 1/256."""
    drawn, real = [], os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: drawn.append(size) or real(size))
    proof = proof_of("bn254")
    assert verify_many(key_of("bn254"), [proof.public] * 3, [proof] * 3)
    assert drawn == [16] * 3
    # whoever knew the coefficients could make errors cancel: only so are all of their bits seen to be used
    g1, known = family_of("bn254").g1, [2**127 + 3, 2**126 + 5]
    errors = zip((1, -1), reversed(known), strict=True)
    pair = [
        dataclasses.replace(proof, c=add(g1, proof.c, multiply(g1, x * y % g1.order, g1.generator))) for x, y in errors
    ]
    assert not verify_many(key_of("bn254"), [proof.public] * 2, pair)
    values = iter(known)
    monkeypatch.setattr(os, "urandom", lambda size: next(values).to_bytes(size, "little"))
    assert verify_many(key_of("bn254"), [proof.public] * 2, pair)


def test_batches():
    key, proof = key_of("bn254"), proof_of("bn254")
    public, g1 = proof.public, family_of("bn254").g1
    assert verify_many(key, [], [])
    assert verify_many(key, iter([public] * 2), (proof for _ in range(2)))
    assert verify_many(key, [iter(public)], [proof])
    for many, found in (
        ([public] * 5, "5"),
        (itertools.repeat(public), "at least 3"),
        (iter([public]), "1"),
        ([], "0"),
    ):
        with pytest.raises(ConfigError, match=f"as many lists of public inputs as proofs, got {found} and 2$"):
            verify_many(key, many, [proof] * 2)
    bad = dataclasses.replace(proof, c=add(g1, proof.c, g1.generator))
    opposite = dataclasses.replace(proof, c=add(g1, proof.c, negate(g1, g1.generator)))
    for n in (1, 2, 5):
        for at in range(n):
            assert not verify_many(key, [public] * n, [bad if i == at else proof for i in range(n)])
    for wrong in ([bad, bad], [bad, opposite], [proof, bad, proof, opposite]):
        assert not verify_many(key, [public] * len(wrong), wrong)
    texts = [(VECTORS / "groth16" / "poseidon" / f"{name}.json").read_text() for name in ("proof", "public")]
    foreign = Proof.from_json(*texts)  # of a circuit with as many public inputs
    assert len(foreign.public) == len(public)
    assert not verify(key, foreign.public, foreign)
    assert not verify_many(key, [public, foreign.public], [proof, foreign])
    other = ((public[0] + 1) % family_of("bn254").r, *public[1:])
    assert not verify_many(key, [other, public], [proof, proof])
    with pytest.raises(ConfigError, match="the verification key is on bn254, the proof on bls12_381"):
        verify_many(key, [public] * 2, [proof, dataclasses.replace(proof, family="bls12_381")])
    for arguments, match in (
        ((None, [public], [proof]), "verification_key must be a VerificationKey, got NoneType"),
        ((key, [public], [None]), "proof 0 must be a Proof, got NoneType"),
        ((key, [public], proof), "proofs must be a sequence of proofs, got Proof"),
        ((key, 5, [proof]), "public must be a sequence of lists of public inputs, got int"),
        ((key, {public: 1}, [proof]), "got dict"),
        ((key, "12", [proof]), "got str"),
        ((key, [5], [proof]), r"public\[0\] must be a sequence of Python integers, got int"),
        ((key, [b"\1\2"], [proof]), r"public\[0\] must be a sequence of Python integers, got bytes"),
        ((key, [{1, 2}], [proof]), r"public\[0\] must be a sequence of Python integers, got set"),
    ):
        assert_raises(UnsupportedDtype, match, verify_many, *arguments)
    statement = Statement(key, public)
    with pytest.raises(ConfigError, match="the verification key is on bn254, the proof on bls12_381"):
        statement.proved_by(dataclasses.replace(proof, family="bls12_381"))
    for arguments in (
        (None, public, proof),
        (key, public, None),
        (key, public, [proof.to_json()]),
        (proof, public, key),
    ):
        assert_raises(UnsupportedDtype, r"must be a (VerificationKey|Proof)", verify, *arguments)


# --- numbers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_in_json(family):
    """Only the one decimal text of a number below r is read."""
    r, text = family_of(family).r, good_text(family)
    for value in ("0", "1", str(r - 1)):
        assert Proof.from_json(text, json.dumps([value])).public == (int(value),)
    texts = [
        "-1", "+1", "-0", "1_0", "01", "00", "0x1", "1.0", "1e3", "1,0", "nan", "\u0661", "\uff11", "\u00b2", "1\0",
    ]  # fmt: skip
    texts += [str(r), str(r + 1), str(2 * r), " 1", "1 ", "1\n", "\t1", "", "9" * 5000]
    wrong = [*texts, 1, 0, 1.5, True, None, {}]
    for value in wrong:
        for rows in ([value], ["1", value]):
            assert_raises(FormatError, r"^public(\[\d\])? (must be|is)", Proof.from_json, text, json.dumps(rows))
    for value in (
        "[[]]",
        '["1",',
        '{"0": "1"}',
        '"1"',
        "1",
        "null",
        "",
        "[" * 5000,
        '[["1"]]',
        "[1e999]",
        "[NaN]",
        f"[{'9' * 5000}]",
    ):
        assert_raises(FormatError, r"^public", Proof.from_json, text, value)


def test_lists_and_objects_among_public_inputs_are_not_parsed():
    """Counting brackets is quick; a scan of 16 MB for their depth took 9 s."""
    for value in ("[[]]", '["1", {}]', "{}", "[], []", "1", b"[[]]", b"{}", ""):
        with pytest.raises(
            FormatError, match=r"^public must be a list of decimal strings, without other lists and objects$"
        ):
            Proof.from_json(good_text("bn254"), value)


@functools.cache
def good_text(family):
    pairing = family_of(family)
    return Proof(family, pairing.g1.generator, pairing.g2.generator, pairing.g1.generator).to_json()


class Strange(int):
    """An integer whose methods are others, as those of a class of field elements or of an Enum."""

    def __mul__(self, other):
        return 0

    __rmul__ = __mul__

    def __lt__(self, other):
        return True

    __le__ = __ge__ = __gt__ = __lt__

    def __str__(self):
        return "strange"

    def __index__(self):
        return 7

    def __format__(self, _):
        return "0"

    def to_bytes(self, *arguments, **options):
        return (1).to_bytes(*arguments, **options)


def test_numbers_in_python():
    key, proof = key_of("bn254"), proof_of("bn254")
    for public, found in (([None] * 3, "3"), ([], "0"), (itertools.repeat(None), "3 or more"), (iter([None]), "1")):
        with pytest.raises(FormatError, match=rf"^public has {found} inputs; the verification key is for 2$"):
            verify(key, public, proof)
    first, r = proof.public[0], family_of("bn254").r
    for wrong in (r, r + 1, first + r, first - r, -1, 2**256, 2**256 + first, H, -H):
        for call in (
            lambda wrong=wrong: verify(key, [wrong, *proof.public[1:]], proof),
            lambda wrong=wrong: verify_many(key, [[wrong, *proof.public[1:]]], [proof]),
            lambda wrong=wrong: proof.to_calldata([wrong]),
            dataclasses.replace(proof, public=(wrong,)).public_json,
        ):
            assert_raises(FormatError, r"not from 0 to below the order", call)
    for row in (tuple(map(Strange, proof.public)), [enum.Enum("Input", [("A", first)], type=int).A, *proof.public[1:]]):
        strange = dataclasses.replace(proof, public=row, c=tuple(map(Strange, proof.c)))
        assert verify(key, row, strange)
        assert verify_many(key, [row] * 2, [strange] * 2)
        assert strange.public_json() == proof.public_json()
        assert strange.to_json() == proof.to_json()
        assert strange.to_calldata() == proof.to_calldata()
        wrong = [Strange(first + r), *row[1:]]
        assert_raises(FormatError, r"^public\[0\] is \d+, not from 0 to below the order", verify, key, wrong, proof)
        with pytest.raises(FormatError, match=r"^public\[0\]\[0\] is \d+, not from 0 to below the order"):
            verify_many(key, [wrong], [proof])
    for wrong in (True, 1.0, b"1", None, np.int64(1), [1], 1j, [H]):
        for call in (
            lambda wrong=wrong: verify(key, [wrong, *proof.public[1:]], proof),
            lambda wrong=wrong: proof.to_calldata([wrong]),
            dataclasses.replace(proof, public=(wrong,)).public_json,
        ):
            assert_raises(UnsupportedDtype, r"public\[0\] must be a Python integer, got", call)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_writers_check_what_verify_checks(name):
    """A Proof of Python may hold anything; what no reader takes is not written."""
    proof = proof_of("bn254")
    group = "g2" if name == "b" else "g1"
    x, y = getattr(proof, name)
    pairs = [(-1, 2), (x, y, 1), (1.0, 2.0), (True, 2), (H, y), "12", 5, (x,), [x, [y]], (np.uint64(1), np.uint64(2))]
    if group == "g2":
        pairs = [(pair, y) for pair in [(-1, 2), (True, 1), (1.0, 2.0), (H, 1)]] + [(x, y, (1, 0)), (x[0], y[0]), x, 5]
    for wrong in pairs:
        broken = dataclasses.replace(proof, **{name: wrong})
        for write in (broken.to_json, broken.to_calldata, lambda broken=broken: broken.to_calldata([])):
            assert_raises((FormatError, UnsupportedDtype), f"^pi_{name} ", write)
    zero = (0, 0) if group == "g1" else ((0, 0), (0, 0))
    infinite = dataclasses.replace(proof, **{name: zero})  # as the arrays of this library and EIP-196 encode it
    assert getattr(Proof.from_json(infinite.to_json()), name) is None
    assert_raises(AccelerantError, "no form for a point at infinity", infinite.to_calldata)
    assert_raises(ConfigError, "unknown pairing", lambda: dataclasses.replace(proof, family=None).to_json())


# --- texts -----------------------------------------------------------------------------------------------------------
def test_a_name_given_twice_is_refused():
    """Readers disagree on which value counts."""
    proof = good_text("bn254")
    key = (folder("bn254") / "verification_key.json").read_text()
    for text in (
        '{"pi_a": ["1", "2", "1"],' + proof[1:],
        proof[:-1] + ', "curve": "bn128"}',
        '{"x": {"y": 1, "y": 1},' + proof[1:],
    ):
        with pytest.raises(FormatError, match=r"^proof is not JSON: the name '(pi_a|curve|y)' is given twice"):
            Proof.from_json(text)
    with pytest.raises(FormatError, match=r"^verification key is not JSON: the name 'nPublic' is given twice"):
        VerificationKey.from_json('{"nPublic": 2,' + key[1:])
    with pytest.raises(FormatError, match=r"^proof is not JSON: the name 'pi_a' is given twice"):
        Proof.from_json('{"\\u0070i_a": 1,' + proof[1:])


def test_what_snarkjs_reads_is_read():
    """Other names of the curves, none in a proof of rapidsnark, any order and layout, further members."""
    proof, key = json.loads(good_text("bn254")), json.loads((folder("bn254") / "verification_key.json").read_text())
    for name in ("bn128", "BN254", "alt_bn128", "Alt-BN128"):
        assert Proof.from_json(json.dumps(proof | {"curve": name})).family == "bn254"
        assert VerificationKey.from_json(json.dumps(key | {"curve": name})).family == "bn254"
    for name in ("BLS12-381", "bls12_381"):
        assert Proof.from_json(json.dumps(json.loads(good_text("bls12_381")) | {"curve": name})).family == "bls12_381"
    del proof["curve"], key["curve"]
    layout = json.dumps(dict(sorted(proof.items(), reverse=True)) | {"note": [{}, 1e3, None]}, indent="\t \r\n")
    assert Proof.from_json(layout.encode()) == Proof.from_json(good_text("bn254"))
    for value, read in ((key, VerificationKey.from_json), *(
        (proof | {"curve": name}, Proof.from_json) for name in ("", "bn", "bn1281", "_", None, 5, ["bn128"], {})
    )):  # fmt: skip
        assert_raises(FormatError, '"curve" must be one of bn128, bls12381, got', read, json.dumps(value))
    for number in ("NaN", "Infinity", "-Infinity"):  # Python's reader takes them, JSON and snarkjs do not
        with pytest.raises(FormatError, match=f"^proof is not JSON: {number} is not a number of JSON"):
            Proof.from_json(good_text("bn254")[:-1] + f', "note": [{number}]}}')


def test_public_inputs_are_counted_before_they_are_read():
    proof = good_text("bn254")
    for rows, match in (
        (json.dumps(["1"] * 3), "public has 3 inputs; the verification key is for 2"),
        (json.dumps(["x"]), "public has 1 inputs; the verification key is for 2"),
        ('["1",' + " " * 2000 + '"2"]', "public: a list of 2 public inputs has at most 1,536 bytes, got 2,009"),
    ):
        for text in (rows, rows.encode()):
            assert_raises(FormatError, match, Proof.from_json, proof, text, n_public=2)
    largest = json.dumps([str(family_of("bn254").r - 1)] * 50, indent=1)
    assert len(Proof.from_json(proof, largest, n_public=50).public) == 50
    assert_raises(FormatError, "proof: a proof has at most 65,536 bytes", Proof.from_json, proof + " " * (1 << 16))


def test_sixteen_megabytes_are_refused_unread(tmp_path, capsys, monkeypatch):
    """It took 5 to 9 s to parse them, until they were counted."""
    key, proof = folder("bn254") / "verification_key.json", tmp_path / "p.json"
    proof.write_text(good_text("bn254"))
    (tmp_path / "ones.json").write_text("[" + ",".join(['"1"'] * 4_000_000) + "]")
    (tmp_path / "lists.json").write_text("[" + ",".join(["[]"] * 5_300_000) + "]")
    parsed, real = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: parsed.append(len(text)) or real(text, **options))
    for name in ("ones.json", "lists.json"):
        status, output, error = command(capsys, "verify", key, tmp_path / name, proof)
        assert (status, output) == (2, "")
        assert f"{name}: a list of 2 public inputs has at most 1,536 bytes, got 1" in error
    assert max(parsed) < 10_000


def test_exchanged_files_are_named(capsys, tmp_path):
    texts = {"key": (folder("bn254") / "verification_key.json").read_text(), "public": ' \n["1", "2"]'}
    texts["proof"] = good_text("bn254")
    paths = {name: tmp_path / f"{name}.json" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    order = "the command takes, in this order, verification key, public inputs, proof"
    for names, found in (
        (("key", "proof", "public"), "proof.json has a proof, not public inputs"),
        (("public", "key", "proof"), "public.json has public inputs, not a verification key"),
        (("proof", "public", "key"), "proof.json has a proof, not a verification key"),
        (("key", "public", "public"), "public.json has public inputs, not a proof"),
        (("key", "public", "key"), "key.json has a verification key, not a proof"),
    ):
        status, output, error = command(capsys, "verify", *(paths[name] for name in names))
        assert (status, output) == (2, "")
        assert f"{found}: {order}" in error
    status, _, error = command(capsys, "calldata", paths["proof"], paths["public"])
    assert status == 2
    assert "proof.json has a proof, not public inputs: the command takes, in this order, public inputs, proof" in error


def test_files_that_are_no_paths(tmp_path):
    proof = good_text("bn254")
    for wrong in (5, None, b"a.zkey", ["a"]):
        for call in (
            lambda wrong=wrong: VerificationKey.from_zkey(wrong),
            lambda wrong=wrong: Zkey.open(wrong),
            lambda wrong=wrong: describe(wrong),
            lambda wrong=wrong: prove(wrong, "w.wtns"),
            lambda wrong=wrong: write_wtns(wrong, "bn254", np.array([[1, 0, 0, 0]], np.uint64)),
        ):
            assert_raises(UnsupportedDtype, r"must be given as a str or a pathlib\.Path, got", call)
    with pytest.raises(UnsupportedDtype, match="n_public must be an integer, got str '2'"):
        Proof.from_json(proof, "[]", n_public="2")
