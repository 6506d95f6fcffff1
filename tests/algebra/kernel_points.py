"""Points and scalars in the form that the curve kernels read and write."""

import numpy as np

from accelerant.algebra.curve.weierstrass import decode_points, encode_points

RADIX = {4: 2**256, 6: 2**384}
"""Limbs of a coordinate's field -> R of the Montgomery form x R mod q."""


def scaled(curve, points, factor):
    k = curve.coordinates
    return [None if point is None else (k.times(point[0], factor), k.times(point[1], factor)) for point in points]


def packed(curve, points):
    """Words of points in Montgomery form."""
    return encode_points(curve, scaled(curve, points, RADIX[curve.coordinates.base.limbs]))


def unpacked(curve, words):
    """Points from words in Montgomery form."""
    back = pow(RADIX[curve.coordinates.base.limbs], -1, curve.coordinates.base.modulus)
    return scaled(curve, decode_points(curve, words), back)


def words_of(scalars):
    """(n, 4) words of numbers below 2^256."""
    return np.array([[s >> 64 * i & 2**64 - 1 for i in range(4)] for s in scalars], np.uint64).reshape(-1, 4)
