"""Residues modulo a number of thousands of bits: products and powers, element by element.

`Residues` is a vector of gmpy2's integers, whose powers use every core; `DeviceResidues` (launch.py) has words in a
device's memory. With `secret=True` time and memory accesses of a power depend only on the sizes of modulus and
exponent: GMP's mpz_powm_sec here, a full scan of the window's table on devices. All else takes a time that depends on
the numbers. This code has not been audited.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.memory_space import HOST, MemorySpace
from accelerant.errors import MissingDependency, ShapeError
from accelerant.runtime.host import usable_cores


@functools.cache
def gmp() -> Any:
    """Return the module gmpy2; MissingDependency without it."""
    try:
        import gmpy2
    except ImportError:
        raise MissingDependency("gmpy2", "privacy", "arithmetic with large integers") from None
    return gmpy2


class Residues:
    """A vector of numbers from 0 to below a modulus, in one memory space; this class on the host."""

    space: MemorySpace = HOST

    def __init__(self, values: Iterable[Any], modulus: Any) -> None:
        self._values, self.modulus = list(map(gmp().mpz, values)), gmp().mpz(modulus)

    def __len__(self) -> int:
        return len(self._values)

    def ints(self) -> list[Any]:
        """Return the numbers as gmpy2's integers."""
        return self._values.copy()

    def take(self, indices: npt.NDArray[np.int64]) -> Residues:
        """Return the numbers at indices, (m,)."""
        return Residues(map(self._values.__getitem__, indices.tolist()), self.modulus)

    def joined(self, other: Residues) -> Residues:
        """Append other numbers."""
        return Residues([*self._values, *other._values], self.modulus)

    def times(self, other: Residues) -> Residues:
        """Multiply number by number."""
        n = self.modulus
        return Residues([a * b % n for a, b in zip(self._values, other._values, strict=True)], n)

    def power(self, exponents: Sequence[int], *, secret: bool = False) -> Residues:
        """Raise each number to its exponent, or all to the only one; exponents are at least 0.

        `secret` asks for a time that does not depend on the exponent, which must be the only one, and above 0.
        """
        check_exponents(self, exponents, secret)
        gmpy2, n = gmp(), self.modulus
        call = gmpy2.powmod_sec if secret else gmpy2.powmod

        def run(part: slice) -> list[Any]:
            if len(exponents) > 1:
                return list(map(call, self._values[part], exponents[part], itertools.repeat(n)))
            if secret:
                return [call(x, exponents[0], n) for x in self._values[part]]
            found: list[Any] = gmpy2.powmod_base_list(self._values[part], exponents[0], n)
            return found

        return Residues(_on_every_core(run, len(self)), n)

    def product(self, terms: int) -> Residues:
        """Multiply `terms` rows of equal length, stored one after the other, into one row; terms >= 1."""
        found, width = self, len(self) // terms
        while terms > 1:
            half, index = terms // 2 * width, np.arange(len(found))
            folded = found.take(index[:half]).times(found.take(index[half : 2 * half]))
            found = folded.joined(found.take(index[2 * half :])) if terms % 2 else folded
            terms -= terms // 2
        return found

    def inverse(self) -> Residues:
        """Invert each number with one inversion for all, on the host; ZeroDivisionError if one has no inverse.

        Source: Montgomery 1987, Mathematics of Computation 48, section 10.3.1.
        """
        values, n = self.ints(), self.modulus
        upto = list(itertools.accumulate(values, lambda a, b: a * b % n, initial=gmp().mpz(1)))
        left = gmp().invert(upto[-1], n)
        for i in reversed(range(len(values))):
            values[i], left = left * upto[i] % n, left * values[i] % n
        return residues_of(values, n, self.space)


def check_exponents(numbers: Residues, exponents: Sequence[int], secret: bool) -> None:
    """Raise ShapeError unless there is one exponent, or one for each number and none is secret."""
    if len(exponents) != 1 and (secret or len(exponents) != len(numbers)):
        raise ShapeError(f"{len(numbers)} numbers take one exponent or as many, got {len(exponents)}")


def _release_lock() -> None:
    gmp().get_context().allow_release_gil = True  # of the thread that calls


def _on_every_core(run: Callable[[slice], list[Any]], count: int) -> list[Any]:
    """Return run(slice) over the parts of range(count), joined."""
    threads = min(usable_cores(), count)
    if threads < 2:
        return run(slice(0, count))
    parts = min(count, 4 * threads)  # a core may be busy with something else
    cuts = [count * i // parts for i in range(parts + 1)]
    with ThreadPoolExecutor(threads, initializer=_release_lock) as pool:
        return list(itertools.chain.from_iterable(pool.map(run, itertools.starmap(slice, itertools.pairwise(cuts)))))


def residues_of(values: Iterable[Any], modulus: Any, space: MemorySpace = HOST) -> Residues:
    """Return numbers from 0 to below an odd modulus as residues in a memory space."""
    if space is HOST:
        return Residues(values, modulus)
    from accelerant.algebra.bigint.launch import DeviceResidues

    return DeviceResidues.load(values, modulus, space)


class FixedBase:
    """Powers of one base from a table of base^(d 256^i): one product for each byte of the exponent.

    Look-ups depend on the exponent (`power_vartime`): an observer of the processor's caches may learn of it. The table
    has 256 numbers for each byte of an exponent: 16 MiB for 1024 bits and a modulus of 4096. `bits` is divisible by 32.

    Source: Brickell, Gordon, McCurley and Wilson 1992, EUROCRYPT '92, LNCS 658.
    """

    def __init__(self, base: int, modulus: int, bits: int, space: MemorySpace = HOST) -> None:
        n, table = gmp().mpz(modulus), list[Any]()
        self._bytes, step = bits // 8, gmp().mpz(base)
        for _ in range(self._bytes):
            row = list(itertools.accumulate(itertools.repeat(step, 256), lambda a, b: a * b % n))
            table += [gmp().mpz(1), *row[:-1]]
            step = row[-1]
        self._table = residues_of(table, modulus, space)

    def power_vartime(self, exponents: Any) -> Residues:
        """Return the base to each exponent, given by words of 32 bits in the table's space, (count, bits / 32)."""
        if self._table.space is not HOST:
            from accelerant.algebra.bigint.launch import DeviceResidues

            assert isinstance(self._table, DeviceResidues)  # for the type checker: not of HOST
            return self._table.fixed_vartime(exponents)
        digits = exponents.astype("<u4").view(np.uint8).astype(np.int64)
        found = self._table.take(digits[:, 0])
        for i in range(1, self._bytes):
            found = found.times(self._table.take(digits[:, i] + 256 * i))
        return found
