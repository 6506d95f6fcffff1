import random

import pytest
from msm_reference import msm_buckets, msm_sum, signed_digits

from accelerant.algebra.curve import CURVES, curve_of
from accelerant.algebra.curve.weierstrass import multiply, negate
from accelerant.algebra.field.parameters import FIELDS
from vectors import MSM_ANSWERS, field_elements, msm_multipliers, msm_points, msm_scalars, splitmix64

NAMES = list(CURVES)


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


@pytest.mark.soak
@pytest.mark.parametrize("name", ["bn254_g1", "bls12_381_g1"])
def test_known_answers_by_buckets(name):
    """The reference itself, which test_msm.py's sums of the same points do not need."""
    curve, n = curve_of(name), 1 << 14
    assert msm_buckets(curve, msm_scalars(curve, n), msm_points(curve, n)) == MSM_ANSWERS[name, 14]


def test_points_are_the_multiples_they_claim():
    curve = curve_of("bls12_381_g1")
    assert msm_points(curve, 5) == [multiply(curve, m, curve.generator) for m in msm_multipliers(5)]


@pytest.mark.parametrize("name", NAMES)
def test_buckets_against_plain_sum(name):
    curve, n = curve_of(name), 16
    scalars = msm_scalars(curve, n)
    points = [multiply(curve, m, curve.generator) for m in msm_multipliers(n)]
    scalars[3], scalars[4], scalars[5], scalars[6] = 0, 1, curve.order - 1, -7
    points[7] = points[8] = None
    points[9], points[10] = points[11], negate(curve, points[12])
    scalars[10] = scalars[12]
    wanted = msm_sum(curve, scalars, points)
    for window in (None, 2, 5):
        assert msm_buckets(curve, scalars, points, window=window) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_special_sums(name):
    curve = curve_of(name)
    g, r = curve.generator, curve.order
    h = negate(curve, g)
    for scalars, points, wanted in (
        ([], [], None),
        ([0], [g], None),
        ([1], [g], g),
        ([r - 1], [g], h),
        ([r], [g], None),
        ([5], [None], None),
        ([0, 0, 0], [g, h, None], None),
        ([9, 9], [g, h], None),
        ([1] * 16, [g] * 16, multiply(curve, 16, g)),
        ([r - 1] * 16, [g] * 16, multiply(curve, -16, g)),
        ([1 << 64, 1 << 128], [g, h], multiply(curve, (1 << 64) - (1 << 128), g)),
    ):
        assert msm_sum(curve, scalars, points) == wanted
        assert msm_buckets(curve, scalars, points) == wanted


@pytest.mark.parametrize("window", [2, 3, 8, 16])
def test_signed_digits(window):
    rng, half = random.Random(3), 1 << window - 1
    edges = [
        0,
        1,
        half - 1,
        half,
        half + 1,
        2 * half - 1,
        2 * half,
        (1 << 255) - 1,
        1 << 254,
        FIELDS["bn254_fr"].modulus - 1,
    ]
    for scalar in [*edges, *(rng.getrandbits(255) for _ in range(50))]:
        digits = signed_digits(scalar, window, -(-256 // window))
        assert sum(digit << window * j for j, digit in enumerate(digits)) == scalar
        assert all(-half < digit <= half for digit in digits)


def test_rejections():
    curve = curve_of("bn254_g1")
    with pytest.raises(ValueError, match="does not fit in 2 signed digits of 4 bits"):
        signed_digits(255, 4, 2)
    for msm in (msm_sum, msm_buckets):
        with pytest.raises(ValueError, match="zip"):
            msm(curve, [1, 2], [curve.generator])
        with pytest.raises(ValueError, match="zip"):
            msm(curve, [1], [curve.generator] * 2)
