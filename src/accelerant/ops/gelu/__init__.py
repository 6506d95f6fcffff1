"""Gaussian error linear unit."""

from accelerant.ops.gelu.op import gelu

__all__ = ["gelu"]
