"""Arrays of NumPy, torch and CuPy in, the same kind out; and the answer of a search."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor

from accelerant.errors import RangeError, ShapeError, UnsupportedDtype

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
    if isinstance(x, Tensor):
        return x.detach()
    if isinstance(x, (list, tuple, range)):
        try:
            x = np.asarray(x)
        except ValueError as error:
            raise ShapeError(f"{name} must have rows of one length: {error}") from None
        x = x.astype(np.float32) if x.dtype.kind == "f" else x
    if isinstance(x, np.ndarray):
        x = x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
        if not x.flags.writeable:  # torch.from_numpy warns of writes, which there are none of
            x = _writable(x)
        try:
            fits = all(step >= 0 and step % max(x.itemsize, 1) == 0 for step in x.strides)
            return torch.from_numpy(x if fits else x.copy())
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


def as_given(x: Any) -> Callable[[Tensor], Any]:
    """Return the function that makes an array of x's library from a tensor."""
    if isinstance(x, Tensor):
        return lambda result: result.to(x.device)
    if not isinstance(x, (np.ndarray, Sequence)) and type(x).__module__.partition(".")[0] == "cupy":
        return lambda result: sys.modules["cupy"].from_dlpack(result)
    return lambda result: result.cpu().numpy()


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
