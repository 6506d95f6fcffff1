"""Samples, benchmarks, tolerances and compiled kernels of linear_cross_entropy."""

from __future__ import annotations

from typing import Any

import torch

from accelerant.ops.registry import Benchmark, Compilation, Indices, SampleInput, tolerances

RUNS = ("torch", "triton")  # the products; the kernels of cross_entropy


def _sample(*shape: int, **options: Any) -> SampleInput:
    *rows, K, V = shape
    name = "-".join(["x".join(map(str, shape)), *(f"{key}={value}" for key, value in options.items())])
    return SampleInput(name, ((*rows, K), (V, K), Indices(tuple(rows), V)), options)


SAMPLES = (
    _sample(3, 4, 5), _sample(1, 1, 1), _sample(7, 3, 11, label_smoothing=0.1), _sample(0, 4, 5, reduction="sum"),
    _sample(2, 3, 4, 5, reduction="none"), _sample(6, 2, 4, ignore_index=1),
    _sample(5, 4, 7, ignore_index=1, label_smoothing=0.2, reduction="sum"),
    _sample(2, 3, 8, 40, reduction="none", label_smoothing=0.3), _sample(33, 16, 1000), _sample(3, 8, 9001),
)  # fmt: skip
LARGE = (
    _sample(2048, 768, 50257), _sample(300, 64, 50304, label_smoothing=0.1),
    _sample(100, 128, 128256, reduction="none"), _sample(20000, 64, 50257, reduction="sum"),
)  # fmt: skip
BENCHMARKS = (
    Benchmark(_sample(32768, 768, 50304), torch.bfloat16),
    Benchmark(_sample(32768, 768, 50257), torch.bfloat16),
    Benchmark(_sample(8192, 4096, 128256), torch.bfloat16),
)

# Logits are rounded to the dtype: rounding a bfloat16 logit of 8 by half a unit, 0.016, changes its probability by that
# factor. With K = 64 logits reach 32, where half a unit is 0.06; that rounding alone, the rest in float64, changes a
# gradient of hidden by 0.033 of the largest in 1500 rows.
TOLERANCES = tolerances(float64=(1e-11, 1e-11), float32=(1e-5, 5e-6), float16=(5e-3, 4e-3), bfloat16=(4e-2, 5e-2))
KERNELS: tuple[Compilation, ...] = ()  # cross_entropy's and the library's
