"""Torch's float32 modes: TF32 in matrix products and convolutions, and cuDNN's search for the fastest algorithm.

TF32 keeps 10 of float32's 23 mantissa bits in the inputs of a product and sums in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from accelerant.errors import ConfigError


def _read() -> tuple[str, str, str, bool]:
    """Return torch's settings of products, convolutions and recurrent layers, and cuDNN's search."""
    cudnn: Any = torch.backends.cudnn  # torch builds its attributes at import
    return (
        torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cudnn.benchmark,
    )  # fmt: skip


def _set_tf32(matmul: bool, cudnn: bool) -> None:
    # torch's older interface updates both; after the newer one alone, reads of the older raise.
    torch.backends.cuda.matmul.allow_tf32 = matmul
    torch.backends.cudnn.allow_tf32 = cudnn


class MathMode:
    """The settings (`tf32`, `cudnn_benchmark`) that configure_math made; a `with` restores the former ones."""

    def __init__(self, before: tuple[str, str, str, bool]) -> None:
        self._before = before
        *precisions, self.cudnn_benchmark = _read()
        self.tf32 = set(precisions) == {"tf32"}

    def __enter__(self) -> MathMode:
        return self

    def __exit__(self, *error: object) -> None:
        matmul, convolution, recurrent, benchmark = self._before
        cudnn: Any = torch.backends.cudnn
        _set_tf32(matmul == "tf32", convolution == "tf32")
        for part, value in ((torch.backends.cuda.matmul, matmul), (cudnn.conv, convolution), (cudnn.rnn, recurrent)):
            if part.fp32_precision != value:
                part.fp32_precision = value
        cudnn.benchmark = benchmark

    def __repr__(self) -> str:
        return f"MathMode(tf32={self.tf32}, cudnn_benchmark={self.cudnn_benchmark})"


def configure_math(*, tf32: bool | None = None, cudnn_benchmark: bool | None = None) -> MathMode:
    """Change torch's settings for the whole process, and return those in force; a `with` restores the former ones.

        configure_math(tf32=True, cudnn_benchmark=True)    # from now on
        with configure_math(tf32=False):                   # for a block of code
            check_against_reference()

    Args:
        tf32: allow TF32 in float32 matrix products, convolutions and recurrent layers; None leaves the setting.
        cudnn_benchmark: let cuDNN time its algorithms on the first call of each shape and keep the fastest; None leaves
            the setting. It pays where shapes repeat; results may differ in the last bits from run to run.

    Raises:
        ConfigError: a value that is neither a bool nor None.
    """
    for name, value in (("tf32", tf32), ("cudnn_benchmark", cudnn_benchmark)):
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{name} must be True, False or None, got {value!r}")
    before = _read()
    if tf32 is not None:
        _set_tf32(tf32, tf32)
    if cudnn_benchmark is not None:
        torch.backends.cudnn.benchmark = cudnn_benchmark
    return MathMode(before)
