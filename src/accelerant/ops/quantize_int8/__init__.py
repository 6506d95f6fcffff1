"""Rows of numbers as 8-bit integers with a scale each."""

from __future__ import annotations

from accelerant.ops.quantize_int8.op import quantize_int8

__all__ = ["quantize_int8"]
