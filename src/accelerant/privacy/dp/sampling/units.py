"""Units of privacy: rows of the data or groups of rows, and their samplers in one or several processes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.privacy.dp.ledger import Ledger
from accelerant.privacy.dp.sampling.batches import require_poisson
from accelerant.privacy.dp.sampling.poisson import GroupedSampler, PoissonSampler, require_groups

__all__ = ["ShardSampler", "Units", "delta_remark", "require_sampler"]


class ShardSampler:
    """Maps draws from this process's share of the rows, numbered from 0, to row numbers of the whole data.

    The shares are disjoint, have whole units, and each is sampled at the same rate, so the union of the draws is a
    Poisson sample of all units.
    """

    def __init__(self, sampler: PoissonSampler, rows: Tensor) -> None:
        self._sampler, self._rows = sampler, rows

    def __iter__(self) -> Iterator[Tensor]:
        for drawn in self._sampler:
            yield self._rows[drawn]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


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

    def sampler(self, rows: int, rate: float, steps: int, *, rank: int, size: int) -> PoissonSampler | ShardSampler:
        """Return a sampler of the units; for one of several processes, of its share: no unit is in two.

        With more processes than units, each raises ConfigError, so that none waits for another.
        """
        if size > (count := max(1, self.number(rows))):
            raise ConfigError(f"{size} processes have {count} units among them: start fewer")
        if self.groups is None:
            if size == 1:
                return PoissonSampler(rows, rate, steps=steps)
            share = torch.arange(rank, rows, size)
            return ShardSampler(PoissonSampler(len(share), rate, steps=steps), share)
        if size == 1:
            return GroupedSampler(self.groups, rate, steps=steps)
        share = (self.groups % size == rank).nonzero().flatten()
        return ShardSampler(GroupedSampler(self.groups[share], rate, steps=steps), share)

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

    Raises:
        ConfigError: they differ.
        UnsupportedCase: several processes; a sampler whose draws are not Poisson's.
    """
    require_poisson(sampler)
    if processes > 1:
        raise UnsupportedCase("several processes share rows among them: leave sampler out")
    if units.groups is not None:
        raise ConfigError("make_private got groups, and draws from them: leave sampler out")
    if not math.isclose(sampler.sample_rate, rate, rel_tol=1e-9):
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
        f"delta {delta:g} is not below one over the {count:,} units ({unit}): to publish one in {1 / delta:,.0f} as it "
        f"is would be as private. Choose {10.0 ** math.floor(math.log10(0.1 / count)):g} or less"
    )
