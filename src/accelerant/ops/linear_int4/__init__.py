"""A linear layer whose weight is 4-bit integers in groups."""

from accelerant.ops.linear_int4.op import linear_int4

__all__ = ["linear_int4"]
