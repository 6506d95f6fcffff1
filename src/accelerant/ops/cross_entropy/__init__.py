"""Cross entropy of logits against classes."""

from __future__ import annotations

from accelerant.ops.cross_entropy.op import cross_entropy

__all__ = ["cross_entropy"]
