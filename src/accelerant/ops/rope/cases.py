"""Samples, benchmarks, tolerances and compiled kernels of rope."""

from __future__ import annotations

import math

import torch

from accelerant.ops.registry import Benchmark, Compilation, SampleInput, tolerances
from accelerant.ops.rope import KERNELS as _KERNELS
from accelerant.ops.rope import constants, usual_plan


def _sample(B: int, H: int, S: int, D: int, *, own: bool = False, interleaved: bool = False) -> SampleInput:
    table = (B, S, D // 2) if own else (S, D // 2)
    name = f"{B}x{H}x{S}x{D}{'-own-positions' if own else ''}{'-interleaved' if interleaved else ''}"
    return SampleInput(name, ((B, H, S, D), table, table), {"interleaved": interleaved})


SMALLEST = 2  # elements of the smallest non-empty input: a pair

SAMPLES = (
    _sample(2, 3, 5, 4), _sample(1, 2, 3, 6, interleaved=True), _sample(2, 2, 2, 4, own=True), _sample(1, 1, 1, 2),
    _sample(2, 1, 7, 10, own=True, interleaved=True), _sample(1, 12, 9, 64), _sample(2, 40, 3, 128, interleaved=True),
    _sample(1, 2, 33, 96), _sample(1, 1, 3, 1030), _sample(0, 2, 3, 4), _sample(2, 2, 0, 4),
)  # fmt: skip
LARGE = (
    _sample(3, 33, 1027, 96), _sample(2, 5, 4097, 128, interleaved=True), _sample(4, 1, 8191, 64, own=True),
    _sample(1, 3, 257, 2050),
)  # fmt: skip
BENCHMARKS = (
    Benchmark(_sample(4, 32, 4096, 128), torch.bfloat16),
    Benchmark(_sample(4, 8, 4096, 128), torch.bfloat16),
    Benchmark(_sample(4, 32, 4096, 128, interleaved=True), torch.bfloat16),
)

# The sum of two products of normal numbers, rounded once (the interpreter truncates bfloat16).
TOLERANCES = tolerances(float64=(1e-12, 1e-12), float32=(2e-6, 2e-6), float16=(1e-3, 1e-3), bfloat16=(8e-3, 8e-3))


def _compilation(
    kind: str, table: str, H: int, D: int, *, interleaved: bool = False, inverse: bool = False, adjacent: bool = False
) -> Compilation:
    plan = usual_plan(H, D // 2, adjacent)
    types = {"*": kind, "cos_ptr": table, "sin_ptr": table}
    fixed = constants(plan, D // 2, interleaved=interleaved, inverse=inverse)
    return Compilation(_KERNELS["fwd"], types, fixed, plan.num_warps, multiple=math.gcd(D // 2, 16))


KERNELS = (
    _compilation("*bf16", "*fp32", 32, 128),
    _compilation("*bf16", "*fp32", 32, 128, inverse=True),
    _compilation("*bf16", "*bf16", 32, 128, interleaved=True),
    _compilation("*bf16", "*fp32", 32, 128, adjacent=True),
    _compilation("*bf16", "*fp32", 1, 64),
    _compilation("*fp32", "*fp32", 8, 128),
    _compilation("*fp16", "*fp16", 12, 96, interleaved=True, inverse=True),
    _compilation("*bf16", "*fp32", 16, 80),
)
