"""Softmax and its logarithm."""

from accelerant.ops.softmax.op import log_softmax, softmax

__all__ = ["log_softmax", "softmax"]
