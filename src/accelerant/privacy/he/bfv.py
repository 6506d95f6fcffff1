"""BFV: exact arithmetic on encrypted vectors of integers.

>>> public, private = bfv.keygen(n=8192, rotations=True)
>>> x, y = public.encrypt([1, 2, 3]), public.encrypt([4, 5, 6])
>>> private.decrypt((x * y).sum())
array([32])

A ciphertext has n slots, integers mod t that are added and multiplied slot by slot; slots beyond a vector are 0. Slots
are two halves of n/2, which `rotate` rotates. Leading axes are batches: one call multiplies all pairs, which is how
devices are fast. Each operation adds noise; what is left is the noise budget, in bits. Parameters come from the
published table only (bfv_scheme.MAX_LOG_Q, whose edition it names). No bootstrapping. CKKS is not offered.

Trust: who holds the private key reads everything encrypted under the public key. Ciphertexts are IND-CPA secure only,
and malleable: answers to decryption queries, be it only an error or its absence, may give the key away (Chenal and
Tang, LATINCRYPT 2014). So never tell the sender of a ciphertext whether it decrypted: BudgetExceeded is for the key
holder. Noise depends on the circuit and its inputs, so results do not hide a server's inputs from the key holder (no
circuit privacy). Not constant time: rejection of uniform and ternary samples (of rejected words only), Python and
NumPy arithmetic of key generation, and the check of noise in decryption. No kernel has a branch or an address that
depends on an element. Keys are in this process's memory. None of this code has been audited.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.memory_space import HOST, MemorySpace, space_at
from accelerant.errors import BudgetExceeded, ConfigError, RangeError, ShapeError, UnsupportedDtype
from accelerant.privacy.he.bfv_scheme import (
    Parameters,
    Scheme,
    Words,
    centered,
    error_polynomials,
    residues,
    ternary,
    uniform_rows,
)
from accelerant.privacy.random import SecureStream

__all__ = ["Ciphertext", "Parameters", "PrivateKey", "PublicKey", "keygen"]

_SEED_BYTES = 32


def keygen(
    n: int = 8192, plain_modulus: int = 65537, security: int = 128, *, rotations: bool | Iterable[int] = False,
    device: str = "cpu",
) -> tuple[PublicKey, PrivateKey]:  # fmt: skip
    """Return a new pair of keys.

    Args:
        n: number of slots: 2048, 4096, ..., 32768. More slots allow more multiplications in a row.
        plain_modulus: t, a prime that is 1 mod 2 n, below 2^30; results are exact between -t/2 and t/2.
        security: bits against classical attacks, 128, 192 or 256.
        rotations: steps of `rotate` that get a key of their own; True for the powers of two, of which `rotate` composes
            any
            other, and the exchange of the halves, which `sum` needs, too.
        device: where ciphertexts are computed with: "cpu", "cuda", "opencl".

    Raises:
        ConfigError: parameters beyond the standard's table.
    """
    parameters, space = Parameters(n, plain_modulus, security), space_at(device)
    if rotations is True:
        steps = [1 << i for i in range(n.bit_length() - 2)]
    else:
        steps = [operand % (n // 2) for operand in rotations or ()]
    elements = {pow(3, step, 2 * n) for step in steps} | ({2 * n - 1} if rotations is True else set())
    stream = SecureStream()
    secret = ternary(stream, n)
    private = PrivateKey(parameters, secret, space)
    seed = _seed(stream)
    scheme = Scheme.of(HOST, parameters)
    errors = error_polynomials(stream, n)
    mask = uniform_rows(seed, 1, scheme.data, n)[0]
    key = np.stack((_masked(scheme, 1, errors, mask, secret), mask))
    squared = _automorphism(scheme, secret, 0)
    switching = {0: _switching_key(scheme, stream, secret, squared)}
    for element in sorted(elements - {1}):
        switching[element] = _switching_key(scheme, stream, secret, _automorphism(scheme, secret, element))
    public = PublicKey(parameters, key, switching, space)
    private.public = public
    return public, private


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
        rotations: the steps that have a key of their own.
    """

    def __init__(
        self, parameters: Parameters, key: Words, switching: Mapping[int, tuple[bytes, Words]], space: MemorySpace
    ) -> None:
        self.parameters, self.space, self._key, self._halves = parameters, space, key, dict(switching)
        self._scheme = Scheme.of(space, parameters)
        self._device_key = space.load(key)
        self._switching: dict[int, Any] = {}

    def __repr__(self) -> str:
        p = self.parameters
        return f"PublicKey(n={p.n}, plain_modulus={p.plain_modulus}, security={p.security})"

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
        scheme, (plain, shape) = self._scheme, _plain(self.parameters, values)
        stream, batch, k, n = SecureStream(), len(plain), self._scheme.k, self.n
        mask = self.space.load(residues(ternary(stream, batch, n), scheme.data))
        data = scheme.times_keys(mask, self._device_key)
        added = residues(error_polynomials(stream, batch, 2, n), scheme.data).astype(np.uint64)
        added[:, 0] += scheme.scaled(scheme.encode(plain))
        added %= np.array(scheme.data, np.uint64)[:, None]
        data = scheme.rns.add(data, self.space.load(added.astype(np.uint32)), 1, k)
        return Ciphertext(self, data, shape, scheme.fresh_bits)

    def switching(self, element: int) -> Any:
        """Return the key-switching key of an automorphism, or of s^2 for element 0, on the device."""
        if element not in self._switching:
            if element not in self._halves:
                raise ConfigError("the public key has no key for this rotation: keygen(..., rotations=True)")
            scheme = self._scheme
            seed, halves = self._halves[element]
            primes = (scheme.special, *scheme.data)
            both = np.stack((halves, uniform_rows(seed, scheme.k, primes, self.n)), axis=1)
            self._switching[element] = self.space.load(both)
        return self._switching[element]


class PrivateKey:
    """A key that decrypts; neither shown by repr nor pickled or copied."""

    public: PublicKey

    def __init__(self, parameters: Parameters, secret: npt.NDArray[np.int64], space: MemorySpace) -> None:
        self.parameters, self._secret = parameters, secret
        scheme = Scheme.of(HOST, parameters)
        rows = np.ones((2, scheme.k, parameters.n), np.uint32)
        rows[1] = _transformed(scheme, secret, 1, scheme.data)
        self._rows, self.space = space.load(rows), space

    def __repr__(self) -> str:
        p = self.parameters
        return f"PrivateKey(n={p.n}, plain_modulus={p.plain_modulus}, security={p.security})"

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a private key is not pickled or copied: to_bytes(passphrase) or save(path, passphrase)")

    def decrypt(self, c: Ciphertext) -> npt.NDArray[np.int64]:
        """Return the integers, (..., m), between -t/2 and t/2.

        Raises:
            BudgetExceeded: the noise budget is spent, or the ciphertext is of another key. Never tell its sender.
        """
        scheme, phase = self._phase(c)
        if (scheme.noise_fraction(self.space.store(phase)) >= 0.25).any():
            raise BudgetExceeded("the noise budget of a ciphertext is spent: fewer multiplications, or a larger n")
        return scheme.decode(scheme.rounded(phase))[:, : c.shape[-1]].reshape(c.shape)

    def noise_budget(self, c: Ciphertext) -> int:
        """Return the bits by which the noise may still grow, the least of a batch; decryption needs at least 1."""
        scheme, phase = self._phase(c)
        worst = max(scheme.noise(self.space.store(phase)), default=0)
        return max(0, scheme.q.bit_length() - 1 - max(1, 2 * worst).bit_length())

    def _phase(self, c: Ciphertext) -> tuple[Scheme, Any]:
        if c.public is not self.public:
            raise ConfigError(f"the ciphertext is of another key than {self!r}")
        scheme = Scheme.of(self.space, self.parameters)
        return scheme, scheme.phase(c.data, self._rows)


def _plain(parameters: Parameters, values: Any) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """Return integers in all slots, (batch, n), and the shape that they had."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise UnsupportedDtype(f"BFV encrypts integers, got {array.dtype}")
    n, half = parameters.n, parameters.plain_modulus // 2
    if array.ndim == 0 or not 0 < array.shape[-1] <= n:
        raise ShapeError(f"wanted (..., m) integers with m from 1 to {n}, got shape {array.shape}")
    if array.size and not -half <= int(array.min()) <= int(array.max()) <= half:
        raise RangeError(f"integers must be between {-half} and {half}, got {array.min()} to {array.max()}")
    slots = np.zeros((math.prod(array.shape[:-1]), n), np.int64)
    slots[:, : array.shape[-1]] = array.reshape(len(slots), array.shape[-1])
    return slots, array.shape


@dataclass(frozen=True, slots=True, eq=False)
class Ciphertext:
    """Encrypted vectors. + - * take ciphertexts of the same key and shapes, and integers.

    Attributes:
        public: the key.
        data: (batch, 2, k, n) words in the memory of public.space.
        shape: of the integers.
        budget_bits: an estimate of the noise budget, without the key: usually some bits too low.
    """

    public: PublicKey
    data: Any
    shape: tuple[int, ...]
    budget_bits: float
    __array_ufunc__ = None  # NumPy's arrays leave + - * to the methods below

    def __repr__(self) -> str:
        return f"Ciphertext({self.shape}, about {self.budget_bits:.0f} bits of budget, {self.public!r})"

    def __add__(self, other: Any) -> Ciphertext:
        return self._sum(other, subtract=False)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Ciphertext:
        return self._sum(other, subtract=True)

    def __neg__(self) -> Ciphertext:
        scheme = self.public._scheme
        zero = scheme.space.load(np.zeros(tuple(self.data.shape), np.uint32))
        return replace(self, data=scheme.rns.add(zero, self.data, 1, scheme.k, subtract=True))

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
            x, y, shape = self._broadcast(scheme.space.load(added), shape)
            budget = self.budget_bits - 0.1
        return Ciphertext(self.public, scheme.rns.add(x, y, 1, scheme.k, subtract=subtract), shape, budget)

    def __mul__(self, other: Any) -> Ciphertext:
        scheme = self.public._scheme
        if isinstance(other, Ciphertext):
            x, y, shape = self._matched(other)
            data = scheme.multiply(x, y, self.public.switching(0))
            return Ciphertext(self.public, data, shape, scheme.product_bits(self.budget_bits, other.budget_bits))
        plain, shape = self._plain_operand(other)
        coefficients = centered(scheme.encode(plain), scheme.t)
        rows = scheme.space.load(residues(coefficients, scheme.data))
        x, rows, shape = self._broadcast(rows, shape)
        budget = self.budget_bits - scheme.plain_product_bits(coefficients)
        return Ciphertext(self.public, scheme.times_plain(x, rows), shape, budget)

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
        total = self
        for i in range(self.public.n.bit_length() - 2):
            total = total + total.rotate(1 << i)
        total = total + total.swap_halves()
        return replace(total, shape=(*self.shape[:-1], 1))

    def _moved(self, element: int) -> Ciphertext:
        scheme = self.public._scheme
        data = scheme.automorphism(self.data, element, self.public.switching(element))
        return replace(self, data=data, budget_bits=min(self.budget_bits, scheme.switched_bits) - 0.5)

    def _matched(self, other: Ciphertext) -> tuple[Any, Any, tuple[int, ...]]:
        if other.public is not self.public:
            raise ConfigError(f"the ciphertexts are of two keys, {self.public!r} and {other.public!r}")
        return self._broadcast(other.data, other.shape)

    def _broadcast(self, data: Any, shape: tuple[int, ...]) -> tuple[Any, Any, tuple[int, ...]]:
        """Return both operands' words with one batch, and the shape of the result."""
        try:
            lead = np.broadcast_shapes(self.shape[:-1], shape[:-1])
        except ValueError:
            raise ShapeError(f"shapes {self.shape} and {shape} do not broadcast") from None
        both = []
        for words, own in ((self.data, self.shape), (data, shape)):
            if own[:-1] != lead:
                space, tail = self.public.space, tuple(words.shape[1:])
                wide = space.broadcast(space.reshape(words, (*own[:-1], *tail)), (*lead, *tail))
                words = space.reshape(wide, (math.prod(lead), *tail))
            both.append(words)
        return both[0], both[1], (*lead, max(self.shape[-1], shape[-1]))

    def _plain_operand(self, other: Any) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
        array = np.asarray(other)
        return _plain(self.public.parameters, np.full(self.shape[-1], array) if array.ndim == 0 else array)
