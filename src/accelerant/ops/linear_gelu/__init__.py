"""Fused linear layer and gelu."""

from accelerant.ops.linear_gelu.op import linear_gelu

__all__ = ["linear_gelu"]
