"""Matrix products."""

from accelerant.ops.matmul.op import matmul

__all__ = ["matmul"]
