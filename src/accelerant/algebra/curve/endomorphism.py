"""Which points of a curve are in the subgroup of order r, by an endomorphism that is cheap to apply.

There it multiplies by a constant k: one multiplication by k, of 64 to 128 bits, in place of one by r of 254 or 255.

    G1   phi(x, y) = (beta x, y) with beta^3 = 1. For r = x^4 - x^2 + 1 (BLS12) phi = x^2 - 1 in the subgroup; and a
         point for which that holds has r P = 0, since phi^2 + phi + 1 = 0 and k^2 + k + 1 = r. BN: it is
         the whole curve.
    G2   psi(x, y) = (c x^q, d y^q): Frobenius, moved to the twist. psi^2 - t psi + q = 0, so that where psi = t - 1 the
         point is killed by q + 1 - t, the order of G1's curve. That is r times G1's cofactor, which is prime to G2's
         cofactor, so that the point is killed by r.

Source: Scott, eprint 2021/1130, sections 3 to 5; Bowe, eprint 2019/814; Galbraith and Scott, Pairing 2008, for psi.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from accelerant.algebra.curve.parameters import FAMILIES, Family
from accelerant.algebra.curve.reference import multiply
from accelerant.algebra.curve.weierstrass import Affine, Curve

__all__ = ["Endomorphism", "endomorphism"]


@dataclass(frozen=True, slots=True)
class Endomorphism:
    """A point P of the curve is in the subgroup if and only if (x_factor x', y_factor y') = eigenvalue P.

    Over Fq2 x' and y' are the conjugates x^q and y^q, else x and y themselves.

    Attributes:
        x_factor: a coordinate.
        y_factor: a coordinate.
        eigenvalue: above 0.
    """

    x_factor: Any
    y_factor: Any
    eigenvalue: int

    def apply(self, curve: Curve[Any], point: Affine[Any]) -> Affine[Any]:
        """(x_factor x', y_factor y') on Python integers."""
        if point is None:
            return None
        k = curve.coordinates
        x, y = (k.join((v[0], -v[1] % k.base.modulus)) if k.degree == 2 else v for v in point)
        return k.mul(self.x_factor, x), k.mul(self.y_factor, y)


@functools.cache
def endomorphism(curve: Curve[Any]) -> Endomorphism | None:
    """The curve's; None where every point of the curve is in the subgroup.

    Raises:
        ValueError: the curve is none of the table's, or the argument above does not hold for it.
    """
    if curve.cofactor == 1:
        return None
    family = FAMILIES.get(curve.name.removesuffix("_g1").removesuffix("_g2"))
    if family is None or curve not in (family.g1, family.g2):
        raise ValueError(f"{curve.name}: wanted a curve of the table, got one that is not")
    found = _of_g1(curve, family) if curve.coordinates.degree == 1 else _of_g2(curve, family)
    if found.apply(curve, curve.generator) != multiply(curve, found.eigenvalue, curve.generator):
        raise ValueError(f"{curve.name}: the endomorphism does not multiply the generator by {found.eigenvalue}")
    return found


def _of_g1(curve: Curve[Any], family: Family) -> Endomorphism:
    """Of the two cube roots of 1 the one for which the subgroup's eigenvalue is x^2 - 1."""
    k, eigenvalue = curve.coordinates, family.parameter**2 - 1
    if eigenvalue**2 + eigenvalue + 1 != family.r:
        raise ValueError(f"{curve.name}: k^2 + k + 1 is not r for k = {eigenvalue}")
    root = pow(k.base.generator, (k.base.modulus - 1) // 3, k.base.modulus)
    x = multiply(curve, eigenvalue, curve.generator)
    if x is None:
        raise ValueError(f"{curve.name}: the generator's order divides {eigenvalue}")
    beta = root if k.mul(root, curve.generator[0]) == x[0] else k.square(root)
    return Endomorphism(beta, k.one, eigenvalue)


def _of_g2(curve: Curve[Any], family: Family) -> Endomorphism:
    """(x w^(2 (q - 1)), y w^(3 (q - 1))) of conjugates, w^6 = xi of a D-twist and 1 / xi of an M-twist."""
    k, q, trace = curve.coordinates, family.q, family.trace
    if math.gcd(family.g1_cofactor, curve.cofactor) != 1 or (q - 1) % 6:
        raise ValueError(f"{curve.name}: the cofactors have a factor in common, or q is not 1 mod 6")
    sixth = family.nonresidue if family.twist == "divide" else k.inv(family.nonresidue)
    x_factor, y_factor = k.power(sixth, (q - 1) // 3), k.power(sixth, (q - 1) // 2)
    if trace < 1:
        y_factor = k.neg(y_factor)
    return Endomorphism(x_factor, y_factor, abs(trace - 1))
