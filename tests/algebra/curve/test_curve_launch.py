"""Launches of the curve kernels: counts that do not fit one another, and the subgroup test of many points together."""

import functools
import random

import numpy as np
import pytest
from small_orders import of_small_order, of_small_orders, point_out_of_subgroup, small_primes

from accelerant.algebra.curve import curve_of, launch
from accelerant.algebra.curve.weierstrass import add, decode_points, encode_points, multiply, negate
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.parameters import FIELDS
from accelerant.errors import ShapeError
from vectors import MSM_ANSWERS, field_elements, msm_multipliers, msm_scalars, splitmix64

G1 = curve_of("bn254_g1")


def infinities(n):
    return np.zeros((n, *G1.shape), np.uint64)


@pytest.mark.parametrize(("x", "y"), [(1, 0), (0, 1), (2, 1), (1, 2), (3, 2)])
def test_sums_of_other_counts(x, y):
    """The kernel would read past the shorter array."""
    with pytest.raises(ShapeError, match=f"as many points on both sides, got {x} and {y}"):
        launch.add(HOST, G1, infinities(x), infinities(y))


@pytest.mark.parametrize(("points", "scalars"), [(2, 3), (3, 2), (0, 2), (2, 0)])
def test_multiples_of_other_counts(points, scalars):
    with pytest.raises(ShapeError, match=f"{points} points and {scalars} scalars; wanted as many, or one of either"):
        launch.multiply(HOST, G1, infinities(points), np.zeros((scalars, launch.SCALAR_WORDS), np.uint64))


@pytest.mark.parametrize(("points", "scalars", "n"), [(1, 0, 0), (0, 1, 0), (1, 1, 1), (1, 3, 3), (3, 1, 3), (2, 2, 2)])
def test_one_stands_for_all(points, scalars, n):
    found = launch.multiply(HOST, G1, infinities(points), np.ones((scalars, launch.SCALAR_WORDS), np.uint64))
    assert found.shape == (n, *G1.shape)
    assert not found.any()


# --- many points in the subgroup -------------------------------------------------------------------------------------
WITH_COFACTOR = [pytest.param(f"{family}_g2", marks=pytest.mark.slow) for family in ("bn254", "bls12_381")]
WITH_COFACTOR += ["bls12_381_g1"]
N = launch._FEWEST


def words_of(curve, points):
    return launch.to_montgomery(HOST, curve, encode_points(curve, points))


@functools.cache
def in_the_subgroup(name, n=N):
    """Multiples of the generator, the first of them infinity."""
    curve, rng = curve_of(name), random.Random(n)
    scalars = np.array([[0, 0, 0, 0]] + [[rng.getrandbits(60) for _ in range(4)] for _ in range(n - 1)], np.uint64)
    return launch.multiply(HOST, curve, words_of(curve, [curve.generator]), scalars)


def with_parts(name, parts, n=N):
    """Points of the subgroup, to some of which points out of it are added."""
    curve, points = curve_of(name), in_the_subgroup(name, n).copy()
    chosen = list(parts)
    points[chosen] = launch.add(HOST, curve, points[chosen], words_of(curve, list(parts.values())))
    return points


@pytest.mark.parametrize("name", WITH_COFACTOR)
def test_few_points_are_tested_one_by_one(name, monkeypatch):
    """Of many only the sums of subsets are."""
    tested, whole = [], launch.launch

    def counted(space, source, entry, blocks, threads, arrays, *sizes):
        if entry == "curve_off_subgroup":
            tested.append(sizes[0])
        whole(space, source, entry, blocks, threads, arrays, *sizes)

    monkeypatch.setattr(launch, "launch", counted)
    points = in_the_subgroup(name, 4 * N)
    for n in (1, N - 1, N, 4 * N):
        assert launch.first_off(HOST, curve_of(name), "off_subgroup", points[:n]) is None
    assert tested[:2] == [1, N - 1]
    assert all(64 <= n < 80 for n in tested[2:])


@pytest.mark.parametrize("name", WITH_COFACTOR)
def test_one_point_of_small_order_among_many_is_named(name):
    for at, part in zip((0, 1, N - 1, 64, 100), of_small_orders(curve_of(name)), strict=False):
        points = with_parts(name, {at: part})
        assert launch.first_off(HOST, curve_of(name), "off_subgroup", points) == at
        assert np.flatnonzero(launch.off(HOST, curve_of(name), "off_subgroup", points)).tolist() == [at]


@pytest.mark.sample(3)
@pytest.mark.parametrize("parts", ["one", "opposites", "threes", "all", "all but one", "a hundred"])
def test_parts_of_order_three_are_found_each_time(parts):
    """They vanish in every third combination with random coefficients, and where all of a threesome are summed."""
    name = "bls12_381_g1"
    curve = curve_of(name)
    assert small_primes(curve)[0] == 3
    part, other = (0, 2), negate(curve, (0, 2))
    assert multiply(curve, 3, part) is None
    chosen = {
        "one": {7: part},
        "opposites": {7: part, N - 5: other},
        "threes": {7: part, 8: part, 9: part},
        "all": dict.fromkeys(range(N), part),
        "all but one": dict.fromkeys(range(1, N), part),
        "a hundred": {i: (part, other)[i % 2] for i in range(7, 107)},
    }[parts]
    points = with_parts(name, chosen)
    for _ in range(5):
        assert launch.first_off(HOST, curve, "off_subgroup", points) == min(chosen)


@pytest.mark.slow
def test_each_combination_halves_the_error(monkeypatch):
    """With three of them an eighth of the draws miss a point."""
    monkeypatch.setattr(launch, "_COMBINATIONS", 3)
    curve, n, trials = curve_of("bls12_381_g1"), 16, 400
    for parts in ({3: (0, 2)}, {3: (0, 2), 4: negate(curve, (0, 2))}):
        points = with_parts("bls12_381_g1", parts, n)
        missed = sum(launch._all_in_subgroup(curve, points) for _ in range(trials))
        assert abs(missed - trials / 8) < 6 * (trials * 7 / 64) ** 0.5  # a chance of 10^-8


def test_the_subsets_are_drawn_anew_from_the_system(monkeypatch):
    drawn, real = [], launch.os.urandom

    def seen(size):
        drawn.append(real(size))
        return drawn[-1]

    monkeypatch.setattr(launch.os, "urandom", seen)
    for _ in range(2):
        launch.first_off(HOST, curve_of("bls12_381_g1"), "off_subgroup", in_the_subgroup("bls12_381_g1"))
    assert len(set(drawn)) == 2
    assert all(len(draw) >= 2 * N * 64 / 16 for draw in drawn)


@pytest.mark.parametrize("name", ["bls12_381_g1", pytest.param("bn254_g2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("n", "bits"), [(1, 1), (2, 2), (40, 1), (40, 3), (40, 7)])
def test_sums_of_subsets(name, n, bits):
    """Equal, opposite and infinite points, in and out of the subgroup; digits that none or most points have."""
    curve, rng = curve_of(name), random.Random(n + bits)
    base = [None, curve.generator, negate(curve, curve.generator), point_out_of_subgroup(curve)]
    base += of_small_orders(curve)[:2]
    points = [rng.choice(base) for _ in range(n)]
    digits = np.array([[rng.randrange(1 << bits) for _ in range(n)], [(1 << bits) - 1] * n, [0] * n], np.uint16)
    found = launch._subset_sums(curve, words_of(curve, points), digits, bits)
    wanted = []
    for bit in reversed(range(bits)):
        for row in digits.tolist():
            chosen = (point for point, digit in zip(points, row, strict=True) if digit >> bit & 1)
            wanted.append(functools.reduce(functools.partial(add, curve), chosen, None))
    assert decode_points(curve, launch.from_montgomery(HOST, curve, found)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_COFACTOR)
def test_points_beyond_the_first_batch_are_named(name, monkeypatch):
    monkeypatch.setattr(launch, "_MOST", N)
    curve = curve_of(name)
    part = of_small_order(curve, small_primes(curve)[0])
    for n, at in ((2 * N, N), (2 * N + 1, 2 * N), (4 * N, 3 * N - 1)):
        points = with_parts(name, {at: part}, n)
        assert launch.first_off(HOST, curve, "off_subgroup", points) == at
        assert launch.first_off(HOST, curve, "off_subgroup", in_the_subgroup(name, n)) is None


def test_splitmix64():
    # The first outputs of the generator seeded with 0 (Steele, Lea and Flood 2014; Vigna's splitmix64.c).
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_inputs_are_canonical():
    for name in ("bn254_fr", "bls12_381_fr", "goldilocks"):
        field = FIELDS[name]
        values = field_elements(field, 1000, 0x3000000000000000)
        assert len(values) == 1000
        assert all(0 <= value < field.modulus for value in values)
        assert max(values).bit_length() == field.bits


@pytest.mark.parametrize(("name", "k"), MSM_ANSWERS, ids=lambda value: str(value))
def test_known_answers_by_one_multiplication(name, k):
    curve, n = curve_of(name), 1 << k
    multiple = sum(s * m for s, m in zip(msm_scalars(curve, n), msm_multipliers(n), strict=True))
    assert multiply(curve, multiple % curve.order, curve.generator) == MSM_ANSWERS[name, k]
