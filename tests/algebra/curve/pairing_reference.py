"""Optimal ate pairings on Python integers: the oracle of the fast ones.

e(P, Q) = f^((q^12 - 1) / r), P in G1, Q in G2 on the twist, with f of Miller's loop:

    bn254       f_{6x+2,Q}(P) l_{(6x+2)Q, pi(Q)}(P) l_{(6x+2)Q + pi(Q), -pi^2(Q)}(P)
    bls12_381   f_{x,Q}(P)

where f_{-n,Q} is 1 / f_{n,Q} but for what the power removes. Registered families are of the same two kinds.
pi is Frobenius. Vertical lines are left out: the power removes them, as it does every factor in a proper subfield.
Source: Vercauteren, eprint 2008/096. The value is that power exactly, without a factor of convenience, so that it can
be compared with other software.

Fq12 is the tower Fq2, Fq6 = Fq2[v] / (v^3 - xi), Fq12 = Fq6[w] / (w^2 - v). The twist maps into the curve over Fq12 by
(x, y) -> (x w^2, y w^3) where b' = b / xi, and by (x / w^2, y / w^3) where b' = b xi.

Points are affine, on their curves and in their subgroups: callers check. Not constant-time.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from msm_reference import msm_sum
from small_orders import checked

from accelerant.algebra.curve.parameters import Family, family_of
from accelerant.algebra.curve.weierstrass import Affine, Pair, QuadraticCoordinates, add, negate

GROTH16 = Path(__file__).parents[2] / "vectors" / "groth16"

Fq6 = tuple[Pair, Pair, Pair]
Fq12 = tuple[Fq6, Fq6]
_Twisted = tuple[Pair, Pair]


class Tower:
    """Arithmetic of Fq12 over a family's Fq2."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.fq2 = k = QuadraticCoordinates(family.fq)
        self.nonresidue = family.nonresidue
        self._zero6: Fq6 = (k.zero, k.zero, k.zero)
        self.one: Fq12 = ((k.one, k.zero, k.zero), self._zero6)
        # w^(k (q - 1)) = xi^(k (q - 1) / 6), what Frobenius multiplies the conjugate of w^k's coefficient by.
        root = k.power(self.nonresidue, (family.q - 1) // 6)
        self._frobenius = [k.power(root, i) for i in range(6)]

    def mul(self, a: Fq12, b: Fq12) -> Fq12:
        """Karatsuba's product: three in Fq6."""
        low, high = self._mul6(a[0], b[0]), self._mul6(a[1], b[1])
        cross = self._mul6(self._add6(a[0], a[1]), self._add6(b[0], b[1]))
        return self._add6(low, self._times_v(high)), self._sub6(self._sub6(cross, low), high)

    def square(self, a: Fq12) -> Fq12:
        """(a0 + a1) (a0 + v a1) - (1 + v) a0 a1 + 2 a0 a1 w: two products in Fq6."""
        product = self._mul6(a[0], a[1])
        both = self._mul6(self._add6(a[0], a[1]), self._add6(a[0], self._times_v(a[1])))
        return self._sub6(self._sub6(both, product), self._times_v(product)), self._add6(product, product)

    def conjugate(self, a: Fq12) -> Fq12:
        """a0 - a1 w, which is a^(q^6)."""
        return a[0], self._sub6(self._zero6, a[1])

    def inv(self, a: Fq12) -> Fq12:
        """(a0 - a1 w) / (a0^2 - v a1^2); ZeroDivisionError for zero."""
        norm = self._sub6(self._mul6(a[0], a[0]), self._times_v(self._mul6(a[1], a[1])))
        inverse = self._inv6(norm)
        return self._mul6(a[0], inverse), self._sub6(self._zero6, self._mul6(a[1], inverse))

    def power(self, a: Fq12, exponent: int) -> Fq12:
        """a^exponent for exponent >= 0: its digits in base q are exponents of a, a^q, a^(q^2), ..., raised together.

        Source: Straus 1964, with Frobenius for the powers of q; a third of the squarings of the plain way.
        """
        q, digits = self.family.q, []
        while exponent:
            exponent, digit = divmod(exponent, q)
            digits.append(digit)
        products = [self.one]
        for _ in digits:
            products += [self.mul(product, a) for product in products]
            a = self.frobenius(a)
        result = self.one
        for bit in reversed(range(max(digits, default=0).bit_length())):
            result = self.square(result)
            chosen = sum((digit >> bit & 1) << i for i, digit in enumerate(digits))
            if chosen:
                result = self.mul(result, products[chosen])
        return result

    def frobenius(self, a: Fq12) -> Fq12:
        """a^q: coefficients in Fq2 are conjugated, and w^k gains a factor."""
        k, factors = self.fq2, self._frobenius
        (a0, a2, a4), (a1, a3, a5) = a
        b = [k.mul(k.conjugate(c), factor) for c, factor in zip((a0, a1, a2, a3, a4, a5), factors, strict=True)]
        return (b[0], b[2], b[4]), (b[1], b[3], b[5])

    def _add6(self, a: Fq6, b: Fq6) -> Fq6:
        k = self.fq2
        return k.add(a[0], b[0]), k.add(a[1], b[1]), k.add(a[2], b[2])

    def _sub6(self, a: Fq6, b: Fq6) -> Fq6:
        k = self.fq2
        return k.sub(a[0], b[0]), k.sub(a[1], b[1]), k.sub(a[2], b[2])

    def _times_v(self, a: Fq6) -> Fq6:
        return self.fq2.mul(a[2], self.nonresidue), a[0], a[1]

    def _mul6(self, a: Fq6, b: Fq6) -> Fq6:
        """Six products in Fq2. Source: Devegili et al., eprint 2006/471."""
        k, xi = self.fq2, self.nonresidue
        v0, v1, v2 = k.mul(a[0], b[0]), k.mul(a[1], b[1]), k.mul(a[2], b[2])
        c12 = k.sub(k.sub(k.mul(k.add(a[1], a[2]), k.add(b[1], b[2])), v1), v2)
        c01 = k.sub(k.sub(k.mul(k.add(a[0], a[1]), k.add(b[0], b[1])), v0), v1)
        c02 = k.sub(k.sub(k.mul(k.add(a[0], a[2]), k.add(b[0], b[2])), v0), v2)
        return k.add(v0, k.mul(xi, c12)), k.add(c01, k.mul(xi, v2)), k.add(c02, v1)

    def _inv6(self, a: Fq6) -> Fq6:
        """By the adjoint, whose product with a is the norm in Fq2."""
        k, xi = self.fq2, self.nonresidue
        c0 = k.sub(k.square(a[0]), k.mul(xi, k.mul(a[1], a[2])))
        c1 = k.sub(k.mul(xi, k.square(a[2])), k.mul(a[0], a[1]))
        c2 = k.sub(k.square(a[1]), k.mul(a[0], a[2]))
        norm = k.add(k.mul(a[0], c0), k.mul(xi, k.add(k.mul(a[2], c1), k.mul(a[1], c2))))
        inverse = k.inv(norm)
        return k.mul(c0, inverse), k.mul(c1, inverse), k.mul(c2, inverse)


@functools.cache
def tower_of(family: Family) -> Tower:
    """The family's Fq12."""
    return Tower(family)


def pairing(family: Family, p: Affine[int], q: Affine[Pair]) -> Fq12:
    """e(P, Q), of order r; one if either is infinity."""
    return final_exponentiation(family, miller_loop(family, p, q))


def miller_loop(family: Family, p: Affine[int], q: Affine[Pair]) -> Fq12:
    """The f above, up to factors in proper subfields of Fq12; one if either point is infinity."""
    tower = tower_of(family)
    if p is None or q is None:
        return tower.one
    x = family.parameter
    steps = abs(6 * x + 2 if family.kind == "bn" else x)
    f, t = tower.one, q
    for bit in bin(steps)[3:]:
        line, t = _tangent(tower, t, p)
        f = tower.mul(tower.square(f), line)
        if bit == "1":
            line, t = _chord(tower, t, q, p)
            f = tower.mul(f, line)
    if x < 0:  # f^(q^6) is 1/f but for a factor in Fq6
        f, t = tower.conjugate(f), (t[0], tower.fq2.neg(t[1]))
    if family.kind == "bn":
        once = _frobenius(tower, q)
        twice = _frobenius(tower, once)
        line, t = _chord(tower, t, once, p)
        f = tower.mul(f, line)
        line, t = _chord(tower, t, (twice[0], tower.fq2.neg(twice[1])), p)
        f = tower.mul(f, line)
    return f


def final_exponentiation(family: Family, f: Fq12) -> Fq12:
    """f^((q^12 - 1) / r) = f^((q^6 - 1) (q^2 + 1) (q^4 - q^2 + 1) / r), the last factor by plain squaring."""
    tower = tower_of(family)
    f = tower.mul(tower.conjugate(f), tower.inv(f))
    f = tower.mul(tower.frobenius(tower.frobenius(f)), f)
    return tower.power(f, (family.q**4 - family.q**2 + 1) // family.r)


def _tangent(tower: Tower, t: _Twisted, p: Pair) -> tuple[Fq12, _Twisted]:
    k = tower.fq2
    slope = k.mul(k.times(k.square(t[0]), 3), k.inv(k.times(t[1], 2)))
    return _line(tower, t, t[0], slope, p)


def _chord(tower: Tower, t: _Twisted, q: _Twisted, p: Pair) -> tuple[Fq12, _Twisted]:
    k = tower.fq2
    slope = k.mul(k.sub(q[1], t[1]), k.inv(k.sub(q[0], t[0])))
    return _line(tower, t, q[0], slope, p)


def _line(tower: Tower, t: _Twisted, other_x: Pair, slope: Pair, p: Pair) -> tuple[Fq12, _Twisted]:
    """The line through T with this slope on the twist, at P; and the sum of T and the other point on it.

    On the curve over Fq12 the slope is slope w, or slope / w, and the line is
        y_P - slope x_P w + (slope x_T - y_T) w^3                    for b' = b / xi,
        ((slope x_T - y_T) - slope x_P w^2 + y_P w^3) / w^3          for b' = b xi, where w^3 in Fq4 may be left out.
    """
    k = tower.fq2
    constant = k.sub(k.mul(slope, t[0]), t[1])
    linear = k.neg(k.times(slope, p[0]))
    y_p = (p[1], 0)
    if tower.family.twist == "divide":
        line: Fq12 = ((y_p, k.zero, k.zero), (linear, constant, k.zero))
    else:
        line = ((constant, linear, k.zero), (k.zero, y_p, k.zero))
    x = k.sub(k.sub(k.square(slope), t[0]), other_x)
    return line, (x, k.sub(k.mul(slope, k.sub(t[0], x)), t[1]))


def _frobenius(tower: Tower, q: _Twisted) -> _Twisted:
    """(x^q, y^q) on the curve over Fq12, seen from a twist by division: x^q xi^((q-1)/3), y^q xi^((q-1)/2)."""
    k = tower.fq2
    x = k.mul(k.conjugate(q[0]), k.power(tower.nonresidue, (tower.family.q - 1) // 3))
    return x, k.mul(k.conjugate(q[1]), k.power(tower.nonresidue, (tower.family.q - 1) // 2))


def read_groth16(circuit):
    return [
        json.loads((GROTH16 / circuit / f"{name}.json").read_text()) for name in ("verification_key", "public", "proof")
    ]


def g1_point(values):
    x, y, z = map(int, values)
    return (x, y) if z else None


def g2_point(values):
    x, y, z = (tuple(map(int, pair)) for pair in values)
    return (x, y) if any(z) else None


def groth16_pairs(key, public, proof):
    """e(-A, B) e(alpha, beta) e(IC_0 + sum x_i IC_i, gamma) e(C, delta)."""
    g1 = family_of("bn254").g1
    ic = [g1_point(point) for point in key["IC"]]
    inputs = add(g1, ic[0], msm_sum(g1, [int(x) for x in public], ic[1:]))
    pairs = [
        (negate(g1, g1_point(proof["pi_a"])), g2_point(proof["pi_b"])),
        (g1_point(key["vk_alpha_1"]), g2_point(key["vk_beta_2"])),
        (inputs, g2_point(key["vk_gamma_2"])),
        (g1_point(proof["pi_c"]), g2_point(key["vk_delta_2"])),
    ]
    checked(g1, [p for p, _ in pairs])
    checked(family_of("bn254").g2, [q for _, q in pairs])
    return pairs
