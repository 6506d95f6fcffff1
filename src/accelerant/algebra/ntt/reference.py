"""Number-theoretic transforms of Python integers, the oracle of the kernels: canonical elements, not constant-time."""

from __future__ import annotations

from collections.abc import Sequence

from accelerant.algebra.field.parameters import field_of


def bit_reversed(index: int, bits: int) -> int:
    """Return the number whose lowest `bits` bits are those of the index in the opposite order."""
    return int(f"{index:0{bits}b}"[::-1], 2) if bits else 0


def permuted(x: Sequence[int]) -> list[int]:
    """Return 2^k numbers in bit-reversed order."""
    bits = len(x).bit_length() - 1
    return [x[bit_reversed(i, bits)] for i in range(len(x))]


def ntt_reference(
    x: Sequence[int], *, field: str, inverse: bool = False, coset: int = 1, order: str = "natural"
) -> list[int]:
    """Transform by halves, n / 2 log2 n products, in any order of accelerant.algebra.ntt.plan.

    Source: Cooley and Tukey 1965, Mathematics of Computation 19(90), pages 297 to 301.

    ConfigError for an unknown field, or one without a root of unity of that order.
    """
    row, n = field_of(field), len(x)
    p, w = row.modulus, row.root_of_unity(n)
    if order == "bit_reversed_to_natural":
        x = permuted(x)
    if inverse:
        y, unscaled, scale = _halves(x, pow(w, -1, p), p), pow(coset, -1, p), pow(n, -1, p)
        y = [value * scale % p for value in _scaled(y, unscaled, p)]
    else:
        y = _halves(_scaled(x, coset, p), w, p)
    return permuted(y) if order == "natural_to_bit_reversed" else y


def _scaled(x: Sequence[int], base: int, p: int) -> list[int]:
    """Return x_i base^i."""
    power, scaled = 1, []
    for value in x:
        scaled.append(value * power % p)
        power = power * base % p
    return scaled


def _halves(x: Sequence[int], w: int, p: int) -> list[int]:
    n = len(x)
    if n == 1:
        return list(x)
    even, odd = (_halves(x[first::2], w * w % p, p) for first in (0, 1))
    odd = _scaled(odd, w, p)
    return [(a + b) % p for a, b in zip(even, odd, strict=True)] + [(a - b) % p for a, b in zip(even, odd, strict=True)]
