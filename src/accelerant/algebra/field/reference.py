"""Field arithmetic on Python integers: the oracle."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MODULI", "field_add_reference"]

MODULI = {"goldilocks": 2**64 - 2**32 + 1}
"""Field name -> modulus. Goldilocks: Hamburg 2015, eprint 2015/625, with phi = 2^32."""


def field_add_reference(x: Sequence[int], y: Sequence[int], *, field: str) -> list[int]:
    """(x + y) mod p, element by element."""
    modulus = MODULI[field]
    return [(a + b) % modulus for a, b in zip(x, y, strict=True)]
