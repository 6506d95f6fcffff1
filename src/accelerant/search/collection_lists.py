"""Inverted lists over the mirror of a collection: built beside it, and saved with it for the next process."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError, FormatError, UnsupportedCase
from accelerant.runtime.files import clipped
from accelerant.search.exact import exact
from accelerant.search.index import KINDS, Index
from accelerant.search.lists import NONE, best, keys_of
from accelerant.search.payload_filter import Mask
from accelerant.search.qdrant import PointId

LEAST = 1024
"""Points from which on lists are built; fewer are searched as fast without."""


def require_kind(kind: str | None) -> None:
    """Raise ConfigError for what is no kind of a collection."""
    if kind not in (None, *KINDS):
        raise ConfigError(f"a collection's kind is {', '.join(KINDS)}, got {clipped(kind)}")


@dataclass(frozen=True, slots=True)
class Lists:
    """An index of the mirror's rows, whose ids are their numbers.

    Attributes:
        inside: (rows,) bool, the rows that it has; later rows are in none of its lists.
    """

    index: Index
    inside: Mask

    @classmethod
    def built(cls, kind: str, metric: str, vectors: Tensor, alive: Mask) -> Lists:
        """Return an index of the rows that are alive."""
        index, rows = Index(vectors.shape[1], metric, kind, device=vectors.device), np.flatnonzero(alive)
        index.add(vectors[torch.from_numpy(rows).to(vectors.device)], rows)
        return cls(index, alive)

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
