"""Residues modulo numbers of thousands of bits: products and powers, element by element.

`Residues` is a vector of gmpy2's integers, whose powers use every core; `DeviceResidues` has words in a device's
memory, and `DevicePairs` there numbers modulo a square, whose powers cost half (pair.c). With `secret=True` time and
memory accesses of a power depend only on the sizes of modulus and exponent: GMP's mpz_powm_sec here, a full scan of the
window's table on devices. All else takes a time that depends on the numbers. This code has not been audited.

On devices numbers have `limbs` words of 32 bits, a multiple of 16; a program serves every modulus of that many.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.memory_space import HOST, MemorySpace
from accelerant.errors import ConfigError, MissingDependency, ShapeError, UnsupportedCase
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.host import usable_cores
from accelerant.runtime.ledger import OpRecord, RecordedLaunch, launch, sole_record


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

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} numbers of {int(self.modulus).bit_length()} bits, {self.space.label})"
        )

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


def _on_every_core(run: Callable[[slice], list[Any]], count: int) -> list[Any]:
    """Return run(slice) over the parts of range(count), joined."""
    if (threads := min(usable_cores(), count)) < 2:
        return run(slice(0, count))
    parts = min(count, 4 * threads)  # a core may be busy with something else
    cuts = [count * i // parts for i in range(parts + 1)]
    with ThreadPoolExecutor(
        threads, initializer=lambda: setattr(gmp().get_context(), "allow_release_gil", True)
    ) as pool:
        return list(itertools.chain.from_iterable(pool.map(run, itertools.starmap(slice, itertools.pairwise(cuts)))))


def residues_of(values: Iterable[Any], modulus: Any, space: MemorySpace = HOST) -> Residues:
    """Return numbers from 0 to below an odd modulus as residues in a memory space."""
    if space is HOST:
        return Residues(values, modulus)

    return DeviceResidues.load(values, modulus, space)


class FixedBasePowers:
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

    def __repr__(self) -> str:
        return f"FixedBasePowers({8 * self._bytes} bits, {self._table!r})"

    def power_vartime(self, exponents: Any) -> Residues:
        """Return the base to each exponent, given by words of 32 bits in the table's space, (count, bits / 32)."""
        if self._table.space is not HOST:
            assert isinstance(self._table, DeviceResidues)  # for the type checker: not of HOST
            return self._table.fixed_vartime(exponents)
        digits = exponents.astype("<u4").view(np.uint8).astype(np.int64)
        found = self._table.take(digits[:, 0])
        for i in range(1, self._bytes):
            found = found.times(self._table.take(digits[:, i] + 256 * i))
        return found


# --- devices ----------------------------------------------------------------------------------------------------------
BLOCK = 128  # Most threads per block
TABLE_BYTES = 2**30  # Most bytes of the tables of one launch
_TABLE, _INVERTED_ON_HOST = 16, 16  # Numbers of a power's table; fewest numbers whose inverses take several launches

_ENTRIES = {
    "kernel.c": {
        "bigint_mul": (*("*u32",) * 4, "u32", "i64", "i64"),
        "bigint_add": (*("*u32",) * 4, "i64", "i64"),
        "bigint_pow": (*("*u32",) * 6, "u32", "i64", "i64", "i64"),
        "bigint_fixed_vartime": (*("*u32",) * 4, "u32", "i64", "i64"),
    },
    "pair.c": {
        "bigint_pair_mul": (*("*u32",) * 4, "u32", "i64", "i64"),
        "bigint_pair_from": (*("*u32",) * 4, "u32", "i64", "i64"),
        "bigint_pair_pow": (*("*u32",) * 6, "u32", *("i64",) * 4),
    },
}

_LIMBS_MOST = 512
_U32 = np.dtype(np.uint32)


def limbs_of(modulus: int) -> int:
    """Return the words of a number, which lanes divide; ConfigError above 16384 bits or for an even modulus."""
    bits = max(1, int(modulus).bit_length())
    step = 16 if bits <= 8192 else 32
    if (limbs := -(-bits // (32 * step)) * step) > _LIMBS_MOST or modulus % 2 == 0:
        raise ConfigError(f"a modulus is odd and has at most {32 * _LIMBS_MOST} bits, got {limbs * 32} or an even one")
    return limbs


def lanes_of(limbs: int, backend: str) -> int:
    """Return the threads of a number: on CUDA a power of two up to 32, each with 8 to 16 limbs; elsewhere one."""
    if backend != "cuda":
        return 1
    return next(lanes for lanes in (32, 16, 8, 4, 2) if limbs % lanes == 0 and limbs // lanes >= 8)


@functools.cache
def kernel_source(limbs: int, lanes: int, file: str = "kernel.c") -> KernelSource:
    """Return kernel.c or pair.c for numbers of so many limbs, and threads a number."""
    sizes = f"#define LIMBS {limbs}\n#define LANES {lanes}\n#define BIGINT_BLOCK {BLOCK}\n"
    text = (
        sizes
        + _ptx_row(limbs // lanes)
        + "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("product.h", file))
    )
    return KernelSource(f"bigint_{file[:-2]}_{limbs}_{lanes}", {"portable": text}, _ENTRIES[file])


def _ptx_row(width: int) -> str:
    """Return product.h's BIGINT_PTX_ROW: x factor + low is added to even, odd and top, for an even width."""
    even, odd, x = ([f"%{start + i}" for i in range(width)] for start in (0, width, 2 * width + 3))
    top, low, factor = (f"%{2 * width + i}" for i in range(3))
    lines = [f"add.cc.u32 {even[0]}, {even[0]}, {low};"]
    for words, first in ((odd, 1), (even, 0)):
        for i in range(0, width - 1, 2):
            for part, to in (("lo", words[i]), ("hi", words[i + 1])):
                mad = "mad" if (first, i, part) == (0, 0, "lo") else "madc"
                lines.append(f"{mad}.{part}.cc.u32 {to}, {x[i + first]}, {factor}, {to};")
        lines += [f"addc.cc.u32 {odd[-1]}, {odd[-1]}, 0;"] * (not first) + [f"addc.u32 {top}, {top}, 0;"]
    changed = [f'"+r"({name}[{i}])' for name in ("even", "odd") for i in range(width)] + ['"+r"(top)']
    read = ['"r"(low)', '"r"(factor)', *(f'"r"(x[{i}])' for i in range(width))]
    text = f'"{" ".join(lines)}" : {", ".join(changed)} : {", ".join(read)}'
    return f"#define BIGINT_PTX_ROW(even, odd, top, low, x, factor) asm({text})\n" if width % 2 == 0 else ""


class Modulus:
    """An odd modulus and its constants, as the kernels take them, in a memory space."""

    def __init__(self, modulus: Any, space: MemorySpace) -> None:
        if "portable" not in space.provider.dialects:
            raise UnsupportedCase(f"{space.label} has no kernels for residues: use cpu, cuda or opencl")
        self.value, self.space, self.limbs = gmp().mpz(modulus), space, limbs_of(modulus)
        self.lanes = lanes_of(self.limbs, space.backend)
        radix = gmp().mpz(1) << 32 * self.limbs
        self.inverse = int(-gmp().invert(self.value, 2**32) % 2**32)
        self.words = space.load(words_of([self.value], self.limbs))
        self.one, self.unit = self.words_of(radix), self.words_of(1)

    def words_of(self, value: Any) -> Any:
        """Return the words of value mod n, (1, limbs)."""
        return self.space.load(words_of([gmp().mpz(value) % self.value], self.limbs))

    def per_block(self, count: int) -> int:
        """Return the groups of a block; those of several lanes fill whole warps, which their shuffles name."""
        return min(BLOCK, count if self.lanes == 1 else -(-count * self.lanes // 32) * 32) // self.lanes

    def groups(self, count: int) -> int:
        """Return the groups of threads of a launch: at least one for each number."""
        return -(-count // self.per_block(count)) * self.per_block(count)

    def launch(self, entry: str, arrays: tuple[Any, ...], scalars: tuple[int, ...], count: int) -> None:
        """Launch an entry for some numbers, at least one."""
        source = kernel_source(self.limbs, self.lanes, "pair.c" if entry.startswith("bigint_pair") else "kernel.c")
        blocks, threads = self.groups(count) // self.per_block(count), self.per_block(count) * self.lanes
        launch(self.space, source, entry, blocks, threads, arrays, *scalars, count)

    def record(self, op: str, count: int, products: int) -> OpRecord:
        """Return the ledger's record of an op with so many products for each number."""
        case = f"{count} of {32 * self.limbs} bits"
        return sole_record(
            f"bigint_{op}", "portable", self.space.backend, self.space.label, case,
            size_bytes=3 * 4 * self.limbs * count, operations=2 * self.limbs**2 * products * count,
        )  # fmt: skip


modulus_at = functools.lru_cache(maxsize=64)(Modulus)


class DeviceResidues(Residues):
    """Residues as words (count, limbs), in Montgomery form, on a device."""

    def __init__(self, words: Any, modulus: Modulus) -> None:
        self.words, self._modulus = words, modulus
        self.modulus, self.space = modulus.value, modulus.space

    @classmethod
    def load(cls, values: Iterable[Any], modulus: Any, space: MemorySpace) -> DeviceResidues:
        """Copy numbers to a device; UnsupportedCase if its backend has no kernels in portable C."""
        return cls.of_words(space.load(words_of(values, limbs_of(modulus))), modulus, space)

    @classmethod
    def of_words(cls, words: Any, modulus: Any, space: MemorySpace, factor: Any = 1) -> DeviceResidues:
        """Return factor times numbers given by words in the space, (count, up to limbs), of any content."""
        n = modulus_at(gmp().mpz(modulus), space)
        if words.shape[1] < n.limbs:
            words = space.pad(words, 1, n.limbs)
        return cls(words, n).times_words(n.words_of(gmp().mpz(factor) << 64 * n.limbs), 0)

    def __len__(self) -> int:
        return int(self.words.shape[0])

    def ints(self) -> list[Any]:
        """Return the numbers as gmpy2's integers, copied to the host."""
        return ints_of(self.space.store(self.plain()))

    def plain(self) -> Any:
        """Return the words of the numbers themselves, (count, limbs)."""
        return self.times_words(self._modulus.unit, 0).words

    def plus(self, value: Any) -> DeviceResidues:
        """Add one number."""
        return self.plus_words(self._modulus.words_of(gmp().mpz(value) << 32 * self._modulus.limbs), 0)

    def take(self, indices: npt.NDArray[np.int64]) -> DeviceResidues:
        """Return the numbers at indices, (m,)."""
        if not len(indices):
            return DeviceResidues(self.space.load(np.zeros((0, self._modulus.limbs), _U32)), self._modulus)
        return DeviceResidues(self.space.getitem(self.words, (np.array(indices),)), self._modulus)

    def joined(self, other: Residues) -> DeviceResidues:
        """Append other numbers."""
        assert isinstance(other, DeviceResidues)  # for the type checker: operands are of one space
        return DeviceResidues(self.space.joined(self.words, other.words), self._modulus)

    def times(self, other: Residues) -> DeviceResidues:
        """Multiply number by number."""
        assert isinstance(other, DeviceResidues)  # for the type checker: operands are of one space
        return self.times_words(other.words, 1)

    def times_words(self, words: Any, step: int) -> DeviceResidues:
        """Multiply by words of as many numbers, or with step 0 of one, and divide by R = 2^(32 limbs)."""
        return self._with("mul", words, step)

    def plus_words(self, words: Any, step: int) -> DeviceResidues:
        """Add words of as many numbers, or with step 0 of one."""
        return self._with("add", words, step)

    def _with(self, op: str, words: Any, step: int) -> DeviceResidues:
        n, count = self._modulus, len(self)
        found = self.space.empty((count, n.limbs), _U32)
        with RecordedLaunch(n.record(op, count, int(op == "mul")), self.space.provider, self.space.index):
            if count:
                scalars = (n.inverse, step) if op == "mul" else (step,)
                n.launch(f"bigint_{op}", (self.words, words, found, n.words), scalars, count)
        return DeviceResidues(found, n)

    def inverse(self) -> DeviceResidues:
        """Invert each number: products of two halves, with the inverses of which the host begins."""
        if len(self) < _INVERTED_ON_HOST:
            found = super().inverse()
            assert isinstance(found, DeviceResidues)  # for the type checker: an inverse is of its space
            return found
        half, index = len(self) // 2, np.arange(len(self))
        x, y, rest = (self.take(part) for part in (index[:half], index[half : 2 * half], index[2 * half :]))
        found = x.times(y).joined(rest).inverse()
        both = found.take(index[:half])
        return both.times(y).joined(both.times(x)).joined(found.take(index[half : len(found)]))

    def power(self, exponents: Sequence[int], *, secret: bool = False) -> DeviceResidues:
        """Raise each number to its exponent, or all to the only one; the time depends on the largest one's size."""
        check_exponents(self, exponents, secret)
        n, count, space = self._modulus, len(self), self.space
        size = max(1, *(-(-int(e).bit_length() // 32) for e in exponents))
        most, found = max(1, TABLE_BYTES // (4 * _TABLE * n.limbs)), self.take(np.arange(0))
        with RecordedLaunch(n.record("pow", count, 40 * size), space.provider, space.index):
            for at in range(0, count, most):
                x = self if count <= most else self.take(np.arange(at, min(count, at + most)))
                each = exponents if len(exponents) == 1 else exponents[at : at + most]
                z = space.empty((len(x), n.limbs), _U32)
                table = space.empty((n.groups(len(x)) * _TABLE, n.limbs), _U32)
                arrays = (x.words, space.load(words_of(each, size)), z, table, n.words, n.one)
                n.launch("bigint_pow", arrays, (n.inverse, size, int(len(exponents) > 1)), len(x))
                part = DeviceResidues(z, n)
                found = found.joined(part) if len(found) else part
        return found

    def fixed_vartime(self, exponents: Any) -> DeviceResidues:
        """Return powers by this table (see FixedBasePowers), for exponents of words in the space, (count, words)."""
        n, (count, words) = self._modulus, exponents.shape
        found = self.space.empty((count, n.limbs), _U32)
        with RecordedLaunch(n.record("fixed", count, 4 * words), self.space.provider, self.space.index):
            if count:
                arrays = (self.words, exponents, found, n.words)
                n.launch("bigint_fixed_vartime", arrays, (n.inverse, words), count)
        return DeviceResidues(found, n)


def words_of(values: Iterable[Any], limbs: int) -> npt.NDArray[Any]:
    """Return numbers as words, (count, limbs)."""
    data = b"".join(value.to_bytes(4 * limbs, "little") for value in values)
    return np.frombuffer(data, "<u4").astype(np.uint32).reshape(-1, limbs)


def ints_of(words: npt.NDArray[Any]) -> list[Any]:
    """Return words, (count, limbs), as gmpy2's integers."""
    data, size, mpz = np.ascontiguousarray(words, "<u4").tobytes(), 4 * words.shape[1], gmp().mpz
    return [mpz.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]


_SECRET_WINDOW, _PUBLIC_WINDOW = 4, 5  # Bits of an exponent for each product: a table that is read whole is small


class DevicePairs:
    """Numbers modulo n^2 as words (count, 2 limbs) of pairs, in Montgomery form: low + high n."""

    def __init__(self, words: Any, modulus: Modulus) -> None:
        self.words, self._n = words, modulus
        self.space = modulus.space

    @classmethod
    def of_words(cls, words: Any, modulus: Any, space: MemorySpace) -> DevicePairs:
        """Return numbers from 0 on, given by words (count, any) in the space, modulo the square of a number."""
        n, (count, width) = modulus_at(gmp().mpz(modulus), space), words.shape
        chunks = -(-width // n.limbs)
        radix = gmp().mpz(1) << 32 * n.limbs
        constants = space.load(np.concatenate([_words(n, radix ** (k + 2)) for k in range(chunks)]))
        found = space.empty((count, 2 * n.limbs), _U32)
        padded = words if width == chunks * n.limbs else space.pad(words, 1, chunks * n.limbs)
        with RecordedLaunch(n.record("pair_from", count, 3 * chunks), space.provider, space.index):
            if count:
                n.launch("bigint_pair_from", (padded, constants, found, n.words), (n.inverse, chunks), count)
        return cls(found, n)

    def __len__(self) -> int:
        return int(self.words.shape[0])

    def times(self, factor: Any, *, plain: bool = False) -> DevicePairs:
        """Multiply by one number; `plain` gives the pairs of the products themselves, not their Montgomery form."""
        n, count, space = self._n, len(self), self.space
        radix = 1 if plain else gmp().mpz(1) << 32 * n.limbs
        found, constant = space.empty((count, 2 * n.limbs), _U32), space.load(_words(n, factor * radix))
        with RecordedLaunch(n.record("pair_mul", count, 3), space.provider, space.index):
            if count:
                n.launch("bigint_pair_mul", (self.words, constant, found, n.words), (n.inverse, 0), count)
        return DevicePairs(found, n)

    def power(self, exponent: Any, *, secret: bool = False) -> DevicePairs:
        """Raise to an exponent from 0 on; with `secret`, time and addresses depend on the sizes only."""
        n, space, window = self._n, self.space, _SECRET_WINDOW if secret else _PUBLIC_WINDOW
        digits = -(-max(1, int(exponent).bit_length()) // window)
        words = space.load(words_of([gmp().mpz(exponent)], window * digits // 32 + 2))
        one = space.load(_words(n, gmp().mpz(1) << 32 * n.limbs))
        most = max(1, (TABLE_BYTES >> window) // (8 * n.limbs))
        parts = []
        with RecordedLaunch(n.record("pair_pow", len(self), 2 * window * digits), space.provider, space.index):
            for at in range(0, len(self), most):
                x = self.words if len(self) <= most else space.getitem(self.words, (slice(at, at + most),))
                count = x.shape[0]
                z = space.empty((count, 2 * n.limbs), _U32)
                table = space.empty((n.groups(count) << window, 2 * n.limbs), _U32)
                arrays = (x, words, z, table, n.words, one)
                n.launch("bigint_pair_pow", arrays, (n.inverse, digits, window, int(secret)), count)
                parts.append(z)
        found = parts[0] if parts else self.words
        for part in parts[1:]:
            found = space.joined(found, part)
        return DevicePairs(found, n)

    def half(self, index: int) -> Any:
        """Return the words (count, limbs) of low (0) or high (1)."""
        limbs = self._n.limbs
        return self.space.getitem(self.words, (slice(None), slice(index * limbs, (index + 1) * limbs)))

    def into(self, modulus: Any, factor: Any = 1) -> DeviceResidues:
        """Return factor times the numbers, of pairs that are not in Montgomery form, modulo another number."""
        low, high = (DeviceResidues.of_words(self.half(i), modulus, self.space, (factor, factor * self._n.value)[i])
                     for i in range(2))  # fmt: skip
        return low.plus_words(high.words, 1)


def _words(n: Modulus, value: Any) -> Any:
    """Return the words of value mod n^2 as a pair, (1, 2 limbs)."""
    high, low = divmod(gmp().mpz(value) % n.value**2, n.value)
    return words_of([low, high], n.limbs).reshape(1, -1)
