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
    QUERIES,
    Claim,
    Element,
    Stack,
    Transcript,
    sha256,
)

Combine = Callable[[Words], Words]


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
        data, count = words_to_bytes(leaves), len(leaves)
        size, digest = len(data) // count, hashlib.sha256
        self.leaves = [data[at : at + size] for at in range(0, len(data), size)]
        level = [digest(b"leaf" + leaf).digest() for leaf in self.leaves]
        self.levels = [level]
        while len(level) > 1 << LOG_CAP:
            level = [digest(b"node" + level[i] + level[i + 1]).digest() for i in range(0, len(level), 2)]
            self.levels.append(level)
        self.cap = b"".join(level)
        self.root = sha256(b"cap", self.cap)

    def opening(self, index: int) -> bytes:
        """Return a leaf and its path."""
        path = [level[(index >> k) ^ 1] for k, level in enumerate(self.levels[:-1])]
        return b"".join([self.leaves[index], *path])


class CommittedTable:
    """A table over F, padded by zeros to whole columns of 2^log_rows rows, with the Merkle tree of its code."""

    def __init__(self, values: Words, log_rows: int) -> None:
        count = max(1, -(-len(values) >> log_rows))
        self.values = np.zeros((count, 1 << log_rows), np.uint64)
        self.values.reshape(-1)[: len(values)] = values
        self.tree = MerkleTree(ext.encode(self.values).T)


def sumcheck_round(speaker: Speaker, tables: Words, degree: int, combine: Combine) -> tuple[Element, Words]:
    """Send g(0), g(2), ..., g(degree) for tables (2, k, n), of which `combine` is summed; bind the last bit."""
    low, high = tables[..., 0::2], tables[..., 1::2]
    step, points, at = ext.sub(high, low), [low], high
    for _ in range(degree - 1):
        at = ext.add(at, step)
        points.append(at)
    speaker.send_elements(ext.total(combine(np.stack(points, axis=2))))
    z = speaker.challenge()
    return z, ext.add(low, ext.mul(step, ext.constant(z, 2)))


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


def send_openings(speaker: Speaker, stack: Stack, committed: Sequence[CommittedTable], claims: Sequence[Claim]) -> None:
    """Show claims on the committed tables; see verifier.check_openings."""
    lam = ext.constant(speaker.challenge(), 1)
    rows, columns = 1 << stack.log_rows, 1 << stack.log_columns
    table, weights = np.zeros((rows, columns), np.uint64), np.zeros((2, columns, rows), np.uint64)
    for each, at in zip(committed, stack.offsets, strict=True):
        table[:, at : at + len(each.values)] = each.values.T
    power, last = ext.constant((1, 0), 1), None
    flat = weights.reshape(2, -1)
    for claim in claims:
        if claim.point != last:
            last, equal = claim.point, ext.eq_table(claim.point)
        at = (stack.offsets[claim.source] << stack.log_rows) + claim.offset
        part = flat[:, at : at + equal.shape[1]]
        part[...] = ext.add(part, ext.mul(equal, power))
        power = ext.mul(power, lam)
    tables = np.stack((ext.lifted(table.reshape(-1)), weights.transpose(0, 2, 1).reshape(2, -1)), axis=1)
    for _ in range(stack.log_columns):
        _, tables = sumcheck_round(speaker, tables, 2, multiplied)
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
    assert len(positions) == QUERIES
    for tree in (*trees, *folded):
        speaker.write(tree.cap)
    for position in positions:
        for tree in trees:
            speaker.write(tree.opening(position))
        for tree in folded:
            position %= len(tree.leaves)
            speaker.write(tree.opening(position))
