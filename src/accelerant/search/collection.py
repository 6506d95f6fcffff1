"""Search over vectors that stay in Qdrant, mirrored on a device: exact under any filter, or by lists."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accelerant.errors import ConfigError, FormatError, RangeError, ShapeError, UnsupportedCase
from accelerant.runtime.files import clipped
from accelerant.runtime.host import fork_safe
from accelerant.runtime.registry import DeviceLike, find_device
from accelerant.search.exact import checked_k, exact
from accelerant.search.index import KINDS, Index
from accelerant.search.lists import NONE, best, keys_of, nearest
from accelerant.search.payload_filter import Evaluator, Mask, Table
from accelerant.search.qdrant import ClientStore, EdgeStore, PointId, Vectors, point_id

__all__ = ["Collection", "Matches"]

_WRITE = 1024  # points of one operation, which Qdrant applies as one
_LEVELS = 100  # of a payload


@dataclass(frozen=True, slots=True)
class Matches:
    """The answer of Collection.search.

    Attributes:
        ids: of the nearest points, nearest first, one list a query.
        scores: inner products, cosines, or for "l2" distances, as `ids`.
        selected: how many points the filter leaves; fewer than k are found only if this is less.
        exact: whether all points that the filter leaves were compared.
        age_s: seconds since all vectors were read from a server, on which others may have written since; None if the
            answer has every write.
        payloads: of the points, None for one that is deleted meanwhile; empty unless asked for.
    """

    ids: list[list[PointId]]
    scores: list[list[float]]
    selected: int
    age_s: float | None = None
    payloads: list[list[Mapping[str, Any] | None]] | None = None
    exact: bool = True


LEAST = 1024
"""Points from which on lists are built; fewer are searched as fast without."""

_SAMPLE = 1 << 11
_DRIFT = 1.2
"""Rows that are compared, and how much farther from the centroids newer ones may lie before lists are trained again."""


def require_kind(kind: str | None) -> None:
    """Raise ConfigError for what is no kind of a collection."""
    if kind not in (None, *KINDS):
        raise ConfigError(f"a collection's kind is {', '.join(KINDS)}, got {clipped(kind)}")


@dataclass(frozen=True, slots=True)
class Lists:
    """An index of the mirror's rows, whose ids are their numbers.

    Attributes:
        inside: (rows,) bool, the rows that it has; later rows are in none of its lists.
        trained: rows of the mirror from which the centroids were placed.
    """

    index: Index
    inside: Mask
    trained: int = 0

    @classmethod
    def built(cls, kind: str, metric: str, vectors: Tensor, alive: Mask, before: Lists | None = None) -> Lists:
        """Return an index of the rows that are alive, with the centroids of one before where these still fit."""
        index = Index(vectors.shape[1], metric, kind, device=vectors.device)
        rows, trained = np.flatnonzero(alive), len(alive)
        if before is not None and before._fits(vectors, alive):
            inside, trained = before._inside(len(alive)), before.trained
            index._state = before.index._state
            index.remove(np.flatnonzero(inside & ~alive))
            rows = np.flatnonzero(alive & ~inside)
        index.add(vectors[torch.from_numpy(rows).to(vectors.device)], rows)
        index._state = index._sorted(index._state, fully=True)
        return cls(index, alive, trained)

    def _fits(self, vectors: Tensor, alive: Mask) -> bool:
        """Return whether half of the rows are of those that the centroids are of, and newer ones are about as near."""
        lists, spherical = self.index._state.lists, self.index.metric != "l2"
        old, new = (np.flatnonzero(some) for some in (alive[: self.trained], alive[self.trained :]))
        if lists is None or len(old) < max(len(new), 1):
            return False

        def distance(rows: npt.NDArray[Any]) -> float:
            x = vectors[torch.from_numpy(rows[:: len(rows) // _SAMPLE + 1]).to(vectors.device)]
            x = torch.nn.functional.normalize(x, dim=1) if spherical else x
            return float((x - lists.centroids[nearest(x, lists.centroids, spherical=spherical)]).square().sum(1).mean())

        return not len(new) or distance(new + self.trained) <= _DRIFT * distance(old)

    def outdated(self, alive: Mask) -> bool:
        """Return whether more than an eighth of the rows came or went since."""
        return 8 * int((alive != self._inside(len(alive))).sum()) > len(self.inside)

    def _inside(self, size: int) -> Mask:
        return np.pad(self.inside, (0, size - len(self.inside)))

    def search(self, q: Tensor, vectors: Tensor, alive: Mask, k: int, nprobe: int | None) -> tuple[Tensor, Tensor]:
        """Return scores and rows (Q, k) of the nearest rows in the nearest lists, and among those in no list."""
        inside = self._inside(len(alive))
        gone, rest = bool((inside & ~alive).any()), np.flatnonzero(alive & ~inside)
        found = [self.index.search(q, k, nprobe=nprobe, mask=alive if gone else None)]
        if len(rest):
            found.append(exact(q, vectors, k, self.index.metric, mask=torch.from_numpy(rest).to(vectors.device)))
        scores, rows = (torch.cat([hits[i] for hits in found], 1).cpu() for i in (0, 1))
        smallest = self.index.metric == "l2"
        keys = keys_of(scores, rows.clamp(min=0), smallest=smallest)
        keys[(rows < 0).numpy()] = NONE
        width = min(int((rows >= 0).sum(1).max()), k) if len(rows) else 0
        best_scores, best_rows = best(keys, width, smallest=smallest)
        return torch.from_numpy(best_scores), torch.from_numpy(best_rows)

    def save(self, file: Path, ids: Sequence[PointId], alive: Mask) -> None:
        """Write the rows that are alive, under names of their points that fit a file of FAISS."""
        self.index.remove(np.flatnonzero(self.inside & ~alive[: len(self.inside)]))
        state = self.index._state
        names = torch.from_numpy(_names([ids[row] for row in state.ids.tolist()])).to(state.ids.device)
        saved = Index(self.index.dim, self.index.metric, self.index.kind, device=self.index.device)
        saved.rerank, saved._state = self.index.rerank, dataclasses.replace(state, ids=names)
        saved.save(file)

    @classmethod
    def loaded(cls, file: Path, metric: str, ids: Sequence[PointId], vectors: Tensor) -> Lists | None:
        """Return the index of a file; None if it is not of these points and their vectors."""
        try:
            index = Index.load(file, vectors.device)
        except (FormatError, UnsupportedCase, OSError):
            return None
        names = _names(ids)
        order, wanted = names.argsort(), index.ids
        if not len(names) or not len(wanted):
            return None
        rows = order[np.searchsorted(names, wanted, sorter=order).clip(max=len(names) - 1)]
        if not np.array_equal(names[rows], wanted):
            return None
        at, kept = torch.from_numpy(rows).to(index.device), index._state.vectors
        if index.metric != metric or kept is None or not torch.equal(kept, vectors[at]):
            return None  # a folder that was copied back may have the same versions of other writes
        index._state = dataclasses.replace(index._state, ids=at)
        inside = np.zeros(len(names), np.bool_)
        inside[rows] = True
        return cls(index, inside)


def _names(ids: Sequence[PointId]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return a number below 2^63 for each id: its own, or a hash."""
    hashed = (hashlib.blake2b(str(i).encode(), digest_size=8).digest() for i in ids)
    pairs = zip(ids, hashed, strict=True)
    return np.array(
        [i if isinstance(i, int) and i < 1 << 63 else int.from_bytes(h, "big") >> 1 for i, h in pairs], np.int64
    )


def file_of(folder: Path, name: str, kind: str, stamp: object) -> Path:
    """Return where the lists of a collection are as Qdrant reports it by this stamp."""
    digest = hashlib.sha256(repr(stamp).encode()).hexdigest()[:16]
    return folder / f"{name}-{kind}-{digest}.faiss"


def files_of(folder: Path, name: str) -> list[Path]:
    """Return the files of lists of a collection, of any time."""
    pattern = re.compile(re.escape(name) + r"-(ivf|ivfpq)-[0-9a-f]{16}\.faiss")
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)] if folder.is_dir() else []


class _Mirror:
    """Vectors on the device in rows that are only appended to, which of them are alive, and columns of payloads."""

    def __init__(self, store: EdgeStore | ClientStore, device: torch.device) -> None:
        self.store, self.stamp, self.read_at = store, store.stamp(), time.monotonic()
        self._rows = torch.empty(0, store.dim, dtype=torch.float32, device=device)
        self.size, self.dead, self.stale = 0, 0, False
        self.alive: Mask = np.empty(0, np.bool_)
        self.ids: list[PointId] = []
        self.row_of: dict[PointId, int] = {}
        self.lists: Lists | None = None
        self.table = Table(self._parts)
        for ids, vectors in store.read():
            self.append(ids, vectors, [{}] * len(ids))

    def _parts(self, name: str) -> list[Mapping[str, Any]]:
        found = self.store.parts(name)
        return [found.get(i, {}) if self.row_of.get(i) == row else {} for row, i in enumerate(self.ids)]

    @property
    def vectors(self) -> Tensor:
        return self._rows[: self.size]

    def append(self, ids: Sequence[PointId], vectors: Vectors, payloads: Sequence[Mapping[str, Any]]) -> None:
        """Append points in place of those of the same ids."""
        size = self.size + len(ids)
        if size > len(self._rows):
            grown = self._rows.new_empty(max(size, 2 * len(self._rows)), self._rows.shape[1])
            grown[: self.size] = self.vectors
            self._rows = grown
        self._rows[self.size : size] = torch.from_numpy(vectors).to(self._rows.device)
        self.remove(ids)
        self.alive = np.concatenate([self.alive, np.ones(len(ids), np.bool_)])
        self.row_of |= {i: row for row, i in enumerate(ids, self.size)}
        self.ids += ids
        self.table.extend(payloads)
        self.size = size

    def remove(self, ids: Sequence[PointId]) -> None:
        """Let points be dead."""
        rows = [row for i in ids if (row := self.row_of.pop(i, None)) is not None]
        if rows:
            self.alive = self.alive.copy()  # a reader has the old one
            self.alive[rows] = False
            self.dead += len(rows)

    def ask(self, condition: Mapping[str, Any]) -> Mask:
        mask = np.zeros(self.size, np.bool_)
        mask[self.rows(self.store.select(condition))] = True
        return mask

    def rows(self, ids: Sequence[Any]) -> list[int]:
        return [row for i in ids if (row := self.row_of.get(point_id(i))) is not None]

    def chosen(self, condition: Mapping[str, Any] | None) -> Mask | None:
        """Return which rows count; None for all of them."""
        if condition is None:
            return self.alive if self.dead else None
        return Evaluator(self.table, self.rows, self.ask).mask(condition) & self.alive


class Collection:
    """A Qdrant collection whose vectors are searched on a device, exactly under any filter.

    >>> with Collection("papers", dim=384) as papers:
    ...     papers.upsert([1, 2], vectors, [{"year": 2019}, {"year": 2026}])
    ...     papers.search(query, k=10, filter={"must": [{"key": "year", "range": {"gte": 2020}}]}).ids

    Qdrant holds the data; the vectors are mirrored on the device. An answer has every write through this object, and of
    a folder every other write as well. On a server others may write: `Matches.age_s` says how old the mirror is, and
    `refresh` reads all vectors again. Readers and one writer at a time share the object, from any number of threads.
    A write that has returned survives the end of the process; of one that was killed, a number of batches of 1,024
    points is there.

    Equal scores come in the order of rows: of ids when the collection was opened, then of writing.

    With kind "ivf" or "ivfpq" a search without a filter reads the `nprobe` nearest lists of an `Index`, which takes
    memory of its own. It is built in a thread once there are 1,024 points, and again when an eighth of them changed;
    its centroids stay while half of the points are those that they were placed from, and newer ones lie about as near.
    The one before answers meanwhile, and points in no list are compared one by one. `close` saves it in the folder.

    Args:
        location: a folder, which Qdrant Edge opens in this process; the URL of a server; or a QdrantClient.
        name: the collection on a server, the subfolder of a folder.
        dim: of the vectors; a collection that does not exist is made with it.
        metric: "cosine" (the default of a new one), "ip" or "l2".
        kind: "flat", which is exact, or as of `Index`, "ivf" or "ivfpq"; by default that which the folder has saved.
        device: that of the mirror.

    Raises:
        ConfigError: the collection has another dimension or metric, does not exist, or is open in another process.
        FormatError: the folder is no collection of one unnamed vector a point.
        MissingDependency: qdrant-edge-py or qdrant-client is not installed.
    """

    def __init__(
        self, location: Any, name: str = "vectors", *, dim: int | None = None, metric: str | None = None,
        kind: str | None = None, device: DeviceLike = "cpu",
    ) -> None:  # fmt: skip
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ConfigError(f"a collection's name is that of a folder, without slashes; got {clipped(name)}")
        require_kind(kind)
        self._device = torch.device(find_device(device, torch_tensors=True).torch_device)
        remote = not isinstance(location, (str, Path)) or str(location).startswith(("http://", "https://"))
        self._store: EdgeStore | ClientStore = (
            ClientStore(location, name, dim, metric) if remote else EdgeStore(Path(location) / name, dim, metric)
        )
        self.dim, self.metric = self._store.dim, self._store.metric
        self._folder, self._name, self.kind = None if remote else Path(location), name, "flat"
        self._builder: threading.Thread | None = None
        self._loaded: Lists | None = None
        self._closed = False
        self._writing, self._lock, self._busy = fork_safe(threading.RLock()), fork_safe(threading.Lock()), False
        try:
            self._mirror = _Mirror(self._store, self._device)
            self.kind = self._with_saved_lists(kind)
        except BaseException:
            self._store.close()
            raise
        self._build_if_outdated()

    @property
    def _list_metric(self) -> str:
        return "l2" if self.metric == "l2" else "ip"

    def _with_saved_lists(self, kind: str | None) -> str:
        """Give the mirror the lists that the folder has of these points; return the kind."""
        if self._folder is None:
            return kind or "flat"
        if kind is None:
            saved = {
                path.name.removeprefix(f"{self._name}-").partition("-")[0]
                for path in files_of(self._folder, self._name)
            }
            kind = next((other for other in KINDS[1:] if other in saved), "flat")
        file = file_of(self._folder, self._name, kind, self._mirror.stamp)
        if file.is_file():
            self._loaded = Lists.loaded(file, self._list_metric, self._mirror.ids, self._mirror.vectors)
            self._mirror.lists = self._loaded
        return kind

    def build(self) -> None:
        """Build the lists now, with new centroids; the old ones answer meanwhile. Kind "flat" has none."""
        self._build(anew=True)

    def _build(self, *, anew: bool = False) -> None:
        with self._lock:
            mirror = self._mirror
            vectors, alive, before = mirror.vectors, mirror.alive, None if anew else mirror.lists
        if self.kind == "flat" or int(alive.sum()) < LEAST:
            return
        lists = Lists.built(self.kind, self._list_metric, vectors, alive, before)
        with self._lock:
            mirror.lists = lists

    def _build_if_outdated(self) -> None:
        """Let a thread build the lists, if many points are in none."""
        mirror, builder = self._mirror, self._builder
        if self.kind == "flat" or mirror.size - mirror.dead < LEAST or (builder is not None and builder.is_alive()):
            return
        if mirror.lists is None or mirror.lists.outdated(mirror.alive):
            self._builder = threading.Thread(target=self._build, name="accelerant-lists")  # an exit waits for it
            self._builder.start()

    def _save_lists(self) -> None:
        """Write the lists to the folder, in place of those of other times."""
        saved = [] if self._folder is None else files_of(self._folder, self._name)
        if self._folder is None or (self.kind == "flat" and not saved) or not self._is_current():
            return
        mirror, kinds = self._mirror, KINDS[1:] if self.kind == "flat" else (self.kind,)
        files = [file_of(self._folder, self._name, kind, mirror.stamp) for kind in kinds]
        if self.kind != "flat" and (mirror.lists is not self._loaded or not files[0].is_file()):
            if mirror.lists is None:
                files[0].touch()  # of too few points: it tells their kind
            else:
                mirror.lists.save(files[0], mirror.ids, mirror.alive)
        for old in set(saved) - set(files):
            old.unlink(missing_ok=True)

    def __enter__(self) -> Collection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Collection({len(self):,} points, dim={self.dim}, metric={self.metric!r}, device={str(self._device)!r})"

    def __len__(self) -> int:
        """Return the number of points in the mirror."""
        return len(self._mirror.row_of)

    def close(self) -> None:
        """Write what is pending, and the lists, and release the collection."""
        if self._builder is not None:
            self._builder.join()
        with self._writing:
            if self._closed:
                return
            self._closed = True
            try:
                self._save_lists()
            finally:
                self._store.close()

    def refresh(self) -> None:
        """Read all vectors again; the old ones answer meanwhile."""
        with self._writing:
            mirror = _Mirror(self._store, self._device)
            with self._lock:
                self._mirror = mirror
            self._build_if_outdated()

    @contextmanager
    def _write(self) -> Iterator[None]:
        """Let one thread write; afterwards the mirror has what Qdrant has."""
        with self._writing:
            self._follow()
            self._busy = True
            try:
                yield
                self._mirror.stamp = self._store.stamp()
                self._build_if_outdated()
            except BaseException:  # Qdrant may have applied what it did not answer
                self._mirror.stale = True
                raise
            finally:
                self._busy = False

    def _follow(self) -> None:
        """Refresh if Qdrant reports writes that did not go through this object."""
        if self._busy or self._is_current():
            return
        with self._writing:  # a write of ours may have ended meanwhile
            if not self._is_current():
                self.refresh()

    def _is_current(self) -> bool:
        return not self._mirror.stale and self._store.stamp() == self._mirror.stamp

    def upsert(self, ids: Sequence[Any], vectors: Any, payloads: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Write points, in place of those of the same ids.

        Args:
            ids: integers or UUIDs, each once.
            vectors: (points, dim), any array.
            payloads: JSON objects, one a point.

        Raises:
            ShapeError: vectors of another shape, or other numbers of ids or payloads.
            RangeError: NaN, infinity, or a zero vector under "cosine"; nothing was written.
            ConfigError: an id is none, or there twice, or a payload is no JSON object.
            StoreError: Qdrant did not write all of it.
        """
        names = [point_id(i) for i in ids]
        if len(set(names)) != len(names):
            twice = next(i for i in names if names.count(i) > 1)
            raise ConfigError(f"the id {twice} is there twice in one upsert")
        rows = self._checked(vectors, "vectors")
        given = [{}] * len(names) if payloads is None else _json_objects(list(payloads))
        if not len(names) == len(rows) == len(given):
            raise ShapeError(f"there are {len(names)} ids, {len(rows)} vectors and {len(given)} payloads")
        with self._write():
            for start in range(0, len(names), _WRITE):
                part = slice(start, start + _WRITE)
                self._store.upsert(names[part], rows[part], given[part])
                with self._lock:
                    self._mirror.append(names[part], rows[part], given[part])
            if self._mirror.dead > max(_WRITE, self._mirror.size // 2):
                self.refresh()

    def delete(self, ids: Sequence[Any] = (), *, filter: Mapping[str, Any] | None = None) -> int:
        """Delete points by their ids or a filter; return how many there were."""
        with self._write():
            mirror = self._mirror
            with self._lock:
                rows = mirror.rows(ids)
                if (mask := mirror.chosen(_as_json(filter))) is not None and filter is not None:
                    rows += np.flatnonzero(mask).tolist()
                names = [mirror.ids[row] for row in dict.fromkeys(rows)]
            for start in range(0, len(names), _WRITE):
                self._store.delete(names[start : start + _WRITE])
                with self._lock:
                    mirror.remove(names[start : start + _WRITE])
        return len(names)

    def count(self, filter: Mapping[str, Any] | None = None) -> int:
        """Return how many points a filter selects."""
        return int(self.select(filter).size)

    def select(self, filter: Mapping[str, Any] | None = None) -> npt.NDArray[Any]:
        """Return the ids of the points that a filter selects."""
        self._follow()
        with self._lock:
            mask = self._mirror.chosen(_as_json(filter))
            rows = range(self._mirror.size) if mask is None else np.flatnonzero(mask).tolist()
            return np.array([self._mirror.ids[row] for row in rows], object)

    def values(self, name: str) -> list[Any]:
        """Return the values of a field of all payloads that have it."""
        return [part[name] for part in self._store.parts(name).values() if name in part]

    def payloads(self, ids: Sequence[Any]) -> list[Mapping[str, Any] | None]:
        """Return the payloads of points, None for one that is not there."""
        names = [point_id(i) for i in ids]
        found = self._store.payloads(names) if names else {}
        return [found.get(i) for i in names]

    def search(
        self, queries: Any, k: int = 10, *, filter: Mapping[str, Any] | None = None, payloads: bool = False,
        nprobe: int | None = None,
    ) -> Matches:  # fmt: skip
        """Return the k nearest points of each query among those that a filter selects.

        It is exact but for a search of lists, without a filter; `Matches.exact` says so.

        Args:
            queries: (dim,) or (queries, dim), any array.
            k: at least 1.
            filter: of Qdrant's filter language, as JSON or as qdrant_client.models.Filter.
            payloads: whether to read the points' payloads.
            nprobe: lists to read, of kinds "ivf" and "ivfpq"; an eighth of them by default.

        Raises:
            ShapeError, RangeError: as for upsert.
            ConfigError: k, nprobe, or what the filter cannot have.
        """
        k = checked_k(k)
        rows = self._checked(queries, "queries")
        self._follow()
        with self._lock:
            mirror = self._mirror
            data, mask, ids = mirror.vectors, mirror.chosen(_as_json(filter)), mirror.ids
            alive, lists = mirror.alive, mirror.lists if filter is None else None
        selected = len(data) if mask is None else int(mask.sum())
        age = None if mirror.stamp is not None else time.monotonic() - mirror.read_at
        found = min(k, selected)
        if not found or not len(rows):
            return Matches(
                [[] for _ in rows], [[] for _ in rows], selected, age, [[] for _ in rows] if payloads else None
            )
        metric = self._list_metric
        given = torch.from_numpy(rows).to(data.device)
        if lists is not None:
            scores, nearest = lists.search(given, data, alive, found, nprobe)
        else:
            allowed = None if mask is None else torch.from_numpy(mask).to(data.device)
            scores, nearest = exact(given, data, found, metric, mask=allowed)
        scores = scores.sqrt() if metric == "l2" else scores
        names = [[ids[row] for row in each] for each in nearest.tolist()]
        read = [self.payloads(each) for each in names] if payloads else None
        return Matches(names, scores.tolist(), selected, age, read, lists is None)

    def _checked(self, vectors: Any, what: str) -> Vectors:
        """Return vectors as Qdrant stores them: float32, of unit length under "cosine"."""
        array = vectors.detach().cpu().float().numpy() if isinstance(vectors, Tensor) else np.asarray(vectors)
        if array.dtype.kind not in "fiu" and array.size:
            raise ShapeError(f"{what} must be numbers in rows of {self.dim}, got dtype {array.dtype}")
        with np.errstate(over="ignore"):  # infinity is refused below
            rows = np.ascontiguousarray(array, np.float32)
        if not len(rows):
            rows = rows.reshape(0, self.dim)
        elif rows.ndim == 1 and what == "queries":
            rows = rows[None]
        if rows.ndim != 2 or rows.shape[1] != self.dim:
            raise ShapeError(f"{what} must be (n, {self.dim}), got {tuple(array.shape)}")
        if not np.isfinite(rows).all():
            raise RangeError(f"{what}[{int(np.isfinite(rows).all(1).argmin())}] has NaN or infinity")
        length = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
        if self.metric != "cosine":
            if not (length < 1e19).all():  # which a search refuses: float32 does not hold their squares
                raise RangeError(f"{what}[{int(length.argmax())}] has a norm above 1e19: scale the vectors")
            return rows
        if not length.all():
            raise RangeError(f"{what}[{int(length.argmin())}] is zero, which has no direction: the metric is cosine")
        unit: Vectors = (rows / length).astype(np.float32)
        return unit


def _as_json(condition: Any) -> Mapping[str, Any] | None:
    """Return a filter as JSON; qdrant_client's models become what they are on the wire."""
    if hasattr(condition, "model_dump"):
        dumped: Mapping[str, Any] = condition.model_dump(mode="json", exclude_none=True, by_alias=True)
        return dumped
    if condition is not None and not isinstance(condition, Mapping):
        raise ConfigError(f"a filter is an object of Qdrant's filter language, got {clipped(condition)}")
    return condition


def _json_objects(payloads: Sequence[object]) -> list[Mapping[str, Any]]:
    """Return payloads as JSON has them."""
    if wrong := [payload for payload in payloads if not isinstance(payload, Mapping)]:
        raise ConfigError(f"a payload must be a JSON object, got {clipped(wrong[0])}")
    try:
        text = json.dumps(payloads, allow_nan=False, ensure_ascii=False)
        text.encode()  # a lone surrogate is no text
        decoded: list[Mapping[str, Any]] = json.loads(text)
        _require_stored(decoded)
        return decoded
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"a payload must be a JSON object: {error}") from None


def _require_stored(value: Any, depth: int = 0) -> None:
    """Raise ValueError for what Qdrant writes and cannot read again: levels of JSON beyond 128, huge integers."""
    if depth > _LEVELS:
        raise ValueError(f"it is nested more than {_LEVELS} levels deep")
    if isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            _require_stored(each, depth + 1)
    elif isinstance(value, int):
        float(value)
