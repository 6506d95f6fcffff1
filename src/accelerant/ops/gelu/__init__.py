"""Gaussian error linear unit."""

from __future__ import annotations

from accelerant.ops.gelu.op import gelu

__all__ = ["gelu"]
