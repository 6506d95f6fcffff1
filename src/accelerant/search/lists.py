"""K-means, product quantization, and scans of lists on a CPU: the kernels of llvm_kernels.py on an index's arrays.

A quantizer codes a vector as one of 16 or 256 centroids for each of its parts. Source: Jegou, Douze and Schmid 2011,
"Product quantization for nearest neighbor search".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.config import launch_log
from accelerant.errors import ConfigError
from accelerant.search.arrays import Selection
from accelerant.search.llvm_kernels import BLOCK, LANES, ROWS, compiled, features

_CLUSTER_SCORES = 1 << 22
_STEPS = 15
_SAMPLE = 128
"""Vectors for each centroid that k-means reads."""


def nearest(x: Tensor, centroids: Tensor, *, spherical: bool) -> Tensor:
    """Return the number of the nearest centroid (n,), by inner product if spherical."""
    minus = torch.zeros_like(centroids[:, 0]) if spherical else -centroids.square().sum(1) / 2
    size = max(_CLUSTER_SCORES // len(centroids), 1)
    with torch.autocast(x.device.type, enabled=False):
        parts = [torch.addmm(minus, x[at : at + size], centroids.T).argmax(1) for at in range(0, len(x), size)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=x.device)


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

_LEAST_WORK = 1 << 21
"""Operations, about, that a further thread repays."""

LONG = 1 << 16
"""Elements of the longest vector whose terms the stack of a thread holds."""


def _launched(name: tuple[str, ...], count: int, work: int, *arguments: Any) -> None:
    """Launch a kernel on so many indices of so many operations each; little work is done by the calling thread."""
    if not count:
        return
    provider, kernel = compiled(*name)
    if count * work >= _LEAST_WORK or launch_log.enabled:
        provider.launch(kernel, (count,), (1,), arguments)
    else:
        kernel.handle(0, count, *(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments))


def padded(x: Tensor | None) -> Tensor | None:
    """Return numbers of rows with room for a whole block after the last."""
    return None if x is None else torch.nn.functional.pad(x, (0, ROWS))


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


@dataclass(frozen=True)
class Layout:
    """Lists of rows that follow one another, in blocks of 32 of which the last of a list is partly empty.

    Attributes:
        starts: (L + 1,) int64, the first row of each list, and the end of the last.
    """

    starts: Tensor

    @cached_property
    def blocks(self) -> Tensor:
        """The first block of each list, and the end of the last, (L + 1,) int64."""
        return torch.nn.functional.pad(((self.starts.diff() + ROWS - 1) // ROWS).cumsum(0), (1, 0))

    @cached_property
    def rows(self) -> Tensor:
        """The row in each place of each block, the last row for places that are empty, (blocks * 32,) int64."""
        counts = self.blocks.diff() * ROWS
        shift = (self.starts[:-1] - self.blocks[:-1] * ROWS).repeat_interleave(counts)
        return (torch.arange(len(shift), device="cpu") + shift).clamp_(max=max(int(self.starts[-1]) - 1, 0))

    @cached_property
    def places(self) -> Keys:
        """The place of each row from the first on, (rows,) int64."""
        shift = self.blocks[:-1] * ROWS - self.starts[:-1]
        rows = torch.arange(int(self.starts[0]), int(self.starts[-1]), device="cpu")
        return (rows + shift.repeat_interleave(self.starts.diff())).numpy()

    @cached_property
    def all_seen(self) -> Tensor:
        """Words of a query that sees all rows."""
        return self.seen(Selection())

    def seen(self, chosen: Selection) -> Tensor:
        """Return the places that queries see, a word of 32 bits for each block, (1 or Q, blocks) int32."""
        first, stop = int(self.starts[0]), int(self.starts[-1])
        part, each = chosen.part(first, stop), chosen.each
        bits = np.zeros((1 if each is None else len(each), int(self.blocks[-1]) * ROWS), np.bool_)
        if part.each is not None:
            bits[:, self.places] = part.each.numpy()
        elif isinstance(part.rows, Tensor):
            bits[0, self.places[part.rows.numpy()]] = True
        else:
            bits[0, self.places if part.rows is None else self.places[part.rows.start : part.rows.stop]] = True
        words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        return torch.from_numpy(words)

    def packed(self, codes: Tensor, quantizer: ProductQuantizer) -> Tensor:
        """Return codes (rows, bytes) as the blocks that a scan reads, (blocks, bytes of a block) uint8."""
        x = codes[self.rows].view(-1, ROWS, codes.shape[1])
        if quantizer.bits == 8:
            return x.transpose(1, 2).reshape(len(x), -1)
        lanes = torch.tensor(LANES, device="cpu")
        halves = torch.stack([x & 15, x >> 4], 3).flatten(2)
        both = (halves[:, lanes] | halves[:, lanes + 16] << 4).transpose(1, 2)
        return torch.nn.functional.pad(both, (0, 0, 0, -both.shape[1] % 4)).reshape(len(x), -1)


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan for the rows of lists that score best.

    Attributes:
        layout: the lists.
        data: vectors (N, d) float32, or the blocks of codes that the layout packed.
        largest: a bound of the norms of vectors, or of what is added up to those of codes.
        quantizer: of the codes, whose centroids are `tables`, (parts, elements, 2^bits).
        extra: of the rows, (N + 32,) float32: |x|^2, which l2 subtracts from products, or the factor 1 / |x|;
            None leaves products as they are.
    """

    layout: Layout
    data: Tensor
    largest: float
    extra: Tensor | None
    quantizer: ProductQuantizer | None = None
    tables: Tensor | None = None

    def found(
        self, q: Tensor, probes: Tensor, offsets: Tensor, bias: Tensor | None, seen: Tensor, wanted: int,
        *, metric: str, limits: Tensor | None = None, margins: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return rows and scores (Q, room) that each query finds in its lists, and how many they are, (Q,).

        These are all rows whose score is at most a margin below the `wanted`-th largest, and not below the limit. For
        codes of 4 bits the margin is that of their rounded tables, and more.

        Args:
            q: (Q, d) float32.
            probes: the lists of the queries, one query's after the other's, from its `offsets` (Q + 1,) on.
            bias: what a list adds to the scores of its codes, as `probes`.
            seen: words of the layout.
        """
        pieces = []
        for first in range(0, len(q), _QUERIES):
            which, room = torch.arange(first, min(first + _QUERIES, len(q)), device="cpu"), wanted + max(_ROOM, wanted)
            while len(which):  # again, with more room, those that had too little
                own, least, most = (x if x is None or len(x) == len(which) else x[which] for x in (q, limits, margins))
                assert own is not None
                rows, scores, counts = self._some(
                    own, probes, offsets, which, bias, seen, wanted, room, least, most, metric=metric
                )
                if len(which) == len(q) and int(counts.min()) >= 0:
                    return rows, scores, counts
                pieces.append((which, rows, scores, counts))
                which, room = which[counts < 0], 4 * room
        width = max([int(counts.max()) for _, _, _, counts in pieces], default=0)
        every = torch.zeros(len(q), width, dtype=torch.int64, device="cpu"), q.new_zeros(len(q), width)
        found = torch.zeros(len(q), dtype=torch.int64, device="cpu")
        for which, rows, scores, counts in pieces:
            for whole, piece in zip(every, (rows, scores), strict=True):
                some = min(width, piece.shape[1])
                whole[which, :some] = piece[:, :some]
            found[which] = counts
        return *every, found

    def _some(
        self, q: Tensor, probes: Tensor, offsets: Tensor, which: Tensor, bias: Tensor | None, seen: Tensor, wanted: int,
        room: int, limits: Tensor | None, margins: Tensor | None, *, metric: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return rows, scores (Q, room) and counts (Q,) of some queries, a count of -1 where there are more."""
        Q, d, room = len(q), q.shape[1], -(-room // ROWS) * ROWS + ROWS
        if len(which) + 1 != len(offsets):  # the probes of these queries alone
            spans = offsets[which + 1] - offsets[which]
            own = torch.nn.functional.pad(spans.cumsum(0), (1, 0))
            at = torch.arange(int(own[-1]), device="cpu") + (offsets[which] - own[:-1]).repeat_interleave(spans)
            probes, offsets, bias = probes[at], own, None if bias is None else bias[at]
            seen = seen if len(seen) == 1 else seen[which]
        scores = torch.empty(Q, room, dtype=torch.float32, device="cpu")
        rows, counts = (
            torch.empty(Q, room, dtype=torch.int64, device="cpu"),
            torch.empty(Q, dtype=torch.int64, device="cpu"),
        )
        limits = scores.new_full((Q,), torch.finfo(torch.float32).min) if limits is None else limits
        margins = scores.new_zeros(Q) if margins is None else margins
        kind, parts, tables, small = "flat", 1, scores, scores
        metric = "ip" if self.extra is None else metric
        if self.quantizer is not None:
            kind, parts = str(self.quantizer.bits), len(self.quantizer.centroids)
            tables = scores.new_empty(Q, parts << self.quantizer.bits)
            small = torch.zeros(Q, self.data.shape[1], dtype=torch.uint8, device="cpu") if kind == "4" else scores
        centroids, layout = scores if self.tables is None else self.tables, self.layout
        work = len(probes) * layout.all_seen.shape[1] * ROWS * d // (Q * len(layout.starts))
        _launched(
            ("scan", kind, metric), Q, work, q.contiguous(), self.data, self.data.stride(0),
            scores if self.extra is None else self.extra, seen, 0 if len(seen) == 1 else seen.stride(0), layout.starts,
            layout.blocks, probes, offsets, scores if bias is None else bias, limits, margins, scores, rows, counts,
            wanted, room, d, max(int(layout.starts[-1]), 1), centroids, parts, tables, small, levels(parts),
        )  # fmt: skip
        return rows, scores, counts


def levels(parts: int) -> int:
    """Return the largest byte of a table, so that the sums of all parts fit 16 bits."""
    return min(255, 65535 // parts)


def ranked(q: Tensor, x: Tensor, row: Tensor, counts: Tensor, rank: Tensor, metric: str) -> Keys:
    """Return the keys (Q, room) of the first rows of each query: the scores of `pair_scores`, then ranks of rows."""
    Q, d, keys = len(q), q.shape[1], torch.empty(row.shape, dtype=torch.int64, device="cpu")
    arguments = (q.contiguous(), x, x.stride(0), row, counts, rank, keys, row.shape[1], d)
    _launched(("ranked", metric), Q, 4 * d * row.shape[1], *arguments)
    return keys.numpy()


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
