"""Search by an encrypted query. It hides the query from the server, and nothing of the collection from the client.

The client gets the score of every vector, hence the collection; the server must not know the question. Trust is
`bfv`'s.

>>> public, private = keygen(d=384, bits=8)
>>> server = PrivateSearch(vectors, public)          # (N, d) int8, on the server, with the client's public key
>>> scores = server.scores(encrypt_query(private, query))
>>> decrypt_scores(private, scores, len(vectors))    # (N,) int64, exact

One ciphertext holds the query, repeated with the period p = 2^ceil(log2 d) in each half of the slots. Rotated by j it
meets the j-th diagonals, slot i of block b having x[b n + i, (i + j) mod p]. Their sum is the inner product of a row:

    score[b n + i] = sum_j q[(i + j) mod p] x[b n + i, (i + j) mod p]

With j = s g + r, r < s, the rotation by s g is of the sum over r, whose diagonals were rotated back beforehand. s - 1
rotations serve all blocks of n rows, p / s - 1 each block; they double what they rotate, log2 p times in all. A block
takes p products with plain vectors, which are prepared once: 4 k n p bytes a block for k data primes. Source: Halevi
and Shoup 2014, "Algorithms in HElib", section 4.3; Halevi and Shoup 2018, "Faster Homomorphic Linear Transformations in
HElib", eprint 2018/244.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.parameters import is_prime
from accelerant.errors import ConfigError, RangeError, ShapeError, UnsupportedDtype
from accelerant.privacy.he import bfv
from accelerant.privacy.he.bfv_scheme import centered
from accelerant.runtime.host import refuse_masked
from accelerant.runtime.registry import DeviceLike

__all__ = ["PrivateSearch", "decrypt_scores", "encrypt_query", "keygen", "plain_modulus"]


def plain_modulus(d: int, bits: int = 8, n: int = 8192) -> int:
    """Return the least prime t that is 1 mod 2 n and holds every inner product of d integers of so many bits.

    Scores are at most d 4^(bits - 1) in magnitude, and t is above twice that.

    Raises:
        ConfigError: there is none below 2^30: fewer dimensions or bits are needed.
    """
    if not isinstance(d, int) or not 0 < d <= n // 2 or not isinstance(bits, int) or not 2 <= bits <= 16:
        raise ConfigError(f"an encrypted query has 1 to {n // 2} dimensions of 2 to 16 bits, got {d} of {bits}")
    largest = d << 2 * (bits - 1)
    t = (2 * largest) // (2 * n) * 2 * n + 1
    while t < 1 << 30:
        t += 2 * n
        if t < 1 << 30 and is_prime(t):
            return t
    raise ConfigError(
        f"scores of {d} dimensions of {bits} bits reach {largest:,}: BFV's plaintexts hold below 2^29 here"
    )


def keygen(
    d: int, bits: int = 8, n: int = 8192, security: int = 128, *, device: DeviceLike = "cpu"
) -> tuple[bfv.PublicKey, bfv.PrivateKey]:
    """Return the client's keys for queries of d integers of so many bits; arguments and errors also as `bfv.keygen`."""
    steps = [1 << i for i in range(_period(d, n).bit_length() - 1)]
    return bfv.keygen(n, plain_modulus(d, bits, n), security, rotations=steps, device=device)


def _integers(x: Any, name: str, ndim: int) -> npt.NDArray[np.int64]:
    refuse_masked(x, name)
    array = np.asarray(x)
    if array.dtype.kind not in "iu":
        raise UnsupportedDtype(f"{name} must be integers, got {array.dtype}: scale and round them first")
    if array.ndim != ndim or not array.size:
        raise ShapeError(f"{name} must be {'(d,)' if ndim == 1 else '(N, d)'} and not empty, got {array.shape}")
    if not -(1 << 31) < int(array.min()) <= int(array.max()) < 1 << 31:  # sums of their magnitudes fit in int64
        raise RangeError(f"{name} has integers from {array.min():,} to {array.max():,}, beyond 32 bits")
    return array.astype(np.int64)


def _period(d: int, n: int) -> int:
    period = 1 << (d - 1).bit_length()
    if period > n // 2:
        raise ShapeError(f"vectors have at most {n // 2} dimensions for keys of {n} slots, got {d}")
    return period


def encrypt_query(private: bfv.PrivateKey, query: Any, *, bits: int = 8) -> bfv.Ciphertext:
    """Encrypt a query, (d,) integers of so many bits, to one ciphertext, (1, 1, d); RangeError for a larger one."""
    q, n = _integers(query, "query", 1), private.parameters.n
    if not -(1 << (bits - 1)) <= int(q.min()) <= int(q.max()) <= 1 << (bits - 1):
        raise RangeError(
            f"the query has integers from {q.min():,} to {q.max():,}: more than {bits} bits, sign included"
        )
    padded = np.zeros(_period(len(q), n), np.int64)
    padded[: len(q)] = q
    return replace(private.encrypt(np.tile(padded, n // len(padded))), shape=(1, 1, len(q)))


class PrivateSearch:
    """A collection that answers encrypted queries with encrypted scores; the client gets them all.

    It hides the query, not the collection: see the module. Not for a collection that a client must not have.

    Args:
        vectors: (N, d) integers.
        public: the client's key, of `keygen`.
        query_bits: bits of a query's integers, sign included, against which the key's plain modulus is checked.

    Raises:
        UnsupportedDtype, ShapeError: the vectors are no integers in rows.
        RangeError: scores could pass half of the key's plain modulus, and would wrap around.
        ConfigError: the key has no rotations by the powers of two below d.
    """

    def __init__(self, vectors: Any, public: bfv.PublicKey, *, query_bits: int = 8) -> None:
        x, n, t = _integers(vectors, "vectors", 2), public.n, public.parameters.plain_modulus
        largest = int(np.abs(x).sum(1).max()) << (query_bits - 1)
        if 2 * largest >= t:
            needed = f"make keys by keygen({x.shape[1]}, bits), whose modulus is chosen for it"
            raise RangeError(f"scores reach {largest:,}, but the key's plain modulus {t:,} holds {t // 2:,}: {needed}")
        self._public, self._count, self._dim, self._period = public, len(x), int(x.shape[1]), _period(x.shape[1], n)
        self._blocks, scheme, levels = -(-len(x) // n), public._scheme, self._period.bit_length() - 1
        for level in range(levels):
            public.switching(pow(3, 1 << level, 2 * n))
        self._shared = min(range(levels + 1), key=lambda i: (1 << i) + self._blocks * (self._period >> i))
        rows = np.zeros((self._blocks, 2, n // 2, self._period), np.int64)
        rows.reshape(-1, self._period)[: len(x), : x.shape[1]] = x
        step, groups = 1 << self._shared, self._period >> self._shared
        columns = (np.arange(n) + np.arange(step)[:, None]) % self._period
        words = np.empty((groups, self._blocks, step, scheme.k, n), np.uint32)
        moduli, self._growth = np.array(scheme.data, np.int64)[:, None], 0.0
        for place in range(groups):  # the second half is rotated first: groups lie by their bits, the lowest first
            group = int(f"{place:0{levels - self._shared}b}"[::-1], 2) if groups > 1 else 0
            for block, residues in zip(rows, words[place], strict=True):
                turned = np.roll(block, step * group, axis=1).reshape(n, self._period)
                coefficients = centered(scheme.encode(turned[np.arange(n), columns]), t)
                self._growth = max(self._growth, scheme.plain_product_bits(coefficients))
                residues[:] = coefficients[:, None] % moduli  # t may be above a prime
        self._diagonals = public.space.load(words)
        scheme.rns.transform(self._diagonals, 1, scheme.k)

    def __len__(self) -> int:
        """Return the number of vectors."""
        return self._count

    def __repr__(self) -> str:
        return f"PrivateSearch({self._count:,} vectors of {self._dim}, {self._public!r})"

    def scores(self, query: bfv.Ciphertext) -> bfv.Ciphertext:
        """Return the encrypted inner products, (blocks, n); ConfigError or ShapeError for another key or size."""
        if query.public.fingerprint != self._public.fingerprint:
            raise ConfigError(f"the query is of another key than {self._public!r}")
        if query.shape[:-1] != (1, 1):
            raise ShapeError(f"a query is one ciphertext that encrypt_query makes, got shape {query.shape}")
        if query.shape[-1] != self._dim:
            raise ShapeError(f"the query has dimension {query.shape[-1]}, the vectors {self._dim}")
        public, scheme, levels = self._public, self._public._scheme, self._period.bit_length() - 1
        space, rns, k, turned = public.space, scheme.rns, scheme.k, query.data
        elements = [pow(3, 1 << level, 2 * public.n) for level in range(levels)]
        keys = [(element, public.switching(element)) for element in elements]
        for key in keys[: self._shared]:
            turned = space.joined(turned, scheme.automorphism(turned, *key))
        turned = scheme.copy(turned) if self._shared == 0 else turned
        rns.transform(turned, 1, k)
        batch, step = (self._period >> self._shared) * self._blocks, 1 << self._shared
        total = rns.empty(batch, 2, k)
        at: dict[str, Any] = {"x_at": (0, step * k, k), "y_at": (0, 0, k, 2 * k), "z_at": (0, 2 * k, k)}
        rns.dot(self._diagonals, turned, total, 1, k, batch=batch, terms=step, parts=2, **at)
        rns.transform(total, 1, k, inverse=True, products=True)
        for key in keys[self._shared :]:
            batch //= 2
            kept, moved = (space.getitem(total, (part,)) for part in (slice(batch), slice(batch, None)))
            total = rns.add(kept, scheme.automorphism(moved, *key), 1, k)
        # Each rotation adds a switch's noise to what was there; a score is a sum of so many products.
        bits = min(query.budget_bits, scheme.switched_bits) - math.log2(self._period * (levels + 1)) - self._growth
        return bfv.Ciphertext(self._public, total, (self._blocks, self._public.n), bits, query.origin)


def decrypt_scores(private: bfv.PrivateKey, scores: bfv.Ciphertext, count: int) -> npt.NDArray[np.int64]:
    """Return the first `count` scores, exact; ShapeError for a wrong count, BudgetExceeded without noise budget."""
    decrypted = np.asarray(private.decrypt(scores)).reshape(-1)
    if not 0 <= count <= len(decrypted):
        raise ShapeError(f"there are 0 to {len(decrypted):,} scores, got a count of {count}")
    return decrypted[:count]
