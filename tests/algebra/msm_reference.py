"""Sums of multiples on Python integers: the oracle of the kernels."""

from accelerant.algebra.curve.weierstrass import add, multiply


def msm_sum(curve, scalars, points):
    """Return the sum of scalars[i] points[i], product by product, with affine additions."""
    total = None
    for scalar, point in zip(scalars, points, strict=True):
        total = add(curve, total, multiply(curve, scalar, point))
    return total
