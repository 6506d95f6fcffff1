"""Cross entropy of a linear layer's result, without materializing it."""

from accelerant.ops.linear_cross_entropy.op import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
