"""Residues in a device's memory: words in Montgomery form, and recorded launches of kernel.c.

Numbers have `limbs` words of 32 bits, a multiple of 32 that the modulus determines; a program is compiled for each
number of limbs and serves every modulus of that size. Every power has a time that depends on sizes only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.bigint.residues import Residues, check_exponents, gmp
from accelerant.algebra.field.memory_space import MemorySpace, is_tensor
from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.ledger import OpRecord
from accelerant.runtime.recorded_launch import RecordedLaunch, launch, sole_record

__all__ = ["BLOCK", "DeviceResidues", "kernel_source", "lanes_of", "limbs_of"]

BLOCK = 128
"""Most threads per block."""

_ENTRIES, _TABLE_BYTES = 16, 2**28
"""Numbers of a power's table, and most bytes of the tables of one launch."""

_LIMBS_MOST = 512
_U32 = np.dtype(np.uint32)


def limbs_of(modulus: int) -> int:
    """Return the words of a number: a multiple of 32; ConfigError above 16384 bits or for an even modulus."""
    limbs = -(-max(1, int(modulus).bit_length()) // 1024) * 32
    if limbs > _LIMBS_MOST or modulus % 2 == 0:
        raise ConfigError(f"a modulus is odd and has at most {32 * _LIMBS_MOST} bits, got {limbs * 32} or an even one")
    return limbs


def lanes_of(limbs: int, backend: str) -> int:
    """Return the threads of a number: on CUDA a power of two up to 32, each with 8 limbs or more; elsewhere one."""
    return min(32, 1 << (limbs // 8).bit_length() - 1) if backend == "cuda" else 1


@functools.cache
def kernel_source(limbs: int, lanes: int) -> KernelSource:
    """Return bigint_mul and bigint_pow (see kernel.c) for numbers of so many limbs, and threads a number."""
    sizes = f"#define LIMBS {limbs}\n#define LANES {lanes}\n#define BIGINT_BLOCK {BLOCK}\n"
    text = sizes + (Path(__file__).parent / "kernel.c").read_text(encoding="utf-8")
    entries = {
        "bigint_mul": (*("*u32",) * 4, "u32", "i64", "i64"),
        "bigint_pow": (*("*u32",) * 6, "u32", "i64", "i64", "i64"),
    }
    return KernelSource(f"bigint_{limbs}_{lanes}", {"portable": text}, entries)


class _Modulus:
    """An odd modulus and its constants, as the kernels take them, in a memory space."""

    def __init__(self, modulus: Any, space: MemorySpace) -> None:
        self.value, self.space, self.limbs = gmp().mpz(modulus), space, limbs_of(modulus)
        self.lanes = lanes_of(self.limbs, space.backend)
        radix = gmp().mpz(1) << 32 * self.limbs
        self.inverse = int(-gmp().invert(self.value, 2**32) % 2**32)
        numbers = (self.value, radix % self.value, radix * radix % self.value, gmp().mpz(1))
        self.words, self.one, self.square, self.unit = (space.load(_words([x], self.limbs)) for x in numbers)

    def per_block(self, count: int) -> int:
        """Return the groups of a block; those of several lanes fill whole warps, which their shuffles name."""
        return min(BLOCK, count if self.lanes == 1 else -(-count * self.lanes // 32) * 32) // self.lanes

    def groups(self, count: int) -> int:
        """Return the groups of threads of a launch: at least one for each number."""
        return -(-count // self.per_block(count)) * self.per_block(count)

    def launch(self, entry: str, arrays: tuple[Any, ...], scalars: tuple[int, ...], count: int) -> None:
        """Launch an entry for some numbers, at least one."""
        blocks, threads = self.groups(count) // self.per_block(count), self.per_block(count) * self.lanes
        launch(self.space, kernel_source(self.limbs, self.lanes), entry, blocks, threads, arrays, *scalars, count)

    def record(self, op: str, count: int, products: int) -> OpRecord:
        case = f"{count} of {32 * self.limbs} bits"
        return sole_record(
            f"bigint_{op}", "portable", self.space.backend, self.space.label, case,
            size_bytes=3 * 4 * self.limbs * count, operations=2 * self.limbs**2 * products * count,
        )  # fmt: skip


_modulus = functools.lru_cache(maxsize=64)(_Modulus)


class DeviceResidues(Residues):
    """Residues as words (count, limbs), in Montgomery form, on a device."""

    def __init__(self, words: Any, modulus: _Modulus) -> None:
        self._words, self._modulus = words, modulus
        self.modulus, self.space = modulus.value, modulus.space

    @classmethod
    def load(cls, values: Iterable[Any], modulus: Any, space: MemorySpace) -> DeviceResidues:
        """Copy numbers to a device; UnsupportedCase if its backend has no kernels in portable C."""
        if "portable" not in space.provider.dialects:
            raise UnsupportedCase(f"{space.label} has no kernels for residues: use cpu, cuda or opencl")
        constants = _modulus(gmp().mpz(modulus), space)
        plain = cls(space.load(_words(values, constants.limbs)), constants)
        return plain._product(constants.square, 0)

    def __len__(self) -> int:
        return int(self._words.shape[0])

    def ints(self) -> list[Any]:
        """Return the numbers as gmpy2's integers, copied to the host."""
        data = np.ascontiguousarray(self.space.store(self._product(self._modulus.unit, 0)._words), "<u4").tobytes()
        size, mpz = 4 * self._modulus.limbs, gmp().mpz
        return [mpz.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]

    def take(self, indices: npt.NDArray[np.int64]) -> DeviceResidues:
        """Return the numbers at indices, (m,)."""
        if not len(indices):
            return DeviceResidues(self.space.load(np.zeros((0, self._modulus.limbs), _U32)), self._modulus)
        return DeviceResidues(self.space.getitem(self._words, (np.array(indices),)), self._modulus)

    def joined(self, other: Residues) -> DeviceResidues:
        """Append other numbers."""
        assert isinstance(other, DeviceResidues)
        if is_tensor(self._words):
            return DeviceResidues(sys.modules["torch"].cat([self._words, other._words]), self._modulus)
        words = np.concatenate([self.space.store(self._words), self.space.store(other._words)])
        return DeviceResidues(self.space.load(words), self._modulus)

    def times(self, other: Residues) -> DeviceResidues:
        """Multiply number by number."""
        assert isinstance(other, DeviceResidues)
        return self._product(other._words, 1)

    def _product(self, words: Any, step: int) -> DeviceResidues:
        """Multiply by words of as many numbers, or with step 0 of one, and divide by R."""
        n, count = self._modulus, len(self)
        found = self.space.empty((count, n.limbs), _U32)
        with RecordedLaunch(n.record("mul", count, 1), self.space.provider, self.space.index):
            if count:
                n.launch("bigint_mul", (self._words, words, found, n.words), (n.inverse, step), count)
        return DeviceResidues(found, n)

    def power(self, exponents: Sequence[int], *, secret: bool = False) -> DeviceResidues:
        """Raise each number to its exponent, or all to the only one; the time depends on the largest one's size."""
        check_exponents(self, exponents, secret)
        n, count, space = self._modulus, len(self), self.space
        size = max(1, *(-(-int(e).bit_length() // 32) for e in exponents))
        most, found = max(1, _TABLE_BYTES // (4 * _ENTRIES * n.limbs)), self.take(np.arange(0))
        with RecordedLaunch(n.record("pow", count, 40 * size), space.provider, space.index):
            for at in range(0, count, most):
                x = self if count <= most else self.take(np.arange(at, min(count, at + most)))
                each = exponents if len(exponents) == 1 else exponents[at : at + most]
                z = space.empty((len(x), n.limbs), _U32)
                table = space.empty((n.groups(len(x)) * _ENTRIES, n.limbs), _U32)
                arrays = (x._words, space.load(_words(each, size)), z, table, n.words, n.one)
                n.launch("bigint_pow", arrays, (n.inverse, size, int(len(exponents) > 1)), len(x))
                part = DeviceResidues(z, n)
                found = found.joined(part) if len(found) else part
        return found


def _words(values: Iterable[Any], limbs: int) -> npt.NDArray[Any]:
    data = b"".join(value.to_bytes(4 * limbs, "little") for value in values)
    return np.frombuffer(data, "<u4").astype(np.uint32).reshape(-1, limbs)
