"""Samples, benchmarks, tolerances and compiled kernels of conv2d."""

from __future__ import annotations

from typing import Any

import torch

from accelerant.ops.registry import Benchmark, Compilation, SampleInput, tolerances


def _sample(x: tuple[int, ...], weight: tuple[int, ...], *, bias: bool = False, **options: Any) -> SampleInput:
    shapes = (x, weight, *([weight[:1]] if bias else []))
    name = "*".join("x".join(map(str, shape)) for shape in (x, weight))
    settings = "".join(f"-{key[:3]}{value}".replace(" ", "") for key, value in options.items())
    return SampleInput(f"{name}{'-bias' if bias else ''}{settings}", shapes, options)


SAMPLES = (
    _sample((1, 1, 1, 1), (1, 1, 1, 1)), _sample((2, 2, 3, 3), (2, 2, 2, 2), bias=True),
    _sample((1, 2, 4, 4), (3, 2, 3, 3), bias=True, padding=1), _sample((4, 5, 3), (2, 4, 3, 2)),
    _sample((1, 2, 5, 4), (2, 2, 2, 3), stride=(2, 1), padding=(1, 2)),
    _sample((1, 1, 6, 6), (1, 1, 2, 2), dilation=2, padding="same"),
    _sample((1, 2, 4, 4), (3, 2, 2, 3), bias=True, padding="same"), _sample((2, 4, 3, 3), (6, 2, 1, 2), groups=2),
    _sample((2, 3, 4, 4), (3, 1, 3, 3), groups=3, padding="valid"), _sample((0, 2, 4, 4), (2, 2, 3, 3), bias=True),
    _sample((2, 5, 17, 19), (7, 5, 3, 3), bias=True, stride=2, padding=1),
)  # fmt: skip
LARGE = (
    _sample((8, 65, 57, 55), (129, 65, 3, 3), bias=True, padding=1),
    _sample((4, 96, 56, 56), (96, 1, 7, 7), groups=96, padding=3),
)
BENCHMARKS = (
    Benchmark(_sample((64, 256, 56, 56), (256, 256, 3, 3), padding=1), torch.bfloat16),
    Benchmark(_sample((256, 3, 224, 224), (768, 3, 16, 16), bias=True, stride=16), torch.bfloat16),
)

# Relative to the largest element of the result: float32 sums of normal numbers, one rounding of the result, and the
# library's reduced-precision accumulation (TF32 included).
TOLERANCES = tolerances(float64=(1e-12, 1e-12), float32=(2e-3, 2e-3), float16=(4e-3, 4e-3), bfloat16=(1.6e-2, 1.6e-2))
KERNELS: tuple[Compilation, ...] = ()  # the library's
