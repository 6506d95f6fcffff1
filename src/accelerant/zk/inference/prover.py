"""The prover's side of the protocol: commitments, sumchecks and openings; verifier.py has the messages' order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from accelerant.zk.inference import extension as ext
from accelerant.zk.inference.extension import Words
from accelerant.zk.inference.protocol import (
    LOG_ARITY,
    LOG_CAP,
    LOG_FINAL,
    Claim,
    Element,
    Stack,
    Transcript,
    sha256,
)

Combine = Callable[[Words], Words]

_CHUNK = 1 << 14
"""Entries of tables that a round of a sumcheck takes at a time, so that its temporaries stay in the cache."""


class Speaker(Transcript):
    """The transcript of a prover, who writes the messages of a proof."""

    def __init__(self, header: bytes, *statement: bytes) -> None:
        """Begin a file with a header, and a transcript with a statement."""
        super().__init__(*statement)
        self.parts = [header]

    def write(self, data: bytes) -> None:
        """Add bytes to the proof without absorbing them."""
        self.parts.append(data)

    def send(self, data: bytes) -> None:
        """Add bytes to the proof and absorb them."""
        self.write(data)
        self.absorb(data)

    def send_elements(self, values: Words) -> list[Element]:
        """Send elements of K, (2, n), and return them."""
        self.send(words_to_bytes(values.T))
        return ext.elements(values)


def words_to_bytes(words: npt.NDArray[np.uint64]) -> bytes:
    """Return canonical words as bytes."""
    return np.ascontiguousarray(words).astype("<u8", copy=False).tobytes()


class MerkleTree:
    """A Merkle tree of equal leaves, a power of two of them; see verifier.Tree."""

    def __init__(self, leaves: Words) -> None:
        """Hash rows of words."""
        rows, digest = np.ascontiguousarray(leaves).astype("<u8", copy=False), hashlib.sha256
        self.count, self.data = len(rows), rows.reshape(-1).data.cast("B")
        self.leaf_bytes = len(self.data) // self.count
        level = [digest(b"leaf" + self.leaf(i)).digest() for i in range(self.count)]
        self.levels = [level]
        while len(level) > 1 << LOG_CAP:
            level = [digest(b"node" + level[i] + level[i + 1]).digest() for i in range(0, len(level), 2)]
            self.levels.append(level)
        self.cap = b"".join(level)
        self.root = sha256(b"cap", self.cap)

    def leaf(self, index: int) -> memoryview:
        """Return the bytes of a leaf."""
        return self.data[index * self.leaf_bytes : (index + 1) * self.leaf_bytes]

    def opening(self, index: int) -> bytes:
        """Return a leaf and its path."""
        path = [level[(index >> k) ^ 1] for k, level in enumerate(self.levels[:-1])]
        return b"".join([self.leaf(index), *path])


class CommittedTable:
    """A table over F, padded by zeros to whole columns of 2^log_rows rows, with the Merkle tree of its code."""

    def __init__(self, values: Words, log_rows: int) -> None:
        count = max(1, -(-len(values) >> log_rows))
        self.values = np.zeros((count, 1 << log_rows), np.uint64)
        self.values.reshape(-1)[: len(values)] = values
        self.tree = MerkleTree(ext.encode(self.values).T)


def sumcheck_round(speaker: Speaker, tables: Words, degree: int, combine: Combine) -> tuple[Element, Words]:
    """Send g(0), g(2), ..., g(degree) for tables (2, k, n), of which `combine` is summed; bind the last bit."""
    half = tables.shape[-1] // 2
    parts = [slice(at, at + _CHUNK) for at in range(0, half, _CHUNK)]
    low, high, sums = tables[..., 0::2], tables[..., 1::2], []
    for part in parts:
        at, step, points = high[..., part], ext.sub(high[..., part], low[..., part]), [low[..., part]]
        for _ in range(degree - 1):
            at = ext.add(at, step)
            points.append(at)
        sums.append(ext.total(combine(np.stack(points, axis=2))))
    speaker.send_elements(ext.total(np.stack(sums, axis=-1)))
    z, bound = speaker.challenge(), np.empty((*tables.shape[:-1], half), np.uint64)
    for part in parts:
        step = ext.sub(high[..., part], low[..., part])
        bound[..., part] = ext.add(low[..., part], ext.mul(step, ext.constant(z, 2)))
    return z, bound


def sumcheck(speaker: Speaker, tables: Words, degree: int, combine: Combine) -> tuple[list[Element], Words]:
    """Send a whole sumcheck; return its point and the values of the tables there, (2, k)."""
    point = []
    while tables.shape[-1] > 1:
        z, tables = sumcheck_round(speaker, tables, degree, combine)
        point.append(z)
    return point, tables[..., 0]


def multiplied(tables: Words) -> Words:
    """Return the products of the tables (2, k, ...)."""
    value = tables[:, 0]
    for i in range(1, tables.shape[1]):
        value = ext.mul(value, tables[:, i])
    return value


def send_fractions(
    speaker: Speaker, h: Words, denominator: Words, numerator: Words
) -> tuple[list[Element], list[Element]]:
    """Show h den = num and the sum of h; return the point, and the values of h's two tables over F there."""
    log_size = h.shape[-1].bit_length() - 1
    z, delta = speaker.challenges(log_size), ext.constant(speaker.challenge(), 2)

    def terms(tables: Words) -> Words:
        equal, h, den, num = (tables[:, i] for i in range(4))
        return ext.add(ext.mul(equal, ext.sub(ext.mul(h, den), num)), ext.mul(delta, h))

    tables = np.stack((ext.eq_table(z), h, denominator, numerator), axis=1)
    point, _ = sumcheck(speaker, tables, 3, terms)
    return point, speaker.send_elements(values_at(h, point))


def values_at(tables: Words, point: Sequence[Element]) -> Words:
    """Return the extensions of tables over F (k, 2^n) at a point, (2, k)."""
    return ext.dot(ext.eq_table(point)[:, None, :], tables[None])


def bind_columns(speaker: Speaker, stack: Stack, committed: Sequence[CommittedTable], claims: Sequence[Claim]) -> Words:
    """Send the sumcheck's rounds for columns; return the tables f and e of rows that are left, (2, 2, rows).

    The sum over rows is made first: the tables of a claim have an entry for each column, and no table over K is larger
    than a column.
    """
    lam, power = ext.constant(speaker.challenge(), 1), ext.constant((1, 0), 1)
    rows, columns, count = 1 << stack.log_rows, 1 << stack.log_columns, len(claims)
    tables = np.zeros((2, 2 * count, columns), np.uint64)
    of_rows: list[tuple[int, Words]] = []
    for i, claim in enumerate(claims):
        at, first = claim.offset % rows, stack.offsets[claim.source] + (claim.offset >> stack.log_rows)
        again = i > 0 and claim.point == claims[i - 1].point
        equal = of_rows[-1][1] if again else ext.eq_table(claim.point[: stack.log_rows])
        ends = ext.eq_table(claim.point[stack.log_rows :])
        tables[:, i, first : first + ends.shape[1]] = ext.mul(ends, power)
        if again and of_rows[-1][0] == at:
            tables[:, count + i] = tables[:, count + i - 1]
        else:
            for table, begin in zip(committed, stack.offsets, strict=True):
                part = table.values[:, at : at + equal.shape[1]]
                tables[:, count + i, begin : begin + len(part)] = ext.dot(equal[:, None, :], part[None])
        of_rows.append((at, equal))
        power = ext.mul(power, lam)

    def combine(tables: Words) -> Words:
        return ext.total(np.moveaxis(ext.mul(tables[:, :count], tables[:, count:]), 1, -1))

    point = []
    for _ in range(stack.log_columns):
        z, tables = sumcheck_round(speaker, tables, 2, combine)
        point.append(z)
    weights, left = ext.eq_table(point), np.zeros((2, 2, rows), np.uint64)
    for table, at in zip(committed, stack.offsets, strict=True):
        folded = ext.dot(weights[:, None, at : at + len(table.values)], table.values.T[None])
        left[:, 0] = ext.add(left[:, 0], folded)
    for i, (at, equal) in enumerate(of_rows):
        part = left[:, 1, at : at + equal.shape[1]]
        part[...] = ext.add(part, ext.mul(equal, tables[:, i]))
    return left


def send_openings(speaker: Speaker, stack: Stack, committed: Sequence[CommittedTable], claims: Sequence[Claim]) -> None:
    """Show claims on the committed tables; see verifier.check_openings."""
    tables = bind_columns(speaker, stack, committed, claims)
    folded: list[MerkleTree] = []
    while tables.shape[-1] > 1 << LOG_FINAL:
        codeword = ext.encode(tables[:, 0])
        folded.append(
            MerkleTree(codeword.reshape(2, 1 << LOG_ARITY, -1).transpose(2, 1, 0).reshape(-1, 2 << LOG_ARITY))
        )
        speaker.send(folded[-1].root)
        for _ in range(LOG_ARITY):
            _, tables = sumcheck_round(speaker, tables, 2, multiplied)
    speaker.send_elements(tables[:, 0])
    trees = [each.tree for each in committed]
    positions = speaker.positions(stack.log_domain)
    for tree in (*trees, *folded):
        speaker.write(tree.cap)
    for position in positions:
        for tree in trees:
            speaker.write(tree.opening(position))
        for tree in folded:
            position %= tree.count
            speaker.write(tree.opening(position))
