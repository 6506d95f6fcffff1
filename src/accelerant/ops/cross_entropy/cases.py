"""Samples, benchmarks, tolerances and compiled kernels of cross_entropy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from accelerant.ops._launch import next_power_of_2
from accelerant.ops.cross_entropy import launch
from accelerant.ops.cross_entropy.launch import COUNTS
from accelerant.ops.cross_entropy.launch import KERNELS as _KERNELS
from accelerant.ops.registry import Benchmark, Compilation, Indices, SampleInput, specialized, tolerances


def _sample(*shape: int, **options: Any) -> SampleInput:
    V = shape[-1]
    name = "-".join(["x".join(map(str, shape)), *(f"{key}={value}" for key, value in options.items())])
    return SampleInput(name, (shape, Indices(shape[:-1], V)), options)


SAMPLES = (
    _sample(3, 5), _sample(1, 1), _sample(7, 13, label_smoothing=0.1), _sample(0, 5, reduction="sum"),
    _sample(0, 5, reduction="none"), _sample(2, 3, 4, reduction="none"), _sample(9, 4, ignore_index=1),
    _sample(9, 4, ignore_index=1, label_smoothing=0.2, reduction="sum"),
    _sample(2, 3, 40, ignore_index=7, reduction="none", label_smoothing=0.3), _sample(67, 16),
    _sample(5, 1000, label_smoothing=0.1), _sample(4, 8192), _sample(3, 9000, label_smoothing=0.1),
    _sample(3, 20003, reduction="sum"), _sample(3, 20480, reduction="none"), _sample(6),
)  # fmt: skip
LARGE = (
    _sample(1024, 50257), _sample(257, 50304, label_smoothing=0.1), _sample(64, 262144, reduction="sum"),
    _sample(33, 128256, reduction="none"), _sample(1 << 20, 10),
    _sample(65537, 1000, reduction="none", label_smoothing=0.1), _sample(3, 1_000_003),
)  # fmt: skip
BENCHMARKS = (
    Benchmark(_sample(16384, 50304), torch.bfloat16, both_ms=0.95),
    Benchmark(_sample(16384, 50304, inplace_backward=True), torch.bfloat16),
    Benchmark(_sample(16384, 50257), torch.bfloat16),
    Benchmark(_sample(8192, 128256), torch.bfloat16),
)

# A mean or sum is rounded once; gradients are compared relative to the largest.
TOLERANCES = tolerances(float64=(1e-11, 1e-12), float32=(4e-6, 2e-6), float16=(2e-3, 1e-3), bfloat16=(1.6e-2, 8e-3))

_TYPES = {
    "target_ptr": "*i64", "loss_ptr": "*fp32", "stat_ptr": "*fp32", "counts_ptr": "*i32", "smoothing": "fp32",
}  # fmt: skip


def _forward(name: str, kind: str, num_warps: int, *, gradient: bool = True, **constants: Any) -> Compilation:
    types = {"*": kind, **_TYPES, "dx_ptr": kind if gradient else None, "dy_ptr": None}
    return specialized(_KERNELS[name], types, {"SMOOTH": False, "COUNTS": COUNTS, **constants}, num_warps)


def _narrow(kind: str, N: int) -> Compilation:
    plan = launch.row_plan(N)
    compilation = _forward("fwd", kind, plan.num_warps, ROWS=plan.rows, BLOCK_N=plan.block_n)
    return replace(compilation, multiple=math.gcd(N, 16))


def _few(kind: str, N: int, *, smooth: bool) -> Compilation:
    block_n = next_power_of_2(N)
    fixed = {"MEAN": True, "SMOOTH": smooth, "ROWS": launch.FEW_ROWS // block_n, "BLOCK_N": block_n, "BLOCK": 1024}
    compilation = specialized(_KERNELS["few"], {"*": kind, **_TYPES}, fixed, launch.FEW_WARPS)
    return replace(compilation, multiple=math.gcd(N, 16))


_BF16 = {"*": "*bf16", **_TYPES}
_PLAN = launch.backward_plan(50304)
KERNELS = (
    Compilation(_KERNELS["count"], _TYPES, {"BLOCK": 1024}, 4),
    Compilation(_KERNELS["reduce"], _BF16, {"COUNTS": COUNTS, "BLOCK": 4096}, 8),
    Compilation(_KERNELS["scale"], _BF16, {"COUNTS": COUNTS, "BLOCK": 4096, "counts_ptr": None}, 8),
    _few("*bf16", 1000, smooth=False),
    _few("*fp32", 64, smooth=True),
    _narrow("*bf16", 1000),
    _narrow("*bf16", 8192),
    _narrow("*fp32", 8192),
    *(
        _forward("fwd_wide", kind, plan.num_warps, gradient=gradient, VEC=vec, SAME=gradient, BLOCK=plan.block, HELD=0)
        for plan in launch.WIDE_PLANS
        for kind, vec, gradient in (("*bf16", 1, True), ("*bf16", 8, True), ("*bf16", 1, False), ("*fp32", 4, True))
    ),
    *(
        _forward("fwd_wide", "*bf16", plan.num_warps, VEC=vec, SAME=True, BLOCK=plan.block, HELD=plan.held)
        for plan in launch.HELD_PLANS
        for vec in (1, 8)
    ),
    Compilation(
        _KERNELS["bwd"], _BF16,
        {"SMOOTH": False, "COUNTS": COUNTS, "ROWS": _PLAN.rows, "BLOCK_N": _PLAN.block_n}, _PLAN.num_warps,
    ),
)  # fmt: skip
