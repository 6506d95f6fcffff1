import copy
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest

from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.curve.weierstrass import add, decode_points, encode_points, multiply, negate
from accelerant.errors import ConfigError, FormatError, UnsupportedDtype
from accelerant.zk.groth16 import Proof, VerificationKey, prove, verify, verify_many
from accelerant.zk.groth16.verifier import Statement
from refusals import assert_raises

sys.path.append(str(Path(__file__).parents[2] / "algebra"))
from small_orders import of_cofactor

VECTORS = Path(__file__).parents[2] / "vectors"

BN254 = family_of("bn254")
R, Q = BN254.r, BN254.q


def test_proofs_of_snarkjs_verify(parts):
    assert verify(parts.key, parts.public, parts.proof)


def test_other_public_inputs_do_not(parts):
    for index, value in ((0, parts.public[0] + 1), (-1, parts.public[-1] + 1), (-1, 0), (-1, 1), (-1, R - 1)):
        public = list(parts.public)
        public[index] = value % R
        assert not verify(parts.key, public, parts.proof)


def test_changed_proofs_do_not(parts):
    proof, g1, g2 = parts.proof, BN254.g1, BN254.g2
    generator = g1.generator
    changed = {
        "a negated": {"a": negate(g1, proof.a)}, "b negated": {"b": negate(g2, proof.b)},
        "c negated": {"c": negate(g1, proof.c)}, "c exchanged": {"c": proof.a},
        "a and c exchanged": {"a": proof.c, "c": proof.a}, "c moved": {"c": add(g1, proof.c, generator)},
        "a infinite": {"a": None}, "b infinite": {"b": None}, "c infinite": {"c": None},
        "all infinite": {"a": None, "b": None, "c": None},
    }  # fmt: skip
    for what, points in changed.items():
        assert not verify(parts.key, parts.public, dataclasses.replace(proof, **points)), what


def test_both_negated_is_the_same_statement(parts):
    """e(-A, -B) = e(A, B): Groth16 is malleable, which a verifier does not hide."""
    flipped = dataclasses.replace(parts.proof, a=negate(BN254.g1, parts.proof.a), b=negate(BN254.g2, parts.proof.b))
    assert flipped != parts.proof
    assert verify(parts.key, parts.public, flipped)


def test_python_values_that_are_no_points(parts):
    """Floats, a third coordinate, NumPy's integers: named, and without their values."""
    (x, y), b = parts.proof.a, parts.proof.b
    pair, pairs = "a pair of Python integers", "a pair of pairs of Python integers"
    for name, wrong, message in (
        ("a", (x, y, 1), rf"{pair}, or None for infinity; got \(int, int, int\)$"),
        ("a", (float(x), y), rf"{pair}, .*got \(float, int\)$"),
        ("c", (np.int64(1), np.int64(2)), rf"{pair}, .*got \(int64, int64\)$"),
        ("c", (True, 2), rf"{pair}, .*got \(bool, int\)$"),
        ("c", 5, rf"{pair}, .*got int$"),
        ("b", (x, y), rf"{pairs}, .*got \(int, int\)$"),
        ("b", (b[0], (1, None)), rf"{pairs}, .*got \(\(int, int\), \(int, NoneType\)\)$"),
    ):
        proof = dataclasses.replace(parts.proof, **{name: wrong})
        assert_raises(UnsupportedDtype, rf"^pi_{name} must be {message}", verify, parts.key, parts.public, proof)
        with pytest.raises(UnsupportedDtype, match=rf"^proofs\[1\]\.{name} must be {message}"):
            verify_many(parts.key, [parts.public] * 2, [parts.proof, proof])
    for wrong in ((-1, y), (x, y + Q)):
        proof = dataclasses.replace(parts.proof, c=wrong)
        assert_raises(FormatError, r"^pi_c [xy] is .*, not reduced", verify, parts.key, parts.public, proof)
    for wrong in (5, None):
        with pytest.raises(UnsupportedDtype, match=r"^public must be a sequence of Python integers, got"):
            verify(parts.key, wrong, parts.proof)
    for read in (Proof.from_json, VerificationKey.from_json):
        assert_raises(UnsupportedDtype, "must be JSON text or its bytes, got NoneType", read, None)


# --- known logarithms ------------------------------------------------------------------------------------------------
def key_and_proofs(rng, family, n_public, small):
    """Return a key, and (public, proof, whether it is one) of three proofs, all from logarithms."""
    r = family_of(family).r

    def draw():
        return rng.choice((0, 1, 2, r - 1, r - 2)) if small else rng.randrange(r)

    alpha, beta, gamma, delta = (draw() or 1 for _ in range(4))
    ic = [draw() for _ in range(n_public + 1)]
    rows = []
    for _ in range(3):
        public = [rng.choice((0, 1, r - 1, rng.randrange(r))) for _ in range(n_public)]
        a, b = draw(), draw()
        known = alpha * beta + (ic[0] + sum(x * y for x, y in zip(public, ic[1:], strict=True))) * gamma
        c = (a * b - known) * pow(delta, -1, r) % r
        if rng.random() < 0.3:
            a, b, c = (x % r for x in rng.choice(((a + 1, b, c), (a, -b, c), (a, b, 0), (a, b, c - 1), (b, a, c))))
        rows.append((public, oracle.proof_of_logarithms(family, a, b, c), (a * b - known - c * delta) % r == 0))
    return oracle.key_of_logarithms(family, alpha, beta, gamma, delta, ic), rows


@pytest.mark.search(20)
def test_the_equation_holds_as_that_of_the_logarithms(family, rng, record_property):
    """One by one, prepared, in a batch and from JSON; more inputs than separate multiples are for."""
    for n_public, small in ((0, False), (1, True), (5, True), (64, False)):
        key, rows = key_and_proofs(rng, family, n_public, small)
        for public, proof, holds in rows:
            statement = Statement(key, public)
            statement.prepare()
            read = Proof.from_json(proof.to_json(), json.dumps([str(x) for x in public]), n_public=n_public)
            found = [verify(key, public, proof), statement.proved_by(read), verify_many(key, [read.public], [proof])]
            assert found == [holds] * 3, (key, public, proof)
        assert verify_many(key, *list(zip(*rows, strict=True))[:2]) == all(holds for _, _, holds in rows)
    record_property("proofs", 12)


# --- mutants ---------------------------------------------------------------------------------------------------------
def small_order(family, group):
    """Return a point that is on the curve, of an order that divides the cofactor; None if the cofactor is 1."""
    if group == "g2":
        return of_cofactor(family.g2, 1)
    return (0, 2) if family.name == "bls12_381" else None  # of order 3


def another_point(rng, family, group, point, others):
    """Return a point other than the given one: of the subgroup, of the curve, or off it."""
    curve = getattr(family, group)
    if point is None:
        return curve.generator
    k = rng.choice([1, 2, 3, rng.randrange(1, family.r - 1)])
    found = [
        lambda: add(curve, point, multiply(curve, k, curve.generator)),
        lambda: multiply(curve, k + 1, point),
        lambda: negate(curve, point),
        lambda: None,
        lambda: rng.choice(others),
        lambda: add(curve, point, multiply(curve, k, small_order(family, group) or curve.generator)),
        lambda: (rng.choice([point[1], point[0]]), point[1]),
        lambda: tuple(c ^ 1 if group == "g1" else (c[0] ^ 1, c[1]) for c in point),
    ][rng.randrange(8)]()
    return found if found != point else negate(curve, point)


def mutant(rng, key, proof):
    """Change one element of a key, a proof or its public inputs: exactly one value of each satisfies the equation."""
    family = family_of(key.family)
    name = rng.choice(["a", "b", "c", "a", "b", "c", "alpha", "beta", "gamma", "delta", "ic", "public"])
    if name == "public":
        public = list(proof.public)
        at = rng.randrange(len(public))
        wrong = rng.choice([0, 1, family.r - 1, public[at] + 1, public[at] - 1, public[at] + family.r, -public[at]])
        public[at] = wrong if wrong != public[at] else (wrong + 1) % family.r
        return name, key, public, proof
    group = "g2" if name in ("b", "beta", "gamma", "delta") else "g1"
    if name in ("a", "b", "c"):
        others = [proof.b] if group == "g2" else [proof.a, proof.c]
        new = another_point(rng, family, group, getattr(proof, name), others)
        return name, key, proof.public, dataclasses.replace(proof, **{name: new})
    curve, words = getattr(family, group), getattr(key, name)
    at = 0 if name != "ic" else rng.choice([0, *(i + 1 for i, x in enumerate(proof.public) if x)])
    (point,) = decode_points(curve, words[at : at + 1] if name == "ic" else words[None])
    (new,) = encode_points(curve, [add(curve, point, multiply(curve, rng.randrange(1, family.r), curve.generator))])
    if name == "ic":
        new = np.concatenate([words[:at], new[None], words[at + 1 :]])
    return name, dataclasses.replace(key, **{name: new}), proof.public, proof


def same_statement(rng, key, proof):
    """Return another proof of the statement: A s, (B + t delta) / s, C + t A."""
    family = family_of(key.family)
    g1, g2, s, t = family.g1, family.g2, rng.randrange(1, family.r), rng.randrange(family.r)
    (delta,) = decode_points(g2, key.delta[None])
    b = multiply(g2, pow(s, -1, family.r), add(g2, proof.b, multiply(g2, t, delta)))
    c = add(g1, proof.c, multiply(g1, t, proof.a))
    return dataclasses.replace(proof, a=multiply(g1, s, proof.a), b=b, c=c)


def verdict(call, *arguments):
    """Return what a verification says, or that its input is malformed."""
    try:
        return call(*arguments)
    except FormatError:
        return "malformed"


@pytest.fixture(scope="module")
def proved():
    """Keys and proofs of both curves."""
    found = []
    for name in ("poseidon", "range"):
        texts = [(VECTORS / "groth16" / name / f"{part}.json").read_text() for part in ("proof", "public")]
        key = VerificationKey.from_json((VECTORS / "groth16" / name / "verification_key.json").read_text())
        found.append((key, Proof.from_json(*texts)))
    folder = VECTORS / "formats" / "bls12_381"
    key = VerificationKey.from_json((folder / "verification_key.json").read_text())
    return [*found, (key, prove(folder / "product.zkey", folder / "product.wtns"))]


@pytest.mark.slow
@pytest.mark.search(80)
def test_no_mutant_verifies_and_every_other_proof_of_the_statement_does(proved, rng, record_property):
    for _ in range(8):
        for key, proof in proved:
            good = same_statement(rng, key, proof)
            assert verify(key, good.public, good)
            name, changed_key, public, changed = mutant(rng, key, rng.choice([proof, good]))
            found = verdict(verify, changed_key, public, changed)
            assert found in (False, "malformed"), (name, changed_key, public, changed)
            rows = [(good.public, good), (public, changed), (proof.public, proof)]
            rng.shuffle(rows)
            found = verdict(verify_many, changed_key, *zip(*rows, strict=True))
            assert found in (False, "malformed"), (name, changed_key, rows)
    record_property("mutants", 8 * len(proved))
    record_property("other proofs", 8 * len(proved))


def accepted(texts):
    """Read a key and a proof; return the proof if it is valid."""
    key = VerificationKey.from_json(texts["verification_key"])
    proof = Proof.from_json(texts["proof"], texts["public"])
    return verify(key, proof.public, proof) and proof


@pytest.mark.search(40)
@pytest.mark.parametrize("circuit", ["range"], indirect=True)
def test_damaged_texts_are_malformed_or_false_or_the_same(parts, rng, record_property):
    """Characters of proof.json, public.json and verification_key.json changed, removed, doubled."""
    for _ in range(50):
        texts = dict(parts.texts)
        name = rng.choice(sorted(texts))
        for _ in range(rng.choice([1, 1, 2, 8])):
            at, length = rng.randrange(len(texts[name]) or 1), rng.choice([1, 1, 1, 4, 90])
            new = rng.choice(["", rng.choice('0123456789",:[]{} -.ex\\\0'), texts[name][at : at + length] * 2])
            texts[name] = texts[name][:at] + new + texts[name][at + length :]
        found = verdict(accepted, texts)
        assert found in (False, "malformed", parts.proof), texts
    record_property("texts", 50)


# --- JSON ------------------------------------------------------------------------------------------------------------
def test_texts_are_those_of_snarkjs(parts):
    assert parts.proof.to_json() == parts.texts["proof"]
    assert parts.proof.public_json() == parts.texts["public"]
    assert parts.key.to_json() == parts.texts["verification_key"]


def test_infinity_in_json(parts):
    none = dataclasses.replace(parts.proof, a=None, b=None, c=None)
    assert json.loads(none.to_json())["pi_a"] == ["0", "1", "0"]
    assert Proof.from_json(none.to_json()) == none


def changed(value, path, new):
    value = copy.deepcopy(value)
    *before, last = path
    place = value
    for key in before:
        place = place[key]
    if new is None:
        del place[last]
    else:
        place[last] = new(place[last])
    return json.dumps(value)


ELEMENTS = [
    (lambda old: str(int(old) + Q), "not below the modulus|reduced"),
    (lambda _: str(Q), "not below the modulus"),
    (lambda _: "-1", "must be a decimal string"),
    (lambda _: "0x10", "must be a decimal string"),
    (lambda old: "0" + old, "without leading zeros"),
    (lambda old: " " + old, "must be a decimal string"),
    (lambda _: "\u0661", "must be a decimal string"),
    (lambda _: "9" * 1000, "without leading zeros and reduced"),
    (lambda _: "9" * 100000, "a proof has at most 65,536 bytes, got"),
    (lambda old: int(old), "must be a decimal string"),
    (lambda _: "", "must be a decimal string"),
    (lambda _: ["1"], "must be a decimal string"),
    (lambda old: str(int(old) ^ 1), "is not on bn254"),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("new", "match"), ELEMENTS)
@pytest.mark.parametrize("path", [("pi_a", 0), ("pi_a", 1), ("pi_b", 1, 0), ("pi_c", 1)])
def test_elements_of_a_proof(parts, path, new, match):
    where = "proof: " if "65,536" in match else f"proof: {path[0]}"
    refused = assert_raises(FormatError, match, lambda: Proof.from_json(changed(parts.json["proof"], path, new)))
    assert where in str(refused)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", '"x"', "[" * 200 + "]" * 200, b"\xff"])
def test_texts_that_are_no_proof(text):
    assert_raises(FormatError, None, Proof.from_json, text)
    assert_raises(FormatError, None, VerificationKey.from_json, text)


@pytest.mark.parametrize(("kind", "path", "new", "match"), [
    (Proof, ("pi_a",), None, 'no "pi_a"'),
    (Proof, ("pi_a",), lambda old: old[:2], "list of 3"),
    (Proof, ("pi_a", 2), lambda _: "2", 'must be "1"'),
    (Proof, ("pi_a", 2), lambda _: "0", 'must be "1"'),
    (Proof, ("pi_b", 2, 1), lambda _: "1", "must be"),
    (Proof, ("pi_b", 0), lambda old: [*old, "0"], "list of 2"),
    (Proof, ("pi_b",), lambda _: {}, "list of 3"),
    (Proof, ("protocol",), lambda _: "plonk", "groth16"),
    (Proof, ("protocol",), None, "groth16"),
    (Proof, ("curve",), lambda _: "secp256k1", "bn128, bls12381"),
    (VerificationKey, ("nPublic",), lambda old: old + 1, "nPublic \\+ 1"),
    (VerificationKey, ("nPublic",), lambda _: -1, "must be a number of public inputs"),
    (VerificationKey, ("nPublic",), lambda _: True, "must be a number of public inputs"),
    (VerificationKey, ("nPublic",), lambda _: 10**30, "must be a number of public inputs"),
    (VerificationKey, ("nPublic",), None, "nPublic"),
    (VerificationKey, ("IC",), lambda old: old[:-1], "IC"),
    (VerificationKey, ("IC",), None, "IC"),
    (VerificationKey, ("vk_beta_2",), None, "vk_beta_2"),
])  # fmt: skip
def test_the_shape_of_a_proof_and_of_a_key(parts, kind, path, new, match):
    with pytest.raises(FormatError, match=match):
        kind.from_json(changed(parts.json["proof" if kind is Proof else "verification_key"], path, new))


def test_the_inputs_must_be_known(parts):
    read = Proof.from_json(parts.texts["proof"])
    assert read == parts.proof
    assert read.public is None
    assert_raises(ConfigError, "not known", read.public_json)
    assert read.to_calldata(parts.public) == parts.proof.to_calldata()
