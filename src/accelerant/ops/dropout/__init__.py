"""Dropout whose mask is a function of a seed and the element's index."""

from accelerant.ops.dropout.op import dropout

__all__ = ["dropout"]
