"""Samples, benchmarks, tolerances and compiled kernels of dropout."""

from __future__ import annotations

import torch

from accelerant.ops.dropout import GROUP, NUM_WARPS, kernel
from accelerant.ops.registry import Benchmark, Compilation, SampleInput, size_name, tolerances

ON_CPU = "llvm"  # the implementation that runs on a CPU, if not torch


def _sample(*shape: int, p: float = 0.5, seed: int = 1234) -> SampleInput:
    return SampleInput(f"{size_name(shape)}-{p}-{seed}", (shape,), {"p": p, "seed": seed})


SAMPLES = (
    _sample(1, seed=0), _sample(7), _sample(3, 5, p=0.1), _sample(), _sample(0), _sample(4, 0, 2),
    _sample(2, 3, 129, seed=2**64 - 1), _sample(33, 257, p=0.9, seed=2**40 + 3), _sample(4, 1024),
)  # fmt: skip
LARGE = (_sample(4097, 4095, p=0.1), _sample(16384, 3072, seed=2**63))
BENCHMARKS = (Benchmark(_sample(16384, 4096, p=0.1), torch.bfloat16),)

# The mask is exact. One rounding of the result (the interpreter truncates bfloat16), one of the scale in float32.
TOLERANCES = tolerances(float64=(1e-15, 0.0), float32=(2.4e-7, 0.0), float16=(1e-3, 6e-8), bfloat16=(8e-3, 0.0))
KERNELS = tuple(
    Compilation(kernel, {"*": kind, "seed_ptr": "*i64", "scale": "fp32"}, {"GROUP": GROUP}, NUM_WARPS)
    for kind in ("*bf16", "*fp32", "*fp16")
)
