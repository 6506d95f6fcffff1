"""Local differential privacy: the owner of each record randomizes it before it is collected.

    response = RandomizedResponse(choices=4, epsilon=1.0)
    reports = response.randomize(answers)                   # by each owner
    response.estimate(reports)                              # by the collector: unbiased shares of the answers

Epsilon is for each record and each report: any two values of a record give any report with probabilities that differ
by a factor of at most exp(epsilon). Nobody has to be trusted with the data. The epsilons of several reports on one
record add up. Invalid values and reports raise ConfigError, vectors of another shape ShapeError.
Source: Warner 1965; Kairouz, Oh and Viswanath 2016, arXiv:1407.1338 (k-ary response); Duchi, Jordan and Wainwright
2013.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.privacy.dp.ledger import Ledger
from accelerant.privacy.dp.ledger.accounting import calibrate
from accelerant.privacy.dp.ledger.events import Event, check_number, check_whole
from accelerant.privacy.dp.noise.noisy_sum import NoisePlan, NoisySum, make_source
from accelerant.privacy.random import SecureStream

_MOST_CHOICES = 1 << 20


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

    def randomize(self, answers: Tensor, *, ledger: Ledger | None = None) -> Tensor:
        """Return a report for each answer.

        Args:
            answers: whole numbers, 0 to k - 1, any shape; each element is a record.
            ledger: with neighbouring="replace-one"; records one event for each call.

        Returns:
            int64, the shape of answers, on the CPU.

        Raises:
            UnsupportedDtype, ConfigError: not whole numbers, or out of range.
        """
        if answers.is_floating_point() or answers.is_complex():
            raise UnsupportedDtype(f"answers must be whole numbers, got {answers.dtype}")
        flat = answers.detach().to("cpu", torch.int64).reshape(-1)
        if flat.numel() and not (int(flat.min()) >= 0 and int(flat.max()) < self.choices):
            raise ConfigError(f"answers must be 0 to {self.choices - 1}, got {int(flat.min())} to {int(flat.max())}")
        _record(ledger, Event("randomized_response", 1.0 / self.epsilon))
        keep = self._stream.uniform(flat.numel()) < self.truth
        other = (self._stream.uniform(flat.numel()) * (self.choices - 1)).floor().long().clamp_(max=self.choices - 2)
        return torch.where(keep, flat, other + (other >= flat)).reshape(answers.shape)

    def estimate(self, reports: Tensor) -> Tensor:
        """Return unbiased estimates of the share of each answer, (k,) float64; they may be below 0."""
        flat = reports.detach().to("cpu", torch.int64).reshape(-1)
        if not flat.numel() or int(flat.min()) < 0 or int(flat.max()) >= self.choices:
            raise ConfigError(f"reports must be at least one number, each 0 to {self.choices - 1}")
        seen = torch.bincount(flat, minlength=self.choices).double() / flat.numel()
        shares: Tensor = (seen - self._lie) / (self.truth - self._lie)
        return shares

    def standard_error(self, reports: int) -> float:
        """Return the error of one small share from n reports, sqrt(q (1 - q) / n) / (p - q), q = (1 - p) / (k - 1)."""
        return math.sqrt(self._lie * (1.0 - self._lie) / reports) / (self.truth - self._lie)


class LocalLaplace:
    """Laplace noise on numbers between two bounds, drawn for each number.

    Args:
        low, high: values outside are clamped; the sensitivity is high - low.
        epsilon: of each report.
        secure: as for `gaussian_noise_`.
    """

    def __init__(self, low: float, high: float, epsilon: float, *, secure: bool = True) -> None:
        self.low = check_number("low", low, least=-math.inf)
        self.high = check_number("high", high, least=self.low)
        self.epsilon = check_number("epsilon", epsilon)
        self._noisy = NoisySum(make_source(secure), 1.0 / self.epsilon, 1, "laplace")
        self._plan = self._noisy.plan(self.high - self.low)

    def randomize(self, values: Tensor, *, ledger: Ledger | None = None) -> Tensor:
        """Return a report for each value, float64, the shape of values; ConfigError if a value is NaN.

        Args:
            values: any shape; each element is a record.
            ledger: with neighbouring="replace-one".
        """
        wide = values.detach().to(torch.float64).clamp(self.low, self.high)
        if bool(wide.isnan().any()):
            raise ConfigError("values must be numbers, got NaN")
        return _add_noise_(wide.reshape(-1).contiguous(), self._noisy, self._plan, ledger).reshape(values.shape)

    def mean(self, reports: Tensor) -> float:
        """Return an unbiased estimate of the mean of the clamped values."""
        return float(reports.double().mean())

    def standard_error(self, reports: int) -> float:
        """Return the deviation that the noise adds to the mean of n reports: sqrt(2 / n) b."""
        return math.sqrt(2.0 / reports) * self._plan.scale


class LocalGaussian:
    """Gaussian noise on vectors within a ball, drawn for each vector.

    Args:
        max_norm: longer vectors are scaled down to it in L2; the sensitivity is its double, since any vector may become
            any other.
        dimensions: of a vector.
        epsilon, delta: of each report.
        secure: as for `gaussian_noise_`.
    """

    def __init__(self, max_norm: float, dimensions: int, epsilon: float, delta: float, *, secure: bool = True) -> None:
        self.max_norm = check_number("max_norm", max_norm)
        self.dimensions = check_whole("dimensions", dimensions, 1)
        self.epsilon, self.delta = check_number("epsilon", epsilon), check_number("delta", delta, most=0.5)
        source = make_source(secure)
        charged = NoisySum(source, 1.0, dimensions).plan(2 * self.max_norm).delta
        multiplier = calibrate(self.epsilon, self.delta, 1.0, 1, sampling="none", charged=charged)
        self._noisy = NoisySum(source, multiplier, dimensions)
        self._plan = self._noisy.plan(2 * self.max_norm)

    def randomize(self, vectors: Tensor, *, ledger: Ledger | None = None) -> Tensor:
        """Return a report for each vector: (n, dimensions), float64.

        Args:
            vectors: (n, dimensions), finite; each row is a record.
            ledger: with neighbouring="replace-one".
        """
        if vectors.dim() != 2 or vectors.shape[1] != self.dimensions:
            raise ShapeError(f"vectors must be (n, {self.dimensions}), got {tuple(vectors.shape)}")
        wide = vectors.detach().to(torch.float64)
        norms = wide.norm(dim=1, keepdim=True)
        if not bool(norms.isfinite().all()):
            raise ConfigError("vectors must be of finite numbers")
        clipped: Tensor = wide * (self.max_norm / norms.clamp(min=self.max_norm))
        return _add_noise_(clipped, self._noisy, self._plan, ledger)

    def mean(self, reports: Tensor) -> Tensor:
        """Return an unbiased estimate of the mean of the clipped vectors, (dimensions,)."""
        mean: Tensor = reports.double().mean(0)
        return mean

    def standard_error(self, reports: int) -> float:
        """Return the deviation that the noise adds to each coordinate of the mean of n reports: std / sqrt(n)."""
        return self._plan.scale / math.sqrt(reports)


def _add_noise_(values: Tensor, noisy: NoisySum, plan: NoisePlan, ledger: Ledger | None) -> Tensor:
    _record(ledger, noisy.event(plan, "none", 1.0))
    if values.numel():
        noisy.add_([values], plan, 1.0)
    return values


def _record(ledger: Ledger | None, event: Event) -> None:
    """Record one report of each record."""
    if ledger is None:
        return
    if ledger.neighbouring != "replace-one":
        raise ConfigError(
            f'local privacy is for replaced records: make the ledger with neighbouring="replace-one", got '
            f"{ledger.neighbouring!r}"
        )
    ledger.record(event)
