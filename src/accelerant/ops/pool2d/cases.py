"""What the poolings are tested and measured on."""

from __future__ import annotations

from typing import Any

import torch

from accelerant.ops._cases import Benchmark, Compilation, OpCases, Sample, Tolerance

__all__ = ["FAMILY", "KERNELS"]


def _sample(*shape: int, **options: Any) -> Sample:
    settings = "".join(f"-{key[:3]}{value}".replace(" ", "") for key, value in options.items())
    return Sample("x".join(map(str, shape)) + settings, (shape,), options)


_BOTH = (
    _sample(1, 1, 1, 1, kernel_size=1),
    _sample(2, 2, 4, 4, kernel_size=2),
    _sample(1, 2, 5, 4, kernel_size=3, stride=1, padding=1),
    _sample(3, 4, 3, kernel_size=(2, 3)),
    _sample(1, 1, 5, 5, kernel_size=2, ceil_mode=True),
    _sample(1, 2, 5, 4, kernel_size=(3, 2), stride=(2, 3), padding=(1, 0), ceil_mode=True),
    _sample(0, 2, 4, 4, kernel_size=2),
    _sample(2, 3, 17, 19, kernel_size=3, stride=2, padding=1),
)
_LARGE = (_sample(8, 65, 113, 111, kernel_size=3, stride=2, padding=1),)
_BENCHMARKS = (Benchmark(_sample(64, 64, 112, 112, kernel_size=3, stride=2, padding=1), torch.bfloat16),)

# The average rounds once forward; gradients add up where windows overlap, rounding each time in torch's kernels.
_TOLERANCES = {
    torch.float64: Tolerance(1e-13, 1e-13),
    torch.float32: Tolerance(2e-6, 2e-6),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2),
}
FAMILY = {
    "avg_pool2d": OpCases(
        (
            *_BOTH,
            _sample(1, 2, 5, 4, kernel_size=3, padding=1, ceil_mode=True, count_include_pad=False),
            _sample(1, 1, 4, 4, kernel_size=2, stride=1, divisor_override=3),
        ),
        _LARGE,
        _BENCHMARKS,
        _TOLERANCES,
    ),
    "max_pool2d": OpCases((*_BOTH, _sample(1, 1, 6, 6, kernel_size=2, dilation=2)), _LARGE, _BENCHMARKS, _TOLERANCES),
}
KERNELS: tuple[Compilation, ...] = ()  # the library's
