"""The gated unit of Llama's feed-forward layers."""

from __future__ import annotations

from accelerant.ops.swiglu.op import swiglu

__all__ = ["swiglu"]
