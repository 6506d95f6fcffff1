"""Elementwise functions of one tensor, and sums and products of two."""

from __future__ import annotations

from accelerant.ops.elementwise.binary import add, mul
from accelerant.ops.elementwise.op import relu, sigmoid, silu, tanh

__all__ = ["add", "mul", "relu", "sigmoid", "silu", "tanh"]
