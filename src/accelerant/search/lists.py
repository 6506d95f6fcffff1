"""K-means, product quantization, and scans of lists on a CPU: the kernels of llvm_kernels.py on an index's arrays.

A quantizer codes a vector as one of 16 or 256 centroids for each of its parts. Source: Jegou, Douze and Schmid 2011,
"Product quantization for nearest neighbor search".
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.config import launch_log
from accelerant.errors import ConfigError
from accelerant.search.llvm_kernels import BLOCK, CALL, FIELDS, LANES, ROWS, compiled, features

_CLUSTER_SCORES = 1 << 22, 1 << 18
"""Scores of centroids that are held at once, on a GPU and on a CPU."""

_STEPS = 15
_SAMPLE = 128
"""Vectors for each centroid that k-means reads."""


def nearest(x: Tensor, centroids: Tensor, *, spherical: bool) -> Tensor:
    """Return the number of the nearest centroid (n,), by inner product if spherical."""
    minus = torch.zeros_like(centroids[:, 0]) if spherical else centroids.square().sum(1) / 2
    size = max(_CLUSTER_SCORES[x.device.type == "cpu"] // len(centroids), 1)
    scores = torch.empty(min(size, len(x)), len(centroids), dtype=torch.float32, device=x.device)
    found = torch.empty(len(x), dtype=torch.int64, device=x.device)
    for at in range(0, len(x), size):
        some = x[at : at + size]
        part = product(some, centroids, scores[: len(some)]).sub_(minus)
        if x.device.type == "cpu":  # NumPy finds it in a tenth of the time
            part.numpy().argmax(1, out=found[at : at + size].numpy())
        else:
            torch.argmax(part, 1, out=found[at : at + size])
    return found


def product(q: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Return q x^T; on a CPU by NumPy: its OpenBLAS is up to twice as fast as MKL on Zen."""
    if q.device.type != "cpu":
        return torch.mm(q, x.T, out=out)
    if len(q) == 1:
        np.matmul(x.numpy(), q[0].numpy(), out=out[0].numpy())
    else:
        np.matmul(q.numpy(), x.numpy().T, out=out.numpy())
    return out


def kmeans(x: Tensor, count: int, *, spherical: bool = False, seed: int = 0) -> Tensor:
    """Return `count` centroids (count, d) of vectors, by Lloyd's steps on a sample of them; the same for one seed."""
    if len(x) < count:
        raise ConfigError(f"{count} centroids need as many vectors, got {len(x)}")
    generator = torch.Generator().manual_seed(seed)
    x = x[torch.randperm(len(x), generator=generator, device="cpu")[: _SAMPLE * count].to(x.device)].float()
    centroids = x[:count].clone()
    for _ in range(_STEPS):
        at = nearest(x, centroids, spherical=spherical)
        sizes = torch.bincount(at, minlength=count)
        sums = torch.zeros_like(centroids).index_add_(0, at, x)
        centroids = sums / sizes.clamp(min=1).unsqueeze(1)
        empty = (sizes == 0).nonzero().squeeze(1)
        if len(empty):  # takes half of a large cluster
            large = sizes.argsort(descending=True, stable=True)[: len(empty)]
            centroids[empty[: len(large)]] = centroids[large] * (1 + 1 / 1024)
            centroids[large] *= 1 - 1 / 1024
        if spherical:
            centroids = torch.nn.functional.normalize(centroids, dim=1)
    return centroids


@dataclass(frozen=True, slots=True)
class ProductQuantizer:
    """Codes of vectors: for each of M parts the number of one of its centroids.

    Attributes:
        centroids: (M, 2^bits, d / M) float32.
        bits: 8 or 4; a byte has one code, or two, the first in its low half.
    """

    centroids: Tensor
    bits: int

    @classmethod
    def trained(cls, x: Tensor, parts: int, bits: int) -> ProductQuantizer:
        """Return a quantizer of vectors like these (n, d)."""
        pieces = x.view(len(x), parts, -1)
        return cls(torch.stack([kmeans(pieces[:, m], 1 << bits, seed=m) for m in range(parts)]), bits)

    @property
    def code_bytes(self) -> int:
        """Bytes of a vector's code."""
        return (len(self.centroids) * self.bits + 7) // 8

    def encoded(self, x: Tensor) -> Tensor:
        """Return the codes (n, code_bytes) uint8 of vectors (n, d)."""
        pieces = x.view(len(x), len(self.centroids), -1)
        codes = [nearest(pieces[:, m], c, spherical=False).to(torch.uint8) for m, c in enumerate(self.centroids)]
        if self.bits == 4:
            codes = codes + [torch.zeros_like(codes[0])] * (len(codes) % 2)
            codes = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
        return torch.stack(codes, 1)

    def tables(self) -> Tensor:
        """Return what `decoded` looks bytes up in: (code_bytes * 256, elements of a byte) float32."""
        if self.bits == 8:
            return self.centroids.flatten(0, 1)
        centroids = self.centroids
        if len(centroids) % 2:
            centroids = torch.cat([centroids, torch.zeros_like(centroids[:1])])
        low, high = centroids[::2], centroids[1::2]
        pairs = torch.cat([low.unsqueeze(1).expand(-1, 16, -1, -1), high.unsqueeze(2).expand(-1, -1, 16, -1)], 3)
        return pairs.reshape(-1, pairs.shape[-1])

    def decoded(self, codes: Tensor, tables: Tensor) -> Tensor:
        """Return the vectors (n, d) of codes."""
        places = torch.arange(codes.shape[1], device=codes.device, dtype=torch.int32) * 256
        found = torch.nn.functional.embedding(codes + places, tables)
        return found.flatten(1)[:, : len(self.centroids) * self.centroids.shape[2]]


Keys = np.ndarray[Any, Any]
NONE = 2**63 - 1
"""Key of no row."""

_QUERIES = 256
"""Queries whose tables and candidates are held at once."""

_ROOM = 64
"""Rows that a query keeps beyond those that are wanted, at first."""

_FEW = 16
"""Queries of a scan whose memory a thread keeps for the next."""

_LEAST_WORK = 1 << 21
"""Operations, about, that a further thread repays."""

LONG = (1 << 16) - 1
"""Elements of the longest vector whose terms the stack of a thread holds, and sums of whose parts fit 16 bits."""


def scans(queries: int, elements: int) -> bool:
    """Return whether scans of vectors of so many elements on a CPU take less time than tiles of products."""
    return elements < 1 << 24 and (queries <= 2 or queries * elements < 1 << 21)


def _launched(name: tuple[str, ...], count: int, work: int, *arguments: Any) -> None:
    """Launch a kernel on so many indices of so many operations each; little work is done by the calling thread."""
    if not count:
        return
    provider, kernel = compiled(*name)
    if count * work >= _LEAST_WORK or launch_log.enabled:
        provider.launch(kernel, (count,), (1,), arguments)
    else:
        kernel.handle(0, count, *[x.data_ptr() if isinstance(x, Tensor) else x for x in arguments])


def tiled(q: Tensor, x: Tensor, extra: Tensor | None, metric: str, *, maxima: bool) -> Tensor:
    """Return the quick scores (Q, N) of queries and rows, or their maxima in blocks of 64 rows, (Q, blocks).

    The scores are those of products, less `extra` (N,) under l2 and times it under cosine. A score depends on nothing
    but its query and its row.
    """
    (Q, d), N, lanes = q.shape, len(x), features()[0]
    groups, blocks = -(-Q // lanes), -(-N // BLOCK)
    packed = (
        torch.nn.functional.pad(q, (0, 0, 0, groups * lanes - Q)).view(groups, lanes, d).transpose(1, 2).contiguous()
    )
    y = torch.empty(blocks if maxima else N, groups * lanes, dtype=torch.float32, device="cpu")
    arguments = (x, x.stride(0), packed, groups, packed if extra is None else extra.contiguous(), y, N, d)
    _launched(
        ("tiles", "maxima" if maxima else "scores", "ip" if extra is None else metric),
        blocks,
        BLOCK * Q * d,
        *arguments,
    )
    return y.T[:Q].contiguous()


def scored(q: Tensor, x: Tensor, query: Tensor, row: Tensor, metric: str) -> Tensor:
    """Return the scores (P,) of pairs of a query and a row of float32, the bits of `pair_scores`."""
    if q.shape[1] > LONG:
        return pair_scores(q[query], x[row], metric)
    q = q.contiguous()
    y = torch.empty(len(row), dtype=torch.float32, device="cpu")
    _launched(("pairs", metric), len(row), 4 * q.shape[1], q, x, x.stride(0), query, row, y, q.shape[1])
    return y


def pair_scores(q: Tensor, x: Tensor, metric: str) -> Tensor:
    """Return the scores of pairs of vectors (P, d), float32, the same bits on every device."""
    a, b = q.double(), x.double()
    if metric == "l2":
        return _sum((a - b).square_()).float()
    dot = _sum(a * b)
    if metric == "cosine":
        dot = dot / (_sum(a.square()) * _sum(b.square())).sqrt_().clamp_(min=1e-300)
    return dot.float()


def _sum(x: Tensor) -> Tensor:
    """Return the sums along the last dimension in 128 lanes, then by halves: additions that no device reorders."""
    n = min(x.shape[1], 128)
    for first in range(128, x.shape[1], 128):
        some = x[:, first : first + 128]
        x[:, : some.shape[1]] += some
    while n > 1:
        half = 1 << (n - 1).bit_length() - 1
        x[:, : n - half] += x[:, half:n]
        n = half
    return x[:, 0]


def packed(codes: Tensor, starts: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes (rows, bytes) as the blocks of 32 that a scan reads, and the first block of each list.

    The last block of a list is filled up with other rows.
    """
    blocks = torch.nn.functional.pad(((starts.diff() + ROWS - 1) // ROWS).cumsum(0), (1, 0))
    shift = (starts[:-1] - blocks[:-1] * ROWS).repeat_interleave(blocks.diff() * ROWS)
    rows = (torch.arange(len(shift), device="cpu") + shift).clamp_(max=max(int(starts[-1]) - 1, 0))
    x = codes[rows].view(-1, ROWS, codes.shape[1])
    if bits == 8:
        return x.transpose(1, 2).reshape(len(x), -1).contiguous(), blocks
    lanes = torch.tensor(LANES, device="cpu")
    halves = torch.stack([x & 15, x >> 4], 3).flatten(2)
    both = (halves[:, lanes] | halves[:, lanes + 16] << 4).transpose(1, 2)
    return torch.nn.functional.pad(both, (0, 0, 0, -both.shape[1] % 4)).reshape(len(x), -1).contiguous(), blocks


def address(x: Tensor | Keys | None) -> int:
    """Return where an array of the host lies, 0 for none."""
    if x is None:
        return 0
    if isinstance(x, Tensor):
        return x.data_ptr()
    if x.size and x.flags.carray:
        return ctypes.addressof(ctypes.c_char.from_buffer(x.data))  # in a fifth of the time
    return int(x.__array_interface__["data"][0])


class _Memory(threading.local):
    """Arrays to which a thread's scans of few queries write, and the argument of all of them."""

    def __init__(self) -> None:
        self.call = ctypes.create_string_buffer(CALL.size)
        self.at, self.shape, self.room = ctypes.addressof(self.call), (0, 0, 0), _Room(0, 0, 0)


class _Room:
    """Scratch of so many bytes a query; scores, slots and counts."""

    def __init__(self, queries: int, k: int, size: int) -> None:
        self.scratch = np.empty(min(queries, _QUERIES) * size, np.uint8)
        self.found = np.empty((queries, k), np.float32), np.empty((queries, k), np.int64), np.empty(queries, np.int64)
        self.addresses = tuple(address(x) for x in (self.scratch, *self.found))


_memory = _Memory()


class Scan:
    """Lists of rows that a CPU scans, as arrays that the kernels read.

    Args:
        kind: "flat" for vectors, "4" or "8" for codes of these bits.
        arrays: by the names of llvm_kernels.FIELDS. data: vectors (N, d), or the blocks of `packed`.
            extra (N + 32,): of quick scores q . x, "l2" subtracts it, "cosine" multiplies by it.
            starts: the first row of each list and the end of the last; of vectors, one list more is always scanned.
            coarse (d, columns): centroids, of which the first `lists` are; squares: halves of their squared norms.
            vectors: for exact scores, or else codes, with list_of, the list of each row.
            slots: numbers of rows in the order of ids, by default the row's.
        numbers: `lists`, `parts`, `largest`: a bound of the norms of what is scanned.
    """

    def __init__(
        self, kind: str, arrays: dict[str, Tensor | Keys | None], *, largest: float = 0.0, **numbers: int
    ) -> None:
        self.kind, self.arrays = kind, arrays
        data, vectors, codes = (arrays.get(name) for name in ("data", "vectors", "codes"))
        coarse = arrays.get("coarse")
        self.columns, self.parts = 0 if coarse is None else coarse.shape[1], numbers.get("parts", 0)
        self.source, self.lists = "x" if codes is None or vectors is not None else "codes", numbers.get("lists", 0)
        assert isinstance(data, Tensor)
        self.table_bytes = 0 if kind == "flat" else (self.parts << int(kind)) * 4 + data.shape[1]
        fields = {name: address(each) for name, each in arrays.items()} | numbers | {
            "stride": data.stride(0), "row": vectors.stride(0) if isinstance(vectors, Tensor) else 0,
            "columns": self.columns, "N": len(data), "levels": levels(max(self.parts, 1)),
            "code_bytes": 0 if codes is None else codes.shape[1], "largest": int(np.float64(largest).view(np.int64)),
        }  # fmt: skip
        self.plan = np.array([fields.get(name, 0) for name in FIELDS], np.int64)
        self.address = address(self.plan)

    def top(
        self, metric: str, q: Keys, k: int, wanted: int, nprobe: int = 0, *, marks: Keys | None = None,
        given: Keys | None = None, products: Tensor | None = None, work: int = 0,
    ) -> tuple[Keys, Keys, Keys]:  # fmt: skip
        """Return exact scores and slots (Q, k) and counts (Q,) of the best rows; a count of -2 for a norm beyond 1e19.

        Args:
            q: (Q, d) float32, contiguous.
            wanted: rows of the best quick scores, of which the best k are returned; others as near come to them.
            nprobe: lists that a query reads.
            marks: (slots,) or (Q, slots) bool, which rows it may see; where rows have slots also as bits in uint8.
            given: the rows of the list that is always scanned, in place of those from its start.
            products: (Q, lists) quick scores of centroids, where `tiled` has them.
            work: operations of a query, about.
        """
        room = wanted + max(_ROOM, wanted)
        found = self._top(metric, q, k, wanted, nprobe, room, marks, given, products, work)
        while -1 in found[2].tolist():
            short, room = np.flatnonzero(found[2] == -1), 4 * room
            own = marks if marks is None or marks.ndim == 1 else marks[short]
            of_lists = None if products is None else products[torch.from_numpy(short)]
            again = self._top(metric, q[short], k, wanted, nprobe, room, own, given, of_lists, work)
            for whole, part in zip(found, again, strict=True):
                whole[short] = part
        return found

    def _top(
        self, metric: str, q: Keys, k: int, wanted: int, nprobe: int, room: int, marks: Keys | None, given: Keys | None,
        products: Tensor | None, work: int,
    ) -> tuple[Keys, Keys, Keys]:  # fmt: skip
        (Q, d), room, memory = q.shape, -(-room // ROWS) * ROWS + ROWS, _memory
        size = -(-(20 * room + 12 * self.columns + self.table_bytes) // 64) * 64
        if Q > _FEW:
            space = _Room(Q, k, size)
        else:
            if memory.shape != (Q, k, size):
                memory.shape, memory.room = (Q, k, size), _Room(Q, k, size)
            space = memory.room
        shift = 0 if marks is None or marks.dtype == np.bool_ else 3
        of_query = 0 if marks is None or marks.ndim == 1 else marks.strides[0]
        numbers = 0 if given is None else len(given)
        at, marks_at, given_at, products_at = address(q), address(marks), address(given), address(products)
        scratch_at, scores_at, slots_at, counts_at = space.addresses
        name = "scan", self.kind, metric, self.source
        for i in range(0, Q, _QUERIES):
            CALL.pack_into(
                memory.call, 0, self.address, at + 4 * i * d, marks_at + i * of_query, of_query, shift, given_at,
                numbers, products_at and products_at + 4 * i * self.lists, scratch_at, size, wanted, room, nprobe, k,
                d, scores_at + 4 * i * k, slots_at + 8 * i * k, counts_at + 8 * i,
            )  # fmt: skip
            _launched(name, min(Q - i, _QUERIES), work, memory.at)
        scores, slots, counts = space.found
        return (scores, slots, counts) if Q > _FEW else (scores.copy(), slots.copy(), counts.copy())

    def of_blocks(
        self, metric: str, q: Tensor, lists: Tensor, offsets: Tensor, wanted: int, limits: Tensor, margins: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, quick scores (Q, room) and counts (Q,) of what each query's lists have.

        These are all rows whose score is at most a margin below the `wanted`-th largest, and not below the limit. The
        lists of query i are those from offsets[i] to offsets[i + 1].
        """
        most = BLOCK * int(offsets.diff().max()) if len(q) else 0
        for room in (wanted + max(_ROOM, wanted), most):
            room = -(-room // ROWS) * ROWS + ROWS
            scores = torch.empty(len(q), room, dtype=torch.float32, device="cpu")
            rows = torch.empty(len(q), room, dtype=torch.int64, device="cpu")
            counts = torch.empty(len(q), dtype=torch.int64, device="cpu")
            _launched(
                ("scan_blocks", metric), len(q), BLOCK * len(lists) * q.shape[1] // max(len(q), 1),
                torch.from_numpy(self.plan), q.contiguous(), lists, offsets, limits, margins, scores, rows, counts,
                wanted, room, q.shape[1],
            )  # fmt: skip
            if not len(q) or int(counts.min()) >= 0:
                break
        return rows, scores, counts


def levels(parts: int) -> int:
    """Return the largest byte of a table, so that the sums of all parts fit 16 bits."""
    return min(255, 65535 // parts)


def keys_of(score: Tensor, rank: Tensor, *, smallest: bool) -> Keys:
    """Return integers in the order of scores, the best first, then of ranks below 2^31."""
    bits = (score + 0.0).numpy().view(np.int32)  # -0 is 0
    turn = 0 if smallest else -1
    keys: Keys = ((bits ^ (bits >> 31 & 0x7FFFFFFF)).astype(np.int64) ^ turn) << 32 | rank.numpy()
    return keys


def best(keys: Keys, k: int, *, smallest: bool) -> tuple[Any, Any]:
    """Return scores and ranks (Q, k) of the k least keys of each line (Q, W), which it sorts."""
    keys.sort(axis=1)
    keys = keys[:, :k]
    bits = ((keys >> 32) ^ (0 if smallest else -1)).astype(np.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).view(np.float32), keys & 0xFFFFFFFF
