"""Elementwise functions of one tensor, and sums and products of two."""

from accelerant.ops.elementwise.op import add, mul, relu, sigmoid, silu, tanh

__all__ = ["add", "mul", "relu", "sigmoid", "silu", "tanh"]
