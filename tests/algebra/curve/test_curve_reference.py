import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerant.algebra.curve import CURVES, curve_of, weierstrass
from accelerant.algebra.curve.weierstrass import add, double, in_subgroup, jacobian_to_affine, multiply, negate

NAMES = list(CURVES)
each_curve = pytest.mark.parametrize("name", NAMES)


def sample(curve):
    """Infinity, G, -G, 2G, -2G, (r - 1) G = -G by another way, and two more."""
    g = curve.generator
    return [
        None, g, negate(curve, g), add(curve, g, g), multiply(curve, -2, g), multiply(curve, 5, g),
        multiply(curve, 77, g),
    ]  # fmt: skip


def scaled_jacobian(curve, point, factor):
    """The same point with Z = factor; infinity with coordinates that are not (1, 1, 0)."""
    k = curve.coordinates
    z = k.times(k.one, factor)
    x, y = (k.one, k.one) if point is None else point
    zz = k.square(z)
    return k.mul(x, zz), k.mul(y, k.mul(zz, z)), k.zero if point is None else z


@each_curve
def test_affine_group_law(name):
    curve = curve_of(name)
    points = sample(curve)
    for p in points:
        assert curve.is_on_curve(p)
        assert add(curve, p, None) == add(curve, None, p) == p
        assert add(curve, p, negate(curve, p)) is None
        assert double(curve, p) == add(curve, p, p)
        for q in points:
            s = add(curve, p, q)
            assert curve.is_on_curve(s)
            assert s == add(curve, q, p)
            for r in points[-2:]:
                assert add(curve, s, r) == add(curve, p, add(curve, q, r))


@each_curve
@pytest.mark.parametrize("scale", [1, 3])
def test_jacobian_is_affine(name, scale):
    curve = curve_of(name)
    points = sample(curve)
    for p in points:
        jp = scaled_jacobian(curve, p, scale)
        assert jacobian_to_affine(curve, jp) == p
        assert jacobian_to_affine(curve, weierstrass.jacobian_from_affine(curve, p)) == p
        assert jacobian_to_affine(curve, weierstrass.jacobian_double(curve, jp)) == double(curve, p)
        for q in points:
            s = add(curve, p, q)
            assert jacobian_to_affine(curve, weierstrass.jacobian_add(curve, jp, scaled_jacobian(curve, q, 7))) == s
            assert jacobian_to_affine(curve, weierstrass.jacobian_add_mixed(curve, jp, q)) == s


@each_curve
def test_multiples(name):
    curve = curve_of(name)
    g, r = curve.generator, curve.order
    total = None
    for scalar in range(20):
        assert multiply(curve, scalar, g) == total
        assert multiply(curve, -scalar, g) == negate(curve, total)
        total = add(curve, total, g)
    assert multiply(curve, r, g) is None
    assert multiply(curve, r - 1, g) == negate(curve, g)
    assert multiply(curve, r + 1, g) == g
    assert multiply(curve, 1 << 64, g) == multiply(curve, 1 << 32, multiply(curve, 1 << 32, g))
    assert multiply(curve, 12345, None) is None


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(NAMES), st.integers(-(1 << 300), 1 << 300), st.integers(0, 1 << 256))
def test_multiples_are_linear(name, a, b):
    curve = curve_of(name)
    g = curve.generator
    assert add(curve, multiply(curve, a, g), multiply(curve, b, g)) == multiply(curve, (a + b) % curve.order, g)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bn254_g1"])
def test_points_out_of_the_subgroup(name):
    curve = curve_of(name)
    k = curve.coordinates
    x = k.one
    while (y := k.sqrt(curve.right_side(x))) is None:
        x = k.add(x, k.one)
    point = (x, y)
    assert curve.is_on_curve(point)
    assert not in_subgroup(curve, point)
    assert in_subgroup(curve, multiply(curve, curve.cofactor, point))
    # The scalar is not reduced mod r on the way.
    assert multiply(curve, curve.order + 2, point) == add(
        curve, multiply(curve, curve.order, point), double(curve, point)
    )
    assert not curve.is_on_curve((x, k.add(y, k.one)))
