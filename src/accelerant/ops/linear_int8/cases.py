"""Samples, benchmarks, tolerances and compiled kernels of linear_int8."""

from __future__ import annotations

import torch

from accelerant.ops.linear_int8 import op as launch
from accelerant.ops.linear_int8.op import Int8Tile, StripTile
from accelerant.ops.registry import Benchmark, Compilation, Indices, SampleInput, specialized, tolerances


def _sample(*shape: int, bias: bool = True, dynamic: bool = False) -> SampleInput:
    """Return the sample of x (..., K) and N outputs; dynamic calls have a straight-through gradient and own tests."""
    *rows, K, N = shape
    name = "x".join(map(str, shape)) + ("" if bias else "-no bias") + ("-dynamic" if dynamic else "")
    weight = Indices((N, K), 128, -127, torch.int8)
    return SampleInput(name, ((*rows, K), weight, (N,), (N,) if bias else None), {"dynamic": dynamic})


RUNS = ("llvm",)

SAMPLES = (
    _sample(3, 4, 5), _sample(1, 1, 1), _sample(2, 3, 6, bias=False), _sample(1, 37, 9), _sample(0, 4, 5),
    _sample(3, 0, 4), _sample(4, 3, 0), _sample(5, 6), _sample(2, 3, 4, 5, bias=False), _sample(1, 64, 48),
    _sample(33, 20, 18), _sample(40, 64, 48), _sample(70, 16, 90, bias=False),
)  # fmt: skip
LARGE = (
    _sample(1, 8192, 8192), _sample(1, 4096, 14336, bias=False), _sample(1, 14336, 4096), _sample(1, 4112, 1001),
    _sample(16, 4096, 4096), _sample(5, 1040, 999), _sample(100, 2048, 1111), _sample(600, 512, 768),
    _sample(17, 1111, 999),
)  # fmt: skip
# Decoding multiplies few rows, by one layer's weight after another's.
BENCHMARKS = (
    Benchmark(_sample(1, 8192, 8192, bias=False), torch.bfloat16, 0.0184, rotated=True),
    Benchmark(_sample(1, 4096, 14336, bias=False), torch.bfloat16, rotated=True),
    Benchmark(_sample(1, 14336, 4096, bias=False), torch.bfloat16, rotated=True),
    Benchmark(_sample(16, 8192, 8192, bias=False), torch.bfloat16, rotated=True),
    Benchmark(_sample(8192, 8192, 8192, bias=False, dynamic=True), torch.bfloat16),
)

# Relative to the largest element: float32 sums of products. 16-bit dtypes round the result and, in the backward pass,
# dy times the scale before the sum; a library rounds the scaled weight.
TOLERANCES = tolerances(float64=(1e-11, 1e-12), float32=(1e-5, 1e-5), float16=(4e-3, 4e-3), bfloat16=(3e-2, 3e-2))


def _row(plan: StripTile, kind: str = "*bf16", *, bias: bool = False) -> Compilation:
    types = {"*": kind, "weight_ptr": "*i8", "scale_ptr": "*fp32", "bias_ptr": kind if bias else None}
    return specialized(launch.KERNELS["row"], types, plan.constants, plan.num_warps)


def _fwd(
    plan: Int8Tile, kind: str = "*bf16", *, scaled: bool = True, bits: bool = True, gated: bool = False,
    residual: bool = False, integers: bool = True,
) -> Compilation:  # fmt: skip
    optional = {
        "scale_ptr": "*fp32" if scaled else None, "bias_ptr": kind if scaled else None,
        "residual_ptr": kind if residual else None,
    }  # fmt: skip
    types = {"*": kind, "weight_ptr": "*i8" if integers else kind, "y_ptr": kind if scaled else "*fp32", **optional}
    constants = {"EVEN_K": True, "UPCAST": False, "BITS": bits, "GATED": gated, **plan.blocks}
    return specialized(launch.KERNELS["fwd"], types, constants, plan.num_warps, plan.stages)


def _dynamic(plan: Int8Tile, *, integers: bool = True) -> Compilation:
    types = {"*": "*fp32", "q_ptr": "*i8", "weight_ptr": "*i8", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    constants = {"EVEN_K": True, "INTEGERS": integers, **plan.blocks}
    return Compilation(launch.KERNELS["dynamic"], types, constants, plan.num_warps, plan.stages)


def _planes(plan: Int8Tile, *, gated: bool = False, residual: bool = False) -> Compilation:
    types = {"*": "*fp32", "planes_ptr": "*i8", "weight_ptr": "*i8", "y_ptr": "*bf16", "bias_ptr": None}
    types |= {"residual_ptr": "*bf16" if residual else None}
    constants = {"EVEN_K": True, "GATED": gated, **plan.blocks}
    return specialized(launch.KERNELS["planes"], types, constants, plan.num_warps, plan.stages)


def _bwd(plan: Int8Tile, kind: str = "*bf16") -> Compilation:
    types = {"*": kind, "weight_ptr": "*i8", "scale_ptr": "*fp32"}
    constants = {"UPCAST": False, "SPLIT": kind == "*fp32", **plan.blocks}
    return Compilation(launch.KERNELS["bwd"], types, constants, plan.num_warps, plan.stages)


KERNELS = (
    *map(_row, launch.STRIP_PLANS[:3]),
    _row(launch.STRIP_PLANS[0], "*fp16", bias=True),
    _row(launch.STRIP_PLANS[0], "*fp32"),
    _fwd(launch.SMALL_PLANS["fwd"], bits=False),  # by Turing, too
    _fwd(Int8Tile(64, 64, 128, 4, 4), gated=True, integers=False, bits=False),
    _fwd(Int8Tile(128, 64, 64, 8, 4), gated=True, integers=False, bits=False),
    _fwd(launch.SMALL_PLANS["fwd"], residual=True, integers=False, bits=False),
    *map(_fwd, launch.FEW_PLANS[:2]),
    *map(_fwd, launch.MATMUL_PLANS[:2]),
    _fwd(launch.MATMUL_PLANS[0], "*fp16"),
    _fwd(launch.SMALL_PLANS["fwd"], scaled=False),
    _dynamic(launch.SMALL_PLANS["dynamic"], integers=False),  # first, since the first is compiled for every target
    *map(_dynamic, (launch.SMALL_PLANS["dynamic"], *launch.DYNAMIC_PLANS[:2])),
    _planes(Int8Tile(16, 32, 128, 4, 2)),
    _planes(Int8Tile(8, 16, 512, 2, 4), residual=True),
    _planes(Int8Tile(8, 64, 256, 4, 3), gated=True),
    _planes(Int8Tile(32, 64, 128, 4, 4), gated=True),
    _planes(Int8Tile(64, 128, 128, 8, 3)),
    _planes(Int8Tile(128, 128, 128, 8, 3)),
    _planes(Int8Tile(128, 64, 128, 8, 3), gated=True),
    _bwd(launch.SMALL_PLANS["bwd"]),
    _bwd(launch.FEW_BACKWARD_PLANS[0]),
    _bwd(launch.SPLIT_PLAN, "*fp32"),
    Compilation(
        launch.KERNELS["dequantize"], {"*": "*bf16", "weight_ptr": "*i8", "scale_ptr": "*fp32"}, {"BLOCK": 4096}, 4
    ),
    Compilation(launch.KERNELS["sum"], {"*": "*fp32", "dx_ptr": "*bf16"}, {"BLOCK": 256}, 2),
)
