"""Samples, benchmarks, tolerances and compiled kernels of swiglu."""

from __future__ import annotations

import math

import torch

from accelerant.ops._launch import STREAM
from accelerant.ops.registry import Benchmark, Compilation, SampleInput, Tolerance, size_name, tolerances
from accelerant.ops.swiglu import KERNELS as _KERNELS
from accelerant.ops.swiglu import row_plan


def _two(*shape: int) -> SampleInput:
    return SampleInput(size_name(shape), (shape, shape))


def _one(*shape: int) -> SampleInput:
    return SampleInput(size_name(shape) + "-packed", (shape,))


SAMPLES = (
    _two(1), _two(3, 5), _one(3, 10), _two(), _two(0), _two(4, 0, 2), _two(2, 3, 129), _two(33, 257), _one(2),
    _one(0, 4), _one(3, 0), _one(2, 3, 258), _one(5, 2080),
)  # fmt: skip
LARGE = (_two(4097, 4095), _one(4099, 8190), _one(1000, 22016))
BENCHMARKS = (
    Benchmark(_two(16384, 4096), torch.bfloat16),
    Benchmark(_one(16384, 8192), torch.bfloat16),
    Benchmark(_two(8192, 14336), torch.bfloat16),
)

# One rounding of each result, in units of the largest, about 10 (the interpreter truncates bfloat16).
TOLERANCES = tolerances(float64=(1e-13, 1e-13), float32=(2e-6, 1e-6), float16=(1e-3, 1e-6), bfloat16=(8e-3, 1e-6))
# torch rounds in between.
TORCH_TOLERANCES = {**TOLERANCES, torch.float16: Tolerance(4e-3, 1e-3), torch.bfloat16: Tolerance(3e-2, 8e-3)}


def _compilations(kind: str, N: int) -> tuple[Compilation, ...]:
    plans = {way: row_plan(N, kernel.usual) for way, kernel in _KERNELS.items()}
    return tuple(
        Compilation(_KERNELS[way], {"*": kind}, {"BLOCK": plan.block}, plan.num_warps, multiple=math.gcd(N, 16))
        for way, plan in plans.items()
    )


KERNELS = (*_compilations("*bf16", STREAM.block), *_compilations("*fp32", STREAM.block), *_compilations("*fp16", 1000))
