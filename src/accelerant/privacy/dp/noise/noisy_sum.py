"""Noise on a sum of bounded vectors, and its event in the ledger.

    released = (sum + noise) * scale,   noise of scale noise_multiplier * (C + s)

C bounds one example's contribution to the sum (its L2 norm for Gaussian noise, its L1 norm for Laplace), s is added by
rounding to the grid. The noise is widened by s, and the discrete Gaussian by what it costs more than the continuous one
(`widened`), so that the multiplier in the ledger is the requested one.
Source: Mironov 2012 (doi:10.1145/2382196.2382264) on grids; Canonne, Kamath and Steinke 2020, arXiv:2004.00010, on the
discrete Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.privacy.dp.ledger import Ledger
from accelerant.privacy.dp.ledger.events import Event, Mechanism, Sampling, check_number
from accelerant.privacy.dp.noise import FastSource, NoiseSource, SecureSource
from accelerant.privacy.dp.noise.charge import Charge, charge, choose_grid, laplace_charge
from accelerant.privacy.dp.noise.discrete import SMOOTH

Kind = Literal["gaussian", "laplace"]
_CHARGES = {"gaussian": charge, "laplace": laplace_charge}


def require_clipped_unit(ledger: Ledger) -> Ledger:
    """Return the ledger; ConfigError if its units are replaced, which changes a clipped sum by up to 2 C, not C."""
    if ledger.neighbouring != "add-or-remove-one":
        raise ConfigError(
            f"the ledger is of neighbouring={ledger.neighbouring!r}, the clipping norm bounds what an example changes "
            'that is added or removed: make the ledger with neighbouring="add-or-remove-one"'
        )
    return ledger


def require_client_unit(ledger: Ledger) -> Ledger:
    """Return the ledger of sums over clients; ConfigError if its units are replaced, or examples.

    An example more changes its client's update by up to twice the norm that bounds it, as a replacement does.
    """
    if ledger.unit == "example":
        raise ConfigError(
            "the sum is over clients, and the ledger's unit is an example, for which the noise is not enough: create "
            'it by Ledger(path, unit="client")'
        )
    return require_clipped_unit(ledger)


def make_source(secure: bool) -> NoiseSource:
    """Return ChaCha20 on integers for privacy claims; Philox in floating point for research."""
    return SecureSource() if secure else FastSource()


@dataclass(frozen=True, slots=True)
class NoisePlan:
    """The noise of one release.

    Attributes:
        scale: standard deviation or b, in the units of the sum; 0 without noise.
        grid: of a secure source, a power of two; else 0.
        delta: charged by the release, as in Event.
    """

    scale: float
    grid: float
    delta: float


class NoisySum:
    """Releases sums of vectors that one example changes by at most a sensitivity.

    Args:
        noise_multiplier: scale of the noise over sensitivity; 0: no noise, and no privacy.
        dimensions: elements of all tensors of a release together.
        kind: "gaussian" (sensitivity in L2, scale the standard deviation) or "laplace" (in L1, scale b).
    """

    def __init__(self, source: NoiseSource, noise_multiplier: float, dimensions: int, kind: Kind = "gaussian") -> None:
        self.source = source
        self.noise_multiplier = check_number("noise_multiplier", noise_multiplier, open_below=False)
        self.dimensions = dimensions
        self.kind = kind
        self._plans: dict[tuple[float, float], NoisePlan] = {}

    def plan(self, sensitivity: float, multiplier: float | None = None) -> NoisePlan:
        """Return noise and grid at a sensitivity; `multiplier` overrides the release's own."""
        multiplier = self.noise_multiplier if multiplier is None else multiplier
        key = (sensitivity, multiplier)
        if key not in self._plans:
            plan = NoisePlan(multiplier * sensitivity, 0.0, 0.0)
            if plan.scale and self.source.secure and self.dimensions:
                grid = grid_of(self.kind, plan.scale, sensitivity, self.dimensions)
                bound = sensitivity + charge_of(self.kind, plan.scale, grid, self.dimensions).sensitivity
                plan = self.planned(multiplier * bound, grid)
            self._plans = {key: plan}
        return self._plans[key]

    def planned(self, scale: float, grid: float) -> NoisePlan:
        """Return noise on a grid that costs no more than continuous noise of this scale, and the delta it charges."""
        scale = widened(self.kind, scale, grid)
        return NoisePlan(scale, grid, charge_of(self.kind, scale, grid, self.dimensions).delta)

    def add_(self, tensors: Sequence[Tensor], plan: NoisePlan, factor: float) -> None:
        """Add the noise and multiply by a factor, in place."""
        if not plan.scale:  # without noise, rounding would only lose precision
            for tensor in tensors:
                tensor.mul_(factor)
        elif self.kind == "gaussian":
            self.source.add_gaussian_(tensors, plan.scale, grid=plan.grid or 1.0, scale=factor)
        else:
            self.source.add_laplace_(tensors, plan.scale, grid=plan.grid or 1.0, scale=factor)

    def event(
        self, plan: NoisePlan, sampling: Sampling, sample_rate: float, *, idealised: bool = False, note: str = ""
    ) -> Event:
        """Return the event of a release; idealised: the sum was computed in floating point, as in Event."""
        mechanism: Mechanism = self.kind
        if self.source.secure:
            mechanism = "discrete_gaussian" if self.kind == "gaussian" else "discrete_laplace"
        return Event(
            mechanism, self.noise_multiplier, sampling, sample_rate, delta=plan.delta, note=note,
            source=self.source.name, secure=self.source.secure, idealised=idealised,
        )  # fmt: skip


def grid_of(kind: Kind, scale: float, sensitivity: float, dimensions: int) -> float:
    """Return `choose_grid` for noise of a scale and a sensitivity in the norm of its kind."""
    return choose_grid(scale, sensitivity, dimensions**2 if kind == "laplace" else dimensions)


def widened(kind: Kind, scale: float, grid: float) -> float:
    """Return the scale of discrete noise that is accounted as continuous noise of `scale`: its `Charge.std`.

    A discrete Laplace variable is exactly as private as the continuous one.
    """
    return math.hypot(scale, SMOOTH * grid) if kind == "gaussian" else scale


def charge_of(kind: Kind, scale: float, grid: float, dimensions: int) -> Charge:
    """Return the charge of a release, its delta rounded up to a power of two: an adaptive norm's steps are then equal.

    On a grid of 0, which an insecure source has, nothing is charged.
    """
    if not grid:
        return Charge(0.0, 0.0, scale, 0.0)
    found = _CHARGES[kind](scale, grid, dimensions)
    return replace(found, delta=min(1.0, 2.0 ** math.ceil(math.log2(found.delta)))) if found.delta else found
