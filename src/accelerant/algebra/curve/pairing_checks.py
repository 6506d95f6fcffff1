"""What a tape of Miller's loop finds out about its points: on their curves, and in their subgroups of order r.

What the loop leaves in T says whether Q is in the subgroup:

    bn254       T = (6x+2)Q + psi(Q) - psi^2(Q) must be -psi^3(Q)        Dai, Lin, Zhao and Zhou, eprint 2022/348, for
                the criterion; the vector (6x+2, 1, -1, 1) is of Vercauteren, eprint 2008/096
    bls12_381   T = |x|Q must be -psi(Q), x being negative               Bowe, eprint 2019/814; Scott, eprint 2021/1130

with psi Frobenius as the twist sees it, which satisfies psi^2 - t psi + q = 0. The points of the twist for which this
holds are killed by an element of Z[psi], and so by its norm; that is r times a number prime to the twist's cofactor
(the tests compute it), so they are the subgroup. An addition of T and a point equal or opposite to it gives Z = 0, and
Z stays 0 from then on; no point of order r gets there, and Z = 0 is refused. A point of G1 on bls12_381 is in the
subgroup where x^2 P = -phi(P), phi(x, y) = (beta x, y): the norm of x^2 + phi is r itself. On bn254 every point is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from accelerant.algebra.curve.endomorphism import endomorphism
from accelerant.algebra.curve.parameters import Family
from accelerant.algebra.curve.tape import Program, Recorder, Segment
from accelerant.algebra.curve.tower import RecordedTower, pairs, recorded
from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.program import montgomery_radix

__all__ = ["VERDICT_SIZE", "add_checks", "begin_segment"]

VERDICT_SIZE = 11
"""Registers of what is found of a pair: y^2 - x^3 - b of P (1) and of Q (2), what is zero for Q in its subgroup (4), Z
(2, not zero), and what is zero for P in its subgroup (2)."""


def add_checks(program: Program, family: Family, each: Sequence[tuple[int, int, int, int]]) -> None:
    """Add what judges the subgroups to the end of a loop.

    Args:
        program: of the loop.
        family: of the pairing.
        each: for each pair the windows p, q, t and that of its verdict.
    """
    verdict_segment = _verdict_segment(family)
    for _, q, t, verdict in each:
        program.call(verdict_segment, q=q, t=t, subgroup=verdict + 3)
    if family.g1.cofactor == 1:
        for _, _, _, verdict in each:
            program.call(_g1_segment(family, "all"), subgroup=verdict + 9)
        return
    base, total = program.window(3), program.window(3)
    start, keep, double, add, end = (_g1_segment(family, kind) for kind in ("start", "keep", "double", "add", "end"))
    for p, _, _, verdict in each:
        program.call(start, p=p, total=total)
        for _ in range(2):
            program.call(keep, base=base, total=total)
            for bit in bin(abs(family.parameter))[3:]:
                program.call(double, total=total)
                if bit == "1":
                    program.call(add, total=total, base=base)
        program.call(end, p=p, total=total, subgroup=verdict + 9)


def begin_segment(family: Family) -> Segment:
    """Points in Montgomery form, T = Q, and how far P and Q are off their curves."""
    tower = recorded(family)
    k = tower.base
    x_p, y_p = _entered(tower, k.inputs("p", 2))
    q = _entered(tower, k.inputs("q", 4))
    x, y = pairs(q)
    off1 = k.sub(k.mul(y_p, y_p), k.add(k.mul(k.mul(x_p, x_p), x_p), k.constant(family.b)))
    off2 = tower.sub(tower.square(y), tower.add(tower.mul(tower.square(x), x), tower.pair(family.g2.b)))
    outputs = {"p": (x_p, y_p), "q": q, "t": (*q, k.constant(1), k.constant(0)), "verdict": (off1, *off2)}
    return k.segment(outputs)


def _entered(tower: RecordedTower, values: tuple[int, ...]) -> tuple[int, ...]:
    """Canonical values in Montgomery form: a product with R, which divides by R."""
    radix = tower.base.constant(montgomery_radix(tower.base.field))
    return tuple(tower.base.mul(value, radix) for value in values)


def _verdict_segment(family: Family) -> Segment:
    """Whether T is -psi^3(Q) (BN) or psi(Q) with the sign of x (BLS12), by X - x Z, Y - y Z and Z."""
    tower = recorded(family)
    x, y = pairs(tower.base.inputs("q", 4))
    t = tower.projective(tower.base.inputs("t", 6))
    u, v = tower.frobenius_twist(x, y, 3 if family.kind == "bn" else 1)
    first = tower.sub(t[0], tower.mul(u, t[2]))
    same = family.kind == "bls12" and family.parameter > 0
    second = (tower.sub if same else tower.add)(t[1], tower.mul(v, t[2]))
    return tower.base.segment({"subgroup": (*first, *second, *t[2])})


@functools.cache
def _g1_segment(family: Family, kind: str) -> Segment:
    """A step of the multiplication by x^2: total is the sum so far, base what is added to it."""
    k = Recorder(FIELDS[f"{family.name}_fq"])
    if kind == "all":
        return k.segment({"subgroup": [k.constant(0)] * 2})
    if kind == "start":
        return k.segment({"total": (*k.inputs("p", 2), k.constant(1))})
    total = k.inputs("total", 3)
    if kind == "keep":
        return k.segment({"base": total})
    if kind == "double":
        return k.segment({"total": _g1_double(k, total, family.b)})
    if kind == "add":
        return k.segment({"total": _g1_add(k, total, k.inputs("base", 3), family.b)})
    x, y = k.inputs("p", 2)
    moved = k.mul(x, k.constant(_beta(family)))
    return k.segment({"subgroup": (k.sub(total[0], k.mul(moved, total[2])), k.add(total[1], k.mul(y, total[2])))})


def _beta(family: Family) -> int:
    """The cube root of 1 in Fq with (beta x, y) = -x^2 P: the square of the one that gives x^2 - 1."""
    found = endomorphism(family.g1)
    if found is None or found.eigenvalue != family.parameter**2 - 1:
        raise ValueError(f"{family.name}: wanted an endomorphism that multiplies by x^2 - 1")
    return family.g1.coordinates.square(found.x_factor)


def _times(k: Recorder, a: int, factor: int) -> int:
    result = a
    for bit in bin(factor)[3:]:
        result = k.add(result, result)
        if bit == "1":
            result = k.add(result, a)
    return result


def _g1_add(k: Recorder, p: tuple[int, ...], q: tuple[int, ...], b: int) -> tuple[int, int, int]:
    """The sum of any two points, homogeneous; 12M. Source: Renes, Costello and Batina, eprint 2015/1060, section 3.

    For a = 0, complete on curves without points of order 2: with X = X1X2, Y = Y1Y2, Z = Z1Z2 and the mixed sums
    XY = X1Y2 + X2Y1, YZ, XZ, the sum is
    (XY (Y - 3bZ) - 3b YZ XZ : (Y + 3bZ)(Y - 3bZ) + 9b X XZ : YZ (Y + 3bZ) + 3X XY).
    """
    x, y, z = (k.mul(first, second) for first, second in zip(p, q, strict=True))
    xy, yz, xz = (
        k.sub(k.mul(k.add(p[i], p[j]), k.add(q[i], q[j])), k.add(first, second))
        for i, j, first, second in ((0, 1, x, y), (1, 2, y, z), (0, 2, x, z))
    )
    bz, x_three = _times(k, z, 3 * b), _times(k, x, 3)
    bxz = _times(k, xz, 3 * b)
    less, more = k.sub(y, bz), k.add(y, bz)
    return (
        k.sub(k.mul(xy, less), k.mul(yz, bxz)),
        k.add(k.mul(more, less), k.mul(x_three, bxz)),
        k.add(k.mul(yz, more), k.mul(x_three, xy)),
    )


def _g1_double(k: Recorder, p: tuple[int, ...], b: int) -> tuple[int, int, int]:
    """Twice any point; 8M. The same source.

    (2XY (Y^2 - 9bZ^2) : (Y^2 - 9bZ^2)(Y^2 + 3bZ^2) + 24b Y^2 Z^2 : 8Y^3 Z).
    """
    x, y, z = p
    yy, bzz = k.mul(y, y), _times(k, k.mul(z, z), 3 * b)
    less = k.sub(yy, _times(k, bzz, 3))
    return (
        _times(k, k.mul(k.mul(x, y), less), 2),
        k.add(k.mul(less, k.add(yy, bzz)), _times(k, k.mul(yy, bzz), 8)),
        _times(k, k.mul(yy, k.mul(y, z)), 8),
    )
