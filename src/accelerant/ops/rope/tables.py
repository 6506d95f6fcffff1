"""The tables of cosines and sines for rope."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """The scaling of low frequencies by which Llama 3.1 and later extend the context they were trained on.

    Wavelengths below original_context / high_freq_factor are kept, those above original_context / low_freq_factor are
    multiplied by `factor`, and those in between are interpolated.

    Attributes:
        factor: ratio of the extended to the original context.
        low_freq_factor, high_freq_factor: bounds, in wavelengths per original context.
        original_context: positions that the model was trained on.

    Source: Meta, llama-models, models/llama3 (apply_scaling); the numbers are those of Llama 3.1.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ConfigError(f"factor must be above 0, got {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                "low_freq_factor must be above 0 and below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.original_context < 1:
            raise ConfigError(f"original_context must be at least 1, got {self.original_context}")

    def apply(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies, in radians per position."""
        waves = self.original_context * frequencies / (2 * math.pi)  # per original context
        kept = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


def rope_tables(
    S: int, D: int, base: float = 10000.0, scaling: Llama3Scaling | None = None, dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return cosines and sines of the angles s base^(-2 i / D) of position s and pair i.

    Args:
        S: positions, from 0.
        D: features of a head, even.
        base: of the geometric sequence of frequencies; 10000 in the paper, 500000 in Llama 3.
        scaling: for a context longer than the trained one.
        dtype: of the tables; the angles are computed in float64.
        device: of the tables.

    Returns:
        cos and sin, (S, D / 2) each.

    Raises:
        ShapeError: S is negative, or D is odd or not positive.
        ConfigError: base is not above 0.

    Source: Su et al. 2021, arXiv:2104.09864, equation 15.
    """
    if S < 0:
        raise ShapeError(f"S must be at least 0, got {S}")
    if D < 2 or D % 2:
        raise ShapeError(f"D must be even and at least 2, got {D}")
    if base <= 0:
        raise ConfigError(f"base must be above 0, got {base}")
    frequencies = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    if scaling is not None:
        frequencies = scaling.apply(frequencies)
    angles = torch.outer(torch.arange(S, dtype=torch.float64), frequencies)
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)
