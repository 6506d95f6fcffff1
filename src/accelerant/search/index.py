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
from accelerant.search.arrays import Hits, Selection, Slots, as_given, names, selection, tensor, vectors
from accelerant.search.blocks import Known
from accelerant.search.exact import METRICS, Found, Part, checked_k, dense, search
from accelerant.search.lists import LONG, ProductQuantizer, Scan, kmeans, nearest, packed, scans, tiled
from accelerant.search.llvm_kernels import ROWS

KINDS = ("flat", "ivf", "ivfpq")
_UNSORTED = 8
"""Lists are sorted again when more than an eighth of the rows lies outside of them."""

_SEVERAL = 16
"""Queries that tiles of products serve on a CPU; fewer are scanned one by one."""

_READERS, _SHARED = 64, 12_000
"""Queries that read a list of vectors, and scores of it, from which on a CPU multiplies it with all of them at once."""


Marks = np.ndarray[Any, Any] | None
"""Slots that are chosen, (slots,) or (Q, slots) bool or bits, or rows in any order; None for all."""

Chosen = Selection | Marks


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

    def taken(self, rows: Tensor) -> State:
        """Return the state of some rows."""
        x, norms, codes = self.vectors, self.norms, self.codes
        return State(
            self.ids[rows], None if x is None else _gathered(x, rows), None if norms is None else norms[rows],
            None if codes is None else codes[rows], self.starts, self.lists,
        )  # fmt: skip

    def rows_of(self, at: int) -> range:
        """Return the rows of a list."""
        return range(self.starts[at], self.starts[at + 1])

    @cached_property
    def known(self) -> Known | None:
        """The norms of the vectors."""
        return None if self.norms is None else Known.of(self.norms)

    @cached_property
    def in_order(self) -> bool:
        """Whether each row's id is its number."""
        return bool((self.ids == torch.arange(len(self.ids), device=self.ids.device)).all())

    @cached_property
    def count(self) -> int:
        """Rows."""
        return len(self.ids)

    @cached_property
    def slots(self) -> Slots:
        """The numbers of the rows in the order of their ids, of an index on a CPU."""
        return Slots.of(self.ids.numpy())

    @cached_property
    def flat(self) -> Scan:
        """The scan on a CPU of all rows as one list."""
        return self._scan_of_vectors(torch.tensor([0, len(self.ids)], device="cpu"), {})

    @cached_property
    def fresh(self) -> Scan:
        """The scan on a CPU of the rows in no list."""
        return self._scan_of_vectors(torch.tensor([self.listed, len(self.ids)], device="cpu"), {})

    def _scan_of_vectors(self, starts: Tensor, arrays: dict[str, Any], **numbers: int) -> Scan:
        assert self.vectors is not None
        assert self.norms is not None
        arrays |= {"data": self.vectors, "vectors": self.vectors, "extra": self.norms.square() / 2, "starts": starts}
        largest = float(self.norms.max()) if len(self.norms) else 0.0
        return Scan("flat", arrays | {"slots": self.slots.of_rows}, largest=largest, **numbers)

    @cached_property
    def scan(self) -> Scan:
        """The scan of the lists on a CPU, of codes where there are some."""
        lists, number = self.lists, len(self.starts) - 1
        assert lists is not None
        starts = torch.tensor([*self.starts, len(self.ids)], device="cpu")
        coarse = torch.nn.functional.pad(lists.centroids, (0, 0, 0, -number % 16)).T.contiguous()
        arrays: dict[str, Any] = {"coarse": coarse, "squares": self.squares / 2}
        if self.codes is None:
            return self._scan_of_vectors(starts, arrays, lists=number)
        quantizer = lists.quantizer
        assert quantizer is not None
        data, first_blocks = packed(self.codes, starts[:-1], quantizer.bits)
        squares = torch.cat([self.decoded(at).square().sum(1) for at in range(number)])
        largest = float(quantizer.centroids.square().sum(2).amax(1).sum().sqrt())
        if lists.residual:
            largest += float(torch.linalg.vector_norm(lists.centroids, dim=1).max())
        arrays |= {
            "data": data, "first_blocks": first_blocks, "extra": torch.nn.functional.pad(squares / 2, (0, ROWS)),
            "starts": starts, "vectors": self.vectors, "codes": self.codes, "slots": self.slots.of_rows,
            "centroids": quantizer.centroids.transpose(1, 2).contiguous(),
            "list_of": list_numbers(self.starts, torch.device("cpu")),
        }  # fmt: skip
        numbers = {"lists": number, "parts": len(quantizer.centroids), "residual": int(lists.residual)}
        return Scan(str(quantizer.bits), arrays, largest=largest, **numbers)

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
        self._metric = "ip" if metric == "cosine" else metric  # the vectors are normalized
        self.parts, self.bits, self.wanted_lists, self.device = parts, bits, lists, torch.device(device)
        self._scans = self.device.type == "cpu" and metric != "hamming" and dim <= LONG  # queries in NumPy's arrays
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

    def _taken(self, x: Any, name: str, *, measures: bool = True) -> Tensor:
        """Return vectors as this index keeps them, after checks, of norms where this measures or has to."""
        given = vectors(x, name).to(self.device)
        if (given.dtype == torch.uint8) != (self.metric == "hamming"):
            raise UnsupportedDtype(f"the metric {self.metric!r} of this index is not for {given.dtype}")
        width = self.dim // 8 if self.metric == "hamming" else self.dim
        if given.shape[1] != width:
            raise ShapeError(f"{name} must be (rows, {width}), got {tuple(given.shape)}")
        if self.metric == "hamming":
            return given
        if not measures and self.metric != "cosine":
            return given.float().contiguous()
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
            return self._placed(dataclasses.replace(state, ids=torch.cat([state.ids, ids])), rows)
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
        return self._placed(state, state.vectors[state.listed :])

    def _placed(self, state: State, x: Tensor) -> State:
        """Return a state with its last rows, which are of these vectors, in lists."""
        lists, codes = state.lists, state.codes
        assert lists is not None
        at = nearest(x, lists.centroids, spherical=self.metric != "l2")
        if lists.quantizer is not None:
            own = lists.quantizer.encoded(x - lists.centroids[at] if lists.residual else x)
            codes = own if codes is None else torch.cat([codes, own])
        every = torch.cat([list_numbers(state.starts, self.device), at])
        starts = _starts(every, len(lists.centroids))
        return dataclasses.replace(state, codes=codes, starts=starts).taken(every.argsort(stable=True))

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
            starts = _starts(every, len(state.starts) - 1) if state.starts else ()
            codes = None if state.codes is None else state.codes[keep[: state.listed]]
            kept = dataclasses.replace(state, codes=None).taken(keep.nonzero().squeeze(1))
            self._state = dataclasses.replace(kept, codes=codes, starts=starts)
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
        k = checked_k(k)
        if nprobe is not None and (not isinstance(nprobe, (int, np.integer)) or nprobe < 1):
            raise ConfigError(f"nprobe must be an integer of at least 1, got {nprobe}")
        state = self._state
        if (
            self._scans
            and self.metric != "cosine"
            and type(queries) is np.ndarray
            and queries.dtype == np.float32
            and queries.shape[1:] == (self.dim,)
            and queries.flags.carray
        ):  # fmt: skip  the kernels check the rest
            hits = self._found(state, queries, k, nprobe, mask)
            if isinstance(hits[0], np.ndarray):
                return hits
            single = False
        else:
            asked = tensor(queries, "queries")
            single = asked.dim() == 1
            q = self._taken(asked.unsqueeze(0) if single else queries, "queries", measures=False)
            hits = self._found(state, q.numpy() if self._scans else q, k, nprobe, mask)
        back = as_given(queries)
        scores, ids, counts = ((x[0, ...] if single else x) for x in (*hits, hits.counts))
        return Hits(back(scores), back(ids), back(counts))

    def _found(self, state: State, q: Any, k: int, nprobe: int | None, mask: Any) -> Hits:
        count, lists, left = state.count, len(state.starts) - 1, state.count
        nprobe = min(int(nprobe or -(-lists // 8)), lists)
        chosen: Chosen = None
        many: Any = None  # vectors that each query's filter leaves, where filters differ
        if not self._scans:
            chosen = selection(mask, len(q), count, state.ids, by_id=True)
            left = count if chosen.rows is None else len(chosen.rows)
            many = None if chosen.each is None else chosen.each.sum(1).cpu().numpy()
        elif mask is not None:
            chosen = state.slots.marks(mask, len(q))
            if chosen.ndim == 1:
                left = _marked(chosen, max(k, nprobe * count // max(lists, 1)) + 1)
            else:
                many = np.count_nonzero(state.slots.bools(chosen), axis=1)
        if not count:
            return dense(state.ids, state.ids, state.ids.float(), len(q), k, smallest=False)
        if state.lists is None or lists < 1:
            return self._exactly(state, q, k, chosen)
        few = (left if many is None else many) * lists <= nprobe * count if state.vectors is not None else False
        if few is True or (many is not None and np.all(few)):
            return self._exactly(state, q, k, chosen)
        hits = self._listed(state, q, k, nprobe, chosen)
        if nprobe == lists or not len(q) or (many is None and min(hits.counts.tolist()) >= min(left, k)):
            return hits
        counts = hits.counts if isinstance(hits.counts, np.ndarray) else hits.counts.cpu().numpy()
        which = np.flatnonzero((counts < np.minimum(left if many is None else many, k)) | few)
        return hits if not len(which) else self._searched_again(state, q, k, chosen, hits, which)

    def _searched_again(self, state: State, q: Any, k: int, chosen: Chosen, hits: Hits, which: Any) -> Hits:
        """Return the hits with exact answers of some queries."""
        at = torch.from_numpy(which).to(self.device)
        if isinstance(chosen, Selection):
            chosen = chosen if chosen.each is None else Selection(chosen.rows, chosen.each[at.to(chosen.each.device)])
        elif chosen is not None and chosen.ndim == 2:
            chosen = chosen[which]
        again = self._exactly(state, q[which] if isinstance(q, np.ndarray) else q[at], k, chosen)
        worst = float("inf" if self.metric == "l2" else "-inf")
        scores, ids = (
            torch.nn.functional.pad(tensor(x, "hits"), (0, max(again[0].shape[1] - x.shape[1], 0)), value=value)
            for x, value in zip(hits, (worst, -1), strict=True)
        )
        for whole, part in zip((scores, ids), again, strict=True):
            whole[at, : part.shape[1]] = tensor(part, "hits")
        return Hits(scores, ids, tensor(hits.counts, "hits").index_copy(0, at, tensor(again.counts, "hits")))

    def _exactly(self, state: State, q: Any, k: int, chosen: Chosen) -> Hits:
        """Return the best of all vectors that are chosen, or of what all codes stand for."""
        if state.vectors is None:
            return self._listed(state, q, k, len(state.starts) - 1, chosen)
        if not isinstance(chosen, Selection):
            given = None if chosen is None or chosen.ndim == 2 else state.slots.rows_of(chosen)
            few = len(q) < _SEVERAL and chosen is not None
            if few or scans(len(q), self.dim * (state.count if given is None else len(given))):
                return self._scanned(state, state.flat, q, k, k, 0, chosen if given is None else None, given)
            chosen = _selected(state, chosen)
        ids = None if state.in_order else state.ids
        return search(tensor(q, "hits"), [state.vectors], k, self._metric, chosen, ids, None, state.known)

    def _listed(self, state: State, q: Any, k: int, nprobe: int, chosen: Chosen) -> Hits:
        """Return what the nearest lists of each query have."""
        lists = len(state.starts) - 1
        readers = len(q) * nprobe / lists  # of a list
        many = state.codes is None and readers >= _READERS and readers * state.count >= _SHARED * lists
        if many or not self._scans:  # both are exact
            chosen = chosen if isinstance(chosen, Selection) else _selected(state, chosen)
            return _ListSearch(tensor(q, "hits"), k, self._metric, state, self.rerank).hits(nprobe, chosen)
        assert not isinstance(chosen, Selection)
        refined = state.codes is not None and state.vectors is not None
        wanted = k * max(self.rerank, 1) if refined else k
        hits = self._scanned(state, state.scan, q, k, wanted, nprobe, chosen)
        if not refined or state.listed == state.count:
            return hits
        rest = self._scanned(state, state.fresh, q, k, k, 0, chosen)
        scores, ids = (torch.from_numpy(np.concatenate(pair, 1)) for pair in zip(hits, rest, strict=True))
        row, column = (ids >= 0).nonzero(as_tuple=True)
        return dense(row, ids[row, column], scores[row, column], len(q), k, smallest=self.metric == "l2")

    def _scanned(
        self, state: State, scan: Scan, q: Any, k: int, wanted: int, nprobe: int, marks: Marks, given: Marks = None
    ) -> Hits:
        """Return what a scan on a CPU finds."""
        count, products = state.count, None
        k, wanted = min(k, count), min(wanted, count)
        if nprobe and len(q) >= _SEVERAL:
            assert state.lists is not None
            halves = state.squares / 2 if self.metric == "l2" else None
            products = tiled(torch.from_numpy(q), state.lists.centroids, halves, self._metric, maxima=False)
        rows = count * nprobe // len(state.starts) if nprobe else count if given is None else len(given)
        scores, slots, counts = scan.top(
            self._metric, q, k, wanted, nprobe, marks=marks, given=given, products=products, work=self.dim * rows
        )
        lengths, names = counts.tolist(), state.slots.names
        if lengths and min(lengths) < 0:
            self._taken(q, "queries")
            raise RangeError("a query has a norm of about 1e19: scale the vectors")
        if (width := max(lengths) if lengths else 0) < k:
            scores, slots = scores[:, :width], slots[:, :width]
        ids = slots if names is None else np.where(slots < 0, -1, names.take(slots, mode="clip"))
        return Hits(scores, ids, counts)

    def save(self, path: str | Path) -> None:
        """Write the index to a file that FAISS reads; the old file stays until the new one is whole."""
        from accelerant.search.faiss_files import faiss_write

        faiss_write(self, path)

    @classmethod
    def load(cls, path: str | Path, device: Any = "cpu") -> Index:
        """Return the index of a file that `save` or FAISS wrote; FormatError for a malformed one."""
        from accelerant.search.faiss_files import faiss_read

        return faiss_read(path, device=device)


def _marked(marks: np.ndarray[Any, Any], enough: int) -> int:
    """Return how many slots are marked, or a number of at least `enough`."""
    bits = marks.dtype == np.uint8
    some = 2 * enough if bits else 16 * enough
    if 2 * some < len(marks) and (found := _marked(marks[:some], some)) >= enough:
        return found
    return int(np.bitwise_count(marks).sum() if bits else np.count_nonzero(marks))


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


def _gathered(x: Tensor, rows: Tensor) -> Tensor:
    """Return some rows, on a CPU in NumPy's memory: its pages are large ones, which a scan reads in less time."""
    if x.device.type != "cpu":
        return x[rows]
    out = torch.from_numpy(np.empty((len(rows), x.shape[1]), np.uint8 if x.dtype == torch.uint8 else np.float32))
    return torch.index_select(x, 0, rows, out=out)


def list_numbers(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the list of each row in lists."""
    sizes = torch.tensor(starts, dtype=torch.int64, device=device).diff()
    return torch.arange(len(sizes), device=device).repeat_interleave(sizes)


def _starts(every: Tensor, count: int) -> tuple[int, ...]:
    return (0, *torch.bincount(every, minlength=count).cumsum(0).tolist())


def _probed(q: Tensor, state: State, nprobe: int, metric: str) -> Tensor:
    """Return the nearest lists of each query, nearest first."""
    assert state.lists is not None
    centroids, halves = state.lists.centroids, state.squares / 2 if metric == "l2" else None
    if q.device.type == "cpu":  # a query's lists do not depend on the batch
        scores = tiled(q, centroids, halves, metric, maxima=False)
    else:
        with torch.autocast(q.device.type, enabled=False):
            scores = q @ centroids.T if halves is None else q @ centroids.T - halves
    return scores.topk(nprobe, dim=1).indices


def _selected(state: State, marks: Marks) -> Selection:
    """Return the rows of slots that are marked."""
    if marks is None:
        return Selection()
    slots = state.slots
    if marks.ndim == 1:
        return Selection(torch.from_numpy(np.sort(slots.rows_of(marks))))
    marks = slots.bools(marks)
    each = torch.from_numpy(marks if slots.of_rows is None else marks[:, slots.of_rows])
    return Selection(each.any(0).nonzero().squeeze(1), each)


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
        probes = _probed(self.q, state, nprobe, self.metric)
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
