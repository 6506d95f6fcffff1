"""Products of pairings, as verifiers ask for them."""

from __future__ import annotations

from typing import Any

from accelerant.algebra.curve.pairing import product_is_one
from accelerant.algebra.curve.parameters import family_of
from accelerant.zk.elliptic_curve import curve as curve_of
from accelerant.zk.elliptic_curve import host_points

__all__ = ["pairing_product_is_one"]


def pairing_product_is_one(g1_points: Any, g2_points: Any, curve: str = "bn254", *, check: bool = True) -> bool:
    """Whether e(P_1, Q_1) e(P_2, Q_2) ... e(P_n, Q_n) = 1: the question that EIP-197 and EIP-2537 answer.

    e is the optimal ate pairing. A pair with infinity contributes 1, and of no pairs the product is 1. It runs on the
    CPU wherever the points are; four pairs take one to two milliseconds of a core. Time depends on the points' number,
    and on which are infinity.

    Args:
        g1_points: the P_i, (n, 2, limbs) canonical words of NumPy or torch, or points of Python.
        g2_points: the Q_i, (n, 2, 2, limbs), as many.
        curve: "bn254" or "bls12_381".
        check: refuse points off their curve or out of the subgroup of order r; nearly free. Leave it out for points
            that were checked before: the answer for other ones means nothing.

    Raises:
        ConfigError: no such curve; lists those there are.
        UnsupportedDtype: neither uint64 nor Python's integers.
        ShapeError: other shapes, or not as many points of one group as of the other.
        FormatError: a coordinate is not below the modulus, or what check refuses; names the first such point.
    """
    family = family_of(curve if isinstance(curve, str) else repr(curve))
    words = [
        host_points(curve_of(f"{family.name}_{group}"), points, f"{group}_points")
        for group, points in (("g1", g1_points), ("g2", g2_points))
    ]
    return product_is_one(family, words[0], words[1], check=check)
