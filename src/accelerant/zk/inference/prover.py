"""The prover's side of the protocol: commitments, sumchecks and openings; verifier.py has the messages' order."""

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.memory_space import HOST, MemorySpace
from accelerant.algebra.field.program import read_files
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.ledger import launch
from accelerant.zk.inference import extension as ext
from accelerant.zk.inference import verifier
from accelerant.zk.inference.extension import Words
from accelerant.zk.inference.verifier import Claim, Element

Combine = Callable[[Words], Words]

Digests = npt.NDArray[np.uint8]

_THREADS = 128
_LOG_CHUNK = 15
_CHUNK = 1 << _LOG_CHUNK  # entries of tables that a round takes at a time, so that they stay in the cache
_GROUP = 1 << 20  # Entries of a table that are encoded or summed at a time
_KEPT = 1 << 22  # entries of a table whose code is kept from the commitment to the openings


class Speaker(verifier.Transcript):
    """The transcript of a prover, who writes the messages of a proof."""

    def __init__(self, header: bytes, *statement: bytes, space: MemorySpace = HOST) -> None:
        """Begin a file with a header, and a transcript with a statement; trees are hashed by the device of `space`."""
        super().__init__(*statement)
        self.space = space
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


@functools.cache
def sha256_source() -> KernelSource:
    """Return the kernel of sha256.c."""
    text = read_files("zk/inference", "sha256.c")
    return KernelSource("sha256_rows", {"portable": text}, {"sha256_rows": ("*u32", "*u32", "i64", "i64", "i64")})


def hashed_by_kernel(rows: npt.NDArray[Any], prefix: bytes, space: MemorySpace) -> Digests:
    """Return the hashes of a prefix of four bytes and each row of bytes or words, by a kernel."""
    words = np.ascontiguousarray(rows).view(np.uint32)
    n, count = words.shape
    digests = space.empty((n, 8), words.dtype)
    scalars = (int.from_bytes(prefix, "big"), count, n)
    launch(space, sha256_source(), "sha256_rows", -(-n // _THREADS), _THREADS, (space.load(words), digests), *scalars)
    return space.store(digests).view(np.uint8)


def hashed(rows: npt.NDArray[Any], prefix: bytes, space: MemorySpace) -> Digests:
    """Return the hashes of a prefix and each row, on the CPU by hashlib: OpenSSL uses the processor's instructions."""
    if space is not HOST:
        return hashed_by_kernel(rows, prefix, space)
    data, size, digest = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data, rows[0].nbytes, hashlib.sha256
    joined = b"".join([digest(prefix + data[at : at + size]).digest() for at in range(0, len(data), size)])
    return np.frombuffer(joined, np.uint8).reshape(-1, 32)


def code_bytes(size: int) -> int:
    """Return the memory of the code of a table of `size` bytes after its commitment."""
    return size << verifier.LOG_RATE if size <= 8 * _KEPT else 0


class MerkleTree:
    """A Merkle tree of a power of two of leaves; see verifier.Tree."""

    def __init__(self, level: Digests, space: MemorySpace) -> None:
        """Hash the digests of the leaves, in the memory of a device, to the level that proofs contain."""
        self.levels = [level]
        while len(level) > 1 << verifier.LOG_CAP:
            level = hashed(level.reshape(-1, 64), b"node", space)
            self.levels.append(level)
        self.cap = level.tobytes()
        self.root = verifier.sha256(b"cap", self.cap)

    def path(self, index: int) -> bytes:
        """Return the hashes that lead from a leaf to the level that proofs contain."""
        return b"".join([level[(index >> k) ^ 1].tobytes() for k, level in enumerate(self.levels[:-1])])


class FoldedCode:
    """A codeword over K with a Merkle tree, whose leaves have the values that are folded to one."""

    def __init__(self, message: Words, space: MemorySpace) -> None:
        values = ext.encode(message).reshape(2, 1 << verifier.LOG_ARITY, -1)
        self.leaves = np.ascontiguousarray(values.transpose(2, 1, 0)).reshape(-1, 2 << verifier.LOG_ARITY)
        self.tree = MerkleTree(hashed(self.leaves, b"leaf", space), space)

    def openings(self, positions: Sequence[int]) -> list[bytes]:
        """Return the leaf and path of each position."""
        indices = [position % len(self.leaves) for position in positions]
        return [words_to_bytes(self.leaves[i]) + self.tree.path(i) for i in indices]


class CommittedTable:
    """A table over F in columns of 2^log_rows rows, with the Merkle tree of their code, made a coset at a time."""

    def __init__(
        self, values: npt.NDArray[Any], log_rows: int, parts: Sequence[verifier.Part], space: MemorySpace, *,
        keep: bool = False,
    ) -> None:  # fmt: skip
        rows = 1 << log_rows
        self.columns = np.array(verifier.occupied(parts, log_rows))
        missing = max(-(-len(values) // rows), self.columns[-1] + 1) * rows - len(values)
        self.values = (np.pad(values, (0, missing)) if missing else values).reshape(-1, rows)
        self.resident = self.values
        if values.dtype == np.uint8 and space.backend == "cuda":
            self.resident = sys.modules["torch"].from_numpy(self.values).to(space.label)
        level = np.empty((1 << log_rows + verifier.LOG_RATE, 32), np.uint8)
        self._kept = []
        for coset in range(1 << verifier.LOG_RATE):
            leaves = self._leaves(coset)
            level[coset :: 1 << verifier.LOG_RATE] = hashed(leaves, b"leaf", space)
            if keep or leaves.size <= _KEPT:
                self._kept.append(leaves)
        self.tree = MerkleTree(level, space)

    def groups(self) -> Iterator[tuple[slice, npt.NDArray[np.int64]]]:
        """Yield slices and numbers of a few columns, so that copies are small and their memory is reused."""
        step = max(1, _GROUP // self.values.shape[1])
        for at in range(0, len(self.columns), step):
            yield slice(at, at + step), self.columns[at : at + step]

    def over_rows(self, weights: Words, at: int) -> Words:
        """Return sums over the rows from `at` on with weights (2, k, n), for each column that has parts, (2, k, c)."""
        sums = np.empty((*weights.shape[:2], len(self.columns)), np.uint64)
        for group, numbers in self.groups():
            values = self.resident[numbers, at : at + weights.shape[2]]
            if self.values.dtype == np.uint8:
                sums[..., group] = ext.byte_products(weights, values.T)
            else:
                sums[..., group] = ext.dot(weights[:, :, None, :], values[None, None])
        return sums

    def over_columns(self, weights: Words) -> Words:
        """Return sums over the columns that have parts with weights (2, c), for each row, (2, rows)."""
        sums = np.zeros((2, self.values.shape[1]), np.uint64)
        for group, numbers in self.groups():
            part, values = weights[:, None, group], self.resident[numbers]
            if self.values.dtype == np.uint8:
                sums = ext.add(sums, ext.byte_products(part, values)[:, 0])
            else:
                sums = ext.add(sums, ext.dot(part, values.T[None]))
        return sums

    def _leaves(self, coset: int) -> Words:
        """Return a row for each position of a coset."""
        leaves = np.empty((self.values.shape[1], len(self.columns)), np.uint64)
        for group, numbers in self.groups():
            leaves[:, group] = ext.encode_coset(self.values[numbers].astype(np.uint64, copy=False), coset).T
        return leaves

    def openings(self, positions: Sequence[int]) -> list[bytes]:
        """Return the leaf and path of each position."""
        found = [b""] * len(positions)
        for coset in range(1 << verifier.LOG_RATE):
            leaves = self._kept[coset] if self._kept else self._leaves(coset)
            for i, position in enumerate(positions):
                if position % (1 << verifier.LOG_RATE) == coset:
                    found[i] = words_to_bytes(leaves[position >> verifier.LOG_RATE]) + self.tree.path(position)
        return found


class Computed:
    """Tables (2, k, n) of a first round, of which `part` computes a slice; `combine` is 0 outside of `parts`."""

    def __init__(self, shape: tuple[int, int, int], parts: list[slice], part: Callable[[slice], Words]) -> None:
        self.shape, self.parts, self._part = shape, parts, part

    def __getitem__(self, key: tuple[EllipsisType, slice]) -> Words:
        return self._part(key[1])


def chunks(size: int) -> list[slice]:
    """Return slices of _CHUNK entries, or one of fewer."""
    return [slice(at, min(at + _CHUNK, size)) for at in range(0, size, _CHUNK)]


def sumcheck_round(speaker: Speaker, tables: Words | Computed, degree: int, combine: Combine) -> tuple[Element, Words]:
    """Send g(0), g(2), ..., g(degree) for tables (2, k, n), of which `combine` is summed; bind the last bit."""
    size, sums = tables.shape[-1], []
    parts = tables.parts if isinstance(tables, Computed) else chunks(size)
    for part in parts:
        both = tables[..., part]
        at, points = both[..., 1::2], [both[..., 0::2]]
        step = ext.sub(at, points[0])
        for _ in range(degree - 1):
            at = ext.add(at, step)
            points.append(at)
        sums.append(ext.total(combine(np.stack(points, axis=2))))
    speaker.send_elements(ext.total(np.stack(sums, axis=-1)))
    z, bound = speaker.challenge(), np.empty((*tables.shape[:-1], size // 2), np.uint64)
    for part in chunks(size):
        both = tables[..., part]
        low, high = both[..., 0::2], both[..., 1::2]
        bound[..., part.start // 2 : part.stop // 2] = ext.add(low, ext.mul(ext.sub(high, low), ext.constant(z, 2)))
    return z, bound


def sumcheck(speaker: Speaker, tables: Words | Computed, degree: int, combine: Combine) -> tuple[list[Element], Words]:
    """Send a whole sumcheck; return its point and the values of the tables there, (2, k)."""
    point = []
    while tables.shape[-1] > 1:
        z, tables = sumcheck_round(speaker, tables, degree, combine)
        point.append(z)
    return point, tables[..., slice(0, 1)][..., 0]


def multiplied(tables: Words) -> Words:
    """Return the products of the tables (2, k, ...)."""
    value = tables[:, 0]
    for i in range(1, tables.shape[1]):
        value = ext.mul(value, tables[:, i])
    return value


def send_fractions(
    speaker: Speaker, h: Sequence[Words], denominators: Callable[[slice], Words], numerators: Callable[[slice], Words]
) -> tuple[list[Element], Words]:
    """Show h den = num and the sum of h, which is 0 where num is; return the point, and the values of both there."""
    size = len(h[0])
    z, delta = speaker.challenges(size.bit_length() - 1), ext.constant(speaker.challenge(), 2)
    low, high = ext.eq_table(z[:_LOG_CHUNK]), ext.eq_table(z[_LOG_CHUNK:])

    def part(of: slice) -> Words:
        equal = ext.mul(low, high[:, of.start >> _LOG_CHUNK, None])
        return np.stack(
            [equal, np.stack([each[of] for each in h]), denominators(of), ext.lifted(numerators(of))], axis=1
        )

    def terms(tables: Words) -> Words:
        equal, value, den, num = (tables[:, i] for i in range(4))
        return ext.sub(ext.mul(value, ext.add(ext.mul(equal, den), delta)), ext.mul(equal, num))

    parts = [of for of in chunks(size) if numerators(of).any()] or chunks(size)[:1]
    point, _ = sumcheck(speaker, Computed((2, 4, size), parts, part), 3, terms)
    return point, np.concatenate([values_at(each[None], point) for each in h], axis=1)


def values_at(tables: Words, point: Sequence[Element]) -> Words:
    """Return the extensions of tables over F (k, 2^n) at a point, (2, k); the last entries are summed first."""
    low, high = point[:_LOG_CHUNK], point[_LOG_CHUNK:]
    sums = ext.dot(ext.eq_table(low)[:, None, :], tables.reshape(1, -1, 1 << len(low))).reshape(2, len(tables), -1)
    return ext.total(ext.mul(sums, ext.eq_table(high)[:, None, :])) if high else sums[..., 0]


def bind_columns(
    speaker: Speaker, stack: verifier.Stack, committed: Sequence[CommittedTable], claims: Sequence[Claim]
) -> Words:
    """Send the sumcheck's rounds for columns; return the tables f and e of rows that are left, (2, 2, rows).

    The sum over rows is made first, so that no table over K is larger than a column.
    """
    lam, power = ext.constant(speaker.challenge(), 1), ext.constant((1, 0), 1)
    rows, columns, count = 1 << stack.log_rows, 1 << stack.log_columns, len(claims)
    tables = np.zeros((2, 2 * count, columns), np.uint64)
    groups: dict[tuple[int, int, tuple[Element, ...]], list[int]] = {}
    for i, claim in enumerate(claims):
        first = stack.offsets[claim.source] + (claim.offset >> stack.log_rows)
        ends = ext.eq_table(claim.point[stack.log_rows :])
        tables[:, i, first : first + ends.shape[1]] = ext.mul(ends, power)
        key = claim.source, claim.offset % rows, tuple(claim.point[: stack.log_rows])
        groups.setdefault(key, []).append(i)
        power = ext.mul(power, lam)
    equals = {of_rows: ext.eq_table(of_rows) for _, _, of_rows in groups}
    for (source, at, of_rows), which in groups.items():
        table, begin = committed[source], stack.offsets[source]
        sums = table.over_rows(equals[of_rows][:, None, :], at)
        tables[:, count + np.array(which)[:, None], begin + table.columns] = sums

    def combine(tables: Words) -> Words:
        return ext.total(np.moveaxis(ext.mul(tables[:, :count], tables[:, count:]), 1, -1))

    left, point = np.zeros((2, 2, rows), np.uint64), list[Element]()
    bound: dict[int, Words] = {}
    for level in range(stack.log_columns + 1):
        for source in (each for each in range(len(committed)) if stack.logs[each] == level):
            bound[source] = committed[source].over_columns(ext.eq_table(point)[:, committed[source].columns])
            for (other, at, of_rows), which in groups.items():
                if other != source:
                    equal = equals[of_rows]
                    value = ext.total(ext.mul(equal, bound[source][:, at : at + equal.shape[1]]))
                    tables[:, count + np.array(which), stack.offsets[source] >> level] = value[:, None]
        if level < stack.log_columns:
            z, tables = sumcheck_round(speaker, tables, 2, combine)
            point.append(z)
    for source, values in bound.items():
        begin, log = stack.offsets[source], stack.logs[source]
        weight = ext.constant(verifier.eq(point[log:], verifier.bits(begin >> log, stack.log_columns - log)), 1)
        left[:, 0] = ext.add(left[:, 0], ext.mul(values, weight))
    for (_, at, of_rows), which in groups.items():
        part = left[:, 1, at : at + equals[of_rows].shape[1]]
        part[...] = ext.add(part, ext.mul(equals[of_rows], ext.total(tables[:, which, 0])[:, None]))
    return left


def send_openings(
    speaker: Speaker, stack: verifier.Stack, committed: Sequence[CommittedTable], claims: Sequence[Claim]
) -> None:
    """Show claims on the committed tables; see verifier.check_openings."""
    tables = bind_columns(speaker, stack, committed, claims)
    folded: list[FoldedCode] = []
    while tables.shape[-1] > 1 << verifier.LOG_FINAL:
        folded.append(FoldedCode(tables[:, 0], speaker.space))
        speaker.send(folded[-1].tree.root)
        for _ in range(verifier.LOG_ARITY):
            _, tables = sumcheck_round(speaker, tables, 2, multiplied)
    speaker.send_elements(tables[:, 0])
    positions = speaker.positions(stack.log_domain)
    codes: list[CommittedTable | FoldedCode] = [*committed, *folded]
    for code in codes:
        speaker.write(code.tree.cap)
    for openings in zip(*(code.openings(positions) for code in codes), strict=True):
        speaker.write(b"".join(openings))
