"""Rotary position embedding."""

from accelerant.ops.rope.op import rope

__all__ = ["rope"]
