"""Privacy events: the mechanism applied to the data, its noise, how its records were sampled, and how often.

The ledger records events, not epsilons: events compose tightly (accounting.py), sums of epsilons do not. The terms are
those of Abadi et al. 2016, arXiv:1607.00133. This module also checks the numeric arguments of all of `dp`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from typing import Any, Final, Literal, cast, get_args

from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.files import clipped

Mechanism = Literal["gaussian", "laplace", "discrete_gaussian", "discrete_laplace", "randomized_response"]
Sampling = Literal["poisson", "none", "unknown", "shuffled"]
Neighbouring = Literal["add-or-remove-one", "replace-one"]

CHARGED_UP_TO: Final = 16.0
"""The total epsilon for which an event's delta is stated: total variation t costs (1 + exp(epsilon)) t of delta."""

DEFAULT_DELTA: Final = 1e-5  # The delta at which epsilon is stated where nobody chose one

_KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    "note": (str, "text"), "source": (str, "text"), "secure": (bool | None, "True, False or None"),
    "idealised": (bool, "True or False"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrivacyEvent:
    """One release, or `count` equal ones.

    Args:
        mechanism: gaussian and discrete_gaussian bound the L2 norm, laplace and discrete_laplace the L1 norm of what
            one unit contributes. randomized_response represents any mechanism of pure epsilon.
        noise_multiplier: standard deviation (Gaussian) or scale b (Laplace) over the sensitivity; 1 / epsilon for
            randomized_response. 0 is no privacy: epsilon is infinite.
        sampling: "poisson": each unit was in the draw independently with probability sample_rate. "none": all
            records are used. "shuffled", "unknown": accounted as "none", since a shuffled loader's batches are no
            Poisson draws (Chua et al. 2024, arXiv:2403.17673) and nothing is known of the other.
        sample_rate: in (0, 1]; 1 for "none". For a shuffled or unknown draw it is recorded, and not used.
        count: 0 or more.
        delta: charged by each release in addition to its epsilon: cut tails, tables, smoothing. Valid while the total
            epsilon is at most CHARGED_UP_TO; above it, more is charged.
        note: for the reader of the ledger.
        source: name of the noise source.
        secure: whether the noise is cryptographic and on a grid; None if unknown.
        idealised: the sum before the noise was in floating point, without a bound on what its rounding reveals.

    Raises:
        ConfigError: an invalid value.
    """

    mechanism: Mechanism
    noise_multiplier: float
    sampling: Sampling = "none"
    sample_rate: float = 1.0
    count: int = 1
    _: KW_ONLY
    delta: float = 0.0
    note: str = ""
    source: str = ""
    secure: bool | None = None
    idealised: bool = False

    def __post_init__(self) -> None:
        _check_choice("mechanism", self.mechanism, Mechanism)
        _check_choice("sampling", self.sampling, Sampling)
        for name in ("noise_multiplier", "sample_rate", "delta"):
            number = _as_float(getattr(self, name))
            if number is None:
                raise ConfigError(f"{name} must be a number, got {clipped(getattr(self, name))}")
            object.__setattr__(self, name, number)
        for name, (kind, words) in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be {words}, got {clipped(getattr(self, name))}")
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

    def times(self, count: int) -> PrivacyEvent:
        """Return the same event with another count."""
        return replace(self, count=count)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; `from_dict` restores them exactly."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> PrivacyEvent:
        """Restore the event of `to_dict`; FormatError if a field is missing, unknown or invalid."""
        known = {field.name for field in fields(cls)}
        if not isinstance(record, Mapping) or not {"mechanism", "noise_multiplier"} <= set(record) <= known:
            found = ", ".join(sorted(record)) if isinstance(record, Mapping) else repr(record)
            raise FormatError(f"an event has the fields {', '.join(sorted(known))}; got {found[:200]}")
        try:
            return cls(**record)
        except ConfigError as error:
            raise FormatError(f"an invalid event: {error}") from None


def check_delta(delta: float) -> float:
    """Return delta as a float; ConfigError if it is not in (0, 1)."""
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < 1:
        raise ConfigError(f"delta must be in (0, 1), well below one over the number of units, got {clipped(delta)}")
    return float(delta)


def check_whole(name: str, value: object, least: int) -> int:
    """Return a whole number; ConfigError if it is none, below `least`, or of more than 63 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number, {least} or more, got {clipped(value)}")
    if value >= 1 << 63:
        raise ConfigError(f"{name} must be below 2^63, got {clipped(value)}")
    return value


def about(count: int) -> int:
    """Return a number rounded down to two digits, all that is published of the size of private data."""
    unit: int = 10 ** max(0, len(str(count)) - 2)
    return count // unit * unit


def check_number(
    name: str, value: object, *, least: float = 0.0, open_below: bool = True, most: float = math.inf
) -> float:
    """Return a finite number as a float; ConfigError if it is none, or not from least (or above it) to most."""
    number = _as_float(value)
    if number is not None and least <= number <= most and math.isfinite(number) and (number > least or not open_below):
        return number
    below = f"above {least:g}" if open_below else f"at least {least:g}"
    above = "finite" if most == math.inf else f"at most {most:g}"
    raise ConfigError(f"{name} must be a number, {below} and {above}; got {clipped(value)}")


def _as_float(value: object) -> float | None:
    """Return a number as a float, infinity for a whole number that is too large; None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_neighbouring(neighbouring: str) -> Neighbouring:
    """Return the neighbouring relation; ConfigError if it is unknown."""
    _check_choice("neighbouring", neighbouring, Neighbouring)
    return cast(Neighbouring, neighbouring)


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ConfigError(f"{name} must be one of {', '.join(get_args(choices))}, got {clipped(value)}")
