"""Samples, benchmarks, tolerances and compiled kernels of linear_int4."""

from __future__ import annotations

import torch

from accelerant.ops.linear_int4 import op
from accelerant.ops.linear_int8.op import Int8Tile
from accelerant.ops.registry import Benchmark, Compilation, Indices, SampleInput, Subject, specialized, tolerances

KIND = "plain"
ON_CPU = "llvm"
SMALLEST = 128
RUNS = ("torch",)


def _sample(*shape: int, zero: bool = True, bias: bool = True) -> SampleInput:
    *rows, K, N = shape
    name = "x".join(map(str, shape)) + ("" if zero else "-symmetric") + ("" if bias else "-no bias")
    groups = (N, K // 128)
    weight = Indices((N, K // 2), 256, 0, torch.uint8)
    return SampleInput(name, ((*rows, K), weight, groups, groups if zero else None, (N,) if bias else None))


SAMPLES = (
    _sample(1, 128, 1), _sample(2, 3, 384, 33, zero=False), _sample(3, 256, 5), _sample(0, 128, 4),
    _sample(40, 128, 48, bias=False), _sample(17, 640, 20), _sample(4, 128, 0),
)  # fmt: skip
LARGE = (
    _sample(1, 4096, 4096), _sample(16, 4096, 1001, zero=False), _sample(100, 2048, 1111), _sample(600, 512, 768),
    _sample(1, 14336, 4096, bias=False),
)  # fmt: skip
BENCHMARKS = (
    Benchmark(_sample(1, 4096, 14336, zero=False, bias=False), torch.bfloat16, rotated=True),
    Benchmark(_sample(1, 14336, 4096, zero=False, bias=False), torch.bfloat16, rotated=True),
    Benchmark(_sample(16, 8192, 8192, zero=False, bias=False), torch.bfloat16, rotated=True),
    Benchmark(_sample(2048, 4096, 4096, zero=False, bias=False), torch.bfloat16),
)

# Relative to the largest element, as linear_int8's; a library rounds the represented weight.
TOLERANCES = tolerances(float64=(1e-11, 1e-11), float32=(1e-5, 1e-4), float16=(4e-3, 2e-2), bfloat16=(3e-2, 0.15))
SUBJECT = Subject(op.linear_int4_reference, constants=(1,))


def _compiled(plan: Int8Tile, kind: str, dtype: torch.dtype, *, zero: bool, bits: bool) -> Compilation:
    types: dict[str, str | None] = {"*": kind, "weight_ptr": "*u8", "scale_ptr": "*fp32"}
    types |= {"zero_ptr": "*fp32" if zero else None, "bias_ptr": kind if zero else None}
    fixed = {**op.constants(plan, dtype, None), "BITS": bits}
    return specialized(op.KERNEL, types, fixed, plan.num_warps, plan.stages)


def _planes(plan: Int8Tile, *, zero: bool, bits: bool = True, gated: bool = False) -> Compilation:
    types: dict[str, str | None] = {"*": "*fp32", "planes_ptr": "*i8", "weight_ptr": "*u8", "y_ptr": "*bf16"}
    types |= {"zero_ptr": "*fp32" if zero else None, "bias_ptr": None, "residual_ptr": "*bf16" if zero else None}
    fixed = {**op.planes_constants(plan, None), "BITS": bits, "GATED": gated}
    return specialized(op.PLANES, types, fixed, plan.num_warps, plan.stages)


KERNELS = (
    # The first is compiled for every target.
    _compiled(op.FEW, "*fp16", torch.float16, zero=True, bits=False),
    _compiled(op.FEW, "*bf16", torch.bfloat16, zero=False, bits=True),
    _compiled(op.MANY, "*bf16", torch.bfloat16, zero=True, bits=True),
    _compiled(op.FEW, "*fp32", torch.float32, zero=False, bits=False),
    _planes(Int8Tile(16, 32, 1, 4, 2), zero=False, bits=False),
    _planes(Int8Tile(8, 64, 4, 4, 3), zero=False, gated=True),
    _planes(Int8Tile(8, 32, 8, 2, 2), zero=True),
    _planes(Int8Tile(16, 64, 4, 4, 3), zero=True),
    _planes(Int8Tile(64, 64, 1, 4, 3), zero=False),
    Compilation(op.DEQUANTIZE, {"*": "*fp32", "weight_ptr": "*u8", "y_ptr": "*bf16"}, {"BLOCK": 32}, 4),
)
