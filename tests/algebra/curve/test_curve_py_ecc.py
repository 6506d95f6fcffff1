"""A second opinion: py_ecc (PyPI, MIT), which shares neither formulas nor tower with ours. With version 8.0.0."""

import random
import sys

import pytest
from pairing_reference import pairing, tower_of

from accelerant.algebra.curve import curve_of, family_of
from accelerant.algebra.curve.weierstrass import add, double, multiply, negate, points_to_bytes

_limit = sys.getrecursionlimit()
py_ecc = pytest.importorskip("py_ecc", reason="py_ecc is in the extra dev")
sys.setrecursionlimit(_limit)  # its import raises the limit past what the C stack bears, for every test that follows

NAMES = ["bn254", "bls12_381"]


def module_of(name):
    """py_ecc's affine arithmetic."""
    from py_ecc import bls12_381, bn128

    return {"bn254": bn128, "bls12_381": bls12_381}[name]


def optimised_module_of(name):
    """py_ecc's projective arithmetic: its pairing is quicker."""
    from py_ecc import optimized_bls12_381, optimized_bn128

    return {"bn254": optimized_bn128, "bls12_381": optimized_bls12_381}[name]


def theirs(module, point):
    if point is None:
        return None
    return tuple(module.FQ(e) if isinstance(e, int) else module.FQ2(e) for e in point)


def ours(point):
    """From py_ecc's affine point."""
    if point is None:
        return None
    return tuple(int(e.n) if hasattr(e, "n") else tuple(map(int, e.coeffs)) for e in point)


@pytest.mark.parametrize("group", ["g1", "g2"])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_group_law(name, group):
    curve, module, rng = curve_of(f"{name}_{group}"), module_of(name), random.Random(4)
    generator, b = (module.G1, module.b) if group == "g1" else (module.G2, module.b2)
    assert curve.generator == ours(generator)
    assert curve.order == module.curve_order
    assert ours((b,)) == (curve.b,)
    p, q = (multiply(curve, rng.randrange(curve.order), curve.generator) for _ in range(2))
    for x, y in ((p, q), (p, p), (p, negate(curve, p)), (None, q), (p, None)):
        assert add(curve, x, y) == ours(module.add(theirs(module, x), theirs(module, y)))
    assert double(curve, p) == ours(module.double(theirs(module, p)))
    for scalar in (0, 255, rng.getrandbits(96)):
        assert multiply(curve, scalar, p) == ours(module.multiply(theirs(module, p), scalar))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_pairing(name):
    """py_ecc writes Fq12 as Fq[w], w^6 = xi = a + u: c0 + c1 u is (c0 - a c1) + c1 w^6.

    It takes |x| for BLS12-381's negative x, so there its pairing is the inverse of ours.
    """
    family, module = family_of(name), optimised_module_of(name)
    p, q = multiply(family.g1, 12345, family.g1.generator), multiply(family.g2, 67890, family.g2.generator)
    x, y = theirs(module, q), theirs(module, p)
    value = module.pairing((*x, module.FQ2.one()), (*y, module.FQ.one()))
    mine = pairing(family, p, q)
    if name == "bls12_381":
        mine = tower_of(family).inv(mine)
    low, high = mine
    coefficients = [0] * 12
    for power, (c0, c1) in zip((0, 2, 4, 1, 3, 5), (*low, *high), strict=True):
        coefficients[power] = (c0 - family.nonresidue[0] * c1) % family.q
        coefficients[power + 6] = c1
    assert coefficients == [int(c) for c in value.coeffs]


def test_compressed_points():
    from py_ecc.bls.point_compression import compress_G1, compress_G2

    module = optimised_module_of("bls12_381")
    for scalar in (1, 2, 3, 1 << 70):
        for group, compress, one in (("g1", compress_G1, module.FQ.one()), ("g2", compress_G2, module.FQ2.one())):
            curve = curve_of(f"bls12_381_{group}")
            point = multiply(curve, scalar, curve.generator)
            wanted = compress((*theirs(module, point), one))
            data = (
                wanted.to_bytes(48, "big") if group == "g1" else b"".join(part.to_bytes(48, "big") for part in wanted)
            )
            assert points_to_bytes(curve, [point], "compressed") == data
