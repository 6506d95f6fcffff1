"""Samples, benchmarks, tolerances and compiled kernels of matmul."""

from __future__ import annotations

import torch

from accelerant.ops.registry import Benchmark, Compilation, SampleInput, tolerances


def _sample(*shapes: tuple[int, ...]) -> SampleInput:
    return SampleInput("@".join("x".join(map(str, shape)) for shape in shapes), shapes)


SAMPLES = (
    _sample((1, 1), (1, 1)), _sample((3, 4), (4, 5)), _sample((4,), (4, 5)), _sample((3, 4), (4,)), _sample((4,), (4,)),
    _sample((2, 3, 4), (4, 5)), _sample((2, 3, 4), (2, 4, 5)), _sample((1, 3, 4), (2, 4, 5)),
    _sample((3, 4), (2, 4, 5)), _sample((2, 1, 3, 4), (5, 4, 2)), _sample((2, 3, 4), (4,)), _sample((33, 65), (65, 17)),
    _sample((0, 4), (4, 5)), _sample((3, 0), (0, 5)), _sample((2, 3, 0), (0, 4)), _sample((2, 0, 4), (4, 5)),
)  # fmt: skip
LARGE = (_sample((1000, 1111), (1111, 999)), _sample((12, 512, 64), (12, 64, 512)))
BENCHMARKS = (
    Benchmark(_sample((32768, 768), (768, 3072)), torch.bfloat16),
    Benchmark(_sample((8192, 4096), (4096, 4096)), torch.bfloat16),
)

# Relative to the largest element of the result: float32 sums of normal numbers, one rounding of the result, and the
# library's reduced-precision accumulation.
TOLERANCES = tolerances(float64=(1e-12, 1e-12), float32=(1e-5, 1e-5), float16=(2e-3, 2e-3), bfloat16=(1.6e-2, 1.6e-2))
KERNELS: tuple[Compilation, ...] = ()  # the library's
