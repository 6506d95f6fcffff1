"""BFV: exact arithmetic on encrypted vectors of integers.

>>> public, private = bfv.keygen(n=8192, rotations=True)
>>> x, y = public.encrypt([1, 2, 3]), public.encrypt([4, 5, 6])
>>> private.decrypt((x * y).sum())
array([32])

A ciphertext has n slots, integers mod t that are added and multiplied slot by slot, in two halves that `rotate`
rotates. Leading axes are batches. Each operation takes from the noise budget. Parameters come from the published table
only (bfv_scheme.MAX_LOG_Q). No bootstrapping, no CKKS.

Trust: who holds the private key reads everything encrypted under the public key. Ciphertexts are IND-CPA secure only,
and malleable: never tell the sender of a ciphertext whether it decrypted, or its noise budget (Chenal and Tang,
LATINCRYPT 2014). Security rests on ring learning with errors and on circular security. Results do not hide a server's
inputs from the key holder. Not constant time: rejection of samples (of rejected words only), key generation, and the
check of noise in decryption. No kernel has a branch or an address that depends on an element. Not audited.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from accelerant._renamed import renamed_names
from accelerant.algebra.field.memory_space import HOST, MemorySpace, space_at
from accelerant.errors import BudgetExceeded, ConfigError, FormatError, RangeError, ShapeError
from accelerant.privacy.he import encoding
from accelerant.privacy.he.bfv_scheme import (
    EncryptionParameters,
    Scheme,
    Words,
    centered,
    error_polynomials,
    residues,
    ternary,
    uniform_rows,
)
from accelerant.privacy.messages import MessageReader, shape_bytes
from accelerant.privacy.random import SecureStream
from accelerant.runtime.files import read_regular
from accelerant.runtime.registry import DeviceLike

__all__ = ["Ciphertext", "EncryptionParameters", "PrivateKey", "PublicKey", "keygen"]

if not TYPE_CHECKING:  # a type checker reports a name that is not there
    __getattr__ = renamed_names(__name__, {"Parameters": "EncryptionParameters"})

_SEED_BYTES = 32


def keygen(
    n: int = 8192, plain_modulus: int = 65537, security: int = 128, *, rotations: bool | Iterable[int] = False,
    device: DeviceLike = "cpu",
) -> tuple[PublicKey, PrivateKey]:  # fmt: skip
    """Return a new pair of keys.

    Args:
        n: number of slots: 4096, 8192, 16384, 32768. More slots allow more multiplications in a row.
        plain_modulus: t, a prime that is 1 mod 2 n, below 2^30; results are exact between -t/2 and t/2.
        security: bits against classical attacks, 128, 192 or 256.
        rotations: steps of `rotate` that get a key of their own; True for the powers of two, of which `rotate` composes
            the others, and for the exchange of the halves. `sum` needs all of these.
        device: the device that computes: "cpu", "cuda", "opencl", "auto", a torch.device, or of accelerant.devices().

    Raises:
        ConfigError: parameters beyond the standard's table.
    """
    parameters, space = EncryptionParameters(n, plain_modulus, security), space_at(device)
    if rotations is True:
        steps = [1 << i for i in range(n.bit_length() - 2)]
    else:
        steps = [step % (n // 2) for step in rotations or ()]
    elements = {pow(3, step, 2 * n) for step in steps} | ({2 * n - 1} if rotations is True else set())
    stream = SecureStream()
    secret, seed, scheme = ternary(stream, n), _seed(stream), Scheme.of(HOST, parameters)
    mask = uniform_rows(seed, 1, scheme.data, n)[0]
    half = _masked(scheme, 1, error_polynomials(stream, n), mask, secret)
    switching = {
        element: _switching_key(scheme, stream, secret, _automorphism(scheme, secret, element))
        for element in sorted({0} | elements - {1})
    }
    public = PublicKey(parameters, seed, half, switching, space)
    return public, PrivateKey(public, secret)


def _seed(stream: SecureStream) -> bytes:
    return stream.words(_SEED_BYTES // 4).numpy().tobytes()


def _transformed(scheme: Scheme, values: npt.NDArray[np.int64], first: int, primes: tuple[int, ...]) -> Words:
    """Return small integers (..., n) in the transformed domain, (..., primes, n)."""
    rows = residues(values, primes)
    scheme.rns.transform(rows, first, len(primes))
    return rows


def _masked(scheme: Scheme, first: int, errors: Any, mask: Words, secret: Any) -> Words:
    """Return e - a s, transformed, for errors (n,) and a mask (primes, n) in the transformed domain."""
    primes = scheme.rns.primes[first : first + mask.shape[-2]]
    moduli = np.array(primes, np.uint64)[:, None]
    product = mask.astype(np.uint64) * _transformed(scheme, secret, first, primes) % moduli
    return ((_transformed(scheme, errors, first, primes) + moduli - product) % moduli).astype(np.uint32)


def _automorphism(scheme: Scheme, secret: Any, element: int) -> Words:
    """Return s(X^element) mod P and the data primes, transformed; s^2 for element 0."""
    primes = (scheme.special, *scheme.data)
    if element:
        powers = np.arange(scheme.n) * element % (2 * scheme.n)
        moved = np.zeros_like(secret)
        moved[powers % scheme.n] = np.where(powers < scheme.n, secret, -secret)
        return _transformed(scheme, moved, 0, primes)
    rows = _transformed(scheme, secret, 0, primes).astype(np.uint64)
    return (rows * rows % np.array(primes, np.uint64)[:, None]).astype(np.uint32)


def _switching_key(scheme: Scheme, stream: SecureStream, secret: Any, target: Words) -> tuple[bytes, Words]:
    """Return the masks' seed and the other halves, (k, 1 + k, n), of a key for products with another secret."""
    k, seed, primes = scheme.k, _seed(stream), (scheme.special, *scheme.data)
    masks, errors = uniform_rows(seed, k, primes, scheme.n), error_polynomials(stream, k, scheme.n)
    halves = np.empty_like(masks)
    for i, q in enumerate(scheme.data):
        halves[i] = _masked(scheme, 0, errors[i], masks[i], secret)
        scaled = target[1 + i].astype(np.uint64) * np.uint64(scheme.special % q)
        halves[i, 1 + i] = ((halves[i, 1 + i] + scaled) % np.uint64(q)).astype(np.uint32)
    return seed, halves


class PublicKey:
    """A key that encrypts, with those for products and rotations.

    Attributes:
        parameters: n, plain modulus, security.
        space: the memory of the device that computes.
        fingerprint: SHA-256 of parameters and key, 32 bytes, without the keys for products and rotations.
    """

    def __init__(
        self, parameters: EncryptionParameters, seed: bytes, half: Words, switching: Mapping[int, tuple[bytes, Words]],
        space: MemorySpace,
    ) -> None:  # fmt: skip
        self.parameters, self.space, self._seed, self._half = parameters, space, seed, half
        self._scheme, self._halves = Scheme.of(space, parameters), dict(switching)
        self._key = space.load(np.stack((half, uniform_rows(seed, 1, self._scheme.data, parameters.n)[0])))
        self._switching: dict[int, Any] = {}
        self.fingerprint = hashlib.sha256(_packed(parameters) + seed + _bytes(half)).digest()

    def __repr__(self) -> str:
        p = self.parameters
        return f"PublicKey(n={p.n}, plain_modulus={p.plain_modulus}, security={p.security})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PublicKey) or self.fingerprint != other.fingerprint:
            return False
        return self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(PublicKey.from_bytes, device=self.space.label), (self.to_bytes(),)

    @property
    def n(self) -> int:
        """Number of slots."""
        return self.parameters.n

    def encrypt(self, values: Any) -> Ciphertext:
        """Encrypt integers: (..., m) with m up to n, between -t/2 and t/2.

        Raises:
            UnsupportedDtype: not integers.
            ShapeError: more than n of them, or none.
            RangeError: one is out of range.
        """
        scheme, (plain, shape, origin) = self._scheme, _plain(self.parameters, values)
        stream, batch, n = SecureStream(), len(plain), self.n
        mask = self.space.load(residues(ternary(stream, batch, n), scheme.data))
        data = scheme.times_keys(mask, self._key)
        added = self._with_errors(stream, plain, 2)
        return Ciphertext(self, scheme.rns.add(data, added, 1, scheme.k), shape, scheme.fresh_bits, origin)

    def _with_errors(self, stream: SecureStream, plain: npt.NDArray[np.int64], parts: int) -> Any:
        """Return (batch, parts, k, n): errors, and in the first part the scaled plaintexts."""
        scheme = self._scheme
        added = residues(error_polynomials(stream, len(plain), parts, self.n), scheme.data)
        sums, moduli = (
            added[:, 0] + scheme.scaled(scheme.encode(plain)).astype(np.uint32),
            np.array(scheme.data, np.uint32),
        )
        added[:, 0] = np.minimum(sums, sums - moduli[:, None])  # the smaller one of two words, of which one may wrap
        return self.space.load(added)

    def to_bytes(self, *, computing: bool = True) -> bytes:
        """Return the key as bytes; without the keys for products and rotations unless `computing`."""
        halves = self._halves if computing else {}
        return b"".join([
            encoding.head_of("BFV", "n"), _packed(self.parameters), self._seed, _bytes(self._half),
            len(halves).to_bytes(2, "big"),
            *(element.to_bytes(4, "big") + seed + _bytes(half) for element, (seed, half) in halves.items()),
        ])  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes, *, device: DeviceLike = "cpu") -> PublicKey:
        """Return the key that to_bytes gave; FormatError for other bytes. Nothing tells whose key it is."""
        reader = encoding.reader_of(data, "BFV", "n")
        parameters = _parameters(reader)
        data_primes, special, _ = parameters.primes
        seed, half = reader.take(_SEED_BYTES), _words(reader, (), data_primes, parameters.n)
        halves, primes = {}, (special, *data_primes)
        for _ in range(reader.number(2, 2 * parameters.n)):
            element = reader.number(4, 2 * parameters.n - 1)
            if element in halves or (element and element % 2 == 0) or element == 1:
                raise FormatError(f"the key has no automorphism or twice the same: X -> X^{element}")
            halves[element] = reader.take(_SEED_BYTES), _words(reader, (len(data_primes),), primes, parameters.n)
        reader.end()
        return cls(parameters, seed, half, halves, space_at(device))

    def switching(self, element: int) -> Any:
        """Return the key-switching key of an automorphism, or of s^2 for element 0, on the device."""
        if element not in self._switching:
            if element not in self._halves:
                missing = "this rotation: keygen(..., rotations=True)" if element else "products: it was sent without"
                raise ConfigError(f"the public key has no key for {missing}")
            scheme = self._scheme
            seed, halves = self._halves[element]
            primes = (scheme.special, *scheme.data)
            both = np.stack((halves, uniform_rows(seed, scheme.k, primes, self.n)), axis=1)
            self._switching[element] = self.space.load(both)
        return self._switching[element]


class PrivateKey(encoding.SecretKey):
    """A key that decrypts; neither shown by repr nor pickled or copied."""

    def __init__(self, public: PublicKey, secret: npt.NDArray[np.int64]) -> None:
        self.public, self.parameters, self._secret = public, public.parameters, secret
        scheme = Scheme.of(HOST, self.parameters)
        rows = np.ones((2, scheme.k, self.parameters.n), np.uint32)
        rows[1] = _transformed(scheme, secret, 1, scheme.data)
        self._rows = public.space.load(rows)

    def __repr__(self) -> str:
        p = self.parameters
        return f"PrivateKey(n={p.n}, plain_modulus={p.plain_modulus}, security={p.security})"

    def to_bytes(self, passphrase: str) -> bytes:
        """Return the key encrypted with a passphrase: see encoding.sealed."""
        head = encoding.head_of("BFV", "s") + _packed(self.parameters) + self.public.fingerprint
        return encoding.sealed(head, (self._secret + 1).astype(np.uint8).tobytes(), passphrase)

    @classmethod
    def from_bytes(cls, data: bytes, passphrase: str, public: PublicKey) -> PrivateKey:
        """Return the key that to_bytes gave; FormatError for other bytes, passphrase or public key."""
        reader = encoding.reader_of(data, "BFV", "s")
        if _parameters(reader) != public.parameters or reader.take(32) != public.fingerprint:
            raise FormatError(f"the private key is not that of {public!r}")
        secret = np.frombuffer(encoding.open_box(reader, data, passphrase, public.n), np.uint8)
        if len(secret) != public.n or secret.max() > 2:
            raise FormatError("the private key's polynomial has another degree, or other coefficients than -1, 0, 1")
        return cls(public, secret.astype(np.int64) - 1)

    @classmethod
    def load(cls, path: str | Path, passphrase: str, public: PublicKey) -> PrivateKey:
        """Return the key of a file that `save` wrote; FormatError as from_bytes, OSError if it cannot be read."""
        return cls.from_bytes(read_regular(path, 1 << 20), passphrase, public)

    def encrypt(self, values: Any) -> Ciphertext:
        """Encrypt as PublicKey.encrypt, with less noise, and to messages of half the size until an operation."""
        scheme, (plain, shape, origin) = self.public._scheme, _plain(self.parameters, values)
        stream = SecureStream()
        seed = _seed(stream)
        rows = uniform_rows(seed, len(plain), scheme.data, scheme.n)
        mask = self.public.space.load(np.stack((np.zeros_like(rows), rows), axis=1))
        parts = scheme.phase(mask, self._rows)  # a s
        half = scheme.rns.add(self.public._with_errors(stream, plain, 1), parts, 1, scheme.k, subtract=True)
        data = self.public.space.load(np.stack((self.public.space.store(half)[:, 0], rows), axis=1))
        return Ciphertext(self.public, data, shape, scheme.fresh_bits + 6, origin, seed)

    def decrypt(self, c: Ciphertext) -> Any:
        """Return the integers, (..., m), between -t/2 and t/2, as an array of the library that was encrypted.

        They are int64, with JAX int32.

        Raises:
            ConfigError: the ciphertext is of another key.
            BudgetExceeded: its noise budget is spent. Never tell its sender.
        """
        scheme, phase = self._phase(c)
        if (scheme.noise_fraction(self.public.space.store(phase)) >= 0.25).any():
            raise BudgetExceeded("the noise budget of a ciphertext is spent: fewer multiplications, or a larger n")
        values = scheme.decode(scheme.rounded(phase))[:, : c.shape[-1]].reshape(c.shape)
        return encoding.in_kind(values.astype(c.origin.dtype), c.origin)

    def noise_budget(self, c: Ciphertext) -> int:
        """Return the bits by which the noise may still grow, the least of a batch; decryption needs at least 1."""
        scheme, phase = self._phase(c)
        worst = max(scheme.noise(self.public.space.store(phase)), default=0)
        return max(0, (scheme.q // max(1, 2 * worst)).bit_length() - 1)

    def _phase(self, c: Ciphertext) -> tuple[Scheme, Any]:
        if not isinstance(c, Ciphertext):
            raise ConfigError(f"wanted ciphertexts of BFV, got {type(c).__name__}")
        _same_key(self.public, c.public)
        return self.public._scheme, self.public._scheme.phase(c.data, self._rows)


def _same_key(x: PublicKey, y: PublicKey) -> None:
    if x.fingerprint != y.fingerprint or x.space is not y.space:
        where = f"{x!r} on {x.space.label} and {y!r} on {y.space.label}"
        raise ConfigError(f"the operands are of two keys or on two devices: {where}")


# --- messages --------------------------------------------------------------------------------------------------------
def _packed(parameters: EncryptionParameters) -> bytes:
    return struct.pack(">IIH", parameters.n, parameters.plain_modulus, parameters.security)


def _parameters(reader: MessageReader) -> EncryptionParameters:
    try:
        return EncryptionParameters(*struct.unpack(">IIH", reader.take(10)))
    except ConfigError as error:
        raise FormatError(f"the message has parameters that are refused: {error}") from None


def _bytes(words: Words) -> bytes:
    return words.astype("<u4").tobytes()


def _words(reader: MessageReader, shape: tuple[int, ...], primes: tuple[int, ...], n: int) -> Words:
    """Return (*shape, primes, n) words; FormatError unless all are there and below their primes."""
    shape = (*shape, len(primes), n)
    words = np.frombuffer(reader.take(4 * math.prod(shape)), "<u4").reshape(shape).astype(np.uint32)
    if (words >= np.array(primes, np.uint32)[:, None]).any():
        raise FormatError("a coefficient of the message is not below its prime")
    return words


def _plain(
    parameters: EncryptionParameters, values: Any
) -> tuple[npt.NDArray[np.int64], tuple[int, ...], encoding.Origin]:
    """Return integers in all slots, (batch, n), the shape that they had, and the origin of results."""
    array, origin = encoding.host_array(values, encoding.INTEGERS, "BFV")
    origin = replace(origin, dtype="int32" if origin.kind == "jax" else "int64")
    n, half = parameters.n, parameters.plain_modulus // 2
    if array.ndim == 0 or not 0 < array.shape[-1] <= n:
        raise ShapeError(f"wanted (..., m) integers with m from 1 to {n}, got shape {array.shape}")
    if array.size and not -half <= int(array.min()) <= int(array.max()) <= half:
        raise RangeError(f"the array has integers that are not between {-half} and {half}, of which results are read")
    slots = np.zeros((math.prod(array.shape[:-1]), n), np.int64)
    slots[:, : array.shape[-1]] = array.reshape(len(slots), array.shape[-1])
    return slots, array.shape, origin


@dataclass(frozen=True, slots=True, eq=False)
class Ciphertext:
    """Encrypted vectors. + - * take ciphertexts of the same key, and integers.

    Shapes broadcast as NumPy's, but an encrypted number, (..., 1), is not repeated along the slots: ShapeError.
    A ciphertext of all n slots, such as a rotated one, takes shorter ones, whose other slots are 0.
    """

    public: PublicKey  # the key
    data: Any  # (batch, 2, k, n) words in the memory of public.space
    shape: tuple[int, ...]  # of the integers
    budget_bits: float  # an estimate of the noise budget, without the key: usually some bits too low
    origin: encoding.Origin  # library, dtype and device of the decrypted array
    seed: bytes | None = None  # public, of c1, in what PrivateKey.encrypt returns
    __array_ufunc__ = None  # NumPy's arrays leave + - * to the methods below

    def __repr__(self) -> str:
        return f"Ciphertext({self.shape}, about {self.budget_bits:.0f} bits of budget, {self.public!r})"

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same ciphertext: two of the same values differ. budget_bits is not compared."""
        if not isinstance(other, Ciphertext) or (self.public, self.shape) != (other.public, other.shape):
            return False
        words, others = self.public.space.store(self.data), other.public.space.store(other.data)
        return self.origin == other.origin and np.array_equal(words, others)

    def __hash__(self) -> int:
        return hash((self.public, self.shape))

    def __reduce__(self) -> tuple[Any, ...]:
        words = self.public.space.store(self.data)
        return _restored, (self.public, words, self.shape, self.budget_bits, self.origin, self.seed)

    def __add__(self, other: Any) -> Ciphertext:
        return self._sum(other, subtract=False)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Ciphertext:
        return self._sum(other, subtract=True)

    def __neg__(self) -> Ciphertext:
        scheme = self.public._scheme
        zero = scheme.space.load(np.zeros(tuple(self.data.shape), np.uint32))
        return replace(self, data=scheme.rns.add(zero, self.data, 1, scheme.k, subtract=True), seed=None)

    def __rsub__(self, other: Any) -> Ciphertext:
        return (-self)._sum(other, subtract=False)

    def _sum(self, other: Any, *, subtract: bool) -> Ciphertext:
        scheme = self.public._scheme
        if isinstance(other, Ciphertext):
            x, y, shape = self._matched(other)
            budget = min(self.budget_bits, other.budget_bits) - 1
        else:
            plain, shape = self._plain_operand(other)
            added = np.zeros((len(plain), 2, scheme.k, scheme.n), np.uint32)
            added[:, 0] = scheme.scaled(scheme.encode(plain))
            x, y, shape = self._broadcast(scheme.space.load(added), shape, plain=True)
            budget = self.budget_bits - 0.1
        return Ciphertext(self.public, scheme.rns.add(x, y, 1, scheme.k, subtract=subtract), shape, budget, self.origin)

    def __mul__(self, other: Any) -> Ciphertext:
        scheme = self.public._scheme
        if isinstance(other, Ciphertext):
            x, y, shape = self._matched(other)
            data = scheme.multiply(x, y, self.public.switching(0))
            budget = scheme.product_bits(self.budget_bits, other.budget_bits)
            return Ciphertext(self.public, data, shape, budget, self.origin)
        plain, shape = self._plain_operand(other)
        coefficients = centered(scheme.encode(plain), scheme.t)
        moduli = np.array(scheme.data, np.int64)[:, None]  # t may be larger
        rows = scheme.space.load((coefficients[:, None] % moduli).astype(np.uint32))
        x, rows, shape = self._broadcast(rows, shape, plain=True)
        budget = self.budget_bits - scheme.plain_product_bits(coefficients)
        return Ciphertext(self.public, scheme.times_plain(x, rows), shape, budget, self.origin)

    __rmul__ = __mul__

    def rotate(self, steps: int) -> Ciphertext:
        """Return the slots of each half rotated to the left by some steps; of all n slots."""
        n = self.public.n
        left = steps % (n // 2)
        result: Ciphertext = replace(self, shape=(*self.shape[:-1], n))
        element = pow(3, left, 2 * n)
        if element in self.public._halves:
            return result._moved(element)
        for i in range(left.bit_length()):
            if left >> i & 1:
                result = result._moved(pow(3, 1 << i, 2 * n))
        return result

    def swap_halves(self) -> Ciphertext:
        """Return the slots with the halves exchanged."""
        return replace(self, shape=(*self.shape[:-1], self.public.n))._moved(2 * self.public.n - 1)

    def sum(self) -> Ciphertext:
        """Return the sums of all slots, (..., 1): log2 n rotations."""
        if self.shape[-1] == 1:
            return self  # of a sum all slots have the number
        total = replace(self, shape=(*self.shape[:-1], self.public.n))
        for i in range(self.public.n.bit_length() - 2):
            total = total + total.rotate(1 << i)
        total = total + total.swap_halves()
        return replace(total, shape=(*self.shape[:-1], 1))

    def _moved(self, element: int) -> Ciphertext:
        scheme = self.public._scheme
        data = scheme.automorphism(self.data, element, self.public.switching(element))
        return replace(self, data=data, seed=None, budget_bits=min(self.budget_bits, scheme.switched_bits) - 0.5)

    def _matched(self, other: Ciphertext) -> tuple[Any, Any, tuple[int, ...]]:
        _same_key(self.public, other.public)
        return self._broadcast(other.data, other.shape, plain=False)

    def _broadcast(self, data: Any, shape: tuple[int, ...], *, plain: bool) -> tuple[Any, Any, tuple[int, ...]]:
        """Return both operands' words with one batch, and the shape of the result."""
        lengths, n = {self.shape[-1], shape[-1]}, self.public.n
        try:
            lead = np.broadcast_shapes(self.shape[:-1], shape[:-1])
        except ValueError:
            raise ShapeError(f"shapes {self.shape} and {shape} do not broadcast") from None
        if len(lengths) > 1 and (plain or 1 in lengths or n not in lengths):
            repeated = ": an encrypted number is not repeated in other slots, encrypt it in each" * (1 in lengths)
            raise ShapeError(f"shapes {self.shape} and {shape} do not broadcast{repeated}")
        both = []
        for words, own in ((self.data, self.shape), (data, shape)):
            if own[:-1] != lead:
                space, tail = self.public.space, tuple(words.shape[1:])
                wide = space.broadcast(words.reshape((*own[:-1], *tail)), (*lead, *tail))
                words = wide.reshape((math.prod(lead), *tail))
            both.append(words)
        return both[0], both[1], (*lead, max(lengths))

    def _plain_operand(self, other: Any) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
        array, _ = encoding.host_array(other, encoding.INTEGERS, "BFV")
        if array.shape[-1:] in ((), (1,)):
            array = np.broadcast_to(array, (*array.shape[:-1], self.shape[-1]))
        return _plain(self.public.parameters, array)[:2]

    def to_bytes(self) -> bytes:
        """Return the ciphertexts as bytes, bound to the key by its fingerprint."""
        words = self.public.space.store(self.data)
        body = _bytes(words) if self.seed is None else self.seed + _bytes(words[:, 0])
        return b"".join([
            encoding.head_of("BFV", "c"), self.public.fingerprint,
            bytes([self.seed is not None, encoding.KINDS.index(self.origin.kind)]),
            min(max(0, int(self.budget_bits)), 1023).to_bytes(2, "big"), shape_bytes(self.shape), body,
        ])  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes, public: PublicKey) -> Ciphertext:
        """Return the ciphertexts that to_bytes gave, on the key's device; FormatError for other bytes or another key.

        Shape and estimated budget are the sender's.
        """
        reader, n, scheme = encoding.reader_of(data, "BFV", "c"), public.n, public._scheme
        if reader.take(32) != public.fingerprint:
            raise FormatError(f"the ciphertexts are of another key than {public!r}")
        seeded, kind, budget = reader.number(1, 1), reader.number(1, len(encoding.KINDS) - 1), reader.number(2, 1023)
        shape = reader.shape()
        if not shape or not 0 < shape[-1] <= n:
            raise FormatError(f"ciphertexts have shapes (..., m) with m from 1 to {n}, the message has {shape}")
        seed, batch, parts = reader.take(_SEED_BYTES) if seeded else None, math.prod(shape[:-1]), 2 - seeded
        if reader.left != 4 * batch * parts * scheme.k * n:
            raise FormatError(f"shape {shape} needs {4 * batch * parts * scheme.k * n} bytes, {reader.left} are there")
        words = _words(reader, (batch, parts), scheme.data, n)
        if seed is not None:
            words = np.stack((words[:, 0], uniform_rows(seed, batch, scheme.data, n)), axis=1)
        origin = encoding.Origin(encoding.KINDS[kind], "int32" if encoding.KINDS[kind] == "jax" else "int64")
        return cls(public, public.space.load(words), shape, budget, origin, seed)


def _restored(public: PublicKey, words: Words, *fields: Any) -> Ciphertext:
    """Return ciphertexts that were pickled or copied, on the key's device."""
    return Ciphertext(public, public.space.load(words), *fields)
