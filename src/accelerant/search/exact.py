"""Exact search: a quick product chooses rows, with a bound of its error; the chosen rows are scored again, exactly.

    s'[q, n] = q . x[n]          as fast as the device computes it, |s' - s| <= e
    T[q]     = a lower bound of the k-th largest s', from maxima of blocks of rows
    rows with s' >= T - 2 e      are scored again: products and sums in float64, by halves, rounded once to float32

A row of the k best has s >= T - e, so s' >= T - 2 e: none is left out. A score depends on the query and the row alone,
not on the batch, the chunk, the number of threads or the device, and equal scores are ordered by id, so that a search
repeats bit for bit.

The bound: sums of d products in any order err by at most gamma_d sum |q_i x_i| <= gamma_d |q| |x|, gamma_d = d u / (1 -
d u), u = 2^-24. Source: Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.1.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError, RangeError, ShapeError, UnsupportedDtype
from accelerant.runtime.ledger import OpRecord, RecordedLaunch, sole_record
from accelerant.runtime.registry import provider_of
from accelerant.search import blocks
from accelerant.search.arrays import Hits, Selection, as_given, names, selection, tensor, vectors
from accelerant.search.lists import LONG, NONE, Scan, best, keys_of, pair_scores, product, scans, scored, tiled
from accelerant.search.llvm_kernels import BLOCK

METRICS = ("ip", "cosine", "l2", "hamming")

_BLOCK = 32
"""Rows whose largest score is compared first."""

_SCORES = {"cpu": 1 << 20, "cuda": 1 << 28}
"""Scores that are held at once: on a CPU they stay in its cache."""

_FEW = 1 << 15
"""Scores that are compared one by one: fewer than that take longer to divide in blocks."""

_SEVERAL = 2
"""Queries that are multiplied by a kernel on a CPU; one by NumPy."""

_LARGEST = (1 << 32) - 1
"""Rows whose numbers fit a scan's keys."""

_QUERIES = {"cpu": 256, "cuda": 4096}
_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 29}
"""Elements of a chunk of rows that has to be copied: converted, gathered, or brought to the device."""

_COMPACTED = 4
"""One query reads only the rows that a filter leaves where these are fewer than a quarter; several always do."""

_DENSE = 3
"""Queries up to which a CPU scans the rows of a filter where they are, if they are more than that quarter."""

_OVERSAMPLED = 4
"""Rows of lower precision for each one that a search with `rerank` returns."""

_UNIT = 2.0**-24
_INPUT_ERROR = {"highest": 0.0, "high": 2.0**-11, "medium": 2.0**-8}
"""Relative rounding of the factors of torch's float32 products, by torch.get_float32_matmul_precision()."""


def exact(
    queries: Any, data: Any, k: int = 10, metric: str = "ip", mask: Any = None, ids: Any = None, *, rerank: Any = None
) -> Hits:
    """Return the k rows of a collection that are nearest to each query, exactly, ties by id.

    Scores are sums in float64 rounded to float32. They depend on the query and the row alone: batches, chunks, filters,
    threads and devices give the same bits.

    Args:
        queries: (Q, d), or (d,) for one; float32, bfloat16, float16, int8, or for "hamming" uint8 with 8 bits each.
            An array of NumPy, torch or CuPy; answers are of the same library, on the same device.
        data: (N, d), or a sequence of such arrays, whose rows are numbered on: one on each of several GPUs is searched
            by all of them. Of other dtypes than the queries' if not uint8. Rows in the host's memory pass through the
            device of the queries in chunks.
        k: answers a query, at least 1; fewer where the filter leaves fewer rows.
        metric: "ip" (inner product) and "cosine", largest first; "l2" (squared distance) and "hamming" (differing
            bits), smallest first. A zero vector has cosine 0 with every vector.
        mask: the rows to search: bool or bits (uint8, lowest bit first) for all queries, (N,) or (N / 8,), or for each,
            (Q, N) or (Q, N / 8); or a list, set, array, slice or range of ids, of which unknown ones select nothing.
        ids: (N,) int64, the id of each row, its number by default. Rows may share an id.
        rerank: (N, d), the vectors of which `data` has a copy of lower precision. The 4 k best of the copy are scored
            by these; `recall` says what that costs.

    Returns:
        Hits: scores (Q, k) float32 and ids (Q, k) int64, with attribute `counts`; (k,) for one query.

    Raises:
        ConfigError: k below 1, or an unknown metric.
        ShapeError: dimensions that differ; a mask or ids of another length.
        UnsupportedDtype: a dtype not listed above.
        RangeError: NaN or infinity, whose row is named; norms above 1e19, whose squares float32 does not hold.
    """
    if ids is None and rerank is None and (case := blocks.quick(queries, data, k, metric, mask)):
        described = len(queries), len(data), data.shape[1], data.dtype, metric, data.nbytes
        with _recorded(True, queries.device, *described):
            known = blocks.again(case, queries, k)
        if known is not None:
            return Hits(known.scores, known.rows, known.counts)
    back = as_given(queries)
    asked = tensor(queries, "queries")
    q = vectors(asked.unsqueeze(0) if asked.dim() == 1 else queries, "queries")
    shards = list(data) if isinstance(data, (list, tuple)) and data and getattr(data[0], "ndim", 0) == 2 else [data]
    parts = [vectors(part, "data") for part in shards]
    k = checked_k(k)
    if rerank is not None and metric == "hamming":
        raise ConfigError("rerank is for numbers: bits have no lower precision, and hamming is exact")
    _check(q, parts, metric)
    count = sum(map(len, parts))
    of_rows = None if ids is None else names(ids, count)
    wide = None if rerank is None else vectors(rerank, "rerank")
    if wide is not None and wide.shape != (count, q.shape[1]):
        raise ShapeError(f"rerank must be ({count}, {q.shape[1]}), as data is, got {tuple(wide.shape)}")
    _check(q, [] if wide is None else [wide], metric)
    chosen = selection(mask, len(q), count, of_rows, device=q.device if q.is_cuda else None)
    hits = search(q, parts, k, metric, chosen, of_rows, wide)
    if asked.dim() == 1:
        hits = Hits(hits[0][0], hits[1][0], hits.counts[0])
    return Hits(back(hits[0]), back(hits[1]), back(hits.counts))


def recall(ids: Any, truth: Any) -> float:
    """Return the share of the true answers that were found: ids of `truth` (Q, k) in the same row of `ids`."""
    found, wanted = tensor(ids, "ids").cpu(), tensor(truth, "truth").cpu()
    if found.dim() != 2 or wanted.dim() != 2 or len(found) != len(wanted):
        raise ShapeError(f"recall compares (Q, k) with (Q, k), got {tuple(found.shape)} and {tuple(wanted.shape)}")
    real = wanted >= 0
    hit = (wanted.unsqueeze(2) == found.unsqueeze(1)).any(2) & real
    return float(hit.sum()) / int(real.sum()) if bool(real.any()) else 1.0


def checked_k(k: Any) -> int:
    """Return k as an integer of at least 1, or raise ConfigError."""
    try:
        wanted = operator.index(k)
    except TypeError:
        raise ConfigError(f"k must be an integer, got {k!r}") from None
    if wanted < 1:
        raise ConfigError(f"k must be at least 1, got {wanted}")
    return min(wanted, 1 << 48)  # of which int64 holds multiples


def _check(q: Tensor, parts: list[Tensor], metric: str) -> None:
    if metric not in METRICS:
        raise ConfigError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    for part in parts:
        if part.shape[1] != q.shape[1]:
            raise ShapeError(f"queries have dimension {q.shape[1]}, data {part.shape[1]}")
        bits = [x.dtype == torch.uint8 for x in (q, part)]
        if bits != [metric == "hamming"] * 2:
            raise UnsupportedDtype(f"uint8 is for hamming, and hamming for uint8: metric {metric!r} of "
                                   f"{q.dtype} and {part.dtype}")  # fmt: skip


def search(
    q: Tensor, parts: list[Tensor], k: int, metric: str, chosen: Selection, ids: Tensor | None = None,
    wide: Tensor | None = None, known: blocks.Known | None = None,
) -> Hits:  # fmt: skip
    """Return the answers on checked tensors, on the device of the queries; `known` is of one part's rows."""
    count = sum(map(len, parts))
    wanted = k if wide is None else _OVERSAMPLED * k
    serves = bool(len(q) and count) and blocks.serves(q.device, metric, wanted)
    size = sum(part.numel() * part.element_size() for part in parts)
    with _recorded(serves, q.device, len(q), count, q.shape[1], parts[0].dtype, metric, size):
        alone = wide is None and known is None and len(parts) == 1 and not serves
        if alone and (scanned := _scanned(q, parts[0], k, metric, chosen, ids)) is not None:
            return scanned
        starts = [0, *accumulate(map(len, parts))]
        nears = [q.to(part.device) if part.device.type != "cpu" else q for part in parts]
        somes = [chosen]
        if len(parts) > 1:
            somes = [chosen.part(*ends, x.device) for ends, x in zip(pairwise(starts), parts, strict=True)]
        given = list(zip(nears, parts, somes, strict=True))
        begun = [blocks.start(*each[:2], wanted, metric, each[2], known) if serves else [] for each in given]

        def one(at: int) -> Hits | tuple[Tensor, ...]:
            near, part, some = given[at]
            own = None if ids is None else ids[starts[at] : starts[at + 1]].to(near.device)
            found = blocks.top(near, part, wanted, metric, some, known, begun[at]) if serves and len(part) else None
            if (
                found is not None
                and any(each.tied for each in found)
                and own is not None
                and bool((own.diff() < 0).any())
            ):
                found = None  # which of the equal rows has the least id is not known
            if found is not None and len(found) == 1 and wide is None:
                return _by_id(found[0], own, starts[at], smallest=smallest)
            search = Part(near, k, metric, starts[at], own, wide, None if known is None else known.norms)
            return search.top(part, some) if found is None else search.among(part, found)

        smallest = metric in ("l2", "hamming")
        if len({part.device for part in parts}) > 1 and not serves:  # each GPU is kept busy by its own thread
            with ThreadPoolExecutor(len(parts)) as pool:
                answers = list(pool.map(one, range(len(parts))))
        else:
            answers = [one(at) for at in range(len(parts))]
        hits = [Hits(*(x.to(q.device) for x in (*each, each.counts))) for each in answers if isinstance(each, Hits)]
        if len(hits) == len(parts):
            return hits[0] if len(hits) == 1 else _merged(hits, k, smallest=smallest)
        pairs = [_pairs(each) if isinstance(each, Hits) else each for each in answers]
        row, name, score = (torch.cat([each[i].to(q.device) for each in pairs]) for i in range(3))
        return dense(row, name, score, len(q), k, smallest=smallest)


def _scanned(q: Tensor, x: Tensor, k: int, metric: str, chosen: Selection, ids: Tensor | None) -> Hits | None:
    """Return the answers of few queries on a CPU by a scan of the rows; None where `Part` takes less time, or refuses.

    A large share of the rows is read where it is, a small one is gathered.
    """
    if not len(q) or metric == "hamming" or {q.device.type, x.device.type} != {"cpu"}:
        return None
    (N, d), rows, numbers = x.shape, chosen.rows, None
    count = N if rows is None else len(rows)
    dense = isinstance(rows, Tensor) and x.dtype == torch.float32 and count * _COMPACTED > N
    size = (N if dense else count) * d
    few = scans(len(q), size) or (dense and len(q) <= _DENSE)
    if chosen.each is not None or d > LONG or N > _LARGEST or not few:
        return None
    if not count:
        usual = bool((torch.linalg.vector_norm(q.float(), dim=1) < 1e19).all())
        empty = torch.zeros(len(q), 0, device="cpu")
        return (
            Hits(empty.float(), empty.long(), torch.zeros(len(q), dtype=torch.int64, device="cpu")) if usual else None
        )
    if isinstance(rows, range):
        x, numbers = x[rows.start : rows.stop], np.arange(rows.start, rows.start + count)
    elif rows is not None and not dense:
        x, numbers = x.index_select(0, rows), rows.numpy()
    if ids is not None and bool((ids[1:] < ids[:-1]).any()):
        return None
    x, q = x.float(), q.float().contiguous()
    norms = torch.linalg.vector_norm(x, dim=1)
    largest = float(norms.max())
    if not largest < 1e19 or (metric == "cosine" and not (float(norms.min()) > 1e-12 and largest < 1e12)):
        return None
    extra = None if metric == "ip" else norms.square() / 2 if metric == "l2" else norms.reciprocal()
    arrays: dict[str, Any] = {
        "data": x, "vectors": x, "extra": extra, "starts": torch.tensor([0, len(x)], device="cpu"), "slots": numbers,
    }  # fmt: skip
    scan = Scan("flat", arrays, largest=1.0 if metric == "cosine" else largest)
    given = rows.numpy() if dense and isinstance(rows, Tensor) else None
    answers = scan.top(metric, q.numpy(), min(k, count), min(k, count), given=given, work=size)
    scores, found, counts = map(torch.from_numpy, answers)
    if bool((counts < 0).any()):
        return None
    return Hits(scores, found if ids is None else ids[found], counts)


def _recorded(
    serves: bool, device: torch.device, Q: int, N: int, d: int, dtype: torch.dtype, metric: str, size: int
) -> RecordedLaunch:  # fmt: skip
    provider = provider_of(device)
    record = _record("triton" if serves else "torch", provider.name, str(device), Q, N, d, dtype, metric, size)
    return RecordedLaunch(record, provider, device.index or 0)


@functools.lru_cache(maxsize=1024)
def _record(
    implementation: str, backend: str, device: str, Q: int, N: int, d: int, dtype: torch.dtype, metric: str, size: int
) -> OpRecord:  # fmt: skip
    case = f"{Q} x {N} x {d} {str(dtype).removeprefix('torch.')} {metric}"
    return sole_record("search_exact", implementation, backend, device, case, size_bytes=size, operations=2 * Q * N * d)


def _by_id(found: blocks.Found, ids: Tensor | None, start: int, *, smallest: bool) -> Hits:
    """Return the answers of all queries with the ids of their rows, of equal scores the lowest id first."""
    scores, rows, k = found.scores, found.rows, found.rows.shape[1]
    if ids is None:
        return Hits(scores, rows + start * (rows >= 0) if start else rows, found.counts)
    return _best(scores, ids[rows.clamp(min=0)].masked_fill_(rows < 0, -1), found.counts, k, smallest=smallest)


def _best(scores: Tensor, ids: Tensor, counts: Tensor, k: int, *, smallest: bool) -> Hits:
    """Return the k best of each query's answers (Q, any number), of equal scores the lowest id first."""
    order = ids.argsort(dim=1, stable=True)
    order = order.gather(1, scores.gather(1, order).argsort(dim=1, descending=not smallest, stable=True))[:, :k]
    return Hits(scores.gather(1, order), ids.gather(1, order), counts.clamp(max=k))


def _merged(hits: list[Hits], k: int, *, smallest: bool) -> Hits:
    """Return the k best of the answers of several searches for the same queries."""
    scores, ids = (torch.cat([each[i] for each in hits], 1) for i in (0, 1))
    counts = torch.stack([each.counts for each in hits]).sum(0)
    return _best(scores, ids, counts, min(k, int(counts.max())), smallest=smallest)


def _pairs(hits: Hits) -> tuple[Tensor, ...]:
    """Return (query, id, score) of each answer."""
    query, column = (hits[1] >= 0).nonzero(as_tuple=True)
    return query, hits[1][query, column], hits[0][query, column]


def dense(row: Tensor, name: Tensor, score: Tensor, queries: int, k: int, *, smallest: bool) -> Hits:
    """Return the k best (query, id, score) of each query as Hits."""
    short = row.device.type == "cpu" and _short(name, queries)
    if short and queries * int(torch.bincount(row, minlength=1).max()) <= 2 * len(row) + _FEW:
        return _dense_of_keys(row, name, score, queries, k, smallest=smallest)
    order, rank = _ranked(row, name, -score if smallest else score, queries)
    order, rank = order[rank < k], rank[rank < k]
    row = row[order]
    counts = torch.bincount(row, minlength=queries)
    width = int(counts.max()) if queries else 0
    scores = score.new_full((queries, width), float("inf") if smallest else float("-inf"))
    ids = name.new_full((queries, width), -1)
    scores[row, rank] = score[order]
    ids[row, rank] = name[order]
    return Hits(scores, ids, counts)


def _dense_of_keys(row: Tensor, name: Tensor, score: Tensor, queries: int, k: int, *, smallest: bool) -> Hits:
    """Compute `dense` by sorting integers, a line a query, which have both score and id."""
    keys, at = keys_of(score, name, smallest=smallest), row.numpy()
    if len(at) and (at[1:] < at[:-1]).any():
        order = at.astype(np.uint16).argsort(kind="stable")  # a radix sort
        keys, at = keys[order], at[order]
    sizes = np.bincount(at, minlength=queries)
    lines = np.full((queries, int(sizes.max(initial=0))), NONE)
    lines[at, np.arange(len(at)) - (sizes.cumsum() - sizes)[at]] = keys
    scores, ids = (torch.from_numpy(each) for each in best(lines, k, smallest=smallest))
    counts = torch.from_numpy(sizes).clamp_(max=k)
    absent = torch.arange(scores.shape[1], device="cpu") >= counts.unsqueeze(1)
    return Hits(scores.masked_fill_(absent, float("inf" if smallest else "-inf")), ids.masked_fill_(absent, -1), counts)


def _ranked(row: Tensor, name: Tensor | None, score: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Return the order by query, falling score and id, and the rank of each entry in its query."""
    numbers = torch.arange(len(row), device=row.device) if name is None else name
    if row.device.type == "cpu" and _short(numbers, queries):
        ranks = keys_of(score, numbers, smallest=False).argsort()
        ranks = ranks[row.numpy()[ranks].astype(np.uint16).argsort(kind="stable")]  # which is a radix sort
        order = torch.from_numpy(ranks)
    else:
        order = numbers.argsort(stable=True)
        order = order[score[order].argsort(descending=True, stable=True)]
        order = order[row[order].argsort(stable=True)]
    counts = torch.bincount(row, minlength=queries)
    starts = counts.cumsum(0) - counts
    return order, torch.arange(len(row), device=row.device) - starts[row[order]]


def _short(name: Tensor, queries: int) -> bool:
    """Return whether ids fit a key beside their scores, and queries 16 bits."""
    return queries <= 1 << 16 and (not len(name) or (int(name.min()) >= 0 and int(name.max()) < 1 << 31))


@dataclass(slots=True)
class Found:
    """Rows that may be answers: their query, their number and their quick score."""

    query: Tensor
    row: Tensor
    score: Tensor


class Part:
    """A search of one array of rows: the k best of every query, in chunks of rows and tiles of queries."""

    def __init__(
        self, q: Tensor, k: int, metric: str, start: int = 0, ids: Tensor | None = None, wide: Tensor | None = None,
        known: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.q, self.k, self.metric, self.start, self.wide, self.known = q, k, metric, start, wide, known
        self.wanted = k if wide is None else _OVERSAMPLED * k
        self.device = q.device
        self.ids = None if ids is None else ids.to(self.device)
        self.least = torch.full((len(q),), float("-inf"), dtype=torch.float32, device=self.device)  # T
        self.error = torch.zeros(len(q), dtype=torch.float32, device=self.device)  # e
        self.buffer: Tensor | None = None
        self.factor = q
        self.tiles = metric != "hamming" and self.device.type == "cpu" and len(q) >= _SEVERAL
        self.norms = torch.zeros(0, dtype=torch.float32, device="cpu")
        if metric != "hamming":
            norms = torch.linalg.vector_norm(q.double(), dim=1)
            self._refuse(norms.float(), q, "queries")
            self.norms = norms.float()
            if metric == "cosine":
                self.factor = (q / norms.clamp(min=1e-300).unsqueeze(1)).float()
            else:
                self.factor = q.float() * (2 if metric == "l2" else 1)

    def top(self, data: Tensor, chosen: Selection) -> tuple[Tensor, Tensor, Tensor]:
        """Return (query, id, score) of the answers, more than k of a query where that is not decided yet."""
        pieces = [self._nothing()]
        for at, (x, rows, hidden) in enumerate(self._chunks(data, chosen)):
            factor, minus = self._prepared(x, rows)
            step = _QUERIES["cpu" if self.device.type == "cpu" else "cuda"]
            for first in range(0, len(self.q), step):
                tile = slice(first, first + step)
                covered = hidden if hidden is None or len(hidden) == 1 else hidden[tile]
                pieces.append(self._tile(factor, minus, tile, rows, covered))
            if at & (at + 1) == 0:
                pieces = [self._decided(self._joined(pieces))]
        found = pieces[0] if len(pieces) == 1 else self._decided(self._joined(pieces))
        return self._named(data, found)

    def among(self, data: Tensor, tiles: list[blocks.Found]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (query, id, score) of what the kernels found, scored by `wide` where that is given."""
        pieces = [self._nothing()]
        for tile in tiles:
            query, column = (tile.rows >= 0).nonzero(as_tuple=True)
            pieces.append(Found(query + tile.first, tile.rows[query, column], tile.scores[query, column]))
        return self._named(data, self._joined(pieces), scored=self.wide is None)

    def _named(self, data: Tensor, found: Found, *, scored: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        name = found.row + self.start if self.ids is None else self.ids[found.row]
        return found.query, name, found.score if scored else self._scored(data, found)

    def _nothing(self) -> Found:
        kinds = (torch.int64, torch.int64, torch.float32)
        return Found(*(torch.zeros(0, dtype=kind, device=self.device) for kind in kinds))

    @staticmethod
    def _joined(pieces: list[Found]) -> Found:
        return Found(*(torch.cat([getattr(piece, name) for piece in pieces]) for name in ("query", "row", "score")))

    def _chunks(self, data: Tensor, chosen: Selection) -> Iterator[tuple[Tensor, Tensor | range, Tensor | None]]:
        """Yield rows on the device, their numbers, and what is hidden of them, (Q, rows) or (1, rows) bool."""
        rows, each = chosen.rows, chosen.each
        copied = data.device != self.device or data.dtype != torch.float32 or isinstance(rows, Tensor)
        kind = "cpu" if self.device.type == "cpu" else "cuda"
        size = max(_SCORES[kind] // max(min(len(self.q), _QUERIES[kind]), 1), 2 * self.wanted, 2048)
        if self.tiles and each is None:  # which keep maxima alone
            size *= BLOCK
        if copied:
            size = min(size, max(_ELEMENTS[kind] // data.shape[1], 2 * self.wanted, 256))
        size = -(-size // _BLOCK) * _BLOCK
        left = None
        if isinstance(rows, Tensor):
            rows = rows.to(data.device)
            if len(self.q) == 1 and len(rows) * _COMPACTED > len(data):
                left = torch.ones(1, len(data), dtype=torch.bool, device=data.device)
                left[0, rows] = False
                rows = None
        numbers: Tensor | range = range(len(data)) if rows is None else rows
        for first in range(0, len(numbers), size):
            some = numbers[first : first + size]
            x = data[some.start : some.stop] if isinstance(some, range) else data.index_select(0, some)
            at: Any = slice(some.start, some.stop) if isinstance(some, range) else some
            hidden = None if left is None else left[:, at]
            if each is not None:
                hidden = ~each[:, at.to(each.device) if isinstance(at, Tensor) else at]
            if isinstance(some, Tensor):
                some = some.to(self.device)
            yield x.to(self.device), some, None if hidden is None else hidden.to(self.device)

    def _prepared(self, x: Tensor, rows: Tensor | range) -> tuple[Tensor, Tensor | None]:
        """Return what is multiplied by the queries, and |x|^2 under l2 or 1 / |x| under cosine; update the bound."""
        if self.metric == "hamming":
            return x, None
        whole = x.dtype == self.q.dtype == torch.int8 and self._is_whole(x.shape[1])
        wide = x.float()
        if whole:
            return wide, None if self.metric == "ip" else wide.square().sum(1)
        if self.known is None:
            norms = torch.linalg.vector_norm(wide, dim=1, dtype=torch.float32)
        else:
            norms = self.known[rows.start : rows.stop] if isinstance(rows, range) else self.known[rows]
        largest = norms.max()
        if not float(largest) < 1e19:
            self._refuse(norms, x, "data", rows)
        self._widened(norms, x.shape[1])
        if self.metric == "cosine":
            if not (float(norms.min()) > 1e-12 and float(largest) < 1e12):
                norms = torch.linalg.vector_norm(wide.double(), dim=1).clamp(min=1e-300)
                return (wide / norms.unsqueeze(1)).float(), None
            return wide, norms.reciprocal()
        return wide, norms.square() if self.metric == "l2" else None

    def _widened(self, norms: Tensor, d: int) -> None:
        """Raise the bound e of the quick scores' error to that of rows with these norms."""
        share = (d + 16) * _UNIT * 1.05 + 2.1 * _INPUT_ERROR[torch.get_float32_matmul_precision()]
        largest = norms.max() + (d * 1e-38) ** 0.5  # squares below float32's range
        if self.metric == "cosine":
            self.error = self.error.clamp(min=3 * share)
            return
        bound = self.norms * largest if self.metric == "ip" else (self.norms + largest).square()
        self.error = torch.maximum(self.error, share * bound + d * 1e-37)

    def _is_whole(self, d: int) -> bool:
        """Return whether scores of int8 vectors are integers that float32 holds, in any order of the sums."""
        return (self.metric == "ip" and d <= 1024) or (self.metric == "l2" and d <= 256)

    def _refuse(self, norms: Tensor, x: Tensor, name: str, rows: Tensor | range | None = None) -> None:
        """Raise RangeError for the first row that is not finite, or whose square float32 does not hold."""
        wrong = (~(norms < 1e19)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            number = at if rows is None else int(rows[at]) + self.start
            if bool(torch.isfinite(x[at].float()).all()):
                raise RangeError(f"row {number} of {name} has a norm above 1e19: scale the vectors")
            raise RangeError(f"row {number} of {name} has NaN or infinity")

    def _tile(
        self, x: Tensor, extra: Tensor | None, tile: slice | Tensor, rows: Tensor | range, hidden: Tensor | None
    ) -> Found:
        """Return the rows of a chunk that may be answers of some queries, by the quick scores."""
        if self.tiles and hidden is None and len(x) >= 2 * self.wanted * BLOCK:
            return self._by_tiles(x, extra, tile, rows)
        return self._chosen(self._products(x, extra, tile), tile, rows, hidden)

    def _by_tiles(self, x: Tensor, extra: Tensor | None, tile: slice | Tensor, rows: Tensor | range) -> Found:
        """Compute `_tile` on a CPU: maxima of blocks, then a scan of the blocks that matter."""
        q = self.factor[tile]
        maxima = tiled(q, x, extra, self.metric, maxima=True)
        limit = self._raised(tile, maxima, always=True)
        query, block = (maxima >= limit.unsqueeze(1)).nonzero(as_tuple=True)
        offsets = torch.nn.functional.pad(torch.bincount(query, minlength=len(q)).cumsum(0), (1, 0))
        starts = torch.arange(maxima.shape[1] + 1, device="cpu").mul_(BLOCK).clamp_(max=len(x))
        scan = Scan("flat", {"data": x, "extra": extra, "starts": starts})
        metric = "ip" if extra is None else self.metric
        row, score, counts = scan.of_blocks(metric, q, block, offsets, self.wanted, limit, 2 * self.error[tile])
        at, column = (torch.arange(row.shape[1], device="cpu") < counts.unsqueeze(1)).nonzero(as_tuple=True)
        return self._numbered(tile, rows, at, row[at, column], score[at, column])

    def _chosen(self, scores: Tensor, tile: slice | Tensor, rows: Tensor | range, hidden: Tensor | None) -> Found:
        """Return the rows whose quick scores (queries of the tile, rows) are within the bounds."""
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        if scores.numel() <= _FEW:  # of blocks of one row
            limit = self._raised(tile, scores).unsqueeze(1)
            query, column = (scores >= limit).nonzero(as_tuple=True)
            return self._numbered(tile, rows, query, column, scores[query, column])
        short = -scores.shape[1] % _BLOCK
        padded = torch.nn.functional.pad(scores, (0, short), value=float("-inf")) if short else scores
        lanes = padded.view(len(padded), _BLOCK, -1)  # block b has columns b, b + width, ...: maxima of whole vectors
        maxima = lanes.amax(1)
        width = maxima.shape[1]
        limit = self._raised(tile, maxima if width >= 2 * self.wanted else padded)
        query, block = (maxima >= limit.unsqueeze(1)).nonzero(as_tuple=True)
        near = lanes[query, :, block]
        at, lane = (near >= limit[query].unsqueeze(1)).nonzero(as_tuple=True)
        return self._numbered(tile, rows, query[at], block[at] + lane * width, near[at, lane])

    def _raised(self, tile: slice | Tensor, scores: Tensor, *, always: bool = False) -> Tensor:
        """Return the least scores of candidates; queries that have no bound T yet get one from scores of theirs."""
        least = self.least[tile]
        if scores.shape[1] >= self.wanted and (always or bool((least == float("-inf")).any())):
            least = torch.maximum(least, scores.topk(self.wanted, dim=1).values[:, -1])
            self.least[tile] = least
        return self._limit(least, self.error[tile])

    @staticmethod
    def _numbered(tile: slice | Tensor, rows: Tensor | range, query: Tensor, column: Tensor, score: Tensor) -> Found:
        """Return what was found, with the numbers of queries and rows that a tile and a chunk have."""
        found = rows[column] if isinstance(rows, Tensor) else column + rows.start
        return Found(query + tile.start if isinstance(tile, slice) else tile[query], found, score)

    def _products(self, x: Tensor, extra: Tensor | None, tile: slice | Tensor) -> Tensor:
        """Return quick scores (queries, rows), the largest for the nearest."""
        q = self.factor[tile]
        if self.metric == "hamming":
            return _minus_differing(q, x)
        if self.buffer is None or self.buffer.shape != (len(q), len(x)):
            self.buffer = torch.empty(len(q), len(x), dtype=torch.float32, device=self.device)
        scores = product(q, x, self.buffer)
        if extra is None:
            return scores
        return scores.sub_(extra) if self.metric == "l2" else scores.mul_(extra)

    @staticmethod
    def _limit(least: Tensor, error: Tensor) -> Tensor:
        return (least - 2 * error).clamp(min=torch.finfo(torch.float32).min)  # -inf is hidden

    def _decided(self, found: Found) -> Found:
        """Raise the bounds T to the k-th largest quick scores, and drop the rows below."""
        if len(found.row) <= self.wanted:
            return found
        if self.device.type == "cpu" and int(torch.bincount(found.query).max()) <= self.wanted:
            return found
        whole = self.metric == "hamming" or not bool(self.error.any())
        name = (found.row if self.ids is None else self.ids[found.row]) if whole else None
        order, rank = _ranked(found.query, name, found.score, len(self.q))
        last = order[rank == self.wanted - 1]
        self.least[found.query[last]] = torch.maximum(self.least[found.query[last]], found.score[last])
        if whole:
            kept = order[rank < self.wanted]
        else:
            kept = (found.score >= self._limit(self.least, self.error)[found.query]).nonzero().squeeze(1)
        return Found(found.query[kept], found.row[kept], found.score[kept])

    def _scored(self, data: Tensor, found: Found) -> Tensor:
        """Return the scores of the found rows, which depend on nothing but the two vectors."""
        if self.metric == "hamming" and self.wide is None:
            return -found.score
        source, shift = (data, 0) if self.wide is None else (self.wide, self.start)
        rows = (found.row + shift).to(source.device)
        if self.wide is None and source.device.type == self.device.type == "cpu" and source.dtype == torch.float32:
            return scored(self.q.float(), source, found.query, rows, self.metric)
        size = max((1 << 20) // data.shape[1], 1)
        pieces = []
        for first in range(0, len(rows), size):
            some = slice(first, first + size)
            x = source.index_select(0, rows[some]).to(self.device)
            if self.wide is not None:
                norms = torch.linalg.vector_norm(x.double(), dim=1)
                self._refuse(norms, x, "rerank", found.row[some])
            pieces.append(pair_scores(self.q[found.query[some]], x, self.metric))
        return torch.cat(pieces) if pieces else found.score


def _minus_differing(q: Tensor, x: Tensor) -> Tensor:
    """Return minus the number of differing bits of each pair, float32."""
    if q.device.type != "cpu":  # as a product of signs: exact, and by matrix units
        signs = [((y.unsqueeze(2) >> torch.arange(8, device=y.device)) & 1).flatten(1).float() * 2 - 1 for y in (q, x)]
        with torch.autocast(q.device.type, enabled=False):
            return (signs[0] @ signs[1].T - signs[0].shape[1]) / 2
    short = -x.shape[1] % 8
    words = [np.pad(y.numpy(), ((0, 0), (0, short))).view(np.uint64) for y in (q, x)]
    columns = np.ascontiguousarray(words[1].T)
    differing = np.zeros((len(q), len(x)), np.float32)
    for row, query in zip(differing, words[0], strict=True):
        for word, column in zip(query, columns, strict=True):
            row -= np.bitwise_count(column ^ word)
    return torch.from_numpy(differing)
