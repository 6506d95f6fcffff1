"""Batches of a Poisson sampler's draws, split into parts of one shape if memory or a CUDA graph requires it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.privacy.dp.ledger.events import Sampling, check_whole
from accelerant.privacy.dp.sampling.draw_tracker import Draw, DrawnBatch

__all__ = ["PoissonBatches", "require_poisson", "rows_of", "sampling_of"]

_Rows = Callable[[Tensor], Any]


class PoissonBatches:
    """Iterates the batches of a sampler's draws.

    Every drawn row is in exactly one batch of its draw: nothing is truncated. Padding repeats the first row of the
    data, which any model accepts. An empty draw is one batch of padding only, so that a step of noise follows.

    Args:
        data: a tensor, a tuple or mapping of tensors of equal length; a NumPy array; a map-style Dataset, whose items
            are collated; or an object whose __getitem__ takes an index tensor.
        sampler: a `PoissonSampler` or `GroupedSampler`.
        microbatch: rows of every batch, the last of a draw padded; None: a draw is one batch of its own length.

    Raises:
        ConfigError: microbatch is no whole number above 0; the sampler draws from another number of rows.
        ShapeError: the data's tensors differ in length.
        UnsupportedCase: the sampler is not known to draw by Poisson sampling, or the data cannot be indexed.
    """

    sampling: ClassVar[Literal["poisson"]] = "poisson"

    def __init__(self, data: Any, sampler: Iterable[Tensor], *, microbatch: int | None = None) -> None:
        require_poisson(sampler)
        if microbatch is not None:
            check_whole("microbatch", microbatch, 1)
        self._rows, size = _reader(data)
        required = getattr(sampler, "rows", getattr(sampler, "size", None))
        if size is not None and required is not None and required > size:
            raise ConfigError(f"the sampler draws from {required} rows, the data have {size}")
        self._sampler = sampler
        self._microbatch = microbatch

    def __iter__(self) -> Iterator[DrawnBatch]:
        for drawn in self._sampler:
            rows = self._microbatch or max(1, len(drawn))
            parts = max(1, -(-len(drawn) // rows))
            draw = Draw()
            for part in range(parts):
                index = drawn[part * rows : (part + 1) * rows]
                examples = len(index)
                mask = None
                if self._microbatch or not examples:
                    mask = torch.arange(rows) < examples
                    index = torch.cat([index, index.new_zeros(rows - examples)])
                found = self._rows(index)
                tensors = (found,) if isinstance(found, Tensor) else found
                yield DrawnBatch(tensors, mask, part == parts - 1, examples, rows, draw, self._sampler)


def rows_of(data: Any) -> int:
    """Return the number of rows of data; ConfigError if it is not known, or an error of PoissonBatches."""
    _, size = _reader(data)
    if size is None:
        raise ConfigError(f"{type(data).__name__} has no length: the number of rows to draw from must be known")
    return size


def _reader(data: Any) -> tuple[_Rows, int | None]:
    """Return a function that reads the rows of an index tensor, and the number of rows if it is known."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, np.ndarray):
        return lambda index: torch.from_numpy(np.ascontiguousarray(data[index.numpy()])), len(data)
    if isinstance(data, Tensor):
        return lambda index: data[index.to(data.device)], len(data)
    if isinstance(data, (tuple, list, Mapping)):
        return _columns_reader(data)
    if isinstance(data, DataLoader):
        raise UnsupportedCase("the batches of a DataLoader are no Poisson draws, shuffled or not: give its dataset")
    if not hasattr(data, "__getitem__") or isinstance(data, IterableDataset):
        raise UnsupportedCase(
            f"data must be tensors or an object that can be indexed, got {type(data).__name__}: a stream of "
            "records cannot be sampled, since each draw is from all of them"
        )
    size = len(data) if hasattr(data, "__len__") else None
    if isinstance(data, Dataset):
        items = getattr(data, "__getitems__", lambda index: [data[i] for i in index])
        return lambda index: default_collate(list(items(index.tolist()))), size
    return lambda index: data[index], size


def _columns_reader(data: Any) -> tuple[_Rows, int | None]:
    """Return the reader of a tuple or mapping of tensors."""
    columns = data if isinstance(data, Mapping) else dict(enumerate(data))
    for column in columns.values():
        if not isinstance(column, (Tensor, np.ndarray)):
            raise UnsupportedCase(
                f"a tuple or mapping of data must hold tensors, got {type(column).__name__}: use a Dataset"
            )
    sizes = [len(column) for column in columns.values()]
    if len(set(sizes)) != 1:
        raise ShapeError(f"data must have tensors of one length, got lengths {', '.join(map(str, sizes)) or 'of none'}")
    readers = {name: _reader(column)[0] for name, column in columns.items()}
    if isinstance(data, Mapping):
        return lambda index: {name: read(index) for name, read in readers.items()}, sizes[0]
    return lambda index: tuple(read(index) for read in readers.values()), sizes[0]


def sampling_of(loader: Any) -> Sampling:
    """Return how a sampler, a loader or batches draw, as an `Event` names it.

    "poisson" for the classes of this package and a DataLoader over them, "shuffled" for a DataLoader that shuffles,
    "unknown" for all others.
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
    """Check that draws may be accounted as Poisson sampling; UnsupportedCase if the loader shuffles, or may do so."""
    kind = sampling_of(loader)
    if kind != "poisson":
        how = "shuffles" if kind == "shuffled" else "does not say how it draws"
        raise UnsupportedCase(
            f"{type(loader).__name__} {how}: its batches are no Poisson draws, and Poisson accounting would give too "
            "small an epsilon. Draw with PoissonSampler, or record the steps without amplification: "
            f'Event(..., sampling="{kind}")'
        )
