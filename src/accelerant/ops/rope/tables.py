"""The tables of cosines and sines that rope takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError

__all__ = ["Llama3Scaling", "rope_tables"]


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 and later stretch the slow frequencies to reach a longer context than they were trained on.

    A wave shorter than original_context / high_freq_factor stays, one longer than original_context / low_freq_factor
    is slowed down by `factor`, and in between the two are blended.

    Attributes:
        factor: by how much the context grows.
        low_freq_factor, high_freq_factor: the bounds, in wavelengths a context; low below high.
        original_context: positions that the model was first trained on.

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
        """The stretched frequencies, in radians a position."""
        waves = self.original_context * frequencies / (2 * math.pi)  # in a context
        kept = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


def rope_tables(
    S: int,
    D: int,
    base: float = 10000.0,
    scaling: Llama3Scaling | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles s base^(-2 i / D), position s, pair i.

    Args:
        S: positions, from 0.
        D: features of a head, even.
        base: of the geometric row of frequencies; 10000 in the paper, 500000 in Llama 3.
        scaling: for a context beyond the trained one; None for none.
        dtype: of the tables; the angles are computed in float64 whatever it is.
        device: where to put them.

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
