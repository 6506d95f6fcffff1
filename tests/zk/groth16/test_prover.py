import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import circuits
import numpy as np
import oracle
import pytest

from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.curve.weierstrass import add, decode_points, encode_points, multiply
from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.words import encode
from accelerant.errors import ConfigError, FormatError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.ledger import ledger
from accelerant.zk.formats import TERM, Witness, Zkey, write_r1cs, write_wtns, write_zkey
from accelerant.zk.formats.container import montgomery_points
from accelerant.zk.groth16 import Proof, Prover, VerificationKey, keys, prove, verify, verify_many
from accelerant.zk.groth16.keys import SECTIONS, HostKey, Stages
from accelerant.zk.groth16.setup import setup_with_known_tau
from clock import Clock
from refusals import assert_raises

BN254 = Path(__file__).parents[2] / "vectors" / "formats" / "bn254"
R = family_of("bn254").r


def values_of(path):
    with Witness.open(path) as witness:
        return [int.from_bytes(row.tobytes(), "little") for row in witness.values]


def test_our_proofs_verify_and_differ(circuit):
    prover = Prover(circuit / "circuit.zkey")
    first, second = (prover.prove(circuit / "witness.wtns") for _ in range(2))
    key = VerificationKey.from_json((circuit / "verification_key.json").read_text())
    assert first.public_json() == (circuit / "public.json").read_text()
    assert prover.verification_key.to_json() == (circuit / "verification_key.json").read_text()
    assert verify(key, first.public, first)
    assert verify_many(key, [first.public] * 2, [first, second])
    assert len({first.a, second.a}) == len({first.b, second.b}) == len({first.c, second.c}) == 2
    assert Proof.from_json(first.to_json()) == first


@pytest.mark.parametrize(("r", "s"), [(0, 0), (1, 0), (0, 1), (12345, 2**200 + 7), (-1, -1)])
def test_a_known_proof(product, r, s):
    family, folder = product
    r, s = (each % family_of(family).r for each in (r, s))  # -1: the greatest
    with Zkey.open(folder / "product.zkey") as zkey:
        expected = oracle.prove(zkey, values_of(folder / "product.wtns"), r, s)
        proof = Prover(zkey).prove(folder / "product.wtns", insecure_randomness_for_tests=(r, s))
    assert (proof.family, proof.a, proof.b, proof.c) == (family, *expected)
    assert proof.public == (111, 3)


@pytest.mark.parametrize("wrong", [(), (1,), (1, 2, 3), (0, R), (-1, 5), (1.0, 2), (True, 2), 7, "12", b"12"])
def test_randomness_that_is_no_two_scalars(wrong):
    """Kernels would read past too few, and the message would show what is secret."""
    prover = Prover(BN254 / "product.zkey")
    with pytest.raises(ConfigError, match=r"must be two Python integers from 0 to below the order r$"):
        prover.prove(BN254 / "product.wtns", insecure_randomness_for_tests=wrong)


def test_keys_of_snarkjs(product):
    _, folder = product
    key = VerificationKey.from_zkey(folder / "product.zkey")
    assert key.to_json() == (folder / "verification_key.json").read_text()
    proof = prove(folder / "product.zkey", folder / "product.wtns")
    assert verify(key, proof.public, proof)


def test_stages_are_timed_and_counted(product):
    _, folder = product
    seen = []
    prover = Prover(folder / "product.zkey", progress=seen.append)
    ledger().reset()
    prover.prove(folder / "product.wtns")
    read, proved = ["key: header", "key: constraints", "key: points"], ["witness", "blinding"]
    proved += [*(f"sum {name}" for name in ("A", "B1", "B2", "C")), "quotient", "sum H", "proof", "verification"]
    assert seen == [*read, *proved]
    assert list(prover.timings) == ["key: compile", *read, "compile", *proved]
    assert all(seconds >= 0 for seconds in prover.timings.values())
    rows = {row["op"]: row for row in ledger().to_dict()["ops"]}
    assert {"sparse_mul", "ntt", "msm", "pairing_product"} <= set(rows)
    assert all(row["own"] for row in rows.values())
    prover.prove(folder / "product.wtns", verify=False)
    assert "verification" not in prover.timings
    assert prover.timings["compile"] == 0


@pytest.mark.slow
def test_compilation_is_an_entry_of_its_own(tmp_path):
    """In a new process with an empty cache it takes seconds; in the next process, which loads the kernels, less."""
    code = (
        "import json, sys\n"
        "from accelerant.zk.groth16 import Prover\n"
        "prover = Prover(sys.argv[1])\n"
        "for _ in range(2):\n"
        "    prover.prove(sys.argv[2])\n"
        "    print(json.dumps(prover.timings))\n"
    )
    command = [sys.executable, "-c", code, BN254 / "product.zkey", BN254 / "product.wtns"]
    environment = os.environ | {"ACCELERANT_CACHE_DIR": str(tmp_path)}
    runs = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=400)
        runs.append([json.loads(line) for line in done.stdout.splitlines()])
    (cold, again), (loaded, _) = runs
    others = sum(seconds for name, seconds in cold.items() if "compile" not in name)
    assert others < cold["compile"]
    assert cold["compile"] > 4 * loaded["compile"] > 0
    assert again["compile"] == 0
    assert again["key: compile"] == cold["key: compile"] > 0


def test_a_stage_excludes_the_compilation_of_its_own_thread(monkeypatch):
    stages, provider = Stages(), registry.create("cpu")
    text = "define void @f(i64 %begin, i64 %end, ptr %x) { ret void }"
    source = KernelSource("f", {"llvm": text}, {"f": ("*u64",)})
    clock = Clock()
    for module in ("zk.groth16.keys", "runtime.providers.cpu"):
        monkeypatch.setattr(f"accelerant.{module}.time", clock)
    monkeypatch.setattr(provider, "wait_for", lambda _: clock.sleep(0.2), raising=False)
    with stages("here"):
        provider.compile(source)
    with stages("there"), ThreadPoolExecutor(1) as threads:
        threads.submit(provider.compile, source).result()
    assert stages.timings["here"] < 0.2 <= stages.compile_s
    assert stages.timings["there"] >= 0.2


# --- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("index", [1, 2, 4, 5])
def test_a_wrong_witness_makes_no_proof(product, tmp_path, index):
    family, folder = product
    values = values_of(folder / "product.wtns")
    values[index] += 1
    write_wtns(tmp_path / "wrong.wtns", family, encode(FIELDS[f"{family}_fr"], values))
    prover = Prover(folder / "product.zkey")
    assert_raises(FormatError, "does not verify and is not returned", prover.prove, tmp_path / "wrong.wtns")
    unverified = prover.prove(tmp_path / "wrong.wtns", verify=False)
    assert not verify(prover.verification_key, unverified.public, unverified)


def test_a_witness_of_another_circuit(circuit, product):
    family, folder = product
    prover = Prover(circuit / "circuit.zkey")
    match = "of another circuit" if family == "bn254" else "is a witness on bls12_381"
    assert_raises(FormatError, match, prover.prove, folder / "product.wtns")


def test_a_witness_that_is_not_reduced_names_no_value(product, tmp_path):
    family, folder = product
    shutil.copy(folder / "product.wtns", tmp_path / "large.wtns")
    with (tmp_path / "large.wtns").open("r+b") as file:
        file.seek(-32, 2)
        file.write(FIELDS[f"{family}_fr"].modulus.to_bytes(32, "little"))
    with pytest.raises(FormatError, match="not below the modulus") as refused:
        Prover(folder / "product.zkey").prove(tmp_path / "large.wtns")
    assert "large.wtns" in str(refused.value)


@pytest.mark.parametrize("section", ["a", "b2", "h"])
def test_a_damaged_key_makes_no_proof(product, tmp_path, section):
    """A coordinate is off by one: what comes out is no point of the curve, or of another statement."""
    _, folder = product
    data = bytearray((folder / "product.zkey").read_bytes())
    with Zkey.open(folder / "product.zkey") as zkey:
        words = getattr(zkey, section)
        row = int(np.flatnonzero(words.any(axis=1))[-1])
        at = data.find(words[row].tobytes())
    assert at > 0
    data[at] ^= 1
    (tmp_path / "damaged.zkey").write_bytes(bytes(data))
    with pytest.raises(FormatError, match="does not verify and is not returned"):
        Prover(tmp_path / "damaged.zkey").prove(folder / "product.wtns")


HEADER = ("alpha1", "beta1", "beta2", "gamma2", "delta1", "delta2")


def rewritten(folder, path, **changes):
    """The product's key with other points in its header; the points that are not named and zeros of those that are."""
    with Zkey.open(folder / "product.zkey") as zkey:
        names = (*HEADER, "n_public", "ic", "a", "b1", "b2", "c", "h", "coefficients")
        values = {name: getattr(zkey, name) for name in names}
        zeros = {name: np.zeros_like(values[name]) for name, new in changes.items() if new is None}
        write_zkey(path, zkey.family, **(values | changes | zeros))
    return path


ORDER_TWO = np.array([5, *[0] * 7], np.uint64)  # y = 0: of order 2 for the doubling's formula, and off the curve


@pytest.mark.parametrize(("changes", "match"), [
    ({"delta1": None, "beta1": None}, "beta1 is infinity"),
    ({"delta1": None}, "delta1 is infinity"),
    ({name: None for name in HEADER if name != "gamma2"}, "alpha1 is infinity"),
    ({"delta1": ORDER_TWO}, "delta1 is not on bn254_g1"),
])  # fmt: skip
def test_a_key_that_hides_nothing_is_refused(tmp_path, changes, match):
    """With delta1 = beta1 = 0, pi_A is the same each time, and proofs verify under the genuine key."""
    evil = rewritten(BN254, tmp_path / "evil.zkey", **changes)
    assert_raises(FormatError, match, Prover, evil)
    with Zkey.open(evil) as zkey, pytest.raises(FormatError, match=match):
        Prover(zkey)
    assert_raises(FormatError, match, VerificationKey.from_zkey, evil)


def test_a_key_whose_delta1_has_a_small_order_is_refused(tmp_path):
    """(0, 2) of BLS12-381 has order 3: pi_A would take three values, and a third of the proofs would verify."""
    g1, folder = family_of("bls12_381").g1, BN254.parent / "bls12_381"
    (order_three,) = montgomery_points(g1, encode_points(g1, [(0, 2)]))
    evil = rewritten(folder, tmp_path / "evil.zkey", delta1=order_three, beta1=None)
    assert_raises(FormatError, "beta1 is infinity", Prover, evil)
    evil = rewritten(folder, tmp_path / "evil.zkey", delta1=order_three)
    assert_raises(FormatError, r"delta1 is on bls12_381_g1 but not in its subgroup", Prover, evil)


def test_a_key_to_which_nobody_contributed_says_so(tmp_path):
    with Zkey.open(BN254 / "product.zkey") as zkey:
        assert zkey.forgeable is None
        fresh = rewritten(BN254, tmp_path / "fresh.zkey", delta2=zkey.gamma2)
    key = VerificationKey.from_zkey(fresh)
    assert key.forgeable is not None
    assert key.forgeable.startswith("gamma2 equals delta2: nobody has contributed to this key")
    for public in ((0, 0), (5, 77)):
        family = family_of("bn254")
        (alpha, *ic), (beta,) = (
            decode_points(family.g1, np.concatenate([key.alpha[None], key.ic])),
            decode_points(family.g2, key.beta[None]),
        )
        total = ic[0]
        for value, point in zip(public, ic[1:], strict=True):
            total = add(family.g1, total, multiply(family.g1, value, point))
        assert verify(key, public, Proof("bn254", alpha, beta, multiply(family.g1, -1, total)))  # no witness at all


def test_nothing_secret_is_shown(product):
    _, folder = product
    assert "12" not in repr(Prover(folder / "product.zkey")).replace(str(folder), "").replace("bls12_381", "")


# --- circuits of all sizes -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n_constraints", "n_public"), [(1, 0), (2, 0), (2, 1), (3, 3), (1, 7), (60, 2), (300, 100)])
def test_generated_circuits(tmp_path, family, n_constraints, n_public):
    wires = circuits.write_circuit(tmp_path, family, n_constraints, n_public)
    setup_with_known_tau(tmp_path / "circuit.r1cs", tmp_path / "circuit.zkey")
    prover = Prover(tmp_path / "circuit.zkey")
    proof = prover.prove(tmp_path / "witness.wtns")
    assert proof.public == tuple(wires[1 : n_public + 1])
    for i in range(n_public):
        other = [value ^ (i == j) for j, value in enumerate(proof.public)]
        assert not verify(prover.verification_key, other, proof)
        if i > 3:
            break


@pytest.mark.slow
@pytest.mark.parametrize(("family", "n_constraints"), [("bn254", 9000), ("bls12_381", 3000)])
def test_large_circuits(tmp_path, family, n_constraints):
    circuits.write_circuit(tmp_path, family, n_constraints, 5)
    setup_with_known_tau(tmp_path / "circuit.r1cs", tmp_path / "circuit.zkey")
    assert prove(tmp_path / "circuit.zkey", tmp_path / "witness.wtns").public is not None


def test_no_private_signal_and_no_constraint_with_one(tmp_path):
    """Sections of no points: w1 1 = w1, and one public wire that no constraint has."""
    one = np.zeros(1, TERM)
    one["wire"], one["value"][:, 0] = 1, 1
    constant = one.copy()
    constant["wire"] = 0
    write_r1cs(
        tmp_path / "c.r1cs",
        "bn254",
        n_wires=3,
        n_pub_out=0,
        n_pub_in=2,
        n_prv_in=0,
        n_constraints=1,
        a=one,
        b=constant,
        c=one,
    )
    write_wtns(tmp_path / "c.wtns", "bn254", encode(FIELDS["bn254_fr"], [1, 0, 9]))
    setup_with_known_tau(tmp_path / "c.r1cs", tmp_path / "c.zkey")
    prover = Prover(tmp_path / "c.zkey")
    proof = prover.prove(tmp_path / "c.wtns")
    assert proof.public == (0, 9)
    assert not verify(prover.verification_key, (0, 8), proof)


# A key in the CPU's memory: sections in chunks, points at infinity left out.


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
    proof = prover.prove(folder / "witness.wtns", verify=False)
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
    proof = prover.prove(folder / "witness.wtns", verify=False)
    assert verify(prover.verification_key, proof.public, proof)
