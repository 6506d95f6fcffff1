"""A field's constants in a reduced radix, for reduced_radix.h."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.program import defined, hexadecimal, montgomery_radix, prefixed
from accelerant.errors import ConfigError

__all__ = ["ReducedRadix", "reduced_radix", "reduced_radix_text"]

_DIGIT_BITS = (29, 28, 27, 26)
_TERMS = 5
"""Rows of digit products that a sum of 64 bits holds: four products of elements, and the reduction's."""

_LEAST_SLACK = 7
"""Log2 of R' / p, at least."""


@dataclass(frozen=True, slots=True)
class ReducedRadix:
    """How elements are cut into digits.

    Attributes:
        bits: of a digit, b.
        digits: of an element, n.
    """

    bits: int
    digits: int

    @property
    def radix(self) -> int:
        """R' of the Montgomery form."""
        return 1 << self.bits * self.digits


@functools.cache
def reduced_radix(field: Field) -> ReducedRadix:
    """The fewest digits whose sums of products fit in 64 bits.

    Raises:
        ConfigError: a field of one word, which has no need of it.
    """
    if field.limbs == 1:
        raise ConfigError(f"{field.name} has elements of one word; digits are for several")
    for bits in _DIGIT_BITS:
        digits = -(-(field.bits + _LEAST_SLACK) // bits)
        largest = (1 << bits) + 8
        if _TERMS * digits * largest * largest < 1 << 64:
            return ReducedRadix(bits, digits)
    raise ConfigError(f"{field.name} has {field.bits} bits: sums of digit products do not fit in 64")


def reduced_radix_text(field: Field, prefix: str) -> str:
    """PREFIX_lazy and its arithmetic, for the C dialects; stands after field_text.

    Args:
        field: of several limbs.
        prefix: as field_text was given it.

    Raises:
        As reduced_radix.
    """
    cut, p = reduced_radix(field), field.modulus

    def listed(value: int) -> str:
        return hexadecimal(tuple(value >> cut.bits * i & (1 << cut.bits) - 1 for i in range(cut.digits)), "U")

    values = {
        "FIELD_DIGITS": str(cut.digits),
        "FIELD_DIGIT_BITS": str(cut.bits),
        "FIELD_LOADED_BITS": str(cut.bits * cut.digits - montgomery_radix(field).bit_length() + 1),
        "FIELD_DIGITS_P": listed(p),
        "FIELD_DIGITS_ONE": listed(cut.radix % p),
        "FIELD_DIGITS_LIMBS": listed(montgomery_radix(field) % p),
        "FIELD_DIGITS_INVERSE": hexadecimal((-pow(p, -1, 1 << cut.bits) % (1 << cut.bits),), "U"),
    }
    text = (Path(__file__).parent / "reduced_radix.h").read_text(encoding="utf-8")
    return prefixed(defined(values) + text, prefix)
