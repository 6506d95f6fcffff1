"""Poisson sampling of records or users, and the batches of its draws."""

from __future__ import annotations

from accelerant.privacy.dp.sampling.batches import DrawnBatch, PoissonBatches
from accelerant.privacy.dp.sampling.poisson import GroupedSampler, PoissonSampler

__all__ = ["DrawnBatch", "GroupedSampler", "PoissonBatches", "PoissonSampler"]
