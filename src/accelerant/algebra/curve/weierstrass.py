"""Curves y^2 = x^3 + b: what one is made of."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Generic, TypeVar

from accelerant.algebra.curve.coordinates import Coordinates
from accelerant.algebra.field.parameters import Field

__all__ = ["Affine", "Curve"]

E = TypeVar("E")
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
