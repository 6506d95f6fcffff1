"""Filters: masks, lists and ranges of ids become the rows to search, and what each query may see of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.search.arrays import tensor


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of a collection that a filter leaves.

    Attributes:
        rows: sorted row numbers, a range of them, or None for all.
        each: (Q, N) bool, the rows that each query may see, or None for all in `rows`.
    """

    rows: Tensor | range | None = None
    each: Tensor | None = None

    def part(self, start: int, stop: int) -> Selection:
        """Return the selection in the rows from start to stop, counted from start."""
        rows: Tensor | range | None = self.rows
        if isinstance(rows, range):
            rows = range(max(rows.start - start, 0), max(min(rows.stop, stop) - start, 0))
        elif rows is not None:
            first, end = torch.searchsorted(rows, torch.tensor([start, stop], device=rows.device)).tolist()
            rows = rows[first:end] - start
        return Selection(rows, None if self.each is None else self.each[:, start:stop])


def selection(mask: Any, queries: int, count: int, ids: Tensor | None, *, by_id: bool = False) -> Selection:
    """Return what a `mask` of `exact` selects of `count` rows; `by_id`: element i of bool is of id i, not of row i."""
    if mask is None:
        return Selection()
    if isinstance(mask, slice):
        start, stop = 0 if mask.start is None else mask.start, 1 << 63 if mask.stop is None else mask.stop
        integers = isinstance(start, (int, np.integer)) and isinstance(stop, (int, np.integer))
        if mask.step not in (None, 1) or not integers or start < 0 or stop < 0:
            raise ShapeError(f"a slice of ids has a step of 1 and no negative bound, got {mask}; range() has others")
        mask = range(start, stop)
    if isinstance(mask, range):
        return _of_range(mask, count, ids)
    if isinstance(mask, (set, frozenset)):
        mask = list(mask)
    if isinstance(mask, (list, tuple)) and all(
        isinstance(name, (int, np.integer)) and type(name) is not bool for name in mask
    ):  # no row has an id beyond int64
        mask = np.array([name for name in mask if -(1 << 63) <= name < 1 << 63], np.int64)
    given = tensor(mask, "mask")
    if given.dtype == torch.uint8 and given.dim():
        if not by_id and given.shape[-1] != -(-count // 8):
            raise ShapeError(f"a bit mask of {count} rows has {-(-count // 8)} bytes, got {given.shape[-1]}")
        places = torch.arange(8, device=given.device, dtype=torch.uint8)
        given = (given.unsqueeze(-1) >> places & 1).bool().flatten(-2)
        given = given if by_id else given[..., :count]
    if given.dtype == torch.bool:
        if by_id and ids is not None and given.dim():
            at, length = ids.to(given.device), given.shape[-1]
            inside = (at >= 0) & (at < length)
            given = given[..., at.clamp(0, length - 1)] & inside if length else inside.expand(*given.shape[:-1], count)
        if given.shape not in ((count,), (queries, count)):
            raise ShapeError(f"a mask must be ({count},) or ({queries}, {count}), got {tuple(given.shape)}")
        if given.dim() == 1:
            return Selection(given.nonzero().squeeze(1))
        return Selection(given.any(0).nonzero().squeeze(1), given)
    if given.is_floating_point() or given.is_complex() or given.dim() != 1:
        raise UnsupportedDtype(f"mask must be bool, bits in uint8, ids or a range, got {given.dtype}, {given.dim()}-d")
    whole = given.long()
    given = whole[whole >= 0] if given.dtype == torch.uint64 else whole  # no row has an id above 2^63
    if ids is not None:
        return Selection(torch.isin(ids, given.to(ids.device)).nonzero().squeeze(1))
    if given.is_cuda:  # without a sort
        marked = torch.zeros(count + 2, dtype=torch.bool, device=given.device)
        return Selection(marked.index_fill_(0, given.clamp(-1, count) + 1, True)[1:-1].nonzero().squeeze(1))
    rows = given.unique()
    return Selection(rows[(rows >= 0) & (rows < count)])


def _of_range(wanted: range, count: int, ids: Tensor | None) -> Selection:
    if wanted.step < 0:
        wanted = wanted[::-1]
    least, end = (0, count) if ids is None else (-(1 << 63), 1 << 63)
    start = wanted.start + -(min(wanted.start - least, 0) // wanted.step) * wanted.step  # the first that a row may have
    kept = range(start, min(wanted.stop, end), wanted.step)
    if ids is None and (kept.step == 1 or not kept):
        return Selection(range(start, max(kept.stop, start)) if kept else range(0))
    if not kept[8:]:  # steps that int64 does not hold among them
        listed = torch.tensor(list(kept), dtype=torch.int64)
        return Selection(listed if ids is None else torch.isin(ids, listed.to(ids.device)).nonzero().squeeze(1))
    if ids is None:
        return Selection(torch.arange(kept.start, kept.stop, kept.step, device="cpu"))
    inside = (ids >= kept[0]) & (ids <= kept[-1]) & (ids % kept.step == kept[0] % kept.step)  # differences may overflow
    return Selection(inside.nonzero().squeeze(1))
