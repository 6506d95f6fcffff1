"""Matrix products."""

from __future__ import annotations

from accelerant.ops.matmul.op import matmul

__all__ = ["matmul"]
