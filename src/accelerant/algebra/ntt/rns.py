"""Polynomials mod X^n + 1 in a residue number system (RNS): bases of primes, their tables, and launches.

A polynomial is rows of n coefficients, one row for each prime of a base, as words of 32 bits. Bases are parts of one
RnsPrimes: those from `first` on. rns.c describes the kernels, rns_llvm.py writes them for the CPU. A product in the
transformed domain is divided by R = 2^32, which the inverse transform of products multiplies by.

Conversions of base are those of Halevi, Polyakov and Shoup (CT-RSA 2019, eprint 2018/117, section 2.2), with
fixed-point numbers of 57 bits instead of floating point: exact for |x| < Q (1/2 - 2^-22), and beyond that off by one Q
at most.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.memory_space import MemorySpace
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.program import read_files
from accelerant.algebra.ntt.rns_llvm import BLOCK, ENTRIES, rns_program
from accelerant.errors import ConfigError
from accelerant.runtime.compilation.kernel import KernelSource, LazyDialects
from accelerant.runtime.recorded_launch import launch

U32 = np.dtype(np.uint32)
Words = npt.NDArray[np.uint32]

MOST_SOURCES = 32
"""Most primes of a base that is converted to another."""

_LOG_TILE, _THREADS = 13, 256  # RNS_LOG_TILE, RNS_THREADS
_LEVEL = (("z", "roots", "primes"), ("first", "count", "log_n", "log_span", "inverse", "rows"))


def is_prime(number: int) -> bool:
    """Return whether a number below 3.2e9 is prime: Miller-Rabin to the bases 2, 3, 5 and 7 (Jaeschke 1993)."""
    if number < 11 or number % 2 == 0:
        return number in (2, 3, 5, 7)
    odd = number - 1
    twos = (odd & -odd).bit_length() - 1
    for base in (2, 3, 5, 7):
        x = pow(base, odd >> twos, number)
        if x != 1 and all(pow(x, 1 << k, number) != odd for k in range(twos)):
            return False
    return True


def primes_below(bits: int, n: int, count: int) -> tuple[int, ...]:
    """Return the `count` largest primes of some bits that are 1 mod 2 n; ConfigError if there are not so many."""
    found = []
    for p in range((1 << bits) - 2 * n + 1, 1 << bits - 1, -2 * n):
        if is_prime(p):
            found.append(p)
            if len(found) == count:
                return tuple(found)
    raise ConfigError(f"there are {len(found)} primes of {bits} bits that are 1 mod {2 * n}, and {count} are needed")


@functools.cache
def rns_source(entry: str) -> KernelSource:
    """Return the program of one entry point: of rns_llvm.ENTRIES, or "level", which the CPU does not need."""

    def portable() -> str:
        name = entry if entry in ("forward", "inverse") else ""
        macros = {f"RNS_{other.upper()}": int(other == entry) for other in (*ENTRIES, "level")}
        macros |= {"RNS_SOURCES": MOST_SOURCES}
        text = "".join(f"#define {macro} {value}\n" for macro, value in macros.items())
        return text + f"#define RNS_NAME rns_{name}\n" * bool(name) + read_files("algebra/ntt", "rns.c")

    pointers, scalars = ENTRIES.get(entry, _LEVEL)
    dialects = LazyDialects(portable=portable, **({"llvm": lambda: rns_program(entry)} if entry in ENTRIES else {}))
    return KernelSource(f"rns_{entry}", dialects, {f"rns_{entry}": ("*u32",) * len(pointers) + ("i64",) * len(scalars)})


@dataclass(frozen=True, slots=True)
class Conversion:
    """The constants of a conversion of base, in a device's memory.

    z_j = (out x + fused a_j) / divide mod p_j, with x the number between -Q/2 and Q/2 that is `scale` times the
    converted one mod Q.
    """

    table: Any
    sources: int
    targets: int
    fused: bool


@dataclass(frozen=True, eq=False)
class RnsPrimes:
    """The primes of some bases, each below 2^30 and 1 mod 2 n, with tables in the memory of one device.

    Roots of unity are those of the least quadratic non-residue, so transformed polynomials are the same everywhere.
    """

    space: MemorySpace
    n: int
    primes: tuple[int, ...]
    roots: Any = field(init=False, repr=False)
    numbers: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Compute the tables: 16 n bytes for each prime."""
        n = self.n
        if n < 64 or n & (n - 1) or any(p >> 30 or (p - 1) % (2 * n) for p in self.primes):
            raise ConfigError(f"needed: n a power of two from 64 on, and primes below 2^30 that are 1 mod {2 * n}")
        roots = np.empty((len(self.primes), 4, n), np.uint32)
        numbers = np.zeros((len(self.primes), 8), np.uint32)
        reverse = _bit_reversed(n)
        for i, p in enumerate(self.primes):
            psi = _prime_field(p).root_of_unity(2 * n)
            for at, base in ((0, psi), (2, pow(psi, -1, p))):
                table = _powers(base, n, p)[reverse]
                roots[i, at], roots[i, at + 1] = table, (table << np.uint64(32)) // np.uint64(p)
            scales = [pow(n, -1, p), pow(n, -1, p) * 2**32 % p]
            pairs = [value for scale in scales for value in (scale, (scale << 32) // p)]
            numbers[i, :6] = [p, pow(p, -1, 1 << 32), *pairs]
        object.__setattr__(self, "roots", self.space.load(roots))
        object.__setattr__(self, "numbers", self.space.load(numbers))

    @property
    def log_n(self) -> int:
        """Return log2 n."""
        return self.n.bit_length() - 1

    def empty(self, *rows: int) -> Any:
        """Return (*rows, n) undefined words."""
        return self.space.empty((*rows, self.n), U32)

    def _launch(self, entry: str, rows: int, arrays: Sequence[Any], *scalars: int) -> None:
        """Launch a kernel that has an index for each coefficient, or on the CPU for each BLOCK."""
        total = rows * self.n
        grid = total // BLOCK if self.space.backend == "cpu" else -(-total // _THREADS)
        threads = 1 if self.space.backend == "cpu" else _THREADS
        if rows:
            launch(self.space, rns_source(entry), f"rns_{entry}", grid, threads, arrays, *scalars)

    def transform(self, z: Any, first: int, count: int, *, inverse: bool = False, products: bool = False) -> None:
        """Transform rows in place, from natural order to bit-reversed, or the inverse: back.

        Args:
            first, count: row r belongs to prime first + r mod count.
            products: the rows are products, or sums of such, by `dot`.
        """
        rows, entry = math.prod(z.shape[:-1]), "inverse" if inverse else "forward"
        arrays, place = (z, self.roots, self.numbers), (first, count, self.log_n)
        host, spans = self.space.backend == "cpu", range(_LOG_TILE, self.log_n)
        if not rows:
            return
        if not inverse and not host:
            for log_span in reversed(spans):
                self._launch("level", rows, arrays, *place, log_span, 0, rows)
        blocks = rows if host else rows << max(0, self.log_n - _LOG_TILE)
        threads = 1 if host else _THREADS
        launch(self.space, rns_source(entry), f"rns_{entry}", blocks, threads, arrays, *place, int(products))
        if inverse and not host:
            for log_span in spans:
                self._launch("level", rows, arrays, *place, log_span, 1, rows)

    def add(self, x: Any, y: Any, first: int, count: int, *, subtract: bool = False, alternate: bool = False) -> Any:
        """Return x + y or x - y, row by row; `alternate`: every second polynomial of y counts as 0."""
        rows = math.prod(x.shape[:-1])
        z = self.empty(*x.shape[:-1])
        mode = int(subtract) + 2 * int(alternate)
        self._launch("add", rows, (x, y, z, self.numbers), first, count, self.log_n, mode, rows)
        return z

    def galois(self, x: Any, element: int, first: int, count: int) -> Any:
        """Return x(X^element) for an odd element, row by row."""
        rows = math.prod(x.shape[:-1])
        z = self.empty(*x.shape[:-1])
        inverse = pow(element, -1, 2 * self.n)
        self._launch("galois", rows, (x, z, self.numbers), first, count, self.log_n, inverse, rows)
        return z

    def dot(
        self, x: Any, y: Any, z: Any, first: int, count: int, *, batch: int, terms: int = 1, parts: int = 1,
        x_at: tuple[int, int, int] = (0, 0, 0), y_at: tuple[int, int, int, int] = (0, 0, 0, 0),
        z_at: tuple[int, int, int] = (0, 0, 0),
    ) -> None:  # fmt: skip
        """Store sums of products over R: z[b, h] = sum_t x[b, t] y[b, h, t], each of `count` rows; see rns_dot.

        Args:
            batch, parts, terms: numbers of b, h and t.
            x_at: the first row of x, and the rows from one b, and one t, to the next.
            y_at, z_at: also of one h, in the order (first, b, h, t).
        """
        rows = batch * parts * count
        scalars = (first, count, self.log_n, terms, parts, *x_at, *y_at, *z_at, rows)
        self._launch("dot", rows, (x, y, z, self.numbers), *scalars)

    def convert(
        self, conversion: Conversion, x: Any, z: Any, *, x_at: tuple[int, int], z_at: tuple[int, int],
        a: Any = None, a_at: tuple[int, int] = (0, 0), keep: int = -1,
    ) -> Any:  # fmt: skip
        """Convert polynomials of x to rows of z, and return z.

        x_at, a_at, z_at: the rows of a polynomial, and the first one to use.

        Args:
            a: what a fused conversion adds a multiple of.
            keep: copy the sources to the rows of z from here on.
        """
        polynomials = math.prod(x.shape[:-1]) // x_at[0]
        arrays = (x, x if a is None else a, z, conversion.table)
        scalars = (self.log_n, conversion.sources, conversion.targets, *x_at, *a_at, *z_at, keep, int(conversion.fused))
        self._launch("convert", polynomials, arrays, *scalars, polynomials)
        return z

    def conversion(
        self, sources: Sequence[int], targets: Sequence[int], *, scale: int = 1, out: int = 1, fused: int = 0,
        divide: int = 1,
    ) -> Conversion:  # fmt: skip
        """Return the constants of a conversion, of which `divide` divides both out and fused mod the targets.

        Of the sources, all above 2^25, there are at most MOST_SOURCES, and each product of one with a target prime is
        below a quarter of that times 2^32.
        """
        product = math.prod(sources)
        words: list[int] = []
        for q in sources:
            c = scale * pow(product // q, -1, q) % q
            words += [c, (c << 32) // q, q, (1 << 57) // q]
        for p in targets:
            unit = pow(divide, -1, p) * 2**32
            words += [p, pow(p, -1, 1 << 32), fused * unit % p, -product * out * unit % p]
            words += [product // q * out * unit % p for q in sources]
        return Conversion(self.space.load(np.array(words, np.uint32)), len(sources), len(targets), fused != 0)


@functools.cache
def _prime_field(p: int) -> Field:
    generator = next(g for g in range(2, p) if pow(g, (p - 1) // 2, p) == p - 1)
    return Field(f"prime_{p}", p, generator)


def _bit_reversed(n: int) -> npt.NDArray[np.int64]:
    numbers = np.zeros(1, np.int64)
    while len(numbers) < n:
        numbers = np.concatenate((2 * numbers, 2 * numbers + 1))
    return numbers


def _powers(base: int, count: int, p: int) -> npt.NDArray[np.uint64]:
    """Return base^0, base^1, ... mod p < 2^32, by doubling; count is a power of two."""
    values = np.ones(1, np.uint64)
    while len(values) < count:
        values = np.concatenate((values, values * np.uint64(pow(base, len(values), p)) % np.uint64(p)))
    return values
