"""The arithmetic of BFV on words in a device's memory: parameters, encoding, products, key switching, phases.

A ciphertext is (batch, 2, k, n) words: polynomials c0 and c1 mod k data primes, coefficients in natural order, with

    c0 + c1 s = round(Q m / t) + noise        mod Q

Keys are in the transformed domain of algebra.ntt.rns. Everything is exact modulo Q but for roundings:

    product         the polynomials of both factors are extended from Q to Q B, B > 4 t n Q, and multiplied there;
                    t x / Q is rounded in B, as (t x - [t x]_Q) / Q, and converted back to Q, exactly by the size of B
    key switching   one digit for each data prime, under a key mod P Q; the sum divided by P and rounded

Source: Fan and Vercauteren 2012, eprint 2012/144, sections 4 and 5; in a residue number system: Halevi, Polyakov and
Shoup, CT-RSA 2019, eprint 2018/117, sections 2 to 4; key switching: the same, section 4.5, with one extra prime P as in
Gentry, Halevi and Smart, CRYPTO 2012, eprint 2012/099, section 3.1. Slots: Smart and Vercauteren 2014, eprint 2011/133.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.memory_space import HOST, MemorySpace
from accelerant.algebra.field.parameters import is_prime
from accelerant.algebra.ntt.rns import RnsPrimes, primes_below
from accelerant.errors import ConfigError
from accelerant.privacy.random import SecureStream
from accelerant.runtime.files import clipped
from accelerant.runtime.ledger import OpRecord, RecordedLaunch, sole_record

MAX_LOG_Q = {
    128: {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881},
    192: {1024: 19, 2048: 37, 4096: 75, 8192: 152, 16384: 305, 32768: 611},
    256: {1024: 14, 2048: 29, 4096: 58, 8192: 118, 16384: 237, 32768: 476},
}
"""Security in bits, n -> the most bits of the modulus, that of key switching included: table 1 of the Homomorphic
Encryption Security Standard, version 1.1 (Albrecht et al., HomomorphicEncryption.org, November 2018), for classical
attacks (BKZ.sieve), a secret uniform in {-1, 0, 1}, and errors of standard deviation 3.2."""

_PRIME_BITS = (27, 30)  # Fewest and most bits of a data prime: those of algebra.ntt.rns
_SCRATCH_MOST_BYTES = 16 * 1024**2  # Size of the largest array that is kept for the next operation

Words = npt.NDArray[np.uint32]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EncryptionParameters:
    """Parameters of the published table.

    ConfigError for what the table does not have, or too small a modulus for t.
    """

    n: int  # degree of the polynomials and number of slots
    plain_modulus: int  # t, a prime that is 1 mod 2 n, below 2^30
    security: int = 128  # 128, 192 or 256 bits against classical attacks

    def __post_init__(self) -> None:
        """Check them."""
        n, t = self.n, self.plain_modulus
        if not isinstance(self.security, int) or self.security not in MAX_LOG_Q:
            raise ConfigError(f"security must be {', '.join(map(str, MAX_LOG_Q))} bits, got {clipped(self.security)}")
        if not isinstance(n, int) or n not in MAX_LOG_Q[self.security]:
            known = ", ".join(map(str, MAX_LOG_Q[self.security]))
            raise ConfigError(f"n must be in the standard's table, {known}; got {clipped(n)}")
        if not isinstance(t, int) or not 2 * n < t < 1 << 30 or (t - 1) % (2 * n) or not is_prime(t):
            raise ConfigError(f"plain_modulus must be a prime below 2^30 that is 1 mod {2 * n}, got {clipped(t)}")
        most = MAX_LOG_Q[self.security][n]
        count, bits = self._division()
        if count < 2 or (count - 1) * bits < t.bit_length() + n.bit_length() + 6:
            raise ConfigError(
                f"the standard's table has at most {most} bits for n = {n} and {self.security} bits of security; "
                f"{max(0, count - 1) * bits} of them are for data, too few for plain_modulus {t}: take a larger n"
            )

    def _division(self) -> tuple[int, int]:
        """Return the number of primes, with that of key switching, and their bits: few primes, most bits for data."""
        most, (low, high) = MAX_LOG_Q[self.security][self.n], _PRIME_BITS
        choices = [(count, min(high, most // count)) for count in range(max(1, most // high), most // low + 1)]
        choices = [(count, bits) for count, bits in choices if bits >= low]
        best = max(((count - 1) * bits for count, bits in choices), default=0)
        return next(((count, bits) for count, bits in choices if (count - 1) * bits >= 0.95 * best), (0, 0))

    @property
    @functools.lru_cache(maxsize=16)  # noqa: B019  parameters are few
    def primes(self) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """The data primes, the key-switching prime, and the primes of products' auxiliary base."""
        (count, bits), n, t = self._division(), self.n, self.plain_modulus
        special, *data = (p for p in primes_below(bits, n, count + 1) if p != t)
        data = data[: count - 1]
        needed = math.prod(data) * 4 * t * n
        auxiliary: list[int] = []
        for p in primes_below(30, n, 2 * count + 6):
            if math.prod(auxiliary) <= needed and p not in (special, t, *data):
                auxiliary.append(p)
        return tuple(data), special, tuple(auxiliary)


def residues(values: Integers, primes: tuple[int, ...]) -> Words:
    """Return (..., primes, n) from signed integers (..., n), magnitudes below all primes: no branch depends on them."""
    moduli, small = np.array(primes, np.int32)[:, None], values.astype(np.int32)[..., None, :]
    found: Words = (small + moduli * (small < 0)).view(np.uint32)
    return found


def centered(values: npt.NDArray[Any], modulus: int) -> Integers:
    """Return the representatives of least absolute value of numbers from 0 to below an odd modulus."""
    signed = values.astype(np.int64)
    return signed - modulus * (signed > modulus // 2)


def ternary(stream: SecureStream, *shape: int) -> Integers:
    """Draw uniformly from {-1, 0, 1}; the words of 2^32 that are no multiple of 3 are rejected."""
    count, words = math.prod(shape), np.empty(0, np.uint32)
    while len(words) < count:
        more = stream.words(count - len(words)).numpy().view(np.uint32)
        words = np.concatenate((words, more[more != 2**32 - 1]))
    return (words % np.uint32(3)).astype(np.int64).reshape(shape) - 1


_COIN_BITS = 21


def error_polynomials(stream: SecureStream, *shape: int) -> Integers:
    """Draw from the centered binomial distribution of 2 x 21 bits, standard deviation 3.24, in constant time."""
    words = stream.words(2 * math.prod(shape)).numpy().view(np.uint32) >> np.uint32(32 - _COIN_BITS)
    words -= words >> 1 & 0x55555555  # their bits set; NumPy 1 has no bitwise_count
    words = (words & 0x33333333) + (words >> 2 & 0x33333333)
    heads = ((words + (words >> 4) & 0x0F0F0F0F) * np.uint32(0x01010101) >> 24).astype(np.int64)
    differences: Integers = heads[: len(heads) // 2] - heads[len(heads) // 2 :]
    return differences.reshape(shape)


def uniform_rows(seed: bytes, count: int, primes: tuple[int, ...], n: int) -> Words:
    """Expand 32 bytes to (count, primes, n) uniform residues, by rejection: words of the primes' bits from ChaCha20."""
    stream = SecureStream(seed)
    rows = np.empty((count, len(primes), n), np.uint32)
    for i in range(count):
        for row, p in zip(rows[i], primes, strict=True):
            filled, shift = 0, np.uint32(32 - p.bit_length())
            while filled < n:
                words = stream.words(n).numpy().view(np.uint32) >> shift
                words = words[words < p][: n - filled]
                row[filled : filled + len(words)] = words
                filled += len(words)
    return rows


class Scheme:
    """Parameters with their tables in one device's memory. Rows of `rns`: P, the data primes, B, t."""

    def __init__(self, space: MemorySpace, parameters: EncryptionParameters) -> None:
        self.space, self.parameters = space, parameters
        self.n, self.t = parameters.n, parameters.plain_modulus
        self.data, self.special, self.auxiliary = parameters.primes
        self.k, self.extra = len(self.data), len(self.auxiliary)
        self.q = math.prod(self.data)
        self._kept = threading.local()
        self.rns = rns = RnsPrimes(space, self.n, (self.special, *self.data, *self.auxiliary, self.t))
        data, special, auxiliary, t = self.data, (self.special,), self.auxiliary, self.t
        self._extend = rns.conversion(data, auxiliary)
        self._scale = rns.conversion(data, auxiliary, scale=t, divide=self.q, out=-1, fused=t)
        self._back = rns.conversion(auxiliary, data)
        self._digits = [rns.conversion((q,), (self.special, *data)) for q in data]
        self._down = rns.conversion(special, data, divide=self.special, out=-1, fused=1)
        self._plain = rns.conversion(data, (t,), scale=t, divide=self.q, out=-1)

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def of(space: MemorySpace, parameters: EncryptionParameters) -> Scheme:
        """Return the scheme of some parameters on a device, kept for the next call."""
        return Scheme(space, parameters)

    # --- estimates of the noise budget, in bits ----------------------------------------------------------------------
    @property
    def fresh_bits(self) -> float:
        """Return that of a new ciphertext: 7 standard deviations, each 3.24 sqrt(4 n / 3 + 1), of e0 u + e1 + e2 s."""
        return math.log2(self.q / self.t) - 1 - math.log2(7 * 3.24 * math.sqrt(4 * self.n / 3 + 1))

    @property
    def switched_bits(self) -> float:
        """Return that of a key switch alone: digits of n coefficients below each prime, over P."""
        noise = 7 * math.sqrt(self.k * self.n) * 3.24 * max(self.data) / self.special + 7 * math.sqrt(self.n)
        return math.log2(self.q / self.t) - 1 - math.log2(noise)

    def product_bits(self, x: float, y: float) -> float:
        """Return that of a product, in which the noise of each factor grows by about t n at most."""
        return min(min(x, y) - math.log2(self.t) - math.log2(self.n), self.switched_bits) - 1

    def plain_product_bits(self, coefficients: Integers) -> float:
        """Return the bits that products with plain polynomials (..., n) take: their norm, or 7 standard deviations."""
        size = np.abs(coefficients.astype(np.float64))
        growth = np.minimum(size.sum(-1), 7 * np.sqrt((size**2).sum(-1))).max(initial=1)
        return math.log2(growth) + 1

    # --- plaintexts, on the host -------------------------------------------------------------------------------------
    def encode(self, values: Integers) -> Words:
        """Return the coefficients mod t, (..., n), of the polynomials with these numbers (..., n) in their slots."""
        host = Scheme.of(HOST, self.parameters)
        points = np.empty(values.shape, np.uint32)
        points[..., slot_points(self.n)] = values % self.t
        host.rns.transform(points, 1 + self.k + self.extra, 1, inverse=True)
        return points

    def decode(self, coefficients: Words) -> Integers:
        """Return the numbers in the slots, between -t/2 and t/2, of polynomials of coefficients mod t, (..., n)."""
        host, points = Scheme.of(HOST, self.parameters), coefficients.copy()
        host.rns.transform(points, 1 + self.k + self.extra, 1)
        return centered(points[..., slot_points(self.n)], self.t)

    def scaled(self, coefficients: Words) -> npt.NDArray[np.uint64]:
        """Return round(Q m / t) mod each data prime, (..., k, n)."""
        m, t = coefficients[..., None, :].astype(np.uint64), np.uint64(self.t)
        whole = np.array([self.q // self.t % p for p in self.data], np.uint64)[:, None]
        rounded = (np.uint64(self.q % self.t) * m + t // np.uint64(2)) // t
        return (whole * m + rounded) % np.array(self.data, np.uint64)[:, None]

    # --- ciphertexts -------------------------------------------------------------------------------------------------
    def copy(self, x: Any) -> Any:
        """Return a copy of ciphertexts."""
        return self.rns.galois(x, 1, 1, self.k)

    def times_keys(self, u: Any, keys: Any) -> Any:
        """Return (batch, 2, k, n), polynomials (batch, k, n) times both of a public key; u is overwritten."""
        k, batch = self.k, u.shape[0]
        z = self.rns.empty(batch, 2, k)
        self.rns.transform(u, 1, k)
        self.rns.dot(u, keys, z, 1, k, batch=batch, parts=2, x_at=(0, k, 0), y_at=(0, 0, k, 0), z_at=(0, 2 * k, k))
        self.rns.transform(z, 1, k, inverse=True, products=True)
        return z

    def times_plain(self, x: Any, plain: Any) -> Any:
        """Return ciphertexts times polynomials, (batch, k, n) or one for all, which are overwritten."""
        k, batch = self.k, x.shape[0]
        y, z = self.copy(x), self.rns.empty(*x.shape[:-1])
        self.rns.transform(y, 1, k)
        self.rns.transform(plain, 1, k)
        step = k if plain.shape[0] > 1 else 0
        at: dict[str, Any] = {"x_at": (0, step, 0), "y_at": (0, 2 * k, k, 0), "z_at": (0, 2 * k, k)}
        self.rns.dot(plain, y, z, 1, k, batch=batch, parts=2, **at)
        self.rns.transform(z, 1, k, inverse=True, products=True)
        return z

    def multiply(self, x: Any, y: Any, key: Any) -> Any:
        """Return the products of ciphertexts, relinearized by the key for s^2."""
        factors = (x,) if x is y else (x, y)
        return self._in_turn("bfv_multiply", self._multiply, key, *factors)

    def _in_turn(self, name: str, operation: Callable[..., Any], key: Any, *operands: Any) -> Any:
        """Return an operation's results, on the CPU one ciphertext after the other: the arrays of one fit in caches."""
        space, batch = self.space, operands[0].shape[0]
        with RecordedLaunch(_record(space, name, self.n, self.k, batch), space.provider, space.index):
            if space is not HOST or batch < 2:
                return operation(key, *operands)
            return np.concatenate([operation(key, *(x[i : i + 1] for x in operands)) for i in range(batch)])

    def _scratch(self, name: str, *rows: int) -> Any:
        """Return undefined words: on the CPU the same each time, since the first access to new memory takes longer."""
        size = math.prod(rows) * self.n * 4
        if self.space is not HOST or size > _SCRATCH_MOST_BYTES:
            return self.rns.empty(*rows)
        kept: dict[Any, Any] = self._kept.__dict__
        if (name, rows) not in kept:
            kept[name, rows] = self.rns.empty(*rows)
        return kept[name, rows]

    def _multiply(self, key: Any, x: Any, y: Any = None) -> Any:
        rns, k, extra, batch = self.rns, self.k, self.extra, x.shape[0]
        rows = k + extra
        factors = []
        for name, factor in ("x", x), ("y", y):
            if factor is None:
                continue
            wide = self._scratch(name, batch, 2, rows)
            rns.convert(self._extend, factor, wide, x_at=(k, 0), z_at=(rows, k), keep=0)
            rns.transform(wide, 1, rows)
            factors.append(wide)
        a, b, product = factors[0], factors[-1], self._scratch("product", batch, 3, rows)
        for part, terms, x_0, y_0 in ((0, 1, 0, 0), (1, 2, 0, rows), (2, 1, rows, rows)):
            at: dict[str, Any] = {
                "x_at": (x_0, 2 * rows, rows),
                "y_at": (y_0, 2 * rows, 0, -rows),
                "z_at": (part * rows, 3 * rows, 0),
            }
            rns.dot(a, b, product, 1, rows, batch=batch, terms=terms, **at)
        rns.transform(product, 1, rows, inverse=True, products=True)
        scaled = self._scratch("scaled", batch, 3, extra)
        rns.convert(self._scale, product, scaled, x_at=(rows, 0), a=product, a_at=(rows, k), z_at=(extra, 0))
        pair, square = self._scratch("pair", batch, 2, k), self._scratch("square", batch, 1, k)
        for part, z, z_at in ((0, pair, (2 * k, 0)), (1, pair, (2 * k, k)), (2, square, (k, 0))):
            rns.convert(self._back, scaled, z, x_at=(3 * extra, part * extra), z_at=z_at)
        return rns.add(pair, self.switched(square, (k, 0), key), 1, k)

    def automorphism(self, x: Any, element: int, key: Any) -> Any:
        """Return encryptions of m(X^element), by the key for s(X^element)."""
        return self._in_turn("bfv_rotate", functools.partial(self._automorphism, element), key, x)

    def _automorphism(self, element: int, key: Any, x: Any) -> Any:
        moved = self.rns.galois(x, element, 1, self.k)
        return self.rns.add(self.switched(moved, (2 * self.k, self.k), key), moved, 1, self.k, alternate=True)

    def switched(self, x: Any, x_at: tuple[int, int], key: Any) -> Any:
        """Return scratch (batch, 2, k, n): encryptions of polynomials times the secret of a key (k, 2, 1 + k, n)."""
        rns, k = self.rns, self.k
        rows = k + 1
        batch = math.prod(x.shape[:-1]) // x_at[0]
        digits = self._scratch("digits", batch, k, rows)
        for i, digit in enumerate(self._digits):
            rns.convert(digit, x, digits, x_at=(x_at[0], x_at[1] + i), z_at=(k * rows, i * rows))
        rns.transform(digits, 0, rows)
        total = self._scratch("total", batch, 2, rows)
        at: dict[str, Any] = {"x_at": (0, k * rows, rows), "y_at": (0, 0, rows, 2 * rows), "z_at": (0, 2 * rows, rows)}
        rns.dot(digits, key, total, 0, rows, batch=batch, terms=k, parts=2, **at)
        rns.transform(total, 0, rows, inverse=True, products=True)
        z = self._scratch("switched", batch, 2, k)
        return rns.convert(self._down, total, z, x_at=(rows, 0), a=total, a_at=(rows, 1), z_at=(k, 0))

    # --- with the secret ---------------------------------------------------------------------------------------------
    def phase(self, x: Any, secret: Any) -> Any:
        """Return (batch, 1, k, n), c0 + c1 s; secret: (2, k, n), the transforms of 1 and s."""
        k, batch = self.k, x.shape[0]
        y, z = self.copy(x), self.rns.empty(batch, 1, k)
        self.rns.transform(y, 1, k)
        self.rns.dot(y, secret, z, 1, k, batch=batch, terms=2, x_at=(0, 2 * k, k), y_at=(0, 0, 0, k), z_at=(0, k, 0))
        self.rns.transform(z, 1, k, inverse=True, products=True)
        return z

    def rounded(self, phase: Any) -> Words:
        """Return round(t phase / Q) mod t, (batch, n), on the host."""
        z = self.rns.empty(phase.shape[0], 1)
        self.rns.convert(self._plain, phase, z, x_at=(self.k, 0), z_at=(1, 0))
        words: Words = self.space.store(z)
        return words.reshape(-1, self.n)

    def noise_fraction(self, phase: Words) -> npt.NDArray[np.float64]:
        """Return the largest |t phase mod Q| / Q of each polynomial's coefficients, to 2^-28: at most 1/2."""
        total = np.zeros((len(phase), self.n), np.uint64)
        for i, q in enumerate(self.data):
            c = self.t * pow(self.q // q, -1, q) % q
            fraction = np.uint64((c << 64) // q)  # times 2^64: products modulo 2^64 are fractions modulo 1
            total += phase[:, 0, i].astype(np.uint64) * fraction
        signed = total.view(np.int64)
        ends = signed.max(-1, initial=0), -signed.min(-1, initial=0).astype(np.float64)
        largest: npt.NDArray[np.float64] = np.maximum(*ends) / 2.0**64
        return largest

    def noise(self, phase: Words) -> list[int]:
        """Return the largest |t phase mod Q| of each polynomial's coefficients, exactly."""
        total = np.zeros((len(phase), self.n), object)
        for i, q in enumerate(self.data):
            share = self.q // q
            total += phase[:, 0, i].astype(object) * (self.t * pow(share, -1, q) % q * share)
        total %= self.q
        return [int(max(row)) for row in np.minimum(total, self.q - total)]


@functools.lru_cache(maxsize=1024)
def _record(space: MemorySpace, name: str, n: int, k: int, batch: int) -> OpRecord:
    dialect = next(name for name in ("llvm", "portable") if name in space.provider.dialects)
    case, size = f"{batch}x2x{k}x{n}", 3 * 8 * batch * k * n
    return sole_record(name, dialect, space.backend, space.label, case, size_bytes=size)


@functools.cache
def slot_points(n: int) -> npt.NDArray[np.int64]:
    """Return the position of each slot among transformed coefficients: slot i of the first half is X = psi^(3^i).

    Slot n/2 + i is X = psi^(-3^i). So X -> X^3 moves the slots of each half by one place, and X -> X^-1 exchanges the
    halves. The transform has psi^(2 bitrev(j) + 1) at position j.
    """
    bits = n.bit_length() - 1
    exponents = [pow(3, i, 2 * n) for i in range(n // 2)]
    exponents += [2 * n - exponent for exponent in exponents]
    return np.array([int(f"{(e - 1) // 2:0{bits}b}"[::-1], 2) for e in exponents])
