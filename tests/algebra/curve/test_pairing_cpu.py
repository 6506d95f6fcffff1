import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from pairing_reference import g1_point, g2_point, groth16_pairs, pairing, read_groth16, tower_of
from small_orders import of_cofactor, of_small_order, of_small_orders, point_out_of_subgroup, small_primes

from accelerant.algebra.curve import FAMILIES, family_of, tape
from accelerant.algebra.curve import pairing as pairings
from accelerant.algebra.curve.pairing import product, product_is_one
from accelerant.algebra.curve.weierstrass import (
    add,
    encode_points,
    multiply,
    negate,
    point_bytes,
    points_from_bytes,
    signed_windows,
)
from accelerant.algebra.field.parameters import FIELDS
from accelerant.errors import FormatError, ShapeError, UnsupportedDtype
from accelerant.runtime.compilation.cache import KernelCache
from accelerant.runtime.ledger import ledger
from refusals import assert_raises

FOLDER = Path(__file__).parents[2] / "vectors"
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


def encoded(family, pairs):
    return (
        encode_points(family.g1, [p for p, _ in pairs]),
        encode_points(family.g2, [q for _, q in pairs]),
    )


def random_pairs(family, n, seed=1):
    rng = random.Random(seed)
    return [
        tuple(multiply(curve, rng.randrange(1, family.r), curve.generator) for curve in (family.g1, family.g2))
        for _ in range(n)
    ]


def reference(family, pairs):
    tower = tower_of(family)
    value = tower.one
    for p, q in pairs:
        value = tower.mul(value, pairing(family, p, q))
    return value


@each_family
@pytest.mark.parametrize("n", [1, 3])
def test_value(family, n):
    """n = 1 with generators too; 4 and 5 are in test_groups_and_infinity."""
    pairs = random_pairs(family, n)
    if n == 3:
        pairs[1] = (family.g1.generator, family.g2.generator)
    assert product(family, *encoded(family, pairs)) == reference(family, pairs)


@each_family
def test_groups_and_infinity(family):
    """Nine pairs with infinities on both sides: 6 left, of a group of four and one of two."""
    pairs = random_pairs(family, 2) * 3
    wanted = tower_of(family).power(reference(family, pairs[:2]), 3)
    p, q = pairs[0]
    pairs = [(None, q), *pairs[:3], (None, None), *pairs[3:], (p, None)]
    assert product(family, *encoded(family, pairs)) == wanted
    assert product_is_one(family, *encoded(family, [(None, q), (None, None), (p, None)]))
    assert product_is_one(family, *encoded(family, []))


@pytest.mark.sample(5, 3)
@each_family
@pytest.mark.parametrize("n", range(2, 14))
def test_bilinear(family, n):
    """Sum a_i b_i = 0 mod r makes the product of e(a_i P, b_i Q) one, and nothing else does."""
    rng = random.Random(n)
    scalars = [(rng.randrange(1, family.r), rng.randrange(1, family.r)) for _ in range(n - 1)]
    last = rng.randrange(1, family.r)
    rest = -sum(a * b for a, b in scalars) * pow(last, -1, family.r) % family.r
    pairs = [
        (multiply(family.g1, a, family.g1.generator), multiply(family.g2, b, family.g2.generator))
        for a, b in [*scalars, (last, rest)]
    ]
    g1_points, g2_points = encoded(family, pairs)
    assert product_is_one(family, g1_points, g2_points)
    assert not product_is_one(family, g1_points[1:], g2_points[1:])
    assert not product_is_one(family, g1_points, np.roll(g2_points, 1, axis=0))
    changed = encode_points(family.g1, [add(family.g1, pairs[0][0], family.g1.generator)])
    assert not product_is_one(family, np.concatenate([changed, g1_points[1:]]), g2_points)


def test_more_groups_than_are_done_at_once(monkeypatch):
    family = family_of("bn254")
    monkeypatch.setattr("accelerant.algebra.curve.pairing._BATCH", 2)
    ((p, q),) = random_pairs(family, 1)
    assert product_is_one(family, *encoded(family, [(p, q)] * 11 + [(negate(family.g1, p), q)] * 11))
    assert not product_is_one(family, *encoded(family, [(p, q)] * 21 + [(negate(family.g1, p), q)]))
    off = (1, 1)
    with pytest.raises(FormatError, match=r"g1_points\[17\]"):
        product_is_one(family, *encoded(family, [(p, q)] * 17 + [(off, q)] * 5))
    with pytest.raises(FormatError, match=r"g1_points\[3\]"):
        product_is_one(family, *encoded(family, [(p, q)] * 3 + [(off, None)] + [(off, q)] * 5))


@each_family
def test_opposites(family):
    ((p, q),) = random_pairs(family, 1)
    opposite_p, opposite_q = negate(family.g1, p), negate(family.g2, q)
    for pair in ((opposite_p, q), (p, opposite_q)):
        assert product_is_one(family, *encoded(family, [(p, q), pair]))
    assert not product_is_one(family, *encoded(family, [(p, q), (opposite_p, opposite_q)]))
    assert product_is_one(family, *encoded(family, [(p, q)] * 4 + [(opposite_p, q)] * 4))


@pytest.mark.parametrize("file", ["eip197", "eip2537"])
def test_vectors_of_the_precompiles(file):
    family = family_of({"eip197": "bn254", "eip2537": "bls12_381"}[file])
    rows = json.loads((FOLDER / f"{file}.json").read_text())["pairing"]
    assert len(rows) >= 5
    first, second = (point_bytes(curve, "evm") for curve in (family.g1, family.g2))
    for row in rows:
        data = bytes.fromhex(row["Input"])
        parts = [data[i : i + first + second] for i in range(0, len(data), first + second)]
        g1 = points_from_bytes(family.g1, b"".join(part[:first] for part in parts), "evm")
        g2 = points_from_bytes(family.g2, b"".join(part[first:] for part in parts), "evm")
        found = product_is_one(family, encode_points(family.g1, g1), encode_points(family.g2, g2))
        assert found == (int(row["Expected"], 16) == 1), row["Name"]


# --- Groth16 ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("circuit", ["poseidon", "range"])
def test_groth16_proofs_of_snarkjs(circuit):
    family = family_of("bn254")
    key, public, proof = read_groth16(circuit)
    assert product_is_one(family, *encoded(family, groth16_pairs(key, public, proof)))
    for i in range(len(public)):
        changed = [*public[:i], str((int(public[i]) + 1) % family.r), *public[i + 1 :]]
        assert not product_is_one(family, *encoded(family, groth16_pairs(key, changed, proof)))
    for part, other in (("pi_a", "pi_c"), ("pi_c", "pi_a")):
        mixed = {**proof, part: proof[other]}
        assert not product_is_one(family, *encoded(family, groth16_pairs(key, public, mixed)))


def test_a_value_is_that_of_snarkjs():
    """vk_alphabeta_12 is a power of e(alpha, beta), in snarkjs's tower, which is ours.

    Its last factor of the exponent is 2 x (6 x^2 + 3 x + 1) times (q^4 - q^2 + 1) / r, which is cheaper to raise to.
    Source: Fuentes-Castaneda, Knapp and Rodriguez-Henriquez, SAC 2011.
    """
    family = family_of("bn254")
    x, (key, _, _) = family.parameter, read_groth16("poseidon")
    theirs = tuple(tuple(tuple(map(int, pair)) for pair in half) for half in key["vk_alphabeta_12"])
    value = product(family, *encoded(family, [(g1_point(key["vk_alpha_1"]), g2_point(key["vk_beta_2"]))]))
    assert tower_of(family).power(value, 2 * x * (6 * x**2 + 3 * x + 1)) == theirs


# --- checks ----------------------------------------------------------------------------------------------------------
@each_family
@pytest.mark.parametrize("group", ["g1", "g2"])
def test_points_off_the_curve_or_subgroup_are_refused(family, group):
    curve = getattr(family, group)
    ((p, q),) = random_pairs(family, 1)
    k = curve.coordinates
    x, y = curve.generator
    off = (x, k.add(y, k.one))
    cases = [(off, f"is not on {family.name}_{group}")]
    if curve.cofactor != 1:
        cases += [(point_out_of_subgroup(curve, seed), "not in its subgroup of order r") for seed in (1, 50)]
        cases += [(of_cofactor(curve, 100), "not in its subgroup of order r")]
        # One of the subgroup plus one of the cofactor's.
        cases += [(add(curve, curve.generator, of_cofactor(curve, 100)), "not in its subgroup of order r")]
    for point, reason in cases:
        bad, other = [(point, q), (p, point)][group == "g2"], [(point, None), (None, point)][group == "g2"]
        for pairs, index in (
            ([bad], 0),
            ([(p, q)] * 6 + [bad], 6),
            ([(p, q), (None, q), bad, (p, q)], 2),
            ([(p, q), (None, None), (p, q), other], 3),
        ):
            with pytest.raises(FormatError, match=rf"^{group}_points\[{index}\], .*{reason}"):
                product_is_one(family, *encoded(family, pairs))
        product_is_one(family, *encoded(family, [bad, other]), check=False)  # whatever it says


@each_family
@pytest.mark.parametrize("group", ["g1", "g2"])
def test_points_of_small_order_are_refused(family, group):
    """T and Q meet within the loop."""
    curve = getattr(family, group)
    for point in of_small_orders(curve):
        for each in (point, negate(curve, point), add(curve, point, curve.generator)):
            bad = (each, family.g2.generator) if group == "g1" else (family.g1.generator, each)
            assert_raises(FormatError, "not in its subgroup", product_is_one, family, *encoded(family, [bad]))


@each_family
@pytest.mark.parametrize("group", ["g1", "g2"])
def test_the_points_of_small_order_are_such(family, group):
    curve = getattr(family, group)
    primes = {
        "bn254_g1": [], "bn254_g2": [10069], "bls12_381_g1": [3, 11, 10177], "bls12_381_g2": [13, 23, 2713, 11953],
    }  # fmt: skip
    assert small_primes(curve) == primes[curve.name]
    for prime in small_primes(curve):
        point = of_small_order(curve, prime)
        assert point is not None
        assert curve.is_on_curve(point)
        assert multiply(curve, prime, point) is None
    if curve.name == "bls12_381_g1":
        assert of_small_orders(curve)[-1] == (0, 2)
        assert multiply(curve, 3, (0, 2)) is None


@each_family
def test_the_check_of_g2_is_one(family):
    """The norm of what kills the points that pass, in Z[psi] with psi^2 = t psi - q, is r times what is prime to the
    cofactor."""
    q, t, x = family.q, family.trace, family.parameter

    def norm(coefficients):
        a, b = 0, 0  # a + b psi
        for c in reversed(coefficients):
            a, b = c - b * q, a + b * t
        return a * a + a * b * t + b * b * q

    killing = [6 * x + 2, 1, -1, 1] if family.kind == "bn" else [abs(x), 1]
    value = norm(killing)
    assert value % family.r == 0
    assert math.gcd(value, family.g2.cofactor) == 1


@each_family
def test_rejections(family):
    g1_points, g2_points = encoded(family, random_pairs(family, 2))
    with pytest.raises(ShapeError, match=r"g1_points of \w+ must be \(n, 2, \d\), got \(2, 2, 2, \d\)"):
        product_is_one(family, g2_points, g2_points)
    with pytest.raises(ShapeError, match=r"g2_points of \w+ must be \(n, 2, 2, \d\), got \(2, 2, \d\)"):
        product_is_one(family, g1_points, g1_points)
    assert_raises(ShapeError, "must end in an axis of the", product_is_one, family, g1_points[..., :3], g2_points)
    with pytest.raises(ShapeError, match="as many points of both groups, got 1 and 2"):
        product_is_one(family, g1_points[1:], g2_points)
    with pytest.raises(UnsupportedDtype, match="g2_points must be uint64, got int64"):
        product_is_one(family, g1_points, g2_points.astype(np.int64))
    size = g1_points.shape[-1]
    modulus = np.array(family.g1.coordinates.base.words(family.q, 64, size), np.uint64)
    coordinates = {"g1_points": "y", "g2_points": r"y\.c1"}
    for points, name in ((g1_points, "g1_points"), (g2_points, "g2_points")):
        wrong = points.copy()
        wrong[1, 1] = 0
        wrong.reshape(-1, size)[-1] = modulus
        arguments = {"g1_points": g1_points, "g2_points": g2_points, name: wrong}
        for check in (True, False):
            shown = rf"^{name}\[1\] \(flattened\) {coordinates[name]} is {family.q:#x}, not below the modulus"
            assert_raises(FormatError, shown, product_is_one, family, **arguments, check=check)


def test_the_ledger_has_it():
    family = family_of("bn254")
    points = encoded(family, random_pairs(family, 2))
    ledger().reset()
    product_is_one(family, *points)
    rows = [row for row in ledger().to_dict()["ops"] if row["op"] == "pairing_product"]
    assert [(row["case"], row["calls"], row["own"], row["bytes"]) for row in rows] == [("2 bn254", 1, True, 2 * 6 * 32)]
    assert 15_000 < rows[0]["flops"] < 30_000


def test_bad_points_are_no_failures_of_the_op():
    family = family_of("bn254")
    ((p, q),) = random_pairs(family, 1)
    ledger().reset()
    for pairs in ([((1, 1), q)], [(p, q), (None, ((1, 1), (1, 1)))]):
        assert_raises(FormatError, "is not on bn254_g", product_is_one, family, *encoded(family, pairs))
    rows = [row for row in ledger().to_dict()["ops"] if row["op"] == "pairing_product"]
    assert [(row["calls"], row["failures"]) for row in rows] == [(1, 0)] * 2


def test_arrays_that_are_not_contiguous():
    family = family_of("bn254")
    pairs = random_pairs(family, 2)
    wanted = product(family, *encoded(family, pairs))
    g1_points, g2_points = (np.repeat(points, 2, axis=0)[::2] for points in encoded(family, pairs))
    assert product(family, g1_points, g2_points) == wanted
    assert product(family, g1_points[::-1], g2_points[::-1]) == wanted


@pytest.mark.parametrize("width", [2, 3, 4])
def test_signed_windows(width):
    for value in [0, 1, 2, 3, 0xD201000000010000, 6 * 4965661367192848881 + 2, (1 << 64) - 1]:
        digits = signed_windows(value, width)
        assert sum(digit << i for i, digit in enumerate(digits)) == value
        assert all(digit == 0 or (digit % 2 and abs(digit) < 1 << width - 1) for digit in digits)


# Tapes on disk: what comes back is what was recorded.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setattr(tape, "KernelCache", lambda: KernelCache(tmp_path))
    return tmp_path


def same(a, b):
    """Tapes have no equality of their own."""
    plain = [(t.field, t.registers, t.constants, t.products, t.code.tolist(), t.schedule.tolist()) for t in (a, b)]
    return plain[0] == plain[1]


KINDS = {
    "miller": lambda family: pairings.miller_tape.__wrapped__(family, 2),
    "product": pairings.product_tape.__wrapped__,
    "final": pairings.final_tape.__wrapped__,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bn254", "bls12_381"])
def test_what_is_read_is_what_was_recorded(folder, kind, name):
    family, calls = family_of(name), []
    made = KINDS[kind](family)

    def make():
        calls.append(kind)
        return made

    for _ in range(2):
        found = tape.cached(f"{kind}_{name}", "", FIELDS[f"{name}_fq"], make)
        assert same(found.tape, made.tape)
        assert found.tape.code.dtype == np.int32
        assert found.tape.schedule.dtype == np.int64
        assert (found.inputs, found.outputs) == (made.inputs, made.outputs)
    assert len(calls) == 1
    assert len(list(folder.iterdir())) == 1


def test_a_damaged_entry_is_recorded_again(folder):
    family = family_of("bn254")
    field, calls = FIELDS["bn254_fq"], []

    def make():
        calls.append(1)
        return pairings.product_tape.__wrapped__(family)

    first = tape.cached("t", "", field, make)
    code = next(folder.iterdir()) / "code"
    code.write_bytes(bytes([code.read_bytes()[0] ^ 1]) + code.read_bytes()[1:])
    assert same(tape.cached("t", "", field, make).tape, first.tape)
    assert len(calls) == 2


def test_nothing_that_a_tape_is_lies_beside_the_checksum(folder):
    """With other constants, or registers beyond the memory, all would be computed wrong."""
    family = family_of("bn254")
    field, first = FIELDS["bn254_fq"], pairings.product_tape.__wrapped__(family)
    tape.cached("t", "", field, lambda: first)
    path = next(folder.iterdir()) / "report.json"
    report = json.loads(path.read_text())
    assert not report["metadata"]
    report["metadata"] = {"schedule": 0, "registers": 1, "constants": ["5"], "products": 0, "places": {}}
    path.write_text(json.dumps(report))
    assert same(tape.cached("t", "", field, lambda: first).tape, first.tape)
