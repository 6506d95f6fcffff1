"""Sums of multiples on Python integers, and the XYZZ coordinates of their buckets: oracles of the kernels.

XYZZ points (X, Y, ZZ, ZZZ) have x = X/ZZ, y = Y/ZZZ and ZZ^3 = ZZZ^2; infinity has ZZ = 0. Costs: M multiplications, S
squarings, I inversions.

Source: Bernstein and Lange, Explicit-Formulas Database, hyperelliptic.org/EFD, short Weierstrass curves, "xyzz", by the
names in each function.
"""

from accelerant.algebra.curve.weierstrass import add, multiply, negate


def jacobian_negate(curve, p):
    """Return (X, -Y, Z)."""
    return p[0], curve.coordinates.neg(p[1]), p[2]


def xyzz_from_affine(curve, point):
    """Return (x, y, 1, 1), or (1, 1, 0, 0) for infinity."""
    k = curve.coordinates
    return (k.one, k.one, k.zero, k.zero) if point is None else (*point, k.one, k.one)


def xyzz_to_affine(curve, p):
    """Return (X/ZZ, Y/ZZZ) with one inversion, by 1/ZZ = (ZZ/ZZZ)^2; I + 3M + S."""
    k = curve.coordinates
    if p[2] == k.zero:
        return None
    inverse = k.inv(p[3])
    return k.mul(p[0], k.square(k.mul(p[2], inverse))), k.mul(p[1], inverse)


def xyzz_batch_to_affine(curve, points):
    """Return xyzz_to_affine of each, with one inversion: I + n (6M + S). Source: Montgomery 1987, section 10.3.1."""
    k = curve.coordinates
    products, product = [], k.one
    for point in points:
        products.append(product)
        if point[2] != k.zero:
            product = k.mul(product, point[3])
    rest = k.inv(product)
    result = [None] * len(points)
    for i in reversed(range(len(points))):
        x, y, zz, zzz = points[i]
        if zz != k.zero:
            inverse = k.mul(rest, products[i])
            rest = k.mul(rest, zzz)
            result[i] = k.mul(x, k.square(k.mul(zz, inverse))), k.mul(y, inverse)
    return result


def xyzz_negate(curve, p):
    """Return (X, -Y, ZZ, ZZZ)."""
    return p[0], curve.coordinates.neg(p[1]), p[2], p[3]


def xyzz_double(curve, p):
    """Return 2 P by dbl-2008-s-1 with a = 0; 6M + 3S. Infinity needs no special case."""
    k = curve.coordinates
    x, y, zz, zzz = p
    u = k.times(y, 2)
    v = k.square(u)
    w, s = k.mul(u, v), k.mul(x, v)
    m = k.times(k.square(x), 3)
    x3 = k.sub(k.square(m), k.times(s, 2))
    return x3, k.sub(k.mul(m, k.sub(s, x3)), k.mul(w, y)), k.mul(v, zz), k.mul(w, zzz)


def xyzz_add(curve, p, q):
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


def xyzz_add_mixed(curve, p, q):
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


def msm_sum(curve, scalars, points):
    """Return the sum of scalars[i] points[i], product by product, with affine additions.

    Raises:
        ValueError: the lengths differ.
    """
    total = None
    for scalar, point in zip(scalars, points, strict=True):
        total = add(curve, total, multiply(curve, scalar, point))
    return total


def signed_digits(scalar, window, count):
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


def msm_buckets(curve, scalars, points, *, window=None):
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
