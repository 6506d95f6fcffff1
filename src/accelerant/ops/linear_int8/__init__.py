"""A linear layer whose weight is 8-bit integers."""

from accelerant.ops.linear_int8.op import linear_int8

__all__ = ["linear_int8"]
