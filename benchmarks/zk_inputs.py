"""Inputs of any size for the suite zk, whose answers are known.

Words come from splitmix64 at fixed indices, so that other programs can make the same:

    points P_i      splitmix64(0x1000000000000000 + i) G
    scalars s_i     limbs j = 0 .. 3: splitmix64(0x2000000000000000 + 4 i + j), masked to the order's bits, and taken
                    modulo the order

The points are multiples of the generator, so the sum of s_i P_i is (sum of s_i k_i mod r) G, which Python's integers
give for any number of points. Elements of fields are geometric sequences a g^i: every product and every output of a
transform is then known in closed form.

Source of splitmix64: Steele, Lea and Flood 2014, OOPSLA, "Fast splittable pseudorandom number generators".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.weierstrass import multiply
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.ntt.plan import permuted
from accelerant.zk import FieldArray, PrimeField
from accelerant.zk.elliptic_curve import EllipticCurve

__all__ = ["geometric", "msm_answer", "msm_multipliers", "msm_points", "msm_scalars", "power_table", "splitmix64"]

U64 = npt.NDArray[np.uint64]

_POINTS, _SCALARS = 1 << 60, 1 << 61
_WINDOW = 8
"""Bits of a digit of a point's multiplier; each digit has a table of the generator's multiples."""

_CHUNK = 1 << 18


def splitmix64(start: int, n: int) -> U64:
    """Return n words: the function at start, start + 1, ..."""
    z = np.arange(n, dtype=np.uint64)
    z += np.uint64((start + 0x9E3779B97F4A7C15) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    return z


# --- multi-scalar multiplications ------------------------------------------------------------------------------------


def msm_multipliers(n: int) -> U64:
    """Return the multipliers k_i of the points, below 2^64."""
    return splitmix64(_POINTS, n)


def msm_scalars(field: Field, n: int) -> U64:
    """Return the scalars s_i, (n, 4) canonical words."""
    words = splitmix64(_SCALARS, 4 * n).reshape(n, 4)
    words[:, 3] &= np.uint64((1 << field.bits - 192) - 1)
    less, borrow = np.empty_like(words), np.zeros(n, np.bool_)
    for j, limb in enumerate(field.words(field.modulus, 64, 4)):
        word, before = words[:, j], borrow
        less[:, j] = word - np.uint64(limb) - before
        borrow = (word < np.uint64(limb)) | ((word == np.uint64(limb)) & before)
    words[~borrow] = less[~borrow]
    return words


def msm_points(curve: EllipticCurve, n: int, like: Any) -> Any:
    """Return the points P_i, (n, *curve.shape) canonical words: an array, or a tensor on the torch device `like`."""
    digits = msm_multipliers(n).view(np.uint8).reshape(n, -1)  # of a little-endian machine
    total: Any = None
    for j in range(64 // _WINDOW):
        table = curve.mul(curve.generator, [d << _WINDOW * j for d in range(1 << _WINDOW)], check=False)
        column = np.ascontiguousarray(digits[:, j])
        row = table[column] if like is None else _gathered(table, column, like)
        total = row if total is None else curve.add(total, row, check=False)
    return total


def _gathered(table: U64, index: npt.NDArray[np.uint8], where: Any) -> Any:
    import torch

    words = torch.from_numpy(table.view(np.int64)).to(where)
    return words[torch.from_numpy(index).to(where).long()].view(torch.uint64)


def msm_answer(curve: EllipticCurve, scalars: U64) -> Any:
    """Return the sum of s_i P_i over the first points: (x, y), or None for infinity."""
    factors = msm_multipliers(len(scalars))
    total = 0
    for first in range(0, len(scalars), _CHUNK):
        s, k = (
            np.ascontiguousarray(words[first : first + _CHUNK], "<u8").view("<u2").astype(np.float64)
            for words in (scalars, factors)
        )
        # Sums of 2^18 products of 16-bit limbs are below 2^50: exact in float64, whose matrix product is a library's.
        sums = s.reshape(-1, 16).T @ k.reshape(-1, 4)
        total += sum(int(sums[i, j]) << 16 * (i + j) for i in range(16) for j in range(4))
    parameters = curve.parameters
    return multiply(parameters, total % parameters.order, parameters.generator)


# --- elements of fields ----------------------------------------------------------------------------------------------


def geometric(field: PrimeField, start: int, base: int, log_n: int, device: str) -> FieldArray:
    """Return the elements start base^i, (2^log_n,), on a device: products of two factors from Python's integers."""
    p, low = field.modulus, 1 << log_n // 2
    high = (1 << log_n) // low
    rows = _powers(start, pow(base, low, p), high, p)
    return _outer(field, rows, _powers(1, base, low, p), device)


def power_table(field: PrimeField, log_n: int, device: str) -> FieldArray:
    """Return the elements w^bitrev(t), (2^log_n,), w of order 2^log_n: the powers that output t is summed with."""
    p, w = field.modulus, field.parameters.root_of_unity(1 << log_n)
    half = log_n // 2
    rows = _powers(1, w, 1 << log_n - half, p)
    columns = _powers(1, pow(w, 1 << log_n - half, p), 1 << half, p)
    return _outer(field, permuted(rows), permuted(columns), device)


def _powers(start: int, base: int, n: int, p: int) -> list[int]:
    powers = [start % p]
    for _ in range(n - 1):
        powers.append(powers[-1] * base % p)
    return powers


def _outer(field: PrimeField, rows: list[int], columns: list[int], device: str) -> FieldArray:
    products = field.array(rows, device=device).reshape(-1, 1) * field.array(columns, device=device).reshape(1, -1)
    return products.reshape(-1)
