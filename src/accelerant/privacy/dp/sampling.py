"""Poisson sampling of rows or users, the batches of its draws, and the check of their use.

Each unit is in each draw independently, with exactly the probability that is accounted; nobody may learn who was drawn,
so draws read the operating system's randomness and have no seed. Draws are split into parts of one shape if memory or a
CUDA graph requires it. A `DrawTracker` checks that each drawn row goes through backward once, and that each draw makes
one step of one training.

Source: Abadi et al. 2016, arXiv:1607.00133, section 3; Chua et al. 2024, arXiv:2403.17673, on what shuffling costs.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.privacy.dp.ledger import PrivacyLedger
from accelerant.privacy.dp.ledger.accounting import Sampling, about, check_whole
from accelerant.privacy.random import SecureStream
from accelerant.runtime.host import as_torch_takes_it, refuse_masked, refuse_without_values

# --- batches of draws -------------------------------------------------------------------------------------------------
_Rows = Callable[[Tensor], Any]


class Draw:
    """The identity of one draw of so many rows, shared by its parts and their copies."""

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


@dataclass(frozen=True, slots=True, eq=False)
class DrawnBatch:
    """A draw, or a part of one; each is used once, and equal to itself alone.

    Attributes:
        tensors: a tuple of tensors, or a mapping if the data are one; dimension 0 is the row.
        mask: (rows,) bool, the rows that were drawn; None if all were. The others are padding, which must not count.
        last: whether it is the draw's last part, after which optimizer.step() follows.
        examples: number of rows that were drawn.
        rows: rows of the tensors, including padding.
        draw: the same for all parts of one draw; None if unknown: then it is taken for a batch of the user's own.
        sampler: that drew it; None if unknown.
    """

    tensors: Any = field(repr=False)
    mask: Tensor | None = field(repr=False)
    last: bool
    examples: int
    rows: int
    draw: Draw | None = field(default=None, repr=False)
    sampler: Any = field(default=None, repr=False)


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
            warn_of_repeats(data)
        required = getattr(sampler, "rows", getattr(sampler, "size", None))
        if size is not None and required is not None and required > size:
            raise ConfigError(f"the sampler draws from {required} rows, the data have {size}")
        self._sampler = sampler
        self._microbatch = microbatch

    def __repr__(self) -> str:
        return f"PoissonBatches({self._sampler!r}, microbatch={self._microbatch})"

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
                    mask = torch.arange(rows, device="cpu") < examples
                    index = torch.cat([index, index.new_zeros(rows - examples)])
                found = self._rows(index)
                tensors = (found,) if isinstance(found, Tensor) else found
                yield DrawnBatch(tensors, mask, part == parts - 1, examples, rows, draw, self._sampler)


def warn_of_repeats(data: Any) -> None:
    """Warn if a Subset or ConcatDataset has a row of its data set several times: each is a unit of its own."""
    if not isinstance(data, (Subset, ConcatDataset)):
        return
    counts = np.unique(_origins(data, {}), return_counts=True)[1]
    if len(counts) and (most := int(counts.max())) > 1:
        warnings.warn(
            f"{int((counts > 1).sum())} rows of the data set are in the {type(data).__name__} several times, up to "
            f"{most}: the unit of privacy is an entry of it, and a row that is there {most} times may move a sum by "
            f"{most} times max_grad_norm, so that its epsilon is several times larger. Leave repeats out, or give "
            "groups= the row that each entry is",
            UserWarning,
            stacklevel=4,
        )


def _origins(data: Any, known: dict[int, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return a number for each entry, (N,), the same where two are one row of a data set."""
    if isinstance(data, ConcatDataset):
        return np.concatenate([_origins(each, known) for each in data.datasets])
    if isinstance(data, Subset):
        return _origins(data.dataset, known)[np.asarray(data.indices, np.int64)]
    begin = sum(map(len, known.values()))
    return known.setdefault(id(data), np.arange(begin, begin + len(data)))


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
        refuse_masked(data, "data")
        if data.dtype.kind not in "biufc":
            raise UnsupportedDtype(f"data must be numbers, got an array of {data.dtype}")
        return lambda index: torch.from_numpy(as_torch_takes_it(np.ascontiguousarray(data[index.numpy()]))), len(data)
    if isinstance(data, Tensor):
        refuse_without_values(data, "data")
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
    """Return how a sampler, a loader or batches draw, as a `PrivacyEvent` names it; "unknown" unless it is known."""
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
            f'PrivacyEvent(..., sampling="{kind}")'
        )


class DrawTracker:
    """Compares the rows that went through backward since the last step with those of the batch in use."""

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
        """Start a part of a draw of the iterator `origin`; ConfigError if the draw or part before is not finished."""
        if batch.draw is not None and batch.draw.stepped:
            raise ConfigError(
                "this draw has made a step already: amplification by sampling requires a new draw for each step. "
                "Iterate batches(data) again, and keep no list of them"
            )
        if batch.draw is not None and batch.draw.tracker is not None and batch.draw.tracker() is not self:
            raise ConfigError(
                "another private training has used this draw: amplification by sampling requires a new draw for each "
                "step of each training. Take batches from this one's batches(data)"
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
        """Check that the sum may be released: each row of a whole draw went through backward once, or it was empty."""
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


# --- Poisson sampling ------------------------------------------------------------------------------------------------
_BITS: Final = 53  # a rate is a multiple of 2^-53, so that float64 holds it exactly
_LOW: Final = _BITS - 8
_BLOCK_BITS: Final = 12  # blocks of rare draws: longer ones take long to prepare
_LEAST_BLOCK_BITS: Final = 6

_Integers = Callable[[int], NDArray[np.int64]]  # From n to n uniform integers of 53 bits


class PoissonSampler:
    """Iterates draws from size units: each is in a draw with probability sample_rate, independently of all else.

    A draw has any length, 0 too. At rates below 1/64 its cost is proportional to its length plus 10^-3 of the size,
    else to one byte of randomness for each unit.

    Args:
        size: number of units.
        sample_rate: in (0, 1].
        steps: draws of one iteration; None: endless.
        stream: used instead of the system's randomness; its key reveals every draw.

    Attributes:
        sample_rate: rounded down to a multiple of 2^-53: exactly the probability that is used.
        draws: number of draws so far, by all iterations.
        rows_per_unit: the most rows that a unit has in a draw: 1.
        share: row numbers in the whole data of the rows that are drawn here, by one of several processes; None: all.

    Raises:
        ConfigError: an invalid value.
    """

    sampling: ClassVar[Literal["poisson"]] = "poisson"
    rows_per_unit = 1

    def __init__(
        self, size: int, sample_rate: float, *, steps: int | None = None, stream: SecureStream | None = None
    ) -> None:
        check_whole("size", size, 1)
        if isinstance(sample_rate, bool) or not isinstance(sample_rate, (int, float)) or not 0 < sample_rate <= 1:
            raise ConfigError(f"sample_rate must be in (0, 1], got {sample_rate!r}")
        if steps is not None:
            check_whole("steps", steps, 0)
        self._threshold = math.floor(float(sample_rate) * 2**_BITS)
        if not self._threshold:
            raise ConfigError(f"sample_rate {sample_rate!r} is below 2^-{_BITS}: nothing would ever be drawn")
        self.size, self.steps, self.draws = size, steps, 0  # draws: so far, by all iterations
        self.sample_rate = self._threshold / 2**_BITS  # rounded down: exactly the probability that is used
        self.share: Tensor | None = None  # rows of the whole data that one of several processes draws from; None: all
        self._stream = stream
        self._block_bits = min(_BLOCK_BITS, math.floor(-math.log2(self.sample_rate)))
        self._rare: RareDraws | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size} units, sample_rate={self.sample_rate:.6g}, steps={self.steps})"

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate index tensors: (n,) int64, ascending, on the CPU."""
        for _ in itertools.islice(itertools.count(), self.steps):
            self.draws += 1
            rows = torch.from_numpy(self._rows(self._draw_units()))
            yield rows if self.share is None else self.share[rows]

    def _rows(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the data that these units contribute."""
        return units

    def _draw_units(self) -> NDArray[np.int64]:
        blocks = self.size >> self._block_bits
        if self._block_bits < _LEAST_BLOCK_BITS or not blocks:
            return self._draw_by_comparison(self.size)
        if self._rare is None:
            self._rare = RareDraws(self._threshold, self._block_bits)
        whole = blocks << self._block_bits
        drawn = self._rare.draw(blocks, self._integers)
        return np.concatenate([drawn, whole + self._draw_by_comparison(self.size - whole)])

    def _draw_by_comparison(self, size: int) -> NDArray[np.int64]:
        """Draw the units whose uniform number of 53 bits is below the threshold; one byte decides most of them."""
        top, rest = divmod(self._threshold, 1 << _LOW)
        first = self._bytes(size)
        if top == 256:  # a rate of 1
            return np.arange(size, dtype=np.int64)
        (near,) = np.nonzero(first <= np.uint8(top))
        undecided = first[near] == top
        within = ~undecided
        if count := int(undecided.sum()):
            within[undecided] = self._integers(count) >> (_BITS - _LOW) < rest
        drawn: NDArray[np.int64] = near[within].astype(np.int64, copy=False)
        return drawn

    def _bytes(self, count: int) -> NDArray[np.uint8]:
        if self._stream is None:
            return np.frombuffer(os.urandom(count), np.uint8)
        whole = self._integers(-(-count // 6))  # 48 of 53 bits
        parts = np.stack([(whole >> shift) & 255 for shift in range(0, 48, 8)])
        return parts.reshape(-1)[:count].astype(np.uint8)

    def _integers(self, count: int) -> NDArray[np.int64]:
        """Return (count,) uniform in 0 to 2^53 - 1."""
        if self._stream is None:
            return (np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(64 - _BITS)).astype(np.int64)
        return (self._stream.uniform(count).numpy() * 2.0**_BITS).astype(np.int64)


class GroupedSampler(PoissonSampler):
    """Draws units that have several records, such as users, and some records of each: privacy by unit.

    Units are drawn as by `PoissonSampler`. Each drawn unit contributes up to `records` of its records, chosen uniformly
    without replacement. A unit of any size thus adds at most `records` clipped rows, which change the sum by at most
    records * C: the noise multiplier to record is the noise over that, and with records=1 (the default, and the best
    for equal noise) over C.

    Args:
        groups: (N,) integers, or strings in an array or list: the unit of each row of the data.
        sample_rate: of units, in (0, 1].
        records: the most rows of a unit in a draw.
        steps, stream: as for `PoissonSampler`.

    Attributes:
        size: number of units.
        rows: number of rows of the data.

    Raises:
        ConfigError, ShapeError: an invalid value; groups are neither N integers nor N strings.
    """

    def __init__(
        self, groups: Tensor | Sequence[int | str] | NDArray[Any], sample_rate: float, *, records: int = 1,
        steps: int | None = None, stream: SecureStream | None = None,
    ) -> None:  # fmt: skip
        check_whole("records", records, 1)
        numbers = require_groups(groups).numpy()
        counts = np.bincount(numbers)
        super().__init__(len(counts), sample_rate, steps=steps, stream=stream)
        self.rows, self.rows_per_unit = len(numbers), records
        self._by_unit = np.argsort(numbers, kind="stable")
        self._counts = counts.astype(np.int64)
        self._starts = np.cumsum(self._counts) - self._counts

    def _rows(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        counts = self._counts[units]
        total = int(counts.sum())
        ends = np.cumsum(counts)
        rank = np.arange(total) - np.repeat(ends - counts, counts)  # of each row within its unit
        rows = self._by_unit[np.repeat(self._starts[units], counts) + rank]
        order = np.lexsort((self._integers(total), np.repeat(np.arange(len(units)), counts)))
        return np.sort(rows[order][rank < self.rows_per_unit])  # order is by unit, as rank is


@dataclass(frozen=True, slots=True)
class Units:
    """The units of privacy of a data set: rows, or groups of rows as `require_groups` numbers them.

    The digest, SHA-256 of these numbers, reveals something about the data and must never be written anywhere.
    """

    groups: Tensor | None = None
    digest: str = ""

    @classmethod
    def of(cls, groups: Any) -> Units:
        """Return the units that `require_groups` numbers; None: each row is one."""
        if groups is None:
            return cls()
        numbers = require_groups(groups)
        return cls(numbers, hashlib.sha256(numbers.numpy().tobytes()).hexdigest())

    @property
    def name(self) -> str:
        """A ledger's default name of a unit."""
        return "example" if self.groups is None else "user"

    def number(self, rows: int) -> int:
        """Return the number of units in data with `rows` rows; ShapeError if groups have another number of rows."""
        if self.groups is None:
            return rows
        if len(self.groups) != rows:
            raise ShapeError(
                f"groups must name the unit of each of the {rows} rows of the data, got {len(self.groups)}"
            )
        return int(self.groups.max()) + 1

    def sampler(self, rows: int, rate: float, steps: int, *, rank: int, size: int) -> PoissonSampler:
        """Return a sampler of the units; for one of several processes, of its share: no unit is in two.

        Each share is sampled at the same rate, so the union of the draws is a Poisson sample of all units.
        """
        if size > (count := max(1, self.number(rows))):
            raise ConfigError(f"{size} processes have {count} units among them: start fewer")
        share = None
        if size > 1:
            own = None if self.groups is None else self.groups % size == rank
            share = torch.arange(rank, rows, size, device="cpu") if own is None else own.nonzero().flatten()
        if self.groups is None:
            sampler = PoissonSampler(rows if share is None else len(share), rate, steps=steps)
        else:
            sampler = GroupedSampler(self.groups if share is None else self.groups[share], rate, steps=steps)
        sampler.share = share
        return sampler


def require_named(ledger: PrivacyLedger) -> None:
    """Check that a ledger names the unit where groups are drawn; ConfigError if it calls the unit an example."""
    if ledger.unit == "example":
        raise ConfigError(
            "groups of rows are drawn, and the ledger's unit is an example: its statement would be of rows. Create it "
            'by PrivacyLedger(path, unit="user")'
        )


def require_sampler(sampler: PoissonSampler, rate: float, ledger: PrivacyLedger, units: Units, processes: int) -> None:
    """Check a user's sampler against make_private's arguments: rate, rows of a unit, the ledger's unit, processes."""
    require_poisson(sampler)
    if processes > 1:
        raise UnsupportedCase("several processes share rows among them: leave sampler out")
    if units.groups is not None:
        raise ConfigError("make_private got groups, and draws from them: leave sampler out")
    if not rate * (1 - 1e-9) <= sampler.sample_rate <= rate:  # the ledger has `rate`, a sampler's is rounded down
        raise ConfigError(f"the sampler draws at {sampler.sample_rate}, make_private got sample_rate {rate}")
    if sampler.rows_per_unit != 1:
        raise ConfigError(
            f"a unit of the sampler has up to {sampler.rows_per_unit} rows in a draw, and would count as often: "
            "records must be 1"
        )
    if isinstance(sampler, GroupedSampler):
        require_named(ledger)


def delta_remark(delta: float, count: int, unit: str) -> str:
    """Return a warning if delta is not below one over the number of units, else an empty string."""
    if delta * count < 1:
        return ""
    return (
        f"delta {delta:g} is not below one over the about {about(count):,} units ({unit}): to publish one in "
        f"{1 / delta:,.0f} as it is would be as private. Choose {10.0 ** math.floor(math.log10(0.1 / count)):g} or less"
    )


def require_groups(groups: Any) -> Tensor:
    """Return the unit of each row, numbered from 0 in order of appearance: (N,) int64 on the CPU; or ShapeError."""
    if isinstance(groups, Tensor):
        if groups.ndim != 1 or not len(groups) or groups.is_floating_point() or groups.is_complex():
            raise ShapeError(f"groups must be (N,) integers, got {tuple(groups.shape)} of {groups.dtype}")
        groups = groups.cpu().numpy()
    names = np.asarray(groups)
    if names.dtype.kind == "O" and all(isinstance(name, str) for name in names.flat):  # a column of pandas
        names = names.astype(str)
    if names.ndim != 1 or not len(names) or names.dtype.kind not in "biuUS":
        raise ShapeError(f"groups must be (N,) integers or texts, got {names.shape} of {names.dtype}")
    if names.dtype.kind == "U" and not all(isinstance(name, str) for name in groups):
        raise ShapeError("groups must be integers or texts, got both: the number 1 and the text '1' would be one unit")
    _, first, number = np.unique(names, return_index=True, return_inverse=True)
    return torch.from_numpy(first.argsort().argsort()[number].astype(np.int64))


class RareDraws:
    """Draws at small rates in time proportional to the number of units drawn, with exact probabilities.

    A block's count is binomial: with a rate threshold / 2^53 its distribution function is a multiple of 2^(-53 m), so
    that a uniform number of 53 m bits gives it without error; all but its first 53 bits are drawn only where they
    decide.
    """

    def __init__(self, threshold: int, bits: int) -> None:
        self._threshold, self._bits, self._length = threshold, bits, 1 << bits
        self._exact: list[int] = []  # P(count <= k) * 2^(53 m)
        self._weight = 0  # P(count = k) * 2^(53 m) of the last k
        shift = _BITS * (self._length - 1)
        first = [self._up_to(0) >> shift]
        while first[-1] < (1 << _BITS) - 1:  # words above the last are decided exactly, as ties are
            first.append(self._up_to(len(first)) >> shift)
        self._first = np.array(first, np.int64)

    def draw(self, blocks: int, integers: _Integers) -> NDArray[np.int64]:
        """Draw units from a number of blocks: (n,) int64, ascending."""
        counts = self.counts(integers(blocks), integers)
        owners = np.repeat(np.arange(blocks, dtype=np.int64), counts) << self._bits
        units = owners | self._positions(len(owners), integers)
        while True:
            units.sort()  # owners stay as they are: each has its high bits
            (equal,) = np.nonzero(units[1:] == units[:-1])
            if not equal.size:
                return units
            again = np.isin(owners, owners[equal])
            units[again] = owners[again] | self._positions(int(again.sum()), integers)

    def counts(self, words: NDArray[np.int64], integers: _Integers) -> NDArray[np.int64]:
        """Return the number of units drawn from each block, by the first 53 bits of its uniform number."""
        counts = np.searchsorted(self._first, words).astype(np.int64)
        for block in np.nonzero(self._first[np.minimum(counts, len(self._first) - 1)] == words)[0]:
            number = int(words[block])  # equal to the first bits of a bound: all 53 m bits decide
            for more in integers(self._length - 1).tolist():
                number = number << _BITS | more
            bounds = range(self._length)
            counts[block] = next((count for count in bounds if number < self._up_to(count)), self._length)
        return counts

    def _up_to(self, count: int) -> int:
        """Return P(count or fewer of a block) * 2^(53 m), exactly."""
        while len(self._exact) <= count:
            k, rest = len(self._exact), (1 << _BITS) - self._threshold
            if k:
                self._weight = self._weight * (self._length - k + 1) * self._threshold // (k * rest)  # no remainder
            else:
                self._weight = rest**self._length
            self._exact.append(self._weight + (self._exact[-1] if k else 0))
        return self._exact[count]

    def _positions(self, count: int, integers: _Integers) -> NDArray[np.int64]:
        return integers(count) & (self._length - 1)


__all__ = ["DrawnBatch", "GroupedSampler", "PoissonBatches", "PoissonSampler"]
