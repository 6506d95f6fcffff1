"""Batches of a Poisson sampler's draws, cut into virtual batches of one shape where memory or a CUDA graph wants it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.privacy.dp.ledger.events import Sampling, check_whole

__all__ = ["DrawnBatch", "PoissonBatches", "require_poisson", "require_rows", "sampling_of"]

Rows = Callable[[Tensor], Any]

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class DrawnBatch:
    """A draw, or a part of one.

    Attributes:
        tensors: a tuple of tensors, or a mapping where the data are one; dim 0 is the row.
        mask: (rows,) bool, the rows that were drawn; None where all were. The others are padding, which must not count.
        last: whether the draw ends with it: then step.
        examples: rows that were drawn.
        rows: rows of the tensors, padding included.
        number: of the draw, in this process; parts of one draw have the same. 0 where it is not known.
        sampler: that drew it; None where it is not known.
    """

    tensors: Any
    mask: Tensor | None
    last: bool
    examples: int
    rows: int
    number: int = 0
    sampler: Any = field(default=None, repr=False, compare=False)


class _Draws(Protocol):
    def __iter__(self) -> Iterator[Tensor]: ...


class PoissonBatches:
    """Iterates the batches of a sampler's draws.

    Every drawn row is in exactly one batch of its draw: nothing is truncated. Padding repeats the first row of the
    data, which any model takes. An empty draw is one batch of padding alone, so that a step of noise follows.

    Args:
        data: a tensor, a tuple or mapping of tensors of equal length; a NumPy array; a map-style Dataset, whose items
            are collated; or an object whose __getitem__ takes an index tensor.
        sampler: a `PoissonSampler` or another of `sampling`.
        microbatch: rows of every batch, the last of a draw padded; None: a draw is one batch of its own length.

    Raises:
        ConfigError: microbatch is no whole number above 0; the sampler draws from another number of rows.
        ShapeError: the data's tensors differ in length.
        UnsupportedCase: the sampler does not say that its draws are Poisson's, a shuffled loader for one; or the data
            cannot be indexed.
    """

    sampling: ClassVar[Literal["poisson"]] = "poisson"

    def __init__(self, data: Any, sampler: _Draws, *, microbatch: int | None = None) -> None:
        require_poisson(sampler)
        if microbatch is not None:
            check_whole("microbatch", microbatch, 1)
        self._rows, size = _reader(data)
        _check_size(sampler, size)
        self._sampler = sampler
        self._microbatch = microbatch

    def __iter__(self) -> Iterator[DrawnBatch]:
        """The batches, draw after draw."""
        for drawn in self._sampler:
            yield from self._of_draw(drawn)

    def _of_draw(self, drawn: Tensor) -> Iterator[DrawnBatch]:
        rows = self._microbatch or max(1, len(drawn))
        parts = max(1, -(-len(drawn) // rows))
        number = next(_numbers)
        for part in range(parts):
            index = drawn[part * rows : (part + 1) * rows]
            examples = len(index)
            mask = None
            if self._microbatch or not examples:
                mask = torch.arange(rows) < examples
                index = torch.cat([index, index.new_zeros(rows - examples)])
            tensors = self._rows(index)
            if isinstance(tensors, Tensor):
                tensors = (tensors,)
            yield DrawnBatch(tensors, mask, part == parts - 1, examples, rows, number, self._sampler)


def _check_size(sampler: Any, size: int | None) -> None:
    wanted = getattr(sampler, "rows", getattr(sampler, "size", None))
    if size is not None and wanted is not None and wanted > size:
        raise ConfigError(f"the sampler draws from {wanted} rows, the data have {size}")


def _reader(data: Any) -> tuple[Rows, int | None]:
    """What gives the rows of an index tensor, and how many there are, where that is known."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, np.ndarray):
        return lambda index: torch.from_numpy(np.ascontiguousarray(data[index.numpy()])), len(data)
    if isinstance(data, Tensor):
        return lambda index: data[index.to(data.device)], len(data)
    if isinstance(data, (tuple, list)):
        columns = [_reader(_column(column)) for column in data]
        size = _equal([size for _, size in columns])
        return lambda index: tuple(read(index) for read, _ in columns), size
    if isinstance(data, Mapping):
        named = {name: _reader(_column(column)) for name, column in data.items()}
        size = _equal([size for _, size in named.values()])
        return lambda index: {name: read(index) for name, (read, _) in named.items()}, size
    require_rows(data)
    size = len(data) if hasattr(data, "__len__") else None
    if isinstance(data, Dataset):
        return lambda index: default_collate(_items(data, index.tolist())), size
    return lambda index: data[index], size


def require_rows(data: Any) -> None:
    """Check that an object has rows that can be drawn.

    Raises:
        UnsupportedCase: it is a loader, or cannot be indexed.
    """
    if isinstance(data, DataLoader):
        raise UnsupportedCase(
            "a DataLoader makes batches of its own, which are no Poisson draws, shuffled or not: give its dataset"
        )
    if not hasattr(data, "__getitem__") or isinstance(data, IterableDataset):
        raise UnsupportedCase(
            f"data must be tensors or an object that can be indexed, got {type(data).__name__}: a stream of "
            "records cannot be sampled, since each draw is from all of them"
        )


def _column(column: Any) -> Any:
    if isinstance(column, (Tensor, np.ndarray)):
        return column
    raise UnsupportedCase(f"a tuple or mapping of data must hold tensors, got {type(column).__name__}: use a Dataset")


def _equal(sizes: list[int | None]) -> int | None:
    if not sizes or len(set(sizes)) > 1:
        raise ShapeError(f"data must have tensors of one length, got lengths {', '.join(map(str, sizes)) or 'of none'}")
    return sizes[0]


def _items(data: Any, index: list[int]) -> list[Any]:
    if hasattr(data, "__getitems__"):
        return list(data.__getitems__(index))
    return [data[i] for i in index]


def sampling_of(loader: Any) -> Sampling:
    """How a sampler, a loader or batches draw, as an `Event` says it.

    "poisson" for what this module draws (and for a DataLoader over it), "shuffled" for a DataLoader that shuffles,
    "unknown" for all else.
    """
    if getattr(loader, "sampling", None) == "poisson":
        return "poisson"
    inner = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
    kinds = [sampling_of(one) for one in inner if one is not None]
    if "poisson" in kinds:
        return "poisson"
    if "shuffled" in kinds or isinstance(loader, torch.utils.data.RandomSampler):
        return "shuffled"
    return "unknown"


def require_poisson(loader: Any) -> None:
    """Refuse what may not be accounted as Poisson sampling.

    Raises:
        UnsupportedCase: the loader shuffles, or how it draws is not known.
    """
    kind = sampling_of(loader)
    if kind == "poisson":
        return
    how = "shuffles" if kind == "shuffled" else "does not say how it draws"
    raise UnsupportedCase(
        f"{type(loader).__name__} {how}: its batches are no Poisson draws, and Poisson accounting would give too "
        "small an epsilon. Draw with PoissonSampler, or record the steps without amplification: "
        f'Event(..., sampling="{kind}")'
    )
