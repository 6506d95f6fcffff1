"""Arrays of NumPy, torch and CuPy in, the same kind out; the answer of a search; filters as the rows to search."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

from accelerant.errors import RangeError, ShapeError, UnsupportedDtype
from accelerant.runtime.host import as_torch_takes_it, refuse_masked

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8)
"""Dtypes of vectors; uint8 holds 8 bits of a binary vector."""


class Hits(tuple[Any, Any]):
    """The answer of a search: unpacks as `scores, ids = hits`.

    Attributes:
        scores: (Q, k) float32, the best first: the largest under "ip" and "cosine", the smallest under "l2" (squared
            distances) and "hamming" (differing bits).
        ids: (Q, k) int64.
        counts: (Q,) int64, answers that each query has: min(k, rows that the filter leaves). There are as many columns
            as the largest count. Where a filter leaves a query fewer, the columns from its count on are no answers: id
            -1, and score -inf, or inf where the smallest is best.
    """

    counts: Any

    def __new__(cls, scores: Any, ids: Any, counts: Any) -> Hits:  # noqa: D102
        hits = super().__new__(cls, (scores, ids))
        hits.counts = counts
        return hits

    def __getnewargs__(self) -> tuple[Any, Any, Any]:
        return self[0], self[1], self.counts

    scores = property(lambda self: self[0], doc="(Q, k) float32, the best first.")
    ids = property(lambda self: self[1], doc="(Q, k) int64.")


def tensor(x: Any, name: str) -> Tensor:
    """Return an array as a tensor that shares its memory; lists of numbers become float32."""
    refuse_masked(x, name)
    if isinstance(x, Tensor):
        if x.layout is not torch.strided or x.is_nested or x.is_meta:
            kind = "a nested tensor" if x.is_nested else "a tensor without values" if x.is_meta else x.layout
            raise UnsupportedDtype(f"{name} must be dense, got {kind}: to_dense() makes it so")
        return x.detach().resolve_neg()
    if isinstance(x, (list, tuple, range)):
        try:
            x = np.asarray(x)
        except ValueError as error:
            raise ShapeError(f"{name} must have rows of one length: {error}") from None
        x = x.astype(np.float32) if x.dtype.kind == "f" else x
    if isinstance(x, np.ndarray):
        x = as_torch_takes_it(x)
        x = x.view(np.uint64) if x.dtype == np.uint64 else x  # NumPy has two of 64 bits, torch knows one
        if not x.flags.writeable:  # torch.from_numpy warns of writes, which there are none of
            x = _writable(x)
        try:
            return torch.from_numpy(x)
        except TypeError:
            raise UnsupportedDtype(f"{name} must be numbers that torch has, got dtype {x.dtype}") from None
    if hasattr(x, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(x)
    raise UnsupportedDtype(f"{name} must be an array of NumPy, torch or CuPy, got {type(x).__name__}")


def _writable(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a view of a read-only array that says it can be written."""
    interface = dict(x.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    return np.asarray(type("ReadOnly", (), {"__array_interface__": interface, "owner": x})())


def names(ids: Any, count: int) -> Tensor:
    """Return the ids of so many rows as int64."""
    found = tensor(ids, "ids")
    if (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool) and found.numel():
        raise UnsupportedDtype(f"ids must be integers of at most 63 bits, got {found.dtype}")
    if found.shape != (count,):
        raise ShapeError(f"ids must be ({count},), one for each row, got {tuple(found.shape)}")
    whole = found.long()
    if found.dtype == torch.uint64 and bool((whole < 0).any()):
        at = int((whole < 0).nonzero()[0])
        raise RangeError(f"ids must be below 2^63, got {int(whole[at]) % (1 << 64)} for row {at}")
    return whole


def as_given(x: Any) -> Callable[[Any], Any]:
    """Return the function that makes an array of x's library from a tensor, or from NumPy's array on the host."""
    if isinstance(x, Tensor):
        return lambda result: torch.as_tensor(result, device=x.device)
    if not isinstance(x, (np.ndarray, Sequence)) and type(x).__module__.partition(".")[0] == "cupy":
        return lambda result: sys.modules["cupy"].from_dlpack(result)
    return lambda result: result if isinstance(result, np.ndarray) else result.cpu().numpy()


def vectors(x: Any, name: str) -> Tensor:
    """Return vectors (rows, dimension) as a tensor, contiguous along the dimension, after checks of shape and dtype."""
    found = tensor(x, name)
    if found.dtype not in DTYPES:
        hint = "; round it with .astype(numpy.float32) or .float()" if found.dtype == torch.float64 else ""
        names = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
        raise UnsupportedDtype(f"{name} must be one of {names}, got {str(found.dtype).removeprefix('torch.')}{hint}")
    if found.dim() != 2 or found.shape[1] < 1:
        raise ShapeError(f"{name} must be (rows, dimension), got {tuple(found.shape)}")
    return found if found.stride(1) == 1 or found.shape[0] == 0 else found.contiguous()


class Selection:
    """Rows of a collection that a filter leaves.

    Attributes:
        rows: sorted row numbers, a range of them, or None for all.
        marks: (N,) bool, the same rows, where a mask says so; their numbers are found when they are needed.
        each: (Q, N) bool, the rows that each query may see, or None for all in `rows`.
    """

    __slots__ = ("_rows", "each", "marks")

    def __init__(
        self, rows: Tensor | range | None = None, each: Tensor | None = None, marks: Tensor | None = None
    ) -> None:
        self._rows, self.each, self.marks = rows, each, marks

    @property
    def rows(self) -> Tensor | range | None:
        """See the class; of a mask on a GPU the host waits for them."""
        if self._rows is None and self.marks is not None:
            self._rows = self.marks.nonzero().squeeze(1)
        return self._rows

    def part(self, start: int, stop: int, device: torch.device) -> Selection:
        """Return the selection in the rows from start to stop on a device, counted from start."""
        rows, marks = self._rows, self.marks
        each = None if self.each is None else self.each[:, start:stop]
        if marks is not None:
            return Selection(None, each, marks[start:stop].to(device))
        if isinstance(rows, range):
            rows = range(max(rows.start - start, 0), max(min(rows.stop, stop) - start, 0))
        elif rows is not None:
            first, end = torch.searchsorted(rows, torch.tensor([start, stop], device=rows.device)).tolist()
            rows = rows[first:end] - start
        return Selection(rows, each)


def _parsed(mask: Any, count: int | None) -> range | Tensor:
    """Return a mask as a range, as bool, or as ids; bits are those of `count` rows, or of any number."""
    if isinstance(mask, slice):
        start, stop = 0 if mask.start is None else mask.start, 1 << 63 if mask.stop is None else mask.stop
        integers = isinstance(start, (int, np.integer)) and isinstance(stop, (int, np.integer))
        if mask.step not in (None, 1) or not integers or start < 0 or stop < 0:
            raise ShapeError(f"a slice of ids has a step of 1 and no negative bound, got {mask}; range() has others")
        return range(start, stop)
    if isinstance(mask, range):
        return mask
    if isinstance(mask, (set, frozenset)):
        mask = list(mask)
    if isinstance(mask, (list, tuple)) and all(
        isinstance(name, (int, np.integer)) and type(name) is not bool for name in mask
    ):  # no row has an id beyond int64
        mask = np.array([name for name in mask if -(1 << 63) <= name < 1 << 63], np.int64)
    given = tensor(mask, "mask")
    if given.dtype == torch.uint8 and given.dim():
        if count is not None and given.shape[-1] != -(-count // 8):
            raise ShapeError(f"a bit mask of {count} rows has {-(-count // 8)} bytes, got {given.shape[-1]}")
        places = torch.arange(8, device=given.device, dtype=torch.uint8)
        given = (given.unsqueeze(-1) >> places & 1).bool().flatten(-2)[..., slice(count)]
    if given.dtype == torch.bool:
        return given
    if given.is_floating_point() or given.is_complex() or given.dim() != 1:
        raise UnsupportedDtype(f"mask must be bool, bits in uint8, ids or a range, got {given.dtype}, {given.dim()}-d")
    whole = given.long()
    return whole[whole >= 0] if given.dtype == torch.uint64 else whole  # no row has an id above 2^63


def selection(
    mask: Any, queries: int, count: int, ids: Tensor | None, *, by_id: bool = False, device: torch.device | None = None
) -> Selection:
    """Return what a `mask` of `exact` selects of `count` rows; `by_id`: element i of bool is of id i, not of row i.

    `device`: where the rows are found, by default that of the mask.
    """
    if mask is None:
        return Selection()
    given = _parsed(mask, None if by_id else count)
    if isinstance(given, range):
        return _of_range(given, count, ids)
    given = given.to(given.device if device is None else device)
    if given.dtype == torch.bool:
        if by_id and ids is not None and given.dim():
            at = ids.to(given.device).clamp(-1, given.shape[-1])  # the last is one more, which selects nothing
            given = torch.nn.functional.pad(given, (0, 1))[..., at]
        if given.shape not in ((count,), (queries, count)):
            raise ShapeError(f"a mask must be ({count},) or ({queries}, {count}), got {tuple(given.shape)}")
        if given.dim() == 1:
            return Selection(marks=given)
        return Selection(given.any(0).nonzero().squeeze(1), given)
    if ids is not None:
        return Selection(marks=torch.isin(ids, given.to(ids.device)))
    marked = torch.zeros(count + 1, dtype=torch.bool, device=given.device)  # the last is that of no row
    return Selection(marks=marked.index_fill_(0, given.clamp(-1, count) % (count + 1), True)[:count])


@dataclass(frozen=True, slots=True)
class Slots:
    """Numbers of rows in the order of their ids: the ids themselves if these are small, or else their ranks.

    Attributes:
        size: one more than the largest number.
        of_rows: (N,) int64, None where it is the row.
        rows: (size,) int64, the row of each number, or -1; None where it is the number.
        names: (size,) int64, the id of each number, None where it is the number.
        holes: whether some numbers are those of no row.
    """

    size: int
    of_rows: np.ndarray[Any, Any] | None = None
    rows: np.ndarray[Any, Any] | None = None
    names: np.ndarray[Any, Any] | None = None
    holes: bool = False

    @classmethod
    def of(cls, ids: np.ndarray[Any, Any]) -> Slots:
        """Return the slots of rows with these ids, which are unique and not negative."""
        largest = int(ids.max(initial=-1))
        if largest < 2 * len(ids) + 1024:
            if np.array_equal(ids, np.arange(len(ids))):
                return cls(len(ids))
            rows = np.full(largest + 1, -1)
            rows[ids] = np.arange(len(ids))
            return cls(largest + 1, ids, rows, holes=largest + 1 > len(ids))
        order = ids.argsort()
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(ids))
        return cls(len(ids), ranks, order, ids[order])

    def bools(self, marks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return marks (..., size) as bool."""
        bits = marks.dtype == np.uint8
        return np.unpackbits(marks, -1, self.size, "little").view(np.bool_) if bits else marks

    def rows_of(self, marks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the rows that are marked (size,), in the order of their slots."""
        slots = np.flatnonzero(self.bools(marks))
        return slots if self.rows is None else self.rows[slots]

    def marks(self, mask: Any, queries: int) -> np.ndarray[Any, Any]:
        """Return which slots a mask by id selects, (size,) or (queries, size) bool, or as many bits in uint8.

        Bits are for rows that lie in another order than their ids.
        """
        given = mask
        plain = self.names is None and not self.holes
        if plain and type(mask) is np.ndarray and mask.dtype == np.bool_ and mask.shape == (self.size,):
            return mask if mask.strides == (1,) else np.ascontiguousarray(mask)
        if type(mask) is not np.ndarray or mask.dtype.char not in "?B" or not mask.ndim:
            given = _parsed(mask, None)
            given = given if isinstance(given, range) else given.cpu().numpy()
        packs = plain and self.of_rows is not None
        if isinstance(given, range):
            return self._in_range(given, packs=packs)
        if given.dtype.char in "?B":
            if given.shape[:-1] not in ((), (queries,)) or not given.ndim:
                raise ShapeError(f"a mask must be (ids,) or ({queries}, ids), got {given.shape}")
            if given.dtype == np.uint8:
                exact = packs and given.shape[-1] == -(-self.size // 8) and given.strides[-1] == 1
                if exact and not (self.size % 8 and (given[..., -1] >> self.size % 8).any()):
                    return np.asarray(given)
                given = np.unpackbits(given, -1, bitorder="little").view(np.bool_)
            marks = self._of_ids(given)
        else:
            marks = np.zeros(self.size, np.bool_)
            if len(given) and self.size:
                if self.names is not None:
                    at = np.searchsorted(self.names, given).clip(max=self.size - 1)
                    given = at[self.names[at] == given]
                elif given.min() < 0 or given.max() >= self.size:
                    given = given[(given >= 0) & (given < self.size)]
                marks[given] = True
        return np.logical_and(marks, np.asarray(self.rows) >= 0) if self.holes else marks

    def _of_ids(self, given: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return bools of ids (..., any number) as those of slots."""
        short = max(self.size - given.shape[-1], 0) if self.names is None else 1
        wide = np.pad(given, [(0, 0)] * (given.ndim - 1) + [(0, short)]) if short else given[..., : self.size]
        marks = wide if self.names is None else wide[..., self.names.clip(max=given.shape[-1])]
        return marks if marks.strides[-1] == 1 else np.ascontiguousarray(marks)

    def _in_range(self, given: range, *, packs: bool) -> np.ndarray[Any, Any]:
        names = self.names
        rows: Any = _of_range(given, self.size, None if names is None else torch.from_numpy(names)).rows
        if packs and isinstance(rows, range):
            start, stop = rows.start, min(max(rows.stop, rows.start), self.size)
            marks = np.zeros(-(-self.size // 8), np.uint8)
            if start < stop:
                marks[start >> 3 : (stop + 7) >> 3] = 255
                marks[start >> 3] &= 255 << (start & 7) & 255
                marks[(stop - 1) >> 3] &= 255 >> (-stop & 7)
            return marks
        marks = np.zeros(self.size, np.bool_)
        marks[slice(rows.start, max(rows.stop, rows.start)) if isinstance(rows, range) else rows.numpy()] = True
        return marks & (np.asarray(self.rows) >= 0) if self.holes else marks


def _of_range(wanted: range, count: int, ids: Tensor | None) -> Selection:
    if wanted.step < 0:
        wanted = wanted[::-1]
    least, end = (0, count) if ids is None else (-(1 << 63), 1 << 63)
    start = wanted.start + -(min(wanted.start - least, 0) // wanted.step) * wanted.step  # the first that a row may have
    kept = range(start, min(wanted.stop, end), wanted.step)
    if ids is None and (kept.step == 1 or not kept):
        return Selection(range(start, max(kept.stop, start)) if kept else range(0))
    if not kept[8:]:  # steps that int64 does not hold among them
        listed = torch.tensor(list(kept), dtype=torch.int64, device="cpu")
        return Selection(listed) if ids is None else Selection(marks=torch.isin(ids, listed.to(ids.device)))
    if ids is None:
        return Selection(torch.arange(kept.start, kept.stop, kept.step, device="cpu"))
    inside = (ids >= kept[0]) & (ids <= kept[-1]) & (ids % kept.step == kept[0] % kept.step)  # differences may overflow
    return Selection(marks=inside)
