"""Rotary position embedding."""

from __future__ import annotations

from accelerant.ops.rope.op import rope

__all__ = ["rope"]
