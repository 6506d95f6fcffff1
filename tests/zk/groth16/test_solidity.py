"""Contracts of `to_solidity`, compiled by solc and run on an Ethereum virtual machine."""

import dataclasses
import functools
import json
import re
import subprocess
from pathlib import Path

import oracle
import pytest
from circuits import write_circuit

import commands
from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.curve.weierstrass import add, in_subgroup, multiply, negate
from accelerant.errors import ConfigError, FormatError, UnsupportedCase
from accelerant.zk.groth16 import Proof, Prover, VerificationKey, verify
from accelerant.zk.groth16.setup import setup_with_known_tau
from refusals import assert_raises
from requirements import snarkjs_command, solidity_command

VECTORS = Path(__file__).parents[2] / "vectors"
FAMILY = family_of("bn254")
Q, R = FAMILY.q, FAMILY.r


def run(source, name, calls):
    """Compile, deploy and call a contract; calls are lists of integers, answers True, False or an error's name."""
    calls = [[f"{value % 2**256:064x}" for value in words] for words in calls]
    done = subprocess.run(
        solidity_command(), input=json.dumps({"source": source, "name": name, "calls": calls}),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found | {"answers": [each["error"] or bool(int(each["word"], 16)) for each in found["results"]]}


def words(proof, public):
    """The call data of verifyProof, of any integers."""
    a, b, c = ((0, 0) if point is None else point for point in (proof.a, proof.b, proof.c))
    b = ((0, 0), (0, 0)) if proof.b is None else b
    return [*a, *(part for pair in b for part in reversed(pair)), *c, *public]


def on_the_twist():
    """A point of G2's curve that is out of the subgroup."""
    k = FAMILY.g2.coordinates
    for c0 in range(1, 50):
        y = k.sqrt(FAMILY.g2.right_side((c0, 1)))
        if y is not None and not in_subgroup(FAMILY.g2, ((c0, 1), y)):
            return (c0, 1), y
    raise AssertionError("no such point among fifty")


def mutants(key, proof):
    """Proofs and inputs, valid ones among them."""
    g1, g2, public = FAMILY.g1, FAMILY.g2, list(proof.public)
    (x, y), (bx, by) = proof.a, proof.b
    points = [
        {},
        {"a": negate(g1, proof.a)},
        {"b": negate(g2, proof.b)},
        {"a": negate(g1, proof.a), "b": negate(g2, proof.b)},  # the same statement
        {"a": multiply(g1, 5, proof.a), "b": multiply(g2, pow(5, -1, R), proof.b)},  # too
        {"c": add(g1, proof.c, g1.generator)},
        {"c": proof.a},
        {"a": None}, {"b": None}, {"c": None}, {"a": None, "b": None, "c": None},
        {"a": (x + Q, y)}, {"a": (x, y + Q)}, {"c": (proof.c[0] + Q, proof.c[1])}, {"c": (proof.c[0], proof.c[1] + Q)},
        {"a": (Q, Q)}, {"a": (x, Q)}, {"a": (x, 0)}, {"a": (2**256 - 1, 2**256 - 1)},
        *({"b": ((bx[0] + i * Q, bx[1] + j * Q), by)} for i, j in ((1, 0), (0, 1))),
        *({"b": (bx, (by[0] + i * Q, by[1] + j * Q))} for i, j in ((1, 0), (0, 1))),
        {"a": (x, y ^ 1)}, {"c": (x ^ 1, y)}, {"b": ((bx[0] ^ 1, bx[1]), by)}, {"b": ((bx[1], bx[0]), (by[1], by[0]))},
        {"b": on_the_twist()},
        {"b": add(g2, proof.b, multiply(g2, R, on_the_twist()))},
    ]  # fmt: skip
    for changes in points:
        yield dataclasses.replace(proof, **changes), public
    for at in sorted({0, len(public) // 2, len(public) - 1}):
        for value in (public[at] + 1, public[at] - 1, public[at] + R, R, R - 1, 0, 1, 2**256 - 1):
            yield proof, [*public[:at], value, *public[at + 1 :]]


def verdict(key, public, proof):
    try:
        return verify(key, public, proof)
    except FormatError:
        return False


@pytest.mark.slow
def test_the_contract_answers_as_verify_does(parts):
    cases = list(mutants(parts.key, parts.proof))
    expected = [verdict(parts.key, public, proof) for proof, public in cases]
    found = run(parts.key.to_solidity(), "Groth16Verifier", [words(proof, public) for proof, public in cases])
    n = parts.key.n_public
    assert found["method"] == f"verifyProof(uint256[2],uint256[2][2],uint256[2],uint256[{n}])"
    assert found["answers"] == expected
    assert expected[:3] == [True, False, False]
    assert sum(expected) >= 3
    assert [int(word, 16) for word in re.findall("0x([0-9a-f]{64})", parts.proof.to_calldata())] == words(
        parts.proof, parts.public
    )
    assert found["results"][0]["gas"] < 200_000 + 7_000 * n
    assert found["bytes"] < 24_576


@pytest.mark.slow
@pytest.mark.parametrize(("n_public", "name"), [(0, "None_0"), (1, "$one"), (3, "Verifier3")])
def test_circuits_of_few_inputs(tmp_path, n_public, name):
    write_circuit(tmp_path, "bn254", 5, n_public)
    setup_with_known_tau(tmp_path / "circuit.r1cs", tmp_path / "circuit.zkey")
    prover = Prover(tmp_path / "circuit.zkey")
    proof = prover.prove(tmp_path / "witness.wtns")
    calls = [words(proof, proof.public), words(dataclasses.replace(proof, c=proof.a), proof.public)]
    if n_public:
        calls += [words(proof, [*proof.public[:-1], proof.public[-1] ^ 1]), words(proof, proof.public)[:-1]]
    found = run(prover.verification_key.to_solidity(name), name, calls)
    assert found["method"].endswith(f",uint256[{n_public}])" if n_public else ",uint256[2])")
    assert found["answers"] == [True, False] + ([False, "revert"] if n_public else [])


def test_infinity_and_the_bounds_of_numbers():
    """With the inputs (0, 7) the sum of IC is infinity and the proof (0, B, C) holds. R is no 0, and Q no y."""
    alpha, beta, gamma, delta, ic, b = 3**100, 5**100, 7**90, 11**70, (-7, 13**60, 1), 17**60
    key = oracle.key_of_logarithms("bn254", alpha, beta, gamma, delta, ic)
    over = pow(delta, -1, R)
    zero = oracle.proof_of_logarithms("bn254", 0, b, -alpha * beta * over)
    one = oracle.proof_of_logarithms("bn254", 1, b, (b - alpha * beta - gamma) * over)
    calls = [
        (one, (0, 8)), (zero, (0, 7)), (dataclasses.replace(zero, b=None), (0, 7)), (one, (0, 7)), (one, (R, 8)),
        *((dataclasses.replace(one, **{name: (x, y + Q)}), (0, 8)) for name, (x, y) in (("a", one.a), ("c", one.c))),
        (dataclasses.replace(zero, a=(0, Q)), (0, 7)),
    ]  # fmt: skip
    expected = [verdict(key, public, proof) for proof, public in calls]
    assert expected == [True] * 3 + [False] * 5
    found = run(key.to_solidity(), "Groth16Verifier", [words(proof, public) for proof, public in calls])
    assert found["answers"] == expected


@pytest.mark.slow
def test_the_contract_of_snarkjs_answers_the_same(tmp_path):
    folder = VECTORS / "groth16" / "range"
    target = tmp_path / "theirs.sol"
    done = subprocess.run(
        [*snarkjs_command(), "zkey", "export", "solidityverifier", str(folder / "circuit.zkey"), str(target)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    key = VerificationKey.from_json((folder / "verification_key.json").read_text())
    proof = Proof.from_json((folder / "proof.json").read_text(), (folder / "public.json").read_text())
    finite = [(each, public) for each, public in mutants(key, proof) if None not in (each.a, each.b, each.c)]
    calls = [words(each, public) for each, public in finite]
    ours, theirs = run(key.to_solidity(), "Groth16Verifier", calls), run(target.read_text(), "Groth16Verifier", calls)
    assert ours["method"] == theirs["method"]
    assert ours["answers"] == theirs["answers"]


def test_the_points_of_the_key_are_the_arguments_of_the_pairings(parts):
    """(-a, b), (alpha, beta), (sum, gamma), (c, delta): of G2 the coefficient of u comes first, as in EIP-197."""
    json_, key = json.loads(parts.texts["verification_key"]), parts.key
    alpha, beta, gamma, delta = (json_[f"vk_{name}"] for name in ("alpha_1", "beta_2", "gamma_2", "delta_2"))
    second = ((8, beta), (14, gamma), (20, delta))
    expected = {6: alpha[0], 7: alpha[1]}
    expected |= {at + 2 * i + j: point[i][1 - j] for at, point in second for i in (0, 1) for j in (0, 1)}
    assigned = re.findall(r"^ +pairs\[(\d+)\] = (.+);$", key.to_solidity(), re.MULTILINE)
    assert [int(at) for at, _ in assigned] == list(range(24))
    assert {int(at): value for at, value in assigned if value.isdecimal()} == expected


def test_what_has_no_contract(parts):
    folder = VECTORS / "formats" / "bls12_381"
    key = VerificationKey.from_json((folder / "verification_key.json").read_text())
    assert_raises(UnsupportedCase, "this key is on bls12_381", key.to_solidity)
    taken = ("contract", "uint256", "bytes32", "_", "verifyProof", "addTerm")  # the compiler refuses these
    for name in ("", "1a", "a b", "a-b", *taken, "x{", "a\n", "\u00e9", "a" * 81, None, 5):
        assert_raises(ConfigError, "must be an identifier of Solidity that is not taken", parts.key.to_solidity, name)
    assert "contract _a$1 {" in parts.key.to_solidity("_a$1")


command = functools.partial(commands.run, "zk verifier")


def test_the_command(parts, circuit, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    n, key = parts.key.n_public, circuit / "verification_key.json"
    line = f"contract Groth16Verifier, {n} public inputs, bn254\n"
    assert command(capsys, key) == (0, f"verifier.sol: {line}", "")
    assert (tmp_path / "verifier.sol").read_text() == parts.key.to_solidity()
    status, output, error = command(capsys, key, "--out", "v.sol", "--name", "Mine", "--json")
    facts = {"contract": "v.sol", "name": "Mine", "curve": "bn254", "public_inputs": n, "forgeable": None}
    assert (status, json.loads(output), error) == (0, facts, "")
    assert (tmp_path / "v.sol").read_text() == parts.key.to_solidity("Mine")
    (tmp_path / "k.json").write_text(parts.texts["verification_key"])
    for arguments, match in (
        ((key, "--name", "bad name"), "must be an identifier of Solidity that is not taken, got 'bad name'"),
        (("k.json", "--out", "k.json"), "also to be read"),
        ((circuit / "proof.json",), "has a proof, not a verification key"),
        ((VECTORS / "formats" / "bls12_381" / "verification_key.json", "--out", "b.sol"), "this key is on bls12_381"),
    ):
        status, output, error = command(capsys, *arguments)
        assert (status, output) == (2, "")
        assert match in error
    assert not (tmp_path / "b.sol").exists()
    value = json.loads(parts.texts["verification_key"])
    (tmp_path / "weak.json").write_text(json.dumps(value | {"vk_delta_2": value["vk_gamma_2"]}))
    status, output, error = command(capsys, "weak.json")
    assert status == 0
    assert "gamma2 equals delta2" in error
