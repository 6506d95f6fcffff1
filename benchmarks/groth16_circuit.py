"""Generated circuits of any size for the suite groth16, and their witnesses.

Of four constraints two say that a wire is 0 or 1; the others are products of an earlier wire plus a constant (1, -1 or
any) and another earlier wire. The first ones, as many as there are public inputs, are such products less the public
input. Products come in layers, each reading wires of the layers before, so that a witness is some vector operations.

Wires: 1, the public inputs, private ones, then one for each constraint.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from accelerant import zk
from accelerant.zk.formats import TERM
from accelerant.zk.groth16.setup import Constraints

__all__ = ["Circuit"]

U64 = npt.NDArray[np.uint64]
Index = npt.NDArray[np.int64]
Terms = npt.NDArray[np.void]

_PRIVATE = 64
"""Private inputs, and products of the first layer; each layer has as many products as all before it."""

_BITS_OF_FOUR = 2
_BELOW_BITS = 253
"""Random elements are below 2^253, which is below the order."""


class Circuit:
    """A circuit on BN254.

    Attributes:
        constraints: the matrices that a key is made from.
    """

    def __init__(self, n_constraints: int, n_public: int = 5, seed: int = 1) -> None:
        """Draw a circuit; the same arguments draw the same one.

        Args:
            n_constraints: number of rows, at least 1.
            n_public: public inputs, each with a row; at most n_constraints.
        """
        n_public = min(n_public, n_constraints)
        self.n_constraints, self.n_public = n_constraints, n_public
        self._field = zk.field("bn254_fr")
        rng = np.random.default_rng([seed, n_constraints, n_public])
        row = np.arange(n_constraints)
        self._first = 1 + n_public + _PRIVATE
        self._bits = np.flatnonzero((row % 4 < _BITS_OF_FOUR) & (row >= n_public))
        self._products = np.setdiff1d(row, self._bits, assume_unique=True)
        count = len(self._products)
        self._operands = np.empty((2, count), np.int64)
        for start, stop in self._layers():
            known = np.concatenate([1 + n_public + np.arange(_PRIVATE), self._first + self._products[:start]])
            self._operands[:, start:stop] = known[rng.integers(0, len(known), (2, stop - start))]
        self._factors = _elements(rng, count)
        small = self._field.encode([1, self._field.modulus - 1])
        for kind in (0, 1):
            self._factors[rng.integers(0, 3, count) == kind] = small[kind]
        self.constraints = Constraints(
            "bn254", self._first + n_constraints, n_public, n_constraints, self._matrices(small)
        )

    def _layers(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the end index of each layer of products."""
        start, count = 0, len(self._products)
        while start < count:
            stop = min(count, 2 * start or _PRIVATE)
            yield start, stop
            start = stop

    def _matrices(self, small: U64) -> tuple[Terms, Terms, Terms]:
        """Return the matrices A, B, C by ascending row."""
        one, minus_one = small
        bits, products = self._bits, self._products
        new = self._first + np.arange(self.n_constraints)
        left, right = self._operands
        public = np.arange(self.n_public)
        bit = _terms(bits, new[bits], one)
        return (
            _by_row(_terms(products, left, one), _terms(products, 0 * left, self._factors), bit),
            _by_row(_terms(products, right, one), _terms(bits, 0 * bits, minus_one), bit),
            _by_row(_terms(public, 1 + public, one), _terms(products, new[products], one)),
        )

    def witness(self, seed: int) -> U64:
        """Return canonical words (wires, 4) that satisfy the constraints; each seed gives another witness."""
        field, rng = self._field, np.random.default_rng([seed, self.n_constraints])
        wires = np.zeros((self._first + self.n_constraints, 4), np.uint64)
        wires[0, 0] = 1
        wires[1 : self._first] = _elements(rng, self._first - 1)
        wires[self._first + self._bits, 0] = rng.integers(0, 2, len(self._bits), np.uint64)
        for start, stop in self._layers():
            left, right = (np.ascontiguousarray(wires[operand[start:stop]]) for operand in self._operands)
            product = field.mul(field.add(left, np.ascontiguousarray(self._factors[start:stop])), right)
            publics = max(0, min(stop, self.n_public) - start)  # rows of public inputs are the first products
            if publics:
                public = np.ascontiguousarray(wires[1 + start : 1 + start + publics])
                product[:publics] = field.sub(np.ascontiguousarray(product[:publics]), public)
            wires[self._first + self._products[start:stop]] = product
        return wires


def _elements(rng: np.random.Generator, n: int) -> U64:
    words = rng.integers(0, 2**64, (n, 4), np.uint64)
    words[:, 3] >>= np.uint64(256 - _BELOW_BITS)
    return words


def _by_row(*terms: Terms) -> Terms:
    joined = np.concatenate(terms)
    return joined[np.argsort(joined["row"], kind="stable")]


def _terms(rows: Index, wires: Index, values: U64) -> Terms:
    """Return a matrix's entries; `values` has one for each, or one for all."""
    entries = np.zeros(len(rows), TERM)
    entries["row"], entries["wire"], entries["value"] = rows, wires, values
    return entries
