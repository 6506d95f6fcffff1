"""Batches of a Poisson sampler's draws, and the check of their use.

Draws are split into parts of one shape if memory or a CUDA graph requires it. The privacy claim of a step requires that
each example adds at most one clipped gradient to the sum, so a `DrawTracker` checks that each drawn row goes through
backward once and that each draw makes one step, of one training.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.privacy.dp.ledger.events import Sampling, check_whole

_Rows = Callable[[Tensor], Any]


class Draw:
    """The identity of one draw, shared by its parts and their copies.

    Args:
        examples: number of rows that were drawn.
        before: the draw that the same iterator made before this one; None for its first.
    """

    __slots__ = ("__weakref__", "_before", "examples", "first", "stepped", "tracker")

    def __init__(self, examples: int, before: Draw | None = None) -> None:
        self.examples, self.first = examples, before is None
        self._before = None if before is None else weakref.ref(before)
        self.stepped = False
        self.tracker: weakref.ref[DrawTracker] | None = None  # of the training that began to use it

    def follows(self, draw: Draw | None) -> bool:
        """Return whether no draw of the same iterator was made between that one and this."""
        return self.first if self._before is None else draw is not None and self._before() is draw

    def __copy__(self) -> Draw:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Draw:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a drawn batch is not pickled: a copy could make a second step. Send its tensors")


@dataclass(frozen=True, slots=True)
class DrawnBatch:
    """A draw, or a part of one.

    Attributes:
        tensors: a tuple of tensors, or a mapping if the data are one; dimension 0 is the row.
        mask: (rows,) bool, the rows that were drawn; None if all were. The others are padding, which must not count.
        last: whether it is the draw's last part, after which optimizer.step() follows.
        examples: number of rows that were drawn.
        rows: rows of the tensors, including padding.
        draw: the same for all parts of one draw; None if unknown: then it is taken for a batch of the user's own.
        sampler: that drew it; None if unknown.
    """

    tensors: Any
    mask: Tensor | None
    last: bool
    examples: int
    rows: int
    draw: Draw | None = field(default=None, repr=False)
    sampler: Any = field(default=None, repr=False, compare=False)


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
        if not hasattr(sampler, "rows"):  # else it draws groups, and of each a row
            _warn_of_repeats(data)
        required = getattr(sampler, "rows", getattr(sampler, "size", None))
        if size is not None and required is not None and required > size:
            raise ConfigError(f"the sampler draws from {required} rows, the data have {size}")
        self._sampler = sampler
        self._microbatch = microbatch

    def __iter__(self) -> Iterator[DrawnBatch]:
        draw = None
        for drawn in self._sampler:
            rows = self._microbatch or max(1, len(drawn))
            parts = max(1, -(-len(drawn) // rows))
            draw = Draw(len(drawn), draw)
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


def _warn_of_repeats(data: Any) -> None:
    """Warn if a Subset or ConcatDataset has a row of its data set several times: each is a unit of its own."""
    if not isinstance(data, (Subset, ConcatDataset)) or (origins := _origins(data)) is None:
        return
    counts = np.unique(origins, axis=0, return_counts=True)[1]
    if len(counts) and (most := int(counts.max())) > 1:
        warnings.warn(
            f"{int((counts > 1).sum())} rows of the data set are in the {type(data).__name__} several times, up to "
            f"{most}: the unit of privacy is an entry of it, and a row that is there {most} times may move a sum by "
            f"{most} times max_grad_norm, so that its epsilon is several times larger. Leave repeats out, or give "
            "groups= the row that each entry is",
            UserWarning,
            stacklevel=4,
        )


def _origins(data: Any) -> NDArray[np.int64] | None:
    """Return the data set and the row in it of each entry, (N, 2); None if no two entries can be the same row."""
    if isinstance(data, ConcatDataset):
        sets: list[Any] = data.datasets
        parts = [_origins(each) for each in sets]
        if all(part is None for part in parts) and len({id(each) for each in sets}) == len(parts):
            return None
        pairs = zip(sets, parts, strict=True)
        return np.concatenate([_numbered(each, range(len(each))) if part is None else part for each, part in pairs])
    if not isinstance(data, Subset):
        return None
    inner = _origins(data.dataset)
    return _numbered(data.dataset, data.indices) if inner is None else inner[np.asarray(data.indices, np.int64)]


def _numbered(data: Any, indices: Any) -> NDArray[np.int64]:
    index = np.asarray(indices, np.int64)
    return np.stack([np.full(len(index), id(data)), np.where(index < 0, index + len(data), index)], 1)


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


class DrawTracker:
    """Compares the rows that went through backward with those of the batch in use.

    Attributes:
        passes: backward passes since the last step.
        examples: rows of these passes.
    """

    def __init__(self) -> None:
        self.passes = self.examples = 0
        self._rows = self._seen = 0  # of the part in use, and those of them that went through backward
        self._last, self._open = True, False
        self._drawn = 0  # examples of the draw so far
        self._origin: object = None
        self._draw: Draw | None = None
        self._warned = False

    @property
    def sampled(self) -> bool:
        """Whether the gradients are of a draw of our sampler."""
        return self._open and self._draw is not None

    @property
    def used(self) -> bool:
        """Whether a batch was declared as the one in use, drawn or not."""
        return self._open

    @property
    def complete(self) -> bool:
        """Whether a step may follow: the part is the draw's last, or the batches are the user's own."""
        return self._last or not self._open

    @property
    def awaited(self) -> bool:
        """Whether a part was returned to the user and has not been through backward."""
        return self._open and not self._seen

    @property
    def held(self) -> bool:
        """Whether the gradients have parts of an unfinished draw and must not be cleared."""
        return self.passes > 0 and self._open and not (self._last and self._seen)

    def begin(self, batch: DrawnBatch, origin: object = None) -> None:
        """Start a part of a draw.

        Args:
            batch: the part.
            origin: the iterator of the parts; with another one a draw begins even if the last one is not complete.

        Raises:
            ConfigError: no step followed the previous draw or other batches; the previous part was left out, or is
                still to be used; the draw made a step already, or another training uses it.
        """
        if batch.draw is not None and batch.draw.stepped:
            raise ConfigError(
                "this draw has made a step already: amplification by sampling requires a new draw for each step. "
                "Iterate batches(data) or draws(data) again, and keep no list of them"
            )
        if batch.draw is not None and batch.draw.tracker is not None and batch.draw.tracker() is not self:
            raise ConfigError(
                "another private training has used this draw: amplification by sampling requires a new draw for each "
                "step of each training. Take batches from this one's batches(data) or draws(data)"
            )
        if self.awaited and origin is not None and origin is self._origin:
            raise ConfigError(
                f"the batch before this one ({self._rows} rows) has not been through backward: take batches one at a "
                "time, without list() or prefetching, and leave none out; an empty draw makes a step, too"
            )
        new = self._last or not self._open or origin is not self._origin or batch.draw is not self._draw
        if new and self.passes:
            self._open = False  # so that zero_grad clears them
            raise ConfigError(
                f"{self.passes} backward pass(es) without optimizer.step() before the next draw: one step belongs to "
                "each draw. zero_grad() gives these up. For larger batches raise sample_rate; for less memory give "
                "microbatch"
            )
        if new:
            self._warn_of_choice(batch.draw)
            self._drawn = 0
        else:
            self._require_all()
        self._rows, self._seen, self._last, self._open = batch.rows, 0, batch.last, True
        self._origin, self._draw = origin, batch.draw
        if batch.draw is not None:
            batch.draw.tracker = weakref.ref(self)
        self._drawn += batch.examples

    def add(self, rows: int) -> None:
        """Count the rows of a finished backward pass."""
        self.passes += 1
        self.examples += rows
        self._seen += rows

    def require_step(self) -> None:
        """Check that the sum may be released.

        Raises ConfigError without a backward pass for each row since the last step, unless the draw was empty, and for
        a part of a draw.
        """
        if self.sampled and self._draw is not None and self._drawn != self._draw.examples:
            raise ConfigError(
                f"{self._drawn} of the draw's {self._draw.examples} rows were used: a chosen part of a draw is no "
                "Poisson draw. Use each part of a draw as it is; rows to leave out are for clipper.mask"
            )
        empty = self._open and self._drawn == 0
        if not self.passes and not empty:
            raise ConfigError(
                "optimizer.step() without a backward pass since the last step: only an empty batch that our sampler "
                "drew makes a step of noise only"
            )
        if self.passes and not (empty and self.awaited):
            self._require_all()

    def forget(self) -> None:
        """Reset the counts after gradients were cleared without a step."""
        self.passes = self.examples = self._seen = 0

    def released(self) -> None:
        """Mark the draw as used up by a step."""
        self.forget()
        if self._open and self._draw is not None:
            self._draw.stepped = True
        self._open = False

    def _warn_of_choice(self, draw: Draw | None) -> None:
        """Warn once if the draw before this one made no step: the accounting is of draws that nobody chose."""
        given_up = self._draw is not None and self._draw is not draw and not self._draw.stepped
        skipped = draw is not None and not draw.follows(self._draw)
        if (given_up or skipped) and not self._warned:
            self._warned = True
            warnings.warn(
                "a draw was left out, or given up without a step: amplification by sampling is of draws that were not "
                "chosen. If the choice depended on the data (a loss, a norm, the size of the draw), the ledger's "
                "epsilon is too small. Make a step of each draw",
                UserWarning,
                stacklevel=4,
            )

    def _require_all(self) -> None:
        """Check that each row of the part went through backward once."""
        if not self._open or self._seen == self._rows:
            return
        remedy = (
            "the model's input must have the examples in its first dimension, and each of them; rows to leave out are "
            "for clipper.mask"
            if self._seen < self._rows
            else "an example would count more than once. Add the losses up and call backward once for each batch"
        )
        raise ConfigError(f"{self._seen} rows went through backward passes, the batch has {self._rows}: {remedy}")
