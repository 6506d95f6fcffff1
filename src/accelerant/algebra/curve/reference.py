"""The group law and sums of multiples on Python integers: the oracle of the kernels.

Points are affine (x, y), None for infinity; Jacobian (X, Y, Z) with x = X/Z^2, y = Y/Z^3; or XYZZ (X, Y, ZZ, ZZZ) with
x = X/ZZ, y = Y/ZZZ, ZZ^3 = ZZZ^2. Infinity has Z = 0 or ZZ = 0. Every function takes any two points of
the curve, equal, opposite or infinite; callers check that they lie on it. Costs: M multiplications,
S squarings, I inversions.

Source: Bernstein and Lange, Explicit-Formulas Database, hyperelliptic.org/EFD, short Weierstrass curves: "jacobian-0"
and "xyzz", by the names in each function.

Not constant-time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from accelerant.algebra.curve.weierstrass import Affine, Curve

__all__ = [
    "XYZZ",
    "Jacobian",
    "add",
    "double",
    "in_subgroup",
    "jacobian_add",
    "jacobian_add_mixed",
    "jacobian_double",
    "jacobian_from_affine",
    "jacobian_negate",
    "jacobian_to_affine",
    "msm_buckets",
    "msm_sum",
    "multiply",
    "negate",
    "signed_digits",
    "xyzz_add",
    "xyzz_add_mixed",
    "xyzz_batch_to_affine",
    "xyzz_double",
    "xyzz_from_affine",
    "xyzz_negate",
    "xyzz_to_affine",
]

E = TypeVar("E")
Jacobian = tuple[E, E, E]
XYZZ = tuple[E, E, E, E]


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


def jacobian_negate(curve: Curve[E], p: Jacobian[E]) -> Jacobian[E]:
    """Return (X, -Y, Z)."""
    return p[0], curve.coordinates.neg(p[1]), p[2]


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


def xyzz_from_affine(curve: Curve[E], point: Affine[E]) -> XYZZ[E]:
    """Return (x, y, 1, 1), or (1, 1, 0, 0) for infinity."""
    k = curve.coordinates
    return (k.one, k.one, k.zero, k.zero) if point is None else (*point, k.one, k.one)


def xyzz_to_affine(curve: Curve[E], p: XYZZ[E]) -> Affine[E]:
    """Return (X/ZZ, Y/ZZZ) with one inversion, by 1/ZZ = (ZZ/ZZZ)^2; I + 3M + S."""
    k = curve.coordinates
    if p[2] == k.zero:
        return None
    inverse = k.inv(p[3])
    return k.mul(p[0], k.square(k.mul(p[2], inverse))), k.mul(p[1], inverse)


def xyzz_batch_to_affine(curve: Curve[E], points: Sequence[XYZZ[E]]) -> list[Affine[E]]:
    """Return xyzz_to_affine of each, with one inversion: I + n (6M + S). Source: Montgomery 1987, section 10.3.1."""
    k = curve.coordinates
    products, product = [], k.one
    for point in points:
        products.append(product)
        if point[2] != k.zero:
            product = k.mul(product, point[3])
    rest = k.inv(product)
    result: list[Affine[E]] = [None] * len(points)
    for i in reversed(range(len(points))):
        x, y, zz, zzz = points[i]
        if zz != k.zero:
            inverse = k.mul(rest, products[i])
            rest = k.mul(rest, zzz)
            result[i] = k.mul(x, k.square(k.mul(zz, inverse))), k.mul(y, inverse)
    return result


def xyzz_negate(curve: Curve[E], p: XYZZ[E]) -> XYZZ[E]:
    """Return (X, -Y, ZZ, ZZZ)."""
    return p[0], curve.coordinates.neg(p[1]), p[2], p[3]


def xyzz_double(curve: Curve[E], p: XYZZ[E]) -> XYZZ[E]:
    """Return 2 P by dbl-2008-s-1 with a = 0; 6M + 3S. Infinity needs no special case."""
    k = curve.coordinates
    x, y, zz, zzz = p
    u = k.times(y, 2)
    v = k.square(u)
    w, s = k.mul(u, v), k.mul(x, v)
    m = k.times(k.square(x), 3)
    x3 = k.sub(k.square(m), k.times(s, 2))
    return x3, k.sub(k.mul(m, k.sub(s, x3)), k.mul(w, y)), k.mul(v, zz), k.mul(w, zzz)


def xyzz_add(curve: Curve[E], p: XYZZ[E], q: XYZZ[E]) -> XYZZ[E]:
    """Return P + Q by add-2008-s; 12M + 2S."""
    k = curve.coordinates
    if p[2] == k.zero:
        return q
    if q[2] == k.zero:
        return p
    u1, u2 = k.mul(p[0], q[2]), k.mul(q[0], p[2])
    s1, s2 = k.mul(p[1], q[3]), k.mul(q[1], p[3])
    if u1 == u2:
        return xyzz_double(curve, p) if s1 == s2 else xyzz_from_affine(curve, None)
    h, r = k.sub(u2, u1), k.sub(s2, s1)
    hh = k.square(h)
    hhh, v = k.mul(h, hh), k.mul(u1, hh)
    x3 = k.sub(k.sub(k.square(r), hhh), k.times(v, 2))
    y3 = k.sub(k.mul(r, k.sub(v, x3)), k.mul(s1, hhh))
    return x3, y3, k.mul(k.mul(p[2], q[2]), hh), k.mul(k.mul(p[3], q[3]), hhh)


def xyzz_add_mixed(curve: Curve[E], p: XYZZ[E], q: Affine[E]) -> XYZZ[E]:
    """Return P + Q, Q affine, by madd-2008-s; 8M + 2S."""
    k = curve.coordinates
    if q is None:
        return p
    if p[2] == k.zero:
        return xyzz_from_affine(curve, q)
    u2, s2 = k.mul(q[0], p[2]), k.mul(q[1], p[3])
    if u2 == p[0]:
        return xyzz_double(curve, p) if s2 == p[1] else xyzz_from_affine(curve, None)
    h, r = k.sub(u2, p[0]), k.sub(s2, p[1])
    hh = k.square(h)
    hhh, v = k.mul(h, hh), k.mul(p[0], hh)
    x3 = k.sub(k.sub(k.square(r), hhh), k.times(v, 2))
    y3 = k.sub(k.mul(r, k.sub(v, x3)), k.mul(p[1], hhh))
    return x3, y3, k.mul(p[2], hh), k.mul(p[3], hhh)


def msm_sum(curve: Curve[E], scalars: Sequence[int], points: Sequence[Affine[E]]) -> Affine[E]:
    """Return the sum of scalars[i] points[i], product by product, with affine additions.

    Raises:
        ValueError: the lengths differ.
    """
    total: Affine[E] = None
    for scalar, point in zip(scalars, points, strict=True):
        total = add(curve, total, multiply(curve, scalar, point))
    return total


def signed_digits(scalar: int, window: int, count: int) -> list[int]:
    """Return the digits d_j of scalar = sum d_j 2^(window j), -2^(window - 1) < d_j <= 2^(window - 1), lowest first.

    Args:
        scalar: not negative.
        window: bits of a digit, at least 2.
        count: number of digits; (bits + 1) / window, rounded up, suffice.

    Raises:
        ValueError: the scalar does not fit.
    """
    base, half = 1 << window, 1 << window - 1
    digits, rest = [], scalar
    for _ in range(count):
        digit = rest % base
        if digit > half:
            digit -= base
        digits.append(digit)
        rest = (rest - digit) >> window
    if rest:
        raise ValueError(f"{scalar} does not fit in {count} signed digits of {window} bits")
    return digits


def msm_buckets(
    curve: Curve[E], scalars: Sequence[int], points: Sequence[Affine[E]], *, window: int | None = None
) -> Affine[E]:
    """Return msm_sum by buckets of signed digits. Source: Bernstein et al., eprint 2012/549, after Pippenger.

    For each digit j, from the highest: bucket b sums the points with digit b, minus those with digit -b; the sum of b
    times bucket b is the sum of the buckets' running sums; the total is 2^window times the previous total, plus that.

    Args:
        curve, scalars, points: as for msm_sum.
        window: bits of a digit, at least 2; by default the one with the fewest additions.
    """
    bits = max((abs(scalar).bit_length() for scalar in scalars), default=0)
    if window is None:
        window = min(range(2, 21), key=lambda w: -(-(bits + 1) // w) * (len(points) + (1 << w)))
    count = -(-(bits + 1) // window)
    digits = []
    for scalar in scalars:
        sign = -1 if scalar < 0 else 1
        digits.append([sign * digit for digit in signed_digits(abs(scalar), window, count)])
    infinity = xyzz_from_affine(curve, None)
    total = infinity
    for j in reversed(range(count)):
        buckets = [infinity] * (1 << window - 1)
        for row, point in zip(digits, points, strict=True):
            digit = row[j]
            if digit > 0:
                buckets[digit - 1] = xyzz_add_mixed(curve, buckets[digit - 1], point)
            elif digit < 0:
                buckets[-digit - 1] = xyzz_add_mixed(curve, buckets[-digit - 1], negate(curve, point))
        running = window_sum = infinity
        for bucket in reversed(buckets):
            running = xyzz_add(curve, running, bucket)
            window_sum = xyzz_add(curve, window_sum, running)
        for _ in range(window):
            total = xyzz_double(curve, total)
        total = xyzz_add(curve, total, window_sum)
    return xyzz_to_affine(curve, total)
