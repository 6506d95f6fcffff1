"""Softmax."""

from __future__ import annotations

from accelerant.ops.softmax.op import softmax

__all__ = ["softmax"]
