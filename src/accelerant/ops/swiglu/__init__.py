"""The gated unit of Llama's feed-forward layers."""

from accelerant.ops.swiglu.op import swiglu

__all__ = ["swiglu"]
