"""Points of every small order that a curve has out of its subgroup of order r, and the checks that refuse them."""

from accelerant.algebra.curve.weierstrass import in_subgroup, multiply
from accelerant.errors import FormatError


def checked(curve, points):
    """The points; FormatError names the first one off the curve or out of the subgroup. By Python's integers."""
    for index, point in enumerate(points):
        if not curve.is_on_curve(point):
            raise FormatError(f"points[{index}] is not on {curve.name}")
        if curve.cofactor != 1 and not in_subgroup(curve, point):
            raise FormatError(f"points[{index}] is on {curve.name} but not in its subgroup of order r")
    return points


def point_out_of_subgroup(curve, seed=1):
    """A point of the curve, not in the subgroup: the first x from the seed on that has one."""
    k, value = curve.coordinates, seed
    while True:
        x = k.join([value, *[0] * (k.degree - 1)])
        y = k.sqrt(curve.right_side(x))
        if y is not None and not in_subgroup(curve, (x, y)):
            return x, y
        value += 1


def of_cofactor(curve, seed):
    """A point whose order divides the cofactor."""
    point = multiply(curve, curve.order, point_out_of_subgroup(curve, seed))
    assert multiply(curve, curve.cofactor, point) is None
    return point


def small_primes(curve, limit=20_000):
    """Primes below the limit that divide the cofactor."""
    rest, found = curve.cofactor, []
    for prime in range(2, limit):
        if rest % prime == 0:
            found.append(prime)
            while rest % prime == 0:
                rest //= prime
    return found


def of_small_order(curve, prime):
    """A point of prime order."""
    seed = 1
    while True:
        point, exponent = point_out_of_subgroup(curve, seed), curve.order * curve.cofactor
        while exponent % prime == 0:
            exponent //= prime
        point = multiply(curve, exponent, point)
        while point is not None and multiply(curve, prime, point) is not None:
            point = multiply(curve, prime, point)
        if point is not None:
            return point
        seed += 1


def of_small_orders(curve):
    """One of each such order; on y^2 = x^3 + 4 also (0, 2), of order 3, whose x is 0."""
    return [of_small_order(curve, prime) for prime in small_primes(curve)] + [(0, 2)] * (curve.b == 4)
