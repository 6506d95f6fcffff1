"""Quantization to 8-bit integers with a scale per row."""

from accelerant.ops.quantize_int8.op import quantize_int8

__all__ = ["quantize_int8"]
