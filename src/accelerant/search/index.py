"""Index: vectors that are added, removed and searched, flat, in inverted lists, or as product-quantized codes.

    flat    every search reads every vector, and is exact
    ivf     vectors lie in lists by their nearest centroid; a search reads the `nprobe` lists nearest to the query
    ivfpq   the same with codes of the vectors' differences to the centroids; answers are scored by the vectors

A change makes a new state, which later searches read: readers never wait. Vectors that were added since the lists were
last sorted are searched exactly.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError, RangeError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.runtime.host import fork_safe
from accelerant.search.arrays import Hits, Selection, as_given, names, selection, tensor, vectors
from accelerant.search.exact import METRICS, Found, Part, checked_k, dense, search
from accelerant.search.lists import (
    LONG,
    NONE,
    Keys,
    Layout,
    ProductQuantizer,
    Scan,
    best,
    keys_of,
    kmeans,
    nearest,
    padded,
    ranked,
    scored,
    tiled,
)

KINDS = ("flat", "ivf", "ivfpq")
_UNSORTED = 8
"""Lists are sorted again when more than an eighth of the rows lies outside of them."""

_READERS, _SHARED = 64, 12_000
"""Queries that read a list of vectors, and scores of it, from which on a CPU multiplies it with all of them at once."""


@dataclass(frozen=True, slots=True)
class Lists:
    """Trained parameters of inverted lists: centroids (L, d), and the quantizer of codes with its tables."""

    centroids: Tensor
    quantizer: ProductQuantizer | None = None
    residual: bool = True
    tables: Tensor | None = None


@dataclass(frozen=True)
class State:
    """One version of an index's contents. Rows lie by list up to starts[-1], the later ones in no list.

    Attributes:
        ids: (N,) int64.
        vectors: (N, d), or None where only codes were read from a file.
        norms: (N,) float32 of the vectors; None for bits.
        codes: (N, bytes) uint8 of kind "ivfpq".
        starts: first row of each list, and the end of the last; empty without lists.
        lists: what the lists were trained to.
    """

    ids: Tensor
    vectors: Tensor | None
    norms: Tensor | None = None
    codes: Tensor | None = None
    starts: tuple[int, ...] = ()
    lists: Lists | None = None

    @property
    def listed(self) -> int:
        """Rows that lie in lists."""
        return self.starts[-1] if self.starts else 0

    def rows_of(self, at: int) -> range:
        """Return the rows of a list."""
        return range(self.starts[at], self.starts[at + 1])

    @cached_property
    def layout(self) -> Layout:
        """The blocks of the lists, and of the rows in none as one more."""
        return Layout(torch.tensor([*self.starts, len(self.ids)], device="cpu"))

    @cached_property
    def scan(self) -> Scan:
        """The scan of the lists on a CPU, of codes where there are some."""
        layout, lists = self.layout, self.lists
        assert lists is not None
        if self.codes is None:
            assert self.vectors is not None
            assert self.norms is not None
            return Scan(layout, self.vectors, _largest(self.norms), padded(self.norms.square()))
        quantizer = lists.quantizer
        assert quantizer is not None
        layout = Layout(layout.starts[:-1])
        decoded = (self.decoded(at) for at in range(len(self.starts) - 1))
        square = padded(torch.cat([x.square().sum(1) for x in decoded]))
        centroids = quantizer.centroids.transpose(1, 2).contiguous()
        largest = float(quantizer.centroids.square().sum(2).amax(1).sum().sqrt())
        if lists.residual:
            largest += float(torch.linalg.vector_norm(lists.centroids, dim=1).max())
        return Scan(layout, layout.packed(self.codes, quantizer), largest, square, quantizer, centroids)

    @cached_property
    def by_id(self) -> tuple[Tensor, Tensor]:
        """The ids in rising order, and the rank of each row's."""
        order = self.ids.argsort()
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device="cpu")
        return self.ids[order], rank

    @cached_property
    def squares(self) -> Tensor:
        """Squares of the centroids' norms, (L,)."""
        assert self.lists is not None
        return self.lists.centroids.square().sum(1)

    def decoded(self, at: int) -> Tensor:
        """Return the vectors of a list, those of its codes where it has codes."""
        rows = self.rows_of(at)
        if self.codes is None:
            assert self.vectors is not None
            return self.vectors[rows.start : rows.stop]
        assert self.lists is not None
        assert self.lists.quantizer is not None
        assert self.lists.tables is not None
        x = self.lists.quantizer.decoded(self.codes[rows.start : rows.stop], self.lists.tables)
        return x + self.lists.centroids[at] if self.lists.residual else x


class Index:
    """Vectors with ids that can be added, removed, searched, saved and loaded.

    Args:
        dim: elements of a vector; for "hamming" its bits, a multiple of 8.
        metric: "ip", "cosine", "l2" or, for kind "flat", "hamming". Vectors are normalized as they are added under
            "cosine"; a zero vector stays zero.
        kind: "flat", "ivf" or "ivfpq", see the module.
        lists: inverted lists; 4 sqrt(N) for the N vectors of the first `add` by default.
        parts: parts of a product-quantized vector, which divide dim; by default of 4 elements, or 2 or 1.
        bits: of each part's code, 8 or 4.
        rerank: candidates for each answer of "ivfpq" that are scored by the vectors; 0 keeps no vectors.
        device: where the vectors are kept and searched, as torch names it.

    >>> index = accelerant.search.Index(384, metric="cosine", kind="ivfpq")
    >>> index.add(x, ids)
    >>> scores, ids = index.search(queries, k=10, nprobe=32, mask=allowed)
    """

    def __init__(
        self, dim: int, metric: str = "ip", kind: str = "flat", *, lists: int | None = None, parts: int | None = None,
        bits: int = 8, rerank: int = 4, device: Any = "cpu",
    ) -> None:  # fmt: skip
        if metric not in METRICS or kind not in KINDS:
            raise ConfigError(f"metric is one of {METRICS}, kind one of {KINDS}; got {metric!r} and {kind!r}")
        if metric == "hamming" and (kind != "flat" or (isinstance(dim, int) and dim % 8)):
            raise UnsupportedCase("hamming is for kind='flat' and a dim that is a multiple of 8")
        given = (dim, lists, parts, bits, rerank)
        if any(not isinstance(each, int) for each in given if each is not None):
            raise ConfigError(f"dim, lists, parts, bits and rerank are integers; got {given}")
        if dim < 1 or (lists is not None and lists < 1) or bits not in (4, 8) or rerank < 0:
            raise ConfigError(f"wanted dim and lists of 1 or more, bits of 4 or 8, rerank of 0 or more; got {given}")
        parts = next(dim // each for each in (4, 2, 1) if dim % each == 0) if parts is None else parts
        if parts < 1 or dim % parts:
            raise ConfigError(f"parts must divide dim {dim}, got {parts}")
        self.dim, self.metric, self.kind, self.rerank = dim, metric, kind, rerank
        self.parts, self.bits, self.wanted_lists, self.device = parts, bits, lists, torch.device(device)
        self._lock = fork_safe(threading.Lock())
        bits_or_numbers = (dim // 8, torch.uint8) if metric == "hamming" else (dim, torch.float32)
        rows = torch.zeros(0, bits_or_numbers[0], dtype=bits_or_numbers[1], device=self.device)
        kept = None if kind == "ivfpq" and not rerank else rows
        self._state = State(torch.zeros(0, dtype=torch.int64, device=self.device), kept, self._norms(kept))

    def __len__(self) -> int:
        return len(self._state.ids)

    def __repr__(self) -> str:
        return f"Index({self.dim}, metric={self.metric!r}, kind={self.kind!r}) with {len(self):,} vectors"

    @property
    def ids(self) -> Any:
        """Ids of the vectors, (N,) int64 in NumPy's array, in no particular order."""
        return self._state.ids.cpu().numpy()

    def _norms(self, x: Tensor | None) -> Tensor | None:
        return None if x is None or x.dtype == torch.uint8 else torch.linalg.vector_norm(x, dim=1)

    def _taken(self, x: Any, name: str) -> Tensor:
        """Return vectors as this index keeps them, after checks."""
        given = vectors(x, name).to(self.device)
        if (given.dtype == torch.uint8) != (self.metric == "hamming"):
            raise UnsupportedDtype(f"the metric {self.metric!r} of this index is not for {given.dtype}")
        width = self.dim // 8 if self.metric == "hamming" else self.dim
        if given.shape[1] != width:
            raise ShapeError(f"{name} must be (rows, {width}), got {tuple(given.shape)}")
        if self.metric == "hamming":
            return given
        wide = given.double() if self.metric == "cosine" else given.float()
        norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        if len(norms) and not float(norms.max()) < 1e19:
            wrong = int((~(norms < 1e19)).nonzero()[0, 0])
            raise RangeError(f"row {wrong} of {name} has NaN, infinity, or a norm above 1e19")
        return (wide / norms.clamp(min=1e-300)).float() if self.metric == "cosine" else wide

    def train(self, x: Any) -> None:
        """Place the centroids, and those of the codes, by k-means on vectors (n, dim); the first `add` does without."""
        if self.kind == "flat":
            return
        with self._lock:
            if len(self._state.ids):
                raise ConfigError("train before vectors are added: their lists follow from the centroids")
            self._state = dataclasses.replace(self._state, lists=self._trained(self._taken(x, "x")))

    def _trained(self, x: Tensor) -> Lists:
        count = self.wanted_lists or max(min(int(4 * len(x) ** 0.5), len(x) // 32), 1)
        spherical = self.metric != "l2"
        centroids = kmeans(x, count, spherical=spherical)
        if self.kind == "ivf":
            return Lists(centroids)
        if len(x) < 1 << self.bits:
            raise ConfigError(
                f"codes of {self.bits} bits are trained on at least {1 << self.bits} vectors, got {len(x)}"
            )
        rest = x - centroids[nearest(x, centroids, spherical=spherical)]
        quantizer = ProductQuantizer.trained(rest, self.parts, self.bits)
        return Lists(centroids, quantizer, True, quantizer.tables())

    def add(self, x: Any, ids: Any = None) -> None:
        """Add vectors (n, dim), with ids of their own, or those from the largest so far on.

        Raises:
            ConfigError: an id that is here already, or twice in `ids`; too few vectors to train lists or codes.
            RangeError: NaN or infinity.
        """
        rows = self._taken(x, "x")
        with self._lock:
            state = self._state
            if ids is None:
                last = int(state.ids.max()) if len(state.ids) else -1
                if last + len(rows) >= 1 << 63:
                    raise ConfigError(f"no ids are left after {last}: give ids")
                given = torch.arange(1, len(rows) + 1, device=self.device) + last
            else:
                given = names(ids, len(rows)).to(self.device)
                once, counts = given.unique(return_counts=True)
                twice = torch.cat([once[counts > 1], given[torch.isin(given, state.ids)]])
                if len(twice):
                    raise ConfigError(f"id {int(twice[0])} is there already: remove it first, ids are unique")
                if len(given) and int(given.min()) < 0:
                    raise ConfigError(f"ids must be 0 or larger, got {int(given.min())}")
            if not len(rows):
                return
            lists = state.lists if self.kind == "flat" or state.lists else self._trained(rows)
            self._state = self._sorted(self._appended(dataclasses.replace(state, lists=lists), rows, given))

    def _appended(self, state: State, rows: Tensor, ids: Tensor) -> State:
        """Return a state with more rows, in no list; memory grows by half, so that small additions stay cheap."""
        if state.vectors is None:  # codes alone: rows pass through the lists at once
            assert state.lists is not None
            return self._encoded(state, rows, ids)
        new = _grown(state.ids, ids), _grown(state.vectors, rows)
        norms = None if state.norms is None else _grown(state.norms, torch.linalg.vector_norm(rows, dim=1))
        return dataclasses.replace(state, ids=new[0], vectors=new[1], norms=norms)

    def _sorted(self, state: State, *, fully: bool = False) -> State:
        """Return the state with all rows in lists, if enough are outside."""
        count = len(state.ids)
        fresh = count - state.listed
        if self.kind == "flat" or state.lists is None or state.vectors is None or not fresh:
            return state
        if not fully and state.starts and fresh * _UNSORTED < count:
            return state
        lists, device = state.lists, self.device
        x = state.vectors[state.listed :]
        at = nearest(x, lists.centroids, spherical=self.metric != "l2")
        codes = state.codes
        if lists.quantizer is not None:
            own = lists.quantizer.encoded(x - lists.centroids[at] if lists.residual else x)
            codes = own if codes is None else torch.cat([codes, own])
        every = torch.cat([list_numbers(state.starts, device), at])
        order = every.argsort(stable=True)
        return State(
            state.ids[order], state.vectors[order], None if state.norms is None else state.norms[order],
            None if codes is None else codes[order], _starts(every, len(lists.centroids)), lists,
        )  # fmt: skip

    def _encoded(self, state: State, rows: Tensor, ids: Tensor) -> State:
        """Return a state without vectors with the codes of more."""
        lists = state.lists
        assert lists is not None
        assert lists.quantizer is not None
        at = nearest(rows, lists.centroids, spherical=self.metric != "l2")
        own = lists.quantizer.encoded(rows - lists.centroids[at] if lists.residual else rows)
        codes = own if state.codes is None else torch.cat([state.codes, own])
        every = torch.cat([list_numbers(state.starts, self.device), at])
        order = every.argsort(stable=True)
        return dataclasses.replace(
            state, ids=torch.cat([state.ids, ids])[order], codes=codes[order],
            starts=_starts(every, len(lists.centroids)),
        )  # fmt: skip

    def remove(self, ids: Any) -> int:
        """Remove the vectors with these ids (a list, set, array or range), and return how many there were."""
        if ids is None:
            raise ConfigError("remove needs ids, got None")
        if not isinstance(ids, (slice, range, set, frozenset, list, tuple)):
            given = tensor(ids, "ids")
            ids = given.long() if given.dtype == torch.uint8 or not given.numel() else given  # no bits, as of a mask
        with self._lock:
            state = self._state
            gone = selection(ids, 0, len(state.ids), state.ids, by_id=True).rows
            keep = torch.ones(len(state.ids), dtype=torch.bool, device=self.device)
            keep[gone if isinstance(gone, Tensor) else slice(None)] = False
            every = list_numbers(state.starts, self.device)[keep[: state.listed]]
            count = len(state.starts) - 1
            codes = None if state.codes is None else state.codes[keep[: state.listed]]
            self._state = State(
                state.ids[keep], None if state.vectors is None else state.vectors[keep],
                None if state.norms is None else state.norms[keep], codes,
                _starts(every, count) if state.starts else (), state.lists,
            )  # fmt: skip
            return int((~keep).sum())

    def search(self, queries: Any, k: int = 10, *, nprobe: int | None = None, mask: Any = None) -> Hits:
        """Return the k nearest vectors of each query, of those in the lists that are read.

        A query gets min(k, vectors that the filter leaves) answers: where the lists that were read have fewer, the
        others are read too. A filter that leaves few vectors is searched exactly.

        Args:
            queries: (Q, dim), or (dim,) for one.
            k: answers a query.
            nprobe: lists to read, of kinds "ivf" and "ivfpq"; an eighth of them by default.
            mask: ids as in `exact`; bool and bits have an element for each id: (ids,) or (Q, ids).

        Raises:
            ConfigError: k or nprobe below 1.
            ShapeError: a query of another dimension.
        """
        back, asked = as_given(queries), tensor(queries, "queries")
        q = self._taken(asked.unsqueeze(0) if asked.dim() == 1 else queries, "queries")
        k = checked_k(k)
        if nprobe is not None and (not isinstance(nprobe, (int, np.integer)) or nprobe < 1):
            raise ConfigError(f"nprobe must be an integer of at least 1, got {nprobe}")
        state = self._state
        chosen = selection(mask, len(q), len(state.ids), state.ids, by_id=True)
        hits = self._found(state, q, k, nprobe, chosen)
        if asked.dim() == 1:
            hits = Hits(hits[0][0], hits[1][0], hits.counts[0])
        return Hits(back(hits[0]), back(hits[1]), back(hits.counts))

    def _found(self, state: State, q: Tensor, k: int, nprobe: int | None, chosen: Selection) -> Hits:
        metric = "ip" if self.metric == "cosine" else self.metric  # the vectors are normalized
        lists = len(state.starts) - 1
        if not len(state.ids):
            return dense(state.ids, state.ids, q[:0, 0].float(), len(q), k, smallest=False)
        if state.lists is None or lists < 1:
            assert state.vectors is not None
            return search(q, [state.vectors], k, metric, chosen, state.ids, None, state.norms)
        nprobe = min(int(nprobe or -(-lists // 8)), lists)

        def exactly(q: Tensor, chosen: Selection) -> Hits:
            if state.vectors is None:
                return self._listed(state, q, k, lists, chosen)
            return search(q, [state.vectors], k, metric, chosen, state.ids, None, state.norms)

        if nprobe < lists and chosen.rows is None and chosen.each is None and len(q):
            hits = self._listed(state, q, k, nprobe, chosen)
            if int(hits.counts.min()) >= min(k, len(state.ids)):
                return hits
        left = torch.tensor(len(state.ids) if chosen.rows is None else len(chosen.rows), device=q.device)
        if chosen.each is not None:
            left = chosen.each.sum(1).to(q.device)
        small = left * lists <= nprobe * len(state.ids) if state.vectors is not None else left < 0
        if bool(small.all()):
            return exactly(q, chosen)
        hits = self._listed(state, q, k, nprobe, chosen)
        which = ((hits.counts < left.clamp(max=k)) | small).nonzero().squeeze(1)
        if nprobe == lists or not len(which):
            return hits
        each = None if chosen.each is None else chosen.each[which.to(chosen.each.device)]
        again = exactly(q[which], Selection(chosen.rows, each))
        scores, ids = (
            torch.nn.functional.pad(x, (0, max(again[0].shape[1] - x.shape[1], 0)), value=value)
            for x, value in zip(hits, (float("inf" if metric == "l2" else "-inf"), -1), strict=True)
        )
        for whole, part in zip((scores, ids), again, strict=True):
            whole[which, : part.shape[1]] = part
        return Hits(scores, ids, hits.counts.index_copy(0, which, again.counts))

    def _listed(self, state: State, q: Tensor, k: int, nprobe: int, chosen: Selection) -> Hits:
        """Return what the nearest lists of each query have."""
        metric = "ip" if self.metric == "cosine" else self.metric
        kind: type[_Scanned | _ListSearch] = _Scanned if q.device.type == "cpu" else _ListSearch
        lists = len(state.starts) - 1
        readers = len(q) * nprobe / lists  # of a list
        if state.codes is None and readers >= _READERS and readers * len(state.ids) >= _SHARED * lists:
            kind = _ListSearch  # both are exact
        return kind(q, k, metric, state, self.rerank).hits(nprobe, chosen)

    def save(self, path: str | Path) -> None:
        """Write the index to a file that FAISS reads; the old file stays until the new one is whole."""
        from accelerant.search.faiss_files import faiss_write

        faiss_write(self, path)

    @classmethod
    def load(cls, path: str | Path, device: Any = "cpu") -> Index:
        """Return the index of a file that `save` or FAISS wrote; FormatError for a malformed one."""
        from accelerant.search.faiss_files import faiss_read

        return faiss_read(path, device=device)


def _grown(kept: Tensor, new: Tensor) -> Tensor:
    """Return the rows of both, in the memory of the first where it has room behind them."""
    count, total = len(kept), len(kept) + len(new)
    row = kept[0].numel() if count else new[0].numel()
    room = kept.untyped_storage().nbytes() // kept.element_size() // max(row, 1)
    if count and kept.storage_offset() == 0 and room >= total and kept.is_contiguous():
        buffer = kept.as_strided((room, *kept.shape[1:]), kept.stride())
    else:
        buffer = new.new_empty((total + total // 2, *new.shape[1:]))
        buffer[:count] = kept
    buffer[count:total] = new
    return buffer[:total]


def list_numbers(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the list of each row in lists."""
    sizes = torch.tensor(starts, dtype=torch.int64, device=device).diff()
    return torch.arange(len(sizes), device=device).repeat_interleave(sizes)


def _starts(every: Tensor, count: int) -> tuple[int, ...]:
    return (0, *torch.bincount(every, minlength=count).cumsum(0).tolist())


def _probed(q: Tensor, state: State, nprobe: int, metric: str) -> tuple[Tensor, Tensor]:
    """Return products (twice, under l2) with the nearest centroids of each query, and their lists, nearest first."""
    assert state.lists is not None
    centroids, (factor, squares) = state.lists.centroids, (2 * q, state.squares) if metric == "l2" else (q, None)
    if q.device.type == "cpu":  # a query's lists do not depend on the batch
        scores = tiled(factor, centroids, squares, metric, maxima=False)
    else:
        scores = factor @ centroids.T if squares is None else factor @ centroids.T - squares
    near, lists = scores.topk(nprobe, dim=1)
    return near if squares is None else near + squares[lists], lists


def _hidden(chosen: Selection, count: int, device: torch.device) -> Tensor | None:
    """Return the rows that a selection hides, (1 or Q, rows) bool."""
    if chosen.each is not None:
        return ~chosen.each.to(device)
    if chosen.rows is None:
        return None
    hidden = torch.ones(1, count, dtype=torch.bool, device=device)
    rows = chosen.rows
    hidden[0, rows.to(device) if isinstance(rows, Tensor) else slice(rows.start, rows.stop)] = False
    return hidden


def _largest(norms: Tensor) -> float:
    return float(norms.max()) if len(norms) else 0.0


class _Scanned:
    """A search of inverted lists on a CPU: a query scans its lists, and what it keeps is scored exactly."""

    def __init__(self, q: Tensor, k: int, metric: str, state: State, rerank: int) -> None:
        self.q, self.k, self.metric, self.state = q, k, metric, state
        self.factor = 2 * q if metric == "l2" else q
        self.wanted = k * max(rerank, 1) if state.codes is not None and state.vectors is not None else k

    def hits(self, nprobe: int, chosen: Selection) -> Hits:
        """Return the answers in the lists nearest to each query, and in the rows that are in none."""
        state, smallest = self.state, self.metric == "l2"
        keys, counts = self._listed(nprobe, chosen)
        if state.codes is not None and state.listed < len(state.ids):
            others, more = self._unlisted(chosen)
            keys, counts = np.concatenate([keys, others], 1), counts + more
        counts, ids = np.minimum(counts.numpy(), self.k), state.by_id[0].numpy()
        width = int(counts.max(initial=0))
        scores, ranks = best(keys, width, smallest=smallest)
        found = ids.take(ranks, mode="clip")
        if counts.min(initial=width) < width:
            empty = np.arange(width) >= counts[:, None]
            found[empty], scores[empty] = -1, np.inf if smallest else -np.inf
        return Hits(*map(torch.from_numpy, (scores, found, counts)))

    def _listed(self, nprobe: int, chosen: Selection) -> tuple[Keys, Tensor]:
        """Return the keys of the rows that the lists have, and how many each query has."""
        lists, scan = self.state.lists, self.state.scan
        assert lists is not None
        bias, probes = _probed(self.q, self.state, nprobe, self.metric)
        if self.state.codes is None:  # and in the rows that are in none
            probes = torch.nn.functional.pad(probes, (0, 1), value=len(scan.layout.starts) - 2)
            return self._scanned(scan, probes, None, chosen)
        return self._scanned(scan, probes, bias if lists.residual else torch.zeros_like(bias), chosen)

    def _unlisted(self, chosen: Selection) -> tuple[Keys, Tensor]:
        """Return what is found in the rows in no list."""
        state = self.state
        assert state.vectors is not None
        assert state.norms is not None
        largest, squares = _largest(state.norms), padded(state.norms.square())
        scan = Scan(Layout(torch.tensor([state.listed, len(state.ids)], device="cpu")), state.vectors, largest, squares)
        return self._scanned(scan, torch.zeros(len(self.q), 1, dtype=torch.int64, device="cpu"), None, chosen)

    def _scanned(self, scan: Scan, probes: Tensor, bias: Tensor | None, chosen: Selection) -> tuple[Keys, Tensor]:
        seen = scan.layout.all_seen if chosen.rows is None and chosen.each is None else scan.layout.seen(chosen)
        Q, nprobe = probes.shape
        offsets = torch.arange(0, Q * nprobe + 1, nprobe, device="cpu")
        rows, _, counts = scan.found(
            self.factor, probes.flatten(), offsets, None if bias is None else bias.flatten(), seen, self.wanted,
            metric=self.metric, margins=self._margins(scan),
        )  # fmt: skip
        vectors, rank = self.state.vectors, self.state.by_id[1]
        if vectors is not None and self.q.shape[1] <= LONG:
            return ranked(self.q, vectors, rows, counts, rank, self.metric), counts
        query, column = (torch.arange(rows.shape[1], device="cpu") < counts.unsqueeze(1)).nonzero(as_tuple=True)
        row, keys = rows[query, column], np.full(rows.shape, NONE)
        keys[query.numpy(), column.numpy()] = keys_of(self._scored(query, row), rank[row], smallest=self.metric == "l2")
        return keys, counts

    def _margins(self, scan: Scan) -> Tensor:
        """Return twice the errors of the quick scores, and of rounding the scores of answers."""
        norms, d = np.linalg.norm(self.q.numpy(), axis=1), self.q.shape[1]
        bound = np.square(norms + scan.largest) if self.metric == "l2" else norms * scan.largest
        return torch.from_numpy((4.2 * ((d + 16) * 2.0**-24 * bound + d * 1e-37)).astype(np.float32))

    def _scored(self, query: Tensor, row: Tensor) -> Tensor:
        """Return the scores of pairs, by the vectors or what the codes say of them."""
        state = self.state
        if state.vectors is not None:
            return scored(self.q, state.vectors, query, row, self.metric)
        lists = state.lists
        assert lists is not None
        assert lists.quantizer is not None
        assert lists.tables is not None
        assert state.codes is not None
        x = lists.quantizer.decoded(state.codes[row], lists.tables)
        if lists.residual:
            x = x + lists.centroids[torch.searchsorted(state.scan.layout.starts, row, right=True) - 1]
        return scored(self.q, x, query, torch.arange(len(row), device="cpu"), self.metric)


class _ListSearch(Part):
    """A search of inverted lists: the nearest list of each query first, which gives a bound for the others."""

    def __init__(self, q: Tensor, k: int, metric: str, state: State, rerank: int) -> None:
        wide = state.vectors if state.codes is not None else None
        super().__init__(q, k, metric, ids=state.ids, wide=wide)
        self.wanted = k * max(rerank, 1) if wide is not None else k
        self.state = state
        if state.norms is not None and state.codes is None:
            self._widened(state.norms, q.shape[1])

    def hits(self, nprobe: int, chosen: Selection) -> Hits:
        """Return the answers in the lists nearest to each query, and in the rows that are in none."""
        state = self.state
        assert state.lists is not None
        _, probes = _probed(self.q, state, nprobe, self.metric)
        hidden = _hidden(chosen, len(state.ids), self.device)
        found = self._nothing()
        if state.listed < len(state.ids):
            found = self._unlisted(hidden)
        for some in (probes[:, :1], probes[:, 1:]):
            found = self._decided(self._joined([found, *self._visited(some, hidden)]))
        row, score = found.row, found.score
        if state.codes is None or self.wide is not None:
            score = self._scored(state.vectors if state.vectors is not None else row, found)
        elif self.metric == "l2":
            score = self.norms[found.query].square() - score
        return dense(found.query, state.ids[row], score, len(self.q), self.k, smallest=self.metric == "l2")

    def _unlisted(self, hidden: Tensor | None) -> Found:
        state = self.state
        assert state.vectors is not None
        rows = range(state.listed, len(state.ids))
        x = state.vectors[rows.start :]
        covered = None if hidden is None else hidden[:, rows.start :]
        extra = self._extra(x, rows)
        return self._tile(x, extra, torch.arange(len(self.q), device=self.device), rows, covered)

    def _visited(self, probes: Tensor, hidden: Tensor | None) -> list[Found]:
        """Return the rows of lists that may be answers, list by list with all queries that read it."""
        if not probes.numel():
            return []
        order = probes.flatten().argsort(stable=True)
        queries = order // probes.shape[1]
        sizes = torch.bincount(probes.flatten(), minlength=len(self.state.starts) - 1).tolist()
        found, first = [], 0
        for at, size in enumerate(sizes):
            rows = self.state.rows_of(at)
            if size and len(rows):
                tile = queries[first : first + size]
                x = self.state.decoded(at)
                covered = None
                if hidden is not None:
                    covered = hidden[:, rows.start : rows.stop]
                    covered = covered if len(covered) == 1 else covered[tile]
                found.append(self._tile(x, self._extra(x, rows), tile, rows, covered))
            first += size
        return found

    def _extra(self, x: Tensor, rows: range) -> Tensor | None:
        """Return |x|^2 under l2."""
        if self.metric != "l2":
            return None
        if self.state.norms is None or (self.state.codes is not None and rows.start < self.state.listed):
            return x.square().sum(1)
        return self.state.norms[rows.start : rows.stop].square()
