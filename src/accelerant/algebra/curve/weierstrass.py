"""Arithmetic of the coordinates of points: a prime field Fq, and Fq2 = Fq[u] / (u^2 + 1), on Python integers.

An element of Fq is an int in [0, q); one of Fq2 is the pair (c0, c1) of c0 + c1 u. The methods take reduced elements
and return reduced ones. Nothing here is constant-time: Python integers never are.


----

Curves y^2 = x^3 + b: what one is made of.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from accelerant.algebra.field.parameters import Field, QuadraticField

__all__ = ["Affine", "Coordinates", "Curve", "Pair", "PrimeCoordinates", "QuadraticCoordinates"]

E = TypeVar("E")
Pair = tuple[int, int]


class Coordinates(ABC, Generic[E]):
    """A field of coordinates.

    Attributes:
        base: Fq.
        degree: over Fq, 1 or 2.
        zero: of the field.
        one: of the field.
    """

    base: Field
    degree: int
    zero: E
    one: E

    @abstractmethod
    def add(self, a: E, b: E) -> E:
        """The sum a + b."""

    @abstractmethod
    def sub(self, a: E, b: E) -> E:
        """The difference a - b."""

    @abstractmethod
    def neg(self, a: E) -> E:
        """The opposite, -a."""

    @abstractmethod
    def times(self, a: E, k: int) -> E:
        """Multiply a by an integer (or an element of Fq) k."""

    @abstractmethod
    def mul(self, a: E, b: E) -> E:
        """The product a b."""

    @abstractmethod
    def square(self, a: E) -> E:
        """The square, a^2."""

    @abstractmethod
    def inv(self, a: E) -> E:
        """1/a; ZeroDivisionError for zero."""

    @abstractmethod
    def sqrt(self, a: E) -> E | None:
        """A square root, or None where there is none."""

    @abstractmethod
    def parts(self, a: E) -> tuple[int, ...]:
        """The coefficients over Fq, c0 first."""

    @abstractmethod
    def join(self, parts: Sequence[int]) -> E:
        """The element of these coefficients, each reduced, c0 first."""

    def power(self, a: E, exponent: int) -> E:
        """a^exponent for exponent >= 0, by squaring and multiplying."""
        result = self.one
        for bit in bin(exponent)[2:]:
            result = self.square(result)
            if bit == "1":
                result = self.mul(result, a)
        return result

    def is_larger(self, a: E) -> bool:
        """Whether a is the larger of a and -a, where pairs are compared by c1 first. Both compressed formats use it."""
        for part in reversed(self.parts(a)):
            if part:
                return part > self.base.modulus // 2
        return False


class PrimeCoordinates(Coordinates[int]):
    """Fq, for q = 3 mod 4."""

    def __init__(self, field: Field) -> None:
        if field.modulus % 4 != 3:
            raise ValueError(f"{field.name}: square roots are written for q = 3 mod 4, got {field.modulus}")
        self.base = field
        self.degree = 1
        self.zero = 0
        self.one = 1
        self._q = field.modulus

    def add(self, a: int, b: int) -> int:
        """The sum a + b."""
        return (a + b) % self._q

    def sub(self, a: int, b: int) -> int:
        """The difference a - b."""
        return (a - b) % self._q

    def neg(self, a: int) -> int:
        """The opposite, -a."""
        return -a % self._q

    def times(self, a: int, k: int) -> int:
        """The product k a."""
        return a * k % self._q

    def mul(self, a: int, b: int) -> int:
        """The product a b."""
        return a * b % self._q

    def square(self, a: int) -> int:
        """The square, a^2."""
        return a * a % self._q

    def inv(self, a: int) -> int:
        """1/a; ZeroDivisionError for zero."""
        if not a:
            raise ZeroDivisionError("zero has no inverse")
        return pow(a, -1, self._q)

    def sqrt(self, a: int) -> int | None:
        """a^((q + 1) / 4), if its square is a."""
        root = pow(a, (self._q + 1) // 4, self._q)
        return root if root * root % self._q == a else None

    def parts(self, a: int) -> tuple[int, ...]:
        """The element itself."""
        return (a,)

    def join(self, parts: Sequence[int]) -> int:
        """The element itself."""
        (a,) = parts
        return a


class QuadraticCoordinates(Coordinates[Pair]):
    """Fq2 = Fq[u] / (u^2 + 1)."""

    def __init__(self, field: QuadraticField) -> None:
        self.base = field.base
        self.degree = 2
        self.zero = (0, 0)
        self.one = (1, 0)
        self._q = field.base.modulus
        self._prime = PrimeCoordinates(field.base)

    def add(self, a: Pair, b: Pair) -> Pair:
        """The sum a + b."""
        return (a[0] + b[0]) % self._q, (a[1] + b[1]) % self._q

    def sub(self, a: Pair, b: Pair) -> Pair:
        """The difference a - b."""
        return (a[0] - b[0]) % self._q, (a[1] - b[1]) % self._q

    def neg(self, a: Pair) -> Pair:
        """The opposite, -a."""
        return -a[0] % self._q, -a[1] % self._q

    def times(self, a: Pair, k: int) -> Pair:
        """The product k a."""
        return a[0] * k % self._q, a[1] * k % self._q

    def mul(self, a: Pair, b: Pair) -> Pair:
        """Karatsuba's product: three multiplications in Fq."""
        low, high = a[0] * b[0], a[1] * b[1]
        return (low - high) % self._q, ((a[0] + a[1]) * (b[0] + b[1]) - low - high) % self._q

    def square(self, a: Pair) -> Pair:
        """(c0 + c1) (c0 - c1) + 2 c0 c1 u."""
        return (a[0] + a[1]) * (a[0] - a[1]) % self._q, 2 * a[0] * a[1] % self._q

    def inv(self, a: Pair) -> Pair:
        """(c0 - c1 u) / (c0^2 + c1^2); ZeroDivisionError for zero."""
        scale = self._prime.inv((a[0] * a[0] + a[1] * a[1]) % self._q)
        return a[0] * scale % self._q, -a[1] * scale % self._q

    def conjugate(self, a: Pair) -> Pair:
        """c0 - c1 u, which is a^q."""
        return a[0], -a[1] % self._q

    def sqrt(self, a: Pair) -> Pair | None:
        """The complex method. Source: Adj and Rodriguez-Henriquez, eprint 2012/685, algorithm 8.

        For c1 = 0 the root is that of c0, or u times that of -c0: one of both is a square. Else, with
        n^2 = c0^2 + c1^2, the root is x + c1 / (2 x) u, where x^2 is (c0 + n) / 2 or (c0 - n) / 2: their product,
        -c1^2 / 4, is no square, so exactly one of both is.
        """
        prime, (c0, c1) = self._prime, a
        if c1 == 0:
            x = prime.sqrt(c0)
            return (x, 0) if x is not None else (0, pow(-c0, (self._q + 1) // 4, self._q))
        norm = prime.sqrt((c0 * c0 + c1 * c1) % self._q)
        if norm is None:
            return None
        half = (self._q + 1) // 2
        x = prime.sqrt((c0 + norm) * half % self._q)
        if x is None:
            x = pow((c0 - norm) * half, (self._q + 1) // 4, self._q)
        return x, c1 * half * prime.inv(x) % self._q

    def parts(self, a: Pair) -> tuple[int, ...]:
        """(c0, c1)."""
        return a

    def join(self, parts: Sequence[int]) -> Pair:
        """(c0, c1)."""
        c0, c1 = parts
        return c0, c1


Affine = tuple[E, E] | None
"""(x, y), reduced; None is the point at infinity."""


@dataclass(frozen=True, slots=True)
class Curve(Generic[E]):
    """y^2 = x^3 + b, and its subgroup of prime order r.

    The group's order is odd for every curve of the table, so no point has order 2 (none has y = 0).

    Attributes:
        name: as users spell it.
        coordinates: arithmetic of the field of x and y.
        scalars: the field of r elements.
        b: of the equation.
        generator: of the subgroup, affine.
        cofactor: the order of the curve's group over r.
    """

    name: str
    coordinates: Coordinates[E]
    scalars: Field
    b: E
    generator: tuple[E, E]
    cofactor: int

    @property
    def order(self) -> int:
        """Of the subgroup, r."""
        return self.scalars.modulus

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one point in an array of canonical 64-bit limbs: (2, limbs), or (2, 2, limbs) over Fq2."""
        return (2, *(2,) * (self.coordinates.degree - 1), self.coordinates.base.limbs)

    def is_on_curve(self, point: Affine[E]) -> bool:
        """Whether y^2 = x^3 + b; infinity is on the curve. The coordinates are reduced."""
        if point is None:
            return True
        x, y = point
        return self.coordinates.square(y) == self.right_side(x)

    def right_side(self, x: E) -> E:
        """x^3 + b."""
        k = self.coordinates
        return k.add(k.mul(k.square(x), x), self.b)

    def canonical_text(self) -> str:
        """All parameters, one a line: a key, and integers in lower-case hexadecimal (c0 before c1)."""
        k = self.coordinates
        rows = (
            ("modulus", (k.base.modulus,)),
            ("degree", (k.degree,)),
            ("b", k.parts(self.b)),
            ("x", k.parts(self.generator[0])),
            ("y", k.parts(self.generator[1])),
            ("order", (self.order,)),
            ("cofactor", (self.cofactor,)),
        )
        lines = [f"curve {self.name}", *(" ".join((key, *(f"{value:x}" for value in values))) for key, values in rows)]
        return "\n".join(lines) + "\n"

    def parameters_hash(self) -> str:
        """SHA-256 of canonical_text in ASCII, in hexadecimal: what two programs compare to know they mean one curve."""
        return hashlib.sha256(self.canonical_text().encode("ascii")).hexdigest()
