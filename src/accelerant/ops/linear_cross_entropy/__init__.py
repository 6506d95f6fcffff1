"""Cross entropy of a linear layer's result, without materialising it."""

from __future__ import annotations

from accelerant.ops.linear_cross_entropy.op import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
