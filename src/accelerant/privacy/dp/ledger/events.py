"""What was done to the data: one mechanism, its noise, how its records were drawn, how often.

Events are what is recorded, never an epsilon: epsilons of different events do not add up well, events compose
exactly (`accelerant.privacy.dp.ledger.accounting`). The terms are those of Abadi et al. 2016, arXiv:1607.00133.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal, get_args

from accelerant.errors import ConfigError, FormatError

__all__ = [
    "CHARGED_UP_TO",
    "Event",
    "Mechanism",
    "Neighbouring",
    "Sampling",
    "check_delta",
    "check_neighbouring",
    "check_whole",
]

Mechanism = Literal["gaussian", "laplace", "discrete_gaussian", "discrete_laplace", "randomized_response"]
Sampling = Literal["poisson", "none", "unknown", "shuffled"]
Neighbouring = Literal["add-or-remove-one", "replace-one"]

CHARGED_UP_TO: Final = 16.0
"""A distance in total variation costs 1 + exp(epsilon) times itself in delta; an event's delta has this epsilon's."""

_MECHANISMS: Final = get_args(Mechanism)
_SAMPLINGS: Final = get_args(Sampling)
_NEIGHBOURING: Final = get_args(Neighbouring)


@dataclass(frozen=True, slots=True)
class Event:
    """A release, or `count` equal ones.

    Args:
        mechanism: gaussian and discrete_gaussian bound the L2 norm, laplace and discrete_laplace the L1 norm of what
            one unit contributes. randomized_response stands for any mechanism of pure epsilon.
        noise_multiplier: standard deviation (Gaussian) or scale b (Laplace) over the sensitivity; 1 / epsilon for
            randomized_response. 0 is no privacy at all: epsilon is infinite.
        sampling: "poisson": each unit was in the draw independently with probability sample_rate. "none": all
            records are used. "shuffled", "unknown": accounted as "none", since a shuffled loader's batches are no
            Poisson draws (Chua et al. 2024, arXiv:2403.17673) and nothing is known of the other.
        sample_rate: in (0, 1]; 1 for "none". Of a shuffled or unknown draw it is kept, and not used.
        count: how many times, 0 or more.
        delta: what each release charges of delta beside its epsilon: tails that were cut, tables, smoothing. It holds
            while the total epsilon is at most CHARGED_UP_TO; above it, more is charged.
        note: for the reader of the ledger.
        source: name of the noise source.
        secure: whether the noise is cryptographic and on a grid; None where it is not known.
        idealised: the sum before the noise was in floating point, without a bound on what its rounding shows.

    Raises:
        ConfigError: a value that has no meaning, by name.
    """

    mechanism: Mechanism
    noise_multiplier: float
    sampling: Sampling = "none"
    sample_rate: float = 1.0
    count: int = 1
    delta: float = 0.0
    note: str = ""
    source: str = ""
    secure: bool | None = None
    idealised: bool = False

    def __post_init__(self) -> None:
        if self.mechanism not in _MECHANISMS:
            raise ConfigError(f"mechanism must be one of {', '.join(_MECHANISMS)}, got {self.mechanism!r}")
        if self.sampling not in _SAMPLINGS:
            raise ConfigError(f"sampling must be one of {', '.join(_SAMPLINGS)}, got {self.sampling!r}")
        for name in ("noise_multiplier", "sample_rate", "delta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"{name} must be a number, got {value!r}")
            object.__setattr__(self, name, float(value))
        if not 0 <= self.noise_multiplier < math.inf:
            raise ConfigError(f"noise_multiplier must be 0 or more, and finite, got {self.noise_multiplier}")
        if not 0 < self.sample_rate <= 1:
            raise ConfigError(f"sample_rate must be in (0, 1], got {self.sample_rate}")
        if self.sampling == "none" and self.sample_rate != 1:
            raise ConfigError(
                f"sample_rate must be 1 where nothing is sampled, got {self.sample_rate}: say how the records were "
                'drawn, sampling="poisson" only where each was drawn independently (PoissonSampler)'
            )
        check_whole("count", self.count, 0)
        if not 0 <= self.delta < 1:
            raise ConfigError(f"delta of an event must be in [0, 1), got {self.delta}")

    @property
    def amplified(self) -> bool:
        """Whether the accounting uses that records were sampled."""
        return self.sampling == "poisson" and self.sample_rate < 1

    def times(self, count: int) -> Event:
        """The same, `count` times."""
        return replace(self, count=count)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` takes it back exactly."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Event:
        """The event of `to_dict`.

        Raises:
            FormatError: a field is missing, unknown or without meaning.
        """
        known = {field.name for field in fields(cls)}
        if not {"mechanism", "noise_multiplier"} <= set(found) <= known:
            raise FormatError(f"an event has the fields {', '.join(sorted(known))}; got {', '.join(sorted(found))}")
        try:
            return cls(**found)
        except ConfigError as error:
            raise FormatError(f"an event without meaning: {error}") from None


def check_delta(delta: float) -> float:
    """delta, if it is in (0, 1).

    Raises:
        ConfigError: it is not.
    """
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < 1:
        raise ConfigError(f"delta must be in (0, 1), well below one over the number of units, got {delta!r}")
    return float(delta)


def check_whole(name: str, value: object, least: int) -> int:
    """value, if it is a whole number, `least` or more.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number, {least} or more, got {value!r}")
    return value


def check_neighbouring(neighbouring: str) -> Neighbouring:
    """neighbouring, if it is a relation that is known.

    Raises:
        ConfigError: it is not.
    """
    for relation in _NEIGHBOURING:
        if neighbouring == relation:
            return relation  # type: ignore[no-any-return]  # get_args is untyped
    raise ConfigError(f"neighbouring must be one of {', '.join(_NEIGHBOURING)}, got {neighbouring!r}")
