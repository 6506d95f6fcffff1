"""Paillier's additively homomorphic encryption of tensors: sums of ciphertexts, products with plain numbers.

>>> public, private = keygen()
>>> private.decrypt(public.encrypt(torch.tensor([1.5, -2.0])) * 2 + 1)
tensor([ 4., -3.])

Scheme, with g = n + 1: c = (1 + m n) r^n mod n^2, r uniform in Z*_n and fresh for each ciphertext; decryption modulo
p^2 and q^2. A number x is round(x 16^-e), negative ones as n minus their magnitude. Each tensor has a bound of its
magnitudes, and an operation whose bound would pass n/3 raises RangeError: nothing wraps around.

Public: shape, dtype, the exponent and the bound of an EncryptedTensor, never from encrypted values. Security: IND-CPA
under the decisional composite residuosity assumption, 128 bits at 3072 bits of n; malleable, not post-quantum, and a
key shared by several clients protects none from a client that colludes with the server. Not constant-time: conversion
of values, look-ups of the mode `fast`, products with plain numbers; on the host also randomness as integers, GMP's
reduction and recombination, r^n. Powers with exponents from the private key have `secret=True`. Not audited.

Sources: Paillier 1999, EUROCRYPT '99, LNCS 1592, scheme 1 and section 7; Damgard, Jurik and Nielsen 2010,
International Journal of Information Security 9, section 4.2 (`fast`).
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from accelerant._renamed import understood_arguments
from accelerant.algebra import bigint
from accelerant.algebra.bigint import Residues, gmp
from accelerant.algebra.field.memory_space import HOST, MemorySpace, space_at
from accelerant.errors import (
    ConfigError,
    FormatError,
    MissingDependency,
    RangeError,
    ShapeError,
    UnsupportedCase,
    UnsupportedDtype,
)
from accelerant.privacy.he import encoding
from accelerant.privacy.he.encoding import KINDS, Origin, SecretKey, head_of, host_array, open_box, reader_of, sealed
from accelerant.privacy.messages import shape_bytes
from accelerant.privacy.random import SecureStream
from accelerant.runtime.files import clipped, read_regular
from accelerant.runtime.registry import DeviceLike

__all__ = ["EncryptedTensor", "PrivateKey", "PublicKey", "keygen"]

BITS_LEAST, BITS_MOST = 2048, 8192
_stream = SecureStream()


# --- keys ------------------------------------------------------------------------------------------------------------
@understood_arguments(n_length="bits", key_size="bits")
def keygen(bits: int = 3072, *, insecure: bool = False) -> tuple[PublicKey, PrivateKey]:
    """Generate a key pair, with primes from cryptography's RSA keys.

    The primes are 3 mod 4 with gcd(p - 1, q - 1) = 2, as the mode `fast` needs.

    Args:
        bits: of n, even, 2048 to 8192; 2048 for compatibility, 3072 for 128 bits of security.
        insecure: allow 1024 bits or more, for tests.

    Raises:
        ConfigError: another number of bits.
        MissingDependency: cryptography or gmpy2 is not installed (extra `privacy`).
    """
    least, gmpy2 = 1024 if insecure else BITS_LEAST, gmp()
    if type(bits) is not int or bits % 2 or not least <= bits <= BITS_MOST:
        raise ConfigError(f"a Paillier key has an even number of bits from {least} to {BITS_MOST}, got {clipped(bits)}")
    try:
        from cryptography.hazmat.primitives.asymmetric import rsa
    except ImportError:
        raise MissingDependency("cryptography", "privacy", "key generation") from None
    kept: list[int] = []
    while True:
        numbers = rsa.generate_private_key(public_exponent=65537, key_size=bits).private_numbers()
        for p in (numbers.p, numbers.q):
            for q in kept if p % 4 == 3 else ():
                apart = abs(p - q).bit_length() > bits // 2 - 100  # FIPS 186-5, A.1.1
                if apart and (p * q).bit_length() == bits and gmpy2.gcd(p - 1, q - 1) == 2:
                    private = PrivateKey(p, q, insecure=insecure)
                    return private.public, private
            if p % 4 == 3:
                kept.append(p)


class PublicKey:
    """The public key n.

    Attributes:
        n: product of two primes.
        blum: whether its maker states that both are 3 mod 4 with gcd(p - 1, q - 1) = 2, which the mode `fast` needs.
        max_int: largest magnitude of an encoded number, n // 3 - 1, as in phe.
        fingerprint: SHA-256 of n, 32 bytes, which ciphertexts carry.
    """

    def __init__(self, n: int, *, blum: bool = False, insecure: bool = False) -> None:
        n = operator.index(n)
        if n % 2 == 0 or n < 15 or (not insecure and not BITS_LEAST <= n.bit_length() <= BITS_MOST):
            raise FormatError(f"n must be odd, of {BITS_LEAST} to {BITS_MOST} bits; got one of {n.bit_length()} bits")
        if blum and n % 4 != 1:
            raise FormatError("n is not 1 mod 4, so its primes are not both 3 mod 4")
        self.n, self.blum, self.max_int = n, blum, n // 3 - 1
        self.fingerprint = hashlib.sha256(self.n.to_bytes(self.n_bytes, "big")).digest()

    @property
    def n_bytes(self) -> int:
        """Bytes of n."""
        return -(-self.n.bit_length() // 8)

    @functools.cached_property
    def n_square(self) -> Any:
        """n^2, the modulus of ciphertexts."""
        return gmp().mpz(self.n) ** 2

    def __repr__(self) -> str:
        return f"PublicKey({self.n.bit_length()} bits, {self.fingerprint[:4].hex()})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and self.n == other.n

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(PublicKey, blum=self.blum, insecure=True), (self.n,)

    def to_bytes(self) -> bytes:
        """Return the key as bytes, to be sent over a channel that authenticates them."""
        return head_of("PAI", "n") + bytes([self.blum]) + self.n.to_bytes(self.n_bytes, "big")

    @classmethod
    def from_bytes(cls, data: bytes, *, insecure: bool = False) -> PublicKey:
        """Return the key that to_bytes gave; FormatError for other bytes."""
        reader = reader_of(data, "PAI", "n")
        blum, n = reader.number(1, 1), reader.rest()
        if len(n) > BITS_MOST // 8:
            raise FormatError(f"n has at most {BITS_MOST} bits, the message has {len(n)} bytes of it")
        return cls(int.from_bytes(n, "big"), blum=bool(blum), insecure=insecure)

    def encrypt(
        self, x: Any, *, exponent: int | None = None, limit: float | None = None, pack: bool = False,
        fast: bool = False, device: DeviceLike = None,
    ) -> EncryptedTensor:  # fmt: skip
        """Encrypt an array, each element with fresh randomness: the operating system's, on CUDA ChaCha20 under its key.

        Args:
            x: torch, NumPy, CuPy or JAX array of integers or floats, any shape; numbers and lists become NumPy's.
            exponent: the precision is 16^exponent; 0 for integers, for floats -6 (float16), -16 (float32), -24.
            limit: public bound of the magnitudes, by default the dtype's: a smaller one leaves room for more products.
            pack: put several values of 24 bits into a ciphertext: 66 in 2048 bits. Packed tensors add up 128 times, and
                take plain scalars that are integers; they have no indices, sums, matrix products, and phe cannot read
                them. Floats need an exponent.
            fast: use h^(n a), with a random exponent a of half of n's bits, instead of r^n, from a table of 16 MiB or
                more that the first call computes; h = -x^2 mod n, and x is SHAKE-256 of n. Assumes that these powers
                look like random n-th residues (Damgard, Jurik and Nielsen); the look-ups are not constant-time.
            device: "cpu", "cuda", "opencl"; by default a CUDA tensor's own device and otherwise the CPU.

        Raises:
            UnsupportedDtype: neither integers nor floats.
            RangeError: a value is not finite or beyond the limit; names its index, not the value.
            ConfigError: `fast` with a key that does not offer it.
        """
        return self._encrypt(x, exponent, limit, pack, device, functools.partial(self._masks, fast=fast))

    def _encrypt(
        self, x: Any, exponent: int | None, limit: float | None, pack: bool, device: DeviceLike,
        masks: Callable[[int, MemorySpace], Residues],
    ) -> EncryptedTensor:  # fmt: skip
        array, origin = host_array(x, encoding.DTYPES, "Paillier")
        space = HOST
        if device is not None or origin.device.startswith("cuda"):
            space = space_at(origin.device if device is None else device)
        exponent, bound = encoding.scale_of(origin.dtype, exponent, limit, pack)
        if not pack and bound > self.max_int:
            raise RangeError(f"{origin.dtype} at exponent {exponent} needs a larger key or a smaller limit")
        most = 2.0**1023 if limit is None else float(min(math.ceil(limit), 2**1023))
        if space is not HOST and not pack and bool((np.abs(array.astype(np.float64)) < most).all()):
            words, offset = encoding.encode_words(array, exponent, bound)
            plain: Residues = self._plain_words(words, offset, space)
        else:
            numbers = encoding.encode(array, exponent, bound)
            plain = self._plain(encoding.in_slots(numbers, self.slots) if pack else numbers, space)
        cipher = plain.times(masks(len(plain), space))
        return EncryptedTensor(self, cipher, tuple(array.shape), exponent, bound, origin, packed=pack, fresh=True)

    @property
    def slots(self) -> int:
        """Values of 24 bits in a packed ciphertext."""
        return (self.n.bit_length() - 2) // encoding.SLOT_BITS

    def _plain(self, numbers: Iterable[Any], space: MemorySpace) -> Residues:
        """Return the ciphertexts (1 + m n) of numbers, without randomness."""
        if space is not HOST:
            listed = list(numbers)
            columns = max((m.bit_length() for m in listed), default=0) // 32 + 1
            offset = 1 << 32 * columns
            return self._plain_words(bigint.words_of((m + offset for m in listed), columns + 1), offset, space)
        n = gmp().mpz(self.n)
        return bigint.residues_of((1 + m % n * n for m in numbers), self.n_square, space)

    def _plain_words(self, words: npt.NDArray[Any], offset: int, space: MemorySpace) -> Residues:
        """Return the same of numbers whose sums with an offset are given by words."""
        shifted = bigint.DeviceResidues.of_words(space.load(words), self.n_square, space, self.n)
        return shifted.plus(1 - offset * self.n)

    def _masks(self, count: int, space: MemorySpace, fast: bool = False) -> Residues:
        """Return fresh n-th residues mod n^2; r is uniform up to 2^-128 on a device."""
        if fast:
            if not self.blum:
                raise ConfigError(
                    "fast=True needs a key whose maker states that its primes are 3 mod 4, as keygen() does"
                )
            size = -(-self.n.bit_length() // 64)
            return self._base(space, 32 * size).power_vartime(_random_words(count, size, space))
        if space is HOST:
            values = [secrets.randbelow(self.n - 1) + 1 for _ in range(count)]
            _check_units(values, self.n, "a random number")
            return bigint.residues_of(values, self.n_square, space).power([self.n])
        found = _random_pairs(count, self.n, space).power(self.n).times(1, plain=True).into(self.n_square)
        if count:
            _check_units(found.product(count).ints(), self.n, "a random number")
        return found

    @functools.lru_cache(maxsize=4)  # noqa: B019 - keys are few, and a table belongs to its key
    def _base(self, space: MemorySpace, bits: int) -> bigint.FixedBasePowers:
        drawn = hashlib.shake_256(b"accelerant Paillier h" + self.n.to_bytes(self.n_bytes, "big"))
        x = int.from_bytes(drawn.digest(self.n_bytes + 16), "big")
        return bigint.FixedBasePowers(gmp().powmod(-x * x % self.n, self.n, self.n_square), self.n_square, bits, space)

    def from_ints(
        self, values: Any, *, exponent: int = 0, dtype: str | None = None, limit: float | None = None,
        kind: str = "numpy", device: DeviceLike = "cpu",
    ) -> EncryptedTensor:  # fmt: skip
        """Return ciphertexts of another program, such as `number.ciphertext()` of phe, as a tensor.

        Args:
            values: a ciphertext, or nested lists of them, from 1 to below n^2 and coprime to n.
            exponent: of all; phe's `number.exponent`.
            dtype: of the decrypted tensor: int64 where the exponent is 0, else float64.
            limit: public bound of the magnitudes, by default the dtype's; the sender must have kept it.
            kind: "torch" or "numpy", the library of the decrypted tensor.
        """
        array = np.array(values, dtype=object)
        numbers = [_integer(value) for value in array.ravel().tolist()]
        self._check_ciphertexts(numbers)
        dtype = dtype or ("float64" if exponent else "int64")
        if kind not in ("torch", "numpy"):
            raise ConfigError(f"kind is 'torch' or 'numpy', got {kind!r}")
        exponent, bound = encoding.scale_of(dtype, exponent, limit, False)
        cipher = bigint.residues_of(numbers, self.n_square, space_at(device))
        return EncryptedTensor(self, cipher, array.shape, exponent, min(bound, self.max_int), Origin(kind, dtype))

    def _check_ciphertexts(self, numbers: Sequence[Any]) -> None:
        for i, number in enumerate(numbers):
            if not 0 < number < self.n_square:
                raise FormatError(f"ciphertext {i} is not from 1 to below n^2")
        _check_units(numbers, self.n, "a ciphertext")


class PrivateKey(SecretKey):
    """The private key: primes p and q. Neither repr nor errors show them, and it is not pickled or copied.

    Args:
        p, q: distinct primes, such as phe's `private.p` and `private.q`.
        insecure: allow fewer than 2048 bits, for tests.

    Raises:
        FormatError: not such primes; says which condition fails.
    """

    def __init__(self, p: int, q: int, *, insecure: bool = False) -> None:
        gmpy2 = gmp()
        p, q = gmpy2.mpz(p), gmpy2.mpz(q)
        balanced = insecure or p.bit_length() == q.bit_length()
        if min(p, q) < 3 or p == q or not balanced or max(p, q).bit_length() > BITS_MOST // 2:
            raise FormatError("a private key is two different odd primes of as many bits each")
        if not (gmpy2.is_prime(p, 40) and gmpy2.is_prime(q, 40)):
            raise FormatError("p or q of a private key is not a prime")
        if gmpy2.gcd(p * q, (p - 1) * (q - 1)) != 1:
            raise FormatError("the primes must not divide each other minus 1")
        blum = p % 4 == q % 4 == 3 and gmpy2.gcd(p - 1, q - 1) == 2
        self.public = PublicKey(int(p * q), blum=blum, insecure=insecure)
        self.p, self.q = int(p), int(q)
        self._squares = p * p, q * q
        self._inverses = gmpy2.invert(-q, p), gmpy2.invert(-p, q)  # of L((1 + n)^(p - 1) mod p^2) = -q mod p
        self._q_inverse, self._square_inverse = gmpy2.invert(q, p), gmpy2.invert(q * q, p * p)

    def __repr__(self) -> str:
        return f"PrivateKey({self.public!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrivateKey) and {self.p, self.q} == {other.p, other.q}

    def __hash__(self) -> int:
        return hash(self.public)

    def to_bytes(self, passphrase: str) -> bytes:
        """Return the key encrypted with a passphrase: ChaCha20-Poly1305 under scrypt (2^16, 8, 1: 64 MiB)."""
        half = max(self.p, self.q).bit_length() // 8 + 1
        return sealed(head_of("PAI", "s"), self.p.to_bytes(half, "big") + self.q.to_bytes(half, "big"), passphrase)

    @classmethod
    def from_bytes(cls, data: bytes, passphrase: str, *, insecure: bool = False) -> PrivateKey:
        """Return the key that to_bytes gave; FormatError for other bytes or another passphrase."""
        plain = open_box(reader_of(data, "PAI", "s"), data, passphrase, BITS_MOST // 8 + 4)
        half = len(plain) // 2
        return cls(int.from_bytes(plain[:half], "big"), int.from_bytes(plain[half:], "big"), insecure=insecure)

    @classmethod
    def load(cls, path: str | Path, passphrase: str, *, insecure: bool = False) -> PrivateKey:
        """Return the key of a file that `save` wrote; FormatError as from_bytes, OSError if it cannot be read."""
        return cls.from_bytes(read_regular(path, 1 << 16), passphrase, insecure=insecure)

    def encrypt(
        self, x: Any, *, exponent: int | None = None, limit: float | None = None, pack: bool = False,
        device: DeviceLike = None,
    ) -> EncryptedTensor:  # fmt: skip
        """Encrypt as the public key does, with powers modulo p^2 and q^2: the key holder's faster way.

        r^n mod p^2 of a uniform unit r is x^p mod p^2 of a uniform x in Z*_p, and independent of r^n mod q^2.
        """
        return self.public._encrypt(x, exponent, limit, pack, device, self._masks)

    def _masks(self, count: int, space: MemorySpace) -> Residues:
        (p2, q2), found = self._squares, []
        if space is not HOST:
            halves = []
            for p, square, other in ((self.p, p2, q2), (self.q, q2, p2)):
                x = _random_pairs(count, p, space).power(p, secret=True)
                halves.append(x.times(gmp().invert(other, square), plain=True).into(self.public.n_square, other))
            return halves[0].plus_words(halves[1].words, 1)
        for prime, square in ((self.p, p2), (self.q, q2)):
            values = [secrets.randbelow(prime - 1) + 1 for _ in range(count)]
            found.append(bigint.residues_of(values, square, space).power([prime], secret=True).ints())
        values = [xq + q2 * ((xp - xq) * self._square_inverse % p2) for xp, xq in zip(*found, strict=True)]
        return bigint.residues_of(values, self.public.n_square, space)

    def decrypt(self, c: EncryptedTensor, *, dtype: str | torch.dtype | None = None) -> Any:
        """Decrypt to an array of the library, and for torch of the device, that was encrypted.

        Args:
            dtype: of the result instead of the tensor's own, by name or torch's.

        Raises:
            FormatError: `c` was encrypted under another key.
            RangeError: a decrypted number is beyond n/3 (an overflow elsewhere), or does not fit the dtype.
        """
        if not isinstance(c, EncryptedTensor):
            raise ConfigError(f"wanted an EncryptedTensor, got {type(c).__name__}")
        if c.public != self.public:
            raise FormatError(f"the tensor was encrypted for {c.public!r}, the key is of {self.public!r}")
        named = str(c.origin.dtype) if dtype is None else dtype if isinstance(dtype, str) else clipped(dtype)
        named = named.removeprefix("torch.")
        if named not in encoding.DTYPES:
            raise UnsupportedDtype(
                f"a decrypted tensor has one of the dtypes {', '.join(encoding.DTYPES)}, got {named}"
            )
        if c.residues.space is HOST:
            numbers: Any = self._signed(c.residues)
        else:
            numbers = self._signed_on_device(c.residues, self.public.n if c.packed else c.bound)
        if c.packed:
            numbers = encoding.out_of_slots(numbers, self.public.slots, math.prod(c.shape))
        return encoding.decode(numbers, c.exponent, c.shape, replace(c.origin, dtype=named))

    def _signed(self, cipher: Residues) -> list[int]:
        """Return the plaintexts, those above n - n/3 as negative; RangeError for one beyond n/3."""
        halves, values = [], cipher.ints()
        for prime, square, inverse in zip((self.p, self.q), self._squares, self._inverses, strict=True):
            powers = bigint.residues_of([c % square for c in values], square, cipher.space).power(
                [prime - 1], secret=True
            )
            halves.append([(x - 1) // prime * inverse % prime for x in powers.ints()])
        return self._in_range(
            mq + (mp - mq) * self._q_inverse % self.p * self.q for mp, mq in zip(*halves, strict=True)
        )

    def _signed_on_device(self, cipher: Any, bound: int) -> Any:
        """Return the same as an array of int64 if all fit, else as integers; slower for numbers beyond a bound."""
        gmpy2, space, words = gmp(), cipher.space, cipher.plain()
        halves = []
        for p, q, inverse in zip((self.p, self.q), (self.q, self.p), self._inverses, strict=True):
            # c^(p - 1) = 1 + b p mod p^2, so the high half of its product with k < p is b k mod p.
            powers = bigint.DevicePairs.of_words(words, p, space).power(p - 1, secret=True)
            half = powers.times(inverse * gmpy2.invert(q, p) % p, plain=True).half(1)
            halves.append(bigint.DeviceResidues.of_words(half, self.public.n, space, q))
        n, columns = self.public.n, max(2, bound.bit_length() // 32 + 1)
        offset = 2 ** (32 * columns - 1) if 32 * columns + 2 <= n.bit_length() else 0  # below n/4
        found = space.store(halves[0].plus_words(halves[1].words, 1).plus(offset).plain())
        if not offset or found[:, columns:].any():
            return self._in_range((m - offset) % n for m in bigint.ints_of(found))
        return encoding.signed_numbers(found[:, :columns])

    def _in_range(self, numbers: Iterable[Any]) -> list[int]:
        """Return numbers mod n, those above n - n/3 as negative; RangeError for one beyond n/3."""
        n, half, most, found = self.public.n, self.public.n // 2, self.public.max_int, []
        for i, number in enumerate(numbers):
            m = int(number)
            m = m - n if m > half else m
            if abs(m) > most:
                raise RangeError(f"the decrypted number {i} is beyond n/3: a sum or product overflowed elsewhere")
            found.append(m)
        return found


def _check_units(values: Sequence[Any], n: int, name: str) -> None:
    """Raise FormatError unless all values are coprime to n."""
    product, modulus = gmp().mpz(1), gmp().mpz(n)
    for value in values:
        product = product * value % modulus
    if gmp().gcd(product, modulus) != 1:
        raise FormatError(f"{name} is not coprime to n")


def _random_words(count: int, width: int, space: MemorySpace) -> Any:
    """Return secret random words, (count, width), in a space: on CUDA of ChaCha20, else the operating system's."""
    if space.backend == "cuda":
        return _stream.words(count * width, space.label).reshape(count, width)
    return space.load(
        np.frombuffer(secrets.token_bytes(4 * count * width), "<u4").astype(np.uint32).reshape(count, width)
    )


def _random_pairs(count: int, modulus: int, space: MemorySpace) -> bigint.DevicePairs:
    """Return numbers modulo the square of a modulus that are uniform modulo it, up to a distance of 2^-128."""
    return bigint.DevicePairs.of_words(_random_words(count, -(-modulus.bit_length() // 32) + 4, space), modulus, space)


def _integer(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UnsupportedDtype(f"a ciphertext must be an integer, got {type(value).__name__}") from None


# --- encrypted tensors -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class EncryptedTensor:
    """An encrypted tensor; + - * / @ take tensors of the same key and plain arrays, with NumPy's broadcasting.

    A product with a plain number shows that number to who knows both ciphertexts: `rerandomize` results before they
    leave. to_ints and to_bytes do it by themselves where `fresh` is False.
    """

    public: PublicKey  # the key
    residues: Residues  # ciphertexts in the order of C
    shape: tuple[int, ...]  # of the values
    exponent: int  # values are integers times 16^exponent
    bound: int  # public bound of the integers' magnitudes; for packed tensors of those in a slot
    origin: Origin  # library, dtype and device of the decrypted array
    packed: bool = False  # several values share a ciphertext
    fresh: bool = False  # whether each ciphertext has randomness of its own that no operation has touched
    __array_ufunc__ = None  # NumPy's arrays leave + - * to the methods below

    def __repr__(self) -> str:
        packed = ", packed" * self.packed
        return f"EncryptedTensor({self.shape}, {self.origin.dtype}, exponent {self.exponent}{packed}, {self.public!r})"

    def __eq__(self, other: object) -> bool:
        """Return whether the ciphertexts are the same: two of the same values differ."""
        if not isinstance(other, EncryptedTensor):
            return False
        x, y = ((c.public, c.shape, c.exponent, c.bound, c.packed, c.origin.kind, c.dtype) for c in (self, other))
        return x == y and self.residues.ints() == other.residues.ints()

    def __hash__(self) -> int:
        return hash((self.public, self.shape, self.exponent))

    @property
    def dtype(self) -> str:
        """Name of the dtype of the decrypted tensor."""
        return self.origin.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a message, which rerandomizes results of operations; it is read to the CPU."""
        return EncryptedTensor.from_bytes, (self.to_bytes(), self.public)

    def __copy__(self) -> EncryptedTensor:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> EncryptedTensor:
        return self

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("a tensor without dimensions has no length")
        return self.shape[0]

    def reshape(self, *shape: Any) -> EncryptedTensor:
        """Return the values in another shape of as many elements; one size may be -1."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        try:
            return replace(self, shape=np.empty(self.shape, np.bool_).reshape(sizes).shape)
        except (ValueError, TypeError) as error:
            raise ShapeError(f"cannot reshape {self.shape} to {clipped(sizes)}: {error}") from None

    def __getitem__(self, key: Any) -> EncryptedTensor:
        self._refuse_packed("indexed")
        try:
            index = self._index()[key]
        except IndexError as error:
            raise ShapeError(f"shape {self.shape}: {error}") from None
        found = self._taken(np.asarray(index))
        return replace(found, fresh=self.fresh and np.unique(index).size == len(found.residues))

    def sum(self, axis: int | None = None) -> EncryptedTensor:
        """Add up all values, or those along an axis; of integers as int64."""
        self._refuse_packed("summed along an axis")
        if axis is not None and not (isinstance(axis, int | np.integer) and -len(self.shape) <= axis < len(self.shape)):
            raise ShapeError(f"shape {self.shape} has no axis {clipped(axis)}")
        index = self._index().reshape(-1) if axis is None else np.moveaxis(self._index(), axis, 0)
        terms, shape = index.shape[0], index.shape[1:]
        origin = self.origin if self.dtype in encoding.FLOATS else replace(self.origin, dtype="int64")
        if not terms:
            raise ShapeError(f"shape {self.shape}: a sum needs at least one term")
        bound = self._checked(self.bound * terms, "the sum")
        cipher = self.residues.take(index.reshape(-1)).product(terms)
        return replace(self, residues=cipher, shape=shape, bound=bound, origin=origin, fresh=False)

    def __add__(self, other: Any) -> EncryptedTensor:
        return self._plus(other if isinstance(other, EncryptedTensor) else self._plain(other, 1))

    __radd__ = __add__

    def __neg__(self) -> EncryptedTensor:
        return replace(self, residues=self.residues.inverse(), fresh=False)

    def __sub__(self, other: Any) -> EncryptedTensor:
        return self._plus(-other if isinstance(other, EncryptedTensor) else self._plain(other, -1))

    def __rsub__(self, other: Any) -> EncryptedTensor:
        return (-self).__add__(other)

    def _plain(self, other: Any, sign: int) -> EncryptedTensor:
        """Return a plain summand, or its negative, as ciphertexts without randomness."""
        numbers, exponent, shape, dtype = self._operand(other)
        if exponent > self.exponent:
            numbers, exponent = [number << 4 * (exponent - self.exponent) for number in numbers], self.exponent
        bound = max(map(abs, numbers), default=0)
        if self.packed:
            if exponent != self.exponent:
                raise UnsupportedCase(f"the plain operand is no multiple of 16^{self.exponent}, the packed exponent")
            self._common_shape(shape)
            index = np.broadcast_to(np.arange(len(numbers)).reshape(shape), self.shape).reshape(-1)
            numbers, shape = encoding.in_slots([numbers[i] for i in index.tolist()], self.public.slots), self.shape
        self._checked(bound, "the plain operand")
        plain = self.public._plain([sign * number for number in numbers], self.residues.space)
        return EncryptedTensor(
            self.public, plain, shape, exponent, bound, replace(self.origin, dtype=dtype), self.packed
        )

    def _plus(self, other: EncryptedTensor) -> EncryptedTensor:
        if other.public != self.public:
            raise FormatError(f"the tensors are encrypted for {self.public!r} and for {other.public!r}")
        if self.packed != other.packed:
            raise UnsupportedCase("a packed tensor is added to packed ones only")
        low = min(self.exponent, other.exponent)
        x, y = self._at_exponent(low), other._at_exponent(low)
        shape = self._common_shape(other.shape)
        bound = self._checked(x.bound + y.bound, "the sum")
        cipher = x._spread(shape).times(y._spread(shape))
        origin = replace(self.origin, dtype=encoding.joint_dtype(self.dtype, other.dtype))
        return replace(self, residues=cipher, shape=shape, exponent=low, bound=bound, origin=origin, fresh=False)

    def __mul__(self, other: Any) -> EncryptedTensor:
        if isinstance(other, EncryptedTensor):
            raise UnsupportedCase("Paillier multiplies a ciphertext by plain numbers only; bfv multiplies ciphertexts")
        numbers, exponent, shape, dtype = self._operand(other)
        if self.packed and (len(numbers) != 1 or exponent):
            raise UnsupportedCase("a packed tensor is multiplied by a plain integer only")
        common = self._common_shape(shape)
        bound = self._checked(self.bound * max(map(abs, numbers), default=1), "the product")
        cipher = self._spread(common)
        if len(numbers) != 1:
            index = np.broadcast_to(np.arange(len(numbers)).reshape(shape), common).reshape(-1)
            numbers = [numbers[i] for i in index.tolist()]
        negative = [i for i, number in enumerate(numbers) if number < 0]
        if negative and len(numbers) == 1:
            cipher = cipher.inverse()
        elif negative:
            order = np.arange(len(cipher))
            order[negative] = len(cipher) + np.arange(len(negative))
            inverse: Any = cipher.take(np.array(negative)).inverse()
            cipher = cipher.joined(inverse).take(order)
        origin = replace(self.origin, dtype=dtype)
        return replace(
            self, residues=cipher.power([abs(number) for number in numbers]) if len(cipher) else cipher, shape=common,
            exponent=self.exponent + exponent, bound=bound, origin=origin, fresh=False,
        )  # fmt: skip

    __rmul__ = __mul__

    def __truediv__(self, other: float) -> EncryptedTensor:
        return self * (1.0 / other)

    def __matmul__(self, other: Any) -> EncryptedTensor:
        """Multiply (..., k) by a plain matrix (k, m) or vector (k,): a power for each of the ... k m products."""
        array, _ = host_array(other, encoding.DTYPES, "Paillier")
        if not self.shape or array.ndim not in (1, 2) or array.shape[0] != self.shape[-1]:
            raise ShapeError(f"{self.shape} @ {array.shape}: wanted (..., k) @ (k, m) or (k,)")
        terms = self if array.ndim == 1 else self.reshape(*self.shape, 1)
        product: EncryptedTensor = (terms * other).sum(-array.ndim)
        return product

    def rerandomize(self, *, fast: bool = False) -> EncryptedTensor:
        """Return ciphertexts of the same values with fresh randomness; `fast` as for encrypt."""
        masks = self.public._masks(len(self.residues), self.residues.space, fast)
        return replace(self, residues=self.residues.times(masks), fresh=True)

    def to_ints(self, *, rerandomize: bool | None = None) -> Any:
        """Return the ciphertexts as a Python integer, or nested lists of them, for `phe.EncryptedNumber`.

        Args:
            rerandomize: by default where an operation has been applied since encryption.
        """
        self._refuse_packed("read by phe")
        numbers = np.empty(len(self.residues), object)
        numbers[:] = [int(number) for number in self._leaving(rerandomize).residues.ints()]
        return numbers.reshape(self.shape).tolist()

    def to_bytes(self, *, rerandomize: bool | None = None) -> bytes:
        """Return the tensor as bytes, bound to the key by its fingerprint.

        Args:
            rerandomize: by default where an operation has been applied since encryption.
        """
        kind, dtype, width = KINDS.index(self.origin.kind), encoding.DTYPES.index(self.dtype), 2 * self.public.n_bytes
        return b"".join([
            head_of("PAI", "c"), self.public.fingerprint, bytes([self.packed, kind, dtype]),
            self.exponent.to_bytes(4, "big", signed=True), self.bound.to_bytes(self.public.n_bytes, "big"),
            shape_bytes(self.shape),
            *(int(number).to_bytes(width, "big") for number in self._leaving(rerandomize).residues.ints()),
        ])  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes, public: PublicKey, *, device: DeviceLike = "cpu") -> EncryptedTensor:
        """Return the tensor that to_bytes gave, each ciphertext checked: from 1 to below n^2 and coprime to n.

        Bound and exponent are the sender's. FormatError for other bytes, another key, or ciphertexts out of range.
        """
        reader = reader_of(data, "PAI", "c")
        if reader.take(32) != public.fingerprint:
            raise FormatError(f"the ciphertexts are of another key than {public!r}")
        packed, kind, dtype = (reader.number(1, most) for most in (1, len(KINDS) - 1, len(encoding.DTYPES) - 1))
        exponent = int.from_bytes(reader.take(4), "big", signed=True)
        bound = reader.number(public.n_bytes, 2 ** (encoding.SLOT_BITS - 1) - 1 if packed else public.max_int)
        if abs(exponent) > encoding.EXPONENT_MOST:
            raise FormatError(
                f"an exponent is from {-encoding.EXPONENT_MOST} to {encoding.EXPONENT_MOST}, got {exponent}"
            )
        shape = reader.shape()
        count, width, body = math.prod(shape), 2 * public.n_bytes, reader.rest()
        if packed:
            count = -(-count // public.slots)
        if len(body) != count * width:
            raise FormatError(f"shape {shape} needs {count * width} bytes of ciphertexts, the message has {len(body)}")
        numbers = [int.from_bytes(body[at : at + width], "big") for at in range(0, len(body), width)]
        public._check_ciphertexts(numbers)
        cipher = bigint.residues_of(numbers, public.n_square, space_at(device))
        origin = Origin(KINDS[kind], encoding.DTYPES[dtype])
        return cls(public, cipher, shape, exponent, bound, origin, packed=bool(packed))

    def to(self, device: DeviceLike) -> EncryptedTensor:
        """Return the ciphertexts on a device: "cpu", "cuda", "opencl", ..."""
        return replace(self, residues=bigint.residues_of(self.residues.ints(), self.public.n_square, space_at(device)))

    def _leaving(self, rerandomize: bool | None) -> EncryptedTensor:
        wanted = not self.fresh if rerandomize is None else rerandomize
        return self.rerandomize() if wanted else self

    def _refuse_packed(self, what: str) -> None:
        if self.packed:
            raise UnsupportedCase(f"a packed tensor cannot be {what}: encrypt with pack=False")

    def _checked(self, bound: int, what: str) -> int:
        most = 2 ** (encoding.SLOT_BITS - 1) - 1 if self.packed else self.public.max_int
        if bound > most:
            raise RangeError(
                f"{what} may have {bound.bit_length()} bits, more than the {most.bit_length()} of a "
                f"{'slot' if self.packed else 'plaintext'}: encrypt with a smaller limit or a higher exponent"
            )
        return bound

    def _index(self) -> npt.NDArray[np.int64]:
        return np.arange(math.prod(self.shape)).reshape(self.shape)

    def _taken(self, index: npt.NDArray[np.int64]) -> EncryptedTensor:
        return replace(self, residues=self.residues.take(index.reshape(-1)), shape=index.shape)

    def _common_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        try:
            common = np.broadcast_shapes(self.shape, shape)
        except ValueError:
            raise ShapeError(f"shapes {self.shape} and {shape} do not broadcast") from None
        if self.packed and common != self.shape:
            raise UnsupportedCase(f"a packed tensor of shape {self.shape} is not broadcast with {shape}")
        return common

    def _spread(self, shape: tuple[int, ...]) -> Any:
        return self.residues if shape == self.shape else self._taken(np.broadcast_to(self._index(), shape)).residues

    def _at_exponent(self, exponent: int) -> EncryptedTensor:
        """Return the same values at an exponent that is no higher."""
        if exponent == self.exponent:
            return self
        factor = 16 ** (self.exponent - exponent)
        bound = self._checked(self.bound * factor, f"the tensor at exponent {exponent}")
        return replace(self, residues=self.residues.power([factor]), exponent=exponent, bound=bound, fresh=False)

    def _operand(self, other: Any) -> tuple[list[int], int, tuple[int, ...], str]:
        """Return integers, their exponent (the highest that is exact), shape and resulting dtype of a plain operand."""
        if type(other) is int:  # of any size
            return [other], 0, (), self.dtype
        array, origin = host_array(other, encoding.DTYPES, "Paillier")
        exponent, _ = encoding.scale_of(origin.dtype, None, None, False)
        numbers = encoding.encode(array, exponent, None)
        while exponent < 0 and not any(number % 16 for number in numbers):
            numbers, exponent = [number // 16 for number in numbers], exponent + 1
        scalar = isinstance(other, float) and self.dtype in encoding.FLOATS
        dtype = self.dtype if scalar else encoding.joint_dtype(self.dtype, origin.dtype)
        return numbers, exponent, tuple(array.shape), dtype
