"""The group law on Python integers: the oracle of the kernels.

Points are affine (x, y), None for infinity, or Jacobian (X, Y, Z) with x = X/Z^2, y = Y/Z^3 and Z = 0 for infinity.
Every function takes any two points of the curve, equal, opposite or infinite; callers check that they lie on it.
Costs: M multiplications, S squarings, I inversions. Not constant-time.

Source: Bernstein and Lange, Explicit-Formulas Database, hyperelliptic.org/EFD, short Weierstrass curves, "jacobian-0",
by the names in each function.
"""

from __future__ import annotations

from typing import TypeVar

from accelerant.algebra.curve.weierstrass import Affine, Curve

E = TypeVar("E")
Jacobian = tuple[E, E, E]


def in_subgroup(curve: Curve[E], point: Affine[E]) -> bool:
    """Return whether r times a point of the curve is infinity."""
    return multiply(curve, curve.order, point) is None


def negate(curve: Curve[E], point: Affine[E]) -> Affine[E]:
    """Return -P = (x, -y)."""
    return None if point is None else (point[0], curve.coordinates.neg(point[1]))


def add(curve: Curve[E], p: Affine[E], q: Affine[E]) -> Affine[E]:
    """Return P + Q by the chord; I + 2M + S."""
    k = curve.coordinates
    if p is None:
        return q
    if q is None:
        return p
    if p[0] == q[0]:
        return double(curve, p) if p[1] == q[1] else None
    return _third(curve, p, q[0], k.mul(k.sub(q[1], p[1]), k.inv(k.sub(q[0], p[0]))))


def double(curve: Curve[E], p: Affine[E]) -> Affine[E]:
    """Return 2 P by the tangent; I + 2M + 2S."""
    k = curve.coordinates
    if p is None or p[1] == k.zero:
        return None
    x, y = p
    return _third(curve, p, x, k.mul(k.times(k.square(x), 3), k.inv(k.times(y, 2))))


def _third(curve: Curve[E], p: tuple[E, E], other_x: E, slope: E) -> tuple[E, E]:
    k = curve.coordinates
    x = k.sub(k.sub(k.square(slope), p[0]), other_x)
    return x, k.sub(k.mul(slope, k.sub(p[0], x)), p[1])


def multiply(curve: Curve[E], scalar: int, point: Affine[E]) -> Affine[E]:
    """Return the multiple by any integer, which is not reduced mod r: points outside the subgroup are correct, too.

    Double-and-add from the highest bit, in Jacobian coordinates.
    """
    if point is None or scalar == 0:
        return None
    base = point if scalar > 0 else negate(curve, point)
    total = jacobian_from_affine(curve, None)
    for bit in bin(abs(scalar))[2:]:
        total = jacobian_double(curve, total)
        if bit == "1":
            total = jacobian_add_mixed(curve, total, base)
    return jacobian_to_affine(curve, total)


def jacobian_from_affine(curve: Curve[E], point: Affine[E]) -> Jacobian[E]:
    """Return (x, y, 1), or (1, 1, 0) for infinity."""
    k = curve.coordinates
    return (k.one, k.one, k.zero) if point is None else (*point, k.one)


def jacobian_to_affine(curve: Curve[E], p: Jacobian[E]) -> Affine[E]:
    """Return (X/Z^2, Y/Z^3); I + 3M + S."""
    k = curve.coordinates
    if p[2] == k.zero:
        return None
    inverse = k.inv(p[2])
    square = k.square(inverse)
    return k.mul(p[0], square), k.mul(p[1], k.mul(square, inverse))


def jacobian_double(curve: Curve[E], p: Jacobian[E]) -> Jacobian[E]:
    """Return 2 P by dbl-2009-l; 2M + 5S. Infinity needs no special case: Z3 = 2 Y Z."""
    k = curve.coordinates
    x, y, z = p
    a, b = k.square(x), k.square(y)
    c = k.square(b)
    d = k.times(k.sub(k.sub(k.square(k.add(x, b)), a), c), 2)
    e = k.times(a, 3)
    x3 = k.sub(k.square(e), k.times(d, 2))
    return x3, k.sub(k.mul(e, k.sub(d, x3)), k.times(c, 8)), k.times(k.mul(y, z), 2)


def jacobian_add(curve: Curve[E], p: Jacobian[E], q: Jacobian[E]) -> Jacobian[E]:
    """Return P + Q by add-2007-bl; 11M + 5S."""
    k = curve.coordinates
    if p[2] == k.zero:
        return q
    if q[2] == k.zero:
        return p
    zz1, zz2 = k.square(p[2]), k.square(q[2])
    u1, u2 = k.mul(p[0], zz2), k.mul(q[0], zz1)
    s1, s2 = k.mul(k.mul(p[1], q[2]), zz2), k.mul(k.mul(q[1], p[2]), zz1)
    if u1 == u2:
        return jacobian_double(curve, p) if s1 == s2 else jacobian_from_affine(curve, None)
    h = k.sub(u2, u1)
    i = k.square(k.times(h, 2))
    j, v = k.mul(h, i), k.mul(u1, i)
    r = k.times(k.sub(s2, s1), 2)
    x3 = k.sub(k.sub(k.square(r), j), k.times(v, 2))
    y3 = k.sub(k.mul(r, k.sub(v, x3)), k.times(k.mul(s1, j), 2))
    return x3, y3, k.mul(k.sub(k.sub(k.square(k.add(p[2], q[2])), zz1), zz2), h)


def jacobian_add_mixed(curve: Curve[E], p: Jacobian[E], q: Affine[E]) -> Jacobian[E]:
    """Return P + Q, Q affine, by madd-2007-bl; 7M + 4S."""
    k = curve.coordinates
    if q is None:
        return p
    if p[2] == k.zero:
        return jacobian_from_affine(curve, q)
    zz1 = k.square(p[2])
    u2, s2 = k.mul(q[0], zz1), k.mul(k.mul(q[1], p[2]), zz1)
    if u2 == p[0]:
        return jacobian_double(curve, p) if s2 == p[1] else jacobian_from_affine(curve, None)
    h = k.sub(u2, p[0])
    hh = k.square(h)
    i = k.times(hh, 4)
    j, v = k.mul(h, i), k.mul(p[0], i)
    r = k.times(k.sub(s2, p[1]), 2)
    x3 = k.sub(k.sub(k.square(r), j), k.times(v, 2))
    y3 = k.sub(k.mul(r, k.sub(v, x3)), k.times(k.mul(p[1], j), 2))
    return x3, y3, k.sub(k.sub(k.square(k.add(p[2], h)), zz1), hh)
