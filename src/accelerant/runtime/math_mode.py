"""Torch's float32 mode: TF32 in matrix products and convolutions, and cuDNN's search for algorithms.

    configure_math(tf32=True, cudnn_benchmark=True)    # from now on
    with configure_math(tf32=False):                   # for a block of code
        check_against_reference()

TF32 keeps 10 of float32's 23 mantissa bits in the inputs of a product and sums in float32. Both settings are torch's
and hold for the whole process; they are accepted on every device and matter on CUDA.
"""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

import torch

from accelerant.errors import ConfigError

__all__ = ["MathMode", "configure_math", "math_mode"]


class _State(NamedTuple):
    """torch's settings."""

    matmul: str
    convolution: str
    recurrent: str
    benchmark: bool


def _read() -> _State:
    return _State(
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]  # torch builds it at import
        torch.backends.cudnn.rnn.fp32_precision,  # type: ignore[attr-defined]  # as above
        torch.backends.cudnn.benchmark,
    )


def _write(state: _State) -> None:
    torch.backends.cuda.matmul.allow_tf32 = state.matmul == "tf32"
    torch.backends.cudnn.allow_tf32 = state.convolution == "tf32"
    now = _read()
    if now.matmul != state.matmul:
        torch.backends.cuda.matmul.fp32_precision = state.matmul
    if now.convolution != state.convolution:
        torch.backends.cudnn.conv.fp32_precision = state.convolution  # type: ignore[attr-defined]  # as above
    if now.recurrent != state.recurrent:
        torch.backends.cudnn.rnn.fp32_precision = state.recurrent  # type: ignore[attr-defined]  # as above
    torch.backends.cudnn.benchmark = state.benchmark


class MathMode:
    """The settings in force; as a context manager, restores the former settings at its end.

    Attributes:
        tf32: whether float32 matrix products and convolutions may use TF32.
        cudnn_benchmark: whether cuDNN times its algorithms on the first call of each shape and keeps the fastest.
    """

    def __init__(self, before: _State, tf32: bool, cudnn_benchmark: bool) -> None:
        self._before = before
        self.tf32 = tf32
        self.cudnn_benchmark = cudnn_benchmark

    def __enter__(self) -> MathMode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _write(self._before)

    def __repr__(self) -> str:
        return f"MathMode(tf32={self.tf32}, cudnn_benchmark={self.cudnn_benchmark})"


def math_mode() -> MathMode:
    """Return the settings in force; as a context manager, the result restores them at the end of its block."""
    state = _read()
    return MathMode(state, state.matmul == "tf32" and state.convolution == "tf32", state.benchmark)


def configure_math(tf32: bool | None = None, cudnn_benchmark: bool | None = None) -> MathMode:
    """Change the settings, and return those in force; use the result in a `with` to restore the former ones.

    Args:
        tf32: allow TF32 in float32 matrix products, convolutions and recurrent layers; None leaves the setting.
        cudnn_benchmark: let cuDNN time its algorithms on the first call of each shape and keep the fastest; None leaves
            the setting. It pays if shapes repeat, and results may differ in the last bits from run to run.

    Raises:
        ConfigError: a value that is neither a bool nor None.
    """
    for name, value in (("tf32", tf32), ("cudnn_benchmark", cudnn_benchmark)):
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{name} must be True, False or None, got {value!r}")
    before = _read()
    if tf32 is not None:
        # torch's older interface, which updates both; after the newer one, reads of the older raise.
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
    if cudnn_benchmark is not None:
        torch.backends.cudnn.benchmark = cudnn_benchmark
    now = math_mode()
    return MathMode(before, now.tf32, now.cudnn_benchmark)
