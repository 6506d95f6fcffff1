"""What `verify` and the readers take beside objects: text, bytes, paths, parsed values; equality, pickles, reprs."""

import copy
import json
import pickle
from pathlib import Path

import pytest

from accelerant.errors import ConfigError, FormatError, MissingFile, UnsupportedDtype
from accelerant.zk.groth16 import Proof, VerificationKey, verify, verify_many
from refusals import assert_raises

FOLDER = Path(__file__).parents[2] / "vectors" / "groth16" / "range"
FILES = [FOLDER / f"{name}.json" for name in ("verification_key", "public", "proof")]
KEY, PROOF = VerificationKey.from_json(FILES[0]), Proof.from_json(FILES[2], FILES[1])
FORMS = {
    "path": lambda path: path,
    "name": str,
    "text": Path.read_text,
    "bytes": Path.read_bytes,
    "parsed": lambda path: json.loads(path.read_text()),
}
R = 21888242871839275222246405745257275088548364400416034343698204186575808495617


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_json(form):
    key, public, proof = map(FORMS[form], FILES)
    assert VerificationKey.from_json(key) == KEY
    read = Proof.from_json(proof, public)
    assert (read, read.public) == (PROOF, PROOF.public)
    assert verify(key, public, proof)
    assert verify(key, PROOF)
    assert verify_many(key, [PROOF.public] * 2, [proof, PROOF])
    with pytest.raises(ConfigError, match=r"carries no public inputs: verify\(verification_key, public, proof\) takes"):
        verify(key, proof)
    other = json.dumps([str((PROOF.public[0] + 1) % R), *json.loads(FILES[1].read_text())[1:]])
    assert not verify(key, other, proof)


def test_inputs_as_text():
    for text in (str, hex, lambda value: f"0x{value:064X}"):
        assert verify(KEY, list(map(text, PROOF.public)), PROOF)
        assert not verify(KEY, [text(PROOF.public[0] + 1), *PROOF.public[1:]], PROOF)
    rest = PROOF.public[1:]
    for wrong in (
        "",
        "01",
        "+1",
        "-1",
        " 1",
        "1 ",
        "1_0",
        "0X1",
        "0x",
        "0xg",
        "1.0",
        "1e3",
        "one",
        "\u0661",
        "1" * 5000,
    ):
        with pytest.raises(
            FormatError, match=r"^public\[0\] must be an integer, or text such as \"33\" or \"0x21\", got"
        ):
            verify(KEY, [wrong, *rest], PROOF)
    for large in (str(PROOF.public[0] + R), hex(R), "0x" + "f" * 96):
        with pytest.raises(FormatError, match=r"^public\[0\] is .*, not from 0 to below the order"):
            verify(KEY, [large, *rest], PROOF)
    assert Proof("bn128", PROOF.a, PROOF.b, PROOF.c, ("1", "0x2")).public_json() == '[\n "1",\n "2"\n]'


def test_parsed_values_are_checked_as_text_is():
    proof = json.loads(FILES[2].read_text())
    for change, match in (
        ({"pi_a": [1, 2, "1"]}, r"pi_a\[0\] must be a decimal string, got 1"),
        ({"pi_a": [True, "2", "1"]}, r"pi_a\[0\] must be a decimal string, got true"),
        ({"pi_a": [object(), "2", "1"]}, r"pi_a\[0\] must be a decimal string, got <object"),
        ({"pi_a": ["1", 10**5000, "1"]}, r"pi_a\[1\] must be a decimal string, got"),
        ({"pi_a": ("1", "2", "1")}, r"pi_a must be a list of 3"),
        ({"pi_c": ["1", "3", "1"]}, "is not on bn254_g1"),
        ({"curve": None}, '"curve" must be one of bn128'),
        ({"protocol": "plonk"}, '"protocol" must be "groth16"'),
    ):
        assert_raises(FormatError, match, verify, KEY, PROOF.public, proof | change)
    with pytest.raises(FormatError, match='has no "pi_b"'):
        Proof.from_json({key: value for key, value in proof.items() if key != "pi_b"})


def test_files_that_are_not_there_or_too_long(tmp_path):
    for path in (tmp_path / "no.json", str(tmp_path / "no.json"), tmp_path / "none"):
        for read in (Proof.from_json, VerificationKey.from_json, lambda path: verify(KEY, path, PROOF)):
            assert_raises(MissingFile, r"no.* does not exist", read, path)
    with pytest.raises(FormatError, match="is not JSON"):
        Proof.from_json(str(tmp_path / "none"))  # text: a name is one that ends in .json
    (tmp_path / "long.json").write_text(" " * (1 << 16) + FILES[2].read_text())
    assert_raises(FormatError, "more than 65,536", Proof.from_json, tmp_path / "long.json")
    assert_raises(FormatError, "cannot be read", Proof.from_json, tmp_path)


def test_orders_of_arguments():
    for wrong in (PROOF, json.loads(FILES[2].read_text())):
        with pytest.raises(UnsupportedDtype, match="public is a proof: the order is verification_key, public, proof"):
            verify(KEY, wrong, PROOF.public)
    assert_raises(UnsupportedDtype, "proof 0 must be a Proof, got list", verify, KEY, [1, 2])


def test_a_circuit_without_inputs_needs_none():
    key = VerificationKey(KEY.family, KEY.alpha, KEY.beta, KEY.gamma, KEY.delta, KEY.ic[:1])
    assert not verify(key, Proof.from_json(FILES[2]))


def test_values_are_compared_and_pickled():
    assert VerificationKey(KEY.family, KEY.alpha, KEY.beta, KEY.delta, KEY.gamma, KEY.ic) != KEY
    assert KEY != "key"
    for value in (KEY, PROOF):
        for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
            assert again == value
            assert hash(again) == hash(value)
    assert VerificationKey("BN128", *(getattr(KEY, name) for name in ("alpha", "beta", "gamma", "delta", "ic"))) == KEY
    assert Proof("bn128", PROOF.a, PROOF.b, PROOF.c) == PROOF
    assert repr(KEY) == "VerificationKey(bn254, 18 public inputs)"
    assert repr(PROOF) == "Proof(bn254, 18 public inputs)"
    assert repr(Proof.from_json(FILES[2])) == "Proof(bn254, public inputs unknown)"
