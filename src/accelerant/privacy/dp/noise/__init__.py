"""Noise for private releases, and what it charges of delta and sensitivity."""

from __future__ import annotations

from accelerant.privacy.dp.noise.discrete import Charge, charge, choose_grid, laplace_charge
from accelerant.privacy.dp.noise.source import FastSource, NoiseSource, SecureSource

__all__ = ["Charge", "FastSource", "NoiseSource", "SecureSource", "charge", "choose_grid", "laplace_charge"]
