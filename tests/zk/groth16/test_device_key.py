"""Proofs on devices are those of the CPU, exactly: on PoCL, on NVIDIA where there is a GPU."""

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import circuits
import numpy as np
import pytest

from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.field.memory_space import HOST, space_at
from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.words import encode, random
from accelerant.algebra.msm import device as msm_device
from accelerant.cli.app import main
from accelerant.config import override
from accelerant.errors import BackendUnavailable, ConfigError, DeviceLost, FormatError, ShapeError
from accelerant.runtime.ledger import ledger
from accelerant.zk.formats import TERM, Witness, Zkey, write_r1cs, write_wtns
from accelerant.zk.groth16 import Prover, device_key, keys, verify
from accelerant.zk.groth16.device_key import Budgets, DeviceKey, KeyPart, Queues, SectionPoints, budgets, shares
from accelerant.zk.groth16.keys import (
    BLOCK,
    ELEMENTS_PER_THREAD,
    LONG_ROW,
    SECTIONS,
    Stages,
    gather,
    quotient,
    snarkjs_scalar_field,
)
from accelerant.zk.groth16.setup import setup_with_known_tau
from processes import in_threads
from refusals import assert_raises
from requirements import require_backend

KNOWN = (12345, 2**200 + 7)


@pytest.fixture(params=["opencl", pytest.param("cuda", marks=pytest.mark.gpu)])
def space(request):
    return space_at(require_backend(request.param))


@pytest.fixture(
    scope="module",
    params=[pytest.param("opencl", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request):
    """The name of a device that takes its time to compile."""
    return require_backend(request.param)


@pytest.fixture
def no_multiples(device, monkeypatch):
    """PoCL takes seconds for the multiples of a key's points, and less for a proof or two without them."""

    def plain(points, room):
        return Budgets({name: section.words.nbytes for name, section in points.items()}, None)

    if device == "opencl":
        monkeypatch.setattr(device_key, "budgets", plain)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with a circuit of 60 constraints, and three witnesses of it."""
    folder = tmp_path_factory.mktemp("small")
    wires = circuits.write_circuit(folder, "bn254", 60, 3)
    setup_with_known_tau(folder / "circuit.r1cs", folder / "circuit.zkey")
    write_wtns(folder / "other.wtns", "bn254", encode(FIELDS["bn254_fr"], wires))
    wires[5] += 1
    write_wtns(folder / "wrong.wtns", "bn254", encode(FIELDS["bn254_fr"], wires))
    return folder


@pytest.fixture(scope="module")
def prover(small, device):
    return Prover(small / "circuit.zkey", device=device)


def same_on_both(key, witness, device):
    there, here = Prover(key, device=device), Prover(key, device="cpu")
    expected = here.prove(witness, insecure_randomness_for_tests=KNOWN)
    assert there.prove(witness, insecure_randomness_for_tests=KNOWN) == expected
    proof = there.prove(witness)
    assert proof != expected
    assert verify(there.verification_key, proof.public, proof)
    return there


# --- the kernels around sums and transforms --------------------------------------------------------------------------
def test_rows_and_quotient_are_the_cpus(device):
    """Rows of no entry, of few, and of just more and many more than a thread takes; any words as values."""
    field, n, signals = snarkjs_scalar_field(family_of("bn254")), 16, 40
    rng = np.random.default_rng(3)
    lengths = [0, 1, 2, 3, LONG_ROW - 1, LONG_ROW, LONG_ROW + 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3]
    rows = np.concatenate([np.full(length, i + 3) for i, length in enumerate(lengths)] + [rng.integers(0, 2 * n, 50)])
    rng.shuffle(rows)
    values = rng.integers(0, 2**64, (len(rows), 4), np.uint64)
    sorted_rows = keys.SparseMatrix.from_entries(field, 2 * n, rows, rng.integers(0, signals, len(rows)), values)
    witness = random(field, (signals,))
    space = space_at(device)
    found = space.store(keys.DeviceMatrix(space, sorted_rows, space.load).quotient(space.load(witness)))
    assert np.array_equal(found, quotient(sorted_rows, witness))


def test_rows_of_more_columns_than_there_are_values(space):
    """A key's file may change after its entries were found in range: the kernel would read elsewhere."""
    field = snarkjs_scalar_field(family_of("bn254"))
    rows = keys.SparseMatrix.from_entries(field, 4, np.array([1, 2]), np.array([0, 9]), np.ones((2, 4), np.uint64))
    with pytest.raises(ShapeError, match="at least 10 values, got 9"):
        keys.DeviceMatrix(space, rows, space.load).quotient(space.load(random(field, (9,))))


@pytest.mark.slow
def test_gathered_and_unreduced(space):
    field, n = snarkjs_scalar_field(family_of("bn254")), 2 * BLOCK * ELEMENTS_PER_THREAD + 5
    x = random(field, (n,))
    which = np.array([7, 0, n - 1, 7], np.uint32)
    assert np.array_equal(space.store(gather(space, field, space.load(x), space.load(which), 4)), x[which])
    assert not space.store(keys.unreduced_blocks(space, field, space.load(x), n)).any()
    modulus = encode(field, [field.modulus - 1]) + np.array([1, 0, 0, 0], np.uint64)
    for index in (0, BLOCK * ELEMENTS_PER_THREAD - 1, BLOCK * ELEMENTS_PER_THREAD, n - 1):
        wrong = x.copy()
        wrong[index] = modulus
        blocks = space.store(keys.unreduced_blocks(space, field, space.load(wrong), n))
        assert np.flatnonzero(blocks).tolist() == [index // (BLOCK * ELEMENTS_PER_THREAD)]


# --- proofs ----------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("no_multiples")
@pytest.mark.sample(2)
def test_proofs_of_snarkjs_keys(circuit, device):
    ledger().reset()
    prover = same_on_both(circuit / "circuit.zkey", circuit / "witness.wtns", device)
    stages = ["witness", "launches", "blinding", "device", "proof", "verification"]
    assert list(prover.timings) == [
        *("key: compile", "key: header", "key: constraints", "key: points", "compile"),
        *stages,
    ]
    parts = {"quotient", *(f"sum {name}" for name in SECTIONS)} if device == "cuda" else set()
    assert set(prover.spans) == parts
    assert all(seconds >= 0 for seconds in prover.spans.values())
    assert repr(prover).endswith(f"{device}:0)")
    assert [line.partition(":")[0] for line in prover.explain().splitlines()] == list(SECTIONS)
    rows = {(row["op"], row["device"]) for row in ledger().to_dict()["ops"]}
    assert {(op, f"{device}:0") for op in ("sparse_mul", "ntt", "msm")} <= rows


@pytest.mark.usefixtures("no_multiples")
@pytest.mark.sample(5)
@pytest.mark.parametrize(("n_constraints", "n_public"), [(1, 7), (1, 0), (2, 1), (3, 3), (300, 100)])
def test_generated_circuits(tmp_path, device, n_constraints, n_public):
    """From a domain of two points on; public inputs that no constraint has, so infinities in A and B."""
    circuits.write_circuit(tmp_path, "bn254", n_constraints, n_public)
    setup_with_known_tau(tmp_path / "circuit.r1cs", tmp_path / "circuit.zkey")
    with Zkey.open(tmp_path / "circuit.zkey") as zkey:
        assert zkey.domain_size >= 2
        assert not zkey.b1.any(axis=1).all()
    same_on_both(tmp_path / "circuit.zkey", tmp_path / "witness.wtns", device)


@pytest.mark.parametrize("family", [pytest.param("bls12_381", marks=pytest.mark.soak)])
def test_the_other_family(tmp_path, device, family):
    circuits.write_circuit(tmp_path, family, 20, 2)
    setup_with_known_tau(tmp_path / "circuit.r1cs", tmp_path / "circuit.zkey")
    same_on_both(tmp_path / "circuit.zkey", tmp_path / "witness.wtns", device)


@pytest.mark.usefixtures("no_multiples")
def test_sections_of_no_points(tmp_path, device):
    """No private signal, so C is empty; B has one finite point."""
    one = np.zeros(1, TERM)
    one["wire"], one["value"][:, 0] = 1, 1
    constant = one.copy()
    constant["wire"] = 0
    counts = {"n_wires": 3, "n_pub_out": 0, "n_pub_in": 2, "n_prv_in": 0, "n_constraints": 1}
    write_r1cs(tmp_path / "c.r1cs", "bn254", **counts, a=one, b=constant, c=one)
    write_wtns(tmp_path / "c.wtns", "bn254", encode(FIELDS["bn254_fr"], [1, 0, 9]))
    setup_with_known_tau(tmp_path / "c.r1cs", tmp_path / "c.zkey")
    prover = same_on_both(tmp_path / "c.zkey", tmp_path / "c.wtns", device)
    assert "\nC: 0 points" in prover.explain()


# --- several proofs --------------------------------------------------------------------------------------------------
def given(folder, names, taken):
    for name in names:
        taken.append(name)
        yield folder / f"{name}.wtns"


def check_many(folder, prover):
    """In order; the one ahead is not lost where a witness is refused, and those after it are not made."""
    taken = []
    proofs = list(prover.prove_many(given(folder, ["witness", "other", "witness"], taken)))
    assert len({proof.c for proof in proofs}) == 3
    assert all(verify(prover.verification_key, proof.public, proof) for proof in proofs)
    for bad, match in (("wrong", "does not verify and is not returned"), ("absent", r"absent\.wtns")):
        taken.clear()
        many = prover.prove_many(given(folder, ["witness", "other", bad, *["witness"] * 3], taken))
        found = [next(many), next(many)]
        assert_raises((FormatError, OSError), match, next, many)
        assert all(verify(prover.verification_key, proof.public, proof) for proof in found)
        assert len(taken) <= 4
        assert list(many) == []
    check_a_source_that_fails(folder, prover)
    assert list(prover.prove_many([])) == []
    (one,) = prover.prove_many([folder / "witness.wtns"])
    assert verify(prover.verification_key, one.public, one)


def check_a_source_that_fails(folder, prover):
    """What was begun with is not lost."""

    def failing():
        yield from given(folder, ["witness", "other"], [])
        raise RuntimeError("no more of them")

    many = prover.prove_many(failing())
    found = [next(many), next(many)]
    assert_raises(RuntimeError, "no more of them", lambda: next(many))
    assert all(verify(prover.verification_key, proof.public, proof) for proof in found)


def test_many_proofs_on_the_cpu(small):
    check_many(small, Prover(small / "circuit.zkey", device="cpu"))


def test_many_proofs_on_a_device(small, prover):
    check_many(small, prover)


def test_threads_share_a_key(small, prover):
    """Queues and scratch memory are one proof's after the other."""
    found = []
    expected = prover.prove(small / "witness.wtns", insecure_randomness_for_tests=KNOWN)

    def run():
        for _ in range(3):
            found.append(prover.prove(small / "witness.wtns", insecure_randomness_for_tests=KNOWN))

    in_threads([run] * 3)
    assert found == [expected] * 9


def test_proofs_that_are_given_up(small, device, prover):
    """Their kernels may still run when the next proof begins, with the same queues and scratch memory."""
    here = Prover(small / "circuit.zkey", device="cpu")
    if device == "cuda":  # one that has captured nothing
        prover = Prover(small / "circuit.zkey", device=device)
    expected = {
        name: here.prove(small / f"{name}.wtns", insecure_randomness_for_tests=KNOWN) for name in ("witness", "other")
    }
    for number in range(6):
        name = ("witness", "other")[number % 2]
        if number >= 3:
            many = prover.prove_many(given(small, ["other", "witness"] * 4, []))
            next(many)
            many.close()
        proof = prover.prove(small / f"{name}.wtns", insecure_randomness_for_tests=KNOWN)
        assert proof == expected[name]
        assert verify(here.verification_key, proof.public, proof)
        assert device == "opencl" or captured_sums(prover)[:1] == [5] * (number >= 2)
    assert len(list(prover.prove_many(given(small, ["other", "witness"] * 4, [])))) == 8


def captured_sums(prover):
    """How many sums each set of captured vectors has, of which every quotient is captured."""
    (part,) = prover._key._parts
    assert all(vectors.graph is not None for vectors in part._captured)
    return [len(vectors.sums) for vectors in part._captured]


def test_what_a_lane_reads_it_loaded_itself(small, space, monkeypatch):
    """CUDA's allocator waits for the queues that loaded memory before it gives that to others, and for no more."""
    loaded, load = [], Queues.load

    def noted(self, number, words):
        loaded.append((number, words))
        return load(self, number, words)

    monkeypatch.setattr(Queues, "load", noted)
    monkeypatch.setattr(device_key, "budgets", lambda *_: Budgets(dict.fromkeys(SECTIONS), None))
    with Zkey.open(small / "circuit.zkey") as zkey:
        key = KeyPart(zkey, space, Stages(), dict.fromkeys(SECTIONS, (0, 1)))
    assert key._input == len(SECTIONS)
    assert [number for number, words in loaded if words.tolist() == [1, 2, 3]] == [key._input]


def test_vectors_of_captured_sums():
    """A set is used again when its work has ended; a capture that fails leaves the sets that are complete."""
    current, allocated = [None], []

    class OneDevice:
        def captured(self, number, name, call, *args):
            return "quotient", "graph"

        @contextmanager
        def queue(self, number):
            current.append(number)
            yield
            current.pop()

    class Space:
        def empty(self, shape, dtype):
            allocated.append((shape, current[-1]))
            return object()

    class Section:
        fails = False

        def capture(self, values, sums):
            if self.fails:
                raise RuntimeError("out of memory")
            sums["H"] = values, "graph"

    key, section, running = KeyPart.__new__(KeyPart), Section(), SimpleNamespace(done=lambda: False)
    key.space, key.label, key._queues, key._input = Space(), "x:0", OneDevice(), 5
    key._rows, key._sections = SimpleNamespace(quotient=None), {"H": section}
    key._captures, key._eager_proofs, key._captured = True, 0, []
    assert [key._vectors(3).graph for _ in range(2)] == [None, None]
    first = key._vectors(3)
    assert (first.quotient, first.graph, first.sums) == ("quotient", "graph", {"H": ("quotient", "graph")})
    assert key._vectors(3) is first
    first.ends, section.fails = [running], True
    eager = key._vectors(3)
    assert (eager.graph, eager.sums, key._captured) == (None, {}, [first])
    section.fails = False
    assert key._vectors(3).graph is None  # no second attempt
    first.ends = []
    assert key._vectors(3) is first
    assert allocated == [((3, 4), 5)] * 5


def test_all_devices_add_up_one_copy_of_a_witness():
    """The file may change between two devices' reading."""
    seen = []

    class Part:
        label = "x:0"

        def await_read(self):
            assert not key._witness.any()  # before it is written

        def receive(self, values):
            parts = []
            return (lambda *part: parts.append(part)), lambda _: seen.append((values, parts))

    key = DeviceKey.__new__(DeviceKey)
    key._parts, key._threads = [Part(), Part()], ThreadPoolExecutor(2)
    key._witness, key._lock = np.zeros((2, 4), np.uint64), threading.Lock()
    values = np.arange(8, dtype=np.uint64).reshape(2, 4)
    slow = []

    class Truncated:
        def copy_values(self, first, to):
            if not first:
                raise FormatError("shorter now")
            time.sleep(0.1)
            slow.append(first)

    assert_raises(FormatError, "shorter now", lambda: key.begin(Truncated(), Stages()))
    assert len(slow) == 4  # the next witness is not mixed with what is late of this one

    class File:
        def copy_values(self, first, to):
            to[:] = values[first : first + len(to)]

    key.begin(File(), Stages())
    (witness, parts), (other, _) = seen
    assert witness is other
    assert np.array_equal(witness, values)
    assert not np.shares_memory(witness, values)
    assert [row for first, last in parts for row in range(first, last)] == [0, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_waits_for_no_threads():
    """It has none of those that read witnesses."""
    part = KeyPart.__new__(KeyPart)
    part.space, part._read = space_at(require_backend("opencl")), None
    part.await_read()
    child = os.fork()
    if child == 0:
        try:
            part.await_read()
        except DeviceLost:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


# --- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.sample(3)
def test_a_wrong_witness_makes_no_proof(small, product, tmp_path, prover):
    assert_raises(FormatError, "does not verify and is not returned", prover.prove, small / "wrong.wtns")
    _, folder = product
    assert_raises(FormatError, r"of another circuit|is a witness on bls12_381", prover.prove, folder / "product.wtns")
    data = bytearray((small / "witness.wtns").read_bytes())
    data[-32:] = FIELDS["bn254_fr"].modulus.to_bytes(32, "little")
    (tmp_path / "large.wtns").write_bytes(bytes(data))
    refused = assert_raises(FormatError, "not below the modulus", prover.prove, tmp_path / "large.wtns")
    assert "large.wtns" in str(refused)
    with pytest.raises(FormatError, match="not below the modulus"):
        list(prover.prove_many([small / "witness.wtns", tmp_path / "large.wtns"]))
    assert verify(prover.verification_key, *proved(prover, small))


def proved(prover, folder):
    proof = prover.prove(folder / "witness.wtns")
    return proof.public, proof


@pytest.mark.usefixtures("no_multiples")
@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.sample(5)
def test_a_damaged_key_makes_no_proof(small, tmp_path, device, section):
    """A coordinate is off by one: the last finite point's."""
    data = bytearray((small / "circuit.zkey").read_bytes())
    with Zkey.open(small / "circuit.zkey") as zkey, Witness.open(small / "witness.wtns") as witness:
        words = zkey.points[section]
        multiplied = witness.values[-len(words) :].any(axis=1) if section != "H" else True
        row = int(np.flatnonzero(words.any(axis=1) & multiplied)[-1])
        at = data.find(words.tobytes()) + row * words.itemsize * words.shape[1]
    data[at] ^= 1
    (tmp_path / "damaged.zkey").write_bytes(bytes(data))
    with pytest.raises(FormatError, match="does not verify and is not returned"):
        Prover(tmp_path / "damaged.zkey", device=device).prove(small / "witness.wtns")


# --- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.sample(2)
@pytest.mark.parametrize("kept", ["", "AH", "CB1B2"])
def test_what_has_no_room_is_streamed(small, device, monkeypatch, kept):
    """In chunks of a few points, after which a proof is the same."""
    monkeypatch.setattr(msm_device, "STREAMED_BYTES", 1 << 12)
    if kept:
        points = {name: 0 if name in kept else None for name in SECTIONS}
        monkeypatch.setattr(device_key, "budgets", lambda points_, room: Budgets(points, 1 << 24))
    prover = Prover(small / "circuit.zkey", device="cpu")
    expected = prover.prove(small / "witness.wtns", insecure_randomness_for_tests=KNOWN)
    with Zkey.open(small / "circuit.zkey") as zkey:
        prover._key = DeviceKey(zkey, (space_at(device),), Stages(), free_bytes=1)
    streamed = [line[:2].strip(":") for line in prover.explain().splitlines() if "streamed" in line]
    assert streamed == [name for name in SECTIONS if name not in kept]
    for _ in range(2):
        assert prover.prove(small / "witness.wtns", insecure_randomness_for_tests=KNOWN) == expected


def test_budgets():
    g1 = family_of("bn254").g1
    points = {
        name: SectionPoints(g1, np.ones((n, 8), np.uint64))
        for name, n in zip(SECTIONS, (9000, 50, 70, 0, 10**5), strict=True)
    }
    plain = {name: each.words.nbytes for name, each in points.items()}
    scratch = sum(each.scratch_bytes(len(each.words)) for each in points.values())
    all_kept = budgets(points, sum(plain.values()) + scratch)
    assert (dict(all_kept.points), all_kept.scratch) == (plain, None)
    more = budgets(points, 10 * (sum(plain.values()) + scratch))
    assert all(more.points[name] > size for name, size in plain.items() if size)
    assert sum(more.points.values()) + scratch <= 10 * (sum(plain.values()) + scratch)
    streamed = budgets(points, 0)
    assert set(streamed.points.values()) - {None} <= {0}
    assert streamed.scratch == max(each.scratch_bytes(each.chunk) for each in points.values())


def test_rounds_are_the_last_to_get_room():
    """No key is streamed, and none goes without its points' multiples, for the scratch of affine rounds."""
    g1 = family_of("bls12_381").g1
    ones = SectionPoints(g1, np.broadcast_to(np.ones(12, np.uint64), (1 << 21, 12)))
    points = dict.fromkeys(SECTIONS, ones)
    scratch, with_rounds = (ones.scratch_bytes(1 << 21, rounds) for rounds in (0, None))
    assert ones.scratch_bytes(1 << 21) == scratch < with_rounds / 4
    plain = budgets(points, len(SECTIONS) * (ones.words.nbytes + scratch))
    assert (set(plain.points.values()), plain.scratch, plain.rounds) == ({ones.words.nbytes}, None, 0)
    room = len(SECTIONS) * (ones.multiples_bytes + with_rounds)
    for less, rounds, used in ((1, 0, scratch), (0, None, with_rounds)):
        found = budgets(points, room - less)
        assert (found.scratch, found.rounds) == (None, rounds)
        assert all(ones.multiples_bytes <= size for size in found.points.values())
        assert sum(found.points.values()) + len(SECTIONS) * used <= room - less
    assert budgets(points, 0).rounds == 0


def test_points_without_infinity():
    g1 = family_of("bn254").g1
    words = np.ones((5, 8), np.uint64)
    assert SectionPoints(g1, words).indices is None
    assert SectionPoints(g1, words, 3).indices.tolist() == [3, 4, 5, 6, 7]
    words[[0, 3]] = 0
    assert SectionPoints(g1, words).indices.tolist() == [1, 2, 4]
    found = SectionPoints(g1, words, 3)
    assert found.indices.tolist() == [4, 5, 7]
    assert len(found.words) == 3
    assert found.words.all()


# --- several devices, and which -------------------------------------------------------------------------------------
@pytest.mark.usefixtures("no_multiples")
def test_several_devices_share_a_proof(small, device):
    """Three, on a machine with one device three times the same: two share B2."""
    devices = space_at(device).provider.devices()
    labels = [f"{device}:0", f"{device}:0", f"{device}:{devices[-1].index}"]
    expected = Prover(small / "circuit.zkey", device="cpu").prove(
        small / "witness.wtns", insecure_randomness_for_tests=KNOWN
    )
    prover = Prover(small / "circuit.zkey", devices=[device, f"{device}:0", devices[-1]])
    assert prover.prove(small / "witness.wtns", insecure_randomness_for_tests=KNOWN) == expected
    assert prover.device == "+".join(labels)
    assert len(prover.explain().splitlines()) == 6
    assert_raises(FormatError, "does not verify and is not returned", prover.prove, small / "wrong.wtns")
    check_a_source_that_fails(small, prover)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 20])
def test_shares_are_all_sections(count):
    """Two devices have whole sections, and no device has much more than its share."""
    for points in (dict.fromkeys(SECTIONS, 1 << 20), {"A": 562, "B1": 543, "B2": 543, "C": 575, "H": 1024}):
        taken = shares(points, count)
        parts = sorted((name, *part) for each in taken for name, part in each.items())
        numbers = {name: next(n for other, _, n in parts if other == name) for name in SECTIONS}
        assert parts == sorted((name, i, n) for name, n in numbers.items() for i in range(n))
        costs = {name: n * (3 if name == "B2" else 1) for name, n in points.items()}
        load = [sum(costs[name] / n for name, (_, n) in each.items()) for each in taken]
        assert max(load) <= (1.5 if count <= 4 else 2.1) * sum(costs.values()) / count
        assert count > 2 or set(numbers.values()) == {1}
    assert shares(dict.fromkeys(SECTIONS, 0), 9)[8] == {}


def test_parts_are_all_points():
    g1, words = family_of("bn254").g1, np.arange(11 * 8, dtype=np.uint64).reshape(11, 8)
    words[4] = 0
    for count in (1, 2, 3, 20):
        parts = [SectionPoints(g1, words, 2, (index, count)) for index in range(count)]
        assert np.array_equal(np.concatenate([part.words for part in parts]), words[words.any(axis=1)])
        assert np.concatenate([part.indices for part in parts]).tolist() == [i + 2 for i in range(11) if i != 4]


@pytest.mark.parametrize("wrong", [[], ["cpu", "cpu"], ["opencl", "cpu"], "cpu:1", "gpu", "cuda:x"])
def test_devices_that_cannot_be(small, wrong):
    if "opencl" in wrong:  # without OpenCL its absence is what is reported
        require_backend("opencl")
    with pytest.raises(ConfigError):
        Prover(small / "circuit.zkey", **{"device" if isinstance(wrong, str) else "devices": wrong})
    assert_raises(ConfigError, "devices=", lambda: Prover(small / "circuit.zkey", device=[wrong]))


def test_the_automatic_choice(small, monkeypatch):
    """Without a GPU's driver it is the CPU; with one, where torch is imported anyway or the circuit is large."""
    monkeypatch.setattr(keys, "space_at", lambda name: name)
    monkeypatch.setattr(keys, "_NVIDIA_NODES", ())
    assert keys.spaces_of("auto", 1 << 20) == (HOST,)
    monkeypatch.setattr(keys, "_NVIDIA_NODES", (str(small),))
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert keys.spaces_of("auto", 2) == ("cuda",)
    monkeypatch.delitem(sys.modules, "torch")
    assert keys.spaces_of("auto", 1 << 15) == (HOST,)
    assert keys.spaces_of("auto", 1 << 16) == ("cuda",)

    def absent(name):
        raise BackendUnavailable(name, "it does not start")

    monkeypatch.setattr(keys, "space_at", absent)
    assert keys.spaces_of("auto", 1 << 16) == (HOST,)
    assert_raises(BackendUnavailable, None, keys.spaces_of, "cuda", 2)
    monkeypatch.setattr(keys, "space_at", lambda name: name)
    with override(backend="opencl"):
        assert keys.spaces_of("auto", 2) == ("opencl",)
        assert keys.spaces_of("cpu", 2) == ("cpu",)


@pytest.mark.parametrize("family", ["bn254", "bls12_381"])
def test_nvrtc_compiles_with_few_registers(family):
    pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")
    from accelerant.runtime.compilation.cuda import compile_cuda

    for entry, resources in compile_cuda(
        keys._device_source(snarkjs_scalar_field(family_of(family))), "sm_90a"
    ).resources.items():
        assert 0 < resources.registers <= 64, entry
        assert resources.spill_bytes <= 8, entry
        assert resources.shared_bytes <= 32 * BLOCK


def test_the_command_says_where(small, tmp_path, capsys):
    arguments = [str(small / "circuit.zkey"), str(small / "witness.wtns"), *(str(tmp_path / name) for name in "pq")]
    assert_raises(SystemExit, None, main, ["zk", "prove", *arguments, "--device", "cpu", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert (facts["device"], facts["device_seconds"]) == ("cpu", {})
    ended = assert_raises(SystemExit, None, main, ["zk", "prove", *arguments, "--device", "abacus"])
    assert ended.code == 2
    assert "unknown backend 'abacus'" in capsys.readouterr().err


@pytest.mark.usefixtures("no_multiples")
def test_the_command_shares_a_proof_among_devices(small, tmp_path, capsys, device):
    """The same one twice."""
    arguments = [str(small / "circuit.zkey"), str(small / "witness.wtns"), *(str(tmp_path / name) for name in "pq")]
    with pytest.raises(SystemExit) as ended:
        main(["zk", "prove", *arguments, f"--device={device}:0", f"--device={device}", "--json"])
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["device"] == f"{device}:0+{device}:0"


@pytest.mark.parametrize(("names", "message"), [
    (["cpu", "abacus"], "unknown backend 'abacus'; known are cuda,"),
    (["cpu", ""], "--device must not be empty"),
    (["cpu", "cpu"], "several of which none is the CPU; got ['cpu', 'cpu']"),
    (["cpu", "cpu:7"], "backend 'cpu' has 1 device; there is no number 7"),
    (["cpu", "cpu:x"], "device must be a name such as 'cpu'"),
])  # fmt: skip
def test_lists_of_devices_that_cannot_be(small, tmp_path, capsys, names, message):
    arguments = [str(small / "circuit.zkey"), str(small / "witness.wtns"), *(str(tmp_path / name) for name in "pq")]
    ended = assert_raises(SystemExit, None, main, ["zk", "prove", *arguments, *(f"--device={name}" for name in names)])
    assert ended.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
