"""Poisson sampling: each unit is in each draw independently, with exactly the probability that is accounted.

The amplification that the accountant uses holds only for such draws, and only while nobody learns who was drawn: each
draw reads the operating system's randomness. There is no seed that could repeat after a resume, in another process or
in a copy. `Units` are rows of the data or groups of rows; several processes sample disjoint shares of them.

Source: Abadi et al. 2016, arXiv:1607.00133, section 3; Chua et al. 2024, arXiv:2403.17673, on what shuffling costs.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.privacy.dp.ledger import Ledger
from accelerant.privacy.dp.ledger.events import about, check_whole
from accelerant.privacy.dp.sampling.batches import require_poisson
from accelerant.privacy.random import SecureStream

_BITS: Final = 53  # a rate is a multiple of 2^-53, so that float64 holds it exactly
_LOW: Final = _BITS - 8
_BLOCK_BITS: Final = 12  # blocks of rare draws: longer ones take long to prepare
_LEAST_BLOCK_BITS: Final = 6

_Integers = Callable[[int], NDArray[np.int64]]
"""From n to n uniform integers of 53 bits."""


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
        self.size, self.steps, self.draws = size, steps, 0
        self.sample_rate = self._threshold / 2**_BITS
        self.share: Tensor | None = None
        self._stream = stream
        self._block_bits = min(_BLOCK_BITS, math.floor(-math.log2(self.sample_rate)))
        self._rare: RareDraws | None = None

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
        """Draw the units whose uniform number of 53 bits is below the threshold.

        The first byte decides all but one comparison in 256, whose other 45 bits are then drawn.
        """
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
    """The units of privacy of a data set.

    Attributes:
        groups: (N,) int64 on the CPU, the unit of each row as `require_groups` numbers it; None if each row is one.
        digest: SHA-256 of these numbers, which do not depend on the groups' names; empty without groups. It reveals
            something about the data and must never be written anywhere.
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

        Each share is sampled at the same rate, so the union of the draws is a Poisson sample of all units. With more
        processes than units, each raises ConfigError, so that none waits for another.
        """
        if size > (count := max(1, self.number(rows))):
            raise ConfigError(f"{size} processes have {count} units among them: start fewer")
        share = None
        if size > 1:
            own = None if self.groups is None else self.groups % size == rank
            share = torch.arange(rank, rows, size) if own is None else own.nonzero().flatten()
        if self.groups is None:
            sampler = PoissonSampler(rows if share is None else len(share), rate, steps=steps)
        else:
            sampler = GroupedSampler(self.groups if share is None else self.groups[share], rate, steps=steps)
        sampler.share = share
        return sampler

    def require_ledger(self, ledger: Ledger) -> None:
        """Check that a ledger names the unit; ConfigError if groups are drawn, and it calls the unit an example."""
        if self.groups is not None:
            _require_named(ledger)


def _require_named(ledger: Ledger) -> None:
    if ledger.unit == "example":
        raise ConfigError(
            "groups of rows are drawn, and the ledger's unit is an example: its statement would be of rows. Create it "
            'by Ledger(path, unit="user")'
        )


def require_sampler(sampler: PoissonSampler, rate: float, ledger: Ledger, units: Units, processes: int) -> None:
    """Check a user's sampler against the arguments of make_private: rate, rows of a unit, the ledger's unit.

    Raises ConfigError if they differ, UnsupportedCase for several processes or draws that are not Poisson's.
    """
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
        _require_named(ledger)


def delta_remark(delta: float, count: int, unit: str) -> str:
    """Return a warning if delta is not below one over the number of units, else an empty string."""
    if delta * count < 1:
        return ""
    return (
        f"delta {delta:g} is not below one over the about {about(count):,} units ({unit}): to publish one in "
        f"{1 / delta:,.0f} as it is would be as private. Choose {10.0 ** math.floor(math.log10(0.1 / count)):g} or less"
    )


def require_groups(groups: Any) -> Tensor:
    """Return the unit of each row, numbered from 0 in order of appearance: (N,) int64 on the CPU, a copy.

    Raises ShapeError if groups are neither N integers nor N strings, or both: 1 and "1" would be one unit.
    """
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

    Units come in blocks of m = 2^bits. The number drawn from a block is binomial: with a rate t / 2^53 its distribution
    function is a multiple of 2^(-53 m), so that a uniform number of 53 m bits gives it without error. Its first 53 bits
    decide all but one block in 10^14; only for those are the other bits drawn. The drawn units' positions in the block
    are uniform, and drawn again where two are equal.

    Args:
        threshold: the rate times 2^53, a whole number above 0 and below 2^53.
        bits: log2 of a block's length, 1 or more; the mean of a block, rate * 2^bits, should not be above 1.
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
