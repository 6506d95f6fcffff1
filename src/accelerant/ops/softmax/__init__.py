"""Softmax and its logarithm."""

from __future__ import annotations

from accelerant.ops.softmax.op import log_softmax, softmax

__all__ = ["log_softmax", "softmax"]
