"""The passes of a transform of 2^k points, as numbers that are independent of the device.

A transform of n points, n = A B C, is three passes, or two (n = A B), or one. A pass does many transforms of A points
(its *rows*) that are small enough for a core's cache or a block's shared memory, one for each of n / A *columns*. With
input index i = (iA B + iB) C + iC and output index j = jA + A (jB + B jC), and w of order n,

    sum_i x_i w^(i j) = sum_iC v^(iC jC) [ u^(iC jB) sum_iB v'^(iB jB) [ w^((iB C + iC) jA) sum_iA v''^(iA jA) x_i ] ]

where v, v', v'' have the orders C, B, A, and u has the order B C. The factors before an inner bracket are the
*twiddles*. Every pass is in place, row j over row i, except the last one in natural order, which reads along rows and
writes along columns, so that no pass merely moves elements.

    natural                    passes A, B, C; the last one from one memory to another
    natural_to_bit_reversed    passes A, B, C; each writes row j at position bitrev(j)
    bit_reversed_to_natural    the transpose: passes C, B, A; each reads row i at position bitrev(i); twiddles first

A coset g, where x_i is g^i x_i (forward) or y_i is g^-i y_i (inverse), and the inverse's 1 / n go into the twiddles,
and into one factor for each row of the first or the last pass.

Source: Bailey 1990, Journal of Supercomputing 4, "FFTs in external or hierarchical memory", for the four steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.parameters import Field, field_of

ORDERS = ("natural", "natural_to_bit_reversed", "bit_reversed_to_natural")  # of input and output
_ALL = 62  # Bits of a column's number, which are in its last digit
_LOG_NEAR = 4  # log2 of the fewest neighbouring columns whose twiddles are in one table


@dataclass(frozen=True, slots=True)
class Variant:
    """The properties of a pass that its program is compiled for."""

    along_in: bool = False  # whether the rows of a column are neighbours in memory when read; else the columns are
    along_out: bool = False  # the same when written
    reversed_in: bool = False  # row i is read at position bitrev(i)
    reversed_out: bool = False  # row i is written at position bitrev(i)
    before: bool = False  # whether there is a factor for each row before the sums
    after: bool = False  # the same after the sums
    twiddle: str = ""  # "before" or "after" the sums, or ""
    split: bool = False  # whether twiddles are products of two tables


@dataclass(frozen=True, slots=True)
class PassLayout:
    """Row r of column t is at digit_0 column[0] + digit_1 column[1] + rest column[2] + r row."""

    column: tuple[int, int, int]
    row: int


def powers(scale: int, base: int, count: int, p: int) -> list[int]:
    """Return scale, scale base, scale base^2, ... mod p."""
    values = [scale]
    for _ in range(count - 1):
        values.append(values[-1] * base % p)
    return values


def reversed_numbers(bits: int) -> npt.NDArray[np.int64]:
    """Return the numbers of so many bits, bit-reversed."""
    numbers = np.zeros(1, np.int64)
    for _ in range(bits):
        numbers = np.concatenate((2 * numbers, 2 * numbers + 1))
    return numbers


@dataclass(frozen=True, slots=True)
class RowPowers:
    """A factor scale base^r for each of 2^log_rows rows r, at position r, or bitrev(r) if by_bits is set."""

    scale: int
    base: int
    log_rows: int
    by_bits: bool = False

    def by_position(self, p: int) -> list[int]:
        """Return the factors, by position."""
        bits = self.log_rows
        values = powers(self.scale, self.base, 1 << bits, p)
        return [values[i] for i in reversed_numbers(bits)] if self.by_bits else values


@dataclass(frozen=True, slots=True)
class Twiddles:
    """The factor start base^c of a row in column c = digit_0; start and base are those of the row."""

    start: RowPowers
    base: RowPowers


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: 2^log_rows rows, a root of that order, a factor for each row before and after, or None."""

    variant: Variant
    log_rows: int
    digits: tuple[int, int]  # bits of the two lowest digits of a column's number
    reads: PassLayout
    writes: PassLayout
    root: int
    before: RowPowers | None = None
    after: RowPowers | None = None
    twiddles: Twiddles | None = None
    log_low: int = 0  # a twiddle of column c is low[row, c mod 2^log_low] high[row, c >> log_low]

    @property
    def rows(self) -> int:
        """Return A."""
        return 1 << self.log_rows

    @property
    def in_place(self) -> bool:
        """Return whether a column is written where it was read."""
        return self.reads == self.writes


class _Transform:
    """The parameters that all passes of a transform share."""

    def __init__(
        self, field: Field, logs: tuple[int, ...], inverse: bool, coset: int, order: str, log_table: int
    ) -> None:
        self.field, self.p, self.n = field, field.modulus, 1 << sum(logs)
        self.logs, self.inverse, self.coset, self.order, self.log_table = logs, inverse, coset, order, log_table

    def unit(self, m: int) -> int:
        """Return the weight of jm in j."""
        return 1 << sum(self.logs[:m])

    def inner(self, m: int) -> int:
        """Return the weight of im in i."""
        return 1 << sum(self.logs[m + 1 :])

    def root(self, order: int) -> int:
        return pow(self.field.root_of_unity(order), -1 if self.inverse else 1, self.p)

    def powers(self, factors: tuple[int, int], m: int, by_bits: bool) -> RowPowers | None:
        """Return the powers scale base^r for the rows of pass m; None if all are 1."""
        scale, base = factors
        return None if factors == (1, 1) else RowPowers(scale, base, self.logs[m], by_bits)

    def twiddles(self, start: tuple[int, int], step: int, m: int, by_bits: bool) -> Twiddles:
        """Return the twiddles between pass m and those within: (scale base^r) (step w^r)^c for row r and column c."""
        w = self.root(self.inner(m) << self.logs[m])
        return Twiddles(RowPowers(*start, self.logs[m], by_bits), RowPowers(step, w, self.logs[m], by_bits))


def make_passes(
    field: Field, logs: Sequence[int], *, inverse: bool, coset: int, order: str, log_table: int
) -> tuple[Pass, ...]:
    """Return the passes of transforms of A B C points, by log2 of each; larger tables of twiddles are split."""
    transform = _Transform(field, tuple(logs), inverse, coset % field.modulus, order, log_table)
    numbers = range(len(transform.logs))
    if order == "bit_reversed_to_natural":
        return tuple(_reversed_input(transform, m) for m in reversed(numbers))
    return tuple(_natural_input(transform, m) for m in numbers)


def _natural_input(transform: _Transform, m: int) -> Pass:
    """Return pass m for input in natural order: twiddles after the sums, output row j at j or bitrev(j)."""
    p, g, last = transform.p, transform.coset, len(transform.logs) - 1
    by_bits = transform.order == "natural_to_bit_reversed"
    before, step, after = (1, 1), 1, (1, 1)  # before and after: a scale and a base of powers of the row
    if transform.inverse:
        scale = pow(transform.n, -1, p) if m == (0 if g == 1 else last) else 1
        after = (scale, pow(g, -transform.unit(m), p))
    elif m == 0:
        before, step = (1, pow(g, transform.inner(m), p)), g
    twiddles = None
    if m != last:
        twiddles, after = transform.twiddles(after, step, m, by_bits), (1, 1)
    return _pass(transform, m, transform.powers(before, m, False), transform.powers(after, m, by_bits), twiddles)


def _reversed_input(transform: _Transform, m: int) -> Pass:
    """Return pass m for input in bit-reversed order: twiddles before the sums, row i of the input at bitrev(i)."""
    p, g, last = transform.p, transform.coset, m == len(transform.logs) - 1
    before, step, after = (1, 1), 1, (1, 1)  # before and after: a scale and a base of powers of the row
    if not transform.inverse:
        before = (1, pow(g, transform.unit(m), p))
    elif m == 0:
        share = pow(transform.n, -1, p)
        before, step = (1 if last else share, 1), pow(g, -1, p)
        after = (share if last else 1, pow(g, -transform.inner(m), p))
    twiddles = None
    if not last:
        twiddles, before = transform.twiddles(before, step, m, True), (1, 1)
    return _pass(transform, m, transform.powers(before, m, True), transform.powers(after, m, False), twiddles)


def _pass(
    transform: _Transform, m: int, before: RowPowers | None, after: RowPowers | None, twiddles: Twiddles | None
) -> Pass:
    digits, reads, writes = _layouts(transform, m)
    log_rows, log_inner = transform.logs[m], digits[0]
    log_low = min(log_inner, max(transform.log_table - log_rows, -(-log_inner // 2), _LOG_NEAR)) if twiddles else 0
    reversed_in = transform.order == "bit_reversed_to_natural"
    variant = Variant(
        along_in=reads.row == 1,
        along_out=writes.row == 1,
        reversed_in=reversed_in,
        reversed_out=transform.order == "natural_to_bit_reversed",
        before=before is not None,
        after=after is not None,
        twiddle="" if twiddles is None else "before" if reversed_in else "after",
        split=twiddles is not None and log_low < log_inner,
    )
    root = transform.root(1 << log_rows)
    return Pass(variant, log_rows, digits, reads, writes, root, before, after, twiddles, log_low)


def _layouts(transform: _Transform, m: int) -> tuple[tuple[int, int], PassLayout, PassLayout]:
    rows, inner, n = 1 << transform.logs[m], transform.inner(m), transform.n
    if inner > 1:
        same = PassLayout((1, rows * inner, 0), inner)
        bits = inner.bit_length() - 1
        return (bits, _ALL - bits), same, same
    if transform.order != "natural" or m == 0:
        same = PassLayout((rows, 0, 0), 1)
        return (_ALL, 0), same, same
    logs = (*transform.logs[:m], 0)
    first, second = 1 << logs[0], 1 << logs[1]
    reads = PassLayout((n // first, n // (first * second), n), 1)
    return (logs[0], logs[1]), reads, PassLayout((1, first, n), first * second)


# --- reference --------------------------------------------------------------------------------------------------------


def bit_reversed(index: int, bits: int) -> int:
    """Return the number whose lowest `bits` bits are those of the index in the opposite order."""
    return int(f"{index:0{bits}b}"[::-1], 2) if bits else 0


def permuted(x: Sequence[int]) -> list[int]:
    """Return 2^k numbers in bit-reversed order."""
    bits = len(x).bit_length() - 1
    return [x[i] for i in reversed_numbers(bits)]


def ntt_reference(
    x: Sequence[int], *, field: str, inverse: bool = False, coset: int = 1, order: str = "natural"
) -> list[int]:
    """Transform by halves (Cooley and Tukey 1965), in any order of the module; ConfigError without such a root."""
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
