"""Cross entropy of logits and class indices."""

from accelerant.ops.cross_entropy.op import cross_entropy

__all__ = ["cross_entropy"]
