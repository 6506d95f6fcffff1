"""The fields Fq2, Fq6 and Fq12 over recorded values of Fq (tape.py): the arithmetic of the CPU's pairings.

The tower is Fq2 = Fq[u] / (u^2 + 1), Fq6 = Fq2[v] / (v^3 - xi) and Fq12 = Fq6[w] / (w^2 - v). Elements are nested pairs
and triples of a recorder's values. Names of methods end in the degree of their field, 6 or 12, none in Fq2. M is a
product in Fq.
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerant.algebra.curve.parameters import Family
from accelerant.algebra.curve.tape import Recorder, multiple
from accelerant.algebra.curve.weierstrass import Pair, QuadraticCoordinates
from accelerant.algebra.field.parameters import FQ2

Fq2 = tuple[int, int]
Fq6 = tuple[Fq2, Fq2, Fq2]
Fq12 = tuple[Fq6, Fq6]
Projective = tuple[Fq2, Fq2, Fq2]
"""A point (X/Z, Y/Z) of the twist."""

Line = tuple[Fq2, Fq2, Fq2]
"""Coefficients of 1, w, w^3 on a twist by division; of 1, w^2, w^3 on one by multiplication."""

FQ12_SIZE = 12
"""Registers of an element of Fq12, in the order of its nested tuples."""


def pairs(values: Sequence[int]) -> tuple[Fq2, ...]:
    """Group coefficients into elements of Fq2."""
    return tuple((values[i], values[i + 1]) for i in range(0, len(values), 2))


def flat(elements: Sequence[Fq2]) -> tuple[int, ...]:
    """Return the coefficients of elements of Fq2."""
    return tuple(value for pair in elements for value in pair)


def flat12(a: Fq12) -> tuple[int, ...]:
    """Return the coefficients of an element of Fq12."""
    return flat((*a[0], *a[1]))


class RecordedTower:
    """The tower of a family over a new recorder, `base`."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.base = Recorder(family.fq)

    def pair(self, value: Pair) -> Fq2:
        """Return a constant of Fq2."""
        return self.base.constant(value[0]), self.base.constant(value[1])

    # --- Fq2 -----------------------------------------------------------------------------------------------------

    def add(self, a: Fq2, b: Fq2) -> Fq2:
        return self.base.add(a[0], b[0]), self.base.add(a[1], b[1])

    def sub(self, a: Fq2, b: Fq2) -> Fq2:
        return self.base.sub(a[0], b[0]), self.base.sub(a[1], b[1])

    def neg(self, a: Fq2) -> Fq2:
        return self.base.neg(a[0]), self.base.neg(a[1])

    def conjugate(self, a: Fq2) -> Fq2:
        """Return c0 - c1 u, which is a^q."""
        return a[0], self.base.neg(a[1])

    def times(self, a: Fq2, factor: int) -> Fq2:
        """Return the product of a and a small positive integer, by additions."""
        return multiple(self.add, a, factor)

    def mul(self, a: Fq2, b: Fq2) -> Fq2:
        """Return a b by Karatsuba; 3M."""
        k = self.base
        low, high = k.mul(a[0], b[0]), k.mul(a[1], b[1])
        cross = k.mul(k.add(a[0], a[1]), k.add(b[0], b[1]))
        return k.sub(low, high), k.sub(k.sub(cross, low), high)

    def square(self, a: Fq2) -> Fq2:
        """Return a^2 = (c0 + c1) (c0 - c1) + 2 c0 c1 u; 2M."""
        k = self.base
        product = k.mul(a[0], a[1])
        return k.mul(k.add(a[0], a[1]), k.sub(a[0], a[1])), k.add(product, product)

    def scale(self, a: Fq2, factor: int) -> Fq2:
        """Return the product of a and a value of Fq; 2M."""
        return self.base.mul(a[0], factor), self.base.mul(a[1], factor)

    def times_constant(self, a: Fq2, factor: Pair) -> Fq2:
        """Return the product of a and a constant; 3M, or 2M for a constant of Fq."""
        return self.mul(a, self.pair(factor)) if factor[1] else self.scale(a, self.base.constant(factor[0]))

    def times_xi(self, a: Fq2) -> Fq2:
        """Return a xi by additions; xi = c + u with c a small positive number."""
        c, one = self.family.nonresidue
        if one != 1:
            raise ValueError(f"{self.family.name}: wanted a non-residue c + u, got {self.family.nonresidue}")
        scaled = self.times(a, c)
        return self.base.sub(scaled[0], a[1]), self.base.add(scaled[1], a[0])

    def projective(self, values: Sequence[int]) -> Projective:
        """Return the point with these six coefficients."""
        x, y, z = pairs(values)
        return x, y, z

    # --- Fq6 -----------------------------------------------------------------------------------------------------

    def add6(self, a: Fq6, b: Fq6) -> Fq6:
        return self.add(a[0], b[0]), self.add(a[1], b[1]), self.add(a[2], b[2])

    def sub6(self, a: Fq6, b: Fq6) -> Fq6:
        return self.sub(a[0], b[0]), self.sub(a[1], b[1]), self.sub(a[2], b[2])

    def neg6(self, a: Fq6) -> Fq6:
        return self.neg(a[0]), self.neg(a[1]), self.neg(a[2])

    def times_v(self, a: Fq6) -> Fq6:
        return self.times_xi(a[2]), a[0], a[1]

    def mul6(self, a: Fq6, b: Fq6) -> Fq6:
        """Return a b by six products in Fq2, 18M. Source: Devegili et al., eprint 2006/471."""
        v0, v1, v2 = (self.mul(a[i], b[i]) for i in range(3))
        c12 = self.sub(self._crossed(a[1], a[2], b[1], b[2]), self.add(v1, v2))
        c01 = self.sub(self._crossed(a[0], a[1], b[0], b[1]), self.add(v0, v1))
        c02 = self.sub(self._crossed(a[0], a[2], b[0], b[2]), self.add(v0, v2))
        return self.add(v0, self.times_xi(c12)), self.add(c01, self.times_xi(v2)), self.add(c02, v1)

    def mul6_sparse(self, a: Fq6, b0: Fq2, b1: Fq2) -> Fq6:
        """Return a (b0 + b1 v): mul6 without b2, 15M."""
        v0, v1 = self.mul(a[0], b0), self.mul(a[1], b1)
        high = self.sub(self.mul(self.add(a[1], a[2]), b1), v1)
        middle = self.sub(self._crossed(a[0], a[1], b0, b1), self.add(v0, v1))
        last = self.sub(self.mul(self.add(a[0], a[2]), b0), v0)
        return self.add(v0, self.times_xi(high)), middle, self.add(last, v1)

    def mul6_by2(self, a: Fq6, b: Fq2) -> Fq6:
        """Return the product of a and an element of Fq2, 9M."""
        return self.mul(a[0], b), self.mul(a[1], b), self.mul(a[2], b)

    def _crossed(self, a0: Fq2, a1: Fq2, b0: Fq2, b1: Fq2) -> Fq2:
        return self.mul(self.add(a0, a1), self.add(b0, b1))

    # --- Fq12 ----------------------------------------------------------------------------------------------------

    def unflatten(self, values: Sequence[int]) -> Fq12:
        """Return the element with these twelve coefficients in Fq."""
        c = pairs(values)
        return (c[0], c[1], c[2]), (c[3], c[4], c[5])

    def mul12(self, a: Fq12, b: Fq12) -> Fq12:
        """Return a b by Karatsuba, 54M."""
        low, high = self.mul6(a[0], b[0]), self.mul6(a[1], b[1])
        cross = self.mul6(self.add6(a[0], a[1]), self.add6(b[0], b[1]))
        return self.add6(low, self.times_v(high)), self.sub6(cross, self.add6(low, high))

    def square12(self, a: Fq12) -> Fq12:
        """Return a^2 = (a0 + a1) (a0 + v a1) - (1 + v) a0 a1 + 2 a0 a1 w, 36M."""
        product = self.mul6(a[0], a[1])
        both = self.mul6(self.add6(a[0], a[1]), self.add6(a[0], self.times_v(a[1])))
        return self.sub6(self.sub6(both, product), self.times_v(product)), self.add6(product, product)

    def mul12_line(self, a: Fq12, line: Line) -> Fq12:
        """Return the product of a and a line, 39M: by Karatsuba without the products by zero.

        On a twist by division a line is c0 + (c1 + c2 v) w, on one by multiplication (c0 + c1 v) + (c2 v) w.
        """
        c0, c1, c2 = line
        if self.family.twist == "divide":
            low = self.mul6_by2(a[0], c0)
            high = self.mul6_sparse(a[1], c1, c2)
            cross = self.mul6_sparse(self.add6(a[0], a[1]), self.add(c0, c1), c2)
        else:
            low = self.mul6_sparse(a[0], c0, c1)
            high = self.times_v(self.mul6_by2(a[1], c2))
            cross = self.mul6_sparse(self.add6(a[0], a[1]), c0, self.add(c1, c2))
        return self.add6(low, self.times_v(high)), self.sub6(cross, self.add6(low, high))

    def conjugate12(self, a: Fq12) -> Fq12:
        """Return a0 - a1 w, which is a^(q^6): the inverse of an element whose order divides q^6 + 1."""
        return a[0], self.neg6(a[1])

    def inv12(self, a: Fq12) -> Fq12:
        """Return 1/a = (a0 - a1 w) / (a0^2 - v a1^2), by norms down to Fq; zero for zero."""
        b = self.sub6(self.mul6(a[0], a[0]), self.times_v(self.mul6(a[1], a[1])))
        adjoint = (
            self.sub(self.square(b[0]), self.times_xi(self.mul(b[1], b[2]))),
            self.sub(self.times_xi(self.square(b[2])), self.mul(b[0], b[1])),
            self.sub(self.square(b[1]), self.mul(b[0], b[2])),
        )
        mixed = self.add(self.mul(b[2], adjoint[1]), self.mul(b[1], adjoint[2]))
        norm = self.add(self.mul(b[0], adjoint[0]), self.times_xi(mixed))
        k = self.base
        length = self.inv(k.add(k.mul(norm[0], norm[0]), k.mul(norm[1], norm[1])))
        inverse = self.mul6_by2(adjoint, self.conjugate(self.scale(norm, length)))
        return self.mul6(a[0], inverse), self.neg6(self.mul6(a[1], inverse))

    def inv(self, a: int) -> int:
        """Return a^(q - 2) in Fq, by windows of four bits: the inverse, zero for zero."""
        k, exponent = self.base, self.family.q - 2
        square = k.mul(a, a)
        odd = [a]
        for _ in range(7):
            odd.append(k.mul(odd[-1], square))
        digits = bin(exponent)[2:]
        result, i = k.constant(1), 0
        while i < len(digits):
            if digits[i] == "0":
                result, i = k.mul(result, result), i + 1
                continue
            window = digits[i : i + 4].rstrip("0")
            for _ in window:
                result = k.mul(result, result)
            result, i = k.mul(result, odd[int(window, 2) // 2]), i + len(window)
        return result

    def frobenius12(self, a: Fq12, times: int) -> Fq12:
        """Return a^(q^times): coefficients in Fq2 are conjugated for odd times, and that of w^i gains a factor."""
        (a0, a2, a4), (a1, a3, a5) = a
        factors = _frobenius_factors(self.family, times)
        b = [self._moved(c, times, factor) for c, factor in zip((a0, a1, a2, a3, a4, a5), factors, strict=True)]
        return (b[0], b[2], b[4]), (b[1], b[3], b[5])

    def frobenius_twist(self, x: Fq2, y: Fq2, times: int) -> tuple[Fq2, Fq2]:
        """Apply the curve's Frobenius over Fq12 to coordinates of the twist, several times.

        On a twist by division (x w^2, y w^3) becomes (x^q w^(2q), y^q w^(3q)): coordinates gain the factors of w^2 and
        w^3; on one by multiplication those of w^-2 and w^-3.
        """
        _, _, for_x, for_y, _, _ = _frobenius_factors(self.family, times)
        if self.family.twist == "multiply":
            k = QuadraticCoordinates(FQ2[f"{self.family.name}_fq"])
            for_x, for_y = k.inv(for_x), k.inv(for_y)
        return self._moved(x, times, for_x), self._moved(y, times, for_y)

    def _moved(self, c: Fq2, times: int, factor: Pair) -> Fq2:
        return self.times_constant(self.conjugate(c) if times % 2 else c, factor)

    def square_cyclotomic(self, a: Fq12) -> Fq12:
        """Return the square of an element whose order divides q^4 - q^2 + 1, 18M.

        Over Fq4 = Fq2[t] / (t^2 - xi), t = w^3, an element is A + B w + C w^2, and its square is
        3 A^2 - 2 conj(A) + (3 t C^2 + 2 conj(B)) w + (3 B^2 - 2 conj(C)) w^2, conj taking t to -t.
        Source: Granger and Scott, eprint 2009/565, section 3.2.
        """
        (a0, a2, a4), (a1, a3, a5) = a
        p0, p1 = self._square4(a0, a3)
        q0, q1 = self._square4(a1, a4)
        s0, s1 = self._square4(a2, a5)

        def less(a: Fq2, b: Fq2) -> Fq2:  # 3 a - 2 b
            return self.add(self.times(self.sub(a, b), 2), a)

        def plus(a: Fq2, b: Fq2) -> Fq2:  # 3 a + 2 b
            return self.add(self.times(self.add(a, b), 2), a)

        b0, b3 = less(p0, a0), plus(p1, a3)
        b1, b4 = plus(self.times_xi(s1), a1), less(s0, a4)
        b2, b5 = less(q0, a2), plus(q1, a5)
        return (b0, b2, b4), (b1, b3, b5)

    def _square4(self, a: Fq2, b: Fq2) -> tuple[Fq2, Fq2]:
        """Return (a + b t)^2 by three squares."""
        first, second = self.square(a), self.square(b)
        cross = self.sub(self.square(self.add(a, b)), self.add(first, second))
        return self.add(first, self.times_xi(second)), cross


def _frobenius_factors(family: Family, times: int) -> list[Pair]:
    """Return w^(i (q^times - 1)) = xi^(i (q^times - 1) / 6) for i below 6."""
    k = QuadraticCoordinates(FQ2[f"{family.name}_fq"])
    root = k.power(family.nonresidue, (family.q**times - 1) // 6)
    return [k.power(root, i) for i in range(6)]
