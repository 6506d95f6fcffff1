"""Noise on sums of bounded vectors, on tensors, on answers to queries, and on records before they are collected.

    released = (sum + noise) * scale,   noise of scale noise_multiplier * (C + s)

C bounds one example's contribution to the sum (its L2 norm for Gaussian noise, its L1 norm for Laplace), s is added by
rounding to the grid. The noise is widened, so that the multiplier in the ledger is the requested one.

>>> release(count, mechanism="laplace", sensitivity=1, epsilon=0.5, ledger=ledger)
>>> release(means, mechanism="gaussian", sensitivity=2 / n, noise_multiplier=4.0, ledger=ledger)

The caller guarantees the sensitivity, in L1 norm (Laplace) or L2 norm (Gaussian); this cannot be checked here.

    response = RandomizedResponse(choices=4, epsilon=1.0)
    reports = response.randomize(answers)                   # by each owner
    response.estimate(reports)                              # by the collector: unbiased shares of the answers

Local privacy: the owner of each record randomizes it: any two values give any report with probabilities that differ by
a factor of at most exp(epsilon). The epsilons of several reports on one record add up.

Source: Mironov 2012 (doi:10.1145/2382196.2382264) on grids; Canonne, Kamath and Steinke 2020, arXiv:2004.00010, on the
discrete Gaussian; Dwork, McSherry, Nissim and Smith 2006 (doi:10.1007/11681878_14), Laplace; Balle and Wang 2018,
arXiv:1805.06530, Gaussian; Warner 1965 and Kairouz, Oh and Viswanath 2016, arXiv:1407.1338 (k-ary response); Duchi,
Jordan and Wainwright 2013, local privacy.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accelerant._renamed import renamed_arguments
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.privacy.dp.ledger import LedgerLike, PrivacyLedger, opened_ledger
from accelerant.privacy.dp.ledger.accounting import (
    Mechanism,
    PrivacyEvent,
    Sampling,
    calibrate,
    check_number,
    check_whole,
)
from accelerant.privacy.dp.noise import FastSource, NoiseSource, SecureSource
from accelerant.privacy.dp.noise.discrete import LEAST_STEPS, SMOOTH, Charge, charge, choose_grid, laplace_charge
from accelerant.privacy.random import SecureStream
from accelerant.runtime.files import clipped
from accelerant.runtime.host import refuse_masked, refuse_without_values

# --- noise on sums ----------------------------------------------------------------------------------------------------
Kind = Literal["gaussian", "laplace"]
_CHARGES = {"gaussian": charge, "laplace": laplace_charge}


def require_clipped_unit(ledger: PrivacyLedger) -> PrivacyLedger:
    """Return the ledger; ConfigError if its units are replaced, which changes a clipped sum by up to 2 C, not C."""
    if ledger.neighbouring != "add-or-remove-one":
        raise ConfigError(
            f"the ledger is of neighbouring={ledger.neighbouring!r}, the clipping norm bounds what an example changes "
            'that is added or removed: make the ledger with neighbouring="add-or-remove-one"'
        )
    return ledger


@contextlib.contextmanager
def client_ledger(ledger: LedgerLike) -> Iterator[PrivacyLedger | None]:
    """Enter the ledger of sums over clients; ConfigError if its units are replaced, or examples."""
    with opened_ledger(ledger, unit="client") as book:
        if book is not None and book.unit == "example":
            raise ConfigError(
                "the sum is over clients, and the ledger's unit is an example, for which the noise is not enough: "
                'create it by PrivacyLedger(path, unit="client")'
            )
        yield None if book is None else require_clipped_unit(book)


def make_source(*, insecure: bool) -> NoiseSource:
    """Return ChaCha20 on integers for privacy claims, Philox for research; ConfigError for any other `secure`."""
    if not isinstance(insecure, bool):
        raise ConfigError(f"insecure must be True or False, got {insecure!r}")
    return FastSource() if insecure else SecureSource()


INSECURE = renamed_arguments(secure="insecure=, its opposite,")  # Decorates what took `secure=`


@dataclass(frozen=True, slots=True)
class NoiseParameters:
    """The noise of one release: scale in the units of the sum (0: none), grid (0: floating point), charged delta."""

    scale: float
    grid: float
    delta: float


class NoisySum:
    """Releases sums of vectors, of `dimensions` numbers together, that one example changes by at most a sensitivity.

    The sensitivity is in L2 and scales are standard deviations for "gaussian", in L1 and b for "laplace".
    """

    def __init__(self, source: NoiseSource, noise_multiplier: float, dimensions: int, kind: Kind = "gaussian") -> None:
        self.source = source
        self.noise_multiplier = check_number("noise_multiplier", noise_multiplier, open_below=False)
        self.dimensions = dimensions
        self.kind = kind
        self._plans: dict[tuple[float, float], NoiseParameters] = {}

    def plan(self, sensitivity: float, multiplier: float | None = None) -> NoiseParameters:
        """Return noise and grid at a sensitivity; `multiplier` overrides the release's own."""
        multiplier = self.noise_multiplier if multiplier is None else multiplier
        key = (sensitivity, multiplier)
        if key not in self._plans:
            plan = NoiseParameters(multiplier * sensitivity, 0.0, 0.0)
            if multiplier and not 0 < plan.scale < math.inf:
                raise ConfigError(
                    f"noise of {multiplier!r} times the sensitivity {sensitivity!r} leaves float64's range"
                )
            if plan.scale and self.source.secure and self.dimensions:
                grid = grid_of(self.kind, plan.scale, sensitivity, self.dimensions)
                bound = sensitivity + charge_of(self.kind, plan.scale, grid, self.dimensions).sensitivity
                plan = self.planned(multiplier * bound, grid)
            self._plans = {key: plan}
        return self._plans[key]

    def planned(self, scale: float, grid: float) -> NoiseParameters:
        """Return noise on a grid that costs no more than continuous noise of this scale, and the delta it charges."""
        scale = widened(self.kind, scale, grid)
        return NoiseParameters(scale, grid, charge_of(self.kind, scale, grid, self.dimensions).delta)

    def add_(self, tensors: Sequence[Tensor], plan: NoiseParameters, factor: float) -> None:
        """Add the noise and multiply by a factor, in place."""
        if not plan.scale:  # without noise, rounding would only lose precision
            for tensor in tensors:
                tensor.mul_(factor)
        elif self.kind == "gaussian":
            self.source.add_gaussian_(tensors, plan.scale, grid=plan.grid or 1.0, scale=factor)
        else:
            self.source.add_laplace_(tensors, plan.scale, grid=plan.grid or 1.0, scale=factor)

    def event(
        self, plan: NoiseParameters, sampling: Sampling, sample_rate: float, *, idealised: bool = False, note: str = ""
    ) -> PrivacyEvent:
        """Return the event of a release; idealised: the sum was computed in floating point, as in PrivacyEvent."""
        mechanism: Mechanism = self.kind
        if self.source.secure:
            mechanism = "discrete_gaussian" if self.kind == "gaussian" else "discrete_laplace"
        return PrivacyEvent(
            mechanism, self.noise_multiplier, sampling, sample_rate, delta=plan.delta, note=note,
            source=self.source.name, secure=self.source.secure, idealised=idealised,
        )  # fmt: skip


def grid_of(kind: Kind, scale: float, sensitivity: float, dimensions: int) -> float:
    """Return `choose_grid` for noise of a scale and a sensitivity in the norm of its kind."""
    return choose_grid(scale, sensitivity=sensitivity, dimensions=dimensions**2 if kind == "laplace" else dimensions)


def widened(kind: Kind, scale: float, grid: float) -> float:
    """Return the scale of discrete noise that is accounted as continuous noise of `scale`: its `Charge.std`."""
    return math.hypot(scale, SMOOTH * grid) if kind == "gaussian" else scale


def charge_of(kind: Kind, scale: float, grid: float, dimensions: int) -> Charge:
    """Return the charge of a release, its delta rounded up to a power of two; none on a grid of 0."""
    if not grid:
        return Charge(0.0, 0.0, scale, 0.0)
    found = _CHARGES[kind](scale, grid=grid, dimensions=dimensions)
    return replace(found, delta=min(1.0, 2.0 ** math.ceil(math.log2(found.delta)))) if found.delta else found


# --- tensors and queries ----------------------------------------------------------------------------------------------
_EXACT = 2**53
_WIDEST_ON_WHOLE = 2.0**24
_T = TypeVar("_T", Tensor, Sequence[Tensor])


@INSECURE
def gaussian_noise_(
    x: _T, std: float, *, sensitivity: float | None = None, insecure: bool = False, ledger: LedgerLike = None
) -> _T:
    """Add Gaussian noise to tensors, in place.

    Args:
        x: a tensor or several, floating point, on one device.
        std: standard deviation, in the units of x.
        sensitivity: L2 norm by which one record changes all of x; required with a ledger.
        insecure: Philox in floating point, for research, instead of a discrete Gaussian from ChaCha20 on a grid, to
            which x is rounded.
        ledger: a PrivacyLedger or its file; records the event first: std over sensitivity and rounding.

    Returns:
        x.

    Raises:
        ConfigError: an invalid value; a ledger without a sensitivity.
        UnsupportedDtype: x is no floating-point tensor.
        BudgetExceeded: the ledger's budget does not allow it; x is unchanged.
    """
    return _noise_(x, "gaussian", check_number("std", std), sensitivity, insecure, ledger)


@INSECURE
def laplace_noise_(
    x: _T, scale: float, *, sensitivity: float | None = None, insecure: bool = False, ledger: LedgerLike = None
) -> _T:
    """Add Laplace noise to tensors, in place; like `gaussian_noise_`, with the scale b instead of the deviation.

    Args:
        scale: b, in the units of x; the variance is 2 b^2.
        sensitivity: L1 norm by which one record changes all of x; epsilon is sensitivity (and rounding) over b.
    """
    return _noise_(x, "laplace", check_number("scale", scale), sensitivity, insecure, ledger)


@INSECURE
def release(
    value: Any, *, mechanism: Kind, sensitivity: float, epsilon: float | None = None, delta: float | None = None,
    noise_multiplier: float | None = None, insecure: bool = False, ledger: LedgerLike = None, note: str = "",
) -> Any:  # fmt: skip
    """Return the answer to a query with noise; the value itself is not changed.

    Args:
        value: a number, numbers in lists, a NumPy array or a tensor, of up to 64 bits. Python's floats are float64.
            Whole numbers stay whole, and exact at any size.
        mechanism: "laplace" or "gaussian".
        sensitivity: how far one record moves the value: L1 norm for laplace, L2 for gaussian.
        epsilon: of this release. With gaussian, delta is required too; the least noise is found for the pair.
        noise_multiplier: scale of the noise (b, or the standard deviation) over the sensitivity, instead of epsilon.
        insecure: as for `gaussian_noise_`.
        ledger: a PrivacyLedger or its file; records the event before anything is drawn; its statement is at this delta
            if it has none yet.
        note: for the ledger's reader, such as the query.

    Returns:
        int, float, array or tensor like value, with its dtype and shape.

    Raises:
        ConfigError: an invalid value, or one that is not finite.
        BudgetExceeded: the ledger's budget does not allow it; nothing was drawn.
    """
    if mechanism not in ("gaussian", "laplace"):
        raise ConfigError(f"mechanism must be gaussian or laplace, got {mechanism!r}")
    _check_strength(mechanism, epsilon, delta, noise_multiplier)
    sensitivity = check_number("sensitivity", sensitivity)
    exact = _exact(value)
    whole = exact.dtype.kind != "f"
    if not whole and not np.isfinite(exact).all():
        raise ConfigError("value must be finite: clip it first")
    source = make_source(insecure=insecure)

    def planned(multiplier: float) -> tuple[NoisySum, NoiseParameters]:
        noisy = NoisySum(source, multiplier, exact.size, mechanism)
        return noisy, _whole_plan(noisy, sensitivity) if whole else noisy.plan(sensitivity)

    if noise_multiplier is not None:
        noisy, plan = planned(noise_multiplier)
    elif mechanism == "laplace":
        noisy, plan = planned(1.0 / check_number("epsilon", epsilon))
    else:
        noisy, plan = _calibrated(planned, check_number("epsilon", epsilon), check_number("delta", delta, most=0.5))
    with opened_ledger(ledger) as book:
        if book is not None:
            book.record(noisy.event(plan, "none", 1.0, note=note))
            if delta is not None and book.delta is None:
                book.describe(delta=delta)
    noised = (_whole_with_noise if whole else _with_noise)(exact.reshape(-1), noisy, plan)
    return _like(value, noised, exact.shape)


def _exact(value: Any) -> NDArray[Any]:
    """Return the numbers of a query's answer without rounding: a new array of float64, int64, or Python's integers."""
    refuse_masked(value, "value")
    if isinstance(value, Tensor):
        held = value.detach().cpu()
        numbers = (held.to(torch.float64) if held.is_floating_point() else held).numpy()
    elif isinstance(value, np.ndarray | np.generic):
        numbers = np.asarray(value)
    else:
        numbers = np.array(value, dtype=object)
    if numbers.dtype.kind == "O":  # torch and NumPy would make float32 or float64 of numbers that these cannot hold
        found = [each.item() if isinstance(each, Tensor | np.generic) else each for each in numbers.flat]
        kinds = {type(each) for each in found}
        if not kinds <= {int, float}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds - {int, float}))
            raise ConfigError(f"value must be of real numbers, int or float, got {names}")
        if float in kinds and any(abs(each) > _EXACT for each in found if isinstance(each, int)):
            raise ConfigError("whole numbers past 2^53 do not go with floats, which round them: release them apart")
        numbers = np.array(found, float if float in kinds else object).reshape(numbers.shape)
    if numbers.dtype.kind not in "iufO" or (numbers.dtype.kind == "f" and numbers.itemsize > 8):
        raise ConfigError(f"value must be of real numbers of at most 64 bits, got {numbers.dtype}")
    if numbers.dtype.kind == "f":
        return numbers.astype(np.float64)
    return numbers.astype(object if numbers.dtype in (object, np.uint64) else np.int64)


def _with_noise(exact: NDArray[Any], noisy: NoisySum, plan: NoiseParameters) -> NDArray[Any]:
    if exact.size:
        noisy.add_([torch.from_numpy(exact)], plan, 1.0)
    return exact


def _whole_with_noise(exact: NDArray[Any], noisy: NoisySum, plan: NoiseParameters) -> NDArray[Any]:
    """Return whole numbers with noise, rounded to whole numbers (above 1, to the grid), in exact arithmetic."""
    unit = max(1, int(plan.grid or plan.scale / _WIDEST_ON_WHOLE))  # so that the noise is below 2^31 units
    if exact.dtype != object and not (plan.scale < _EXACT and (np.abs(exact.astype(np.float64)) < _EXACT).all()):
        exact = exact.astype(object)  # sums may pass int64
    units = (exact + unit // 2) // unit
    odd = units % 2
    noised = _with_noise(odd.astype(np.float64) * unit, noisy, plan) / unit
    result: NDArray[Any] = (units - odd + noised.round().astype(np.int64)) * unit
    return result


def _like(value: Any, noised: NDArray[Any], shape: tuple[int, ...]) -> Any:
    """Return the noised numbers in the type, dtype and shape of the value."""
    if not isinstance(value, Tensor | np.ndarray | np.generic) or value.dtype == object:
        return noised.reshape(shape).tolist()
    if noised.dtype.kind != "f":  # within the dtype: a small count of dtype uint8 plus noise below 0 would become 253
        limits = torch.iinfo(value.dtype) if isinstance(value, Tensor) else np.iinfo(value.dtype)
        noised = np.clip(noised, limits.min, limits.max).astype(np.uint64 if limits.max >= 2**63 else np.int64)
    if isinstance(value, Tensor):
        return torch.from_numpy(noised).reshape(shape).to(value.dtype).to(value.device)
    found = noised.astype(value.dtype).reshape(shape)
    return found if isinstance(value, np.ndarray) else found[()]


def _noise_(x: _T, kind: Kind, scale: float, sensitivity: float | None, insecure: bool, ledger: LedgerLike) -> _T:
    tensors: list[Any] = list(x) if isinstance(x, Iterable) and not hasattr(x, "dtype") else [x]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise UnsupportedDtype(
                f"noise is added in place to torch tensors, got {type(x).__name__} of {type(tensor).__name__}: convert "
                "it by torch.from_numpy, which shares its memory, or use release()"
            )
        if not tensor.is_floating_point():
            raise UnsupportedDtype(f"noise is added to floating-point tensors, got {tensor.dtype}")
        refuse_without_values(tensor, "a tensor that noise is added to")
    dimensions = sum(tensor.numel() for tensor in tensors)
    if ledger is not None and sensitivity is None:
        raise ConfigError("a ledger needs the sensitivity: how far one record moves the tensors")
    bound = scale if sensitivity is None else check_number("sensitivity", sensitivity)
    if not dimensions:
        return x
    source = make_source(insecure=insecure)
    grid = 0.0 if insecure else grid_of(kind, scale, bound, dimensions)
    if ledger is not None:
        charge = charge_of(kind, scale, grid, dimensions)
        named = NoisySum(source, charge.std / (bound + charge.sensitivity), dimensions, kind)
        with opened_ledger(ledger) as book:
            if book is not None:
                book.record(named.event(NoiseParameters(scale, grid, charge.delta), "none", 1.0))
    with torch.no_grad():
        NoisySum(source, 1.0, dimensions, kind).add_(tensors, NoiseParameters(scale, grid, 0.0), 1.0)
    return x


def _check_strength(mechanism: Kind, epsilon: float | None, delta: float | None, given: float | None) -> None:
    if (epsilon is None) == (given is None):
        raise ConfigError(f"give either epsilon or noise_multiplier; got {epsilon!r} and {given!r}")
    if given is not None:
        if delta is not None:
            raise ConfigError("delta goes with epsilon: leave it out with noise_multiplier")
        check_number("noise_multiplier", given)
    elif mechanism == "laplace":
        if delta is not None:
            raise ConfigError("the Laplace mechanism needs no delta: leave it out")
    elif delta is None:
        raise ConfigError("the Gaussian mechanism needs delta with epsilon")


def _calibrated(
    planned: Callable[[float], tuple[NoisySum, NoiseParameters]], epsilon: float, delta: float
) -> tuple[NoisySum, NoiseParameters]:
    """Return the least Gaussian noise of epsilon and delta, with the delta that its plan charges."""
    _, plan = planned(1.0)
    while True:
        charged = plan.delta
        noisy, plan = planned(calibrate(target_epsilon=epsilon, delta=delta, steps=1, sampling="none", charged=charged))
        if plan.delta <= charged:
            return noisy, plan


def _whole_plan(noisy: NoisySum, sensitivity: float) -> NoiseParameters:
    """Plan noise on a grid of 1 or a fraction, of which whole numbers are multiples: no rounding is charged."""
    scale = noisy.noise_multiplier * sensitivity
    if not noisy.source.secure or not noisy.dimensions or scale > _WIDEST_ON_WHOLE:
        return noisy.plan(sensitivity)
    return noisy.planned(scale, min(1.0, math.ldexp(1.0, math.frexp(scale / LEAST_STEPS)[1] - 1)))


# --- counts of a collection's points ----------------------------------------------------------------------------------
# A unit of the ledger must be one point: where a person has several, make one of them, or multiply epsilon by their
# number. Noise is discrete Laplace of scale sensitivity / epsilon; see `release`.


class Countable(Protocol):
    """A collection that counts what a filter selects, as accelerant.search.Collection does."""

    def count(self, filter: Mapping[str, Any] | None = None) -> int:
        """Return how many points a filter selects."""


def private_count(
    collection: Countable, filter: Mapping[str, Any] | None = None, *, epsilon: float, ledger: PrivacyLedger
) -> int:
    """Return how many points a filter selects, with noise: one point moves the number by at most one.

    It may be negative. The filter is not secret: it must not be chosen by what the points hold.

    Raises:
        ConfigError: epsilon is not above 0, or what the filter cannot have.
        BudgetExceeded: the ledger's budget does not allow it; nothing was drawn.
    """
    exact = int(collection.count(filter))
    return int(release(exact, mechanism="laplace", sensitivity=1, epsilon=epsilon, ledger=ledger, note="count"))


def private_histogram(
    collection: Countable, key: str, values: Sequence[str | int | bool], *, epsilon: float, ledger: PrivacyLedger,
    filter: Mapping[str, Any] | None = None,
) -> NDArray[np.int64]:  # fmt: skip
    """Return how many points have each value of a payload's field, with noise.

    A point of several of the values counts for the first of them, so that it moves one number by one; two numbers where
    the ledger's neighbours replace a point.

    Args:
        collection: the points.
        key: path of the field.
        values: what is counted; not taken from the points, whose values would tell who is there.
        epsilon: of the whole histogram.
        ledger: it is charged before anything is drawn.
        filter: the points that count.

    Raises:
        ConfigError: epsilon is not above 0; no value, or one twice.
        BudgetExceeded: the ledger's budget does not allow it; nothing was drawn.
    """
    named = list(values)
    if not named or len({(type(x), x) for x in named}) < len(named):
        raise ConfigError(f"a histogram has values, each once; got {clipped(named)}")

    def of(value: str | int | bool) -> dict[str, Any]:
        return {"key": key, "match": {"value": value}}

    exact = [
        collection.count({
            "must": [of(value), *([] if filter is None else [filter])], "must_not": [of(one) for one in named[:i]],
        })
        for i, value in enumerate(named)
    ]  # fmt: skip
    moved = 2 if ledger.neighbouring == "replace-one" else 1
    counts = np.array(exact, np.int64)
    return np.asarray(
        release(counts, mechanism="laplace", sensitivity=moved, epsilon=epsilon, ledger=ledger, note="histogram")
    )


# --- local privacy ----------------------------------------------------------------------------------------------------
_MOST_CHOICES = 1 << 20
Numbers = Tensor | NDArray[Any] | Sequence[Any]  # a tensor, an array, or lists of numbers


class RandomizedResponse:
    """k-ary randomized response: the truth with probability p, else one of the other answers, uniformly.

    p = exp(epsilon) / (exp(epsilon) + k - 1), lowered by the rounding of 53-bit random numbers.

    Args:
        choices: k, the number of answers, 2 to 2^20.
        epsilon: of each report.
    """

    def __init__(self, choices: int, epsilon: float) -> None:
        if not isinstance(choices, int) or isinstance(choices, bool) or not 2 <= choices <= _MOST_CHOICES:
            raise ConfigError(f"choices must be a whole number from 2 to {_MOST_CHOICES}, got {choices!r}")
        self.choices = choices
        self.epsilon = check_number("epsilon", epsilon)
        # Another answer has a probability within 2^-53 of 1 / (k - 1): p is lowered by it, to stay within exp(epsilon).
        slack = 2.0**-50 + 2 * choices * 2.0**-53
        self.truth = (1.0 - slack) / (1.0 + (choices - 1) * math.exp(-self.epsilon))
        self._lie = (1.0 - self.truth) / (choices - 1)  # the probability of each other answer
        self._stream = SecureStream()

    def __repr__(self) -> str:
        return f"RandomizedResponse(choices={self.choices}, epsilon={self.epsilon:g})"

    def randomize(self, answers: Numbers, *, ledger: LedgerLike = None) -> Tensor:
        """Return a report for each answer.

        Args:
            answers: whole numbers, 0 to k - 1, any shape; each element is a record.
            ledger: a PrivacyLedger with neighbouring="replace-one", or its file; records one event for each call.

        Returns:
            int64, the shape of answers, on the CPU.

        Raises:
            UnsupportedDtype, ConfigError: not whole numbers, or out of range.
        """
        answers = _given(answers)
        if answers.is_floating_point() or answers.is_complex():
            raise UnsupportedDtype(f"answers must be whole numbers, got {answers.dtype}")
        flat = answers.to("cpu", torch.int64).reshape(-1)
        if flat.numel() and not (int(flat.min()) >= 0 and int(flat.max()) < self.choices):
            raise ConfigError(f"answers must be 0 to {self.choices - 1}, got {int(flat.min())} to {int(flat.max())}")
        _record_report(ledger, PrivacyEvent("randomized_response", 1.0 / self.epsilon))
        keep = self._stream.uniform(flat.numel()) < self.truth
        other = (self._stream.uniform(flat.numel()) * (self.choices - 1)).floor().long().clamp_(max=self.choices - 2)
        return torch.where(keep, flat, other + (other >= flat)).reshape(answers.shape)

    def estimate(self, reports: Numbers) -> Tensor:
        """Return unbiased estimates of the share of each answer, (k,) float64; they may be below 0."""
        flat = _given(reports).to("cpu", torch.int64).reshape(-1)
        if not flat.numel() or int(flat.min()) < 0 or int(flat.max()) >= self.choices:
            raise ConfigError(f"reports must be at least one number, each 0 to {self.choices - 1}")
        seen = torch.bincount(flat, minlength=self.choices).double() / flat.numel()
        shares: Tensor = (seen - self._lie) / (self.truth - self._lie)
        return shares

    def standard_error(self, reports: int) -> float:
        """Return the error of one small share from n reports, sqrt(q (1 - q) / n) / (p - q), q = (1 - p) / (k - 1)."""
        return math.sqrt(self._lie * (1.0 - self._lie) / reports) / (self.truth - self._lie)


@INSECURE
class LocalLaplace:
    """Laplace noise on numbers between two bounds, drawn for each number.

    Args:
        low, high: values outside are clamped; the sensitivity is high - low.
        epsilon: of each report.
        insecure: as for `gaussian_noise_`.
    """

    def __init__(self, low: float, high: float, *, epsilon: float, insecure: bool = False) -> None:
        self.low = check_number("low", low, least=-math.inf)
        self.high = check_number("high", high, least=self.low)
        self.epsilon = check_number("epsilon", epsilon)
        self._noisy = NoisySum(make_source(insecure=insecure), 1.0 / self.epsilon, 1, "laplace")
        self._plan = self._noisy.plan(self.high - self.low)

    def __repr__(self) -> str:
        return f"LocalLaplace({self.low:g}, {self.high:g}, epsilon={self.epsilon:g})"

    def randomize(self, values: Numbers, *, ledger: LedgerLike = None) -> Tensor:
        """Return a report for each value, float64, the shape of values; ConfigError if a value is NaN.

        Args:
            values: any shape; each element is a record.
            ledger: a PrivacyLedger with neighbouring="replace-one", or its file.
        """
        wide = _given(values).to(torch.float64).clamp(self.low, self.high)
        if bool(wide.isnan().any()):
            raise ConfigError("values must be numbers, got NaN")
        return _add_noise_(wide.reshape(-1).contiguous(), self._noisy, self._plan, ledger).reshape(wide.shape)

    def mean(self, reports: Numbers) -> float:
        """Return an unbiased estimate of the mean of the clamped values."""
        return float(_given(reports).double().mean())

    def standard_error(self, reports: int) -> float:
        """Return the deviation that the noise adds to the mean of n reports: sqrt(2 / n) b."""
        return math.sqrt(2.0 / reports) * self._plan.scale


@INSECURE
class LocalGaussian:
    """Gaussian noise on vectors within a ball, drawn for each vector.

    Args:
        max_norm: longer vectors are scaled down to it in L2; the sensitivity is its double, since any vector may become
            any other.
        dimensions: of a vector.
        epsilon, delta: of each report.
        insecure: as for `gaussian_noise_`.
    """

    def __init__(
        self, *, max_norm: float, dimensions: int, epsilon: float, delta: float, insecure: bool = False
    ) -> None:
        self.max_norm = check_number("max_norm", max_norm)
        self.dimensions = check_whole("dimensions", dimensions, 1)
        self.epsilon, self.delta = check_number("epsilon", epsilon), check_number("delta", delta, most=0.5)
        source = make_source(insecure=insecure)
        charged = NoisySum(source, 1.0, dimensions).plan(2 * self.max_norm).delta
        multiplier = calibrate(target_epsilon=self.epsilon, delta=self.delta, steps=1, sampling="none", charged=charged)
        self._noisy = NoisySum(source, multiplier, dimensions)
        self._plan = self._noisy.plan(2 * self.max_norm)

    def __repr__(self) -> str:
        bounds = f"max_norm={self.max_norm:g}, dimensions={self.dimensions}"
        return f"LocalGaussian({bounds}, epsilon={self.epsilon:g}, delta={self.delta:g})"

    def randomize(self, vectors: Numbers, *, ledger: LedgerLike = None) -> Tensor:
        """Return a report for each vector: (n, dimensions), float64.

        Args:
            vectors: (n, dimensions), finite; each row is a record.
            ledger: a PrivacyLedger with neighbouring="replace-one", or its file.
        """
        wide = _given(vectors).to(torch.float64)
        if wide.dim() != 2 or wide.shape[1] != self.dimensions:
            raise ShapeError(f"vectors must be (n, {self.dimensions}), got {tuple(wide.shape)}")
        if not bool(wide.isfinite().all()):
            raise ConfigError("vectors must be of finite numbers")
        largest = wide.abs().amax(1, keepdim=True).clamp(min=sys.float_info.min)  # squares may leave float64's range
        unit, bound = wide / largest, self.max_norm * (1 - (self.dimensions + 8) * 2.0**-52)
        norms = unit.norm(dim=1, keepdim=True)
        clipped = torch.where(norms * largest <= bound, wide, unit * (bound / norms))
        return _add_noise_(clipped, self._noisy, self._plan, ledger)

    def mean(self, reports: Numbers) -> Tensor:
        """Return an unbiased estimate of the mean of the clipped vectors, (dimensions,)."""
        mean: Tensor = _given(reports).double().mean(0)
        return mean

    def standard_error(self, reports: int) -> float:
        """Return the deviation that the noise adds to each coordinate of the mean of n reports: std / sqrt(n)."""
        return self._plan.scale / math.sqrt(reports)


def _given(numbers: Numbers) -> Tensor:
    """Return numbers as a tensor, those of lists and arrays on the CPU; UnsupportedDtype for what is none."""
    refuse_masked(numbers, "the values")
    if isinstance(numbers, Tensor):
        return numbers.detach()
    try:
        return torch.from_numpy(np.array(numbers))
    except (TypeError, ValueError):
        raise UnsupportedDtype(f"values must be numbers, in a tensor, array or list; got {clipped(numbers)}") from None


def _add_noise_(values: Tensor, noisy: NoisySum, plan: NoiseParameters, ledger: LedgerLike) -> Tensor:
    _record_report(ledger, noisy.event(plan, "none", 1.0))
    if values.numel():
        noisy.add_([values], plan, 1.0)
    return values


def _record_report(ledger: LedgerLike, event: PrivacyEvent) -> None:
    """Record one report of each record."""
    with opened_ledger(ledger, neighbouring="replace-one") as book:
        if book is None:
            return
        if book.neighbouring != "replace-one":
            raise ConfigError(
                f'local privacy is for replaced records: make the ledger with neighbouring="replace-one", got '
                f"{book.neighbouring!r}"
            )
        book.record(event)
