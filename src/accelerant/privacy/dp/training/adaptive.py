"""A clipping norm that follows a quantile of the gradients' norms, itself found privately.

    C <- C * exp(-learning_rate * (b - quantile)),   b = 1/2 + (sum_i (1[||g_i|| <= C] - 1/2) + N(0, count_std^2)) / m

m is the expected batch size. Andrew, Thakkar, McMahan and Ramaswamy 2021, arXiv:1905.03871, algorithm 1 with the
geometric update. Sum and count together are one Gaussian mechanism: with the multiplier z of the whole, the gradients
get z_delta = (z^-2 - (2 count_std)^-2)^(-1/2) (theorem 1 there; one example moves the centered count by 1/2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.privacy.dp.clipping import PerExampleClipper
from accelerant.privacy.dp.clipping.clipper import LARGEST_NORM, LEAST_NORM
from accelerant.privacy.dp.ledger.events import check_number
from accelerant.privacy.dp.noise import NoiseSource
from accelerant.privacy.dp.noise.noisy_sum import NoisySum
from accelerant.runtime.processes import Processes

_COUNT_SENSITIVITY = 0.5
_LEAST_SHARE = 5.0
"""Least multiplier of the count over the whole's: the gradients then get 2.1% more noise than without the count."""

_LARGEST_CHANGE = 2.0
"""Limit of a step's change, in natural logarithms: with few expected examples the count is noise."""


@dataclass(frozen=True, slots=True)
class AdaptiveClipping:
    """Settings of a clipping norm that follows the norms of the gradients.

    Attributes:
        quantile: of the norms, to which the clipping norm moves; above 0 and below 1.
        learning_rate: of the geometric update.
        count_std: standard deviation of the noise on the count; None: the larger of a twentieth of the expected batch
            size (as the paper has it) and 2.5 times the noise multiplier.

    Raises:
        ConfigError: an invalid value.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_std: float | None = None

    def __post_init__(self) -> None:
        check_number("quantile", self.quantile, most=1.0)
        if self.quantile == 1.0:
            raise ConfigError("quantile must be below 1, got 1.0")
        check_number("learning_rate", self.learning_rate)
        if self.count_std is not None:
            check_number("count_std", self.count_std)


class AdaptiveNorm:
    """The clipping norm of a training, and the noisy counts that move it."""

    def __init__(self, settings: AdaptiveClipping, source: NoiseSource, noise_multiplier: float) -> None:
        self.settings = settings
        self._source = source
        self._multiplier = noise_multiplier
        self._counts: NoisySum | None = None
        self._below: Tensor | None = None

    def prepare(self, expected: float) -> None:
        """Divide the noise between gradients and count; ConfigError if count_std leaves nothing for the gradients."""
        if self._counts is not None:
            return
        std, least = self.settings.count_std, self._multiplier * _COUNT_SENSITIVITY
        if std is None:
            std = max(expected / 20.0, _LEAST_SHARE * least)
        if std <= least:
            raise ConfigError(f"count_std must be above half the noise multiplier, {least:g}; got {std:g}")
        self._counts = NoisySum(self._source, std / _COUNT_SENSITIVITY if self._multiplier else 0.0, 1)

    @property
    def _prepared(self) -> NoisySum:
        if self._counts is None:
            raise ConfigError("prepare comes first")
        return self._counts

    @property
    def gradient_multiplier(self) -> float:
        """Noise multiplier of the gradients: z_delta."""
        z = self._multiplier
        return 1.0 / math.sqrt(z**-2 - self._prepared.noise_multiplier**-2) if z else 0.0

    @property
    def delta(self) -> float:
        """Delta charged by the noise on the count."""
        return self._prepared.plan(_COUNT_SENSITIVITY).delta

    @property
    def note(self) -> str:
        """Note for the ledger."""
        return f"with a count of multiplier {self._prepared.noise_multiplier:.6g} for the clipping norm"

    def count(self, norms: Tensor, clipper: PerExampleClipper) -> None:
        """Count a backward pass's norms; nothing waits for the device."""
        inside = (norms.detach() <= _norm_of(clipper)).to(torch.float64) - 0.5  # NaN is not inside
        if clipper.mask is not None:
            inside = inside * clipper.mask.to(inside.device)
        total = inside.sum().reshape(1)
        self._below = total if self._below is None else self._below + total

    def update(self, clipper: PerExampleClipper, processes: Processes, expected: float, device: torch.device) -> None:
        """Move the clipper's norm by the noisy count of the step."""
        count = torch.zeros(1, dtype=torch.float64, device=device) if self._below is None else self._below
        processes.sum_to_first_([count])
        if processes.first:
            self._prepared.add_([count], self._prepared.plan(_COUNT_SENSITIVITY), 1.0)
        processes.from_first_([count])
        share = 0.5 + float(count) / expected
        change = -self.settings.learning_rate * (share - self.settings.quantile)
        moved = _norm_of(clipper) * math.exp(min(_LARGEST_CHANGE, max(-_LARGEST_CHANGE, change)))
        clipper.set_bounds(min(LARGEST_NORM, max(LEAST_NORM, moved)))
        self.forget()

    def forget(self) -> None:
        """Reset the count."""
        self._below = None


def _norm_of(clipper: PerExampleClipper) -> float:
    norm = clipper.max_grad_norm
    assert isinstance(norm, float)  # for the type checker: adaptive clipping is flat
    return norm
